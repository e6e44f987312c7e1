/* test_moe_config.c: what config.json says of experts, and of which layers have them. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/config.h"
#include "tests/support/support.h"

static json_t *read_folder(const char *name)
{
    json_t *json = NULL;
    char path[128];
    snprintf(path, sizeof path, "tests/golden/%s/config.json", name);
    assert_ok(json_read_file(test_path(test_root(), path), 1 << 20, &json));
    return json;
}

TEST(qwen_experts_are_read)
{
    struct model_config *c = NULL;
    json_t *json = read_folder("qwen2-moe");
    assert_ok(model_config_from_json("config.json", json, &c));
    assert_int_equal(c->layers[1].moe.n_experts, 6);
    assert_int_equal(c->layers[1].moe.top_k, 2);
    assert_int_equal(c->layers[1].intermediate, 40);
    assert_int_equal(c->layers[1].shared_intermediate, 72);
    assert_true(c->layers[1].shared_gate && !c->layers[1].moe.norm_topk && c->qkv_bias);
    model_config_free(c);
    json_decref(json);
    json = read_folder("qwen3-moe");
    json_object_set_new(json, "num_experts", json_integer(5)); // the older key
    assert_ok(model_config_from_json("config.json", json, &c));
    assert_int_equal(c->layers[0].moe.n_experts, 5);
    assert_true(c->layers[0].moe.norm_topk && c->qk_norm);
    assert_int_equal(c->layers[0].shared_intermediate, 0);
    model_config_free(c);
    json_decref(json);
}

// Layer l's experts, of which there are `experts` in a layer that has them.
static void expect_experts(const json_t *json, int l, int experts)
{
    struct model_config *c = NULL;
    assert_ok(model_config_from_json("config.json", (json_t *)json, &c));
    assert_int_equal(c->layers[l].moe.n_experts, experts);
    assert_int_equal(c->layers[l].intermediate, experts ? 40 : 72);
    model_config_free(c);
}

TEST(experts_in_some_layers)
{
    struct model_config *c = NULL;
    json_t *json = read_folder("qwen3-moe-some");
    for (int l = 0; l < 4; l++) expect_experts(json, l, l == 1 ? 5 : 0);
    json_object_set_new(json, "mlp_only_layers", json_pack("[ii]", 1, 7)); // there is no layer 7
    for (int l = 0; l < 4; l++) expect_experts(json, l, l == 3 ? 5 : 0);
    json_object_set_new(json, "decoder_sparse_step", json_integer(1));
    for (int l = 0; l < 4; l++) expect_experts(json, l, l != 1 ? 5 : 0);
    json_object_set_new(json, "num_experts_per_tok", json_integer(9)); // of 5
    assert_int_not_equal(model_config_from_json("config.json", json, &c), ST_OK);
    assert_non_null(strstr(status_message(), "num_experts_per_tok"));
    json_decref(json);
    json = read_folder("qwen2-moe"); // its shared expert stands beside experts alone
    json_object_set_new(json, "mlp_only_layers", json_pack("[i]", 0));
    assert_ok(model_config_from_json("config.json", json, &c));
    assert_int_equal(c->layers[0].shared_intermediate, 0);
    assert_int_equal(c->layers[0].intermediate, 96);
    assert_int_equal(c->layers[1].shared_intermediate, 72);
    model_config_free(c);
    json_decref(json);
}
