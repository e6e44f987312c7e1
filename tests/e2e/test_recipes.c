/* test_recipes.c: options of recipes on whole runs: that each reaches the run, what it adds to
 * metrics.jsonl, and that a run taken up again goes on as one that never ended. */
#include "common/base/json.h"
#include "tests/support/daemon.h"
#include "tests/support/training.h"

#include <math.h>

#define ADAPTIVE                                                                                   \
    "--steps-per-generation", "3", "--count-steps", "updates", "--lr-scheduler-type", "linear",    \
        "--use-adaptive-entropy", "--entropy-coef", "0.01", "--entropy-target", "100",             \
        "--top-entropy-quantile", "0.5", "--off-policy-mask-threshold", "0.5", "--loss-type",      \
        "sapo", "--clamp-log-ratios"

// 12 updates of 3 a rollout are 4 steps; the coefficient grows by each update, and a checkpoint
// keeps it.
static void updates_are_counted(void **state)
{
    (void)state;
    struct scene s;
    double rates[8], coefs[8], losses[8], again[8];
    scene_open(&s);
    assert_int_equal(train(&s, "whole", OPTIONS("--max-steps", "12", ADAPTIVE)), 0);
    assert_int_equal(column(&s, "whole", "learning_rate", rates, 8), 4);
    column(&s, "whole", "entropy_coef", coefs, 8);
    column(&s, "whole", "loss", losses, 8);
    for (int i = 0; i < 4; i++) {
        assert_true(fabs(rates[i] - 1e-3 * (1 - (3 * i + 2) / 12.0)) < 1e-9);
        assert_true(fabs(coefs[i] - (0.01 + 0.005 * 3 * (i + 1))) < 1e-9);
    }
    json_t *m = last_metrics(&s, "whole");
    assert_true(metric(m, "policy_loss") > metric(m, "loss"));
    assert_true(metric(m, "off_policy_mask/sequences") == 0);
    assert_true(metric(m, "weight_version") == 2 + 2 * 12);
    json_decref(m);
    assert_int_equal(train(&s, "cut", OPTIONS("--max-steps", "6", ADAPTIVE)), 0);
    assert_int_equal(
        train(&s, "cut", OPTIONS("--resume", "--max-steps", "12", "--save-steps", "2")), 0);
    column(&s, "cut", "entropy_coef", again, 8);
    for (int i = 0; i < 4; i++) assert_true(again[i] == coefs[i]);
    scene_close(&s);
}

static void what_does_not_go_is_named(void **state)
{
    (void)state;
    static const struct {
        const char *options[5], *part;
    } refused[] = {
        {{"--steps-per-generation", "4", NULL}, "an update learns from whole groups"},
        {{"--loss-type", "luspo", NULL}, "needs --importance-sampling-level sequence"},
        {{"--entropy-coef-min", "2", NULL}, "--entropy-coef-min 2 is above"},
        {{"--lr-scheduler-type", "warmup_stable_decay", NULL}, "needs --num-decay-steps"},
    };
    struct scene s;
    scene_open(&s);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        assert_int_equal(train_alone(&s, "refused", refused[i].options), 2);
        assert_said(&s, refused[i].part);
    }
    assert_int_equal(train_alone(&s, "refused",
                                 OPTIONS("--max-steps", "4", "--steps-per-generation", "3",
                                         "--count-steps", "updates")),
                     2);
    assert_said(&s, "no multiple of the 3 updates");
    scene_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(updates_are_counted),
        cmocka_unit_test(what_does_not_go_is_named),
    };
    return cmocka_run_group_tests_name("recipes", tests, NULL, NULL);
}
