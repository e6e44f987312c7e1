/* filters.h: what filters.c lists; filters_text.c, filters_list.c and filters_value.c have them. */
#ifndef COMMON_JINJA_FILTERS_H
#define COMMON_JINJA_FILTERS_H

#include "common/jinja/run.h"

extern const struct builtin text_filters[], list_filters[], value_filters[];
extern const size_t n_text_filters, n_list_filters, n_value_filters;

// A filter, a test, a method or a function: the definition of one (builtin_call in run.h).
#define BUILTIN(name)                                                                              \
    static enum status name(struct run *r, const struct value *v, const struct arguments *all,     \
                            struct value *ret)

// Calls the string's method with what the filter was given.
enum status call_method(struct run *r, const struct value *self, const char *method,
                        const struct value *arguments, int n, struct value *ret);

#endif
