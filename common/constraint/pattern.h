/* pattern.h: regular expressions and grammars as nodes of an automaton (automaton.h).
 *
 * Regular expressions have ECMAScript's syntax, which is JSON Schema's: characters, classes,
 * groups, alternatives, counts, \d \w \s and escapes. What is not regular or not here (look-around,
 * back references, \b, \p, flags, anchors within) is refused by name: ST_UNSUPPORTED.
 *
 * Grammars are those of GBNF (llama.cpp, XGrammar): rules `name ::= ...` of "texts", [classes],
 * names, (groups), | alternatives, * + ? {n} {n,} {n,m}, and comments from # on. Rules may call
 * each other and themselves, but not before they read anything.
 *
 * What does not parse is ST_INVALID. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_CONSTRAINT_PATTERN_H
#define COMMON_CONSTRAINT_PATTERN_H

#include "common/constraint/automaton.h"

enum regex_form {
    REGEX_WHOLE,     // the text is what matches
    REGEX_IN_STRING, // the content of a JSON string is; its characters may be escaped
    REGEX_SOMEWHERE, // ... has a match somewhere, unless ^ and $ say where
};
enum status regex_build(struct automaton *a, const char *pattern, enum regex_form form, int next,
                        int *ret);

// The n rules of these names, to be called (automaton_call()).
enum status grammar_build(struct automaton *a, const char *text, const char *const *names, int n,
                          int *ret_rules);

#endif
