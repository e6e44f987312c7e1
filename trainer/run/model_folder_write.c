/* model_folder_write.c: fills a folder beside the one that is wanted, then puts it in its place.
 * Owns no state; the trainer's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/model_folder_write.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/model/model_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

static int is_visible(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

// The chat templates by name; a folder without any is fine.
static enum status copy_chat_templates(const char *from, const char *to)
{
    static const char subfolder[] = "additional_chat_templates";
    struct dirent **entries = NULL;
    char source[PATH_ROOM], target[PATH_ROOM];
    enum status st;
    int n = 0;
    CHECK(path_put(source, from, subfolder));
    CHECK(path_put(target, to, subfolder));
    if ((n = scandir(source, &entries, is_visible, alphasort)) <= 0) goto out;
    CHECK(file_make_folders(target));
    for (int i = 0; i < n; i++) CHECK(copy_file(source, target, entries[i]->d_name));
    st = file_sync_folder(target);
out:
    for (int i = 0; i < n; i++) free(entries[i]);
    free(entries);
    return st;
}

// config.json with the dtype that was written, under whichever of its two names the source has.
static enum status write_config(const char *folder, const struct model_config *config,
                                enum dtype as)
{
    enum status st;
    char path[PATH_ROOM];
    const char *dtype = dtype_torch_name(as);
    const char *dot = strrchr(dtype, '.');
    json_t *copy = json_copy(config->source);
    CHECK(path_put(path, folder, "config.json"));
    if (!copy || json_object_set_new(copy, json_object_get(copy, "dtype") ? "dtype" : "torch_dtype",
                                     json_string(dot ? dot + 1 : dtype)) != 0)
        FAIL(ST_NO_MEMORY, "no memory to write a model folder");
    CHECK(json_write_file(path, 0644, copy));
out:
    json_decref(copy);
    return st;
}

// "a/b" -> "a/.b.PID.new": beside it, so that a rename stays within one file system.
enum status path_beside(const char *path, char ret[PATH_ROOM])
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char folder[PATH_ROOM];
    snprintf(folder, sizeof folder, "%.*s", (int)(name - path), path);
    return path_put(ret, folder, ".%s.%d.new", name, (int)getpid());
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
        CHECK(write_config(temporary, m->weights->config, m->as));
        for (name = model_folder_files; m->source_folder && *name; name++)
            CHECK(copy_file(m->source_folder, temporary, *name));
        if (m->source_folder) CHECK(copy_chat_templates(m->source_folder, temporary));
        CHECK(weights_save(m->weights, dev, temporary, m->as));
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
    CHECK(device_open("cpu", &host));
    CHECK(adapter_config_from_json("adapter", a->config->source, &config));
    CHECK(adapter_new(config, a->base, a->weights->dt, &made));
    CHECK(weights_alloc(made->weights, host));
    if (from) CHECK(adapter_check(made, from));
    CHECK(from ? adapter_load(made, host, from) : adapter_init(made, host, seed));
    const struct model_folder m = {
        .as = a->weights->dt, .adapter = made, .adapter_name = name, .adapter_base = base};
    st = model_folder_write(folder, host, &m);
out:
    adapter_free(made);
    device_free(host);
    return st;
}
