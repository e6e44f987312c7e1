/* delta.cu: the recurrences of linear attention: the gated delta rule (ops.h, delta_shape) and its
 * gradient, row after row; and short convolutions, in the end.
 *
 * A block has one value head of a sequence, of a packed batch with those that go on behind it.
 * Its S (key_dim, head_dim) is in registers, PART entries of a column to a thread: a warp has a few
 * columns, and PARTS lanes share one. Columns need nothing of each other. Each warp makes q and k
 * of a row for itself, in shared memory, where all its lanes read them; what the next row needs is
 * loaded meanwhile. Blocks take one unit after another, so that scratch is bounded by the blocks
 * that run, not by the batch.
 *
 * The gradient needs S before every row, from the last to the first. A block goes forward again,
 * keeps S before every CHUNK-th row, and from there on S before each of a chunk's rows while it is
 * that chunk's turn: of a sequence of n rows n / CHUNK + CHUNK matrices, n_sms times. Sums over
 * columns (of dq, dk, and of a row's gates) are of warps, in order; those over the value heads of a
 * key head, and over rows, are kernels of their own. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/recurrence/recurrence.cuh"

#define CHUNK          64
#define PART           32
#define PART_PITCH     (PART + 4) // in shared memory, where the parts are read side by side
#define PARTS          (DELTA_MAX_DIM / PART) // of a column; those behind a narrower head's are zeros
#define MAX_WARPS      (DELTA_MAX_DIM * PARTS / 32)
#define BLOCKS_PER_SM  4 // of the forward pass of packed batches
#define LENGTH_EPS     1e-6f
#define SHARED_THREADS 256

// ---- one row ------------------------------------------------------------------------------------

struct source { // of a value head, and which part of which column a thread has
    const float *gates;
    float rate, dt_bias; // exp(a_log)
    int head, key_at, value_at, width, n_heads, key_dim, head_dim;
    int keys; // width of the queries, and of the keys
    int part, column;
};

// A row's numbers as they lie in memory, a lane's part.
struct raw_row {
    float q[PARTS], k[PARTS], v, b, a;
};

template <typename T>
__device__ __forceinline__ raw_row read_raw(const T *qkv, const source &f, int row)
{
    raw_row r;
    const T *at = qkv + (int64_t)row * f.width;
    const float *gates = f.gates + (int64_t)row * 2 * f.n_heads;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        int e = lane + PART * i;
        r.q[i] = e < f.key_dim ? to_f32(at[f.key_at + e]) : 0.f;
        r.k[i] = e < f.key_dim ? to_f32(at[f.keys + f.key_at + e]) : 0.f;
    }
    r.v = f.column < f.head_dim ? to_f32(at[f.value_at + f.column]) : 0.f;
    r.b = gates[f.head];
    r.a = gates[f.n_heads + f.head];
    return r;
}

// What the rule takes of a row, beside q and k, which are in the warp's shared memory.
struct gates_of_row {
    float v, beta, decay, a, softplus;
};

struct vectors { // a warp's
    float q[PARTS * PART_PITCH], k[PARTS * PART_PITCH];
};

__device__ __forceinline__ gates_of_row prepare(vectors &to, const raw_row &r, const source &f)
{
    gates_of_row g;
    float qq = 0, kk = 0;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        qq = fmaf(r.q[i], r.q[i], qq);
        kk = fmaf(r.k[i], r.k[i], kk);
    }
    float q_scale = 1.f / (sqrtf(lanes_sum(qq) + LENGTH_EPS) * sqrtf((float)f.key_dim));
    float k_scale = 1.f / sqrtf(lanes_sum(kk) + LENGTH_EPS);
    __syncwarp(); // the row before is done with
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        to.q[lane + PART_PITCH * i] = r.q[i] * q_scale;
        to.k[lane + PART_PITCH * i] = r.k[i] * k_scale;
    }
    __syncwarp();
    g.v = r.v;
    g.beta = sigmoid(r.b);
    g.a = r.a + f.dt_bias;
    g.softplus = softplus_of(g.a);
    g.decay = expf(-f.rate * g.softplus);
    return g;
}

// The sum over the lanes that share a column, given to all of them.
__device__ __forceinline__ float parts_sum(float x)
{
#pragma unroll
    for (int o = 32 / PARTS; o < 32; o <<= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

// A thread's part of S, one row further; returns what the column gives. error: the value less what
// S had for its key.
__device__ __forceinline__ float advance(float (&S)[PART], const vectors &row,
                                         const gates_of_row &g, const source &f, float &error)
{
    const float *own_k = row.k + f.part * PART_PITCH, *own_q = row.q + f.part * PART_PITCH;
    float had[4] = {}, out[4] = {};
#pragma unroll
    for (int k = 0; k < PART; k += 4) {
        float4 key = *(const float4 *)(own_k + k);
        float keys[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            S[k + i] *= g.decay;
            had[i] = fmaf(S[k + i], keys[i], had[i]);
        }
    }
    error = g.v - parts_sum((had[0] + had[1]) + (had[2] + had[3]));
    float add = g.beta * error;
#pragma unroll
    for (int k = 0; k < PART; k += 4) {
        float4 key = *(const float4 *)(own_k + k), query = *(const float4 *)(own_q + k);
        float keys[4] = {key.x, key.y, key.z, key.w};
        float queries[4] = {query.x, query.y, query.z, query.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            S[k + i] = fmaf(keys[i], add, S[k + i]);
            out[i] = fmaf(S[k + i], queries[i], out[i]);
        }
    }
    return parts_sum((out[0] + out[1]) + (out[2] + out[3]));
}

__device__ __forceinline__ source source_of(const delta_shape &s, const float *gates, float a_log,
                                            float dt_bias, int head)
{
    const int columns = 32 / PARTS, lane = threadIdx.x % 32;
    source f;
    f.gates = gates;
    f.rate = expf(a_log);
    f.dt_bias = dt_bias;
    f.head = head;
    f.keys = s.n_key_heads * s.key_dim;
    f.key_at = head / (s.n_heads / s.n_key_heads) * s.key_dim;
    f.value_at = 2 * f.keys + head * s.head_dim;
    f.width = 2 * f.keys + s.n_heads * s.head_dim;
    f.n_heads = s.n_heads;
    f.key_dim = s.key_dim;
    f.head_dim = s.head_dim;
    f.part = lane / columns;
    f.column = threadIdx.x / 32 * columns + lane % columns;
    return f;
}

// Whether a thread stores what its column has in common with the lanes that share it.
__device__ __forceinline__ bool speaks(const source &f)
{
    return f.part == 0 && f.column < f.head_dim;
}

// ---- S in memory --------------------------------------------------------------------------------

// In scratch a thread's part has a place of its own, whatever the head's size.
__device__ __forceinline__ void keep(float *to, const float (&S)[PART])
{
#pragma unroll
    for (int k = 0; k < PART; k++) to[k * blockDim.x + threadIdx.x] = S[k];
}

__device__ __forceinline__ void recall(float (&S)[PART], const float *from)
{
#pragma unroll
    for (int k = 0; k < PART; k++) S[k] = from[k * blockDim.x + threadIdx.x];
}

__device__ __forceinline__ void clear(float (&S)[PART])
{
#pragma unroll
    for (int k = 0; k < PART; k++) S[k] = 0.f;
}

// In a slot it lies (key_dim, head_dim).
__device__ __forceinline__ void read_slot(float (&S)[PART], const float *slot, const source &f)
{
#pragma unroll
    for (int i = 0; i < PART; i++) {
        int k = f.part * PART + i;
        S[i] = k < f.key_dim && f.column < f.head_dim ? slot[k * f.head_dim + f.column] : 0.f;
    }
}

// Where a head's S begins in a slot.
__device__ __forceinline__ float *slot_of(const delta_rows &b, int slot, const delta_shape &s,
                                          int head)
{
    const int width = 2 * s.n_key_heads * s.key_dim + s.n_heads * s.head_dim;
    return b.states + slot * b.slot_elements + (int64_t)(s.taps - 1) * width +
           (int64_t)head * s.key_dim * s.head_dim;
}

__device__ __forceinline__ void write_slot(float *slot, const float (&S)[PART], const source &f)
{
#pragma unroll
    for (int i = 0; i < PART; i++) {
        int k = f.part * PART + i;
        if (k < f.key_dim && f.column < f.head_dim) slot[k * f.head_dim + f.column] = S[i];
    }
}

// ---- forward ------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ void run(float (&S)[PART], T *out, const T *qkv, const source &f,
                                    vectors &row_vectors, int first, int end)
{
    float error;
    raw_row next = read_raw<T>(qkv, f, first);
    for (int row = first; row < end; row++) {
        gates_of_row g = prepare(row_vectors, next, f);
        if (row + 1 < end) next = read_raw<T>(qkv, f, row + 1);
        float y = advance(S, row_vectors, g, f, error);
        if (speaks(f))
            out[((int64_t)row * f.n_heads + f.head) * f.head_dim + f.column] = from_f32<T>(y);
    }
}

template <typename T>
__global__ void __launch_bounds__(MAX_WARPS * 32)
    delta_kernel(T *out, const T *qkv, const float *gates, const T *a_log, const T *dt_bias,
                 delta_rows b, delta_shape s, float *scratch)
{
    grid_begin();
    __shared__ vectors shared[MAX_WARPS];
    vectors &mine = shared[threadIdx.x / 32];
    float *prefix = scratch + (int64_t)blockIdx.x * PART * blockDim.x;
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads; unit += gridDim.x) {
        int seq = unit / s.n_heads, head = unit % s.n_heads;
        if (!delta_begins(b, seq)) continue;
        source f = source_of(s, gates, to_f32(a_log[head]), to_f32(dt_bias[head]), head);
        int first = b.query_start[seq], end = delta_unit_end(b, seq);
        float S[PART];
        clear(S);
        if (b.paged) {
            if (b.state_slot[seq] < 0) {
                if (speaks(f))
                    out[((int64_t)first * s.n_heads + head) * s.head_dim + f.column] =
                        from_f32<T>(0.f);
                continue;
            }
            if (b.positions[first] > 0) read_slot(S, slot_of(b, b.state_from[seq], s, head), f);
        }
        for (int next = seq; next < end; next++) {
            if (!b.paged && next > seq) recall(S, prefix);
            run<T>(S, out, qkv, f, mine, b.query_start[next], b.query_start[next + 1]);
            if (!b.paged && next == seq && end > seq + 1) keep(prefix, S);
            if (b.paged && delta_leaves(b, next, end))
                write_slot(slot_of(b, b.state_slot[next], s, head), S, f);
        }
    }
}

static int threads_of(const struct delta_shape *s)
{
    return ceil_div(s->head_dim * PARTS, 32) * 32;
}

static int64_t matrix_of(const struct delta_shape *s) // in scratch
{
    return (int64_t)PART * threads_of(s);
}

static int blocks_of(struct device *dev, const struct delta_shape *s, int n_seqs, int per_sm)
{
    const int units = n_seqs * s->n_heads, most = cuda_use(dev)->n_sms * per_sm;
    return units < most ? units : most;
}

void cuda_delta_rule(struct device *dev, void *out, const struct delta_args *a,
                     const struct delta_shape *s)
{
    const struct delta_rows rows = delta_rows_of(&a->batch);
    if (rows.n_tokens <= 0 || !delta_takes(dev, a->batch.view)) return;
    const int blocks =
        rows.paged ? rows.n_seqs * s->n_heads : blocks_of(dev, s, rows.n_seqs, BLOCKS_PER_SM);
    float *scratch = NULL; // a paged batch is computed without: its step may be being captured
    if (!rows.paged &&
        !(scratch = (float *)cuda_workspace(dev, blocks * matrix_of(s) * sizeof(float))))
        return;
    launch_typed(s->dt, dev, "delta_rule", delta_kernel, blocks, threads_of(s), 0, out, a->qkv,
                 a->gates, a->a_log, a->dt_bias, rows, *s, scratch);
}

// ---- backward -----------------------------------------------------------------------------------

// Scratch: each block's own, and what all write into. Where things begin, in floats.
struct back_memory {
    float *at;
    int64_t block;                              // a block's, of which:
    int64_t kept, chunk, errors, dS, dS_prefix; // see the file's head
    int64_t dvectors; // (T, n_heads, 2, key_dim): of q and k as the rule takes them
    int64_t shared;   // (T, n_heads, 2): a row's part of the gradients of a_log and dt_bias
    int64_t end;
};

static struct back_memory lay_out_back(const struct delta_shape *s, int blocks, int rows,
                                       int max_context)
{
    const int64_t matrix = matrix_of(s), heads = (int64_t)rows * s->n_heads;
    struct back_memory m = {};
    m.kept = 0; // of a prefix and of a sequence behind it: before every chunk, and behind the last
    m.chunk = m.kept + (ceil_div(max_context, CHUNK) + 3) * matrix;
    m.errors = m.chunk + CHUNK * matrix;
    m.dS = m.errors + (int64_t)CHUNK * threads_of(s);
    m.dS_prefix = m.dS + matrix;
    m.block = m.dS_prefix + matrix;
    m.dvectors = m.block * blocks;
    m.shared = m.dvectors + heads * 2 * s->key_dim;
    m.end = m.shared + heads * 2;
    return m;
}

// Of a short convolution.
static size_t conv_scratch(const struct delta_shape *s, int rows)
{
    return (size_t)rows * delta_conv_width(s) * sizeof(float);
}

size_t cuda_delta_scratch(struct device *dev, const struct delta_shape *s, int rows,
                          int max_context)
{
    if (s->n_heads == 0) return 0;
    if (delta_is_conv(s)) return conv_scratch(s, rows);
    if (s->is_scan) return max(conv_scratch(s, rows), cuda_ssm_scratch(dev, s, rows));
    const struct back_memory m = lay_out_back(s, cuda_use(dev)->n_sms, rows, max_context);
    const size_t back = m.end * sizeof(float), conv = conv_scratch(s, rows);
    const size_t forward =
        (size_t)cuda_use(dev)->n_sms * BLOCKS_PER_SM * matrix_of(s) * sizeof(float);
    return max(max(back, conv), forward);
}

// The sums over N neighbouring lanes of x[0] to x[N - 1]; the i-th of them has that of x[i].
template <int N> __device__ __forceinline__ float lane_sums(float (&x)[N])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int o = N / 2; o; o >>= 1) {
        bool upper = lane & o;
#pragma unroll
        for (int i = 0; i < o; i++) {
            float mine = upper ? x[i + o] : x[i], other = upper ? x[i] : x[i + o];
            x[i] = mine + __shfl_xor_sync(~0u, other, o);
        }
    }
    return x[0];
}

struct back_shared {
    vectors rows[MAX_WARPS];
    float dq[MAX_WARPS][PARTS * PART], dk[MAX_WARPS][PARTS * PART];
    float dbeta[MAX_WARPS], ddecay[MAX_WARPS];
};

template <typename T> struct back_arrays {
    T *dqkv, *dgates;
    const T *dout, *qkv;
};

// S before every chunk of a sequence's rows, and behind the last, from S on.
template <typename T>
__device__ __noinline__ float *keep_states(float *kept, const float *from, const T *qkv,
                                           const source &f, vectors &mine, int first, int end)
{
    float S[PART], error;
    if (from)
        recall(S, from);
    else
        clear(S);
    for (int row = first; row < end; row++) {
        if ((row - first) % CHUNK == 0) {
            keep(kept, S);
            kept += PART * blockDim.x;
        }
        gates_of_row g = prepare(mine, read_raw<T>(qkv, f, row), f);
        advance(S, mine, g, f, error);
    }
    keep(kept, S);
    return kept;
}

// S before each row of a chunk, and each row's error.
template <typename T>
__device__ __noinline__ void replay_chunk(float *chunk, float *errors, const float *from,
                                          const T *qkv, const source &f, vectors &mine, int first,
                                          int n)
{
    float S[PART], error;
    recall(S, from);
    for (int i = 0; i < n; i++) {
        keep(chunk + (int64_t)i * PART * blockDim.x, S);
        gates_of_row g = prepare(mine, read_raw<T>(qkv, f, first + i), f);
        advance(S, mine, g, f, error);
        errors[i * blockDim.x + threadIdx.x] = error;
    }
}

// The warps' sums of a row, added in order.
template <typename T>
__device__ __forceinline__ void join_warps(const back_shared &w, const back_arrays<T> &to,
                                           const back_memory &m, const source &f,
                                           const gates_of_row &g, int row)
{
    int warps = blockDim.x / 32;
    int64_t at = (int64_t)row * f.n_heads + f.head;
    for (int i = threadIdx.x; i < 2 * f.key_dim; i += blockDim.x) {
        bool is_key = i >= f.key_dim;
        int k = is_key ? i - f.key_dim : i;
        float sum = 0;
        for (int warp = 0; warp < warps; warp++) sum += is_key ? w.dk[warp][k] : w.dq[warp][k];
        m.at[m.dvectors + at * 2 * f.key_dim + i] = sum;
    }
    if (threadIdx.x > 0) return;
    float dbeta = 0, ddecay = 0;
    for (int warp = 0; warp < warps; warp++) {
        dbeta += w.dbeta[warp];
        ddecay += w.ddecay[warp];
    }
    float dexponent = -ddecay * g.decay * f.rate, da = dexponent * sigmoid(g.a); // of softplus(a)
    T *dgates = to.dgates + (int64_t)row * 2 * f.n_heads + f.head;
    dgates[0] = from_f32<T>(dbeta * g.beta * (1.f - g.beta));
    dgates[f.n_heads] = from_f32<T>(da);
    m.at[m.shared + at * 2] = dexponent * g.softplus;
    m.at[m.shared + at * 2 + 1] = da;
}

// From the gradient of S behind a row to that before it, in dS, and the row's own gradients.
template <typename T>
__device__ __forceinline__ void back_row(float (&dS)[PART], back_shared &w, const float *before,
                                         float error, const back_arrays<T> &to,
                                         const back_memory &m, const source &f, int row)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t value = ((int64_t)row * f.n_heads + f.head) * f.head_dim + f.column;
    const float *q = w.rows[warp].q + f.part * PART_PITCH,
                *k = w.rows[warp].k + f.part * PART_PITCH;
    gates_of_row g = prepare(w.rows[warp], read_raw<T>(to.qkv, f, row), f);
    float dout = f.column < f.head_dim ? to_f32(to.dout[value]) : 0.f;
    float add = g.beta * error, dadd = 0, ddecay = 0;
#pragma unroll
    for (int i = 0; i < PART; i++) {
        dS[i] = fmaf(q[i], dout, dS[i]);
        dadd = fmaf(dS[i], k[i], dadd);
    }
    dadd = parts_sum(dadd);
    float dv = g.beta * dadd, dread = -dv;
    if (speaks(f)) to.dqkv[(int64_t)row * f.width + f.value_at + f.column] = from_f32<T>(dv);
    constexpr int COLUMNS = 32 / PARTS;
#pragma unroll
    for (int from = 0; from < PART; from += COLUMNS) {
        float dq[COLUMNS], dk[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int i = from + c;
            float S = before[i * blockDim.x + threadIdx.x], decayed = g.decay * S;
            dq[c] = fmaf(k[i], add, decayed) * dout;
            dk[c] = fmaf(dS[i], add, decayed * dread);
            dS[i] = fmaf(k[i], dread, dS[i]);
            ddecay = fmaf(S, dS[i], ddecay);
            dS[i] *= g.decay;
        }
        int at = f.part * PART + from + lane % COLUMNS;
        w.dq[warp][at] = lane_sums<COLUMNS>(dq);
        w.dk[warp][at] = lane_sums<COLUMNS>(dk);
    }
    float dbeta = lanes_sum(speaks(f) ? dadd * error : 0.f);
    ddecay = lanes_sum(ddecay);
    if (lane == 0) {
        w.dbeta[warp] = dbeta;
        w.ddecay[warp] = ddecay;
    }
    __syncthreads();
    join_warps<T>(w, to, m, f, g, row);
    __syncthreads();
}

// The rows of a sequence from the last to the first; dS is in the block's scratch between chunks.
template <typename T>
__device__ void back_sequence(back_shared &w, float *memory, const float *kept,
                              const back_arrays<T> &to, const back_memory &m, const source &f,
                              int first, int end)
{
    for (int c = (end - first + CHUNK - 1) / CHUNK - 1; c >= 0; c--) {
        int from = first + c * CHUNK, n = min(end - from, CHUNK);
        replay_chunk<T>(memory + m.chunk, memory + m.errors, kept + (int64_t)c * PART * blockDim.x,
                        to.qkv, f, w.rows[threadIdx.x / 32], from, n);
        float dS[PART];
        recall(dS, memory + m.dS);
        for (int i = n - 1; i >= 0; i--)
            back_row<T>(dS, w, memory + m.chunk + (int64_t)i * PART * blockDim.x,
                        memory[m.errors + i * blockDim.x + threadIdx.x], to, m, f, from + i);
        keep(memory + m.dS, dS);
    }
}

template <typename T>
__global__ void __launch_bounds__(MAX_WARPS * 32)
    delta_back_kernel(back_arrays<T> to, back_memory m, const float *gates, const T *a_log,
                      const T *dt_bias, delta_rows b, delta_shape s)
{
    grid_begin();
    __shared__ back_shared w;
    float *memory = m.at + (int64_t)blockIdx.x * m.block;
    vectors &mine = w.rows[threadIdx.x / 32];
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads; unit += gridDim.x) {
        int seq = unit / s.n_heads, head = unit % s.n_heads;
        if (!delta_begins(b, seq)) continue;
        source f = source_of(s, gates, to_f32(a_log[head]), to_f32(dt_bias[head]), head);
        float *kept = memory + m.kept, *dS = memory + m.dS, *sum = memory + m.dS_prefix;
        float *behind =
            keep_states<T>(kept, NULL, to.qkv, f, mine, b.query_start[seq], b.query_start[seq + 1]);
        float *own = behind + PART * blockDim.x;
        for (int k = 0; k < PART; k++) sum[k * blockDim.x + threadIdx.x] = 0.f;
        for (int child = seq + 1; child < delta_unit_end(b, seq); child++) {
            int first = b.query_start[child], end = b.query_start[child + 1];
            keep_states<T>(own, behind, to.qkv, f, mine, first, end);
            for (int k = 0; k < PART; k++) dS[k * blockDim.x + threadIdx.x] = 0.f;
            back_sequence<T>(w, memory, own, to, m, f, first, end);
            for (int k = 0; k < PART; k++)
                sum[k * blockDim.x + threadIdx.x] += dS[k * blockDim.x + threadIdx.x];
        }
        for (int k = 0; k < PART; k++)
            dS[k * blockDim.x + threadIdx.x] = sum[k * blockDim.x + threadIdx.x];
        back_sequence<T>(w, memory, kept, to, m, f, b.query_start[seq], b.query_start[seq + 1]);
    }
}

// From the gradients of a row's q (block z 0) or k (1) as the value heads of a key head (block y)
// take it to that of what it was made of. A warp's.
template <typename T>
__global__ void length_back_kernel(T *dqkv, const T *qkv, const float *dvectors, delta_shape s)
{
    grid_begin();
    int each = s.n_heads / s.n_key_heads, lane = threadIdx.x;
    int width = 2 * s.n_key_heads * s.key_dim + s.n_heads * s.head_dim;
    int64_t at =
        (int64_t)blockIdx.x * width + (blockIdx.z * s.n_key_heads + blockIdx.y) * s.key_dim;
    const float *from =
        dvectors +
        (((int64_t)blockIdx.x * s.n_heads + blockIdx.y * each) * 2 + blockIdx.z) * s.key_dim;
    float d[DELTA_MAX_DIM / 32], x[DELTA_MAX_DIM / 32], squares = 0, along = 0;
    for (int i = 0; i < DELTA_MAX_DIM / 32; i++) {
        int e = lane + 32 * i;
        d[i] = x[i] = 0;
        if (e >= s.key_dim) continue;
        x[i] = to_f32(qkv[at + e]);
        for (int h = 0; h < each; h++) d[i] += from[(int64_t)h * 2 * s.key_dim + e];
        squares += x[i] * x[i];
        along += x[i] * d[i];
    }
    float inverse = 1.f / sqrtf(lanes_sum(squares) + LENGTH_EPS);
    float scale = blockIdx.z ? inverse : inverse / sqrtf((float)s.key_dim);
    along = lanes_sum(along) * inverse * inverse;
    for (int i = 0; i < DELTA_MAX_DIM / 32; i++)
        if (lane + 32 * i < s.key_dim)
            dqkv[at + lane + 32 * i] = from_f32<T>(scale * (d[i] - x[i] * along));
}

// What all rows of a head share: block x is the head.
__global__ void shared_back_kernel(float *da_log, float *ddt_bias, const float *parts, int rows,
                                   int n_heads)
{
    grid_begin();
    __shared__ float shared[32];
    float a_log = 0, dt_bias = 0;
    for (int row = threadIdx.x; row < rows; row += SHARED_THREADS) {
        const float *part = parts + ((int64_t)row * n_heads + blockIdx.x) * 2;
        a_log += part[0];
        dt_bias += part[1];
    }
    a_log = block_sum(a_log, shared);
    dt_bias = block_sum(dt_bias, shared);
    if (threadIdx.x > 0) return;
    if (da_log) da_log[blockIdx.x] += a_log;
    if (ddt_bias) ddt_bias[blockIdx.x] += dt_bias;
}

void cuda_delta_rule_back(struct device *dev, const struct delta_grads *grads, const void *dout,
                          const struct delta_args *a, const struct delta_shape *s)
{
    const struct delta_rows rows = delta_rows_of(&a->batch);
    const int n = rows.n_tokens;
    if (n <= 0 || !delta_takes(dev, a->batch.view)) return;
    const int blocks = blocks_of(dev, s, rows.n_seqs, 1);
    struct back_memory m = lay_out_back(s, blocks, n, a->batch.view->max_context);
    m.at = (float *)cuda_workspace(dev, m.end * sizeof(float));
    if (!m.at) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        const back_arrays<T> arrays = {(T *)grads->qkv, (T *)grads->gates, (const T *)dout,
                                       (const T *)a->qkv};
        cuda_launch(dev, "delta_rule_back", delta_back_kernel<T>, blocks, threads_of(s), 0, arrays,
                    m, a->gates, a->a_log, a->dt_bias, rows, *s);
        cuda_launch(dev, "delta_rule_back", length_back_kernel<T>, dim3(n, s->n_key_heads, 2), 32,
                    0, grads->qkv, a->qkv, (m.at + m.dvectors), *s);
    });
    if (grads->a_log || grads->dt_bias)
        cuda_launch(dev, "delta_rule_back", shared_back_kernel, s->n_heads, SHARED_THREADS, 0,
                    grads->a_log, grads->dt_bias, (m.at + m.shared), n, s->n_heads);
}

// ---- short convolutions -------------------------------------------------------------------------

/* A causal convolution of a few rows, channel by channel, with SiLU behind it, and its gradient.
 * Rows are computed side by side, all by one function: a row meets the same numbers in the same
 * order wherever they lie, in the batch or in its slot's window. A second kernel then renews the
 * windows. */
#define CONV_THREADS 128
#define SUM_ROWS     16 // rows at a time of a sum over rows

struct conv_rows {
    delta_rows b;
    int64_t x_stride;
    int width, taps;
    bool bare; // no SiLU behind the sum
};

// The row `back` rows before row r of sequence s of a packed batch; -1: there is none.
__device__ __forceinline__ int packed_before(const delta_rows &b, int s, int r, int back)
{
    if (r - back >= b.query_start[s]) return r - back;
    int position = b.first_position[s] + r - b.query_start[s] - back;
    while (s >= 0 && position < b.first_position[s]) s = b.parent[s];
    return s >= 0 && position >= 0 ? b.query_start[s] + position - b.first_position[s] : -1;
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
__device__ __forceinline__ float convolve(const T *x, const T *w, const T *bias, const conv_rows &a,
                                          int row, int c)
{
    int s = a.b.seq_of[row];
    float sum = bias ? to_f32(bias[c]) : 0.f;
    for (int i = 0; i < a.taps; i++)
        sum = fmaf(to_f32(w[c * a.taps + i]), input(x, a, s, row, a.taps - 1 - i, c), sum);
    return sum;
}

// Block x is the row, here and below.
template <typename T>
__global__ void conv_kernel(T *y, const T *x, const T *w, const T *bias, conv_rows a)
{
    grid_begin();
    int row = blockIdx.x, c = blockIdx.y * CONV_THREADS + threadIdx.x;
    if (c >= a.width) return;
    bool padding = a.b.paged && a.b.state_slot[a.b.seq_of[row]] < 0;
    float sum = padding ? 0.f : convolve(x, w, bias, a, row, c);
    y[(int64_t)row * a.width + c] = from_f32<T>(a.bare ? sum : sum * sigmoid(sum));
}

// Block x is the sequence that begins a unit.
template <typename T> __global__ void window_kernel(const T *x, conv_rows a)
{
    grid_begin();
    int s = blockIdx.x, c = blockIdx.y * CONV_THREADS + threadIdx.x;
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
                                   s->taps, delta_is_conv(s)};
    const int columns = ceil_div(rows.width, CONV_THREADS);
    if (rows.b.n_tokens <= 0) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "short_conv", conv_kernel<T>, dim3(rows.b.n_tokens, columns), CONV_THREADS,
                    0, y, a->x, a->w, a->bias, rows);
        if (rows.b.paged)
            cuda_launch(dev, "short_conv", window_kernel<T>, dim3(rows.b.n_seqs, columns),
                        CONV_THREADS, 0, a->x, rows);
    });
}

// The gradient of the sum before SiLU.
template <typename T>
__global__ void sum_back_kernel(float *dsum, const T *dy, const T *x, const T *w, const T *bias,
                                conv_rows a)
{
    grid_begin();
    int row = blockIdx.x, c = blockIdx.y * CONV_THREADS + threadIdx.x;
    if (c >= a.width) return;
    float sum = convolve(x, w, bias, a, row, c), open = sigmoid(sum);
    int64_t at = (int64_t)row * a.width + c;
    dsum[at] = to_f32(dy[at]) * (a.bare ? 1.f : open * (1.f + sum * (1.f - open)));
}

// The sum of dsum over the rows that stand `ahead` rows behind row r: of its own sequence, or of
// each that goes on behind it.
__device__ __forceinline__ float behind(const float *dsum, const conv_rows &a, int r, int ahead,
                                        int c)
{
    const delta_rows &b = a.b;
    int s = b.seq_of[r];
    if (r + ahead < b.query_start[s + 1]) return dsum[(int64_t)(r + ahead) * a.width + c];
    int position = b.first_position[s] + r - b.query_start[s] + ahead;
    float sum = 0;
    for (int below = s + 1; below < b.n_seqs && b.query_start[below] < b.attend_end[s]; below++) {
        int past = position - b.first_position[below], row = b.query_start[below] + past;
        if (past >= 0 && row < b.query_start[below + 1]) sum += dsum[(int64_t)row * a.width + c];
    }
    return sum;
}

template <typename T>
__global__ void input_back_kernel(T *dx, const float *dsum, const T *w, conv_rows a)
{
    grid_begin();
    int row = blockIdx.x, c = blockIdx.y * CONV_THREADS + threadIdx.x;
    if (c >= a.width) return;
    float sum = 0;
    for (int i = 0; i < a.taps; i++)
        sum = fmaf(to_f32(w[c * a.taps + i]), behind(dsum, a, row, a.taps - 1 - i, c), sum);
    dx[row * a.x_stride + c] = from_f32<T>(sum);
}

// Block y is the tap, or behind the last one the bias; 32 channels a block, whose rows SUM_ROWS
// warps share.
template <typename T>
__global__ void weight_back_kernel(float *dw, float *db, const float *dsum, const T *x, conv_rows a)
{
    grid_begin();
    __shared__ float sums[SUM_ROWS][32];
    int c = blockIdx.x * 32 + threadIdx.x, tap = blockIdx.y;
    float sum = 0;
    const bool is_bias = tap == a.taps;
    for (int row = threadIdx.y; row < a.b.n_tokens && c < a.width; row += SUM_ROWS)
        sum = fmaf(dsum[(int64_t)row * a.width + c],
                   is_bias ? 1.f : input(x, a, a.b.seq_of[row], row, a.taps - 1 - tap, c), sum);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= a.width) return;
    for (int i = 1; i < SUM_ROWS; i++) sum += sums[i][threadIdx.x];
    float *to = is_bias ? db + c : dw ? dw + c * a.taps + tap : NULL;
    if (to) *to += sum;
}

void cuda_short_conv_back(struct device *dev, void *dx, float *dw, float *db, const void *dy,
                          const struct conv_args *a, const struct delta_shape *s)
{
    const struct conv_rows rows = {delta_rows_of(&a->batch), a->x_stride, delta_conv_width(s),
                                   s->taps, delta_is_conv(s)};
    const dim3 grid(rows.b.n_tokens, ceil_div(rows.width, CONV_THREADS));
    if (rows.b.n_tokens <= 0) return;
    float *dsum = (float *)cuda_workspace(dev, conv_scratch(s, rows.b.n_tokens));
    if (!dsum) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        cuda_launch(dev, "short_conv_back", sum_back_kernel<T>, grid, CONV_THREADS, 0, dsum, dy,
                    a->x, a->w, a->bias, rows);
        cuda_launch(dev, "short_conv_back", input_back_kernel<T>, grid, CONV_THREADS, 0, dx, dsum,
                    a->w, rows);
        if (dw || db)
            cuda_launch(dev, "short_conv_back", weight_back_kernel<T>,
                        dim3(ceil_div(rows.width, 32), s->taps + (db != NULL)), dim3(32, SUM_ROWS),
                        0, dw, db, dsum, a->x, rows);
    });
}
