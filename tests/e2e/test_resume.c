/* test_resume.c: going on with a run: from a checkpoint that is damaged, by --resume alone, in a
 * folder that holds nothing learned, and what the folder says of itself. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tiny_model.h"
#include "tests/support/training.h"

static const char *checkpoint_file(const struct scene *s, const char *run, const char *name)
{
    return test_path(latest(s, run), name);
}

static json_int_t version(const struct scene *s)
{
    json_int_t v = int_of(daemon_get(s->daemon.socket, "/health", 200), "weight_version");
    return v;
}

static char *snapshot(const struct scene *s)
{
    json_t *info = daemon_get(s->daemon.socket, "/bridge/info", 200);
    const json_t *c = json_object_get(info, "control");
    char *folder = strdup(text_of(c, "snapshot"));
    return folder;
}

enum damage { GONE, CUT, OTHER, WORDS };

static void damage(const char *path, enum damage how, const char *other)
{
    char *text;
    switch (how) {
    case GONE:
        assert_int_equal(unlink(path), 0);
        break;
    case CUT:
        assert_int_equal(truncate(path, 5000), 0);
        break;
    case OTHER: // of a model of another shape
        assert_int_equal(unlink(path), 0);
        assert_int_equal(link(other, path), 0);
        break;
    case WORDS:
        text = "{\"step\": 2,";
        test_write(path, text, strlen(text));
        break;
    }
}

static void copy(const char *from, const char *to)
{
    SCOPED(bytes_release) struct bytes content = BYTES_INIT;
    assert_ok(file_read(from, 1 << 30, &content));
    assert_ok(file_write_atomic(to, 0644, bytes_text(&content), content.len));
}

// A checkpoint that cannot be used is found out before the server is asked for anything: another
// run's weights stay, and what would restore them.
TEST(damaged_checkpoints)
{
    struct scene s;
    static const struct {
        const char *file;
        enum damage how;
    } cases[] = {
        {"model.safetensors", GONE},
        {"model.safetensors", CUT},
        {"model.safetensors", OTHER},
        {"trainer/optimizer.safetensors", GONE},
        {"trainer/optimizer.safetensors", CUT},
        {"trainer/trainer_state.json", GONE},
        {"trainer/trainer_state.json", WORDS},
    };
    scene_open(&s);
    const char *kept = test_path(s.folder, "kept"), *other = test_folder();
    assert_ok(tiny_model_write(other, 32, 2, 300, 5)); // of the same names
    assert_train(&s, 0, "run", "--max-steps 2");
    assert_train(&s, 0, "served", "--max-steps 1");
    const json_int_t before = version(&s);
    char *snapshot_before = test_keep(snapshot(&s));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *path = checkpoint_file(&s, "run", cases[i].file);
        copy(path, kept);
        damage(path, cases[i].how, test_path(other, "model.safetensors"));
        assert_train(&s, 1, "run", "--max-steps 3 --resume");
        // where one is missing, the folder is named
        if (!said(&s, cases[i].file)) fail_msg("case %zu does not name %s", i, cases[i].file);
        assert_said(&s, "error: resuming: ");
        assert_said(&s, "/run/checkpoints/step-2");
        char *now = test_keep(snapshot(&s));
        assert_string_equal(now, snapshot_before);
        assert_int_equal(version(&s), before);
        daemon_holds(&s.daemon, "policy", latest(&s, "served"));
        copy(kept, path);
    }
    assert_null(strstr(test_read(s.daemon.log), "torn"));
    assert_train(&s, 0, "run", "--max-steps 3 --resume");
    daemon_holds(&s.daemon, "policy", latest(&s, "run"));
    assert_int_equal(daemon_stop(&s.daemon), 0);
}

// A draft model's checkpoint is looked at as well.
TEST_IN(damaged_draft, scene_open)
{
    daemon_kill(&s->daemon);
    const char *draft = daemon_model(test_folder(), true, 12);
    daemon_start(&s->daemon, s->model, args("--draft %s --speculative draft_model:3", draft));
    assert_train(s, 0, "run", "--max-steps 2 --train-draft");
    const json_int_t before = version(s);
    damage(checkpoint_file(s, "run", "draft/model.safetensors"), CUT, NULL);
    assert_train(s, 1, "run", "--max-steps 3 --resume");
    assert_said(s, "step-2/draft/model.safetensors");
    assert_int_equal(version(s), before);
    daemon_holds(&s->daemon, "policy", latest(s, "run"));
}

static json_t *read_json(const struct scene *s, const char *path)
{
    return json_of_file(test_path(s->folder, path));
}

// --resume and the folder are enough: the run's own options hold, and what is given otherwise is
// said.
TEST_IN(resume_alone, scene_open)
{
    const char *run = test_path(s->folder, "run");
    assert_train(s, 0, "run", "--max-steps 2 --seed 7");
    json_t *options = read_json(s, "run/config.json");
    train_rows(s, "resume", "resume_alone", trainer_alone);
    json_t *now = read_json(s, "run/config.json");
    assert_true(json_equal(now, options));
    // of a run that went on, it does not make --config go on too
    assert_train(s, 1, "run", "--config %s", test_path(run, "config.json"));
    assert_said(s, "holds a run already: go on with it (--resume)");
    assert_false(said(s, "has no effect with --resume"));

    train_rows(s, "resume", "with_other_options", trainer_alone);
    assert_true(metric(last_metrics(s, "run"), "completions/max_length") <= 12);

    const char *broken = "{\"prompts_per_step\": 3, \"nonsense\": 1}";
    test_write(test_path(run, "config.json"), broken, strlen(broken));
    train_rows(s, "resume", "a_config_that_is_broken", trainer_alone);
}

// A run that never made a step is no obstacle; one whose steps were lost is.
TEST_IN(nothing_learned, scene_open)
{
    static const char script[] = "read -r line; echo '{\"reward\": 1}'\n" // when it is tried
                                 "while read -r line; do echo no; done\n";
    const char *reward = scene_scorer(s, script);
    assert_train(s, 1, "run", "--max-steps 1 --reward %s", reward);
    assert_true(file_exists(test_path(s->folder, "run/checkpoints/step-0")));
    assert_train(s, 0, "run", "--max-steps 2");
    assert_said(s, "ended before its first step: it is begun anew");
    assert_int_equal(steps_done(s, "run"), 2);

    assert_ok(file_remove_tree(test_path(s->folder, "run/checkpoints/step-2")));
    const char *link = test_path(s->folder, "run/checkpoints/latest");
    assert_int_equal(unlink(link), 0);
    assert_int_equal(symlink("step-0", link), 0);
    assert_train(s, 1, "run", "--max-steps 2");
    assert_said(s, "holds a run already");
    assert_int_equal(steps_done(s, "run"), 2);

    // Nor is one that holds trained weights, which may stand nowhere else.
    const char *const *fails = args("--start-from current --reward %s", reward);
    assert_int_equal(train(s, "current", fails), 1);
    assert_int_equal(train(s, "current", fails), 1);
    assert_said(s, "holds a run already");
}

// The folder names what the run was made of, at each of its starts.
TEST_IN(folder_says_what_it_is, scene_open)
{
    char host[256] = "";
    assert_train(s, 0, "run", "--max-steps 2");
    assert_train(s, 0, "run", "--max-steps 3 --resume");
    json_t *json = read_json(s, "run/run.json");
    const json_t *starts = json_object_get(json, "starts"), *start;
    assert_int_equal(json_array_size(starts), 2);
    assert_int_equal(gethostname(host, sizeof host - 1), 0);
    for (size_t i = 0; i < 2; i++) {
        start = json_array_get(starts, i);
        assert_string_equal(text_of(start, "host"), host);
        assert_string_equal(text_of(start, "model"), s->model);
        assert_contains(text_of(start, "program"), "cw-trainer ");
        assert_int_equal(int_of(start, "weight_version"), i ? 8 : 2);
        assert_int_equal(int_of(start, "step"), 2 * i);
        assert_int_equal(int_of(start, "server_pid"), s->daemon.child.pid);
        const json_t *weights = json_object_get(start, "weights");
        assert_contains(text_of(weights, "folder"), i ? "/run/checkpoints/step-2" : s->model);
        assert_int_equal(int_of(weights, "updates"), 0);
    }
}
