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
#include "kernels/cuda/matmul/experts.cuh"
#include "kernels/cuda/matmul/matmul.cuh"
#include "kernels/cuda/tensor.cuh"

#define THREADS 256
#define GROUP   8 // tiles down the result that neighbouring blocks take before the next column

// What a block computes: a tile of an expert's result.
struct tile {
    int expert, j;
    int i, i_end; // rows of the result: of all rows up to the expert's end, or of n
    int p, p_end; // the sum's range
};

// Blocks of one group share rows of L and columns of R, which then come from the L2.
__device__ __forceinline__ void place_block(int block, int columns, int &ret_down, int &ret_column)
{
    int group = block / (GROUP * columns), rest = block % (GROUP * columns);
    ret_down = group * GROUP + rest % GROUP;
    ret_column = rest / GROUP;
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

/* The block's tile of a result in tiles of (height, width). GRADIENT: of the weights, an (n, k)
 * matrix for each expert (blockIdx.y), summed over its rows; else all rows by n. */
template <bool GRADIENT, typename T, typename U>
__device__ __forceinline__ bool find_tile(tile &ret, const experts_args<T, U> &a, int height,
                                          int width)
{
    int down, column, columns = ((GRADIENT ? a.k : a.n) + width - 1) / width;
    place_block(blockIdx.x, columns, down, column);
    ret.j = column * width;
    if (GRADIENT) {
        ret.expert = blockIdx.y;
        ret.i = down * height;
        ret.i_end = a.n;
        ret.p = a.offsets[ret.expert];
        ret.p_end = a.offsets[ret.expert + 1];
        return ret.i < a.n && ret.p < ret.p_end;
    }
    expert_span rows;
    if (!find_expert_rows(rows, a.offsets, a.n_experts, down, height)) return false;
    ret.expert = rows.expert;
    ret.i = rows.start;
    ret.i_end = rows.end;
    ret.p = 0;
    ret.p_end = a.k;
    return true;
}

// Launches a kernel of tiles of (height, width) over the whole result; m: all rows.
template <bool GRADIENT, typename T, typename U>
static void launch_tiles(struct device *dev, void (*kernel)(experts_args<T, U>), int height,
                         int width, size_t shared, const experts_args<T, U> &a, int m)
{
    if (GRADIENT) {
        dim3 grid(blocks_of(ceil_div(a.n, height), ceil_div(a.k, width)), a.n_experts);
        cuda_launch(dev, "gradient of experts' weights", kernel, grid, THREADS, shared, a);
        return;
    }
    int down = expert_tiles(m, a.n_experts, height);
    cuda_launch(dev, "experts' matmuls", kernel, blocks_of(down, ceil_div(a.n, width)), THREADS,
                shared, a);
}

// ---- plain tiles -------------------------------------------------------------------------------

#define PLAIN       64 // rows and columns of a tile; a thread sums 4 x 4 of it
#define PLAIN_DEPTH 16 // of p at a time

// A thread's four elements of an operand's next tile: (i, p) for i0 <= i < i_end and p0 <= p <
// p_end.
template <bool ACROSS, typename T>
__device__ __forceinline__ void fetch(float (&ret)[4], const T *x, int64_t stride, int i0,
                                      int i_end, int p0, int p_end)
{
#pragma unroll
    for (int s = 0; s < 4; s++) {
        int at = threadIdx.x + s * THREADS;
        int i = i0 + (ACROSS ? at % PLAIN : at / PLAIN_DEPTH);
        int p = p0 + (ACROSS ? at / PLAIN : at % PLAIN_DEPTH);
        ret[s] = 0;
        if (i < i_end && p < p_end) ret[s] = to_f32(ACROSS ? x[p * stride + i] : x[i * stride + p]);
    }
}

template <bool ACROSS>
__device__ __forceinline__ void put(float (&to)[PLAIN_DEPTH][PLAIN + 4], const float (&x)[4])
{
#pragma unroll
    for (int s = 0; s < 4; s++) {
        int at = threadIdx.x + s * THREADS;
        to[ACROSS ? at / PLAIN : at % PLAIN_DEPTH][ACROSS ? at % PLAIN : at / PLAIN_DEPTH] = x[s];
    }
}

template <bool L_ACROSS, bool R_ACROSS, typename T, typename U>
__global__ void __launch_bounds__(THREADS) plain_kernel(experts_args<T, U> a)
{
    grid_begin();
    constexpr bool GRADIENT = L_ACROSS;
    __shared__ __align__(16) float left[PLAIN_DEPTH][PLAIN + 4], right[PLAIN_DEPTH][PLAIN + 4];
    tile t;
    if (!find_tile<GRADIENT>(t, a, PLAIN, PLAIN)) return;
    int columns = GRADIENT ? a.k : a.n;
    int64_t l_stride = GRADIENT ? a.n : a.k, r_stride = GRADIENT ? a.k : R_ACROSS ? a.n : a.k;
    const T *r = GRADIENT ? a.r : a.r + (int64_t)t.expert * a.n * a.k;
    U *c = GRADIENT ? a.c + (int64_t)t.expert * a.n * a.k : a.c;

    float sum[4][4] = {}, x[4], y[4];
    int i = threadIdx.x / 16 * 4, j = threadIdx.x % 16 * 4;
    fetch<L_ACROSS>(x, a.l, l_stride, t.i, t.i_end, t.p, t.p_end);
    fetch<R_ACROSS>(y, r, r_stride, t.j, columns, t.p, t.p_end);
    for (int p = t.p; p < t.p_end; p += PLAIN_DEPTH) {
        put<L_ACROSS>(left, x);
        put<R_ACROSS>(right, y);
        __syncthreads();
        fetch<L_ACROSS>(x, a.l, l_stride, t.i, t.i_end, p + PLAIN_DEPTH, t.p_end);
        fetch<R_ACROSS>(y, r, r_stride, t.j, columns, p + PLAIN_DEPTH, t.p_end);
#pragma unroll
        for (int q = 0; q < PLAIN_DEPTH; q++) {
            float u[4], v[4];
            load<float, 4>(u, &left[q][i]);
            load<float, 4>(v, &right[q][j]);
#pragma unroll
            for (int f = 0; f < 4; f++)
#pragma unroll
                for (int g = 0; g < 4; g++) sum[f][g] += u[f] * v[g];
        }
        __syncthreads();
    }
#pragma unroll
    for (int f = 0; f < 4; f++)
#pragma unroll
        for (int g = 0; g < 4; g++) {
            int row = t.i + i + f, column = t.j + j + g;
            if (row >= t.i_end || column >= columns) continue;
            U *to = c + (int64_t)row * columns + column;
            *to = from_f32<U>(GRADIENT ? to_f32(*to) + sum[f][g] : sum[f][g]);
        }
}

// ---- tiles on the tensor cores -----------------------------------------------------------------

#define WIDTH  128 // columns of a tile; 4 of the 8 warps lie side by side, 32 columns each
#define DEPTH  32  // of p in a stage
#define STAGES 4
#define PAD    8 // keeps ldmatrix free of bank conflicts

// Elements of a stage of an operand with N rows (or columns) of the result.
template <bool ACROSS, int N>
constexpr int stage_size = ACROSS ? DEPTH *(N + PAD) : N *(DEPTH + PAD);

// Starts copying a stage: entries i < i_left, p < p_left of an operand, x pointing at entry (0, 0);
// zeros for the rest. i_left, or along the rows p_left, is a multiple of 8.
template <bool ACROSS, int N>
__device__ __forceinline__ void copy_stage(bf16 *stage, const bf16 *x, int64_t stride, int i_left,
                                           int p_left)
{
    constexpr int ROWS = ACROSS ? DEPTH : N, PER_ROW = (ACROSS ? N : DEPTH) / 8;
    int rows_left = ACROSS ? p_left : i_left, left = ACROSS ? i_left : p_left;
#pragma unroll
    for (int at = threadIdx.x; at < ROWS * PER_ROW; at += THREADS) {
        int row = at / PER_ROW, column = at % PER_ROW * 8;
        bool valid = row < rows_left && column < left;
        copy16(stage + row * (PER_ROW * 8 + PAD) + column, x + (valid ? row * stride + column : 0),
               valid);
    }
}

// 16 x 16 of L from row i and place p of a stage: the left operand of an mma.
template <bool ACROSS, int N>
__device__ __forceinline__ void left_operand(uint32_t (&ret)[4], const bf16 *stage, int i, int p)
{
    int lane = threadIdx.x % 32;
    if (ACROSS)
        load_matrices_transposed(ret, stage + (p + lane % 8 + lane / 16 * 8) * (N + PAD) + i +
                                          lane / 8 % 2 * 8);
    else
        load_matrices(ret, stage + (i + lane % 16) * (DEPTH + PAD) + p + lane / 16 * 8);
}

// 16 x 16 of R: the right operands of two mma, columns j to j + 7 and j + 8 to j + 15.
template <bool ACROSS, int N>
__device__ __forceinline__ void right_operand(uint32_t (&ret)[4], const bf16 *stage, int j, int p)
{
    int lane = threadIdx.x % 32;
    if (ACROSS)
        load_matrices_transposed(ret, stage + (p + lane % 16) * (N + PAD) + j + lane / 16 * 8);
    else
        load_matrices(ret, stage + (j + lane / 16 * 8 + lane % 8) * (DEPTH + PAD) + p +
                               lane / 8 % 2 * 8);
}

template <int HEIGHT, bool L_ACROSS, bool R_ACROSS> constexpr size_t tensor_shared()
{
    return STAGES * (stage_size<L_ACROSS, HEIGHT> + stage_size<R_ACROSS, WIDTH>)*sizeof(bf16);
}

template <int HEIGHT, bool L_ACROSS, bool R_ACROSS, typename U>
__global__ void __launch_bounds__(THREADS, 2) tensor_kernel(experts_args<bf16, U> a)
{
    grid_begin();
    constexpr bool GRADIENT = L_ACROSS;
    constexpr int L_STAGE = stage_size<L_ACROSS, HEIGHT>, R_STAGE = stage_size<R_ACROSS, WIDTH>;
    constexpr int DOWN = HEIGHT / 32; // a warp has DOWN x 2 squares of 16 x 16
    extern __shared__ __align__(16) bf16 stages[];
    tile t;
    if (!find_tile<GRADIENT>(t, a, HEIGHT, WIDTH)) return;
    int columns = GRADIENT ? a.k : a.n;
    int64_t l_stride = GRADIENT ? a.n : a.k, r_stride = GRADIENT ? a.k : R_ACROSS ? a.n : a.k;
    const bf16 *r = GRADIENT ? a.r : a.r + (int64_t)t.expert * a.n * a.k;
    U *c = GRADIENT ? a.c + (int64_t)t.expert * a.n * a.k : a.c;

    auto copy = [&](int p, int slot) {
        bf16 *left = stages + slot * (L_STAGE + R_STAGE), *right = left + L_STAGE;
        if (p < t.p_end) {
            copy_stage<L_ACROSS, HEIGHT>(left,
                                         a.l + (L_ACROSS ? p * l_stride + t.i : t.i * l_stride + p),
                                         l_stride, t.i_end - t.i, t.p_end - p);
            copy_stage<R_ACROSS, WIDTH>(right,
                                        r + (R_ACROSS ? p * r_stride + t.j : t.j * r_stride + p),
                                        r_stride, columns - t.j, t.p_end - p);
        }
        copies_commit(); // an empty group keeps the count
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copy(t.p + s * DEPTH, s);

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int i0 = warp / 4 * (HEIGHT / 2), j0 = warp % 4 * (WIDTH / 4), slot = 0;
    float sum[DOWN][4][4] = {};
    for (int p = t.p; p < t.p_end; p += DEPTH) {
        copies_wait<STAGES - 2>();
        __syncthreads(); // this stage is whole, and all are done with the one before it
        copy(p + (STAGES - 1) * DEPTH, (slot + STAGES - 1) % STAGES);
        const bf16 *left = stages + slot * (L_STAGE + R_STAGE), *right = left + L_STAGE;
#pragma unroll
        for (int q = 0; q < DEPTH; q += 16) {
            uint32_t x[DOWN][4], y[2][4];
#pragma unroll
            for (int f = 0; f < DOWN; f++)
                left_operand<L_ACROSS, HEIGHT>(x[f], left, i0 + f * 16, q);
#pragma unroll
            for (int g = 0; g < 2; g++) right_operand<R_ACROSS, WIDTH>(y[g], right, j0 + g * 16, q);
#pragma unroll
            for (int f = 0; f < DOWN; f++)
#pragma unroll
                for (int g = 0; g < 4; g++)
                    mma(sum[f][g], x[f], y[g / 2][g % 2 * 2], y[g / 2][g % 2 * 2 + 1]);
        }
        slot = (slot + 1) % STAGES;
    }
#pragma unroll
    for (int f = 0; f < DOWN; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = t.i + i0 + f * 16 + h * 8 + lane / 4;
            if (row >= t.i_end) continue;
#pragma unroll
            for (int g = 0; g < 4; g++) {
                int column = t.j + j0 + g * 8 + lane % 4 * 2;
                if (column >= columns) continue;
                U *to = c + (int64_t)row * columns + column;
                float u = sum[f][g][h * 2], v = sum[f][g][h * 2 + 1];
                if (GRADIENT) {
                    u += to_f32(to[0]);
                    v += to_f32(to[1]);
                }
                store_pair(to, u, v);
            }
        }
}

// ---- launches ----------------------------------------------------------------------------------

bool experts_mma_takes(struct device *, const matmul_call &c)
{
    return c.shape->in == DT_BF16 && c.shape->n % 8 == 0 && c.shape->k % 8 == 0 &&
           aligned(16, {c.c, c.a, c.b}, {});
}

template <typename T, typename U> static experts_args<T, U> experts_args_of(const matmul_call &c)
{
    return {(U *)c.c,    (const T *)c.a, (const T *)c.b, c.offsets,
            c.n_experts, c.shape->n,     c.shape->k};
}

template <int HEIGHT, bool L_ACROSS, bool R_ACROSS, typename U>
static void launch_tensor(struct device *dev, const matmul_call &c)
{
    launch_tiles<L_ACROSS>(dev, tensor_kernel<HEIGHT, L_ACROSS, R_ACROSS, U>, HEIGHT, WIDTH,
                           tensor_shared<HEIGHT, L_ACROSS, R_ACROSS>(), experts_args_of<bf16, U>(c),
                           c.shape->m);
}

static void experts_mma(struct device *dev, const matmul_call &c)
{
    const bool tall = c.shape->m > 64 * c.n_experts, along = c.shape->trans_b;
    with_type(c.shape->out, [&](auto u) {
        using U = decltype(u);
        const auto launch =
            tall ? along ? launch_tensor<128, false, false, U> : launch_tensor<128, false, true, U>
            : along ? launch_tensor<64, false, false, U>
                    : launch_tensor<64, false, true, U>;
        launch(dev, c);
    });
}

static void experts_mma_back(struct device *dev, const matmul_call &c)
{
    launch_tensor<128, true, true, float>(dev, c);
}

template <bool L_ACROSS, bool R_ACROSS, typename T, typename U>
static void launch_plain(struct device *dev, const matmul_call &c)
{
    launch_tiles<L_ACROSS>(dev, plain_kernel<L_ACROSS, R_ACROSS, T, U>, PLAIN, PLAIN, 0,
                           experts_args_of<T, U>(c), c.shape->m);
}

static void experts_plain(struct device *dev, const matmul_call &c)
{
    const auto launch = [&](auto t, auto u) {
        using T = decltype(t);
        using U = decltype(u);
        (c.shape->trans_b ? launch_plain<false, false, T, U> : launch_plain<false, true, T, U>)(dev,
                                                                                                c);
    };
    if (c.shape->in == DT_F32)
        launch(float(), float());
    else if (c.shape->out == DT_F32)
        launch(bf16(), float());
    else
        launch(bf16(), bf16());
}

static void experts_plain_back(struct device *dev, const matmul_call &c)
{
    with_type(c.shape->in, [&](auto t) { launch_plain<true, true, decltype(t), float>(dev, c); });
}

static void experts_act_apart(struct device *dev, const matmul_call &c)
{
    cuda_matmul_experts(dev, c.x, c.a, c.b, c.offsets, c.n_experts, c.shape);
    cuda_act(dev, c.c, c.x, c.act);
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
static const op_variant experts_act_rows[] = {
    variant<matmul_call, matmul_few_gated_takes, matmul_few_gated>(
        "few_gated", "as few of matmul_experts, gated but not clamped, x not kept"),
    variant<matmul_call, otherwise, experts_act_apart>("apart",
                                                       "all else: matmul_experts, then act"),
};
static const op_variant experts_back_rows[] = {
    variant<matmul_call, experts_wgmma_takes, experts_wgmma_back>("wgmma", FOR_WGMMA),
    variant<matmul_call, experts_mma_takes, experts_mma_back>("mma", FOR_MMA),
    variant<matmul_call, otherwise, experts_plain_back>("plain", FOR_PLAIN),
};
const struct op_variants matmul_experts_variants = {OP_matmul_experts, 4, experts_rows};
const struct op_variants matmul_experts_act_variants = {OP_matmul_experts_act, 2, experts_act_rows};
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
