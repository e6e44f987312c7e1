/* rollout_samples.h: a rollout as the learner takes it. */
#ifndef TRAINER_ROLLOUT_SAMPLES_H
#define TRAINER_ROLLOUT_SAMPLES_H

#include "trainer/learn/samples.h"
#include "trainer/rollout/rollout.h"

// advantages: one a completion. processed: the sampler's log-probabilities are those of what it
// sampled from. mask_truncated: samples that hit the token limit do not count. ret: begun; it
// borrows the rollout.
enum status rollout_samples(const struct rollout *rollout, const float *advantages, bool processed,
                            bool mask_truncated, struct samples **ret);

#endif
