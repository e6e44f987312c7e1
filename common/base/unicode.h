/* unicode.h: classes of characters as tokenizers use them. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_UNICODE_H
#define COMMON_BASE_UNICODE_H

#include <stdbool.h>
#include <stdint.h>
#include <utf8proc.h>

// Of a set of general categories: CATEGORY(LU) | CATEGORY(LL)
#define CATEGORY(name) (1u << UTF8PROC_CATEGORY_##name)

bool unicode_is_space(uint32_t c);   // White_Space
bool unicode_is_word(uint32_t c);    // \w: Alphabetic, marks, decimal digits, connectors, joiners
bool unicode_is_numeric(uint32_t c); // categories Nd, Nl, No

// Where the characters of a class end that stand from `start` on, and where those begin that stand
// before `end` and behind `start`.
size_t unicode_skip(const char *s, size_t start, size_t end, bool (*is)(uint32_t c));
size_t unicode_skip_back(const char *s, size_t start, size_t end, bool (*is)(uint32_t c));

// Characters that Unicode 9 did not have, of those that normal forms compose, decompose or reorder.
// The tokenizers library normalizes by Unicode 9: there they are unassigned and left alone.
bool unicode_normalizes_since_9(uint32_t c);

#endif
