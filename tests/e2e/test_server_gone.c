/* test_server_gone.c: the server goes, in good order or not, while a trainer learns: what it
 * learned is saved from its mapping of the weights, and the run goes on from there to the same
 * bits. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

static int count_checkpoints(const struct scene *s, const char *run)
{
    return entries_of(test_path(test_path(s->folder, run), "checkpoints"), "step-");
}

static void end_server(struct scene *s, int signal)
{
    test_kill(&s->daemon.child, signal);
    test_wait(&s->daemon.child, LIMIT_MS);
}

// Ends in the middle of a run that saves nothing by itself, twice; the whole is a run that nothing
// happened to.
TEST_IN(nothing_is_lost, scene_open)
{
    struct test_child trainer = {0};
    static const int signals[] = {SIGKILL, SIGTERM};
    const char *const *run = args("--exact --max-steps 200 --save-steps 0 --save-minutes 0");
    daemon_start(&s->daemon, s->model, args("--exact --dtype %s", daemon_exact_dtype()));
    assert_int_equal(train(s, "whole", run), 0);
    daemon_kill(&s->daemon);
    for (int i = 0; i < 2; i++) {
        daemon_start(&s->daemon, s->model, args("--exact --dtype %s", daemon_exact_dtype()));
        start_trainer(s, &trainer, "parts", i ? args("--resume") : run);
        wait_for_steps(s, "parts", 5 + 50 * i, &trainer);
        end_server(s, signals[i]);
        assert_int_equal(test_wait(&trainer, LIMIT_MS), 1);
        assert_said(s, "what was learned is saved: ");
        assert_said(s, "error: ");
        assert_int_equal(saved_step(s, "parts"), steps_done(s, "parts"));
        assert_in_range(saved_step(s, "parts"), 5 + 50 * i, 199);
        assert_int_equal(count_checkpoints(s, "parts"), 2); // the next replaces it
        daemon_kill(&s->daemon);
    }
    daemon_start(&s->daemon, s->model, args("--exact --dtype %s", daemon_exact_dtype()));
    assert_train(s, 0, "parts", "--resume");
    test_same_file(latest(s, "whole"), latest(s, "parts"), "model.safetensors");
    test_same_file(latest(s, "whole"), latest(s, "parts"), "trainer/trainer_state.json");
    assert_int_equal(count_checkpoints(s, "parts"), 2);
}

// The server goes while the evaluation behind a step is half done: the step is saved, and its
// evaluation comes first when the run goes on.
TEST_IN(evaluation_is_made_up_for, scene_open)
{
    struct test_child trainer = {0};
    double steps[8], whole[8], parts[8];
    // 70 prompts go out in two requests, the second once the first one's are scored: of the
    // baseline 70 samples, of two steps 24, then the evaluation's
    const char *held_out = scene_prompts(s, "held-out.jsonl", 70);
    static const char script[] =
        "n=0\n"
        "while read -r line; do n=$((n + 1))\n"
        "if [ $n = 100 ] && [ ! -e \"$0.asked\" ]; then\n"
        "touch \"$0.asked\"; while [ ! -e \"$0.go\" ]; do sleep 0.05; done\n"
        "fi\n"
        "echo '{\"reward\": 1}'\n"
        "done\n";
    const char *scorer = test_path(s->folder, "scorer.sh"), *calm = test_path(s->folder, "calm.sh");
    test_write(scorer, script, strlen(script));
    test_write(calm, script, strlen(script));
    test_write(test_path(s->folder, "calm.sh.asked"), "", 0);
    for (int i = 0; i < 2; i++) {
        const char *run = i ? "parts" : "whole";
        start_trainer(s, &trainer, run,
                      args("--max-steps 3 --eval-data %s --eval-steps 2 --save-steps 0 "
                           "--reward 'length,command:sh %s'",
                           held_out, i ? scorer : calm));
        if (i) {
            test_wait_for_file(test_path(s->folder, "scorer.sh.asked"), LIMIT_MS, &trainer);
            end_server(s, SIGKILL);
            test_write(test_path(s->folder, "scorer.sh.go"), "", 0);
        }
        assert_int_equal(test_wait(&trainer, LIMIT_MS), i);
        daemon_start(&s->daemon, s->model, NULL);
    }
    assert_int_equal(saved_step(s, "parts"), 2);
    assert_int_equal(steps_done(s, "parts"), 2); // the baseline's and the first step's
    assert_train(s, 0, "parts", "--resume --reward 'length,command:sh %s'", scorer);
    assert_int_equal(column(s, "parts", "step", steps, 8), 4);
    for (int i = 0; i < 4; i++) assert_true(steps[i] == i);
    assert_int_equal(column(s, "whole", "eval/reward", whole, 8), 4);
    assert_int_equal(column(s, "parts", "eval/reward", parts, 8), 4);
    assert_true(whole[2] > 0);
    if (on_cpu()) assert_memory_equal(whole, parts, 4 * sizeof *whole);
}

// By the clock, whatever --save-steps is: a trainer that is killed goes on from there, and only the
// newest of these checkpoints stays.
TEST_IN(saves_by_the_clock, scene_open)
{
    struct test_child trainer = {0};
    start_trainer(s, &trainer, "run", args("--max-steps 100000 --save-minutes 0.0001"));
    wait_for_steps(s, "run", 6, &trainer);
    test_end(&trainer); // SIGKILL
    daemon_wait(&s->daemon);
    assert_true(saved_step(s, "run") >= 4);
    assert_in_range(count_checkpoints(s, "run"), 2, 3); // 3: killed before the older one went
    assert_train(s, 0, "run", "--max-steps 3 --resume");
}

// Any other error in the middle of a run saves what was learned before it, too.
TEST_IN(other_errors_lose_nothing, scene_open)
{
    static const char script[] = "n=0\n"
                                 "while read -r line; do n=$((n + 1))\n"
                                 "[ $n -le 30 ] && echo '{\"reward\": '$((n % 3))'}' || echo no\n"
                                 "done\n";
    assert_train(s, 1, "run", "--max-steps 9 --reward %s", scene_scorer(s, script));
    assert_said(s, "what was learned is saved: ");
    assert_said(s, "error: ");
    assert_int_equal(saved_step(s, "run"), 2);
    daemon_holds(&s->daemon, "policy", latest(s, "run"));
}
