/* attn_decode.cu: attention of one new row a sequence to its paged context in f32: a decode step.
 *
 * The work is reading the context once. A block takes one sequence, one kv head with up to G of its
 * query heads, and one chunk of the context; each warp keeps its own running softmax, LANES
 * neighbouring lanes to a key, merged at the end. Where a context has several chunks, the last
 * block to finish merges them. How a context is cut depends on its length only; the grid depends on
 * max_context only, so that a captured launch serves every shorter context.
 */
#include "kernels/cuda/attention/attention.cuh"

#define MAX_CHUNKS 64
#define WARPS      4
#define UNIT       64 // keys: chunks are multiples of it
#define AHEAD      4  // keys a set of lanes has in flight

// What a block works on.
struct task {
    int s, row, n_keys; // sequence, its row, keys it sees: 0 .. n_keys - 1
    int head0, heads, kv_head;
    int n_chunks, begin, end; // chunks of the context; keys of this block's
};

// False where the block has nothing to do.
template <int G>
__device__ __forceinline__ bool task_of(task &w, const attn_args<float> &a, int max_chunks)
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
    int chunk = max(UNIT, ((w.n_keys + max_chunks - 1) / max_chunks + UNIT - 1) / UNIT * UNIT);
    int first_chunk = lo / chunk, at = first_chunk + blockIdx.x;
    w.n_chunks = w.n_keys > 0 ? (w.n_keys - 1) / chunk - first_chunk + 1 : 1;
    w.begin = max(lo, at * chunk);
    w.end = min(w.n_keys, (at + 1) * chunk);
    return (int)blockIdx.x < w.n_chunks;
}

// Results of a block's warps: a maximum and a sum (log2 units) and unnormalised values for each
// head.
template <int G, int STRIDE> struct partial {
    float out[WARPS][G][STRIDE];
    float max[WARPS][G], sum[WARPS][G];
    float weight[MAX_CHUNKS][G], total[G];
};

/* Merges the warps, and in the last block of a context the chunks. parts: per (sequence, head,
 * chunk) head_dim unnormalised values; ends: their (maximum, sum). */
template <int G, int STRIDE>
__device__ __forceinline__ void finish(partial<G, STRIDE> &p, const task &w,
                                       const attn_args<float> &a, float *parts, float2 *ends,
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
        float total = with_sink(a, w.head0 + g, most, all);
        float scale = !whole ? 1.f : total > 0 ? 1.f / total : 0.f;
        int64_t head = (int64_t)w.row * a.n_heads + w.head0 + g;
        int64_t part = ((int64_t)w.s * a.n_heads + w.head0 + g) * max_chunks + blockIdx.x;
        for (int d = lane; d < a.head_dim; d += 32) {
            float x = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i++) x += factor[i] * p.out[i][g][d];
            if (whole)
                a.out[head * a.head_dim + d] = x * scale;
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
        if (lane == 0) p.total[g] = with_sink(a, w.head0 + g, most, all);
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
            a.out[((int64_t)w.row * a.n_heads + w.head0 + g) * a.head_dim + d] = x / p.total[g];
        }
}

// ---- f32 ---------------------------------------------------------------------------------------

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
__global__ void __launch_bounds__(WARPS * 32)
    decode_kernel(attn_args<float> a, float *parts, float2 *ends, unsigned *tickets, int max_chunks)
{
    grid_begin();
    constexpr int KEYS = 32 / LANES; // a warp reads at once
    __shared__ partial<G, LANES * 8> shared;
    task w;
    if (!task_of<G>(w, a, max_chunks)) return;

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
    for (int base = w.begin; base < w.end; base += WARPS * KEYS * AHEAD) {
        float k[AHEAD][8], v[AHEAD][8], score[AHEAD][G];
        bool valid[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            int j = base + (u * WARPS + warp) * KEYS + lane / LANES;
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

// Grid and workspace of a decode step whose blocks take `heads` query heads.
struct decode_plan {
    dim3 grid;
    int max_chunks;
    float *parts;
    float2 *ends;
    bool ok;
};

static decode_plan plan_of(struct device *dev, const attn_args<float> &a, int heads,
                           int max_context)
{
    decode_plan p = {};
    int rows = a.n_kv_heads * ceil_div(a.group, heads);
    p.max_chunks = ceil_div(max_context, UNIT);
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
    decode_plan p = plan_of(dev, a, G, max_context);
    if (p.ok)
        cuda_launch(dev, "attention of a decode step", decode_kernel<LANES, G>, p.grid, WARPS * 32,
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

bool attn_decode(struct device *dev, const attn_args<float> &a, int max_context)
{
    if (a.head_dim % 8 || a.head_dim > 256 ||
        !aligned(16, {a.q, a.k, a.v}, {a.q_stride * 4, a.kv_stride * 4}))
        return false;
    if (a.head_dim <= 64)
        choose_group<8>(dev, a, max_context);
    else if (a.head_dim <= 128)
        choose_group<16>(dev, a, max_context);
    else
        choose_group<32>(dev, a, max_context);
    return true;
}
