/* test_evaluation.c: evaluations within a run, what they decide, and cw-trainer eval of what sft
 * made. */
#include "common/base/json.h"
#include "tests/support/daemon.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The lines of metrics.jsonl that have an evaluation: their steps, up to `most`.
static int evaluated_steps(const struct scene *s, const char *run, int *ret, int most)
{
    char *text = test_read(test_path(test_path(s->folder, run), "metrics.jsonl")), *end;
    int n = 0;
    for (char *line = text; n < most && (end = strchr(line, '\n')); line = end + 1) {
        json_t *m;
        assert_ok(json_parse("metrics", line, (size_t)(end - line), &m));
        if (json_has(m, "eval/reward")) {
            assert_true(metric(m, "eval/reward_standard_error") >= 0);
            ret[n++] = (int)metric(m, "step");
        }
        json_decref(m);
    }
    free(text);
    return n;
}

// Every evaluation is as good as the baseline, which nothing can beat, while weight decay alone
// moves the weights: the run gives up, keeps step 0 as its best, and serves it.
static void stops_early(void **state)
{
    (void)state;
    struct scene s;
    int steps[8];
    char best[PATH_MAX], last[PATH_MAX];
    scene_open(&s);
    const char *const run[] = {"--max-steps",
                               "100",
                               "--reward",
                               "constant",
                               "--weight-decay",
                               "0.1",
                               "--learning-rate",
                               "1e-2",
                               "--eval-data",
                               s.data,
                               "--eval-limit",
                               "4",
                               "--eval-steps",
                               "2",
                               "--early-stop-patience",
                               "3",
                               "--save-total-limit",
                               "1",
                               NULL};
    assert_int_equal(train(&s, "run", run), 0);
    assert_int_equal(evaluated_steps(&s, "run", steps, 8), 4);
    assert_int_equal(steps[0], 0);
    assert_int_equal(steps[3], 6);
    assert_log(&s, "stopped early at step 6 of 100: 3 evaluations in a row");
    assert_log(&s, "the best was step 0 (reward 1.0000)");
    assert_non_null(realpath(test_path(s.folder, "run/checkpoints/best"), best));
    assert_non_null(realpath(latest(&s, "run"), last));
    assert_contains(best, "/step-0");
    assert_contains(last, "/step-6");
    daemon_holds(&s.daemon, "policy", last);

    // Taken up again it has still had enough; with more patience it goes on, and serves the best.
    assert_int_equal(
        train(&s, "run",
              OPTIONS("--max-steps", "100", "--reward", "constant", "--weight-decay", "0.1",
                      "--learning-rate", "1e-2", "--eval-data", s.data, "--eval-limit", "4",
                      "--eval-steps", "2", "--early-stop-patience", "3", "--resume")),
        0);
    assert_int_equal(steps_done(&s, "run"), 7); // with the baseline's line
    assert_int_equal(
        train(&s, "run",
              OPTIONS("--max-steps", "100", "--reward", "constant", "--weight-decay", "0.1",
                      "--learning-rate", "1e-2", "--eval-data", s.data, "--eval-limit", "4",
                      "--eval-steps", "2", "--early-stop-patience", "4", "--resume",
                      "--load-best-model-at-end")),
        0);
    assert_log(&s, "stopped early at step 8 of 100");
    assert_log(&s, "serving the weights of step 0, the best");
    daemon_holds(&s.daemon, "policy", s.model);
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

static void evaluates_by_epochs(void **state)
{
    (void)state;
    struct scene s;
    int steps[8];
    scene_open(&s);
    assert_int_equal(train(&s, "run",
                           OPTIONS("--num-train-epochs", "5", "--eval-data", s.data, "--eval-limit",
                                   "4", "--eval-strategy", "epoch", "--eval-epochs", "2")),
                     0);
    // 20 examples, 3 a step: epochs 2 and 4 end in steps 14 and 27, the run with step 34
    assert_int_equal(evaluated_steps(&s, "run", steps, 8), 4);
    assert_int_equal(steps[1], 14);
    assert_int_equal(steps[2], 27);
    assert_int_equal(steps[3], 34);
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

static void sft_then_eval(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    daemon_kill(&s.daemon);
    const char *out = test_path(s.folder, "taught"), *log = test_path(s.folder, "trainer.log");
    struct tiny_model shape = {.hidden = 64,
                               .layers = 2,
                               .vocab = 300,
                               .seed = 5,
                               .eos_id = TINY_TOKENIZER_IM_END,
                               .tie_embeddings = true};
    const char *base = test_path(s.folder, "base");
    assert_ok(tiny_model_write_as(base, &shape));
    assert_ok(tiny_tokenizer_write(base));
    assert_int_equal(
        test_command(log, LIMIT_MS,
                     OPTIONS(test_binary("cw-trainer"), "sft", "--model", base, "--data", s.data,
                             "--out", out, "--device", "cpu", "--learning-rate", "5e-3",
                             "--max-steps", "120", "--examples-per-step", "20",
                             "--lr-scheduler-type", "constant", "--token-budget", "60")),
        0);
    daemon_start(&s.daemon, out, NULL);
    const char *result = test_path(s.folder, "eval.log");
    assert_int_equal(test_command(result, LIMIT_MS,
                                  OPTIONS(test_binary("cw-trainer"), "eval", "--bridge",
                                          s.daemon.bridge, "--data", s.data, "--reward", "exact",
                                          "--max-completion-length", "8", "--json")),
                     0);
    char *text = test_read(result);
    json_t *json;
    assert_ok(json_parse("eval", text, strlen(text), &json));
    assert_int_equal(json_integer_value(json_object_get(json, "n")), 20);
    // 20 sums, seen 120 times each: learned by heart
    if (json_number_value(json_object_get(json, "accuracy")) < 0.8) fail_msg("%s", text);
    json_decref(json);
    free(text);
    scene_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stops_early),
        cmocka_unit_test(evaluates_by_epochs),
        cmocka_unit_test(sft_then_eval),
    };
    return cmocka_run_group_tests_name("evaluation", tests, NULL, NULL);
}
