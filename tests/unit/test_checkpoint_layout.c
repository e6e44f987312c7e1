/* test_checkpoint_layout.c: what lies where in a checkpoint. Other programs load every
 * *.safetensors at the top of a folder, so there may be none but the model's; and checkpoints of
 * before, which had the optimizer's state there, are still read. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/run/checkpoint.h"

#include <dirent.h>

static const struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0, 0, MOMENTS_F32, false};

struct trained {
    const char *folder;
    struct reference r;
    struct optimizer *optimizer;
};

static void trained_open(struct trained *t, uint64_t seed)
{
    double norm;
    t->folder = test_folder();
    assert_ok(tiny_model_write(t->folder, 32, 1, 80, seed));
    test_write(test_path(t->folder, "tokenizer.json"), "{}", 2);
    reference_open(t->folder, "cpu", &t->r);
    assert_ok(optimizer_new_whole(t->r.dev, t->r.weights, &adamw, &t->optimizer));
    const struct weights *g = optimizer_grads(t->optimizer, 0);
    for (int64_t i = 0; i < g->n_elements; i++) ((float *)g->base)[i] = 0.5f;
    assert_ok(optimizer_prepare(t->optimizer, &norm));
    assert_ok(optimizer_apply(t->optimizer, 1e-3));
}

static void trained_close(struct trained *t)
{
    optimizer_free(t->optimizer);
    reference_close(&t->r);
}

// A checkpoint of step 1 of both.
static void write_both(struct trained *policy, struct trained *draft, char ret_folder[PATH_ROOM])
{
    json_t *state = test_keep(json_pack("{s:i, s:i}", "step", 1, "data_index", 8));
    const struct model_folder d = {.weights = draft->r.weights,
                                   .as = DT_F32,
                                   .source_folder = draft->folder,
                                   .optimizer = draft->optimizer};
    const struct model_folder p = {.weights = policy->r.weights,
                                   .as = DT_F32,
                                   .source_folder = policy->folder,
                                   .optimizer = policy->optimizer,
                                   .state = state,
                                   .draft = &d};
    assert_ok(checkpoint_write(test_folder(), policy->r.dev, &p,
                               &(struct checkpoint_others){.keep = 0}, ret_folder));
}

static void assert_loads(const struct trained *policy, const struct trained *draft,
                         const char *folder)
{
    struct checkpoint c;
    struct optimizer *fresh[2];
    assert_ok(checkpoint_read(folder, &c));
    assert_int_equal(c.data_index, 8);
    assert_ok(optimizer_new_whole(policy->r.dev, policy->r.weights, &adamw, &fresh[0]));
    assert_ok(optimizer_new_whole(draft->r.dev, draft->r.weights, &adamw, &fresh[1]));
    assert_ok(checkpoint_load_optimizer(folder, c.optimizer_steps, fresh[0]));
    assert_ok(checkpoint_load_optimizer(test_path(folder, DRAFT_FOLDER), c.draft_optimizer_steps,
                                        fresh[1]));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(optimizer_steps(fresh[i]), 1);
        optimizer_free(fresh[i]);
    }
    json_decref(c.state);
}

static void only_model_files_on_top(const char *folder)
{
    static const char *const wanted[] = {"config.json", "model.safetensors", "tokenizer.json",
                                         "draft", "trainer"};
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (const struct dirent *entry; (entry = readdir(dir));) {
        bool known = entry->d_name[0] == '.';
        for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
            known |= strcmp(entry->d_name, wanted[i]) == 0;
        if (!known) fail_msg("%s is at the top of %s", entry->d_name, folder);
    }
    closedir(dir);
}

TEST(state_lies_in_a_folder_of_its_own)
{
    struct trained policy, draft;
    trained_open(&policy, 1);
    trained_open(&draft, 2);
    char folder[PATH_ROOM];
    write_both(&policy, &draft, folder);
    only_model_files_on_top(folder);
    only_model_files_on_top(test_path(folder, "draft"));
    assert_true(file_exists(test_path(folder, "trainer/trainer_state.json")));
    assert_true(file_exists(test_path(folder, "trainer/optimizer.safetensors")));
    assert_true(file_exists(test_path(folder, "draft/trainer/optimizer.safetensors")));
    assert_loads(&policy, &draft, folder);
    trained_close(&policy);
    trained_close(&draft);
}

TEST(older_checkpoints_are_read)
{
    static const char *const moved[] = {"trainer_state.json", "optimizer.safetensors"};
    struct trained policy, draft;
    trained_open(&policy, 3);
    trained_open(&draft, 4);
    char folder[PATH_ROOM];
    write_both(&policy, &draft, folder);
    const char *inside = test_path(folder, "draft");
    for (int i = 0; i < 2; i++)
        assert_int_equal(
            rename(test_path(test_path(folder, "trainer"), moved[i]), test_path(folder, moved[i])),
            0);
    assert_int_equal(rename(test_path(inside, "trainer/optimizer.safetensors"),
                            test_path(inside, "optimizer.safetensors")),
                     0);
    assert_int_equal(rmdir(test_path(folder, "trainer")), 0);
    assert_int_equal(rmdir(test_path(inside, "trainer")), 0);
    assert_loads(&policy, &draft, folder);
    trained_close(&policy);
    trained_close(&draft);
}
