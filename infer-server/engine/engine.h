/* engine.h: the engine: the thread that owns the device, the weights' owner side of the bridge, and
 * the KV cache. Other threads hand it requests and take finished tokens through bounded queues;
 * they never see a tensor.
 *
 * A request is one prompt and n samples of it (a group). The engine copies nothing it is given: a
 * request is moved in by engine_submit() and comes back by the events it causes; the last event of
 * a sample says how it ended, and after the last sample's last event the request is the submitter's
 * again (release it with request_free()).
 */
#ifndef INFER_SERVER_ENGINE_H
#define INFER_SERVER_ENGINE_H

#include "bridge/control.h"
#include "common/base/status.h"
#include "common/model/weights.h"
#include "infer-server/engine/histogram.h"
#include "infer-server/speculative/speculative.h"
#include "kernels/device.h"
#include <jansson.h>
#include <stdint.h>

struct engine;

struct engine_options {
    const char *model_folder; // borrowed for the engine's life
    const char *draft_folder; // of a draft model; NULL: none
    const char *device;       // "auto", "cpu", "cuda:N"
    int dtype;                // enum dtype or -1: the device's default
    int max_batch;            // sequences decoded at once
    int max_context;          // 0: the model's, bounded by what memory allows
    int64_t kv_bytes;         // 0: kv_percent of what is free after the weights
    double kv_percent;
    int block_size;          // tokens a KV block, 16
    int prefill_chunk;       // most prompt tokens in one step
    int max_queue;           // samples waiting beyond those running; more: ST_BUSY
    const char *bridge_path; // where to write the bridge file
    const char *socket_path; // stands in the bridge file
    const char *kv_policy;   // "keep", "recompute", "drain": requests in flight at an update
    bool prefix_cache_off;   // a request finds no blocks of another; samples of one still share
    struct speculative_choice speculative; // of requests that do not choose
    bool speculative_fixed;                // always as many drafts as there are, paying or not
    bool exact; // docs/numerics.md: the same bits whatever is drafted and batched
};

struct token_bias {
    int32_t token;
    float bias; // added to its logit
};

struct sampling {
    int n;          // samples, >= 1
    int max_tokens; // 0: the prompt is computed, nothing sampled; with the prompt within the
                    // context
    float temperature, top_p, min_p;
    int top_k;
    uint64_t seed; // sample i draws from stream seed and i (sampler.h says how)
    int logprobs;  // -1: none; 0: of the sampled tokens; N: and the N most likely (<= 20)
    bool ignore_eos;
    int32_t stop_ids[16];
    int n_stop_ids;
    int min_tokens;      // no stop token before this many
    uint64_t cache_salt; // finds and leaves blocks in the prefix cache under this; 0: everybody's
    // Adjustments of the logits, before temperature and filtering (ops.h, adjust_logits). 0: off,
    // for repetition 1 as well. Several biases of one token add up.
    float repetition_penalty, frequency_penalty, presence_penalty;
    const struct token_bias *logit_bias; // borrowed; request_new() copies it
    int n_logit_bias;
    bool prompt_logprobs; // of the prompt's tokens, each given those before it
    int prompt_top;       // with these, so many most likely tokens (<= TOP_LOGPROBS_MOST)
    struct speculative_choice speculative;
    // stop strings are the server's business: it detokenises, and cancels the sample
};

bool sampling_adjusts(const struct sampling *s); // some logit: there is a penalty or a bias

enum finish_reason { FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED, FINISH_ERROR };

struct top_logprob {
    int32_t token;
    float logprob;
};
// Log-probabilities are of the temperature-scaled distribution (greedy: temperature 1). logprob is
// the raw one, as the trainer computes it; processed_logprob is that of the distribution which was
// sampled from: after logit_bias, penalties and filtering. retained_mass: what top-k, top-p and
// min-p left of it.
struct token_record {
    int32_t token;
    float logprob, processed_logprob, retained_mass;
    uint64_t weight_version; // that sampled it
    uint8_t drafted;         // on the first token of a step that verified drafts: how many
    uint8_t accepted_at;     // where it is an accepted draft: its place among them, from 1
};
struct prompt_token { // of a prompt's token, given those before it; the first has none
    float logprob;
    int32_t rank;            // 1: it was the likeliest
    uint64_t weight_version; // that computed it
};
struct sample_telemetry { // docs/protocol.md, POST /v1/rollouts
    int prompt_tokens, cached_prompt_tokens, generated_tokens;
    double queue_ms, first_token_ms, latency_ms;
    int64_t kv_bytes_peak;
    uint64_t weight_version_first, weight_version_last;
    int num_drafts, num_draft_tokens, num_accepted_tokens; // num_drafts: steps that verified some
    int num_accepted_tokens_per_pos[SPECULATIVE_MOST], draft_positions; // most drafts of one step
    // kv_bytes_peak counts a block shared with siblings for each of them. cached_prompt_tokens were
    // found when the request's first sample began: of earlier requests, and the same for all
    // samples; a group's own sharing is not counted, or its first sample would look dearer.
};

// Counts the drafts of a sample's n tokens (all of them, or up to where its text was cut: drafts
// behind the cut count neither as drafted nor as accepted).
void telemetry_count_drafts(struct sample_telemetry *t, const struct token_record *tokens, int n);

struct request; // opaque to the server but for these
// Takes copies of the prompt ids and the sampling. tag is the submitter's own.
enum status request_new(const int32_t *prompt, int n_prompt, const struct sampling *sampling,
                        void *tag, struct request **ret);
void request_free(struct request *r);
void *request_tag(const struct request *r);

// What the engine tells the submitter; called on the engine's thread, must not block (the server
// pushes into its own queue and wakes its loop). `tokens` are valid during the call only.
struct engine_event {
    struct request *request;
    int sample;                        // 0..n-1
    const struct token_record *tokens; // new since the last event of this sample
    int n_tokens;
    const struct top_logprob *top; // (n_tokens, sampling.logprobs), or NULL
    // With the first event of a request that asked for prompt log-probabilities and has all of
    // them, else NULL.
    const struct prompt_token *prompt;        // (prompt tokens)
    const struct top_logprob *prompt_top;     // (prompt tokens, sampling.prompt_top)
    enum finish_reason finish;                // FINISH_NONE: more to come
    const char *error;                        // sentence, for FINISH_ERROR
    const struct sample_telemetry *telemetry; // with finish only
    bool request_done;                        // this was the last event of the request
};
typedef void (*engine_event_fn)(void *context, const struct engine_event *event);

enum engine_state { ENGINE_LOADING, ENGINE_OK, ENGINE_TORN, ENGINE_DRAINING, ENGINE_FAILED };

struct engine_stats { // a snapshot for /health and /metrics; counters since start
    enum engine_state state;
    char state_detail[256];
    char weights_warning[1400]; // what the weights lack after a restore that fell back; "": nothing
    uint64_t weight_version;
    int running, waiting;
    int kv_blocks_total, kv_blocks_used, kv_block_tokens;
    int64_t kv_bytes_per_block, weight_bytes, draft_weight_bytes;
    uint64_t requests_done[5]; // by finish_reason
    uint64_t prompt_tokens, generated_tokens, steps, preemptions, updates, restores;
    uint64_t cache_queries, cache_hits; // prompt tokens looked up in the prefix cache, and found
    double last_pause_ms, busy_seconds;
    // drafts as the engine verified them, before stop strings cut the text
    uint64_t num_drafts, num_draft_tokens, num_accepted_tokens;
    uint64_t num_accepted_tokens_per_pos[SPECULATIVE_MOST];
    struct speculative_choice speculative;    // the server's
    int draft_positions;                      // its K, or the most that a request has drafted
    struct histogram first_token, next_token; // seconds; the second: between tokens of a sample
    struct histogram step_tokens; // prompt tokens computed and tokens generated, by step
};

// Starts the thread; loading goes on in it (engine_stats tells). Config errors come at once.
enum status engine_new(const struct engine_options *options, engine_event_fn on_event,
                       void *context, struct engine **ret);
// Ends: refuses new requests, finishes or (after drain_ms) cancels what runs, joins the thread,
// removes the bridge file, control page and shared memory.
void engine_free(struct engine *e, int drain_ms);
const struct model_config *engine_config(const struct engine *e); // valid from engine_new on
int engine_max_context(struct engine *e); // tokens of prompt and completion; 0 while loading

// Any thread. ST_INVALID (a token id out of range, prompt over the context: named), ST_BUSY (queue
// full), ST_TORN. On success the request belongs to the engine until its last event.
enum status engine_submit(struct engine *e, struct request *r);
void engine_cancel(struct engine *e, struct request *r, int sample); // sample -1: all
void engine_stats(struct engine *e, struct engine_stats *ret);
// Stops stepping at the next boundary until resumed (POST /bridge/pause). Pausing waits for that,
// at most timeout_ms (ST_TIMEOUT: it is not paused; ST_CANCELLED: resumed meanwhile);
// updates and commands are served while paused.
enum status engine_pause(struct engine *e, int timeout_ms);
enum status engine_resume(struct engine *e);
bool engine_paused(struct engine *e);
// Rewrites the weights from a model folder at a step boundary (POST /reload): next even version.
// Runs on the engine thread; done() is called there when finished, with the message of a failure.
// ST_BUSY while a trainer is attached. draft_folder: the draft model's; NULL: it stays as it is.
enum status engine_reload(struct engine *e, const char *folder, const char *draft_folder,
                          void (*done)(void *context, enum status, const char *message,
                                       uint64_t version),
                          void *context);
// Facts for GET /bridge/info, gathered on the engine thread at a step boundary: canary is the
// 64-bit word found in the arena's canary (the engine then stores its complement beside it);
// checksums, if wanted, is one ops.checksum value a tensor in arena order (the policy's, then the
// draft's), all of one even version.
// done() gets NULL facts where the engine fails or ends before it comes to that.
struct engine_bridge_facts {
    uint64_t version, canary;
    int n_tensors;
    const uint64_t *checksums; // NULL where not wanted; valid during the call
};
enum status engine_bridge_facts(struct engine *e, bool checksums,
                                void (*done)(void *context, const struct engine_bridge_facts *),
                                void *context);
// Names for the above, in arena order (weights.h), of the policy; valid from ENGINE_OK on.
const struct weights *engine_weights(struct engine *e); // NULL before
const char *engine_bridge_path(const struct engine *e);
struct control *engine_control(struct engine *e); // for control_facts(); NULL while loading

#endif
