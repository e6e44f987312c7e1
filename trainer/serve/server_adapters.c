/* server_adapters.c: the server's room for adapters: requests to it, and what goes when there is
 * none. The main thread. */
#include "trainer/serve/trained_model_impl.h"
#include "bridge/bridge_file.h"
#include "bridge/control.h"
#include "common/base/log.h"
#include "common/http/http_client.h"
#include "trainer/run/run.h"

#include <string.h>
#include <unistd.h>

#define RESPONSE_MS 60000

// Takes the body's reference.
static enum status post(struct trained_model *m, const char *path, json_t *body)
{
    const struct http_call call = {
        .path = path, .post = true, .body = body, .timeout_ms = RESPONSE_MS};
    enum status st = body ? http_perform(m->server, &call, NULL)
                          : status_fail(ST_NO_MEMORY, "no memory to ask for an adapter");
    json_decref(body);
    return st;
}

static enum status read_status(struct trained_model *m, json_t **ret)
{
    return http_get_json(m->server, "/lora/status", RESPONSE_MS, ret);
}

static enum status ask_unload(struct trained_model *m, const char *adapter)
{
    return post(m, "/v1/unload_lora_adapter",
                json_pack("{s:s, s:i}", "lora_name", adapter, "writer_pid", (int)getpid()));
}

static enum status unload_left(void *context)
{
    struct trained_model *m = context;
    enum status st;
    json_t *status = NULL, *name;
    size_t i;
    int n = 0;
    CHECK(read_status(m, &status));
    m->info.max_adapters = (int)json_integer_value(json_object_get(status, "max_adapters"));
    m->max_rank = (int)json_integer_value(json_object_get(status, "max_lora_rank"));
    json_array_foreach (json_object_get(status, "available_adapters"), i, name) {
        const char *text = json_string_value(name);
        if (strncmp(text, ADAPTER_PREFIX, strlen(ADAPTER_PREFIX)) != 0) continue;
        CHECK(ask_unload(m, text));
        n++;
    }
    if (n > 0)
        log_info("%d adapter%s, which a cw-trainer serve before this one left on the server, %s "
                 "unloaded",
                 n, n == 1 ? "" : "s", n == 1 ? "is" : "are");
out:
    json_decref(status);
    return st;
}

enum status server_adapters_open(struct trained_model *m)
{
    struct bridge_file *file = NULL;
    enum status st;
    CHECK(bridge_file_open(m->options->bridge, &file));
    CHECK(http_client_new(file->socket, &m->server));
    st = run_retry(ST_BUSY, unload_left, m);
out:
    bridge_file_free(file);
    return st;
}

void server_adapters_unload(struct trained_model *m, const char *adapter)
{
    snapshots_remove(m->info.snapshots, adapter);
    if (control_owner_alive(m->info.control) != ST_OK) return;
    if (ask_unload(m, adapter) != ST_OK)
        log_warn("the adapter '%s' stays on the server: %s", adapter, status_message());
}

void server_adapters_unload_spare(struct trained_model *m, const char *run)
{
    char adapter[ADAPTER_ROOM];
    while (snapshots_spare(m->info.snapshots, run, !run, adapter))
        server_adapters_unload(m, adapter);
}

// for_run: for a run's own; kept_of: for a copy of that run.
static enum status make_room(struct trained_model *m, bool for_run, const char *kept_of)
{
    const int max = m->info.max_adapters;
    char adapter[ADAPTER_ROOM], run[RUN_NAME_ROOM];
    enum status st;
    int runs = 0;
    for (;;) {
        json_t *status = NULL;
        CHECK(read_status(m, &status));
        const size_t n = json_array_size(json_object_get(status, "available_adapters"));
        json_decref(status);
        if ((int)n < max) return ST_OK;
        if (snapshots_spare(m->info.snapshots, kept_of, true, adapter)) {
            log_info("the adapter '%s' is unloaded to make room for another", adapter);
            server_adapters_unload(m, adapter);
        } else if (for_run && snapshots_abandoned(m->info.snapshots, run) && trained_find(m, run)) {
            trained_put_away(m, trained_find(m, run),
                             "its client is gone, and another wants its place");
        } else {
            break;
        }
    }
    for (const struct trainee *t = m->trainees; t; t = t->next) runs++;
    FAIL(ST_INVALID,
         "the server has room for %d adapters, and all are in use, %d by training runs: finish "
         "one (its client's end frees it), or start cw-infer-server with a larger --max-adapters",
         max, runs);
out:
    return st;
}

enum status server_adapters_add(struct trained_model *m, enum snapshot_kind kind, const char *name,
                                const char *adapter, const char *key, json_t *value)
{
    enum status st = make_room(m, kind == LIVE, kind == KEPT ? name : NULL);
    json_t *body = json_pack("{s:s, s:o}", "lora_name", adapter, key, value);
    if (st == ST_OK) st = post(m, "/v1/load_lora_adapter", json_incref(body));
    json_decref(body);
    return st == ST_OK ? snapshots_add(m->info.snapshots, kind, name, adapter) : st;
}
