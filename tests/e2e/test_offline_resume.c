/* test_offline_resume.c: a run of cw-trainer sft or dpo that is killed at any moment and taken up
 * again ends in the bits of one that was not. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/offline.h"

#define ON 10 // steps from the last checkpoint of the killed run to the end

static void kill_after_a_checkpoint(struct scene *s, const char *command,
                                    const char *const options[])
{
    struct test_child child = {0};
    offline_start(s, command, "killed", options, &child);
    test_wait_for_file(latest(s, "killed"), LIMIT_MS, &child);
    test_kill(&child, SIGKILL);
    assert_int_equal(test_wait(&child, LIMIT_MS), 128 + SIGKILL);
}

// All of metrics.jsonl but the time that a step took.
static json_t *lines_of(const struct scene *s, const char *run)
{
    json_t *lines = metrics_of(s, run), *m;
    size_t i;
    json_array_foreach (lines, i, m) json_object_del(m, "step_s");
    return lines;
}

static void same_metrics(const struct scene *s, int n)
{
    json_t *a = lines_of(s, "killed"), *b = lines_of(s, "whole");
    assert_int_equal(json_array_size(b), n + 1); // with that of step 0
    if (!json_equal(a, b))
        fail_msg("%s\n%s", json_dumps(a, JSON_INDENT(1)), json_dumps(b, JSON_INDENT(1)));
}

static void goes_on(const char *command, const char *const more[], const char *weights)
{
    struct scene s;
    const char *options[32] = {"--save-steps", "10", "--max-steps", "1000000"};
    int n = 4;
    offline_scene_open(&s);
    offline_sums(&s, strcmp(command, "dpo") == 0, 20);
    for (; *more; more++) options[n++] = *more;
    options[n++] = "--eval-data", options[n++] = s.data;
    options[n++] = "--eval-steps", options[n++] = "5";
    kill_after_a_checkpoint(&s, command, options);
    const int saved = saved_step(&s, "killed");
    assert_int_equal(saved % 5, 0); // the best evaluation has a checkpoint too
    const char *steps = test_text("%d", saved + ON);
    // all options but this are the folder's
    assert_offline(&s, 0, command, "killed", "--resume --max-steps %s", steps);
    assert_said(&s, "resumed at step ");
    options[3] = steps;
    assert_int_equal(offline_train(&s, command, "whole", options), 0);
    same_metrics(&s, saved + ON);
    const char *a = latest(&s, "killed"), *b = latest(&s, "whole");
    test_same_file(a, b, weights);
    test_same_file(test_path(a, "trainer"), test_path(b, "trainer"), "optimizer.safetensors");
}

TEST(all_weights)
{
    goes_on("sft", args("--examples-per-step 3"), "model.safetensors");
}

TEST(an_adapter_with_dropout)
{
    goes_on("sft", args("--lora-r 4 --lora-dropout 0.2"), "adapter_model.safetensors");
}

TEST(pairs)
{
    goes_on("dpo", args("--beta 0.2"), "model.safetensors");
}

TEST(an_adapter_of_pairs)
{
    goes_on("dpo", args("--lora-r 4"), "adapter_model.safetensors");
}

// What a kill in the midst of steps 11 to 20 leaves, with a learning rate that falls to 0.
TEST_IN(ten_and_ten_are_twenty, offline_scene_open)
{
    offline_sums(s, false, 20);
    const char *whole = test_path(s->folder, "out"), *again = test_path(s->folder, "again"),
               *checkpoints = test_path(s->folder, "run/checkpoints");
    assert_offline(
        s, 0, "sft", "run",
        "--max-steps 20 --save-steps 10 --lr-scheduler-type linear --warmup-steps 3 --out %s",
        whole);
    json_t *lines = lines_of(s, "run");
    assert_ok(file_remove_tree(test_path(checkpoints, "step-20")));
    assert_int_equal(unlink(latest(s, "run")), 0);
    assert_int_equal(symlink("step-10", latest(s, "run")), 0);
    assert_offline(s, 0, "sft", "run", "--resume --lr-scheduler-type linear --out %s", again);
    assert_said(s, "resumed at step 10 from ");
    test_same_file(whole, again, "model.safetensors");
    json_t *lines_again = lines_of(s, "run");
    assert_true(json_equal(lines, lines_again));
}

TEST_IN(a_signal_ends_with_a_checkpoint, offline_scene_open)
{
    struct test_child child = {0};
    offline_sums(s, false, 20);
    offline_start(s, "sft", "run", args("--max-steps 1000000 --save-steps 0"), &child);
    wait_for_steps(s, "run", 3, &child);
    test_kill(&child, SIGTERM);
    assert_int_equal(test_wait(&child, LIMIT_MS), 1);
    assert_said(s, "stopped at step ");
    assert_int_equal(saved_step(s, "run"), steps_done(s, "run"));
}

// What is half trained is not written as what was asked for, and the command that is said finishes
// it: in the run's folder, or where there is none in one that is made for it.
TEST_IN(a_signal_leaves_out_unwritten, offline_scene_open)
{
    char *log, *run, home[PATH_MAX];
    offline_sums(s, true, 20);
    assert_non_null(getcwd(home, sizeof home));
    assert_int_equal(chdir(s->folder), 0);
    for (int i = 0; i < 4; i++) {
        struct test_child child = {0};
        const char *command = i % 2 ? "dpo" : "sft", *out = test_path(s->folder, command);
        const char *const *argv = OPTIONS(
            test_binary("cw-trainer"), command, "--model", s->model, "--data", s->data, "--out",
            out, "--device", "cpu", "--eval-data", s->data, "--eval-steps", "1", "--max-steps",
            "1000000", i % 2 ? "--beta" : "--answer-field", i % 2 ? "0.1" : "chosen",
            i < 2 ? "--run-dir" : NULL, test_path(s->folder, "run"));
        test_write(test_path(s->folder, "trainer.log"), "", 0);
        test_spawn(&child, test_path(s->folder, "trainer.log"), argv);
        wait_for_log(s, "held-out loss");
        test_kill(&child, SIGTERM);
        assert_int_equal(test_wait(&child, LIMIT_MS), 1);
        assert_said(s, " is not written; go on from the checkpoint: cw-trainer ");
        assert_false(file_exists(out));
        log = test_read(test_path(s->folder, "trainer.log"));
        run = strstr(strstr(log, "go on from"), "--run-dir ") + strlen("--run-dir ");
        run[strcspn(run, " ")] = 0;
        assert_exit(0, test_command(test_path(s->folder, "trainer.log"), LIMIT_MS,
                                    args("%s %s --run-dir %s --resume --max-steps 1", argv[0],
                                         command, run)));
        assert_true(file_exists(test_path(out, "model.safetensors")));
        assert_ok(file_remove_tree(out));
        assert_ok(file_remove_tree(run));
    }
    assert_int_equal(chdir(home), 0);
}

// As that of train. Without epsilon and moments an update is of no finite size.
TEST_IN(an_error_saves_what_was_learned, offline_scene_open)
{
    offline_sums(s, false, 20);
    assert_offline(
        s, 1, "sft", "run",
        "--max-steps 60 --learning-rate 10 --adam-epsilon 0 --adam-beta1 0 --adam-beta2 0");
    assert_said(s, "gradient was not finite in 3 steps in a row");
    assert_said(s, "what was learned is saved: ");
    assert_int_equal(saved_step(s, "run"), steps_done(s, "run"));
}
