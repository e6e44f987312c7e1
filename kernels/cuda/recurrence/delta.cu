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

// What a rule goes over and reads (ops.h, delta_args).
template <typename T, bool SCAN> struct rule_of : delta_shape {
    delta_rows b;
    const T *qkv, *a_log, *dt_bias, *skip;
    const std::conditional_t<SCAN, T, float> *gates;
    int64_t stride; // of gates
    // Value heads of a key head, and floats of a slot before a key head's state, and of that: said
    // by the host, since a kernel would divide for each.
    int each;
    int64_t windows, group_floats;
};

// Of a value head of a unit that begins with a sequence, and from which column on a block has some.
template <typename T, bool SCAN> struct source : rule_of<T, SCAN> {
    float rate, bias, skips; // exp(a_log), dt_bias, skip
    delta_columns at;
    int width;                   // of a row of qkv
    int seq, head, group, first; // group: its key head
};

template <typename T, bool SCAN>
INLINE source<T, SCAN> source_of(const rule_of<T, SCAN> &in, int seq, int head, int first)
{
    return {in,
            expf(to_f32(in.a_log[head])),
            to_f32(in.dt_bias[head]),
            SCAN ? to_f32(in.skip[head]) : 0.f,
            delta_columns_of(&in, SCAN, head),
            delta_conv_width(&in),
            seq,
            head,
            head / in.each,
            first};
}

DTYPE_INLINE int slices_of(const delta_shape *s, int C)
{
    return (s->head_dim + C - 1) / C;
}

// Of all heads and slices of C columns of all sequences.
template <int C, typename T, bool SCAN>
INLINE source<T, SCAN> source_at(const rule_of<T, SCAN> &in, int unit)
{
    const int slices = slices_of(&in, C), n = in.n_heads * slices;
    return source_of(in, unit / n, unit / slices % in.n_heads, unit % slices * C);
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
// length, where the rule does.
template <bool SCAN> INLINE float inverse_length(const float (&x)[DIM / 32])
{
    float squares = 0;
    if (SCAN) return 1.f;
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

// A row's q and k as the rule takes them. is_known: k is so already.
template <bool SCAN, typename T>
INLINE void write_vectors(T *to_q, T *to_k, const float (&q)[DIM / 32], const float (&k)[DIM / 32],
                          int key_dim, bool is_known = false)
{
    const float length = inverse_length<SCAN>(k);
    const float q_factor = SCAN ? 1.f : inverse_length<SCAN>(q) * (1.f / sqrtf((float)key_dim));
    const float k_factor = is_known ? 1.f : length;
    unrolled<DIM / 32>([&](int i) {
        to_q[thread() % 32 + 32 * i] = from_f32<T>(q[i] * q_factor);
        to_k[thread() % 32 + 32 * i] = from_f32<T>(k[i] * k_factor);
    });
}

INLINE int tile_end(int n)
{
    return (n + 15) / 16 * 16;
}

// Rows t to `end` of a chunk, one `stride` behind the other in memory, of which the first `columns`
// columns are there; zeros in what is not, up to the next sixteenth row. All are on their way at
// once, four columns in one access where they lie so.
template <int ROWS, int WIDTH, typename T, int N, typename S>
INLINE void read_tile(T (*to)[N], const S *from, int64_t stride, int columns, int t, int end)
{
    constexpr int UNITS = WIDTH / 4, EACH = (ROWS * UNITS + THREADS - 1) / THREADS;
    pack<S, 4> x[EACH] = {};
    const auto read = [&](auto load) {
        unrolled<EACH>([&](int i) {
            const int unit = thread() + i * THREADS, row = unit / UNITS, column = unit % UNITS * 4;
            if (t + row < end && column < columns)
                x[i] = load(from + row * stride + column, columns - column);
        });
    };
    if (((size_t)from | stride * sizeof(S)) % (4 * sizeof(S)) == 0 && columns % 4 == 0)
        read([](const S *at, int) { return *(const pack<S, 4> *)at; });
    else
        read([](const S *at, int there) { return load_some<S, 4>(at, there, false); });
    unrolled<EACH>([&](int i) {
        const int unit = thread() + i * THREADS, row = t + unit / UNITS;
        float numbers[4];
        unrolled<4>([&](int e) { numbers[e] = to_f32(x[i].at[e]); });
        if (unit < ROWS * UNITS && row < tile_end(end))
            store<T, 4>(&to[row % ROWS][unit % UNITS * 4], numbers);
    });
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

// In a slot, of the value head `index` of a key head, or of a source's.
template <typename T, bool SCAN>
INLINE delta_state slot_of(const rule_of<T, SCAN> &in, int slot, int group, int index)
{
    float *at = in.b.states + slot * in.b.slot_elements + in.windows + group * in.group_floats;
    return delta_state_of(at, &in, index);
}
template <typename T, bool SCAN> INLINE delta_state slot_of(const source<T, SCAN> &f, int slot)
{
    return slot_of(f, slot, f.group, f.head - f.group * f.each);
}

// each(sum, its number in a slot, whether that is there) for sums of S of keys from `key` on.
template <typename T, bool SCAN, int N, typename F>
INLINE void each_state(float (&S)[N][4], const delta_state &slot, const source<T, SCAN> &f, int key,
                       F each)
{
    each_sum(S, [&](int i, int c, float &sum) {
        const bool is_there = key + i < f.key_dim && f.first + c < f.head_dim;
        each(sum, slot.S[(key + i) * f.head_dim + f.first + c], is_there);
    });
}

template <typename T, bool SCAN, int N>
INLINE void write_state(float (&S)[N][4], const delta_state &slot, const source<T, SCAN> &f,
                        int key)
{
    each_state(S, slot, f, key, [](float &sum, float &to, bool is_there) {
        if (is_there) to = sum;
    });
}

// u of the open chunk's rows t to `end` to a slot.
template <typename T, bool SCAN, int P>
INLINE void write_rows(const delta_state &slot, const T (*u)[P], const source<T, SCAN> &f, int t,
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
INLINE void keep_open(const rule_of<T, SCAN> &in, int seq, int group)
{
    const delta_rows &b = in.b;
    const int each = in.each, lane = thread() % 32;
    const int end = unit_end(&b, seq), row = b.query_start[seq], first = b.positions[row];
    // The first sequence's last, since all read what its slot held.
    for (int next = end - 1; next >= seq; next--) {
        if (!delta_leaves(b, next, end)) continue;
        const int behind = first + b.query_start[next + 1] - row;
        const int border = behind / CHUNK * CHUNK, n = behind - border;
        const int old = max(first - border, 0); // rows that are of earlier batches
        const int known = b.state_slot[next] == b.state_from[seq] ? old : 0;
        for (int i = thread(); i < each; i += blockDim.x) {
            const float *from = slot_of(in, b.state_from[seq], group, i).G;
            float *to = slot_of(in, b.state_slot[next], group, i).G;
            float G = known > 0 ? from[known - 1] : 0.f;
            const source<T, SCAN> f = source_of(in, seq, group * each + i, 0);
            for (int j = known; j < n; j++)
                to[j] = G = j < old ? from[j]
                                    : __fadd_rn(G, gates_of(f, row + border + j - first).log_decay);
        }
        const float *from = slot_of(in, b.state_from[seq], group, 0).k;
        float *to = slot_of(in, b.state_slot[next], group, 0).k;
        const T *rows = in.qkv + delta_columns_of(&in, SCAN, group * each).k;
        // The last warps first, since the first has the decays to do.
        for (int j = known + blockDim.x / 32 - 1 - thread() / 32; j < n; j += blockDim.x / 32) {
            const int64_t at = (int64_t)(row + border + j - first) * delta_conv_width(&in);
            float k[DIM / 32];
            if (j < old)
                read_vector(k, from + j * in.key_dim, in.key_dim);
            else
                read_vector(k, rows + at, in.key_dim);
            const float length = inverse_length<SCAN>(k), factor = j < old ? 1.f : length;
            for (int i = 0; i < DIM / 32; i++)
                if (lane + 32 * i < in.key_dim)
                    to[j * in.key_dim + lane + 32 * i] = to_f32(from_f32<T>(k[i] * factor));
        }
        __syncthreads();
    }
}

// Whether the sequences of a unit that begins with seq have one row each, which row_kernel() takes.
INLINE bool is_few(const delta_rows &b, int seq)
{
    if (b.packed) return false;
    const int end = unit_end(&b, seq);
    return b.query_start[end] - b.query_start[seq] == end - seq;
}

// Behind the last of all slices of a key head's heads.
template <typename T, bool SCAN>
INLINE void keep_at_end(const source<T, SCAN> &f, int C, unsigned *tickets)
{
    unsigned *ticket = &tickets[f.seq * f.n_key_heads + f.group];
    if (last_block(ticket, f.each * slices_of(&f, C))) keep_open(f, f.seq, f.group);
}

// ---- decoded rows -------------------------------------------------------------------------------

// Rows of a tile and those of its chunk, with room for the sixteen of its tile where nothing goes
// over the others: those beside it, which change nothing of it, are anything but in u.
template <typename T, bool SCAN> struct row_memory {
    T k[CHUNK][DIM + PITCH], q[16][DIM + PITCH];
    T S[DIM][row_columns<T> + PITCH]; // at the border
    T u[CHUNK][row_columns<T> + PITCH];
    T seen[TILES][16][16 + PITCH]; // as in piece_head, of a tile
    alignas(16) float read[SCAN ? 1 : TILES][16][16 + 4];
    float r[16][row_columns<T> + 4]; // values; then u while it is being summed up
    float G[CHUNK], beta[CHUNK], log_decay[CHUNK];
};

// G of rows t to `end` from that of those before.
INLINE void sum_decays(float *__restrict__ G, const float *__restrict__ log_decay, int t, int end)
{
    float sum = t > 0 ? G[t - 1] : 0.f;
    for (int i = t; i < end; i++) G[i] = sum = __fadd_rn(sum, log_decay[i]);
}

// q, k and gates of rows t to `end` of the chunk, the first of which is `row`, and G; for all
// threads to wait for.
template <typename T, bool SCAN>
INLINE void read_rows(row_memory<T, SCAN> &w, const source<T, SCAN> &f, int row, int t, int end)
{
    if (t + thread() < end) {
        const row_gates gates = gates_of(f, row + thread());
        w.log_decay[t + thread()] = gates.log_decay;
        w.beta[t + thread()] = gates.beta;
    }
    for (int at = t + thread() / 32; at < end; at += THREADS / 32) {
        float q[DIM / 32], k[DIM / 32];
        const T *from = f.qkv + (int64_t)(row + at - t) * f.width;
        read_vector(q, from + f.at.q, f.key_dim);
        read_vector(k, from + f.at.k, f.key_dim);
        write_vectors<SCAN>(w.q[at % 16], w.k[at], q, k, f.key_dim);
    }
    __syncthreads();
    if (thread() < 32) sum_decays(w.G, w.log_decay, t, end);
}

// From products of a tile's queries (is_q) or keys with keys from column `first` on what its rows
// take of u of rows before them: their outputs, seen[of][t][j], or their own u, read[of][j][t],
// `of` being the tile of j.
template <bool SCAN, typename T, int N, int P, int Q>
INLINE void write_compared(T (*seen)[16][P], float (*read)[16][Q], const float *G,
                           const float *beta, float (&sums)[N][4], int tile, int first, bool is_q)
{
    each_pair(sums, [&](int row, int column, float x, float y) {
        const int t = 16 * tile + row, j = first + column, of = j / 16;
        if (of > tile) return;
        x = j <= t ? expf(G[t] - G[j]) * x : 0.f;
        y = j < t ? expf(G[t] - G[j + 1]) * y : 0.f;
        if (SCAN || is_q) {
            store_pair(&seen[of][row][j % 16], x, y);
        } else {
            read[of][j % 16][row] = j < t ? -beta[t] * x : 0.f;
            read[of][j % 16 + 1][row] = j + 1 < t ? -beta[t] * y : 0.f;
        }
    });
}

// Adds to a tile's outputs what they take of u.
template <typename T, int N, int P, int Q>
INLINE void add_seen(float (&sums)[N][4], const T (*seen)[16][Q], const T (*u)[P], int first,
                     int tile)
{
    for (int of = 0; of <= tile; of++) multiply(sums, plain(seen[of]), plain(u, 16 * of, first), 1);
}

// u of one row from r, and zeros behind it.
template <typename T, bool SCAN> INLINE void solve_row(row_memory<T, SCAN> &w, int t)
{
    constexpr int C = row_columns<T>, GROUPS = THREADS / C;
    const int column = thread() % C, group = thread() / C;
    if (group == 0) {
        const auto *read = w.read[0]; // tiles lie one behind the other
        float sum = w.r[t % 16][column];
#pragma unroll 8
        for (int j = 0; j < t; j++) sum = fmaf(read[j][t % 16], to_f32(w.u[j][column]), sum);
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
    const int tile = t / 16, tile_row = 16 * tile, part = warp % TILES, first = part * 8 * M;
    const bool is_q = warp >= TILES;
    float sums[M][4];
    clear(sums);
    read_tile<16, C>(w.r, f.qkv + (int64_t)row * f.width + f.at.v + f.first, f.width,
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
        const auto left = plain(is_q ? w.q : w.k + tile_row);
        multiply(sums, left, plain(w.S, 0, first), steps);
        scale_rows(sums, [&](int i) { return expf(w.G[tile_row + i]); });
        if (!is_q)
            each_sum(sums, [&](int i, int column, float &sum) {
                float &r = w.r[i][first + column];
                r = w.beta[tile_row + i] * __fsub_rn(r, sum);
            });
        if (part <= tile) {
            float products[2][4];
            clear(products);
            multiply(products, left, turned(w.k, 16 * part), steps);
            write_compared<SCAN>(w.seen, w.read, w.G, w.beta, products, tile, 16 * part, is_q);
        }
    }
    __syncthreads();
    if constexpr (!SCAN)
        for (int i = t; i < end; i++) solve_row(w, i);
    if (is_q) {
        add_seen(sums, w.seen, w.u, first, tile);
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
INLINE void read_slot(row_memory<T, SCAN> &w, float (&S)[N][4], const delta_state &slot,
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
    clear(S);
    if (!moves) return; // most rows: to be skipped as a whole
    each_state(S, slot, f, own_key(),
               [](float &sum, const float &from, bool is_there) { sum = is_there ? from : 0.f; });
}

// Block x has a slice of a sequence of one row and of those that go on from it.
template <typename T, bool SCAN>
__global__ void __launch_bounds__(THREADS, 3)
    row_kernel(T *out, const __grid_constant__ rule_of<T, SCAN> in, unsigned *tickets)
{
    grid_begin();
    constexpr int C = row_columns<T>;
    extern __shared__ __align__(16) char shared[];
    row_memory<T, SCAN> &w = *(row_memory<T, SCAN> *)shared;
    const source<T, SCAN> f = source_at<C>(in, blockIdx.x);
    const delta_rows &b = f.b;
    if (!unit_begins(&b, f.seq) || !is_few(b, f.seq)) return;
    const int seq = f.seq, first = b.query_start[seq], end = unit_end(&b, seq),
              from = b.state_from[seq];
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
        read_slot(w, S, slot_of(f, from), f, n, moves);
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
            const delta_state slot = slot_of(f, b.state_slot[last]);
            if (!same) write_state(S, slot, f, own_key());
            write_rows(slot, w.u, f, same ? known : 0, n);
        }
    }
    keep_at_end(f, C, tickets);
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

// Rows t to `end` of the chunk behind a border, which are those of a sequence from row `row` of the
// batch on, and those before them in the chunk, which end before row `behind`.
struct piece {
    int number, seq, row, t, end, border, behind;

    __device__ int at(int i) const { return i < t ? behind - t + i : row + i - t; }
};

// Pieces are numbered so that the number gives the sequence: no two have one, and some none.
INLINE int first_number(const delta_rows &b, int seq)
{
    return b.query_start[seq] / CHUNK + 2 * seq;
}

// The k-th of a sequence; without rows where there are not so many.
INLINE piece piece_of(const delta_rows &b, int seq, int k)
{
    const int start = b.query_start[seq], position = unit_position(&b, seq);
    const int border = (position / CHUNK + k) * CHUNK, from = max(position, border);
    const int until = min(position + b.query_start[seq + 1] - start, border + CHUNK);
    const int row = start + from - position, parent = b.packed ? b.parent[seq] : -1;
    return {first_number(b, seq) + k,
            seq,
            row,
            from - border,
            until - border,
            border,
            parent < 0 ? row : b.query_start[parent + 1]};
}

#define HEADS (THREADS / CHUNK) // whose gates are made at once

template <typename T> struct prepared {
    piece_keys<T> keys;
    float G[HEADS][CHUNK], beta[HEADS][CHUNK], log_decay[HEADS][CHUNK];
};

// The first n_known rows of a chunk are in the slot that the unit goes on from.
template <typename T, bool SCAN>
INLINE void prepare_keys(piece_keys<T> &keys, const piece &p, const source<T, SCAN> &f,
                         const float *known, int n_known)
{
    constexpr int AT_ONCE = 4, WARPS = THREADS / 32;
    const int end = p.end;
    for (int first = thread() / 32; first < tile_end(end); first += AT_ONCE * WARPS) {
        float q[AT_ONCE][DIM / 32], k[AT_ONCE][DIM / 32];
        unrolled<AT_ONCE>([&](int i) {
            const int at = first + i * WARPS;
            const T *from = f.qkv + (int64_t)p.at(at) * f.width;
            read_vector(q[i], from + f.at.q, at >= p.t && at < end ? f.key_dim : 0);
            if (at < n_known)
                read_vector(k[i], known + at * f.key_dim, f.key_dim);
            else
                read_vector(k[i], from + f.at.k, at < end ? f.key_dim : 0);
        });
        unrolled<AT_ONCE>([&](int i) {
            const int at = first + i * WARPS;
            if (at < tile_end(end))
                write_vectors<SCAN>(keys.q[at], keys.k[at], q[i], k[i], f.key_dim, at < n_known);
        });
    }
}

// The gates of the rows of n value heads from `first` on.
template <typename T, bool SCAN>
INLINE void prepare_gates(prepared<T> &w, const piece &p, int n_known, const rule_of<T, SCAN> &in,
                          int first, int n)
{
    const int h = thread() / CHUNK, i = thread() % CHUNK;
    if (h >= n) return;
    row_gates gates = {};
    if (i >= n_known && i < p.end) gates = gates_of(source_of(in, p.seq, first + h, 0), p.at(i));
    w.log_decay[h][i] = gates.log_decay;
    w.beta[h][i] = gates.beta;
}

// What the chain reads and leaves: outputs, or where `out` is NULL what the gradient needs.
template <typename T, bool SCAN> struct chain_args {
    T *out;
    piece_keys<T> *keys;
    piece_head<T, SCAN> *heads;
    int blocks;
    float *begin; // (blocks, BEGIN_FLOATS)
    T *S;         // (borders, n_heads, DIM, columns) at every border but the first (border_at)
    T *u;         // (T, n_heads, columns)
};

// Block x is the number of a piece, y a key head.
template <typename T, bool SCAN>
__global__ void __launch_bounds__(THREADS, 3)
    prepare_kernel(const __grid_constant__ chain_args<T, SCAN> a,
                   const __grid_constant__ rule_of<T, SCAN> in)
{
    grid_begin();
    extern __shared__ __align__(16) char shared[];
    prepared<T> &w = *(prepared<T> *)shared;
    const delta_rows &b = in.b;
    const int each = in.each, group = blockIdx.y, number = blockIdx.x;
    int seq = 0;
    for (int above = b.n_seqs; above - seq > 1;) {
        const int middle = (seq + above) / 2;
        *(first_number(b, middle) <= number ? &seq : &above) = middle;
    }
    const piece p = piece_of(b, seq, number - first_number(b, seq));
    int unit = seq;
    while (!unit_begins(&b, unit)) unit--;
    if (p.t >= p.end || is_few(b, unit)) return;
    const int n_known = b.packed ? 0 : max(b.query_start[unit] - p.row + p.t, 0);
    const int from = n_known > 0 ? b.state_from[unit] : 0;
    prepare_gates(w, p, n_known, in, group * each, min(each, HEADS));
    prepare_keys(w.keys, p, source_of(in, seq, group * each, 0), slot_of(in, from, group, 0).k,
                 n_known);
    __syncthreads();
    const int begin = p.t / 16 * 16, n = tile_end(p.end);
    const int warp = thread() / 32, tile = warp % TILES, half = warp / TILES;
    const bool is_q = SCAN || half > 0, takes_part = 16 * tile >= begin && 16 * tile < n;
    float sums[CHUNK / 8][4];
    clear(sums);
    if (takes_part)
        multiply(sums, plain(is_q ? w.keys.q : w.keys.k, 16 * tile), turned(w.keys.k),
                 (in.key_dim + 15) / 16, 2 * (tile + 1));
    constexpr int UNITS = (DIM + PITCH) / wide<T>; // of a row
    piece_keys<T> &to_keys = a.keys[(int64_t)number * in.n_key_heads + group];
    for (int i = thread(); i < n * UNITS; i += THREADS) {
        ((uint4 *)to_keys.k)[i] = ((uint4 *)w.keys.k)[i];
        if (i >= begin * UNITS) ((uint4 *)to_keys.q)[i] = ((uint4 *)w.keys.q)[i];
    }
    for (int done = 0; done < each; done += HEADS) {
        const int first_head = group * each + done, n_heads = min(each - done, HEADS);
        if (done > 0) {
            __syncthreads();
            prepare_gates(w, p, n_known, in, first_head, n_heads);
            __syncthreads();
        }
        if (warp < n_heads) {
            const float *known = slot_of(in, from, group, done + warp).G;
            for (int i = thread() % 32; i < n_known; i += 32) w.G[warp][i] = known[i];
            __syncwarp();
            sum_decays(w.G[warp], w.log_decay[warp], n_known, CHUNK);
        }
        __syncthreads();
        for (int h = 0; h < n_heads; h++) {
            piece_head<T, SCAN> &to = a.heads[(int64_t)number * in.n_heads + first_head + h];
            if (thread() < CHUNK) {
                const float G = w.G[h][thread()];
                to.decay[thread()] = expf(G);
                to.since[thread()] = expf(w.G[h][p.end - 1] - G);
                to.beta[thread()] = w.beta[h][thread()];
                to.G[thread()] = G;
            }
            if (takes_part && (!SCAN || h % 2 == half))
                write_compared<SCAN>(to.seen + tile_at(tile, 0),
                                     to.read + (SCAN ? 0 : tile_at(tile, 0)), w.G[h], w.beta[h],
                                     sums, tile, 0, is_q);
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

// Of a block the first warps go from chunk to chunk; the others read what comes next, and compute
// outputs.
#define CHAIN_THREADS (32 * TILES)

template <int BARRIER, int N> INLINE void meet()
{
    asm volatile("barrier.sync %0, %1;" ::"n"(BARRIER), "n"(N) : "memory");
}

// Has n elements, or zeros, on their way, by the one with number `own` of `threads`.
template <typename E>
INLINE void fetch_array(E *to, const E *from, int n, int own, int threads, bool is_there = true)
{
    for (int i = own; i < n * (int)sizeof(E) / 16; i += threads)
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
                  const source<T, SCAN> &f)
{
    constexpr int N = THREADS - CHAIN_THREADS;
    const int own = thread() - CHAIN_THREADS;
    const int begin = p.t / 16, end = tile_end(p.end) / 16, first = p.end < CHUNK ? begin : 0;
    const int tile = tile_at(begin, 0), n_tiles = tile_at(end, 0) - tile;
    const piece_keys<T> &keys = a.keys[p.number * f.n_key_heads + f.group];
    const piece_head<T, SCAN> &head = a.heads[p.number * f.n_heads + f.head];
    if (!SCAN || p.end == CHUNK)
        fetch_array(to.keys.k + 16 * first, keys.k + 16 * first, 16 * (end - first), own, N);
    if (a.out) fetch_array(to.keys.q + 16 * begin, keys.q + 16 * begin, 16 * (end - begin), own, N);
    fetch_array(to.head.decay, head.decay, 4 * CHUNK, own, N);
    if (a.out) fetch_array(to.head.seen + tile, head.seen + tile, n_tiles, own, N);
    if (!SCAN) fetch_array(to.head.read + tile, head.read + tile, n_tiles, own, N);
    fetch_rows<COLUMNS>(to.v, f.qkv + (int64_t)p.row * f.width + f.at.v + f.first, f.width,
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

// A tile's queries or keys times S; of keys that a head has not, both have zeros. As many steps as
// the compiler knows: loads of one step under the products of others.
template <typename T, bool SCAN>
INLINE void multiply_state(float (&sums)[COLUMNS / 8][4], const T (*rows)[DIM + PITCH],
                           const chain_memory<T, SCAN> &w)
{
    clear(sums);
    multiply(sums, plain(rows), plain(w.S), DIM / 16);
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
                  const piece &p)
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
        multiply_state(sums, stage.keys.k + first, w);
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
                          const piece &p, const source<T, SCAN> &f)
{
    const int tile = thread() / 32 % TILES, first = 16 * tile;
    const bool takes_part = first < p.end && first + 16 > p.t;
    float sums[COLUMNS / 8][4];
    if (takes_part) {
        multiply_state(sums, stage.keys.q + first, w);
        scale_rows(sums, [&](int i) { return stage.head.decay[first + i]; });
    }
    meet<2, THREADS>();
    if (!takes_part) return;
    add_seen(sums, stage.head.seen + tile_at(tile, 0), w.u, 0, tile);
    each_pair(sums, [&](int i, int c, float x, float y) {
        const int t = first + i, column = f.first + c;
        T *to = out + ((int64_t)(p.row + t - p.t) * f.n_heads + f.head) * f.head_dim + column;
        if (t < p.t || t >= p.end || column >= f.head_dim) return;
        if (SCAN) {
            x = fmaf(f.skips, to_f32(stage.v[t][c]), x);
            y = fmaf(f.skips, to_f32(stage.v[t][c + 1]), y);
        }
        const float pair[] = {x, y};
        store_some<T, 2>(to, packed<T, 2>(pair), f.head_dim - column, f.head_dim % 2 == 0);
    });
}

// Columns of a row that is left.
DTYPE_INLINE int padded(const delta_shape *s)
{
    return slices_of(s, COLUMNS) * COLUMNS;
}

// Where S lies in memory that a packed batch's chain has left at the border above 0 before a piece:
// with the rows of its sequence, or of the unit's first, that close the chunk before.
template <typename T, bool SCAN> INLINE int64_t border_at(const source<T, SCAN> &f, const piece &p)
{
    const int seq = p.border <= f.b.first_position[p.seq] ? f.seq : p.seq;
    const int n = p.border / CHUNK - f.b.first_position[seq] / CHUNK - 1;
    const int64_t at = f.b.query_start[seq] / CHUNK + seq + n;
    return (at * f.n_heads + f.head) * DIM * padded(&f) + f.first;
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
                        const source<T, SCAN> &f, const piece &p)
{
    const int width = padded(&f);
    if (p.t == 0 && p.border > 0) leave_rows(a.S + border_at(f, p), width, w.S, DIM);
    meet<2, THREADS>();
    leave_rows(a.u + ((int64_t)p.row * f.n_heads + f.head) * width + f.first, f.n_heads * width,
               w.u + p.t, p.end - p.t);
}

// S and u that the sequences behind a packed prefix begin with.
#define BEGIN_FLOATS (DIM * DIM + CHUNK * DIM)

// A sequence and those that go on from it.
template <typename T, bool SCAN>
INLINE void run_chain(chain_memory<T, SCAN> &w, const chain_args<T, SCAN> &a,
                      const source<T, SCAN> &f)
{
    constexpr int STAGES = chain_stages<T>;
    const delta_rows &b = f.b;
    const bool is_chain = thread() < CHAIN_THREADS;
    const int end = unit_end(&b, f.seq), from = b.packed ? -1 : b.state_from[f.seq];
    float *memory = a.begin + blockIdx.x * BEGIN_FLOATS;
    const delta_state before =
        b.packed ? delta_state{NULL, memory, memory + DIM * DIM, NULL} : slot_of(f, from);
    piece p = piece_of(b, f.seq, 0);
    const int known = p.t; // rows of u that the slot has
    bool closed = p.border + p.t == 0;
    chain_sums S;
    const auto begin = [&](int position) {
        if (is_chain) {
            unrolled<2>([&](int m) {
                each_state(S[m], before, f, chain_key(m),
                           [&](float &sum, const float &from, bool is_there) {
                               sum = is_there && position > 0 ? from : 0.f;
                           });
            });
            show(w, S);
        }
        read_tile<CHUNK, COLUMNS>(w.u, before.u + f.first, f.head_dim, f.head_dim - f.first, 0,
                                  position % CHUNK);
    };
    if (STAGES > 1 && !is_chain) fetch(w.stage[0], a, p, f);
    copies_commit();
    begin(p.border + p.t);
    copies_wait<0>();
    for (int k = 0, stage = 0;; stage = (stage + 1) % STAGES) {
        const int seq = p.seq;
        piece next = piece_of(b, seq, k + 1);
        const bool ends = next.t >= next.end, is_last = ends && seq + 1 == end;
        if (ends && !is_last) next = piece_of(b, seq + 1, 0);
        meet<2, THREADS>();
        if (STAGES == 1) {
            if (!is_chain) fetch(w.stage[0], a, p, f);
            copies_commit();
            copies_wait<0>();
            meet<2, THREADS>();
        }
        if (is_chain) {
            go_on(w, w.stage[stage], S, p);
        } else {
            if (STAGES > 1 && !is_last) fetch(w.stage[(stage + 1) % STAGES], a, next, f);
            copies_commit();
            if (a.out)
                write_outputs(w, w.stage[stage], a.out, p, f);
            else
                leave_piece(w, a, f, p);
            copies_wait<0>();
        }
        closed |= p.end == CHUNK;
        const int open = p.end % CHUNK;
        k = ends ? 0 : k + 1;
        p = next;
        if (!ends) continue;
        meet<2, THREADS>();
        if (b.packed ? seq == f.seq && !is_last : delta_leaves(b, seq, end)) {
            const bool same = !b.packed && b.state_slot[seq] == from && !closed;
            const delta_state slot = b.packed ? before : slot_of(f, b.state_slot[seq]);
            if (is_chain && !same)
                unrolled<2>([&](int m) { write_state(S[m], slot, f, chain_key(m)); });
            write_rows(slot, w.u, f, same ? known : 0, open);
        } else if (b.packed && !is_last) {
            begin(p.border + p.t);
        }
        if (is_last) break;
        meet<2, THREADS>();
    }
}

// Blocks that an SM has.
template <typename T, bool SCAN> constexpr int chain_blocks = SCAN && sizeof(T) == 2 ? 2 : 1;

template <typename T, bool SCAN>
__global__ void __launch_bounds__(THREADS, chain_blocks<T, SCAN>)
    chain_kernel(const __grid_constant__ chain_args<T, SCAN> a,
                 const __grid_constant__ rule_of<T, SCAN> in, unsigned *tickets)
{
    grid_begin();
    extern __shared__ __align__(16) char shared[];
    chain_memory<T, SCAN> &w = *(chain_memory<T, SCAN> *)shared;
    const int n_units = in.b.n_seqs * in.n_heads * slices_of(&in, COLUMNS);
    for (int unit = blockIdx.x; unit < n_units; unit += gridDim.x) {
        const source<T, SCAN> f = source_at<COLUMNS>(in, unit);
        if (!unit_begins(&f.b, f.seq) || is_few(f.b, f.seq)) continue;
        run_chain(w, a, f);
        if (!f.b.packed) keep_at_end(f, COLUMNS, tickets);
        __syncthreads();
    }
}

// ---- launches -----------------------------------------------------------------------------------

// Calls f(element, number<is it Mamba-2's>, number<columns of a block of the gradient>).
template <typename F> static void with_rule(const struct delta_shape *s, F f)
{
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        if (!s->is_scan)
            f(t, number<false>(), number<back_columns<T>>());
        else if (s->head_dim > row_columns<T>)
            f(t, number<true>(), number<back_columns<T>>());
        else
            f(t, number<true>(), number<row_columns<T>>());
    });
}

template <typename T, bool SCAN>
static rule_of<T, SCAN> rule_from(const struct delta_args *a, const struct delta_shape *s)
{
    return {*s,
            delta_rows_of(&a->batch),
            (const T *)a->qkv,
            (const T *)a->a_log,
            (const T *)a->dt_bias,
            (const T *)a->skip,
            (decltype(rule_of<T, SCAN>::gates))a->gates,
            SCAN ? a->stride : 2 * s->n_heads,
            heads_each(s),
            delta_window_elements(s),
            delta_group_elements(s)};
}

static int blocks_of(struct device *dev, const struct delta_shape *s, int n_seqs, int C, int per_sm)
{
    return std::min(n_seqs * s->n_heads * slices_of(s, C), cuda_use(dev)->n_sms * per_sm);
}

// Scratch, of which arrays are taken one behind the other; at NULL they are only counted.
struct layout {
    char *at;
    size_t bytes;

    template <typename E> E *take(int64_t n)
    {
        E *array = (E *)(at + bytes);
        bytes += (n * sizeof(E) + 255) / 256 * 256;
        return array;
    }
};

// out NULL: as far as the gradient needs it.
template <typename T, bool SCAN>
static chain_args<T, SCAN> chain_of(struct device *dev, layout &l, T *out,
                                    const struct delta_shape *s, int rows, int n_seqs)
{
    const int64_t pieces = rows / CHUNK + 2 * n_seqs, values = s->n_heads * padded(s);
    chain_args<T, SCAN> a = {};
    a.out = out;
    a.keys = l.take<piece_keys<T>>(pieces * s->n_key_heads);
    a.heads = l.take<piece_head<T, SCAN>>(pieces * s->n_heads);
    a.blocks = blocks_of(dev, s, n_seqs, COLUMNS, chain_blocks<T, SCAN>);
    a.begin = l.take<float>((int64_t)a.blocks * BEGIN_FLOATS);
    if (out) return a;
    a.S = l.take<T>((rows / CHUNK + n_seqs) * DIM * values);
    a.u = l.take<T>(rows * values);
    return a;
}

template <typename T, bool SCAN>
static void run_chunks(struct device *dev, const char *what, const chain_args<T, SCAN> &a,
                       const rule_of<T, SCAN> &in)
{
    cuda_launch(dev, what, prepare_kernel<T, SCAN>,
                dim3(in.b.n_tokens / CHUNK + 2 * in.b.n_seqs, in.n_key_heads), THREADS,
                sizeof(prepared<T>), a, in);
    cuda_launch(dev, what, chain_kernel<T, SCAN>, a.blocks, THREADS, sizeof(chain_memory<T, SCAN>),
                a, in, cuda_use(dev)->tickets);
}

void cuda_delta_rule(struct device *dev, void *out, const struct delta_args *a,
                     const struct delta_shape *s)
{
    const struct batch_view *b = a->batch.view;
    if (b->n_tokens <= 0 || !delta_takes(dev, b)) return;
    if ((int64_t)b->n_seqs * s->n_key_heads > N_TICKETS) {
        device_fail(dev, "delta_rule: %d sequences of %d key heads; together at most %d", b->n_seqs,
                    s->n_key_heads, N_TICKETS);
        return;
    }
    with_rule(s, [&](auto t, auto is_scan, auto) {
        using T = decltype(t);
        constexpr bool SCAN = decltype(is_scan)::value;
        const rule_of<T, SCAN> in = rule_from<T, SCAN>(a, s);
        if (!b->packed)
            cuda_launch(dev, "delta_rule", row_kernel<T, SCAN>,
                        b->n_seqs * s->n_heads * slices_of(s, row_columns<T>), THREADS,
                        sizeof(row_memory<T, SCAN>), out, in, cuda_use(dev)->tickets);
        if (!b->packed && b->max_query <= 1) return; // as in captured steps
        layout l = {};
        chain_of<T, SCAN>(dev, l, (T *)out, s, b->n_tokens, b->n_seqs);
        l = {(char *)cuda_workspace(dev, l.bytes), 0};
        if (l.at)
            run_chunks(dev, "delta_rule",
                       chain_of<T, SCAN>(dev, l, (T *)out, s, b->n_tokens, b->n_seqs), in);
    });
}

// ---- backward -----------------------------------------------------------------------------------

// What sequences add to what they go on from: of u, k and the log decays of the open chunk's rows,
// and of S before it, as it lies in threads.
template <int C> struct back_shared {
    float u[CHUNK][C], k[CHUNK][DIM], log_decay[CHUNK], S[DIM * C];
};

template <typename T, int C, bool SCAN> struct back_args {
    T *dqkv;
    const T *dout;
    chain_args<T, SCAN> chain;
    int blocks;
    back_shared<C> *shared; // (blocks)
    float *dvectors;        // (T, n_heads, slices, 2, DIM): of q and k as the rule takes them
    // (T, n_heads, slices, 3): of what beta is made of, or of Mamba-2's step without its decay; of
    // the log decay; and of Mamba-2's skip.
    float *dgates;
};

template <typename T, int C, bool SCAN>
static back_args<T, C, SCAN> back_of(struct device *dev, layout &l, const struct delta_shape *s,
                                     int rows, int n_seqs)
{
    const int64_t slices = (int64_t)rows * s->n_heads * slices_of(s, C);
    back_args<T, C, SCAN> a = {};
    a.chain = chain_of<T, SCAN>(dev, l, NULL, s, rows, n_seqs);
    a.blocks = blocks_of(dev, s, n_seqs, C, 1);
    a.shared = l.take<back_shared<C>>(a.blocks);
    a.dvectors = l.take<float>(slices * 2 * DIM);
    a.dgates = l.take<float>(slices * 3);
    return a;
}

// What is kept goes with rows; of sequences of fewer than 32 it is more.
size_t cuda_delta_scratch(struct device *dev, const struct delta_shape *s, int rows)
{
    layout l = {};
    if (s->n_heads == 0) return 0;
    if (delta_is_conv(s)) return cuda_conv_scratch(s, rows);
    with_rule(s, [&](auto t, auto is_scan, auto columns) {
        back_of<decltype(t), decltype(columns)::value, decltype(is_scan)::value>(
            dev, l, s, rows, ceil_div(rows, 32));
    });
    return std::max(l.bytes, cuda_conv_scratch(s, rows));
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
    unrolled<2 * N>([&](int c) {
        float sum = column_sums[c / 2][c % 2];
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
        if (lane / 4 == 0)
            w.column_parts[is_q ? OF_SEEN : OF_READ][first / 16]
                          [share + c / 2 * 8 + lane * 2 + c % 2] = sum;
    });
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

// Adds what a thread has of sums to a place of its own in scratch, or the other way.
template <int N> INLINE void add_sums(float *to, float (&sums)[N][4], bool back)
{
    unrolled<N>([&](int n) {
        float all[4], *at = to + (n * blockDim.x + thread()) * 4;
        load<float, 4>(all, at);
        unrolled<4>([&](int i) { all[i] += sums[n][i]; });
        if (!back) store<float, 4>(at, all);
        if (back) unrolled<4>([&](int i) { sums[n][i] = all[i]; });
    });
}

// Has all that is read of a chunk on its way; for all threads to wait for.
template <typename T, int C, bool SCAN>
INLINE void fetch_back(back_tiles<T, C, SCAN> &w, const back_args<T, C, SCAN> &a,
                       const source<T, SCAN> &f, const piece &p)
{
    constexpr int N = threads<C>;
    const int begin = p.t / 16 * 16, end = tile_end(p.end), own = thread();
    const int dim = f.head_dim, wide_dim = padded(&f);
    const piece_keys<T> &keys = a.chain.keys[p.number * f.n_key_heads + f.group];
    const piece_head<T, SCAN> &head = a.chain.heads[p.number * f.n_heads + f.head];
    const T *S = a.chain.S + (p.border > 0 ? border_at(f, p) : 0);
    const T *u = a.chain.u + (int64_t)f.head * wide_dim + f.first;
    fetch_array(w.keys.k, keys.k, end, own, N);
    fetch_array(w.keys.q, keys.q, begin, own, N, false);
    fetch_array(w.keys.q + begin, keys.q + begin, end - begin, own, N);
    fetch_array(w.decay, head.decay, 4 * CHUNK, own, N);
    fetch_rows<C>(w.S, S, wide_dim, wide_dim - f.first, 0, DIM, 0, p.border > 0 ? DIM : 0, own, N);
    for (int t = 0; t < end; t = t < p.t ? p.t : end) // the prefix's rows, the piece's
        fetch_rows<C>(w.u, u + (int64_t)p.at(t) * f.n_heads * wide_dim, f.n_heads * wide_dim,
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
__device__ void back_chunk(back_tiles<T, C, SCAN> &w, float (&dS)[N][4],
                           const back_args<T, C, SCAN> &a, const source<T, SCAN> &f, const piece &p,
                           bool takes)
{
    constexpr int SHARES = 2 * parts<C>;
    constexpr int READ_PITCH = CHUNK + (sizeof(T) == 2 ? PITCH : 4);
    const int columns = first_column<C>(C), keys = first_column<C>(DIM);
    const int steps = (f.key_dim + 15) / 16, begin = p.t, n = p.end, tiles = tile_end(n) / 16;
    const int first = own_row(), tile = first / 16;
    T(*dseen)[CHUNK + PITCH] = w.seen; // all have read these by then
    T(*dread)[READ_PITCH] = (T(*)[READ_PITCH])w.read;
    float compared[CHUNK / 8 / SHARES][4];
    back_shared<C> &shared = a.shared[blockIdx.x];
    const auto slice_of = [&](int row) { // of a row, in what the slices leave
        return ((int64_t)row * f.n_heads + f.head) * slices_of(&f, C) + f.first / C;
    };
    const bool closes = n == CHUNK, takes_part = first < n;
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
            w.r[j][at] = sum + (takes && j < n ? shared.u[j][at] : 0.f);
        });
    }
    compare_back(w, compared, true, n);
    __syncthreads();
    write_operand(dseen, compared, first, first_column<C>(CHUNK));
    if constexpr (!SCAN) solve_back(w, begin, n);
    for (int t = thread() / 32; t < tile_end(n); t += threads<C> / 32) {
        const int row = p.at(t);
        const bool is_own = t >= begin && t < n;
        constexpr int V = C / 32; // columns of a lane
        const int at = thread() % 32 * V, column = f.first + at;
        float du[V], u[V], dvalue[V], own_du[V], dbeta = 0.f, dskip = 0.f;
        load<float, V>(du, &w.r[t][at]);
        if (!SCAN) load<T, V>(u, &w.u[t][at]);
        unrolled<V>([&](int v) {
            if constexpr (SCAN)
                u[v] = is_own && column + v < f.head_dim
                           ? to_f32(f.qkv[(int64_t)row * f.width + f.at.v + column + v])
                           : 0.f; // the value
            const float dout = SCAN ? to_f32(w.dout[t][at + v]) : 0.f;
            dbeta = fmaf(du[v], u[v], dbeta);
            dskip = fmaf(dout, u[v], dskip);
            dvalue[v] = w.beta[t] * du[v];
            if (SCAN) dvalue[v] = fmaf(f.skips, dout, dvalue[v]);
            own_du[v] = is_own ? du[v] : 0.f;
            if (t < begin) shared.u[t][at + v] += du[v];
        });
        if constexpr (!SCAN) store<T, V>(&w.du[t][at], own_du);
        T *to_value = a.dqkv + (int64_t)row * f.width + f.at.v + column;
        store_some<T, V>(to_value, packed<T, V>(dvalue), is_own ? f.head_dim - column : 0,
                         (size_t)to_value % (V * sizeof(T)) == 0);
        dbeta = lanes_sum(dbeta);
        if (SCAN) dskip = lanes_sum(dskip);
        if (is_own && thread() % 32 == 0) {
            float *dgates = a.dgates + slice_of(row) * 3;
            dgates[0] = SCAN ? dbeta : dbeta * (1.f - w.beta[t]);
            dgates[2] = dskip;
        }
    }
    __syncthreads();
    if constexpr (!SCAN) {
        compare_back(w, compared, false, n);
        __syncthreads();
        write_operand(dread, compared, first, first_column<C>(CHUNK));
        __syncthreads();
    }
    if (takes_part) {
        const auto store_rows = [&](float(&sums)[DIM / 8 / SHARES][4], int which) {
            each_pair(sums, [&](int i, int column, float x, float y) {
                const int t = first + i, key = keys + column;
                float *own = a.dvectors + (slice_of(p.at(t)) * 2 + which) * DIM + key;
                float *others = &shared.k[t][key];
                if (which && t < begin) {
                    others[0] += x;
                    others[1] += y;
                } else if (t >= begin && t < n) {
                    const bool adds = which && takes;
                    store_pair(own, adds ? x + others[0] : x, adds ? y + others[1] : y);
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
        if (t < begin)
            shared.log_decay[t] += (float)dG;
        else if (t < n)
            a.dgates[slice_of(p.at(t)) * 3 + 1] = (float)dG + (takes ? shared.log_decay[t] : 0.f);
    }
}

// The sequences of a unit go back, the first of them last.
template <typename T, int C, bool SCAN>
__global__ void __launch_bounds__(threads<C>)
    delta_back_kernel(const __grid_constant__ back_args<T, C, SCAN> a,
                      const __grid_constant__ rule_of<T, SCAN> in)
{
    grid_begin();
    constexpr int N = C / parts<C> / 8;
    extern __shared__ __align__(16) char shared_bytes[];
    back_tiles<T, C, SCAN> &w = *(back_tiles<T, C, SCAN> *)shared_bytes;
    const delta_rows &b = in.b;
    back_shared<C> &shared = a.shared[blockIdx.x];
    const int n_units = b.n_seqs * in.n_heads * slices_of(&in, C);
    for (int unit = blockIdx.x; unit < n_units; unit += gridDim.x) {
        const source<T, SCAN> f = source_at<C>(in, unit);
        if (!unit_begins(&b, f.seq)) continue;
        const int n_seqs = unit_end(&b, f.seq) - f.seq;
        const int whole = (b.query_start[f.seq + 1] - b.query_start[f.seq]) / CHUNK * CHUNK;
        float dS[N][4];
        if (n_seqs > 1) {
            __syncthreads(); // the unit before has read what was shared
            for (int i = thread(); i < (int)(sizeof shared / sizeof(float)); i += threads<C>)
                ((float *)&shared)[i] = 0.f;
        }
        for (int step = 1; step <= n_seqs; step++) {
            const bool first = step == n_seqs, takes = first && n_seqs > 1;
            const int seq = f.seq + step % n_seqs, position = b.first_position[seq];
            const int last = position + b.query_start[seq + 1] - b.query_start[seq] - 1;
            clear(dS);
            for (int k = last / CHUNK - position / CHUNK; k >= 0; k--) {
                const piece p = piece_of(b, seq, k);
                if (takes && p.border + p.end == whole) add_sums(shared.S, dS, true);
                __syncthreads();
                fetch_back(w, a, f, p);
                back_chunk(w, dS, a, f, p, takes && p.border == whole);
            }
            if (!first) add_sums(shared.S, dS, false);
        }
    }
}

// The gates' gradients, and those of what all rows of a head share: block x is the head.
template <typename T, bool SCAN>
__global__ void gates_back_kernel(const __grid_constant__ delta_grads to, const float *dgates,
                                  const __grid_constant__ rule_of<T, SCAN> in, int slices)
{
    grid_begin();
    __shared__ float shared[32];
    const source<T, SCAN> f = source_of(in, 0, blockIdx.x, 0);
    float sums[3] = {};
    for (int row = threadIdx.x; row < in.b.n_tokens; row += SHARED_THREADS) {
        const row_gates gates = gates_of(f, row);
        const float *from = dgates + ((int64_t)row * f.n_heads + f.head) * slices * 3;
        float d[3] = {}; // as they lie in dgates
        for (const float *end = from + 3 * slices; from < end; from += 3)
            unrolled<3>([&](int i) { d[i] += from[i]; });
        const float dexponent = -d[1] * f.rate; // of softplus(a), or of the step
        float da = (SCAN ? d[0] + dexponent : dexponent) * sigmoid(gates.raw);
        if (SCAN && softplus_of(gates.raw) < f.min_step) da = 0.f;
        T *dgate = (T *)to.gates + row * f.stride + f.head;
        if (!SCAN) dgate[0] = from_f32<T>(d[0]);
        dgate[SCAN ? 0 : f.n_heads] = from_f32<T>(da);
        const float shares[] = {dexponent * (SCAN ? gates.beta : softplus_of(gates.raw)), da, d[2]};
        // Not with the products that they are, in one step.
        unrolled<3>([&](int i) { sums[i] = __fadd_rn(sums[i], shares[i]); });
    }
    float *const shared_grads[] = {to.a_log, to.dt_bias, to.skip};
    for (int i = 0; i < 3; i++) {
        const float sum = block_sum(sums[i], shared);
        if (threadIdx.x == 0 && shared_grads[i]) shared_grads[i][f.head] += sum;
    }
}

// From the gradients of a row's q (block z 0) or k (1) as the value heads of a key head (block y)
// take it, by slices, to that of what it was made of. A warp's.
template <typename T, bool SCAN>
__global__ void length_back_kernel(T *dqkv, const float *dvectors,
                                   const __grid_constant__ rule_of<T, SCAN> in, int slices)
{
    grid_begin();
    const int each = in.each * slices, dim = in.key_dim, lane = threadIdx.x;
    const delta_columns columns = delta_columns_of(&in, SCAN, blockIdx.y * in.each);
    const int64_t row = blockIdx.x, first = (row * in.n_key_heads + blockIdx.y) * each;
    const int64_t at = row * delta_conv_width(&in) + (blockIdx.z ? columns.k : columns.q);
    const float *from = dvectors + (first * 2 + blockIdx.z) * DIM;
    float d[DIM / 32] = {}, x[DIM / 32], along = 0;
    read_vector(x, in.qkv + at, dim);
    const float inverse = inverse_length<SCAN>(x);
    unrolled<DIM / 32>([&](int i) {
        const int e = lane + 32 * i;
        for (int h = 0; h < each && e < dim; h++) d[i] += from[(int64_t)h * 2 * DIM + e];
        along = fmaf(x[i], d[i], along);
    });
    const float scale = SCAN || blockIdx.z ? inverse : inverse / sqrtf((float)dim);
    along = SCAN ? 0.f : lanes_sum(along) * inverse * inverse;
    unrolled<DIM / 32>([&](int i) {
        const int e = lane + 32 * i;
        if (e < dim) dqkv[at + e] = from_f32<T>(scale * (d[i] - x[i] * along));
    });
}

void cuda_delta_rule_back(struct device *dev, const struct delta_grads *grads, const void *dout,
                          const struct delta_args *args, const struct delta_shape *s)
{
    const struct batch_view *b = args->batch.view;
    const int n = b->n_tokens;
    if (n <= 0 || !delta_takes(dev, b)) return;
    with_rule(s, [&](auto t, auto is_scan, auto columns) {
        using T = decltype(t);
        constexpr int C = decltype(columns)::value;
        constexpr bool SCAN = decltype(is_scan)::value;
        const int slices = slices_of(s, C);
        layout l = {};
        back_of<T, C, SCAN>(dev, l, s, n, b->n_seqs);
        l = {(char *)cuda_workspace(dev, l.bytes), 0};
        if (!l.at) return;
        back_args<T, C, SCAN> a = back_of<T, C, SCAN>(dev, l, s, n, b->n_seqs);
        a.dqkv = (T *)grads->qkv;
        a.dout = (const T *)dout;
        const rule_of<T, SCAN> in = rule_from<T, SCAN>(args, s);
        run_chunks(dev, "delta_rule_back", a.chain, in);
        cuda_launch(dev, "delta_rule_back", delta_back_kernel<T, C, SCAN>, a.blocks, threads<C>,
                    sizeof(back_tiles<T, C, SCAN>), a, in);
        cuda_launch(dev, "delta_rule_back", length_back_kernel<T, SCAN>, dim3(n, s->n_key_heads, 2),
                    32, 0, grads->qkv, a.dvectors, in, slices);
        cuda_launch(dev, "delta_rule_back", gates_back_kernel<T, SCAN>, s->n_heads, SHARED_THREADS,
                    0, *grads, a.dgates, in, slices);
    });
}
