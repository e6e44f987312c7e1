/* stop.h: stop strings, found in text that arrives in pieces. A match may lie across any number of
 * tokens; what is found does not depend on where the pieces end: the stop string whose last byte
 * comes first, and of several that end there the longest. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_STOP_H
#define INFER_SERVER_STOP_H

#include "common/base/status.h"
#include <stdbool.h>
#include <stddef.h>

#define STOP_STRINGS_MAX 16
#define STOP_BYTES_MAX   1024 // of one string

struct stop_set {
    char *strings[STOP_STRINGS_MAX]; // owned
    size_t lengths[STOP_STRINGS_MAX];
    int n;
};

// Takes a copy. ST_INVALID for an empty or too long string, or one too many.
enum status stop_set_add(struct stop_set *set, const char *text, size_t len);
void stop_set_release(struct stop_set *set);

// Looks for the first stop string that ends after byte `from` of text; nothing ends before it (it
// was looked at when it came). ret_which and ret_at (first byte of the match) are set where one is
// found.
bool stop_find(const struct stop_set *set, const char *text, size_t len, size_t from,
               int *ret_which, size_t *ret_at);

// Bytes at the end of text that may be the beginning of a stop string: not to be given out yet.
size_t stop_hold(const struct stop_set *set, const char *text, size_t len);

#endif
