/* test_gguf.c: GGUF files: each type's values beside those that llama.cpp's package gguf 0.19 reads
 * (quants.dequantize), the folder that a file stands for beside the one it was written from, and
 * files that are cut, damaged or of what is not known. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/gguf_write.h"
#include "tests/support/loaded.h"
#include "tests/support/tokens.h"
#include "tests/support/support.h"

#include "common/model/gguf.h"
#include "common/model/model_folder.h"
#include "common/text/tokenizer.h"

TEST_EACH(types, "gguf")
{
    const struct quant_type *t = quant_type_at((uint32_t)row_int(cases, i, "number"));
    const char *bytes = row_text(cases, i, "bytes");
    const int n = row_int(cases, i, "n");
    uint8_t block[256];
    float values[256], one;
    double wanted[32], sum = 0;
    print_message("%s\n", row_text(cases, i, "name"));
    assert_non_null(t);
    assert_string_equal(t->name, row_text(cases, i, "name"));
    const int len = n / t->values * t->bytes;
    assert_int_equal(strlen(bytes), 2 * len);
    for (int k = 0; k < len; k++) sscanf(bytes + 2 * k, "%2hhx", &block[k]);
    quant_read(t, block, 0, n, values);
    for (int k = 0; k < n; k++) sum += (k + 1) * (double)values[k];
    assert_true(sum == row_number(cases, i, "sum"));
    assert_int_equal(row_numbers(cases, i, "values", wanted, 32), n < 32 ? n : 32);
    for (int k = 0; k < 32 && k < n; k++)
        assert_true(values[n > 32 ? k * 37 % 256 : k] == (float)wanted[k]);
    for (int k = 0; k < n; k++) { // a part of a block
        quant_read(t, block, k, 1, &one);
        assert_true(one == values[k]);
    }
}

// ---- folders ------------------------------------------------------------------------------------
static void compare_tensors(const struct loaded *a, const struct loaded *b)
{
    assert_int_equal(a->weights->n_tensors, b->weights->n_tensors);
    for (int i = 0; i < a->weights->n_tensors; i++) {
        const struct weight_tensor *t = &a->weights->tensors[i];
        float *x = test_keep(malloc((size_t)t->n * sizeof *x)),
              *y = test_keep(malloc((size_t)t->n * sizeof *y));
        assert_string_equal(t->name, b->weights->tensors[i].name);
        assert_int_equal(t->n, b->weights->tensors[i].n);
        assert_ok(weights_read(a->weights, a->dev, i, x));
        assert_ok(weights_read(b->weights, b->dev, i, y));
        for (int64_t k = 0; k < t->n; k++)
            if (fabsf(x[k] - y[k]) > 1e-6f) // Gemma's norms were 1 more
                fail_msg("%s: value %lld is %g and %g", t->name, (long long)k, x[k], y[k]);
    }
}

static void compare_configs(const struct model_config *a, const struct model_config *b)
{
    assert_string_equal(a->model_type, b->model_type);
    assert_int_equal(a->vocab_size, b->vocab_size);
    assert_int_equal(a->max_positions, b->max_positions);
    assert_int_equal(a->tie_embeddings, b->tie_embeddings);
    assert_int_equal(a->bos_id, b->bos_id);
    assert_int_equal(a->pad_id, b->pad_id);
    assert_int_equal(a->n_eos, b->n_eos);
    assert_true(a->norm_eps == b->norm_eps && a->act == b->act);
    assert_true(a->logit_softcap == b->logit_softcap && a->embed_scale == b->embed_scale);
    for (int l = 0; l < a->n_layers; l++)
        assert_memory_equal(&a->layers[l], &b->layers[l], sizeof a->layers[l]);
    assert_int_equal(a->n_ropes, b->n_ropes);
    for (int i = 0; i < a->n_ropes; i++)
        for (int k = 0; k < a->ropes[i].dim / 2; k++)
            assert_true(rope_frequency(&a->ropes[i], k, false) ==
                        rope_frequency(&b->ropes[i], k, false));
}

TEST(files_are_their_folders)
{
    static const char *const families[][2] = {{"mistral", "llama"}, {"qwen2", "qwen2"},
                                              {"qwen3", "qwen3"},   {"gemma", "gemma"},
                                              {"gemma2", "gemma2"}, {"gemma3", "gemma3"}};
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        const char *folder = test_golden(families[i][0]), *to = test_folder();
        const char *path = test_path(to, "model.gguf");
        print_message("%s\n", families[i][1]);
        gguf_write_folder(folder, families[i][1], path);
        const struct loaded *a = loaded_of(folder, DT_F32), *b = loaded_of(path, DT_F32);
        compare_tensors(a, b);
        if (i > 0) compare_configs(a->config, b->config); // Mistral's files are llama's
    }
}

static void put(struct gguf_writer *w, const char *key, json_t *value)
{
    gguf_put(w, key, test_keep(value));
}

// A llama of one small matrix: its config alone is read.
static void put_llama(struct gguf_writer *w)
{
    static const float zeros[64 * 8];
    put(w, "general.architecture", json_string("llama"));
    put(w, "llama.context_length", json_integer(131072));
    put(w, "llama.embedding_length", json_integer(64));
    put(w, "llama.block_count", json_integer(1));
    put(w, "llama.feed_forward_length", json_integer(64));
    put(w, "llama.attention.head_count", json_integer(4));
    put(w, "llama.rope.freq_base", json_integer(500000));
    put(w, "llama.attention.layer_norm_rms_epsilon", json_real(1e-5));
    gguf_put_tensor(w, "token_embd.weight", 2, (int64_t[]){8, 64}, 0, zeros, sizeof zeros);
}

static const char *finish(struct gguf_writer *w)
{
    const char *path = test_path(test_folder(), "model.gguf");
    SCOPED(bytes_release) struct bytes file = BYTES_INIT;
    gguf_finish(w, &file);
    test_write(path, file.data, file.len);
    return path;
}

TEST(positions_are_llama_3s)
{
    struct gguf_writer w = {.metadata = BYTES_INIT};
    struct model_config *config;
    float divisors[8];
    for (int i = 0; i < 8; i++) { // as convert_hf_to_gguf.py has them
        const double wave = 2 * M_PI * pow(500000, i / 8.0), smooth = (8192 / wave - 1) / 3;
        divisors[i] = wave < 8192 / 4.0 ? 1
                      : wave > 8192     ? 32
                                        : (float)(1 / ((1 - smooth) / 32 + smooth));
    }
    put_llama(&w);
    gguf_put_tensor(&w, "rope_freqs.weight", 1, (int64_t[]){8}, 0, divisors, sizeof divisors);
    assert_ok(model_config_load(finish(&w), &config));
    const struct rope_config *rope = &config->ropes[0];
    assert_int_equal(rope->kind, ROPE_LLAMA3);
    assert_true(rope->factor == 32 && rope->theta == 500000);
    assert_int_equal(rope->original_max_positions, 8192);
    model_config_free(config);
    divisors[2] *= 2;
    put_llama(&w);
    gguf_put_tensor(&w, "rope_freqs.weight", 1, (int64_t[]){8}, 0, divisors, sizeof divisors);
    assert_fails(model_config_load(finish(&w), &config), ST_UNSUPPORTED, "rope_freqs.weight");
}

// ---- tokenizers ---------------------------------------------------------------------------------
static const char *const texts[] = {"Hello world",
                                    "  two  spaces ",
                                    "it's 12345 x 678",
                                    "a\n\n b\tc",
                                    "na\xc3\xafve \xe2\x82\xac 5",
                                    "def f(x):\n    return x",
                                    "\xe4\xbd\xa0\xe5\xa5\xbd",
                                    "<s>Hi</s>",
                                    ""};

static void compare_tokenizers(const char *folder, const char *file)
{
    struct tokenizer *a = tokenizer_of(folder);
    struct tokenizer *b = tokenizer_of(file);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        SCOPED(token_list_release) struct token_list ids = TOKEN_LIST_INIT;
        SCOPED(bytes_release) struct bytes back = BYTES_INIT;
        print_message("%s\n", texts[i]);
        assert_ok(tokenizer_encode(a, texts[i], strlen(texts[i]), false, &ids));
        assert_ok(tokenizer_decode(a, ids.ids, ids.n, false, &back));
        assert_ids(b, texts[i], strlen(texts[i]), false, ids.ids, ids.n);
        assert_text(b, ids.ids, ids.n, false, bytes_text(&back), back.len);
    }
}

// The tokens of a tokenizer.json; a score is less by one for each merge before the token's own.
static void put_tokens(struct gguf_writer *w, const char *folder, const char *model,
                       const char *pre)
{
    json_t *json = json_of_file(test_path(folder, "tokenizer.json")), *one;
    json_t *texts_of = test_keep(json_array()), *types_of = test_keep(json_array()),
           *scores = test_keep(json_array());
    json_t *inner = json_object_get(json, "model");
    const char *text;
    size_t i;
    json_object_foreach (json_object_get(inner, "vocab"), text, one) {
        const size_t id = (size_t)json_integer_value(one);
        while (json_array_size(texts_of) <= id) {
            json_array_append_new(texts_of, json_string(""));
            json_array_append_new(types_of, json_integer(1));
            json_array_append_new(scores, json_real(-1e6));
        }
        json_array_set_new(texts_of, id, json_string(text));
        if (text[0] == '<' && text[1] == '0' && text[2] == 'x')
            json_array_set_new(types_of, id, json_integer(6));
    }
    json_array_foreach (json_object_get(json, "added_tokens"), i, one) {
        const size_t id = (size_t)json_integer_value(json_object_get(one, "id"));
        while (json_array_size(texts_of) <= id) {
            json_array_append_new(texts_of, json_string(""));
            json_array_append_new(types_of, json_integer(1));
            json_array_append_new(scores, json_real(0));
        }
        json_array_set(texts_of, id, json_object_get(one, "content"));
        json_array_set_new(types_of, id, json_integer(3));
    }
    put(w, "tokenizer.ggml.model", json_string(model));
    gguf_put(w, "tokenizer.ggml.tokens", texts_of);
    gguf_put(w, "tokenizer.ggml.token_type", types_of);
    if (pre) {
        put(w, "tokenizer.ggml.pre", json_string(pre));
        json_t *merges = test_keep(json_array()); // "left right"
        json_array_foreach (json_object_get(inner, "merges"), i, one)
            json_array_append_new(
                merges, json_is_string(one)
                            ? json_incref(one)
                            : json_sprintf("%s %s", json_string_value(json_array_get(one, 0)),
                                           json_string_value(json_array_get(one, 1))));
        gguf_put(w, "tokenizer.ggml.merges", merges);
    } else {
        size_t rank = json_array_size(json_object_get(inner, "merges"));
        while (rank-- > 0) { // the first merge that gives a token is the last to be written
            const char *merge =
                json_string_value(json_array_get(json_object_get(inner, "merges"), rank));
            const char *space = strchr(merge, ' ');
            char whole[256];
            snprintf(whole, sizeof whole, "%.*s%s", (int)(space - merge), merge, space + 1);
            const json_t *id = json_object_get(json_object_get(inner, "vocab"), whole);
            json_array_set_new(scores, (size_t)json_integer_value(id), json_real(-(double)rank));
        }
        gguf_put(w, "tokenizer.ggml.scores", scores);
    }
}

static void check_tokenizer(const char *data, const char *model, const char *pre)
{
    struct gguf_writer w = {.metadata = BYTES_INIT};
    char folder[PATH_MAX];
    test_data_folder(data, folder);
    put_llama(&w);
    put_tokens(&w, folder, model, pre);
    compare_tokenizers(folder, finish(&w));
}

TEST(byte_level_tokenizers_are_their_folders)
{
    check_tokenizer("qwen2.5-tokenizer", "gpt2", "qwen2");
}

TEST(merges_come_of_scores)
{
    check_tokenizer("phi3-tokenizer", "llama", NULL);
}

TEST(tokenizers_of_no_known_kind)
{
    struct gguf_writer w = {.metadata = BYTES_INIT};
    struct tokenizer *t;
    const char *folder = test_path(test_root(), "tools/demo-model");
    put_llama(&w);
    put_tokens(&w, folder, "gpt2", "tekken");
    assert_fails(tokenizer_load(finish(&w), &t), ST_UNSUPPORTED, "tokenizer.ggml.pre is tekken");
    put_llama(&w);
    put_tokens(&w, folder, "bert", "gpt-2");
    const char *file = finish(&w);
    assert_fails(tokenizer_load(file, &t), ST_UNSUPPORTED, "tokenizer.ggml.model is bert");
    assert_message(file);
    put_llama(&w);
    file = finish(&w);
    assert_false(model_file_exists(file, "tokenizer.json"));
    assert_status(tokenizer_load(file, &t), ST_NOT_FOUND);
}

// ---- what is refused ----------------------------------------------------------------------------
static void assert_refused(struct gguf_writer *w, enum status code, const char *part)
{
    const char *path = finish(w);
    struct model_config *config = NULL;
    struct weights *weights = NULL;
    enum status st = model_config_load(path, &config);
    if (st == ST_OK) {
        assert_ok(weights_plan(config, DT_F32, &weights));
        st = weights_check(weights, path);
    }
    assert_status(st, code);
    assert_message(part);
    assert_message(path);
    weights_free(weights);
    model_config_free(config);
}

TEST(unknown_things_are_named)
{
    static const struct {
        int columns;
        uint32_t type;
        size_t bytes;
        enum status st;
        const char *words;
    } tensors[] = {
        {256, 10, 84, ST_UNSUPPORTED, "tensor output.weight is of type Q2_K (10)"},
        {256, 77, 84, ST_UNSUPPORTED, "of type unknown (77)"},
        {48, 8, 102, ST_FORMAT, "rows of 48 are not whole blocks of Q8_0"},
    };
    struct gguf_writer w = {.metadata = BYTES_INIT};
    static const float zeros[512];
    put(&w, "general.architecture", json_string("mamba"));
    assert_refused(&w, ST_UNSUPPORTED, "general.architecture is mamba");
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        put_llama(&w);
        gguf_put_tensor(&w, "output.weight", 2, (int64_t[]){1, tensors[i].columns}, tensors[i].type,
                        zeros, tensors[i].bytes);
        assert_refused(&w, tensors[i].st, tensors[i].words);
    }
    put_llama(&w);
    assert_refused(&w, ST_NOT_FOUND, "tensor model.layers.0.input_layernorm.weight is missing");
    put_llama(&w);
    put(&w, "llama.expert_count", json_integer(8));
    assert_refused(&w, ST_UNSUPPORTED, "experts");
    put_llama(&w);
    put(&w, "llama.rope.dimension_count", json_integer(8));
    assert_refused(&w, ST_UNSUPPORTED, "rotated in part");
}

TEST(damaged_files_are_refused)
{
    struct gguf_writer w = {.metadata = BYTES_INIT};
    SCOPED(bytes_release) struct bytes file = BYTES_INIT;
    struct gguf *g;
    json_t *json;
    gguf_put_folder(&w, test_path(test_root(), "tools/demo-model"), "qwen2");
    gguf_finish(&w, &file);
    const size_t header = 4096;
    for (size_t len = 0; len < file.len; len += len < header ? 1 : 4099) {
        assert_fails(gguf_parse("cut", file.data, len, &g), ST_FORMAT, "cut");
    }
    assert_ok(gguf_parse("whole", file.data, file.len, &g));
    gguf_free(g);
    for (size_t i = 0; i < header;
         i += 3) { // a byte is another one: refused, or read within bounds
        const char was = file.data[i];
        file.data[i] = (char)(was ^ (1 << i % 8));
        if (gguf_parse("changed", file.data, file.len, &g) == ST_OK) {
            json = NULL;
            if (i % 16 < 3 && gguf_folder_file(g, "config.json", &json) == ST_OK) json_decref(json);
            json = NULL;
            if (i % 16 < 3 && gguf_folder_file(g, "tokenizer.json", &json) == ST_OK)
                json_decref(json);
            gguf_free(g);
        }
        file.data[i] = was;
    }
    file.data[4] = 1;
    assert_fails(gguf_parse("old", file.data, file.len, &g), ST_UNSUPPORTED, "GGUF version 1");
}
