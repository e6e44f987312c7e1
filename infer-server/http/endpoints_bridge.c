/* endpoints_bridge.c: /bridge/info, /bridge/pause, /bridge/resume, /reload, /v1/rollouts/stop; and
 * what pending responses that are commands of the engine share.
 *
 * What has to wait for a step boundary is a pending response (pending.c): pausing in libuv's thread
 * pool (engine_pause blocks), info and reloading on the engine's thread, which calls back there.
 * Loop's thread but for run_pause(), info_done() and
 * pending_command_done(). */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"
#include "common/base/dtype.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/options.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define PAUSE_MS 10000

// ---- commands -----------------------------------------------------------------------------------

void pending_command_done(void *context, enum status st, const char *sentence, uint64_t version)
{
    struct pending *j = context;
    j->version = version;
    status_fail(st, "%s", sentence ? sentence : "");
    status_keep(&j->status, st);
    if (st == ST_OK) // a warning, or none
        snprintf(j->status.message, sizeof j->status.message, "%s", sentence ? sentence : "");
    pending_post(j);
}

enum status pending_read_fields(const struct pending *j, enum body kind, struct api_request *ret,
                                json_t **ret_object)
{
    const struct bytes *body = &j->body.bytes;
    enum status st = api_read_object(bytes_text(body), body->len, true, ret_object);
    return st == ST_OK ? request_read(*ret_object, kind, j->server->model.unknown, ret) : st;
}

void pending_fail(const struct pending *j, const char *field, const char *what)
{
    struct http_request *q = j->request;
    const enum status st = status_recall(&j->status);
    if (field) log_warn("%s: %s", what, status_message());
    if (q && field)
        http_fail(q, 400,
                  "\"%s\": the folder cannot be loaded: %s; the server's log says what it is",
                  field, status_words(st));
    else if (q && st == ST_BUSY) // a trainer holds the lease
        http_fail(q, 409, "%s", status_message());
    else if (q)
        http_fail_status(q, st);
}

struct bridge_pending {
    struct pending pending;
    json_t *canaries, *checksums, *base; // the latter two where they are asked for
    bool quotes;                         // the failure, of files (pending_fail)
};

// Answers with that, or with the failure that it came to, and ends.
static void finish(struct bridge_pending *b, json_t *answer)
{
    const enum status st = b->pending.status.code;
    if (b->pending.request && st == ST_OK)
        http_reply_json(b->pending.request, 200, json_incref(answer));
    else if (st != ST_OK)
        pending_fail(&b->pending, b->quotes ? "model" : NULL, "/reload");
    json_decref(answer);
    json_decref(b->canaries);
    json_decref(b->checksums);
    json_decref(b->base);
    free(b);
}

// ---- info --------------------------------------------------------------------------------------

static json_t *control_json(const struct engine_info *info)
{
    const struct control_info f = info->control;
    if (!info->loaded) return json_null();
    return json_pack("{s:I, s:I, s:i, s:i, s:f, s:f, s:b, s:b, s:b, s:b, s:b, s:b, s:f, s:f, s:f, "
                     "s:s, s:o, s:o, s:o, s:o, s:I, s:I}",
                     "version", (json_int_t)f.version, "publishes", (json_int_t)f.publishes,
                     "owner_pid", (int)f.owner_pid, "writer_pid", (int)f.writer_pid,
                     "owner_heartbeat_age_ms", f.owner_heartbeat_age_ms, "writer_heartbeat_age_ms",
                     f.writer_heartbeat_age_ms, "owner_alive", (int)f.owner_alive, "writer_alive",
                     (int)f.writer_alive, "quiet_requested", (int)f.quiesce_requested,
                     "quiet_granted", (int)f.quiesce_granted, "torn", (int)f.torn, "ended",
                     (int)f.ended, "last_wait_ms", f.last_wait_ms, "last_write_ms", f.last_write_ms,
                     "last_pause_ms", f.last_pause_ms, "layout_hash", f.layout_hash, "snapshot",
                     json_clean_string(f.snapshot),
                     // what the weights are
                     "loaded", json_clean_string(f.loaded), "origin", json_clean_string(f.origin),
                     "run", json_clean_string(f.run), "updates", (json_int_t)f.updates,
                     "run_updates", (json_int_t)f.run_updates);
}

static json_t *info_json(struct server *s, uint64_t version)
{
    struct engine_stats stats;
    const char *detail, *state = server_state(s, &stats, &detail);
    struct engine_info info;
    engine_info(s->engine, &info);
    return json_pack(
        "{s:s, s:o, s:o, s:o, s:o, s:s, s:s, s:I, s:b, s:b, s:i, s:b, s:I, s:i, s:I, s:o}",
        "status", state, "state_detail", json_clean_string(detail), "model",
        json_clean_string(s->model.name), "bridge", json_clean_string(info.bridge_path), "socket",
        json_clean_string(s->options->engine.socket_path), "quantization",
        quantization_names[s->options->engine.quantization], "kv_cache_dtype",
        kv_cache_names[s->options->engine.kv_cache], "weight_version",
        (json_int_t)(version ? version : stats.weight_version), "paused", (int)s->paused, "exact",
        (int)s->options->engine.exact, "tp_degree", info.loaded ? info.n_shards : 1,
        "expert_parallel", (int)s->options->engine.expert_parallel, "weight_bytes",
        (json_int_t)stats.weight_bytes * (info.loaded ? info.n_shards : 1), "num_tensors",
        info.n_tensors, "num_parameters", (json_int_t)info.n_parameters, "control",
        control_json(&info));
}

// NULL: no memory.
static json_t *hex_list(const uint64_t *q, int n)
{
    char text[20];
    json_t *list = json_array();
    for (int i = 0; list && i < n; i++) {
        snprintf(text, sizeof text, "%016" PRIx64, q[i]);
        json_array_append_new(list, json_string(text));
    }
    return list;
}

static void info_reply(struct pending *pending)
{
    struct bridge_pending *b = (struct bridge_pending *)pending;
    json_t *info = info_json(pending->server, b->pending.version);
    json_object_set(info, "canary", json_array_get(b->canaries, 0));
    json_object_set(info, "canaries", b->canaries);
    json_object_set(info, "checksums", b->checksums); // NULL: nothing happens
    json_object_set(info, "base", b->base);
    finish(b, info);
}

static void info_done(void *context, const struct engine_bridge_info *info)
{
    struct bridge_pending *b = context;
    enum status st = ST_OK;
    if (!info)
        FAIL(ST_DEVICE,
             "the engine could not read its weights (it is stopping, or its device failed)");
    b->pending.version = info->version;
    if (!(b->canaries = hex_list(info->canaries, info->n_shards)))
        FAIL(ST_NO_MEMORY, "out of memory");
    if (!info->checksums) goto out;
    b->base = json_deep_copy(info->base);
    if (!(b->checksums = hex_list(info->checksums, info->n_tensors)))
        st = status_fail(ST_NO_MEMORY, "out of memory");
out:
    status_keep(&b->pending.status, st);
    pending_post(&b->pending);
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
    if (!http_takes_only(q, OPTION_WORDS("canary", "checksums"))) return;
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
    struct bridge_pending *b = pending_new(s, q, sizeof *b, info_reply);
    if (!b) return;
    enum status st = engine_bridge_info(s->engine, checksums, info_done, b);
    if (st == ST_OK) return;
    pending_free(&b->pending);
    http_fail_status(q, st);
}

// ---- pause and resume --------------------------------------------------------------------------

static json_t *state_json(struct server *s, const char *status)
{
    struct engine_stats stats;
    engine_stats(s->engine, &stats);
    return json_pack("{s:s, s:I}", "status", status, "weight_version",
                     (json_int_t)stats.weight_version);
}

static enum status run_pause(struct pending *pending) // thread pool
{
    return engine_pause(pending->server->engine, PAUSE_MS);
}

static void paused(struct pending *pending)
{
    struct server *s = pending->server;
    if (pending->status.code == ST_OK && !engine_paused(s->engine))
        status_keep(&pending->status,
                    status_fail(ST_CANCELLED, "the engine was told to resume meanwhile"));
    s->paused |= pending->status.code == ST_OK;
    finish((struct bridge_pending *)pending, state_json(s, "paused"));
}

void handle_bridge_pause(void *server, struct http_request *q)
{
    struct server *s = server;
    if (!server_is_open(s, q) || !http_takes_only(q, OPTION_WORDS(NULL))) return;
    struct pending *j = pending_new(s, q, sizeof(struct bridge_pending), paused);
    if (j) pending_block(j, run_pause);
}

void handle_bridge_resume(void *server, struct http_request *q)
{
    struct server *s = server;
    if (!http_takes_only(q, OPTION_WORDS(NULL))) return;
    enum status st = engine_resume(s->engine);
    if (st != ST_OK) {
        http_fail_status(q, st);
        return;
    }
    s->paused = false;
    http_reply_json(q, 200, state_json(s, "resumed"));
}

// ---- reload ------------------------------------------------------------------------------------

static void reloaded(struct pending *pending)
{
    struct bridge_pending *b = (struct bridge_pending *)pending;
    b->quotes = pending->status.code == ST_FORMAT || pending->status.code == ST_UNSUPPORTED;
    finish(b, json_pack("{s:s, s:I}", "status", "reloaded", "weight_version",
                        (json_int_t)b->pending.version));
}

// "draft": true is the folder of --draft, a string a folder; NULL: it is not asked for.
static enum status draft_to_reload(const struct server *s, const json_t *object,
                                   const json_t *draft, const char **ret_folder)
{
    const char *own = s->options->engine.draft_folder;
    if (!draft || json_is_false(draft)) return ST_OK;
    if (json_is_string(draft)) return json_get_string("request", object, "draft", ret_folder);
    if (!json_is_true(draft))
        return status_fail(
            ST_INVALID,
            "request: \"draft\" must be a model folder, or true for the one of --draft");
    if (!own)
        return status_fail(ST_INVALID,
                           "request: \"draft\": this server was started without --draft");
    *ret_folder = own;
    return ST_OK;
}

void handle_reload(void *server, struct http_request *q)
{
    struct server *s = server;
    struct api_request wanted = {.given = {.model = s->model.folder}};
    const char *draft = NULL;
    json_t *object = NULL;
    enum status st;
    if (!server_is_open(s, q)) return;
    struct bridge_pending *b = pending_new(s, q, sizeof *b, reloaded);
    if (!b) return;
    // an empty one: the folder it was started with
    CHECK(pending_read_fields(&b->pending, BODY_RELOAD, &wanted, &object));
    CHECK(draft_to_reload(s, object, wanted.given.draft, &draft));
    CHECK(engine_reload(s->engine, wanted.given.model, draft, pending_command_done, b));
out:
    json_decref(object);
    if (st == ST_OK) return;
    pending_free(&b->pending);
    http_fail_status(q, st);
}

// ---- rollouts that a trainer needs no more -----------------------------------------------------

// The samples of that group end where they are, as if they had come to a stop string, in every
// generation of a request of that name. How many had not ended.
static int stop_group(struct generation_host *host, const char *request, const json_t *group)
{
    int n = 0;
    for (struct generation *g = host->first; g; g = g->next)
        for (int i = 0; i < g->request->n_samples && strcmp(g->request->name, request) == 0; i++) {
            struct generation_sample *s = &g->samples[i];
            if (s->stopped || s->finish != FINISH_NONE || !g->runs[s->prompt].request ||
                !json_equal(g->request->prompts[s->prompt].group_id, group))
                continue;
            s->stopped = true;
            engine_cancel(host->engine, g->runs[s->prompt].request, s->index);
            n++;
        }
    return n;
}

// POST /v1/rollouts/stop?request_id=NAME&group_ids=[ID,...]: these end where they are.
void handle_stop(void *server, struct http_request *q)
{
    struct server *s = server;
    const char *name = http_query(q, "request_id"), *groups = http_query(q, "group_ids");
    if (!http_takes_only(q, OPTION_WORDS("request_id", "group_ids"))) return;
    json_t *ids = groups ? json_loads(groups, 0, NULL) : NULL, *id;
    int n = 0;
    size_t i;
    json_array_foreach (ids, i, id) n += name ? stop_group(&s->host, name, id) : 0;
    if (name && json_is_array(ids))
        http_reply_json(q, 200, json_pack("{s:i}", "stopped", n));
    else if (name && groups)
        http_fail(q, 400,
                  "\"group_ids\" is '%s', no JSON list: [ID,...], where texts stand in %%22",
                  CUT(groups, 100));
    else
        http_fail(q, 400, "\"%s\" is missing: ?request_id=NAME&group_ids=[ID,...] say what ends",
                  name ? "group_ids" : "request_id");
    json_decref(ids);
}
