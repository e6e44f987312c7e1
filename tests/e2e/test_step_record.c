/* test_step_record.c: what a step leaves for its reader: where its time went (its spans), and of
 * each sampled token its log-probabilities and its place in the text (--log-logprobs). */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/pair.h"
#include "trainer/learn/stats.h"

#define STEPS 3

SCENE_OF_ALL(scene_open_exact)

// Values of a span in the lines of a run, that of step 0 included.
static int span(const char *run, enum phase which, double ret[STEPS + 1])
{
    return column(&scene, run, test_text("spans/%s_s", phase_names[which]), ret, STEPS + 1);
}

TEST(spans_are_the_time_of_a_step)
{
    double of[N_PHASES][STEPS + 1], step_s[STEPS + 1], all = 0;
    const int64_t start = clock_now_ns();
    assert_train(&scene, 0, "spans", "--max-steps 3 --eval-data %s --eval-steps 2 --save-steps 2",
                 scene.data);
    const double wall_s = clock_ms_since(start) / 1e3;
    for (int i = 0; i < N_PHASES; i++)
        assert_int_equal(span("spans", (enum phase)i, of[i]), STEPS + 1);
    assert_int_equal(column(&scene, "spans", "step_s", step_s, STEPS + 1), STEPS + 1);
    for (int step = 0; step <= STEPS; step++) {
        double sum = 0;
        for (int i = 0; i < N_PHASES; i++) {
            assert_true(of[i][step] >= 0);
            sum += of[i][step];
        }
        assert_true(sum > step_s[step]); // which is a part of the time since the line before
        all += sum;
    }
    assert_true(all < wall_s);
    for (int step = 1; step <= STEPS; step++) {
        static const enum phase always[] = {PHASE_ROLLOUT, PHASE_SCORE,    PHASE_PACK,
                                            PHASE_FORWARD, PHASE_BACKWARD, PHASE_OPTIMIZER,
                                            PHASE_LOG};
        for (size_t k = 0; k < sizeof always / sizeof *always; k++)
            if (!(of[always[k]][step] > 0)) fail_msg("step %d: no time of %d", step, always[k]);
    }
    assert_true(of[PHASE_EVAL][0] > 0 && of[PHASE_EVAL][2] > 0 && of[PHASE_EVAL][1] == 0);
    // a checkpoint is written behind its step's line: steps 0 and 2
    assert_true(of[PHASE_CHECKPOINT][1] > 0 && of[PHASE_CHECKPOINT][3] > 0);
    assert_true(of[PHASE_CHECKPOINT][2] == 0);
}

// Ahead of learning others sample and score: that is no time of this thread.
TEST(a_run_ahead_waits)
{
    double waited[STEPS + 1], sampled[STEPS + 1], scored[STEPS + 1];
    assert_train(&scene, 0, "ahead", "--max-steps 3 --async");
    const int n = span("ahead", PHASE_WAIT, waited);
    assert_int_equal(n, STEPS);
    span("ahead", PHASE_ROLLOUT, sampled);
    span("ahead", PHASE_SCORE, scored);
    for (int i = 0; i < n; i++) assert_true(waited[i] > 0 && sampled[i] == 0 && scored[i] == 0);
}

// ---- tokens -------------------------------------------------------------------------------------

static json_t *samples_of(const char *run)
{
    return json_of_lines_file(test_path(test_path(scene.folder, run), "rollouts/step-1.jsonl"));
}

static double entry(const json_t *line, const char *key, size_t t)
{
    return json_number_value(json_array_get(json_object_get(line, key), t));
}

TEST(tokens_have_their_numbers)
{
    assert_train(&scene, 0, "tokens", "--max-steps 1 --log-completions --log-logprobs");
    const json_t *line = json_array_get(samples_of("tokens"), 0);
    const size_t n = (size_t)int_of(line, "tokens");
    assert_true(n > 0);
    assert_int_equal(json_array_size(json_object_get(line, "logprobs")), n);
    assert_int_equal(json_array_size(json_object_get(line, "trainer_logprobs")), n);
    assert_int_equal(json_array_size(json_object_get(line, "text_offset")), n);
    for (size_t t = 0; t < n; t++) {
        assert_true(entry(line, "logprobs", t) < 0);
        // nothing lies between the two where both compute exactly
        assert_true(entry(line, "logprobs", t) == entry(line, "trainer_logprobs", t));
        assert_true(t == 0 || entry(line, "text_offset", t) >= entry(line, "text_offset", t - 1));
    }
}

// Two ranks compute a group each, and rank 0 writes down both's.
TEST(ranks_bring_their_tokens_together)
{
    struct pair p = {.s = scene};
    if (!on_cpu()) test_skip("it starts ranks of the CPU, with mpirun");
    pair_open_other(&p, args("--dtype %s", daemon_exact_dtype()));
    const char *const *more =
        args("--max-steps 1 --prompts-per-step 3 --log-completions --log-logprobs");
    assert_exit(0, pair_run(&p, "ranks", more));
    const json_t *lines = samples_of("ranks"), *line;
    size_t i;
    json_array_foreach (lines, i, line) {
        const size_t tokens = json_array_size(json_object_get(line, "logprobs"));
        assert_true(tokens > 0);
        assert_int_equal(json_array_size(json_object_get(line, "trainer_logprobs")), tokens);
        for (size_t t = 0; t < tokens; t++)
            assert_true(entry(line, "logprobs", t) == entry(line, "trainer_logprobs", t));
    }
    assert_true(json_array_size(lines) >= 6);
}

TEST(tokens_are_plain_unless_asked_for)
{
    assert_train(&scene, 0, "plain", "--max-steps 1 --log-completions");
    const json_t *line = json_array_get(samples_of("plain"), 0);
    assert_null(json_object_get(line, "logprobs"));
    assert_null(json_object_get(line, "trainer_logprobs"));
    assert_train(&scene, 0, "idle", "--max-steps 1 --log-logprobs");
    assert_said(&scene, "--log-logprobs has no effect without --log-completions");
    daemon_post(scene.daemon.socket, "/v1/rollouts", 400,
                "{\"groups\":[{\"prompt\":\"1\"}],\"sampling\":{\"text_offset\":1}}");
    daemon_post(scene.daemon.socket, "/inference/v1/generate", 400,
                "{\"token_ids\":[1],\"sampling_params\":{\"max_tokens\":1,\"text_offset\":true}}");
}
