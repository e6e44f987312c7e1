/* test_recompute.c: with RECOMPUTE_LAYER the backward pass computes neither attention nor the last
 * matmul of a layer again, whose results are kept, and gives the gradients of a tape that has all.
 */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/backward.h"

enum { VOCAB = 64, LAYERS = 3, ROWS = 14 };

static struct {
    const struct ops *ops;
    int intermediate, attentions, downs;
} counted;

static void count_attention(struct device *dev, void *out, float *lse, const void *qkv,
                            const struct batch_view *batch, const struct attn_shape *shape)
{
    counted.attentions++;
    counted.ops->attn_packed(dev, out, lse, qkv, batch, shape);
}

static void count_matmul(struct device *dev, void *y, const void *a, const void *b,
                         const void *bias, const struct matmul *shape)
{
    if (shape->trans_b && shape->k == counted.intermediate) counted.downs++;
    counted.ops->matmul(dev, y, a, b, bias, shape);
}

// The gradients, and their bytes; what was computed is in `counted`.
static float *differentiate(struct reference *r, enum recompute recompute, size_t *ret_bytes)
{
    struct model *m = NULL;
    struct tape *tape = NULL;
    struct weights *grads = NULL;
    struct backward *b = NULL;
    void *x = NULL;
    int32_t ids[ROWS];
    float dlogprobs[ROWS], logprobs[ROWS];
    for (int i = 0; i < ROWS; i++) {
        ids[i] = (i * 29 + 3) % VOCAB;
        dlogprobs[i] = 0.1f * (float)(1 + i % 5);
    }
    batch_clear(r->batch);
    assert_ok(batch_add_packed(r->batch, ids, ROWS, -1, -1, NULL));
    for (int i = 0; i < ROWS; i++) assert_ok(batch_want_row(r->batch, i));
    assert_ok(batch_commit(r->batch, 0, 0));
    assert_ok(model_new(r->dev, r->config, r->weights, ROWS, ROWS, ROWS, &m));
    assert_ok(tape_new(m, ROWS, recompute, &tape));
    assert_ok(weights_plan(r->config, DT_F32, &grads));
    assert_ok(weights_alloc(grads, r->dev));
    assert_ok(backward_new(m, grads, ROWS, ROWS, ROWS, &b));
    counted.ops = m->ops;
    counted.intermediate = r->config->layers[0].intermediate;
    counted.attentions = counted.downs = 0;
    struct ops counting = *m->ops;
    counting.attn_packed = count_attention;
    counting.matmul = count_matmul;
    m->ops = &counting;

    model_forward(m, batch_view(r->batch), NULL, tape, &x);
    assert_ok(backward_logprobs(b, NULL, r->batch, x, ids, 1.0f, logprobs, NULL));
    assert_ok(backward_run(b, r->batch, tape,
                           &(struct backward_loss){.temperature = 1.0f, .dlogprobs = dlogprobs}));
    float *ret = malloc(grads->bytes);
    assert_non_null(ret);
    device_copy_out(r->dev, ret, grads->base, grads->bytes);
    assert_ok(device_sync(r->dev));
    *ret_bytes = grads->bytes;
    backward_free(b);
    weights_free(grads);
    tape_free(r->dev, tape);
    model_free(m);
    return ret;
}

TEST(keeps_what_takes_longest)
{
    struct reference r;
    size_t bytes = 0;
    const char *folder = test_folder();
    assert_ok(tiny_model_write(folder, 32, LAYERS, VOCAB, 3));
    reference_open(folder, "cpu", &r);
    float *all = differentiate(&r, RECOMPUTE_NONE, &bytes);
    const int downs = counted.downs;
    assert_int_equal(counted.attentions, LAYERS);
    assert_true(downs >= LAYERS);
    float *again = differentiate(&r, RECOMPUTE_LAYER, &bytes);
    assert_int_equal(counted.attentions, LAYERS);
    assert_int_equal(counted.downs, downs);
    assert_memory_equal(all, again, bytes);
    free(all);
    free(again);
    reference_close(&r);
}
