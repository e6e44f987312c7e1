/* rendezvous.c: hellos, what both sides begin with, and the side of those that are not rank 0,
 * whose is gather.c. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/rendezvous.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/ranks/rendezvous_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

json_t *hello_to_json(const struct hello *s)
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

bool hello_other_run(const struct hello *a, const struct hello *b)
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
        if (!j.missing[0]) rendezvous_log(address, "0", &j.log_ns);
        if (clock_ms_until(deadline_ns) == 0) return timed_out(&j, &why);
        const int ms = clock_ms_until(deadline_ns);
        clock_sleep_ms(ms < AGAIN_MS ? ms : AGAIN_MS);
    }
}

// ---- both sides ---------------------------------------------------------------------------------

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

void rendezvous_log(const struct address *address, const char *ranks, int64_t *next_ns)
{
    if (!*next_ns) *next_ns = clock_deadline_ns(LOG_FIRST_MS);
    if (clock_ms_until(*next_ns) > 0) return;
    log_info("--rendezvous %s: waiting for rank %s", address->text, ranks);
    *next_ns = clock_deadline_ns(LOG_MS);
}

enum status rendezvous(const struct rendezvous_options *o, struct bytes *bytes, struct peers **ret)
{
    const int64_t deadline = clock_deadline_ns((int64_t)(o->timeout_s * 1e3));
    const bool first = o->who.rank == 0;
    struct address address;
    struct peers *p = peers_new(first ? o->who.size - 1 : 1);
    enum status st;
    if (!p) FAIL(ST_NO_MEMORY, "no memory for the connections of %d ranks", o->who.size);
    p->self = own_hello(o);
    CHECK(
        address_init(&address, o->url, o->token, o->who.local_size == o->who.size, p->self.run_id));
    CHECK(first ? gather(&address, deadline, bytes, p) : join(&address, deadline, p, bytes));
    *ret = TAKE_PTR(p);
out:
    peers_free(p);
    return st;
}
