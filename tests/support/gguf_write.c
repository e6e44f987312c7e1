/* gguf_write.c: see gguf_write.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/gguf_write.h"
#include "common/base/dtype.h"
#include "common/model/safetensors.h"
#include "tests/support/support.h"

enum { ALIGNMENT = 32, U32 = 4, I32 = 5, F32 = 6, BOOL = 7, STRING = 8, ARRAY = 9 };

static void put_number(struct bytes *to, uint64_t x, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) bytes_append(to, &(uint8_t){(uint8_t)(x >> 8 * i)}, 1);
}

static void put_text(struct bytes *to, const char *text, size_t len)
{
    put_number(to, len, 8);
    bytes_append(to, text, len);
}

static uint32_t type_of(const json_t *value, uint32_t integer)
{
    return json_is_string(value)    ? STRING
           : json_is_boolean(value) ? BOOL
           : json_is_real(value)    ? F32
                                    : integer;
}

static void put_scalar(struct bytes *to, const json_t *value)
{
    const float f = (float)json_real_value(value);
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if (json_is_string(value))
        put_text(to, json_string_value(value), json_string_length(value));
    else if (json_is_boolean(value))
        put_number(to, json_is_true(value), 1);
    else
        put_number(to, json_is_real(value) ? u : (uint32_t)json_integer_value(value), 4);
}

void gguf_put(struct gguf_writer *w, const char *key, const json_t *value)
{
    const json_t *one;
    size_t i;
    put_text(&w->metadata, key, strlen(key));
    w->n_metadata++;
    if (!json_is_array(value)) {
        put_number(&w->metadata, type_of(value, U32), 4);
        put_scalar(&w->metadata, value);
        return;
    }
    put_number(&w->metadata, ARRAY, 4);
    put_number(&w->metadata, type_of(json_array_get(value, 0), I32), 4);
    put_number(&w->metadata, json_array_size(value), 8);
    json_array_foreach (value, i, one) put_scalar(&w->metadata, one);
}

static void put_new(struct gguf_writer *w, const char *key, json_t *value)
{
    assert_non_null(value);
    gguf_put(w, key, value);
    json_decref(value);
}

void gguf_put_tensor(struct gguf_writer *w, const char *name, int n_dims, const int64_t *shape,
                     uint32_t type, const void *data, size_t len)
{
    static const char zeros[ALIGNMENT];
    put_text(&w->tensors, name, strlen(name));
    put_number(&w->tensors, (uint64_t)n_dims, 4);
    for (int d = n_dims - 1; d >= 0; d--) put_number(&w->tensors, (uint64_t)shape[d], 8);
    put_number(&w->tensors, type, 4);
    put_number(&w->tensors, w->data.len, 8);
    bytes_append(&w->data, data, len);
    bytes_append(&w->data, zeros, (ALIGNMENT - len % ALIGNMENT) % ALIGNMENT);
    w->n_tensors++;
}

void gguf_finish(struct gguf_writer *w, struct bytes *ret)
{
    static const char zeros[ALIGNMENT];
    bytes_clear(ret);
    bytes_puts(ret, "GGUF");
    put_number(ret, 3, 4);
    put_number(ret, w->n_tensors, 8);
    put_number(ret, w->n_metadata, 8);
    bytes_append(ret, w->metadata.data, w->metadata.len);
    bytes_append(ret, w->tensors.data, w->tensors.len);
    bytes_append(ret, zeros, (ALIGNMENT - ret->len % ALIGNMENT) % ALIGNMENT);
    bytes_append(ret, w->data.data, w->data.len);
    assert_ok(bytes_status(ret));
    bytes_release(&w->metadata);
    bytes_release(&w->tensors);
    bytes_release(&w->data);
    *w = (struct gguf_writer){.metadata = BYTES_INIT};
}

// ---- a folder -----------------------------------------------------------------------------------
static const char *const keys[][2] = {
    {"max_position_embeddings", "context_length"},
    {"hidden_size", "embedding_length"},
    {"num_hidden_layers", "block_count"},
    {"intermediate_size", "feed_forward_length"},
    {"num_attention_heads", "attention.head_count"},
    {"num_key_value_heads", "attention.head_count_kv"},
    {"rms_norm_eps", "attention.layer_norm_rms_epsilon"},
    {"sliding_window", "attention.sliding_window"},
    {"attn_logit_softcapping", "attn_logit_softcapping"},
    {"final_logit_softcapping", "final_logit_softcapping"},
    {"head_dim", "attention.key_length"},
};

static void put_config(struct gguf_writer *w, const json_t *config, const char *arch)
{
    char key[128];
    const json_t *value, *rope = json_object_get(config, "rope_parameters");
    if (json_object_get(rope, "full_attention")) rope = json_object_get(rope, "full_attention");
    put_new(w, "general.architecture", json_string(arch));
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, keys[i][1]);
        value = json_object_get(config, keys[i][0]);
        if (json_is_number(value)) gguf_put(w, key, value);
    }
    value = json_object_get(rope ? rope : config, "rope_theta");
    snprintf(key, sizeof key, "%s.rope.freq_base", arch);
    put_new(w, key, json_real(json_number_value(value)));
    value = json_object_get(rope, "rope_type");
    if (value && strcmp(json_string_value(value), "linear") == 0) {
        snprintf(key, sizeof key, "%s.rope.scaling.type", arch);
        gguf_put(w, key, value);
        snprintf(key, sizeof key, "%s.rope.scaling.factor", arch);
        gguf_put(w, key, json_object_get(rope, "factor"));
    }
    static const char *const ids[][2] = {
        {"bos_token_id", "bos"}, {"eos_token_id", "eos"}, {"pad_token_id", "padding"}};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", ids[i][1]);
        value = json_object_get(config, ids[i][0]);
        if (json_is_integer(value)) gguf_put(w, key, value);
    }
}

static void rename_tensor(const char *name, bool four_norms, char ret[160])
{
    const char *const names[][2] = {
        {"model.embed_tokens.", "token_embd."},
        {"model.norm.", "output_norm."},
        {"lm_head.", "output."},
        {"input_layernorm.", "attn_norm."},
        {"self_attn.q_proj.", "attn_q."},
        {"self_attn.k_proj.", "attn_k."},
        {"self_attn.v_proj.", "attn_v."},
        {"self_attn.o_proj.", "attn_output."},
        {"self_attn.q_norm.", "attn_q_norm."},
        {"self_attn.k_norm.", "attn_k_norm."},
        {"mlp.gate_proj.", "ffn_gate."},
        {"mlp.up_proj.", "ffn_up."},
        {"mlp.down_proj.", "ffn_down."},
        {"post_attention_layernorm.", four_norms ? "post_attention_norm." : "ffn_norm."},
        {"pre_feedforward_layernorm.", "ffn_norm."},
        {"post_feedforward_layernorm.", "post_ffw_norm."},
    };
    int layer, at = 0;
    const bool inside = sscanf(name, "model.layers.%d.%n", &layer, &at) == 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const size_t len = strlen(names[i][0]);
        if (strncmp(name + at, names[i][0], len) != 0) continue;
        if (inside)
            snprintf(ret, 160, "blk.%d.%s%s", layer, names[i][1], name + at + len);
        else
            snprintf(ret, 160, "%s%s", names[i][1], name + at + len);
        return;
    }
    fail_msg("no name for %s", name);
}

// F32, as the architecture has it.
static float *convert(const struct safetensors_entry *e, int heads, float add)
{
    int64_t n = 1;
    for (int d = 0; d < e->n_dims; d++) n *= e->shape[d];
    const int64_t cols = n / e->shape[0], dim = heads ? e->shape[0] / heads : 0;
    float *values = malloc((size_t)n * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < n; i++) {
        float x;
        uint16_t half;
        if (e->dt == DT_F32) {
            memcpy(&x, (const char *)e->data + 4 * i, 4);
        } else {
            assert_int_equal(e->dt, DT_BF16);
            memcpy(&half, (const char *)e->data + 2 * i, 2);
            x = f32_from_bf16(half);
        }
        int64_t row = i / cols;
        if (heads) row = row / dim * dim + row % (dim / 2) * 2 + row % dim / (dim / 2);
        values[row * cols + i % cols] = x + add;
    }
    return values;
}

static void put_tensors(struct gguf_writer *w, const char *folder, const json_t *config,
                        const char *arch)
{
    const bool gemma = strncmp(arch, "gemma", 5) == 0, llama = strcmp(arch, "llama") == 0;
    struct safetensors *set;
    assert_ok(safetensors_open(folder, &set));
    for (int i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_entry *e = safetensors_at(set, i);
        const char *heads = strstr(e->name, "q_proj")   ? "num_attention_heads"
                            : strstr(e->name, "k_proj") ? "num_key_value_heads"
                                                        : NULL;
        const bool norm = strstr(e->name, "norm.weight");
        char name[160];
        if (json_is_true(json_object_get(config, "tie_word_embeddings")) &&
            strcmp(e->name, "lm_head.weight") == 0)
            continue;
        rename_tensor(e->name, gemma && strcmp(arch, "gemma"), name);
        float *values =
            convert(e, llama && heads ? (int)json_integer_value(json_object_get(config, heads)) : 0,
                    gemma && norm ? 1 : 0);
        size_t bytes = sizeof *values;
        for (int d = 0; d < e->n_dims; d++) bytes *= (size_t)e->shape[d];
        gguf_put_tensor(w, name, e->n_dims, e->shape, 0, values, bytes);
        free(values);
    }
    safetensors_free(set);
}

// Byte-level BPE.
static void put_tokenizer(struct gguf_writer *w, const char *folder, json_t *tokenizer)
{
    json_t *model = json_object_get(tokenizer, "model"), *texts = json_array(),
           *types = json_array(), *one;
    json_t *config = json_load_file(test_path(folder, "tokenizer_config.json"), 0, NULL);
    const char *text;
    size_t i;
    json_object_foreach (json_object_get(model, "vocab"), text, one) {
        assert_int_equal(json_integer_value(one), json_array_size(texts)); // in the order of ids
        json_array_append_new(texts, json_string(text));
        json_array_append_new(types, json_integer(1));
    }
    json_array_foreach (json_object_get(tokenizer, "added_tokens"), i, one) {
        assert_int_equal(json_integer_value(json_object_get(one, "id")), json_array_size(texts));
        json_array_append(texts, json_object_get(one, "content"));
        json_array_append_new(types, json_integer(3));
    }
    put_new(w, "tokenizer.ggml.model", json_string("gpt2"));
    put_new(w, "tokenizer.ggml.pre", json_string("gpt-2"));
    put_new(w, "tokenizer.ggml.tokens", texts);
    put_new(w, "tokenizer.ggml.token_type", types);
    gguf_put(w, "tokenizer.ggml.merges", json_object_get(model, "merges"));
    if (json_object_get(config, "chat_template"))
        gguf_put(w, "tokenizer.chat_template", json_object_get(config, "chat_template"));
    json_decref(config);
}

void gguf_put_folder(struct gguf_writer *w, const char *folder, const char *arch)
{
    json_t *config = json_load_file(test_path(folder, "config.json"), 0, NULL);
    json_t *tokenizer = json_load_file(test_path(folder, "tokenizer.json"), 0, NULL);
    assert_non_null(config);
    put_config(w, config, arch);
    if (tokenizer) put_tokenizer(w, folder, tokenizer);
    put_tensors(w, folder, config, arch);
    json_decref(config);
    json_decref(tokenizer);
}

void gguf_write_folder(const char *folder, const char *arch, const char *path)
{
    struct gguf_writer w = {.metadata = BYTES_INIT};
    SCOPED(bytes_release) struct bytes file = BYTES_INIT;
    gguf_put_folder(&w, folder, arch);
    gguf_finish(&w, &file);
    test_write(path, file.data, file.len);
}
