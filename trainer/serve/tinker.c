/* tinker.c: the thread of the Tinker API's loop: routes, start, tick, stop.
 *
 * It parses, numbers, remembers, and asks the server for samples; the main thread performs the
 * other requests, one after the other, and hands its results to this loop's inbox. Stopping has an
 * order: connections close, the main thread takes no more work, sampling ends, what is left comes
 * back and is freed. */
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/spawn.h"
#include "common/http/http_client.h"

#include <stdlib.h>
#include <string.h>

#define TICK_MS 500

// ---- what the endpoints share -------------------------------------------------------------------

static enum status read_body(struct http_request *q, json_t **ret)
{
    struct http_body body;
    http_take_body(q, &body);
    enum status st = json_parse("request", bytes_text(&body.bytes), body.bytes.len, ret);
    if (st == ST_OK && !json_is_object(*ret))
        st = status_fail(ST_INVALID, "request: the body must be a JSON object");
    http_body_release(&body);
    return st;
}

#define FIELDS_OF struct call
static const struct field call_fields[] = {
    FIELD_TEXT("session_id", session_id),
    FIELD_TEXT("model_id", model_id),
    FIELD_TEXT("sampling_session_id", sampling_session_id),
    FIELD_TEXT("request_id", request_id),
    FIELD_TEXT("sdk_version", sdk_version),
    FIELD_TEXT("base_model", base_model),
    FIELD_TEXT("path", path),
    FIELD_TEXT("model_path", model_path),
    FIELD_TEXT("tinker_path", tinker_path),
    FIELD_TEXT("kind", kind),
    FIELD_INT("seq_id", seq_id, 0, INT64_MAX, -1),
    FIELD_INT("model_seq_id", model_number, 0, INT64_MAX, -1),
    FIELD_INT("sampling_session_seq_id", sampler_number, 0, INT64_MAX, -1),
    FIELD_INT("prev_cursor", prev_cursor, 0, INT64_MAX, 0),
    FIELD_REAL("timeout", timeout, 0, REQUEST_HOLD_MS / 1e3, REQUEST_HOLD_MS / 1e3),
    FIELD_BOOL("optimizer", with_optimizer, false),
    FIELD_BOOL("overwrite", overwrite, true),
    FIELD_JSON("target", target),
    FIELD_JSON("lora_config", lora),
    FIELD_JSON("optimizer_config", optimizer),
    FIELD_JSON("ttl_seconds", ttl_seconds),
    FIELD_JSON("age_encryption_recipients", recipients),
    {0},
};

// All endpoints' handler of HTTP: their own has what was asked for.
static void on_request(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    const struct endpoint *e = t->endpoints[http_which(q)];
    struct call call = {.tinker = t, .q = q, .which = e->which};
    json_t *body = NULL;
    enum status st;
    if (e->needs) {
        CHECK(read_body(q, &body));
        call.body = body;
        call.status = fields_read("request", body, call_fields, e->needs, &call);
        if (!call.model_id || call.seq_id < 1) CHECK(call.status);
    }
    st = e->handle(&call);
out:
    if (st != ST_OK) http_fail_status(q, st);
    json_decref(body);
}

enum status tinker_reply(const struct call *c, json_t *response)
{
    http_reply_json(c->q, 200, response);
    return ST_OK;
}

static enum status add_endpoints(struct tinker *t)
{
    static const struct endpoint *const tables[] = {session_endpoints, training_endpoints,
                                                    sampling_endpoints, run_endpoints};
    int n = 0;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const struct endpoint *e = tables[i]; e->path; e++) {
            if (n == MAX_ENDPOINTS) return status_fail(ST_INVALID, "MAX_ENDPOINTS is too small");
            t->endpoints[n] = e;
            t->routes[n] = (struct http_route){e->method, e->path, on_request, e->access, n};
            n++;
        }
    return ST_OK;
}

enum status tinker_find(struct tinker *t, enum owner_kind kind, const char *id, struct owner **ret)
{
    static const char *const called[] = {"session", "model", "sampling session"};
    struct owner *o = owner_find(t->requests, kind, id);
    if (!o)
        return status_fail(ST_NOT_FOUND, "there is no %s \"%.100s\": " TINKER_FORGOTTEN "%s",
                           called[kind], id,
                           kind == TRAINING_RUN ? "; go on from one of its checkpoints" : "");
    if (kind != SAMPLER) o->session->heard_ns = clock_now_ns();
    *ret = o;
    return ST_OK;
}

enum status tinker_takes_work(struct tinker *t)
{
    const char *why = t->why;
    return why ? status_fail(ST_INVALID, "%s", why) : ST_OK;
}

enum status tinker_new_request(const struct call *c, struct owner *o, size_t size, int64_t seq_id,
                               struct request **ret)
{
    struct request *known = request_known(o, seq_id);
    enum status st = ST_OK;
    *ret = NULL;
    if (known) {
        request_promise(known, c->q, NULL);
    } else if (seq_id < o->next_seq) {
        http_fail(c->q, 410, "request %lld of %s was answered, and is forgotten", (long long)seq_id,
                  o->id);
    } else {
        CHECK(tinker_takes_work(c->tinker));
        st = requests_add(o, size, seq_id, ret);
    }
out:
    return st;
}

static bool is_listed(const char *names, const char *name)
{
    const size_t n = strlen(name);
    for (const char *at = names; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, name, n) == 0 && (at[n] == 0 || at[n] == ',')) return true;
    }
    return false;
}

enum status tinker_serves(struct tinker *t, const char *base_model)
{
    if (strcmp(base_model, t->model->folder) == 0 ||
        strcmp(basename(base_model), t->model_name) == 0 ||
        is_listed(t->options->model_names, base_model))
        return ST_OK;
    return status_fail(ST_INVALID,
                       "\"base_model\" is \"%.150s\", and the server serves %s: ask for \"%s\", or "
                       "say --model-names %.150s if it is the same",
                       base_model, t->model->folder, t->model_name, base_model);
}

// ---- the loop -----------------------------------------------------------------------------------

static void on_tick(uv_timer_t *timer)
{
    struct tinker *t = timer->data;
    requests_sweep(t->requests);
    training_requests_sweep(t);
    tinker_sessions_sweep(t);
}

static void close_handle(uv_handle_t *handle, void *context)
{
    (void)context;
    if (!uv_is_closing(handle)) uv_close(handle, NULL);
}

static void on_end(struct inbox_message *message)
{
    ((struct tinker *)((char *)message - offsetof(struct tinker, end)))->ended = true;
}

// libuv's loop within that of the HTTP client, which waits for both.
static void *loop_thread(void *context)
{
    struct tinker *t = context;
    while (!t->ended) {
        const int ms = uv_backend_timeout(&t->loop); // -1: no timer
        tinker_poll_samples(t, ms >= 0 ? ms : TICK_MS);
        uv_run(&t->loop, UV_RUN_NOWAIT);
    }
    return NULL;
}

// The loop's thread is over, and nobody else has anything of it.
static void release(struct tinker *t)
{
    struct request *r;
    http_close(t->http);
    tinker_end_samples(t);
    http_client_free(t->server);
    while ((r = request_queue_next(&t->queue, 0))) {
        request_fail(r, status_fail(ST_CANCELLED, "the Tinker API is stopping"));
        inbox_post(&t->inbox, &r->message);
    }
    inbox_close(&t->inbox);
    uv_walk(&t->loop, close_handle, NULL);
    while (uv_run(&t->loop, UV_RUN_DEFAULT) != 0) continue;
    uv_loop_close(&t->loop);
    requests_free(t->requests);
    json_decref(t->damaged);
    free(t);
}

static enum status start_http(struct tinker *t)
{
    struct http_options options = t->options->http;
    options.routes = t->routes;
    options.page = "docs/tinker.md";
    options.context = t;
    enum status st = http_new(&t->loop, &options, &t->http);
    return st == ST_OK ? http_listen(t->http, t->options->tcp_fd, true) : st;
}

enum status tinker_start(const struct tinker_options *options, struct trained_model *model,
                         struct tinker **ret)
{
    enum status st;
    struct tinker *t = calloc(1, sizeof *t);
    if (!t) return status_fail(ST_NO_MEMORY, "out of memory");
    st = http_loop_init(&t->loop);
    if (st != ST_OK) {
        free(t);
        return st;
    }
    t->options = options;
    t->model = trained_info(model);
    t->model_name = basename(t->model->folder);
    t->end.deliver = on_end;
    request_queue_init(&t->queue);
    uv_timer_init(&t->loop, &t->tick);
    t->tick.data = t;
    uv_timer_start(&t->tick, on_tick, TICK_MS, TICK_MS);
    if (!(t->damaged = json_object())) FAIL(ST_NO_MEMORY, "out of memory");
    CHECK(add_endpoints(t));
    CHECK(signing_key_new(&t->signing));
    CHECK(inbox_init(&t->inbox, &t->loop));
    CHECK(requests_new(t, &t->requests));
    CHECK(start_http(t));
    CHECK(http_client_new(t->model->socket, &t->server));
    if (thread_start(&t->thread, loop_thread, t) != 0)
        FAIL(ST_IO, "the thread of the Tinker API cannot be started");
    *ret = t;
    t = NULL;
out:
    if (t) release(t);
    return st;
}

void tinker_perform(struct tinker *t, struct trained_model *model, int ms, const char *why)
{
    t->why = why;
    struct request *r = request_queue_next(&t->queue, ms);
    if (!r) return;
    if (r->status == ST_OK) {
        enum status st = why ? status_fail(ST_PEER_GONE, "%s", why) : r->perform(model, r);
        if (st != ST_OK) request_fail(r, st);
    }
    inbox_post(&t->inbox, &r->message);
}

void tinker_stop(struct tinker *t)
{
    if (!t) return;
    inbox_post(&t->inbox, &t->end);
    pthread_join(t->thread, NULL);
    release(t);
}
