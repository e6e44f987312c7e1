/* test_recipes.c: options of recipes on whole runs: that each reaches the run, what it adds to
 * metrics.jsonl, and that a run taken up again goes on as one that never ended. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/reference.h"
#include "tests/support/training.h"
#include "trainer/run/runlog.h"

#define ADAPTIVE                                                                                   \
    " --steps-per-generation 3 --count-steps updates --lr-scheduler-type linear "                  \
    "--use-adaptive-entropy --entropy-coef 0.01 --entropy-target 100 --top-entropy-quantile 0.5 "  \
    "--off-policy-mask-threshold 0.5 --loss-type sapo --clamp-log-ratios"

// 12 updates of 3 a rollout are 4 steps; the coefficient grows by each update, and a checkpoint
// keeps it.
TEST_IN(updates_are_counted, scene_open)
{
    double rates[8], coefs[8], losses[8], again[8];
    assert_train(s, 0, "whole", "--max-steps 12" ADAPTIVE);
    assert_int_equal(column(s, "whole", "learning_rate", rates, 8), 4);
    column(s, "whole", "entropy_coef", coefs, 8);
    column(s, "whole", "loss", losses, 8);
    for (int i = 0; i < 4; i++) {
        assert_true(fabs(rates[i] - 1e-3 * (1 - (3 * i + 2) / 12.0)) < 1e-9);
        assert_true(fabs(coefs[i] - (0.01 + 0.005 * 3 * (i + 1))) < 1e-9);
    }
    json_t *m = last_metrics(s, "whole");
    assert_true(metric(m, "policy_loss") > metric(m, "loss"));
    assert_true(metric(m, "off_policy_mask/sequences") == 0);
    assert_true(metric(m, "weight_version") == 2 + 2 * 12);
    const double tokens = metric(m, "num_tokens");
    assert_true(tokens > 4 * 12 * metric(m, "completions/min_length"));
    assert_true(metric(m, "completions/mean_terminated_length") <
                metric(m, "completions/max_length"));
    assert_train(s, 0, "cut", "--max-steps 6" ADAPTIVE);
    assert_train(s, 0, "cut", "--resume --max-steps 12 --save-steps 2");
    column(s, "cut", "entropy_coef", again, 8);
    for (int i = 0; i < 4; i++) assert_true(again[i] == coefs[i]);
    column(s, "cut", "num_tokens", again, 8);
    assert_true(again[3] == tokens);
}

// A bound of 0 masks what the policy has moved away from in a step's first updates; config.json of
// a run of before it was a bound has 0 for none.
TEST_IN(a_bound_of_0, scene_open)
{
    double masked[4], max = 0;
    assert_train(s, 0, "bound",
                 "--max-steps 3 --steps-per-generation 3 --off-policy-mask-threshold 0");
    assert_int_equal(column(s, "bound", "off_policy_mask/sequences", masked, 4), 3);
    for (int i = 0; i < 3; i++) max = fmax(max, masked[i]);
    assert_true(max > 0 && max < 1);
    assert_said(s, "--off-policy-mask-threshold 0: samples of negative advantage count while");
    const char *path = test_path(s->folder, "bound/config.json");
    json_t *config = json_of_file(path);
    assert_int_equal(json_object_del(config, "metric_for_best_model"), 0);
    assert_ok(json_write_file(path, 0644, config));
    assert_train(s, 0, "bound", "--resume --max-steps 4");
    assert_false(said(s, "--off-policy-mask-threshold"));
    assert_false(said(s, "off_policy_mask_threshold"));
    json_t *m = last_metrics(s, "bound");
    assert_false(json_has(m, "off_policy_mask/sequences"));
}

// After one step of alpha 0.6 the reference is that mixture of the policy and of what it was; a run
// taken up again has it from the checkpoint.
TEST_IN(reference_moves, scene_open)
{
    struct reference start, policy, moved;
    assert_train(s, 0, "mixed",
                 "--max-steps 1 --beta 0.01 --sync-ref-model --ref-model-sync-steps 1");
    const char *folder = latest(s, "mixed");
    reference_open(s->model, "cpu", &start);
    reference_open(folder, "cpu", &policy);
    // with the policy's config
    assert_int_equal(system(test_text("cp -n %s/*.json %s/reference/", folder, folder)), 0);
    reference_open(test_path(folder, "reference"), "cpu", &moved);
    const float *a = start.weights->base, *b = policy.weights->base, *m = moved.weights->base;
    for (int64_t i = 0; i < start.weights->n_elements; i++)
        assert_true(fabs(m[i] - (0.6 * b[i] + 0.4 * a[i])) < 1e-7);
    reference_close(&start);
    reference_close(&policy);
    reference_close(&moved);
    assert_train(s, 0, "mixed", "--resume --max-steps 2");
    assert_said(s, "as --sync-ref-model has moved it");
    // with alpha 1 the policy is its own reference at the beginning of each step
    assert_train(s, 0, "copied",
                 "--max-steps 3 --beta 0.01 --sync-ref-model --ref-model-sync-steps 1 "
                 "--ref-model-mixup-alpha 1");
    each_within(s, "copied", "kl", 3, 0, 0);
}

// Half a unit in the last of METRICS_DIGITS digits: by so much a number of the metrics, each of
// which is rounded by itself, may differ from what it was.
static double last_digit(double x)
{
    return x == 0 ? 0 : 0.5 * pow(10, floor(log10(fabs(x))) - (METRICS_DIGITS - 1)) * (1 + 1e-6);
}

TEST_IN(kl_is_priced, scene_open)
{
    double kl[3], price[3], rewards[3], lengths[3];
    assert_train(
        s, 0, "priced",
        "--max-steps 3 --kl-reward-coef 0.5 --learning-rate 1e-2 --advantage-estimator rloo");
    assert_int_equal(column(s, "priced", "kl_reward/kl", kl, 3), 3);
    column(s, "priced", "rewards/kl", price, 3);
    column(s, "priced", "reward", rewards, 3);
    column(s, "priced", "rewards/length/mean", lengths, 3);
    assert_true(kl[0] == 0 && kl[1] != 0 && kl[2] != 0);
    for (int i = 0; i < 3; i++) {
        assert_true(fabs(price[i] + 0.5 * kl[i]) <= last_digit(price[i]) + 0.5 * last_digit(kl[i]));
        assert_true(fabs(rewards[i] - lengths[i] - price[i]) < 1e-6);
    }
    // beside costs it is no part of the task's reward
    assert_train(s, 0, "costs", "--max-steps 2 --kl-reward-coef 0.5 --learning-rate 1e-2 --cost");
    json_t *m = last_metrics(s, "costs");
    assert_true(metric(m, "rewards/kl") != 0);
    assert_true(fabs(metric(m, "rewards/task") - metric(m, "rewards/length/mean")) < 1e-6);
}

// A program that scores every second sample alone.
TEST_IN(null_is_no_reward, scene_open)
{
    const char *text = "while read -r line; do\n"
                       "echo '{\"reward\": null}'; read -r line; echo '{\"reward\": 2}'\ndone\n";
    assert_train(s, 0, "run", "--max-steps 1 --reward %s --log-completions", scene_scorer(s, text));
    json_t *m = last_metrics(s, "run");
    assert_true(metric(m, "reward") == 2 && metric(m, "frac_reward_zero_std") == 1);
    assert_true(metric(m, "grad_norm") == 0);
    assert_contains(test_read(test_path(s->folder, "run/rollouts/step-1.jsonl")),
                    "\"reward\":null");
}

// Rewards that are 0 or 1 by chance: flat groups are replaced until none is left, or the bound is
// reached; all of it is a function of the seed.
TEST_IN(flat_groups_are_drawn_anew, scene_open)
{
    double plain[4], kept[4], drawn[4], flat[4], again[4], norms[4];
#define CHANCE                                                                                     \
    "--max-steps 3 --reward regex --reward-pattern [a-f] --num-generations 2 "                     \
    "--max-completion-length 3 --logging-steps 1 "
    assert_train(s, 0, "plain", CHANCE);
    assert_train(s, 0, "one", CHANCE "--filter-groups 1");
    assert_train(s, 0, "many", CHANCE "--filter-groups 50");
    assert_train(s, 0, "same", CHANCE "--filter-groups 50");
    assert_int_equal(column(s, "plain", "frac_reward_zero_std", plain, 4), 3);
    column(s, "one", "filter_groups/flat", kept, 4);
    column(s, "one", "filter_groups/drawn", drawn, 4);
    assert_true(plain[0] > 0 && fabs(drawn[0] - 3 * plain[0]) < 1e-9); // 3 prompts a step
    assert_true(kept[0] <= plain[0]);
    each_within(s, "many", "filter_groups/flat", 3, 0, 0);
    column(s, "many", "frac_reward_zero_std", flat, 4);
    column(s, "many", "grad_norm", norms, 4);
    column(s, "same", "grad_norm", again, 4);
    const bool bits = on_cpu(); // on a GPU they want --exact
    for (int i = 0; i < 3; i++)
        assert_true(flat[i] == 0 && norms[i] > 0 && (norms[i] == again[i] || !bits));
    json_t *m = last_metrics(s, "many");
    assert_true(metric(m, "filter_groups/reward") >= 0 && metric(m, "reward") == 0.5);
}

TEST_ROWS(what_does_not_go_is_named, "recipes", scene_open, train)

TEST_ROWS(what_has_no_effect_is_said, "recipes", scene_open, train)

// Samples are not compared with the greedy ones of before.
TEST_IN(other_evaluations_are_not_compared, scene_open)
{
#define EVALUATED "--eval-data %s --eval-limit 2 --max-steps "
    assert_train(s, 0, "run", EVALUATED "1", s->data);
    assert_train(s, 0, "run", EVALUATED "2 --resume --eval-temperature 1 --num-generations-eval 2",
                 s->data);
    assert_said(s, "is not compared with those to come");
}
