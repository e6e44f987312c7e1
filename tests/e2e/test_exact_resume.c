/* test_exact_resume.c: runs in two parts that end in the same bits as in one: plain, with a
 * curriculum, and in exact mode through deaths of either side; and with other options. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/spec_counters.h"
#include "tests/support/training.h"

// A run of 6 steps, and one of 3 that another trainer with another daemon takes to 6: the same
// bits.
TEST(resumes_to_the_bit)
{
    if (!on_cpu())
        test_skip("its steps are not exact on every GPU: exact_run_survives_everything asks for "
                  "those that are");
    struct scene s;
    scene_open(&s);
    assert_train(&s, 0, "whole", "--max-steps 6");
    daemon_start(&s.daemon, s.model, NULL);
    assert_train(&s, 0, "halves", "--max-steps 3 --resume");
    daemon_start(&s.daemon, s.model, NULL);
    assert_train(&s, 0, "halves", "--max-steps 6 --resume");
    assert_said(&s, "resumed at step 3");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "model.safetensors");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "trainer/optimizer.safetensors");
    assert_int_equal(steps_done(&s, "halves"), 6);
    daemon_holds(&s.daemon, "policy", latest(&s, "halves"));
    // with another seed it would be another run
    assert_train(&s, 1, "halves", "--max-steps 7 --resume --seed 1");
    assert_said(&s, "--seed");
}

// With a curriculum: 20 steps, and 10 that another trainer with another daemon takes to 20. An
// epoch is 20 examples in 7 steps at first, so that both halves end in the middle of one.
TEST(curriculum_resumes_to_the_bit)
{
    if (!on_cpu())
        test_skip("its steps are not exact on every GPU: exact_run_survives_everything asks for "
                  "those that are");
    struct scene s;
    double buckets[20], rollouts[20], epochs[20], again[20];
    scene_open(&s);
    assert_train(&s, 0, "whole", "--max-steps 20 --curriculum kde");
    assert_said(&s, "(cluster-report-epoch-2.txt)");
    assert_int_equal(column(&s, "whole", "curriculum/rollouts", rollouts, 20), 20);
    assert_int_equal(column(&s, "whole", "curriculum/bucket", buckets, 20), 20);
    assert_int_equal(column(&s, "whole", "epoch", epochs, 20), 20);
    bool varies = false;
    for (int i = 0; i < 20; i++) {
        assert_true(rollouts[i] >= 4 && rollouts[i] <= 10);
        assert_true((buckets[i] == 0) == (i < 7)); // the first epoch knows no rewards
        if (i < 7) assert_int_equal(rollouts[i], 7);
        varies |= rollouts[i] != rollouts[i / 7 * 7];
    }
    assert_true(varies);
    assert_true(epochs[6] == 1);

    daemon_start(&s.daemon, s.model, NULL);
    assert_train(&s, 0, "halves", "--max-steps 10 --curriculum kde");
    daemon_start(&s.daemon, s.model, NULL);
    assert_train(&s, 0, "halves", "--max-steps 20 --curriculum kde --resume");
    assert_said(&s, "resumed at step 10");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "model.safetensors");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "trainer/optimizer.safetensors");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "trainer/trainer_state.json");
    for (int epoch = 1; epoch <= 2; epoch++) {
        const char *name = test_text("cluster-report-epoch-%d.txt", epoch);
        test_same_file(test_path(s.folder, "whole"), test_path(s.folder, "halves"), name);
    }
    column(&s, "halves", "curriculum/rollouts", again, 20);
    assert_memory_equal(rollouts, again, sizeof again);

    // another order of the data would be another run
    assert_train(&s, 1, "halves", "--max-steps 21 --resume --curriculum off");
    assert_said(&s, "--curriculum kde");
    assert_train(&s, 1, "halves", "--max-steps 21 --resume --curriculum kde --prompts-per-step 4");
    assert_said(&s, "--prompts-per-step 3");
}

// By epochs: each ends with its report, and the run with the last of them.
TEST_IN(uniform_curriculum, scene_open)
{
    double samples[32] = {0}, rollouts[32], epochs[32];
    assert_train(s, 0, "run", "--num-train-epochs 2 --curriculum uniform");
    int n = column(s, "run", "epoch", epochs, 32);
    assert_in_range(n, 14, 16); // each bucket may end in a batch that is not full
    assert_true(epochs[n - 1] == 2);
    column(s, "run", "curriculum/samples", samples, 32);
    column(s, "run", "curriculum/rollouts", rollouts, 32);
    assert_true(samples[6] == 20 * 7 && rollouts[6] == 7);
    double low = 10, high = 4;
    for (int i = 7; i < n; i++) {
        low = fmin(low, rollouts[i]);
        high = fmax(high, rollouts[i]);
    }
    assert_true(high - low <= 1);
    assert_true(file_exists(test_path(s->folder, "run/cluster-report-epoch-2.txt")));
    assert_false(file_exists(test_path(s->folder, "run/cluster-report-epoch-3.txt")));
}

// What a resumed run does otherwise is said, and a best that cannot be compared is not kept.
TEST_IN(resumes_with_other_options, scene_open)
{
    char to[512];
    const char *best = test_path(s->folder, "run/checkpoints/best");
    // no weight moves: every evaluation is as good as the baseline
    const char *const *still =
        args("--max-steps 2 --eval-data %s --eval-steps 1 --learning-rate 0", s->data);
    assert_int_equal(train(s, "run", still), 0);
    ssize_t n = readlink(best, to, sizeof to);
    assert_true(n == 6 && memcmp(to, "step-0", 6) == 0);

    const char *const *same =
        args("--max-steps 3 --eval-data %s --eval-steps 1 --learning-rate 0 --resume", s->data);
    assert_int_equal(train(s, "run", same), 0);
    assert_null(strstr(test_read(test_path(s->folder, "trainer.log")), "with other options"));
    assert_said(s, "the best was at step 0");

    const char *const *other = args(
        "--max-steps 4 --eval-data %s --eval-steps 1 --learning-rate 1e-6 --eval-limit 5 --resume",
        s->data);
    assert_int_equal(train(s, "run", other), 0);
    assert_said(s, "warning: the run goes on with other options: ");
    assert_said(s, "learning_rate 1e-6 (was 0.0)");
    assert_said(s, "eval_limit 5 (was 0)");
    assert_said(s, "their best, step 0, is not compared");
    n = readlink(best, to, sizeof to);
    assert_true(n == 6 && memcmp(to, "step-4", 6) == 0);
}

static void same_column(const struct scene *s, const char *a, const char *b, const char *key, int n)
{
    double x[32], y[32];
    assert_int_equal(column(s, a, key, x, 32), n);
    assert_int_equal(column(s, b, key, y, 32), n);
    for (int i = 0; i < n; i++)
        if (x[i] != y[i])
            fail_msg("line %d, %s: %.17g in %s, %.17g in %s", i + 1, key, x[i], a, y[i], b);
}

// 20 steps with a draft model that drafts and is trained, in one go; and the same with the trainer
// killed after 10, and the daemon after 15.
TEST_IN(exact_run_survives_everything, scene_open)
{
    const bool cpu = on_cpu();
    struct test_child trainer = {0};
    double drafts[32], mismatch[32];
    daemon_kill(&s->daemon);
    const char *draft = daemon_model(test_folder(), true, 12);
    const char *const *daemon = args("--exact --dtype %s --draft %s --speculative draft_model:3",
                                     daemon_exact_dtype(), draft);
    const char *const *run = args("--exact --train-draft --draft-learning-rate 1e-3 --max-steps 20 "
                                  "--save-steps 5 --eval-data %s --eval-limit 6 --eval-steps 4 "
                                  "--early-stop-patience 9 --curriculum kde --resume",
                                  s->data);
    daemon_start(&s->daemon, s->model, daemon);
    assert_int_equal(train(s, "whole", run), 0);
    daemon_kill(&s->daemon);

    daemon_start(&s->daemon, s->model, daemon);
    start_trainer(s, &trainer, "parts", run);
    wait_for_steps(s, "parts", 1 + 11, &trainer); // the first line is the baseline's
    test_end(&trainer);                           // SIGKILL
    daemon_wait(&s->daemon);
    start_trainer(s, &trainer, "parts", run);
    wait_for_steps(s, "parts", 1 + 16, &trainer);
    test_kill(&s->daemon.child, SIGKILL);
    assert_int_equal(test_wait(&trainer, LIMIT_MS), 1);
    daemon_start(&s->daemon, s->model, daemon);
    assert_int_equal(train(s, "parts", run), 0);
    assert_said(s, "resumed at step ");
    if (cpu) { // it looks at f32
        daemon_holds(&s->daemon, "policy", latest(s, "parts"));
        daemon_holds(&s->daemon, "draft", test_path(latest(s, "parts"), "draft"));
    }

    static const char *const files[] = {"model.safetensors", "trainer/optimizer.safetensors",
                                        "trainer/trainer_state.json", "draft/model.safetensors",
                                        "draft/trainer/optimizer.safetensors"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        test_same_file(latest(s, "whole"), latest(s, "parts"), files[i]);
    static const char *const keys[] = {"loss",       "reward",     "grad_norm",
                                       "entropy",    "draft_loss", "completions/mean_length",
                                       "eval/reward"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        same_column(s, "whole", "parts", keys[i], 21);
    column(s, "whole", "spec_decode/num_draft_tokens", drafts, 32);
    for (int r = 0; r < 2; r++) {
        column(s, r ? "parts" : "whole", "sampler_mismatch/max", mismatch, 32);
        for (int i = 1; i <= 20; i++) assert_true(mismatch[i] == 0);
    }
    for (int i = 1; i <= 20; i++) assert_true(drafts[i] > 0);

    // Drafts leave no trace in what is drawn: without any the first step has the same samples.
    daemon_start(&s->daemon, s->model, args("--exact --dtype %s", daemon_exact_dtype()));
    assert_train(
        s, 0, "undrafted",
        "--exact --max-steps 20 --eval-data %s --eval-limit 6 --eval-steps 4 --curriculum kde",
        s->data);
    test_same_file(latest(s, "whole"), latest(s, "undrafted"), "model.safetensors");

    // On the CPU another number of threads divides the backward pass otherwise.
    if (!cpu) return;
    assert_int_equal(setenv("OMP_NUM_THREADS", "7", 1), 0);
    int status = train(s, "undrafted", args("--exact --resume --max-steps 21 --curriculum kde"));
    unsetenv("OMP_NUM_THREADS");
    assert_int_equal(status, 1);
    assert_said(s, "set OMP_NUM_THREADS as it was");
}

TEST_IN(exact_wants_an_exact_daemon, scene_open)
{
    assert_train(s, 1, "run", "--exact --max-steps 1");
    assert_said(s, "cw-infer-server --exact");
    assert_false(file_exists(test_path(s->folder, "run")));
}
