/* json_grammar.h: JSON's values as nodes of an automaton: what json_schema.c puts schemas together
 * of. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_CONSTRAINT_JSON_GRAMMAR_H
#define COMMON_CONSTRAINT_JSON_GRAMMAR_H

#include "common/constraint/automaton.h"
#include <jansson.h>

struct json_grammar {
    struct automaton *a;
    bool strict_whitespace;    // ", " and ": " and none besides; else any, between all tokens
    int blank, any, character; // rules, once wanted; -1: not yet
};
struct json_grammar json_grammar_of(struct automaton *a, bool strict_whitespace);

int json_blank(struct json_grammar *g, int next); // white space
int json_comma(struct json_grammar *g, int next); // with white space around it
int json_colon(struct json_grammar *g, int next);
int json_any(struct json_grammar *g, int next); // any value
int json_any_object(struct json_grammar *g, int next);
int json_any_array(struct json_grammar *g, int next);
int json_number(struct json_grammar *g, int next);
// A string of so many characters; max < 0: no bound.
int json_string_of(struct json_grammar *g, int64_t min, int64_t max, int next);
// A string, quotes and all, that is none of the n names.
int json_other_string(struct json_grammar *g, const char *const *names, int n, int next);
// The value itself: an object's members in their order.
int json_literal(struct json_grammar *g, const json_t *value, int next);

// Numbers from low to high, either end may be missing (NULL), or exclusive. low and high are
// decimal texts without an exponent ("-12.5"). Whole: integers. Texts have no exponent either.
struct number_range {
    const char *low, *high;
    bool above, below; // the ends are not in it
    bool whole;
};
int json_number_between(struct json_grammar *g, const struct number_range *range, int next);

#endif
