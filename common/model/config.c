/* config.c: reads config.json, in the older style (rope_theta, rope_scaling, torch_dtype) and the
 * newer (rope_parameters, dtype), and generation_config.json's stop tokens. Every number is checked
 * against what the kernels can do before anything is allocated from it. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/config.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/names.h"
#include "common/model/family.h"
#include "common/model/fp8_folder.h"
#include "common/model/model_folder.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CONFIG_BYTES ((size_t)16 << 20)

static enum status read_activation(const char *where, const json_t *json, struct model_config *c)
{
    const char *name = NULL, *key = c->family->act_key ? c->family->act_key : "hidden_act";
    enum status st = json_get_string(where, json, key, &name);
    c->act = c->family->act;
    if (st != ST_OK || !name) return st;
    static const char *const names[] = {
        "silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu", "relu2", "relu", NULL};
    static const enum act_kind kinds[] = {ACT_SILU, ACT_SILU,  ACT_GELU_TANH, ACT_GELU_TANH,
                                          ACT_GELU, ACT_RELU2, ACT_RELU};
    int i = name_find(names, name);
    if (i < 0)
        return status_fail(ST_UNSUPPORTED,
                           "%s: %s is \"%s\"; silu, gelu, gelu_new, gelu_pytorch_tanh, relu and "
                           "relu2 are supported",
                           where, key, name);
    c->act = kinds[i];
    return ST_OK;
}

static enum status add_eos(const char *where, const json_t *value, struct model_config *c)
{
    if (!json_is_integer(value))
        return status_fail(ST_FORMAT, "%s: eos_token_id must be an integer or a list of them",
                           where);
    json_int_t id = json_integer_value(value);
    if (id < 0 || id >= c->vocab_size)
        return status_fail(ST_FORMAT, "%s: eos_token_id %lld is outside the vocabulary of %d",
                           where, (long long)id, c->vocab_size);
    for (int i = 0; i < c->n_eos; i++)
        if (c->eos_ids[i] == (int)id) return ST_OK;
    if (c->n_eos == (int)(sizeof c->eos_ids / sizeof c->eos_ids[0]))
        return status_fail(ST_UNSUPPORTED, "%s: more than %d eos_token_id values", where, c->n_eos);
    c->eos_ids[c->n_eos++] = (int)id;
    return ST_OK;
}

static enum status read_eos(const char *where, const json_t *json, struct model_config *c)
{
    const json_t *eos = json_object_get(json, "eos_token_id");
    const bool list = json_is_array(eos);
    const size_t n = list ? json_array_size(eos) : json_has(json, "eos_token_id");
    enum status st = ST_OK;
    for (size_t i = 0; st == ST_OK && i < n; i++)
        st = add_eos(where, list ? json_array_get(eos, i) : eos, c);
    return st;
}

// Sizes of the model, and those that all layers have unless the family says otherwise.
static enum status read_sizes(const char *where, const json_t *json, struct model_config *c,
                              struct layer_config *all)
{
    struct {
        const char *key;
        int max, *field;
    } needed[] = {
        {"vocab_size", 1 << 24, &c->vocab_size},
        {"hidden_size", 1 << 16, &c->hidden},
        {"intermediate_size", 1 << 20, &all->intermediate},
        {"num_hidden_layers", 1024, &c->n_layers},
        {"num_attention_heads", 1024, &all->n_heads},
    };
    enum status st = ST_OK;
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
        if (needed[i].field == &all->intermediate && c->family->experts.everywhere)
            all->intermediate = c->family->experts.width; // which no layer has
        else if (needed[i].field == &c->n_layers && c->family->count_layers) {
            c->n_layers = c->family->count_layers(json);
            if (c->n_layers < 1 || c->n_layers > 1024)
                FAIL(ST_FORMAT, "%s: layers_block_type lists %d layers; 1 to 1024 are supported",
                     where, c->n_layers);
            continue;
        } else if (!json_has(json, needed[i].key))
            FAIL(ST_FORMAT, "%s: %s is missing", where, needed[i].key);
        CHECK(json_get_int32(where, json, needed[i].key, 1, needed[i].max, needed[i].field));
    }
    const bool silent = !json_object_get(json, "num_key_value_heads");
    all->n_kv_heads = silent && c->family->kv_heads ? c->family->kv_heads : all->n_heads;
    CHECK(json_get_int32(where, json, "num_key_value_heads", 1, 1024, &all->n_kv_heads));
    all->head_dim = c->family->head_dim ? c->family->head_dim : c->hidden / all->n_heads;
    if (!json_has(json, "head_dim") && !c->family->head_dim && c->hidden % all->n_heads != 0)
        FAIL(ST_FORMAT,
             "%s: hidden_size %d is not a multiple of num_attention_heads %d, and there is "
             "no head_dim",
             where, c->hidden, all->n_heads);
    CHECK(json_get_int32(where, json, "head_dim", 2, MAX_HEAD_DIM, &all->head_dim));
    if (all->n_heads % all->n_kv_heads != 0)
        st = status_fail(ST_FORMAT,
                         "%s: num_attention_heads %d is not a multiple of num_key_value_heads %d",
                         where, all->n_heads, all->n_kv_heads);
    else if (all->head_dim % 2 != 0 || all->head_dim > MAX_HEAD_DIM)
        st = status_fail(ST_UNSUPPORTED, "%s: head_dim %d; even sizes up to %d are supported",
                         where, all->head_dim, MAX_HEAD_DIM);
    c->max_positions = c->family->max_positions > 0 ? c->family->max_positions : 2048;
    if (st == ST_OK)
        st = json_get_int32(where, json, "max_position_embeddings", 1, 1 << 24, &c->max_positions);
out:
    return st;
}

// What holds unless the config or the family's own keys say otherwise. The sizes were read.
static enum status apply_defaults(const char *where, struct layer_config *all,
                                  struct model_config *c)
{
    c->block = c->family->block;
    c->norm = c->family->norm;
    c->rotary_share = c->family->rotary_share > 0 ? c->family->rotary_share : 1;
    c->tie_embeddings = c->family->tied;
    c->embed_scale = c->residual_scale = c->logit_scale = 1;
    all->kv_from = all->kv_shared = -1;
    all->attn_scale = (float)(1.0 / sqrt((double)all->head_dim));
    c->layers = calloc((size_t)c->n_layers, sizeof *c->layers);
    if (!c->layers) return status_fail(ST_NO_MEMORY, "%s: no memory for the config", where);
    for (int l = 0; l < c->n_layers; l++) c->layers[l] = *all;
    c->whole = c->layers;
    c->shard = (struct shard){0, 1};
    return ST_OK;
}

bool left_out_describe(const struct model_config *config, char *ret, size_t size)
{
    const int n = config->mtp ? 0 : config->n_mtp_layers;
    char layer[32] = "mtp.layers.0", further[160] = "";
    if (config->mtp || (n == 0 && !config->is_text_part)) return false;
    if (!config->family->mtp_prefix)
        snprintf(layer, sizeof layer, "model.layers.%d", config->n_layers);
    if (n > 0)
        snprintf(further, sizeof further,
                 "%s, which predicts further tokens, is no part of it, nor of what is saved "
                 "(--speculative mtp drafts with it, where the folder has it)",
                 layer);
    snprintf(ret, size, "%s%s%s",
             config->is_text_part
                 ? "what reads images is not loaded: it is served and trained as a "
                   "text model, and saved as one"
                 : "",
             config->is_text_part && n > 0 ? "; " : "", further);
    return true;
}

enum status model_config_take_mtp(const char *folder, struct model_config *c)
{
    int l = c->n_layers - 1;
    while (l > 0 && c->layers[l].n_heads == 0) l--;
    if (c->n_mtp_layers == 0 || !c->family->mtp_norm || c->layers[l].n_heads == 0)
        return status_fail(ST_NOT_FOUND,
                           "%s: its config.json names no layers that predict further tokens "
                           "(num_nextn_predict_layers, mtp_num_hidden_layers): take another method "
                           "than mtp",
                           folder);
    c->first_layer = c->family->mtp_prefix ? 0 : c->n_layers;
    c->layers[0] = c->layers[l];
    c->n_layers = 1;
    c->mtp = true;
    c->tie_embeddings = false;
    return ST_OK;
}

int64_t config_kv_elements(const struct model_config *config)
{
    int64_t n = 0;
    for (int l = 0; l < config->n_layers; l++) {
        const struct layer_config *layer = &config->layers[l];
        n += layer_cached_width(layer) * (layer->latent.rank > 0 ? 1 : 2);
    }
    return n;
}

int64_t config_kv_bytes(const struct model_config *config, enum dtype dt)
{
    const int64_t elements = config_kv_elements(config);
    if (config->kv_cache == KV_CACHE_AUTO) return elements * (int64_t)dtype_size(dt);
    int64_t heads = 0;
    for (int l = 0; l < config->n_layers; l++)
        if (config->layers[l].kv_from < 0) heads += layer_kv_heads(&config->layers[l]);
    return elements + heads * KV_SCALES;
}

int64_t config_state_elements(const struct model_config *config)
{
    int64_t n = 0;
    for (int l = 0; l < config->n_layers; l++)
        if (config->layers[l].delta.n_heads > 0)
            n += delta_state_elements(&config->layers[l].delta);
    return n;
}

void model_config_draft_ahead(struct model_config *config, int n)
{
    for (int l = 0; l < config->n_layers; l++)
        if (config->layers[l].delta.n_heads > 0) config->layers[l].delta.ahead = config->ahead = n;
}

const char *const stored_form_notes[] = {
    [STORED_PLAIN] = NULL,
    [STORED_MXFP4] = "its experts' MXFP4 weights become ordinary ones of the model's dtype, and "
                     "checkpoints are saved with those",
    [STORED_FP8] = "its FP8 matrices become ordinary ones of the model's dtype (with "
                   "--quantization they are multiplied in e4m3), and checkpoints are saved with "
                   "those",
};

static enum status read_quantization(const char *where, const json_t *json, struct model_config *c)
{
    const json_t *object = json_object_get(json, "quantization_config");
    const char *method = "";
    enum status st = ST_OK;
    if (!json_has(json, "quantization_config")) return ST_OK;
    CHECK(json_get_string(where, object, "quant_method", &method));
    const bool mxfp4 = c->family->stored[ROLE_EXPERTS_GATE_UP] && strcmp(method, "mxfp4") == 0;
    if (!mxfp4) CHECK(fp8_config_read(where, object, c->fp8_block));
    c->stored = mxfp4 ? STORED_MXFP4 : STORED_FP8;
out:
    return st;
}

static enum status read_config(const char *where, json_t *json, struct model_config *c)
{
    const char *type = "", *architecture = "", *dtype;
    char torch_name[32];
    double eps = 1e-6;
    bool causal = true;
    struct layer_config all = {0};
    enum status st = ST_OK;
    if (!json_is_object(json)) return status_fail(ST_FORMAT, "%s: not a JSON object", where);
    CHECK(json_get_string(where, json, "model_type", &type));
    const json_t *list = json_object_get(json, "architectures");
    if (json_is_string(json_array_get(list, 0)))
        architecture = json_string_value(json_array_get(list, 0));
    const struct family *f = c->family = family_find(type, architecture);
    if (!f)
        FAIL(ST_UNSUPPORTED,
             "%s: model_type \"%s\", architecture \"%s\" is not supported; supported: %s", where,
             type, architecture, family_list());
    CHECK(read_quantization(where, json, c));
    CHECK(json_get_bool(where, json, "is_causal", &causal));
    if (!causal)
        FAIL(ST_UNSUPPORTED, "%s: is_causal is false: a token would see those behind it", where);
    if (f->norm_eps > 0) eps = f->norm_eps;
    snprintf(c->model_type, sizeof c->model_type, "%s", type);
    snprintf(c->architecture, sizeof c->architecture, "%s", f->architecture);
    CHECK(read_sizes(where, json, c, &all));
    if (json_has(json, "layer_types") &&
        (int)json_array_size(json_object_get(json, "layer_types")) != c->n_layers)
        FAIL(ST_FORMAT, "%s: layer_types must be a list of num_hidden_layers (%d) words", where,
             c->n_layers);
    CHECK(apply_defaults(where, &all, c));
    CHECK(json_get_double(where, json, f->norm_eps_key ? f->norm_eps_key : "rms_norm_eps", 0, 1,
                          &eps));
    c->norm_eps = (float)eps;
    CHECK(json_get_bool(where, json, "tie_word_embeddings", &c->tie_embeddings));
    dtype = c->stored ? "bfloat16" : "float32";
    CHECK(json_get_string(where, json, "torch_dtype", &dtype));
    CHECK(json_get_string(where, json, "dtype", &dtype));
    snprintf(torch_name, sizeof torch_name, "torch.%s", dtype);
    int file_dtype = dtype_from_name(torch_name);
    c->file_dtype = file_dtype < 0 ? DT_F32 : (enum dtype)file_dtype;
    CHECK(read_activation(where, json, c));
    CHECK(family_layers(where, json, c));
    if (!f->no_positions) CHECK(rope_config_read(where, json, c));
    for (int l = 0; f->no_positions && l < c->n_layers; l++) c->layers[l].rope = -1;
    c->bos_id = c->pad_id = -1;
    CHECK(json_get_int32(where, json, "bos_token_id", -1, c->vocab_size - 1, &c->bos_id));
    CHECK(json_get_int32(where, json, "pad_token_id", -1, c->vocab_size - 1, &c->pad_id));
    CHECK(read_eos(where, json, c));
    CHECK(family_configure(where, json, c));
    for (int l = 0; l < c->n_layers; l++)
        if (c->layers[l].moe.top_k > c->layers[l].moe.n_experts)
            FAIL(ST_FORMAT, "%s: num_experts_per_tok is %d, of %d experts", where,
                 c->layers[l].moe.top_k, c->layers[l].moe.n_experts);
    c->source = c->stored ? json_copy(json) : json_incref(json);
    if (c->stored) json_object_del(c->source, "quantization_config"); // no checkpoint is quantised
out:
    return st;
}

// The config of the text model that a folder's model has beside what reads images, as such a text
// model has it by itself; `json` where the folder's is nothing else. The caller's reference.
static enum status text_config(const char *where, json_t *json, json_t **ret)
{
    static const char *const shared[] = {"torch_dtype",  "dtype",        "eos_token_id",
                                         "bos_token_id", "pad_token_id", "quantization_config"};
    const char *type = json_string_value(json_object_get(json, "model_type"));
    json_t *config = json_object_get(json, "text_config"), *defaults = NULL;
    const char *text_type = json_string_value(json_object_get(config, "model_type"));
    const struct family *f = type ? family_find_text(type, text_type) : NULL, *text;
    json_t *tied = json_object_get(json, "tie_word_embeddings"); // the whole model's word counts
    enum status st = ST_OK;
    if (!f) {
        *ret = json_incref(json);
        return ST_OK;
    }
    if (!json_is_object(config)) FAIL(ST_FORMAT, "%s: text_config must be an object", where);
    config = json_deep_copy(config);
    defaults = json_loads(f->text_defaults, 0, NULL);
    text = family_find(f->text_type, "");
    json_object_update_missing(config, defaults);
    for (size_t i = 0; i < sizeof shared / sizeof shared[0]; i++) {
        json_t *value = json_object_get(json, shared[i]);
        if (value && !json_has(config, shared[i])) json_object_set(config, shared[i], value);
    }
    if (tied && !json_is_null(tied)) json_object_set(config, "tie_word_embeddings", tied);
    json_object_set_new(config, "model_type", json_string(text->model_type));
    if (json_object_set_new(config, "architectures", json_pack("[s]", text->architecture)) != 0) {
        json_decref(config);
        FAIL(ST_NO_MEMORY, "%s: no memory for the config", where);
    }
    *ret = config;
out:
    json_decref(defaults);
    return st;
}

enum status model_config_from_json(const char *where, json_t *json, struct model_config **ret)
{
    json_t *text = NULL;
    enum status st = ST_OK;
    struct model_config *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "%s: no memory for the config", where);
    CHECK(text_config(where, json, &text));
    CHECK(read_config(where, text, c));
    c->is_text_part = text != json;
    *ret = TAKE_PTR(c);
out:
    json_decref(text);
    model_config_free(c);
    return st;
}

enum status model_config_load_file(const char *path, struct model_config **ret)
{
    json_t *json = NULL;
    enum status st = model_config_path_check(path);
    if (st == ST_OK) st = json_read_file(path, MAX_CONFIG_BYTES, &json);
    if (st == ST_OK) st = model_config_from_json(path, json, ret);
    json_decref(json);
    return st;
}

// modelopt's older exports say in a file of their own what config.json says in newer ones.
static enum status add_modelopt(const char *folder, json_t *json)
{
    json_t *file = NULL;
    if (json_has(json, "quantization_config")) return ST_OK;
    enum status st = model_file_read_json(folder, "hf_quant_config.json", 1 << 20, &file);
    json_t *config = json_object_get(file, "quantization");
    if (json_is_object(config)) {
        json_object_set_new(config, "quant_method", json_string("modelopt"));
        json_object_set(json, "quantization_config", config);
    }
    json_decref(file);
    return st;
}

enum status model_config_load(const char *folder, struct model_config **ret)
{
    struct model_config *c = NULL;
    json_t *json = NULL, *generation = NULL;
    char path[PATH_ROOM];
    enum status st = ST_OK;
    CHECK(model_folder_check(folder, "config.json"));
    CHECK(path_put(path, folder, "config.json"));
    CHECK(model_file_read_json(folder, "config.json", MAX_CONFIG_BYTES, &json));
    CHECK(add_modelopt(folder, json));
    CHECK(model_config_from_json(path, json, &c));
    CHECK(path_put(path, folder, "generation_config.json"));
    CHECK(model_file_read_json(folder, "generation_config.json", 1 << 20, &generation));
    CHECK(read_eos(path, generation, c));
    *ret = TAKE_PTR(c);
out:
    json_decref(json);
    json_decref(generation);
    model_config_free(c);
    return st;
}

// ---- shards -------------------------------------------------------------------------------------

// The number becomes a rank's share of it.
static enum status share(const struct model_config *c, const char *key, int *number, int size)
{
    if (*number % size != 0)
        return status_fail(ST_INVALID,
                           "%s: %s is %d, which %d ranks cannot share evenly; take a "
                           "--tensor-parallel-size that divides it",
                           c->architecture, key, *number, size);
    *number /= size;
    return ST_OK;
}

static enum status shard_layer(const struct model_config *c, struct layer_config *l, int size)
{
    struct delta_shape *s = &l->delta;
    enum status st;
    CHECK(share(c, s->is_scan ? "n_groups" : "linear_num_key_heads", &s->n_key_heads, size));
    if (delta_is_conv(s))
        CHECK(share(c, "hidden_size", &s->head_dim, size)); // its channels are those of one head
    else
        s->n_heads /= size;
    CHECK(share(c, "num_attention_heads", &l->n_heads, size));
    if (l->n_kv_heads > 0 && size % l->n_kv_heads == 0)
        l->n_kv_heads = 1;
    else
        CHECK(share(c, "num_key_value_heads", &l->n_kv_heads, size));
    if (c->expert_parallel && l->moe.n_experts % size != 0)
        FAIL(ST_INVALID,
             "%s: it has %d experts, which %d ranks cannot share evenly; take a "
             "--tensor-parallel-size that divides them, or leave --expert-parallel away",
             c->architecture, l->moe.n_experts, size);
    if (c->expert_parallel && l->moe.n_experts > 0) return ST_OK;
    CHECK(share(c, l->moe.n_experts > 0 ? "an expert's width" : "intermediate_size",
                &l->intermediate, size));
    CHECK(share(c, "shared_expert_intermediate_size", &l->shared_intermediate, size));
out:
    return st;
}

enum status model_config_quantise(struct model_config *c, enum quantization quantization,
                                  bool alone)
{
    const bool mxfp4 = quantization == QUANTIZATION_MXFP4;
    if (mxfp4 && c->stored != STORED_MXFP4)
        return status_fail(ST_UNSUPPORTED,
                           "--quantization mxfp4 keeps experts in the four bits in which a folder "
                           "stores them (gpt-oss's, quant_method mxfp4), and this %s has none",
                           c->architecture);
    c->quantization = quantization;
    c->twin_alone = quantization && (alone || mxfp4);
    return ST_OK;
}

enum status model_config_shard(struct model_config *c, struct shard shard)
{
    const size_t bytes = (size_t)c->n_layers * sizeof *c->layers;
    struct layer_config *layers = NULL;
    int vocab = config_embedded(c), layer_vocab = c->layer_input_vocab;
    enum status st = ST_OK;
    if (shard.size == 1) return ST_OK;
    if (c->expert_parallel && config_experts(c) == 0)
        FAIL(ST_INVALID, "%s: it has no experts; leave --expert-parallel away", c->architecture);
    if (c->quantization == QUANTIZATION_MXFP4 && !c->expert_parallel)
        FAIL(ST_INVALID,
             "%s: experts in MXFP4 are not cut; give --expert-parallel, leave "
             "--tensor-parallel-size at 1, or --quantization mxfp4 away",
             c->architecture);
    CHECK(share(c, "vocab_size", &vocab, shard.size));
    if (c->layer_input > 0) CHECK(share(c, "vocab_size_per_layer_input", &layer_vocab, shard.size));
    layers = malloc(bytes);
    if (!layers) FAIL(ST_NO_MEMORY, "no memory for a shard's config");
    memcpy(layers, c->whole, bytes);
    for (int l = 0; l < c->n_layers; l++) CHECK(shard_layer(c, &layers[l], shard.size));
    c->layers = TAKE_PTR(layers);
    c->shard = shard;
out:
    free(layers);
    return st;
}

void model_config_free(struct model_config *config)
{
    if (!config) return;
    for (int i = 0; i < config->n_ropes; i++) {
        if (i > 0 && i == config->query_rope) continue; // its lists are those of the keys' table
        free(config->ropes[i].short_factor);
        free(config->ropes[i].long_factor);
    }
    if (config->whole != config->layers) free(config->whole);
    free(config->layers);
    json_decref(config->source);
    free(config);
}
