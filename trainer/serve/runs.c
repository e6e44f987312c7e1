/* runs.c: training runs on disk. No state; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/runs.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/names.h"
#include "trainer/run/checkpoint.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

const char *const run_kind_names[] = {"weights", "sampler_weights", "external_weights", NULL};
const char *const run_trains[] = {"train_attn", "train_mlp", "train_unembed"};
static const char *const kind_types[] = {"training", "sampler", "external"};

#define SCHEME      "tinker://"
#define RUN_FILE    "run.json"
#define DESCRIPTION (1 << 20)  // bytes of it, at most
#define OWN_FIELD   (64 << 10) // of a client's own in it

bool run_name_is_good(const char *name)
{
    const size_t len = strlen(name);
    if (len == 0 || len >= RUN_NAME_ROOM || name[0] == '.') return false;
    for (size_t i = 0; i < len; i++)
        if (name[i] <= ' ' || name[i] > '~' || strchr("/\\\"'%?#", name[i])) return false;
    return true;
}

// Takes the next name of a path off, with the slash before it.
static bool next_name(const char **path, char ret[RUN_NAME_ROOM])
{
    const char *name = *path + (**path == '/');
    const size_t n = strcspn(name, "/");
    snprintf(ret, RUN_NAME_ROOM, "%.*s", n < RUN_NAME_ROOM ? (int)n : 0, name);
    *path = name + n;
    return run_name_is_good(ret);
}

void run_path_set(struct run_path *ret, const char *run, enum run_kind kind, const char *name)
{
    snprintf(ret->run, sizeof ret->run, "%s", run);
    snprintf(ret->name, sizeof ret->name, "%s", name);
    ret->kind = kind;
    snprintf(ret->text, sizeof ret->text, SCHEME "%s/%s/%s", ret->run, run_kind_names[kind],
             ret->name);
}

bool run_path_read(const char *text, const char *between, struct run_path *ret,
                   const char **ret_more)
{
    char run[RUN_NAME_ROOM], kind[RUN_NAME_ROOM], name[RUN_NAME_ROOM];
    if (!next_name(&text, run) || strncmp(text, between, strlen(between)) != 0) return false;
    text += strlen(between);
    if (!next_name(&text, kind) || !next_name(&text, name)) return false;
    const int i = name_find(run_kind_names, kind);
    if (i < 0) return false;
    run_path_set(ret, run, (enum run_kind)i, name);
    *ret_more = text;
    return true;
}

enum status run_path_parse(const char *path, struct run_path *ret)
{
    const char *more;
    if (strncmp(path, SCHEME, strlen(SCHEME)) == 0 && path[strlen(SCHEME)] != '/' &&
        run_path_read(path + strlen(SCHEME), "", ret, &more) && !*more)
        return ST_OK;
    return status_fail(ST_INVALID,
                       "\"path\" is \"%s\"; it must be tinker://RUN/weights/NAME, or "
                       "with sampler_weights or external_weights in the middle",
                       CUT(path, 200));
}

enum status runs_folder(const char *runs, const struct run_path *path, char ret_folder[PATH_ROOM])
{
    char parent[PATH_ROOM];
    enum status st = path_put(parent, runs, "%s/%s", path->run, run_kind_names[path->kind]);
    if (st == ST_OK) st = file_make_folders(parent);
    return st == ST_OK ? path_put(ret_folder, parent, "%s", path->name) : st;
}

enum status runs_find(const char *runs, const struct run_path *path, char ret_folder[PATH_ROOM])
{
    enum status st =
        path_put(ret_folder, runs, "%s/%s/%s", path->run, run_kind_names[path->kind], path->name);
    if (st == ST_OK && !file_exists(ret_folder))
        st = status_fail(ST_NOT_FOUND, "there is no checkpoint %s/%s/%s in --run-dir %s", path->run,
                         run_kind_names[path->kind], path->name, runs);
    return st;
}

enum status runs_find_path(const char *runs, const char *text, struct run_path *ret,
                           char ret_folder[PATH_ROOM])
{
    enum status st = run_path_parse(text, ret);
    return st == ST_OK ? runs_find(runs, ret, ret_folder) : st;
}

// ---- what they are ------------------------------------------------------------------------------

enum status runs_check_description(const json_t *description)
{
    const char *name;
    json_t *value;
    json_object_foreach ((json_t *)description, name, value) {
        const size_t n = json_dumpb(value, NULL, 0, JSON_ENCODE_ANY);
        if (n > OWN_FIELD)
            return status_fail(ST_INVALID,
                               "\"%s\" has %zu bytes as JSON; a training run keeps at most %d",
                               name, n, OWN_FIELD);
    }
    return ST_OK;
}

enum status runs_describe(const char *runs, const char *run, const json_t *description)
{
    char folder[PATH_ROOM], path[PATH_ROOM];
    enum status st = path_put(folder, runs, "%s", run);
    if (st == ST_OK) st = file_make_folders(folder);
    if (st == ST_OK) st = path_put(path, folder, RUN_FILE);
    return st == ST_OK ? json_write_file(path, 0644, description) : st;
}

json_t *runs_time(time_t seconds)
{
    char text[32];
    struct tm t;
    gmtime_r(&seconds, &t);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &t);
    return json_string(text);
}

static bool is_run(const char *folder, const char *name)
{
    char path[PATH_ROOM];
    return run_name_is_good(name) && path_put(path, folder, "%s/" RUN_FILE, name) == ST_OK &&
           file_exists(path);
}

// Adds all files below a folder, but for those in that folder of it (NULL: none); what cannot be
// read is not there.
static void add_files(const char *folder, const char *before, const char *but, json_t *files)
{
    json_t *names = json_folder(folder), *name;
    char path[PATH_ROOM], within[PATH_ROOM];
    struct stat info;
    size_t i;
    json_array_foreach (names, i, name) {
        const char *text = json_string_value(name);
        if (path_put(path, folder, "%s", text) != ST_OK || lstat(path, &info) != 0) continue;
        if (but && strcmp(text, but) == 0) continue;
        const bool is_folder = S_ISDIR(info.st_mode);
        snprintf(within, sizeof within, "%.1000s%s%s", before, text, is_folder ? "/" : "");
        if (is_folder)
            add_files(path, within, NULL, files);
        else if (S_ISREG(info.st_mode))
            json_object_set_new(files, within, json_integer(info.st_size));
    }
    json_decref(names);
}

int64_t runs_bytes(const json_t *files)
{
    int64_t sum = 0;
    const char *name;
    json_t *size;
    json_object_foreach ((json_t *)files, name, size) sum += json_integer_value(size);
    return sum;
}

enum status runs_files(const char *folder, json_t **ret_files)
{
    json_t *files = json_object();
    if (!files) return status_fail(ST_NO_MEMORY, "out of memory");
    add_files(folder, "", TRAINER_FOLDER, files);
    *ret_files = files;
    return ST_OK;
}

// Appends the checkpoints of one kind.
static enum status append_checkpoints(const char *runs, const char *run, enum run_kind kind,
                                      json_t *list)
{
    char parent[PATH_ROOM], folder[PATH_ROOM], id[RUN_NAME_ROOM + 32];
    json_t *names = NULL, *name;
    size_t i;
    enum status st;
    CHECK(path_put(parent, runs, "%s/%s", run, run_kind_names[kind]));
    names = json_folder(parent);
    json_array_foreach (names, i, name) {
        struct run_path path;
        struct stat info;
        const char *text = json_string_value(name);
        if (!run_name_is_good(text) || path_put(folder, parent, "%s", text) != ST_OK ||
            stat(folder, &info) != 0)
            continue;
        json_t *files = json_object();
        add_files(folder, "", NULL, files);
        run_path_set(&path, run, kind, text);
        snprintf(id, sizeof id, "%s/%s", run_kind_names[kind], text);
        json_t *checkpoint =
            json_pack("{s:s, s:s, s:o, s:s, s:I, s:b}", "checkpoint_id", id, "checkpoint_type",
                      kind_types[kind], "time", runs_time(info.st_mtime), "tinker_path", path.text,
                      "size_bytes", (json_int_t)runs_bytes(files), "public", 0);
        json_decref(files);
        if (json_array_append_new(list, checkpoint)) FAIL(ST_NO_MEMORY, "out of memory");
    }
out:
    json_decref(names);
    return st;
}

// The last by time of those that `kind` is the kind of; null where there is none. New reference.
static json_t *last_of(const json_t *checkpoints, enum run_kind kind)
{
    json_t *last = NULL, *one;
    const char *last_time = "";
    size_t i;
    json_array_foreach (checkpoints, i, one) {
        const char *time = json_string_value(json_object_get(one, "time")),
                   *type = json_string_value(json_object_get(one, "checkpoint_type"));
        if (strcmp(type, kind_types[kind]) != 0 || strcmp(time, last_time) < 0) continue;
        last = one;
        last_time = time;
    }
    return last ? json_incref(last) : json_null();
}

enum status runs_checkpoints(const char *runs, const char *run, json_t *list)
{
    json_t *names = run ? json_pack("[s]", run) : json_folder(runs), *name;
    size_t i;
    enum status st = ST_OK;
    if (!names && run) FAIL(ST_NO_MEMORY, "out of memory");
    if (!names) FAIL(ST_IO, "%s: %s", runs, strerror(errno));
    json_array_foreach (names, i, name)
        for (int kind = 0; kind < RUN_KINDS && is_run(runs, json_string_value(name)); kind++)
            CHECK(append_checkpoints(runs, json_string_value(name), (enum run_kind)kind, list));
out:
    json_decref(names);
    return st;
}

enum status runs_training_run(const char *runs, const char *run, json_t **ret)
{
    char path[PATH_ROOM];
    struct stat info;
    json_t *d = NULL, *checkpoints = json_array(), *object = NULL;
    enum status st;
    if (!run_name_is_good(run))
        FAIL(ST_NOT_FOUND, "there is no training run \"%s\"", CUT(run, 100));
    CHECK(path_put(path, runs, "%s/" RUN_FILE, run));
    if (stat(path, &info) != 0)
        FAIL(ST_NOT_FOUND, "there is no training run \"%s\" in --run-dir %s", run, runs);
    CHECK(json_read_file(path, DESCRIPTION, &d));
    CHECK(runs_checkpoints(runs, run, checkpoints));
    object = json_pack("{s:s, s:O, s:s, s:b, s:O?, s:b, s:o, s:o, s:o, s:O?}", "training_run_id",
                       run, "base_model", json_object_get(d, "base_model"), "model_owner", "local",
                       "is_lora", 1, "lora_rank", json_object_get(d, "lora_rank"), "corrupted", 0,
                       "last_request_time", runs_time(info.st_mtime), "last_checkpoint",
                       last_of(checkpoints, RUN_WEIGHTS), "last_sampler_checkpoint",
                       last_of(checkpoints, RUN_SAMPLER_WEIGHTS), "user_metadata",
                       json_object_get(d, "user_metadata"));
    for (int i = 0; object && i < RUN_TRAINS;
         i++) { // of runs of before there is nothing: they train all
        json_t *trains = json_object_get(d, run_trains[i]);
        json_object_set_new(object, run_trains[i], trains ? json_incref(trains) : json_true());
    }
    if (!object) FAIL(ST_FORMAT, "%s is none that was written here", path);
    *ret = object;
out:
    json_decref(checkpoints);
    json_decref(d);
    return st;
}

enum status runs_training_runs(const char *runs, json_t *warned, json_t *list)
{
    json_t *names = json_folder(runs), *name, *run;
    size_t i;
    if (!names) return status_fail(ST_IO, "%s: %s", runs, strerror(errno));
    json_array_foreach (names, i, name) {
        const char *text = json_string_value(name);
        if (!is_run(runs, text)) continue;
        if (runs_training_run(runs, text, &run) == ST_OK) {
            json_array_append_new(list, run);
            continue;
        }
        if (!json_object_get(warned, text))
            log_warn("the list of training runs leaves %s out: %s", text, status_message());
        json_object_set_new(warned, text, json_true());
    }
    json_decref(names);
    return ST_OK;
}
