/* test_estimators.c: the estimators of advantages against verl's own functions and choices counted
 * out, and samples that nothing scored as in TRL (tests/golden/advantages). */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/names.h"
#include "tests/support/support.h"
#include "trainer/reward/advantage.h"

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
