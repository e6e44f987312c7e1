/* block_manager.c: owns the list of KV blocks and who references them. The engine's thread.
 *
 * Free blocks stand in a doubly linked ring around a sentinel: allocated from its front, so that
 * the content of the others stays findable for as long as possible (least recently used goes
 * first). A block that comes free goes to the end where it is cached, to the front where it is not.
 * A found block leaves the ring from wherever it stands.
 *
 * Cached blocks are looked up in a hash table with chains through the blocks themselves, made with
 * the manager and never grown: at most every block is cached. Samples that generate the same text
 * side by side give several blocks one key; each stands in the chain, so that the key outlives the
 * first of them to be allocated anew, and the chain is linked both ways, so that many such blocks
 * cost nothing.
 *
 * The hash of a block: SHA-256 cut to 128 bits, since a hit is trusted without comparing tokens: a
 * request that found another text's blocks would answer from them. To hit the blocks of somebody
 * else's prompt without knowing it takes a second preimage, 2^128 tries. The 2^64 of a collision
 * buy only two prompts of one's own that are taken for each other.
 *
 * A block number that is not in use, or is out of range, is a mistake in the scheduler; it would
 * give one block to two sequences, so it ends the program (assert) rather than mix two users'
 * texts. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/block_manager.h"
#include "common/base/hash.h"
#include <assert.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#define NONE (-1)

struct block {
    int32_t ref_count;
    int32_t before, after; // in the ring of free blocks
    bool cached;
    int32_t chain_before, chain_after; // in its bucket; NONE at the ends
    struct block_key key;
};

struct block_manager {
    int n_blocks, block_size, n_free;
    struct block *blocks; // (n_blocks + 1) the last is the ring's sentinel
    int32_t *buckets;     // (mask + 1) first block of each chain, or NONE
    uint64_t mask;
};

// ---- the ring of free blocks -------------------------------------------------------------------

static void ring_insert(struct block_manager *m, int32_t block, int32_t before)
{
    struct block *all = m->blocks;
    all[block].before = before;
    all[block].after = all[before].after;
    all[all[before].after].before = block;
    all[before].after = block;
    m->n_free++;
}

static void ring_remove(struct block_manager *m, int32_t block)
{
    struct block *all = m->blocks;
    all[all[block].before].after = all[block].after;
    all[all[block].after].before = all[block].before;
    m->n_free--;
}

// ---- the hash table ----------------------------------------------------------------------------

bool block_hash_chain(const struct block_hash *before, const int32_t *tokens, int block_size, int n,
                      struct block_hash *ret_hashes)
{
    const EVP_MD *sha256 = EVP_sha256();
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    bool ok = context != NULL;
    for (int i = 0; i < n && ok; i++) {
        unsigned char digest[EVP_MAX_MD_SIZE];
        // The method is looked up once: for blocks of 16 tokens that takes longer than the hash.
        ok = EVP_DigestInit_ex(context, i == 0 ? sha256 : NULL, NULL) &&
             EVP_DigestUpdate(context, before, sizeof *before) &&
             EVP_DigestUpdate(context, tokens, (size_t)block_size * sizeof *tokens) &&
             EVP_DigestFinal_ex(context, digest, NULL);
        if (!ok) break;
        memcpy(&ret_hashes[i], digest, sizeof *ret_hashes);
        before = &ret_hashes[i];
        tokens += block_size;
    }
    EVP_MD_CTX_free(context);
    return ok;
}

// The hash is uniform as it is; versions of one text must not all meet in one bucket.
static int32_t *bucket_of(const struct block_manager *m, const struct block_key *key)
{
    const uint64_t spread = (key->version + key->adapter) * HASH_SPREAD;
    return &m->buckets[(key->hash.part[0] + spread) & m->mask];
}

static void forget(struct block_manager *m, struct block *block)
{
    if (!block->cached) return;
    if (block->chain_before == NONE)
        *bucket_of(m, &block->key) = block->chain_after;
    else
        m->blocks[block->chain_before].chain_after = block->chain_after;
    if (block->chain_after != NONE)
        m->blocks[block->chain_after].chain_before = block->chain_before;
    block->cached = false;
}

void block_manager_cache(struct block_manager *m, int32_t block, const struct block_key *key)
{
    assert(block >= 0 && block < m->n_blocks && m->blocks[block].ref_count > 0);
    struct block *b = &m->blocks[block];
    if (b->cached) return;
    int32_t *bucket = bucket_of(m, key);
    b->key = *key;
    b->cached = true;
    b->chain_before = NONE;
    b->chain_after = *bucket;
    if (*bucket != NONE) m->blocks[*bucket].chain_before = block;
    *bucket = block;
}

int32_t block_manager_find(const struct block_manager *m, const struct block_key *key)
{
    int32_t block = *bucket_of(m, key);
    for (; block != NONE; block = m->blocks[block].chain_after) {
        const struct block_key *k = &m->blocks[block].key;
        if (k->hash.part[0] == key->hash.part[0] && k->hash.part[1] == key->hash.part[1] &&
            k->version == key->version && k->adapter == key->adapter)
            break;
    }
    return block;
}

// ---- blocks ------------------------------------------------------------------------------------

enum status block_manager_new(int n_blocks, int block_size, struct block_manager **ret)
{
    if (n_blocks < 1 || block_size < 1)
        return status_fail(ST_INVALID, "a KV pool of %d blocks of %d tokens", n_blocks, block_size);
    struct block_manager *m = calloc(1, sizeof *m);
    size_t n_buckets = 1;
    while (n_buckets < (size_t)n_blocks) n_buckets *= 2;
    if (!m) goto no_memory;
    m->blocks = calloc((size_t)n_blocks + 1, sizeof *m->blocks);
    m->buckets = malloc(n_buckets * sizeof *m->buckets);
    if (!m->blocks || !m->buckets) goto no_memory;
    m->n_blocks = n_blocks;
    m->block_size = block_size;
    m->mask = n_buckets - 1;
    for (size_t i = 0; i < n_buckets; i++) m->buckets[i] = NONE;
    m->blocks[n_blocks].before = m->blocks[n_blocks].after = n_blocks;
    for (int32_t i = 0; i < n_blocks; i++) ring_insert(m, i, m->blocks[n_blocks].before);
    *ret = m;
    return ST_OK;
no_memory:
    block_manager_free(m);
    return status_fail(ST_NO_MEMORY, "no memory to manage %d KV blocks", n_blocks);
}

void block_manager_free(struct block_manager *m)
{
    if (!m) return;
    free(m->blocks);
    free(m->buckets);
    free(m);
}

int block_manager_available(const struct block_manager *m)
{
    return m->n_free;
}
int block_manager_used(const struct block_manager *m)
{
    return m->n_blocks - m->n_free;
}
int block_manager_block_size(const struct block_manager *m)
{
    return m->block_size;
}
int block_manager_ref_count(const struct block_manager *m, int32_t block)
{
    return m->blocks[block].ref_count;
}

int block_manager_blocks_for(const struct block_manager *m, int n_tokens)
{
    return (n_tokens + m->block_size - 1) / m->block_size;
}

bool block_manager_allocate(struct block_manager *m, int n, int32_t *ret_blocks)
{
    if (n > m->n_free) return false;
    for (int i = 0; i < n; i++) {
        const int32_t block = m->blocks[m->n_blocks].after;
        ring_remove(m, block);
        forget(m, &m->blocks[block]);
        m->blocks[block].ref_count = 1;
        ret_blocks[i] = block;
    }
    return true;
}

void block_manager_share(struct block_manager *m, const int32_t *blocks, int n)
{
    for (int i = 0; i < n; i++) {
        assert(blocks[i] >= 0 && blocks[i] < m->n_blocks);
        struct block *block = &m->blocks[blocks[i]];
        assert(block->ref_count > 0 || block->cached);
        if (block->ref_count++ == 0) ring_remove(m, blocks[i]);
    }
}

void block_manager_drop(struct block_manager *m, const int32_t *blocks, int n)
{
    for (int i = n - 1; i >= 0; i--) {
        assert(blocks[i] >= 0 && blocks[i] < m->n_blocks);
        struct block *block = &m->blocks[blocks[i]];
        assert(block->ref_count > 0);
        if (--block->ref_count > 0) continue;
        const int32_t sentinel = m->n_blocks;
        ring_insert(m, blocks[i], block->cached ? m->blocks[sentinel].before : sentinel);
    }
}
