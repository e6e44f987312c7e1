/* control_writer.c: the writer's side of the control page: the lease, the request to quiesce, an
 * update's begin and end. The protocol is told in control.c. The trainer's main thread. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control_page.h"
#include "common/base/clock.h"
#include "common/base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static enum status lease_lost(const struct control *c)
{
    return status_fail(ST_BUSY,
                       "control page %s: this process (pid %d) no longer holds the writer's lease: "
                       "it gave no sign of life for %.1f s, or its last update was cut off, and "
                       "the server revoked it; start again from the last checkpoint",
                       c->name, (int)getpid(),
                       (double)atomic_load(&c->page->heartbeat_limit_ms) / 1000);
}

static enum status lease_none(const struct control *c)
{
    return status_fail(ST_INVALID,
                       "control page %s: the writer's lease was not taken; nothing may be written",
                       c->name);
}

void control_follow(struct control *c, int shard)
{
    c->follows = shard;
}

// A follower's sign that it may write: a lock on the page's byte of that number, through a
// descriptor of its own, which the kernel lets go with the process.
static enum status take_place(struct control *c)
{
    struct flock place = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = c->follows, .l_len = 1};
    if (c->fd >= 0) return ST_OK;
    const int fd = shm_open(c->name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) return status_fail(ST_IO, "control page %s: %s", c->name, strerror(errno));
    if (fcntl(fd, F_OFD_SETLK, &place) == 0) {
        c->fd = fd;
        return ST_OK;
    }
    const int error = errno;
    close(fd);
    return error == EAGAIN || error == EACCES
               ? status_fail(ST_BUSY,
                             "control page %s: another process writes shard %d of these weights; "
                             "stop it, or wait until it ends",
                             c->name, c->follows)
               : status_fail(ST_IO, "control page %s: a lock of shard %d: %s", c->name, c->follows,
                             strerror(error));
}

enum status control_lease_take(struct control *c)
{
    struct page *page = c->page;
    if (c->follows) {
        c->version = atomic_load(&page->version) & ~(uint64_t)1;
        const enum status alive = control_owner_alive(c);
        return alive == ST_OK ? take_place(c) : alive;
    }
    for (;;) {
        enum status st = control_owner_alive(c);
        if (st != ST_OK) return st;
        uint64_t lease = atomic_load(&page->lease), held = atomic_load(&c->lease);
        if (held && held == lease) return ST_OK;
        enum life life = writer_life(page, lease);
        if (life == LIFE_ALIVE || life == LIFE_STILL)
            return status_fail(
                ST_BUSY,
                "process %d is training on these weights already (its last sign of life was %.1f s "
                "ago): end it first; two writers would overwrite each other",
                (int)lease_pid(lease),
                clock_ms_since(atomic_load(&page->writer_heartbeat_ns)) / 1000);
        uint64_t version = atomic_load(&page->version);
        if (version & 1)
            return status_fail(ST_TORN,
                               "control page %s: version %llu is odd: the server (pid %d) has yet "
                               "to %s the weights; try again when its /health says ok",
                               c->name, (unsigned long long)version, (int)page->owner_pid,
                               version == 1 ? "load" : "restore");
        uint64_t mine = lease_next(lease, getpid()), start = process_start_time(getpid());
        if (!start)
            return status_fail(ST_IO,
                               "/proc/%d/stat cannot be read, by which the server knows its "
                               "trainer: is /proc mounted, are file descriptors left?",
                               (int)getpid());
        if (!atomic_compare_exchange_strong(&page->lease, &lease, mine)) continue;
        atomic_store(&page->writer_heartbeat_ns, clock_now_ns());
        atomic_store(&page->identity, (uint64_t)(lease_generation(mine) & 0xffff) << 48 | start);
        phase_reset(page, mine);
        atomic_store(&c->lease, mine);
        c->version = atomic_load(&page->version);
        if (!(c->version & 1)) return ST_OK;
        control_lease_release(c); // the owner began an update of its own: say so as above
    }
}

void control_lease_release(struct control *c)
{
    struct page *page = c->page;
    uint64_t lease = atomic_exchange(&c->lease, 0);
    if (c->follows && c->fd >= 0) {
        close(c->fd);
        c->fd = -1;
    }
    if (!lease) return;
    // In this order: a phase that is let go wakes an engine, which must still find the lease's
    // holder.
    control_resume(c);
    uint32_t idle = phase_word(lease, PHASE_IDLE);
    phase_move(page, phase_word(lease, PHASE_REQUESTED), idle);
    phase_move(page, phase_word(lease, PHASE_GRANTED), idle);
    uint64_t next = lease_next(lease, 0);
    atomic_compare_exchange_strong(&page->lease, &lease, next);
    control_notify(c);
}

enum status control_quiesce(struct control *c, int64_t deadline_ns)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&c->lease);
    if (c->follows) return control_owner_alive(c);
    if (!lease) return lease_none(c);
    uint32_t idle = phase_word(lease, PHASE_IDLE), asked = phase_word(lease, PHASE_REQUESTED),
             granted = phase_word(lease, PHASE_GRANTED);
    int64_t start = clock_now_ns();
    enum status st;
    if (!phase_move(page, idle, asked)) {
        if (atomic_load(&page->lease) != lease) return lease_lost(c);
        return status_fail(ST_INVALID, "control page %s: the engine was asked to quiesce twice",
                           c->name);
    }
    control_notify(c);
    for (;;) {
        uint32_t now = atomic_load(&page->phase);
        if (now == granted) break;
        if (now != asked) return lease_lost(c);
        if (clock_now_ns() >= deadline_ns) {
            if (!phase_move(page, asked, idle)) continue; // granted at the last moment, or lost
            return status_fail(
                ST_TIMEOUT,
                "the server (pid %d) did not pause for an update within %.1f s: it may be paused "
                "(POST /bridge/resume), loading, or stuck; see its /health",
                (int)page->owner_pid, clock_ms_since(start) / 1000);
        }
        int64_t slice = clock_deadline_ns(SLICE_MS);
        futex_wait(&page->phase, asked, slice < deadline_ns ? slice : deadline_ns);
        if (atomic_load(&page->phase) != asked) continue;
        st = control_owner_alive(c);
        if (st != ST_OK) {
            phase_move(page, asked, idle);
            return st;
        }
    }
    atomic_store(&page->wait_ns, clock_now_ns() - start);
    uint64_t version = atomic_load(&page->version);
    if (version != c->version) {
        control_resume(c);
        return status_fail(ST_MISMATCH,
                           "weight version is %llu, this writer left %llu: the server rewrote the "
                           "weights meanwhile (POST /reload), so optimizer and weights no longer "
                           "belong together; start again from the last checkpoint",
                           (unsigned long long)version, (unsigned long long)c->version);
    }
    return ST_OK;
}

bool control_quiesce_cancel(struct control *c)
{
    uint64_t lease = atomic_load(&c->lease);
    return lease &&
           phase_move(c->page, phase_word(lease, PHASE_REQUESTED), phase_word(lease, PHASE_IDLE));
}

enum status control_write_begin(struct control *c)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&c->lease);
    c->next = c->version + 2;
    if (c->follows) return ST_OK;
    if (!lease) return lease_none(c);
    uint32_t granted = phase_word(lease, PHASE_GRANTED);
    if (atomic_load(&page->phase) != granted) {
        if (atomic_load(&page->lease) != lease) return lease_lost(c);
        return status_fail(ST_INVALID, "control page %s: an update without the engine's grant",
                           c->name);
    }
    uint64_t even = c->version;
    // The owner revokes the lease by moving on from the same version: only one of the two can.
    if (!atomic_compare_exchange_strong(&page->version, &even, even + 1)) return lease_lost(c);
    c->odd_since_ns = clock_now_ns();
    c->writing[0] = 0;
    c->unchanged = false;
    return ST_OK;
}

void control_set_run(struct control *c, const char *folder)
{
    put_folder(c->run, folder);
}

void control_set_role(struct control *c, const char *role)
{
    snprintf(c->role, CONTROL_ROLE_BYTES, "%s", role);
}

void control_set_origin(struct control *c, const char *folder)
{
    put_folder(c->writing, folder);
}

void control_set_version(struct control *c, uint64_t version)
{
    c->next = version;
    c->unchanged = true;
}

static void count_updates(struct page_role *r, const char *run, uint64_t n)
{
    if (strncmp(r->run, run, CONTROL_PATH_BYTES) != 0) atomic_store(&r->run_updates, 0);
    snprintf(r->run, CONTROL_PATH_BYTES, "%s", run);
    atomic_fetch_add(&r->run_updates, n);
    atomic_fetch_add(&r->updates, n);
}

// Counts the update and says what the role's weights are after it: see the head of the file. What
// others did not say is taken for the policy's.
static void note_update(struct control *c)
{
    struct page *page = c->page;
    struct page_role *r = find_role(page, c->role);
    const uint64_t publishes = atomic_load(&page->publishes),
                   silent = publishes - atomic_load(&page->noted_publishes);
    if (!r) r = page->roles;
    if (silent) count_updates(page->roles, "", silent);
    if (silent || (r == page->roles && (c->writing[0] || !c->unchanged)))
        atomic_store(&page->policy_version, c->next);
    if (c->writing[0])
        put_origin(r, c->writing);
    else if (!c->unchanged)
        count_updates(r, c->run, 1);
    atomic_store(&page->noted_publishes, publishes + 1);
    atomic_store(&page->publishes, publishes + 1);
}

enum status control_write_end(struct control *c)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&c->lease);
    if (c->follows) {
        c->version = c->next;
        return ST_OK;
    }
    if (!lease) return lease_none(c);
    int64_t now = clock_now_ns();
    uint64_t odd = c->version + 1;
    // Before the version: who sees it even finds the figures of this update.
    if (atomic_load(&page->lease) != lease || atomic_load(&page->version) != odd)
        return lease_lost(c);
    atomic_store(&page->write_ns, now - c->odd_since_ns);
    note_update(c);
    if (!atomic_compare_exchange_strong(&page->version, &odd, c->next) ||
        atomic_load(&page->lease) != lease)
        return lease_lost(c);
    c->version = c->next;
    return ST_OK;
}

bool control_as_left(const struct control *c)
{
    return !(c->version & 1) && c->version > 0 && atomic_load(&c->page->version) == c->version;
}

void control_resume(struct control *c)
{
    uint64_t lease = atomic_load(&c->lease);
    if (!lease) return;
    phase_move(c->page, phase_word(lease, PHASE_GRANTED), phase_word(lease, PHASE_IDLE));
    control_notify(c);
}

enum status control_set_snapshot(struct control *c, const char *folder)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&c->lease);
    if (c->follows) return ST_OK;
    if (!lease) return lease_none(c);
    if (atomic_load(&page->lease) != lease) return lease_lost(c);
    char *absolute = realpath(folder, NULL); // the server's working directory is another
    if (!absolute)
        return status_fail(ST_NOT_FOUND, "snapshot folder %s: %s", folder, strerror(errno));
    enum status st = ST_OK;
    size_t len = strlen(absolute);
    if (len >= CONTROL_PATH_BYTES) {
        st =
            status_fail(ST_INVALID, "snapshot folder %s: its path has %zu bytes, the page takes %d",
                        absolute, len, CONTROL_PATH_BYTES - 1);
    } else {
        set_snapshot(page, absolute, len);
    }
    free(absolute);
    return st;
}
