/* step.h: one step of learning, whatever it learns from and by which loss: gradients over packed
 * micro-batches, clipping, and AdamW's update, published to whoever samples by the weights. One
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_STEP_H
#define TRAINER_STEP_H

#include "trainer/learn/loss.h"
#include "trainer/learn/learner.h"
#include "trainer/learn/schedule.h"

struct publish { // to nobody: run is NULL
    // Calls write(update), which writes the weights, where those who sample by them let it.
    enum status (*run)(void *context, enum status (*write)(void *update), void *update,
                       struct publish_times *ret_times);
    void *context;
};
struct step {
    struct loss_config loss;
    struct loss_scale scale;              // of all that the step, or evaluation, is made of
    const struct entropy_config *entropy; // NULL: the loss has nothing of it
    struct entropy_state *entropy_state;  // with it; moves with each update
    uint64_t version;                     // of the weights, as the server counts
    bool exact; // a log-probability that differs from the server's by a bit is ST_MISMATCH
    double lr, draft_lr;
    struct publish publish;
};

// Of groups [first, first + n), on all ranks alike.
struct loss_scale loss_scale_of(const struct loss_config *loss, const struct samples *s, int first,
                                int n);
// The gradients of these groups, of which this rank computes its share, and an update by them. A
// draft model, where the learner has one, learns along unless stats->again. Where a gradient is not
// finite that model's update is skipped, which stats and status_message() say. samples NULL: by the
// gradients that are there. A failure leaves the weights as they are. Adds to *stats, of this rank.
enum status learner_step(struct learner *l, struct samples *samples, int first, int n,
                         const struct step *step, struct update_stats *stats);
// One pass over these groups, and no more. PASS_NOTE: into samples, before anything is learned from
// them; step and stats may be NULL.
enum status learner_pass(struct learner *l, enum pass_kind kind, struct samples *samples, int first,
                         int n, const struct step *step, struct update_stats *stats);
// The KL divergence of the policy from the reference, which there must be, of each sample: the sum
// over its policy's tokens of logprob - ref (k1). On all ranks. ret_kl (samples).
enum status learner_kl(struct learner *l, struct samples *samples, double *ret_kl);

// What is learned from a step's samples: --num-iterations times over their --steps-per-generation
// mini-batches, an update each. A draft model learns in the first of them.
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
// samples->logprobs of all ranks, on all of them: ret (targets).
enum status update_share_logprobs(struct learner *l, const struct samples *samples, double *ret);

#endif
