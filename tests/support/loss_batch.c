/* loss_batch.c: one sequence after the other. Stateless; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/loss_batch.h"

static const float *row(const float *array, int first)
{
    return array ? array + first : NULL;
}

void loss_batch_compute(const struct loss_config *config, const struct loss_batch *b,
                        struct update_stats *stats, float *ret_dlogprobs)
{
    const struct loss_scale scale = {.seqs = b->step_seqs, .tokens = b->step_tokens};
    for (int s = 0; s < b->n_seqs; s++) {
        const int at = b->first[s], n = b->first[s + 1] - at;
        const struct pack_completion completion = {
            .n = n,
            .advantage = b->advantages[s],
            .inputs = {[INPUT_LOGPROBS] = row(b->sampler_logprobs, at)},
            .authors = b->authors ? b->authors + at : NULL,
        };
        const struct loss_rows rows = {.n = n,
                                       .logprobs = b->logprobs + at,
                                       .old = row(b->old_logprobs, at),
                                       .ref = row(b->ref_logprobs, at),
                                       .chosen = b->chosen ? b->chosen + at : NULL};
        loss_compute(config, &scale, &completion, &rows, stats, ret_dlogprobs + at);
    }
}
