/* test_tokenizer.c: common/text/tokenizer.h: tokenizers written by the test itself (byte-level,
 * and SentencePiece-style with byte fallback), whose ids can be worked out by hand; then malformed
 * files. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "common/text/tokenizer.h"
#include "tests/support/support.h"
#include "tests/support/tokens.h"

#include <pthread.h>

// ---- tokenizers of the list "files" -------------------------------------------------------------

// Id of a byte is the byte. 256: "he", 257: "ll", 258: "hell", 259: "hello", 260: " hello",
// 261: "lo"; added: 300 "<|end|>" special, 301 "<tool>", 302 "<pad>" taking white space on both
// sides, 303 "cat" as a single word only, 304 "<|end|><|end|>".
enum { BYTE_LEVEL, SENTENCEPIECE }; // 0 <unk>, 1 <s>, 2 </s>, 3..258 bytes, then 259 "_" and merges

static json_t *file_of(int which)
{
    const json_t *files = test_rows("tokenizer", "files");
    json_t *root = json_deep_copy(json_object_get(json_array_get(files, (size_t)which), "file"));
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    for (int i = 0; i < 256; i++) {
        char name[8] = "";
        if (which == BYTE_LEVEL)
            byte_level_char((unsigned char)i, name);
        else
            snprintf(name, sizeof(name), "<0x%02X>", (unsigned)i);
        json_object_set_new(vocab, name, json_integer(which == BYTE_LEVEL ? i : 3 + i));
    }
    return root;
}

// Takes the file.
static struct tokenizer *parse(json_t *json, const json_t *config)
{
    struct tokenizer *t = NULL;
    char *text = json_dumps(json, 0), *more = config ? json_dumps(config, 0) : NULL;
    assert_non_null(text);
    const struct tokenizer_text files[TOKENIZER_FILES] = {{text, strlen(text)},
                                                          {more, more ? strlen(more) : 0}};
    assert_ok(tokenizer_parse("tokenizer.json", files, &t));
    free(text);
    free(more);
    json_decref(json);
    return t;
}

// A list's numbers; until the next call.
static const int32_t *ids_of(const json_t *list)
{
    static int32_t ids[64];
    assert_in_range(json_array_size(list), 0, 64);
    for (size_t i = 0; i < json_array_size(list); i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    return ids;
}

TEST(byte_alphabet)
{
    bool seen[512] = {false};
    for (int i = 0; i < 256; i++) {
        char c[4];
        int n = byte_level_char((unsigned char)i, c);
        uint32_t code = utf8_decode(c, n);
        assert_true(code > 0x20 && code < 0x144 && !seen[code]);
        seen[code] = true;
        assert_int_equal(byte_level_byte(code), i);
    }
    assert_int_equal(byte_level_byte(' '), -1);
    assert_int_equal(byte_level_byte(0x144), -1);
    assert_int_equal(byte_level_byte(0x120), ' '); // GPT-2's well-known G with a dot
}

// A row's file, with what it says of the model and of the vocabulary: ids of texts, texts of ids.
TEST(ids_and_texts)
{
    const json_t *cases = test_rows("tokenizer", "ids_and_texts"), *row, *ids, *one;
    const char *text;
    size_t i, k;
    json_array_foreach (cases, i, row) {
        const bool bytes = strcmp(row_text(cases, i, "of"), "byte_level") == 0;
        json_t *json = file_of(bytes ? BYTE_LEVEL : SENTENCEPIECE);
        json_t *model = json_object_get(json, "model");
        json_object_update(model, json_object_get(row, "model"));
        json_object_update(json_object_get(model, "vocab"), json_object_get(row, "vocab"));
        struct tokenizer *t = parse(json, json_object_get(row, "config"));
        json_object_foreach (json_object_get(row, "ids"), text, ids) {
            assert_ids(t, text, strlen(text), false, ids_of(ids), (int)json_array_size(ids));
        }
        json_array_foreach (json_object_get(row, "texts"), k, one) {
            const json_t *list = json_object_get(one, "ids"), *want = json_object_get(one, "text");
            assert_text(t, ids_of(list), (int)json_array_size(list),
                        json_is_true(json_object_get(one, "skip")), json_string_value(want),
                        json_string_length(want));
        }
        tokenizer_free(t);
    }
}

TEST(special_tokens)
{
    const int32_t with_nul[] = {'a', 0, 'b'}, with_bos[] = {300, 259}, piece_bos[] = {1, 264};
    json_t *config = json_of("{\"eos_token\":\"<|end|>\",\"pad_token\":{\"content\":\"<pad>\"}}"),
           *llama = json_of("{\"tokenizer_class\":\"LlamaTokenizer\",\"add_bos_token\":true}"),
           *named = json_of("{\"bos_token\":\"<s>\",\"add_bos_token\":true}");
    struct tokenizer *t = parse(file_of(BYTE_LEVEL), config),
                     *pieces = parse(file_of(SENTENCEPIECE), llama),
                     *by_name = parse(file_of(SENTENCEPIECE), named);
    assert_ids(t, "a\0b", 3, false, with_nul, 3);
    assert_ids(t, "hello", 5, true, with_bos, 2);
    assert_ids(t, "", 0, true, with_bos, 1);
    assert_ids(pieces, "hi", 2, true, piece_bos, 2);
    assert_ids(by_name, "hi", 2, true, piece_bos, 2);
    assert_int_equal(tokenizer_vocab_size(t), 305);
    assert_int_equal(tokenizer_eos(t), 300);
    assert_int_equal(tokenizer_eos(pieces), 2);
    assert_int_equal(tokenizer_id(t, "<tool>"), 301);
    assert_int_equal(tokenizer_id(t, "no such token"), -1);
    assert_string_equal(tokenizer_token(t, 259), "hello");
    assert_null(tokenizer_token(t, 290));
    assert_null(tokenizer_token(t, -1));
    assert_true(tokenizer_is_special(t, 300));
    assert_false(tokenizer_is_special(t, 301));
    tokenizer_free(t);
    tokenizer_free(pieces);
    tokenizer_free(by_name);
}

TEST(refused_text)
{
    struct tokenizer *t = parse(file_of(BYTE_LEVEL), NULL);
    SCOPED(token_list_release) struct token_list ids = TOKEN_LIST_INIT;
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    assert_ok(token_list_push(&ids, 7));
    assert_fails(tokenizer_encode(t, "ab\xff", 3, true, &ids), ST_INVALID, "byte 2");
    assert_int_equal(ids.n, 1); // untouched
    bytes_puts(&text, "kept");
    assert_status(tokenizer_decode(t, (const int32_t[]){'a', -1}, 2, false, &text), ST_INVALID);
    assert_string_equal(bytes_text(&text), "kept");
    tokenizer_free(t);
}

// A megabyte that is one word, in near-linear time; the bound is loose enough for any sanitizer.
TEST(long_word)
{
    enum { N = 1 << 20 };
    struct tokenizer *t = parse(file_of(SENTENCEPIECE), NULL);
    SCOPED(token_list_release) struct token_list ids = TOKEN_LIST_INIT;
    char *text = test_keep(malloc(N));
    assert_non_null(text);
    memset(text, 'i', N);
    int64_t start = clock_now_ns();
    assert_ok(tokenizer_encode(t, text, N, false, &ids));
    assert_true(clock_ms_since(start) < 30000);
    assert_int_equal(ids.n, 1 + N / 2); // the prefix, and pairs
    assert_int_equal(ids.ids[N / 2], 263);
    tokenizer_free(t);
}

static void *encode_again(void *arg)
{
    const struct tokenizer *t = arg;
    SCOPED(token_list_release) struct token_list ids = TOKEN_LIST_INIT;
    bool ok = true;
    for (int i = 0; i < 500; i++) {
        ids.n = 0;
        ok =
            ok && tokenizer_encode(t, "hello hello<|end|>", 18, false, &ids) == ST_OK && ids.n == 3;
    }
    return ok ? arg : NULL;
}

TEST(threads)
{
    struct tokenizer *t = parse(file_of(BYTE_LEVEL), NULL);
    pthread_t thread[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, encode_again, t), 0);
    for (int i = 0; i < 4; i++) {
        void *result;
        assert_int_equal(pthread_join(thread[i], &result), 0);
        assert_ptr_equal(result, t);
    }
    tokenizer_free(t);
}

// ---- malformed files ---------------------------------------------------------------------------

TEST(malformed)
{
    const json_t *cases = test_rows("tokenizer", "malformed");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *json = file_of(BYTE_LEVEL), *at = json, *wrapped;
        char value[500];
        struct tokenizer *t = NULL;
        const char *key = row_text(cases, i, "path");
        snprintf(value, sizeof(value), "[%s]", row_text(cases, i, "value"));
        wrapped = json_of(value);
        for (const char *end; (end = strchr(key, '/')); key = end + 1)
            at = json_object_getn(at, key, (size_t)(end - key));
        json_object_set(at, key, json_array_get(wrapped, 0));
        char *text = test_keep(json_dumps(json, 0));
        const struct tokenizer_text files[TOKENIZER_FILES] = {{text, strlen(text)}};
        assert_status(tokenizer_parse("F.json", files, &t), row_status(cases, i, "status"));
        assert_message(row_text(cases, i, "message"));
        assert_message("F.json");
        assert_null(t);
        json_decref(json);
    }
}

TEST(truncated)
{
    json_t *json = test_keep(file_of(SENTENCEPIECE));
    char *text = test_keep(json_dumps(json, 0));
    size_t len = strlen(text);
    for (size_t n = 0; n < len; n += 1 + len / 300) {
        struct tokenizer *t = NULL;
        const struct tokenizer_text files[TOKENIZER_FILES] = {{text, n}};
        assert_fails(tokenizer_parse("F.json", files, &t), ST_FORMAT, "F.json");
    }
    struct tokenizer *t = NULL;
    const struct tokenizer_text files[TOKENIZER_FILES] = {{text, len}, {"{", 1}};
    assert_fails(tokenizer_parse("F.json", files, &t), ST_FORMAT, "tokenizer_config.json");
    assert_fails(tokenizer_load("/nonexistent/folder", &t), ST_NOT_FOUND,
                 "/nonexistent/folder: no such folder");
    assert_null(t);
}
