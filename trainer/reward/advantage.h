/* advantage.h: how much better than its group a sample was (Shao et al. 2024), or by another
 * estimator. Host arrays. A reward that is no number (NaN) is of a sample that nothing scored: it
 * has no part in any mean or deviation, and its advantage is 0, as in TRL. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_ADVANTAGE_H
#define TRAINER_ADVANTAGE_H

#include <stdbool.h>

// What the centred rewards are divided by, as TRL's scale_rewards: the group's standard deviation
// (with n - 1) + 1e-4, that of all samples of the step, or nothing (Liu et al. 2025).
enum advantage_scale { SCALE_GROUP, SCALE_BATCH, SCALE_NONE };
extern const char *const advantage_scale_names[];

// Named as in verl where verl has them. With r a reward, n the samples of its group:
enum advantage_estimator {
    ADVANTAGE_GRPO, // r - mean of the group, scaled
    ADVANTAGE_RLOO, // r - mean of the group's others (Ahmadian et al. 2024)
    // r, or r - mean of the group, whitened over the tokens of all samples (Hu 2025)
    ADVANTAGE_REINFORCE_PLUS_PLUS,
    ADVANTAGE_REINFORCE_PLUS_PLUS_BASELINE,
    ADVANTAGE_GRPO_PASSK, // of the best alone: its r - the second best's, scaled
    ADVANTAGE_PASS_AT_K   // of k samples of the group, any passes (Chen et al. 2025)
};
extern const char *const advantage_estimator_names[];

struct advantage_config {
    enum advantage_estimator estimator;
    enum advantage_scale scale; // of ADVANTAGE_GRPO and _GRPO_PASSK
    int pass_k;                 // of ADVANTAGE_PASS_AT_K; a reward above 0 passes
};

struct advantage_stats {
    double reward_mean;   // over all samples
    double reward_std;    // over all samples, as TRL reports it
    double group_std;     // mean over groups of the group's own
    double frac_zero_std; // share of groups whose rewards are all equal: they teach nothing
    double mean, std;     // of the advantages
};

// rewards, n_tokens (of the policy; NULL: not of reinforce_plus_plus) and ret_advantages are
// (n_groups, n_per_group), group by group. first, not NULL: groups of any size, of which g has
// entries first[g] to first[g + 1] - 1; of one of a single sample the advantage by GRPO is 0.
void advantage_estimate(const struct advantage_config *config, const double *rewards,
                        const int *n_tokens, const int *first, int n_groups, int n_per_group,
                        struct advantage_stats *ret_stats, float *ret_advantages);

// The share of choices of k out of n that are out of `some` of them alone.
double share_of_choices(int some, int n, int k);
// NaNs aside; also where there is none but these.
bool rewards_are_equal(const double *rewards, int n);

// Mean and standard deviation with n - 1; both 0 for n = 0, the second 0 for n = 1. Of equal
// numbers the mean is exactly their value and the deviation exactly 0. NaNs are left out; where all
// are, the mean is one. Either may be NULL.
void mean_std(const double *x, int n, double *ret_mean, double *ret_std);

#endif
