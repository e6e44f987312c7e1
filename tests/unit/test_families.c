/* test_families.c: docs/use/models.md against the table it describes: every model family of
 * common/model/family.h, so that none is forgotten there. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/family.h"
#include "tests/support/support.h"

// Does one line of `text` hold `part`, and does that line also hold `other`?
static bool line_has(const char *text, const char *part, const char *other)
{
    for (const char *at = text; (at = strstr(at, part)); at++) {
        const char *start = at, *end = at + strcspn(at, "\n");
        while (start > text && start[-1] != '\n') start--;
        if (memmem(start, (size_t)(end - start), other, strlen(other))) return true;
    }
    return false;
}

TEST(test_every_family_is_described)
{
    char *doc = test_read(test_path(test_root(), "docs/use/models.md"));
    const struct family *f;
    for (int i = 0; (f = family_at(i)); i++) {
        SCOPED(bytes_release) struct bytes start = BYTES_INIT, architecture = BYTES_INIT;
        bytes_printf(&start, "| %s | `%s` |", f->title, f->model_type);
        bytes_printf(&architecture, "`%s`", f->architecture);
        if (!line_has(doc, bytes_text(&start), bytes_text(&architecture)))
            fail_msg("docs/use/models.md has no row \"%s %s\"", bytes_text(&start),
                     bytes_text(&architecture));
        assert_contains(family_list(), f->architecture);
    }
    assert_ptr_equal(family_find("gemma2", ""), family_find("gemma2", "Gemma2ForCausalLM"));
    assert_null(family_find("gemma2", "Gemma2ForSequenceClassification"));
    assert_null(family_find("deepseek_v4", "DeepseekV4ForCausalLM"));
}
