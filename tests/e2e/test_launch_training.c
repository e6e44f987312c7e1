/* test_launch_training.c: two ranks that train one model, by one command: their servers are started
 * with them and end with them; a signal ends them with a checkpoint, and where one is killed all
 * end in time, say who, and the run goes on. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/mpirun.h"
#include "tests/support/training.h"

#define END_MS 10000 // for all, once a rank is gone

static const char *runtime;

static void open_runtime(struct scene *s)
{
    runtime = scene_open_runtime(s);
}

SCENE_OF_ALL(open_runtime)

static void start(struct test_child *child, const char *run, int steps)
{
    mpirun_words(2); // which skips the test where there is none
    const char *const *more =
        args("--ranks 2 --model %s --resume --save-steps 2 --max-steps %d", scene.model, steps);
    scene_spawn(&scene, child, trainer_command_on(&scene, run, more));
}

static int run_to(const char *run, int steps)
{
    struct test_child child = {0};
    start(&child, run, steps);
    return test_wait(&child, LIMIT_MS);
}

// The server of a rank, as its bridge file says.
static pid_t server_of(int rank)
{
    struct bridge_file *file;
    assert_ok(
        bridge_file_read(test_text("%s/commonweight/cpu-%d/bridge.json", runtime, rank), &file));
    const pid_t pid = file->pid;
    bridge_file_free(file);
    return pid;
}

static void servers_have_ended(const pid_t servers[2])
{
    for (int rank = 0; rank < 2; rank++) {
        for (int i = 0; i < 200 && kill(servers[rank], 0) == 0; i++) clock_sleep_ms(20);
        assert_int_not_equal(kill(servers[rank], 0), 0);
    }
}

TEST(test_one_command)
{
    assert_int_equal(run_to("whole", 4), 0);
    assert_int_equal(steps_done(&scene, "whole"), 4);
    assert_said(&scene, "cw-trainer: 2 ranks, 2 of them started here, with mpirun");
    assert_said(&scene, "cw-trainer[0]: 2 ranks have met");
    assert_false(file_exists(test_path(runtime, "commonweight/cpu-0/server.sock")));
    assert_false(file_exists(test_path(runtime, "commonweight/cpu-1/server.sock")));
}

TEST(test_a_signal_ends_all_with_a_checkpoint)
{
    struct test_child child = {0};
    start(&child, "stopped", 100000);
    wait_for_steps(&scene, "stopped", 1, &child);
    const pid_t servers[2] = {server_of(0), server_of(1)};
    test_kill(&child, SIGTERM);
    assert_int_equal(test_wait(&child, LIMIT_MS), 0);
    servers_have_ended(servers);
    assert_int_equal(saved_step(&scene, "stopped"), steps_done(&scene, "stopped"));
}

// The parent of a rank's server is the rank.
static pid_t rank_of(pid_t server)
{
    return (pid_t)test_process(server, "PPid:", 10);
}

TEST(test_a_killed_rank_ends_all)
{
    struct test_child child = {0};
    char host[65] = "";
    start(&child, "killed", 100000);
    wait_for_steps(&scene, "killed", 3, &child);
    const pid_t servers[2] = {server_of(0), server_of(1)}, victim = rank_of(servers[1]);
    const int64_t since = clock_now_ns();
    kill(victim, SIGKILL);
    assert_int_equal(test_wait(&child, LIMIT_MS), 1);
    assert_true(clock_ms_since(since) < END_MS); // as docs/use/launch.md promises
    servers_have_ended(servers);
    gethostname(host, sizeof host - 1);
    assert_said(&scene, test_text("rank 1 (%s, pid %d) is gone: it was killed", host, (int)victim));
    assert_said(&scene, "mpirun (pid ");
    const int done = steps_done(&scene, "killed");
    assert_int_equal(run_to("killed", done + 2), 0);
    assert_int_equal(steps_done(&scene, "killed"), done + 2);
}

// The server of one rank is killed: its rank says so, and takes the others along.
TEST(test_a_killed_server_ends_all)
{
    struct test_child child = {0};
    start(&child, "serverless", 100000);
    wait_for_steps(&scene, "serverless", 2, &child);
    const pid_t servers[2] = {server_of(0), server_of(1)};
    const int64_t since = clock_now_ns();
    kill(servers[1], SIGKILL);
    assert_int_equal(test_wait(&child, LIMIT_MS), 1);
    assert_true(clock_ms_since(since) < END_MS);
    servers_have_ended(servers);
    assert_said(&scene, "cw-trainer[1]: error: ");
    assert_said(&scene, "cw-trainer[0]: error: ");
}
