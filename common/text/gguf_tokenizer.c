/* gguf_tokenizer.c: the tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json:
 * byte-level BPE ("gpt2") by its merges and the name of its pre-tokenizer, SentencePiece ("llama")
 * by merges made of its scores, as transformers makes them. See gguf.h. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/model/gguf.h"
#include "common/text/tokenizer_parts.h"
#include <stdlib.h>
#include <string.h>

#define MAX_TOKEN 512 // bytes of one that merges are made for

enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED };

// tokenizer.json without what the file has lists of.
#define TOKENIZER(normalizer, pre_tokenizer, decoder, model)                                       \
    "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"normalizer\":" normalizer         \
    ",\"pre_tokenizer\":" pre_tokenizer ",\"post_processor\":null,\"decoder\":" decoder            \
    ",\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"                            \
    "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null," model "}}"
#define BYTES(regex)                                                                               \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":false,\"use_"             \
    "regex\":" regex "}"
#define SPLIT(first, bytes)                                                                        \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":" first "}," bytes "]}"
#define BYTE_LEVEL(normalizer, pre_tokenizer, ignore_merges)                                       \
    TOKENIZER(normalizer, pre_tokenizer, BYTES("true"),                                            \
              "\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":" ignore_merges)
#define DIGITS SPLIT("\"Digits\",\"individual_digits\":true", BYTES("true"))
#define WORDS(digits)                                                                              \
    SPLIT("\"Split\",\"pattern\":{\"Regex\":\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"                       \
          "[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|" digits "| ?[^\\\\s\\\\p{L}\\\\p{N}]+"         \
          "[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},"                           \
          "\"behavior\":\"Isolated\",\"invert\":false",                                            \
          BYTES("false"))
#define ONE_DIGIT WORDS("\\\\p{N}")
#define LLAMA3    BYTE_LEVEL("null", WORDS("\\\\p{N}{1,3}"), "true")
#define SPACE     "\"\xe2\x96\x81\"" // what SentencePiece has for one
#define PIECES(prepend, strip)                                                                     \
    TOKENIZER("{\"type\":\"Sequence\",\"normalizers\":[" prepend                                   \
              "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":" SPACE "}]}",     \
              "null",                                                                              \
              "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":"            \
              "{\"String\":" SPACE "},\"content\":\" \"},{\"type\":\"ByteFallback\"},"             \
              "{\"type\":\"Fuse\"}" strip "]}",                                                    \
              "\"fuse_unk\":true,\"byte_fallback\":true,\"ignore_merges\":false")

// By tokenizer.ggml.pre; the last two are SentencePiece's, which have merges by scores.
static const struct kind {
    const char *name, *json;
    bool bos; // stands before a text unless the file says otherwise
} kinds[] = {
    {"gpt-2", BYTE_LEVEL("null", BYTES("true"), "false"), false},
    {"smollm", BYTE_LEVEL("null", DIGITS, "false"), false},
    {"starcoder", BYTE_LEVEL("null", DIGITS, "false"), false},
    {"refact", BYTE_LEVEL("null", DIGITS, "false"), false},
    {"qwen2", BYTE_LEVEL("{\"type\":\"NFC\"}", ONE_DIGIT, "false"), false},
    {"deepseek-r1-qwen", BYTE_LEVEL("{\"type\":\"NFC\"}", ONE_DIGIT, "false"), false},
    {"llama-bpe", LLAMA3, true},
    {"llama3", LLAMA3, true},
    {"llama-v3", LLAMA3, true},
    {"a space before a text",
     PIECES("{\"type\":\"Prepend\",\"prepend\":" SPACE "},",
            ",{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}"),
     true},
    {"no space before a text", PIECES("", ""), true},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds, WITH_SPACE = N_KINDS - 2 };

static json_t *get(const struct gguf *g, const char *key)
{
    char whole[64];
    snprintf(whole, sizeof whole, "tokenizer.ggml.%s", key);
    return json_object_get(g->metadata, whole);
}

static int type_of(const struct gguf *g, size_t id)
{
    const json_t *types = get(g, "token_type");
    return types ? (int)json_integer_value(json_array_get(types, id)) : NORMAL;
}

// Its row; the list of tokens is then one of texts.
static enum status find_kind(const struct gguf *g, const struct kind **ret)
{
    const char *model = json_string_value(get(g, "model")), *pre = json_string_value(get(g, "pre"));
    const bool pieces = model && strcmp(model, "llama") == 0;
    const json_t *one;
    size_t id;
    if (!model || (!pieces && strcmp(model, "gpt2") != 0))
        return status_fail(ST_UNSUPPORTED,
                           "%s: tokenizer.ggml.model is %s; gpt2 and llama are supported", g->where,
                           model ? model : "missing");
    json_array_foreach (get(g, "tokens"), id, one)
        if (!json_is_string(one) || strlen(json_string_value(one)) != json_string_length(one))
            return status_fail(ST_FORMAT, "%s: tokenizer.ggml.tokens[%zu] is no text", g->where,
                               id);
    *ret = pieces ? &kinds[WITH_SPACE + json_is_false(get(g, "add_space_prefix"))] : NULL;
    for (int i = 0; !pieces && pre && i < WITH_SPACE; i++)
        if (strcmp(kinds[i].name, pre) == 0) *ret = &kinds[i];
    if (*ret) return ST_OK;
    return status_fail(ST_UNSUPPORTED,
                       "%s: tokenizer.ggml.pre is %s, which is not supported; a folder of the "
                       "model has a tokenizer.json",
                       g->where, pre ? pre : "missing");
}

// ---- SentencePiece: merges by score -------------------------------------------------------------
struct merge {
    double score;
    const char *text;
    size_t left, len, order; // order: of finding
};

static int by_score(const void *a, const void *b)
{
    const struct merge *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    if (x->left != y->left) return x->left > y->left ? -1 : 1;
    return x->order < y->order ? -1 : 1;
}

// Every way in which two tokens are a third one.
static enum status make_merges(const struct gguf *g, json_t **ret)
{
    struct token_map map = {.texts = BYTES_INIT};
    struct merge *list = NULL, *grown;
    const json_t *tokens = get(g, "tokens"), *one;
    json_t *merges = json_array();
    size_t n = 0, id;
    enum status st = ST_OK;
    json_array_foreach (tokens, id, one)
        CHECK(token_map_add(&map, json_string_value(one), json_string_length(one), (int)id));
    json_array_foreach (tokens, id, one) {
        const char *text = json_string_value(one);
        const size_t len = json_string_length(one);
        const double score = json_number_value(json_array_get(get(g, "scores"), id));
        if (type_of(g, id) != NORMAL || len > MAX_TOKEN) continue;
        for (size_t k = 1; k < len; k++) {
            if (token_map_id(&map, text, k) < 0 || token_map_id(&map, text + k, len - k) < 0)
                continue;
            if (!(grown = array_room(list, n, sizeof *list)))
                FAIL(ST_NO_MEMORY, "no memory for merges");
            list = grown;
            list[n] = (struct merge){score, text, k, len, n};
            n++;
        }
    }
    if (n > 0) qsort(list, n, sizeof *list, by_score);
    for (size_t i = 0; i < n; i++)
        json_array_append_new(merges,
                              json_pack("[s%,s%]", list[i].text, list[i].left,
                                        list[i].text + list[i].left, list[i].len - list[i].left));
    *ret = json_incref(merges);
out:
    json_decref(merges);
    token_map_release(&map);
    free(list);
    return status_context(st, "%s: tokenizer.ggml.tokens", g->where);
}

// ---- the two files ------------------------------------------------------------------------------
// model.vocab, and added_tokens.
static void add_tokens(const struct gguf *g, json_t *tokenizer, json_t *model)
{
    json_t *vocab = json_object(), *added = json_array(), *one;
    size_t id;
    json_array_foreach (get(g, "tokens"), id, one) {
        const char *text = json_string_value(one);
        const int type = type_of(g, id);
        if (type == UNUSED && strncmp(text, "[PAD", 4) == 0) continue; // a row without a token
        json_object_set_new(vocab, text, json_integer((json_int_t)id));
        if (type == UNKNOWN) json_object_set(model, "unk_token", one);
        if (type == UNKNOWN || type == CONTROL || type == USER_DEFINED)
            json_array_append_new(added,
                                  json_pack("{s:I,s:O,s:b,s:b,s:b,s:b,s:b}", "id", (json_int_t)id,
                                            "content", one, "single_word", 0, "lstrip", 0, "rstrip",
                                            0, "normalized", 0, "special", type != USER_DEFINED));
    }
    json_object_set_new(model, "vocab", vocab);
    json_object_set_new(tokenizer, "added_tokens", added);
}

enum status gguf_tokenizer(const struct gguf *g, json_t **ret)
{
    const struct kind *kind = NULL;
    json_t *merges = NULL, *tokenizer = NULL, *model;
    enum status st;
    CHECK(find_kind(g, &kind));
    if (get(g, "merges"))
        merges = json_incref(get(g, "merges"));
    else if (kind >= &kinds[WITH_SPACE])
        CHECK(make_merges(g, &merges));
    tokenizer = json_loads(kind->json, 0, NULL);
    if (!(model = json_object_get(tokenizer, "model")))
        FAIL(ST_NO_MEMORY, "%s: no memory for its tokenizer", g->where);
    add_tokens(g, tokenizer, model);
    json_object_set(model, "merges", merges);
    *ret = json_incref(tokenizer);
out:
    json_decref(tokenizer);
    json_decref(merges);
    return st;
}

enum status gguf_tokenizer_config(const struct gguf *g, json_t **ret)
{
    static const char *const names[][2] = {{"bos_token_id", "bos_token"},
                                           {"eos_token_id", "eos_token"},
                                           {"unknown_token_id", "unk_token"},
                                           {"padding_token_id", "pad_token"}};
    const struct kind *kind = NULL;
    enum status st = find_kind(g, &kind);
    if (st != ST_OK) return st;
    const json_t *bos = get(g, "add_bos_token"), *chat;
    json_t *config = json_pack(
        "{s:s,s:b,s:b,s:b,s:b}", "tokenizer_class",
        kind == &kinds[WITH_SPACE] ? "LlamaTokenizer" : "PreTrainedTokenizerFast", "legacy", 0,
        "add_bos_token", bos ? json_is_true(bos) : kind->bos, "add_eos_token",
        json_is_true(get(g, "add_eos_token")), "clean_up_tokenization_spaces", 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const json_t *id = get(g, names[i][0]);
        json_t *token = json_is_integer(id)
                            ? json_array_get(get(g, "tokens"), (size_t)json_integer_value(id))
                            : NULL;
        if (token) json_object_set(config, names[i][1], token);
    }
    if ((chat = json_object_get(g->metadata, "tokenizer.chat_template")))
        json_object_set(config, "chat_template", (json_t *)chat);
    *ret = config;
    return ST_OK;
}
