/* test_control_sweep.c: bridge/control.h: a server that starts takes no page away that another one
 * is making at that moment, as servers of several GPUs do that start at once. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control.h"
#include "tests/support/support.h"

#include <sys/prctl.h>
#include <sys/wait.h>

#define PAGES 2000

TEST(test_pages_in_the_making)
{
    char name[64], fresh[96];
    snprintf(name, sizeof name, "/commonweight-test-sweep-%d", (int)getpid());
    snprintf(fresh, sizeof fresh, "%s.%d", name, (int)getpid());
    const pid_t sweeper = fork();
    assert_true(sweeper >= 0);
    if (sweeper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) control_sweep(fresh);
    }
    enum status st = ST_OK;
    for (int i = 0; i < PAGES; i++) {
        struct control *c;
        st = control_create(name, "layout", &c);
        if (st != ST_OK) break;
        control_end(c);
        control_free(c);
    }
    kill(sweeper, SIGKILL);
    waitpid(sweeper, NULL, 0);
    assert_ok(st);
}
