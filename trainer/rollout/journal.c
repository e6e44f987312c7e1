/* journal.c: the file of a step's calls, and the same in memory. */
#include "trainer/rollout/journal.h"
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
    struct bytes lines; // those that are whole
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
    CHECK(put(r->journal, &place, json_incref(entry)));
    bytes_append(&r->lines, text, len);
    st = bytes_status(&r->lines);
out:
    json_decref(entry);
    return st;
}

// Reads what is there; of its own file leaves the whole lines, for others to be put behind.
static enum status read_calls(struct journal *j, const char *path)
{
    struct reading r = {j, path, BYTES_INIT};
    enum status st = ST_OK;
    if (!file_exists(path)) return ST_OK;
    CHECK(file_each_line(path, take_line, &r));
    if (path == j->path) CHECK(file_write_atomic(path, 0644, bytes_text(&r.lines), r.lines.len));
out:
    bytes_release(&r.lines);
    return st;
}

static enum status path_of(const char *folder, int64_t step, int rank, char ret[PATH_ROOM])
{
    return rank == 0 ? path_put(ret, folder, "step-%" PRId64 ".jsonl", step)
                     : path_put(ret, folder, "step-%" PRId64 ".rank-%d.jsonl", step, rank);
}

// The other ranks' first, so that of a call which two have kept its own stands.
static enum status read_all(struct journal *j, int64_t step)
{
    char path[PATH_ROOM];
    enum status st = ST_OK;
    DIR *all = opendir(j->folder);
    for (struct dirent *e; st == ST_OK && all && (e = readdir(all));) {
        int64_t of;
        const char *end = strrchr(e->d_name, '.'); // another one's is what a rank is writing anew
        if (sscanf(e->d_name, "step-%" SCNd64 ".", &of) != 1 || of != step) continue;
        if (!end || strcmp(end, ".jsonl") != 0) continue;
        st = path_put(path, j->folder, "%s", e->d_name);
        if (st == ST_OK && strcmp(path, j->path) != 0) st = read_calls(j, path);
    }
    if (all) closedir(all);
    return st == ST_OK ? read_calls(j, j->path) : st;
}

enum status journal_open(const char *run_folder, int64_t step, int rank, struct journal **ret)
{
    enum status st = ST_OK;
    struct journal *j = calloc(1, sizeof *j);
    if (!j) return status_fail(ST_NO_MEMORY, "no memory for a journal");
    j->fd = -1;
    if (!(j->calls = json_object())) FAIL(ST_NO_MEMORY, "no memory for a journal");
    CHECK(path_put(j->folder, run_folder, FOLDER));
    CHECK(path_of(j->folder, step, rank, j->path));
    CHECK(read_all(j, step));
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

static enum status open_file(struct journal *j)
{
    enum status st = ST_OK;
    if (j->fd >= 0) return ST_OK;
    CHECK(file_make_folders(j->folder));
    j->fd = open(j->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (j->fd < 0) FAIL(ST_IO, "%s: %s", j->path, strerror(errno));
    st = file_sync_parent(j->path);
out:
    return st;
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
    CHECK(open_file(j));
    CHECK(file_write_all(j->fd, j->path, text.data, text.len));
    if (fdatasync(j->fd) != 0) FAIL(ST_IO, "%s: %s", j->path, strerror(errno));
    CHECK(put(j, place, json_incref(entry)));
out:
    json_decref(entry);
    bytes_release(&text);
    return st;
}

enum status journal_forget(const char *run_folder, int64_t step)
{
    char folder[PATH_ROOM], path[PATH_ROOM];
    enum status st = path_put(folder, run_folder, FOLDER);
    DIR *all = st == ST_OK ? opendir(folder) : NULL;
    for (struct dirent *e; all && (e = readdir(all));) {
        int64_t of;
        if (sscanf(e->d_name, "step-%" SCNd64 ".jsonl", &of) != 1 || of > step) continue;
        if ((st = path_put(path, folder, "%s", e->d_name)) != ST_OK) break;
        if (unlink(path) != 0 && errno != ENOENT)
            st = status_fail(ST_IO, "%s: %s", path, strerror(errno));
    }
    if (all) closedir(all);
    return st;
}
