/* http_impl.h: connections and requests as the HTTP layer's files share them: http.c, which
 * libmicrohttpd calls, http_route.c, http_reply.c, and sweep.c, which looks after deadlines.
 * Private to these; loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_HTTP_HTTP_IMPL_H
#define COMMON_HTTP_HTTP_IMPL_H

#include "common/http/http.h"

#include <microhttpd.h>
#include <poll.h>

#define LISTENERS_MAX  2
#define HEADERS_MAX    4
#define SWEEP_MS       100
#define REQUEST_ID_MAX 128
#define BODY_RATE      (64 << 10) // bytes a second that a body goes at, at least

struct listener {
    struct http *http;
    struct MHD_Daemon *daemon;
    uv_poll_t poll;
    uv_timer_t timer;
    bool tcp;
};

struct http {
    uv_loop_t *loop;
    struct http_options options;
    struct listener listeners[LISTENERS_MAX];
    int n_listeners, n_connections, n_requests;
    int users; // open handles, and bodies that were taken: the last frees this
    bool closing;
    size_t buffered; // bytes of request bodies
    size_t peak;     // of these, since memory was last given back
    uv_timer_t sweep;
    struct connection *connections;
    struct pollfd *polled; // scratch of the sweep, one a connection
    int polled_cap;
};

// An accepted socket, from accept to close.
struct connection {
    struct connection *next, **link;
    int fd;
    int64_t since_ns;             // accepted, or the last answer ended
    struct http_request *request; // under way, or NULL
    bool used;                    // there was one
    bool hung_up;                 // at the last sweep, in the middle of a request
};

enum http_request_state { READING, WAITING, REPLY_READY, SENDING };

struct http_request {
    struct listener *listener;
    struct MHD_Connection *connection;
    struct connection *socket;
    const struct http_route *route;
    const char *path_tail;         // libmicrohttpd's, for as long as the request
    const char *const *parameters; // that its URL may have (http_takes_only())
    char request_id[REQUEST_ID_MAX + 1];
    enum http_request_state state;
    bool received; // whole
    bool suspended, gone, expired, streaming, stream_ended, close_after;
    struct bytes body; // the request's; later the part of a stream that is not sent yet
    size_t body_seen, sent;
    uint64_t stream_bytes; // MHD_SIZE_UNKNOWN: nobody knows
    size_t buffered;       // of the body, as counted in struct http
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

void http_run_due(struct listener *l);    // lets libmicrohttpd do what is due
void http_resume(struct http_request *q); // lets a suspended connection go on at the next turn

// sweep.c: every SWEEP_MS, until the timer is closed.
void http_sweep_start(struct http *h);
// http.c
void http_drop_body(struct http_request *q); // the request's body is needed no more
// http_reply.c: hands the reply, or the stream, to libmicrohttpd.
enum MHD_Result http_queue_reply(struct http_request *q);
// http_route.c: the client's name for its request, where it is of printable ASCII and not too long,
// or a new one.
void http_name_request(struct http_request *q);
// Finds the route; where there is none, or it may not be used, the request has its answer already.
void http_find_route(struct http_request *q, const char *url, const char *method);

// http_route.c: is a request meant for this server? A web page that a browser has open may send
// requests to loopback addresses, and by a name of its own that suddenly leads there (DNS
// rebinding) even read the answers. Browsers tell in Host and Origin which page that was. Pure
// functions. host: a Host header, "name", "name:port" or "[address]:port". Allowed are "localhost",
// loopback addresses and the names of `allowed` (without ports, NULL-ended, may be NULL), whatever
// the port.
bool host_is_allowed(const char *host, const char *const *allowed);
// origin: an Origin header, "scheme://host" or "scheme://host:port"; "null" is not allowed.
bool origin_is_allowed(const char *origin, const char *const *allowed);

#endif
