/* server.c: start, loop, drain and stop of the server. One thread, which calls everything in this
 * folder but the engine's own files.
 *
 * A tick every 100 ms looks at the engine's state: tells systemd when the model is loaded, that the
 * loop and the engine are alive (watchdog), and how a drain gets on. Stopping has two parts: while
 * draining, requests under way go on, new ones get 503, and /health says "draining"; after the last
 * one, or --drain-timeout, or a second signal, connections are closed, the engine ends, and what it
 * still says is delivered to nobody, so that everything is freed in one place. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "infer-server/weights/group.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <systemd/sd-daemon.h>

#define TICK_MS      100
#define FAILED_MS    2000 // for clients to read their errors after the engine failed
#define STUCK_MIN_MS 30000

static const struct http_route routes[] = {
    {"GET", "/health", handle_health, HTTP_OPEN, 0},
    {"GET", "/version", handle_version, HTTP_NEEDS_KEY, 0},
    {"GET", "/v1/models", handle_models, HTTP_NEEDS_KEY, 0},
    {"GET", "/v1/models/*", handle_model, HTTP_NEEDS_KEY, 0},
    {"POST", "/v1/completions", handle_text, HTTP_NEEDS_KEY, API_COMPLETIONS},
    {"POST", "/v1/chat/completions", handle_text, HTTP_NEEDS_KEY, API_CHAT},
    {"POST", "/v1/chat/completions/render", handle_tokens, HTTP_NEEDS_KEY, RENDER},
    {"POST", "/v1/responses", handle_text, HTTP_NEEDS_KEY, API_RESPONSES},
    {"POST", "/v1/messages", handle_text, HTTP_NEEDS_KEY, API_MESSAGES},
    {"POST", "/v1/messages/count_tokens", handle_tokens, HTTP_NEEDS_KEY, COUNT},
    {"POST", "/v1/rollouts", handle_text, HTTP_NEEDS_KEY, API_ROLLOUTS},
    {"POST", "/v1/rollouts/stop", handle_stop, HTTP_NEEDS_KEY, 0},
    {"POST", "/generate", handle_text, HTTP_NEEDS_KEY, API_GENERATE},
    {"POST", "/inference/v1/generate", handle_text, HTTP_NEEDS_KEY, API_INFERENCE},
    {"POST", "/tokenize", handle_tokens, HTTP_NEEDS_KEY, TOKENIZE},
    {"POST", "/detokenize", handle_tokens, HTTP_NEEDS_KEY, DETOKENIZE},
    {"GET", "/tokenizer_info", handle_tokenizer_info, HTTP_NEEDS_KEY, 0},
    {"GET", "/metrics", handle_metrics, HTTP_NEEDS_KEY, 0},
    {"GET", "/v1/spec_decode_stats", handle_spec_decode_stats, HTTP_NEEDS_KEY, 0},
    {"GET", "/bridge/info", handle_bridge_info, HTTP_ADMIN, 0},
    {"POST", "/bridge/pause", handle_bridge_pause, HTTP_ADMIN, 0},
    {"POST", "/bridge/resume", handle_bridge_resume, HTTP_ADMIN, 0},
    {"POST", "/reload", handle_reload, HTTP_ADMIN, 0},
    {"POST", "/v1/load_lora_adapter", handle_adapter_change, HTTP_ADMIN, ADAPTER_LOAD},
    {"POST", "/v1/unload_lora_adapter", handle_adapter_change, HTTP_ADMIN, ADAPTER_UNLOAD},
    {"POST", "/lora/load", handle_adapter_change, HTTP_ADMIN, ADAPTER_ACTIVATE},
    {"POST", "/lora/unload", handle_adapter_change, HTTP_ADMIN, ADAPTER_DEACTIVATE},
    {"GET", "/lora/status", handle_lora_status, HTTP_ADMIN, 0},
    {NULL, NULL, NULL, HTTP_NEEDS_KEY, 0},
};

// ---- the tick ----------------------------------------------------------------------------------

// The engine goes round: it gives heartbeats between steps, idle or not, and while it waits for a
// trainer's update. It gives none while it loads weights itself, which may take minutes: by its
// state, or with the version odd.
static bool engine_is_alive(struct server *s, const struct engine_stats *stats)
{
    struct engine_info info;
    engine_info(s->engine, &info);
    if (!info.loaded || stats->state != ENGINE_OK || info.control.version & 1) return true;
    return info.control.owner_heartbeat_age_ms < fmax(STUCK_MIN_MS, (double)s->watchdog_ms);
}

static void notify_systemd(struct server *s, struct engine_stats *stats)
{
    const char *detail, *state = server_state(s, stats, &detail);
    if (!s->ready_notified && strcmp(state, "ok") == 0) {
        s->ready_notified = true;
        sd_notifyf(0, "READY=1\nSTATUS=serving %s", s->model.name);
        log_info("ready: %s, context %d tokens, weight version %llu", s->model.name,
                 s->model.max_context, (unsigned long long)stats->weight_version);
    } else if (stats->state == ENGINE_LOADING) {
        sd_notifyf(0, "STATUS=loading %s\nEXTEND_TIMEOUT_USEC=30000000", s->model.name);
    } else if (stats->state != s->seen_state) {
        sd_notifyf(0, "STATUS=%s %s", state, detail);
    }
    s->seen_state = stats->state;
    bool due = clock_ms_since(s->watchdog_notified_ns) >= (double)s->watchdog_ms / 3;
    if (s->watchdog_ms > 0 && due && engine_is_alive(s, stats)) {
        sd_notify(0, "WATCHDOG=1");
        s->watchdog_notified_ns = clock_now_ns();
    }
}

static void begin_drain(struct server *s, int64_t ms)
{
    s->draining = true;
    s->drain_deadline_ns = clock_deadline_ns(ms);
}

static void on_tick(uv_timer_t *timer)
{
    struct server *s = timer->data;
    struct engine_stats stats;
    notify_systemd(s, &stats);
    if (stats.state == ENGINE_FAILED && !s->draining) begin_drain(s, FAILED_MS);
    if (__atomic_load_n(&s->host.lost_event, __ATOMIC_RELAXED)) {
        log_error("out of memory: tokens were lost, stopping");
        uv_stop(&s->loop);
    }
    const bool idle = http_open_requests(s->http) == 0 && s->host.live == 0;
    if (!s->draining || (!idle && clock_now_ns() < s->drain_deadline_ns)) return;
    if (!idle) log_warn("stopping with %d requests unfinished", http_open_requests(s->http));
    uv_stop(&s->loop);
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct server *s = handle->data;
    if (s->draining && number == SIGHUP) return; // options.h
    if (s->draining) {
        log_warn("second signal: stopping at once");
        uv_stop(&s->loop);
        return;
    }
    log_info("%s: finishing %d requests, then stopping", strsignal(number),
             http_open_requests(s->http));
    sd_notify(0, "STOPPING=1\nSTATUS=draining");
    begin_drain(s, 1000 * s->options->drain_timeout_s);
}

// ---- start and stop ----------------------------------------------------------------------------

static enum status start_http(struct server *s)
{
    enum status st;
    const struct server_options *o = s->options;
    struct http_options options = o->http;
    options.routes = routes;
    options.page = "docs/use/protocol.md";
    options.context = s;
    CHECK(http_new(&s->loop, &options, &s->http));
    CHECK(http_listen(s->http, o->unix_fd, false));
    if (o->tcp_fd >= 0) CHECK(http_listen(s->http, o->tcp_fd, true));
out:
    return st;
}

static void start_handles(struct server *s)
{
    static const int numbers[4] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP}; // USR1: of mpirun
    const int n = program_hears_hangup() ? 4 : 3;
    uint64_t watchdog_us = 0;
    for (int i = 0; i < n; i++) {
        uv_signal_init(&s->loop, &s->signals[i]);
        s->signals[i].data = s;
        uv_signal_start(&s->signals[i], on_signal, numbers[i]);
    }
    uv_timer_init(&s->loop, &s->tick);
    s->tick.data = s;
    uv_timer_start(&s->tick, on_tick, 0, TICK_MS);
    if (sd_watchdog_enabled(0, &watchdog_us) > 0) s->watchdog_ms = watchdog_us / 1000;
    s->watchdog_notified_ns = clock_now_ns();
}

// Order: nobody new and nobody waiting; pending responses come back; the engine ends, its last
// events are delivered; handles close. From here on a signal ends the process in the ordinary way.
static void stop(struct server *s)
{
    http_close(s->http);
    while (s->work > 0 && s->engine) {
        engine_resume(s->engine);
        uv_run(&s->loop, UV_RUN_ONCE);
    }
    for (int i = 0; i < 4; i++)
        if (s->signals[i].data) uv_signal_stop(&s->signals[i]);
    signal(SIGHUP, SIG_IGN); // of which another may come
    engine_free(s->engine, 0);
    inbox_close(&s->host.inbox);
    http_loop_close(&s->loop);
    chat_template_free(s->chat);
    free(s->token_ends);
    constraints_free(s->model.constraints);
    tokenizer_free(s->tokenizer);
}

enum status server_run(const struct server_options *options)
{
    enum status st;
    struct server *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "out of memory");
    st = http_loop_init(&s->loop);
    if (st != ST_OK) {
        free(s);
        return st;
    }
    s->options = options;
    s->start_s = clock_wall_s();
    s->start_ns = clock_now_ns();
    s->host.metrics = &s->metrics;
    CHECK(served_model_read(s));
    CHECK(inbox_init(&s->host.inbox, &s->loop));
    struct engine_options engine = options->engine;
    engine.token_ends = s->token_ends;
    engine.n_token_ends = s->token_ends ? tokenizer_vocab_size(s->tokenizer) : 0;
    CHECK(engine_new(&engine, generation_on_event, &s->host, &s->engine));
    s->host.engine = s->engine;
    struct engine_info info;
    engine_info(s->engine, &info);
    s->model.engine = s->engine;
    s->model.vocab_size = info.vocab_size;
    if (s->tokenizer)
        CHECK(constraints_new(s->tokenizer, info.vocab_size, info.eos_ids, info.n_eos,
                              &s->model.constraints));
    CHECK(start_http(s));
    start_handles(s);
    uv_run(&s->loop, UV_RUN_DEFAULT);
    struct engine_stats stats;
    engine_stats(s->engine, &stats);
    if (stats.state == ENGINE_FAILED)
        st = ST_CANCELLED; // engine_fail() has logged why
    else if (s->host.lost_event)
        st = status_fail(ST_NO_MEMORY, "out of memory");
out:
    // its ranks have not met
    if (!s->engine) group_give_up(options->engine.bridge_path, &options->engine.who, st);
    stop(s);
    free(s);
    return st;
}
