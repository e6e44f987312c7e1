/* parse.c: one job of the thread pool a body. Who owns what: the job has the body, a copy of the
 * model's facts and the request that comes of them, and nothing else. run() is the pool's thread:
 * it reads the first two and writes the third, and touches neither exchange nor server, which may
 * go meanwhile. All else, and the freeing, is the loop's thread. */
#include "infer-server/http/parse.h"

#include <stdlib.h>

struct job {
    uv_work_t work;
    enum api_kind kind;
    struct api_model model;
    struct http_body *body;
    struct api_request *request;
    enum status status;
    char sentence[2048]; // the pool thread's status_message()
    parse_done done;
    void *context;
};

static void run(uv_work_t *work)
{
    struct job *j = work->data;
    size_t len;
    const char *text = http_body_text(j->body, &len);
    j->status = api_request_parse(j->kind, &j->model, text, len, &j->request);
    if (j->status != ST_OK) snprintf(j->sentence, sizeof j->sentence, "%s", status_message());
}

static void after(uv_work_t *work, int cancelled)
{
    struct job *j = work->data;
    enum status st = j->status;
    if (cancelled != 0)
        st = status_fail(ST_CANCELLED, "the server is stopping");
    else if (st != ST_OK)
        status_fail(st, "%s", j->sentence);
    http_body_free(j->body);
    j->done(j->context, st, j->request);
    free(j);
}

enum status parse_body(uv_loop_t *loop, enum api_kind kind, const struct api_model *model,
                       struct http_body *body, parse_done done, void *context)
{
    struct job *j = calloc(1, sizeof *j);
    if (!j) {
        http_body_free(body);
        return status_fail(ST_NO_MEMORY, "out of memory");
    }
    *j =
        (struct job){.kind = kind, .model = *model, .body = body, .done = done, .context = context};
    j->work.data = j;
    int e = uv_queue_work(loop, &j->work, run, after);
    if (e == 0) return ST_OK;
    http_body_free(body);
    free(j);
    return status_fail(ST_IO, "cannot start a job: %s", uv_strerror(e));
}
