/* attn_rows.cuh: 16 packed rows of a warp (attention.cuh) in registers, as the kernels keep them
 * whose warps have 16 rows each: attn_tensor.cu and attn_wgmma.cu. The layout is that of an mma's
 * result: a thread has the rows lane / 4 and that + 8, and of each 8 columns two: [i][e] is row
 * lane / 4 + e / 2 * 8, column i * 8 + lane % 4 * 2 + e % 2. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_ATTN_ROWS_CUH
#define KERNELS_CUDA_ATTN_ROWS_CUH

#include "kernels/cuda/attention/attn_order.cuh"

// Of a thread's two rows: keys after position and up to hidden are not seen.
struct rows_seen {
    int position[2], hidden[2];
};

// Rows row0 .. row0 + 15 of a tile are the warp's; those past the last packed row see nothing.
template <bool PAGED, bool FROM_L2 = false>
INLINE rows_seen seen_by(const attn_args<bf16> &a, int s, const packed_rows &p, int row0)
{
    rows_seen seen;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = row0 + threadIdx.x % 32 / 4 + h * 8;
        seen.position[h] = p.in(r) ? row_position<PAGED, FROM_L2>(a, s, place_of(a, p, r).row) : -1;
        seen.hidden[h] = a.window > 0 ? seen.position[h] - a.window : -1;
    }
    return seen;
}

// w = value where a row does not see the column's key; the first is the key `start`.
template <int N>
INLINE void hide(float (&w)[N / 8][4], const rows_seen &seen, int start, float value)
{
    unrolled<N / 8, 4>([&](int i, int e) {
        int j = start + i * 8 + threadIdx.x % 4 * 2 + e % 2;
        if (j > seen.position[e / 2] || j <= seen.hidden[e / 2]) w[i][e] = value;
    });
}

// Applies the soft cap, if any, to dot products. They times the factor given back are scores in
// log2 units.
template <int N> INLINE float to_scores(const attn_args<bf16> &a, float (&w)[N / 8][4])
{
    if (a.softcap > 0) unrolled<N / 8, 4>([&](int i, int e) { w[i][e] = capped(a, w[i][e]); });
    return score_factor(a);
}
// What a tile does to a thread's two rows; top is their largest score in the chunk so far.
template <int N>
INLINE void next_tiles(tile_step (&step)[2], const float (&w)[N / 8][4], float (&top)[2],
                       float factor)
{
    float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    unrolled<N / 8, 4>([&](int i, int e) { most[e] = fmaxf(most[e], w[i][e]); });
    unrolled<2>([&](int h) {
        step[h] = next_tile(top[h], lanes_max<4>(fmaxf(most[h * 2], most[h * 2 + 1])), factor);
    });
}

/* Dot products of a tile's keys, -infinity where they are not seen, become weights; shrink is what
 * the rows' sums so far are multiplied by. */
template <int N>
INLINE void take_weights(float (&w)[N / 8][4], float (&top)[2], float (&shrink)[2], float factor)
{
    tile_step step[2];
    next_tiles<N>(step, w, top, factor);
    unrolled<2>([&](int h) { shrink[h] = step[h].shrink; });
    unrolled<N / 8, 4>(
        [&](int i, int e) { w[i][e] = weight_of(w[i][e], factor, step[e / 2].shift); });
}

// The columns n .. n + 15 of mma results as the left operand of a product.
template <int N> INLINE void as_left(uint32_t (&x)[4], const float (&w)[N / 8][4], int n)
{
    const float(&lo)[4] = w[n / 8], (&hi)[4] = w[n / 8 + 1];
    x[0] = pack2(lo[0], lo[1]);
    x[1] = pack2(lo[2], lo[3]);
    x[2] = pack2(hi[0], hi[1]);
    x[3] = pack2(hi[2], hi[3]);
}

template <int HD> INLINE void scale_rows(float (&acc)[HD / 8][4], float by)
{
    unrolled<HD / 8, 4>([&](int i, int e) { acc[i][e] *= by; });
}

// Stores 16 x HD results of a warp; row_of(r), r in 0..15, gives the row's first element or NULL.
template <int HD, typename F>
INLINE void store_rows(const float (&acc)[HD / 8][4], int dims, F row_of)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        bf16 *row = row_of(lane / 4 + h * 8);
        if (!row) continue;
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            int d = i * 8 + lane % 4 * 2;
            if (d < dims)
                *reinterpret_cast<uint32_t *>(row + d) = pack2(acc[i][h * 2], acc[i][h * 2 + 1]);
        }
    }
}

// ---- sums of a chunk, and of the chunks before -------------------------------------------------

// The sums of a thread's two rows: of weighted values, and of weights.
template <int HD> struct row_sums {
    float out[HD / 8][4], sum[4];
    float top[2]; // the largest score, in log2 units
};

template <int HD> INLINE void clear(row_sums<HD> &r)
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        r.sum[e] = 0;
        unrolled<HD / 8>([&](int i) { r.out[i][e] = 0; });
    }
    r.top[0] = r.top[1] = -INFINITY;
}

template <int HD> INLINE void shrink_sums(row_sums<HD> &r, const float (&by)[2])
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        r.sum[e] *= by[e / 2];
        unrolled<HD / 8>([&](int i) { r.out[i][e] *= by[e / 2]; });
    }
}

/* The chunks before the present one. Looked at once a chunk only, so they wait in the thread's own
 * memory: every register there is holds what each tile needs. */
template <int HD> struct waiting_sums {
    float4 at[HD / 8 + 1];
    float top[2];
};

// r = the chunks so far and the one just summed in r.
template <int HD>
INLINE void join_chunk(row_sums<HD> &r, const waiting_sums<HD> *before, bool is_first)
{
    float top[2] = {-INFINITY, -INFINITY};
    join_step step[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!is_first) top[h] = before->top[h];
        step[h] = next_chunk(top[h], r.top[h]);
        r.top[h] = top[h];
    }
#pragma unroll
    for (int i = 0; i <= HD / 8; i++) {
        float4 x = is_first ? make_float4(0, 0, 0, 0) : before->at[i];
        float(&to)[4] = i < HD / 8 ? r.out[i] : r.sum;
        to[0] = joined(x.x, to[0], step[0]);
        to[1] = joined(x.y, to[1], step[0]);
        to[2] = joined(x.z, to[2], step[1]);
        to[3] = joined(x.w, to[3], step[1]);
    }
}

template <int HD> INLINE void put_aside(waiting_sums<HD> *to, const row_sums<HD> &r)
{
#pragma unroll
    for (int i = 0; i <= HD / 8; i++) {
        const float(&x)[4] = i < HD / 8 ? r.out[i] : r.sum;
        to->at[i] = make_float4(x[0], x[1], x[2], x[3]);
    }
    to->top[0] = r.top[0];
    to->top[1] = r.top[1];
}

// A chunk ends: it is joined to those before, and the next one begins.
template <int HD> INLINE void end_chunk(row_sums<HD> &r, waiting_sums<HD> *before, bool &is_first)
{
    join_chunk(r, before, is_first);
    put_aside(before, r);
    clear(r);
    is_first = false;
}

// Stores what the rows' sums give: rows row0 .. row0 + 15 of the tile p, from column `first` on.
template <int HD>
INLINE void store_result(row_sums<HD> &r, const attn_args<bf16> &a, const packed_rows &p, int row0,
                         int first = 0)
{
    int lane = threadIdx.x % 32, dims = a.latent > 0 ? a.latent : a.head_dim;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = row0 + lane / 4 + h * 8;
        float sum = with_sink(a, place_of(a, p, row).head, r.top[h], r.sum[h * 2]);
        float scale = inverse_of(sum);
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            r.out[i][h * 2] = finished(r.out[i][h * 2], scale);
            r.out[i][h * 2 + 1] = finished(r.out[i][h * 2 + 1], scale);
        }
        if (a.lse && first == 0 && lane % 4 == 0 && p.in(row))
            a.lse[index_of(a, place_of(a, p, row))] =
                sum > 0 ? (r.top[h] + log2f(sum)) * LN2 : -INFINITY;
    }
    store_rows<HD>(r.out, dims - first, [&](int row) -> bf16 * {
        row += row0;
        return p.in(row) ? a.out + index_of(a, place_of(a, p, row)) * dims + first : NULL;
    });
}

#endif
