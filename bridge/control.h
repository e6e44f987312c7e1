/* control.h: the control page: one page of POSIX shared memory (both backends) through which the
 * owner of the weights (the server's engine thread) and their writer (the trainer) keep out of
 * each other's way. The layout, the reader's and writer's algorithms, and what a crash at each
 * point leaves are told above the code in control.c and in docs/internals/bridge.md.
 *
 * weight version: even = whole, odd = an update is being written. It starts at 2 once loaded. */
// SPDX-License-Identifier: Apache-2.0
#ifndef BRIDGE_CONTROL_H
#define BRIDGE_CONTROL_H

#include "bridge/control_info.h"
#include "common/base/bytes.h"
#include "common/base/process.h"
#include "common/base/status.h"
#include <stdint.h>
#include <sys/types.h>

struct control; // one process's mapping of the page

// ---- owner's side -------------------------------------------------------------------------------
// name: "/commonweight-..." ; replaces a page left by a dead owner, ST_BUSY where the owner lives.
enum status control_create(const char *name, const char *layout_hash, struct control **ret);
// Removes a page that a killed owner left under another name, or before it had one; true if it did.
// A living owner's or anything that is no page stays.
bool control_sweep(const char *name);
void control_heartbeat(struct control *c); // either side, about every 100 ms (see also below)

// The engine's doorbell: a futex word by which both processes notify it. control_wait() returns
// when that happened since `seen` was read, or at the time-out.
uint32_t control_doorbell(const struct control *c);
void control_notify(struct control *c);
void control_wait(struct control *c, uint32_t seen, int timeout_ms);

enum control_event {
    CONTROL_NONE,        // no update happened
    CONTROL_UPDATED,     // weights changed, version is even again
    CONTROL_TORN,        // the writer died or failed while the version was odd: it writes no more
    CONTROL_WRITER_GONE, // it was lost while the version was even: lease revoked, nothing else lost
    CONTROL_HELD // it stands still while the version is odd and cannot be ended: the weights
                 // must be given up (status_message() says why)
};
// After any event but CONTROL_NONE the owner reads control_version() again. A writer that lives but
// has given no heartbeat for 30 s is treated as dead: revoking its lease moves an even version on
// by two; at an odd one it is killed first.
void control_set_heartbeat_limit(struct control *c, int ms); // instead of the 30 s
bool control_quiesce_requested(const struct control *c);
// At a step boundary, with no work in flight on the device: acknowledges the request, waits until
// the writer resumes (its death is noticed within 100 ms), and says what happened.
enum control_event control_grant_quiesce(struct control *c);
// Notices a lost writer outside of an update; cheap enough for every 100 ms.
enum control_event control_check_writer(struct control *c);
// Waits until no process has the place of a shard's follower (control_follow()), which may be in an
// update that its leader did not end. ST_TIMEOUT past the deadline.
enum status control_await_followers(const struct control *c, int64_t deadline_ns);
// After the owner rewrote torn weights, or reloaded: next even version, no writer.
void control_owner_update_begin(struct control *c); // version becomes odd (if it is not)
void control_owner_update_end(struct control *c);   // next even version
// Between the two calls above, when no writer can take the lease: the weights of `role` are now
// exactly those of `folder`. chosen: by the owner's start or a reload, not by a restore; `loaded`
// is then that folder too, and what writers' snapshots hold is no longer what to go back to. At any
// step boundary: the same of an adapter that is new ("": made, not loaded), and that one is gone.
void control_owner_loaded(struct control *c, const char *role, const char *folder, bool chosen);
void control_owner_removed(struct control *c, const char *role);
void control_end(
    struct control *c); // owner leaves: page marked ended, name unlinked; then control_free

// ---- writer's side ------------------------------------------------------------------------------
// ST_NOT_FOUND, ST_MISMATCH (magic, format, layout), ST_PEER_GONE (owner dead) by name.
enum status control_open(const char *name, const char *layout_hash, struct control **ret);
// One writer at a time: ST_BUSY names the living one's pid. A dead writer's lease is taken over;
// ST_TORN while the weights are torn. Starts nothing: the caller's heartbeat thread is in attach.h.
// The calls below are ST_INVALID without the lease and ST_BUSY once it was lost.
enum status control_lease_take(struct control *c);
void control_lease_release(struct control *c);
// From here on another process holds the lease for this one too, which writes other memory in the
// same updates (attach.h, a shard from 1 on): all of these calls then leave the page as it is, and
// succeed. control_lease_take() takes that shard's place, which one process has: ST_BUSY.
void control_follow(struct control *c, int shard);
// Request and wait for the grant. ST_TIMEOUT past the deadline, ST_PEER_GONE where the owner died,
// ST_MISMATCH where the owner rewrote the weights since this writer took the lease or last ended an
// update. On failure nothing is left to resume.
enum status control_quiesce(struct control *c, int64_t deadline_ns);
// From another thread than waits in control_quiesce(), of a process that is about to end: true
// where a request was there and cannot be granted any more. control_quiesce() then fails.
bool control_quiesce_cancel(struct control *c);
enum status control_write_begin(struct control *c); // version goes odd; on failure write nothing
enum status control_write_end(struct control *c);   // version goes even: weights are whole
void control_resume(struct control *c);             // lets the engine go on
// The weights are whole, and as this writer found them with the lease or last left them; of a dead
// owner's too.
bool control_as_left(const struct control *c);
// The run folder that this writer's updates are said to be of; none: nobody's.
void control_set_run(struct control *c, const char *folder);
// The role that its updates are of from here on; as long as it is not called: the policy.
void control_set_role(struct control *c, const char *role);
// Between write_begin and write_end: this update makes its weights exactly those of `folder`.
void control_set_origin(struct control *c, const char *folder);
// Likewise: this update changes no weights, and gives that version, even and above the present one,
// instead of the next even one: so that the servers of several ranks come to the same.
void control_set_version(struct control *c, uint64_t version);
// Where the server finds the last good weights (a model folder) if this writer dies in an update.
// The folder must exist; its absolute path is kept.
enum status control_set_snapshot(struct control *c, const char *folder);

// ---- both ---------------------------------------------------------------------------------------
void control_free(struct control *c); // unmaps
uint64_t control_version(const struct control *c);
enum status control_owner_alive(const struct control *c); // ST_PEER_GONE in a sentence with the pid
void control_snapshot(const struct control *c, char *ret, size_t size); // "" if none was set

void control_info(const struct control *c, struct control_info *ret); // the policy's weights
// The same of another role's. False: the page has none.
bool control_info_of(const struct control *c, const char *role, struct control_info *ret);
// Appends what the weights are: "version 42, 20 updates since DIR, the last 5 of them by the run
// RUN".
void control_origin_words(const struct control_info *f, struct bytes *ret);

#endif
