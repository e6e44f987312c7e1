/* endpoints_adapters.c: LoRA adapters: loading and unloading as vLLM's clients ask for it
 * (/v1/load_lora_adapter, /v1/unload_lora_adapter) and as Atropos does (/lora/load, /lora/unload,
 * /lora/status), where the one loaded last is that of every /generate that names none. The work is
 * the engine's, at a step boundary (pending.c). Loop's thread, but for
 * replaced(). */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/log.h"
#include "infer-server/weights/adapters.h"
#include "infer-server/http/server_impl.h"

#include <stdlib.h>
#include <string.h>

struct adapter_pending {
    struct pending pending;
    const struct change *change;
    char name[ADAPTER_NAME_BYTES];
};

// ---- the order ----------------------------------------------------------------------------------
static enum status take_name(struct adapter_pending *a, const char *field, const char *name)
{
    const struct api_model *model = &a->pending.server->model;
    if (!name || !name[0])
        return status_fail(ST_INVALID, "request: \"%s\" is missing: the adapter's name", field);
    if (strlen(name) >= sizeof a->name)
        return status_fail(ST_INVALID, "request: \"%s\" has more than %zu bytes", field,
                           sizeof a->name - 1);
    if (strcmp(name, model->name) == 0 || strcmp(name, model->folder) == 0)
        return status_fail(ST_INVALID, "request: \"%s\" is '%s', the model's own name", field,
                           name);
    if (api_names_frozen(model, name))
        return status_fail(ST_INVALID, "request: \"%s\" is '%s', the frozen model's own name",
                           field, name);
    snprintf(a->name, sizeof a->name, "%s", name);
    return ST_OK;
}

// {"lora_name", "lora_path"}; or, for a trainer that is to write it, {"lora_name", "config"}:
// PEFT's adapter_config.json; or, to keep what it has written, {"lora_name", "copy_of"}: another's
// name.
static enum status order_load(struct adapter_pending *a, const struct api_given *given)
{
    char *config = given->config ? json_dumps(given->config, JSON_ENCODE_ANY) : NULL;
    const struct adapter_request order = {.name = given->lora_name,
                                          .folder = given->lora_path,
                                          .config = config,
                                          .copy_of = given->copy_of,
                                          .in_place = given->in_place};
    enum status st;
    CHECK(take_name(a, "lora_name", order.name));
    if (!!order.folder + !!order.config + !!order.copy_of != 1)
        FAIL(ST_INVALID, "request: give \"lora_path\", a PEFT folder, or \"config\", an "
                         "adapter_config.json, for a new adapter, or \"copy_of\", another's name");
    st = engine_load_adapter(a->pending.server->engine, &order, pending_command_done, a);
out:
    free(config);
    return st;
}

static enum status order_unload(struct adapter_pending *a, const struct api_given *given)
{
    enum status st = take_name(a, "lora_name", given->lora_name);
    if (st != ST_OK) return st;
    return engine_unload_adapter(a->pending.server->engine, a->name, given->writer,
                                 pending_command_done, a);
}

static enum status order_activate(struct adapter_pending *a, const struct api_given *given)
{
    struct server *s = a->pending.server;
    char made[32];
    snprintf(made, sizeof made, "adapter_%d", s->adapter_loads);
    const struct adapter_request order = {.name = given->adapter_name ? given->adapter_name : made,
                                          .folder = given->adapter_path,
                                          .in_place = true};
    if (!order.folder)
        return status_fail(ST_INVALID, "request: \"adapter_path\" is missing: a PEFT folder");
    enum status st = take_name(a, "adapter_name", order.name);
    return st == ST_OK ? engine_load_adapter(s->engine, &order, pending_command_done, a) : st;
}

// The active one, or {"adapter_name"}; where there is none, nothing is to be done.
static enum status order_deactivate(struct adapter_pending *a, const struct api_given *given)
{
    struct server *s = a->pending.server;
    const char *name = given->adapter_name ? given->adapter_name : s->model.active_adapter;
    if (!name[0]) {
        pending_command_done(a, ST_OK, NULL, 0);
        return ST_OK;
    }
    enum status st = take_name(a, "adapter_name", name);
    return st == ST_OK ? engine_unload_adapter(s->engine, a->name, 0, pending_command_done, a) : st;
}

// ---- the response -------------------------------------------------------------------------------
static void reply_text(const struct adapter_pending *a, const char *done)
{
    struct bytes body = BYTES_INIT;
    if (!a->pending.request) return;
    bytes_printf(&body, "Success: LoRA adapter '%s' %s successfully.", a->name, done);
    if (a->pending.status.message[0])
        bytes_printf(&body, " Warning: %s", a->pending.status.message);
    http_reply(a->pending.request, 200, "text/plain; charset=utf-8", &body);
}

static void loaded(struct adapter_pending *a)
{
    reply_text(a, "added");
}

// Nobody's /generate is by it any more.
static void forget_active(struct adapter_pending *a)
{
    char *active = a->pending.server->model.active_adapter;
    if (strcmp(active, a->name) == 0) active[0] = 0;
}

static void unloaded(struct adapter_pending *a)
{
    forget_active(a);
    reply_text(a, "removed");
}

static void replaced(void *context, enum status st, const char *sentence, uint64_t version)
{
    (void)context, (void)version;
    if (st != ST_OK) log_warn("the adapter that /lora/load replaces stays loaded: %s", sentence);
}

static void activated(struct adapter_pending *a)
{
    struct server *s = a->pending.server;
    const char *warning = a->pending.status.message;
    char *active = s->model.active_adapter;
    if (active[0] && strcmp(active, a->name) != 0)
        engine_unload_adapter(s->engine, active, 0, replaced, NULL);
    memcpy(active, a->name, sizeof a->name);
    s->adapter_loads++;
    if (a->pending.request)
        http_reply_json(a->pending.request, 200,
                        json_pack("{s:s, s:o, s:i, s:o*}", "status", "ok", "adapter_name",
                                  json_clean_string(a->name), "load_count", s->adapter_loads,
                                  "warning", warning[0] ? json_clean_string(warning) : NULL));
}

static void deactivated(struct adapter_pending *a)
{
    forget_active(a);
    if (a->pending.request)
        http_reply_json(a->pending.request, 200,
                        json_pack("{s:s, s:o}", "status", "ok", "previous_name",
                                  a->name[0] ? json_clean_string(a->name) : json_null()));
}

// ---- the endpoints ------------------------------------------------------------------------------
static const struct change {
    enum body body; // of its fields
    enum status (*order)(struct adapter_pending *a, const struct api_given *given);
    void (*done)(struct adapter_pending *a); // where it succeeded
} changes[] = {
    [ADAPTER_LOAD] = {BODY_LORA, order_load, loaded},
    [ADAPTER_UNLOAD] = {BODY_LORA, order_unload, unloaded},
    [ADAPTER_ACTIVATE] = {BODY_ADAPTER, order_activate, activated},
    [ADAPTER_DEACTIVATE] = {BODY_ADAPTER, order_deactivate, deactivated},
};

static void ended(struct pending *pending)
{
    struct adapter_pending *a = (struct adapter_pending *)pending;
    char what[sizeof a->name + 16];
    snprintf(what, sizeof what, "adapter '%s'", a->name);
    if (pending->status.code == ST_OK)
        a->change->done(a);
    else
        pending_fail(pending, pending->status.code == ST_FORMAT ? "lora_path" : NULL, what);
    free(a);
}

void handle_adapter_change(void *server, struct http_request *q)
{
    struct server *s = server;
    struct api_request wanted = {.name = ""};
    json_t *object = NULL;
    enum status st;
    if (!server_is_open(s, q)) return;
    struct adapter_pending *a = pending_new(s, q, sizeof *a, ended);
    if (!a) return;
    a->change = &changes[http_which(q)];
    CHECK(pending_read_fields(&a->pending, a->change->body, &wanted, &object));
    CHECK(a->change->order(a, &wanted.given));
out:
    json_decref(object);
    if (st == ST_OK) return;
    pending_free(&a->pending);
    http_fail_status(q, st);
}

void handle_lora_status(void *server, struct http_request *q)
{
    struct server *s = server;
    struct adapter_info list[ADAPTERS_MAX];
    const int n = engine_adapters(s->engine, list);
    const struct engine_options *o = &s->options->engine;
    const char *active = s->model.active_adapter;
    json_t *names = json_array(), *path = NULL;
    for (int i = 0; i < n; i++) {
        json_array_append_new(names, json_clean_string(list[i].name));
        if (strcmp(list[i].name, active) == 0) path = json_clean_string(list[i].folder);
    }
    http_reply_json(q, 200,
                    json_pack("{s:b, s:i, s:i, s:o, s:o, s:i, s:o}", "lora_available",
                              o->max_adapters > 0, "max_adapters", (int)o->max_adapters,
                              "max_lora_rank", (int)o->max_lora_rank, "active_adapter_name",
                              active[0] ? json_clean_string(active) : json_null(),
                              "active_adapter_path", path ? path : json_null(), "load_count",
                              s->adapter_loads, "available_adapters", names));
}
