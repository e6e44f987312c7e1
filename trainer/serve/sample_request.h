/* sample_request.h: requests of samples, read from the API's JSON and filled from the lines that
 * the server responds with. No state; any thread. */
#ifndef TRAINER_SERVE_SAMPLE_REQUEST_H
#define TRAINER_SERVE_SAMPLE_REQUEST_H

#include "common/model/tokenizer.h"
#include "trainer/rollout/completion.h"
#include "trainer/serve/request.h"
#include "trainer/serve/snapshots.h"

#define SAMPLE_NO_LOGPROB -99999.0f // where a token has none

struct sample_request {
    struct request request;
    struct snapshot snapshot; // of the sampler then
    struct snapshot_use use;  // that answers for it
    int tries;
    // asked for
    struct token_list prompt;
    int n;                           // samples
    json_t *group;                   // of /v1/rollouts: n and seed
    struct completion_bounds bounds; // of each
    json_t *sampling;                // its "sampling"
    bool prompt_logprobs;            // likewise in `sampling`, as prompt_logprobs: top
    int top;                         // likeliest tokens of each token of the prompt
    int last_n;                      // tokens of the prompt that are scored, from its end; 0: all
    bool alone;                      // it goes to the server with no other
    // came back
    struct completion *samples; // (n); text NULL: not there yet
    int n_done, cached_tokens;
    struct bytes scores;     // of the prompt: fields 2 and 3 of the response
    uint64_t oldest, newest; // version of the weights that sampled or scored any token; 0: none was
};
void sample_request_release(struct request *r);      // what it holds beside the request itself
void sample_request_clear(struct sample_request *r); // what came back: it can be sent again

struct sample_limits {
    int vocab, max_context; // of the server
};
// Reads asample's body. What it holds is the caller's to release, on failure too.
enum status sample_request_parse(const json_t *body, const struct sample_limits *limits,
                                 struct sample_request *ret);
// A line of /v1/rollouts that is the i-th sample, which has not come yet.
enum status sample_request_read(struct sample_request *r, int i, const json_t *line);

#endif
