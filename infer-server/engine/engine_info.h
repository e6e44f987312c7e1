/* engine_info.h: what goes into the engine and what comes out of it, as plain values: how to
 * sample, the tokens, events and telemetry that come back, statistics, and what the weights are. No
 * tensor, no control page. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_ENGINE_INFO_H
#define INFER_SERVER_ENGINE_INFO_H

#include "common/constraint/constraint.h"
#include "bridge/control_info.h"
#include "infer-server/engine/tandem.h"
#include "infer-server/speculative/speculative.h"
#include "infer-server/weights/adapters.h"
#include <stdbool.h>
#include <stdint.h>

// ---- histogram ----------------------------------------------------------------------------------
// Counts of values by ranges, as Prometheus has them, and the ranges of each metric: vLLM's bounds,
// so that its dashboards and alerts find the buckets they name, with finer ones below where small
// models are faster. A histogram is plain data, of whoever keeps it.

#define HISTOGRAM_BOUNDS_MAX 32

struct histogram_bounds {
    int n;
    double at[HISTOGRAM_BOUNDS_MAX]; // ascending
};

// count i is of values <= at[i] and above at[i - 1] (not cumulative); count n of all above.
struct histogram { // all zero: empty
    uint64_t counts[HISTOGRAM_BOUNDS_MAX + 1];
    double sum;
};

extern const struct histogram_bounds bounds_first_token; // seconds
extern const struct histogram_bounds bounds_next_token;  // seconds
extern const struct histogram_bounds bounds_request;     // seconds
extern const struct histogram_bounds bounds_step_tokens; // tokens of one step
extern const struct histogram_bounds bounds_n;           // samples of a prompt

// 1, 2, 5, 10, 20, ... up to `most`: tokens of a request, of at most the context's.
void histogram_bounds_tokens(int max, struct histogram_bounds *ret);

void histogram_add(struct histogram *h, const struct histogram_bounds *bounds, double value);

// ---- what is asked for --------------------------------------------------------------------------
struct token_bias {
    int32_t token;
    float bias; // added to its logit
};

struct sampling {
    struct adapter_ref adapter; // that samples
    int n;                      // samples, >= 1
    int max_tokens; // 0: the prompt is computed, nothing sampled; with the prompt within the
                    // context
    float temperature, top_p, min_p;
    int top_k;
    uint64_t seed; // sample i takes stream seed and i (sampler.h says how)
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
    struct constraint
        *constraint;      // what it may write (constraint.h); a request holds its own; or NULL
    bool prompt_logprobs; // of the prompt's tokens, each given those before it
    int prompt_top;       // with these, so many most likely tokens (<= TOP_LOGPROBS_MOST)
    struct speculative_choice speculative;
    struct tandem_choice tandem; // then nothing is drafted
    bool frozen;                 // the frozen model writes it alone; likewise
    // stop strings are the server's business: it detokenises, and cancels the sample
};

static inline bool sampling_repeats(const struct sampling *s) // has a repetition penalty
{
    return s->repetition_penalty != 0 && s->repetition_penalty != 1;
}
static inline bool sampling_counts(const struct sampling *s) // what is generated matters
{
    return sampling_repeats(s) || s->frequency_penalty != 0 || s->presence_penalty != 0;
}
static inline bool sampling_adjusts(const struct sampling *s) // some logit, by penalty or bias
{
    return sampling_counts(s) || s->n_logit_bias > 0;
}
static inline bool sampling_cuts(const struct sampling *s)
{
    return s->temperature > 0 && (s->top_k > 0 || s->top_p < 1 || s->min_p > 0);
}
static inline bool sampling_changes(const struct sampling *s) // or by a constraint
{
    return sampling_adjusts(s) || s->constraint;
}

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
    bool frozen;             // the frozen model sampled it, whose log-probabilities these are
};
struct prompt_token { // of a prompt's token, given those before it; the first has none
    float logprob;
    int32_t rank;            // 1: it was the likeliest
    uint64_t weight_version; // that computed it
};
struct draft_counts { // of drafts that were verified
    int64_t num_drafts, num_draft_tokens,
        num_accepted_tokens; // num_drafts: steps that verified some
    int64_t num_accepted_tokens_per_pos[SPECULATIVE_MAX];
    int draft_positions; // most drafts of one step
};
void draft_counts_step(struct draft_counts *c, int n_drafts, int n_accepted); // one more step
void draft_counts_add(struct draft_counts *sum, const struct draft_counts *more);

struct sample_telemetry { // docs/use/protocol.md, POST /v1/rollouts
    int prompt_tokens, cached_prompt_tokens, generated_tokens;
    double queue_ms, first_token_ms, latency_ms;
    int64_t kv_bytes_peak;
    uint64_t weight_version_first, weight_version_last;
    struct draft_counts drafts;
    // kv_bytes_peak counts a block shared with siblings for each of them. cached_prompt_tokens were
    // found when the request's first sample began: of earlier requests, and the same for all
    // samples; a group's own sharing is not counted, or its first sample would look dearer.
};

struct request; // opaque: engine.h

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
    const struct prompt_token *prompt;    // (prompt tokens)
    const struct top_logprob *prompt_top; // (prompt tokens, sampling.prompt_top)
    enum finish_reason finish;            // FINISH_NONE: more to come
    bool last_is_text; // with FINISH_STOP: a constraint is met, of which no stop token says so
    const char *error; // sentence, for FINISH_ERROR
    const struct sample_telemetry *telemetry; // with finish only
    bool request_done;                        // this was the last event of the request
    bool more;                                // another one of the same step follows at once
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
    int64_t kv_bytes_per_block, weight_bytes, draft_weight_bytes, frozen_weight_bytes;
    uint64_t requests_done[5]; // by finish_reason
    uint64_t prompt_tokens, generated_tokens, steps, preemptions, updates, restores;
    uint64_t steps_ahead;               // launched before the one before them was collected
    uint64_t cache_queries, cache_hits; // prompt tokens looked up in the prefix cache, and found
    double last_pause_ms, busy_seconds;
    struct draft_counts drafts; // as the engine verified them, before stop strings cut the text;
                                // draft_positions: the server's K, or the most that was drafted
    struct speculative_choice speculative;    // the server's
    struct histogram first_token, next_token; // seconds; the second: between tokens of a sample
    struct histogram step_tokens; // prompt tokens computed and tokens generated, by step
};

struct engine_info { // of the weights and the bridge
    const char *bridge_path;
    int vocab_size, n_eos;
    const int *eos_ids; // (n_eos) the model's
    // 0 and false while loading:
    int max_context;      // tokens of prompt and completion
    int n_shards;         // of the policy, each on a device of its own
    int n_tensors;        // of the policy
    int64_t n_parameters; // likewise, of all shards
    bool loaded;
    struct control_info control; // where loaded
};

#endif
