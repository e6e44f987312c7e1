/* norm.cu: RMS norm and layer norm over rows, and their gradients (formulas: kernels/cpu/norm.c).
 *
 * A row is a group's, one or several warps. It is read once and stays in registers, at most E
 * elements in a lane; a sum runs over a lane's elements in order, then over the lanes.
 * Gradients of the weights are summed in registers over the rows of a group, a fixed assignment,
 * then over groups and blocks: the same bits in every run.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/e4m3.cuh"

#define THREADS  256 // of a block, where a group is not larger
#define WIDEST   16384
#define N_BLOCKS 2 // for each multiprocessor, in the gradient

// The lanes of a group hold a row as E / V packs each: lane l the elements (k * GROUP + l) * V on.
template <typename T, int V, int E, int GROUP> struct held {
    static constexpr int PACKS = E / V;
    pack<T, V> at[PACKS];

    static INLINE int column(int k) { return (k * GROUP + (int)threadIdx.x % GROUP) * V; }
    INLINE void take(const T *row, int width)
    {
#pragma unroll
        for (int k = 0; k < PACKS; k++)
            if (column(k) < width) at[k] = *reinterpret_cast<const pack<T, V> *>(row + column(k));
    }
    INLINE void clear()
    {
        unrolled<PACKS>([&](int k) { at[k] = {}; });
    }
    // Between two passes: without it the compiler keeps every element as f32 meanwhile, in twice
    // the registers.
    INLINE void keep_packed()
    {
        if constexpr (sizeof at[0] == 16)
            unrolled<PACKS>([&](int k) {
                uint4 &u = reinterpret_cast<uint4 &>(at[k]);
                asm volatile("" : "+r"(u.x), "+r"(u.y), "+r"(u.z), "+r"(u.w));
            });
    }
    INLINE float operator()(int k, int i) const
    {
        if constexpr (sizeof(T) == 2 && V % 2 == 0) { // one instruction
            const uint32_t pair = reinterpret_cast<const uint32_t *>(&at[k])[i / 2];
            return i % 2 ? upper_of(pair) : lower_of(pair);
        }
        return to_f32(at[k].at[i]);
    }
};

// f(k) for the packs that lie in the row
template <typename H, typename F> INLINE void each_pack(int width, F f)
{
#pragma unroll
    for (int k = 0; k < H::PACKS; k++)
        if (H::column(k) < width) f(k);
}

// What the warp and its neighbours bring, `warps` of them, a power of two, one to a lane.
template <typename X> INLINE X of_warps(X x, X *shared, int warps)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return shared[(warp & -warps) + (lane & (warps - 1))];
}

// Sum over the group, given to all its threads. Where a group is several warps the block meets, so
// all its groups must call. shared: a float for each warp of the block, which nobody reads any
// more.
template <int GROUP> INLINE float group_sum(float x, float *shared)
{
    constexpr int WARPS = GROUP / 32;
    x = lanes_sum(x);
    return WARPS == 1 ? x : lanes_sum<WARPS>(of_warps(x, shared, WARPS));
}

// The largest, likewise, over so many groups.
template <int GROUP> INLINE unsigned groups_max(unsigned x, unsigned *shared, int groups)
{
    const int warps = GROUP / 32 * groups;
    x = __reduce_max_sync(~0u, x);
    return warps == 1 ? x : __reduce_max_sync(~0u, of_warps(x, shared, warps));
}

INLINE int64_t row_offset(const norm_shape &s, int row)
{
    return (int64_t)(row / s.heads) * s.stride + (int64_t)(row % s.heads) * s.width;
}

template <int GROUP> constexpr int block_of = GROUP > THREADS ? GROUP : THREADS;

// A lane's pack is one half of 16 columns and its neighbour's the other.
INLINE void store_codes(uint8_t *codes, const pack<bf16, 8> &x, bool stores, int scale)
{
    const bool second = threadIdx.x % 2;
    uint32_t pairs[4], own[2] = {};
    scale_down<8>(pairs, x, scale);
    unrolled<4>([&](int i) {
        own[i / 2] |= e4m3_pair(lower_of(pairs[i]), upper_of(pairs[i])) << i % 2 * 16;
    });
    const uint32_t other = __shfl_xor_sync(0xffffffffu, own[!second], 1);
    const uint32_t lower = second ? other : own[0], upper = second ? own[1] : other;
    if (stores)
        *(uint2 *)codes =
            make_uint2(__byte_perm(lower, upper, 0x5140), __byte_perm(lower, upper, 0x7362));
}

/* `sharers` groups of a block have a row, a power of two: each sums all of it, in the same order,
 * and ends every so many-th pack. Of few rows that is faster, which are instructions' time; the
 * bits are the same. early: w may be read before the kernel in front has ended. */
template <typename T, int V, int E, int GROUP>
__global__ void __launch_bounds__(block_of<GROUP>)
    norm_kernel(T *y, float *rstd, float *mean, const T *x, const T *w, const T *b, norm_shape s,
                uint8_t *codes, int8_t *scales, int sharers, bool early)
{
    grid_release();
    __shared__ float shared[3][32];
    const int group = (blockIdx.x * blockDim.x + threadIdx.x) / GROUP, part = group & (sharers - 1);
    int r = group / sharers;
    const bool is_row = r < s.rows; // the groups of the last block without one go along
    if (!is_row) r = s.rows - 1;
    using H = held<T, V, E, GROUP>;
    H row, scale;
    int64_t offset = row_offset(s, r);
    asm volatile("" : "+l"(offset)); // divided by now
    if (!early) grid_wait();
    if (w)
        scale.take(s.own_weights ? w + (int64_t)(r % s.heads) * s.width : w, s.width);
    else
        scale.clear();
    scale.keep_packed();
    if (early) grid_wait();
    row.take(x + offset, s.width);
    y += offset;
    float centre = 0, squares = 0;
    if (s.kind == NORM_LAYER) {
        float sum = 0;
        each_pack<H>(s.width, [&](int k) { unrolled<V>([&](int i) { sum += row(k, i); }); });
        centre = group_sum<GROUP>(sum, shared[0]) / s.width;
        row.keep_packed();
    }
    each_pack<H>(s.width, [&](int k) {
        unrolled<V>([&](int i) { squares += (row(k, i) - centre) * (row(k, i) - centre); });
    });
    // all groups have read what may be written in place
    float factor = 1.f / sqrtf(group_sum<GROUP>(squares, shared[1]) / s.width + s.eps);
    row.keep_packed();
    float one = s.kind == NORM_RMS_PLUS_ONE || !w ? 1.f : 0.f;
    unsigned largest = 0;
    each_pack<H>(s.width, [&](int k) {
        if ((k & (sharers - 1)) != part) return;
        float bias[V] = {};
        if (b) load<T, V>(bias, b + H::column(k));
        float to[V];
        unrolled<V>(
            [&](int i) { to[i] = (row(k, i) - centre) * factor * (one + scale(k, i)) + bias[i]; });
        row.at[k] = packed<T, V>(to);
        if constexpr (V == 8) largest = max(largest, largest_of<T, V>(row.at[k]));
        if (is_row) *reinterpret_cast<pack<T, V> *>(y + H::column(k)) = row.at[k];
    });
    const bool is_first = is_row && part == 0 && threadIdx.x % GROUP == 0;
    if constexpr (V == 8)
        if (codes) {
            const int8_t of_row =
                row_scale(groups_max<GROUP>(largest, (unsigned *)shared[2], sharers));
            row.keep_packed();
            codes += (int64_t)r * s.width;
            unrolled<H::PACKS>([&](int k) {
                if ((k & (sharers - 1)) == part)
                    store_codes(codes + H::column(k), row.at[k], is_row && H::column(k) < s.width,
                                of_row);
            });
            if (is_first) scales[r] = of_row;
        }
    if (is_first) {
        const int place = norm_place(&s, r);
        if (rstd) rstd[place] = factor;
        if (mean && s.kind == NORM_LAYER) mean[r] = centre;
    }
}

// parts[c] = the sum over the block's groups of what their lanes hold for column c
template <typename H, int V, int GROUP>
INLINE void join_groups(float *parts, const float (&held)[H::PACKS][V], int width)
{
    extern __shared__ float sums[]; // (groups, width)
    int n = blockDim.x / GROUP;
    float *to = n == 1 ? parts : sums + threadIdx.x / GROUP * width;
    each_pack<H>(width,
                 [&](int k) { unrolled<V>([&](int i) { to[H::column(k) + i] = held[k][i]; }); });
    if (n == 1) return;
    __syncthreads();
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float sum = 0;
        for (int g = 0; g < n; g++) sum += sums[g * width + c];
        parts[c] = sum;
    }
    __syncthreads();
}

// dw_parts, db_parts (blocks, width), or NULL
template <typename T, int V, int E, int GROUP, bool LAYER>
__global__ void __launch_bounds__(block_of<GROUP>, 512 / block_of<GROUP>)
    norm_back_kernel(T *dx, float *dw_parts, float *db_parts, const T *dy, const T *x, const T *w,
                     const float *rstd, const float *mean, norm_shape s, bool add)
{
    grid_begin();
    __shared__ float shared[2][32];
    using H = held<T, V, E, GROUP>;
    H scale = {};
    if (w) scale.take(w, s.width);
    float dw[H::PACKS][V] = {}, db[LAYER ? H::PACKS : 1][V] = {};
    float one = s.kind == NORM_RMS_PLUS_ONE || !w ? 1.f : 0.f;
    int groups = blockDim.x / GROUP;
    for (int first = blockIdx.x * groups; first < s.rows; first += gridDim.x * groups) {
        int r = first + threadIdx.x / GROUP;
        const bool is_row = r < s.rows; // the groups of the last block without one go along
        if (!is_row) r = s.rows - 1;
        int64_t offset = row_offset(s, r);
        H in, grad, old;
        in.take(x + offset, s.width);
        grad.take(dy + offset, s.width);
        float factor = rstd[r], centre = LAYER ? mean[r] : 0.f, dot = 0, sum = 0;
        each_pack<H>(s.width, [&](int k) {
            unrolled<V>([&](int i) {
                float n = (in(k, i) - centre) * factor, gw = grad(k, i) * (one + scale(k, i));
                dot += gw * n;
                if (LAYER) sum += gw;
                dw[k][i] += is_row ? grad(k, i) * n : 0.f;
                if (LAYER) db[k][i] += is_row ? grad(k, i) : 0.f;
            });
        });
        __syncthreads();
        dot = group_sum<GROUP>(dot, shared[0]) / s.width;
        if (LAYER) sum = group_sum<GROUP>(sum, shared[1]) / s.width;
        if (!is_row) continue; // the last time round
        if (add) old.take(dx + offset, s.width);
        in.keep_packed();
        grad.keep_packed();
        scale.keep_packed();
        each_pack<H>(s.width, [&](int k) {
            float to[V];
#pragma unroll
            for (int i = 0; i < V; i++)
                to[i] =
                    (add ? old(k, i) : 0.f) + factor * (grad(k, i) * (one + scale(k, i)) -
                                                        (in(k, i) - centre) * factor * dot - sum);
            store<T, V>(dx + offset + H::column(k), to);
        });
    }
    int64_t at = (int64_t)blockIdx.x * s.width;
    if (dw_parts) join_groups<H, V, GROUP>(dw_parts + at, dw, s.width);
    if constexpr (LAYER)
        if (db_parts) join_groups<H, V, GROUP>(db_parts + at, db, s.width);
}

// Calls f(element, number<V>, number<E>, number<GROUP>).
template <typename F>
static void choose(struct device *dev, const struct norm_shape *s, bool pointers_fit, F f)
{
    int64_t size = dtype_size(s->dt);
    bool fits = pointers_fit && s->width * size % 16 == 0 &&
                (s->rows <= s->heads || s->stride * size % 16 == 0);
    if (s->width > WIDEST) {
        device_fail(dev, "a norm of %d elements: at most %d are supported", s->width, WIDEST);
        return;
    }
    with_type_wide(s->dt, fits, [&](auto t, auto v) {
        if constexpr (decltype(v)::value == 1)
            f(t, v, number<32>(), number<512>());
        else if (s->width <= 512)
            f(t, v, number<16>(), number<32>());
        else if (s->width <= 2048)
            f(t, v, number<32>(), number<64>());
        else if (s->width <= 8192)
            f(t, v, number<32>(), number<256>());
        else
            f(t, v, number<32>(), number<512>());
    });
}

void cuda_norm(struct device *dev, void *y, const struct norm_args *args,
               const struct norm_shape *shape)
{
    bool fits = aligned(16, {y, args->x, args->w, args->b}, {});
    choose(dev, shape, fits, [&](auto t, auto v, auto e, auto group) {
        constexpr int V = decltype(v)::value, E = decltype(e)::value,
                      GROUP = decltype(group)::value, BLOCK = block_of<GROUP>;
        const bool apart = V != 8 || shape->width % 16 != 0 || !aligned(16, {args->codes}, {});
        // a block of several groups of warps meets before it writes
        const bool shares = V == 8 && GROUP > 32 && shape->rows <= cuda_use(dev)->n_sms;
        const int sharers = shares ? BLOCK / GROUP : 1;
        cuda_launch(dev, "norm", norm_kernel<decltype(t), V, E, GROUP>,
                    ceil_div((int64_t)shape->rows * sharers, BLOCK / GROUP), BLOCK, 0, y,
                    args->rstd, args->mean, args->x, args->w, args->b, *shape,
                    apart ? NULL : args->codes, args->scales, sharers, args->early);
        if (args->codes && apart)
            cuda_quantise(dev, args->codes, args->scales, y, shape->rows, shape->width, shape->dt,
                          NULL, 0);
    });
}

static int most_blocks(struct device *dev)
{
    return N_BLOCKS * cuda_use(dev)->n_sms;
}

size_t cuda_norm_scratch(struct device *dev, int width)
{
    return (size_t)most_blocks(dev) * width * 2 * sizeof(float); // of dw and db
}

void cuda_norm_back(struct device *dev, void *dx, float *dw, float *db, const void *dy,
                    const struct norm_args *args, const struct norm_shape *shape, bool add)
{
    if (shape->rows <= 0) return;
    for (int h = 0; shape->own_weights && h < shape->heads; h++) {
        const size_t first = (size_t)h * shape->width, at = first * dtype_size(shape->dt);
        struct norm_shape head = *shape;
        struct norm_args of = *args;
        head.rows /= shape->heads;
        head.heads = 1;
        head.own_weights = false;
        of.x = (const char *)args->x + at;
        of.w = (const char *)args->w + at;
        of.rstd = args->rstd + (size_t)h * head.rows;
        cuda_norm_back(dev, (char *)dx + at, dw ? dw + first : NULL, NULL, (const char *)dy + at,
                       &of, &head, add);
    }
    if (shape->own_weights) return;
    const int width = shape->width, n_sums = (dw ? 1 : 0) + (db ? 1 : 0);
    bool fits = aligned(16, {dx, dy, args->x, args->w}, {});
    choose(dev, shape, fits, [&](auto t, auto v, auto e, auto group) {
        using T = decltype(t);
        constexpr int V = decltype(v)::value, E = decltype(e)::value,
                      GROUP = decltype(group)::value, BLOCK = block_of<GROUP>;
        int blocks = ceil_div(shape->rows, BLOCK / GROUP), most = most_blocks(dev);
        if (blocks > most) blocks = most;
        size_t part = (size_t)blocks * width,
               shared = GROUP < BLOCK ? BLOCK / GROUP * width * sizeof(float) : 0;
        float *parts = NULL;
        if (n_sums && !(parts = (float *)cuda_workspace(dev, n_sums * part * 4))) return;
        float *db_parts = db ? parts + (dw ? part : 0) : NULL;
        auto kernel = shape->kind == NORM_LAYER ? norm_back_kernel<T, V, E, GROUP, true>
                                                : norm_back_kernel<T, V, E, GROUP, false>;
        cuda_launch(dev, "norm_back", kernel, blocks, BLOCK, shared, dx, dw ? parts : (float *)NULL,
                    db_parts, dy, args->x, args->w, args->rstd, args->mean, *shape, add);
        if (dw) cuda_add_parts(dev, dw, parts, blocks, width);
        if (db) cuda_add_parts(dev, db, db_parts, blocks, width);
    });
}
