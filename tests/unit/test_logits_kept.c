/* test_logits_kept.c: where a model has room for all logits of a batch the head's forward pass is
 * not done again, and log-probabilities and gradients have the same bits as where the logits exist
 * a chunk at a time. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/backward.h"

enum { VOCAB = 64, CHUNK = 4, FIRST = 9, SECOND = 6, ROWS = FIRST + SECOND };

struct result {
    float logprobs[ROWS], entropy[ROWS];
    float *grads;
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

// logits: rows that the model has room for.
static void differentiate(struct reference *r, int logits, struct result *ret)
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
    assert_ok(tape_new(m, ROWS, RECOMPUTE_NONE, &tape));
    assert_ok(weights_plan(r->config, DT_F32, &grads));
    assert_ok(weights_alloc(grads, r->dev));
    assert_ok(backward_new(m, grads, ROWS, ROWS, CHUNK, &b));

    model_forward(m, batch_view(r->batch), NULL, tape, &x);
    assert_ok(backward_logprobs(b, NULL, r->batch, x, targets, 0.7f, ret->logprobs, ret->entropy));
    if (logits < ROWS) device_fill(r->dev, m->logits, 0xff, (size_t)logits * VOCAB * sizeof(float));
    assert_ok(backward_run(b, r->batch, tape,
                           &(struct backward_loss){.temperature = 0.7f, .dlogprobs = dlogprobs}));
    ret->bytes = grads->bytes;
    ret->grads = malloc(grads->bytes);
    assert_non_null(ret->grads);
    device_copy_out(r->dev, ret->grads, grads->base, grads->bytes);
    assert_ok(device_sync(r->dev));

    backward_free(b);
    weights_free(grads);
    tape_free(r->dev, tape);
    model_free(m);
}

TEST(kept_or_computed_twice)
{
    struct reference r;
    struct result chunked, kept;
    const char *folder = test_folder();
    assert_ok(tiny_model_write(folder, 32, 2, VOCAB, 3));
    reference_open(folder, "cpu", &r);
    differentiate(&r, CHUNK, &chunked);
    differentiate(&r, ROWS, &kept);
    assert_memory_equal(chunked.logprobs, kept.logprobs, sizeof kept.logprobs);
    assert_memory_equal(chunked.entropy, kept.entropy, sizeof kept.entropy);
    assert_int_equal(chunked.bytes, kept.bytes);
    assert_memory_equal(chunked.grads, kept.grads, kept.bytes);
    free(chunked.grads);
    free(kept.grads);
    reference_close(&r);
}
