/* test_rewards.c: cw-trainer's rewards and evaluations against a daemon: what eval --output writes,
 * commands that score many samples or cannot start, and what is said before the first step of what
 * is not trained. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

enum { PROMPTS = 20 }; // of a scene

static int eval(struct scene *s, const char *output, const char *reward)
{
    return trainer_alone(s, NULL,
                         OPTIONS("eval", "--bridge", s->daemon.bridge, "--data", s->data,
                                 "--reward", reward, "--reward-weights", "1,2",
                                 "--max-completion-length", "8", "--output", output));
}

static double tokens_generated(const struct scene *s)
{
    struct wire_answer a;
    daemon_request(s->daemon.socket, "GET", "/metrics", "", NULL, &a);
    const char *at = strstr(bytes_text(&a.body), "\nvllm:generation_tokens_total");
    assert_non_null(at);
    double n = strtod(strpbrk(at + 1, " \n"), NULL);
    return n;
}

// ---- eval --output ------------------------------------------------------------------------------

static void check_line(const json_t *line, int number, double *ret_reward)
{
    char prompt[32], answer[16];
    const json_t *terms = json_object_get(line, "terms");
    const char *finish = json_string_value(json_object_get(line, "finish_reason"));
    snprintf(prompt, sizeof prompt, "%d+%d=", number, number + 3);
    snprintf(answer, sizeof answer, "%d", 2 * number + 3);
    assert_int_equal(json_integer_value(json_object_get(line, "line")), number + 1);
    assert_string_equal(json_string_value(json_object_get(line, "prompt")), prompt);
    assert_string_equal(json_string_value(json_object_get(line, "answer")), answer);
    assert_true(json_is_string(json_object_get(line, "completion")));
    assert_true(strcmp(finish, "stop") == 0 || strcmp(finish, "length") == 0);
    assert_true(json_is_object(json_object_get(line, "telemetry")));
    double length = json_number_value(json_object_get(terms, "length"));
    double exact = json_number_value(json_object_get(terms, "exact"));
    double reward = json_number_value(json_object_get(line, "reward"));
    assert_int_equal(json_object_size(terms), 2);
    assert_true(length < 0 && exact == 0);
    assert_true(fabs(reward - length - 2 * exact) < 1e-8);
    *ret_reward = reward;
}

TEST_IN(eval_writes_samples, scene_open)
{
    double sum = 0, mean = 0, reward;
    const char *folder = test_path(s.folder, "new/folder");
    const char *output = test_path(folder, "samples.jsonl");
    assert_int_equal(eval(&s, output, "length,exact"), 0);
    const json_t *samples = json_of_lines_file(output), *sample;
    size_t n;
    json_array_foreach (samples, n, sample) {
        check_line(sample, (int)n, &reward);
        sum += reward;
    }
    assert_int_equal(json_array_size(samples), PROMPTS);
    assert_int_equal(entries_of(folder, ""), 1); // no temporary file
    char *text = test_read(test_path(s.folder, "alone.log"));
    assert_contains(text, "samples.jsonl: 20 samples");
    assert_int_equal(sscanf(strstr(text, "reward -"), "reward %lf", &mean), 1);
    assert_true(fabs(mean - sum / PROMPTS) < 1e-4);

    // One that cannot be written is refused before anything is generated; a failed one leaves the
    // last as it is.
    double before = tokens_generated(&s);
    assert_int_equal(eval(&s, folder, "length,exact"), 1);
    assert_said(&s, "is no file");
    assert_int_equal(eval(&s, "/proc/nowhere/x.jsonl", "length,exact"), 1);
    assert_said(&s, "/proc/nowhere");
    assert_true(tokens_generated(&s) == before);
    char *kept = test_read(output);
    assert_int_equal(eval(&s, output, "length,command:sh -c 'exit 3'"), 1);
    text = test_read(output);
    assert_string_equal(text, kept);
}

// ---- commands -----------------------------------------------------------------------------------

TEST_IN(commands_in_a_run, scene_open)
{
    const char *script = test_path(s.folder, "score.sh");
    static const char text[] = "while read -r line; do echo \"{\\\"reward\\\": $1}\"; done\n";
    char reward[PATH_MAX * 3];
    test_write(script, text, strlen(text));
    snprintf(reward, sizeof reward, "length,command:sh %s 0.25,command:sh %s 4", script, script);
    assert_int_equal(
        train_alone(&s, "run",
                    OPTIONS("--max-steps", "1", "--reward", reward, "--reward-processes", "3")),
        0);
    const json_t *m = json_of_file(test_path(s.folder, "run/metrics.jsonl")); // of one step
    assert_true(json_number_value(json_object_get(m, "rewards/command/mean")) == 0.25);
    assert_true(json_number_value(json_object_get(m, "rewards/command_2/mean")) == 4);

    // One that cannot start is found before the first rollouts.
    double before = tokens_generated(&s);
    assert_int_equal(train_alone(&s, "none", OPTIONS("--reward", "command:/no/such/scorer --x")),
                     1);
    assert_said(&s, "/no/such/scorer --x\" ended with status 127 (it could not be started)");
    assert_true(tokens_generated(&s) == before);
}

// The reward is tried on the first line's own answer; one that fails leaves the server as it was.
TEST_IN(rewards_are_tried_first, scene_open)
{
    const char *script = test_path(s.folder, "score.sh"), *seen = test_path(s.folder, "seen");
    struct bytes text = BYTES_INIT;
    char reward[PATH_MAX * 2];
    bytes_printf(&text, "read -r line; echo \"$line\" >%s; echo none; cat >/dev/null\n", seen);
    test_write(script, text.data, text.len);
    bytes_release(&text);
    snprintf(reward, sizeof reward, "length,command:sh %s", script);
    const json_t *before = daemon_get(s.daemon.socket, "/bridge/info", 200);
    const double generated = tokens_generated(&s);
    assert_int_equal(train_alone(&s, "run", OPTIONS("--start-from", s.model, "--reward", reward)),
                     1);
    assert_said(
        &s, "the reward was tried on the first line's own answer, before anything is sampled: ");
    assert_said(&s, "data.jsonl, line 1, sample 0: reward command: command \"sh ");
    const json_t *after = daemon_get(s.daemon.socket, "/bridge/info", 200);
    assert_true(json_equal(json_object_get(before, "weight_version"),
                           json_object_get(after, "weight_version")));
    assert_non_null(json_object_get(before, "weight_version"));
    assert_true(tokens_generated(&s) == generated);
    char *asked = test_read(seen);
    assert_contains(asked, "\"completion\":\"3\",\"answer\":\"3\"");
    assert_contains(asked, "\"telemetry\":{");
}

// ---- what is not trained ------------------------------------------------------------------------

TEST_IN(filtering_is_said, scene_open)
{
    assert_int_equal(train_alone(&s, "plain", OPTIONS("--max-steps", "1", "--top-p", "1")), 0);
    char *log = test_read(test_path(s.folder, "alone.log"));
    assert_null(strstr(log, "filtered"));
    assert_exit(0, train_alone(&s, "cut",
                               OPTIONS("--max-steps", "1", "--top-p", "0.9", "--top-k", "7",
                                       "--min-p", "0.01")));
    assert_said(&s, "--top-k 7, --top-p 0.9, --min-p 0.01: samples come from the filtered");
}
