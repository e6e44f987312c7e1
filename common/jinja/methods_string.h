/* methods_string.h: what the files of str's methods share: methods_case.c (case, classes of
 * characters, strip), methods_search.c (find, count, replace, padding, formats), methods_split.c
 * (split, join). */
#ifndef COMMON_JINJA_METHODS_STRING_H
#define COMMON_JINJA_METHODS_STRING_H

#include "common/jinja/run.h"

extern const struct builtin case_methods[], search_methods[], split_methods[];
extern const size_t n_case_methods, n_search_methods, n_split_methods;

#define METHOD(name)                                                                               \
    static enum status name(struct run *r, const struct value *v, const struct arguments *all,     \
                            struct value *ret)

// The string that the method is of.
static inline const struct string *self(const struct value *v)
{
    return v[0].string;
}

// Results of markup are markup: a part of the string, and what was built from it (run_take).
enum status string_part(struct run *r, const struct value *v, size_t start, size_t end,
                        struct value *ret);
enum status string_take(struct run *r, const struct value *v, enum status st, struct bytes *built,
                        struct value *ret);
// Its last occurrence in the first n bytes of s; NULL: none.
const char *string_find_last(const char *s, size_t n, const struct string *what);

#endif
