/* runner.h: one model as the engine runs it: its scratch, the batch of a step, the KV pool, the
 * rows that are sampled, and the captured decode steps. An engine has one for each model that it
 * runs; whose turn it is, and what goes into a step, others decide.
 *
 * A step is runner_clear(), runner_feed() and runner_want() of what goes in, runner_step() and
 * runner_sample(), which enqueue the forward pass and the sampling behind it, and runner_collect(),
 * which waits for the sampled tokens.
 *
 * The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_RUNNER_H
#define INFER_SERVER_RUNNER_H

#include "common/base/bytes.h"
#include "common/model/model.h"
#include "infer-server/weights/group.h"
#include "infer-server/engine/kv_memory.h"
#include "infer-server/engine/sampler.h"
#include "infer-server/speculative/step_cost.h"

enum runner_role { RUNNER_POLICY, RUNNER_DRAFT, RUNNER_FROZEN, RUNNERS };
static inline enum runner_role runner_other(enum runner_role r) // of the two that write
{
    return r == RUNNER_FROZEN ? RUNNER_POLICY : RUNNER_FROZEN;
}

struct runner_limits {
    int max_tokens, max_seqs; // of one step
    int max_rows;             // of its tokens, that are sampled
    int max_context, block_size;
};

struct runner_side { // fields of struct runner, of the step that is not on
    struct batch *batch;
    struct sampler *sampler;
    int n_rows;
    struct sampler_row *rows;
    const struct sample_result *results;
    const struct top_logprob **top;
};

struct fed_token {
    int row, from; // of the batch; of the rows that the other side's step samples
};

struct runner {
    struct device *dev;
    struct runner_limits limits;
    const struct model_config *config; // borrowed
    struct model *model;
    struct batch *batch;
    struct kv_memory kv; // empty until runner_allocate_kv()
    struct sampler *sampler;
    struct runner_side other; // runner_turn(); all NULL: there is none
    int mark;                 // device_mark() of the step that is on; the other's is the other one
    int n_fed;                // tokens of the batch that the other side's step samples
    struct fed_token *fed;    // (max_rows); NULL: there is no other side
    struct sampler_drafts drafts; // what the drafts that its rows verify were sampled from
    struct decode_graphs *graphs; // CUDA, else NULL
    struct group *group;          // ranks that compute its steps with this one; NULL: none do
    enum runner_role role;        // which of theirs it is
    struct bytes message;         // to them
    uint64_t adapted;             // adapter_table_sites() of its adapters
    bool rows_apart;              // a few tokens of a sequence are better fed as sequences of one
                                  // each: the step is then captured
    bool warm;                    // the last step took what steps of its shape always will
    int32_t *tokens;              // (max_tokens) for whoever feeds it
    int32_t *hidden_rows;         // (max_tokens) device, of runner_read_hidden()
    int n_rows;                   // that are sampled; these lists have room for max_rows:
    struct sampler_row *rows;
    const struct sample_result *results; // after runner_collect(), until the next step
    const struct top_logprob **top;      // likewise; each NULL where its row lists none
};

// All but the KV pool.
enum status runner_new(struct device *dev, const struct weights *weights,
                       const struct runner_limits *limits, struct runner **ret);
void runner_free(struct runner *r);

// And states for so many sequences, where the model has any.
enum status runner_allocate_kv(struct runner *r, int n_blocks, int n_states);

// The adapters that its forward passes know (model.h), as they are now: to be said again whenever
// they change, with no step in flight.
void runner_use_adapters(struct runner *r, const struct adapter_table *adapters);

// follower.c. A shard's model: has every follower of the group make a runner like this one, and
// waits. From then on they do what this one does: steps, copies of blocks, rows of the head.
enum status runner_use_group(struct runner *r, enum runner_role role, struct group *group);
// All ranks of the group: so that they may write into one another's logits. Logs where they cannot.
enum status runner_share_logits(struct runner *r);

void runner_clear(struct runner *r);
// n tokens at positions first.. of a sequence of its own in the batch, whose block table has
// n_blocks entries. Sequences of one row each may have one table: each layer stores the keys of all
// rows before any row attends.
// Where the model has states, seq names its slots.
enum status runner_feed(struct runner *r, const int32_t *tokens, int n, int first,
                        const int32_t *blocks, int n_blocks, struct batch_seq seq);
// The token of the batch's last row is what row `from` of the other side's step samples, which has
// been launched before this one's: whatever was fed in its place is replaced on the device.
void runner_feed_sampled(struct runner *r, int from);
// Samples a token behind a row of the batch, which may be wanted more than once.
enum status runner_want(struct runner *r, int row, const struct sampler_row *sampling);
// Of a layer that predicts further tokens: enqueues what the n rows of the batch read beside their
// tokens, which are rows (host memory) of the policy's last step, or of its own (NULL).
enum status runner_read_hidden(struct runner *r, const struct model *policy, const int32_t *rows,
                               int n);
// Enqueues the forward pass, and the logits of the rows wanted. Batches of single rows run as
// captured graphs on CUDA, padded to a few sizes.
enum status runner_step(struct runner *r);
// On a follower: the step that rank 0 has ordered, whose bytes these are. Waits.
enum status runner_follow(struct runner *r, const void *data, size_t n);
// Enqueues a copy; of the states of a model without any, or to themselves, nothing.
enum status runner_copy(struct runner *r, const struct kv_copy *copy);
// Enqueues the logits of n rows of the last step, at most max_rows; rows is host memory, `device`
// has room for them.
enum status runner_head(struct runner *r, const int32_t *rows, int n, int32_t *device);
// Enqueues the sampling of the rows wanted.
enum status runner_sample(struct runner *r);
// Waits for the step, and fills in `results` and `top`.
enum status runner_collect(struct runner *r);

// Room for a second step: one may be launched while the one before it is not collected.
// ST_NO_MEMORY.
enum status runner_make_sides(struct runner *r);
// The other side is on: of two steps each has one.
void runner_turn(struct runner *r);

// Rows that a decode step of n rows computes, padding included.
int runner_padded_rows(const struct runner *r, int n);

// step_timing.c: what decoding steps of 1 row to max_rows take, sampling included; larger sizes
// only within a second or so. Of more than max_batch rows, some are drafts'. Writes to the KV pool
// at will: nobody may have anything in it. Captures the steps on CUDA. ST_DEVICE.
enum status step_timing_measure(struct runner *r, int max_batch, struct step_cost *ret);

#endif
