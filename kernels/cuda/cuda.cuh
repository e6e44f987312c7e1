/* cuda.cuh: what the CUDA files share: the state behind a `struct device`, launches, conversions
 * and reductions. Private to kernels/cuda.
 *
 * Programmatic dependent launch. On sm_90 every kernel is launched with programmatic stream
 * serialization: the next kernel's blocks may become resident as soon as all of this one's have
 * begun, which hides most of the launch latency of a decode step. Order is kept because every
 * kernel begins with grid_begin(), which waits until the one before it is complete and its writes
 * are visible. What may be read before that wait is for the call to say (`early`, ops.h): the
 * weights of a matmul of few rows (matmul_small.cu), a batch's lists and earlier keys
 * (attn_few.cu). What stands between two such (norm, activation, rounding, rotation) lets the
 * second begin before it waits itself (grid_begin_early()), so that a block of the second takes the
 * place of one of the first as soon as that ends, and reads its weights while all others work.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_CUDA_CUH
#define KERNELS_CUDA_CUDA_CUH

#include "kernels/backend.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

typedef __nv_bfloat16 bf16;

// What functions of kernels are, all of which become part of their callers.
#define INLINE __device__ __forceinline__

struct comm;
struct matmul_state; // matmul.cu

// The first two take the time.
enum {
    EVENT_STARTED,
    EVENT_STOPPED,
    EVENT_COPIED,
    EVENT_MARKS,
    N_EVENTS = EVENT_MARKS + DEVICE_MARKS
};

struct cuda_state {
    int index, n_sms;
    int major;      // of the compute capability that the program's code here was compiled for
    int max_shared; // bytes of dynamic shared memory a block may ask for
    cudaStream_t stream, beside; // the second: of copies that need not wait for the first
    struct matmul_state *matmul;
    void *workspace; // grow-only; outgrown ones live on in `outgrown`, graphs may hold them
    size_t workspace_bytes;
    size_t workspace_kept; // at its beginning, by an operation that calls others (kept_workspace)
    void **outgrown;
    int n_outgrown;
    unsigned *tickets; // N_TICKETS zeros: "last block of its group" counters, left zero
    cudaEvent_t events[N_EVENTS];
    bool capturing;
    struct comm *captured; // whose calls are in what is being captured, or NULL (comm.cu)
    // Whether the last thing in the stream is a kernel of ours or of a library. Behind anything
    // else (a graph's capture begun or ended or one launched, another stream's event) the next
    // kernel does not begin early: cuda_enqueued().
    bool behind_kernel;
};

#define N_TICKETS 65536

// The state of a device, which becomes the calling thread's current one.
static inline struct cuda_state *cuda_use(struct device *dev)
{
    struct cuda_state *state = (struct cuda_state *)dev->state;
    cudaSetDevice(state->index);
    return state;
}

// Scratch memory for the operation being enqueued; the next operation may overwrite it. NULL after
// a recorded failure. 256-byte aligned.
void *cuda_workspace(struct device *dev, size_t bytes);

// "GPU-..." as nvidia-smi writes it (device.cu).
void cuda_uuid(const cudaDeviceProp *prop, char *ret, size_t size);

// Records a failed call as the device's failure; true where it succeeded.
bool cuda_ok(struct device *dev, cudaError_t error, const char *what);

// Says what was enqueued last, to all that is not launched by cuda_launch().
static inline void cuda_enqueued(struct cuda_state *state, bool kernel)
{
    state->behind_kernel = kernel;
}

static inline int ceil_div(int64_t a, int64_t b)
{
    return (int)((a + b - 1) / b);
}

// No blocks: nothing to do.
template <typename... P, typename... A>
void cuda_launch(struct device *dev, const char *what, void (*kernel)(P...), dim3 grid, dim3 block,
                 size_t shared, A... args)
{
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    struct cuda_state *state = cuda_use(dev);
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = state->stream;
    config.attrs = &early;
    // no such edge across a graph's border
    config.numAttrs = state->major >= 9 && state->behind_kernel;
    cuda_enqueued(state, true);
    cudaError_t error = cudaSuccess;
    if (shared > 48 * 1024)
        error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, P(args)...);
    if (error != cudaSuccess) cuda_ok(dev, error, what);
}

// ---- order between kernels ---------------------------------------------------------------------

INLINE void grid_wait()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

INLINE void grid_release()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The first statement of every kernel. The release comes after the wait, so that a kernel that has
// begun proves all but the kernel directly before it complete; and where that is one that releases
// first, all but the two before it.
INLINE void grid_begin()
{
    grid_wait();
    grid_release();
}

INLINE void grid_begin_early()
{
    grid_release();
    grid_wait();
}

// ---- elements ----------------------------------------------------------------------------------

// Of f32, bf16 or f16; and to f32 or bf16, to nearest even.
template <typename T> INLINE float to_f32(T x)
{
    return (float)x;
}
template <typename T> INLINE T from_f32(float x)
{
    return T(x);
}

// Loops whose indices the compiler is to know, as those of registers: f(i) for each i below N; or
// f(i, j) besides for each j below M.
template <int N, typename F> INLINE void unrolled(F f)
{
#pragma unroll
    for (int i = 0; i < N; i++) f(i);
}
template <int N, int M, typename F> INLINE void unrolled(F f)
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < M; j++) f(i, j);
}

// V elements that are loaded and stored as one access where V * sizeof(T) is 4, 8 or 16.
template <typename T, int V> struct alignas(V * sizeof(T)) pack {
    T at[V];
};

template <typename T, int V> INLINE void load(float (&ret)[V], const T *from)
{
    pack<T, V> p = *reinterpret_cast<const pack<T, V> *>(from);
    unrolled<V>([&](int i) { ret[i] = to_f32(p.at[i]); });
}

// Numbers of bf16 are rounded two at a time: one by one takes four times as long.
template <typename T, int V> INLINE pack<T, V> packed(const float (&x)[V])
{
    pack<T, V> p;
    if constexpr (sizeof(T) == 2 && V % 2 == 0)
        unrolled<V / 2>([&](int i) {
            ((__nv_bfloat162 *)&p)[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        });
    else
        unrolled<V>([&](int i) { p.at[i] = from_f32<T>(x[i]); });
    return p;
}

template <typename T, int V> INLINE void store(T *to, const float (&x)[V])
{
    *reinterpret_cast<pack<T, V> *>(to) = packed<T, V>(x);
}

// The first `count` of V elements in one access where they are all there and lie so (whole); zeros
// for the others.
template <typename T, int V> INLINE pack<T, V> load_some(const T *from, int count, bool whole)
{
    pack<T, V> p = {};
    if (whole && count >= V) return *reinterpret_cast<const pack<T, V> *>(from);
#pragma unroll
    for (int i = 0; i < V; i++)
        if (i < count) p.at[i] = from[i];
    return p;
}

template <typename T, int V>
INLINE void store_some(T *to, const pack<T, V> &p, int count, bool whole)
{
    if (whole && count >= V) {
        *reinterpret_cast<pack<T, V> *>(to) = p;
        return;
    }
#pragma unroll
    for (int i = 0; i < V; i++)
        if (i < count) to[i] = p.at[i];
}

// Elements of T in 16 bytes.
template <typename T> constexpr int wide = 16 / (int)sizeof(T);

// True where every pointer and stride (bytes) allows accesses of `bytes`.
static inline bool aligned(size_t bytes, std::initializer_list<const void *> pointers,
                           std::initializer_list<int64_t> strides)
{
    for (const void *p : pointers)
        if ((uintptr_t)p % bytes) return false;
    for (int64_t s : strides)
        if (s % (int64_t)bytes) return false;
    return true;
}

// Calls f with a value of the element type of dt: f32 or bf16.
template <typename F> static inline void with_type(enum dtype dt, F f)
{
    if (dt == DT_BF16)
        f(bf16());
    else
        f(float());
}

// Launches kernel<T>, T being the element type of dt.
#define launch_typed(dt, dev, what, kernel, ...)                                                   \
    with_type(dt, [&](auto t) { cuda_launch(dev, what, kernel<decltype(t)>, __VA_ARGS__); })

template <int N> struct number {
    static constexpr int value = N;
};

// Calls f(element, number<V>) with V = 16 bytes' worth of bf16 where it fits, else 1: what only a
// model in f32 has as f32 goes one element at a time.
template <typename F> static inline void with_type_wide(enum dtype dt, bool fits, F f)
{
    if (dt == DT_F32)
        f(float(), number<1>());
    else if (fits)
        f(bf16(), number<wide<bf16>>());
    else
        f(bf16(), number<1>());
}

// Launches kernel<T, V>; grid: may say V.
#define launch_wide(dt, fits, dev, what, kernel, grid, ...)                                        \
    with_type_wide(dt, fits, [&](auto t, auto v) {                                                 \
        constexpr int V = decltype(v)::value;                                                      \
        cuda_launch(dev, what, kernel<decltype(t), V>, grid, __VA_ARGS__);                         \
    })

// The same on rows, whose columns blocks of `threads` have, V a thread.
#define launch_columns(dt, fits, dev, what, kernel, rows, width, threads, ...)                     \
    launch_wide(dt, fits, dev, what, kernel, dim3(rows, ceil_div(width, (threads)*V)), threads, 0, \
                __VA_ARGS__)

// The expert whose entries begin last before x or with it. before: where those of each begin.
INLINE int expert_of(const int32_t *before, int n_experts, int x)
{
    int e = 0;
    for (int end = n_experts; end - e > 1;) {
        const int middle = (e + end) / 2;
        (before[middle] <= x ? e : end) = middle;
    }
    return e;
}

// ---- reductions, in a fixed order --------------------------------------------------------------

template <int LANES = 32, typename T> INLINE T lanes_sum(T x)
{
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

template <int LANES = 32> INLINE float lanes_max(float x)
{
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

// Numbers in order, the larger first, of equals that with the lower index; a NaN comes before none.
struct ranked {
    float value;
    int index;
};

INLINE bool is_before(ranked a, ranked b)
{
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// The first of the lanes', given to all.
INLINE ranked lanes_first(ranked x)
{
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        const ranked other = {__shfl_xor_sync(~0u, x.value, o), __shfl_xor_sync(~0u, x.index, o)};
        if (is_before(other, x)) x = other;
    }
    return x;
}

// The sum of this lane's and of those before it.
template <typename T> INLINE T lanes_until(T x)
{
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const T before = __shfl_up_sync(0xffffffffu, x, o);
        if (threadIdx.x % 32 >= o) x += before;
    }
    return x;
}

// Sum over the block, given to every thread. `shared` holds 32 floats; blockDim.x is a multiple
// of 32.
INLINE float block_sum(float x, float *shared)
{
    x = lanes_sum(x);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return lanes_sum(lane < warps ? shared[lane] : 0.f);
}

INLINE float block_max(float x, float *shared)
{
    x = lanes_max(x);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return lanes_max(lane < warps ? shared[lane] : -INFINITY);
}

// True in all the threads that meet() where they, who bring `own`, complete the n of `ticket`,
// which is left at zero. What the others wrote before is visible to them. first: one of them;
// shared: a number that nobody needs any more.
template <typename MEET>
INLINE bool completes(unsigned *ticket, unsigned own, unsigned n, bool first, int *shared,
                      MEET meet)
{
    __threadfence();
    meet();
    if (first) {
        bool last = atomicAdd(ticket, own) == n - own;
        if (last) *ticket = 0;
        *shared = last;
    }
    meet();
    if (*shared) __threadfence();
    return *shared;
}

// Of `n` blocks the last to arrive.
INLINE bool last_block(unsigned *ticket, unsigned n, int *shared)
{
    return completes(ticket, 1, n, threadIdx.x == 0, shared, [] { __syncthreads(); });
}

INLINE bool last_block(unsigned *ticket, unsigned n)
{
    __shared__ int last;
    return last_block(ticket, n, &last);
}

// ---- entries of the table (ops.cu) -------------------------------------------------------------

// cuda_<name> has the type of the field <name> of struct ops.
template <typename T> struct pointee;
template <typename T> struct pointee<T *> {
    typedef T type;
};
#define X(name) pointee<decltype(ops::name)>::type cuda_##name;
EACH_OP(X)
#undef X

// ---- variants (kernels/variants.h) -------------------------------------------------------------

// A row of the table of an operation whose calls are a CALL: LAUNCH says whether it takes one, or
// WHEN does.
template <typename CALL, bool (*LAUNCH)(struct device *, const CALL &)>
constexpr op_variant variant(const char *name, const char *taken)
{
    return {name, taken,
            [](struct device *dev, const void *call) { return LAUNCH(dev, *(const CALL *)call); }};
}
template <typename CALL, bool (*WHEN)(struct device *, const CALL &),
          void (*LAUNCH)(struct device *, const CALL &)>
constexpr op_variant variant(const char *name, const char *taken)
{
    return {name, taken, [](struct device *dev, const void *call) {
                const CALL &c = *(const CALL *)call;
                const bool takes = WHEN(dev, c);
                if (takes) LAUNCH(dev, c);
                return takes;
            }};
}

template <typename CALL> bool otherwise(struct device *, const CALL &)
{
    return true;
}

// The one for sm_90a: TMA and wgmma.
static inline bool on_hopper(struct device *dev)
{
    return cuda_use(dev)->major == 9;
}

// The operations that have a table.
// clang-format off
#define EACH_TABLE(X) \
    X(matmul) X(lora) X(attn) X(attn_back) X(latent_matmul)
// clang-format on
#define X(name) extern const struct op_variants name##_variants;
EACH_TABLE(X)
#undef X

// ---- for other files ---------------------------------------------------------------------------

// A kernel that ends a call of a communicator's was enqueued, or a graph with such (comm.cu).
void comm_call_enqueued(struct comm *comm, const char *what);

// out[c] += sum over p of parts[p][c], in a fixed order; parts (n, width) (rows.cu)
void cuda_add_parts(struct device *dev, float *out, const float *parts, int n, int width);

// Scratch that other operations may be enqueued with while this lives: theirs lies behind. NULL
// after a recorded failure, or of no bytes.
struct kept_workspace {
    struct device *dev;
    size_t kept_before;
    void *memory;

    kept_workspace(struct device *dev, size_t bytes)
        : dev(dev), kept_before(cuda_use(dev)->workspace_kept), memory(NULL)
    {
        bytes = (bytes + 255) / 256 * 256;
        if (bytes > 0) memory = cuda_workspace(dev, bytes);
        if (memory) cuda_use(dev)->workspace_kept += bytes;
    }
    ~kept_workspace() { cuda_use(dev)->workspace_kept = kept_before; }
};

// A matrix in e4m3 or MXFP4 (ops.h, struct matmul) as `dt`. Without scales it is as it was given.
// NULL after a recorded failure (rows.cu).
struct wide_weights {
    kept_workspace kept;
    const void *w;

    wide_weights(struct device *dev, const void *w, const int8_t *scales, int64_t rows, int cols,
                 enum dtype dt, gradient_dtype of = GRADIENT_E4M3, const uint8_t *mx_scales = NULL);
};

// A gradient in eight bits, and the weights' codes laid out along its rows, whose scales are 0: the
// operands of such a matmul (ops.h, struct matmul, rounds). NULL after a recorded failure
// (rows.cu).
struct rounded_gradient {
    int matrices;
    kept_workspace rows, row_scales, along, along_scales;

    rounded_gradient(struct device *dev, const void *a, const void *b, const struct matmul *shape);
};

// What the operations of a training step ask of cuda_workspace(), at most.
size_t cuda_attn_scratch(struct device *dev, const struct attn_shape *shape, int rows,
                         enum dtype dt); // attention.cu
size_t cuda_delta_scratch(struct device *dev, const struct delta_shape *shape,
                          int rows);                                 // delta.cu
size_t cuda_conv_scratch(const struct delta_shape *shape, int rows); // short_conv.cu
size_t cuda_norm_scratch(struct device *dev, int width);             // norm.cu
size_t cuda_column_sum_scratch(int rows, int cols);                  // rows.cu
size_t cuda_matmul_scratch(int rows, int width); // matmul.cu: of one added to bf16
// lora.cu; columns: of x or of y of all parts; dropped: bytes of a row of x, or 0
size_t cuda_lora_scratch(int rows, int max_rank, int columns, size_t dropped);

enum status matmul_state_new(struct device *dev, struct matmul_state **ret);
void matmul_state_free(struct matmul_state *state);

#endif
