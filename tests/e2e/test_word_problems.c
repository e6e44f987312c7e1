/* test_word_problems.c: data of GSM8K's form, as cw-word-problems writes it, through the real
 * programs: generated, learnt in part, and trained on by `--reward gsm8k`. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer.h"
#include "tests/support/tiny_model.h"
#include "tests/support/training.h"
#include "trainer/data/data.h"
#include "trainer/reward/math/prose.h"

static struct dataset *problems(const char *folder, const char *name)
{
    struct dataset *d;
    assert_ok(dataset_load(test_path(folder, name), NULL, &d));
    return d;
}

static int compare(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Each "a + b = c" of a worked answer holds, and the last c is the answer.
static void check_work(const struct dataset *d, const struct example *e)
{
    double last = NAN, said;
    const char *text = e->answer, *equals;
    while ((equals = strstr(text, " = "))) {
        const char *start = equals;
        double a, b, y;
        char sign;
        while (start > e->answer && strchr("0123456789 +-*/", start[-1])) start--;
        assert_int_equal(sscanf(start, "%lf %c %lf = %lf", &a, &sign, &b, &y), 4);
        double right = sign == '+' ? a + b : sign == '-' ? a - b : sign == '*' ? a * b : a / b;
        if (right != y || y < 1) fail_msg("%s, line %d: %s", d->path, e->line, e->answer);
        last = y;
        text = equals + 3;
    }
    assert_true(number_answer(e->answer, &said));
    if (said != last) fail_msg("%s, line %d: %s", d->path, e->line, e->answer);
}

TEST(generator)
{
    enum { TRAIN = 3000, HELDOUT = 200, SFT = 1000 };
    const char *folder = test_folder();
    const char *tool = test_binary("cw-word-problems");
    test_output(0, args("%s --out %s --count 3000 --heldout 200 --sft 1000 --careless 0.5", tool,
                        test_path(folder, "a")));
    static const char *const names[] = {"train.jsonl", "heldout.jsonl", "sft.jsonl"};
    static const int sizes[] = {TRAIN, HELDOUT, SFT};
    const char *prompts[TRAIN + HELDOUT + SFT];
    struct dataset *sets[3];
    struct tokenizer *tokenizer;
    SCOPED(token_list_release) struct token_list ids = {0};
    SCOPED(bytes_release) struct bytes back = BYTES_INIT;
    int n = 0, steps[9] = {0}, careless = 0;
    assert_ok(tokenizer_load(test_path(folder, "a/tokenizer"), &tokenizer));
    for (int k = 0; k < 3; k++) {
        sets[k] = problems(test_path(folder, "a"), names[k]);
        assert_int_equal(sets[k]->n, sizes[k]);
        for (int i = 0; i < sets[k]->n; i++) {
            const struct example *e = &sets[k]->examples[i];
            prompts[n++] = e->prompt;
            assert_int_equal(e->question, k < 2);
            if (k < 2) {
                int of = (int)int_of(e->row, "steps");
                assert_true(of >= 1 && of <= 4);
                steps[of]++;
                check_work(sets[k], e);
            }
            // words are single tokens: far fewer than letters
            ids.n = 0;
            assert_ok(tokenizer_encode(tokenizer, e->prompt, e->prompt_len, false, &ids));
            assert_true(ids.n * 2 < (int)e->prompt_len);
            bytes_clear(&back);
            assert_ok(tokenizer_decode(tokenizer, ids.ids, ids.n, true, &back));
            assert_string_equal(bytes_text(&back), e->prompt);
        }
    }
    for (int of = 1; of <= 4; of++) assert_true(steps[of] > (TRAIN + HELDOUT) / 6);
    qsort(prompts, (size_t)n, sizeof *prompts, compare);
    for (int i = 1; i < n; i++) assert_string_not_equal(prompts[i - 1], prompts[i]);

    // a careful teacher says the same but for the last step, which the careless one leaves out in
    // half of the problems that have several: three in four
    test_output(
        0, args("%s --out %s --count 1 --heldout 200 --sft 1000", tool, test_path(folder, "c")));
    struct dataset *careful = problems(test_path(folder, "c"), "sft.jsonl");
    for (int i = 0; i < SFT; i++) {
        const char *said = sets[2]->examples[i].completion, *mark = strstr(said, "####");
        const char *right = careful->examples[i].completion;
        assert_string_equal(sets[2]->examples[i].prompt, careful->examples[i].prompt);
        assert_true(mark && mark > said); // some work is always shown
        assert_memory_equal(said, right, (size_t)(mark - said));
        careless += strcmp(said, right) != 0;
    }
    assert_true(careless > 300 && careless < 450);
    dataset_free(careful);
    for (int k = 0; k < 3; k++) dataset_free(sets[k]);

    // the same seed gives the same problems, and a larger set begins with a smaller one
    test_output(0, args("%s --out %s --count 2000 --heldout 200 --sft 1000 --careless 0.5", tool,
                        test_path(folder, "b")));
    test_same_file(test_path(folder, "a"), test_path(folder, "b"), "heldout.jsonl");
    test_same_file(test_path(folder, "a"), test_path(folder, "b"), "sft.jsonl");
    char *large = test_read(test_path(folder, "a/train.jsonl"));
    char *small = test_read(test_path(folder, "b/train.jsonl"));
    assert_true(strlen(small) < strlen(large));
    assert_memory_equal(large, small, strlen(small));
    tokenizer_free(tokenizer);
}

TEST(generator_says_what_is_wrong)
{
    const char *folder = test_folder();
    const char *tool = test_binary("cw-word-problems");
    assert_contains(test_output(2, args("%s", tool)), "--out is missing");
    assert_contains(test_output(2, args("%s --out %s --min-steps 3 --max-steps 2", tool, folder)),
                    "--min-steps 3 is above --max-steps 2");
    assert_contains(test_output(1, args("%s --out /proc/no", tool)), "/proc/no");
}

static char *train_gsm8k(int status, const char *folder, const char *run,
                         const struct daemon *daemon, const char *const more[])
{
    return test_output(
        status,
        daemon_trainer(
            daemon, test_path(folder, "train.jsonl"), test_path(folder, run),
            args("--config %s --eval-data %s --reward gsm8k --max-completion-length 12 --max-steps "
                 "2 --prompts-per-step 2 --num-generations 4 --eval-limit 4 --log-completions",
                 test_path(test_root(), "trainer/examples/gsm8k.json"),
                 test_path(folder, "heldout.jsonl")),
            more));
}

static json_t *first_rollout(const char *folder, const char *name)
{
    return json_at(json_of_lines_file(test_path(folder, name)), "0");
}

// The one command with its settings, made smaller, on the files as they are, with an instruct
// model's folder: questions in its chat template, the reward's request behind them.
TEST(the_one_command)
{
    const char *folder = test_folder();
    struct daemon daemon = {0};
    test_output(
        0, args("%s --out %s --count 40 --heldout 8", test_binary("cw-word-problems"), folder));
    daemon_start(&daemon, daemon_model(folder, true, 5), NULL);
    char *log = train_gsm8k(0, folder, "run", &daemon, args("--max-samples 12"));
    assert_contains(log, "final answer after \"####\"");
    assert_contains(log, "(12 examples)");
    const json_t *m = json_array_get(json_of_lines_file(test_path(folder, "run/metrics.jsonl")), 1);
    double reward = metric(m, "rewards/gsm8k/mean");
    assert_true(reward >= 0 && reward <= 1);
    const json_t *rollout = first_rollout(folder, "run/rollouts/step-2.jsonl");
    const char *said = text_of(rollout, "prompt");
    assert_contains(text_of(rollout, "answer"), "#### ");
    // tokens are bytes here, a few merges aside: the request is in the prompt, not in what was said
    int tokens = (int)int_of(rollout, "telemetry.prompt_tokens");
    assert_null(strstr(said, "####"));
    assert_true(tokens > (int)strlen(said) + 40);
    // and the log shows it as the model saw it
    const char *seen = text_of(rollout, "prompt_text");
    assert_contains(seen, "<|im_start|>user\n");
    assert_contains(seen, said);
    assert_contains(seen, "####");
    assert_contains(log, "chat template: ");
    assert_contains(test_read(daemon.log), "chat template: ");

    // as they are, on request
    train_gsm8k(0, folder, "plain", &daemon, args("--prompt-template none"));
    rollout = first_rollout(folder, "plain/rollouts/step-1.jsonl");
    said = text_of(rollout, "prompt");
    tokens = (int)int_of(rollout, "telemetry.prompt_tokens");
    assert_true(tokens <= (int)strlen(said));

    // a reference without a number is refused before the first step
    static const char bad[] = "{\"question\": \"a\", \"answer\": \"#### 1\"}\n"
                              "{\"question\": \"b\", \"answer\": \"#### none\"}\n";
    test_write(test_path(folder, "train.jsonl"), bad, strlen(bad));
    assert_contains(train_gsm8k(1, folder, "bad", &daemon, NULL),
                    "train.jsonl, line 2: the data set's answer \"#### none\" holds no number");
    assert_contains(train_gsm8k(2, folder, "bad", &daemon, args("--prompt-template Q:")),
                    "--prompt-template \"Q:\" has no {prompt}");
    assert_int_equal(daemon_stop(&daemon), 0);
}

// The generator's own tokenizer, a model made for it by sft, and the same command without a chat
// template.
TEST(warm_start_and_train)
{
    const char *folder = test_folder();
    const char *shape = test_path(folder, "shape.json"), *model = test_path(folder, "model");
    struct daemon daemon = {0};
    test_output(0, args("%s --out %s --count 40 --heldout 8 --sft 40 --careless 1",
                        test_binary("cw-word-problems"), folder));
    json_t *config = test_keep(
        json_pack("{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:s, s:b, s:i}",
                  "architectures", "Qwen2ForCausalLM", "model_type", "qwen2", "vocab_size", 1024,
                  "hidden_size", 64, "intermediate_size", 128, "num_hidden_layers", 2,
                  "num_attention_heads", 4, "num_key_value_heads", 2, "max_position_embeddings",
                  256, "rms_norm_eps", 1e-6, "rope_theta", 10000.0, "hidden_act", "silu",
                  "tie_word_embeddings", 1, "eos_token_id", 256));
    assert_ok(json_write_file(shape, 0644, config));
    test_output(0, args("%s sft --init %s --tokenizer %s --data %s --out %s --max-steps 3 "
                        "--logging-steps 1 --device cpu --max-samples 24",
                        test_binary("cw-trainer"), shape, test_path(folder, "tokenizer"),
                        test_path(folder, "sft.jsonl"), model));
    daemon_start(&daemon, model, NULL);
    train_gsm8k(0, folder, "run", &daemon, NULL);
    const json_t *rollout = first_rollout(folder, "run/rollouts/step-1.jsonl");
    const char *said = text_of(rollout, "prompt");
    int tokens = (int)int_of(rollout, "telemetry.prompt_tokens");
    assert_true(tokens * 2 < (int)strlen(said)); // words, and nothing around them
    assert_contains(
        test_output(
            0, args("%s eval --bridge %s --data %s --reward gsm8k --max-completion-length 12",
                    test_binary("cw-trainer"), daemon.bridge, test_path(folder, "heldout.jsonl"))),
        "8 prompts");
    // the same with a template needs a chat template, and says where from
    assert_contains(train_gsm8k(1, folder, "chat", &daemon, args("--chat")),
                    "--chat-template-file");
    assert_int_equal(daemon_stop(&daemon), 0);
}
