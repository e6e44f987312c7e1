/* test_start.c: which weights a run starts from, what the server says they are, and what the KL
 * term is taken against: by runs one after another on one server, and by runs that go on. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/torn.h"

static double first_kl(const struct scene *s, const char *run)
{
    double kl[4];
    assert_true(column(s, run, "kl", kl, 4) >= 1);
    return kl[0];
}

static const char *checkpoint(const struct scene *s, const char *run, const char *step)
{
    return test_path(test_path(test_path(s->folder, run), "checkpoints"), step);
}

static void same_weights(const char *a, const char *b)
{
    test_same_file(a, b, "model.safetensors");
}

// What /bridge/info says of the weights.
static void assert_weights(const struct scene *s, const char *origin, int updates, const char *run,
                           int run_updates)
{
    json_t *info = daemon_get(s->daemon.socket, "/bridge/info", 200);
    const json_t *c = json_object_get(info, "control");
    const char *folder = test_keep(realpath(origin, NULL));
    assert_string_equal(text_of(c, "origin"), folder);
    assert_int_equal(int_of(c, "updates"), updates);
    assert_int_equal(int_of(c, "run_updates"), run_updates);
    const char *name = text_of(c, "run");
    if (run)
        assert_contains(name, run);
    else
        assert_string_equal(name, "");
}

// A second run on a server starts from the model it loaded, and says what that replaces; with
// --start-from from the weights as they are, or from a folder's. Its reference is what it found.
TEST_IN(second_runs, scene_open)
{
    assert_weights(s, s->model, 0, NULL, 0);
    assert_train(s, 0, "first", "--max-steps 3");
    assert_said(s, "weights at the start: version 2, those of ");
    assert_weights(s, s->model, 3, "/first", 3);

    assert_train(s, 0, "again", "--max-steps 2 --beta 0.1");
    assert_said(s, "warning: the run starts from ");
    assert_said(s, "3 updates since ");
    assert_said(s, "by the run ");
    assert_said(s, "/first/checkpoints/step-3");
    assert_true(first_kl(s, "again") == 0);
    same_weights(checkpoint(s, "again", "step-0"), checkpoint(s, "first", "step-0"));
    assert_weights(s, s->model, 2, "/again", 2);

    assert_train(s, 0, "on", "--max-steps 2 --beta 0.1 --start-from current");
    assert_said(s, "2 updates since ");
    assert_true(first_kl(s, "on") == 0);
    same_weights(checkpoint(s, "on", "step-0"), latest(s, "again"));
    assert_weights(s, s->model, 4, "/on", 2);

    const char *from = latest(s, "first");
    assert_train(s, 0, "other", "--max-steps 1 --beta 0.1 --start-from %s", from);
    assert_true(first_kl(s, "other") == 0);
    same_weights(checkpoint(s, "other", "step-0"), from);
    assert_weights(s, from, 1, "/other", 1);
}

// A folder that does not fit is found out before anything is written.
TEST_IN(start_that_does_not_fit, scene_open)
{
    const char *other = s->folder; // of runs, and no model
    assert_train(s, 0, "first", "--max-steps 1");
    assert_train(s, 1, "a", "--max-steps 1 --start-from %s", other);
    assert_said(s, "error: --start-from ");
    assert_said(s, "model.safetensors");
    daemon_holds(&s->daemon, "policy", latest(s, "first"));
    assert_weights(s, s->model, 1, "/first", 1);
}

// A server may have loaded a checkpoint that its run has removed since: the next run says so before
// anything is written, and goes on from the weights as they are.
TEST_IN(start_that_is_gone, scene_open)
{
    assert_train(s, 0, "first", "--max-steps 1");
    daemon_start(&s->daemon, latest(s, "first"), NULL);
    assert_train(s, 0, "first", "--max-steps 2 --resume --save-total-limit 1");
    assert_train(s, 1, "third", "--max-steps 1");
    assert_said(s, "error: --start-from loaded: the server loaded no folder that is there now (/");
    assert_said(s, "/first/checkpoints/step-1); take --start-from current or a model folder");
    daemon_holds(&s->daemon, "policy", latest(s, "first"));
    assert_train(s, 0, "third", "--max-steps 1 --start-from current");
    assert_train(s, 1, "fourth", "--max-steps 1 --start-from %s/none", s->folder);
    assert_said(s, "/none: no such folder");
}

// The reference of a run that goes on is what it started from, on whatever server it does: the same
// bits as in one go. Its checkpoint is kept, though only one is wanted.
TEST(reference_survives)
{
    if (!on_cpu()) test_skip("on a GPU a row's last bit depends on the batch around it");
    struct scene s;
    scene_open(&s);
    assert_train(&s, 0, "first", "--max-steps 2");
    const char *const *run =
        args("--max-steps 4 --beta 0.5 --save-total-limit 1 --start-from %s", latest(&s, "first"));
    const char *const *half =
        args("--max-steps 2 --beta 0.5 --save-total-limit 1 --start-from %s", latest(&s, "first"));
    assert_int_equal(train(&s, "whole", run), 0);
    assert_int_equal(train(&s, "halves", half), 0);
    daemon_start(&s.daemon, s.model, NULL);
    assert_train(&s, 0, "halves", "--max-steps 4 --resume");
    assert_said(&s, "the reference of the KL divergence: ");
    same_weights(latest(&s, "whole"), latest(&s, "halves"));
    double whole[4], halves[4];
    assert_int_equal(column(&s, "whole", "kl", whole, 4), 4);
    assert_int_equal(column(&s, "halves", "kl", halves, 4), 4);
    assert_memory_equal(whole, halves, sizeof whole);
    assert_true(whole[0] == 0 && whole[3] > 0);
    assert_true(file_exists(checkpoint(&s, "whole", "step-0")));
    assert_false(file_exists(checkpoint(&s, "whole", "step-2")));

    // Gone, it is said what to do; the server keeps what it has.
    assert_ok(file_remove_tree(checkpoint(&s, "halves", "step-0")));
    assert_ok(file_remove_tree(test_path(s.folder, "first")));
    assert_train(&s, 1, "halves", "--max-steps 5 --resume");
    assert_said(&s, "first/checkpoints/step-2");
    daemon_holds(&s.daemon, "policy", latest(&s, "halves"));
    assert_int_equal(daemon_stop(&s.daemon), 0);
}

static void tear(const struct scene *s)
{
    tear_roles(&s->daemon, "policy", NULL, NULL);
    test_wait_for_text(s->daemon.log, "engine: weights restored from ", 20000, NULL);
}

// What the weights are is right after whatever may happen to them.
TEST_IN(what_the_weights_are, scene_open)
{
    struct test_child trainer = {0};
    start_trainer(s, &trainer, "killed", args("--max-steps 100000"));
    wait_for_steps(s, "killed", 3, &trainer);
    test_end(&trainer); // SIGKILL, at an even version or an odd one
    daemon_wait(&s->daemon);
    json_t *info = daemon_get(s->daemon.socket, "/bridge/info", 200);
    const json_t *c = json_object_get(info, "control");
    const char *origin = text_of(c, "origin");
    const json_int_t updates = int_of(c, "updates");
    if (strstr(origin, "step-0"))
        assert_int_equal(updates, 0); // it was torn
    else
        assert_int_equal(updates, (int_of(c, "version") - 2) / 2);

    daemon_post(s->daemon.socket, "/reload", 200, NULL);
    assert_weights(s, s->model, 0, NULL, 0);
    assert_train(s, 0, "run", "--max-steps 2");
    assert_weights(s, s->model, 2, "/run", 2);
    tear(s);
    assert_weights(s, latest(s, "run"), 0, NULL, 0);
    daemon_holds(&s->daemon, "policy", latest(s, "run"));
    // going on loads a checkpoint, which the weights are then exactly
    assert_train(s, 0, "run", "--max-steps 3 --resume");
    assert_weights(s, checkpoint(s, "run", "step-2"), 1, "/run", 1);
}

// A snapshot that cannot be used is not passed over in silence.
TEST_IN(fallback_is_said, scene_open)
{
    json_t *health = daemon_get(s->daemon.socket, "/health", 200);
    assert_string_equal(text_of(health, "warning"), "");
    assert_train(s, 0, "run", "--max-steps 2");
    assert_int_equal(truncate(test_path(latest(s, "run"), "model.safetensors"), 5000), 0);
    tear(s);
    health = daemon_get(s->daemon.socket, "/health", 200);
    const char *warning = text_of(health, "warning");
    assert_contains(warning, "NOT served");
    assert_contains(warning, "step-2/model.safetensors");
    assert_contains(warning, s->model);
    assert_contains(test_read(s->daemon.log), "error: engine: what was trained is NOT served");
    daemon_holds(&s->daemon, "policy", s->model);
    daemon_post(s->daemon.socket, "/reload", 200, NULL);
    health = daemon_get(s->daemon.socket, "/health", 200);
    assert_string_equal(text_of(health, "warning"), "");
}

// A reload takes the draft model along where it is asked to, and none where one of the two does not
// fit.
TEST_IN(reload_of_both, scene_open)
{
    daemon_kill(&s->daemon);
    const char *draft = daemon_model(test_folder(), true, 12);
    const char *other = daemon_model(test_folder(), true, 13);
    daemon_start(&s->daemon, s->model, args("--draft %s --speculative draft_model:3", draft));
    assert_train(s, 0, "run", "--max-steps 2 --train-draft --draft-learning-rate 1e-2");
    daemon_holds(&s->daemon, "draft", test_path(latest(s, "run"), "draft"));
    daemon_post(s->daemon.socket, "/reload", 200, "{}");
    daemon_holds(&s->daemon, "policy", s->model);
    daemon_holds(&s->daemon, "draft", test_path(latest(s, "run"), "draft"));
    daemon_post(s->daemon.socket, "/reload", 200, "{\"draft\": true}");
    daemon_holds(&s->daemon, "draft", draft);
    daemon_post(s->daemon.socket, "/reload", 200, test_text("{\"draft\": \"%s\"}", other));
    daemon_holds(&s->daemon, "draft", other);
    daemon_post(s->daemon.socket, "/reload", 404,
                test_text("{\"model\": \"%s\", \"draft\": \"/nowhere\"}", other));
    daemon_post(s->daemon.socket, "/reload", 400, "{\"draft\": 3}");
    daemon_holds(&s->daemon, "policy", s->model);
    daemon_holds(&s->daemon, "draft", other);
    // a new run that trains the draft begins with the one of --draft
    assert_train(s, 0, "next", "--max-steps 1 --train-draft");
    same_weights(test_path(checkpoint(s, "next", "step-0"), "draft"),
                 test_path(checkpoint(s, "run", "step-0"), "draft"));
}
