/* endpoints_downloads.c: checkpoints to take along: URLs of their files, and the files themselves.
 * Loop's thread.
 *
 * A URL is of this server, and holds a signature in place of a key, since who fetches it (curl, the
 * SDK's own downloads) sends none. What is signed is the checkpoint, the file ("": all, as an
 * archive), and which folder it is: once the checkpoint is saved anew, URLs of before lead nowhere,
 * so that nobody puts files of two of them together. */
#include "common/base/log.h"
#include "trainer/serve/tinker.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define EXPIRES_S 3600

// ---- URLs ---------------------------------------------------------------------------------------

static enum status sign(const struct tinker *t, const struct run_path *path, const char *file,
                        int64_t expires_s, char ret_folder[PATH_ROOM], char ret[SIGNATURE_ROOM])
{
    char text[RUN_PATH_ROOM];
    struct stat info;
    struct bytes name = BYTES_INIT;
    enum status st;
    CHECK(runs_find(t->model->runs, path, ret_folder));
    if (stat(ret_folder, &info) != 0) FAIL(ST_NOT_FOUND, "%s is gone", ret_folder);
    run_path_text(path, text);
    bytes_printf(&name, "%s/%s %llu %lld.%ld", text, file, (unsigned long long)info.st_ino,
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
static enum status make_url(const struct call *c, const struct run_path *path, const char *file,
                            int64_t expires_s, json_t **ret)
{
    const char *host = http_host(c->q);
    char folder[PATH_ROOM], signature[SIGNATURE_ROOM], text[RUN_PATH_ROOM];
    struct bytes url = BYTES_INIT;
    enum status st;
    if (!host) FAIL(ST_INVALID, "a Host header is missing, which URLs are made of");
    CHECK(sign(c->tinker, path, file, expires_s, folder, signature));
    run_path_text(path, text);
    bytes_printf(&url, "http://%s/api/v1/files/%s/", host, signature);
    append_escaped(text + strlen("tinker://"), &url);
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

enum status tinker_reply_urls(const struct call *c, const struct run_path *path, bool archive)
{
    const int64_t expires_s = time(NULL) + EXPIRES_S;
    char folder[PATH_ROOM];
    const char *name;
    json_t *files = NULL, *urls = json_object(), *size, *url;
    enum status st;
    if (archive) {
        CHECK(make_url(c, path, "", expires_s, &url));
        st = tinker_reply(c, json_pack("{s:o, s:o}", "url", url, "expires", runs_time(expires_s)));
        goto out;
    }
    CHECK(runs_find(c->tinker->model->runs, path, folder));
    CHECK(runs_files(folder, &files));
    json_object_foreach (files, name, size) {
        CHECK(make_url(c, path, name, expires_s, &url));
        json_object_set_new(urls, name, url);
    }
    st = tinker_reply(c, json_pack("{s:O, s:o}", "urls", urls, "expires", runs_time(expires_s)));
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
    const char *tail = http_path_tail(c->q), *more, *file;
    const size_t n = strcspn(tail, "/");
    const int64_t expires_s = strtoll(tail, NULL, 10);
    char run[RUN_NAME_ROOM], folder[PATH_ROOM], given[SIGNATURE_ROOM], wanted[SIGNATURE_ROOM];
    struct run_path path;
    struct download *download;
    json_t *files = NULL;
    int64_t n_bytes;
    enum status st;
    if (n >= sizeof given || !tail[n] || !run_split(tail + n + 1, run, &more))
        FAIL(ST_NOT_FOUND, "there is no file \"%.150s\"", tail);
    snprintf(given, sizeof given, "%.*s", (int)n, tail);
    CHECK(run_path_read(run, more, &path, &file));
    if (sign(c->tinker, &path, file, expires_s, folder, wanted) != ST_OK ||
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

const struct endpoint download_endpoints[] = {
    {"GET", "/api/v1/files/*", get_file, NULL, HTTP_OPEN, 0}, // whose path is signed
    {0},
};
