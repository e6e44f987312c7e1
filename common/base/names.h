/* names.h: what the values of an enum are called in options, files and messages: a list of names
 * from value 0 on, ended by NULL. Pure functions; any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_NAMES_H
#define COMMON_BASE_NAMES_H

#include "common/base/bytes.h"

// The value of that name; -1 where no value has it.
int name_find(const char *const names[], const char *text);
// The same; where no value has the name ST_INVALID with a sentence that lists them all, before
// which the caller puts what was read (status_context).
enum status name_parse(const char *const names[], const char *text, int *ret);
#define NAME_MAX_LEN 63 // of a word or a name that is near anything
// The name nearest to a word that is none, for errors; start with {.word}. name: NULL where nothing
// is near, since a suggestion that is a guess misleads. The start of a name counts as one edit.
struct nearest_name {
    const char *word, *name;
    size_t edits; // of name
};
void nearest_name_try(struct nearest_name *nearest, const char *name);
// "a|b|c", appended.
void names_list(const char *const names[], struct bytes *to);

#endif
