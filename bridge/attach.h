/* attach.h: a client's side of the bridge, whole: file, control page, mapped arenas, heartbeat. */
// SPDX-License-Identifier: Apache-2.0
#ifndef BRIDGE_ATTACH_H
#define BRIDGE_ATTACH_H

#include "bridge/bridge_file.h"
#include "bridge/control.h"
#include "kernels/device.h"

struct bridge;

// Finds, reads and checks the file, opens the device it names (unless `dev` is given: then it must
// be that device, compared by UUID), the control page, and the arena of every role. Does not take
// the lease. On failure nothing stays open.
enum status bridge_attach(const char *explicit_path, struct device *dev, struct bridge **ret);
// The same of weights that no server has: this process owns them, in memory of its own that load()
// fills, role by role, with those of role->model ("": what is new, and stays zeros). Takes the
// device over. roles: (n) the policy's first, without tensors, kind and handle; server: the address
// of who samples by copies of them, as bridge_file_of() gives it.
typedef enum status (*bridge_load_fn)(void *context, const struct bridge_role *role, void *base);
enum status bridge_own(struct device *dev, const struct bridge_role *roles, int n,
                       const char *server, bridge_load_fn load, void *context, struct bridge **ret);
// bridge_attach() of one shard of a server with several ranks, which is then the policy; with one
// rank, of its only one; rank -1: of a server that has but one, as bridge_attach() itself. Rank 0's
// client is the writer for all: the others publish together with it (bridge_publish_with()). Tells
// each check as it ends: on_step(context, words, status, the fault's sentence or a detail). The
// first that fails is the last. NULL: nobody is told.
typedef void (*bridge_step_fn)(void *context, const char *step, enum status st, const char *detail);
enum status bridge_attach_shard(const char *explicit_path, int rank, struct device *dev,
                                bridge_step_fn on_step, void *context, struct bridge **ret);
void bridge_detach(struct bridge *b); // releases the lease if held; NULL is fine

const struct bridge_file *bridge_file_of(const struct bridge *b);
struct control *bridge_control(struct bridge *b);
struct device *bridge_device(struct bridge *b);
void *bridge_base(struct bridge *b,
                  const char *role); // mapped arena; NULL if there is no such role

// The arena of a role that the server has added since bridge_attach() (an adapter's), mapped.
// Before its role is removed, and before bridge_detach(), it is unmapped.
struct bridge_arena {
    struct bridge_file *file; // as it was then
    const struct bridge_role *role;
    struct shared_memory *memory;
};
enum status bridge_map(struct bridge *b, const char *role, struct bridge_arena **ret);
void bridge_unmap(struct bridge_arena *arena); // NULL is fine

// Takes the writer's lease and starts the thread that keeps its heartbeat; bridge_end_writer (and
// bridge_detach) ends both.
// An update that takes longer than two minutes stops the heartbeat, and with it, 30 s later, the
// lease: a hung device must not keep generation waiting for ever.
enum status bridge_become_writer(struct bridge *b);
void bridge_end_writer(struct bridge *b); // no writer: nothing happens

// The publish protocol around one in-place update: quiesce, odd, update(), device_sync, even,
// resume. If update() or the device fails, the version stays odd (torn), the engine is woken to
// restore, and the error is returned. quiesce_timeout_ms bounds the wait for the engine.
struct publish_times {
    double wait_ms, write_ms, total_ms; // asked to granted; version odd; all
};
enum status bridge_publish(struct bridge *b, int64_t quiesce_timeout_ms,
                           enum status (*update)(void *context), void *context,
                           struct publish_times *ret_times);
// Of ranks each of which has a bridge of its own, and publishes every update together with the
// others from here on: meet() returns ST_OK once all have called it. None writes before every
// server has granted it, and none is even before every arena is whole.
void bridge_publish_with(struct bridge *b, enum status (*meet)(void *context), void *context);

#endif
