/* device.c: the device interface: reads device names and passes every call on to a backend.
 *
 * Owns `struct device` and `struct shared_memory`; the memory behind them is the backend's. One
 * thread at a time uses a device. Failures of enqueued operations are kept in the device
 * (device_fail) and come out of the next device_sync, so that operations themselves return nothing.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/device.h"
#include "kernels/backend.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <string.h>

static enum status open_backend(const struct backend *backend, int index, struct device **ret)
{
    struct device *dev = calloc(1, sizeof *dev);
    if (!dev) return status_fail(ST_NO_MEMORY, "no memory for a device");
    dev->backend = backend;
    dev->index = index;
    if (backend->kind == DEVICE_CPU)
        snprintf(dev->spec, sizeof dev->spec, "cpu");
    else
        snprintf(dev->spec, sizeof dev->spec, "cuda:%d", index);
    enum status st = backend->open(index, dev);
    if (st != ST_OK) {
        free(dev);
        return st;
    }
    *ret = dev;
    return ST_OK;
}

static enum status open_cuda(int index, struct device **ret)
{
#if CW_CUDA
    return open_backend(&backend_cuda, index, ret);
#else
    (void)ret;
    return status_fail(ST_UNSUPPORTED,
                       "device cuda:%d: this program was built without CUDA; use --device cpu, or "
                       "build it with CUDA=1 where nvcc is installed",
                       index);
#endif
}

enum status device_open(const char *spec, struct device **ret)
{
    if (strcmp(spec, "cpu") == 0) return open_backend(&backend_cpu, -1, ret);
    if (strcmp(spec, "auto") == 0) {
#if CW_CUDA
        enum status st = open_cuda(0, ret);
        if (st != ST_NOT_FOUND) return st;
#endif
        return open_backend(&backend_cpu, -1, ret);
    }
    if (strcmp(spec, "cuda") == 0) return open_cuda(0, ret);
    int index, end = 0;
    if (sscanf(spec, "cuda:%3d%n", &index, &end) == 1 && spec[end] == '\0' && index >= 0)
        return open_cuda(index, ret);
    return status_fail(ST_INVALID, "device \"%s\" is none of auto, cpu, cuda, cuda:N", spec);
}

void device_free(struct device *dev)
{
    if (!dev) return;
    dev->backend->close(dev);
    free(dev->blocks);
    free(dev);
}

// ---- variants (variants.h) ----------------------------------------------------------------------

const char *op_name(enum op op)
{
    static const char *const names[] = {
#define X(name) #name,
        EACH_OP(X)
#undef X
    };
    return names[op];
}

const struct op_variants *op_variants_of(enum device_kind kind, enum op op)
{
    const struct op_variants *const *list = NULL;
#if CW_CUDA
    if (kind == DEVICE_CUDA) list = backend_cuda.ops->variants;
#endif
    if (kind == DEVICE_CPU) list = backend_cpu.ops->variants;
    while (list && *list && (*list)->op != op) list++;
    return list ? *list : NULL;
}

const struct op_variant *device_variant_taken(const struct device *dev, enum op op)
{
    return dev->taken[op];
}

void op_take_variant(struct device *dev, const struct op_variants *variants, const void *call)
{
    const struct op_variant *row = variants->rows;
    while (!row->launch(dev, call)) row++;
    dev->taken[variants->op] = row; // after those of calls within
}

// ---- the device ---------------------------------------------------------------------------------

enum device_kind device_kind(const struct device *dev)
{
    return dev->backend->kind;
}
int device_index(const struct device *dev)
{
    return dev->index;
}
const char *device_spec(const struct device *dev)
{
    return dev->spec;
}
const char *device_name(const struct device *dev)
{
    return dev->name;
}
const char *device_uuid(const struct device *dev)
{
    return dev->uuid;
}
const struct ops *device_ops(const struct device *dev)
{
    return dev->backend->ops;
}

enum dtype device_default_dtype(const struct device *dev)
{
    return dev->backend->kind == DEVICE_CUDA ? DT_BF16 : DT_F32;
}

bool device_computes_in(const struct device *dev, enum dtype dt)
{
    if (dt == DT_E4M3) return dev->has_e4m3; // of weights
    return dt == DT_F32 || (dt == DT_BF16 && dev->backend->kind == DEVICE_CUDA);
}

bool device_is_exact(const struct device *dev, enum dtype dt)
{
    return dt == DT_F32 ? dev->backend->kind == DEVICE_CPU : dt == DT_BF16 && dev->bf16_is_exact;
}

// ---- memory ------------------------------------------------------------------------------------

void device_count(struct device *dev, int64_t bytes)
{
    dev->allocated += (size_t)bytes;
    if (dev->allocated > dev->allocated_peak) dev->allocated_peak = dev->allocated;
}

void device_allocated(const struct device *dev, size_t *ret_now, size_t *ret_peak)
{
    *ret_now = dev->allocated;
    *ret_peak = dev->allocated_peak;
}

enum status device_alloc(struct device *dev, size_t bytes, void **ret)
{
    if (dev->n_blocks == dev->max_blocks) {
        int max = dev->max_blocks ? 2 * dev->max_blocks : 64;
        struct device_block *blocks = realloc(dev->blocks, (size_t)max * sizeof *blocks);
        if (!blocks) return status_fail(ST_NO_MEMORY, "no memory to note an allocation");
        dev->blocks = blocks;
        dev->max_blocks = max;
    }
    enum status st = dev->backend->alloc(dev, bytes, ret);
    if (st != ST_OK) return st;
    dev->blocks[dev->n_blocks++] = (struct device_block){*ret, bytes};
    device_count(dev, (int64_t)bytes);
    return ST_OK;
}

void device_release(struct device *dev, void *memory)
{
    if (!memory) return;
    int i = dev->n_blocks - 1; // the youngest goes first as a rule
    while (i >= 0 && dev->blocks[i].memory != memory) i--;
    if (i >= 0) {
        device_count(dev, -(int64_t)dev->blocks[i].bytes);
        dev->blocks[i] = dev->blocks[--dev->n_blocks];
    }
    dev->backend->release(dev, memory);
}

void device_parts_widen(struct device_part *parts, const struct device_part *other, int n)
{
    for (int i = 0; i < n; i++)
        if (other[i].bytes > parts[i].bytes) parts[i].bytes = other[i].bytes;
}

size_t device_parts_bytes(const struct device_part *parts, int n)
{
    size_t bytes = 0;
    for (int i = 0; i < n; i++) bytes += parts[i].bytes;
    return bytes;
}

void **device_part_pointer(void *owner, const struct device_part *part)
{
    return (void **)((char *)owner + part->field);
}

enum status device_alloc_parts(struct device *dev, void *owner, const struct device_part *parts,
                               int n)
{
    for (int i = 0; i < n; i++) {
        if (parts[i].bytes == 0) continue;
        enum status st = device_alloc(dev, parts[i].bytes, device_part_pointer(owner, &parts[i]));
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

void device_release_parts(struct device *dev, void *owner, const struct device_part *parts, int n)
{
    for (int i = 0; i < n; i++) device_release(dev, *device_part_pointer(owner, &parts[i]));
}

enum status device_reserve(struct device *dev, size_t bytes)
{
    return dev->backend->reserve(dev, bytes);
}

enum status device_memory(struct device *dev, size_t *ret_free, size_t *ret_total)
{
    return dev->backend->memory(dev, ret_free, ret_total);
}

enum status device_host_alloc(struct device *dev, size_t bytes, void **ret)
{
    return dev->backend->host_alloc(dev, bytes, ret);
}

void device_host_release(struct device *dev, void *memory)
{
    if (memory) dev->backend->host_release(dev, memory);
}

void device_copy_in(struct device *dev, void *to, const void *host, size_t bytes)
{
    if (bytes) dev->backend->copy(dev, to, host, bytes, COPY_IN);
}

void device_copy_in_beside(struct device *dev, void *to, const void *host, size_t bytes)
{
    if (!dev->backend->copy_in_beside)
        device_copy_in(dev, to, host, bytes);
    else if (bytes)
        dev->backend->copy_in_beside(dev, to, host, bytes);
}

void device_call_beside(struct device *dev, void (*call)(void *), void *context)
{
    if (dev->backend->call_beside)
        dev->backend->call_beside(dev, call, context);
    else
        call(context);
}

void device_copy_out(struct device *dev, void *host, const void *from, size_t bytes)
{
    if (bytes) dev->backend->copy(dev, host, from, bytes, COPY_OUT);
}

void device_copy(struct device *dev, void *to, const void *from, size_t bytes)
{
    if (bytes) dev->backend->copy(dev, to, from, bytes, COPY_WITHIN);
}

void device_copy_2d(struct device *dev, void *to, size_t to_pitch, const void *from,
                    size_t from_pitch, size_t width, size_t rows)
{
    if (width && rows) dev->backend->copy_2d(dev, to, to_pitch, from, from_pitch, width, rows);
}

void device_fill(struct device *dev, void *to, unsigned char value, size_t bytes)
{
    if (bytes) dev->backend->fill(dev, to, value, bytes);
}

void device_fail(struct device *dev, const char *format, ...)
{
    if (dev->failed != ST_OK) return;
    dev->failed = ST_DEVICE;
    va_list args;
    va_start(args, format);
    vsnprintf(dev->failure, sizeof dev->failure, format, args);
    va_end(args);
}

static enum status report(struct device *dev, enum status st)
{
    const char *comm_failure = __atomic_load_n(&dev->comm_failure, __ATOMIC_ACQUIRE);
    if (comm_failure) device_fail(dev, "%s", comm_failure);
    if (dev->failed != ST_OK) {
        st = status_fail(dev->failed, "%s: %s", dev->spec, dev->failure);
        dev->failed = ST_OK;
    }
    return st;
}

enum status device_sync(struct device *dev)
{
    return report(dev, dev->backend->sync(dev));
}

void device_mark(struct device *dev, int mark)
{
    if (dev->backend->mark) dev->backend->mark(dev, mark);
}

enum status device_wait(struct device *dev, int mark)
{
    return report(dev, dev->backend->wait ? dev->backend->wait(dev, mark) : ST_OK);
}

// ---- memory shared between processes -----------------------------------------------------------

// name: what a maker calls it, and an opener's handle.
static enum status shared_new(struct device *dev, const char *name, size_t bytes, bool maker,
                              struct shared_memory **ret)
{
    struct shared_memory *memory;
    if (bytes == 0) return status_fail(ST_INVALID, "shared memory %s of 0 bytes", name);
    if (!maker && strlen(name) >= sizeof memory->handle)
        return status_fail(ST_FORMAT, "shared memory handle of %zu characters (at most %zu)",
                           strlen(name), sizeof memory->handle - 1);
    memory = calloc(1, sizeof *memory);
    if (!memory) return status_fail(ST_NO_MEMORY, "no memory to describe shared memory %s", name);
    memory->dev = dev;
    memory->bytes = bytes;
    memory->maker = maker;
    if (!maker) strcpy(memory->handle, name);
    const enum status st = maker ? dev->backend->shared_create(dev, name, memory)
                                 : dev->backend->shared_open(dev, memory);
    if (st == ST_OK)
        *ret = memory;
    else
        free(memory);
    return st;
}

enum status shared_memory_create(struct device *dev, const char *name, size_t bytes,
                                 struct shared_memory **ret)
{
    return shared_new(dev, name, bytes, true, ret);
}

enum status shared_memory_open(struct device *dev, const char *handle, size_t bytes,
                               struct shared_memory **ret)
{
    return shared_new(dev, handle, bytes, false, ret);
}

void *shared_memory_data(const struct shared_memory *memory)
{
    return memory->data;
}
const char *shared_memory_handle(const struct shared_memory *memory)
{
    return memory->handle;
}
const char *shared_memory_kind(const struct device *dev)
{
    return dev->backend->shared_kind;
}

void shared_memory_free(struct shared_memory *memory)
{
    if (!memory) return;
    memory->dev->backend->shared_close(memory);
    free(memory);
}

// ---- captured work and time --------------------------------------------------------------------

/* A graph is opaque to this file and carries no device; its backend's graph_free knows what it is.
 * Only CUDA makes graphs. */
bool device_capture_begin(struct device *dev)
{
    return dev->backend->capture_begin && dev->backend->capture_begin(dev);
}

enum status device_capture_end(struct device *dev, struct device_graph **ret)
{
    return dev->backend->capture_end(dev, ret);
}

void device_graph_launch(struct device *dev, struct device_graph *graph)
{
    dev->backend->graph_launch(dev, graph);
}

void device_graph_free(struct device_graph *graph)
{
#if CW_CUDA
    if (graph) backend_cuda.graph_free(graph);
#else
    (void)graph;
#endif
}

void device_timer_start(struct device *dev)
{
    dev->backend->timer_start(dev);
}
double device_timer_stop(struct device *dev)
{
    return dev->backend->timer_stop(dev);
}
