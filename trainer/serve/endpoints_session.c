/* endpoints_session.c: what a client of the Tinker API asks for before and beside its work: how it
 * is to talk, its session, what is served here. Loop's thread. */
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

// Results of samples are asked for a session at a time, which keeps connections few. Bodies are not
// compressed: they go nowhere.
static enum status client_config(const struct call *c)
{
    http_reply_json(c->q, 200,
                    json_pack("{s:b, s:b, s:b, s:b, s:b}", "sample_use_retrieve_futures", 1,
                              "proto_compress_fwdbwd", 0, "parallel_fwdbwd_chunks", 1,
                              "custom_loss_server_side", 0, "sample_join_sampling_session", 0));
    return ST_OK;
}

static enum status dynamic_config(const struct call *c)
{
    http_reply_json(
        c->q, 200,
        json_pack("{s:i, s:b}", "refresh_interval_sec", 300, "sample_cancel_enabled", 0));
    return ST_OK;
}

static enum status create_session(const struct call *c)
{
    struct tinker *t = c->tinker;
    uint32_t random = 0;
    struct session *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "out of memory");
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = (uint32_t)clock_now_ns();
    snprintf(s->id, sizeof s->id, "s%08" PRIx32 "-%d", random, ++t->n_sessions);
    s->heard_ns = clock_now_ns();
    s->next = t->sessions;
    t->sessions = s;
    log_info("session %s: SDK %.20s", s->id, c->sdk_version ? c->sdk_version : "of no version");
    http_reply_json(c->q, 200,
                    json_pack("{s:s, s:s}", "session_id", s->id, "type", "create_session"));
    return ST_OK;
}

static enum status heartbeat(const struct call *c)
{
    struct session *s;
    enum status st = tinker_session(c->tinker, c->session_id, &s);
    if (st == ST_OK) http_reply_json(c->q, 200, json_pack("{s:s}", "type", "session_heartbeat"));
    return st;
}

// POST /api/v1/sessions/ID/finish. One that this process does not know has ended with the one that
// knew it: a client that was told so in a sentence is not to end on another. Its adapters make room
// at once; the whole model stays as it was trained until another run begins.
static enum status finish(const struct call *c)
{
    struct tinker *t = c->tinker;
    const char *tail = http_path_tail(c->q), *slash = strchr(tail, '/');
    const size_t n = slash ? (size_t)(slash - tail) : 0;
    if (n == 0 || strcmp(slash, "/finish") != 0)
        return status_fail(ST_NOT_FOUND, "there is no /api/v1/sessions/%.150s here", tail);
    struct session *s = t->sessions;
    while (s && (strlen(s->id) != n || memcmp(s->id, tail, n) != 0)) s = s->next;
    if (s) {
        s->ended = true;
        s->heard_ns = clock_now_ns();
        for (struct training_run *run = NULL; (run = tinker_next_run(t, run));)
            if (run->owner.session == s && run->rank > 0 && !run->over) tinker_end_run(t, run);
        log_info("session %s: finished", s->id);
    } else {
        log_info("a session finished that an earlier process had");
    }
    http_reply_json(c->q, 200, json_object());
    return ST_OK;
}

// Whether a session has a run that is busy, or that another client would miss.
static bool has_runs(const struct tinker *t, const struct session *s)
{
    for (struct training_run *run = NULL; (run = tinker_next_run(t, run));)
        if (run->owner.session == s && (run->n_requests > 0 || (!run->over && !s->ended)))
            return true;
    return false;
}

void tinker_sessions_sweep(struct tinker *t)
{
    const double max_ms = t->options->session_timeout * 1e3;
    for (struct session **link = &t->sessions, *s; (s = *link);) {
        if (clock_ms_since(s->heard_ns) < max_ms || has_runs(t, s)) {
            link = &s->next;
            continue;
        }
        owners_forget(t->requests, s);
        log_debug("session %s: forgotten", s->id);
        *link = s->next;
        free(s);
    }
}

static enum status capabilities(const struct call *c)
{
    struct tinker *t = c->tinker;
    http_reply_json(c->q, 200,
                    json_pack("{s:[{s:s, s:i, s:b, s:b}]}", "supported_models", "model_name",
                              t->model_name, "max_context_length", t->model->max_context,
                              "trainable", 1, "sampleable", 1));
    return ST_OK;
}

static enum status healthz(const struct call *c)
{
    enum status st = tinker_takes_work(c->tinker);
    if (st == ST_OK) http_reply_json(c->q, 200, json_pack("{s:s}", "status", "ok"));
    return st;
}

// Its events are for the service's operator; here nobody reads them.
static enum status telemetry(const struct call *c)
{
    http_reply_json(c->q, 200, json_pack("{s:s}", "status", "accepted"));
    return ST_OK;
}

const struct endpoint session_endpoints[] = {
    {"POST", "/api/v1/client/config", client_config, NULL, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/client/dynamic_config", dynamic_config, NULL, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/create_session", create_session, "", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/session_heartbeat", heartbeat, "session_id", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/sessions/*", finish, NULL, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/get_server_capabilities", capabilities, NULL, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/healthz", healthz, NULL, HTTP_OPEN, 0},
    {"POST", "/api/v1/telemetry", telemetry, NULL, HTTP_NEEDS_KEY, 0},
    {0},
};
