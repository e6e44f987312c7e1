/* run_weights.c: the weights of a run: those that it owns itself (--sync checkpoint), those that
 * are written for whoever samples by copies, and the adapter of --lora-r, which the server makes,
 * in shared memory of its own, and this process maps and writes as it does a model's weights. The
 * main thread.
 *
 * With --sync shared the trained server samples by the weights that are written in place. With
 * --sync checkpoint there is no such server: this process owns the weights (bridge_own()), and
 * either starts a server of its own on a copy of them, or has one elsewhere load them. All the rest
 * of a run is the same: who samples are copies (rollout/servers.c), whose tokens are given the
 * version that the copy is of. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "kernels/comm.h"
#include "trainer/launch/server_process.h"
#include "trainer/rollout/source.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/warnings.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAKE_MS 60000

// ---- the folder of weights ----------------------------------------------------------------------

// Who samples has a copy of the draft that is trained.
static bool copies_draft(const struct run *run)
{
    return run->config->train_draft && run->config->sync == SYNC_CHECKPOINT;
}

static double weights_bytes(const struct run *run, const char *folder)
{
    const char *const files[] = {
        run->mapped.adapter ? "adapter_model.safetensors" : "model.safetensors",
        copies_draft(run) ? DRAFT_FOLDER "/model.safetensors" : "",
    };
    char path[PATH_ROOM];
    struct stat sb;
    double bytes = 0;
    for (int i = 0; i < 2; i++)
        if (files[i][0] && path_put(path, folder, "%s", files[i]) == ST_OK && stat(path, &sb) == 0)
            bytes += (double)sb.st_size;
    return bytes;
}

// What is trained: the adapter, as nobody's yet, or the model; and the draft in it. On all ranks.
static enum status write_weights(void *context, char ret_folder[PATH_ROOM])
{
    struct run *run = context;
    const struct mapped *m = &run->mapped;
    const struct model_folder draft = {
        .weights = m->draft, .as = m->policy->dt, .source_folder = m->draft_folder};
    struct model_folder model = mapped_folder(m);
    char path[PATH_ROOM];
    enum status st;
    if (run->config->sync == SYNC_SHARED) model.source_folder = NULL;
    if (copies_draft(run)) model.draft = &draft;
    CHECK(path_put(path, run->folder, "workers"));
    CHECK(run_write_model(run, path, &model));
    CHECK(comm_barrier(run->ranks.all));
    if (!realpath(path, ret_folder)) FAIL(ST_IO, "%s: it cannot be found again", path);
    run->written_bytes += weights_bytes(run, ret_folder);
out:
    return st;
}

enum status run_place_server(struct run *run)
{
    struct own *own = &run->own;
    const int rank = run->launch->ranks.rank;
    enum status st;
    if (!own->server) return ST_OK;
    CHECK(rank == 0 ? path_put(own->folder, "", "%s", run->folder)
                    : path_put(own->folder, run->folder, "rank-%d", rank));
    CHECK(path_put(own->socket, own->folder, "server.sock"));
    st = file_make_folders(own->folder);
out:
    return st;
}

enum status run_open_source(struct run *run)
{
    const struct train_config *c = run->config;
    const struct bridge_file *file = bridge_file_of(run->mapped.bridge);
    const struct copies_options options = {
        .workers = c->workers,
        .server_url = c->server_url,
        .api_key_file = c->workers_api_key_file,
        .rank = run->launch->ranks.rank,
        .n_ranks = run->launch->ranks.size,
        .shared = c->sync == SYNC_SHARED ? file->socket : NULL,
        .policy = bridge_file_role(file, "policy"),
        .n_parameters = weights_parameters(run->mapped.policy),
        .model_folder = run->mapped.model_folder,
        .server = run->own.server,
        .socket = run->own.socket,
        .completions = c->server_command != NULL,
        .write = write_weights,
        .started = run_check_context,
        .context = run,
        .adapter = c->lora.r ? c->lora.name : NULL,
        .draft = copies_draft(run) ? DRAFT_FOLDER : NULL,
        .other_draft = c->draft,
    };
    return servers_new(&options, run->servers, &run->source);
}

// ---- an adapter ---------------------------------------------------------------------------------

struct adapter_call {
    struct http_client *http;
    json_t *body;
};

static enum status send_call(void *context)
{
    const struct adapter_call *c = context;
    return http_post(c->http, "/v1/load_lora_adapter", json_incref(c->body), MAKE_MS);
}

// One of that name must be as this run wants it.
enum status run_make_adapter(struct run *run)
{
    const struct lora_options *lora = &run->config->lora;
    struct bridge_file *file = NULL;
    struct adapter_call call = {0};
    json_t *config = NULL;
    if (!lora->r) return ST_OK;
    enum status st = bridge_file_open(mapped_path(&run->mapped), &file);
    if (st != ST_OK) return st;
    const bool held = bridge_file_role(file, run->mapped.role) != NULL;
    CHECK(lora_config_json(lora, file->roles[0].model, &config));
    call.body =
        json_pack("{s:s, s:O, s:b}", "lora_name", lora->name, "config", config, "load_inplace", 1);
    CHECK(http_client_new(file->socket, &run->http));
    call.http = run->http;
    CHECK(run_retry(ST_BUSY, send_call, &call));
    run->made_adapter = !held && run->launch->ranks.size == 1; // else others map it too
    log_info("the adapter '%s' is %s", lora->name,
             held ? "one that the server holds, and its weights are replaced or trained on"
                  : "made by the server");
out:
    json_decref(call.body);
    json_decref(config);
    bridge_file_free(file);
    return status_context(st, "--lora-r %" PRId64, lora->r);
}

// Else the next start, of another rank or scale, would be refused for what none has trained.
void run_unload_adapter(struct run *run)
{
    const char *name = run->config->lora.name;
    struct status_kept why;
    if (!run->made_adapter) return;
    status_keep(&why, ST_CANCELLED);
    if (http_post(run->http, "/v1/unload_lora_adapter", json_pack("{s:s}", "lora_name", name),
                  MAKE_MS) == ST_OK)
        log_info("the adapter '%s', made for this run, is unloaded", name);
    else
        log_warn("the adapter '%s', made for this run, stays loaded: %s", name, status_message());
    status_recall(&why);
}

// Of a base from that folder.
static enum status plan_adapter(struct run *run, const char *folder, enum dtype dt)
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
    struct control_info f;
    const struct bridge_file *file = bridge_file_of(m->bridge);
    const struct bridge_role *role = bridge_file_role(file, m->role);
    if (!role) FAIL(ST_NOT_FOUND, "%s: the role \"%s\" is gone", file->path, m->role);
    control_info(mapped_control(m), &f);
    // A server may hold another folder's weights by now than those that it was started with.
    CHECK(plan_adapter(run, f.origin[0] == '/' ? f.origin : m->model_folder, role->dt));
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
    if (!run->config->lora.r) return ST_OK;
    if (!run->mapped.adapter) st = bind_adapter(run);
    if (st != ST_OK) return st;
    warn_adapter(run->mapped.adapter);
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

// ---- weights of this process --------------------------------------------------------------------

// from: a folder that the weights are loaded of; NULL: they are new.
static enum status describe(const char *name, const char *from, const struct weights *w,
                            struct bridge_role *ret)
{
    char absolute[PATH_ROOM] = "";
    if (from && (!realpath(from, absolute) || strlen(absolute) >= sizeof ret->model))
        return status_fail(ST_INVALID, "%s: its path is too long, or cannot be found", from);
    *ret = (struct bridge_role){.bytes = w->bytes,
                                .dt = w->dt,
                                .n_parameters = w->n_parameters,
                                .quantization = w->config->quantization};
    weights_layout_hash(w, ret->layout_hash);
    snprintf(ret->role, sizeof ret->role, "%s", name);
    memcpy(ret->model, absolute, strlen(absolute) + 1);
    return ST_OK;
}

// A model as a server of its whole context has it. option: which one names it.
static enum status plan(const struct run *run, const char *option, const char *from,
                        const char *role, struct model_config **ret_model,
                        struct weights **ret_weights, struct bridge_role *ret)
{
    enum status st;
    CHECK(from == run->config->init ? model_config_load_file(from, ret_model)
                                    : model_config_load(from, ret_model));
    (*ret_model)->rope_context = (*ret_model)->max_positions;
    if (ret_model == &run->mapped.model)
        CHECK(
            model_config_quantise(*ret_model, (enum quantization)run->config->quantization, false));
    CHECK(weights_plan(*ret_model, device_default_dtype(run->own.device), ret_weights));
    st = describe(role, from, *ret_weights, ret);
out:
    return status_context(st, "--%s", option);
}

static enum status load_own(void *context, const struct bridge_role *role, void *base)
{
    const struct run *run = context;
    const struct mapped *m = &run->mapped;
    const bool policy = strcmp(role->role, "policy") == 0;
    struct weights *w = policy                             ? m->policy
                        : strcmp(role->role, "draft") == 0 ? m->draft
                                                           : m->adapter->weights;
    weights_bind(w, base);
    if (!role->model[0]) return ST_OK; // a new adapter
    return policy && run->config->init
               ? weights_init_random(w, run->own.device, (uint64_t)run->config->seed)
               : weights_load(w, run->own.device, role->model);
}

static enum status own_weights(struct run *run, const char *server)
{
    const struct train_config *c = run->config;
    enum status st;
    struct mapped *m = &run->mapped;
    struct bridge_role roles[3];
    char device[LAUNCH_DEVICE_ROOM];
    int n = 0;
    CHECK(device_open(launch_device(run->launch, c->device, device), &run->own.device));
    CHECK(plan(run, c->init ? "init" : "model", c->init ? c->init : c->model, "policy", &m->model,
               &m->policy, &roles[n++]));
    if (c->lora.r) {
        CHECK(plan_adapter(run, run->given ? c->model : roles[0].model, m->policy->dt));
        CHECK(describe(m->role, NULL, m->adapter->weights, &roles[n++]));
    }
    if (c->train_draft)
        CHECK(plan(run, "draft", c->draft, "draft", &m->draft_model, &m->draft, &roles[n++]));
    CHECK(bridge_own(run->own.device, roles, n, server, load_own, run, &m->bridge));
    run->own.device = NULL; // the bridge's
out:
    return st;
}

// What a server may not compute otherwise than the weights' owner does.
static enum status check_argument(const char *args, const char *option, const char *plain,
                                  const char *why)
{
    const char *given = strstr(args, option);
    if (given) given += strlen(option); // at a blank or =
    if (!given || !*given || strncmp(given + 1, plain, strlen(plain)) == 0) return ST_OK;
    return status_fail(ST_UNSUPPORTED,
                       "--server-args with %s: with --sync checkpoint the weights are this "
                       "process's own, %s",
                       option, why);
}

static enum status open_server(struct run *run)
{
    const struct train_config *c = run->config;
    struct bytes arguments = BYTES_INIT;
    char device[LAUNCH_DEVICE_ROOM];
    enum status st;
    const char *args = c->launch.server_args ? c->launch.server_args : "";
    CHECK(check_argument(args, "--quantization", quantization_names[QUANTIZATION_NONE],
                         "whose --quantization the server is given too; leave it away there"));
    CHECK(check_argument(args, "--kv-cache-dtype", kv_cache_names[KV_CACHE_AUTO],
                         "which has keys and values as they are; leave it away, or train with "
                         "--sync shared"));
    if (c->lora.r)
        bytes_printf(&arguments, "--max-adapters 1 --max-lora-rank %" PRId64 " ", c->lora.r);
    if (c->quantization)
        bytes_printf(&arguments, "--quantization %s ", quantization_names[c->quantization]);
    if (c->draft) bytes_puts(&arguments, "--draft {draft} --speculative draft_model:5 ");
    bytes_puts(&arguments, args);
    CHECK(bytes_status(&arguments));
    const struct server_options options = {
        .command = c->server_command,
        .device = launch_device(run->launch, c->device, device),
        .arguments = bytes_text(&arguments),
        .port = c->server_port ? (int)c->server_port + run->launch->ranks.rank : 0,
        .folder = run->own.folder,
        .timeout_s = c->server_timeout};
    CHECK(server_process_new(&options, &run->own.server));
    log_info("--sync checkpoint: every %" PRId64 " steps %s is started anew on %s with the weights "
             "of then; its log is server.log in the run's folder",
             c->restart_interval, c->server_command ? c->server_command : "cw-infer-server",
             server_process_address(run->own.server));
out:
    bytes_release(&arguments);
    return st;
}

enum status run_open_own(struct run *run)
{
    const struct train_config *c = run->config;
    enum status st = ST_OK;
    if (c->sync == SYNC_SHARED) return ST_OK;
    if (run->given) return own_weights(run, "");
    if (!c->server_url) CHECK(open_server(run));
    CHECK(
        own_weights(run, c->server_url ? c->server_url : server_process_address(run->own.server)));
    if (run->resolved.max_staleness > 0 && !c->importance_sampling_correction)
        log_warn("--restart-interval %" PRId64 " without --importance-sampling-correction: nothing "
                 "corrects for the age of the samples",
                 c->restart_interval);
out:
    return st;
}
