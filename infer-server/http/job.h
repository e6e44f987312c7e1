/* job.h: what a request waits for on another thread: its body, where that is large (megabytes of
 * JSON and text take seconds, in which the loop has others to serve) or a chat template is rendered
 * (a program of somebody else's, which may take as long), a pause, a command of the engine. The
 * request may go meanwhile; the job then ends with nobody to answer. Loop's thread, but for run()
 * and job_post(). */
#ifndef INFER_SERVER_JOB_H
#define INFER_SERVER_JOB_H

#include "infer-server/http/server_impl.h"

struct job { // embed it first in a struct of the endpoint's own
    struct inbox_message message;
    struct server *server;
    struct http_request *request; // NULL once it is gone
    struct http_body body;        // the request's
    struct status_kept status;    // what it came to
    // Any thread. Owns the job meanwhile, and reads beside it only what nobody changes as long as
    // the server lives (the tokenizer, the chat template): neither request nor server.
    enum status (*run)(struct job *job);
    void (*done)(struct job *job); // answers the request, where it is there yet, and frees the job
    uv_work_t work;
    bool parsing; // in the pool, counted in the server's `parsing`
};

// `size` bytes, all else zero; its done() is called exactly once, unless it is freed before it
// begins. NULL: the request was answered with a failure.
void *job_new(struct server *s, struct http_request *q, size_t size, void (*done)(struct job *job));
void job_free(struct job *j); // that never began; the request is there yet

// Calls run(), at once where the body is small and nothing is rendered, else in libuv's thread
// pool, first come, first served. As many wait there as the engine takes samples, --max-batch +
// --max-queue: ST_BUSY beyond. Not run where the client leaves before its turn.
void job_parse(struct job *j, bool renders, enum status (*run)(struct job *job));
void job_block(struct job *j, enum status (*run)(struct job *job)); // in the pool: it may wait
// From any thread, instead of run(): the job came to job->status.
void job_post(struct job *j);
// Tells the client what it failed of. field, what: that name a folder, in the request and in the
// log, whose files do not parse: they may be any that this process can read, which a client of the
// socket or the key need not be able to, so that their bytes, which the sentence quotes, go to the
// log only. NULL: it quotes none.
void job_fail(const struct job *j, const char *field, const char *what);

#endif
