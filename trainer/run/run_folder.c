/* run_folder.c: the folder of a run, of whichever command it is: made and locked, whether it may be
 * used, which of its options are taken over, and the two files that say what the run is:
 * config.json, its options, and run.json, one entry for each start of a process. The main thread;
 * logs. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/rollout/trajectory.h"
#include "trainer/learn/learner.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/run.h"
#include "trainer/run/runlog.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONFIG ((size_t)1 << 20)
#define MAX_STARTS ((size_t)64 << 20)

// ---- made and locked ----------------------------------------------------------------------------

// A run's config.json has its options, a model's the shape of its weights: written over, they are
// lost. One that cannot be read is replaced.
static enum status check_no_model(const char *folder)
{
    enum status st;
    char path[PATH_ROOM];
    json_t *there = NULL;
    CHECK(path_put(path, folder, "config.json"));
    if (!file_exists(path) || json_read_file(path, MAX_CONFIG, &there) != ST_OK) goto out;
    if (json_has(there, "model_type") || json_has(there, "architectures"))
        FAIL(ST_INVALID,
             "%s is a model's, and the run's options would replace it; take another --run-dir",
             path);
out:
    json_decref(there);
    return st;
}

// Makes --run-dir's folder, and keeps other trainers out for as long as the run has it.
static enum status make_folder(struct run *run)
{
    static const char *const parts[] = {"", "rollouts/", "journal/", "workers/"};
    char path[PATH_ROOM];
    const char *wanted = run->config->run_dir;
    enum status st;
    const time_t now = time(NULL);
    struct tm tm;
    if (!wanted)
        strftime(run->folder, FOLDER_ROOM, "runs/%Y%m%d-%H%M%S", localtime_r(&now, &tm));
    else if (snprintf(run->folder, FOLDER_ROOM, "%s", wanted) >= FOLDER_ROOM)
        return status_fail(ST_INVALID, "--run-dir is too long");
    CHECK(file_make_folders(run->folder));
    CHECK(check_no_model(run->folder));
    // Trainers of other servers are kept out of the folder too. The lock ends with the process; a
    // file system without locks has none.
    run->folder_lock = open(run->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (run->folder_lock < 0) FAIL(ST_IO, "%s: %s", run->folder, strerror(errno));
    if (flock(run->folder_lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        FAIL(ST_BUSY, "%s: another trainer is writing there; take another --run-dir", run->folder);
    // What a trainer left there that was killed.
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        CHECK(path_put(path, run->folder, "%s", parts[i]));
        file_sweep_temporaries(path);
        file_sweep_owned(path, ".", ".new");
    }
out:
    return st;
}

// ---- whether it may be used ---------------------------------------------------------------------

// A run that ended before its first step leaves nothing but the weights it began with: nothing at
// all where these were a folder's.
static bool learned_nothing(const char *folder, const char *latest)
{
    struct checkpoint c;
    const char *name = strrchr(latest, '/');
    if (!name || strcmp(name, "/step-0") != 0 || runlog_has_steps(folder)) return false;
    if (checkpoint_read(latest, &c) != ST_OK) return false;
    const json_t *start = json_object_get(c.state, "start");
    const bool of_a_folder = json_integer_value(json_object_get(start, "updates")) == 0;
    json_decref(c.state);
    return of_a_folder;
}

static enum status open_folder(struct run *run, bool *ret_replaced, char ret_latest[PATH_ROOM])
{
    const struct train_config *c = run->config;
    enum status st = ST_OK;
    char checkpoints[PATH_ROOM];
    CHECK(make_folder(run));
    CHECK(path_put(checkpoints, run->folder, "checkpoints"));
    if (c->out && file_is_within(run->folder, c->out))
        FAIL(ST_INVALID,
             "--out %s holds the run folder %s, which the model would replace; take another",
             c->out, run->folder);
    CHECK(checkpoint_find(run->folder, "latest", ret_latest));
    if (ret_latest[0] && !c->resume && !c->overwrite && learned_nothing(run->folder, ret_latest)) {
        CHECK(file_remove_tree(checkpoints));
        CHECK(journal_forget(run->folder, INT64_MAX));
        log_info("%s holds a run that ended before its first step: it is begun anew", run->folder);
        ret_latest[0] = '\0';
    }
    // Without a server a run has a checkpoint of step 0 only where that was evaluated.
    const bool there = ret_latest[0] || (run->given && runlog_has_steps(run->folder));
    if (there && !c->resume && !c->overwrite)
        FAIL(ST_INVALID,
             "%s holds a run already: go on with it (--resume),%s or take another --run-dir",
             run->folder, run->given ? " replace it (--overwrite)," : "");
    if (there && !c->resume) {
        // What is read here must not be of the run that goes.
        const char *options[] = {"model", "tokenizer"}, *read[] = {c->model, c->tokenizer};
        for (int i = 0; i < 2; i++)
            if (read[i] && file_is_within(read[i], checkpoints))
                FAIL(ST_INVALID,
                     "--%s %s is of the run that --overwrite replaces; copy it elsewhere first, or "
                     "take another --run-dir",
                     options[i], read[i]);
        *ret_replaced = true;
        ret_latest[0] = '\0';
    } else if (there && !ret_latest[0]) {
        log_warn("%s has no checkpoint to go on from: its run is begun anew", run->folder);
    }
out:
    return st;
}

enum status run_remove(const struct run *run)
{
    char path[PATH_ROOM];
    enum status st;
    log_info("%s: the run there is replaced (--overwrite)", run->folder);
    CHECK(path_put(path, run->folder, "checkpoints"));
    CHECK(file_remove_tree(path));
    CHECK(path_put(path, run->folder, "rollouts"));
    st = file_remove_tree(path);
out:
    return st;
}

// One rank opens it, for all.
enum status run_open_folder(struct run *run, bool *ret_replaced, char ret_latest[PATH_ROOM])
{
    enum status st = ST_OK;
    ret_latest[0] = '\0';
    if (train_ranks_lead(&run->ranks)) CHECK(open_folder(run, ret_replaced, ret_latest));
    CHECK(train_ranks_agree(&run->ranks, run->folder, FOLDER_ROOM));
    st = train_ranks_agree(&run->ranks, ret_latest, PATH_ROOM);
out:
    return st;
}

// ---- its options --------------------------------------------------------------------------------

// The bridge file of one server is none of several ranks', and theirs none of one process; nor is
// it that of servers which are to be started.
static void forget_other_bridge(const struct train_config *c, json_t *recorded)
{
    const char *bridge = json_string_value(json_object_get(recorded, "bridge"));
    const bool fits = bridge && c->serves == (strstr(bridge, RANK_FIELD) != NULL) &&
                      !(c->serves && (c->model || c->launch.server_args));
    if (!bridge || fits) return;
    if (!c->bridge) log_info("the recorded --bridge %s is not taken over", bridge);
    json_object_del(recorded, "bridge");
}

// Until --metric-for-best-model came, a bound of 0 was none.
static void forget_old_meaning(json_t *recorded)
{
    if (!json_has(recorded, "metric_for_best_model") &&
        json_number_value(json_object_get(recorded, "off_policy_mask_threshold")) == 0)
        json_object_del(recorded, "off_policy_mask_threshold");
}

enum status run_folder_options(struct option_set *set, struct train_config *config)
{
    const char *folder = config->run_dir;
    enum status st = ST_OK;
    json_t *recorded = NULL;
    struct bytes taken = BYTES_INIT;
    char path[PATH_ROOM];
    if (!folder || !config->resume) return ST_OK;
    if ((st = check_no_model(folder)) != ST_OK) return st;
    CHECK(path_put(path, folder, "config.json"));
    if (!file_exists(path)) goto out;
    CHECK(json_read_file(path, MAX_CONFIG, &recorded));
    forget_other_bridge(config, recorded);
    forget_old_meaning(recorded);
    CHECK(options_fill(set, path, recorded, config, &taken));
    if (taken.len) log_info("options as recorded in %s: %s", path, bytes_text(&taken));
out:
    if (st != ST_OK)
        status_fail(
            st,
            "%s; go on by the command that wrote it, or mend or remove it to go on with the "
            "options given here alone",
            status_message());
    json_decref(recorded);
    bytes_release(&taken);
    return st;
}

// ---- what the run is ----------------------------------------------------------------------------

static void put_option(struct bytes *to, const json_t *value)
{
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    bytes_puts(to, !text || json_is_null(value) ? "none" : text);
    free(text);
}

// Says which options a resumed run goes on with that it did not have before. How a run is found and
// how long it takes does not make another run of it.
static void say_changes(const json_t *old, json_t *now)
{
    static const char *const free_to_change[] = {"bridge",    "run_dir",    "max_steps",
                                                 "log_level", "start_from", "out"};
    struct bytes text = BYTES_INIT;
    const char *key;
    const json_t *value, *before;
    json_object_foreach (now, key, value) {
        bool said = (before = json_object_get(old, key)) && !json_equal(before, value);
        for (size_t i = 0; i < sizeof free_to_change / sizeof *free_to_change; i++)
            said = said && strcmp(key, free_to_change[i]) != 0;
        if (!said) continue;
        bytes_printf(&text, "%s%s ", text.len ? ", " : "", key);
        put_option(&text, value);
        bytes_puts(&text, " (was ");
        put_option(&text, before);
        bytes_puts(&text, ")");
    }
    if (text.len) log_warn("the run goes on with other options: %s", bytes_text(&text));
    bytes_release(&text);
}

// Without what is of a start and not of the run.
static enum status write_config(const struct run *run, bool resumed)
{
    // How the processes of a start come to be: the next start may have other ranks, and one from
    // this file by --config is a run of its own.
    const char *const *of_a_start = OPTION_WORDS(
        "gpus", "ranks", "rank", "nnodes", "node_rank", "rendezvous", "rendezvous_token_file",
        "rendezvous_timeout", "rank_timeout", "overwrite", "resume");
    enum status st;
    char path[PATH_ROOM];
    json_t *old = NULL, *options = options_to_json(run->task->options, run->config);
    CHECK(path_put(path, run->folder, "config.json"));
    if (!options) FAIL(ST_NO_MEMORY, "no memory for the run's config.json");
    for (; *of_a_start; of_a_start++) json_object_del(options, *of_a_start);
    if (run->config->sync == SYNC_SHARED) { // a server's own
        json_object_del(options, "model");
        json_object_del(options, "server_args");
    }
    // One that cannot be read is replaced.
    if (resumed && json_read_file(path, MAX_CONFIG, &old) == ST_OK) {
        forget_old_meaning(old);
        say_changes(old, options);
    }
    CHECK(json_write_file(path, 0644, options));
out:
    json_decref(old);
    json_decref(options);
    return st;
}

// What the trainer holds on its device, as it is planned, in MiB.
static void put_memory(const struct run *run, json_t *start)
{
    const struct memory_plan *p = &learner_info(run->learner)->memory;
    const struct {
        const char *name;
        size_t bytes;
    } parts[] = {
        {"weights", p->weights_shared},  {"residual", p->residual},
        {"moments", p->moments},         {"gradients", p->gradients},
        {"activations", p->activations}, {"workspace", p->workspace},
        {"reference", p->reference},     {"draft", p->draft},
        {"teacher", p->teacher},         {"taken beside weights", p->total},
        {"free before", p->free},
    };
    json_t *memory = json_object();
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        json_object_set_new(memory, parts[i].name,
                            json_integer((json_int_t)(parts[i].bytes >> 20)));
    json_object_set_new(start, "memory_mib", memory);
}

// What is known of this start; NULL: no memory.
static json_t *start_of(const struct run *run)
{
    const struct bridge_file *file = bridge_file_of(run->mapped.bridge);
    const json_int_t version = (json_int_t)mapped_version(&run->mapped);
    char when[32], host[256] = "";
    const time_t now = time(NULL);
    struct tm tm;
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S%z", localtime_r(&now, &tm));
    gethostname(host, sizeof host - 1);
    json_t *start = json_pack("{s:s, s:s, s:I, s:s, s:s}", "time", when, "program",
                              "cw-trainer " COMMONWEIGHT_VERSION, "step", (json_int_t)run->step,
                              "device", device_name(bridge_device(run->mapped.bridge)), "dtype",
                              dtype_name(run->mapped.policy->dt));
    // What the server and its weights are, of a run that has one.
    const bool ok =
        start &&
        (run->given || (!json_object_set_new(start, "server_pid", json_integer(file->pid)) &&
                        !json_object_set_new(start, "weight_version", json_integer(version)) &&
                        !json_object_set_new(start, "weights", run_weights(run))));
    if (!ok) {
        json_decref(start);
        return NULL;
    }
    json_object_set(start, ADAPTER_BASE, run->mapped.base);
    put_memory(run, start);
    // What there is not is left out, and a path or name that is not UTF-8, which JSON cannot hold.
    json_object_set_new(start, "bridge", json_string(run->given ? NULL : file->path));
    json_object_set_new(start, "host", json_string(host));
    json_object_set_new(start, "model", json_string(run->mapped.model_folder));
    json_object_set_new(start, "draft", json_string(run->mapped.draft_folder));
    return start;
}

static enum status add_start(const struct run *run, bool resumed)
{
    enum status st;
    json_t *all = NULL, *starts = NULL, *start = start_of(run);
    char path[PATH_ROOM];
    CHECK(path_put(path, run->folder, "run.json"));
    if (resumed && file_exists(path) && json_read_file(path, MAX_STARTS, &all) != ST_OK)
        log_warn("%s; it is written anew", status_message());
    starts = json_incref(json_object_get(all, "starts"));
    json_decref(all);
    if (!json_is_array(starts)) {
        json_decref(starts);
        starts = json_array();
    }
    all = json_pack("{s:O}", "starts", starts);
    if (!all || !start || json_array_append(starts, start) != 0)
        FAIL(ST_NO_MEMORY, "no memory for the run's run.json");
    CHECK(json_write_file(path, 0644, all));
out:
    json_decref(all);
    json_decref(starts);
    json_decref(start);
    return st;
}

enum status run_folder_describe(const struct run *run, bool resumed)
{
    if (!run->folder[0] || !train_ranks_lead(&run->ranks)) return ST_OK;
    enum status st = write_config(run, resumed);
    return st == ST_OK ? add_start(run, resumed) : st;
}
