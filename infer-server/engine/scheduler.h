/* scheduler.h: which tokens of which samples the next step computes. Continuous batching: a step
 * holds one token of every decoding sequence, the drafts that follow it (sample.draft.n_verify, as
 * far as there are blocks for them), and, beside them, up to prefill_chunk tokens of prompts.
 *
 * Samples begin with what they find in the prefix cache (kv_cache.h), and leave there what they
 * computed. Pure logic over samples and the book of KV blocks; it never sees the device. The
 * engine's thread. */
#ifndef INFER_SERVER_SCHEDULER_H
#define INFER_SERVER_SCHEDULER_H

#include "infer-server/engine/kv_cache.h"
#include "infer-server/engine/request.h"

struct scheduler;

struct step_item { // n tokens of a sample, from position first on, are computed
    struct sample *sample;
    int first, n;
    int n_drafts; // the last of them are drafts: they do not count as computed until accepted
};
struct step_draw { // the next token of a sample is drawn from the last row of an item; where that
                   // has drafts, one from each of its last n_drafts + 1 rows
    struct sample *sample;
    int item;
};
struct step_copy { // block `to` becomes a copy of `from` once the items are computed
    int32_t from, to;
};
struct step {
    int n_items, n_draws, n_copies, n_tokens;
    struct step_item *items; // oldest sample first, decoding ones before prompts
    struct step_draw *draws; // at most max_batch
    struct step_copy *copies;
};

struct scheduler_limits {
    int max_batch;     // sequences running at once
    int prefill_chunk; // prompt tokens a step
};

enum scheduler_admit {
    ADMIT_ALL,
    ADMIT_STARTED // only samples that ran before and were preempted (before an update, "drain")
};

enum status scheduler_new(const struct scheduler_limits *limits, struct kv_cache *cache,
                          struct scheduler **ret); // cache is borrowed
void scheduler_free(struct scheduler *s);

// Queues all samples of a prepared request (request_prepare), behind those already queued. False
// for want of memory.
bool scheduler_add(struct scheduler *s, struct request *r);

// Takes blocks for a decoding sample's drafts, ahead of the plan: n_verify becomes what they have
// room for.
void scheduler_hold_drafts(struct scheduler *s, struct sample *sample);

// Plans one step; n_items is 0 when there is nothing to do. What it plans counts as computed from
// here on. The step stays valid until the next call; samples of it must not be removed before its
// draws were recorded with scheduler_drawn().
const struct step *scheduler_plan(struct scheduler *s, enum scheduler_admit admit);
void scheduler_drawn(struct scheduler *s, struct sample *sample, int32_t token);
// The last n_accepted drawn tokens but one were drafts: their keys and values are there. Blocks
// that refused drafts took are given back.
void scheduler_settle(struct scheduler *s, struct sample *sample, int n_accepted);

// Takes a sample out, whatever its state: finished, cancelled, failed. Its blocks are dropped.
void scheduler_remove(struct scheduler *s, struct sample *sample);

// The weights changed: `version` computes from now on. recompute: every running sample goes back to
// the queue, to have its keys and values computed again; its tokens stay.
void scheduler_update(struct scheduler *s, uint64_t version, bool recompute);

int scheduler_running(const struct scheduler *s);
int scheduler_waiting(const struct scheduler *s);
int scheduler_in_flight(const struct scheduler *s); // running, or waiting after having run
struct sample *scheduler_at(const struct scheduler *s, int i); // i < running + waiting: any sample
uint64_t scheduler_preemptions(const struct scheduler *s);     // for want of blocks
// Prompt tokens looked up in the prefix cache and found there, each request's prompt once. Since
// the start.
void scheduler_cache_tokens(const struct scheduler *s, uint64_t *ret_queried, uint64_t *ret_hits);

#endif
