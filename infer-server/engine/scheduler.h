/* scheduler.h: which tokens of which samples the next step computes, and by which model. Continuous
 * batching: a step holds one token of every decoding sequence, the drafts that follow it
 * (sample.draft.n_verify, as far as there are blocks for them), and, beside them, up to
 * prefill_chunk tokens of prompts and of what a tandem's model has missed.
 *
 * Samples begin with what they find in the prefix cache, and leave there what they computed. Pure
 * logic over samples and the block manager; it never sees the device. The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_SCHEDULER_H
#define INFER_SERVER_SCHEDULER_H

#include "infer-server/engine/block_manager.h"
#include "infer-server/engine/request.h"

struct scheduler;

struct step_item {         // n tokens of a sample, from position first on, are computed
    struct sample *sample; // NULL once it has ended, as below
    int first, n;
    int n_drafts;  // the last of them are drafts: they do not count as computed until accepted
    int32_t state; // slot of the states that it begins with: its own, or one found
};
struct step_sample { // the next token of a sample is sampled from the last row of an item; where
                     // that has drafts, one from each of its last n_drafts + 1 rows
    struct sample *sample;
    int item;
};
struct step_copy {       // once the items are computed, before anything is written there again
    struct kv_copy what; // a block (copy-on-write), or states in the pool of the step's runner:
                         // of siblings that begin behind their prompt, and that are kept
    bool frozen;         // in the frozen model's pool too, whoever runs the step
};
struct engine_step {
    enum runner_role runner; // that computes it: the policy, or the frozen model
    int n_items, n_sampled, n_copies, n_tokens;
    struct step_item *items;     // oldest sample first, decoding ones before prompts
    struct step_sample *sampled; // at most max_batch
    struct step_copy *copies;
};

static inline bool step_item_decodes(const struct step_item *item)
{
    return item->n == 1 + item->n_drafts && item->sample->text.n_generated > 0;
}

struct scheduler_limits {
    int max_batch;     // sequences running at once
    int prefill_chunk; // prompt tokens a step
    bool states;       // a sequence goes on from a state too, and begins where one is kept
    int n_kept;        // slots of states beside those for max_batch sequences; -1: none is kept
};

enum scheduler_admit {
    ADMIT_ALL,
    ADMIT_STARTED // only samples that ran before and were preempted (before an update, "drain")
};

enum status scheduler_new(const struct scheduler_limits *limits, struct block_manager *manager,
                          struct scheduler **ret); // manager is borrowed
void scheduler_free(struct scheduler *s);

// Queues all samples of a prepared request (request_prepare), behind those already queued. False
// for want of memory.
bool scheduler_add(struct scheduler *s, struct request *r);

// Chooses whose step is next, ahead of schedule(); without, it is the same one's again.
enum runner_role scheduler_choose_runner(struct scheduler *s);

// Takes blocks for a decoding sample's drafts, ahead of schedule(): n_verify becomes what they have
// room for.
void scheduler_reserve_drafts(struct scheduler *s, struct sample *sample);

// Plans one step; n_items is 0 when there is nothing to do. What it plans counts as computed from
// here on. The step stays valid until the next call but one, so that one may be planned while the
// one before it is computed: what this one samples is then coming (sample_text.n_coming). A sample
// that is removed leaves the steps.
const struct engine_step *schedule(struct scheduler *s, enum scheduler_admit admit);
// n drafts of the last step were accepted: their keys and values are there. Blocks that refused
// drafts took are given back.
void scheduler_accept(struct scheduler *s, struct sample *sample, int n);

// Takes a sample out, whatever its state: finished, cancelled, failed. Its blocks are dropped.
void scheduler_remove(struct scheduler *s, struct sample *sample);

// The weights changed: `version` computes from now on. recompute: every running sample is
// preempted, to have its keys and values computed again; its tokens stay.
void scheduler_update(struct scheduler *s, uint64_t version, bool recompute);

int scheduler_running(const struct scheduler *s);
int scheduler_waiting(const struct scheduler *s);
int scheduler_in_flight(const struct scheduler *s); // running, or waiting after having run
struct sample *scheduler_at(const struct scheduler *s, int i); // i < running + waiting: any sample

struct scheduler_counts {                // since the start
    uint64_t preemptions;                // for want of blocks
    uint64_t queried_tokens, hit_tokens; // prompt tokens looked up in the prefix cache and found
                                         // there, each request's prompt once
};
const struct scheduler_counts *scheduler_counts(const struct scheduler *s);

#endif
