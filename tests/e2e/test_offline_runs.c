/* test_offline_runs.c: the run folder of cw-trainer sft: what it records, what it replaces and what
 * it refuses to go on with; adapters; held-out examples. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/adapter.h"
#include "tests/support/offline.h"

static void open_sums(struct scene *s)
{
    offline_scene_open(s);
    offline_sums(s, false, 12);
}

TEST_IN(what_a_run_leaves, open_sums)
{
    double have[8];
    assert_offline(s, 0, "sft", "run",
                   "--max-steps 6 --save-steps 2 --save-total-limit 2 --eval-data %s --eval-steps "
                   "3 --eval-limit 5",
                   s->data);
    assert_int_equal(steps_done(s, "run"), 7);
    json_t *m = last_metrics(s, "run");
    assert_true(metric(m, "step") == 6 && metric(m, "epoch") == 18 / 12.);
    assert_true(metric(m, "skipped_updates") == 0 && metric(m, "step_s") > 0);
    assert_true(metric(m, "learning_rate") == 1e-3);
    assert_int_equal(column(s, "run", "eval/loss", have, 8), 7);
    assert_true(have[0] > have[3] && have[3] > have[6] && have[6] > 0);
    assert_true(have[1] == 0 && have[2] == 0 && have[4] == 0);
    const char *folder = test_path(s->folder, "run");
    const json_t *run = json_of_file(test_path(folder, "run.json"));
    assert_int_equal(json_array_size(json_object_get(run, "starts")), 1);
    assert_true(metric(json_of_file(test_path(folder, "config.json")), "eval_limit") == 5);
    assert_false(file_exists(test_path(folder, "checkpoints/step-2")));
    assert_true(file_exists(test_path(folder, "checkpoints/step-4/trainer/optimizer.safetensors")));
    assert_true(file_exists(test_path(latest(s, "run"), "tokenizer.json")));
}

// The held-out loss is that of a run that learns nothing from the same examples.
TEST_IN(held_out_is_not_learnt, open_sums)
{
    double eval[4], loss[4];
    assert_offline(s, 0, "sft", "run",
                   "--max-steps 1 --learning-rate 0 --examples-per-step 12 --eval-data %s",
                   s->data);
    assert_int_equal(column(s, "run", "eval/loss", eval, 4), 2);
    assert_int_equal(column(s, "run", "loss", loss, 4), 2);
    assert_true(fabs(eval[0] - loss[1]) < 1e-6 && eval[0] == eval[1]);
}

TEST_ROWS(a_folder_that_holds_a_run, "offline_runs", open_sums, offline_row)
TEST_ROWS(no_run_to_go_on_with, "offline_runs", open_sums, trainer_alone)
TEST_ROWS(what_has_no_effect_is_said, "offline_runs", open_sums, offline_row)

// A model's config.json is where a run's would be.
TEST_IN(a_folder_that_holds_a_model, open_sums)
{
    const char *model = test_path(s->folder, "learnt"), *config = test_path(model, "config.json");
    assert_offline(s, 0, "sft", "run", "--max-steps 1 --out %s", model);
    char *before = test_read(config);
    assert_offline(s, 1, "sft", "learnt", "--max-steps 1");
    assert_said(s, "config.json is a model's, and the run");
    assert_offline(s, 2, "sft", "learnt", "--resume");
    assert_said(s, "take another --run-dir");
    assert_string_equal(before, test_read(config));
}

// The held-out lines say otherwise than those that are learnt, so that each step is worse than the
// start: the run ends after two evaluations, with the start's weights.
TEST(the_best_is_kept)
{
    static const char *const commands[] = {"sft", "dpo"};
    struct scene s;
    for (int i = 0; i < 2; i++) {
        const bool pairs = i == 1;
        offline_scene_open(&s);
        offline_sums(&s, pairs, 12);
        const char *held_out = test_path(s.folder, "held-out.jsonl"),
                   *out = test_path(s.folder, "out");
        const char *line =
            pairs ? "{\"prompt\": \"10+10=\", \"chosen\": \"10\", \"rejected\": \"20\"}\n"
                  : "{\"prompt\": \"10+10=\", \"completion\": \"zzz\"}\n";
        test_write(held_out, line, strlen(line));
        assert_offline(&s, 0, commands[i], "run",
                       "--max-steps 20 --eval-data %s --eval-steps 2 --early-stop-patience 2 "
                       "--load-best-model-at-end --learning-rate 1e-2 --out %s",
                       held_out, out);
        assert_said(&s, "; the best was at step 0");
        assert_said(&s, "stopped early at step 4 of 20: 2 evaluations in a row were no better");
        assert_said(&s, "the weights are those of step 0, the best");
        const char *checkpoints = test_path(s.folder, "run/checkpoints");
        test_same_file(out, test_path(checkpoints, "best"), "model.safetensors");
        test_same_file(out, test_path(checkpoints, "step-0"), "model.safetensors");
        assert_true(file_exists(test_path(checkpoints, "step-4")));
        // what was the best is known to a run that goes on, which has nothing left to do
        assert_offline(&s, 0, commands[i], "run",
                       "--resume --overwrite --learning-rate 1e-2 --out %s", out);
        assert_said(&s, "stopped early at step 4 of 20");
        assert_offline(&s, 0, commands[i], "run",
                       "--resume --early-stop-patience 3 --overwrite --out %s", out);
        assert_said(&s, "stopped early at step 6 of 20");
        test_same_file(out, test_path(checkpoints, "step-0"), "model.safetensors");
    }
}

// Half files and folders of a trainer that was killed go when the run goes on.
TEST_IN(what_was_killed_is_swept, open_sums)
{
    static const char *const halves[] = {"metrics.jsonl.tmp.3d08ff", "config.json.tmp.3d08ff",
                                         "rollouts/step-1.jsonl.tmp.3d08ff",
                                         "workers/.step-1.3999999.new", ".start.3999999.new"};
    assert_offline(s, 0, "sft", "run", "--max-steps 1");
    const char *run = test_path(s->folder, "run");
    assert_ok(file_make_folders(test_path(run, "rollouts")));
    assert_ok(file_make_folders(test_path(run, "workers")));
    for (size_t i = 0; i < 5; i++) test_write(test_path(run, halves[i]), "x", 1);
    assert_offline(s, 0, "sft", "run", "--max-steps 2 --resume");
    for (size_t i = 0; i < 5; i++) assert_false(file_exists(test_path(run, halves[i])));
    assert_int_equal(steps_done(s, "run"), 2);
}

// What OpenBLAS has no room for it would wait for for ever.
TEST(a_small_address_space)
{
    static const char *const kilobytes[] = {"150000", "300000", "420000"};
    struct scene s;
#ifdef __SANITIZE_ADDRESS__
    test_skip("AddressSanitizer needs terabytes of it");
#endif
    open_sums(&s);
    const char *log = test_path(s.folder, "trainer.log");
    for (size_t i = 0; i < 3; i++) {
        const char *line = test_text(
            "ulimit -v %s; exec %s sft --model %s --data %s --out %s/out-%zu --max-steps 1 "
            "--device cpu",
            kilobytes[i], test_binary("cw-trainer"), s.model, s.data, s.folder, i);
        unlink(log);
        // the second and third are enough for a program with few libraries
        const int code = test_command(log, 60000, args("sh -c %s", line));
        if (!(code == 1 || (code == 0 && i > 0)))
            fail_msg("with %s kB it ended with %d: %s", kilobytes[i], code, test_read(log));
        if (code == 1) assert_said(&s, "raise ulimit -v");
    }
}

// --out of a run that goes on is replaced on request only, and the run is not.
TEST_IN(out_of_a_run_that_goes_on, open_sums)
{
    train_rows(s, "offline_runs", "out_of_a_run_that_goes_on", offline_row);
    test_same_file(test_path(s->folder, "out"), latest(s, "run"), "model.safetensors");
}

// The model is written last, in place of what stands there.
TEST_IN(out_is_not_where_the_run_is, open_sums)
{
    train_rows(s, "offline_runs", "out_is_not_where_the_run_is", offline_row);
    // of a run beside the one that --overwrite replaces
    const char *kept = test_path(s->folder, "run/checkpoints-kept");
    assert_int_equal(rename(test_path(s->folder, "run/model"), kept), 0);
    assert_offline(s, 0, "sft", "run", "--max-steps 1 --overwrite --model %s", kept);
}

TEST_IN(another_run_is_refused, open_sums)
{
    train_rows(s, "offline_runs", "another_run_is_refused", offline_row);
    remove(test_path(s->folder, "run/config.json"));
    assert_offline(s, 1, "sft", "run", "--resume --answer-field chosen");
    assert_said(s, "is of a run of cw-trainer dpo, not of sft");
}

// While examples are read, say, which takes longer than the test waits.
TEST_IN(a_second_signal_ends_at_once, offline_scene_open)
{
    static const char *const commands[] = {"sft", "dpo"};
    for (int i = 0; i < 2; i++) {
        struct test_child child = {0};
        offline_sums(s, i == 1, 2000000);
        test_write(test_path(s->folder, "trainer.log"), "", 0);
        offline_start(s, commands[i], commands[i], args("--max-steps 1"), &child);
        test_wait_for_file(test_path(s->folder, commands[i]), LIMIT_MS, &child);
        test_kill(&child, SIGTERM);
        wait_for_log(s, "once this step is done; a second one ends it at once");
        assert_true(test_running(&child));
        const int64_t start = clock_now_ns();
        test_kill(&child, SIGINT);
        assert_int_equal(test_wait(&child, LIMIT_MS), 1);
        assert_true(clock_ms_since(start) < 2000);
        assert_said(s, "second signal: ending at once");
        assert_false(file_exists(test_path(s->folder, "dpo/metrics.jsonl")));
    }
}

TEST_IN(without_a_run_folder, open_sums)
{
    const char *half = test_path(s->folder, ".out.3999999.new");
    assert_ok(file_make_folders(half)); // of a trainer that was killed
    test_write(test_path(half, "model.safetensors"), "half", 4);
    train_rows(s, "offline_runs", "without_a_run_folder", trainer_alone);
}

// The adapter's folder, as PEFT reads it, gives what the trained model gives.
TEST_IN(an_adapter, open_sums)
{
    const char *out = test_path(s->folder, "adapter"), *merged = test_path(s->folder, "merged");
    assert_offline(s, 0, "sft", "run",
                   "--max-steps 4 --lora-r 4 --lora-alpha 32 --lora-target q_proj,up_proj "
                   "--learning-rate 1e-2 --out %s --eval-data %s",
                   out, s->data);
    assert_said(s, "parameters are trained, beside");
    test_same_file(out, latest(s, "run"), "adapter_model.safetensors");
    const json_t *config = json_of_file(test_path(out, ADAPTER_CONFIG_FILE));
    assert_string_equal(text_of(config, "base_model_name_or_path"), s->model);
    test_output(0, OPTIONS(test_binary("cw-trainer"), "merge", "--model", s->model, "--adapter",
                           out, "--out", merged));
    // the merged model's loss is what the run ended with
    json_t *m = last_metrics(s, "run");
    const double ended = metric(m, "eval/loss");
    s->model = merged;
    assert_offline(s, 0, "sft", "again", "--max-steps 1 --learning-rate 0 --eval-data %s", s->data);
    m = last_metrics(s, "again");
    assert_true(fabs(metric(m, "eval/loss") - ended) < 1e-5);
    double losses[8];
    assert_int_equal(column(s, "run", "eval/loss", losses, 8), 5);
    assert_true(losses[0] - ended > 0.1); // it has learnt
}
