/* executor.h: runs steps: runners, scheduler, drafts and delivery under one roof. No threads, no
 * bridge: whoever owns the device calls it at a time when the weights are whole.
 *
 * The engine's thread. Events (engine_info.h) are delivered from within executor_step() and the
 * calls that end samples; after a request's last event it is the submitter's again. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_EXECUTOR_H
#define INFER_SERVER_EXECUTOR_H

#include "infer-server/engine/engine.h"
#include "infer-server/engine/scheduler.h"

struct flight {                     // a step on its way
    const struct engine_step *step; // NULL: none
    uint64_t version;               // of the weights that compute it
    bool drafts;                    // there may be some
    int64_t start_ns, drafted_ns;
    struct masks_job *masks; // that it samples under; NULL: none, or they were made at once
    bool overlapped;         // with the one before it or behind it: its time is not one step's
};

struct executor {    // read by the engine's own files, written by executor.c
    int max_context; // the longest sequence: as requested, or what memory has room for
    int max_batch;   // sequences at once, likewise
    int max_drafts;  // of a step; 0: nothing is drafted
    int n_states;    // slots of the states of samples, and of those that are kept
    struct runner *runners[RUNNERS]; // NULL where there is no such model, but for the policy's
    struct block_manager *manager;
    struct scheduler *scheduler;
    struct draft_model *draft_model; // NULL: none
    struct drafting *drafting;
    bool drafts; // somebody has asked for drafts: the server's options, or a request
    struct prompt_logprobs *prompt_logprobs;
    engine_event_fn on_event;
    void *context;
    int64_t block_bytes;        // of the KV cache, in all runners' pools
    int64_t state_bytes;        // of a sequence's states, likewise; 0: no model has any
    struct engine_stats *stats; // the engine's: tokens and ends are counted there
    const uint8_t *token_ends;  // (n_token_ends) the options'
    int n_token_ends;
    int *item_end;                      // (max_batch) of a step: the row behind each item's last
    struct constraint_row *constrained; // (max_batch) likewise: those that have a constraint
    bool ahead;                         // a step stays on its way until the next one is
    struct masks_ahead *masks;          // where it is
    bool masked; // the next step's follow the constraints of the one on its way
    struct flight flight;
    int64_t collected_ns;        // the last one was
    struct engine_event *events; // (max_events) of the present step, with their tokens
    struct token_record *records;
    int n_events, max_events;
};

#define EXECUTOR_MISSED_APART 7 // tokens that a tandem's model has missed, as rows of their own

// engine_start.c: allocates everything but the weights. Of the options it reads max_batch,
// max_context, kv_bytes, kv_percent, block_size and prefill_chunk, which are all set but for
// max_context and the KV ones; the speculative ones and token_ends. weights: each runner's; NULL:
// there is none, but for the policy's. group: ranks that hold the other shards of it, or NULL.
enum status executor_new(struct device *dev, const struct weights *const weights[RUNNERS],
                         struct group *group, const struct engine_options *options,
                         engine_event_fn on_event, void *context, struct engine_stats *stats,
                         struct executor **ret);
void executor_free(struct executor *x); // no samples in it

// engine_start.c: the configs of the models that the options name, as this rank has them; NULL in
// `ret` before, and the caller's to free, also on failure.
enum status engine_load_configs(const struct engine_options *o, struct model_config *ret[RUNNERS]);

// The longest sequence that is asked for: the one that was named (--max-context), or 0 and then
// the default for this model.
int executor_requested_context(const struct model_config *config, int named);

// Takes a request over, or ends all its samples with FINISH_ERROR where there is no memory for it.
void executor_add(struct executor *x, struct request *r);

// One step under weights of this version, if there is something to do. ST_DEVICE: nothing came of
// it. One step ahead it may stay on its way; events are then those of the one before it.
enum status executor_step(struct executor *x, uint64_t version, enum scheduler_admit admit,
                          bool *ret_stepped);

// Nothing is on its way any more: before weights, adapters or samples are changed. ST_DEVICE.
enum status executor_settle(struct executor *x);

// The adapters that there are now (NULL: none can be), whose slots requests name.
struct adapters;
void executor_use_adapters(struct executor *x, const struct adapters *adapters);

void executor_end_cancelled(struct executor *x); // samples whose `cancel` is set
void executor_end_all(struct executor *x, enum finish_reason reason, const char *error);

void executor_note_state(struct executor *x); // what is queued and used now, into the statistics

// telemetry.c: tells submitters what became of their samples, and keeps each sample's times and
// telemetry. The last event of a sample takes it out of the scheduler; after its request's last
// event neither may be touched. Events wait for those of the same step, until deliver_all().
void delivery_started(const struct engine_step *step, int64_t now_ns);
// The sample's last token, or one before it where several came at once: the n-th it has.
void deliver_token(struct executor *x, struct sample *sample, int n,
                   const struct token_record *token, const struct top_logprob *top,
                   enum finish_reason finish, int64_t now_ns);
// A sample of max_tokens 0 ends with its prompt; what was sampled behind it is dropped.
void deliver_prompt(struct executor *x, struct sample *sample, uint64_t version, int64_t now_ns);
void deliver_end(struct executor *x, struct sample *sample, enum finish_reason finish,
                 const char *error);
void deliver_all(struct executor *x);

#endif
