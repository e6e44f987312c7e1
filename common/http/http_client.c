/* http_client.c: HTTP/1.1 requests in flight, of one thread.
 *
 * Every request is a libcurl easy handle in the client's multi handle, which keeps the connections.
 * http_poll() is the one place where anything happens: bytes move, lines are handed over, and every
 * 100 ms deadlines, gaps between bytes and the server's life are looked at. A request that has
 * ended keeps its status with its sentence, which others would overwrite, until it is finished. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/http_client.h"
#include "common/base/clock.h"
#include "common/base/json.h"

#include <curl/curl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#define SLICE_MS        100
#define CONNECT_MS      10000L
#define MAX_BODY_BYTES  (256u << 20) // of a whole response, and of one line of a longer one
#define MAX_ERROR_BYTES 65536        // of a response that says what went wrong

struct http_client {
    char *server, *key; // key: NULL: there is none
    CURLM *multi;
    struct curl_slist *headers;
    struct curl_slist *tcp_headers; // those with the key
    struct http_transfer *requests; // all that are not finished
};

struct http_transfer {
    struct http_transfer *next;
    struct http_client *client;
    struct http_call call; // without its body; server and path are owned
    CURL *easy;
    char *text;        // of a POST's body
    struct bytes body; // the response; of NDJSON the line that is not whole yet
    int64_t deadline, last_byte_ns, asked_ns;
    bool ended;
    struct status_kept failure; // the first
};

static pthread_once_t curl_once = PTHREAD_ONCE_INIT;
static CURLcode curl_ready;

static void curl_start(void)
{
    curl_ready = curl_global_init(CURL_GLOBAL_DEFAULT);
}

static bool is_url(const char *server)
{
    return strncmp(server, "http://", strlen("http://")) == 0;
}

static enum status check_server(const char *server)
{
    const size_t len = strlen(server), max = sizeof(((struct sockaddr_un *)0)->sun_path) - 1;
    if (is_url(server) || (len > 0 && len <= max)) return ST_OK;
    return status_fail(ST_INVALID, "socket path \"%s\" has %zu characters; 1 to %zu are possible",
                       server, len, max);
}

enum status http_client_new(const char *server, struct http_client **ret)
{
    enum status st;
    struct http_client *c = NULL;
    pthread_once(&curl_once, curl_start);
    if (curl_ready != CURLE_OK)
        return status_fail(ST_NO_MEMORY, "libcurl does not start: %s",
                           curl_easy_strerror(curl_ready));
    CHECK(check_server(server));
    c = calloc(1, sizeof *c);
    struct curl_slist *headers = curl_slist_append(NULL, "Content-Type: application/json");
    // No "Expect: 100-continue": it costs a round trip, or a second where it is not answered.
    if (!c || !(c->headers = headers) || !curl_slist_append(headers, "Expect:") ||
        !(c->server = strdup(server)) || !(c->multi = curl_multi_init())) {
        if (!c) curl_slist_free_all(headers);
        FAIL(ST_NO_MEMORY, "no memory for an HTTP client");
    }
    *ret = TAKE_PTR(c);
out:
    http_client_free(c);
    return st;
}

void http_client_free(struct http_client *c)
{
    if (!c) return;
    while (c->requests) http_cancel(c->requests);
    if (c->multi) curl_multi_cleanup(c->multi);
    curl_slist_free_all(c->headers);
    curl_slist_free_all(c->tcp_headers);
    free(c->server);
    free(c->key);
    free(c);
}

enum status http_client_authorize(struct http_client *c, const char *key)
{
    struct bytes line = BYTES_INIT;
    bytes_printf(&line, "Authorization: Bearer %s", key);
    for (const struct curl_slist *h = c->headers; h; h = h->next)
        c->tcp_headers = curl_slist_append(c->tcp_headers, h->data);
    enum status st = bytes_status(&line);
    c->key = strdup(key);
    if (st == ST_OK &&
        (!c->key || !(c->tcp_headers = curl_slist_append(c->tcp_headers, bytes_text(&line)))))
        st = status_fail(ST_NO_MEMORY, "no memory for an HTTP client");
    bytes_release(&line);
    return st;
}

enum status http_client_another(const struct http_client *c, struct http_client **ret)
{
    enum status st = http_client_new(c->server, ret);
    if (st != ST_OK || !c->key) return st;
    st = http_client_authorize(*ret, c->key);
    if (st != ST_OK) http_client_free(TAKE_PTR(*ret));
    return st;
}

// ---- what arrives -------------------------------------------------------------------------------

// Keeps the sentence that was just recorded.
static void fail(struct http_transfer *r, enum status st)
{
    if (st != ST_OK && r->failure.code == ST_OK) status_keep(&r->failure, st);
}

static const char *method(const struct http_transfer *r)
{
    return r->call.post ? "POST" : "GET";
}

// Hands over the whole lines of the body and keeps the rest. New bytes begin at `from`.
static void hand_over_lines(struct http_transfer *r, size_t from)
{
    char *data = r->body.data;
    size_t start = 0, len = r->body.len;
    while (r->failure.code == ST_OK && from < len) {
        char *end = memchr(data + from, '\n', len - from);
        if (!end) break;
        size_t n = (size_t)(end - data) - start;
        if (n > 0) fail(r, r->call.on_line(r->call.context, data + start, n));
        start = from = (size_t)(end - data) + 1;
    }
    if (start > 0) {
        memmove(data, data + start, len - start);
        r->body.len = len - start;
    }
}

static size_t on_data(char *data, size_t size, size_t n, void *argument)
{
    struct http_transfer *r = argument;
    size_t len = size * n, from = r->body.len;
    long code = 0;
    curl_easy_getinfo(r->easy, CURLINFO_RESPONSE_CODE, &code);
    r->last_byte_ns = clock_now_ns();
    if (code / 100 != 2) { // the first part of it is enough to say why
        size_t room = from < MAX_ERROR_BYTES ? MAX_ERROR_BYTES - from : 0;
        bytes_append(&r->body, data, len < room ? len : room);
    } else if (from + len > MAX_BODY_BYTES) {
        fail(r, status_fail(ST_FORMAT, "%s %s: the response%s is longer than %u MiB", method(r),
                            r->call.path, r->call.on_line ? "'s line" : "", MAX_BODY_BYTES >> 20));
    } else {
        bytes_append(&r->body, data, len);
        if (r->call.on_line && !r->body.failed) hand_over_lines(r, from);
    }
    fail(r, bytes_status(&r->body));
    return r->failure.code == ST_OK ? len : CURL_WRITEFUNC_ERROR;
}

// ---- how a request ends -------------------------------------------------------------------------

static enum status transfer_error(const struct http_transfer *r, CURLcode code)
{
    const char *what = curl_easy_strerror(code), *path = r->call.path, *server = r->call.server;
    switch (code) {
    case CURLE_OK:
        return ST_OK;
    case CURLE_COULDNT_CONNECT:
        return status_fail(ST_PEER_GONE,
                           "%s %s: nobody answers on %s%s: the server is not running; start "
                           "cw-infer-server",
                           method(r), path, is_url(server) ? "" : "socket ", server);
    case CURLE_GOT_NOTHING:
    case CURLE_RECV_ERROR:
    case CURLE_SEND_ERROR:
    case CURLE_PARTIAL_FILE:
        return status_fail(ST_PEER_GONE, "%s %s: the server closed the connection on %s (%s)",
                           method(r), path, server, what);
    case CURLE_OUT_OF_MEMORY:
        return status_fail(ST_NO_MEMORY, "%s %s: %s", method(r), path, what);
    default:
        return status_fail(ST_IO, "%s %s over %s: %s", method(r), path, server, what);
    }
}

// The sentence out of {"error": {"message": ...}} or {"error": ...}, else the response's beginning.
static enum status refusal(const struct http_transfer *r, long code)
{
    enum status st = code == 429 || code == 503 ? ST_BUSY : code / 100 == 4 ? ST_INVALID : ST_IO;
    json_t *json = json_loadb(bytes_text(&r->body), r->body.len, 0, NULL);
    const json_t *error = json_object_get(json, "error");
    const char *sentence =
        json_string_value(json_is_object(error) ? json_object_get(error, "message") : error);
    if (sentence)
        status_fail(st, "%s %s: %ld: %s", method(r), r->call.path, code, sentence);
    else
        status_fail(st, "%s %s: %ld: %s", method(r), r->call.path, code,
                    CUT(bytes_text(&r->body), 200));
    json_decref(json);
    return st;
}

// It is out of libcurl's hands; one that was not over closes its connection.
static void end(struct http_transfer *r)
{
    if (!r->ended) curl_multi_remove_handle(r->client->multi, r->easy);
    r->ended = true;
}

// libcurl is through with it.
static void complete(struct http_transfer *r, CURLcode result)
{
    long code = 0;
    curl_easy_getinfo(r->easy, CURLINFO_RESPONSE_CODE, &code);
    end(r);
    if (r->failure.code != ST_OK) return; // a line's, or a limit's
    fail(r, transfer_error(r, result));
    if (r->failure.code == ST_OK && code / 100 != 2) fail(r, refusal(r, code));
    if (r->failure.code == ST_OK && r->call.on_line &&
        r->body.len > 0) // a last line without its newline
        fail(r, r->call.on_line(r->call.context, r->body.data, r->body.len));
}

// A reason to stop that is not libcurl's.
static enum status check_limits(struct http_transfer *r, int64_t now)
{
    const struct http_call *call = &r->call;
    if (now >= r->deadline)
        return status_fail(ST_TIMEOUT, "%s %s: no whole response within %d ms", method(r),
                           call->path, call->timeout_ms);
    if (call->idle_timeout_ms > 0 && now - r->last_byte_ns >= call->idle_timeout_ms * NS_PER_MS)
        return status_fail(ST_TIMEOUT, "%s %s: nothing arrived for %d ms", method(r), call->path,
                           call->idle_timeout_ms);
    if (!call->alive || now - r->asked_ns < SLICE_MS * NS_PER_MS) return ST_OK;
    r->asked_ns = now;
    return call->alive(call->context);
}

// ---- requests in flight -------------------------------------------------------------------------

static enum status prepare(struct http_transfer *r, const struct http_call *call,
                           const char *server)
{
    enum status st;
    CHECK(check_server(server));
    r->call = *call;
    r->call.post |= call->body != NULL;
    r->call.body = NULL;
    r->call.server = strdup(server);
    r->call.path = strdup(call->path);
    r->easy = curl_easy_init();
    if (!r->call.server || !r->call.path || !r->easy)
        return status_fail(ST_NO_MEMORY, "no memory for an HTTP request");
    if (!r->call.post) return ST_OK;
    r->text = call->body ? json_dumps(call->body, JSON_COMPACT) : strdup("{}");
    if (!r->text)
        st = status_fail(ST_INVALID, "POST %s: the body cannot be written as JSON", call->path);
out:
    return st;
}

static enum status start(struct http_transfer *r)
{
    struct bytes url = BYTES_INIT;
    const bool tcp = is_url(r->call.server);
    bytes_printf(&url, "%s%s", tcp ? r->call.server : "http://localhost", r->call.path);
    enum status st;
    CHECK(bytes_status(&url));
    if (!tcp) curl_easy_setopt(r->easy, CURLOPT_UNIX_SOCKET_PATH, r->call.server);
    curl_easy_setopt(r->easy, CURLOPT_URL, bytes_text(&url));
    curl_easy_setopt(r->easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(r->easy, CURLOPT_PROXY, "");
    curl_easy_setopt(r->easy, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_MS);
    curl_easy_setopt(r->easy, CURLOPT_PRIVATE, (void *)r);
    curl_easy_setopt(r->easy, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(r->easy, CURLOPT_WRITEDATA, r);
    struct curl_slist *headers = tcp && r->client->tcp_headers ? r->client->tcp_headers
                                 : r->text                     ? r->client->headers
                                                               : NULL;
    if (headers) curl_easy_setopt(r->easy, CURLOPT_HTTPHEADER, headers);
    if (r->text) {
        curl_easy_setopt(r->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(r->text));
        curl_easy_setopt(r->easy, CURLOPT_POSTFIELDS, r->text);
    }
    r->last_byte_ns = r->asked_ns = clock_now_ns();
    r->deadline = r->call.timeout_ms > 0 ? clock_deadline_ns(r->call.timeout_ms) : INT64_MAX;
    CURLMcode error = curl_multi_add_handle(r->client->multi, r->easy);
    if (error != CURLM_OK)
        st = status_fail(ST_IO, "%s %s: %s", method(r), r->call.path, curl_multi_strerror(error));
out:
    bytes_release(&url);
    return st;
}

enum status http_submit(struct http_client *c, const struct http_call *call,
                        struct http_transfer **ret)
{
    struct http_transfer *r = calloc(1, sizeof *r);
    if (!r) return status_fail(ST_NO_MEMORY, "no memory for an HTTP request");
    r->client = c;
    r->next = c->requests;
    c->requests = r;
    enum status st = prepare(r, call, call->server ? call->server : c->server);
    if (st == ST_OK) st = start(r);
    if (st == ST_OK)
        *ret = r;
    else
        http_cancel(r);
    return st;
}

void http_cancel(struct http_transfer *r)
{
    if (!r) return;
    LIST_REMOVE(r->client->requests, r);
    if (r->easy) end(r);
    curl_easy_cleanup(r->easy);
    bytes_release(&r->body);
    free(r->text);
    free((char *)r->call.server);
    free((char *)r->call.path);
    free(r);
}

// Moves what can be moved without waiting. True where a request ended.
static bool drive(struct http_client *c)
{
    int running = 0, more;
    bool any = false;
    const CURLMcode error = curl_multi_perform(c->multi, &running);
    for (CURLMsg *message; (message = curl_multi_info_read(c->multi, &more));) {
        struct http_transfer *r = NULL;
        curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, (char **)&r);
        if (message->msg == CURLMSG_DONE) complete(r, message->data.result);
        any = true;
    }
    const int64_t now = clock_now_ns();
    for (struct http_transfer *r = c->requests; r; r = r->next) {
        if (r->ended) continue;
        fail(r, error == CURLM_OK ? check_limits(r, now)
                                  : status_fail(ST_IO, "%s %s: %s", method(r), r->call.path,
                                                curl_multi_strerror(error)));
        if (r->failure.code == ST_OK) continue;
        end(r);
        any = true;
    }
    return any;
}

// Milliseconds to wait for bytes: until the next limit is to be looked at.
static int slice_ms(const struct http_client *c, int64_t until)
{
    int ms = clock_ms_until(until);
    for (const struct http_transfer *r = c->requests; r; r = r->next)
        if (!r->ended && r->deadline < until && clock_ms_until(r->deadline) < ms)
            ms = clock_ms_until(r->deadline);
    return ms < SLICE_MS ? ms : SLICE_MS;
}

void http_poll(struct http_client *c, int ms)
{
    const int64_t until = clock_deadline_ns(ms);
    while (!drive(c) && clock_now_ns() < until)
        curl_multi_poll(c->multi, NULL, 0, slice_ms(c, until), NULL);
}

void http_poll_with(struct http_client *c, const struct pollfd *fds, int n, int ms)
{
    struct curl_waitfd waits[HTTP_MAX_FDS];
    for (int i = 0; i < n; i++)
        waits[i] = (struct curl_waitfd){
            .fd = fds[i].fd,
            .events = (short)((fds[i].events & POLLIN ? CURL_WAIT_POLLIN : 0) |
                              (fds[i].events & POLLOUT ? CURL_WAIT_POLLOUT : 0))};
    if (!drive(c))
        curl_multi_poll(c->multi, waits, (unsigned)n, ms < SLICE_MS ? ms : SLICE_MS, NULL);
    drive(c);
}

bool http_ended(const struct http_transfer *r)
{
    return r->ended;
}

enum status http_finish(struct http_transfer *r, struct bytes *ret_body)
{
    while (!r->ended) http_poll(r->client, SLICE_MS);
    const enum status st = status_recall(&r->failure);
    if (st == ST_OK && ret_body) {
        bytes_release(ret_body);
        *ret_body = r->body;
        r->body = (struct bytes)BYTES_INIT;
    }
    http_cancel(r);
    return st;
}

// ---- one request from beginning to end ----------------------------------------------------------

enum status http_perform(struct http_client *c, const struct http_call *call,
                         struct bytes *ret_body)
{
    struct http_transfer *r = NULL;
    enum status st = http_submit(c, call, &r);
    return st == ST_OK ? http_finish(r, ret_body) : st;
}

enum status http_get(struct http_client *c, const char *path, int timeout_ms,
                     struct bytes *ret_body)
{
    return http_perform(c, &(struct http_call){.path = path, .timeout_ms = timeout_ms}, ret_body);
}

enum status http_perform_json(struct http_client *c, const struct http_call *call, json_t **ret)
{
    struct bytes body = BYTES_INIT;
    enum status st = http_perform(c, call, &body);
    if (st == ST_OK) st = json_parse(call->path, bytes_text(&body), body.len, ret);
    bytes_release(&body);
    return st;
}

enum status http_get_json(struct http_client *c, const char *path, int timeout_ms, json_t **ret)
{
    return http_perform_json(c, &(struct http_call){.path = path, .timeout_ms = timeout_ms}, ret);
}

enum status http_post(struct http_client *c, const char *path, json_t *body, int timeout_ms)
{
    const struct http_call call = {.path = path, .body = body, .timeout_ms = timeout_ms};
    enum status st = body ? http_perform(c, &call, NULL)
                          : status_fail(ST_NO_MEMORY, "no memory to ask for %s", path);
    json_decref(body);
    return st;
}
