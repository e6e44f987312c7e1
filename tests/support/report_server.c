/* report_server.c: its port is that of its log. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/report_server.h"

#define START_MS 120000

int report_server_start(struct test_child *child, const char *log, const char *a, const char *b)
{
    const char *const argv[] = {
        test_binary("cw-report"), "--serve", "--listen", "127.0.0.1:0", a, b, NULL};
    test_spawn(child, log, argv);
    test_wait_for_file(log, START_MS, child);
    test_wait_for_text(log, "http://127.0.0.1:", START_MS, child);
    return atoi(strstr(test_read(log), "http://127.0.0.1:") + 17);
}

void report_server_stop(struct test_child *child)
{
    test_kill(child, SIGTERM);
    assert_int_equal(test_wait(child, START_MS), 0);
}
