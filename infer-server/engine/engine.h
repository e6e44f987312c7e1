/* engine.h: the engine: the thread that owns the device, the weights' owner side of the bridge, and
 * the KV cache. Other threads hand it requests and take finished tokens through bounded queues;
 * they see plain values (engine_info.h), never a tensor or the control page.
 *
 * A request is one prompt and n samples of it (a group). The engine copies nothing it is given: a
 * request is moved in by engine_submit() and comes back by the events it causes; the last event of
 * a sample says how it ended, and after the last sample's last event the request is the submitter's
 * again (release it with request_free()).
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_ENGINE_H
#define INFER_SERVER_ENGINE_H

#include "common/base/status.h"
#include "common/ranks/ranks.h"
#include "infer-server/engine/engine_info.h"

#include <jansson.h>

struct engine;

// What a weight update does to the KV cache of requests in flight.
enum kv_policy { KV_KEEP, KV_RECOMPUTE, KV_DRAIN };
extern const char *const kv_policy_names[];

// What holds where an option is 0.
#define ENGINE_MAX_BATCH     64
#define ENGINE_MAX_QUEUE     4096
#define ENGINE_PREFILL_CHUNK 512
#define ENGINE_BLOCK_SIZE    16

// Whether a step is launched while the one before it is computed (executor.c); AUTO: on a GPU.
enum step_ahead { STEP_AHEAD_AUTO, STEP_AHEAD_ON, STEP_AHEAD_OFF };

struct engine_options {
    const char *model_folder;  // borrowed for the engine's life
    const char *draft_folder;  // of a draft model; NULL: none
    const char *frozen_folder; // of a model that writes with the policy (tandem.h); NULL: none
    const uint8_t *token_ends; // (n_token_ends) token_ends_of() each; borrowed; NULL: not known
    int n_token_ends;          // the model's vocabulary may have more, which are of no text
    const char *device;        // "auto", "cpu", "cuda:N"
    int dtype;                 // enum dtype or -1: the device's default
    int quantization;          // enum quantization, of the policy
    int kv_cache;              // enum kv_cache, of all models
    bool inference_only;       // nobody trains the weights, or may map them
    bool expert_parallel;      // of several ranks: they hold experts whole, some each
    int64_t max_batch;         // sequences decoded at once
    int64_t max_context;       // 0: the model's, bounded by what memory allows
    int64_t kv_bytes;          // 0: kv_percent of what is free after the weights
    double kv_percent;
    int64_t block_size;      // tokens a KV block
    int64_t prefill_chunk;   // most prompt tokens in one step
    int64_t max_queue;       // samples waiting beyond those running; more: ST_BUSY
    const char *bridge_path; // where to write the bridge file
    const char *socket_path; // stands in the bridge file
    enum kv_policy kv_policy;
    int prefix_cache_off; // 1: a request finds no blocks of another; samples of one still share
    struct speculative_choice speculative; // of requests that do not choose
    int speculative_fixed;                 // 1: always as many drafts as there are, paying or not
    int64_t draft_vocabulary;              // first tokens that a model's drafts are of; 0: all
    enum step_ahead step_ahead;
    bool exact; // docs/internals/numerics.md: the same bits whatever is drafted and batched
    int64_t max_adapters, max_lora_rank; // room for LoRA adapters; 0: there are none
    struct ranks who; // of a tensor-parallel server's; rank 0's is the engine; size 0 or 1: alone
};

struct request; // opaque to the server but for these
// Takes copies of the prompt ids and the sampling. tag is the submitter's own.
enum status request_new(const int32_t *prompt, int n_prompt, const struct sampling *sampling,
                        void *tag, struct request **ret);
void request_free(struct request *r);
void *request_tag(const struct request *r);

// Counts the drafts of a sample's n tokens (all of them, or up to where its text was cut: drafts
// behind the cut count neither as drafted nor as accepted).
void telemetry_count_drafts(struct sample_telemetry *t, const struct token_record *tokens, int n);

// Starts the thread; loading goes on in it (engine_stats tells). Config errors come at once.
enum status engine_new(const struct engine_options *options, engine_event_fn on_event,
                       void *context, struct engine **ret);
// Ends: refuses new requests, finishes or (after drain_ms) cancels what runs, joins the thread,
// removes the bridge file, control page and shared memory.
void engine_free(struct engine *e, int drain_ms);

// Any thread, at any time; neither waits for the engine.
void engine_info(struct engine *e, struct engine_info *ret);
void engine_stats(struct engine *e, struct engine_stats *ret);

// Any thread. ST_INVALID (a token id out of range, prompt over the context: named), ST_BUSY (queue
// full), ST_TORN. On success the request belongs to the engine until its last event.
enum status engine_submit(struct engine *e, struct request *r);
void engine_cancel(struct engine *e, struct request *r, int sample); // sample -1: all
// Stops stepping at the next boundary until resumed (POST /bridge/pause). Pausing waits for that,
// at most timeout_ms (ST_TIMEOUT: it is not paused; ST_CANCELLED: resumed meanwhile);
// updates and commands are served while paused.
enum status engine_pause(struct engine *e, int timeout_ms);
enum status engine_resume(struct engine *e);
bool engine_paused(struct engine *e);
// Rewrites the weights from a model folder at a step boundary (POST /reload): next even version.
// Runs on the engine thread; done() is called there when finished, with the message of a failure.
// ST_BUSY while a trainer is attached. draft_folder: the draft model's; NULL: it stays as it is.
typedef void (*engine_done_fn)(void *context, enum status, const char *message, uint64_t version);
enum status engine_reload(struct engine *e, const char *folder, const char *draft_folder,
                          engine_done_fn done, void *context);
// LoRA adapters. Any thread: those that there are, and one by its name.
int engine_adapters(struct engine *e, struct adapter_info ret[ADAPTERS_MAX]);
bool engine_find_adapter(struct engine *e, const char *name, struct adapter_ref *ret);
// Loads, makes or unloads one at a step boundary; done() as of engine_reload(). An order is copied.
// A folder that records another base (adapter.h): ST_MISMATCH of an exact engine, else a message.
// ST_BUSY where samples are computed with the one to unload, or a trainer is attached and the one
// to replace in place might be its own.
enum status engine_load_adapter(struct engine *e, const struct adapter_request *order,
                                engine_done_fn done, void *context);
// writer: the trainer that asks for it and has it mapped no more, or 0.
enum status engine_unload_adapter(struct engine *e, const char *name, pid_t writer,
                                  engine_done_fn done, void *context);
// Facts for GET /bridge/info, gathered on the engine thread at a step boundary: canary is the
// 64-bit word found in the arena's canary (the engine then stores its complement beside it), of
// each shard; checksums, if wanted, is one ops.checksum value a tensor as the file lists them (the
// policy's, then the draft's), all of one even version. done() gets NULL info where the engine
// fails or ends before it comes to that.
struct engine_bridge_info {
    uint64_t version;
    int n_shards, n_tensors;
    const uint64_t *canaries;  // (n_shards)
    const uint64_t *checksums; // NULL where not wanted; valid during the call
    const json_t *base;        // with these: what adapters are of (adapter.h)
};
enum status engine_bridge_info(struct engine *e, bool checksums,
                               void (*done)(void *context, const struct engine_bridge_info *),
                               void *context);

// follower.c: a rank of a tensor-parallel server other than 0 (group.h): holds its shard of the
// weights and of the KV cache, and does what rank 0 orders. It has no sockets of its own. Until
// rank 0 ends, which is ST_OK. Main thread.
enum status follower_run(const struct engine_options *options);

#endif
