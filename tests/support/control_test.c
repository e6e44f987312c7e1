/* control_test.c: owner and writers of a control page for tests. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/control_test.h"

#include <sys/prctl.h>
#include <sys/wait.h>

char control_test_page[CONTROL_TEST_NAME];

struct control *control_test_owner(void)
{
    static int n; // a test that fails leaves its page
    struct control *c = NULL;
    snprintf(control_test_page, CONTROL_TEST_NAME, "/commonweight-test-%d-%d", (int)getpid(), n++);
    assert_ok(control_create(control_test_page, CONTROL_TEST_HASH, &c));
    control_owner_update_end(c);
    return c;
}

void control_test_end(struct control *c)
{
    control_end(c);
    control_free(c);
}

pid_t control_test_fork(void)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    return pid;
}

void control_test_dead(pid_t pid)
{
    siginfo_t info;
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
}

int control_test_status(pid_t pid)
{
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

struct control *control_test_writer(void)
{
    struct control *c = NULL;
    if (control_open(control_test_page, CONTROL_TEST_HASH, &c) != ST_OK ||
        control_lease_take(c) != ST_OK) {
        fprintf(stderr, "child: %s\n", status_message());
        _exit(90);
    }
    return c;
}

enum control_event control_test_event(struct control *c)
{
    int64_t deadline = clock_deadline_ns(CONTROL_TEST_MS);
    while (clock_now_ns() < deadline) {
        uint32_t seen = control_doorbell(c);
        control_heartbeat(c);
        enum control_event event = CONTROL_NONE;
        if (control_quiesce_requested(c)) event = control_grant_quiesce(c);
        if (event == CONTROL_NONE) event = control_check_writer(c);
        if (event != CONTROL_NONE) return event;
        control_wait(c, seen, 20);
    }
    fail_msg("nothing happened within %d ms", CONTROL_TEST_MS);
    return CONTROL_NONE;
}
