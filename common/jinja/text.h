/* text.h: UTF-8 text as Python's str sees it: what is white space, upper and lower case, classes of
 * characters. No state; any thread. All text given is valid UTF-8. */
#ifndef COMMON_JINJA_TEXT_H
#define COMMON_JINJA_TEXT_H

#include "common/base/bytes.h"

// The character at s, and its bytes.
uint32_t text_char(const char *s, size_t len, int *ret_n);

bool text_is_space(uint32_t c);     // str.isspace
bool text_is_line_end(uint32_t c);  // str.splitlines
bool text_is_printable(uint32_t c); // str.isprintable
bool text_is_identifier(uint32_t c, bool first);
bool text_is_word(uint32_t c); // \w

enum text_class { TEXT_ALPHA, TEXT_DECIMAL, TEXT_DIGIT, TEXT_NUMERIC, TEXT_ALNUM };
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
