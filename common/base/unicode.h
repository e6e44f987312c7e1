/* unicode.h: classes and cases of characters, as tokenizers use them and as Python's str sees them.
 * No state; any thread. All text given is valid UTF-8. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_UNICODE_H
#define COMMON_BASE_UNICODE_H

#include "common/base/bytes.h"

enum unicode_class {
    UNICODE_SPACE, // White_Space
    UNICODE_WORD,  // \w of expressions: Alphabetic, marks, decimal digits, connectors, joiners
    STR_ALPHA,     // Python's str.isalpha, and so on
    STR_DECIMAL,
    STR_DIGIT,
    STR_NUMERIC, // categories Nd, Nl, No
    STR_ALNUM,
    STR_SPACE,
    STR_PRINTABLE,
    STR_ASCII,
    STR_LINE_END,   // of str.splitlines
    STR_WORD,       // its \w
    STR_NAME_START, // of str.isidentifier
    STR_NAME_PART,
};
bool unicode_is(uint32_t c, enum unicode_class class);

// Where the characters of a class end that stand from `start` on, and where those begin that stand
// before `end` and behind `start`.
size_t unicode_skip(const char *s, size_t start, size_t end, enum unicode_class class);
size_t unicode_skip_back(const char *s, size_t start, size_t end, enum unicode_class class);

// Characters that Unicode 9 did not have, of those that normal forms compose, decompose or reorder.
// The tokenizers library normalizes by Unicode 9: there they are unassigned and left alone.
bool unicode_normalizes_since_9(uint32_t c);

enum text_case {
    CASE_UPPER,
    CASE_LOWER,
    CASE_CAPITALIZE, // the first character title case, the others lower
    CASE_TITLE,      // the same of each word, which is a run of cased characters
    CASE_SWAP,
    CASE_FOLD,
};
void unicode_put_case(const char *s, size_t len, enum text_case to, struct bytes *ret);
// str.islower, isupper, istitle
bool unicode_has_case(const char *s, size_t len, enum text_case which);

#endif
