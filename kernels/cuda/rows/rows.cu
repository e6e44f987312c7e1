/* rows.cu: operations that move or add rows: look-up, scatter, add, column sums, conversion. Each
 * is one pass over its memory, with 16-byte accesses where widths and addresses allow. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "kernels/cuda/cuda.cuh"
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
#pragma unroll
    for (int i = 0; i < N; i++) {
        int row = at + i < n ? index[at + i] - first : -1;
        if (row >= 0 && row < rows) load<T, V>(x[i], table + (int64_t)row * width + c);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (at + i >= n) return;
        if (scale != 1.f)
#pragma unroll
            for (int j = 0; j < V; j++) x[i][j] *= scale;
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
    if (a->n <= 0) return;
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
#pragma unroll
            for (int j = 0; j < 4; j++) x[j] = to_f32(y[(int64_t)order[i + j] * width + c]);
#pragma unroll
            for (int j = 0; j < 4; j++) sum += x[j];
        }
        for (; i < end; i++) sum += to_f32(y[(int64_t)order[i] * width + c]);
        *to = from_f32<U>(to_f32(*to) + scale * sum);
    }
}

void cuda_scatter_add_rows(struct device *dev, void *table, const void *y,
                           const struct scatter_args *a)
{
    if (a->n <= 0) return;
    with_type(a->dt, [&](auto t) {
        with_type(a->table_dt, [&](auto u) {
            using T = decltype(t);
            using U = decltype(u);
            cuda_launch(dev, "scatter_add_rows", scatter_kernel<T, U>,
                        dim3(a->n, ceil_div(a->width, 4 * THREADS)), THREADS, 0, table, y, a->index,
                        a->order, a->n, a->width, a->scale, a->first, rows_held(a->rows));
        });
    });
}

template <typename T, int V> __global__ void add_kernel(T *y, const T *x, int64_t n)
{
    grid_begin();
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i >= n) return;
    float a[V], b[V];
    load<T, V>(a, y + i);
    load<T, V>(b, x + i);
#pragma unroll
    for (int j = 0; j < V; j++) a[j] += b[j];
    store<T, V>(y + i, a);
}

void cuda_add(struct device *dev, void *y, const void *x, int64_t n, enum dtype dt)
{
    if (n <= 0) return;
    bool fits = aligned(16, {y, x}, {n * (int64_t)dtype_size(dt)});
    with_type_wide(dt, fits, [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        cuda_launch(dev, "add", add_kernel<T, V>, ceil_div(n, THREADS * V), THREADS, 0, y, x, n);
    });
}

// ---- column sums -------------------------------------------------------------------------------

// Blocks of 32 x 8 threads: a thread sums V columns over every eighth row of the block's rows; the
// eight are added through shared memory, the blocks' parts by cuda_add_parts.

#define PART_ROWS 256

template <typename T, int V>
__global__ void column_sum_kernel(float *parts, const T *x, int rows, int cols)
{
    grid_begin();
    __shared__ float shared[8][32 * V + 1];
    int lane = threadIdx.x % 32, slot = threadIdx.x / 32, c = (blockIdx.x * 32 + lane) * V;
    int end = min(rows, (int)(blockIdx.y + 1) * PART_ROWS);
    float sum[V] = {};
    if (c < cols)
        for (int r = blockIdx.y * PART_ROWS + slot; r < end; r += 8) {
            float a[V];
            load<T, V>(a, x + (int64_t)r * cols + c);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += a[i];
        }
#pragma unroll
    for (int i = 0; i < V; i++) shared[slot][lane * V + i] = sum[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * V; i += 256) {
        int col = blockIdx.x * 32 * V + i;
        float total = 0;
        for (int s = 0; s < 8; s++) total += shared[s][i];
        if (col < cols) parts[(int64_t)blockIdx.y * cols + col] = total;
    }
}

__global__ void add_parts_kernel(float *out, const float *parts, int n, int width)
{
    grid_begin();
    __shared__ float shared[8][33];
    int lane = threadIdx.x % 32, slot = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float sum = 0;
    if (c < width)
#pragma unroll 4
        for (int p = slot; p < n; p += 8) sum += parts[(int64_t)p * width + c];
    shared[slot][lane] = sum;
    __syncthreads();
    if (slot > 0 || c >= width) return;
    float total = 0;
    for (int s = 0; s < 8; s++) total += shared[s][lane];
    out[c] += total;
}

void cuda_add_parts(struct device *dev, float *out, const float *parts, int n, int width)
{
    cuda_launch(dev, "adding parts", add_parts_kernel, ceil_div(width, 32), 256, 0, out, parts, n,
                width);
}

size_t cuda_column_sum_scratch(int rows, int cols)
{
    return (size_t)ceil_div(rows, PART_ROWS) * cols * sizeof(float);
}

void cuda_column_sum(struct device *dev, float *out, const void *x, int rows, int cols,
                     enum dtype dt)
{
    if (rows <= 0 || cols <= 0) return;
    int n_parts = ceil_div(rows, PART_ROWS);
    float *parts = (float *)cuda_workspace(dev, cuda_column_sum_scratch(rows, cols));
    if (!parts) return;
    bool fits = aligned(16, {x}, {(int64_t)(cols * dtype_size(dt))});
    with_type_wide(dt, fits, [&](auto t, auto v) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value;
        cuda_launch(dev, "column_sum", column_sum_kernel<T, V>,
                    dim3(ceil_div(cols, 32 * V), n_parts), 256, 0, parts, x, rows, cols);
    });
    cuda_add_parts(dev, out, parts, n_parts, cols);
}

// ---- conversion --------------------------------------------------------------------------------

template <typename Y, typename X, int V> __global__ void convert_kernel(Y *y, const X *x, int64_t n)
{
    grid_begin();
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i >= n) return;
    float a[V];
    load<X, V>(a, x + i);
    store<Y, V>(y + i, a);
}

template <typename Y, typename X>
static void convert(struct device *dev, void *y, const void *x, int64_t n)
{
    if (aligned(16, {y, x}, {4 * n}))
        cuda_launch(dev, "convert", convert_kernel<Y, X, 4>, ceil_div(n, THREADS * 4), THREADS, 0,
                    y, x, n);
    else
        cuda_launch(dev, "convert", convert_kernel<Y, X, 1>, ceil_div(n, THREADS), THREADS, 0, y, x,
                    n);
}

void cuda_convert(struct device *dev, void *y, enum dtype y_dt, const void *x, enum dtype x_dt,
                  int64_t n)
{
    if (n <= 0) return;
    if ((x_dt != DT_F32 && x_dt != DT_BF16 && x_dt != DT_F16) ||
        (y_dt != DT_F32 && y_dt != DT_BF16)) {
        device_fail(dev, "convert: from %s to %s is not possible", dtype_name(x_dt),
                    dtype_name(y_dt));
        return;
    }
    with_type(y_dt, [&](auto t) {
        using Y = decltype(t);
        if (x_dt == DT_F16)
            convert<Y, __half>(dev, y, x, n);
        else if (x_dt == DT_BF16)
            convert<Y, bf16>(dev, y, x, n);
        else
            convert<Y, float>(dev, y, x, n);
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
    if (n <= 0) return;
    with_type(dt, [&](auto t) {
        cuda_launch(dev, "random numbers", random_normal_kernel<decltype(t)>,
                    ceil_div(n, 2 * THREADS), THREADS, 0, (decltype(t) *)x, n, scale, seed, stream);
    });
}

// ---- single logits -----------------------------------------------------------------------------

// Penalties and biases, before a token is sampled, and their way back. One block a row; a row lists
// a token once, so no two threads meet. Products and sums are rounded one by one, as on the CPU.
__device__ __forceinline__ float adjusted(float z, const logit_row &row, const logit_entry &entry)
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
    if (n <= 0) return;
    cuda_launch(dev, "adjust_logits", adjust_kernel, n, THREADS, 0, logits, saved, rows, entries,
                vocab, undo);
}
