/* run_folder.c: the folder (folder.h) of a run on a server's weights: whether it may be used, which
 * of its options are taken over, and what model, weights and server each start had. The main
 * thread. */
#include "common/base/file.h"
#include "bridge/attach.h"
#include "common/base/log.h"
#include "trainer/rollout/journal.h"
#include "trainer/run/adapter_folder.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/folder.h"
#include "trainer/run/run.h"
#include "trainer/run/runlog.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A run that ended before its first step leaves nothing but the weights it began with: nothing at
// all where these were a folder's.
static bool learned_nothing(const char *folder, const char *latest)
{
    struct checkpoint c;
    const char *name = strrchr(latest, '/');
    if (!name || strcmp(name, "/step-0") != 0 || runlog_has_steps(folder)) return false;
    if (checkpoint_read(latest, &c) != ST_OK) return false;
    bool of_a_folder = json_integer_value(json_object_get(c.start, "updates")) == 0;
    checkpoint_release(&c);
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
    CHECK(folder_open(run->config->run_dir, run->folder, &run->folder_lock));
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
enum status run_open_folder(struct run *run, char **ret_latest)
{
    char *latest = NULL;
    enum status st = ST_OK;
    if (train_ranks_lead(&run->ranks)) CHECK(open_folder(run, &latest));
    CHECK(folder_agree(&run->ranks, run->folder, &latest));
    *ret_latest = latest;
    latest = NULL;
out:
    free(latest);
    return st;
}

// The bridge file of one server is none of several ranks', and theirs none of one process; nor is
// it that of servers which are to be started.
static void forget_other_bridge(const void *config, json_t *recorded)
{
    const struct train_config *c = config;
    const char *bridge = json_string_value(json_object_get(recorded, "bridge"));
    const bool fits = bridge && c->serves == (strstr(bridge, RANK_FIELD) != NULL) &&
                      !(c->serves && (c->model || c->job.server_args));
    if (!bridge || fits) return;
    if (!c->bridge) log_info("the recorded --bridge %s is not taken over", bridge);
    json_object_del(recorded, "bridge");
}

enum status run_folder_options(struct option_set *set, struct train_config *config)
{
    if (!config->run_dir || !config->resume) return ST_OK;
    return folder_take_options(set, config->run_dir, forget_other_bridge, config);
}

static enum status write_config(const struct run *run, bool resumed)
{
    json_t *resolved = options_to_json(train_options, run->config);
    if (run->config->sync == SYNC_SHARED) { // a server's own
        json_object_del(resolved, "model");
        json_object_del(resolved, "server_args");
    }
    return folder_write_options(run->folder, resumed, resolved);
}

static enum status write_start(const struct run *run, bool resumed)
{
    const struct bridge_file *file = bridge_file_of(run->mapped.bridge);
    json_t *start =
        folder_start(run->step, bridge_device(run->mapped.bridge), run->mapped.policy->dt);
    if (!start || json_object_set_new(start, "server_pid", json_integer(file->pid)) ||
        json_object_set_new(start, "weight_version",
                            json_integer((json_int_t)mapped_version(&run->mapped))) ||
        json_object_set_new(start, "weights", run_weights(run))) {
        json_decref(start);
        return status_fail(ST_NO_MEMORY, "no memory for the run's run.json");
    }
    json_object_set(start, ADAPTER_BASE, run->mapped.base);
    folder_put_text(start, "model", run->mapped.model_folder);
    folder_put_text(start, "draft", run->mapped.draft_folder);
    folder_put_text(start, "bridge", file->path);
    return folder_add_start(run->folder, resumed, start);
}

enum status run_folder_describe(const struct run *run, bool resumed)
{
    if (!train_ranks_lead(&run->ranks)) return ST_OK;
    enum status st = write_config(run, resumed);
    return st == ST_OK ? write_start(run, resumed) : st;
}
