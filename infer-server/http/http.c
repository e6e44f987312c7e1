/* http.c: libmicrohttpd under libuv, one thread. libmicrohttpd owns sockets, parsing and limits;
 * its epoll descriptor is polled by the loop, and MHD_run() does what is due.
 *
 * A connection is known from accept on. The life of an exchange on it: READING the body; WAITING
 * (connection suspended) until somebody answers; then the reply is queued, or a stream's producer
 * is asked whenever the socket takes more, and the connection is suspended whenever the producer
 * has nothing. libmicrohttpd does not watch suspended sockets; sweep.c does, and every deadline.
 * Connections change state only inside MHD_run(), which any change from outside calls for by a zero
 * timer: never from within one of libmicrohttpd's own callbacks.
 *
 * Bodies lie in memory until they are answered or parsed. What all of them take is bounded: who
 * comes over the bound while others still have theirs is refused, and may come again. */
#include "infer-server/http/hosts.h"
#include "infer-server/http/http_impl.h"
#include "infer-server/http/json_out.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#define CONNECTION_BYTES (64u << 10) // request line, headers and write buffer of one connection
#define DRAIN_BYTES      (64u << 20) // of a refused body that are read so that the answer arrives

struct http_body {
    struct http *http;
    struct bytes bytes;
};

// ---- running libmicrohttpd ---------------------------------------------------------------------

static void on_timer(uv_timer_t *timer);

void http_run_due(struct listener *l)
{
    MHD_UNSIGNED_LONG_LONG ms = 0;
    // a few rounds at once for what is ready; then the loop's other work has its turn
    for (int round = 0; round < 4; round++) {
        MHD_run(l->daemon);
        if (MHD_get_timeout(l->daemon, &ms) != MHD_YES) {
            uv_timer_stop(&l->timer);
            return;
        }
        if (ms > 0) break;
    }
    uv_timer_start(&l->timer, on_timer, ms, 0);
}

static void on_timer(uv_timer_t *timer)
{
    http_run_due(timer->data);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    http_run_due(poll->data);
}

void http_resume(struct http_request *q)
{
    if (!q->suspended) return;
    q->suspended = false;
    MHD_resume_connection(q->connection);
    uv_timer_start(&q->listener->timer, on_timer, 0, 0);
}

// ---- connections -------------------------------------------------------------------------------

static void connection_new(struct http *h, struct MHD_Connection *mhd, void **ret_context)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct connection *c = calloc(1, sizeof *c);
    if (!c || !info) { // on_request() refuses it
        free(c);
        return;
    }
    c->fd = info->connect_fd;
    c->since_ns = clock_now_ns();
    c->next = h->connections;
    c->link = &h->connections;
    if (h->connections) h->connections->link = &c->next;
    h->connections = c;
    h->n_connections++;
    *ret_context = c;
}

static void connection_free(struct http *h, struct connection *c)
{
    if (!c) return;
    h->n_connections--;
    *c->link = c->next;
    if (c->next) c->next->link = c->link;
    free(c);
}

static void on_connection(void *context, struct MHD_Connection *mhd, void **socket_context,
                          enum MHD_ConnectionNotificationCode code)
{
    struct listener *l = context;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        connection_new(l->http, mhd, socket_context);
    } else {
        connection_free(l->http, *socket_context);
        *socket_context = NULL;
    }
}

static struct connection *connection_of(struct MHD_Connection *mhd)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

// ---- exchanges ---------------------------------------------------------------------------------

static struct http_request *http_request_new(struct listener *l, struct MHD_Connection *connection)
{
    struct connection *socket = connection_of(connection);
    struct http_request *q = socket ? calloc(1, sizeof *q) : NULL;
    if (!q) return NULL;
    struct http *h = l->http;
    socket->request = q;
    socket->used = true;
    q->listener = l;
    q->connection = connection;
    q->socket = socket;
    q->since_ns = clock_now_ns();
    q->deadline_ns = clock_deadline_ns(1000LL * h->options.request_timeout_s);
    h->n_requests++;
    return q;
}

// The request's body is needed no more.
static void drop_body(struct http_request *q)
{
    q->listener->http->buffered -= q->buffered;
    q->buffered = 0;
    bytes_release(&q->body);
}

static void http_request_free(struct http_request *q, bool answered)
{
    if (q->on_close) q->on_close(q->attached, answered);
    if (q->route && q->route->path)
        log_debug("%s %s: %u, %.1f ms%s", q->route->method, q->route->path, q->code,
                  clock_ms_since(q->since_ns), answered ? "" : ", the client had left");
    q->socket->request = NULL;
    q->socket->since_ns = clock_now_ns();
    q->listener->http->n_requests--;
    drop_body(q);
    bytes_release(&q->reply);
    free(q);
}

const char *http_request_body(const struct http_request *q, size_t *ret_len)
{
    *ret_len = q->body.len;
    return bytes_text(&q->body);
}

struct http_body *http_take_body(struct http_request *q)
{
    struct http_body *body = malloc(sizeof *body);
    if (!body) return NULL;
    *body = (struct http_body){.http = q->listener->http, .bytes = q->body};
    body->http->users++;
    q->body = (struct bytes)BYTES_INIT;
    q->buffered = 0;
    return body;
}

const char *http_body_text(const struct http_body *body, size_t *ret_len)
{
    *ret_len = body->bytes.len;
    return bytes_text(&body->bytes);
}

void http_body_free(struct http_body *body)
{
    if (!body) return;
    body->http->buffered -= body->bytes.len;
    bytes_release(&body->bytes);
    http_unref(body->http);
    free(body);
}

const char *http_path_tail(const struct http_request *q)
{
    return q->rest;
}

const char *http_request_id(const struct http_request *q)
{
    return q->request_id;
}

const char *http_query(const struct http_request *q, const char *name)
{
    return MHD_lookup_connection_value(q->connection, MHD_GET_ARGUMENT_KIND, name);
}

void http_attach(struct http_request *q, void *attached,
                 void (*on_close)(void *attached, bool answered))
{
    q->attached = attached;
    q->on_close = on_close;
}

bool http_replied(const struct http_request *q)
{
    return q->state >= REPLY_READY;
}

bool http_expired(const struct http_request *q)
{
    return q->expired;
}

void http_header(struct http_request *q, const char *name, const char *value)
{
    if (q->n_headers == HEADERS_MAX) return;
    snprintf(q->headers[q->n_headers].name, sizeof q->headers[0].name, "%s", name);
    snprintf(q->headers[q->n_headers++].value, sizeof q->headers[0].value, "%s", value);
}

void http_reply(struct http_request *q, unsigned code, const char *content_type, struct bytes *body)
{
    if (http_replied(q)) {
        bytes_release(body);
        return;
    }
    q->state = REPLY_READY;
    q->code = body->failed ? 500 : code;
    q->content_type = content_type;
    q->reply = *body;
    *body = (struct bytes)BYTES_INIT;
    drop_body(q);
    http_resume(q);
}

void http_reply_json(struct http_request *q, unsigned code, json_t *value)
{
    struct bytes body = BYTES_INIT;
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
    json_decref(value);
    if (text) {
        bytes_puts(&body, text);
        bytes_puts(&body, "\n");
        free(text);
        http_reply(q, code, "application/json", &body);
    } else {
        http_fail(q, 500, "server_error", "out of memory while writing the answer");
    }
}

// The field an error sentence is about: its first word in double quotes.
static json_t *quoted_word(const char *sentence)
{
    const char *open = strchr(sentence, '"'), *close = open ? strchr(open + 1, '"') : NULL;
    if (!close || close - open > 64) return json_null();
    json_t *word = json_stringn(open + 1, (size_t)(close - open - 1));
    return word ? word : json_null();
}

// `name` is OpenAI's word for the fault, where clients look for one; NULL: "code" is the status.
static void error_object(struct bytes *to, unsigned code, const char *name, const char *type,
                         const char *sentence)
{
    json_t *param = code == 400 || code == 404 ? quoted_word(sentence) : json_null();
    json_t *object = json_pack("{s:{s:o, s:s, s:o, s:o}}", "error", "message",
                               json_clean_string(sentence), "type", type, "param", param, "code",
                               name ? json_string(name) : json_integer(code));
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    bytes_puts(to, text ? text : "{\"error\":{\"message\":\"out of memory\"}}");
    free(text);
    json_decref(object);
}

void http_error_object(struct bytes *to, unsigned code, const char *type, const char *sentence)
{
    error_object(to, code, NULL, type, sentence);
}

static void fail_as(struct http_request *q, unsigned code, const char *name, const char *type,
                    const char *sentence)
{
    struct bytes body = BYTES_INIT;
    error_object(&body, code, name, type, sentence);
    bytes_puts(&body, "\n");
    if (code == 429 || code == 503) http_header(q, "Retry-After", "1");
    http_reply(q, code, "application/json", &body);
}

void http_fail(struct http_request *q, unsigned code, const char *type, const char *sentence)
{
    fail_as(q, code, NULL, type, sentence);
}

void http_fail_status(struct http_request *q, enum status st)
{
    const char *sentence = status_message();
    switch (st) {
    case ST_INVALID:
    case ST_FORMAT:
    case ST_UNSUPPORTED:
    case ST_MISMATCH:
        http_fail(q, 400, "invalid_request_error", sentence);
        break;
    case ST_TOO_LONG:
        fail_as(q, 400, "context_length_exceeded", "invalid_request_error", sentence);
        break;
    case ST_NOT_FOUND:
        http_fail(q, 404, "not_found_error", sentence);
        break;
    case ST_BUSY:
        http_fail(q, 429, "rate_limit_error", sentence);
        break;
    case ST_TORN:
    case ST_CANCELLED:
        http_fail(q, 503, "unavailable_error", sentence);
        break;
    case ST_TIMEOUT:
        http_fail(q, 504, "timeout_error", sentence);
        break;
    default:
        http_fail(q, 500, "server_error", sentence);
    }
}

void http_stream(struct http_request *q, const char *content_type, stream_producer produce)
{
    q->state = REPLY_READY;
    q->code = 200;
    q->content_type = content_type;
    q->streaming = true;
    q->produce = produce;
    drop_body(q);
    http_resume(q);
}

void http_wake(struct http_request *q)
{
    if (q->streaming) http_resume(q);
}

// ---- libmicrohttpd's callbacks -----------------------------------------------------------------

static ssize_t read_stream(void *context, uint64_t position, char *buffer, size_t max)
{
    struct http_request *q = context;
    (void)position;
    while (q->sent == q->body.len && !q->stream_ended && !q->gone) {
        bytes_clear(&q->body);
        q->sent = 0;
        enum stream_state state = q->produce(q->attached, q, &q->body);
        if (q->body.failed) return MHD_CONTENT_READER_END_WITH_ERROR;
        q->stream_ended = state == STREAM_END;
        if (state != STREAM_MORE) break;
    }
    if (q->gone) return MHD_CONTENT_READER_END_WITH_ERROR;
    size_t n = q->body.len - q->sent;
    if (n == 0 && q->stream_ended) return MHD_CONTENT_READER_END_OF_STREAM;
    if (n == 0) {
        q->suspended = true;
        MHD_suspend_connection(q->connection);
        return 0;
    }
    if (n > max) n = max;
    memcpy(buffer, q->body.data + q->sent, n);
    q->sent += n;
    return (ssize_t)n;
}

static enum MHD_Result queue_reply(struct http_request *q)
{
    struct MHD_Response *response;
    if (q->streaming) {
        response =
            MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 32 << 10, read_stream, q, NULL);
    } else {
        response = MHD_create_response_from_buffer(q->reply.len, (void *)bytes_text(&q->reply),
                                                   q->reply.len ? MHD_RESPMEM_MUST_FREE
                                                                : MHD_RESPMEM_PERSISTENT);
        if (response && q->reply.len) q->reply = (struct bytes)BYTES_INIT;
    }
    if (!response) return MHD_NO;
    MHD_add_response_header(response, "Content-Type", q->content_type);
    if (q->streaming) MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "X-Request-Id", q->request_id);
    if (q->close_after) MHD_add_response_header(response, "Connection", "close");
    for (int i = 0; i < q->n_headers; i++)
        MHD_add_response_header(response, q->headers[i].name, q->headers[i].value);
    enum MHD_Result result = MHD_queue_response(q->connection, q->code, response);
    MHD_destroy_response(response);
    q->state = SENDING;
    return result;
}

static const char *header_of(const struct http_request *q, const char *name)
{
    return MHD_lookup_connection_value(q->connection, MHD_HEADER_KIND, name);
}

static bool key_is_right(const struct http_request *q)
{
    const char *key = q->listener->http->options.api_key;
    const char *given = header_of(q, "Authorization");
    if (!given || strncasecmp(given, "Bearer ", 7) != 0) return false;
    given += 7;
    return strlen(given) == strlen(key) && CRYPTO_memcmp(given, key, strlen(key)) == 0;
}

// Refuses what this client may not ask for: then the exchange has its answer. The Unix socket's
// file mode has decided for its clients. TCP asks for the key; without one, whoever is on this
// machine may come, so that what changes the server is not to be had there, and web pages are kept
// out.
static void check_access(struct http_request *q)
{
    const struct http_options *o = &q->listener->http->options;
    enum http_access access = q->route ? q->route->access : HTTP_NEEDS_KEY;
    if (!q->listener->tcp) return;
    if (o->api_key) {
        if (access == HTTP_OPEN || key_is_right(q)) return;
        http_header(q, "WWW-Authenticate", "Bearer");
        http_fail(q, 401, "authentication_error",
                  "this address needs the API key: send it as 'Authorization: Bearer KEY'");
        return;
    }
    const char *host = header_of(q, "Host"), *origin = header_of(q, "Origin");
    char sentence[400];
    if (host && !host_is_allowed(host, o->allowed_hosts)) {
        snprintf(sentence, sizeof sentence,
                 "Host '%.100s' is none of this server's names: ask it as localhost, or start it "
                 "with --allowed-hosts or --api-key-file",
                 host);
        http_fail(q, 403, "permission_error", sentence);
    } else if (origin && !origin_is_allowed(origin, o->allowed_hosts)) {
        snprintf(sentence, sizeof sentence,
                 "pages of '%.100s' may not ask this server: start it with --allowed-hosts or "
                 "--api-key-file if they are to",
                 origin);
        http_fail(q, 403, "permission_error", sentence);
    } else if (access == HTTP_ADMIN) {
        snprintf(sentence, sizeof sentence,
                 "%.60s is there on the Unix socket, and on TCP only with --api-key-file",
                 q->route->path);
        http_fail(q, 403, "permission_error", sentence);
    }
}

// The client's name for its request, where it is of printable ASCII and not too long, or a new one.
static void name_request(struct http_request *q)
{
    const char *given = header_of(q, "X-Request-Id");
    size_t n = given ? strlen(given) : 0;
    for (size_t i = 0; i < n; i++)
        if (given[i] < 0x20 || given[i] > 0x7e) n = 0;
    if (n > 0 && n <= REQUEST_ID_MAX) {
        memcpy(q->request_id, given, n + 1);
        return;
    }
    unsigned char random[16] = {0};
    if (getrandom(random, sizeof random, 0) != sizeof random) memcpy(random, &q, sizeof q);
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(q->request_id + 2 * i, 3, "%02x", random[i]);
}

// Clients end paths with a slash now and then. ret_rest: what stands behind a route's "/a/".
static bool path_is(const char *path, const char *url, const char **ret_rest)
{
    size_t n = strlen(path), len = strlen(url);
    if (n > 2 && path[n - 1] == '*') {
        if (strncmp(path, url, n - 1) != 0 || len < n) return false;
        *ret_rest = url + n - 1;
        return true;
    }
    while (len > 1 && url[len - 1] == '/') len--;
    return n == len && memcmp(path, url, n) == 0;
}

// Finds the route; where there is none, or it may not be used, the exchange has its answer already.
static void find_route(struct http_request *q, const char *url, const char *method)
{
    const struct http_options *o = &q->listener->http->options;
    const char *wanted = strcmp(method, "HEAD") == 0 ? "GET" : method;
    char allow[64] = "", sentence[256];
    for (const struct http_route *r = o->routes; r->path; r++) {
        if (!path_is(r->path, url, &q->rest)) continue;
        if (strcmp(r->method, wanted) == 0) {
            q->route = r;
            break;
        }
        snprintf(allow, sizeof allow, "%s%s", r->method, strcmp(r->method, "GET") ? "" : ", HEAD");
    }
    check_access(q);
    if (http_replied(q)) return;
    if (!q->route && allow[0]) {
        http_header(q, "Allow", allow);
        snprintf(sentence, sizeof sentence, "%.100s takes %s, not %.20s", url, allow, method);
        http_fail(q, 405, "invalid_request_error", sentence);
    } else if (!q->route) {
        snprintf(sentence, sizeof sentence, "there is no %.150s here", url);
        http_fail(q, 404, "not_found_error", sentence);
    }
}

static void fail_too_large(struct http_request *q)
{
    char sentence[128];
    snprintf(sentence, sizeof sentence, "the body is larger than %zu bytes (--max-body)",
             q->listener->http->options.max_body);
    q->close_after = true;
    http_fail(q, 413, "invalid_request_error", sentence);
}

// Answers before the body has come where it would be refused anyway and the client waits for leave
// to send it, or would send more than is worth reading.
static bool answer_early(struct http_request *q)
{
    const char *expect = header_of(q, "Expect"), *length = header_of(q, "Content-Length");
    unsigned long long n = length ? strtoull(length, NULL, 10) : 0;
    if (!http_replied(q) && n > q->listener->http->options.max_body) fail_too_large(q);
    return http_replied(q) && (expect || n > DRAIN_BYTES || q->code == 401 || q->code == 403);
}

static void fail_no_room(struct http_request *q)
{
    char sentence[160];
    snprintf(sentence, sizeof sentence,
             "the bodies of the requests under way are over %zu bytes together (--max-buffered); "
             "try again later",
             q->listener->http->options.max_buffered);
    http_fail(q, 429, "rate_limit_error", sentence);
}

static enum MHD_Result take_body(struct http_request *q, const char *data, size_t *size)
{
    struct http *h = q->listener->http;
    size_t n = *size;
    *size = 0;
    q->body_seen += n;
    if (http_replied(q)) // refused already: read on, so that the client gets to its answer
        return q->body_seen <= DRAIN_BYTES + h->options.max_body ? MHD_YES : MHD_NO;
    if (q->body_seen > h->options.max_body) {
        fail_too_large(q);
        return MHD_YES;
    }
    if (h->buffered + n > h->options.max_buffered) {
        fail_no_room(q);
        return MHD_YES;
    }
    h->buffered += n;
    q->buffered += n;
    bytes_append(&q->body, data, n);
    return bytes_status(&q->body) == ST_OK ? MHD_YES : MHD_NO;
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *size, void **con_cls)
{
    struct listener *l = context;
    struct http_request *q = *con_cls;
    (void)version;
    if (!q) {
        q = l->http->closing ? NULL : http_request_new(l, connection);
        if (!q) return MHD_NO;
        *con_cls = q;
        name_request(q);
        find_route(q, url, method);
        return answer_early(q) ? queue_reply(q) : MHD_YES;
    }
    if (*size > 0) return take_body(q, data, size);
    if (q->gone) return MHD_NO;
    q->received = true;
    if (q->state == READING) {
        q->state = WAITING;
        q->deadline_ns = clock_deadline_ns(1000LL * l->http->options.request_timeout_s);
        q->route->handle(l->http->options.context, q);
    }
    if (q->state == REPLY_READY) return queue_reply(q);
    if (q->state == WAITING) {
        q->suspended = true;
        MHD_suspend_connection(connection);
    }
    return MHD_YES;
}

static void on_completed(void *context, struct MHD_Connection *connection, void **con_cls,
                         enum MHD_RequestTerminationCode code)
{
    struct http_request *q = *con_cls;
    (void)context;
    (void)connection;
    if (q) http_request_free(q, code == MHD_REQUEST_TERMINATED_COMPLETED_OK && !q->gone);
    *con_cls = NULL;
}

// ---- the whole ---------------------------------------------------------------------------------

enum status http_new(uv_loop_t *loop, const struct http_options *options, struct http **ret)
{
    struct http *h = calloc(1, sizeof *h);
    if (!h) return status_fail(ST_NO_MEMORY, "out of memory");
    h->loop = loop;
    h->options = *options;
    sweep_start(h);
    *ret = h;
    return ST_OK;
}

enum status http_listen(struct http *h, int fd, bool tcp)
{
    if (h->n_listeners == LISTENERS_MAX) return status_fail(ST_INVALID, "too many listeners");
    struct listener *l = &h->listeners[h->n_listeners];
    l->http = h;
    l->tcp = tcp;
    l->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, on_request, l,
        MHD_OPTION_LISTEN_SOCKET, (MHD_socket)fd, MHD_OPTION_NOTIFY_COMPLETED, on_completed, l,
        MHD_OPTION_NOTIFY_CONNECTION, on_connection, l, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)h->options.max_connections, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)h->options.idle_timeout_s, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)CONNECTION_BYTES, MHD_OPTION_END);
    if (!l->daemon) return status_fail(ST_IO, "cannot start the HTTP server (libmicrohttpd)");
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(l->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    int e = info ? uv_poll_init(h->loop, &l->poll, info->epoll_fd) : UV_EINVAL;
    if (e < 0) {
        MHD_stop_daemon(l->daemon);
        return status_fail(ST_IO, "cannot poll the HTTP server: %s", uv_strerror(e));
    }
    uv_timer_init(h->loop, &l->timer);
    l->poll.data = l->timer.data = l;
    h->n_listeners++;
    h->users += 2;
    uv_poll_start(&l->poll, UV_READABLE, on_poll);
    uv_timer_start(&l->timer, on_timer, 0, 0);
    return ST_OK;
}

int http_open_requests(const struct http *h)
{
    return h->n_requests;
}

void http_unref(struct http *h)
{
    if (--h->users > 0) return;
    free(h->polled);
    free(h);
}

static void on_handle_closed(uv_handle_t *handle)
{
    http_unref(handle->data);
}

void http_close(struct http *h)
{
    if (!h) return;
    // libmicrohttpd ends the program if it is stopped with connections suspended: those that sleep
    // are woken, and in the last round none may go to sleep, and no new one begin.
    h->closing = true;
    for (struct connection *c = h->connections; c; c = c->next) {
        if (!c->request) continue;
        c->request->gone = true;
        http_resume(c->request);
    }
    for (int i = 0; i < h->n_listeners; i++) {
        struct listener *l = &h->listeners[i];
        MHD_run(l->daemon);
        uv_poll_stop(&l->poll);
        MHD_stop_daemon(l->daemon);
        l->poll.data = l->timer.data = h;
        uv_close((uv_handle_t *)&l->poll, on_handle_closed);
        uv_close((uv_handle_t *)&l->timer, on_handle_closed);
    }
    uv_close((uv_handle_t *)&h->sweep, on_handle_closed);
}
