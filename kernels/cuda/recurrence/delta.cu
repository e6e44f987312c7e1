/* delta.cu: the gated delta rule of linear attention and Mamba-2's (ops.h, delta_shape), and their
 * gradients, by chunks of positions. Of Mamba-2's (SCAN) a row's u is made of its value alone; k
 * and q are the row's as they are, and beta is its step.
 *
 * S stands at a chunk's border; a row is a function of it and of k, u and G of the open chunk's
 * rows (ops.h, delta_state_elements), in one order. Where rows come one by one, or for Mamba-2's
 * rule and the gradient 64 at once, add_rows() computes them, in tiles of 16 rows: a row of a tile
 * is computed as if it were alone. The delta rule's many rows go by prepare_kernel() and
 * chain_kernel(), in the same order. So a row has the same bits wherever it comes in.
 *
 * Columns of S need nothing of each other. A block has C of them (a slice) of one value head
 * of a sequence, of a packed batch with those that go on behind it; S is in registers as the sums
 * of an mma lie (tensor.cuh), 16 keys to a warp, and in shared memory as an operand. What all
 * slices of a key head's heads share in a slot, k and G, the last of their blocks writes.
 *
 * The gradient needs S at every border, from the last to the first, and u of every row: a block
 * goes forward again and keeps them. Blocks take one unit after another, so that scratch is bounded
 * by the blocks that run, not by the batch. Sums over slices, over the value heads of a key head,
 * and over rows, are kernels of their own. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/recurrence/recurrence.cuh"
#include "kernels/cuda/tensor.cuh"
#include <algorithm>

#define CHUNK          DELTA_CHUNK
#define DIM            DELTA_MAX_DIM
#define THREADS        256          // that have S of up to 64 columns, 16 keys to a warp
#define TILES          (CHUNK / 16) // of a chunk's rows
#define PITCH          8            // elements behind each row in shared memory
#define LENGTH_EPS     1e-6f
#define SHARED_THREADS 256

// Columns of S in a block: of one row at a time, and of many.
template <typename T> constexpr int columns = 128 / (int)sizeof(T);
template <typename T> constexpr int many_columns = sizeof(T) == 2 ? 128 : 32;

// The thread's number, read anew at each call: what is made of it is not kept in registers from one
// use to the next, of which there are not enough.
__device__ __forceinline__ int thread()
{
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
}

// Threads of a block of C columns, and how many of its warps have the same keys.
template <int C> constexpr int threads = C > 64 ? 2 * THREADS : THREADS;
template <int C> constexpr int parts = threads<C> / THREADS;

__device__ __forceinline__ int own_key()
{
    return thread() % THREADS / 32 * 16;
}
__device__ __forceinline__ int own_column()
{
    return thread() / THREADS * 64;
}

// ---- tiles --------------------------------------------------------------------------------------

// A matrix in shared memory whose element (i, j) lies at i * pitch + j, or, TURNED, at
// j * pitch + i.
template <typename T, bool TURNED> struct operand_of {
    const T *at;
    int pitch;
};
template <typename T> __device__ __forceinline__ operand_of<T, false> plain(const T *at, int pitch)
{
    return {at, pitch};
}
template <typename T> __device__ __forceinline__ operand_of<T, true> turned(const T *at, int pitch)
{
    return {at, pitch};
}

// sums (16, 8 N) += a (16, 16 steps) b (16 steps, 8 N), of which the first `used` tiles of 8
// columns are wanted, an even number. A thread has (row g, columns 2 c and 2 c + 1) and the same of
// row g + 8 of each tile, g being its lane / 4 and c its lane % 4. The order of a sum is that of
// the steps, and of f32 that of its terms. factors: column k of a is rounded times factors[k].
template <int N, bool A, bool B>
__device__ __forceinline__ void multiply(float (&sums)[N][4], operand_of<bf16, A> a,
                                         operand_of<bf16, B> b, int steps, int used = N,
                                         const float *factors = NULL)
{
    const int lane = thread() % 32, low = lane % 8, first = lane / 8 % 2 * 8,
              second = lane / 16 * 8;
    for (int k = 0; k < 16 * steps; k += 16) {
        uint32_t left[4];
        if (A)
            load_matrices_transposed(left, a.at + (k + second + low) * a.pitch + first);
        else
            load_matrices(left, a.at + (first + low) * a.pitch + k + second);
#pragma unroll
        for (int i = 0; i < 4 && factors; i++) {
            const float *by = factors + k + lane % 4 * 2 + i / 2 * 8;
            const float2 x = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&left[i]));
            left[i] = pack2(x.x * by[0], x.y * by[1]);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            if (n >= used) break;
            uint32_t right[4];
            if (B) // rows of columns
                load_matrices(right, b.at + (8 * n + second + low) * b.pitch + k + first);
            else
                load_matrices_transposed(right,
                                         b.at + (k + first + low) * b.pitch + 8 * n + second);
            mma(sums[n], left, right[0], right[1]);
            mma(sums[n + 1], left, right[2], right[3]);
        }
    }
}

template <int N, bool A, bool B>
__device__ __forceinline__ void multiply(float (&sums)[N][4], operand_of<float, A> a,
                                         operand_of<float, B> b, int steps, int used = N,
                                         const float *factors = NULL)
{
    const int g = thread() % 32 / 4, c = thread() % 4 * 2;
    for (int k = 0; k < 16 * steps; k++) {
        const float by = factors ? factors[k] : 1.f;
        const float top = by * a.at[A ? k * a.pitch + g : g * a.pitch + k];
        const float low = by * a.at[A ? k * a.pitch + g + 8 : (g + 8) * a.pitch + k];
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (n >= used) break;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int j = 8 * n + c + i;
                const float right = b.at[B ? j * b.pitch + k : k * b.pitch + j];
                sums[n][i] = fmaf(top, right, sums[n][i]);
                sums[n][2 + i] = fmaf(low, right, sums[n][2 + i]);
            }
        }
    }
}

// f(row, column, sum) for each sum of a thread.
template <int N, typename F> __device__ __forceinline__ void each_sum(float (&sums)[N][4], F f)
{
    const int g = thread() % 32 / 4, c = thread() % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) f(g + i / 2 * 8, 8 * n + c + i % 2, sums[n][i]);
}

// f(row, column, its sum, that of the next column).
template <int N, typename F> __device__ __forceinline__ void each_pair(float (&sums)[N][4], F f)
{
    const int g = thread() % 32 / 4, c = thread() % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) f(g + i / 2 * 8, 8 * n + c, sums[n][i], sums[n][i + 1]);
}

template <int N> __device__ __forceinline__ void clear(float (&sums)[N][4])
{
    each_sum(sums, [](int, int, float &sum) { sum = 0; });
}

// ---- rows ---------------------------------------------------------------------------------------

// What a rule reads (ops.h, delta_args).
template <typename T, bool SCAN> struct rule_inputs {
    const T *qkv, *a_log, *dt_bias, *skip;
    const std::conditional_t<SCAN, T, float> *gates;
    int64_t stride;   // of gates
    const T *vectors; // (T, 2 * keys) q and k as read_rows() gives them; NULL: it makes them
};

template <typename T, bool SCAN>
static rule_inputs<T, SCAN> inputs_of(const struct delta_args *a, const struct delta_shape *s)
{
    rule_inputs<T, SCAN> in = {};
    in.qkv = (const T *)a->qkv;
    in.a_log = (const T *)a->a_log;
    in.dt_bias = (const T *)a->dt_bias;
    in.skip = (const T *)a->skip;
    in.gates = (decltype(in.gates))a->gates;
    in.stride = SCAN ? a->stride : 2 * s->n_heads;
    return in;
}

// Of a value head, and which columns a block has.
template <typename T, bool SCAN> struct source : rule_inputs<T, SCAN> {
    float rate, bias, min_step, skips; // exp(a_log), dt_bias, skip
    int head, q_at, k_at, value_at, width, n_heads, key_dim, head_dim;
    int first; // column
};

// Columns of the queries' heads, the keys' and the values' in a row.
struct row_columns {
    int q, k, value, width;
};

template <bool SCAN> __device__ __forceinline__ row_columns columns_of(const delta_shape &s)
{
    const int keys = s.n_key_heads * s.key_dim, values = s.n_heads * s.head_dim;
    if (SCAN) return {values + keys, values, 0, 2 * keys + values};
    return {0, keys, 2 * keys, 2 * keys + values};
}

template <typename T, bool SCAN>
__device__ __forceinline__ source<T, SCAN> source_of(const rule_inputs<T, SCAN> &in,
                                                     const delta_shape &s, int head, int first)
{
    const row_columns at = columns_of<SCAN>(s);
    const int key_head = head / (s.n_heads / s.n_key_heads);
    source<T, SCAN> f;
    (rule_inputs<T, SCAN> &)f = in;
    f.rate = expf(to_f32(in.a_log[head]));
    f.bias = to_f32(in.dt_bias[head]);
    f.min_step = s.min_step;
    f.skips = SCAN ? to_f32(in.skip[head]) : 0.f;
    f.head = head;
    f.q_at = at.q + key_head * s.key_dim;
    f.k_at = at.k + key_head * s.key_dim;
    f.value_at = at.value + head * s.head_dim;
    f.width = at.width;
    f.n_heads = s.n_heads;
    f.key_dim = s.key_dim;
    f.head_dim = s.head_dim;
    f.first = first;
    return f;
}

// What a row's gates are made of, beta, and its log decay, by which G behind it differs from that
// of the row before: written so that every kernel rounds alike.
struct row_gates {
    float raw, beta, log_decay; // raw: before softplus
};

template <typename T, bool SCAN>
__device__ __forceinline__ row_gates gates_of(const source<T, SCAN> &f, int row)
{
    row_gates g;
    if constexpr (SCAN) {
        g.raw = __fadd_rn(to_f32(f.gates[row * f.stride + f.head]), f.bias);
        g.beta = fmaxf(softplus_of(g.raw), f.min_step);
        g.log_decay = __fmul_rn(-f.rate, g.beta);
    } else {
        const float *at = f.gates + (int64_t)row * 2 * f.n_heads + f.head;
        g.raw = __fadd_rn(at[f.n_heads], f.bias);
        g.beta = sigmoid(at[0]);
        g.log_decay = __fmul_rn(-f.rate, softplus_of(g.raw));
    }
    return g;
}

// A warp's lane has elements lane + 32 i of a vector of key_dim; returns what divides by its
// length.
__device__ __forceinline__ float inverse_length(const float (&x)[DIM / 32])
{
    float squares = 0;
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) squares = fmaf(x[i], x[i], squares);
    return 1.f / sqrtf(lanes_sum(squares) + LENGTH_EPS);
}

template <typename T>
__device__ __forceinline__ void read_vector(float (&x)[DIM / 32], const T *from, int key_dim)
{
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        const int e = thread() % 32 + 32 * i;
        x[i] = e < key_dim ? to_f32(from[e]) : 0.f;
    }
}

// The chunk's rows. Those behind its last, up to the next sixteenth, are zeros. Of one decoded row
// (ROWS 16) there is room for its sixteen alone where nothing goes over the others, and those
// beside it, which change nothing of it, are anything but in u.
template <typename T, int ROWS, int C, bool SCAN> struct chunk_of {
    T k[CHUNK][DIM + PITCH], q[ROWS][DIM + PITCH];
    T S[DIM][C + PITCH]; // at the border
    T u[CHUNK][C + PITCH];
    T seen[ROWS][CHUNK + PITCH]; // what row t's output takes of u of row j
    // [j][t]: what u of row t takes of that of row j
    alignas(16) float read[SCAN ? 1 : CHUNK][ROWS + 4];
    float r[ROWS][C + 4]; // values; then u while it is being summed up
    float G[CHUNK], beta[CHUNK], log_decay[CHUNK];
};

__device__ __forceinline__ int tile_end(int n)
{
    return (n + 15) / 16 * 16;
}

// Rows `begin` to `end` of a chunk, one `stride` behind the other in memory, of which the first
// `columns` columns are there; zeros in what is not, from row t to the next sixteenth behind the
// last. All are on their way at once, V columns in one access.
template <int V, int ROWS, int COLUMNS, int THREADS_OF, typename T, int N, typename S>
__device__ __forceinline__ void read_tile_by(T (*to)[N], const S *from, int64_t stride, int columns,
                                             int t, int begin, int end)
{
    constexpr int UNITS = COLUMNS / V, EACH = (ROWS * UNITS + THREADS_OF - 1) / THREADS_OF;
    constexpr int W = V < wide<T> ? V : wide<T>;
    float x[EACH][V / W][W];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int unit = thread() + i * THREADS_OF, row = t + unit / UNITS;
        const int column = unit % UNITS * V;
        float all[V] = {};
        if (row >= begin && row < end && column < columns)
            load<S, V>(all, from + (row - begin) * stride + column);
#pragma unroll
        for (int v = 0; v < V; v++) x[i][v / W][v % W] = all[v];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int unit = thread() + i * THREADS_OF, row = t + unit / UNITS;
        if (unit >= ROWS * UNITS || row >= tile_end(end)) continue;
#pragma unroll
        for (int v = 0; v < V / W; v++)
            store<T, W>(&to[row % ROWS][unit % UNITS * V + v * W], x[i][v]);
    }
}

template <int ROWS, int COLUMNS, int THREADS_OF, typename T, int N, typename S>
__device__ __forceinline__ void read_tile(T (*to)[N], const S *from, int64_t stride, int columns,
                                          int t, int begin, int end)
{
    if (((size_t)from | stride * sizeof(S)) % 16 == 0 && columns % wide<S> == 0)
        read_tile_by<wide<S>, ROWS, COLUMNS, THREADS_OF>(to, from, stride, columns, t, begin, end);
    else
        read_tile_by<1, ROWS, COLUMNS, THREADS_OF>(to, from, stride, columns, t, begin, end);
}

// q, k and gates of rows t to `end` of the chunk, the first of which is `row`, and G; for all
// threads to wait for. What is read of some rows is on its way at once.
template <typename T, int ROWS, int C, bool SCAN>
__device__ __forceinline__ void read_rows(chunk_of<T, ROWS, C, SCAN> &w, const T *qkv,
                                          const source<T, SCAN> &f, int row, int t, int end)
{
    constexpr int AT_ONCE = ROWS / 16, WARPS = threads<C> / 32;
    const int lane = thread() % 32, behind = ROWS < CHUNK ? end : tile_end(end);
    const float q_scale = 1.f / sqrtf((float)f.key_dim);
    const T *made = ROWS < CHUNK ? NULL : SCAN ? qkv : f.vectors;
    if (t + thread() < behind) {
        const int i = t + thread();
        row_gates gates = {};
        if (i < end) gates = gates_of(f, row + thread());
        w.log_decay[i] = gates.log_decay;
        w.beta[i] = gates.beta;
    }
    if (made) {
        const int64_t stride = SCAN ? f.width : 2 * (f.k_at - f.q_at);
        const T *from = made + row * stride;
        read_tile<ROWS, DIM, threads<C>>(w.q, from + f.q_at, stride, f.key_dim, t, t, end);
        read_tile<ROWS, DIM, threads<C>>(w.k, from + f.k_at, stride, f.key_dim, t, t, end);
    }
    for (int first = t + thread() / 32; first < behind && !made; first += AT_ONCE * WARPS) {
        float q[AT_ONCE][DIM / 32], k[AT_ONCE][DIM / 32];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * WARPS;
            const T *from = qkv + (int64_t)(row + at - t) * f.width;
            read_vector(q[i], from + f.q_at, at < end ? f.key_dim : 0);
            read_vector(k[i], from + f.k_at, at < end ? f.key_dim : 0);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * WARPS;
            const float q_factor = SCAN ? 1.f : inverse_length(q[i]) * q_scale,
                        k_factor = SCAN ? 1.f : inverse_length(k[i]);
            if (at >= behind) break;
#pragma unroll
            for (int e = 0; e < DIM / 32; e++) {
                w.q[at % ROWS][lane + 32 * e] = from_f32<T>(q[i][e] * q_factor);
                w.k[at][lane + 32 * e] = from_f32<T>(k[i][e] * k_factor);
            }
        }
    }
    __syncthreads();
    if (thread() >= 32) return;
    float G = t > 0 ? w.G[t - 1] : 0.f;
    if constexpr (ROWS < CHUNK)
        for (int i = t; i < end; i++) w.G[i] = G = __fadd_rn(G, w.log_decay[i]);
    else
        for (int first = t / 32 * 32; first < behind; first += 32) {
            const int own = first + lane;
            const float log_decay = w.log_decay[own];
            float until = 0.f;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const float next = __shfl_sync(~0u, log_decay, i);
                if (first + i >= t) G = __fadd_rn(G, next);
                if (lane == i) until = G;
            }
            if (own >= t && own < behind) w.G[own] = until;
        }
}

// Which rows and sums a warp has where those of keys and those of queries, or more of the latter,
// are computed side by side: `part` of the columns of a tile of rows, or of the only one.
struct warp_tile {
    int tile, first, part;
    bool is_q;
};

template <int ROWS, bool SCAN = false> __device__ __forceinline__ warp_tile own_tile(int t)
{
    const int warp = thread() / 32, own = warp % TILES, tile = ROWS == CHUNK ? own : t / 16;
    if (SCAN && ROWS == CHUNK) return {tile, 16 * tile, warp / TILES, true};
    return {tile, 16 * tile, ROWS == CHUNK ? thread() / THREADS : own, warp / TILES % 2 > 0};
}

// Tiles of columns a warp has, of N in a block of C columns.
template <int ROWS, int C, int N, bool SCAN>
constexpr int own_tiles = N / (ROWS < CHUNK ? TILES
                               : SCAN       ? 2 * parts<C>
                                            : parts<C>);

// factor(row) times the sums of each row.
template <int N, typename F>
__device__ __forceinline__ void scale_rows(float (&sums)[N][4], F factor)
{
    const float top = factor(thread() % 32 / 4), low = factor(thread() % 32 / 4 + 8);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] = __fmul_rn(sums[n][i], i < 2 ? top : low);
}

// `read` and `seen` of a warp's rows.
template <typename T, int ROWS, int C, bool SCAN>
__device__ __forceinline__ void compare_rows(chunk_of<T, ROWS, C, SCAN> &w, const warp_tile &own,
                                             int steps)
{
    constexpr int N = own_tiles<ROWS, C, CHUNK / 8, SCAN>;
    const int first = own.part * 8 * N, used = 2 * (own.tile + 1) - own.part * N;
    float sums[N][4];
    if (used <= 0) return;
    clear(sums);
    multiply(sums, plain((own.is_q ? w.q[own.first % ROWS] : w.k[own.first]), DIM + PITCH),
             turned(w.k[first], DIM + PITCH), steps, used);
    each_sum(sums, [&](int row, int column, float &sum) {
        if (column >= 8 * used) return;
        const int t = own.first + row, j = first + column;
        const float since = j <= t ? expf(w.G[t] - w.G[j]) : 0.f;
        if (SCAN || own.is_q)
            w.seen[t % ROWS][j] = from_f32<T>(j <= t ? since * sum : 0.f);
        else
            w.read[j][t % ROWS] = j < t ? -w.beta[t] * (since * sum) : 0.f;
    });
}

// u of one row from r, by the sums of solve(), and zeros behind it.
template <typename T, int ROWS, int C, bool SCAN>
__device__ __forceinline__ void solve_row(chunk_of<T, ROWS, C, SCAN> &w, int t)
{
    constexpr int GROUPS = threads<C> / C;
    const int column = thread() % C, group = thread() / C;
    if (group == 0) {
        float sum = w.r[t % ROWS][column];
#pragma unroll 8
        for (int j = 0; j < t; j++) sum = fmaf(w.read[j][t % ROWS], to_f32(w.u[j][column]), sum);
        w.u[t][column] = from_f32<T>(sum);
    }
    for (int i = t + group; i < tile_end(t + 1) && group > 0; i += GROUPS - 1)
        w.u[i][column] = from_f32<T>(0.f);
    __syncthreads();
}

// u of rows t to `end` from r, sixteen at a time; those before are there.
template <typename T, int ROWS, int C, bool SCAN>
__device__ __forceinline__ void solve(chunk_of<T, ROWS, C, SCAN> &w, int t, int end)
{
    constexpr int GROUPS = threads<C> / C, EACH = 16 / GROUPS;
    const int column = thread() % C, group = thread() / C;
    for (int b = t / 16 * 16; b < end; b += 16) {
        float(*r)[C + 4] = w.r + b % ROWS;
        if (b > 0) {
            const int first = group * EACH;
            float sums[EACH], read[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) sums[i] = r[first + i][column];
#pragma unroll 4
            for (int j = 0; j < b; j++) {
                const float u = to_f32(w.u[j][column]);
                load<float, EACH>(read, &w.read[j][b % ROWS + first]);
#pragma unroll
                for (int i = 0; i < EACH; i++) sums[i] = fmaf(read[i], u, sums[i]);
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) r[first + i][column] = sums[i];
            __syncthreads();
        }
        if (group == 0) {
            float sums[16];
            T u[16];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                sums[i] = r[i][column];
                u[i] = w.u[b + i][column];
            }
#pragma unroll
            for (int j = 0; j < 16; j++) {
                if (b + j >= t) u[j] = from_f32<T>(sums[j]);
#pragma unroll
                for (int i = j + 1; i < 16; i++)
                    sums[i] = fmaf(w.read[b + j][b % ROWS + i], to_f32(u[j]), sums[i]);
            }
#pragma unroll
            for (int j = 0; j < 16; j++) w.u[b + j][column] = u[j];
        }
        __syncthreads();
    }
}

// A thread's sums of S as an operand.
template <typename T, int P, int N>
__device__ __forceinline__ void write_operand(T (*to)[P], float (&S)[N][4])
{
    each_pair(S, [&](int key, int column, float x, float y) {
        store_pair(&to[own_key() + key][own_column() + column], x, y);
    });
}

// S of the next border, from a chunk whose rows are all there; its keys are lost.
template <typename T, int ROWS, int C, bool SCAN, int N>
__device__ __forceinline__ void close_chunk(chunk_of<T, ROWS, C, SCAN> &w, float (&S)[N][4])
{
    constexpr int V = wide<T>;
    const float end = w.G[CHUNK - 1], decay = expf(end);
    if (thread() < CHUNK) w.log_decay[thread()] = expf(end - w.G[thread()]);
    __syncthreads();
#pragma unroll 4
    for (int i = thread(); i < CHUNK * DIM / V; i += threads<C>) {
        T *at = &w.k[i / (DIM / V)][i % (DIM / V) * V];
        float k[V];
        load<T, V>(k, at);
#pragma unroll
        for (int e = 0; e < V; e++) k[e] *= w.log_decay[i / (DIM / V)];
        store<T, V>(at, k);
    }
    __syncthreads();
    scale_rows(S, [&](int) { return decay; });
    multiply(S, turned(w.k[0] + own_key(), DIM + PITCH), plain(w.u[0] + own_column(), C + PITCH),
             TILES);
    write_operand(w.S, S);
}

// Rows t to `end` of a chunk, the first of which is `row`, to out, or where that is NULL as far as
// u. All threads are done with the chunk behind it.
template <typename T, int ROWS, int C, bool SCAN, int N>
__device__ __forceinline__ void add_rows(chunk_of<T, ROWS, C, SCAN> &w, float (&S)[N][4], T *out,
                                         const T *qkv, const source<T, SCAN> &f, int row, int t,
                                         int end)
{
    constexpr int M = own_tiles<ROWS, C, C / 8, SCAN>;
    const int steps = (f.key_dim + 15) / 16;
    const warp_tile own = own_tile<ROWS, SCAN>(t);
    const bool takes_part =
        own.first < end && own.first + 16 > t && (own.is_q ? out != NULL : !SCAN);
    const int first = own.part * 8 * M; // column
    float sums[M][4];
    clear(sums);
    read_tile<ROWS, C, threads<C>>(w.r, qkv + (int64_t)row * f.width + f.value_at + f.first,
                                   f.width, f.head_dim - f.first, t, t, end);
    read_rows(w, qkv, f, row, t, end);
    __syncthreads();
    if constexpr (SCAN)
        for (int i = thread(); i < (tile_end(end) - t) * C; i += threads<C>) {
            const int j = t + i / C;
            const float u = j < end ? w.beta[j] * w.r[j % ROWS][i % C] : 0.f;
            w.u[j][i % C] = from_f32<T>(u);
        }
    if (takes_part) {
        multiply(sums, plain(own.is_q ? w.q[own.first % ROWS] : w.k[own.first], DIM + PITCH),
                 plain(w.S[0] + first, C + PITCH), steps);
        scale_rows(sums, [&](int i) { return expf(w.G[own.first + i]); });
        if (!SCAN && !own.is_q)
            each_sum(sums, [&](int i, int column, float &sum) {
                float &r = w.r[(own.first + i) % ROWS][first + column];
                r = w.beta[own.first + i] * __fsub_rn(r, sum);
            });
        compare_rows(w, own, steps);
    }
    __syncthreads();
    if constexpr (!SCAN && ROWS < CHUNK)
        for (int i = t; i < end; i++) solve_row(w, i);
    else if constexpr (!SCAN)
        solve(w, t, end);
    if (takes_part && own.is_q) {
        multiply(sums, plain(w.seen[own.first % ROWS], CHUNK + PITCH),
                 plain(w.u[0] + first, C + PITCH), own.tile + 1);
        each_sum(sums, [&](int i, int c, float &sum) {
            const int at = own.first + i, column = f.first + first + c;
            if (SCAN) sum = fmaf(f.skips, w.r[at % ROWS][first + c], sum);
            if (at >= t && at < end && column < f.head_dim)
                out[((int64_t)(row + at - t) * f.n_heads + f.head) * f.head_dim + column] =
                    from_f32<T>(sum);
        });
    }
    if (end == CHUNK) {
        __syncthreads();
        close_chunk(w, S);
    }
    __syncthreads();
}

// ---- S in memory --------------------------------------------------------------------------------

// In scratch a thread's sums have a place of their own; M is bf16 where they are read as an
// operand.
template <typename M, int N> __device__ __forceinline__ void keep(M *to, float (&S)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) store<M, 4>(to + (n * blockDim.x + thread()) * 4, S[n]);
}

template <typename M, int N> __device__ __forceinline__ void recall(float (&S)[N][4], const M *from)
{
#pragma unroll
    for (int n = 0; n < N; n++) load<M, 4>(S[n], from + (n * blockDim.x + thread()) * 4);
}

// Of a value head in a slot (ops.h, delta_state_elements).
struct slot_parts {
    float *k, *S, *u, *G;
};

__device__ __forceinline__ slot_parts slot_of(const delta_rows &b, int slot, const delta_shape &s,
                                              int head)
{
    const int each = s.n_heads / s.n_key_heads;
    const int64_t matrix = (int64_t)s.key_dim * s.head_dim;
    const int64_t own = matrix + CHUNK * (s.head_dim + 1);
    const int width = 2 * s.n_key_heads * s.key_dim + s.n_heads * s.head_dim;
    float *k = b.states + slot * b.slot_elements + (int64_t)(s.taps - 1 + s.ahead) * width +
               head / each * (CHUNK * s.key_dim + each * own);
    float *S = k + CHUNK * s.key_dim + head % each * own;
    return {k, S, S + matrix, S + matrix + CHUNK * s.head_dim};
}

// Has what the lines of n floats hold on its way to the second-level cache.
__device__ __forceinline__ void prefetch(const float *from, int n)
{
    for (int i = thread() * 32; i < n; i += blockDim.x * 32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
}

// S, as sums where it is to move on, and the n rows of the open chunk.
template <typename T, int ROWS, int C, bool SCAN, int N>
__device__ __forceinline__ void read_slot(chunk_of<T, ROWS, C, SCAN> &w, float (&S)[N][4],
                                          const slot_parts &slot, const source<T, SCAN> &f, int n,
                                          bool moves)
{
    prefetch(slot.k, n * f.key_dim);
    prefetch(slot.u, n * f.head_dim);
    read_tile<DIM, C, threads<C>>(w.S, slot.S + f.first, f.head_dim, f.head_dim - f.first, 0, 0,
                                  f.key_dim);
    for (int first = 0; first < n; first += CHUNK / 2) // of which a thread's registers hold half
        read_tile<CHUNK / 2, DIM, threads<C>>(w.k + first, slot.k + first * f.key_dim, f.key_dim,
                                              f.key_dim, 0, 0, min(n - first, CHUNK / 2));
    if (thread() < n) w.G[thread()] = slot.G[thread()];
    read_tile<CHUNK, C, threads<C>>(w.u, slot.u + f.first, f.head_dim, f.head_dim - f.first, 0, 0,
                                    n);
    each_sum(S, [&](int i, int c, float &sum) {
        const int key = own_key() + i, column = f.first + own_column() + c;
        const bool is_there = moves && key < f.key_dim && column < f.head_dim;
        sum = is_there ? slot.S[key * f.head_dim + column] : 0.f;
    });
}

// S where it is another than the slot's, and u of the open chunk's rows t to `end`.
template <typename T, int ROWS, int C, bool SCAN, int N>
__device__ __forceinline__ void write_slot(const slot_parts &slot,
                                           const chunk_of<T, ROWS, C, SCAN> &w, float (&S)[N][4],
                                           const source<T, SCAN> &f, bool moved, int t, int end)
{
    if (moved)
        each_sum(S, [&](int i, int c, float &sum) {
            const int key = own_key() + i, column = f.first + own_column() + c;
            if (key < f.key_dim && column < f.head_dim) slot.S[key * f.head_dim + column] = sum;
        });
    for (int i = thread(); i < (end - t) * C; i += threads<C>) {
        const int j = t + i / C, column = f.first + i % C;
        if (column < f.head_dim) slot.u[j * f.head_dim + column] = to_f32(w.u[j][i % C]);
    }
}

// u of a block's rows t to `end`, (rows, columns) in scratch: from there, and to there.
template <typename T, int ROWS, int C, bool SCAN>
__device__ __forceinline__ void recall_rows(chunk_of<T, ROWS, C, SCAN> &w, const T *u, int end)
{
    read_tile<CHUNK, C, threads<C>>(w.u, u, C, C, 0, 0, end);
}

template <typename T, int ROWS, int C, bool SCAN>
__device__ __forceinline__ void keep_rows(T *u, const chunk_of<T, ROWS, C, SCAN> &w, int t, int end)
{
    constexpr int V = wide<T>;
    for (int i = t * C / V + thread(); i < end * C / V; i += threads<C>)
        *(pack<T, V> *)(u + i * V) = *(const pack<T, V> *)&w.u[i / (C / V)][i % (C / V) * V];
}

// ---- forward ------------------------------------------------------------------------------------

// Rows first to `end`, of which the first comes behind n of the open chunk; returns how many that
// has then. each(t, end): rows t to `end` of a chunk are there.
template <typename T, int ROWS, int C, bool SCAN, int N, typename F>
__device__ __forceinline__ int run(chunk_of<T, ROWS, C, SCAN> &w, float (&S)[N][4], T *out,
                                   const T *qkv, const source<T, SCAN> &f, int first, int end,
                                   int n, F each)
{
    for (int row = first; row < end;) {
        const int rows = min(CHUNK - n, end - row);
        add_rows(w, S, out, qkv, f, row, n, n + rows);
        each(n, n + rows);
        row += rows;
        n = (n + rows) % CHUNK;
    }
    return n;
}

// What a block goes over: a value head and a slice of a sequence.
struct unit_of {
    int seq, head, slice;
};

__device__ __forceinline__ unit_of unit_at(int unit, const delta_shape &s, int slices)
{
    return {unit / (s.n_heads * slices), unit / slices % s.n_heads, unit % slices};
}

// A sequence and those that go on from it. memory: the block's, of what the sequences behind a
// packed prefix begin with.
template <typename T, int ROWS, int C, bool SCAN>
__device__ __forceinline__ void run_unit(chunk_of<T, ROWS, C, SCAN> &w, T *out, const T *qkv,
                                         const source<T, SCAN> &f, const delta_rows &b,
                                         const delta_shape &s, int seq, float *memory)
{
    const int first = b.query_start[seq], behind = b.query_start[seq + 1];
    const int end = delta_unit_end(b, seq), from = b.paged ? b.state_from[seq] : 0;
    const int position = b.paged ? b.positions[first] : 0;
    T *u = (T *)(memory + DIM * C);
    if (b.paged && b.state_slot[seq] < 0) {
        const int column = f.first + thread();
        if (thread() < C && column < f.head_dim)
            out[((int64_t)first * f.n_heads + f.head) * f.head_dim + column] = from_f32<T>(0.f);
        return;
    }
    float S[C / parts<C> / 8][4];
    int n = position % CHUNK, open = 0; // rows of the prefix's
    bool moves = ROWS == CHUNK || n + end - seq >= CHUNK;
    for (int next = seq; next < end && !moves; next++) moves = b.state_slot[next] != from;
    if (position > 0) {
        read_slot(w, S, slot_of(b, from, s, f.head), f, n, moves);
        __syncthreads(); // it has zeros where read_rows() has the new rows' keys
    } else {
        clear(S);
        write_operand(w.S, S);
    }
    bool closed = position == 0;
    int known = n; // rows of u that the slot it came from has
    for (int next = seq, last; next < end; next = last + 1) {
        last = next;
        if constexpr (ROWS < CHUNK) // a row and drafts behind it, of one tile
            while (!delta_leaves(b, last, end) && (n + last - next + 1) % 16 > 0) last++;
        if (!b.paged && next > seq) {
            __syncthreads();
            recall(S, memory);
            write_operand(w.S, S);
            recall_rows(w, u, n = open);
            read_rows(w, qkv, f, behind - n, 0, n);
        }
        n = run(w, S, out, qkv, f, b.query_start[next], b.query_start[last + 1], n,
                [&](int, int until) {
                    if (until < CHUNK) return;
                    closed = true;
                    known = 0;
                });
        if (b.paged && delta_leaves(b, last, end)) {
            const bool same = b.state_slot[last] == from && !closed;
            write_slot(slot_of(b, b.state_slot[last], s, f.head), w, S, f, !same, same ? known : 0,
                       n);
        } else if (!b.paged && next == seq && end > seq + 1) {
            keep(memory, S);
            keep_rows(u, w, 0, open = n);
        }
    }
}

// k and G of the open chunk's rows to the slots of a unit, which all slices of all heads of a key
// head, a group, have read by now.
template <typename T, bool SCAN>
__device__ __forceinline__ void keep_open(const rule_inputs<T, SCAN> &in, const delta_rows &b,
                                          const delta_shape &s, int seq, int group)
{
    const int each = s.n_heads / s.n_key_heads, lane = thread() % 32;
    const int end = delta_unit_end(b, seq), row = b.query_start[seq], first = b.positions[row];
    // The first sequence's last, since all read what its slot held.
    for (int next = end - 1; next >= seq; next--) {
        if (!delta_leaves(b, next, end)) continue;
        const int behind = first + b.query_start[next + 1] - row;
        const int border = behind / CHUNK * CHUNK, n = behind - border;
        const int old = max(first - border, 0); // rows that are of earlier batches
        const int known = b.state_slot[next] == b.state_from[seq] ? old : 0;
        for (int i = thread(); i < each; i += blockDim.x) {
            const int head = group * each + i;
            const source<T, SCAN> f = source_of(in, s, head, 0);
            const float *from = slot_of(b, b.state_from[seq], s, head).G;
            float *to = slot_of(b, b.state_slot[next], s, head).G;
            float G = known > 0 ? from[known - 1] : 0.f;
            for (int j = known; j < n; j++)
                to[j] = G = j < old ? from[j]
                                    : __fadd_rn(G, gates_of(f, row + border + j - first).log_decay);
        }
        const float *from = slot_of(b, b.state_from[seq], s, group * each).k;
        float *to = slot_of(b, b.state_slot[next], s, group * each).k;
        for (int j = known + thread() / 32; j < n; j += blockDim.x / 32) {
            float k[DIM / 32];
            if (j < old) {
                read_vector(k, from + j * s.key_dim, s.key_dim);
            } else {
                const row_columns at = columns_of<SCAN>(s);
                read_vector(k,
                            in.qkv + (int64_t)(row + border + j - first) * at.width + at.k +
                                group * s.key_dim,
                            s.key_dim);
                const float factor = SCAN ? 1.f : inverse_length(k);
                for (int i = 0; i < DIM / 32; i++) k[i] = to_f32(from_f32<T>(k[i] * factor));
            }
            for (int i = 0; i < DIM / 32; i++)
                if (lane + 32 * i < s.key_dim) to[j * s.key_dim + lane + 32 * i] = k[i];
        }
        __syncthreads();
    }
}

#define VECTOR_WARPS 8

// q and k of all rows as the rule takes them: a warp has one of a row's vectors.
template <typename T>
__global__ void __launch_bounds__(VECTOR_WARPS * 32)
    vectors_kernel(T *vectors, const T *qkv, delta_shape s, int64_t n)
{
    grid_begin();
    const int64_t i = (int64_t)blockIdx.x * VECTOR_WARPS + threadIdx.x / 32;
    const int each = 2 * s.n_key_heads, which = i % each;
    if (i >= n) return;
    float x[DIM / 32];
    read_vector(x,
                qkv + i / each * (2 * s.n_key_heads * s.key_dim + s.n_heads * s.head_dim) +
                    which * s.key_dim,
                s.key_dim);
    const float inverse = inverse_length(x);
    const float factor =
        which < s.n_key_heads ? inverse * (1.f / sqrtf((float)s.key_dim)) : inverse;
    for (int e = 0; e < DIM / 32; e++) {
        const int at = threadIdx.x % 32 + 32 * e;
        if (at < s.key_dim) vectors[i * s.key_dim + at] = from_f32<T>(x[e] * factor);
    }
}

template <typename T>
static void make_vectors(struct device *dev, T *vectors, const void *qkv, int rows,
                         const struct delta_shape *s)
{
    const int64_t n = (int64_t)rows * 2 * s->n_key_heads;
    cuda_launch(dev, "delta_rule", vectors_kernel<T>, ceil_div(n, VECTOR_WARPS), VECTOR_WARPS * 32,
                0, vectors, qkv, *s, n);
}

// Floats that they take.
template <typename T> static int64_t vectors_floats(const struct delta_shape *s, int64_t rows)
{
    return ceil_div(rows * 2 * s->n_key_heads * s->key_dim * (int64_t)sizeof(T), 256) * 64;
}

// ---- chunks -------------------------------------------------------------------------------------

/* Of many rows, what needs nothing of S is made of all chunks at once (prepare_kernel): of the rows
 * of a sequence that stand in one, a piece, q and k as the rule takes them, and what rows read of
 * those before them. What is left is a chain from chunk to chunk, of which a block has COLUMNS
 * columns of S (chain_kernel). */
#define COLUMNS  32
#define TRIANGLE (TILES * (TILES + 1) / 2) // tiles of 16 rows and 16 that these read

__device__ __forceinline__ int tile_at(int tile, int of)
{
    return tile * (tile + 1) / 2 + of;
}

template <typename T> struct piece_keys { // of a key head, rows that are not there being zeros
    T k[CHUNK][DIM + PITCH], q[CHUNK][DIM + PITCH];
};
template <typename T> struct piece_head { // of a value head
    float decay[CHUNK], since[CHUNK];     // exp(G), and of what S behind the chunk has of a row
    float beta[CHUNK], G[CHUNK];
    float read[TRIANGLE][16][16]; // [j][t]: what u of row t takes of that of row j
    T seen[TRIANGLE][16][16];     // [t][j]: what row t's output takes of u of row j
};

// Rows of the batch from `row` on that are rows t to `end` of a chunk.
struct piece {
    int number, row, t, end;
};

// A sequence, and the position of its first row.
struct stretch {
    int seq, first, rows, position;
};

__device__ __forceinline__ stretch stretch_of(const delta_rows &b, int seq)
{
    const int first = b.query_start[seq];
    return {seq, first, b.query_start[seq + 1] - first,
            b.paged ? b.positions[first] : b.first_position[seq]};
}

// Pieces are numbered so that the number gives the sequence: no two have one, and some none.
__device__ __forceinline__ int first_number(const delta_rows &b, int seq)
{
    return b.query_start[seq] / CHUNK + 2 * seq;
}

// The k-th of a sequence; without rows where there are not so many.
__device__ __forceinline__ piece piece_of(const stretch &s, int k)
{
    const int border = (s.position / CHUNK + k) * CHUNK, from = max(s.position, border);
    const int until = min(s.position + s.rows, border + CHUNK);
    return {s.first / CHUNK + 2 * s.seq + k, s.first + from - s.position, from - border,
            until - border};
}

// Whether the sequences of a unit that begins with seq have one row each (delta_kernel).
__device__ __forceinline__ bool is_few(const delta_rows &b, int seq)
{
    if (!b.paged) return false;
    const int end = delta_unit_end(b, seq);
    return b.query_start[end] - b.query_start[seq] == end - seq;
}

#define HEADS (THREADS / CHUNK) // whose gates are made at once

template <typename T> struct prepared {
    piece_keys<T> keys;
    float G[HEADS][CHUNK], beta[HEADS][CHUNK], log_decay[HEADS][CHUNK];
};

// Where the rows of a piece and those before it in the chunk are: the first n_known in the slot
// that the unit goes on from, the rest in the batch, those before row t up to row `behind`.
struct piece_rows {
    int n_known, behind;
    piece p;

    __device__ int at(int i) const { return i < p.t ? behind - p.t + i : p.row + i - p.t; }
};

template <typename T>
__device__ __forceinline__ void prepare_keys(piece_keys<T> &keys, const piece_rows &rows,
                                             const source<T, false> &f, const float *known)
{
    constexpr int AT_ONCE = 4, WARPS = THREADS / 32;
    const float q_scale = 1.f / sqrtf((float)f.key_dim);
    const int lane = thread() % 32, end = rows.p.end;
    for (int first = thread() / 32; first < tile_end(end); first += AT_ONCE * WARPS) {
        float q[AT_ONCE][DIM / 32], k[AT_ONCE][DIM / 32];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * WARPS;
            const T *from = f.qkv + (int64_t)rows.at(at) * f.width;
            read_vector(q[i], from + f.q_at, at >= rows.p.t && at < end ? f.key_dim : 0);
            if (at < rows.n_known)
                read_vector(k[i], known + at * f.key_dim, f.key_dim);
            else
                read_vector(k[i], from + f.k_at, at < end ? f.key_dim : 0);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * WARPS;
            const float length = inverse_length(k[i]), q_factor = inverse_length(q[i]) * q_scale;
            const float k_factor = at < rows.n_known ? 1.f : length;
            if (at >= tile_end(end)) break;
#pragma unroll
            for (int e = 0; e < DIM / 32; e++) {
                keys.q[at][lane + 32 * e] = from_f32<T>(q[i][e] * q_factor);
                keys.k[at][lane + 32 * e] = from_f32<T>(k[i][e] * k_factor);
            }
        }
    }
}

// The gates of the rows of n value heads from `first` on.
template <typename T>
__device__ __forceinline__ void prepare_gates(prepared<T> &w, const piece_rows &rows,
                                              const rule_inputs<T, false> &in, const delta_shape &s,
                                              int first, int n)
{
    const int h = thread() / CHUNK, i = thread() % CHUNK;
    if (h >= n) return;
    row_gates gates = {};
    if (i >= rows.n_known && i < rows.p.end)
        gates = gates_of(source_of(in, s, first + h, 0), rows.at(i));
    w.log_decay[h][i] = gates.log_decay;
    w.beta[h][i] = gates.beta;
}

// G of a value head, by a warp: behind the known rows' the sum of the log decays in order.
__device__ __forceinline__ void sum_decays(float *to, const float *log_decays, int n_known,
                                           const float *known)
{
    const int lane = thread() % 32;
    float G = n_known > 0 ? known[n_known - 1] : 0.f;
    for (int first = 0; first < CHUNK; first += 32) {
        const int own = first + lane;
        const float log_decay = log_decays[own];
        float until = own < n_known ? known[own] : 0.f;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const float next = __shfl_sync(~0u, log_decay, i);
            if (first + i >= n_known) G = __fadd_rn(G, next);
            if (lane == i && own >= n_known) until = G;
        }
        to[own] = until;
    }
}

// From a tile's products of its queries (is_q) or keys with keys.
template <typename T, int N>
__device__ __forceinline__ void write_compared(piece_head<T> &to, const float *G, const float *beta,
                                               float (&sums)[N][4], int tile, bool is_q)
{
    each_pair(sums, [&](int row, int j, float x, float y) {
        const int t = 16 * tile + row, of = j / 16;
        if (of > tile) return;
        x = j <= t ? expf(G[t] - G[j]) * x : 0.f;
        y = j < t ? expf(G[t] - G[j + 1]) * y : 0.f;
        if (is_q) {
            store_pair(&to.seen[tile_at(tile, of)][row][j % 16], x, y);
        } else {
            float(*read)[16] = to.read[tile_at(tile, of)];
            read[j % 16][row] = j < t ? -beta[t] * x : 0.f;
            read[j % 16 + 1][row] = j + 1 < t ? -beta[t] * y : 0.f;
        }
    });
}

// Block x is the number of a piece, y a key head.
template <typename T>
__global__ void __launch_bounds__(THREADS, 3)
    prepare_kernel(piece_keys<T> *keys, piece_head<T> *heads, rule_inputs<T, false> in,
                   delta_rows b, delta_shape s)
{
    grid_begin();
    extern __shared__ __align__(16) char shared[];
    prepared<T> &w = *(prepared<T> *)shared;
    const int each = s.n_heads / s.n_key_heads, group = blockIdx.y, number = blockIdx.x;
    int seq = 0;
    for (int above = b.n_seqs; above - seq > 1;) {
        const int middle = (seq + above) / 2;
        *(first_number(b, middle) <= number ? &seq : &above) = middle;
    }
    const piece p = piece_of(stretch_of(b, seq), number - first_number(b, seq));
    int unit = seq;
    while (!delta_begins(b, unit)) unit--;
    if (p.t >= p.end || is_few(b, unit)) return;
    const int first = b.query_start[unit];
    const piece_rows rows = {b.paged ? max(first - p.row + p.t, 0) : 0,
                             b.paged ? p.row : b.query_start[unit + 1], p};
    const int from = rows.n_known > 0 ? b.state_from[unit] : 0;
    prepare_gates(w, rows, in, s, group * each, min(each, HEADS));
    prepare_keys(w.keys, rows, source_of(in, s, group * each, 0),
                 slot_of(b, from, s, group * each).k);
    __syncthreads();
    const int begin = p.t / 16 * 16, n = tile_end(p.end);
    const int warp = thread() / 32, tile = warp % TILES;
    const bool is_q = warp >= TILES, takes_part = 16 * tile >= begin && 16 * tile < n;
    float sums[CHUNK / 8][4];
    clear(sums);
    if (takes_part)
        multiply(sums, plain(is_q ? w.keys.q[16 * tile] : w.keys.k[16 * tile], DIM + PITCH),
                 turned(w.keys.k[0], DIM + PITCH), (s.key_dim + 15) / 16, 2 * (tile + 1));
    constexpr int UNITS = (DIM + PITCH) / wide<T>; // of a row
    piece_keys<T> &to_keys = keys[(int64_t)number * s.n_key_heads + group];
    for (int i = thread(); i < n * UNITS; i += THREADS) {
        ((uint4 *)to_keys.k)[i] = ((uint4 *)w.keys.k)[i];
        if (i >= begin * UNITS) ((uint4 *)to_keys.q)[i] = ((uint4 *)w.keys.q)[i];
    }
    for (int done = 0; done < each; done += HEADS) {
        const int first_head = group * each + done, n_heads = min(each - done, HEADS);
        if (done > 0) {
            __syncthreads();
            prepare_gates(w, rows, in, s, first_head, n_heads);
            __syncthreads();
        }
        if (warp < n_heads)
            sum_decays(w.G[warp], w.log_decay[warp], rows.n_known,
                       slot_of(b, from, s, first_head + warp).G);
        __syncthreads();
        for (int h = 0; h < n_heads; h++) {
            piece_head<T> &to = heads[(int64_t)number * s.n_heads + first_head + h];
            if (thread() < CHUNK) {
                const float G = w.G[h][thread()];
                to.decay[thread()] = expf(G);
                to.since[thread()] = expf(w.G[h][p.end - 1] - G);
                to.beta[thread()] = w.beta[h][thread()];
                to.G[thread()] = G;
            }
            if (takes_part) write_compared(to, w.G[h], w.beta[h], sums, tile, is_q);
        }
    }
}

template <typename T> struct chain_stage {
    piece_keys<T> keys;
    piece_head<T> head;
    T v[CHUNK][COLUMNS + PITCH];
};

template <typename T> constexpr int chain_stages = sizeof(T) == 2 ? 2 : 1; // of which one is read

template <typename T> struct chain_memory {
    chain_stage<T> stage[chain_stages<T>];
    T S[DIM][COLUMNS + PITCH], u[CHUNK][COLUMNS + PITCH];
    float r[CHUNK][COLUMNS + 4]; // the sums of u
};

template <typename T> struct chain_args {
    const piece_keys<T> *keys;
    const piece_head<T> *heads;
    T *out;
};

// Of a block the first warps go from chunk to chunk; the others read what comes next, and compute
// outputs.
#define CHAIN_THREADS (32 * TILES)

template <int BARRIER, int N> __device__ __forceinline__ void meet()
{
    asm volatile("barrier.sync %0, %1;" ::"n"(BARRIER), "n"(N) : "memory");
}

__device__ __forceinline__ void fetch_bytes(void *to, const void *from, int bytes)
{
    for (int i = thread() - CHAIN_THREADS; i < bytes / 16; i += THREADS - CHAIN_THREADS)
        copy16((bf16 *)to + 8 * i, (const bf16 *)from + 8 * i, true);
}

// Has what a piece needs on its way.
template <typename T>
__device__ __forceinline__ void fetch(chain_stage<T> &to, const chain_args<T> &a, const piece &p,
                                      const source<T, false> &f, const delta_shape &s)
{
    constexpr int V = wide<T>, ROW = (DIM + PITCH) * (int)sizeof(T);
    const int begin = p.t / 16, end = tile_end(p.end) / 16, first = p.end < CHUNK ? begin : 0;
    const int tile = tile_at(begin, 0), n_tiles = tile_at(end, 0) - tile;
    const piece_keys<T> &keys =
        a.keys[(int64_t)p.number * s.n_key_heads + f.head / (s.n_heads / s.n_key_heads)];
    const piece_head<T> &head = a.heads[(int64_t)p.number * s.n_heads + f.head];
    fetch_bytes(to.keys.k[16 * first], keys.k[16 * first], 16 * (end - first) * ROW);
    fetch_bytes(to.keys.q[16 * begin], keys.q[16 * begin], 16 * (end - begin) * ROW);
    fetch_bytes(&to.head, &head, (int)offsetof(piece_head<T>, read));
    fetch_bytes(to.head.read[tile], head.read[tile], n_tiles * (int)sizeof *head.read);
    fetch_bytes(to.head.seen[tile], head.seen[tile], n_tiles * (int)sizeof *head.seen);
    const T *v = f.qkv + (int64_t)p.row * f.width + f.value_at + f.first;
    const bool in_units = ((size_t)v | f.width * sizeof(T)) % 16 == 0 && f.head_dim % V == 0;
    const int each = in_units ? V : 1;
    for (int i = thread() - CHAIN_THREADS; i < (16 * end - p.t) * COLUMNS / each;
         i += THREADS - CHAIN_THREADS) {
        const int row = i / (COLUMNS / each), column = i % (COLUMNS / each) * each;
        const bool is_there = p.t + row < p.end && f.first + column < f.head_dim;
        const T *from = is_there ? v + (int64_t)row * f.width + column : f.qkv;
        if (in_units)
            copy16((bf16 *)&to.v[p.t + row][column], (const bf16 *)from, is_there);
        else
            to.v[p.t + row][column] = is_there ? *from : from_f32<T>(0.f);
    }
}

// What rows `first` to `last` read of u of a tile before them; `own` of n warps has every n-th four
// rows.
template <typename T>
__device__ __forceinline__ void read_before(chain_memory<T> &w, const piece_head<T> &head, int of,
                                            int first, int last, int own, int n)
{
    const int column = thread() % 32;
    float u[16];
#pragma unroll
    for (int j = 0; j < 16; j++) u[j] = to_f32(w.u[16 * of + j][column]);
    for (int row = first + 4 * own; row < last; row += 4 * n) {
        const float(*read)[16] = head.read[tile_at(row / 16, of)];
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = w.r[row + i][column];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            float x[4];
            load<float, 4>(x, &read[j][row % 16]);
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] = fmaf(x[i], u[j], sums[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) w.r[row + i][column] = sums[i];
    }
}

// u of a tile's rows from row t of the chunk on, by a warp.
template <typename T>
__device__ __forceinline__ void solve_tile(chain_memory<T> &w, const piece_head<T> &head, int tile,
                                           int t)
{
    const int column = thread() % 32;
    const float(*read)[16] = head.read[tile_at(tile, tile)];
    float sums[16];
    T u[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        sums[i] = w.r[16 * tile + i][column];
        u[i] = w.u[16 * tile + i][column];
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
        if (16 * tile + j >= t) u[j] = from_f32<T>(sums[j]);
        const float own = to_f32(u[j]);
#pragma unroll
        for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
            float x[4];
            load<float, 4>(x, &read[j][i]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (i + e > j) sums[i + e] = fmaf(x[e], own, sums[i + e]);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) w.u[16 * tile + i][column] = u[i];
}

// u of a piece from r; tile by tile, of which one is solved while those behind it read the one
// before.
template <typename T>
__device__ __forceinline__ void solve_piece(chain_memory<T> &w, const piece_head<T> &head,
                                            const piece &p)
{
    const int warp = thread() / 32, begin = p.t / 16, last = tile_end(p.end);
    for (int of = 0; of < begin; of++) read_before(w, head, of, 16 * begin, last, warp, TILES);
    if (begin > 0) meet<1, CHAIN_THREADS>();
    for (int tile = begin; 16 * tile < last; tile++) {
        const int behind = 16 * tile + 16;
        if (warp == 0)
            solve_tile(w, head, tile, p.t);
        else if (tile > begin)
            read_before(w, head, tile - 1, behind, last, warp - 1, TILES - 1);
        if (behind >= last) break;
        meet<1, CHAIN_THREADS>();
        read_before(w, head, tile, behind, behind + 16, warp, TILES);
        meet<1, CHAIN_THREADS>();
    }
}

// A tile's queries or keys times S.
template <typename T>
__device__ __forceinline__ void multiply_state(float (&sums)[COLUMNS / 8][4],
                                               const T (*rows)[DIM + PITCH],
                                               const chain_memory<T> &w, int steps)
{
    const auto left = plain(rows[0], DIM + PITCH);
    const auto S = plain(w.S[0], COLUMNS + PITCH);
    clear(sums);
    if (steps == DIM / 16)
        multiply(sums, left, S, DIM / 16); // loads of one step under the products of others
    else
        multiply(sums, left, S, steps);
}

// The sums of S of a thread of the chain: 32 keys to a warp.
typedef float chain_sums[2][COLUMNS / 8][4];

template <typename T, typename F>
__device__ __forceinline__ void each_state(chain_sums &S, const slot_parts &slot,
                                           const source<T, false> &f, F each)
{
#pragma unroll
    for (int m = 0; m < 2; m++)
        each_sum(S[m], [&](int i, int c, float &sum) {
            const int key = thread() / 32 * 32 + 16 * m + i, column = f.first + c;
            const bool is_there = key < f.key_dim && column < f.head_dim;
            each(sum, slot.S + key * f.head_dim + column, is_there);
        });
}

template <typename T> __device__ __forceinline__ void show(chain_memory<T> &w, chain_sums &S)
{
#pragma unroll
    for (int m = 0; m < 2; m++)
        each_pair(S[m], [&](int i, int c, float x, float y) {
            store_pair(&w.S[thread() / 32 * 32 + 16 * m + i][c], x, y);
        });
}

// A piece, by the threads of the chain.
template <typename T>
__device__ __forceinline__ void go_on(chain_memory<T> &w, const chain_stage<T> &stage,
                                      chain_sums &S, const piece &p, int steps)
{
    const int first = thread() / 32 * 16, key = thread() / 32 * 32;
    const piece_head<T> &head = stage.head;
    if (first < p.end && first + 16 > p.t) {
        float sums[COLUMNS / 8][4];
        multiply_state(sums, stage.keys.k + first, w, steps);
        scale_rows(sums, [&](int i) { return head.decay[first + i]; });
        each_sum(sums, [&](int i, int c, float &sum) {
            const int t = first + i;
            w.r[t][c] = head.beta[t] * __fsub_rn(to_f32(stage.v[t][c]), sum);
        });
    }
    meet<1, CHAIN_THREADS>();
    solve_piece(w, head, p);
    meet<2, THREADS>();
    if (p.end < CHUNK) return;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        scale_rows(S[m], [&](int) { return head.decay[CHUNK - 1]; });
        multiply(S[m], turned(stage.keys.k[0] + key + 16 * m, DIM + PITCH),
                 plain(w.u[0], COLUMNS + PITCH), TILES, COLUMNS / 8, head.since);
    }
    show(w, S);
}

// Its outputs, by the others, who have `next` on its way meanwhile.
template <typename T>
__device__ __forceinline__ void write_outputs(chain_memory<T> &w, const chain_stage<T> &stage,
                                              T *out, const piece &p, const source<T, false> &f,
                                              int steps)
{
    const int tile = thread() / 32 % TILES, first = 16 * tile;
    const bool takes_part = first < p.end && first + 16 > p.t;
    float sums[COLUMNS / 8][4];
    if (takes_part) {
        multiply_state(sums, stage.keys.q + first, w, steps);
        scale_rows(sums, [&](int i) { return stage.head.decay[first + i]; });
    }
    meet<2, THREADS>();
    if (!takes_part) return;
    for (int of = 0; of <= tile; of++)
        multiply(sums, plain(stage.head.seen[tile_at(tile, of)][0], 16),
                 plain(w.u[16 * of], COLUMNS + PITCH), 1);
    each_pair(sums, [&](int i, int c, float x, float y) {
        const int t = first + i, column = f.first + c;
        T *to = out + ((int64_t)(p.row + t - p.t) * f.n_heads + f.head) * f.head_dim + column;
        if (t < p.t || t >= p.end || column >= f.head_dim) return;
        if (f.head_dim % 2 == 0) {
            store_pair(to, x, y);
        } else {
            to[0] = from_f32<T>(x);
            if (column + 1 < f.head_dim) to[1] = from_f32<T>(y);
        }
    });
}

// What the sequences behind a packed prefix begin with.
#define BEGIN_FLOATS (2 * DIM * COLUMNS + CHUNK * COLUMNS)

// A sequence and those that go on from it. memory: the block's, of BEGIN_FLOATS.
template <typename T>
__device__ __forceinline__ void run_chain(chain_memory<T> &w, const chain_args<T> &a,
                                          const source<T, false> &f, const delta_rows &b,
                                          const delta_shape &s, int seq, float *memory)
{
    constexpr int STAGES = chain_stages<T>;
    const bool is_chain = thread() < CHAIN_THREADS;
    const int end = delta_unit_end(b, seq), from = b.paged ? b.state_from[seq] : 0;
    const int steps = (f.key_dim + 15) / 16;
    const slot_parts before = slot_of(b, from, s, f.head);
    float *u = memory + 2 * DIM * COLUMNS;
    stretch at = stretch_of(b, seq);
    piece p = piece_of(at, 0);
    const int known = p.t; // rows of u that the slot has
    bool closed = at.position == 0;
    chain_sums S;
    if (is_chain) {
        each_state<T>(S, before, f, [&](float &sum, const float *from, bool is_there) {
            sum = is_there && at.position > 0 ? *from : 0.f;
        });
        show(w, S);
    } else if (STAGES > 1) {
        fetch(w.stage[0], a, p, f, s);
        copies_commit();
        copies_wait<0>();
    }
    for (int i = thread(); i < known * COLUMNS; i += THREADS) {
        const int column = f.first + i % COLUMNS;
        w.u[i / COLUMNS][i % COLUMNS] =
            from_f32<T>(column < f.head_dim ? before.u[i / COLUMNS * f.head_dim + column] : 0.f);
    }
    for (int k = 0, stage = 0;; stage = (stage + 1) % STAGES) {
        stretch then = at;
        piece next = piece_of(at, k + 1);
        const bool ends = next.t >= next.end, is_last = ends && at.seq + 1 == end;
        if (ends && !is_last) {
            then = stretch_of(b, at.seq + 1);
            next = piece_of(then, 0);
        }
        meet<2, THREADS>();
        if (STAGES == 1) {
            if (!is_chain) fetch(w.stage[0], a, p, f, s);
            copies_commit();
            copies_wait<0>();
            meet<2, THREADS>();
        }
        if (is_chain) {
            go_on(w, w.stage[stage], S, p, steps);
        } else {
            if (STAGES > 1 && !is_last) fetch(w.stage[(stage + 1) % STAGES], a, next, f, s);
            copies_commit();
            write_outputs(w, w.stage[stage], a.out, p, f, steps);
            copies_wait<0>();
        }
        closed |= p.end == CHUNK;
        const int open = p.end % CHUNK;
        k = ends ? 0 : k + 1;
        p = next;
        if (!ends) continue;
        meet<2, THREADS>();
        if (b.paged && delta_leaves(b, at.seq, end)) {
            const bool same = b.state_slot[at.seq] == from && !closed;
            const slot_parts slot = slot_of(b, b.state_slot[at.seq], s, f.head);
            if (is_chain && !same)
                each_state<T>(S, slot, f, [](float &sum, float *to, bool is_there) {
                    if (is_there) *to = sum;
                });
            for (int i = thread() + (same ? known : 0) * COLUMNS; i < open * COLUMNS;
                 i += THREADS) {
                const int column = f.first + i % COLUMNS;
                if (column < f.head_dim)
                    slot.u[i / COLUMNS * f.head_dim + column] =
                        to_f32(w.u[i / COLUMNS][i % COLUMNS]);
            }
        } else if (!b.paged && at.seq + 1 < end) {
            const bool first = at.seq == seq; // the others begin where it ends
#pragma unroll
            for (int m = 0; m < 2; m++) {
                float *place = memory + m * DIM * COLUMNS;
                if (is_chain && first) keep(place, S[m]);
                if (is_chain && !first) recall(S[m], place);
            }
            if (is_chain) show(w, S);
            for (int i = thread(); i < then.position % CHUNK * COLUMNS; i += THREADS)
                if (first)
                    u[i] = to_f32(w.u[i / COLUMNS][i % COLUMNS]);
                else
                    w.u[i / COLUMNS][i % COLUMNS] = from_f32<T>(u[i]);
        }
        if (is_last) break;
        at = then;
        meet<2, THREADS>();
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    chain_kernel(chain_args<T> a, rule_inputs<T, false> in, delta_rows b, delta_shape s, int slices,
                 float *scratch, unsigned *tickets)
{
    grid_begin();
    extern __shared__ __align__(16) char shared[];
    chain_memory<T> &w = *(chain_memory<T> *)shared;
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads * slices; unit += gridDim.x) {
        const unit_of own = unit_at(unit, s, slices);
        if (!delta_begins(b, own.seq) || is_few(b, own.seq)) continue;
        run_chain(w, a, source_of(in, s, own.head, own.slice * COLUMNS), b, s, own.seq,
                  scratch + blockIdx.x * BEGIN_FLOATS);
        __syncthreads();
        const int each = s.n_heads / s.n_key_heads, group = own.head / each;
        if (b.paged && last_block(&tickets[own.seq * s.n_key_heads + group], each * slices))
            keep_open(in, b, s, own.seq, group);
    }
}

// Blocks of many rows that an SM has, at most.
template <int C, bool SCAN> constexpr int blocks_per_sm = SCAN &&C == 64 ? 2 : 1;

template <typename T, int ROWS, int C, bool SCAN>
__global__ void __launch_bounds__(threads<C>, ROWS < CHUNK ? 3 : blocks_per_sm<C, SCAN>)
    delta_kernel(T *out, rule_inputs<T, SCAN> in, delta_rows b, delta_shape s, int slices,
                 float *scratch, unsigned *tickets)
{
    grid_begin();
    extern __shared__ __align__(16) char shared[];
    chunk_of<T, ROWS, C, SCAN> &w = *(chunk_of<T, ROWS, C, SCAN> *)shared;
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads * slices; unit += gridDim.x) {
        const unit_of own = unit_at(unit, s, slices);
        if (!delta_begins(b, own.seq) || (ROWS < CHUNK && !is_few(b, own.seq))) continue;
        const source<T, SCAN> f = source_of(in, s, own.head, own.slice * C);
        run_unit(w, out, in.qkv, f, b, s, own.seq, scratch + blockIdx.x * 2 * DIM * C);
        __syncthreads();
        if (!b.paged || b.state_slot[own.seq] < 0) continue;
        const int each = s.n_heads / s.n_key_heads, group = own.head / each;
        if (last_block(&tickets[own.seq * s.n_key_heads + group], each * slices))
            keep_open(in, b, s, own.seq, group);
    }
}

// Of many rows, C columns to a block.
template <typename T_, bool SCAN_, int C_> struct rule_kind {
    using T = T_;
    static constexpr bool SCAN = SCAN_;
    static constexpr int C = C_;
};

template <typename F> static void with_rule(const struct delta_shape *s, F f)
{
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        if (!s->is_scan)
            f(rule_kind<T, false, many_columns<T>>());
        else if (s->head_dim > columns<T>)
            f(rule_kind<T, true, many_columns<T>>());
        else
            f(rule_kind<T, true, columns<T>>());
    });
}

static int slices_of(const struct delta_shape *s, int C)
{
    return ceil_div(s->head_dim, C);
}

static int blocks_of(struct device *dev, const struct delta_shape *s, int n_seqs, int C, int per_sm)
{
    const int units = n_seqs * s->n_heads * slices_of(s, C), most = cuda_use(dev)->n_sms * per_sm;
    return units < most ? units : most;
}

// Of the chain: what it takes, and the bytes of that.
template <typename T> struct chain_layout {
    int n_pieces, slices, blocks;
    size_t keys, heads, bytes; // of the pieces; behind them each block's BEGIN_FLOATS
};

template <typename T>
static chain_layout<T> lay_out_chain(struct device *dev, const struct delta_shape *s, int rows,
                                     int n_seqs)
{
    chain_layout<T> l;
    l.n_pieces = rows / CHUNK + 2 * n_seqs;
    l.slices = ceil_div(s->head_dim, COLUMNS);
    l.blocks = std::min(n_seqs * s->n_heads * l.slices, cuda_use(dev)->n_sms);
    l.keys = (size_t)l.n_pieces * s->n_key_heads * sizeof(piece_keys<T>);
    l.heads = (size_t)l.n_pieces * s->n_heads * sizeof(piece_head<T>);
    l.bytes = l.keys + l.heads + (size_t)l.blocks * BEGIN_FLOATS * sizeof(float);
    return l;
}

template <typename T>
static void run_chunks(struct device *dev, T *out, const rule_inputs<T, false> &in,
                       const struct delta_rows &rows, const struct delta_shape *s)
{
    const chain_layout<T> l = lay_out_chain<T>(dev, s, rows.n_tokens, rows.n_seqs);
    char *memory = (char *)cuda_workspace(dev, l.bytes);
    if (!memory) return;
    piece_keys<T> *keys = (piece_keys<T> *)memory;
    piece_head<T> *heads = (piece_head<T> *)(memory + l.keys);
    cuda_launch(dev, "delta_rule", prepare_kernel<T>, dim3(l.n_pieces, s->n_key_heads), THREADS,
                sizeof(prepared<T>), keys, heads, in, rows, *s);
    const chain_args<T> chain = {keys, heads, out};
    cuda_launch(dev, "delta_rule", chain_kernel<T>, l.blocks, THREADS, sizeof(chain_memory<T>),
                chain, in, rows, *s, l.slices, (float *)(memory + l.keys + l.heads),
                cuda_use(dev)->tickets);
}

void cuda_delta_rule(struct device *dev, void *out, const struct delta_args *a,
                     const struct delta_shape *s)
{
    const struct delta_rows rows = delta_rows_of(&a->batch);
    if (rows.n_tokens <= 0 || !delta_takes(dev, a->batch.view)) return;
    if ((int64_t)rows.n_seqs * s->n_key_heads > N_TICKETS) {
        device_fail(dev, "delta_rule: %d sequences of %d key heads; together at most %d",
                    rows.n_seqs, s->n_key_heads, N_TICKETS);
        return;
    }
    with_rule(s, [&](auto kind) {
        using K = decltype(kind);
        using T = typename K::T;
        constexpr int MANY = K::C, FEW = columns<T>;
        const bool many = !rows.paged || a->batch.view->max_query > 1; // in no captured step
        const rule_inputs<T, K::SCAN> in = inputs_of<T, K::SCAN>(a, s);
        const auto launch = [&](auto kernel, size_t shared, int C, int blocks, int n_threads,
                                float *scratch) {
            cuda_launch(dev, "delta_rule", kernel, blocks, n_threads, shared, out, in, rows, *s,
                        slices_of(s, C), scratch, cuda_use(dev)->tickets);
        };
        const auto units = [&](int C) { return rows.n_seqs * s->n_heads * slices_of(s, C); };
        if (rows.paged && !(many && K::SCAN))
            launch(delta_kernel<T, 16, FEW, K::SCAN>, sizeof(chunk_of<T, 16, FEW, K::SCAN>), FEW,
                   units(FEW), THREADS, NULL);
        if constexpr (!K::SCAN) {
            if (many) run_chunks(dev, (T *)out, in, rows, s);
        } else if (many) {
            const int blocks = blocks_of(dev, s, rows.n_seqs, MANY, blocks_per_sm<MANY, true>);
            float *scratch = NULL;
            if (!rows.paged &&
                !(scratch = (float *)cuda_workspace(dev, blocks * 2 * DIM * MANY * sizeof(float))))
                return;
            launch(delta_kernel<T, CHUNK, MANY, true>, sizeof(chunk_of<T, CHUNK, MANY, true>), MANY,
                   rows.paged ? units(MANY) : blocks, threads<MANY>, scratch);
        }
    });
}

// ---- backward -----------------------------------------------------------------------------------

// Scratch: each block's own, and what all write into. Where things begin, in floats.
struct back_memory {
    float *at;
    int64_t block; // a block's, of which:
    int64_t S, u;  // S at every border, as an operand; (positions, columns) u of every position
    int64_t begin; // S at the border before what goes on from the first sequence
    // What sequences add to what they go on from: (CHUNK, columns) of u, (CHUNK, DIM) of k and
    // (CHUNK) of the log decays of the open chunk's rows, and of S before it.
    int64_t shared_u, shared_k, shared_log_decay, shared_S;
    int64_t dvectors; // (T, n_heads, slices, 2, key_dim): of q and k as the rule takes them
    // (T, n_heads, slices, 3): of what beta is made of, or of Mamba-2's step without its decay; of
    // the log decay; and of Mamba-2's skip.
    int64_t dgates;
    int64_t shared;  // (T, n_heads, 3): a row's part of the gradients of a_log, dt_bias and skip
    int64_t vectors; // make_vectors()
    int64_t end;
};

template <typename K>
static struct back_memory lay_out_back(const struct delta_shape *s, int blocks, int rows,
                                       int max_context)
{
    using T = typename K::T;
    const int64_t width = K::C, matrix = DIM * width, slices = slices_of(s, K::C);
    const int64_t chunks = max_context / CHUNK + 1, heads = (int64_t)rows * s->n_heads;
    struct back_memory m = {};
    m.S = 0;
    m.u = m.S + (chunks + 1) * matrix * (int)sizeof(T) / 4;
    m.begin = m.u + chunks * CHUNK * width;
    m.shared_u = m.begin + matrix;
    m.shared_k = m.shared_u + CHUNK * width;
    m.shared_log_decay = m.shared_k + CHUNK * DIM;
    m.shared_S = m.shared_log_decay + CHUNK;
    m.block = m.shared_S + matrix;
    m.dvectors = m.block * blocks;
    m.dgates = m.dvectors + heads * slices * 2 * s->key_dim;
    m.shared = m.dgates + heads * slices * 3;
    m.vectors = (m.shared + heads * 3 + 63) / 64 * 64;
    m.end = m.vectors + (K::SCAN ? 0 : vectors_floats<T>(s, rows));
    return m;
}

size_t cuda_delta_scratch(struct device *dev, const struct delta_shape *s, int rows,
                          int max_context)
{
    if (s->n_heads == 0) return 0;
    if (delta_is_conv(s)) return cuda_conv_scratch(s, rows);
    size_t back = 0, chain = 0; // the latter of sequences of 32 rows: of fewer it is more
    with_rule(s, [&](auto kind) {
        using K = decltype(kind);
        back = lay_out_back<K>(s, cuda_use(dev)->n_sms, rows, max_context).end * sizeof(float);
        if (!K::SCAN) chain = lay_out_chain<typename K::T>(dev, s, rows, ceil_div(rows, 32)).bytes;
    });
    return std::max({back, chain, cuda_conv_scratch(s, rows)});
}

enum { OF_SEEN, OF_READ, OF_QUERY, OF_KEY, OF_BORDER, ROW_PARTS };

// Sums over rows and columns of a chunk are of warps, then added in order. The gradients of `seen`
// and `read`, which are then of the products of q or k and k, take their place.
template <typename T, int C, bool SCAN> struct back_chunk_of : chunk_of<T, CHUNK, C, SCAN> {
    T dS[DIM][C + PITCH]; // behind the chunk
    T dout[CHUNK][C + PITCH], du[SCAN ? 1 : CHUNK][C + PITCH];
    float row_parts[ROW_PARTS][2 * parts<C>][CHUNK], column_parts[2][TILES][CHUNK];
    float decay[CHUNK], since[CHUNK]; // exp(G), and of what S behind the chunk has of a row
    float sums[32];
};

template <typename T> struct back_arrays {
    T *dqkv;
    const T *dout, *qkv;
};

// Which rows of a batch a chunk has: the first `own` of them are those before row `shared`, the
// others begin with row `first`.
struct chunk_rows {
    int own, n; // rows own to n are the sequence's
    int first, shared;
};

__device__ __forceinline__ int row_at(const chunk_rows &c, int t)
{
    return t < c.own ? c.shared - c.own + t : c.first + t - c.own;
}

// Which columns of a matrix of `all` a warp has where all warps of a tile of rows share them.
struct warp_share {
    int index, first;
};

template <int C> __device__ __forceinline__ warp_share own_share(int all)
{
    const warp_tile own = own_tile<CHUNK>(0);
    const int index = own.is_q + 2 * own.part;
    return {index, index * (all / (2 * parts<C>))};
}

// A warp's sums of the gradient of `seen` or `read`, from (rows of dout or of du) times u, and what
// G gets of it.
template <typename T, int C, bool SCAN, int N>
__device__ __forceinline__ void compare_back(back_chunk_of<T, C, SCAN> &w, float (&sums)[N][4],
                                             bool is_q, int n)
{
    const int tile = own_tile<CHUNK>(0).tile, first = 16 * tile, lane = thread() % 32;
    const warp_share share = own_share<C>(CHUNK);
    float rows[2] = {}, column_sums[N][2] = {};
    clear(sums);
    if (first >= n) return;
    multiply(sums, plain((is_q ? w.dout : w.du)[first], C + PITCH),
             turned(w.u[share.first], C + PITCH), C / 16);
    int i = 0;
    each_sum(sums, [&](int row, int column, float &sum) {
        const int t = first + row, j = share.first + column;
        float part = 0.f;
        if (is_q && j <= t) {
            part = sum * to_f32(w.seen[t][j]);
            sum *= __expf(w.G[t] - w.G[j]);
        } else if (!SCAN && !is_q && j < t) {
            part = sum * w.read[j][t];
            sum *= -w.beta[t] * __expf(w.G[t] - w.G[j]);
        } else {
            sum = 0.f;
        }
        rows[i % 4 / 2] += part;
        column_sums[i / 4][i % 2] += part;
        i++;
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = lanes_sum<4>(rows[r]);
        if (lane % 4 == 0)
            w.row_parts[is_q ? OF_SEEN : OF_READ][share.index][first + lane / 4 + 8 * r] = sum;
    }
#pragma unroll
    for (int c = 0; c < 2 * N; c++) {
        float sum = column_sums[c / 2][c % 2];
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
        if (lane / 4 == 0)
            w.column_parts[is_q ? OF_SEEN : OF_READ][tile]
                          [share.first + c / 2 * 8 + lane * 2 + c % 2] = sum;
    }
}

// Those sums to where the matrix lay that all have read by now.
template <int C, typename T, int P, int N>
__device__ __forceinline__ void write_compared(T (*to)[P], float (&sums)[N][4])
{
    const int first = own_tile<CHUNK>(0).first, column = own_share<C>(CHUNK).first;
    each_pair(sums, [&](int i, int c, float x, float y) {
        store_pair(&to[first + i][column + c], x, y);
    });
}

// The sums of u's gradient in r from the last row to row `own`, sixteen at a time; rows before get
// theirs of these.
template <typename T, int C, bool SCAN>
__device__ __forceinline__ void solve_back(back_chunk_of<T, C, SCAN> &w, int own, int n)
{
    constexpr int GROUPS = threads<C> / C, EACH = 16 / GROUPS;
    const int column = thread() % C, group = thread() / C;
    const int end = tile_end(n);
    for (int b = end - 16; b >= 0; b -= 16) {
        const int first = b + group * EACH;
        float part[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) part[i] = w.r[first + i][column];
        for (int t = max(b + 16, own / 4 * 4); t < end; t += 4) {
            float read[EACH][4];
#pragma unroll
            for (int i = 0; i < EACH; i++) load<float, 4>(read[i], &w.read[first + i][t]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float du = t + j >= own ? w.r[t + j][column] : 0.f;
#pragma unroll
                for (int i = 0; i < EACH; i++) part[i] = fmaf(read[i][j], du, part[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) w.r[first + i][column] = part[i];
        __syncthreads();
        if (group == 0) {
            float sums[16];
#pragma unroll
            for (int i = 0; i < 16; i++) sums[i] = w.r[b + i][column];
#pragma unroll
            for (int t = 15; t > 0; t--)
                if (b + t >= own)
#pragma unroll
                    for (int j = 0; j < t; j++)
                        sums[j] = fmaf(w.read[b + j][b + t], sums[t], sums[j]);
#pragma unroll
            for (int i = 0; i < 16; i++) w.r[b + i][column] = sums[i];
        }
        __syncthreads();
    }
}

// Adds up sums times vectors[row][column] over a warp's columns.
template <typename T, int N, int P>
__device__ __forceinline__ void row_products(float (*to)[CHUNK], float (&sums)[N][4],
                                             const T (*vectors)[P], int first,
                                             const warp_share &share)
{
    float rows[2] = {};
    int i = 0;
    each_sum(sums, [&](int row, int column, float &sum) {
        rows[i++ % 4 / 2] += sum * to_f32(vectors[first + row][share.first + column]);
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = lanes_sum<4>(rows[r]);
        if (thread() % 4 == 0) to[share.index][first + thread() % 32 / 4 + 8 * r] = sum;
    }
}

// The gradients of a chunk's rows from those of their outputs and of S behind it, dS, which becomes
// that of S before it: all that is not the sequence's goes to what is shared. takes: what is shared
// is added to the sequence's rows.
template <typename T, int C, bool SCAN, int N>
__device__ void back_chunk(back_chunk_of<T, C, SCAN> &w, float (&dS)[N][4],
                           const back_arrays<T> &to, const back_memory &m, float *memory,
                           const source<T, SCAN> &f, int slices, const chunk_rows &c,
                           const T *S_before, const T *u, bool takes)
{
    constexpr int SHARES = 2 * parts<C>;
    constexpr int READ_PITCH = CHUNK + (sizeof(T) == 2 ? PITCH : 4);
    const warp_tile own = own_tile<CHUNK>(0);
    const warp_share columns = own_share<C>(C), keys = own_share<C>(DIM);
    const int steps = (f.key_dim + 15) / 16, n = c.n, tiles = tile_end(n) / 16;
    T(*dseen)[CHUNK + PITCH] = w.seen;
    T(*dread)[READ_PITCH] = (T(*)[READ_PITCH])w.read;
    float compared[CHUNK / 8 / SHARES][4];
    const auto dgates_at = [&](int row) {
        return m.at + m.dgates + (((int64_t)row * f.n_heads + f.head) * slices + f.first / C) * 3;
    };
    const bool closes = n == CHUNK, takes_part = own.first < n;
    float *shared_u = memory + m.shared_u, *shared_k = memory + m.shared_k,
          *shared_log_decay = memory + m.shared_log_decay;
    __syncthreads();
    {
        float S[N][4];
        recall(S, S_before);
        write_operand(w.S, S);
    }
    write_operand(w.dS, dS);
    recall_rows(w, u, n);
    read_tile<CHUNK, C, threads<C>>(
        w.dout, to.dout + ((int64_t)c.first * f.n_heads + f.head) * f.head_dim + f.first,
        f.n_heads * f.head_dim, f.head_dim - f.first, 0, c.own, n);
    if (c.own > 0) read_rows(w, to.qkv, f, c.shared - c.own, 0, c.own);
    read_rows(w, to.qkv, f, c.first, c.own, n);
    __syncthreads();
    const float last = w.G[n - 1];
    if (thread() < CHUNK) {
        w.decay[thread()] = expf(w.G[thread()]);
        w.since[thread()] = expf(last - w.G[thread()]);
    }
    if (takes_part) compare_rows(w, own_tile<CHUNK, SCAN>(0), steps);
    __syncthreads();
    if (takes_part) {
        float sums[C / 8 / SHARES][4];
        clear(sums);
        if (closes) {
            multiply(sums, plain(w.k[own.first], DIM + PITCH),
                     plain(w.dS[0] + columns.first, C + PITCH), steps);
            scale_rows(sums, [&](int j) { return w.since[own.first + j]; });
        }
        multiply(sums, turned(w.seen[own.first] + own.first, CHUNK + PITCH),
                 plain(w.dout[own.first] + columns.first, C + PITCH), tiles - own.tile);
        each_sum(sums, [&](int row, int column, float &sum) {
            const int j = own.first + row, at = columns.first + column;
            w.r[j][at] = sum + (takes && j < n ? shared_u[j * C + at] : 0.f);
        });
    }
    compare_back(w, compared, true, n);
    __syncthreads();
    write_compared<C>(dseen, compared);
    if constexpr (!SCAN) solve_back(w, c.own, n);
    for (int t = thread() / 32; t < tile_end(n); t += threads<C> / 32) {
        const int row = row_at(c, t);
        const bool is_own = t >= c.own && t < n;
        constexpr int V = C / 32; // columns of a lane
        const int at = thread() % 32 * V, column = f.first + at;
        float du[V], u[V], dvalue[V], own_du[V], dbeta = 0.f, dskip = 0.f;
        load<float, V>(du, &w.r[t][at]);
        if (!SCAN) load<T, V>(u, &w.u[t][at]);
#pragma unroll
        for (int v = 0; v < V; v++) {
            if constexpr (SCAN)
                u[v] = is_own && column + v < f.head_dim
                           ? to_f32(to.qkv[(int64_t)row * f.width + f.value_at + column + v])
                           : 0.f; // the value
            const float dout = SCAN ? to_f32(w.dout[t][at + v]) : 0.f;
            dbeta = fmaf(du[v], u[v], dbeta);
            dskip = fmaf(dout, u[v], dskip);
            dvalue[v] = w.beta[t] * du[v];
            if (SCAN) dvalue[v] = fmaf(f.skips, dout, dvalue[v]);
            own_du[v] = is_own ? du[v] : 0.f;
            if (t < c.own) shared_u[t * C + at + v] += du[v];
        }
        if constexpr (!SCAN) store<T, V>(&w.du[t][at], own_du);
        T *to_value = to.dqkv + (int64_t)row * f.width + f.value_at + column;
        if (is_own && (size_t)to_value % (V * sizeof(T)) == 0 && column + V <= f.head_dim)
            store<T, V>(to_value, dvalue);
        else
            for (int v = 0; v < V && is_own && column + v < f.head_dim; v++)
                to_value[v] = from_f32<T>(dvalue[v]);
        dbeta = lanes_sum(dbeta);
        if (SCAN) dskip = lanes_sum(dskip);
        if (is_own && thread() % 32 == 0) {
            float *dgates = dgates_at(row);
            dgates[0] = SCAN ? dbeta : dbeta * (1.f - w.beta[t]);
            dgates[2] = dskip;
        }
    }
    __syncthreads();
    if constexpr (!SCAN) {
        compare_back(w, compared, false, n);
        __syncthreads();
        write_compared<C>(dread, compared);
        __syncthreads();
    }
    if (takes_part) {
        const auto store_rows = [&](float(&sums)[DIM / 8 / SHARES][4], int which) {
            each_pair(sums, [&](int i, int column, float x, float y) {
                const int t = own.first + i, key = keys.first + column;
                float *shared = shared_k + t * DIM + key;
                float *at =
                    m.at + m.dvectors + key +
                    ((((int64_t)row_at(c, t) * f.n_heads + f.head) * slices + f.first / C) * 2 +
                     which) *
                        f.key_dim;
                if (which && t < c.own) {
                    shared[0] += x;
                    shared[1] += y;
                } else if (t >= c.own && t < n && key < f.key_dim) {
                    const bool adds = which && takes;
                    if (adds) x += shared[0];
                    if (adds) y += shared[1];
                    if (f.key_dim % 2 == 0)
                        store_pair(at, x, y);
                    else
                        at[0] = x;
                    if (f.key_dim % 2 > 0 && key + 1 < f.key_dim) at[1] = y;
                }
            });
        };
        const auto S_of = turned(w.S[keys.first], C + PITCH);
        const auto k_of = plain(w.k[0] + keys.first, DIM + PITCH);
        float sums[DIM / 8 / SHARES][4];
        clear(sums);
        multiply(sums, plain(w.dout[own.first], C + PITCH), S_of, C / 16);
        scale_rows(sums, [&](int t) { return w.decay[own.first + t]; });
        row_products(w.row_parts[OF_QUERY], sums, w.q, own.first, keys);
        multiply(sums, plain(dseen[own.first], CHUNK + PITCH), k_of, own.tile + 1);
        store_rows(sums, 0);
        clear(sums);
        if constexpr (!SCAN) {
            multiply(sums, plain(w.du[own.first], C + PITCH), S_of, C / 16);
            scale_rows(sums,
                       [&](int t) { return -w.beta[own.first + t] * w.decay[own.first + t]; });
            row_products(w.row_parts[OF_KEY], sums, w.k, own.first, keys);
        }
        if (closes) {
            float behind[DIM / 8 / SHARES][4];
            clear(behind);
            multiply(behind, plain(w.u[own.first], C + PITCH), turned(w.dS[keys.first], C + PITCH),
                     C / 16);
            scale_rows(behind, [&](int j) { return w.since[own.first + j]; });
            row_products(w.row_parts[OF_BORDER], behind, w.k, own.first, keys);
#pragma unroll
            for (int i = 0; i < DIM / 2 / SHARES; i++) sums[i / 4][i % 4] += behind[i / 4][i % 4];
        }
        if constexpr (!SCAN) {
            multiply(sums, plain(dread[own.first], READ_PITCH), k_of, own.tile + 1);
            multiply(sums, turned(dread[own.first] + own.first, READ_PITCH),
                     plain(w.k[own.first] + keys.first, DIM + PITCH), tiles - own.tile);
        }
        multiply(sums, turned(dseen[own.first] + own.first, CHUNK + PITCH),
                 plain(w.q[own.first] + keys.first, DIM + PITCH), tiles - own.tile);
        store_rows(sums, 1);
    }
    __syncthreads();
    constexpr int V = wide<T>;
    for (int i = thread(); i < tile_end(n) * C / V; i += threads<C>) {
        const int t = i / (C / V), at = i % (C / V) * V;
        const auto scale = [&](T *x, float factor) {
            float scaled[V];
            load<T, V>(scaled, x);
#pragma unroll
            for (int v = 0; v < V; v++) scaled[v] *= factor;
            store<T, V>(x, scaled);
        };
        scale(&w.dout[t][at], w.decay[t]);
        if constexpr (!SCAN) scale(&w.du[t][at], -w.beta[t] * w.decay[t]);
    }
    float dlast = 0.f;
    if (closes) {
        const float decay = w.decay[n - 1];
        each_sum(dS, [&](int key, int column, float &sum) {
            sum *= decay;
            dlast = fmaf(sum, to_f32(w.S[own_key() + key][own_column() + column]), dlast);
        });
    }
    dlast = block_sum(dlast, w.sums);
    multiply(dS, turned(w.q[0] + own_key(), DIM + PITCH),
             plain(w.dout[0] + own_column(), C + PITCH), tiles);
    if constexpr (!SCAN)
        multiply(dS, turned(w.k[0] + own_key(), DIM + PITCH),
                 plain(w.du[0] + own_column(), C + PITCH), tiles);
    for (int t = thread(); t < CHUNK; t += threads<C>) {
        float sum = 0.f, border = 0.f; // of G, and of G behind the chunk
        for (int part = 0; part < SHARES && t < n; part++) {
            for (int i = 0; i < OF_BORDER; i += SCAN ? OF_QUERY : 1) sum += w.row_parts[i][part][t];
            if (closes) border += w.row_parts[OF_BORDER][part][t];
        }
        for (int i = 0; i < (SCAN ? OF_READ : 2); i++)
            for (int tile = t / 16; tile < tiles && t < n; tile++)
                sum -= w.column_parts[i][tile][t];
        w.log_decay[t] = sum;
        w.since[t] = border;
    }
    __syncthreads();
    if (thread() >= 32) return;
    // In double: of the sums little stays.
    const int lane = thread();
    double later = lanes_until((double)w.since[lane] + w.since[lane + 32]);
    later = dlast + __shfl_sync(~0u, later, 31);
    for (int t = CHUNK - 1 - lane; t >= 0; t -= 32) {
        const double dG = later + lanes_until((double)w.log_decay[t] - w.since[t]);
        later = __shfl_sync(~0u, dG, 31);
        const float shared = takes && t < n ? shared_log_decay[t] : 0.f;
        if (t < c.own)
            shared_log_decay[t] += (float)dG;
        else if (t < n)
            dgates_at(row_at(c, t))[1] = (float)dG + shared;
    }
}

// The sequences of a unit go forward, the first of them before those behind it; and back, the first
// of them last.
template <typename T, int C, bool SCAN>
__global__ void __launch_bounds__(threads<C>)
    delta_back_kernel(back_arrays<T> to, back_memory m, rule_inputs<T, SCAN> in, delta_rows b,
                      delta_shape s, int slices)
{
    grid_begin();
    constexpr int N = C / parts<C> / 8;
    constexpr int64_t MATRIX = DIM * C;
    extern __shared__ __align__(16) char shared_bytes[];
    back_chunk_of<T, C, SCAN> &w = *(back_chunk_of<T, C, SCAN> *)shared_bytes;
    float *memory = m.at + (int64_t)blockIdx.x * m.block, *shared_S = memory + m.shared_S;
    T *kept = (T *)(memory + m.S);
    T *u = (T *)(memory + m.u);
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads * slices; unit += gridDim.x) {
        const unit_of own = unit_at(unit, s, slices);
        if (!delta_begins(b, own.seq)) continue;
        const source<T, SCAN> f = source_of(in, s, own.head, own.slice * C);
        const int n_seqs = delta_unit_end(b, own.seq) - own.seq;
        const int behind = b.query_start[own.seq + 1], rows = behind - b.query_start[own.seq];
        const int open = rows % CHUNK, whole = rows - open;
        float S[N][4], dS[N][4], shared[N][4];
        if (n_seqs > 1) {
            __syncthreads(); // the unit before has read what was shared
            for (int64_t i = m.shared_u + thread(); i < m.shared_S; i += threads<C>)
                memory[i] = 0.f;
            clear(shared);
            keep(shared_S, shared);
        }
        for (int step = 0; step <= n_seqs; step++) {
            const bool first = step % n_seqs == 0;
            const int seq = own.seq + step % n_seqs, before = first ? 0 : rows;
            if (step < n_seqs) {
                int chunk = before / CHUNK;
                __syncthreads();
                if (first)
                    clear(S);
                else
                    recall(S, memory + m.begin);
                keep(kept + chunk * MATRIX, S);
                write_operand(w.S, S);
                if (!first) {
                    recall_rows(w, u + (int64_t)whole * C, open);
                    read_rows(w, to.qkv, f, behind - open, 0, open);
                }
                run(w, S, (T *)NULL, to.qkv, f, b.query_start[seq], b.query_start[seq + 1],
                    before % CHUNK, [&](int t, int until) {
                        keep_rows(u + (int64_t)chunk * CHUNK * C, w, t, until);
                        if (until == CHUNK) keep(kept + ++chunk * MATRIX, S);
                    });
                if (n_seqs > 1 && first) {
                    keep(memory + m.begin, S);
                    continue;
                }
            }
            const int row = b.query_start[seq];
            clear(dS);
            for (int end = before + b.query_start[seq + 1] - row; end > before;) {
                const int border = (end - 1) / CHUNK * CHUNK, from = max(border, before);
                const chunk_rows c = {from - border, end - border, row + from - before, behind};
                if (first && n_seqs > 1 && end == whole) {
                    recall(shared, shared_S);
                    for (int i = 0; i < 4 * N; i++) dS[i / 4][i % 4] += shared[i / 4][i % 4];
                }
                back_chunk(w, dS, to, m, memory, f, slices, c, kept + border / CHUNK * MATRIX,
                           u + (int64_t)border * C, first && n_seqs > 1 && border == whole);
                end = from;
            }
            if (first) break;
            recall(shared, shared_S);
            for (int i = 0; i < 4 * N; i++) shared[i / 4][i % 4] += dS[i / 4][i % 4];
            keep(shared_S, shared);
        }
    }
}

// A row's gates: block x has some of (rows, n_heads).
template <typename T, bool SCAN>
__global__ void gates_back_kernel(T *dgates, back_memory m, rule_inputs<T, SCAN> in, delta_shape s,
                                  int rows, int slices)
{
    grid_begin();
    const int64_t i = (int64_t)blockIdx.x * SHARED_THREADS + threadIdx.x, row = i / s.n_heads;
    if (row >= rows) return;
    const source<T, SCAN> f = source_of(in, s, i % s.n_heads, 0);
    const row_gates gates = gates_of(f, row);
    float d[3] = {}; // as they lie in m.dgates
    for (int j = 0; j < 3 * slices; j++) d[j % 3] += m.at[m.dgates + i * slices * 3 + j];
    const float dexponent = -d[1] * f.rate; // of softplus(a), or of the step
    float da = (SCAN ? d[0] + dexponent : dexponent) * sigmoid(gates.raw);
    if (SCAN && softplus_of(gates.raw) < f.min_step) da = 0.f;
    T *to = dgates + row * f.stride + f.head;
    if (!SCAN) to[0] = from_f32<T>(d[0]);
    to[SCAN ? 0 : f.n_heads] = from_f32<T>(da);
    float *part = m.at + m.shared + i * 3;
    part[0] = dexponent * (SCAN ? gates.beta : softplus_of(gates.raw));
    part[1] = da;
    part[2] = d[2];
}

// From the gradients of a row's q (block z 0) or k (1) as the value heads of a key head (block y)
// take it, by slices, to that of what it was made of. A warp's.
template <typename T, bool SCAN>
__global__ void length_back_kernel(T *dqkv, const T *qkv, const float *dvectors, delta_shape s,
                                   int slices)
{
    grid_begin();
    int each = s.n_heads / s.n_key_heads * slices, lane = threadIdx.x;
    const row_columns columns = columns_of<SCAN>(s);
    int64_t at = (int64_t)blockIdx.x * columns.width + (blockIdx.z ? columns.k : columns.q) +
                 blockIdx.y * s.key_dim;
    const float *from =
        dvectors +
        (((int64_t)blockIdx.x * s.n_heads * slices + blockIdx.y * each) * 2 + blockIdx.z) *
            s.key_dim;
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
    if (SCAN) scale = 1.f, along = 0.f;
    for (int i = 0; i < DELTA_MAX_DIM / 32; i++)
        if (lane + 32 * i < s.key_dim)
            dqkv[at + lane + 32 * i] = from_f32<T>(scale * (d[i] - x[i] * along));
}

// What all rows of a head share: block x is the head.
__global__ void shared_back_kernel(float *da_log, float *ddt_bias, float *dskip, const float *parts,
                                   int rows, int n_heads)
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

void cuda_delta_rule_back(struct device *dev, const struct delta_grads *grads, const void *dout,
                          const struct delta_args *a, const struct delta_shape *s)
{
    const struct delta_rows rows = delta_rows_of(&a->batch);
    const int n = rows.n_tokens;
    if (n <= 0 || !delta_takes(dev, a->batch.view)) return;
    with_rule(s, [&](auto kind) {
        using K = decltype(kind);
        using T = typename K::T;
        constexpr int C = K::C;
        constexpr bool SCAN = K::SCAN;
        const int blocks = blocks_of(dev, s, rows.n_seqs, C, 1), slices = slices_of(s, C);
        struct back_memory m = lay_out_back<K>(s, blocks, n, a->batch.view->max_context);
        m.at = (float *)cuda_workspace(dev, m.end * sizeof(float));
        if (!m.at) return;
        rule_inputs<T, SCAN> in = inputs_of<T, SCAN>(a, s);
        if (!SCAN) {
            in.vectors = (const T *)(m.at + m.vectors);
            make_vectors(dev, (T *)(m.at + m.vectors), a->qkv, n, s);
        }
        const back_arrays<T> arrays = {(T *)grads->qkv, (const T *)dout, (const T *)a->qkv};
        cuda_launch(dev, "delta_rule_back", delta_back_kernel<T, C, SCAN>, blocks, threads<C>,
                    sizeof(back_chunk_of<T, C, SCAN>), arrays, m, in, rows, *s, slices);
        cuda_launch(dev, "delta_rule_back", length_back_kernel<T, SCAN>, dim3(n, s->n_key_heads, 2),
                    32, 0, grads->qkv, a->qkv, (m.at + m.dvectors), *s, slices);
        cuda_launch(dev, "delta_rule_back", gates_back_kernel<T, SCAN>,
                    ceil_div((int64_t)n * s->n_heads, SHARED_THREADS), SHARED_THREADS, 0,
                    grads->gates, m, in, *s, n, slices);
        if (grads->a_log || grads->dt_bias || grads->skip)
            cuda_launch(dev, "delta_rule_back", shared_back_kernel, s->n_heads, SHARED_THREADS, 0,
                        grads->a_log, grads->dt_bias, grads->skip, (m.at + m.shared), n,
                        s->n_heads);
    });
}
