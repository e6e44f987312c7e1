/* short_conv.cu: a causal convolution of a few rows, channel by channel, with SiLU behind it, and
 * its gradient. Rows are computed side by side, all by one function: a row meets the same numbers
 * in the same order wherever they lie, in the batch or in its slot's window. A second kernel then
 * renews the windows. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/rows/act.cuh"
#include "kernels/cuda/recurrence/delta.cuh"

#define THREADS  128
#define SUM_ROWS 16 // rows at a time of a sum over rows

struct conv_rows {
    delta_rows b;
    int64_t x_stride;
    int width, taps;
};

// The row `back` rows before row r of sequence s of a packed batch; -1: there is none.
__device__ __forceinline__ int packed_before(const delta_rows &b, int s, int r, int back)
{
    int at = r - back, first = b.query_start[s];
    if (at >= first) return at;
    int in_prefix = b.prefix_len[s] - (first - at);
    return in_prefix >= 0 ? b.prefix_start[s] + in_prefix : -1;
}

// The input that channel c meets `back` rows before row r.
template <typename T>
__device__ __forceinline__ float input(const T *x, const conv_rows &a, int s, int r, int back,
                                       int c)
{
    if (!a.b.paged) {
        int row = packed_before(a.b, s, r, back);
        return row < 0 ? 0.f : to_f32(x[row * a.x_stride + c]);
    }
    while (!delta_begins(a.b, s)) s--;
    int first = a.b.query_start[s], row = r - back;
    if (row >= first) return to_f32(x[row * a.x_stride + c]);
    int in_window = a.taps - 1 - (first - row);
    if (in_window < 0 || a.b.positions[first] == 0) return 0.f;
    return a.b.states[a.b.state_from[s] * a.b.slot_elements + in_window * a.width + c];
}

// The sum before SiLU.
template <typename T>
__device__ __forceinline__ float convolve(const T *x, const T *w, const conv_rows &a, int row,
                                          int c)
{
    int s = a.b.seq_of[row];
    float sum = 0;
    for (int i = 0; i < a.taps; i++)
        sum = fmaf(to_f32(w[c * a.taps + i]), input(x, a, s, row, a.taps - 1 - i, c), sum);
    return sum;
}

// Block x is the row, here and below.
template <typename T> __global__ void conv_kernel(T *y, const T *x, const T *w, conv_rows a)
{
    grid_begin();
    int row = blockIdx.x, c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= a.width) return;
    bool padding = a.b.paged && a.b.state_slot[a.b.seq_of[row]] < 0;
    float sum = padding ? 0.f : convolve(x, w, a, row, c);
    y[(int64_t)row * a.width + c] = from_f32<T>(sum * sigmoid(sum));
}

// Block x is the sequence that begins a unit.
template <typename T> __global__ void window_kernel(const T *x, conv_rows a)
{
    grid_begin();
    int s = blockIdx.x, c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= a.width || a.b.state_slot[s] < 0 || !delta_begins(a.b, s)) return;
    const int end = delta_unit_end(a.b, s);
    // The first sequence's last, since all read what its slot held; an entry of it is written once
    // those before it, and not those behind it, were read.
    for (int seq = end - 1; seq >= s; seq--) {
        if (!delta_leaves(a.b, seq, end)) continue;
        float *window = a.b.states + a.b.state_slot[seq] * a.b.slot_elements;
        for (int i = 0; i < a.taps - 1; i++)
            window[i * a.width + c] = input(x, a, seq, a.b.query_start[seq + 1], a.taps - 1 - i, c);
    }
}

void cuda_short_conv(struct device *dev, void *y, const struct conv_args *a,
                     const struct delta_shape *s)
{
    const struct conv_rows rows = {delta_rows_of(&a->batch), a->x_stride, delta_conv_width(s),
                                   s->taps};
    const int columns = ceil_div(rows.width, THREADS);
    if (rows.b.n_tokens <= 0) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "short_conv", conv_kernel<T>, dim3(rows.b.n_tokens, columns), THREADS, 0,
                    y, a->x, a->w, rows);
        if (rows.b.paged)
            cuda_launch(dev, "short_conv", window_kernel<T>, dim3(rows.b.n_seqs, columns), THREADS,
                        0, a->x, rows);
    });
}

// ---- backward -----------------------------------------------------------------------------------

// The gradient of the sum before SiLU.
template <typename T>
__global__ void sum_back_kernel(float *dsum, const T *dy, const T *x, const T *w, conv_rows a)
{
    grid_begin();
    int row = blockIdx.x, c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= a.width) return;
    float sum = convolve(x, w, a, row, c), open = sigmoid(sum);
    int64_t at = (int64_t)row * a.width + c;
    dsum[at] = to_f32(dy[at]) * open * (1.f + sum * (1.f - open));
}

// The sum of dsum over the rows that stand `ahead` rows behind row r: of its own sequence, or of
// each that its sequence is the prefix of.
__device__ __forceinline__ float behind(const float *dsum, const conv_rows &a, int r, int ahead,
                                        int c)
{
    const delta_rows &b = a.b;
    int s = b.seq_of[r], end = b.query_start[s + 1], past = r + ahead - end;
    if (past < 0) return dsum[(int64_t)(r + ahead) * a.width + c];
    float sum = 0;
    for (int child = s + 1; child < b.n_seqs && b.query_start[child] < b.attend_end[s]; child++) {
        int row = b.query_start[child] + past;
        if (row < b.query_start[child + 1]) sum += dsum[(int64_t)row * a.width + c];
    }
    return sum;
}

template <typename T>
__global__ void input_back_kernel(T *dx, const float *dsum, const T *w, conv_rows a)
{
    grid_begin();
    int row = blockIdx.x, c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= a.width) return;
    float sum = 0;
    for (int i = 0; i < a.taps; i++)
        sum = fmaf(to_f32(w[c * a.taps + i]), behind(dsum, a, row, a.taps - 1 - i, c), sum);
    dx[row * a.x_stride + c] = from_f32<T>(sum);
}

// Block y is the tap; 32 channels a block, whose rows SUM_ROWS warps share.
template <typename T>
__global__ void weight_back_kernel(float *dw, const float *dsum, const T *x, conv_rows a)
{
    grid_begin();
    __shared__ float sums[SUM_ROWS][32];
    int c = blockIdx.x * 32 + threadIdx.x, tap = blockIdx.y;
    float sum = 0;
    for (int row = threadIdx.y; row < a.b.n_tokens && c < a.width; row += SUM_ROWS)
        sum = fmaf(dsum[(int64_t)row * a.width + c],
                   input(x, a, a.b.seq_of[row], row, a.taps - 1 - tap, c), sum);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= a.width) return;
    for (int i = 1; i < SUM_ROWS; i++) sum += sums[i][threadIdx.x];
    dw[c * a.taps + tap] += sum;
}

size_t cuda_conv_scratch(const struct delta_shape *s, int rows)
{
    return (size_t)rows * delta_conv_width(s) * sizeof(float);
}

void cuda_short_conv_back(struct device *dev, void *dx, float *dw, const void *dy,
                          const struct conv_args *a, const struct delta_shape *s)
{
    const struct conv_rows rows = {delta_rows_of(&a->batch), a->x_stride, delta_conv_width(s),
                                   s->taps};
    const dim3 grid(rows.b.n_tokens, ceil_div(rows.width, THREADS));
    if (rows.b.n_tokens <= 0) return;
    float *dsum = (float *)cuda_workspace(dev, cuda_conv_scratch(s, rows.b.n_tokens));
    if (!dsum) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "short_conv_back", sum_back_kernel<T>, grid, THREADS, 0, dsum, dy, a->x,
                    a->w, rows);
        cuda_launch(dev, "short_conv_back", input_back_kernel<T>, grid, THREADS, 0, dx, dsum, a->w,
                    rows);
        if (dw)
            cuda_launch(dev, "short_conv_back", weight_back_kernel<T>,
                        dim3(ceil_div(rows.width, 32), s->taps), dim3(32, SUM_ROWS), 0, dw, dsum,
                        a->x, rows);
    });
}
