/* test_lora_training.c: cw-trainer train --lora-r on a real server: the adapter is trained in
 * shared memory beside a model that stays as it is, to the sampler's bits; its checkpoints resume
 * exactly, and what a dead trainer left is restored from them. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/model/safetensors.h"
#include "tests/support/torn.h"

enum { STEPS = 6 };
#define LORA "--lora-r 4 --lora-alpha 8 "

static void restart_server(struct scene *s)
{
    daemon_kill(&s->daemon);
    daemon_start(
        &s->daemon, s->model,
        args("--exact --dtype %s --max-adapters 2 --max-lora-rank 8", daemon_exact_dtype()));
}

static const char *completion(const struct scene *s, const char *who)
{
    json_t *a = daemon_post(s->daemon.socket, "/v1/completions", 200,
                            test_text("{%s\"prompt\":\"1+4=\",\"max_tokens\":8,\"temperature\":0,"
                                      "\"logprobs\":1,\"ignore_eos\":true}",
                                      who));
    return test_keep(json_dumps(json_object_get(a, "choices"), 0));
}

TEST_IN(an_adapter_is_trained, scene_open)
{
    double kl[STEPS];
    restart_server(s);
    const char *before = completion(s, "");
    assert_train(s, 0, "run", LORA "--exact --max-steps 6 --beta 0.1 --recompute layer");
    assert_said(s, "the adapter's ");
    assert_said(s, "reference 0."); // no copy of the model
    each_within(s, "run", "sampler_mismatch/max", STEPS, 0, 0);
    each_within(s, "run", "grad_norm", STEPS, DBL_MIN, INFINITY);
    assert_int_equal(column(s, "run", "kl", kl, STEPS), STEPS);
    assert_true(kl[0] == 0 && kl[STEPS - 1] != 0); // from the model itself
    daemon_holds(&s->daemon, "policy", s->model);
    daemon_holds_adapter(&s->daemon, "policy", latest(s, "run"));
    assert_exit(0, scene_run(s, OPTIONS(test_binary("cw-ipc-check"), s->daemon.bridge)));
    assert_said(s, "from (made by a request)");
    assert_trainer(s, 0, "eval --bridge %s --data %s --lora-name policy --max-completion-length 4",
                   s->daemon.bridge, s->data);
    assert_true(file_exists(test_path(latest(s, "run"), "adapter_config.json")));
    assert_false(file_exists(test_path(latest(s, "run"), "model.safetensors")));
    const char *adapted = completion(s, "\"lora\":\"policy\",");
    assert_string_equal(completion(s, ""), before);
    assert_string_not_equal(adapted, before);
    // a copy that a client loads by its folder computes the same
    daemon_load_adapter(&s->daemon, "copy", latest(s, "run"));
    assert_string_equal(completion(s, "\"model\":\"copy\","), adapted);
}

TEST_IN(resumes_to_the_bit, scene_open)
{
    restart_server(s);
    assert_train(s, 0, "whole", LORA "--exact --max-steps 6");
    restart_server(s);
    assert_train(s, 0, "halves", LORA "--exact --max-steps 3");
    restart_server(s);
    assert_train(s, 0, "halves", "--max-steps 6 --resume");
    assert_said(s, "resumed at step 3");
    test_same_file(latest(s, "whole"), latest(s, "halves"), "adapter_model.safetensors");
    test_same_file(latest(s, "whole"), latest(s, "halves"), "adapter_config.json");
    test_same_file(latest(s, "whole"), latest(s, "halves"), "trainer/optimizer.safetensors");
    daemon_holds_adapter(&s->daemon, "policy", latest(s, "halves"));
    // without the adapter, or with another, it would be another run
    assert_train(s, 1, "halves", "--max-steps 7 --resume --lora-r 0");
    assert_said(s, "was made with --lora-r");
    assert_train(s, 1, "halves", "--max-steps 7 --resume --lora-alpha 9");
    assert_said(s, "other targets, ranks or scales");
    // a second run on the same server starts anew, or from the first one's checkpoint
    assert_train(s, 0, "again", LORA "--exact --max-steps 6");
    test_same_file(latest(s, "whole"), latest(s, "again"), "adapter_model.safetensors");
    const char *from = latest(s, "whole");
    assert_train(s, 0, "on", LORA "--max-steps 1 --start-from %s --learning-rate 0", from);
    test_same_file(from, latest(s, "on"), "adapter_model.safetensors");
}

// The masks follow from the seed, the step and the place: layers that are run again, and a run in
// two parts, have the same.
TEST_IN(dropout_repeats, scene_open)
{
    restart_server(s);
#define DROPOUT LORA "--exact --lora-dropout 0.3 "
    assert_train(s, 0, "whole", DROPOUT "--max-steps 4");
    assert_said(s, "--exact does not compare them");
    assert_train(s, 0, "again", DROPOUT "--max-steps 4 --recompute layer");
    assert_train(s, 0, "halves", DROPOUT "--max-steps 2");
    assert_train(s, 0, "halves", "--max-steps 4 --resume");
    assert_train(s, 0, "without", LORA "--exact --max-steps 4");
    test_same_file(latest(s, "whole"), latest(s, "again"), "adapter_model.safetensors");
    test_same_file(latest(s, "whole"), latest(s, "halves"), "adapter_model.safetensors");
    struct safetensors *set;
    assert_ok(
        safetensors_open_file(test_path(latest(s, "whole"), "adapter_model.safetensors"), &set));
    const struct safetensors_entry *e = safetensors_at(set, safetensors_count(set) - 1);
    struct safetensors *other;
    assert_ok(safetensors_open_file(test_path(latest(s, "without"), "adapter_model.safetensors"),
                                    &other));
    assert_memory_not_equal(e->data, safetensors_find(other, e->name)->data, e->bytes);
    safetensors_free(set);
    safetensors_free(other);
}

static void tear(const struct scene *s, const char *snapshot, const char *moved_to)
{
    tear_roles(&s->daemon, "adapter:policy", snapshot, moved_to);
    test_wait_for_text(s->daemon.log, "weights restored from", LIMIT_MS, NULL);
}

static void open_trained(struct scene *s)
{
    if (!on_cpu()) test_skip("forks, which a GPU's driver does not survive");
    scene_open(s);
    restart_server(s);
    assert_train(s, 0, "run", LORA "--max-steps 2");
}

TEST_IN(a_torn_adapter_is_restored, open_trained)
{
    const char *snapshot = test_keep(realpath(latest(s, "run"), NULL));
    tear(s, snapshot, NULL);
    char *log = test_read(s->daemon.log);
    assert_contains(log, "weights restored from");
    assert_contains(log, snapshot);
    daemon_holds_adapter(&s->daemon, "policy", snapshot);
    daemon_holds(&s->daemon, "policy", s->model);
    daemon_get(s->daemon.socket, "/health", 200);
}

// Nobody can tell any more which adapter was torn, or whether the model was: all are made whole,
// and it is said that what was trained is gone.
TEST_IN(without_its_checkpoint_it_is_as_new, open_trained)
{
    const char *snapshot = test_keep(realpath(latest(s, "run"), NULL));
    const char *aside = test_path(s->folder, "aside");
    const char *base = completion(s, "");
    assert_string_not_equal(completion(s, "\"lora\":\"policy\","), base);
    tear(s, snapshot, aside);
    assert_contains(test_read(s->daemon.log), "what was trained is NOT served");
    assert_string_equal(completion(s, ""), base);
    assert_string_equal(completion(s, "\"lora\":\"policy\","), base);
    daemon_holds(&s->daemon, "policy", s->model);
    assert_int_equal(rename(aside, snapshot), 0);
    assert_train(s, 0, "run", "--max-steps 3 --resume");
    daemon_holds_adapter(&s->daemon, "policy", latest(s, "run"));
}

TEST_IN(what_cannot_be_trained_is_named, scene_open)
{
    train_rows(s, "lora_options", "of_a_server_without_adapters", train);
    restart_server(s);
    train_rows(s, "lora_options", "what_cannot_be_trained_is_named", train);
}
