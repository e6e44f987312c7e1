/* body_work.c: one job of the thread pool a large body. The job owns the body; all but run_job() is
 * the loop's thread. Nothing is ever cancelled: the server waits for its jobs before it ends. */
#include "infer-server/http/body_work.h"

#include <stdlib.h>

// Bodies up to here take less time than the wake-up of another thread.
#define LOOP_BYTES (64 << 10)

struct job {
    uv_work_t work;
    struct body_work todo;
    struct http_body *body;
};

static void run_job(uv_work_t *work)
{
    struct job *j = work->data;
    size_t len;
    const char *text = http_body_text(j->body, &len);
    j->todo.run(j->todo.context, text, len);
}

static void after_job(uv_work_t *work, int status)
{
    struct job *j = work->data;
    (void)status;
    http_body_free(j->body);
    j->todo.done(j->todo.context);
    free(j);
}

enum status body_work_start(uv_loop_t *loop, struct http_request *q, const struct body_work *work)
{
    size_t len;
    const char *text = http_request_body(q, &len);
    if (len <= LOOP_BYTES) {
        work->run(work->context, text, len);
        work->done(work->context);
        return ST_OK;
    }
    struct job *j = calloc(1, sizeof *j);
    if (j) j->body = http_take_body(q);
    if (!j || !j->body) {
        free(j);
        return status_fail(ST_NO_MEMORY, "out of memory");
    }
    j->todo = *work;
    j->work.data = j;
    int e = uv_queue_work(loop, &j->work, run_job, after_job);
    if (e == 0) return ST_OK;
    http_body_free(j->body);
    free(j);
    return status_fail(ST_IO, "cannot start a job: %s", uv_strerror(e));
}
