/* request.h: a request of the Tinker API through its life. Its id is made of who it is of (a model
 * or a sampling session) and the client's own number, so that the same request, sent again, is
 * known; by its id its client asks for the response (the API's "future": retrieve_future, held
 * until the response is there or REQUEST_HOLD_MS have passed). The main thread, or the
 * one that samples, performs it, and hands it back to the loop. Responses stay for REQUEST_KEEP_MS,
 * and once they were fetched for REQUEST_FETCHED_MS, for clients whose connection broke.
 *
 * Loop's thread, but for what says otherwise. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SERVE_REQUEST_H
#define TRAINER_SERVE_REQUEST_H

#include "common/http/http.h"
#include "common/text/tokenizer.h"
#include "trainer/rollout/completion.h"
#include "trainer/serve/trained_model.h"

#define REQUEST_HOLD_MS    30000
#define REQUEST_KEEP_MS    600000
#define REQUEST_FETCHED_MS 60000
#define REQUEST_ID_ROOM    256

struct call;
struct tinker;

// What the ids of clients name. A client is its session; requests are of its training runs and of
// its sampling sessions.
enum owner_kind { SESSION, TRAINING_RUN, SAMPLER };
struct owner {
    struct owner *next;
    struct tinker *tinker;
    enum owner_kind kind;
    struct owner *session;           // itself, of a session
    char id[ID_ROOM], base[ID_ROOM]; // as clients call it, and the base model
    bool forgotten;                  // nobody asks for it any more: it goes with its last request
    int n;          // requests of it that are there, and questions for those that are held
    int64_t cursor; // of the last that ended
    struct tinker_request *first, **last; // that have ended
    // of a session
    int64_t heard_ns;
    bool ended;
    // of a training run, whose id is its name on disk
    int rank;                    // of its adapter; 0: it trains the model itself
    bool over;                   // another run took its weights, or its client has finished
    int64_t next_seq;            // that may go to the main thread; 0: its beginning
    struct tinker_request *held; // those behind a gap, by number
    int64_t held_ns;             // since when there are any
    int64_t missed; // number that did not come, so that what is behind it fails; 0: none
    int n_requests; // with the main thread, or held
    // of a sampling session
    struct snapshot snapshot;
};

struct tinker_request {           // embed it first in a struct of its kind
    struct inbox_message message; // its way back; deliver() runs on the loop's thread
    struct tinker_request *next;  // in the list or queue that it waits in
    struct owner *owner;
    int64_t seq_id;
    json_t *promise; // what is answered at once, each time it is sent
    // The main thread calls it, unless the request has failed before.
    enum status (*perform)(struct trained_model *m, struct tinker_request *r);
    const char *group; // it is performed behind the last that waits with the same; NULL: in turn
    void (*release)(struct tinker_request *r); // frees what it holds beside this; called at its end
    // the response
    enum status status;    // what it came to
    struct bytes response; // of a failure: the error
    bool is_protobuf;      // else JSON
    bool ended;
    int64_t keep_until_ns;
    int64_t cursor;                    // among its owner's that have ended, from 1
    struct tinker_request *next_ended; // of the same owner, by cursor
};

enum status requests_init(struct tinker *t);
void requests_free(struct tinker *t); // and their owners
// The first owner of that kind, or the one behind `after`; NULL at the end.
struct owner *owner_next(const struct tinker *t, enum owner_kind kind, const struct owner *after);
struct owner *owner_find(const struct tinker *t, enum owner_kind kind, const char *id); // or NULL
// session NULL: of a session, its own.
enum status owner_add(struct tinker *t, enum owner_kind kind, struct owner *session, const char *id,
                      struct owner **ret);
void session_forget(struct owner *session); // and all that is of it
// A new one, of a struct of so many bytes that are 0; ST_BUSY where too many are there.
enum status requests_add(struct owner *o, size_t size, int64_t seq_id, struct tinker_request **ret);
// The same of one that was asked for. NULL: it was answered, with the promise that it has already
// or with 410.
enum status requests_take(struct owner *o, struct http_request *q, size_t size, int64_t seq_id,
                          struct tinker_request **ret);
// The one of that id; NULL: there is none, or not any more.
struct tinker_request *requests_find(const struct tinker *t, const char *id);
void request_drop(struct tinker_request *r); // forgets it: nobody asks for its response any more

// Answers with what the request is known by. `more`: further fields, taken; or NULL.
void request_promise(struct tinker_request *r, struct http_request *q, json_t *more);
// Sets the response: JSON, whose reference it takes, or the last error's sentence, which is the
// client's fault or not. Any thread that has the request.
enum status request_set_json(struct tinker_request *r, json_t *response);
void request_fail(struct tinker_request *r, enum status st);
// The response is there: answers who waits, and releases what the request holds.
void request_end(struct tinker_request *r);

// Endpoints: answer with a request's response, or with which of a sampling session's requests, of a
// clone of its client, have ended behind a cursor; or hold the question until there is something.
enum status requests_retrieve(const struct call *c);
enum status requests_retrieve_ended(const struct call *c);
// Ends what was held for long enough, and forgets what ended long ago. About every second.
void requests_sweep(struct tinker *t);

// A queue holds what one thread asks of another, in order, but what belongs together (`group`)
// stays together. What may lie in it is bounded by how many requests there are.
struct request_queue {
    pthread_mutex_t lock;
    pthread_cond_t some;
    struct tinker_request *first, **last;
};
void request_queue_init(struct request_queue *queue);
void request_queue_append(struct request_queue *queue, struct tinker_request *r);
// The next one, or NULL after `ms`.
struct tinker_request *request_queue_next(struct request_queue *queue, int ms);

// ---- requests of samples (sample_request.c; any thread) -----------------------------------------
// Read from the API's JSON and filled from the lines that the server responds with.

#define SAMPLE_NO_LOGPROB -99999.0f // where a token has none

struct sample_request {
    struct tinker_request request;
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
    _Atomic bool cancelled;          // by its client: it ends wherever it is
    // came back
    struct completion *samples; // (n); text NULL: not there yet
    int n_done, cached_tokens;
    struct bytes scores;     // of the prompt: fields 2 and 3 of the response
    uint64_t oldest, newest; // version of the weights that sampled or scored any token; 0: none was
};
void sample_request_release(struct tinker_request *r); // what it holds beside the request itself
void sample_request_clear(struct sample_request *r);   // what came back: it can be sent again

// Reads asample's body. What it holds is the caller's to release, on failure too.
enum status sample_request_parse(const json_t *body, const struct trained_model_info *model,
                                 struct sample_request *ret);
// A line of /v1/rollouts that is the i-th sample, which has not come yet.
enum status sample_request_read(struct sample_request *r, int i, const json_t *line);

#endif
