/* test_tensor_training.c: cw-trainer on servers whose model is in shards: the ranks of one server,
 * and those of two, learn as one process does on a whole model, to the same bits each time, and go
 * on from each other's checkpoints. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mpirun.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"

#define STEPS 10

static struct servers {
    struct scene s;           // a server of one rank
    struct daemon sharded[2]; // two of two ranks
    bool experts_whole;       // which these share
} servers;

static void start_sharded(struct servers *p, int i)
{
    struct daemon *d = &p->sharded[i];
    if (!on_cpu()) test_skip("it starts ranks of the CPU, with mpirun");
    daemon_spawn_ranks(d, 2, p->s.model,
                       p->experts_whole ? args("--tensor-parallel-size 2 --expert-parallel")
                                        : args("--tensor-parallel-size 2"));
    daemon_wait(d);
    assert_int_equal(symlink(d->bridge, test_text("%s/server-%d.json", p->s.folder, i)), 0);
}

static void servers_open(struct servers *p)
{
    memset(p, 0, sizeof *p);
    scene_open(&p->s);
    start_sharded(p, 0);
}

// Of a mixture, whose ranks have some experts each; beside them one that all rows go to.
static void servers_open_experts(struct servers *p, const char *name)
{
    *p = (struct servers){.experts_whole = true};
    scene_open_model(&p->s, tiny_tokenizer_beside(test_golden(name)), NULL);
    start_sharded(p, 0);
}

#define COMMON                                                                                     \
    "--prompts-per-step 4 --learning-rate 1e-4 --beta 0.05 --temperature 1.2 --resume "            \
    "--max-steps %s"

static void train_one(struct servers *p, const char *run, const char *steps)
{
    assert_train(&p->s, 0, run, COMMON, steps);
}

// n ranks on the first server, or 4 on both.
static void start_ranks(struct servers *p, struct test_child *child, int n, const char *run,
                        const char *steps)
{
    const char *bridge =
        n == 4 ? test_path(p->s.folder, "server-{rank}.json") : p->sharded[0].bridge;
    const char *const *one =
        trainer_command(&p->s, test_path(p->s.folder, run), args(COMMON, steps));
    scene_spawn(&p->s, child, JOIN(mpirun_words(n), with_word(one, p->s.daemon.bridge, bridge)));
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
    struct scene check = {.folder = test_folder()};
    scene_ended(&check,
                scene_run(&check, OPTIONS(test_binary("cw-ipc-check"), p->sharded[i].bridge)), 0);
    assert_said(&check, "ok    rank 1: checksums");
}

static void learn_as_one(struct servers *p)
{
    train_one(p, "one", "10");
    train_ranks(p, 2, "two", "10");
    same_losses(&p->s, "one", "two", STEPS, 1e-5);
    // sampler and trainer of a shard compute the same bits
    each_within(&p->s, "two", "sampler_mismatch/max", STEPS, 0, 0);
    server_is_healthy(p, 0);
    train_ranks(p, 2, "again", "10");
    same_losses(&p->s, "two", "again", STEPS, 0);
    test_same_file(latest(&p->s, "two"), latest(&p->s, "again"), "model.safetensors");
    test_same_file(latest(&p->s, "two"), latest(&p->s, "again"), "trainer/optimizer.safetensors");
}

TEST(ranks_of_a_server_learn_as_one)
{
    servers_open(&servers);
    learn_as_one(&servers);
}

TEST(ranks_with_whole_experts_learn_as_one)
{
    servers_open_experts(&servers, "qwen2-moe");
    learn_as_one(&servers);
}

static void go_on_from_each_other(struct servers *p)
{
    start_sharded(p, 1);
    train_one(p, "one", "10");
    train_ranks(p, 2, "mixed", "3");
    train_one(p, "mixed", "7");
    train_ranks(p, 4, "mixed", "10");
    same_losses(&p->s, "one", "mixed", STEPS, 1e-5);
    server_is_healthy(p, 0);
    server_is_healthy(p, 1);
    // what they serve is what they saved
    struct daemon whole = {0};
    daemon_start(&whole, latest(&p->s, "mixed"), NULL);
    json_t *answers[3];
    const struct daemon *daemons[] = {&whole, &p->sharded[0], &p->sharded[1]};
    for (int i = 0; i < 3; i++)
        answers[i] = json_at(
            daemon_post(daemons[i]->socket, "/v1/completions", 200,
                        "{\"prompt\": [5, 6, 5, 6, 5], \"max_tokens\": 12, \"temperature\": 0, "
                        "\"ignore_eos\": true, \"return_token_ids\": true, "
                        "\"skip_special_tokens\": true}"),
            "choices.0.token_ids");
    for (int i = 1; i < 3; i++) assert_true(json_equal(answers[0], answers[i]));
}

TEST(a_checkpoint_is_of_whole_tensors)
{
    servers_open(&servers);
    go_on_from_each_other(&servers);
}

TEST(a_checkpoint_has_all_experts)
{
    servers_open_experts(&servers, "deepseek-v3"); // without a loss that goes by micro-batches
    go_on_from_each_other(&servers);
}

// The trainer of shard 1: the one of mpirun's children that does not hold the lease.
static pid_t follower_of(const struct servers *p, const struct test_child *mpirun)
{
    int pids[2] = {0};
    json_t *info = daemon_get(p->sharded[0].socket, "/bridge/info", 200);
    const int writer = (int)int_of(info, "control.writer_pid");
    const char *path = test_text("/proc/%d/task/%d/children", (int)mpirun->pid, (int)mpirun->pid);
    assert_int_equal(sscanf(test_read(path), "%d %d", &pids[0], &pids[1]), 2);
    assert_true(writer == pids[0] || writer == pids[1]);
    return writer == pids[0] ? pids[1] : pids[0];
}

TEST(a_trainer_that_is_killed_ends_both_and_the_run_goes_on)
{
    struct servers *p = &servers;
    struct test_child child = {0};
    servers_open(p);
    start_ranks(p, &child, 2, "run", "100000");
    wait_for_steps(&p->s, "run", 3, &child);
    kill(follower_of(p, &child), SIGKILL);
    const int64_t killed_ns = clock_now_ns();
    test_wait(&child, 10000);
    assert_true(clock_ms_since(killed_ns) < 10000);
    assert_said(&p->s, "is gone: it was killed or ended without a word");
    daemon_wait(&p->sharded[0]); // where it died within an update, once the server has restored it
    server_is_healthy(p, 0);
    train_ranks(p, 2, "run", test_text("%d", steps_done(&p->s, "run") + 2));
    server_is_healthy(p, 0);
}

TEST(one_trainer_is_not_enough)
{
    struct servers *p = &servers;
    servers_open(p);
    const char *const *words =
        trainer_command(&p->s, test_path(p->s.folder, "run"), args("--max-steps 1"));
    assert_exit(1, scene_run(&p->s, with_word(words, p->s.daemon.bridge, p->sharded[0].bridge)));
    assert_said(&p->s, "\"tp_degree\" is 2");
}

int main(void)
{
    setenv("OMP_NUM_THREADS", "1", 1);
    return test_main();
}
