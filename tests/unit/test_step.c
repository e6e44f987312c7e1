/* test_step.c: learner_step(), which every command learns by: the same update whoever asks for it,
 * whom it is published to, and what becomes of a gradient that is not finite. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/learning.h"
#include "tests/support/random_step.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/step.h"

enum { GROUPS = 3, VOCAB = 120, LONGEST = 8 };
static const int prompts[GROUPS] = {3, 5, 4}, completions[GROUPS] = {8, 1, 6};
static const float weights[LONGEST] = {1 / 15.0f, 1 / 15.0f, 1 / 15.0f, 1 / 15.0f,
                                       1 / 15.0f, 1 / 15.0f, 1 / 15.0f, 1 / 15.0f};

struct machine {
    struct learning *learning;
    struct learner *learner;
    struct random_step step;
    struct samples *samples;
    int published; // how often
};

LATER(samples_free)

static struct machine *machine(void)
{
    const struct step_shape shape = {GROUPS, 1, prompts, completions, VOCAB, 4};
    struct machine *m = test_keep(calloc(1, sizeof *m));
    m->learning = learning_of(&(struct learning_setting){.folder = tiny_folder(32, 2, VOCAB, 3),
                                                         .config = {.optimizer.max_grad_norm = 1,
                                                                    .token_budget = 16,
                                                                    .logits_chunk = 8,
                                                                    .max_seqs = 2 * GROUPS,
                                                                    .max_context = 16}});
    m->learner = m->learning->learner;
    random_step_make(&shape, &m->step);
    assert_ok(samples_new(GROUPS, 1, false, &m->samples));
    for (int g = 0; g < GROUPS; g++) {
        m->samples->groups[g].prompt = m->step.groups[g].prompt;
        m->samples->groups[g].n_prompt = prompts[g];
        m->samples->completions[g] =
            (struct pack_completion){.ids = m->step.ids[g], .n = completions[g], .advantage = 1};
    }
    assert_ok(samples_begin(m->samples, &m->samples));
    test_later(m->samples, samples_free_later);
    return m;
}

static enum status publish(void *context, enum status (*write)(void *), void *update,
                           struct publish_times *ret_times)
{
    struct machine *m = context;
    m->published++;
    ret_times->wait_ms = 2;
    return write(update);
}

static void assert_same_weights(const struct machine *a, const struct machine *b)
{
    const size_t bytes = (size_t)a->learning->policy.weights->n_elements * sizeof(float);
    assert_memory_equal(a->learning->policy.weights->base, b->learning->policy.weights->base,
                        bytes);
}

// The mean over 15 tokens, at once and to nobody, as sft has it; and as a client of the Tinker API
// does: weights of its own, gradients request by request, an update that is published.
TEST(a_step_is_the_same_by_halves)
{
    struct machine *whole = machine(), *halves = machine();
    struct update_stats a = {0}, b = {0};
    struct step sft = {.loss = {.type = LOSS_CROSS_ENTROPY}, .lr = 1e-2}, client = {.lr = 1e-2};
    sft.scale = loss_scale_of(&sft.loss, whole->samples, 0, GROUPS);
    assert_true(sft.scale.seqs == GROUPS && sft.scale.tokens == 15);
    assert_ok(learner_step(whole->learner, whole->samples, 0, GROUPS, &sft, &a));

    assert_ok(loss_of_client("cross_entropy", &client.loss));
    client.publish = (struct publish){publish, halves};
    for (int g = 0; g < GROUPS; g++)
        halves->samples->completions[g].inputs[INPUT_WEIGHTS] = weights;
    optimizer_clear_grads(learner_info(halves->learner)->optimizer);
    // the last first, as one pass over all takes its micro-batches
    for (int g = GROUPS - 1; g >= 0; g--)
        assert_ok(
            learner_pass(halves->learner, PASS_GRADIENTS, halves->samples, g, 1, &client, &b));
    assert_int_equal(halves->published, 0);
    assert_ok(learner_step(halves->learner, NULL, 0, 0, &client, &b));
    assert_true(halves->published == 1 && b.publish.wait_ms == 2 && a.publish.wait_ms == 0);
    assert_true(a.applied == 1 && b.applied == 1 && a.lr == 1e-2 && a.n_updates == 1);
    assert_true(a.grad_norm > 0 && fabs(a.grad_norm - b.grad_norm) < 1e-6 * a.grad_norm);
    assert_true(fabs(a.range[STAT_LOSS].sum - b.range[STAT_LOSS].sum) < 1e-6);
    assert_int_equal(a.range[STAT_ENTROPY].n, 15);
    float *x = whole->learning->policy.weights->base, *y = halves->learning->policy.weights->base;
    for (int64_t i = 0; i < whole->learning->policy.weights->n_elements; i++)
        assert_true(fabsf(x[i] - y[i]) < 1e-4f);
}

// A pass that only looks leaves what is learned from as it was; a masked sample teaches nothing.
TEST(masked_samples_teach_nothing)
{
    struct machine *all = machine(), *masked = machine(), *none = machine();
    struct update_stats stats = {0}, looked = {0}, nothing = {0};
    struct step step = {.loss = {.type = LOSS_DAPO, .epsilon = 0.2, .epsilon_high = 0.2}};
    step.lr = 1e-2;
    masked->samples->completions[2].masked = true;
    step.scale = loss_scale_of(&step.loss, masked->samples, 0, GROUPS);
    assert_true(step.scale.seqs == 3 && step.scale.tokens == 9);
    assert_ok(learner_pass(all->learner, PASS_LOSS, all->samples, 0, GROUPS, &step, &looked));
    assert_same_weights(all, none);
    assert_ok(learner_step(masked->learner, masked->samples, 0, GROUPS, &step, &stats));
    assert_ok(learner_step(all->learner, all->samples, 0, 2, &step, &looked));
    assert_same_weights(all, masked);
    assert_true(stats.range[STAT_RATIO].n == 9 && stats.range[STAT_RATIO].min == 1);
    for (int g = 0; g < GROUPS; g++) none->samples->completions[g].advantage = 0;
    assert_ok(learner_step(none->learner, none->samples, 0, GROUPS, &step, &nothing));
    assert_true(nothing.grad_norm == 0 && nothing.applied == 1);
}

// What an environment wrote has no part in the numbers of what the policy says.
TEST(others_tokens_are_not_counted)
{
    static const uint8_t authors[16] = {AUTHOR_OTHER, AUTHOR_POLICY, AUTHOR_OTHER, AUTHOR_FROZEN};
    struct machine *m = machine();
    struct update_stats stats = {0};
    struct step step = {.loss = {.type = LOSS_DAPO, .epsilon = 0.2, .epsilon_high = 0.2},
                        .lr = 1e-2};
    for (int g = 0; g < GROUPS; g++) m->samples->completions[g].authors = authors;
    long n[AUTHOR_FROZEN + 1] = {0};
    for (int g = 0; g < GROUPS; g++)
        for (int t = 0; t < completions[g]; t++) n[authors[t]]++;
    assert_true(n[AUTHOR_OTHER] > 0 && n[AUTHOR_POLICY] > 0 && n[AUTHOR_FROZEN] > 0);
    step.scale = loss_scale_of(&step.loss, m->samples, 0, GROUPS);
    assert_ok(learner_step(m->learner, m->samples, 0, GROUPS, &step, &stats));
    assert_int_equal(stats.range[STAT_ENTROPY].n, n[AUTHOR_POLICY] + n[AUTHOR_FROZEN]);
    assert_int_equal(stats.range[STAT_FROZEN].sum, n[AUTHOR_FROZEN]);
}

TEST(a_gradient_that_is_not_finite_is_skipped)
{
    struct machine *m = machine(), *before = machine();
    struct update_stats stats = {0};
    struct step step = {.loss = {.type = LOSS_CROSS_ENTROPY}, .lr = 1e-2};
    step.scale = loss_scale_of(&step.loss, m->samples, 0, GROUPS);
    step.publish = (struct publish){publish, m};
    m->samples->completions[1].advantage = NAN;
    assert_ok(learner_step(m->learner, m->samples, 0, GROUPS, &step, &stats));
    assert_true(stats.skipped == 1 && stats.applied == 0 && m->published == 0);
    assert_message("the step must be skipped");
    assert_same_weights(m, before);
    m->samples->completions[1].advantage = 1;
    assert_ok(learner_step(m->learner, m->samples, 0, GROUPS, &step, &stats));
    assert_true(stats.skipped == 1 && stats.applied == 1 && m->published == 1);
}
