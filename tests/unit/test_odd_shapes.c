/* test_odd_shapes.c: configs that no published folder has and that are still taken: an MLP narrower
 * than the heads are many, experts with biases. Run it under the address sanitizer too. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/model.h"
#include "tests/support/loaded.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"

#define TOKENS 24

// 16 heads of 16: the log-sum-exp of a row would take more than the MLP's rows, but outside of
// training nobody asks for it.
static const char *narrow_model(int intermediate)
{
    const char *folder = test_folder();
    const struct tiny_model shape = {.hidden = 256,
                                     .layers = 2,
                                     .vocab = 64,
                                     .intermediate = intermediate,
                                     .eos_id = -1,
                                     .seed = 5};
    assert_ok(tiny_model_write_as(folder, &shape));
    return folder;
}

static size_t scratch_of(const struct reference *r, int tokens)
{
    struct model *m;
    assert_ok(model_new(r->dev, r->config, r->weights, tokens, 1, tokens, &m));
    size_t bytes = m->scratch_bytes;
    model_free(m);
    return bytes;
}

TEST(mlp_narrower_than_heads)
{
    int32_t ids[TOKENS];
    float *logits = test_keep(calloc((size_t)TOKENS * 64, sizeof *logits));
    struct model *exact;
    assert_non_null(logits);
    for (int i = 0; i < TOKENS; i++) ids[i] = (7 * i + 3) % 64;
    struct reference *r = reference_of(narrow_model(2));
    struct reference *at_least = reference_of(narrow_model(8));
    assert_int_equal(r->config->layers[0].n_heads, 16);
    // of the two `gate_up`, (tokens, 2 intermediate), and `act`, (tokens, intermediate), differ
    assert_int_equal(scratch_of(at_least, TOKENS) - scratch_of(r, TOKENS),
                     (size_t)TOKENS * 3 * (8 - 2) * sizeof(float));
    // scratch for these rows and no more, so that the sanitizer sees a row beyond it
    assert_ok(model_new(r->dev, r->config, r->weights, TOKENS, TOKENS, TOKENS, &exact));
    model_free(r->model);
    r->model = exact;
    reference_logits(r, ids, TOKENS, logits);
    for (int i = 0; i < TOKENS * 64; i++) assert_true(isfinite(logits[i]));
}

// Mixtral's block as if its experts had biases.
TEST(experts_with_biases)
{
    struct weights *w;
    struct model_config *config = config_of(test_golden("mixtral-6x3"));
    config->block |= MLP_BIAS;
    for (int l = 0; l < config->n_layers; l++) config->layers[l].moe.n_experts = 64;
    assert_ok(weights_plan(config, DT_F32, &w));
    // embedding and final norm; of a layer: two norms, q, k, v, o, router, and six an expert
    assert_int_equal(w->n_tensors, 2 + !config->tie_embeddings + config->n_layers * (7 + 6 * 64));
    const struct weight_tensor *t =
        weights_find(w, "model.layers.1.block_sparse_moe.experts.63.w2.bias");
    assert_non_null(t);
    assert_int_equal(t->n, config->hidden);
    assert_non_null(weights_find(w, "model.layers.0.block_sparse_moe.experts.0.w2.bias"));
    for (int i = 1; i < w->n_tensors; i++)
        assert_true(w->tensors[i].offset >= w->tensors[i - 1].offset + w->tensors[i - 1].n);
    weights_free(w);
}
