/* test_latent.c: the families with latent attention: the router's correction bias as a buffer, the
 * layers that are left out, and what the cache holds. What configs say: test_family_config.c. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/adapter.h"
#include "common/model/config.h"
#include "infer-server/engine/kv_memory.h"
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include "trainer/learn/param_range.h"

// ---- buffers ------------------------------------------------------------------------------------
#define BIAS "model.layers.1.mlp.gate.e_score_correction_bias"

// f32 in an arena of bf16 and in a folder of bf16, at the same element of every arena, and in no
// range that is trained.
TEST(bias_is_a_buffer)
{
    struct param_ranges ranges;
    const char *folder = test_golden("deepseek-v3"), *copy = test_folder();
    struct loaded *f32 = loaded_of(folder, DT_F32);
    struct loaded *bf16 = loaded_of(folder, DT_BF16);
    struct safetensors *set = tensors_of(folder);
    const struct safetensors_entry *want = safetensors_find(set, BIAS);
    const struct weight_tensor *a = weights_find(f32->weights, BIAS),
                               *b = weights_find(bf16->weights, BIAS);
    assert_true(a->offset == b->offset && a->offset >= f32->weights->n_elements);
    assert_memory_equal(bf16->weights->layers[1].at[ROLE_ROUTER_BIAS], want->data, want->bytes);
    assert_memory_equal(f32->weights->layers[1].at[ROLE_ROUTER_BIAS], want->data, want->bytes);
    assert_null(bf16->weights->layers[0].at[ROLE_ROUTER_BIAS]);
    assert_ok(weights_save(bf16->weights, bf16->dev, copy, DT_BF16));
    struct safetensors *saved = tensors_of(copy);
    const struct safetensors_entry *have = safetensors_find(saved, BIAS);
    assert_true(have->dt == DT_F32);
    assert_memory_equal(have->data, want->data, want->bytes);
    assert_true(safetensors_find(saved, "lm_head.weight")->dt == DT_BF16);
    assert_ok(param_ranges_of(bf16->weights, NULL, &ranges));
    assert_int_equal(ranges.n, 1);
    assert_true(ranges.list[0].first == 0 && ranges.list[0].n == bf16->weights->n_elements);
    assert_int_equal(param_ranges_parameters(&ranges), bf16->weights->n_parameters - b->n);
    param_ranges_release(&ranges);
}

// ---- layers that are left out -------------------------------------------------------------------
// The folder's tensors and one more.
static const char *with_tensor(const char *folder, const char *name)
{
    const char *copy = test_folder();
    struct safetensors *set = tensors_of(folder);
    static const float zeros[3];
    static struct safetensors_source sources[128];
    const int n = tensor_sources(set, sources);
    sources[n] = (struct safetensors_source){.n_dims = 1, .shape = {3}, .tag = zeros};
    snprintf(sources[n].name, sizeof sources[n].name, "%s", name);
    tensors_write(copy, sources, n + 1);
    return copy;
}

TEST(further_layers_are_left_out)
{
    struct loaded o;
    char words[256];
    assert_ok(loaded_open(test_golden("deepseek-v3"), DT_F32, &o));
    assert_true(left_out_describe(o.config, words, sizeof words));
    assert_contains(words, "model.layers.2");
    const char *folder = test_golden("deepseek-v3");
    assert_ok(weights_check(o.weights, with_tensor(folder, "model.layers.2.enorm.weight")));
    // not a layer behind those, nor another tensor
    assert_int_equal(weights_check(o.weights, with_tensor(folder, "model.layers.3.enorm.weight")),
                     ST_MISMATCH);
    assert_contains(status_message(), "model.layers.3.enorm.weight");
    assert_int_equal(weights_check(o.weights, with_tensor(folder, "model.layers.1.enorm.weight")),
                     ST_MISMATCH);
    loaded_close(&o);
    assert_ok(loaded_open(test_golden("deepseek-v2"), DT_F32, &o)); // which has none
    assert_false(left_out_describe(o.config, words, sizeof words));
    folder = with_tensor(test_golden("deepseek-v2"), "model.layers.2.enorm.weight");
    assert_int_equal(weights_check(o.weights, folder), ST_MISMATCH);
    loaded_close(&o);
}

// ---- the cache, and adapters --------------------------------------------------------------------
// A token and layer has rank + rope entries there, and nothing else is allocated.
TEST(cache_holds_latents)
{
    enum { BLOCK = 4, BLOCKS = 3, WIDTH = 16 + 4 };
    struct kv_memory m;
    size_t before, after, peak;
    struct loaded *o = loaded_of(test_golden("deepseek-v2"), DT_F32);
    device_allocated(o->dev, &before, &peak);
    assert_ok(kv_memory_alloc(&m, o->dev, o->config, DT_F32, BLOCK, BLOCKS, 0));
    device_allocated(o->dev, &after, &peak);
    assert_int_equal(after - before, 2 * BLOCKS * BLOCK * WIDTH * sizeof(float));
    assert_int_equal(kv_memory_block_bytes(o->config, DT_F32, BLOCK),
                     2 * BLOCK * WIDTH * sizeof(float));
    float *keys = m.view.k;
    const int64_t second = m.view.layers[1].offset + 2 * BLOCK * WIDTH;
    keys[second + 5] = 7;
    kv_memory_copy_block(&m, 2, 0);
    assert_true(keys[m.view.layers[1].offset + 5] == 7 && m.view.v == NULL);
    kv_memory_release(&m);
}

static enum status adapt(struct loaded *o, const char *targets, int *ret_n)
{
    json_t *json;
    struct adapter_config *config;
    struct adapter *a = NULL;
    assert_ok(adapter_config_json(4, 8, 0, false, targets, &json));
    assert_ok(adapter_config_from_json("adapter_config.json", json, &config));
    json_decref(json);
    enum status st = adapter_new(config, o->weights, DT_F32, &a);
    if (st == ST_OK) *ret_n = a->n;
    adapter_free(a);
    return st;
}

TEST(adapters_leave_kv_b_alone)
{
    int n;
    struct loaded *o = loaded_of(test_golden("deepseek-v2"), DT_F32);
    assert_ok(adapt(o, "q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj", &n));
    assert_int_equal(n, 8);
    assert_int_equal(adapt(o, "q_a_proj,kv_b_proj", &n), ST_UNSUPPORTED);
    assert_contains(status_message(), "kv_b_proj");
    assert_ok(adapt(o, "all-linear", &n)); // and a dense MLP's three, and the shared expert's
    assert_int_equal(n, 14);
}
