/* spec.h: what a completion is to be, as constraint.h has it, as nodes of an automaton. Any thread.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_CONSTRAINT_SPEC_H
#define COMMON_CONSTRAINT_SPEC_H

#include "common/constraint/automaton.h"
#include <jansson.h>

// A special token comes for its name in a text alone, never for the bytes of that within another:
// its bytes are this one, which no text has, and its name.
#define SPEC_SPECIAL 0xff

// Names: those of the n special tokens.
enum status spec_build(struct automaton *a, const char *const *names, int n, const json_t *spec,
                       int *ret);

#endif
