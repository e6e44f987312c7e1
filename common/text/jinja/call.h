/* call.h: calling what templates find by name, and what those functions share: operators and texts
 * in parts. One thread for each run. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_JINJA_CALL_H
#define COMMON_TEXT_JINJA_CALL_H

#include "common/text/jinja/format.h"

// Each file that has some has a table of them.
extern const struct builtin item_builtins[], string_builtins[], number_builtins[],
    format_builtins[];

struct value builtin_invoke(struct run *r, const struct builtin *f, struct value self,
                            const struct arguments *arguments);

// Parameters 2 and 3 as start and end among n items, Python's negative ones too; false: the start
// lies beyond the end.
bool window_of(const struct value *v, int64_t n, int64_t *ret_start, int64_t *ret_end);

struct value arithmetic(struct run *r, enum token_type op, struct value a, struct value b);
struct value arithmetic_sign(struct run *r, struct value v, bool minus);

struct value string_lower(struct run *r, const struct string *s);
// `by` NULL: at runs of white space; max -1: any number.
struct list split_string(struct run *r, const struct string *s, const struct string *by,
                         int64_t max, bool from_end);

#endif
