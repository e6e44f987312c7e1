/* tinker.h: the Tinker API over HTTP: the thread of the libuv loop, and what its files share. The
 * main thread starts it, performs its requests (request.h), and ends it; everything else here is
 * the loop's thread's. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SERVE_TINKER_H
#define TRAINER_SERVE_TINKER_H

#include "common/base/json.h"
#include "common/http/listen.h"
#include "trainer/serve/request.h"
#include "trainer/serve/trained_model.h"

struct tinker_options {       // all borrowed
    struct http_options http; // but for its routes and context
    int tcp_fd;               // listening; taken over
    const char *model_names;  // further ones, "NAME" or "NAME=http://...", with commas; or NULL
    int inflight;             // 1: stale snapshots are served by the live weights
    double gap_timeout, session_timeout; // seconds
};
struct tinker;

// model: for what it is (its info), which does not change; not used otherwise.
enum status tinker_start(const struct tinker_options *options, struct trained_model *model,
                         struct tinker **ret);
// Main thread: performs the next request, if one comes within `ms`. why, not NULL: it fails with
// this sentence, borrowed, as all do from here on.
void tinker_perform(struct tinker *t, struct trained_model *model, int ms, const char *why);
// Ends the loop, its thread and all connections; what it still had asked for is freed.
void tinker_stop(struct tinker *t); // NULL is fine

// ---- of the loop's thread -----------------------------------------------------------------------

#define MAX_ENDPOINTS 40
#define MAX_NAMES     32

struct model_name { // by which clients ask for a model
    const char *name;
    const char *address; // of a server elsewhere, which samples it; NULL: it is the one served here
    int max_context;     // tokens
};

struct tinker {
    const struct tinker_options *options;
    const struct trained_model_info *model;
    struct model_name names[MAX_NAMES]; // (n_names) [0]: the last component of its folder
    int n_names;
    char *name_list; // --model-names, cut up
    uv_loop_t loop;
    uv_timer_t tick;
    struct inbox inbox;
    struct inbox_message end; // of the main thread, once
    bool ended;
    pthread_t thread;
    struct http *http;
    struct http_route routes[MAX_ENDPOINTS + 1];
    const struct endpoint *endpoints[MAX_ENDPOINTS]; // of each route
    struct request_queue queue;                      // the main thread's
    struct http_client *server;                      // that samples
    struct flight *flights;                          // requests to it
    char process[18];       // begins the ids of all requests of this process
    json_t *requests;       // addresses, by id
    struct owner *owners;   // of requests
    struct waiter *waiters; // for responses
    json_t *damaged;        // runs on disk that were warned of
    int n_sessions;
    bool ttl_warned;
    struct signing_key signing; // of URLs
    const char *_Atomic why;    // everything fails; NULL: it does not
};

struct call { // of an endpoint: what was asked for, by the fields' names (tinker.c's table)
    struct tinker *tinker;
    struct http_request *q;
    int which;          // the endpoint's
    const json_t *body; // NULL: none was read
    enum status
        status; // of a training run's numbered request, which has its turn though it is wrong
    const char *session_id, *model_id, *sampling_session_id, *request_id, *sdk_version, *base_model,
        *path, *model_path, *tinker_path, *kind;
    int64_t seq_id, model_number, sampler_number, prev_cursor; // -1: absent
    double timeout;
    bool with_optimizer, overwrite;
    const json_t *target, *lora, *optimizer, *ttl_seconds, *recipients;
};
struct endpoint {
    const char *method, *path;
    // A failure is answered by its status; a handler may have answered by itself.
    enum status (*handle)(const struct call *c);
    const char *needs; // fields that must be there, of a JSON body; NULL: none is read
    enum http_access access;
    int which; // of the requests that the handler serves
};
// endpoints_*.c have a table each, which ends with path NULL.
extern const struct endpoint training_endpoints[], sampling_endpoints[], run_endpoints[];

enum status tinker_reply(const struct call *c, json_t *response); // takes the reference; ST_OK
// ST_NOT_FOUND where there is none. Its client is heard of now, but not by a sampling session,
// which others may look at.
enum status tinker_find(struct tinker *t, enum owner_kind kind, const char *id, struct owner **ret);
// Makes the sampling session, or makes it anew.
enum status tinker_new_sampler(struct owner *session, const char *id, const char *base,
                               const struct snapshot *which, struct owner **ret);
// A run of a living client, but for this session's (NULL: none's), beside which none of that rank
// goes; or NULL.
const struct owner *tinker_excluding(const struct tinker *t, const struct owner *but, int rank);
enum status tinker_takes_work(const struct tinker *t);
// ST_INVALID where no model is called so; trains: or where another server has it. ret may be NULL.
enum status tinker_find_model(const struct tinker *t, const char *base_model, bool trains,
                              const struct model_name **ret);
void tinker_warn_ttl(struct tinker *t, const char *what); // once: time limits have no effect

// ---- samples (endpoints_sampling.c) -------------------------------------------------------------

// Sends what waits, and takes what arrives until libuv has something, for at most `ms`.
void tinker_poll_samples(struct tinker *t, int ms);
void tinker_end_cancelled(struct tinker *t); // every TICK_MS
void tinker_end_samples(struct tinker *t);   // what is under way comes back cancelled

// ---- training runs (endpoints_training.c) -------------------------------------------------------

// The run's client has finished, and its adapter makes room.
void tinker_end_run(struct owner *run);
void training_requests_sweep(struct tinker *t); // fails what was behind a gap for too long
// Before a request goes to the main thread: whose clients are gone leave it their places.
void tinker_note_gone(const struct tinker *t);

#endif
