/* nemotron.c: what config.json says of Nemotron-H: layers that are Mamba-2, attention without
 * positions, a plain MLP or experts, and nothing else, in an order that is listed. Pure parsing;
 * any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/family.h"
#include "common/base/json.h"
#include <string.h>

// A layer of the list, or of the pattern that older folders have: M, *, - or E; 0: another. The
// words of transformers 5, and of older folders.
static char kind_of_word(const char *word)
{
    static const struct {
        const char *word;
        char kind;
    } words[] = {{"linear_attention", 'M'}, {"mamba", 'M'}, {"full_attention", '*'},
                 {"attention", '*'},        {"mlp", '-'},   {"moe", 'E'}};
    for (size_t i = 0; word && i < sizeof words / sizeof *words; i++)
        if (strcmp(words[i].word, word) == 0) return words[i].kind;
    return 0;
}

// layer_types is transformers' other name, which counts where both are there.
static const json_t *layer_list(const json_t *json)
{
    const json_t *list = json_object_get(json, "layer_types");
    return list ? list : json_object_get(json, "layers_block_type");
}

static const char *layer_pattern(const json_t *json)
{
    const char *pattern = json_string_value(json_object_get(json, "hybrid_override_pattern"));
    return pattern ? pattern : "ME*-";
}

int nemotron_h_layers(const json_t *json)
{
    const json_t *list = layer_list(json);
    return json_is_array(list) ? (int)json_array_size(list) : (int)strlen(layer_pattern(json));
}

static enum status read_kind(const char *where, const json_t *json, int l, char *ret)
{
    const json_t *list = layer_list(json);
    const char *word = json_string_value(json_array_get(list, (size_t)l));
    *ret = json_is_array(list) ? kind_of_word(word) : layer_pattern(json)[l];
    if (*ret && strchr("M*-E", *ret)) return ST_OK;
    return status_fail(
        ST_UNSUPPORTED,
        "%s: layer %d of layers_block_type or hybrid_override_pattern: "
        "linear_attention (M), full_attention (*), mlp (-) and moe (E) are supported",
        where, l);
}

// Keys that have an older name, which counts where both are there.
static enum status read_scan(const char *where, const json_t *json, struct delta_shape *ret)
{
    struct delta_shape s = {.n_key_heads = 8,
                            .n_heads = 128,
                            .key_dim = 128,
                            .head_dim = 64,
                            .taps = 4,
                            .is_scan = true};
    const char *act = "silu";
    double min_step = 0.001;
    enum status st = ST_OK;
    CHECK(json_get_int32(where, json, "n_groups", 1, 1024, &s.n_key_heads));
    CHECK(json_get_int32(where, json, "mamba_n_groups", 1, 1024, &s.n_key_heads));
    CHECK(json_get_int32(where, json, "mamba_num_heads", 1, 1024, &s.n_heads));
    CHECK(json_get_int32(where, json, "mamba_head_dim", 1, DELTA_MAX_DIM, &s.head_dim));
    CHECK(json_get_int32(where, json, "ssm_state_size", 1, DELTA_MAX_DIM, &s.key_dim));
    CHECK(json_get_int32(where, json, "conv_kernel", 2, DELTA_MAX_TAPS, &s.taps));
    CHECK(json_get_int32(where, json, "mamba_d_conv", 2, DELTA_MAX_TAPS, &s.taps));
    // the steps' least; time_step_limit, as in transformers, says nothing
    CHECK(json_get_double(where, json, "time_step_min", 0, 1e6, &min_step));
    CHECK(json_get_double(where, json, "mamba_dt_min", 0, 1e6, &min_step));
    CHECK(json_get_string(where, json, "mamba_hidden_act", &act));
    if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        FAIL(ST_UNSUPPORTED, "%s: mamba_hidden_act is \"%s\"; silu is supported", where, act);
    if (s.n_heads % s.n_key_heads != 0)
        FAIL(ST_FORMAT, "%s: mamba_num_heads %d is not a multiple of n_groups %d", where, s.n_heads,
             s.n_key_heads);
    s.min_step = (float)min_step;
    *ret = s;
out:
    return st;
}

// DeepSeek-V3's router in front of plain experts, and one that every token goes to.
static enum status read_moe(const char *where, const json_t *json, struct model_config *c)
{
    const struct moe_shape moe = {
        .n_experts = 8, .top_k = 2, .n_group = 1, .topk_group = 1, .scale = 1};
    int shared = 7688, latent = 0;
    enum status st = ST_OK;
    if (c->block & MLP_BIAS)
        FAIL(ST_UNSUPPORTED, "%s: mlp_bias is not supported where layers have experts", where);
    CHECK(configure_biased_experts(where, json, c, EXPERTS_EVERYWHERE, 7688, moe));
    CHECK(json_get_int32(where, json, "moe_shared_expert_intermediate_size", 1, 1 << 20, &shared));
    CHECK(json_get_int32(where, json, "moe_latent_size", 1, 1 << 16, &latent));
    for (int l = 0; l < c->n_layers; l++) {
        c->layers[l].shared_intermediate = shared;
        c->layers[l].expert_latent = latent;
    }
out:
    return st;
}

enum status configure_nemotron_h(const char *where, const json_t *json, struct model_config *c)
{
    struct layer_config all = c->layers[0];
    struct delta_shape scan;
    char kind;
    bool experts = false;
    enum status st = ST_OK;
    c->tie_embeddings = false; // as in transformers, whatever the config says
    CHECK(read_scan(where, json, &scan));
    for (int l = 0; l < c->n_layers; l++) {
        CHECK(read_kind(where, json, l, &kind));
        experts |= kind == 'E';
    }
    if (experts) CHECK(read_moe(where, json, c));
    for (int l = 0; l < c->n_layers; l++) {
        struct layer_config *layer = &c->layers[l];
        CHECK(read_kind(where, json, l, &kind));
        if (kind != 'E') *layer = all;
        if (kind == 'M') layer->delta = scan;
        if (kind != '*') layer->n_heads = layer->n_kv_heads = 0;
        if (kind == '*' || kind == 'M') layer->intermediate = 0;
    }
out:
    return st;
}
