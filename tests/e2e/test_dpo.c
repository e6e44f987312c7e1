/* test_dpo.c: cw-trainer dpo as a program, on the demo's model and its sums: margins of pairs it
 * has not seen rise; pairs in other forms, and what is refused. What a step computes is compared
 * with TRL's in test_offline_reference.c. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/offline.h"

static const char *write_pairs(const struct scene *s, const char *name, int first, int n)
{
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
    for (int i = first; i < first + n; i++) {
        const int a = 10 + i * 37 % 90, b = 10 + i * 53 % 90;
        // what forgets a carry; where there is none, a carry too many
        const int wrong = a % 10 + b % 10 >= 10 ? a + b - 10 : a + b + 10;
        bytes_printf(&lines, "{\"prompt\":\"%d+%d=\",\"chosen\":\"%d\",\"rejected\":\"%d\"}\n", a,
                     b, a + b, wrong);
    }
    const char *path = test_path(s->folder, name);
    test_write(path, lines.data, lines.len);
    return path;
}

TEST(margins_rise)
{
    struct scene s = {.folder = test_folder()};
    double margins[64], right[64], loss[64];
    s.model = test_path(test_root(), "tools/demo-model");
    s.data = write_pairs(&s, "pairs.jsonl", 0, 64);
    const char *held = write_pairs(&s, "heldout.jsonl", 64, 32);
    assert_offline(&s, 0, "dpo", "run",
                   "--max-steps 20 --examples-per-step 16 --learning-rate 3e-5 --eval-data %s",
                   held);
    assert_said(&s, "the reference: log-probabilities by ");
    assert_int_equal(column(&s, "run", "eval/rewards/margins", margins, 64), 21);
    assert_int_equal(column(&s, "run", "eval/rewards/accuracies", right, 64), 21);
    assert_int_equal(column(&s, "run", "loss", loss, 64), 21);
    assert_true(margins[0] == 0 && right[0] == 0); // the policy is the reference, to the bit
    assert_true(fabs(loss[1] - log(2)) < 1e-9);
    assert_true(margins[20] > 0.05 && right[20] > 0.7);
    assert_true(loss[20] < loss[1]);
}

// Prompt and completions as messages, and as whole conversations, are the same run.
TEST_IN(forms_of_a_pair, offline_scene_open)
{
    static const char *const forms[] = {
        "{\"prompt\": [{\"role\": \"user\", \"content\": \"ab\"}], \"chosen\": [{\"role\": "
        "\"assistant\", \"content\": \"cd\"}], \"rejected\": [{\"role\": \"assistant\", "
        "\"content\": \"e\"}]}\n",
        "{\"chosen\": [{\"role\": \"user\", \"content\": \"ab\"}, {\"role\": \"assistant\", "
        "\"content\": \"cd\"}], \"rejected\": [{\"role\": \"user\", \"content\": \"ab\"}, "
        "{\"role\": \"assistant\", \"content\": \"e\"}]}\n",
    };
    double losses[2][4];
    for (int i = 0; i < 2; i++) {
        const char *run = i ? "conversations" : "messages";
        test_write(s->data, forms[i], strlen(forms[i]));
        assert_offline(s, 0, "dpo", run, "--max-steps 3");
        assert_int_equal(column(s, run, "loss", losses[i], 4), 3);
    }
    assert_memory_equal(losses[0], losses[1], 3 * sizeof(double));
    assert_true(losses[0][2] < losses[0][0]);
}

static void figures_by(struct scene *s, const char *budget, double ret[2][4])
{
    assert_offline(s, 0, "dpo", budget,
                   "--max-steps 3 --examples-per-step 6 --sft-weight 0.7 --token-budget %s",
                   budget);
    assert_int_equal(column(s, budget, "loss", ret[0], 4), 3);
    assert_int_equal(column(s, budget, "rewards/margins", ret[1], 4), 3);
}

// Wherever micro-batches end, a pair is compared as a whole, and the chosen completions' tokens
// have one mean.
TEST_IN(any_token_budget, offline_scene_open)
{
    static const char *const budgets[] = {"16", "18", "20", "21", "22", "23", "25"};
    double want[2][4], have[2][4];
    offline_sums(s, true, 6);
    figures_by(s, "8192", want);
    assert_true(want[1][2] > 0);
    for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++) {
        figures_by(s, budgets[i], have);
        for (int k = 0; k < 2; k++)
            for (int step = 0; step < 3; step++)
                assert_true(fabs(want[k][step] - have[k][step]) < 1e-5);
    }
}

// With --quantization the reference is multiplied as the policy is: at first they are the same.
TEST_IN(what_is_multiplied, offline_scene_open)
{
    static const char *const kinds[] = {"none", "fp8-weights", "fp8"};
    double margins[3][4];
    offline_sums(s, true, 6);
    for (int i = 0; i < 3; i++) {
        assert_offline(s, 0, "dpo", kinds[i],
                       "--max-steps 3 --learning-rate 1e-3 --quantization %s", kinds[i]);
        assert_int_equal(column(s, kinds[i], "rewards/margins", margins[i], 4), 3);
        assert_true(margins[i][0] == 0 && margins[i][2] > 0);
    }
    assert_true(margins[1][2] != margins[0][2] && margins[2][2] != margins[1][2]);
}

TEST_IN(what_is_refused, offline_scene_open)
{
    offline_sums(s, true, 4);
    train_rows(s, "offline_runs", "pairs_that_are_refused", offline_row);
}
