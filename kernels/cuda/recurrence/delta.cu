/* delta.cu: the gated delta rule of linear attention and Mamba-2's (ops.h, delta_shape), and their
 * gradients, by chunks of positions. Of Mamba-2's (SCAN) a row's u is made of its value alone; k
 * and q are the row's as they are, and beta is its step.
 *
 * S stands at a chunk's border; a row is a function of it and of k, u and G of the open chunk's
 * rows (ops.h, delta_state_elements), in one order, so that it has the same bits wherever it comes
 * in. A decoded row is computed by row_kernel(). Of many rows, what needs nothing of S is made of
 * all chunks at once (prepare_kernel), and what is left is a chain from chunk to chunk
 * (chain_kernel). The gradient begins with the same two, which then leave S at every border and u
 * of every row, and goes back from chunk to chunk (delta_back_kernel). Sums over slices, over the
 * value heads of a key head, and over rows, are kernels of their own.
 *
 * Columns of S need nothing of each other. A block has some of them (a slice) of one value head
 * of a sequence, of a packed batch with those that go on behind it; S is in registers as the sums
 * of an mma lie (tensor.cuh), and in shared memory as an operand. What all slices of a key head's
 * heads share in a slot, k and G, the last of their blocks writes. */
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

// Columns of S in a block: of one row, of many, and of the gradient where a head has more than
// those of one row.
#define COLUMNS 32
template <typename T> constexpr int row_columns = 128 / (int)sizeof(T);
template <typename T> constexpr int back_columns = sizeof(T) == 2 ? 128 : 32;

// The thread's number, read anew at each call: what is made of it is not kept in registers from one
// use to the next, of which there are not enough.
INLINE int thread()
{
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
}

// Threads of a block of C columns, and how many of its warps have the same keys.
template <int C> constexpr int threads = C > 64 ? 2 * THREADS : THREADS;
template <int C> constexpr int parts = threads<C> / THREADS;

INLINE int own_key()
{
    return thread() % THREADS / 32 * 16;
}
INLINE int own_column()
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
template <typename T, int P>
INLINE operand_of<T, false> plain(const T (*rows)[P], int row = 0, int column = 0)
{
    return {rows[row] + column, P};
}
template <typename T, int P>
INLINE operand_of<T, true> turned(const T (*rows)[P], int row = 0, int column = 0)
{
    return {rows[row] + column, P};
}

// sums (16, 8 N) += a (16, 16 steps) b (16 steps, 8 N), of which the first `used` tiles of 8
// columns are wanted, an even number. A thread has (row g, columns 2 c and 2 c + 1) and the same of
// row g + 8 of each tile, g being its lane / 4 and c its lane % 4. The order of a sum is that of
// the steps, and of f32 that of its terms. factors: column k of a is rounded times factors[k].
template <int N, bool A, bool B>
INLINE void multiply(float (&sums)[N][4], operand_of<bf16, A> a, operand_of<bf16, B> b, int steps,
                     int used = N, const float *factors = NULL)
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
INLINE void multiply(float (&sums)[N][4], operand_of<float, A> a, operand_of<float, B> b, int steps,
                     int used = N, const float *factors = NULL)
{
    const int g = thread() % 32 / 4, c = thread() % 4 * 2;
    for (int k = 0; k < 16 * steps; k++) {
        const float by = factors ? factors[k] : 1.f;
        const float top = by * a.at[A ? k * a.pitch + g : g * a.pitch + k];
        const float low = by * a.at[A ? k * a.pitch + g + 8 : (g + 8) * a.pitch + k];
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (n >= used) break;
            unrolled<2>([&](int i) {
                const int j = 8 * n + c + i;
                const float right = b.at[B ? j * b.pitch + k : k * b.pitch + j];
                sums[n][i] = fmaf(top, right, sums[n][i]);
                sums[n][2 + i] = fmaf(low, right, sums[n][2 + i]);
            });
        }
    }
}

// f(row, column, sum) for each sum of a thread.
template <int N, typename F> INLINE void each_sum(float (&sums)[N][4], F f)
{
    const int g = thread() % 32 / 4, c = thread() % 4 * 2;
    unrolled<N, 4>([&](int n, int i) { f(g + i / 2 * 8, 8 * n + c + i % 2, sums[n][i]); });
}

// f(row, column, its sum, that of the next column).
template <int N, typename F> INLINE void each_pair(float (&sums)[N][4], F f)
{
    const int g = thread() % 32 / 4, c = thread() % 4 * 2;
    unrolled<N, 2>(
        [&](int n, int i) { f(g + i * 8, 8 * n + c, sums[n][2 * i], sums[n][2 * i + 1]); });
}

template <int N> INLINE void clear(float (&sums)[N][4])
{
    each_sum(sums, [](int, int, float &sum) { sum = 0; });
}

// ---- rows ---------------------------------------------------------------------------------------

// What a rule reads (ops.h, delta_args).
template <typename T, bool SCAN> struct rule_inputs {
    const T *qkv, *a_log, *dt_bias, *skip;
    const std::conditional_t<SCAN, T, float> *gates;
    int64_t stride; // of gates
};

template <typename T, bool SCAN>
static rule_inputs<T, SCAN> inputs_of(const struct delta_args *a, const struct delta_shape *s)
{
    return {(const T *)a->qkv,
            (const T *)a->a_log,
            (const T *)a->dt_bias,
            (const T *)a->skip,
            (decltype(rule_inputs<T, SCAN>::gates))a->gates,
            SCAN ? a->stride : 2 * s->n_heads};
}

// Of a value head, and which columns a block has.
template <typename T, bool SCAN> struct source : rule_inputs<T, SCAN> {
    float rate, bias, min_step, skips; // exp(a_log), dt_bias, skip
    int head, q_at, k_at, value_at, width, n_heads, key_dim, head_dim;
    int first; // column
};

// Columns of the queries' heads, the keys' and the values' in a row.
struct head_columns {
    int q, k, value, width;
};

template <bool SCAN> INLINE head_columns columns_of(const delta_shape &s)
{
    const int keys = s.n_key_heads * s.key_dim, values = s.n_heads * s.head_dim;
    if (SCAN) return {values + keys, values, 0, 2 * keys + values};
    return {0, keys, 2 * keys, 2 * keys + values};
}

template <typename T, bool SCAN>
INLINE source<T, SCAN> source_of(const rule_inputs<T, SCAN> &in, const delta_shape &s, int head,
                                 int first)
{
    const head_columns at = columns_of<SCAN>(s);
    const int key_head = head / heads_each(&s);
    return {in,
            expf(to_f32(in.a_log[head])),
            to_f32(in.dt_bias[head]),
            s.min_step,
            SCAN ? to_f32(in.skip[head]) : 0.f,
            head,
            at.q + key_head * s.key_dim,
            at.k + key_head * s.key_dim,
            at.value + head * s.head_dim,
            at.width,
            s.n_heads,
            s.key_dim,
            s.head_dim,
            first};
}

// What a row's gates are made of, beta, and its log decay, by which G behind it differs from that
// of the row before: written so that every kernel rounds alike.
struct row_gates {
    float raw, beta, log_decay; // raw: before softplus
};

template <typename T, bool SCAN> INLINE row_gates gates_of(const source<T, SCAN> &f, int row)
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
INLINE float inverse_length(const float (&x)[DIM / 32])
{
    float squares = 0;
    unrolled<DIM / 32>([&](int i) { squares = fmaf(x[i], x[i], squares); });
    return 1.f / sqrtf(lanes_sum(squares) + LENGTH_EPS);
}

template <typename T> INLINE void read_vector(float (&x)[DIM / 32], const T *from, int key_dim)
{
    unrolled<DIM / 32>([&](int i) {
        const int e = thread() % 32 + 32 * i;
        x[i] = e < key_dim ? to_f32(from[e]) : 0.f;
    });
}

INLINE int tile_end(int n)
{
    return (n + 15) / 16 * 16;
}

// Rows t to `end` of a chunk, one `stride` behind the other in memory, of which the first `columns`
// columns are there; zeros in what is not, up to the next sixteenth row. All are on their way at
// once, V columns in one access.
template <int V, int ROWS, int WIDTH, typename T, int N, typename S>
INLINE void read_tile_by(T (*to)[N], const S *from, int64_t stride, int columns, int t, int end)
{
    constexpr int UNITS = WIDTH / V, EACH = (ROWS * UNITS + THREADS - 1) / THREADS;
    constexpr int W = V < wide<T> ? V : wide<T>;
    float x[EACH][V / W][W];
    unrolled<EACH>([&](int i) {
        const int unit = thread() + i * THREADS, row = t + unit / UNITS;
        const int column = unit % UNITS * V;
        float all[V] = {};
        if (row < end && column < columns) load<S, V>(all, from + (row - t) * stride + column);
        unrolled<V>([&](int v) { x[i][v / W][v % W] = all[v]; });
    });
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int unit = thread() + i * THREADS, row = t + unit / UNITS;
        if (unit >= ROWS * UNITS || row >= tile_end(end)) continue;
        unrolled<V / W>(
            [&](int v) { store<T, W>(&to[row % ROWS][unit % UNITS * V + v * W], x[i][v]); });
    }
}

template <int ROWS, int WIDTH, typename T, int N, typename S>
INLINE void read_tile(T (*to)[N], const S *from, int64_t stride, int columns, int t, int end)
{
    if (((size_t)from | stride * sizeof(S)) % 16 == 0 && columns % wide<S> == 0)
        read_tile_by<wide<S>, ROWS, WIDTH>(to, from, stride, columns, t, end);
    else
        read_tile_by<1, ROWS, WIDTH>(to, from, stride, columns, t, end);
}

// factor(row) times the sums of each row.
template <int N, typename F> INLINE void scale_rows(float (&sums)[N][4], F factor)
{
    const float top = factor(thread() % 32 / 4), low = factor(thread() % 32 / 4 + 8);
    unrolled<N, 4>([&](int n, int i) { sums[n][i] = __fmul_rn(sums[n][i], i < 2 ? top : low); });
}

// Sums of S of keys from `key` and columns from `column` on, as an operand.
template <typename T, int P, int N>
INLINE void write_operand(T (*to)[P], float (&S)[N][4], int key, int column = 0)
{
    each_pair(S,
              [&](int i, int c, float x, float y) { store_pair(&to[key + i][column + c], x, y); });
}

// ---- states in memory ---------------------------------------------------------------------------

// Of a value head in a slot (ops.h, delta_state_elements).
struct slot_parts {
    float *k, *S, *u, *G;
};

INLINE slot_parts slot_of(const delta_rows &b, int slot, const delta_shape &s, int head)
{
    const int each = heads_each(&s);
    const int64_t matrix = (int64_t)s.key_dim * s.head_dim;
    const int64_t own = matrix + CHUNK * (s.head_dim + 1);
    const int width = 2 * s.n_key_heads * s.key_dim + s.n_heads * s.head_dim;
    float *k = b.states + slot * b.slot_elements + (int64_t)(s.taps - 1 + s.ahead) * width +
               head / each * (CHUNK * s.key_dim + each * own);
    float *S = k + CHUNK * s.key_dim + head % each * own;
    return {k, S, S + matrix, S + matrix + CHUNK * s.head_dim};
}

// each(sum, its number in a slot, whether that is there) for sums of S of keys from `key` on.
template <typename T, bool SCAN, int N, typename F>
INLINE void each_state(float (&S)[N][4], const slot_parts &slot, const source<T, SCAN> &f, int key,
                       F each)
{
    each_sum(S, [&](int i, int c, float &sum) {
        const bool is_there = key + i < f.key_dim && f.first + c < f.head_dim;
        each(sum, slot.S[(key + i) * f.head_dim + f.first + c], is_there);
    });
}

template <typename T, bool SCAN, int N>
INLINE void write_state(float (&S)[N][4], const slot_parts &slot, const source<T, SCAN> &f, int key)
{
    each_state(S, slot, f, key, [](float &sum, float &to, bool is_there) {
        if (is_there) to = sum;
    });
}

// u of the open chunk's rows t to `end` to a slot.
template <typename T, bool SCAN, int P>
INLINE void write_rows(const slot_parts &slot, const T (*u)[P], const source<T, SCAN> &f, int t,
                       int end)
{
    constexpr int C = P - PITCH;
    for (int i = t * C + thread(); i < end * C; i += THREADS) {
        const int column = f.first + i % C;
        if (column < f.head_dim) slot.u[i / C * f.head_dim + column] = to_f32(u[i / C][i % C]);
    }
}

// k and G of the open chunk's rows to the slots of a unit, which all slices of all heads of a key
// head, a group, have read by now.
template <typename T, bool SCAN>
INLINE void keep_open(const rule_inputs<T, SCAN> &in, const delta_rows &b, const delta_shape &s,
                      int seq, int group)
{
    const int each = heads_each(&s), lane = thread() % 32;
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
                const head_columns at = columns_of<SCAN>(s);
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

// What a block goes over: a value head and a slice of a sequence.
struct unit_of {
    int seq, head, slice;
};

INLINE unit_of unit_at(int unit, const delta_shape &s, int slices)
{
    return {unit / (s.n_heads * slices), unit / slices % s.n_heads, unit % slices};
}

// Whether the sequences of a unit that begins with seq have one row each, which row_kernel() takes.
INLINE bool is_few(const delta_rows &b, int seq)
{
    if (!b.paged) return false;
    const int end = delta_unit_end(b, seq);
    return b.query_start[end] - b.query_start[seq] == end - seq;
}

// ---- decoded rows -------------------------------------------------------------------------------

// Rows of a tile and those of its chunk, with room for the sixteen of its tile where nothing goes
// over the others: those beside it, which change nothing of it, are anything but in u.
template <typename T, bool SCAN> struct row_memory {
    T k[CHUNK][DIM + PITCH], q[16][DIM + PITCH];
    T S[DIM][row_columns<T> + PITCH]; // at the border
    T u[CHUNK][row_columns<T> + PITCH];
    T seen[16][CHUNK + PITCH]; // what row t's output takes of u of row j
    // [j][t]: what u of row t takes of that of row j
    alignas(16) float read[SCAN ? 1 : CHUNK][16 + 4];
    float r[16][row_columns<T> + 4]; // values; then u while it is being summed up
    float G[CHUNK], beta[CHUNK], log_decay[CHUNK];
};

// q, k and gates of rows t to `end` of the chunk, the first of which is `row`, and G; for all
// threads to wait for.
template <typename T, bool SCAN>
INLINE void read_rows(row_memory<T, SCAN> &w, const source<T, SCAN> &f, int row, int t, int end)
{
    const int lane = thread() % 32;
    const float q_scale = 1.f / sqrtf((float)f.key_dim);
    if (t + thread() < end) {
        const row_gates gates = gates_of(f, row + thread());
        w.log_decay[t + thread()] = gates.log_decay;
        w.beta[t + thread()] = gates.beta;
    }
    for (int at = t + thread() / 32; at < end; at += THREADS / 32) {
        float q[DIM / 32], k[DIM / 32];
        const T *from = f.qkv + (int64_t)(row + at - t) * f.width;
        read_vector(q, from + f.q_at, f.key_dim);
        read_vector(k, from + f.k_at, f.key_dim);
        const float q_factor = SCAN ? 1.f : inverse_length(q) * q_scale;
        const float k_factor = SCAN ? 1.f : inverse_length(k);
        unrolled<DIM / 32>([&](int e) {
            w.q[at % 16][lane + 32 * e] = from_f32<T>(q[e] * q_factor);
            w.k[at][lane + 32 * e] = from_f32<T>(k[e] * k_factor);
        });
    }
    __syncthreads();
    if (thread() >= 32) return;
    float G = t > 0 ? w.G[t - 1] : 0.f;
    for (int i = t; i < end; i++) w.G[i] = G = __fadd_rn(G, w.log_decay[i]);
}

// u of one row from r, and zeros behind it.
template <typename T, bool SCAN> INLINE void solve_row(row_memory<T, SCAN> &w, int t)
{
    constexpr int C = row_columns<T>, GROUPS = THREADS / C;
    const int column = thread() % C, group = thread() / C;
    if (group == 0) {
        float sum = w.r[t % 16][column];
#pragma unroll 8
        for (int j = 0; j < t; j++) sum = fmaf(w.read[j][t % 16], to_f32(w.u[j][column]), sum);
        w.u[t][column] = from_f32<T>(sum);
    }
    for (int i = t + group; i < tile_end(t + 1) && group > 0; i += GROUPS - 1)
        w.u[i][column] = from_f32<T>(0.f);
    __syncthreads();
}

// S of the next border, from a chunk whose rows are all there.
template <typename T, bool SCAN, int N>
INLINE void close_chunk(row_memory<T, SCAN> &w, float (&S)[N][4])
{
    const float end = w.G[CHUNK - 1], decay = expf(end);
    if (thread() < CHUNK) w.log_decay[thread()] = expf(end - w.G[thread()]);
    __syncthreads();
    scale_rows(S, [&](int) { return decay; });
    multiply(S, turned(w.k, 0, own_key()), plain(w.u), TILES, N, w.log_decay);
    write_operand(w.S, S, own_key());
}

// Rows t to `end` of a chunk, of one tile, the first of which is `row`, to out. All threads are
// done with the chunk behind it.
template <typename T, bool SCAN, int N>
INLINE void add_rows(row_memory<T, SCAN> &w, float (&S)[N][4], T *out, const source<T, SCAN> &f,
                     int row, int t, int end)
{
    constexpr int C = row_columns<T>, M = C / 8 / TILES;
    const int steps = (f.key_dim + 15) / 16, warp = thread() / 32;
    const int tile_row = t / 16 * 16, part = warp % TILES, first = part * 8 * M; // column
    const bool is_q = warp >= TILES;
    float sums[M][4];
    clear(sums);
    read_tile<16, C>(w.r, f.qkv + (int64_t)row * f.width + f.value_at + f.first, f.width,
                     f.head_dim - f.first, t, end);
    read_rows(w, f, row, t, end);
    __syncthreads();
    if constexpr (SCAN)
        for (int i = thread(); i < (tile_end(end) - t) * C; i += THREADS) {
            const int j = t + i / C;
            const float u = j < end ? w.beta[j] * w.r[j % 16][i % C] : 0.f;
            w.u[j][i % C] = from_f32<T>(u);
        }
    if (is_q || !SCAN) {
        multiply(sums, plain(is_q ? w.q : w.k + tile_row), plain(w.S, 0, first), steps);
        scale_rows(sums, [&](int i) { return expf(w.G[tile_row + i]); });
        if (!is_q)
            each_sum(sums, [&](int i, int column, float &sum) {
                float &r = w.r[i][first + column];
                r = w.beta[tile_row + i] * __fsub_rn(r, sum);
            });
        if (16 * part <= tile_row) {
            float products[2][4];
            clear(products);
            multiply(products, plain(is_q ? w.q : w.k + tile_row), turned(w.k, 16 * part), steps);
            each_sum(products, [&](int row, int column, float &sum) {
                const int t = tile_row + row, j = 16 * part + column;
                const float since = j <= t ? expf(w.G[t] - w.G[j]) : 0.f;
                if (is_q)
                    w.seen[row][j] = from_f32<T>(j <= t ? since * sum : 0.f);
                else
                    w.read[j][row] = j < t ? -w.beta[t] * (since * sum) : 0.f;
            });
        }
    }
    __syncthreads();
    if constexpr (!SCAN)
        for (int i = t; i < end; i++) solve_row(w, i);
    if (is_q) {
        multiply(sums, plain(w.seen), plain(w.u, 0, first), tile_row / 16 + 1);
        each_sum(sums, [&](int i, int c, float &sum) {
            const int at = tile_row + i, column = f.first + first + c;
            if (SCAN) sum = fmaf(f.skips, w.r[i][first + c], sum);
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

// Has what the lines of n floats hold on its way to the second-level cache.
INLINE void prefetch(const float *from, int n)
{
    for (int i = thread() * 32; i < n; i += blockDim.x * 32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
}

// S, as sums where it is to move on, and the n rows of the open chunk.
template <typename T, bool SCAN, int N>
INLINE void read_slot(row_memory<T, SCAN> &w, float (&S)[N][4], const slot_parts &slot,
                      const source<T, SCAN> &f, int n, bool moves)
{
    constexpr int C = row_columns<T>;
    prefetch(slot.k, n * f.key_dim);
    prefetch(slot.u, n * f.head_dim);
    read_tile<DIM, C>(w.S, slot.S + f.first, f.head_dim, f.head_dim - f.first, 0, f.key_dim);
    for (int first = 0; first < n; first += CHUNK / 2) // of which a thread's registers hold half
        read_tile<CHUNK / 2, DIM>(w.k + first, slot.k + first * f.key_dim, f.key_dim, f.key_dim, 0,
                                  min(n - first, CHUNK / 2));
    if (thread() < n) w.G[thread()] = slot.G[thread()];
    read_tile<CHUNK, C>(w.u, slot.u + f.first, f.head_dim, f.head_dim - f.first, 0, n);
    each_state(S, slot, f, own_key(), [&](float &sum, const float &from, bool is_there) {
        sum = moves && is_there ? from : 0.f;
    });
}

// A sequence of one row and those that go on from it.
template <typename T, bool SCAN>
INLINE void run_unit(row_memory<T, SCAN> &w, T *out, const source<T, SCAN> &f, const delta_rows &b,
                     const delta_shape &s, int seq)
{
    constexpr int C = row_columns<T>;
    const int first = b.query_start[seq], end = delta_unit_end(b, seq), from = b.state_from[seq];
    if (b.state_slot[seq] < 0) {
        const int column = f.first + thread();
        if (thread() < C && column < f.head_dim)
            out[((int64_t)first * f.n_heads + f.head) * f.head_dim + column] = from_f32<T>(0.f);
        return;
    }
    const int position = b.positions[first];
    float S[C / 8][4];
    int n = position % CHUNK;
    bool moves = n + end - seq >= CHUNK;
    for (int next = seq; next < end && !moves; next++) moves = b.state_slot[next] != from;
    if (position > 0) {
        read_slot(w, S, slot_of(b, from, s, f.head), f, n, moves);
        __syncthreads(); // it has zeros where read_rows() has the new rows' keys
    } else {
        clear(S);
        write_operand(w.S, S, own_key());
    }
    bool closed = position == 0;
    int known = n; // rows of u that the slot it came from has
    for (int next = seq, last; next < end; next = last + 1) {
        last = next; // of a row and drafts behind it, of one tile, with no state between them
        while (!delta_leaves(b, last, end) && (n + last - next + 1) % 16 > 0) last++;
        const int until = n + last - next + 1;
        add_rows(w, S, out, f, b.query_start[next], n, until);
        n = until % CHUNK;
        if (n == 0) closed = true, known = 0;
        if (delta_leaves(b, last, end)) {
            const bool same = b.state_slot[last] == from && !closed;
            const slot_parts slot = slot_of(b, b.state_slot[last], s, f.head);
            if (!same) write_state(S, slot, f, own_key());
            write_rows(slot, w.u, f, same ? known : 0, n);
        }
    }
}

template <typename T, bool SCAN>
__global__ void __launch_bounds__(THREADS, 3)
    row_kernel(T *out, rule_inputs<T, SCAN> in, delta_rows b, delta_shape s, int slices,
               unsigned *tickets)
{
    grid_begin();
    extern __shared__ __align__(16) char shared[];
    row_memory<T, SCAN> &w = *(row_memory<T, SCAN> *)shared;
    const unit_of own = unit_at(blockIdx.x, s, slices);
    if (!delta_begins(b, own.seq) || !is_few(b, own.seq)) return;
    run_unit(w, out, source_of(in, s, own.head, own.slice * row_columns<T>), b, s, own.seq);
    __syncthreads();
    if (b.state_slot[own.seq] < 0) return;
    const int each = heads_each(&s), group = own.head / each;
    if (last_block(&tickets[own.seq * s.n_key_heads + group], each * slices))
        keep_open(in, b, s, own.seq, group);
}

// ---- chunks -------------------------------------------------------------------------------------

/* Of many rows, what needs nothing of S is made of all chunks at once (prepare_kernel): of the rows
 * of a sequence that stand in one, a piece, q and k as the rule takes them, and what rows read of
 * those before them. What is left is a chain from chunk to chunk, of which a block has COLUMNS
 * columns of S (chain_kernel). */
#define TRIANGLE (TILES * (TILES + 1) / 2) // tiles of 16 rows and 16 that these read

INLINE int tile_at(int tile, int of)
{
    return tile * (tile + 1) / 2 + of;
}

template <typename T> struct piece_keys { // of a key head, rows that are not there being zeros
    T k[CHUNK][DIM + PITCH], q[CHUNK][DIM + PITCH];
};
template <typename T, bool SCAN> struct piece_head { // of a value head
    float decay[CHUNK], since[CHUNK]; // exp(G), and of what S behind the chunk has of a row
    float beta[CHUNK], G[CHUNK];
    T seen[TRIANGLE][16][16]; // [t][j]: what row t's output takes of u of row j
    // [j][t]: what u of row t takes of that of row j
    float read[SCAN ? 1 : TRIANGLE][16][16];
};

// Rows of the batch from `row` on that are rows t to `end` of the chunk behind a border.
struct piece {
    int number, row, t, end, border;
};

// A sequence, and the position of its first row.
struct stretch {
    int seq, first, rows, position;
};

INLINE stretch stretch_of(const delta_rows &b, int seq)
{
    const int first = b.query_start[seq];
    return {seq, first, b.query_start[seq + 1] - first,
            b.paged ? b.positions[first] : b.first_position[seq]};
}

// Pieces are numbered so that the number gives the sequence: no two have one, and some none.
INLINE int first_number(const delta_rows &b, int seq)
{
    return b.query_start[seq] / CHUNK + 2 * seq;
}

// The k-th of a sequence; without rows where there are not so many.
INLINE piece piece_of(const stretch &s, int k)
{
    const int border = (s.position / CHUNK + k) * CHUNK, from = max(s.position, border);
    const int until = min(s.position + s.rows, border + CHUNK);
    return {s.first / CHUNK + 2 * s.seq + k, s.first + from - s.position, from - border,
            until - border, border};
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

template <typename T, bool SCAN>
INLINE void prepare_keys(piece_keys<T> &keys, const piece_rows &rows, const source<T, SCAN> &f,
                         const float *known)
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
            const float length = SCAN ? 1.f : inverse_length(k[i]);
            const float q_factor = SCAN ? 1.f : inverse_length(q[i]) * q_scale;
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
template <typename T, bool SCAN>
INLINE void prepare_gates(prepared<T> &w, const piece_rows &rows, const rule_inputs<T, SCAN> &in,
                          const delta_shape &s, int first, int n)
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
INLINE void sum_decays(float *to, const float *log_decays, int n_known, const float *known)
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
template <typename T, bool SCAN, int N>
INLINE void write_compared(piece_head<T, SCAN> &to, const float *G, const float *beta,
                           float (&sums)[N][4], int tile, bool is_q)
{
    each_pair(sums, [&](int row, int j, float x, float y) {
        const int t = 16 * tile + row, of = j / 16;
        if (of > tile) return;
        x = j <= t ? expf(G[t] - G[j]) * x : 0.f;
        y = j < t ? expf(G[t] - G[j + 1]) * y : 0.f;
        if (SCAN || is_q) {
            store_pair(&to.seen[tile_at(tile, of)][row][j % 16], x, y);
        } else {
            float(*read)[16] = to.read[tile_at(tile, of)];
            read[j % 16][row] = j < t ? -beta[t] * x : 0.f;
            read[j % 16 + 1][row] = j + 1 < t ? -beta[t] * y : 0.f;
        }
    });
}

// Block x is the number of a piece, y a key head.
template <typename T, bool SCAN>
__global__ void __launch_bounds__(THREADS, 3)
    prepare_kernel(piece_keys<T> *keys, piece_head<T, SCAN> *heads, rule_inputs<T, SCAN> in,
                   delta_rows b, delta_shape s)
{
    grid_begin();
    extern __shared__ __align__(16) char shared[];
    prepared<T> &w = *(prepared<T> *)shared;
    const int each = heads_each(&s), group = blockIdx.y, number = blockIdx.x;
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
    const int warp = thread() / 32, tile = warp % TILES, half = warp / TILES;
    const bool is_q = SCAN || half > 0, takes_part = 16 * tile >= begin && 16 * tile < n;
    float sums[CHUNK / 8][4];
    clear(sums);
    if (takes_part)
        multiply(sums, plain(is_q ? w.keys.q : w.keys.k, 16 * tile), turned(w.keys.k),
                 (s.key_dim + 15) / 16, 2 * (tile + 1));
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
            piece_head<T, SCAN> &to = heads[(int64_t)number * s.n_heads + first_head + h];
            if (thread() < CHUNK) {
                const float G = w.G[h][thread()];
                to.decay[thread()] = expf(G);
                to.since[thread()] = expf(w.G[h][p.end - 1] - G);
                to.beta[thread()] = w.beta[h][thread()];
                to.G[thread()] = G;
            }
            if (takes_part && (!SCAN || h % 2 == half))
                write_compared(to, w.G[h], w.beta[h], sums, tile, is_q);
        }
    }
}

template <typename T, bool SCAN> struct chain_stage {
    piece_keys<T> keys;
    piece_head<T, SCAN> head;
    T v[CHUNK][COLUMNS + PITCH];
};

template <typename T> constexpr int chain_stages = sizeof(T) == 2 ? 2 : 1; // of which one is read

template <typename T, bool SCAN> struct chain_memory {
    chain_stage<T, SCAN> stage[chain_stages<T>];
    T S[DIM][COLUMNS + PITCH], u[CHUNK][COLUMNS + PITCH];
    float r[SCAN ? 1 : CHUNK][COLUMNS + 4]; // the sums of u
};

// What it reads and leaves: outputs, or where `out` is NULL what the gradient needs.
template <typename T, bool SCAN> struct chain_args {
    const piece_keys<T> *keys;
    const piece_head<T, SCAN> *heads;
    T *out;
    T *S; // (borders, n_heads, DIM, columns) at every border but the first (border_at)
    T *u; // (T, n_heads, columns)
};

// Of a block the first warps go from chunk to chunk; the others read what comes next, and compute
// outputs.
#define CHAIN_THREADS (32 * TILES)

template <int BARRIER, int N> INLINE void meet()
{
    asm volatile("barrier.sync %0, %1;" ::"n"(BARRIER), "n"(N) : "memory");
}

// Has bytes, or zeros, on their way, by the one with number `own` of n threads.
INLINE void fetch_bytes(void *to, const void *from, int bytes, int own, int n, bool is_there = true)
{
    for (int i = own; i < bytes / 16; i += n)
        copy16((bf16 *)to + 8 * i, (const bf16 *)from + 8 * i, is_there);
}

// The same of rows t to `stop` of a tile: those from `begin` to `end` lie one `stride` behind the
// other, and have the first `columns` columns; zeros in what is not there.
template <int WIDTH, typename T, int P>
INLINE void fetch_rows(T (*to)[P], const T *from, int64_t stride, int columns, int t, int stop,
                       int begin, int end, int own, int n)
{
    constexpr int V = wide<T>;
    const bool in_units = ((size_t)from | stride * sizeof(T)) % 16 == 0 && columns % V == 0;
    const auto each = [&](int row, int column, auto copy) {
        const bool is_there = row >= begin && row < end && column < columns;
        copy(&to[row][column], is_there ? from + (row - begin) * stride + column : from, is_there);
    };
    for (int i = own; i < (stop - t) * (WIDTH / V) && in_units; i += n)
        each(t + i / (WIDTH / V), i % (WIDTH / V) * V, [](T *to, const T *from, bool is_there) {
            copy16((bf16 *)to, (const bf16 *)from, is_there);
        });
    for (int i = own; i < (stop - t) * WIDTH && !in_units; i += n)
        each(t + i / WIDTH, i % WIDTH, [](T *to, const T *from, bool is_there) {
            *to = is_there ? *from : from_f32<T>(0.f);
        });
}

// Has what a piece needs on its way.
template <typename T, bool SCAN>
INLINE void fetch(chain_stage<T, SCAN> &to, const chain_args<T, SCAN> &a, const piece &p,
                  const source<T, SCAN> &f, const delta_shape &s)
{
    constexpr int ROW = (DIM + PITCH) * (int)sizeof(T), N = THREADS - CHAIN_THREADS;
    const int own = thread() - CHAIN_THREADS;
    const int begin = p.t / 16, end = tile_end(p.end) / 16, first = p.end < CHUNK ? begin : 0;
    const int tile = tile_at(begin, 0), n_tiles = tile_at(end, 0) - tile;
    const piece_keys<T> &keys = a.keys[(int64_t)p.number * s.n_key_heads + f.head / heads_each(&s)];
    const piece_head<T, SCAN> &head = a.heads[(int64_t)p.number * s.n_heads + f.head];
    if (!SCAN || p.end == CHUNK)
        fetch_bytes(to.keys.k[16 * first], keys.k[16 * first], 16 * (end - first) * ROW, own, N);
    if (a.out)
        fetch_bytes(to.keys.q[16 * begin], keys.q[16 * begin], 16 * (end - begin) * ROW, own, N);
    fetch_bytes(to.head.decay, head.decay, 4 * sizeof head.decay, own, N);
    if (a.out)
        fetch_bytes(to.head.seen[tile], head.seen[tile], n_tiles * (int)sizeof *head.seen, own, N);
    if (!SCAN)
        fetch_bytes(to.head.read[tile], head.read[tile], n_tiles * (int)sizeof *head.read, own, N);
    fetch_rows<COLUMNS>(to.v, f.qkv + (int64_t)p.row * f.width + f.value_at + f.first, f.width,
                        f.head_dim - f.first, p.t, 16 * end, p.t, p.end, own, N);
}

// What rows `first` to `last` read of u of a tile before them; `own` of n warps has every n-th four
// rows.
template <typename T>
INLINE void read_before(chain_memory<T, false> &w, const piece_head<T, false> &head, int of,
                        int first, int last, int own, int n)
{
    const int column = thread() % 32;
    float u[16];
    unrolled<16>([&](int j) { u[j] = to_f32(w.u[16 * of + j][column]); });
    for (int row = first + 4 * own; row < last; row += 4 * n) {
        const float(*read)[16] = head.read[tile_at(row / 16, of)];
        float sums[4];
        unrolled<4>([&](int i) { sums[i] = w.r[row + i][column]; });
        unrolled<16>([&](int j) {
            float x[4];
            load<float, 4>(x, &read[j][row % 16]);
            unrolled<4>([&](int i) { sums[i] = fmaf(x[i], u[j], sums[i]); });
        });
        unrolled<4>([&](int i) { w.r[row + i][column] = sums[i]; });
    }
}

// u of a tile's rows from row t of the chunk on, by a warp.
template <typename T>
INLINE void solve_tile(chain_memory<T, false> &w, const piece_head<T, false> &head, int tile, int t)
{
    const int column = thread() % 32;
    const float(*read)[16] = head.read[tile_at(tile, tile)];
    float sums[16];
    T u[16];
    unrolled<16>([&](int i) {
        sums[i] = w.r[16 * tile + i][column];
        u[i] = w.u[16 * tile + i][column];
    });
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
    unrolled<16>([&](int i) { w.u[16 * tile + i][column] = u[i]; });
}

// u of a piece from r; tile by tile, of which one is solved while those behind it read the one
// before.
template <typename T>
INLINE void solve_piece(chain_memory<T, false> &w, const piece_head<T, false> &head, const piece &p)
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
template <typename T, bool SCAN>
INLINE void multiply_state(float (&sums)[COLUMNS / 8][4], const T (*rows)[DIM + PITCH],
                           const chain_memory<T, SCAN> &w, int steps)
{
    const auto left = plain(rows);
    const auto S = plain(w.S);
    clear(sums);
    if (steps == DIM / 16)
        multiply(sums, left, S, DIM / 16); // loads of one step under the products of others
    else
        multiply(sums, left, S, steps);
}

// The sums of S of a thread of the chain: 32 keys to a warp.
typedef float chain_sums[2][COLUMNS / 8][4];

INLINE int chain_key(int m)
{
    return thread() / 32 * 32 + 16 * m;
}

template <typename T, bool SCAN> INLINE void show(chain_memory<T, SCAN> &w, chain_sums &S)
{
    unrolled<2>([&](int m) { write_operand(w.S, S[m], chain_key(m)); });
}

// A piece, by the threads of the chain.
template <typename T, bool SCAN>
INLINE void go_on(chain_memory<T, SCAN> &w, const chain_stage<T, SCAN> &stage, chain_sums &S,
                  const piece &p, int steps)
{
    const int first = thread() / 32 * 16;
    const piece_head<T, SCAN> &head = stage.head;
    if (SCAN) {
        for (int i = p.t * COLUMNS + thread(); i < tile_end(p.end) * COLUMNS; i += CHAIN_THREADS) {
            const int t = i / COLUMNS, c = i % COLUMNS;
            w.u[t][c] = from_f32<T>(head.beta[t] * to_f32(stage.v[t][c]));
        }
    } else if (first < p.end && first + 16 > p.t) {
        float sums[COLUMNS / 8][4];
        multiply_state(sums, stage.keys.k + first, w, steps);
        scale_rows(sums, [&](int i) { return head.decay[first + i]; });
        each_sum(sums, [&](int i, int c, float &sum) {
            const int t = first + i;
            w.r[t][c] = head.beta[t] * __fsub_rn(to_f32(stage.v[t][c]), sum);
        });
    }
    if constexpr (!SCAN) {
        meet<1, CHAIN_THREADS>();
        solve_piece(w, head, p);
    }
    meet<2, THREADS>();
    if (p.end < CHUNK) return;
    unrolled<2>([&](int m) {
        scale_rows(S[m], [&](int) { return head.decay[CHUNK - 1]; });
        multiply(S[m], turned(stage.keys.k, 0, chain_key(m)), plain(w.u), TILES, COLUMNS / 8,
                 head.since);
    });
    show(w, S);
}

// Its outputs, by the others, who have `next` on its way meanwhile.
template <typename T, bool SCAN>
INLINE void write_outputs(chain_memory<T, SCAN> &w, const chain_stage<T, SCAN> &stage, T *out,
                          const piece &p, const source<T, SCAN> &f, int steps)
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
        multiply(sums, plain(stage.head.seen[tile_at(tile, of)]), plain(w.u, 16 * of), 1);
    each_pair(sums, [&](int i, int c, float x, float y) {
        const int t = first + i, column = f.first + c;
        T *to = out + ((int64_t)(p.row + t - p.t) * f.n_heads + f.head) * f.head_dim + column;
        if (t < p.t || t >= p.end || column >= f.head_dim) return;
        if (SCAN) {
            x = fmaf(f.skips, to_f32(stage.v[t][c]), x);
            y = fmaf(f.skips, to_f32(stage.v[t][c + 1]), y);
        }
        if (f.head_dim % 2 == 0) {
            store_pair(to, x, y);
        } else {
            to[0] = from_f32<T>(x);
            if (column + 1 < f.head_dim) to[1] = from_f32<T>(y);
        }
    });
}

// Columns of a row that is left.
__host__ __device__ __forceinline__ int padded(int head_dim)
{
    return (head_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
}

// Where S lies in memory that a packed batch's chain has left at the border above 0 before a row of
// a sequence: with the rows of it, or of the unit's first, that close the chunk before.
INLINE int64_t border_at(const delta_rows &b, const delta_shape &s, int unit, int seq, int border,
                         int head)
{
    if (border <= b.first_position[seq]) seq = unit;
    const int n = border / CHUNK - b.first_position[seq] / CHUNK - 1;
    return ((int64_t)(b.query_start[seq] / CHUNK + seq + n) * s.n_heads + head) * DIM *
           padded(s.head_dim);
}

// Rows of a tile to memory, one `stride` behind the other, by those that do not go on.
template <typename T>
INLINE void leave_rows(T *to, int64_t stride, const T (*from)[COLUMNS + PITCH], int rows)
{
    constexpr int V = wide<T>, UNITS = COLUMNS / V;
    for (int i = thread() - CHAIN_THREADS; i < rows * UNITS; i += THREADS - CHAIN_THREADS)
        *(uint4 *)(to + i / UNITS * stride + i % UNITS * V) =
            *(const uint4 *)&from[i / UNITS][i % UNITS * V];
}

// What the gradient needs of a piece, in the place of its outputs.
template <typename T, bool SCAN>
INLINE void leave_piece(const chain_memory<T, SCAN> &w, const chain_args<T, SCAN> &a,
                        const delta_rows &b, const delta_shape &s, int unit, int seq,
                        const piece &p, const source<T, SCAN> &f)
{
    const int width = padded(f.head_dim);
    if (p.t == 0 && p.border > 0)
        leave_rows(a.S + border_at(b, s, unit, seq, p.border, f.head) + f.first, width, w.S, DIM);
    meet<2, THREADS>();
    leave_rows(a.u + ((int64_t)p.row * f.n_heads + f.head) * width + f.first, f.n_heads * width,
               w.u + p.t, p.end - p.t);
}

// What a thread has of S in a place of its own in scratch.
template <int N> INLINE void keep(float *to, float (&S)[N][4])
{
    unrolled<N>([&](int n) { store<float, 4>(to + (n * blockDim.x + thread()) * 4, S[n]); });
}

template <int N> INLINE void recall(float (&S)[N][4], const float *from)
{
    unrolled<N>([&](int n) { load<float, 4>(S[n], from + (n * blockDim.x + thread()) * 4); });
}

// What the sequences behind a packed prefix begin with.
#define BEGIN_FLOATS (2 * DIM * COLUMNS + CHUNK * COLUMNS)

// A sequence and those that go on from it. memory: the block's, of BEGIN_FLOATS.
template <typename T, bool SCAN>
INLINE void run_chain(chain_memory<T, SCAN> &w, const chain_args<T, SCAN> &a,
                      const source<T, SCAN> &f, const delta_rows &b, const delta_shape &s, int seq,
                      float *memory)
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
        unrolled<2>([&](int m) {
            each_state(S[m], before, f, chain_key(m),
                       [&](float &sum, const float &from, bool is_there) {
                           sum = is_there && at.position > 0 ? from : 0.f;
                       });
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
            if (a.out)
                write_outputs(w, w.stage[stage], a.out, p, f, steps);
            else
                leave_piece(w, a, b, s, seq, at.seq, p, f);
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
                unrolled<2>([&](int m) { write_state(S[m], slot, f, chain_key(m)); });
            write_rows(slot, w.u, f, same ? known : 0, open);
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

// Blocks that an SM has.
template <typename T, bool SCAN> constexpr int chain_blocks = SCAN && sizeof(T) == 2 ? 2 : 1;

template <typename T, bool SCAN>
__global__ void __launch_bounds__(THREADS, chain_blocks<T, SCAN>)
    chain_kernel(chain_args<T, SCAN> a, rule_inputs<T, SCAN> in, delta_rows b, delta_shape s,
                 int slices, float *scratch, unsigned *tickets)
{
    grid_begin();
    extern __shared__ __align__(16) char shared[];
    chain_memory<T, SCAN> &w = *(chain_memory<T, SCAN> *)shared;
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads * slices; unit += gridDim.x) {
        const unit_of own = unit_at(unit, s, slices);
        if (!delta_begins(b, own.seq) || is_few(b, own.seq)) continue;
        run_chain(w, a, source_of(in, s, own.head, own.slice * COLUMNS), b, s, own.seq,
                  scratch + blockIdx.x * BEGIN_FLOATS);
        __syncthreads();
        const int each = heads_each(&s), group = own.head / each;
        if (b.paged && last_block(&tickets[own.seq * s.n_key_heads + group], each * slices))
            keep_open(in, b, s, own.seq, group);
    }
}

// ---- launches -----------------------------------------------------------------------------------

// Of a rule, and C columns to a block of the gradient.
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
            f(rule_kind<T, false, back_columns<T>>());
        else if (s->head_dim > row_columns<T>)
            f(rule_kind<T, true, back_columns<T>>());
        else
            f(rule_kind<T, true, row_columns<T>>());
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

// Of the chain in scratch: pieces, each block's BEGIN_FLOATS, and what it leaves for the gradient.
// Where they begin, in bytes.
struct chain_layout {
    int n_pieces, blocks;
    size_t heads, begin, S, u, end;
};

template <typename T, bool SCAN>
static struct chain_layout lay_out_chain(struct device *dev, const struct delta_shape *s, int rows,
                                         int n_seqs, bool leaves)
{
    const size_t borders = leaves ? rows / CHUNK + n_seqs : 0, left = leaves ? rows : 0;
    const size_t values = s->n_heads * padded(s->head_dim) * sizeof(T);
    struct chain_layout l;
    l.n_pieces = rows / CHUNK + 2 * n_seqs;
    l.blocks = blocks_of(dev, s, n_seqs, COLUMNS, chain_blocks<T, SCAN>);
    l.heads = (size_t)l.n_pieces * s->n_key_heads * sizeof(piece_keys<T>);
    l.begin = l.heads + (size_t)l.n_pieces * s->n_heads * sizeof(piece_head<T, SCAN>);
    l.S = l.begin + (size_t)l.blocks * BEGIN_FLOATS * sizeof(float);
    l.u = l.S + borders * DIM * values;
    l.end = (l.u + left * values + 255) / 256 * 256;
    return l;
}

// out NULL: as far as the gradient needs it.
template <typename T, bool SCAN>
static chain_args<T, SCAN> run_chunks(struct device *dev, const char *what, T *out, char *memory,
                                      const struct chain_layout &l, const rule_inputs<T, SCAN> &in,
                                      const struct delta_rows &rows, const struct delta_shape *s)
{
    piece_keys<T> *keys = (piece_keys<T> *)memory;
    piece_head<T, SCAN> *heads = (piece_head<T, SCAN> *)(memory + l.heads);
    const chain_args<T, SCAN> chain = {keys, heads, out, (T *)(memory + l.S), (T *)(memory + l.u)};
    cuda_launch(dev, what, prepare_kernel<T, SCAN>, dim3(l.n_pieces, s->n_key_heads), THREADS,
                sizeof(prepared<T>), keys, heads, in, rows, *s);
    cuda_launch(dev, what, chain_kernel<T, SCAN>, l.blocks, THREADS, sizeof(chain_memory<T, SCAN>),
                chain, in, rows, *s, slices_of(s, COLUMNS), (float *)(memory + l.begin),
                cuda_use(dev)->tickets);
    return chain;
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
        using T = typename decltype(kind)::T;
        constexpr bool SCAN = decltype(kind)::SCAN;
        const rule_inputs<T, SCAN> in = inputs_of<T, SCAN>(a, s);
        const int slices = slices_of(s, row_columns<T>);
        if (rows.paged)
            cuda_launch(dev, "delta_rule", row_kernel<T, SCAN>, rows.n_seqs * s->n_heads * slices,
                        THREADS, sizeof(row_memory<T, SCAN>), out, in, rows, *s, slices,
                        cuda_use(dev)->tickets);
        if (rows.paged && a->batch.view->max_query <= 1) return; // as in captured steps
        const struct chain_layout l =
            lay_out_chain<T, SCAN>(dev, s, rows.n_tokens, rows.n_seqs, false);
        char *memory = (char *)cuda_workspace(dev, l.end);
        if (memory) run_chunks(dev, "delta_rule", (T *)out, memory, l, in, rows, s);
    });
}

// ---- backward -----------------------------------------------------------------------------------

// Scratch behind the chain's: each block's own, and what all write into. Where things begin, in
// floats.
struct back_memory {
    float *at;
    int64_t block; // a block's, of which:
    // What sequences add to what they go on from: (CHUNK, columns) of u, (CHUNK, DIM) of k and
    // (CHUNK) of the log decays of the open chunk's rows, and of S before it.
    int64_t shared_u, shared_k, shared_log_decay, shared_S;
    // (T, n_heads, slices, 2, key_dim, or one more where that is odd): of q and k as the rule
    // takes them
    int64_t dvectors;
    // (T, n_heads, slices, 3): of what beta is made of, or of Mamba-2's step without its decay; of
    // the log decay; and of Mamba-2's skip.
    int64_t dgates;
    int64_t shared; // (T, n_heads, 3): a row's part of the gradients of a_log, dt_bias and skip
    int64_t end;
};

__host__ __device__ __forceinline__ int even(int n)
{
    return n + n % 2;
}

static struct back_memory lay_out_back(const struct delta_shape *s, int C, int blocks, int rows)
{
    const int64_t slices = slices_of(s, C), heads = (int64_t)rows * s->n_heads;
    struct back_memory m = {};
    m.shared_k = m.shared_u + CHUNK * C;
    m.shared_log_decay = m.shared_k + CHUNK * DIM;
    m.shared_S = m.shared_log_decay + CHUNK;
    m.block = m.shared_S + DIM * C;
    m.dvectors = m.block * blocks;
    m.dgates = m.dvectors + heads * slices * 2 * even(s->key_dim);
    m.shared = m.dgates + heads * slices * 3;
    m.end = m.shared + heads * 3;
    return m;
}

// What is kept goes with rows.
size_t cuda_delta_scratch(struct device *dev, const struct delta_shape *s, int rows)
{
    if (s->n_heads == 0) return 0;
    if (delta_is_conv(s)) return cuda_conv_scratch(s, rows);
    size_t rule = 0; // of sequences of 32 rows: of shorter ones it is more
    with_rule(s, [&](auto kind) {
        using K = decltype(kind);
        const int n_seqs = ceil_div(rows, 32);
        const int blocks = blocks_of(dev, s, n_seqs, K::C, 1);
        rule = lay_out_chain<typename K::T, K::SCAN>(dev, s, rows, n_seqs, true).end +
               lay_out_back(s, K::C, blocks, rows).end * sizeof(float);
    });
    return std::max(rule, cuda_conv_scratch(s, rows));
}

enum { OF_SEEN, OF_READ, OF_QUERY, OF_KEY, OF_BORDER, ROW_PARTS };

// Sums over rows and columns of a chunk are of warps, then added in order. The gradients of `seen`
// and `read`, which are then of the products of q or k and k, take their place.
template <typename T, int C, bool SCAN> struct back_tiles {
    piece_keys<T> keys;
    T S[DIM][C + PITCH], dS[DIM][C + PITCH]; // before the chunk, behind it
    T u[CHUNK][C + PITCH], dout[CHUNK][C + PITCH], du[SCAN ? 1 : CHUNK][C + PITCH];
    T seen[CHUNK][CHUNK + PITCH];                            // [t][j]
    alignas(16) float read[SCAN ? 1 : CHUNK][CHUNK + 4];     // [j][t]
    float r[CHUNK][C + 4];                                   // u's gradient
    float decay[CHUNK], since[CHUNK], beta[CHUNK], G[CHUNK]; // as in piece_head
    float dG[CHUNK];
    float row_parts[ROW_PARTS][2 * parts<C>][CHUNK], column_parts[2][TILES][CHUNK];
    float sums[32];
};

template <typename T, bool SCAN> struct back_arrays {
    T *dqkv;
    const T *dout;
    chain_args<T, SCAN> chain;
};

// A warp's 16 rows of a matrix; its share of the columns, which the warps of a tile of rows divide
// among them; and, of `all` columns, the first of that.
INLINE int own_row()
{
    return thread() / 32 % TILES * 16;
}
INLINE int own_share()
{
    return thread() / 32 / TILES;
}
template <int C> INLINE int first_column(int all)
{
    return own_share() * (all / (2 * parts<C>));
}

// What the threads of a warp have of the sums of its rows, added up.
INLINE void write_row_sums(float (*to)[CHUNK], const float (&rows)[2])
{
    unrolled<2>([&](int r) {
        const float sum = lanes_sum<4>(rows[r]);
        if (thread() % 4 == 0) to[own_share()][own_row() + thread() % 32 / 4 + 8 * r] = sum;
    });
}

// A warp's sums of the gradient of `seen` or `read`, from (rows of dout or of du) times u, and what
// G gets of it.
template <typename T, int C, bool SCAN, int N>
INLINE void compare_back(back_tiles<T, C, SCAN> &w, float (&sums)[N][4], bool is_q, int n)
{
    const int first = own_row(), share = first_column<C>(CHUNK), lane = thread() % 32;
    float rows[2] = {}, column_sums[N][2] = {};
    clear(sums);
    if (first >= n) return;
    multiply(sums, plain(is_q ? w.dout : w.du, first), turned(w.u, share), C / 16);
    int i = 0;
    each_sum(sums, [&](int row, int column, float &sum) {
        const int t = first + row, j = share + column;
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
    write_row_sums(w.row_parts[is_q ? OF_SEEN : OF_READ], rows);
#pragma unroll
    for (int c = 0; c < 2 * N; c++) {
        float sum = column_sums[c / 2][c % 2];
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
        if (lane / 4 == 0)
            w.column_parts[is_q ? OF_SEEN : OF_READ][first / 16]
                          [share + c / 2 * 8 + lane * 2 + c % 2] = sum;
    }
}

// The sums of u's gradient in r from the last row to row `own`, sixteen at a time; rows before get
// theirs of these.
template <typename T, int C, bool SCAN>
INLINE void solve_back(back_tiles<T, C, SCAN> &w, int own, int n)
{
    constexpr int GROUPS = threads<C> / C, EACH = 16 / GROUPS;
    const int column = thread() % C, group = thread() / C;
    const int end = tile_end(n);
    for (int b = end - 16; b >= 0; b -= 16) {
        const int first = b + group * EACH;
        float part[EACH];
        unrolled<EACH>([&](int i) { part[i] = w.r[first + i][column]; });
        for (int t = max(b + 16, own / 4 * 4); t < end; t += 4) {
            float read[EACH][4];
            unrolled<EACH>([&](int i) { load<float, 4>(read[i], &w.read[first + i][t]); });
            unrolled<4>([&](int j) {
                const float du = t + j >= own ? w.r[t + j][column] : 0.f;
                unrolled<EACH>([&](int i) { part[i] = fmaf(read[i][j], du, part[i]); });
            });
        }
        unrolled<EACH>([&](int i) { w.r[first + i][column] = part[i]; });
        __syncthreads();
        if (group == 0) {
            float sums[16];
            unrolled<16>([&](int i) { sums[i] = w.r[b + i][column]; });
#pragma unroll
            for (int t = 15; t > 0; t--)
                if (b + t >= own)
#pragma unroll
                    for (int j = 0; j < t; j++)
                        sums[j] = fmaf(w.read[b + j][b + t], sums[t], sums[j]);
            unrolled<16>([&](int i) { w.r[b + i][column] = sums[i]; });
        }
        __syncthreads();
    }
}

// Adds up sums times vectors[row][column] over a warp's columns from `first` on.
template <typename T, int N, int P>
INLINE void row_products(float (*to)[CHUNK], float (&sums)[N][4], const T (*vectors)[P], int first)
{
    float rows[2] = {};
    int i = 0;
    each_sum(sums, [&](int row, int column, float &sum) {
        rows[i++ % 4 / 2] += sum * to_f32(vectors[own_row() + row][first + column]);
    });
    write_row_sums(to, rows);
}

// Has all that is read of a chunk on its way; for all threads to wait for.
template <typename T, int C, bool SCAN>
INLINE void fetch_back(back_tiles<T, C, SCAN> &w, const back_arrays<T, SCAN> &a,
                       const source<T, SCAN> &f, const delta_rows &b, const delta_shape &s,
                       int unit, int seq, const piece_rows &rows)
{
    constexpr int ROW = (DIM + PITCH) * (int)sizeof(T), N = threads<C>;
    const piece &p = rows.p;
    const int begin = p.t / 16 * 16, end = tile_end(p.end), own = thread();
    const int dim = f.head_dim, wide_dim = padded(dim);
    const piece_keys<T> &keys =
        a.chain.keys[(int64_t)p.number * s.n_key_heads + f.head / heads_each(&s)];
    const piece_head<T, SCAN> &head = a.chain.heads[(int64_t)p.number * s.n_heads + f.head];
    const T *S = a.chain.S + f.first, *u = a.chain.u + (int64_t)f.head * wide_dim + f.first;
    if (p.border > 0) S += border_at(b, s, unit, seq, p.border, f.head);
    fetch_bytes(w.keys.k, keys.k, end * ROW, own, N);
    fetch_bytes(w.keys.q, keys.q, begin * ROW, own, N, false);
    fetch_bytes(w.keys.q[begin], keys.q[begin], (end - begin) * ROW, own, N);
    fetch_bytes(w.decay, head.decay, 4 * sizeof head.decay, own, N);
    fetch_rows<C>(w.S, S, wide_dim, wide_dim - f.first, 0, DIM, 0, p.border > 0 ? DIM : 0, own, N);
    for (int t = 0; t < end; t = t < p.t ? p.t : end) // the prefix's rows, the piece's
        fetch_rows<C>(w.u, u + (int64_t)rows.at(t) * f.n_heads * wide_dim, f.n_heads * wide_dim,
                      wide_dim - f.first, t, t < p.t ? p.t : end, t, t < p.t ? p.t : p.end, own, N);
    fetch_rows<C>(w.dout, a.dout + ((int64_t)p.row * f.n_heads + f.head) * dim + f.first,
                  f.n_heads * dim, dim - f.first, 0, end, p.t, p.end, own, N);
    // Tiles of rows before the piece's are zeros.
    constexpr int SEEN = 16 / wide<T>, READ = SCAN ? 0 : 16 / wide<float>; // units of a row
    for (int i = own; i < tile_at(end / 16, 0) * 16 * (SEEN + READ); i += N) {
        const int row = i / (SEEN + READ), at = i % (SEEN + READ), number = row / 16;
        const int tile = (number > 0) + (number > 2) + (number > 5), of = number - tile_at(tile, 0);
        const bool is_there = 16 * tile >= begin;
        if (at < SEEN)
            copy16((bf16 *)&w.seen[16 * tile + row % 16][16 * of + at * wide<T>],
                   (const bf16 *)&head.seen[number][row % 16][at * wide<T>], is_there);
        else
            copy16((bf16 *)&w.read[16 * of + row % 16][16 * tile + (at - SEEN) * 4],
                   (const bf16 *)&head.read[number][row % 16][(at - SEEN) * 4], is_there);
    }
    copies_commit();
    copies_wait<0>();
}

// The gradients of a chunk's rows from those of their outputs and of S behind it, dS, which becomes
// that of S before it: all that is not the sequence's goes to what is shared. takes: what is shared
// is added to the sequence's rows.
template <typename T, int C, bool SCAN, int N>
__device__ void back_chunk(back_tiles<T, C, SCAN> &w, float (&dS)[N][4], T *dqkv,
                           const back_memory &m, float *memory, const source<T, SCAN> &f,
                           int slices, const piece_rows &rows, bool takes)
{
    constexpr int SHARES = 2 * parts<C>;
    constexpr int READ_PITCH = CHUNK + (sizeof(T) == 2 ? PITCH : 4);
    const int columns = first_column<C>(C), keys = first_column<C>(DIM);
    const int steps = (f.key_dim + 15) / 16, begin = rows.p.t, n = rows.p.end,
              tiles = tile_end(n) / 16;
    const int first = own_row(), tile = first / 16;
    T(*dseen)[CHUNK + PITCH] = w.seen; // all have read these by then
    T(*dread)[READ_PITCH] = (T(*)[READ_PITCH])w.read;
    float compared[CHUNK / 8 / SHARES][4];
    const auto dgates_at = [&](int row) {
        return m.at + m.dgates + (((int64_t)row * f.n_heads + f.head) * slices + f.first / C) * 3;
    };
    const bool closes = n == CHUNK, takes_part = first < n;
    float *shared_u = memory + m.shared_u, *shared_k = memory + m.shared_k,
          *shared_log_decay = memory + m.shared_log_decay;
    write_operand(w.dS, dS, own_key(), own_column());
    __syncthreads();
    if (takes_part) {
        float sums[C / 8 / SHARES][4];
        clear(sums);
        if (closes) {
            multiply(sums, plain(w.keys.k, first), plain(w.dS, 0, columns), steps);
            scale_rows(sums, [&](int j) { return w.since[first + j]; });
        }
        multiply(sums, turned(w.seen, first, first), plain(w.dout, first, columns), tiles - tile);
        each_sum(sums, [&](int row, int column, float &sum) {
            const int j = first + row, at = columns + column;
            w.r[j][at] = sum + (takes && j < n ? shared_u[j * C + at] : 0.f);
        });
    }
    compare_back(w, compared, true, n);
    __syncthreads();
    write_operand(dseen, compared, own_row(), first_column<C>(CHUNK));
    if constexpr (!SCAN) solve_back(w, begin, n);
    for (int t = thread() / 32; t < tile_end(n); t += threads<C> / 32) {
        const int row = rows.at(t);
        const bool is_own = t >= begin && t < n;
        constexpr int V = C / 32; // columns of a lane
        const int at = thread() % 32 * V, column = f.first + at;
        float du[V], u[V], dvalue[V], own_du[V], dbeta = 0.f, dskip = 0.f;
        load<float, V>(du, &w.r[t][at]);
        if (!SCAN) load<T, V>(u, &w.u[t][at]);
#pragma unroll
        for (int v = 0; v < V; v++) {
            if constexpr (SCAN)
                u[v] = is_own && column + v < f.head_dim
                           ? to_f32(f.qkv[(int64_t)row * f.width + f.value_at + column + v])
                           : 0.f; // the value
            const float dout = SCAN ? to_f32(w.dout[t][at + v]) : 0.f;
            dbeta = fmaf(du[v], u[v], dbeta);
            dskip = fmaf(dout, u[v], dskip);
            dvalue[v] = w.beta[t] * du[v];
            if (SCAN) dvalue[v] = fmaf(f.skips, dout, dvalue[v]);
            own_du[v] = is_own ? du[v] : 0.f;
            if (t < begin) shared_u[t * C + at + v] += du[v];
        }
        if constexpr (!SCAN) store<T, V>(&w.du[t][at], own_du);
        T *to_value = dqkv + (int64_t)row * f.width + f.value_at + column;
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
        write_operand(dread, compared, own_row(), first_column<C>(CHUNK));
        __syncthreads();
    }
    if (takes_part) {
        const auto store_rows = [&](float(&sums)[DIM / 8 / SHARES][4], int which) {
            each_pair(sums, [&](int i, int column, float x, float y) {
                const int t = first + i, key = keys + column;
                float *shared = shared_k + t * DIM + key;
                float *at =
                    m.at + m.dvectors + key +
                    ((((int64_t)rows.at(t) * f.n_heads + f.head) * slices + f.first / C) * 2 +
                     which) *
                        even(f.key_dim);
                if (which && t < begin) {
                    shared[0] += x;
                    shared[1] += y;
                } else if (t >= begin && t < n && key < f.key_dim) {
                    const bool adds = which && takes;
                    store_pair(at, adds ? x + shared[0] : x, adds ? y + shared[1] : y);
                }
            });
        };
        const auto S_of = turned(w.S, keys);
        const auto k_of = plain(w.keys.k, 0, keys);
        float sums[DIM / 8 / SHARES][4];
        clear(sums);
        multiply(sums, plain(w.dout, first), S_of, C / 16);
        scale_rows(sums, [&](int t) { return w.decay[first + t]; });
        row_products(w.row_parts[OF_QUERY], sums, w.keys.q, keys);
        multiply(sums, plain(dseen, first), k_of, tile + 1);
        store_rows(sums, 0);
        clear(sums);
        if constexpr (!SCAN) {
            multiply(sums, plain(w.du, first), S_of, C / 16);
            scale_rows(sums, [&](int t) { return -w.beta[first + t] * w.decay[first + t]; });
            row_products(w.row_parts[OF_KEY], sums, w.keys.k, keys);
        }
        if (closes) {
            float behind[DIM / 8 / SHARES][4];
            clear(behind);
            multiply(behind, plain(w.u, first), turned(w.dS, keys), C / 16);
            scale_rows(behind, [&](int j) { return w.since[first + j]; });
            row_products(w.row_parts[OF_BORDER], behind, w.keys.k, keys);
            unrolled<DIM / 2 / SHARES>([&](int i) { sums[i / 4][i % 4] += behind[i / 4][i % 4]; });
        }
        if constexpr (!SCAN) {
            multiply(sums, plain(dread, first), k_of, tile + 1);
            multiply(sums, turned(dread, first, first), plain(w.keys.k, first, keys), tiles - tile);
        }
        multiply(sums, turned(dseen, first, first), plain(w.keys.q, first, keys), tiles - tile);
        store_rows(sums, 1);
    }
    __syncthreads();
    constexpr int V = wide<T>;
    for (int i = thread(); i < tile_end(n) * C / V; i += threads<C>) {
        const int t = i / (C / V), at = i % (C / V) * V;
        const auto scale = [&](T *x, float factor) {
            float scaled[V];
            load<T, V>(scaled, x);
            unrolled<V>([&](int v) { scaled[v] *= factor; });
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
    multiply(dS, turned(w.keys.q, 0, own_key()), plain(w.dout, 0, own_column()), tiles);
    if constexpr (!SCAN)
        multiply(dS, turned(w.keys.k, 0, own_key()), plain(w.du, 0, own_column()), tiles);
    for (int t = thread(); t < CHUNK; t += threads<C>) {
        float sum = 0.f, border = 0.f; // of G, and of G behind the chunk
        for (int part = 0; part < SHARES && t < n; part++) {
            for (int i = 0; i < OF_BORDER; i += SCAN ? OF_QUERY : 1) sum += w.row_parts[i][part][t];
            if (closes) border += w.row_parts[OF_BORDER][part][t];
        }
        for (int i = 0; i < (SCAN ? OF_READ : 2); i++)
            for (int tile = t / 16; tile < tiles && t < n; tile++)
                sum -= w.column_parts[i][tile][t];
        w.dG[t] = sum;
        w.since[t] = border;
    }
    __syncthreads();
    if (thread() >= 32) return;
    // In double: of the sums little stays.
    const int lane = thread();
    double later = lanes_until((double)w.since[lane] + w.since[lane + 32]);
    later = dlast + __shfl_sync(~0u, later, 31);
    for (int t = CHUNK - 1 - lane; t >= 0; t -= 32) {
        const double dG = later + lanes_until((double)w.dG[t] - w.since[t]);
        later = __shfl_sync(~0u, dG, 31);
        const float shared = takes && t < n ? shared_log_decay[t] : 0.f;
        if (t < begin)
            shared_log_decay[t] += (float)dG;
        else if (t < n)
            dgates_at(rows.at(t))[1] = (float)dG + shared;
    }
}

// The sequences of a unit go back, the first of them last.
template <typename T, int C, bool SCAN>
__global__ void __launch_bounds__(threads<C>)
    delta_back_kernel(back_arrays<T, SCAN> a, back_memory m, rule_inputs<T, SCAN> in, delta_rows b,
                      delta_shape s, int slices)
{
    grid_begin();
    constexpr int N = C / parts<C> / 8;
    extern __shared__ __align__(16) char shared_bytes[];
    back_tiles<T, C, SCAN> &w = *(back_tiles<T, C, SCAN> *)shared_bytes;
    float *memory = m.at + (int64_t)blockIdx.x * m.block, *shared_S = memory + m.shared_S;
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads * slices; unit += gridDim.x) {
        const unit_of own = unit_at(unit, s, slices);
        if (!delta_begins(b, own.seq)) continue;
        const source<T, SCAN> f = source_of(in, s, own.head, own.slice * C);
        const int n_seqs = delta_unit_end(b, own.seq) - own.seq;
        const int behind = b.query_start[own.seq + 1];
        const int whole = (behind - b.query_start[own.seq]) / CHUNK * CHUNK;
        float dS[N][4], shared[N][4];
        if (n_seqs > 1) {
            __syncthreads(); // the unit before has read what was shared
            for (int64_t i = m.shared_u + thread(); i < m.shared_S; i += threads<C>)
                memory[i] = 0.f;
            clear(shared);
            keep(shared_S, shared);
        }
        for (int step = 1; step <= n_seqs; step++) {
            const bool first = step == n_seqs, takes = first && n_seqs > 1;
            const stretch at = stretch_of(b, own.seq + step % n_seqs);
            const int last = (at.position + at.rows - 1) / CHUNK - at.position / CHUNK;
            clear(dS);
            for (int k = last; k >= 0; k--) {
                const piece p = piece_of(at, k);
                const piece_rows rows = {0, behind, p};
                if (takes && p.border + p.end == whole) {
                    recall(shared, shared_S);
                    for (int i = 0; i < 4 * N; i++) dS[i / 4][i % 4] += shared[i / 4][i % 4];
                }
                __syncthreads();
                fetch_back(w, a, f, b, s, own.seq, at.seq, rows);
                back_chunk(w, dS, a.dqkv, m, memory, f, slices, rows, takes && p.border == whole);
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
    int each = heads_each(&s) * slices, lane = threadIdx.x;
    const head_columns columns = columns_of<SCAN>(s);
    int64_t at = (int64_t)blockIdx.x * columns.width + (blockIdx.z ? columns.k : columns.q) +
                 blockIdx.y * s.key_dim;
    const float *from =
        dvectors +
        (((int64_t)blockIdx.x * s.n_heads * slices + blockIdx.y * each) * 2 + blockIdx.z) *
            even(s.key_dim);
    float d[DELTA_MAX_DIM / 32], x[DELTA_MAX_DIM / 32], squares = 0, along = 0;
    for (int i = 0; i < DELTA_MAX_DIM / 32; i++) {
        int e = lane + 32 * i;
        d[i] = x[i] = 0;
        if (e >= s.key_dim) continue;
        x[i] = to_f32(qkv[at + e]);
        for (int h = 0; h < each; h++) d[i] += from[(int64_t)h * 2 * even(s.key_dim) + e];
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
        using T = typename decltype(kind)::T;
        constexpr int C = decltype(kind)::C;
        constexpr bool SCAN = decltype(kind)::SCAN;
        const int blocks = blocks_of(dev, s, rows.n_seqs, C, 1), slices = slices_of(s, C);
        const struct chain_layout l = lay_out_chain<T, SCAN>(dev, s, n, rows.n_seqs, true);
        struct back_memory m = lay_out_back(s, C, blocks, n);
        char *memory = (char *)cuda_workspace(dev, l.end + m.end * sizeof(float));
        if (!memory) return;
        m.at = (float *)(memory + l.end);
        const rule_inputs<T, SCAN> in = inputs_of<T, SCAN>(a, s);
        const back_arrays<T, SCAN> arrays = {
            (T *)grads->qkv, (const T *)dout,
            run_chunks(dev, "delta_rule_back", (T *)NULL, memory, l, in, rows, s)};
        cuda_launch(dev, "delta_rule_back", delta_back_kernel<T, C, SCAN>, blocks, threads<C>,
                    sizeof(back_tiles<T, C, SCAN>), arrays, m, in, rows, *s, slices);
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
