/* rendezvous.c: hellos, and how all meet: rank 0, which gathers the others, and each of those. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/rendezvous.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/ranks/address.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

// ---- hellos -------------------------------------------------------------------------------------

#define WHERE "a rank's hello"

static struct hello own_hello(const struct rendezvous_options *o)
{
    struct hello s = {.rank = o->who.rank, .size = o->who.size, .pid = getpid()};
    if (gethostname(s.host, sizeof s.host - 1) != 0) strcpy(s.host, "a host without a name");
    snprintf(s.version, sizeof s.version, "%s", o->version);
    snprintf(s.run_id, sizeof s.run_id, "%s", o->who.run_id);
    snprintf(s.layout, sizeof s.layout, "%s", o->layout ? o->layout : "");
    return s;
}

static json_t *hello_to_json(const struct hello *s)
{
    return json_pack("{s:i, s:i, s:I, s:s, s:s, s:s, s:s}", "rank", s->rank, "size", s->size, "pid",
                     (json_int_t)s->pid, "host", s->host, "version", s->version, "run_id",
                     s->run_id, "layout", s->layout);
}

static enum status get_text(const json_t *object, const char *key, char *ret, size_t size)
{
    const char *text = NULL;
    enum status st;
    CHECK(json_get_string(WHERE, object, key, &text));
    if (!text) FAIL(ST_FORMAT, WHERE " has no %s", key);
    if (strlen(text) >= size)
        FAIL(ST_FORMAT, WHERE ": %s has %zu bytes; %zu are the most", key, strlen(text), size - 1);
    for (const char *c = text; *c; c++) // it ends up in messages
        if ((unsigned char)*c < ' ') FAIL(ST_FORMAT, WHERE ": %s has control characters", key);
    strcpy(ret, text);
out:
    return st;
}

enum status hello_parse(const json_t *object, struct hello *ret)
{
    struct hello s = {.rank = -1};
    enum status st;
    CHECK(json_get_int32(WHERE, object, "rank", 0, RANKS_MAX - 1, &s.rank));
    CHECK(json_get_int32(WHERE, object, "size", 1, RANKS_MAX, &s.size));
    CHECK(json_get_int(WHERE, object, "pid", 1, INT64_MAX, &s.pid));
    if (s.rank < 0 || s.size == 0 || s.pid == 0)
        FAIL(ST_FORMAT, WHERE " lacks its rank, size or pid");
    CHECK(get_text(object, "host", s.host, sizeof s.host));
    CHECK(get_text(object, "version", s.version, sizeof s.version));
    CHECK(get_text(object, "run_id", s.run_id, sizeof s.run_id));
    CHECK(get_text(object, "layout", s.layout, sizeof s.layout));
    *ret = s;
out:
    return st;
}

const char *hello_name(const struct hello *s, char ret[HELLO_NAME])
{
    snprintf(ret, HELLO_NAME, "rank %d (%s, pid %lld)", s->rank, s->host, (long long)s->pid);
    return ret;
}

// Of two jobs: both know their run, and it is not the same.
static bool hello_other_run(const struct hello *a, const struct hello *b)
{
    return a->run_id[0] && b->run_id[0] && strcmp(a->run_id, b->run_id) != 0;
}

void hello_compare(const struct hello *zero, const struct hello *s, struct bytes *to)
{
    char name[HELLO_NAME];
    hello_name(s, name);
    const char *between = to->len > 0 ? "; " : "";
    if (s->size != zero->size) {
        bytes_printf(to, "%s%s was started as one of %d ranks, rank 0 as one of %d", between, name,
                     s->size, zero->size);
        between = "; ";
    }
    if (strcmp(s->version, zero->version) != 0) {
        bytes_printf(to, "%s%s is of version %s, rank 0 of %s", between, name, s->version,
                     zero->version);
        between = "; ";
    }
    if (strcmp(s->layout, zero->layout) != 0)
        bytes_printf(to,
                     "%s%s has weights of layout %s, rank 0 of %s: their servers must serve the "
                     "same model in the same dtype",
                     between, name, s->layout[0] ? s->layout : "(none)",
                     zero->layout[0] ? zero->layout : "(none)");
}

// ---- connections of a rank ----------------------------------------------------------------------

#define LOG_FIRST_MS 5000 // after this: most meet at once
#define LOG_MS       30000

static struct peers *peers_new(int n)
{
    struct peers *p = calloc(1, sizeof *p + (size_t)n * sizeof p->list[0]);
    if (!p) return NULL;
    p->n = n;
    for (int i = 0; i < n; i++) p->list[i].conn.fd = -1;
    return p;
}

void peers_free(struct peers *p)
{
    if (!p) return;
    for (int i = 0; i < p->n; i++) conn_close(&p->list[i].conn);
    free(p);
}

static void rendezvous_log(const struct address *address, const char *ranks, int64_t *next_ns)
{
    if (!*next_ns) *next_ns = clock_deadline_ns(LOG_FIRST_MS);
    if (clock_ms_until(*next_ns) > 0) return;
    log_info("--rendezvous %s: waiting for rank %s", address->text, ranks);
    *next_ns = clock_deadline_ns(LOG_MS);
}

// ---- rank 0 -------------------------------------------------------------------------------------
// One loop over poll(): who connects is answered and, once it has made its hello under the token,
// is its rank's peer. What the peers say is compared when all are there, so that everything that is
// amiss stands in one sentence.

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

static void put_missing(const struct gathering *g, struct bytes *to)
{
    for (int i = 0; i < g->p->n; i++)
        if (!g->p->list[i].here) bytes_printf(to, "%s%d", to->len > 0 ? ", " : "", i + 1);
}

static enum status gather_timed_out(const struct gathering *g)
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
        if (clock_ms_until(deadline_ns) == 0) CHECK(gather_timed_out(g));
        CHECK(address_check(g->address));
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

static void end_gathering(struct gathering *g, enum status st)
{
    if (st != ST_OK) send_failure(g, st);
    while (g->n_handshakes > 0) drop(g, g->n_handshakes - 1);
    if (g->fd >= 0) {
        close(g->fd);
        address_leave(g->address);
    }
    free(g->polls);
}

static enum status gather(struct address *address, int64_t deadline_ns, const struct bytes *bytes,
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
    CHECK(address_check(address));
    CHECK(address_listen(address, &g.fd));
    CHECK(gather_all(&g, deadline_ns));
    CHECK(compare_all(&g));
    send_all(&g, "welcome", bytes_text(&text));
out:
    end_gathering(&g, st);
    bytes_release(&text);
    return st;
}

// ---- another rank -------------------------------------------------------------------------------
// It tries until the deadline: rank 0 may come later, what answers may be somebody else, and a file
// may be an earlier run's.

#define AGAIN_MS 200   // between two tries
#define HELLO_MS 10000 // within which who answers must say who it is

struct joining {
    struct address *address;
    struct peers *p; // one, rank 0
    int64_t deadline_ns;
    char missing[256]; // what rank 0 said last
    bool final;        // no other try would end otherwise
    int64_t log_ns;    // of the next line in the log
};

// What rank 0 says of itself; afterwards this rank has made its own hello.
static enum status introduce(struct joining *j)
{
    struct peer *zero = &j->p->list[0];
    int64_t deadline = clock_deadline_ns(HELLO_MS);
    json_t *message = NULL;
    enum status st;
    if (deadline > j->deadline_ns) deadline = j->deadline_ns;
    st = conn_await(&zero->conn, deadline, &message);
    j->final = st == ST_MISMATCH && !j->address->file; // the token of a file may be a new one soon
    if (st == ST_MISMATCH && !j->address->file)
        CHECK(status_context(st, "--rendezvous-token-file is not that of rank 0"));
    CHECK(st);
    CHECK(hello_parse(message, &zero->who));
    CHECK(conn_send(&zero->conn, hello_to_json(&j->p->self)));
    st = conn_drain(&zero->conn, deadline);
out:
    json_decref(message);
    return st;
}

// ret_done: welcome; otherwise the next message is to be waited for.
static enum status read_answer(struct joining *j, const json_t *message, struct bytes *ret_bytes,
                               bool *ret_done)
{
    const char *missing = NULL, *welcome = NULL, *refused = NULL;
    const char *where = "rank 0's answer";
    enum status st;
    CHECK(json_get_string(where, message, "missing", &missing));
    CHECK(json_get_string(where, message, "welcome", &welcome));
    CHECK(json_get_string(where, message, "refused", &refused));
    if (missing) snprintf(j->missing, sizeof j->missing, "%s", missing);
    j->final = refused && !(j->address->file && hello_other_run(&j->p->self, &j->p->list[0].who));
    if (refused) FAIL(ST_MISMATCH, "%s", refused);
    if (welcome) CHECK(base64_decode(welcome, ret_bytes));
    *ret_done = welcome != NULL;
out:
    return st;
}

static enum status await_welcome(struct joining *j, struct bytes *ret_bytes)
{
    struct peer *zero = &j->p->list[0];
    json_t *message = NULL;
    bool done = false;
    enum status st = ST_OK;
    while (!done) {
        CHECK(conn_await(&zero->conn, j->deadline_ns, &message));
        CHECK(read_answer(j, message, ret_bytes, &done));
        json_decref(message);
        message = NULL;
    }
    zero->here = true;
    zero->heard_ns = clock_now_ns();
out:
    json_decref(message);
    return st;
}

static enum status try_once(struct joining *j, struct bytes *ret_bytes)
{
    struct peer *zero = &j->p->list[0];
    int fd;
    enum status st;
    CHECK(address_connect(j->address, j->deadline_ns, &fd));
    conn_open(&zero->conn, fd, j->address->token);
    CHECK(introduce(j));
    CHECK(await_welcome(j, ret_bytes));
out:
    if (st != ST_OK) conn_close(&zero->conn);
    return st;
}

static enum status timed_out(const struct joining *j, const struct status_kept *why)
{
    const struct hello *zero = &j->p->list[0].who;
    char name[HELLO_NAME];
    if (!j->missing[0])
        return status_fail(ST_TIMEOUT, "--rendezvous %s: rank 0 was not to be reached in time: %s",
                           j->address->text, why->message);
    return status_fail(ST_TIMEOUT,
                       "--rendezvous %s: %s was there, but not all others in time: it "
                       "said last that it misses %s",
                       j->address->text, hello_name(zero, name), j->missing);
}

static enum status join(struct address *address, int64_t deadline_ns, struct peers *p,
                        struct bytes *ret_bytes)
{
    struct joining j = {.address = address, .p = p, .deadline_ns = deadline_ns};
    struct status_kept why = {0};
    for (;;) {
        const enum status st = try_once(&j, ret_bytes);
        if (st == ST_OK || j.final) return st;
        status_keep(&why, st);
        if (address_check(address) != ST_OK) return ST_PEER_GONE;
        if (!j.missing[0]) rendezvous_log(address, "0", &j.log_ns);
        if (clock_ms_until(deadline_ns) == 0) return timed_out(&j, &why);
        const int ms = clock_ms_until(deadline_ns);
        clock_sleep_ms(ms < AGAIN_MS ? ms : AGAIN_MS);
    }
}

// ---- all ----------------------------------------------------------------------------------------

enum status rendezvous(const struct rendezvous_options *o, struct bytes *bytes, struct peers **ret)
{
    const int64_t deadline = clock_deadline_ns((int64_t)(o->timeout_s * 1e3));
    const bool first = o->who.rank == 0;
    struct address address;
    struct peers *p = peers_new(first ? o->who.size - 1 : 1);
    enum status st;
    if (!p) FAIL(ST_NO_MEMORY, "no memory for the connections of %d ranks", o->who.size);
    p->self = own_hello(o);
    CHECK(address_init(&address, o->url, o->token, &o->who));
    CHECK(first ? gather(&address, deadline, bytes, p) : join(&address, deadline, p, bytes));
    *ret = TAKE_PTR(p);
out:
    peers_free(p);
    return st;
}

enum status rendezvous_check(const struct rendezvous_options *o)
{
    struct address address;
    const enum status st = address_init(&address, o->url, o->token, &o->who);
    return st == ST_OK ? address_check(&address) : st;
}

void rendezvous_give_up(const struct rendezvous_options *o, enum status why)
{
    const struct hello self = own_hello(o);
    struct address address;
    struct status_kept kept;
    char name[HELLO_NAME], sentence[sizeof kept.message + HELLO_NAME + 16];
    status_keep(&kept, why);
    snprintf(sentence, sizeof sentence, "%s has failed: %s", hello_name(&self, name), kept.message);
    if (address_init(&address, o->url, o->token, &o->who) == ST_OK)
        address_give_up(&address, sentence);
    status_recall(&kept);
}
