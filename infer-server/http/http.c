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

void exchange_resume(struct exchange *x)
{
    if (!x->suspended) return;
    x->suspended = false;
    MHD_resume_connection(x->connection);
    uv_timer_start(&x->listener->timer, on_timer, 0, 0);
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

static struct exchange *exchange_new(struct listener *l, struct MHD_Connection *connection)
{
    struct connection *socket = connection_of(connection);
    struct exchange *x = socket ? calloc(1, sizeof *x) : NULL;
    if (!x) return NULL;
    struct http *h = l->http;
    socket->exchange = x;
    socket->used = true;
    x->listener = l;
    x->connection = connection;
    x->socket = socket;
    x->since_ns = clock_now_ns();
    x->deadline_ns = clock_deadline_ns(1000LL * h->options.request_timeout_s);
    h->n_exchanges++;
    return x;
}

// The request's body is needed no more.
static void drop_body(struct exchange *x)
{
    x->listener->http->buffered -= x->buffered;
    x->buffered = 0;
    bytes_release(&x->body);
}

static void exchange_free(struct exchange *x, bool answered)
{
    if (x->on_close) x->on_close(x->attached, answered);
    if (x->route && x->route->path)
        log_debug("%s %s: %u, %.1f ms%s", x->route->method, x->route->path, x->code,
                  clock_ms_since(x->since_ns), answered ? "" : ", the client had left");
    x->socket->exchange = NULL;
    x->socket->since_ns = clock_now_ns();
    x->listener->http->n_exchanges--;
    drop_body(x);
    bytes_release(&x->reply);
    free(x);
}

const char *exchange_body(const struct exchange *x, size_t *ret_len)
{
    *ret_len = x->body.len;
    return bytes_text(&x->body);
}

struct http_body *exchange_take_body(struct exchange *x)
{
    struct http_body *body = malloc(sizeof *body);
    if (!body) return NULL;
    *body = (struct http_body){.http = x->listener->http, .bytes = x->body};
    body->http->users++;
    x->body = (struct bytes)BYTES_INIT;
    x->buffered = 0;
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

const char *exchange_rest(const struct exchange *x)
{
    return x->rest;
}

const char *exchange_request_id(const struct exchange *x)
{
    return x->request_id;
}

const char *exchange_query(const struct exchange *x, const char *name)
{
    return MHD_lookup_connection_value(x->connection, MHD_GET_ARGUMENT_KIND, name);
}

void exchange_attach(struct exchange *x, void *attached,
                     void (*on_close)(void *attached, bool answered))
{
    x->attached = attached;
    x->on_close = on_close;
}

bool exchange_answered(const struct exchange *x)
{
    return x->state >= REPLY_READY;
}

bool exchange_expired(const struct exchange *x)
{
    return x->expired;
}

void exchange_header(struct exchange *x, const char *name, const char *value)
{
    if (x->n_headers == HEADERS_MAX) return;
    snprintf(x->headers[x->n_headers].name, sizeof x->headers[0].name, "%s", name);
    snprintf(x->headers[x->n_headers++].value, sizeof x->headers[0].value, "%s", value);
}

void exchange_reply(struct exchange *x, unsigned code, const char *content_type, struct bytes *body)
{
    if (exchange_answered(x)) {
        bytes_release(body);
        return;
    }
    x->state = REPLY_READY;
    x->code = body->failed ? 500 : code;
    x->content_type = content_type;
    x->reply = *body;
    *body = (struct bytes)BYTES_INIT;
    drop_body(x);
    exchange_resume(x);
}

void exchange_reply_json(struct exchange *x, unsigned code, json_t *value)
{
    struct bytes body = BYTES_INIT;
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
    json_decref(value);
    if (text) {
        bytes_puts(&body, text);
        bytes_puts(&body, "\n");
        free(text);
        exchange_reply(x, code, "application/json", &body);
    } else {
        exchange_fail(x, 500, "server_error", "out of memory while writing the answer");
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

static void fail_as(struct exchange *x, unsigned code, const char *name, const char *type,
                    const char *sentence)
{
    struct bytes body = BYTES_INIT;
    error_object(&body, code, name, type, sentence);
    bytes_puts(&body, "\n");
    if (code == 429 || code == 503) exchange_header(x, "Retry-After", "1");
    exchange_reply(x, code, "application/json", &body);
}

void exchange_fail(struct exchange *x, unsigned code, const char *type, const char *sentence)
{
    fail_as(x, code, NULL, type, sentence);
}

void exchange_fail_status(struct exchange *x, enum status st)
{
    const char *sentence = status_message();
    switch (st) {
    case ST_INVALID:
    case ST_FORMAT:
    case ST_UNSUPPORTED:
    case ST_MISMATCH:
        exchange_fail(x, 400, "invalid_request_error", sentence);
        break;
    case ST_TOO_LONG:
        fail_as(x, 400, "context_length_exceeded", "invalid_request_error", sentence);
        break;
    case ST_NOT_FOUND:
        exchange_fail(x, 404, "not_found_error", sentence);
        break;
    case ST_BUSY:
        exchange_fail(x, 429, "rate_limit_error", sentence);
        break;
    case ST_TORN:
    case ST_CANCELLED:
        exchange_fail(x, 503, "unavailable_error", sentence);
        break;
    case ST_TIMEOUT:
        exchange_fail(x, 504, "timeout_error", sentence);
        break;
    default:
        exchange_fail(x, 500, "server_error", sentence);
    }
}

void exchange_stream(struct exchange *x, const char *content_type, stream_producer produce)
{
    x->state = REPLY_READY;
    x->code = 200;
    x->content_type = content_type;
    x->streaming = true;
    x->produce = produce;
    drop_body(x);
    exchange_resume(x);
}

void exchange_wake(struct exchange *x)
{
    if (x->streaming) exchange_resume(x);
}

// ---- libmicrohttpd's callbacks -----------------------------------------------------------------

static ssize_t read_stream(void *context, uint64_t position, char *buffer, size_t max)
{
    struct exchange *x = context;
    (void)position;
    while (x->sent == x->body.len && !x->stream_ended && !x->gone) {
        bytes_clear(&x->body);
        x->sent = 0;
        enum stream_state state = x->produce(x->attached, x, &x->body);
        if (x->body.failed) return MHD_CONTENT_READER_END_WITH_ERROR;
        x->stream_ended = state == STREAM_END;
        if (state != STREAM_MORE) break;
    }
    if (x->gone) return MHD_CONTENT_READER_END_WITH_ERROR;
    size_t n = x->body.len - x->sent;
    if (n == 0 && x->stream_ended) return MHD_CONTENT_READER_END_OF_STREAM;
    if (n == 0) {
        x->suspended = true;
        MHD_suspend_connection(x->connection);
        return 0;
    }
    if (n > max) n = max;
    memcpy(buffer, x->body.data + x->sent, n);
    x->sent += n;
    return (ssize_t)n;
}

static enum MHD_Result queue_reply(struct exchange *x)
{
    struct MHD_Response *response;
    if (x->streaming) {
        response =
            MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 32 << 10, read_stream, x, NULL);
    } else {
        response = MHD_create_response_from_buffer(x->reply.len, (void *)bytes_text(&x->reply),
                                                   x->reply.len ? MHD_RESPMEM_MUST_FREE
                                                                : MHD_RESPMEM_PERSISTENT);
        if (response && x->reply.len) x->reply = (struct bytes)BYTES_INIT;
    }
    if (!response) return MHD_NO;
    MHD_add_response_header(response, "Content-Type", x->content_type);
    if (x->streaming) MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "X-Request-Id", x->request_id);
    if (x->close_after) MHD_add_response_header(response, "Connection", "close");
    for (int i = 0; i < x->n_headers; i++)
        MHD_add_response_header(response, x->headers[i].name, x->headers[i].value);
    enum MHD_Result result = MHD_queue_response(x->connection, x->code, response);
    MHD_destroy_response(response);
    x->state = SENDING;
    return result;
}

static const char *header_of(const struct exchange *x, const char *name)
{
    return MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

static bool key_is_right(const struct exchange *x)
{
    const char *key = x->listener->http->options.api_key;
    const char *given = header_of(x, "Authorization");
    if (!given || strncasecmp(given, "Bearer ", 7) != 0) return false;
    given += 7;
    return strlen(given) == strlen(key) && CRYPTO_memcmp(given, key, strlen(key)) == 0;
}

// Refuses what this client may not ask for: then the exchange has its answer. The Unix socket's
// file mode has decided for its clients. TCP asks for the key; without one, whoever is on this
// machine may come, so that what changes the server is not to be had there, and web pages are kept
// out.
static void check_access(struct exchange *x)
{
    const struct http_options *o = &x->listener->http->options;
    enum http_access access = x->route ? x->route->access : HTTP_NEEDS_KEY;
    if (!x->listener->tcp) return;
    if (o->api_key) {
        if (access == HTTP_OPEN || key_is_right(x)) return;
        exchange_header(x, "WWW-Authenticate", "Bearer");
        exchange_fail(x, 401, "authentication_error",
                      "this address needs the API key: send it as 'Authorization: Bearer KEY'");
        return;
    }
    const char *host = header_of(x, "Host"), *origin = header_of(x, "Origin");
    char sentence[400];
    if (host && !host_is_allowed(host, o->allowed_hosts)) {
        snprintf(sentence, sizeof sentence,
                 "Host '%.100s' is none of this server's names: ask it as localhost, or start it "
                 "with --allowed-hosts or --api-key-file",
                 host);
        exchange_fail(x, 403, "permission_error", sentence);
    } else if (origin && !origin_is_allowed(origin, o->allowed_hosts)) {
        snprintf(sentence, sizeof sentence,
                 "pages of '%.100s' may not ask this server: start it with --allowed-hosts or "
                 "--api-key-file if they are to",
                 origin);
        exchange_fail(x, 403, "permission_error", sentence);
    } else if (access == HTTP_ADMIN) {
        snprintf(sentence, sizeof sentence,
                 "%.60s is there on the Unix socket, and on TCP only with --api-key-file",
                 x->route->path);
        exchange_fail(x, 403, "permission_error", sentence);
    }
}

// The client's name for its request, where it is of printable ASCII and not too long, or a new one.
static void name_request(struct exchange *x)
{
    const char *given = header_of(x, "X-Request-Id");
    size_t n = given ? strlen(given) : 0;
    for (size_t i = 0; i < n; i++)
        if (given[i] < 0x20 || given[i] > 0x7e) n = 0;
    if (n > 0 && n <= REQUEST_ID_MAX) {
        memcpy(x->request_id, given, n + 1);
        return;
    }
    unsigned char random[16] = {0};
    if (getrandom(random, sizeof random, 0) != sizeof random) memcpy(random, &x, sizeof x);
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(x->request_id + 2 * i, 3, "%02x", random[i]);
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
static void find_route(struct exchange *x, const char *url, const char *method)
{
    const struct http_options *o = &x->listener->http->options;
    const char *wanted = strcmp(method, "HEAD") == 0 ? "GET" : method;
    char allow[64] = "", sentence[256];
    for (const struct http_route *r = o->routes; r->path; r++) {
        if (!path_is(r->path, url, &x->rest)) continue;
        if (strcmp(r->method, wanted) == 0) {
            x->route = r;
            break;
        }
        snprintf(allow, sizeof allow, "%s%s", r->method, strcmp(r->method, "GET") ? "" : ", HEAD");
    }
    check_access(x);
    if (exchange_answered(x)) return;
    if (!x->route && allow[0]) {
        exchange_header(x, "Allow", allow);
        snprintf(sentence, sizeof sentence, "%.100s takes %s, not %.20s", url, allow, method);
        exchange_fail(x, 405, "invalid_request_error", sentence);
    } else if (!x->route) {
        snprintf(sentence, sizeof sentence, "there is no %.150s here", url);
        exchange_fail(x, 404, "not_found_error", sentence);
    }
}

static void fail_too_large(struct exchange *x)
{
    char sentence[128];
    snprintf(sentence, sizeof sentence, "the body is larger than %zu bytes (--max-body)",
             x->listener->http->options.max_body);
    x->close_after = true;
    exchange_fail(x, 413, "invalid_request_error", sentence);
}

// Answers before the body has come where it would be refused anyway and the client waits for leave
// to send it, or would send more than is worth reading.
static bool answer_early(struct exchange *x)
{
    const char *expect = header_of(x, "Expect"), *length = header_of(x, "Content-Length");
    unsigned long long n = length ? strtoull(length, NULL, 10) : 0;
    if (!exchange_answered(x) && n > x->listener->http->options.max_body) fail_too_large(x);
    return exchange_answered(x) && (expect || n > DRAIN_BYTES || x->code == 401 || x->code == 403);
}

static void fail_no_room(struct exchange *x)
{
    char sentence[160];
    snprintf(sentence, sizeof sentence,
             "the bodies of the requests under way are over %zu bytes together (--max-buffered); "
             "try again later",
             x->listener->http->options.max_buffered);
    exchange_fail(x, 429, "rate_limit_error", sentence);
}

static enum MHD_Result take_body(struct exchange *x, const char *data, size_t *size)
{
    struct http *h = x->listener->http;
    size_t n = *size;
    *size = 0;
    x->body_seen += n;
    if (exchange_answered(x)) // refused already: read on, so that the client gets to its answer
        return x->body_seen <= DRAIN_BYTES + h->options.max_body ? MHD_YES : MHD_NO;
    if (x->body_seen > h->options.max_body) {
        fail_too_large(x);
        return MHD_YES;
    }
    if (h->buffered + n > h->options.max_buffered) {
        fail_no_room(x);
        return MHD_YES;
    }
    h->buffered += n;
    x->buffered += n;
    bytes_append(&x->body, data, n);
    return bytes_status(&x->body) == ST_OK ? MHD_YES : MHD_NO;
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *size, void **con_cls)
{
    struct listener *l = context;
    struct exchange *x = *con_cls;
    (void)version;
    if (!x) {
        x = l->http->closing ? NULL : exchange_new(l, connection);
        if (!x) return MHD_NO;
        *con_cls = x;
        name_request(x);
        find_route(x, url, method);
        return answer_early(x) ? queue_reply(x) : MHD_YES;
    }
    if (*size > 0) return take_body(x, data, size);
    if (x->gone) return MHD_NO;
    x->received = true;
    if (x->state == READING) {
        x->state = WAITING;
        x->deadline_ns = clock_deadline_ns(1000LL * l->http->options.request_timeout_s);
        x->route->handle(l->http->options.context, x);
    }
    if (x->state == REPLY_READY) return queue_reply(x);
    if (x->state == WAITING) {
        x->suspended = true;
        MHD_suspend_connection(connection);
    }
    return MHD_YES;
}

static void on_completed(void *context, struct MHD_Connection *connection, void **con_cls,
                         enum MHD_RequestTerminationCode code)
{
    struct exchange *x = *con_cls;
    (void)context;
    (void)connection;
    if (x) exchange_free(x, code == MHD_REQUEST_TERMINATED_COMPLETED_OK && !x->gone);
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

int http_open_exchanges(const struct http *h)
{
    return h->n_exchanges;
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
        if (!c->exchange) continue;
        c->exchange->gone = true;
        exchange_resume(c->exchange);
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
