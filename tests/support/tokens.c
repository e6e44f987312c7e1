/* tokens.c: see tokens.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tokens.h"
#include "tests/support/support.h"

LATER(tokenizer_free)

struct tokenizer *tokenizer_of(const char *folder)
{
    struct tokenizer *t = NULL;
    assert_ok(tokenizer_load(folder, &t));
    return test_later(t, tokenizer_free_later);
}

void assert_ids(const struct tokenizer *t, const char *text, size_t len, bool special,
                const int32_t *want, int n)
{
    SCOPED(token_list_release) struct token_list got = TOKEN_LIST_INIT;
    assert_ok(tokenizer_encode(t, text, len, special, &got));
    bool equal = got.n == n && (n == 0 || memcmp(got.ids, want, (size_t)n * sizeof(*want)) == 0);
    if (!equal) {
        print_message("\"%s\": got", text);
        for (int i = 0; i < got.n; i++) print_message(" %d", got.ids[i]);
        print_message(", wanted");
        for (int i = 0; i < n; i++) print_message(" %d", want[i]);
        print_message("\n");
    }
    assert_true(equal);
}

// Decoding at once and token by token must agree; every streamed piece must be whole UTF-8.
void assert_text(const struct tokenizer *t, const int32_t *ids, int n, bool skip, const char *want,
                 size_t len)
{
    SCOPED(bytes_release) struct bytes whole = BYTES_INIT, streamed = BYTES_INIT;
    struct detokenizer *d = NULL;
    assert_ok(tokenizer_decode(t, ids, n, skip, &whole));
    assert_ok(detokenizer_new(t, skip, &d));
    for (int round = 0; round < 2; round++) { // a flushed detokenizer starts afresh
        bytes_clear(&streamed);
        for (int i = 0; i <= n; i++) {
            size_t at = streamed.len;
            assert_ok(i < n ? detokenizer_push(d, ids[i], &streamed)
                            : detokenizer_flush(d, &streamed));
            for (int k; at < streamed.len; at += (size_t)k) {
                k = utf8_sequence(streamed.data + at, streamed.len - at);
                assert_true(k > 0);
            }
        }
        assert_int_equal(whole.len, streamed.len);
        assert_memory_equal(bytes_text(&whole), bytes_text(&streamed), whole.len);
    }
    if (whole.len != len || memcmp(bytes_text(&whole), want, len) != 0)
        print_message("got \"%s\", wanted \"%s\"\n", bytes_text(&whole), want);
    assert_int_equal(whole.len, len);
    assert_memory_equal(bytes_text(&whole), want, len);
    detokenizer_free(d);
}
