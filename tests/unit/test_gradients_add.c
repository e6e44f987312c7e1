/* test_gradients_add.c: training in the pieces that a client gives it: gradients that add up until
 * a step, several targets of one token, AdamW's settings another at every step, and an optimizer
 * that begins anew. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/learner.h"

#define VOCAB  64
#define DATUMS 3
#define TOKENS 7
#define EACH   3 // targets of a token

struct machine {
    struct reference policy;
    struct learner *learner;
    float *gradients; // of the whole arena
    size_t n;
};

static void machine_open(struct machine *m, int budget)
{
    const char *folder = test_folder();
    const struct learner_config options = {.optimizer = {0.9, 0.95, 1e-8, 0, 0, MOMENTS_F32, false},
                                           .temperature = 1,
                                           .token_budget = budget,
                                           .logits_chunk = 5,
                                           .max_seqs = 2 * budget,
                                           .max_context = 32};
    assert_ok(tiny_model_write(folder, 32, 2, VOCAB, 3));
    reference_open(folder, "cpu", &m->policy);
    assert_ok(learner_new(m->policy.dev, m->policy.config, m->policy.weights, false, &options,
                          &m->learner));
    assert_ok(learner_prepare(m->learner));
    optimizer_clear_grads(learner_optimizer(m->learner));
    m->gradients = optimizer_grads(learner_optimizer(m->learner), 0)->base;
    m->n = (size_t)m->policy.weights->n_elements;
}

static void machine_close(struct machine *m)
{
    learner_free(m->learner);
    reference_close(&m->policy);
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

static double difference(const struct machine *a, const struct machine *b)
{
    double largest = 0, apart = 0;
    for (size_t i = 0; i < a->n; i++) {
        largest = fmax(largest, fabs(a->gradients[i]));
        apart = fmax(apart, fabs((double)a->gradients[i] - b->gradients[i]));
    }
    assert_true(largest > 1e-3);
    return apart / largest;
}

// Each datum of its own, in a row: the sum of all, and to the bit what they are in two requests.
TEST(gradients_add_up)
{
    struct machine at_once, apart, again;
    struct seen a = {0}, b = {0};
    struct step s;
    make_step(&s, 1);
    machine_open(&at_once, 64);
    machine_open(&apart, 64);
    machine_open(&again, 64);
    assert_ok(learner_run(at_once.learner, PASS_STEP, s.groups, DATUMS, weighted, &a, NULL));
    for (int i = 0; i < DATUMS; i++)
        assert_ok(learner_run(apart.learner, PASS_GRADIENTS, &s.groups[i], 1, weighted, &b, NULL));
    assert_memory_equal(a.logprobs, b.logprobs, DATUMS * TOKENS * sizeof(float));
    assert_true(difference(&at_once, &apart) < 1e-5);
    // what was there before goes with PASS_STEP, and only then
    assert_ok(learner_run(again.learner, PASS_GRADIENTS, s.groups, DATUMS, weighted,
                          &(struct seen){0}, NULL));
    assert_ok(
        learner_run(again.learner, PASS_STEP, s.groups, DATUMS, weighted, &(struct seen){0}, NULL));
    assert_memory_equal(again.gradients, at_once.gradients, at_once.n * sizeof(float));
    machine_close(&at_once);
    machine_close(&apart);
    machine_close(&again);
}

// A pass with all targets of each token is the passes with one of them, added.
TEST(several_targets)
{
    struct machine wide, narrow;
    struct seen all = {0};
    struct step s, one;
    make_step(&s, EACH);
    machine_open(&wide, 64);
    machine_open(&narrow, 64);
    assert_ok(learner_run(wide.learner, PASS_STEP, s.groups, DATUMS, weighted, &all, NULL));
    assert_int_equal(all.n, DATUMS * TOKENS * EACH);
    // one column a time: its place among the weights of the wide pass is put back by hand
    for (int column = 0; column < EACH; column++) {
        struct seen seen = {0};
        make_step(&one, 1);
        for (int i = 0; i < DATUMS; i++)
            for (int t = 0; t < TOKENS; t++) one.targets[i][t] = s.targets[i][t * EACH + column];
        assert_ok(
            learner_run(narrow.learner, PASS_LOSS, one.groups, DATUMS, weighted, &seen, NULL));
        for (int i = 0; i < DATUMS * TOKENS; i++)
            assert_true(seen.logprobs[i] == all.logprobs[i * EACH + column]);
    }
    machine_close(&wide);
    machine_close(&narrow);
}

// Many targets take room as rows do.
TEST(targets_are_budgeted)
{
    struct step s;
    struct packing *p = NULL;
    make_step(&s, EACH);
    assert_ok(packing_new(s.groups, DATUMS, TOKENS * EACH + 5, &p));
    assert_int_equal(p->n, DATUMS); // 7 rows each, and 21 targets
    for (int b = 0; b < p->n; b++) {
        assert_int_equal(p->batches[b].first[p->batches[b].n_seqs], TOKENS * EACH);
        assert_int_equal(p->batches[b].n_tokens, TOKENS);
    }
    packing_free(p);
    assert_fails(packing_new(s.groups, DATUMS, TOKENS * EACH - 1, &p), ST_INVALID,
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
    struct machine m;
    struct step s;
    machine_open(&m, 64);
    make_step(&s, 1);
    const float *w = m.policy.weights->base;
    double *p = malloc(m.n * sizeof *p), *m1 = calloc(m.n, sizeof *m1), *v = calloc(m.n, sizeof *v);
    for (size_t i = 0; i < m.n; i++) p[i] = w[i];
    for (int step = 1; step <= 4; step++) {
        const struct optimizer_config *c = &settings[step - 1];
        double norm;
        assert_ok(
            learner_run(m.learner, PASS_STEP, s.groups, DATUMS, weighted, &(struct seen){0}, NULL));
        optimizer_configure(learner_optimizer(m.learner), c);
        assert_ok(optimizer_prepare(learner_optimizer(m.learner), &norm));
        assert_true(norm > 0.5);
        const double scale = c->max_grad_norm > 0 ? c->max_grad_norm / (norm + 1e-6) : 1;
        for (size_t i = 0; i < m.n; i++) {
            const double g = m.gradients[i] * scale;
            m1[i] = c->beta1 * m1[i] + (1 - c->beta1) * g;
            v[i] = c->beta2 * v[i] + (1 - c->beta2) * g * g;
            p[i] *= 1 - rates[step - 1] * c->weight_decay;
            p[i] -= rates[step - 1] / (1 - pow(c->beta1, step)) * m1[i] /
                    (sqrt(v[i]) / sqrt(1 - pow(c->beta2, step)) + c->eps);
        }
        assert_ok(optimizer_apply(learner_optimizer(m.learner), rates[step - 1]));
    }
    for (size_t i = 0; i < m.n; i++) assert_true(fabs(p[i] - w[i]) < 4e-6);
    free(p);
    free(m1);
    free(v);
    machine_close(&m);
}

// After a reset a step is the first again.
TEST(begins_anew)
{
    struct machine m;
    struct step s;
    double norm;
    machine_open(&m, 64);
    make_step(&s, 1);
    const size_t bytes = m.n * sizeof(float);
    float *start = malloc(bytes), *first = malloc(bytes), *w = m.policy.weights->base;
    memcpy(start, w, bytes);
    for (int round = 0; round < 2; round++) {
        assert_ok(optimizer_reset(learner_optimizer(m.learner)));
        memcpy(w, start, bytes);
        for (int step = 0; step < 2; step++) {
            assert_ok(learner_run(m.learner, PASS_STEP, s.groups, DATUMS, weighted,
                                  &(struct seen){0}, NULL));
            assert_ok(optimizer_prepare(learner_optimizer(m.learner), &norm));
            assert_ok(optimizer_apply(learner_optimizer(m.learner), 1e-2));
        }
        if (round == 0) memcpy(first, w, bytes);
    }
    assert_int_equal(optimizer_steps(learner_optimizer(m.learner)), 2);
    assert_memory_equal(first, w, bytes);
    assert_true(memcmp(start, w, bytes) != 0);
    free(start);
    free(first);
    machine_close(&m);
}
