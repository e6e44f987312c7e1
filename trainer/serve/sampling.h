/* sampling.h: samples from the server, by /v1/rollouts on its Unix socket: a thread of its own that
 * sends what was asked for and hands over what came back, thousands at once over few connections.
 *
 * Samples that are drawn alike (temperature, length, stops) and wait at the same time go as one
 * request of many groups. What is refused as a whole is sent again one by one, so that one bad
 * request fails no other. */
#ifndef TRAINER_SERVE_SAMPLING_H
#define TRAINER_SERVE_SAMPLING_H

#include "common/http/inbox.h"
#include <jansson.h>
#include <stdint.h>

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
    char adapter[64];     // that samples; "": the model itself
    json_t *sampling;     // /v1/rollouts' "sampling", without n and seed
    bool prompt_logprobs; // likewise in `sampling`, as prompt_logprobs: top
    int top;              // likeliest tokens of each place of the prompt
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

struct sampling;
// socket: the server's; timeout_s: of a request. inbox: where all requests end.
enum status sampling_new(const char *socket, double timeout_s, struct inbox *inbox,
                         struct sampling **ret);
// Ends the thread; what is under way comes back cancelled. NULL is fine.
void sampling_free(struct sampling *s);
void sampling_put(struct sampling *s, struct sample_request *r); // any thread

#endif
