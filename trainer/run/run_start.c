/* run_start.c: the weights that a run starts from. The main thread.
 *
 * The server outlives runs, so a new run finds the weights that the last one left. TRL's users
 * expect a run to start from the model they named: the default is the folder that the server
 * loaded, and what that replaces is said. Whatever the weights are then is the run's start: step 0,
 * and the KL term's reference.
 *
 * A run that goes on needs that reference again. It is the checkpoint of step 0, which is kept for
 * that with --beta; where it is gone (--beta was 0 before) and the start was exactly a folder's
 * weights, it is that folder.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"
#include "bridge/attach.h"
#include "common/base/log.h"
#include "kernels/comm.h"
#include "trainer/learn/learner.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/warnings.h"
#include "trainer/run/run.h"

#include <stdio.h>
#include <string.h>

json_t *run_weights(const struct run *run)
{
    struct control_info f;
    if (!control_info_of(mapped_control(&run->mapped), run->mapped.role, &f)) return NULL;
    json_t *weights = json_pack("{s:I}", "updates", (json_int_t)f.updates);
    // a path that is not UTF-8 cannot stand in JSON
    json_object_set_new(weights, "folder", json_string(f.origin));
    if (f.updates) json_object_set_new(weights, "last_run", json_string(f.run));
    return weights;
}

// --start-from as a folder; "": the weights as they are.
static enum status folder_to_start_from(const struct run *run, const struct control_info *f,
                                        char ret[PATH_ROOM])
{
    const char *from = run->config->start_from;
    // A draft model may have been left behind by a reload of the policy alone.
    bool changed = f->updates > 0 || strcmp(f->origin, f->loaded) != 0 ||
                   (run->mapped.draft && f->publishes > 0);
    ret[0] = 0;
    if (strcmp(from, "current") == 0) return ST_OK;
    if (strcmp(from, "loaded") != 0) {
        snprintf(ret, PATH_ROOM, "%s", from);
        return ST_OK;
    }
    enum status st = train_ranks_any(&run->ranks, &changed); // all load it, or none
    if (st != ST_OK || !changed) return st;
    // a checkpoint goes when its run has newer ones
    if (f->loaded[0] != '/' || !file_exists(f->loaded))
        return status_fail(ST_INVALID,
                           "--start-from loaded: the server loaded no folder that is there now "
                           "(%s); take --start-from current or a model folder",
                           f->loaded);
    snprintf(ret, PATH_ROOM, "%s", f->loaded);
    return ST_OK;
}

// A folder that is trained further may hold its draft, as a checkpoint does.
static enum status draft_start(const struct run *run, const char *folder, char room[PATH_ROOM],
                               const char **ret)
{
    *ret = NULL;
    if (!run->mapped.draft || strcmp(run->config->start_from, "current") == 0) return ST_OK;
    if (strcmp(run->config->start_from, "loaded") == 0) {
        *ret = run->mapped.draft_folder;
        return ST_OK;
    }
    enum status st = path_put(room, folder, DRAFT_FOLDER);
    if (st == ST_OK && file_exists(room))
        *ret = room;
    else if (st == ST_OK)
        log_info("%s holds no draft model: it starts as the server serves it", folder);
    return st;
}

static enum status load_start(struct run *run, const struct control_info *before,
                              const char *folder)
{
    char within[PATH_ROOM], saved[PATH_ROOM];
    const char *draft;
    struct bytes was = BYTES_INIT;
    enum status st;
    CHECK(draft_start(run, folder, within, &draft));
    control_origin_words(before, &was);
    if (before->run[0] && checkpoint_find(before->run, "latest", saved) == ST_OK && saved[0])
        bytes_printf(&was, ", last saved as %s", saved);
    CHECK(run_load_weights(run, folder, draft));
    log_line(before->updates ? LOG_WARN : LOG_INFO,
             "the run starts from %s%s%s: its weights replace what was served (%s); "
             "--start-from current would go on from those",
             folder, draft ? ", the draft model from " : "", draft ? draft : "", bytes_text(&was));
out:
    bytes_release(&was);
    return status_context(st, "--start-from %s", run->config->start_from);
}

static enum status start_model(struct run *run)
{
    enum status st;
    char folder[PATH_ROOM];
    struct control_info f;
    struct bytes now = BYTES_INIT;
    control_info(mapped_control(&run->mapped), &f);
    CHECK(folder_to_start_from(run, &f, folder));
    if (folder[0]) CHECK(load_start(run, &f, folder));
    control_info(mapped_control(&run->mapped), &f);
    control_origin_words(&f, &now);
    log_info("weights at the start: %s%s", bytes_text(&now),
             run->resolved.has_reference ? "; a copy of them is the reference of the KL divergence"
                                         : "");
    if (run->resolved.has_reference) CHECK(learner_set_reference(run->learner, NULL));
out:
    bytes_release(&now);
    return st;
}

// ---- an adapter ---------------------------------------------------------------------------------

// An adapter's base is the folder that the server loaded, unless it is asked for as it is; others
// may use it, so that it is not replaced here.
static enum status check_as_loaded(const struct run *run)
{
    struct control_info f;
    struct bytes words = BYTES_INIT;
    control_info(mapped_control(&run->mapped), &f);
    if (f.updates == 0 && strcmp(f.origin, f.loaded) == 0) return ST_OK;
    control_origin_words(&f, &words);
    status_fail(ST_MISMATCH,
                "the base was trained since the server loaded %s (it is %s): take --start-from "
                "current for an adapter of it as it is, or have the folder loaded again (POST "
                "/reload)",
                f.loaded, bytes_text(&words));
    bytes_release(&words);
    return ST_MISMATCH;
}

// Whatever it starts from is first written as RUN/start (adapter_folder_start()).
static enum status start_adapter(struct run *run)
{
    enum status st = ST_OK;
    const char *from = run->config->start_from, *name = run->config->lora.name;
    const bool current = strcmp(from, "current") == 0, loaded = strcmp(from, "loaded") == 0;
    struct control_info f = {0};
    char folder[PATH_ROOM], within[PATH_ROOM];
    const char *draft;
    if (loaded) CHECK(check_as_loaded(run));
    if (!loaded && !current) CHECK(warn_adapter_base(from, run->mapped.base, run->config->exact));
    control_info_of(mapped_control(&run->mapped), run->mapped.role, &f);
    const bool made = !f.updates && !f.origin[0]; // all zeros as yet, of which nothing is learned
    const bool fresh = loaded || (current && made), served = current && !made;
    CHECK(draft_start(run, from, within, &draft));
    CHECK(path_put(folder, run->folder, "start"));
    struct model_folder model = mapped_folder(&run->mapped);
    model.adapter_name = name;
    if (served) CHECK(run_write_model(run, folder, &model));
    if (!served && train_ranks_lead(&run->ranks))
        CHECK(adapter_folder_start(folder, run->mapped.adapter, fresh ? NULL : from,
                                   (uint64_t)run->config->seed, name, run->mapped.base));
    CHECK(comm_barrier(run->ranks.all));
    CHECK(served ? control_set_snapshot(mapped_control(&run->mapped), folder)
                 : run_load_weights(run, folder, draft));
    log_info("the adapter '%s' starts %s%s (%s)", name,
             fresh    ? "new, and changes nothing yet"
             : served ? "as it is served"
                      : "from ",
             fresh || served ? "" : from, folder);
out:
    return status_context(st, "--start-from %s", from);
}

// ---- the start ----------------------------------------------------------------------------------

enum status run_start(struct run *run)
{
    enum status st = run->mapped.adapter ? start_adapter(run) : start_model(run);
    if (st == ST_OK && !(run->start = run_weights(run)))
        st = status_fail(ST_NO_MEMORY, "no memory for what the run starts from");
    return st;
}

enum status run_resume_reference(struct run *run, const char *checkpoint)
{
    enum status st;
    char step_0[PATH_ROOM], moved[PATH_ROOM];
    const char *folder = json_string_value(json_object_get(run->start, "folder"));
    const json_int_t updates = json_integer_value(json_object_get(run->start, "updates"));
    if (!run->resolved.has_reference || run->mapped.adapter) return ST_OK; // there it is the model
    CHECK(path_put(moved, checkpoint, REFERENCE_FOLDER));
    if (file_exists(moved)) {
        log_info("the reference of the KL divergence: %s, as --sync-ref-model has moved it", moved);
        return learner_set_reference(run->learner, moved);
    }
    CHECK(path_put(step_0, run->folder, "checkpoints/step-0"));
    if (file_exists(step_0))
        folder = step_0;
    else if (updates > 0 || !folder || folder[0] != '/')
        FAIL(ST_NOT_FOUND,
             "--beta or --kl-reward-coef: its reference, the weights this run started from, is "
             "gone: %s/checkpoints/step-0 was removed (it is kept where a run begins with a "
             "reference); go on with both 0, or begin a run with --start-from of a checkpoint",
             run->folder);
    CHECK(learner_set_reference(run->learner, folder));
    log_info("the reference of the KL divergence: %s, the weights this run started from", folder);
out:
    return st;
}
