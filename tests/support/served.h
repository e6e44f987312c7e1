/* served.h: one server of a tiny random model for all tests of a file. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_SERVED_H
#define TESTS_SUPPORT_SERVED_H

#include "tests/support/daemon.h"

extern struct daemon served; // from served_start() to served_stop()

void served_start(void);                         // before and after a file's tests
json_t *ask(const char *path, const char *body); // POST to it; the answer, of status 200
// Each of test_rows(file, list) is refused: its "body" at its "path" with its "status" (400 where
// it has none), with its "part" in the sentence, and of its "param" and "code" (else the status).
void served_refuses(const char *file, const char *list);
void served_stop(void); // fails where it has died meanwhile

#endif
