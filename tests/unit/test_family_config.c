/* test_family_config.c: configs as they are published, in the older style, against those of
 * tests/golden, which transformers 5 wrote. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/config.h"
#include "tests/support/support.h"

static json_t *golden_config(const char *name)
{
    json_t *json = NULL;
    char path[128];
    snprintf(path, sizeof path, "tests/golden/%s/config.json", name);
    assert_ok(json_read_file(test_path(test_root(), path), 1 << 20, &json));
    return json;
}

// The golden folder's config without its newer keys, and with the keys of `older` instead.
static json_t *older_config(const char *name, const char *older)
{
    json_t *json = golden_config(name), *keys = json_loads(older, 0, NULL);
    assert_non_null(keys);
    json_object_del(json, "rope_parameters");
    json_object_del(json, "layer_types");
    json_object_del(json, "no_rope_layers");
    json_object_update(json, keys);
    json_decref(keys);
    return json;
}

static struct model_config *read_config(json_t *json)
{
    struct model_config *c = NULL;
    assert_ok(model_config_from_json("config.json", json, &c));
    json_decref(json);
    return c;
}

// Both give every layer the same window and the same positions.
static void same_layers(const char *name, const char *older)
{
    struct model_config *a = read_config(golden_config(name)),
                        *b = read_config(older_config(name, older));
    assert_int_equal(a->n_ropes, b->n_ropes);
    for (int i = 0; i < a->n_ropes; i++) {
        float *of_a = rope_table(a, i, 100), *of_b = rope_table(b, i, 100);
        assert_int_equal(a->ropes[i].dim, b->ropes[i].dim);
        assert_memory_equal(of_a, of_b, 100 * (size_t)a->ropes[i].dim * sizeof *of_a);
        free(of_a);
        free(of_b);
    }
    for (int l = 0; l < a->n_layers; l++) {
        assert_int_equal(a->layers[l].window, b->layers[l].window);
        assert_int_equal(a->layers[l].rope, b->layers[l].rope);
    }
    model_config_free(a);
    model_config_free(b);
}

TEST(older_keys_say_the_same)
{
    same_layers("olmo3", "{\"rope_theta\": 500000}");
    same_layers("olmo3", "{\"rope_theta\": 500000, \"rope_scaling\": null}");
    same_layers("smollm3", "{\"rope_theta\": 2000000.0, \"no_rope_layer_interval\": 4}");
    same_layers("gemma3", "{\"rope_theta\": 1000000, \"rope_local_base_freq\": 10000,"
                          "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 8.0},"
                          "\"sliding_window_pattern\": 6}");
    same_layers("gemma3", "{\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 8.0}}");
    same_layers("smollm3", "{\"no_rope_layers\": [1, 1, 1, 0], \"no_rope_layer_interval\": 2}");
}

// Only the positions of layers without a window are stretched.
TEST(olmo3_stretches_full_layers)
{
    struct model_config *c = read_config(older_config(
        "olmo3",
        "{\"rope_theta\": 500000, \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 8.0,"
        "\"attention_factor\": 1.2079441541679836, \"beta_fast\": 32, \"beta_slow\": 1,"
        "\"original_max_position_embeddings\": 64}}"));
    assert_int_equal(c->layers[3].rope, 0);
    assert_int_equal(c->ropes[0].kind, ROPE_YARN);
    assert_int_equal(c->layers[0].rope, 1);
    assert_int_equal(c->ropes[1].kind, ROPE_DEFAULT);
    assert_true(c->ropes[1].theta == 500000 && c->ropes[1].attention_factor == 1);
    model_config_free(c);
}

TEST(smollm3_windows)
{
    struct model_config *c = read_config(
        older_config("smollm3", "{\"use_sliding_window\": true, \"sliding_window\": 6}"));
    for (int l = 0; l < 4; l++) assert_int_equal(c->layers[l].window, l == 3 ? 6 : 0);
    model_config_free(c);
    json_t *json = older_config("smollm3", "{\"no_rope_layers\": [1, 0]}");
    assert_status(model_config_from_json("config.json", json, &c), ST_FORMAT);
    assert_message("no_rope_layers must list num_hidden_layers (4) numbers");
    json_decref(json);
}

TEST(gemma3_refusals)
{
    struct model_config *c;
    json_t *json = older_config("gemma3", "{\"attn_logit_softcapping\": 50.0}");
    assert_status(model_config_from_json("config.json", json, &c), ST_UNSUPPORTED);
    assert_message("attn_logit_softcapping is not supported");
    json_object_del(json, "attn_logit_softcapping");
    json_object_set_new(json, "use_bidirectional_attention", json_true());
    assert_status(model_config_from_json("config.json", json, &c), ST_UNSUPPORTED);
    assert_message("use_bidirectional_attention is not supported");
    json_decref(json);
}

TEST(no_window_is_said_by_null)
{
    struct model_config *c = read_config(
        older_config("qwen3-moe", "{\"use_sliding_window\": true, \"max_window_layers\": 0,"
                                  "\"sliding_window\": null}"));
    assert_int_equal(c->layers[0].window, 0);
    model_config_free(c);
}

// Keys that would change what is computed, and silence that means something else than here.
TEST(other_maths_is_refused)
{
    const json_t *cases = test_rows("family_config", "other_maths_is_refused");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct model_config *c;
        json_t *json = older_config(row_text(cases, i, "name"), row_text(cases, i, "older"));
        if (model_config_from_json("config.json", json, &c) == ST_OK)
            fail_msg("%s: %s was taken", row_text(cases, i, "name"), row_text(cases, i, "older"));
        assert_contains(status_message(), row_text(cases, i, "words"));
        json_decref(json);
    }
}
