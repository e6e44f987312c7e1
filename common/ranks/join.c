/* join.c: another rank at the rendezvous. It tries until the deadline: rank 0 may come later, what
 * answers may be somebody else, and a file may be an earlier run's. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/ranks/rendezvous_impl.h"

#include <stdio.h>
#include <string.h>

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

enum status join(struct address *address, int64_t deadline_ns, struct peers *p,
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
