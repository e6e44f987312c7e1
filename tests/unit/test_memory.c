/* test_memory.c: the memory plan of a training run (trainer/learn/learner.h) against what a step
 * takes, as the device counts it, for every combination of the options that change it; and that
 * these options leave gradients as they are (--recompute) or training where it was
 * (--optim-moments). */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/random_step.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_latent.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/learner.h"

#define GROUPS  4
#define PER     3
#define SAMPLES (GROUPS * PER)
#define PROMPT  12
#define LENGTH  10
#define VOCAB   120

static void make_step(struct random_step *s, uint64_t seed)
{
    int prompts[GROUPS], completions[SAMPLES];
    for (int g = 0; g < GROUPS; g++) prompts[g] = PROMPT;
    for (int i = 0; i < SAMPLES; i++) completions[i] = LENGTH;
    const struct step_shape shape = {GROUPS, PER, prompts, completions, VOCAB, seed};
    random_step_make(&shape, s);
}

static void cross_entropy(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    double *loss = context;
    for (int i = 0; i < rows->mb->first[rows->mb->n_seqs]; i++) {
        *loss -= rows->logprobs[i] / (double)(SAMPLES * LENGTH);
        ret_dlogprobs[i] = -1.0f / (SAMPLES * LENGTH);
    }
}

struct setting {
    enum recompute recompute;
    enum moments_kind moments;
    bool draft, reference;
    int budget, logits_chunk;
    bool smallest; // a model of one layer
    bool latent;   // one with latent attention, of more heads than the CPU takes at a time
};

struct machine {
    struct reference policy, draft; // the learner works on these weights
    struct learner *learner;
};

static void machine_open(const struct setting *s, struct machine *m)
{
    const char *folder = test_folder(), *draft = test_folder();
    if (s->latent)
        assert_ok(tiny_latent_write(folder, 48, VOCAB));
    else
        assert_ok(tiny_model_write(folder, s->smallest ? 32 : 64, s->smallest ? 1 : 3, VOCAB, 3));
    assert_ok(tiny_model_write(draft, 96, 2, VOCAB, 4)); // wider than its policy
    struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0, 1, s->moments, false};
    struct learner_config options = {
        .optimizer = adamw,
        .temperature = 1,
        .token_budget = s->budget,
        .logits_chunk = s->logits_chunk,
        .max_seqs = SAMPLES + GROUPS,
        .max_context = PROMPT + LENGTH,
        .recompute = s->recompute,
    };
    struct learner_draft_config draft_options = {adamw, 1};
    *m = (struct machine){0};
    reference_open(folder, "cpu", &m->policy);
    if (s->draft) reference_open(draft, "cpu", &m->draft);
    assert_ok(learner_new(m->policy.dev, m->policy.config, m->policy.weights, s->reference,
                          &options, &m->learner));
    if (s->draft)
        assert_ok(learner_add_draft(m->learner, m->draft.config, m->draft.weights, &draft_options));
    assert_ok(learner_prepare(m->learner));
}

static void machine_close(const struct setting *s, struct machine *m)
{
    learner_free(m->learner);
    if (s->draft) reference_close(&m->draft);
    reference_close(&m->policy);
}

static double one_step(struct machine *m, const struct random_step *s, bool draft, double lr)
{
    double norm, loss = 0;
    struct update_stats stats = {0};
    if (draft)
        assert_ok(
            learner_run(m->learner, PASS_STEP, s->groups, GROUPS, cross_entropy, &loss, &stats));
    else
        assert_ok(
            learner_run(m->learner, PASS_STEP, s->groups, GROUPS, cross_entropy, &loss, NULL));
    assert_ok(optimizer_prepare(learner_optimizer(m->learner), &norm));
    if (draft) assert_ok(optimizer_prepare(learner_optimizer(learner_draft(m->learner)), &norm));
    if (lr == 0) return loss;
    assert_ok(optimizer_apply(learner_optimizer(m->learner), lr));
    if (draft) assert_ok(optimizer_apply(learner_optimizer(learner_draft(m->learner)), lr));
    return loss;
}

// ---- the plan -----------------------------------------------------------------------------------

TEST(plan_holds)
{
    struct random_step step;
    make_step(&step, 5);
    size_t totals[2][3];
    for (int i = 0; i < 25; i++) {
        struct setting s = {.recompute = (enum recompute)(i % 2),
                            .moments = (enum moments_kind)(i / 2 % 3),
                            .draft = i / 6 % 2,
                            .reference = i / 12 % 2,
                            .latent = i == 24,
                            .budget = 90,
                            .logits_chunk = 32};
        struct machine m;
        struct memory_plan plan;
        machine_open(&s, &m);
        size_t prepared = learner_memory_taken(m.learner);
        for (int k = 0; k < 2; k++) one_step(&m, &step, s.draft, 1e-3);
        plan = learner_info(m.learner)->memory;
        size_t taken = learner_memory_taken(m.learner);
        printf("--recompute %-5s --optim-moments %-4s draft %d reference %d: %8zu planned, %8zu "
               "taken\n",
               recompute_names[s.recompute], moments_kind_names[s.moments], s.draft, s.reference,
               plan.total, taken);
        assert_int_equal(plan.total, taken);
        assert_int_equal(taken, prepared); // a step takes nothing more
        if (i < 6) totals[s.recompute][s.moments] = plan.total;
        machine_close(&s, &m);
    }
    for (int k = 0; k < 3; k++) assert_true(totals[RECOMPUTE_LAYER][k] < totals[RECOMPUTE_NONE][k]);
    for (int r = 0; r < 2; r++)
        assert_true(totals[r][MOMENTS_8BIT] < totals[r][MOMENTS_BF16] &&
                    totals[r][MOMENTS_BF16] < totals[r][MOMENTS_F32]);
}

// ---- what the options do to training ------------------------------------------------------------

static char *gradients_copy(struct learner *l)
{
    const struct weights *grads = optimizer_grads(learner_optimizer(l), 0);
    char *copy = malloc(grads->bytes);
    assert_non_null(copy);
    return memcpy(copy, grads->base, grads->bytes);
}

// Policy and draft, in one micro-batch or several.
TEST(recompute_changes_no_bit)
{
    static const int budgets[] = {40, 400};
    struct random_step step;
    make_step(&step, 5);
    for (int b = 0; b < 2; b++) {
        char *policy[2], *draft[2];
        size_t bytes[2] = {0};
        for (int r = 0; r < 2; r++) {
            struct setting s = {.recompute = (enum recompute)r,
                                .draft = true,
                                .budget = budgets[b],
                                .logits_chunk = 16};
            struct machine m;
            machine_open(&s, &m);
            one_step(&m, &step, true, 0);
            struct learner *ld = learner_draft(m.learner);
            bytes[0] = optimizer_grads(learner_optimizer(m.learner), 0)->bytes;
            bytes[1] = optimizer_grads(learner_optimizer(ld), 0)->bytes;
            policy[r] = gradients_copy(m.learner);
            draft[r] = gradients_copy(ld);
            machine_close(&s, &m);
        }
        assert_memory_equal(policy[0], policy[1], bytes[0]);
        assert_memory_equal(draft[0], draft[1], bytes[1]);
        for (int r = 0; r < 2; r++) {
            free(policy[r]);
            free(draft[r]);
        }
    }
}

// A task that generalises: each token is the one before plus 20, 21 or 22, by chance for one
// completion of a prompt or the other. Every step has new prompts.
static void make_lesson(struct random_step *s, int step)
{
    make_step(s, 100 + (uint64_t)step);
    for (int i = 0; i < SAMPLES; i++)
        for (int t = 0; t < LENGTH; t++) {
            int32_t before = t ? s->ids[i][t - 1] : s->prompts[i / PER][PROMPT - 1];
            s->ids[i][t] = (before + 20 + i % PER) % VOCAB;
        }
}

#define STEPS  200
#define WINDOW 20 // steps of a mean

// Means of the loss over windows of steps.
static void curve(enum moments_kind moments, double lr, double ret[STEPS / WINDOW])
{
    struct setting s = {.moments = moments, .budget = 400, .logits_chunk = 128, .smallest = true};
    struct machine m;
    struct random_step step;
    machine_open(&s, &m);
    memset(ret, 0, STEPS / WINDOW * sizeof *ret);
    for (int i = 0; i < STEPS; i++) {
        make_lesson(&step, i);
        ret[i / WINDOW] += one_step(&m, &step, false, lr) / WINDOW;
    }
    machine_close(&s, &m);
}

// The distances that docs/lab/exactness.md states.
TEST(moments_keep_the_loss)
{
    static const double lrs[] = {3e-4, 3e-3}, bounds[] = {0, 0.002, 0.03};
    for (int l = 0; l < 2; l++) {
        double loss[3][STEPS / WINDOW];
        for (int k = 0; k < 3; k++) curve((enum moments_kind)k, lrs[l], loss[k]);
        for (int k = 0; k < 3; k++) {
            double max = 0;
            for (int w = 0; w < STEPS / WINDOW; w++) max = fmax(max, fabs(loss[k][w] - loss[0][w]));
            printf("lr %g, %-4s moments: loss", lrs[l], moments_kind_names[k]);
            for (int w = 0; w < STEPS / WINDOW; w += 2) printf(" %.4f", loss[k][w]);
            printf(", at most %.4f from f32's\n", max);
            if (max > bounds[k]) fail_msg("more than %g", bounds[k]);
        }
    }
}
