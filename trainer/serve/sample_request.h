/* sample_request.h: a request of samples: read from the API's JSON, sent by the sampling thread
 * (sampling.h), and filled from the lines that the server answers with. No state; any thread. */
#ifndef TRAINER_SERVE_SAMPLE_REQUEST_H
#define TRAINER_SERVE_SAMPLE_REQUEST_H

#include "common/http/inbox.h"
#include <jansson.h>
#include <stdint.h>

#define SAMPLE_NO_LOGPROB -99999.0f // where a place has none

struct sampled { // one sequence
    int32_t *tokens;
    float *logprobs;
    int n;
    bool stopped; // else it reached its length
};

// One request of samples of a prompt; embed it first in a struct of the asker's own.
struct sample_request {
    struct inbox_message message; // its way back; deliver() runs on the loop's thread
    struct sample_request *next;
    // asked for
    int32_t *prompt; // (n_prompt)
    int n_prompt, n; // n: samples
    bool has_seed;
    int64_t seed;
    char adapter[64];     // that samples, or "frozen"; "": the model itself
    json_t *sampling;     // /v1/rollouts' "sampling", without n and seed
    bool prompt_logprobs; // likewise in `sampling`, as prompt_logprobs: top
    int top;              // likeliest tokens of each place of the prompt
    int last_n;           // places of the prompt that are scored, from its end; 0: all
    // came back
    struct status_kept status;
    struct sampled *samples; // (n)
    int n_done, cached_tokens;
    float *logprobs;         // (n_prompt), NAN where there is none; NULL: not asked for
    int32_t *top_ids;        // (n_prompt, top), 0 where there is none
    float *top_logprobs;     // likewise, -99999
    uint64_t oldest, newest; // version of the weights that drew or scored any token; 0: none was
    // its own
    bool alone;
};
void sample_request_release(struct sample_request *r); // what it holds
void sample_request_clear(struct sample_request *r);   // what came back: it can be put again

struct sample_limits {
    int vocab, max_context; // of the server
};
// Of asample's body. What it holds is the caller's to release, on failure too.
enum status sample_request_parse(const json_t *body, const struct sample_limits *limits,
                                 struct sample_request *ret);
// A line of /v1/rollouts that is the i-th sample, which has not come yet.
enum status sample_request_take(struct sample_request *r, int i, const json_t *line);

#endif
