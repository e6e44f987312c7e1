/* loss_batch.h: sequences of a step, flat, for tests of trainer/learn/loss.h: sequence s owns
 * entries first[s] to first[s + 1] - 1. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_LOSS_BATCH_H
#define TESTS_SUPPORT_LOSS_BATCH_H

#include "trainer/learn/loss.h"

struct loss_batch {
    int n_seqs;
    const int *first; // (n_seqs + 1)
    const float *logprobs, *old_logprobs, *sampler_logprobs, *ref_logprobs;
    const float *advantages; // (n_seqs)
    int step_seqs;
    double step_tokens;
    const uint8_t *authors, *chosen; // NULL: all
};
// Adds the loss of all of them.
void loss_batch_compute(const struct loss_config *config, const struct loss_batch *batch,
                        struct update_stats *stats, float *ret_dlogprobs);

#endif
