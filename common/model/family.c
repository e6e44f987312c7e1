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

static enum status read_biases(const char *where, const json_t *json, struct model_config *c)
{
    const struct family *f = c->family;
    bool has = f->block & f->keyed;
    enum status st = f->bias_key ? json_get_bool(where, json, f->bias_key, &has) : ST_OK;
    const unsigned biases = (f->block & ~f->keyed) | (has ? f->keyed : 0);
    c->qkv_bias = biases & QKV_BIAS;
    c->o_bias = biases & O_BIAS;
    c->mlp_bias = biases & MLP_BIAS;
    return st;
}

// Whether layer l slides, where layer_types does not say.
static bool slides(const struct windows *w, int l, int full_every, int max_layers)
{
    if (full_every && (l + 1) % full_every == 0) return false;
    return w->late ? l >= max_layers : !w->early || l < max_layers;
}

static enum status read_windows(const char *where, const json_t *json, struct model_config *c)
{
    const struct windows *w = &c->family->windows;
    const json_t *types = w->of == ALL_LAYERS ? NULL : json_object_get(json, "layer_types");
    int window = w->absent, max_layers = 28, full_every = w->full_every;
    bool used = !w->by_use;
    enum status st = ST_OK;
    if (w->of == NO_WINDOWS) return ST_OK;
    if (w->by_use) CHECK(json_get_bool(where, json, "use_sliding_window", &used));
    if (w->by_use) CHECK(json_get_int32(where, json, "max_window_layers", 0, 1 << 20, &max_layers));
    if (w->every_key) CHECK(json_get_int32(where, json, w->every_key, 1, 1024, &full_every));
    CHECK(json_get_int32(where, json, "sliding_window", 0, 1 << 30, &window));
    const bool none = !used || json_is_null(json_object_get(json, "sliding_window"));
    const bool zero = json_has(json, "sliding_window") && window == 0 && !none;
    if (none) window = 0;
    for (int l = 0; l < c->n_layers; l++) {
        const char *type = json_string_value(json_array_get(types, (size_t)l));
        const bool sliding =
            type ? strcmp(type, "sliding_attention") == 0 : slides(w, l, full_every, max_layers);
        if (type && !sliding && strcmp(type, "full_attention") != 0)
            FAIL(ST_UNSUPPORTED,
                 "%s: layer_types[%d] is \"%s\"; full_attention and sliding_attention are "
                 "supported",
                 where, l, type);
        if (sliding && (zero || (type && window == 0)))
            FAIL(ST_FORMAT, "%s: layer_types[%d] slides, but %s", where, l,
                 zero    ? "sliding_window is 0"
                 : !used ? "use_sliding_window is not true"
                         : "sliding_window is not set");
        c->layers[l].window = sliding ? window : 0;
    }
out:
    return st;
}

static bool lists(const json_t *list, int number)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        if (json_is_integer(entry) && json_integer_value(entry) == number) return true;
    }
    return false;
}

// The families whose training in transformers has a load-balancing loss. Qwen's experts are in
// every decoder_sparse_step-th layer that mlp_only_layers does not list.
static enum status read_experts(const char *where, const json_t *json, struct model_config *c)
{
    struct moe_shape moe = {.n_experts = c->family->experts.n,
                            .top_k = c->family->experts.per_token,
                            .norm_topk = true,
                            .scale = 1};
    const json_t *dense = NULL;
    int every = 1, width = c->family->experts.width;
    enum status st = ST_OK;
    if (moe.n_experts == 0) return ST_OK;
    // their number goes by two names, of transformers 5 and before
    CHECK(json_get_int32(where, json, "num_local_experts", 1, 1024, &moe.n_experts));
    CHECK(json_get_int32(where, json, "num_experts", 1, 1024, &moe.n_experts));
    CHECK(json_get_int32(where, json, "num_experts_per_tok", 1, moe.n_experts, &moe.top_k));
    if (width > 0) {
        moe.norm_topk = false;
        dense = json_object_get(json, "mlp_only_layers");
        CHECK(json_get_int32(where, json, "decoder_sparse_step", 1, 1024, &every));
        CHECK(json_get_int32(where, json, "moe_intermediate_size", 1, 1 << 20, &width));
        CHECK(json_get_bool(where, json, "norm_topk_prob", &moe.norm_topk));
    }
    c->router_aux_loss_coef = 0.001;
    CHECK(json_get_double(where, json, "router_aux_loss_coef", 0, 1e6, &c->router_aux_loss_coef));
    for (int l = 0; l < c->n_layers; l++) {
        if ((l + 1) % every != 0 || lists(dense, l)) continue;
        if (width > 0) c->layers[l].intermediate = width;
        c->layers[l].moe = moe;
    }
out:
    return st;
}

enum status family_configure(const char *where, const json_t *json, struct model_config *c)
{
    const struct family *f = c->family;
    enum status st;
    CHECK(read_biases(where, json, c));
    CHECK(read_windows(where, json, c));
    CHECK(read_experts(where, json, c));
    if (f->window_ropes)
        CHECK(rope_config_read_local(where, json, f->local_key, f->local_theta, c));
    if (f->configure) CHECK(f->configure(where, json, c));
out:
    return st;
}

// ---- keys of one family -------------------------------------------------------------------------

static enum status configure_llama(const char *where, const json_t *json, struct model_config *c)
{
    return json_get_bool(where, json, "mlp_bias", &c->mlp_bias);
}

// Beside the experts one that every token goes to, with a gate.
static enum status configure_qwen2_moe(const char *where, const json_t *json,
                                       struct model_config *c)
{
    int shared = 5632;
    enum status st =
        json_get_int32(where, json, "shared_expert_intermediate_size", 1, 1 << 20, &shared);
    for (int l = 0; l < c->n_layers; l++) {
        if (c->layers[l].moe.n_experts == 0) continue;
        c->layers[l].shared_intermediate = shared;
        c->layers[l].shared_gate = true;
    }
    return st;
}

static enum status read_delta(const char *where, const json_t *json, struct delta_shape *ret)
{
    struct delta_shape s = {
        .n_key_heads = 16, .n_heads = 32, .key_dim = 128, .head_dim = 128, .taps = 4};
    enum status st = ST_OK;
    CHECK(json_get_int32(where, json, "linear_num_key_heads", 1, 1024, &s.n_key_heads));
    CHECK(json_get_int32(where, json, "linear_num_value_heads", 1, 1024, &s.n_heads));
    CHECK(json_get_int32(where, json, "linear_key_head_dim", 1, DELTA_MAX_DIM, &s.key_dim));
    CHECK(json_get_int32(where, json, "linear_value_head_dim", 1, DELTA_MAX_DIM, &s.head_dim));
    CHECK(json_get_int32(where, json, "linear_conv_kernel_dim", 2, DELTA_MAX_TAPS, &s.taps));
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
    CHECK(json_get_int32(where, json, "full_attention_interval", 1, 1024, &every));
    CHECK(read_delta(where, json, &delta));
    CHECK(json_get_int32(where, json, "mtp_num_hidden_layers", 0, 1024, &c->n_mtp_layers));
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

// Llama's block, without positions in some layers: every fourth, or where no_rope_layers says 0.
static enum status configure_smollm3(const char *where, const json_t *json, struct model_config *c)
{
    const json_t *list = json_object_get(json, "no_rope_layers");
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
    for (int l = 0; l < c->n_layers && !json_has(json, "layer_types"); l++)
        if (c->layers[l].rope >= 0) c->layers[l].window = 0; // those without positions slide
out:
    return st;
}

// A clamped SwiGLU in every expert.
static enum status configure_gpt_oss(const char *where, const json_t *json, struct model_config *c)
{
    double alpha = 1.702, limit = 7;
    enum status st = ST_OK;
    if (!json_has(json, "rope_scaling") && !json_has(json, "rope_parameters"))
        FAIL(ST_FORMAT,
             "%s: rope_parameters or rope_scaling is missing: published folders have it, and "
             "silence means different positions in different programs",
             where);
    CHECK(json_get_double(where, json, "swiglu_alpha", 1e-3, 1e3, &alpha));
    CHECK(json_get_double(where, json, "swiglu_limit", 1e-3, 1e6, &limit));
    c->act = ACT_CLAMPED;
    c->act_alpha = (float)alpha;
    c->act_limit = (float)limit;
out:
    return st;
}

static enum status configure_phi(const char *where, const json_t *json, struct model_config *c)
{
    bool qk_norm = false;
    enum status st = json_get_bool(where, json, "qk_layernorm", &qk_norm);
    (void)c;
    if (st == ST_OK && qk_norm)
        st =
            status_fail(ST_UNSUPPORTED,
                        "%s: qk_layernorm is not supported (no published Phi model has it)", where);
    return st;
}

static enum status configure_gemma(const char *where, const json_t *json, struct model_config *c)
{
    (void)where;
    (void)json;
    // the first folders say "gelu" in hidden_act and mean its tanh form
    if (!c->family->act_key && c->act == ACT_GELU) c->act = ACT_GELU_TANH;
    c->embed_scale = (float)sqrt((double)c->hidden);
    return ST_OK;
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
    st = gemma_scores(where, json, cap, 30, c);
out:
    return st;
}

static enum status configure_gemma3(const char *where, const json_t *json, struct model_config *c)
{
    bool both_ways = false;
    enum status st = ST_OK;
    CHECK(json_get_bool(where, json, "use_bidirectional_attention", &both_ways));
    if (both_ways || json_has(json, "attn_logit_softcapping"))
        FAIL(ST_UNSUPPORTED,
             "%s: %s is not supported (no published Gemma 3 model that generates has it)", where,
             both_ways ? "use_bidirectional_attention" : "attn_logit_softcapping");
    st = gemma_scores(where, json, 0, 0, c);
out:
    return st;
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
#define QWEN_MTP_NAMES                                                                             \
    [ROLE_MTP_EMBED_NORM] = "mtp.pre_fc_norm_embedding.weight",                                    \
    [ROLE_MTP_HIDDEN_NORM] = "mtp.pre_fc_norm_hidden.weight", [ROLE_MTP_PROJ] = "mtp.fc.weight"
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
        [ROLE_SHARED_DOWN] = LAYER "mlp.shared_experts.down_proj.weight",                          \
        [ROLE_MTP_EMBED_NORM] = LAYER "enorm.weight",                                              \
        [ROLE_MTP_HIDDEN_NORM] = LAYER "hnorm.weight", [ROLE_MTP_PROJ] = LAYER "eh_proj.weight"
#define DEEPSEEK_MTP .mtp_norm = LAYER "shared_head.norm.weight"

// Biases of q, k, v and o by one key, as in Llama; a family whose o has a key of its own does
// without this.
#define ATTENTION_BIAS .bias_key = "attention_bias", .keyed = QKV_BIAS | O_BIAS

// ---- the table ----------------------------------------------------------------------------------
static const struct family families[] = {
    {"qwen2", "Qwen2ForCausalLM", "Qwen2/Qwen2.5", .block = QKV_BIAS,
     .windows = {SOME_LAYERS, .absent = 4096, .by_use = true, .late = true},
     .names = {LLAMA_NAMES}},
    {"qwen3", "Qwen3ForCausalLM", "Qwen3", .head_dim = 128, .block = QK_NORM, ATTENTION_BIAS,
     .windows = {SOME_LAYERS, .absent = 4096, .by_use = true, .late = true},
     .names = {LLAMA_NAMES, QK_NORM_NAMES}},
    {"qwen2_moe", "Qwen2MoeForCausalLM", "Qwen1.5-MoE, Qwen2-MoE", .block = QKV_BIAS,
     .bias_key = "qkv_bias", .keyed = QKV_BIAS,
     .windows = {SOME_LAYERS, .absent = 4096, .by_use = true, .early = true, .full_every = 2},
     .experts = {60, 4, 1408},
     .names = {QWEN_EXPERTS_NAMES,
               [ROLE_SHARED_GATE_UP] = LAYER "mlp.shared_expert.gate_proj.weight|" LAYER
                                             "mlp.shared_expert.up_proj.weight",
               [ROLE_SHARED_DOWN] = LAYER "mlp.shared_expert.down_proj.weight",
               [ROLE_SHARED_GATE] = LAYER "mlp.shared_expert_gate.weight"},
     .configure = configure_qwen2_moe},
    {"qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3-MoE", .block = QK_NORM, ATTENTION_BIAS,
     .windows = {ALL_LAYERS, .absent = 4096, .by_use = true}, .experts = {128, 8, 768},
     .names = {QWEN_EXPERTS_NAMES, QK_NORM_NAMES}},
    {"qwen3_5_text", "Qwen3_5ForCausalLM", "Qwen3.5 (text)", .partial_rotary = true,
     .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .rotary_share = 0.25, .block = QK_NORM | ATTN_GATE,
     ATTENTION_BIAS, .names = {LLAMA_NAMES, DELTA_NAMES, QK_NORM_NAMES, QWEN_MTP_NAMES},
     .mtp_prefix = "mtp.", .mtp_norm = "mtp.norm.weight", .mtp_normalised = true,
     .configure = configure_qwen3_5},
    {"qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen3.5 (text and images)",
     .text_type = "qwen3_5_text",
     .text_defaults =
         "{\"vocab_size\": 248320, \"hidden_size\": 4096, \"intermediate_size\": 12288,"
         "\"num_hidden_layers\": 32, \"num_attention_heads\": 16,"
         "\"num_key_value_heads\": 4, \"head_dim\": 256,"
         "\"max_position_embeddings\": 32768}"},
    {"deepseek_v2", "DeepseekV2ForCausalLM", "DeepSeek-V2, V2.5, Coder-V2",
     .head_dim = 64, // what config.json calls so is the rotated part
     .names = {DEEPSEEK_NAMES}, .configure = configure_deepseek_v2},
    {"deepseek_v3", "DeepseekV3ForCausalLM", "DeepSeek-V3, Moonlight", .head_dim = 64,
     .max_positions = 4096, .names = {DEEPSEEK_NAMES}, DEEPSEEK_MTP,
     .configure = configure_deepseek_v3},
    {"glm4_moe_lite", "Glm4MoeLiteForCausalLM", "GLM-4.7-Flash", .head_dim = 64,
     .max_positions = 202752, .norm_eps = 1e-5, .names = {DEEPSEEK_NAMES}, DEEPSEEK_MTP,
     .configure = configure_glm4_moe_lite},
    {"llama", "LlamaForCausalLM", "Llama 1 to 3.2, Yi, DeepSeek-Coder", ATTENTION_BIAS,
     .names = {LLAMA_NAMES}, .configure = configure_llama},
    {"mistral", "MistralForCausalLM", "Mistral", .windows = {SOME_LAYERS, .absent = 4096},
     .names = {LLAMA_NAMES}},
    {"olmo2", "Olmo2ForCausalLM", "OLMo 2", .norm_eps = 1e-5,
     .block = NO_PRE_NORM | POST_NORM | QK_NORM | QK_NORM_WHOLE, ATTENTION_BIAS,
     .names = {OLMO_NAMES}},
    {"olmo3", "Olmo3ForCausalLM", "OLMo 3", .window_ropes = true, .norm_eps = 1e-5,
     .rope_theta = 500000, .block = NO_PRE_NORM | POST_NORM | QK_NORM | QK_NORM_WHOLE,
     ATTENTION_BIAS, .windows = {SOME_LAYERS, .absent = 4096, .full_every = 4},
     .local_theta = 500000, // as in transformers
     .names = {OLMO_NAMES}},
    {"smollm3", "SmolLM3ForCausalLM", "SmolLM3", .rope_theta = 2000000, .tied = true,
     ATTENTION_BIAS, .windows = {SOME_LAYERS, .by_use = true}, .names = {LLAMA_NAMES},
     .configure = configure_smollm3},
    {"mixtral", "MixtralForCausalLM", "Mixtral", .rope_theta = 1e6, .norm_eps = 1e-5,
     .windows = {.of = ALL_LAYERS}, .experts = {.n = 8, .per_token = 2},
     .names = {COMMON_NAMES, SPLIT_QKV_NAMES,
               O_NAMES, [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight",
               [ROLE_ROUTER] = LAYER "block_sparse_moe.gate.weight",
               [ROLE_EXPERTS_GATE_UP] = LAYER "block_sparse_moe.experts.%d.w1.weight|" LAYER
                                              "block_sparse_moe.experts.%d.w3.weight",
               [ROLE_EXPERTS_DOWN] = LAYER "block_sparse_moe.experts.%d.w2.weight"}},
    {"gpt_oss", "GptOssForCausalLM", "gpt-oss", .norm_eps = 1e-5, .rope_theta = 150000,
     .head_dim = 64, .block = QKV_BIAS | O_BIAS | MLP_BIAS | ROUTER_LOGIT_BIAS | SINKS,
     ATTENTION_BIAS, .windows = {SOME_LAYERS, .absent = 128, .full_every = 2},
     .experts = {.n = 128, .per_token = 4},
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
    {"phi3", "Phi3ForCausalLM", "Phi-3, Phi-4", .max_positions = 4096, .partial_rotary = true,
     .phi3_ropes = true, .norm_eps = 1e-5, .windows = {.of = ALL_LAYERS},
     .names = {COMMON_NAMES, O_NAMES, [ROLE_QKV] = ATTN "qkv_proj.weight",
               [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight",
               [ROLE_GATE_UP] = LAYER "mlp.gate_up_proj.weight",
               [ROLE_DOWN] = LAYER "mlp.down_proj.weight"}},
    {"phi", "PhiForCausalLM", "Phi-1, Phi-1.5, Phi-2", .partial_rotary = true, .norm = NORM_LAYER,
     .norm_eps_key = "layer_norm_eps", .norm_eps = 1e-5, .rotary_share = 0.5, .act = ACT_GELU_TANH,
     .block = QKV_BIAS | O_BIAS | MLP_BIAS | HEAD_BIAS | PLAIN_MLP | PARALLEL_BLOCK,
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
    {"gemma", "GemmaForCausalLM", "Gemma", .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .tied = true,
     .act = ACT_GELU_TANH, ATTENTION_BIAS, .names = {LLAMA_NAMES}, .configure = configure_gemma},
    {"gemma2", "Gemma2ForCausalLM", "Gemma 2", .act_key = "hidden_activation",
     .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .tied = true, .act = ACT_GELU_TANH,
     .block = POST_NORM, ATTENTION_BIAS, .windows = {SOME_LAYERS, .absent = 4096, .full_every = 2},
     .names = {GEMMA2_NAMES}, .configure = configure_gemma2},
    {"gemma3_text", "Gemma3ForCausalLM", "Gemma 3 (text)", .act_key = "hidden_activation",
     .window_ropes = true, .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .rope_theta = 1e6,
     .tied = true, .act = ACT_GELU_TANH, .block = POST_NORM | QK_NORM, ATTENTION_BIAS,
     .windows = {SOME_LAYERS, .absent = 4096, .full_every = 6,
                 .every_key = "sliding_window_pattern"},
     .local_key = "rope_local_base_freq", .local_theta = 10000,
     .names = {GEMMA2_NAMES, QK_NORM_NAMES}, .configure = configure_gemma3},
    {"gemma3", "Gemma3ForConditionalGeneration", "Gemma 3 (text and images)",
     .text_type = "gemma3_text",
     .text_defaults = "{\"vocab_size\": 262208, \"hidden_size\": 2304, \"intermediate_size\": 9216,"
                      "\"num_hidden_layers\": 26, \"num_attention_heads\": 8,"
                      "\"num_key_value_heads\": 4, \"head_dim\": 256,"
                      "\"max_position_embeddings\": 131072}"},
    {"starcoder2", "Starcoder2ForCausalLM", "StarCoder2", .norm = NORM_LAYER,
     .norm_eps_key = "norm_epsilon", .norm_eps = 1e-5, .tied = true, .act = ACT_GELU_TANH,
     .block = QKV_BIAS | O_BIAS | MLP_BIAS | PLAIN_MLP, .bias_key = "use_bias",
     .keyed = QKV_BIAS | O_BIAS | MLP_BIAS, .windows = {.of = ALL_LAYERS},
     .names =
         {COMMON_NAMES, SPLIT_QKV_NAMES,
          O_NAMES, [ROLE_ATTN_NORM_BIAS] = LAYER "input_layernorm.bias",
          [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight",
          [ROLE_MLP_NORM_BIAS] = LAYER "post_attention_layernorm.bias",
          [ROLE_GATE_UP] = LAYER "mlp.c_fc.weight", [ROLE_GATE_UP_BIAS] = LAYER "mlp.c_fc.bias",
          [ROLE_DOWN] = LAYER "mlp.c_proj.weight", [ROLE_DOWN_BIAS] = LAYER "mlp.c_proj.bias",
          [ROLE_FINAL_NORM_BIAS] = "model.norm.bias"}},
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
