/* matmul_small.cu: C = A B^T [+ bias] [+ C] for few rows of bf16 on Hopper: the matmuls of a
 * decode step, and the same for each expert of a mixture over its rows.
 *
 * The work is reading B, the weights (n, k), once, at the memory's rate, and the sums are in k16
 * order: 16 of k at a time, from the first to the last, never split (docs/numerics.md). So a row's
 * bits are those that the same row has among thousands, in cuBLASLt. A chain of k / 16 dependent
 * steps is shortest in wgmma with the weights as its N side (20 cycles a step with 16 of them, mma
 * m16n8k16 26, on one H200, 2026-11-22): a block has N = 8 J of them, as many as make one round of
 * blocks fill the device, and 64 rows of A for each of its GROUPS of four warps, of which those
 * that there are need to be right. One more warp keeps a ring of TMA copies ahead of the sums. What
 * follows the sums goes through shared memory, so that few rows are all threads' work.
 *
 * The weights do not depend on the kernel before, so they are asked for before grid_wait(): this
 * kernel's reads run under the end of its predecessor. That is safe because a running kernel proves
 * that all but its direct predecessor are complete (cuda.cuh), and `early` of the call says that
 * this one writes something else.
 *
 * On one H200 (2026-11-22), a whole decode step of Qwen2.5-1.5B at context 256, beside what it took
 * with warps that shared k (mma, at most 16 rows) and cuBLASLt's first choice: batch 1 1.50 ms
 * (1.43), 16 1.69 (1.72), 64 2.15 (2.26), 256, cuBLASLt without a split, 3.89 (3.82). Lost here:
 * the activation as part of the gate and up matmul (1.51 ms of operations at batch 1 where two
 * kernels take 1.38), clusters that share the rows of A, the next weights' first tiles fetched into
 * the L2.
 */
#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/hopper.cuh"
#include <utility>

#define MOST_ROWS    128 // of a block
#define MAX_STAGES   16
#define SHARED_APART 2048 // bytes of a block's shared memory that are not the ring's or the tile's
#define CHUNK        64   // elements of k in a tile's row

struct few_args {
    void *c; // (m, n) of U
    const bf16 *bias;
    const int32_t *offsets; // of n_experts > 0, else NULL
    int n_experts, m, n, k;
    int height; // rows of A that are copied for a block: a multiple of 8
    int stages; // of the ring
    bool add, early;
};

// What a block does: rows first .. first + rows - 1 of A times the rows of B from `weights` on.
struct few_rows {
    int first, rows, weights;
};

#if HAS_WGMMA

__device__ __forceinline__ bool find_rows(few_rows &ret, const few_args &p, int height)
{
    if (!p.offsets) {
        ret.first = blockIdx.y * height;
        ret.rows = min(height, p.m - ret.first);
        ret.weights = 0;
        return true;
    }
    expert_rows e;
    if (!find_expert_rows(e, p.offsets, p.n_experts, blockIdx.y, height)) return false;
    ret.first = e.start;
    ret.rows = min(height, e.end - e.start);
    ret.weights = e.expert * p.n;
    return true;
}

// The ring of stages in shared memory, from the view of one that goes round it. Addresses.
struct few_ring {
    uint32_t first, a_bytes, bytes; // of a stage: of A, in all
    uint32_t full, empty;           // barriers, one for each stage
    int n;
    int slot; // where it is
    uint32_t parity;

    __device__ uint32_t stage() const { return first + slot * bytes; }
    __device__ uint32_t is_full() const { return full + slot * 8; }
    __device__ uint32_t is_empty() const { return empty + slot * 8; }
    __device__ void next()
    {
        if (++slot < n) return;
        slot = 0;
        parity ^= 1;
    }
};

// One thread: keeps the ring filled for `rounds` tiles of N rows of B, each of `steps` stages.
template <int N, int CHUNKS>
__device__ void few_copy(few_ring ring, const CUtensorMap *a_map, const CUtensorMap *b_map,
                         const few_args &p, const few_rows &rows, int rounds, int steps)
{
    auto copy_b = [&](const few_ring &ring, int tile, int step) {
        uint32_t to = ring.stage() + ring.a_bytes;
        barrier_expect(ring.is_full(), ring.bytes);
        copy_box(to, b_map, rows.weights + tile * N, step * CHUNKS, ring.is_full(), L2_EVICT_FIRST);
    };
    int total = rounds * steps, ahead = p.early ? min(ring.n, total) : 0;
    int tile = blockIdx.x, step = 0;
    auto advance = [&]() {
        if (++step < steps) return;
        step = 0;
        tile += gridDim.x;
    };
    few_ring early = ring;
    for (int at = 0; at < ahead; at++, early.next(), advance()) copy_b(early, tile, step);
    grid_wait();
    tile = blockIdx.x;
    step = 0;
    for (int at = 0; at < total; at++, ring.next(), advance()) {
        if (at >= ring.n) barrier_wait(ring.is_empty(), ring.parity ^ 1);
        if (at >= ahead) copy_b(ring, tile, step);
        copy_box(ring.stage(), a_map, rows.first, step * CHUNKS, ring.is_full(), L2_EVICT_LAST);
    }
}

// A group's sums of a tile: 64 rows of A by 8 J of B. The copies of a stage may be overwritten once
// the sums of the next are under way. What a stage has past the end of k is zeros.
template <int J, int CHUNKS>
__device__ __forceinline__ void few_sums(float (&sum)[4 * J], few_ring &ring, const few_args &p,
                                         int group, int steps)
{
    uint32_t a_step = p.height * CHUNK * 2 / 16, b_step = 8 * J * CHUNK * 2 / 16, before = 0;
    bool first_lane = threadIdx.x % 32 == 0;
#pragma unroll
    for (int i = 0; i < 4 * J; i++) sum[i] = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++, ring.next()) {
        uint64_t a = operand(ring.stage() + group * 64 * CHUNK * 2);
        uint64_t b = operand(ring.stage() + ring.a_bytes);
        barrier_wait(ring.is_full(), ring.parity);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int q = 0; q < CHUNK / 16; q++)
                wgmma(sum, a + c * a_step + 2 * q, b + c * b_step + 2 * q);
        wgmma_commit();
        wgmma_wait<1>();
        if (before && first_lane) barrier_arrive(before);
        before = ring.is_empty();
    }
    wgmma_wait<0>();
    if (first_lane) barrier_arrive(before);
}

// Threads of the groups, which are all but the last warp's, meet.
template <int GROUPS> __device__ __forceinline__ void groups_sync()
{
    asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
}

// Sums of the rows that there are, from registers into a tile (rows, tile_pitch<J>).
template <int J> constexpr int tile_pitch = 8 * J + 8;

template <int J>
__device__ __forceinline__ void few_spread(float *tile, const float (&sum)[4 * J], int rows)
{
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; h++, row += 8)
        if (row < rows)
#pragma unroll
            for (int j = 0; j < J; j++)
                *(float2 *)&tile[row * tile_pitch<J> + j * 8 + lane % 4 * 2] =
                    make_float2(sum[j * 4 + h * 2], sum[j * 4 + h * 2 + 1]);
}

// What a thread stores at once: pairs of neighbours of the block's tile of c. Their biases and what
// is there before are loaded while the sums run.
#define PAIRS_AT_ONCE 4

template <typename U, int J> struct few_pairs {
    static constexpr int ACROSS = 4 * J; // pairs in a row of the tile
    int row, column; // of the tile; of c, or not below its width where there is no pair
    bf16 bias[2];    // as they lie in memory: not waited for before they are used
    U old[2];

    __device__ __forceinline__ void load(const few_args &p, const few_rows &rows, int from, int i)
    {
        row = i / ACROSS;
        column = row < rows.rows ? from + i % ACROSS * 2 : p.n;
        const U *c = (const U *)p.c + (int64_t)(rows.first + row) * p.n;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            bool there = column + k < p.n;
            if (there && p.bias) bias[k] = p.bias[column + k];
            if (there && p.add) old[k] = c[column + k];
        }
    }

    __device__ __forceinline__ void store(const float *tile, const few_args &p,
                                          const few_rows &rows, int from) const
    {
        if (column >= p.n) return;
        U *to = (U *)p.c + (int64_t)(rows.first + row) * p.n + column;
        const float *sum = tile + row * tile_pitch<J> + column - from;
        float x[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            x[k] = p.bias ? sum[k] + to_f32(bias[k]) : sum[k];
            if (p.add) x[k] = to_f32(from_f32<U>(x[k])) + to_f32(old[k]);
        }
        if (p.n % 2 == 0) {
            store_pair(to, x[0], x[1]);
            return;
        }
        to[0] = from_f32<U>(x[0]); // rows of odd width are not aligned, and end in a half pair
        if (column + 1 < p.n) to[1] = from_f32<U>(x[1]);
    }
};

#endif

// Chunks in a stage: the fewer rows it has, the more of them are worth its barriers.
template <int J, int GROUPS>
constexpr int chunks_of = J <= 3   ? 4 / GROUPS
                          : J <= 6 ? 2 / GROUPS
                                   : 1;

template <typename U, int J, int GROUPS>
__global__ void __launch_bounds__(GROUPS * 128 + 32)
    few_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
               few_args p)
{
#if HAS_WGMMA
    constexpr int N = 8 * J, CHUNKS = chunks_of<J, GROUPS>;
    extern __shared__ __align__(1024) char stages[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    few_rows rows;
    if (!p.early) grid_wait();
    if (!find_rows(rows, p, p.offsets ? p.height : 64 * GROUPS)) {
        grid_wait(); // a kernel must not end before the one it follows
        return;
    }
    uint32_t a_bytes = CHUNKS * p.height * CHUNK * 2;
    few_ring ring = {shared_address(stages),
                     a_bytes,
                     a_bytes + CHUNKS * N * CHUNK * 2,
                     shared_address(full),
                     shared_address(empty),
                     p.stages,
                     0,
                     0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; i++) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, GROUPS * 4);
        }
        barriers_made();
    }
    __syncthreads();

    int tiles = (p.n + N - 1) / N;
    int rounds = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
    int steps = (p.k / CHUNK + CHUNKS - 1) / CHUNKS;
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0); // known to be uniform
    if (warp == GROUPS * 4) {
        if (threadIdx.x % 32 == 0)
            few_copy<N, CHUNKS>(ring, &a_map, &b_map, p, rows, rounds, steps);
        return;
    }
    float *tile = (float *)(stages + p.stages * ring.bytes);
    grid_wait();
    grid_release();
    for (int i = 0; i < rounds; i++) {
        int from = (blockIdx.x + i * gridDim.x) * N, at = threadIdx.x;
        few_pairs<U, J> pairs[PAIRS_AT_ONCE];
#pragma unroll
        for (int k = 0; k < PAIRS_AT_ONCE; k++) pairs[k].load(p, rows, from, at + k * GROUPS * 128);
        float sum[4 * J];
        few_sums<J, CHUNKS>(sum, ring, p, warp / 4, steps);
        if (i > 0) groups_sync<GROUPS>(); // the tile before is stored
        few_spread<J>(tile, sum, rows.rows);
        groups_sync<GROUPS>();
#pragma unroll 1
        for (;;) {
#pragma unroll
            for (int k = 0; k < PAIRS_AT_ONCE; k++) pairs[k].store(tile, p, rows, from);
            at += PAIRS_AT_ONCE * GROUPS * 128;
            if (at >= rows.rows * pairs[0].ACROSS) break;
#pragma unroll
            for (int k = 0; k < PAIRS_AT_ONCE; k++)
                pairs[k].load(p, rows, from, at + k * GROUPS * 128);
        }
    }
#endif
}

// ---- launches ----------------------------------------------------------------------------------

// (rows, k) of bf16 as (64, rows, k / 64), copied in boxes of (64, box_rows, box_chunks).
static bool map_of(struct device *dev, CUtensorMap *ret, const void *x, int64_t rows, int k,
                   int box_rows, int box_chunks)
{
    typedef CUresult encode(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                            const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                            const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
    if (!function)
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found);
    cuuint64_t sizes[3] = {CHUNK, (cuuint64_t)rows, (cuuint64_t)(k / CHUNK)};
    cuuint64_t strides[2] = {(cuuint64_t)k * 2, CHUNK * 2};
    cuuint32_t box[3] = {CHUNK, (cuuint32_t)box_rows, (cuuint32_t)box_chunks}, ones[3] = {1, 1, 1};
    CUresult result =
        function && found == cudaDriverEntryPointSuccess
            ? ((encode *)function)(ret, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)x, sizes,
                                   strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
            : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS) return true;
    device_fail(dev, "describing a matrix of (%lld, %d) to the copy engine: CUDA driver error %d",
                (long long)rows, k, (int)result);
    return false;
}

struct few_plan {
    int j, groups, height, chunks, stages;
    dim3 grid;
    size_t shared;
};

// J, from small to large.
typedef std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 17, 18> tile_sizes;

template <int J, typename F> static void if_tile(int j, F f)
{
    if (j == J) f(number<J>());
}

template <typename F, int... J>
static void with_tile_among(int j, F f, std::integer_sequence<int, J...>)
{
    (if_tile<J>(j, f), ...);
}

// Calls f(number<j>).
template <typename F> static void with_tile(int j, F f)
{
    with_tile_among(j, f, tile_sizes());
}

template <int... J> static int least_tile(int want, std::integer_sequence<int, J...>)
{
    int least = 18;
    ((least = J >= want && J < least ? J : least), ...);
    return least;
}

static int with_chunks(int j, int groups)
{
    int chunks = 0;
    with_tile(j, [&](auto j) {
        constexpr int J = decltype(j)::value;
        chunks = groups == 1 ? chunks_of<J, 1> : chunks_of<J, 2>;
    });
    return chunks;
}

// The tile with which the fewest rounds of `blocks` blocks have all n rows of B.
static int tile_of(int n, int blocks)
{
    int eights = ceil_div(n, 8), rounds = ceil_div(eights, blocks * 18);
    return least_tile(ceil_div(eights, blocks * rounds), tile_sizes());
}

// height: rows of A a block copies; down: blocks that have different rows.
static few_plan plan_few(struct cuda_state *state, const struct matmul *shape, int height, int down)
{
    few_plan plan = {};
    int across = std::max(1, state->n_sms / down);
    plan.height = height;
    plan.groups = ceil_div(height, 64);
    plan.j = tile_of(shape->n, across);
    plan.chunks = with_chunks(plan.j, plan.groups);
    // Two blocks on an SM, so that the next kernel's copies are under way beside the sums of this
    // one; but where the rows of A are most of the copies, all of it for a deeper ring.
    size_t most = (height > 32 ? state->max_shared : state->max_shared / 2) - SHARED_APART;
    size_t tile = (size_t)height * (plan.j * 8 + 8) * sizeof(float);
    size_t a_bytes = (size_t)plan.chunks * height * CHUNK * 2;
    size_t stage = a_bytes + (size_t)plan.chunks * plan.j * 8 * CHUNK * 2;
    plan.stages = (int)std::min((size_t)MAX_STAGES, (most - tile) / stage);
    // wgmma reads 64 rows of A, past the last stage where fewer are copied
    size_t end = plan.stages * stage + tile;
    size_t read = plan.stages * stage - stage + (plan.chunks - 1) * (a_bytes / plan.chunks) +
                  (size_t)plan.groups * 64 * CHUNK * 2;
    plan.shared = std::max(end, read);
    int tiles = ceil_div(shape->n, plan.j * 8), rounds = ceil_div(tiles, across);
    plan.grid = dim3(ceil_div(tiles, rounds), down);
    return plan;
}

// p: all but what the plan and the shape say.
static void launch_few(struct device *dev, const few_plan &plan, const void *a, const void *b,
                       few_args p, const struct matmul *shape)
{
    CUtensorMap a_map, b_map;
    int64_t b_rows = (int64_t)shape->n * std::max(1, p.n_experts);
    if (!map_of(dev, &a_map, a, shape->m, shape->k, plan.height, plan.chunks) ||
        !map_of(dev, &b_map, b, b_rows, shape->k, plan.j * 8, plan.chunks))
        return;
    p.m = shape->m;
    p.n = shape->n;
    p.k = shape->k;
    p.height = plan.height;
    p.stages = plan.stages;
    p.add = shape->beta != 0;
    p.early = shape->early;
    auto launch = [&](auto kernel) {
        cuda_launch(dev, "matmul of few rows", kernel, plan.grid, plan.groups * 128 + 32,
                    plan.shared, a_map, b_map, p);
    };
    with_type(shape->out, [&](auto t) {
        with_tile(plan.j, [&](auto j) {
            using U = decltype(t);
            constexpr int J = decltype(j)::value;
            launch(plan.groups == 1 ? few_kernel<U, J, 1> : few_kernel<U, J, 2>);
        });
    });
}

static bool is_for_few(struct cuda_state *state, const void *c, const void *a, const void *b,
                       const struct matmul *shape)
{
    return state->major == 9 && shape->in == DT_BF16 && !shape->trans_a && shape->trans_b &&
           shape->k % CHUNK == 0 && shape->k > 0 && aligned(16, {a, b}, {}) && aligned(8, {c}, {});
}

bool matmul_small(struct device *dev, void *c, const void *a, const void *b, const void *bias,
                  const struct matmul *shape)
{
    struct cuda_state *state = cuda_use(dev);
    // cuBLASLt keeps the order for any number of rows, but not where C's rows are odd.
    if (!is_for_few(state, c, a, b, shape) || (shape->m > MOST_ROWS && shape->n % 2 == 0))
        return false;
    int height = std::min(ceil_div(shape->m, 8) * 8, MOST_ROWS);
    few_plan plan = plan_few(state, shape, height, ceil_div(shape->m, height));
    few_args p = {};
    p.c = c;
    p.bias = (const bf16 *)bias;
    launch_few(dev, plan, a, b, p, shape);
    return true;
}

bool matmul_small_experts(struct device *dev, void *c, const void *a, const void *b,
                          const int32_t *offsets, int n_experts, const struct matmul *shape)
{
    struct cuda_state *state = cuda_use(dev);
    if (!is_for_few(state, c, a, b, shape) || n_experts > 32768 ||
        (shape->m > 64 && shape->m > 32 * n_experts))
        return false;
    // on average an expert has fewer rows than a tile
    int height = shape->m <= std::max(8, 2 * n_experts) ? 8 : shape->m <= 8 * n_experts ? 16 : 64;
    few_plan plan = plan_few(state, shape, height, expert_tiles(shape->m, n_experts, height));
    few_args p = {};
    p.c = c;
    p.offsets = offsets;
    p.n_experts = n_experts;
    launch_few(dev, plan, a, b, p, shape);
    return true;
}
