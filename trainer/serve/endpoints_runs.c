/* endpoints_runs.c: training runs and checkpoints that lie on disk, and URLs of their files to take
 * along. Loop's thread: these are small files and folders, and large ones go chunk by chunk.
 *
 * A URL is of this server, and holds a signature in place of a key, since who fetches it (curl, the
 * SDK's own downloads) sends none. What is signed is the checkpoint, the file ("": all, as an
 * archive), and which folder it is: once the checkpoint is saved anew, URLs of before lead nowhere,
 * so that nobody puts files of two of them together.
 *
 * A download is a state machine of the file that is open, what of it is not read yet, and which
 * comes after it. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/tinker.h"
#include "common/base/log.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPIRES_S   3600
#define CHUNK_BYTES (256 << 10)
#define TAR_BLOCK   512
#define TAR_END     (2 * TAR_BLOCK)
static const char zeros[TAR_END];

// ---- downloads ----------------------------------------------------------------------------------

struct download {
    char folder[PATH_ROOM], path[PATH_ROOM]; // path: of the open file
    int folder_fd; // what is saved over it meanwhile is another folder, of which nothing is read
    json_t *files;
    void *next;   // of files; NULL: all were opened
    int fd;       // -1: none
    int64_t left; // bytes of it
    int padding;  // behind it
    bool archive;
    bool ended;
};

static int padding_of(int64_t n_bytes)
{
    return (int)(-n_bytes & (TAR_BLOCK - 1));
}

enum status download_new(const char *folder, const json_t *files, const char *file,
                         struct download **ret, int64_t *ret_bytes)
{
    const char *name;
    json_t *size;
    enum status st = ST_OK;
    struct download *d = calloc(1, sizeof *d);
    if (!d) return status_fail(ST_NO_MEMORY, "out of memory");
    d->fd = -1;
    d->folder_fd = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (d->folder_fd < 0) FAIL(ST_NOT_FOUND, "%s: %s", folder, strerror(errno));
    if (!(d->files = json_object())) FAIL(ST_NO_MEMORY, "out of memory");
    snprintf(d->folder, sizeof d->folder, "%s", folder);
    d->archive = !*file;
    int64_t n_bytes = d->archive ? TAR_END : 0;
    json_object_foreach ((json_t *)files, name, size) {
        const int64_t n = json_integer_value(size);
        if (!d->archive && strcmp(name, file) != 0) continue;
        json_object_set(d->files, name, size);
        n_bytes += d->archive ? TAR_BLOCK + n + padding_of(n) : n;
    }
    if (!(d->next = json_object_iter(d->files)))
        FAIL(ST_NOT_FOUND, "there is no file \"%s\" in %s", CUT(file, 100), folder);
    *ret = d;
    *ret_bytes = n_bytes;
    d = NULL;
out:
    download_free(d);
    return st;
}

void download_free(struct download *d)
{
    if (!d) return;
    if (d->fd >= 0) close(d->fd);
    if (d->folder_fd >= 0) close(d->folder_fd);
    json_decref(d->files);
    free(d);
}

// ---- tar ----------------------------------------------------------------------------------------

struct tar_header { // all text, octal numbers with a NUL behind them
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100],
        magic[6], version[2], user[32], group[32], major[8], minor[8], prefix[155], unused[12];
};
_Static_assert(sizeof(struct tar_header) == TAR_BLOCK, "a header is one block");

// Eleven octal digits hold less than 8 GiB; beyond, a set bit and the number in big-endian bytes.
static void put_size(int64_t n_bytes, char ret[12])
{
    if (n_bytes < (int64_t)1 << 33) {
        snprintf(ret, 12, "%011llo", (unsigned long long)n_bytes);
        return;
    }
    for (int i = 11; i > 0; i--, n_bytes >>= 8) ret[i] = (char)(n_bytes & 255);
    ret[0] = (char)0x80;
}

static enum status put_header(const char *name, const struct stat *info, struct bytes *to)
{
    struct tar_header h = {.mode = "0000644",
                           .uid = "0000000",
                           .gid = "0000000",
                           .type = '0',
                           .magic = "ustar",
                           .version = {'0', '0'}};
    unsigned sum = 0;
    if (strlen(name) >= sizeof h.name)
        return status_fail(ST_UNSUPPORTED, "%s: the name is too long for an archive", name);
    memcpy(h.name, name, strlen(name));
    put_size(info->st_size, h.size);
    put_size(info->st_mtime, h.mtime);
    memset(h.checksum, ' ', sizeof h.checksum);
    for (size_t i = 0; i < sizeof h; i++) sum += ((const unsigned char *)&h)[i];
    snprintf(h.checksum, sizeof h.checksum, "%06o", sum);
    bytes_append(to, &h, sizeof h);
    return ST_OK;
}

// ---- chunks -------------------------------------------------------------------------------------

static enum status open_next(struct download *d, struct bytes *to)
{
    const char *name = json_object_iter_key(d->next);
    const int64_t size = json_integer_value(json_object_iter_value(d->next));
    struct stat info;
    enum status st;
    d->next = json_object_iter_next(d->files, d->next);
    CHECK(path_put(d->path, d->folder, "%s", name));
    d->fd = openat(d->folder_fd, name, O_RDONLY | O_CLOEXEC);
    if (d->fd < 0 || fstat(d->fd, &info) != 0) FAIL(ST_IO, "%s: %s", d->path, strerror(errno));
    if (info.st_size != size) FAIL(ST_IO, "%s: is another file than before", d->path);
    d->left = size;
    if (!d->archive) goto out;
    d->padding = padding_of(size);
    st = put_header(name, &info, to);
out:
    return st;
}

static enum status read_chunk(struct download *d, struct bytes *to)
{
    const size_t want = d->left < CHUNK_BYTES ? (size_t)d->left : CHUNK_BYTES;
    if (!bytes_reserve(to, want)) return bytes_status(to);
    const ssize_t n = want ? read(d->fd, to->data + to->len, want) : 0;
    if (n < 0 || (n == 0 && want))
        return status_fail(ST_IO, "%s: %s", d->path, n ? strerror(errno) : "ends early");
    to->len += (size_t)n;
    d->left -= n;
    if (d->left > 0) return ST_OK;
    bytes_append(to, zeros, (size_t)d->padding);
    close(d->fd);
    d->fd = -1;
    return ST_OK;
}

enum stream_state download_next(struct download *d, struct bytes *to)
{
    enum status st = ST_OK;
    if (d->ended) return STREAM_END;
    if (d->fd < 0 && d->next) st = open_next(d, to);
    if (st == ST_OK && d->fd >= 0) st = read_chunk(d, to);
    if (st != ST_OK) return STREAM_FAIL;
    d->ended = d->fd < 0 && !d->next;
    if (d->ended && d->archive) bytes_append(to, zeros, TAR_END);
    return d->ended ? STREAM_END : STREAM_MORE;
}

// ---- URLs ---------------------------------------------------------------------------------------

static enum status sign(const struct tinker *t, const struct run_path *path, const char *folder,
                        const char *file, int64_t expires_s, char ret[SIGNATURE_ROOM])
{
    struct stat info;
    struct bytes name = BYTES_INIT;
    enum status st;
    if (stat(folder, &info) != 0) return status_fail(ST_NOT_FOUND, "%s is gone", folder);
    bytes_printf(&name, "%s/%s %llu %lld.%ld", path->text, file, (unsigned long long)info.st_ino,
                 (long long)info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
    CHECK(bytes_status(&name));
    signature_text(&t->signing, bytes_text(&name), expires_s, ret);
out:
    bytes_release(&name);
    return st;
}

// Appends the text as a URL's path has it.
static void append_escaped(const char *text, struct bytes *to)
{
    for (; *text; text++)
        if (isascii(*text) && (isalnum(*text) || strchr("-._~/:@", *text)))
            bytes_append(to, text, 1);
        else
            bytes_printf(to, "%%%02X", (unsigned char)*text);
}

// New reference in ret.
static enum status make_url(const struct call *c, const struct run_path *path, const char *folder,
                            const char *file, int64_t expires_s, json_t **ret)
{
    const char *host = http_header_of(c->q, "Host");
    char signature[SIGNATURE_ROOM];
    struct bytes url = BYTES_INIT;
    enum status st;
    if (!host) FAIL(ST_INVALID, "a Host header is missing, which URLs are made of");
    CHECK(sign(c->tinker, path, folder, file, expires_s, signature));
    bytes_printf(&url, "http://%s/api/v1/files/%s/", host, signature);
    append_escaped(path->text + strlen("tinker://"), &url);
    bytes_puts(&url, "/");
    append_escaped(file, &url);
    CHECK(bytes_status(&url));
    json_t *made = json_string(bytes_text(&url));
    if (!made) FAIL(ST_INVALID, "the Host header, which URLs are made of, is not UTF-8");
    *ret = made;
out:
    bytes_release(&url);
    return st;
}

// Answers with the URLs of a checkpoint's files, or the one of them all.
static enum status reply_urls(const struct call *c, const struct run_path *path, const char *folder,
                              bool archive)
{
    const int64_t expires_s = time(NULL) + EXPIRES_S;
    const char *name;
    json_t *files = archive ? json_pack("{s:n}", "") : NULL, *urls = json_object(), *size, *url;
    enum status st = ST_OK;
    if (!archive) CHECK(runs_files(folder, &files));
    json_object_foreach (files, name, size) {
        CHECK(make_url(c, path, folder, name, expires_s, &url));
        json_object_set_new(urls, name, url);
    }
    st = tinker_reply(c, json_pack("{s:O, s:o}", archive ? "url" : "urls",
                                   archive ? json_object_get(urls, "") : urls, "expires",
                                   runs_time(expires_s)));
out:
    json_decref(urls);
    json_decref(files);
    return st;
}

// ---- what they lead to --------------------------------------------------------------------------

static enum stream_state next_chunk(void *attached, struct http_request *q, struct bytes *to)
{
    if (http_expired(q)) return STREAM_FAIL;
    const enum stream_state state = download_next(attached, to);
    if (state == STREAM_FAIL) log_warn("a download is cut off: %s", status_message());
    return state;
}

static void on_close(void *attached, bool answered)
{
    (void)answered;
    download_free(attached);
}

// GET /api/v1/files/SIGNATURE/RUN/KIND/NAME/FILE. Where the URL is no good the answer is the same
// whether or not there is such a checkpoint: who has no key learns nothing.
static enum status get_file(const struct call *c)
{
    const char *tail = http_path_tail(c->q), *file;
    const size_t n = strcspn(tail, "/");
    const int64_t expires_s = strtoll(tail, NULL, 10);
    char folder[PATH_ROOM], given[SIGNATURE_ROOM], wanted[SIGNATURE_ROOM];
    struct run_path path;
    struct download *download;
    json_t *files = NULL;
    int64_t n_bytes;
    enum status st;
    if (n >= sizeof given || !run_path_read(tail + n, "", &path, &file))
        FAIL(ST_NOT_FOUND, "there is no file \"%s\"", CUT(tail, 150));
    snprintf(given, sizeof given, "%.*s", (int)n, tail);
    file += *file == '/';
    if (runs_find(c->tinker->model->runs, &path, folder) != ST_OK ||
        sign(c->tinker, &path, folder, file, expires_s, wanted) != ST_OK ||
        !signature_is(given, wanted)) {
        http_fail(c->q, 403,
                  "the URL is not of this process and a checkpoint that is there (%s may have been "
                  "saved anew or deleted, or cw-trainer serve started anew): ask for another",
                  path.name);
        return ST_OK;
    }
    if (time(NULL) > expires_s) {
        http_fail(c->q, 403, "the URL was good until %lld s ago: ask for another",
                  (long long)(time(NULL) - expires_s));
        return ST_OK;
    }
    CHECK(runs_files(folder, &files));
    CHECK(download_new(folder, files, file, &download, &n_bytes));
    http_attach(c->q, download, on_close);
    http_stream(c->q, *file ? "application/octet-stream" : "application/x-tar", n_bytes,
                next_chunk);
out:
    json_decref(files);
    return st;
}

// ---- runs and checkpoints -----------------------------------------------------------------------

// GET /api/v1/training_runs and /api/v1/checkpoints, from "offset" on, at most "limit".
enum { TRAINING_RUNS, CHECKPOINTS };
static enum status list(const struct call *c)
{
    static const char *const names[] = {"training_runs", "checkpoints"};
    const char *runs = c->tinker->model->runs, *offset = http_query(c->q, "offset"),
               *limit = http_query(c->q, "limit");
    json_t *all = json_array(), *page = json_array();
    enum status st;
    CHECK(c->which == CHECKPOINTS ? runs_checkpoints(runs, NULL, all)
                                  : runs_training_runs(runs, c->tinker->damaged, all));
    const size_t total = json_array_size(all), first = offset ? strtoul(offset, NULL, 10) : 0,
                 max = limit ? strtoul(limit, NULL, 10) : total;
    for (size_t i = first; i < total && i - first < max; i++)
        json_array_append(page, json_array_get(all, i));
    st = tinker_reply(c, json_pack("{s:O, s:{s:I, s:I, s:I}}", names[c->which], page, "cursor",
                                   "offset", (json_int_t)first, "limit", (json_int_t)max,
                                   "total_count", (json_int_t)total));
out:
    json_decref(page);
    json_decref(all);
    return st;
}

// "RUN/checkpoints/KIND/NAME", which must be there, and a word behind it: "/ttl", or "".
static enum status read_checkpoint(const struct call *c, struct run_path *ret,
                                   char ret_folder[PATH_ROOM], const char **ret_action)
{
    const char *tail = http_path_tail(c->q);
    if (!run_path_read(tail, "/checkpoints", ret, ret_action))
        return status_fail(ST_NOT_FOUND, "there is no checkpoint \"%s\"", CUT(tail, 150));
    return runs_find(c->tinker->model->runs, ret, ret_folder);
}

// GET /api/v1/training_runs/RUN, .../RUN/checkpoints, and .../RUN/checkpoints/KIND/NAME/
// external_weights_urls, or archive, as SDKs before it ask.
static enum status training_run(const struct call *c)
{
    const char *runs = c->tinker->model->runs, *tail = http_path_tail(c->q), *action;
    char run[RUN_NAME_ROOM], folder[PATH_ROOM];
    struct run_path path;
    json_t *object = NULL, *list = json_array();
    enum status st;
    snprintf(run, sizeof run, "%.*s", (int)strcspn(tail, "/"), tail);
    CHECK(runs_training_run(runs, run, &object));
    if (strcmp(tail + strlen(run), "/checkpoints") == 0) {
        CHECK(runs_checkpoints(runs, run, list));
        st = tinker_reply(c, json_pack("{s:O}", "checkpoints", list));
    } else if (tail[strlen(run)]) {
        CHECK(read_checkpoint(c, &path, folder, &action));
        const bool archive = strcmp(action, "/archive") == 0;
        if (!archive && strcmp(action, "/external_weights_urls") != 0)
            FAIL(ST_NOT_FOUND, "a checkpoint has no \"%s\" here", CUT(action, 100));
        st = reply_urls(c, &path, folder, archive);
    } else {
        st = tinker_reply(c, json_incref(object));
    }
out:
    json_decref(object);
    json_decref(list);
    return st;
}

// PUT .../RUN/checkpoints/KIND/NAME/ttl
static enum status set_ttl(const struct call *c)
{
    struct run_path path;
    const char *action;
    char folder[PATH_ROOM];
    enum status st = read_checkpoint(c, &path, folder, &action);
    if (st != ST_OK) return st;
    if (strcmp(action, "/ttl") != 0)
        return status_fail(ST_NOT_FOUND, "a checkpoint has no \"%s\" to set here",
                           CUT(action, 100));
    tinker_warn_ttl(c->tinker, path.run);
    return tinker_reply(c, json_object());
}

// DELETE /api/v1/training_runs/RUN/checkpoints/KIND/NAME. What the server would restore stays.
static enum status remove_checkpoint(const struct call *c)
{
    struct tinker *t = c->tinker;
    char folder[PATH_ROOM];
    const char *action;
    struct run_path path;
    enum status st;
    CHECK(read_checkpoint(c, &path, folder, &action));
    if (*action) FAIL(ST_NOT_FOUND, "a checkpoint has no \"%s\" to delete here", CUT(action, 100));
    if (snapshots_need(t->model->snapshots, folder))
        FAIL(ST_INVALID,
             "%s is what the server restores if a training process dies while it writes: save "
             "another checkpoint before this one is deleted",
             path.name);
    CHECK(file_remove_tree(folder));
    snapshots_forget(t->model->snapshots, path.text);
    log_info("%s: deleted", path.text);
    st = tinker_reply(c, json_object());
out:
    return st;
}

// SDKs before 0.33 make a training client of this, and take nothing but an adapter: is_lora is true
// there, and a whole model has rank 0. Further fields of the run are passed over by all.
static enum status weights_info(const struct call *c)
{
    const char *runs = c->tinker->model->runs;
    struct run_path path;
    char folder[PATH_ROOM];
    json_t *run;
    enum status st;
    CHECK(runs_find_path(runs, c->tinker_path, &path, folder));
    CHECK(runs_training_run(runs, path.run, &run));
    st = tinker_reply(c, run);
out:
    return st;
}

const struct endpoint run_endpoints[] = {
    {"POST", "/api/v1/weights_info", weights_info, "tinker_path", HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/training_runs", list, NULL, HTTP_NEEDS_KEY, TRAINING_RUNS},
    {"GET", "/api/v1/training_runs/*", training_run, NULL, HTTP_NEEDS_KEY, 0},
    {"DELETE", "/api/v1/training_runs/*", remove_checkpoint, NULL, HTTP_NEEDS_KEY, 0},
    {"PUT", "/api/v1/training_runs/*", set_ttl, NULL, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/checkpoints", list, NULL, HTTP_NEEDS_KEY, CHECKPOINTS},
    {"GET", "/api/v1/files/*", get_file, NULL, HTTP_OPEN, 0}, // whose path is signed
    {0},
};
