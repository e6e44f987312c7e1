/* stop.c: stop strings. Pure functions over a text and how much of it was already looked at; there
 * are at most 16 strings of at most 1024 bytes, and a token brings a few bytes, so plain comparison
 * is all that is needed. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/api.h"

#include <stdlib.h>
#include <string.h>

enum status stop_set_add(struct stop_set *set, const char *text, size_t len)
{
    if (len == 0) return status_fail(ST_INVALID, "request: \"stop\" holds an empty string");
    if (len > STOP_BYTES_MAX)
        return status_fail(ST_INVALID, "request: \"stop\" holds a string of %zu bytes; at most %d",
                           len, STOP_BYTES_MAX);
    if (set->n == STOP_STRINGS_MAX)
        return status_fail(ST_INVALID, "request: \"stop\" holds more than %d strings",
                           STOP_STRINGS_MAX);
    char *copy = malloc(len + 1);
    if (!copy) return status_fail(ST_NO_MEMORY, "out of memory");
    memcpy(copy, text, len);
    copy[len] = 0;
    set->strings[set->n] = copy;
    set->lengths[set->n++] = len;
    return ST_OK;
}

void stop_set_release(struct stop_set *set)
{
    for (int i = 0; i < set->n; i++) free(set->strings[i]);
    set->n = 0;
}

bool stop_find(const struct stop_set *set, const char *text, size_t len, size_t from,
               int *ret_which, size_t *ret_at)
{
    int which = -1;
    size_t at = 0, end = 0;
    for (int i = 0; i < set->n; i++) {
        size_t n = set->lengths[i];
        size_t start = from >= n ? from - n + 1 : 0; // a match from here on ends after `from`
        if (start + n > len) continue;
        const char *hit = memmem(text + start, len - start, set->strings[i], n);
        if (!hit) continue;
        size_t hit_at = (size_t)(hit - text);
        if (which < 0 || hit_at + n < end || (hit_at + n == end && hit_at < at)) {
            which = i;
            at = hit_at;
            end = hit_at + n;
        }
    }
    if (which < 0) return false;
    *ret_which = which;
    *ret_at = at;
    return true;
}

size_t stop_hold(const struct stop_set *set, const char *text, size_t len)
{
    size_t hold = 0;
    for (int i = 0; i < set->n; i++) {
        size_t n = set->lengths[i] - 1;
        if (n > len) n = len;
        for (; n > hold; n--)
            if (memcmp(text + len - n, set->strings[i], n) == 0) hold = n;
    }
    return hold;
}
