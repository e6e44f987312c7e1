/* test_offline_ranks.c: cw-trainer sft and dpo on two ranks, on the CPU under mpirun: they learn as
 * one rank does, to the same bits each time, go on from each other's checkpoints, and end together
 * when one is killed or told to stop. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mpirun.h"
#include "tests/support/offline.h"

#define STEPS     8
#define END_IN_MS 10000 // for the others, once a rank is gone

static void start(const struct scene *s, int ranks, const char *command, const char *run,
                  const char *const more[], struct test_child *child)
{
    scene_spawn(
        s, child,
        JOIN(ranks > 1 ? mpirun_words(ranks) : NULL,
             args("%s %s --model %s --data %s --run-dir %s --examples-per-step 5 --learning-rate "
                  "1e-3 --lr-scheduler-type constant --eval-data %s --eval-steps 4 --resume",
                  test_binary("cw-trainer"), command, s->model, s->data, test_path(s->folder, run),
                  s->data),
             more));
}

static void learn(const struct scene *s, int ranks, const char *command, const char *run,
                  const char *const more[])
{
    struct test_child child = {0};
    start(s, ranks, command, run, more, &child);
    scene_ended(s, test_wait(&child, LIMIT_MS), 0);
}

// With the lines of evaluations, which every 4th step and step 0 have.
static void same_columns(const struct scene *s, const char *a, const char *b, double max)
{
    static const char *const keys[] = {"loss",      "entropy",    "grad_norm",
                                       "eval/loss", "num_tokens", "mean_token_accuracy"};
    double x[STEPS + 2], y[STEPS + 2];
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        assert_int_equal(column(s, a, keys[k], x, STEPS + 2), STEPS + 1);
        assert_int_equal(column(s, b, keys[k], y, STEPS + 2), STEPS + 1);
        for (int i = 0; i <= STEPS; i++)
            if (fabs(x[i] - y[i]) > max * fmax(1, fabs(x[i])))
                fail_msg("%s of step %d: %.9g and %.9g", keys[k], i, x[i], y[i]);
    }
}

static void learns_as_one(const char *command, const char *const more[], const char *weights)
{
    struct scene s;
    const char *const *options = JOIN(args("--max-steps 8"), more), *const *half =
                                                                        JOIN(args("--max-steps 4"),
                                                                             more);
    if (!on_cpu()) test_skip("it starts ranks of the CPU, with mpirun");
    offline_scene_open(&s);
    offline_sums(&s, strcmp(command, "dpo") == 0, 18);
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("TMPDIR", s.folder, 1); // where ranks meet, and where those met that were killed
    const char *met = test_path(s.folder, "commonweight-ranks-own-1790000000-3999999");
    test_write(met, "{}", 2);
    learn(&s, 1, command, "one", options);
    learn(&s, 2, command, "two", options);
    assert_false(file_exists(met));
    same_columns(&s, "one", "two", 1e-5);
    assert_true(metric(last_metrics(&s, "two"), "ranks/size") == 2);

    learn(&s, 2, command, "again", options);
    same_columns(&s, "two", "again", 0);
    const char *two = latest(&s, "two"), *again = latest(&s, "again");
    test_same_file(two, again, weights);
    test_same_file(two, again, "trainer/optimizer.safetensors");

    learn(&s, 2, command, "on", half); // and what one was taken up by another
    learn(&s, 1, command, "on", options);
    same_columns(&s, "one", "on", 1e-5);
    learn(&s, 1, command, "back", half);
    learn(&s, 2, command, "back", options);
    same_columns(&s, "one", "back", 1e-5);
}

TEST(examples)
{
    learns_as_one("sft", args("--freeze *norm*"), "model.safetensors");
}

TEST(pairs)
{
    learns_as_one("dpo", args("--beta 0.2"), "model.safetensors");
}

TEST(an_adapter)
{
    learns_as_one("sft", args("--lora-r 4"), "adapter_model.safetensors");
}

static void kill_rank(const struct test_child *child, int rank, int signal)
{
    const pid_t pid = rank_process(child, "cw-trainer", 2, rank);
    assert_true(pid > 0 && kill(pid, signal) == 0);
}

TEST_IN(a_rank_that_is_killed_ends_all, offline_scene_open)
{
    offline_sums(s, true, 18);
    for (int rank = 0; rank < 2; rank++) {
        const char *command = "dpo";
        struct test_child child = {0};
        const int before = steps_done(s, "run");
        start(s, 2, command, "run", args("--max-steps 1000000 --save-steps 3"), &child);
        wait_for_steps(s, "run", before + 6, &child);
        const int64_t killed_ns = clock_now_ns();
        kill_rank(&child, rank, SIGKILL);
        test_wait(&child, END_IN_MS);
        assert_true(clock_ms_since(killed_ns) < END_IN_MS);
        assert_said(s, test_text("rank %d (", rank));
        assert_said(s, "is gone: it was killed or ended without a word");
        learn(s, 2, command, "run", args("--max-steps %d", steps_done(s, "run") + 2));
        assert_said(s, "resumed at step ");
    }
}

TEST_IN(a_rank_that_is_told_to_stop_stops_all, offline_scene_open)
{
    struct test_child child = {0};
    offline_sums(s, false, 18);
    start(s, 2, "sft", "run", args("--max-steps 1000000 --save-steps 0"), &child);
    wait_for_steps(s, "run", 6, &child);
    kill_rank(&child, 1, SIGTERM);
    test_wait(&child, LIMIT_MS); // mpirun's status is its own
    assert_said(s, "stopped at step ");
    json_t *m = last_metrics(s, "run");
    const char *step = test_text("checkpoints/step-%d", (int)metric(m, "step"));
    assert_true(file_exists(test_path(test_path(s->folder, "run"), step)));
}

TEST_IN(options_of_one_rank_are_refused, offline_scene_open)
{
    offline_sums(s, false, 18);
    assert_offline(s, 2, "sft", "run", "--gpus 0,1");
    assert_said(s, "--device with --gpus: each rank is trained on its own GPU");
}
