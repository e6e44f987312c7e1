/* journal.c: the file of a step's calls, and the same in memory. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/trajectory.h"
#include "common/base/file.h"
#include "common/base/json.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FOLDER   "journal"
#define KEY_ROOM 48

struct journal {
    char folder[PATH_ROOM], path[PATH_ROOM];
    int fd;        // -1: there is no file yet, nor need the folder be there
    json_t *calls; // "GROUP/SAMPLE/NUMBER" -> its line
};

static const char *key_of(const struct journal_place *p, int number, char ret[KEY_ROOM])
{
    snprintf(ret, KEY_ROOM, "%d/%d/%d", p->group, p->sample, number);
    return ret;
}

// Takes the reference to the entry over.
static enum status put(struct journal *j, const struct journal_place *place, json_t *entry)
{
    char key[KEY_ROOM];
    int later = place->number + 1;
    const json_t *was = json_object_get(j->calls, key_of(place, place->number, key));
    const bool other = was && !json_equal(was, entry); // a course that is no longer taken
    if (json_object_set_new(j->calls, key, entry) != 0)
        return status_fail(ST_NO_MEMORY, "%s: no memory for a call", j->path);
    while (other && json_object_del(j->calls, key_of(place, later, key)) == 0) later++;
    return ST_OK;
}

struct reading {
    struct journal *journal;
    const char *path;
};

static enum status take_line(void *context, const char *text, size_t len)
{
    struct reading *r = context;
    struct journal_place place = {0};
    json_t *entry = NULL;
    const char *path = r->path;
    enum status st;
    CHECK(json_parse(path, text, len, &entry));
    CHECK(json_get_int32(path, entry, "group", 0, INT32_MAX, &place.group));
    CHECK(json_get_int32(path, entry, "sample", 0, INT32_MAX, &place.sample));
    CHECK(json_get_int32(path, entry, "number", 0, INT32_MAX - 1, &place.number));
    st = put(r->journal, &place, json_incref(entry));
out:
    json_decref(entry);
    return st;
}

static enum status read_calls(void *context, const char *path)
{
    struct reading r = {context, path};
    return strcmp(path, r.journal->path) == 0 ? ST_OK : file_each_line(path, take_line, &r);
}

// Of each file of these steps.
static enum status each_file(const char *folder, int64_t first, int64_t last,
                             enum status (*take)(void *context, const char *path), void *context)
{
    char path[PATH_ROOM];
    enum status st = ST_OK;
    DIR *all = opendir(folder);
    for (struct dirent *e; st == ST_OK && all && (e = readdir(all));) {
        int64_t step;
        const char *end = strrchr(e->d_name, '.');
        if (!end || strcmp(end, ".jsonl") != 0) continue;
        if (sscanf(e->d_name, "step-%" SCNd64 ".", &step) != 1 || step < first || step > last)
            continue;
        st = path_put(path, folder, "%s", e->d_name);
        if (st == ST_OK) st = take(context, path);
    }
    if (all) closedir(all);
    return st;
}

// The other ranks' calls first, so that of one which two have kept its own stands. A last line of
// its own file that is not whole is cut off, for others to be put behind.
enum status journal_open(const char *run_folder, int64_t step, int rank, struct journal **ret)
{
    enum status st = ST_OK;
    int64_t whole = 0;
    struct journal *j = calloc(1, sizeof *j);
    if (!j) return status_fail(ST_NO_MEMORY, "no memory for a journal");
    struct reading own = {j, j->path};
    char of_rank[32] = "";
    j->fd = -1;
    if (!(j->calls = json_object())) FAIL(ST_NO_MEMORY, "no memory for a journal");
    CHECK(path_put(j->folder, run_folder, FOLDER));
    if (rank > 0) snprintf(of_rank, sizeof of_rank, ".rank-%d", rank);
    CHECK(path_put(j->path, j->folder, "step-%" PRId64 "%s.jsonl", step, of_rank));
    CHECK(each_file(j->folder, step, step, read_calls, j));
    if (file_exists(j->path)) {
        CHECK(file_lines_from(j->path, &whole, take_line, &own));
        if (truncate(j->path, whole) != 0) FAIL(ST_IO, "%s: %s", j->path, strerror(errno));
    }
    *ret = j;
out:
    if (st != ST_OK) journal_close(j);
    return st;
}

void journal_close(struct journal *j)
{
    if (!j) return;
    if (j->fd >= 0) close(j->fd);
    json_decref(j->calls);
    free(j);
}

json_t *journal_find(const struct journal *j, const struct journal_place *place, const json_t *call)
{
    char key[KEY_ROOM];
    const json_t *entry = json_object_get(j->calls, key_of(place, place->number, key));
    const json_t *line = json_object_get(entry, "line");
    if (!entry || json_integer_value(line) != place->line) return NULL;
    return json_equal(json_object_get(entry, "call"), call) ? json_object_get(entry, "result")
                                                            : NULL;
}

enum status journal_keep(struct journal *j, const struct journal_place *place, const json_t *call,
                         const json_t *result)
{
    struct bytes text = BYTES_INIT;
    enum status st;
    json_t *entry =
        json_pack("{s:i, s:i, s:i, s:i, s:O, s:O}", "line", place->line, "group", place->group,
                  "sample", place->sample, "number", place->number, "call", call, "result", result);
    CHECK(json_put_line(&text, json_incref(entry), 0));
    if (j->fd < 0) {
        CHECK(file_make_folders(j->folder));
        j->fd = open(j->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (j->fd < 0) FAIL(ST_IO, "%s: %s", j->path, strerror(errno));
        CHECK(file_sync_parent(j->path));
    }
    CHECK(file_write_all(j->fd, j->path, text.data, text.len));
    if (fdatasync(j->fd) != 0) FAIL(ST_IO, "%s: %s", j->path, strerror(errno));
    CHECK(put(j, place, json_incref(entry)));
out:
    json_decref(entry);
    bytes_release(&text);
    return st;
}

static enum status remove_file(void *context, const char *path)
{
    (void)context;
    if (unlink(path) == 0 || errno == ENOENT) return ST_OK;
    return status_fail(ST_IO, "%s: %s", path, strerror(errno));
}

enum status journal_forget(const char *run_folder, int64_t step)
{
    char folder[PATH_ROOM];
    enum status st = path_put(folder, run_folder, FOLDER);
    return st == ST_OK ? each_file(folder, INT64_MIN, step, remove_file, NULL) : st;
}
