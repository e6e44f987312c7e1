/* advantage.h: how much better than its group a sample was (Shao et al. 2024). Host arrays. */
#ifndef TRAINER_ADVANTAGE_H
#define TRAINER_ADVANTAGE_H

#include "common/base/status.h"

// What the centred rewards are divided by, as TRL's scale_rewards: the group's standard deviation
// (with n - 1) + 1e-4, that of all samples of the step, or nothing (Liu et al. 2025).
enum advantage_scale { SCALE_GROUP, SCALE_BATCH, SCALE_NONE };
extern const char *const advantage_scale_names[];

struct advantage_stats {
    double reward_mean;   // over all samples
    double reward_std;    // over all samples, as TRL reports it
    double group_std;     // mean over groups of the group's own
    double frac_zero_std; // share of groups whose rewards are all equal: they teach nothing
    double mean, std;     // of the advantages
};

// rewards and ret_advantages are (n_groups, n_per_group), group by group.
void advantage_compute(const double *rewards, int n_groups, int n_per_group,
                       enum advantage_scale scale, struct advantage_stats *ret_stats,
                       float *ret_advantages);

// The same of groups of any size: group g has entries first[g] to first[g + 1] - 1. One of a single
// sample is compared with nothing: its advantage is 0.
void advantage_compute_groups(const double *rewards, const int *first, int n_groups,
                              enum advantage_scale scale, struct advantage_stats *ret_stats,
                              float *ret_advantages);

// Mean and standard deviation with n - 1; both 0 for n = 0, the second 0 for n = 1. Of equal
// numbers the mean is exactly their value and the deviation exactly 0. Either may be NULL.
void mean_std(const double *x, int n, double *ret_mean, double *ret_std);

#endif
