/* server.c: start, loop, drain and stop of the server. One thread, which calls everything in this
 * folder but the engine's own files.
 *
 * A tick every 100 ms looks at the engine's state: tells systemd when the model is loaded, that the
 * loop and the engine are alive (watchdog), and how a drain gets on. Stopping has two parts: while
 * draining, requests under way go on, new ones get 503, and /health says "draining"; after the last
 * one, or --drain-timeout, or a second signal, connections are closed, the engine ends, and what it
 * still says is delivered to nobody, so that everything is freed in one place. */
#include "infer-server/http/server_impl.h"
#include "infer-server/http/chat_probe.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/program.h"
#include "common/model/model_folder.h"

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

// ---- the model's info --------------------------------------------------------------------------

// Sampling defaults of the OpenAI endpoints.
static enum status read_generation_config(struct server *s, const char *folder)
{
    char path[PATH_ROOM];
    json_t *object = NULL;
    enum status st;
    CHECK(path_put(path, folder, "generation_config.json"));
    CHECK(model_file_read_json(folder, "generation_config.json", 1 << 20, &object));
    CHECK(api_model_read_defaults(path, object, &s->model));
    double repetition = 1;
    CHECK(json_get_double(path, object, "repetition_penalty", 0, 100, &repetition));
    if (repetition != 1)
        log_warn("%s: repetition_penalty %g is not applied by default: it is no part of the "
                 "model's distribution; requests may send it",
                 path, repetition);
out:
    json_decref(object);
    return st;
}

// What passes between two models is a token id: it must mean the same to both.
static enum status check_tokenizer(const struct server *s, const char *option, const char *what,
                                   const char *folder)
{
    struct tokenizer *other = NULL;
    enum status st = ST_OK;
    if (!folder || !model_file_exists(folder, "tokenizer.json")) return ST_OK;
    CHECK(tokenizer_load(folder, &other));
    for (int id = 0; id < tokenizer_vocab_size(other) && st == ST_OK; id++) {
        const char *theirs = tokenizer_token(other, id), *ours = tokenizer_token(s->tokenizer, id);
        if (theirs && (!ours || strcmp(theirs, ours) != 0))
            st =
                status_fail(ST_MISMATCH,
                            "%s %s: token %d is \"%s\" there and \"%s\" in %s; a %s must be of the "
                            "same tokenizer",
                            option, folder, id, theirs, ours ? ours : "(none)",
                            s->options->engine.model_folder, what);
    }
out:
    tokenizer_free(other);
    return st;
}

// What each token's text ends, for the selectors of a tandem.
static enum status read_token_ends(struct server *s)
{
    const int n = tokenizer_vocab_size(s->tokenizer);
    struct bytes text = BYTES_INIT;
    s->token_ends = malloc((size_t)n);
    if (!s->token_ends) return status_fail(ST_NO_MEMORY, "no memory for %d tokens", n);
    for (int id = 0; id < n; id++) {
        bytes_clear(&text);
        tokenizer_decode_inside(s->tokenizer, id, &text);
        s->token_ends[id] = token_ends_of(bytes_text(&text), text.len);
    }
    enum status st = bytes_status(&text);
    bytes_release(&text);
    return st;
}

// What the chat template says of itself, once: how it writes calls, and whether turns repeat.
static void read_chat(struct server *s)
{
    const int parser = s->options->tool_parser;
    struct bytes sentence = BYTES_INIT;
    log_info("chat template: %s", chat_template_source(s->chat));
    s->model.tool_form = parser == TOOL_PARSER_AUTO ? chat_probe_tool_form(s->chat)
                                                    : tool_form_at(parser - TOOL_PARSER_FORMS);
    if (s->model.tool_form)
        log_info("tool calls in answers are parsed: %s (--tool-call-parser)",
                 tool_form_name(s->model.tool_form));
    else if (chat_template_mentions(s->chat, "tools"))
        log_info("tool calls in answers stay text: %s",
                 parser == TOOL_PARSER_OFF
                     ? "--tool-call-parser off"
                     : "the chat template writes them in no form that --tool-call-parser has");
    chat_probe_repeats(s->chat, s->tokenizer, &sentence);
    if (sentence.len > 0) log_info("chat template: %s", bytes_text(&sentence));
    bytes_release(&sentence);
}

static enum status read_tokenizer(struct server *s, const char *folder)
{
    enum status st = model_folder_check(folder, "config.json");
    if (st != ST_OK) return st;
    if (!model_file_exists(folder, "tokenizer.json")) {
        log_warn("%s has no tokenizer.json: prompts must be token ids, answers have no text",
                 folder);
        return ST_OK;
    }
    st = tokenizer_load(folder, &s->tokenizer);
    const struct engine_options *o = &s->options->engine;
    if (st == ST_OK) st = check_tokenizer(s, "--draft", "draft model", o->draft_folder);
    if (st == ST_OK) st = check_tokenizer(s, "--tandem-model", "frozen model", o->frozen_folder);
    if (st == ST_OK && o->frozen_folder) st = read_token_ends(s);
    if (st != ST_OK) return st;
    const struct chat_template_choice *choice = &s->options->chat_template;
    st = chat_template_find(folder, choice, &s->chat);
    if (st == ST_OK) read_chat(s);
    if (st == ST_OK || choice->name || choice->file) return st;
    snprintf(s->why_no_chat, sizeof s->why_no_chat, "%s", status_message());
    log_warn("chat is off: %s", s->why_no_chat);
    return ST_OK;
}

static void name_model(struct server *s, const char *folder)
{
    if (s->options->model_name)
        snprintf(s->model_name, sizeof s->model_name, "%s", s->options->model_name);
    else
        model_folder_name(folder, s->model_name, sizeof s->model_name);
}

static enum status read_model(struct server *s)
{
    enum status st;
    const char *folder = s->options->engine.model_folder;
    name_model(s, folder);
    CHECK(read_generation_config(s, folder));
    CHECK(read_tokenizer(s, folder));
    s->model.name = s->model_name;
    s->model.folder = folder;
    s->model.frozen = s->options->engine.frozen_folder != NULL;
    s->model.tokenizer = s->host.tokenizer = s->tokenizer;
    s->model.chat = s->chat;
    s->model.why_no_chat = s->why_no_chat;
    s->unknown.accept = s->options->accept_unknown;
    s->model.unknown = &s->unknown;
out:
    return st;
}

// ---- its state ---------------------------------------------------------------------------------

// The context is the engine's to find, from what memory there is; until then nothing can be checked
// against it.
bool server_knows_context(struct server *s)
{
    struct engine_info info;
    if (s->model.max_context > 0) return true;
    engine_info(s->engine, &info);
    s->model.max_context = info.max_context;
    metrics_context(&s->metrics, info.max_context);
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

static void tell_systemd(struct server *s, struct engine_stats *stats)
{
    const char *detail, *state = server_state(s, stats, &detail);
    if (!s->ready_told && strcmp(state, "ok") == 0) {
        s->ready_told = true;
        sd_notifyf(0, "READY=1\nSTATUS=serving %s", s->model.name);
        log_info("ready: %s, context %d tokens, weight version %llu", s->model.name,
                 s->model.max_context, (unsigned long long)stats->weight_version);
    } else if (stats->state == ENGINE_LOADING) {
        sd_notifyf(0, "STATUS=loading %s\nEXTEND_TIMEOUT_USEC=30000000", s->model.name);
    } else if (stats->state != s->seen_state) {
        sd_notifyf(0, "STATUS=%s %s", state, detail);
    }
    s->seen_state = stats->state;
    bool due = clock_ms_since(s->watchdog_told_ns) >= (double)s->watchdog_ms / 3;
    if (s->watchdog_ms > 0 && due && engine_is_alive(s, stats)) {
        sd_notify(0, "WATCHDOG=1");
        s->watchdog_told_ns = clock_now_ns();
    }
}

static void begin_drain(struct server *s, int64_t ms)
{
    s->draining = true;
    s->drain_deadline_ns = clock_deadline_ns(ms);
}

static void go_on_draining(struct server *s)
{
    bool idle = http_open_requests(s->http) == 0 && s->host.live == 0;
    bool overdue = clock_now_ns() >= s->drain_deadline_ns;
    if (!idle && !overdue) return;
    if (!idle) log_warn("stopping with %d requests unfinished", http_open_requests(s->http));
    uv_stop(&s->loop);
}

static void on_tick(uv_timer_t *timer)
{
    struct server *s = timer->data;
    struct engine_stats stats;
    tell_systemd(s, &stats);
    if (stats.state == ENGINE_FAILED && !s->draining) begin_drain(s, FAILED_MS);
    if (__atomic_load_n(&s->host.lost_event, __ATOMIC_RELAXED)) {
        log_error("out of memory: tokens were lost, stopping");
        uv_stop(&s->loop);
    }
    if (s->draining) go_on_draining(s);
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct server *s = handle->data;
    if (s->draining && number == SIGHUP) return; // program.h
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
    s->watchdog_told_ns = clock_now_ns();
}

// Order: nobody new and nobody waiting; jobs come back; the engine ends, its last events are
// delivered; handles close. From here on a signal ends the process in the ordinary way.
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
    CHECK(read_model(s));
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
    stop(s);
    free(s);
    return st;
}
