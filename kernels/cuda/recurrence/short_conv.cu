/* short_conv.cu: a causal convolution of a few rows, channel by channel, with SiLU behind it, and
 * its gradient. A row meets the same numbers in the same order wherever they lie: in its own
 * sequence, where a thread has a run of rows side by side, in those its sequence goes on from, or
 * in its slot's window, which is renewed behind. A thread has V channels, and room for TAPS taps.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/recurrence/recurrence.cuh"

#define CONV_THREADS 128
#define RUN          8   // rows that a thread has side by side
#define FEW_ROWS     16  // of a sequence, up to which a thread has all of it
#define STRETCH      128 // rows whose parts of the weights a thread adds up

size_t cuda_conv_scratch(const struct delta_shape *s, int rows)
{
    return (size_t)ceil_div(rows, STRETCH) * delta_conv_width(s) * (s->taps + 1) * sizeof(float);
}

struct conv_rows {
    delta_rows b;
    int64_t x_stride;
    int width, taps;
    int window; // rows of a slot's
    bool bare;  // no SiLU behind the sum
};

// The row `back` rows before row r of sequence s of a packed batch; -1: there is none.
INLINE int packed_before(const delta_rows &b, int s, int r, int back)
{
    if (r - back >= b.query_start[s]) return r - back;
    int position = b.first_position[s] + r - b.query_start[s] - back;
    while (s >= 0 && position < b.first_position[s]) s = b.parent[s];
    return s >= 0 && position >= 0 ? b.query_start[s] + position - b.first_position[s] : -1;
}

// The input that channel c meets `back` rows before row r.
template <typename T>
__device__ __noinline__ float input(const T *x, const conv_rows &a, int s, int r, int back, int c)
{
    if (!a.b.paged) {
        int row = packed_before(a.b, s, r, back);
        return row < 0 ? 0.f : to_f32(x[row * a.x_stride + c]);
    }
    while (!delta_begins(a.b, s)) s--;
    int first = a.b.query_start[s], row = r - back;
    if (row >= first) return to_f32(x[row * a.x_stride + c]);
    int position = a.b.positions[first] - (first - row);
    if (position < 0) return 0.f;
    return a.b.states[a.b.state_from[s] * a.b.slot_elements + position % a.window * a.width + c];
}

// The sum before SiLU of a row wherever it stands.
template <typename T>
__device__ __noinline__ float convolve(const T *x, const T *w, const T *bias, const conv_rows &a,
                                       int row, int c)
{
    int s = a.b.seq_of[row];
    float sum = bias ? to_f32(bias[c]) : 0.f;
    for (int i = 0; i < a.taps; i++)
        sum = fmaf(to_f32(w[c * a.taps + i]), input(x, a, s, row, a.taps - 1 - i, c), sum);
    return sum;
}

INLINE float conv_out(const conv_rows &a, float sum)
{
    return a.bare ? sum : sum * sigmoid(sum);
}

// The gradient of the sum before SiLU.
INLINE float conv_slope(const conv_rows &a, float sum, float dy)
{
    const float open = __fdividef(1.f, 1.f + __expf(-sum));
    return dy * (a.bare ? 1.f : open * (1.f + sum * (1.f - open)));
}

// A thread's weights, by how many rows before its own an input stands.
template <int V, int TAPS> struct conv_weights {
    float at[TAPS][V], bias[V];
};

template <int V, int TAPS, typename T>
INLINE conv_weights<V, TAPS> weights_of(const T *w, const T *bias, const conv_rows &a, int c)
{
    conv_weights<V, TAPS> own;
    unrolled<V>([&](int v) {
        own.bias[v] = bias ? to_f32(bias[c + v]) : 0.f;
        unrolled<TAPS>([&](int back) {
            own.at[back][v] = back < a.taps ? to_f32(w[(c + v) * a.taps + a.taps - 1 - back]) : 0.f;
        });
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

// Up to RUN rows of a sequence, and whether all that they meet is in it alone, with the `ahead`
// rows behind them.
struct conv_run {
    int begin, end; // the sequence's
    int n;
    bool alone;
};

INLINE conv_run run_at(const conv_rows &a, int row, int last, int ahead)
{
    const int s = a.b.seq_of[row], begin = a.b.query_start[s], end = a.b.query_start[s + 1];
    const int n = min(min(RUN, last - row), end - row);
    const bool is_root = !a.b.paged && a.b.parent[s] < 0;
    const bool is_leaf = ahead == 0 || a.b.attend_end[s] == end;
    return {begin, end, n,
            (row - a.taps + 1 >= begin || is_root) && (row + n + ahead <= end || is_leaf)};
}

// A row; zeros where the run has none.
template <int V, typename T>
INLINE void read_row(float (&to)[V], const T *from, int64_t stride, const conv_run &run, int row)
{
    const bool is_there = row >= run.begin && row < run.end;
    if (is_there) load<T, V>(to, from + row * stride);
#pragma unroll
    for (int v = 0; v < V && !is_there; v++) to[v] = 0.f;
}

// Block x has RUN rows, here and below block y and the thread some channels.
template <typename T, int V, int TAPS>
__global__ void conv_kernel(T *y, const T *x, const T *w, const T *bias,
                            const __grid_constant__ conv_rows a)
{
    grid_begin();
    const int c = (blockIdx.y * CONV_THREADS + threadIdx.x) * V;
    const int last = min((int)(blockIdx.x + 1) * RUN, a.b.n_tokens);
    if (c >= a.width) return;
    const conv_weights<V, TAPS> weights = weights_of<V, TAPS>(w, bias, a, c);
    conv_run run;
    for (int row = blockIdx.x * RUN; row < last; row += run.n) {
        run = run_at(a, row, last, 0);
        const bool is_padding = a.b.paged && a.b.state_slot[a.b.seq_of[row]] < 0;
        float x_of[RUN + TAPS - 1][V];
        unrolled<RUN + TAPS - 1>(
            [&](int i) { read_row(x_of[i], x + c, a.x_stride, run, row - TAPS + 1 + i); });
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            float sum[V];
            if (i >= run.n) break;
            convolve(sum, x_of, i + TAPS - 1, weights, a.taps);
            unrolled<V>([&](int v) {
                if (!run.alone) sum[v] = convolve(x, w, bias, a, row + i, c + v);
                sum[v] = is_padding ? 0.f : conv_out(a, sum[v]);
            });
            store<T, V>(y + (int64_t)(row + i) * a.width + c, sum);
        }
    }
}

// The windows that a unit leaves, of a channel.
template <typename T>
INLINE void renew_windows(const T *x, const conv_rows &a, int s, int end, int c)
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
            window[i] = at >= position ? to_f32(x[(first + at - position) * a.x_stride + c])
                        : position > 0 ? from[i]
                                       : 0.f;
        }
    }
}

// Of a paged batch of few rows a sequence: block x is the sequence that begins a unit, whose
// windows a thread renews as it goes.
template <typename T, int V, int TAPS>
__global__ void conv_few_kernel(T *y, const T *x, const T *w, const T *bias,
                                const __grid_constant__ conv_rows a)
{
    grid_begin();
    const int s = blockIdx.x, c = (blockIdx.y * CONV_THREADS + threadIdx.x) * V;
    if (c >= a.width || !delta_begins(a.b, s)) return;
    const conv_weights<V, TAPS> weights = weights_of<V, TAPS>(w, bias, a, c);
    const bool is_padding = a.b.state_slot[s] < 0;
    const int end = delta_unit_end(a.b, s), first = a.b.query_start[s];
    const int position = is_padding ? 0 : a.b.positions[first];
    const float *window = a.b.states + a.b.state_from[s] * a.b.slot_elements + c;
    float x_of[TAPS][V], sum[V];
#pragma unroll
    for (int back = 1; back < TAPS; back++)
#pragma unroll
        for (int v = 0; v < V; v++)
            x_of[TAPS - 1 - back][v] = back < a.taps && back <= position
                                           ? window[(position - back) % a.window * a.width + v]
                                           : 0.f;
    for (int row = first; row < a.b.query_start[end]; row++) {
        load<T, V>(x_of[TAPS - 1], x + row * a.x_stride + c);
        convolve(sum, x_of, TAPS - 1, weights, a.taps);
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = is_padding ? 0.f : conv_out(a, sum[v]);
        store<T, V>(y + (int64_t)row * a.width + c, sum);
#pragma unroll
        for (int i = 1; i < TAPS; i++)
#pragma unroll
            for (int v = 0; v < V; v++) x_of[i - 1][v] = x_of[i][v];
    }
#pragma unroll
    for (int v = 0; v < V && !is_padding; v++) renew_windows(x, a, s, end, c + v);
}

// Block x is the sequence that begins a unit.
template <typename T> __global__ void window_kernel(const T *x, const __grid_constant__ conv_rows a)
{
    grid_begin();
    int s = blockIdx.x, c = blockIdx.y * CONV_THREADS + threadIdx.x;
    if (c >= a.width || a.b.state_slot[s] < 0 || !delta_begins(a.b, s)) return;
    renew_windows(x, a, s, delta_unit_end(a.b, s), c);
}

static struct conv_rows conv_rows_of(const struct conv_args *a, const struct delta_shape *s)
{
    return {delta_rows_of(&a->batch), a->x_stride,     delta_conv_width(s), s->taps,
            delta_window(s),          delta_is_conv(s)};
}

// Calls f(element, channels of a thread, taps that there is room for).
template <typename F>
static void with_channels(enum dtype dt, const struct conv_rows &a,
                          std::initializer_list<const void *> rows, F f)
{
    const int64_t e = (int64_t)dtype_size(dt);
    const bool fits = a.taps <= 4 && aligned(2 * e, rows, {a.x_stride * e, a.width * e});
    with_type(dt, [&](auto t) {
        if (fits)
            f(t, number<2>(), number<4>());
        else
            f(t, number<1>(), number<DELTA_MAX_TAPS>());
    });
}

void cuda_short_conv(struct device *dev, void *y, const struct conv_args *a,
                     const struct delta_shape *s)
{
    const struct conv_rows rows = conv_rows_of(a, s);
    const bool few = rows.b.paged && a->batch.view->max_query <= FEW_ROWS;
    if (rows.b.n_tokens <= 0) return;
    with_channels(s->dt, rows, {a->x, y}, [&](auto t, auto v, auto taps) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value, TAPS = decltype(taps)::value;
        const int columns = ceil_div(rows.width, V * CONV_THREADS);
        if (few) {
            cuda_launch(dev, "short_conv", conv_few_kernel<T, V, TAPS>,
                        dim3(rows.b.n_seqs, columns), CONV_THREADS, 0, y, a->x, a->w, a->bias,
                        rows);
            return;
        }
        cuda_launch(dev, "short_conv", conv_kernel<T, V, TAPS>,
                    dim3(ceil_div(rows.b.n_tokens, RUN), columns), CONV_THREADS, 0, y, a->x, a->w,
                    a->bias, rows);
        if (rows.b.paged)
            cuda_launch(dev, "short_conv", window_kernel<T>,
                        dim3(rows.b.n_seqs, ceil_div(rows.width, CONV_THREADS)), CONV_THREADS, 0,
                        a->x, rows);
    });
}

template <typename T> struct conv_back_arrays {
    T *dx;
    float *dw, *db; // (stretches, width, taps), (stretches, width)
    const T *dy, *x, *w, *bias;
};

// The gradient of the sums before SiLU of the rows that stand `ahead` rows behind row r: of its own
// sequence, or of each that goes on behind it.
template <typename T>
__device__ __noinline__ float behind(const conv_back_arrays<T> &to, const conv_rows &a, int r,
                                     int ahead, int c)
{
    const delta_rows &b = a.b;
    const auto slope = [&](int row) {
        return conv_slope(a, convolve(to.x, to.w, to.bias, a, row, c),
                          to_f32(to.dy[(int64_t)row * a.width + c]));
    };
    int s = b.seq_of[r];
    if (r + ahead < b.query_start[s + 1]) return slope(r + ahead);
    int position = b.first_position[s] + r - b.query_start[s] + ahead;
    float sum = 0;
    for (int below = s + 1; below < b.n_seqs && b.query_start[below] < b.attend_end[s]; below++) {
        int past = position - b.first_position[below], row = b.query_start[below] + past;
        if (past >= 0 && row < b.query_start[below + 1]) sum += slope(row);
    }
    return sum;
}

// Block x is a stretch.
template <typename T, int V, int TAPS>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_back_kernel(const __grid_constant__ conv_back_arrays<T> to,
                     const __grid_constant__ conv_rows a)
{
    grid_begin();
    constexpr int N = RUN + TAPS - 1; // rows that a run's inputs go into
    const int c = (blockIdx.y * CONV_THREADS + threadIdx.x) * V;
    if (c >= a.width) return;
    const conv_weights<V, TAPS> w = weights_of<V, TAPS>(to.w, to.bias, a, c);
    const int end = min((int)(blockIdx.x + 1) * STRETCH, a.b.n_tokens);
    float dw[TAPS][V] = {}, db[V] = {};
    // Of a run: inputs, and the gradients of the sums; with the last of them the next run goes on,
    // where it is of the same sequence, which begins with row `known`.
    float x[N + TAPS - 1][V], sums[N][V];
    int known = -1;
    const auto copy = [](float(&to)[V], const float(&from)[V]) {
        unrolled<V>([&](int v) { to[v] = from[v]; });
    };
    // A row's gradient from those of the sums its input goes into; own_input(back, v): what it met.
    const auto add_row = [&](int row, auto later, auto own_input) {
        float dx[V] = {};
#pragma unroll
        for (int back = TAPS - 1; back >= 0; back--)
#pragma unroll
            for (int v = 0; v < V; v++)
                if (back < a.taps) dx[v] = fmaf(w.at[back][v], later(back, v), dx[v]);
        store<T, V>(to.dx + row * a.x_stride + c, dx);
#pragma unroll
        for (int v = 0; v < V; v++) {
            const float own = later(0, v);
            db[v] += own;
#pragma unroll
            for (int back = 0; back < TAPS; back++)
                if (back < a.taps) dw[back][v] = fmaf(own, own_input(back, v), dw[back][v]);
        }
    };
    conv_run run;
#pragma unroll 1
    for (int row = blockIdx.x * STRETCH; row < end; row += run.n) {
        run = run_at(a, row, end, a.taps - 1);
        if (!run.alone) {
            known = -1;
#pragma unroll 1
            for (int r = row; r < row + run.n; r++)
                add_row(
                    r, [&](int back, int v) { return behind(to, a, r, back, c + v); },
                    [&](int back, int v) { return input(to.x, a, a.b.seq_of[r], r, back, c + v); });
            continue;
        }
        const bool goes_on = known == run.begin;
        float dy[N][V];
        known = run.begin;
#pragma unroll
        for (int i = 0; i < 2 * TAPS - 2; i++)
            if (goes_on)
                copy(x[i], x[i + RUN]);
            else
                read_row(x[i], to.x + c, a.x_stride, run, row - TAPS + 1 + i);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (i >= TAPS - 1) read_row(x[i + TAPS - 1], to.x + c, a.x_stride, run, row + i);
            if (i >= TAPS - 1 || !goes_on) read_row(dy[i], to.dy + c, a.width, run, row + i);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (i < TAPS - 1 && goes_on) {
                copy(sums[i], sums[i + RUN]);
                continue;
            }
            convolve(sums[i], x, i + TAPS - 1, w, a.taps);
            unrolled<V>([&](int v) { sums[i][v] = conv_slope(a, sums[i][v], dy[i][v]); });
        }
#pragma unroll
        for (int i = 0; i < RUN; i++)
            if (i < run.n)
                add_row(
                    row + i, [&](int back, int v) { return sums[i + back][v]; },
                    [&](int back, int v) { return x[i + TAPS - 1 - back][v]; });
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int64_t at = (int64_t)blockIdx.x * a.width + c + v;
        to.db[at] = db[v];
#pragma unroll
        for (int back = 0; back < TAPS; back++)
            if (back < a.taps) to.dw[at * a.taps + a.taps - 1 - back] = dw[back][v];
    }
}

void cuda_short_conv_back(struct device *dev, void *dx, float *dw, float *db, const void *dy,
                          const struct conv_args *a, const struct delta_shape *s)
{
    const struct conv_rows rows = conv_rows_of(a, s);
    const int width = rows.width, stretches = ceil_div(rows.b.n_tokens, STRETCH);
    if (rows.b.n_tokens <= 0) return;
    float *parts = (float *)cuda_workspace(dev, cuda_conv_scratch(s, rows.b.n_tokens));
    float *bias_parts = parts + (int64_t)stretches * width * s->taps;
    if (!parts) return;
    with_channels(s->dt, rows, {a->x, dx, dy}, [&](auto t, auto v, auto taps) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value, TAPS = decltype(taps)::value;
        const conv_back_arrays<T> to = {(T *)dx,           parts,           bias_parts,
                                        (const T *)dy,     (const T *)a->x, (const T *)a->w,
                                        (const T *)a->bias};
        cuda_launch(dev, "short_conv_back", conv_back_kernel<T, V, TAPS>,
                    dim3(stretches, ceil_div(width, V * CONV_THREADS)), CONV_THREADS, 0, to, rows);
    });
    if (dw) cuda_add_parts(dev, dw, parts, stretches, width * s->taps);
    if (db) cuda_add_parts(dev, db, bias_parts, stretches, width);
}
