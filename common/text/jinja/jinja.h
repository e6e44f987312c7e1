/* jinja.h: Jinja templates as chat templates are written in, parsed once and rendered many times.
 *
 * The language is that of Jinja 3.1 as transformers sets it up: trim_blocks and lstrip_blocks, an
 * immutable sandbox, break and continue, the `generation` block, its own tojson, raise_exception
 * and strftime_now. Values behave as Python's do, down to the text of a float. What is not there
 * (include, import, extends, autoescape, a few filters that lay out web pages) is refused by name.
 *
 * A template may come from anywhere, so rendering is bounded: in steps, depth, memory and output.
 * Errors name the template, the line and the column. A parsed template is immutable: any thread,
 * several at once. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_JINJA_JINJA_H
#define COMMON_TEXT_JINJA_JINJA_H

#include "common/base/bytes.h"
#include <jansson.h>
#include <time.h>

struct jinja;

struct jinja_limits { // 0: the default
    int64_t steps;    // nodes evaluated, items visited, 16 bytes of text gone through; 20 million
    size_t memory;    // bytes of all values that are made on the way; 256 MiB
    size_t output;    // bytes; 64 MiB
};

// ST_FORMAT: not UTF-8, or not a template; `where` names it in this and all later errors.
enum status jinja_parse(const char *where, const char *text, size_t len, struct jinja **ret);
void jinja_free(struct jinja *t);

// `for` loops over something called "content": a template that takes messages whose content is a
// list of parts.
bool jinja_loops_over_content(const struct jinja *t);

// A name or a string of that text stands somewhere in the template: a variable that it does not
// mention, it ignores.
bool jinja_mentions(const struct jinja *t, const char *name);

// Appends the text. `variables` is an object; null is None. `now`: what strftime_now tells the time
// by; NULL: the local clock. ST_INVALID: the template's own raise_exception, or what Jinja raises.
enum status jinja_render(const struct jinja *t, const json_t *variables, const struct tm *now,
                         const struct jinja_limits *limits, struct bytes *ret);

#endif
