/* test_rollout_budget.c: cw-trainer train --rollout-budget: over an epoch what is learned from is,
 * sample for sample, what the run in turns learns from, in another order, so that no length is
 * favoured; no token is older than --max-staleness; and a run that is killed again and again, amid
 * groups that go on into the next steps, learns from each group once. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#include <math.h>

#define PROMPTS 160
#define PER     4 // prompts of a step
#define EACH    4 // samples of a prompt
#define STEPS   (PROMPTS / PER)
#define SAMPLES (PROMPTS * EACH)

static struct scene scene;

// Samples of a model with several end tokens, of all lengths from 0 on.
static void open_scene(void)
{
    const char *model = daemon_model(test_folder(), true, 11);
    const char *ends = "{\"eos_token_id\": [40, 80, 120, 160, 200, 240]}";
    test_write(test_path(model, "generation_config.json"), ends, strlen(ends));
    scene_open_model(&scene, model, OPTIONS("--dtype", daemon_exact_dtype()));
}

TESTS_BETWEEN(open_scene, NULL)

static const char *run_file(const char *run, const char *name)
{
    return test_path(test_path(scene.folder, run), name);
}

static const char *const *epoch(const char *const more[])
{
    const char *data = scene_prompts(&scene, "epoch.jsonl", PROMPTS);
    const char *const *words =
        args("--data %s --num-train-epochs 1 --prompts-per-step %d --num-generations %d "
             "--max-completion-length 160 --log-completions",
             data, PER, EACH);
    static const char *all[64];
    int n = 0;
    for (; *words; words++) all[n++] = *words;
    for (; *more; more++) all[n++] = *more;
    all[n] = NULL;
    return all;
}

static void run_to_end(const char *run, const char *const more[])
{
    scene_ended(&scene, train(&scene, run, epoch(more)), 0);
}

#define BUDGET_OF(share, staleness)                                                                \
    "--async", "--max-staleness", staleness, "--rollout-budget", share

// Every sample of the run, by line and number; each must be there once.
static void read_samples(const char *run, const char *ret_texts[SAMPLES],
                         double ret_tokens[SAMPLES])
{
    size_t i;
    const json_t *sample;
    for (int k = 0; k < SAMPLES; k++) ret_texts[k] = NULL;
    for (int step = 1; step <= STEPS; step++) {
        const json_t *samples =
            json_of_lines_file(run_file(run, test_text("rollouts/step-%d.jsonl", step)));
        assert_int_equal(json_array_size(samples), PER * EACH);
        json_array_foreach (samples, i, sample) {
            const json_int_t k = (int_of(sample, "line") - 1) * EACH + int_of(sample, "sample");
            assert_in_range(k, 0, SAMPLES - 1);
            if (ret_texts[k]) fail_msg("sample %d was learned from twice", (int)k);
            ret_texts[k] = json_string_value(json_object_get(sample, "completion"));
            ret_tokens[k] = metric(sample, "tokens");
        }
    }
    for (int k = 0; k < SAMPLES; k++)
        if (!ret_texts[k]) fail_msg("sample %d was not learned from", k);
}

static double sum_of(const char *run, const char *key)
{
    double values[STEPS], sum = 0;
    assert_int_equal(column(&scene, run, key, values, STEPS), STEPS);
    for (int i = 0; i < STEPS; i++) sum += values[i];
    return sum;
}

static void assert_no_token_is_older(const char *run, int max)
{
    each_within(&scene, run, "rollout/staleness_max", STEPS, 0, max);
    each_within(&scene, run, "rollout/generated_again", STEPS, 0, 0);
}

// With a learning rate of 0 all weights are the same, so that a sample does not depend on when it
// is taken.
TEST(an_epoch_is_that_of_the_run_in_turns)
{
    static const char *texts[2][SAMPLES];
    static double tokens[2][SAMPLES];
    run_to_end("turns", OPTIONS("--learning-rate", "0"));
    run_to_end("gathered", OPTIONS("--learning-rate", "0", BUDGET_OF("0.5", "4")));
    assert_said(&scene, "go on into the next 2 at most");
    read_samples("turns", texts[0], tokens[0]);
    read_samples("gathered", texts[1], tokens[1]);
    for (int k = 0; k < SAMPLES; k++) assert_string_equal(texts[0][k], texts[1][k]);
    assert_memory_equal(tokens[0], tokens[1], sizeof tokens[0]);
    assert_true(sum_of("gathered", "rollout/carried_groups") > 0);
    assert_no_token_is_older("gathered", 4);
}

// Mean and standard error over the steps that have samples of a class of length.
static void print_staleness(const char *run)
{
    for (int k = 1; k <= 4; k++) {
        const json_t *lines = metrics_of(&scene, run);
        const char *key = test_text("rollout/staleness_by_length/%d", k);
        double n = 0, sum = 0, squares = 0;
        for (size_t i = 0; i < json_array_size(lines); i++) {
            const json_t *value = json_object_get(json_array_get(lines, i), key);
            if (!json_is_number(value)) continue;
            n++;
            sum += json_number_value(value);
            squares += json_number_value(value) * json_number_value(value);
        }
        if (n < 2) continue;
        printf("%s: staleness of class %d %.3f +- %.3f of %g steps\n", run, k, sum / n,
               sqrt(fmax(squares / n - sum * sum / n / n, 0) / n), n);
    }
}

// While it learns: the mean length of an epoch is that of the run in turns within two standard
// errors of their difference.
TEST(no_length_is_favoured)
{
    static const char *texts[SAMPLES];
    static double tokens[2][SAMPLES];
    double mean[2] = {0}, error[2] = {0};
    run_to_end("learning", OPTIONS(NULL));
    run_to_end("budget", OPTIONS(BUDGET_OF("0.5", "2")));
    read_samples("learning", texts, tokens[0]);
    read_samples("budget", texts, tokens[1]);
    for (int r = 0; r < 2; r++) {
        for (int k = 0; k < SAMPLES; k++) mean[r] += tokens[r][k] / SAMPLES;
        for (int k = 0; k < SAMPLES; k++)
            error[r] += (tokens[r][k] - mean[r]) * (tokens[r][k] - mean[r]) / SAMPLES / SAMPLES;
    }
    printf("mean length %.4f in turns, %.4f with a budget, standard error %.4f\n", mean[0], mean[1],
           sqrt(error[0] + error[1]));
    printf("groups carried: %g of %d\n", sum_of("budget", "rollout/carried_groups"), PROMPTS);
    print_staleness("budget");
    assert_true(error[0] > 0);
    assert_true(fabs(mean[0] - mean[1]) <= 2 * sqrt(error[0] + error[1]));
    assert_no_token_is_older("budget", 2);
}

TEST(each_group_once_though_killed)
{
    static const char *texts[SAMPLES];
    static double tokens[SAMPLES];
    struct test_child child = {0};
    for (int run = 0; run < 4; run++) {
        start_trainer(&scene, &child, "killed",
                      epoch(OPTIONS("--save-steps", "3", BUDGET_OF("0.25", "4"),
                                    run > 0 ? "--resume" : NULL)));
        if (run < 3) {
            wait_for_steps(&scene, "killed", 9 * (run + 1), &child);
            kill(child.pid, SIGKILL);
        }
        assert_int_equal(test_wait(&child, LIMIT_MS) == 0, run == 3);
    }
    read_samples("killed", texts, tokens);
    printf("groups carried: %g of %d\n", sum_of("killed", "rollout/carried_groups"), PROMPTS);
    assert_true(sum_of("killed", "rollout/carried_groups") > 0);
    assert_no_token_is_older("killed", 4);
}

// What was carried over would be lost by other options.
TEST(it_goes_on_with_its_budget_alone)
{
    struct test_child child = {0};
    start_trainer(&scene, &child, "amid",
                  epoch(OPTIONS("--save-steps", "1", BUDGET_OF("0.25", "4"))));
    wait_for_steps(&scene, "amid", 5, &child);
    kill(child.pid, SIGTERM);
    assert_int_equal(test_wait(&child, LIMIT_MS), 0);
    assert_int_equal(train(&scene, "amid", epoch(OPTIONS("--resume", "--rollout-budget", "1"))), 1);
    assert_said(&scene, "take both, with --async");
    assert_int_equal(train(&scene, "amid", epoch(OPTIONS("--resume", "--prompts-per-step", "2"))),
                     1);
    run_to_end("amid", OPTIONS("--resume", "--async", "--max-staleness", "2"));
    assert_int_equal(steps_done(&scene, "amid"), STEPS);
}
