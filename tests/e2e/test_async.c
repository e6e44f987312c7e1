/* test_async.c: cw-trainer train --async: of staleness 0 it is the plain run to the bit, of another
 * no token is older than it says, and a run that is killed in the middle learns from every prompt
 * of its epoch once. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#include <fnmatch.h>

#define STEPS   12
#define PROMPTS 480
#define PER     2 // prompts of a step

SCENE_OF_ALL(scene_open_exact)

static const char *run_file(const char *run, const char *name)
{
    return test_path(test_path(scene.folder, run), name);
}

// What follows the clock, what the server had cached or was asked for before, and what only --async
// says.
static bool may_differ(const char *key)
{
    static const char *const patterns[] = {
        "*_s",         "*_ms",          "tokens_per_s",    "rollout/*",
        "inference/*", "spec_decode/*", "latency_model/*", "weight_version"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (fnmatch(patterns[i], key, 0) == 0) return true;
    return false;
}

// Whether a line has every value of the other, but for those.
static void assert_holds(json_t *a, const json_t *b)
{
    json_t *value;
    const char *key;
    int compared = 0;
    json_object_foreach (a, key, value) {
        if (may_differ(key)) continue;
        if (!json_equal(value, json_object_get(b, key)))
            fail_msg("%s of step %g differs", key, metric(a, "step"));
        compared++;
    }
    assert_true(compared > 20);
}

static void assert_same_metrics(const char *run, const char *other)
{
    const json_t *a = metrics_of(&scene, run), *b = metrics_of(&scene, other);
    assert_int_equal(json_array_size(a), STEPS);
    assert_int_equal(json_array_size(b), STEPS);
    for (size_t i = 0; i < STEPS; i++) assert_holds(json_array_get(a, i), json_array_get(b, i));
}

TEST(of_staleness_0_it_is_the_plain_run)
{
    const char *steps = test_text("%d", STEPS);
    assert_int_equal(train(&scene, "plain", OPTIONS("--max-steps", steps)), 0);
    assert_train(&scene, 0, "async-0", "--max-steps %s --async --max-staleness 0", steps);
    assert_said(&scene, "no step is sampled ahead");
    assert_same_metrics("plain", "async-0");
    assert_same_metrics("async-0", "plain");
    const char *a = latest(&scene, "plain"), *b = latest(&scene, "async-0");
    test_same_file(a, b, "model.safetensors");
    test_same_file(a, b, "trainer/optimizer.safetensors");
    json_t *plain = last_metrics(&scene, "plain"), *async = last_metrics(&scene, "async-0");
    assert_null(json_object_get(plain, "rollout/staleness_max"));
    assert_true(metric(async, "rollout/staleness_max") == 0);
    assert_true(metric(async, "rollout/staleness_groups/0") == 3);
}

TEST(no_token_is_older_than_it_says)
{
    double mean[STEPS], max[STEPS], groups[3][STEPS], again[STEPS], waited[2][STEPS], oldest = 0;
    const char *steps = test_text("%d", STEPS);
    assert_train(&scene, 0, "async-2", "--max-steps %s --async --max-staleness 2", steps);
    assert_said(&scene, "up to 2 steps are sampled ahead");
    assert_said(&scene, "async: samples of ");
    assert_int_equal(column(&scene, "async-2", "rollout/staleness_mean", mean, STEPS), STEPS);
    column(&scene, "async-2", "rollout/staleness_max", max, STEPS);
    column(&scene, "async-2", "rollout/staleness_groups/0", groups[0], STEPS);
    column(&scene, "async-2", "rollout/staleness_groups/1", groups[1], STEPS);
    column(&scene, "async-2", "rollout/staleness_groups/2", groups[2], STEPS);
    column(&scene, "async-2", "rollout/generated_again", again, STEPS);
    column(&scene, "async-2", "rollout/trainer_wait_s", waited[0], STEPS);
    column(&scene, "async-2", "rollout/sampler_wait_s", waited[1], STEPS);
    for (int i = 0; i < STEPS; i++) {
        assert_true(max[i] <= 2 && max[i] <= i && mean[i] <= max[i] && mean[i] >= 0);
        assert_true(groups[0][i] + groups[1][i] + groups[2][i] == 3);
        assert_true(groups[(int)max[i]][i] > 0);
        assert_true(again[i] == 0 && waited[0][i] >= 0 && waited[1][i] >= 0);
        if (max[i] > oldest) oldest = max[i];
    }
    assert_true(oldest > 0); // it did run ahead
    assert_null(json_object_get(last_metrics(&scene, "async-2"), "rollout/staleness_groups/3"));
}

// How often each prompt was learned from, by the samples that the run logged: first samples count.
static void count_trained(const char *run, int ret_times[PROMPTS])
{
    const json_t *sample;
    size_t i;
    memset(ret_times, 0, PROMPTS * sizeof *ret_times);
    for (int step = 1; step <= PROMPTS / PER; step++) {
        const char *name = test_text("rollouts/step-%d.jsonl", step);
        const json_t *samples = json_of_lines_file(run_file(run, name));
        json_array_foreach (samples, i, sample) {
            const json_int_t of = int_of(sample, "line");
            assert_in_range(of, 1, PROMPTS);
            ret_times[of - 1] += metric(sample, "sample") == 0;
        }
    }
}

TEST(every_prompt_of_the_epoch_once_though_killed)
{
    int times[PROMPTS];
    struct test_child child = {0};
    const char *data = scene_prompts(&scene, "prompts.jsonl", PROMPTS);
    for (int run = 0; run < 3; run++) {
        start_trainer(&scene, &child, "killed",
                      OPTIONS("--data", data, "--num-train-epochs", "1", "--prompts-per-step", "2",
                              "--async", "--max-staleness", "2", "--save-steps", "7",
                              "--log-completions", run > 0 ? "--resume" : NULL));
        if (run < 2) {
            wait_for_steps(&scene, "killed", 30 * (run + 1), &child);
            kill(child.pid, SIGKILL);
        }
        assert_int_equal(test_wait(&child, LIMIT_MS) == 0, run == 2);
        assert_int_equal(steps_done(&scene, "killed") == PROMPTS / PER, run == 2);
    }
    count_trained("killed", times);
    for (int i = 0; i < PROMPTS; i++)
        if (times[i] != 1) fail_msg("prompt %d was learned from %d times", i, times[i]);
}

TEST(nonsense_is_refused)
{
    train_rows(&scene, "recipes", "async_that_is_refused", train);
}
