/* checkpoint.c: writes, finds and reads checkpoints. Owns no state; the trainer's thread.
 *
 * Weights are stored in the dtype they are trained in. With bf16 that is the upper half of the
 * exact fp32 master, whose lower half is in trainer/optimizer.safetensors: both give every bit
 * back.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/checkpoint.h"
#include "common/base/file.h"
#include "common/base/json.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_STATE ((size_t)1 << 26)
#define STEP_NAME "step-%" PRId64

// The absolute path behind links; "" where there is nothing.
static enum status resolve(const char *path, char ret_folder[PATH_ROOM])
{
    if (realpath(path, ret_folder)) return ST_OK;
    ret_folder[0] = '\0';
    return errno == ENOENT ? ST_OK : status_fail(ST_IO, "%s: %s", path, strerror(errno));
}

// FOLDER/trainer/NAME, or FOLDER/NAME where an older checkpoint has it there.
static enum status find_trainer_file(const char *folder, const char *name, char ret[PATH_ROOM])
{
    char older[PATH_ROOM];
    enum status st;
    CHECK(path_put(older, folder, "%s", name));
    CHECK(path_put(ret, folder, TRAINER_FOLDER "/%s", name));
    if (!file_exists(ret) && file_exists(older)) strcpy(ret, older);
out:
    return st;
}

enum status checkpoint_read(const char *folder, struct checkpoint *ret)
{
    enum status st = ST_OK;
    struct checkpoint c = {.step = -1, .data_index = -1, .draft_optimizer_steps = -1};
    int64_t format = 0;
    const struct {
        const char *name;
        int64_t *ret;
    } counts[] = {
        {"format_version", &format},
        {"step", &c.step},
        {"data_index", &c.data_index},
        {"num_tokens", &c.num_tokens},
        {"skipped_updates", &c.skipped_updates},
        {"optimizer_steps", &c.optimizer_steps},
        {"draft_optimizer_steps", &c.draft_optimizer_steps},
    };
    char path[PATH_ROOM];
    CHECK(find_trainer_file(folder, STATE_FILE, path));
    CHECK(json_read_file(path, MAX_STATE, &c.state));
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        CHECK(json_get_int(path, c.state, counts[i].name, 0, INT64_MAX, counts[i].ret));
    if (format > STATE_FORMAT)
        FAIL(ST_UNSUPPORTED,
             "%s: format_version is %" PRId64 ", and this program reads up to %d: go on with the "
             "version that wrote it",
             path, format, STATE_FORMAT);
    if (c.step < 0 || c.data_index < 0)
        FAIL(ST_FORMAT, "%s: no field \"step\" or \"data_index\"", path);
    *ret = c;
out:
    if (st != ST_OK) json_decref(c.state);
    return st;
}

// ---- a run's checkpoints ------------------------------------------------------------------------

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

static bool is_kept(int64_t written, const struct checkpoint_others *others, int64_t step)
{
    return step == written || (others->best_step && step == *others->best_step) ||
           (others->keep_start && step == 0);
}

// Removes what `chosen` chooses, but for the `keep` last checkpoints of these and what is_kept().
static enum status remove_all(const char *checkpoints, int (*chosen)(const struct dirent *),
                              int64_t written, const struct checkpoint_others *others, int keep)
{
    struct dirent **entries = NULL;
    char path[PATH_ROOM];
    enum status st = ST_OK;
    int n = scandir(checkpoints, &entries, chosen, versionsort);
    if (n < 0) return status_fail(ST_IO, "%s: %s", checkpoints, strerror(errno));
    while (n-- > 0) {
        const int64_t step = step_of(entries[n]);
        const bool stays = step >= 0 && step != written && keep-- > 0;
        if (st == ST_OK) st = path_put(path, checkpoints, "%s", entries[n]->d_name);
        if (st == ST_OK && !stays && !is_kept(written, others, step)) st = file_remove_tree(path);
        free(entries[n]);
    }
    free(entries);
    return st;
}

enum status checkpoint_write(const char *run_folder, struct device *dev,
                             const struct model_folder *m, const struct checkpoint_others *others,
                             char ret_folder[PATH_ROOM])
{
    enum status st;
    const int64_t step = json_integer_value(json_object_get(m->state, "step"));
    char checkpoints[PATH_ROOM], folder[PATH_ROOM], best[PATH_ROOM], replaced[PATH_ROOM];
    CHECK(path_put(checkpoints, run_folder, "checkpoints"));
    CHECK(path_put(folder, checkpoints, STEP_NAME, step));
    CHECK(file_make_folders(checkpoints));
    CHECK(remove_all(checkpoints, is_leftover, step, others, 0));
    CHECK(model_folder_write(folder, dev, m));
    // Said anew at each checkpoint, so that a crash between a folder and its link mends itself. A
    // best checkpoint that somebody removed is no error.
    if (others->best_step) {
        CHECK(path_put(best, checkpoints, STEP_NAME, *others->best_step));
        if (file_exists(best)) CHECK(swap_link(checkpoints, "best", *others->best_step));
    }
    CHECK(swap_link(checkpoints, "latest", step));
    if (others->replaced_step && !is_kept(step, others, *others->replaced_step)) {
        CHECK(path_put(replaced, checkpoints, STEP_NAME, *others->replaced_step));
        CHECK(file_remove_tree(replaced));
    }
    if (others->keep > 0)
        CHECK(remove_all(checkpoints, is_checkpoint, step, others, others->keep - 1));
    if (ret_folder) st = resolve(folder, ret_folder);
out:
    return st;
}

enum status checkpoint_find(const char *run_folder, const char *name, char ret_folder[PATH_ROOM])
{
    char target[PATH_ROOM], link[PATH_ROOM];
    enum status st;
    CHECK(path_put(link, run_folder, "checkpoints/%s", name));
    CHECK(resolve(link, ret_folder));
    if (ret_folder[0] || strcmp(name, "latest") != 0) goto out;
    // A run whose last checkpoint was taken away would otherwise start over, on top of its records.
    ssize_t len = readlink(link, target, sizeof target);
    if (len > 0)
        FAIL(ST_NOT_FOUND,
             "%s: it names %.*s, which is not there any more; let it name another (ln -sfn step-N "
             "%s), or remove it to start over",
             link, (int)len, target, link);
out:
    return st;
}

enum status checkpoint_load_optimizer(const char *folder, int64_t steps,
                                      struct optimizer *optimizer)
{
    char path[PATH_ROOM];
    if (steps == 0) return ST_OK;
    enum status st = find_trainer_file(folder, OPTIMIZER_FILE, path);
    return st == ST_OK ? optimizer_load(optimizer, path) : st;
}
