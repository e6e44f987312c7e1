/* endpoints_adapters.c: LoRA adapters: loading and unloading as vLLM's clients ask for it
 * (/v1/load_lora_adapter, /v1/unload_lora_adapter) and as Atropos does (/lora/load, /lora/unload,
 * /lora/status), where the one loaded last is that of every /generate that names none. The work is
 * the engine's, at a step boundary (job.h). Loop's thread. */
#include "common/base/json.h"
#include "common/base/log.h"
#include "infer-server/engine/adapters.h"
#include "infer-server/http/job.h"

#include <stdlib.h>
#include <string.h>

static const char where[] = "request";

// The body's object; an empty body is {}.
static enum status read_body(struct http_request *q, json_t **ret)
{
    size_t len;
    const char *body = http_request_body(q, &len);
    enum status st = len ? json_parse(where, body, len, ret) : ST_OK;
    if (st == ST_OK && !*ret) *ret = json_object();
    if (st != ST_OK || json_is_object(*ret)) return st;
    return status_fail(ST_INVALID, "request: the body must be a JSON object");
}

static enum status check_name(const struct server *s, const char *field, const char *name)
{
    if (!name || !name[0])
        return status_fail(ST_INVALID, "request: \"%s\" is missing: the adapter's name", field);
    if (strlen(name) >= ADAPTER_NAME_BYTES)
        return status_fail(ST_INVALID, "request: \"%s\" has more than %d bytes", field,
                           ADAPTER_NAME_BYTES - 1);
    if (strcmp(name, s->model.name) == 0 || strcmp(name, s->model.folder) == 0)
        return status_fail(ST_INVALID, "request: \"%s\" is '%s', the model's own name", field,
                           name);
    return ST_OK;
}

// The file that does not parse is named to the client, and its bytes, which the sentence quotes, go
// to the log only (as of /reload).
static void reply_failure(struct job *j)
{
    const struct status_kept *kept = &j->status;
    if (kept->code == ST_FORMAT) {
        log_warn("adapter '%s': %s", j->adapter, kept->message);
        status_keep(&j->status, status_fail(ST_INVALID,
                                            "\"lora_path\": the folder cannot be loaded: %s; the "
                                            "server's log says what it is",
                                            status_words(ST_FORMAT)));
    }
    job_reply_failure(j);
}

static void reply_text(struct http_request *q, const char *name, const char *done)
{
    struct bytes body = BYTES_INIT;
    bytes_printf(&body, "Success: LoRA adapter '%s' %s successfully.", name, done);
    http_reply(q, 200, "text/plain; charset=utf-8", &body);
}

// ---- as vLLM ------------------------------------------------------------------------------------
static void loaded(struct inbox_message *message)
{
    struct job *j = (struct job *)message;
    if (j->status.code != ST_OK) {
        reply_failure(j);
        return;
    }
    if (j->request) reply_text(j->request, j->adapter, "added");
    job_free(j);
}

static void unloaded(struct inbox_message *message)
{
    struct job *j = (struct job *)message;
    if (j->status.code != ST_OK) {
        reply_failure(j);
        return;
    }
    if (strcmp(j->server->model.active_adapter, j->adapter) == 0)
        j->server->model.active_adapter[0] = 0;
    if (j->request) reply_text(j->request, j->adapter, "removed");
    job_free(j);
}

// Hands the order to the engine; the job's answer is `deliver`.
static enum status load(struct server *s, struct http_request *q, const struct adapter_order *order,
                        void (*deliver)(struct inbox_message *))
{
    struct job *j = job_new(s, q);
    if (!j) return ST_OK; // it has its answer
    j->message.deliver = deliver;
    snprintf(j->adapter, sizeof j->adapter, "%s", order->name);
    enum status st = engine_load_adapter(s->engine, order, job_done, j);
    if (st != ST_OK) job_free(j);
    return st;
}

static enum status unload(struct server *s, struct http_request *q, const char *name,
                          void (*deliver)(struct inbox_message *))
{
    struct job *j = job_new(s, q);
    if (!j) return ST_OK;
    j->message.deliver = deliver;
    snprintf(j->adapter, sizeof j->adapter, "%s", name);
    enum status st = engine_unload_adapter(s->engine, name, job_done, j);
    if (st != ST_OK) job_free(j);
    return st;
}

// {"lora_name", "lora_path"}; or, for a trainer that is to write it, {"lora_name", "config"}:
// PEFT's adapter_config.json.
void handle_load_adapter(void *server, struct http_request *q)
{
    struct server *s = server;
    struct adapter_order order = {0};
    json_t *object = NULL;
    char *config = NULL;
    enum status st;
    if (!server_is_open(s, q)) return;
    CHECK(read_body(q, &object));
    CHECK(json_get_string(where, object, "lora_name", &order.name));
    CHECK(json_get_string(where, object, "lora_path", &order.folder));
    CHECK(json_get_bool(where, object, "load_inplace", &order.in_place));
    CHECK(check_name(s, "lora_name", order.name));
    if (json_has(object, "config"))
        config = json_dumps(json_object_get(object, "config"), JSON_ENCODE_ANY);
    order.config = config;
    if (!order.folder == !order.config) {
        st =
            status_fail(ST_INVALID, "request: give \"lora_path\", a PEFT folder, or \"config\", an "
                                    "adapter_config.json, for a new adapter");
        goto out;
    }
    st = load(s, q, &order, loaded);
out:
    if (st != ST_OK) http_fail_status(q, st);
    free(config);
    json_decref(object);
}

void handle_unload_adapter(void *server, struct http_request *q)
{
    struct server *s = server;
    const char *name = NULL;
    json_t *object = NULL;
    enum status st;
    if (!server_is_open(s, q)) return;
    CHECK(read_body(q, &object));
    CHECK(json_get_string(where, object, "lora_name", &name));
    CHECK(check_name(s, "lora_name", name));
    st = unload(s, q, name, unloaded);
out:
    if (st != ST_OK) http_fail_status(q, st);
    json_decref(object);
}

// ---- as Atropos ---------------------------------------------------------------------------------
static void ignore(void *context, enum status st, const char *message, uint64_t version)
{
    (void)context, (void)version;
    if (st != ST_OK) log_warn("the adapter that /lora/load replaces stays loaded: %s", message);
}

static void activated(struct inbox_message *message)
{
    struct job *j = (struct job *)message;
    struct server *s = j->server;
    char before[ADAPTER_NAME_BYTES];
    if (j->status.code != ST_OK) {
        reply_failure(j);
        return;
    }
    memcpy(before, s->model.active_adapter, sizeof before);
    memcpy(s->model.active_adapter, j->adapter, sizeof before);
    s->adapter_loads++;
    if (before[0] && strcmp(before, j->adapter) != 0)
        engine_unload_adapter(s->engine, before, ignore, NULL);
    if (j->request)
        http_reply_json(j->request, 200,
                        json_pack("{s:s, s:o, s:i}", "status", "ok", "adapter_name",
                                  json_clean_string(j->adapter), "load_count", s->adapter_loads));
    job_free(j);
}

void handle_lora_load(void *server, struct http_request *q)
{
    struct server *s = server;
    struct adapter_order order = {.in_place = true};
    char made[32];
    json_t *object = NULL;
    enum status st;
    if (!server_is_open(s, q)) return;
    CHECK(read_body(q, &object));
    CHECK(json_get_string(where, object, "adapter_path", &order.folder));
    CHECK(json_get_string(where, object, "adapter_name", &order.name));
    if (!order.folder) {
        st = status_fail(ST_INVALID, "request: \"adapter_path\" is missing: a PEFT folder");
        goto out;
    }
    snprintf(made, sizeof made, "adapter_%d", s->adapter_loads);
    if (!order.name) order.name = made;
    CHECK(check_name(s, "adapter_name", order.name));
    st = load(s, q, &order, activated);
out:
    if (st != ST_OK) http_fail_status(q, st);
    json_decref(object);
}

static void deactivated(struct inbox_message *message)
{
    struct job *j = (struct job *)message;
    if (j->status.code != ST_OK) {
        reply_failure(j);
        return;
    }
    if (strcmp(j->server->model.active_adapter, j->adapter) == 0)
        j->server->model.active_adapter[0] = 0;
    if (j->request)
        http_reply_json(j->request, 200,
                        json_pack("{s:s, s:o}", "status", "ok", "previous_name",
                                  json_clean_string(j->adapter)));
    job_free(j);
}

// The active one, or {"adapter_name"}.
void handle_lora_unload(void *server, struct http_request *q)
{
    struct server *s = server;
    const char *name = s->model.active_adapter;
    json_t *object = NULL;
    enum status st = ST_OK;
    if (!server_is_open(s, q)) return;
    CHECK(read_body(q, &object));
    CHECK(json_get_string(where, object, "adapter_name", &name));
    if (name[0])
        st = unload(s, q, name, deactivated);
    else
        http_reply_json(q, 200, json_pack("{s:s, s:n}", "status", "ok", "previous_name"));
out:
    if (st != ST_OK) http_fail_status(q, st);
    json_decref(object);
}

void handle_lora_status(void *server, struct http_request *q)
{
    struct server *s = server;
    struct adapter_info list[ADAPTERS_MOST];
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
                              o->max_adapters > 0, "max_adapters", o->max_adapters, "max_lora_rank",
                              o->max_lora_rank, "active_adapter_name",
                              active[0] ? json_clean_string(active) : json_null(),
                              "active_adapter_path", path ? path : json_null(), "load_count",
                              s->adapter_loads, "available_adapters", names));
}
