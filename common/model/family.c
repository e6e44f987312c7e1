/* family.c: the table of model families. A row names the family's tensors and sets what its
 * config.json leaves unsaid; nothing else in the project asks which family a model is of.
 * Pure data and parsing; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/family.h"
#include "common/base/json.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

// ---- keys that several families share -----------------------------------------------------------
// Which layers have a sliding window: those that "layer_types" calls sliding_attention, else those
// from first_layer on to end_layer (0: the last), but every full_every-th (0: none).
struct windows {
    int absent; // of a config without sliding_window: positions; 0: none
    bool off;   // there are none, whatever sliding_window says
    bool all;   // every layer has one, whatever layer_types says
    int first_layer, end_layer, full_every;
};

static enum status read_windows(const char *where, const json_t *json, const struct windows *w,
                                struct model_config *c)
{
    const json_t *types = w->all ? NULL : json_object_get(json, "layer_types");
    const bool none = w->off || json_is_null(json_object_get(json, "sliding_window"));
    int window = w->absent;
    enum status st = ST_OK;
    CHECK(json_get_int32(where, json, "sliding_window", 0, 1 << 30, &window));
    const bool zero = json_has(json, "sliding_window") && window == 0 && !none;
    if (none) window = 0;
    for (int l = 0; l < c->n_layers; l++) {
        const char *type = json_string_value(json_array_get(types, (size_t)l));
        bool sliding = type ? strcmp(type, "sliding_attention") == 0
                            : l >= w->first_layer && (!w->end_layer || l < w->end_layer) &&
                                  !(w->full_every && (l + 1) % w->full_every == 0);
        if (type && !sliding && strcmp(type, "full_attention") != 0)
            FAIL(ST_UNSUPPORTED,
                 "%s: layer_types[%d] is \"%s\"; full_attention and sliding_attention are "
                 "supported",
                 where, l, type);
        if (sliding && (zero || (type && window == 0)))
            FAIL(ST_FORMAT, "%s: layer_types[%d] slides, but %s", where, l,
                 zero     ? "sliding_window is 0"
                 : w->off ? "use_sliding_window is not true"
                          : "sliding_window is not set");
        c->layers[l].window = sliding ? window : 0;
    }
out:
    return st;
}

// Llama 1 to 3.2 and its look-alikes (Yi, DeepSeek-Coder, TinyLlama).
static enum status configure_llama(const char *where, const json_t *json, struct model_config *c)
{
    bool bias = false;
    enum status st = ST_OK;
    CHECK(json_get_bool(where, json, "attention_bias", &bias));
    c->qkv_bias = c->o_bias = bias;
    CHECK(json_get_bool(where, json, "mlp_bias", &c->mlp_bias));
out:
    return st;
}

// The Qwen families' windows, which use_sliding_window turns on, and max_window_layers.
static enum status qwen_windows(const char *where, const json_t *json, int *ret_layers,
                                struct windows *ret)
{
    bool use_window = false;
    enum status st = ST_OK;
    *ret_layers = 28;
    CHECK(json_get_bool(where, json, "use_sliding_window", &use_window));
    CHECK(json_get_int32(where, json, "max_window_layers", 0, 1 << 20, ret_layers));
    *ret = (struct windows){.absent = 4096, .off = !use_window};
out:
    return st;
}

// In the layers from max_window_layers on.
static enum status late_windows(const char *where, const json_t *json, struct model_config *c)
{
    struct windows w;
    int layers;
    enum status st = qwen_windows(where, json, &layers, &w);
    w.first_layer = layers;
    return st == ST_OK ? read_windows(where, json, &w, c) : st;
}

// Llama's block with biases on q, k and v.
static enum status configure_qwen2(const char *where, const json_t *json, struct model_config *c)
{
    c->qkv_bias = true;
    return late_windows(where, json, c);
}

// Of Qwen3 and Qwen3-MoE, but for the windows.
static enum status qwen3_block(const char *where, const json_t *json, struct model_config *c)
{
    enum status st = json_get_bool(where, json, "attention_bias", &c->qkv_bias);
    c->o_bias = c->qkv_bias;
    c->qk_norm = true;
    return st;
}

static enum status configure_qwen3(const char *where, const json_t *json, struct model_config *c)
{
    enum status st = qwen3_block(where, json, c);
    return st == ST_OK ? late_windows(where, json, c) : st;
}

// Llama's block; windows are in every layer unless layer_types says otherwise (Ministral).
static enum status configure_mistral(const char *where, const json_t *json, struct model_config *c)
{
    return read_windows(where, json, &(struct windows){.absent = 4096}, c);
}

static bool lists(const json_t *list, int number)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        if (json_is_integer(entry) && json_integer_value(entry) == number) return true;
    }
    return false;
}

// The families whose training in transformers has a load-balancing loss.
static enum status read_balance(const char *where, const json_t *json, struct model_config *c)
{
    c->router_aux_loss_coef = 0.001;
    return json_get_double(where, json, "router_aux_loss_coef", 0, 1e6, &c->router_aux_loss_coef);
}

// Their number goes by two names, of transformers 5 and before.
static enum status read_experts(const char *where, const json_t *json, int *experts, int *per_token)
{
    enum status st = ST_OK;
    CHECK(json_get_int32(where, json, "num_local_experts", 1, 1024, experts));
    CHECK(json_get_int32(where, json, "num_experts", 1, 1024, experts));
    st = json_get_int32(where, json, "num_experts_per_tok", 1, *experts, per_token);
out:
    return st;
}

// Experts as the Qwen families write them: in every decoder_sparse_step-th layer that
// mlp_only_layers does not list. The numbers are those of a silent config.
static enum status qwen_experts(const char *where, const json_t *json, struct model_config *c,
                                int experts, int per_token, int width)
{
    int every = 1;
    bool norm = false;
    const json_t *dense = json_object_get(json, "mlp_only_layers");
    enum status st = ST_OK;
    CHECK(json_get_int32(where, json, "decoder_sparse_step", 1, 1024, &every));
    CHECK(read_experts(where, json, &experts, &per_token));
    CHECK(json_get_int32(where, json, "moe_intermediate_size", 1, 1 << 20, &width));
    CHECK(json_get_bool(where, json, "norm_topk_prob", &norm));
    CHECK(read_balance(where, json, c));
    for (int l = 0; l < c->n_layers; l++) {
        if ((l + 1) % every != 0 || lists(dense, l)) continue;
        c->layers[l].intermediate = width;
        c->layers[l].moe = (struct moe_shape){
            .n_experts = experts, .top_k = per_token, .norm_topk = norm, .scale = 1};
    }
out:
    return st;
}

static enum status configure_qwen2_moe(const char *where, const json_t *json,
                                       struct model_config *c)
{
    int shared = 5632, layers;
    struct windows w;
    enum status st = ST_OK;
    CHECK(qwen_windows(where, json, &layers, &w));
    w.full_every = 2;
    w.end_layer = layers > 0 ? layers : -1;
    CHECK(read_windows(where, json, &w, c));
    c->qkv_bias = true;
    CHECK(json_get_bool(where, json, "qkv_bias", &c->qkv_bias));
    CHECK(qwen_experts(where, json, c, 60, 4, 1408));
    CHECK(json_get_int32(where, json, "shared_expert_intermediate_size", 1, 1 << 20, &shared));
    for (int l = 0; l < c->n_layers; l++) {
        if (c->layers[l].moe.n_experts == 0) continue;
        c->layers[l].shared_intermediate = shared;
        c->layers[l].shared_gate = true;
    }
out:
    return st;
}

static enum status configure_qwen3_moe(const char *where, const json_t *json,
                                       struct model_config *c)
{
    struct windows w;
    int layers;
    enum status st = ST_OK;
    CHECK(qwen3_block(where, json, c));
    CHECK(qwen_windows(where, json, &layers, &w));
    w.all = true;
    CHECK(read_windows(where, json, &w, c));
    st = qwen_experts(where, json, c, 128, 8, 768);
out:
    return st;
}

static enum status read_delta(const char *where, const json_t *json, struct delta_shape *ret)
{
    struct delta_shape s = {
        .n_key_heads = 16, .n_heads = 32, .key_dim = 128, .head_dim = 128, .taps = 4};
    enum status st = ST_OK;
    CHECK(json_get_int32(where, json, "linear_num_key_heads", 1, 1024, &s.n_key_heads));
    CHECK(json_get_int32(where, json, "linear_num_value_heads", 1, 1024, &s.n_heads));
    CHECK(json_get_int32(where, json, "linear_key_head_dim", 1, DELTA_MOST_DIM, &s.key_dim));
    CHECK(json_get_int32(where, json, "linear_value_head_dim", 1, DELTA_MOST_DIM, &s.head_dim));
    CHECK(json_get_int32(where, json, "linear_conv_kernel_dim", 2, DELTA_MOST_TAPS, &s.taps));
    if (s.n_heads % s.n_key_heads != 0)
        FAIL(ST_FORMAT,
             "%s: linear_num_value_heads %d is not a multiple of linear_num_key_heads %d", where,
             s.n_heads, s.n_key_heads);
    *ret = s;
out:
    return st;
}

// Qwen3's block with gates on attention, which stands in every fourth layer; linear attention in
// the others.
static enum status configure_qwen3_5(const char *where, const json_t *json, struct model_config *c)
{
    const json_t *types = json_object_get(json, "layer_types");
    struct delta_shape delta = {0};
    bool gated = true;
    int every = 4;
    enum status st = ST_OK;
    CHECK(json_get_bool(where, json, "attn_output_gate", &gated));
    if (!gated || c->act != ACT_SILU)
        FAIL(ST_UNSUPPORTED,
             "%s: %s is not supported (every published Qwen3.5 has gates on attention and silu)",
             where, gated ? "another hidden_act than silu" : "attn_output_gate false");
    CHECK(json_get_bool(where, json, "attention_bias", &c->qkv_bias));
    c->o_bias = c->qkv_bias;
    c->qk_norm = c->attn_gate = true;
    CHECK(json_get_int32(where, json, "full_attention_interval", 1, 1024, &every));
    CHECK(read_delta(where, json, &delta));
    for (int l = 0; l < c->n_layers; l++) {
        const char *type = json_string_value(json_array_get(types, (size_t)l));
        const bool linear = type ? strcmp(type, "linear_attention") == 0 : (l + 1) % every != 0;
        if (type && !linear && strcmp(type, "full_attention") != 0)
            FAIL(ST_UNSUPPORTED,
                 "%s: layer_types[%d] is \"%s\"; full_attention and linear_attention are supported",
                 where, l, type);
        if (!linear) continue;
        c->layers[l].n_heads = c->layers[l].n_kv_heads = 0;
        c->layers[l].delta = delta;
    }
out:
    return st;
}

// Norms behind the two halves of a block and none before them; of queries and keys as a whole.
static enum status configure_olmo2(const char *where, const json_t *json, struct model_config *c)
{
    bool bias = false;
    enum status st = json_get_bool(where, json, "attention_bias", &bias);
    c->qkv_bias = c->o_bias = bias;
    c->pre_norm = false;
    c->post_norm = c->qk_norm = c->qk_norm_whole = true;
    return st;
}

// OLMo 2's block; windows in three layers of four, whose positions are not stretched.
static enum status configure_olmo3(const char *where, const json_t *json, struct model_config *c)
{
    enum status st = ST_OK;
    CHECK(configure_olmo2(where, json, c));
    CHECK(read_windows(where, json, &(struct windows){.absent = 4096, .full_every = 4}, c));
    // rope_theta is that of the other layers, as in transformers
    st = rope_config_read_local(where, json, NULL, c->family->rope_theta, c);
out:
    return st;
}

// Llama's block, without positions in some layers: every fourth, or where no_rope_layers says 0.
static enum status configure_smollm3(const char *where, const json_t *json, struct model_config *c)
{
    const json_t *list = json_object_get(json, "no_rope_layers");
    bool use_window = false;
    int every = 4;
    enum status st = ST_OK;
    CHECK(configure_llama(where, json, c));
    CHECK(json_get_int32(where, json, "no_rope_layer_interval", 1, 1 << 20, &every));
    if (json_has(json, "no_rope_layers") && (int)json_array_size(list) < c->n_layers)
        FAIL(ST_FORMAT, "%s: no_rope_layers must list num_hidden_layers (%d) numbers", where,
             c->n_layers);
    for (int l = 0; l < c->n_layers; l++) {
        const json_t *rope = json_array_get(list, (size_t)l);
        if (rope && !json_is_integer(rope))
            FAIL(ST_FORMAT, "%s: no_rope_layers[%d] must be an integer: 0 where there is no rope",
                 where, l);
        if (rope ? json_integer_value(rope) == 0 : (l + 1) % every == 0) c->layers[l].rope = -1;
    }
    CHECK(json_get_bool(where, json, "use_sliding_window", &use_window));
    CHECK(read_windows(where, json, &(struct windows){.off = !use_window}, c));
    for (int l = 0; l < c->n_layers && !json_has(json, "layer_types"); l++)
        if (c->layers[l].rope >= 0) c->layers[l].window = 0; // those without positions slide
out:
    return st;
}

static enum status configure_mixtral(const char *where, const json_t *json, struct model_config *c)
{
    int experts = 8, per_token = 2;
    enum status st = ST_OK;
    CHECK(read_experts(where, json, &experts, &per_token));
    CHECK(read_balance(where, json, c));
    for (int l = 0; l < c->n_layers; l++) {
        c->layers[l].moe = (struct moe_shape){
            .n_experts = experts, .top_k = per_token, .norm_topk = true, .scale = 1};
    }
    st = read_windows(where, json, &(struct windows){.all = true}, c);
out:
    return st;
}

// Attention sinks, biases everywhere, a clamped SwiGLU in every expert, and a window in every other
// layer.
static enum status configure_gpt_oss(const char *where, const json_t *json, struct model_config *c)
{
    int experts = 128, per_token = 4;
    bool bias = true;
    double alpha = 1.702, limit = 7;
    enum status st = ST_OK;
    if (!json_has(json, "rope_scaling") && !json_has(json, "rope_parameters"))
        FAIL(ST_FORMAT,
             "%s: rope_parameters or rope_scaling is missing: published folders have it, and "
             "silence means different "
             "positions in different programs",
             where);
    CHECK(json_get_bool(where, json, "attention_bias", &bias));
    CHECK(read_experts(where, json, &experts, &per_token));
    CHECK(json_get_double(where, json, "swiglu_alpha", 1e-3, 1e3, &alpha));
    CHECK(json_get_double(where, json, "swiglu_limit", 1e-3, 1e6, &limit));
    CHECK(read_balance(where, json, c));
    c->act = ACT_CLAMPED;
    c->act_alpha = (float)alpha;
    c->act_limit = (float)limit;
    c->qkv_bias = c->o_bias = bias;
    c->mlp_bias = c->router_logit_bias = c->sinks = true;
    for (int l = 0; l < c->n_layers; l++) {
        c->layers[l].moe = (struct moe_shape){
            .n_experts = experts, .top_k = per_token, .norm_topk = true, .scale = 1};
    }
    st = read_windows(where, json, &(struct windows){.absent = 128, .full_every = 2}, c);
out:
    return st;
}

static enum status configure_phi3(const char *where, const json_t *json, struct model_config *c)
{
    return read_windows(where, json, &(struct windows){.all = true}, c);
}

// Phi-1, 1.5 and 2: attention and MLP side by side, biases everywhere.
static enum status configure_phi(const char *where, const json_t *json, struct model_config *c)
{
    bool qk_norm = false;
    enum status st = json_get_bool(where, json, "qk_layernorm", &qk_norm);
    if (st == ST_OK && qk_norm)
        st =
            status_fail(ST_UNSUPPORTED,
                        "%s: qk_layernorm is not supported (no published Phi model has it)", where);
    c->parallel_block = true;
    c->gated_mlp = false;
    c->qkv_bias = c->o_bias = c->mlp_bias = c->head_bias = true;
    if (!json_has(json, "hidden_act")) c->act = ACT_GELU_TANH;
    return st;
}

static enum status configure_gemma(const char *where, const json_t *json, struct model_config *c)
{
    const char *key = c->family->act_key;
    // the first folders say "gelu" in hidden_act and mean its tanh form
    if (!json_has(json, key ? key : "hidden_act") || (!key && c->act == ACT_GELU))
        c->act = ACT_GELU_TANH;
    c->embed_scale = (float)sqrt((double)c->hidden);
    enum status st = json_get_bool(where, json, "attention_bias", &c->qkv_bias);
    c->o_bias = c->qkv_bias;
    return st;
}

// A cap of tanh: null is "none", absent is the default.
static enum status read_cap(const char *where, const json_t *json, const char *key, double cap,
                            float *ret)
{
    enum status st = json_get_double(where, json, key, 1e-3, 1e6, &cap);
    if (st == ST_OK) *ret = json_is_null(json_object_get(json, key)) ? 0 : (float)cap;
    return st;
}

// What Gemma 2 and 3 have beyond Gemma's block.
static enum status gemma_scores(const char *where, const json_t *json, float attn_cap,
                                double logit_cap, struct model_config *c)
{
    double scalar = 256;
    enum status st = ST_OK;
    CHECK(configure_gemma(where, json, c));
    c->post_norm = true;
    CHECK(read_cap(where, json, "final_logit_softcapping", logit_cap, &c->logit_softcap));
    CHECK(json_get_double(where, json, "query_pre_attn_scalar", 1e-3, 1e6, &scalar));
    for (int l = 0; l < c->n_layers; l++) {
        c->layers[l].attn_softcap = attn_cap;
        c->layers[l].attn_scale = (float)(1.0 / sqrt(scalar));
    }
out:
    return st;
}

static enum status configure_gemma2(const char *where, const json_t *json, struct model_config *c)
{
    float cap = 0;
    enum status st = ST_OK;
    CHECK(read_cap(where, json, "attn_logit_softcapping", 50, &cap));
    CHECK(gemma_scores(where, json, cap, 30, c));
    st = read_windows(where, json, &(struct windows){.absent = 4096, .full_every = 2}, c);
out:
    return st;
}

// Windows in five layers of six, with positions of their own that are not stretched.
static enum status configure_gemma3(const char *where, const json_t *json, struct model_config *c)
{
    int full_every = 6;
    bool both_ways = false;
    enum status st = ST_OK;
    CHECK(json_get_bool(where, json, "use_bidirectional_attention", &both_ways));
    if (both_ways || json_has(json, "attn_logit_softcapping"))
        FAIL(ST_UNSUPPORTED,
             "%s: %s is not supported (no published Gemma 3 model that generates has it)", where,
             both_ways ? "use_bidirectional_attention" : "attn_logit_softcapping");
    CHECK(gemma_scores(where, json, 0, 0, c));
    c->qk_norm = true;
    CHECK(json_get_int32(where, json, "sliding_window_pattern", 1, 1024, &full_every));
    CHECK(
        read_windows(where, json, &(struct windows){.absent = 4096, .full_every = full_every}, c));
    st = rope_config_read_local(where, json, "rope_local_base_freq", 10000, c);
out:
    return st;
}

static enum status configure_starcoder2(const char *where, const json_t *json,
                                        struct model_config *c)
{
    bool bias = true;
    enum status st = json_get_bool(where, json, "use_bias", &bias);
    c->gated_mlp = false;
    c->qkv_bias = c->o_bias = c->mlp_bias = bias;
    if (!json_has(json, "hidden_act")) c->act = ACT_GELU_TANH;
    return st == ST_OK ? read_windows(where, json, &(struct windows){.all = true}, c) : st;
}

// ---- names --------------------------------------------------------------------------------------
#define LAYER "model.layers.%d."
#define ATTN  LAYER "self_attn."

#define COMMON_NAMES                                                                               \
    [ROLE_EMBED] = "model.embed_tokens.weight", [ROLE_ATTN_NORM] = LAYER "input_layernorm.weight", \
    [ROLE_FINAL_NORM] = "model.norm.weight", [ROLE_HEAD] = "lm_head.weight"
#define SPLIT_QKV_NAMES                                                                            \
    [ROLE_QKV] = ATTN "q_proj.weight|" ATTN "k_proj.weight|" ATTN "v_proj.weight",                 \
    [ROLE_QKV_BIAS] = ATTN "q_proj.bias|" ATTN "k_proj.bias|" ATTN "v_proj.bias"
#define O_NAMES [ROLE_O] = ATTN "o_proj.weight", [ROLE_O_BIAS] = ATTN "o_proj.bias"
#define GATED_MLP_NAMES                                                                            \
    [ROLE_GATE_UP] = LAYER "mlp.gate_proj.weight|" LAYER "mlp.up_proj.weight",                     \
    [ROLE_GATE_UP_BIAS] = LAYER "mlp.gate_proj.bias|" LAYER "mlp.up_proj.bias",                    \
    [ROLE_DOWN] = LAYER "mlp.down_proj.weight", [ROLE_DOWN_BIAS] = LAYER "mlp.down_proj.bias"
#define LLAMA_NAMES                                                                                \
    COMMON_NAMES, SPLIT_QKV_NAMES, O_NAMES,                                                        \
        GATED_MLP_NAMES, [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight"

#define DELTA LAYER "linear_attn."
#define DELTA_NAMES                                                                                \
    [ROLE_DELTA_IN] = DELTA "in_proj_qkv.weight|" DELTA "in_proj_z.weight",                        \
    [ROLE_DELTA_GATES] = DELTA "in_proj_b.weight|" DELTA "in_proj_a.weight",                       \
    [ROLE_DELTA_CONV] = DELTA "conv1d.weight", [ROLE_DELTA_A_LOG] = DELTA "A_log",                 \
    [ROLE_DELTA_DT_BIAS] = DELTA "dt_bias", [ROLE_DELTA_NORM] = DELTA "norm.weight",               \
    [ROLE_DELTA_OUT] = DELTA "out_proj.weight"
#define QK_NORM_NAMES [ROLE_Q_NORM] = ATTN "q_norm.weight", [ROLE_K_NORM] = ATTN "k_norm.weight"
#define OLMO_NAMES                                                                                 \
    COMMON_NAMES, SPLIT_QKV_NAMES, O_NAMES, GATED_MLP_NAMES,                                       \
        QK_NORM_NAMES, [ROLE_POST_ATTN_NORM] = LAYER "post_attention_layernorm.weight",            \
                       [ROLE_POST_MLP_NORM] = LAYER "post_feedforward_layernorm.weight"

#define GEMMA2_NAMES                                                                               \
    COMMON_NAMES, SPLIT_QKV_NAMES, O_NAMES,                                                        \
        GATED_MLP_NAMES, [ROLE_POST_ATTN_NORM] = LAYER "post_attention_layernorm.weight",          \
                         [ROLE_MLP_NORM] = LAYER "pre_feedforward_layernorm.weight",               \
                         [ROLE_POST_MLP_NORM] = LAYER "post_feedforward_layernorm.weight"

#define EXPERT LAYER "mlp.experts.%d."
#define QWEN_EXPERTS_NAMES                                                                         \
    LLAMA_NAMES, [ROLE_ROUTER] = LAYER "mlp.gate.weight",                                          \
                 [ROLE_EXPERTS_GATE_UP] = EXPERT "gate_proj.weight|" EXPERT "up_proj.weight",      \
                 [ROLE_EXPERTS_DOWN] = EXPERT "down_proj.weight"

#define DEEPSEEK_NAMES                                                                             \
    COMMON_NAMES, O_NAMES, GATED_MLP_NAMES,                                                        \
        [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight",                                 \
        [ROLE_Q_A] = ATTN "q_a_proj.weight", [ROLE_Q_A_NORM] = ATTN "q_a_layernorm.weight",        \
        [ROLE_Q_B] = ATTN "q_b_proj.weight", [ROLE_Q] = ATTN "q_proj.weight",                      \
        [ROLE_KV_A] = ATTN "kv_a_proj_with_mqa.weight",                                            \
        [ROLE_KV_A_NORM] = ATTN "kv_a_layernorm.weight", [ROLE_KV_B] = ATTN "kv_b_proj.weight",    \
        [ROLE_ROUTER] = LAYER "mlp.gate.weight",                                                   \
        [ROLE_ROUTER_BIAS] = LAYER "mlp.gate.e_score_correction_bias",                             \
        [ROLE_EXPERTS_GATE_UP] =                                                                   \
            LAYER "mlp.experts.%d.gate_proj.weight|" LAYER "mlp.experts.%d.up_proj.weight",        \
        [ROLE_EXPERTS_DOWN] = LAYER "mlp.experts.%d.down_proj.weight",                             \
        [ROLE_SHARED_GATE_UP] = LAYER "mlp.shared_experts.gate_proj.weight|" LAYER                 \
                                      "mlp.shared_experts.up_proj.weight",                         \
        [ROLE_SHARED_DOWN] = LAYER "mlp.shared_experts.down_proj.weight"

// ---- the table ----------------------------------------------------------------------------------
static const struct family families[] = {
    {.model_type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .title = "Qwen2/Qwen2.5",
     .names = {LLAMA_NAMES},
     .configure = configure_qwen2},
    {.model_type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .title = "Qwen3",
     .head_dim = 128,
     .names = {LLAMA_NAMES, QK_NORM_NAMES},
     .configure = configure_qwen3},
    {.model_type = "qwen2_moe",
     .architecture = "Qwen2MoeForCausalLM",
     .title = "Qwen1.5-MoE, Qwen2-MoE",
     .names = {QWEN_EXPERTS_NAMES,
               [ROLE_SHARED_GATE_UP] = LAYER "mlp.shared_expert.gate_proj.weight|" LAYER
                                             "mlp.shared_expert.up_proj.weight",
               [ROLE_SHARED_DOWN] = LAYER "mlp.shared_expert.down_proj.weight",
               [ROLE_SHARED_GATE] = LAYER "mlp.shared_expert_gate.weight"},
     .configure = configure_qwen2_moe},
    {.model_type = "qwen3_moe",
     .architecture = "Qwen3MoeForCausalLM",
     .title = "Qwen3-MoE",
     .names = {QWEN_EXPERTS_NAMES, QK_NORM_NAMES},
     .configure = configure_qwen3_moe},
    {.model_type = "qwen3_5_text",
     .architecture = "Qwen3_5ForCausalLM",
     .title = "Qwen3.5 (text)",
     .partial_rotary = true,
     .norm = NORM_RMS_PLUS_ONE,
     .head_dim = 256,
     .rotary_share = 0.25,
     .names = {LLAMA_NAMES, DELTA_NAMES, QK_NORM_NAMES},
     .configure = configure_qwen3_5},
    {.model_type = "qwen3_5",
     .architecture = "Qwen3_5ForConditionalGeneration",
     .title = "Qwen3.5 (text and images)",
     .text_type = "qwen3_5_text",
     .text_defaults =
         "{\"vocab_size\": 248320, \"hidden_size\": 4096, \"intermediate_size\": 12288,"
         "\"num_hidden_layers\": 32, \"num_attention_heads\": 16,"
         "\"num_key_value_heads\": 4, \"head_dim\": 256,"
         "\"max_position_embeddings\": 32768}"},
    {.model_type = "deepseek_v2",
     .architecture = "DeepseekV2ForCausalLM",
     .title = "DeepSeek-V2, V2.5, Coder-V2",
     .head_dim = 64, // what config.json calls so is the rotated part
     .names = {DEEPSEEK_NAMES},
     .configure = configure_deepseek_v2},
    {.model_type = "deepseek_v3",
     .architecture = "DeepseekV3ForCausalLM",
     .title = "DeepSeek-V3, Moonlight",
     .head_dim = 64,
     .max_positions = 4096,
     .names = {DEEPSEEK_NAMES},
     .configure = configure_deepseek_v3},
    {.model_type = "glm4_moe_lite",
     .architecture = "Glm4MoeLiteForCausalLM",
     .title = "GLM-4.7-Flash",
     .head_dim = 64,
     .max_positions = 202752,
     .norm_eps = 1e-5,
     .names = {DEEPSEEK_NAMES},
     .configure = configure_glm4_moe_lite},
    {.model_type = "llama",
     .architecture = "LlamaForCausalLM",
     .title = "Llama 1 to 3.2, Yi, DeepSeek-Coder",
     .names = {LLAMA_NAMES},
     .configure = configure_llama},
    {.model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .title = "Mistral",
     .names = {LLAMA_NAMES},
     .configure = configure_mistral},
    {.model_type = "olmo2",
     .architecture = "Olmo2ForCausalLM",
     .title = "OLMo 2",
     .norm_eps = 1e-5,
     .names = {OLMO_NAMES},
     .configure = configure_olmo2},
    {.model_type = "olmo3",
     .architecture = "Olmo3ForCausalLM",
     .title = "OLMo 3",
     .window_ropes = true,
     .norm_eps = 1e-5,
     .rope_theta = 500000,
     .names = {OLMO_NAMES},
     .configure = configure_olmo3},
    {.model_type = "smollm3",
     .architecture = "SmolLM3ForCausalLM",
     .title = "SmolLM3",
     .rope_theta = 2000000,
     .tied = true,
     .names = {LLAMA_NAMES},
     .configure = configure_smollm3},
    {.model_type = "mixtral",
     .architecture = "MixtralForCausalLM",
     .title = "Mixtral",
     .rope_theta = 1e6,
     .norm_eps = 1e-5,
     .names = {COMMON_NAMES, SPLIT_QKV_NAMES,
               O_NAMES, [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight",
               [ROLE_ROUTER] = LAYER "block_sparse_moe.gate.weight",
               [ROLE_EXPERTS_GATE_UP] = LAYER "block_sparse_moe.experts.%d.w1.weight|" LAYER
                                              "block_sparse_moe.experts.%d.w3.weight",
               [ROLE_EXPERTS_DOWN] = LAYER "block_sparse_moe.experts.%d.w2.weight"},
     .configure = configure_mixtral},
    {.model_type = "gpt_oss",
     .architecture = "GptOssForCausalLM",
     .title = "gpt-oss",
     .norm_eps = 1e-5,
     .rope_theta = 150000,
     .head_dim = 64,
     .names = {COMMON_NAMES, SPLIT_QKV_NAMES,
               O_NAMES, [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight",
               [ROLE_SINKS] = ATTN "sinks", [ROLE_ROUTER] = LAYER "mlp.router.weight",
               [ROLE_ROUTER_LOGIT_BIAS] = LAYER "mlp.router.bias",
               [ROLE_EXPERTS_GATE_UP] = EXPERT "gate_proj.weight|" EXPERT "up_proj.weight",
               [ROLE_EXPERTS_GATE_UP_BIAS] = EXPERT "gate_proj.bias|" EXPERT "up_proj.bias",
               [ROLE_EXPERTS_DOWN] = EXPERT "down_proj.weight",
               [ROLE_EXPERTS_DOWN_BIAS] = EXPERT "down_proj.bias"},
     .stored = {[ROLE_EXPERTS_GATE_UP] = LAYER "mlp.experts.gate_up_proj",
                [ROLE_EXPERTS_GATE_UP_BIAS] = LAYER "mlp.experts.gate_up_proj_bias",
                [ROLE_EXPERTS_DOWN] = LAYER "mlp.experts.down_proj",
                [ROLE_EXPERTS_DOWN_BIAS] = LAYER "mlp.experts.down_proj_bias"},
     .configure = configure_gpt_oss},
    {.model_type = "phi3",
     .architecture = "Phi3ForCausalLM",
     .title = "Phi-3, Phi-4",
     .max_positions = 4096,
     .partial_rotary = true,
     .phi3_ropes = true,
     .norm_eps = 1e-5,
     .names = {COMMON_NAMES, O_NAMES, [ROLE_QKV] = ATTN "qkv_proj.weight",
               [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight",
               [ROLE_GATE_UP] = LAYER "mlp.gate_up_proj.weight",
               [ROLE_DOWN] = LAYER "mlp.down_proj.weight"},
     .configure = configure_phi3},
    {.model_type = "phi",
     .architecture = "PhiForCausalLM",
     .title = "Phi-1, Phi-1.5, Phi-2",
     .partial_rotary = true,
     .norm = NORM_LAYER,
     .norm_eps_key = "layer_norm_eps",
     .norm_eps = 1e-5,
     .rotary_share = 0.5,
     .names = {SPLIT_QKV_NAMES, [ROLE_EMBED] = "model.embed_tokens.weight",
               [ROLE_ATTN_NORM] = LAYER "input_layernorm.weight",
               [ROLE_ATTN_NORM_BIAS] = LAYER "input_layernorm.bias", [ROLE_O] = ATTN "dense.weight",
               [ROLE_O_BIAS] = ATTN "dense.bias", [ROLE_GATE_UP] = LAYER "mlp.fc1.weight",
               [ROLE_GATE_UP_BIAS] = LAYER "mlp.fc1.bias", [ROLE_DOWN] = LAYER "mlp.fc2.weight",
               [ROLE_DOWN_BIAS] = LAYER "mlp.fc2.bias",
               [ROLE_FINAL_NORM] = "model.final_layernorm.weight",
               [ROLE_FINAL_NORM_BIAS] = "model.final_layernorm.bias",
               [ROLE_HEAD] = "lm_head.weight", [ROLE_HEAD_BIAS] = "lm_head.bias"},
     .configure = configure_phi},
    {.model_type = "gemma",
     .architecture = "GemmaForCausalLM",
     .title = "Gemma",
     .norm = NORM_RMS_PLUS_ONE,
     .head_dim = 256,
     .tied = true,
     .names = {LLAMA_NAMES},
     .configure = configure_gemma},
    {.model_type = "gemma2",
     .architecture = "Gemma2ForCausalLM",
     .title = "Gemma 2",
     .act_key = "hidden_activation",
     .norm = NORM_RMS_PLUS_ONE,
     .head_dim = 256,
     .tied = true,
     .names = {GEMMA2_NAMES},
     .configure = configure_gemma2},
    {.model_type = "gemma3_text",
     .architecture = "Gemma3ForCausalLM",
     .title = "Gemma 3 (text)",
     .act_key = "hidden_activation",
     .window_ropes = true,
     .norm = NORM_RMS_PLUS_ONE,
     .head_dim = 256,
     .rope_theta = 1e6,
     .tied = true,
     .names = {GEMMA2_NAMES, QK_NORM_NAMES},
     .configure = configure_gemma3},
    {.model_type = "gemma3",
     .architecture = "Gemma3ForConditionalGeneration",
     .title = "Gemma 3 (text and images)",
     .text_type = "gemma3_text",
     .text_defaults = "{\"vocab_size\": 262208, \"hidden_size\": 2304, \"intermediate_size\": 9216,"
                      "\"num_hidden_layers\": 26, \"num_attention_heads\": 8,"
                      "\"num_key_value_heads\": 4, \"head_dim\": 256,"
                      "\"max_position_embeddings\": 131072}"},
    {.model_type = "starcoder2",
     .architecture = "Starcoder2ForCausalLM",
     .title = "StarCoder2",
     .norm = NORM_LAYER,
     .norm_eps_key = "norm_epsilon",
     .norm_eps = 1e-5,
     .tied = true,
     .names =
         {COMMON_NAMES, SPLIT_QKV_NAMES,
          O_NAMES, [ROLE_ATTN_NORM_BIAS] = LAYER "input_layernorm.bias",
          [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight",
          [ROLE_MLP_NORM_BIAS] = LAYER "post_attention_layernorm.bias",
          [ROLE_GATE_UP] = LAYER "mlp.c_fc.weight", [ROLE_GATE_UP_BIAS] = LAYER "mlp.c_fc.bias",
          [ROLE_DOWN] = LAYER "mlp.c_proj.weight", [ROLE_DOWN_BIAS] = LAYER "mlp.c_proj.bias",
          [ROLE_FINAL_NORM_BIAS] = "model.norm.bias"},
     .configure = configure_starcoder2},
};
#define N_FAMILIES ((int)(sizeof families / sizeof families[0]))

const struct family *family_at(int i)
{
    return i >= 0 && i < N_FAMILIES ? &families[i] : NULL;
}

const struct family *family_find(const char *model_type, const char *architecture)
{
    for (int i = 0; i < N_FAMILIES; i++) {
        const struct family *f = &families[i];
        if (strcmp(f->model_type, model_type) != 0) continue;
        // a folder of a known type with another head (a classifier, a reward model) is not ours
        if (architecture[0] == '\0' || strcmp(f->architecture, architecture) == 0) return f;
    }
    return NULL;
}

const char *family_list(void)
{
    static _Thread_local char text[4096];
    size_t at = 0;
    for (int i = 0; i < N_FAMILIES && at < sizeof text; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s (%s)", i ? ", " : "",
                               families[i].title, families[i].architecture);
    return text;
}
