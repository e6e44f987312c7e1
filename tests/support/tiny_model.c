/* tiny_model.c: random matrices are scaled to keep a row's length, and biases and norms are not at
 * their neutral values, so that a part that is left out of the forward pass changes the logits, and
 * greedy text wanders instead of repeating one token. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tiny_model.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "common/model/safetensors.h"
#include "tests/support/support.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define HEAD_DIM 16
#define SAMPLED_MAX                                                                                \
    ((size_t)1 << 18) // a larger tensor, which a test has for its size, repeats these

struct writer {
    struct safetensors_source *tensors;
    int n;
    uint64_t seed;
};

static void add(struct writer *w, const char *format, int layer, int64_t rows, int64_t cols)
{
    struct safetensors_source *t = &w->tensors[w->n++];
    if (layer < 0)
        snprintf(t->name, sizeof t->name, "%s", format);
    else
        snprintf(t->name, sizeof t->name, "model.layers.%d.%s.%s", layer, format,
                 cols || strstr(format, "norm") ? "weight" : "bias");
    t->dt = DT_F32;
    t->n_dims = cols ? 2 : 1;
    t->shape[0] = rows;
    t->shape[1] = cols;
    t->tag = t;
}

static enum status fill(void *context, const struct safetensors_source *t, size_t bytes, void *to)
{
    const struct writer *w = context;
    const bool norm = strstr(t->name, "norm") != NULL;
    const size_t n = bytes / sizeof(float), sampled = n < SAMPLED_MAX ? n : SAMPLED_MAX;
    float *x = to, scale = 0.1f;
    struct rng r;
    if (t->n_dims == 2) scale = strstr(t->name, "embed") ? 1.0f : 1.5f / sqrtf((float)t->shape[1]);
    rng_init(&r, w->seed, (uint64_t)((const struct safetensors_source *)t->tag - w->tensors));
    for (size_t i = 0; i < sampled; i++) x[i] = scale * rng_normal(&r) + (norm ? 1.0f : 0.0f);
    for (size_t i = sampled; i < n; i++) x[i] = x[i - sampled];
    return ST_OK;
}

enum status tiny_json_write(const char *folder, const char *name, json_t *json)
{
    char path[PATH_ROOM];
    enum status st = path_put(path, folder, "%s", name);
    if (!json) st = status_fail(ST_NO_MEMORY, "no memory for a tiny model");
    if (st == ST_OK) st = json_write_file(path, 0644, json);
    json_decref(json);
    return st;
}

static enum status write_config(const char *folder, const struct tiny_model *m, int intermediate,
                                int max_positions)
{
    const int heads = m->hidden / HEAD_DIM;
    json_t *config = json_pack(
        "{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:b, s:s, s:s}", "architectures",
        "Qwen2ForCausalLM", "model_type", "qwen2", "vocab_size", m->vocab, "hidden_size", m->hidden,
        "intermediate_size", intermediate, "num_hidden_layers", m->layers, "num_attention_heads",
        heads, "num_key_value_heads", heads / 2, "max_position_embeddings", max_positions,
        "rms_norm_eps", 1e-6, "rope_theta", 10000.0, "tie_word_embeddings", m->tie_embeddings,
        "hidden_act", "silu", "torch_dtype", "float32");
    if (m->eos_id >= 0) json_object_set_new(config, "eos_token_id", json_integer(m->eos_id));
    return tiny_json_write(folder, "config.json", config);
}

enum status tiny_model_write_as(const char *folder, const struct tiny_model *m)
{
    const int h = m->hidden, kv = h / 2, inner = m->intermediate ? m->intermediate : 2 * h;
    if (h < 2 * HEAD_DIM || h % (2 * HEAD_DIM) != 0 || m->layers < 1 || m->vocab < 2)
        return status_fail(ST_INVALID, "tiny model of hidden %d, %d layers, %d tokens", h,
                           m->layers, m->vocab);
    enum status st = file_make_folders(folder);
    if (st != ST_OK) return st;
    char path[PATH_ROOM];
    struct writer w = {.seed = m->seed};
    w.tensors = calloc((size_t)m->layers * 12 + 3, sizeof *w.tensors);
    if (!w.tensors) FAIL(ST_NO_MEMORY, "no memory for a tiny model");
    CHECK(path_put(path, folder, "model.safetensors"));
    CHECK(write_config(folder, m, inner, m->max_positions ? m->max_positions : 512));
    add(&w, "model.embed_tokens.weight", -1, m->vocab, h);
    for (int l = 0; l < m->layers; l++) {
        add(&w, "input_layernorm", l, h, 0);
        add(&w, "self_attn.q_proj", l, h, h);
        add(&w, "self_attn.q_proj", l, h, 0);
        add(&w, "self_attn.k_proj", l, kv, h);
        add(&w, "self_attn.k_proj", l, kv, 0);
        add(&w, "self_attn.v_proj", l, kv, h);
        add(&w, "self_attn.v_proj", l, kv, 0);
        add(&w, "self_attn.o_proj", l, h, h);
        add(&w, "post_attention_layernorm", l, h, 0);
        add(&w, "mlp.gate_proj", l, inner, h);
        add(&w, "mlp.up_proj", l, inner, h);
        add(&w, "mlp.down_proj", l, h, inner);
    }
    add(&w, "model.norm.weight", -1, h, 0);
    if (!m->tie_embeddings) add(&w, "lm_head.weight", -1, m->vocab, h);
    CHECK(safetensors_write(path, w.tensors, w.n, NULL, fill, &w));
out:
    free(w.tensors);
    return st;
}

enum status tiny_model_write(const char *folder, int hidden, int layers, int vocab, uint64_t seed)
{
    const struct tiny_model shape = {
        .hidden = hidden, .layers = layers, .vocab = vocab, .eos_id = -1, .seed = seed};
    return tiny_model_write_as(folder, &shape);
}

const char *tiny_folder_as(const struct tiny_model *shape)
{
    const char *folder = test_folder();
    assert_ok(tiny_model_write_as(folder, shape));
    return folder;
}

const char *tiny_folder(int hidden, int layers, int vocab, uint64_t seed)
{
    const char *folder = test_folder();
    assert_ok(tiny_model_write(folder, hidden, layers, vocab, seed));
    return folder;
}
