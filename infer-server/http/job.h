/* job.h: a request that waits for something that runs elsewhere, on the engine's thread or in
 * libuv's pool: it comes back to the loop as a message. The client may have gone by then. Loop's
 * thread but for job_done(). */
#ifndef INFER_SERVER_JOB_H
#define INFER_SERVER_JOB_H

#include "infer-server/http/server_impl.h"

struct job {
    struct inbox_message message; // first; deliver: what is done with the result, on the loop
    struct server *server;
    struct http_request *request; // NULL once it is gone
    uv_work_t work;
    struct status_kept status;
    uint64_t version, canary;
    int n_checksums;
    uint64_t *checksums;
    bool want_checksums;
    char adapter[ADAPTER_NAME_BYTES]; // that is loaded or unloaded
};

struct job *job_new(struct server *s, struct http_request *q); // NULL: the request has its answer
void job_free(struct job *j);
// Replies that it failed, and frees it.
void job_reply_failure(struct job *j);
// For the engine's commands: keeps the result and posts the job to the loop. The engine's thread.
void job_done(void *job, enum status st, const char *sentence, uint64_t version);

#endif
