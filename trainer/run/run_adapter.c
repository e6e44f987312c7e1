/* run_adapter.c: a run that trains a LoRA adapter (--lora-r): the server makes it, in shared memory
 * of its own, and this process maps and writes it as it does a model's weights. The main thread. */
#include "common/base/file.h"
#include "bridge/attach.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "trainer/rollout/rollout.h"
#include "trainer/run/notices.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAKE_MS 60000

static bool wanted(const struct run *run)
{
    return run->config->lora.r > 0;
}

struct adapter_call {
    struct http_client *http;
    json_t *body;
};

static enum status send_call(void *context)
{
    const struct adapter_call *c = context;
    const struct http_call call = {
        .path = "/v1/load_lora_adapter", .post = true, .body = c->body, .timeout_ms = MAKE_MS};
    return http_perform(c->http, &call, NULL);
}

// Asks the server for it; one of that name must be as this run wants it.
static enum status make(const struct run *run, const struct bridge_file *file)
{
    enum status st;
    struct adapter_call call = {0};
    json_t *config = NULL;
    const bool held = bridge_file_role(file, run->mapped.role) != NULL;
    CHECK(lora_config_json(&run->config->lora, file->roles[0].model, &config));
    call.body = json_pack("{s:s, s:O, s:b}", "lora_name", run->config->lora.name, "config", config,
                          "load_inplace", 1);
    if (!call.body) FAIL(ST_NO_MEMORY, "no memory to ask for an adapter");
    CHECK(http_client_new(file->socket, &call.http));
    CHECK(run_retry(ST_BUSY, send_call, &call));
    log_info("the adapter '%s' is %s", run->config->lora.name,
             held ? "one that the server holds, and its weights are replaced or trained on"
                  : "made by the server");
out:
    http_client_free(call.http);
    json_decref(call.body);
    json_decref(config);
    return status_context(st, "--lora-r %" PRId64, run->config->lora.r);
}

enum status run_make_adapter(struct run *run)
{
    struct bridge_file *file = NULL;
    if (!wanted(run)) return ST_OK;
    enum status st = bridge_file_open(mapped_path(&run->mapped), &file);
    if (st == ST_OK) st = make(run, file);
    bridge_file_free(file);
    return st;
}

enum status run_plan_adapter(struct run *run, const char *folder, enum dtype dt)
{
    enum status st;
    json_t *json = NULL;
    struct adapter_config *config;
    CHECK(lora_config_json(&run->config->lora, folder, &json));
    CHECK(adapter_config_from_json("--lora-target", json, &config));
    st = adapter_new(config, run->mapped.policy, dt, &run->mapped.adapter);
out:
    json_decref(json);
    return st;
}

// As the server holds it, which must be as this run wants it.
static enum status bind_adapter(struct run *run)
{
    struct mapped *m = &run->mapped;
    enum status st;
    char hash[65];
    struct control_facts f;
    const struct bridge_file *file = bridge_file_of(m->bridge);
    const struct bridge_role *role = bridge_file_role(file, m->role);
    if (!role) FAIL(ST_NOT_FOUND, "%s: the role \"%s\" is gone", file->path, m->role);
    control_facts(mapped_control(m), &f);
    // A server may hold another folder's weights by now than those that it was started with.
    CHECK(run_plan_adapter(run, f.origin[0] == '/' ? f.origin : m->model_folder, role->dt));
    weights_layout_hash(m->adapter->weights, hash);
    if (strcmp(hash, role->layout_hash) != 0)
        FAIL(ST_MISMATCH,
             "the server holds an adapter '%s' of other targets or ranks: take another "
             "--lora-name, or unload it (POST /v1/unload_lora_adapter)",
             run->config->lora.name);
    weights_bind(m->adapter->weights, bridge_base(m->bridge, m->role));
out:
    return st;
}

enum status run_open_adapter(struct run *run)
{
    enum status st = ST_OK;
    if (!wanted(run)) return ST_OK;
    if (!run->mapped.adapter) st = bind_adapter(run);
    if (st != ST_OK) return st;
    notice_adapter(run->mapped.adapter);
    run->servers->adapter = run->config->lora.name;
    return ST_OK;
}

enum status run_find_base(struct run *run)
{
    if (!run->mapped.adapter) return ST_OK;
    if (run->config->sync == SYNC_SHARED) return adapter_base_ask(run->http, &run->mapped.base);
    return adapter_base_of(run->mapped.policy, bridge_device(run->mapped.bridge),
                           run->mapped.model_folder, &run->mapped.base);
}
