/* matmul_experts.cu: the matmuls of a mixture's experts and the gradients of their weights, of all
 * experts in one launch. What rows an expert has is in device memory only (`offsets`), so a grid is
 * as large as any division of the rows among the experts can need; a block finds its tile from
 * offsets and ends where there is none. A tile of the result is one block's and is summed in order.
 *
 * All three are sums over p of L(i, p) R(p, j), where each operand is stored with p along
 * its rows (a weight (n, k) in the forward pass) or across them (dy and x in the gradient):
 *   forward            i: rows of the expert, j: n, p: k     R along
 *   gradient of input  i: rows of the expert, j: n, p: k     R across
 *   gradient of weight i: n, j: k, p: rows of the expert     L and R across
 * bf16 runs on the tensor cores, in k16 order (docs/internals/numerics.md) whatever the tile: by
 * wgmma on Hopper, elsewhere in tiles that pass through shared memory in a ring of cp.async stages,
 * and, where the experts have few rows each, in matmul_small.cu; f32, and bf16 of widths or
 * addresses that do not allow 16-byte copies, on a plain tiled kernel.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/matmul/experts.cuh"
#include "kernels/cuda/matmul/matmul.cuh"
#include "kernels/cuda/matmul/tile.cuh"

// The result, its operands and their sizes: rows of all experts; of a gradient its matrices are
// (n, k).
template <typename T, typename U> struct experts_args {
    U *c;
    const T *l, *r;
    const int32_t *offsets;
    int n_experts, n, k, rows;

    experts_args(const matmul_call &call)
        : c((U *)call.c), l((const T *)call.a), r((const T *)call.b), offsets(call.shape->offsets),
          n_experts(call.shape->n_experts), n(call.shape->n), k(call.shape->k), rows(call.shape->m)
    {
        if (!call.shape->trans_a) return;
        n = call.shape->m;
        k = call.shape->n;
        rows = call.shape->k;
    }
};

// A tile of an expert's result: rows i .. i_end - 1 and columns from j on, of which a tile has the
// first, and the terms p .. p_end - 1 of their sums.
struct result_tile {
    int expert, i, i_end, j, p, p_end;
};

/* The tiles of ROWS x COLS, numbered as experts.cuh has it. GRADIENT: of the weights, an (n, k)
 * matrix for each expert that has rows, summed over these; else all rows by n. */
template <bool GRADIENT, int ROWS, typename T, typename U>
INLINE void count_tiles(int *before, const experts_args<T, U> &a)
{
    count_tiles(before, a.offsets, a.n_experts,
                [&](int rows) { return ((GRADIENT ? (rows > 0) * a.n : rows) + ROWS - 1) / ROWS; });
}

template <bool GRADIENT, int ROWS, int COLS, typename T, typename U>
INLINE result_tile numbered_tile(const int *before, const experts_args<T, U> &a, int number)
{
    int columns = ((GRADIENT ? a.k : a.n) + COLS - 1) / COLS;
    expert_tile t = find_expert_tile(before, a.n_experts, columns, number);
    int first = a.offsets[t.expert], last = a.offsets[t.expert + 1];
    if (GRADIENT) return {t.expert, t.down * ROWS, a.n, t.across * COLS, first, last};
    return {t.expert, first + t.down * ROWS, last, t.across * COLS, 0, a.k};
}

template <typename TILE, typename T, typename U>
__global__ void __launch_bounds__(TILE::threads, TILE::blocks) experts_kernel(experts_args<T, U> a)
{
    grid_begin();
    constexpr bool GRADIENT = TILE::l_across;
    extern __shared__ __align__(128) int before[]; // where the tile's stages go then
    const int columns = GRADIENT ? a.k : a.n;
    if (threadIdx.x < 32) count_tiles<GRADIENT, TILE::rows>(before, a);
    __syncthreads();
    if ((int)blockIdx.x >= before[a.n_experts] * ((columns + TILE::cols - 1) / TILE::cols)) return;
    const auto t = numbered_tile<GRADIENT, TILE::rows, TILE::cols>(before, a, blockIdx.x);
    __syncthreads();
    const int64_t matrix = (int64_t)t.expert * a.n * a.k, l_stride = GRADIENT ? a.n : a.k;
    const int64_t r_stride = TILE::r_across && !GRADIENT ? a.n : a.k;
    const T *r_at = GRADIENT ? a.r : a.r + matrix;
    const tile_operand<T> l = {a.l + (GRADIENT ? t.p * l_stride + t.i : t.i * l_stride), l_stride,
                               t.i_end - t.i};
    const tile_operand<T> r = {r_at + (TILE::r_across ? t.p * r_stride + t.j : t.j * r_stride),
                               r_stride, columns - t.j};
    U *c = a.c + (GRADIENT ? matrix : 0) + (int64_t)t.i * columns + t.j;
    typename TILE::sums sum = {};
    TILE::multiply(sum, l, r, t.p_end - t.p);
    TILE::each_pair(sum, [&](int i, int j, float x, float y) {
        if (i >= l.n || j >= r.n) return;
        const bool both = TILE::in_pairs || j + 1 < r.n;
        U *to = c + (int64_t)i * columns + j;
        if (GRADIENT) x += to_f32(to[0]);
        if (GRADIENT && both) y += to_f32(to[1]);
        if (TILE::in_pairs) {
            store_pair(to, x, y);
            return;
        }
        to[0] = from_f32<U>(x);
        if (both) to[1] = from_f32<U>(y);
    });
}

// ---- launches ----------------------------------------------------------------------------------

// Whether it is of experts, and rows of bf16 of any operand can be copied 16 bytes at a time.
static bool in_sixteens(const matmul_call &c)
{
    const struct matmul *s = c.shape;
    return s->offsets && s->in == DT_BF16 && s->n % 8 == 0 && (s->trans_a ? s->m : s->k) % 8 == 0 &&
           aligned(16, {c.c, c.a, c.b}, {});
}

// Launches over the whole result.
template <typename TILE, typename T, typename U>
static void launch_tiles(struct device *dev, const matmul_call &c)
{
    const experts_args<T, U> a(c);
    int tiles = expert_tiles(a.rows, a.n_experts, TILE::rows) * ceil_div(a.n, TILE::cols);
    if (TILE::l_across)
        tiles =
            std::min(a.rows, a.n_experts) * ceil_div(a.n, TILE::rows) * ceil_div(a.k, TILE::cols);
    const size_t shared = std::max(TILE::shared, (a.n_experts + 1) * sizeof(int));
    cuda_launch(dev, TILE::l_across ? "gradient of experts' weights" : "experts' matmuls",
                experts_kernel<TILE, T, U>, tiles, TILE::threads, shared, a);
}

template <int HEIGHT, bool L_ACROSS, bool R_ACROSS>
using tensor_tile = mma_tile<HEIGHT, 128, 2, 4, 32, 4, L_ACROSS, R_ACROSS>;

bool experts_mma(struct device *dev, const matmul_call &c)
{
    const struct matmul *s = c.shape;
    const bool tall = s->m > 64 * s->n_experts, along = s->trans_b;
    if (!in_sixteens(c)) return false;
    with_type(s->out, [&](auto u) {
        using U = decltype(u);
        (s->trans_a      ? launch_tiles<tensor_tile<128, true, true>, bf16, float>
         : tall && along ? launch_tiles<tensor_tile<128, false, false>, bf16, U>
         : tall          ? launch_tiles<tensor_tile<128, false, true>, bf16, U>
         : along         ? launch_tiles<tensor_tile<64, false, false>, bf16, U>
                         : launch_tiles<tensor_tile<64, false, true>, bf16, U>)(dev, c);
    });
    return true;
}

template <typename T, typename U> static void launch_plain(struct device *dev, const matmul_call &c)
{
    (c.shape->trans_a   ? launch_tiles<plain_tile<true, true>, T, float>
     : c.shape->trans_b ? launch_tiles<plain_tile<false, false>, T, U>
                        : launch_tiles<plain_tile<false, true>, T, U>)(dev, c);
}

void experts_plain(struct device *dev, const matmul_call &c)
{
    if (c.shape->in == DT_F32)
        launch_plain<float, float>(dev, c);
    else if (c.shape->out == DT_F32)
        launch_plain<bf16, float>(dev, c);
    else
        launch_plain<bf16, bf16>(dev, c);
}

// ---- Hopper ------------------------------------------------------------------------------------

/* Many rows, and the gradients of weights: one persistent kernel for all experts of a call.
 *
 * The work is tiles of (ROWS, columns) of the experts' results. What rows an expert has is in
 * device memory only, so every block counts the experts' tiles when it begins, and then takes every
 * gridDim.x-th of all of them. One warp keeps a ring of TMA copies ahead of the sums, past the end
 * of a tile into the next; two groups of four warps have 64 rows of the tile each. wgmma reads
 * operands along and across, and its sums are in k16 order as well.
 *
 * A stage may reach past an expert's rows, into those of the next. Where these are rows of the
 * result they are not stored; where the sum is over them (the gradient of weights) they are
 * overwritten with zeros in shared memory first. Past the end of a matrix TMA gives zeros. */
#define WIDTH            256 // columns of a tile
#define ROWS             128 // of a tile
#define DEPTH            64  // of p in a stage
#define GROUPS           2
#define THREADS          (GROUPS * 128 + 128)
#define COPIER_REGISTERS 40
#define GROUP_REGISTERS  232
#define NEXT_TILES       8           // that the copying warp may have told of: twice the stages
#define SPREAD           512         // bytes of a row on its way out
#define N_SUMS           (WIDTH / 2) // of a tile, in a thread
#define BOX              (64 * DEPTH * 2) // bytes of 64 rows or columns of a stage
#define STAGE            ((ROWS + WIDTH) / 64 * BOX)

#if HAS_WGMMA

// Copies a stage of a tile: of L, then of R. One thread's.
template <bool L_ACROSS, bool R_ACROSS>
INLINE void copy_stage(uint32_t to, uint32_t full, const CUtensorMap *l_map,
                       const CUtensorMap *r_map, const result_tile &t, int p)
{
    int matrix = L_ACROSS ? 0 : t.expert;
    if (L_ACROSS)
        unrolled<ROWS / 64>(
            [&](int b) { copy_box(to + b * BOX, l_map, t.i + b * 64, p, 0, full); });
    else
        copy_box(to, l_map, p, t.i, 0, full);
    to += ROWS / 64 * BOX;
    if (R_ACROSS)
        unrolled<WIDTH / 64>(
            [&](int b) { copy_box(to + b * BOX, r_map, t.j + b * 64, p, matrix, full); });
    else
        copy_box(to, r_map, p, t.j, matrix, full);
}

// Zeros for the rows of p from `rows` up to the next multiple of 16, in all of a stage's boxes.
template <int BOXES> INLINE void clear_rows(char *stage, int rows)
{
    int last = (rows + 15) / 16 * 16, chunks = (last - rows) * 8;
    for (int at = threadIdx.x; at < chunks * BOXES; at += GROUPS * 128) {
        int box = at / chunks, in_box = at % chunks;
        *(uint4 *)(stage + box * BOX + rows * 128 + in_box * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async();
    groups_sync<GROUPS>();
}

// A group's sums of a tile.
template <bool L_ACROSS, bool R_ACROSS>
INLINE void tile_sums(float (&sum)[N_SUMS], stage_ring &ring, char *stages, const result_tile &t,
                      int group)
{
    constexpr int BOXES = ROWS / 64 + WIDTH / 64;
    uint32_t before = 0;
    unrolled<N_SUMS>([&](int i) { sum[i] = 0; });
#pragma unroll 1
    for (int p = t.p; p < t.p_end; p += DEPTH, ring.next()) {
        uint32_t l = ring.stage() + group * BOX, r = ring.stage() + ROWS / 64 * BOX;
        uint64_t a = L_ACROSS ? operand_of_rows(l, BOX) : operand(l);
        uint64_t b = R_ACROSS ? operand_of_rows(r, BOX) : operand(r);
        barrier_wait(ring.is_full(), ring.parity);
        int steps = L_ACROSS ? min(DEPTH, t.p_end - p + 15) / 16 : DEPTH / 16;
        if (L_ACROSS && t.p_end - p < steps * 16)
            clear_rows<BOXES>(stages + (ring.stage() - ring.first), t.p_end - p);
        wgmma_fence();
        unrolled<DEPTH / 16>([&](int q) {
            if (!L_ACROSS || q < steps)
                wgmma_of<L_ACROSS, R_ACROSS>(sum, a + q * (L_ACROSS ? 128 : 2),
                                             b + q * (R_ACROSS ? 128 : 2));
        });
        wgmma_commit();
        wgmma_wait<1>();
        if (before) barrier_arrive(before);
        before = ring.is_empty();
    }
    wgmma_wait<0>();
    if (before) barrier_arrive(before);
}

// Rows that are no expert's: this group's part of the ring's protocol alone.
INLINE void skip_tile(stage_ring &ring, const result_tile &t)
{
    for (int p = t.p; p < t.p_end; p += DEPTH, ring.next()) {
        barrier_wait(ring.is_full(), ring.parity);
        barrier_arrive(ring.is_empty());
    }
}

// Copies n elements from shared memory; this thread's.
template <typename U> INLINE void bulk_store(U *to, const U *from, int n)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(n * (int)sizeof(U))
                 : "memory");
}

INLINE void bulk_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until what this thread's have read of shared memory may be overwritten.
INLINE void bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Until they are done.
INLINE void bulk_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* A warp's 16 rows of a tile go out by way of shared memory, SPREAD bytes of a row at a time, and
 * by the copy engine, while the sums of the next tile are under way. spread: the warp's own. */
template <typename U>
INLINE void store_tile(U *c, const float (&sum)[N_SUMS], char *spread, const result_tile &t,
                       int width, int row)
{
    constexpr int COLUMNS = SPREAD / sizeof(U), PITCH = COLUMNS + 8; // no bank conflicts
    int lane = threadIdx.x % 32;
    U *rows = (U *)spread;
#pragma unroll
    for (int q = 0; q < WIDTH / COLUMNS; q++) {
        bulk_wait_read();
        __syncwarp();
        unrolled<COLUMNS / 8, 2>([&](int g, int h) {
            const float *pair = &sum[(q * COLUMNS / 8 + g) * 4 + h * 2];
            store_pair(rows + (lane / 4 + h * 8) * PITCH + g * 8 + lane % 4 * 2, pair[0], pair[1]);
        });
        fence_async();
        __syncwarp();
        int column = t.j + q * COLUMNS, n = min(COLUMNS, width - column);
        if (lane < 16 && row + lane < t.i_end && n > 0)
            bulk_store(c + (int64_t)(row + lane) * width + column, rows + lane * PITCH, n);
        bulk_commit();
    }
}

/* A warp's 16 rows of a tile of a gradient are added to what is there, 8 at a time, by way of
 * shared memory, 64 columns at a time, so that a row is accessed 16 bytes a thread. (Adding by the
 * copy engine took 1.43 ms instead of 1.30: 128 experts of 1536 x 2048 and 65,536 rows, H200,
 * 2026-11-23.) spread: the warp's own. */
INLINE void add_tile(float *c, const float (&sum)[N_SUMS], char *spread, const result_tile &t,
                     int width, int row)
{
    constexpr int PITCH = 72; // no bank conflicts
    int lane = threadIdx.x % 32, column = lane % 16 * 4;
    float *rows = (float *)spread;
    c += t.j + column;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int first = row + h * 8;
        if (first >= t.i_end) return; // in eights
        float4 old[WIDTH / 64][4];
#pragma unroll
        for (int q = 0; q < WIDTH / 64; q++)
            if (t.j + q * 64 + column < width)
                unrolled<4>([&](int s) {
                    old[q][s] = *(const float4 *)(c + (int64_t)(first + s * 2 + lane / 16) * width +
                                                  q * 64);
                });
#pragma unroll
        for (int q = 0; q < WIDTH / 64; q++) {
            __syncwarp();
            unrolled<8>([&](int g) {
                store_pair(rows + lane / 4 * PITCH + g * 8 + lane % 4 * 2,
                           sum[(q * 8 + g) * 4 + h * 2], sum[(q * 8 + g) * 4 + h * 2 + 1]);
            });
            __syncwarp();
            if (t.j + q * 64 + column >= width) continue;
            unrolled<4>([&](int s) {
                int r = s * 2 + lane / 16;
                float4 x = *(const float4 *)(rows + r * PITCH + column), y = old[q][s];
                *(float4 *)(c + (int64_t)(first + r) * width + q * 64) =
                    make_float4(y.x + x.x, y.y + x.y, y.z + x.z, y.w + x.w);
            });
        }
    }
}

#endif

// Stages of the ring, and what a warp has of shared memory for a tile on its way out: rows of the
// result, or of 64 columns of a gradient.
template <bool GRADIENT> constexpr int stages_of = GRADIENT ? 4 : 3;
template <bool GRADIENT> constexpr int spread_of = GRADIENT ? 8 * 72 * 4 : 16 * (SPREAD + 32);

template <bool GRADIENT>
constexpr size_t wgmma_shared = stages_of<GRADIENT> *STAGE + GROUPS * 4 * spread_of<GRADIENT> +
                                (MAX_EXPERTS + 1) * sizeof(int);

template <bool L_ACROSS, bool R_ACROSS, typename U>
__global__ void __launch_bounds__(THREADS, 1)
    wgmma_kernel(const __grid_constant__ CUtensorMap l_map,
                 const __grid_constant__ CUtensorMap r_map, experts_args<bf16, U> a)
{
    grid_begin();
#if HAS_WGMMA
    constexpr bool GRADIENT = L_ACROSS;
    constexpr int STAGES = stages_of<GRADIENT>;
    extern __shared__ __align__(1024) char stages[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    __shared__ result_tile told[NEXT_TILES];
    char *spread = stages + STAGES * STAGE;
    int *before = (int *)(spread + GROUPS * 4 * spread_of<GRADIENT>);
    stage_ring ring = {
        shared_address(stages), STAGE, shared_address(full), shared_address(empty), STAGES, 0, 0};
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0); // known to be uniform
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, GROUPS * 128);
        }
        barriers_made();
    }
    if (warp == 0) count_tiles<GRADIENT, ROWS>(before, a);
    __syncthreads();

    int width = GRADIENT ? a.k : a.n, tiles = before[a.n_experts] * ((width + WIDTH - 1) / WIDTH);
    int mine = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    if (warp >= GROUPS * 4) {
        fewer_registers<COPIER_REGISTERS>();
        if (threadIdx.x != GROUPS * 128) return;
        for (int i = 0; i < mine; i++) {
            result_tile t =
                numbered_tile<GRADIENT, ROWS, WIDTH>(before, a, blockIdx.x + i * gridDim.x);
            told[i % NEXT_TILES] = t;
            for (int p = t.p; p < t.p_end; p += DEPTH, ring.next()) {
                barrier_wait(ring.is_empty(), ring.parity ^ 1);
                barrier_expect(ring.is_full(), STAGE);
                copy_stage<L_ACROSS, R_ACROSS>(ring.stage(), ring.is_full(), &l_map, &r_map, t, p);
            }
        }
        return;
    }
    more_registers<GROUP_REGISTERS>();
    int group = warp / 4;
    for (int i = 0; i < mine; i++) {
        barrier_wait(ring.is_full(), ring.parity);
        result_tile t = told[i % NEXT_TILES];
        if (!GRADIENT && t.i + group * 64 >= t.i_end) {
            skip_tile(ring, t);
            continue;
        }
        float sum[N_SUMS];
        tile_sums<L_ACROSS, R_ACROSS>(sum, ring, stages, t, group);
        char *own = spread + warp * spread_of<GRADIENT>;
        if constexpr (GRADIENT)
            add_tile(a.c + (int64_t)t.expert * a.n * a.k, sum, own, t, width, t.i + warp * 16);
        else
            store_tile(a.c, sum, own, t, width, t.i + warp * 16);
    }
    if (!GRADIENT) bulk_wait();
#endif
}

// n_matrices matrices (rows, columns), and boxes of box_rows by 64 columns of them.
static tensor_boxes boxes_of(int columns, int rows, int n_matrices, int box_rows)
{
    cuuint64_t pitch = (cuuint64_t)columns * 2;
    return {3,
            {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)n_matrices},
            {pitch, rows * pitch},
            {64, (cuuint32_t)box_rows, 1}};
}

template <bool L_ACROSS, bool R_ACROSS, typename U>
static void launch_wgmma(struct device *dev, const matmul_call &c)
{
    const experts_args<bf16, U> a(c);
    const int n = a.n, k = a.k, e = a.n_experts;
    CUtensorMap l_map, r_map;
    tensor_boxes of_l = L_ACROSS ? boxes_of(n, a.rows, 1, DEPTH) : boxes_of(k, a.rows, 1, ROWS);
    tensor_boxes of_r = L_ACROSS   ? boxes_of(k, a.rows, 1, DEPTH)
                        : R_ACROSS ? boxes_of(n, k, e, DEPTH)
                                   : boxes_of(k, n, e, WIDTH);
    if (!tensor_map(dev, &l_map, a.l, of_l) || !tensor_map(dev, &r_map, a.r, of_r)) return;
    cuda_launch(dev, "experts' matmuls", wgmma_kernel<L_ACROSS, R_ACROSS, U>, cuda_use(dev)->n_sms,
                THREADS, wgmma_shared<L_ACROSS>, l_map, r_map, a);
}

bool experts_wgmma(struct device *dev, const matmul_call &c)
{
    const struct matmul *s = c.shape;
    if (!on_hopper(dev) || s->n_experts > MAX_EXPERTS || !in_sixteens(c)) return false;
    with_type(s->out, [&](auto u) {
        using U = decltype(u);
        (s->trans_a   ? launch_wgmma<true, true, float>
         : s->trans_b ? launch_wgmma<false, false, U>
                      : launch_wgmma<false, true, U>)(dev, c);
    });
    return true;
}
