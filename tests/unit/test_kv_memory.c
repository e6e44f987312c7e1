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

static int likeliest(const float *row)
{
    int best = 0;
    for (int i = 1; i < VOCAB; i++)
        if (row[i] > row[best]) best = i;
    return best;
}

TEST(decodes_as_without_a_cache)
{
    SCOPED(reference_close) struct reference r;
    int32_t ids[PROMPT + NEW], want[NEW];
    float logits[(PROMPT + NEW) * VOCAB];
    open_uneven(&r);
    for (int i = 0; i < PROMPT; i++) ids[i] = (5 * i + 2) % VOCAB;
    reference_greedy(&r, ids, PROMPT, NEW, ids + PROMPT);
    reference_logits(&r, ids, PROMPT + NEW, logits);
    for (int i = 0; i < NEW; i++) want[i] = likeliest(logits + (PROMPT - 1 + i) * VOCAB);
    assert_memory_equal(ids + PROMPT, want, sizeof want);
    bool varies = false;
    for (int i = 1; i < NEW; i++) varies |= want[i] != want[0];
    assert_true(varies);
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
