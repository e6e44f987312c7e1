/* device.cu: the device interface on CUDA: memory, copies, memory shared between processes (CUDA
 * IPC), captured graphs, timers, checksums.
 *
 * One non-blocking stream a device; everything is enqueued on it. The file uses the runtime API
 * only and links it statically, so that a program starts on a machine without a driver and says so;
 * the one driver call (the size of an opened IPC allocation) is looked up at run time.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/cuda.cuh"
#include "common/base/bytes.h"
#include "common/base/hash.h"
#include <cuda.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

extern "C" const struct ops ops_cuda;

struct device_graph {
    cudaGraphExec_t exec;
    struct comm *comm; // whose calls are in it, or NULL
};

// ST_OK where it succeeded.
static enum status status_of(struct device *dev, cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return ST_OK;
    cudaGetLastError();
    enum status st = error == cudaErrorMemoryAllocation ? ST_NO_MEMORY : ST_DEVICE;
    return status_fail(st, "%s: %s: %s", dev->spec, what, cudaGetErrorString(error));
}

bool cuda_ok(struct device *dev, cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return true;
    cudaGetLastError(); // clears it where it is not sticky
    device_fail(dev, "%s: %s", what, cudaGetErrorString(error));
    return false;
}

static cudaError_t grow(struct device *dev, size_t bytes)
{
    struct cuda_state *state = cuda_use(dev);
    size_t whole = (bytes + (1 << 20) - 1) >> 20 << 20;
    void *memory = NULL;
    void **outgrown =
        (void **)realloc(state->outgrown, (state->n_outgrown + 1) * sizeof *state->outgrown);
    if (!outgrown) return cudaErrorMemoryAllocation;
    state->outgrown = outgrown;
    cudaError_t error = cudaMalloc(&memory, whole);
    if (error != cudaSuccess) return error;
    if (state->workspace) outgrown[state->n_outgrown++] = state->workspace;
    state->workspace = memory;
    state->workspace_bytes = whole;
    device_count(dev, (int64_t)whole);
    return cudaSuccess;
}

static enum status reserve(struct device *dev, size_t bytes)
{
    if (bytes <= cuda_use(dev)->workspace_bytes) return ST_OK;
    return status_of(dev, grow(dev, bytes), "taking scratch memory");
}

void *cuda_workspace(struct device *dev, size_t bytes)
{
    struct cuda_state *state = cuda_use(dev);
    bytes += state->workspace_kept;
    if (bytes > state->workspace_bytes && state->capturing) {
        device_fail(dev,
                    "workspace would grow to %zu bytes during capture; run the operations once "
                    "before capturing them",
                    bytes);
        return NULL;
    }
    // Twice the old size, so that what is outgrown never adds up to more than what is in use.
    size_t want = bytes > 2 * state->workspace_bytes ? bytes : 2 * state->workspace_bytes;
    if (bytes > state->workspace_bytes && !cuda_ok(dev, grow(dev, want), "workspace")) return NULL;
    return (char *)state->workspace + state->workspace_kept;
}

// ---- opening -----------------------------------------------------------------------------------

__global__ void probe() {}

static void device_close(struct device *dev)
{
    struct cuda_state *state = (struct cuda_state *)dev->state;
    if (!state) return;
    cudaSetDevice(state->index);
    if (state->stream) cudaStreamSynchronize(state->stream);
    matmul_state_free(state->matmul);
    for (int i = 0; i < state->n_outgrown; i++) cudaFree(state->outgrown[i]);
    free(state->outgrown);
    cudaFree(state->workspace);
    cudaFree(state->tickets);
    for (cudaEvent_t event : state->events)
        if (event) cudaEventDestroy(event);
    if (state->beside) cudaStreamDestroy(state->beside);
    if (state->stream) cudaStreamDestroy(state->stream);
    free(state);
    dev->state = NULL;
}

void cuda_uuid(const cudaDeviceProp *prop, char *ret, size_t size)
{
    const unsigned char *u = (const unsigned char *)prop->uuid.bytes;
    snprintf(ret, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13],
             u[14], u[15]);
}

static enum status open_at(int index, struct device *dev)
{
    int n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return status_fail(ST_NOT_FOUND, "cuda:%d: no CUDA GPU here (%s); use --device cpu", index,
                           cudaGetErrorString(error));
    }
    if (index >= n)
        return status_fail(ST_NOT_FOUND, "cuda:%d: there are %d CUDA GPUs (cuda:0 .. cuda:%d)",
                           index, n, n - 1);

    cudaDeviceProp prop;
    error = cudaSetDevice(index);
    if (error == cudaSuccess) error = cudaGetDeviceProperties(&prop, index);
    if (error != cudaSuccess) return status_of(dev, error, "opening");
    snprintf(dev->name, sizeof dev->name, "%.*s", (int)sizeof dev->name - 1, prop.name);
    cuda_uuid(&prop, dev->uuid, sizeof dev->uuid);
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, probe);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return status_fail(ST_UNSUPPORTED,
                           "cuda:%d: this program holds no code for %s (compute capability %d.%d: "
                           "%s); build it with CUDA_ARCHS=%d%d",
                           index, prop.name, prop.major, prop.minor, cudaGetErrorString(error),
                           prop.major, prop.minor);
    }

    struct cuda_state *state = (struct cuda_state *)calloc(1, sizeof *state);
    if (!state) return status_fail(ST_NO_MEMORY, "no memory for a device");
    dev->state = state;
    state->index = index;
    state->n_sms = prop.multiProcessorCount;
    // That of the code which runs here: 8 where a newer GPU was given compute_80's PTX, which has
    // no instructions but 8.x's.
    state->major = attributes.ptxVersion / 10;
    // Matmuls in k16 order were measured there, with the forms of 9.0: 8.0's PTX has none of its
    // own.
    dev->bf16_is_exact = prop.major == 9 && state->major == 9;
    dev->has_e4m3 = prop.major * 10 + prop.minor >= 89;
    state->max_shared = (int)prop.sharedMemPerBlockOptin;
    error = cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess)
        error = cudaStreamCreateWithFlags(&state->beside, cudaStreamNonBlocking);
    for (int i = 0; i < N_EVENTS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(
            &state->events[i], i <= EVENT_STOPPED ? cudaEventDefault : cudaEventDisableTiming);
    if (error == cudaSuccess)
        error = cudaMalloc((void **)&state->tickets, N_TICKETS * sizeof *state->tickets);
    if (error == cudaSuccess)
        error =
            cudaMemsetAsync(state->tickets, 0, N_TICKETS * sizeof *state->tickets, state->stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(state->stream);
    enum status st = status_of(dev, error, "opening");
    if (st == ST_OK) st = matmul_state_new(dev, &state->matmul);
    if (st != ST_OK) device_close(dev);
    return st;
}

// ---- memory ------------------------------------------------------------------------------------

static enum status alloc(struct device *dev, size_t bytes, void **ret)
{
    cuda_use(dev);
    void *memory = NULL;
    cudaError_t error = cudaMalloc(&memory, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        size_t available = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&available, &total);
        return status_fail(ST_NO_MEMORY, "%s: no room for %.1f MiB (%.1f of %.1f MiB free)",
                           dev->spec, (double)bytes / 1048576, (double)available / 1048576,
                           (double)total / 1048576);
    }
    if (error == cudaSuccess) *ret = memory;
    return status_of(dev, error, "taking memory");
}

static void release(struct device *dev, void *memory)
{
    cuda_ok(dev, cudaStreamSynchronize(cuda_use(dev)->stream), "waiting before memory is released");
    cuda_ok(dev, cudaFree(memory), "releasing memory");
}

static enum status memory(struct device *dev, size_t *ret_free, size_t *ret_total)
{
    cuda_use(dev);
    size_t available = 0, total = 0;
    enum status st = status_of(dev, cudaMemGetInfo(&available, &total), "asking for free memory");
    if (st != ST_OK) return st;
    *ret_free = available;
    *ret_total = total;
    return ST_OK;
}

static enum status host_alloc(struct device *dev, size_t bytes, void **ret)
{
    cuda_use(dev);
    void *memory = NULL;
    cudaError_t error = cudaHostAlloc(&memory, bytes ? bytes : 1, cudaHostAllocDefault);
    if (error == cudaSuccess) *ret = memory;
    return status_of(dev, error, "taking pinned host memory");
}

static void host_release(struct device *dev, void *memory)
{
    cudaStreamSynchronize(cuda_use(dev)->stream);
    cuda_ok(dev, cudaFreeHost(memory), "releasing pinned host memory");
}

static void copy(struct device *dev, void *to, const void *from, size_t bytes, enum copy_way way)
{
    const enum cudaMemcpyKind kind = way == COPY_IN    ? cudaMemcpyHostToDevice
                                     : way == COPY_OUT ? cudaMemcpyDeviceToHost
                                                       : cudaMemcpyDeviceToDevice;
    cuda_ok(dev, cudaMemcpyAsync(to, from, bytes, kind, cuda_use(dev)->stream),
            way == COPY_IN    ? "copying to the device"
            : way == COPY_OUT ? "copying from the device"
                              : "copying on the device");
}

static void copy_in_beside(struct device *dev, void *to, const void *host, size_t bytes)
{
    struct cuda_state *state = cuda_use(dev);
    const char *what = "copying to the device";
    if (cuda_ok(dev, cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, state->beside),
                what) &&
        cuda_ok(dev, cudaEventRecord(state->events[EVENT_COPIED], state->beside), what))
        cuda_ok(dev, cudaStreamWaitEvent(state->stream, state->events[EVENT_COPIED], 0), what);
    cuda_enqueued(state, false);
}

static void call_beside(struct device *dev, void (*call)(void *), void *context)
{
    cuda_ok(dev, cudaLaunchHostFunc(cuda_use(dev)->beside, call, context), "enqueuing a call");
}

// One copy where the driver takes the pitch: it has 31 bits, and a layer of a large KV pool more.
static void copy_2d(struct device *dev, void *to, size_t to_pitch, const void *from,
                    size_t from_pitch, size_t width, size_t rows)
{
    struct cuda_state *state = cuda_use(dev);
    if (to_pitch <= INT_MAX && from_pitch <= INT_MAX) {
        cuda_ok(dev,
                cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows,
                                  cudaMemcpyDeviceToDevice, state->stream),
                "copying rows on the device");
        return;
    }
    for (size_t i = 0; i < rows; i++)
        copy(dev, (char *)to + i * to_pitch, (const char *)from + i * from_pitch, width,
             COPY_WITHIN);
}

static void fill(struct device *dev, void *to, unsigned char value, size_t bytes)
{
    cuda_ok(dev, cudaMemsetAsync(to, value, bytes, cuda_use(dev)->stream), "filling");
}

static enum status sync(struct device *dev)
{
    return status_of(dev, cudaStreamSynchronize(cuda_use(dev)->stream),
                     "waiting for enqueued work");
}

// ---- memory shared between processes -----------------------------------------------------------

// A shared allocation is rounded up to whole 2 MiB pages: smaller ones may lie inside a page with
// others, and an IPC handle stands for the page.
static size_t shared_size(size_t bytes)
{
    return (bytes + (2u << 20) - 1) >> 21 << 21;
}

static enum status shared_create(struct device *dev, const char *name, struct shared_memory *memory)
{
    struct cuda_state *state = cuda_use(dev);
    struct bytes text = BYTES_INIT;
    cudaIpcMemHandle_t handle;
    void *data = NULL;
    enum status st = alloc(dev, shared_size(memory->bytes), &data);
    if (st != ST_OK) return status_context(st, "shared memory %s", name);
    cudaError_t error = cudaMemsetAsync(data, 0, shared_size(memory->bytes), state->stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(state->stream);
    if (error == cudaSuccess) error = cudaIpcGetMemHandle(&handle, data);
    if (error != cudaSuccess)
        CHECK(status_context(status_of(dev, error, "making a CUDA IPC handle"), "shared memory %s",
                             name));
    static_assert((sizeof handle + 2) / 3 * 4 < sizeof memory->handle, "a handle has room");
    CHECK(base64_encode(&handle, sizeof handle, &text));
    snprintf(memory->handle, sizeof memory->handle, "%s", bytes_text(&text));
    memory->data = data;
out:
    bytes_release(&text);
    if (st != ST_OK) cudaFree(data);
    return st;
}

// A function of the driver's; NULL: it has none of that name.
static void *driver_function(const char *name)
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
    return found == cudaDriverEntryPointSuccess ? function : NULL;
}

// Bytes of the allocation that `data` begins; 0 where the driver does not tell.
static size_t allocation_size(const void *data)
{
    typedef CUresult range_function(CUdeviceptr *, size_t *, CUdeviceptr);
    const auto range = (range_function *)driver_function("cuMemGetAddressRange");
    CUdeviceptr base;
    size_t size = 0;
    if (!range || range(&base, &size, (CUdeviceptr)data) != CUDA_SUCCESS) return 0;
    return size - ((CUdeviceptr)data - base);
}

static enum status shared_open(struct device *dev, struct shared_memory *memory)
{
    cuda_use(dev);
    struct bytes raw = BYTES_INIT;
    cudaIpcMemHandle_t handle;
    cudaError_t error;
    void *data = NULL;
    size_t size;
    enum status st = base64_decode(memory->handle, &raw);
    if (st == ST_OK && raw.len != sizeof handle)
        st = status_fail(ST_FORMAT, "%zu bytes, not the %zu of a CUDA IPC handle", raw.len,
                         sizeof handle);
    if (st != ST_OK) {
        status_context(st, "IPC handle \"%s\"", memory->handle);
        goto out;
    }
    memcpy(&handle, raw.data, sizeof handle);
    error = cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
        cudaGetLastError();
        st = status_fail(ST_DEVICE,
                         "%s: opening the CUDA IPC handle: %s (its maker must be another process, "
                         "alive, on this machine and GPU)",
                         dev->spec, cudaGetErrorString(error));
        goto out;
    }
    size = allocation_size(data);
    if (size && size != shared_size(memory->bytes)) {
        st = status_fail(
            ST_MISMATCH,
            "%s: the shared allocation has %zu bytes, but %zu (%zu in whole pages) were "
            "expected; the bridge describes another run",
            dev->spec, size, memory->bytes, shared_size(memory->bytes));
        cudaIpcCloseMemHandle(data);
        goto out;
    }
    memory->data = data;
out:
    bytes_release(&raw);
    return st;
}

static void shared_close(struct shared_memory *memory)
{
    cudaStreamSynchronize(cuda_use(memory->dev)->stream);
    if (memory->maker)
        cudaFree(memory->data);
    else
        cudaIpcCloseMemHandle(memory->data);
}

// ---- captured work -----------------------------------------------------------------------------

static bool capture_begin(struct device *dev)
{
    struct cuda_state *state = cuda_use(dev);
    cuda_enqueued(state, false);
    state->captured = NULL;
    state->capturing = cuda_ok(
        dev, cudaStreamBeginCapture(state->stream, cudaStreamCaptureModeThreadLocal), "capture");
    return state->capturing;
}

static enum status capture_end(struct device *dev, struct device_graph **ret)
{
    struct cuda_state *state = cuda_use(dev);
    cudaGraph_t graph = NULL;
    state->capturing = false;
    cuda_enqueued(state, false);
    cudaError_t error = cudaStreamEndCapture(state->stream, &graph);
    if (error != cudaSuccess) return status_of(dev, error, "ending a capture");
    struct device_graph *made = (struct device_graph *)calloc(1, sizeof *made);
    if (!made) {
        cudaGraphDestroy(graph);
        return status_fail(ST_NO_MEMORY, "no memory for a captured graph");
    }
    error = cudaGraphInstantiate(&made->exec, graph, 0);
    cudaGraphDestroy(graph);
    if (error != cudaSuccess) {
        free(made);
        return status_of(dev, error, "making a graph of captured work");
    }
    made->comm = state->captured;
    *ret = made;
    return ST_OK;
}

static void graph_launch(struct device *dev, struct device_graph *graph)
{
    struct cuda_state *state = cuda_use(dev);
    cuda_enqueued(state, false);
    cuda_ok(dev, cudaGraphLaunch(graph->exec, state->stream), "launching a graph");
    if (graph->comm) comm_call_enqueued(graph->comm, "a captured step");
}

static void graph_free(struct device_graph *graph)
{
    if (!graph) return;
    cudaGraphExecDestroy(graph->exec);
    free(graph);
}

// ---- time --------------------------------------------------------------------------------------

static void timer_start(struct device *dev)
{
    struct cuda_state *state = cuda_use(dev);
    cuda_ok(dev, cudaEventRecord(state->events[EVENT_STARTED], state->stream), "starting a timer");
}

static double timer_stop(struct device *dev)
{
    struct cuda_state *state = cuda_use(dev);
    const cudaEvent_t start = state->events[EVENT_STARTED], stop = state->events[EVENT_STOPPED];
    float ms = 0;
    if (cuda_ok(dev, cudaEventRecord(stop, state->stream), "stopping a timer") &&
        cuda_ok(dev, cudaEventSynchronize(stop), "waiting for a timer"))
        cuda_ok(dev, cudaEventElapsedTime(&ms, start, stop), "reading a timer");
    return ms;
}

static void mark_here(struct device *dev, int mark)
{
    struct cuda_state *state = cuda_use(dev);
    cuda_ok(dev, cudaEventRecord(state->events[EVENT_MARKS + mark], state->stream),
            "marking enqueued work");
}

static enum status wait_for(struct device *dev, int mark)
{
    return status_of(dev, cudaEventSynchronize(cuda_use(dev)->events[EVENT_MARKS + mark]),
                     "waiting for enqueued work");
}

const struct backend backend_cuda = {
    DEVICE_CUDA,   "cuda-ipc",  &ops_cuda,      open_at,       device_close, alloc,
    release,       memory,      reserve,        host_alloc,    host_release, copy,
    copy_2d,       fill,        sync,           shared_create, shared_open,  shared_close,
    capture_begin, capture_end, graph_launch,   graph_free,    timer_start,  timer_stop,
    mark_here,     wait_for,    copy_in_beside, call_beside,
};

// ---- arrays as the copy engine takes them ------------------------------------------------------

// Of bf16, as tiles of hopper.cuh want them.
bool tensor_map(struct device *dev, CUtensorMap *ret, const void *x, const tensor_boxes &b)
{
    typedef CUresult encode(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                            const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                            const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static const auto describe = (encode *)driver_function("cuTensorMapEncodeTiled");
    cuuint32_t ones[4] = {1, 1, 1, 1};
    const CUtensorMapSwizzle swizzle =
        b.box[0] == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
    const CUresult result =
        describe ? describe(ret, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)b.rank, (void *)x,
                            b.sizes, b.strides, b.box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                            b.promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
                 : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS) return true;
    device_fail(dev, "describing an array of rows of %llu to the copy engine: CUDA driver error %d",
                (unsigned long long)b.sizes[0], (int)result);
    return false;
}

// ---- checksums ---------------------------------------------------------------------------------

// Position-dependent sums over regions of memory. Sums are of integers, so the order of the blocks'
// additions does not matter.
#define SUM_THREADS 256
#define SUM_CHUNK   (1 << 18) // words of a region that one block sums

// Block (x, y): chunks y, y + gridDim.y, ... of region x.
__global__ void checksum_kernel(unsigned long long *sums, const unsigned char *base,
                                const uint64_t *offset, const uint64_t *bytes)
{
    grid_begin();
    const unsigned char *region = base + offset[blockIdx.x];
    uint64_t size = bytes[blockIdx.x], words = (size + 3) / 4, whole = size / 4, sum = 0;
    bool in_words = (uintptr_t)region % 4 == 0;
    for (uint64_t start = (uint64_t)blockIdx.y * SUM_CHUNK; start < words;
         start += (uint64_t)gridDim.y * SUM_CHUNK) {
        uint64_t end = start + SUM_CHUNK < words ? start + SUM_CHUNK : words;
#pragma unroll 4
        for (uint64_t j = start + threadIdx.x; j < end; j += SUM_THREADS) {
            uint32_t word = 0;
            if (in_words && j < whole)
                word = reinterpret_cast<const uint32_t *>(region)[j];
            else
                for (int b = 0; b < 4; b++)
                    if (4 * j + b < size) word |= (uint32_t)region[4 * j + b] << 8 * b;
            sum += hash_mix(word + j * HASH_SPREAD);
        }
    }
    sum = lanes_sum(sum);
    if (threadIdx.x % 32 == 0 && sum) atomicAdd(&sums[blockIdx.x], (unsigned long long)sum);
}

void cuda_checksum(struct device *dev, uint64_t *sums, const void *base, const uint64_t *offset,
                   const uint64_t *bytes, int n)
{
    if (n <= 0) return;
    struct cuda_state *state = cuda_use(dev);
    size_t list = (size_t)n * sizeof(uint64_t);
    uint64_t *work = (uint64_t *)cuda_workspace(dev, 3 * list), longest = 0;
    if (!work) return;
    for (int i = 0; i < n; i++) longest = bytes[i] > longest ? bytes[i] : longest;
    uint64_t chunks = (longest / 4 + SUM_CHUNK) / SUM_CHUNK;
    auto ok = [&](cudaError_t error) { return cuda_ok(dev, error, "checksum"); };
    auto copy = [&](void *to, const void *from, enum cudaMemcpyKind kind) {
        return ok(cudaMemcpyAsync(to, from, list, kind, state->stream));
    };
    if (!ok(cudaMemsetAsync(work, 0, list, state->stream)) ||
        !copy(work + n, offset, cudaMemcpyHostToDevice) ||
        !copy(work + 2 * n, bytes, cudaMemcpyHostToDevice))
        return;
    cuda_launch(dev, "checksum", checksum_kernel, dim3(n, chunks > 1024 ? 1024 : (unsigned)chunks),
                SUM_THREADS, 0, (unsigned long long *)work, (const unsigned char *)base,
                (const uint64_t *)(work + n), (const uint64_t *)(work + 2 * n));
    copy(sums, work, cudaMemcpyDeviceToHost);
    ok(cudaStreamSynchronize(state->stream));
}
