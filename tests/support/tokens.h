/* tokens.h: what tests of tokenizers compare: ids of texts, and texts of ids. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TOKENS_H
#define TESTS_SUPPORT_TOKENS_H

#include "common/text/tokenizer.h"
#include <jansson.h>

struct tokenizer *tokenizer_of(const char *folder); // freed with the test
void assert_ids(const struct tokenizer *t, const char *text, size_t len, bool special,
                const int32_t *want, int n);
void assert_text(const struct tokenizer *t, const int32_t *ids, int n, bool skip, const char *want,
                 size_t len);

#endif
