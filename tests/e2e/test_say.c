/* test_say.c: what a run says while it goes on: warnings where nothing can be learnt, the progress
 * line, and debug lines in both programs. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

// --log-level debug: stages of a step, publishes, requests; in both programs, and only there.
TEST_IN(debug_lines, scene_open)
{
    train_rows(s, "say", "without_debug", train);
    daemon_start(&s->daemon, s->model, args("--log-level debug"));
    train_rows(s, "say", "debug_lines", train);
    assert_int_equal(daemon_stop(&s->daemon), 0);
    char *log = test_read(s->daemon.log);
    assert_contains(log, "debug: POST /v1/rollouts: 200, ");
    assert_contains(log, "debug: engine: the trainer's update: version 6, ");
}

// A run in which every sample is worth the same says so, when it is clear and at its end.
TEST_IN(nothing_to_learn, scene_open)
{
    train_rows(s, "say", "nothing_to_learn", train);
    // the last one wants warnings alone: no progress
    assert_string_equal(test_read(test_path(s->folder, "trainer.log")), "");
}
