/* tinker.c: the thread of the Tinker API's loop: routes, start, tick, stop.
 *
 * It parses, numbers and remembers; the main thread works on the policy, one request after the
 * other, and the sampling thread asks the server for samples. Both hand their results to this
 * loop's inbox. Stopping has an order: connections close, the main thread takes no more work, the
 * sampling thread ends, what is left in the queues comes back and is freed. */
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define TICK_MS 500

static const struct http_route routes[] = {
    {"POST", "/api/v1/client/config", handle_config, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/client/dynamic_config", handle_dynamic_config, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/create_session", handle_create_session, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/session_heartbeat", handle_heartbeat, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/sessions/*", handle_finish, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/get_server_capabilities", handle_capabilities, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/healthz", handle_healthz, HTTP_OPEN, 0},
    {"POST", "/api/v1/telemetry", handle_telemetry, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/create_model", handle_create_model, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/get_info", handle_get_info, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/forward_backward", handle_forward_backward, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/optim_step", handle_optim_step, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/save_weights", handle_save_weights, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/save_weights_for_sampler", handle_save_for_sampler, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/save_weights_external", handle_save_external, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/load_weights", handle_load_weights, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/weights_info", handle_weights_info, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/create_sampling_session", handle_create_sampler, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/samplers/*", handle_sampler, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/asample", handle_asample, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/retrieve_future", handle_retrieve, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/retrieve_futures", handle_retrieve_all, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/training_runs", handle_training_runs, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/training_runs/*", handle_training_run, HTTP_NEEDS_KEY, 0},
    {"DELETE", "/api/v1/training_runs/*", handle_remove_checkpoint, HTTP_NEEDS_KEY, 0},
    {"PUT", "/api/v1/training_runs/*", handle_set_ttl, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/checkpoints", handle_checkpoints, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/files/*", handle_download, HTTP_OPEN, 0}, // whose path is signed
    {NULL, NULL, NULL, HTTP_NEEDS_KEY, 0},
};

// ---- what the endpoints share -------------------------------------------------------------------

json_t *tinker_body(struct http_request *q)
{
    struct http_body body;
    json_t *object = NULL;
    http_take_body(q, &body);
    enum status st = json_parse("request", bytes_text(&body.bytes), body.bytes.len, &object);
    if (st == ST_OK && !json_is_object(object))
        st = status_fail(ST_INVALID, "request: the body must be a JSON object");
    http_body_release(&body);
    if (st == ST_OK) return object;
    http_fail_status(q, st);
    json_decref(object);
    return NULL;
}

const char *tinker_text(struct http_request *q, const json_t *body, const char *key)
{
    const char *text = NULL;
    enum status st = json_get_string("request", body, key, &text);
    if (st == ST_OK && !text) st = status_fail(ST_INVALID, "request: \"%s\" is missing", key);
    if (st != ST_OK) http_fail_status(q, st);
    return st == ST_OK ? text : NULL;
}

int64_t tinker_number(struct http_request *q, const json_t *body, const char *key, int64_t min)
{
    int64_t number = -1;
    enum status st = json_get_int("request", body, key, min, INT64_MAX, &number);
    if (st == ST_OK && number < min)
        st = status_fail(ST_INVALID, "request: \"%s\" is missing", key);
    if (st != ST_OK) http_fail_status(q, st);
    return st == ST_OK ? number : -1;
}

struct session *tinker_session(struct tinker *t, struct http_request *q, const json_t *body)
{
    const char *id = tinker_text(q, body, "session_id");
    if (!id) return NULL;
    for (struct session *s = t->sessions; s; s = s->next) {
        if (strcmp(s->id, id) != 0) continue;
        s->heard_ns = clock_now_ns();
        return s;
    }
    http_fail(q, 404, "there is no session \"%.100s\": " TINKER_FORGOTTEN, id);
    return NULL;
}

struct training_run *tinker_find_run(struct tinker *t, const char *id)
{
    struct training_run *m = t->training_runs;
    while (m && strcmp(m->id, id) != 0) m = m->next;
    return m;
}

struct training_run *tinker_training_run(struct tinker *t, struct http_request *q, const char *id)
{
    struct training_run *m = tinker_find_run(t, id);
    if (m)
        m->session->heard_ns = clock_now_ns();
    else
        http_fail(q, 404,
                  "there is no model \"%.100s\": " TINKER_FORGOTTEN
                  "; go on from one of its checkpoints",
                  id);
    return m;
}

bool tinker_takes_work(struct tinker *t, struct http_request *q)
{
    const char *why = t->why;
    if (why) http_fail(q, 400, "%s", why);
    return !why;
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

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

bool tinker_serves(struct tinker *t, struct http_request *q, const char *base_model)
{
    if (strcmp(base_model, t->model_folder) == 0 ||
        strcmp(last_part(base_model), t->model_name) == 0 ||
        is_listed(t->options->model_names, base_model))
        return true;
    http_fail(q, 400,
              "\"base_model\" is \"%.150s\", and the server serves %s: ask for \"%s\", or say "
              "--model-names %.150s if it is the same",
              base_model, t->model_folder, t->model_name, base_model);
    return false;
}

// ---- the loop -----------------------------------------------------------------------------------

static void on_tick(uv_timer_t *timer)
{
    struct tinker *t = timer->data;
    futures_sweep(t->futures);
    op_sweep(t);
    tinker_sessions_sweep(t);
    tinker_polls_sweep(t);
}

static void close_handle(uv_handle_t *handle, void *context)
{
    (void)context;
    if (!uv_is_closing(handle)) uv_close(handle, NULL);
}

static void on_end(struct inbox_message *message)
{
    uv_stop(&((struct tinker *)((char *)message - offsetof(struct tinker, end)))->loop);
}

static void *run(void *context)
{
    struct tinker *t = context;
    uv_run(&t->loop, UV_RUN_DEFAULT);
    return NULL;
}

static void free_lists(struct tinker *t)
{
    while (t->training_runs) {
        struct training_run *m = t->training_runs;
        t->training_runs = m->next;
        op_free_held(m);
        free(m);
    }
    while (t->sessions) {
        struct session *s = t->sessions;
        t->sessions = s->next;
        free(s);
    }
    while (t->samplers) {
        struct sampler *s = t->samplers;
        t->samplers = s->next;
        free(s);
    }
}

// The loop's thread is over, and nobody else has anything of it.
static void release(struct tinker *t)
{
    struct work *work;
    http_close(t->http);
    sampling_free(t->sampling);
    t->sampling = NULL;
    while (t->works && (work = work_take(t->works, 0))) {
        status_keep(&work->status, status_fail(ST_CANCELLED, "the Tinker API is stopping"));
        inbox_post(&t->inbox, &work->message);
    }
    inbox_close(&t->inbox);
    uv_walk(&t->loop, close_handle, NULL);
    while (uv_run(&t->loop, UV_RUN_DEFAULT) != 0) continue;
    uv_loop_close(&t->loop);
    free_lists(t);
    futures_free(t->futures);
    work_queue_free(t->works);
    json_decref(t->live);
    json_decref(t->damaged);
    free(t);
}

static enum status start_http(struct tinker *t)
{
    struct http_options options = t->options->http;
    options.routes = routes;
    options.page = "docs/tinker.md";
    options.context = t;
    enum status st = http_new(&t->loop, &options, &t->http);
    return st == ST_OK ? http_listen(t->http, t->options->tcp_fd, true) : st;
}

// Signals are the main thread's business.
static enum status start_thread(struct tinker *t)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    enum status st = sampling_new(t->socket, t->options->sample_timeout, &t->inbox, &t->sampling);
    if (st == ST_OK && pthread_create(&t->thread, NULL, run, t) != 0)
        st = status_fail(ST_IO, "the thread of the Tinker API cannot be started");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return st;
}

enum status tinker_start(const struct tinker_options *options, struct policy *policy,
                         struct tinker **ret)
{
    enum status st;
    struct tinker *t = calloc(1, sizeof *t);
    if (!t) return status_fail(ST_NO_MEMORY, "out of memory");
    t->options = options;
    t->model_folder = policy_folder(policy);
    t->socket = policy_socket(policy);
    t->model_name = last_part(t->model_folder);
    t->control = policy_control(policy);
    t->limits = policy_limits(policy);
    t->sources = policy_sources(policy);
    t->max_adapters = policy_max_adapters(policy);
    t->end.deliver = on_end;
    uv_loop_init(&t->loop);
    uv_timer_init(&t->loop, &t->tick);
    t->tick.data = t;
    uv_timer_start(&t->tick, on_tick, TICK_MS, TICK_MS);
    t->live = json_object();
    t->damaged = json_object();
    if (!t->live || !t->damaged) FAIL(ST_NO_MEMORY, "out of memory");
    CHECK(signing_key_new(&t->signing));
    CHECK(inbox_init(&t->inbox, &t->loop));
    CHECK(work_queue_new(&t->works));
    CHECK(futures_new(&t->futures));
    CHECK(start_http(t));
    CHECK(start_thread(t));
    *ret = t;
    t = NULL;
out:
    if (t) release(t);
    return st;
}

struct work *tinker_take(struct tinker *t, int ms)
{
    return work_take(t->works, ms);
}

void tinker_return(struct tinker *t, struct work *work)
{
    inbox_post(&t->inbox, &work->message);
}

void tinker_give_up(struct tinker *t, const char *why)
{
    t->why = why;
}

void tinker_stop(struct tinker *t)
{
    if (!t) return;
    inbox_post(&t->inbox, &t->end);
    pthread_join(t->thread, NULL);
    release(t);
}
