/* test_distillation.c: runs that a teacher holds (cw-trainer train --teacher): without a reward the
 * policy comes nearer to it, trainer and sampler agree to the bit meanwhile, and two runs end on
 * the bits of one; what does not fit is refused by name. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"
#include "common/base/dtype.h"
#include <math.h>

static void open_drafting(struct scene *s)
{
    scene_open_model(
        s, daemon_model(test_folder(), true, 11),
        args("--exact --dtype %s --block-size 4 --prefill-chunk 5 --max-batch 8 "
             "--max-context 96 --speculative ngram:4,suffix:8 --max-adapters 2 --max-lora-rank 4",
             daemon_exact_dtype()));
    static const char lines[] = "{\"prompt\": \"once upon \"}\n{\"prompt\": \"12+30=\"}\n"
                                "{\"prompt\": \"colours: \"}\n{\"prompt\": \"a\"}\n";
    test_write(s->data, lines, strlen(lines));
}

// A run without a reward; its exit status.
static int distil(const struct scene *s, const char *run, const char *const more[])
{
    return scene_run(
        s, daemon_trainer(&s->daemon, s->data, test_path(s->folder, run),
                          args("--exact --prompts-per-step 4 --num-generations 1 "
                               "--max-completion-length 24 --save-steps 0 --learning-rate 1e-2 "
                               "--lr-scheduler-type constant --logging-steps 1"),
                          more));
}

TEST_IN(the_policy_comes_nearer_and_runs_resume, open_drafting)
{
    enum { STEPS = 12 };
    double mismatch[STEPS], divergence[STEPS], agreement[STEPS];
    const char *teacher = daemon_model(test_folder(), true, 12);
    const char *const *rest = args("--teacher %s", teacher);
    for (int beta = 0; beta < 2; beta++) {
        const char *name = test_text("beta-%d", beta);
        const char *const *more = args("--distill-beta %d --max-steps %d", beta, STEPS);
        assert_int_equal(distil(s, name, JOIN(rest, more)), 0);
        assert_int_equal(column(s, name, "sampler_mismatch/max", mismatch, STEPS), STEPS);
        assert_int_equal(column(s, name, "teacher/divergence", divergence, STEPS), STEPS);
        assert_int_equal(column(s, name, "teacher/agreement", agreement, STEPS), STEPS);
        for (int i = 0; i < STEPS; i++) assert_true(mismatch[i] == 0);
        assert_true(divergence[0] > 1 && divergence[STEPS - 1] < 0.6 * divergence[0]);
        assert_true(agreement[STEPS - 1] >= 0 && agreement[STEPS - 1] <= 1);
    }
    assert_int_equal(distil(s, "two", JOIN(rest, args("--max-steps %d", STEPS / 2))), 0);
    assert_int_equal(distil(s, "two", JOIN(rest, args("--max-steps %d --resume", STEPS))), 0);
    test_same_file(latest(s, "two"), latest(s, "beta-1"), "model.safetensors");
}

// The policy behind another prompt, and an adapter's base behind it, begin as their folder loaded a
// second time does: of each step that of the first run, until weights move.
TEST_IN(the_policy_itself_behind_another_prompt, open_drafting)
{
    enum { STEPS = 4 };
    static const char lines[] =
        "{\"prompt\": \"once upon \", \"teacher_prompt\": \"a tale of old: once upon \"}\n"
        "{\"prompt\": \"12+30=\", \"teacher_prompt\": \"42\"}\n"
        "{\"prompt\": \"colours: \"}\n{\"prompt\": \"a\", \"teacher_prompt\": \"the\"}\n";
    const char *folder = daemon_model(test_folder(), true, 11);
    const char *const teachers[] = {"base", "policy", folder};
    double divergence[3][STEPS], mismatch[STEPS];
    test_write(s->data, lines, strlen(lines));
    for (int i = 0; i < 3; i++) {
        const char *name = test_text("self-%d", i);
        const char *const *more = args("--teacher %s --max-steps %d", teachers[i], STEPS);
        if (i == 0) more = JOIN(more, args("--lora-r 4"));
        assert_int_equal(distil(s, name, more), 0);
        assert_int_equal(column(s, name, "sampler_mismatch/max", mismatch, STEPS), STEPS);
        assert_int_equal(column(s, name, "teacher/divergence", divergence[i], STEPS), STEPS);
        for (int k = 0; k < STEPS; k++) assert_true(mismatch[k] == 0 && divergence[i][k] > 0);
        assert_true(divergence[i][0] == divergence[0][0]);
    }
    assert_true(divergence[1][STEPS - 1] != divergence[2][STEPS - 1]); // it moves along
    assert_int_equal(distil(s, "two", args("--teacher policy --max-steps %d", STEPS / 2)), 0);
    assert_int_equal(distil(s, "two", args("--teacher policy --max-steps %d --resume", STEPS)), 0);
    test_same_file(latest(s, "two"), latest(s, "self-1"), "model.safetensors");
}

// Of the policy's own samples a share; the rest are the data's completions, which count alone where
// it is 0: then it is all the same how long samples are.
TEST_IN(completions_of_the_data, open_drafting)
{
    enum { STEPS = 6 };
    static const char lines[] = "{\"prompt\": \"once upon \", \"completion\": \"a time\"}\n"
                                "{\"prompt\": \"12+30=\", \"answer\": 42}\n"
                                "{\"prompt\": \"colours: \", \"completion\": \"red, green\"}\n"
                                "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    const char *const *rest = args("--teacher %s", daemon_model(test_folder(), true, 12));
    const char *const lambdas[] = {"0", "0", "0.5"}, *const lengths[] = {"24", "5", "24"};
    double divergence[3][STEPS], mismatch[STEPS];
    test_write(s->data, lines, strlen(lines));
    for (int i = 0; i < 3; i++) {
        const char *name = test_text("given-%d", i);
        const char *const *more =
            args("--distill-lambda %s --max-completion-length %s --max-steps %d", lambdas[i],
                 lengths[i], STEPS);
        assert_int_equal(distil(s, name, JOIN(rest, more)), 0);
        assert_int_equal(column(s, name, "sampler_mismatch/max", mismatch, STEPS), STEPS);
        assert_int_equal(column(s, name, "teacher/divergence", divergence[i], STEPS), STEPS);
        for (int k = 0; k < STEPS; k++) assert_true(mismatch[k] == 0);
        assert_true(divergence[i][STEPS - 1] < divergence[i][0]);
    }
    assert_true(divergence[1][0] == divergence[0][0] && divergence[2][0] != divergence[0][0]);
    const char *const *half = args("--distill-lambda 0.5 --max-steps %d", STEPS / 2);
    const char *const *all = args("--distill-lambda 0.5 --max-steps %d --resume", STEPS);
    assert_int_equal(distil(s, "two", JOIN(rest, half)), 0);
    assert_int_equal(distil(s, "two", JOIN(rest, all)), 0);
    test_same_file(latest(s, "two"), latest(s, "given-2"), "model.safetensors");
    test_write(s->data, "{\"prompt\": \"a\"}\n", 16);
    assert_true(distil(s, "none", JOIN(rest, args("--distill-lambda 0.5"))) != 0);
    assert_said(s, "no field \"completion\" or \"answer\" to learn");
}

// A teacher in eight bits is near to what it is of, not the same; and is held so alone.
TEST_IN(a_teacher_in_eight_bits, open_drafting)
{
    double divergence[3];
    const char *folder = daemon_model(test_folder(), true, 12);
    for (int q = 0; q < 3; q++) {
        const char *name = test_text("q-%d", q);
        const char *const *more = args("--teacher %s --max-steps 1 --teacher-quantization %s",
                                       folder, quantization_names[q]);
        assert_int_equal(distil(s, name, more), 0);
        assert_int_equal(column(s, name, "teacher/divergence", &divergence[q], 1), 1);
        assert_true(fabs(divergence[q] - divergence[0]) < 0.1 * divergence[0]);
        assert_true(q == 0 || divergence[q] != divergence[0]);
    }
    assert_true(distil(s, "own", args("--teacher policy --teacher-quantization fp8")) != 0);
}

TEST_IN(what_does_not_fit, open_drafting)
{
    assert_true(distil(s, "none", args("--teacher %s", test_path(s->folder, "x"))) != 0);
    assert_said(s, "--teacher");
    assert_true(distil(s, "wide", args("--teacher %s", test_golden("olmo2"))) != 0);
    assert_said(s, "a vocabulary of 200 tokens");
    assert_true(distil(s, "self", args("--teacher policy")) != 0);
    assert_said(s, "no line of");
    assert_true(distil(s, "base", args("--teacher base")) != 0);
    assert_said(s, "no adapter is trained");
    assert_true(distil(s, "scores", args("--teacher policy --eval-data x")) != 0);
    assert_said(s, "--eval-data x with --teacher and no --reward");
}
