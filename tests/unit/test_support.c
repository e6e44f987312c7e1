/* test_support.c: the tests' own helpers: child processes, deadlines, and tests/run's counting. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

TEST(children)
{
    const char *log = test_path(test_folder(), "log");
    assert_exit(3, test_command(log, 5000, OPTIONS("sh", "-c", "echo out; echo err >&2; exit 3")));
    char *text = test_read(log);
    assert_contains(text, "out\n");
    assert_contains(text, "err\n");
    assert_int_equal(test_command(log, 5000, OPTIONS("/no/such/program")), 127);

    struct test_child child = {0};
    test_end(&child); // nothing to end
    test_spawn(&child, log, OPTIONS("sleep", "60"));
    assert_true(test_running(&child));
    test_kill(&child, SIGTERM);
    assert_int_equal(test_wait(&child, 5000), 128 + SIGTERM);
    assert_false(test_running(&child));
    test_spawn(&child, log, OPTIONS("sleep", "60"));
    test_end(&child);
    assert_int_equal(child.exit_status, 128 + SIGKILL);
}

TEST(waiting)
{
    const char *folder = test_folder(), *log = test_path(folder, "log");
    const char *path = test_path(folder, "made");
    struct test_child child = {0};
    test_spawn(&child, log, OPTIONS("sh", "-c", "sleep 0.05; : > \"$0\"; sleep 60", path));
    test_wait_for_file(path, 5000, &child);
    assert_true(file_exists(path));
    test_end(&child);

    const char *socket_path = test_path(folder, "socket");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(fd, 1), 0);
    test_wait_for_socket(socket_path, 1000, NULL);
    close(fd);
}

// A program in the form of cmocka's output, so that tests/run can be tested on every kind of end.
static const char *script(const char *build, const char *name, const char *body)
{
    char path[PATH_MAX], text[2000];
    snprintf(path, sizeof path, "%s/tests/unit/%s", build, name);
    int n = snprintf(text, sizeof text,
                     "#!/bin/sh\nt() { echo \"[ RUN      ] $2\"; [ -z \"$3\" ] || echo \"$3\"; "
                     "echo \"$1 $2\"; }\nOK='[       OK ]' BAD='[  FAILED  ]' SKIP='[  SKIPPED ]'\n"
                     "%s\n",
                     body);
    test_write(path, text, (size_t)n);
    const char *kept = test_path(build, path + strlen(build) + 1);
    chmod(kept, 0755);
    return kept;
}

TEST(run_counts)
{
    const char *build = test_folder(), *log = test_path(build, "log");
    assert_ok(file_make_folders(test_path(build, "tests/unit")));
    const char *good =
        script(build, "test_good", "t \"$OK\" a; t \"$OK\" b; t \"$SKIP\" c 'skipped: no moon'");
    const char *bad = script(build, "test_bad",
                             "t \"$OK\" a; t \"$BAD\" b 'x != y'; t \"$BAD\" c\n"
                             "echo '[  FAILED  ] 2 test(s), listed below:'\n"
                             "echo '[  FAILED  ] b'; echo '[  FAILED  ] c'; exit 2");
    const char *crash =
        script(build, "test_crash", "t \"$OK\" a; echo '[ RUN      ] boom'; kill -SEGV $$");
    const char *leak =
        script(build, "test_leak", "t \"$OK\" a; echo 'ERROR: LeakSanitizer'; exit 23");
    const char *slow =
        script(build, "test_slow", "t \"$OK\" a; echo '[ RUN      ] slow'; sleep 60");
    const char *none = script(build, "test_none", "echo nothing");
    const char *mark = test_path(build, "mark");
    const char *orphan = script(build, "test_orphan", "t \"$OK\" a; (sleep 1; : > \"$MARK\") &");
    const char *run = test_path(test_root(), "tests/run");
    setenv("BUILD", build, 1);
    setenv("TEST_TIMEOUT", "1", 1);
    setenv("MARK", mark, 1);

    assert_int_equal(test_command(log, 20000, OPTIONS(run, good, orphan)), 0);
    int64_t orphan_would_wake = clock_deadline_ns(1500);
    char *text = test_read(log);
    assert_contains(text, "skipped c\n    skipped: no moon\n");
    assert_contains(text, "unit/test_good: 2 passed, 0 failed, 1 skipped (");
    assert_contains(text, "\n3 passed, 0 failed, 1 skipped\n");

    const char *log2 = test_path(build, "log2");
    assert_int_equal(test_command(log2, 20000, OPTIONS(run, bad, crash, leak, slow, none)), 1);
    text = test_read(log2);
    assert_contains(text, "failed b\n    x != y\n");
    assert_contains(text, "unit/test_bad: 1 passed, 2 failed");
    assert_contains(text, "failed boom\n");
    assert_contains(text, "unit/test_crash: 1 passed, 1 failed");
    assert_contains(text, "died of signal 11");
    assert_contains(text, "unit/test_leak: 1 passed, 1 failed");
    assert_contains(text, "ERROR: LeakSanitizer");
    assert_contains(text, "unit/test_slow: 1 passed, 1 failed");
    assert_contains(text, "ran past 1 s");
    assert_contains(text, "unit/test_none: 0 passed, 1 failed");
    const char *last = strstr(text, "\n4 passed, 6 failed\n");
    assert_non_null(last);
    assert_string_equal(last, "\n4 passed, 6 failed\n"); // nothing after it

    clock_sleep_ms(clock_ms_until(orphan_would_wake));
    assert_false(file_exists(mark)); // what the test left behind was killed
}

// Two programs that end well only while the other runs, each with folders of its own.
TEST(runs_side_by_side)
{
    static const char meet[] =
        "echo \"[ RUN      ] $0\"; : > \"$TMPDIR/x\"; : > \"$XDG_RUNTIME_DIR/x\"\n"
        "echo \"$TMPDIR $XDG_RUNTIME_DIR $LOGDIR\" > \"$MEET/%s\"\n"
        "until [ -e \"$MEET/%s\" ]; do sleep 0.02; done; echo \"$OK $0\"";
    const char *build = test_folder(), *log = test_path(build, "log");
    char one[500], other[500];
    assert_ok(file_make_folders(test_path(build, "tests/unit")));
    snprintf(one, sizeof one, meet, "one", "other");
    snprintf(other, sizeof other, meet, "other", "one");
    setenv("BUILD", build, 1);
    setenv("MEET", build, 1);
    setenv("LOGDIR", build, 1);
    setenv("TEST_TIMEOUT", "20", 1);
    setenv("TEST_JOBS", "2", 1);
    const int status =
        test_command(log, 60000,
                     OPTIONS(test_path(test_root(), "tests/run"), script(build, "test_one", one),
                             script(build, "test_other", other)));
    unsetenv("LOGDIR");
    unsetenv("TEST_JOBS");
    assert_int_equal(status, 0);
    char *text = test_read(log), *folders = test_read(test_path(build, "one")),
         *others = test_read(test_path(build, "other"));
    assert_contains(text, "\n2 passed, 0 failed\n");
    assert_string_not_equal(folders, others);
    assert_null(strstr(folders, build)); // no $LOGDIR, where a bridge of somebody else may lie
}
