/* test_tensor_training.c: cw-trainer on servers whose model is in shards: the ranks of one server,
 * and those of two, learn as one process does on a whole model, to the same bits each time, and go
 * on from each other's checkpoints. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mpirun.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/torn.h"

#define STEPS 10

static struct servers {
    struct scene s;           // a server of one rank
    struct daemon sharded[2]; // two of two ranks
    bool experts_whole;       // which these share
    const char *options;      // of all
} servers;

static void start_sharded(struct servers *p, int i)
{
    struct daemon *d = &p->sharded[i];
    if (!on_cpu()) test_skip("it starts ranks of the CPU, with mpirun");
    const char *options =
        test_text("--tensor-parallel-size 2%s %s", p->experts_whole ? " --expert-parallel" : "",
                  p->options ? p->options : "");
    daemon_spawn_ranks(d, 2, p->s.model, words_of(options));
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
static void start_ranks_with(struct servers *p, struct test_child *child, int n, const char *run,
                             const char *const words[])
{
    const char *bridge =
        n == 4 ? test_path(p->s.folder, "server-{rank}.json") : p->sharded[0].bridge;
    const char *const *one = trainer_command(&p->s, test_path(p->s.folder, run), words);
    scene_spawn(&p->s, child, JOIN(mpirun_words(n), with_word(one, p->s.daemon.bridge, bridge)));
}

static void start_ranks(struct servers *p, struct test_child *child, int n, const char *run,
                        const char *steps)
{
    start_ranks_with(p, child, n, run, args(COMMON, steps));
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

// So many ranks, or one on the server of one.
static void train_with(struct servers *p, int n, const char *run, const char *words)
{
    struct test_child child = {0};
    if (n == 1) {
        scene_ended(&p->s, train(&p->s, run, words_of(words)), 0);
        return;
    }
    start_ranks_with(p, &child, n, run, words_of(words));
    if (test_wait(&child, LIMIT_MS) != 0 ||
        !file_exists(test_text("%s/%s/metrics.jsonl", p->s.folder, run)))
        fail_msg("%s", test_read(child.log));
}

static const char *adapted(const struct daemon *d)
{
    json_t *a = daemon_post(d->socket, "/v1/completions", 200,
                            "{\"lora\": \"policy\", \"prompt\": \"1+4=\", \"max_tokens\": 8, "
                            "\"temperature\": 0, \"logprobs\": 1, \"ignore_eos\": true}");
    return test_keep(json_dumps(json_object_get(a, "choices"), 0));
}

// Of two servers and of one, from one another's checkpoints, and from what is served; a torn one is
// restored from a checkpoint on all ranks.
TEST(adapters_are_trained_by_all)
{
    struct servers *p = &servers;
#define LORA "--prompts-per-step 4 --lora-r 4 --beta 0.05 --learning-rate 1e-2 --resume "
    *p = (struct servers){.options = "--max-adapters 1"};
    scene_open_model(&p->s, daemon_model(test_folder(), true, 11), words_of(p->options));
    start_sharded(p, 0);
    start_sharded(p, 1);
    train_with(p, 1, "one", LORA "--max-steps 6");
    train_with(p, 4, "mixed", LORA "--max-steps 2");
    train_with(p, 2, "mixed", LORA "--max-steps 6");
    same_losses(&p->s, "one", "mixed", 6, 1e-5);
    each_within(&p->s, "mixed", "sampler_mismatch/max", 6, 0, 0);
    server_is_healthy(p, 0);
    train_with(p, 1, "on-one", LORA "--max-steps 2 --start-from current");
    train_with(p, 2, "on-two", LORA "--max-steps 2 --start-from current");
    same_losses(&p->s, "on-one", "on-two", 2, 1e-5);
    const char *before = adapted(&p->sharded[0]);
    tear_roles(&p->sharded[0], "adapter:policy", latest(&p->s, "on-two"), NULL);
    test_wait_for_text(p->sharded[0].log, "weights restored from", LIMIT_MS, NULL);
    daemon_wait(&p->sharded[0]);
    server_is_healthy(p, 0);
    assert_string_equal(adapted(&p->sharded[0]), before);
}

// A reference that moves is saved whole, and what workers load.
TEST(what_else_is_written_is_of_all_ranks)
{
    struct servers *p = &servers;
    struct daemon worker = {0};
    servers_open(p);
    daemon_start(&worker, p->s.model, NULL);
#define MOVES                                                                                      \
    "--prompts-per-step 4 --beta 0.05 --sync-ref-model --ref-model-sync-steps 2 --learning-rate "  \
    "1e-3 --resume --max-steps "
    train_with(p, 1, "one", MOVES "6");
    train_with(p, 2, "two", MOVES "3");
    train_with(p, 2, "two", MOVES "6");
    same_losses(&p->s, "one", "two", 6, 1e-5);
    train_with(p, 2, "workers",
               test_text("--prompts-per-step 4 --max-steps 2 --workers %s", worker.bridge));
    each_within(&p->s, "workers", "workers/up", 2, 1, 1);
    daemon_end(&worker);
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

int main(int argc, char **argv)
{
    setenv("OMP_NUM_THREADS", "1", 1);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return test_main();
}
