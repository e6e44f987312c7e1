/* attn_decode.cu: attention of one new row a sequence to its paged context: a decode step.
 *
 * The work is reading the context once. A block takes one sequence, one kv head with up to G of its
 * query heads, and one chunk of the context; each warp keeps its own running softmax, merged at the
 * end. Where a context has several chunks, the last block to finish merges them. How a context is
 * cut depends on its length only, so a row's result does not depend on the batch; the grid depends
 * on max_context only, so a captured launch serves every shorter context.
 *
 * bf16: the tensor cores, with the heads as rows of the left operand. As in matmul_small.cu, inner
 * dimensions are taken in an order that lets every operand come straight from memory in 16-byte
 * loads. f32: ordinary arithmetic, LANES neighbouring lanes to a key.
 */
#include "kernels/cuda/attention.cuh"

#define MAX_CHUNKS 64

// What a block works on.
struct task {
    int s, row, n_keys; // sequence, its row, keys it sees: 0 .. n_keys - 1
    int head0, heads, kv_head;
    int n_chunks, begin, end; // chunks of the context; keys of this block's
};

// False where the block has nothing to do. `unit`: chunks are multiples of it.
template <int G, typename T>
__device__ __forceinline__ bool task_of(task &w, const attn_args<T> &a, int unit, int max_chunks)
{
    int blocks_per_kv = (a.group + G - 1) / G, first = blockIdx.y % blocks_per_kv * G;
    w.s = blockIdx.z;
    w.row = a.query_start[w.s];
    w.kv_head = blockIdx.y / blocks_per_kv;
    w.heads = min(G, a.group - first);
    w.head0 = w.kv_head * a.group + first;
    if (a.query_start[w.s + 1] <= w.row) return false;
    w.n_keys = a.context_len[w.s] > 0 ? a.positions[w.row] + 1 : 0;
    int lo = a.window > 0 && w.n_keys > a.window ? w.n_keys - a.window : 0;
    int chunk = max(unit, ((w.n_keys + max_chunks - 1) / max_chunks + unit - 1) / unit * unit);
    int first_chunk = lo / chunk, at = first_chunk + blockIdx.x;
    w.n_chunks = w.n_keys > 0 ? (w.n_keys - 1) / chunk - first_chunk + 1 : 1;
    w.begin = max(lo, at * chunk);
    w.end = min(w.n_keys, (at + 1) * chunk);
    return (int)blockIdx.x < w.n_chunks;
}

// Results of a block's warps: a maximum and a sum (log2 units) and unnormalised values for each
// head.
template <int WARPS, int G, int STRIDE> struct partial {
    float out[WARPS][G][STRIDE];
    float max[WARPS][G], sum[WARPS][G];
    float weight[MAX_CHUNKS][G], total[G];
};

/* Merges the warps, and in the last block of a context the chunks. parts: per (sequence, head,
 * chunk) head_dim unnormalised values; ends: their (maximum, sum). */
template <typename T, int WARPS, int G, int STRIDE>
__device__ __forceinline__ void finish(partial<WARPS, G, STRIDE> &p, const task &w,
                                       const attn_args<T> &a, float *parts, float2 *ends,
                                       unsigned *tickets, int max_chunks)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    for (int g = warp; g < w.heads; g += WARPS) {
        float most = -INFINITY, all = 0, factor[WARPS];
#pragma unroll
        for (int i = 0; i < WARPS; i++) most = fmaxf(most, p.max[i][g]);
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            factor[i] = p.max[i][g] == -INFINITY ? 0.f : exp2f(p.max[i][g] - most);
            all += factor[i] * p.sum[i][g];
        }
        bool whole = w.n_chunks == 1;
        float scale = !whole ? 1.f : all > 0 ? 1.f / all : 0.f;
        int64_t head = (int64_t)w.row * a.n_heads + w.head0 + g;
        int64_t part = ((int64_t)w.s * a.n_heads + w.head0 + g) * max_chunks + blockIdx.x;
        for (int d = lane; d < a.head_dim; d += 32) {
            float x = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i++) x += factor[i] * p.out[i][g][d];
            if (whole)
                a.out[head * a.head_dim + d] = from_f32<T>(x * scale);
            else
                parts[part * a.head_dim + d] = x;
        }
        if (!whole && lane == 0) ends[part] = make_float2(most, all);
    }
    if (w.n_chunks == 1) return;

    if (!last_block(&tickets[blockIdx.z * gridDim.y + blockIdx.y], w.n_chunks)) return;
    for (int g = warp; g < w.heads; g += WARPS) {
        const float2 *end_g = ends + ((int64_t)w.s * a.n_heads + w.head0 + g) * max_chunks;
        float most = -INFINITY, all = 0;
        float2 e[MAX_CHUNKS / 32];
#pragma unroll
        for (int i = 0; i < MAX_CHUNKS / 32; i++) {
            int c = lane + i * 32;
            e[i] = c < w.n_chunks ? __ldcg(&end_g[c]) : make_float2(-INFINITY, 0.f);
            most = fmaxf(most, e[i].x);
        }
        most = lanes_max(most);
#pragma unroll
        for (int i = 0; i < MAX_CHUNKS / 32; i++) {
            float factor = e[i].x == -INFINITY ? 0.f : exp2f(e[i].x - most);
            if (lane + i * 32 < w.n_chunks) p.weight[lane + i * 32][g] = factor;
            all += factor * e[i].y;
        }
        all = lanes_sum(all);
        if (lane == 0) p.total[g] = all;
    }
    __syncthreads();
    for (int g = warp; g < w.heads; g += WARPS)
        for (int d = lane; d < a.head_dim; d += 32) {
            const float *part =
                parts + ((int64_t)w.s * a.n_heads + w.head0 + g) * max_chunks * a.head_dim + d;
            float x = 0;
#pragma unroll 8
            for (int c = 0; c < w.n_chunks; c++)
                x += p.weight[c][g] * __ldcg(&part[(int64_t)c * a.head_dim]);
            a.out[((int64_t)w.row * a.n_heads + w.head0 + g) * a.head_dim + d] =
                from_f32<T>(x / p.total[g]);
        }
}

// ---- bf16 --------------------------------------------------------------------------------------

#define UNIT  256 // keys
#define HEADS 8   // of a block: half the rows of the left operand; the others are zeros

// d (16 x 8) += a b, where rows 8.. of a are zeros
__device__ __forceinline__ void mma_half(float &d0, float &d1, uint32_t a0, uint32_t a2,
                                         uint32_t b0, uint32_t b1)
{
    float none0 = 0, none1 = 0; // the results of those rows
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, "
        "{%7,%8}, {%0,%1,%2,%3};"
        : "+f"(d0), "+f"(d1), "+f"(none0), "+f"(none1)
        : "r"(a0), "r"(0u), "r"(a2), "r"(b0), "r"(b1));
}

/* HD: head_dim rounded up. Each warp takes 16 keys at a time. Lane (g, t) = (lane / 4, lane % 4)
 * loads keys 8 j + g (j = 0, 1), dimensions 32 c + 8 t .. + 7: columns g of the scores' right
 * operand; values of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t, dimensions 64 c + 8 g .. + 7. Element e
 * of these makes column g, dimension 64 c + 8 g + e, of the e-th product of weights and values. */
template <int HD, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, HD <= 128 ? 2 : 1)
    tensor_kernel(attn_args<bf16> a, float *parts, float2 *ends, unsigned *tickets, int max_chunks)
{
    extern __shared__ __align__(16) char shared[];
    auto &p = *reinterpret_cast<partial<WARPS, HEADS, HD + 4> *>(shared);
    constexpr int KEYS = WARPS * 16, KC = HD / 32, VC = HD / 64;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    task w;
    int key_at[2]; // rows of the pool, or -1
    // Where the keys lie is known before the step's kernels: it is looked up under the end of the
    // kernel before this one, if that writes none of it.
    if (!a.early) grid_wait();
    bool works = task_of<HEADS>(w, a, UNIT, max_chunks);
    auto find = [&](int base) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int key = base + warp * 16 + j * 8 + g;
            key_at[j] = key < w.end ? (int)key_row<true>(a, w.s, key) : -1;
        }
    };
    if (works) find(w.begin);
    if (a.early) grid_wait();
    grid_release();
    if (!works) return;

    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 q[KC];
    const bf16 *q_row = a.q + w.row * a.q_stride + (int64_t)(w.head0 + g) * a.head_dim + t * 8;
#pragma unroll
    for (int c = 0; c < KC; c++)
        q[c] = g < w.heads && c * 32 + t * 8 < a.head_dim ? *(const uint4 *)(q_row + c * 32) : zero;
    const bf16 *keys = a.k + (int64_t)w.kv_head * a.head_dim + t * 8;
    const bf16 *values = a.v + (int64_t)w.kv_head * a.head_dim + g * 8;

    float top = -INFINITY, sum = 0, out[VC * 8][2] = {}; // of head g
    for (int base = w.begin; base < w.end; base += KEYS) {
        uint4 k[2][KC], v[4][VC];
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int c = 0; c < KC; c++)
                k[j][c] = key_at[j] >= 0 && c * 32 + t * 8 < a.head_dim
                              ? *(const uint4 *)(keys + key_at[j] * a.kv_stride + c * 32)
                              : zero;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int at = __shfl_sync(~0u, key_at[j / 2], (t * 2 + j % 2) * 4); // the lane with that key
#pragma unroll
            for (int c = 0; c < VC; c++)
                v[j][c] = at >= 0 && c * 64 + g * 8 < a.head_dim
                              ? *(const uint4 *)(values + at * a.kv_stride + c * 64)
                              : zero;
        }

        if (base + KEYS < w.end) find(base + KEYS);

        float score[2][2] = {}, half[2][2] = {}, factor = score_factor(a), now = top;
#pragma unroll
        for (int c = 0; c < KC; c++)
#pragma unroll
            for (int j = 0; j < 2; j++) { // in two sums, so that fewer wait for one another
                mma_half(score[j][0], score[j][1], q[c].x, q[c].y, k[j][c].x, k[j][c].y);
                mma_half(half[j][0], half[j][1], q[c].z, q[c].w, k[j][c].z, k[j][c].w);
            }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                score[j][e] = (score[j][e] + half[j][e]) * factor;
                if (a.softcap > 0) score[j][e] = softcap_log2(a, score[j][e]);
                if (base + warp * 16 + j * 8 + t * 2 + e >= w.end) score[j][e] = -INFINITY;
                now = fmaxf(now, score[j][e]);
            }
        now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
        now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
        float shift = now == -INFINITY ? 0.f : now, shrink = exp2_fast(top - shift);
        top = now;
        sum *= shrink;
#pragma unroll
        for (int i = 0; i < VC * 8; i++) {
            out[i][0] *= shrink;
            out[i][1] *= shrink;
        }
        uint32_t weights[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float x = exp2_fast(score[j][0] - shift), y = exp2_fast(score[j][1] - shift);
            sum += x + y;
            __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
            weights[j] = *reinterpret_cast<uint32_t *>(&pair);
        }
#pragma unroll
        for (int c = 0; c < VC; c++)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                // element e of two keys side by side
                auto pair = [&](const uint4 &x, const uint4 &y) {
                    uint32_t lo = e / 2 == 0 ? x.x : e / 2 == 1 ? x.y : e / 2 == 2 ? x.z : x.w;
                    uint32_t hi = e / 2 == 0 ? y.x : e / 2 == 1 ? y.y : e / 2 == 2 ? y.z : y.w;
                    return __byte_perm(lo, hi, e % 2 ? 0x7632 : 0x5410);
                };
                mma_half(out[c * 8 + e][0], out[c * 8 + e][1], weights[0], weights[1],
                         pair(v[0][c], v[1][c]), pair(v[2][c], v[3][c]));
            }
    }

    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0) {
        p.max[warp][g] = top;
        p.sum[warp][g] = sum;
    }
#pragma unroll
    for (int c = 0; c < VC; c++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < 8; e++)
                p.out[warp][g][c * 64 + (t * 2 + i) * 8 + e] = out[c * 8 + e][i];
    finish(p, w, a, parts, ends, tickets, max_chunks);
}

// ---- f32 ---------------------------------------------------------------------------------------

#define F32_WARPS 4
#define AHEAD     4 // keys a set of lanes has in flight
#define F32_KEYS  64

__device__ __forceinline__ void load8(float (&ret)[8], const float *from, bool valid)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x[4] = {};
        if (valid) load<float, 4>(x, from + i * 4);
#pragma unroll
        for (int k = 0; k < 4; k++) ret[i * 4 + k] = x[k];
    }
}

template <int LANES, int G>
__global__ void __launch_bounds__(F32_WARPS * 32)
    f32_kernel(attn_args<float> a, float *parts, float2 *ends, unsigned *tickets, int max_chunks)
{
    grid_begin();
    constexpr int KEYS = 32 / LANES; // a warp reads at once
    __shared__ partial<F32_WARPS, G, LANES * 8> shared;
    task w;
    if (!task_of<G>(w, a, F32_KEYS, max_chunks)) return;

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = lane % LANES * 8;
    bool in_dims = dim < a.head_dim;
    float q[G][8], out[G][8] = {}, top[G], sum[G] = {};
    const float *q_row = a.q + w.row * a.q_stride + (int64_t)w.head0 * a.head_dim + dim;
#pragma unroll
    for (int g = 0; g < G; g++) {
        load8(q[g], q_row + (int64_t)g * a.head_dim, in_dims && g < w.heads);
        top[g] = -INFINITY;
    }

    const float *keys = a.k + (int64_t)w.kv_head * a.head_dim + dim;
    const float *values = a.v + (int64_t)w.kv_head * a.head_dim + dim;
    for (int base = w.begin; base < w.end; base += F32_WARPS * KEYS * AHEAD) {
        float k[AHEAD][8], v[AHEAD][8], score[AHEAD][G];
        bool valid[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            int j = base + (u * F32_WARPS + warp) * KEYS + lane / LANES;
            valid[u] = j < w.end;
            int64_t at = valid[u] && in_dims ? key_row<true>(a, w.s, j) * a.kv_stride : 0;
            load8(k[u], keys + at, valid[u] && in_dims);
            load8(v[u], values + at, valid[u] && in_dims);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
#pragma unroll
            for (int g = 0; g < G; g++) {
                score[u][g] = 0;
#pragma unroll
                for (int e = 0; e < 8; e++) score[u][g] += q[g][e] * k[u][e];
                score[u][g] = lanes_sum<LANES>(score[u][g]);
            }
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
#pragma unroll
            for (int g = 0; g < G; g++)
                score[u][g] = valid[u] ? score_log2(a, score[u][g]) : -INFINITY;
#pragma unroll
        for (int g = 0; g < G; g++) {
            float now = top[g];
#pragma unroll
            for (int u = 0; u < AHEAD; u++) now = fmaxf(now, score[u][g]);
            float shift = now == -INFINITY ? 0.f : now, factor = exp2f(top[g] - shift);
            top[g] = now;
            sum[g] *= factor;
#pragma unroll
            for (int e = 0; e < 8; e++) out[g][e] *= factor;
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                float p = exp2f(score[u][g] - shift);
                sum[g] += p;
#pragma unroll
                for (int e = 0; e < 8; e++) out[g][e] += p * v[u][e];
            }
        }
    }

    // the sets of lanes of a warp
#pragma unroll
    for (int g = 0; g < G; g++) {
        float most = top[g];
#pragma unroll
        for (int o = LANES; o < 32; o <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        float factor = most == -INFINITY ? 0.f : exp2f(top[g] - most);
        sum[g] *= factor;
#pragma unroll
        for (int o = LANES; o < 32; o <<= 1) sum[g] += __shfl_xor_sync(~0u, sum[g], o);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            float x = out[g][e] * factor;
#pragma unroll
            for (int o = LANES; o < 32; o <<= 1) x += __shfl_xor_sync(~0u, x, o);
            if (lane < LANES) shared.out[warp][g][dim + e] = x;
        }
        if (lane == 0) {
            shared.max[warp][g] = most;
            shared.sum[warp][g] = sum[g];
        }
    }
    finish(shared, w, a, parts, ends, tickets, max_chunks);
}

// ---- launches ----------------------------------------------------------------------------------

// Grid and workspace of a decode step whose blocks take `heads` query heads and chunks of `unit`
// keys.
struct decode_plan {
    dim3 grid;
    int max_chunks;
    float *parts;
    float2 *ends;
    bool ok;
};

template <typename T>
static decode_plan plan_of(struct device *dev, const attn_args<T> &a, int heads, int unit,
                           int max_context)
{
    decode_plan p = {};
    int rows = a.n_kv_heads * ceil_div(a.group, heads);
    p.max_chunks = ceil_div(max_context, unit);
    if (p.max_chunks > MAX_CHUNKS) p.max_chunks = MAX_CHUNKS;
    if (p.max_chunks < 1 || (int64_t)rows * a.n_seqs > N_TICKETS) p.max_chunks = 1;
    p.grid = dim3(p.max_chunks, rows, a.n_seqs);
    p.ok = true;
    if (p.max_chunks == 1) return p;
    size_t n_parts = (size_t)a.n_seqs * a.n_heads * p.max_chunks;
    size_t ends_at = (n_parts * a.head_dim * sizeof(float) + 255) / 256 * 256;
    char *memory = (char *)cuda_workspace(dev, ends_at + n_parts * sizeof(float2));
    p.ok = memory != NULL;
    p.parts = (float *)memory;
    p.ends = memory ? (float2 *)(memory + ends_at) : NULL;
    return p;
}

template <int LANES, int G>
static void launch_f32(struct device *dev, const attn_args<float> &a, int max_context)
{
    decode_plan p = plan_of(dev, a, G, F32_KEYS, max_context);
    if (p.ok)
        cuda_launch(dev, "attention of a decode step", f32_kernel<LANES, G>, p.grid, F32_WARPS * 32,
                    0, a, p.parts, p.ends, cuda_use(dev)->tickets, p.max_chunks);
}

template <int LANES>
static void choose_group(struct device *dev, const attn_args<float> &a, int max_context)
{
    if (a.group == 1)
        launch_f32<LANES, 1>(dev, a, max_context);
    else if (a.group == 2)
        launch_f32<LANES, 2>(dev, a, max_context);
    else if (a.group <= 4)
        launch_f32<LANES, 4>(dev, a, max_context);
    else
        launch_f32<LANES, 8>(dev, a, max_context);
}

template <int HD, int WARPS>
static void launch_tensor(struct device *dev, const attn_args<bf16> &a, int max_context)
{
    decode_plan p = plan_of(dev, a, HEADS, UNIT, max_context);
    if (p.ok)
        cuda_launch(dev, "attention of a decode step", tensor_kernel<HD, WARPS>, p.grid, WARPS * 32,
                    sizeof(partial<WARPS, HEADS, HD + 4>), a, p.parts, p.ends,
                    cuda_use(dev)->tickets, p.max_chunks);
}

template <typename T> static bool fits(const attn_args<T> &a)
{
    int64_t size = sizeof(T);
    return a.head_dim % 8 == 0 && a.head_dim <= 256 && a.n_seqs <= 65535 &&
           aligned(16, {a.q, a.k, a.v}, {a.q_stride * size, a.kv_stride * size});
}

template <> bool attn_decode<float>(struct device *dev, const attn_args<float> &a, int max_context)
{
    if (!fits(a)) return false;
    if (a.head_dim <= 64)
        choose_group<8>(dev, a, max_context);
    else if (a.head_dim <= 128)
        choose_group<16>(dev, a, max_context);
    else
        choose_group<32>(dev, a, max_context);
    return true;
}

template <> bool attn_decode<bf16>(struct device *dev, const attn_args<bf16> &a, int max_context)
{
    if (!fits(a)) return false;
    if (a.head_dim <= 64)
        launch_tensor<64, 8>(dev, a, max_context);
    else if (a.head_dim <= 128)
        launch_tensor<128, 8>(dev, a, max_context);
    else
        launch_tensor<256, 4>(dev, a, max_context);
    return true;
}
