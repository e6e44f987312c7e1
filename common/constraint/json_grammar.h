/* json_grammar.h: JSON's values as nodes of an automaton: what json_schema.c puts schemas together
 * of. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_CONSTRAINT_JSON_GRAMMAR_H
#define COMMON_CONSTRAINT_JSON_GRAMMAR_H

#include "common/constraint/automaton.h"
#include <jansson.h>

// Blank: white space; comma and colon: with what is around them.
enum json_rule {
    RULE_BLANK,
    RULE_COMMA,
    RULE_COLON,
    RULE_VALUE,
    RULE_OBJECT,
    RULE_NUMBER,
    RULE_INTEGER,
    RULE_CHARACTER,
    RULE_DIGIT,
    RULE_DIGITS,
    RULE_ZEROS,
    RULE_FRACTION, // a point and digits, or nothing
    RULES
};
struct json_grammar {
    struct automaton *a;
    int rules[RULES];
};
// strict_whitespace: ", " and ": " and none besides; else any between all tokens, but at most 64
// characters at a time, or a model could go on with it for ever (XGrammar's max_whitespace_cnt).
enum status json_grammar_build(struct automaton *a, bool strict_whitespace,
                               struct json_grammar *ret);

int json_rule(const struct json_grammar *g, enum json_rule rule, int next);
// A string of so many characters; max < 0: no bound.
int json_string_of(const struct json_grammar *g, int64_t min, int64_t max, int next);
// A string, quotes and all, that is none of the n names.
int json_other_string(const struct json_grammar *g, const char *const *names, int n, int next);
// A string, its plain characters as they are, others in any form that JSON has for them.
int json_string_literal(const struct json_grammar *g, const char *s, size_t n, int next);
// The value itself: an object's members in their order.
int json_literal(const struct json_grammar *g, const json_t *value, int next);

// Numbers from low to high, either end may be missing (NULL), or exclusive. low and high are
// decimal texts without an exponent ("-12.5"), shorter than NUMBER_ROOM. Whole: integers. Texts
// have no exponent either.
#define NUMBER_ROOM 400
struct number_range {
    const char *low, *high;
    bool above, below; // the ends are not in it
    bool whole;
};
int json_number_between(const struct json_grammar *g, const struct number_range *range, int next);

#endif
