/* test_tokenizer.c: common/text/tokenizer.h: tokenizers written by the test itself (byte-level,
 * and SentencePiece-style with byte fallback), whose ids can be worked out by hand; then malformed
 * files. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "common/text/tokenizer.h"
#include "tests/support/support.h"
#include "tests/support/tokens.h"

#include <pthread.h>

// ---- helpers -----------------------------------------------------------------------------------

static struct tokenizer *parse(const json_t *json, const char *config)
{
    struct tokenizer *t = NULL;
    char *text = json_dumps(json, 0);
    assert_non_null(text);
    const struct tokenizer_text files[TOKENIZER_FILES] = {{text, strlen(text)},
                                                          {config, config ? strlen(config) : 0}};
    assert_ok(tokenizer_parse("tokenizer.json", files, &t));
    free(text);
    return t;
}

// ---- a byte-level tokenizer --------------------------------------------------------------------

// Id of a byte is the byte. 256: "he", 257: "ll", 258: "hell", 259: "hello", 260: " hello",
// 261: "lo"; added: 300 "<|end|>" special, 301 "<tool>", 302 "<pad>" taking white space on both
// sides, 303 "cat" as a single word only, 304 "<|end|><|end|>".
static json_t *byte_level_json(void)
{
    json_t *root = json_of(
        "{\"version\":\"1.0\",\"normalizer\":{\"type\":\"NFC\"},"
        "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
        "\"pattern\":"
        "{\"Regex\":\"(?i:'s|'t)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}|"
        " ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},"
        "\"behavior\":\"Isolated\",\"invert\":false},"
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]},"
        "\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\"},"
        "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<|end|>\",\"type_"
        "id\":0}},"
        "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"special_tokens\":{\"<|end|>\":{\"id\":\"<|"
        "end|>\","
        "\"ids\":[300],\"tokens\":[\"<|end|>\"]}}}]},"
        "\"decoder\":{\"type\":\"ByteLevel\"},"
        "\"added_tokens\":["
        "{\"id\":300,\"content\":\"<|end|>\",\"special\":true,\"normalized\":false},"
        "{\"id\":301,\"content\":\"<tool>\",\"special\":false,\"normalized\":false},"
        "{\"id\":302,\"content\":\"<pad>\",\"special\":true,\"lstrip\":true,\"rstrip\":true},"
        "{\"id\":303,\"content\":\"cat\",\"special\":false,\"single_word\":true},"
        "{\"id\":304,\"content\":\"<|end|><|end|>\",\"special\":true}],"
        "\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[\"h e\",[\"l\",\"l\"],\"he ll\",\"l "
        "o\","
        "[\"hell\",\"o\"],[\"\xc4\xa0\",\"hello\"]]}}");
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    for (int i = 0; i < 256; i++) {
        char name[5] = "";
        byte_level_char((unsigned char)i, name);
        json_object_set_new(vocab, name, json_integer(i));
    }
    const char *const merged[] = {"he", "ll", "hell", "hello", "\xc4\xa0hello", "lo"};
    for (int i = 0; i < 6; i++) json_object_set_new(vocab, merged[i], json_integer(256 + i));
    return root;
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

TEST(byte_level)
{
    json_t *json = byte_level_json();
    struct tokenizer *t =
        parse(json, "{\"eos_token\":\"<|end|>\",\"pad_token\":{\"content\":\"<pad>\"}}");
    ASSERT_IDS(t, "hello", 259);
    ASSERT_IDS(t, "hello hello", 259, 260);
    ASSERT_IDS(t, "helo", 256, 261);
    ASSERT_IDS(t, "hellhelllo", 258, 258, 261);
    ASSERT_IDS(t, "1234", '1', '2', '3', '4');
    ASSERT_IDS(t, "e\xcc\x81", 0xc3, 0xa9); // NFC
    ASSERT_IDS(t, "a  \n b", 'a', ' ', ' ', '\n', ' ', 'b');
    ASSERT_IDS(t, "<|end|>hello<|end|>", 300, 259, 300);
    ASSERT_IDS(t, "<|end|><|end|><|end|>", 304, 300); // the longest one
    ASSERT_IDS(t, "<|end|", '<', '|', 'e', 'n', 'd', '|');
    ASSERT_IDS(t, "a \t<pad>\n b", 'a', 302, 'b');
    ASSERT_IDS(t, "cat cats (cat)", 303, ' ', 'c', 'a', 't', 's', ' ', '(', 303, ')');
    const int32_t with_nul[] = {'a', 0, 'b'}, with_bos[] = {300, 259}, only_bos[] = {300};
    assert_ids(t, "a\0b", 3, false, with_nul, 3);
    assert_ids(t, "hello", 5, true, with_bos, 2);
    assert_ids(t, "", 0, true, only_bos, 1);
    assert_ids(t, "", 0, false, NULL, 0);

    ASSERT_TEXT(t, false, "hello hello<|end|>", 259, 260, 300);
    ASSERT_TEXT(t, true, "hello hello<tool>", 300, 259, 260, 302, 301);
    ASSERT_TEXT(t, false, "\xf0\x9f\x98\x80", 0xf0, 0x9f, 0x98, 0x80);
    ASSERT_TEXT(t, false,
                "\xef\xbf\xbd"
                "a",
                0xf0, 0x9f, 0x98, 'a'); // one for the open character
    ASSERT_TEXT(t, false, "\xef\xbf\xbd\xef\xbf\xbd", 0x80, 0xff);
    ASSERT_TEXT(t, false, "\xef\xbf\xbd", 0xe2, 0x82);
    ASSERT_TEXT(t, false, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 0xed, 0xa0, 0x80); // a surrogate
    ASSERT_TEXT(t, false, "ab", 'a', 290, 9999, 'b'); // ids without tokens

    assert_int_equal(tokenizer_vocab_size(t), 305);
    assert_int_equal(tokenizer_eos(t), 300);
    assert_int_equal(tokenizer_bos(t), -1);
    assert_int_equal(tokenizer_id(t, "<tool>"), 301);
    assert_int_equal(tokenizer_id(t, "no such token"), -1);
    assert_string_equal(tokenizer_token(t, 259), "hello");
    assert_null(tokenizer_token(t, 290));
    assert_null(tokenizer_token(t, -1));
    assert_true(tokenizer_is_special(t, 300));
    assert_false(tokenizer_is_special(t, 301));
    tokenizer_free(t);
    json_decref(json);
}

TEST(refused_text)
{
    json_t *json = byte_level_json();
    struct tokenizer *t = parse(json, NULL);
    struct token_list ids = TOKEN_LIST_INIT;
    struct bytes text = BYTES_INIT;
    assert_ok(token_list_push(&ids, 7));
    assert_status(tokenizer_encode(t, "ab\xff", 3, true, &ids), ST_INVALID);
    assert_message("byte 2");
    assert_int_equal(ids.n, 1); // untouched
    bytes_puts(&text, "kept");
    assert_status(tokenizer_decode(t, (const int32_t[]){'a', -1}, 2, false, &text), ST_INVALID);
    assert_string_equal(bytes_text(&text), "kept");
    token_list_release(&ids);
    bytes_release(&text);
    tokenizer_free(t);
    json_decref(json);
}

// ---- SentencePiece style -----------------------------------------------------------------------

#define SPACE "\xe2\x96\x81"

// 0 <unk>, 1 <s>, 2 </s>, 3..258 bytes, then characters and merges.
static json_t *sentencepiece_json(void)
{
    json_t *root =
        json_of("{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\","
                "\"prepend\":\"" SPACE "\"},"
                "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"" SPACE "\"}]},"
                "\"pre_tokenizer\":null,\"post_processor\":null,"
                "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\","
                "\"pattern\":{\"String\":\"" SPACE
                "\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},"
                "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]},"
                "\"added_tokens\":[{\"id\":0,\"content\":\"<unk>\",\"special\":true},"
                "{\"id\":1,\"content\":\"<s>\",\"special\":true},{\"id\":2,\"content\":\"</"
                "s>\",\"special\":true}],"
                "\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"fuse_unk\":true,\"byte_"
                "fallback\":true,"
                "\"vocab\":{},\"merges\":[\"" SPACE " h\",\"i i\",\"" SPACE "h i\",\"" SPACE
                " " SPACE "\"]}}");
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    const char *const special[] = {"<unk>", "<s>", "</s>"};
    const char *const pieces[] = {SPACE, "h", "i", SPACE "h", "ii", SPACE "hi", SPACE SPACE};
    for (int i = 0; i < 3; i++) json_object_set_new(vocab, special[i], json_integer(i));
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof(name), "<0x%02X>", (unsigned)i);
        json_object_set_new(vocab, name, json_integer(3 + i));
    }
    for (int i = 0; i < 7; i++) json_object_set_new(vocab, pieces[i], json_integer(259 + i));
    return root;
}

TEST(sentencepiece)
{
    json_t *json = sentencepiece_json();
    struct tokenizer *t = parse(json, "{\"bos_token\":\"<s>\",\"add_bos_token\":true}");
    ASSERT_IDS(t, "hi", 264);
    ASSERT_IDS(t, "hii", 262, 263); // "_h" before "ii", and "_hi" needs a single i
    ASSERT_IDS(t, " hi", 259, 264); // the prefix comes all the same
    ASSERT_IDS(t, "   hi", 265, 259, 264);
    ASSERT_IDS(t, "hi<s>hi", 264, 1, 264); // before every stretch, as the file says
    ASSERT_IDS(t, "\xc3\xa9", 259, 3 + 0xc3, 3 + 0xa9);
    const int32_t with_bos[] = {1, 264};
    assert_ids(t, "hi", 2, true, with_bos, 2);
    ASSERT_TEXT(t, false, "hi hi", 264, 264);
    ASSERT_TEXT(t, false, "<s> hi", 1, 264);
    ASSERT_TEXT(t, true, "hi", 1, 264);
    ASSERT_TEXT(t, false, " hi", 265, 260, 261);
    ASSERT_TEXT(t, false, "h\xc3\xa9i", 260, 3 + 0xc3, 3 + 0xa9, 261);
    // a run that is not UTF-8 as a whole is one U+FFFD a byte, its whole characters included
    ASSERT_TEXT(t, false, "h\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 260, 3 + 0xc3, 3 + 0xa9,
                3 + 0xc3);
    tokenizer_free(t);

    // LlamaTokenizer, not legacy: the prefix at the start of the text alone
    t = parse(json, "{\"tokenizer_class\":\"LlamaTokenizer\",\"legacy\":false}");
    ASSERT_IDS(t, "hi<s>hi", 264, 1, 260, 261);
    ASSERT_IDS(t, "<s>hi", 1, 260, 261);
    assert_int_equal(tokenizer_bos(t), 1);
    assert_int_equal(tokenizer_eos(t), 2);
    tokenizer_free(t);
    t = parse(json, "{\"tokenizer_class\":\"LlamaTokenizerFast\",\"legacy\":true}");
    ASSERT_IDS(t, "hi<s>hi", 264, 1, 264);
    tokenizer_free(t);

    // without byte tokens, runs of unknown characters become one <unk>
    json_object_set_new(json_object_get(json, "model"), "byte_fallback", json_false());
    t = parse(json, NULL);
    ASSERT_IDS(t, "hxyzi", 262, 0, 261);
    json_object_set_new(json_object_get(json, "model"), "fuse_unk", json_false());
    tokenizer_free(t);
    t = parse(json, NULL);
    ASSERT_IDS(t, "hxyi", 262, 0, 0, 261);
    tokenizer_free(t);
    json_decref(json);
}

TEST(ignore_merges)
{
    json_t *json = byte_level_json();
    json_t *model = json_object_get(json, "model");
    json_object_set_new(json_object_get(model, "vocab"), "whole", json_integer(262));
    struct tokenizer *t = parse(json, NULL);
    ASSERT_IDS(t, "whole", 'w', 'h', 'o', 'l', 'e'); // no merges lead to it
    tokenizer_free(t);
    json_object_set_new(model, "ignore_merges", json_true());
    t = parse(json, NULL);
    ASSERT_IDS(t, "whole", 262);
    tokenizer_free(t);
    json_decref(json);
}

// A megabyte that is one word, in near-linear time; the bound is loose enough for any sanitizer.
TEST(long_word)
{
    enum { N = 1 << 20 };
    json_t *json = sentencepiece_json();
    struct tokenizer *t = parse(json, NULL);
    struct token_list ids = TOKEN_LIST_INIT;
    char *text = malloc(N);
    assert_non_null(text);
    memset(text, 'i', N);
    int64_t start = clock_now_ns();
    assert_ok(tokenizer_encode(t, text, N, false, &ids));
    assert_true(clock_ms_since(start) < 30000);
    assert_int_equal(ids.n, 1 + N / 2); // the prefix, and pairs
    assert_int_equal(ids.ids[N / 2], 263);
    token_list_release(&ids);
    free(text);
    tokenizer_free(t);
    json_decref(json);
}

static void *encode_again(void *arg)
{
    const struct tokenizer *t = arg;
    struct token_list ids = TOKEN_LIST_INIT;
    bool ok = true;
    for (int i = 0; i < 500; i++) {
        ids.n = 0;
        ok =
            ok && tokenizer_encode(t, "hello hello<|end|>", 18, false, &ids) == ST_OK && ids.n == 3;
    }
    token_list_release(&ids);
    return ok ? arg : NULL;
}

TEST(threads)
{
    json_t *json = byte_level_json();
    struct tokenizer *t = parse(json, NULL);
    pthread_t thread[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, encode_again, t), 0);
    for (int i = 0; i < 4; i++) {
        void *result;
        assert_int_equal(pthread_join(thread[i], &result), 0);
        assert_ptr_equal(result, t);
    }
    tokenizer_free(t);
    json_decref(json);
}

// ---- malformed files ---------------------------------------------------------------------------

TEST(malformed)
{
    const json_t *cases = test_rows("tokenizer", "malformed");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *json = byte_level_json(), *at = json, *wrapped;
        char value[500];
        struct tokenizer *t = NULL;
        const char *key = row_text(cases, i, "path");
        snprintf(value, sizeof(value), "[%s]", row_text(cases, i, "value"));
        wrapped = json_of(value);
        for (const char *end; (end = strchr(key, '/')); key = end + 1)
            at = json_object_getn(at, key, (size_t)(end - key));
        json_object_set(at, key, json_array_get(wrapped, 0));
        char *text = json_dumps(json, 0);
        const struct tokenizer_text files[TOKENIZER_FILES] = {{text, strlen(text)}};
        assert_status(tokenizer_parse("F.json", files, &t), row_status(cases, i, "status"));
        assert_message(row_text(cases, i, "message"));
        assert_message("F.json");
        assert_null(t);
        free(text);
        json_decref(wrapped);
        json_decref(json);
    }
}

TEST(truncated)
{
    json_t *json = sentencepiece_json();
    char *text = json_dumps(json, 0);
    size_t len = strlen(text);
    for (size_t n = 0; n < len; n += 1 + len / 300) {
        struct tokenizer *t = NULL;
        const struct tokenizer_text files[TOKENIZER_FILES] = {{text, n}};
        assert_status(tokenizer_parse("F.json", files, &t), ST_FORMAT);
        assert_message("F.json");
    }
    struct tokenizer *t = NULL;
    const struct tokenizer_text files[TOKENIZER_FILES] = {{text, len}, {"{", 1}};
    assert_status(tokenizer_parse("F.json", files, &t), ST_FORMAT);
    assert_message("tokenizer_config.json");
    assert_status(tokenizer_load("/nonexistent/folder", &t), ST_NOT_FOUND);
    assert_message("/nonexistent/folder: no such folder");
    assert_null(t);
    free(text);
    json_decref(json);
}
