/* own.c: the owner's side of weights without a server.
 *
 * Nobody else reads these weights, so that there is nothing to wait for: a thread grants each
 * request to quiesce at once. The page is there all the same, so that a run is one and the same
 * whoever owns its weights: versions, snapshots and what the weights are stand on it. Its name is
 * like a server's, and a later server removes it should this process be killed. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/own.h"
#include "common/base/hash.h"
#include "common/base/spawn.h"

#include <inttypes.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOOK_MS 100

struct own_weights {
    struct device *dev;
    const struct bridge_role *roles;
    int n;
    void **memory; // (n) each role's
    struct control *control;
    pthread_t thread; // that grants
    bool granting;
    _Atomic bool ended;
};

static void *grant(void *context)
{
    struct own_weights *o = context;
    while (!atomic_load(&o->ended)) {
        const uint32_t seen = control_doorbell(o->control);
        control_heartbeat(o->control);
        if (control_quiesce_requested(o->control))
            control_grant_quiesce(o->control); // what it says the writer, of this process, knows
        else
            control_wait(o->control, seen, LOOK_MS);
    }
    return NULL;
}

static enum status create_page(struct own_weights *o, const char *layout_hash)
{
    char whose[64], hash[17], name[64];
    const int n = snprintf(whose, sizeof whose, "%" PRIu64 ".%d.%" PRIu64, process_namespace(),
                           (int)getpid(), process_start_time(getpid()));
    hash_sha256_hex(whose, (size_t)n, 8, hash);
    snprintf(name, sizeof name, "/commonweight-%s-control", hash);
    enum status st = control_create(name, layout_hash, &o->control);
    // A writer that stands still keeps nobody waiting.
    if (st == ST_OK) control_set_heartbeat_limit(o->control, INT_MAX);
    return st;
}

// The draft's account is the policy's.
static enum status take_role(struct own_weights *o, int i, bridge_load_fn load, void *context)
{
    const struct bridge_role *role = &o->roles[i];
    enum status st = device_alloc(o->dev, role->bytes, &o->memory[i]);
    if (st != ST_OK) return st;
    device_fill(o->dev, o->memory[i], 0, role->bytes);
    if (strcmp(role->role, "draft") != 0)
        control_owner_loaded(o->control, role->role, role->model, i == 0);
    return load(context, role, o->memory[i]);
}

enum status own_weights_new(struct device *dev, const struct bridge_role *roles, int n,
                            bridge_load_fn load, void *context, struct own_weights **ret)
{
    enum status st;
    struct own_weights *o = calloc(1, sizeof *o);
    if (!o || !(o->memory = calloc((size_t)n, sizeof *o->memory)))
        FAIL(ST_NO_MEMORY, "no memory for the owner of the weights");
    o->dev = dev;
    o->roles = roles;
    o->n = n;
    CHECK(create_page(o, roles[0].layout_hash));
    for (int i = 0; i < n; i++) CHECK(take_role(o, i, load, context));
    control_owner_update_end(o->control);
    o->granting = thread_start(&o->thread, grant, o) == 0;
    if (!o->granting) FAIL(ST_NO_MEMORY, "no thread for the weights' owner");
    *ret = o;
    return ST_OK;
out:
    own_weights_free(o);
    return st;
}

void own_weights_free(struct own_weights *o)
{
    if (!o) return;
    atomic_store(&o->ended, true);
    if (o->granting) {
        control_notify(o->control);
        pthread_join(o->thread, NULL);
    }
    if (o->control) control_end(o->control);
    control_free(o->control);
    for (int i = 0; i < o->n; i++) device_release(o->dev, o->memory[i]);
    free(o->memory);
    free(o);
}

struct control *own_weights_control(struct own_weights *o)
{
    return o->control;
}

void *own_weights_base(struct own_weights *o, int role)
{
    return o->memory[role];
}
