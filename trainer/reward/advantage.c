/* advantage.c: group-relative advantages. Pure functions, in double. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/advantage.h"

#include <math.h>
#include <stddef.h>

#define ADVANTAGE_EPS 1e-4
#define PASSK_EPS     1e-6 // these two verl's
#define WHITEN_EPS    1e-8

const char *const advantage_estimator_names[] = {
    "grpo",      "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_passk",
    "pass_at_k", NULL};
const char *const advantage_scale_names[] = {"group", "batch", "none", NULL};

void mean_std(const double *x, int n, double *ret_mean, double *ret_std)
{
    double sum = 0, squares = 0, min = INFINITY, max = -INFINITY;
    int known = 0;
    for (int i = 0; i < n; i++) {
        if (isnan(x[i])) continue;
        sum += x[i];
        min = fmin(min, x[i]);
        max = fmax(max, x[i]);
        known++;
    }
    // One division, and never outside of what it is the mean of: equal numbers give themselves.
    double mean = known ? fmin(fmax(sum / known, min), max) : n ? NAN : 0;
    for (int i = 0; i < n; i++)
        if (!isnan(x[i])) squares += (x[i] - mean) * (x[i] - mean);
    if (ret_mean) *ret_mean = mean;
    if (ret_std) *ret_std = known > 1 ? sqrt(squares / (known - 1)) : 0;
}

bool rewards_are_equal(const double *x, int n)
{
    double first = NAN;
    for (int i = 0; i < n; i++) {
        if (isnan(first)) first = x[i];
        if (!isnan(x[i]) && x[i] != first) return false;
    }
    return true;
}

// ---- of a group ---------------------------------------------------------------------------------

static void best_alone(const double *rewards, int n, double divisor, float *ret)
{
    int best = -1, second = -1;
    for (int i = 0; i < n; i++) {
        ret[i] = 0;
        if (isnan(rewards[i])) continue;
        if (best < 0 || rewards[i] > rewards[best]) {
            second = best;
            best = i;
        } else if (second < 0 || rewards[i] > rewards[second]) {
            second = i;
        }
    }
    if (second >= 0) ret[best] = (float)((rewards[best] - rewards[second]) / divisor);
}

double share_of_choices(int some, int n, int k)
{
    double share = 1;
    for (int i = 0; i < k; i++) share *= (double)(some - i > 0 ? some - i : 0) / (n - i);
    return share;
}

// Each sample's advantage is the mean over the choices of k that it is in, of whose passing the
// mean and the deviation are known in closed form.
static void of_choices(const double *rewards, int n, int known, int k, float *ret)
{
    int failed = 0;
    for (int i = 0; i < n; i++) failed += rewards[i] <= 0;
    const double passes = 1 - share_of_choices(failed, known, k), std = sqrt(passes * (1 - passes));
    for (int i = 0; i < n; i++) {
        ret[i] = 0;
        if (isnan(rewards[i]) || std == 0) continue;
        const double mine = rewards[i] > 0 ? 1 : 1 - share_of_choices(failed - 1, known - 1, k - 1);
        ret[i] = (float)((mine - passes) / std);
    }
}

// divisor: of centred rewards.
static void estimate_group(const struct advantage_config *config, const double *rewards, int n,
                           double mean, double divisor, float *ret)
{
    int known = 0;
    for (int i = 0; i < n; i++) known += !isnan(rewards[i]);
    switch (config->estimator) {
    case ADVANTAGE_RLOO:
        for (int i = 0; i < n; i++)
            ret[i] = isnan(rewards[i]) || known < 2
                         ? 0
                         : (float)((rewards[i] - mean) * known / (known - 1));
        return;
    case ADVANTAGE_GRPO_PASSK:
        best_alone(rewards, n, divisor, ret);
        return;
    case ADVANTAGE_PASS_AT_K:
        of_choices(rewards, n, known, config->pass_k < known ? config->pass_k : known, ret);
        return;
    case ADVANTAGE_REINFORCE_PLUS_PLUS:
        mean = 0;
        divisor = 1;
        break;
    case ADVANTAGE_REINFORCE_PLUS_PLUS_BASELINE:
        divisor = 1;
        break;
    case ADVANTAGE_GRPO:
        break;
    }
    // exactly 0 of equal rewards
    for (int i = 0; i < n; i++)
        ret[i] = isnan(rewards[i]) ? 0 : (float)((rewards[i] - mean) / divisor);
}

// ---- of a batch ---------------------------------------------------------------------------------

// To a mean of 0 and a variance of 1 over tokens, all of a sample's alike.
static void whiten(const double *rewards, const int *n_tokens, int n, float *x)
{
    double tokens = 0, sum = 0, squares = 0;
    for (int i = 0; i < n; i++) {
        if (isnan(rewards[i])) continue;
        tokens += n_tokens[i];
        sum += (double)x[i] * n_tokens[i];
    }
    const double mean = tokens > 0 ? sum / tokens : 0;
    for (int i = 0; i < n; i++)
        if (!isnan(rewards[i])) squares += (x[i] - mean) * (x[i] - mean) * n_tokens[i];
    const double variance = tokens > 1 ? squares / (tokens - 1) : 0;
    for (int i = 0; i < n; i++)
        x[i] = isnan(rewards[i]) ? 0 : (float)((x[i] - mean) / sqrt(variance + WHITEN_EPS));
}

void advantage_estimate(const struct advantage_config *config, const double *rewards,
                        const int *n_tokens, const int *first, int n_groups, int n_per_group,
                        struct advantage_stats *ret_stats, float *ret_advantages)
{
    const int n = first ? first[n_groups] : n_groups * n_per_group;
    const double eps = config->estimator == ADVANTAGE_GRPO_PASSK ? PASSK_EPS : ADVANTAGE_EPS;
    struct advantage_stats stats = {0};
    double sum = 0, squares = 0;
    int n_flat = 0;
    mean_std(rewards, n, &stats.reward_mean, &stats.reward_std);
    for (int g = 0; g < n_groups; g++) {
        const size_t at = first ? (size_t)first[g] : (size_t)g * (size_t)n_per_group;
        const int size = first ? first[g + 1] - first[g] : n_per_group;
        double mean, std;
        mean_std(rewards + at, size, &mean, &std);
        stats.group_std += std;
        n_flat += rewards_are_equal(rewards + at, size);
        const double divisor = config->scale == SCALE_NONE    ? 1
                               : config->scale == SCALE_GROUP ? std + eps
                                                              : stats.reward_std + eps;
        estimate_group(config, rewards + at, size, mean, divisor, ret_advantages + at);
    }
    if (config->estimator == ADVANTAGE_REINFORCE_PLUS_PLUS ||
        config->estimator == ADVANTAGE_REINFORCE_PLUS_PLUS_BASELINE)
        whiten(rewards, n_tokens, n, ret_advantages);
    stats.group_std /= n_groups;
    stats.frac_zero_std = (double)n_flat / n_groups;
    for (int i = 0; i < n; i++) sum += ret_advantages[i];
    stats.mean = sum / n;
    for (int i = 0; i < n; i++)
        squares += (ret_advantages[i] - stats.mean) * (ret_advantages[i] - stats.mean);
    stats.std = n > 1 ? sqrt(squares / (n - 1)) : 0;
    *ret_stats = stats;
}
