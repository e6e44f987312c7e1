/* served.h: one server of a tiny random model for all tests of a file, and readers of its answers,
 * which fail the test where something is missing. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_SERVED_H
#define TESTS_SUPPORT_SERVED_H

#include "tests/support/daemon.h"

extern struct daemon served; // from served_start() to served_stop()

void served_start(void); // before and after a file's tests
void served_stop(void);  // fails where it has died meanwhile

double number_in_metrics(const char *name);
// Sends a request; the socket, on which its answer comes.
int open_request(const char *path, const char *body);

#endif
