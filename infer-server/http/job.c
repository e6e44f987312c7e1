/* job.c: see job.h. */
#include "infer-server/http/job.h"
#include <stdlib.h>

static void on_close(void *attached, bool answered)
{
    (void)answered;
    ((struct job *)attached)->request = NULL;
}

struct job *job_new(struct server *s, struct http_request *q)
{
    struct job *j = calloc(1, sizeof *j);
    if (!j) {
        http_fail(q, 500, "out of memory");
        return NULL;
    }
    j->server = s;
    j->request = q;
    s->work++;
    http_attach(q, j, on_close);
    return j;
}

void job_free(struct job *j)
{
    j->server->work--;
    if (j->request) http_attach(j->request, NULL, NULL);
    free(j->checksums);
    free(j);
}

// A job that failed; its status and sentence came from another thread.
void job_reply_failure(struct job *j)
{
    const enum status st = status_recall(&j->status);
    if (j->request && st == ST_BUSY) // a trainer holds the lease
        http_fail(j->request, 409, "%s", status_message());
    else if (j->request)
        http_fail_status(j->request, st);
    job_free(j);
}

void job_done(void *job, enum status st, const char *sentence, uint64_t version)
{
    struct job *j = job;
    if (st != ST_OK) status_fail(st, "%s", sentence ? sentence : "");
    status_keep(&j->status, st);
    j->version = version;
    inbox_post(j->server->host.inbox, &j->message);
}
