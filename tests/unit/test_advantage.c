/* test_advantage.c: trainer/advantage, scoring and buckets where rewards differ by chance, or not
 * at all: means, noise of f32, samples without drafts, prompts that are all solved; the estimators
 * against verl's own functions and choices counted out, and samples that nothing scored as in TRL
 * (tests/golden/advantages). */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/reward/advantage.h"
#include "trainer/curriculum/curriculum.h"
#include "trainer/rollout/scoring.h"
#include "common/base/names.h"

// The mean of equal numbers is their value, and that of 0 and 1 a quotient of whole numbers.
TEST(means)
{
    double x[60], mean, std;
    for (int n = 1; n <= 60; n++) {
        for (int i = 0; i < n; i++) x[i] = 0.1;
        mean_std(x, n, &mean, &std);
        assert_true(mean == 0.1 && std == 0);
        for (int right = 0; right <= n; right++) {
            for (int i = 0; i < n; i++) x[i] = i < right;
            mean_std(x, n, &mean, NULL);
            assert_true(mean == (double)right / n);
        }
    }
    mean_std(NULL, 0, &mean, &std);
    assert_true(mean == 0 && std == 0);
}

TEST(equal_groups)
{
    enum { ALL = 70 };
    double rewards[ALL];
    float advantages[ALL];
    struct advantage_stats stats;
    for (int each = 1; each <= 7; each += 6) {
        for (int i = 0; i < ALL; i++) rewards[i] = 0.1 * (1 + i / 7); // no binary fraction
        for (int scale = SCALE_GROUP; scale <= SCALE_NONE; scale++) {
            advantage_estimate(&(struct advantage_config){.scale = (enum advantage_scale)scale},
                               rewards, NULL, NULL, ALL / each, each, &stats, advantages);
            assert_true(stats.frac_zero_std == 1);
            assert_true(stats.group_std == 0);
            assert_true(stats.mean == 0 && stats.std == 0);
            for (int i = 0; i < ALL; i++) assert_true(advantages[i] == 0);
        }
    }
}

TEST(advantages_by_hand)
{
    // mean 0.5625, deviations .4375 -.5625 -.3125 .4375; std with n - 1: 0.515388
    static const double rewards[8] = {1, 0, 0.25, 1, 0.5, 0.5, 0.5, 0.5};
    struct advantage_stats stats;
    float a[3][8];
    double all;
    for (int scale = SCALE_NONE; scale >= SCALE_GROUP; scale--)
        advantage_estimate(&(struct advantage_config){.scale = (enum advantage_scale)scale},
                           rewards, NULL, NULL, 2, 4, &stats, a[scale]);
    const double std = sqrt((2 * 0.4375 * 0.4375 + 0.5625 * 0.5625 + 0.3125 * 0.3125) / 3);
    assert_near(a[SCALE_GROUP][0], 0.4375 / (std + 1e-4), 1e-6);
    assert_near(a[SCALE_GROUP][1], -0.5625 / (std + 1e-4), 1e-6);
    for (int i = 4; i < 8; i++) assert_true(a[SCALE_GROUP][i] == 0);
    assert_near(stats.group_std, std / 2, 1e-9);
    mean_std(rewards, 8, NULL, &all);
    // deviations from 0.53125: .46875 -.53125 -.28125 .46875 and four times -.03125
    assert_near(all, 0.3390506704651344, 1e-12);
    assert_near(stats.reward_std, all, 1e-9);
    assert_true(stats.frac_zero_std == 0.5);
    assert_near(stats.reward_mean, 0.53125, 1e-12);
    assert_near(stats.mean, 0, 1e-7);
    assert_near(a[SCALE_NONE][1], -0.5625, 1e-7);
    assert_near(a[SCALE_BATCH][0], 0.4375 / (all + 1e-4), 1e-6);
}

// --reward-normalise terms: what f32 leaves of equal scores is no difference.
TEST(noise_is_no_score)
{
    const double weights[] = {1, 1};
    double sums[8], plain[8];
    // right, wrong, right, wrong; right x 4. A second term of equal scores computed in f32.
    const double task[8] = {1, 0, 1, 0, 1, 1, 1, 1};
    double terms[16];
    for (int i = 0; i < 8; i++) {
        float third = (float)(i % 4 + 1) / 3; // 3 third / (i + 1) is 1, nearly
        terms[i] = task[i];
        terms[8 + i] = (double)(1e3f * (third * 3 / (float)(i % 4 + 1) + 1e-7f * (float)(i % 3)));
    }
    assert_true(terms[9] != terms[10]);
    scoring_normalise(task, weights, 1, 2, 4, plain);
    scoring_normalise(terms, weights, 2, 2, 4, sums);
    for (int i = 0; i < 8; i++) assert_true(sums[i] == plain[i]);
    // Noise about 0 is one beside another group's scores; a real difference stays one.
    const double about_zero[8] = {1e-9, 2e-9, -1e-9, 0, 0.25, 0.5, 0.75, 1};
    scoring_normalise(about_zero, weights, 1, 2, 4, sums);
    for (int i = 0; i < 4; i++) assert_true(sums[i] == 0);
    assert_true(fabs(sums[7] - 0.375 / sqrt(5.0 / 48)) < 1e-12);
    const double small[4] = {1000, 1000, 1000, 1000.01};
    scoring_normalise(small, weights, 1, 1, 4, sums);
    assert_true(fabs(sums[3] - 1.5) < 1e-6);
}

// --cost: a sample that the daemon drafted nothing for is neither better nor worse for it.
TEST(undrafted_samples)
{
    enum { GROUPS = 3, EACH = 4, N = GROUPS * EACH };
    // one of the first group, two of the second, none of the third
    static const double rates[N] = {1, -1, -1, -1, 0.25, -1, 0.75, -1, -1, -1, -1, -1};
    static const double wanted[N] = {1,    1,   1,       1,       0.25,    0.5,
                                     0.75, 0.5, 2.0 / 3, 2.0 / 3, 2.0 / 3, 2.0 / 3};
    struct example example = {.line = 1};
    const struct example *list[GROUPS] = {&example, &example, &example};
    struct completion samples[N] = {0};
    struct rollout rollout = {
        .n_groups = GROUPS, .n_per_group = EACH, .examples = list, .completions = samples};
    struct scores s = {0};
    struct scoring how = {
        .data = "d.jsonl", .cost = true, .weights = (double[COST_TERMS]){[COST_ACCEPTANCE] = 1}};
    struct reward_options options = {.names = "constant"};
    for (int i = 0; i < N; i++) {
        samples[i].text = (char *)"";
        samples[i].telemetry =
            json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:o}", "latency_ms", 1, "queue_ms",
                      0, "prompt_tokens", 1, "cached_prompt_tokens", 0, "generated_tokens", 1,
                      "num_draft_tokens", 0, "num_accepted_tokens", 0, "kv_bytes_peak", 0,
                      "accept_rate", rates[i] < 0 ? json_null() : json_real(rates[i]));
    }
    assert_ok(reward_new(&options, &how.reward));
    assert_ok(scoring_rollout(&how, &rollout, &s));
    assert_int_equal(s.n_undrafted, 9);
    for (int i = 0; i < N; i++) {
        assert_true(fabs(s.costs[COST_ACCEPTANCE * N + i] - wanted[i]) < 1e-12);
        assert_true(fabs(s.rewards[i] - 1 - wanted[i]) < 1e-12);
        if (rates[i] < 0) assert_true(fabsf(s.advantages[i]) < 1e-6f);
    }
    scores_release(&s);
    reward_free(how.reward);
    for (int i = 0; i < N; i++) json_decref(samples[i].telemetry);
}

static void cut(const double *rewards, int n, struct buckets *ret)
{
    int8_t of[64];
    assert_ok(buckets_cut(rewards, n, 3, 4, ret, of));
}

static int rollouts(const struct buckets *b, int bucket)
{
    const struct curriculum_options o = {.mode = CURRICULUM_KDE, .base = 4, .alpha = 1.5};
    return curriculum_rollouts(&o, b->bucket[bucket].level);
}

// Prompts that are all solved, or all not, get the same number of samples; others are told apart
// as ever.
TEST(solved_prompts)
{
    double solved[30], unsolved[30], mixed[30], failed[30];
    struct buckets b;
    for (int i = 0; i < 30; i++) {
        solved[i] = i % 3 == 0 ? 0.985 : i % 3 == 1 ? 0.993 : 1;
        unsolved[i] = solved[i] - 1.5; // about -0.5
        mixed[i] = (i % 3) / 2.0;
        failed[i] = i % 3 == 0 ? 0 : i % 3 == 1 ? 0.05 : 0.1;
    }
    cut(solved, 30, &b);
    assert_int_equal(b.n, 3); // sorted they are, and reported
    assert_true(fabs(b.contrast - 0.06) < 1e-12);
    for (int k = 0; k < 3; k++) assert_int_equal(rollouts(&b, k), 7);
    cut(unsolved, 30, &b);
    for (int k = 0; k < b.n; k++) assert_int_equal(rollouts(&b, k), 7);
    cut(mixed, 30, &b);
    assert_true(b.n == 3 && b.contrast == 1);
    assert_int_equal(rollouts(&b, 0), 10);
    assert_int_equal(rollouts(&b, 1), 7);
    assert_int_equal(rollouts(&b, 2), 4);
    cut(failed, 30, &b); // some of them are never solved
    assert_true(b.contrast == 1);
    assert_int_equal(rollouts(&b, 0), 10);
    assert_int_equal(rollouts(&b, 2), 4);
}

// ---- estimators ---------------------------------------------------------------------------------

enum { GROUPS = 4, EACH = 6, N = GROUPS * EACH };

static int value_of(const char *const names[], const char *text)
{
    int value = 0;
    assert_ok(name_parse(names, text, &value));
    return value;
}

static void read_row(char *text, double ret[N])
{
    for (int i = 0; i < N; i++) ret[i] = strtod(text, &text);
}

static void check_line(char *line)
{
    double rewards[N], lengths[N], want[N];
    float have[N];
    int n_tokens[N];
    struct advantage_stats stats;
    struct advantage_config config = {0};
    const char *name = strsep(&line, " ");
    config.estimator = (enum advantage_estimator)value_of(advantage_estimator_names, name);
    config.scale = (enum advantage_scale)value_of(advantage_scale_names, strsep(&line, " "));
    config.pass_k = atoi(strsep(&line, " "));
    strsep(&line, "|");
    read_row(strsep(&line, "|"), rewards);
    read_row(strsep(&line, "|"), lengths);
    read_row(line, want);
    for (int i = 0; i < N; i++) n_tokens[i] = (int)lengths[i];
    advantage_estimate(&config, rewards, n_tokens, NULL, GROUPS, EACH, &stats, have);
    for (int i = 0; i < N; i++)
        if (!(fabs(have[i] - want[i]) <= 2e-6 * fmax(1, fabs(want[i]))))
            fail_msg("%s, k %d, sample %d: %.9g, not %.9g", name, config.pass_k, i, (double)have[i],
                     want[i]);
}

TEST(verl_and_trl_agree)
{
    assert_int_equal(for_lines("tests/golden/advantages/advantages.txt", check_line), 34);
}

// Means of what was scored; a group of which nothing was tells nothing.
TEST(unscored_is_not_counted)
{
    const double rewards[6] = {1, NAN, 0, NAN, NAN, NAN};
    float advantages[6];
    struct advantage_stats stats;
    advantage_estimate(&(struct advantage_config){.scale = SCALE_NONE}, rewards, NULL, NULL, 2, 3,
                       &stats, advantages);
    assert_true(stats.reward_mean == 0.5 && stats.frac_zero_std == 0.5);
    assert_true(advantages[0] == 0.5f && advantages[1] == 0 && advantages[4] == 0);
    double mean;
    mean_std(rewards + 3, 3, &mean, NULL);
    assert_true(isnan(mean));
}
