/* test_processed.c: training on samples of a filtered distribution: the weights of truncated
 * importance sampling are by what was sampled from, or as if nothing had been filtered. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/training.h"

#define RATIO  "sampling/importance_sampling_ratio/"
#define FILTER "--top-k 3 --max-steps 1 --importance-sampling-mode token_truncate"

TEST_IN(weights_are_retained_mass, scene_open)
{
    const double rounding = on_cpu() ? 1e-6 : 0.05;
    assert_train(s, 0, "whole", FILTER " --top-k 0");
    assert_false(said(s, "filtered"));
    json_t *m = last_metrics(s, "whole");
    assert_float_equal(metric(m, RATIO "mean"), 1, rounding);
    // random weights spread over the vocabulary: three tokens have little of the mass
    assert_train(s, 0, "filtered", FILTER);
    assert_said(s, "weighed by its probabilities over those that sampled");
    assert_false(said(s, "long ones hardly count"));
    m = last_metrics(s, "filtered");
    assert_true(metric(m, RATIO "max") < 0.5);
    assert_true(metric(m, RATIO "min") > 0);
    assert_true(metric(m, "sampler_mismatch/max") <= rounding);
    assert_train(s, 0, "sequences", "--top-k 3 --max-steps 1");
    assert_said(s, "sequence_mask: these weights, at most 1 a token, are multiplied");
    assert_train(s, 0, "raw", FILTER " --no-processed-logprobs");
    assert_said(s, "nothing corrects for it");
    m = last_metrics(s, "raw");
    assert_float_equal(metric(m, RATIO "mean"), 1, rounding);
}
