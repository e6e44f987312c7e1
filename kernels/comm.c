/* comm.c: what is the same for every backend of communicators: the one rank of NULL, opening,
 * failures and deadlines. The device's thread; comm_fail() and comm_may_wait() any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/comm.h"
#include "common/base/clock.h"
#include "kernels/comm_backend.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- failures ----------------------------------------------------------------------------------

bool comm_failed(const struct comm *comm)
{
    return __atomic_load_n(&comm->failed, __ATOMIC_ACQUIRE);
}

void comm_fail(struct comm *comm, const char *what, const char *format, ...)
{
    if (comm_failed(comm)) return;
    char text[sizeof comm->failure - 64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(comm->failure, sizeof comm->failure, "rank %d of %d: %s: %s", comm->rank, comm->size,
             what, text);
    __atomic_store_n(&comm->failed, true, __ATOMIC_RELEASE);
    const char *none = NULL;
    __atomic_compare_exchange_n(&comm->dev->comm_failure, &none, comm->failure, false,
                                __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

static const struct comm *root_of(const struct comm *comm)
{
    while (comm->parent) comm = comm->parent;
    return comm;
}

// A watch is not asked any more once it has been taken away, also by a backend's own thread.
static pthread_mutex_t watching = PTHREAD_MUTEX_INITIALIZER;

enum status comm_check(const struct comm *comm)
{
    const struct comm *root = comm ? root_of(comm) : NULL;
    enum status st = ST_OK;
    pthread_mutex_lock(&watching);
    if (root && root->watch) st = root->watch(root->watch_context);
    pthread_mutex_unlock(&watching);
    return st;
}

bool comm_may_wait(struct comm *comm, const char *what, int64_t start_ns, const char *whom)
{
    const double deadline_s = root_of(comm)->deadline_s;
    if (comm_check(comm) != ST_OK) {
        comm_fail(comm, what, "%s", status_message());
        return false;
    }
    if (clock_ms_since(start_ns) < deadline_s * 1e3) return true;
    comm_fail(comm, what, "nothing from %s within %g s", whom, deadline_s);
    return false;
}

// ---- opening -----------------------------------------------------------------------------------

static const struct comm_backend *backend_of(enum device_kind kind)
{
#if CW_CUDA
    if (kind == DEVICE_CUDA) return &comm_nccl;
#endif
    (void)kind;
    return &comm_mpi;
}

enum status comm_new_id(enum device_kind kind, unsigned char ret_id[COMM_ID_BYTES])
{
    const struct comm_backend *backend = backend_of(kind);
    memset(ret_id, 0, COMM_ID_BYTES);
    return backend->new_id ? backend->new_id(ret_id) : ST_OK;
}

static enum status comm_new(struct device *dev, double deadline_s, struct comm **ret)
{
    struct comm *comm = calloc(1, sizeof *comm);
    if (!comm) return status_fail(ST_NO_MEMORY, "no memory for a communicator");
    comm->backend = backend_of(device_kind(dev));
    comm->dev = dev;
    comm->deadline_s = deadline_s;
    *ret = comm;
    return ST_OK;
}

// Of one that its backend has opened, or failed to. One rank needs no communicator.
static enum status comm_finish(struct comm *comm, enum status st, struct comm **ret)
{
    const bool several = st == ST_OK && comm->size > 1;
    if (!several) comm_free(comm);
    if (st == ST_OK) *ret = several ? comm : NULL;
    return st;
}

enum status comm_open(struct device *dev, const unsigned char *id, int rank, int size,
                      double deadline_s, comm_watch_fn *watch, void *watch_context,
                      struct comm **ret)
{
    struct comm *comm = NULL;
    if (rank < 0 || rank >= size || size > COMM_MAX_RANKS)
        return status_fail(ST_INVALID, "rank %d of %d ranks (at most %d): there is none", rank,
                           size, COMM_MAX_RANKS);
    if (size == 1) {
        *ret = NULL;
        return ST_OK;
    }
    const struct comm_backend *backend = backend_of(device_kind(dev));
    if (backend->missing)
        return status_fail(ST_UNSUPPORTED,
                           "%d ranks on %s: this program was built without %s; build it with the "
                           "package %s",
                           size, device_kind(dev) == DEVICE_CPU ? "the CPU" : "GPUs",
                           backend->missing, backend->package);
    enum status st = comm_new(dev, deadline_s, &comm);
    if (st != ST_OK) return st;
    comm->rank = rank;
    comm->size = size;
    comm->watch = watch;
    comm->watch_context = watch_context;
    return comm_finish(comm, comm->backend->open(comm, id), ret);
}

static enum status split(struct comm *parent, int color, struct comm **ret)
{
    struct comm *comm = NULL;
    if (!parent) {
        *ret = NULL;
        return ST_OK;
    }
    enum status st = comm_new(parent->dev, parent->deadline_s, &comm);
    if (st != ST_OK) return st;
    comm->parent = parent;
    return comm_finish(comm, parent->backend->split(parent, color, comm), ret);
}

enum status comm_split(struct comm *comm, int color, struct comm **ret)
{
    if (color < 0) return status_fail(ST_INVALID, "a communicator of color %d", color);
    return split(comm, color, ret);
}

enum status comm_beside(struct comm *comm, struct comm **ret)
{
    return split(comm, -1, ret);
}

enum status comm_share(struct comm *comm, void *memory, size_t bytes, char *ret_why, size_t size)
{
    ret_why[0] = 0;
    return comm && comm->backend->share ? comm->backend->share(comm, memory, bytes, ret_why, size)
                                        : ST_OK;
}

bool comm_shares(const struct comm *comm, const void *memory)
{
    return comm && comm->backend->shares && comm->backend->shares(comm, memory);
}

enum status comm_unmap_peers(struct comm *comm)
{
    return comm && comm->backend->unmap_peers ? comm->backend->unmap_peers(comm) : ST_OK;
}

void comm_free(struct comm *comm)
{
    if (!comm) return;
    comm->backend->close(comm);
    device_release(comm->dev, comm->staging);
    const char *mine = comm->failure;
    __atomic_compare_exchange_n(&comm->dev->comm_failure, &mine, NULL, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    free(comm);
}

int comm_rank(const struct comm *comm)
{
    return comm ? comm->rank : 0;
}
int comm_size(const struct comm *comm)
{
    return comm ? comm->size : 1;
}

void comm_watch(struct comm *comm, comm_watch_fn *watch, void *context)
{
    if (!comm) return;
    pthread_mutex_lock(&watching);
    comm->watch_context = context;
    comm->watch = watch;
    pthread_mutex_unlock(&watching);
}

void comm_set_deadline(struct comm *comm, double deadline_s)
{
    if (comm) comm->deadline_s = deadline_s;
}

// ---- calls -------------------------------------------------------------------------------------

static void call(struct comm *comm, struct comm_call c)
{
    if (!comm || c.n == 0 || comm_failed(comm)) return;
    const bool adds = c.kind == COMM_ALL_REDUCE || c.kind == COMM_REDUCE_SCATTER;
    if (adds && c.dt != DT_F32 && c.dt != DT_BF16)
        comm_fail(comm, c.what, "%s is not added, only f32 and bf16 are", dtype_name(c.dt));
    else
        comm->backend->call(comm, &c);
}

void comm_join(struct comm *comm)
{
    if (comm && comm->backend->join) comm->backend->join(comm);
}

void comm_all_reduce(struct comm *comm, void *data, size_t n, enum dtype dt)
{
    call(comm, (struct comm_call){COMM_ALL_REDUCE, "all_reduce", data, data, n, dt, 0});
}

void comm_all_gather(struct comm *comm, const void *part, void *all, size_t bytes)
{
    call(comm, (struct comm_call){COMM_ALL_GATHER, "all_gather", part, all, bytes, DT_U8, 0});
}

void comm_gather_columns(struct comm *comm, void *all, void *parts, size_t rows, size_t width)
{
    const size_t part = rows * width;
    if (!comm) return;
    comm_all_gather(comm, (char *)parts + (size_t)comm->rank * part, parts, part);
    for (size_t r = 0; r < (size_t)comm->size; r++)
        device_copy_2d(comm->dev, (char *)all + r * width, (size_t)comm->size * width,
                       (char *)parts + r * part, width, width, rows);
}

void comm_reduce_scatter(struct comm *comm, const void *all, void *part, size_t n, enum dtype dt)
{
    call(comm, (struct comm_call){COMM_REDUCE_SCATTER, "reduce_scatter", all, part, n, dt, 0});
}

void comm_broadcast(struct comm *comm, void *data, size_t bytes, int root)
{
    call(comm, (struct comm_call){COMM_BROADCAST, "broadcast", data, data, bytes, DT_U8, root});
}

void comm_send(struct comm *comm, const void *data, size_t bytes, int to)
{
    call(comm, (struct comm_call){COMM_SEND, "send", data, (void *)data, bytes, DT_U8, to});
}

void comm_recv(struct comm *comm, void *data, size_t bytes, int from)
{
    call(comm, (struct comm_call){COMM_RECV, "recv", data, data, bytes, DT_U8, from});
}

// ---- host memory -------------------------------------------------------------------------------

static enum status make_staging(struct comm *comm, size_t bytes)
{
    if (bytes <= comm->staging_bytes) return ST_OK;
    device_release(comm->dev, comm->staging);
    comm->staging = NULL;
    comm->staging_bytes = 0;
    enum status st = device_alloc(comm->dev, bytes, &comm->staging);
    if (st == ST_OK) comm->staging_bytes = bytes;
    return st;
}

enum status comm_gather_host(struct comm *comm, const void *part, void *all, size_t bytes)
{
    const size_t size = (size_t)comm_size(comm);
    if (!comm) {
        if (part != all) memcpy(all, part, bytes);
        return ST_OK;
    }
    enum status st = make_staging(comm, size * bytes);
    if (st != ST_OK) return st;
    char *place = (char *)comm->staging + (size_t)comm->rank * bytes;
    device_copy_in(comm->dev, place, part, bytes);
    comm_all_gather(comm, place, comm->staging, bytes);
    device_copy_out(comm->dev, all, comm->staging, size * bytes);
    return device_sync(comm->dev);
}

enum status comm_broadcast_host(struct comm *comm, void *data, size_t bytes, int root)
{
    enum status st = comm ? make_staging(comm, bytes) : ST_OK;
    if (!comm || st != ST_OK) return st;
    if (comm->rank == root) device_copy_in(comm->dev, comm->staging, data, bytes);
    comm_broadcast(comm, comm->staging, bytes, root);
    if (comm->rank != root) device_copy_out(comm->dev, data, comm->staging, bytes);
    return device_sync(comm->dev);
}

// The numbers of all ranks lie on the device together: of many some at a time.
#define SUMMED_AT_ONCE 65536

enum status comm_sum_host(struct comm *comm, double *x, int64_t n)
{
    const int64_t size = comm_size(comm), room = n < SUMMED_AT_ONCE ? n : SUMMED_AT_ONCE;
    double *all = calloc((size_t)(size * room) + 1, sizeof *all);
    enum status st = ST_OK;
    if (!all) return status_fail(ST_NO_MEMORY, "no memory for sums over %d ranks", (int)size);
    for (int64_t at = 0; st == ST_OK && at < n; at += room) {
        const int64_t some = n - at < room ? n - at : room;
        st = comm_gather_host(comm, x + at, all, (size_t)some * sizeof *x);
        for (int64_t i = 0; st == ST_OK && i < some; i++) {
            x[at + i] = all[i];
            for (int64_t r = 1; r < size; r++) x[at + i] += all[r * some + i];
        }
    }
    free(all);
    return st;
}

enum status comm_barrier(struct comm *comm)
{
    char all[COMM_MAX_RANKS], here = 1;
    return comm_gather_host(comm, &here, all, sizeof here);
}
