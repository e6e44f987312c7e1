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
void handle_config(void *tinker, struct http_request *q)
{
    (void)tinker;
    http_reply_json(q, 200,
                    json_pack("{s:b, s:b, s:b, s:b, s:b}", "sample_use_retrieve_futures", 1,
                              "proto_compress_fwdbwd", 0, "parallel_fwdbwd_chunks", 1,
                              "custom_loss_server_side", 0, "sample_join_sampling_session", 0));
}

void handle_dynamic_config(void *tinker, struct http_request *q)
{
    (void)tinker;
    http_reply_json(
        q, 200, json_pack("{s:i, s:b}", "refresh_interval_sec", 300, "sample_cancel_enabled", 0));
}

void handle_create_session(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    uint32_t random = 0;
    json_t *body = tinker_body(q);
    if (!body) return;
    const char *version = json_string_value(json_object_get(body, "sdk_version"));
    struct session *s = calloc(1, sizeof *s);
    if (!s) {
        http_fail(q, 500, "out of memory");
        json_decref(body);
        return;
    }
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = (uint32_t)clock_now_ns();
    snprintf(s->id, sizeof s->id, "s%08" PRIx32 "-%d", random, ++t->n_sessions);
    s->heard_ns = clock_now_ns();
    s->next = t->sessions;
    t->sessions = s;
    log_info("session %s: SDK %.20s", s->id, version ? version : "of no version");
    http_reply_json(q, 200, json_pack("{s:s, s:s}", "session_id", s->id, "type", "create_session"));
    json_decref(body);
}

void handle_heartbeat(void *tinker, struct http_request *q)
{
    json_t *body = tinker_body(q);
    if (!body) return;
    if (tinker_session(tinker, q, body))
        http_reply_json(q, 200, json_pack("{s:s}", "type", "session_heartbeat"));
    json_decref(body);
}

struct ending { // of a run whose client has finished
    struct work work;
    char run[ID_ROOM];
};

static enum status run_ending(struct policy *policy, struct work *work)
{
    policy_end(policy, ((struct ending *)work)->run);
    return ST_OK;
}

static void ended(struct inbox_message *message)
{
    free(message);
}

// Adapters make room at once; the whole model stays as it was trained until another run begins.
static void end_runs(struct tinker *t, const struct session *s)
{
    for (struct training_run *m = t->training_runs; m; m = m->next) {
        if (m->session != s || m->rank == 0 || m->over) continue;
        struct ending *ending = calloc(1, sizeof *ending);
        if (!ending) return; // then its place goes to whoever wants it first
        m->over = true;
        snprintf(ending->run, sizeof ending->run, "%s", m->id);
        ending->work.message.deliver = ended;
        ending->work.run = run_ending;
        work_put(t->works, &ending->work);
    }
}

// POST /api/v1/sessions/ID/finish. One that this process does not know has ended with the one that
// knew it: a client that was told so in a sentence is not to end on another.
void handle_finish(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    const char *tail = http_path_tail(q), *slash = strchr(tail, '/');
    const size_t n = slash ? (size_t)(slash - tail) : 0;
    if (n == 0 || strcmp(slash, "/finish") != 0) {
        http_fail(q, 404, "there is no /api/v1/sessions/%.150s here", tail);
        return;
    }
    struct session *s = t->sessions;
    while (s && (strlen(s->id) != n || memcmp(s->id, tail, n) != 0)) s = s->next;
    if (s) {
        s->ended = true;
        s->heard_ns = clock_now_ns();
        end_runs(t, s);
        log_info("session %s: finished", s->id);
    } else {
        log_info("a session finished that an earlier process had");
    }
    http_reply_json(q, 200, json_object());
}

// Once it has none that is busy, or that another client would miss.
static bool forget_runs(struct tinker *t, const struct session *s)
{
    for (const struct training_run *m = t->training_runs; m; m = m->next)
        if (m->session == s && (m->n_ops > 0 || (!m->over && !s->ended))) return false;
    for (struct training_run **link = &t->training_runs; *link;) {
        struct training_run *m = *link;
        if (m->session != s) {
            link = &m->next;
            continue;
        }
        futures_end_owner(t->futures, m->id);
        *link = m->next;
        free(m);
    }
    return true;
}

static void forget_samplers(struct tinker *t, const struct session *s)
{
    for (struct sampler **link = &t->samplers; *link;) {
        struct sampler *sampler = *link;
        if (sampler->session != s) {
            link = &sampler->next;
            continue;
        }
        futures_end_owner(t->futures, sampler->id);
        *link = sampler->next;
        free(sampler);
    }
}

void tinker_sessions_sweep(struct tinker *t)
{
    const double most_ms = t->options->session_timeout * 1e3;
    for (struct session **link = &t->sessions; *link;) {
        struct session *s = *link;
        if (clock_ms_since(s->heard_ns) < most_ms || !forget_runs(t, s)) {
            link = &s->next;
            continue;
        }
        forget_samplers(t, s);
        log_debug("session %s: forgotten", s->id);
        *link = s->next;
        free(s);
    }
}

void handle_capabilities(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    http_reply_json(q, 200,
                    json_pack("{s:[{s:s, s:i, s:b, s:b}]}", "supported_models", "model_name",
                              t->model_name, "max_context_length", t->options->max_context,
                              "trainable", 1, "sampleable", 1));
}

void handle_healthz(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    if (tinker_takes_work(t, q)) http_reply_json(q, 200, json_pack("{s:s}", "status", "ok"));
}

// Its events are for the service's operator; here nobody reads them.
void handle_telemetry(void *tinker, struct http_request *q)
{
    (void)tinker;
    http_reply_json(q, 200, json_pack("{s:s}", "status", "accepted"));
}
