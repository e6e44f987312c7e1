/* trained_runs.c: training runs: how they begin, are loaded and saved, and what is kept of them to
 * sample from. The main thread.
 *
 * Full fine-tuning has the model to itself: beginning it puts all other runs away, with the
 * snapshots of theirs, since what an adapter gives depends on the model beneath it; beginning a run
 * with an adapter puts it away, and makes the model that of its folder again. What a run did not
 * save is gone then, which the log says.
 *
 * Whatever an adapter starts from is written as a folder first (adapter_folder_start()), RUN/start,
 * and published from there: so the server can restore it, and none but it, if its update is torn.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "trainer/learn/learner.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/options_shared.h"
#include "trainer/run/mapped.h"
#include "trainer/run/warnings.h"
#include "trainer/run/stop.h"
#include "trainer/serve/trained_model.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define LORA_ALPHA      32 // the API's scale is 32 / rank
#define SAMPLES_POLL_MS 5
#define MODELS_LOGGED   4 // loads of whole models to sample from

const char *trainee_source(const struct trainee *t)
{
    return t->adapter ? t->run : "";
}

struct optimizer *trainee_optimizer(const struct trainee *t)
{
    return t->adapter ? t->optimizer : learner_info(t->model->learner)->optimizer;
}

struct trainee *trained_find(const struct trained_model *m, const char *run)
{
    struct trainee *t = m->trainees;
    while (t && strcmp(t->run, run) != 0) t = t->next;
    return t;
}

enum status trained_select(struct trained_model *m, const char *run, struct trainee **ret)
{
    struct trainee *t = trained_find(m, run);
    if (!t)
        return status_fail(ST_MISMATCH,
                           "%s has the weights no more, as another run took its place (or its "
                           "beginning failed): go on from one of its checkpoints (load_weights)",
                           run);
    if (t->adapter && m->selected != t) {
        enum status st = learner_use_adapter(m->learner, t->adapter, t->optimizer);
        if (st != ST_OK) return st;
        m->selected = t;
    }
    *ret = t;
    return ST_OK;
}

static void set_restore(struct trained_model *m, struct trainee *t, const char *folder)
{
    snprintf(t->restore, sizeof t->restore, "%s", folder);
    snapshots_set_restore(m->info.snapshots, trainee_source(t), folder);
}

// ---- their end ----------------------------------------------------------------------------------

static void trainee_free(struct trained_model *m, struct trainee *t)
{
    if (!t) return;
    if (m->selected == t) m->selected = NULL;
    optimizer_free(t->optimizer);
    bridge_unmap(t->arena);
    if (t->made) server_adapters_unload(m, t->adapter_name);
    if (!t->adapter && t->restore[0]) snapshots_set_restore(m->info.snapshots, "", "");
    adapter_free(t->adapter);
    json_decref(t->base);
    if (t->start[0]) file_remove_tree(t->start);
    free(t);
}

void trained_put_away(struct trained_model *m, struct trainee *t, const char *why)
{
    LIST_REMOVE(m->trainees, t);
    log_line(t->unsaved ? LOG_WARN : LOG_INFO, "%s ends after %" PRId64 " steps%s: %s", t->run,
             t->steps, t->unsaved ? ", the last not saved" : "", why);
    server_adapters_unload_spare(m, t->run);
    trainee_free(m, t);
}

void trained_end_all(struct trained_model *m, const char *why)
{
    while (m->trainees) trained_put_away(m, m->trainees, why);
    snapshots_forget(m->info.snapshots, NULL);
    server_adapters_unload_spare(m, NULL);
}

// ---- beginning ----------------------------------------------------------------------------------

static bool is_loaded(struct trained_model *m, const char *folder)
{
    struct control_info f;
    control_info(m->info.control, &f);
    return f.updates == 0 && strcmp(f.origin, folder) == 0;
}

// The model's weights become those of a folder, unless they are.
static enum status load_folder(struct trained_model *m, const char *folder)
{
    const struct update update = {
        .model = m, .run = "", .restore = folder, .is_base = strcmp(m->base, folder) == 0};
    if (folder[0] != '/')
        return status_fail(ST_INVALID, "the server loaded no folder (%s) to start a run from",
                           folder);
    if (is_loaded(m, folder)) return ST_OK;
    enum status st = weights_check(m->weights, folder);
    return st == ST_OK ? trained_publish(update) : st;
}

bool trained_is_adapter(const char *folder)
{
    char path[PATH_ROOM];
    return path_put(path, folder, ADAPTER_CONFIG_FILE) == ST_OK && file_exists(path);
}

// The run's weights become those that it begins with, or goes on from, without steps of its own.
static enum status load(struct trained_model *m, struct trainee *t, const struct beginning *b)
{
    const char *folder = b->folder ? b->folder : m->base;
    struct checkpoint c = {0};
    struct optimizer *optimizer = trainee_optimizer(t);
    enum status st;
    trainee_keep(t);
    if (t->adapter) {
        if (b->folder) CHECK(warn_adapter_base(folder, t->base, m->options->exact));
        CHECK(adapter_folder_start(t->start, t->adapter, b->folder, (uint64_t)b->seed,
                                   t->adapter_name, t->base));
        set_restore(m, t, t->start);
        CHECK(trained_publish((struct update){
            .model = m, .run = t->run, .adapter = t->adapter, .restore = t->start}));
    } else {
        set_restore(m, t, folder);
        CHECK(load_folder(m, folder));
    }
    CHECK(optimizer_reset(optimizer));
    if (b->with_optimizer) {
        CHECK(checkpoint_read(folder, &c));
        CHECK(checkpoint_load_optimizer(folder, c.optimizer_steps, optimizer));
    }
    t->steps = 0;
    t->unsaved = false;
out:
    json_decref(c.state);
    return st;
}

enum status trained_load(struct trained_model *m, const char *run, const struct beginning *b)
{
    struct trainee *t;
    enum status st = trained_select(m, run, &t);
    if (st != ST_OK) return st;
    if (trained_is_adapter(b->folder) != (t->adapter != NULL))
        return status_fail(ST_MISMATCH, "%s holds %s, and %s trains %s", b->folder,
                           t->adapter ? "a whole model" : "an adapter", t->run,
                           t->adapter ? "an adapter (a rank above 0)" : "the whole model (rank 0)");
    return load(m, t, b);
}

// Reads PEFT's config of what a run begins with, or makes it: the adapted matrices' names, between
// commas, or PEFT's word for all but the head.
static enum status read_config(const struct trained_model *m, const struct beginning *b,
                               struct adapter_config **ret)
{
    enum status st;
    struct bytes targets = BYTES_INIT;
    json_t *json = NULL;
    const bool all_linear =
        b->trains[RUN_ATTENTION] && b->trains[RUN_MLP] && !b->trains[RUN_UNEMBED];
    if (b->folder) return adapter_config_load(b->folder, ret);
    bytes_puts(&targets, all_linear ? "all-linear" : ",");
    for (int i = 0; i < m->weights->n_tensors && !all_linear; i++) {
        const int tensor = adapter_nth(m->weights, i);
        const enum tensor_role role = adapter_role(m->weights, tensor);
        const bool attention = role >= ROLE_QKV && role < ROLE_POST_ATTN_NORM;
        char name[sizeof m->weights->tensors->name], entry[sizeof name + 2];
        if (role == ROLE_COUNT || !b->trains[role == ROLE_HEAD ? RUN_UNEMBED
                                             : attention       ? RUN_ATTENTION
                                                               : RUN_MLP])
            continue;
        adapter_module(m->weights, tensor, name, sizeof name);
        // of "model.layers.0.mlp.up_proj" it is "mlp.up_proj", which tells attention's matrices
        // from an MLP's in every family
        const char *end = strrchr(name, '.');
        while (end && end > name && end[-1] != '.') end--;
        snprintf(entry, sizeof entry, ",%s,", end ? end : name);
        if (!strstr(bytes_text(&targets), entry)) bytes_puts(&targets, entry + 1);
    }
    CHECK(bytes_status(&targets));
    const struct lora_options lora = {
        .r = b->rank, .alpha = LORA_ALPHA, .targets = bytes_text(&targets)};
    CHECK(lora_config_json(&lora, m->info.folder, &json));
    st = adapter_config_from_json("lora_config", json, ret);
out:
    json_decref(json);
    bytes_release(&targets);
    return st;
}

static enum status begin_adapter(struct trained_model *m, struct trainee *t,
                                 const struct beginning *b)
{
    struct adapter_config *config;
    char role[sizeof((struct bridge_role *)0)->role], hash[65];
    enum status st;
    CHECK(read_config(m, b, &config));
    CHECK(adapter_new(config, m->weights, m->weights->dt, &t->adapter));
    // the server makes it, and this process maps it
    CHECK(server_adapters_add(m, LIVE, t->run, t->adapter_name, "config",
                              json_incref(t->adapter->config->source)));
    t->made = true;
    snprintf(role, sizeof role, "adapter:%s", t->adapter_name);
    CHECK(bridge_map(m->bridge, role, &t->arena));
    weights_layout_hash(t->adapter->weights, hash);
    if (strcmp(hash, t->arena->role->layout_hash) != 0)
        FAIL(ST_MISMATCH, "the server lays the adapter '%s' out otherwise than this build does",
             t->adapter_name);
    weights_bind(t->adapter->weights, shared_memory_data(t->arena->memory));
    if (m->trainees && !m->trainees->adapter)
        trained_put_away(m, m->trainees, "an adapter is trained from here on");
    CHECK(load_folder(m, m->base));
    CHECK(adapter_base_ask(m->server, &t->base));
    CHECK(trained_use_learner(m, true));
    CHECK(optimizer_new_whole(m->device, t->adapter->weights, &m->options->learner->adamw,
                              &t->optimizer));
    CHECK(load(m, t, b));
    log_info("%s trains an adapter of rank %d%s%s", t->run, t->adapter->max_rank,
             b->folder ? " from " : "", b->folder ? b->folder : "");
out:
    return st;
}

enum status trained_begin(struct trained_model *m, const char *run, const struct beginning *b)
{
    enum status st;
    const bool adapter = b->folder ? trained_is_adapter(b->folder) : b->rank > 0;
    struct trainee *t = calloc(1, sizeof *t);
    struct status_kept kept;
    if (!t) return status_fail(ST_NO_MEMORY, "no memory for a training run");
    t->model = m;
    snprintf(t->run, sizeof t->run, "%s", run);
    snprintf(t->adapter_name, sizeof t->adapter_name, ADAPTER_PREFIX "%.40s", run);
    if (adapter) {
        CHECK(path_put(t->start, m->options->runs, "%s/start", run));
        CHECK(begin_adapter(m, t, b));
    } else {
        trained_end_all(m, "a full fine-tune (rank 0) begins");
        CHECK(trained_use_learner(m, false));
        CHECK(load(m, t, b));
        control_set_run(m->info.control, run);
        log_info("%s trains the model from %s", run, b->folder ? b->folder : m->base);
    }
    t->next = m->trainees;
    m->trainees = t;
    return ST_OK;
out:
    status_keep(&kept, st); // the server may have its own to say when it is asked to clean up
    trainee_free(m, t);
    return status_recall(&kept);
}

void trained_end(struct trained_model *m, const char *run)
{
    struct trainee *t = trained_find(m, run);
    if (t) trained_put_away(m, t, "its client has finished");
}

// ---- saving, and what can be sampled ------------------------------------------------------------

enum status trained_save(struct trained_model *m, const char *run, const char *folder,
                         bool with_optimizer)
{
    struct trainee *t = NULL;
    enum status st = trained_select(m, run, &t);
    if (st != ST_OK) return st;
    struct model_folder model = {.weights = m->weights,
                                 .as = t->adapter ? t->adapter->weights->dt : m->weights->dt,
                                 .source_folder = m->info.folder,
                                 .adapter = t->adapter,
                                 .adapter_base = t->base};
    if (with_optimizer) {
        if (t->adapter) model.adapter_name = t->adapter_name;
        model.optimizer = trainee_optimizer(t);
        model.state = json_pack("{s:I, s:i}", "step", (json_int_t)optimizer_steps(model.optimizer),
                                "data_index", 0);
        if (!model.state) FAIL(ST_NO_MEMORY, "no memory for a checkpoint");
    }
    sweep_beside(folder, true);
    CHECK(model_folder_write(folder, m->device, &model));
    if (!with_optimizer) goto out;
    set_restore(m, t, folder);
    t->unsaved = false;
out:
    json_decref(model.state);
    return st;
}

enum status trained_snapshot(struct trained_model *m, const char *run, bool wanted,
                             struct snapshot *ret)
{
    struct trainee *t;
    enum status st = trained_select(m, run, &t);
    if (st != ST_OK) return st;
    t->wanted = t->wanted || wanted;
    snprintf(ret->run, sizeof ret->run, "%s", trainee_source(t));
    ret->version = snapshots_version(m->info.snapshots, ret->run);
    ret->base = !ret->run[0] && ret->version == snapshots_base(m->info.snapshots);
    return ST_OK;
}

void trainee_keep(struct trainee *t)
{
    struct trained_model *m = t->model;
    struct snapshots *all = m->info.snapshots;
    const bool wanted = t->wanted && t->adapter && m->options->keep_snapshots > 0;
    const uint64_t version = snapshots_version(all, t->run);
    char copy[ADAPTER_ROOM], spare[ADAPTER_ROOM];
    t->wanted = false;
    if (!wanted) return;
    while (snapshots_kept(all, t->run, NULL) >= m->options->keep_snapshots &&
           snapshots_spare(all, t->run, false, spare)) {
        log_debug("%s: the snapshot '%s' is dropped", t->run, spare);
        server_adapters_unload(m, spare);
    }
    snprintf(copy, sizeof copy, "%.38s@%" PRIu64, t->adapter_name, version);
    if (server_adapters_add(m, KEPT, t->run, copy, "copy_of", json_string(t->adapter_name)) ==
        ST_OK) {
        log_debug("%s: the snapshot '%s' is kept", t->run, copy);
        return;
    }
    log_line(t->warned ? LOG_DEBUG : LOG_WARN,
             "%s: the snapshot of version %" PRIu64 " is not kept, nor, unsaid, what follows: %s",
             t->run, version, status_message());
    t->warned = true;
}

// Before a saved model takes its place: samples of the model that goes come to their end, and
// others wait until snapshots_hold() is over. Of two clients that sample a model each, none's
// request would else see the same weights from its first token to its last.
static enum status end_samples(struct trained_model *m)
{
    const int64_t deadline = clock_deadline_ns((int64_t)(m->options->sample_timeout * 1e3));
    enum status st = ST_OK;
    while (st == ST_OK && snapshots_hold(m->info.snapshots, true) > 0 &&
           clock_ms_until(deadline) > 0) {
        if (stop_requested()) return status_fail(ST_CANCELLED, "the Tinker API is stopping");
        st = control_owner_alive(m->info.control);
        if (st == ST_OK) clock_sleep_ms(SAMPLES_POLL_MS);
    }
    return st;
}

// The model itself becomes a saved one, as there is one copy of the weights.
static enum status load_saved_model(struct trained_model *m, struct snapshot *which,
                                    const char *folder)
{
    const bool was_there = is_loaded(m, folder);
    enum status st;
    if (!was_there) CHECK(end_samples(m));
    trained_end_all(m, "a saved model is sampled in its place");
    CHECK(load_folder(m, folder));
    which->run[0] = 0;
    which->version = snapshots_version(m->info.snapshots, "");
    if (was_there) goto out;
    if (++m->n_models <= MODELS_LOGGED)
        log_info("%s is loaded as the model, to sample from", which->path);
    if (m->n_models == MODELS_LOGGED)
        log_warn("saved models are sampled in turn, and each is loaded anew when it is its turn, "
                 "as there is one copy of the weights: a cw-infer-server of its own for each is "
                 "faster. This is said once");
out:
    return st;
}

static enum status load_saved_adapter(struct trained_model *m, const struct snapshot *which,
                                      const char *folder)
{
    char name[ADAPTER_ROOM];
    enum status st;
    if (!snapshots_base(
            m->info.snapshots)) { // which none but a full fine-tune or a saved model changes
        CHECK(end_samples(m));
        if (m->trainees)
            trained_put_away(m, m->trainees, "an adapter of the model's folder is sampled");
        CHECK(load_folder(m, m->base));
    }
    snprintf(name, sizeof name, ADAPTER_PREFIX "saved-%d", ++m->n_saved);
    CHECK(server_adapters_add(m, LOADED, which->path, name, "lora_path", json_string(folder)));
    log_info("%s is loaded as the adapter '%s', to sample from", which->path, name);
out:
    return st;
}

enum status trained_load_saved(struct trained_model *m, struct snapshot *which, const char *folder,
                               struct snapshot_use *ret)
{
    enum status st;
    if (snapshots_use(m->info.snapshots, which, ret)) return ST_OK; // by now
    st = trained_is_adapter(folder) ? load_saved_adapter(m, which, folder)
                                    : load_saved_model(m, which, folder);
    snapshots_hold(m->info.snapshots, false);
    if (st == ST_OK) snapshots_use(m->info.snapshots, which, ret);
    return st;
}
