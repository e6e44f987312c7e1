/* test_kv_memory.c: the KV pool of a model whose layers have keys of different widths: what is
 * decoded over it, and what a copy of a block takes along. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/kv_memory.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"

#define VOCAB  48
#define PROMPT 11
#define NEW    14

// Three layers of 2 x 16, 4 x 16 and 1 x 32 elements a key; no folder has such, so the weights are
// random ones.
static void open_uneven(struct reference *r)
{
    const char *folder = tiny_folder(64, 3, VOCAB, 7);
    memset(r, 0, sizeof *r);
    assert_ok(device_open("cpu", &r->dev));
    assert_ok(model_config_load(folder, &r->config));
    r->config->layers[1].n_kv_heads = 4;
    r->config->layers[2].n_kv_heads = 1;
    r->config->layers[2].head_dim = 32;
    assert_ok(weights_plan(r->config, DT_F32, &r->weights));
    assert_ok(weights_alloc(r->weights, r->dev));
    assert_ok(weights_init_random(r->weights, r->dev, 3));
    assert_ok(model_new(r->dev, r->config, r->weights, 64, 64, 64, &r->model));
    assert_ok(batch_new(r->dev, 64, 8, 16, 64, &r->batch));
}

// Keys and values in e4m3, and a scale for each of a token's heads.
static void open_uneven_in_e4m3(struct reference *r)
{
    open_uneven(r);
    r->config->kv_cache = KV_CACHE_FP8;
}

static int likeliest(const float *row)
{
    int best = 0;
    for (int i = 1; i < VOCAB; i++)
        if (row[i] > row[best]) best = i;
    return best;
}

static void decode_as_without_a_cache(void (*open)(struct reference *r))
{
    SCOPED(reference_close) struct reference r;
    int32_t ids[PROMPT + NEW], want[NEW];
    float logits[(PROMPT + NEW) * VOCAB];
    open(&r);
    for (int i = 0; i < PROMPT; i++) ids[i] = (5 * i + 2) % VOCAB;
    reference_greedy(&r, ids, PROMPT, NEW, ids + PROMPT);
    reference_logits(&r, ids, PROMPT + NEW, logits);
    for (int i = 0; i < NEW; i++) want[i] = likeliest(logits + (PROMPT - 1 + i) * VOCAB);
    assert_memory_equal(ids + PROMPT, want, sizeof want);
    bool varies = false;
    for (int i = 1; i < NEW; i++) varies |= want[i] != want[0];
    assert_true(varies);
}

TEST(decodes_as_without_a_cache)
{
    decode_as_without_a_cache(open_uneven);
    decode_as_without_a_cache(open_uneven_in_e4m3);
}

// In every layer the block `to`, and nothing else, becomes what `from` is.
TEST(copies_one_block)
{
    enum { BLOCKS = 5, BLOCK = 4, FROM = 1, TO = 3 };
    SCOPED(reference_close) struct reference r;
    struct kv_memory kv;
    open_uneven(&r);
    assert_ok(kv_memory_alloc(&kv, r.dev, r.config, DT_F32, BLOCK, BLOCKS, 0));
    const int64_t per_block = kv_memory_block_bytes(r.config, DT_F32, BLOCK) / 2 / 4;
    assert_int_equal(per_block, BLOCK * (2 * 16 + 4 * 16 + 1 * 32));
    const size_t n = (size_t)per_block * BLOCKS;
    float *pool = test_keep(malloc(n * sizeof *pool));
    assert_non_null(pool);
    for (size_t i = 0; i < n; i++) pool[i] = (float)i;
    device_copy_in(r.dev, kv.view.k, pool, n * sizeof *pool);
    device_copy_in(r.dev, kv.view.v, pool, n * sizeof *pool);
    kv_memory_copy_block(&kv, FROM, TO);
    for (int l = 0; l < 3; l++) {
        const struct kv_layer *layer = &kv.view.layers[l];
        const int block = BLOCK * layer->width;
        for (int i = 0; i < block; i++)
            pool[layer->offset + TO * block + i] = pool[layer->offset + FROM * block + i];
    }
    float *copied = test_keep(malloc(n * sizeof *copied));
    assert_non_null(copied);
    device_copy_out(r.dev, copied, kv.view.k, n * sizeof *copied);
    assert_ok(device_sync(r.dev));
    assert_memory_equal(copied, pool, n * sizeof *pool);
    device_copy_out(r.dev, copied, kv.view.v, n * sizeof *copied);
    assert_ok(device_sync(r.dev));
    assert_memory_equal(copied, pool, n * sizeof *pool);
    kv_memory_release(&kv);
}

// A block is half as large and the scales, and a copy takes them along.
TEST(copies_one_block_in_e4m3)
{
    enum { BLOCKS = 5, BLOCK = 4, FROM = 1, TO = 3, HEADS = 2 + 4 + 1, PER_BLOCK = BLOCK * 128 };
    SCOPED(reference_close) struct reference r;
    struct kv_memory kv;
    uint8_t pool[BLOCKS * PER_BLOCK], copied[sizeof pool];
    int8_t scales[BLOCKS * BLOCK * HEADS * KV_SCALES], copied_scales[sizeof scales];
    open_uneven_in_e4m3(&r);
    assert_ok(kv_memory_alloc(&kv, r.dev, r.config, DT_F32, BLOCK, BLOCKS, 0));
    assert_int_equal(kv.view.dt, DT_E4M3);
    assert_int_equal(kv_memory_block_bytes(r.config, DT_F32, BLOCK) * BLOCKS,
                     2 * sizeof pool + sizeof scales);
    for (size_t i = 0; i < sizeof pool; i++) pool[i] = (uint8_t)(i * 7);
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (int8_t)i;
    device_copy_in(r.dev, kv.view.k, pool, sizeof pool);
    device_copy_in(r.dev, kv.view.v, pool, sizeof pool);
    device_copy_in(r.dev, kv.view.scales, scales, sizeof scales);
    kv_memory_copy_block(&kv, FROM, TO);
    for (int l = 0; l < 3; l++) {
        const struct kv_layer *layer = &kv.view.layers[l];
        const int block = BLOCK * layer->width;
        const int own = BLOCK * r.config->layers[l].n_kv_heads * KV_SCALES;
        memcpy(pool + layer->offset + TO * block, pool + layer->offset + FROM * block,
               (size_t)block);
        memcpy(scales + layer->scales + TO * own, scales + layer->scales + FROM * own, (size_t)own);
    }
    device_copy_out(r.dev, copied, kv.view.k, sizeof copied);
    assert_memory_equal(copied, pool, sizeof pool);
    device_copy_out(r.dev, copied, kv.view.v, sizeof copied);
    assert_memory_equal(copied, pool, sizeof pool);
    device_copy_out(r.dev, copied_scales, kv.view.scales, sizeof copied_scales);
    assert_ok(device_sync(r.dev));
    assert_memory_equal(copied_scales, scales, sizeof scales);
    kv_memory_release(&kv);
}
