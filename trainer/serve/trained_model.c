/* trained_model.c: learning on the served weights: attaching, the server's room for adapters,
 * publishing, gradients and steps. The main thread.
 *
 * The arenas hold one set of weights each, which is live: whatever is sampled next comes from it.
 * Gradients add up over requests, in the order of their numbers, until a step. With --exact each
 * datum is a micro-batch of its own: then neither the cutting into requests nor the token budget is
 * in the order of the sums.
 *
 * The learner's memory is that of the model itself, or that of an adapter: which of them is chosen
 * by what the server has room for, and changes with what clients ask for. Adapters share it: each
 * has its own gradients, moments and residual (its optimizer), one after the other has the rest. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/trained_model.h"
#include "bridge/attach.h"
#include "common/base/log.h"
#include "common/http/http_client.h"
#include "common/model/adapter.h"
#include "trainer/learn/step.h"
#include "trainer/run/options_shared.h"
#include "trainer/run/warnings.h"
#include "trainer/run/mapped.h"
#include "trainer/run/run.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEALTH_MS   10000
#define RESPONSE_MS 60000
#define FROZEN_ROLE "frozen" // of the bridge file, and what requests call it

// ---- the server's adapters ----------------------------------------------------------------------

static enum status ask_unload(struct trained_model *m, const char *adapter)
{
    return http_post(m->server, "/v1/unload_lora_adapter",
                     json_pack("{s:s, s:i}", "lora_name", adapter, "writer_pid", (int)getpid()),
                     RESPONSE_MS);
}

static enum status unload_left(void *context)
{
    struct trained_model *m = context;
    enum status st;
    json_t *status = NULL, *name;
    size_t i;
    int n = 0;
    CHECK(http_get_json(m->server, "/lora/status", RESPONSE_MS, &status));
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

// kept_of: for a copy of that run, which stays.
static enum status make_room(struct trained_model *m, const char *kept_of)
{
    const int max = m->info.max_adapters;
    char adapter[ADAPTER_ROOM], run[RUN_NAME_ROOM];
    enum status st;
    int runs = 0;
    for (;;) {
        json_t *status = NULL;
        CHECK(http_get_json(m->server, "/lora/status", RESPONSE_MS, &status));
        const size_t n = json_array_size(json_object_get(status, "available_adapters"));
        json_decref(status);
        if ((int)n < max) return ST_OK;
        if (snapshots_spare(m->info.snapshots, kept_of, true, adapter)) {
            log_info("the adapter '%s' is unloaded to make room for another", adapter);
            server_adapters_unload(m, adapter);
        } else if (snapshots_abandoned(m->info.snapshots, kept_of, run) && trained_find(m, run)) {
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
    enum status st = make_room(m, kind == KEPT ? name : NULL);
    json_t *body = json_pack("{s:s, s:o}", "lora_name", adapter, key, value);
    if (st == ST_OK)
        st = http_post(m->server, "/v1/load_lora_adapter", json_incref(body), RESPONSE_MS);
    json_decref(body);
    return st == ST_OK ? snapshots_add(m->info.snapshots, kind, name, adapter) : st;
}

// ---- the learner --------------------------------------------------------------------------------

static void close_learner(struct trained_model *m)
{
    learner_free(m->learner);
    adapter_free(m->largest);
    m->learner = NULL;
    m->largest = NULL;
    m->selected = NULL;
}

enum status trained_use_learner(struct trained_model *m, bool adapters)
{
    struct learner_options learner = *m->options->learner;
    const int64_t budget = learner.token_budget;
    const struct learner_shape shape = {
        .longest = m->info.limits.longest, .tokens = budget, .seqs = budget};
    struct learner_config config;
    struct adapter_config *largest;
    json_t *json = NULL;
    enum status st = ST_OK;
    if (m->learner && adapters == (m->largest != NULL)) goto out;
    close_learner(m);
    if (adapters) {
        json = json_pack("{s:i, s:s}", "r", m->max_rank, "target_modules", ".*");
        CHECK(adapter_config_from_json("--max-lora-rank", json, &largest));
        CHECK(adapter_new(largest, m->weights, m->weights->dt, &m->largest));
        if (learner.freeze) log_info("--freeze is of full fine-tuning (rank 0) alone");
        learner.freeze = NULL; // the model is frozen as a whole
    }
    CHECK(learner_config_of(&learner, &shape, 1, &config));
    config.adapter = m->largest;
    config.many_adapters = adapters;
    CHECK(learner_new(m->device, m->model, m->weights, false, &config, &m->learner));
    if (adapters) log_info("memory of the largest adapter that the server holds:");
    memory_log(m->learner, "shared with the server (0 extra)", learner.freeze);
    CHECK(learner_prepare(m->learner));
    if (!adapters) optimizer_clear_grads(learner_info(m->learner)->optimizer);
out:
    json_decref(json);
    if (st != ST_OK) close_learner(m);
    return st;
}

// The frozen model, where the server has one, is the model as it was: if it is of its folder.
static enum status open_snapshots(struct trained_model *m)
{
    const struct bridge_role *frozen = bridge_file_role(bridge_file_of(m->bridge), FROZEN_ROLE);
    struct control_info f;
    struct stat folder, loaded;
    control_info(m->info.control, &f);
    snprintf(m->base, sizeof m->base, "%s", f.loaded);
    const bool is_base = f.updates == 0 && strcmp(f.origin, f.loaded) == 0;
    enum status st = snapshots_new(f.version, is_base, &m->info.snapshots);
    if (st != ST_OK || !frozen) return st;
    if (stat(frozen->model, &folder) == 0 && stat(f.loaded, &loaded) == 0 &&
        folder.st_dev == loaded.st_dev && folder.st_ino == loaded.st_ino) {
        log_info("the model as its folder has it, version 0, is sampled from the server's frozen "
                 "model once a full fine-tune has changed it");
        return snapshots_add(m->info.snapshots, FROZEN, "", FROZEN_ROLE);
    }
    log_info("the server's frozen model (%s) is not of the model's folder (%s): it is left alone",
             frozen->model, f.loaded);
    return ST_OK;
}

enum status trained_open(const struct trained_model_options *options, struct trained_model **ret)
{
    enum status st;
    const struct bridge_role *role;
    const int64_t budget = options->learner->token_budget;
    struct bridge_file *file = NULL;
    json_t *health = NULL;
    struct trained_model *m = calloc(1, sizeof *m);
    if (!m) return status_fail(ST_NO_MEMORY, "out of memory");
    m->options = options;
    // before this process maps what the server shares; a server may have torn weights to restore
    CHECK(bridge_file_open(options->bridge, &file));
    CHECK(http_client_new(file->socket, &m->server));
    CHECK(run_retry(ST_BUSY, unload_left, m));
    CHECK(http_get_json(m->server, "/health", HEALTH_MS, &health));
    CHECK(bridge_attach(options->bridge, NULL, &m->bridge));
    CHECK(warn_roles(bridge_file_of(m->bridge), &role));
    CHECK(role_open(m->bridge, role, &m->model, &m->weights));
    warn_model(m->model, 0);
    CHECK(run_become_writer(m->bridge));
    m->device = bridge_device(m->bridge);
    m->info = (struct trained_model_info){.control = bridge_control(m->bridge),
                                          .folder = role->model,
                                          .socket = bridge_file_of(m->bridge)->socket,
                                          .limits = {.vocab = m->model->vocab_size,
                                                     .longest = m->model->max_positions < budget
                                                                    ? m->model->max_positions
                                                                    : (int)budget,
                                                     .loss_for = options->loss_for},
                                          .max_adapters = m->info.max_adapters,
                                          .runs = options->runs,
                                          .sample_timeout = options->sample_timeout};
    CHECK(open_snapshots(m));
    CHECK(trained_use_learner(m, m->info.max_adapters > 0));
    if (m->largest) warn_adapter(m->largest);
    m->info.max_context = (int)json_integer_value(json_object_get(health, "max_context"));
    *ret = TAKE_PTR(m);
out:
    bridge_file_free(file);
    json_decref(health);
    trained_close(m);
    return st;
}

void trained_close(struct trained_model *m)
{
    if (!m) return;
    const bool whole = m->trainees && !m->trainees->adapter;
    if (m->info.snapshots)
        trained_end_all(m, whole ? "cw-trainer serve ends, and the server goes on with its weights "
                                   "until it loads others"
                                 : "cw-trainer serve ends");
    close_learner(m);
    weights_free(m->weights);
    model_config_free(m->model);
    bridge_detach(m->bridge);
    http_client_free(m->server);
    snapshots_free(m->info.snapshots);
    free(m);
}

// ---- publishing ---------------------------------------------------------------------------------

static enum status write_update(void *context)
{
    struct update *u = context;
    const struct trained_model_info *info = &u->model->info;
    // Before the first byte is written: from here on nothing is taken for what it was.
    snapshots_update(info->snapshots, u->run, control_version(info->control) + 1, u->is_base);
    if (u->write) return u->write(u->context);
    control_set_origin(info->control, u->restore);
    return u->adapter ? adapter_load(u->adapter, u->model->device, u->restore)
                      : weights_load(u->model->weights, u->model->device, u->restore);
}

enum status trained_publish(struct update u)
{
    struct trained_model *m = u.model;
    struct control *control = m->info.control;
    struct publish_times times;
    struct control_info f;
    char role[CONTROL_ROLE_BYTES];
    enum status st = ST_OK;
    control_info(control, &f);
    snprintf(role, sizeof role, u.run[0] ? "adapter:" ADAPTER_PREFIX "%.40s" : "policy", u.run);
    control_set_role(control, role);
    if (u.run[0]) control_set_run(control, u.run);
    if (strcmp(f.snapshot, u.restore) != 0) CHECK(control_set_snapshot(control, u.restore));
    st = bridge_publish(m->bridge, (int64_t)(m->options->quiesce_timeout * 1e3), write_update, &u,
                        &times);
out:
    return status_context(st, "publishing");
}

// ---- learning -----------------------------------------------------------------------------------

enum status trained_forward_backward(struct trained_model *m, const char *run,
                                     const struct forward_backward *request,
                                     struct bytes *ret_response)
{
    const struct step step = {.loss = request->loss};
    const int each = m->options->exact ? 1 : request->n;
    struct update_stats stats = {0};
    struct samples *unpacked, *samples = NULL;
    struct trainee *t;
    enum status st;
    CHECK(trained_select(m, run, &t));
    CHECK(samples_new(request->n, 1, false, &unpacked));
    // The datums as the learner takes them: the first token of each is a prompt, what follows it a
    // completion, of which every token has targets of its own.
    for (int i = 0; i < request->n; i++) {
        const struct datum *d = &request->data[i];
        struct pack_completion *c = &unpacked->completions[i];
        unpacked->groups[i].prompt = d->tokens;
        unpacked->groups[i].n_prompt = 1;
        *c = (struct pack_completion){
            .ids = d->tokens + 1, .n = d->n, .targets = d->targets, .targets_each = d->each};
        for (int k = 0; k < LOSS_INPUTS; k++) c->inputs[k] = d->inputs[k];
    }
    CHECK(samples_begin(unpacked, &samples));
    for (int first = 0; st == ST_OK && first < request->n; first += each)
        st = learner_pass(m->learner, request->forward_only ? PASS_LOSS : PASS_GRADIENTS, samples,
                          first, each, &step, &stats);
    if (st != ST_OK && !request->forward_only) {
        optimizer_clear_grads(learner_info(m->learner)->optimizer);
        status_context(st, "the gradients since the last step are dropped");
    }
    if (st == ST_OK)
        forward_backward_response(request, samples->logprobs, stats.range[STAT_LOSS].sum,
                                  ret_response);
out:
    samples_free(samples);
    return st == ST_OK ? bytes_status(ret_response) : st;
}

static enum status publish_step(void *context, enum status (*write)(void *), void *update,
                                struct publish_times *ret_times)
{
    struct trainee *t = context;
    (void)ret_times;
    trainee_keep(t);
    return trained_publish(
        (struct update){t->model, trainee_source(t), t->adapter, t->restore, false, write, update});
}

enum status trained_optim_step(struct trained_model *m, const char *run, double lr,
                               const struct optimizer_config *adamw, double *ret_norm)
{
    struct trainee *t;
    struct update_stats stats = {0};
    enum status st = trained_select(m, run, &t);
    if (st != ST_OK) return st;
    const struct step step = {.lr = lr, .publish = {publish_step, t}};
    optimizer_configure(trainee_optimizer(t), adamw);
    st = learner_step(m->learner, NULL, 0, 0, &step, &stats);
    if (st == ST_OK && stats.skipped) st = ST_INVALID; // the sentence is there
    if (st == ST_OK) {
        *ret_norm = stats.grad_norm;
        t->steps++;
        t->unsaved = true;
    }
    optimizer_clear_grads(learner_info(m->learner)->optimizer);
    return status_context(st, "optim_step");
}
