/* endpoints_runs.c: training runs and checkpoints that lie on disk, and URLs of their files to take
 * along. Loop's thread: these are small files and folders, and large ones go chunk by chunk.
 *
 * A URL is of this server, and holds a signature in place of a key, since who fetches it (curl, the
 * SDK's own downloads) sends none. What is signed is the checkpoint, the file ("": all, as an
 * archive), and which folder it is: once the checkpoint is saved anew, URLs of before lead nowhere,
 * so that nobody puts files of two of them together. */
#include "trainer/serve/tinker.h"
#include "common/base/log.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define EXPIRES_S 3600

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
    const char *host = http_host(c->q);
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
        FAIL(ST_NOT_FOUND, "there is no file \"%.150s\"", tail);
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
    http_stream_sized(c->q, *file ? "application/octet-stream" : "application/x-tar", n_bytes,
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
    json_t *all = NULL, *page = json_array();
    enum status st;
    CHECK(c->which == CHECKPOINTS ? runs_checkpoints(runs, NULL, &all)
                                  : runs_training_runs(runs, c->tinker->damaged, &all));
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
        return status_fail(ST_NOT_FOUND, "there is no checkpoint \"%.150s\"", tail);
    return runs_find(c->tinker->model->runs, ret, ret_folder);
}

// GET /api/v1/training_runs/RUN, .../RUN/checkpoints, and .../RUN/checkpoints/KIND/NAME/
// external_weights_urls, or archive, as SDKs before it ask.
static enum status training_run(const struct call *c)
{
    const char *runs = c->tinker->model->runs, *tail = http_path_tail(c->q), *action;
    char *run = strndup(tail, strcspn(tail, "/")), folder[PATH_ROOM];
    struct run_path path;
    json_t *object = NULL;
    enum status st;
    if (!run) return status_fail(ST_NO_MEMORY, "out of memory");
    CHECK(runs_training_run(runs, run, &object));
    if (strcmp(tail + strlen(run), "/checkpoints") == 0) {
        json_decref(object);
        object = NULL;
        CHECK(runs_checkpoints(runs, run, &object));
        st = tinker_reply(c, json_pack("{s:O}", "checkpoints", object));
    } else if (tail[strlen(run)]) {
        CHECK(read_checkpoint(c, &path, folder, &action));
        const bool archive = strcmp(action, "/archive") == 0;
        if (!archive && strcmp(action, "/external_weights_urls") != 0)
            FAIL(ST_NOT_FOUND, "a checkpoint has no \"%.100s\" here", action);
        st = reply_urls(c, &path, folder, archive);
    } else {
        st = tinker_reply(c, json_incref(object));
    }
out:
    json_decref(object);
    free(run);
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
        return status_fail(ST_NOT_FOUND, "a checkpoint has no \"%.100s\" to set here", action);
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
    if (*action) FAIL(ST_NOT_FOUND, "a checkpoint has no \"%.100s\" to delete here", action);
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
// there, and a whole model has rank 0.
static enum status weights_info(const struct call *c)
{
    struct tinker *t = c->tinker;
    struct run_path path;
    char folder[PATH_ROOM];
    json_t *run = NULL;
    enum status st;
    CHECK(runs_find_path(t->model->runs, c->tinker_path, &path, folder));
    CHECK(runs_training_run(t->model->runs, path.run, &run));
    st = tinker_reply(c, json_pack("{s:O, s:b, s:O, s:O, s:O, s:O}", "base_model",
                                   json_object_get(run, "base_model"), "is_lora", 1, "lora_rank",
                                   json_object_get(run, "lora_rank"), run_trains[2],
                                   json_object_get(run, run_trains[2]), run_trains[1],
                                   json_object_get(run, run_trains[1]), run_trains[0],
                                   json_object_get(run, run_trains[0])));
out:
    json_decref(run);
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
