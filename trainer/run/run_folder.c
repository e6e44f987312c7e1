/* run_folder.c: the run's folder: its lock, whether it may be used, and the two files that say what
 * the run is: config.json, its options, and run.json, one entry for each start of a process: which
 * model, weights, server, machine and program. The main thread.
 */
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/run/run.h"

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

// Trainers of other servers are kept out of the folder too. The lock ends with the process; a file
// system without locks has none.
static enum status lock_run_folder(struct run *run)
{
    run->folder_lock = open(run->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (run->folder_lock < 0) return status_fail(ST_IO, "%s: %s", run->folder, strerror(errno));
    if (flock(run->folder_lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return status_fail(ST_BUSY, "%s: another trainer is writing there; take another --run-dir",
                           run->folder);
    return ST_OK;
}

// A run that ended before its first step leaves nothing but the weights it began with: nothing at
// all where these were a folder's.
static bool learned_nothing(const char *folder, const char *latest)
{
    struct checkpoint c;
    const char *name = strrchr(latest, '/');
    if (!name || strcmp(name, "/step-0") != 0 || runlog_has_steps(folder)) return false;
    if (checkpoint_read(latest, &c) != ST_OK) return false;
    const json_t *start = json_object_get(c.state, "start");
    bool of_a_folder = json_integer_value(json_object_get(start, "updates")) == 0;
    json_decref(c.state);
    return of_a_folder;
}

static enum status begin_anew(const struct run *run)
{
    char checkpoints[PATH_ROOM];
    enum status st;
    CHECK(path_put(checkpoints, run->folder, "checkpoints"));
    CHECK(file_remove_tree(checkpoints));
    CHECK(journal_forget(run->folder, INT64_MAX));
    log_info("%s holds a run that ended before its first step: it is begun anew", run->folder);
out:
    return st;
}

static enum status open_folder(struct run *run, char **ret_latest)
{
    enum status st = ST_OK;
    char *latest = NULL;
    if (run->config->run_dir) {
        if (snprintf(run->folder, sizeof run->folder, "%s", run->config->run_dir) >=
            (int)sizeof run->folder)
            return status_fail(ST_INVALID, "--run-dir is too long");
    } else {
        time_t now = time(NULL);
        struct tm tm;
        strftime(run->folder, sizeof run->folder, "runs/%Y%m%d-%H%M%S", localtime_r(&now, &tm));
    }
    CHECK(file_make_folders(run->folder));
    CHECK(lock_run_folder(run));
    CHECK(checkpoint_latest(run->folder, &latest));
    if (latest && !run->config->resume && learned_nothing(run->folder, latest)) {
        CHECK(begin_anew(run));
        free(latest);
        latest = NULL;
    }
    if (latest && !run->config->resume)
        FAIL(ST_INVALID,
             "%s holds a run already: go on with it (--resume), or take "
             "another --run-dir",
             run->folder);
    *ret_latest = latest;
    latest = NULL;
out:
    free(latest);
    return st;
}

// One rank opens it, for all.
enum status run_folder_open(struct run *run, char **ret_latest)
{
    char latest[PATH_MAX] = "", *own = NULL;
    enum status st = ST_OK;
    if (run_leads(run)) CHECK(open_folder(run, &own));
    if (own) snprintf(latest, sizeof latest, "%s", own);
    CHECK(run_agree(run, run->folder, sizeof run->folder));
    CHECK(run_agree(run, latest, sizeof latest));
    if (latest[0] && !own && !(own = strdup(latest))) FAIL(ST_NO_MEMORY, "no memory for a path");
    *ret_latest = own;
    own = NULL;
out:
    free(own);
    return st;
}

// The bridge file of one server is none of several ranks', and theirs none of one process; nor is
// it that of servers which are to be started.
static void forget_other_bridge(const struct train_config *c, json_t *recorded)
{
    const char *bridge = json_string_value(json_object_get(recorded, "bridge"));
    const bool fits = bridge && c->serves == (strstr(bridge, RANK_FIELD) != NULL) &&
                      !(c->serves && (c->model || c->job.server_args));
    if (!bridge || fits) return;
    if (!c->bridge) log_info("the recorded --bridge %s is not taken over", bridge);
    json_object_del(recorded, "bridge");
}

enum status run_folder_options(struct option_set *set, struct train_config *config)
{
    enum status st = ST_OK;
    json_t *recorded = NULL;
    struct bytes taken = BYTES_INIT;
    char path[PATH_ROOM];
    if (!config->run_dir || !config->resume) return ST_OK;
    CHECK(path_put(path, config->run_dir, "config.json"));
    if (!file_exists(path)) goto out;
    CHECK(json_read_file(path, MAX_CONFIG, &recorded));
    forget_other_bridge(config, recorded);
    CHECK(options_fill(set, path, recorded, config, &taken));
    if (taken.len) log_info("options as recorded in %s: %s", path, bytes_text(&taken));
out:
    if (st != ST_OK)
        status_fail(st, "%s; mend or remove it to go on with the options given here alone",
                    status_message());
    json_decref(recorded);
    bytes_release(&taken);
    return st;
}

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
    static const char *const free_to_change[] = {"bridge",    "run_dir",   "resume",
                                                 "max_steps", "log_level", "start_from"};
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

// How the processes of a start come to be is not of the run: the next start may have other ranks.
static const char *const of_a_start[] = {"gpus",
                                         "ranks",
                                         "rank",
                                         "nnodes",
                                         "node_rank",
                                         "rendezvous",
                                         "server_args",
                                         "rendezvous_token_file",
                                         "rendezvous_timeout",
                                         "rank_timeout"};

static enum status write_config(const struct run *run, bool resumed)
{
    enum status st;
    char path[PATH_ROOM];
    json_t *resolved = options_to_json(train_options, run->config), *old = NULL;
    CHECK(path_put(path, run->folder, "config.json"));
    if (!resolved) FAIL(ST_NO_MEMORY, "no memory for the run's config.json");
    for (size_t i = 0; i < sizeof of_a_start / sizeof *of_a_start; i++)
        json_object_del(resolved, of_a_start[i]);
    if (run->config->sync == SYNC_SHARED) json_object_del(resolved, "model"); // a server's own
    // One that cannot be read is replaced.
    if (resumed && json_read_file(path, MAX_CONFIG, &old) == ST_OK) say_changes(old, resolved);
    CHECK(json_write_file(path, 0644, resolved));
out:
    json_decref(old);
    json_decref(resolved);
    return st;
}

// A path or name that is not UTF-8 cannot stand in JSON, and is left out.
static void put_text(json_t *object, const char *key, const char *text)
{
    if (text) json_object_set_new(object, key, json_string(text));
}

// New reference; NULL: no memory.
static json_t *describe_start(const struct run *run)
{
    char when[32], host[256] = "";
    time_t now = time(NULL);
    struct tm tm;
    const struct bridge_file *file = bridge_file_of(run->bridge);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S%z", localtime_r(&now, &tm));
    gethostname(host, sizeof host - 1);
    json_t *start = json_pack(
        "{s:s, s:s, s:I, s:s, s:s, s:i, s:I, s:o}", "time", when, "program",
        "cw-trainer " COMMONWEIGHT_VERSION, "step", (json_int_t)run->step, "device",
        device_name(bridge_device(run->bridge)), "dtype", dtype_name(run->policy->dt), "server_pid",
        (int)file->pid, "weight_version", (json_int_t)control_version(bridge_control(run->bridge)),
        "weights", run_weights(run));
    if (!start) return NULL;
    put_text(start, "host", host);
    put_text(start, "model", run->model_folder);
    put_text(start, "draft", run->draft_folder);
    put_text(start, "bridge", file->path);
    return start;
}

// Adds this start to run.json.
static enum status write_start(const struct run *run, bool resumed)
{
    enum status st;
    json_t *all = NULL, *starts = NULL;
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
    if (!all || json_array_append_new(starts, describe_start(run)) != 0)
        FAIL(ST_NO_MEMORY, "no memory for the run's run.json");
    CHECK(json_write_file(path, 0644, all));
out:
    json_decref(all);
    json_decref(starts);
    return st;
}

enum status run_folder_describe(const struct run *run, bool resumed)
{
    if (!run_leads(run)) return ST_OK;
    enum status st = write_config(run, resumed);
    return st == ST_OK ? write_start(run, resumed) : st;
}
