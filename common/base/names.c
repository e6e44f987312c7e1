/* names.c: see names.h. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/names.h"

#include <stdint.h>
#include <string.h>

// Edits (insert, delete, replace) from a to b; two rows of the usual table.
static size_t edit_distance(const char *a, const char *b)
{
    size_t row[NAME_MAX_LEN + 1], na = strlen(a), nb = strlen(b);
    if (na > NAME_MAX_LEN || nb > NAME_MAX_LEN) return SIZE_MAX;
    for (size_t j = 0; j <= nb; j++) row[j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[nb];
}

void nearest_name_try(struct nearest_name *nearest, const char *name)
{
    const size_t len = strlen(nearest->word);
    const size_t limit = len < 6 ? 1 : len < 12 ? 2 : len / 4;
    size_t edits = edit_distance(nearest->word, name);
    if (edits > 1 && len >= 3 && strncmp(nearest->word, name, len) == 0) edits = 1;
    if (nearest->name ? edits >= nearest->edits : edits > limit) return;
    nearest->name = name;
    nearest->edits = edits;
}

int name_find(const char *const names[], const char *text)
{
    for (int i = 0; names[i]; i++)
        if (strcmp(names[i], text) == 0) return i;
    return -1;
}

void names_list(const char *const names[], struct bytes *to)
{
    for (int i = 0; names[i]; i++) bytes_printf(to, "%s%s", i ? "|" : "", names[i]);
}

enum status name_parse(const char *const names[], const char *text, int *ret)
{
    const int value = name_find(names, text);
    if (value < 0) {
        struct bytes list = BYTES_INIT;
        names_list(names, &list);
        status_fail(ST_INVALID, "'%s' is not one of %s", CUT(text, 200), bytes_text(&list));
        bytes_release(&list);
        return ST_INVALID;
    }
    *ret = value;
    return ST_OK;
}
