/* test_merge.c: cw-trainer merge: the folder it writes has the logits of base and adapter, and what
 * it cannot merge it names. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/loaded.h"
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

static void logits_of(const char *model, enum quantization q, float *ret)
{
    SCOPED(reference_close) struct reference r;
    reference_open_as(model, "cpu", q, &r);
    reference_logits(&r, ids, TOKENS, ret);
}

static char *merge_to(int status, const char *model, const char *out, const char *more)
{
    return test_output(status, words_of(test_text("%s merge --model %s --out %s --dtype f32 %s",
                                                  test_binary("cw-trainer"), model, out, more)));
}

// In FP8 the sum has the numbers that a server of it would multiply: of the folder as it is, and
// once more with --quantization.
TEST(in_fp8_it_is_what_a_server_multiplies)
{
    static float want[TOKENS * VOCAB], have[TOKENS * VOCAB], plain[TOKENS * VOCAB];
    const char *folder = test_folder(), *sum = test_path(folder, "sum"),
               *fp8 = test_path(folder, "fp8"), *adapter = test_path(folder, "adapter");
    const char *model = daemon_model(folder, true, 4);
    assert_ok(tiny_adapter_write(adapter, model, CONFIG, 5));
    merge_to(0, model, sum, test_text("--adapter %s", adapter));
    merge_to(0, model, fp8, test_text("--adapter %s --to fp8-weights", adapter));
    test_same_file(model, fp8, "tokenizer.json");
    logits_of(sum, QUANTIZATION_FP8_WEIGHTS, want);
    logits_of(sum, QUANTIZATION_NONE, plain);
    assert_memory_not_equal(want, plain, sizeof want);
    logits_of(fp8, QUANTIZATION_NONE, have);
    assert_memory_equal(want, have, sizeof want);
    logits_of(fp8, QUANTIZATION_FP8_WEIGHTS, have);
    assert_memory_equal(want, have, sizeof want);
    // of what has no adapter, over a folder that is there
    assert_contains(merge_to(2, fp8, sum, "--to fp8-weights"),
                    "sum is there already; take another");
    merge_to(0, fp8, sum, "--to fp8-weights --overwrite");
    logits_of(sum, QUANTIZATION_NONE, have);
    assert_memory_equal(want, have, sizeof want);
}

// The form: what compressed-tensors, and vLLM by it, expect of such a folder.
TEST(in_fp8_as_compressed_tensors_has_it)
{
    const char *folder = test_folder(), *out = test_path(folder, "out");
    merge_to(0, test_golden("qwen3-moe"), out, "--to fp8");
    json_t *config = json_of_file(test_path(out, "config.json"));
    assert_json(json_object_get(config, "quantization_config"),
                "{'quant_method':'compressed-tensors','format':'float-quantized',"
                "'ignore':['lm_head','model.layers.0.mlp.gate','model.layers.1.mlp.gate'],"
                "'config_groups':{'group_0':{'targets':['Linear'],'weights':{'num_bits':8,"
                "'type':'float','strategy':'channel','dynamic':false,'symmetric':true},"
                "'input_activations':{'num_bits':8,'type':'float','strategy':'token',"
                "'dynamic':true,'symmetric':true}}}}");
    struct safetensors *set = tensors_of(out);
    int n = 0;
    for (int i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_entry *e = safetensors_at(set, i);
        const bool is_coded = strstr(e->name, "_proj.weight") && !strstr(e->name, "_scale");
        assert_true((e->dt == DT_E4M3) == is_coded);
        assert_int_equal((uintptr_t)e->data % dtype_size(e->dt), 0);
        if (!is_coded) continue;
        const struct safetensors_entry *scale =
            safetensors_find(set, test_text("%s_scale", e->name));
        assert_non_null(scale);
        assert_true(scale->dt == DT_F32 && scale->n_dims == 2 && scale->shape[1] == 1 &&
                    scale->shape[0] == e->shape[0]);
        n++;
    }
    assert_int_equal(n, 2 * (4 + 8 * 3));
    merge_to(0, test_golden("qwen3-moe"), out, "--to fp8-weights --overwrite");
    config = json_of_file(test_path(out, "config.json"));
    assert_json(json_at(config, "quantization_config.config_groups.group_0"),
                "{'input_activations':null}");
    assert_contains(merge_to(1, test_golden("gpt-oss"), out, "--to fp8 --overwrite"),
                    "GptOssForCausalLM has all experts in one tensor");
}

TEST(what_does_not_fit_is_named)
{
    const char *folder = test_folder(), *other = test_folder(), *out = test_path(folder, "out");
    const char *model = daemon_model(folder, false, 4), *adapter = test_path(folder, "adapter");
    assert_ok(tiny_adapter_write(adapter, model, CONFIG, 5));
    test_write(test_path(other, "adapter_config.json"), "{\"use_dora\":true}", 17);
    assert_contains(merge(1, model, other, out), "use_dora is set: DoRA is not supported");
    assert_contains(merge(1, adapter, adapter, out), "config.json");
    const char *const read[] = {test_path(model, "."), adapter};
    for (int i = 0; i < 2; i++)
        assert_contains(merge(2, model, adapter, read[i]),
                        test_text("--out %s would replace %s, which is read here", read[i],
                                  i ? adapter : model));
    test_write(test_path(model, "README.md"), "#", 1);
    assert_contains(merge_to(2, test_golden("llama3"), model, "--to fp8 --overwrite"),
                    "model holds README.md, which is none of a model's files");
    assert_contains(test_output(2, args("%s merge --model %s", test_binary("cw-trainer"), model)),
                    "--adapter DIR and --out DIR are needed; with --to no adapter is");
}
