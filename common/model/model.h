/* model.h: a model on a device, and its one forward pass. The server calls it for prefill, decode
 * and verification, the trainer with a tape for the backward pass: a token's log-probability
 * means the same in both. One thread at a time.
 *
 * Of a shard (config.h) every rank runs the same passes over the same batches, at the same time;
 * the residual stream and the logits are then whole on all of them, and the same to the bit: what
 * ranks hold parts of is summed, in an order that is the same for all (comm.h), in four places:
 * behind the look-up of embeddings, at the end of each of a layer's two branches, and (put
 * together, not summed) the logits. Queries and keys are put together too where their norms go over
 * all heads of a row. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_MODEL_H
#define COMMON_MODEL_MODEL_H

#include "common/model/adapter.h"
#include "common/model/batch.h"
#include "common/model/config.h"
#include "common/model/weights.h"
#include "kernels/comm.h"
#include "kernels/ops.h"

// What latent attention (DeepSeek-V2, 2024; kernels/ops.h, struct latent_shape) keeps of T tokens:
// scratch of the forward pass, or on the tape. D is rank + rope.
struct latent_rows {
    void *q_a;     // (T, q_rank) before its norm, where queries are made in two steps
    float *rstd_q; // (T) of that norm; on the tape, as rstd_kv
    void *q;       // (T, n_heads, head_dim), rotated
    void *keys;    // (T, D) what the cache holds
    void *kv_a;    // (T, D) the same before the norm of its first rank entries and the rotation of
                   // the others; on the tape
    float *rstd_kv;
};
#define N_LATENT_ROWS 6
// Buffers of a routing of `a` pairs of row and expert, in the struct at `base`; how many they are.
int model_routing_parts(int n_experts, size_t a, size_t base, struct device_part *ret);
// Their bytes for t tokens of a layer (0 where its attention is not latent), in a struct that has
// them at offset `base`. Returns how many there are.
int latent_rows_parts(const struct layer_config *l, enum dtype dt, size_t t, size_t base, bool tape,
                      struct device_part ret[N_LATENT_ROWS]);

// What one layer's backward pass needs. dt is the weights' dtype; A is T * moe.top_k, or T where
// there are no experts. Fields that the config has no use for are NULL.
struct layer_tape {
    void *x;                   // (T, hidden) residual stream at the layer's entry
    float *rstd1, *mean1;      // (T) of the attention norm; mean of NORM_LAYER only, here and below
    void *qkv_raw;             // (T, qkv width) before the q/k norms
    float *rstd_q, *rstd_k;    // (T, n_heads), (T, n_kv_heads); (T) where norms go over all heads
    float *rstd_v;             // (T, n_kv_heads)
    void *qkv;                 // (T, qkv width) after bias, q/k norm and rope
    void *kv;                  // (T, 2 * kv width) of qkv, where later layers attend to these too
    struct latent_rows latent; // in place of all since mean1
    void *gate;                // (T, q width) of attention's output, where it has one
    void *attn;                // (T, attention width) attention output, before a gate
    float *lse;                // (T, n_heads)
    void *delta_in;            // (T, delta in width); of linear attention, as the next two
    float *delta_gates;        // (T, 2 * heads) of the delta rule
    float *rstd_delta;         // (T, heads) of the output's norm; of Mamba-2 (groups, T)
    void *attn_proj;           // (T, hidden) what attention gives, before its post-norm
    float *rstd_post1;         // (T)
    void *x_mid;               // (T, hidden) residual stream after attention
    float *rstd2, *mean2;      // (T) of the MLP norm
    struct moe_routing routing;
    float *router_logits; // (T, n_experts)
    void *shared_gate_up; // (T, 2 * shared_intermediate)
    void *shared_out;     // (T, hidden), not yet gated; where there is a gate, as the next two
    float *shared_logits; // (T)
    // (T, hidden) of experts beside the MLP, as shared_out is of that, and (T) of the norms behind
    void *experts_sum;
    float *rstd_shared, *rstd_experts;
    struct moe_routing shared_routing;
    void *gate_up;     // (A, 2 * intermediate), or (A, intermediate) where not gated
    void *expert_out;  // (A, expert width) sorted by expert
    void *mlp_proj;    // (T, hidden) what the MLP gives, before its post-norm
    float *rstd_post2; // (T)
    // of layers' own inputs: (T, hidden) the residual stream before that branch, (T, layer_input)
    // before its activation, (T, hidden) what it gives before its norm, (T)
    void *x_own, *own_gate, *own_proj;
    float *rstd_own;
    // the same of all layers, in the first one's: (T, n_layers * layer_input) those inputs, and of
    // their part that is the stream's before its norm; (T, n_layers)
    void *inputs, *inputs_raw;
    float *rstd_inputs;
    bool again; // it is computed again: attn, lse and the next layer's x stand
};
// Activations of a packed batch, kept for the backward pass: all of them, or only the residual
// stream at each layer's entry and what attention gives, the rest of a layer being computed again
// when its turn comes (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost).
enum recompute { RECOMPUTE_NONE, RECOMPUTE_LAYER };
struct tape {
    int max_tokens;
    enum recompute recompute;
    // (2, n_experts) of the last forward pass, summed over rows and layers with experts:
    // assignments, and probabilities of the router. Borrowed; NULL: not wanted.
    float *balance;
    int held; // RECOMPUTE_LAYER: the layer whose activations the shared memory holds; -1: none
    size_t bytes;
    struct layer_tape
        *layers;   // (n_layers); RECOMPUTE_LAYER: but x, attn and lse one memory for all layers
    void *x_final; // (T, hidden) residual stream after the last layer
    void *memory;  // the one allocation behind it all
};

// What goes where of a batch's rows, and back: `unit` entries together, n such of a row.
struct arrangement {
    int unit, n;
    int32_t *order[2]; // device; (max_tokens, n)
};

struct model {
    struct device *dev;
    const struct ops *ops;
    const struct model_config *config;    // borrowed
    const struct weights *weights;        // borrowed, bound
    const struct adapter_table *adapters; // borrowed, its user's to set; NULL: none
    const int32_t *row_adapter;           // the batch's, in a forward pass
    // borrowed, set before the first pass: the ranks of a sharded model, else NULL
    struct comm *comm;
    enum dtype dt;
    struct attn_shape *attn; // (n_layers)
    float *ropes[MAX_ROPES]; // device; (max_context, dim / 2, 2) each
    int max_tokens, max_rows, max_context;
    // Of a layer that predicts further tokens, device: (max_tokens, hidden) what each row reads
    // beside its token, the hidden state of the token before, normalised as the model's head would;
    // the user's to fill before each pass. And (max_tokens, 2 * hidden) both, normalised.
    void *hidden_in, *mtp_in;
    // scratch of the forward pass, device
    void *x, *normed;     // (max_tokens, hidden)
    void *qkv, *attn_out; // (max_tokens, qkv width), (max_tokens, attention width)
    void *attn_in, *gate; // (max_tokens, attention in width), (max_tokens, q width) where queries
                          // have gates. Linear attention: its in width; its normalised output
    // Of norms over all heads of a row, which several ranks hold: (max_tokens, q width of all), and
    // (ranks, max_tokens, q width)
    void *all_heads, *heads_parts;
    void *kv[MAX_SHARED_KV];  // (max_tokens, 2 * kv width) that later layers attend to
    void *inputs, *inputs_in; // (max_tokens, n_layers * layer_input) of layers' own inputs; scratch
    void *own_gate, *own_act; // (max_tokens, layer_input)
    float *delta_gates;       // (max_tokens, 2 * heads) of linear attention
    void *grouped; // what its first matmuls give, as the config groups it; of such, as the next
    struct arrangement arranged[2]; // of the matmul's and of the gates' rows
    struct latent_rows latent;      // of latent attention, as the next two
    void *q_a_normed;               // (max_tokens, q_rank)
    void *latent_out;               // (max_tokens, n_heads, rank)
    void *gate_up, *act;            // (A, 2 * intermediate), (A, intermediate)
    void *block;                    // (max_tokens, hidden) what a block gives, before its post-norm
    void *beside;                   // (max_tokens, hidden) what an MLP beside experts gives
    float *expert_scales;           // (4, A) chosen experts' scales, weights times these, and room
    void *expert_in, *expert_out;   // (A, expert width) sorted by expert
    // (max_tokens, expert width) what experts read and give, where that is a latent vector
    void *latent_in, *latent_sum;
    float *router_logits; // (max_tokens, n_experts)
    struct moe_routing routing, shared_routing;
    void *row_x, *row_normed;   // (max_rows, hidden)
    float *row_rstd, *row_mean; // (max_rows)
    float *logits;              // (max_rows, vocab)
    float *logit_parts;         // the same as ranks compute it, part by part; NULL with one rank
    float *logits_of_all;       // the same put together, of more than vocab_size; else NULL
    bool shares_logits;         // comm's ranks may have them mapped
    uint8_t *codes;             // what a matmul reads, in e4m3; of QUANTIZATION_FP8, as the next
    int8_t *code_scales;
    size_t scratch_bytes;
};

// Scratch for batches of at most max_tokens rows, of which max_rows want logits; max_context bounds
// positions. On the trainer's side max_rows is how many rows of logits exist at one time.
enum status model_new(struct device *dev, const struct model_config *config,
                      const struct weights *w, int max_tokens, int max_rows, int max_context,
                      struct model **ret);
void model_free(struct model *m);
// Elements of m->codes, which a device that does not multiply e4m3 widens at once (ops.h,
// scratch_shape).
size_t model_codes(const struct model *m);
// These ranks may write into one another's logits (comm_share()): a step that decodes is shorter.
// All call it. Before model_free() of such a model comm_unmap_peers(), or the logits stay behind.
enum status model_share_logits(struct model *m, char *ret_why, size_t size);

// The forward pass: embeds the batch's tokens and runs every layer; *ret_x (T, hidden) is the
// residual stream after the last one (scratch, or the tape's x_final). kv for paged batches, tape
// for packed ones that will be differentiated; both NULL: packed without a backward pass.
void model_forward(struct model *m, const struct batch_view *batch, const struct kv_view *kv,
                   struct tape *tape, void **ret_x);
// What m->row_x, row_normed, row_rstd, row_mean and logits hold from row `first` on.
struct head_rows {
    void *x, *normed;
    float *rstd, *mean, *logits;
};
struct head_rows model_head_rows(const struct model *m, int first);
// Final norm and vocabulary matmul of n rows of x; row indices are device memory. Fills rows first
// to first + n - 1 <= max_rows.
void model_head(struct model *m, const void *x, const int32_t *rows, int first, int n);

// Encodes the positions of layer l's queries and keys, in place; sign -1: the inverse, which is the
// backward pass.
void model_rotate(struct model *m, int l, void *qkv, const struct batch_view *batch, float sign);

// Where the server's KV cache is in e4m3: n keys and values of each row, the first at x, become
// what it would give back. Gradients go through that as they are.
void model_round_kv(struct model *m, void *x, int rows, int n, int head_dim, int stride);

// What a residual branch reads, (rows, hidden): args->x normalised, or as it is where there are no
// weights to it.
void model_normalise(struct model *m, void *y, int rows, const struct norm_args *args);
// Where ranks hold parts of what a norm goes over: layer l's queries, or its keys, at x in rows of
// qkv, whole in `all`, and this rank's part out of there; and the shape of the norm.
struct heads {
    int l, rows;
    bool keys;
    // Gradients: ranks that hold the same heads of keys have parts of them, which are added up in
    // `all`, and given back to the first.
    bool parts;
};
struct norm_shape model_all_heads(struct model *m, void *all, const void *x, const struct heads *h);
void model_own_heads(struct model *m, void *x, void *all, const struct heads *h);
// A role's norm of x, with its bias where it has one. rstd: room for its statistics, or NULL.
struct norm_args model_norm(const struct model *m, enum tensor_role role, int l, const void *x,
                            float *rstd);
// Of the norm of x before attention or before the MLP, with the tape's room for its statistics; or
// of those by which router and experts beside an MLP read what it reads, whose statistics are its.
struct norm_args model_branch_norm(const struct model *m, enum tensor_role role, int l,
                                   const void *x, const struct layer_tape *tape);

// Shapes of calls for `rows` rows, as the forward and the backward pass make them: of n norms a row
// of so many entries each, in rows that lie stride elements apart; of the norms over the residual
// stream, of those over n heads of layer l, of the layer's routing and of its activation.
struct norm_shape model_norms(const struct model *m, int rows, int n, int width, int stride);
struct norm_shape model_norm_shape(const struct model *m, int rows);
struct norm_shape model_heads_shape(const struct model *m, int l, int rows, int n);
struct moe_shape model_moe_shape(const struct model *m, int l, int rows);
// The gate of a shared expert: the routing of a mixture of one, which every row goes to.
struct moe_shape model_shared_shape(const struct model *m, int rows);
struct delta_shape model_delta_shape(const struct model *m, int l);
// Layer l's linear attention as both passes call it: `in`, the rows of its first matmul, of which
// most else is a part (of Mamba-2 the steps, too); gates of the delta rule, or NULL; `before` and
// conv, from there to m->qkv; the rule, to out; `behind` and norm, from there to m->attn_out by way
// of m->gate. A short convolution alone has neither rule nor norm, nobody else a gate before.
struct delta_layer {
    struct delta_shape shape;
    void *in, *out;
    float *gates;
    struct act_shape before, behind; // gates: `in` and z
    const void *z;
    struct conv_args conv;
    struct delta_args rule;
    struct norm_args norm;
    struct norm_shape heads; // of the norm
};
struct delta_layer model_delta_layer(const struct model *m, int l, const struct delta_batch *batch,
                                     const struct layer_tape *tape);
void model_delta_convolve(struct model *m, const struct delta_layer *d);
void model_delta_finish(struct model *m, const struct delta_layer *d);
// A gate beside a value, of the model's dtype; and that on what attention gives, x.
struct act_shape model_gate(const struct model *m, enum act_kind kind, int rows, int width,
                            int64_t gate_stride, const void *up, int64_t up_stride);
struct act_shape model_attn_gate(const struct model *m, int l, const void *x, int rows);
// Norms of the inputs that all layers have of their own, and the gate on m->own_act by layer l's.
struct norm_shape model_inputs_norm(const struct model *m, int rows);
struct act_shape model_own_act(const struct model *m, int rows);
struct act_shape model_own_gate(const struct model *m, int rows);
const void *model_own_inputs(const struct model *m, int l, const void *inputs); // that gate
// The factor of what is looked up of them.
float model_inputs_scale(const struct model *m);
#define INPUTS_SHARE 0.70710678118654752 // of what is looked up, and of the stream's part
struct act_shape model_act_shape(const struct model *m, int rows, int inner);
// n rows of m->logits from row `first` on, each with its target (device).
struct head_args model_head_args(const struct model *m, int first, const int32_t *targets, int n,
                                 float temperature);
// Whether this rank's part of a sum over ranks begins with what all of them hold whole: a bias, the
// residual stream, a router's gradient. One does.
bool model_begins_sum(const struct model *m);
// Sums (rows, hidden) of dt over the ranks, in place.
void model_sum_ranks(struct model *m, void *x, int rows);
// The same two of layer l's MLP, of n elements: where ranks hold whole experts, each has all of
// what else belongs to it, and begins and ends with whole sums.
bool model_begins_mlp(const struct model *m, int l);
void model_sum_mlp(struct model *m, int l, void *x, size_t n, enum dtype dt);

// The embeddings of a batch's tokens into x (T, hidden), whole on every rank.
void model_embed(struct model *m, void *x, const struct batch_view *batch);
// The factor of looked-up embeddings, as the forward pass applies it.
float model_embed_scale(const struct model *m);

extern const char *const recompute_names[];
enum status tape_new(const struct model *m, int max_tokens, enum recompute recompute,
                     struct tape **ret);
void tape_free(struct device *dev, struct tape *tape);
// Bytes a tape for max_tokens would take, for the memory plan.
size_t tape_bytes(const struct model_config *config, enum dtype dt, int max_tokens,
                  enum recompute recompute);
// All that layer l's backward pass needs; where the tape does not hold it, the layer is run again
// from its input, by the code that ran it first: the same bits. Valid until another layer is asked
// for. batch: what model_forward() put on the tape last.
const struct layer_tape *tape_layer(struct tape *tape, struct model *m, int l,
                                    const struct batch_view *batch);

// ---- blocks that few families have (blocks.c) ---------------------------------------------------
// From m->normed to out (T, n_heads * value), through the pool (kv) or the batch itself; lse as of
// attn. Both forms are absorbed ones, so that a row has the same bits in both.
void latent_attention(struct model *m, int l, const struct batch_view *batch,
                      const struct kv_view *kv, const struct latent_rows *rows, float *lse,
                      void *out);
// Linear attention, from m->normed to m->attn_out.
void delta_attention(struct model *m, int l, const struct batch_view *batch,
                     const struct kv_view *kv, struct layer_tape *tape);
// Of a model whose first matmuls of linear attention give each key head's parts together: y is x
// (rows, width of that role) of dt, part after part; back: the other way.
void model_arrange(struct model *m, void *y, const void *x, int rows, enum tensor_role role,
                   enum dtype dt, bool back);
// What model_arrange() reads, once.
enum status model_arrange_init(struct model *m);
// model.c: layer l's MLP, experts or both, from the residual stream mid to x_out, which may be it.
// m->normed holds attention's normalised input on entry: the MLP's too in a parallel block.
void mlp_block(struct model *m, int l, int rows, struct layer_tape *tape, const void *mid,
               void *x_out);
// From m->normed (or x, where the config has experts_beside) to x_out += what the experts give, and
// the one that every row goes to.
void experts_block(struct model *m, int l, int rows, struct layer_tape *tape, const void *x,
                   void *x_out);
// By what a router's logits are multiplied where it has a norm of its own; else 1.
float model_router_scale(const struct model *m);
// y (a, n) = x (a, k), sorted by expert, times each row's expert's matrix w (n, k) transposed, of
// those of layer l's experts that this rank holds; back: dx (a, k) from dy (a, n).
struct matmul model_experts_shape(const struct model *m, int l, const struct moe_routing *r, int a,
                                  const struct weight_matrix *w, bool back);
// The weights of so many rows' chosen experts: the routing's, or where experts have scales of their
// own the second of m->expert_scales' lists: each the routing's weight times the first's scale, as
// the gate says.
float *model_expert_weights(struct model *m, int l, const struct moe_routing *r, int rows);
struct act_shape model_expert_gate(const struct model *m, int l, const struct moe_routing *r,
                                   int rows);
// That second list in the experts' order. The others are lost.
float *model_sort_by_expert(struct model *m, int l, const struct moe_routing *r, int rows);
// y (A, expert width) = a matmul of experts, and the bias (NULL: none). Where ranks hold whole
// experts each gives what its own do for their rows, and all get all rows: a row is one rank's, and
// a sum with zeros is it, so that the bits are those of one rank.
void model_experts_matmul(struct model *m, int l, void *y, const void *x, const void *w,
                          const void *bias, const struct matmul *shape);
// What experts read of m->normed: m->normed itself, or a latent vector made of it.
const void *experts_input(struct model *m, int l, int rows);
void shared_block(struct model *m, int l, int rows, struct layer_tape *tape, void *x_out);
// y (rows, n) = x (rows, k) . w (n, k)^T + bias [+ y] of that role's matrix (weights_matrix()), and
// what the rows' adapters add to it: what a kind of layer calls for its matmuls (model.c).
struct linear {
    enum tensor_role role;
    int layer;
    bool add;
    enum dtype out; // of y
    bool no_bias;   // another rank adds it
    bool rounded;   // m->codes have x's rows in e4m3, where the matrix wants them
};
void model_linear(struct model *m, void *y, const void *x, int rows, const struct linear *l);
// y = the activation of x . w^T + bias, which is in gate_up afterwards if `keep`.
void model_linear_act(struct model *m, void *y, void *gate_up, const void *x, int rows,
                      const struct linear *l, int inner, bool keep);
// What a forward matmul of that shape has for x (m, k): x, or where the matrix wants them m->codes,
// its rows in e4m3, valid until the next call.
const void *model_rounded(struct model *m, const void *x, const struct weight_matrix *w,
                          struct matmul *shape);
// The shape of layer l's calls for so many rows.
struct latent_shape model_latent_shape(const struct model *m, int l, int rows);
// Rotates what is rotated of n heads of `width` entries, `rotated` being where the first begins.
void model_latent_rotate(struct model *m, int l, void *rotated, int n, int width,
                         const struct batch_view *batch, float sign);
// Of the norms of q_a and of kv_a.
struct norm_shape model_latent_norm(const struct model *m, int rows, int width, int stride);

#endif
