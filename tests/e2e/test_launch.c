/* test_launch.c: cw-trainer train --gpus and --ranks: a server is started for a rank and ends with
 * it, one that runs already is used and left alone, and what does not go together is refused. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/training.h"

#include <sys/socket.h>
#include <sys/un.h>

static const char *runtime; // $XDG_RUNTIME_DIR of all that is started here

static void open_runtime(struct scene *s)
{
    runtime = scene_open_runtime(s);
}

SCENE_OF_ALL(open_runtime)

static bool is_there(const char *name)
{
    return file_exists(test_path(runtime, name));
}

#define LEFT_OVER                                                                                  \
    "commonweight/cpu-0/server.sock", "commonweight/cpu-0/server.sock.lock",                       \
        "commonweight/cpu-0/bridge.json"

static void nothing_is_left(void)
{
    static const char *const names[] = {LEFT_OVER};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (is_there(names[i])) fail_msg("%s is left over", names[i]);
}

TEST(test_a_server_is_started)
{
    train_rows(&scene, "launch", "a_server_is_started", train_on);
    nothing_is_left();
    assert_contains(test_read(test_path(runtime, "commonweight/cpu-0/server.log")), "listening on");
    // how a start's processes come to be is not the run's
    char *config = test_read(test_path(scene.folder, "started/config.json"));
    assert_null(strstr(config, "server_args"));
    assert_null(strstr(config, "ranks"));
}

// A run does not remember how its processes came to be: it goes on with a server of its own where
// it had somebody else's, and the other way round.
TEST(test_a_run_goes_on_otherwise)
{
    assert_train(&scene, 0, "otherwise", "--max-steps 1");
    train_rows(&scene, "launch", "a_run_goes_on_otherwise", train_on);
    assert_train(&scene, 0, "otherwise", "--resume --max-steps 3");
    assert_int_equal(steps_done(&scene, "otherwise"), 3);
    nothing_is_left();
}

// --model asks for servers to be started, so that the ones a run had before are not taken.
TEST(test_a_run_of_named_servers_goes_on_otherwise)
{
    const char *bridge = test_path(scene.folder, "of-{rank}.json");
    assert_int_equal(symlink(scene.daemon.bridge, bridge), 0);
    train_rows(&scene, "launch", "of_named_servers", train_on);
    nothing_is_left();
}

// Before a run has begun there is nothing to save, and a signal is the end: also while a server is
// waited for, here one that never answers.
TEST(test_a_signal_ends_the_wait_for_a_server)
{
    struct test_child child = {0};
    const char *path = test_path(runtime, "commonweight/cpu-0/server.sock");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_ok(file_make_folders(test_path(runtime, "commonweight/cpu-0")));
    assert_true(strlen(path) < sizeof address.sun_path);
    strcpy(address.sun_path, path);
    assert_true(bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 8) == 0);
    scene_spawn(&scene, &child,
                trainer_command_on(&scene, "wait", args("--ranks 1 --max-steps 1")));
    wait_for_log(&scene, "is not ready yet, and is waited for");
    test_kill(&child, SIGTERM);
    const int status = test_wait(&child, LIMIT_MS);
    close(fd);
    unlink(path);
    assert_int_equal(status, 128 + SIGTERM);
}

TEST(test_a_server_that_fails)
{
    train_rows(&scene, "launch", "a_server_that_fails", train_on);
    nothing_is_left();
}

// A rank that is killed takes its server along; the next one is not disturbed by what is left.
TEST(test_a_killed_rank_leaves_no_server)
{
    struct test_child child = {0};
    const char *bridge = test_path(runtime, "commonweight/cpu-0/bridge.json");
    const char *const *more = args("--ranks 1 --model %s --max-steps 100000", scene.model);
    scene_spawn(&scene, &child, trainer_command_on(&scene, "killed", more));
    wait_for_steps(&scene, "killed", 1, &child);
    struct bridge_file *file;
    assert_ok(bridge_file_read(bridge, &file));
    const pid_t server = file->pid;
    bridge_file_free(file);
    test_kill(&child, SIGKILL);
    test_wait(&child, LIMIT_MS);
    for (int i = 0; i < 200 && kill(server, 0) == 0; i++) usleep(20000);
    assert_int_not_equal(kill(server, 0), 0);
    assert_int_equal(
        train_on(&scene, "after", args("--ranks 1 --model %s --max-steps 1", scene.model)), 0);
    nothing_is_left();
}

// One that runs where the rank's would be, as a unit of systemd may have it.
TEST(test_a_running_server_is_used)
{
    struct test_child server = {0};
    const char *socket = test_path(runtime, "commonweight/cpu-0/server.sock"),
               *bridge = test_path(runtime, "commonweight/cpu-0/bridge.json");
    assert_ok(file_make_folders(test_path(runtime, "commonweight/cpu-0")));
    test_spawn(&server, test_path(scene.folder, "server.log"),
               args("%s --model %s --device cpu --socket %s --bridge %s",
                    test_binary("cw-infer-server"), scene.model, socket, bridge));
    test_wait_for_socket(socket, LIMIT_MS, &server); // it may load still
    assert_int_equal(train_on(&scene, "used", args("--ranks 1 --max-steps 1")), 0);
    assert_said(&scene, "is there already");
    const char *other = daemon_model(test_folder(), true, 99);
    assert_int_equal(train_on(&scene, "other", args("--ranks 1 --model %s --max-steps 1", other)),
                     1);
    assert_said(&scene, "the server there serves");
    assert_said(&scene, other);
    assert_true(test_running(&server)); // it is nobody's here to end
    test_kill(&server, SIGTERM);
    assert_int_equal(test_wait(&server, LIMIT_MS), 0);
}

// Each rank fails to start its server, on a GPU that no machine has; the launcher names one.
TEST(test_ranks_that_fail)
{
    train_rows(&scene, "launch", "ranks_that_fail", train_on);
}

TEST(test_refused)
{
    train_rows(&scene, "launch", "refused", train_on);
    static const struct {
        const char *name, *more[5], *part;
    } started[] = {
        {"RANK", {"--gpus", "0,1"}, "RANK is in the environment without WORLD_SIZE"},
        {"WORLD_SIZE", {"--rank", "1", "--ranks", "2"}, "--rank says 1, RANK says 0"},
        {"LOCAL_WORLD_SIZE", {"--gpus", "0,1"}, "torchrun has started 1 processes on this host"},
    };
    setenv("RANK", "0", 1);
    for (size_t i = 0; i < 3; i++) {
        if (i > 0) setenv(started[i].name, i == 1 ? "2" : "1", 1);
        if (train_on(&scene, "refused", started[i].more) != 2)
            fail_msg("case %zu is not refused", i);
        assert_said(&scene, started[i].part);
    }
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("LOCAL_WORLD_SIZE");
}
