/* draft_model.h: what a draft model's runner computes: a smaller model of the same tokenizer
 * samples the next few tokens of a sample so that the policy may verify them in one pass
 * (speculative.h).
 *
 * Its KV pool has as many blocks as the policy's, and a sample's block table leads into both: what
 * the scheduler allocates, shares, copies and drops for one counts for the other. How far a
 * sample's blocks are computed here is sample.kv[RUNNER_DRAFT], never more than the policy's
 * between steps.
 *
 * It may also be the policy's own layer that predicts further tokens (multi-token prediction): at
 * position p it reads token p + 1 and the policy's hidden state of p, or behind the last of these
 * its own of the position before, and predicts token p + 2. Hidden states are those of the policy's
 * last step: of tokens that were not drafted behind in the step after theirs nothing is computed.
 *
 * The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_DRAFT_MODEL_H
#define INFER_SERVER_DRAFT_MODEL_H

#include "infer-server/engine/runner.h"
#include "infer-server/engine/scheduler.h"
#include "infer-server/speculative/speculative.h"

struct draft_model;

struct draft_model_limits {
    int max_batch;     // samples that draft at once
    int prefill_chunk; // tokens of one pass beyond those
    int max_drafts;    // of all samples in one step
    bool shared_noise; // drafts take the policy's own Gumbel noise (speculative.h, "Exact mode")
};

// What its runner has to take; max_context is the policy's, the model's own may be less.
struct runner_limits draft_model_runner_limits(const struct draft_model_limits *limits,
                                               const struct model_config *config, int max_context,
                                               int block_size);
// The runner is borrowed; its KV pool is not allocated yet. policy: whose hidden states it reads,
// where it does.
enum status draft_model_new(struct runner *runner, const struct model *policy,
                            const struct draft_model_limits *limits, struct draft_model **ret);
bool draft_model_is_mtp(const struct draft_model *d);
void draft_model_free(struct draft_model *d);
// n_states: slots of samples' states, where the model has any.
enum status draft_model_allocate_kv(struct draft_model *d, int n_blocks, int n_states);

// Of a decoding sample: tokens that it may draft at most, as the model has a context of its own;
// and those that the model has yet to compute, its last one not counted.
void draft_model_look(const struct draft_model *d, const struct sample *sample, int *ret_room,
                      int *ret_lag);

// The policy has computed a step's items. prompts: computes those that are not decoding as well, of
// *ret_tokens tokens. ret_ms, where not NULL: what that took. Only then it waits, which costs time
// on CUDA: the pass else runs beside what comes next.
enum status draft_model_follow(struct draft_model *d, const struct engine_step *step, bool prompts,
                               int *ret_tokens, double *ret_ms);

// A sample's drafts were verified, and are not yet among its tokens: n_kept tokens, those accepted
// included, are what both models have computed at most.
void draft_model_truncate(struct draft_model *d, struct sample *sample, int n_kept);

// Samples draft.n_verify tokens for each of n samples whose draft.method is the draft model, and
// learns what the passes took; n_verify becomes less where a draft ends the sample, and 0 where a
// sample lags too far and only caught up a little. Their blocks must reach over what they draft.
// Waits. Reports draft_ms, catch_up_ms, and no `warm` where a pass was among the first of its
// shape.
enum status draft_model_sample(struct draft_model *d, struct sample *const *samples, int n,
                               struct step_cost *passes, struct step_report *report);

// What the tokens of the last draft_model_sample() were sampled from, by draft.rows; the same
// memory for all its life.
struct sampler_drafts draft_model_logits(const struct draft_model *d);

#endif
