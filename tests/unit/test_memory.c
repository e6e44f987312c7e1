/* test_memory.c: the memory plan of a training run (trainer/learn/learner.h) against what a step
 * takes, as the device counts it, for every combination of the options that change it; and that
 * these options leave gradients as they are (--recompute), near them (--gradient-dtype) or training
 * where it was (--optim-moments, --gradient-dtype). */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/learning.h"
#include "tests/support/random_step.h"
#include "tests/support/support.h"
#include "tests/support/tiny_latent.h"
#include "tests/support/tiny_model.h"

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
    enum quantization quantization;
    enum gradient_dtype gradient_dtype;
};

static struct learning *model(const struct setting *s)
{
    const char *folder = s->latent ? test_folder() : NULL;
    if (s->latent)
        assert_ok(tiny_latent_write(folder, 48, VOCAB));
    else
        folder = tiny_folder(s->smallest ? 32 : 64, s->smallest ? 1 : 3, VOCAB, 3);
    return learning_of(&(struct learning_setting){
        .folder = folder,
        .draft = s->draft ? tiny_folder(96, 2, VOCAB, 4) : NULL, // wider than its policy
        .draft_weight = 1,
        .reference = s->reference,
        .quantization = s->quantization,
        .config = {.optimizer = {.max_grad_norm = 1, .moments = s->moments},
                   .token_budget = s->budget,
                   .logits_chunk = s->logits_chunk,
                   .max_seqs = SAMPLES + GROUPS,
                   .max_context = PROMPT + LENGTH,
                   .recompute = s->recompute,
                   .gradient_dtype = s->gradient_dtype}});
}

static double one_step(struct learning *m, const struct random_step *s, double lr)
{
    double norm, loss = 0;
    struct update_stats stats = {0};
    struct learner *draft = learner_info(m->learner)->draft;
    assert_ok(learner_run(m->learner, PASS_STEP, s->groups, GROUPS, cross_entropy, &loss,
                          draft ? &stats : NULL));
    assert_ok(optimizer_prepare(learning_optimizer(m), &norm));
    if (draft) assert_ok(optimizer_prepare(learner_info(draft)->optimizer, &norm));
    if (lr == 0) return loss;
    assert_ok(optimizer_apply(learning_optimizer(m), lr));
    if (draft) assert_ok(optimizer_apply(learner_info(draft)->optimizer, lr));
    return loss;
}

// ---- the plan -----------------------------------------------------------------------------------

TEST(plan_holds)
{
    struct random_step step;
    make_step(&step, 5);
    size_t totals[2][3];
    for (int i = 0; i < 28; i++) {
        struct setting s = {.recompute = (enum recompute)(i % 2),
                            .moments = (enum moments_kind)(i / 2 % 3),
                            .draft = i / 6 % 2,
                            .reference = i / 12 % 2,
                            .latent = i == 24 || i == 27,
                            .quantization = i < 25 ? QUANTIZATION_NONE : QUANTIZATION_FP8,
                            .gradient_dtype = i < 25 ? GRADIENT_AUTO : GRADIENT_E4M3,
                            .budget = 90,
                            .logits_chunk = 32};
        struct learning *m = model(&s);
        const size_t prepared = learner_memory_taken(m->learner);
        for (int k = 0; k < 2; k++) one_step(m, &step, 1e-3);
        const struct memory_plan plan = learner_info(m->learner)->memory;
        const size_t taken = learner_memory_taken(m->learner);
        printf("--recompute %-5s --optim-moments %-4s draft %d reference %d: %8zu planned, %8zu "
               "taken\n",
               recompute_names[s.recompute], moments_kind_names[s.moments], s.draft, s.reference,
               plan.total, taken);
        assert_int_equal(plan.total, taken);
        assert_int_equal(taken, prepared); // a step takes nothing more
        if (i < 6) totals[s.recompute][s.moments] = plan.total;
        learning_end(m);
    }
    for (int k = 0; k < 3; k++) assert_true(totals[RECOMPUTE_LAYER][k] < totals[RECOMPUTE_NONE][k]);
    for (int r = 0; r < 2; r++)
        assert_true(totals[r][MOMENTS_8BIT] < totals[r][MOMENTS_BF16] &&
                    totals[r][MOMENTS_BF16] < totals[r][MOMENTS_F32]);
}

// ---- what the options do to training ------------------------------------------------------------

// Policy and draft, in one micro-batch or several.
TEST(recompute_changes_no_bit)
{
    static const int budgets[] = {40, 400};
    struct random_step step;
    make_step(&step, 5);
    for (int b = 0; b < 2; b++) {
        const struct weights *grads[2][2];
        for (int r = 0; r < 2; r++) {
            const struct setting s = {.recompute = (enum recompute)r,
                                      .draft = true,
                                      .budget = budgets[b],
                                      .logits_chunk = 16};
            struct learning *m = model(&s);
            one_step(m, &step, 0);
            grads[r][0] = optimizer_grads(learning_optimizer(m), 0);
            grads[r][1] =
                optimizer_grads(learner_info(learner_info(m->learner)->draft)->optimizer, 0);
        }
        for (int k = 0; k < 2; k++)
            assert_memory_equal(grads[0][k]->base, grads[1][k]->base, grads[0][k]->bytes);
    }
}

// Rounded on their way down, gradients are near those that were not, e4m3's nearer than e5m2's; of
// what no rounding is behind, the last layer's down projection, they are the same.
TEST(eight_bits_stay_near)
{
    struct random_step step;
    double losses[3], off[3] = {0}, all = 0;
    const float *grads[3];
    const struct weights *w = NULL;
    make_step(&step, 5);
    for (int d = 0; d < 3; d++) {
        const struct setting s = {.budget = 400,
                                  .logits_chunk = 16,
                                  .quantization = QUANTIZATION_FP8,
                                  .gradient_dtype = (enum gradient_dtype)d};
        struct learning *m = model(&s);
        losses[d] = one_step(m, &step, 0);
        grads[d] = learning_gradients(m);
        w = optimizer_grads(learning_optimizer(m), 0);
    }
    assert_true(losses[1] == losses[0] && losses[2] == losses[0]);
    for (int d = 0; d < 3; d++)
        for (int64_t i = 0; i < w->n_elements; i++)
            off[d] += pow((double)grads[d][i] - (double)grads[0][i], 2);
    for (int64_t i = 0; i < w->n_elements; i++) all += pow((double)grads[0][i], 2);
    printf("gradients in e4m3 are off by %.4f of their norm, in e5m2 by %.4f\n", sqrt(off[1] / all),
           sqrt(off[2] / all));
    // less than what one rounding is off at most
    assert_true(off[1] > 0 && sqrt(off[1] / all) < 1.0 / 16);
    assert_true(off[2] > 1.5 * 1.5 * off[1] && sqrt(off[2] / all) < 1.0 / 8);
    const struct weight_matrix last = weights_matrix(w, ROLE_DOWN, w->config->n_layers - 1);
    const int64_t at = (const float *)last.w - (const float *)w->base;
    for (int d = 1; d < 3; d++)
        assert_memory_equal(grads[d] + at, grads[0] + at,
                            (size_t)(last.n * last.k) * sizeof(float));
}

// What the forward pass takes as it is, of latent attention's kv_b (docs/use/fp8.md), its gradient
// is, too.
TEST(a_matrix_whose_rows_are_plain_takes_plain_gradients)
{
    SCOPED(reference_close) struct reference r;
    const char *folder = test_folder();
    assert_ok(tiny_latent_write(folder, 48, VOCAB));
    reference_open_as(folder, "cpu", QUANTIZATION_FP8, &r);
    assert_true(weights_matrix(r.weights, ROLE_KV_A, 0).rounds);
    assert_true(weights_matrix(r.weights, ROLE_KV_B, 0).scales);
    assert_false(weights_matrix(r.weights, ROLE_KV_B, 0).rounds);
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
static void curve(struct setting s, double lr, double ret[STEPS / WINDOW])
{
    struct random_step step;
    s.budget = 400;
    s.logits_chunk = 128;
    s.smallest = true;
    struct learning *m = model(&s);
    memset(ret, 0, STEPS / WINDOW * sizeof *ret);
    for (int i = 0; i < STEPS; i++) {
        make_lesson(&step, i);
        ret[i / WINDOW] += one_step(m, &step, lr) / WINDOW;
    }
    learning_end(m);
}

// The means of the losses, and how far they are at most from those of the first.
static double apart(const char *name, double lr, const double *loss, const double *first)
{
    double max = 0;
    for (int w = 0; w < STEPS / WINDOW; w++) max = fmax(max, fabs(loss[w] - first[w]));
    printf("lr %g, %-4s: loss", lr, name);
    for (int w = 0; w < STEPS / WINDOW; w += 2) printf(" %.4f", loss[w]);
    printf(", at most %.4f from the first's\n", max);
    return max;
}

static const double lrs[] = {3e-4, 3e-3};

// The distances that docs/lab/exactness.md states.
TEST(moments_keep_the_loss)
{
    static const double bounds[] = {0, 0.002, 0.03};
    for (int l = 0; l < 2; l++) {
        double loss[3][STEPS / WINDOW];
        for (int k = 0; k < 3; k++) {
            curve((struct setting){.moments = (enum moments_kind)k}, lrs[l], loss[k]);
            assert_true(apart(moments_kind_names[k], lrs[l], loss[k], loss[0]) <= bounds[k]);
        }
    }
}

// Likewise.
TEST(eight_bits_keep_the_loss)
{
    static const double bounds[] = {0, 0.01, 0.02};
    double loss[3][STEPS / WINDOW];
    for (int d = 0; d < 3; d++) {
        const struct setting s = {.quantization = QUANTIZATION_FP8,
                                  .gradient_dtype = (enum gradient_dtype)d};
        curve(s, lrs[1], loss[d]);
        assert_true(apart(gradient_dtype_names[d], lrs[1], loss[d], loss[0]) <= bounds[d]);
    }
}
