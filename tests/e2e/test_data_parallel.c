/* test_data_parallel.c: two ranks, each with a server of its own, train one model together, on the
 * CPU under mpirun, or on cuda:0 and cuda:1 where COMMONWEIGHT_TEST_DEVICE says cuda: as one rank
 * would, to the same bits each time, through checkpoints of either, and through the death of a
 * rank. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/pair.h"
#include "tests/support/torn.h"

#define END_IN_MS 10000 // for the others, once a rank is gone

// Of one rank, on rank 0's server.
static int train_one(struct pair *p, const char *run, const char *steps)
{
    return train(&p->s, run, args(PAIR_NUMBERS " --resume --max-steps %s", steps));
}

TEST(two_ranks_learn_as_one)
{
    struct pair p;
    pair_open(&p);
    assert_int_equal(train_one(&p, "one", PAIR_WHOLE), 0);
    pair_train(&p, "two", PAIR_WHOLE);
    pair_holds(&p, "two");
    same_losses(&p.s, "one", "two", PAIR_STEPS, 1e-5);

    pair_train(&p, "again", PAIR_WHOLE);
    same_losses(&p.s, "two", "again", PAIR_STEPS, 0);
    test_same_file(latest(&p.s, "two"), latest(&p.s, "again"), "model.safetensors");
    test_same_file(latest(&p.s, "two"), latest(&p.s, "again"), "trainer/optimizer.safetensors");
}

TEST(a_checkpoint_of_two_ranks_is_one_of_one)
{
    struct pair p;
    pair_open(&p);
    assert_int_equal(train_one(&p, "one", PAIR_WHOLE), 0);
    pair_train(&p, "first-two", PAIR_HALF);
    assert_int_equal(train_one(&p, "first-two", PAIR_WHOLE), 0);
    same_losses(&p.s, "one", "first-two", PAIR_STEPS, 1e-5);
    assert_int_equal(train_one(&p, "first-one", PAIR_HALF), 0);
    pair_train(&p, "first-one", PAIR_WHOLE);
    pair_holds(&p, "first-one");
    same_losses(&p.s, "one", "first-one", PAIR_STEPS, 1e-5);
}

TEST(adapters_learn_as_one)
{
    struct pair p;
    pair_learns_as_one(&p, NULL, args("--max-adapters 2 --max-lora-rank 8"),
                       args(PAIR_NUMBERS " --lora-r 4 --max-steps " PAIR_WHOLE));
    daemon_holds_adapter(&p.s.daemon, "policy", latest(&p.s, "two"));
    daemon_holds_adapter(&p.other, "policy", latest(&p.s, "two"));
}

// Parts of a rollout, a choice of tokens over all ranks, the bonus' coefficient and a priced KL
// divergence are of the whole step.
TEST(recipes_learn_as_one)
{
    struct pair p;
    pair_learns_as_one(&p, NULL, NULL,
                       args(PAIR_NUMBERS
                            " --max-steps " PAIR_WHOLE
                            " --steps-per-generation 2 --top-entropy-quantile 0.5 "
                            "--entropy-coef 0.01 --use-adaptive-entropy --entropy-target 100 "
                            "--kl-reward-coef 0.01 --loss-type sapo"));
}

// Each rank makes the twin of what all have learned.
TEST(weights_in_e4m3_learn_as_one)
{
    struct pair p;
    if (!on_cpu()) test_skip("f32 is exact on the CPU alone");
    pair_learns_as_one(&p, NULL, args("--exact --quantization fp8-weights --kv-cache-dtype fp8"),
                       args(PAIR_NUMBERS " --exact --max-steps " PAIR_WHOLE));
    each_within(&p.s, "one", "sampler_mismatch/max", PAIR_STEPS, 0, 0);
    each_within(&p.s, "two", "sampler_mismatch/max", PAIR_STEPS, 0, 0);
    pair_holds(&p, "two");
}

// With --exact, because what is drafted otherwise goes by the clock, and with it what is sampled.
TEST(a_draft_learns_as_one)
{
    struct pair p;
    double one[PAIR_STEPS], two[PAIR_STEPS];
    if (!on_cpu()) test_skip("f32 is exact on the CPU alone");
    pair_learns_as_one(&p, test_path(test_root(), "tools/demo-model"),
                       args("--exact --draft %s --speculative draft_model:3",
                            test_path(test_root(), "tools/demo-draft")),
                       args(PAIR_NUMBERS " --exact --train-draft --max-steps " PAIR_WHOLE));
    assert_int_equal(column(&p.s, "one", "draft_loss", one, PAIR_STEPS), PAIR_STEPS);
    assert_int_equal(column(&p.s, "two", "draft_loss", two, PAIR_STEPS), PAIR_STEPS);
    for (int i = 0; i < PAIR_STEPS; i++) assert_true(fabs(one[i] - two[i]) < 1e-4 * fabs(one[i]));
    const char *draft = test_path(latest(&p.s, "two"), "draft");
    daemon_holds(&p.s.daemon, "draft", draft);
    daemon_holds(&p.other, "draft", draft);
}

static void kill_writer(const struct daemon *d)
{
    const pid_t pid =
        (pid_t)int_of(daemon_get(d->socket, "/bridge/info", 200), "control.writer_pid");
    assert_true(pid > 1 && kill(pid, SIGKILL) == 0);
}

// Once a rank is gone: the other ends in time and says so, and the run goes on.
static void ends_and_goes_on(struct pair *p, struct test_child *child, int gone)
{
    const int64_t killed_ns = clock_now_ns();
    test_wait(child, END_IN_MS);
    assert_true(clock_ms_since(killed_ns) < END_IN_MS);
    assert_said(&p->s, test_text("cw-trainer[%d]: error: ", 1 - gone));
    assert_said(&p->s, test_text("rank %d (", gone));
    assert_said(&p->s, "is gone: it was killed or ended without a word");
    pair_train(p, "run", test_text("%d", steps_done(&p->s, "run") + 2));
    pair_holds(p, "run");
}

TEST(a_rank_that_is_killed_ends_all)
{
    struct pair p;
    pair_open(&p);
    for (int rank = 0; rank < 2; rank++) {
        struct test_child child = {0};
        const int before = steps_done(&p.s, "run");
        pair_start(&p, &child, "run",
                   args(PAIR_NUMBERS " --resume --max-steps 100000 --save-steps 3"));
        wait_for_steps(&p.s, "run", before + 5, &child);
        kill_writer(rank == 0 ? &p.s.daemon : &p.other);
        ends_and_goes_on(&p, &child, rank);
    }
}

// The moment rank 1's version is odd. Of the attempts one must be torn.
TEST(a_rank_that_is_killed_in_an_update_leaves_whole_weights)
{
    struct pair p = {0};
    struct bridge *bridge;
    bool torn = false;
    scene_open_large(&p.s, NULL);
    pair_open_other(&p, NULL);
    assert_ok(bridge_attach(p.other.bridge, NULL, &bridge));
    const struct control *control = bridge_control(bridge);
    for (int attempt = 0; attempt < 10 && !torn; attempt++) {
        struct test_child child = {0};
        const int before = steps_done(&p.s, "run");
        pair_start(&p, &child, "run",
                   args(PAIR_NUMBERS " --resume --max-steps 100000 --save-steps 2"));
        wait_for_steps(&p.s, "run", before + 2, &child);
        struct control_info info;
        control_info(control, &info);
        wait_for_update(&child, control);
        wait_for_begin(&child, control);
        assert_int_equal(kill(info.writer_pid, SIGKILL), 0);
        torn = control_version(control) & 1;
        ends_and_goes_on(&p, &child, 1);
    }
    assert_true(torn);
    bridge_detach(bridge);
}

// One whose server is paused has no samples, and the other does not wait for it without end.
TEST(a_rank_that_is_late_is_waited_for_as_long_as_said)
{
    struct pair p;
    pair_open(&p);
    daemon_post(p.other.socket, "/bridge/pause", 200, "");
    const int64_t since_ns = clock_now_ns();
    pair_run(&p, "run", args(PAIR_NUMBERS " --max-steps 1 --rank-timeout 2"));
    assert_true(clock_ms_since(since_ns) < LIMIT_MS / 2);
    assert_said(&p.s, "within 2 s");
    assert_int_equal(steps_done(&p.s, "run"), 0);
}

// What is compared every step, and at the start.
TEST(servers_of_other_weights_are_refused)
{
    struct pair p = {0};
    scene_open(&p.s);
    const char *model = p.s.model;
    p.s.model = daemon_model(test_folder(), true, 99); // of the same shapes
    pair_open_other(&p, NULL);
    p.s.model = model;
    pair_run(&p, "run", args(PAIR_NUMBERS " --max-steps 1"));
    assert_said(&p.s, "after step 0 the policy of rank 1's server is not that of rank 0's");
    assert_said(&p.s, "start all servers from one folder");
    assert_int_equal(steps_done(&p.s, "run"), 0);
}

TEST(options_of_one_rank_are_refused)
{
    struct scene s;
    static const struct {
        const char *option, *value, *says;
    } cases[] = {
        {"--server-url", "http://127.0.0.1:9", "--server-url needs --sync checkpoint"},
        {"--resume", NULL, "2 ranks need --bridge with {rank} in it"},
    };
    static const char *const by_mpirun[][2] = {{"OMPI_COMM_WORLD_RANK", "1"},
                                               {"OMPI_COMM_WORLD_SIZE", "2"},
                                               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                               {"PMIX_NAMESPACE", "1"}};
    const size_t n = sizeof by_mpirun / sizeof *by_mpirun;
    scene_open(&s);
    for (size_t i = 0; i < n; i++) setenv(by_mpirun[i][0], by_mpirun[i][1], 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(train(&s, "run", OPTIONS(cases[i].option, cases[i].value)), 2);
        assert_said(&s, cases[i].says);
    }
    for (size_t i = 0; i < n; i++) unsetenv(by_mpirun[i][0]);
}
