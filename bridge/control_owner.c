/* control_owner.c: the owner's side of the control page: grants, what a lost writer leaves, the
 * owner's own updates. The protocol is told in control.c. The engine thread. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control_page.h"
#include "common/base/clock.h"
#include "common/base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#define DEATH_MS 60000 // for a killed writer to end; a GPU's driver takes its time

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

void control_set_heartbeat_limit(struct control *c, int ms)
{
    atomic_store(&c->page->heartbeat_limit_ms, (uint32_t)ms);
}

bool control_quiesce_requested(const struct control *c)
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

enum control_event control_grant_quiesce(struct control *c)
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

enum status control_await_followers(const struct control *c, int64_t deadline_ns)
{
    for (;;) {
        struct flock held = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1};
        if (fcntl(c->fd, F_OFD_GETLK, &held) != 0)
            return status_fail(ST_IO, "control page %s: its followers' locks: %s", c->name,
                               strerror(errno));
        if (held.l_type == F_UNLCK) return ST_OK;
        if (clock_ms_until(deadline_ns) == 0)
            return status_fail(ST_TIMEOUT, "shard %lld still has a writer",
                               (long long)held.l_start);
        clock_sleep_ms(SLICE_MS / 10);
    }
}

void control_owner_update_begin(struct control *c)
{
    // Weights that were torn stay so until the end; rewriting whole ones is no tear.
    if (!(atomic_load(&c->page->version) & 1)) atomic_store(&c->page->owner_updating, 1);
    atomic_fetch_or(&c->page->version, 1);
}

static uint64_t next_even(struct page *page)
{
    return (atomic_load(&page->version) | 1) + 1;
}

void control_owner_update_end(struct control *c)
{
    atomic_store(&c->page->version, next_even(c->page));
    atomic_store(&c->page->owner_updating, 0);
}

void control_owner_loaded(struct control *c, const char *role, const char *folder, bool chosen)
{
    struct page *page = c->page;
    struct page_role *r = find_role(page, role);
    char path[CONTROL_PATH_BYTES];
    put_folder(path, folder);
    if (chosen) {
        snprintf(page->loaded, CONTROL_PATH_BYTES, "%s", path);
        set_snapshot(page, "", 0);
    }
    for (int i = 1; !r && i < CONTROL_ROLES; i++)
        if (!page->roles[i].name[0]) r = &page->roles[i];
    if (!r) return; // the bridge file has no room for more either
    atomic_fetch_add(&page->roles_given, 1);
    atomic_thread_fence(memory_order_seq_cst); // who copies what is below reads it again
    put_origin(r, path);
    snprintf(r->name + 1, sizeof r->name - 1, "%s", role + 1);
    atomic_thread_fence(memory_order_release); // who finds the name finds what is above
    r->name[0] = role[0];
    if (r != page->roles) return;
    atomic_store(&page->noted_publishes, atomic_load(&page->publishes));
    atomic_store(&page->policy_version, next_even(page));
}

void control_owner_removed(struct control *c, const char *role)
{
    struct page_role *r = find_role(c->page, role);
    if (r) r->name[0] = 0;
}
