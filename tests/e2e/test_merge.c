/* test_merge.c: cw-trainer merge: the folder it writes has the logits of base and adapter, and what
 * it cannot merge it names. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/reference.h"
#include "tests/support/tiny_adapter.h"

enum { TOKENS = 5, VOCAB = 300 };
static const int32_t ids[TOKENS] = {3, 14, 15, 9, 26};
#define CONFIG "{\"r\":3,\"lora_alpha\":6,\"use_rslora\":true,\"target_modules\":\"all-linear\"}"

static char *merge(int status, const char *model, const char *adapter, const char *out)
{
    return test_output(status, OPTIONS(test_binary("cw-trainer"), "merge", "--model", model,
                                       "--adapter", adapter, "--out", out));
}

// Of the base with the adapter beside it.
static void adapted_logits(const char *model, const char *folder, float *ret)
{
    SCOPED(reference_close) struct reference r;
    struct adapter_config *config;
    struct adapter *a;
    struct adapter_table *table;
    void *memory;
    reference_open(model, "cpu", &r);
    assert_ok(adapter_config_load(folder, &config));
    assert_ok(adapter_new(config, r.weights, DT_F32, &a));
    assert_ok(device_alloc(r.dev, a->weights->bytes, &memory));
    weights_bind(a->weights, memory);
    assert_ok(adapter_load(a, r.dev, folder));
    assert_ok(adapter_table_new(r.dev, r.weights, 1, a->max_rank, &table));
    assert_ok(adapter_table_set(table, 0, a));
    r.model->adapters = table;
    r.adapter = 0;
    reference_logits(&r, ids, TOKENS, ret);
    r.model->adapters = NULL;
    adapter_table_free(table);
    device_release(r.dev, memory);
    adapter_free(a);
}

TEST(merged_is_base_and_adapter)
{
    static float want[TOKENS * VOCAB], have[TOKENS * VOCAB], plain[TOKENS * VOCAB];
    const char *folder = test_folder(), *out = test_path(folder, "merged"),
               *adapter = test_path(folder, "adapter");
    const char *model = daemon_model(folder, true, 4);
    struct reference r;
    double max = 0, worst = 0, changed = 0;
    assert_ok(tiny_adapter_write(adapter, model, CONFIG, 5));
    merge(0, model, adapter, out);
    test_same_file(model, out, "tokenizer.json");
    adapted_logits(model, adapter, want);
    reference_open(out, "cpu", &r);
    reference_logits(&r, ids, TOKENS, have);
    reference_close(&r);
    reference_open(model, "cpu", &r);
    reference_logits(&r, ids, TOKENS, plain);
    reference_close(&r);
    for (int i = 0; i < TOKENS * VOCAB; i++) {
        max = fmax(max, fabs((double)want[i]));
        worst = fmax(worst, fabs((double)want[i] - have[i]));
        changed = fmax(changed, fabs((double)plain[i] - have[i]));
    }
    assert_true(worst <= 1e-5 * max);
    assert_true(changed > 0.01 * max);
}

TEST(what_does_not_fit_is_named)
{
    const char *folder = test_folder(), *other = test_folder(), *out = test_path(folder, "out");
    const char *model = daemon_model(folder, false, 4), *adapter = test_path(folder, "adapter");
    assert_ok(tiny_adapter_write(adapter, model, CONFIG, 5));
    test_write(test_path(other, "adapter_config.json"), "{\"use_dora\":true}", 17);
    assert_contains(merge(1, model, other, out), "use_dora is set: DoRA is not supported");
    assert_contains(merge(1, adapter, adapter, out), "config.json");
    assert_contains(test_output(2, args("%s merge --model %s", test_binary("cw-trainer"), model)),
                    "--adapter DIR and --out DIR are needed");
}
