/* endpoints_session.c: what a client of the Tinker API asks for before and beside its work: how it
 * is to talk, its session, what is served here. Loop's thread. */
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#include <inttypes.h>
#include <string.h>
#include <sys/random.h>

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
        [DYNAMIC_CONFIG] = "{\"refresh_interval_sec\": 300, \"sample_cancel_enabled\": false}",
        [TELEMETRY] = "{\"status\": \"accepted\"}",
    };
    return tinker_reply(c, json_loads(texts[c->which], 0, NULL));
}

static enum status create_session(const struct call *c)
{
    struct tinker *t = c->tinker;
    struct owner *s;
    uint32_t random = 0;
    char id[ID_ROOM];
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = (uint32_t)clock_now_ns();
    snprintf(id, sizeof id, "s%08" PRIx32 "-%d", random, ++t->n_sessions);
    enum status st = owner_add(t->requests, SESSION, NULL, id, &s);
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
        return status_fail(ST_NOT_FOUND, "there is no /api/v1/sessions/%.150s here", tail);
    snprintf(id, sizeof id, "%.*s", (int)n, tail);
    struct owner *s = owner_find(t->requests, SESSION, id), *run = NULL;
    if (s) {
        s->ended = true;
        s->heard_ns = clock_now_ns();
        while ((run = owner_next(t->requests, TRAINING_RUN, run)))
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
    for (struct owner *run = NULL; (run = owner_next(s->all, TRAINING_RUN, run));)
        if (run->session == s && (run->n_requests > 0 || (!run->over && !s->ended))) return true;
    return false;
}

void tinker_sessions_sweep(struct tinker *t)
{
    const double max_ms = t->options->session_timeout * 1e3;
    for (struct owner *s = owner_next(t->requests, SESSION, NULL), *next; s; s = next) {
        next = owner_next(t->requests, SESSION, s);
        if (clock_ms_since(s->heard_ns) < max_ms || has_runs(s)) continue;
        log_debug("session %s: forgotten", s->id);
        session_forget(s);
    }
}

static enum status capabilities(const struct call *c)
{
    struct tinker *t = c->tinker;
    return tinker_reply(c, json_pack("{s:[{s:s, s:i, s:b, s:b}]}", "supported_models", "model_name",
                                     t->model_name, "max_context_length", t->model->max_context,
                                     "trainable", 1, "sampleable", 1));
}

static enum status healthz(const struct call *c)
{
    enum status st = tinker_takes_work(c->tinker);
    return st == ST_OK ? tinker_reply(c, json_pack("{s:s}", "status", "ok")) : st;
}

const struct endpoint session_endpoints[] = {
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
