/* sampler.h: samples tokens from rows of logits, each row with its own parameters and its own
 * random stream: nothing that happens to be in the same batch can change what a row gives.
 *
 * The stream of sample i of a request with seed s is sampler_stream(s, i), the key of a Philox
 * generator whose counter is the sampled token's absolute position (ops.h, sample). A token is thus
 * a function of the logits, the seed, i, and the position. The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_SAMPLER_H
#define INFER_SERVER_SAMPLER_H

#include "infer-server/engine/adjust.h"
#include "infer-server/engine/engine_info.h"
#include "kernels/ops.h"

#define SAMPLER_MAX_TOP 20 // most likely tokens a row can list

uint64_t sampler_stream(uint64_t seed, int sample);

struct sampler_row {
    const struct sampling *sampling;
    uint64_t stream;
    uint64_t position;            // of the token to be sampled
    bool no_stop;                 // eos_ids and stop_ids cannot be sampled (min_tokens)
    struct sample_draft draft;    // that the row verifies, with its row of sampler_drafts.logits
    struct adjustment adjustment; // of its logits, while it is sampled
    int n_top;                    // likeliest tokens to be listed
};
// Whether its logits are read once more behind the sampling.
static inline bool sampler_row_is_read(const struct sampler_row *row)
{
    return row->n_top > 0 || adjustment_is_any(&row->adjustment);
}
#define SAMPLER_NO_DRAFT ((struct sample_draft){.token = -1})

struct sampler_drafts {  // what drafts were sampled from
    const float *logits; // device; (.., vocab) f32
    int vocab;           // at most the sampler's
};

struct sampler; // device and pinned host memory for max_rows rows
enum status sampler_new(struct device *dev, int max_rows, int vocab, const int *eos_ids, int n_eos,
                        struct sampler **ret);
void sampler_free(struct sampler *s);

// Whether a token ends a sample: one of eos_ids (unless ignore_eos) or stop_ids.
bool sampler_is_stop(const struct sampler *s, const struct sampling *sampling, int32_t token);

// Enqueues sampling from the first n rows of logits (max_rows, vocab) f32 on the device, whose stop
// tokens' entries are overwritten where no_stop.
enum status sampler_launch(struct sampler *s, float *logits, const struct sampler_row *rows, int n,
                           const struct sampler_drafts *drafts);
// Of what was launched, and has been waited for: (n) results. They and the pointers of ret_top
// stay valid until the next launch. Row i lists its rows[i].n_top most likely tokens at ret_top[i],
// most likely first; NULL where it wants none. A result's logprob, and those listed, are of the
// logits as they are, its processed_logprob and retained_mass of the adjusted ones; with a list,
// they are all of one computation.
const struct sample_result *sampler_collect(struct sampler *s, const struct sampler_row *rows,
                                            int n, const struct top_logprob **ret_top);
// Begins with n masks of the next launch, behind the tokens that `before` samples (adjust.h). The
// token of a row with a constraint is MASKS_AHEAD_NO_TOKEN on the host until it comes.
enum status sampler_begin_masks(struct sampler *s, struct masks_ahead *masks,
                                const struct constraint_row *rows, int n,
                                const struct sampler *before,
                                struct masks_job **ret); // ST_NO_MEMORY
// (n) On the device, from its launch to the next.
const struct sample_result *sampler_results(const struct sampler *s);

#endif
