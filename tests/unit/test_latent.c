/* test_latent.c: the families with latent attention: what their published configs say, what is
 * refused, the router's correction bias as a buffer, and the layers that are left out. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/adapter.h"
#include "common/model/config.h"
#include "infer-server/engine/kv_memory.h"
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include "trainer/learn/param_range.h"

// As the published folders have them, without what nobody reads.
#define YARN(mscale)                                                                               \
    "\"rope_theta\":10000,\"rope_scaling\":{\"beta_fast\":32,\"beta_slow\":1,\"factor\":40,"       \
    "\"mscale\":" mscale ",\"mscale_all_dim\":" mscale ","                                         \
    "\"original_max_position_embeddings\":4096,\"type\":\"yarn\"},"
#define V2_LITE                                                                                    \
    "{\"architectures\":[\"DeepseekV2ForCausalLM\"],\"model_type\":\"deepseek_v2\","               \
    "\"attention_bias\":false,\"first_k_dense_replace\":1,\"hidden_act\":\"silu\","                \
    "\"hidden_size\":2048,\"intermediate_size\":10944,\"kv_lora_rank\":512,"                       \
    "\"max_position_embeddings\":163840,\"moe_intermediate_size\":1408,\"moe_layer_freq\":1,"      \
    "\"n_group\":1,\"n_routed_experts\":64,\"n_shared_experts\":2,\"norm_topk_prob\":false,"       \
    "\"num_attention_heads\":16,\"num_experts_per_tok\":6,\"num_hidden_layers\":27,"               \
    "\"num_key_value_heads\":16,\"q_lora_rank\":null,\"qk_nope_head_dim\":128,"                    \
    "\"qk_rope_head_dim\":64,\"rms_norm_eps\":1e-06," YARN(                                        \
        "0.707") "\"routed_scaling_factor\":1.0,\"scoring_func\":\"softmax\","                     \
                 "\"tie_word_embeddings\":false,\"topk_group\":1,\"topk_method\":\"greedy\","      \
                 "\"torch_dtype\":\"bfloat16\",\"v_head_dim\":128,\"vocab_size\":102400"
#define V3                                                                                         \
    "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"model_type\":\"deepseek_v3\","               \
    "\"hidden_size\":7168,\"intermediate_size\":18432,\"kv_lora_rank\":512,"                       \
    "\"max_position_embeddings\":163840,\"moe_intermediate_size\":2048,\"n_group\":8,"             \
    "\"n_routed_experts\":256,\"n_shared_experts\":1,\"norm_topk_prob\":true,"                     \
    "\"num_attention_heads\":128,\"num_experts_per_tok\":8,\"num_hidden_layers\":61,"              \
    "\"num_key_value_heads\":128,\"num_nextn_predict_layers\":1,\"q_lora_rank\":1536,"             \
    "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"routed_scaling_factor\":2.5," YARN(        \
        "1.0") "\"scoring_func\":\"sigmoid\",\"topk_group\":4,"                                    \
               "\"topk_method\":\"noaux_tc\",\"v_head_dim\":128,\"vocab_size\":129280"
#define GLM                                                                                        \
    "{\"architectures\":[\"Glm4MoeLiteForCausalLM\"],\"model_type\":\"glm4_moe_lite\","            \
    "\"attention_bias\":false,\"hidden_size\":2048,\"intermediate_size\":10240,"                   \
    "\"kv_lora_rank\":512,\"max_position_embeddings\":202752,\"moe_intermediate_size\":1536,"      \
    "\"n_group\":1,\"n_routed_experts\":64,\"n_shared_experts\":1,\"norm_topk_prob\":true,"        \
    "\"num_attention_heads\":20,\"num_experts_per_tok\":4,\"num_hidden_layers\":47,"               \
    "\"num_key_value_heads\":20,\"num_nextn_predict_layers\":1,\"q_lora_rank\":768,"               \
    "\"qk_nope_head_dim\":192,\"qk_rope_head_dim\":64,\"rope_theta\":1000000,"                     \
    "\"routed_scaling_factor\":1.8,\"topk_group\":1,\"topk_method\":\"noaux_tc\","                 \
    "\"v_head_dim\":256,\"vocab_size\":154880"

static enum status read_text(const char *text, const char *more, struct model_config **ret)
{
    char whole[4096];
    json_t *json;
    snprintf(whole, sizeof whole, "%s%s}", text, more);
    assert_ok(json_parse("config.json", whole, strlen(whole), &json));
    enum status st = model_config_from_json("config.json", json, ret);
    json_decref(json);
    return st;
}

// ---- configs ------------------------------------------------------------------------------------
TEST(published_configs)
{
    const struct {
        const char *text;
        int dense, shared, q_rank, head_dim, value, n_group, experts;
        float moe_scale;
        double mscale; // of the softmax, before its square
        bool bias;
    } models[] = {
        {V2_LITE, 1, 2816, 0, 192, 128, 0, 64, 1.0f, 0.1 * 0.707 * log(40) + 1, false},
        {V3, 3, 2048, 1536, 192, 128, 8, 256, 2.5f, 0.1 * log(40) + 1, true},
        {GLM, 1, 1536, 768, 256, 256, 1, 64, 1.8f, 1, true},
    };
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        struct model_config *c;
        assert_ok(read_text(models[i].text, "", &c));
        const struct layer_config *first = &c->layers[models[i].dense - 1], *l = first + 1;
        const double scale = models[i].mscale * models[i].mscale / sqrt(models[i].head_dim);
        assert_int_equal(first->moe.n_experts, 0);
        assert_int_equal(first->shared_intermediate, 0);
        assert_int_equal(l->moe.n_experts, models[i].experts);
        assert_int_equal(l->moe.n_group, models[i].n_group);
        assert_true(l->moe.scale == models[i].moe_scale && l->router_bias == models[i].bias);
        assert_int_equal(l->shared_intermediate, models[i].shared);
        assert_int_equal(l->latent.q_rank, models[i].q_rank);
        assert_int_equal(l->head_dim, models[i].head_dim);
        assert_int_equal(l->latent.value, models[i].value);
        assert_float_equal(l->attn_scale, scale, 1e-7);
        assert_int_equal(c->ropes[0].dim, 64);
        assert_true(c->ropes[0].interleaved && c->ropes[0].attention_factor == 1);
        assert_int_equal(config_kv_elements(c), 576 * c->n_layers);
        assert_int_equal(c->n_skipped_layers, models[i].bias ? 1 : 0);
        model_config_free(c);
    }
}

// More keys, of which the last counts; each refused by its name.
TEST(refusals)
{
    static const struct {
        const char *text, *more, *words;
    } cases[] = {
        {V2_LITE, ",\"attention_bias\":true", "attention_bias"},
        {V2_LITE, ",\"topk_method\":\"noaux_tc\"", "topk_method"},
        {V2_LITE, ",\"norm_topk_prob\":true", "norm_topk_prob"},
        {V2_LITE, ",\"scoring_func\":\"sigmoid\"", "scoring_func"},
        {V2_LITE, ",\"num_key_value_heads\":8", "num_key_value_heads"},
        {V2_LITE, ",\"qk_rope_head_dim\":63", "qk_rope_head_dim"},
        {V2_LITE, ",\"v_head_dim\":200", "v_head_dim"},
        {V2_LITE,
         ",\"head_dim\":4,\"rope_scaling\":{\"type\":\"longrope\","
         "\"original_max_position_embeddings\":64,\"short_factor\":[1,1],"
         "\"long_factor\":[1,1]}",
         "longrope"},
        {V3, ",\"partial_rotary_factor\":0.5", "partial_rotary_factor"},
        {V3, ",\"n_shared_experts\":1048576", "n_shared_experts"},
        {V3, ",\"topk_method\":\"greedy\"", "topk_method"},
        {V3, ",\"n_group\":7", "n_group"},
        {V3, ",\"topk_group\":9", "topk_group"},
        {V3, ",\"kv_lora_rank\":0", "kv_lora_rank"},
        {GLM, ",\"mlp_layer_types\":[\"sparse\",\"dense\"]", "mlp_layer_types[1]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct model_config *c;
        if (read_text(cases[i].text, cases[i].more, &c) == ST_OK)
            fail_msg("%s was taken", cases[i].more);
        assert_contains(status_message(), cases[i].words);
    }
}

// ---- buffers ------------------------------------------------------------------------------------
#define BIAS "model.layers.1.mlp.gate.e_score_correction_bias"

// f32 in an arena of bf16 and in a folder of bf16, at the same element of every arena, and in no
// range that is trained.
TEST(bias_is_a_buffer)
{
    struct loaded f32, bf16;
    struct safetensors *set, *saved;
    struct param_ranges ranges;
    const char *folder = test_golden("deepseek-v3"), *copy = test_folder();
    assert_ok(loaded_open(folder, DT_F32, &f32));
    assert_ok(loaded_open(folder, DT_BF16, &bf16));
    assert_ok(safetensors_open(folder, &set));
    const struct safetensors_entry *want = safetensors_find(set, BIAS);
    const struct weight_tensor *a = weights_find(f32.weights, BIAS),
                               *b = weights_find(bf16.weights, BIAS);
    assert_true(a->offset == b->offset && a->offset >= f32.weights->n_elements);
    assert_memory_equal(bf16.weights->layers[1].router_bias, want->data, want->bytes);
    assert_memory_equal(f32.weights->layers[1].router_bias, want->data, want->bytes);
    assert_null(bf16.weights->layers[0].router_bias);
    assert_ok(weights_save(bf16.weights, bf16.dev, copy, DT_BF16));
    assert_ok(safetensors_open(copy, &saved));
    const struct safetensors_entry *have = safetensors_find(saved, BIAS);
    assert_true(have->dt == DT_F32);
    assert_memory_equal(have->data, want->data, want->bytes);
    assert_true(safetensors_find(saved, "lm_head.weight")->dt == DT_BF16);
    assert_ok(param_ranges_of(bf16.weights, NULL, &ranges));
    assert_int_equal(ranges.n, 1);
    assert_true(ranges.list[0].first == 0 && ranges.list[0].n == bf16.weights->n_elements);
    assert_int_equal(param_ranges_parameters(&ranges), bf16.weights->n_parameters - b->n);
    param_ranges_release(&ranges);
    safetensors_free(set);
    safetensors_free(saved);
    loaded_close(&f32);
    loaded_close(&bf16);
}

// ---- layers that are left out -------------------------------------------------------------------
// The folder's tensors and one more.
static const char *with_tensor(const char *folder, const char *name)
{
    struct safetensors *set;
    const char *copy = test_folder();
    assert_ok(safetensors_open(folder, &set));
    static const float zeros[3];
    static struct safetensors_source sources[128];
    const int n = tensor_sources(set, sources);
    sources[n] = (struct safetensors_source){.n_dims = 1, .shape = {3}, .tag = zeros};
    snprintf(sources[n].name, sizeof sources[n].name, "%s", name);
    tensors_write(copy, sources, n + 1);
    safetensors_free(set);
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
    struct loaded o;
    struct kv_memory m;
    size_t before, after, peak;
    assert_ok(loaded_open(test_golden("deepseek-v2"), DT_F32, &o));
    device_allocated(o.dev, &before, &peak);
    assert_ok(kv_memory_alloc(&m, o.dev, o.config, DT_F32, BLOCK, BLOCKS, 0));
    device_allocated(o.dev, &after, &peak);
    assert_int_equal(after - before, 2 * BLOCKS * BLOCK * WIDTH * sizeof(float));
    assert_int_equal(kv_memory_block_bytes(o.config, DT_F32, BLOCK),
                     2 * BLOCK * WIDTH * sizeof(float));
    float *keys = m.view.k;
    const int64_t second = m.view.layers[1].offset + 2 * BLOCK * WIDTH;
    keys[second + 5] = 7;
    kv_memory_copy_block(&m, 2, 0);
    assert_true(keys[m.view.layers[1].offset + 5] == 7 && m.view.v == NULL);
    kv_memory_release(&m);
    loaded_close(&o);
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
    struct loaded o;
    int n;
    assert_ok(loaded_open(test_golden("deepseek-v2"), DT_F32, &o));
    assert_ok(adapt(&o, "q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj", &n));
    assert_int_equal(n, 8);
    assert_int_equal(adapt(&o, "q_a_proj,kv_b_proj", &n), ST_UNSUPPORTED);
    assert_contains(status_message(), "kv_b_proj");
    assert_ok(adapt(&o, "all-linear", &n)); // and a dense MLP's three, and the shared expert's
    assert_int_equal(n, 14);
    loaded_close(&o);
}
