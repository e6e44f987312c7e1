/* run_adapter.c: a run that trains a LoRA adapter (--lora-r): the server makes it, in shared memory
 * of its own, and this process maps and writes it as it does a model's weights. The main thread.
 *
 * Whatever such a run starts from is first written as RUN/start (adapter_folder.h). */
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/run/adapter_folder.h"
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

static void role_name(const struct run *run, char ret[64])
{
    snprintf(ret, 64, "adapter:%s", run->config->lora.name);
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
    char role[64];
    role_name(run, role);
    const bool held = bridge_file_role(file, role) != NULL;
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
    enum status st;
    char path[PATH_ROOM];
    struct bridge_file *file = NULL;
    if (!wanted(run)) return ST_OK;
    CHECK(bridge_find(run_bridge(run), path, sizeof path));
    CHECK(bridge_file_read(path, &file));
    CHECK(bridge_file_check(file));
    st = make(run, file);
out:
    bridge_file_free(file);
    return st;
}

enum status run_open_adapter(struct run *run)
{
    enum status st;
    char role_text[64], hash[65];
    json_t *json = NULL;
    struct adapter_config *config;
    if (!wanted(run)) return ST_OK;
    role_name(run, role_text);
    const struct bridge_file *file = bridge_file_of(run->bridge);
    const struct bridge_role *role = bridge_file_role(file, role_text);
    if (!role) FAIL(ST_NOT_FOUND, "%s: the role \"%s\" is gone", file->path, role_text);
    CHECK(lora_config_json(&run->config->lora, run->model_folder, &json));
    CHECK(adapter_config_from_json("--lora-target", json, &config));
    CHECK(adapter_new(config, run->policy, role->dt, &run->adapter));
    weights_layout_hash(run->adapter->weights, hash);
    if (strcmp(hash, role->layout_hash) != 0)
        FAIL(ST_MISMATCH,
             "the server holds an adapter '%s' of other targets or ranks: take another "
             "--lora-name, or unload it (POST /v1/unload_lora_adapter)",
             run->config->lora.name);
    weights_bind(run->adapter->weights, bridge_base(run->bridge, role_text));
    notice_adapter(run->adapter);
    run->source.adapter = run->config->lora.name;
out:
    json_decref(json);
    return st;
}

// ---- the start ----------------------------------------------------------------------------------
enum status run_start_adapter(struct run *run)
{
    enum status st;
    const char *from = run->config->start_from;
    const bool current = strcmp(from, "current") == 0, fresh = strcmp(from, "loaded") == 0;
    const char *name = run->config->lora.name;
    char folder[PATH_ROOM];
    CHECK(path_put(folder, run->folder, "start"));
    if (run_leads(run))
        CHECK(current ? adapter_folder_write(folder, run->adapter, bridge_device(run->bridge),
                                             run->adapter->weights->dt, name)
                      : adapter_folder_start(folder, run->adapter, fresh ? NULL : from,
                                             (uint64_t)run->config->seed, name));
    CHECK(comm_barrier(run->comm));
    CHECK(run_load_weights(run, folder, NULL));
    log_info("the adapter '%s' starts %s%s (%s)", name,
             fresh     ? "new, and changes nothing yet"
             : current ? "as it is served"
                       : "from ",
             fresh || current ? "" : from, folder);
    if (!(run->start = run_weights(run)))
        st = status_fail(ST_NO_MEMORY, "no memory for what the run starts from");
out:
    return status_context(st, "--start-from %s", from);
}
