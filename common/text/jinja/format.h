/* format.h: values as text: Python's str() and repr(), HTML escapes, and "..." % values. Text is
 * put at the end of what is being built. One thread for each run. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_JINJA_FORMAT_H
#define COMMON_TEXT_JINJA_FORMAT_H

#include "common/text/jinja/object.h"

void put_str(struct run *r, struct value v);              // str(v)
struct value value_str(struct run *r, struct value v);    // a V_STRING, which may be markup
struct value value_escape(struct run *r, struct value v); // markup
struct value string_as(struct run *r, const struct string *s, bool markup); // the same text
// "..." % values
struct value format_percent(struct run *r, const struct string *format, struct value values);

#endif
