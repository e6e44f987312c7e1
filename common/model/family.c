/* family.c: the table of model families. A row names the family's tensors and sets what its
 * config.json leaves unsaid; nothing else in the project asks which family a model is of.
 * Pure data and parsing; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/family.h"
#include "common/base/json.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- keys that several families share -----------------------------------------------------------

static enum status read_block(const char *where, const json_t *json, struct model_config *c)
{
    const struct named_bits *k = c->family->block_keys, *end = k + MAX_BLOCK_KEYS;
    enum status st = ST_OK;
    for (; k < end && k->key; k++) {
        bool has = c->block & k->of;
        CHECK(json_get_bool(where, json, k->key, &has));
        c->block = has ? c->block | k->of : c->block & ~k->of;
    }
out:
    return st;
}

// Which of two words layer_types has for layer l: 0 or 1; -1: it says nothing.
static enum status read_layer_type(const char *where, const json_t *json, int l,
                                   const char *const words[2], int *ret)
{
    const json_t *types = json_object_get(json, "layer_types");
    const char *type = json_string_value(json_array_get(types, (size_t)l));
    *ret = type ? strcmp(type, words[1]) == 0 : -1;
    if (*ret != 0 || strcmp(type, words[0]) == 0) return ST_OK;
    return status_fail(ST_UNSUPPORTED, "%s: layer_types[%d] is \"%s\"; %s and %s are supported",
                       where, l, type, words[0], words[1]);
}

// Whether layer l slides, where layer_types does not say.
static bool slides(const struct windows *w, int l, int full_every, int max_layers)
{
    if (full_every && (l + 1) % full_every == 0) return false;
    return w->late ? l >= max_layers : !w->early || l < max_layers;
}

static enum status read_windows(const char *where, const json_t *json, struct model_config *c)
{
    static const char *const words[] = {"full_attention", "sliding_attention"};
    const struct windows *w = &c->family->windows;
    int window = w->absent, max_layers = 28, full_every = w->full_every, type = -1;
    bool used = !w->by_use;
    enum status st = ST_OK;
    if (w->of == NO_WINDOWS) return ST_OK;
    if (w->by_use) CHECK(json_get_bool(where, json, "use_sliding_window", &used));
    if (w->by_use) CHECK(json_get_int32(where, json, "max_window_layers", 0, 1 << 20, &max_layers));
    if (w->every_key && !json_is_array(json_object_get(json, "layer_types")))
        CHECK(json_get_int32(where, json, w->every_key, 1, 1024, &full_every));
    CHECK(json_get_int32(where, json, "sliding_window", 0, 1 << 30, &window));
    const bool none = !used || json_is_null(json_object_get(json, "sliding_window"));
    const bool zero = json_has(json, "sliding_window") && window == 0 && !none;
    if (none) window = 0;
    for (int l = 0; l < c->n_layers; l++) {
        if (w->of != ALL_LAYERS) CHECK(read_layer_type(where, json, l, words, &type));
        const bool sliding = (type < 0 ? slides(w, l, full_every, max_layers) : type) &&
                             !(w->last_full && l == c->n_layers - 1);
        if (sliding && (zero || (type >= 0 && window == 0)))
            FAIL(ST_FORMAT, "%s: layer_types[%d] slides, but %s", where, l,
                 zero    ? "sliding_window is 0"
                 : !used ? "use_sliding_window is not true"
                         : "sliding_window is not set");
        c->layers[l].window = sliding ? window : 0;
    }
out:
    return st;
}

// What per_layer_config says of layer l. Its numbers of heads and their size are read; whatever
// else it says must be what the config says of all.
static enum status read_layer(const char *where, const json_t *json, const json_t *own, int l,
                              struct model_config *c)
{
    struct layer_config *layer = &c->layers[l];
    const char *key;
    json_t *value;
    enum status st = ST_OK;
    json_object_foreach ((json_t *)own, key, value) {
        const bool read = strcmp(key, "head_dim") == 0 || strcmp(key, "num_key_value_heads") == 0;
        const bool nothing = strcmp(key, "skip") == 0 && json_array_size(value) == 0;
        if (!read && !nothing && !json_equal(value, json_object_get(json, key)))
            FAIL(ST_UNSUPPORTED,
                 "%s: per_layer_config of layer %d has %s; head_dim and num_key_value_heads are "
                 "supported",
                 where, l, key);
    }
    CHECK(json_get_int32(where, own, "head_dim", 2, MAX_HEAD_DIM, &layer->head_dim));
    CHECK(json_get_int32(where, own, "num_key_value_heads", 1, 1024, &layer->n_kv_heads));
    if (layer->n_heads % layer->n_kv_heads != 0 || layer->head_dim % 2 != 0)
        FAIL(ST_FORMAT,
             "%s: layer %d has %d query heads, %d key-value heads of %d entries: the first is a "
             "multiple of the second, the third even",
             where, l, layer->n_heads, layer->n_kv_heads, layer->head_dim);
out:
    return st;
}

// Sizes of attention that differ by layer: per_layer_config's, or where there is none those that
// the layers without a window have.
static enum status read_layers(const char *where, const json_t *json, struct model_config *c)
{
    const json_t *each = json_object_get(json, "per_layer_config");
    int head_dim = c->family->global_head_dim, kv_heads = c->layers[0].n_kv_heads;
    bool k_is_v = false;
    char number[16];
    const char *key;
    json_t *value;
    enum status st = ST_OK;
    if (head_dim == 0) return ST_OK;
    CHECK(json_get_int32(where, json, "global_head_dim", 2, MAX_HEAD_DIM, &head_dim));
    CHECK(json_get_bool(where, json, "attention_k_eq_v", &k_is_v));
    if (k_is_v)
        CHECK(json_get_int32(where, json, "num_global_key_value_heads", 1, 1024, &kv_heads));
    json_t *full = json_pack("{s:i, s:i}", "head_dim", head_dim, "num_key_value_heads", kv_heads);
    for (int l = 0; l < c->n_layers && st == ST_OK; l++) {
        snprintf(number, sizeof number, "%d", l);
        const json_t *own = each                      ? json_object_get(each, number)
                            : c->layers[l].window > 0 ? NULL
                                                      : full;
        c->layers[l].k_is_v = k_is_v && c->layers[l].window == 0;
        st = read_layer(where, json, own, l, c);
    }
    json_decref(full);
    if (st != ST_OK) goto out;
    json_object_foreach ((json_t *)each, key, value)
        if (strspn(key, "0123456789") != strlen(key) || atoi(key) >= c->n_layers)
            FAIL(ST_FORMAT, "%s: per_layer_config has \"%s\", which is none of %d layers", where,
                 key, c->n_layers);
    // one table of positions for the layers with a window, and one for those without
    for (int l = 0; l < c->n_layers; l++)
        for (int k = 0; k < l; k++) {
            const struct layer_config *a = &c->layers[k], *b = &c->layers[l];
            if (a->window == b->window &&
                (a->head_dim != b->head_dim || a->n_kv_heads != b->n_kv_heads))
                FAIL(ST_UNSUPPORTED,
                     "%s: layers %d and %d are of one kind, and have heads of different sizes or "
                     "numbers",
                     where, k, l);
        }
out:
    return st;
}

enum status family_layers(const char *where, const json_t *json, struct model_config *c)
{
    enum status st = read_windows(where, json, c);
    return st != ST_OK ? st : read_layers(where, json, c);
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
    int every = 1, width = c->family->experts.width, shared = c->family->experts.shared;
    enum status st = ST_OK;
    if (moe.n_experts == 0) return ST_OK;
    // their number goes by two names, of transformers 5 and before
    CHECK(json_get_int32(where, json, "num_local_experts", 1, 1024, &moe.n_experts));
    CHECK(json_get_int32(where, json, "num_experts", 1, 1024, &moe.n_experts));
    CHECK(json_get_int32(where, json, "num_experts_per_tok", 1, moe.n_experts, &moe.top_k));
    if (width > 0 && !c->family->experts.everywhere) {
        moe.norm_topk = c->family->experts.norm_topk;
        dense = json_object_get(json, "mlp_only_layers");
        CHECK(json_get_int32(where, json, "decoder_sparse_step", 1, 1024, &every));
        CHECK(json_get_bool(where, json, "norm_topk_prob", &moe.norm_topk));
    }
    if (width > 0) CHECK(json_get_int32(where, json, "moe_intermediate_size", 1, 1 << 20, &width));
    if (shared > 0)
        CHECK(json_get_int32(where, json, "shared_expert_intermediate_size", 1, 1 << 20, &shared));
    c->router_aux_loss_coef = 0.001;
    CHECK(json_get_double(where, json, "router_aux_loss_coef", 0, 1e6, &c->router_aux_loss_coef));
    for (int l = 0; l < c->n_layers; l++) {
        if ((l + 1) % every != 0 || lists(dense, l)) continue;
        if (width > 0) c->layers[l].intermediate = width;
        c->layers[l].moe = moe;
        c->layers[l].shared_intermediate = shared;
        c->layers[l].shared_gate = shared > 0;
    }
out:
    return st;
}

enum status family_configure(const char *where, const json_t *json, struct model_config *c)
{
    const struct family *f = c->family;
    enum status st;
    CHECK(read_block(where, json, c));
    CHECK(read_experts(where, json, c));
    if (f->window_ropes) CHECK(rope_config_read_local(where, json, c));
    if (f->configure) CHECK(f->configure(where, json, c));
out:
    return st;
}

// ---- keys of one family -------------------------------------------------------------------------

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
    static const char *const words[] = {"full_attention", "linear_attention"};
    struct delta_shape delta = {0};
    bool gated = true;
    int every = 4, linear;
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
        CHECK(read_layer_type(where, json, l, words, &linear));
        if (linear < 0 ? (l + 1) % every == 0 : !linear) continue;
        c->layers[l].n_heads = c->layers[l].n_kv_heads = 0;
        c->layers[l].delta = delta;
    }
out:
    return st;
}

// Short convolutions between gates in the layers that are not attention's; older names of the MLP's
// width and of tying come before the newer ones.
static enum status configure_lfm2(const char *where, const json_t *json, struct model_config *c)
{
    static const char *const words[] = {"full_attention", "conv"};
    const json_t *attention = json_object_get(json, "full_attn_idxs");
    struct delta_shape conv = {.n_heads = 1, .head_dim = c->hidden, .taps = 3};
    bool adjusted = true;
    double multiplier = 1;
    int inner = c->layers[0].intermediate, multiple = 256, convolves;
    enum status st = ST_OK;
    CHECK(json_get_int32(where, json, "conv_L_cache", 2, DELTA_MAX_TAPS, &conv.taps));
    CHECK(json_get_bool(where, json, "tie_embedding", &c->tie_embeddings));
    CHECK(json_get_int32(where, json, "block_ff_dim", 1, 1 << 20, &inner));
    CHECK(json_get_bool(where, json, "block_auto_adjust_ff_dim", &adjusted));
    CHECK(json_get_int32(where, json, "block_multiple_of", 1, 1 << 20, &multiple));
    CHECK(json_get_double(where, json, "block_ffn_dim_multiplier", 1e-3, 1e3, &multiplier));
    if (adjusted) inner = 2 * inner / 3;
    if (adjusted && !json_is_null(json_object_get(json, "block_ffn_dim_multiplier")))
        inner = ((int)(multiplier * inner) + multiple - 1) / multiple * multiple;
    for (int l = 0; l < c->n_layers; l++) {
        CHECK(read_layer_type(where, json, l, words, &convolves));
        if (convolves < 0) convolves = json_is_array(attention) && !lists(attention, l);
        c->layers[l].intermediate = inner;
        if (!convolves) continue;
        c->layers[l].n_heads = c->layers[l].n_kv_heads = 0;
        c->layers[l].delta = conv;
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

// Experts whose width is intermediate_size.
static enum status configure_olmoe(const char *where, const json_t *json, struct model_config *c)
{
    struct moe_shape moe = c->layers[0].moe;
    enum status st = ST_OK;
    moe.norm_topk = false;
    CHECK(json_get_bool(where, json, "norm_topk_prob", &moe.norm_topk));
    // where there are both names of the number, this one counts
    CHECK(json_get_int32(where, json, "num_local_experts", moe.top_k, 1024, &moe.n_experts));
    if (json_has(json, "clip_qkv"))
        FAIL(ST_UNSUPPORTED,
             "%s: clip_qkv is not supported (no published OLMoE has it): give a folder without it",
             where);
    for (int l = 0; l < c->n_layers; l++) c->layers[l].moe = moe;
    if (!json_has(json, "router_aux_loss_coef")) c->router_aux_loss_coef = 0.01;
out:
    return st;
}

// Llama's block with a factor at each of its joints.
static enum status configure_granite(const char *where, const json_t *json, struct model_config *c)
{
    double embedding = 1, logits = 1, residual = 1, attention = 1;
    enum status st = ST_OK;
    CHECK(json_get_double(where, json, "embedding_multiplier", 1e-6, 1e6, &embedding));
    CHECK(json_get_double(where, json, "logits_scaling", 1e-6, 1e6, &logits));
    CHECK(json_get_double(where, json, "residual_multiplier", 1e-6, 1e6, &residual));
    CHECK(json_get_double(where, json, "attention_multiplier", 1e-6, 1e6, &attention));
    c->embed_scale = (float)embedding;
    c->logit_scale = (float)(1 / logits);
    c->residual_scale = (float)residual;
    for (int l = 0; l < c->n_layers; l++) c->layers[l].attn_scale = (float)attention;
out:
    return st;
}

// Positions are those of layers with a window alone, where `all` does not say otherwise.
static void rotate_windows(struct model_config *c, bool all)
{
    for (int l = 0; l < c->n_layers && !all; l++)
        if (c->layers[l].window == 0) c->layers[l].rope = -1;
}

static enum status configure_cohere2(const char *where, const json_t *json, struct model_config *c)
{
    double scale = 0.0625;
    enum status st = json_get_double(where, json, "logit_scale", 1e-6, 1e6, &scale);
    c->logit_scale = (float)scale;
    c->ropes[0].interleaved = true;
    rotate_windows(c, false);
    return st;
}

static enum status configure_exaone4(const char *where, const json_t *json, struct model_config *c)
{
    (void)where;
    rotate_windows(c, json_is_null(json_object_get(json, "sliding_window")));
    return ST_OK;
}

// Queries have a table of their own where they grow with their positions.
static enum status configure_ministral3(const char *where, const json_t *json,
                                        struct model_config *c)
{
    struct rope_config *keys = &c->ropes[0];
    (void)where;
    (void)json;
    if (keys->query_beta == 0) return ST_OK;
    c->query_rope = c->n_ropes++;
    c->ropes[c->query_rope] = *keys;
    keys->query_beta = 0;
    return ST_OK;
}

// Rope type "dynamic" is of these folders a theta that `alpha` stretches once for all.
static enum status configure_hunyuan(const char *where, const json_t *json, struct model_config *c)
{
    struct rope_config *rope = &c->ropes[0];
    const json_t *object = json_object_get(json, "rope_scaling");
    if (json_object_size(object) == 0) object = json_object_get(json, "rope_parameters");
    double alpha = 0;
    enum status st = json_get_double(where, object, "alpha", 0, 1e9, &alpha);
    if (rope->kind == ROPE_DYNAMIC && alpha > 0)
        rope->theta *= pow(alpha, (double)rope->dim / (rope->dim - 2));
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
    enum status st;
    CHECK(json_get_bool(where, json, "qk_layernorm", &qk_norm));
    if (qk_norm || c->ropes[0].kind == ROPE_PROPORTIONAL)
        FAIL(ST_UNSUPPORTED, "%s: %s is not supported (no published Phi model has it)", where,
             qk_norm ? "qk_layernorm" : "rope type proportional");
out:
    return st;
}

static enum status configure_gemma(const char *where, const json_t *json, struct model_config *c)
{
    (void)where;
    (void)json;
    // the first folders say "gelu" in hidden_act and mean its tanh form
    if (!c->family->act_key && c->act == ACT_GELU) c->act = ACT_GELU_TANH;
    c->embed_scale = (float)sqrt((double)c->hidden);
    c->embed_scale_rounded = true;
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

// The last layers attend to the keys and values of the last layer of their kind before them.
static enum status share_keys(const char *where, const json_t *json, struct model_config *c)
{
    bool wide = false;
    int shared = 0;
    enum status st = ST_OK;
    CHECK(json_get_int32(where, json, "num_kv_shared_layers", 0, c->n_layers - 1, &shared));
    CHECK(json_get_bool(where, json, "use_double_wide_mlp", &wide));
    for (int l = c->n_layers - shared; l < c->n_layers; l++) {
        struct layer_config *layer = &c->layers[l];
        int from = c->n_layers - shared - 1;
        while (from >= 0 && (c->layers[from].window > 0) != (layer->window > 0)) from--;
        if (from < 0)
            FAIL(ST_FORMAT,
                 "%s: num_kv_shared_layers is %d, and layer %d has none of its kind below these",
                 where, shared, l);
        layer->kv_from = from;
        layer->k_is_v = false;
        c->layers[from].kv_shared = layer->window > 0;
        if (wide) layer->intermediate *= 2;
    }
out:
    return st;
}

// Experts beside the MLP of every layer.
static enum status read_experts_beside(const char *where, const json_t *json,
                                       struct model_config *c)
{
    struct moe_shape moe = {.scoring = MOE_SOFTMAX, .norm_topk = true, .scale = 1};
    int width = 0;
    enum status st;
    if (!(c->block & EXPERTS_BESIDE)) return ST_OK;
    CHECK(json_get_int32(where, json, "num_experts", 1, 1024, &moe.n_experts));
    CHECK(json_get_int32(where, json, "top_k_experts", 1, 1024, &moe.top_k));
    CHECK(json_get_int32(where, json, "moe_intermediate_size", 1, 1 << 20, &width));
    if (moe.n_experts == 0 || moe.top_k == 0 || width == 0)
        FAIL(ST_FORMAT,
             "%s: enable_moe_block wants num_experts, top_k_experts and moe_intermediate_size",
             where);
    for (struct layer_config *l = c->layers; l < c->layers + c->n_layers; l++) {
        l->shared_intermediate = l->intermediate;
        l->intermediate = width;
        l->moe = moe;
    }
out:
    return st;
}

static enum status configure_gemma4(const char *where, const json_t *json, struct model_config *c)
{
    static const char *const kinds[] = {"full_attention", "sliding_attention"};
    const json_t *ropes = json_object_get(json, "rope_parameters");
    const json_t *both_ways = json_object_get(json, "use_bidirectional_attention");
    const char *seen = json_string_value(both_ways);
    enum status st = ST_OK;
    CHECK(configure_gemma(where, json, c));
    // "vision" means what images become, of which there is none here
    if (both_ways && !json_is_null(both_ways) && (!seen || strcmp(seen, "vision") != 0))
        FAIL(ST_UNSUPPORTED,
             "%s: use_bidirectional_attention is not supported: a token would see those behind it",
             where);
    if (json_object_get(json, "rope_scaling"))
        FAIL(ST_FORMAT, "%s: rope_scaling has no place in a %s model, which has rope_parameters",
             where, c->family->title);
    for (int i = 0; i < 2 && ropes && !json_is_null(ropes); i++)
        if (json_object_size(json_object_get(ropes, kinds[i])) == 0)
            FAIL(ST_FORMAT, "%s: rope_parameters must have %s", where, kinds[i]);
    for (int l = 0; l < c->n_layers; l++) c->layers[l].attn_scale = 1;
    CHECK(read_cap(where, json, "final_logit_softcapping", 0, &c->logit_softcap));
    CHECK(share_keys(where, json, c));
    CHECK(read_experts_beside(where, json, c));
    c->layer_input = 256;
    c->layer_input_vocab = 262144;
    CHECK(json_get_int32(where, json, "hidden_size_per_layer_input", 0, 1 << 16, &c->layer_input));
    CHECK(json_get_int32(where, json, "vocab_size_per_layer_input", 1, 1 << 24,
                         &c->layer_input_vocab));
    if (c->layer_input > 0 && c->layer_input_vocab < c->vocab_size)
        FAIL(ST_FORMAT, "%s: vocab_size_per_layer_input is %d, below vocab_size %d", where,
             c->layer_input_vocab, c->vocab_size);
out:
    return st;
}

// ---- names --------------------------------------------------------------------------------------
#define LAYER  "model.layers.%d."
#define ATTN   LAYER "self_attn."
#define EXPERT LAYER "mlp.experts.%d."
#define MOE    LAYER "block_sparse_moe."
#define DELTA  LAYER "linear_attn."
#define MIXER  LAYER "mixer." // of Nemotron-H

#define COMMON_NAMES                                                                               \
    [ROLE_EMBED] = "model.embed_tokens.weight", [ROLE_ATTN_NORM] = LAYER "input_layernorm.weight", \
    [ROLE_FINAL_NORM] = "model.norm.weight", [ROLE_HEAD] = "lm_head.weight",                       \
    [ROLE_O] = ATTN "o_proj.weight"
#define SPLIT_QKV_NAMES                                                                            \
    [ROLE_QKV] = ATTN "q_proj.weight|" ATTN "k_proj.weight|" ATTN "v_proj.weight"
#define GATED_MLP_NAMES                                                                            \
    [ROLE_GATE_UP] = LAYER "mlp.gate_proj.weight|" LAYER "mlp.up_proj.weight",                     \
    [ROLE_DOWN] = LAYER "mlp.down_proj.weight"
#define QK_NORM_NAMES  [ROLE_Q_NORM] = ATTN "q_norm.weight", [ROLE_K_NORM] = ATTN "k_norm.weight"
#define MLP_NORM_NAMES [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight"
#define LLAMA_NAMES    COMMON_NAMES, SPLIT_QKV_NAMES, GATED_MLP_NAMES, MLP_NORM_NAMES
// Gemma's of 2, and OLMo's.
#define POST_NORM_NAMES                                                                            \
    COMMON_NAMES, SPLIT_QKV_NAMES,                                                                 \
        GATED_MLP_NAMES, [ROLE_POST_ATTN_NORM] = LAYER "post_attention_layernorm.weight",          \
                         [ROLE_MLP_NORM] = LAYER "pre_feedforward_layernorm.weight",               \
                         [ROLE_POST_MLP_NORM] = LAYER "post_feedforward_layernorm.weight"

#define DELTA_PARTS_NAMES                                                                          \
    [ROLE_DELTA_IN] = DELTA "in_proj_qkv.weight|" DELTA "in_proj_z.weight",                        \
    [ROLE_DELTA_GATES] = DELTA "in_proj_b.weight|" DELTA "in_proj_a.weight"
#define DELTA_NAMES                                                                                \
    [ROLE_DELTA_CONV] = DELTA "conv1d.weight", [ROLE_DELTA_A_LOG] = DELTA "A_log",                 \
    [ROLE_DELTA_DT_BIAS] = DELTA "dt_bias", [ROLE_DELTA_NORM] = DELTA "norm.weight",               \
    [ROLE_DELTA_OUT] = DELTA "out_proj.weight"
#define QWEN_MTP_NAMES                                                                             \
    [ROLE_MTP_EMBED_NORM] = "mtp.pre_fc_norm_embedding.weight",                                    \
    [ROLE_MTP_HIDDEN_NORM] = "mtp.pre_fc_norm_hidden.weight", [ROLE_MTP_PROJ] = "mtp.fc.weight"
#define QWEN_MTP .mtp_prefix = "mtp.", .mtp_norm = "mtp.norm.weight", .mtp_normalised = true

#define QWEN_EXPERTS_NAMES                                                                         \
    LLAMA_NAMES, [ROLE_ROUTER] = LAYER "mlp.gate.weight",                                          \
                 [ROLE_EXPERTS_GATE_UP] = EXPERT "gate_proj.weight|" EXPERT "up_proj.weight",      \
                 [ROLE_EXPERTS_DOWN] = EXPERT "down_proj.weight"
#define SHARED_EXPERT_NAMES                                                                        \
    [ROLE_SHARED_GATE_UP] =                                                                        \
        LAYER "mlp.shared_expert.gate_proj.weight|" LAYER "mlp.shared_expert.up_proj.weight",      \
    [ROLE_SHARED_DOWN] = LAYER "mlp.shared_expert.down_proj.weight",                               \
    [ROLE_SHARED_GATE] = LAYER "mlp.shared_expert_gate.weight"
#define DEEPSEEK_NAMES                                                                             \
    QWEN_EXPERTS_NAMES,                                                                            \
        [ROLE_Q_A] = ATTN "q_a_proj.weight", [ROLE_Q_A_NORM] = ATTN "q_a_layernorm.weight",        \
        [ROLE_Q_B] = ATTN "q_b_proj.weight", [ROLE_Q] = ATTN "q_proj.weight",                      \
        [ROLE_KV_A] = ATTN "kv_a_proj_with_mqa.weight",                                            \
        [ROLE_KV_A_NORM] = ATTN "kv_a_layernorm.weight", [ROLE_KV_B] = ATTN "kv_b_proj.weight",    \
        [ROLE_ROUTER_BIAS] = LAYER "mlp.gate.e_score_correction_bias",                             \
        [ROLE_SHARED_GATE_UP] = LAYER "mlp.shared_experts.gate_proj.weight|" LAYER                 \
                                      "mlp.shared_experts.up_proj.weight",                         \
        [ROLE_SHARED_DOWN] = LAYER "mlp.shared_experts.down_proj.weight",                          \
        [ROLE_MTP_EMBED_NORM] = LAYER "enorm.weight",                                              \
        [ROLE_MTP_HIDDEN_NORM] = LAYER "hnorm.weight", [ROLE_MTP_PROJ] = LAYER "eh_proj.weight"
#define DEEPSEEK_MTP .mtp_norm = LAYER "shared_head.norm.weight"

#define MIXTRAL_NAMES                                                                              \
    COMMON_NAMES, SPLIT_QKV_NAMES,                                                                 \
        MLP_NORM_NAMES, [ROLE_ROUTER] = MOE "gate.weight",                                         \
                        [ROLE_EXPERTS_GATE_UP] =                                                   \
                            MOE "experts.%d.w1.weight|" MOE "experts.%d.w3.weight",                \
                        [ROLE_EXPERTS_DOWN] = MOE "experts.%d.w2.weight"

#define GEMMA4_NAMES                                                                               \
    POST_NORM_NAMES, QK_NORM_NAMES,                                                                \
        [ROLE_LAYER_EMBED] = "model.embed_tokens_per_layer.weight",                                \
        [ROLE_LAYER_INPUT] = "model.per_layer_model_projection.weight",                            \
        [ROLE_LAYER_INPUT_NORM] = "model.per_layer_projection_norm.weight",                        \
        [ROLE_LAYER_GATE] = LAYER "per_layer_input_gate.weight",                                   \
        [ROLE_LAYER_OUT] = LAYER "per_layer_projection.weight",                                    \
        [ROLE_POST_LAYER_NORM] = LAYER "post_per_layer_input_norm.weight",                         \
        [ROLE_LAYER_SCALE] = LAYER "layer_scalar", [ROLE_ROUTER] = LAYER "router.proj.weight",     \
        [ROLE_ROUTER_NORM] = LAYER "router.scale",                                                 \
        [ROLE_EXPERT_SCALE] = LAYER "router.per_expert_scale",                                     \
        [ROLE_EXPERTS_NORM] = LAYER "pre_feedforward_layernorm_2.weight",                          \
        [ROLE_POST_SHARED_NORM] = LAYER "post_feedforward_layernorm_1.weight",                     \
        [ROLE_POST_EXPERTS_NORM] = LAYER "post_feedforward_layernorm_2.weight",                    \
        [ROLE_SHARED_GATE_UP] = LAYER "mlp.gate_proj.weight|" LAYER "mlp.up_proj.weight",          \
        [ROLE_SHARED_DOWN] = LAYER "mlp.down_proj.weight",                                         \
        [ROLE_EXPERTS_GATE_UP] =                                                                   \
            LAYER "experts.%d.gate_proj.weight|" LAYER "experts.%d.up_proj.weight",                \
        [ROLE_EXPERTS_DOWN] = LAYER "experts.%d.down_proj.weight"

// Biases by the keys of most families. One whose o has a key of its own does without.
#define ATTENTION_BIAS .block_keys = {{"attention_bias", QKV_BIAS | O_BIAS}}
#define LATENT_BIAS    .block_keys = {{"attention_bias", O_BIAS}}
#define LLAMA_BIASES   .block_keys = {{"attention_bias", QKV_BIAS | O_BIAS}, {"mlp_bias", MLP_BIAS}}

// ---- the table ----------------------------------------------------------------------------------
static const struct family families[] = {
    {"qwen2", "Qwen2ForCausalLM", "Qwen2/Qwen2.5", .block = QKV_BIAS,
     .windows = {SOME_LAYERS, .absent = 4096, .by_use = true, .late = true},
     .names = {LLAMA_NAMES}},
    {"qwen3", "Qwen3ForCausalLM", "Qwen3", .head_dim = 128, .block = QK_NORM, ATTENTION_BIAS,
     .windows = {SOME_LAYERS, .absent = 4096, .by_use = true, .late = true},
     .names = {LLAMA_NAMES, QK_NORM_NAMES}},
    {"qwen2_moe", "Qwen2MoeForCausalLM", "Qwen1.5-MoE, Qwen2-MoE", .block = QKV_BIAS,
     .block_keys = {{"qkv_bias", QKV_BIAS}},
     .windows = {SOME_LAYERS, .absent = 4096, .by_use = true, .early = true, .full_every = 2},
     .experts = {.n = 60, .per_token = 4, .width = 1408, .shared = 5632},
     .names = {QWEN_EXPERTS_NAMES, SHARED_EXPERT_NAMES}},
    {"qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3-MoE", .block = QK_NORM, ATTENTION_BIAS,
     .windows = {ALL_LAYERS, .absent = 4096, .by_use = true},
     .experts = {.n = 128, .per_token = 8, .width = 768},
     .names = {QWEN_EXPERTS_NAMES, QK_NORM_NAMES}},
    {"qwen3_5_text", "Qwen3_5ForCausalLM", "Qwen3.5 (text)", .partial_rotary = true,
     .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .rotary_share = 0.25, .block = QK_NORM | ATTN_GATE,
     ATTENTION_BIAS,
     .names = {LLAMA_NAMES, DELTA_NAMES, DELTA_PARTS_NAMES, QK_NORM_NAMES, QWEN_MTP_NAMES},
     QWEN_MTP, .configure = configure_qwen3_5},
    {"qwen3_next", "Qwen3NextForCausalLM", "Qwen3-Next", .partial_rotary = true,
     .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .max_positions = 32768, .rotary_share = 0.25,
     .block = QK_NORM | ATTN_GATE | DELTA_GROUPED, ATTENTION_BIAS,
     .experts = {.n = 512, .per_token = 10, .width = 512, .shared = 512, .norm_topk = true},
     QWEN_MTP,
     .names = {QWEN_EXPERTS_NAMES, SHARED_EXPERT_NAMES, DELTA_NAMES, QWEN_MTP_NAMES,
               QK_NORM_NAMES, [ROLE_DELTA_IN] = DELTA "in_proj_qkvz.weight",
               [ROLE_DELTA_GATES] = DELTA "in_proj_ba.weight"},
     .configure = configure_qwen3_5},
    {"qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "Qwen3.5-MoE, Qwen3.6-MoE (text)",
     .partial_rotary = true, .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .max_positions = 32768,
     .rotary_share = 0.25, .block = QK_NORM | ATTN_GATE, ATTENTION_BIAS,
     .experts = {.n = 256, .per_token = 8, .width = 512, .shared = 512, .everywhere = true},
     QWEN_MTP,
     .names = {QWEN_EXPERTS_NAMES, SHARED_EXPERT_NAMES, DELTA_NAMES, DELTA_PARTS_NAMES,
               QWEN_MTP_NAMES, QK_NORM_NAMES},
     .configure = configure_qwen3_5},
    {"qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen3.5 (text and images)",
     .text_type = "qwen3_5_text",
     .text_defaults =
         "{\"vocab_size\": 248320, \"hidden_size\": 4096, \"intermediate_size\": 12288,"
         "\"num_hidden_layers\": 32, \"num_attention_heads\": 16,"
         "\"num_key_value_heads\": 4, \"head_dim\": 256,"
         "\"max_position_embeddings\": 32768}"},
    {"qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",
     "Qwen3.5-MoE, Qwen3.6-MoE (text and images)", .text_type = "qwen3_5_moe_text",
     .text_defaults = "{\"vocab_size\": 248320, \"hidden_size\": 2048, \"num_hidden_layers\": 40,"
                      "\"num_attention_heads\": 16, \"num_key_value_heads\": 2}"},
    {"qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3-VL (text and images)",
     .text_type = "qwen3",
     .text_defaults =
         "{\"vocab_size\": 151936, \"hidden_size\": 4096, \"intermediate_size\": 22016,"
         "\"num_hidden_layers\": 32, \"num_attention_heads\": 32,"
         "\"num_key_value_heads\": 32, \"rope_theta\": 500000.0,"
         "\"max_position_embeddings\": 128000}"},
    {"mistral3", "Mistral3ForConditionalGeneration", "Mistral Small 3 (text and images)",
     .text_type = "mistral",
     .text_defaults = "{\"vocab_size\": 32000, \"hidden_size\": 4096, \"intermediate_size\": 14336,"
                      "\"num_hidden_layers\": 32, \"num_attention_heads\": 32,"
                      "\"num_key_value_heads\": 8, \"max_position_embeddings\": 131072}"},
    {"mistral3", "Mistral3ForConditionalGeneration", "Ministral 3 (text and images)",
     .text_type = "ministral3",
     .text_defaults =
         "{\"vocab_size\": 131072, \"hidden_size\": 4096, \"intermediate_size\": 14336,"
         "\"num_hidden_layers\": 34, \"num_attention_heads\": 32,"
         "\"num_key_value_heads\": 8}"},
    {"lfm2", "Lfm2ForCausalLM", "LFM2", .norm_eps_key = "norm_eps", .norm_eps = 1e-5,
     .act_key = "", // it has none
     .max_positions = 128000, .rope_theta = 1e6, .tied = true, .block = QK_NORM,
     .block_keys = {{"conv_bias", DELTA_BIAS | DELTA_CONV_BIAS}},
     .names = {SPLIT_QKV_NAMES, [ROLE_EMBED] = "model.embed_tokens.weight",
               [ROLE_ATTN_NORM] = LAYER "operator_norm.weight", [ROLE_O] = ATTN "out_proj.weight",
               [ROLE_Q_NORM] = ATTN "q_layernorm.weight", [ROLE_K_NORM] = ATTN "k_layernorm.weight",
               [ROLE_DELTA_IN] = LAYER "conv.in_proj.weight",
               [ROLE_DELTA_CONV] = LAYER "conv.conv.weight",
               [ROLE_DELTA_OUT] = LAYER "conv.out_proj.weight",
               [ROLE_MLP_NORM] = LAYER "ffn_norm.weight",
               [ROLE_GATE_UP] = LAYER "feed_forward.w1.weight|" LAYER "feed_forward.w3.weight",
               [ROLE_DOWN] = LAYER "feed_forward.w2.weight",
               [ROLE_FINAL_NORM] = "model.embedding_norm.weight", [ROLE_HEAD] = "lm_head.weight"},
     .configure = configure_lfm2},
    {"nemotron_h", "NemotronHForCausalLM", "Nemotron-H, Nemotron Nano 2, Nemotron 3",
     .norm_eps_key = "layer_norm_epsilon", .norm_eps = 1e-5, .act_key = "mlp_hidden_act",
     .act = ACT_RELU2, .head_dim = 128, .kv_heads = 8, .max_positions = 4096,
     .block = PLAIN_MLP | DELTA_CONV_BIAS,
     .block_keys = {{"mlp_bias", MLP_BIAS},
                    {"use_bias", DELTA_BIAS},
                    {"use_conv_bias", DELTA_CONV_BIAS},
                    {"mamba_conv_bias", DELTA_CONV_BIAS}},
     .no_positions = true, .count_layers = nemotron_h_layers, .folder_prefix = "backbone.",
     .names = {[ROLE_EMBED] = "model.embeddings.weight",
               [ROLE_ATTN_NORM] = LAYER "norm.weight",
               [ROLE_QKV] = MIXER "q_proj.weight|" MIXER "k_proj.weight|" MIXER "v_proj.weight",
               [ROLE_O] = MIXER "o_proj.weight",
               [ROLE_DELTA_IN] = MIXER "in_proj.weight",
               [ROLE_DELTA_CONV] = MIXER "conv1d.weight",
               [ROLE_DELTA_A_LOG] = MIXER "A_log",
               [ROLE_DELTA_DT_BIAS] = MIXER "dt_bias",
               [ROLE_DELTA_SKIP] = MIXER "D",
               [ROLE_DELTA_NORM] = MIXER "norm.weight",
               [ROLE_DELTA_OUT] = MIXER "out_proj.weight",
               [ROLE_MLP_NORM] = LAYER "norm.weight",
               [ROLE_GATE_UP] = MIXER "up_proj.weight",
               [ROLE_DOWN] = MIXER "down_proj.weight",
               [ROLE_ROUTER] = MIXER "gate.weight",
               [ROLE_ROUTER_BIAS] = MIXER "gate.e_score_correction_bias",
               [ROLE_EXPERTS_GATE_UP] = MIXER "experts.%d.up_proj.weight",
               [ROLE_EXPERTS_DOWN] = MIXER "experts.%d.down_proj.weight",
               [ROLE_EXPERTS_IN] = MIXER "fc1_latent_proj.weight",
               [ROLE_EXPERTS_OUT] = MIXER "fc2_latent_proj.weight",
               [ROLE_SHARED_GATE_UP] = MIXER "shared_experts.up_proj.weight",
               [ROLE_SHARED_DOWN] = MIXER "shared_experts.down_proj.weight",
               [ROLE_FINAL_NORM] = "model.norm_f.weight",
               [ROLE_HEAD] = "lm_head.weight"},
     .configure = configure_nemotron_h},
    {"deepseek_v2", "DeepseekV2ForCausalLM", "DeepSeek-V2, V2.5, Coder-V2",
     .head_dim = 64, // what config.json calls so is the rotated part
     LATENT_BIAS, .names = {DEEPSEEK_NAMES}, .configure = configure_deepseek_v2},
    {"deepseek_v3", "DeepseekV3ForCausalLM", "DeepSeek-V3, Moonlight", .head_dim = 64,
     .max_positions = 4096, LATENT_BIAS, .names = {DEEPSEEK_NAMES}, DEEPSEEK_MTP,
     .configure = configure_deepseek_v3},
    {"glm4_moe_lite", "Glm4MoeLiteForCausalLM", "GLM-4.7-Flash", .head_dim = 64,
     .max_positions = 202752, .norm_eps = 1e-5, .names = {DEEPSEEK_NAMES}, DEEPSEEK_MTP,
     LATENT_BIAS, .configure = configure_glm4_moe_lite},
    {"llama", "LlamaForCausalLM", "Llama 1 to 3.2, Yi, DeepSeek-Coder", LLAMA_BIASES,
     .names = {LLAMA_NAMES}},
    {"mistral", "MistralForCausalLM", "Mistral", .windows = {SOME_LAYERS, .absent = 4096},
     .names = {LLAMA_NAMES}},
    {"olmo2", "Olmo2ForCausalLM", "OLMo 2", .norm_eps = 1e-5,
     .block = NO_PRE_NORM | POST_NORM | QK_NORM | QK_NORM_WHOLE, ATTENTION_BIAS,
     .names = {POST_NORM_NAMES, QK_NORM_NAMES}},
    {"olmo3", "Olmo3ForCausalLM", "OLMo 3", .window_ropes = true, .norm_eps = 1e-5,
     .rope_theta = 500000, .block = NO_PRE_NORM | POST_NORM | QK_NORM | QK_NORM_WHOLE,
     ATTENTION_BIAS, .windows = {SOME_LAYERS, .absent = 4096, .full_every = 4},
     .local_theta = 500000, // as in transformers
     .names = {POST_NORM_NAMES, QK_NORM_NAMES}},
    {"olmoe", "OlmoeForCausalLM", "OLMoE", .norm_eps = 1e-5, .max_positions = 4096,
     .block = QK_NORM | QK_NORM_WHOLE, ATTENTION_BIAS, .experts = {.n = 64, .per_token = 8},
     .names = {QWEN_EXPERTS_NAMES, QK_NORM_NAMES}, .configure = configure_olmoe},
    {"seed_oss", "SeedOssForCausalLM", "Seed-OSS", .head_dim = 128, .max_positions = 524288,
     .block = QKV_BIAS,
     .block_keys = {{"attention_bias", QKV_BIAS},
                    {"attention_out_bias", O_BIAS},
                    {"mlp_bias", MLP_BIAS}},
     .names = {LLAMA_NAMES}},
    {"granite", "GraniteForCausalLM", "Granite 3", LLAMA_BIASES, .names = {LLAMA_NAMES},
     .configure = configure_granite},
    {"exaone4", "Exaone4ForCausalLM", "EXAONE 4", .norm_eps = 1e-5,
     .block = NO_PRE_NORM | POST_NORM | QK_NORM,
     .windows = {SOME_LAYERS, .absent = 4096, .full_every = 4,
                 .every_key = "sliding_window_pattern"},
     .names = {POST_NORM_NAMES, QK_NORM_NAMES}, .configure = configure_exaone4},
    {"cohere2", "Cohere2ForCausalLM", "Cohere 2 (Command A, R7B)", .norm = NORM_LAYER,
     .norm_eps_key = "layer_norm_eps", .norm_eps = 1e-5, .max_positions = 8192, .tied = true,
     .block = NO_NORM_BIAS | PARALLEL_BLOCK, ATTENTION_BIAS,
     .windows = {SOME_LAYERS, .absent = 4096, .full_every = 4,
                 .every_key = "sliding_window_pattern"},
     .names = {LLAMA_NAMES}, .configure = configure_cohere2},
    {"hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "HunYuan dense", .norm_eps = 1e-5,
     .block = QK_NORM | QK_NORM_LATE, ATTENTION_BIAS,
     .names = {LLAMA_NAMES, [ROLE_Q_NORM] = ATTN "query_layernorm.weight",
               [ROLE_K_NORM] = ATTN "key_layernorm.weight"},
     .configure = configure_hunyuan},
    {"glm4_moe", "Glm4MoeForCausalLM", "GLM-4.5, 4.6, 4.7", .partial_rotary = true,
     .rotary_share = 0.5, .norm_eps = 1e-5, .max_positions = 131072,
     .block_keys = {{"attention_bias", QKV_BIAS}, {"use_qk_norm", QK_NORM}},
     .names = {DEEPSEEK_NAMES, QK_NORM_NAMES}, DEEPSEEK_MTP, .configure = configure_glm4_moe},
    {"minimax_m2", "MiniMaxM2ForCausalLM", "MiniMax-M2", .partial_rotary = true, .rope_theta = 5e6,
     .head_dim = 128, .max_positions = 196608, .block = QK_NORM | QK_NORM_WHOLE,
     .experts = {.n = 256, .per_token = 8},
     .names = {MIXTRAL_NAMES, QK_NORM_NAMES, [ROLE_ROUTER_BIAS] = MOE "e_score_correction_bias"},
     .configure = configure_minimax_m2},
    {"ministral3", "Ministral3ForCausalLM", "Ministral 3", .norm_eps = 1e-5, .head_dim = 128,
     .max_positions = 262144, .windows = {.of = ALL_LAYERS}, .query_growth = true,
     .ropes =
         "{\"type\": \"yarn\", \"rope_theta\": 1e6, \"factor\": 16.0,"
         "\"original_max_position_embeddings\": 16384, \"beta_fast\": 32.0, \"beta_slow\": 1.0,"
         "\"mscale_all_dim\": 1.0, \"mscale\": 1.0, \"llama_4_scaling_beta\": 0.1}",
     .names = {LLAMA_NAMES}, .configure = configure_ministral3},
    {"smollm3", "SmolLM3ForCausalLM", "SmolLM3", .rope_theta = 2000000, .tied = true, LLAMA_BIASES,
     .windows = {SOME_LAYERS, .by_use = true}, .names = {LLAMA_NAMES},
     .configure = configure_smollm3},
    {"mixtral", "MixtralForCausalLM", "Mixtral", .rope_theta = 1e6, .norm_eps = 1e-5,
     .windows = {.of = ALL_LAYERS}, .experts = {.n = 8, .per_token = 2}, .names = {MIXTRAL_NAMES}},
    {"gpt_oss", "GptOssForCausalLM", "gpt-oss", .norm_eps = 1e-5, .rope_theta = 150000,
     .head_dim = 64, .block = QKV_BIAS | O_BIAS | MLP_BIAS | ROUTER_LOGIT_BIAS | SINKS,
     ATTENTION_BIAS, .windows = {SOME_LAYERS, .absent = 128, .full_every = 2},
     .experts = {.n = 128, .per_token = 4},
     .names =
         {COMMON_NAMES, SPLIT_QKV_NAMES,
          MLP_NORM_NAMES, [ROLE_SINKS] = ATTN "sinks", [ROLE_ROUTER] = LAYER "mlp.router.weight",
          [ROLE_EXPERTS_GATE_UP] = EXPERT "gate_proj.weight|" EXPERT "up_proj.weight",
          [ROLE_EXPERTS_DOWN] = EXPERT "down_proj.weight"},
     .stored = {[ROLE_EXPERTS_GATE_UP] = LAYER "mlp.experts.gate_up_proj",
                [ROLE_EXPERTS_GATE_UP_BIAS] = LAYER "mlp.experts.gate_up_proj_bias",
                [ROLE_EXPERTS_DOWN] = LAYER "mlp.experts.down_proj",
                [ROLE_EXPERTS_DOWN_BIAS] = LAYER "mlp.experts.down_proj_bias"},
     .configure = configure_gpt_oss},
    {"phi3", "Phi3ForCausalLM", "Phi-3, Phi-4", .max_positions = 4096, .partial_rotary = true,
     .phi3_ropes = true, .norm_eps = 1e-5, .windows = {.of = ALL_LAYERS},
     .names = {COMMON_NAMES, MLP_NORM_NAMES, [ROLE_QKV] = ATTN "qkv_proj.weight",
               [ROLE_GATE_UP] = LAYER "mlp.gate_up_proj.weight",
               [ROLE_DOWN] = LAYER "mlp.down_proj.weight"}},
    {"phi", "PhiForCausalLM", "Phi-1, Phi-1.5, Phi-2", .partial_rotary = true, .norm = NORM_LAYER,
     .norm_eps_key = "layer_norm_eps", .norm_eps = 1e-5, .rotary_share = 0.5, .act = ACT_GELU_TANH,
     .block = QKV_BIAS | O_BIAS | MLP_BIAS | HEAD_BIAS | PLAIN_MLP | PARALLEL_BLOCK,
     .names = {SPLIT_QKV_NAMES, [ROLE_EMBED] = "model.embed_tokens.weight",
               [ROLE_ATTN_NORM] = LAYER "input_layernorm.weight", [ROLE_O] = ATTN "dense.weight",
               [ROLE_GATE_UP] = LAYER "mlp.fc1.weight", [ROLE_DOWN] = LAYER "mlp.fc2.weight",
               [ROLE_FINAL_NORM] = "model.final_layernorm.weight", [ROLE_HEAD] = "lm_head.weight"},
     .configure = configure_phi},
    {"gemma", "GemmaForCausalLM", "Gemma", .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .tied = true,
     .act = ACT_GELU_TANH, ATTENTION_BIAS, .names = {LLAMA_NAMES}, .configure = configure_gemma},
    {"gemma2", "Gemma2ForCausalLM", "Gemma 2", .act_key = "hidden_activation",
     .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .tied = true, .act = ACT_GELU_TANH,
     .block = POST_NORM, ATTENTION_BIAS, .windows = {SOME_LAYERS, .absent = 4096, .full_every = 2},
     .names = {POST_NORM_NAMES}, .configure = configure_gemma2},
    {"gemma3_text", "Gemma3ForCausalLM", "Gemma 3 (text)", .act_key = "hidden_activation",
     .window_ropes = true, .norm = NORM_RMS_PLUS_ONE, .head_dim = 256, .rope_theta = 1e6,
     .tied = true, .act = ACT_GELU_TANH, .block = POST_NORM | QK_NORM, ATTENTION_BIAS,
     .windows = {SOME_LAYERS, .absent = 4096, .full_every = 6,
                 .every_key = "sliding_window_pattern"},
     .local_key = "rope_local_base_freq", .local_theta = 10000,
     .names = {POST_NORM_NAMES, QK_NORM_NAMES}, .configure = configure_gemma3},
    {"gemma4_text",
     "Gemma4ForCausalLM",
     "Gemma 4 (text)",
     .act_key = "hidden_activation",
     .window_ropes = true,
     .ropes_say_all = true,
     .partial_rotary = true,
     .head_dim = 256,
     .global_head_dim = 512,
     .max_positions = 131072,
     .tied = true,
     .act = ACT_GELU_TANH,
     .block = POST_NORM | QK_NORM | V_NORM | LAYER_SCALE,
     .block_keys = {{"attention_bias", QKV_BIAS | O_BIAS}, {"enable_moe_block", EXPERTS_BESIDE}},
     .windows = {SOME_LAYERS, .absent = 512, .full_every = 6, .last_full = true},
     .local_theta = 10000,
     .ropes = "{\"full_attention\": {\"rope_type\": \"proportional\","
              "\"partial_rotary_factor\": 0.25, \"rope_theta\": 1e6}}",
     .names = {GEMMA4_NAMES},
     .stored = {[ROLE_EXPERTS_GATE_UP] = LAYER "experts.gate_up_proj",
                [ROLE_EXPERTS_DOWN] = LAYER "experts.down_proj"},
     .stored_rows = true,
     .configure = configure_gemma4},
    {"gemma4", "Gemma4ForConditionalGeneration", "Gemma 4 (text, images and audio)",
     .text_type = "gemma4_text",
     .text_defaults = "{\"vocab_size\": 262144, \"hidden_size\": 2304, \"intermediate_size\": 9216,"
                      "\"num_hidden_layers\": 30, \"num_attention_heads\": 8,"
                      "\"num_key_value_heads\": 4}"},
    {"gemma3", "Gemma3ForConditionalGeneration", "Gemma 3 (text and images)",
     .text_type = "gemma3_text",
     .text_defaults = "{\"vocab_size\": 262208, \"hidden_size\": 2304, \"intermediate_size\": 9216,"
                      "\"num_hidden_layers\": 26, \"num_attention_heads\": 8,"
                      "\"num_key_value_heads\": 4, \"head_dim\": 256,"
                      "\"max_position_embeddings\": 131072}"},
    {"starcoder2", "Starcoder2ForCausalLM", "StarCoder2", .norm = NORM_LAYER,
     .norm_eps_key = "norm_epsilon", .norm_eps = 1e-5, .tied = true, .act = ACT_GELU_TANH,
     .block = QKV_BIAS | O_BIAS | MLP_BIAS | PLAIN_MLP,
     .block_keys = {{"use_bias", QKV_BIAS | O_BIAS | MLP_BIAS}}, .windows = {.of = ALL_LAYERS},
     .names = {COMMON_NAMES, SPLIT_QKV_NAMES, MLP_NORM_NAMES,
               [ROLE_GATE_UP] = LAYER "mlp.c_fc.weight", [ROLE_DOWN] = LAYER "mlp.c_proj.weight"}},
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

const struct family *family_find_text(const char *model_type, const char *text_type)
{
    for (const struct family *f = families; f < families + N_FAMILIES; f++)
        if (f->text_type && strcmp(f->model_type, model_type) == 0 &&
            (!text_type || strcmp(f->text_type, text_type) == 0))
            return f;
    return text_type ? family_find_text(model_type, NULL) : NULL;
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
