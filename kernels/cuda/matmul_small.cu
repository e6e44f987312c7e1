/* matmul_small.cu: C = A B^T [+ C] [+ bias] for 1 to 16 rows of bf16: the products of a decode
 * step, and the same for each expert of a mixture over its rows.
 *
 * The work is reading B, the weights (n, k), once, at the memory's rate. A block takes TILES tiles
 * of 16 weight rows; its warps share k and add their parts in shared memory in a fixed order. The
 * tensor cores do the sums with the weights as the 16-row operand: mma m16n8k16 with the rows of A
 * as columns. Which k an operand's slot stands for is free as long as both operands agree, so
 * thread t of a quad takes the 8 elements k0 + 8 t .. + 7 of a row in one 16-byte load, straight
 * into the fragments of two mma: no shuffles, no staging of weights.
 *
 * The weights do not depend on the kernel before, so they are asked for before grid_wait(): this
 * kernel's reads run under the end of its predecessor. That is safe because a running kernel proves
 * that all but its direct predecessor are complete (cuda.cuh), and the caller allows it only where
 * the direct predecessor is known to write something else (`activation`; AdamW releases nothing
 * early).
 *
 * On one H200 (2026-11-20), Qwen2.5-1.5B's products of 16 rows, in a captured chain: qkv 3.0 us,
 * o 2.7, gate+up 17.2, down 10.9, head 109; cuBLASLt's first choice: 5.1, 5.0, 17.4, 11.5, 116. At
 * 1 row: 2.7, 2.4, 14.6, 8.1, 102. The same kernel for 32 rows gained nothing over cuBLASLt and is
 * gone.
 */
#include "kernels/cuda/experts.cuh"

__device__ __forceinline__ void mma_16816(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_once(const bf16 *p) // streamed: not kept in L1
{
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return x;
}

// A block's part of a product. COLS: rows of A in eights. Warp w does the steps w, w + WARPS, ...
// of k / 32, so that a block reads whole cache lines together. Both operands of DEPTH steps are
// kept on their way.
template <typename U, int WARPS, int TILES, int COLS, int DEPTH>
__device__ __forceinline__ void product(U *c, const bf16 *a, const bf16 *b, const bf16 *bias, int m,
                                        int n, int k, bool add, bool early)
{
    __shared__ float parts[WARPS][TILES * 16][COLS * 8 + 1];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int row0 = blockIdx.x * TILES * 16, steps = k / 32;
    const bf16 *rows[TILES][2], *in[COLS];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            rows[i][h] = b + (int64_t)min(row0 + i * 16 + h * 8 + g, n - 1) * k + t * 8;
#pragma unroll
    for (int j = 0; j < COLS; j++) in[j] = a + (int64_t)min(j * 8 + g, m - 1) * k + t * 8;

    uint4 w[DEPTH][TILES][2], x[DEPTH][COLS];
    auto load_w = [&](int d, int step) {
        if (step < steps)
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) w[d][i][h] = load_once(rows[i][h] + step * 32);
    };
    auto load_x = [&](int d, int step) {
        if (step < steps)
#pragma unroll
            for (int j = 0; j < COLS; j++) x[d][j] = *(const uint4 *)(in[j] + step * 32);
    };
    if (!early) grid_wait();
#pragma unroll
    for (int d = 0; d < DEPTH; d++) load_w(d, warp + d * WARPS);
    if (early) grid_wait();
    grid_release();
#pragma unroll
    for (int d = 0; d < DEPTH; d++) load_x(d, warp + d * WARPS);

    // Columns past m repeat row m - 1 of A; their results are not stored.
    float sum[TILES][COLS][4] = {};
    for (int base = warp; base < steps; base += DEPTH * WARPS) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int step = base + d * WARPS;
            if (step < steps) {
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    uint4 lo = w[d][i][0], hi = w[d][i][1];
#pragma unroll
                    for (int j = 0; j < COLS; j++) {
                        mma_16816(sum[i][j], lo.x, hi.x, lo.y, hi.y, x[d][j].x, x[d][j].y);
                        mma_16816(sum[i][j], lo.z, hi.z, lo.w, hi.w, x[d][j].z, x[d][j].w);
                    }
                }
            }
            load_w(d, step + DEPTH * WARPS);
            load_x(d, step + DEPTH * WARPS);
        }
    }

#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int j = 0; j < COLS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                parts[warp][i * 16 + g + (e / 2) * 8][j * 8 + 2 * t + e % 2] = sum[i][j][e];
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 16 * COLS * 8; i += WARPS * 32) {
        int r = i % (TILES * 16), col = i / (TILES * 16), row = row0 + r;
        if (col >= m || row >= n) continue;
        float total = 0;
#pragma unroll
        for (int p = 0; p < WARPS; p++) total += parts[p][r][col];
        if (bias) total += to_f32(bias[row]);
        U *to = c + (int64_t)col * n + row;
        *to = from_f32<U>(add ? total + to_f32(*to) : total);
    }
}

template <typename U, int WARPS, int TILES, int COLS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, 512 / (WARPS * 32))
    small_kernel(U *c, const bf16 *a, const bf16 *b, const bf16 *bias, int m, int n, int k,
                 bool add, bool early)
{
    product<U, WARPS, TILES, COLS, DEPTH>(c, a, b, bias, m, n, k, add, early);
}

// Block row y has a tile of COLS * 8 rows of one expert. An expert of more rows has more tiles,
// which read its weights again, from the L2.
template <typename U, int WARPS, int TILES, int COLS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, 512 / (WARPS * 32))
    experts_kernel(U *c, const bf16 *a, const bf16 *b, const int32_t *offsets, int n_experts, int n,
                   int k, bool early)
{
    if (!early) grid_wait();
    expert_rows rows;
    if (!find_expert_rows(rows, offsets, n_experts, blockIdx.y, COLS * 8)) {
        grid_wait(); // a kernel must not end before the one it follows
        return;
    }
    product<U, WARPS, TILES, COLS, DEPTH>(c + (int64_t)rows.start * n, a + (int64_t)rows.start * k,
                                          b + (int64_t)rows.expert * n * k, NULL,
                                          min(COLS * 8, rows.end - rows.start), n, k, false, early);
}

template <int WARPS, int TILES, int DEPTH>
static void launch(struct device *dev, void *c, const void *a, const void *b, const void *bias,
                   const struct matmul *shape, bool early)
{
    with_type(shape->out, [&](auto t) {
        using U = decltype(t);
        auto kernel = shape->m <= 8 ? small_kernel<U, WARPS, TILES, 1, DEPTH>
                                    : small_kernel<U, WARPS, TILES, 2, DEPTH>;
        cuda_launch(dev, "matrix product of few rows", kernel, ceil_div(shape->n, TILES * 16),
                    WARPS * 32, 0, (U *)c, (const bf16 *)a, (const bf16 *)b, (const bf16 *)bias,
                    shape->m, shape->n, shape->k, shape->beta != 0, early);
    });
}

bool matmul_small(struct device *dev, void *c, const void *a, const void *b, const void *bias,
                  const struct matmul *shape, bool after_activation)
{
    if (shape->in != DT_BF16 || shape->m > 16 || shape->trans_a || !shape->trans_b ||
        shape->k % 32 || shape->k < 32 || !aligned(16, {a, b}, {}))
        return false;
    struct cuda_state *state = cuda_use(dev);
    bool early = after_activation && !state->plain_next;
    // Enough blocks to fill the device come first, then wider blocks, which read A less often;
    // where there are few blocks with much to sum, more warps share it.
    if (ceil_div(shape->n, 32) >= 2 * state->n_sms)
        launch<8, 2, 3>(dev, c, a, b, bias, shape, early);
    else if (shape->k >= 4096)
        launch<16, 1, 4>(dev, c, a, b, bias, shape, early);
    else
        launch<8, 1, 6>(dev, c, a, b, bias, shape, early);
    return true;
}

template <int WARPS, int TILES, int DEPTH>
static void launch_experts(struct device *dev, void *c, const void *a, const void *b,
                           const int32_t *offsets, int n_experts, const struct matmul *shape,
                           bool early)
{
    with_type(shape->out, [&](auto t) {
        using U = decltype(t);
        // on average an expert has far fewer rows than a tile of eight
        bool eights = shape->m <= std::max(8, 2 * n_experts);
        auto kernel = eights ? experts_kernel<U, WARPS, TILES, 1, DEPTH>
                             : experts_kernel<U, WARPS, TILES, 2, DEPTH>;
        dim3 grid(ceil_div(shape->n, TILES * 16),
                  expert_tiles(shape->m, n_experts, eights ? 8 : 16));
        cuda_launch(dev, "experts' products of few rows", kernel, grid, WARPS * 32, 0, (U *)c,
                    (const bf16 *)a, (const bf16 *)b, offsets, n_experts, shape->n, shape->k,
                    early);
    });
}

bool matmul_small_experts(struct device *dev, void *c, const void *a, const void *b,
                          const int32_t *offsets, int n_experts, const struct matmul *shape,
                          bool after_activation)
{
    if (shape->in != DT_BF16 || !shape->trans_b || shape->k % 32 || shape->k < 32 ||
        !aligned(16, {a, b}, {}) || n_experts > 32768 ||
        (shape->m > 16 && shape->m > 8 * n_experts))
        return false;
    struct cuda_state *state = cuda_use(dev);
    bool early = after_activation && !state->plain_next;
    if ((int64_t)ceil_div(shape->n, 32) * std::min(shape->m, n_experts) >= 2 * state->n_sms)
        launch_experts<8, 2, 3>(dev, c, a, b, offsets, n_experts, shape, early);
    else if (shape->k >= 4096)
        launch_experts<16, 1, 4>(dev, c, a, b, offsets, n_experts, shape, early);
    else
        launch_experts<8, 1, 5>(dev, c, a, b, offsets, n_experts, shape, early);
    return true;
}
