/* test_freeze.c: --freeze as a user gives it: of sft against torch where there is one, and of a
 * training run with its checkpoints, its resume and what it says. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/safetensors.h"
#include "tests/support/training.h"

#define FREEZE "model.embed_tokens.weight,*.layers.0.self_attn.*,*norm.weight"

static const char sums[] = "{\"prompt\": \"12+34=\", \"completion\": \"46\"}\n"
                           "{\"prompt\": \"2+3=\", \"completion\": \"5\"}\n";

TEST(same_as_torch)
{
    const char *python = test_python("torch, transformers, safetensors, tokenizers"),
               *model = test_path(test_root(), "tools/demo-model"), *folder = test_folder(),
               *data = test_path(folder, "data.jsonl"), *out = test_path(folder, "out");
    test_write(data, sums, strlen(sums));
    const char *const *sft = OPTIONS(
        test_binary("cw-trainer"), "sft", "--model", model, "--data", data, "--out", out, "--dtype",
        "f32", "--device", "cpu", "--freeze", FREEZE, "--max-steps", "3", "--examples-per-step",
        "2", "--learning-rate", "1e-3", "--lr-scheduler-type", "constant", "--weight-decay", "0.1");
    const char *const *torch =
        OPTIONS(python, test_path(test_root(), "tests/clients/freeze_torch.py"), model, data, out,
                "3", "1e-3", "model.embed_tokens.weight", "*.layers.0.self_attn.*", "*norm.weight");
    test_output(0, sft);
    test_output(0, torch);
}

TEST(bad_patterns_end_it)
{
    const char *folder = test_folder(), *model = daemon_model(folder, true, 7),
               *data = test_path(folder, "data.jsonl"), *out = test_path(folder, "out");
    test_write(data, sums, strlen(sums));
    assert_contains(
        test_output(1, args("%s sft --model %s --data %s --out %s --freeze wte.weight --device cpu",
                            test_binary("cw-trainer"), model, data, out)),
        "--freeze: \"wte.weight\" matches no tensor of the model");
}

// Tensors of two folders' model.safetensors that differ to the bit, by name.
static void assert_frozen(const char *before, const char *after)
{
    struct safetensors *sets[2];
    const char *folders[] = {before, after};
    int kept = 0, moved = 0;
    for (int i = 0; i < 2; i++)
        assert_ok(safetensors_open_file(test_path(folders[i], "model.safetensors"), &sets[i]));
    for (int i = 0; i < safetensors_count(sets[0]); i++) {
        const struct safetensors_entry *a = safetensors_at(sets[0], i),
                                       *b = safetensors_find(sets[1], a->name);
        bool frozen = strstr(a->name, "embed_tokens") || strstr(a->name, "layers.0.self_attn") ||
                      strstr(a->name, "norm.weight");
        bool same = memcmp(a->data, b->data, a->bytes) == 0;
        if (same != frozen) fail_msg("%s %s", a->name, same ? "stayed" : "moved");
        kept += same;
        moved += !same;
    }
    assert_true(kept > 0 && moved > 0);
    for (int i = 0; i < 2; i++) safetensors_free(sets[i]);
}

TEST_IN(a_run_keeps_what_is_frozen, scene_open)
{
    assert_int_equal(train(s, "run", OPTIONS("--max-steps", "2", "--freeze", FREEZE)), 0);
    assert_said(s, "parameters are trained");
    assert_frozen(s->model, latest(s, "run"));
    // goes on by itself, not with another list
    assert_train(s, 1, "run", "--max-steps 3 --resume --freeze model.embed_tokens.weight");
    assert_said(s, "was made with --freeze \"" FREEZE "\"");
    assert_train(s, 0, "run", "--max-steps 3 --resume");
    assert_said(s, "resumed at step 2");
    assert_frozen(s->model, latest(s, "run"));
    daemon_holds(&s->daemon, "policy", latest(s, "run"));
    // a run without goes not on with one
    assert_train(s, 0, "whole", "--max-steps 1");
    assert_exit(1, train(s, "whole", OPTIONS("--max-steps", "2", "--resume", "--freeze", FREEZE)));
    assert_said(s, "was made with --freeze \"\"");
}
