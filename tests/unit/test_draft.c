/* test_draft.c: training of a draft model (trainer/learner, backward_run): its loss against one
 * computed from plain logits, its gradient against finite differences through the whole model, and
 * that it comes closer to the policy; and the options' part of it (trainer/config). */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/learning.h"
#include "tests/support/random_step.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/run/config.h"

#define GROUPS      3
#define PER         3
#define SAMPLES     (GROUPS * PER)
#define TEMPERATURE 0.8f
#define SHARED      280 // tokens that both models of every test know
static const int prompt_lengths[GROUPS] = {5, 1, 6};
static const int lengths[SAMPLES] = {3, 1, 7, 2, 0, 4, 5, 1, 6};
#define TARGETS 29

static const struct step_shape shape = {GROUPS, PER, prompt_lengths, lengths, SHARED, 5};

// ---- two models and a learner -------------------------------------------------------------------

// Gemma 2 of the golden tests: its logits are capped, and it knows 288 tokens.
static const char *capped_folder(void)
{
    return test_golden("gemma2");
}

static struct learning *models(const char *draft, int budget, int logits_chunk, float loss_weight)
{
    struct learning *m =
        learning_of(&(struct learning_setting){.folder = tiny_folder(64, 2, 300, 3),
                                               .draft = draft,
                                               .draft_weight = loss_weight,
                                               .config = {.optimizer = {.max_grad_norm = 1},
                                                          .temperature = TEMPERATURE,
                                                          .token_budget = budget,
                                                          .logits_chunk = logits_chunk,
                                                          .max_seqs = SAMPLES + GROUPS,
                                                          .max_context = 32}});
    const struct model_config *config = m->draft.config;
    if (config->logit_softcap > 0) // larger logits, so that the cap bends them
        for (int64_t i = 0; i < (int64_t)config->vocab_size * config->hidden; i++)
            ((float *)m->draft.weights->at[ROLE_EMBED])[i] *= 3;
    return m;
}

static const float *draft_gradients_of(const struct learning *m)
{
    return optimizer_grads(learner_info(learner_info(m->learner)->draft)->optimizer, 0)->base;
}

static void some_loss(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    (void)context;
    for (int i = 0; i < rows->mb->first[rows->mb->n_seqs]; i++)
        ret_dlogprobs[i] = 0.01f * (float)(1 + i % 4);
}

// ---- the same from plain logits, in double ------------------------------------------------------

static void softmax(const float *logits, int n, double *ret)
{
    double largest = logits[0], sum = 0;
    for (int i = 1; i < n; i++) largest = fmax(largest, logits[i]);
    for (int i = 0; i < n; i++) sum += ret[i] = exp((logits[i] - largest) / TEMPERATURE);
    for (int i = 0; i < n; i++) ret[i] /= sum;
}

struct draft_stats {
    double kl, overlap; // means over targets
    long targets;
};

static struct draft_stats draft_gradients(struct learning *m, const struct random_step *s,
                                          learner_loss_fn loss)
{
    struct update_stats u = {0};
    assert_ok(learner_run(m->learner, PASS_STEP, s->groups, GROUPS, loss, NULL, &u));
    assert_int_equal(u.range[STAT_DRAFT_KL].n, u.draft_targets);
    return (struct draft_stats){stats_mean(&u, STAT_DRAFT_KL), stats_mean(&u, STAT_DRAFT_OVERLAP),
                                u.draft_targets};
}

// One sequence at a time through both models; the policy's first tokens are those the draft knows.
static struct draft_stats plain_stats(struct learning *m, const struct random_step *s)
{
    int wide = m->policy.config->vocab_size, vocab = m->draft.config->vocab_size;
    float *teacher = test_keep(malloc(32 * (size_t)wide * sizeof *teacher));
    float *student = test_keep(malloc(32 * (size_t)vocab * sizeof *student));
    double *p = malloc((size_t)vocab * sizeof *p), *q = malloc((size_t)vocab * sizeof *q);
    struct draft_stats stats = {0};
    for (int i = 0; i < SAMPLES; i++) {
        const struct pack_group *g = &s->groups[i / PER];
        const struct pack_completion *c = &s->completions[i];
        int32_t ids[32];
        memcpy(ids, g->prompt, (size_t)g->n_prompt * sizeof *ids);
        memcpy(ids + g->n_prompt, c->ids, (size_t)c->n * sizeof *ids);
        reference_logits(&m->policy, ids, g->n_prompt + c->n, teacher);
        reference_logits(&m->draft, ids, g->n_prompt + c->n, student);
        for (int t = 0; t < c->n; t++) {
            softmax(teacher + (size_t)(g->n_prompt + t - 1) * (size_t)wide, vocab, p);
            softmax(student + (size_t)(g->n_prompt + t - 1) * (size_t)vocab, vocab, q);
            for (int v = 0; v < vocab; v++) {
                stats.kl += p[v] * log(p[v] / q[v]);
                stats.overlap += fmin(p[v], q[v]);
            }
            stats.targets++;
        }
    }
    stats.kl /= (double)stats.targets;
    stats.overlap /= (double)stats.targets;
    free(p);
    free(q);
    return stats;
}

TEST(loss_is_the_divergence)
{
    static const int shapes[][2] = {{70, 100}, {13, 3}}; // one micro-batch and chunk, or many
    struct random_step s;
    random_step_make(&shape, &s);
    for (int i = 0; i < 4; i++) {
        struct learning *m = models(i / 2 ? capped_folder() : tiny_folder(32, 1, 300, 8),
                                    shapes[i % 2][0], shapes[i % 2][1], 3);
        const struct draft_stats stats = draft_gradients(m, &s, learning_no_loss),
                                 wanted = plain_stats(m, &s);
        assert_int_equal(stats.targets, TARGETS);
        assert_int_equal(wanted.targets, TARGETS);
        if (!(wanted.kl > 0.1 && wanted.overlap > 0.05 && wanted.overlap < 0.9))
            fail_msg("case %d says little: KL %g, overlap %g", i, wanted.kl, wanted.overlap);
        // f32 logits and sums against double
        assert_near(stats.kl, wanted.kl, 1e-5 * wanted.kl);
        assert_near(stats.overlap, wanted.overlap, 1e-5);
    }
}

// The gradient by one tensor, against the slope of the loss along a direction that has a part of it
// and a random part, both of length 1. Returns whether the tensor has a gradient worth the name.
static bool check_tensor(struct learning *m, const struct random_step *s, const float *gradient,
                         int tensor, double weight)
{
    const struct weight_tensor *t = &m->draft.weights->tensors[tensor];
    float *w = (float *)m->draft.weights->base + t->offset;
    const float *g = gradient + t->offset;
    size_t n = (size_t)t->n;
    const float *saved = test_copy(w, n * sizeof *saved);
    double *direction = malloc(n * sizeof *direction), norm = 0, random = 0, expected = 0;
    const double h = 4e-3;
    struct rng r;
    rng_init(&r, 17, (uint64_t)tensor);
    for (size_t i = 0; i < n; i++) {
        norm += (double)g[i] * g[i];
        direction[i] = rng_normal(&r);
        random += direction[i] * direction[i];
    }
    norm = sqrt(norm);
    for (size_t i = 0; i < n; i++) {
        direction[i] /= sqrt(random);
        if (norm > 0) direction[i] += g[i] / norm;
        expected += direction[i] * g[i];
    }
    for (size_t i = 0; i < n; i++) w[i] = saved[i] + (float)(h * direction[i]);
    double up = plain_stats(m, s).kl;
    for (size_t i = 0; i < n; i++) w[i] = saved[i] - (float)(h * direction[i]);
    double down = plain_stats(m, s).kl;
    double slope = weight * (up - down) / (2 * h);
    memcpy(w, saved, n * sizeof *saved);
    // 1% for the curve's third order; 1e-4 for f32's rounding of a loss of about 1, over 2 h
    if (fabs(slope - expected) > 0.01 * fabs(expected) + 1e-4 * weight)
        fail_msg("%s: slope %g, expected %g (gradient norm %g)", t->name, slope, expected, norm);
    free(direction);
    return norm > 0.01;
}

TEST(gradient_is_a_slope)
{
    struct random_step s;
    const double weight = 1.5;
    random_step_make(&shape, &s);
    for (int capped = 0; capped < 2; capped++) {
        int n_large = 0;
        struct learning *m =
            models(capped ? capped_folder() : tiny_folder(32, 2, 300, 8), 13, 3, (float)weight);
        draft_gradients(m, &s, learning_no_loss);
        const int n = m->draft.weights->n_tensors;
        for (int t = 0; t < n; t++)
            n_large += check_tensor(m, &s, draft_gradients_of(m), t, weight);
        assert_true(n_large > n / 2);
    }
}

// However a step is cut, the draft's gradient is the same, and the policy's is what it is without.
TEST(neither_disturbs_the_other)
{
    struct random_step s;
    struct draft_stats stats[2];
    random_step_make(&shape, &s);
    const char *draft = tiny_folder(32, 1, 288, 8);
    struct learning *both[] = {models(draft, 70, 100, 1), models(draft, 13, 3, 1)};
    for (int i = 0; i < 2; i++) {
        struct learning *m = both[i];
        const size_t bytes = (size_t)m->policy.weights->n_elements * sizeof(float);
        assert_ok(learner_run(m->learner, PASS_STEP, s.groups, GROUPS, some_loss, NULL, NULL));
        const void *alone = test_copy(learning_gradients(m), bytes);
        stats[i] = draft_gradients(m, &s, some_loss);
        assert_memory_equal(alone, learning_gradients(m), bytes);
    }
    assert_near(stats[0].kl, stats[1].kl, 1e-5 * stats[0].kl);
    assert_near(stats[0].overlap, stats[1].overlap, 1e-5);
    assert_same_gradients(draft_gradients_of(both[0]), draft_gradients_of(both[1]),
                          both[0]->draft.weights->n_elements, 1e-5);
}

// The policy may draw a token of its padding, which the draft has no row for.
TEST(unknown_tokens_are_left_out)
{
    struct random_step s;
    struct draft_stats stats;
    double norm;
    random_step_make(&shape, &s);
    struct learning *m = models(tiny_folder(32, 1, 288, 8), 13, 100, 1);
    s.ids[2][4] = 288; // one micro-batch of several
    stats = draft_gradients(m, &s, learning_no_loss);
    assert_true(stats.targets > 0 && stats.targets <= TARGETS - lengths[2]);
    assert_true(isfinite(stats.kl) && stats.kl > 0);
    assert_ok(optimizer_prepare(learner_info(learner_info(m->learner)->draft)->optimizer, &norm));
    assert_true(norm > 0);
    for (int g = 0; g < GROUPS; g++) s.prompts[g][0] = 299; // all of them
    stats = draft_gradients(m, &s, learning_no_loss);
    assert_int_equal(stats.targets, 0);
    assert_ok(optimizer_prepare(learner_info(learner_info(m->learner)->draft)->optimizer, &norm));
    assert_true(norm == 0);
}

TEST(training_raises_the_overlap)
{
    struct random_step s;
    struct draft_stats first = {0}, last = {0};
    random_step_make(&shape, &s);
    struct learning *m = models(tiny_folder(32, 2, 300, 8), 30, 8, 1);
    const size_t bytes = (size_t)m->policy.weights->n_elements * sizeof(float);
    const void *policy = test_copy(m->policy.weights->base, bytes);
    for (int i = 0; i < 200; i++) {
        double norm;
        last = draft_gradients(m, &s, learning_no_loss);
        if (i == 0) first = last;
        assert_ok(
            optimizer_prepare(learner_info(learner_info(m->learner)->draft)->optimizer, &norm));
        assert_ok(optimizer_apply(learner_info(learner_info(m->learner)->draft)->optimizer, 5e-3));
    }
    struct draft_stats wanted = plain_stats(m, &s);
    if (!(first.overlap < 0.6 && last.overlap > 0.9 && last.kl < 0.1 * first.kl))
        fail_msg("overlap %g, then %g; KL %g, then %g", first.overlap, last.overlap, first.kl,
                 last.kl);
    assert_true(wanted.overlap > 0.9); // by the plain path as well
    assert_memory_equal(policy, m->policy.weights->base, bytes);
}

TEST(memory_is_planned)
{
    struct learning *m = models(tiny_folder(32, 1, 300, 8), 30, 4, 1);
    const struct memory_plan plan = learner_info(m->learner)->memory,
                             draft = learner_info(learner_info(m->learner)->draft)->memory;
    assert_int_equal(plan.draft, draft.total);
    assert_int_equal(draft.weights_shared, m->draft.weights->bytes);
    assert_true(draft.moments == 8 * (size_t)m->draft.weights->n_elements);
    assert_true(draft.activations == tape_bytes(m->draft.config, DT_F32, 30, RECOMPUTE_NONE));
    assert_int_equal(draft.total, draft.residual + draft.moments + draft.gradients +
                                      draft.activations + draft.workspace);
    assert_int_equal(plan.total, plan.residual + plan.moments + plan.gradients + plan.activations +
                                     plan.workspace + plan.draft);
}

TEST(larger_vocabulary_is_refused)
{
    struct learner *l;
    struct learner_config options = {
        .temperature = 1, .token_budget = 30, .logits_chunk = 4, .max_seqs = 10, .max_context = 32};
    struct learner_draft_config draft_options = {.loss_weight = 1};
    struct learning *m = models(tiny_folder(32, 1, 300, 8), 30, 4, 1);
    const struct reference *large = reference_of(tiny_folder(32, 1, 301, 8));
    assert_ok(learner_new(m->policy.dev, m->policy.config, m->policy.weights, false, &options, &l));
    assert_fails(learner_add_draft(l, large->config, large->weights, &draft_options), ST_MISMATCH,
                 "301 tokens");
    assert_message("--train-draft: ");
    assert_message("; take a draft of the same tokenizer");
    assert_null(learner_info(l)->draft);
    learner_free(l);
}

// ---- options ------------------------------------------------------------------------------------

static void resolve(const char *const more[], struct train_resolved *ret)
{
    char *argv[16] = {"train", "--data",         "x.jsonl", "--learning-rate",
                      "1e-6",  "--warmup-steps", "4",       "--max-grad-norm",
                      "0.5"};
    int argc = 9;
    struct train_config config = {0};
    struct option_set *set = NULL;
    for (int i = 0; more[i]; i++) argv[argc++] = (char *)more[i];
    assert_int_equal(options_parse(train_options, "train", "", argc, argv, 0, &config, NULL, &set),
                     OPTIONS_OK);
    assert_ok(train_config_resolve(&config, set, ret));
    options_free(set);
}

TEST(options_follow_the_policys)
{
    struct train_resolved r;
    resolve(OPTIONS("--train-draft"), &r);
    assert_true(r.draft_max_grad_norm == 0.5);
    assert_true(r.draft_schedule.peak == 2e-5 && r.schedule.peak == 1e-6);
    r.schedule.total_steps = r.draft_schedule.total_steps = 10;
    for (int step = 0; step < 10; step++)
        assert_true(fabs(schedule_at(&r.draft_schedule, step) -
                         20 * schedule_at(&r.schedule, step)) < 1e-12);
    resolve(OPTIONS("--draft-max-grad-norm", "0", "--draft-learning-rate", "0.25"), &r);
    assert_true(r.draft_max_grad_norm == 0);
    assert_true(r.draft_schedule.peak == 0.25);
}
