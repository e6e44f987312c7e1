/* scoring.h: from a rollout to advantages: the task's reward, the cost of serving each sample, and
 * how the terms are put together. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SCORING_H
#define TRAINER_SCORING_H

#include "trainer/reward/advantage.h"
#include "trainer/reward/cost.h"
#include "trainer/reward/reward.h"
#include "trainer/rollout/rollout.h"

struct scoring { // borrowed parts; how it is done
    struct reward *reward;
    const char *data; // path of the data set, for errors
    struct advantage_config advantage;
    bool normalise_terms;          // --reward-normalise terms; the batch is then the scale
    bool cost;                     // the cost terms count
    const double *weights;         // (COST_TERMS)
    struct latency_model *latency; // NULL: latency as measured
};

struct scores { // of a rollout's samples
    int n, n_terms;
    double *rewards;              // (n) task and costs, as they are
    double *terms;                // (n_terms, n) task terms, unweighted
    double *costs;                // (COST_TERMS, n) quantities, unweighted; NULL without costs
    int n_undrafted;              // samples without an accept_rate, which take a mean; with costs
    float *advantages;            // (n)
    struct advantage_stats stats; // of the rewards as they are; of these advantages
};

// The task's scores of all n samples: ret_terms (n_terms, n), ret_sums (n). Errors name the data
// set's line and the sample.
enum status scoring_task(struct reward *reward, const char *data, const struct rollout *rollout,
                         double *ret_terms, double *ret_sums);
// Zero-initialised or released scores. With a latency model: adds this rollout to it, fits it again
// and takes its latencies.
enum status scoring_rollout(const struct scoring *s, const struct rollout *rollout,
                            struct scores *ret);
// Where samples have several rewards, one a turn: advantages of tokens in place of the samples'.
// Every reward is compared with all of its group's, and a token's advantage is the sum of those
// that come after it (process supervision, Shao et al. 2024). What else counts (other terms, costs)
// stands with the last. ST_UNSUPPORTED with normalise_terms.
enum status scoring_turns(const struct scoring *s, struct rollout *rollout, struct scores *scores);
// The advantages of rewards that were changed since; with normalise_terms of such terms.
enum status scoring_again(const struct scoring *s, const struct rollout *rollout,
                          struct scores *scores);
void scores_release(struct scores *s);

// Every line of the data set has what the reward needs of it: an answer, a pattern; and the reward
// has scored one sample, made of the first line's answer (of no text where it has none).
enum status scoring_check(struct reward *reward, const struct dataset *data);

// A deviation within a group that is no more than this share of the term's largest magnitude in the
// step is what f32 leaves of equal scores, and no difference.
#define SCORING_NOISE 1e-6
// --reward-normalise terms: of each term (n_terms, n), z-scores within each group (0 in a group of
// equals, but for such noise), times the term's weight, summed: ret (n).
void scoring_normalise(const double *terms, const double *weights, int n_terms, int n_groups,
                       int n_per_group, double *ret_sums);

#endif
