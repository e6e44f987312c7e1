/* control.c: the control page, through which the owner of the weights (the daemon's engine thread)
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
 *   bell     A futex that counts rings. The engine, idle or not, waits on nothing else.
 *   beats    CLOCK_MONOTONIC of the last sign of life of each side.
 *
 * What the weights are (`loaded`, `origin`, `run` and the counts of `publishes` beside them) is
 * plain text, written only while the version is odd by whoever writes the weights: a reader copies
 * it between two looks at one even version. A writer counts its update before the version becomes
 * even: if it dies in between, the weights are torn, and restoring them begins a new count.
 *
 * WRITER (trainer)                               READER (engine thread, at a step boundary)
 *   1 phase IDLE -> REQUESTED, ring the bell
 *                                                2 sees REQUESTED; waits for its device; notes the
 *                                                  version v; phase REQUESTED -> GRANTED, wakes
 *   3 checks that it is the lease's generation;
 *     version v -> v + 1, where v is what it
 *     left behind
 *   4 writes the weights in place, waits for
 *     its device
 *   5 version v + 1 -> v + 2
 *   6 phase GRANTED -> IDLE, wakes, rings        7 goes on; the version tells it what happened
 *
 * Both sides sleep on `phase` in slices of 100 ms and look between them whether the other still
 * lives, so 1 -> 2 -> 6 -> 7 cost a futex wake each and a death costs at most 100 ms. Nobody
 * samples from weights under step 4, because the engine is inside control_grant_quiet() then:
 * there is no seqlock retry on the reading side, and the version's parity is only for those who
 * come later.
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
 * says ST_PEER_GONE, and the next daemon replaces the page.
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
 * thread; control_heartbeat(), control_ring(), control_version() and control_facts() may come from
 * any. */
#include "bridge/control_page.h"
#include "bridge/process.h"
#include "common/base/clock.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLICE_MS 100   // between looks at whether the peer lives
#define DEATH_MS 60000 // for a killed writer to end; a GPU's driver takes its time

// ---- words of the page --------------------------------------------------------------------------

static uint32_t lease_generation(uint64_t lease)
{
    return (uint32_t)(lease >> 32);
}
static pid_t lease_pid(uint64_t lease)
{
    return (pid_t)(lease & 0xffffffffu);
}
static uint64_t lease_next(uint64_t lease, pid_t pid)
{
    return (uint64_t)(lease_generation(lease) + 1) << 32 | (uint32_t)pid;
}
static uint32_t phase_word(uint64_t lease, enum phase phase)
{
    return lease_generation(lease) << 2 | phase;
}
static enum phase phase_of(uint32_t word)
{
    return (enum phase)(word & 3);
}

// Sleeps while *word is `value`, at most until the deadline; may return early.
static void futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t deadline_ns)
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

// Changes the phase if it is what the caller thinks, and wakes whoever waits for that.
static bool phase_move(struct page *page, uint32_t from, uint32_t to)
{
    if (!atomic_compare_exchange_strong(&page->phase, &from, to)) return false;
    futex_wake(&page->phase);
    return true;
}
// Makes the phase IDLE of that lease, whatever it was, unless a newer lease has come: the phase is
// read before the lease is looked at, so a caller that was held up here changes nothing any more.
static void phase_reset(struct page *page, uint64_t lease)
{
    uint32_t now;
    do {
        now = atomic_load(&page->phase);
        if (atomic_load(&page->lease) != lease) return;
    } while (!phase_move(page, now, phase_word(lease, PHASE_IDLE)));
}

// ---- the writer's life --------------------------------------------------------------------------

enum life { LIFE_NOBODY, LIFE_ALIVE, LIFE_STILL, LIFE_DEAD };

static enum life writer_life(struct page *page, uint64_t lease)
{
    pid_t pid = lease_pid(lease);
    if (pid == 0) return LIFE_NOBODY;
    uint64_t identity = atomic_load(&page->identity);
    if (identity >> 48 != (lease_generation(lease) & 0xffff)) // took the lease, has not signed yet
        return process_start_time(pid) ? LIFE_ALIVE : LIFE_DEAD;
    if (!process_alive(pid, identity & 0xffffffffffffull)) return LIFE_DEAD;
    int64_t silent_ns = clock_now_ns() - atomic_load(&page->writer_beat_ns);
    return silent_ns > atomic_load(&page->heartbeat_limit_ms) * NS_PER_MS ? LIFE_STILL : LIFE_ALIVE;
}

// Ends that lease. A holder that may live is fenced off first: the version moves on from `seen`,
// and keeps its parity. False if that had changed, or a dead holder's lease is another's by now.
static bool revoke_lease(struct page *page, uint64_t lease, bool may_live, uint64_t seen)
{
    if (may_live && !atomic_compare_exchange_strong(&page->version, &seen, seen + 2)) return false;
    uint64_t next = lease_next(lease, 0);
    // A fenced holder may have woken and released the lease itself, which comes to the same.
    if (!atomic_compare_exchange_strong(&page->lease, &lease, next)) return may_live;
    phase_reset(page, next);
    return true;
}

// Kills the holder of that lease, which has signed it, and waits for its end.
static enum status kill_writer(struct page *page, uint64_t lease)
{
    uint64_t start = atomic_load(&page->identity) & 0xffffffffffffull;
    return status_context(process_kill(lease_pid(lease), start, DEATH_MS),
                          "the trainer stands still in the middle of an update");
}

// ---- owner's side -------------------------------------------------------------------------------

void control_heartbeat(struct control *c)
{
    struct page *page = c->page;
    if (c->owner) {
        atomic_store(&page->owner_beat_ns, clock_now_ns());
        return;
    }
    uint64_t lease = atomic_load(&c->lease);
    if (lease && atomic_load(&page->lease) == lease)
        atomic_store(&page->writer_beat_ns, clock_now_ns());
}

void control_set_heartbeat_limit(struct control *c, int ms)
{
    atomic_store(&c->page->heartbeat_limit_ms, (uint32_t)ms);
}

uint32_t control_bell(const struct control *c)
{
    return atomic_load(&c->page->bell);
}

void control_ring(struct control *c)
{
    atomic_fetch_add(&c->page->bell, 1);
    futex_wake(&c->page->bell);
}

void control_wait(struct control *c, uint32_t seen, int timeout_ms)
{
    int64_t deadline = clock_deadline_ns(timeout_ms);
    while (atomic_load(&c->page->bell) == seen && clock_now_ns() < deadline)
        futex_wait(&c->page->bell, seen, deadline);
}

bool control_quiet_requested(const struct control *c)
{
    return phase_of(atomic_load(&c->page->phase)) == PHASE_REQUESTED;
}

// While a writer holds the grant: what to do if it does not live as it should. CONTROL_NONE: look
// again. `before` is the version of the grant.
static enum control_event look_after(struct control *c, uint64_t lease, uint64_t before)
{
    struct page *page = c->page;
    enum life life = writer_life(page, lease);
    if (life == LIFE_ALIVE) return CONTROL_NONE;
    uint64_t now = atomic_load(&page->version);
    if (c->on_lost_writer) c->on_lost_writer();
    if (!(now & 1) && now != before) {
        // It ended its update and then died or stopped before it let go. The update is news of its
        // own; the lease is the next control_check_writer()'s.
        phase_move(page, phase_word(lease, PHASE_GRANTED), phase_word(lease, PHASE_IDLE));
        return CONTROL_UPDATED;
    }
    if (life == LIFE_STILL && (now & 1)) // and then look again: it may have reached its end
        return kill_writer(page, lease) == ST_OK ? CONTROL_NONE : CONTROL_HELD;
    if (!revoke_lease(page, lease, life == LIFE_STILL, now)) return CONTROL_NONE;
    return now & 1 ? CONTROL_TORN : CONTROL_WRITER_GONE;
}

enum control_event control_grant_quiet(struct control *c)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&page->lease), before = atomic_load(&page->version);
    uint32_t granted = phase_word(lease, PHASE_GRANTED);
    enum control_event event = CONTROL_NONE;
    if (before & 1) return CONTROL_NONE; // torn, or the owner's own update: not now
    int64_t start = clock_now_ns();      // before the wake, which may hand this core to the writer
    if (!phase_move(page, phase_word(lease, PHASE_REQUESTED), granted)) return CONTROL_NONE;
    while (event == CONTROL_NONE && atomic_load(&page->phase) == granted) {
        futex_wait(&page->phase, granted, clock_deadline_ns(SLICE_MS));
        control_heartbeat(c);
        if (atomic_load(&page->phase) == granted) event = look_after(c, lease, before);
    }
    atomic_store(&page->pause_ns, clock_now_ns() - start);
    if (event != CONTROL_NONE) return event;
    uint64_t after = atomic_load(&page->version);
    if (after & 1) { // the writer's update failed and it said so
        revoke_lease(page, lease, true, after);
        return CONTROL_TORN;
    }
    return after == before ? CONTROL_NONE : CONTROL_UPDATED;
}

enum control_event control_check_writer(struct control *c)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&page->lease), version = atomic_load(&page->version);
    enum life life = writer_life(page, lease);
    if (life == LIFE_NOBODY || life == LIFE_ALIVE) return CONTROL_NONE;
    // Outside of a grant an odd version can only be the owner's own, and no writer can begin.
    if (!revoke_lease(page, lease, life == LIFE_STILL, version)) return CONTROL_NONE;
    return CONTROL_WRITER_GONE;
}

void control_owner_update_begin(struct control *c)
{
    // Weights that were torn stay so until the end; rewriting whole ones is no tear.
    if (!(atomic_load(&c->page->version) & 1)) atomic_store(&c->page->owner_updating, 1);
    atomic_fetch_or(&c->page->version, 1);
}

void control_owner_update_end(struct control *c)
{
    uint64_t version = atomic_load(&c->page->version);
    atomic_store(&c->page->version, (version | 1) + 1);
    atomic_store(&c->page->owner_updating, 0);
}

// Two places for the path: the one that is not current is filled, then takes the turn, so a crash
// in between leaves the older path whole.
static void set_snapshot(struct page *page, const char *folder, size_t len)
{
    uint32_t turn = atomic_load(&page->snapshot_turn) + 1;
    memcpy(page->snapshot[turn & 1], folder, len);
    page->snapshot[turn & 1][len] = 0;
    atomic_store(&page->snapshot_turn, turn);
}

void control_forget_snapshot(struct control *c)
{
    set_snapshot(c->page, "", 0);
}

// Absolute and without links, which may name another folder tomorrow; what is no folder stays.
static void put_folder(char to[CONTROL_PATH_BYTES], const char *folder)
{
    char *real = realpath(folder, NULL);
    bool fits = real && strlen(real) < CONTROL_PATH_BYTES;
    snprintf(to, CONTROL_PATH_BYTES, "%s", fits ? real : folder);
    free(real);
}

static void put_origin(struct page *page, const char *folder, uint64_t publishes)
{
    snprintf(page->origin, CONTROL_PATH_BYTES, "%s", folder);
    page->run[0] = 0;
    atomic_store(&page->origin_publishes, publishes);
    atomic_store(&page->run_publishes, publishes);
    atomic_store(&page->noted_publishes, publishes);
}

void control_owner_loaded(struct control *c, const char *folder, bool chosen)
{
    char path[CONTROL_PATH_BYTES];
    put_folder(path, folder);
    if (chosen) snprintf(c->page->loaded, CONTROL_PATH_BYTES, "%s", path);
    put_origin(c->page, path, atomic_load(&c->page->publishes));
}

// ---- writer's side ------------------------------------------------------------------------------

static enum status lease_lost(const struct control *c)
{
    return status_fail(
        ST_BUSY,
        "control page %s: this process (pid %d) no longer holds the writer's lease: it "
        "gave no sign of life for %.1f s, or its last update was cut off, and the daemon "
        "took it back; start again from the last checkpoint",
        c->name, (int)getpid(), (double)atomic_load(&c->page->heartbeat_limit_ms) / 1000);
}

static enum status lease_none(const struct control *c)
{
    return status_fail(ST_INVALID,
                       "control page %s: the writer's lease was not taken; nothing may be written",
                       c->name);
}

enum status control_lease_take(struct control *c)
{
    struct page *page = c->page;
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
                (int)lease_pid(lease), clock_ms_since(atomic_load(&page->writer_beat_ns)) / 1000);
        uint64_t version = atomic_load(&page->version);
        if (version & 1)
            return status_fail(
                ST_TORN,
                "control page %s: version %llu is odd: the daemon (pid %d) has yet to "
                "%s the weights; try again when its /health says ok",
                c->name, (unsigned long long)version, (int)page->owner_pid,
                version == 1 ? "load" : "restore");
        uint64_t mine = lease_next(lease, getpid()), start = process_start_time(getpid());
        if (!start)
            return status_fail(ST_IO,
                               "/proc/%d/stat cannot be read, by which the daemon knows its "
                               "trainer: is /proc mounted, are file descriptors left?",
                               (int)getpid());
        if (!atomic_compare_exchange_strong(&page->lease, &lease, mine)) continue;
        atomic_store(&page->writer_beat_ns, clock_now_ns());
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
    if (!lease) return;
    // In this order: a phase that is let go wakes an engine, which must still find the lease's
    // holder.
    control_resume(c);
    uint32_t idle = phase_word(lease, PHASE_IDLE);
    phase_move(page, phase_word(lease, PHASE_REQUESTED), idle);
    phase_move(page, phase_word(lease, PHASE_GRANTED), idle);
    uint64_t next = lease_next(lease, 0);
    atomic_compare_exchange_strong(&page->lease, &lease, next);
    control_ring(c);
}

enum status control_quiet(struct control *c, int64_t deadline_ns)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&c->lease);
    if (!lease) return lease_none(c);
    uint32_t idle = phase_word(lease, PHASE_IDLE), asked = phase_word(lease, PHASE_REQUESTED),
             granted = phase_word(lease, PHASE_GRANTED);
    int64_t start = clock_now_ns();
    enum status st;
    if (!phase_move(page, idle, asked)) {
        if (atomic_load(&page->lease) != lease) return lease_lost(c);
        return status_fail(ST_INVALID, "control page %s: quiet was asked for twice", c->name);
    }
    control_ring(c);
    for (;;) {
        uint32_t now = atomic_load(&page->phase);
        if (now == granted) break;
        if (now != asked) return lease_lost(c);
        if (clock_now_ns() >= deadline_ns) {
            if (!phase_move(page, asked, idle)) continue; // granted at the last moment, or lost
            return status_fail(
                ST_TIMEOUT,
                "the daemon (pid %d) did not pause for an update within %.1f s: it may "
                "be paused (POST /bridge/resume), loading, or stuck; see its /health",
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
                           "weight version is %llu, this writer left %llu: the daemon rewrote the "
                           "weights meanwhile (POST /reload), so optimizer and weights no longer "
                           "belong together; start again from the last checkpoint",
                           (unsigned long long)version, (unsigned long long)c->version);
    }
    return ST_OK;
}

bool control_quiet_cancel(struct control *c)
{
    uint64_t lease = atomic_load(&c->lease);
    return lease &&
           phase_move(c->page, phase_word(lease, PHASE_REQUESTED), phase_word(lease, PHASE_IDLE));
}

enum status control_write_begin(struct control *c)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&c->lease);
    if (!lease) return lease_none(c);
    uint32_t granted = phase_word(lease, PHASE_GRANTED);
    if (atomic_load(&page->phase) != granted) {
        if (atomic_load(&page->lease) != lease) return lease_lost(c);
        return status_fail(ST_INVALID, "control page %s: an update without the engine's quiet",
                           c->name);
    }
    uint64_t even = c->version;
    // The owner revokes the lease by moving on from the same version: only one of the two can.
    if (!atomic_compare_exchange_strong(&page->version, &even, even + 1)) return lease_lost(c);
    c->odd_since_ns = clock_now_ns();
    c->writing[0] = 0;
    return ST_OK;
}

void control_set_run(struct control *c, const char *folder)
{
    put_folder(c->run, folder);
}

void control_set_origin(struct control *c, const char *folder)
{
    put_folder(c->writing, folder);
}

// Counts the update and says what the weights are after it: see the head of the file.
static void note_update(struct control *c)
{
    struct page *page = c->page;
    uint64_t publishes = atomic_load(&page->publishes);
    if (c->writing[0]) {
        put_origin(page, c->writing, publishes + 1);
    } else if (strncmp(page->run, c->run, CONTROL_PATH_BYTES) != 0 ||
               atomic_load(&page->noted_publishes) != publishes) {
        snprintf(page->run, CONTROL_PATH_BYTES, "%s", c->run);
        atomic_store(&page->run_publishes, publishes);
    }
    atomic_store(&page->noted_publishes, publishes + 1);
    atomic_store(&page->publishes, publishes + 1);
}

enum status control_write_end(struct control *c)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&c->lease);
    if (!lease) return lease_none(c);
    int64_t now = clock_now_ns();
    uint64_t odd = c->version + 1;
    // Before the version: who sees it even finds the figures of this update.
    if (atomic_load(&page->lease) != lease || atomic_load(&page->version) != odd)
        return lease_lost(c);
    atomic_store(&page->write_ns, now - c->odd_since_ns);
    note_update(c);
    if (!atomic_compare_exchange_strong(&page->version, &odd, c->version + 2) ||
        atomic_load(&page->lease) != lease)
        return lease_lost(c);
    c->version += 2;
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
    control_ring(c);
}

enum status control_set_snapshot(struct control *c, const char *folder)
{
    struct page *page = c->page;
    uint64_t lease = atomic_load(&c->lease);
    if (!lease) return lease_none(c);
    if (atomic_load(&page->lease) != lease) return lease_lost(c);
    char *absolute = realpath(folder, NULL); // the daemon's working directory is another
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

// ---- both ---------------------------------------------------------------------------------------

uint64_t control_version(const struct control *c)
{
    return atomic_load(&c->page->version);
}

enum status control_owner_alive(const struct control *c)
{
    struct page *page = c->page;
    if (atomic_load(&page->ended))
        return status_fail(ST_PEER_GONE,
                           "the daemon (pid %d) has ended; start cw-infer-server again, then go on "
                           "from the last checkpoint",
                           (int)page->owner_pid);
    if (!process_alive(page->owner_pid, page->owner_start))
        return status_fail(ST_PEER_GONE,
                           "the daemon (pid %d) died; start cw-infer-server again, then go on from "
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

// What the weights are, as the page has it at an even version; else nothing.
static void copy_origin(const struct page *page, struct control_facts *f)
{
    if (f->version & 1) return;
    f->updates = f->publishes - atomic_load(&page->origin_publishes);
    f->run_updates = f->publishes - atomic_load(&page->run_publishes);
    snprintf(f->loaded, sizeof f->loaded, "%.*s", CONTROL_PATH_BYTES - 1, page->loaded);
    snprintf(f->origin, sizeof f->origin, "%.*s", CONTROL_PATH_BYTES - 1, page->origin);
    snprintf(f->run, sizeof f->run, "%.*s", CONTROL_PATH_BYTES - 1, page->run);
    uint64_t noted = atomic_load(&page->noted_publishes);
    if (noted != f->publishes) { // a writer that says nothing here made the last ones
        f->run[0] = 0;
        f->run_updates = f->publishes - noted;
    }
    atomic_thread_fence(memory_order_seq_cst);
}

void control_facts(const struct control *c, struct control_facts *ret)
{
    struct page *page = c->page;
    struct control_facts f;
    uint64_t lease;
    uint32_t phase;
    do { // until nothing moved while it was copied
        memset(&f, 0, sizeof f);
        lease = atomic_load(&page->lease);
        phase = atomic_load(&page->phase);
        f.version = atomic_load(&page->version);
        f.publishes = atomic_load(&page->publishes);
        f.last_wait_ms = (double)atomic_load(&page->wait_ns) / NS_PER_MS;
        f.last_write_ms = (double)atomic_load(&page->write_ns) / NS_PER_MS;
        f.last_pause_ms = (double)atomic_load(&page->pause_ns) / NS_PER_MS;
        f.owner_heartbeat_age_ms = clock_ms_since(atomic_load(&page->owner_beat_ns));
        f.writer_heartbeat_age_ms = clock_ms_since(atomic_load(&page->writer_beat_ns));
        copy_origin(page, &f);
    } while (lease != atomic_load(&page->lease) || phase != atomic_load(&page->phase) ||
             f.version != atomic_load(&page->version));
    f.owner_pid = page->owner_pid;
    f.ended = atomic_load(&page->ended);
    f.owner_alive = !f.ended && process_alive(page->owner_pid, page->owner_start);
    f.writer_pid = lease_pid(lease);
    f.writer_alive = writer_life(page, lease) == LIFE_ALIVE;
    if (!f.writer_pid) f.writer_heartbeat_age_ms = 0;
    f.quiet_requested = phase_of(phase) == PHASE_REQUESTED;
    f.quiet_granted = phase_of(phase) == PHASE_GRANTED;
    f.torn = (f.version & 1) && !(f.quiet_granted && f.writer_alive) &&
             !atomic_load(&page->owner_updating);
    snprintf(f.layout_hash, sizeof f.layout_hash, "%.64s", page->layout_hash);
    control_snapshot(c, f.snapshot, sizeof f.snapshot);
    *ret = f;
}
