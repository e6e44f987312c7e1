/* test_tokenizer_parts.c: the sections of tokenizer.json by themselves: pre-tokenizers,
 * normalizers. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "tests/support/support.h"
#include "tests/support/tokens.h"

// Pre-tokenizers over the same bytes: words end where ids of merges show it.
TEST_EACH(pretokenizers, "tokenizer_parts")
{
    json_t *section = NULL;
    char wrapped[1000];
    snprintf(wrapped, sizeof(wrapped), "[%s]", row_text(cases, i, "section"));
    section = json_of(wrapped);
    struct step_list p = {0};
    SCOPED(bytes_release) struct bytes text = BYTES_INIT, joined = BYTES_INIT;
    struct piece_list words = {0};
    assert_ok(pretokenizer_parse("test", json_array_get(section, 0), &p));
    assert_ok(pretokenizer_apply(&p, row_text(cases, i, "text"), strlen(row_text(cases, i, "text")),
                                 true, &text, &words));
    for (size_t k = 0; k < words.n; k++) {
        if (k) bytes_puts(&joined, "|");
        bytes_append(&joined, text.data + words.items[k].start, words.items[k].len);
    }
    assert_string_equal(bytes_text(&joined), row_text(cases, i, "words"));
    step_list_release(&p);
    piece_list_release(&words);
    json_decref(section);
}

TEST(normalizers)
{
    const json_t *cases = test_rows("tokenizer_parts", "normalizers");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *section = test_keep(json_of(row_text(cases, i, "section")));
        struct step_list n = {0};
        SCOPED(bytes_release) struct bytes out = BYTES_INIT;
        assert_ok(normalizer_parse("test", section, &n));
        assert_ok(normalizer_apply(&n, row_text(cases, i, "text"),
                                   strlen(row_text(cases, i, "text")), true, &out));
        assert_string_equal(bytes_text(&out), row_text(cases, i, "normal"));
        step_list_release(&n);
    }
}
