/* deepseek.c: what config.json says of the families with latent attention, DeepSeek-V2 and V3 and
 * their relatives, and of those that have its router. Pure parsing; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/family.h"
#include "common/base/json.h"
#include <math.h>
#include <string.h>

// A number that a config.json of these families may write as null: 0 then.
static enum status read_or_null(const char *where, const json_t *json, const char *key, int *field)
{
    if (json_is_null(json_object_get(json, key))) *field = 0;
    return json_get_int32(where, json, key, 0, 1 << 20, field);
}

// What these families' layers have in common; nope, entries of a head that are not rotated, and
// `silent` are those of a silent config.
static enum status latent_attention(const char *where, const json_t *json, struct model_config *c,
                                    int nope, struct latent_config silent)
{
    struct layer_config all = c->layers[0];
    struct latent_config *of = &all.latent;
    struct rope_config *rope = &c->ropes[0];
    bool mlp_bias = false;
    enum status st = ST_OK;
    *of = silent;
    rope->interleaved = true;
    CHECK(json_get_bool(where, json, "mlp_bias", &mlp_bias));
    if (mlp_bias)
        FAIL(ST_UNSUPPORTED, "%s: mlp_bias is not supported (no published DeepSeek has it)", where);
    CHECK(json_get_bool(where, json, "rope_interleave", &rope->interleaved));
    CHECK(json_get_int32(where, json, "kv_lora_rank", 1, 4096, &of->rank));
    CHECK(read_or_null(where, json, "q_lora_rank", &of->q_rank));
    CHECK(json_get_int32(where, json, "qk_nope_head_dim", 1, MAX_HEAD_DIM, &nope));
    CHECK(json_get_int32(where, json, "qk_rope_head_dim", 2, MAX_HEAD_DIM, &of->rope));
    CHECK(json_get_int32(where, json, "v_head_dim", 1, MAX_HEAD_DIM, &of->value));
    if (rope->kind == ROPE_LONGROPE || rope->dim != c->layers[0].head_dim)
        FAIL(ST_UNSUPPORTED,
             "%s: longrope or a partial_rotary_factor is not supported with latent attention",
             where);
    all.head_dim = nope + of->rope;
    if (all.head_dim > MAX_HEAD_DIM || of->rope % 2)
        FAIL(ST_UNSUPPORTED,
             "%s: qk_nope_head_dim %d, qk_rope_head_dim %d: heads of up to %d entries, of which an "
             "even number is rotated, are supported",
             where, nope, of->rope, MAX_HEAD_DIM);
    if (all.n_kv_heads != all.n_heads)
        FAIL(ST_UNSUPPORTED,
             "%s: num_key_value_heads %d: latent attention has as many as num_attention_heads (%d)",
             where, all.n_kv_heads, all.n_heads);
    rope->dim = of->rope;
    all.attn_scale = (float)(rope->mscale_all * rope->mscale_all / sqrt((double)all.head_dim));
    for (int l = 0; l < c->n_layers; l++) c->layers[l] = all;
out:
    return st;
}

// DeepSeek's, of V2 and V3.
static const struct latent_config deepseek_latent = {
    .rank = 512, .rope = 64, .value = 128, .q_rank = 1536};

// Whether layer l has none: as the list says, else where it is one of the first.
static enum status is_dense(const char *where, const json_t *types, int l, int n_layers, int first,
                            bool *ret)
{
    const bool listed = types && !json_is_null(types);
    const char *type = json_string_value(json_array_get(types, (size_t)l));
    *ret = listed ? type && strcmp(type, "dense") == 0 : l < first;
    if (!listed || *ret || (type && strcmp(type, "sparse") == 0)) return ST_OK;
    return status_fail(ST_UNSUPPORTED,
                       "%s: mlp_layer_types[%d] must be one of %d words, dense or sparse", where, l,
                       n_layers);
}

// Experts in the layers from `first` on, of that width, and shared ones, which are one of their
// widths together.
static enum status deepseek_experts(const char *where, const json_t *json, struct model_config *c,
                                    int first, int width, int shared, bool grouped,
                                    struct moe_shape moe)
{
    // what transformers calls n_routed_experts too
    const char *alias = moe.scoring == MOE_SIGMOID ? "num_local_experts" : "num_experts";
    const json_t *types = first == EXPERTS_LISTED ? json_object_get(json, "mlp_layer_types") : NULL;
    bool dense;
    int every = 1;
    double scale = moe.scale;
    enum status st = ST_OK;
    if (first == EXPERTS_LISTED) first = 1;
    if (first >= 0) {
        CHECK(json_get_int32(where, json, "first_k_dense_replace", 0, 1 << 20, &first));
        // which transformers does not read
        CHECK(json_get_int32(where, json, "moe_layer_freq", 1, 1, &every));
        CHECK(read_or_null(where, json, "n_shared_experts", &shared));
    }
    CHECK(json_get_int32(where, json, "n_routed_experts", 1, 1024, &moe.n_experts));
    CHECK(json_get_int32(where, json, alias, 1, 1024, &moe.n_experts));
    CHECK(json_get_int32(where, json, "num_experts_per_tok", 1, moe.n_experts, &moe.top_k));
    CHECK(json_get_int32(where, json, "moe_intermediate_size", 1, 1 << 20, &width));
    CHECK(json_get_bool(where, json, "norm_topk_prob", &moe.norm_topk));
    CHECK(json_get_double(where, json, "routed_scaling_factor", 1e-6, 1e6, &scale));
    CHECK(read_or_null(where, json, "n_group", &moe.n_group));
    CHECK(read_or_null(where, json, "topk_group", &moe.topk_group));
    if ((int64_t)shared * width > 1 << 20)
        FAIL(ST_UNSUPPORTED,
             "%s: n_shared_experts %d of moe_intermediate_size %d: %d together are supported",
             where, shared, width, 1 << 20);
    moe.scale = (float)scale;
    if (grouped && (moe.n_group < 1 || moe.n_experts % moe.n_group != 0 || moe.topk_group < 1 ||
                    moe.topk_group > moe.n_group ||
                    moe.topk_group * (moe.n_experts / moe.n_group) < moe.top_k))
        FAIL(ST_FORMAT,
             "%s: topk_group %d of n_group %d groups of %d experts cannot give "
             "num_experts_per_tok %d",
             where, moe.topk_group, moe.n_group, moe.n_experts, moe.top_k);
    if (!grouped) moe.n_group = 0;
    for (int l = 0; l < c->n_layers; l++) {
        CHECK(is_dense(where, types, l, c->n_layers, first, &dense));
        if (dense) continue;
        c->layers[l].intermediate = width;
        c->layers[l].moe = moe;
        c->layers[l].shared_intermediate = shared * width;
        c->layers[l].router_bias = moe.scoring == MOE_SIGMOID;
    }
out:
    return st;
}

// DeepSeek-V2, V2-Lite, V2.5, Coder-V2.
enum status configure_deepseek_v2(const char *where, const json_t *json, struct model_config *c)
{
    struct moe_shape moe = {.n_experts = 64, .top_k = 1, .scoring = MOE_SOFTMAX, .scale = 1};
    const char *method = "greedy";
    enum status st = ST_OK;
    CHECK(latent_attention(where, json, c, 128, deepseek_latent));
    if (!c->ropes[0].interleaved)
        FAIL(ST_UNSUPPORTED, "%s: rope_interleave is false; DeepSeek-V2 rotates neighbours", where);
    CHECK(json_expect(where, json, "scoring_func", "softmax", "no other is supported"));
    CHECK(json_get_string(where, json, "topk_method", &method));
    if (strcmp(method, "greedy") != 0 && strcmp(method, "group_limited_greedy") != 0)
        FAIL(ST_UNSUPPORTED,
             "%s: topk_method is \"%s\"; greedy and group_limited_greedy are supported", where,
             method);
    if (!json_has(json, "num_experts_per_tok"))
        FAIL(ST_FORMAT, "%s: num_experts_per_tok is missing", where);
    if (strcmp(method, "greedy") != 0 &&
        !(json_has(json, "n_group") && json_has(json, "topk_group")))
        FAIL(ST_FORMAT, "%s: topk_method group_limited_greedy needs n_group and topk_group", where);
    CHECK(deepseek_experts(where, json, c, 0, 1407, 2, strcmp(method, "greedy") != 0, moe));
    for (int l = 0; l < c->n_layers; l++) {
        if (c->layers[l].moe.norm_topk)
            FAIL(ST_UNSUPPORTED,
                 "%s: norm_topk_prob: no published DeepSeek-V2 has it, and implementations differ",
                 where);
    }
out:
    return st;
}

// Of DeepSeek-V3 and those like it: a sigmoid's scores, a bias for the pick, and layers that
// predict further tokens.
enum status configure_biased_experts(const char *where, const json_t *json, struct model_config *c,
                                     int first, int width, struct moe_shape moe)
{
    int rope = c->layers[0].latent.rope;
    enum status st = ST_OK;
    if (rope > 0) CHECK(json_get_int32(where, json, "head_dim", 2, 256, &rope));
    if (rope != c->layers[0].latent.rope)
        FAIL(ST_FORMAT, "%s: head_dim %d is not qk_rope_head_dim %d", where, rope,
             c->layers[0].latent.rope);
    moe.scoring = MOE_SIGMOID;
    moe.norm_topk = true;
    CHECK(json_expect(where, json, "scoring_func", "sigmoid", "no other is supported"));
    CHECK(json_expect(where, json, "topk_method", "noaux_tc", "no other is supported"));
    CHECK(deepseek_experts(where, json, c, first, width, 1, true, moe));
    CHECK(read_or_null(where, json, "num_nextn_predict_layers", &c->n_mtp_layers));
out:
    return st;
}

// DeepSeek-V3, Moonlight.
enum status configure_deepseek_v3(const char *where, const json_t *json, struct model_config *c)
{
    const struct moe_shape moe = {
        .n_experts = 256, .top_k = 8, .n_group = 8, .topk_group = 4, .scale = 2.5f};
    static const char *const flags[] = {"rope_interleave", "norm_topk_prob"};
    enum status st = ST_OK;
    for (int i = 0; i < 2; i++) // which transformers takes for false
        if (json_is_null(json_object_get(json, flags[i])))
            FAIL(ST_FORMAT, "%s: %s is null; true and false are supported", where, flags[i]);
    CHECK(latent_attention(where, json, c, 128, deepseek_latent));
    c->n_mtp_layers = 1;
    st = configure_biased_experts(where, json, c, 3, 2048, moe);
out:
    return st;
}

// GLM-4.7-Flash.
enum status configure_glm4_moe_lite(const char *where, const json_t *json, struct model_config *c)
{
    const struct latent_config latent = {.rank = 512, .rope = 64, .value = 256, .q_rank = 768};
    const struct moe_shape moe = {
        .n_experts = 64, .top_k = 4, .n_group = 1, .topk_group = 1, .scale = 1.8f};
    enum status st = ST_OK;
    CHECK(latent_attention(where, json, c, 192, latent));
    st = configure_biased_experts(where, json, c, EXPERTS_LISTED, 1536, moe);
out:
    return st;
}

// GLM-4.5, 4.6 and 4.7: Llama's attention in front of V3's experts.
enum status configure_glm4_moe(const char *where, const json_t *json, struct model_config *c)
{
    const struct moe_shape moe = {
        .n_experts = 128, .top_k = 8, .n_group = 1, .topk_group = 1, .scale = 1};
    enum status st = ST_OK;
    c->n_mtp_layers = 1;
    CHECK(read_or_null(where, json, "num_mtp_layers", &c->n_mtp_layers));
    st = configure_biased_experts(where, json, c, 1, 1408, moe);
out:
    return st;
}

// MiniMax-M2: experts in every layer, picked with a bias by their sigmoid, whose rotated part of a
// head goes by a name of its own.
enum status configure_minimax_m2(const char *where, const json_t *json, struct model_config *c)
{
    const json_t *ropes = json_object_get(json, "rope_parameters");
    int rotated = c->ropes[0].dim;
    enum status st = ST_OK;
    if (!json_has(json, "partial_rotary_factor") && !json_has(ropes, "partial_rotary_factor"))
        CHECK(json_get_int32(where, json, "rotary_dim", 2, c->layers[0].head_dim, &rotated));
    if (rotated % 2 != 0)
        FAIL(ST_UNSUPPORTED, "%s: rotary_dim is %d; an even number is needed", where, rotated);
    CHECK(json_expect(where, json, "scoring_func", "sigmoid", "no other is supported"));
    c->ropes[0].dim = rotated;
    for (int l = 0; l < c->n_layers; l++) {
        c->layers[l].moe.scoring = MOE_SIGMOID;
        c->layers[l].moe.n_group = c->layers[l].moe.topk_group = 1;
        c->layers[l].router_bias = true;
    }
    c->router_aux_loss_coef = 0; // the bias balances
out:
    return st;
}
