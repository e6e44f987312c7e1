/* endpoints_bridge.c: /bridge/info, /bridge/pause, /bridge/resume, /reload.
 *
 * What has to wait for a step boundary runs elsewhere: pausing in libuv's thread pool (engine_pause
 * blocks), facts and reloading on the engine's thread, as jobs (job.h). Loop's thread but for
 * run_pause() and facts_done(). */
#include "infer-server/http/job.h"
#include "infer-server/http/server_impl.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define PAUSE_MS 10000

// ---- facts -------------------------------------------------------------------------------------

static json_t *control_json(const struct engine_info *info)
{
    const struct control_facts f = info->control;
    if (!info->loaded) return json_null();
    json_t *json = json_pack(
        "{s:I, s:I, s:i, s:i, s:f, s:f, s:b, s:b, s:b, s:b, s:b, s:b, s:f, s:f, s:f, s:s, s:o}",
        "version", (json_int_t)f.version, "publishes", (json_int_t)f.publishes, "owner_pid",
        (int)f.owner_pid, "writer_pid", (int)f.writer_pid, "owner_heartbeat_age_ms",
        f.owner_heartbeat_age_ms, "writer_heartbeat_age_ms", f.writer_heartbeat_age_ms,
        "owner_alive", (int)f.owner_alive, "writer_alive", (int)f.writer_alive, "quiet_requested",
        (int)f.quiesce_requested, "quiet_granted", (int)f.quiesce_granted, "torn", (int)f.torn,
        "ended", (int)f.ended, "last_wait_ms", f.last_wait_ms, "last_write_ms", f.last_write_ms,
        "last_pause_ms", f.last_pause_ms, "layout_hash", f.layout_hash, "snapshot",
        json_clean_string(f.snapshot));
    // What the weights are.
    json_object_set_new(json, "loaded", json_clean_string(f.loaded));
    json_object_set_new(json, "origin", json_clean_string(f.origin));
    json_object_set_new(json, "run", json_clean_string(f.run));
    json_object_set_new(json, "updates", json_integer((json_int_t)f.updates));
    json_object_set_new(json, "run_updates", json_integer((json_int_t)f.run_updates));
    return json;
}

static json_t *info_json(struct server *s, uint64_t version)
{
    struct engine_stats stats;
    const char *detail;
    engine_stats(s->engine, &stats);
    struct engine_info info;
    engine_info(s->engine, &info);
    const char *state = server_state(s, &stats, &detail);
    return json_pack(
        "{s:s, s:o, s:o, s:o, s:o, s:I, s:b, s:b, s:I, s:i, s:I, s:o}", "status", state,
        "state_detail", json_clean_string(detail), "model", json_clean_string(s->model.name),
        "bridge", json_clean_string(info.bridge_path), "socket",
        json_clean_string(s->options->socket_path), "weight_version",
        (json_int_t)(version ? version : stats.weight_version), "paused", (int)s->paused, "exact",
        (int)s->options->engine.exact, "weight_bytes", (json_int_t)stats.weight_bytes,
        "num_tensors", info.n_tensors, "num_parameters", (json_int_t)info.n_parameters, "control",
        control_json(&info));
}

static json_t *hex_json(uint64_t q)
{
    char text[20];
    snprintf(text, sizeof text, "%016" PRIx64, q);
    return json_string(text);
}

static void facts_deliver(struct inbox_message *message)
{
    struct job *j = (struct job *)message;
    if (j->status.code != ST_OK) {
        job_reply_failure(j);
        return;
    }
    if (j->request) {
        json_t *info = info_json(j->server, j->version);
        json_object_set_new(info, "canary", hex_json(j->canary));
        if (j->want_checksums) {
            json_t *sums = json_array();
            for (int i = 0; i < j->n_checksums; i++)
                json_array_append_new(sums, hex_json(j->checksums[i]));
            json_object_set_new(info, "checksums", sums);
        }
        http_reply_json(j->request, 200, info);
    }
    job_free(j);
}

static void facts_done(void *context, const struct engine_bridge_facts *facts)
{
    struct job *j = context;
    if (facts && facts->checksums) {
        j->checksums = malloc((size_t)facts->n_tensors * sizeof *j->checksums);
        if (j->checksums)
            memcpy(j->checksums, facts->checksums, (size_t)facts->n_tensors * sizeof *j->checksums);
        j->n_checksums = facts->n_tensors;
    }
    if (facts) {
        j->version = facts->version;
        j->canary = facts->canary;
    }
    if (!facts || (facts->checksums && !j->checksums))
        status_keep(&j->status,
                    status_fail(ST_DEVICE, "the engine could not read its weights (it is stopping, "
                                           "or its device failed)"));
    inbox_post(j->server->host.inbox, &j->message);
}

static bool asked(const struct http_request *q, const char *name)
{
    const char *value = http_query(q, name);
    return value && strcmp(value, "0") != 0 && strcmp(value, "false") != 0;
}

void handle_bridge_info(void *server, struct http_request *q)
{
    struct server *s = server;
    bool checksums = asked(q, "checksums");
    if (!checksums && !asked(q, "canary")) {
        http_reply_json(q, 200, info_json(s, 0));
        return;
    }
    struct engine_stats stats;
    engine_stats(s->engine, &stats);
    if (stats.state == ENGINE_LOADING) {
        http_fail(q, 503, "the model is being loaded; try again later");
        return;
    }
    struct job *j = job_new(s, q);
    if (!j) return;
    j->want_checksums = checksums;
    j->message.deliver = facts_deliver;
    enum status st = engine_bridge_facts(s->engine, checksums, facts_done, j);
    if (st == ST_OK) return;
    http_fail_status(q, st);
    job_free(j);
}

// ---- pause and resume --------------------------------------------------------------------------

static void reply_state(struct server *s, struct http_request *q, const char *status)
{
    struct engine_stats stats;
    engine_stats(s->engine, &stats);
    http_reply_json(q, 200,
                    json_pack("{s:s, s:I}", "status", status, "weight_version",
                              (json_int_t)stats.weight_version));
}

static void run_pause(uv_work_t *work) // thread pool
{
    struct job *j = work->data;
    status_keep(&j->status, engine_pause(j->server->engine, PAUSE_MS));
}

static void after_pause(uv_work_t *work, int cancelled)
{
    struct job *j = work->data;
    if (cancelled != 0)
        status_keep(&j->status, status_fail(ST_CANCELLED, "the server is stopping"));
    else if (j->status.code == ST_OK && !engine_paused(j->server->engine))
        status_keep(&j->status,
                    status_fail(ST_CANCELLED, "the engine was told to resume meanwhile"));
    if (j->status.code != ST_OK) {
        job_reply_failure(j);
        return;
    }
    j->server->paused = true;
    if (j->request) reply_state(j->server, j->request, "paused");
    job_free(j);
}

void handle_bridge_pause(void *server, struct http_request *q)
{
    struct server *s = server;
    if (!server_is_open(s, q)) return;
    struct job *j = job_new(s, q);
    if (!j) return;
    j->work.data = j;
    int e = uv_queue_work(&s->loop, &j->work, run_pause, after_pause);
    if (e == 0) return;
    status_keep(&j->status, status_fail(ST_IO, "cannot start a job: %s", uv_strerror(e)));
    job_reply_failure(j);
}

void handle_bridge_resume(void *server, struct http_request *q)
{
    struct server *s = server;
    enum status st = engine_resume(s->engine);
    if (st != ST_OK) {
        http_fail_status(q, st);
        return;
    }
    s->paused = false;
    reply_state(s, q, "resumed");
}

// ---- reload ------------------------------------------------------------------------------------

// What does not parse may be any file that this process can read, which a client of the socket or
// the key need not be able to: its bytes, which the sentence quotes, go to the log only.
static void keep_content(struct job *j)
{
    log_warn("/reload: %s", j->status.message);
    status_keep(&j->status, status_fail(j->status.code,
                                        "\"model\": the folder cannot be loaded: %s; the server's "
                                        "log says what it is",
                                        status_words(j->status.code)));
}

static void reload_deliver(struct inbox_message *message)
{
    struct job *j = (struct job *)message;
    if (j->status.code == ST_FORMAT || j->status.code == ST_UNSUPPORTED) keep_content(j);
    if (j->status.code != ST_OK) {
        job_reply_failure(j);
        return;
    }
    if (j->request)
        http_reply_json(j->request, 200,
                        json_pack("{s:s, s:I}", "status", "reloaded", "weight_version",
                                  (json_int_t)j->version));
    job_free(j);
}

// "draft": true is the folder of --draft, a string a folder; ret_folder stays where it is not asked
// for.
static enum status draft_to_reload(const struct server *s, const json_t *object,
                                   const char **ret_folder)
{
    const json_t *draft = json_object_get(object, "draft");
    const char *own = s->options->engine.draft_folder;
    if (!draft || json_is_null(draft) || json_is_false(draft)) return ST_OK;
    if (json_is_string(draft)) return json_get_string("request", object, "draft", ret_folder);
    if (!json_is_true(draft))
        return status_fail(ST_INVALID, "request: \"draft\" must be a model folder, or true for the "
                                       "one of --draft");
    if (!own)
        return status_fail(ST_INVALID,
                           "request: \"draft\": this server was started without --draft");
    *ret_folder = own;
    return ST_OK;
}

void handle_reload(void *server, struct http_request *q)
{
    struct server *s = server;
    size_t len;
    const char *body = http_request_body(q, &len), *folder = s->model.folder, *draft = NULL;
    json_t *object = NULL;
    struct job *j = NULL;
    enum status st = ST_OK;
    if (!server_is_open(s, q)) return;
    if (len > 0) { // without a body: the folder it was started with
        CHECK(json_parse("request", body, len, &object));
        CHECK(json_get_string("request", object, "model", &folder));
        CHECK(draft_to_reload(s, object, &draft));
    }
    j = job_new(s, q);
    if (!j) goto out;
    j->message.deliver = reload_deliver;
    CHECK(engine_reload(s->engine, folder, draft, job_done, j));
    j = NULL;
out:
    if (st != ST_OK) http_fail_status(q, st);
    if (j) job_free(j);
    json_decref(object);
}
