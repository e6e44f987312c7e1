/* test_tokenizer_parts.c: the sections of tokenizer.json by themselves: pre-tokenizers,
 * normalizers. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "tests/support/support.h"
#include "tests/support/tokens.h"

// Pre-tokenizers over the same bytes: words end where ids of merges show it.
TEST(pretokenizers)
{
    static const struct {
        const char *section, *text, *words;
    } cases[] = {
        {"{\"type\":\"ByteLevel\",\"add_prefix_space\":false}", "it's 12 a  b",
         "it|'s|\xc4\xa0"
         "12|\xc4\xa0"
         "a|\xc4\xa0|\xc4\xa0"
         "b"},
        {"{\"type\":\"ByteLevel\",\"use_regex\":false}", "a b",
         "\xc4\xa0"
         "a\xc4\xa0"
         "b"},
        {"{\"type\":\"Digits\",\"individual_digits\":true}", "a12b", "a|1|2|b"},
        {"{\"type\":\"Digits\",\"individual_digits\":false}", "a12b3", "a|12|b|3"},
        {"{\"type\":\"Split\",\"pattern\":{\"String\":\"-\"},\"behavior\":\"Removed\"}", "a--b-",
         "a|b"},
        {"{\"type\":\"Split\",\"pattern\":{\"String\":\"-\"},\"behavior\":\"Isolated\"}", "a--b",
         "a|-|-|b"},
        {"{\"type\":\"Split\",\"pattern\":{\"String\":\"-\"},\"behavior\":\"Contiguous\"}", "a--b",
         "a|--|b"},
        {"{\"type\":\"Split\",\"pattern\":{\"String\":\"-\"},\"behavior\":\"MergedWithPrevious\"}",
         "a--b-c", "a-|-|b-|c"},
        {"{\"type\":\"Split\",\"pattern\":{\"String\":\"-\"},\"behavior\":\"MergedWithNext\"}",
         "a--b-c", "a|-|-b|-c"},
        {"{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a-z]+\"},\"behavior\":\"Removed\","
         "\"invert\":true}",
         "a1bc--d", "a|bc|d"},
        // Oniguruma's \s has no U+180E, which PCRE2's has
        {"{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\s+\"},\"behavior\":\"Isolated\"}",
         "a\xe1\xa0\x8e"
         "b \xc2\x85"
         "c",
         "a\xe1\xa0\x8e"
         "b| \xc2\x85|c"},
        {"{\"type\":\"Split\",\"pattern\":{\"Regex\":\"x*\"},\"behavior\":\"Isolated\"}", "axxb",
         "a|xx|b"},
        {"{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"always\"}", "a  b",
         "_a|_|_b"},
        {"{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"never\",\"split\":"
         "false}",
         "a b", "a_b"},
        {"{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"first\"}", " a", "_a"},
        {"{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":"
         "true},"
         "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}]}",
         "ab 12", "ab|\xc4\xa0|1|2"},
        // Gemma 2, whose normalizer leaves it no space; without that, a word keeps its space
        {"{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},\"behavior\":\"MergedWithPrevious\"}",
         "ab  c d", "ab | |c |d"},
        // DeepSeek-Coder
        {"{\"type\":\"Sequence\",\"pretokenizers\":["
         "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[\\r\\n]\"},\"behavior\":\"Isolated\"},"
         "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\s?\\\\p{L}+\"},\"behavior\":"
         "\"Isolated\"},"
         "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\s?\\\\p{P}+\"},\"behavior\":"
         "\"Isolated\"},"
         "{\"type\":\"Digits\",\"individual_digits\":true},"
         "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}",
         "if x1 == 23;\n\n", "if|\xc4\xa0x|1|\xc4\xa0==\xc4\xa0|2|3|;|\xc4\x8a|\xc4\x8a"},
        {"null", "a b", "a b"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        json_t *section = NULL;
        char wrapped[1000];
        snprintf(wrapped, sizeof(wrapped), "[%s]", cases[i].section);
        section = json_of(wrapped);
        struct step_list p = {0};
        struct bytes text = BYTES_INIT, joined = BYTES_INIT;
        struct piece_list words = {0};
        assert_ok(pretokenizer_parse("test", json_array_get(section, 0), &p));
        assert_ok(
            pretokenizer_apply(&p, cases[i].text, strlen(cases[i].text), true, &text, &words));
        for (size_t k = 0; k < words.n; k++) {
            if (k) bytes_puts(&joined, "|");
            bytes_append(&joined, text.data + words.items[k].start, words.items[k].len);
        }
        assert_string_equal(bytes_text(&joined), cases[i].words);
        step_list_release(&p);
        bytes_release(&text);
        bytes_release(&joined);
        piece_list_release(&words);
        json_decref(section);
    }
}

TEST(normalizers)
{
    static const struct {
        const char *section, *text, *normal;
    } cases[] = {
        {"{\"type\":\"NFC\"}", "e\xcc\x81", "\xc3\xa9"},
        {"{\"type\":\"NFD\"}", "\xc3\xa9", "e\xcc\x81"},
        {"{\"type\":\"NFKC\"}", "\xef\xac\x81\xc2\xbd",
         "fi1\xe2\x81\x84"
         "2"},
        {"{\"type\":\"NFKD\"}", "\xef\xac\x81\xc3\xa9", "fie\xcc\x81"},
        {"{\"type\":\"Lowercase\"}", "ABC\xc3\x89\xc4\xb0", "abc\xc3\xa9i\xcc\x87"},
        {"{\"type\":\"Strip\"}", " \t a b\xe3\x80\x80", "a b"},
        {"{\"type\":\"Strip\",\"strip_left\":false}", " a ", " a"},
        {"{\"type\":\"Prepend\",\"prepend\":\"_\"}", "a", "_a"},
        {"{\"type\":\"Prepend\",\"prepend\":\"_\"}", "", ""},
        {"{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" {2,}\"},\"content\":\"$\"}", "a   b c",
         "a$b c"},
        {"{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\" \"},"
         "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"__\"}]}",
         "a b", "__a__b"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        json_t *section = json_of(cases[i].section);
        struct step_list n = {0};
        struct bytes out = BYTES_INIT;
        assert_ok(normalizer_parse("test", section, &n));
        assert_ok(normalizer_apply(&n, cases[i].text, strlen(cases[i].text), true, &out));
        assert_string_equal(bytes_text(&out), cases[i].normal);
        step_list_release(&n);
        bytes_release(&out);
        json_decref(section);
    }
}
