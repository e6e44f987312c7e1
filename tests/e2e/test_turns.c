/* test_turns.c: cw-trainer train --rollouts with a chat template that leaves the reasoning of
 * earlier turns out, as Qwen3's does: each of ten turns is trained behind what it was sampled
 * behind. This program is also the environment: `test_turns play KIND`. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/environment.h"
#include "tests/support/pair.h"

enum { TURNS = 10, SAMPLED = 6, STEPS = 2, SAMPLES = 8 };

static struct pair p; // two servers of the model; most runs are on the first alone

// ---- the environment ----------------------------------------------------------------------------

static json_t *ask(const json_t *id, const char *kind, json_t *value, const char *reply)
{
    environment_say(id, kind, value);
    json_t *line = environment_hear(), *got = json_object_get(line, reply);
    if (!got) exit(9);
    return got;
}

static void say_to(json_t *messages, const char *role, const char *text)
{
    json_array_append_new(messages, json_pack("{s:s, s:s}", "role", role, "content", text));
}

// What is sampled is reasoning, behind which the environment writes how many of its tokens were low
// in its place: the next turn reads that alone.
static void play_episode(const json_t *id, const json_t *e, const char *kind)
{
    json_t *messages = json_array(), *rewards = json_array(), *learned = json_array(), *token;
    int low = 0, sampled = 0;
    size_t t;
    say_to(messages, "user",
           json_string_value(json_object_get(json_object_get(e, "example"), "prompt")));
    for (int turn = 0; turn < TURNS; turn++) {
        json_t *prompt = ask(
            id, "tokenize",
            json_pack("{s:O, s:b}", "messages", messages, "add_generation_prompt", 1), "tokenized");
        json_t *got =
            ask(id, "sample", json_pack("{s:O, s:i}", "token_ids", prompt, "max_tokens", SAMPLED),
                "sampled");
        int of_turn = 0;
        json_array_foreach (json_object_get(got, "token_ids"), t, token) {
            of_turn += json_integer_value(token) < 150;
            sampled++;
        }
        low += of_turn;
        say_to(messages, "assistant", test_text("<think>%s</think>%d", "as it was", of_turn));
        say_to(messages, "user", "go on");
        json_array_append_new(rewards, json_real((double)of_turn / SAMPLED));
        json_array_append_new(learned, json_integer(1));
    }
    if (strcmp(kind, "rewards") == 0)
        environment_say(id, "trajectory",
                        json_pack("{s:o, s:o}", "turns", learned, "rewards", rewards));
    else
        environment_say(id, "trajectory",
                        json_pack("{s:o, s:f}", "turns", learned, "reward",
                                  strcmp(kind, "count") == 0 ? (double)sampled
                                                             : (double)low / (TURNS * SAMPLED)));
}

// ---- runs ---------------------------------------------------------------------------------------

static void open_pair(void)
{
    static const char template[] =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content "
        "}}"
        "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}";
    const char *model = daemon_model(test_folder(), true, 11);
    const char *const *options = OPTIONS("--dtype", daemon_exact_dtype());
    test_write(test_path(model, "chat_template.jinja"), template, sizeof template - 1);
    scene_open_model(&p.s, model, options);
    pair_open_other(&p, options);
}

static void close_pair(void)
{
    pair_close(&p);
}

TESTS_BETWEEN(open_pair, close_pair)

#define NUMBERS                                                                                    \
    "--reward environment --rollouts %s --max-steps 2 --prompts-per-step 2 --num-generations 4 "   \
    "--learning-rate 1e-3 "

static void train_kind(const char *kind, const char *run, const char *const more[])
{
    scene_ended(&p.s, train(&p.s, run, JOIN(args(NUMBERS, environment_of(kind)), more)), 0);
}

static void assert_exact(const char *run, int steps)
{
    each_within(&p.s, run, "grad_norm", steps, DBL_MIN, INFINITY);
    if (on_cpu()) each_within(&p.s, run, "sampler_mismatch/max", steps, 0, 0);
}

// ---- tests --------------------------------------------------------------------------------------

TEST(every_turn_is_trained_as_it_was_sampled)
{
    size_t i;
    const json_t *sample;
    int tokens = 0;
    train_kind("count", "count", args("--log-completions --log-logprobs"));
    assert_said(&p.s, "to train all, end with \"turns\"");
    if (on_cpu()) each_within(&p.s, "count", "sampler_mismatch/max", STEPS, 0, 0);
    json_t *m = last_metrics(&p.s, "count");
    assert_true(metric(m, "environment/turns") == TURNS);
    assert_true(metric(m, "environment/unlike_prompts") == (TURNS - 1) * SAMPLES);
    // what is learned from is all that was sampled, and nothing else
    assert_near(metric(m, "completions/mean_length"), metric(m, "reward"), 1e-9);
    assert_true(metric(m, "completions/max_length") > TURNS * SAMPLED / 2);
    const json_t *samples =
        json_of_lines_file(test_path(p.s.folder, "count/rollouts/step-2.jsonl"));
    json_array_foreach (samples, i, sample) {
        const json_t *here = json_object_get(sample, "trainer_logprobs"),
                     *there = json_object_get(sample, "logprobs");
        assert_null(json_object_get(sample, "model_mask"));
        if (on_cpu()) assert_true(json_equal(here, there));
        tokens += (int)json_array_size(here);
    }
    assert_near(tokens, SAMPLES * metric(m, "reward"), 1e-6);
}

// The trajectory's advantage goes to all its turns; or each has the rewards that come after it, and
// one ratio with all others, in two updates a step.
TEST(turns_are_learned_from)
{
    train_kind("whole", "whole", NULL);
    assert_exact("whole", STEPS);
    train_kind("rewards", "rewards",
               args("--importance-sampling-level sequence --num-iterations 2 --beta 0.05"));
    assert_exact("rewards", STEPS);
}

TEST(two_ranks_learn_as_one)
{
    scene_ended(&p.s, pair_run(&p, "two", args(NUMBERS, environment_of("whole"))), 0);
    same_losses(&p.s, "whole", "two", STEPS, 1e-5);
    assert_exact("two", STEPS);
    pair_holds(&p, "two");
    scene_ended(&p.s,
                pair_run(&p, "ahead",
                         args(NUMBERS "--async --max-staleness 2 --rollout-budget 0.5",
                              environment_of("whole"))),
                0);
    each_within(&p.s, "ahead", "grad_norm", STEPS, DBL_MIN, INFINITY);
    each_within(&p.s, "ahead", "rollout/staleness_max", STEPS, 0, 2);
    pair_holds(&p, "ahead");
}

TEST(a_teacher_reads_turns)
{
    train_kind("whole", "taught",
               args("--teacher %s --distill-weight 0.5 --distill-beta 0.5",
                    daemon_model(test_folder(), true, 12)));
    assert_exact("taught", STEPS);
    each_within(&p.s, "taught", "teacher/divergence", STEPS, DBL_MIN, INFINITY);
}

// A trainer and a server that end amid a run change no bit.
TEST(resumes_to_the_bit)
{
    if (!on_cpu()) test_skip("steps are not exact on every GPU");
    train_kind("whole", "halves", args("--max-steps 1"));
    daemon_start(&p.s.daemon, p.s.model, OPTIONS("--dtype", daemon_exact_dtype()));
    train_kind("whole", "halves", args("--resume"));
    assert_said(&p.s, "resumed at step 1");
    test_same_file(latest(&p.s, "whole"), latest(&p.s, "halves"), "model.safetensors");
}

// Turns that have no room in a micro-batch beside those before them are left out of it.
TEST(the_budget_bounds_what_is_learned_from)
{
    daemon_start(&p.s.daemon, p.s.model,
                 OPTIONS("--dtype", daemon_exact_dtype(), "--max-context", "352"));
    train_kind("whole", "short", args("--token-budget 352"));
    assert_said(&p.s, "the last turns of 8 samples, which are over --token-budget");
    assert_exact("short", STEPS);
    const double longest = metric(last_metrics(&p.s, "short"), "completions/max_length");
    assert_true(longest > TURNS * SAMPLED / 2 && longest < TURNS * SAMPLED);
}

int main(int argc, char **argv)
{
    if (argc != 3 || strcmp(argv[1], "play") != 0) return test_main();
    for (json_t *line; (line = environment_hear());)
        play_episode(json_object_get(line, "id"), json_object_get(line, "episode"), argv[2]);
    return 0;
}
