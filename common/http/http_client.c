/* http_client.c: HTTP/1.1 to the daemon over its Unix socket.
 *
 * One libcurl easy handle driven through a multi handle of its own, although there is never more
 * than one transfer: only the multi interface hands control back every 100 ms, which is when
 * deadlines, the gap between bytes and the daemon's life are looked at. The multi handle keeps the
 * connection. Used by one thread. Error sentences of a failing line function are kept: nothing
 * after it records another. */
#include "common/http/http_client.h"
#include "common/base/clock.h"
#include "common/base/json.h"

#include <curl/curl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#define SLICE_MS        100
#define MAX_BODY_BYTES  (256u << 20) // of a whole answer, and of one line of a longer one
#define MAX_ERROR_BYTES 65536        // of an answer that says what went wrong

struct http_client {
    char socket[sizeof(((struct sockaddr_un *)0)->sun_path)];
    CURL *easy;
    CURLM *multi;
    struct curl_slist *headers;
};

struct transfer {
    struct http_client *client;
    const char *method, *path;
    struct bytes body; // the answer; of NDJSON the line that is not whole yet
    http_line_fn on_line;
    void *context;
    enum status failed; // of on_line or of a limit; its sentence is recorded
    int64_t last_byte_ns;
};

static pthread_once_t curl_once = PTHREAD_ONCE_INIT;
static CURLcode curl_ready;

static void curl_start(void)
{
    curl_ready = curl_global_init(CURL_GLOBAL_DEFAULT);
}

enum status http_client_new(const char *socket_path, struct http_client **ret)
{
    pthread_once(&curl_once, curl_start);
    if (curl_ready != CURLE_OK)
        return status_fail(ST_NO_MEMORY, "libcurl does not start: %s",
                           curl_easy_strerror(curl_ready));
    struct http_client *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "no memory for an HTTP client");
    enum status st = ST_OK;
    size_t len = strlen(socket_path);
    if (len == 0 || len >= sizeof c->socket) {
        st = status_fail(ST_INVALID, "socket path \"%s\" has %zu characters; 1 to %zu are possible",
                         socket_path, len, sizeof c->socket - 1);
        goto out;
    }
    memcpy(c->socket, socket_path, len + 1);
    c->easy = curl_easy_init();
    c->multi = curl_multi_init();
    c->headers = curl_slist_append(NULL, "Content-Type: application/json");
    // No "Expect: 100-continue": it costs a round trip, or a second where it is not answered.
    struct curl_slist *more = c->headers ? curl_slist_append(c->headers, "Expect:") : NULL;
    if (!c->easy || !c->multi || !more) {
        st = status_fail(ST_NO_MEMORY, "no memory for an HTTP client");
        goto out;
    }
    c->headers = more;
    *ret = c;
    c = NULL;
out:
    http_client_free(c);
    return st;
}

void http_client_free(struct http_client *c)
{
    if (!c) return;
    if (c->easy) curl_easy_cleanup(c->easy);
    if (c->multi) curl_multi_cleanup(c->multi);
    curl_slist_free_all(c->headers);
    free(c);
}

// ---- what arrives -------------------------------------------------------------------------------

// Hands over the whole lines of t->body and keeps the rest. New bytes begin at `from`.
static void hand_over_lines(struct transfer *t, size_t from)
{
    char *data = t->body.data;
    size_t start = 0, len = t->body.len;
    while (t->failed == ST_OK && from < len) {
        char *end = memchr(data + from, '\n', len - from);
        if (!end) break;
        size_t n = (size_t)(end - data) - start;
        if (n > 0) t->failed = t->on_line(t->context, data + start, n);
        start = from = (size_t)(end - data) + 1;
    }
    if (start > 0) {
        memmove(data, data + start, len - start);
        t->body.len = len - start;
    }
}

static size_t on_data(char *data, size_t size, size_t n, void *argument)
{
    struct transfer *t = argument;
    size_t len = size * n, from = t->body.len;
    long code = 0;
    curl_easy_getinfo(t->client->easy, CURLINFO_RESPONSE_CODE, &code);
    bool success = code / 100 == 2;
    t->last_byte_ns = clock_now_ns();
    if (!success) { // the first part of it is enough to say why
        size_t room = from < MAX_ERROR_BYTES ? MAX_ERROR_BYTES - from : 0;
        bytes_append(&t->body, data, len < room ? len : room);
    } else if (from + len > MAX_BODY_BYTES) {
        t->failed = status_fail(ST_FORMAT, "%s %s: the answer%s is longer than %u MiB", t->method,
                                t->path, t->on_line ? "'s line" : "", MAX_BODY_BYTES >> 20);
    } else {
        bytes_append(&t->body, data, len);
        if (t->on_line && !t->body.failed) hand_over_lines(t, from);
    }
    if (t->failed == ST_OK) t->failed = bytes_status(&t->body);
    return t->failed == ST_OK ? len : CURL_WRITEFUNC_ERROR;
}

// ---- one transfer -------------------------------------------------------------------------------

static enum status transfer_error(const struct transfer *t, CURLcode code)
{
    const char *what = curl_easy_strerror(code);
    switch (code) {
    case CURLE_COULDNT_CONNECT:
        return status_fail(ST_PEER_GONE,
                           "%s %s: nobody answers on socket %s: the daemon is not running; start "
                           "cw-infer-server",
                           t->method, t->path, t->client->socket);
    case CURLE_GOT_NOTHING:
    case CURLE_RECV_ERROR:
    case CURLE_SEND_ERROR:
    case CURLE_PARTIAL_FILE:
        return status_fail(ST_PEER_GONE, "%s %s: the daemon closed the connection on %s (%s)",
                           t->method, t->path, t->client->socket, what);
    case CURLE_OUT_OF_MEMORY:
        return status_fail(ST_NO_MEMORY, "%s %s: %s", t->method, t->path, what);
    default:
        return status_fail(ST_IO, "%s %s over %s: %s", t->method, t->path, t->client->socket, what);
    }
}

// Drives the transfer to its end or to the first reason to stop.
static enum status drive(struct transfer *t, int timeout_ms, int idle_timeout_ms,
                         enum status (*alive)(void *), void *context)
{
    CURLM *multi = t->client->multi;
    int64_t deadline = timeout_ms > 0 ? clock_deadline_ns(timeout_ms) : INT64_MAX;
    int64_t asked = clock_now_ns();
    for (;;) {
        int running = 0, left;
        CURLMcode error = curl_multi_perform(multi, &running);
        if (t->failed != ST_OK) return t->failed;
        if (error != CURLM_OK)
            return status_fail(ST_IO, "%s %s: %s", t->method, t->path, curl_multi_strerror(error));
        CURLMsg *message;
        while ((message = curl_multi_info_read(multi, &left)))
            if (message->msg == CURLMSG_DONE)
                return message->data.result == CURLE_OK ? ST_OK
                                                        : transfer_error(t, message->data.result);
        if (clock_now_ns() >= deadline)
            return status_fail(ST_TIMEOUT, "%s %s: no whole answer within %d ms", t->method,
                               t->path, timeout_ms);
        if (idle_timeout_ms > 0 && clock_ms_since(t->last_byte_ns) >= idle_timeout_ms)
            return status_fail(ST_TIMEOUT, "%s %s: nothing arrived for %d ms", t->method, t->path,
                               idle_timeout_ms);
        if (alive && clock_ms_since(asked) >= SLICE_MS) {
            asked = clock_now_ns();
            enum status st = alive(context);
            if (st != ST_OK) return st;
        }
        int left_ms = deadline == INT64_MAX ? SLICE_MS : clock_ms_until(deadline);
        curl_multi_poll(multi, NULL, 0, left_ms < SLICE_MS ? left_ms : SLICE_MS, NULL);
    }
}

// The sentence out of {"error": {"message": ...}} or {"error": ...}, else the answer's beginning.
static enum status answer_error(const struct transfer *t, long code)
{
    enum status st = code == 429 || code == 503 ? ST_BUSY : code / 100 == 4 ? ST_INVALID : ST_IO;
    json_t *json = json_loadb(bytes_text(&t->body), t->body.len, 0, NULL);
    const json_t *error = json_object_get(json, "error");
    const char *sentence =
        json_string_value(json_is_object(error) ? json_object_get(error, "message") : error);
    if (sentence)
        status_fail(st, "%s %s: %ld: %s", t->method, t->path, code, sentence);
    else
        status_fail(st, "%s %s: %ld: %.200s", t->method, t->path, code, bytes_text(&t->body));
    json_decref(json);
    return st;
}

struct limits {
    int timeout_ms, idle_timeout_ms;
    enum status (*alive)(void *context);
};

// t: client, method, path, on_line and context are set; its body is the caller's to release. A POST
// without a body sends {}.
static enum status perform(struct transfer *t, const json_t *post, const struct limits *limits)
{
    struct http_client *c = t->client;
    struct bytes url = BYTES_INIT;
    char *text = NULL;
    long code = 0;
    enum status st;
    t->last_byte_ns = clock_now_ns();
    bytes_printf(&url, "http://localhost%s", t->path);
    CHECK(bytes_status(&url));

    curl_easy_reset(c->easy); // options only; the connection stays
    curl_easy_setopt(c->easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(c->easy, CURLOPT_UNIX_SOCKET_PATH, c->socket);
    curl_easy_setopt(c->easy, CURLOPT_URL, bytes_text(&url));
    curl_easy_setopt(c->easy, CURLOPT_PROXY, "");
    curl_easy_setopt(c->easy, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(c->easy, CURLOPT_WRITEDATA, t);
    if (strcmp(t->method, "POST") == 0) {
        text = post ? json_dumps(post, JSON_COMPACT) : strdup("{}");
        if (!text) {
            st = status_fail(ST_INVALID, "POST %s: the body cannot be written as JSON", t->path);
            goto out;
        }
        curl_easy_setopt(c->easy, CURLOPT_HTTPHEADER, c->headers);
        curl_easy_setopt(c->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(text));
        curl_easy_setopt(c->easy, CURLOPT_POSTFIELDS, text);
    }
    CURLMcode error = curl_multi_add_handle(c->multi, c->easy);
    if (error != CURLM_OK) {
        st = status_fail(ST_IO, "%s %s: %s", t->method, t->path, curl_multi_strerror(error));
        goto out;
    }
    st = drive(t, limits->timeout_ms, limits->idle_timeout_ms, limits->alive, t->context);
    curl_easy_getinfo(c->easy, CURLINFO_RESPONSE_CODE, &code);
    curl_multi_remove_handle(c->multi,
                             c->easy); // a transfer that is not over: closes the connection
    if (st == ST_OK && code / 100 != 2)
        st = answer_error(t, code);
    else if (st == ST_OK && t->on_line && t->body.len > 0) // a last line without its newline
        st = t->on_line(t->context, t->body.data, t->body.len);
out:
    free(text);
    bytes_release(&url);
    return st;
}

// ---- calls --------------------------------------------------------------------------------------

enum status http_get(struct http_client *c, const char *path, int timeout_ms,
                     struct bytes *ret_body)
{
    struct transfer t = {.client = c, .method = "GET", .path = path, .body = BYTES_INIT};
    enum status st = perform(&t, NULL, &(struct limits){.timeout_ms = timeout_ms});
    if (st == ST_OK) {
        bytes_release(ret_body);
        *ret_body = t.body;
    } else {
        bytes_release(&t.body);
    }
    return st;
}

static enum status call_json(struct http_client *c, const char *method, const char *path,
                             const json_t *body, int timeout_ms, json_t **ret)
{
    struct transfer t = {.client = c, .method = method, .path = path, .body = BYTES_INIT};
    enum status st = perform(&t, body, &(struct limits){.timeout_ms = timeout_ms});
    if (st == ST_OK && ret) st = json_parse(path, bytes_text(&t.body), t.body.len, ret);
    bytes_release(&t.body);
    return st;
}

enum status http_get_json(struct http_client *c, const char *path, int timeout_ms, json_t **ret)
{
    return call_json(c, "GET", path, NULL, timeout_ms, ret);
}

enum status http_post_json(struct http_client *c, const char *path, const json_t *body,
                           int timeout_ms, json_t **ret)
{
    return call_json(c, "POST", path, body, timeout_ms, ret);
}

enum status http_post_lines(struct http_client *c, const char *path, const json_t *body,
                            int timeout_ms, int idle_timeout_ms, http_line_fn on_line,
                            enum status (*alive)(void *context), void *context)
{
    struct transfer t = {.client = c,
                         .method = "POST",
                         .path = path,
                         .body = BYTES_INIT,
                         .on_line = on_line,
                         .context = context};
    enum status st = perform(&t, body, &(struct limits){timeout_ms, idle_timeout_ms, alive});
    bytes_release(&t.body);
    return st;
}
