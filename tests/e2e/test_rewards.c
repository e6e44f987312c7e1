/* test_rewards.c: cw-trainer's rewards and evaluations against a daemon: what eval --output writes,
 * commands that score many samples or cannot start, and what is said before the first step of what
 * is not trained. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/tiny_tokenizer.h"

#include <dirent.h>

#define LIMIT_MS 120000

enum { PROMPTS = 10 };

struct scene { // one daemon and a data set
    const char *folder, *model, *data, *log;
    struct daemon daemon;
};

static void scene_open(struct scene *s)
{
    struct bytes lines = BYTES_INIT;
    memset(s, 0, sizeof *s);
    s->folder = test_folder();
    s->model = daemon_model(s->folder, true, 11);
    s->data = test_path(s->folder, "data.jsonl");
    s->log = test_path(s->folder, "trainer.log");
    for (int a = 0; a < PROMPTS; a++)
        bytes_printf(&lines, "{\"prompt\": \"%d+%d=\", \"answer\": \"%d\"}\n", a, a + 3, 2 * a + 3);
    test_write(s->data, lines.data, lines.len);
    bytes_release(&lines);
    daemon_start(&s->daemon, s->model, NULL);
}

static int train(const struct scene *s, const char *run, const char *const more[])
{
    const char *argv[TRAINER_WORDS];
    daemon_trainer(&s->daemon, s->data, test_path(s->folder, run),
                   OPTIONS("--reward", "length", "--prompts-per-step", "3", "--num-generations",
                           "4", "--max-completion-length", "8", "--max-steps", "1"),
                   more, argv);
    return test_command(s->log, LIMIT_MS, argv);
}

static int eval(const struct scene *s, const char *output, const char *reward, const char *log)
{
    return test_command(log, LIMIT_MS,
                        OPTIONS(test_binary("cw-trainer"), "eval", "--bridge", s->daemon.bridge,
                                "--data", s->data, "--reward", reward, "--reward-weights", "1,2",
                                "--max-completion-length", "8", "--output", output));
}

static void assert_log(const struct scene *s, const char *part)
{
    char *log = test_read(s->log);
    assert_contains(log, part);
}

static int files_in(const char *folder)
{
    int n = 0;
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (const struct dirent *e; (e = readdir(dir));) n += e->d_name[0] != '.';
    closedir(dir);
    return n;
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

TEST(eval_writes_samples)
{
    struct scene s;
    double sum = 0, mean = 0, reward;
    int n = 0;
    scene_open(&s);
    const char *folder = test_path(s.folder, "new/folder");
    const char *output = test_path(folder, "samples.jsonl");
    assert_int_equal(eval(&s, output, "length,exact", s.log), 0);
    char *text = test_read(output), *end;
    for (char *line = text; (end = strchr(line, '\n')); line = end + 1, n++) {
        json_t *sample;
        assert_ok(json_parse("line", line, (size_t)(end - line), &sample));
        check_line(sample, n, &reward);
        sum += reward;
        json_decref(sample);
    }
    assert_int_equal(n, PROMPTS);
    assert_int_equal(files_in(folder), 1); // no temporary file
    text = test_read(s.log);
    assert_contains(text, "samples.jsonl: 10 samples");
    assert_int_equal(sscanf(strstr(text, "reward -"), "reward %lf", &mean), 1);
    assert_true(fabs(mean - sum / PROMPTS) < 1e-4);

    // One that cannot be written is refused before anything is generated; a failed one leaves the
    // last as it is.
    double before = tokens_generated(&s);
    assert_int_equal(eval(&s, folder, "length,exact", s.log), 1);
    assert_log(&s, "is no file");
    assert_int_equal(eval(&s, "/proc/nowhere/x.jsonl", "length,exact", s.log), 1);
    assert_log(&s, "/proc/nowhere");
    assert_true(tokens_generated(&s) == before);
    char *kept = test_read(output);
    assert_int_equal(eval(&s, output, "length,command:sh -c 'exit 3'", s.log), 1);
    text = test_read(output);
    assert_string_equal(text, kept);
}

// ---- commands -----------------------------------------------------------------------------------

TEST(commands_in_a_run)
{
    struct scene s;
    scene_open(&s);
    const char *script = test_path(s.folder, "score.sh");
    static const char text[] = "while read -r line; do echo \"{\\\"reward\\\": $1}\"; done\n";
    char reward[PATH_MAX * 3];
    test_write(script, text, strlen(text));
    snprintf(reward, sizeof reward, "length,command:sh %s 0.25,command:sh %s 4", script, script);
    assert_int_equal(train(&s, "run", OPTIONS("--reward", reward, "--reward-processes", "3")), 0);
    char *metrics = test_read(test_path(test_path(s.folder, "run"), "metrics.jsonl"));
    json_t *m;
    assert_ok(json_parse("metrics", metrics, strcspn(metrics, "\n"), &m));
    assert_true(json_number_value(json_object_get(m, "rewards/command/mean")) == 0.25);
    assert_true(json_number_value(json_object_get(m, "rewards/command_2/mean")) == 4);
    json_decref(m);

    // One that cannot start is found before the first rollouts.
    double before = tokens_generated(&s);
    assert_int_equal(train(&s, "none", OPTIONS("--reward", "command:/no/such/scorer --x")), 1);
    assert_log(&s, "/no/such/scorer --x\" ended with status 127 (it could not be started)");
    assert_true(tokens_generated(&s) == before);
}

// The reward is tried on the first line's own answer; one that fails leaves the server as it was.
TEST(rewards_are_tried_first)
{
    struct scene s;
    scene_open(&s);
    const char *script = test_path(s.folder, "score.sh"), *seen = test_path(s.folder, "seen");
    struct bytes text = BYTES_INIT;
    char reward[PATH_MAX * 2];
    struct wire_answer before, after;
    bytes_printf(&text, "read -r line; echo \"$line\" >%s; echo none; cat >/dev/null\n", seen);
    test_write(script, text.data, text.len);
    bytes_release(&text);
    snprintf(reward, sizeof reward, "length,command:sh %s", script);
    daemon_request(s.daemon.socket, "GET", "/bridge/info", "", NULL, &before);
    const double generated = tokens_generated(&s);
    assert_int_equal(train(&s, "run", OPTIONS("--start-from", s.model, "--reward", reward)), 1);
    assert_log(&s,
               "the reward was tried on the first line's own answer, before anything is sampled: ");
    assert_log(&s, "data.jsonl, line 1, sample 0: reward command: command \"sh ");
    daemon_request(s.daemon.socket, "GET", "/bridge/info", "", NULL, &after);
    json_t *a, *b; // the weights' version and where they are from
    assert_ok(json_parse("info", before.body.data, before.body.len, &a));
    assert_ok(json_parse("info", after.body.data, after.body.len, &b));
    assert_true(
        json_equal(json_object_get(a, "weight_version"), json_object_get(b, "weight_version")));
    assert_non_null(json_object_get(a, "weight_version"));
    assert_true(tokens_generated(&s) == generated);
    json_decref(a);
    json_decref(b);
    char *asked = test_read(seen);
    assert_contains(asked, "\"completion\":\"3\",\"answer\":\"3\"");
    assert_contains(asked, "\"telemetry\":{");
}

// ---- what is not trained ------------------------------------------------------------------------

TEST(filtering_is_said)
{
    struct scene s;
    scene_open(&s);
    assert_int_equal(train(&s, "plain", OPTIONS("--top-p", "1")), 0);
    char *log = test_read(s.log);
    assert_null(strstr(log, "filtered"));
    assert_exit(0, train(&s, "cut", OPTIONS("--top-p", "0.9", "--top-k", "7", "--min-p", "0.01")));
    assert_log(&s, "--top-k 7, --top-p 0.9, --min-p 0.01: samples come from the filtered");
}
