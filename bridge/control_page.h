/* control_page.h: the control page as it lies in memory, and the words on it. Private to control.c,
 * which tells what they mean and who changes them when, to control_owner.c and control_writer.c,
 * the two sides, and to control_page.c, which makes, opens and replaces pages. */
// SPDX-License-Identifier: Apache-2.0
#ifndef BRIDGE_CONTROL_PAGE_H
#define BRIDGE_CONTROL_PAGE_H

#include "bridge/control.h"

#include <stdatomic.h>
#include <stddef.h>

#define CONTROL_FIRST      4096 // bytes that pages of any build have: all before `roles`
#define CONTROL_BYTES      (20 * 4096)
#define HEARTBEAT_LIMIT_MS 30000 // of a writer, unless the owner sets another
#define CONTROL_PATH_BYTES 512
#define NAME_BYTES         96

enum phase { PHASE_IDLE, PHASE_REQUESTED, PHASE_GRANTED };

// What a role's weights are. Changed only while the version is odd, by whoever writes the weights,
// but for roles that the owner adds and removes: a name's first byte comes last.
struct page_role {
    char name[CONTROL_ROLE_BYTES];   // "": a free place
    _Atomic uint64_t updates;        // of writers since they were exactly origin's
    _Atomic uint64_t run_updates;    // the last of them, by `run`
    char origin[CONTROL_PATH_BYTES]; // folder that they were last exactly of
    char run[CONTROL_PATH_BYTES];    // "": not known
};

struct page {
    char magic[8];
    uint32_t format, bytes;
    char layout_hash[72];
    uint64_t owner_start; // clock ticks since boot
    int32_t owner_pid;
    uint64_t owner_namespace; // in which that pid means something

    _Alignas(64) _Atomic uint64_t version;
    _Atomic uint64_t publishes; // completed by writers
    _Atomic int64_t owner_heartbeat_ns;
    _Atomic uint32_t owner_updating; // odd because the owner itself loads or reloads: not torn
    _Atomic uint32_t ended;          // the owner left in good order

    _Alignas(64) _Atomic uint32_t phase; // futex: generation << 2 | enum phase
    _Atomic uint32_t doorbell;           // futex

    _Alignas(64) _Atomic uint64_t lease; // generation << 32 | pid
    _Atomic uint64_t identity;           // generation << 48 | start time
    _Atomic int64_t writer_heartbeat_ns;
    _Atomic uint32_t heartbeat_limit_ms; // the owner's choice

    _Alignas(64) _Atomic int64_t wait_ns; // of the last publish: request to grant
    _Atomic int64_t write_ns;             // version odd
    _Atomic int64_t pause_ns;             // grant to resume, as the engine saw it

    // Two places for the path, filled by turns (control.c).
    _Alignas(64) _Atomic uint32_t snapshot_turn; // current: snapshot[turn & 1]
    char snapshot[2][CONTROL_PATH_BYTES];

    _Alignas(64) _Atomic uint64_t noted_publishes; // that `roles` know of
    char loaded[CONTROL_PATH_BYTES];               // folder that the owner loaded by its own choice
    _Atomic uint64_t policy_version;               // that came with its last change
    _Atomic uint64_t roles_given;                  // times that a place of `roles` was filled

    _Alignas(64) struct page_role roles[CONTROL_ROLES]; // the first: the policy's
};
_Static_assert(sizeof(struct page) <= CONTROL_BYTES, "the control page has room for all roles");
_Static_assert(offsetof(struct page, roles) <= CONTROL_FIRST, "any build's page has what is first");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "atomics on a shared page must not need locks");

struct control {
    struct page *page;
    char name[NAME_BYTES];
    bool owner;
    int fd; // owner: of the page, locked until it leaves; follower: another, locked while it may
            // write
    // A test's, or NULL: called between the look at a writer that is lost and what follows from it.
    void (*on_lost_writer)(void);
    // writer
    _Atomic uint64_t lease; // what it holds; 0: none. The heartbeat thread reads it.
    int follows;            // control_follow(): of which shard; 0: it does not
    uint64_t version;       // even: what this writer found at first, or left behind last
    uint64_t next;          // version after the update under way
    int64_t odd_since_ns;
    char run[CONTROL_PATH_BYTES];     // control_set_run()
    char role[CONTROL_ROLE_BYTES];    // control_set_role(); "": the policy
    char writing[CONTROL_PATH_BYTES]; // folder that the update under way loads; "": none
    bool unchanged;                   // it only moves the version
};

// ---- words of the page (control.c) --------------------------------------------------------------

#define SLICE_MS 100 // between looks at whether the peer lives

uint32_t lease_generation(uint64_t lease);
pid_t lease_pid(uint64_t lease);
uint64_t lease_next(uint64_t lease, pid_t pid); // the lease after it, of that process; 0: nobody's
uint32_t phase_word(uint64_t lease, enum phase phase);
enum phase phase_of(uint32_t word);
// Sleeps while *word is `value`, at most until the deadline; may return early.
void futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t deadline_ns);
void futex_wake(_Atomic uint32_t *word); // everybody who sleeps on it
// Changes the phase if it is what the caller thinks, and wakes whoever waits for that.
bool phase_move(struct page *page, uint32_t from, uint32_t to);
// Makes the phase IDLE of that lease, whatever it was, unless a newer lease has come.
void phase_reset(struct page *page, uint64_t lease);

enum life { LIFE_NOBODY, LIFE_ALIVE, LIFE_STILL, LIFE_DEAD };
enum life writer_life(struct page *page, uint64_t lease);

// What the weights are.
void set_snapshot(struct page *page, const char *folder, size_t len);
void put_folder(char to[CONTROL_PATH_BYTES], const char *folder);
struct page_role *find_role(struct page *page, const char *name); // NULL: none
void put_origin(struct page_role *role, const char *folder);

#endif
