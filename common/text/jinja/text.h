/* text.h: UTF-8 text as Python's str sees it: what is white space, upper and lower case, classes of
 * characters. No state; any thread. All text given is valid UTF-8. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_JINJA_TEXT_H
#define COMMON_TEXT_JINJA_TEXT_H

#include "common/base/bytes.h"

enum text_class {
    TEXT_ALPHA, // str.isalpha, and so on
    TEXT_DECIMAL,
    TEXT_DIGIT,
    TEXT_NUMERIC,
    TEXT_ALNUM,
    TEXT_SPACE,
    TEXT_PRINTABLE,
    TEXT_ASCII,
    TEXT_LINE_END,   // of str.splitlines
    TEXT_WORD,       // \w
    TEXT_NAME_START, // of str.isidentifier
    TEXT_NAME_PART,
};
bool text_is(uint32_t c, enum text_class of);

// Bytes of white space at the start; bytes left without that at the end.
size_t text_leading_spaces(const char *s, size_t len);
size_t text_without_trailing_spaces(const char *s, size_t len);

enum text_case {
    CASE_UPPER,
    CASE_LOWER,
    CASE_CAPITALIZE, // the first character title case, the others lower
    CASE_TITLE,      // the same of each word, which is a run of cased characters
    CASE_SWAP,
    CASE_FOLD,
};
void text_put_case(const char *s, size_t len, enum text_case to, struct bytes *ret);
// str.islower, isupper, istitle
bool text_has_case(const char *s, size_t len, enum text_case which);

#endif
