/* http.c: libmicrohttpd under libuv, one thread. libmicrohttpd owns sockets, parsing and limits;
 * its epoll descriptor is polled by the loop, and MHD_run() does what is due.
 *
 * A connection is known from accept on. The life of a request on it: READING the body; WAITING
 * (connection suspended) until somebody answers; then the reply is queued, or a stream's producer
 * is asked whenever the socket takes more, and the connection is suspended whenever the producer
 * has nothing. libmicrohttpd does not watch suspended sockets; sweep.c does, and every deadline.
 * Connections change state only inside MHD_run(), which any change from outside calls for by a zero
 * timer: never from within one of libmicrohttpd's own callbacks.
 *
 * Bodies lie in memory until they are answered or parsed. What all of them take is bounded: who
 * comes over the bound while others still have theirs is refused, and may come again. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/http_impl.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#define CONNECTION_BYTES (64u << 10) // request line, headers and write buffer of one connection
#define DRAIN_BYTES      (64u << 20) // of a refused body that are read so that the answer arrives

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

static void on_connection(void *context, struct MHD_Connection *mhd, void **socket_context,
                          enum MHD_ConnectionNotificationCode code)
{
    struct listener *l = context;
    struct connection *c;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        connection_new(l->http, mhd, socket_context);
    } else if ((c = *socket_context)) {
        l->http->n_connections--;
        *c->link = c->next;
        if (c->next) c->next->link = c->link;
        free(c);
        *socket_context = NULL;
    }
}

// ---- requests ---------------------------------------------------------------------------------

static struct http_request *http_request_new(struct listener *l, struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct connection *socket = info ? info->socket_context : NULL;
    struct http_request *q = socket ? calloc(1, sizeof *q) : NULL;
    if (!q) return NULL;
    struct http *h = l->http;
    socket->request = q;
    socket->used = true;
    q->listener = l;
    q->connection = connection;
    q->socket = socket;
    q->since_ns = clock_now_ns();
    q->deadline_ns = clock_deadline_ns(1000 * h->options.request_timeout_s);
    h->n_requests++;
    return q;
}

void http_drop_body(struct http_request *q)
{
    q->listener->http->buffered -= q->buffered;
    q->buffered = 0;
    bytes_release(&q->body);
}

// What large bodies were read into is many small pieces, which the allocator keeps for more of
// them.
static void give_memory_back(struct http *h)
{
    enum { LARGE = 4 << 20 };
    if (h->buffered > 0 || h->peak < LARGE) return;
    h->peak = 0;
    malloc_trim(0);
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
    http_drop_body(q);
    bytes_release(&q->reply);
    give_memory_back(q->listener->http);
    free(q);
}

static void unref(struct http *h)
{
    if (--h->users > 0) return;
    free(h->polled);
    free(h);
}

void http_take_body(struct http_request *q, struct http_body *ret)
{
    *ret = (struct http_body){.http = q->listener->http, .bytes = q->body};
    ret->http->users++;
    q->body = (struct bytes)BYTES_INIT;
    q->buffered = 0;
}

void http_body_release(struct http_body *body)
{
    if (!body->http) return;
    body->http->buffered -= body->bytes.len;
    bytes_release(&body->bytes);
    give_memory_back(body->http);
    unref(body->http);
    body->http = NULL;
}

int http_which(const struct http_request *q)
{
    return q->route->which;
}

const char *http_path_tail(const struct http_request *q)
{
    return q->path_tail;
}

const char *http_request_id(const struct http_request *q)
{
    return q->request_id;
}

const char *http_query(const struct http_request *q, const char *name)
{
    return MHD_lookup_connection_value(q->connection, MHD_GET_ARGUMENT_KIND, name);
}

static enum MHD_Result see_parameter(void *context, enum MHD_ValueKind kind, const char *name,
                                     const char *value)
{
    struct http_request *q = context;
    const char *const *known = q->parameters;
    (void)kind, (void)value;
    while (*known && strcmp(*known, name) != 0) known++;
    if (*known) return MHD_YES;
    http_fail(q, 400, "\"%s\" is no parameter of %s; %s lists what there is", CUT(name, 48),
              q->route->path, q->listener->http->options.page);
    return MHD_NO;
}

bool http_takes_only(struct http_request *q, const char *const *names)
{
    q->parameters = names;
    MHD_get_connection_values(q->connection, MHD_GET_ARGUMENT_KIND, see_parameter, q);
    return !http_replied(q);
}

void http_attach(struct http_request *q, void *attached,
                 void (*on_close)(void *attached, bool answered))
{
    q->attached = attached;
    q->on_close = on_close;
}

bool http_expired(const struct http_request *q)
{
    return q->expired;
}

// ---- libmicrohttpd's callbacks -----------------------------------------------------------------

static void fail_too_large(struct http_request *q)
{
    q->close_after = true;
    http_fail(q, 413, "the body is larger than %lld bytes (--max-body)",
              (long long)q->listener->http->options.max_body);
}

// Answers before the body has come where it would be refused anyway and the client waits for leave
// to send it, or would send more than is worth reading.
static bool reply_early(struct http_request *q)
{
    const char *expect = http_header_of(q, "Expect"), *length = http_header_of(q, "Content-Length");
    unsigned long long n = length ? strtoull(length, NULL, 10) : 0;
    if (!http_replied(q) && n > (size_t)q->listener->http->options.max_body) fail_too_large(q);
    return http_replied(q) && (expect || n > DRAIN_BYTES || q->code == 401 || q->code == 403);
}

static enum MHD_Result take_body(struct http_request *q, const char *data, size_t *size)
{
    struct http *h = q->listener->http;
    const size_t n = *size, max_body = (size_t)h->options.max_body;
    *size = 0;
    q->body_seen += n;
    if (http_replied(q)) // refused already: read on, so that the client gets to its answer
        return q->body_seen <= DRAIN_BYTES + max_body ? MHD_YES : MHD_NO;
    if (q->body_seen > max_body) {
        fail_too_large(q);
        return MHD_YES;
    }
    if (h->buffered + n > (size_t)h->options.max_buffered) {
        http_fail(q, 429,
                  "the bodies of the requests under way are over %lld bytes together "
                  "(--max-buffered); try again later",
                  (long long)h->options.max_buffered);
        return MHD_YES;
    }
    h->buffered += n;
    if (h->buffered > h->peak) h->peak = h->buffered;
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
        http_name_request(q);
        http_find_route(q, url, method);
        return reply_early(q) ? http_queue_reply(q) : MHD_YES;
    }
    if (*size > 0) return take_body(q, data, size);
    if (q->gone) return MHD_NO;
    q->received = true;
    if (q->state == READING) {
        q->state = WAITING;
        q->deadline_ns = clock_deadline_ns(1000 * l->http->options.request_timeout_s);
        q->route->handle(l->http->options.context, q);
    }
    if (q->state == REPLY_READY) return http_queue_reply(q);
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

// ---- the loop ----------------------------------------------------------------------------------

enum status http_loop_init(uv_loop_t *loop)
{
    const int err = uv_loop_init(loop);
    return err ? status_fail(ST_IO, "no event loop: %s", uv_strerror(err)) : ST_OK;
}

static void close_handle(uv_handle_t *handle, void *context)
{
    (void)context;
    if (!uv_is_closing(handle)) uv_close(handle, NULL);
}

void http_loop_close(uv_loop_t *loop)
{
    uv_walk(loop, close_handle, NULL);
    while (uv_run(loop, UV_RUN_DEFAULT) != 0) continue;
    uv_loop_close(loop);
}

// ---- messages from other threads ---------------------------------------------------------------
// The loop's thread takes the whole list at once and delivers in order of posting.

static void drain(struct inbox *box)
{
    pthread_mutex_lock(&box->lock);
    struct inbox_message *message = box->first;
    box->first = NULL;
    box->last = &box->first;
    pthread_mutex_unlock(&box->lock);
    while (message) {
        struct inbox_message *next = message->next;
        message->deliver(message);
        message = next;
    }
}

static void on_async(uv_async_t *async)
{
    drain(async->data);
}

enum status inbox_init(struct inbox *box, uv_loop_t *loop)
{
    int e = uv_async_init(loop, &box->async, on_async);
    if (e < 0) return status_fail(ST_IO, "cannot create a wake-up handle: %s", uv_strerror(e));
    box->async.data = box;
    box->last = &box->first;
    pthread_mutex_init(&box->lock, NULL);
    return ST_OK;
}

void inbox_post(struct inbox *box, struct inbox_message *message)
{
    message->next = NULL;
    pthread_mutex_lock(&box->lock);
    *box->last = message;
    box->last = &message->next;
    pthread_mutex_unlock(&box->lock);
    uv_async_send(&box->async);
}

void inbox_close(struct inbox *box)
{
    if (!box->last) return;
    drain(box);
    uv_close((uv_handle_t *)&box->async, NULL);
    pthread_mutex_destroy(&box->lock);
}

// ---- the server --------------------------------------------------------------------------------

enum status http_new(uv_loop_t *loop, const struct http_options *options, struct http **ret)
{
    struct http *h = calloc(1, sizeof *h);
    if (!h) return status_fail(ST_NO_MEMORY, "out of memory");
    h->loop = loop;
    h->options = *options;
    http_sweep_start(h);
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

static void on_handle_closed(uv_handle_t *handle)
{
    unref(handle->data);
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
