/* strings.h: what str's methods do, for methods.c, and for the filters of the same name. Results of
 * markup are markup. `which` of the table's row chooses where one function does several. */
#ifndef COMMON_JINJA_STRINGS_H
#define COMMON_JINJA_STRINGS_H

#include "common/jinja/run.h"

// string_case.c
BUILTIN(string_cased);       // which: enum text_case
BUILTIN(string_has_case);    // which: enum text_case
BUILTIN(string_consists_of); // which: enum text_class
BUILTIN(string_is_identifier);
BUILTIN(string_strip); // chars; which: STRIP_LEFT, STRIP_RIGHT or both
enum { STRIP_LEFT = 1, STRIP_RIGHT = 2 };

// string_search.c
BUILTIN(string_find); // sub, start, end; which: FIND_LAST, FIND_OR_FAIL
enum { FIND_LAST = 1, FIND_OR_FAIL = 2 };
BUILTIN(string_count);   // sub, start, end
BUILTIN(string_affix);   // prefix or a tuple, start, end; which: AT_START or AT_END
BUILTIN(string_remove);  // prefix; which: AT_START or AT_END
BUILTIN(string_replace); // old, new, count
enum { AT_START, AT_END };

// string_split.c
BUILTIN(string_split); // sep, maxsplit; which: AT_START or AT_END, where it begins
BUILTIN(string_splitlines);
BUILTIN(string_partition); // sep; which: AT_START or AT_END
BUILTIN(string_join);
BUILTIN(string_pad); // width, fillchar; which: PAD_LEFT, PAD_RIGHT or both
enum { PAD_LEFT = 1, PAD_RIGHT = 2 };
BUILTIN(string_zfill);
BUILTIN(string_expandtabs);

// The same for filters that need a part of one.
struct value string_lower(struct run *r, const struct string *s);
// `by` NULL: at runs of white space; max -1: any number.
struct list split_string(struct run *r, const struct string *s, const struct string *by,
                         int64_t max);
struct list split_lines(struct run *r, const struct string *s, bool keep_ends);
// Its last occurrence in the first n bytes of s; NULL: none.
const char *string_find_last(const char *s, size_t n, const struct string *what);

#endif
