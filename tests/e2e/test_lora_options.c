/* test_lora_options.c: every option of cw-trainer train that says something else beside --lora-r:
 * each works, or is refused in a sentence that names it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

static void open_server(struct scene *s)
{
    scene_open(s);
    daemon_kill(&s->daemon);
    daemon_start(
        &s->daemon, s->model,
        args("--exact --dtype %s --max-adapters 3 --max-lora-rank 8 --tandem-model %s --draft %s",
             daemon_exact_dtype(), s->model, s->model));
}

SCENE_OF_ALL(open_server)

// Where it is there. Its scale and targets are a run's own.
static void unload(const char *name)
{
    struct wire_answer a;
    daemon_request(scene.daemon.socket, "POST", "/v1/unload_lora_adapter", "",
                   test_text("{\"lora_name\":\"%s\"}", name), &a);
}

static int with_lora(struct scene *s, const char *run, const char *const words[])
{
    unload("policy");
    return train(s, run, JOIN(args("--lora-r 4 --lora-alpha 8 --max-steps 2"), words));
}

TEST(each_works_or_is_named)
{
    train_rows(&scene, "lora_options", "each_works_or_is_named", with_lora);
}

static bool is_loaded(const char *name)
{
    const json_t *status = daemon_get(scene.daemon.socket, "/lora/status", 200), *given;
    size_t i;
    json_array_foreach (json_object_get(status, "available_adapters"), i, given)
        if (strcmp(json_string_value(given), name) == 0) return true;
    return false;
}

// It goes, with its rank, where the start made it; what was there before stays.
TEST(a_refused_start_leaves_no_adapter)
{
    struct scene *s = &scene;
    unload("policy");
    for (int rank = 2; rank < 4; rank++) {
        assert_train(s, 1, "refused", "--lora-r %d --train-draft --draft-depths 2", rank);
        assert_said(s, "--draft-depths 2: it is of a layer that predicts further tokens");
        assert_said(s, "the adapter 'policy', made for this run, is unloaded");
        assert_false(is_loaded("policy"));
    }
    assert_train(s, 0, "trained", "--lora-r 2 --max-steps 1");
    assert_train(s, 1, "refused", "--lora-r 2 --train-draft --draft-depths 2");
    assert_true(is_loaded("policy"));
    daemon_holds_adapter(&s->daemon, "policy", latest(s, "trained"));
}

TEST(resuming_wants_the_same_adapter)
{
    unload("two");
    assert_int_equal(with_lora(&scene, "resumed", args("--save-steps 1")), 0);
    train_rows(&scene, "lora_options", "resuming_wants_the_same_adapter", train);
    daemon_holds_adapter(&scene.daemon, "b", latest(&scene, "resumed"));
}

TEST(the_best_is_served_at_the_end)
{
    train_rows(&scene, "lora_options", "the_best_is_served_at_the_end", with_lora);
    daemon_holds_adapter(&scene.daemon, "policy", test_path(scene.folder, "best/checkpoints/best"));
}
