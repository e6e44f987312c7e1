/* test_moment_scales.c: the scales of 8-bit moments on disk, of tensors that lie within a block of
 * memory (q, k and v biases) and so begin and end in the middle of a scale's 128 elements. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/moments.h"
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/optimizer.h"

// q, k, v biases of 160, 80, 80: v is elements 240 to 319, which end in the block after the one
// that they begin in.
enum { HIDDEN = 160 };

static void steps(struct optimizer *o, int from, int to)
{
    const struct weights *g = optimizer_grads(o, 0);
    double norm;
    for (int step = from; step <= to; step++) {
        for (int t = 0; t < g->n_tensors; t++)
            for (int64_t i = 0; i < g->tensors[t].n; i++)
                ((float *)g->base)[g->tensors[t].offset + i] =
                    0.01f * (float)((i * 7 + step * 13 + t) % 23 - 11);
        assert_ok(optimizer_prepare(o, &norm));
        assert_ok(optimizer_apply(o, 1e-3));
    }
}

TEST(scales_beyond_a_border_are_kept)
{
    const struct optimizer_config config = {0.9, 0.999, 1e-8, 0, 1, MOMENTS_8BIT, false};
    const char *folder = test_folder(), *path = test_path(folder, "state.safetensors");
    struct loaded m;
    struct optimizer *o;
    bool crosses = false;
    assert_ok(tiny_model_write(folder, HIDDEN, 1, 50, 1));
    loaded_plan(folder, DT_F32, &m);
    const struct weights *weights = m.weights;
    void *memory = weights->base;
    for (int t = 0; t < weights->n_tensors; t++) {
        const int64_t at = weights->tensors[t].offset, n = weights->tensors[t].n;
        crosses |= (at + n - 1) / MOMENT_BLOCK - at / MOMENT_BLOCK >= (n + 127) / MOMENT_BLOCK;
    }
    assert_true(crosses); // else nothing is tested
    char *middle = malloc(weights->bytes), *end = malloc(weights->bytes);
    assert_ok(optimizer_new_whole(m.dev, weights, &config, &o));
    steps(o, 1, 3);
    assert_ok(optimizer_save(o, path));
    memcpy(middle, memory, weights->bytes);
    steps(o, 4, 6);
    memcpy(end, memory, weights->bytes);
    optimizer_free(o);
    memcpy(memory, middle, weights->bytes);
    assert_ok(optimizer_new_whole(m.dev, weights, &config, &o));
    assert_ok(optimizer_load(o, path));
    steps(o, 4, 6);
    assert_memory_equal(end, memory, weights->bytes);
    optimizer_free(o);
    free(middle);
    free(end);
    loaded_close(&m);
}
