/* kv_cache.c: the book of the block pool. Owned by the engine's thread.
 *
 * Free blocks wait in a ring, and the one that has been free longest is taken first: a later prefix
 * cache can then keep the content of free blocks findable (by a hash of their tokens and the weight
 * version that computed them) for as long as possible, and needs no other order. A block number
 * that is not held, or is out of range, is a mistake in the scheduler; it would hand one block to
 * two sequences, so it ends the program (assert) rather than mix two users' texts. */
#include "infer-server/kv_cache.h"
#include <assert.h>
#include <stdlib.h>

struct kv_cache {
    int n_blocks, block_size;
    int32_t *ring; // (n_blocks) free blocks from `first` on, `n_free` of them
    int first, n_free;
    int32_t *holders; // (n_blocks)
};

enum status kv_cache_new(int n_blocks, int block_size, struct kv_cache **ret)
{
    if (n_blocks < 1 || block_size < 1)
        return status_fail(ST_INVALID, "a KV pool of %d blocks of %d tokens", n_blocks, block_size);
    struct kv_cache *c = calloc(1, sizeof *c);
    if (!c) goto no_memory;
    c->ring = malloc((size_t)n_blocks * sizeof *c->ring);
    c->holders = calloc((size_t)n_blocks, sizeof *c->holders);
    if (!c->ring || !c->holders) goto no_memory;
    c->n_blocks = c->n_free = n_blocks;
    c->block_size = block_size;
    for (int i = 0; i < n_blocks; i++) c->ring[i] = i;
    *ret = c;
    return ST_OK;
no_memory:
    kv_cache_free(c);
    return status_fail(ST_NO_MEMORY, "no memory for the book of %d KV blocks", n_blocks);
}

void kv_cache_free(struct kv_cache *c)
{
    if (!c) return;
    free(c->ring);
    free(c->holders);
    free(c);
}

int kv_cache_blocks(const struct kv_cache *c)
{
    return c->n_blocks;
}
int kv_cache_available(const struct kv_cache *c)
{
    return c->n_free;
}
int kv_cache_used(const struct kv_cache *c)
{
    return c->n_blocks - c->n_free;
}
int kv_cache_block_size(const struct kv_cache *c)
{
    return c->block_size;
}
int kv_cache_holders(const struct kv_cache *c, int32_t block)
{
    return c->holders[block];
}

int kv_cache_blocks_for(const struct kv_cache *c, int n_tokens)
{
    return (n_tokens + c->block_size - 1) / c->block_size;
}

bool kv_cache_take(struct kv_cache *c, int n, int32_t *ret_blocks)
{
    if (n > c->n_free) return false;
    for (int i = 0; i < n; i++) {
        int32_t block = c->ring[c->first];
        c->first = (c->first + 1) % c->n_blocks;
        c->n_free--;
        c->holders[block] = 1;
        ret_blocks[i] = block;
    }
    return true;
}

void kv_cache_share(struct kv_cache *c, const int32_t *blocks, int n)
{
    for (int i = 0; i < n; i++) {
        assert(blocks[i] >= 0 && blocks[i] < c->n_blocks && c->holders[blocks[i]] > 0);
        c->holders[blocks[i]]++;
    }
}

void kv_cache_drop(struct kv_cache *c, const int32_t *blocks, int n)
{
    for (int i = 0; i < n; i++) {
        assert(blocks[i] >= 0 && blocks[i] < c->n_blocks && c->holders[blocks[i]] > 0);
        if (--c->holders[blocks[i]] > 0) continue;
        c->ring[(c->first + c->n_free) % c->n_blocks] = blocks[i];
        c->n_free++;
    }
}
