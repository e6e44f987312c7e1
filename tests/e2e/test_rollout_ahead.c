/* test_rollout_ahead.c: cw-trainer train whose rollouts are sampled ahead of the step that learns:
 * what is sampled is what the plain loop samples, the samples' age is bounded and said, and a run
 * ends, goes on and fails as it does without. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#define STEPS 9

SCENE_OF_ALL(scene_open_exact)

static void assert_same_column(const char *a, const char *b, const char *key)
{
    double x[STEPS], y[STEPS];
    assert_int_equal(column(&scene, a, key, x, STEPS), STEPS);
    assert_int_equal(column(&scene, b, key, y, STEPS), STEPS);
    for (int i = 0; i < STEPS; i++)
        if (x[i] != y[i]) fail_msg("%s of step %d: %.17g, %.17g", key, i + 1, x[i], y[i]);
}

// With a learning rate of 0 all weights are the same, so that whatever is sampled ahead must be
// sample for sample what the plain loop has: the same prompts, in order, with the same seeds. Of 20
// examples the steps cross an epoch's end, where a curriculum must wait for its rewards.
TEST(samples_are_those_of_the_plain_loop)
{
    static const char *const keys[] = {
        "reward", "completions/mean_length", "entropy", "grad_norm", "loss", "epoch"};
    static const char *const curricula[] = {"off", "kde"};
    for (int i = 0; i < 2; i++) {
        const char *plain = i ? "plain-kde" : "plain", *ahead = i ? "ahead-kde" : "ahead";
        assert_train(&scene, 0, plain, "--learning-rate 0 --max-steps %d --curriculum %s", STEPS,
                     curricula[i]);
        assert_train(&scene, 0, ahead,
                     "--learning-rate 0 --max-steps %d --curriculum %s --rollout-ahead 3", STEPS,
                     curricula[i]);
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
            assert_same_column(plain, ahead, keys[k]);
    }
}

// And with an evaluation between any two steps, which has the server and the scorers to itself.
TEST(evaluations_take_turns)
{
    double accuracy[STEPS];
    assert_train(&scene, 0, "evaluated",
                 "--max-steps 4 --rollout-ahead 2 --reward exact --eval-data %s --eval-steps 1",
                 scene.data);
    assert_int_equal(column(&scene, "evaluated", "eval/reward", accuracy, STEPS), 5);
}

TEST(the_age_of_samples_is_bounded_and_said)
{
    double max[STEPS], mean[STEPS], oldest = 0;
    assert_train(&scene, 0, "learning", "--max-steps %d --rollout-ahead 2 --num-iterations 2",
                 STEPS);
    assert_said(&scene, "up to 4 updates before");
    assert_int_equal(column(&scene, "learning", "rollout/staleness_max", max, STEPS), STEPS);
    assert_int_equal(column(&scene, "learning", "rollout/staleness_mean", mean, STEPS), STEPS);
    for (int i = 0; i < STEPS; i++) {
        assert_true(max[i] >= mean[i] && mean[i] >= 0);
        assert_true(max[i] <= 4 && max[i] <= 2 * i); // none before the first update
        if (max[i] > oldest) oldest = max[i];
    }
    assert_true(oldest > 0); // it did run ahead
    assert_null(json_object_get(last_metrics(&scene, "plain"), "rollout/staleness_max"));
}

TEST(it_is_not_exact)
{
    assert_train(&scene, 2, "exact", "--rollout-ahead 1 --exact");
    assert_said(&scene, "--exact with samples of older weights");
}

// A signal ends it after the step, with what was ordered ahead dropped; --resume goes on.
TEST(it_ends_and_goes_on)
{
    struct test_child child = {0};
    start_trainer(&scene, &child, "stopped", args("--max-steps 100000 --rollout-ahead 2"));
    wait_for_steps(&scene, "stopped", 3, &child);
    kill(child.pid, SIGTERM);
    assert_int_equal(test_wait(&child, LIMIT_MS), 0);
    const int done = steps_done(&scene, "stopped");
    assert_train(&scene, 0, "stopped", "--resume --max-steps %d", done + 2);
    assert_int_equal(steps_done(&scene, "stopped"), done + 2);
}

TEST(a_killed_server_ends_it)
{
    struct test_child child = {0};
    start_trainer(&scene, &child, "orphaned", args("--max-steps 100000 --rollout-ahead 2"));
    wait_for_steps(&scene, "orphaned", 2, &child);
    kill(scene.daemon.child.pid, SIGKILL);
    assert_int_equal(test_wait(&child, LIMIT_MS), 1);
    assert_said(&scene, "what was learned is saved: ");
    assert_said(&scene, "error: ");
    assert_true(steps_done(&scene, "orphaned") >= 2);
}
