/* test_update.c: trainer/update on a real daemon's weights, with a rollout written here: which
 * log-probabilities the importance ratio and the sampler's correction are taken from, over one and
 * several iterations, and what becomes of a draft model meanwhile. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "tests/support/daemon.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/step.h"
#include "trainer/rollout/rollout.h"

#define GROUPS    2
#define PER_GROUP 2
#define SAMPLES   (GROUPS * PER_GROUP)
#define TOKENS    5 // of each sample

struct scene {
    struct daemon daemon;
    struct bridge *bridge;
    struct model_config *config;
    struct weights *policy;
    struct learner *learner;
    struct reference draft; // only its weights are used
    struct example prompts[GROUPS];
    const struct example *examples[GROUPS];
    struct token_list own_prompts[GROUPS]; // none
    struct completion samples[SAMPLES];
    struct rollout rollout;
};

static int32_t prompt_ids[GROUPS][3] = {{5, 9, 11}, {40, 41, 42}};
static const float advantages[SAMPLES] = {1, -1, 0.5, -0.5};

static void write_rollout(struct scene *s)
{
    s->rollout = (struct rollout){.n_groups = GROUPS,
                                  .n_per_group = PER_GROUP,
                                  .examples = s->examples,
                                  .prompts = s->own_prompts,
                                  .completions = s->samples,
                                  .n_tokens = SAMPLES * TOKENS};
    for (int g = 0; g < GROUPS; g++) {
        s->prompts[g].prompt_ids = (struct token_list){.ids = prompt_ids[g], .n = 3};
        s->examples[g] = &s->prompts[g];
    }
    for (int i = 0; i < SAMPLES; i++) {
        struct completion *sample = &s->samples[i];
        sample->n = TOKENS;
        sample->ids = calloc(TOKENS, sizeof *sample->ids);
        sample->logprobs = calloc(TOKENS, sizeof *sample->logprobs);
        sample->versions = calloc(TOKENS, sizeof *sample->versions);
        for (int t = 0; t < TOKENS; t++) {
            sample->ids[t] = 20 + 17 * i + 5 * t;
            sample->versions[t] = control_version(bridge_control(s->bridge));
        }
    }
}

// The trainer's own log-probabilities, as the daemon's.
static void agree(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct scene *s = context;
    (void)ret_dlogprobs;
    for (int i = 0; i < rows->mb->n_seqs; i++)
        memcpy(s->samples[rows->mb->sample[i]].logprobs, rows->logprobs + rows->mb->first[i],
               TOKENS * sizeof(float));
}

// The daemon found every token of sample i exp(by) times likelier than the trainer does.
static void disagree(struct scene *s, int i, float by)
{
    for (int t = 0; t < TOKENS; t++) s->samples[i].logprobs[t] += by;
}

static void add_draft(struct scene *s)
{
    const struct learner_draft_config options = {
        .optimizer = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}, .loss_weight = 1};
    const char *folder = test_folder();
    assert_ok(tiny_model_write(folder, 32, 1, 300, 8));
    reference_open(folder, "cpu", &s->draft);
    assert_ok(learner_add_draft(s->learner, s->draft.config, s->draft.weights, &options));
}

static void scene_open(struct scene *s, bool draft)
{
    const struct learner_config options = {
        .optimizer = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8},
        .temperature = 1,
        .token_budget = 16, // a micro-batch for each group
        .logits_chunk = 16,
        .max_seqs = SAMPLES + GROUPS,
        .max_context = 16,
    };
    if (draft && !on_cpu()) test_skip("the draft of this test lies in CPU memory");
    memset(s, 0, sizeof *s);
    const char *model = daemon_model(test_folder(), false, 3);
    daemon_start(&s->daemon, model, NULL);
    assert_ok(bridge_attach(s->daemon.bridge, NULL, &s->bridge));
    assert_ok(bridge_become_writer(s->bridge));
    assert_ok(model_config_load(model, &s->config));
    assert_ok(weights_plan(s->config, DT_F32, &s->policy));
    weights_bind(s->policy, bridge_base(s->bridge, "policy"));
    assert_ok(
        learner_new(bridge_device(s->bridge), s->config, s->policy, false, &options, &s->learner));
    if (draft) add_draft(s);
    assert_ok(learner_prepare(s->learner));
    write_rollout(s);
    struct pack_completion completions[SAMPLES];
    struct pack_group groups[GROUPS];
    for (int i = 0; i < SAMPLES; i++)
        completions[i] = (struct pack_completion){.ids = s->samples[i].ids, .n = TOKENS};
    for (int g = 0; g < GROUPS; g++)
        groups[g] = (struct pack_group){.prompt = prompt_ids[g],
                                        .n_prompt = 3,
                                        .completions = completions + PER_GROUP * g,
                                        .n = PER_GROUP};
    assert_ok(learner_run(s->learner, PASS_LOSS, groups, GROUPS, agree, s, NULL));
}

static void scene_close(struct scene *s)
{
    for (int i = 0; i < SAMPLES; i++) {
        free(s->samples[i].ids);
        free(s->samples[i].logprobs);
        free(s->samples[i].versions);
    }
    learner_free(s->learner);
    if (s->draft.dev) reference_close(&s->draft);
    weights_free(s->policy);
    model_config_free(s->config);
    bridge_detach(s->bridge);
    assert_int_equal(daemon_stop(&s->daemon), 0);
    daemon_kill(&s->daemon);
}

// A test in a scene of its own, with a draft model or without.
#define IN_SCENE(name, draft)                                                                      \
    static void in_##name(struct scene *s);                                                        \
    TEST(name)                                                                                     \
    {                                                                                              \
        struct scene s;                                                                            \
        scene_open(&s, draft);                                                                     \
        in_##name(&s);                                                                             \
        scene_close(&s);                                                                           \
    }                                                                                              \
    static void in_##name(struct scene *s)

static const struct update_config plain = {
    .step.loss =
        {
            .type = LOSS_DAPO,
            .epsilon = 0.2,
            .epsilon_high = 0.2,
            .kl_estimator = KL_K3,
            .tis_max = 3,
        },
    .num_iterations = 1,
};

static enum status publish(void *context, enum status (*write)(void *), void *update,
                           struct publish_times *ret_times)
{
    struct scene *s = context;
    return bridge_publish(s->bridge, 30000, write, update, ret_times);
}

static enum status try_update(struct scene *s, const struct update_config *config,
                              struct rollout *rollout, const float *by, double lr,
                              struct update_stats *ret)
{
    struct update_config c = *config;
    struct samples *samples;
    c.step.lr = lr;
    c.step.version = control_version(bridge_control(s->bridge));
    c.step.publish = (struct publish){publish, s};
    assert_ok(rollout_samples(rollout, &(struct rollout_learning){.advantages = by}, &samples));
    enum status st = update_policy(s->learner, &c, samples, ret);
    samples_free(samples);
    return st;
}

// At a learning rate of 0 the weights, and so the gradients of the next call, stay as they are.
static struct update_stats update(struct scene *s, enum tis_mode mode, int iterations, double lr)
{
    struct update_config config = plain;
    struct update_stats stats;
    config.step.loss.tis = mode;
    config.num_iterations = iterations;
    assert_ok(try_update(s, &config, &s->rollout, advantages, lr, &stats));
    assert_int_equal(stats.applied, iterations);
    return stats;
}

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-5 * fmax(1, fabs(b));
}

IN_SCENE(sampler_is_corrected, false)
{
    struct update_stats off = update(s, TIS_OFF, 1, 0);
    struct update_stats on = update(s, TIS_SEQUENCE_MASK, 1, 0);
    assert_true(off.grad_norm > 1e-3 && near(on.grad_norm, off.grad_norm));
    assert_true(near(stats_mean(&on, STAT_TIS), 1) && stats_mean(&on, STAT_TIS_CUT) == 0);

    // All tokens likelier there by a half: weights of exp(-1/2), and the gradient with them.
    for (int i = 0; i < SAMPLES; i++) disagree(s, i, 0.5f);
    struct update_stats u = update(s, TIS_TOKEN_TRUNCATE, 1, 0);
    assert_true(u.range[STAT_RATIO].min == 1 &&
                u.range[STAT_RATIO].max == 1); // the policy has not moved
    assert_true(near(stats_mean(&u, STAT_TIS), exp(-0.5)) &&
                near(stats_mean(&u, STAT_MISMATCH), 0.5));
    assert_true(near(u.grad_norm, exp(-0.5) * off.grad_norm));
    u = update(s, TIS_SEQUENCE_TRUNCATE, 1, 0); // the product over five tokens
    assert_true(near(u.grad_norm, exp(-2.5) * off.grad_norm));
    u = update(s, TIS_OFF, 1, 0);
    assert_true(near(u.grad_norm, off.grad_norm) && stats_mean(&u, STAT_TIS) == 0);

    // And less likely: beyond the cap of 3 for the sequence, not for a token.
    for (int i = 0; i < SAMPLES; i++) disagree(s, i, -1);
    u = update(s, TIS_TOKEN_MASK, 1, 0);
    assert_true(near(u.grad_norm, exp(0.5) * off.grad_norm) && stats_mean(&u, STAT_TIS_CUT) == 0);
    u = update(s, TIS_SEQUENCE_TRUNCATE, 1, 0);
    assert_true(near(u.grad_norm, 3 * off.grad_norm) && stats_mean(&u, STAT_TIS_CUT) == 1);
    u = update(s, TIS_SEQUENCE_MASK, 1, 0);
    assert_true(u.grad_norm == 0 && u.range[STAT_TIS].max == 0 &&
                stats_mean(&u, STAT_TIS_CUT) == 1);
    disagree(s, 2, 0.5f); // one sample of four agrees again
    u = update(s, TIS_SEQUENCE_MASK, 1, 0);
    assert_true(near(stats_mean(&u, STAT_TIS), 0.25) && stats_mean(&u, STAT_TIS_CUT) == 0.75 &&
                u.grad_norm > 0);
}

IN_SCENE(ratio_is_to_the_first_iteration, false)
{
    for (int i = 0; i < SAMPLES; i++) disagree(s, i, 0.5f);
    struct update_stats u = update(s, TIS_TOKEN_TRUNCATE, 3, 0);
    assert_true(near(u.range[STAT_RATIO].min, 1) &&
                near(u.range[STAT_RATIO].max, 1)); // three times the same policy
    assert_true(u.range[STAT_CLIP_LOW].sum == 0 && u.range[STAT_CLIP_HIGH].sum == 0);
    u = update(s, TIS_TOKEN_TRUNCATE, 3, 1e-2);
    // what is better than its group became likelier, what is worse less so, past the bounds
    assert_true(u.range[STAT_RATIO].max > 1.2 && u.range[STAT_RATIO].min < 0.8);
    assert_true(u.range[STAT_CLIP_LOW].sum > 0 && u.range[STAT_CLIP_HIGH].sum > 0 &&
                u.range[STAT_SEQ_CLIP_HIGH].max > 0);
    assert_true(near(stats_mean(&u, STAT_TIS), exp(-0.5))); // the same in all three
}

static uint64_t version(const struct scene *s)
{
    return control_version(bridge_control(s->bridge));
}

// Of three iterations the draft learns from the first, and is published with it.
IN_SCENE(draft_learns_once_a_step, true)
{
    struct optimizer *policy = learner_info(s->learner)->optimizer;
    struct optimizer *draft = learner_info(learner_info(s->learner)->draft)->optimizer;
    uint64_t before = version(s);
    struct update_stats u = update(s, TIS_OFF, 3, 0);
    assert_int_equal(version(s), before + 6);
    assert_int_equal(optimizer_steps(policy), 3);
    assert_int_equal(optimizer_steps(draft), 1);
    assert_int_equal(u.draft_targets, SAMPLES * TOKENS);
    assert_true(stats_mean(&u, STAT_DRAFT_KL) > 0 && stats_mean(&u, STAT_DRAFT_OVERLAP) > 0 &&
                stats_mean(&u, STAT_DRAFT_OVERLAP) < 1);
    assert_true(u.draft_grad_norm > 0 && !near(u.draft_grad_norm, u.grad_norm));
}

// The policy goes on without a draft whose gradient is not finite.
IN_SCENE(broken_draft_is_left_alone, true)
{
    float *w = s->draft.weights->base;
    const size_t bytes = (size_t)s->draft.weights->n_elements * sizeof *w;
    float *saved = test_keep(malloc(bytes));
    ((float *)s->draft.weights->at[ROLE_FINAL_NORM])[3] = NAN;
    memcpy(saved, w, bytes);
    uint64_t before = version(s);
    struct update_stats u = update(s, TIS_OFF, 1, 0);
    assert_true(u.draft_skipped && u.grad_norm > 0);
    assert_int_equal(version(s), before + 2);
    assert_int_equal(optimizer_steps(learner_info(learner_info(s->learner)->draft)->optimizer), 0);
    assert_memory_equal(saved, w, bytes);
}

// A bit between daemon and trainer ends an exact step before anything is written.
TEST(exact_wants_every_bit)
{
    struct scene s;
    struct update_config config = plain;
    struct update_stats stats;
    scene_open(&s, false);
    config.step.exact = true;
    assert_ok(try_update(&s, &config, &s.rollout, advantages, 1e-2, &stats));
    assert_true(stats.range[STAT_MISMATCH_NOW].max == 0 && stats.applied == 1);
    // what that update changed is no longer what the samples were drawn from
    const uint64_t version = control_version(bridge_control(s.bridge));
    assert_fails(try_update(&s, &config, &s.rollout, advantages, 1e-2, &stats), ST_MISMATCH,
                 "of 20 log-probabilities of this step differ");
    assert_int_equal(control_version(bridge_control(s.bridge)), version);
    scene_close(&s);

    scene_open(&s, false);
    s.prompts[1].line = 34;
    float *one = &s.samples[3].logprobs[2];
    *one = nextafterf(*one, 0);
    assert_fails(try_update(&s, &config, &s.rollout, advantages, 1e-2, &stats), ST_MISMATCH,
                 "--exact: 1 of 20 log-probabilities");
    assert_message("line 34, sample 1, token 2");
    scene_close(&s);
}

static struct update_stats update_by(struct scene *s, const struct update_config *config,
                                     struct rollout *rollout, const float *by, double lr)
{
    struct update_stats stats;
    assert_ok(try_update(s, config, rollout, by, lr, &stats));
    return stats;
}

// Two updates of a group each: the second has the gradient of its group alone, is compared with
// the policy before the first, and has a rate of its own.
IN_SCENE(parts_have_updates_of_their_own, false)
{
    struct update_config config = plain;
    const struct schedule falling = {.type = SCHEDULE_LINEAR, .peak = 1e-2, .total_steps = 10};
    struct rollout second = {.n_groups = 1,
                             .n_per_group = PER_GROUP,
                             .examples = s->examples + 1,
                             .prompts = s->own_prompts + 1,
                             .completions = s->samples + PER_GROUP,
                             .n_tokens = PER_GROUP * TOKENS};
    const struct update_stats alone = update_by(s, &config, &second, advantages + PER_GROUP, 0);
    config.mini_batches = GROUPS;
    struct update_stats u = update_by(s, &config, &s->rollout, advantages, 0);
    assert_int_equal(u.applied, GROUPS);
    assert_true(near(u.grad_norm, alone.grad_norm));
    assert_true(u.range[STAT_RATIO].min == 1 && u.range[STAT_RATIO].max == 1);
    config.schedule = &falling;
    config.first_update = 3;
    u = update_by(s, &config, &s->rollout, advantages, 0);
    assert_true(u.lr == schedule_at(&falling, 4) && u.range[STAT_MISMATCH_NOW].max == 0);
    // the first part, whose ratio is 1, then the second, which that has moved
    assert_true(u.range[STAT_RATIO].max > 1 || u.range[STAT_RATIO].min < 1);
    assert_int_equal(u.range[STAT_RATIO].n, SAMPLES * TOKENS);
    config.num_iterations = 2;
    assert_int_equal(update_by(s, &config, &s->rollout, advantages, 0).applied, 2 * GROUPS);
}

// The bonus alone moves the policy, towards more entropy or less; the tokens of highest entropy are
// found in a pass of their own.
TEST(entropy_is_rewarded)
{
    static const float none[SAMPLES] = {0};
    for (int sign = -1; sign <= 1; sign += 2) {
        struct scene s;
        struct update_config config = plain;
        const struct entropy_config entropy = {.coef = sign * 0.5, .top_quantile = 1};
        struct entropy_state bonus = {.coef = entropy.coef, .last = INFINITY};
        scene_open(&s, false);
        config.step.entropy = &entropy;
        config.step.entropy_state = &bonus;
        const struct update_stats before = update_by(&s, &config, &s.rollout, none, 1e-3);
        const double policy_loss =
            stats_per_update(&before, STAT_LOSS) - stats_per_update(&before, STAT_EXTRA_LOSS);
        assert_true(near(stats_per_update(&before, STAT_LOSS),
                         policy_loss - entropy.coef * stats_mean(&before, STAT_ENTROPY)));
        assert_true(before.grad_norm > 1e-4 && policy_loss == 0);
        const struct update_stats after = update_by(&s, &config, &s.rollout, none, 0);
        assert_true(sign * (stats_mean(&after, STAT_ENTROPY) - stats_mean(&before, STAT_ENTROPY)) >
                    1e-5);
        scene_close(&s);
    }
}

IN_SCENE(high_entropy_alone, false)
{
    static const float ones[SAMPLES] = {1, 1, 1, 1};
    struct update_config config = plain;
    struct entropy_config entropy = {.coef = 0, .top_quantile = 1};
    struct entropy_state bonus = {.coef = entropy.coef, .last = INFINITY};
    const struct update_stats all = update_by(s, &config, &s->rollout, ones, 0);
    config.step.entropy = &entropy;
    config.step.entropy_state = &bonus;
    assert_true(update_by(s, &config, &s->rollout, ones, 0).grad_norm == all.grad_norm);
    // One token, or the first ones of a group, which have the same context: at a ratio of 1 the
    // term is the advantage.
    entropy.top_quantile = 0;
    const struct update_stats one = update_by(s, &config, &s->rollout, ones, 0);
    const double term = fabs(stats_per_update(&one, STAT_LOSS)) * SAMPLES * TOKENS;
    assert_true(near(term, 1) || near(term, 2));
    assert_true(one.grad_norm > 0 && one.grad_norm < all.grad_norm);
    assert_true(stats_mean(&one, STAT_ENTROPY) == stats_mean(&all, STAT_ENTROPY) &&
                one.range[STAT_MISMATCH_NOW].max == 0);
}
