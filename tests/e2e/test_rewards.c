/* test_rewards.c: cw-trainer's rewards and evaluations against a daemon: what eval --output writes,
 * commands that score many samples or cannot start, and what is said before the first step of what
 * is not trained. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

enum { PROMPTS = 20 }; // of a scene

static int eval(struct scene *s, const char *output, const char *reward)
{
    return trainer_alone(s, NULL,
                         args("eval --bridge %s --data %s --reward %s --reward-weights 1,2 "
                              "--max-completion-length 8 --output %s",
                              s->daemon.bridge, s->data, reward, output));
}

static double tokens_generated(const struct scene *s)
{
    return daemon_metric(&s->daemon, "vllm:generation_tokens_total");
}

// ---- eval --output ------------------------------------------------------------------------------

static void check_line(const json_t *line, int number, double *ret_reward)
{
    const json_t *terms = json_object_get(line, "terms");
    const char *finish = text_of(line, "finish_reason");
    assert_int_equal(int_of(line, "line"), number + 1);
    assert_string_equal(text_of(line, "prompt"), test_text("%d+%d=", number, number + 3));
    assert_string_equal(text_of(line, "answer"), test_text("%d", 2 * number + 3));
    assert_true(json_is_string(json_object_get(line, "completion")));
    assert_true(strcmp(finish, "stop") == 0 || strcmp(finish, "length") == 0);
    assert_true(json_is_object(json_object_get(line, "telemetry")));
    double length = real_of(terms, "length"), exact = real_of(terms, "exact"),
           reward = real_of(line, "reward");
    assert_int_equal(json_object_size(terms), 2);
    assert_true(length < 0 && exact == 0);
    assert_true(fabs(reward - length - 2 * exact) < 1e-8);
    *ret_reward = reward;
}

TEST_IN(eval_writes_samples, scene_open)
{
    double sum = 0, mean = 0, reward;
    const char *folder = test_path(s->folder, "new/folder");
    const char *output = test_path(folder, "samples.jsonl");
    assert_int_equal(eval(s, output, "length,exact"), 0);
    const json_t *samples = json_of_lines_file(output), *sample;
    size_t n;
    json_array_foreach (samples, n, sample) {
        check_line(sample, (int)n, &reward);
        sum += reward;
    }
    assert_int_equal(json_array_size(samples), PROMPTS);
    assert_int_equal(entries_of(folder, ""), 1); // no temporary file
    char *text = test_read(test_path(s->folder, "trainer.log"));
    assert_contains(text, "samples.jsonl: 20 samples");
    assert_int_equal(sscanf(strstr(text, "reward -"), "reward %lf", &mean), 1);
    assert_true(fabs(mean - sum / PROMPTS) < 1e-4);

    // One that cannot be written is refused before anything is generated; a failed one leaves the
    // last as it is.
    double before = tokens_generated(s);
    assert_int_equal(eval(s, folder, "length,exact"), 1);
    assert_said(s, "is no file");
    assert_int_equal(eval(s, "/proc/nowhere/x.jsonl", "length,exact"), 1);
    assert_said(s, "/proc/nowhere");
    assert_true(tokens_generated(s) == before);
    char *kept = test_read(output);
    assert_int_equal(eval(s, output, "length,command:sh -c 'exit 3'"), 1);
    assert_string_equal(test_read(output), kept);
}

// What no term applies to has no reward, which is not 0.
TEST_IN(what_is_not_scored_has_no_reward, scene_open)
{
    const char *half = "n=1; while read -r a; do n=$((1-n)); "
                       "[ $n = 0 ] && echo '{\"reward\": null}' || echo '{\"reward\": 3}'; done\n",
               *none = "while read -r a; do echo '{\"reward\": null}'; done\n";
    const char *words = "eval --bridge %s --data %s --reward %s --max-completion-length 8 "
                        "--reward-groups --num-generations 2 --temperature 1";
    assert_trainer(s, 0, words, s->daemon.bridge, s->data, scene_scorer(s, half));
    assert_said(s, "reward 3.0000 +- 0.0000, 20 prompts");
    assert_false(said(s, "no term of --reward applied"));
    assert_trainer(s, 0, words, s->daemon.bridge, s->data, scene_scorer(s, none));
    assert_said(s, "no term of --reward applied to 20 of 20 prompts");
    assert_said(s, "reward nan +- 0.0000");
}

// ---- commands -----------------------------------------------------------------------------------

TEST_IN(commands_in_a_run, scene_open)
{
    const char *scorer =
        scene_scorer(s, "while read -r line; do echo \"{\\\"reward\\\": $1}\"; done\n");
    const char *reward = test_text("length,%s 0.25,%s 4", scorer, scorer);
    assert_train(s, 0, "run", "--max-steps 1 --reward %s --reward-processes 3", reward);
    const json_t *m = json_of_file(test_path(s->folder, "run/metrics.jsonl")); // of one step
    assert_true(real_of(m, "rewards/command/mean") == 0.25);
    assert_true(real_of(m, "rewards/command_2/mean") == 4);

    // One that cannot start is found before the first rollouts.
    double before = tokens_generated(s);
    assert_train(s, 1, "none", "--reward 'command:/no/such/scorer --x'");
    assert_said(s, "/no/such/scorer --x\" ended with status 127 (it could not be started)");
    assert_true(tokens_generated(s) == before);
}

// The reward is tried on the first line's own answer; one that fails leaves the server as it was.
TEST_IN(rewards_are_tried_first, scene_open)
{
    const char *seen = test_path(s->folder, "seen");
    const char *text =
        test_text("read -r line; echo \"$line\" >%s; echo none; cat >/dev/null\n", seen);
    const char *reward = test_text("length,%s", scene_scorer(s, text));
    const json_int_t before = daemon_version(&s->daemon);
    const double generated = tokens_generated(s);
    assert_train(s, 1, "run", "--start-from %s --reward %s", s->model, reward);
    assert_said(
        s, "the reward was tried on the first line's own answer, before anything is sampled: ");
    assert_said(s, "data.jsonl, line 1, sample 0: reward command: command \"sh ");
    assert_int_equal(daemon_version(&s->daemon), before);
    assert_true(tokens_generated(s) == generated);
    char *asked = test_read(seen);
    assert_contains(asked, "\"completion\":\"3\",\"answer\":\"3\"");
    assert_contains(asked, "\"telemetry\":{");
}

// ---- what is not trained ------------------------------------------------------------------------

TEST_IN(filtering_is_said, scene_open)
{
    assert_train(s, 0, "plain", "--max-steps 1 --top-p 1");
    assert_false(said(s, "filtered"));
    assert_train(s, 0, "cut", "--max-steps 1 --top-p 0.9 --top-k 7 --min-p 0.01");
    assert_said(s, "--top-k 7, --top-p 0.9, --min-p 0.01: samples come from the filtered");
}
