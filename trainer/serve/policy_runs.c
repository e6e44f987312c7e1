/* policy_runs.c: training runs: how they begin, are loaded and saved, and what is kept of them to
 * sample from. The main thread.
 *
 * Full fine-tuning has the model to itself: beginning it puts all other runs away, with the
 * snapshots of theirs, since what an adapter gives depends on the model beneath it; beginning a run
 * with an adapter puts it away, and makes the model that of its folder again. What a run did not
 * save is gone then, which the log says.
 *
 * Whatever an adapter starts from is written as a folder first (adapter_folder.h), RUN/start, and
 * published from there: so the server can restore it, and none but it, if its update is torn. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/learn/learner.h"
#include "trainer/run/adapter_folder.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/same_run.h"
#include "trainer/run/stop.h"
#include "trainer/serve/policy_impl.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define LORA_ALPHA      32 // the API's scale is 32 / rank
#define SAMPLES_LOOK_MS 5
#define MODELS_SAID     4 // loads of whole models to sample from

static const char *adapter_name(const struct trainee *t, char ret[SOURCE_ROOM])
{
    snprintf(ret, SOURCE_ROOM, ADAPTER_PREFIX "%.40s", t->run);
    return ret;
}

const char *trainee_source(const struct trainee *t)
{
    return t->adapter ? t->run : "";
}

static struct trainee *find(const struct policy *p, const char *run)
{
    struct trainee *t = p->trainees;
    while (t && strcmp(t->run, run) != 0) t = t->next;
    return t;
}

enum status policy_select(struct policy *p, const char *run, struct trainee **ret)
{
    struct trainee *t = find(p, run);
    if (!t)
        return status_fail(ST_MISMATCH,
                           "%s has the weights no more, as another run took its place (or its "
                           "beginning failed): go on from one of its checkpoints (load_weights)",
                           run);
    if (t->adapter && p->selected != t) {
        enum status st = learner_use_adapter(p->learner, t->adapter, t->optimizer);
        if (st != ST_OK) return st;
        p->selected = t;
    }
    *ret = t;
    return ST_OK;
}

static void set_restore(struct policy *p, struct trainee *t, const char *folder)
{
    snprintf(t->restore, sizeof t->restore, "%s", folder);
    sources_set_restore(p->sources, trainee_source(t), folder);
}

// ---- the server's room --------------------------------------------------------------------------

static void unload(struct policy *p, const char *adapter)
{
    char name[SOURCE_ROOM];
    snprintf(name, sizeof name, "%s", adapter);
    sources_remove(p->sources, name);
    if (control_owner_alive(policy_control(p)) != ST_OK) return;
    if (server_adapters_unload(p->server, name) != ST_OK)
        log_warn("the adapter '%s' stays on the server: %s", name, status_message());
}

static void trainee_free(struct policy *p, struct trainee *t)
{
    char name[SOURCE_ROOM];
    if (!t) return;
    if (p->selected == t) p->selected = NULL;
    optimizer_free(t->optimizer);
    bridge_unmap(t->arena);
    if (t->made) unload(p, adapter_name(t, name));
    if (!t->adapter && t->restore[0]) sources_set_restore(p->sources, "", "");
    adapter_free(t->adapter);
    json_decref(t->base);
    if (t->start[0]) file_remove_tree(t->start);
    free(t);
}

// Takes it from the list, with its snapshots, and frees it.
static void put_away(struct policy *p, struct trainee *t, const char *why)
{
    struct trainee **link = &p->trainees;
    char kept[SOURCE_ROOM];
    while (*link != t) link = &(*link)->next;
    *link = t->next;
    log_line(t->unsaved ? LOG_WARN : LOG_INFO, "%s ends after %" PRId64 " steps%s: %s", t->run,
             t->steps, t->unsaved ? ", the last not saved" : "", why);
    while (sources_spare(p->sources, t->run, false, kept)) unload(p, kept);
    trainee_free(p, t);
}

void policy_release_runs(struct policy *p)
{
    char adapter[SOURCE_ROOM];
    while (p->trainees)
        put_away(p, p->trainees,
                 p->trainees->adapter ? "cw-trainer serve ends"
                                      : "cw-trainer serve ends, and the server goes on with its "
                                        "weights until it loads others");
    while (p->sources && sources_spare(p->sources, NULL, true, adapter)) unload(p, adapter);
}

// So that the server takes one more adapter: snapshots go, those first that were not sampled for
// the longest; and, for a run, those whose clients are gone. kept_of: for a copy of that run, which
// pushes no other run's out.
static enum status make_room(struct policy *p, bool for_run, const char *kept_of)
{
    const int max = policy_max_adapters(p);
    char adapter[SOURCE_ROOM], run[RUN_NAME_ROOM];
    enum status st;
    int n, runs = 0;
    for (;;) {
        CHECK(server_adapters_count(p->server, &n));
        if (n < max) return ST_OK;
        if (sources_spare(p->sources, kept_of, true, adapter)) {
            log_info("the adapter '%s' is unloaded to make room for another", adapter);
            unload(p, adapter);
        } else if (for_run && sources_abandoned(p->sources, run) && find(p, run)) {
            put_away(p, find(p, run), "its client is gone, and another wants its place");
        } else {
            break;
        }
    }
    for (const struct trainee *t = p->trainees; t; t = t->next) runs++;
    FAIL(ST_INVALID,
         "the server has room for %d adapters, and all are in use, %d by training runs: finish "
         "one (its client's end frees it), or start cw-infer-server with a larger --max-adapters",
         max, runs);
out:
    return st;
}

// ---- beginning ----------------------------------------------------------------------------------

struct load {
    struct policy *policy;
    const struct trainee *trainee;
    const char *folder;
};

static enum status load_model(void *context)
{
    struct load *l = context;
    struct policy *p = l->policy;
    control_set_origin(policy_control(p), l->folder);
    return weights_load(p->weights, bridge_device(p->bridge), l->folder);
}

static enum status load_adapter(void *context)
{
    struct load *l = context;
    control_set_origin(policy_control(l->policy), l->folder);
    return adapter_load(l->trainee->adapter, bridge_device(l->policy->bridge), l->folder);
}

// The folder that the server loaded, with all links followed, as the control page has it.
static enum status base_folder(struct policy *p, char ret[PATH_ROOM])
{
    struct control_facts f;
    control_facts(policy_control(p), &f);
    if (f.loaded[0] != '/')
        return status_fail(ST_INVALID, "the server loaded no folder (%s) to start a run from",
                           f.loaded);
    snprintf(ret, PATH_ROOM, "%s", f.loaded);
    return ST_OK;
}

static bool has_taken(struct policy *p, const char *folder)
{
    struct control_facts f;
    control_facts(policy_control(p), &f);
    return f.updates == 0 && strcmp(f.origin, folder) == 0;
}

// The model's weights become those of a folder, unless they are.
static enum status take_folder(struct policy *p, const char *folder)
{
    struct control_facts f;
    struct load load = {p, NULL, folder};
    enum status st;
    if (has_taken(p, folder)) return ST_OK;
    control_facts(policy_control(p), &f);
    CHECK(weights_check(p->weights, folder));
    st = policy_publish(p, "", folder, strcmp(f.loaded, folder) == 0, load_model, &load);
out:
    return st;
}

static enum status load_optimizer(struct policy *p, const struct trainee *t, const char *folder)
{
    struct checkpoint c = {0};
    enum status st;
    CHECK(checkpoint_read(folder, &c));
    st = checkpoint_load_optimizer(folder, &c, policy_optimizer(p, t));
out:
    checkpoint_release(&c);
    return st;
}

bool policy_is_adapter(const char *folder)
{
    char path[PATH_ROOM];
    return path_put(path, folder, ADAPTER_CONFIG_FILE) == ST_OK && file_exists(path);
}

// The adapter becomes a folder's, or (NULL) a new one.
static enum status start_adapter(struct policy *p, struct trainee *t, const char *folder,
                                 uint64_t seed)
{
    struct load load = {p, t, t->start};
    char name[SOURCE_ROOM];
    enum status st;
    if (folder) CHECK(adapter_base_notice(folder, t->base, p->options->exact));
    CHECK(adapter_folder_start(t->start, t->adapter, folder, seed, adapter_name(t, name), t->base));
    set_restore(p, t, t->start);
    st = policy_publish(p, t->run, t->start, false, load_adapter, &load);
out:
    return st;
}

static enum status load(struct policy *p, struct trainee *t, const char *folder,
                        bool with_optimizer)
{
    enum status st = ST_OK;
    if (policy_is_adapter(folder) != (t->adapter != NULL))
        FAIL(ST_MISMATCH, "%s holds %s, and %s trains %s", folder,
             t->adapter ? "a whole model" : "an adapter", t->run,
             t->adapter ? "an adapter (a rank above 0)" : "the whole model (rank 0)");
    policy_keep(p, t);
    if (t->adapter) {
        CHECK(start_adapter(p, t, folder, 0));
    } else {
        set_restore(p, t, folder);
        CHECK(take_folder(p, folder));
    }
    CHECK(optimizer_reset(policy_optimizer(p, t)));
    if (with_optimizer) CHECK(load_optimizer(p, t, folder));
    t->steps = 0;
    t->unsaved = false;
out:
    return st;
}

enum status policy_load(struct policy *p, const char *run, const char *folder, bool with_optimizer)
{
    struct trainee *t = NULL;
    enum status st = policy_select(p, run, &t);
    return st == ST_OK ? load(p, t, folder, with_optimizer) : st;
}

// "model.layers.0.mlp.up_proj": "mlp.up_proj", which tells attention's matrices from an MLP's in
// every family.
static const char *module_end(const char *module)
{
    const char *at = strrchr(module, '.');
    while (at && at > module && at[-1] != '.') at--;
    return at ? at : module;
}

static bool is_wanted(const struct beginning *b, enum tensor_role role)
{
    if (role == ROLE_COUNT) return false;
    if (role == ROLE_HEAD) return b->unembed;
    return role >= ROLE_QKV && role < ROLE_POST_ATTN_NORM ? b->attention : b->mlp;
}

// The adapted matrices' names, between commas; PEFT's word for all but the head.
static enum status target_names(const struct policy *p, const struct beginning *b, struct bytes *to)
{
    const bool all_linear = b->attention && b->mlp && !b->unembed;
    bytes_puts(to, all_linear ? "all-linear" : ",");
    for (int i = 0; i < p->weights->n_tensors && !all_linear; i++) {
        const int tensor = adapter_nth(p->weights, i);
        char name[sizeof p->weights->tensors->name], entry[sizeof name + 2];
        if (!is_wanted(b, adapter_role(p->weights, tensor))) continue;
        adapter_module(p->weights, tensor, name, sizeof name);
        snprintf(entry, sizeof entry, ",%s,", module_end(name));
        if (!strstr(bytes_text(to), entry)) bytes_puts(to, entry + 1);
    }
    return bytes_status(to);
}

// PEFT's config of what a run begins with.
static enum status read_config(const struct policy *p, const struct beginning *b,
                               struct adapter_config **ret)
{
    enum status st;
    struct bytes targets = BYTES_INIT;
    json_t *json = NULL;
    if (b->folder) return adapter_config_load(b->folder, ret);
    CHECK(target_names(p, b, &targets));
    CHECK(adapter_config_json(b->rank, LORA_ALPHA, 0, false, bytes_text(&targets), &json));
    if (json_object_set_new(json, "base_model_name_or_path", json_string(p->folder)))
        FAIL(ST_NO_MEMORY, "no memory for an adapter's config");
    st = adapter_config_from_json("lora_config", json, ret);
out:
    json_decref(json);
    bytes_release(&targets);
    return st;
}

// The server makes the adapter, and this process maps it.
static enum status open_adapter(struct policy *p, struct trainee *t, struct adapter_config *config)
{
    char name[SOURCE_ROOM], role[sizeof((struct bridge_role *)0)->role], hash[65];
    enum status st;
    CHECK(adapter_new(config, p->weights, p->weights->dt, &t->adapter));
    adapter_name(t, name);
    snprintf(role, sizeof role, "adapter:%s", name);
    CHECK(make_room(p, true, NULL));
    CHECK(server_adapters_make(p->server, name, t->adapter->config->source));
    t->made = true;
    CHECK(bridge_map(p->bridge, role, &t->arena));
    weights_layout_hash(t->adapter->weights, hash);
    if (strcmp(hash, t->arena->role->layout_hash) != 0)
        FAIL(ST_MISMATCH, "the server lays the adapter '%s' out otherwise than this build does",
             name);
    weights_bind(t->adapter->weights, shared_memory_data(t->arena->memory));
    CHECK(sources_add_run(p->sources, t->run, name));
out:
    return st;
}

static enum status begin_adapter(struct policy *p, struct trainee *t, const struct beginning *b)
{
    char base[PATH_ROOM];
    struct adapter_config *config;
    enum status st;
    CHECK(read_config(p, b, &config));
    CHECK(open_adapter(p, t, config));
    if (p->trainees && !p->trainees->adapter)
        put_away(p, p->trainees, "an adapter is trained from here on");
    CHECK(base_folder(p, base));
    CHECK(take_folder(p, base));
    CHECK(server_adapters_base(p->server, &t->base));
    CHECK(policy_use_learner(p, true));
    CHECK(optimizer_new_whole(bridge_device(p->bridge), t->adapter->weights,
                              &p->options->learning.adamw, &t->optimizer));
    optimizer_clear_grads(t->optimizer);
    CHECK(start_adapter(p, t, b->folder, b->seed));
    if (b->with_optimizer) CHECK(load_optimizer(p, t, b->folder));
    log_info("%s trains an adapter of rank %d%s%s", t->run, t->adapter->max_rank,
             b->folder ? " from " : "", b->folder ? b->folder : "");
out:
    return st;
}

// Snapshots that are adapters are of the model beneath them.
static void unload_snapshots(struct policy *p)
{
    char adapter[SOURCE_ROOM];
    sources_forget(p->sources, NULL);
    while (sources_spare(p->sources, NULL, true, adapter)) unload(p, adapter);
}

static enum status begin_model(struct policy *p, struct trainee *t, const struct beginning *b)
{
    char base[PATH_ROOM];
    enum status st = ST_OK;
    while (p->trainees) put_away(p, p->trainees, "a full fine-tune (rank 0) begins");
    unload_snapshots(p);
    if (!b->folder) CHECK(base_folder(p, base));
    CHECK(policy_use_learner(p, false));
    CHECK(load(p, t, b->folder ? b->folder : base, b->with_optimizer));
    control_set_run(policy_control(p), t->run);
    log_info("%s trains the model from %s", t->run, b->folder ? b->folder : base);
out:
    return st;
}

enum status policy_begin(struct policy *p, const char *run, const struct beginning *b)
{
    enum status st;
    const bool adapter = b->folder ? policy_is_adapter(b->folder) : b->rank > 0;
    struct trainee *t = calloc(1, sizeof *t);
    struct status_kept kept;
    if (!t) return status_fail(ST_NO_MEMORY, "no memory for a training run");
    snprintf(t->run, sizeof t->run, "%s", run);
    if (adapter) CHECK(path_put(t->start, p->options->runs, "%s/start", run));
    CHECK((adapter ? begin_adapter : begin_model)(p, t, b));
    t->next = p->trainees;
    p->trainees = t;
    return ST_OK;
out:
    status_keep(&kept, st); // the server may have its own to say when it is asked to clean up
    trainee_free(p, t);
    return status_recall(&kept);
}

void policy_end(struct policy *p, const char *run)
{
    struct trainee *t = find(p, run);
    if (t) put_away(p, t, "its client has finished");
}

// ---- saving, and what can be sampled ------------------------------------------------------------

enum status policy_save(struct policy *p, const char *run, const char *folder, bool with_optimizer)
{
    struct trainee *t = NULL;
    struct model_folder model = {.source_folder = p->folder};
    struct checkpoint c = {0};
    char name[SOURCE_ROOM];
    enum status st;
    CHECK(policy_select(p, run, &t));
    model.weights = p->weights;
    model.as = t->adapter ? t->adapter->weights->dt : p->weights->dt;
    model.adapter = t->adapter;
    if (t->adapter) c.same = adapter_state(with_optimizer ? adapter_name(t, name) : NULL, t->base);
    if (with_optimizer) {
        model.optimizer = policy_optimizer(p, t);
        c.step = optimizer_steps(model.optimizer);
        model.state = checkpoint_json(&c, &model);
    } else {
        model.state = json_incref(c.same);
    }
    if (!model.state && (t->adapter || with_optimizer))
        FAIL(ST_NO_MEMORY, "no memory for a checkpoint");
    CHECK(model_folder_write(folder, bridge_device(p->bridge), &model));
    if (!with_optimizer) goto out;
    set_restore(p, t, folder);
    t->unsaved = false;
out:
    json_decref(model.state);
    checkpoint_release(&c);
    return st;
}

enum status policy_snapshot(struct policy *p, const char *run, bool wanted, struct snapshot *ret)
{
    struct trainee *t = NULL;
    enum status st = policy_select(p, run, &t);
    if (st != ST_OK) return st;
    t->wanted = t->wanted || wanted;
    snprintf(ret->run, sizeof ret->run, "%s", trainee_source(t));
    ret->version = sources_version(p->sources, ret->run);
    ret->base = !ret->run[0] && ret->version == sources_base(p->sources);
    return ST_OK;
}

static enum status keep(struct policy *p, const struct trainee *t)
{
    char name[SOURCE_ROOM], copy[SOURCE_ROOM], spare[SOURCE_ROOM];
    enum status st;
    while (sources_count_kept(p->sources, t->run) >= p->options->keep_snapshots &&
           sources_spare(p->sources, t->run, false, spare)) {
        log_debug("%s: the snapshot '%s' is dropped", t->run, spare);
        unload(p, spare);
    }
    CHECK(make_room(p, false, t->run));
    snprintf(copy, sizeof copy, "%.38s@%" PRIu64, adapter_name(t, name),
             sources_version(p->sources, t->run));
    CHECK(server_adapters_copy(p->server, copy, name));
    CHECK(sources_add_kept(p->sources, t->run, copy));
    log_debug("%s: the snapshot '%s' is kept", t->run, copy);
out:
    return st;
}

void policy_keep(struct policy *p, struct trainee *t)
{
    const bool wanted = t->wanted && t->adapter && p->options->keep_snapshots > 0;
    t->wanted = false;
    if (!wanted || keep(p, t) == ST_OK) return;
    log_line(t->told ? LOG_DEBUG : LOG_WARN,
             "%s: the snapshot of version %" PRIu64 " is not kept, nor, unsaid, what follows: %s",
             t->run, sources_version(p->sources, t->run), status_message());
    t->told = true;
}

// Before a saved model takes its place: samples of the model that goes come to their end, and
// others wait until sources_hold() is over. Of two clients that sample a model each, none's request
// would else see the same weights from its first token to its last.
static enum status end_samples(struct policy *p)
{
    const int64_t deadline = clock_deadline_ns((int64_t)(p->options->sample_timeout * 1e3));
    enum status st = ST_OK;
    sources_hold(p->sources, true);
    while (sources_users(p->sources) > 0 && clock_ms_until(deadline) > 0) {
        if (stop_requested()) FAIL(ST_CANCELLED, "the Tinker API is stopping");
        CHECK(control_owner_alive(policy_control(p)));
        clock_sleep_ms(SAMPLES_LOOK_MS);
    }
out:
    return st;
}

static void say_loaded(struct policy *p, const char *path)
{
    if (++p->n_models <= MODELS_SAID) log_info("%s is loaded as the model, to sample from", path);
    if (p->n_models == MODELS_SAID)
        log_warn("saved models are sampled in turn, and each is loaded anew when it is its turn, "
                 "as there is one copy of the weights: a cw-infer-server of its own for each is "
                 "faster. This is said once");
}

// The model itself becomes a saved one, as there is one copy of the weights.
static enum status load_saved_model(struct policy *p, struct snapshot *of, const char *folder)
{
    const bool was_there = has_taken(p, folder);
    enum status st;
    if (!was_there) CHECK(end_samples(p));
    while (p->trainees) put_away(p, p->trainees, "a saved model is sampled in its place");
    unload_snapshots(p);
    CHECK(take_folder(p, folder));
    of->run[0] = 0;
    of->version = sources_version(p->sources, "");
    if (!was_there) say_loaded(p, of->path);
out:
    sources_hold(p->sources, false);
    return st;
}

static enum status load_saved_adapter(struct policy *p, const struct snapshot *of,
                                      const char *folder)
{
    char name[SOURCE_ROOM], base[PATH_ROOM];
    enum status st;
    if (!sources_base(p->sources)) { // which none but a full fine-tune or a saved model changes
        CHECK(end_samples(p));
        if (p->trainees) put_away(p, p->trainees, "an adapter of the model's folder is sampled");
        CHECK(base_folder(p, base));
        CHECK(take_folder(p, base));
    }
    CHECK(make_room(p, false, NULL));
    snprintf(name, sizeof name, ADAPTER_PREFIX "saved-%d", ++p->n_saved);
    CHECK(server_adapters_load(p->server, name, folder));
    CHECK(sources_add_saved(p->sources, of->path, name));
    log_info("%s is loaded as the adapter '%s', to sample from", of->path, name);
out:
    sources_hold(p->sources, false);
    return st;
}

enum status policy_load_saved(struct policy *p, struct snapshot *of, const char *folder,
                              struct source_use *ret)
{
    enum status st = ST_OK;
    if (sources_take(p->sources, of, false, ret)) return ST_OK; // by now
    CHECK(policy_is_adapter(folder) ? load_saved_adapter(p, of, folder)
                                    : load_saved_model(p, of, folder));
    sources_take(p->sources, of, false, ret);
out:
    return st;
}
