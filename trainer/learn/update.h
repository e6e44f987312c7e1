/* update.h: one GRPO step on a rollout: the loss and its gradients over packed micro-batches, and
 * the published AdamW update; of each of --steps-per-generation parts, --num-iterations times. A
 * draft model learns from the first of them and is published with it. One thread. */
#ifndef TRAINER_UPDATE_H
#define TRAINER_UPDATE_H

#include "bridge/attach.h"
#include "trainer/learn/learner.h"
#include "trainer/learn/entropy.h"
#include "trainer/learn/loss.h"
#include "trainer/learn/schedule.h"
#include "trainer/rollout/rollout.h"
#include <pthread.h>

struct update_config {
    struct loss_config loss;
    int num_iterations;  // over the whole rollout
    int mini_batches;    // parts of it, whole groups, one update each; 0: 1, all of it
    bool mask_truncated; // samples that hit the token limit do not count
    bool processed;      // the sampler's log-probabilities are those of what it sampled from
    bool exact;          // a log-probability that differs from the server's by a bit is ST_MISMATCH
    int64_t quiesce_timeout_ms; // longest wait for the engine's step boundary
    double draft_lr;            // of a draft model, where the learner has one
    // The learning rate of the i-th update is that of the schedule's step first_update + i. NULL:
    // lr of all.
    const struct schedule *schedule;
    int64_t first_update;
    const struct entropy_config *entropy; // NULL: the loss has nothing of it
    struct entropy_state *entropy_state;  // with it; after the call, what the updates made of it
    // (n_tokens of the rollout) filled with the tokens' log-probabilities before the first update,
    // on all ranks; NULL: nobody asks
    double *ret_logprobs;
};

// The KL divergence of the policy from the reference, which there must be, of each sample: the sum
// over its policy's tokens of logprob - ref (k1). On all ranks. ret_kl (samples of the rollout).
enum status update_measure_kl(struct learner *l, const struct rollout *rollout, double *ret_kl);

// A failure leaves the weights as they are, but for those of earlier iterations.
// advantages: one a sample. publish_lock is held while an update is published: whoever holds it may
// end the process without tearing the weights.
enum status update_policy(struct learner *l, struct bridge *bridge,
                          const struct update_config *config, const struct rollout *rollout,
                          const float *advantages, double lr, pthread_mutex_t *publish_lock,
                          struct update_stats *ret);

#endif
