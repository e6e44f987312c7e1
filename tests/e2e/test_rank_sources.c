/* test_rank_sources.c: where samples come from, on two ranks: each samples its share of every step,
 * and all learn from the same; with other modes: test_combinations. This program is also an
 * environment: environment.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/environment.h"
#include "tests/support/pair.h"

// ---- runs ---------------------------------------------------------------------------------------

static void train_two(struct pair *p, const char *run, const char *const more[])
{
    scene_ended(&p->s, pair_run(p, run, more), 0);
}

TEST(environments_learn_as_one)
{
    struct pair p;
    double turns[2];
    pair_learns_as_one(&p, NULL, NULL,
                       args(PAIR_NUMBERS " --max-steps " PAIR_WHOLE
                                         " --reward environment --rollouts %s",
                            environment_of("4 turns")));
    assert_true(column(&p.s, "two", "environment/turns", turns, 2) > 0);
    assert_true(turns[0] == 2); // of the samples of both
    train_two(&p, "ahead",
              args(PAIR_NUMBERS " --max-steps 8 --reward environment --rollouts %s --async "
                                "--max-staleness 1",
                   environment_of("4 turns")));
    pair_holds(&p, "ahead");
}

TEST(sampling_ahead)
{
    struct pair p;
    double oldest[12], max = 0, mismatch[12];
    pair_open(&p);
    train_two(&p, "plain", args(PAIR_NUMBERS " --max-steps 12"));
    train_two(&p, "0", args(PAIR_NUMBERS " --max-steps 12 --async --max-staleness 0"));
    same_losses(&p.s, "plain", "0", 12, 0);
    test_same_file(latest(&p.s, "plain"), latest(&p.s, "0"), "model.safetensors");
    train_two(&p, "2", args(PAIR_NUMBERS " --max-steps 12 --async --max-staleness 2"));
    assert_int_equal(column(&p.s, "2", "rollout/staleness_max", oldest, 12), 12);
    column(&p.s, "2", "sampler_mismatch/max", mismatch, 12);
    for (int i = 0; i < 12; i++) {
        assert_true(oldest[i] <= 2);
        if (oldest[i] > max) max = oldest[i];
        if (oldest[i] == 0 && on_cpu()) assert_true(mismatch[i] == 0);
    }
    assert_true(max > 0);
    pair_holds(&p, "2");
}

// A worker is one rank's, and what it samples changes nothing; one that is gone is left out.
TEST(workers_sample_too)
{
    struct pair p;
    struct daemon workers[2] = {0};
    double samples[2][4];
    pair_open(&p);
    for (int i = 0; i < 2; i++) daemon_start(&workers[i], p.s.model, NULL);
    const char *words = test_text("%s,%s", workers[0].bridge, workers[1].bridge);
    train_two(&p, "plain", args(PAIR_NUMBERS " --prompts-per-step 12 --max-steps 4"));
    train_two(&p, "workers",
              args(PAIR_NUMBERS " --prompts-per-step 12 --max-steps 4 --workers %s", words));
    // on a GPU a sample's numbers are rounded by who else is in its batch, unless --exact
    same_losses(&p.s, "plain", "workers", 4, on_cpu() ? 0 : 1e-4);
    if (on_cpu())
        test_same_file(latest(&p.s, "plain"), latest(&p.s, "workers"), "model.safetensors");
    column(&p.s, "workers", "workers/1/samples", samples[0], 4);
    column(&p.s, "workers", "workers/2/samples", samples[1], 4);
    if (on_cpu()) each_within(&p.s, "workers", "sampler_mismatch/max", 4, 0, 0);
    each_within(&p.s, "workers", "workers/up", 4, 2, 2);
    for (int i = 0; i < 4; i++) assert_true(samples[0][i] > 0 && samples[1][i] > 0);
    daemon_holds(&workers[1], "policy", test_path(p.s.folder, "workers/workers"));
    for (int i = 0; i < 2; i++) daemon_kill(&workers[i]);
}

int main(int argc, char **argv)
{
    environment_main(argc, argv);
    return test_main();
}
