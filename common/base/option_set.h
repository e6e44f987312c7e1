/* option_set.h: what options.c and option_rules.c share. Private to them. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_OPTION_SET_H
#define COMMON_BASE_OPTION_SET_H

#include "common/base/bytes.h"
#include "common/base/options.h"

struct option_set {
    const struct option_spec *table;
    bool *given; // one for each of the table: by flag or file
    char **strings;
    size_t n_strings;
};

// The option of that name, or of one that it had once; NULL: there is none.
const struct option_spec *option_table_find(const struct option_spec *table, const char *name,
                                            size_t len);
// For --help: what the option goes with, and what it does not.
void option_rules_describe(const struct option_spec *table, const struct option_spec *spec,
                           struct bytes *to);

#endif
