/* checkpoint.c: writes and finds checkpoints. Owns no state; the trainer's thread.
 *
 * Weights are stored in the dtype they are trained in. With bf16 that is the upper half of the
 * exact fp32 master, whose lower half is in trainer/optimizer.safetensors: both give every bit
 * back.
 */
#include "trainer/run/checkpoint.h"
#include "common/base/bytes.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "trainer/run/model_folder_write.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_STATE ((size_t)1 << 26)

static enum status no_memory(void)
{
    return status_fail(ST_NO_MEMORY, "no memory for a checkpoint");
}

#define POLICY_STEPS "optimizer_steps" // in trainer_state.json
#define DRAFT_STEPS  "draft_optimizer_steps"

#define STATE_FILE     "trainer_state.json"
#define OPTIMIZER_FILE "optimizer.safetensors"

// FOLDER/trainer/NAME, its folder made.
static enum status new_trainer_file(const char *folder, const char *name, char **ret_path)
{
    char *inside = path_join(folder, CHECKPOINT_TRAINER);
    char *path = inside ? path_join(inside, name) : NULL;
    enum status st = path ? file_make_folders(inside) : no_memory();
    if (st == ST_OK)
        *ret_path = path;
    else
        free(path);
    free(inside);
    return st;
}

// The same for reading, or FOLDER/NAME where an older checkpoint has it there; NULL: no memory.
static char *find_trainer_file(const char *folder, const char *name)
{
    char *inside = path_join(folder, CHECKPOINT_TRAINER);
    char *path = inside ? path_join(inside, name) : NULL, *older = path_join(folder, name);
    bool is_older = path && older && !file_exists(path) && file_exists(older);
    free(inside);
    free(is_older ? path : older);
    return is_older ? older : path;
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
    char *path;
    if (optimizer_steps(optimizer) == 0) return ST_OK;
    enum status st = new_trainer_file(folder, OPTIMIZER_FILE, &path);
    if (st != ST_OK) return st;
    st = optimizer_save(optimizer, path);
    if (st == ST_OK) st = path_sync_parent(path);
    free(path);
    return st;
}

static enum status write_draft(const struct trainer_files *files, const char *folder)
{
    const struct checkpoint_model *draft = files->draft;
    char *path = path_join(folder, CHECKPOINT_DRAFT);
    enum status st =
        path ? model_folder_write(path, files->dev, draft->weights, draft->weights->dt,
                                  draft->source_folder, write_optimizer, draft->optimizer)
             : no_memory();
    free(path);
    return st;
}

static enum status write_trainer_files(void *context, const char *folder)
{
    const struct trainer_files *files = context;
    const struct checkpoint *c = files->checkpoint;
    enum status st = ST_OK;
    char *state_path = NULL;
    json_t *state = c->state ? json_copy(c->state) : json_object();
    if (!state || json_object_set_new(state, "step", json_integer(c->step)) ||
        json_object_set_new(state, "data_index", json_integer(c->data_index)) ||
        json_object_set_new(state, POLICY_STEPS,
                            json_integer(optimizer_steps(files->policy->optimizer))) ||
        (files->draft &&
         json_object_set_new(state, DRAFT_STEPS,
                             json_integer(optimizer_steps(files->draft->optimizer)))))
        CHECK(no_memory());
    CHECK(write_optimizer(files->policy->optimizer, folder));
    CHECK(new_trainer_file(folder, STATE_FILE, &state_path));
    CHECK(json_write_file(state_path, 0644, state));
    if (files->draft) CHECK(write_draft(files, folder));
out:
    json_decref(state);
    free(state_path);
    return st;
}

static enum status swap_link(const char *checkpoints, const char *link_name, const char *name)
{
    enum status st = ST_OK;
    char *link = path_join(checkpoints, link_name);
    char *temporary = link ? path_beside(link) : NULL;
    if (!link || !temporary) CHECK(no_memory());
    unlink(temporary);
    if (symlink(name, temporary) != 0 || rename(temporary, link) != 0)
        st = status_fail(ST_IO, "%s: %s", link, strerror(errno));
    else
        st = file_sync_folder(checkpoints);
out:
    free(link);
    free(temporary);
    return st;
}

static bool step_of(const char *name, int64_t *ret_step)
{
    char *end;
    if (strncmp(name, "step-", 5) != 0 || name[5] < '0' || name[5] > '9') return false;
    *ret_step = strtoll(name + 5, &end, 10);
    return *end == '\0';
}

static int by_step(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

#define STEP_NAME 32 // bytes of a folder's name

static void step_name(int64_t step, char ret[STEP_NAME])
{
    snprintf(ret, STEP_NAME, "step-%" PRId64, step);
}

// Said anew at each checkpoint, so that a crash between a folder and its link mends itself. A best
// checkpoint that somebody removed is no error.
static enum status link_best(const char *checkpoints, int64_t step)
{
    char name[STEP_NAME];
    step_name(step, name);
    char *folder = path_join(checkpoints, name);
    if (!folder) return no_memory();
    enum status st = file_exists(folder) ? swap_link(checkpoints, "best", name) : ST_OK;
    free(folder);
    return st;
}

static bool is_kept(const struct checkpoint *c, int64_t step)
{
    return step == c->step || (c->best_step && step == *c->best_step) ||
           (c->keep_start && step == 0);
}

static enum status remove_step(const char *checkpoints, int64_t step)
{
    char name[STEP_NAME];
    step_name(step, name);
    char *path = path_join(checkpoints, name);
    enum status st = path ? file_remove_tree(path) : no_memory();
    free(path);
    return st;
}

// Removes all but the step just written, the keep - 1 highest of the others, and what is_kept().
static enum status remove_old(const char *checkpoints, const struct checkpoint *c, int keep)
{
    enum status st = ST_OK;
    int64_t *steps = NULL, step;
    int n = 0;
    DIR *dir = opendir(checkpoints);
    if (!dir) return status_fail(ST_IO, "%s: %s", checkpoints, strerror(errno));
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (!step_of(entry->d_name, &step) || step == c->step) continue;
        int64_t *larger = array_room(steps, (size_t)n, sizeof *steps);
        if (!larger) CHECK(no_memory());
        steps = larger;
        steps[n++] = step;
    }
    if (n > 1) qsort(steps, (size_t)n, sizeof *steps, by_step);
    for (int i = 0; i < n - (keep - 1); i++)
        if (!is_kept(c, steps[i])) CHECK(remove_step(checkpoints, steps[i]));
out:
    free(steps);
    closedir(dir);
    return st;
}

// Half-written folders, and links (".latest.PID.new"), of processes that were killed: a run folder
// has one writer.
static enum status remove_leftovers(const char *checkpoints)
{
    enum status st = ST_OK;
    DIR *dir = opendir(checkpoints);
    if (!dir) return status_fail(ST_IO, "%s: %s", checkpoints, strerror(errno));
    for (struct dirent *entry; st == ST_OK && (entry = readdir(dir));) {
        size_t len = strlen(entry->d_name);
        if (entry->d_name[0] != '.' || len < 4 || strcmp(entry->d_name + len - 4, ".new") != 0)
            continue;
        char *path = path_join(checkpoints, entry->d_name);
        st = path ? file_remove_tree(path) : no_memory();
        free(path);
    }
    closedir(dir);
    return st;
}

enum status checkpoint_write(const char *run_folder, const struct checkpoint *c, struct device *dev,
                             const struct checkpoint_model *policy,
                             const struct checkpoint_model *draft, int keep, char **ret_folder)
{
    enum status st = ST_OK;
    struct trainer_files files = {c, dev, policy, draft};
    char name[STEP_NAME], absolute[PATH_MAX];
    char *checkpoints = path_join(run_folder, "checkpoints"), *folder = NULL;
    step_name(c->step, name);
    if (!checkpoints || !(folder = path_join(checkpoints, name))) CHECK(no_memory());
    CHECK(file_make_folders(checkpoints));
    CHECK(remove_leftovers(checkpoints));
    CHECK(model_folder_write(folder, dev, policy->weights, policy->weights->dt,
                             policy->source_folder, write_trainer_files, &files));
    if (c->best_step) CHECK(link_best(checkpoints, *c->best_step));
    CHECK(swap_link(checkpoints, "latest", name));
    if (c->replaced_step && !is_kept(c, *c->replaced_step))
        CHECK(remove_step(checkpoints, *c->replaced_step));
    if (keep > 0) CHECK(remove_old(checkpoints, c, keep));
    if (ret_folder) {
        if (!realpath(folder, absolute)) FAIL(ST_IO, "%s: %s", folder, strerror(errno));
        if (!(*ret_folder = strdup(absolute))) st = no_memory();
    }
out:
    free(checkpoints);
    free(folder);
    return st;
}

static enum status follow_link(const char *run_folder, const char *name, char **ret_folder)
{
    char absolute[PATH_MAX];
    char *link = path_join(run_folder, name), *folder = NULL;
    if (!link) return no_memory();
    bool found = realpath(link, absolute) != NULL;
    int error = errno;
    enum status st = ST_OK;
    if (found && !(folder = strdup(absolute)))
        st = no_memory();
    else if (!found && error != ENOENT)
        st = status_fail(ST_IO, "%s: %s", link, strerror(error));
    else
        *ret_folder = folder;
    free(link);
    return st;
}

// A run whose last checkpoint was taken away would otherwise start over, on top of its records.
enum status checkpoint_latest(const char *run_folder, char **ret_folder)
{
    char target[PATH_MAX], *folder = NULL;
    enum status st = follow_link(run_folder, "checkpoints/latest", &folder);
    if (st != ST_OK) return st;
    char *link = folder ? NULL : path_join(run_folder, "checkpoints/latest");
    if (!folder && !link) return no_memory();
    ssize_t len = folder ? -1 : readlink(link, target, sizeof target);
    if (len > 0)
        st = status_fail(ST_NOT_FOUND,
                         "%s: it names %.*s, which is not there any more; let it name another "
                         "(ln -sfn step-N %s), or remove it to start over",
                         link, (int)len, target, link);
    else
        *ret_folder = folder;
    free(link);
    return st;
}

enum status checkpoint_best(const char *run_folder, char **ret_folder)
{
    return follow_link(run_folder, "checkpoints/best", ret_folder);
}

enum status checkpoint_read(const char *folder, struct checkpoint *ret)
{
    enum status st = ST_OK;
    struct checkpoint c = {.step = -1, .data_index = -1};
    char *path = find_trainer_file(folder, STATE_FILE);
    if (!path) return no_memory();
    CHECK(json_read_file(path, MAX_STATE, &c.state));
    CHECK(json_get_int(path, c.state, "step", 0, INT64_MAX, &c.step));
    CHECK(json_get_int(path, c.state, "data_index", 0, INT64_MAX, &c.data_index));
    if (c.step < 0 || c.data_index < 0)
        FAIL(ST_FORMAT, "%s: no field \"step\" or \"data_index\"", path);
    *ret = c;
out:
    if (st != ST_OK) json_decref(c.state);
    free(path);
    return st;
}

static enum status load_optimizer(const char *folder, const struct checkpoint *c, const char *steps,
                                  struct optimizer *optimizer)
{
    if (json_integer_value(json_object_get(c->state, steps)) == 0) return ST_OK;
    char *path = find_trainer_file(folder, OPTIMIZER_FILE);
    if (!path) return no_memory();
    enum status st = optimizer_load(optimizer, path);
    free(path);
    return st;
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
    char *draft = path_join(folder, CHECKPOINT_DRAFT);
    if (!draft) return no_memory();
    enum status st = load_optimizer(draft, c, DRAFT_STEPS, optimizer);
    free(draft);
    return st;
}
