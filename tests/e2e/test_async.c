/* test_async.c: cw-trainer train --async: of staleness 0 it is the plain run to the bit, of another
 * no token is older than it says, and a run that is killed in the middle learns from every prompt
 * of its epoch once. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#include <fnmatch.h>

#define STEPS   12
#define PROMPTS 480
#define PER     2 // prompts of a step

static struct scene scene;

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

// Whether the line has every value of the other, but for those; how many it compared.
static int assert_holds(const char *line, size_t len, const char *other, size_t other_len)
{
    json_t *a, *b, *value;
    const char *key;
    int compared = 0;
    assert_ok(json_parse("one run's metrics", line, len, &a));
    assert_ok(json_parse("the other's", other, other_len, &b));
    json_object_foreach (a, key, value) {
        if (may_differ(key)) continue;
        if (!json_equal(value, json_object_get(b, key))) fail_msg("%s differs:\n%s", key, line);
        compared++;
    }
    json_decref(a);
    json_decref(b);
    return compared;
}

static void assert_same_metrics(const char *run, const char *other)
{
    char *a = test_read(run_file(run, "metrics.jsonl")), *end;
    char *b = test_read(run_file(other, "metrics.jsonl")), *other_end;
    int lines = 0;
    for (char *x = a, *y = b; (end = strchr(x, '\n')); x = end + 1, y = other_end + 1, lines++) {
        assert_non_null(other_end = strchr(y, '\n'));
        assert_true(assert_holds(x, (size_t)(end - x), y, (size_t)(other_end - y)) > 20);
    }
    assert_int_equal(lines, STEPS);
}

static void assert_same_file(const char *run, const char *other, const char *name)
{
    struct bytes a = BYTES_INIT, b = BYTES_INIT;
    assert_ok(file_read(run_file(run, name), 1 << 30, &a));
    assert_ok(file_read(run_file(other, name), 1 << 30, &b));
    assert_int_equal(a.len, b.len);
    assert_memory_equal(a.data, b.data, a.len);
    bytes_release(&a);
    bytes_release(&b);
}

TEST(of_staleness_0_it_is_the_plain_run)
{
    char steps[12];
    snprintf(steps, sizeof steps, "%d", STEPS);
    assert_int_equal(train(&scene, "plain", OPTIONS("--max-steps", steps)), 0);
    assert_exit(0, train_alone(&scene, "async-0",
                               OPTIONS("--max-steps", steps, "--async", "--max-staleness", "0")));
    assert_said(&scene, "no step is sampled ahead");
    assert_same_metrics("plain", "async-0");
    assert_same_metrics("async-0", "plain");
    assert_same_file("plain", "async-0", "checkpoints/latest/model.safetensors");
    assert_same_file("plain", "async-0", "checkpoints/latest/trainer/optimizer.safetensors");
    json_t *plain = last_metrics(&scene, "plain"), *async = last_metrics(&scene, "async-0");
    assert_null(json_object_get(plain, "rollout/staleness_max"));
    assert_true(metric(async, "rollout/staleness_max") == 0);
    assert_true(metric(async, "rollout/staleness_groups/0") == 3);
}

TEST(no_token_is_older_than_it_says)
{
    double mean[STEPS], max[STEPS], groups[3][STEPS], again[STEPS], waited[2][STEPS], oldest = 0;
    char steps[12];
    snprintf(steps, sizeof steps, "%d", STEPS);
    assert_exit(0, train_alone(&scene, "async-2",
                               OPTIONS("--max-steps", steps, "--async", "--max-staleness", "2")));
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
    json_t *m = last_metrics(&scene, "async-2");
    assert_null(json_object_get(m, "rollout/staleness_groups/3"));
}

// Data lines 1 to PROMPTS.
static const char *prompts(void)
{
    const char *path = test_path(scene.folder, "prompts.jsonl");
    struct bytes lines = BYTES_INIT;
    for (int a = 0; a < PROMPTS; a++)
        bytes_printf(&lines, "{\"prompt\": \"%d+1=\", \"answer\": \"%d\"}\n", a, a + 1);
    test_write(path, lines.data, lines.len);
    bytes_release(&lines);
    return path;
}

// How often each prompt was learned from, by the samples that the run logged: first samples count.
static void count_trained(const char *run, int ret_times[PROMPTS])
{
    memset(ret_times, 0, PROMPTS * sizeof *ret_times);
    for (int step = 1; step <= PROMPTS / PER; step++) {
        char name[40];
        snprintf(name, sizeof name, "rollouts/step-%d.jsonl", step);
        char *text = test_read(run_file(run, name)), *end;
        for (char *line = text; (end = strchr(line, '\n')); line = end + 1) {
            json_t *sample;
            assert_ok(json_parse(name, line, (size_t)(end - line), &sample));
            const json_int_t of = json_integer_value(json_object_get(sample, "line"));
            assert_in_range(of, 1, PROMPTS);
            ret_times[of - 1] += metric(sample, "sample") == 0;
            json_decref(sample);
        }
    }
}

TEST(every_prompt_of_the_epoch_once_though_killed)
{
    int times[PROMPTS];
    struct test_child child = {0};
    const char *data = prompts();
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
    train_rows(&scene, "recipes", "async_that_is_refused", train_alone);
}

static void open_scene(void)
{
    scene_open_exact(&scene);
}

TESTS_BETWEEN(open_scene, NULL)
