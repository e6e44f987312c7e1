/* gather.c: rank 0 at the rendezvous. One loop over poll(): who connects is answered and, once it
 * has made its hello under the token, is its rank's peer. What the peers say is compared when all
 * are there, so that everything that is amiss stands in one sentence. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/ranks/rendezvous_impl.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define HANDSHAKES   256   // connections that have not made their hello
#define HANDSHAKE_MS 10000 // within which they must
#define MISSING_MS   1000  // between two notices of who is missing
#define BREATH_MS    100   // where none can be taken, for want of descriptors
#define ANSWER_MS    5000  // for the last word to each

struct gathering {
    struct address *address;
    struct peers *p;
    int fd;
    struct handshake {
        struct conn conn;
        int64_t deadline_ns;
    } handshakes[HANDSHAKES];
    int n_handshakes;
    int n_here;
    int n_refused; // and why the last one was
    struct status_kept refused;
    int64_t notice_ns; // of the next notice
    int64_t log_ns;    // of the next line in the log
    struct pollfd *polls;
};

// ---- words --------------------------------------------------------------------------------------

static void put_missing(const struct gathering *g, struct bytes *to)
{
    for (int i = 0; i < g->p->n; i++)
        if (!g->p->list[i].here) bytes_printf(to, "%s%d", to->len > 0 ? ", " : "", i + 1);
}

static enum status timed_out(const struct gathering *g)
{
    struct bytes missing = BYTES_INIT;
    put_missing(g, &missing);
    enum status st =
        status_fail(ST_TIMEOUT, "--rendezvous %s: %d of %d ranks came in time; missing: %s%s%s",
                    g->address->text, g->n_here + 1, g->p->self.size, bytes_text(&missing),
                    g->n_refused ? " (others were sent away, the last one because " : "",
                    g->n_refused ? g->refused.message : "");
    bytes_release(&missing);
    return st;
}

// One last message to all that came.
static void send_all(const struct gathering *g, const char *key, const char *text)
{
    const int64_t deadline = clock_deadline_ns(ANSWER_MS);
    for (int i = 0; i < g->p->n; i++) {
        struct conn *w = &g->p->list[i].conn;
        if (g->p->list[i].here && conn_send(w, json_pack("{s:s}", key, text)) == ST_OK)
            conn_drain(w, deadline);
    }
}

static void report_missing(struct gathering *g)
{
    struct bytes missing = BYTES_INIT;
    if (clock_ms_until(g->notice_ns) > 0) return;
    put_missing(g, &missing);
    rendezvous_log(g->address, bytes_text(&missing), &g->log_ns);
    for (int i = 0; i < g->p->n; i++)
        if (g->p->list[i].here)
            conn_send(&g->p->list[i].conn, json_pack("{s:s}", "missing", bytes_text(&missing)));
    bytes_release(&missing);
    g->notice_ns = clock_deadline_ns(MISSING_MS);
}

// What failed, to all that came; it stays this thread's sentence.
static void send_failure(const struct gathering *g, enum status why)
{
    struct status_kept kept;
    status_keep(&kept, why);
    send_all(g, "refused", kept.message);
    status_recall(&kept);
}

// ---- handshakes ---------------------------------------------------------------------------------

static void drop(struct gathering *g, int i)
{
    conn_close(&g->handshakes[i].conn);
    g->handshakes[i] = g->handshakes[--g->n_handshakes];
}

static void refuse(struct gathering *g, int i, enum status why)
{
    status_keep(&g->refused, why);
    g->n_refused++;
    drop(g, i);
}

// Where all places are taken, the one that has said nothing for longest gives way.
static void make_room(struct gathering *g)
{
    int oldest = 0;
    for (int i = 1; i < g->n_handshakes; i++)
        if (g->handshakes[i].deadline_ns < g->handshakes[oldest].deadline_ns) oldest = i;
    if (g->n_handshakes == HANDSHAKES) drop(g, oldest);
}

static void accept_one(struct gathering *g)
{
    make_room(g);
    struct handshake *k = &g->handshakes[g->n_handshakes];
    const int fd = accept4(g->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0 && errno != EAGAIN) {
        status_keep(&g->refused,
                    status_fail(ST_IO, "no connection could be taken: %s", strerror(errno)));
        g->n_refused++;
        clock_sleep_ms(BREATH_MS);
    }
    if (fd < 0) return;
    conn_open(&k->conn, fd, g->address->token);
    k->deadline_ns = clock_deadline_ns(HANDSHAKE_MS);
    g->n_handshakes++;
    enum status st = conn_send(&k->conn, hello_to_json(&g->p->self));
    if (st != ST_OK) refuse(g, g->n_handshakes - 1, st);
}

// ST_MISMATCH where nobody can meet here: the sentence is for all, also for who just came.
static enum status check_place_of(const struct gathering *g, const struct hello *s)
{
    const struct hello *self = &g->p->self;
    char a[HELLO_NAME], b[HELLO_NAME];
    if (s->rank == 0)
        return status_fail(ST_MISMATCH, "two processes are started as one rank: %s and %s",
                           hello_name(self, a), hello_name(s, b));
    if (s->rank > g->p->n)
        return status_fail(ST_MISMATCH, "%s comes to %s, which was started as one of %d ranks",
                           hello_name(s, a), hello_name(self, b), self->size);
    const struct peer *peer = &g->p->list[s->rank - 1];
    if (peer->here)
        return status_fail(ST_MISMATCH, "two processes are started as one rank: %s and %s",
                           hello_name(&peer->who, a), hello_name(s, b));
    return ST_OK;
}

// Where a hello is of this run, its maker is a peer from now on.
static enum status admit(struct gathering *g, int i, const struct hello *s)
{
    struct handshake *k = &g->handshakes[i];
    char name[HELLO_NAME];
    const bool stranger = hello_other_run(&g->p->self, s);
    const enum status st = stranger ? status_fail(ST_MISMATCH, "%s is of the run %s, rank 0 of %s",
                                                  hello_name(s, name), s->run_id, g->p->self.run_id)
                                    : check_place_of(g, s);
    if (st != ST_OK) {
        struct status_kept why;
        status_keep(&why, st);
        conn_send(&k->conn, json_pack("{s:s}", "refused", why.message));
        status_recall(&why);
        if (!stranger) return st;
        refuse(g, i, st);
        return ST_OK;
    }
    g->p->list[s->rank - 1] =
        (struct peer){.who = *s, .conn = k->conn, .heard_ns = clock_now_ns(), .here = true};
    k->conn = (struct conn){.fd = -1};
    g->n_here++;
    g->notice_ns = 0;
    drop(g, i);
    return ST_OK;
}

// Fails only where this gathering must: others are sent away.
static enum status read_handshake(struct gathering *g, int i)
{
    struct handshake *k = &g->handshakes[i];
    struct hello s;
    json_t *message = NULL;
    enum status st, own = ST_OK;
    CHECK(conn_receive(&k->conn, &message));
    if (!message && clock_ms_until(k->deadline_ns) == 0)
        FAIL(ST_TIMEOUT, "a connection said nothing for %d s", HANDSHAKE_MS / 1000);
    CHECK(message ? hello_parse(message, &s) : conn_flush(&k->conn));
out:
    if (st == ST_OK && message) own = admit(g, i, &s);
    if (st != ST_OK) refuse(g, i, st);
    json_decref(message);
    return own;
}

// A peer that goes before all are there may come again.
static void hear_peer(struct gathering *g, struct peer *peer)
{
    json_t *message = NULL;
    enum status st = conn_receive(&peer->conn, &message);
    json_decref(message);
    if (st == ST_OK) st = conn_flush(&peer->conn);
    if (st == ST_OK) return;
    conn_close(&peer->conn);
    peer->here = false;
    g->n_here--;
}

// ---- the loop -----------------------------------------------------------------------------------

static void wait_for_any(struct gathering *g, int64_t deadline_ns)
{
    nfds_t n = 0;
    int ms = clock_ms_until(g->notice_ns);
    if (clock_ms_until(deadline_ns) < ms) ms = clock_ms_until(deadline_ns);
    g->polls[n++] = (struct pollfd){.fd = g->fd, .events = POLLIN};
    for (int i = 0; i < g->n_handshakes; i++)
        g->polls[n++] = (struct pollfd){.fd = g->handshakes[i].conn.fd, .events = POLLIN};
    for (int i = 0; i < g->p->n; i++)
        if (g->p->list[i].here)
            g->polls[n++] = (struct pollfd){.fd = g->p->list[i].conn.fd, .events = POLLIN};
    poll(g->polls, n, ms);
}

static enum status gather_all(struct gathering *g, int64_t deadline_ns)
{
    enum status st = ST_OK;
    while (g->n_here < g->p->n) {
        if (clock_ms_until(deadline_ns) == 0) CHECK(timed_out(g));
        report_missing(g);
        wait_for_any(g, deadline_ns);
        if (g->polls[0].revents & POLLIN) accept_one(g);
        // first who has gone, whose rank may connect again
        for (int i = 0; i < g->p->n; i++)
            if (g->p->list[i].here) hear_peer(g, &g->p->list[i]);
        for (int i = g->n_handshakes - 1; i >= 0; i--) CHECK(read_handshake(g, i));
    }
out:
    return st;
}

static enum status compare_all(const struct gathering *g)
{
    struct bytes amiss = BYTES_INIT;
    enum status st = ST_OK;
    for (int i = 0; i < g->p->n; i++) hello_compare(&g->p->self, &g->p->list[i].who, &amiss);
    if (amiss.len > 0) st = status_fail(ST_MISMATCH, "%s", bytes_text(&amiss));
    bytes_release(&amiss);
    return st;
}

static void end(struct gathering *g, enum status st)
{
    if (st != ST_OK) send_failure(g, st);
    while (g->n_handshakes > 0) drop(g, g->n_handshakes - 1);
    if (g->fd >= 0) {
        close(g->fd);
        address_leave(g->address);
    }
    free(g->polls);
}

enum status gather(struct address *address, int64_t deadline_ns, const struct bytes *bytes,
                   struct peers *p)
{
    struct gathering g = {.address = address, .p = p, .fd = -1};
    struct bytes text = BYTES_INIT;
    enum status st;
    if (bytes->len > RENDEZVOUS_BYTES)
        FAIL(ST_TOO_LONG, "rank 0 gives %zu bytes at the rendezvous; %d are the most", bytes->len,
             RENDEZVOUS_BYTES);
    g.polls = calloc((size_t)p->n + HANDSHAKES + 1, sizeof *g.polls);
    if (!g.polls) FAIL(ST_NO_MEMORY, "no memory for the connections of %d ranks", p->self.size);
    CHECK(base64_encode(bytes->data, bytes->len, &text));
    CHECK(address_listen(address, &g.fd));
    CHECK(gather_all(&g, deadline_ns));
    CHECK(compare_all(&g));
    send_all(&g, "welcome", bytes_text(&text));
out:
    end(&g, st);
    bytes_release(&text);
    return st;
}
