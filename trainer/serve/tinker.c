/* tinker.c: the thread of the Tinker API's loop: routes, start, tick, stop; and what a client asks
 * for before and beside its work: how it is to talk, its session, what is served here.
 *
 * It parses, numbers, remembers, and asks the server for samples; the main thread performs the
 * other requests, one after the other, and hands its results to this loop's inbox. Stopping has an
 * order: connections close, the main thread takes no more work, sampling ends, what is left comes
 * back and is freed. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/spawn.h"
#include "common/http/http_client.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define TICK_MS  500
#define PROBE_MS 5000 // for a server elsewhere to say that it is there

// ---- what the endpoints share -------------------------------------------------------------------

#define FIELDS_OF struct call
static const struct json_field call_fields[] = {
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
    struct http_body text;
    json_t *body = NULL;
    enum status st;
    if (e->needs) {
        http_take_body(q, &text);
        st = json_parse("request", bytes_text(&text.bytes), text.bytes.len, &body);
        http_body_release(&text);
        if (st != ST_OK) goto out;
        if (!json_is_object(body)) FAIL(ST_INVALID, "request: the body must be a JSON object");
        call.body = body;
        call.status = json_read_fields("request", body, call_fields, e->needs, &call);
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

enum status tinker_find(struct tinker *t, enum owner_kind kind, const char *id, struct owner **ret)
{
    static const char *const called[] = {"session", "model", "sampling session"};
    struct owner *o = owner_find(t, kind, id);
    if (!o)
        return status_fail(ST_NOT_FOUND,
                           "there is no %s \"%s\": cw-trainer serve was started anew since, or did "
                           "not hear of its client for --session-timeout%s",
                           called[kind], CUT(id, 100),
                           kind == TRAINING_RUN ? "; go on from one of its checkpoints" : "");
    if (kind != SAMPLER) o->session->heard_ns = clock_now_ns();
    *ret = o;
    return ST_OK;
}

enum status tinker_takes_work(const struct tinker *t)
{
    const char *why = t->why;
    return why ? status_fail(ST_INVALID, "%s", why) : ST_OK;
}

enum status tinker_find_model(const struct tinker *t, const char *base_model, bool trains,
                              const struct model_name **ret)
{
    const struct model_name *name = NULL;
    if (strcmp(base_model, t->model->folder) == 0 ||
        strcmp(basename(base_model), t->names[0].name) == 0)
        name = &t->names[0];
    for (int i = 1; i < t->n_names; i++)
        if (strcmp(base_model, t->names[i].name) == 0) name = &t->names[i];
    if (!name)
        return status_fail(ST_INVALID,
                           "\"base_model\" is \"%s\", and the server serves %s: ask for "
                           "\"%s\", or say --model-names %s if it is the same, or with "
                           "=http://HOST:PORT behind it if another server samples it",
                           CUT(base_model, 150), t->model->folder, t->names[0].name,
                           CUT(base_model, 150));
    if (trains && name->address)
        return status_fail(ST_INVALID,
                           "\"base_model\" is \"%s\", which %s samples: it is not "
                           "trained here",
                           name->name, name->address);
    if (ret) *ret = name;
    return ST_OK;
}

// ---- sessions -----------------------------------------------------------------------------------

// These responses are the same for all. Results of samples are asked for a session at a time, which
// keeps connections few; bodies are not compressed, as they go nowhere. Telemetry's events are for
// the service's operator; here nobody reads them.
enum { CONFIG, DYNAMIC_CONFIG, TELEMETRY };
static enum status fixed(const struct call *c)
{
    static const char *const texts[] = {
        [CONFIG] = "{\"sample_use_retrieve_futures\": true, \"proto_compress_fwdbwd\": false, "
                   "\"parallel_fwdbwd_chunks\": true, \"custom_loss_server_side\": false, "
                   "\"sample_join_sampling_session\": false}",
        [DYNAMIC_CONFIG] = "{\"refresh_interval_sec\": 300, \"sample_cancel_enabled\": true}",
        [TELEMETRY] = "{\"status\": \"accepted\"}",
    };
    return tinker_reply(c, json_loads(texts[c->which], 0, NULL));
}

static enum status create_session(const struct call *c)
{
    struct tinker *t = c->tinker;
    struct owner *s;
    char id[ID_ROOM];
    snprintf(id, sizeof id, "s%.8s-%d", t->process, ++t->n_sessions);
    enum status st = owner_add(t, SESSION, NULL, id, &s);
    if (st != ST_OK) return st;
    s->heard_ns = clock_now_ns();
    log_info("session %s: SDK %.20s", id, c->sdk_version ? c->sdk_version : "of no version");
    return tinker_reply(c, json_pack("{s:s, s:s}", "session_id", id, "type", "create_session"));
}

static enum status heartbeat(const struct call *c)
{
    struct owner *s;
    enum status st = tinker_find(c->tinker, SESSION, c->session_id, &s);
    return st == ST_OK ? tinker_reply(c, json_pack("{s:s}", "type", "session_heartbeat")) : st;
}

// POST /api/v1/sessions/ID/finish. One that this process does not know has ended with the one that
// knew it: a client that was told so in a sentence is not to end on another. Its adapters make room
// at once; the whole model stays as it was trained until another run begins.
static enum status finish(const struct call *c)
{
    struct tinker *t = c->tinker;
    const char *tail = http_path_tail(c->q), *slash = strchr(tail, '/');
    const size_t n = slash ? (size_t)(slash - tail) : 0;
    char id[ID_ROOM];
    if (n == 0 || n >= sizeof id || strcmp(slash, "/finish") != 0)
        return status_fail(ST_NOT_FOUND, "there is no /api/v1/sessions/%s here", CUT(tail, 150));
    snprintf(id, sizeof id, "%.*s", (int)n, tail);
    struct owner *s = owner_find(t, SESSION, id), *run = NULL;
    if (s) {
        s->ended = true;
        s->heard_ns = clock_now_ns();
        while ((run = owner_next(t, TRAINING_RUN, run)))
            if (run->session == s && run->rank > 0 && !run->over) tinker_end_run(run);
        log_info("session %s: finished", id);
    } else {
        log_info("a session finished that an earlier process had");
    }
    return tinker_reply(c, json_object());
}

// Tells whether a session has a run that is busy, or that another client would miss.
static bool has_runs(const struct owner *s)
{
    for (struct owner *run = NULL; (run = owner_next(s->tinker, TRAINING_RUN, run));)
        if (run->session == s && (run->n_requests > 0 || (!run->over && !s->ended))) return true;
    return false;
}

// Forgets clients that are gone for good.
static void sweep_sessions(struct tinker *t)
{
    const double max_ms = t->options->session_timeout * 1e3;
    for (struct owner *s = owner_next(t, SESSION, NULL), *next; s; s = next) {
        next = owner_next(t, SESSION, s);
        if (clock_ms_since(s->heard_ns) < max_ms || has_runs(s)) continue;
        log_debug("session %s: forgotten", s->id);
        session_forget(s);
    }
}

// Every model by each of its names.
static enum status capabilities(const struct call *c)
{
    const struct tinker *t = c->tinker;
    json_t *models = json_array();
    for (int i = 0; i < t->n_names; i++)
        json_array_append_new(models,
                              json_pack("{s:s, s:i, s:b, s:b}", "model_name", t->names[i].name,
                                        "max_context_length", t->names[i].max_context, "trainable",
                                        !t->names[i].address, "sampleable", 1));
    return tinker_reply(c, json_pack("{s:o}", "supported_models", models));
}

static enum status healthz(const struct call *c)
{
    enum status st = tinker_takes_work(c->tinker);
    return st == ST_OK ? tinker_reply(c, json_pack("{s:s}", "status", "ok")) : st;
}

static const struct endpoint session_endpoints[] = {
    {"POST", "/api/v1/client/config", fixed, NULL, HTTP_NEEDS_KEY, CONFIG},
    {"POST", "/api/v1/client/dynamic_config", fixed, NULL, HTTP_NEEDS_KEY, DYNAMIC_CONFIG},
    {"POST", "/api/v1/create_session", create_session, "", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/session_heartbeat", heartbeat, "session_id", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/sessions/*", finish, NULL, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/get_server_capabilities", capabilities, NULL, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/healthz", healthz, NULL, HTTP_OPEN, 0},
    {"POST", "/api/v1/telemetry", fixed, NULL, HTTP_NEEDS_KEY, TELEMETRY},
    {0},
};

// ---- the loop -----------------------------------------------------------------------------------

static void on_tick(uv_timer_t *timer)
{
    struct tinker *t = timer->data;
    requests_sweep(t);
    tinker_end_cancelled(t);
    training_requests_sweep(t);
    sweep_sessions(t);
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
    struct tinker_request *r;
    http_close(t->http);
    tinker_end_samples(t);
    http_client_free(t->server);
    while ((r = request_queue_next(&t->queue, 0))) {
        request_fail(r, status_fail(ST_CANCELLED, "the Tinker API is stopping"));
        inbox_post(&t->inbox, &r->message);
    }
    inbox_close(&t->inbox);
    http_loop_close(&t->loop);
    requests_free(t);
    json_decref(t->damaged);
    free(t->name_list);
    free(t);
}

static enum status start_http(struct tinker *t)
{
    static const struct endpoint *const tables[] = {session_endpoints, training_endpoints,
                                                    sampling_endpoints, run_endpoints};
    struct http_options options = t->options->http;
    int n = 0;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const struct endpoint *e = tables[i]; e->path; e++, n++) {
            if (n == MAX_ENDPOINTS) return status_fail(ST_INVALID, "MAX_ENDPOINTS is too small");
            t->endpoints[n] = e;
            t->routes[n] = (struct http_route){e->method, e->path, on_request, e->access, n};
        }
    options.routes = t->routes;
    options.page = "docs/use/tinker.md";
    options.context = t;
    enum status st = http_new(&t->loop, &options, &t->http);
    return st == ST_OK ? http_listen(t->http, t->options->tcp_fd, true) : st;
}

// One of --model-names. The server of one that is elsewhere must be there.
static enum status add_name(struct tinker *t, char *entry)
{
    char *address = strchr(entry, '=');
    struct model_name *name = &t->names[t->n_names];
    json_t *models = NULL;
    enum status st = ST_OK;
    if (!*entry) return ST_OK;
    if (t->n_names++ == MAX_NAMES) FAIL(ST_INVALID, "there can be %d names", MAX_NAMES - 1);
    if (address) *address++ = '\0';
    *name = (struct model_name){entry, address, t->model->max_context};
    if (!address) return ST_OK;
    if (strncmp(address, "http://", strlen("http://")) != 0)
        FAIL(ST_INVALID, "%s is no http://HOST:PORT", address);
    const struct http_call call = {.server = address, .path = "/v1/models", .timeout_ms = PROBE_MS};
    CHECK(http_perform_json(t->server, &call, &models));
    st = json_get_int32("its /v1/models", json_array_get(json_object_get(models, "data"), 0),
                        "max_model_len", 1, INT_MAX, &name->max_context);
out:
    json_decref(models);
    return status_context(st, "--model-names %s%s%s", entry, address ? "=" : "",
                          address ? address : "");
}

static enum status add_names(struct tinker *t)
{
    const struct tinker_options *o = t->options;
    char *remaining = t->name_list = strdup(o->model_names ? o->model_names : "");
    enum status st = remaining ? http_client_authorize(t->server, o->http.api_key)
                               : status_fail(ST_NO_MEMORY, "out of memory");
    t->names[t->n_names++] =
        (struct model_name){basename(t->model->folder), NULL, t->model->max_context};
    for (char *entry; st == ST_OK && (entry = strsep(&remaining, ","));) st = add_name(t, entry);
    return st;
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
    t->model = &model->info;
    t->end.deliver = on_end;
    request_queue_init(&t->queue);
    uv_timer_init(&t->loop, &t->tick);
    t->tick.data = t;
    uv_timer_start(&t->tick, on_tick, TICK_MS, TICK_MS);
    if (!(t->damaged = json_object())) FAIL(ST_NO_MEMORY, "out of memory");
    CHECK(signing_key_new(&t->signing));
    CHECK(inbox_init(&t->inbox, &t->loop));
    CHECK(requests_init(t));
    CHECK(start_http(t));
    CHECK(http_client_new(t->model->socket, &t->server));
    CHECK(add_names(t));
    if (thread_start(&t->thread, loop_thread, t) != 0)
        FAIL(ST_IO, "the thread of the Tinker API cannot be started");
    *ret = TAKE_PTR(t);
out:
    if (t) release(t);
    return st;
}

void tinker_perform(struct tinker *t, struct trained_model *model, int ms, const char *why)
{
    t->why = why;
    struct tinker_request *r = request_queue_next(&t->queue, ms);
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
