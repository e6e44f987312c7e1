/* sample_blocks.c: see sample_blocks.h. No state of its own.
 *
 * Prefix cache. An admitted sample begins with the longest run of cached blocks that hold what its
 * own would, short of its last token, which must be computed to sample the next, and of the first
 * prompt token whose row has still to give a log-probability (logprobs.h). A block's key has
 * the version in it, and only samples all of whose blocks that version computed put blocks there:
 * after an update that keeps the running samples' keys and values, these serve nobody else. Where
 * requests are to share nothing, their hashes begin differently (request_prepare). */
#include "infer-server/engine/sample_blocks.h"
#include <assert.h>
#include <string.h>

static void note_peak(struct sample_blocks *b)
{
    if (b->n > b->peak) b->peak = b->n;
}

bool sample_blocks_grow(struct block_manager *m, struct sample *sample, int n_tokens)
{
    struct sample_blocks *b = &sample->blocks;
    const int more = block_manager_blocks_for(m, n_tokens) - b->n;
    if (more <= 0) return true;
    if (!block_manager_allocate(m, more, b->at + b->n)) return false;
    b->n += more;
    note_peak(b);
    return true;
}

void sample_blocks_share(struct block_manager *m, struct sample *sample, const int32_t *blocks,
                         int n)
{
    struct sample_blocks *b = &sample->blocks;
    assert(b->n == 0);
    block_manager_share(m, blocks, n);
    memmove(b->at, blocks, (size_t)n * sizeof *b->at);
    b->n = n;
    const int computed = n * block_manager_block_size(m);
    sample->kv[sample->owner].computed = computed;
    if (sample_is_tandem(sample)) sample->kv[RUNNER_FROZEN].computed = computed;
    note_peak(b);
}

void sample_blocks_trim(struct block_manager *m, struct sample *sample, int n_tokens)
{
    struct sample_blocks *b = &sample->blocks;
    const int needed = block_manager_blocks_for(m, n_tokens);
    if (needed >= b->n) return;
    block_manager_drop(m, b->at + needed, b->n - needed);
    b->n = needed;
}

void sample_blocks_drop(struct block_manager *m, struct sample *sample)
{
    sample_blocks_trim(m, sample, 0);
    sample->blocks.n_cached = 0;
    memset(sample->kv, 0, sizeof sample->kv);
}

static struct block_key key_of(const struct sample *sample, int block, uint64_t version)
{
    return (struct block_key){.hash = *sample_prefix_hash(sample, block + 1), .version = version};
}

// False for want of memory.
static bool hash_next_block(struct sample *sample, int block_size)
{
    const int n = sample->blocks.n_hashed;
    int32_t tokens[BLOCK_SIZE_MAX];
    sample_tokens(sample, n * block_size, block_size, tokens);
    if (!block_hash_chain(sample_prefix_hash(sample, n), tokens, block_size, 1,
                          sample_prefix_hash(sample, n + 1)))
        return false;
    sample->blocks.n_hashed++;
    return true;
}

void sample_blocks_cache(struct block_manager *m, struct sample *sample, uint64_t version)
{
    struct sample_blocks *b = &sample->blocks;
    const struct sample_kv *kv = &sample->kv[sample->owner];
    const int block_size = block_manager_block_size(m);
    const int computed = sample_computed_by_all(sample), coming = sample->text.n_coming;
    const int there = sample_known(sample) - coming; // whose blocks have hashes
    if (kv->version == 0 || kv->version != version) return;
    for (const int n = (computed < there ? computed : there) / block_size; b->n_cached < n;
         b->n_cached++) {
        if (b->n_cached == b->n_hashed && !hash_next_block(sample, block_size)) return; // later
        const struct block_key key = key_of(sample, b->n_cached, version);
        block_manager_cache(m, b->at[b->n_cached], &key);
    }
}

int sample_blocks_find(const struct block_manager *m, struct sample *sample, uint64_t version,
                       int *ret_free)
{
    const int last = sample_known(sample) - 1, rows = request_rows_read(sample->request);
    const int most = (rows < last ? rows : last) / block_manager_block_size(m);
    int n = 0;
    *ret_free = 0;
    for (; n < most && n < sample->blocks.n_hashed; n++) {
        const struct block_key key = key_of(sample, n, version);
        const int32_t block = block_manager_find(m, &key);
        if (block < 0) break;
        sample->blocks.at[n] = block;
        *ret_free += block_manager_ref_count(m, block) == 0;
    }
    return n;
}
