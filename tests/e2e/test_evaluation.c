/* test_evaluation.c: evaluations within a run, what they decide, and cw-trainer eval of what sft
 * made. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"

// The lines of metrics.jsonl that have an evaluation: their steps, up to `most`.
static int evaluated_steps(const struct scene *s, const char *run, int *ret, int max)
{
    const json_t *lines = metrics_of(s, run), *m;
    size_t i;
    int n = 0;
    json_array_foreach (lines, i, m) {
        if (n == max || !json_has(m, "eval/reward")) continue;
        assert_true(metric(m, "eval/reward_standard_error") >= 0);
        ret[n++] = (int)metric(m, "step");
    }
    return n;
}

// Every evaluation is as good as the baseline, which nothing can beat, while weight decay alone
// moves the weights: the run gives up, keeps step 0 as its best, and serves it.
TEST_IN(stops_early, scene_open)
{
    int steps[8];
    char best[PATH_MAX], last[PATH_MAX];
#define STOPS                                                                                      \
    "--max-steps 100 --reward constant --weight-decay 0.1 --learning-rate 1e-2 --eval-data %s "    \
    "--eval-limit 4 --eval-steps 2 "
    assert_train(s, 0, "run", STOPS "--early-stop-patience 3 --save-total-limit 1", s->data);
    assert_int_equal(evaluated_steps(s, "run", steps, 8), 4);
    assert_int_equal(steps[0], 0);
    assert_int_equal(steps[3], 6);
    assert_said(s, "stopped early at step 6 of 100: 3 evaluations in a row");
    assert_said(s, "the best was step 0 (reward 1.0000)");
    assert_non_null(realpath(test_path(s->folder, "run/checkpoints/best"), best));
    assert_non_null(realpath(latest(s, "run"), last));
    assert_contains(best, "/step-0");
    assert_contains(last, "/step-6");
    daemon_holds(&s->daemon, "policy", last);

    // Taken up again it has still had enough; with more patience it goes on, and serves the best.
    assert_train(s, 0, "run", STOPS "--early-stop-patience 3 --resume", s->data);
    assert_int_equal(steps_done(s, "run"), 7); // with the baseline's line
    assert_train(s, 0, "run", STOPS "--early-stop-patience 4 --resume --load-best-model-at-end",
                 s->data);
    assert_said(s, "stopped early at step 8 of 100");
    assert_said(s, "serving the weights of step 0, the best");
    daemon_holds(&s->daemon, "policy", s->model);
}

TEST_IN(evaluates_by_epochs, scene_open)
{
    int steps[8];
    assert_train(
        s, 0, "run",
        "--num-train-epochs 5 --eval-data %s --eval-limit 4 --eval-strategy epoch --eval-epochs 2",
        s->data);
    // 20 examples, 3 a step: epochs 2 and 4 end in steps 14 and 27, the run with step 34
    assert_int_equal(evaluated_steps(s, "run", steps, 8), 4);
    assert_int_equal(steps[1], 14);
    assert_int_equal(steps[2], 27);
    assert_int_equal(steps[3], 34);
}

TEST_IN(sft_then_eval, scene_open)
{
    daemon_kill(&s->daemon);
    const char *out = test_path(s->folder, "taught");
    struct tiny_model shape = {.hidden = 64,
                               .layers = 2,
                               .vocab = 300,
                               .seed = 5,
                               .eos_id = TINY_TOKENIZER_IM_END,
                               .tie_embeddings = true};
    const char *base = test_path(s->folder, "base");
    assert_ok(tiny_model_write_as(base, &shape));
    assert_ok(tiny_tokenizer_write(base));
    assert_trainer(
        s, 0,
        "sft --model %s --data %s --out %s --device cpu --learning-rate 5e-3 --max-steps "
        "120 --examples-per-step 20 --lr-scheduler-type constant --token-budget 60",
        base, s->data, out);
    daemon_start(&s->daemon, out, NULL);
    const json_t *json =
        json_of(test_output(0, args("%s eval --bridge %s --data %s --reward exact "
                                    "--max-completion-length 8 --prompt-template none --json",
                                    test_binary("cw-trainer"), s->daemon.bridge, s->data)));
    assert_int_equal(int_of(json, "n"), 20);
    // 20 sums, seen 120 times each: learned by heart
    assert_true(metric(json, "accuracy") >= 0.8);
}

// ---- what is best -------------------------------------------------------------------------------

#define COUNTS                                                                                     \
    "--reward %s --eval-data %s --eval-limit 2 --eval-steps 1 --save-steps 1 --max-steps "

static void assert_best(const struct scene *s, const char *run, int step)
{
    char path[PATH_MAX];
    assert_non_null(realpath(test_text("%s/%s/checkpoints/best", s->folder, run), path));
    assert_string_equal(strrchr(path, '/'), test_text("/step-%d", step));
}

// Takes a name out of the object `within` ("": all) of a JSON file.
static void forget(const char *path, const char *within, const char *name)
{
    json_t *all = json_of_file(path);
    json_t *object = *within ? json_object_get(all, within) : all;
    assert_int_equal(json_object_del(object, name), 0);
    assert_ok(json_write_file(path, 0644, all));
}

// By a reward that rises with each sample no answer is ever right: what is optimised is the reward,
// whose best evaluation is the last; by accuracy, it is the first.
TEST_IN(the_best_is_of_the_reward, scene_open)
{
    const char *reward =
        test_text("exact,%s", scene_scorer(s, "n=0\nwhile read -r line; do n=$((n+1)); "
                                              "echo '{\"reward\":'$n'}'\ndone\n"));
    assert_train(s, 0, "run", COUNTS "2 --seed 42", reward, s->data);
    assert_best(s, "run", 2);
    assert_said(s, "the best was step 2 (reward ");
    assert_said(s, "held-out accuracy 0.0% +- 0.0% on 2 prompts, reward ");
    assert_train(s, 0, "by", COUNTS "2 --metric-for-best-model accuracy", reward, s->data);
    assert_best(s, "by", 0);
    assert_said(s, "the best was step 0 (accuracy 0.0000)");
    // a run of before there was a choice goes on by accuracy
    forget(test_path(latest(s, "by"), "trainer/trainer_state.json"), "best_of", "metric");
    forget(test_path(s->folder, "by/config.json"), "", "metric_for_best_model");
    assert_train(s, 0, "by", COUNTS "3 --resume", reward, s->data);
    assert_best(s, "by", 0);
    assert_said(s, "the best was step 0 (accuracy 0.0000)");
    assert_false(said(s, "another reward"));
    assert_train(s, 2, "no", COUNTS "2 --metric-for-best-model maj@4", reward, s->data);
    assert_said(s, "--metric-for-best-model maj@4: evaluations with --reward exact,command:sh ");
    assert_said(s, " give reward accuracy (--num-generations-eval N: pass@K and maj@N too)");
    // and the samples of each are kept, though nobody asks for those of steps
    char *lines = test_read(test_path(s->folder, "run/rollouts/eval-step-1.jsonl"));
    assert_contains(lines, "{\"line\":1,\"sample\":0,\"prompt\":\"0+3=\",\"answer\":\"3\",");
    assert_contains(lines, "{\"line\":2,\"sample\":0,");
}

// ---- what is said before ------------------------------------------------------------------------

TEST_IN(what_cannot_go_well_is_said, scene_open)
{
    train_rows(s, "evaluation", "what_cannot_go_well_is_said", train);
    train_rows(s, "evaluation", "texts_beside_a_chat_template", trainer_alone);
}
