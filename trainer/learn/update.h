/* update.h: what is learned from a step's samples: --num-iterations times over their
 * --steps-per-generation mini-batches, an update each. A draft model learns in the first of them.
 * One thread. */
#ifndef TRAINER_UPDATE_H
#define TRAINER_UPDATE_H

#include "trainer/learn/schedule.h"
#include "trainer/learn/step.h"

struct update_config {
    struct step step;   // but for its scale
    int num_iterations; // over all samples
    int mini_batches;   // whole groups, one update each; 0: 1, all of them
    // The learning rate of the i-th update is that of the schedule's step first_update + i. NULL:
    // step.lr of all.
    const struct schedule *schedule;
    int64_t first_update;
};

// samples: begun. A failure leaves the weights as they are, but for those of earlier updates. On
// all ranks, whose statistics are merged into ret.
enum status update_policy(struct learner *l, const struct update_config *config,
                          struct samples *samples, struct update_stats *ret);
// Each of n numbers, summed over the ranks that train together.
enum status update_sum(struct learner *l, double *x, long n);
// samples->logprobs of all ranks, on all of them: ret (targets).
enum status update_share_logprobs(struct learner *l, const struct samples *samples, double *ret);

#endif
