/* test_pass_at_k.c: evaluations of several samples a prompt: pass@k and maj@N against the samples
 * that were written out, every choice of them counted. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/training.h"

enum { SAMPLES = 4, MOST = 64 };

struct sample {
    int line;
    bool right;
    char text[64];
};

static int read_samples(const char *path, struct sample *ret)
{
    const json_t *lines = json_of_lines_file(path), *json;
    size_t i;
    assert_in_range(json_array_size(lines), 0, MOST);
    json_array_foreach (lines, i, json) {
        ret[i].line = (int)int_of(json, "line");
        ret[i].right = real_of(json, "reward") > 0;
        snprintf(ret[i].text, sizeof ret->text, "%s", text_of(json, "completion"));
    }
    return (int)json_array_size(lines);
}

// Of all choices of k of a prompt's samples (bits of a mask), how many hold a right one.
static double pass_at(const struct sample *of, int k)
{
    int choices = 0, passing = 0;
    for (int mask = 0; mask < 1 << SAMPLES; mask++) {
        bool any = false;
        if (__builtin_popcount((unsigned)mask) != k) continue;
        for (int i = 0; i < SAMPLES; i++) any |= mask >> i & 1 && of[i].right;
        choices++;
        passing += any;
    }
    return (double)passing / choices;
}

// Each sample votes for its text; the winners' share that is right.
static double majority_of(const struct sample *of)
{
    int votes[SAMPLES] = {0}, max = 0;
    double right = 0, winners = 0;
    for (int i = 0; i < SAMPLES; i++)
        for (int j = 0; j < SAMPLES; j++) votes[i] += strcmp(of[i].text, of[j].text) == 0;
    for (int i = 0; i < SAMPLES; i++) max = votes[i] > max ? votes[i] : max;
    for (int i = 0; i < SAMPLES; i++) {
        if (votes[i] != max) continue;
        right += (double)of[i].right / max; // each winner has `most` samples
        winners += 1.0 / max;
    }
    return right / winners;
}

static void check_figure(const json_t *result, const char *name, const double *of, int n)
{
    double mean = 0, squares = 0;
    for (int i = 0; i < n; i++) mean += of[i] / n;
    for (int i = 0; i < n; i++) squares += (of[i] - mean) * (of[i] - mean);
    assert_true(fabs(metric(result, name) - mean) < 1e-6);
    assert_true(fabs(metric(result, test_text("%s_standard_error", name)) - sqrt(squares) / n) <
                1e-6);
}

TEST_IN(samples_are_counted_out, scene_open)
{
    struct sample samples[MOST];
    double each[4][MOST]; // pass@1, @2, @4, maj@4
    const char *output = test_path(s->folder, "samples.jsonl");
    // one token, by its text: some prompts' answers are all letters, some none, some mixed
    assert_trainer(s, 0,
                   "eval --bridge %s --data %s --reward regex --reward-pattern [a-m+] "
                   "--max-completion-length 1 --temperature 0.5 --num-generations 4 --max-samples "
                   "12 --output %s --json",
                   s->daemon.bridge, s->data, output);
    const int n = read_samples(output, samples) / SAMPLES;
    assert_int_equal(n, 12);
    for (int i = 0; i < n; i++) {
        const struct sample *of = samples + i * SAMPLES;
        assert_int_equal(of[0].line, of[SAMPLES - 1].line);
        for (int k = 0; k < 3; k++) each[k][i] = pass_at(of, 1 << k);
        each[3][i] = majority_of(of);
    }
    const json_t *result = json_of(strstr(test_read(test_path(s->folder, "trainer.log")), "{\""));
    check_figure(result, "pass@1", each[0], n);
    check_figure(result, "pass@2", each[1], n);
    check_figure(result, "pass@4", each[2], n);
    check_figure(result, "maj@4", each[3], n);
    assert_true(fabs(metric(result, "accuracy") - metric(result, "pass@1")) < 1e-6);
    assert_true(metric(result, "pass@4") > metric(result, "pass@1"));
}

TEST_IN(runs_evaluate_so_too, scene_open)
{
    assert_train(s, 0, "run",
                 "--max-steps 1 --reward regex --reward-pattern [a-m] --eval-data %s --eval-limit "
                 "4 --num-generations-eval 2 --eval-temperature 1",
                 s->data);
    json_t *m = last_metrics(s, "run");
    assert_true(metric(m, "eval/pass@2") >= metric(m, "eval/pass@1"));
    assert_true(metric(m, "eval/maj@2") >= 0);
    assert_train(s, 2, "greedy", "--eval-data %s --num-generations-eval 2", s->data);
    assert_said(s, "give a temperature");
}
