/* test_training.c: training a model that is served: in place, priced, masked, within the server's
 * context, and what is no way to call it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/reference.h"
#include "tests/support/training.h"

TEST_IN(trains_in_place, scene_open)
{
    const json_t *keys = test_rows("training", "metrics_of_a_step"), *key;
    size_t k;
    assert_train(
        s, 0, "run",
        "--max-steps 3 --beta 0.01 --num-iterations 2 --log-completions --token-budget 40");
    const json_t *lines = metrics_of(s, "run");
    for (int step = 1; step <= 3; step++) {
        const json_t *m = json_array_get(lines, (size_t)step - 1);
        assert_int_equal(int_of(m, "step"), step);
        // two published updates a step, from version 2
        assert_int_equal(int_of(m, "weight_version"), 2 + 4 * step);
        double mismatch = real_of(m, "sampler_mismatch/max");
        assert_true(json_is_number(json_object_get(m, "sampler_mismatch/max")) && mismatch <= 1e-5);
        assert_true(real_of(m, "grad_norm") > 0);
        assert_true(fabs(real_of(m, "sampling/importance_sampling_ratio/mean") - 1) < 1e-3);
        // the second update found the policy where the first had moved it
        assert_true(real_of(m, "importance_ratio/max") > 1);
        assert_true(real_of(m, "entropy") > 0);
        json_array_foreach (keys, k, key)
            if (!json_is_number(json_object_get(m, json_string_value(key))))
                fail_msg("step %d: no number %s in metrics.jsonl", step, json_string_value(key));
    }
    daemon_holds(&s->daemon, "policy", latest(s, "run"));
    assert_true(file_exists(test_path(s->folder, "run/rollouts/step-3.jsonl")));
    // what was trained is not what was loaded
    SCOPED(reference_close) struct reference before, after;
    reference_open(s->model, "cpu", &before);
    reference_open(latest(s, "run"), "cpu", &after);
    assert_memory_not_equal(before.weights->base, after.weights->base, 1024);
    assert_said(s, "0 extra");
    // a run is not overwritten by accident
    assert_train(s, 1, "run", "--max-steps 3");
    assert_said(s, "--resume");
}

// What serving costs is in the reward, each term by itself, and the terms add up.
TEST_IN(costs_of_inference, scene_open)
{
    assert_train(s, 0, "plain", "--max-steps 1 --gain-acceptance 2");
    assert_said(s, "--gain-acceptance has no effect without --cost");
    json_t *m = last_metrics(s, "plain");
    assert_null(json_object_get(m, "rewards/cost")); // measured all the same
    assert_true(metric(m, "inference/latency_ms") > 0 && metric(m, "inference/kv_memory_mb") > 0);
    assert_true(metric(m, "inference/cache_reuse_ratio") >= 0);
    assert_true(metric(m, "importance_ratio/min") == 1 && metric(m, "importance_ratio/max") == 1);
    assert_train(s, 0, "run",
                 "--max-steps 3 --cost --latency modelled --reward-normalise terms --cost-tokens "
                 "0.1 --log-completions");
    m = last_metrics(s, "run");
    double costs = metric(m, "rewards/cost/latency") + metric(m, "rewards/cost/tokens") +
                   metric(m, "rewards/cost/kv") + metric(m, "rewards/cost/acceptance") +
                   metric(m, "rewards/cost/cache");
    assert_true(fabs(costs - metric(m, "rewards/cost")) < 1e-6);
    assert_true(fabs(metric(m, "rewards/task") + costs - metric(m, "reward")) < 1e-6);
    assert_true(fabs(metric(m, "rewards/task") - metric(m, "rewards/length/mean")) < 1e-6);
    assert_true(
        fabs(metric(m, "rewards/cost/tokens") + 0.1 * metric(m, "completions/mean_length")) < 1e-6);
    assert_true(metric(m, "inference/latency_ms") > 0 && metric(m, "inference/kv_memory_mb") > 0);
    assert_true(metric(m, "inference/undrafted") == 1); // this daemon does not speculate
    assert_true(metric(m, "latency_model/r2") <= 1 + 1e-9);
    assert_said(s, "nothing was drafted for 12 of 12 samples");
    assert_said(s, "latency model of 36 samples");
    // the fit goes on where it was
    assert_train(s, 0, "run", "--max-steps 4 --cost --latency modelled --resume");
    assert_said(s, "latency model of 48 samples");
}

// Prompts of one length whose beginning is in the prefix cache: --gain-cache prices their share of
// it. The server has room for one prompt's samples, so that the next prompt finds it there.
TEST(the_prefix_cache_is_gained_from)
{
    struct scene s;
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
    scene_open_model(&s, daemon_model(test_folder(), true, 11), args("--max-batch 4"));
    for (int a = 10; a < 30; a++)
        bytes_printf(&lines, "{\"prompt\": \"this is what the sum of them is: %d+12=\"}\n", a);
    test_write(s.data, lines.data, lines.len);
    assert_train(&s, 0, "run", "--max-steps 2 --cost --gain-cache 8");
    json_t *m = last_metrics(&s, "run");
    const double reused = metric(m, "inference/cache_reuse_ratio");
    assert_true(reused > 0 && reused < 1);
    assert_true(fabs(metric(m, "rewards/cost/cache") - 8 * reused) < 1e-6);
}

// A command that scores nothing ends the run, naming the sample.
TEST_IN(command_that_fails, scene_open)
{
    static const char script[] =
        "n=0\n"
        "while read -r line; do n=$((n + 1))\n"
        "[ $n -le 7 ] && echo '{\"reward\": 1}' || echo '{\"reward\": \"none\"}'\n"
        "done\n";
    assert_train(s, 1, "run", "--max-steps 1 --reward %s",
                 test_text("exact,%s", scene_scorer(s, script)));
    assert_said(s, "data.jsonl, line ");
    assert_said(
        s,
        "sample 2: reward command"); // of the second group: the seventh behind the one tried
    assert_said(s, "not {\"reward\": NUMBER}");
}

// Every sample is cut off at the token limit: with the mask nothing is left to learn from.
TEST_IN(truncated_samples_are_masked, scene_open)
{
    for (int masked = 0; masked < 2; masked++) {
        const char *run = masked ? "masked" : "plain";
        assert_train(s, 0, run, "--max-steps 1 --ignore-eos %s",
                     masked ? "--mask-truncated-completions" : "--no-resume");
        json_t *m = last_metrics(s, run);
        assert_true(metric(m, "completions/clipped_ratio") == 1);
        assert_true(masked == (metric(m, "grad_norm") == 0));
        if (masked)
            daemon_holds(&s->daemon, "policy", test_path(s->folder, "masked/checkpoints/step-0"));
    }
}

// A daemon may serve less context than its model has: that is said before the run has a folder.
TEST_IN(context_of_the_daemon, scene_open)
{
    daemon_start(&s->daemon, s->model, args("--max-context 16"));
    assert_train(s, 1, "run", "--max-steps 1");
    assert_said(s, "over the 16 tokens of context that the server serves");
    assert_said(s, "--max-context");
    assert_false(file_exists(test_path(s->folder, "run")));
    assert_train(s, 0, "run", "--max-steps 1 --max-completion-length 4");
}

TEST(wrong_usage)
{
    struct scene s = {.folder = test_folder()};
    train_rows(&s, "training", "wrong_usage", trainer_alone);
}
