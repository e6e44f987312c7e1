/* test_family_config.c: configs of every family: as they are published, in older and newer styles;
 * silent ones, which mean what transformers' configs say then (5.17); and what would be guessed or
 * is other maths, which is refused. A case is a config of the list, or a folder's of tests/golden
 * ("golden/NAME", as transformers 5 wrote it), with the keys of `set`. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/config.h"
#include "tests/support/support.h"

static const json_t *base_of(const char *name)
{
    const json_t *bases = test_rows("family_config", "configs");
    for (size_t i = 0; i < json_array_size(bases); i++)
        if (strcmp(row_text(bases, i, "name"), name) == 0)
            return json_object_get(json_array_get(bases, i), "config");
    char path[128];
    snprintf(path, sizeof path, "tests/%s/config.json", name);
    return json_of_file(test_path(test_root(), path));
}

// `older`: without the keys that older folders do not have.
static enum status read_case(const json_t *row, const char *set, struct model_config **ret)
{
    static const char *const newer[] = {"rope_parameters", "layer_types", "no_rope_layers"};
    json_t *json =
        test_keep(json_deep_copy(base_of(json_string_value(json_object_get(row, "of")))));
    for (int i = 0; i < 3 && set && json_is_true(json_object_get(row, "older")); i++)
        json_object_del(json, newer[i]);
    if (set) json_object_update(json, json_object_get(row, set));
    enum status st = model_config_from_json("config.json", json, ret);
    return st;
}

// ---- what is read -------------------------------------------------------------------------------
#define CONFIG(type, field) #field, false, type, offsetof(struct model_config, field)
#define LAYER(type, field)  #field, true, type, offsetof(struct layer_config, field)
#define BLOCK(name, bit)    name, false, BIT, bit
enum type { INT, FLAG, BIT, FLOAT, DOUBLE };
static const struct field {
    const char *name;
    bool of_layer;
    enum type type;
    size_t offset; // of BIT: which one of `block`
} fields[] = {
    {LAYER(INT, latent.q_rank)},
    {LAYER(INT, latent.rank)},
    {LAYER(INT, latent.rope)},
    {LAYER(INT, latent.value)},
    {LAYER(INT, delta.n_heads)},
    {LAYER(INT, delta.n_key_heads)},
    {LAYER(INT, delta.key_dim)},
    {LAYER(INT, delta.head_dim)},
    {LAYER(INT, delta.taps)},
    {LAYER(INT, expert_latent)},
    {LAYER(INT, n_heads)},
    {LAYER(INT, n_kv_heads)},
    {LAYER(INT, head_dim)},
    {LAYER(INT, n_kv_heads)},
    {LAYER(INT, kv_from)},
    {LAYER(FLAG, k_is_v)},
    {CONFIG(INT, layer_input)},
    {CONFIG(INT, layer_input_vocab)},
    {LAYER(INT, rope)},
    {LAYER(INT, window)},
    {LAYER(INT, intermediate)},
    {LAYER(INT, shared_intermediate)},
    {LAYER(INT, moe.n_experts)},
    {LAYER(INT, moe.top_k)},
    {LAYER(INT, moe.n_group)},
    {LAYER(INT, moe.topk_group)},
    {LAYER(INT, moe.scoring)},
    {LAYER(FLAG, moe.norm_topk)},
    {LAYER(FLAG, shared_gate)},
    {LAYER(FLAG, router_bias)},
    {LAYER(FLOAT, moe.scale)},
    {LAYER(FLOAT, attn_scale)},
    {CONFIG(INT, max_positions)},
    {CONFIG(INT, n_layers)},
    {BLOCK("delta_bias", DELTA_BIAS)},
    {BLOCK("delta_conv_bias", DELTA_CONV_BIAS)},
    {CONFIG(INT, n_mtp_layers)},
    {CONFIG(INT, ropes[0].dim)},
    {CONFIG(INT, ropes[0].kind)},
    {CONFIG(INT, ropes[1].kind)},
    {CONFIG(INT, file_dtype)},
    {CONFIG(FLAG, ropes[0].interleaved)},
    {CONFIG(FLAG, tie_embeddings)},
    {BLOCK("qkv_bias", QKV_BIAS)},
    {BLOCK("o_bias", O_BIAS)},
    {BLOCK("qk_norm", QK_NORM)},
    {CONFIG(FLOAT, norm_eps)},
    {CONFIG(DOUBLE, router_aux_loss_coef)},
    {CONFIG(DOUBLE, ropes[0].theta)},
    {CONFIG(DOUBLE, ropes[1].theta)},
    {CONFIG(DOUBLE, ropes[0].attention_factor)},
    {CONFIG(DOUBLE, ropes[1].attention_factor)},
};

// ret_is_float: it has the digits of one.
static double value_of(const struct model_config *c, int layer, const char *name,
                       bool *ret_is_float)
{
    *ret_is_float = false;
    if (strcmp(name, "kv_elements") == 0) return (double)config_kv_elements(c);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const struct field *f = &fields[i];
        const void *at =
            (const char *)(f->of_layer ? (const void *)&c->layers[layer] : c) + f->offset;
        if (strcmp(f->name, name) != 0) continue;
        if (f->type == BIT) return (c->block & f->offset) != 0;
        *ret_is_float = f->type == FLOAT;
        return f->type == INT     ? *(const int *)at
               : f->type == FLAG  ? *(const bool *)at
               : f->type == FLOAT ? (double)*(const float *)at
                                  : *(const double *)at;
    }
    fail_msg("no field %s", name);
    return 0;
}

// A number, or the word of an enumeration.
static double wanted_value(const json_t *value)
{
    static const struct {
        const char *word;
        int value;
    } words[] = {{"default", ROPE_DEFAULT}, {"llama3", ROPE_LLAMA3},  {"yarn", ROPE_YARN},
                 {"sigmoid", MOE_SIGMOID},  {"softmax", MOE_SOFTMAX}, {"bf16", DT_BF16}};
    for (size_t i = 0; json_is_string(value) && i < sizeof words / sizeof *words; i++)
        if (strcmp(json_string_value(value), words[i].word) == 0) return words[i].value;
    assert_true(json_is_number(value));
    return json_number_value(value);
}

TEST(configs_mean_what_they_say)
{
    const json_t *cases = test_rows("family_config", "read"), *row, *expected, *value;
    size_t i, k;
    const char *name;
    json_array_foreach (cases, i, row) {
        struct model_config *c;
        assert_ok(read_case(row, "set", &c));
        json_array_foreach (json_object_get(row, "expect"), k, expected) {
            const int layer = (int)json_integer_value(json_object_get(expected, "layer"));
            json_object_foreach ((json_t *)expected, name, value) { // only read
                if (strcmp(name, "layer") == 0) continue;
                bool is_float;
                const double have = value_of(c, layer, name, &is_float), want = wanted_value(value);
                // a scale of attention is a root; everything else is what the config has
                const bool same = strcmp(name, "attn_scale") == 0
                                      ? fabs(have - want) <= 1e-6 * fabs(want)
                                      : have == (is_float ? (double)(float)want : want);
                if (!same)
                    fail_msg("%s, case %zu, layer %d: %s is %g, not %g", c->architecture, i, layer,
                             name, have, want);
            }
        }
        model_config_free(c);
    }
}

// Both give every layer the same window and the same positions.
TEST(older_keys_say_the_same)
{
    const json_t *cases = test_rows("family_config", "older_keys_say_the_same"), *row;
    size_t k;
    json_array_foreach (cases, k, row) {
        struct model_config *a, *b;
        assert_ok(read_case(row, json_object_get(row, "newer") ? "newer" : NULL, &a));
        assert_ok(read_case(row, "set", &b));
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
}

// ---- what is not --------------------------------------------------------------------------------
// Each by its name; where a case says no status, any.
TEST(other_maths_and_guesses_are_refused)
{
    const json_t *cases = test_rows("family_config", "refused"), *row;
    size_t i;
    json_array_foreach (cases, i, row) {
        struct model_config *c = NULL;
        const enum status st = read_case(row, "set", &c);
        if (st == ST_OK) fail_msg("case %zu, \"%s\", was taken", i, row_text(cases, i, "words"));
        if (json_object_get(row, "status")) assert_int_equal(st, row_status(cases, i, "status"));
        assert_message(row_text(cases, i, "words"));
    }
}
