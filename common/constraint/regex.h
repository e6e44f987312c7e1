/* regex.h: regular expressions as nodes of an automaton (automaton.h). ECMAScript's syntax, which
 * is JSON Schema's: characters, classes, groups, alternatives, counts, \d \w \s and escapes. What
 * is not regular or not here (look-around, back references, \b, \p, flags, anchors within) is
 * refused by name: ST_UNSUPPORTED; a pattern that does not parse is ST_INVALID. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_CONSTRAINT_REGEX_H
#define COMMON_CONSTRAINT_REGEX_H

#include "common/constraint/automaton.h"

enum regex_form {
    REGEX_WHOLE,     // the text is what matches
    REGEX_IN_STRING, // the content of a JSON string is; its characters may be escaped
    REGEX_SOMEWHERE, // ... has a match somewhere, unless ^ and $ say where
};
enum status regex_build(struct automaton *a, const char *pattern, enum regex_form form, int next,
                        int *ret);

// A character from low to high as it may stand in a JSON string: as it is, or escaped.
int json_character(struct automaton *a, uint32_t low, uint32_t high, int next);

#endif
