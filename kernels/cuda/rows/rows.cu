/* rows.cu: operations that move or add rows: look-up, scatter, add, column sums, conversion,
 * rotation and storing, activations and gates. Each is one pass over its memory, with 16-byte
 * accesses where widths and addresses allow. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/e4m3.cuh"
#include "common/base/mxfp4.h"
#include "common/base/rng.h"
#include "kernels/cuda/rows/act.cuh"
#include <algorithm>
#include <limits.h>

#define THREADS 128

// A block has N rows of y, so that each thread has as many loads under way.
template <typename T, int V, int N>
__global__ void gather_kernel(T *y, const T *table, const int32_t *index, int n, int width,
                              float scale, int first, int rows)
{
    grid_begin();
    int c = (blockIdx.y * THREADS + threadIdx.x) * V, at = blockIdx.x * N;
    if (c >= width) return;
    float x[N][V] = {};
    unrolled<N>([&](int i) {
        int row = at + i < n ? index[at + i] - first : -1;
        if (row >= 0 && row < rows) load<T, V>(x[i], table + (int64_t)row * width + c);
    });
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (at + i >= n) return;
        if (scale != 1.f) unrolled<V>([&](int j) { x[i][j] *= scale; });
        store<T, V>(y + (int64_t)(at + i) * width + c, x[i]);
    }
}

// Rows that a table holds where `rows` says so, or all of them.
static int rows_held(int rows)
{
    return rows ? rows : INT_MAX;
}

void cuda_gather_rows(struct device *dev, void *y, const void *table, const struct gather_args *a)
{
    bool fits = aligned(16, {y, table}, {(int64_t)(a->width * dtype_size(a->dt))});
    with_type_wide(a->dt, fits, [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        bool many = a->n >= 4096;
        cuda_launch(dev, "gather_rows", many ? gather_kernel<T, V, 4> : gather_kernel<T, V, 1>,
                    dim3(ceil_div(a->n, many ? 4 : 1), ceil_div(a->width, THREADS * V)), THREADS, 0,
                    y, table, a->index, a->n, a->width, a->scale, a->first, rows_held(a->rows));
    });
}

/* Block i acts where position i of the sorted order begins a run of one index. It adds the run's
 * rows in order, four loads ahead of the sums. */
template <typename T, typename U>
__global__ void scatter_kernel(U *table, const T *y, const int32_t *index, const int32_t *order,
                               int n, int width, float scale, int first, int rows)
{
    grid_begin();
    int start = blockIdx.x, row = index[order[start]];
    if (start > 0 && index[order[start - 1]] == row) return;
    if (row < first || row - first >= rows) return;
    int end = start + 1;
    while (end < n && index[order[end]] == row) end++;
    for (int c = blockIdx.y * THREADS + threadIdx.x; c < width; c += gridDim.y * THREADS) {
        U *to = table + (int64_t)(row - first) * width + c;
        float sum = 0;
        int i = start;
        for (; i + 4 <= end; i += 4) {
            float x[4];
            unrolled<4>([&](int j) { x[j] = to_f32(y[(int64_t)order[i + j] * width + c]); });
            unrolled<4>([&](int j) { sum += x[j]; });
        }
        for (; i < end; i++) sum += to_f32(y[(int64_t)order[i] * width + c]);
        *to = from_f32<U>(to_f32(*to) + scale * sum);
    }
}

void cuda_scatter_add_rows(struct device *dev, void *table, enum dtype table_dt, const void *y,
                           const int32_t *order, const struct gather_args *a)
{
    with_type(a->dt, [&](auto t) {
        with_type(table_dt, [&](auto u) {
            using T = decltype(t);
            using U = decltype(u);
            cuda_launch(dev, "scatter_add_rows", scatter_kernel<T, U>,
                        dim3(a->n, ceil_div(a->width, 4 * THREADS)), THREADS, 0, table, y, a->index,
                        order, a->n, a->width, a->scale, a->first, rows_held(a->rows));
        });
    });
}

// ---- one pass over n numbers -------------------------------------------------------------------

// y[i] = f(y[i], x[i]). What f takes no notice of is not loaded. A thread has V numbers.
template <int V, typename Y, typename X, typename F>
__global__ void map_kernel(Y *y, const X *x, int64_t n, F f)
{
    grid_begin();
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i >= n) return;
    float a[V], b[V];
    load<Y, V>(a, y + i);
    load<X, V>(b, x + i);
    unrolled<V>([&](int j) { a[j] = f(a[j], b[j]); });
    store<Y, V>(y + i, a);
}

// V at a time where n and the addresses allow it.
template <int V, typename Y, typename X, typename F>
static void map(struct device *dev, const char *what, void *y, const void *x, int64_t n, F f)
{
    const bool fits = n % V == 0 && aligned(16, {y, x}, {});
    cuda_launch(dev, what, fits ? map_kernel<V, Y, X, F> : map_kernel<1, Y, X, F>,
                ceil_div(n, THREADS * (fits ? V : 1)), THREADS, 0, y, x, n, f);
}

struct plus_scaled {
    float scale;
    __device__ float operator()(float y, float x) const { return fmaf(scale, x, y); }
};

void cuda_add(struct device *dev, void *y, const void *x, int64_t n, float scale, enum dtype dt)
{
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        map<wide<T>, T, T>(dev, "add", y, x, n, plus_scaled{scale});
    });
}

struct times {
    const float *factor;
    __device__ float operator()(float x, float) const { return x * factor[0]; }
};

void cuda_multiply(struct device *dev, void *x, const float *factor, int64_t n, enum dtype dt)
{
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        map<wide<T>, T, T>(dev, "multiply", x, x, n, times{factor});
    });
}

struct converted {
    __device__ float operator()(float, float x) const { return x; }
};

void cuda_convert(struct device *dev, void *y, enum dtype y_dt, const void *x, enum dtype x_dt,
                  int64_t n)
{
    if (!convert_takes(dev, y_dt, x_dt)) return;
    with_type(y_dt, [&](auto t) {
        using Y = decltype(t);
        const auto convert = x_dt == DT_F16    ? map<4, Y, __half, converted>
                             : x_dt == DT_BF16 ? map<4, Y, bf16, converted>
                                               : map<4, Y, float, converted>;
        convert(dev, "convert", y, x, n, {});
    });
}

// The logits' soft cap and scale.
struct capped {
    float cap, scale;
    __device__ float operator()(float x, float) const
    {
        return cap > 0 ? cap * tanhf(scale * x / cap) : scale * x;
    }
};

void cuda_softcap(struct device *dev, float *x, int64_t n, float cap, float scale)
{
    map<4, float, float>(dev, "softcap", x, x, n, capped{cap, scale});
}

struct capped_back {
    float cap, scale;
    __device__ float operator()(float dx, float capped) const
    {
        const float t = cap > 0 ? capped / cap : 0.f;
        return dx * (scale * (1.f - t * t));
    }
};

void cuda_softcap_back(struct device *dev, float *dx, const float *capped, int64_t n, float cap,
                       float scale)
{
    map<4, float, float>(dev, "softcap_back", dx, capped, n, capped_back{cap, scale});
}

// ---- column sums -------------------------------------------------------------------------------

// Over blocks of SLOTS warps, which have 32 x V columns: a thread sums V of them over every so
// many-th of the block's rows, and the warps' sums are added in order.
#define SLOTS     8
#define PART_ROWS 256 // of a block; the blocks' sums are added by cuda_add_parts

// out[c] is, or (ADD) grows by, the sum of x[r][c] over the rows begin .. end - 1.
template <bool ADD, int V, typename T>
INLINE void sum_columns(float *out, const T *x, int begin, int end, int width)
{
    __shared__ float shared[SLOTS][32 * V + 1];
    const int lane = threadIdx.x % 32, slot = threadIdx.x / 32, c = (blockIdx.x * 32 + lane) * V;
    float sum[V] = {};
    if (c < width)
#pragma unroll 4
        for (int r = begin + slot; r < end; r += SLOTS) {
            float a[V];
            load<T, V>(a, x + (int64_t)r * width + c);
            unrolled<V>([&](int i) { sum[i] += a[i]; });
        }
    unrolled<V>([&](int i) { shared[slot][lane * V + i] = sum[i]; });
    __syncthreads();
    const int column = blockIdx.x * 32 * V + threadIdx.x;
    static_assert(V <= SLOTS, "a thread has one sum at most");
    if (threadIdx.x >= 32 * V || column >= width) return;
    float total = 0;
    for (int s = 0; s < SLOTS; s++) total += shared[s][threadIdx.x];
    out[column] = ADD ? out[column] + total : total;
}

template <typename T, int V>
__global__ void __launch_bounds__(SLOTS * 32)
    column_sum_kernel(float *parts, const T *x, int rows, int cols)
{
    grid_begin();
    const int begin = blockIdx.y * PART_ROWS;
    sum_columns<false, V>(parts + (int64_t)blockIdx.y * cols, x, begin,
                          min(rows, begin + PART_ROWS), cols);
}

__global__ void __launch_bounds__(SLOTS * 32)
    add_parts_kernel(float *out, const float *parts, int n, int width)
{
    grid_begin();
    sum_columns<true, 1>(out, parts, 0, n, width);
}

void cuda_add_parts(struct device *dev, float *out, const float *parts, int n, int width)
{
    cuda_launch(dev, "adding parts", add_parts_kernel, ceil_div(width, 32), SLOTS * 32, 0, out,
                parts, n, width);
}

size_t cuda_column_sum_scratch(int rows, int cols)
{
    return (size_t)ceil_div(rows, PART_ROWS) * cols * sizeof(float);
}

// ---- biases of experts' matmuls ----------------------------------------------------------------

// Over rows sorted by expert, and their gradients.

// A thread's V columns: block x is the row.
template <typename T, int V>
__global__ void bias_kernel(T *y, const T *bias, const int32_t *offsets, expert_rows s)
{
    grid_begin();
    int c = (blockIdx.y * THREADS + threadIdx.x) * V;
    const int row = blockIdx.x;
    if (c >= s.width || row < offsets[0] || row >= offsets[s.n_experts]) return;
    int e = expert_of(offsets, s.n_experts, row);
    float a[V], b[V];
    T *to = y + (int64_t)blockIdx.x * s.width + c;
    load<T, V>(a, to);
    load<T, V>(b, bias + (int64_t)e * s.width + c);
    unrolled<V>([&](int i) { a[i] += b[i]; });
    store<T, V>(to, a);
}

// Block (x, y): 32 columns of expert y.
template <typename T>
__global__ void __launch_bounds__(SLOTS * 32)
    bias_back_kernel(float *dbias, const T *dy, const int32_t *offsets, int width)
{
    grid_begin();
    sum_columns<true, 1>(dbias + (int64_t)blockIdx.y * width, dy, offsets[blockIdx.y],
                         offsets[blockIdx.y + 1], width);
}

void cuda_experts_bias(struct device *dev, void *y, const void *bias, const int32_t *offsets,
                       const struct expert_rows *s)
{
    bool fits = aligned(16, {y, bias}, {(int64_t)(s->width * dtype_size(s->dt))});
    launch_columns(s->dt, fits, dev, "experts_bias", bias_kernel, s->rows, s->width, THREADS, y,
                   bias, offsets, *s);
}

void cuda_column_sum(struct device *dev, float *out, const void *x, const int32_t *offsets,
                     const struct expert_rows *s)
{
    const int cols = s->width, n_parts = ceil_div(s->rows, PART_ROWS);
    if (s->rows <= 0 || cols <= 0) return;
    if (offsets) {
        launch_typed(s->dt, dev, "column_sum", bias_back_kernel,
                     dim3(ceil_div(cols, 32), s->n_experts), SLOTS * 32, 0, out, x, offsets, cols);
        return;
    }
    float *parts = (float *)cuda_workspace(dev, cuda_column_sum_scratch(s->rows, cols));
    if (!parts) return;
    bool fits = aligned(16, {x}, {(int64_t)(cols * dtype_size(s->dt))});
    launch_wide(s->dt, fits, dev, "column_sum", column_sum_kernel,
                dim3(ceil_div(cols, 32 * V), n_parts), SLOTS * 32, 0, parts, x, s->rows, cols);
    cuda_add_parts(dev, out, parts, n_parts, cols);
}

// ---- rows in eight bits ------------------------------------------------------------------------

// Times the powers of two.
template <typename T, int V> INLINE void scale_pack(pack<T, V> &x, const int8_t *scales)
{
    const auto scale = *(const pack<int8_t, V> *)scales;
    if constexpr (sizeof(T) == 2 && V % 4 == 0) { // as two numbers of bf16 at a time
        unrolled<V / 4>([&](int i) {
            const uint32_t four = (((const uint32_t *)&scale)[i] ^ 0x80808080u) - 0x01010101u;
            uint32_t *pairs = (uint32_t *)&x + 2 * i;
            multiply_pair(pairs[0], __byte_perm(four, 0, 0x4140) << 7);
            multiply_pair(pairs[1], __byte_perm(four, 0, 0x4342) << 7);
        });
    } else {
#pragma unroll
        for (int i = 0; i < V; i++)
            x.at[i] = from_f32<T>(to_f32(x.at[i]) * e4m3_factor(scale.at[i]));
    }
}

#define HELD_PACKS 2 // of a row, by a thread

// A gradient that is rounded (ops.h, struct matmul).
struct gradient_rows {
    const int8_t *scales; // (cols), of each expert
    const int32_t *offsets;
    int n_experts; // 0: none
    gradient_dtype dt;
};

// A block is a row's; of its columns a thread has V at a time: 16, all of whose codes lie together,
// or 1. HELD: it has HELD_PACKS times as many and no more; else it loads them twice. BACK: a row of
// a gradient.
template <typename T, int V, bool HELD, bool BACK>
__global__ void quantise_kernel(uint8_t *codes, int8_t *scales, const T *w, int cols,
                                const int8_t *of_ranks, int n_ranks, gradient_rows back)
{
    grid_begin_early();
    __shared__ unsigned shared[32];
    using packed = pack<T, V>;
    const int64_t at = (int64_t)blockIdx.x * cols;
    const int first = threadIdx.x * V, stride = blockDim.x * V;
    packed held[HELD_PACKS];
    if constexpr (BACK) {
        const int expert = expert_of(back.offsets, back.n_experts, blockIdx.x);
        back.scales += (int64_t)expert * cols;
    }
    auto from = [&](int c) {
        packed x = *(const packed *)(w + at + c);
        if constexpr (BACK) scale_pack<T, V>(x, back.scales + c);
        return x;
    };
    auto each = [&](auto f) {
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < HELD_PACKS; i++)
                if (first + i * stride < cols) f(first + i * stride, held[i]);
        } else {
            for (int c = first; c < cols; c += stride) f(c, from(c));
        }
    };
#pragma unroll
    for (int i = 0; i < HELD_PACKS && HELD; i++)
        if (first + i * stride < cols) held[i] = from(first + i * stride);
    unsigned largest = 0;
    each([&](int, const packed &x) {
        if (of_ranks) return;
        largest = max(largest, largest_of<T, V>(x));
    });
    const unsigned of_warp = __reduce_max_sync(~0u, largest), lane = threadIdx.x % 32;
    if (lane == 0) shared[threadIdx.x / 32] = of_warp;
    __syncthreads();
    int scale = row_scale(__reduce_max_sync(~0u, lane < blockDim.x / 32 ? shared[lane] : 0));
    if (of_ranks) scale = of_ranks[blockIdx.x];
    if constexpr (BACK) scale = gradient_scale((int8_t)scale, back.dt);
    for (int i = 1; i < n_ranks; i++)
        scale = max(scale, (int)of_ranks[(int64_t)i * gridDim.x + blockIdx.x]);
    if (threadIdx.x == 0) scales[blockIdx.x] = (int8_t)scale;
    if (!codes) return;
    const float down = power_of_two(-scale);
    each([&](int c, const packed &x) {
        pack<uint8_t, V> code;
        if constexpr (!BACK && V == 16 && sizeof(T) == 2) {
            uint32_t pairs[8], four[4];
            scale_down<16>(pairs, x, scale);
            unrolled<4>([&](int i) { // columns 2 i and 2 i + 8, and their neighbours
                const uint32_t low = pairs[i], high = pairs[i + 4];
                four[i] = e4m3_pair(lower_of(low), lower_of(high)) |
                          e4m3_pair(upper_of(low), upper_of(high)) << 16;
            });
            *(uint4 *)(codes + at + c) = make_uint4(four[0], four[1], four[2], four[3]);
            return;
        }
        unrolled<V>([&](int i) {
            const float y = to_f32(x.at[i]) * down;
            code.at[V > 1 ? e4m3_place(i, V) : 0] =
                BACK ? gradient_code(y, back.dt) : e4m3_from_f32(y);
        });
        *(pack<uint8_t, V> *)(codes + at + (V > 1 ? c : e4m3_place(c, cols))) = code;
    });
}

// Whether a matrix's codes, and its numbers, may be taken 16 at a time.
template <typename T> static bool in_sixteens(const void *codes, const T *w, int cols)
{
    return cols % 16 == 0 && aligned(16, {codes}, {}) && aligned(16 * sizeof(T), {w}, {});
}

template <bool BACK>
static void quantise(struct device *dev, uint8_t *codes, int8_t *scales, const void *w,
                     int64_t rows, int cols, enum dtype w_dt, const int8_t *of_ranks, int n_ranks,
                     const gradient_rows &back)
{
    if (rows <= 0 || cols <= 0) return;
    with_type(w_dt, [&](auto t) {
        using T = decltype(t);
        // Threads that hold a row. Few rows' blocks begin beside those of the kernel before, on the
        // SMs that have none of it: the more threads, the fewer of them on one.
        const int packs = rows < cuda_use(dev)->n_sms && cols <= 16 * 1024 ? 1 : HELD_PACKS;
        const int wanted = ceil_div(cols, 16 * packs * 32) * 32;
        const bool fits = in_sixteens(codes, (const T *)w, cols) && wanted <= 1024 &&
                          aligned(16, {back.scales}, {});
        const auto kernel =
            fits ? quantise_kernel<T, 16, true, BACK> : quantise_kernel<T, 1, false, BACK>;
        cuda_launch(dev, "quantise", kernel, (unsigned)rows, std::clamp(wanted, 128, 1024), 0,
                    codes, scales, (const T *)w, cols, of_ranks, n_ranks, back);
    });
}

void cuda_quantise(struct device *dev, uint8_t *codes, int8_t *scales, const void *w, int64_t rows,
                   int cols, enum dtype w_dt, const int8_t *of_ranks, int n_ranks)
{
    quantise<false>(dev, codes, scales, w, rows, cols, w_dt, of_ranks, n_ranks, {});
}

#define ACROSS_ROWS 128 // of a tile of codes that is laid out the other way,
#define ACROSS_COLS 64  // and its columns

// codes (cols, rows) of each matrix from those of w (rows, cols), and scales of 0. A block has a
// tile; of a matrix whose sizes are no multiples of 16 a thread has a code.
template <bool TILED>
__global__ void __launch_bounds__(THREADS)
    across_kernel(uint8_t *codes, int8_t *scales, const uint8_t *w, int rows, int cols)
{
    grid_begin();
    __shared__ uint4 tile[ACROSS_ROWS][ACROSS_COLS / 16];
    const int64_t matrix = (int64_t)blockIdx.z * rows * cols;
    w += matrix;
    codes += matrix;
    scales += (int64_t)blockIdx.z * cols;
    if constexpr (!TILED) {
        const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, r = i / cols, c = i % cols;
        if (r >= rows) return;
        codes[c * rows + e4m3_place(r, rows)] = w[r * cols + e4m3_place(c, cols)];
        scales[c] = 0;
    } else {
        const int first_row = blockIdx.x * ACROSS_ROWS, first_col = blockIdx.y * ACROSS_COLS;
        for (int i = threadIdx.x; i < ACROSS_ROWS * 4; i += THREADS) {
            const int r = i / 4, c = i % 4 * 16;
            if (first_row + r < rows && first_col + c < cols)
                tile[r][i % 4] =
                    *(const uint4 *)(w + (int64_t)(first_row + r) * cols + first_col + c);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < ACROSS_COLS * 8; i += THREADS) {
            const int c = i % ACROSS_COLS, r = i / ACROSS_COLS * 16;
            if (first_row + r >= rows || first_col + c >= cols) continue;
            pack<uint8_t, 16> column;
#pragma unroll
            for (int k = 0; k < 16; k++)
                column.at[e4m3_place(k, 16)] =
                    ((const uint8_t *)tile[r + k])[c / 16 * 16 + e4m3_place(c % 16, 16)];
            *(pack<uint8_t, 16> *)(codes + (int64_t)(first_col + c) * rows + first_row + r) =
                column;
            scales[first_col + c] = 0;
        }
    }
}

rounded_gradient::rounded_gradient(struct device *dev, const void *a, const void *b,
                                   const struct matmul *s)
    : matrices(std::max(1, s->n_experts)), rows(dev, (size_t)s->m * s->k), row_scales(dev, s->m),
      along(dev, (size_t)matrices * s->k * s->n), along_scales(dev, (size_t)matrices * s->n)
{
    uint8_t *to = (uint8_t *)along.memory;
    int8_t *zeros = (int8_t *)along_scales.memory;
    if (!zeros || !rows.memory || !row_scales.memory || !to) return;
    quantise<true>(dev, (uint8_t *)rows.memory, (int8_t *)row_scales.memory, a, s->m, s->k, s->in,
                   NULL, 0, {s->scales, s->offsets, s->n_experts, s->rounds});
    const bool tiled = s->n % 16 == 0 && s->k % 16 == 0 && aligned(16, {b}, {});
    const dim3 tiles(ceil_div(s->k, ACROSS_ROWS), ceil_div(s->n, ACROSS_COLS), matrices);
    cuda_launch(dev, "weights across", tiled ? across_kernel<true> : across_kernel<false>,
                tiled ? tiles : dim3(ceil_div((int64_t)s->k * s->n, THREADS), 1, matrices), THREADS,
                0, to, zeros, (const uint8_t *)b, s->k, s->n);
}

// A thread has V columns of a row of `units` times V.
template <typename T, int V>
__global__ void widen_kernel(T *w, const uint8_t *codes, const int8_t *scales, unsigned n,
                             unsigned units, gradient_dtype dt)
{
    grid_begin();
    const unsigned unit = blockIdx.x * THREADS + threadIdx.x;
    if (unit >= n) return;
    const unsigned row = unit / units, c = unit % units;
    const float factor = e4m3_factor(scales[row]);
    const int64_t at = (int64_t)row * units;
    const auto code = ((const pack<uint8_t, V> *)codes)[at + (V > 1 ? c : e4m3_place(c, units))];
    float x[V];
#pragma unroll
    for (int i = 0; i < V; i++)
        x[i] = f32_from_gradient(code.at[V > 1 ? e4m3_place(i, V) : 0], dt) * factor;
    store<T, V>(w + (at + c) * V, x);
}

// A thread has the eight numbers of four bytes.
template <typename T>
__global__ void widen_mxfp4_kernel(T *w, const uint32_t *codes, const uint8_t *scales, int64_t n)
{
    grid_begin();
    const int64_t unit = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (unit >= n) return;
    const uint32_t eight = codes[unit];
    const float factor = mxfp4_factor(scales[unit * 8 / MXFP4_BLOCK]);
    float x[8];
    unrolled<8>([&](int i) { x[i] = mxfp4_code((const uint8_t *)&eight, i) * factor; });
    store<T, 8>(w + unit * 8, x);
}

wide_weights::wide_weights(struct device *dev, const void *narrow, const int8_t *scales,
                           int64_t rows, int cols, enum dtype dt, gradient_dtype of,
                           const uint8_t *mx_scales)
    : kept(dev, scales || mx_scales ? rows * cols * dtype_size(dt) : 0),
      w(scales || mx_scales ? kept.memory : narrow)
{
    if (!kept.memory) return;
    with_type(dt, [&](auto t) {
        using T = decltype(t);
        const bool fits = !mx_scales && in_sixteens(narrow, (const T *)w, cols);
        const int v = mx_scales ? 8 : fits ? 16 : 1;
        const int64_t n = rows * cols / v;
        const auto kernel = fits ? widen_kernel<T, 16> : widen_kernel<T, 1>;
        if (mx_scales)
            cuda_launch(dev, "weights of mxfp4", widen_mxfp4_kernel<T>, ceil_div(n, THREADS),
                        THREADS, 0, (T *)w, (const uint32_t *)narrow, mx_scales, n);
        else
            cuda_launch(dev, "weights of e4m3", kernel, ceil_div(n, THREADS), THREADS, 0, (T *)w,
                        (const uint8_t *)narrow, scales, (unsigned)n, (unsigned)(cols / v), of);
    });
}

// ---- random numbers ----------------------------------------------------------------------------

// For weights that no file has: those of kernels/cpu/rows.c, but for the last bit of a double's
// logarithm and cosine. A thread has the two numbers of a block of four words.
template <typename T>
__global__ void random_normal_kernel(T *x, int64_t n, float scale, uint64_t seed, uint64_t stream)
{
    grid_begin();
    const int64_t i = 2 * ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (i >= n) return;
    const uint64_t s = stream + (uint64_t)(i / RANDOM_CHUNK);
    const uint32_t counter[4] = {(uint32_t)(i % RANDOM_CHUNK / 2), 0, (uint32_t)s,
                                 (uint32_t)(s >> 32)};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t words[4];
    philox4x32(counter, key, words);
    x[i] = from_f32<T>(scale * rng_normal_of(words[0], words[1]));
    if (i + 1 < n) x[i + 1] = from_f32<T>(scale * rng_normal_of(words[2], words[3]));
}

void cuda_random_normal(struct device *dev, void *x, int64_t n, float scale, uint64_t seed,
                        uint64_t stream, enum dtype dt)
{
    launch_typed(dt, dev, "random numbers", random_normal_kernel, ceil_div(n, 2 * THREADS), THREADS,
                 0, x, n, scale, seed, stream);
}

// ---- single logits -----------------------------------------------------------------------------

// Penalties and biases, before a token is sampled, and their way back. One block a row; a row lists
// a token once, so no two threads meet. Products and sums are rounded one by one, as on the CPU.
INLINE float adjusted(float z, const logit_row &row, const logit_entry &entry)
{
    z = __fadd_rn(z, entry.bias);
    if (entry.seen) z = z > 0.f ? __fdiv_rn(z, row.repetition) : __fmul_rn(z, row.repetition);
    z = __fsub_rn(z, __fmul_rn(row.frequency, (float)entry.count));
    if (entry.count > 0) z = __fsub_rn(z, row.presence);
    return z;
}

__global__ void adjust_kernel(float *logits, float *saved, const logit_row *rows,
                              const logit_entry *entries, int vocab, bool undo)
{
    grid_begin();
    const logit_row row = rows[blockIdx.x];
    float *z = logits + (int64_t)row.row * vocab;
    for (int e = row.first + threadIdx.x; e < row.first + row.n; e += THREADS) {
        const logit_entry entry = entries[e];
        if (entry.token < 0 || entry.token >= vocab) continue; // the host cannot look
        if (undo) {
            z[entry.token] = saved[e];
        } else {
            saved[e] = z[entry.token];
            z[entry.token] = adjusted(z[entry.token], row, entry);
        }
    }
}

void cuda_adjust_logits(struct device *dev, float *logits, float *saved,
                        const struct logit_row *rows, const struct logit_entry *entries, int n,
                        int vocab, bool undo)
{
    cuda_launch(dev, "adjust_logits", adjust_kernel, n, THREADS, 0, logits, saved, rows, entries,
                vocab, undo);
}

#define MASK_PIECE 8192 // tokens of a block

__global__ void mask_kernel(float *logits, const int32_t *row, const uint32_t *masks, int vocab,
                            int pieces)
{
    grid_begin();
    const int i = blockIdx.x / pieces, first = blockIdx.x % pieces * MASK_PIECE;
    float *z = logits + (int64_t)(row ? row[i] : i) * vocab;
    const uint32_t *mask = masks + (int64_t)i * MASK_WORDS(vocab);
    for (int t = first + threadIdx.x; t < vocab && t < first + MASK_PIECE; t += THREADS)
        if (!(mask[t / 32] >> t % 32 & 1)) z[t] = MIN_LOGIT;
}

void cuda_mask_logits(struct device *dev, float *logits, const int32_t *row, const uint32_t *masks,
                      int n, int vocab)
{
    const int pieces = ceil_div(vocab, MASK_PIECE);
    cuda_launch(dev, "mask_logits", mask_kernel, n * pieces, THREADS, 0, logits, row, masks, vocab,
                pieces);
}

// ---- rotation and storing ----------------------------------------------------------------------

// Rotary position embedding, in place, and storing keys and values into the block pool: one kernel
// for either and for both.
#define PAIRS 4 // pairs, or elements, of a thread, where they lie so

// The roundings are spelt out, so that every kernel has the same.
INLINE void rotate(float &lower, float &upper, float2 angle, float sign)
{
    float c = angle.x, s = sign * angle.y, x = lower, y = upper;
    lower = __fmaf_rn(c, x, -__fmul_rn(s, y));
    upper = __fmaf_rn(c, y, __fmul_rn(s, x));
}

// The first n heads of a row are rotated; then, with k, its keys and values are stored.
template <typename T> struct rope_work : rope_args {
    T *qkv, *k = NULL, *v = NULL; // k, v: of the layer
    int values = 0;               // elements of a row's
    int64_t slot_width = 0;       // elements between tokens of k and v

    rope_work(void *qkv, const rope_args &rope) : rope_args(rope), qkv((T *)qkv)
    {
        rot_dim = rot_dim / 2 * 2;
        if (!table) n = rot_dim = 0; // keys are stored as they are, all of them
        early = early && kv;
        if (!kv) return;
        const struct kv_layer &to = kv->layers[layer];
        k = (T *)kv->k + to.offset;
        v = (T *)kv->v + to.offset;
        values = (int)stride - (n_heads + n_kv_heads) * head_dim;
        slot_width = to.width;
    }
};

// A thread has V pairs of a head, or V elements that are stored as they are. What is read before
// the wait comes from the L2 (attention.cuh, number_at()).
template <typename T, int V> __global__ void rope_kernel(rope_work<T> w)
{
    grid_release();
    if (!w.early) grid_wait();
    const int half = w.rot_dim / 2, per_head = half / V;
    const int slot = w.k ? __ldcg(w.slots + blockIdx.x) : -1;
    const int apart = w.interleaved ? 1 : half, step = w.interleaved ? 2 : 1; // interleaved: V is 1
    int unit = blockIdx.y * THREADS + threadIdx.x;
    T *row = w.qkv + blockIdx.x * w.stride;
    T *key = w.k + slot * w.slot_width, *value = w.v + slot * w.slot_width;
    const bool rotates = unit < w.n * per_head;
    int head = 0, pair = 0;
    float angle[2 * V]; // cosines and sines by turns
    if (rotates) {
        head = unit / per_head;
        pair = unit % per_head * V;
        const int64_t position = __ldcg(w.positions + blockIdx.x);
        load<float, 2 * V>(angle, w.table + 2 * (position * half + pair));
    }
    if (w.early) grid_wait();
    if (rotates) {
        const int at = pair * step;
        T *lower = row + (int64_t)head * w.head_dim + at;
        float x[V], y[V];
        load<T, V>(x, lower);
        load<T, V>(y, lower + apart);
        unrolled<V>([&](int i) {
            rotate(x[i], y[i], make_float2(angle[2 * i], angle[2 * i + 1]), w.sign);
        });
        store<T, V>(lower, x);
        store<T, V>(lower + apart, y);
        if (head < w.n_heads || slot < 0) return;
        key += (head - w.n_heads) * w.head_dim + at;
        store<T, V>(key, x);
        store<T, V>(key + apart, y);
        return;
    }
    if (slot < 0) return;
    unit -= w.n * per_head;
    const int remaining = (w.head_dim - w.rot_dim) / V,
              kept = w.n_kv_heads * remaining; // of the keys
    const T *from = row + w.n_heads * w.head_dim;
    typedef pack<T, V> some;
    if (unit < kept) {
        const int at = unit / remaining * w.head_dim + w.rot_dim + unit % remaining * V;
        *(some *)(key + at) = *(const some *)(from + at);
    } else if ((unit - kept) * V < w.values) {
        const int at = (unit - kept) * V;
        *(some *)(value + at) = *(const some *)(from + w.n_kv_heads * w.head_dim + at);
    }
}

template <typename T> static void launch_rope(struct device *dev, const rope_work<T> &w)
{
    const int stored = w.k ? w.n_kv_heads * (w.head_dim - w.rot_dim) + w.values : 0;
    const int units = w.n * (w.rot_dim / 2) + stored; // one element, or pair, each
    const int64_t size = sizeof(T);
    const bool wide = !w.interleaved && w.rot_dim % (2 * PAIRS) == 0 &&
                      aligned(32, {w.table}, {}) &&
                      aligned(PAIRS * size, {w.qkv, w.k, w.v},
                              {w.stride * size, w.head_dim * size, w.slot_width * size});
    cuda_launch(dev, "rope and storing", wide ? rope_kernel<T, PAIRS> : rope_kernel<T, 1>,
                dim3(w.rows, ceil_div(units, (wide ? PAIRS : 1) * THREADS)), THREADS, 0, w);
}

// Heads in e4m3: of each row the last n - first of n heads become numbers that such a pool gives
// back, in place; or (STORE) the first n_rotated are rotated, in place, and then the last ones,
// keys before values, are codes and scales at the row's slot.
template <typename T> struct head_work {
    T *x;
    int64_t stride; // elements between rows
    int rows, first, n, head_dim;
    int n_rotated = 0;
    rope_work<T> store = {NULL, rope_args()};
    uint8_t *codes[KV_SCALES] = {}; // of the layer
    int8_t *scales = NULL;
    int block_size = 0;
};

// A warp has a head.
template <typename T, bool STORE> __global__ void e4m3_heads_kernel(head_work<T> w)
{
    grid_begin();
    const rope_work<T> &a = w.store;
    const int lane = threadIdx.x % 32;
    const int64_t unit = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int64_t row = unit / w.n;
    const int number = (int)(unit - row * w.n) - w.first, half = a.rot_dim / 2; // of those in e4m3
    if (row >= w.rows) return;
    T *head = w.x + row * w.stride + (int64_t)(number + w.first) * w.head_dim;
    if (number + w.first < w.n_rotated) {
        const float2 *angle = (const float2 *)a.table + (int64_t)a.positions[row] * half;
        for (int i = lane; i < half; i += 32) {
            float lower = to_f32(head[i]), upper = to_f32(head[i + half]);
            rotate(lower, upper, angle[i], 1);
            head[i] = from_f32<T>(lower);
            head[i + half] = from_f32<T>(upper);
        }
        __syncwarp();
    }
    const int slot = STORE ? a.slots[row] : 0;
    if (number < 0 || slot < 0) return;
    unsigned largest = 0;
    for (int c = lane; c < w.head_dim; c += 32)
        largest = max(largest, magnitude_bits(to_f32(head[c])));
    const int8_t scale = row_scale(__reduce_max_sync(~0u, largest));
    if (STORE) {
        const int value = number >= a.n_kv_heads, kv_head = number - value * a.n_kv_heads;
        const int block = slot / w.block_size, offset = slot - block * w.block_size;
        uint8_t *codes = w.codes[value] + slot * a.slot_width + (int64_t)kv_head * w.head_dim;
        for (int c = lane; c < w.head_dim; c += 32)
            codes[e4m3_place(c, w.head_dim)] = e4m3_code(to_f32(head[c]), scale);
        if (lane == 0)
            w.scales[kv_scale_at(block, offset, w.block_size, a.n_kv_heads, kv_head, value)] =
                scale;
    } else {
        for (int c = lane; c < w.head_dim; c += 32)
            head[c] = from_f32<T>(e4m3_rounded(to_f32(head[c]), scale));
    }
}

template <bool STORE, typename T>
static void launch_heads(struct device *dev, const head_work<T> &w)
{
    const int64_t n = (int64_t)w.rows * w.n;
    if (n <= 0) return;
    cuda_launch(dev, "keys and values in e4m3", e4m3_heads_kernel<T, STORE>,
                ceil_div(n, THREADS / 32), THREADS, 0, w);
}

template <typename T> static void store_codes(struct device *dev, const rope_work<T> &rope)
{
    const struct kv_view *kv = rope.kv;
    const struct kv_layer &layer = kv->layers[rope.layer];
    const int before = rope.n > 0 ? 0 : rope.n_heads; // heads that stay as they are
    const int n = (int)(rope.stride / rope.head_dim) - before, first = rope.n_heads - before;
    T *x = rope.qkv + (int64_t)before * rope.head_dim;
    head_work<T> w = {x, rope.stride, rope.rows, first, n, rope.head_dim, rope.n, rope};
    w.codes[0] = (uint8_t *)kv->k + layer.offset;
    w.codes[1] = (uint8_t *)kv->v + layer.offset;
    w.scales = kv->scales + layer.scales;
    w.block_size = kv->block_size;
    launch_heads<true>(dev, w);
}

void cuda_rope(struct device *dev, void *qkv, const struct rope_args *args)
{
    with_type(args->dt, [&](auto t) {
        using T = decltype(t);
        const rope_work<T> w(qkv, *args);
        if (args->kv && args->kv->dt == DT_E4M3)
            store_codes(dev, w);
        else
            launch_rope(dev, w);
        if (args->rounds)
            launch_heads<false>(dev, head_work<T>{w.qkv, w.stride, w.rows, 0, args->n, w.head_dim});
    });
}

// ---- activations and gates ----------------------------------------------------------------------

// Gated (SwiGLU, GeGLU, a gate beside a value) and plain, and their gradients. One pass, 16-byte
// accesses; the kind is a run-time number, for the loads bound these. Their shapes are laid out
// (backend.h).

INLINE float open_to(float x, act_kind kind)
{
    if (kind == ACT_LINEAR) return x;
    return kind == ACT_SIGMOID ? sigmoid(x) : activate(x, kind);
}

INLINE float derivative(float x, act_kind kind)
{
    if (kind == ACT_SILU) {
        float s = sigmoid(x);
        return s * (1.f + x * (1.f - s));
    }
    if (kind == ACT_GELU_TANH) {
        float s = sigmoid(gelu_tanh_2u(x));
        return s + x * s * (1.f - s) * 2.f * 0.7978845608f * (1.f + 3.f * 0.044715f * x * x);
    }
    if (kind == ACT_RELU2) return x > 0.f ? 2.f * x : 0.f;
    if (kind == ACT_RELU) return x > 0.f;
    if (kind == ACT_LINEAR) return 1.f;
    if (kind == ACT_SIGMOID) return sigmoid(x) * (1.f - sigmoid(x));
    return 0.5f * (1.f + erff(x * 0.70710678f)) + x * 0.3989422804f * expf(-0.5f * x * x);
}

// Calls f(element, number<V>, blocks, threads) with blocks of as many threads as a row has groups
// of V columns, and of several rows where these are few and rows many.
template <typename F>
static void with_act(const act_shape &s, std::initializer_list<const void *> arrays, F f)
{
    const int64_t e = (int64_t)dtype_size(s.dt);
    const bool fits = aligned(16, arrays, {s.width * e, s.gate_stride * e, s.up_stride * e});
    if (s.rows <= 0 || s.width <= 0) return;
    with_type_wide(s.dt, fits, [&](auto t, auto v) {
        const int units = ceil_div(s.width, decltype(v)::value);
        const int across = std::min(THREADS, ceil_div(units, 32) * 32);
        const int rows = s.rows >= 4096 ? 4 * THREADS / across : 1;
        f(t, v, dim3(ceil_div(s.rows, rows), ceil_div(units, across)), dim3(across, rows));
    });
}

// Where a thread's V columns are; false where there are none.
template <int V> INLINE bool act_place(int64_t &ret_row, int &ret_column, const act_shape &s)
{
    ret_row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    ret_column = (blockIdx.y * blockDim.x + threadIdx.x) * V;
    return ret_row < s.rows && ret_column < s.width;
}

template <typename T, int V> __global__ void act_kernel(T *y, const T *x, act_shape s)
{
    grid_begin_early();
    int64_t row;
    int c;
    if (!act_place<V>(row, c, s)) return;
    float gate[V], up[V];
    load<T, V>(gate, x + row * s.gate_stride + c);
    if (s.up) load<T, V>(up, (const T *)s.up + row * s.up_stride + c);
#pragma unroll
    for (int i = 0; i < V; i++)
        gate[i] = s.kind == ACT_CLAMPED ? clamped_pair(gate[i], up[i], s).value()
                                        : open_to(gate[i], s.kind) * (s.up ? up[i] : 1.f);
    store<T, V>(y + row * s.width + c, gate);
}

// From gate and up to their gradients; what is clamped has none. Gives y again.
INLINE float clamped_back(float &gate, float &up, float grad, const act_shape &s)
{
    const clamped_pair c(gate, up, s);
    float slope = c.share * (1.f + s.alpha * c.gate * (1.f - c.share));
    gate = gate <= s.limit ? grad * (c.up + 1.f) * slope : 0.f;
    up = up == c.up ? grad * c.gate * c.share : 0.f;
    return c.value();
}

INLINE float act_back(float &gate, float &up, float grad, const act_shape &s)
{
    if (s.kind == ACT_CLAMPED) return clamped_back(gate, up, grad, s);
    float dgate = grad * derivative(gate, s.kind), value = open_to(gate, s.kind);
    float y = value * (s.up ? up : 1.f);
    gate = s.up ? dgate * up : dgate;
    up = grad * value;
    return y;
}

template <typename T, int V>
__global__ void act_back_kernel(T *dx, T *dup, T *y, const T *dy, const T *x, act_shape s)
{
    grid_begin();
    int64_t row;
    int c;
    if (!act_place<V>(row, c, s)) return;
    const int64_t at = row * s.gate_stride + c, at_up = row * s.up_stride + c;
    float gate[V], up[V], grad[V], again[V];
    load<T, V>(gate, x + at);
    load<T, V>(grad, dy + row * s.width + c);
    if (s.up) load<T, V>(up, (const T *)s.up + at_up);
    unrolled<V>([&](int i) { again[i] = act_back(gate[i], up[i], grad[i], s); });
    store<T, V>(dx + at, gate);
    if (s.up) store<T, V>(dup + at_up, up);
    if (y) store<T, V>(y + row * s.width + c, again);
}

void cuda_act(struct device *dev, void *y, const void *x, const struct act_shape *shape)
{
    const act_shape s = act_laid_out(x, *shape);
    with_act(s, {y, x, s.up}, [&](auto t, auto v, dim3 grid, dim3 block) {
        cuda_launch(dev, "act", act_kernel<decltype(t), decltype(v)::value>, grid, block, 0, y, x,
                    s);
    });
}

void cuda_act_back(struct device *dev, void *dx, void *dup, void *y, const void *dy, const void *x,
                   const struct act_shape *shape)
{
    const act_shape s = act_laid_out(x, *shape);
    if (!shape->up) dup = (char *)dx + s.width * dtype_size(s.dt);
    with_act(s, {dx, dup, y, dy, x, s.up}, [&](auto t, auto v, dim3 grid, dim3 block) {
        cuda_launch(dev, "act_back", act_back_kernel<decltype(t), decltype(v)::value>, grid, block,
                    0, dx, dup, y, dy, x, s);
    });
}

// Rows of attention whose queries have a gate.
template <typename T, int V>
__global__ void split_gate_kernel(T *qkv, T *gate, T *fused, int n_heads, int head_dim, int kv,
                                  bool join)
{
    grid_begin();
    const int c = (blockIdx.y * THREADS + threadIdx.x) * V, q = n_heads * head_dim;
    if (c >= 2 * q + kv) return;
    int head = c / head_dim;
    bool is_gate = c < 2 * q && head % 2;
    int to = c < 2 * q ? head / 2 * head_dim + c % head_dim : c - q;
    T *split =
        is_gate ? gate + (int64_t)blockIdx.x * q + to : qkv + (int64_t)blockIdx.x * (q + kv) + to;
    T *both = fused + (int64_t)blockIdx.x * (2 * q + kv) + c;
    *(pack<T, V> *)(join ? both : split) = *(pack<T, V> *)(join ? split : both);
}

void cuda_split_gate(struct device *dev, void *qkv, void *gate, void *fused, int rows,
                     const struct attn_shape *s, bool join)
{
    const int width = 2 * (s->n_heads + s->n_kv_heads) * s->head_dim;
    const bool fits = aligned(16, {qkv, gate, fused}, {s->head_dim * (int)dtype_size(s->dt)});
    launch_columns(s->dt, fits, dev, "split_gate", split_gate_kernel, rows, width, THREADS, qkv,
                   gate, fused, s->n_heads, s->head_dim, 2 * s->n_kv_heads * s->head_dim, join);
}
