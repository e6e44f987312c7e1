/* control.c: the control page, through which the owner of the weights (the server's engine thread)
 * and their one writer (the trainer) keep out of each other's way.
 *
 * LAYOUT. One page of POSIX shared memory (control_page.h), the same for every backend: the
 * weights may lie on a GPU, the page always lies where two CPUs can do atomic operations on it.
 * What identifies the page (magic, format, layout hash, owner) is written before the page gets its
 * name and never changes. Everything else is an atomic word:
 *
 *   version  Even: the weights are whole. Odd: they are being written. A page is born with 1
 *            (nothing loaded yet) and reaches 2 when the first load ends.
 *   lease    Generation in the upper half, the writer's pid in the lower; pid 0: nobody. Each
 *            taking and each revoking makes a new generation, so a holder can tell that it lost
 *            the lease even if the pid came back. `identity` holds the writer's start time under
 *            16 bits of the generation: while they differ, the new holder has not signed yet, and
 *            its pid alone counts.
 *   phase    The hand-shake, and a futex: IDLE, REQUESTED or GRANTED in the lower two bits, the
 *            lease's generation above. Only compare-and-swap changes it, so a writer of an older
 *            generation cannot move it.
 *   doorbell A futex that counts notifications. The engine, idle or not, waits on nothing else.
 *   heartbeats CLOCK_MONOTONIC of the last sign of life of each side.
 *
 * What the weights of each role are (`loaded`, and of `roles` origin, run and counts) is plain
 * text, written only while the version is odd by whoever writes the weights: a reader copies it
 * between two looks at one even version. A role's name comes and goes with the role. A writer
 * counts its update before the version becomes even: if it dies in between, the weights are torn,
 * and restoring them begins a new count.
 *
 * WRITER (trainer)                               READER (engine thread, at a step boundary)
 *   1 phase IDLE -> REQUESTED, notify
 *                                                2 sees REQUESTED; waits for its device; notes the
 *                                                  version v; phase REQUESTED -> GRANTED, wakes
 *   3 checks that it is the lease's generation;
 *     version v -> v + 1, where v is what it
 *     left behind
 *   4 writes the weights in place, waits for
 *     its device
 *   5 version v + 1 -> v + 2, or to what control_set_version() said
 *   6 phase GRANTED -> IDLE, wakes, notifies     7 goes on; the version tells it what happened
 *
 * Both sides sleep on `phase` in slices of 100 ms and look between them whether the other still
 * lives, so 1 -> 2 -> 6 -> 7 cost a futex wake each and a death costs at most 100 ms. Nobody
 * samples from weights under step 4, because the engine is inside control_grant_quiesce() then:
 * there is no seqlock retry on the reading side, and the version's parity is only for those who
 * come later.
 *
 * FOLLOWERS. Weights in shards have one page, and each shard a writer: that of shard 0 holds the
 * lease and moves the version for all, the others write between the same two moves, having met it
 * (attach.c). Each of them holds a lock on the page's byte of its shard's number, of an open file
 * of its own, which the kernel lets go with the process: so a shard has one writer, and before the
 * owner restores what a dead leader left it waits until these have ended too.
 *
 * BARRIERS. All operations on version, lease and phase are sequentially consistent. Step 5 is
 * therefore a release of every CPU store of step 4, and 7's load of phase acquires it; on a GPU
 * the writer waits for its stream before 5, and the engine launches after 7. Step 3 must be
 * ordered against step 4 in the same way: odd is visible before the first weight changes.
 *
 * WHAT A CRASH OF THE WRITER LEAVES
 *   before 1   a lease without a process. control_check_writer() revokes it; nothing was lost.
 *   1 .. 2     a request. The engine may grant it; within 100 ms it finds the writer dead, the
 *              version still v: revokes the lease and goes on (CONTROL_WRITER_GONE).
 *   2 .. 3     the same.
 *   3 .. 5     an odd version: the weights are torn. The engine says so (CONTROL_TORN), rewrites
 *              them from the last good snapshot, and ends with the next even version.
 *   5 .. 6     version v + 2 and GRANTED: whole new weights. The engine reports CONTROL_UPDATED,
 *              goes on, and the next control_check_writer() revokes the lease.
 *   after 6    as before 1.
 * A crash of the owner leaves a page with a dead owner's pid: every call of the writer that waits
 * says ST_PEER_GONE, and the next server replaces the page.
 *
 * A writer whose update failed lets go (6) with the version odd, which says that it has stopped
 * writing, and is treated as in 3 .. 5. It loses the lease, and is not killed.
 *
 * A WRITER THAT LIVES BUT STANDS STILL (stopped, or hung so that its heartbeat ends) for 30 s
 * loses the lease as if it had died. But it may wake up at any instruction, between any two of the
 * owner's, so whatever the owner saw of it may be no longer true when the owner acts. Two rules
 * keep it from writing under an even version:
 *
 *   Version v, even: the owner moves it to v + 2 by compare-and-swap before it touches the lease.
 *   Step 3 is a compare-and-swap from the same v, and exactly one of the two succeeds. If the
 *   owner's does, the writer can neither begin nor end an update any more, wherever it wakes: the
 *   lease is revoked. If the writer's does, it has woken and begun: the owner looks again, and
 *   finds a living writer, or one of the other rule. Nothing that the writer reads after step 3
 *   could take the place of this: the weights may be written from its next instruction on.
 *
 *   Version odd: nothing on the page holds back the stores of step 4. The writer is killed, and
 *   its end is waited for: all its threads have ended then, and a GPU's driver has closed its
 *   context. Only after that is the version read again (it may have reached step 5) and the lease
 *   revoked; what it leaves is a dead writer's. Where it cannot be killed, or has not ended after
 *   a minute, the weights cannot be restored under it: CONTROL_HELD, and the owner must give them
 *   up.
 *
 * A dead writer needs neither rule: its last instruction was before the owner's look.
 *
 * Threads: the owner's calls belong to the engine thread, the writer's to the trainer's main
 * thread; control_heartbeat(), control_notify(), control_version() and control_info() may come
 * from any. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control_page.h"
#include "common/base/clock.h"
#include "common/base/process.h"

#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// ---- words of the page --------------------------------------------------------------------------

uint32_t lease_generation(uint64_t lease)
{
    return (uint32_t)(lease >> 32);
}
pid_t lease_pid(uint64_t lease)
{
    return (pid_t)(lease & 0xffffffffu);
}
uint64_t lease_next(uint64_t lease, pid_t pid)
{
    return (uint64_t)(lease_generation(lease) + 1) << 32 | (uint32_t)pid;
}
uint32_t phase_word(uint64_t lease, enum phase phase)
{
    return lease_generation(lease) << 2 | phase;
}
enum phase phase_of(uint32_t word)
{
    return (enum phase)(word & 3);
}

void futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t deadline_ns)
{
    int64_t left = deadline_ns - clock_now_ns();
    if (left <= 0) return;
    struct timespec ts = {.tv_sec = left / NS_PER_S, .tv_nsec = left % NS_PER_S};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &ts, NULL, 0);
}
void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

bool phase_move(struct page *page, uint32_t from, uint32_t to)
{
    if (!atomic_compare_exchange_strong(&page->phase, &from, to)) return false;
    futex_wake(&page->phase);
    return true;
}
// Makes the phase IDLE of that lease, whatever it was, unless a newer lease has come: the phase is
// read before the lease is looked at, so a caller that was held up here changes nothing any more.
void phase_reset(struct page *page, uint64_t lease)
{
    uint32_t now;
    do {
        now = atomic_load(&page->phase);
        if (atomic_load(&page->lease) != lease) return;
    } while (!phase_move(page, now, phase_word(lease, PHASE_IDLE)));
}

// ---- signs of life -----------------------------------------------------------------------------

enum life writer_life(struct page *page, uint64_t lease)
{
    pid_t pid = lease_pid(lease);
    if (pid == 0) return LIFE_NOBODY;
    uint64_t identity = atomic_load(&page->identity);
    if (identity >> 48 != (lease_generation(lease) & 0xffff)) // took the lease, has not signed yet
        return process_start_time(pid) ? LIFE_ALIVE : LIFE_DEAD;
    if (!process_alive(pid, identity & 0xffffffffffffull)) return LIFE_DEAD;
    int64_t silent_ns = clock_now_ns() - atomic_load(&page->writer_heartbeat_ns);
    return silent_ns > atomic_load(&page->heartbeat_limit_ms) * NS_PER_MS ? LIFE_STILL : LIFE_ALIVE;
}

void control_heartbeat(struct control *c)
{
    struct page *page = c->page;
    if (c->owner) {
        atomic_store(&page->owner_heartbeat_ns, clock_now_ns());
        return;
    }
    uint64_t lease = atomic_load(&c->lease);
    if (lease && atomic_load(&page->lease) == lease)
        atomic_store(&page->writer_heartbeat_ns, clock_now_ns());
}

uint32_t control_doorbell(const struct control *c)
{
    return atomic_load(&c->page->doorbell);
}

void control_notify(struct control *c)
{
    atomic_fetch_add(&c->page->doorbell, 1);
    futex_wake(&c->page->doorbell);
}

void control_wait(struct control *c, uint32_t seen, int timeout_ms)
{
    int64_t deadline = clock_deadline_ns(timeout_ms);
    while (atomic_load(&c->page->doorbell) == seen && clock_now_ns() < deadline)
        futex_wait(&c->page->doorbell, seen, deadline);
}

// ---- what the weights are ----------------------------------------------------------------------

// Two places for the path: the one that is not current is filled, then takes the turn, so a crash
// in between leaves the older path whole.
void set_snapshot(struct page *page, const char *folder, size_t len)
{
    uint32_t turn = atomic_load(&page->snapshot_turn) + 1;
    memcpy(page->snapshot[turn & 1], folder, len);
    page->snapshot[turn & 1][len] = 0;
    atomic_store(&page->snapshot_turn, turn);
}

// Absolute and without links, which may name another folder tomorrow; what is no folder stays.
void put_folder(char to[CONTROL_PATH_BYTES], const char *folder)
{
    char *real = realpath(folder, NULL);
    bool fits = real && strlen(real) < CONTROL_PATH_BYTES;
    snprintf(to, CONTROL_PATH_BYTES, "%s", fits ? real : folder);
    free(real);
}

struct page_role *find_role(struct page *page, const char *name)
{
    for (struct page_role *r = page->roles; r < page->roles + CONTROL_ROLES; r++)
        if (name[0] && strncmp(r->name, name, CONTROL_ROLE_BYTES) == 0) return r;
    return NULL;
}

void put_origin(struct page_role *role, const char *folder)
{
    snprintf(role->origin, CONTROL_PATH_BYTES, "%s", folder);
    role->run[0] = 0;
    atomic_store(&role->updates, 0);
    atomic_store(&role->run_updates, 0);
}

// ---- what both sides read ----------------------------------------------------------------------

uint64_t control_version(const struct control *c)
{
    return atomic_load(&c->page->version);
}

enum status control_owner_alive(const struct control *c)
{
    struct page *page = c->page;
    if (atomic_load(&page->ended))
        return status_fail(ST_PEER_GONE,
                           "the server (pid %d) has ended; start cw-infer-server again, then go on "
                           "from the last checkpoint",
                           (int)page->owner_pid);
    if (!process_alive(page->owner_pid, page->owner_start))
        return status_fail(ST_PEER_GONE,
                           "the server (pid %d) died; start cw-infer-server again, then go on from "
                           "the last checkpoint",
                           (int)page->owner_pid);
    return ST_OK;
}

void control_snapshot(const struct control *c, char *ret, size_t size)
{
    const struct page *page = c->page;
    char folder[CONTROL_PATH_BYTES];
    uint32_t turn;
    do { // a second change during the copy would be into the place that is read
        turn = atomic_load(&page->snapshot_turn);
        memcpy(folder, page->snapshot[turn & 1], CONTROL_PATH_BYTES);
        atomic_thread_fence(memory_order_seq_cst);
    } while (atomic_load(&page->snapshot_turn) != turn);
    folder[CONTROL_PATH_BYTES - 1] = 0;
    snprintf(ret, size, "%s", folder);
}

// What a role's weights are, as the page has it at an even version; else nothing.
static void copy_origin(const struct page *page, const struct page_role *r, struct control_info *f)
{
    if (f->version & 1) return;
    f->updates = atomic_load(&r->updates);
    f->run_updates = atomic_load(&r->run_updates);
    f->policy_version = atomic_load(&page->policy_version);
    snprintf(f->loaded, sizeof f->loaded, "%.*s", CONTROL_PATH_BYTES - 1, page->loaded);
    snprintf(f->origin, sizeof f->origin, "%.*s", CONTROL_PATH_BYTES - 1, r->origin);
    snprintf(f->run, sizeof f->run, "%.*s", CONTROL_PATH_BYTES - 1, r->run);
    const uint64_t silent = f->publishes - atomic_load(&page->noted_publishes);
    if (silent) f->policy_version = f->version; // a writer that says nothing here made the last
    if (silent && r == page->roles) {
        f->run[0] = 0;
        f->run_updates = silent;
        f->updates += silent;
    }
    atomic_thread_fence(memory_order_seq_cst);
}

void control_info(const struct control *c, struct control_info *ret)
{
    control_info_of(c, c->page->roles[0].name, ret);
}

bool control_info_of(const struct control *c, const char *role, struct control_info *ret)
{
    struct page *page = c->page;
    const struct page_role *r;
    struct control_info f;
    uint64_t lease, given;
    uint32_t phase;
    do { // until nothing moved while it was copied, and its place was not given to another
        given = atomic_load(&page->roles_given);
        if (!(r = find_role(page, role))) return false;
        memset(&f, 0, sizeof f);
        lease = atomic_load(&page->lease);
        phase = atomic_load(&page->phase);
        f.version = atomic_load(&page->version);
        f.publishes = atomic_load(&page->publishes);
        f.last_wait_ms = (double)atomic_load(&page->wait_ns) / NS_PER_MS;
        f.last_write_ms = (double)atomic_load(&page->write_ns) / NS_PER_MS;
        f.last_pause_ms = (double)atomic_load(&page->pause_ns) / NS_PER_MS;
        f.owner_heartbeat_age_ms = clock_ms_since(atomic_load(&page->owner_heartbeat_ns));
        f.writer_heartbeat_age_ms = clock_ms_since(atomic_load(&page->writer_heartbeat_ns));
        copy_origin(page, r, &f);
    } while (lease != atomic_load(&page->lease) || phase != atomic_load(&page->phase) ||
             f.version != atomic_load(&page->version) || given != atomic_load(&page->roles_given) ||
             find_role(page, role) != r);
    f.owner_pid = page->owner_pid;
    f.ended = atomic_load(&page->ended);
    f.owner_alive = !f.ended && process_alive(page->owner_pid, page->owner_start);
    f.writer_pid = lease_pid(lease);
    f.writer_alive = writer_life(page, lease) == LIFE_ALIVE;
    if (!f.writer_pid) f.writer_heartbeat_age_ms = 0;
    f.quiesce_requested = phase_of(phase) == PHASE_REQUESTED;
    f.quiesce_granted = phase_of(phase) == PHASE_GRANTED;
    f.torn = (f.version & 1) && !(f.quiesce_granted && f.writer_alive) &&
             !atomic_load(&page->owner_updating);
    snprintf(f.layout_hash, sizeof f.layout_hash, "%.64s", page->layout_hash);
    control_snapshot(c, f.snapshot, sizeof f.snapshot);
    *ret = f;
    return true;
}

void control_origin_words(const struct control_info *f, struct bytes *ret)
{
    bytes_printf(ret, "version %" PRIu64 ", ", f->version);
    if (!f->updates) {
        bytes_printf(ret, "%s%s", f->origin[0] ? "those of " : "new", f->origin);
        return;
    }
    bytes_printf(ret, "%" PRIu64 " update%s since %s", f->updates, f->updates == 1 ? "" : "s",
                 f->origin[0] ? f->origin : "it was made");
    if (f->run_updates < f->updates)
        bytes_printf(ret, ", the last %" PRIu64 " of them", f->run_updates);
    if (f->run[0])
        bytes_printf(ret, " by the run %s", f->run);
    else
        bytes_puts(ret, " by a writer without a run folder");
}
