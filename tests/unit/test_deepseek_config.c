/* test_deepseek_config.c: what a config.json of the families with latent attention means where it
 * is silent: what transformers' configs say then (5.17). And what would be guessed is refused. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/config.h"
#include "tests/support/support.h"

static const char *const v2 = "deepseek_v2\",\"architectures\":[\"DeepseekV2ForCausalLM\"]",
                         *const v3 = "deepseek_v3\",\"architectures\":[\"DeepseekV3ForCausalLM\"]",
                         *const glm =
                             "glm4_moe_lite\",\"architectures\":[\"Glm4MoeLiteForCausalLM\"]";

// The sizes that every config must name, and `more`.
static enum status read_config(const char *family, const char *more, struct model_config **ret)
{
    char text[1024];
    json_t *json;
    snprintf(text, sizeof text,
             "{\"model_type\":\"%s,\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":48,"
             "\"num_hidden_layers\":5,\"num_attention_heads\":2%s}",
             family, more);
    assert_ok(json_parse("config.json", text, strlen(text), &json));
    enum status st = model_config_from_json("config.json", json, ret);
    json_decref(json);
    return st;
}

TEST(silent_configs_mean_what_transformers_says)
{
    const struct {
        const char *family, *more;
        int q_rank, rank, rope, value, head_dim, first, experts, top_k, width, shared, n_group,
            topk_group, positions, skipped;
        float scale;
        bool norm, sigmoid;
        double eps;
    } cases[] = {
        {v2,    ",\"num_experts_per_tok\":6",
         1536,  512,
         64,    128,
         192,   0,
         64,    6,
         1407,  2 * 1407,
         0,     0,
         2048,  0,
         1,     false,
         false, 1e-6},
        {v3,   "",   1536, 512, 64,   128, 192,  3,    256,  8,
         2048, 2048, 8,    4,   4096, 1,   2.5f, true, true, 1e-6},
        {glm,  "",   768, 512, 64,     256, 256,  1,    64,   4,
         1536, 1536, 1,   1,   202752, 0,   1.8f, true, true, 1e-5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config *c;
        assert_ok(read_config(cases[i].family, cases[i].more, &c));
        const struct layer_config *l = &c->layers[4];
        assert_int_equal(l->latent.q_rank, cases[i].q_rank);
        assert_int_equal(l->latent.rank, cases[i].rank);
        assert_int_equal(l->latent.rope, cases[i].rope);
        assert_int_equal(l->latent.value, cases[i].value);
        assert_int_equal(l->head_dim, cases[i].head_dim);
        for (int k = 0; k < 5; k++)
            assert_int_equal(c->layers[k].moe.n_experts > 0, k >= cases[i].first);
        assert_int_equal(l->moe.n_experts, cases[i].experts);
        assert_int_equal(l->moe.top_k, cases[i].top_k);
        assert_int_equal(l->intermediate, cases[i].width);
        assert_int_equal(l->shared_intermediate, cases[i].shared);
        assert_int_equal(l->moe.n_group, cases[i].n_group);
        assert_int_equal(l->moe.topk_group, cases[i].topk_group);
        assert_true(l->moe.scale == cases[i].scale && l->moe.norm_topk == cases[i].norm);
        assert_true((l->moe.scoring == MOE_SIGMOID) == cases[i].sigmoid);
        assert_int_equal(c->max_positions, cases[i].positions);
        assert_int_equal(c->n_skipped_layers, cases[i].skipped);
        assert_true(c->norm_eps == (float)cases[i].eps && !c->tie_embeddings);
        assert_true(c->ropes[0].interleaved && c->ropes[0].theta == 10000);
        model_config_free(c);
    }
}

// "mscale_all_dim" scales scores whatever stretches positions, as in transformers.
TEST(mscale_is_of_every_kind_of_rope)
{
    const struct {
        const char *kind;
        bool scales;
    } cases[] = {{"yarn", true}, {"linear", true}, {"dynamic", true}, {"default", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config *c;
        char more[256];
        const double mscale = cases[i].scales ? 0.1 * 0.7 * log(40) + 1 : 1;
        snprintf(more, sizeof more,
                 ",\"rope_scaling\":{\"type\":\"%s\",\"factor\":40,\"mscale_all_dim\":0.7,"
                 "\"original_max_position_embeddings\":64}",
                 cases[i].kind);
        assert_ok(read_config(v3, more, &c));
        assert_true(fabs(c->layers[0].attn_scale - mscale * mscale / sqrt(192)) < 1e-7);
        model_config_free(c);
    }
}

TEST(guesses_are_refused)
{
    const struct {
        const char *family, *more;
        enum status status;
        const char *words;
    } cases[] = {
        {v2, "", ST_FORMAT, "num_experts_per_tok is missing"},
        {v2, ",\"num_experts_per_tok\":null", ST_FORMAT, "num_experts_per_tok is missing"},
        {v2, ",\"num_experts_per_tok\":6,\"topk_method\":\"group_limited_greedy\",\"n_group\":8",
         ST_FORMAT, "group_limited_greedy needs n_group and topk_group"},
        {v2, ",\"num_experts_per_tok\":6,\"topk_method\":\"group_limited_greedy\",\"topk_group\":3",
         ST_FORMAT, "group_limited_greedy needs n_group and topk_group"},
        {v2, ",\"num_experts_per_tok\":6,\"rope_interleave\":false", ST_UNSUPPORTED,
         "DeepSeek-V2 rotates neighbours"},
        {v3, ",\"topk_group\":null", ST_FORMAT, "topk_group 0 of n_group 8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config *c = NULL;
        assert_status(read_config(cases[i].family, cases[i].more, &c), cases[i].status);
        assert_message(cases[i].words);
    }
    struct model_config *c;
    assert_ok(read_config(v3, ",\"rope_interleave\":false", &c));
    assert_false(c->ropes[0].interleaved);
    model_config_free(c);
}
