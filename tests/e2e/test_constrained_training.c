/* test_constrained_training.c: runs whose lines have a "response_format": samples are what it says,
 * and with --constrained-loss trainer and sampler agree to the bit on what it leaves of the
 * distribution, while all that sampling has goes on beside it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#define FORMAT(schema)                                                                             \
    "\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": " schema "}}"
#define DIGIT FORMAT("{\"enum\": [1, 2, 3]}")

// As many lines as there are formats, each three times; prompts begin alike.
static void write_lines(const struct scene *s, const char *const formats[])
{
    struct bytes lines = BYTES_INIT;
    for (int i = 0; formats[i]; i++)
        for (int k = 0; k < 3; k++)
            bytes_printf(&lines,
                         "{\"prompt\": \"which one is it, %d.%d: \", \"answer\": \"2\"%s%s}\n", i,
                         k, *formats[i] ? ", " : "", formats[i]);
    test_write(s->data, lines.data, lines.len);
    bytes_release(&lines);
}

static void open_drafting(struct scene *s)
{
    scene_open_model(s, daemon_model(test_folder(), true, 11),
                     args("--exact --dtype %s --block-size 4 --prefill-chunk 5 --max-batch 8 "
                          "--max-context 96 --speculative ngram:4,suffix:8",
                          daemon_exact_dtype()));
}

#define NUMBERS                                                                                    \
    "--exact --prompts-per-step 4 --num-generations 4 --max-completion-length 24 --save-steps 0 "

TEST_IN(the_constrained_distribution_is_learned_from, open_drafting)
{
    enum { STEPS = 8 };
    double mismatch[STEPS], ratio[STEPS];
    static const char *const formats[] = {
        FORMAT("{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}, \"s\": "
               "{\"type\": \"string\", \"maxLength\": 9}}, \"required\": [\"a\", \"s\"]}"),
        FORMAT("{\"type\": \"array\", \"items\": {\"enum\": [\"x\", \"yy\"]}, \"minItems\": 2}"),
        DIGIT, "", NULL};
    write_lines(s, formats);
    const char *const *rest = args(NUMBERS "--temperature 0.9 --max-steps %d", STEPS);
    assert_int_equal(train(s, "under", JOIN(rest, args("--constrained-loss --beta 0.1"))), 0);
    assert_said(s, "9 of 12 samples' lines have a \"response_format\"");
    assert_int_equal(column(s, "under", "sampler_mismatch/max", mismatch, STEPS), STEPS);
    column(s, "under", "sampling/importance_sampling_ratio/min", ratio, STEPS);
    for (int i = 0; i < STEPS; i++) assert_true(mismatch[i] == 0 && ratio[i] == 1);
    // of whole distributions: as exact, and weighed by what the format leaves of them
    assert_int_equal(train(s, "whole",
                           JOIN(rest, args("--importance-sampling-mode "
                                           "token_truncate"))),
                     0);
    assert_said(s, "the loss is of the whole distribution, weighed by what it leaves of that");
    column(s, "whole", "sampler_mismatch/max", mismatch, STEPS);
    column(s, "whole", "sampling/importance_sampling_ratio/min", ratio, STEPS);
    for (int i = 0; i < STEPS; i++) assert_true(mismatch[i] == 0 && ratio[i] < 0.1);
}

// What else a run may have: preempted samples, a frozen model's tokens, an adapter, steps ahead.
TEST(it_combines)
{
    struct scene s;
    const char *model = daemon_model(test_folder(), true, 11);
    scene_open_model(&s, model,
                     args("--exact --dtype %s --block-size 4 --max-batch 8 --max-context 96 "
                          "--kv-memory 96K --max-adapters 1 --tandem-model %s",
                          daemon_exact_dtype(), model));
    static const char *const formats[] = {DIGIT, FORMAT("{\"type\": \"array\", \"minItems\": 3}"),
                                          "", NULL};
    write_lines(&s, formats);
    train_rows(&s, "constrained_training", "it_combines", train);
    assert_true(daemon_metric(&s.daemon, "vllm:num_preemptions_total") > 0);
    scene_end(&s);
}

// Of three answers one is right: nothing else is ever sampled, and no entropy is above log 3.
TEST_IN(it_learns_and_resumes, open_drafting)
{
    enum { STEPS = 30 };
    double reward[STEPS], entropy[STEPS];
    static const char *const formats[] = {DIGIT, NULL};
    write_lines(s, formats);
#define LEARN NUMBERS "--constrained-loss --learning-rate 0.02 --reward exact "
    assert_train(s, 0, "run", LEARN "--max-steps %d", STEPS);
    column(s, "run", "reward", reward, STEPS);
    column(s, "run", "entropy", entropy, STEPS);
    each_within(s, "run", "sampler_mismatch/max", STEPS, 0, 0);
    for (int i = 0; i < STEPS; i++) assert_true(entropy[i] > 0 && entropy[i] < log(3));
    assert_true(reward[0] < 0.75 && reward[STEPS - 1] > 0.9);
    // as two runs, of a server that was started anew
    daemon_kill(&s->daemon);
    daemon_start(&s->daemon, s->model,
                 args("--exact --dtype %s --step-ahead on", daemon_exact_dtype()));
    assert_train(s, 0, "two", LEARN "--max-steps %d", STEPS / 2);
    assert_train(s, 0, "two", LEARN "--max-steps %d --resume", STEPS);
    test_same_file(latest(s, "run"), latest(s, "two"), "model.safetensors");
}

TEST_ROWS(what_is_refused, "constrained_training", scene_open, train)

int main(void)
{
    return test_main();
}
