/* test_launch_ranks.c: the ranks that cw-trainer train --gpus starts, on one host and on two, with
 * a small program in the place of the trainer: they meet, and where one is killed all end, here and
 * on the other host, and everybody says which. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/rank_group.h"
#include "tests/support/rank_program.h"

#define LIMIT_MS 60000

static struct test_child hosts[2];
static const char *logs[2];

static int end_hosts(void **state)
{
    (void)state;
    unsetenv("RANK_PROGRAM_MS");
    return 0;
}

static const char *new_log(void)
{
    const char *log = test_path(test_folder(), "log");
    test_write(log, "", 0);
    return log;
}

static void log_has(const char *log, const char *part)
{
    assert_contains(test_read(log), part);
}

TEST_WITH(test_one_host, NULL, end_hosts, NULL)
{
    char *log = test_output(0, args("cw-trainer train --gpus 3,1,0 --data x"));
    assert_contains(log, "3 ranks, 3 of them started here");
    assert_contains(log, "rank 0 of 3 on GPU 3, pid ");
    assert_contains(log, "rank 1 of 3 on GPU 1, pid ");
    assert_contains(log, "rank 2 of 3 on GPU 0, pid ");
    assert_contains(log, "cw-trainer[0]: 3 ranks have met");
}

static void start_hosts(const char *rendezvous)
{
    for (int i = 0; i < 2; i++) {
        logs[i] = new_log();
        test_spawn(
            &hosts[i], logs[i],
            args("cw-trainer train --gpus 0,1 --nnodes 2 --node-rank %d --rendezvous %s --data x",
                 i, rendezvous));
    }
}

TEST_WITH(test_two_hosts, NULL, end_hosts, NULL)
{
    start_hosts(test_text("tcp://127.0.0.1:%d", test_free_port()));
    for (int i = 0; i < 2; i++) assert_int_equal(test_wait(&hosts[i], LIMIT_MS), 0);
    log_has(logs[0], "rank 1 of 4 on GPU 1, pid ");
    log_has(logs[1], "rank 2 of 4 on GPU 0, pid ");
    log_has(logs[1], "rank 3 of 4 on GPU 1, pid ");
}

TEST_WITH(test_a_killed_rank_ends_all, NULL, end_hosts, NULL)
{
    char host[65] = "";
    setenv("RANK_PROGRAM_MS", "60000", 1);
    start_hosts(test_text("file://%s", test_path(test_folder(), "ranks")));
    const pid_t victim = rank_program_pid(logs[1], "rank 3 of 4", LIMIT_MS);
    for (int i = 0; i < 3; i++)
        rank_program_pid(logs[i / 2], test_text("rank %d of 4", i), LIMIT_MS);
    const int64_t since = clock_now_ns();
    kill(victim, SIGKILL);
    for (int i = 0; i < 2; i++) assert_int_equal(test_wait(&hosts[i], LIMIT_MS), 1);
    assert_true(clock_ms_since(since) < 10000); // as docs/use/launch.md promises
    gethostname(host, sizeof host - 1);
    log_has(logs[0], test_text("rank 3 (%s, pid %d) is gone: it was killed", host, (int)victim));
    log_has(logs[0], "error: rank ");
    log_has(logs[1],
            test_text("error: rank 3 (pid %d) was ended by signal 9 (Killed)", (int)victim));
}

// A rank that stands still is found by its silence; its launcher then ends it.
TEST_WITH(test_a_stopped_rank_ends_all, NULL, end_hosts, NULL)
{
    setenv("RANK_PROGRAM_MS", "60000", 1);
    logs[0] = new_log();
    test_spawn(&hosts[0], logs[0], args("cw-trainer train --gpus 0,1,2 --data x"));
    const pid_t victim = rank_program_pid(logs[0], "rank 1 of 3", LIMIT_MS);
    rank_program_pid(logs[0], "rank 0 of 3", LIMIT_MS);
    rank_program_pid(logs[0], "rank 2 of 3", LIMIT_MS);
    kill(victim, SIGSTOP);
    assert_int_equal(test_wait(&hosts[0], LIMIT_MS), 1);
    log_has(logs[0], "nothing was heard of it for 6 s");
    assert_int_not_equal(kill(victim, 0), 0);
}

TEST(test_a_host_that_does_not_come)
{
    assert_contains(test_output(1, args("cw-trainer train --gpus 0 --nnodes 2 --node-rank 0 "
                                        "--rendezvous tcp://127.0.0.1:%d --rendezvous-timeout 0.5 "
                                        "--data x",
                                        test_free_port())),
                    "1 of 2 ranks came in time; missing: ");
}

TEST(test_usage)
{
    assert_contains(test_output(2, args("cw-trainer train --rank 1 --ranks 2 --data x")),
                    "--rendezvous tcp://HOST:PORT or file://PATH is needed: --rank does not say");
}

int main(int argc, char **argv)
{
    if (argc > 1) return rank_program(argc, argv);
    rank_program_folder();
    return test_main();
}
