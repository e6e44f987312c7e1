/* attach.c: a client's side of the bridge, whole: reads the bridge file, holds it against this
 * machine, opens control page, device and arenas, and keeps the writer's heartbeat.
 *
 * Owns all of these. One thread (the trainer's main thread) calls; the heartbeat thread it starts
 * touches only the control page's heartbeat word, and looks at `publishing_since_ns`: it goes
 * silent when an update hangs, so that the server can revoke the lease.
 *
 * Weights without a server (bridge_own()) are read by nobody else, so that there is nothing to wait
 * for: a thread of this process is the owner's side, and grants each request to quiesce at once.
 * The page is there all the same, so that a run is one and the same whoever owns its weights:
 * versions, snapshots and what the weights are stand on it. Its name is like a server's, and a
 * later server removes it should this process be killed. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/spawn.h"

#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define HEARTBEAT_MS     100
#define PUBLISH_LIMIT_MS 120000
#define GRANTER_MS       100 // longest sleep: its own heartbeat

struct bridge {
    struct bridge_file *file;
    struct control *control;
    struct device *dev;
    bool owns_device;
    struct shared_memory **arenas; // one a role, of a server's weights
    // bridge_own(): in their place memory of this process, and the thread that is its owner's side
    void **own;
    bool granting;
    pthread_t granter;
    _Atomic bool granter_ends;
    enum status (*meet)(void *context); // with those that publish together with this one
    void *meet_context;
    // heartbeat thread
    bool beating;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t stop_cond;
    bool stop;
    _Atomic int64_t publishing_since_ns; // 0: no update under way
};

static enum status meet_nobody(void *context)
{
    (void)context;
    return ST_OK;
}

// ---- attaching ----------------------------------------------------------------------------------

static enum status open_device(struct bridge *b, struct device *dev)
{
    const struct bridge_file *file = b->file;
    if (!dev) {
        enum status st = device_open(file->device, &b->dev);
        if (st != ST_OK) return status_context(st, "%s", file->path);
        b->owns_device = true;
    } else {
        b->dev = dev;
    }
    if (strcmp(device_uuid(b->dev), file->device_uuid) != 0)
        return status_fail(ST_MISMATCH,
                           "%s: the server's weights lie on %s (%s), this process's %s is %s: give "
                           "both the same --device and CUDA_VISIBLE_DEVICES",
                           file->path, file->device, file->device_uuid, device_spec(b->dev),
                           device_uuid(b->dev));
    return ST_OK;
}

static enum status open_arena(const struct bridge *b, const struct bridge_role *role,
                              struct shared_memory **ret)
{
    if (strcmp(role->kind, shared_memory_kind(b->dev)) != 0)
        return status_fail(ST_MISMATCH, "%s: segment %s is %s, device %s shares memory as %s",
                           b->file->path, role->role, role->kind, device_spec(b->dev),
                           shared_memory_kind(b->dev));
    return status_context(shared_memory_open(b->dev, role->handle, role->bytes, ret),
                          "%s: segment %s", b->file->path, role->role);
}

// The server takes an adapter out of its file before it frees the memory: whether that has come
// between our reading the file and mapping the role.
static bool was_unloaded(const struct bridge *b, const struct bridge_role *role)
{
    struct bridge_file *now = NULL;
    if (role == b->file->roles || bridge_file_read(b->file->path, &now) != ST_OK) return false;
    const struct bridge_role *listed = bridge_file_role(now, role->role);
    const bool gone = !listed || strcmp(listed->handle, role->handle) != 0;
    bridge_file_free(now);
    return gone;
}

static enum status map_arenas(struct bridge *b, bridge_step_fn on_step, void *context)
{
    char step[96], detail[256];
    struct status_kept kept;
    b->arenas = calloc((size_t)b->file->n_roles, sizeof *b->arenas);
    if (!b->arenas) return status_fail(ST_NO_MEMORY, "no memory for a bridge");
    for (int i = 0; i < b->file->n_roles;) {
        const struct bridge_role *role = &b->file->roles[i];
        snprintf(step, sizeof step, "mapping %s", role->role);
        status_keep(&kept, open_arena(b, role, &b->arenas[i]));
        const bool unloaded = kept.code != ST_OK && was_unloaded(b, role);
        const enum status st = unloaded ? ST_OK : status_recall(&kept);
        snprintf(detail, sizeof detail, "%s %.64s, %llu bytes%s", role->kind, role->handle,
                 (unsigned long long)role->bytes, unloaded ? ": unloaded meanwhile" : "");
        on_step(context, step, st, st == ST_OK ? detail : status_message());
        if (st != ST_OK) return st;
        if (!unloaded) {
            i++;
            continue;
        }
        free(b->file->roles[i].tensors);
        memmove(&b->file->roles[i], &b->file->roles[i + 1],
                (size_t)(--b->file->n_roles - i) * sizeof *b->file->roles);
    }
    return ST_OK;
}

// rank -1: of a server that has but one.
static enum status choose_shard(struct bridge_file *file, int rank)
{
    if (rank >= 0) return bridge_file_take_shard(file, rank);
    if (file->tp_degree == 1) return ST_OK;
    return status_fail(
        ST_UNSUPPORTED,
        "%s: \"tp_degree\" is %d: the server's weights have so many shards, and this "
        "client maps whole models; as many ranks of one trainer map a shard each (mpirun -n %d "
        "cw-trainer train --bridge FILE)",
        file->path, file->tp_degree, file->tp_degree);
}

static void no_step(void *context, const char *step, enum status st, const char *detail)
{
    (void)context, (void)step, (void)st, (void)detail;
}

enum status bridge_attach_shard(const char *explicit_path, int rank, struct device *dev,
                                bridge_step_fn on_step, void *context, struct bridge **ret)
{
    char path[sizeof((struct bridge_file *)0)->path], detail[2 * PATH_MAX];
    enum status st;
    const char *step = "bridge file";
    struct bridge *b = calloc(1, sizeof *b);
    if (!b) return status_fail(ST_NO_MEMORY, "no memory for a bridge");
    if (!on_step) on_step = no_step;
    b->meet = meet_nobody;

    CHECK(bridge_find(explicit_path, path, sizeof path));
    CHECK(bridge_file_read(path, &b->file));
    if (b->file->roles[0].inference_only)
        FAIL(ST_UNSUPPORTED,
             "%s: the server was started with --inference-only: nobody may train its weights or "
             "map them; start it without, or sample from it (--sync checkpoint, --workers)",
             path);
    CHECK(choose_shard(b->file, rank));
    snprintf(detail, sizeof detail, "%s%s%s", path,
             b->file->ignored[0] ? "; roles that are not known here, and left out: " : "",
             b->file->ignored);
    on_step(context, step, ST_OK, detail);

    step = "boot";
    CHECK(bridge_file_check_boot(b->file));
    on_step(context, step, ST_OK, b->file->boot_id);

    step = "server";
    CHECK(bridge_file_check_process(b->file));
    snprintf(detail, sizeof detail, "pid %d is alive", (int)b->file->pid);
    on_step(context, step, ST_OK, detail);

    step = "control page";
    CHECK(control_open(b->file->control_page, b->file->page_layout, &b->control));
    if (b->file->shard > 0) control_follow(b->control, b->file->shard);
    snprintf(detail, sizeof detail, "%s, layout %.16s", b->file->control_page,
             b->file->page_layout);
    on_step(context, step, ST_OK, detail);

    step = "device";
    CHECK(open_device(b, dev));
    snprintf(detail, sizeof detail, "%s: %s, %s", device_spec(b->dev), device_name(b->dev),
             device_uuid(b->dev));
    on_step(context, step, ST_OK, detail);

    step = NULL; // told there
    CHECK(map_arenas(b, on_step, context));
    *ret = b;
    return ST_OK;
out:
    if (step) on_step(context, step, st, status_message());
    bridge_detach(b);
    return st;
}

enum status bridge_attach(const char *explicit_path, struct device *dev, struct bridge **ret)
{
    return bridge_attach_shard(explicit_path, -1, dev, NULL, NULL, ret);
}

// ---- without a server --------------------------------------------------------------------------

static void *grant(void *bridge)
{
    struct bridge *b = bridge;
    while (!atomic_load(&b->granter_ends)) {
        const uint32_t seen = control_doorbell(b->control);
        control_heartbeat(b->control);
        if (control_quiesce_requested(b->control))
            control_grant_quiesce(b->control); // what it says the writer, of this process, knows
        else
            control_wait(b->control, seen, GRANTER_MS);
    }
    return NULL;
}

static enum status create_page(struct bridge *b)
{
    char whose[64], hash[17], name[64];
    const int n = snprintf(whose, sizeof whose, "%" PRIu64 ".%d.%" PRIu64, process_namespace(),
                           (int)getpid(), process_start_time(getpid()));
    hash_sha256_hex(whose, (size_t)n, 8, hash);
    snprintf(name, sizeof name, "/commonweight-%s-control", hash);
    enum status st = control_create(name, b->file->page_layout, &b->control);
    // A writer that stands still keeps nobody waiting.
    if (st == ST_OK) control_set_heartbeat_limit(b->control, INT_MAX);
    return st;
}

// The draft's account is the policy's.
static enum status take_role(struct bridge *b, int i, bridge_load_fn load, void *context)
{
    const struct bridge_role *role = &b->file->roles[i];
    enum status st = device_alloc(b->dev, role->bytes, &b->own[i]);
    if (st != ST_OK) return st;
    device_fill(b->dev, b->own[i], 0, role->bytes);
    if (strcmp(role->role, "draft") != 0)
        control_owner_loaded(b->control, role->role, role->model, i == 0);
    return load(context, role, b->own[i]);
}

enum status bridge_own(struct device *dev, const struct bridge_role *roles, int n,
                       const char *server, bridge_load_fn load, void *context, struct bridge **ret)
{
    enum status st = ST_OK;
    struct bridge *b = calloc(1, sizeof *b);
    struct bridge_file *file = NULL;
    if (!b) return status_fail(ST_NO_MEMORY, "no memory for a bridge");
    b->meet = meet_nobody;
    b->dev = dev;
    b->file = file = calloc(1, sizeof *file);
    if (!file || !(file->roles = calloc((size_t)n, sizeof *file->roles)) ||
        !(b->own = calloc((size_t)n, sizeof *b->own)))
        FAIL(ST_NO_MEMORY, "no memory for a bridge");
    snprintf(file->path, sizeof file->path, "(none: this process owns the weights)");
    snprintf(file->socket, sizeof file->socket, "%s", server);
    memcpy(file->page_layout, roles[0].layout_hash, sizeof file->page_layout);
    file->pid = getpid();
    file->n_roles = n;
    memcpy(file->roles, roles, (size_t)n * sizeof *roles);
    CHECK(create_page(b));
    for (int i = 0; i < n; i++) CHECK(take_role(b, i, load, context));
    control_owner_update_end(b->control);
    b->granting = thread_start(&b->granter, grant, b) == 0;
    if (!b->granting) FAIL(ST_NO_MEMORY, "no thread for the weights' owner");
    b->owns_device = true;
    *ret = b;
    return ST_OK;
out:
    bridge_detach(b);
    return st;
}

static void free_own(struct bridge *b)
{
    atomic_store(&b->granter_ends, true);
    if (b->granting) {
        control_notify(b->control);
        pthread_join(b->granter, NULL);
    }
    if (b->control) control_end(b->control);
    for (int i = 0; i < b->file->n_roles; i++) device_release(b->dev, b->own[i]);
    free(b->own);
}

static void stop_heartbeat(struct bridge *b)
{
    if (!b->beating) return;
    pthread_mutex_lock(&b->mutex);
    b->stop = true;
    pthread_cond_signal(&b->stop_cond);
    pthread_mutex_unlock(&b->mutex);
    pthread_join(b->thread, NULL);
    pthread_cond_destroy(&b->stop_cond);
    pthread_mutex_destroy(&b->mutex);
    b->beating = false;
}

void bridge_end_writer(struct bridge *b)
{
    stop_heartbeat(b);
    if (b->control) control_lease_release(b->control);
}

void bridge_detach(struct bridge *b)
{
    if (!b) return;
    bridge_end_writer(b);
    if (b->arenas)
        for (int i = b->file->n_roles - 1; i >= 0; i--) shared_memory_free(b->arenas[i]);
    free(b->arenas);
    if (b->own) free_own(b);
    control_free(b->control);
    if (b->owns_device) device_free(b->dev);
    bridge_file_free(b->file);
    free(b);
}

const struct bridge_file *bridge_file_of(const struct bridge *b)
{
    return b->file;
}
struct control *bridge_control(struct bridge *b)
{
    return b->control;
}
struct device *bridge_device(struct bridge *b)
{
    return b->dev;
}

void *bridge_base(struct bridge *b, const char *role)
{
    for (int i = 0; i < b->file->n_roles; i++)
        if (strcmp(b->file->roles[i].role, role) == 0)
            return b->own ? b->own[i] : shared_memory_data(b->arenas[i]);
    return NULL;
}

enum status bridge_map(struct bridge *b, const char *role, struct bridge_arena **ret)
{
    enum status st;
    struct bridge_arena *a = calloc(1, sizeof *a);
    if (!a) return status_fail(ST_NO_MEMORY, "no memory for a bridge");
    CHECK(bridge_file_read(b->file->path, &a->file));
    a->role = bridge_file_role(a->file, role);
    if (!a->role) FAIL(ST_NOT_FOUND, "%s has no role \"%s\"", b->file->path, role);
    CHECK(open_arena(b, a->role, &a->memory));
    *ret = a;
    return ST_OK;
out:
    bridge_unmap(a);
    return st;
}

void bridge_unmap(struct bridge_arena *arena)
{
    if (!arena) return;
    shared_memory_free(arena->memory);
    bridge_file_free(arena->file);
    free(arena);
}

// ---- writing ------------------------------------------------------------------------------------

static void *heartbeat(void *argument)
{
    struct bridge *b = argument;
    pthread_mutex_lock(&b->mutex);
    while (!b->stop) {
        int64_t since = atomic_load(&b->publishing_since_ns);
        if (!since || clock_ms_since(since) < PUBLISH_LIMIT_MS) control_heartbeat(b->control);
        clock_cond_wait(&b->stop_cond, &b->mutex, clock_deadline_ns(HEARTBEAT_MS));
    }
    pthread_mutex_unlock(&b->mutex);
    return NULL;
}

static int start_heartbeat(struct bridge *b)
{
    pthread_mutex_init(&b->mutex, NULL);
    clock_cond_init(&b->stop_cond);
    b->stop = false;
    int error = thread_start(&b->thread, heartbeat, b);
    if (error) {
        pthread_cond_destroy(&b->stop_cond);
        pthread_mutex_destroy(&b->mutex);
    }
    return error;
}

enum status bridge_become_writer(struct bridge *b)
{
    enum status st = control_lease_take(b->control);
    if (st != ST_OK || b->beating) return st;
    int error = start_heartbeat(b);
    if (error) {
        control_lease_release(b->control);
        return status_fail(ST_NO_MEMORY, "no thread for the writer's heartbeat: %s",
                           strerror(error));
    }
    b->beating = true;
    return ST_OK;
}

// Runs the update and waits for its end on the device, whether it succeeded or not: what was
// enqueued must not go on writing while the server restores. The first error is the one that is
// kept.
static enum status run_update(struct bridge *b, enum status (*update)(void *), void *context)
{
    struct status_kept kept;
    status_keep(&kept, update(context));
    const enum status end = device_sync(b->dev);
    return kept.code == ST_OK ? end : status_recall(&kept);
}

void bridge_publish_with(struct bridge *b, enum status (*meet)(void *context), void *context)
{
    b->meet = meet;
    b->meet_context = context;
}

enum status bridge_publish(struct bridge *b, int64_t quiesce_timeout_ms,
                           enum status (*update)(void *context), void *context,
                           struct publish_times *ret_times)
{
    struct publish_times times = {0};
    int64_t start = clock_now_ns();
    enum status st = control_quiesce(b->control, clock_deadline_ns(quiesce_timeout_ms));
    if (st != ST_OK) return st;
    times.wait_ms = clock_ms_since(start);

    int64_t odd = clock_now_ns();
    atomic_store(&b->publishing_since_ns, odd);
    CHECK(b->meet(b->meet_context));
    CHECK(control_write_begin(b->control));
    // rank 0's is the one version of all shards: none is written before it is odd
    if (b->file->tp_degree > 1) st = b->meet(b->meet_context);
    if (st == ST_OK) st = run_update(b, update, context);
    if (st == ST_OK) st = b->meet(b->meet_context);
    st = status_context(
        st, "the update was cut off, so the weights are torn and the server restores them");
    if (st == ST_OK) CHECK(control_write_end(b->control));
    times.write_ms = clock_ms_since(odd);
out:
    control_resume(b->control);
    atomic_store(&b->publishing_since_ns, 0);
    times.total_ms = clock_ms_since(start);
    if (st == ST_OK && ret_times) *ret_times = times;
    return st;
}
