/* draft_model.h: the draft model as the executor sees it: a second, smaller model of the same
 * tokenizer, that draws the next few tokens of a sample so that the policy may verify them in one
 * pass (speculative.h).
 *
 * Its KV pool has as many blocks as the policy's, and a sample's block table leads into both: what
 * the scheduler takes, shares, copies and drops for one counts for the other. How far a sample's
 * blocks are computed here is sample.draft_computed, never more than sample.computed between steps.
 *
 * The engine's thread. */
#ifndef INFER_SERVER_DRAFT_MODEL_H
#define INFER_SERVER_DRAFT_MODEL_H

#include "common/model/weights.h"
#include "infer-server/engine/scheduler.h"
#include "infer-server/speculative/speculative.h"

struct draft_model;

struct draft_model_limits {
    int max_batch;     // samples that draft at once
    int prefill_chunk; // tokens of one pass beyond those
    int max_context;   // of the policy; the model's own may be less
    int block_size;    // of the KV pool
    int max_drafts;    // of all samples in one step
    bool coupled;      // drafts take the policy's own noise (speculative.h, "Exact mode")
};

// Allocates all but the KV pool.
enum status draft_model_new(struct device *dev, const struct weights *weights,
                            const struct draft_model_limits *limits, struct draft_model **ret);
void draft_model_free(struct draft_model *d);

int64_t draft_model_block_bytes(const struct draft_model *d);
enum status draft_model_take_blocks(struct draft_model *d, int n_blocks);
void draft_model_copy_block(struct draft_model *d, int32_t from, int32_t to);

// On empty KV pools: what passes of up to max_batch samples take.
enum status draft_model_measure(struct draft_model *d, struct step_cost *ret_passes);

// Tokens that a sample of this length may draft at most: the model has a context of its own.
int draft_model_room(const struct draft_model *d, const struct sample *sample);

// Tokens of a decoding sample that the model has yet to compute, its last one not counted.
int draft_model_behind(const struct draft_model *d, const struct sample *sample);

// The policy has computed a step's items. prompts: computes those that are not decoding as well, of
// *ret_tokens tokens.
enum status draft_model_follow(struct draft_model *d, const struct step *step, bool prompts,
                               int *ret_tokens);

// A sample's drafts were judged: its first n_kept tokens are what both models have computed at
// most.
void draft_model_settle(struct draft_model *d, struct sample *sample, int n_kept);

// Draws draft.n_verify tokens for each of n samples whose draft.method is the draft model, and
// learns what the passes took; n_verify becomes less where a draft ends the sample, and 0 where a
// sample is too far behind and only brought nearer. Their blocks must reach over what they draft.
// Waits. Reports draft_ms, catch_up_ms, and no `warm` where a pass was among the first of its
// shape.
enum status draft_model_draw(struct draft_model *d, struct sample *const *samples, int n,
                             struct step_cost *passes, struct step_report *report);

// The logits that the tokens of the last draft_model_draw() were drawn from, by draft.rows:
// (max_drafts + max_batch, vocab) f32, device.
const float *draft_model_logits(const struct draft_model *d);
int draft_model_vocab(const struct draft_model *d);

#endif
