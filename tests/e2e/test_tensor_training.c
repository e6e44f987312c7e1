/* test_tensor_training.c: cw-trainer on servers whose model is in shards: the ranks of one server,
 * and those of two, learn as one process does on a whole model, to the same bits each time, and go
 * on from each other's checkpoints. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mpirun.h"
#include "tests/support/training.h"

#define STEPS 20

static struct servers {
    struct scene s;           // a server of one rank
    struct daemon sharded[2]; // two of two ranks
} servers;

static void start_sharded(struct servers *p, int i)
{
    char name[32];
    struct daemon *d = &p->sharded[i];
    if (strcmp(test_device(), "cpu") != 0) test_skip("it starts ranks of the CPU, with mpirun");
    daemon_spawn_ranks(d, 2, p->s.model, OPTIONS("--tensor-parallel-size", "2"));
    daemon_wait(d);
    snprintf(name, sizeof name, "server-%d.json", i);
    assert_int_equal(symlink(d->bridge, test_path(p->s.folder, name)), 0);
}

static void servers_open(struct servers *p)
{
    memset(p, 0, sizeof *p);
    scene_open(&p->s);
    start_sharded(p, 0);
}

#define COMMON                                                                                     \
    "--prompts-per-step", "4", "--learning-rate", "1e-4", "--beta", "0.05", "--temperature", "1.2"

static void train_one(struct servers *p, const char *run, const char *steps)
{
    assert_int_equal(train(&p->s, run, OPTIONS(COMMON, "--resume", "--max-steps", steps)), 0);
}

// n ranks on the first server, or 4 on both.
static void start_ranks(struct servers *p, struct test_child *child, int n, const char *run,
                        const char *steps)
{
    const char *argv[TRAINER_WORDS + MPIRUN_WORDS];
    const int words = mpirun_put(n, argv);
    const char *bridge =
        n == 4 ? test_path(p->s.folder, "server-{rank}.json") : p->sharded[0].bridge;
    trainer_command(&p->s, test_path(p->s.folder, run),
                    OPTIONS(COMMON, "--resume", "--max-steps", steps), argv + words);
    for (const char **word = argv; *word; word++)
        if (strcmp(*word, p->s.daemon.bridge) == 0) *word = bridge;
    test_spawn(child, test_path(p->s.folder, "trainer.log"), argv);
}

static void train_ranks(struct servers *p, int n, const char *run, const char *steps)
{
    struct test_child child = {0};
    start_ranks(p, &child, n, run, steps);
    if (test_wait(&child, LIMIT_MS) != 0) fail_msg("%s", test_read(child.log));
}

// The server serves what the run has learned, in all its shards.
static void server_is_healthy(const struct servers *p, int i)
{
    const char *out = test_path(p->s.folder, "check");
    unlink(out);
    const int status =
        test_command(out, 20000, OPTIONS(test_binary("cw-ipc-check"), p->sharded[i].bridge));
    char *text = test_read(out);
    if (status != 0) fail_msg("%s", text);
    assert_contains(text, "ok    rank 1: checksums");
}

TEST(ranks_of_a_server_learn_as_one)
{
    struct servers *p = &servers;
    double mismatch[STEPS];
    servers_open(p);
    train_one(p, "one", "20");
    train_ranks(p, 2, "two", "20");
    same_losses(&p->s, "one", "two", STEPS, 1e-5);
    // sampler and trainer of a shard compute the same bits
    assert_int_equal(column(&p->s, "two", "sampler_mismatch/max", mismatch, STEPS), STEPS);
    for (int i = 0; i < STEPS; i++) assert_true(mismatch[i] == 0);
    server_is_healthy(p, 0);
    train_ranks(p, 2, "again", "20");
    same_losses(&p->s, "two", "again", STEPS, 0);
    test_same_file(latest(&p->s, "two"), latest(&p->s, "again"), "model.safetensors");
    test_same_file(latest(&p->s, "two"), latest(&p->s, "again"), "trainer/optimizer.safetensors");
}

TEST(a_checkpoint_is_of_whole_tensors)
{
    struct servers *p = &servers;
    servers_open(p);
    start_sharded(p, 1);
    train_one(p, "one", "20");
    train_ranks(p, 2, "mixed", "7");
    train_one(p, "mixed", "13");
    train_ranks(p, 4, "mixed", "20");
    same_losses(&p->s, "one", "mixed", STEPS, 1e-5);
    server_is_healthy(p, 0);
    server_is_healthy(p, 1);
    // what they serve is what they saved
    struct daemon whole = {0};
    daemon_start(&whole, latest(&p->s, "mixed"), NULL);
    json_t *answers[3];
    const struct daemon *daemons[] = {&whole, &p->sharded[0], &p->sharded[1]};
    for (int i = 0; i < 3; i++)
        answers[i] = daemon_post(daemons[i]->socket, "/v1/completions", 200,
                                 "{\"prompt\": [5, 6, 5, 6, 5], \"max_tokens\": 12, "
                                 "\"temperature\": 0, \"ignore_eos\": true, "
                                 "\"return_token_ids\": true, \"skip_special_tokens\": true}");
    for (int i = 1; i < 3; i++)
        assert_true(json_equal(
            json_object_get(json_array_get(json_object_get(answers[0], "choices"), 0), "token_ids"),
            json_object_get(json_array_get(json_object_get(answers[i], "choices"), 0),
                            "token_ids")));
    for (int i = 0; i < 3; i++) json_decref(answers[i]);
}

// The trainer of shard 1: the one of mpirun's children that does not hold the lease.
static pid_t follower_of(const struct servers *p, const struct test_child *mpirun)
{
    char path[64];
    int pids[2] = {0};
    json_t *info = daemon_get(p->sharded[0].socket, "/bridge/info", 200);
    const int writer =
        (int)json_integer_value(json_object_get(json_object_get(info, "control"), "writer_pid"));
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)mpirun->pid, (int)mpirun->pid);
    char *children = test_read(path);
    assert_int_equal(sscanf(children, "%d %d", &pids[0], &pids[1]), 2);
    assert_true(writer == pids[0] || writer == pids[1]);
    return writer == pids[0] ? pids[1] : pids[0];
}

TEST(a_trainer_that_is_killed_ends_both_and_the_run_goes_on)
{
    struct servers *p = &servers;
    struct test_child child = {0};
    char steps[16];
    servers_open(p);
    start_ranks(p, &child, 2, "run", "100000");
    wait_for_steps(&p->s, "run", 3, &child);
    kill(follower_of(p, &child), SIGKILL);
    const int64_t killed_ns = clock_now_ns();
    test_wait(&child, 10000);
    assert_true(clock_ms_since(killed_ns) < 10000);
    assert_log(&p->s, "is gone: it was killed or ended without a word");
    daemon_wait(&p->sharded[0]); // where it died within an update, once the server has restored it
    server_is_healthy(p, 0);
    snprintf(steps, sizeof steps, "%d", steps_done(&p->s, "run") + 2);
    train_ranks(p, 2, "run", steps);
    server_is_healthy(p, 0);
}

TEST(one_trainer_is_not_enough)
{
    struct servers *p = &servers;
    servers_open(p);
    const char *argv[TRAINER_WORDS], *log = test_path(p->s.folder, "alone.log");
    trainer_command(&p->s, test_path(p->s.folder, "run"), OPTIONS("--max-steps", "1"), argv);
    for (const char **word = argv; *word; word++)
        if (strcmp(*word, p->s.daemon.bridge) == 0) *word = p->sharded[0].bridge;
    assert_int_equal(test_command(log, LIMIT_MS, argv), 1);
    assert_said(&p->s, "\"tp_degree\" is 2");
}

int main(void)
{
    setenv("OMP_NUM_THREADS", "1", 1);
    return test_main();
}
