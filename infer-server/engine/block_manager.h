/* block_manager.h: which blocks of the KV pools are free, how many sequences reference each of the
 * others, and which are cached: hold what a new sequence needs (the prefix cache).
 *
 * Numbers only: the device memory behind a block number is kv_memory.h's, once for each runner. A
 * block holds block_size tokens of one sequence, or of several whose tokens are the same up to the
 * block's end. A sequence writes only into blocks that it alone references and that are not cached.
 * A block that is full can be cached by the hash of what it holds; it is found by that until it is
 * allocated for something else, also while it is free. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_BLOCK_MANAGER_H
#define INFER_SERVER_BLOCK_MANAGER_H

#include "common/base/status.h"
#include <stdbool.h>
#include <stdint.h>

struct block_manager;

#define BLOCK_SIZE_MAX 1024 // tokens

// The keys and values of a block depend on all tokens up to its end: its hash is a function of the
// hash before it and of its own tokens.
struct block_hash {
    uint64_t part[2];
};
// The hashes of n consecutive blocks of block_size tokens each, the first of which follows
// `before`. False, with nothing of use in ret_hashes, for want of memory. Any thread.
bool block_hash_chain(const struct block_hash *before, const int32_t *tokens, int block_size, int n,
                      struct block_hash *ret_hashes);

struct block_key { // what a full block holds
    struct block_hash hash;
    uint64_t version; // of the weights that computed it and all before it
    uint64_t adapter; // that was on them; 0: none
};

enum status block_manager_new(int n_blocks, int block_size, struct block_manager **ret);
void block_manager_free(struct block_manager *m);

int block_manager_available(const struct block_manager *m); // free, cached or not
int block_manager_used(const struct block_manager *m);      // a shared block counts once
int block_manager_block_size(const struct block_manager *m);
int block_manager_blocks_for(const struct block_manager *m, int n_tokens); // rounded up
int block_manager_ref_count(const struct block_manager *m, int32_t block); // 0: free

// Allocates n free blocks, one reference each, or none at all (false) where fewer are free. Those
// that are not cached go first, then those that have been free longest; they are cached no more.
bool block_manager_allocate(struct block_manager *m, int n, int32_t *ret_blocks);
// One more reference to each of n blocks that are in use, or were found and are free.
void block_manager_share(struct block_manager *m, const int32_t *blocks, int n);
// One reference less to each; a block without any is free again. The blocks of a sequence are given
// in its order: of those that become free, the last is allocated again first, because what follows
// a block that is gone can never be found.
void block_manager_drop(struct block_manager *m, const int32_t *blocks, int n);

// Caches a block in use. One that is cached keeps its key. Several blocks may have the same key.
void block_manager_cache(struct block_manager *m, int32_t block, const struct block_key *key);
// The block of that key, the one last cached where there are several; -1: none. The asking does not
// reference it: block_manager_share() it before anything is allocated.
int32_t block_manager_find(const struct block_manager *m, const struct block_key *key);

#endif
