/* ops.h: the one table of operations. kernels/cpu is the specification; kernels/cuda gives the same
 * within rounding. tests/ops runs every entry on both and every gradient against finite
 * differences.
 *
 * Conventions. Output first, as in BLAS. Matrices are row-major; (R, C) are rows and columns. `dt`
 * is the dtype of weights and activations (DT_F32, or DT_BF16 on CUDA); sums run in f32 whatever dt
 * is; gradients of weights, statistics (rstd, lse), logits and log-probabilities are always f32. An
 * output never overlaps an input unless it says "in place". "+=" adds to what is there. All
 * pointers are device memory except where it says host. Results are deterministic: the same inputs
 * give the same bits in every run. Nothing here allocates per call (a backend keeps grow-only
 * workspace), and every operation whose host arguments are fixed can be captured
 * (device_capture_begin).
 *
 * Order. Operations take effect in the order they are enqueued. On a GPU one may begin while the
 * one before it ends; it waits for the whole of that one before it reads or writes anything.
 * `early` in a call's struct takes part of that wait away: what the field names may be read at
 * once. That is for the caller to say, who knows that the operation enqueued directly before writes
 * none of it, nor, where that is a norm, an activation, a rounding or a rotation, the one before
 * it. A CPU runs one after the other and takes no notice.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_OPS_H
#define KERNELS_OPS_H

#include "kernels/batch_view.h"
#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

struct comm; // comm.h
struct act_shape;
struct op_variants;

#define RANDOM_CHUNK 65536 // numbers of one stream (random_normal)

// C(m,n) = op(A) op(B) + beta * C [+ bias(n) on every row]. op(A) is (m,k): A is stored (m,k), or
// (k,m) where trans_a. op(B) is (k,n): B is stored (k,n), or (n,k) where trans_b: a Hugging Face
// weight (out,in) is B with trans_b in the forward pass. Leading dimensions are the stored widths.
// Where beta is 1 and C is bf16, op(A) op(B) + bias is rounded to bf16 before C is added.
struct matmul {
    int m, n, k;
    bool trans_a, trans_b;
    float beta;     // 0 (C is not read) or 1
    enum dtype in;  // of A, B and bias
    enum dtype out; // of C: `in`, or DT_F32
    bool early;     // B, and the experts' offsets (see Order, above)
    // B is weights in e4m3: its i-th stored row is codes times 2^scales[i] (e4m3.h), of experts
    // all their rows; the result is that of the same B in `in`. NULL: B is of `in`.
    const int8_t *scales;
    // B is weights in MXFP4 (common/base/mxfp4.h), rows of codes, and these are their scales; the
    // result is that of the same B in `in`. NULL: it is not.
    const uint8_t *mx_scales;
    // A (m,k) is rows in e4m3 too, B being weights in e4m3 that are stored (n,k); `in` is of the
    // bias alone. Sums run over E4M3_CHUNK of k at a time, and each of these is added to an f32
    // total: an order of its own, which a row has in any batch. NULL: A is of `in`.
    const int8_t *a_scales;
    // B is weights in e4m3 that are stored (k,n), and A a gradient: each of its columns times the
    // power of two of B's row there, rounded to this a row at a time as `quantise` does, is
    // multiplied with B's codes; sums as with a_scales. AUTO: A is multiplied as it is.
    enum gradient_dtype rounds;
    // columns: C (m, size * n) becomes whole on all of these ranks, each of which computes n
    // columns, in rank order, where beta is 0; or NULL. parts: (size, m, n), room for that.
    struct comm *columns;
    void *parts;
    // Of a mixture's experts, n_experts at a time, whose rows lie one after the other: where each
    // one's begin (n_experts + 1), as in struct moe_routing, or a part of that for some
    // neighbouring ones. A has all m rows, which expert e multiplies by the e-th of B's matrices;
    // rows of other experts are not computed (with an act they may be written). beta is 0, and
    // there is no bias. With trans_a, for the gradient of weights, C is n_experts matrices, each of
    // which is summed over the expert's rows of all k; C is f32, and beta 1. NULL: none.
    const int32_t *offsets;
    int n_experts;
    // What becomes of the result at once: C = act(x), where x is what C would be; beta is 0. x is
    // scratch, which may stay unwritten, unless `keep`. NULL: nothing.
    const struct act_shape *act;
    void *x;
    bool keep;
};

// Rows of a table that are looked up, or that rows of y are added to. A table may hold a part of
// what the indices number: `rows` of them from `first` on (0 rows: all of them).
struct gather_args {
    const int32_t *index; // (n) row of the table; may repeat
    int n, width;
    float scale;
    enum dtype dt; // of y, and of a table that is looked up
    int first, rows;
};

enum norm_kind {
    NORM_RMS,          // y = x * rstd * w                (Zhang and Sennrich 2019)
    NORM_RMS_PLUS_ONE, // y = x * rstd * (1 + w)          (Gemma)
    NORM_LAYER         // y = (x - mean) * rstd * w + b   (Ba et al. 2016); b may be NULL
};
// Rows to be normalised. Ordinarily heads = 1 and a row is a token's whole (width) vector. For q/k
// norms heads > 1: row r is x + (r / heads) * stride + (r % heads) * width. `rows` counts them all.
struct norm_shape {
    enum norm_kind kind;
    int rows, width, heads;
    int64_t stride; // elements between tokens (of x; y has the same layout)
    float eps;
    enum dtype dt;
    // Each of a token's `heads` has its own weights, w (heads, width), and rstd lies head after
    // head: (heads, rows / heads). Of norms without b.
    bool own_weights;
};
// What is normalised, by which weights, and the statistics that the backward pass needs.
struct norm_args {
    const void *x, *w, *b; // w NULL: 1, of NORM_RMS. b: of NORM_LAYER; may be NULL
    float *rstd, *mean; // (rows) f32, mean of NORM_LAYER alone; norm writes those that are not NULL
    // y in e4m3, as `quantise` gives it, of rows that lie together; NULL: not wanted
    uint8_t *codes;
    int8_t *scales;
    bool early; // w (see Order, above)
};

// ACT_CLAMPED (gpt-oss) is gated: with g = min(gate, limit) and u = up between -limit and limit,
// y = g * sigmoid(alpha * g) * (u + 1). ACT_RELU2 is the square of what is above 0. The last two
// are of gates beside a value.
enum act_kind {
    ACT_SILU,
    ACT_GELU_TANH,
    ACT_GELU,
    ACT_CLAMPED,
    ACT_RELU2,
    ACT_RELU,
    ACT_SIGMOID,
    ACT_LINEAR
};
// Gated: x (rows, 2 * width), gate then up: y (rows, width) = act(gate) * up.
// Plain: x (rows, width): y = act(x).
struct act_shape {
    int rows, width;
    enum act_kind kind;
    bool gated;
    enum dtype dt;
    float alpha, limit; // of ACT_CLAMPED
    // Gated, where gate and up lie apart, x being the gates alone: up, and the elements between
    // rows of both. NULL: as above. Not of a matmul's act.
    const void *up;
    int64_t gate_stride, up_stride;
};

// A rotary embedding of the first n heads of every row (Su et al. 2021; Hugging Face's rotate_half
// order): of each head's first rot_dim entries the pairs (i, i + rot_dim / 2), or where interleaved
// (2 i, 2 i + 1), by the angle of the row's position.
struct rope_args {
    const float *table;       // (max_positions, rot_dim / 2, 2) f32: cos and sin; NULL: no rotation
    const int32_t *positions; // (rows)
    int rows, n, head_dim, rot_dim;
    int64_t stride; // elements between rows
    float sign;     // 1; -1: the inverse, which is the backward pass
    bool interleaved;
    enum dtype dt;
    bool rounds; // then these heads become the numbers that a KV cache in e4m3 gives back
    // Or, of rows as of attention, the keys and values of each are stored at its slot in a layer of
    // the pool (sign 1, not interleaved). kv NULL: they are not.
    const struct kv_view *kv;
    int layer, n_heads, n_kv_heads;
    const int32_t *slots; // (rows); -1: nothing is stored
    bool early;           // positions and slots, as in attn_shape
};

// Attention geometry. qkv rows are (n_heads + 2 * n_kv_heads) * head_dim wide: queries, keys,
// values. Query head h reads kv head h / (n_heads / n_kv_heads).
//
// Where latent > 0 (latent attention in absorbed form, struct latent_shape), values are the first
// `latent` entries of the keys, of which there is one head: rows of qkv are (n_heads + 1) *
// head_dim wide, queries and the key, out is n_heads * latent wide, and the pool holds keys alone.
// There is no gradient of that form.
struct attn_shape {
    int n_heads, n_kv_heads, head_dim;
    int latent;
    float scale;   // scores are q.k * scale
    float softcap; // 0: none; else scores = softcap * tanh(scores / softcap)   (Gemma 2)
    int window;    // 0: none; else a row at position p sees keys at positions > p - window
    enum dtype dt; // of the rows; the pool has its own, which is this or DT_E4M3
    // Of a paged batch: its lists, for rope_store as well, and keys of earlier batches (see Order,
    // above).
    bool early;
    // (n_heads) of the rows' dtype: a score more in each row's softmax, of a key whose value is 0
    // (Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks; gpt-oss); or
    // NULL
    const void *sinks;
};

// Elements of a row of qkv, and of what attention gives for it.
static inline int64_t attn_row_width(const struct attn_shape *s)
{
    return (int64_t)(s->n_heads + (s->latent > 0 ? 1 : 2) * s->n_kv_heads) * s->head_dim;
}
static inline int attn_value_dim(const struct attn_shape *s)
{
    return s->latent > 0 ? s->latent : s->head_dim;
}

// Latent attention (DeepSeek-V2, 2024). A token has one latent vector c of `rank` entries and a
// rotated key r of `rope` entries, which all heads share; w (n_heads * (nope + value), rank) makes
// of c each head's key and, below it, each head's value. Query head h is (a, b) of nope + rope
// entries, b rotated, and its score of a token a . w_key c + b . r.
//  - Absorbed form: the same score is (a w_key) . c + b . r, so that (c, r) is the one key of all
//    heads and c the one value; what attention gives, o of `rank` entries, becomes w_value o.
//  - Expanded form: keys (w_key c, r) and values w_value c of every head, as of ordinary attention
//    with heads of `nope + rope` or `value`, whichever is more; the others end with zeros.
struct latent_shape {
    int rows, n_heads;
    int nope, rope, rank, value;
    enum dtype dt;
    bool early;           // latent_matmul: w (see Order, above)
    const int8_t *scales; // of w, as in struct matmul
};

static inline int latent_expanded_dim(int nope, int rope, int value)
{
    return nope + rope > value ? nope + rope : value;
}

// The rotation of all queries and keys of a batch, in rows as of attention; nothing is stored.
static inline struct rope_args rope_of_batch(const float *table, int rot_dim,
                                             const struct batch_view *batch,
                                             const struct attn_shape *s, float sign)
{
    struct rope_args args;
    args.table = table;
    args.positions = batch->positions;
    args.rows = batch->n_tokens;
    args.n = s->n_heads + s->n_kv_heads;
    args.head_dim = s->head_dim;
    args.rot_dim = rot_dim;
    args.stride = attn_row_width(s);
    args.sign = sign;
    args.interleaved = false;
    args.dt = s->dt;
    args.rounds = false;
    args.kv = NULL;
    args.layer = 0;
    args.n_heads = s->n_heads;
    args.n_kv_heads = s->n_kv_heads;
    args.slots = batch->slots;
    args.early = s->early;
    return args;
}

// Linear attention by the gated delta rule (Yang et al. 2024, Gated Delta Networks): a layer of
// heads that each carry a matrix S (key_dim, head_dim) along the sequence instead of keys and
// values. A row has queries and keys of n_key_heads heads and values of n_heads, which are as many
// for each key head; a causal convolution of `taps` rows, channel by channel, goes over all three.
// n_key_heads 0: the convolution alone (LFM2), of n_heads * head_dim channels, with no SiLU.
//
// Mamba-2 (Dao and Gu 2024, Transformers are SSMs) is another rule for the same matrix: a key head
// is a group, k its B and q its C, v is x, and the convolution goes over x, B and C in this order.
struct delta_shape {
    int n_key_heads, n_heads;
    int key_dim, head_dim;
    int taps;
    int ahead; // rows that a paged sequence may be taken back by: drafts that are not accepted
    enum dtype dt;
    bool is_scan;   // Mamba-2's rule
    float min_step; // of that
};
static inline bool delta_is_conv(const struct delta_shape *s)
{
    return s->n_key_heads == 0;
}
#define DELTA_MAX_TAPS 8
#define DELTA_MAX_DIM  128                                    // of key_dim and head_dim
DTYPE_INLINE int delta_key_width(const struct delta_shape *s) // of queries, of keys
{
    return s->n_key_heads * s->key_dim;
}
DTYPE_INLINE int delta_value_width(const struct delta_shape *s)
{
    return s->n_heads * s->head_dim;
}
DTYPE_INLINE int delta_conv_width(const struct delta_shape *s) // queries, keys, values
{
    return 2 * delta_key_width(s) + delta_value_width(s);
}
// What a sequence of a paged batch carries on of a layer: the convolution's last inputs (taps - 1 +
// ahead, conv width), that of a position in the row that is its remainder, then the states of the
// key heads. S of a value head stands
// at a position that DELTA_CHUNK divides; of the rows from there on, the open chunk, the state has
// k, u, what a row adds to S with its key, and G, the sum of the log decays from the chunk's first
// row on. A key head's state is k (DELTA_CHUNK, key_dim), then of each of its value heads S
// (key_dim, head_dim), u (DELTA_CHUNK, head_dim) and G (DELTA_CHUNK). f32 elements; rows that are
// not there yet are anything.
#define DELTA_CHUNK 64
DTYPE_INLINE int delta_window(const struct delta_shape *s)
{
    return s->taps - 1 + s->ahead;
}
DTYPE_INLINE int64_t delta_window_elements(const struct delta_shape *s)
{
    return (int64_t)delta_window(s) * delta_conv_width(s);
}
DTYPE_INLINE int64_t delta_head_elements(const struct delta_shape *s) // of a value head
{
    return (int64_t)s->key_dim * s->head_dim + DELTA_CHUNK * ((int64_t)s->head_dim + 1);
}
DTYPE_INLINE int64_t delta_group_elements(const struct delta_shape *s) // of a key head
{
    return DELTA_CHUNK * (int64_t)s->key_dim + s->n_heads / s->n_key_heads * delta_head_elements(s);
}
static inline int64_t delta_state_elements(const struct delta_shape *s)
{
    const int64_t window = delta_window_elements(s);
    return window + (delta_is_conv(s) ? 0 : s->n_key_heads * delta_group_elements(s));
}

// A batch as a recurrence goes over it: a sequence of a paged one goes on from a
// slot of the pool's states and leaves what it ends with in a slot (batch_view.h), one of a packed
// one from the last row of its parent. Convolutions go over trees of any depth; the rule's parents
// have no parents, and a batch of deeper trees is a failure.
struct delta_batch {
    const struct batch_view *view;
    const struct kv_view *kv; // NULL: packed
    int layer;
};
struct conv_args {
    const void *x; // (T, conv width), rows x_stride elements apart
    int64_t x_stride;
    const void *w; // (conv width, taps), the row's own last
    struct delta_batch batch;
    const void *bias; // (conv width), which the sum begins with; NULL: none
};
struct delta_args {
    const void *qkv; // (T, conv width) as the convolution gives it
    // (T, 2 * n_heads) f32: b of every head, then a. Of Mamba-2 the steps, (T, n_heads) of the
    // shape's dtype, rows `stride` elements apart, which says nothing of others.
    const void *gates;
    const void *a_log, *dt_bias; // (n_heads)
    struct delta_batch batch;
    int64_t stride;
    const void *skip; // (n_heads) of Mamba-2
};
struct delta_grads {
    void *qkv, *gates;             // as in delta_args, but of the shape's dtype
    float *a_log, *dt_bias, *skip; // (n_heads) +=; NULL: not trained
};

// One row of sampling parameters, in device memory.
struct sample_params {
    float temperature; // 0: greedy (first of equal logits wins); else logits are divided by it
    float top_p;       // 1: off. Nucleus: the smallest set of most likely tokens with mass >= top_p
    float min_p;       // 0: off. Keeps tokens with p >= min_p * p_max
    int32_t top_k;     // 0: off
    uint64_t seed;     // the request's stream
    uint64_t position; // of the token to be sampled, in its sequence
    int32_t mask;      // 1 + which of sample_args.masks says what may come; 0: anything may
};
// What is to be verified at a row, in device memory: a draft and the distribution it was sampled
// from.
struct sample_draft {
    int32_t token; // -1: nothing; the row is sampled plainly
    int32_t row;   // of draft_logits: the draft was sampled from it, with this row's parameters
};
// Rows to sample from, in device memory.
struct sample_args {
    const float *logits;                // (n, vocab)
    const struct sample_params *params; // (n)
    int n, vocab;
    const struct sample_draft *drafts; // (n); NULL: no row has a draft
    const float *draft_logits;         // (.., draft_vocab)
    int draft_vocab;                   // <= vocab
    // (.., MASK_WORDS(vocab)) bit t % 32 of word t / 32 is token t's; 0: its logit counts as
    // MIN_LOGIT. NULL: no row has a mask.
    const uint32_t *masks;
};
// What sampling one row gives, in device memory.
struct sample_result {
    int32_t token;
    float logprob; // of `token` under the temperature-scaled distribution (greedy: temperature 1)
    float processed_logprob; // under what top-k, top-p and min-p leave of it, renormalised
    float retained_mass;     // the mass that they leave: exp(logprob - processed_logprob)
};

// Rows of logits and a token of each, as log-probabilities are taken of them.
struct head_args {
    const float *logits;   // (n, vocab) f32
    const int32_t *target; // (n)
    int n, vocab;
    float temperature;
};
// What comes back to each row of logits, (n) each.
struct head_grads {
    const float *dlogprob, *lse;
    const float *dentropy, *entropy; // NULL: the loss has no term of the entropy
};
// Distillation (Hinton et al. 2015; Agarwal et al. 2024, GKD) of a teacher's rows of logits into a
// student's.
struct distill_args {
    const float *student, *teacher; // (n, vocab), (n, teacher_vocab) f32
    int n, vocab, teacher_vocab; // teacher_vocab >= vocab: they differ by the embedding's padding
    float temperature;
    float beta;           // the divergence: 0 forward, 1 reverse, between them Jensen-Shannon's
    float scale;          // of the gradient
    const float *weights; // (n) besides, of each row; NULL: 1
    bool add;             // the gradient to what is there
    float *agrees;        // (n) 1: both find the same token likeliest, 0; NULL: not asked for
};

// A token at a row of logits, in device memory.
struct token_logprob {
    int32_t token;
    int32_t rank;  // 1: the likeliest; of equal logits the lower token comes first
    float logprob; // under the temperature-scaled distribution
};
#define TOP_LOGPROBS_MAX 128 // likeliest tokens that one row can list

// A token whose logit is adjusted before sampling, in device memory.
struct logit_entry {
    int32_t token; // at most once in a row
    int32_t count; // times it was generated
    int32_t seen;  // 1: it was generated or stands in the prompt
    float bias;
};
struct logit_row { // a row of logits that is adjusted, in device memory
    int32_t row;
    int32_t first, n;                      // its entries
    float repetition, frequency, presence; // penalties; 1, 0, 0: none
};

// Of a token that cannot come: its probability is 0, and it stays finite, its square, too.
#define MIN_LOGIT         (-1e18f)
#define MASK_WORDS(vocab) (((vocab) + 31) / 32) // 32 tokens each

// A mixture of experts (Shazeer et al. 2017): every row goes to top_k of n_experts. An assignment
// is a (row, choice) pair, numbered row * top_k + choice; matmuls run over the assignments sorted
// by expert (stable), so that an expert's rows lie together.
//
// Of a row's logits every expert has a score s; the experts with the largest s + bias are chosen,
// of equals the lower number. Where there are groups (DeepSeek-V2 and V3), n_group of them, of
// neighbouring experts, only the topk_group best may give any: a group is as good as its best
// expert (softmax), or as its two best together (sigmoid), bias included. A chosen expert's weight
// is scale * s, and where norm_topk that divided by the sum of s over the chosen.
enum moe_scoring {
    MOE_SOFTMAX, // over all experts (Mixtral, Jiang et al. 2024; Qwen-MoE; DeepSeek-V2)
    MOE_SIGMOID  // of each by itself (DeepSeek-V3, 2024; GLM-4-MoE)
};
struct moe_shape {
    int rows, n_experts, top_k;
    enum moe_scoring scoring;
    bool norm_topk;
    int n_group, topk_group; // n_group divides n_experts; 0 or 1: no groups
    float scale;
    int width;     // of the experts' rows
    enum dtype dt; // of the experts' rows and of dlogits
};
// What experts give or take, sorted by expert.
struct expert_rows {
    int rows, n_experts, width;
    enum dtype dt;
};
struct moe_routing {  // device memory; A = rows * top_k
    int32_t *expert;  // (rows, top_k) chosen, likeliest first; of equal logits the lower number
    float *weight;    // (rows, top_k)
    int32_t *row;     // (A) row of each sorted assignment
    int32_t *place;   // (A) where each assignment stands in sorted order
    int32_t *offsets; // (n_experts + 1) first sorted assignment of each expert
};

// Low-rank adapters (Hu et al. 2021) of one matmul y = x W^T, several in one batch. Each part of
// y's columns (q, k and v of a fused matrix) has factors of its own.
#define LORA_PARTS 3
struct lora_factors { // device memory, 256-byte aligned; a NULL: the adapter leaves this part alone
    const void *a, *b; // (rank, k), (n, rank): y's part += scale * (x a^T) b^T
    int32_t rank;      // at most lora_args.max_rank
    float scale;
};
// Dropout of x before an adapter, in training (Srivastava et al. 2014): an element is 0 with
// probability p, else divided by 1 - p; kernels/dropout.h says which.
struct lora_dropout {
    float p; // 0: none
    uint64_t seed;
    uint32_t matrix;                  // of part 0; part i has that number + i
    uint32_t column;                  // of a whole row, which is x's first
    const int32_t *sample, *position; // of each row, device
};
struct lora_grads { // of one part's factors, f32
    float *a, *b;
};
struct lora_args {
    const struct lora_factors *factors; // (n_parts, n_adapters)
    const int32_t *adapter;             // whose factors a row has; -1: nobody's
    const int32_t *row; // (rows) where in `adapter` and in dropout's lists a row's entries stand;
                        // NULL: in order
    int n_adapters, n_parts, max_rank;
    int rows, k;
    int first[LORA_PARTS +
              1]; // part p is columns first[p] .. first[p + 1] - 1; the last is y's end
    struct lora_dropout dropout;
    enum dtype dt, out; // of x, the factors, dx and dy; of y: f32 (logits) or dt
    // For the gradient, where all rows are of the first adapter (n_adapters 1, adapter not read):
    // that of y; y's place then has x's, dx += , and grads[p] += (of parts that the adapter leaves
    // alone not read). NULL: forward.
    const void *dy;
    struct lora_grads grads[LORA_PARTS];
};

struct adamw {
    float lr;
    double beta1, beta2; // 1 - beta is taken before rounding: of 0.99999f it is off by 0.14%
    float eps, weight_decay;
    float bias_correction1, bias_correction2; // 1 - beta^step
    const float *grad_scale;                  // device, one f32: what gradients are multiplied by
    uint32_t step;                            // seeds the rounding of moments that are not f32
    int64_t first;                            // number of the first parameter, for the same
};
// AdamW's m and v of n parameters, device memory. All zero bytes: all moments 0.
enum moments_kind { MOMENTS_F32, MOMENTS_BF16, MOMENTS_8BIT };
struct moments {
    enum moments_kind kind;
    void *m, *v;              // (n) f32, bf16 or 8-bit codes (kernels/moments.h)
    float *m_scale, *v_scale; // (ceil(n / MOMENT_BLOCK)) of 8-bit codes, else NULL
};

struct scratch_shape {        // of a training step
    struct attn_shape attn;   // n_heads 0: no such layer
    struct delta_shape delta; // likewise
    int rows, max_context;    // of packed batches, at most
    int hidden, widest;       // width of the norms; columns of the widest matmul in a layer
    int logits_chunk, vocab;  // of the logits that exist at one time
    int64_t n_elements;       // gradients
    int64_t widened; // of the largest matrix in e4m3, its experts together, and the largest rows
                     // that it is multiplied with, where they are too; 0: none
    int64_t rounded; // the same of gradients that are rounded, which may be widened, too; 0: none
    int lora_rank;   // of an adapter; 0: none
    bool lora_head;  // that changes the logits too
    bool lora_dropout;
    enum dtype dt;
};

struct ops {
    void (*matmul)(struct device *, void *c, const void *a, const void *b, const void *bias,
                   const struct matmul *shape);

    // y (rows, first[n_parts]) += each row's adapter for x (rows, k). Sums are in f32, and a row
    // has the same bits in any batch.
    void (*lora)(struct device *, void *y, const void *x, const struct lora_args *);

    // y(n, width) = scale * table[index[i]]; zeros where the table does not hold that row.
    // Embedding look-up; picking rows.
    void (*gather_rows)(struct device *, void *y, const void *table, const struct gather_args *);
    // table[index[i]] += scale * y[i], y (n, width), where the table holds that row; order (n):
    // 0..n-1 sorted by index (stable), the sum's order
    void (*scatter_add_rows)(struct device *, void *table, enum dtype table_dt, const void *y,
                             const int32_t *order, const struct gather_args *);

    // y = norm(x); writes rstd, mean and codes. In place (y == x) is allowed.
    void (*norm)(struct device *, void *y, const struct norm_args *, const struct norm_shape *);
    // dx = (add ? dx : 0) + gradient; dw += , db += (f32; db NULL but for NORM_LAYER with bias).
    // dx may be dy (in place) where !add. Reads rstd and mean.
    void (*norm_back)(struct device *, void *dx, float *dw, float *db, const void *dy,
                      const struct norm_args *, const struct norm_shape *, bool add);

    // Rotates in place, and rounds in place or stores.
    void (*rope)(struct device *, void *qkv, const struct rope_args *);
    // out (T, n_heads * attn_value_dim()) from the queries of qkv and, of a paged batch, the keys
    // and values in a layer of the pool; of a packed one (kv NULL) those of qkv. lse (T, n_heads)
    // f32, the log-sum-exp of each row's scores, the sink's included; NULL: not wanted, as of a
    // paged batch. Where device_is_exact(), a row has the same bits in any batch of either kind
    // (docs/internals/numerics.md, Where it holds). A paged sequence's first `stored` keys were in
    // the pool before the operation in front of this one began.
    void (*attn)(struct device *, void *out, float *lse, const void *qkv, const struct kv_view *kv,
                 int layer, const struct batch_view *, const struct attn_shape *);
    // dqkv (whole rows: queries, keys, values) = gradient from dout; dsinks (n_heads) f32 += that
    // of the shape's sinks, NULL: not wanted.                                     packed batches
    void (*attn_back)(struct device *, void *dqkv, float *dsinks, const void *dout, const void *out,
                      const float *lse, const void *qkv, const struct batch_view *,
                      const struct attn_shape *);

    // Of each head. With keys (rows, rank + rope): queries q (rows, n_heads, nope + rope) into the
    // absorbed form, to (rows, n_heads + 1, rank + rope), behind whose queries the key comes; keys
    // NULL: what attention gives, from (rows, n_heads, rank), out of it, to (rows, n_heads, value).
    // A row has the same bits in any batch.
    void (*latent_matmul)(struct device *, void *to, const void *from, const void *keys,
                          const void *w, const struct latent_shape *);
    // qkv (rows, 3 * n_heads, latent_expanded_dim()) of the expanded form from q as above, kv
    // (rows, n_heads, nope + value) and the keys (rows, rank + rope). back: the gradient, from
    // that of qkv those of q and kv, and of the keys the last `rope` entries.
    void (*latent_expand)(struct device *, void *qkv, void *q, void *kv, void *keys,
                          const struct latent_shape *, bool back);
    // Rows of n_heads times (query, gate), then keys and values, as some models' matmul gives them,
    // into rows as of attention and gates (T, n_heads * head_dim); join: the other way.
    void (*split_gate)(struct device *, void *qkv, void *gate, void *fused, int rows,
                       const struct attn_shape *, bool join);

    // y (T, conv width) = silu(sum over taps of w * x of the rows up to its own), or the sum
    // itself (which begins with the bias), zeros standing before a sequence's first row.
    void (*short_conv)(struct device *, void *y, const struct conv_args *,
                       const struct delta_shape *);
    // dx with rows x_stride apart; dw (conv width, taps) and db (conv width) f32 +=, NULL: not
    // wanted.                                                                    packed batches
    void (*short_conv_back)(struct device *, void *dx, float *dw, float *db, const void *dy,
                            const struct conv_args *, const struct delta_shape *);
    // out (T, n_heads * head_dim): for each value head, with the query q and key k of its key head
    // divided by their lengths, sqrt(sum of squares + 1e-6), q also by sqrt(key_dim), v its value,
    // row after row: S *= exp(-exp(a_log) * softplus(a + dt_bias));
    // S += k (sigmoid(b) * (v - S^T k))^T; out = S^T q. Of Mamba-2, with k and q, the B and C of
    // its group, as they are, and step = max(softplus(steps + dt_bias), min_step):
    // S *= exp(-exp(a_log) * step); S += k (step * v)^T; out = S^T q + skip * v. A row is computed
    // from S at the border before it and the chunk's rows (delta_state_elements): it has the same
    // bits however its sequence is cut into batches.
    void (*delta_rule)(struct device *, void *out, const struct delta_args *,
                       const struct delta_shape *);
    // The gradient from dout.                                                  packed batches
    void (*delta_rule_back)(struct device *, const struct delta_grads *, const void *dout,
                            const struct delta_args *, const struct delta_shape *);

    // An up that lies apart may be y.
    void (*act)(struct device *, void *y, const void *x, const struct act_shape *);
    // dx from dy, and y = act(x) again unless it is NULL. dx may not be x. Where gate and up lie
    // apart dx is that of the gates, and dup, which may be dy, that of up; rows as of both.
    void (*act_back)(struct device *, void *dx, void *dup, void *y, const void *dy, const void *x,
                     const struct act_shape *);

    // Fills a routing from router logits (rows, n_experts) f32. bias (n_experts) f32: added to the
    // scores for the choice alone (DeepSeek-V3's balancing without a loss); NULL: none.
    void (*moe_route)(struct device *, const struct moe_routing *, const float *logits,
                      const float *bias, const struct moe_shape *);
    // dlogits (rows, n_experts) from dweight (rows, top_k) f32, the choice being taken as given. Of
    // MOE_SOFTMAX with norm_topk the logits are not read.
    void (*moe_route_back)(struct device *, void *dlogits, const float *dweight,
                           const float *logits, const struct moe_routing *,
                           const struct moe_shape *);
    // The load-balancing loss (Fedus et al. 2021, Switch Transformers) over several layers' routers
    // of MOE_SOFTMAX is made of how often experts were chosen and of their probabilities. probs
    // (rows, n_experts) f32: softmax of the logits; counts (n_experts) f32 += the assignments of
    // each.
    void (*moe_balance)(struct device *, float *probs, float *counts, const float *logits,
                        const struct moe_routing *, const struct moe_shape *);
    // dlogits (rows, n_experts) += the gradient of scale * sum over rows and e of counts[e] *
    // probs, the counts being taken as given.
    void (*moe_balance_back)(struct device *, void *dlogits, const float *logits,
                             const float *counts, const struct moe_shape *, float scale);
    // y (rows, width) += the bias of each row's expert; bias (n_experts, width) of dt. The experts
    // may be some neighbouring ones, as in struct matmul.
    void (*experts_bias)(struct device *, void *y, const void *bias, const int32_t *offsets,
                         const struct expert_rows *);
    // y (rows, width) (+)= sum over choices of weight * x[place]; weight NULL: 1. x is sorted, (A,
    // width).
    void (*moe_combine)(struct device *, void *y, const void *x, const int32_t *place,
                        const float *weight, const struct moe_shape *, bool add);
    // Its gradient: dx[place] = weight * dy, and dweight (rows, top_k) = dy . x[place].
    void (*moe_combine_back)(struct device *, void *dx, float *dweight, const void *dy,
                             const void *x, const struct moe_routing *, const struct moe_shape *);

    // x (n) *= factor[0], which is f32, in place
    void (*multiply)(struct device *, void *x, const float *factor, int64_t n, enum dtype dt);
    // y += scale * x
    void (*add)(struct device *, void *y, const void *x, int64_t n, float scale, enum dtype dt);
    // out (n_experts, width) f32 += column sums of each expert's rows of x, the gradient of a bias;
    // offsets NULL: of one that has all rows
    void (*column_sum)(struct device *, float *out, const void *x, const int32_t *offsets,
                       const struct expert_rows *);
    void (*convert)(struct device *, void *y, enum dtype y_dt, const void *x, enum dtype x_dt,
                    int64_t n); // any of f32, bf16, f16 to f32 or bf16, rounding to nearest even
    // Weights or activations w (rows, cols) of w_dt in e4m3, as struct matmul takes them: codes
    // (rows, cols), each rounded to nearest even, and scales (rows), e4m3_scale() of the row's
    // largest magnitude (common/base/e4m3.h). Of columns of rows that other ranks have too: codes
    // NULL gives the scales alone, and with those of all ranks, of_ranks (n_ranks, rows), a row has
    // the largest of them (of one rank they may be `scales` themselves). Else of_ranks is NULL.
    void (*quantise)(struct device *, uint8_t *codes, int8_t *scales, const void *w, int64_t rows,
                     int cols, enum dtype w_dt, const int8_t *of_ranks, int n_ranks);
    // x = cap * tanh(scale * x / cap) in place, or scale * x where cap is 0, f32 logits (Gemma 2;
    // Granite, Cohere); and its gradient from the capped values
    void (*softcap)(struct device *, float *x, int64_t n, float cap, float scale);
    void (*softcap_back)(struct device *, float *dx, const float *capped, int64_t n, float cap,
                         float scale);

    // For each row i: with z = logits / temperature, logprob[i] = z[target[i]] - lse[i]; lse (n);
    // entropy (n) of softmax(z), NULL to skip.
    void (*logprob)(struct device *, float *logprob, float *lse, float *entropy,
                    const struct head_args *);
    // With p = softmax(z): dlogits (n, vocab) of dtype dt = (dlogprob[i] * (onehot(target[i]) - p)
    // - dentropy[i] * p * (log p + entropy[i])) / temperature
    void (*logprob_back)(struct device *, void *dlogits, const struct head_grads *,
                         const struct head_args *, enum dtype dt);
    // For each row i: out[i] (1 + k) is target[i], then the k likeliest tokens, likeliest first; k
    // is at most vocab and TOP_LOGPROBS_MAX. The numbers are those of `logprob`, to the bit.
    void (*top_logprobs)(struct device *, struct token_logprob *out, int k,
                         const struct head_args *);
    // Adjusts the logits z of each of n rows' entries in place, in this order: z += bias; where
    // seen, z = z > 0 ? z / repetition : z * repetition (Keskar et al. 2019); z -= frequency *
    // count; where count > 0, z -= presence. saved[e] is what stood at entry e before. undo: puts
    // that back.
    void (*adjust_logits)(struct device *, float *logits, float *saved,
                          const struct logit_row *rows, const struct logit_entry *entries, int n,
                          int vocab, bool undo);
    // Rules tokens out: of n rows, row[i] of the logits (row NULL: i) has mask i of masks (n,
    // MASK_WORDS(vocab)), where bit t % 32 of word t / 32 is token t's; where that is 0 its logit
    // becomes MIN_LOGIT.
    void (*mask_logits)(struct device *, float *logits, const int32_t *row, const uint32_t *masks,
                        int n, int vocab);
    // For each row: with p = softmax(teacher / temperature) over the first `vocab` entries and
    // q = softmax(student / temperature): divergence[i] = sum p log(p / q) where beta is 0,
    // sum q log(q / p) where it is 1, else with m = beta p + (1 - beta) q
    // beta sum p log(p / m) + (1 - beta) sum q log(q / m); overlap[i] = sum min(p, q), the rate at
    // which drafts sampled from q are accepted; dstudent (n, vocab) of dtype dt, NULL to skip: the
    // gradient of scale * weights[i] * divergence[i] by the student's logits.
    void (*distill)(struct device *, float *divergence, float *overlap, void *dstudent,
                    const struct distill_args *, enum dtype dt);

    // Samples one token for each row. Filtering is in this order: top-k, then top-p over the
    // renormalised remaining tokens, then min-p; tokens whose logit equals that of the last kept
    // one are kept too. A token is sampled by the Gumbel-max trick: argmax over kept tokens t of
    // z[t] - log(-log(u)), with the token's noise of kernels/sampling.h; lowest t wins a tie.
    //
    // A row with a draft d (token in 0..draft_vocab-1) and a temperature > 0 is rejection sampling
    // (Leviathan et al. 2023; Chen et al. 2023). p is the row's distribution after temperature and
    // filtering, q that of the draft's row of draft_logits after the same, 0 from draft_vocab on.
    // With u of sampling_acceptance(), d is accepted iff u * q(d) < p(d). Else the residual
    // max(p - q, 0), renormalised, is sampled with the same Gumbel noise g: argmax over t with
    // p(t) > q(t) of log(p(t) - q(t)) + g(t), lowest t winning a tie; where rounding leaves no such
    // t, the plain sample. If d was sampled from q with noise of another seed, it is accepted with
    // probability sum min(p, q), the token has exactly the distribution p, and it is d iff d was
    // accepted. The result's other fields are of p, as for a plain sample of that token.
    // Temperature 0 takes no notice of drafts: a greedy draft is accepted where it is the row's
    // token.
    void (*sample)(struct device *, struct sample_result *, const struct sample_args *);

    // out[0] f64 = sum of squares of x (n) f32, in a fixed order
    void (*sum_squares)(struct device *, double *out, const float *x, int64_t n);
    // AdamW (Loshchilov and Hutter 2019), torch.optim.AdamW's formula, in f32:
    //   p -= lr * wd * p; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
    //   p -= lr / bias_correction1 * m / (sqrt(v) / sqrt(bias_correction2) + eps)
    // with g = grad * grad_scale[0] (the clipping factor). w is f32, with low NULL; or bf16, where
    // w and low (u16) are the two halves of the exact f32 master (base/dtype.h). The weights move
    // by m and v as computed, in f32; what is kept of these for the next step is rounded to the
    // moments' kind.
    void (*adamw)(struct device *, void *w, uint16_t *low, const struct moments *,
                  const float *grad, int64_t n, const struct adamw *, enum dtype w_dt);
    // sums[i] = sum over little-endian 32-bit words w_j of the i-th region, padded with zeros, of
    // mix(w_j + j * 0x9E3779B97F4A7C15) mod 2^64, mix being the splitmix64 finaliser. Regions are
    // base + offset[i], bytes[i] long (host arrays); sums is host memory; waits.
    void (*checksum)(struct device *, uint64_t *sums, const void *base, const uint64_t *offset,
                     const uint64_t *bytes, int n);

    // x (n) = scale * z, z of the standard normal distribution: RANDOM_CHUNK numbers of the stream
    // `stream` of `seed`, as many of the next one, and so on (rng_normal() of base/rng.h).
    void (*random_normal)(struct device *, void *x, int64_t n, float scale, uint64_t seed,
                          uint64_t stream, enum dtype dt);

    // Scratch that the operations of a training step take at most (device_reserve).
    size_t (*scratch_bytes)(struct device *, const struct scratch_shape *);

    // Of operations that are computed in several ways, these (variants.h); NULL ends them, or
    // stands here where there are none.
    const struct op_variants *const *variants;
};

#ifdef __cplusplus
}
#endif
#endif
