/* tile.cuh: a block's tile of a product: sums over p of L(i, p) R(j, p). Each operand is stored
 * with p along its rows (a weight (n, k) in the forward pass) or, ACROSS, across them. Two kinds,
 * which their kernels use in one way:
 *  - mma_tile: bf16 on the tensor cores, by way of a ring of cp.async stages in shared memory. Sums
 *    are in k16 order (docs/internals/numerics.md) whatever the tile's size.
 *  - plain_tile: f32, and bf16 of widths or addresses that do not allow 16-byte copies.
 * Private to kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_TILE_CUH
#define KERNELS_CUDA_TILE_CUH

#include "kernels/cuda/tensor.cuh"

// Of a tile: entry (0, 0), the elements between rows, and how many i there are from there on.
template <typename T> struct tile_operand {
    const T *at;
    int64_t stride;
    int n;
};

#define TILE_PAD 8 // keeps ldmatrix free of bank conflicts

// ROWS x COLS of a block, by DOWN x ABREAST warps; STAGES of DEPTH terms.
template <int ROWS, int COLS, int DOWN, int ABREAST, int DEPTH, int STAGES, bool L_ACROSS,
          bool R_ACROSS>
struct mma_tile {
    static constexpr int rows = ROWS, cols = COLS, threads = DOWN * ABREAST * 32;
    static constexpr int blocks = COLS > 64 ? 2 : 1; // on an SM, at least
    static constexpr bool l_across = L_ACROSS, r_across = R_ACROSS, in_pairs = true;
    static constexpr int warp_rows = ROWS / DOWN, warp_cols = COLS / ABREAST;
    // elements of a stage of an operand with N entries i
    template <bool ACROSS, int N>
    static constexpr int stage_of = ACROSS ? DEPTH *(N + TILE_PAD) : N *(DEPTH + TILE_PAD);
    static constexpr int l_stage = stage_of<L_ACROSS, ROWS>;
    static constexpr int stage = l_stage + stage_of<R_ACROSS, COLS>;
    static constexpr size_t shared = STAGES * stage * sizeof(bf16);
    typedef float sums[warp_rows / 16][warp_cols / 8][4];

    static INLINE bf16 *memory()
    {
        extern __shared__ __align__(128) bf16 tile_memory[];
        return tile_memory;
    }

    // Starts copying a stage of an operand, its terms from p on; zeros for what is not there. n,
    // or along the rows p_end, is a multiple of 8.
    template <bool ACROSS, int N>
    static INLINE void copy(bf16 *to, const tile_operand<bf16> &x, int p, int p_end)
    {
        constexpr int LINES = ACROSS ? DEPTH : N, UNITS = (ACROSS ? N : DEPTH) / 8;
        if (p >= p_end) return;
        const bf16 *from = x.at + (ACROSS ? p * x.stride : p);
        const int lines = ACROSS ? p_end - p : x.n, left = ACROSS ? x.n : p_end - p;
#pragma unroll
        for (int at = threadIdx.x; at < LINES * UNITS; at += threads) {
            const int line = at / UNITS, column = at % UNITS * 8;
            const bool valid = line < lines && column < left;
            copy16(to + line * (UNITS * 8 + TILE_PAD) + column,
                   from + (valid ? line * x.stride + column : 0), valid);
        }
    }

    // The first stages of R, before those of L can be read.
    static INLINE void begin_right(const tile_operand<bf16> &r, int p_end)
    {
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++)
            copy<R_ACROSS, COLS>(memory() + s * stage + l_stage, r, s * DEPTH, p_end);
    }

    // 16 x 16 of L from row i and term p of a stage: the left operand of an mma.
    static INLINE void left(uint32_t (&ret)[4], const bf16 *from, int i, int p)
    {
        const int lane = threadIdx.x % 32;
        if (L_ACROSS)
            load_matrices_transposed(ret, from +
                                              (p + lane % 8 + lane / 16 * 8) * (ROWS + TILE_PAD) +
                                              i + lane / 8 % 2 * 8);
        else
            load_left<DEPTH + TILE_PAD>(ret, from, i, p);
    }

    // 16 x 16 of R: the right operands of two mma, columns j to j + 7 and j + 8 to j + 15.
    static INLINE void right(uint32_t (&ret)[4], const bf16 *from, int j, int p)
    {
        if (R_ACROSS)
            load_right_across<COLS + TILE_PAD>(ret, from, p, j);
        else
            load_right<DEPTH + TILE_PAD>(ret, from, j, p);
    }

    static INLINE void add_stage(sums &sum, const bf16 *from)
    {
        const int warp = threadIdx.x / 32;
        const int i0 = warp / ABREAST * warp_rows, j0 = warp % ABREAST * warp_cols;
#pragma unroll
        for (int q = 0; q < DEPTH; q += 16) {
            uint32_t x[warp_rows / 16][4];
            unrolled<warp_rows / 16>([&](int i) { left(x[i], from, i0 + i * 16, q); });
#pragma unroll
            for (int j = 0; j < warp_cols / 16; j++) {
                uint32_t y[4];
                right(y, from + l_stage, j0 + j * 16, q);
#pragma unroll
                for (int i = 0; i < warp_rows / 16; i++) {
                    mma(sum[i][j * 2], x[i], y[0], y[1]);
                    mma(sum[i][j * 2 + 1], x[i], y[2], y[3]);
                }
            }
        }
    }

    // sum += the terms 0 .. p_end - 1. begun: begin_right() was called.
    static INLINE void multiply(sums &sum, const tile_operand<bf16> &l, const tile_operand<bf16> &r,
                                int p_end, bool begun = false)
    {
        auto copy_stage = [&](int p, int slot, bool with_right) {
            bf16 *to = memory() + slot * stage;
            if (with_right) copy<R_ACROSS, COLS>(to + l_stage, r, p, p_end);
            copy<L_ACROSS, ROWS>(to, l, p, p_end);
            copies_commit(); // an empty group keeps the count
        };
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) copy_stage(s * DEPTH, s, !begun);
        int slot = 0, next = STAGES - 1;
#pragma unroll 1
        for (int p = 0; p < p_end; p += DEPTH) {
            copies_wait<STAGES - 2>();
            __syncthreads(); // this stage is whole, and all are done with the one before it
            copy_stage(p + (STAGES - 1) * DEPTH, next, true);
            add_stage(sum, memory() + slot * stage);
            slot = slot + 1 < STAGES ? slot + 1 : 0;
            next = next + 1 < STAGES ? next + 1 : 0;
        }
        copies_wait<0>();
    }

    // f(i, j, sum of j, of j + 1) for a thread's.
    template <typename F> static INLINE void each_pair(const sums &sum, F f)
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int i0 = warp / ABREAST * warp_rows + lane / 4;
        const int j0 = warp % ABREAST * warp_cols + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < warp_rows / 16; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int j = 0; j < warp_cols / 8; j++)
                    f(i0 + i * 16 + h * 8, j0 + j * 8, sum[i][j][h * 2], sum[i][j][h * 2 + 1]);
    }

    // Stores n x cols_left of the tile at c, whose rows lie c_row apart, by way of shared memory:
    // 16 bytes a thread.
    static INLINE void store_tile(bf16 *c, int64_t c_row, const sums &sum, int n, int cols_left)
    {
        constexpr int UNITS = COLS / 8, PITCH = COLS + TILE_PAD;
        static_assert(ROWS * PITCH <= STAGES * stage, "the results have room");
        bf16 *tile = memory();
        __syncthreads();
        each_pair(sum,
                  [&](int i, int j, float x, float y) { store_pair(tile + i * PITCH + j, x, y); });
        __syncthreads();
#pragma unroll
        for (int at = threadIdx.x; at < ROWS * UNITS; at += threads) {
            const int i = at / UNITS, j = at % UNITS * 8;
            if (i < n && j < cols_left)
                *(uint4 *)(c + i * c_row + j) = *(const uint4 *)(tile + i * PITCH + j);
        }
    }
};

// A thread sums 4 x 4 of 64 x 64, 16 terms at a time; the next ones are loaded meanwhile.
template <bool L_ACROSS, bool R_ACROSS> struct plain_tile {
    static constexpr int rows = 64, cols = 64, threads = 256, blocks = 1, depth = 16;
    static constexpr bool l_across = L_ACROSS, r_across = R_ACROSS, in_pairs = false;
    static constexpr size_t shared = 0;
    typedef float sums[4][4];

    template <bool ACROSS> static INLINE void place_of(int s, int &ret_i, int &ret_p)
    {
        const int at = threadIdx.x + s * threads;
        ret_i = ACROSS ? at % rows : at / depth;
        ret_p = ACROSS ? at / rows : at % depth;
    }

    // A thread's four entries of an operand's next terms.
    template <bool ACROSS, typename T>
    static INLINE void fetch(float (&ret)[4], const tile_operand<T> &x, int p0, int p_end)
    {
        unrolled<4>([&](int s) {
            int i, p;
            place_of<ACROSS>(s, i, p);
            p += p0;
            ret[s] = 0;
            if (i < x.n && p < p_end)
                ret[s] = to_f32(x.at[ACROSS ? p * x.stride + i : i * x.stride + p]);
        });
    }

    template <bool ACROSS> static INLINE void put(float (&to)[depth][rows + 4], const float (&x)[4])
    {
        unrolled<4>([&](int s) {
            int i, p;
            place_of<ACROSS>(s, i, p);
            to[p][i] = x[s];
        });
    }

    template <typename T> static INLINE void begin_right(const tile_operand<T> &, int) {}

    template <typename T>
    static INLINE void multiply(sums &sum, const tile_operand<T> &l, const tile_operand<T> &r,
                                int p_end, bool = false)
    {
        __shared__ __align__(16) float left[depth][rows + 4], right[depth][rows + 4];
        float x[4], y[4];
        const int i = threadIdx.x / 16 * 4, j = threadIdx.x % 16 * 4;
        fetch<L_ACROSS>(x, l, 0, p_end);
        fetch<R_ACROSS>(y, r, 0, p_end);
        for (int p = 0; p < p_end; p += depth) {
            put<L_ACROSS>(left, x);
            put<R_ACROSS>(right, y);
            __syncthreads();
            fetch<L_ACROSS>(x, l, p + depth, p_end);
            fetch<R_ACROSS>(y, r, p + depth, p_end);
            unrolled<depth>([&](int q) {
                float u[4], v[4];
                load<float, 4>(u, &left[q][i]);
                load<float, 4>(v, &right[q][j]);
                unrolled<4, 4>([&](int f, int g) { sum[f][g] = __fmaf_rn(u[f], v[g], sum[f][g]); });
            });
            __syncthreads();
        }
    }

    template <typename F> static INLINE void each_pair(const sums &sum, F f)
    {
        const int i = threadIdx.x / 16 * 4, j = threadIdx.x % 16 * 4;
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int g = 0; g < 4; g += 2) f(i + k, j + g, sum[k][g], sum[k][g + 1]);
    }

    template <typename T>
    static INLINE void store_tile(T *c, int64_t c_row, const sums &sum, int n, int cols_left)
    {
        each_pair(sum, [&](int i, int j, float x, float y) {
            if (i < n && j < cols_left) c[i * c_row + j] = from_f32<T>(x);
            if (i < n && j + 1 < cols_left) c[i * c_row + j + 1] = from_f32<T>(y);
        });
    }
};

#endif
