/* lora.cu: low-rank adapters, in three steps over h (parts, rows, max_rank) f32: `shrink` sums a
 * row's wide vector against each of rank directions, `expand` spreads such an h back over a row's
 * columns, `outer` adds up the factors' gradients. A row's sums run in an order of their own, so
 * that it has the same bits in any batch.
 *
 * A step's kernel goes over tiles of ROWS rows. A tile is computed once for each adapter that its
 * rows have, and of that the rows that have it are stored: so a row has the same bits in any batch.
 * What the steps read is large (the rows' vectors) and what they multiply by is small, so in bf16
 * each reads its rows once, in 16-byte accesses straight into the fragments of mma m16n8k16: which
 * element is which index of a sum does not matter as long as both sides agree, and the columns of a
 * result may have any order. h goes into mma as two bf16, of which the second is what the first
 * leaves. `shrink` gives each of its warps every eighth 64 elements and adds up the warps' sums in
 * their order.
 *
 * In f32 a tile's sums run on ordinary units. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/tensor.cuh"
#include "kernels/dropout.h"

#define THREADS       256
#define WARPS         (THREADS / 32)
#define ROWS          16 // of a tile: M of mma
#define RANKS         16 // directions that a block of shrink or outer has: two tiles of N
#define COLUMNS       64 // of a warp where rows are few, and of a block of outer
#define FEWER_COLUMNS 32 // of a warp of expand
#define OUTER_THREADS 512
#define OUTER_WARPS   (OUTER_THREADS / 32)
#define LONG          4096 // sums of few rows, that few blocks have: more of it is loaded at once
#define FEW_ROWS      128  // for which one kernel is quicker than two,
#define FEW_RANKS     64   // of so many, since each block computes all
#define SLICES        8    // of the rows that a gradient sums: else too few blocks have work
#define MANY_ROWS     1024

INLINE int adapter_of(const lora_args &l, int row)
{
    return !l.adapter ? 0 : l.adapter[l.row ? l.row[row] : row];
}

// What dropout makes of columns 4 c .. 4 c + 3 of a row of x.
INLINE void dropped(float (&ret)[4], const lora_args &l, int part, int row, int c)
{
    const int at = l.row ? l.row[row] : row;
    dropout_factors(&l.dropout, part, l.dropout.sample[at], l.dropout.position[at], c, ret);
}

// ---- tiles -------------------------------------------------------------------------------------

// `outer` sums the rows in so many slices, each (columns of all parts, max_rank) f32.
static int lora_slices(int rows, int max_rank)
{
    return rows < MANY_ROWS ? 1 : max(1, SLICES * 16 / max(max_rank, 16));
}

INLINE uint32_t pair_of(bf16 low, bf16 high)
{
    return (uint32_t)__bfloat16_as_ushort(low) | (uint32_t)__bfloat16_as_ushort(high) << 16;
}

// The lower halves of two pairs as one, and the upper.
INLINE uint32_t lows(uint32_t a, uint32_t b)
{
    return __byte_perm(a, b, 0x5410);
}
INLINE uint32_t highs(uint32_t a, uint32_t b)
{
    return __byte_perm(a, b, 0x7632);
}

// N elements from x[at] on as pairs, zeros from x[n] on. packed: x + at is aligned to all of them,
// or to 16 bytes. FULL: it is, and they are there.
template <int N, bool FULL = false>
INLINE void load_pairs(uint32_t (&ret)[N / 2], const bf16 *x, int at, int n, bool packed)
{
    constexpr int V = N < 8 ? N : 8;
    if (FULL || (packed && at + N <= n)) {
#pragma unroll
        for (int i = 0; i < N / V; i++) {
            const pack<uint32_t, V / 2> p =
                *reinterpret_cast<const pack<uint32_t, V / 2> *>(x + at + i * V);
            unrolled<V / 2>([&](int e) { ret[i * V / 2 + e] = p.at[e]; });
        }
        return;
    }
    const bf16 zero = __ushort_as_bfloat16(0);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        ret[i] = pair_of(at + 2 * i < n ? x[at + 2 * i] : zero,
                         at + 2 * i + 1 < n ? x[at + 2 * i + 1] : zero);
}

// The same of rows (stride elements apart) of which `have` are there (FULL: all): ret_low has
// column `at` of rows 2 i and 2 i + 1 in its i-th pair, ret_high column at + 1.
template <int N, bool FULL = false>
INLINE void load_across(uint32_t (&ret_low)[N / 2], uint32_t (&ret_high)[N / 2], const bf16 *x,
                        int64_t stride, int have, int at, int n, bool packed)
{
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        uint32_t a[1] = {0}, b[1] = {0};
        if (FULL || 2 * i < have) load_pairs<2, FULL>(a, x + 2 * i * stride, at, n, packed);
        if (FULL || 2 * i + 1 < have)
            load_pairs<2, FULL>(b, x + (2 * i + 1) * stride, at, n, packed);
        ret_low[i] = lows(a[0], b[0]);
        ret_high[i] = highs(a[0], b[0]);
    }
}

// x and y as a pair of bf16, and what these leave of them as another.
INLINE void split(uint32_t &ret_high, uint32_t &ret_low, float x, float y)
{
    const float a = to_f32(from_f32<bf16>(x)), b = to_f32(from_f32<bf16>(y));
    ret_high = pack2(a, b);
    ret_low = pack2(x - a, y - b);
}

// A bit for each adapter that rows base .. end - 1 (at most ROWS) have, that of the first such row;
// ret_of: the adapter of the row with this lane's number, -1: none. For all lanes of a warp.
INLINE uint32_t tile_adapters(const lora_args &l, int base, int end, int &ret_of)
{
    const int lane = threadIdx.x % 32;
    ret_of = lane < end - base ? adapter_of(l, base + lane) : -1;
    const uint32_t alike = __match_any_sync(~0u, ret_of);
    return __ballot_sync(~0u, ret_of >= 0 && !(alike & ((1u << lane) - 1)));
}

// What a warp has of the sums of shrink_tile(): a lane's are of rows g and g + 8, at x0 and x1, and
// of directions j0 + 2 g and the one after it. packed: rows of x are aligned to 16 bytes. FULL:
// they are, n is a multiple of 64, and of the gradient (BACK) the rank of 2; directions from the
// rank on then have any sums. AT_ONCE: steps of 64 elements whose loads are under way together.
template <bool BACK, bool FULL, int AT_ONCE>
INLINE void shrink_sums(float (&sum)[2][4], const bf16 *x0, const bf16 *x1, int n,
                        const lora_factors &f, int j0, bool packed)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int j = FULL && BACK ? min(j0 + 2 * g, f.rank - 2) : j0 + 2 * g;
#pragma unroll AT_ONCE
    for (int k = warp * 64; k < n; k += WARPS * 64) {
        const int c = k + t * 16;
        uint32_t a0[8], a1[8], w[2][8];
        load_pairs<16, FULL>(a0, x0, c, n, packed);
        load_pairs<16, FULL>(a1, x1, c, n, packed);
        if (BACK) {
            load_across<16, FULL>(w[0], w[1], (const bf16 *)f.b + (int64_t)c * f.rank, f.rank,
                                  n - c, j, f.rank, f.rank % 2 == 0);
        } else {
            unrolled<2>([&](int i) {
                load_pairs<16, FULL>(w[i], (const bf16 *)f.a + (int64_t)min(j + i, f.rank - 1) * n,
                                     c, n, packed);
            });
        }
#pragma unroll
        for (int q = 0; q < 8; q += 2) {
            const uint32_t a[4] = {a0[q], a1[q], a0[q + 1], a1[q + 1]};
            mma(sum[0], a, w[0][q], w[0][q + 1]);
            mma(sum[1], a, w[1][q], w[1][q + 1]);
        }
    }
}

// The same in f32; directions from the rank on have any sums.
template <bool BACK, bool FULL, int AT_ONCE>
INLINE void shrink_sums(float (&sum)[2][4], const float *x0, const float *x1, int n,
                        const lora_factors &f, int j0, bool)
{
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    const float *weights = (const float *)(BACK ? f.b : f.a);
    for (int k = warp * 64; k < n; k += WARPS * 64)
#pragma unroll 4
        for (int c = k; c < min(k + 64, n); c++)
            unrolled<2, 2>([&](int i, int e) {
                const int j = min(j0 + 4 * t + 2 * e + i, f.rank - 1);
                const float w = weights[BACK ? (int64_t)c * f.rank + j : (int64_t)j * n + c];
                sum[i][e] = fmaf(x0[c], w, sum[i][e]);
                sum[i][2 + e] = fmaf(x1[c], w, sum[i][2 + e]);
            });
}

// h, or of the gradient (BACK) dy b, of rows base .. end - 1 at x (stride): returns that of the
// tile's row threadIdx.x / RANKS and direction j0 + threadIdx.x % RANKS. A warp takes 64 elements
// of a vector at a time, a lane 16 of two rows. packed, full: as in shrink_sums().
template <bool BACK, int AT_ONCE, typename T>
INLINE float shrink_tile(float (&sums)[WARPS][ROWS][RANKS], const T *x, int64_t stride, int n,
                         int base, int end, const lora_factors &f, int j0, bool packed, bool full)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const T *x0 = x + min(base + g, end - 1) * stride,
            *x1 = x + min(base + g + 8, end - 1) * stride;
    float sum[2][4] = {}, all = 0;
    if (full && (!BACK || f.rank % 2 == 0))
        shrink_sums<BACK, true, AT_ONCE>(sum, x0, x1, n, f, j0, packed);
    else
        shrink_sums<BACK, false, AT_ONCE>(sum, x0, x1, n, f, j0, packed);
    __syncthreads(); // sums were read
    unrolled<2, 4>(
        [&](int i, int e) { sums[warp][g + e / 2 * 8][4 * t + e % 2 * 2 + i] = sum[i][e]; });
    __syncthreads();
    unrolled<WARPS>([&](int w) { all += sums[w][threadIdx.x / RANKS][threadIdx.x % RANKS]; });
    return all;
}

template <typename T, bool BACK>
__global__ void __launch_bounds__(THREADS)
    shrink_kernel(float *h, const T *x, int part0, bool packed, bool full, const lora_args l)
{
    __shared__ float sums[WARPS][ROWS][RANKS];
    grid_begin();
    const int part = part0 + blockIdx.y, j0 = blockIdx.z * RANKS;
    const int n = BACK ? l.first[part + 1] - l.first[part] : l.k;
    const int stride = BACK ? l.first[l.n_parts] : l.k;
    const int base = blockIdx.x * ROWS, end = min(base + ROWS, l.rows);
    const int row = base + threadIdx.x / RANKS, j = j0 + threadIdx.x % RANKS;
    int of;
    if (BACK) x += l.first[part];
    for (uint32_t todo = tile_adapters(l, base, end, of); todo; todo &= todo - 1) {
        const int adapter = __shfl_sync(~0u, of, __ffs(todo) - 1);
        const lora_factors f = l.factors[part * l.n_adapters + adapter];
        if (!f.a || j0 >= f.rank) continue;
        const float all = shrink_tile<BACK, 2>(sums, x, stride, n, base, end, f, j0, packed, full);
        if (row < end && adapter_of(l, row) == adapter && j < f.rank)
            h[((int64_t)part * l.rows + row) * l.max_rank + j] =
                BACK ? __fmul_rn(all, f.scale) : all;
    }
}

// The fragments of 16 of a row's h from j on; zeros from the rank on.
INLINE void load_h(uint32_t (&ret_high)[4], uint32_t (&ret_low)[4], const float *h0,
                   const float *h1, int j, int rank)
{
    float v[2][4];
    unrolled<4>([&](int i) {
        v[0][i] = j + i < rank ? h0[j + i] : 0.f;
        v[1][i] = j + i < rank ? h1[j + i] : 0.f;
    });
    unrolled<4>([&](int i) {
        split(ret_high[i], ret_low[i], v[i % 2][i / 2 * 2], v[i % 2][i / 2 * 2 + 1]);
    });
}

// sum[q][i] += h times the factor, for columns c0 + 16 q + 4 t + {i, 2 + i} of the part, which has
// n. FULL: that is a multiple of 64, and the rank of 4.
template <bool BACK, bool FULL, int Q>
INLINE void expand_sums(bf16, float (&sum)[Q][2][4], const float *h0, const float *h1,
                        const lora_factors &f, int c0, int n)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int j0 = 0; j0 < f.rank; j0 += 16) {
        const int j = j0 + 4 * t;
        const int jw = FULL ? min(j, f.rank - 4) : j; // h is zero from the rank on
        uint32_t high[4], low[4];
        load_h(high, low, h0, h1, j, f.rank);
#pragma unroll
        for (int q = 0; q < Q; q++) {
            const int c = c0 + 16 * q + 2 * g;
            uint32_t w[2][2];
            if (BACK) {
                load_across<4, FULL>(w[0], w[1], (const bf16 *)f.a + (int64_t)jw * n, n, f.rank - j,
                                     c, n, n % 2 == 0);
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    load_pairs<4, FULL>(w[i], (const bf16 *)f.b + (int64_t)(c + i) * f.rank, jw,
                                        c + i < n ? f.rank : 0, f.rank % 4 == 0);
            }
            unrolled<2>([&](int i) {
                mma(sum[q][i], high, w[i][0], w[i][1]);
                mma(sum[q][i], low, w[i][0], w[i][1]);
            });
        }
    }
}

// The same in f32; columns from n on have any sums.
template <bool BACK, bool FULL, int Q>
INLINE void expand_sums(float, float (&sum)[Q][2][4], const float *h0, const float *h1,
                        const lora_factors &f, int c0, int n)
{
    const float *weights = (const float *)(BACK ? f.a : f.b);
    for (int j = 0; j < f.rank; j++)
        unrolled<Q, 4>([&](int q, int i) {
            const int c = min(c0 + 16 * q + (int)threadIdx.x % 4 * 4 + i, n - 1);
            const float w = weights[BACK ? (int64_t)j * n + c : (int64_t)c * f.rank + j];
            sum[q][i % 2][i / 2] = fmaf(h0[j], w, sum[q][i % 2][i / 2]);
            sum[q][i % 2][2 + i / 2] = fmaf(h1[j], w, sum[q][i % 2][2 + i / 2]);
        });
}

// Four elements of y, as they lie.
template <typename Y> struct four {
    uint32_t word[sizeof(Y)];
};

// Those from c on, of n, zeros behind these; packed: aligned to all four of them.
INLINE void load_four(four<bf16> &ret, const bf16 *y, int c, int n, bool packed)
{
    load_pairs<4>(ret.word, y, c, n, packed);
}
INLINE void load_four(four<float> &ret, const float *y, int c, int n, bool packed)
{
    float v[4] = {};
    if (packed && c + 4 <= n)
        load<float, 4>(v, y + c);
    else
        unrolled<4>([&](int i) {
            if (c + i < n) v[i] = y[c + i];
        });
    unrolled<4>([&](int i) { ret.word[i] = __float_as_uint(v[i]); });
}

INLINE float element(const four<bf16> &v, int i)
{
    return __uint_as_float(i % 2 ? v.word[i / 2] & 0xffff0000u : v.word[i / 2] << 16);
}
INLINE float element(const four<float> &v, int i)
{
    return __uint_as_float(v.word[i]);
}

template <typename Y> INLINE void store_four(Y *y, const float (&v)[4], int c, int n, bool packed)
{
    if (packed && c + 4 <= n) {
        store<Y, 4>(y + c, v);
        return;
    }
    unrolled<4>([&](int i) {
        if (c + i < n) y[c + i] = from_f32<Y>(v[i]);
    });
}

// A lane's elements of a tile's rows of y, from column c0 on, which expand_tile() adds to: all at
// once, so that they are on their way while it computes.
template <typename Y, int Q>
INLINE void load_tile(four<Y> (&ret)[2][Q], const Y *y, int width, int base, int end, int c0, int n,
                      bool packed)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    unrolled<2, Q>([&](int half, int q) {
        load_four(ret[half][q], y + (int64_t)min(base + g + 8 * half, end - 1) * width,
                  c0 + 16 * q + 4 * t, n, packed);
    });
}

// total += sum, of the gradient (BACK) what the part's dropout keeps of it.
template <bool BACK, int Q>
INLINE void add_part(float (&total)[Q][2][4], const float (&sum)[Q][2][4], const lora_args &l,
                     int part, int base, int end, int c0)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < Q; q++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float kept[4] = {1.f, 1.f, 1.f, 1.f};
            if (BACK && l.dropout.p > 0.f)
                dropped(kept, l, part, min(base + g + 8 * half, end - 1),
                        (c0 + 16 * q + 4 * t) / 4);
            unrolled<4>([&](int i) {
                total[q][i % 2][2 * half + i / 2] += kept[i] * sum[q][i % 2][2 * half + i / 2];
            });
        }
}

// y += what an adapter adds to columns c0 .. c0 + COLUMNS - 1 of parts part0 .. part0 + parts - 1
// of those of the tile's rows that have it (`of`: tile_adapters()). h: of the tile's first row, a
// part after the other; y: of its first column; before: load_tile(). packed: rows of y are aligned
// to four columns. For all lanes of a warp.
template <typename T, bool BACK, typename Y, int Q>
INLINE void expand_tile(Y *y, const four<Y> (&before)[2][Q], const float *h, int part0, int parts,
                        int adapter, int of, int base, int c0, bool packed, const lora_args &l)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int end = min(base + ROWS, l.rows), last = end - base - 1;
    const int n = BACK ? l.k : l.first[part0 + 1] - l.first[part0];
    const int width = BACK ? l.k : l.first[l.n_parts];
    float total[Q][2][4] = {}, scale = 0;
    for (int p = part0; p < part0 + parts; p++, h += (int64_t)l.rows * l.max_rank) {
        const lora_factors f = l.factors[p * l.n_adapters + adapter];
        if (!f.a) continue;
        const float *h0 = h + min(g, last) * l.max_rank, *h1 = h + min(g + 8, last) * l.max_rank;
        float sum[Q][2][4] = {};
        scale = BACK ? 1.f : f.scale;
        if (n % COLUMNS == 0 && f.rank % 4 == 0)
            expand_sums<BACK, true>(T(), sum, h0, h1, f, c0, n);
        else
            expand_sums<BACK, false>(T(), sum, h0, h1, f, c0, n);
        add_part<BACK>(total, sum, l, p, base, end, c0);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = base + g + 8 * half, of_row = __shfl_sync(~0u, of, g + 8 * half);
        if (row >= end || of_row != adapter || scale == 0.f) continue; // 0: it leaves these alone
#pragma unroll
        for (int q = 0; q < Q; q++) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = fmaf(scale, total[q][i % 2][2 * half + i / 2], element(before[half][q], i));
            store_four(y + (int64_t)row * width, v, c0 + 16 * q + 4 * t, n, packed);
        }
    }
}

// A warp has FEWER_COLUMNS of a part (blockIdx.z); of the gradient (BACK) of dx, which has all
// parts' sums.
template <typename T, bool BACK, typename Y>
__global__ void __launch_bounds__(THREADS, 3)
    expand_kernel(Y *y, const float *h, bool packed, const lora_args l)
{
    grid_begin();
    const int part = BACK ? 0 : blockIdx.z;
    const int n = BACK ? l.k : l.first[part + 1] - l.first[part];
    const int base = blockIdx.x * ROWS, end = min(base + ROWS, l.rows);
    const int c0 = (blockIdx.y * WARPS + threadIdx.x / 32) * FEWER_COLUMNS;
    int of;
    if (c0 >= n) return;
    if (!BACK) y += l.first[part];
    h += ((int64_t)part * l.rows + base) * l.max_rank;
    four<Y> before[2][FEWER_COLUMNS / 16];
    load_tile(before, y, BACK ? l.k : l.first[l.n_parts], base, end, c0, n, packed);
    for (uint32_t todo = tile_adapters(l, base, end, of); todo; todo &= todo - 1)
        expand_tile<T, BACK>(y, before, h, part, BACK ? l.n_parts : 1,
                             __shfl_sync(~0u, of, __ffs(todo) - 1), of, base, c0, packed, l);
}

// shrink and expand of few rows: each block has h of its tile in shared memory, and computes it
// itself, which is quicker than waiting for a kernel that does.
template <int AT_ONCE>
__global__ void __launch_bounds__(THREADS, AT_ONCE > 2 ? 1 : 2)
    few_kernel(bf16 *y, const bf16 *x, bool x_packed, bool x_full, bool y_packed, const lora_args l)
{
    __shared__ float sums[WARPS][ROWS][RANKS];
    extern __shared__ float h[]; // (ROWS, max_rank)
    grid_begin();
    const int part = blockIdx.z, n = l.first[part + 1] - l.first[part];
    const int base = blockIdx.x * ROWS, end = min(base + ROWS, l.rows);
    const int c0 = (blockIdx.y * WARPS + threadIdx.x / 32) * COLUMNS;
    int of;
    if (blockIdx.y * WARPS * COLUMNS >= n) return;
    y += l.first[part];
    four<bf16> before[2][COLUMNS / 16];
    load_tile(before, y, l.first[l.n_parts], base, end, min(c0, n), n, y_packed);
    for (uint32_t todo = tile_adapters(l, base, end, of); todo; todo &= todo - 1) {
        const int adapter = __shfl_sync(~0u, of, __ffs(todo) - 1);
        const lora_factors f = l.factors[part * l.n_adapters + adapter];
        if (!f.a) continue;
        for (int j0 = 0; j0 < f.rank; j0 += RANKS) {
            const float all =
                shrink_tile<false, AT_ONCE>(sums, x, l.k, l.k, base, end, f, j0, x_packed, x_full);
            const int j = j0 + threadIdx.x % RANKS;
            if (j < f.rank) h[threadIdx.x / RANKS * l.max_rank + j] = all;
        }
        __syncthreads();
        if (c0 < n)
            expand_tile<bf16, false>(y, before, h, part, 1, adapter, of, base, c0, y_packed, l);
        __syncthreads(); // h was read
    }
}

// Where the sums of a slice and a part begin.
template <bool B> INLINE int64_t place_of(const lora_args &l, int slice, int part)
{
    const int columns = B ? l.first[l.n_parts] : l.n_parts * l.k;
    return ((int64_t)slice * columns + (B ? l.first[part] : part * l.k)) * l.max_rank;
}

// What a warp has of the sums over rows first .. end - 1 of x[row][c] * h[row][j], x having n
// columns: of c = c0 + 8 g + 2 m + {0, 1} and j = j0 + 8 k + 2 t + {0, 1} at sum[m][k]. It takes
// every sixteenth 16 rows, a lane four of them and 8 columns. packed: rows of x are aligned to 16
// bytes. FULL: they are, and n is a multiple of COLUMNS.
template <bool FULL>
INLINE void outer_sums(float (&sum)[4][2][4], const bf16 *x, const float *h, int first, int end,
                       int c0, int n, int stride, int j0, const lora_factors &f, bool packed,
                       const lora_args &l)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 2
    for (int row = first + warp * 16 + 4 * t; row - 4 * t < end; row += OUTER_WARPS * 16) {
        uint32_t v[4][4], high[2][2], low[2][2];
        float w[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool there = row + i < end; // h is zero where not
            load_pairs<8, FULL>(v[i], x + (int64_t)min(row + i, end - 1) * stride, c0 + 8 * g, n,
                                packed);
            unrolled<2>([&](int k) {
                const int j = j0 + 8 * k + g;
                w[k][i] = there && j < f.rank ? h[(int64_t)(row + i) * l.max_rank + j] : 0.f;
            });
        }
        unrolled<2>([&](int k) {
            split(high[k][0], low[k][0], w[k][0], w[k][1]);
            split(high[k][1], low[k][1], w[k][2], w[k][3]);
        });
#pragma unroll
        for (int m = 0; m < 4; m++) { // columns 8 g + 2 m and the one after it
            const uint32_t a[4] = {lows(v[0][m], v[1][m]), highs(v[0][m], v[1][m]),
                                   lows(v[2][m], v[3][m]), highs(v[2][m], v[3][m])};
            unrolled<2>([&](int k) {
                mma(sum[m][k], a, high[k][0], high[k][1]);
                mma(sum[m][k], a, low[k][0], low[k][1]);
            });
        }
    }
}

// The same in f32, where a warp takes every sixteenth row; what is behind the columns or the rank
// has any sums.
template <bool FULL>
INLINE void outer_sums(float (&sum)[4][2][4], const float *x, const float *h, int first, int end,
                       int c0, int n, int stride, int j0, const lora_factors &f, bool,
                       const lora_args &l)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int row = first + warp; row < end; row += OUTER_WARPS) {
        float v[8], w[4];
        unrolled<8>([&](int i) {
            v[i] = x[(int64_t)row * stride + (FULL ? c0 + 8 * g + i : min(c0 + 8 * g + i, n - 1))];
        });
        unrolled<4>([&](int i) {
            w[i] = h[(int64_t)row * l.max_rank + min(j0 + i / 2 * 8 + 2 * t + i % 2, f.rank - 1)];
        });
        unrolled<8, 4>([&](int c, int j) {
            float &to = sum[c / 2][j / 2][c % 2 * 2 + j % 2];
            to = fmaf(v[c], w[j], to);
        });
    }
}

// ret (slices, columns of all parts, max_rank) f32: the sum over a slice's rows of x[row][c] *
// h[row][j], where x is dy, of the part's columns (B), or x. packed, FULL: as in outer_sums().
template <typename T, bool B, bool FULL>
__global__ void __launch_bounds__(OUTER_THREADS)
    outer_kernel(float *ret, int slices, const T *x, const float *h, int part0, bool packed,
                 const lora_args l)
{
    __shared__ float sums[COLUMNS][RANKS + 1];
    grid_begin();
    const int part = part0 + blockIdx.y, c0 = blockIdx.x * COLUMNS;
    const int slice = blockIdx.z % slices, j0 = blockIdx.z / slices * RANKS;
    const int each = (l.rows + 16 * slices - 1) / (16 * slices) * 16;
    const int first = slice * each, end = min(first + each, l.rows);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const lora_factors f = l.factors[part * l.n_adapters];
    const int n = B ? l.first[part + 1] - l.first[part] : l.k;
    const int stride = B ? l.first[l.n_parts] : l.k;
    if (!f.a || c0 >= n || j0 >= f.rank) return;
    if (B) x += l.first[part];
    h += (int64_t)part * l.rows * l.max_rank;
    float sum[4][2][4] = {};
    outer_sums<FULL>(sum, x, h, first, end, c0, n, stride, j0, f, packed, l);
    for (int w = 0; w < OUTER_WARPS; w++) { // in their order
        if (w == warp)
            unrolled<4, 8>([&](int m, int i) {
                float *to = &sums[8 * g + 2 * m + i % 4 / 2][i / 4 * 8 + 2 * t + i % 2];
                *to = (w ? *to : 0.f) + sum[m][i / 4][i % 4];
            });
        __syncthreads();
    }
    ret += place_of<B>(l, slice, part);
    for (int i = threadIdx.x; i < COLUMNS * RANKS; i += OUTER_THREADS) {
        const int c = c0 + i / RANKS, j = j0 + i % RANKS;
        if (c < n && j < f.rank) ret[(int64_t)c * l.max_rank + j] = sums[i / RANKS][i % RANKS];
    }
}

// b[c][j] += scale * the slices' sums, in their order (B); or a[j][c] += these.
template <bool B>
__global__ void outer_add_kernel(const float *sums, int slices, int part0, const lora_args l)
{
    grid_begin();
    const int part = part0 + blockIdx.y, i = blockIdx.x * THREADS + threadIdx.x;
    const lora_factors f = l.factors[part * l.n_adapters];
    const int n = B ? l.first[part + 1] - l.first[part] : l.k;
    if (!f.a || i >= n * f.rank) return;
    const int c = B ? i / f.rank : i % n, j = B ? i % f.rank : i / n;
    float sum = 0;
    for (int s = 0; s < slices; s++)
        sum += sums[place_of<B>(l, s, part) + (int64_t)c * l.max_rank + j];
    float *to = B ? l.grads[part].b : l.grads[part].a;
    to[i] += B ? f.scale * sum : sum;
}

// ---- the steps ---------------------------------------------------------------------------------

static int widest_part(const lora_args &l)
{
    int n = 0;
    for (int p = 0; p < l.n_parts; p++) n = max(n, l.first[p + 1] - l.first[p]);
    return n;
}

// Whether rows of the parts' columns, or of x, are aligned to n elements.
template <typename T> static bool rows_aligned(const T *x, const lora_args &l, bool parts, int n)
{
    bool fits = aligned(n * sizeof(T), {x}, {});
    if (!parts) return fits && l.k % n == 0;
    for (int p = 0; p <= l.n_parts; p++) fits = fits && l.first[p] % n == 0;
    return fits;
}

// h = x a^T of parts part0 .. part0 + n - 1; or, of the gradient (back), scale * dy b, dy being x.
template <typename T>
static void shrink(struct device *dev, float *h, const T *x, int part0, int n, const lora_args &l,
                   bool back)
{
    const dim3 grid(ceil_div(l.rows, ROWS), n, ceil_div(l.max_rank, RANKS));
    cuda_launch(dev, "lora", back ? shrink_kernel<T, true> : shrink_kernel<T, false>, grid, THREADS,
                0, h, x, part0, rows_aligned(x, l, back, 8), rows_aligned(x, l, back, 64), l);
}

// y += scale * h b^T of all parts; or (BACK) dx += h a, dx being y.
template <typename T, bool BACK, typename Y>
static void expand(struct device *dev, Y *y, const float *h, const lora_args &l)
{
    const dim3 grid(ceil_div(l.rows, ROWS),
                    ceil_div(BACK ? l.k : widest_part(l), WARPS * FEWER_COLUMNS),
                    BACK ? 1 : l.n_parts);
    cuda_launch(dev, "lora", expand_kernel<T, BACK, Y>, grid, THREADS, 0, y, h,
                rows_aligned(y, l, !BACK, 4), l);
}

// Gradients of b from dy and h, dy being x (B); or of a from x and dh, of the parts as above. sums:
// of lora_slices().
template <bool B, typename T>
static void outer(struct device *dev, float *sums, const T *x, const float *h, int part0, int n,
                  const lora_args &l)
{
    const int columns = B ? widest_part(l) : l.k; // at most, of a part
    const int slices = lora_slices(l.rows, l.max_rank);
    const dim3 grid(ceil_div(columns, COLUMNS), n, ceil_div(l.max_rank, RANKS) * slices);
    const bool full = rows_aligned(x, l, B, COLUMNS);
    cuda_launch(dev, "lora", full ? outer_kernel<T, B, true> : outer_kernel<T, B, false>, grid,
                OUTER_THREADS, 0, sums, slices, x, h, part0, rows_aligned(x, l, B, 8), l);
    cuda_launch(dev, "lora", outer_add_kernel<B>, dim3(ceil_div(columns * l.max_rank, THREADS), n),
                THREADS, 0, sums, slices, part0, l);
}

// to (rows, k) = x times the part's dropout. A thread has four columns.
template <typename T> __global__ void drop_kernel(T *to, const T *x, int part, const lora_args l)
{
    grid_begin();
    const int row = blockIdx.x, c = (blockIdx.y * THREADS + threadIdx.x) * 4;
    if (c >= l.k) return;
    float factors[4];
    dropped(factors, l, part, row, c / 4);
    unrolled<4>([&](int i) {
        if (c + i < l.k)
            to[(int64_t)row * l.k + c + i] =
                from_f32<T>(factors[i] * to_f32(x[(int64_t)row * l.k + c + i]));
    });
}

// x itself, or what a part's dropout leaves of it, in `to`.
template <typename T>
static const T *drop(struct device *dev, void *to, const T *x, int part, const lora_args &l)
{
    if (l.dropout.p <= 0.f) return x;
    cuda_launch(dev, "dropout", drop_kernel<T>, dim3(l.rows, ceil_div(l.k, 4 * THREADS)), THREADS,
                0, (T *)to, x, part, l);
    return (const T *)to;
}

// h of one pass, in f32; what comes behind it is aligned to 16 bytes.
static size_t h_elements(int rows, int max_rank)
{
    return ((size_t)LORA_PARTS * rows * max_rank + 3) / 4 * 4;
}

static size_t sums_elements(int rows, int max_rank, int columns)
{
    return (size_t)lora_slices(rows, max_rank) * columns * max_rank;
}

// Twice h, which the backward pass wants, the sums of slices over so many columns, and x after
// dropout.
size_t cuda_lora_scratch(int rows, int max_rank, int columns, size_t dropped)
{
    return (2 * h_elements(rows, max_rank) + sums_elements(rows, max_rank, columns)) *
               sizeof(float) +
           rows * dropped;
}

struct scratch {
    float *h, *dh, *sums; // h of both passes
    void *dropped;
};

// In the workspace; false after a recorded failure.
static bool take_scratch(struct device *dev, const struct lora_args *l, struct scratch *ret)
{
    const size_t each = h_elements(l->rows, l->max_rank);
    const size_t dropped = l->dropout.p > 0.f ? l->k * dtype_size(l->dt) : 0;
    const int columns = max(l->n_parts * l->k, l->first[l->n_parts]);
    float *h =
        (float *)cuda_workspace(dev, cuda_lora_scratch(l->rows, l->max_rank, columns, dropped));
    if (!h) return false;
    *ret = (struct scratch){h, h + each, h + 2 * each, NULL};
    ret->dropped = ret->sums + sums_elements(l->rows, l->max_rank, columns);
    return true;
}

struct lora_call {
    void *y; // of the gradient: dx
    const void *x;
    const struct lora_args *args;
};

template <typename T> static void forward(struct device *dev, const lora_call &c)
{
    struct scratch s;
    const lora_args &l = *c.args;
    const int at_once = l.dropout.p > 0.f ? 1 : l.n_parts; // parts of the same x
    if (!take_scratch(dev, &l, &s)) return;
    for (int p = 0; p < l.n_parts; p += at_once)
        shrink(dev, s.h, drop(dev, s.dropped, (const T *)c.x, p, l), p, at_once, l, false);
    if (l.out == DT_F32) // also logits in bf16
        expand<T, false>(dev, (float *)c.y, s.h, l);
    else
        expand<T, false>(dev, (T *)c.y, s.h, l);
}

template <typename T> static void back(struct device *dev, const lora_call &c)
{
    struct scratch s;
    lora_args l = *c.args;
    const T *dy = (const T *)l.dy;
    const int at_once = l.dropout.p > 0.f ? 1 : l.n_parts; // parts of the same x
    if (!take_scratch(dev, &l, &s)) return;
    l.adapter = NULL;
    shrink(dev, s.dh, dy, 0, l.n_parts, l, true);
    for (int p = 0; p < l.n_parts; p += at_once) {
        const T *x = drop(dev, s.dropped, (const T *)c.x, p, l);
        shrink(dev, s.h, x, p, at_once, l, false);
        outer<false>(dev, s.sums, x, s.dh, p, at_once, l);
    }
    outer<true>(dev, s.sums, dy, s.h, 0, l.n_parts, l);
    expand<T, true>(dev, (T *)c.y, s.dh, l);
}

static void steps(struct device *dev, const lora_call &c)
{
    with_type(c.args->dt, [&](auto t) {
        using T = decltype(t);
        (c.args->dy ? back<T> : forward<T>)(dev, c);
    });
}

static bool few(struct device *dev, const lora_call &c)
{
    const lora_args &l = *c.args;
    const auto *x = (const bf16 *)c.x;
    if (l.dt != DT_BF16 || l.out != DT_BF16 || l.dy || l.rows > FEW_ROWS ||
        l.max_rank > FEW_RANKS || l.dropout.p > 0.f)
        return false;
    const dim3 grid(ceil_div(l.rows, ROWS), ceil_div(widest_part(l), WARPS * COLUMNS), l.n_parts);
    cuda_launch(dev, "lora", l.k < LONG ? few_kernel<2> : few_kernel<4>, grid, THREADS,
                ROWS * l.max_rank * sizeof(float), (bf16 *)c.y, x, rows_aligned(x, l, false, 8),
                rows_aligned(x, l, false, 64), rows_aligned((bf16 *)c.y, l, true, 4), l);
    return true;
}

static const op_variant lora_rows[] = {
    variant<lora_call, few>(
        "few", "bf16 to bf16 without dropout, up to 128 rows and ranks up to 64: one kernel"),
    variant<lora_call, otherwise, steps>("tiles", "all else: more rows, the gradient, f32"),
};
const struct op_variants lora_variants = {OP_lora, 2, lora_rows};

void cuda_lora(struct device *dev, void *y, const void *x, const struct lora_args *l)
{
    const lora_call call = {y, x, l};
    if (l->rows > 0) op_take_variant(dev, &lora_variants, &call);
}
