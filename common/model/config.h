/* config.h: the one description of a model, read from a Hugging Face config.json (older and newer
 * style). Everything that differs between families is a field here; the forward pass (model.h), the
 * weights table (weights.h) and the backward pass ask this struct and never the family's name. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_CONFIG_H
#define COMMON_MODEL_CONFIG_H

#include "common/base/dtype.h"
#include "common/base/status.h"
#include "kernels/ops.h"
#include <jansson.h>

// ROPE_DYNAMIC stretches only contexts longer than max_positions, which are not served: within it,
// it is the default.
// ROPE_PROPORTIONAL (Gemma 4) has the frequencies of whole heads, and turns the first pairs alone.
enum rope_kind {
    ROPE_DEFAULT,
    ROPE_LINEAR,
    ROPE_DYNAMIC,
    ROPE_LLAMA3,
    ROPE_YARN,
    ROPE_LONGROPE,
    ROPE_PROPORTIONAL
};

struct rope_config { // filled by rope_config_read (rope.c)
    enum rope_kind kind;
    double theta;
    int dim;          // entries of a head that are rotated: head_dim unless partial
    bool interleaved; // pairs are neighbours, not half of dim apart
    int turned;       // pairs that turn, of ROPE_PROPORTIONAL
    double factor;
    double attention_factor;                  // cos and sin are multiplied by it; 1 for most kinds
    double low_freq_factor, high_freq_factor; // llama3
    double beta_fast, beta_slow;              // yarn
    bool truncate;                            // yarn
    double mscale_all; // yarn: scores are multiplied by its square where a family says so; 1: none
    double *short_factor, *long_factor; // longrope, (dim / 2) each; else NULL
    int original_max_positions;
    // Queries alone are multiplied by 1 + beta ln(1 + floor(position / original_max_positions))
    // (Llama 4, Ministral 3): beta; 0: none.
    double query_beta;
};

// ---- shards -------------------------------------------------------------------------------------
// Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): which part of a model one of several ranks
// holds and computes, and which part of a Hugging Face tensor that is.
//
// Ranks hold equal parts of attention's heads, of the inner columns of every MLP (plain, expert or
// shared) and of the vocabulary, in rank order. Where there are fewer key-value heads than ranks,
// neighbours hold the same one. Norms, routers and biases of the residual stream are whole on every
// rank.
//
// With expert_parallel experts are not cut: ranks hold equal numbers of whole ones, in rank order,
// and of a layer that has any each computes all else of its MLP.

struct shard { // {0, 1}: one rank holds all
    int rank, size;
};

// The first of the `own` rows or columns that a rank holds of `all`: 0 where it holds them all.
static inline int64_t shard_first(struct shard s, int64_t all, int64_t own)
{
    return s.rank * all / s.size / own * own;
}

// What is held of a Hugging Face tensor: runs of its rows, one after the other, and of those rows
// the columns from first_col on. With one rank one run, of everything.
struct row_run {
    int64_t first, n;
    int replicas; // ranks that hold these rows, of these columns
};
#define MAX_ROW_RUNS 5 // of Mamba-2's first matrix
struct tensor_slice {
    int64_t whole[2]; // shape of the Hugging Face tensor
    int n_runs;
    struct row_run runs[MAX_ROW_RUNS];
    int64_t first_col;
};

// ---- the description ----------------------------------------------------------------------------

struct family; // common/model/family.h: tensor names and config quirks, one table row each

// Latent attention (DeepSeek-V2, 2024): keys and values of all heads are made of one latent vector
// a token. A query has head_dim entries, of which the last `rope` are rotated; so is the end of the
// latent, which is part of every head's key.
struct latent_config {
    int rank;   // of the latent without its rotated end; 0: attention is not latent
    int rope;   // rotated entries
    int value;  // entries of a head's value
    int q_rank; // queries are made of a vector of so many entries; 0: of the residual stream itself
};

// One layer. Every layer begins with what config.json says of all; a family then sets what differs.
struct layer_config {
    // of attention: n_heads 0 where delta stands in its place, or the layer has an MLP alone
    int n_heads, n_kv_heads, head_dim;
    struct latent_config latent;
    // Linear attention with a state that goes along the sequence; n_heads 0: none. dt is a call's.
    struct delta_shape delta;
    bool k_is_v; // values are keys as their matmul gives them
    // Its queries attend to keys and values of that earlier layer, and it has none; -1: to its own.
    // And which of them that some layer attends to so these are, 0 or 1; -1: none does.
    int kv_from, kv_shared;
    int rope;           // its positions: model_config.ropes[rope]; -1: none are encoded
    int window;         // 0: full attention, else positions a token sees, itself included
    float attn_scale;   // of scores
    float attn_softcap; // 0: none
    int intermediate;   // inner width of the MLP, or of each expert; 0: the layer has neither
    // What routes tokens to experts; n_experts 0: one plain MLP. rows, width and dt are a call's.
    struct moe_shape moe;
    // Experts read and give a vector of so many entries, which is made of the residual stream and
    // made into it again; 0: that itself.
    int expert_latent;
    // Beside the experts, one that every row goes to: its inner width, 0 where there is none; and
    // whether what it gives is multiplied by the sigmoid of a gate of its own.
    int shared_intermediate;
    bool shared_gate;
    bool router_bias; // experts are chosen by their scores and a bias that nothing trains
};

#define MAX_ROPES     2
#define MAX_SHARED_KV 2
#define MAX_HEAD_DIM  512

// How a folder stores matrices that its config.json says are quantised: gpt-oss's experts
// (weights_files.c), and matrices in FP8 (fp8_folder.h).
enum stored_form { STORED_PLAIN, STORED_MXFP4, STORED_FP8 };
// What users are told of such a folder; NULL: nothing.
extern const char *const stored_form_notes[];

// What the model's blocks have beyond Llama's; `less`: what they have not.
enum {
    QKV_BIAS = 1 << 0,
    O_BIAS = 1 << 1, // of latent attention: of what makes its vectors, too
    MLP_BIAS = 1 << 2,
    HEAD_BIAS = 1 << 3,
    ROUTER_LOGIT_BIAS = 1 << 4,
    DELTA_BIAS = 1 << 5, // of linear attention's matmuls
    DELTA_CONV_BIAS = 1 << 6,
    DELTA_GROUPED = 1 << 7,   // its first matmuls give each key head's parts together
    QK_NORM = 1 << 8,         // queries and keys are normalised: each head by itself,
    QK_NORM_WHOLE = 1 << 9,   // or all of a row's together;
    QK_NORM_LATE = 1 << 10,   // behind rope, not before it
    V_NORM = 1 << 11,         // values are normalised too, each head, without weights
    NO_PRE_NORM = 1 << 12,    // less: what attention and MLP read is normalised
    NO_NORM_BIAS = 1 << 13,   // less: of NORM_LAYER
    POST_NORM = 1 << 14,      // what attention and MLP give is normalised before it is added
    PLAIN_MLP = 1 << 15,      // less: the MLP's gate; act(up), not act(gate) * up
    PARALLEL_BLOCK = 1 << 16, // attention and MLP read the same normalised input
    SINKS = 1 << 17,          // attention's scores have one more, of a key without a value (ops.h)
    ATTN_GATE = 1 << 18,      // what attention gives is multiplied by the sigmoid of a gate
    LAYER_SCALE = 1 << 19,    // what a layer gives is multiplied by a number of its own
    // Experts stand beside the MLP, which is as a shared one here: each has norms of its own before
    // and behind, and the post-norm goes over their sum (Gemma 4).
    EXPERTS_BESIDE = 1 << 20
};

struct model_config {
    const struct family *family;
    char model_type[32], architecture[64];
    int vocab_size, hidden, n_layers, max_positions;
    int embedded; // rows of the embedding where fewer tokens are predicted; 0: vocab_size
    // (n_layers) as this rank computes them: its heads and its part of the inner widths; and as
    // config.json says, which is the same list where one rank holds all
    struct layer_config *layers, *whole;
    struct shard shard;   // model_config_shard()
    bool expert_parallel; // of a shard: its user's to choose before that
    unsigned block;       // QKV_BIAS and so on
    enum norm_kind norm;
    float norm_eps;
    enum act_kind act;
    float act_alpha, act_limit;  // of ACT_CLAMPED
    double router_aux_loss_coef; // of the load-balancing loss in training; 0: the family has none
    bool tie_embeddings;
    float logit_softcap; // 0: none
    float logit_scale;   // of logits, before the cap
    float embed_scale;   // of looked-up embeddings
    // references hold that factor in the activations' dtype, not as a number of its own
    bool embed_scale_rounded;
    float residual_scale; // of what attention and MLP give
    // Inputs that each layer has of its own (per-layer embeddings, Gemma 3n and 4): their width, 0:
    // there are none; and rows of their table.
    int layer_input, layer_input_vocab;
    double rotary_share; // of a head's entries that rope rotates, where the config does not say
    struct rope_config ropes[MAX_ROPES];
    int n_ropes;
    int query_rope; // of queries, where their table is another than that of keys; 0: it is not
    // Longrope, chosen once for all who compute with the same weights: the longest sequence that is
    // meant, in tokens. 0: not chosen, a table goes by its own length.
    int rope_context;
    enum quantization quantization; // of the weights in memory (dtype.h): its user's to choose
    enum kv_cache kv_cache;         // likewise
    bool twin_alone; // the matrices that are quantised have no other copy: nobody may train them
    // The folder's layers beside n_layers that predict further tokens (multi-token prediction,
    // DeepSeek-V3): not part of the model.
    int n_mtp_layers;
    // It is the first of these, as a model of one layer that drafts (model_config_take_mtp()).
    bool mtp;
    int first_layer;        // what the folder calls layer 0
    int ahead;              // model_config_draft_ahead(); 0: its states, if it has any, cannot
    int bos_id, pad_id;     // -1: none
    int eos_ids[16], n_eos; // config.json, and generation_config.json where there is one
    enum dtype file_dtype;  // torch_dtype / dtype: what the folder's tensors are said to be
    bool is_text_part;      // the folder's model also reads images; only the text model is taken
    enum stored_form stored;
    int fp8_block[2]; // of STORED_FP8 (fp8_config_read)
    json_t *source;   // the parsed config.json, for writing checkpoints
};

// Reads folder/config.json (and generation_config.json). An unknown architecture is ST_UNSUPPORTED
// in a sentence that lists the supported ones.
enum status model_config_load(const char *folder, struct model_config **ret);
// The same from a config.json's path (cw-bench --config, cw-trainer sft --init).
enum status model_config_load_file(const char *path, struct model_config **ret);
// The same from parsed JSON; `where` names it in errors. Keeps a reference to `json`.
enum status model_config_from_json(const char *where, json_t *json, struct model_config **ret);
void model_config_free(struct model_config *config);
// Makes it the config of the folder's first layer that predicts further tokens, whose embeddings,
// head and hidden states are the model's (weights_share_ends(), model.h). ST_NOT_FOUND where there
// is none.
enum status model_config_take_mtp(const char *folder, struct model_config *config);
// What drafts predicts the first n tokens alone, by so many rows of the head; 0: all. Nothing else
// of it changes.
static inline void model_config_predict_first(struct model_config *config, int64_t n)
{
    if (n <= 0 || n >= config->vocab_size) return;
    config->embedded = config->vocab_size;
    config->vocab_size = (int)n;
}
// Rows of embedding and head, of all ranks.
static inline int config_embedded(const struct model_config *c)
{
    return c->embedded ? c->embedded : c->vocab_size;
}
// For logs: what of the folder is left out, further layers or what reads images. False: nothing.
bool left_out_describe(const struct model_config *config, char *ret, size_t size);
// Sets how its weights lie in memory, once, before anything is planned from it and before
// model_config_shard(). alone: nobody trains what is quantised (twin_alone), which mxfp4 means by
// itself. ST_UNSUPPORTED where its folder has no experts in MXFP4.
enum status model_config_quantise(struct model_config *config, enum quantization quantization,
                                  bool alone);
// Makes it the config of one rank's shard; once, before anything is planned from it. vocab_size
// stays the whole model's, and so do the experts that are routed to. ST_INVALID names a number that
// so many ranks cannot share.
enum status model_config_shard(struct model_config *config, struct shard shard);

// Of a layer that has experts; 0: none has any. All that have any have as many.
static inline int config_experts(const struct model_config *c)
{
    int max = 0;
    for (int l = 0; l < c->n_layers; l++)
        if (c->layers[l].moe.n_experts > max) max = c->layers[l].moe.n_experts;
    return max;
}

// Whether what a residual branch gives is more than added.
static inline bool config_scales_branches(const struct model_config *c)
{
    return (c->block & POST_NORM) || c->residual_scale != 1;
}
// Whether logits are more than the head's matmul.
static inline bool config_bends_logits(const struct model_config *c)
{
    return c->logit_softcap > 0 || c->logit_scale != 1;
}
// Widths in elements.
static inline int layer_q_width(const struct layer_config *l)
{
    return l->n_heads * l->head_dim;
}
static inline int layer_kv_heads(const struct layer_config *l) // of a token's keys in the cache
{
    return l->latent.rank > 0 ? 1 : l->n_kv_heads;
}
static inline int layer_kv_width(const struct layer_config *l)
{
    return l->n_kv_heads * l->head_dim;
}
// Of latent attention: a token's entry in the cache.
static inline int layer_latent_width(const struct layer_config *l)
{
    return l->latent.rank + l->latent.rope;
}
// Of a token's keys in the cache, which are its values too where attention is latent; 0: they are
// another layer's.
static inline int layer_cached_width(const struct layer_config *l)
{
    return l->kv_from >= 0 ? 0 : l->latent.rank > 0 ? layer_latent_width(l) : layer_kv_width(l);
}
static inline int layer_qkv_width(const struct layer_config *l)
{
    return layer_q_width(l) + 2 * layer_kv_width(l);
}
// Of keys, and of values, that the matmul in front of attention gives.
static inline int layer_k_in_width(const struct layer_config *l)
{
    return l->kv_from < 0 ? layer_kv_width(l) : 0;
}
static inline int layer_v_in_width(const struct layer_config *l)
{
    return l->k_is_v ? 0 : layer_k_in_width(l);
}
// Of that matmul: each query has a gate beside it where there are any.
static inline int layer_attn_in_width(const struct model_config *c, const struct layer_config *l)
{
    return layer_q_width(l) * (c->block & ATTN_GATE ? 2 : 1) + layer_k_in_width(l) +
           layer_v_in_width(l);
}
// Whether that is something else than rows of qkv.
static inline bool layer_attn_in_differs(const struct model_config *c, const struct layer_config *l)
{
    return (c->block & ATTN_GATE) || l->k_is_v || l->kv_from >= 0;
}
// Which of its two branches a layer has: attention or what stands in its place, and an MLP or
// experts.
static inline bool layer_mixes(const struct layer_config *l)
{
    return l->n_heads > 0 || l->delta.n_heads > 0;
}
static inline bool layer_has_mlp(const struct layer_config *l)
{
    return l->intermediate > 0;
}
// Of the first matmul of linear attention: what goes into its convolution, and the output's gate;
// of a short convolution alone gates before and behind it, and what they gate; of Mamba-2 the gate,
// what goes into the convolution, and the steps.
static inline int layer_delta_in_width(const struct layer_config *l)
{
    const int value = delta_value_width(&l->delta);
    return delta_conv_width(&l->delta) + value * (delta_is_conv(&l->delta) ? 2 : 1) +
           (l->delta.is_scan ? l->delta.n_heads : 0);
}
// Of the second, which gives the gates of the delta rule.
static inline int layer_delta_gates_width(const struct layer_config *l)
{
    return delta_is_conv(&l->delta) || l->delta.is_scan ? 0 : 2 * l->delta.n_heads;
}
// Of what stands between the first matmul and attention of either kind, where that is not qkv
// alone.
static inline int layer_before_attn_width(const struct model_config *c,
                                          const struct layer_config *l)
{
    return layer_delta_in_width(l) + (layer_attn_in_differs(c, l) ? layer_attn_in_width(c, l) : 0);
}
// The layer as all ranks hold it together; of one as they do: itself.
static inline const struct layer_config *layer_whole(const struct model_config *c,
                                                     const struct layer_config *l)
{
    return l >= c->layers && l < c->layers + c->n_layers ? &c->whole[l - c->layers] : l;
}
// Of a row's queries on all ranks, where norms go over these and ranks hold parts; else 0.
static inline int layer_all_heads_width(const struct model_config *c, const struct layer_config *l)
{
    return (c->block & QK_NORM_WHOLE) && c->shard.size > 1 ? layer_q_width(l) * c->shard.size : 0;
}
// Of a norm over n heads' queries or keys, and how many of these norms a row has.
static inline int layer_qk_norm_width(const struct model_config *c, const struct layer_config *l,
                                      int n)
{
    return c->block & QK_NORM_WHOLE ? n * l->head_dim : l->head_dim;
}
static inline int layer_qk_norms(const struct model_config *c, int n)
{
    return c->block & QK_NORM_WHOLE ? 1 : n;
}
// What attention gives, and the output matmul takes.
static inline int layer_attn_width(const struct layer_config *l)
{
    if (l->delta.n_heads > 0) return delta_value_width(&l->delta);
    return l->latent.rank > 0 ? l->n_heads * l->latent.value : layer_q_width(l);
}
// Of latent attention: a head of the expanded form (kernels/ops.h, struct latent_shape).
static inline int layer_expanded_dim(const struct layer_config *l)
{
    const int rope = l->latent.rope;
    return latent_expanded_dim(l->head_dim - rope, rope, l->latent.value);
}
// Multiplications of attention for a query of all heads and a key: scores and the weighted sum, as
// the forward pass computes them.
static inline int layer_attn_products(const struct layer_config *l)
{
    return l->latent.rank > 0 ? l->n_heads * (layer_latent_width(l) + l->latent.rank)
                              : 2 * layer_q_width(l);
}
// Of the first matmul of an MLP of so many inner columns: gate and up, or up alone.
static inline int config_up_width(const struct model_config *c, int inner)
{
    return c->block & PLAIN_MLP ? inner : 2 * inner;
}
// Of what an expert reads and gives.
static inline int layer_expert_width(const struct model_config *c, const struct layer_config *l)
{
    return l->expert_latent > 0 ? l->expert_latent : c->hidden;
}
// Whether ranks hold the layer's experts whole, some each.
static inline bool layer_splits_experts(const struct model_config *c, const struct layer_config *l)
{
    return c->expert_parallel && c->shard.size > 1 && l->moe.n_experts > 0;
}
// Experts that this rank holds, and the first of them.
static inline int layer_own_experts(const struct model_config *c, const struct layer_config *l)
{
    return l->moe.n_experts / (layer_splits_experts(c, l) ? c->shard.size : 1);
}
static inline int layer_first_expert(const struct model_config *c, const struct layer_config *l)
{
    return layer_splits_experts(c, l) ? c->shard.rank * layer_own_experts(c, l) : 0;
}
// Elements of what the MLP's matmuls take and give for t tokens: the larger of the experts' and the
// shared one's.
static inline size_t layer_mlp_elements(const struct layer_config *l, size_t t)
{
    size_t experts = (size_t)(l->moe.n_experts > 0 ? l->moe.top_k : 1) * (size_t)l->intermediate;
    size_t shared = (size_t)l->shared_intermediate;
    return t * (experts > shared ? experts : shared);
}
// Rows that the MLP's matmuls have for t tokens.
static inline size_t layer_mlp_rows(const struct layer_config *l, size_t t)
{
    return l->moe.n_experts > 0 ? t * (size_t)l->moe.top_k : t;
}
// Elements of what experts read, or give, for t tokens.
static inline size_t layer_expert_elements(const struct model_config *c,
                                           const struct layer_config *l, size_t t)
{
    return l->moe.n_experts > 0 ? layer_mlp_rows(l, t) * (size_t)layer_expert_width(c, l) : 0;
}
// Rows of the embedding and of the head that this rank holds, and the first of them.
static inline int config_vocab_rows(const struct model_config *c)
{
    return config_embedded(c) / c->shard.size;
}
// Rows of the head that each rank multiplies with: of some, where few tokens are predicted, those
// give nothing that is read.
static inline int config_head_rows(const struct model_config *c)
{
    const int held = config_vocab_rows(c);
    return held < c->vocab_size ? held : c->vocab_size;
}
static inline int config_first_vocab_row(const struct model_config *c)
{
    return c->shard.rank * config_vocab_rows(c);
}
// The same of the table of layers' own inputs.
static inline int config_layer_vocab_rows(const struct model_config *c)
{
    return c->layer_input_vocab / c->shard.size;
}
// Entries of a row of it: every layer's.
static inline int config_layer_inputs(const struct model_config *c)
{
    return c->layer_input * c->n_layers;
}
// Keys and values of one token in all layers, on this rank.
int64_t config_kv_elements(const struct model_config *config);
// Bytes of these in a cache, of a model that computes in dt; scales included.
int64_t config_kv_bytes(const struct model_config *config, enum dtype dt);
// What one sequence carries along in the states of all layers, f32 elements; 0: there are none.
int64_t config_state_elements(const struct model_config *config);
// States that keep the rows since a border can be taken back by so many drafts, as long as they do
// not reach the next one (ops.h, delta_shape.ahead): makes room for that, before anything is
// allocated.
void model_config_draft_ahead(struct model_config *config, int n);

// Reads the rope keys of a config.json (rope_theta, rope_scaling, rope_parameters or its
// full_attention, partial_rotary_factor) into ropes[0], which all layers have. Layers and
// max_positions must be set.
enum status rope_config_read(const char *where, const json_t *json, struct model_config *config);
// Layers with a window get a table of their own, ropes[1]: rope_parameters' sliding_attention, else
// the default kind with the theta of the family's local_key, or its local_theta.
enum status rope_config_read_local(const char *where, const json_t *json,
                                   struct model_config *config);
// Of ropes[i]: (n_positions, dim / 2, 2) f32 cos and sin; host memory, caller frees. Longrope takes
// its long factors where rope_context (or n_positions, if that is 0) is above
// original_max_positions.
float *rope_table(const struct model_config *config, int i, int n_positions);
// Of pair i: radians a position; of longrope with its long factors or the short ones.
double rope_frequency(const struct rope_config *rope, int i, bool long_factors);
// For logs: which factors longrope takes by rope_context, and where the border lies. False where
// there is no such choice.
bool rope_describe(const struct model_config *config, char *ret, size_t size);

#endif
