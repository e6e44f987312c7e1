/* ssm.cu: Mamba-2's scan (ops.h, scan_args) and its gradient, row after row, as four sweeps of one
 * recurrence (kernels/cpu/ssm.c has the table): M = carry * M + p q^T, and each row gives M^T r.
 *
 * A block has one head of a sequence, of a packed batch with those that go on behind it. M (a, b)
 * is in registers: LANES lanes of a warp share a column and have PART of its entries each. Each
 * warp makes p and r of a row for itself, in shared memory; what the next row needs is loaded
 * meanwhile. Blocks take one unit after another, so that scratch is bounded by the blocks that run.
 * Sums over a row's columns are of warps, and those over heads, warps and rows kernels of their
 * own, in a fixed order. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/recurrence/recurrence.cuh"

#define LANES          4            // that share a column
#define COLUMNS        (32 / LANES) // of a warp
#define MAX_WARPS      (DELTA_MAX_DIM / COLUMNS)
#define PARTS_OF_LANE  (DELTA_MAX_DIM / 32) // of a row's vector that a lane loads
#define BLOCKS_PER_SM  4
#define CHUNK          64 // rows between those whose e is taken from states
#define SHARED_THREADS 256

enum what { FORWARD, OF_C, OF_U, OF_B };

template <typename T> struct scan_arrays {
    const T *xbc, *steps, *a_log, *dt_bias, *skip, *dout;
    int64_t stride; // of steps
    T *out;         // of FORWARD
    T *dxbc, *dsteps;
    float *vectors; // (T, n_heads, 2, key_dim) of a head's dB and dC
    float *sums;    // (T, n_heads, 2, MAX_WARPS) of x . du and x . dout, each warp's
    float *c_dc;    // (T, n_heads)
    float *shared;  // (T, n_heads, 3) a row's part of the gradients of a_log, dt_bias and skip
    float *blocks;  // each block's M
    float *kept;    // (chunks, n_heads, a block's M) before every CHUNK-th row of the batch, of S^T
    float *e;       // (chunks, n_heads, MAX_WARPS) of it, each warp's
};

// One of a row's vectors, and whether it is times the row's step.
template <typename T> struct operand {
    const T *at;
    int64_t stride;
    int n;
    bool scaled;
};

template <typename T> struct head_of_unit {
    operand<T> p, q, r;
    const T *steps;
    int64_t stride;
    float dt_bias, rate, min_step, skip;
    int part, column;
};

struct step_of_row {
    float raw, step, decay;
};

__device__ __forceinline__ step_of_row step_from(float raw, float dt_bias, float rate,
                                                 float min_step)
{
    step_of_row st;
    st.raw = raw + dt_bias;
    st.step = fmaxf(softplus_of(st.raw), min_step);
    st.decay = expf(-rate * st.step);
    return st;
}

template <typename T>
__device__ __forceinline__ head_of_unit<T> head_from(const scan_arrays<T> &x, const delta_shape &s,
                                                     what w, int head)
{
    const int keys = s.n_key_heads * s.key_dim, values = s.n_heads * s.head_dim;
    const int64_t width = 2 * keys + values;
    const T *b = x.xbc + values + head / (s.n_heads / s.n_key_heads) * s.key_dim;
    const operand<T> u = {x.xbc + head * s.head_dim, width, s.head_dim, true};
    const operand<T> B = {b, width, s.key_dim, false}, C = {b + keys, width, s.key_dim, false};
    const operand<T> y = {x.dout ? x.dout + head * s.head_dim : NULL, values, s.head_dim, false};
    const int lane = threadIdx.x % 32;
    head_of_unit<T> h;
    h.p = w == FORWARD ? B : w == OF_C ? u : w == OF_U ? C : y;
    h.q = w == FORWARD ? u : w == OF_C ? B : w == OF_U ? y : C;
    h.r = w == FORWARD ? C : w == OF_C ? y : w == OF_U ? B : u;
    h.steps = x.steps + head;
    h.stride = x.stride;
    h.dt_bias = to_f32(x.dt_bias[head]);
    h.rate = expf(to_f32(x.a_log[head]));
    h.min_step = s.min_step;
    h.skip = to_f32(x.skip[head]);
    h.part = lane / COLUMNS;
    h.column = threadIdx.x / 32 * COLUMNS + lane % COLUMNS;
    return h;
}

// A row's numbers as they lie in memory, a lane's part.
struct raw_row {
    float p[PARTS_OF_LANE], r[PARTS_OF_LANE], q, step;
};

template <typename T> __device__ __forceinline__ raw_row read_raw(const head_of_unit<T> &h, int row)
{
    raw_row x;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PARTS_OF_LANE; i++) {
        const int e = lane + 32 * i;
        x.p[i] = e < h.p.n ? to_f32(h.p.at[row * h.p.stride + e]) : 0.f;
        x.r[i] = e < h.r.n ? to_f32(h.r.at[row * h.r.stride + e]) : 0.f;
    }
    x.q = h.column < h.q.n ? to_f32(h.q.at[row * h.q.stride + h.column]) : 0.f;
    x.step = to_f32(h.steps[row * h.stride]);
    return x;
}

// A warp's; the parts of a column are read side by side, from different banks.
template <int PART> struct alignas(16) row_vectors {
    static constexpr int PITCH = PART + 4;
    float p[LANES * PITCH], r[LANES * PITCH];

    __device__ __forceinline__ void take(const raw_row &x, float p_scale, float r_scale)
    {
        const int lane = threadIdx.x % 32;
        __syncwarp(); // the row before is done with
#pragma unroll
        for (int i = 0; i < PARTS_OF_LANE; i++) {
            const int e = lane + 32 * i;
            if (e >= LANES * PART) continue;
            p[e / PART * PITCH + e % PART] = p_scale * x.p[i];
            r[e / PART * PITCH + e % PART] = r_scale * x.r[i];
        }
        __syncwarp();
    }
};

// A lane's part of M, one row further; returns what the column gives.
template <int PART>
__device__ __forceinline__ float advance(float (&M)[PART], const row_vectors<PART> &row, int part,
                                         float q, float carry)
{
    const float *own_p = row.p + part * row.PITCH, *own_r = row.r + part * row.PITCH;
    float out[4] = {};
#pragma unroll
    for (int i = 0; i < PART; i += 4) {
        const float4 p = *(const float4 *)(own_p + i), r = *(const float4 *)(own_r + i);
        const float ps[4] = {p.x, p.y, p.z, p.w}, rs[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            M[i + k] = fmaf(ps[k], q, carry * M[i + k]);
            out[k] = fmaf(M[i + k], rs[k], out[k]);
        }
    }
    float sum = (out[0] + out[1]) + (out[2] + out[3]);
#pragma unroll
    for (int o = COLUMNS; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
    return sum;
}

// What a row gives, to where it belongs.
template <typename T>
__device__ __forceinline__ void give(const scan_arrays<T> &x, const head_of_unit<T> &h,
                                     const delta_shape &s, what w, int head, int row, float step,
                                     float out)
{
    const bool speaks = h.part == 0 && h.column < h.q.n;
    const int64_t at = (int64_t)row * s.n_heads + head;
    const int64_t width = 2 * s.n_key_heads * s.key_dim + s.n_heads * s.head_dim;
    const int value = head * s.head_dim + h.column;
    if (w == FORWARD) {
        if (speaks)
            x.out[at * s.head_dim + h.column] =
                from_f32<T>(fmaf(h.skip, to_f32(x.xbc[row * width + value]), out));
    } else if (w == OF_U) {
        const float in = speaks ? to_f32(x.xbc[row * width + value]) : 0.f;
        const float dout = speaks ? to_f32(x.dout[at * s.head_dim + h.column]) : 0.f;
        if (speaks) x.dxbc[row * width + value] = from_f32<T>(fmaf(h.skip, dout, step * out));
        const float x_du = lanes_sum(in * out), x_dout = lanes_sum(in * dout);
        float *to = x.sums + at * 2 * MAX_WARPS + threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) {
            to[0] = x_du;
            to[MAX_WARPS] = x_dout;
        }
    } else if (speaks) {
        x.vectors[(at * 2 + (w == OF_C)) * s.key_dim + h.column] = out;
    }
}

// The rows of a sequence; backwards M is left as that before the first.
template <typename T, int PART>
__device__ __forceinline__ void run(float (&M)[PART], const scan_arrays<T> &x,
                                    const head_of_unit<T> &h, row_vectors<PART> &mine,
                                    const delta_shape &s, what w, int head, int first, int end)
{
    const bool back = w == OF_U || w == OF_B;
    const int n = end - first;
    float carry = 1.f;
    raw_row next = read_raw(h, back ? end - 1 : first);
    for (int i = 0; i < n; i++) {
        const int row = back ? end - 1 - i : first + i;
        const step_of_row st = step_from(next.step, h.dt_bias, h.rate, h.min_step);
        const float q = h.q.scaled ? st.step * next.q : next.q;
        mine.take(next, h.p.scaled ? st.step : 1.f, h.r.scaled ? st.step : 1.f);
        if (i + 1 < n) next = read_raw(h, back ? row - 1 : row + 1);
        const int64_t chunk = (int64_t)(row / CHUNK) * s.n_heads + head;
        float *kept = x.kept + chunk * PART * blockDim.x + threadIdx.x;
        if (w == OF_C && row % CHUNK == 0)
#pragma unroll
            for (int k = 0; k < PART; k++) kept[k * blockDim.x] = M[k];
        const float out = advance(M, mine, h.part, q, back ? carry : st.decay);
        give(x, h, s, w, head, row, st.step, out);
        carry = st.decay;
        if (w == OF_B && row % CHUNK == 0) {
            float sum = 0;
#pragma unroll
            for (int k = 0; k < PART; k++) sum = fmaf(kept[k * blockDim.x], M[k], sum);
            sum = lanes_sum(sum);
            if (threadIdx.x % 32 == 0) x.e[chunk * MAX_WARPS + threadIdx.x / 32] = carry * sum;
        }
    }
    for (int i = 0; back && i < PART; i++) M[i] *= carry;
}

// A head's S in a slot, (key_dim, head_dim).
template <int PART, typename F>
__device__ __forceinline__ void each_in_slot(const delta_rows &b, int slot, const delta_shape &s,
                                             int head, int part, int column, F f)
{
    const int width = 2 * s.n_key_heads * s.key_dim + s.n_heads * s.head_dim;
    float *at = b.states + slot * b.slot_elements + (int64_t)(s.taps - 1 + s.ahead) * width +
                (int64_t)head * s.key_dim * s.head_dim;
#pragma unroll
    for (int i = 0; i < PART; i++) {
        const int k = part * PART + i;
        if (k < s.key_dim && column < s.head_dim) f(i, at[k * s.head_dim + column]);
    }
}

// Units of packed batches: the sequence, then those behind it; backwards these first.
template <typename T, int PART>
__device__ __forceinline__ void run_packed(float (&M)[PART], const scan_arrays<T> &x,
                                           const head_of_unit<T> &h, row_vectors<PART> &mine,
                                           const delta_rows &b, const delta_shape &s, what w,
                                           int head, int seq)
{
    const bool back = w == OF_U || w == OF_B;
    const int end = delta_unit_end(b, seq);
    float *other = x.blocks + (int64_t)blockIdx.x * PART * blockDim.x + threadIdx.x;
    if (!back) run(M, x, h, mine, s, w, head, b.query_start[seq], b.query_start[seq + 1]);
#pragma unroll
    for (int i = 0; i < PART; i++) other[i * blockDim.x] = M[i];
    for (int child = seq + 1; child < end; child++) {
#pragma unroll
        for (int i = 0; i < PART; i++) M[i] = back ? 0.f : other[i * blockDim.x];
        run(M, x, h, mine, s, w, head, b.query_start[child], b.query_start[child + 1]);
        for (int i = 0; back && i < PART; i++) other[i * blockDim.x] += M[i];
    }
    if (!back) return;
#pragma unroll
    for (int i = 0; i < PART; i++) M[i] = other[i * blockDim.x];
    run(M, x, h, mine, s, w, head, b.query_start[seq], b.query_start[seq + 1]);
}

template <typename T, int PART>
__device__ __forceinline__ void
run_paged(float (&M)[PART], const scan_arrays<T> &x, const head_of_unit<T> &h,
          row_vectors<PART> &mine, const delta_rows &b, const delta_shape &s, int head, int seq)
{
    const int first = b.query_start[seq], end = delta_unit_end(b, seq);
    if (b.state_slot[seq] < 0) {
        if (h.part == 0 && h.column < s.head_dim)
            x.out[((int64_t)first * s.n_heads + head) * s.head_dim + h.column] = from_f32<T>(0.f);
        return;
    }
    if (b.positions[first] > 0)
        each_in_slot<PART>(b, b.state_from[seq], s, head, h.part, h.column,
                           [&](int i, float &at) { M[i] = at; });
    for (int next = seq; next < end; next++) {
        run(M, x, h, mine, s, FORWARD, head, b.query_start[next], b.query_start[next + 1]);
        if (delta_leaves(b, next, end))
            each_in_slot<PART>(b, b.state_slot[next], s, head, h.part, h.column,
                               [&](int i, float &at) { at = M[i]; });
    }
}

template <typename T, int PART>
__global__ void __launch_bounds__(MAX_WARPS * 32)
    scan_kernel(scan_arrays<T> x, delta_rows b, delta_shape s, what w)
{
    grid_begin();
    __shared__ row_vectors<PART> shared[MAX_WARPS];
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads; unit += gridDim.x) {
        const int seq = unit / s.n_heads, head = unit % s.n_heads;
        if (!delta_begins(b, seq)) continue;
        const head_of_unit<T> h = head_from(x, s, w, head);
        float M[PART] = {};
        if (b.paged)
            run_paged(M, x, h, shared[threadIdx.x / 32], b, s, head, seq);
        else
            run_packed(M, x, h, shared[threadIdx.x / 32], b, s, w, head, seq);
    }
}

static int threads_of(int columns)
{
    return ceil_div(columns, COLUMNS) * 32;
}

static int blocks_of(struct device *dev, const struct delta_shape *s, int n_seqs)
{
    const int units = n_seqs * s->n_heads, most = cuda_use(dev)->n_sms * BLOCKS_PER_SM;
    return units < most ? units : most;
}

// The parts of a column are as short as its a entries allow.
template <typename T>
static void launch_sweep(struct device *dev, const char *name, const scan_arrays<T> &x,
                         const struct delta_rows &rows, const struct delta_shape *s, what w,
                         int blocks)
{
    const bool by_key = w == FORWARD || w == OF_U; // M is (key_dim, head_dim)
    const int a = by_key ? s->key_dim : s->head_dim, b = by_key ? s->head_dim : s->key_dim;
    if (a <= 16 * LANES)
        cuda_launch(dev, name, scan_kernel<T, 16>, blocks, threads_of(b), 0, x, rows, *s, w);
    else
        cuda_launch(dev, name, scan_kernel<T, 32>, blocks, threads_of(b), 0, x, rows, *s, w);
}

static int64_t block_floats(const struct delta_shape *s)
{
    const int most = s->key_dim > s->head_dim ? s->key_dim : s->head_dim;
    return (int64_t)(most <= 16 * LANES ? 16 : 32) * threads_of(most);
}

template <typename T> static scan_arrays<T> arrays_of(const struct scan_args *a)
{
    scan_arrays<T> x = {};
    x.xbc = (const T *)a->xbc;
    x.steps = (const T *)a->steps;
    x.a_log = (const T *)a->a_log;
    x.dt_bias = (const T *)a->dt_bias;
    x.skip = (const T *)a->skip;
    x.stride = a->stride;
    return x;
}

void cuda_ssm_scan(struct device *dev, void *out, const struct scan_args *a,
                   const struct delta_shape *s)
{
    const struct delta_rows rows = delta_rows_of(&a->batch);
    if (rows.n_tokens <= 0 || !delta_takes(dev, a->batch.view)) return;
    const int blocks = rows.paged ? rows.n_seqs * s->n_heads : blocks_of(dev, s, rows.n_seqs);
    float *scratch = NULL; // a paged batch is computed without: its step may be being captured
    if (!rows.paged &&
        !(scratch = (float *)cuda_workspace(dev, blocks * block_floats(s) * sizeof(float))))
        return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        scan_arrays<T> x = arrays_of<T>(a);
        x.out = (T *)out;
        x.blocks = scratch;
        launch_sweep(dev, "ssm_scan", x, rows, s, FORWARD, blocks);
    });
}

// ---- backward -----------------------------------------------------------------------------------

// dB (block z 0) or dC (1) of a row (block x) and group (block y): the sum over its heads; and of
// each head C . dC. A warp's.
template <typename T> __global__ void vectors_kernel(scan_arrays<T> x, delta_shape s)
{
    grid_begin();
    const int each = s.n_heads / s.n_key_heads, lane = threadIdx.x;
    const int keys = s.n_key_heads * s.key_dim, values = s.n_heads * s.head_dim;
    const int64_t at = (int64_t)blockIdx.x * (2 * keys + values) + values + blockIdx.z * keys +
                       blockIdx.y * s.key_dim;
    float sums[PARTS_OF_LANE] = {};
    for (int h = 0; h < each; h++) {
        const int64_t head = (int64_t)blockIdx.x * s.n_heads + blockIdx.y * each + h;
        float c_dc = 0;
        for (int i = 0; i < PARTS_OF_LANE; i++) {
            const int e = lane + 32 * i;
            if (e >= s.key_dim) continue;
            const float d = x.vectors[(head * 2 + blockIdx.z) * s.key_dim + e];
            sums[i] += d;
            c_dc = fmaf(to_f32(x.xbc[at + e]), d, c_dc);
        }
        c_dc = lanes_sum(c_dc);
        if (blockIdx.z == 1 && lane == 0) x.c_dc[head] = c_dc;
    }
    for (int i = 0; i < PARTS_OF_LANE; i++)
        if (lane + 32 * i < s.key_dim) x.dxbc[at + lane + 32 * i] = from_f32<T>(sums[i]);
}

__device__ __forceinline__ int warps_of(int columns)
{
    return (columns + COLUMNS - 1) / COLUMNS;
}

// The steps of a sequence's rows, from the last to the first, 32 at a time; e is that behind them,
// and what is returned that of the first row. A warp's.
template <typename T>
__device__ __forceinline__ float back_steps(const scan_arrays<T> &x, const delta_shape &s, int head,
                                            float rate, float dt_bias, int first, int end, float e)
{
    const int warps = warps_of(s.head_dim), warps_of_e = warps_of(s.key_dim);
    const int lane = threadIdx.x;
    for (int last = end - 1; last >= first; last -= 32) {
        const int row = last - lane;
        const int64_t at = (int64_t)row * s.n_heads + head;
        bool alone = false; // e is own, whatever is behind
        float own = 0, x_du = 0, x_dout = 0;
        step_of_row st = {};
        if (row >= first) {
            st = step_from(to_f32(x.steps[row * x.stride + head]), dt_bias, rate, s.min_step);
            for (int w = 0; w < warps; w++) {
                x_du += x.sums[at * 2 * MAX_WARPS + w];
                x_dout += x.sums[(at * 2 + 1) * MAX_WARPS + w];
            }
            own = x.c_dc[at] - st.step * x_du;
            alone = row % CHUNK == 0;
            if (alone) own = 0;
            for (int w = 0; alone && w < warps_of_e; w++)
                own += x.e[((int64_t)(row / CHUNK) * s.n_heads + head) * MAX_WARPS + w];
        }
        for (int o = 1; o < 32; o <<= 1) {
            const float before = __shfl_up_sync(~0u, own, o);
            const bool stops = __shfl_up_sync(~0u, alone, o);
            if (lane < o) continue;
            if (!alone) own += before;
            alone = alone || stops;
        }
        const float here = alone ? own : e + own;
        e = __shfl_sync(~0u, here, 31);
        if (row < first) continue;
        const float slope = softplus_of(st.raw) >= s.min_step ? sigmoid(st.raw) : 0.f;
        const float dstep = (x_du - rate * here) * slope;
        x.dsteps[row * x.stride + head] = from_f32<T>(dstep);
        x.shared[at * 3] = -rate * st.step * here;
        x.shared[at * 3 + 1] = dstep;
        x.shared[at * 3 + 2] = x_dout;
    }
    return e;
}

// Block x is the sequence that begins a unit, block y the head.
template <typename T> __global__ void steps_kernel(scan_arrays<T> x, delta_rows b, delta_shape s)
{
    grid_begin();
    const int seq = blockIdx.x, head = blockIdx.y;
    if (!delta_begins(b, seq)) return;
    const float rate = expf(to_f32(x.a_log[head])), dt_bias = to_f32(x.dt_bias[head]);
    float behind = 0;
    for (int child = seq + 1; child < delta_unit_end(b, seq); child++)
        behind += back_steps(x, s, head, rate, dt_bias, b.query_start[child],
                             b.query_start[child + 1], 0.f);
    back_steps(x, s, head, rate, dt_bias, b.query_start[seq], b.query_start[seq + 1], behind);
}

// What all rows of a head share: block x is the head.
static __global__ void scan_shared_kernel(float *da_log, float *ddt_bias, float *dskip,
                                          const float *parts, int rows, int n_heads)
{
    grid_begin();
    __shared__ float shared[32];
    float *const to[3] = {da_log, ddt_bias, dskip};
    float sums[3] = {};
    for (int row = threadIdx.x; row < rows; row += SHARED_THREADS)
        for (int i = 0; i < 3; i++) sums[i] += parts[((int64_t)row * n_heads + blockIdx.x) * 3 + i];
    for (int i = 0; i < 3; i++) {
        const float sum = block_sum(sums[i], shared);
        if (threadIdx.x == 0 && to[i]) to[i][blockIdx.x] += sum;
    }
}

// Scratch of the gradient, in floats: where things begin.
struct scan_memory {
    int64_t vectors, sums, c_dc, shared, kept, e, end;
};

static struct scan_memory lay_out_scan(const struct delta_shape *s, int blocks, int rows)
{
    const int64_t heads = (int64_t)rows * s->n_heads;
    struct scan_memory m;
    m.vectors = blocks * block_floats(s);
    m.sums = m.vectors + heads * 2 * s->key_dim;
    m.c_dc = m.sums + heads * 2 * MAX_WARPS;
    m.shared = m.c_dc + heads;
    m.kept = m.shared + heads * 3;
    m.e = m.kept + (int64_t)ceil_div(rows, CHUNK) * s->n_heads * block_floats(s);
    m.end = m.e + (int64_t)ceil_div(rows, CHUNK) * s->n_heads * MAX_WARPS;
    return m;
}

size_t cuda_ssm_scratch(struct device *dev, const struct delta_shape *s, int rows)
{
    return lay_out_scan(s, cuda_use(dev)->n_sms * BLOCKS_PER_SM, rows).end * sizeof(float);
}

void cuda_ssm_scan_back(struct device *dev, const struct scan_grads *grads, const void *dout,
                        const struct scan_args *a, const struct delta_shape *s)
{
    const struct delta_rows rows = delta_rows_of(&a->batch);
    const int n = rows.n_tokens, blocks = blocks_of(dev, s, rows.n_seqs);
    if (n <= 0 || !delta_takes(dev, a->batch.view)) return;
    const struct scan_memory m = lay_out_scan(s, blocks, n);
    float *scratch = (float *)cuda_workspace(dev, m.end * sizeof(float));
    if (!scratch) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        scan_arrays<T> x = arrays_of<T>(a);
        x.dout = (const T *)dout;
        x.dxbc = (T *)grads->xbc;
        x.dsteps = (T *)grads->steps;
        x.blocks = scratch;
        x.vectors = scratch + m.vectors;
        x.sums = scratch + m.sums;
        x.c_dc = scratch + m.c_dc;
        x.shared = scratch + m.shared;
        x.kept = scratch + m.kept;
        x.e = scratch + m.e;
        for (int w = OF_C; w <= OF_B; w++)
            launch_sweep(dev, "ssm_scan_back", x, rows, s, (what)w, blocks);
        cuda_launch(dev, "ssm_scan_back", vectors_kernel<T>, dim3(n, s->n_key_heads, 2), 32, 0, x,
                    *s);
        cuda_launch(dev, "ssm_scan_back", steps_kernel<T>, dim3(rows.n_seqs, s->n_heads), 32, 0, x,
                    rows, *s);
    });
    if (grads->a_log || grads->dt_bias || grads->skip)
        cuda_launch(dev, "ssm_scan_back", scan_shared_kernel, s->n_heads, SHARED_THREADS, 0,
                    grads->a_log, grads->dt_bias, grads->skip, (scratch + m.shared), n, s->n_heads);
}
