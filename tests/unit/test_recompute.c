/* test_recompute.c: what is kept for the backward pass and what is computed again, with the same
 * bits either way. With RECOMPUTE_LAYER it computes neither attention nor the last matmul of a
 * layer again, whose results are kept; and where a model has room for all logits of a batch the
 * head's forward pass is not done again. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/backward.h"

enum { VOCAB = 64, LAYERS = 3, CHUNK = 4, FIRST = 9, SECOND = 6, ROWS = FIRST + SECOND };

static struct {
    const struct ops *ops;
    int intermediate, attentions, downs;
} counted;

static void count_attention(struct device *dev, void *out, float *lse, const void *qkv,
                            const struct kv_view *kv, int layer, const struct batch_view *batch,
                            const struct attn_shape *shape)
{
    counted.attentions++;
    counted.ops->attn(dev, out, lse, qkv, kv, layer, batch, shape);
}

static void count_matmul(struct device *dev, void *y, const void *a, const void *b,
                         const void *bias, const struct matmul *shape)
{
    if (shape->trans_b && shape->k == counted.intermediate) counted.downs++;
    counted.ops->matmul(dev, y, a, b, bias, shape);
}

struct result {
    float logprobs[ROWS], entropy[ROWS];
    const float *grads;
    size_t bytes;
};

// Two sequences, of every row of which a target is wanted.
static void fill(struct reference *r, int32_t *targets)
{
    int32_t ids[ROWS];
    for (int i = 0; i < ROWS; i++) {
        ids[i] = (i * 29 + 3) % VOCAB;
        targets[i] = (i * 17 + 5) % VOCAB;
    }
    batch_clear(r->batch);
    assert_ok(batch_add_packed(r->batch, ids, FIRST, -1, -1, NULL));
    assert_ok(batch_add_packed(r->batch, ids + FIRST, SECOND, -1, -1, NULL));
    for (int i = 0; i < ROWS; i++) assert_ok(batch_want_row(r->batch, i));
    assert_ok(batch_commit(r->batch, 0, 0));
}

// logits: rows that the model has room for. What was computed is in `counted`.
static void differentiate(struct reference *r, enum recompute recompute, int logits,
                          struct result *ret)
{
    struct model *m = NULL;
    struct tape *tape = NULL;
    struct weights *grads = NULL;
    struct backward *b = NULL;
    void *x = NULL;
    int32_t targets[ROWS];
    float dlogprobs[ROWS];
    fill(r, targets);
    for (int i = 0; i < ROWS; i++) dlogprobs[i] = 0.1f * (float)(1 + i % 5);
    assert_ok(model_new(r->dev, r->config, r->weights, ROWS, logits, ROWS, &m));
    assert_ok(tape_new(m, ROWS, recompute, &tape));
    assert_ok(weights_plan(r->config, DT_F32, &grads));
    assert_ok(weights_alloc(grads, r->dev));
    assert_ok(backward_new(m, grads, ROWS, ROWS, CHUNK, &b));
    counted.ops = m->ops;
    counted.intermediate = r->config->layers[0].intermediate;
    counted.attentions = counted.downs = 0;
    struct ops counting = *m->ops;
    counting.attn = count_attention;
    counting.matmul = count_matmul;
    m->ops = &counting;

    model_forward(m, batch_view(r->batch), NULL, tape, &x);
    assert_ok(backward_logprobs(b, NULL, r->batch, x, targets, 0.7f, ret->logprobs, ret->entropy));
    if (logits < ROWS) device_fill(r->dev, m->logits, 0xff, (size_t)logits * VOCAB * sizeof(float));
    assert_ok(backward_run(b, r->batch, tape,
                           &(struct backward_loss){.temperature = 0.7f, .dlogprobs = dlogprobs}));
    assert_ok(device_sync(r->dev));
    ret->bytes = grads->bytes;
    ret->grads = test_copy(grads->base, grads->bytes); // of the CPU

    backward_free(b);
    weights_free(grads);
    tape_free(r->dev, tape);
    model_free(m);
}

static void are_the_same(const struct result *a, const struct result *b)
{
    assert_memory_equal(a->logprobs, b->logprobs, sizeof a->logprobs);
    assert_memory_equal(a->entropy, b->entropy, sizeof a->entropy);
    assert_int_equal(a->bytes, b->bytes);
    assert_memory_equal(a->grads, b->grads, a->bytes);
}

TEST(keeps_what_takes_longest)
{
    struct reference *r = reference_of(tiny_folder(32, LAYERS, VOCAB, 3));
    struct result all, again;
    differentiate(r, RECOMPUTE_NONE, ROWS, &all);
    const int downs = counted.downs;
    assert_int_equal(counted.attentions, LAYERS);
    assert_true(downs >= LAYERS);
    differentiate(r, RECOMPUTE_LAYER, ROWS, &again);
    assert_int_equal(counted.attentions, LAYERS);
    assert_int_equal(counted.downs, downs);
    are_the_same(&all, &again);
}

TEST(logits_kept_or_computed_twice)
{
    struct reference *r = reference_of(tiny_folder(32, LAYERS, VOCAB, 3));
    struct result chunked, kept;
    differentiate(r, RECOMPUTE_NONE, CHUNK, &chunked);
    differentiate(r, RECOMPUTE_NONE, ROWS, &kept);
    are_the_same(&chunked, &kept);
}
