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
 * bf16 runs on the tensor cores, in tiles that pass through shared memory in a ring of cp.async
 * stages, and, where the experts have few rows each, in matmul_small.cu; f32, and bf16 of widths or
 * addresses that do not allow 16-byte copies, on a plain tiled kernel.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/matmul/experts.cuh"
#include "kernels/cuda/matmul/matmul.cuh"
#include "kernels/cuda/matmul/tile.cuh"

#define GROUP 8 // tiles down the result that neighbouring blocks take before the next column

// Blocks of one group share rows of L and columns of R, which then come from the L2.
__device__ __forceinline__ void place_block(int block, int columns, int &ret_down, int &ret_column)
{
    int group = block / (GROUP * columns), remaining = block % (GROUP * columns);
    ret_down = group * GROUP + remaining % GROUP;
    ret_column = remaining / GROUP;
}

static int blocks_of(int down, int columns)
{
    return ceil_div(down, GROUP) * GROUP * columns;
}

// The result, its operands and their sizes.
template <typename T, typename U> struct experts_args {
    U *c;
    const T *l, *r;
    const int32_t *offsets;
    int n_experts, n, k;
};

// What a block computes: a tile of an expert's result, (0, 0) of which is at c, of p_end terms.
template <typename T, typename U> struct experts_tile {
    tile_operand<T> l, r;
    U *c;
    int columns, p_end;
};

/* The block's tile. GRADIENT: of the weights, an (n, k) matrix for each expert (blockIdx.y), summed
 * over its rows; else all rows by n. */
template <typename TILE, typename T, typename U>
__device__ __forceinline__ bool find_tile(experts_tile<T, U> &ret, const experts_args<T, U> &a)
{
    constexpr bool GRADIENT = TILE::l_across;
    int down, column, expert = blockIdx.y, i, i_end = a.n, p = 0, p_end = a.k;
    const int columns = GRADIENT ? a.k : a.n;
    place_block(blockIdx.x, (columns + TILE::cols - 1) / TILE::cols, down, column);
    if (GRADIENT) {
        i = down * TILE::rows;
        p = a.offsets[expert];
        p_end = a.offsets[expert + 1];
        if (i >= a.n || p >= p_end) return false;
    } else {
        expert_span rows;
        if (!find_expert_rows(rows, a.offsets, a.n_experts, down, TILE::rows)) return false;
        expert = rows.expert;
        i = rows.start;
        i_end = rows.end;
    }
    const int j = column * TILE::cols;
    const int64_t matrix = (int64_t)expert * a.n * a.k, l_stride = GRADIENT ? a.n : a.k;
    const int64_t r_stride = TILE::r_across && !GRADIENT ? a.n : a.k;
    const T *r = GRADIENT ? a.r : a.r + matrix;
    ret.l = {a.l + (GRADIENT ? p * l_stride + i : i * l_stride), l_stride, i_end - i};
    ret.r = {r + (TILE::r_across ? p * r_stride + j : j * r_stride), r_stride, columns - j};
    ret.c = a.c + (GRADIENT ? matrix : 0) + (int64_t)i * columns + j;
    ret.columns = columns;
    ret.p_end = p_end - p;
    return true;
}

template <typename TILE, typename T, typename U>
__global__ void __launch_bounds__(TILE::threads, TILE::blocks) experts_kernel(experts_args<T, U> a)
{
    grid_begin();
    constexpr bool ADDS = TILE::l_across; // a gradient
    experts_tile<T, U> t;
    if (!find_tile<TILE>(t, a)) return;
    typename TILE::sums sum = {};
    TILE::multiply(sum, t.l, t.r, t.p_end);
    TILE::each_pair(sum, [&](int i, int j, float x, float y) {
        if (i >= t.l.n || j >= t.r.n) return;
        const bool both = TILE::in_pairs || j + 1 < t.r.n;
        U *to = t.c + (int64_t)i * t.columns + j;
        if (ADDS) x += to_f32(to[0]);
        if (ADDS && both) y += to_f32(to[1]);
        if (TILE::in_pairs) {
            store_pair(to, x, y);
            return;
        }
        to[0] = from_f32<U>(x);
        if (both) to[1] = from_f32<U>(y);
    });
}

// ---- launches ----------------------------------------------------------------------------------

bool experts_mma_takes(struct device *, const matmul_call &c)
{
    return c.shape->in == DT_BF16 && c.shape->n % 8 == 0 && c.shape->k % 8 == 0 &&
           aligned(16, {c.c, c.a, c.b}, {});
}

// Launches over the whole result.
template <typename TILE, typename T, typename U>
static void launch_tiles(struct device *dev, const matmul_call &c)
{
    const struct matmul *s = c.shape;
    const experts_args<T, U> a = {
        (U *)c.c, (const T *)c.a, (const T *)c.b, c.offsets, c.n_experts, s->n, s->k};
    dim3 grid(blocks_of(expert_tiles(s->m, c.n_experts, TILE::rows), ceil_div(s->n, TILE::cols)));
    if (TILE::l_across)
        grid = dim3(blocks_of(ceil_div(s->n, TILE::rows), ceil_div(s->k, TILE::cols)), c.n_experts);
    cuda_launch(dev, TILE::l_across ? "gradient of experts' weights" : "experts' matmuls",
                experts_kernel<TILE, T, U>, grid, TILE::threads, TILE::shared, a);
}

template <int HEIGHT, bool L_ACROSS, bool R_ACROSS>
using tensor_tile = mma_tile<HEIGHT, 128, 2, 4, 32, 4, L_ACROSS, R_ACROSS>;

static void experts_mma(struct device *dev, const matmul_call &c)
{
    const bool tall = c.shape->m > 64 * c.n_experts, along = c.shape->trans_b;
    with_type(c.shape->out, [&](auto u) {
        using U = decltype(u);
        const auto launch = tall    ? along ? launch_tiles<tensor_tile<128, false, false>, bf16, U>
                                            : launch_tiles<tensor_tile<128, false, true>, bf16, U>
                               : along ? launch_tiles<tensor_tile<64, false, false>, bf16, U>
                                    : launch_tiles<tensor_tile<64, false, true>, bf16, U>;
        launch(dev, c);
    });
}

static void experts_mma_back(struct device *dev, const matmul_call &c)
{
    launch_tiles<tensor_tile<128, true, true>, bf16, float>(dev, c);
}

template <typename T, typename U> static void launch_plain(struct device *dev, const matmul_call &c)
{
    (c.shape->trans_b ? launch_tiles<plain_tile<false, false>, T, U>
                      : launch_tiles<plain_tile<false, true>, T, U>)(dev, c);
}

static void experts_plain(struct device *dev, const matmul_call &c)
{
    if (c.shape->in == DT_F32)
        launch_plain<float, float>(dev, c);
    else if (c.shape->out == DT_F32)
        launch_plain<bf16, float>(dev, c);
    else
        launch_plain<bf16, bf16>(dev, c);
}

static void experts_plain_back(struct device *dev, const matmul_call &c)
{
    with_type(c.shape->in,
              [&](auto t) { launch_tiles<plain_tile<true, true>, decltype(t), float>(dev, c); });
}

// ---- variants ----------------------------------------------------------------------------------

#define FOR_WGMMA "bf16 on 9.0, widths are multiples of 8, up to 1,024 experts"
#define FOR_MMA   "bf16, widths are multiples of 8"
#define FOR_PLAIN "all else: f32, odd widths"

static const op_variant experts_rows[] = {
    variant<matmul_call, matmul_few_takes, matmul_few>(
        "few", "bf16 A B' on 9.0, k a multiple of 64, up to 64 rows or 32 of each expert"),
    variant<matmul_call, experts_wgmma_takes, experts_wgmma>("wgmma", FOR_WGMMA),
    variant<matmul_call, experts_mma_takes, experts_mma>("mma", FOR_MMA),
    variant<matmul_call, otherwise, experts_plain>("plain", FOR_PLAIN),
};
static const op_variant experts_back_rows[] = {
    variant<matmul_call, experts_wgmma_takes, experts_wgmma_back>("wgmma", FOR_WGMMA),
    variant<matmul_call, experts_mma_takes, experts_mma_back>("mma", FOR_MMA),
    variant<matmul_call, otherwise, experts_plain_back>("plain", FOR_PLAIN),
};
const struct op_variants matmul_experts_variants = {OP_matmul_experts, 4, experts_rows};
const struct op_variants matmul_experts_back_variants = {OP_matmul_experts_back, 3,
                                                         experts_back_rows};

static bool is_some(const struct matmul *shape, int n_experts)
{
    return shape->m > 0 && shape->n > 0 && n_experts > 0;
}

void cuda_matmul_experts(struct device *dev, void *c, const void *a, const void *b,
                         const int32_t *offsets, int n_experts, const struct matmul *shape)
{
    const matmul_call call = {c, a, b, NULL, shape, offsets, n_experts};
    if (is_some(shape, n_experts)) op_take_variant(dev, &matmul_experts_variants, &call);
}

void cuda_matmul_experts_act(struct device *dev, void *y, void *x, const void *a, const void *b,
                             const int32_t *offsets, int n_experts, const struct matmul *shape,
                             const struct act_shape *act, bool keep)
{
    const matmul_call call = {y, a, b, NULL, shape, offsets, n_experts, x, act, keep};
    if (is_some(shape, n_experts)) op_take_variant(dev, &matmul_experts_act_variants, &call);
}

void cuda_matmul_experts_back(struct device *dev, float *dw, const void *dy, const void *x,
                              const int32_t *offsets, int n_experts, const struct matmul *shape)
{
    const matmul_call call = {dw, dy, x, NULL, shape, offsets, n_experts};
    if (is_some(shape, n_experts) && shape->k > 0)
        op_take_variant(dev, &matmul_experts_back_variants, &call);
}
