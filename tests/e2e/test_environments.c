/* test_environments.c: cw-trainer train --rollouts: trajectories of several turns that child
 * processes make. This program is also the environment: `test_environments play MODE FOLDER`. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/environment.h"
#include "tests/support/training.h"

#include <errno.h>

#define STEPS   3
#define SAMPLES 12 // of a step: training.c's numbers

SCENE_OF_ALL(scene_open_exact)

// ---- the environment ----------------------------------------------------------------------------

static struct {
    const char *mode, *folder;
    const json_t *id;
    json_t *ids, *mask; // of the trajectory so far
    int low, sampled;   // tokens below 150, and all
} game;

static bool is(const char *mode)
{
    return strcmp(game.mode, mode) == 0;
}

static json_t *ask(const char *kind, json_t *value, const char *reply)
{
    environment_say(game.id, kind, value);
    json_t *line = environment_hear(), *got = json_object_get(line, reply);
    if (!got) exit(9);
    return got;
}

static void push(const json_t *id, int mask)
{
    json_array_append(game.ids, (json_t *)id);
    json_array_append_new(game.mask, json_integer(mask));
}

static void sample(void)
{
    json_t *turn =
        ask("sample", json_pack("{s:O, s:i}", "token_ids", game.ids, "max_tokens", 4), "sampled");
    const json_t *ids = json_object_get(turn, "token_ids"), *id;
    size_t t;
    json_array_foreach (ids, t, id) {
        push(id, 1);
        game.low += json_integer_value(id) < 150;
        game.sampled++;
    }
}

// True the first time that any process asks.
static bool first_time(const char *name)
{
    FILE *f = fopen(test_path(game.folder, name), "wx");
    if (f) fclose(f);
    return f != NULL;
}

static void wait_for(const char *name)
{
    while (!file_exists(test_path(game.folder, name))) clock_sleep_ms(5);
}

// False: the episode is over.
static bool go_wrong(const json_t *e)
{
    const int place = (int)(4 * int_of(e, "group") + int_of(e, "sample"));
    if (place != 5) return true;
    if (is("always")) _exit(3);
    if (is("dies") && first_time("once")) raise(SIGKILL);
    if (is("nonsense") && first_time("once")) printf("this is no JSON\n");
    if (is("silent") && first_time("once")) wait_for("never");
    if (!is("gives-up") || !first_time("once")) return true;
    environment_say(game.id, "error", json_string("the tool is down"));
    return false;
}

// A tool whose calls are counted: one line in FOLDER/effects each.
static void use_tool(const json_t *e)
{
    json_t *call = json_pack("{s:O}", "after", game.ids);
    json_t *called = ask("call", call, "called"), *seven = json_integer(7);
    if (!json_object_get(called, "result")) {
        FILE *f = fopen(test_path(game.folder, "effects"), "a");
        fprintf(f, "%d %d %d\n", (int)int_of(e, "step"), (int)int_of(e, "group"),
                (int)int_of(e, "sample"));
        fclose(f);
        ask("result", json_integer(7), "kept");
    }
    if (is("waits") && int_of(e, "step") == 2 && int_of(e, "group") == 1) {
        const char *pid = test_text("%d", (int)getpid());
        if (!file_exists(test_path(game.folder, "go"))) {
            test_write(test_path(game.folder, "reached.new"), pid, strlen(pid));
            rename(test_path(game.folder, "reached.new"), test_path(game.folder, "reached"));
        }
        wait_for("go");
    }
    push(seven, 0);
}

// As a template does that renders earlier turns otherwise: what was sampled last is another token.
static void rewrite(void)
{
    const size_t n = json_array_size(game.ids);
    const json_int_t was = json_integer_value(json_array_get(game.ids, n - 2));
    json_array_set_new(game.ids, n - 2, json_integer(was == 9 ? 8 : 9));
    for (size_t t = 0; t < n; t++) json_array_set_new(game.mask, t, json_integer(0));
}

static void play_episode(const json_t *e)
{
    const size_t n = json_array_size(json_object_get(e, "prompt_token_ids"));
    game.ids = json_copy(json_object_get(e, "prompt_token_ids"));
    game.mask = json_array();
    game.low = game.sampled = 0;
    for (size_t t = 0; t < n; t++) json_array_append_new(game.mask, json_integer(0));
    sample();
    use_tool(e);
    if (!go_wrong(e)) return;
    if (is("rewrites")) rewrite();
    sample();
    if (is("malformed")) json_array_set_new(game.mask, n, json_integer(0));
    if (is("malformed")) json_array_set_new(game.mask, n + 4, json_integer(1));
    const double reward = game.sampled ? (double)game.low / game.sampled : 0;
    environment_say(game.id, "trajectory",
                    is("by-turns")  ? json_pack("{s:[i, i], s:f}", "turns", 1, 1, "reward", reward)
                    : is("rewards") ? json_pack("{s:o, s:o, s:[f, f]}", "token_ids", game.ids,
                                                "mask", game.mask, "rewards", 0.0, reward)
                                    : json_pack("{s:o, s:o, s:f}", "token_ids", game.ids, "mask",
                                                game.mask, "reward", reward));
}

static int play(const char *mode, const char *folder)
{
    game.mode = mode;
    game.folder = folder;
    for (json_t *line; (line = environment_hear()); json_decref(line)) {
        game.id = json_object_get(line, "id");
        play_episode(json_object_get(line, "episode"));
    }
    return 0;
}

// ---- runs ---------------------------------------------------------------------------------------

// As this program plays it, in a new folder.
static const char *environment(const char *mode, const char **ret_folder)
{
    const char *folder = test_folder();
    if (ret_folder) *ret_folder = folder;
    return environment_of(test_text("%s '%s'", mode, folder));
}

#define NUMBERS "--reward environment --max-steps 3 --save-steps 1 --rollouts %s "

static int train_mode(const char *mode, const char *run, const char *const more[])
{
    return train(&scene, run, JOIN(args(NUMBERS, environment(mode, NULL)), more));
}

static void assert_same_run(const char *a, const char *b)
{
    test_same_file(latest(&scene, a), latest(&scene, b), "model.safetensors");
}

TEST(it_trains_on_trajectories)
{
    double seconds[STEPS];
    assert_int_equal(train_mode("fine", "fine", args("--log-completions")), 0);
    each_within(&scene, "fine", "grad_norm", STEPS, DBL_MIN, INFINITY);
    if (on_cpu()) each_within(&scene, "fine", "sampler_mismatch/max", STEPS, 0, 0);
    json_t *m = last_metrics(&scene, "fine");
    assert_true(metric(m, "environment/turns") == 2 && metric(m, "environment/calls") == 1);
    assert_true(metric(m, "environment/unlike_prompts") == 0);
    // the tool's token is none that the policy sampled
    assert_true(metric(m, "completions/max_length") == 8);
    // which the progress line has too
    assert_said(&scene, test_text("  length %.1f\n", metric(m, "completions/mean_length")));
    // the one process has its next episode at once: not after a wait of 0.1 s each
    assert_int_equal(column(&scene, "fine", "rollout_s", seconds, STEPS), STEPS);
    assert_true(fmin(seconds[0], fmin(seconds[1], seconds[2])) < 0.08 * SAMPLES);
    // the tool's token, and no other, is masked out
    assert_contains(test_read(test_path(scene.folder, "fine/rollouts/step-3.jsonl")),
                    "\"model_mask\":[1,1,1,1,0,1,1,1,1]");
    assert_false(file_exists(test_path(scene.folder, "fine/journal/step-3.jsonl")));
}

// Turns of which each goes on behind the one before are the trajectory that a mask has.
TEST(turns_that_go_on_are_one_sequence)
{
    assert_int_equal(train_mode("by-turns", "by-turns", NULL), 0);
    assert_same_run("fine", "by-turns");
}

// Which process makes an episode, and what becomes of processes, changes nothing of what is learnt.
TEST(faults_change_nothing)
{
    const struct {
        const char *mode, *sentence;
    } faults[] = {
        {"dies", "closed its output or was killed"},
        {"nonsense", "it wrote this is no JSON"},
        {"silent", "wrote nothing about"},
        {"gives-up", "error: it says: the tool is down; the episode is given out again"},
    };
    assert_int_equal(train_mode("fine", "three", args("--rollout-processes 3")), 0);
    assert_same_run("fine", "three");
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        const char *seconds = strcmp(faults[i].mode, "silent") == 0 ? "1" : "60";
        assert_int_equal(
            train_mode(faults[i].mode, faults[i].mode,
                       args("--rollout-processes 2 --rollout-process-timeout %s", seconds)),
            0);
        assert_said(&scene, faults[i].sentence);
        assert_said(&scene, "environment process ");
        assert_said(&scene, "given out again");
        assert_same_run("fine", faults[i].mode);
    }
}

TEST(what_cannot_be_mended_ends_the_run)
{
    assert_int_equal(train_mode("always", "always", NULL), 1);
    assert_said(&scene, ", sample 1: 3 attempts failed, the last: environment process 1 of 1: ");
    assert_said(&scene, "ended with status 3");
    assert_int_equal(train_mode("malformed", "malformed", NULL), 1);
    assert_said(&scene, "trajectory: field \"mask\": token ");
    assert_said(&scene, "is not the policy's: no turn sampled it there");
    assert_train(&scene, 1, "none", "--rollouts command:false");
    assert_said(&scene, "environment process 1 of 1: command \"false\" ended with status 1");
}

TEST(prompts_that_do_not_repeat_are_said)
{
    assert_int_equal(train_mode("rewrites", "rewrites", NULL), 0);
    assert_said(&scene, "the prompt of turn 2 has other tokens than the turn before from token ");
    json_t *m = last_metrics(&scene, "rewrites");
    assert_true(metric(m, "environment/unlike_prompts") == SAMPLES);
}

TEST(it_goes_with_the_rest)
{
    assert_int_equal(train_mode("fine", "async", args("--async --rollout-processes 2")), 0);
    json_t *m = last_metrics(&scene, "async");
    assert_true(metric(m, "rollout/staleness_max") <= 1);
    assert_int_equal(train_mode("rewards", "rewards", OPTIONS("--eval-data", scene.data)), 0);
    m = last_metrics(&scene, "rewards");
    assert_true(metric(m, "eval/reward") > 0 && metric(m, "grad_norm") > 0);
    assert_int_equal(train_mode("fine", "costs", args("--cost --curriculum kde --reward length")),
                     0);
    assert_said(&scene, "--reward length: what the environment gives does not count");
    m = last_metrics(&scene, "costs");
    assert_true(metric(m, "inference/generated_tokens") == 8);
}

// Blocks of 4 tokens, so that a turn's prompt has some.
TEST(an_adapter_is_trained_too_and_turns_find_the_cache)
{
    struct daemon d = {0};
    double reuse[2];
    daemon_start(&d, scene.model,
                 args("--dtype %s --max-adapters 1 --block-size 4", daemon_exact_dtype()));
    scene_ended(&scene,
                scene_run(&scene, daemon_trainer(&d, scene.data, test_path(scene.folder, "lora"),
                                                 args("--rollouts %s --prompts-per-step 3 "
                                                      "--num-generations 4 --max-steps 2 "
                                                      "--max-completion-length 12 --lora-r 2",
                                                      environment("fine", NULL)),
                                                 NULL)),
                0);
    daemon_kill(&d);
    each_within(&scene, "lora", "grad_norm", 2, DBL_MIN, INFINITY);
    if (on_cpu()) each_within(&scene, "lora", "sampler_mismatch/max", 2, 0, 0);
    column(&scene, "lora", "inference/cache_reuse_ratio", reuse, 2);
    assert_true(reuse[0] > 0.3 && reuse[1] > 0.3);
}

// Both of a tandem write turns; a policy that writes all of them learns what it does alone.
TEST(through_a_tandem)
{
    struct scene with = scene;
    with.daemon = (struct daemon){0};
    double policy[STEPS], frozen[STEPS], turns[STEPS], off[STEPS];
    daemon_start(&with.daemon, scene.model,
                 OPTIONS("--dtype", daemon_exact_dtype(), "--tandem-model", scene.model));
    const char *words = environment("fine", NULL);
    assert_train(&with, 0, "alone", NUMBERS "--tandem --tandem-p 1", words);
    assert_train(&with, 0, "tandem", NUMBERS "--tandem --no-tandem-shared", words);
    daemon_kill(&with.daemon);
    assert_same_run("fine", "alone");
    assert_int_equal(column(&scene, "tandem", "tandem/primary_token_fraction", policy, STEPS),
                     STEPS);
    column(&scene, "tandem", "tandem/frozen_token_fraction", frozen, STEPS);
    column(&scene, "tandem", "environment/turns", turns, STEPS);
    column(&scene, "tandem", "sampler_mismatch/max", off, STEPS);
    for (int i = 0; i < STEPS; i++) {
        assert_true(policy[i] > 0.1 && policy[i] < 0.9 && fabs(policy[i] + frozen[i] - 1) < 1e-6);
        assert_true(turns[i] > 1 && (off[i] == 0 || !on_cpu()));
    }
}

TEST(what_does_not_go_together_is_refused)
{
    train_rows(&scene, "recipes", "environments_that_are_refused", train);
}

// ---- the journal --------------------------------------------------------------------------------

static int compare(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// Each call of the tool was made once, and all were.
static void assert_called_once_each(const char *folder)
{
    char *text = test_read(test_path(folder, "effects")), *lines[STEPS * SAMPLES + 1],
         *remaining = text;
    int n = 0;
    for (char *line; (line = strsep(&remaining, "\n")) && *line;) {
        assert_true(n < STEPS * SAMPLES);
        lines[n++] = line;
    }
    assert_int_equal(n, STEPS * SAMPLES);
    qsort(lines, (size_t)n, sizeof *lines, compare);
    for (int i = 1; i < n; i++) assert_string_not_equal(lines[i - 1], lines[i]);
}

TEST(a_killed_run_calls_no_tool_again)
{
    const char *folder, *words = environment("waits", &folder);
    struct test_child child = {0};
    start_trainer(&scene, &child, "killed", args(NUMBERS, words));
    test_wait_for_file(test_path(folder, "reached"), LIMIT_MS, &child);
    test_kill(&child, SIGKILL);
    test_wait(&child, LIMIT_MS);
    char *pid = test_read(test_path(folder, "reached"));
    const int64_t deadline = clock_deadline_ns(10000);
    while (kill(atoi(pid), 0) == 0 || errno != ESRCH) // the kernel ends it with the trainer
        if (clock_sleep_ms(5), clock_ms_until(deadline) == 0) fail_msg("%s lives", pid);
    assert_true(file_exists(test_path(scene.folder, "killed/journal/step-2.jsonl")));
    test_write(test_path(folder, "go"), "", 0);
    assert_train(&scene, 0, "killed", NUMBERS "--resume", words);
    assert_said(&scene, "calls of tools have their results out of the journal");
    assert_called_once_each(folder);
    assert_same_run("fine", "killed");
    assert_false(file_exists(test_path(scene.folder, "killed/journal/step-2.jsonl")));
}

// ---- the example --------------------------------------------------------------------------------

TEST(the_example_of_the_docs_runs)
{
    const char *script = test_path(test_root(), "trainer/examples/calculator.py");
    char *docs = test_read(test_path(test_root(), "docs/use/environments.md")),
         *code = test_read(script);
    assert_non_null(strstr(docs, code)); // as it is
    const char *words = test_text("command:%s '%s'", test_python("json"), script);
    assert_train(&scene, 0, "example",
                 "--rollouts %s --max-steps 2 --reward environment --eval-data %s", words,
                 scene.data);
    json_t *m = last_metrics(&scene, "example");
    assert_true(metric(m, "environment/turns") >= 1 && metric(m, "eval/reward") >= 0);
    assert_true(metric(m, "environment/restarts") == 0);
}

// Messages that the server's template renders; where a special token was sampled they do not
// repeat.
TEST(with_the_real_verifiers)
{
    const char *python = test_python("datasets, verifiers.types");
    const char *script = test_path(test_root(), "trainer/examples/verifiers_environment.py");
    const char *env = test_path(test_root(), "tests/clients/verifiers_calculator.py");
    const char *data = test_path(scene.folder, "verifiers.jsonl");
    struct daemon d = {0};
    assert_exit(0, test_command(data, LIMIT_MS,
                                OPTIONS("sh", "-c", "\"$0\" \"$1\" \"$2\" --data 2>/dev/null",
                                        python, script, env)));
    const char *words = test_text("command:%s '%s' '%s'", python, script, env);
    daemon_start(&d, test_path(test_root(), "tools/demo-model"), NULL);
    scene_ended(&scene,
                scene_run(&scene, daemon_trainer(&d, data, test_path(scene.folder, "verifiers"),
                                                 args("--rollouts %s --prompts-per-step 2 "
                                                      "--num-generations 4 --max-steps 2 "
                                                      "--max-completion-length 8",
                                                      words),
                                                 NULL)),
                0);
    daemon_kill(&d);
    json_t *m = last_metrics(&scene, "verifiers");
    assert_true(metric(m, "environment/turns") == 2);
    assert_true(metric(m, "sampler_mismatch/max") == 0 || !on_cpu());
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "play") == 0) return play(argv[2], argv[3]);
    return test_main();
}
