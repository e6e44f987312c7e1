/* report_server.h: cw-report --serve for tests. Failures fail the running test. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_REPORT_SERVER_H
#define TESTS_SUPPORT_REPORT_SERVER_H

#include "tests/support/support.h"

// Starts it for one or two runs (b may be NULL); the port of 127.0.0.1 at which it serves.
int report_server_start(struct test_child *child, const char *log, const char *a, const char *b);
// As SIGTERM ends it.
void report_server_stop(struct test_child *child);

#endif
