/* test_gradients_add.c: training in the pieces that a client gives it: gradients that add up until
 * a step, several targets of one token, AdamW's settings another at every step, and an optimizer
 * that begins anew. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/learning.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"

#define VOCAB  64
#define DATUMS 3
#define TOKENS 7
#define EACH   3 // targets of a token

static struct learning *model(void)
{
    struct learning *m =
        learning_of(&(struct learning_setting){.folder = tiny_folder(32, 2, VOCAB, 3),
                                               .config = {.optimizer = {.beta2 = 0.95},
                                                          .token_budget = 64,
                                                          .logits_chunk = 5,
                                                          .max_seqs = 128,
                                                          .max_context = 32}});
    optimizer_clear_grads(learning_optimizer(m));
    return m;
}

struct step { // datums as cw-trainer serve gives them: a token, and what follows it
    int32_t tokens[DATUMS][TOKENS], targets[DATUMS][TOKENS * EACH];
    struct pack_completion completions[DATUMS];
    struct pack_group groups[DATUMS];
};

static void make_step(struct step *s, int each)
{
    struct rng r;
    rng_init(&r, 9, 0);
    for (int i = 0; i < DATUMS; i++) {
        for (int t = 0; t < TOKENS; t++)
            s->tokens[i][t] = (int32_t)(rng_uniform(&r) * VOCAB) % VOCAB;
        for (int t = 0; t < TOKENS * EACH; t++)
            s->targets[i][t] = (int32_t)(rng_uniform(&r) * VOCAB) % VOCAB;
        s->completions[i] = (struct pack_completion){
            .ids = s->tokens[i] + 1, .n = TOKENS, .targets = s->targets[i], .targets_each = each};
        s->groups[i] = (struct pack_group){
            .prompt = s->tokens[i], .n_prompt = 1, .completions = &s->completions[i], .n = 1};
    }
}

struct seen {
    float logprobs[DATUMS * TOKENS * EACH];
    int n;
};

// Another weight for each target of a datum.
static void weighted(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct seen *seen = context;
    for (int s = 0; s < rows->mb->n_seqs; s++)
        for (int i = rows->mb->first[s], k = 0; i < rows->mb->first[s + 1]; i++, k++) {
            seen->logprobs[seen->n++] = rows->logprobs[i];
            ret_dlogprobs[i] = 0.1f * (float)(1 + k % 5) - 0.2f;
        }
}

// Each datum of its own, in a row: the sum of all, and to the bit what they are in two requests.
TEST(gradients_add_up)
{
    struct learning *at_once = model(), *apart = model(), *again = model();
    const int64_t n = at_once->policy.weights->n_elements;
    struct seen a = {0}, b = {0}, c = {0};
    struct step s;
    make_step(&s, 1);
    assert_ok(learner_run(at_once->learner, PASS_STEP, s.groups, DATUMS, weighted, &a, NULL));
    for (int i = 0; i < DATUMS; i++)
        assert_ok(learner_run(apart->learner, PASS_GRADIENTS, &s.groups[i], 1, weighted, &b, NULL));
    assert_memory_equal(a.logprobs, b.logprobs, DATUMS * TOKENS * sizeof(float));
    assert_same_gradients(learning_gradients(at_once), learning_gradients(apart), n, 1e-5);
    // what was there before goes with PASS_STEP, and only then
    assert_ok(learner_run(again->learner, PASS_GRADIENTS, s.groups, DATUMS, weighted, &c, NULL));
    assert_ok(learner_run(again->learner, PASS_STEP, s.groups, DATUMS, weighted, &c, NULL));
    assert_memory_equal(learning_gradients(again), learning_gradients(at_once),
                        (size_t)n * sizeof(float));
}

// A pass with all targets of each token is the passes with one of them, added.
TEST(several_targets)
{
    struct learning *wide = model(), *narrow = model();
    struct seen all = {0};
    struct step s, one;
    make_step(&s, EACH);
    assert_ok(learner_run(wide->learner, PASS_STEP, s.groups, DATUMS, weighted, &all, NULL));
    assert_int_equal(all.n, DATUMS * TOKENS * EACH);
    // one column a time: its place among the weights of the wide pass is put back by hand
    for (int column = 0; column < EACH; column++) {
        struct seen seen = {0};
        make_step(&one, 1);
        for (int i = 0; i < DATUMS; i++)
            for (int t = 0; t < TOKENS; t++) one.targets[i][t] = s.targets[i][t * EACH + column];
        assert_ok(
            learner_run(narrow->learner, PASS_LOSS, one.groups, DATUMS, weighted, &seen, NULL));
        for (int i = 0; i < DATUMS * TOKENS; i++)
            assert_true(seen.logprobs[i] == all.logprobs[i * EACH + column]);
    }
}

// Many targets take room as rows do.
TEST(targets_are_budgeted)
{
    struct step s;
    struct packing *p = NULL;
    make_step(&s, EACH);
    assert_ok(packing_new(s.groups, DATUMS, TOKENS * EACH + 5, PACK_PROMPTS, &p));
    assert_int_equal(p->n, DATUMS); // 7 rows each, and 21 targets
    for (int b = 0; b < p->n; b++) {
        assert_int_equal(p->batches[b].first[p->batches[b].n_seqs], TOKENS * EACH);
        assert_int_equal(p->batches[b].n_tokens, TOKENS);
    }
    packing_free(p);
    assert_fails(packing_new(s.groups, DATUMS, TOKENS * EACH - 1, PACK_PROMPTS, &p), ST_INVALID,
                 "and its targets");
}

// torch.optim.AdamW and clip_grad_norm_ in double, with other settings at every step, which torch
// reads from the group anew.
TEST(settings_of_each_step)
{
    static const struct optimizer_config settings[] = {
        {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8},
        {.beta1 = 0.5, .beta2 = 0.999, .eps = 1e-12},
        {.beta1 = 0.8, .beta2 = 0.9, .eps = 1e-4, .weight_decay = 0.1, .max_grad_norm = 0.5},
        {.beta1 = 0, .beta2 = 0, .eps = 1}};
    static const double rates[] = {1e-3, 5e-3, 2e-3, 1e-2};
    struct learning *m = model();
    const size_t n = (size_t)m->policy.weights->n_elements;
    struct seen seen;
    struct step s;
    make_step(&s, 1);
    const float *w = m->policy.weights->base;
    double *p = test_keep(calloc(n, sizeof *p)), *m1 = test_keep(calloc(n, sizeof *p)),
           *v = test_keep(calloc(n, sizeof *p));
    for (size_t i = 0; i < n; i++) p[i] = w[i];
    for (int step = 1; step <= 4; step++) {
        const struct optimizer_config *c = &settings[step - 1];
        double norm;
        seen.n = 0;
        assert_ok(learner_run(m->learner, PASS_STEP, s.groups, DATUMS, weighted, &seen, NULL));
        optimizer_configure(learning_optimizer(m), c);
        assert_ok(optimizer_prepare(learning_optimizer(m), &norm));
        assert_true(norm > 0.5);
        const double scale = c->max_grad_norm > 0 ? c->max_grad_norm / (norm + 1e-6) : 1;
        for (size_t i = 0; i < n; i++) {
            const double g = learning_gradients(m)[i] * scale;
            m1[i] = c->beta1 * m1[i] + (1 - c->beta1) * g;
            v[i] = c->beta2 * v[i] + (1 - c->beta2) * g * g;
            p[i] *= 1 - rates[step - 1] * c->weight_decay;
            p[i] -= rates[step - 1] / (1 - pow(c->beta1, step)) * m1[i] /
                    (sqrt(v[i]) / sqrt(1 - pow(c->beta2, step)) + c->eps);
        }
        assert_ok(optimizer_apply(learning_optimizer(m), rates[step - 1]));
    }
    for (size_t i = 0; i < n; i++) assert_near(w[i], p[i], 4e-6);
}

// After a reset a step is the first again.
TEST(begins_anew)
{
    struct learning *m = model();
    struct step s;
    float *w = m->policy.weights->base;
    const size_t bytes = (size_t)m->policy.weights->n_elements * sizeof *w;
    const void *start = test_copy(w, bytes), *first = NULL;
    make_step(&s, 1);
    for (int round = 0; round < 2; round++) {
        assert_ok(optimizer_reset(learning_optimizer(m)));
        memcpy(w, start, bytes);
        for (int step = 0; step < 2; step++) {
            struct seen seen = {0};
            assert_ok(learner_run(m->learner, PASS_STEP, s.groups, DATUMS, weighted, &seen, NULL));
            learning_step(m, 1e-2);
        }
        if (round == 0) first = test_copy(w, bytes);
    }
    assert_int_equal(optimizer_steps(learning_optimizer(m)), 2);
    assert_memory_equal(first, w, bytes);
    assert_memory_not_equal(start, w, bytes);
}
