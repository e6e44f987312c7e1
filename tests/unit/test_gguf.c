/* test_gguf.c: GGUF files: each type's values beside those that llama.cpp's package gguf 0.19 reads
 * (quants.dequantize), the folder that a file stands for beside the one it was written from, and
 * files that are cut, damaged or of what is not known. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/gguf_write.h"
#include "tests/support/support.h"

#include "common/model/gguf.h"
#include "common/model/model_folder.h"
#include "common/text/tokenizer.h"
#include "common/model/weights.h"
#include "kernels/device.h"

// A type's block, and its values: all of up to 32, of 256 those of 37 * i modulo 256; the sum of
// (i + 1) * value over all.
static const struct {
    const char *name;
    uint32_t number;
    int n;
    const char *bytes;
    float values[32];
    double sum;
} types[] = {
    {"F32",
     0,
     4,
     "0000c03f000000bc0000494000e87dc7",
     {1.5f, -0.0078125f, 3.140625f, -65000},
     -259989.09375},
    {"F16", 1, 4, "003e00a04842effb", {1.5f, -0.0078125f, 3.140625f, -64992}, -259957.09375},
    {"BF16", 30, 4, "c03f00bc49407ec7", {1.5f, -0.0078125f, 3.140625f, -65024}, -260085.09375},
    {"Q4_0",
     2,
     32,
     "4c2205ce7883a149fa0d47629268210b000c",
     {-0.036895752f,
      0.0737915039f,
      0,
      -0.0614929199f,
      -0.0860900879f,
      0.012298584f,
      0.024597168f,
      0.0614929199f,
      -0.012298584f,
      -0.0737915039f,
      -0.0737915039f,
      0,
      -0.0860900879f,
      0.036895752f,
      -0.0983886719f,
      0.0491943359f,
      -0.0983886719f,
      0.0491943359f,
      -0.012298584f,
      0,
      0.024597168f,
      -0.0491943359f,
      0.0860900879f,
      -0.0983886719f,
      -0.0491943359f,
      -0.024597168f,
      0.012298584f,
      -0.024597168f,
      -0.0737915039f,
      -0.0983886719f,
      -0.0983886719f,
      -0.0983886719f},
     -18.263397216796875},
    {"Q4_1",
     3,
     32,
     "4c22ecb5c03c486f43f92de5ccd81d64a07eaaad",
     {-0.370117188f, -0.22253418f,  -0.271728516f, -0.185638428f, -0.333221436f, -0.259429932f,
      -0.210235596f, -0.308624268f, -0.22253418f,  -0.271728516f, -0.210235596f, -0.320922852f,
      -0.370117188f, -0.197937012f, -0.247131348f, -0.210235596f, -0.22253418f,  -0.333221436f,
      -0.320922852f, -0.296325684f, -0.320922852f, -0.185638428f, -0.34552002f,  -0.197937012f,
      -0.22253418f,  -0.210235596f, -0.357818604f, -0.296325684f, -0.247131348f, -0.2840271f,
      -0.247131348f, -0.247131348f},
     -140.64398193359375},
    {"Q5_0",
     6,
     32,
     "4c22f58ee7455ce12f105fad1fde573a8be5e2df4e04",
     {0.147583008f,  -0.18447876f,  0.18447876f,   -0.196777344f, 0.18447876f,   0.159881592f,
      0.18447876f,   0.172180176f,  -0.110687256f, 0.12298584f,   0.135284424f,  0.0614929199f,
      -0.172180176f, -0.012298584f, -0.024597168f, 0.0491943359f, 0.0614929199f, 0.172180176f,
      0.024597168f,  -0.18447876f,  -0.135284424f, 0.12298584f,   0.012298584f,  0.159881592f,
      0.0614929199f, -0.159881592f, 0.0983886719f, -0.024597168f, -0.024597168f, -0.036895752f,
      0.0491943359f, -0.196777344f},
     2.226043701171875},
    {"Q5_1",
     7,
     32,
     "4c22ecb50980556fee3487534bce27511e2647b294722bcc",
     {-0.00115966797f, -0.320922852f,   -0.2840271f,    -0.136444092f,  -0.234832764f,
      -0.197937012f,   -0.2840271f,     -0.357818604f,  -0.197937012f,  -0.296325684f,
      -0.2840271f,     -0.34552002f,    -0.320922852f,  -0.34552002f,   -0.234832764f,
      -0.0257568359f,  -0.00115966797f, -0.333221436f,  -0.0749511719f, -0.308624268f,
      -0.124145508f,   -0.22253418f,    -0.148742676f,  -0.308624268f,  -0.16104126f,
      -0.148742676f,   -0.124145508f,   -0.0380554199f, -0.259429932f,  -0.0872497559f,
      -0.148742676f,   -0.22253418f},
     -100.34152221679688},
    {"Q8_0",
     8,
     32,
     "4c220f5125cc85814a81f73cc40350eedf15d7d8745efaf3ad6635ef448eac3d50bd",
     {0.18447876f,  0.996185303f,  0.455047607f,   -0.639526367f, -1.51272583f,  -1.56192017f,
      0.910095215f, -1.56192017f,  -0.110687256f,  0.737915039f,  -0.737915039f, 0.036895752f,
      0.983886719f, -0.221374512f, -0.405853271f,  0.258270264f,  -0.504241943f, -0.491943359f,
      1.42663574f,  1.15606689f,   -0.0737915039f, -0.159881592f, -1.02078247f,  1.25445557f,
      0.651824951f, -0.209075928f, 0.836303711f,   -1.40203857f,  -1.03308105f,  0.750213623f,
      0.983886719f, -0.824005127f},
     9.5928955078125},
    {"Q4_K",
     12,
     256,
     "4c22ecb5a576f7385ba4a71b29b1d7a2ee6054cc0a31316328ccd86107b61b9c2bf0adfd9db960cf"
     "1c275cb67cd8f1666c8da57a9af5bb516c662600ca6b5aa190ef9dec945352fd9630d4d20228b167"
     "571230dbd5d492235286fe428c7d808db41bfbddc44770724f0ebe00c331a4573ced79e3307b5874"
     "03aa58db36560bcb8866ea98f6bc958033b0cab26901bc0a",
     {16.3638306f, 15.3165894f, 18.493103f,  16.8803711f, 8.67907715f, 15.9150391f, 24.7723389f,
      15.4537354f, 14.6524658f, 21.8752136f, 16.1916504f, 7.67059326f, 18.4239502f, 4.04553223f,
      10.4482117f, 17.30896f,   14.4345703f, 13.4367676f, 13.7214966f, 16.9604187f, 3.77496338f,
      15.4537354f, 13.9883423f, 22.5516357f, 16.1916504f, 7.16635132f, 22.7430725f, 3.87335205f,
      13.1784973f, 23.2860718f, 15.7874146f, 18.9465332f},
     457756.13208007812},
    {"Q5_K",
     13,
     256,
     "4c22ecb58a34420cfb37319924e2c859665dbc6a49ae23c96df04260dfb40a5704d26a3bb9de1a81"
     "5db9ee88bf50947ebb0c3c0bfa877d7a08d5d8059f8e617de1997dbab186d4909e7d979de63f5d8d"
     "56acd3300efd82bfc2f4084bfb716542050bf904233f48dc532964b0723f1e107d3195ad61800e8c"
     "2e741c466a7d07ec6b3332bb704073312952f6178bef765d8e2db200900f0536b86a6b9a11fb7ce3"
     "c13e4d9cd7eb7c1afedab66522c83452",
     {23.1897583f, 35.7050781f, 18.3325195f, 9.84326172f, 25.5898438f, 5.69818115f, 5.62207031f,
      23.1897583f, 20.3564453f, 18.553894f,  13.8280029f, 18.9486084f, 5.77197266f, 13.9157104f,
      25.4035034f, 20.3564453f, 18.6522827f, 12.0570068f, 21.1623535f, 5.69818115f, 14.6905212f,
      22.4518433f, 34.4260254f, 18.2341309f, 12.3521729f, 32.2310791f, 5.03173828f, 15.7973938f,
      25.6494751f, 36.3446045f, 18.3325195f, 13.2376709f},
     480049.82373046875},
    {"Q6_K",
     14,
     256,
     "dda04c819c1a46c2a0d2bc7b4c6333f2075f11e1a76bca5f775cc20f8c46f93a660f7f8ac0713f06"
     "e927c5eb5222b15f09f3e81dba6810cdda041b11f5eed6af1742847a1a3fb3e41bf35112ea86a92f"
     "e8675fbdc0b63b309155086cc66269aef8c9255589703a11a65d51f2d480e88eeb9b5a91b1cdf842"
     "1a5193e3e97f0bf53b2338c888795979b7e1f321bd835f3f10573bd1e46563c8270335ff71f408ad"
     "4332a2a8c830d75f0f081611a628872ec0d6d63e70d3cf01aa0ea20f94ee68d14b0384eeb8394243"
     "91959834bcf9345d4c22",
     {26.7494202f,   -1.52502441f, -23.9084473f, -21.9160767f, 42.1103516f,  10.8719482f,
      -0.516540527f, -28.5942078f, 10.6751709f,  23.0229492f,  -14.8320923f, 21.0551758f,
      -4.47668457f,  -12.7905273f, -9.22393799f, 32.0255127f,  -11.2163086f, -8.24005127f,
      -10.5275879f,  -17.2672119f, 15.3486328f,  -12.9135132f, -25.925415f,  -1.40203857f,
      -15.6560974f,  -2.63189697f, -6.69042969f, -9.59289551f, -3.6895752f,  2.87786865f,
      8.41223145f,   14.0080872f},
     18624.495941162109},
};

// ---- values -------------------------------------------------------------------------------------
TEST(types_are_the_packages)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const struct quant_type *t = quant_type_at(types[i].number);
        uint8_t block[256];
        float values[256], one;
        double sum = 0;
        print_message("%s\n", types[i].name);
        assert_non_null(t);
        assert_string_equal(t->name, types[i].name);
        const int len = types[i].n / t->values * t->bytes;
        assert_int_equal(strlen(types[i].bytes), 2 * len);
        for (int k = 0; k < len; k++) sscanf(types[i].bytes + 2 * k, "%2hhx", &block[k]);
        quant_read(t, block, 0, types[i].n, values);
        for (int k = 0; k < types[i].n; k++) sum += (k + 1) * (double)values[k];
        assert_true(sum == types[i].sum);
        for (int k = 0; k < 32 && k < types[i].n; k++)
            assert_true(values[types[i].n > 32 ? k * 37 % 256 : k] == types[i].values[k]);
        for (int k = 0; k < types[i].n; k++) { // a part of a block
            quant_read(t, block, k, 1, &one);
            assert_true(one == values[k]);
        }
    }
}

// ---- folders ------------------------------------------------------------------------------------
struct loaded {
    struct device *dev;
    struct model_config *config;
    struct weights *weights;
};

static void load(const char *folder, struct loaded *m)
{
    *m = (struct loaded){0};
    assert_ok(device_open("cpu", &m->dev));
    assert_ok(model_config_load(folder, &m->config));
    assert_ok(weights_plan(m->config, DT_F32, &m->weights));
    assert_ok(weights_alloc(m->weights, m->dev));
    assert_ok(weights_load(m->weights, m->dev, folder));
}

static void release(struct loaded *m)
{
    weights_free(m->weights);
    model_config_free(m->config);
    device_free(m->dev);
}

static void compare_tensors(const struct loaded *a, const struct loaded *b)
{
    assert_int_equal(a->weights->n_tensors, b->weights->n_tensors);
    for (int i = 0; i < a->weights->n_tensors; i++) {
        const struct weight_tensor *t = &a->weights->tensors[i];
        float *x = malloc((size_t)t->n * sizeof *x), *y = malloc((size_t)t->n * sizeof *y);
        assert_string_equal(t->name, b->weights->tensors[i].name);
        assert_int_equal(t->n, b->weights->tensors[i].n);
        assert_ok(weights_read(a->weights, a->dev, i, x));
        assert_ok(weights_read(b->weights, b->dev, i, y));
        for (int64_t k = 0; k < t->n; k++)
            if (fabsf(x[k] - y[k]) > 1e-6f) // Gemma's norms were 1 more
                fail_msg("%s: value %lld is %g and %g", t->name, (long long)k, x[k], y[k]);
        free(x);
        free(y);
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
        struct loaded a, b;
        print_message("%s\n", families[i][1]);
        gguf_write_folder(folder, families[i][1], path);
        load(folder, &a);
        load(path, &b);
        compare_tensors(&a, &b);
        if (i > 0) compare_configs(a.config, b.config); // Mistral's files are llama's
        release(&a);
        release(&b);
    }
}

// ---- positions ----------------------------------------------------------------------------------
// A llama of one small matrix: its config alone is read.
static void put_llama(struct gguf_writer *w)
{
    static const struct {
        const char *key;
        double value; // an integer where it is one
    } keys[] = {{"llama.context_length", 131072},
                {"llama.embedding_length", 64},
                {"llama.block_count", 1},
                {"llama.feed_forward_length", 64},
                {"llama.attention.head_count", 4},
                {"llama.rope.freq_base", 500000},
                {"llama.attention.layer_norm_rms_epsilon", 1e-5}};
    static const float zeros[64 * 8];
    json_t *value = json_string("llama");
    gguf_put(w, "general.architecture", value);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        json_decref(value);
        value = keys[i].value == (int)keys[i].value ? json_integer((int)keys[i].value)
                                                    : json_real(keys[i].value);
        gguf_put(w, keys[i].key, value);
    }
    json_decref(value);
    gguf_put_tensor(w, "token_embd.weight", 2, (int64_t[]){8, 64}, 0, zeros, sizeof zeros);
}

static const char *finish(struct gguf_writer *w)
{
    const char *path = test_path(test_folder(), "model.gguf");
    struct bytes file = BYTES_INIT;
    gguf_finish(w, &file);
    test_write(path, file.data, file.len);
    bytes_release(&file);
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
    assert_status(model_config_load(finish(&w), &config), ST_UNSUPPORTED);
    assert_message("rope_freqs.weight");
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
    struct tokenizer *a, *b;
    assert_ok(tokenizer_load(folder, &a));
    assert_ok(tokenizer_load(file, &b));
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct token_list x = TOKEN_LIST_INIT, y = TOKEN_LIST_INIT;
        struct bytes back = BYTES_INIT, other = BYTES_INIT;
        assert_ok(tokenizer_encode(a, texts[i], strlen(texts[i]), false, &x));
        assert_ok(tokenizer_encode(b, texts[i], strlen(texts[i]), false, &y));
        print_message("%s: %d, %d\n", texts[i], x.n, y.n);
        assert_int_equal(x.n, y.n);
        if (x.n) assert_memory_equal(x.ids, y.ids, (size_t)x.n * sizeof *x.ids);
        assert_ok(tokenizer_decode(a, x.ids, x.n, false, &back));
        assert_ok(tokenizer_decode(b, x.ids, x.n, false, &other));
        assert_string_equal(bytes_text(&back), bytes_text(&other));
        token_list_release(&x);
        token_list_release(&y);
        bytes_release(&back);
        bytes_release(&other);
    }
    tokenizer_free(a);
    tokenizer_free(b);
}

// The tokens of a tokenizer.json; a score is less by one for each merge before the token's own.
static void put_tokens(struct gguf_writer *w, const char *folder, const char *model,
                       const char *pre)
{
    json_t *json = json_load_file(test_path(folder, "tokenizer.json"), 0, NULL), *one;
    json_t *texts_of = json_array(), *types_of = json_array(), *scores = json_array();
    json_t *inner = json_object_get(json, "model"), *name = json_string(model), *word;
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
    gguf_put(w, "tokenizer.ggml.model", name);
    gguf_put(w, "tokenizer.ggml.tokens", texts_of);
    gguf_put(w, "tokenizer.ggml.token_type", types_of);
    if (pre) {
        word = json_string(pre);
        gguf_put(w, "tokenizer.ggml.pre", word);
        json_decref(word);
        json_t *merges = json_array(); // "left right"
        json_array_foreach (json_object_get(inner, "merges"), i, one)
            json_array_append_new(
                merges, json_is_string(one)
                            ? json_incref(one)
                            : json_sprintf("%s %s", json_string_value(json_array_get(one, 0)),
                                           json_string_value(json_array_get(one, 1))));
        gguf_put(w, "tokenizer.ggml.merges", merges);
        json_decref(merges);
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
    json_decref(name);
    json_decref(texts_of);
    json_decref(types_of);
    json_decref(scores);
    json_decref(json);
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
    assert_status(tokenizer_load(finish(&w), &t), ST_UNSUPPORTED);
    assert_message("tokenizer.ggml.pre is tekken");
    put_llama(&w);
    put_tokens(&w, folder, "bert", "gpt-2");
    const char *file = finish(&w);
    assert_status(tokenizer_load(file, &t), ST_UNSUPPORTED);
    assert_message("tokenizer.ggml.model is bert");
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
    struct gguf_writer w = {.metadata = BYTES_INIT};
    json_t *value = json_string("mamba"), *one = json_integer(8);
    static const float zeros[512];
    gguf_put(&w, "general.architecture", value);
    assert_refused(&w, ST_UNSUPPORTED, "general.architecture is mamba");
    put_llama(&w);
    gguf_put_tensor(&w, "output.weight", 2, (int64_t[]){1, 256}, 10, zeros, 84);
    assert_refused(&w, ST_UNSUPPORTED, "tensor output.weight is of type Q2_K (10)");
    put_llama(&w);
    gguf_put_tensor(&w, "output.weight", 2, (int64_t[]){1, 256}, 77, zeros, 84);
    assert_refused(&w, ST_UNSUPPORTED, "of type unknown (77)");
    put_llama(&w);
    gguf_put_tensor(&w, "output.weight", 2, (int64_t[]){1, 48}, 8, zeros, 102);
    assert_refused(&w, ST_FORMAT, "rows of 48 are not whole blocks of Q8_0");
    put_llama(&w);
    assert_refused(&w, ST_NOT_FOUND, "tensor model.layers.0.input_layernorm.weight is missing");
    put_llama(&w);
    gguf_put(&w, "llama.expert_count", one);
    assert_refused(&w, ST_UNSUPPORTED, "experts");
    put_llama(&w);
    gguf_put(&w, "llama.rope.dimension_count", one);
    assert_refused(&w, ST_UNSUPPORTED, "rotated in part");
    json_decref(value);
    json_decref(one);
}

TEST(damaged_files_are_refused)
{
    struct gguf_writer w = {.metadata = BYTES_INIT};
    struct bytes file = BYTES_INIT;
    struct gguf *g;
    json_t *json;
    gguf_put_folder(&w, test_path(test_root(), "tools/demo-model"), "qwen2");
    gguf_finish(&w, &file);
    const size_t header = 4096;
    for (size_t len = 0; len < file.len; len += len < header ? 1 : 4099) {
        assert_status(gguf_parse("cut", file.data, len, &g), ST_FORMAT);
        assert_message("cut");
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
    assert_status(gguf_parse("old", file.data, file.len, &g), ST_UNSUPPORTED);
    assert_message("GGUF version 1");
    bytes_release(&file);
}
