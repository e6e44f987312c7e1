/* kv_cache.h: which blocks of the KV pool are free, how many sequences hold each of the others, and
 * which blocks hold what a new sequence needs (the prefix cache).
 *
 * Numbers only: the device memory behind a block number is kv_memory.h's. A block holds block_size
 * tokens of one sequence, or of several whose tokens are the same up to the block's end. A holder
 * writes only into blocks that it alone holds and that have no name. A block that is full can be
 * named by what it holds; it is found by that name until it is taken for something else, also while
 * it is free. One thread. */
#ifndef INFER_SERVER_KV_CACHE_H
#define INFER_SERVER_KV_CACHE_H

#include "common/base/status.h"
#include "infer-server/engine/block_hash.h"

struct kv_cache;

struct kv_key { // what a full block holds
    struct block_hash hash;
    uint64_t version; // of the weights that computed it and all before it
    uint64_t adapter; // that was on them; 0: none
};

enum status kv_cache_new(int n_blocks, int block_size, struct kv_cache **ret);
void kv_cache_free(struct kv_cache *c);

int kv_cache_blocks(const struct kv_cache *c);    // all of them
int kv_cache_available(const struct kv_cache *c); // free, named or not
int kv_cache_used(const struct kv_cache *c);      // a shared block counts once
int kv_cache_block_size(const struct kv_cache *c);
int kv_cache_blocks_for(const struct kv_cache *c, int n_tokens); // rounded up
int kv_cache_holders(const struct kv_cache *c, int32_t block);   // 0: free

// Takes n free blocks, one holder each, or none at all (false) where fewer are free. Nameless ones
// go first, then those that have been free longest; they lose their names.
bool kv_cache_take(struct kv_cache *c, int n, int32_t *ret_blocks);
// One more holder for each of n blocks that are held, or were found and are free.
void kv_cache_share(struct kv_cache *c, const int32_t *blocks, int n);
// One holder less for each; a block without holders is free again. The blocks of a sequence are
// given in its order: of those that become free, the last is taken again first, because what
// follows a block that is gone can never be found.
void kv_cache_drop(struct kv_cache *c, const int32_t *blocks, int n);

// Names a held block. One that has a name keeps it. Several blocks may have the same name.
void kv_cache_name(struct kv_cache *c, int32_t block, const struct kv_key *key);
// The block of that name, the one last named where there are several; -1: none. It is not held by
// the asking: kv_cache_share() it before anything is taken.
int32_t kv_cache_find(const struct kv_cache *c, const struct kv_key *key);

#endif
