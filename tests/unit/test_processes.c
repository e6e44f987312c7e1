/* test_processes.c: common/ranks/processes.h: ranks that a launcher starts end together, and the
 * first that failed is named. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/processes.h"
#include "common/ranks/ranks.h"
#include "tests/support/support.h"

#include <sys/wait.h>

#define GRACE_MS 1000
#define END_MS   2000

static enum status become_rank(void *context, int rank)
{
    const struct ranks r = {
        .rank = rank, .size = 8, .local_rank = rank - 4, .local_size = 4, .run_id = "run-1"};
    (void)context;
    return ranks_export(&r);
}

// Each in a shell that knows its rank as $R, its folder as $F. Four of them, ranks 4 to 7.
static enum status run(const char *folder, const char *script)
{
    char line[PATH_MAX + 512];
    snprintf(line, sizeof line, "sh -c 'F=%s; R=$COMMONWEIGHT_RANK; %s'", folder, script);
    const struct processes plan = {.n = 4,
                                   .first = 4,
                                   .line = line,
                                   .before = become_rank,
                                   .stop_signal = SIGUSR1,
                                   .grace_ms = GRACE_MS,
                                   .end_ms = END_MS};
    return processes_run(&plan);
}

static bool is_there(const char *folder, const char *name)
{
    return file_exists(test_path(folder, name));
}

TEST(test_each_knows_its_rank)
{
    const char *folder = test_folder();
    assert_ok(run(folder, "touch $F/$R-of-$COMMONWEIGHT_RANKS-local-$COMMONWEIGHT_LOCAL_RANK; "
                          "sleep 0.$COMMONWEIGHT_LOCAL_RANK"));
    assert_true(is_there(folder, "4-of-8-local-0"));
    assert_true(is_there(folder, "5-of-8-local-1"));
    assert_true(is_there(folder, "6-of-8-local-2"));
    assert_true(is_there(folder, "7-of-8-local-3"));
}

TEST(test_first_failure_is_named)
{
    const char *folder = test_folder();
    assert_status(run(folder, "[ $R = 6 ] && exit 3; trap \"exit 0\" TERM; "
                              "while :; do sleep 0.05; done"),
                  ST_PEER_GONE);
    assert_message("rank 6 (pid ");
    assert_message("ended with status 3, and the others with it");
}

TEST(test_killed_is_named)
{
    assert_status(run(test_folder(), "[ $R = 7 ] && kill -9 $$; while :; do sleep 0.05; done"),
                  ST_PEER_GONE);
    assert_message("rank 7 (pid ");
    assert_message("was ended by signal 9 (Killed), and the others with it");
}

TEST(test_who_does_not_end_is_killed)
{
    const char *folder = test_folder();
    const int64_t since = clock_now_ns();
    assert_status(run(folder, "trap \"\" TERM; touch $F/up-$R; [ $R = 4 ] && sleep 0.5 && exit 1; "
                              "echo $$ > $F/pid-$R; while :; do sleep 0.05; done"),
                  ST_PEER_GONE);
    assert_message("rank 4 (pid ");
    assert_true(clock_ms_since(since) >= GRACE_MS); // they had their time
    for (int rank = 5; rank <= 7; rank++) {
        char name[16];
        snprintf(name, sizeof name, "pid-%d", rank);
        char *pid = test_read(test_path(folder, name));
        assert_int_not_equal(kill(atoi(pid), 0), 0);
    }
}

// A stopped one cannot take a signal but SIGKILL: it is let go on, and has its time.
TEST(test_who_is_stopped_can_end)
{
    const char *folder = test_folder();
    assert_status(run(folder,
                      "[ $R = 4 ] && { until [ -e $F/up-5 ]; do sleep 0.02; done; exit 1; }; "
                      "trap \"touch $F/told-$R; exit 0\" TERM; touch $F/up-$R; "
                      "[ $R = 5 ] && kill -STOP $$; while :; do sleep 0.02; done"),
                  ST_PEER_GONE);
    assert_message("rank 4 (pid ");
    assert_true(is_there(folder, "told-5"));
}

// The others have ended well, so that nobody else would say that it is missing.
TEST(test_who_is_stopped_at_the_end_is_not_waited_for)
{
    const int64_t start = clock_now_ns();
    assert_fails(run(test_folder(), "[ $R = 6 ] && kill -STOP $$; exit 0"), ST_TIMEOUT,
                 "1 of 4 ranks had not ended 2 s after the others, and were ended");
    assert_true(clock_ms_since(start) >= END_MS);
    // and where another program started them
    const struct processes plan = {.n = 1,
                                   .name = "mpirun",
                                   .n_ranks = 3,
                                   .line = "sh -c 'sleep 2 & sleep 2 & sleep 1000 & wait'",
                                   .stop_signal = SIGTERM,
                                   .grace_ms = GRACE_MS,
                                   .end_ms = 1000};
    assert_fails(processes_run(&plan), ST_TIMEOUT,
                 "1 of 3 ranks had not ended 1 s after the others");
}

static void is_handed_on(int number)
{
    const char *folder = test_folder();
    const pid_t launcher = fork();
    if (launcher == 0) {
        const enum status st =
            run(folder, "trap \"touch $F/told-$R; exit 0\" USR1; touch $F/up-$R; "
                        "while :; do sleep 0.02; done");
        _exit(st == ST_OK ? 0 : 1);
    }
    static const char *const up[] = {"up-4", "up-5", "up-6", "up-7"}, *const told[] = {
                                                                          "told-4", "told-5",
                                                                          "told-6", "told-7"};
    int status = 1;
    for (int i = 0; i < 4; i++) test_wait_for_file(test_path(folder, up[i]), 20000, NULL);
    kill(launcher, number);
    assert_int_equal(waitpid(launcher, &status, 0), launcher);
    assert_int_equal(status, 0);
    for (int i = 0; i < 4; i++) assert_true(is_there(folder, told[i]));
}

TEST(test_signals_are_handed_on)
{
    is_handed_on(SIGTERM);
    is_handed_on(SIGUSR1); // of a batch system, before it ends the job
    signal(SIGHUP, SIG_DFL);
    is_handed_on(SIGHUP); // of a terminal that is closed
}

// A closed terminal's, which come through its shell and by themselves, are one.
TEST(test_hangups_are_one)
{
    const char *folder = test_folder();
    signal(SIGHUP, SIG_DFL);
    const pid_t launcher = fork();
    if (launcher == 0) {
        const enum status st =
            run(folder, "trap \"touch $F/told-$R\" USR1; trap \"exit 0\" TERM; touch $F/up-$R; "
                        "until [ -e $F/told-$R ]; do sleep 0.02; done; "
                        "trap \"touch $F/again; exit 0\" USR1; touch $F/next-$R; "
                        "until [ -e $F/end ]; do sleep 0.02; done");
        _exit(st == ST_OK ? 0 : 1);
    }
    char name[2][16];
    int status = 1;
    for (int k = 0; k < 2; k++) {
        for (int rank = 4; rank < 8; rank++) {
            snprintf(name[k], sizeof name[k], "%s-%d", k ? "next" : "up", rank);
            test_wait_for_file(test_path(folder, name[k]), 20000, NULL);
        }
        kill(launcher, SIGHUP);
    }
    clock_sleep_ms(300);
    test_write(test_path(folder, "end"), "", 0);
    assert_int_equal(waitpid(launcher, &status, 0), launcher);
    assert_int_equal(status, 0);
    assert_false(is_there(folder, "again"));
}

TEST(test_no_such_program)
{
    const struct processes plan = {
        .n = 1, .name = "mpirun", .line = "no-such-mpirun -n 2", .grace_ms = GRACE_MS};
    assert_fails(processes_run(&plan), ST_PEER_GONE, "mpirun (pid ");
    assert_message("ended with status 127 (it could not be started)");
}
