/* kv_cache.c: the book of the block pool. Owned by the engine's thread.
 *
 * Free blocks stand in a doubly linked ring around a sentinel: taken from its front, so that the
 * content of the others stays findable for as long as possible (least recently used goes first). A
 * block that comes free goes to the end where it has a name, to the front where it has none. A
 * found block leaves the ring from wherever it stands.
 *
 * Names are looked up in a hash table with chains through the blocks themselves, made with the book
 * and never grown: at most every block has a name. Samples that generate the same text side by side
 * give several blocks one name; each stands in the chain, so that the name outlives the first of
 * them to be taken, and the chain is linked both ways, so that many such blocks cost nothing.
 *
 * A block number that is not held, or is out of range, is a mistake in the scheduler; it would hand
 * one block to two sequences, so it ends the program (assert) rather than mix two users' texts. */
#include "infer-server/engine/kv_cache.h"
#include "common/base/hash.h"
#include <assert.h>
#include <stdlib.h>

#define NONE (-1)

struct block {
    int32_t holders;
    int32_t before, after; // in the ring of free blocks
    bool named;
    int32_t chain_before, chain_after; // in its bucket; NONE at the ends
    struct kv_key key;
};

struct kv_cache {
    int n_blocks, block_size, n_free;
    struct block *blocks; // (n_blocks + 1) the last is the ring's sentinel
    int32_t *buckets;     // (mask + 1) first block of each chain, or NONE
    uint64_t mask;
};

// ---- the ring of free blocks -------------------------------------------------------------------

static void ring_insert(struct kv_cache *c, int32_t block, int32_t before)
{
    struct block *all = c->blocks;
    all[block].before = before;
    all[block].after = all[before].after;
    all[all[before].after].before = block;
    all[before].after = block;
    c->n_free++;
}

static void ring_remove(struct kv_cache *c, int32_t block)
{
    struct block *all = c->blocks;
    all[all[block].before].after = all[block].after;
    all[all[block].after].before = all[block].before;
    c->n_free--;
}

// ---- names -------------------------------------------------------------------------------------

// The hash is uniform as it is; versions of one text must not all meet in one bucket.
static int32_t *bucket_of(const struct kv_cache *c, const struct kv_key *key)
{
    const uint64_t spread = (key->version + key->adapter) * HASH_SPREAD;
    return &c->buckets[(key->hash.part[0] + spread) & c->mask];
}

static bool keys_equal(const struct kv_key *a, const struct kv_key *b)
{
    return a->hash.part[0] == b->hash.part[0] && a->hash.part[1] == b->hash.part[1] &&
           a->version == b->version && a->adapter == b->adapter;
}

static void forget(struct kv_cache *c, struct block *block)
{
    if (!block->named) return;
    if (block->chain_before == NONE)
        *bucket_of(c, &block->key) = block->chain_after;
    else
        c->blocks[block->chain_before].chain_after = block->chain_after;
    if (block->chain_after != NONE)
        c->blocks[block->chain_after].chain_before = block->chain_before;
    block->named = false;
}

void kv_cache_name(struct kv_cache *c, int32_t block, const struct kv_key *key)
{
    assert(block >= 0 && block < c->n_blocks && c->blocks[block].holders > 0);
    struct block *b = &c->blocks[block];
    if (b->named) return;
    int32_t *bucket = bucket_of(c, key);
    b->key = *key;
    b->named = true;
    b->chain_before = NONE;
    b->chain_after = *bucket;
    if (*bucket != NONE) c->blocks[*bucket].chain_before = block;
    *bucket = block;
}

int32_t kv_cache_find(const struct kv_cache *c, const struct kv_key *key)
{
    int32_t block = *bucket_of(c, key);
    while (block != NONE && !keys_equal(&c->blocks[block].key, key))
        block = c->blocks[block].chain_after;
    return block;
}

// ---- the book ----------------------------------------------------------------------------------

enum status kv_cache_new(int n_blocks, int block_size, struct kv_cache **ret)
{
    if (n_blocks < 1 || block_size < 1)
        return status_fail(ST_INVALID, "a KV pool of %d blocks of %d tokens", n_blocks, block_size);
    struct kv_cache *c = calloc(1, sizeof *c);
    size_t n_buckets = 1;
    while (n_buckets < (size_t)n_blocks) n_buckets *= 2;
    if (!c) goto no_memory;
    c->blocks = calloc((size_t)n_blocks + 1, sizeof *c->blocks);
    c->buckets = malloc(n_buckets * sizeof *c->buckets);
    if (!c->blocks || !c->buckets) goto no_memory;
    c->n_blocks = n_blocks;
    c->block_size = block_size;
    c->mask = n_buckets - 1;
    for (size_t i = 0; i < n_buckets; i++) c->buckets[i] = NONE;
    c->blocks[n_blocks].before = c->blocks[n_blocks].after = n_blocks;
    for (int32_t i = 0; i < n_blocks; i++) ring_insert(c, i, c->blocks[n_blocks].before);
    *ret = c;
    return ST_OK;
no_memory:
    kv_cache_free(c);
    return status_fail(ST_NO_MEMORY, "no memory for the book of %d KV blocks", n_blocks);
}

void kv_cache_free(struct kv_cache *c)
{
    if (!c) return;
    free(c->blocks);
    free(c->buckets);
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
    return c->blocks[block].holders;
}

int kv_cache_blocks_for(const struct kv_cache *c, int n_tokens)
{
    return (n_tokens + c->block_size - 1) / c->block_size;
}

bool kv_cache_take(struct kv_cache *c, int n, int32_t *ret_blocks)
{
    if (n > c->n_free) return false;
    for (int i = 0; i < n; i++) {
        const int32_t block = c->blocks[c->n_blocks].after;
        ring_remove(c, block);
        forget(c, &c->blocks[block]);
        c->blocks[block].holders = 1;
        ret_blocks[i] = block;
    }
    return true;
}

void kv_cache_share(struct kv_cache *c, const int32_t *blocks, int n)
{
    for (int i = 0; i < n; i++) {
        assert(blocks[i] >= 0 && blocks[i] < c->n_blocks);
        struct block *block = &c->blocks[blocks[i]];
        assert(block->holders > 0 || block->named);
        if (block->holders++ == 0) ring_remove(c, blocks[i]);
    }
}

void kv_cache_drop(struct kv_cache *c, const int32_t *blocks, int n)
{
    for (int i = n - 1; i >= 0; i--) {
        assert(blocks[i] >= 0 && blocks[i] < c->n_blocks);
        struct block *block = &c->blocks[blocks[i]];
        assert(block->holders > 0);
        if (--block->holders > 0) continue;
        const int32_t sentinel = c->n_blocks;
        ring_insert(c, blocks[i], block->named ? c->blocks[sentinel].before : sentinel);
    }
}
