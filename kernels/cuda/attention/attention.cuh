/* attention.cuh: what the attention kernels share.
 *
 * Query heads that read the same kv head are packed with the rows of a sequence: packed row p of kv
 * head k is query head k * group + p % group of the sequence's row p / group. A tile of packed rows
 * reads its keys once for the whole group. Entry j of a sequence's context is the key at position
 * j, whether it lies in the block pool or among the rows of the batch, so both kinds of batch run
 * the same kernels and differ in key_row() only.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_ATTENTION_CUH
#define KERNELS_CUDA_ATTENTION_CUH

#include "kernels/cuda/e4m3.cuh"
#include <algorithm>

#define LOG2E 1.4426950408889634f
#define LN2   0.6931471805599453f

// What the kernels take: the shape and the batch as they were given (ops.h, batch_view.h), and
// where things lie.
template <typename T> struct attn_args : attn_shape, batch_view {
    const T *q, *k, *v; // first query, key and value of row 0, head 0
    int64_t q_stride;   // elements between rows of q
    int64_t kv_stride;  // elements between keys
    T *out;             // (T, n_heads, attn_value_dim())
    float *lse;         // (T, n_heads) or NULL
    int group;
    uint32_t group_inverse; // ceil(2^32 / group), 0 for a group of 1
    // block_size: 0 of a packed batch; block_shift: log2 of the size, or -1
    int block_size, block_shift;
    // Of a pool in e4m3, else NULL: codes of head 0, kv_stride apart, and the layer's scales.
    const uint8_t *k_codes, *v_codes;
    const int8_t *scales;
    bool in_sixteens; // a head's codes may be read 16 at a time, and a block's scales
};

// x / group for 0 <= x < 2^32 / group, without a division
template <typename T> INLINE int by_group(const attn_args<T> &a, int x)
{
    return a.group_inverse ? (int)__umulhi((uint32_t)x, a.group_inverse) : x;
}

// A call of attn or, with dqkv, of its gradient.
struct attn_call {
    const struct batch_view *batch;
    const struct attn_shape *shape;
    const void *qkv;
    void *out;
    float *lse;
    const struct kv_view *kv = NULL; // of a paged batch
    int layer = 0;
    // of the gradient; delta (T, n_heads): dout . out; parts: as attn_parts() says
    void *dqkv = NULL;
    const void *dout = NULL;
    float *delta = NULL, *parts = NULL;
    int n_parts = 0;
};

// log2 of a power of two; -1 of other numbers.
static inline int shift_of(int n)
{
    return (n & (n - 1)) == 0 ? __builtin_ctz(n) : -1;
}

template <typename T> static attn_args<T> attn_args_of(const attn_call &c)
{
    attn_args<T> a = {};
    static_cast<attn_shape &>(a) = *c.shape;
    static_cast<batch_view &>(a) = *c.batch;
    a.q = (const T *)c.qkv;
    a.q_stride = a.kv_stride = attn_row_width(c.shape);
    a.k = a.q + (int64_t)a.n_heads * a.head_dim;
    a.v = a.latent > 0 ? a.k : a.k + (int64_t)a.n_kv_heads * a.head_dim;
    a.out = (T *)c.out;
    a.lse = c.lse;
    a.group = a.n_heads / a.n_kv_heads;
    a.group_inverse = a.group > 1 ? (uint32_t)(((1ull << 32) + a.group - 1) / a.group) : 0;
    if (!c.kv) return a;
    const struct kv_layer &layer = c.kv->layers[c.layer];
    const void *v = a.latent > 0 ? c.kv->k : c.kv->v;
    a.k = (const T *)c.kv->k + layer.offset;
    a.v = (const T *)v + layer.offset;
    a.kv_stride = layer.width;
    a.block_size = c.kv->block_size;
    a.block_shift = shift_of(a.block_size);
    if (c.kv->dt != DT_E4M3) return a;
    a.k = a.v = NULL;
    a.k_codes = (const uint8_t *)c.kv->k + layer.offset;
    a.v_codes = (const uint8_t *)v + layer.offset;
    a.scales = c.kv->scales + layer.scales;
    a.in_sixteens = a.head_dim % 16 == 0 && a.block_size % 16 == 0 &&
                    aligned(16, {a.k_codes, a.v_codes, a.scales}, {a.kv_stride});
    return a;
}

// Of a paged batch the sequences first .. first + n - 1 alone; their rows keep their places.
template <typename T> static attn_args<T> attn_args_part(attn_args<T> a, int first, int n)
{
    a.n_seqs = n;
    a.query_start += first;
    a.context_len += first;
    a.stored += first;
    a.block_table += (int64_t)first * a.table_stride;
    return a;
}

// A number of the batch. Before grid_wait() it must not come from the L1 cache, which may still
// hold what stood there in the step before: FROM_L2.
template <bool FROM_L2> INLINE int number_at(const int32_t *p)
{
    return FROM_L2 ? __ldcg(p) : *p;
}

// Of a packed sequence's context, entries first .. end - 1, of one sequence: entry j is row
// j + to_row.
struct context_run {
    int first, end, to_row;
};

// The one that entry j is in.
template <typename T> INLINE context_run run_of(const attn_args<T> &a, int s, int j)
{
    int first = a.first_position[s];
    while (j < first) {
        s = a.parent[s];
        first = a.first_position[s];
    }
    const int start = a.query_start[s];
    return {first, first + a.query_start[s + 1] - start, start - first};
}

// The row of k and v that holds entry j of the context of sequence s.
template <bool PAGED, bool FROM_L2 = false, typename T>
INLINE int64_t key_row(const attn_args<T> &a, int s, int j)
{
    if (PAGED) {
        int block = a.block_shift >= 0 ? j >> a.block_shift : j / a.block_size;
        int offset = j - block * a.block_size;
        const int32_t *entry = a.block_table + (int64_t)s * a.table_stride + block;
        return (int64_t)number_at<FROM_L2>(entry) * a.block_size + offset;
    }
    return j + run_of(a, s, j).to_row;
}

// ---- a pool in e4m3 ----------------------------------------------------------------------------

// Of the key (0) or value (1) in a slot. As the codes it may be read before grid_wait(), and so not
// from the L1 cache.
template <typename T>
INLINE int8_t scale_of(const attn_args<T> &a, int slot, int kv_head, int value)
{
    const int block = a.block_shift >= 0 ? slot >> a.block_shift : slot / a.block_size;
    return (int8_t)__ldcg((const signed char *)a.scales +
                          kv_scale_at(block, slot - block * a.block_size, a.block_size,
                                      a.n_kv_heads, kv_head, value));
}

template <typename T>
INLINE const uint8_t *codes_of(const attn_args<T> &a, int slot, int kv_head, int value)
{
    return (value ? a.v_codes : a.k_codes) + slot * a.kv_stride + (int64_t)kv_head * a.head_dim;
}

// 16 columns of a head from column d on, at the places that a whole set of 16 has; behind the
// head's end zeros.
static __device__ __noinline__ uint4 gather_codes(const uint8_t *head, int d, int dims)
{
    union {
        uint8_t at[16];
        uint4 all;
    } codes;
    for (int i = 0; i < 16; i++)
        codes.at[e4m3_place(i, 16)] = d + i < dims ? __ldcg(head + e4m3_place(d + i, dims)) : 0;
    return codes.all;
}

template <typename T>
INLINE uint4 sixteen_codes(const attn_args<T> &a, int slot, int kv_head, int value, int d)
{
    const uint8_t *head = codes_of(a, slot, kv_head, value);
    return a.in_sixteens ? __ldcg((const uint4 *)(head + d)) : gather_codes(head, d, a.head_dim);
}

/* Keys (or values: 1) of rows first .. end - 1 of a tile of HD columns, as bf16: every N-th set of
 * 16 columns from `thread` on, BATCH of which are read before the first is stored. slot_of(r); -1:
 * zeros. store(r, u, x): columns 8 u .. 8 u + 7 of row r. */
template <int HD, int N, int BATCH, typename SLOT, typename STORE>
INLINE void widen_rows(const attn_args<__nv_bfloat16> &a, int kv_head, int value, int thread,
                       int first, int end, SLOT slot_of, STORE store)
{
    constexpr int SETS = HD / 16;
    const int all = (end - first) * SETS;
#pragma unroll 1
    for (int at = thread; at < all; at += N * BATCH) {
        uint4 codes[BATCH];
        int8_t scales[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int set = at + i * N, d = set % SETS * 16;
            const int slot = set < all && d < a.head_dim ? slot_of(first + set / SETS) : -1;
            codes[i] = make_uint4(0, 0, 0, 0);
            scales[i] = 0;
            if (slot < 0) continue;
            codes[i] = sixteen_codes(a, slot, kv_head, value, d);
            scales[i] = scale_of(a, slot, kv_head, value);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int set = at + i * N, u = set % SETS * 2;
            if (set >= all) break;
            uint4 lower, upper;
            widen_row(codes[i], scales[i], lower, upper);
            store(first + set / SETS, u, lower);
            store(first + set / SETS, u + 1, upper);
        }
    }
}

// The position of a row in its context; -1 for the padding of a decode batch, which sees nothing.
template <bool PAGED, bool FROM_L2 = false, typename T>
INLINE int row_position(const attn_args<T> &a, int s, int row)
{
    if (PAGED)
        return number_at<FROM_L2>(a.context_len + s) > 0 ? number_at<FROM_L2>(a.positions + row)
                                                         : -1;
    return a.first_position[s] + row - a.query_start[s];
}

// The same, where a kernel serves both kinds of batch.
template <typename T> INLINE int64_t any_key_row(const attn_args<T> &a, int s, int j)
{
    return a.block_size > 0 ? key_row<true>(a, s, j) : key_row<false>(a, s, j);
}

template <bool FROM_L2 = false, typename T>
INLINE int any_row_position(const attn_args<T> &a, int s, int row)
{
    return a.block_size > 0 ? row_position<true, FROM_L2>(a, s, row)
                            : row_position<false, FROM_L2>(a, s, row);
}

template <typename T> INLINE bool visible(const attn_args<T> &a, int position, int j)
{
    return j <= position && (a.window <= 0 || j > position - a.window);
}

// A score in units of log2, from a dot product.
template <typename T> INLINE float score_log2(const attn_args<T> &a, float dot)
{
    dot = __fmul_rn(dot, a.scale);
    if (a.softcap > 0) dot = __fmul_rn(a.softcap, tanhf(dot / a.softcap));
    return __fmul_rn(dot, LOG2E);
}

// Slope of the soft cap at a score in log2 units.
template <typename T> INLINE float softcap_slope(const attn_args<T> &a, float score)
{
    if (a.softcap <= 0) return 1.f;
    float t = score * LN2 / a.softcap;
    return 1.f - t * t;
}

// 2^x in one instruction, within 2 ulp; results below 2^-126 are 0.
INLINE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The sum of a row's weights, those of its keys being relative to `top` (log2 units), and of its
// head's sink. A row that sees nothing has none.
template <typename T> INLINE float with_sink(const attn_args<T> &a, int head, float top, float sum)
{
    if (!a.sinks || top == -INFINITY) return sum;
    return __fadd_rn(sum, exp2_fast(__fmaf_rn(to_f32(((const T *)a.sinks)[head]), LOG2E, -top)));
}

// The packed rows of a tile of a sequence: base .. of n.
struct packed_rows {
    int start, base, n, head0;

    INLINE bool in(int r) const { return base + r < n; }
};

// Where packed row r of a tile is: its row, and its index into (T, n_heads).
struct place {
    int row, head;
};

template <typename T> INLINE place place_of(const attn_args<T> &a, const packed_rows &p, int r)
{
    int x = p.base + r, row = by_group(a, x);
    return {p.start + row, p.head0 + x - row * a.group};
}

template <typename T> INLINE int64_t index_of(const attn_args<T> &a, place at)
{
    return (int64_t)at.row * a.n_heads + at.head;
}

template <typename T> INLINE int64_t query_at(const attn_args<T> &a, place at)
{
    return at.row * a.q_stride + (int64_t)at.head * a.head_dim;
}

// A tile of packed rows of a sequence and kv head, and what they see.
struct row_tile {
    packed_rows rows;
    int s, kv_head;
    int lowest, highest; // positions of its first and its last row
    int low;             // keys before it no row's window has
};

// The tile-th, of N rows at most; false where there is none. FROM_L2: as number_at() has it.
template <int N, bool FROM_L2 = false, typename T>
INLINE bool row_tile_of(row_tile &ret, const attn_args<T> &a, int s, int kv_head, int tile)
{
    const int start = number_at<FROM_L2>(a.query_start + s);
    packed_rows p = {start, tile * N, 0, kv_head * a.group};
    p.n = (number_at<FROM_L2>(a.query_start + s + 1) - start) * a.group;
    ret.rows = p;
    ret.s = s;
    ret.kv_head = kv_head;
    if (p.base >= p.n) return false;
    const int last = min(N, p.n - p.base) - 1;
    ret.lowest = any_row_position<FROM_L2>(a, s, place_of(a, p, 0).row);
    ret.highest = any_row_position<FROM_L2>(a, s, place_of(a, p, last).row);
    ret.low = a.window > 0 ? max(0, ret.lowest - a.window + 1) : 0;
    return true;
}

// ---- gradient ----------------------------------------------------------------------------------

// What a packed row's scores and their gradients take of it; one that is not there sees nothing.
struct row_info {
    float lse, inner;  // log2 units; dout . out
    int row, position; // of the batch; in its context
};

template <typename T>
INLINE row_info info_of(const attn_args<T> &a, const packed_rows &p, int r, const float *delta)
{
    if (!p.in(r)) return {0, 0, -1, -1};
    const place at = place_of(a, p, r);
    const int64_t i = index_of(a, at);
    return {a.lse[i] * LOG2E, delta[i], at.row, row_position<false>(a, a.seq_of[at.row], at.row)};
}

// Of the batch's keys, those that a row sees are the ones before it and below `end`.
struct key_info {
    int row, end, position;
};

template <typename T> INLINE key_info info_of(const attn_args<T> &a, int row)
{
    if (row >= a.n_tokens) return {row, 0, 0};
    const int s = a.seq_of[row];
    return {row, a.attend_end[s], row_position<false>(a, s, row)};
}

template <typename T>
INLINE bool visible(const attn_args<T> &a, const row_info &row, const key_info &key)
{
    return key.row <= row.row && row.row < key.end && visible(a, row.position, key.position);
}

// ---- variants ----------------------------------------------------------------------------------

/* bf16 whose heads are multiples of 8 goes to the tensor cores: attn_few.cu and attn_few_tma.cu
 * have the sequences of a paged batch with at most FEW_ROWS packed rows (decoding, verification),
 * attn_tensor.cu and attn_wgmma.cu the others and packed batches. All keep the order of
 * attn_order.cuh. */
#define FEW_ROWS 64

// Memory for the parts of contexts that are spread over blocks (by_turns()).
#define MAX_PART_BYTES ((int64_t)64 << 20)

// launch(args, memory) for the sequences of a batch, each of which takes so many bytes of scratch
// memory, or 0. Where `limit` bytes do not do for all, or they are more than `most`, they take
// turns; one alone has what it takes.
template <typename F>
static void by_turns(struct device *dev, const attn_args<__nv_bfloat16> &a, int most, int64_t bytes,
                     int64_t limit, F launch)
{
    if (bytes > 0) most = (int)std::min<int64_t>(most, limit / bytes);
    const int turn = std::min(a.n_seqs, std::max(1, most));
    void *memory = bytes > 0 ? cuda_workspace(dev, turn * bytes) : NULL;
    if (bytes > 0 && !memory) return;
    for (int s = 0; s < a.n_seqs; s += turn)
        launch(attn_args_part(a, s, std::min(turn, a.n_seqs - s)), memory);
}

// The variants: whether one takes a call, and its launch.
bool attn_latent_takes(struct device *dev, const attn_call &call); // attn_latent.cu
void attn_latent(struct device *dev, const attn_call &call);
void attn_few(struct device *dev, const attn_call &call); // of a paged batch, what is for it
bool attn_few_tma_takes(struct device *dev, const attn_call &call); // attn_few_tma.cu
void attn_few_tma(struct device *dev, const attn_call &c);          // likewise
bool attn_mma_takes(struct device *dev, const attn_call &call);     // attn_tensor.cu
bool attn_mma_back_takes(struct device *dev, const attn_call &call);
void attn_mma_back(struct device *dev, const attn_call &call);
bool attn_wgmma_takes(struct device *dev, const attn_call &call); // attn_wgmma.cu
bool attn_wgmma_back_takes(struct device *dev, const attn_call &call);
void attn_wgmma_back(struct device *dev, const attn_call &call);

// Launches for sequences of many rows: of a packed batch all, of a paged one those that attn_few
// leaves.
typedef void attn_many(struct device *dev, const attn_args<__nv_bfloat16> &a);
attn_many attn_mma, attn_wgmma;
// The same for a batch whose pool is in e4m3: keys and values of its sequences with more than `few`
// packed rows are widened as a whole, in scratch memory, which `many` reads (attention.cu).
void attn_widened(struct device *dev, const attn_args<__nv_bfloat16> &a, int few, attn_many *many);

// The gradient's dk and dv come in parts, f32, each of attn_part_rows() rows of n_kv_heads times 2
// heads, whose width is rounded up to a multiple of 64.
int attn_parts(struct device *dev, int n_tokens, int n_kv_heads);
static inline int64_t attn_part_rows(int n_tokens)
{
    return (n_tokens + 127) / 128 * 128ll;
}
// The most rows that all parts have in batches of at most this many tokens.
int64_t attn_parts_rows(struct device *dev, int n_tokens, int n_kv_heads);

#endif
