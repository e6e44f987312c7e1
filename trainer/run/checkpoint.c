/* checkpoint.c: fills a folder beside the one that is wanted, then puts it in its place; and
 * writes, finds and reads the checkpoints of a run. Owns no state; the trainer's thread.
 *
 * Weights are stored in the dtype they are trained in. With bf16 that is the upper half of the
 * exact fp32 master, whose lower half is in trainer/optimizer.safetensors: both give every bit
 * back.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/checkpoint.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/model/fp8_folder.h"
#include "common/model/model_folder.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
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

// "a/b" -> "a/.b.PID.new": beside it, so that a rename stays within one file system.
static enum status path_beside(const char *path, char ret[PATH_ROOM])
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char folder[PATH_ROOM];
    snprintf(folder, sizeof folder, "%.*s", (int)(name - path), path);
    return path_put(ret, folder, ".%s.%d.new", name, (int)getpid());
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

static int64_t step_of(const char *name) // -1: it is no checkpoint
{
    char *end;
    if (strncmp(name, "step-", 5) != 0 || !isdigit((unsigned char)name[5])) return -1;
    int64_t step = strtoll(name + 5, &end, 10);
    return *end ? -1 : step;
}

static bool is_checkpoint(const char *name)
{
    return step_of(name) >= 0;
}

// Half-written folders, and links (".latest.PID.new"), of processes that were killed: a run folder
// has one writer.
static bool is_leftover(const char *name)
{
    const size_t len = strlen(name);
    return name[0] == '.' && len >= 4 && strcmp(name + len - 4, ".new") == 0;
}

static bool is_kept(int64_t written, const struct checkpoint_others *others, int64_t step)
{
    return step == written || (others->best_step && step == *others->best_step) ||
           (others->keep_start && step == 0);
}

// Removes what `chosen` chooses, but for the `keep` last checkpoints of these and what is_kept().
static enum status remove_all(const char *checkpoints, bool (*chosen)(const char *name),
                              int64_t written, const struct checkpoint_others *others, int keep)
{
    char path[PATH_ROOM];
    enum status st = ST_OK;
    json_t *names = json_folder(checkpoints);
    if (!names) return status_fail(ST_IO, "%s: %s", checkpoints, strerror(errno));
    for (size_t n = json_array_size(names); n-- > 0 && st == ST_OK;) {
        const char *name = json_string_value(json_array_get(names, n));
        const int64_t step = step_of(name);
        const bool stays = step >= 0 && step != written && chosen(name) && keep-- > 0;
        if (!chosen(name) || stays || is_kept(written, others, step)) continue;
        st = path_put(path, checkpoints, "%s", name);
        if (st == ST_OK) st = file_remove_tree(path);
    }
    json_decref(names);
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

// ---- a folder -----------------------------------------------------------------------------------

#define MAX_COPIED ((size_t)1 << 30)

static enum status copy_file(const char *from, const char *to, const char *name)
{
    enum status st;
    struct bytes content = BYTES_INIT;
    char target[PATH_ROOM];
    CHECK(path_put(target, to, "%s", name));
    if (!model_file_exists(from, name)) goto out;
    CHECK(model_file_read(from, name, MAX_COPIED, &content));
    CHECK(file_write_atomic(target, 0644, bytes_text(&content), content.len));
out:
    bytes_release(&content);
    return st;
}

// The chat templates by name; a folder without any is fine.
static enum status copy_chat_templates(const char *from, const char *to)
{
    char source[PATH_ROOM], target[PATH_ROOM];
    json_t *names = NULL, *name;
    size_t i;
    enum status st;
    CHECK(path_put(source, from, MODEL_TEMPLATES_FOLDER));
    CHECK(path_put(target, to, MODEL_TEMPLATES_FOLDER));
    if (json_array_size(names = json_folder(source)) == 0) goto out;
    CHECK(file_make_folders(target));
    json_array_foreach (names, i, name)
        if (json_string_value(name)[0] != '.')
            CHECK(copy_file(source, target, json_string_value(name)));
    st = file_sync_folder(target);
out:
    json_decref(names);
    return st;
}

// config.json with the dtype that was written, under whichever of its two names the source has.
static enum status write_config(const char *folder, const struct model_folder *m)
{
    const struct model_config *config = m->weights->config;
    enum status st;
    char path[PATH_ROOM];
    const char *dtype = dtype_torch_name(m->as);
    const char *dot = strrchr(dtype, '.');
    json_t *copy = json_copy(config->source);
    CHECK(path_put(path, folder, "config.json"));
    if (json_object_set_new(copy, json_object_get(copy, "dtype") ? "dtype" : "torch_dtype",
                            json_string(dot ? dot + 1 : dtype)) != 0 ||
        (m->to && json_object_set_new(copy, "quantization_config",
                                      fp8_config_new(m->weights, m->to == QUANTIZATION_FP8)) != 0))
        FAIL(ST_NO_MEMORY, "no memory to write a model folder");
    CHECK(json_write_file(path, 0644, copy));
out:
    json_decref(copy);
    return st;
}

void sweep_beside(const char *path, bool all)
{
    char folder[PATH_ROOM], prefix[PATH_ROOM];
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(name - path) : 1, slash ? path : ".");
    if (path_put(prefix, "", ".%s.", name) == ST_OK)
        file_sweep_owned(folder, all ? "." : prefix, ".new");
}

// A folder cannot be renamed over one that has content: the two then change places, in one step.
static enum status move_into_place(const char *temporary, const char *folder)
{
    bool replaces = false;
    if (rename(temporary, folder) != 0) {
        replaces = errno == ENOTEMPTY || errno == EEXIST;
        if (!replaces || renameat2(AT_FDCWD, temporary, AT_FDCWD, folder, RENAME_EXCHANGE) != 0)
            return status_fail(ST_IO, "%s: cannot be put in place: %s", folder, strerror(errno));
    }
    enum status st = file_sync_parent(folder);
    return st == ST_OK && replaces ? file_remove_tree(temporary) : st;
}

// What the state has of the models, and what the caller adds.
static json_t *state_of(const struct model_folder *m)
{
    const int64_t steps = m->optimizer ? optimizer_steps(m->optimizer) : 0;
    json_t *state =
        json_pack("{s:i, s:I, s:s*, s:O*}", "format_version", STATE_FORMAT, "optimizer_steps",
                  (json_int_t)steps, ADAPTER_STATE, m->adapter_name, ADAPTER_BASE, m->adapter_base);
    bool ok = state && (!m->state || json_object_update(state, m->state) == 0);
    if (ok && m->draft && m->draft->optimizer)
        ok = json_object_set_new(state, "draft_optimizer_steps",
                                 json_integer(optimizer_steps(m->draft->optimizer))) == 0;
    if (ok) return state;
    json_decref(state);
    return NULL;
}

// FOLDER/trainer/, made on first use.
static enum status write_state(const struct model_folder *m, const char *folder)
{
    char inside[PATH_ROOM], path[PATH_ROOM];
    const bool stepped = m->optimizer && optimizer_steps(m->optimizer) > 0; // else all zeros
    json_t *state = NULL;
    enum status st = ST_OK;
    if (!stepped && !m->state && !m->adapter) return ST_OK;
    CHECK(path_put(inside, folder, TRAINER_FOLDER));
    CHECK(file_make_folders(inside));
    if (stepped) {
        CHECK(path_put(path, inside, OPTIMIZER_FILE));
        CHECK(optimizer_save(m->optimizer, path));
        CHECK(file_sync_folder(inside));
    }
    if (m->state || m->adapter) {
        if (!(state = state_of(m))) FAIL(ST_NO_MEMORY, "no memory for the state of %s", folder);
        CHECK(path_put(path, inside, STATE_FILE));
        CHECK(json_write_file(path, 0644, state));
    }
out:
    json_decref(state);
    return st;
}

static enum status write_inside(const char *folder, const char *name, struct device *dev,
                                const struct model_folder *m)
{
    char path[PATH_ROOM];
    if (!m) return ST_OK;
    enum status st = path_put(path, folder, "%s", name);
    return st == ST_OK ? model_folder_write(path, dev, m) : st;
}

enum status model_folder_write(const char *folder, struct device *dev, const struct model_folder *m)
{
    enum status st;
    char path[PATH_ROOM], temporary[PATH_ROOM] = "";
    const char *const *name;
    size_t len = strlen(folder);
    while (len > 1 && folder[len - 1] == '/') len--;
    CHECK(path_put(path, "", "%.*s", (int)len, folder));
    CHECK(path_beside(path, temporary));
    sweep_beside(path, false);
    CHECK(file_remove_tree(temporary)); // of an earlier process with this number
    CHECK(file_make_folders(temporary));
    if (m->adapter) {
        CHECK(adapter_save(m->adapter, dev, temporary, m->as));
    } else {
        CHECK(write_config(temporary, m));
        for (name = model_folder_files; m->source_folder && *name; name++)
            CHECK(copy_file(m->source_folder, temporary, *name));
        if (m->source_folder) CHECK(copy_chat_templates(m->source_folder, temporary));
        CHECK(m->to ? weights_save_twin(m->weights, dev, temporary, m->as)
                    : weights_save(m->weights, dev, temporary, m->as));
    }
    CHECK(write_state(m, temporary));
    CHECK(write_inside(temporary, DRAFT_FOLDER, dev, m->draft));
    CHECK(write_inside(temporary, REFERENCE_FOLDER, dev, m->reference));
    CHECK(file_sync_folder(temporary));
    CHECK(move_into_place(temporary, path));
out:
    if (st != ST_OK && temporary[0]) file_remove_tree(temporary);
    return st;
}

enum status adapter_folder_start(const char *folder, const struct adapter *a, const char *from,
                                 uint64_t seed, const char *name, json_t *base)
{
    enum status st;
    struct adapter_config *config;
    struct adapter *made = NULL;
    struct device *host = NULL;
    struct model_config whole = *a->base->config; // of which this rank may have a shard
    struct weights *plan = NULL;
    whole.layers = whole.whole;
    whole.shard = (struct shard){0, 1};
    CHECK(device_open("cpu", &host));
    CHECK(weights_plan(&whole, a->base->dt, &plan));
    CHECK(adapter_config_from_json("adapter", a->config->source, &config));
    CHECK(adapter_new(config, plan, a->weights->dt, &made));
    CHECK(weights_alloc(made->weights, host));
    if (from) CHECK(adapter_check(made, from));
    CHECK(from ? adapter_load(made, host, from) : adapter_init(made, host, seed));
    const struct model_folder m = {
        .as = a->weights->dt, .adapter = made, .adapter_name = name, .adapter_base = base};
    st = model_folder_write(folder, host, &m);
out:
    adapter_free(made);
    weights_free(plan);
    device_free(host);
    return st;
}
