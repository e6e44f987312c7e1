/* test_launch_shards.c: ranks by one command whose servers hold their model in shards (tensor
 * parallel), alone and together with data parallel; what they save is any number of ranks' to go on
 * from. On the CPU, where ranks and servers are started with mpirun. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#define STEPS 6

static struct scene scene;
static const char *runtime;

static void open_scene(void)
{
    runtime = test_folder();
    setenv("XDG_RUNTIME_DIR", runtime, 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    scene_open(&scene);
}

static void close_scene(void)
{
    scene_close(&scene);
}

// So many ranks, and so many for each server; 0: one, on the scene's server. Its exit status.
static int run_ranks(const char *run, const char *ranks, const char *shards, const char *steps)
{
    const char *argv[TRAINER_WORDS], *log = test_path(scene.folder, "alone.log");
    const char *const *more =
        ranks ? OPTIONS("--model", scene.model, "--tensor-parallel-size", shards, "--resume",
                        "--prompts-per-step", "4", "--max-steps", steps, "--log-level", "debug")
              : OPTIONS("--resume", "--prompts-per-step", "4", "--max-steps", steps);
    if (strcmp(test_device(), "cpu") != 0) test_skip("it starts ranks of the CPU, with mpirun");
    if (system("command -v mpirun >/dev/null") != 0) test_skip("there is no mpirun");
    trainer_command(&scene, test_path(scene.folder, run), more, argv);
    assert_string_equal(argv[2], "--bridge");
    if (ranks) {
        argv[2] = "--ranks";
        argv[3] = ranks;
    }
    unlink(log);
    return test_command(log, LIMIT_MS, argv);
}

static void learn(const char *run, const char *ranks, const char *shards, const char *steps)
{
    if (run_ranks(run, ranks, shards, steps) != 0)
        fail_msg("%s", test_read(test_path(scene.folder, "alone.log")));
}

static void no_server_is_left(void)
{
    for (int rank = 0; rank < 4; rank++) {
        char name[64];
        snprintf(name, sizeof name, "commonweight/cpu-%d/server.sock", rank);
        assert_false(file_exists(test_path(runtime, name)));
    }
}

TEST(a_server_of_two_shards_is_started)
{
    learn("shards", "2", "2", "2");
    assert_said(&scene, "2 ranks train together, on 1 server with 2 shards of the model each");
    assert_said(&scene, "commonweight/cpu-0/bridge.json is this rank's too");
    assert_false(said(&scene, "is there already"));
    assert_int_equal(steps_done(&scene, "shards"), 2);
    no_server_is_left();
}

// Two servers of two shards, two servers of whole models, one rank: each goes on from the one
// before, and all of it is what one rank learns.
TEST(any_number_goes_on_from_data_and_tensor_parallel)
{
    learn("one", NULL, NULL, "6");
    learn("mixed", "4", "2", "2");
    assert_said(&scene, "4 ranks train together, on 2 servers with 2 shards of the model each");
    no_server_is_left();
    learn("mixed", "2", "1", "4");
    assert_said(&scene, "2 ranks train together, on 2 servers with 1 shard of the model each");
    learn("mixed", "4", "2", "5");
    learn("mixed", NULL, NULL, "6");
    same_losses(&scene, "one", "mixed", STEPS, 1e-5);
}

TEST(what_does_not_fit_is_refused)
{
    static const struct {
        const char *more[7], *part;
    } cases[] = {
        {{"--gpus", "0,1,2", "--tensor-parallel-size", "2"},
         "--tensor-parallel-size 2 with 3 ranks, 3 on this host"},
        {{"--gpus", "0", "--tensor-parallel-size", "2"},
         "--tensor-parallel-size 2 with 1 ranks, 1 on this host"},
        {{"--tensor-parallel-size", "2"}, "--tensor-parallel-size is for servers that are started"},
        {{"--gpus", "0,1", "--bridge", "b", "--tensor-parallel-size", "2"},
         "--tensor-parallel-size 2 with --bridge and servers that are started"},
    };
    const char *log = test_path(scene.folder, "alone.log");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *argv[16] = {test_binary("cw-trainer"), "train", "--data", scene.data};
        for (int k = 0; cases[i].more[k]; k++) argv[4 + k] = cases[i].more[k];
        unlink(log);
        assert_int_equal(test_command(log, LIMIT_MS, argv), 2);
        assert_said(&scene, cases[i].part);
    }
}

// Somebody's RANK and WORLD_SIZE, and nothing by which ranks could meet.
TEST(variables_that_were_left_over_are_named)
{
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "2", 1);
    const int status = train_alone(&scene, "left-over", OPTIONS("--max-steps", "1"));
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    assert_int_equal(status, 2);
    assert_said(&scene, "torchrun does not say that all 2 ranks are of one job on this host; where "
                        "this process is no rank, unset RANK and what belongs to it");
}

TESTS_BETWEEN(open_scene, close_scene)
