/* request.h: a request and its samples, as the engine's own files see them (engine.h shows them
 * opaque). One thread at a time: the submitter until engine_submit(), then the engine's, but for
 * `cancel`, which the submitter sets. */
#ifndef INFER_SERVER_REQUEST_H
#define INFER_SERVER_REQUEST_H

#include "infer-server/engine/adjust.h"
#include "infer-server/engine/block_hash.h"
#include "infer-server/engine/engine.h"

enum sample_state { SAMPLE_WAITING, SAMPLE_RUNNING, SAMPLE_DONE };

// One completion of a request: a sequence of the prompt's tokens and of those generated so far.
struct sample {
    struct request *request;
    int index;      // 0..n-1 in its request
    uint64_t order; // position in the queue of arrival; the smaller, the older
    enum sample_state state;
    _Atomic bool cancel;
    int32_t *generated; // (max_tokens) ids
    int n_generated;
    int32_t *blocks; // its block table: (all blocks it can ever need), of which n_blocks are held
    int n_blocks, peak_blocks; // blocks shared with siblings count for each
    int n_named;               // blocks from the front that have names (kv_cache.h)
    int computed;              // tokens from the front whose keys and values lie in its blocks
    int draft_computed;        // the same in the draft model's pool (draft_model.h)
    uint64_t kv_version;       // that computed all of them; 0: more than one did
    struct block_hash *hashes; // of its blocks behind those that the prompt fills
    int n_hashed;              // blocks from the front whose hash is known, the prompt's among them
    uint64_t stream;           // of its random draws
    int64_t queued_ns, started_ns, last_token_ns; // 0: not yet
    bool started;                                 // has left the queue once
    struct draft draft;                           // of the tokens after the last
    struct logit_list adjusted;                   // where the request has penalties or biases
    struct sample_telemetry telemetry;
};

struct request {
    void *tag;
    struct sampling sampling; // its logit_bias is the request's own
    int n_prompt;
    int32_t *prompt;
    uint64_t prompt_key;       // of the suffix drafter
    struct block_hash *hashes; // (full_blocks + 1) of the blocks that the prompt fills; the first
                               // is what their chain starts from
    int full_blocks;
    int cached_tokens; // of the prompt, found when the first sample was admitted; -1: none was yet
    struct sample *samples; // (sampling.n)
    int n_done;
    // Prompt log-probabilities, where wanted: of position p + 1 from row p of the model. Filled
    // from the front (prompt_logprobs.h), each once, however often the prompt is computed.
    struct prompt_token *prompt_tokens; // (n_prompt)
    struct top_logprob *prompt_top;     // (n_prompt, sampling.prompt_top)
    int n_scored;                       // rows from the front that were read
    bool prompt_told;                   // in an event
    struct sample *leader; // computes the prompt for its siblings, which wait for it; or NULL
    struct request *next;  // in the engine's inbox
};

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

static inline int sample_length(const struct sample *s) // tokens known
{
    return s->request->n_prompt + s->n_generated;
}
// All its tokens are computed but the last, which it drew.
static inline bool sample_is_decoding(const struct sample *s)
{
    return s->computed + 1 == sample_length(s) && s->n_generated > 0;
}
// Writes the n tokens from position `first` on.
void sample_tokens(const struct sample *s, int first, int n, int32_t *ret_tokens);

// Of its first n blocks, n from 0 to n_hashed.
static inline struct block_hash *sample_prefix_hash(const struct sample *s, int n)
{
    const struct request *r = s->request;
    return n <= r->full_blocks ? &r->hashes[n] : &s->hashes[n - r->full_blocks - 1];
}

#endif
