/* test_rollout_ahead.c: cw-trainer train whose rollouts are sampled ahead of the step that learns:
 * what is sampled is what the plain loop samples, the samples' age is bounded and said, and a run
 * ends, goes on and fails as it does without. */
#include "tests/support/training.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

#define STEPS 9

static struct scene scene;

static const char *steps(void)
{
    static char text[12];
    snprintf(text, sizeof text, "%d", STEPS);
    return text;
}

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
static void samples_are_those_of_the_plain_loop(void **state)
{
    (void)state;
    static const char *const keys[] = {
        "reward", "completions/mean_length", "entropy", "grad_norm", "loss", "epoch"};
    static const char *const curricula[] = {"off", "kde"};
    for (int i = 0; i < 2; i++) {
        const char *plain = i ? "plain-kde" : "plain", *ahead = i ? "ahead-kde" : "ahead";
        assert_int_equal(train(&scene, plain,
                               OPTIONS("--learning-rate", "0", "--max-steps", steps(),
                                       "--curriculum", curricula[i])),
                         0);
        assert_int_equal(train(&scene, ahead,
                               OPTIONS("--learning-rate", "0", "--max-steps", steps(),
                                       "--curriculum", curricula[i], "--rollout-ahead", "3")),
                         0);
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
            assert_same_column(plain, ahead, keys[k]);
    }
}

// And with an evaluation between any two steps, which has the server and the scorers to itself.
static void evaluations_take_turns(void **state)
{
    (void)state;
    double accuracy[STEPS];
    assert_int_equal(train_alone(&scene, "evaluated",
                                 OPTIONS("--max-steps", "4", "--rollout-ahead", "2", "--reward",
                                         "exact", "--eval-data", scene.data, "--eval-steps", "1")),
                     0);
    assert_int_equal(column(&scene, "evaluated", "eval/reward", accuracy, STEPS), 5);
}

static void the_age_of_samples_is_bounded_and_said(void **state)
{
    (void)state;
    double max[STEPS], mean[STEPS], oldest = 0;
    assert_int_equal(train_alone(&scene, "learning",
                                 OPTIONS("--max-steps", steps(), "--rollout-ahead", "2",
                                         "--num-iterations", "2")),
                     0);
    assert_said(&scene, "up to 4 updates before");
    assert_int_equal(column(&scene, "learning", "rollout/staleness_max", max, STEPS), STEPS);
    assert_int_equal(column(&scene, "learning", "rollout/staleness_mean", mean, STEPS), STEPS);
    for (int i = 0; i < STEPS; i++) {
        assert_true(max[i] >= mean[i] && mean[i] >= 0);
        assert_true(max[i] <= 4 && max[i] <= 2 * i); // none before the first update
        if (max[i] > oldest) oldest = max[i];
    }
    assert_true(oldest > 0); // it did run ahead
    json_t *plain = last_metrics(&scene, "plain");
    assert_null(json_object_get(plain, "rollout/staleness_max"));
    json_decref(plain);
}

static void it_is_not_exact(void **state)
{
    (void)state;
    assert_int_equal(train_alone(&scene, "exact", OPTIONS("--rollout-ahead", "1", "--exact")), 2);
    assert_said(&scene, "--exact with samples of older weights");
}

// A signal ends it after the step, with what was ordered ahead dropped; --resume goes on.
static void it_ends_and_goes_on(void **state)
{
    (void)state;
    struct test_child child = {0};
    start_trainer(&scene, &child, "stopped",
                  OPTIONS("--max-steps", "100000", "--rollout-ahead", "2"));
    wait_for_steps(&scene, "stopped", 3, &child);
    kill(child.pid, SIGTERM);
    assert_int_equal(test_wait(&child, LIMIT_MS), 0);
    const int done = steps_done(&scene, "stopped");
    char more[12];
    snprintf(more, sizeof more, "%d", done + 2);
    assert_int_equal(train(&scene, "stopped", OPTIONS("--resume", "--max-steps", more)), 0);
    assert_int_equal(steps_done(&scene, "stopped"), done + 2);
}

static void a_killed_server_ends_it(void **state)
{
    (void)state;
    struct test_child child = {0};
    start_trainer(&scene, &child, "orphaned",
                  OPTIONS("--max-steps", "100000", "--rollout-ahead", "2"));
    wait_for_steps(&scene, "orphaned", 2, &child);
    kill(scene.daemon.child.pid, SIGKILL);
    assert_int_equal(test_wait(&child, LIMIT_MS), 1);
    assert_log(&scene, "what was learned is saved: ");
    assert_log(&scene, "error: ");
    assert_true(steps_done(&scene, "orphaned") >= 2);
}

static int open_scene(void **state)
{
    (void)state;
    scene_open_exact(&scene);
    return 0;
}

static int end_scene(void **state)
{
    (void)state;
    scene_close(&scene);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(samples_are_those_of_the_plain_loop),
        cmocka_unit_test(evaluations_take_turns),
        cmocka_unit_test(the_age_of_samples_is_bounded_and_said),
        cmocka_unit_test(it_is_not_exact),
        cmocka_unit_test(it_ends_and_goes_on),
        cmocka_unit_test(a_killed_server_ends_it),
    };
    return cmocka_run_group_tests_name("rollout_ahead", tests, open_scene, end_scene);
}
