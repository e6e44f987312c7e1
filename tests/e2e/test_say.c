/* test_say.c: what a run says while it goes on: warnings where nothing can be learnt, the progress
 * line, and debug lines in both programs. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

// --log-level debug: stages of a step, publishes, requests; in both programs, and only there.
TEST(debug_lines)
{
    struct scene s;
    scene_open(&s);
    assert_int_equal(train_alone(&s, "plain", OPTIONS("--max-steps", "1")), 0);
    assert_false(said(&s, "debug: "));
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model, OPTIONS("--log-level", "debug"));
    assert_exit(0, train_alone(&s, "run", OPTIONS("--max-steps", "2", "--log-level", "debug")));
    assert_said(&s, "debug: POST /v1/rollouts: 3 x 4 samples");
    assert_said(&s, "debug: step 2: rollouts ");
    assert_said(&s, "debug: step 2: published version 6: ");
    assert_said(&s, "debug: step 2: checkpoint ");
    assert_int_equal(daemon_stop(&s.daemon), 0);
    char *log = test_read(s.daemon.log);
    assert_contains(log, "debug: POST /v1/rollouts: 200, ");
    assert_contains(log, "debug: engine: the trainer's update: version 6, ");
}

// A run in which every sample is worth the same says so, when it is clear and at its end.
TEST(nothing_to_learn)
{
    struct scene s;
    scene_open(&s);
    assert_exit(0, train_alone(&s, "flat", OPTIONS("--max-steps", "12", "--reward", "constant")));
    assert_said(&s, "warning: step 10: in the last 10 steps all samples of a prompt had the same");
    assert_said(&s, "warning: in none of the 12 steps did the rewards");
    assert_said(&s, "zero-spread 100.0%  grad norm 0  cut off ");
    assert_exit(0, train_alone(&s, "wrong", OPTIONS("--max-steps", "10", "--reward", "exact")));
    assert_said(&s, "no sample was right: look at some of them (--log-completions)");
    assert_exit(
        0, train_alone(&s, "sound",
                       OPTIONS("--max-steps", "12", "--beta", "0.1", "--num-iterations", "2")));
    assert_said(&s, "  kl 0.0000  grad norm ");
    assert_said(&s, "  clipped ");
    assert_false(said(&s, "loss"));
    assert_false(said(&s, "in the last") || said(&s, "in none of"));
    // warnings alone are wanted: no progress
    assert_exit(0, train_alone(&s, "quiet",
                               OPTIONS("--max-steps", "2", "--start-from", "current", "--log-level",
                                       "warn", "--prompt-template", "none")));
    char *log = test_read(test_path(s.folder, "alone.log"));
    assert_string_equal(log, "");
    assert_int_equal(daemon_stop(&s.daemon), 0);
}
