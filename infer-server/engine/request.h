/* request.h: a request and its samples, as the engine's own files see them (engine.h shows them
 * opaque). One thread at a time: the submitter until engine_submit(), then the engine's, but for
 * `cancel`, which the submitter sets.
 *
 * A sample is a sequence: the prompt's tokens and those generated so far. Its parts have one writer
 * each. Its counters, in tokens from the front:
 *
 *    0             n_prompt                                  known
 *    |--- prompt ------|--- text.generated -------------------|
 *    |- cached ----|                   whole blocks that other requests can find (prefix cache)
 *    |- kv[RUNNER_POLICY].computed ------------------------|
 *    |- kv[RUNNER_DRAFT].computed ------|                    the draft KV lag is the difference
 *    |---------- blocks.n blocks ------------------------------|
 *
 *    cached <= computed <= known; decoding: computed + 1 == known      (sample_check)
 *
 * Where two models write a sample together (tandem.h), kv[RUNNER_FROZEN] is the frozen model's.
 * Neither runs where the other writes: each computes what it has missed when its turn comes
 * (sample_runner), in one chunk. What is cached, both have computed. Where the frozen model writes
 * alone, kv[RUNNER_FROZEN] is all there is (owner).
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_REQUEST_H
#define INFER_SERVER_REQUEST_H

#include "infer-server/engine/adjust.h"
#include "infer-server/engine/block_manager.h"
#include "infer-server/engine/engine_info.h"
#include "infer-server/engine/runner.h"
#include "infer-server/speculative/speculative.h"

enum sample_state { SAMPLE_WAITING, SAMPLE_RUNNING, SAMPLE_DONE };

struct sample_text {    // what is known of it; written by verification (executor.c)
    int32_t *generated; // (max_tokens) ids
    int n_generated;
    int n_coming, coming_row;  // 1: a step that was not collected yet samples one more, in that row
    uint64_t stream;           // of its random numbers
    struct logit_list counted; // where the request has penalties or biases
    int constraint_state;      // behind what was generated; CONSTRAINT_START at first
};
struct sample_blocks {         // its block table, the same in all runners' pools; the scheduler's
    int32_t *at;               // (all blocks it can ever need), of which n are allocated
    int n, peak;               // blocks shared with siblings count for each
    int n_cached;              // blocks from the front that stand in the prefix cache
    struct block_hash *hashes; // of its blocks behind those that the prompt fills
    int n_hashed;              // blocks from the front whose hash is known, the prompt's among them
};
#define STATES_KEPT 2 // of a prompt
struct kept_state {   // a state that others may begin with, behind whole blocks
    int position;     // tokens before it; 0: none
    int32_t slot;     // -1: none yet
};
struct sample_states {      // where a model carries any; the scheduler's
    int32_t own;            // slot of its own, while it runs
    struct kept_state from; // found in the prefix cache, until all that write it have begun there
    struct kept_state keep[STATES_KEPT]; // that it leaves there, in order, until it has
};
struct sample_kv { // in one runner's pool; written by the scheduler, the draft's by draft_model.c
    int computed;  // tokens from the front whose keys and values lie in its blocks
    uint64_t version; // its owner's: that computed all of them; 0: more than one did
};
struct sample_hidden { // rows of the policy's last step that hold its hidden states;
                       // draft_model.c's
    int first, n, row; // positions, and the first's row
    unsigned step;     // whose rows they are: its number among the policy's
};
struct sample_queue { // the scheduler's
    enum sample_state state;
    uint64_t order; // of arrival; the smaller, the older
    bool started;   // has left the queue once
};

struct sample {
    struct request *request;
    int index; // 0..n-1 in its request
    _Atomic bool cancel;
    struct sample_text text;
    struct sample_blocks blocks;
    struct sample_states states;
    struct sample_kv kv[RUNNERS];
    struct sample_hidden hidden;
    struct sample_queue queue;
    enum runner_role owner;      // whose blocks say what of it is computed, and by which version: a
                                 // tandem's are the policy's
    struct tandem_author author; // of a tandem's next token; written by executor.c
    struct draft draft;          // of the tokens after the last; drafting.c's
    int64_t queued_ns, started_ns, last_token_ns; // 0: not yet; these and telemetry: telemetry.c's
    struct sample_telemetry telemetry;
};

struct request {
    void *tag;
    struct sampling sampling; // its logit_bias is the request's own
    int n_prompt;
    int32_t *prompt;
    uint64_t prompt_key;       // of the suffix drafter; 0: not wanted yet
    struct block_hash *hashes; // (full_blocks + 1) of the blocks that the prompt fills; the first
                               // is what their chain starts from
    int full_blocks;
    int cached_tokens; // of the prompt, found when the first sample was admitted; -1: none was yet
    struct sample *samples; // (sampling.n)
    int n_done;
    // Prompt log-probabilities, where wanted: of position p + 1 from row p of the model. Filled
    // from the front (logprobs.h), each once, however often the prompt is computed.
    struct prompt_token *prompt_tokens; // (n_prompt)
    struct top_logprob *prompt_top;     // (n_prompt, sampling.prompt_top)
    int n_scored;                       // rows from the front that were read
    bool prompt_delivered;              // in an event
    struct sample *prefilling;          // computes the prompt, for which its siblings wait; or NULL
    struct request *next;               // in the engine's inbox
};

// ST_INVALID names the field: what a model and an engine like these can never do. Any thread.
struct engine_options;
enum status request_check(const struct engine_options *options, const struct model_config *config,
                          const struct request *r);
// tandem.c: of what the frozen model has a part in.
enum status tandem_check(const struct engine_options *options, const struct sampling *sampling);
// The drafts that are asked for; `where`: "--speculative", or the request's field.
enum status check_drafts(const struct engine_options *options, struct speculative_choice choice,
                         const char *where);
// Room for what its samples generate and for their block tables, and the hashes of the prompt's
// blocks; once, before it is queued. Requests find each other's blocks where their cache_salt is
// the same (0: the one of all that do not mind).
enum status request_prepare(struct request *r, int block_size, uint64_t cache_salt);

// Rows of the prompt from the front whose keys and values will do: all, or those that need not give
// a log-probability any more.
static inline int request_rows_read(const struct request *r)
{
    const bool all = !r->sampling.prompt_logprobs || r->n_scored >= r->n_prompt - 1;
    return all ? INT32_MAX : r->n_scored;
}

// Tokens that were sampled; the last one may still be on its way from the device.
static inline int sample_n_sampled(const struct sample *s)
{
    return s->text.n_generated + s->text.n_coming;
}
static inline int sample_known(const struct sample *s) // tokens, that one among them
{
    return s->request->n_prompt + sample_n_sampled(s);
}
// It will have ended once that one is there.
static inline bool sample_is_ending(const struct sample *s)
{
    return s->text.n_coming && sample_n_sampled(s) >= s->request->sampling.max_tokens;
}
static inline bool sample_is_tandem(const struct sample *s)
{
    return s->request->sampling.tandem.on;
}
static inline bool sample_uses_frozen(const struct sample *s) // the frozen model has a part in it
{
    return sample_is_tandem(s) || s->request->sampling.frozen;
}
static inline enum runner_role sample_author(const struct sample *s) // that samples its next token
{
    return sample_is_tandem(s) && s->author.frozen ? RUNNER_FROZEN : s->owner;
}
enum runner_role sample_tandem_runner(const struct sample *s); // tandem.c
// tandem.c. Whose step is next where samples are written by two models: that of the model for which
// the sample waits that has the fewest tokens: samples with the same authors at the same places,
// once they have come to the same place, go on in step. Neither is passed over for long.
enum runner_role tandem_next_runner(struct sample *const *running, int n, enum runner_role last,
                                    int *passed_over);
// Who writes behind its last token, which is new.
void sample_choose_author(struct sample *s, const uint8_t *token_ends, int n_token_ends);
static inline enum runner_role sample_runner(const struct sample *s) // whose turn it is to compute
{
    return sample_is_tandem(s) ? sample_tandem_runner(s) : s->owner;
}
static inline int sample_computed(const struct sample *s) // of these, by whose turn it is
{
    return s->kv[sample_runner(s)].computed;
}
static inline int sample_computed_by_all(const struct sample *s) // by all that write it
{
    const int own = s->kv[s->owner].computed, frozen = s->kv[RUNNER_FROZEN].computed;
    return sample_is_tandem(s) && frozen < own ? frozen : own;
}
// All its tokens are computed but the last, which was sampled.
static inline bool sample_is_decoding(const struct sample *s)
{
    return sample_computed(s) + 1 == sample_known(s) && sample_n_sampled(s) > 0;
}
void sample_append(struct sample *s, int32_t token); // which was sampled
// Feeds its n tokens from position `first` on to a step of a runner.
enum status sample_feed(const struct sample *s, struct runner *r, int first, int n,
                        struct batch_seq seq);
// Writes the n tokens from position `first` on.
void sample_tokens(const struct sample *s, int first, int n, int32_t *ret_tokens);
void sample_check(const struct sample *s, int block_size); // the order of its counters (assert)

// Of its first n blocks, n from 0 to n_hashed.
static inline struct block_hash *sample_prefix_hash(const struct sample *s, int n)
{
    const struct request *r = s->request;
    return n <= r->full_blocks ? &r->hashes[n] : &s->blocks.hashes[n - r->full_blocks - 1];
}

#endif
