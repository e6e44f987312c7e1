/* sweep.c: every 100 ms, what no event tells: clients that hung up in the middle of a request or
 * while their connection sleeps, answers that are overdue, and connections that hold a slot for
 * longer than they may. Loop's thread.
 *
 * libmicrohttpd's own time-out starts anew with every byte, so a client that sends or takes a byte
 * now and then could keep a connection for ever. From accept to close every phase has an end:
 *   headers   HEADERS_S after accept, and --idle-timeout after the last answer
 *   body      --idle-timeout, and a second more for each BODY_RATE bytes that came
 *   answer    --request-timeout (a sentence says so), and --idle-timeout more to take it; a file
 *             also a second for each BODY_RATE bytes
 * A connection past its end is shut down; libmicrohttpd finds that and closes it.
 *
 * libmicrohttpd stops listening at its limit, and begins again only in a later MHD_run(), which
 * nothing may ask for where all connections ended at once: so every listener is run here too. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/http_impl.h"
#include "common/base/clock.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define HEADERS_S 30

// Past the end of its phase.
static bool is_overdue(const struct connection *c, int64_t idle_s, int64_t now)
{
    const struct http_request *q = c->request;
    const int64_t next_s = c->used || idle_s < HEADERS_S ? idle_s : HEADERS_S;
    if (!q) return now - c->since_ns > next_s * NS_PER_S;
    if (!q->received) // a refused body is read on
        return now - q->since_ns > (idle_s + (int64_t)(q->body_seen / BODY_RATE)) * NS_PER_S;
    return now - q->deadline_ns > idle_s * NS_PER_S;
}

static void sweep_deadlines(struct connection *c, int64_t idle_s, int64_t now)
{
    struct http_request *q = c->request;
    if (is_overdue(c, idle_s, now)) {
        shutdown(c->fd, SHUT_RDWR);
    } else if (q && q->received && now > q->deadline_ns && !q->expired &&
               (q->state == WAITING || q->streaming)) {
        q->expired = true;
        if (q->state == WAITING)
            http_fail(q, 504, "the answer took longer than --request-timeout allows");
        else
            http_resume(q); // a stream's producer sees http_expired()
    }
}

// The client sends no more. One that waits for its answer has left, as far as can be told; one in
// the middle of a request will never end it, once all that it sent was read: which libmicrohttpd,
// told of changes only, may have missed. It gets until the next sweep to read on.
static void hang_up(struct connection *c)
{
    int unread = 0;
    if (c->request && c->request->suspended) {
        c->request->gone = true;
        http_resume(c->request);
        return;
    }
    if (c->request && c->request->received) return; // it is being answered
    bool stuck = ioctl(c->fd, FIONREAD, &unread) == 0 && unread == 0;
    if (stuck && c->hung_up) shutdown(c->fd, SHUT_RDWR);
    c->hung_up = stuck;
}

static void sweep_hung_up(struct http *h)
{
    int n = 0;
    if (h->polled_cap < h->n_connections) {
        struct pollfd *polled =
            reallocarray(h->polled, 2 * (size_t)h->n_connections, sizeof *polled);
        if (!polled) return;
        h->polled = polled;
        h->polled_cap = 2 * h->n_connections;
    }
    for (struct connection *c = h->connections; c; c = c->next)
        h->polled[n++] = (struct pollfd){.fd = c->fd, .events = POLLRDHUP};
    if (n == 0 || poll(h->polled, (nfds_t)n, 0) <= 0) return;
    n = 0;
    for (struct connection *c = h->connections; c; c = c->next)
        if (h->polled[n++].revents & (POLLRDHUP | POLLHUP | POLLERR)) hang_up(c);
}

static void on_sweep(uv_timer_t *timer)
{
    struct http *h = timer->data;
    int64_t now = clock_now_ns();
    for (struct connection *c = h->connections; c; c = c->next)
        sweep_deadlines(c, h->options.idle_timeout_s, now);
    sweep_hung_up(h);
    for (int i = 0; i < h->n_listeners; i++) http_run_due(&h->listeners[i]);
}

void http_sweep_start(struct http *h)
{
    uv_timer_init(h->loop, &h->sweep);
    h->sweep.data = h;
    h->users++;
    uv_timer_start(&h->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
}
