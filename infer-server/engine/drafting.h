/* drafting.h: drafts as the executor sees them: what is proposed before a step is planned, what the
 * draft model computes beside it, and what came of it. How many are worth their rows is
 * speculative.h's to say; what the draft model does is draft_model.h's.
 *
 * A step is drafting_propose(), schedule(), drafting_follow() once the policy's forward pass is
 * enqueued, drafting_verified() and drafting_learn() for each sample, drafting_step_over().
 *
 * The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_DRAFTING_H
#define INFER_SERVER_DRAFTING_H

#include "infer-server/engine/draft_model.h"
#include "infer-server/engine/engine.h"
#include "infer-server/engine/scheduler.h"

struct drafting;

int drafting_rows(const struct engine_options *options); // of one step, at most, if there is room

// model: NULL where there is no draft model. max_rows: drafts of a step, at most. ahead: by how
// many a state is taken back (runner.h); 0: there is none. Both pointers are borrowed; counts into
// stats.
enum status drafting_new(const struct engine_options *options, struct draft_model *model,
                         int max_rows, int ahead, struct engine_stats *stats,
                         struct drafting **ret);
void drafting_free(struct drafting *d);
// What steps take, of up to max_batch samples, where that decides how much is drafted. On empty KV
// pools.
enum status drafting_measure(struct drafting *d, struct runner *const runners[RUNNERS],
                             int max_batch);

// Whether the next step's plan is to know what the one before it samples: some method that a
// running sample uses does not rest, and is not a model whose last drafts were all declined.
bool drafting_is_wanted(const struct drafting *d, const struct scheduler *scheduler);
// Looks for drafts of all decoding samples, and samples those of the draft model; sets
// draft.n_verify of each. policy: the step is its, and the one before it is over; else nothing is
// drafted.
enum status drafting_propose(struct drafting *d, struct scheduler *scheduler, bool policy);
// The policy's part of a step is enqueued: the draft model computes its prompts too; but not of one
// that was planned ahead, as the batch that they go into is waited for with the policy's.
enum status drafting_follow(struct drafting *d, const struct engine_step *step, bool ahead);
// The k-th draft of a sample as its row verifies it.
struct sample_draft drafting_row(const struct drafting *d, const struct sample *sample, int k);

struct verified { // of a sample's rows in a step
    int n;        // tokens that are kept, the accepted drafts among them
    int n_accepted;
    int n_drafts;  // in the step
    int n_counted; // of these, as statistics have it: where a draft ended the sample, up to that
                   // one
    enum finish_reason finish;
};
// first: the token of its first row. Before the tokens are appended.
void drafting_verified(struct drafting *d, struct sample *sample, const struct verified *v,
                       int32_t first);
void drafting_learn(struct drafting *d, const struct sample *sample); // its last token is new

// warm: of the policy's step.
void drafting_step_over(struct drafting *d, double step_ms, bool warm);
// The same of a step beside which the next one is planned: nothing was drafted in it.
void drafting_rested(struct drafting *d, double step_ms);

#endif
