/* tokens.h: what tests of tokenizers compare: ids of texts, and texts of ids. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TOKENS_H
#define TESTS_SUPPORT_TOKENS_H

#include "common/text/tokenizer.h"
#include <jansson.h>

void assert_ids(const struct tokenizer *t, const char *text, size_t len, bool special,
                const int32_t *want, int n);
void assert_text(const struct tokenizer *t, const int32_t *ids, int n, bool skip, const char *want,
                 size_t len);

#define ASSERT_IDS(t, text, ...)                                                                   \
    do {                                                                                           \
        const int32_t want_[] = {__VA_ARGS__};                                                     \
        assert_ids((t), (text), strlen(text), false, want_, sizeof(want_) / sizeof(want_[0]));     \
    } while (0)

#define ASSERT_TEXT(t, skip, want, ...)                                                            \
    do {                                                                                           \
        const int32_t ids_[] = {__VA_ARGS__};                                                      \
        assert_text((t), ids_, sizeof(ids_) / sizeof(ids_[0]), (skip), (want), strlen(want));      \
    } while (0)

#endif
