/* kv_cache.h: which blocks of the KV pool are free, and how many sequences hold each of the others.
 *
 * Numbers only: the device memory behind a block number is kv_memory.h's. A block holds block_size
 * tokens of one sequence, or of several whose tokens are the same up to the block's end (the
 * samples of a group share their prompt's full blocks). A holder writes only into blocks that it
 * alone holds. One thread. */
#ifndef INFER_SERVER_KV_CACHE_H
#define INFER_SERVER_KV_CACHE_H

#include "common/base/status.h"
#include <stdint.h>

struct kv_cache;

enum status kv_cache_new(int n_blocks, int block_size, struct kv_cache **ret);
void kv_cache_free(struct kv_cache *c);

int kv_cache_blocks(const struct kv_cache *c); // all of them
int kv_cache_available(const struct kv_cache *c);
int kv_cache_used(const struct kv_cache *c); // a shared block counts once
int kv_cache_block_size(const struct kv_cache *c);
int kv_cache_blocks_for(const struct kv_cache *c, int n_tokens); // rounded up
int kv_cache_holders(const struct kv_cache *c, int32_t block);

// Takes n free blocks, one holder each, or none at all (false) where fewer are free.
bool kv_cache_take(struct kv_cache *c, int n, int32_t *ret_blocks);
// One more holder for each of n held blocks.
void kv_cache_share(struct kv_cache *c, const int32_t *blocks, int n);
// One holder less for each; a block without holders is free again.
void kv_cache_drop(struct kv_cache *c, const int32_t *blocks, int n);

#endif
