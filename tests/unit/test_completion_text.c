/* test_completion_text.c: a completion's text where its prompt's ends (detokenizer_follow): prompt
 * and completion, put together, give what decoding all ids at once gives. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer.h"
#include "tests/support/support.h"
#include "tests/support/tiny_sentencepiece.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/tokens.h"

static void decode(const struct tokenizer *t, const int32_t *ids, int n, bool skip,
                   struct bytes *ret)
{
    assert_ok(tokenizer_decode(t, ids, n, skip, ret));
}

// The text of `ids` from number n_prompt on.
static void complete(const struct tokenizer *t, const int32_t *ids, int n_prompt, int n, bool skip,
                     struct bytes *ret)
{
    struct detokenizer *d = NULL;
    assert_ok(detokenizer_new(t, skip, &d));
    assert_ok(detokenizer_follow(d, ids, n_prompt));
    for (int i = n_prompt; i < n; i++) assert_ok(detokenizer_push(d, ids[i], ret));
    assert_ok(detokenizer_flush(d, ret));
    detokenizer_free(d);
}

static void check(const struct tokenizer *t, const int32_t *ids, int n_prompt, int n, bool skip)
{
    SCOPED(bytes_release)
    struct bytes prompt = BYTES_INIT, completion = BYTES_INIT, whole = BYTES_INIT;
    decode(t, ids, n_prompt, skip, &prompt);
    decode(t, ids, n, skip, &whole);
    complete(t, ids, n_prompt, n, skip, &completion);
    bytes_append(&prompt, bytes_text(&completion), completion.len);
    assert_string_equal(bytes_text(&prompt), bytes_text(&whole));
}

// At every place where the text can be cut.
static void check_cuts(const struct tokenizer *t, const char *text, bool add_special)
{
    SCOPED(token_list_release) struct token_list ids = TOKEN_LIST_INIT;
    assert_ok(tokenizer_encode(t, text, strlen(text), add_special, &ids));
    for (int cut = 0; cut <= ids.n; cut++)
        for (int skip = 0; skip < 2; skip++) check(t, ids.ids, cut, ids.n, skip);
}

static struct tokenizer *load(enum status (*write)(const char *folder))
{
    const char *folder = test_folder();
    struct tokenizer *t = NULL;
    assert_ok(write(folder));
    assert_ok(tokenizer_load(folder, &t));
    return t;
}

TEST(sentencepiece)
{
    struct tokenizer *t = load(tiny_sentencepiece_write);
    check_cuts(t, "on up a time", true);
    check_cuts(t, "on up a time", false);
    check_cuts(t, "  on  up ", true);
    check_cuts(t, " ", true);
    check_cuts(t, "a", false);
    tokenizer_free(t);
}

TEST(first_space_is_kept)
{
    struct tokenizer *t = load(tiny_sentencepiece_write);
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    const int32_t prompt_and_time[] = {TINY_SENTENCEPIECE_BOS, 260, TINY_SENTENCEPIECE_TIME};
    const int32_t bos_and_time[] = {TINY_SENTENCEPIECE_BOS, TINY_SENTENCEPIECE_TIME};
    complete(t, prompt_and_time, 2, 3, true, &text);
    assert_string_equal(bytes_text(&text), " time");
    bytes_clear(&text);
    complete(t, bos_and_time, 1, 2, true, &text); // the text begins with it
    assert_string_equal(bytes_text(&text), "time");
    bytes_clear(&text);
    complete(t, bos_and_time, 1, 2, false, &text); // it stands behind "<s>"
    assert_string_equal(bytes_text(&text), " time");
    bytes_clear(&text);
    assert_ok(tokenizer_decode_inside(t, TINY_SENTENCEPIECE_TIME, &text));
    assert_string_equal(bytes_text(&text), " time");
    bytes_clear(&text);
    assert_ok(tokenizer_token_bytes(t, TINY_SENTENCEPIECE_TIME, &text));
    for (int byte = 0xe2; byte != 0; byte = byte == 0xe2 ? 0x82 : byte == 0x82 ? 0xac : 0)
        assert_ok(tokenizer_token_bytes(t, TINY_SENTENCEPIECE_BYTES + byte, &text));
    assert_string_equal(bytes_text(&text), " time\xe2\x82\xac");
    tokenizer_free(t);
}

// Bytes of one character on both sides of the border: each side keeps its own, as broken ones.
TEST(border_within_a_character)
{
    struct tokenizer *t = load(tiny_sentencepiece_write);
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    const int32_t b = TINY_SENTENCEPIECE_BYTES;
    const int32_t ids[] = {260, b + 0xc3, b + 0xa9, 260}; // a, two bytes of U+00E9, a
    complete(t, ids, 2, 4, true, &text);
    assert_string_equal(bytes_text(&text), "\xef\xbf\xbd"
                                           "a");
    bytes_clear(&text);
    complete(t, ids, 3, 4, true, &text);
    assert_string_equal(bytes_text(&text), "a");
    tokenizer_free(t);
}

TEST(byte_level_is_as_before)
{
    struct tokenizer *t = load(tiny_tokenizer_write);
    SCOPED(token_list_release) struct token_list ids = TOKEN_LIST_INIT;
    static const char text[] = " tell  the \xc3\xa9<|im_end|> hell";
    assert_ok(tokenizer_encode(t, text, strlen(text), false, &ids));
    for (int cut = 0; cut <= ids.n; cut++) {
        SCOPED(bytes_release) struct bytes alone = BYTES_INIT, behind = BYTES_INIT;
        decode(t, ids.ids + cut, ids.n - cut, true, &alone);
        complete(t, ids.ids, cut, ids.n, true, &behind);
        assert_string_equal(bytes_text(&alone), bytes_text(&behind));
    }
    tokenizer_free(t);
}

TEST(real_sentencepiece)
{
    char folder[PATH_MAX];
    test_data_folder("models/stories260K/hf", folder);
    struct tokenizer *t = tokenizer_of(folder);
    check_cuts(t, "Once upon a time, there was a little girl.\nHer name was  Lily.", true);
}
