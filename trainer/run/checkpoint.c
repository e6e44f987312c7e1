/* checkpoint.c: writes and finds checkpoints. Owns no state; the trainer's thread.
 *
 * Weights are stored in the dtype they are trained in. With bf16 that is the upper half of the
 * exact fp32 master, whose lower half is in trainer/optimizer.safetensors: both give every bit
 * back.
 */
#include "trainer/run/checkpoint.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "trainer/run/model_folder_write.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_STATE ((size_t)1 << 26)

#define POLICY_STEPS "optimizer_steps" // in trainer_state.json
#define DRAFT_STEPS  "draft_optimizer_steps"

#define STATE_FILE     "trainer_state.json"
#define OPTIMIZER_FILE "optimizer.safetensors"
#define STEP_NAME      "step-%" PRId64

// The absolute path behind links, the caller's to free; NULL where there is nothing.
static enum status resolve(const char *path, char **ret_folder)
{
    char *folder = realpath(path, NULL);
    if (!folder && errno != ENOENT) return status_fail(ST_IO, "%s: %s", path, strerror(errno));
    *ret_folder = folder;
    return ST_OK;
}

// FOLDER/trainer/NAME, its folder made.
static enum status new_trainer_file(const char *folder, const char *name, char ret[PATH_ROOM])
{
    char inside[PATH_ROOM];
    enum status st;
    CHECK(path_put(inside, folder, CHECKPOINT_TRAINER));
    CHECK(file_make_folders(inside));
    st = path_put(ret, inside, "%s", name);
out:
    return st;
}

// The same for reading, or FOLDER/NAME where an older checkpoint has it there.
static enum status find_trainer_file(const char *folder, const char *name, char ret[PATH_ROOM])
{
    char older[PATH_ROOM];
    enum status st;
    CHECK(path_put(older, folder, "%s", name));
    CHECK(path_put(ret, folder, CHECKPOINT_TRAINER "/%s", name));
    if (!file_exists(ret) && file_exists(older)) strcpy(ret, older);
out:
    return st;
}

struct trainer_files {
    const struct checkpoint *checkpoint;
    struct device *dev;
    const struct checkpoint_model *policy, *draft; // draft: may be NULL
};

// Before the first step the state is all zeros, which needs no file.
static enum status write_optimizer(void *context, const char *folder)
{
    struct optimizer *optimizer = context;
    char path[PATH_ROOM];
    enum status st = ST_OK;
    if (optimizer_steps(optimizer) == 0) return ST_OK;
    CHECK(new_trainer_file(folder, OPTIMIZER_FILE, path));
    CHECK(optimizer_save(optimizer, path));
    st = file_sync_parent(path);
out:
    return st;
}

static enum status write_draft(const struct trainer_files *files, const char *folder)
{
    const struct checkpoint_model *draft = files->draft;
    char path[PATH_ROOM];
    enum status st = path_put(path, folder, CHECKPOINT_DRAFT);
    return st != ST_OK
               ? st
               : model_folder_write(path, files->dev, draft->weights, draft->weights->dt,
                                    draft->source_folder, write_optimizer, draft->optimizer);
}

static enum status write_reference(const struct trainer_files *files, const char *folder)
{
    const struct weights *reference = files->checkpoint->reference;
    char path[PATH_ROOM];
    enum status st = path_put(path, folder, CHECKPOINT_REFERENCE);
    return st != ST_OK ? st
                       : model_folder_write(path, files->dev, reference, reference->dt,
                                            files->policy->source_folder, NULL, NULL);
}

static enum status write_trainer_files(void *context, const char *folder)
{
    const struct trainer_files *files = context;
    const struct checkpoint *c = files->checkpoint;
    enum status st = ST_OK;
    char path[PATH_ROOM];
    json_t *state = c->state ? json_copy(c->state) : json_object();
    if (!state || json_object_set_new(state, "step", json_integer(c->step)) ||
        json_object_set_new(state, "data_index", json_integer(c->data_index)) ||
        json_object_set_new(state, POLICY_STEPS,
                            json_integer(optimizer_steps(files->policy->optimizer))) ||
        (files->draft &&
         json_object_set_new(state, DRAFT_STEPS,
                             json_integer(optimizer_steps(files->draft->optimizer)))))
        FAIL(ST_NO_MEMORY, "no memory for a checkpoint");
    CHECK(write_optimizer(files->policy->optimizer, folder));
    CHECK(new_trainer_file(folder, STATE_FILE, path));
    CHECK(json_write_file(path, 0644, state));
    if (files->draft) CHECK(write_draft(files, folder));
    if (c->reference) CHECK(write_reference(files, folder));
out:
    json_decref(state);
    return st;
}

static enum status swap_link(const char *checkpoints, const char *link_name, int64_t step)
{
    char link[PATH_ROOM], temporary[PATH_ROOM], name[32];
    enum status st;
    CHECK(path_put(link, checkpoints, "%s", link_name));
    CHECK(path_beside(link, temporary));
    snprintf(name, sizeof name, STEP_NAME, step);
    unlink(temporary);
    if (symlink(name, temporary) != 0 || rename(temporary, link) != 0)
        FAIL(ST_IO, "%s: %s", link, strerror(errno));
    st = file_sync_folder(checkpoints);
out:
    return st;
}

static int64_t step_of(const struct dirent *entry) // -1: it is no checkpoint
{
    char *end;
    if (strncmp(entry->d_name, "step-", 5) != 0 || !isdigit((unsigned char)entry->d_name[5]))
        return -1;
    int64_t step = strtoll(entry->d_name + 5, &end, 10);
    return *end ? -1 : step;
}

static int is_checkpoint(const struct dirent *entry)
{
    return step_of(entry) >= 0;
}

// Half-written folders, and links (".latest.PID.new"), of processes that were killed: a run folder
// has one writer.
static int is_leftover(const struct dirent *entry)
{
    size_t len = strlen(entry->d_name);
    return entry->d_name[0] == '.' && len >= 4 && strcmp(entry->d_name + len - 4, ".new") == 0;
}

// Said anew at each checkpoint, so that a crash between a folder and its link mends itself. A best
// checkpoint that somebody removed is no error.
static enum status link_best(const char *checkpoints, int64_t step)
{
    char folder[PATH_ROOM];
    enum status st = path_put(folder, checkpoints, STEP_NAME, step);
    return st == ST_OK && file_exists(folder) ? swap_link(checkpoints, "best", step) : st;
}

static bool is_kept(const struct checkpoint *c, int64_t step)
{
    return step == c->step || (c->best_step && step == *c->best_step) ||
           (c->keep_start && step == 0);
}

static enum status remove_entry(const char *checkpoints, const char *name)
{
    char path[PATH_ROOM];
    enum status st = path_put(path, checkpoints, "%s", name);
    return st == ST_OK ? file_remove_tree(path) : st;
}

// Removes what `chosen` chooses, but for the `keep` last checkpoints of these and what is_kept().
static enum status remove_all(const char *checkpoints, int (*chosen)(const struct dirent *),
                              const struct checkpoint *c, int keep)
{
    struct dirent **entries = NULL;
    enum status st = ST_OK;
    int n = scandir(checkpoints, &entries, chosen, versionsort);
    if (n < 0) return status_fail(ST_IO, "%s: %s", checkpoints, strerror(errno));
    while (n-- > 0) {
        const int64_t step = step_of(entries[n]);
        const bool stays = step >= 0 && step != c->step && keep-- > 0;
        if (st == ST_OK && !stays && !is_kept(c, step))
            st = remove_entry(checkpoints, entries[n]->d_name);
        free(entries[n]);
    }
    free(entries);
    return st;
}

static enum status fill_adapter_folder(void *context, const char *folder)
{
    const struct trainer_files *files = context;
    const struct adapter *a = files->policy->adapter;
    enum status st = adapter_save(a, files->dev, folder, a->weights->dt);
    return st == ST_OK ? write_trainer_files(context, folder) : st;
}

static enum status write_policy(struct trainer_files *files, const char *folder)
{
    const struct checkpoint_model *policy = files->policy;
    if (policy->adapter) return folder_write(folder, fill_adapter_folder, files);
    return model_folder_write(folder, files->dev, policy->weights, policy->weights->dt,
                              policy->source_folder, write_trainer_files, files);
}

enum status checkpoint_write_folder(const char *folder, const struct checkpoint *c,
                                    struct device *dev, const struct checkpoint_model *policy)
{
    struct trainer_files files = {c, dev, policy, NULL};
    return write_policy(&files, folder);
}

enum status checkpoint_write(const char *run_folder, const struct checkpoint *c, struct device *dev,
                             const struct checkpoint_model *policy,
                             const struct checkpoint_model *draft, int keep, char **ret_folder)
{
    enum status st;
    struct trainer_files files = {c, dev, policy, draft};
    char checkpoints[PATH_ROOM], folder[PATH_ROOM], replaced[32];
    CHECK(path_put(checkpoints, run_folder, "checkpoints"));
    CHECK(path_put(folder, checkpoints, STEP_NAME, c->step));
    CHECK(file_make_folders(checkpoints));
    CHECK(remove_all(checkpoints, is_leftover, c, 0));
    CHECK(write_policy(&files, folder));
    if (c->best_step) CHECK(link_best(checkpoints, *c->best_step));
    CHECK(swap_link(checkpoints, "latest", c->step));
    if (c->replaced_step && !is_kept(c, *c->replaced_step)) {
        snprintf(replaced, sizeof replaced, STEP_NAME, *c->replaced_step);
        CHECK(remove_entry(checkpoints, replaced));
    }
    if (keep > 0) CHECK(remove_all(checkpoints, is_checkpoint, c, keep - 1));
    if (ret_folder) st = resolve(folder, ret_folder);
out:
    return st;
}

static enum status follow_link(const char *run_folder, const char *name, char **ret_folder)
{
    char link[PATH_ROOM];
    enum status st = path_put(link, run_folder, "checkpoints/%s", name);
    return st == ST_OK ? resolve(link, ret_folder) : st;
}

// A run whose last checkpoint was taken away would otherwise start over, on top of its records.
enum status checkpoint_latest(const char *run_folder, char **ret_folder)
{
    char target[PATH_ROOM], link[PATH_ROOM];
    enum status st;
    CHECK(follow_link(run_folder, "latest", ret_folder));
    CHECK(path_put(link, run_folder, "checkpoints/latest"));
    ssize_t len = *ret_folder ? -1 : readlink(link, target, sizeof target);
    if (len > 0)
        FAIL(ST_NOT_FOUND,
             "%s: it names %.*s, which is not there any more; let it name another "
             "(ln -sfn step-N %s), or remove it to start over",
             link, (int)len, target, link);
out:
    return st;
}

enum status checkpoint_best(const char *run_folder, char **ret_folder)
{
    return follow_link(run_folder, "best", ret_folder);
}

enum status checkpoint_read(const char *folder, struct checkpoint *ret)
{
    enum status st = ST_OK;
    struct checkpoint c = {.step = -1, .data_index = -1};
    char path[PATH_ROOM];
    CHECK(find_trainer_file(folder, STATE_FILE, path));
    CHECK(json_read_file(path, MAX_STATE, &c.state));
    CHECK(json_get_int(path, c.state, "step", 0, INT64_MAX, &c.step));
    CHECK(json_get_int(path, c.state, "data_index", 0, INT64_MAX, &c.data_index));
    if (c.step < 0 || c.data_index < 0)
        FAIL(ST_FORMAT, "%s: no field \"step\" or \"data_index\"", path);
    *ret = c;
out:
    if (st != ST_OK) json_decref(c.state);
    return st;
}

static enum status load_optimizer(const char *folder, const struct checkpoint *c, const char *steps,
                                  struct optimizer *optimizer)
{
    if (json_integer_value(json_object_get(c->state, steps)) == 0) return ST_OK;
    char path[PATH_ROOM];
    enum status st = find_trainer_file(folder, OPTIMIZER_FILE, path);
    return st == ST_OK ? optimizer_load(optimizer, path) : st;
}

enum status checkpoint_load_optimizer(const char *folder, const struct checkpoint *c,
                                      struct optimizer *optimizer)
{
    return load_optimizer(folder, c, POLICY_STEPS, optimizer);
}

bool checkpoint_has_draft(const struct checkpoint *c)
{
    return json_object_get(c->state, DRAFT_STEPS) != NULL;
}

enum status checkpoint_load_draft_optimizer(const char *folder, const struct checkpoint *c,
                                            struct optimizer *optimizer)
{
    char draft[PATH_ROOM];
    enum status st = path_put(draft, folder, CHECKPOINT_DRAFT);
    return st == ST_OK ? load_optimizer(draft, c, DRAFT_STEPS, optimizer) : st;
}
