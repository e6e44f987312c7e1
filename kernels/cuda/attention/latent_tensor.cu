/* latent_tensor.cu: the products of latent attention in bf16 on the tensor cores, by mma m16n8k16:
 * queries into the absorbed form and results out of it, all heads in one launch.
 *
 * A block has a tile of a head's rows and columns and a ring of stages of 64 of the inner
 * dimension. The sums are in k16 order (docs/internals/numerics.md) whatever the tile's size: few
 * rows take narrow tiles, all of whose weights are on their way at once, as reading these is all
 * the work; more take larger ones, up to 128 x 128. Results go out by way of shared memory, 16
 * bytes a thread. */
#include "kernels/cuda/attention/latent.cuh"
#include "kernels/cuda/tensor.cuh"

#define DEPTH    64 // of the inner dimension in a stage
#define FEW_ROWS 64

// ROWS x COLS of a block, by DOWN x ACROSS warps. B_ROWS: the inner dimension is B's rows.
template <int ROWS, int COLS, int DOWN, int ACROSS, int STAGES, bool B_ROWS> struct tile_of {
    static constexpr int rows = ROWS, cols = COLS, stages = STAGES;
    static constexpr int across = ACROSS, threads = DOWN * ACROSS * 32;
    static constexpr bool b_rows = B_ROWS;
    static constexpr int warp_rows = ROWS / DOWN, warp_cols = COLS / ACROSS;
    static constexpr int stage = (ROWS + COLS) * DEPTH; // elements
    static constexpr int blocks = COLS > 64 ? 2 : 1;    // on an SM, at least
    static constexpr size_t shared = (size_t)STAGES * stage * sizeof(bf16);
    static_assert(ROWS * COLS <= STAGES * stage, "the results have room");
};
template <bool B_ROWS> using few_rows = tile_of<16, 64, 1, 4, 8, B_ROWS>;
template <bool B_ROWS> using some_rows = tile_of<64, 64, 2, 2, 4, B_ROWS>;
template <bool B_ROWS> using many_rows = tile_of<128, 128, 2, 4, 3, B_ROWS>;

// Starts copying N rows of U units from the matrix at `from` into a tile; zeros where there is
// none.
template <int N, int U, int THREADS>
__device__ __forceinline__ void copy_units(bf16 *tile, const bf16 *from, int64_t stride, int rows,
                                           int cols)
{
#pragma unroll
    for (int i = threadIdx.x; i < N * U; i += THREADS) {
        int r = i / U, u = i % U;
        bool valid = r < rows && u * 8 < cols;
        copy16(unit_at<U>(tile, r, u), valid ? from + r * stride + u * 8 : from, valid);
    }
}

// Of the stage of the inner dimension from k on, if there is one, the entries of A, and of B.
template <typename T>
__device__ __forceinline__ void copy_left(bf16 *stage, const heads_product<bf16> &p, const bf16 *a,
                                          int row0, int k)
{
    if (k < p.depth)
        copy_units<T::rows, DEPTH / 8, T::threads>(stage, a + row0 * p.a_row + k, p.a_row,
                                                   p.rows - row0, p.depth - k);
}
template <typename T>
__device__ __forceinline__ void copy_right(bf16 *stage, const heads_product<bf16> &p, const bf16 *b,
                                           int col0, int k)
{
    bf16 *to = stage + T::rows * DEPTH;
    if (k >= p.depth) return;
    if constexpr (T::b_rows)
        copy_units<DEPTH, T::cols / 8, T::threads>(to, b + k * p.b_depth + col0, p.b_depth,
                                                   p.depth - k, p.cols - col0);
    else
        copy_units<T::cols, DEPTH / 8, T::threads>(to, b + col0 * p.b_col + k, p.b_col,
                                                   p.cols - col0, p.depth - k);
}

// sum += the products of a stage.
template <typename T>
__device__ __forceinline__ void add_stage(float (&sum)[T::warp_rows / 16][T::warp_cols / 8][4],
                                          bf16 *a)
{
    bf16 *b = a + T::rows * DEPTH;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row0 = warp / T::across * T::warp_rows, col0 = warp % T::across * T::warp_cols;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t x[T::warp_rows / 16][4];
#pragma unroll
        for (int i = 0; i < T::warp_rows / 16; i++)
            load_matrices(x[i],
                          unit_at<DEPTH / 8>(a, row0 + i * 16 + lane % 16, k / 8 + lane / 16));
#pragma unroll
        for (int j = 0; j < T::warp_cols / 16; j++) {
            uint32_t y[4];
            int col = col0 + j * 16;
            if constexpr (T::b_rows)
                load_matrices_transposed(
                    y, unit_at<T::cols / 8>(b, k + lane % 16, col / 8 + lane / 16));
            else
                load_matrices(
                    y, unit_at<DEPTH / 8>(b, col + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < T::warp_rows / 16; i++) {
                mma(sum[i][j * 2], x[i], y[0], y[1]);
                mma(sum[i][j * 2 + 1], x[i], y[2], y[3]);
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void
store_sums(const heads_product<bf16> &p, int row0, int col0, bf16 *tile,
           const float (&sum)[T::warp_rows / 16][T::warp_cols / 8][4])
{
    constexpr int UNITS = T::cols / 8;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int own_row = warp / T::across * T::warp_rows + lane / 4;
    int own_unit = warp % T::across * T::warp_cols / 8;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < T::warp_rows / 16; i++)
#pragma unroll
        for (int j = 0; j < T::warp_cols / 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                store_pair(unit_at<UNITS>(tile, own_row + i * 16 + h * 8, own_unit + j) +
                               lane % 4 * 2,
                           sum[i][j][h * 2], sum[i][j][h * 2 + 1]);
    __syncthreads();
    bf16 *c = p.c + blockIdx.z * p.c_head + row0 * p.c_row + col0;
#pragma unroll
    for (int i = threadIdx.x; i < T::rows * UNITS; i += T::threads) {
        int r = i / UNITS, u = i % UNITS;
        if (row0 + r < p.rows && col0 + u * 8 < p.cols)
            *(uint4 *)(c + r * p.c_row + u * 8) = *(const uint4 *)unit_at<UNITS>(tile, r, u);
    }
}

// Copies n rows of `units` times 16 bytes, which lie so many elements apart.
__device__ __forceinline__ void copy_entries(bf16 *to, int64_t to_row, const bf16 *from,
                                             int64_t from_row, int n, int units)
{
#pragma unroll 4
    for (int i = threadIdx.x; i < n * units; i += blockDim.x) {
        int r = i / units, u = i % units;
        *(uint4 *)(to + r * to_row + u * 8) = *(const uint4 *)(from + r * from_row + u * 8);
    }
}

// A head's rotated entries of some rows, and the keys of the head's share of them.
__device__ __forceinline__ void copy_rotated(const heads_product<bf16> &p, int row0, int rows)
{
    rows = min(rows, p.rows - row0);
    copy_entries(p.c + row0 * p.c_row + blockIdx.z * p.c_head + p.cols, p.c_row,
                 p.a + row0 * p.a_row + blockIdx.z * p.a_head + p.depth, p.a_row, rows,
                 p.rotated / 8);
    int n = (rows + p.n_heads - 1) / p.n_heads, first = row0 + blockIdx.z * n;
    copy_entries(p.c + first * p.c_row + p.n_heads * p.c_head, p.c_row, p.keys + first * p.c_head,
                 p.c_head, min(n, row0 + rows - first), (int)p.c_head / 8);
}

template <typename T>
__global__ void __launch_bounds__(T::threads, T::blocks) heads_kernel(heads_product<bf16> p)
{
    extern __shared__ __align__(128) bf16 memory[];
    const bf16 *a = p.a + blockIdx.z * p.a_head, *b = p.b + blockIdx.z * p.b_head;
    int row0 = blockIdx.x * T::rows, col0 = blockIdx.y * T::cols;
    bool early = p.early && col0 < p.cols;
    if (early)
#pragma unroll
        for (int s = 0; s < T::stages - 1; s++)
            copy_right<T>(memory + s * T::stage, p, b, col0, s * DEPTH);
    grid_begin();
    if (col0 >= p.cols) return copy_rotated(p, row0, T::rows);
    float sum[T::warp_rows / 16][T::warp_cols / 8][4] = {};
#pragma unroll
    for (int s = 0; s < T::stages - 1; s++) {
        if (!early) copy_right<T>(memory + s * T::stage, p, b, col0, s * DEPTH);
        copy_left<T>(memory + s * T::stage, p, a, row0, s * DEPTH);
        copies_commit();
    }
    int slot = 0, next = T::stages - 1;
#pragma unroll 1
    for (int k = 0; k < p.depth; k += DEPTH) {
        copies_wait<T::stages - 2>();
        __syncthreads(); // all are done with the stage before, too
        copy_right<T>(memory + next * T::stage, p, b, col0, k + (T::stages - 1) * DEPTH);
        copy_left<T>(memory + next * T::stage, p, a, row0, k + (T::stages - 1) * DEPTH);
        copies_commit();
        add_stage<T>(sum, memory + slot * T::stage);
        slot = slot + 1 < T::stages ? slot + 1 : 0;
        next = next + 1 < T::stages ? next + 1 : 0;
    }
    copies_wait<0>();
    store_sums<T>(p, row0, col0, memory, sum);
}

template <typename T> static dim3 blocks_of(const heads_product<bf16> &p)
{
    return dim3(ceil_div(p.rows, T::rows), ceil_div(p.cols, T::cols), p.n_heads);
}

template <typename T> static void launch(struct device *dev, const heads_product<bf16> &p)
{
    dim3 grid = blocks_of<T>(p);
    grid.y += p.keys != NULL;
    cuda_launch(dev, "latent attention's heads", heads_kernel<T>, grid, T::threads, T::shared, p);
}

template <bool B_ROWS> static void multiply(struct device *dev, const heads_product<bf16> &p)
{
    dim3 large = blocks_of<many_rows<B_ROWS>>(p);
    if (p.rows <= FEW_ROWS)
        launch<few_rows<B_ROWS>>(dev, p);
    else if ((int64_t)large.x * large.y * large.z <= 2 * cuda_use(dev)->n_sms)
        launch<some_rows<B_ROWS>>(dev, p);
    else
        launch<many_rows<B_ROWS>>(dev, p);
}

bool latent_mma_takes(struct device *dev, const heads_product<bf16> &p)
{
    return on_hopper(dev) && p.cols % 8 == 0 && p.depth % 8 == 0 && p.rotated % 8 == 0 &&
           aligned(16, {p.a, p.b, p.c, p.keys},
                   {p.a_row * 2, p.a_head * 2, p.b_head * 2, p.c_row * 2, p.c_head * 2,
                    (p.b_col == 1 ? p.b_depth : p.b_col) * 2});
}

void latent_mma(struct device *dev, const heads_product<bf16> &p)
{
    (p.b_col == 1 ? multiply<true> : multiply<false>)(dev, p);
}
