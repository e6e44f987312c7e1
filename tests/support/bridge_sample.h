/* bridge_sample.h: a bridge file as a server of this process would write it, for tests of what is
 * read from it. Failures fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_BRIDGE_SAMPLE_H
#define TESTS_SUPPORT_BRIDGE_SAMPLE_H

#include "bridge/bridge_file.h"
#include <jansson.h>

#define TENSORS      400
#define ROWS         16
#define COLUMNS      8
#define TENSOR_BYTES (ROWS * COLUMNS * 4)
#define CANARY       (TENSORS * TENSOR_BYTES)
#define ARENA_BYTES  (CANARY + 256)

// Paths and shared memory names of this process: cmocka's group setup and teardown.
extern struct bridge_names {
    char folder[64], file[96], socket[96], page[64], arena[64];
} bridge_names;
void bridge_sample_open(void); // for TESTS_BETWEEN
void bridge_sample_close(void);

// A file of this process with a policy of n tensors and, where wanted, a small draft.
struct bridge_file *bridge_sample(int n_tensors, bool draft);
// Sets the value at a path of keys and list positions ("a/0/b") to JSON text, or removes it (NULL);
// fails where there is no such place.
void bridge_change(json_t *json, const char *at, const char *value);
void assert_says(const char *words); // status_message() has them

#endif
