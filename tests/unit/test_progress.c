/* test_progress.c: what a run that learns nothing or goes astray is told, when, and how often; what
 * counts as better, and the way of the best through a checkpoint. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/run/runlog.h"

static const struct progress healthy = {.reward = 0.4,
                                        .accuracy = 0.4,
                                        .zero_spread = 0.25,
                                        .grad_norm = 0.5,
                                        .kl = NAN,
                                        .entropy = 1.5,
                                        .max_entropy = 10};

// How often `part` is said in n such steps. Nothing else may be.
static int times_said(struct divergence *s, const struct progress *signs, int n, const char *part)
{
    int said = 0;
    for (int i = 0; i < n; i++) {
        SCOPED(bytes_release) struct bytes text = BYTES_INIT;
        divergence_check(s, signs, &text);
        if (text.len) {
            assert_contains(bytes_text(&text), part);
            assert_true(text.data[text.len - 1] == '\n');
            said++;
        }
    }
    return said;
}

static void assert_sums_up(const struct divergence *s, const char *part)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    divergence_summary(s, &text);
    if (part)
        assert_contains(bytes_text(&text), part);
    else
        assert_int_equal(text.len, 0);
}

TEST(a_healthy_run_is_left_alone)
{
    struct divergence s = {0};
    assert_sums_up(&s, NULL);
    assert_int_equal(times_said(&s, &healthy, 5000, "nothing"), 0);
    assert_sums_up(&s, NULL);
}

TEST(rewards_without_spread)
{
    struct divergence s = {0};
    struct progress flat = healthy;
    flat.zero_spread = 1;
    flat.grad_norm = 0;
    flat.accuracy = flat.reward = 0;
    assert_int_equal(times_said(&s, &flat, 9, "same reward"), 0);
    assert_int_equal(times_said(&s, &flat, 1, "no sample was right"), 1);
    assert_int_equal(times_said(&s, &flat, 1990, "same reward"), 2); // at 100 and 1000
    assert_sums_up(&s, "in none of the 2000 steps");
    assert_int_equal(times_said(&s, &healthy, 1, ""), 0); // it begins anew
    assert_sums_up(&s, NULL);
    flat.accuracy = flat.reward = 1;
    assert_int_equal(times_said(&s, &flat, 99, "take harder prompts"), 1);
    s = (struct divergence){0};
    flat.accuracy = -1;
    assert_int_equal(times_said(&s, &flat, 99, "look at --reward"), 1);
    s = (struct divergence){0};
    flat.reward = flat.teacher = NAN; // no term applies to any sample
    assert_int_equal(times_said(&s, &flat, 99, "the same reward, or none (mean nan)"), 1);
    assert_sums_up(&s, "in none of the 99 steps");
}

// Distillation without a reward has no spread of rewards, and learns.
TEST(a_teacher_alone)
{
    struct divergence s = {0};
    struct progress taught = healthy;
    taught.reward = NAN;
    taught.accuracy = -1;
    taught.zero_spread = 1;
    assert_int_equal(times_said(&s, &taught, 2000, "nothing"), 0);
    assert_sums_up(&s, NULL);
}

TEST(no_right_sample)
{
    struct divergence s = {0};
    struct progress wrong = healthy;
    wrong.accuracy = 0; // other terms differ
    assert_int_equal(times_said(&s, &wrong, 99, "no sample was right"), 1);
    wrong.accuracy = 0.01;
    assert_int_equal(times_said(&s, &wrong, 99, ""), 0);
}

TEST(masked_samples)
{
    struct divergence s = {0};
    struct progress still = healthy;
    still.grad_norm = 0;
    assert_int_equal(times_said(&s, &still, 99, "--mask-truncated-completions"), 1);
    still.grad_norm = NAN; // skipped: said elsewhere
    assert_int_equal(times_said(&s, &still, 99, ""), 0);
}

TEST(divergence)
{
    struct divergence s = {0};
    struct progress bad = healthy;
    bad.grad_norm = 80;
    assert_int_equal(times_said(&s, &bad, 1, ""), 0); // nothing to compare it with
    s = (struct divergence){0};
    assert_int_equal(times_said(&s, &healthy, 20, ""), 0);
    assert_int_equal(times_said(&s, &bad, 3, "160 times what it was of late"), 1);
    bad = healthy;
    bad.kl = 0.2;
    assert_int_equal(times_said(&s, &bad, 20, ""), 0);
    bad.kl = 2;
    assert_int_equal(times_said(&s, &bad, 20, "KL divergence from the start is 2 a token"), 2);
    bad.kl = NAN;
    bad.entropy = 9.5;
    assert_int_equal(times_said(&s, &bad, 5, "close to noise"), 1);
    s = (struct divergence){0}; // it was so from the first step on: a model that knows nothing yet
    assert_int_equal(times_said(&s, &bad, 50, ""), 0);
}

// As it went with --learning-rate 0.1: the entropy rises far, then nothing of it is left. One that
// falls as a policy learns is no such thing, nor is noise about a small one.
TEST(collapse)
{
    static const double entropies[] = {0.78, 1.5, 3.2, 1.2, 0.41, 0.2};
    struct divergence s = {0};
    struct progress step = healthy;
    for (size_t i = 0; i < sizeof entropies / sizeof *entropies; i++) {
        step.entropy = entropies[i];
        assert_int_equal(times_said(&s, &step, 1, "rose to 3.20 and is 0.20"), entropies[i] < 0.39);
    }
    s = (struct divergence){0};
    for (step.entropy = 1.5; step.entropy > 0.01; step.entropy *= 0.9)
        assert_int_equal(times_said(&s, &step, 1, ""), 0);
    s = (struct divergence){0};
    for (int i = 0; i < 30; i++) {
        step.entropy = i % 2 ? 0.2 : 0.02;
        assert_int_equal(times_said(&s, &step, 1, ""), 0);
    }
}

// ---- the best evaluation ------------------------------------------------------------------------

TEST(higher_is_better)
{
    struct best b = BEST_NONE;
    assert_false(best_consider(&b, 0, NAN)); // nothing to compare with yet
    assert_int_equal(b.step, -1);
    assert_int_equal(b.waited, 0);
    assert_true(best_consider(&b, 10, -2));
    assert_false(best_consider(&b, 20, -2)); // equal
    assert_false(best_consider(&b, 30, -INFINITY));
    assert_false(best_consider(&b, 40, NAN));
    assert_int_equal(b.step, 10);
    assert_int_equal(b.waited, 3);
    assert_true(best_consider(&b, 50, -1.999999999));
    assert_int_equal(b.step, 50);
    assert_int_equal(b.waited, 0);
}

TEST(through_a_checkpoint)
{
    struct best b = BEST_NONE, again = {.step = 7};
    json_t *json = best_to_json(&b);
    assert_ok(best_from_json("x", json, &again));
    assert_int_equal(again.step, -1);
    json_decref(json);
    again.step = 7;
    assert_ok(best_from_json("x", NULL, &again)); // a checkpoint of before there were evaluations
    assert_int_equal(again.step, -1);

    best_consider(&b, 12, 1.0 / 3);
    best_consider(&b, 13, 0);
    json = best_to_json(&b);
    char *text = test_keep(json_dumps(json, 0));
    json_decref(json);
    json = json_loads(text, 0, NULL);
    assert_ok(best_from_json("x", json, &again));
    assert_int_equal(again.step, 12);
    assert_int_equal(again.waited, 1);
    assert_true(again.score == 1.0 / 3);
    json_decref(json);
}

TEST(bad_ones_are_refused)
{
    static const char *const cases[] = {"[]",
                                        "{}",
                                        "{\"step\": 3}",
                                        "{\"score\": 1}",
                                        "{\"step\": -3, \"score\": 1}",
                                        "{\"step\": 3, \"score\": \"high\"}",
                                        "{\"step\": 3, \"score\": 1, \"waited\": -1}"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct best b = {.step = 5};
        json_t *json = test_keep(json_loads(cases[i], 0, NULL));
        assert_true(best_from_json("state.json", json, &b) != ST_OK);
        assert_message("state.json");
        assert_int_equal(b.step, 5);
    }
}
