/* delta.cu: the recurrences of linear attention: the gated delta rule (ops.h, delta_shape) and its
 * gradient, by chunks of positions; and short convolutions, in the end.
 *
 * S stands at a chunk's border; a row is a function of it and of k, u and G of the open chunk's
 * rows (ops.h, delta_state_elements), in one order. All rows are computed by add_rows(), a prompt's
 * 64 at once and a decoded one alone, in tiles of 16 rows whose others are zeros: a row of a tile
 * is computed as if it were alone. So a row has the same bits wherever it comes in.
 *
 * Columns of S need nothing of each other. A block has COLUMNS of them (a slice) of one value head
 * of a sequence, of a packed batch with those that go on behind it; S is in registers as the sums
 * of an mma lie (tensor.cuh), 16 keys to a warp, and in shared memory as an operand. What all
 * slices of a head share in a slot, k and G, a second kernel writes once all have read it.
 *
 * The gradient needs S at every border, from the last to the first, and u of every row: a block
 * goes forward again and keeps them. Blocks take one unit after another, so that scratch is bounded
 * by the blocks that run, not by the batch. Sums over slices, over the value heads of a key head,
 * and over rows, are kernels of their own. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/recurrence/recurrence.cuh"
#include "kernels/cuda/tensor.cuh"

#define CHUNK          DELTA_CHUNK
#define DIM            DELTA_MAX_DIM
#define THREADS        256
#define WARPS          (THREADS / 32) // 16 keys of S each
#define TILES          (CHUNK / 16)   // of a chunk's rows
#define PITCH          8              // elements behind each row in shared memory
#define LENGTH_EPS     1e-6f
#define SHARED_THREADS 256

// Columns of S in a block.
template <typename T> constexpr int columns = 128 / (int)sizeof(T);

static int slices_of(const struct delta_shape *s)
{
    return ceil_div(s->head_dim, s->dt == DT_BF16 ? columns<bf16> : columns<float>);
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
// the steps, and of f32 that of its terms.
template <int N, bool A, bool B>
__device__ __forceinline__ void multiply(float (&sums)[N][4], operand_of<bf16, A> a,
                                         operand_of<bf16, B> b, int steps, int used = N)
{
    const int lane = threadIdx.x % 32, low = lane % 8, first = lane / 8 % 2 * 8,
              second = lane / 16 * 8;
    for (int k = 0; k < 16 * steps; k += 16) {
        uint32_t left[4];
        if (A)
            load_matrices_transposed(left, a.at + (k + second + low) * a.pitch + first);
        else
            load_matrices(left, a.at + (first + low) * a.pitch + k + second);
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
                                         operand_of<float, B> b, int steps, int used = N)
{
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4 * 2;
    for (int k = 0; k < 16 * steps; k++) {
        const float top = a.at[A ? k * a.pitch + g : g * a.pitch + k];
        const float low = a.at[A ? k * a.pitch + g + 8 : (g + 8) * a.pitch + k];
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
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) f(g + i / 2 * 8, 8 * n + c + i % 2, sums[n][i]);
}

template <int N> __device__ __forceinline__ void clear(float (&sums)[N][4])
{
    each_sum(sums, [](int, int, float &sum) { sum = 0; });
}

// ---- rows ---------------------------------------------------------------------------------------

struct source { // of a value head, and which columns a block has
    const float *gates;
    float rate, dt_bias; // exp(a_log)
    int head, key_at, value_at, width, n_heads, key_dim, head_dim;
    int keys;  // width of the queries, and of the keys
    int first; // column
};

__device__ __forceinline__ source source_of(const delta_shape &s, const float *gates, float a_log,
                                            float dt_bias, int head, int first)
{
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
    f.first = first;
    return f;
}

// The log decay of a row, and G of it behind that of the row before: written so that every kernel
// rounds alike.
__device__ __forceinline__ float log_decay_of(const source &f, int row)
{
    const float a = f.gates[(int64_t)row * 2 * f.n_heads + f.n_heads + f.head];
    return __fmul_rn(-f.rate, softplus_of(__fadd_rn(a, f.dt_bias)));
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
        const int e = threadIdx.x % 32 + 32 * i;
        x[i] = e < key_dim ? to_f32(from[e]) : 0.f;
    }
}

// The chunk's rows. Those behind its last, up to the next sixteenth, are zeros. Of one decoded row
// there is room for its sixteen rows alone where nothing goes over the others (ROWS 16).
template <typename T, int ROWS> struct chunk_of {
    T k[CHUNK][DIM + PITCH], q[ROWS][DIM + PITCH];
    T S[DIM][columns<T> + PITCH]; // at the border
    T u[CHUNK][columns<T> + PITCH];
    T seen[ROWS][CHUNK + PITCH];             // what row t's output takes of u of row j
    alignas(16) float read[CHUNK][ROWS + 4]; // [j][t]: what u of row t takes of that of row j
    float r[ROWS][columns<T> + 4];           // values; then u while it is being summed up
    float G[CHUNK], beta[CHUNK], log_decay[CHUNK];
};

__device__ __forceinline__ int tile_end(int n)
{
    return (n + 15) / 16 * 16;
}

// q, k and gates of rows t to `end` of the chunk, the first of which is `row`, and G; for all
// threads to wait for. What is read of some rows is on its way at once.
template <typename T, int ROWS>
__device__ __forceinline__ void read_rows(chunk_of<T, ROWS> &w, const T *qkv, const source &f,
                                          int row, int t, int end)
{
    constexpr int AT_ONCE = ROWS / 16;
    const int lane = threadIdx.x % 32, behind = tile_end(end);
    const float q_scale = 1.f / sqrtf((float)f.key_dim);
    if (t + (int)threadIdx.x < behind) {
        const int i = t + threadIdx.x;
        const float b =
            i < end ? f.gates[(int64_t)(row + threadIdx.x) * 2 * f.n_heads + f.head] : 0.f;
        w.log_decay[i] = i < end ? log_decay_of(f, row + threadIdx.x) : 0.f;
        w.beta[i] = i < end ? sigmoid(b) : 0.f;
    }
    for (int first = t + threadIdx.x / 32; first < behind; first += AT_ONCE * WARPS) {
        float q[AT_ONCE][DIM / 32], k[AT_ONCE][DIM / 32];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * WARPS;
            const T *from = qkv + (int64_t)(row + at - t) * f.width + f.key_at;
            read_vector(q[i], from, at < end ? f.key_dim : 0);
            read_vector(k[i], from + f.keys, at < end ? f.key_dim : 0);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * WARPS;
            const float q_factor = inverse_length(q[i]) * q_scale, k_factor = inverse_length(k[i]);
            if (at >= behind) break;
#pragma unroll
            for (int e = 0; e < DIM / 32; e++) {
                w.q[at % ROWS][lane + 32 * e] = from_f32<T>(q[i][e] * q_factor);
                w.k[at][lane + 32 * e] = from_f32<T>(k[i][e] * k_factor);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    float G = t > 0 ? w.G[t - 1] : 0.f;
    for (int i = t; i < behind; i++) w.G[i] = G = __fadd_rn(G, w.log_decay[i]);
}

// Columns of a chunk's rows t to `end`, whose numbers are at(row, column of the head), and zeros
// behind them; all on their way at once.
template <int ROWS, int COLUMNS, typename T, int N, typename F>
__device__ __forceinline__ void read_columns(T (*to)[N], const source &f, int t, int end, F at)
{
    constexpr int EACH = ROWS * COLUMNS / THREADS;
    const int column = threadIdx.x % COLUMNS, first = t + threadIdx.x / COLUMNS;
    T x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int row = first + i * (THREADS / COLUMNS);
        x[i] = row < end && f.first + column < f.head_dim ? at(row, f.first + column) : T(0.f);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int row = first + i * (THREADS / COLUMNS);
        if (row < tile_end(end)) to[row % ROWS][column] = x[i];
    }
}

// Which rows and sums a warp has where those of keys and those of queries are computed side by
// side: a tile of rows, or `part` of the columns of the only one.
struct warp_tile {
    int tile, first, part;
    bool is_q;
};

template <int ROWS> __device__ __forceinline__ warp_tile own_tile(int t)
{
    const int warp = threadIdx.x / 32, own = warp % TILES, tile = ROWS == CHUNK ? own : t / 16;
    return {tile, 16 * tile, ROWS == CHUNK ? 0 : own, warp >= TILES};
}

// Tiles of columns a warp has, of N.
template <int ROWS, int N> constexpr int own_tiles = ROWS == CHUNK ? N : N / TILES;

// factor(row) times the sums of each row.
template <int N, typename F>
__device__ __forceinline__ void scale_rows(float (&sums)[N][4], F factor)
{
    const float top = factor(threadIdx.x % 32 / 4), low = factor(threadIdx.x % 32 / 4 + 8);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] = __fmul_rn(sums[n][i], i < 2 ? top : low);
}

// `read` and `seen` of a warp's rows.
template <typename T, int ROWS>
__device__ __forceinline__ void compare_rows(chunk_of<T, ROWS> &w, const warp_tile &own, int steps)
{
    constexpr int N = own_tiles<ROWS, CHUNK / 8>;
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
        if (own.is_q)
            w.seen[t % ROWS][j] = from_f32<T>(j <= t ? since * sum : 0.f);
        else
            w.read[j][t % ROWS] = j < t ? -w.beta[t] * (since * sum) : 0.f;
    });
}

// u of rows t to `end` from r, sixteen at a time; those before are there.
template <typename T, int ROWS>
__device__ __forceinline__ void solve(chunk_of<T, ROWS> &w, int t, int end)
{
    constexpr int GROUPS = THREADS / columns<T>, EACH = 16 / GROUPS;
    const int column = threadIdx.x % columns<T>, group = threadIdx.x / columns<T>;
    for (int b = t / 16 * 16; b < end; b += 16) {
        float(*r)[columns<T> + 4] = w.r + b % ROWS;
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
template <typename T, int N>
__device__ __forceinline__ void write_operand(T (*to)[columns<T> + PITCH], float (&S)[N][4])
{
    each_sum(S, [&](int key, int column, float &sum) {
        to[threadIdx.x / 32 * 16 + key][column] = from_f32<T>(sum);
    });
}

// S of the next border, from a chunk whose rows are all there; its keys are lost.
template <typename T, int ROWS, int N>
__device__ __forceinline__ void close_chunk(chunk_of<T, ROWS> &w, float (&S)[N][4])
{
    constexpr int V = wide<T>;
    const float end = w.G[CHUNK - 1], decay = expf(end);
    if (threadIdx.x < CHUNK) w.log_decay[threadIdx.x] = expf(end - w.G[threadIdx.x]);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < CHUNK * DIM / V; i += THREADS) {
        T *at = &w.k[i / (DIM / V)][i % (DIM / V) * V];
        float k[V];
        load<T, V>(k, at);
#pragma unroll
        for (int e = 0; e < V; e++) k[e] *= w.log_decay[i / (DIM / V)];
        store<T, V>(at, k);
    }
    __syncthreads();
    scale_rows(S, [&](int) { return decay; });
    multiply(S, turned(w.k[0] + threadIdx.x / 32 * 16, DIM + PITCH),
             plain(w.u[0], columns<T> + PITCH), TILES);
    write_operand<T>(w.S, S);
}

// Rows t to `end` of a chunk, the first of which is `row`, to out, or where that is NULL as far as
// u. All threads are done with the chunk behind it.
template <typename T, int ROWS, int N>
__device__ __forceinline__ void add_rows(chunk_of<T, ROWS> &w, float (&S)[N][4], T *out,
                                         const T *qkv, const source &f, int row, int t, int end)
{
    constexpr int M = own_tiles<ROWS, N>;
    const int steps = (f.key_dim + 15) / 16;
    const warp_tile own = own_tile<ROWS>(t);
    const bool takes_part = own.first < end && own.first + 16 > t && (out || !own.is_q);
    const int first = own.part * 8 * M; // column
    float sums[M][4];
    clear(sums);
    read_columns<ROWS, columns<T>>(w.r, f, t, end, [&](int i, int column) {
        return to_f32(qkv[(int64_t)(row + i - t) * f.width + f.value_at + column]);
    });
    read_rows(w, qkv, f, row, t, end);
    __syncthreads();
    if (takes_part) {
        multiply(sums, plain(own.is_q ? w.q[own.first % ROWS] : w.k[own.first], DIM + PITCH),
                 plain(w.S[0] + first, columns<T> + PITCH), steps);
        scale_rows(sums, [&](int i) { return expf(w.G[own.first + i]); });
        if (!own.is_q)
            each_sum(sums, [&](int i, int column, float &sum) {
                float &r = w.r[(own.first + i) % ROWS][first + column];
                r = w.beta[own.first + i] * __fsub_rn(r, sum);
            });
        compare_rows(w, own, steps);
    }
    __syncthreads();
    solve(w, t, end);
    if (takes_part && own.is_q) {
        multiply(sums, plain(w.seen[own.first % ROWS], CHUNK + PITCH),
                 plain(w.u[0] + first, columns<T> + PITCH), own.tile + 1);
        each_sum(sums, [&](int i, int c, float &sum) {
            const int at = own.first + i, column = f.first + first + c;
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

// In scratch a thread's sums have a place of their own.
template <int N> __device__ __forceinline__ void keep(float *to, float (&S)[N][4])
{
#pragma unroll
    for (int i = 0; i < 4 * N; i++) to[i * THREADS + threadIdx.x] = S[i / 4][i % 4];
}

template <int N> __device__ __forceinline__ void recall(float (&S)[N][4], const float *from)
{
#pragma unroll
    for (int i = 0; i < 4 * N; i++) S[i / 4][i % 4] = from[i * THREADS + threadIdx.x];
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

// S, and the n rows of the open chunk.
template <typename T, int ROWS, int N>
__device__ __forceinline__ void read_slot(chunk_of<T, ROWS> &w, float (&S)[N][4],
                                          const slot_parts &slot, const source &f, int n)
{
    each_sum(S, [&](int i, int c, float &sum) {
        const int key = threadIdx.x / 32 * 16 + i, column = f.first + c;
        sum = key < f.key_dim && column < f.head_dim ? slot.S[key * f.head_dim + column] : 0.f;
    });
    for (int first = threadIdx.x / 32; first < n; first += 4 * WARPS) {
        float k[4][DIM / 32];
#pragma unroll
        for (int i = 0; i < 4; i++)
            read_vector(k[i], slot.k + (first + i * WARPS) * f.key_dim,
                        first + i * WARPS < n ? f.key_dim : 0);
#pragma unroll
        for (int i = 0; i < 4 && first + i * WARPS < n; i++)
#pragma unroll
            for (int e = 0; e < DIM / 32; e++)
                w.k[first + i * WARPS][threadIdx.x % 32 + 32 * e] = from_f32<T>(k[i][e]);
    }
    if (threadIdx.x < n) w.G[threadIdx.x] = slot.G[threadIdx.x];
    read_columns<CHUNK, columns<T>>(w.u, f, 0, n, [&](int j, int column) {
        return from_f32<T>(slot.u[j * f.head_dim + column]);
    });
    write_operand<T>(w.S, S);
}

// S where it is another than the slot's, and u of the open chunk's rows t to `end`.
template <typename T, int ROWS, int N>
__device__ __forceinline__ void write_slot(const slot_parts &slot, const chunk_of<T, ROWS> &w,
                                           float (&S)[N][4], const source &f, bool moved, int t,
                                           int end)
{
    if (moved)
        each_sum(S, [&](int i, int c, float &sum) {
            const int key = threadIdx.x / 32 * 16 + i, column = f.first + c;
            if (key < f.key_dim && column < f.head_dim) slot.S[key * f.head_dim + column] = sum;
        });
    for (int i = threadIdx.x; i < (end - t) * columns<T>; i += THREADS) {
        const int j = t + i / columns<T>, column = f.first + i % columns<T>;
        if (column < f.head_dim) slot.u[j * f.head_dim + column] = to_f32(w.u[j][i % columns<T>]);
    }
}

// u of a block's rows t to `end`, (rows, columns) in scratch: from there, and to there.
template <typename T, int ROWS>
__device__ __forceinline__ void recall_rows(chunk_of<T, ROWS> &w, const T *u, int end)
{
    source all = {};
    all.head_dim = columns<T>;
    read_columns<CHUNK, columns<T>>(w.u, all, 0, end,
                                    [&](int j, int column) { return u[j * columns<T> + column]; });
}

template <typename T, int ROWS>
__device__ __forceinline__ void keep_rows(T *u, const chunk_of<T, ROWS> &w, int t, int end)
{
#pragma unroll 4
    for (int i = t * columns<T> + threadIdx.x; i < end * columns<T>; i += THREADS)
        u[i] = w.u[i / columns<T>][i % columns<T>];
}

// ---- forward ------------------------------------------------------------------------------------

// Rows first to `end`, of which the first comes behind n of the open chunk; returns how many that
// has then. each(t, end): rows t to `end` of a chunk are there.
template <typename T, int ROWS, int N, typename F>
__device__ __forceinline__ int run(chunk_of<T, ROWS> &w, float (&S)[N][4], T *out, const T *qkv,
                                   const source &f, int first, int end, int n, F each)
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
template <typename T, int ROWS>
__device__ __forceinline__ void run_unit(chunk_of<T, ROWS> &w, T *out, const T *qkv,
                                         const source &f, const delta_rows &b, const delta_shape &s,
                                         int seq, float *memory)
{
    const int first = b.query_start[seq], behind = b.query_start[seq + 1];
    const int end = delta_unit_end(b, seq), from = b.paged ? b.state_from[seq] : 0;
    const int position = b.paged ? b.positions[first] : 0;
    T *u = (T *)(memory + DIM * columns<T>);
    if (b.paged && b.state_slot[seq] < 0) {
        const int column = f.first + threadIdx.x;
        if (threadIdx.x < columns<T> && column < f.head_dim)
            out[((int64_t)first * f.n_heads + f.head) * f.head_dim + column] = from_f32<T>(0.f);
        return;
    }
    float S[columns<T> / 8][4];
    clear(S);
    int n = position % CHUNK, open = 0; // rows of the prefix's
    if (position > 0)
        read_slot(w, S, slot_of(b, from, s, f.head), f, n);
    else
        write_operand<T>(w.S, S);
    bool closed = position == 0;
    int known = n; // rows of u that the slot it came from has
    for (int next = seq; next < end; next++) {
        if (!b.paged && next > seq) {
            __syncthreads();
            recall(S, memory);
            write_operand<T>(w.S, S);
            recall_rows(w, u, n = open);
            read_rows(w, qkv, f, behind - n, 0, n);
        }
        n = run(w, S, out, qkv, f, b.query_start[next], b.query_start[next + 1], n,
                [&](int, int until) {
                    if (until < CHUNK) return;
                    closed = true;
                    known = 0;
                });
        if (b.paged && delta_leaves(b, next, end)) {
            const bool same = b.state_slot[next] == from && !closed;
            write_slot(slot_of(b, b.state_slot[next], s, f.head), w, S, f, !same, same ? known : 0,
                       n);
        } else if (!b.paged && next == seq && end > seq + 1) {
            keep(memory, S);
            keep_rows(u, w, 0, open = n);
        }
    }
}

template <typename T, int ROWS>
__global__ void __launch_bounds__(THREADS, ROWS < CHUNK     ? 3
                                           : sizeof(T) == 2 ? 2
                                                            : 1)
    delta_kernel(T *out, const T *qkv, const float *gates, const T *a_log, const T *dt_bias,
                 delta_rows b, delta_shape s, int slices, float *scratch)
{
    grid_begin();
    extern __shared__ __align__(16) char shared[];
    chunk_of<T, ROWS> &w = *(chunk_of<T, ROWS> *)shared;
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads * slices; unit += gridDim.x) {
        const unit_of own = unit_at(unit, s, slices);
        if (!delta_begins(b, own.seq)) continue;
        const source f = source_of(s, gates, to_f32(a_log[own.head]), to_f32(dt_bias[own.head]),
                                   own.head, own.slice * columns<T>);
        run_unit(w, out, qkv, f, b, s, own.seq, scratch + blockIdx.x * 2 * DIM * columns<T>);
        __syncthreads();
    }
}

// k and G of the open chunk's rows to the slots, which all slices of all heads have read by now.
// Block x is the sequence that begins a unit, block y the key head.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    keep_kernel(const T *qkv, const float *gates, const T *a_log, const T *dt_bias, delta_rows b,
                delta_shape s)
{
    grid_begin();
    const int seq = blockIdx.x, each = s.n_heads / s.n_key_heads, lane = threadIdx.x % 32;
    if (b.state_slot[seq] < 0 || !delta_begins(b, seq)) return;
    const int end = delta_unit_end(b, seq), row = b.query_start[seq], first = b.positions[row];
    // The first sequence's last, since all read what its slot held.
    for (int next = end - 1; next >= seq; next--) {
        if (!delta_leaves(b, next, end)) continue;
        const int behind = first + b.query_start[next + 1] - row;
        const int border = behind / CHUNK * CHUNK, n = behind - border;
        const int old = max(first - border, 0); // rows that are of earlier batches
        const bool same = b.state_slot[next] == b.state_from[seq];
        for (int i = threadIdx.x; i < each; i += THREADS) {
            const int head = blockIdx.y * each + i;
            const source f =
                source_of(s, gates, to_f32(a_log[head]), to_f32(dt_bias[head]), head, 0);
            const float *from = slot_of(b, b.state_from[seq], s, head).G;
            float *to = slot_of(b, b.state_slot[next], s, head).G, G = 0.f;
            for (int j = 0; j < n; j++)
                to[j] = G =
                    j < old ? from[j] : __fadd_rn(G, log_decay_of(f, row + border + j - first));
        }
        const float *from = slot_of(b, b.state_from[seq], s, blockIdx.y * each).k;
        float *to = slot_of(b, b.state_slot[next], s, blockIdx.y * each).k;
        for (int j = (same ? old : 0) + threadIdx.x / 32; j < n; j += WARPS) {
            float k[DIM / 32];
            if (j < old) {
                read_vector(k, from + j * s.key_dim, s.key_dim);
            } else {
                const int width = 2 * s.n_key_heads * s.key_dim + s.n_heads * s.head_dim;
                read_vector(k,
                            qkv + (int64_t)(row + border + j - first) * width +
                                (s.n_key_heads + blockIdx.y) * s.key_dim,
                            s.key_dim);
                const float factor = inverse_length(k);
                for (int i = 0; i < DIM / 32; i++) k[i] = to_f32(from_f32<T>(k[i] * factor));
            }
            for (int i = 0; i < DIM / 32; i++)
                if (lane + 32 * i < s.key_dim) to[j * s.key_dim + lane + 32 * i] = k[i];
        }
        __syncthreads();
    }
}

static int blocks_of(struct device *dev, const struct delta_shape *s, int n_seqs, int per_sm)
{
    const int units = n_seqs * s->n_heads * slices_of(s), most = cuda_use(dev)->n_sms * per_sm;
    return units < most ? units : most;
}

#define BLOCKS_PER_SM 2 // of the forward pass of packed batches

template <typename T> static constexpr int64_t begin_floats = 2 * DIM *columns<T>;

void cuda_delta_rule(struct device *dev, void *out, const struct delta_args *a,
                     const struct delta_shape *s)
{
    const struct delta_rows rows = delta_rows_of(&a->batch);
    if (rows.n_tokens <= 0 || !delta_takes(dev, a->batch.view)) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        const int units = rows.n_seqs * s->n_heads * slices_of(s);
        const int blocks = rows.paged ? units : blocks_of(dev, s, rows.n_seqs, BLOCKS_PER_SM);
        float *scratch = NULL; // a paged batch is computed without: its step may be being captured
        if (!rows.paged &&
            !(scratch = (float *)cuda_workspace(dev, blocks * begin_floats<T> * sizeof(float))))
            return;
        const auto launch = [&](auto kernel, size_t shared) {
            cuda_launch(dev, "delta_rule", kernel, blocks, THREADS, shared, out, a->qkv, a->gates,
                        a->a_log, a->dt_bias, rows, *s, slices_of(s), scratch);
        };
        if (rows.paged && a->batch.view->max_query == 1)
            launch(delta_kernel<T, 16>, sizeof(chunk_of<T, 16>));
        else
            launch(delta_kernel<T, CHUNK>, sizeof(chunk_of<T, CHUNK>));
        if (rows.paged)
            cuda_launch(dev, "delta_rule", keep_kernel<T>, dim3(rows.n_seqs, s->n_key_heads),
                        THREADS, 0, a->qkv, a->gates, a->a_log, a->dt_bias, rows, *s);
    });
}

// ---- backward -----------------------------------------------------------------------------------

// Scratch: each block's own, and what all write into. Where things begin, in floats.
struct back_memory {
    float *at;
    int64_t block; // a block's, of which:
    int64_t S, u;  // S at every border, as keep() has it; (positions, columns) u of every position
    // What sequences add to what they go on from: (CHUNK, columns) of u, (CHUNK, DIM) of k and
    // (CHUNK) of the log decays of the open chunk's rows, and of S before it.
    int64_t shared_u, shared_k, shared_log_decay, shared_S;
    int64_t dvectors; // (T, n_heads, slices, 2, key_dim): of q and k as the rule takes them
    int64_t dgates;   // (T, n_heads, slices, 2): of what beta is made of, and of the log decay
    int64_t shared;   // (T, n_heads, 2): a row's part of the gradients of a_log and dt_bias
    int64_t end;
};

static struct back_memory lay_out_back(const struct delta_shape *s, int blocks, int rows,
                                       int max_context)
{
    const int64_t width = s->dt == DT_BF16 ? columns<bf16> : columns<float>, matrix = DIM * width;
    const int64_t chunks = max_context / CHUNK + 1, heads = (int64_t)rows * s->n_heads;
    struct back_memory m = {};
    m.S = 0;
    m.u = m.S + (chunks + 1) * matrix;
    m.shared_u = m.u + chunks * CHUNK * width;
    m.shared_k = m.shared_u + CHUNK * width;
    m.shared_log_decay = m.shared_k + CHUNK * DIM;
    m.shared_S = m.shared_log_decay + CHUNK;
    m.block = m.shared_S + matrix;
    m.dvectors = m.block * blocks;
    m.dgates = m.dvectors + heads * slices_of(s) * 2 * s->key_dim;
    m.shared = m.dgates + heads * slices_of(s) * 2;
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
    const int n_sms = cuda_use(dev)->n_sms;
    const struct back_memory m = lay_out_back(s, n_sms, rows, max_context);
    const size_t back = m.end * sizeof(float), conv = conv_scratch(s, rows);
    const size_t forward = (size_t)n_sms * BLOCKS_PER_SM * begin_floats<bf16> * sizeof(float);
    return max(max(back, conv), forward);
}

enum { OF_SEEN, OF_READ, OF_QUERY, OF_KEY, OF_BORDER, ROW_PARTS };

// Sums over rows and columns of a chunk are of warps, then added in order.
template <typename T> struct back_chunk_of : chunk_of<T, CHUNK> {
    T dS[DIM][columns<T> + PITCH]; // behind the chunk
    T dout[CHUNK][columns<T> + PITCH], du[CHUNK][columns<T> + PITCH];
    T dseen[CHUNK][CHUNK + PITCH], dread[CHUNK][CHUNK + PITCH]; // of the products of q or k and k
    float row_parts[ROW_PARTS][2][CHUNK], column_parts[2][TILES][CHUNK];
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

// The gradient of `seen` or `read` from (rows of dout or of du) times u, and what G gets of it.
template <typename T>
__device__ __forceinline__ void compare_back(back_chunk_of<T> &w, bool is_q, int n)
{
    const int tile = own_tile<CHUNK>(0).tile, first = 16 * tile, half = own_tile<CHUNK>(0).is_q;
    const int lane = threadIdx.x % 32;
    if (first >= n) return;
    float sums[CHUNK / 16][4], rows[2] = {}, column_sums[CHUNK / 16][2] = {};
    clear(sums);
    multiply(sums, plain((is_q ? w.dout : w.du)[first], columns<T> + PITCH),
             turned(w.u[32 * half], columns<T> + PITCH), columns<T> / 16);
    int i = 0;
    each_sum(sums, [&](int row, int column, float &sum) {
        const int t = first + row, j = 32 * half + column;
        float part = 0.f;
        if (is_q && j <= t) {
            part = sum * to_f32(w.seen[t][j]);
            sum *= expf(w.G[t] - w.G[j]);
        } else if (!is_q && j < t) {
            part = sum * w.read[j][t];
            sum *= -w.beta[t] * expf(w.G[t] - w.G[j]);
        } else {
            sum = 0.f;
        }
        (is_q ? w.dseen : w.dread)[t][j] = from_f32<T>(sum);
        rows[i % 4 / 2] += part;
        column_sums[i / 4][i % 2] += part;
        i++;
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = lanes_sum<4>(rows[r]);
        if (lane % 4 == 0)
            w.row_parts[is_q ? OF_SEEN : OF_READ][half][first + lane / 4 + 8 * r] = sum;
    }
#pragma unroll
    for (int c = 0; c < CHUNK / 8; c++) {
        float sum = column_sums[c / 2][c % 2];
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
        if (lane / 4 == 0)
            w.column_parts[is_q ? OF_SEEN : OF_READ][tile]
                          [32 * half + c / 2 * 8 + lane * 2 + c % 2] = sum;
    }
}

// The sums of u's gradient in r from the last row to row `own`, sixteen at a time; rows before get
// theirs of these.
template <typename T>
__device__ __forceinline__ void solve_back(back_chunk_of<T> &w, int own, int n)
{
    constexpr int GROUPS = THREADS / columns<T>, EACH = 16 / GROUPS;
    const int column = threadIdx.x % columns<T>, group = threadIdx.x / columns<T>;
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

// Adds up sums times vectors[row][column] over a warp's columns, for its half of the columns.
template <typename T, int N, int P>
__device__ __forceinline__ void row_products(float (*to)[CHUNK], float (&sums)[N][4],
                                             const T (*vectors)[P], int first, int half)
{
    float rows[2] = {};
    int i = 0;
    each_sum(sums, [&](int row, int column, float &sum) {
        rows[i++ % 4 / 2] += sum * to_f32(vectors[first + row][64 * half + column]);
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = lanes_sum<4>(rows[r]);
        if (threadIdx.x % 4 == 0) to[half][first + threadIdx.x % 32 / 4 + 8 * r] = sum;
    }
}

// The gradients of a chunk's rows from those of their outputs and of S behind it, dS, which becomes
// that of S before it: all that is not the sequence's goes to what is shared. takes: what is shared
// is added to the sequence's rows.
template <typename T, int N>
__device__ void back_chunk(back_chunk_of<T> &w, float (&dS)[N][4], const back_arrays<T> &to,
                           const back_memory &m, float *memory, const source &f, int slices,
                           const chunk_rows &c, const float *S_before, const T *u, bool takes)
{
    constexpr int C = columns<T>;
    const warp_tile own = own_tile<CHUNK>(0);
    const int steps = (f.key_dim + 15) / 16, half = own.is_q, n = c.n, tiles = tile_end(n) / 16;
    const bool closes = n == CHUNK, takes_part = own.first < n;
    float *shared_u = memory + m.shared_u, *shared_k = memory + m.shared_k,
          *shared_log_decay = memory + m.shared_log_decay;
    __syncthreads();
    {
        float S[N][4];
        recall(S, S_before);
        write_operand<T>(w.S, S);
    }
    write_operand<T>(w.dS, dS);
    recall_rows(w, u, n);
    read_columns<CHUNK, C>(w.dout, f, 0, n, [&](int t, int column) {
        const int64_t row = row_at(c, t);
        return t < c.own ? T(0.f) : to.dout[(row * f.n_heads + f.head) * f.head_dim + column];
    });
    if (c.own > 0) read_rows<T, CHUNK>(w, to.qkv, f, c.shared - c.own, 0, c.own);
    read_rows<T, CHUNK>(w, to.qkv, f, c.first, c.own, n);
    __syncthreads();
    const float last = w.G[n - 1];
    if (threadIdx.x < CHUNK) {
        w.decay[threadIdx.x] = expf(w.G[threadIdx.x]);
        w.since[threadIdx.x] = expf(last - w.G[threadIdx.x]);
    }
    if (takes_part) compare_rows<T, CHUNK>(w, own, steps);
    __syncthreads();
    if (takes_part) {
        float sums[N / 2][4];
        clear(sums);
        if (closes) {
            multiply(sums, plain(w.k[own.first], DIM + PITCH),
                     plain(w.dS[0] + half * (C / 2), C + PITCH), steps);
            scale_rows(sums, [&](int j) { return w.since[own.first + j]; });
        }
        multiply(sums, turned(w.seen[own.first] + own.first, CHUNK + PITCH),
                 plain(w.dout[own.first] + half * (C / 2), C + PITCH), tiles - own.tile);
        each_sum(sums, [&](int row, int column, float &sum) {
            const int j = own.first + row, at = half * (C / 2) + column;
            w.r[j][at] = sum + (takes && j < n ? shared_u[j * C + at] : 0.f);
        });
        compare_back(w, true, n);
    }
    __syncthreads();
    solve_back(w, c.own, n);
    for (int t = threadIdx.x / 32; t < tile_end(n); t += WARPS) {
        const int row = row_at(c, t);
        const bool is_own = t >= c.own && t < n;
        float dbeta = 0.f;
#pragma unroll
        for (int i = 0; i < C; i += 32) {
            const int at = i + threadIdx.x % 32, column = f.first + at;
            const float du = w.r[t][at];
            w.du[t][at] = from_f32<T>(is_own ? du : 0.f);
            dbeta = fmaf(du, to_f32(w.u[t][at]), dbeta);
            if (t < c.own) shared_u[t * C + at] += du;
            if (is_own && column < f.head_dim)
                to.dqkv[(int64_t)row * f.width + f.value_at + column] = from_f32<T>(w.beta[t] * du);
        }
        dbeta = lanes_sum(dbeta);
        if (is_own && threadIdx.x % 32 == 0)
            m.at[m.dgates + (((int64_t)row * f.n_heads + f.head) * slices + f.first / C) * 2] =
                dbeta * (1.f - w.beta[t]);
    }
    __syncthreads();
    compare_back(w, false, n);
    __syncthreads();
    if (takes_part) {
        const auto store = [&](float(&sums)[DIM / 16][4], int which) {
            each_sum(sums, [&](int i, int column, float &sum) {
                const int t = own.first + i, key = 64 * half + column;
                if (which && t < c.own)
                    shared_k[t * DIM + key] += sum;
                else if (t >= c.own && t < n && key < f.key_dim)
                    m.at[m.dvectors +
                         ((((int64_t)row_at(c, t) * f.n_heads + f.head) * slices + f.first / C) *
                              2 +
                          which) *
                             f.key_dim +
                         key] = sum + (which && takes ? shared_k[t * DIM + key] : 0.f);
            });
        };
        const auto S_half = turned(w.S[64 * half], C + PITCH);
        const auto k_half = plain(w.k[0] + 64 * half, DIM + PITCH);
        float sums[DIM / 16][4];
        clear(sums);
        multiply(sums, plain(w.dout[own.first], C + PITCH), S_half, C / 16);
        scale_rows(sums, [&](int t) { return w.decay[own.first + t]; });
        row_products(w.row_parts[OF_QUERY], sums, w.q, own.first, half);
        multiply(sums, plain(w.dseen[own.first], CHUNK + PITCH), k_half, own.tile + 1);
        store(sums, 0);
        clear(sums);
        multiply(sums, plain(w.du[own.first], C + PITCH), S_half, C / 16);
        scale_rows(sums, [&](int t) { return -w.beta[own.first + t] * w.decay[own.first + t]; });
        row_products(w.row_parts[OF_KEY], sums, w.k, own.first, half);
        if (closes) {
            float behind[DIM / 16][4];
            clear(behind);
            multiply(behind, plain(w.u[own.first], C + PITCH), turned(w.dS[64 * half], C + PITCH),
                     C / 16);
            scale_rows(behind, [&](int j) { return w.since[own.first + j]; });
            row_products(w.row_parts[OF_BORDER], behind, w.k, own.first, half);
#pragma unroll
            for (int i = 0; i < DIM / 4; i++) sums[i / 4][i % 4] += behind[i / 4][i % 4];
        }
        multiply(sums, plain(w.dread[own.first], CHUNK + PITCH), k_half, own.tile + 1);
        multiply(sums, turned(w.dread[own.first] + own.first, CHUNK + PITCH),
                 plain(w.k[own.first] + 64 * half, DIM + PITCH), tiles - own.tile);
        multiply(sums, turned(w.dseen[own.first] + own.first, CHUNK + PITCH),
                 plain(w.q[own.first] + 64 * half, DIM + PITCH), tiles - own.tile);
        store(sums, 1);
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < tile_end(n) * C; i += THREADS) {
        T &dout = w.dout[i / C][i % C], &du = w.du[i / C][i % C];
        dout = from_f32<T>(w.decay[i / C] * to_f32(dout));
        du = from_f32<T>(-w.beta[i / C] * w.decay[i / C] * to_f32(du));
    }
    float dlast = 0.f;
    if (closes) {
        const float decay = w.decay[n - 1];
        each_sum(dS, [&](int key, int column, float &sum) {
            sum *= decay;
            dlast = fmaf(sum, to_f32(w.S[threadIdx.x / 32 * 16 + key][column]), dlast);
        });
    }
    dlast = block_sum(dlast, w.sums);
    const int first_key = threadIdx.x / 32 * 16;
    multiply(dS, turned(w.q[0] + first_key, DIM + PITCH), plain(w.dout[0], C + PITCH), tiles);
    multiply(dS, turned(w.k[0] + first_key, DIM + PITCH), plain(w.du[0], C + PITCH), tiles);
    for (int t = threadIdx.x; t < n; t += THREADS) {
        float sum = 0.f;
        for (int i = 0; i < OF_BORDER; i++) sum += w.row_parts[i][0][t] + w.row_parts[i][1][t];
        for (int i = 0; i < 2; i++)
            for (int tile = t / 16; tile < tiles; tile++) sum -= w.column_parts[i][tile][t];
        w.log_decay[t] = sum;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    double dG = dlast; // sums of which little stays
    for (int t = 0; t < n && closes; t++)
        dG += w.row_parts[OF_BORDER][0][t] + w.row_parts[OF_BORDER][1][t];
    for (int t = n - 1; t >= 0; t--) {
        dG += w.log_decay[t];
        if (closes) dG -= w.row_parts[OF_BORDER][0][t] + w.row_parts[OF_BORDER][1][t];
        const float shared = takes ? shared_log_decay[t] : 0.f;
        if (t < c.own)
            shared_log_decay[t] += (float)dG;
        else
            m.at[m.dgates +
                 (((int64_t)row_at(c, t) * f.n_heads + f.head) * slices + f.first / C) * 2 + 1] =
                (float)dG + shared;
    }
}

// The sequences of a unit go forward, the first of them before those behind it; and back, the first
// of them last.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    delta_back_kernel(back_arrays<T> to, back_memory m, const float *gates, const T *a_log,
                      const T *dt_bias, delta_rows b, delta_shape s, int slices)
{
    grid_begin();
    constexpr int C = columns<T>, N = C / 8;
    constexpr int64_t MATRIX = DIM * C;
    extern __shared__ __align__(16) char shared_bytes[];
    back_chunk_of<T> &w = *(back_chunk_of<T> *)shared_bytes;
    float *memory = m.at + (int64_t)blockIdx.x * m.block, *shared_S = memory + m.shared_S;
    float *kept = memory + m.S;
    T *u = (T *)(memory + m.u);
    for (int unit = blockIdx.x; unit < b.n_seqs * s.n_heads * slices; unit += gridDim.x) {
        const unit_of own = unit_at(unit, s, slices);
        if (!delta_begins(b, own.seq)) continue;
        const source f = source_of(s, gates, to_f32(a_log[own.head]), to_f32(dt_bias[own.head]),
                                   own.head, own.slice * C);
        const int n_seqs = delta_unit_end(b, own.seq) - own.seq;
        const int behind = b.query_start[own.seq + 1], rows = behind - b.query_start[own.seq];
        const int open = rows % CHUNK, whole = rows - open;
        float S[N][4], dS[N][4], shared[N][4];
        if (n_seqs > 1) {
            for (int64_t i = m.shared_u + threadIdx.x; i < m.shared_S; i += THREADS)
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
                    recall(S, kept + chunk * MATRIX);
                keep(kept + chunk * MATRIX, S);
                write_operand<T>(w.S, S);
                if (!first) {
                    recall_rows(w, u + (int64_t)whole * C, open);
                    read_rows<T, CHUNK>(w, to.qkv, f, behind - open, 0, open);
                }
                run<T, CHUNK>(w, S, NULL, to.qkv, f, b.query_start[seq], b.query_start[seq + 1],
                              before % CHUNK, [&](int t, int until) {
                                  keep_rows<T, CHUNK>(u + (int64_t)chunk * CHUNK * C, w, t, until);
                                  if (until == CHUNK) keep(kept + ++chunk * MATRIX, S);
                              });
                if (n_seqs > 1 && first) continue;
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
template <typename T>
__global__ void gates_back_kernel(T *dgates, back_memory m, const float *gates, const T *a_log,
                                  const T *dt_bias, int rows, int n_heads, int slices)
{
    grid_begin();
    const int64_t i = (int64_t)blockIdx.x * SHARED_THREADS + threadIdx.x;
    if (i >= (int64_t)rows * n_heads) return;
    const int head = i % n_heads;
    const int64_t at = i / n_heads * 2 * n_heads + head;
    float db = 0.f, dlog_decay = 0.f;
    for (int slice = 0; slice < slices; slice++) {
        db += m.at[m.dgates + (i * slices + slice) * 2];
        dlog_decay += m.at[m.dgates + (i * slices + slice) * 2 + 1];
    }
    const float a = gates[at + n_heads] + to_f32(dt_bias[head]);
    const float dexponent = -dlog_decay * expf(to_f32(a_log[head])); // of softplus(a)
    const float da = dexponent * sigmoid(a);
    dgates[at] = from_f32<T>(db);
    dgates[at + n_heads] = from_f32<T>(da);
    m.at[m.shared + i * 2] = dexponent * softplus_of(a);
    m.at[m.shared + i * 2 + 1] = da;
}

// From the gradients of a row's q (block z 0) or k (1) as the value heads of a key head (block y)
// take it, by slices, to that of what it was made of. A warp's.
template <typename T>
__global__ void length_back_kernel(T *dqkv, const T *qkv, const float *dvectors, delta_shape s,
                                   int slices)
{
    grid_begin();
    int each = s.n_heads / s.n_key_heads * slices, lane = threadIdx.x;
    int width = 2 * s.n_key_heads * s.key_dim + s.n_heads * s.head_dim;
    int64_t at =
        (int64_t)blockIdx.x * width + (blockIdx.z * s.n_key_heads + blockIdx.y) * s.key_dim;
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
    const int n = rows.n_tokens, slices = slices_of(s);
    if (n <= 0 || !delta_takes(dev, a->batch.view)) return;
    const int blocks = blocks_of(dev, s, rows.n_seqs, 1);
    struct back_memory m = lay_out_back(s, blocks, n, a->batch.view->max_context);
    m.at = (float *)cuda_workspace(dev, m.end * sizeof(float));
    if (!m.at) return;
    with_type(s->dt, [&](auto t) {
        using T = decltype(t);
        const back_arrays<T> arrays = {(T *)grads->qkv, (const T *)dout, (const T *)a->qkv};
        cuda_launch(dev, "delta_rule_back", delta_back_kernel<T>, blocks, THREADS,
                    sizeof(back_chunk_of<T>), arrays, m, a->gates, a->a_log, a->dt_bias, rows, *s,
                    slices);
        cuda_launch(dev, "delta_rule_back", length_back_kernel<T>, dim3(n, s->n_key_heads, 2), 32,
                    0, grads->qkv, a->qkv, (m.at + m.dvectors), *s, slices);
        cuda_launch(dev, "delta_rule_back", gates_back_kernel<T>,
                    ceil_div((int64_t)n * s->n_heads, SHARED_THREADS), SHARED_THREADS, 0,
                    grads->gates, m, a->gates, a->a_log, a->dt_bias, n, s->n_heads, slices);
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
    int window; // rows of a slot's
    bool bare;  // no SiLU behind the sum
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
    int position = a.b.positions[first] - (first - row);
    if (position < 0) return 0.f;
    return a.b.states[a.b.state_from[s] * a.b.slot_elements + position % a.window * a.width + c];
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
    const int end = delta_unit_end(a.b, s), first = a.b.query_start[s];
    const int position = a.b.positions[first];
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

void cuda_short_conv(struct device *dev, void *y, const struct conv_args *a,
                     const struct delta_shape *s)
{
    const struct conv_rows rows = {delta_rows_of(&a->batch), a->x_stride,
                                   delta_conv_width(s),      s->taps,
                                   delta_window(s),          delta_is_conv(s)};
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
    const struct conv_rows rows = {
        delta_rows_of(&a->batch), a->x_stride, delta_conv_width(s), s->taps, 0, delta_is_conv(s)};
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
