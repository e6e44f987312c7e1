/* oneshot.cu: see oneshot.cuh. The device's thread, but for oneshot_abort(). */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/comm/oneshot.cuh"
#include "kernels/cuda/cuda.cuh"
#include <stdio.h>
#include <stdlib.h>

#define SLOTS_BYTES ((size_t)32 << 20) // of a rank: two sets of a slot for each rank, and flags
#define FLAGS_BYTES ((size_t)4096)
#define MAX_SHARED  4

struct shared_range {
    void *of[MAX_PEERS]; // on rank r, as this GPU sees it
    size_t bytes;
};

struct oneshot {
    struct device *dev;
    struct peer_slots slots;
    int *stop;
    struct shared_range shared[MAX_SHARED];
    int n_shared;
};

// ---- adding up ---------------------------------------------------------------------------------

template <typename T> union word {
    uint2 bits;
    T at[word_elements<T>];
};

// The word at `first`, zeros behind the end.
template <typename T>
__device__ __forceinline__ word<T> word_at(const T *data, size_t first, size_t n)
{
    word<T> w;
    if (first + word_elements<T> <= n) {
        w.bits = *reinterpret_cast<const uint2 *>(data + first);
        return w;
    }
    w.bits = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < word_elements<T>; i++)
        if (first + i < n) w.at[i] = data[first + i];
    return w;
}

template <typename T>
__device__ __forceinline__ void put_word(T *data, size_t first, size_t n, const word<T> &w)
{
    if (first + word_elements<T> <= n) {
        *reinterpret_cast<uint2 *>(data + first) = w.bits;
        return;
    }
#pragma unroll
    for (int i = 0; i < word_elements<T>; i++)
        if (first + i < n) data[first + i] = w.at[i];
}

template <typename T>
__device__ __forceinline__ void add_word(float (&sum)[word_elements<T>], const word<T> &w,
                                         bool first)
{
#pragma unroll
    for (int i = 0; i < word_elements<T>; i++)
        sum[i] = first ? to_f32(w.at[i]) : sum[i] + to_f32(w.at[i]);
}

template <typename T>
__device__ __forceinline__ word<T> rounded(const float (&sum)[word_elements<T>])
{
    word<T> w;
#pragma unroll
    for (int i = 0; i < word_elements<T>; i++) w.at[i] = from_f32<T>(sum[i]);
    return w;
}

template <typename T> __global__ void sum_kernel(struct peer_slots p, T *data, size_t n)
{
    grid_begin();
    const peer_call call = this_peer_call(p);
    const size_t words = (n + word_elements<T> - 1) / word_elements<T>;
    const size_t step = (size_t)gridDim.x * blockDim.x;
    const size_t start = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t w = start; w < words; w += step)
        send_word(p, call, w, word_at(data, w * word_elements<T>, n).bits);
    for (size_t w = start; w < words; w += step) {
        float sum[word_elements<T>];
        const word<T> own = word_at(data, w * word_elements<T>, n);
        for (int r = 0; r < p.size; r++) {
            word<T> x = own;
            if (r != p.rank) x.bits = receive_word(p, call, r, w);
            add_word<T>(sum, x, r == 0);
        }
        put_word(data, w * word_elements<T>, n, rounded<T>(sum));
    }
    end_peer_call(p);
}

const struct peer_slots *oneshot_slots(struct oneshot *sum, const void *data, size_t n,
                                       enum dtype dt)
{
    const bool fits = (n * dtype_size(dt) + 7) / 8 <= sum->slots.room && (uintptr_t)data % 8 == 0;
    return fits ? &sum->slots : NULL;
}

void oneshot_reduce(struct device *dev, const struct peer_slots *slots, void *data, size_t n,
                    enum dtype dt)
{
    // At most a block an SM: all have begun when one of them waits.
    const size_t words = (n * dtype_size(dt) + 7) / 8;
    const int sms = cuda_use(dev)->n_sms, block = words > (size_t)sms * 128 ? 512 : 128;
    const int wanted = ceil_div((int64_t)words, block), grid = wanted < sms ? wanted : sms;
    launch_typed(dt, dev, "all_reduce", sum_kernel, dim3((unsigned)grid), dim3((unsigned)block), 0,
                 *slots, data, n);
}

template <typename T>
__global__ void add_kernel(T *data, const T *others, size_t n, size_t pitch, int rank, int size)
{
    grid_begin();
    const size_t step = (size_t)gridDim.x * blockDim.x * word_elements<T>;
    size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * word_elements<T>;
    for (; first < n; first += step) {
        float sum[word_elements<T>];
        for (int r = 0; r < size; r++)
            add_word<T>(sum,
                        r == rank ? word_at<T>(data, first, n)
                                  : word_at<T>(others + (size_t)(r - (r > rank)) * pitch, first, n),
                        r == 0);
        put_word(data, first, n, rounded<T>(sum));
    }
}

void oneshot_add(struct device *dev, void *data, const void *others, size_t n, size_t pitch,
                 int rank, int size, enum dtype dt)
{
    const int sms = cuda_use(dev)->n_sms, wanted = ceil_div((int64_t)(n * dtype_size(dt)), 8 * 256);
    launch_typed(dt, dev, "all_reduce", add_kernel,
                 dim3((unsigned)(wanted < sms * 8 ? wanted : sms * 8)), dim3(256), 0, data, others,
                 n, pitch, rank, size);
}

// ---- opening -----------------------------------------------------------------------------------

// What a rank tells the others of memory of its own.
struct peer_hello {
    cudaIpcMemHandle_t handle;
    char uuid[64], name[128]; // of its GPU
    bool made;                // there is a handle
};

static enum status make(struct comm *comm, struct oneshot **ret)
{
    struct oneshot *sum = (struct oneshot *)calloc(1, sizeof *sum);
    if (!sum) return status_fail(ST_NO_MEMORY, "no memory for sums of ranks");
    *ret = sum;
    sum->dev = comm->dev;
    struct peer_slots *p = &sum->slots;
    void *memory = NULL, *stop = NULL, *calls = NULL;
    const size_t counters = sizeof *p->calls + sizeof *p->ended;
    p->rank = comm->rank;
    p->size = comm->size;
    p->room = (SLOTS_BYTES - FLAGS_BYTES) / sizeof(struct line) / 2 / (size_t)comm->size;
    enum status st = device_alloc(comm->dev, SLOTS_BYTES, &memory);
    p->of[p->rank] = (struct line *)memory;
    if (st == ST_OK) st = device_alloc(comm->dev, counters, &calls);
    p->calls = (unsigned long long *)calls;
    if (st == ST_OK) st = device_host_alloc(comm->dev, sizeof(int), &stop);
    if (st != ST_OK) return st;
    p->ended = (unsigned *)(p->calls + 1);
    sum->stop = (int *)stop;
    *sum->stop = 0;
    p->stop = sum->stop;
    device_fill(comm->dev, memory, 0, SLOTS_BYTES);
    device_fill(comm->dev, calls, 0, counters);
    return device_sync(comm->dev);
}

// The number that this process has for a GPU; -1: it sees none of that name.
static int device_of(const char *uuid)
{
    int n = 0;
    cudaGetDeviceCount(&n);
    for (int i = 0; i < n; i++) {
        char name[64];
        cudaDeviceProp prop;
        if (cudaGetDeviceProperties(&prop, i) != cudaSuccess) continue;
        cuda_uuid(&prop, name, sizeof name);
        if (strcmp(name, uuid) == 0) return i;
    }
    return -1;
}

// The memory of rank r. NULL, and why, where it cannot be written from here.
static void *reach(struct oneshot *sum, const struct peer_hello *hello, int r, char *why,
                   size_t why_size)
{
    void *memory = NULL;
    cudaError_t error = cudaErrorInvalidDevice;
    int able = 0, device = device_of(hello->uuid), own = cuda_use(sum->dev)->index;
    // Ranks plan a step's kernels each for itself, and must come to the same.
    const bool alike = strcmp(hello->name, sum->dev->name) == 0;
    if (device == own) able = 1;
    if (device >= 0 && device != own) cudaDeviceCanAccessPeer(&able, own, device);
    if (able && alike && hello->made)
        error = cudaIpcOpenMemHandle(&memory, hello->handle, cudaIpcMemLazyEnablePeerAccess);
    cudaGetLastError();
    if (error == cudaSuccess) return memory;
    snprintf(why, why_size, "rank %d cannot write into the memory of rank %d's GPU: %s",
             sum->slots.rank, r,
             device < 0     ? "that is of another host, or not in CUDA_VISIBLE_DEVICES"
             : !able        ? "there is no way between the two"
             : !alike       ? "they are of different kinds"
             : !hello->made ? "it has no CUDA IPC handle"
                            : cudaGetErrorString(error));
    return NULL;
}

// Opens what all ranks have at `own`, to `of`; they tell one another whether that went well.
static enum status reach_all(struct comm *comm, struct oneshot *sum, void *memory,
                             void *of[MAX_PEERS], bool *ret_all, char *why, size_t why_size)
{
    struct peer_hello own = {}, all[MAX_PEERS];
    char reached[MAX_PEERS] = {1};
    snprintf(own.uuid, sizeof own.uuid, "%s", comm->dev->uuid);
    snprintf(own.name, sizeof own.name, "%s", comm->dev->name);
    own.made = cudaIpcGetMemHandle(&own.handle, memory) == cudaSuccess;
    cudaGetLastError();
    of[comm->rank] = memory;
    enum status st = comm_gather_host(comm, &own, all, sizeof own);
    if (st != ST_OK) return st;
    char good = own.made;
    if (!good) snprintf(why, why_size, "rank %d has no CUDA IPC handle of its memory", comm->rank);
    for (int r = 0; r < comm->size; r++)
        if (r != comm->rank && !(of[r] = reach(sum, &all[r], r, why, why_size))) good = 0;
    st = comm_gather_host(comm, &good, reached, sizeof good);
    *ret_all = true;
    for (int r = 0; r < comm->size; r++) {
        if (reached[r]) continue;
        *ret_all = false;
        if (good) snprintf(why, why_size, "rank %d cannot write into another's memory", r);
    }
    return st;
}

static void close_all(const struct oneshot *sum, void *of[MAX_PEERS])
{
    for (int r = 0; r < sum->slots.size; r++) {
        if (r != sum->slots.rank && of[r]) cudaIpcCloseMemHandle(of[r]);
        if (r != sum->slots.rank) of[r] = NULL;
    }
}

enum status oneshot_open(struct comm *comm, struct oneshot **ret, char *why, size_t why_size)
{
    struct oneshot *sum = NULL;
    void *of[MAX_PEERS] = {};
    bool all = false;
    if (comm->size > MAX_PEERS) {
        snprintf(why, why_size, "%d ranks, more than %d", comm->size, MAX_PEERS);
        *ret = NULL;
        return ST_OK;
    }
    enum status st = make(comm, &sum);
    if (st == ST_OK) st = reach_all(comm, sum, sum->slots.of[comm->rank], of, &all, why, why_size);
    for (int r = 0; st == ST_OK && all && r < comm->size; r++) {
        sum->slots.of[r] = (struct line *)of[r];
        sum->slots.flags[r] = (unsigned *)((char *)of[r] + SLOTS_BYTES - FLAGS_BYTES);
    }
    if (st != ST_OK || !all) {
        if (sum) close_all(sum, of);
        oneshot_free(sum, st == ST_OK && comm_barrier(comm) == ST_OK);
        sum = NULL;
    }
    if (st == ST_OK) *ret = sum;
    return st;
}

enum status oneshot_share(struct comm *comm, struct oneshot *sum, void *memory, size_t bytes,
                          char *why, size_t why_size)
{
    bool all = false;
    if (sum->n_shared == MAX_SHARED) {
        snprintf(why, why_size, "ranks share %d pieces of memory already", MAX_SHARED);
        return ST_OK;
    }
    struct shared_range *range = &sum->shared[sum->n_shared];
    enum status st = reach_all(comm, sum, memory, range->of, &all, why, why_size);
    range->bytes = bytes;
    if (st != ST_OK || !all) close_all(sum, range->of);
    if (st != ST_OK || all) sum->n_shared++; // where that failed, others may have it mapped
    return st;
}

bool oneshot_shared(const struct oneshot *sum, const void *data, void *ret_of[MAX_PEERS])
{
    for (int i = 0; i < sum->n_shared; i++) {
        const struct shared_range *range = &sum->shared[i];
        const size_t at = (size_t)((const char *)data - (const char *)range->of[sum->slots.rank]);
        if (at >= range->bytes) continue;
        for (int r = 0; r < sum->slots.size; r++) ret_of[r] = (char *)range->of[r] + at;
        return true;
    }
    return false;
}

void oneshot_abort(struct oneshot *sum)
{
    if (sum) __atomic_store_n(sum->stop, 1, __ATOMIC_RELEASE);
}

void oneshot_unmap(struct oneshot *sum)
{
    cuda_use(sum->dev);
    for (int i = 0; i < sum->n_shared; i++) close_all(sum, sum->shared[i].of);
    close_all(sum, (void **)sum->slots.of);
}

void oneshot_free(struct oneshot *sum, bool common_end)
{
    if (!sum) return;
    oneshot_unmap(sum);
    if (common_end) device_release(sum->dev, sum->slots.of[sum->slots.rank]);
    device_release(sum->dev, sum->slots.calls);
    device_host_release(sum->dev, sum->stop);
    free(sum);
}
