/* test_token_bytes.c: the bound on a prompt's bytes: no text that fits the context is over it, and
 * one that is over it is refused before it is tokenised. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer.h"
#include "infer-server/http/api.h"
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"

#define CONTEXT 64

static struct tokenizer *tokenizer;

static void load(void)
{
    const char *folder = test_folder();
    assert_ok(tiny_tokenizer_write(folder));
    assert_ok(tokenizer_load(folder, &tokenizer));
}

static void unload(void)
{
    tokenizer_free(tokenizer);
}

// Every token written out as often as the context takes it.
TEST(test_no_token_is_longer)
{
    size_t longest = 0;
    for (int id = 0; id < tokenizer_vocab_size(tokenizer); id++) {
        SCOPED(bytes_release) struct bytes text = BYTES_INIT;
        assert_ok(tokenizer_decode(tokenizer, &id, 1, false, &text));
        assert_true(text.len <= tokenizer_max_token_bytes(tokenizer));
        if (text.len > longest) longest = text.len;
    }
    assert_true(longest > 1);
}

static enum status parse(size_t len)
{
    const struct api_model model = {.name = "model",
                                    .folder = "folder",
                                    .tokenizer = tokenizer,
                                    .vocab_size = 300,
                                    .max_context = CONTEXT,
                                    .temperature = 1,
                                    .top_p = 1};
    struct api_request *r = NULL;
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    bytes_puts(&body, "{\"max_tokens\":1,\"prompt\":\"");
    for (size_t i = 0; i < len; i++) bytes_puts(&body, "a");
    bytes_puts(&body, "\"}");
    enum status st = api_request_parse(API_COMPLETIONS, &model, bytes_text(&body), body.len, &r);
    api_request_free(r);
    return st;
}

TEST(test_refused_by_bytes)
{
    size_t max = CONTEXT * tokenizer_max_token_bytes(tokenizer);
    char number[64];
    assert_ok(parse(CONTEXT - 1));
    assert_status(parse(max), ST_TOO_LONG); // tokenised, and too long
    assert_message(" tokens. This model's maximum context length is 64 tokens");
    assert_status(parse(max + 1), ST_TOO_LONG);
    snprintf(number, sizeof number, "has %zu bytes", max + 1);
    assert_message(number);
    assert_message("request: prompt has ");
    assert_null(strchr(status_message(), '"')); // beside it repr() escapes the apostrophe
}

// Put together the tokens' bytes are the text, wherever its characters are cut.
TEST(test_bytes_of_tokens)
{
    static const char text[] = "a \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 z";
    SCOPED(token_list_release) struct token_list ids = TOKEN_LIST_INIT;
    SCOPED(bytes_release) struct bytes all = BYTES_INIT;
    assert_ok(tokenizer_encode(tokenizer, text, strlen(text), false, &ids));
    assert_true(ids.n > 8);
    for (int i = 0; i < ids.n; i++) assert_ok(tokenizer_token_bytes(tokenizer, ids.ids[i], &all));
    assert_string_equal(bytes_text(&all), text);
}

TESTS_BETWEEN(load, unload)
