/* peer_sum.cu: see peer_sum.cuh. The device's thread, but for peer_sum_abort(). */
#include "kernels/cuda/peer_sum.cuh"
#include "kernels/cuda/cuda.cuh"
#include <stdio.h>
#include <stdlib.h>

#define PLACES_BYTES ((size_t)32 << 20) // of a rank: two sets of a place for each rank
#define LOOK_AFTER   1024               // tries between looks at host memory
#define CALL         65536u             // more than a call has blocks

// A word of an addend, and after each half the number of the call.
struct alignas(16) line {
    unsigned low, of_low, high, of_high;
};

struct peer_places {
    struct line *of[MAX_PEERS]; // the memory of rank r, as this GPU sees it
    unsigned long long *calls;  // of those begun, in units of CALL
    const volatile int *stop;   // host memory
    size_t room;                // lines of a place
    int rank, size;
};

struct peer_sum {
    struct device *dev;
    struct peer_places places;
    int *stop;
};

// ---- adding up ---------------------------------------------------------------------------------

template <typename T> constexpr int word_elements = 8 / (int)sizeof(T);

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

__device__ __forceinline__ void send(struct line *to, uint2 bits, unsigned number)
{
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(bits.x),
                 "r"(number), "r"(bits.y)
                 : "memory");
}

__device__ __forceinline__ uint2 receive(const struct line *from, unsigned number,
                                         const volatile int *stop)
{
    uint2 bits;
    unsigned of_low, of_high;
    for (int tries = 1;; tries++) {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits.x), "=r"(of_low), "=r"(bits.y), "=r"(of_high)
                     : "l"(from)
                     : "memory");
        if (of_low == number && of_high == number) return bits;
        if (tries % LOOK_AFTER == 0 && *stop) return bits;
    }
}

// The number of the call that this block belongs to: its blocks add CALL together, whichever of
// them comes first, and none waits for another. The number begins with 1.
__device__ __forceinline__ unsigned call_number(unsigned long long *calls)
{
    __shared__ unsigned number;
    if (threadIdx.x == 0) {
        const unsigned part = blockIdx.x == 0 ? CALL - (gridDim.x - 1) : 1;
        number = (unsigned)(atomicAdd(calls, (unsigned long long)part) / CALL) + 1;
    }
    __syncthreads();
    return number;
}

template <typename T> __global__ void sum_kernel(struct peer_places p, T *data, size_t n)
{
    grid_begin();
    const unsigned number = call_number(p.calls);
    const size_t words = (n + word_elements<T> - 1) / word_elements<T>;
    const size_t set = (number & 1) * (size_t)p.size, step = (size_t)gridDim.x * blockDim.x;
    const size_t start = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t w = start; w < words; w += step) {
        const uint2 own = word_at(data, w * word_elements<T>, n).bits;
        for (int i = 1; i < p.size; i++) {
            const int to = (p.rank + i) % p.size;
            send(p.of[to] + (set + p.rank) * p.room + w, own, number);
        }
    }
    for (size_t w = start; w < words; w += step) {
        float sum[word_elements<T>];
        const word<T> own = word_at(data, w * word_elements<T>, n);
        for (int r = 0; r < p.size; r++) {
            word<T> x = own;
            if (r != p.rank)
                x.bits = receive(p.of[p.rank] + (set + r) * p.room + w, number, p.stop);
            add_word<T>(sum, x, r == 0);
        }
        put_word(data, w * word_elements<T>, n, rounded<T>(sum));
    }
}

bool peer_sum_begin(struct peer_sum *sum, struct device *dev, void *data, size_t n, enum dtype dt)
{
    const struct peer_places *p = &sum->places;
    const size_t words = (n * dtype_size(dt) + 7) / 8;
    if (words > p->room || (uintptr_t)data % 8) return false;
    // At most a block an SM: all have begun when one of them waits.
    const int sms = cuda_use(dev)->n_sms, block = words > (size_t)sms * 128 ? 512 : 128;
    const int wanted = ceil_div((int64_t)words, block), grid = wanted < sms ? wanted : sms;
    with_type(dt, [&](auto t) {
        typedef decltype(t) T;
        cuda_launch(dev, "all_reduce", sum_kernel<T>, dim3((unsigned)grid), dim3((unsigned)block),
                    0, *p, (T *)data, n);
    });
    return true;
}

template <typename T>
__global__ void add_kernel(T *data, const T *rest, size_t n, size_t pitch, int rank, int size)
{
    grid_begin();
    const size_t step = (size_t)gridDim.x * blockDim.x * word_elements<T>;
    size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * word_elements<T>;
    for (; first < n; first += step) {
        float sum[word_elements<T>];
        for (int r = 0; r < size; r++)
            add_word<T>(sum,
                        r == rank ? word_at<T>(data, first, n)
                                  : word_at<T>(rest + (size_t)(r - (r > rank)) * pitch, first, n),
                        r == 0);
        put_word(data, first, n, rounded<T>(sum));
    }
}

void peer_sum_add(struct device *dev, void *data, const void *rest, size_t n, size_t pitch,
                  int rank, int size, enum dtype dt)
{
    const int sms = cuda_use(dev)->n_sms, wanted = ceil_div((int64_t)(n * dtype_size(dt)), 8 * 256);
    with_type(dt, [&](auto t) {
        typedef decltype(t) T;
        cuda_launch(dev, "all_reduce", add_kernel<T>,
                    dim3((unsigned)(wanted < sms * 8 ? wanted : sms * 8)), dim3(256), 0, (T *)data,
                    (const T *)rest, n, pitch, rank, size);
    });
}

// ---- opening -----------------------------------------------------------------------------------

// What a rank tells the others.
struct peer_hello {
    cudaIpcMemHandle_t handle;
    char uuid[64]; // of its GPU
    bool made;     // there is a handle
};

static enum status make(struct comm *comm, struct peer_sum **ret)
{
    struct peer_sum *sum = (struct peer_sum *)calloc(1, sizeof *sum);
    if (!sum) return status_fail(ST_NO_MEMORY, "no memory for sums of ranks");
    *ret = sum;
    sum->dev = comm->dev;
    struct peer_places *p = &sum->places;
    void *memory = NULL, *stop = NULL, *calls = NULL;
    p->rank = comm->rank;
    p->size = comm->size;
    p->room = PLACES_BYTES / sizeof(struct line) / 2 / (size_t)comm->size;
    enum status st = device_alloc(comm->dev, PLACES_BYTES, &memory);
    p->of[p->rank] = (struct line *)memory;
    if (st == ST_OK) st = device_alloc(comm->dev, sizeof *p->calls, &calls);
    p->calls = (unsigned long long *)calls;
    if (st == ST_OK) st = device_host_alloc(comm->dev, sizeof(int), &stop);
    if (st != ST_OK) return st;
    sum->stop = (int *)stop;
    *sum->stop = 0;
    p->stop = sum->stop;
    device_fill(comm->dev, memory, 0, PLACES_BYTES);
    device_fill(comm->dev, calls, 0, sizeof *p->calls);
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

// The memory of rank r. False, and why, where it cannot be written from here.
static bool reach(struct peer_sum *sum, const struct peer_hello *hello, int r, char *why,
                  size_t why_size)
{
    void *memory = NULL;
    cudaError_t error = cudaErrorInvalidDevice;
    int able = 0, device = device_of(hello->uuid), own = cuda_use(sum->dev)->index;
    if (device == own) able = 1;
    if (device >= 0 && device != own) cudaDeviceCanAccessPeer(&able, own, device);
    if (able && hello->made)
        error = cudaIpcOpenMemHandle(&memory, hello->handle, cudaIpcMemLazyEnablePeerAccess);
    cudaGetLastError();
    if (error == cudaSuccess) {
        sum->places.of[r] = (struct line *)memory;
        return true;
    }
    snprintf(why, why_size, "rank %d cannot write into the memory of rank %d's GPU: %s",
             sum->places.rank, r,
             device < 0     ? "that is of another host, or not in CUDA_VISIBLE_DEVICES"
             : !able        ? "there is no way between the two"
             : !hello->made ? "it has no CUDA IPC handle"
                            : cudaGetErrorString(error));
    return false;
}

// Opens the memory of all ranks; they tell one another whether that went well.
static enum status reach_all(struct comm *comm, struct peer_sum *sum, bool *ret_all, char *why,
                             size_t why_size)
{
    struct peer_hello own = {}, all[MAX_PEERS];
    char reached[MAX_PEERS] = {1};
    snprintf(own.uuid, sizeof own.uuid, "%s", comm->dev->uuid);
    own.made = cudaIpcGetMemHandle(&own.handle, sum->places.of[comm->rank]) == cudaSuccess;
    cudaGetLastError();
    enum status st = comm_gather_host(comm, &own, all, sizeof own);
    if (st != ST_OK) return st;
    char good = own.made;
    if (!good) snprintf(why, why_size, "rank %d has no CUDA IPC handle of its memory", comm->rank);
    for (int r = 0; r < comm->size; r++)
        if (r != comm->rank && !reach(sum, &all[r], r, why, why_size)) good = 0;
    st = comm_gather_host(comm, &good, reached, sizeof good);
    *ret_all = true;
    for (int r = 0; r < comm->size; r++) {
        if (reached[r]) continue;
        *ret_all = false;
        if (good) snprintf(why, why_size, "rank %d cannot write into another's memory", r);
    }
    return st;
}

enum status peer_sum_open(struct comm *comm, struct peer_sum **ret, char *why, size_t why_size)
{
    struct peer_sum *sum = NULL;
    bool all = false;
    if (comm->size > MAX_PEERS) {
        snprintf(why, why_size, "%d ranks, more than %d", comm->size, MAX_PEERS);
        *ret = NULL;
        return ST_OK;
    }
    enum status st = make(comm, &sum);
    if (st == ST_OK) st = reach_all(comm, sum, &all, why, why_size);
    if (st != ST_OK || !all) {
        peer_sum_free(sum);
        sum = NULL;
    }
    if (st == ST_OK) *ret = sum;
    return st;
}

void peer_sum_abort(struct peer_sum *sum)
{
    if (sum) __atomic_store_n(sum->stop, 1, __ATOMIC_RELEASE);
}

void peer_sum_free(struct peer_sum *sum)
{
    if (!sum) return;
    struct peer_places *p = &sum->places;
    cuda_use(sum->dev);
    for (int r = 0; r < p->size; r++)
        if (r != p->rank && p->of[r]) cudaIpcCloseMemHandle(p->of[r]);
    device_release(sum->dev, p->of[p->rank]);
    device_release(sum->dev, p->calls);
    device_host_release(sum->dev, sum->stop);
    free(sum);
}
