/* block_hash.h: names for what a KV block holds. The keys and values of a block depend on all
 * tokens up to its end, so a block's hash is a function of the hash before it and of its own
 * tokens. */
#ifndef INFER_SERVER_BLOCK_HASH_H
#define INFER_SERVER_BLOCK_HASH_H

#include <stdbool.h>
#include <stdint.h>

struct block_hash {
    uint64_t part[2];
};

// The hashes of n consecutive blocks of block_size tokens each, the first of which follows
// `before`. False, with nothing of use in ret_hashes, for want of memory. Any thread.
bool block_hash_chain(const struct block_hash *before, const int32_t *tokens, int block_size, int n,
                      struct block_hash *ret_hashes);

#endif
