/* advantage.c: group-relative advantages. Pure functions, in double. */
#include "trainer/rollout/advantage.h"

#include <math.h>
#include <stddef.h>

#define ADVANTAGE_EPS 1e-4

const char *const advantage_scale_names[] = {"group", "batch", "none", NULL};

void mean_std(const double *x, int n, double *ret_mean, double *ret_std)
{
    double sum = 0, squares = 0, min = n ? x[0] : 0, max = min;
    for (int i = 0; i < n; i++) {
        sum += x[i];
        min = fmin(min, x[i]);
        max = fmax(max, x[i]);
    }
    // One division, and never outside of what it is the mean of: equal numbers give themselves.
    double mean = n ? fmin(fmax(sum / n, min), max) : 0;
    for (int i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
    if (ret_mean) *ret_mean = mean;
    if (ret_std) *ret_std = n > 1 ? sqrt(squares / (n - 1)) : 0;
}

static bool all_equal(const double *x, int n)
{
    for (int i = 1; i < n; i++)
        if (x[i] != x[0]) return false;
    return true;
}

// first: NULL where all groups have n_per_group.
static void compute(const double *rewards, const int *first, int n_groups, int n_per_group,
                    enum advantage_scale scale, struct advantage_stats *ret_stats,
                    float *ret_advantages)
{
    int n = first ? first[n_groups] : n_groups * n_per_group, n_flat = 0;
    double batch_std, sum = 0, squares = 0;
    struct advantage_stats stats = {0};
    mean_std(rewards, n, &stats.reward_mean, &batch_std);
    stats.reward_std = batch_std;
    for (int g = 0; g < n_groups; g++) {
        const size_t at = first ? (size_t)first[g] : (size_t)g * (size_t)n_per_group;
        const int size = first ? first[g + 1] - first[g] : n_per_group;
        const double *group = rewards + at;
        float *advantages = ret_advantages + at;
        double mean, std;
        mean_std(group, size, &mean, &std);
        stats.group_std += std;
        n_flat += all_equal(group, size);
        double divisor = scale == SCALE_GROUP   ? std + ADVANTAGE_EPS
                         : scale == SCALE_BATCH ? batch_std + ADVANTAGE_EPS
                                                : 1;
        for (int i = 0; i < size; i++) {
            advantages[i] = (float)((group[i] - mean) / divisor); // exactly 0 of equal rewards
            sum += advantages[i];
        }
    }
    stats.group_std /= n_groups;
    stats.frac_zero_std = (double)n_flat / n_groups;
    stats.mean = sum / n;
    for (int i = 0; i < n; i++)
        squares += (ret_advantages[i] - stats.mean) * (ret_advantages[i] - stats.mean);
    stats.std = n > 1 ? sqrt(squares / (n - 1)) : 0;
    *ret_stats = stats;
}

void advantage_compute(const double *rewards, int n_groups, int n_per_group,
                       enum advantage_scale scale, struct advantage_stats *ret_stats,
                       float *ret_advantages)
{
    compute(rewards, NULL, n_groups, n_per_group, scale, ret_stats, ret_advantages);
}

void advantage_compute_groups(const double *rewards, const int *first, int n_groups,
                              enum advantage_scale scale, struct advantage_stats *ret_stats,
                              float *ret_advantages)
{
    compute(rewards, first, n_groups, 0, scale, ret_stats, ret_advantages);
}
