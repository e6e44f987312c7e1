/* serve.c: four things over HTTP, on one thread: the page, what is new of a run, a step's samples
 * as they lie in their file, and whether this lives.
 *
 * Nothing is done unasked: a page asks every few seconds what is new, and the run's folder is then
 * read on from where it was read before. Reading samples, which may take seconds at first, has a
 * small share of each answer, so that the page is there at once; it asks again while it is told
 * that there is more. Pages of other sites get no answer (common/http/http_route.c). */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/http/http.h"
#include "common/http/listen.h"
#include "tools/report/report.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SAMPLES_MS   100
#define ROLLOUTS_MAX ((size_t)1 << 30) // bytes of a step's file

struct report_server {
    uv_loop_t loop;
    uv_signal_t signals[2];
    struct http *http;
    struct run_folder *runs;
    int n, shown;
};

// ---- endpoints ----------------------------------------------------------------------------------

// A number of the query, 0 to max; `otherwise` where it is not given. ST_INVALID names it.
static enum status query_int(const struct http_request *q, const char *name, int64_t max,
                             int64_t otherwise, int64_t *ret)
{
    const char *text = http_query(q, name);
    char *end;
    if (!text) {
        *ret = otherwise;
        return ST_OK;
    }
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || value < 0 || value > max)
        return status_fail(ST_INVALID, "\"%s\" is '%s', not a whole number from 0 to %lld", name,
                           CUT(text, 40), (long long)max);
    *ret = value;
    return ST_OK;
}

static enum status query_run(const struct report_server *s, const struct http_request *q,
                             int64_t *ret)
{
    return query_int(q, "run", s->n - 1, 0, ret);
}

static enum status page_of(struct report_server *s, const struct http_request *q, struct bytes *to)
{
    (void)q;
    return page_put_live(s->n, s->shown, to);
}

// run=N&generation=G&lines=L&samples=S&prompts=P&reports=R: report.h
static enum status data_of(struct report_server *s, const struct http_request *q, struct bytes *to)
{
    enum status st;
    struct run_cursor has;
    int64_t run = 0;
    CHECK(query_run(s, q, &run));
    CHECK(query_int(q, "generation", INT32_MAX, 0, &has.generation));
    CHECK(query_int(q, "lines", INT32_MAX, 0, &has.lines));
    CHECK(query_int(q, "samples", INT64_MAX, 0, &has.samples));
    CHECK(query_int(q, "prompts", INT64_MAX, 0, &has.prompts));
    CHECK(query_int(q, "reports", INT32_MAX, 0, &has.reports));
    CHECK(run_folder_refresh(&s->runs[run], SAMPLES_MS));
    st = run_data_put(&s->runs[run], &has, to);
out:
    return st;
}

// run=N&step=S&held_out=0|1
static enum status rollouts_of(struct report_server *s, const struct http_request *q,
                               struct bytes *to)
{
    enum status st;
    int64_t run = 0, step = 0, held_out = 0;
    char path[PATH_ROOM];
    CHECK(query_run(s, q, &run));
    CHECK(query_int(q, "step", INT32_MAX, 0, &step));
    CHECK(query_int(q, "held_out", 1, 0, &held_out));
    CHECK(run_folder_rollouts(&s->runs[run], step, held_out, path));
    st = file_read(path, ROLLOUTS_MAX, to);
out:
    return st;
}

static const struct {
    enum status (*make)(struct report_server *s, const struct http_request *q, struct bytes *to);
    const char *type;
} answers[] = {{page_of, "text/html; charset=utf-8"},
               {data_of, "application/json"},
               {rollouts_of, "application/x-ndjson"}};

static void handle(void *context, struct http_request *q)
{
    struct bytes body = BYTES_INIT;
    const enum status st = answers[http_which(q)].make(context, q, &body);
    http_header(q, "Cache-Control", "no-cache");
    if (st == ST_OK)
        http_reply(q, 200, answers[http_which(q)].type, &body);
    else
        http_fail_status(q, st);
    bytes_release(&body);
}

static void handle_health(void *context, struct http_request *q)
{
    (void)context;
    http_reply_json(q, 200, json_pack("{s:s}", "status", "ok"));
}

static const struct http_route routes[] = {
    {"GET", "/", handle, HTTP_OPEN, 0},         {"GET", "/data", handle, HTTP_OPEN, 1},
    {"GET", "/rollouts", handle, HTTP_OPEN, 2}, {"GET", "/health", handle_health, HTTP_OPEN, 0},
    {NULL, NULL, NULL, HTTP_OPEN, 0},
};

// ---- the loop -----------------------------------------------------------------------------------

static void on_signal(uv_signal_t *handle, int number)
{
    (void)number;
    uv_stop(handle->loop);
}

static void start_signals(struct report_server *s)
{
    static const int numbers[2] = {SIGINT, SIGTERM};
    signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < 2; i++) {
        uv_signal_init(&s->loop, &s->signals[i]);
        uv_signal_start(&s->signals[i], on_signal, numbers[i]);
    }
}

enum status report_serve(const char *listen, struct run_folder *runs, int n, int shown)
{
    struct report_server s = {.runs = runs, .n = n, .shown = shown};
    // a page that another server's data is in gets all anew
    for (int i = 0; i < n; i++) runs[i].generation = (int)(time(NULL) & 0x3fffffff);
    const struct http_options options = {.routes = routes,
                                         .page = "docs/use/runs.md",
                                         .context = &s,
                                         .max_body = 1 << 10,
                                         .max_buffered = 1 << 20,
                                         .max_connections = 64,
                                         .idle_timeout_s = 60,
                                         .request_timeout_s = 120};
    char host[256];
    int fd = -1, port;
    enum status st = http_loop_init(&s.loop);
    if (st != ST_OK) return st;
    CHECK(tcp_listen("--listen", listen, "an SSH tunnel: cw-report has no API key", host, &fd,
                     &port));
    CHECK(http_new(&s.loop, &options, &s.http));
    CHECK(http_listen(s.http, fd, true));
    start_signals(&s);
    log_info("the report is served at http://%s:%d/ until Ctrl-C",
             strchr(host, ':') ? "[::1]" : host, port);
    uv_run(&s.loop, UV_RUN_DEFAULT);
out:
    http_close(s.http);
    http_loop_close(&s.loop);
    return st;
}
