/* test_text_part.c: folders whose model also reads images: the text model is taken out of them.
 * They are made here of folders of tests/golden: its config as text_config, its tensors below
 * another name, and tensors of what reads images beside them. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/loaded.h"
#include "tests/support/support.h"

static const struct kind { // how such folders are published, and as transformers 5 writes them
    const char *golden, *type, *architecture, *text;
    const char *formats[2]; // of the text model's names behind "model."
    const char *extras[2];  // tensors beside it
} kinds[] = {
    {"gemma3",
     "gemma3",
     "Gemma3ForConditionalGeneration",
     "Gemma3ForCausalLM",
     {"language_model.model.%s", "model.language_model.%s"},
     {"vision_tower.vision_model.post_layernorm.bias",
      "model.multi_modal_projector.mm_soft_emb_norm.weight"}},
    {"gemma4-shared",
     "gemma4",
     "Gemma4ForConditionalGeneration",
     "Gemma4ForCausalLM",
     {"model.language_model.%s", "model.language_model.%s"},
     {"model.vision_tower.std_bias", "model.embed_vision.embedding_projection.weight"}},
    {"qwen35",
     "qwen3_5",
     "Qwen3_5ForConditionalGeneration",
     "Qwen3_5ForCausalLM",
     {"model.language_model.%s", "model.language_model.%s"},
     {"model.visual.merger.norm.weight", "mtp.norm.weight"}},
    {"qwen35-moe",
     "qwen3_5_moe",
     "Qwen3_5MoeForConditionalGeneration",
     "Qwen3_5MoeForCausalLM",
     {"model.language_model.%s", "model.language_model.%s"},
     {"model.visual.merger.norm.weight", "mtp.norm.weight"}},
    {"qwen3",
     "qwen3_vl",
     "Qwen3VLForConditionalGeneration",
     "Qwen3ForCausalLM",
     {"model.language_model.%s", "model.language_model.%s"},
     {"model.visual.merger.norm.weight", "model.visual.deepstack_merger_list.0.norm.weight"}},
    {"ministral3",
     "mistral3",
     "Mistral3ForConditionalGeneration",
     "Ministral3ForCausalLM",
     {"language_model.model.%s", "model.language_model.%s"},
     {"vision_tower.ln_pre.weight", "model.multi_modal_projector.norm.weight"}},
};
static const struct kind *kind = kinds;

static const char *golden_folder(void)
{
    return test_golden(kind->golden);
}

static json_t *golden_config(void)
{
    return json_of_file(test_path(golden_folder(), "config.json"));
}

// The config of such a folder, as published.
static json_t *whole_config(void)
{
    json_t *text = golden_config();
    json_object_del(text, "architectures");
    json_object_del(text, "dtype");
    json_object_del(text, "eos_token_id");
    return json_pack("{s:s, s:[s], s:o, s:{}, s:s, s:[i, i]}", "model_type", kind->type,
                     "architectures", kind->architecture, "text_config", text, "vision_config",
                     "torch_dtype", "bfloat16", "eos_token_id", 2, 6);
}

// tensor_format: of the text model's names behind "model.".
static void write_folder(const char *folder, const char *tensor_format, const char *extra)
{
    static const float zeros[4];
    static struct safetensors_source sources[256];
    json_t *config = test_keep(whole_config());
    assert_ok(json_write_file(test_path(folder, "config.json"), 0644, config));
    struct safetensors *set = tensors_of(golden_folder());
    int n = tensor_sources(set, sources);
    for (int i = 0; i < n; i++) {
        const char *name = safetensors_at(set, i)->name;
        assert_memory_equal(name, "model.", 6); // the head is tied
        snprintf(sources[i].name, sizeof sources[i].name, tensor_format, name + 6);
    }
    sources[n] = (struct safetensors_source){.n_dims = 1, .shape = {4}, .tag = zeros};
    snprintf(sources[n++].name, sizeof sources->name, "%s", extra);
    tensors_write(folder, sources, n);
}

static void take_text_model(void)
{
    struct loaded part;
    char words[256];
    struct loaded *golden = loaded_of(golden_folder(), DT_F32);
    assert_false(left_out_describe(golden->config, words, sizeof words));
    for (int i = 0; i < 2; i++) {
        const char *folder = test_folder();
        write_folder(folder, kind->formats[i], kind->extras[i]);
        assert_ok(loaded_open(folder, DT_F32, &part));
        assert_memory_equal(part.weights->base, golden->weights->base, golden->weights->bytes);
        assert_true(left_out_describe(part.config, words, sizeof words));
        assert_contains(words, "what reads images is not loaded");
        assert_int_equal(part.config->file_dtype, DT_BF16);
        assert_int_equal(part.config->n_eos, 2);
        assert_string_equal(part.config->architecture, kind->text);
        // a checkpoint is a text model's
        assert_ok(weights_save(part.weights, part.dev, folder, DT_F32));
        assert_ok(json_write_file(test_path(folder, "config.json"), 0644, part.config->source));
        loaded_close(&part);
        assert_ok(loaded_open(folder, DT_F32, &part));
        assert_false(part.config->is_text_part);
        assert_memory_equal(part.weights->base, golden->weights->base, golden->weights->bytes);
        loaded_close(&part);
    }
}

TEST(text_model_is_taken)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        kind = &kinds[i];
        take_text_model();
    }
    kind = kinds;
}

TEST(other_tensors_are_named)
{
    SCOPED(loaded_close) struct loaded m;
    const char *folder = test_folder();
    write_folder(folder, "language_model.model.%s", "speech_tower.weight");
    assert_fails(loaded_open(folder, DT_F32, &m), ST_MISMATCH,
                 "tensor speech_tower.weight is not part of a Gemma3ForCausalLM model");
}

// Published text_configs leave out what their class has by default.
TEST(silence_has_a_meaning)
{
    struct model_config *c;
    json_t *json = whole_config(), *text = json_object_get(json, "text_config");
    json_object_del(text, "num_attention_heads");
    json_object_del(text, "num_key_value_heads");
    json_object_del(text, "vocab_size");
    json_object_del(text, "head_dim");
    assert_ok(model_config_from_json("config.json", json, &c));
    assert_int_equal(c->vocab_size, 262208);
    assert_int_equal(c->layers[0].n_heads, 8);
    assert_int_equal(c->layers[0].n_kv_heads, 4);
    assert_int_equal(c->layers[0].head_dim, 256);
    model_config_free(c);
    json_object_set_new(json, "text_config", json_string("gemma3_text"));
    assert_fails(model_config_from_json("config.json", json, &c), ST_FORMAT,
                 "text_config must be an object");
    json_decref(json);
}

// The whole model's word counts, as in transformers, which writes text_config's default beside it.
TEST(whole_model_says_whether_tied)
{
    struct model_config *c;
    for (int tied = 0; tied < 2; tied++) {
        json_t *json = whole_config(), *text = json_object_get(json, "text_config");
        json_object_set_new(text, "tie_word_embeddings", json_boolean(!tied));
        json_object_set_new(json, "tie_word_embeddings", json_boolean(tied));
        assert_ok(model_config_from_json("config.json", json, &c));
        assert_int_equal(c->tie_embeddings, tied);
        assert_int_equal(json_is_true(json_object_get(c->source, "tie_word_embeddings")), tied);
        model_config_free(c);
        json_decref(json);
    }
}
