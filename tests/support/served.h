/* served.h: one server of a tiny random model for all tests of a file. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_SERVED_H
#define TESTS_SUPPORT_SERVED_H

#include "tests/support/daemon.h"

extern struct daemon served; // from served_start() to served_stop()

void served_start(void);                         // before and after a file's tests
json_t *ask(const char *path, const char *body); // POST to it; the answer, of status 200
void served_stop(void);                          // fails where it has died meanwhile

#endif
