/* short_conv.cu: a causal convolution of a few rows, channel by channel, with SiLU behind it, and
 * its gradient. A row meets the same numbers in the same order wherever they lie: among the rows
 * that a thread has side by side, in those its sequence goes on from, or in its slot's window,
 * which is renewed behind. A thread has V channels, and room for TAPS taps. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/recurrence/recurrence.cuh"

#define CONV_THREADS 128
#define RUN          8   // rows that a thread has side by side
#define FEW_ROWS     16  // of a sequence, up to which a thread has all of a unit
#define STRETCH      128 // rows whose parts of the weights a thread adds up

size_t cuda_conv_scratch(const struct delta_shape *s, int rows)
{
    return (size_t)ceil_div(rows, STRETCH) * delta_conv_width(s) * (s->taps + 1) * sizeof(float);
}

template <typename T> struct conv_rows {
    using type = T;
    delta_rows b;
    const T *x, *w, *bias;
    int64_t x_stride;
    int width, taps;
    int window; // rows of a slot's
    bool bare;  // no SiLU behind the sum
};

INLINE float conv_out(bool bare, float sum)
{
    return bare ? sum : sum * sigmoid(sum);
}

// The gradient of the sum before SiLU.
INLINE float conv_slope(bool bare, float sum, float dy)
{
    const float open = __fdividef(1.f, 1.f + __expf(-sum));
    return dy * (bare ? 1.f : open * (1.f + sum * (1.f - open)));
}

// A thread's weights, by how many rows before its own an input stands.
template <int V, int TAPS> struct conv_weights {
    float at[TAPS][V], bias[V];
};

template <int V, int TAPS, typename T>
INLINE conv_weights<V, TAPS> weights_of(const conv_rows<T> &a, int c)
{
    conv_weights<V, TAPS> own;
    unrolled<V>([&](int v) { own.bias[v] = a.bias ? to_f32(a.bias[c + v]) : 0.f; });
    unrolled<TAPS, V>([&](int back, int v) {
        own.at[back][v] = back < a.taps ? to_f32(a.w[(c + v) * a.taps + a.taps - 1 - back]) : 0.f;
    });
    return own;
}

// The sum of a row whose own input is x[own], and those before it stand before that.
template <int V, int TAPS, int N>
INLINE void convolve(float (&sum)[V], const float (&x)[N][V], int own,
                     const conv_weights<V, TAPS> &w, int taps)
{
    unrolled<V>([&](int v) { sum[v] = w.bias[v]; });
    unrolled<TAPS, V>([&](int i, int v) {
        const int back = TAPS - 1 - i;
        if (back < taps) sum[v] = fmaf(w.at[back][v], x[own - back][v], sum[v]);
    });
}

// Up to RUN rows of a sequence, of a paged batch with the unit's before it.
struct conv_run {
    int begin, end; // rows that lie side by side
    int n;
    int position; // of a paged batch's first, and the window that the rows before it are in
    const float *window;
};

// Of the unit that begins with sequence s of a paged batch.
template <typename T>
INLINE conv_run run_of_unit(const conv_rows<T> &a, int s, int begin, int end, int n)
{
    return {begin, end, n, a.b.positions[begin],
            a.b.states + a.b.state_from[s] * a.b.slot_elements};
}

template <typename T> INLINE conv_run run_at(const conv_rows<T> &a, int row, int last)
{
    int s = a.b.seq_of[row];
    const int end = a.b.query_start[s + 1], n = min(min(RUN, last - row), end - row);
    while (!a.b.packed && !unit_begins(&a.b, s)) s--;
    const int begin = a.b.query_start[s];
    if (!a.b.packed) return run_of_unit(a, s, begin, end, n);
    return {begin, end, n};
}

// A row; zeros where the run has none.
template <int V, typename T>
INLINE void read_row(float (&to)[V], const T *from, int64_t stride, const conv_run &run, int row)
{
    const bool is_there = row >= run.begin && row < run.end;
    unrolled<V>([&](int v) { to[v] = 0.f; });
    if (is_there) load<T, V>(to, from + row * stride);
}

// A row that stands before a run, in what it goes on from.
template <int V, typename T>
INLINE void read_before(float (&to)[V], const conv_rows<T> &a, const conv_run &run, int row, int c)
{
    const int back = run.begin - row;
    const int at = a.b.packed ? row_before(&a.b, run.begin, back) : run.position - back;
    unrolled<V>([&](int v) { to[v] = 0.f; });
    if (at >= 0 && a.b.packed) load<T, V>(to, a.x + at * a.x_stride + c);
    const float *window = run.window + at % a.window * a.width + c;
    if (at >= 0 && !a.b.packed) unrolled<V>([&](int v) { to[v] = window[v]; });
}

// The inputs that rows of a run from `row` on meet, wherever these stand.
template <int V, int TAPS, int N, typename T>
INLINE void read_inputs(float (&x)[N][V], const conv_rows<T> &a, const conv_run &run, int row,
                        int c)
{
    unrolled<N>([&](int i) {
        const int at = row - TAPS + 1 + i;
        if (i < TAPS - 1 && at < run.begin)
            read_before(x[i], a, run, at, c);
        else
            read_row(x[i], a.x + c, a.x_stride, run, at);
    });
}

// The windows that a unit leaves, of a channel.
template <typename T> INLINE void renew_windows(const conv_rows<T> &a, int s, int end, int c)
{
    const int first = a.b.query_start[s], position = a.b.positions[first];
    const float *from = a.b.states + a.b.state_from[s] * a.b.slot_elements;
    // The first sequence's last, since all read what its slot held.
    for (int seq = end - 1; seq >= s; seq--) {
        if (!delta_leaves(a.b, seq, end)) continue;
        float *window = a.b.states + a.b.state_slot[seq] * a.b.slot_elements;
        const int behind = position + a.b.query_start[seq + 1] - first, oldest = behind - a.window;
        const bool has_others = window == from && position > 0;
        for (int at = has_others ? max(oldest, position) : oldest; at < behind; at++) {
            const int i = (at + a.window) % a.window * a.width + c;
            window[i] = at >= position ? to_f32(a.x[(first + at - position) * a.x_stride + c])
                        : position > 0 ? from[i]
                                       : 0.f;
        }
    }
}

// Block x has RUN rows or, FEW, of a paged batch of few rows a sequence, the unit that begins with
// sequence x, whose windows a thread renews behind; here and below block y and the thread have some
// channels.
template <typename T, int V, int TAPS, bool FEW>
__global__ void conv_kernel(T *y, const __grid_constant__ conv_rows<T> a)
{
    grid_begin();
    constexpr int N = FEW ? 1 : RUN;
    const int own = blockIdx.x, c = (blockIdx.y * CONV_THREADS + threadIdx.x) * V;
    if (c >= a.width || (FEW && !unit_begins(&a.b, own))) return;
    const conv_weights<V, TAPS> weights = weights_of<V, TAPS>(a, c);
    const int unit = FEW ? unit_end(&a.b, own) : 0, begin = FEW ? a.b.query_start[own] : own * RUN;
    const int last = FEW ? a.b.query_start[unit] : min(begin + RUN, a.b.n_tokens);
    bool is_padding = FEW && a.b.state_slot[own] < 0;
    conv_run run = FEW ? run_of_unit(a, own, begin, last, 1) : conv_run{};
    for (int row = begin; row < last; row += run.n) {
        if (!FEW) run = run_at(a, row, last);
        if (!FEW && !a.b.packed) is_padding = a.b.state_slot[a.b.seq_of[row]] < 0;
        float x_of[N + TAPS - 1][V];
        read_inputs<V, TAPS>(x_of, a, run, row, c);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float sum[V];
            if (i >= run.n) break;
            convolve(sum, x_of, i + TAPS - 1, weights, a.taps);
            unrolled<V>([&](int v) { sum[v] = is_padding ? 0.f : conv_out(a.bare, sum[v]); });
            store<T, V>(y + (int64_t)(row + i) * a.width + c, sum);
        }
    }
    if (FEW && !is_padding) unrolled<V>([&](int v) { renew_windows(a, own, unit, c + v); });
}

// Block x is the sequence that begins a unit.
template <typename T> __global__ void window_kernel(const __grid_constant__ conv_rows<T> a)
{
    grid_begin();
    int s = blockIdx.x, c = blockIdx.y * CONV_THREADS + threadIdx.x;
    if (c >= a.width || a.b.state_slot[s] < 0 || !unit_begins(&a.b, s)) return;
    renew_windows(a, s, unit_end(&a.b, s), c);
}

// Calls f(rows of the element type, channels of a thread, taps that there is room for), where there
// are rows; others: arrays of a row's width besides x.
template <typename F>
static void with_channels(const struct conv_args *a, const struct delta_shape *s,
                          std::initializer_list<const void *> others, F f)
{
    const int64_t e = (int64_t)dtype_size(s->dt), width = delta_conv_width(s);
    const bool fits = s->taps <= 4 && aligned(2 * e, {a->x}, {a->x_stride * e, width * e}) &&
                      aligned(2 * e, others, {});
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        const conv_rows<T> rows = {delta_rows_of(&a->batch),
                                   (const T *)a->x,
                                   (const T *)a->w,
                                   (const T *)a->bias,
                                   a->x_stride,
                                   (int)width,
                                   s->taps,
                                   delta_window(s),
                                   delta_is_conv(s)};
        if (rows.b.n_tokens <= 0) return;
        if (fits)
            f(rows, number<2>(), number<4>());
        else
            f(rows, number<1>(), number<DELTA_MAX_TAPS>());
    });
}

void cuda_short_conv(struct device *dev, void *y, const struct conv_args *a,
                     const struct delta_shape *s)
{
    const struct batch_view *b = a->batch.view;
    const bool few = !b->packed && b->max_query <= FEW_ROWS;
    with_channels(a, s, {y}, [&](auto rows, auto v, auto taps) {
        using T = typename decltype(rows)::type;
        constexpr int V = decltype(v)::value, TAPS = decltype(taps)::value;
        const auto kernel = few ? conv_kernel<T, V, TAPS, true> : conv_kernel<T, V, TAPS, false>;
        cuda_launch(dev, "short_conv", kernel,
                    dim3(few ? b->n_seqs : ceil_div(b->n_tokens, RUN),
                         ceil_div(rows.width, V * CONV_THREADS)),
                    CONV_THREADS, 0, y, rows);
        if (!few && !b->packed)
            cuda_launch(dev, "short_conv", window_kernel<T>,
                        dim3(b->n_seqs, ceil_div(rows.width, CONV_THREADS)), CONV_THREADS, 0, rows);
    });
}

// The gradient of the sums before SiLU of the rows that stand `past` rows behind the first behind a
// sequence that ends before row `end`, in all sequences that go on behind it.
template <typename T>
__device__ __noinline__ float behind(const T *dy, const conv_rows<T> &a, int end, int past, int c)
{
    const delta_rows &b = a.b;
    const int s = b.seq_of[end - 1], position = b.first_position[s] + end - b.query_start[s] + past;
    float slopes = 0;
    for (int below = s + 1; below < b.n_seqs && b.query_start[below] < b.attend_end[s]; below++) {
        const int at = position - b.first_position[below], row = b.query_start[below] + at;
        if (at < 0 || row >= b.query_start[below + 1]) continue;
        float sum = a.bias ? to_f32(a.bias[c]) : 0.f;
        for (int i = 0; i < a.taps; i++) {
            const int from = row_before(&b, row, a.taps - 1 - i);
            const float x = from < 0 ? 0.f : to_f32(a.x[from * a.x_stride + c]);
            sum = fmaf(to_f32(a.w[c * a.taps + i]), x, sum);
        }
        slopes += conv_slope(a.bare, sum, to_f32(dy[(int64_t)row * a.width + c]));
    }
    return slopes;
}

// Block x is a stretch.
template <typename T, int V, int TAPS>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_back_kernel(T *dx, float *dw_parts, float *db_parts, const T *dy,
                     const __grid_constant__ conv_rows<T> a)
{
    grid_begin();
    constexpr int N = RUN + TAPS - 1; // rows that a run's inputs go into
    const int c = (blockIdx.y * CONV_THREADS + threadIdx.x) * V;
    if (c >= a.width) return;
    const conv_weights<V, TAPS> w = weights_of<V, TAPS>(a, c);
    const int end = min((int)(blockIdx.x + 1) * STRETCH, a.b.n_tokens);
    float dw[TAPS][V] = {}, db[V] = {};
    conv_run run;
#pragma unroll 1
    for (int row = blockIdx.x * STRETCH; row < end; row += run.n) {
        run = run_at(a, row, end);
        float x[N + TAPS - 1][V], dys[N][V], sums[N][V]; // sums: their gradients
        read_inputs<V, TAPS>(x, a, run, row, c);
        unrolled<N>([&](int i) { read_row(dys[i], dy + c, a.width, run, row + i); });
        unrolled<N>([&](int i) {
            const int past = row + i - run.end;
            convolve(sums[i], x, i + TAPS - 1, w, a.taps);
            unrolled<V>([&](int v) { sums[i][v] = conv_slope(a.bare, sums[i][v], dys[i][v]); });
            if (past >= 0 && past < a.taps - 1)
                unrolled<V>([&](int v) { sums[i][v] = behind(dy, a, run.end, past, c + v); });
        });
        unrolled<RUN>([&](int i) {
            if (i >= run.n) return;
            float sum[V] = {};
            unrolled<TAPS, V>([&](int tap, int v) {
                const int back = TAPS - 1 - tap;
                if (back < a.taps) sum[v] = fmaf(w.at[back][v], sums[i + back][v], sum[v]);
            });
            store<T, V>(dx + (row + i) * a.x_stride + c, sum);
            // Not with the product that a sum's gradient is, in one step.
            unrolled<V>([&](int v) { db[v] = __fadd_rn(db[v], sums[i][v]); });
            unrolled<TAPS, V>([&](int back, int v) {
                if (back < a.taps)
                    dw[back][v] = fmaf(sums[i][v], x[i + TAPS - 1 - back][v], dw[back][v]);
            });
        });
    }
    const int64_t at = (int64_t)blockIdx.x * a.width + c;
    unrolled<V>([&](int v) { db_parts[at + v] = db[v]; });
    unrolled<TAPS, V>([&](int back, int v) {
        if (back < a.taps) dw_parts[(at + v) * a.taps + a.taps - 1 - back] = dw[back][v];
    });
}

void cuda_short_conv_back(struct device *dev, void *dx, float *dw, float *db, const void *dy,
                          const struct conv_args *a, const struct delta_shape *s)
{
    const int n = a->batch.view->n_tokens, stretches = ceil_div(n, STRETCH);
    const int width = delta_conv_width(s);
    float *parts = n > 0 ? (float *)cuda_workspace(dev, cuda_conv_scratch(s, n)) : NULL;
    if (!parts) return;
    float *bias_parts = parts + (int64_t)stretches * width * s->taps;
    with_channels(a, s, {dx, dy}, [&](auto rows, auto v, auto taps) {
        using T = typename decltype(rows)::type;
        constexpr int V = decltype(v)::value, TAPS = decltype(taps)::value;
        cuda_launch(dev, "short_conv_back", conv_back_kernel<T, V, TAPS>,
                    dim3(stretches, ceil_div(width, V * CONV_THREADS)), CONV_THREADS, 0, dx, parts,
                    bias_parts, dy, rows);
    });
    if (dw) cuda_add_parts(dev, dw, parts, stretches, width * s->taps);
    if (db) cuda_add_parts(dev, db, bias_parts, stretches, width);
}
