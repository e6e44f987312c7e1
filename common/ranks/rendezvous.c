/* rendezvous.c: what both sides begin with. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/rendezvous.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/ranks/rendezvous_impl.h"

#include <stdlib.h>

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
    hello_of_this_process(&o->who, o->version, o->layout, &p->self);
    CHECK(
        address_init(&address, o->url, o->token, o->who.local_size == o->who.size, p->self.run_id));
    CHECK(first ? gather(&address, deadline, bytes, p) : join(&address, deadline, p, bytes));
    *ret = TAKE_PTR(p);
out:
    peers_free(p);
    return st;
}
