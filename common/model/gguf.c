/* gguf.c: the container: "GGUF", version, numbers of tensors and of metadata, the metadata (key,
 * type, value), the tensors (name, sizes from the innermost on, type, offset), and behind the next
 * multiple of general.alignment their data. Little endian. Behind that a file as the Hugging Face
 * folder that it stands for: its config, and its tensors under the folder's names. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/gguf.h"
#include "common/base/json.h"
#include "common/model/config.h"
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAGIC        0x46554747 // "GGUF"
#define MAX_ELEMENTS (1 << 22)  // of an array; the largest vocabularies have 2^18

enum { TYPE_F32 = 6, TYPE_BOOL, TYPE_STRING, TYPE_ARRAY, TYPE_F64 = 12 };

// What is left of the file. Reading past its end gives zeros and is kept in mind.
struct cursor {
    const char *where;
    const uint8_t *at, *end;
    bool cut;
};

void gguf_free(struct gguf *g)
{
    if (!g) return;
    file_map_release(&g->map);
    json_decref(g->metadata);
    free(g->tensors);
    free(g->where);
    free(g);
}

static uint64_t take_number(struct cursor *c, size_t bytes)
{
    uint64_t x = 0;
    c->cut |= (size_t)(c->end - c->at) < bytes;
    for (size_t i = 0; i < bytes && !c->cut; i++) x |= (uint64_t)*c->at++ << (8 * i);
    return x;
}

static enum status check_cut(const struct cursor *c)
{
    if (!c->cut) return ST_OK;
    return status_fail(ST_FORMAT, "%s: the file ends within its header; it is truncated or damaged",
                       c->where);
}

// Not ended by a NUL; "" where the file is too short.
static const char *take_text(struct cursor *c, size_t *ret_len)
{
    const uint64_t len = take_number(c, 8);
    const char *text = (const char *)c->at;
    c->cut |= len > (size_t)(c->end - c->at);
    *ret_len = c->cut ? 0 : (size_t)len;
    c->at += *ret_len;
    return text;
}

static enum status take_name(struct cursor *c, char ret[GGUF_NAME])
{
    size_t len = 0;
    const char *text = take_text(c, &len);
    if (len >= GGUF_NAME)
        return status_fail(ST_FORMAT, "%s: a name of %zu bytes; it is damaged", c->where, len);
    memcpy(ret, text, len);
    ret[len] = '\0';
    return check_cut(c);
}

static json_t *take_scalar(struct cursor *c, uint32_t type)
{
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    size_t len = 0;
    float f;
    double d;
    if (type == TYPE_STRING) {
        const char *text = take_text(c, &len);
        return json_stringn(text, len);
    }
    const uint64_t x = take_number(c, sizes[type]);
    const int spare = 64 - 8 * sizes[type];
    memcpy(&f, &(uint32_t){(uint32_t)x}, sizeof f);
    memcpy(&d, &x, sizeof d);
    if (type == TYPE_BOOL) return json_boolean(x);
    if (type == TYPE_F32 || type == TYPE_F64) return json_real(type == TYPE_F32 ? f : d);
    const bool has_sign = type % 2 == (type < TYPE_F32);
    return json_integer(has_sign ? (int64_t)(x << spare) >> spare : (int64_t)x);
}

static enum status take_value(struct cursor *c, json_t *metadata)
{
    char key[GGUF_NAME];
    enum status st = take_name(c, key);
    if (st != ST_OK) return st;
    uint32_t type = (uint32_t)take_number(c, 4);
    json_t *list = type == TYPE_ARRAY ? json_array() : NULL, *value = list;
    if (list) type = (uint32_t)take_number(c, 4);
    const uint64_t n = list ? take_number(c, 8) : 1;
    bool good = type <= TYPE_F64 && type != TYPE_ARRAY && n <= MAX_ELEMENTS;
    for (uint64_t i = 0; good && i < n && !c->cut; i++) {
        json_t *one = take_scalar(c, type);
        good = list ? json_array_append_new(list, one) == 0 : one != NULL;
        if (!list) value = one;
    }
    good = good && json_object_set(metadata, key, value) == 0;
    json_decref(value);
    if (c->cut || good) return check_cut(c);
    return status_fail(ST_FORMAT,
                       "%s: %s has an unknown type, too many elements, text that is not UTF-8 or a "
                       "number that is not finite",
                       c->where, key);
}

// `ret_at`: where in the data it begins.
static enum status take_tensor(struct cursor *c, struct gguf_tensor *t, uint64_t *ret_at)
{
    uint64_t count = 1;
    enum status st = take_name(c, t->name);
    if (st != ST_OK) return st;
    const uint64_t n_dims = take_number(c, 4);
    bool possible = n_dims >= 1 && n_dims <= 4;
    t->n_dims = possible ? (int)n_dims : 0;
    for (int d = t->n_dims - 1; possible && d >= 0; d--) {
        const uint64_t size = take_number(c, 8);
        possible = size > 0 && size < (uint64_t)LLONG_MAX / 8 / count;
        if (!possible) break;
        t->shape[d] = (int64_t)size;
        count *= size;
    }
    const uint32_t number = (uint32_t)take_number(c, 4);
    *ret_at = take_number(c, 8);
    if (c->cut) return check_cut(c);
    if (!possible)
        return status_fail(ST_FORMAT, "%s: tensor %s has an impossible size", c->where, t->name);
    t->type = quant_type_at(number);
    if (!t->type || !t->type->read)
        return status_fail(ST_UNSUPPORTED,
                           "%s: tensor %s is of type %s (%u), which is not supported; F32, F16, "
                           "BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K are",
                           c->where, t->name, t->type ? t->type->name : "unknown", number);
    if (t->shape[t->n_dims - 1] % t->type->values != 0)
        return status_fail(ST_FORMAT, "%s: tensor %s: rows of %lld are not whole blocks of %s",
                           c->where, t->name, (long long)t->shape[t->n_dims - 1], t->type->name);
    t->bytes = count / (uint64_t)t->type->values * (uint64_t)t->type->bytes;
    return ST_OK;
}

static enum status read_file(struct gguf *g, const uint8_t *data, size_t len)
{
    struct cursor c = {g->where, data, data + len, false};
    int64_t alignment = 32;
    uint64_t *at = NULL;
    enum status st = ST_OK;
    if (take_number(&c, 4) != MAGIC) FAIL(ST_FORMAT, "%s: not a GGUF file", g->where);
    const uint64_t version = take_number(&c, 4), n = take_number(&c, 8), m = take_number(&c, 8);
    CHECK(check_cut(&c));
    if (version != 2 && version != 3)
        FAIL(ST_UNSUPPORTED, "%s: GGUF version %llu%s; 2 and 3 are supported", g->where,
             (unsigned long long)version, version > 0xffff ? " (of the other byte order)" : "");
    if (n > MAX_ELEMENTS || n > len / 24)
        FAIL(ST_FORMAT, "%s: more tensors than it has room for; it is damaged", g->where);
    g->metadata = json_object();
    g->tensors = calloc((size_t)n + 1, sizeof *g->tensors);
    at = calloc((size_t)n + 1, sizeof *at);
    if (!g->metadata || !g->tensors || !at) FAIL(ST_NO_MEMORY, "%s: no memory", g->where);
    g->n_tensors = (int)n;
    for (uint64_t i = 0; i < m; i++) CHECK(take_value(&c, g->metadata));
    for (uint64_t i = 0; i < n; i++) CHECK(take_tensor(&c, &g->tensors[i], &at[i]));
    CHECK(json_get_int(g->where, g->metadata, "general.alignment", 1, 1 << 20, &alignment));
    const size_t used = (size_t)(c.at - data), align = (size_t)alignment;
    const size_t begin = (used + align - 1) / align * align, room = len > begin ? len - begin : 0;
    for (uint64_t i = 0; i < n; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        if (at[i] > room || t->bytes > room - at[i])
            FAIL(ST_FORMAT,
                 "%s: tensor %s leaves the file, which has %zu bytes of data; it is truncated or "
                 "damaged",
                 g->where, t->name, room);
        t->data = data + begin + at[i];
    }
out:
    free(at);
    return st;
}

// `data` NULL: the file at `where` is mapped.
static enum status open_file(const char *where, const void *data, size_t len, struct gguf **ret)
{
    struct gguf *g = calloc(1, sizeof *g);
    enum status st = ST_OK;
    if (!g || !(g->where = strdup(where))) FAIL(ST_NO_MEMORY, "%s: no memory", where);
    if (!data) CHECK(file_map_open(where, &g->map));
    CHECK(read_file(g, data ? data : g->map.data, data ? len : g->map.len));
    *ret = TAKE_PTR(g);
out:
    gguf_free(g);
    return st;
}

enum status gguf_parse(const char *where, const void *data, size_t len, struct gguf **ret)
{
    return open_file(where, data ? data : "", len, ret);
}

enum status gguf_open(const char *path, struct gguf **ret)
{
    return open_file(path, NULL, 0, ret);
}

bool gguf_is_file(const char *path)
{
    char begin[4] = "";
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const bool is = fd >= 0 && read(fd, begin, 4) == 4 && memcmp(begin, "GGUF", 4) == 0;
    if (fd >= 0) close(fd);
    return is;
}

static const struct gguf_tensor *find_tensor(const struct gguf *g, const char *name)
{
    for (int i = 0; i < g->n_tensors; i++)
        if (strcmp(g->tensors[i].name, name) == 0) return &g->tensors[i];
    return NULL;
}

// ---- the folder that it stands for --------------------------------------------------------------

struct arch {
    const char *name, *model_type, *architecture;
    bool pairs;       // rows of q and k stand as their halves' in turn (convert_hf_to_gguf.py)
    bool one_more;    // weights of norms have one added
    bool four_norms;  // in a layer: "ffn_norm" is the third
    int wider_scores; // a model of so many layers has the scale of hidden / heads, as llama.cpp's
};
static const struct arch archs[] = {
    {"llama", "llama", "LlamaForCausalLM", .pairs = true},
    {"qwen2", "qwen2", "Qwen2ForCausalLM", .pairs = false},
    {"qwen3", "qwen3", "Qwen3ForCausalLM", .pairs = false},
    {"gemma", "gemma", "GemmaForCausalLM", .one_more = true},
    {"gemma2", "gemma2", "Gemma2ForCausalLM", false, true, true, 46},
    {"gemma3", "gemma3_text", "Gemma3ForCausalLM", false, true, true, 62},
};
enum { N_ARCHS = sizeof archs / sizeof *archs };

static const char *arch_name(const struct gguf *g)
{
    const char *name = json_string_value(json_object_get(g->metadata, "general.architecture"));
    return name ? name : "(none)";
}

static enum status find_arch(const struct gguf *g, const struct arch **ret)
{
    for (int i = 0; i < N_ARCHS; i++)
        if (strcmp(archs[i].name, arch_name(g)) == 0) *ret = &archs[i];
    if (*ret) return ST_OK;
    return status_fail(ST_UNSUPPORTED,
                       "%s: general.architecture is %s; of GGUF files llama, qwen2, qwen3, gemma, "
                       "gemma2 and gemma3 are supported",
                       g->where, arch_name(g));
}

// ---- config.json --------------------------------------------------------------------------------
// The metadata's "llama.KEY", or what is the same for all architectures.
static json_t *get(const struct gguf *g, const char *key)
{
    char whole[GGUF_NAME];
    if (strncmp(key, "tokenizer.", 10) == 0) return json_object_get(g->metadata, key);
    snprintf(whole, sizeof whole, "%s.%s", arch_name(g), key);
    return json_object_get(g->metadata, whole);
}

// The number of a key; `otherwise` where there is none.
static double number(const struct gguf *g, const char *key, double otherwise)
{
    const json_t *value = get(g, key);
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

// The same of a size, which is looked at again where it is read as the config's.
static int whole_number(const struct gguf *g, const char *key, double otherwise)
{
    return (int)fmin(fmax(number(g, key, otherwise), 0), 1 << 24);
}

static void copy_keys(const struct gguf *g, const char *const keys[][2], json_t *to)
{
    for (; (*keys)[0]; keys++)
        if (get(g, (*keys)[0])) json_object_set(to, (*keys)[1], get(g, (*keys)[0]));
}

// Llama 3.1's positions are in the file as divisors of the frequencies. Every published model has
// them of 8,192 positions and the factors 1 and 4.
static enum status read_divisors(const struct gguf *g, const struct gguf_tensor *t, json_t *config)
{
    const int64_t n = t->shape[0];
    float divisors[128], max = 1;
    struct rope_config r = {.kind = ROPE_LLAMA3,
                            .theta = number(g, "rope.freq_base", 10000),
                            .dim = 2 * (int)n,
                            .original_max_positions = 8192,
                            .low_freq_factor = 1,
                            .high_freq_factor = 4};
    bool same = t->n_dims == 1 && n <= 128;
    if (same) quant_read(t->type, t->data, 0, n, divisors);
    for (int64_t i = 0; same && i < n; i++) max = fmaxf(max, divisors[i]);
    r.factor = max;
    for (int i = 0; same && i < n; i++) {
        const double is = divisors[i] * rope_frequency(&r, i, false);
        same = fabs(is * pow(r.theta, 2.0 * i / r.dim) - 1) < 1e-3;
    }
    if (!same)
        return status_fail(ST_UNSUPPORTED,
                           "%s: rope_freqs.weight holds other positions than Llama 3.1's",
                           g->where);
    json_object_set_new(config, "rope_scaling",
                        json_pack("{s:s,s:f,s:f,s:f,s:i}", "rope_type", "llama3", "factor",
                                  r.factor, "low_freq_factor", 1.0, "high_freq_factor", 4.0,
                                  "original_max_position_embeddings", 8192));
    return ST_OK;
}

static enum status read_positions(const struct gguf *g, int head_dim, json_t *config)
{
    static const char *const keys[][2] = {
        {"rope.scaling.type", "rope_type"},
        {"rope.scaling.factor", "factor"},
        {"rope.scaling.original_context_length", "original_max_position_embeddings"},
        {NULL, NULL}};
    const struct gguf_tensor *divisors = find_tensor(g, "rope_freqs.weight");
    const char *type = json_string_value(get(g, "rope.scaling.type"));
    if (number(g, "rope.dimension_count", head_dim) != head_dim || get(g, "rope.scale_linear"))
        return status_fail(ST_UNSUPPORTED,
                           "%s: heads that are rotated in part, or rope.scale_linear, are not "
                           "supported in a GGUF file",
                           g->where);
    if (divisors) return read_divisors(g, divisors, config);
    if (!type || strcmp(type, "none") == 0) return ST_OK;
    json_t *scaling = json_object();
    copy_keys(g, keys, scaling);
    json_object_set_new(config, "rope_scaling", scaling);
    return ST_OK;
}

static enum status make_config(const struct gguf *g, const struct arch *a, json_t **ret)
{
    static const char *const keys[][2] = {{"context_length", "max_position_embeddings"},
                                          {"embedding_length", "hidden_size"},
                                          {"block_count", "num_hidden_layers"},
                                          {"feed_forward_length", "intermediate_size"},
                                          {"attention.head_count", "num_attention_heads"},
                                          {"attention.head_count_kv", "num_key_value_heads"},
                                          {"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
                                          {"rope.freq_base", "rope_theta"},
                                          {"attention.sliding_window", "sliding_window"},
                                          {"attn_logit_softcapping", "attn_logit_softcapping"},
                                          {"final_logit_softcapping", "final_logit_softcapping"},
                                          {"tokenizer.ggml.bos_token_id", "bos_token_id"},
                                          {"tokenizer.ggml.padding_token_id", "pad_token_id"},
                                          {NULL, NULL}};
    static const char *const ends[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    const struct gguf_tensor *embed = find_tensor(g, "token_embd.weight");
    const int heads = whole_number(g, "attention.head_count", 0);
    const int hidden = whole_number(g, "embedding_length", 0);
    json_t *config = NULL, *eos = json_array();
    enum status st = ST_OK;
    if (number(g, "expert_count", 0) > 0)
        FAIL(ST_UNSUPPORTED, "%s: experts are not supported in a GGUF file", g->where);
    if (!embed || heads < 1)
        FAIL(ST_FORMAT, "%s: %s is missing", g->where,
             embed ? "attention.head_count" : "tensor token_embd.weight");
    const int head_dim = whole_number(g, "attention.key_length", hidden / heads);
    config = json_pack("{s:s,s:[s],s:s,s:I,s:i,s:b,s:b,s:b}", "model_type", a->model_type,
                       "architectures", a->architecture, "torch_dtype",
                       strcmp(embed->type->name, "F32") ? "bfloat16" : "float32", "vocab_size",
                       (json_int_t)embed->shape[0], "head_dim", head_dim, "tie_word_embeddings",
                       !find_tensor(g, "output.weight"), "attention_bias",
                       strcmp(a->name, "qwen2") && find_tensor(g, "blk.0.attn_q.bias"), "mlp_bias",
                       find_tensor(g, "blk.0.ffn_up.bias") != NULL);
    copy_keys(g, keys, config);
    for (int i = 0; i < 3; i++) json_array_append(eos, get(g, ends[i]));
    json_object_set(config, "eos_token_id", eos);
    const bool wider = number(g, "block_count", 0) == a->wider_scores;
    if (a->four_norms)
        json_object_set_new(config, "query_pre_attn_scalar",
                            json_integer(wider ? hidden / heads : head_dim));
    CHECK(read_positions(g, head_dim, config));
    *ret = json_incref(config);
out:
    json_decref(eos);
    json_decref(config);
    return st;
}

bool gguf_has_file(const struct gguf *g, const char *name)
{
    if (strcmp(name, "config.json") == 0) return true;
    return json_object_get(g->metadata, "tokenizer.ggml.tokens") &&
           (strcmp(name, "tokenizer.json") == 0 || strcmp(name, "tokenizer_config.json") == 0);
}

enum status gguf_folder_file(const struct gguf *g, const char *name, json_t **ret)
{
    const struct arch *a = NULL;
    *ret = NULL;
    if (!gguf_has_file(g, name)) return ST_OK;
    if (strcmp(name, "tokenizer.json") == 0) return gguf_tokenizer(g, ret);
    if (strcmp(name, "tokenizer_config.json") == 0) return gguf_tokenizer_config(g, ret);
    const enum status st = find_arch(g, &a);
    return st == ST_OK ? make_config(g, a, ret) : st;
}

// ---- tensors ------------------------------------------------------------------------------------
// Its folder's name in place of its own; one that is not known keeps it, and is refused by that.
static void rename_tensor(const struct arch *a, struct gguf_tensor *t)
{
    static const char *const names[][2] = {
        {"token_embd", "model.embed_tokens"},
        {"output_norm", "model.norm"},
        {"output", "lm_head"},
        {"attn_norm", "input_layernorm"},
        {"attn_q", "self_attn.q_proj"},
        {"attn_k", "self_attn.k_proj"},
        {"attn_v", "self_attn.v_proj"},
        {"attn_output", "self_attn.o_proj"},
        {"attn_q_norm", "self_attn.q_norm"},
        {"attn_k_norm", "self_attn.k_norm"},
        {"post_attention_norm", "post_attention_layernorm"},
        {"ffn_norm", "post_attention_layernorm"},
        {"ffn_gate", "mlp.gate_proj"},
        {"ffn_up", "mlp.up_proj"},
        {"ffn_down", "mlp.down_proj"},
        {"post_ffw_norm", "post_feedforward_layernorm"},
    };
    char whole[sizeof t->name];
    int layer = 0, at = 0;
    const bool in_layer = sscanf(t->name, "blk.%d.%n", &layer, &at) == 1 && at > 0;
    const char *part = t->name + (in_layer ? at : 0), *dot = strrchr(part, '.');
    const size_t len = dot ? (size_t)(dot - part) : strlen(part);
    for (size_t i = 0; dot && i < sizeof names / sizeof *names; i++) {
        const char *name = names[i][1];
        if (strlen(names[i][0]) != len || memcmp(names[i][0], part, len) != 0) continue;
        if (in_layer != (i > 2)) continue;
        if (a->four_norms && strcmp(names[i][0], "ffn_norm") == 0)
            name = "pre_feedforward_layernorm";
        if (in_layer) at = snprintf(whole, sizeof whole, "model.layers.%d.", layer);
        snprintf(whole + at, sizeof whole - (size_t)at, "%s%s", name, dot);
        memcpy(t->name, whole, sizeof whole);
        return;
    }
}

static void read_row(const struct safetensors_entry *e, int64_t row, int64_t first, int64_t n,
                     void *ret)
{
    const struct gguf_tensor *t = e->more;
    const int64_t cols = t->n_dims > 1 ? t->shape[t->n_dims - 1] : 1;
    if (t->heads > 0) {
        const int64_t dim = t->shape[0] / t->heads, i = row % dim;
        row += i % (dim / 2) * 2 + i / (dim / 2) - i;
    }
    quant_read(t->type, t->data, row * cols + first, n, ret);
    for (int64_t i = 0; t->add != 0 && i < n; i++) ((float *)ret)[i] += t->add;
}

static void free_file(void *file)
{
    gguf_free(file);
}

enum status gguf_tensors(struct gguf *g, struct safetensors **ret)
{
    struct safetensors_entry *entries = calloc((size_t)g->n_tensors + 1, sizeof *entries);
    const struct arch *a = NULL;
    int n = 0;
    enum status st = ST_OK;
    if (!entries) FAIL(ST_NO_MEMORY, "%s: no memory for its tensors", g->where);
    CHECK(find_arch(g, &a));
    for (int i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        if (strcmp(t->name, "rope_freqs.weight") == 0) continue; // in the config
        rename_tensor(a, t);
        const char *q = strstr(t->name, ".q_proj."), *k = strstr(t->name, ".k_proj.");
        const int heads = whole_number(g, "attention.head_count", 1);
        if (a->pairs && (q || k))
            t->heads = k ? whole_number(g, "attention.head_count_kv", heads) : heads;
        if (t->heads > 0 && t->shape[0] % (2 * (int64_t)t->heads) != 0)
            FAIL(ST_FORMAT, "%s: tensor %s: %lld rows are not those of %d heads", g->where, t->name,
                 (long long)t->shape[0], t->heads);
        const size_t len = strlen(t->name);
        if (a->one_more && len > 11 && strcmp(t->name + len - 11, "norm.weight") == 0) t->add = -1;
        entries[n] = (struct safetensors_entry){.name = t->name,
                                                .file = g->where,
                                                .dt = DT_F32,
                                                .n_dims = t->n_dims,
                                                .data = t->data,
                                                .bytes = t->bytes,
                                                .read = read_row,
                                                .more = t};
        memcpy(entries[n++].shape, t->shape, sizeof t->shape);
    }
    st = safetensors_from(g->where, entries, n, g, free_file, ret);
    return st;
out:
    free(entries);
    gguf_free(g);
    return st;
}
