/* test_tensor_systemd.c: a tensor-parallel server as a service: what systemd starts is the process
 * that starts the ranks, and rank 0 tells it that it is ready and lives. On the CPU, with mpirun.
 */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/notify.h"

#include <sys/socket.h>

TEST(rank_0_tells_that_it_is_ready_and_lives)
{
    struct test_child server = {0};
    const char *folder = test_folder(), *log = test_path(folder, "log");
    if (!on_cpu()) test_skip("it starts ranks of the CPU, with mpirun");
    if (system("command -v mpirun >/dev/null") != 0) test_skip("there is no mpirun");
    const int fd = notify_open();
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("WATCHDOG_USEC", "600000", 1);
    // systemd puts the main process's number there, and asks that one alone to give signs of life
    test_spawn(&server, log,
               OPTIONS("/bin/sh", "-c", "WATCHDOG_PID=$$ exec \"$@\"", "sh",
                       test_binary("cw-infer-server"), "--model",
                       daemon_model(test_folder(), false, 3), "--device", "cpu",
                       "--tensor-parallel-size", "2", "--socket", test_path(folder, "s.sock"),
                       "--bridge", test_path(folder, "b.json"), "--drain-timeout", "1"));
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    if (!notify_heard(fd, "READY=1", 30000)) fail_msg("%s", test_read(log));
    assert_true(notify_heard(fd, "WATCHDOG=1", 5000));
    assert_true(notify_heard(fd, "WATCHDOG=1", 5000));
    test_kill(&server, SIGTERM);
    assert_true(notify_heard(fd, "STOPPING=1", 5000));
    assert_int_equal(test_wait(&server, 20000), 0);
    close(fd);
}
