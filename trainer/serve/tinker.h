/* tinker.h: the Tinker API over HTTP: the thread of the libuv loop, and what its files share. The
 * main thread starts it, takes work from its queue (work.h), and ends it; everything else here is
 * the loop's thread's. */
#ifndef TRAINER_SERVE_TINKER_H
#define TRAINER_SERVE_TINKER_H

#include "common/http/http.h"
#include "trainer/serve/future.h"
#include "trainer/serve/runs.h"
#include "trainer/serve/sampling.h"
#include "trainer/serve/signed_path.h"
#include "trainer/serve/work.h"

struct tinker_options {       // all borrowed
    struct http_options http; // but for its routes and context
    int tcp_fd;               // listening; taken over
    const char *runs;         // absolute folder of training runs
    const char *model_names;  // by which clients may ask for the model too, with commas; or NULL
    int inflight;             // 1: stale snapshots are served by the live weights
    double sample_timeout;    // seconds
    double gap_timeout, session_timeout; // likewise
    int max_context;                     // of the server
};
struct tinker;

// policy: for what it is (its control page, its model), which does not change; not used otherwise.
enum status tinker_start(const struct tinker_options *options, struct policy *policy,
                         struct tinker **ret);
struct work *tinker_take(struct tinker *t, int ms);      // main thread: the next work, or NULL
void tinker_return(struct tinker *t, struct work *work); // done
// From here on whatever is asked for fails with this sentence, borrowed.
void tinker_give_up(struct tinker *t, const char *why);
// Ends the loop, its thread and all connections; what it still had asked for is freed.
void tinker_stop(struct tinker *t); // NULL is fine

// ---- of the loop's thread -----------------------------------------------------------------------

#define ID_ROOM 200
#define TINKER_FORGOTTEN                                                                           \
    "cw-trainer serve was started anew since, or did not hear of its client for --session-timeout"

struct session { // a client
    struct session *next;
    char id[ID_ROOM];
    int64_t heard_ns;
    bool ended;
};

struct training_run { // a training run of this process
    struct training_run *next;
    char id[ID_ROOM]; // the run's name
    struct session *session;
    char base[ID_ROOM]; // as the client calls the base model
    int rank;           // of its adapter; 0: it trains the model itself
    bool over;          // another run took its place
    int64_t next_seq;   // that may go to the main thread; 0: its making
    struct op *held;    // those behind a gap, by number
    int64_t held_ns;    // since when there are any
    int64_t missed;     // number that did not come, so that what is behind it fails; 0: none
    int n_ops;          // with the main thread, or held
};

struct sampler { // a sampling session
    struct sampler *next;
    char id[ID_ROOM], base[ID_ROOM];
    struct session *session;
    struct snapshot of;
    int64_t saves; // of its path by then: what is saved there later is something else
    bool inflight; // it follows the live weights
};

struct op { // a request that the main thread works on (op.c)
    struct work work;
    struct op *next; // held
    struct tinker *tinker;
    struct future *future;
    struct training_run *model;
    int64_t seq_id;
    void (*done)(struct op *op); // loop: ends the future, where it came to something
    // what it is about
    struct forward_backward request;
    struct bytes answer;
    double lr, norm;
    struct optimizer_config adamw;
    struct run_path path;
    bool named, with_optimizer, inflight; // path is there...
    char sampler[ID_ROOM];                // that is made of it; "": none
    struct beginning beginning;           // of a run, but for its folder
    json_t *description;                  // likewise
    struct snapshot snapshot;             // of the weights, afterwards
};

struct tinker {
    const struct tinker_options *options;
    const char *model_folder, *model_name; // the latter: its last part
    const char *socket;                    // the server's
    struct control *control;
    struct datum_limits limits;
    uv_loop_t loop;
    uv_timer_t tick;
    struct inbox inbox;
    struct inbox_message end; // of the main thread, once
    pthread_t thread;
    struct http *http;
    struct work_queue *works;
    struct sampling *sampling;
    struct sources *sources;
    int max_adapters; // of the server
    struct futures *futures;
    struct poll *polls; // of retrieve_futures, held
    struct session *sessions;
    struct training_run *training_runs;
    struct sampler *samplers;
    json_t *live; // of each path that was saved or loaded, by this process: run, version, and saves
    json_t *damaged; // runs on disk that were warned of
    int n_sessions;
    bool ttl_told;
    struct signing_key signing; // of URLs
    const char *_Atomic why;    // everything fails; NULL: it does not
};

// Requests of JSON: the body (json_decref), or NULL where the request was answered with why not.
json_t *tinker_body(struct http_request *q);
// Reads a text field that must be there; NULL: likewise.
const char *tinker_text(struct http_request *q, const json_t *body, const char *key);
// A number from `min` on, that must be there; -1: likewise.
int64_t tinker_number(struct http_request *q, const json_t *body, const char *key, int64_t min);
// The session, heard of now; NULL: answered.
struct session *tinker_session(struct tinker *t, struct http_request *q, const json_t *body);
struct training_run *tinker_find_run(struct tinker *t, const char *id); // NULL: there is none
// One of a living client, but for this session (or NULL), beside which none of that rank goes.
const struct training_run *tinker_excluding(const struct tinker *t, const struct session *but,
                                            int rank);
// The same, heard of now; NULL: answered.
struct training_run *tinker_training_run(struct tinker *t, struct http_request *q, const char *id);
bool tinker_takes_work(struct tinker *t, struct http_request *q);
// Whether this is the served model; else answered.
bool tinker_serves(struct tinker *t, struct http_request *q, const char *base_model);
struct sampler *tinker_sampler(struct tinker *t, const char *id); // NULL: there is none
struct sampler *tinker_new_sampler(struct tinker *t, struct session *session, const char *id,
                                   const char *base, const struct snapshot *of);
void tinker_sessions_sweep(struct tinker *t);      // forgets clients that are gone for good
void tinker_ttl(struct tinker *t, const char *of); // says, once, that time limits have no effect
// endpoints_downloads.c: answers with the URLs of a checkpoint's files, or the one of them all.
enum status tinker_reply_urls(struct tinker *t, struct http_request *q,
                              const struct run_path *path);
enum status tinker_reply_archive(struct tinker *t, struct http_request *q,
                                 const struct run_path *path);
void tinker_polls_sweep(struct tinker *t); // answers those that have something, or are over

// op.c: requests in their order. run() is called on the main thread, done() on the loop's, where it
// came to something. NULL: the request is answered, with the future that it has already or with
// what is wrong. A NULL run, or a number below 0, was answered by who looked for it.
struct op *op_new(struct tinker *t, struct http_request *q, struct training_run *m, int64_t seq_id,
                  enum status (*run)(struct policy *, struct work *), void (*done)(struct op *));
// The same, of the run and the number that the body names.
struct op *op_of(struct tinker *t, struct http_request *q, const json_t *body,
                 enum status (*run)(struct policy *, struct work *), void (*done)(struct op *));
// A request that is wrong (not ST_OK) is one that came: it has its turn, and a future that says so.
void op_refuse(struct op *op, enum status st);
void op_submit(struct op *op, struct http_request *q); // takes it over
// The live weights are those of its path, where they were just saved or which was loaded.
void op_note_live(struct op *op, bool saved);
void op_free_held(struct training_run *m);
void op_sweep(struct tinker *t); // fails what was behind a gap for too long

// Endpoints: the context is the struct tinker.
void handle_config(void *tinker, struct http_request *q);
void handle_dynamic_config(void *tinker, struct http_request *q);
void handle_create_session(void *tinker, struct http_request *q);
void handle_heartbeat(void *tinker, struct http_request *q);
void handle_finish(void *tinker, struct http_request *q);
void handle_capabilities(void *tinker, struct http_request *q);
void handle_healthz(void *tinker, struct http_request *q);
void handle_telemetry(void *tinker, struct http_request *q);

void handle_create_model(void *tinker, struct http_request *q);
void handle_get_info(void *tinker, struct http_request *q);
void handle_forward_backward(void *tinker, struct http_request *q);
void handle_optim_step(void *tinker, struct http_request *q);
void handle_save_weights(void *tinker, struct http_request *q);
void handle_save_for_sampler(void *tinker, struct http_request *q);
void handle_save_external(void *tinker, struct http_request *q);
void handle_load_weights(void *tinker, struct http_request *q);

void handle_create_sampler(void *tinker, struct http_request *q);
void handle_sampler(void *tinker, struct http_request *q);
void handle_asample(void *tinker, struct http_request *q);
void handle_retrieve(void *tinker, struct http_request *q);
void handle_retrieve_all(void *tinker, struct http_request *q);

void handle_training_runs(void *tinker, struct http_request *q);
void handle_training_run(void *tinker, struct http_request *q);
void handle_remove_checkpoint(void *tinker, struct http_request *q);
void handle_set_ttl(void *tinker, struct http_request *q);
void handle_download(void *tinker, struct http_request *q);
void handle_checkpoints(void *tinker, struct http_request *q);
void handle_weights_info(void *tinker, struct http_request *q);

#endif
