/* pending.c: whether the server takes requests now, and what of them is done on other threads. What
 * has begun is never cancelled: a template's steps are bounded (common/text/jinja), and the server
 * waits for its pending responses before it ends. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"

#include <stdlib.h>
#include <string.h>

// Bodies up to here take less time than the wake-up of another thread.
#define LOOP_BYTES (64 << 10)

// The context is the engine's to find, from what memory there is; until then nothing can be checked
// against it.
bool server_knows_context(struct server *s)
{
    struct engine_info info;
    if (s->model.max_context > 0) return true;
    engine_info(s->engine, &info);
    s->model.max_context = info.max_context;
    histogram_bounds_tokens(info.max_context, &s->metrics.tokens);
    return info.max_context > 0;
}

const char *server_state(struct server *s, struct engine_stats *stats, const char **ret_detail)
{
    const bool known = server_knows_context(s);
    engine_stats(s->engine, stats);
    *ret_detail = stats->state_detail;
    if (stats->state == ENGINE_FAILED) return "failed";
    if (s->draining || stats->state == ENGINE_DRAINING) {
        *ret_detail = "the server is stopping";
        return "draining";
    }
    if (stats->state == ENGINE_TORN) return "torn";
    if (stats->state == ENGINE_LOADING || !known) {
        *ret_detail = "the model is being loaded";
        return "loading";
    }
    return "ok";
}

bool server_is_open(struct server *s, struct http_request *q)
{
    struct engine_stats stats;
    const char *detail, *state = server_state(s, &stats, &detail);
    if (strcmp(state, "ok") == 0) return true;
    http_fail(q, 503, "%s: %s; try again later", state, detail);
    return false;
}

static void on_close(void *attached, bool answered)
{
    struct pending *j = attached;
    (void)answered;
    j->request = NULL;
    if (j->parsing) uv_cancel((uv_req_t *)&j->work); // which does nothing once it runs
}

static void leave(struct pending *j)
{
    j->server->work--;
    j->server->parsing -= j->parsing;
    if (j->request) http_attach(j->request, NULL, NULL);
    http_body_release(&j->body);
}

void pending_free(struct pending *j)
{
    leave(j);
    free(j);
}

static void end(struct pending *j)
{
    leave(j);
    j->done(j);
}

static void deliver(struct inbox_message *message)
{
    end((struct pending *)message);
}

void *pending_new(struct server *s, struct http_request *q, size_t size,
                  void (*done)(struct pending *pending))
{
    struct pending *j = calloc(1, size);
    if (!j) {
        http_fail(q, 500, "out of memory");
        return NULL;
    }
    j->message.deliver = deliver;
    j->server = s;
    j->request = q;
    j->done = done;
    http_take_body(q, &j->body);
    http_attach(q, j, on_close);
    s->work++;
    return j;
}

static void run(uv_work_t *work)
{
    struct pending *j = work->data;
    status_keep(&j->status, j->run(j));
}

static void after(uv_work_t *work, int status)
{
    (void)status;
    end(work->data);
}

void pending_block(struct pending *j, enum status (*run_pending)(struct pending *pending))
{
    j->run = run_pending;
    j->work.data = j;
    int e = uv_queue_work(&j->server->loop, &j->work, run, after);
    if (e == 0) return;
    status_keep(&j->status,
                status_fail(ST_IO, "cannot start a thread for the request: %s", uv_strerror(e)));
    end(j);
}

void pending_parse(struct pending *j, bool renders,
                   enum status (*run_pending)(struct pending *pending))
{
    const struct engine_options *o = &j->server->options->engine;
    const int max = o->max_batch + o->max_queue;
    if (renders || j->body.bytes.len > LOOP_BYTES) {
        if (j->server->parsing < max) {
            j->parsing = true;
            j->server->parsing++;
            pending_block(j, run_pending);
            return;
        }
        status_keep(&j->status, status_fail(ST_BUSY,
                                            "%d requests are waiting to be read, as many as are "
                                            "taken; try again later",
                                            max));
    } else {
        status_keep(&j->status, run_pending(j));
    }
    end(j);
}

void pending_post(struct pending *j)
{
    inbox_post(&j->server->host.inbox, &j->message);
}
