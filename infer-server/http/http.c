/* http.c: libmicrohttpd under libuv, one thread. libmicrohttpd owns sockets, parsing, limits and
 * idle time-outs; its epoll descriptor is polled by the loop, and MHD_run() does what is due.
 *
 * The life of an exchange: READING the body; WAITING (connection suspended) until somebody answers;
 * then the reply is queued, or a stream's producer is asked whenever the socket takes more, and the
 * connection is suspended whenever the producer has nothing. libmicrohttpd does not watch suspended
 * sockets, so a 100 ms timer asks poll(2) which of their clients have hung up, and which answers
 * are overdue. Connections change state only inside MHD_run(), which any change from outside calls
 * for by a zero timer: never from within one of libmicrohttpd's own callbacks. */
#include "infer-server/http/http.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#include <microhttpd.h>
#include <openssl/crypto.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/socket.h>

#define LISTENERS_MAX    2
#define SWEEP_MS         100
#define CONNECTION_BYTES (64u << 10) // request line, headers and write buffer of one connection
#define DRAIN_BYTES      (64u << 20) // of a refused body that are read so that the answer arrives
#define HEADERS_MAX      4
#define REQUEST_ID_MAX   128

struct listener {
    struct http *http;
    struct MHD_Daemon *daemon;
    uv_poll_t poll;
    uv_timer_t timer;
    bool needs_key;
};

struct http {
    uv_loop_t *loop;
    struct http_options options;
    struct listener listeners[LISTENERS_MAX];
    int n_listeners, n_exchanges, open_handles;
    bool closing;
    uv_timer_t sweep;
    struct exchange *first; // all exchanges
    struct pollfd *polled;  // scratch of the sweep
    struct exchange **polled_for;
    int polled_cap;
};

enum exchange_state { READING, WAITING, REPLY_READY, SENDING };

struct exchange {
    struct listener *listener;
    struct MHD_Connection *connection;
    struct exchange *next, **link;
    const struct http_route *route;
    const char *rest; // libmicrohttpd's, for as long as the request
    char request_id[REQUEST_ID_MAX + 1];
    enum exchange_state state;
    bool suspended, gone, expired, streaming, stream_ended, close_after;
    struct bytes body; // the request's; later the part of a stream that is not sent yet
    size_t body_seen, sent;
    int64_t deadline_ns, since_ns;
    struct {
        char name[32], value[160];
    } headers[HEADERS_MAX];
    int n_headers;
    unsigned code;
    const char *content_type; // static text
    struct bytes reply;
    stream_producer produce;
    void *attached;
    void (*on_close)(void *attached, bool answered);
};

// ---- running libmicrohttpd ---------------------------------------------------------------------

static void on_timer(uv_timer_t *timer);

static void run_due(struct listener *l)
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
    run_due(timer->data);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    run_due(poll->data);
}

// Lets the connection go on at the loop's next turn.
static void resume(struct exchange *x)
{
    if (!x->suspended) return;
    x->suspended = false;
    MHD_resume_connection(x->connection);
    uv_timer_start(&x->listener->timer, on_timer, 0, 0);
}

// ---- exchanges ---------------------------------------------------------------------------------

static struct exchange *exchange_new(struct listener *l, struct MHD_Connection *connection)
{
    struct exchange *x = calloc(1, sizeof *x);
    if (!x) return NULL;
    struct http *h = l->http;
    x->listener = l;
    x->connection = connection;
    x->since_ns = clock_now_ns();
    x->deadline_ns = clock_deadline_ns(1000LL * h->options.request_timeout_s);
    x->next = h->first;
    x->link = &h->first;
    if (h->first) h->first->link = &x->next;
    h->first = x;
    h->n_exchanges++;
    return x;
}

static void exchange_free(struct exchange *x, bool answered)
{
    if (x->on_close) x->on_close(x->attached, answered);
    if (x->route && x->route->path)
        log_debug("%s %s: %u, %.1f ms%s", x->route->method, x->route->path, x->code,
                  clock_ms_since(x->since_ns), answered ? "" : ", the client had left");
    *x->link = x->next;
    if (x->next) x->next->link = x->link;
    x->listener->http->n_exchanges--;
    bytes_release(&x->body);
    bytes_release(&x->reply);
    free(x);
}

const char *exchange_body(const struct exchange *x, size_t *ret_len)
{
    *ret_len = x->body.len;
    return bytes_text(&x->body);
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
    bytes_release(&x->body);
    resume(x);
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

// A sentence may quote what a client sent, cut anywhere: JSON needs whole characters.
static json_t *clean_string(const char *sentence)
{
    struct bytes text = BYTES_INIT;
    size_t len = strlen(sentence);
    for (size_t i = 0; i < len;) {
        int n = utf8_sequence(sentence + i, len - i);
        bytes_append(&text, n > 0 ? sentence + i : "?", n > 0 ? (size_t)n : 1);
        i += n > 0 ? (size_t)n : 1;
    }
    json_t *string = json_stringn(bytes_text(&text), text.len);
    bytes_release(&text);
    return string;
}

// `name` is OpenAI's word for the fault, where clients look for one; NULL: "code" is the status.
static void error_object(struct bytes *to, unsigned code, const char *name, const char *type,
                         const char *sentence)
{
    json_t *param = code == 400 || code == 404 ? quoted_word(sentence) : json_null();
    json_t *object =
        json_pack("{s:{s:o, s:s, s:o, s:o}}", "error", "message", clean_string(sentence), "type",
                  type, "param", param, "code", name ? json_string(name) : json_integer(code));
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
    bytes_release(&x->body);
    resume(x);
}

void exchange_wake(struct exchange *x)
{
    if (x->streaming) resume(x);
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

static bool key_is_right(const struct listener *l, struct MHD_Connection *connection)
{
    const char *key = l->http->options.api_key;
    if (!l->needs_key || !key) return true;
    const char *given = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Authorization");
    if (!given || strncasecmp(given, "Bearer ", 7) != 0) return false;
    given += 7;
    return strlen(given) == strlen(key) && CRYPTO_memcmp(given, key, strlen(key)) == 0;
}

// The client's name for its request, where it is of printable ASCII and not too long, or a new one.
static void name_request(struct exchange *x)
{
    const char *given = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "X-Request-Id");
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
    if ((!x->route || !x->route->open) && !key_is_right(x->listener, x->connection)) {
        exchange_header(x, "WWW-Authenticate", "Bearer");
        exchange_fail(x, 401, "authentication_error",
                      "this address needs the API key: send it as 'Authorization: Bearer KEY'");
    } else if (!x->route && allow[0]) {
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
    struct MHD_Connection *c = x->connection;
    const char *expect = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Expect");
    const char *length = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Content-Length");
    unsigned long long n = length ? strtoull(length, NULL, 10) : 0;
    if (!exchange_answered(x) && n > x->listener->http->options.max_body) fail_too_large(x);
    return exchange_answered(x) && (expect || n > DRAIN_BYTES || x->code == 401);
}

static enum MHD_Result take_body(struct exchange *x, const char *data, size_t *size)
{
    size_t n = *size;
    *size = 0;
    x->body_seen += n;
    if (exchange_answered(x)) // refused already: read on, so that the client gets to its answer
        return x->body_seen <= DRAIN_BYTES + x->listener->http->options.max_body ? MHD_YES : MHD_NO;
    if (x->body_seen > x->listener->http->options.max_body) {
        fail_too_large(x);
        return MHD_YES;
    }
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

// ---- clients that left, and answers overdue ----------------------------------------------------

static void expire(struct exchange *x)
{
    x->expired = true;
    if (x->state == WAITING)
        exchange_fail(x, 504, "timeout_error",
                      "the answer took longer than --request-timeout allows");
    else
        resume(x); // a stream's producer sees exchange_expired()
}

static int exchange_fd(const struct exchange *x)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    return info ? info->connect_fd : -1;
}

static bool sweep_room(struct http *h)
{
    if (h->polled_cap >= h->n_exchanges) return true;
    int cap = h->n_exchanges * 2;
    struct pollfd *polled = realloc(h->polled, (size_t)cap * sizeof *polled);
    if (polled) h->polled = polled;
    struct exchange **for_ = realloc(h->polled_for, (size_t)cap * sizeof *for_);
    if (for_) h->polled_for = for_;
    if (!polled || !for_) return false;
    h->polled_cap = cap;
    return true;
}

static void on_sweep(uv_timer_t *timer)
{
    struct http *h = timer->data;
    int64_t now = clock_now_ns();
    int n = 0;
    if (!sweep_room(h)) return;
    for (struct exchange *x = h->first; x; x = x->next) {
        if (x->state == READING || (x->state == REPLY_READY && !x->streaming)) {
            // libmicrohttpd's time-out starts anew with every byte; this one does not
            int64_t limit = 10LL * h->options.idle_timeout_s * NS_PER_S;
            if (now - x->since_ns > limit) shutdown(exchange_fd(x), SHUT_RDWR);
            continue;
        }
        if (now > x->deadline_ns && !x->expired && (x->state == WAITING || x->streaming)) expire(x);
        if (!x->suspended) continue;
        h->polled[n] = (struct pollfd){.fd = exchange_fd(x), .events = POLLRDHUP};
        h->polled_for[n++] = x;
    }
    if (n == 0 || poll(h->polled, (nfds_t)n, 0) <= 0) return;
    for (int i = 0; i < n; i++)
        if (h->polled[i].revents & (POLLRDHUP | POLLHUP | POLLERR)) {
            h->polled_for[i]->gone = true;
            resume(h->polled_for[i]);
        }
}

// ---- the whole ---------------------------------------------------------------------------------

enum status http_new(uv_loop_t *loop, const struct http_options *options, struct http **ret)
{
    struct http *h = calloc(1, sizeof *h);
    if (!h) return status_fail(ST_NO_MEMORY, "out of memory");
    h->loop = loop;
    h->options = *options;
    uv_timer_init(loop, &h->sweep);
    h->sweep.data = h;
    h->open_handles = 1;
    uv_timer_start(&h->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
    *ret = h;
    return ST_OK;
}

enum status http_listen(struct http *h, int fd, bool needs_key)
{
    if (h->n_listeners == LISTENERS_MAX) return status_fail(ST_INVALID, "too many listeners");
    struct listener *l = &h->listeners[h->n_listeners];
    l->http = h;
    l->needs_key = needs_key;
    l->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, on_request, l,
        MHD_OPTION_LISTEN_SOCKET, (MHD_socket)fd, MHD_OPTION_NOTIFY_COMPLETED, on_completed, l,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)h->options.max_connections,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)h->options.idle_timeout_s,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_BYTES, MHD_OPTION_END);
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
    h->open_handles += 2;
    uv_poll_start(&l->poll, UV_READABLE, on_poll);
    uv_timer_start(&l->timer, on_timer, 0, 0);
    return ST_OK;
}

int http_open_exchanges(const struct http *h)
{
    return h->n_exchanges;
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct http *h = handle->data;
    if (--h->open_handles > 0) return;
    free(h->polled);
    free(h->polled_for);
    free(h);
}

void http_close(struct http *h)
{
    if (!h) return;
    // libmicrohttpd ends the program if it is stopped with connections suspended: those that sleep
    // are woken, and in the last round none may go to sleep, and no new one begin.
    h->closing = true;
    for (struct exchange *x = h->first; x; x = x->next) {
        x->gone = true;
        resume(x);
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
