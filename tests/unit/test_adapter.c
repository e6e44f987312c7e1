/* test_adapter.c: LoRA adapters: PEFT's config and folder (common/model/adapter_config.h,
 * adapter.h), and a forward pass over rows of several adapters (its table). That the numbers
 * are PEFT's, tests/golden tells. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/safetensors.h"
#include "tests/support/peft.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_adapter.h"
#include "tests/support/tiny_model.h"

enum { VOCAB = 50, LAYERS = 2, TOKENS = 6 };

// ---- the config ---------------------------------------------------------------------------------
TEST(targets_match_as_in_peft)
{
#define Q0 "model.layers.0.self_attn.q_proj"
#define Q3 "model.layers.13.self_attn.q_proj"
    const json_t *cases = test_rows("adapter", "targets_match_as_in_peft");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        char text[512];
        int rank;
        float scale;
        snprintf(text, sizeof text, "{'peft_type': 'LORA', %s}", row_text(cases, i, "fields"));
        for (char *c = text; *c; c++)
            if (*c == '\'') *c = '"';
        struct adapter_config *config = tiny_adapter_config(text);
        assert_ok(adapter_config_match(config, row_text(cases, i, "module"), false, &rank, &scale));
        if (rank != row_int(cases, i, "rank") ||
            (rank && fabs(scale - row_number(cases, i, "scale")) > 1e-6))
            fail_msg("%s: %s has rank %d and scale %g", text, row_text(cases, i, "module"), rank,
                     scale);
        adapter_config_free(config);
    }
}

TEST(other_kinds_are_refused_by_name)
{
    const json_t *cases = test_rows("adapter", "other_kinds_are_refused_by_name");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *json;
        struct adapter_config *config = NULL;
        assert_ok(json_parse("test", row_text(cases, i, "text"), strlen(row_text(cases, i, "text")),
                             &json));
        assert_status(adapter_config_from_json("test", json, &config),
                      row_status(cases, i, "code"));
        assert_message(row_text(cases, i, "says"));
        assert_null(config);
        json_decref(json);
    }
}

TEST(broken_patterns_are_told)
{
    int rank;
    float scale;
    struct adapter_config *config = tiny_adapter_config("{\"target_modules\": \"a(\"}");
    assert_status(adapter_config_match(config, "a", false, &rank, &scale), ST_INVALID);
    assert_message("target_modules: the regular expression \"a(\"");
    adapter_config_free(config);
    config = tiny_adapter_config("{\"target_modules\":[\"a\"],\"rank_pattern\":{\"a\":\"x\"}}");
    assert_status(adapter_config_match(config, "a", false, &rank, &scale), ST_INVALID);
    assert_message("rank_pattern: the value of \"a\"");
    adapter_config_free(config);
    config = tiny_adapter_config("{\"target_modules\":[\"a\"],\"rank_pattern\":{\"a\":1.5}}");
    assert_status(adapter_config_match(config, "a", false, &rank, &scale), ST_INVALID);
    assert_message("a has rank 1.5");
    adapter_config_free(config);
    config = tiny_adapter_config("{\"target_modules\":[\"a\"],\"alpha_pattern\":{\"a\":1e300}}");
    assert_status(adapter_config_match(config, "a", false, &rank, &scale), ST_INVALID);
    assert_message("alpha_pattern: a has alpha 1e+300");
    adapter_config_free(config);
}

// ---- the folder ---------------------------------------------------------------------------------
static struct reference base; // a tiny model, opened

static const char *base_folder(void)
{
    static const char *folder;
    if (!folder) {
        folder = test_folder();
        assert_ok(tiny_model_write(folder, 32, LAYERS, VOCAB, 3));
    }
    return folder;
}

static void open_base(void)
{
    reference_open(base_folder(), "cpu", &base);
}

static void close_base(void)
{
    reference_close(&base);
}

static struct adapter *adapter_of(const char *text)
{
    return tiny_adapter_new(base.dev, base.weights, text);
}

static void release(struct adapter *a)
{
    adapter_free(a);
}

// One that was trained: B is not zero.
static struct adapter *random_adapter(const char *text, uint64_t seed)
{
    struct adapter *a = adapter_of(text);
    assert_ok(tiny_adapter_fill(a, base.dev, seed));
    return a;
}

#define ALL "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":8,\"target_modules\":\"all-linear\"}"
#define QV                                                                                         \
    "{\"peft_type\":\"LORA\",\"r\":3,\"lora_alpha\":8,\"target_modules\":[\"q_proj\",\"v_proj\"]}"

TEST(a_plan_lists_what_is_adapted)
{
    struct adapter *a = adapter_of(ALL);
    assert_int_equal(a->n, 7 * LAYERS);
    assert_int_equal(a->weights->n_tensors, 14 * LAYERS);
    assert_string_equal(a->weights->tensors[0].name,
                        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
    for (int i = 0; i < a->weights->n_tensors; i++)
        assert_int_equal(a->weights->tensors[i].offset % 128, 0);
    release(a);
    struct adapter *none = NULL;
    assert_status(adapter_new(tiny_adapter_config("{\"target_modules\":[\"c_attn\"]}"),
                              base.weights, DT_F32, &none),
                  ST_INVALID);
    assert_message("[\"c_attn\"] names no matrix that can be adapted");
    assert_message("model.layers.0.self_attn.q_proj");
}

TEST(a_new_adapter_is_kaiming_and_zero)
{
    struct adapter *a = adapter_of(ALL);
    float x[4096], most = 0;
    assert_ok(adapter_init(a, base.dev, 9));
    assert_ok(weights_read(a->weights, base.dev, a->list[0].a, x));
    for (int i = 0; i < 4 * 32; i++) most = fmaxf(most, fabsf(x[i]));
    assert_true(most <= 1 / sqrtf(32) && most > 0.9f / sqrtf(32));
    assert_ok(weights_read(a->weights, base.dev, a->list[0].b, x));
    for (int i = 0; i < 32 * 4; i++) assert_true(x[i] == 0);
    release(a);
}

TEST(a_folder_goes_and_comes)
{
    const char *folder = test_folder();
    struct adapter *a = random_adapter(QV, 5), *b = adapter_of(QV);
    assert_ok(adapter_save(a, base.dev, folder, DT_F32));
    assert_ok(adapter_load(b, base.dev, folder));
    assert_memory_equal(a->weights->base, b->weights->base, (size_t)a->weights->n_elements * 4);
    // another config: tensors are missing, or too many
    struct adapter *all = adapter_of("{\"r\":3,\"target_modules\":\"all-linear\"}");
    assert_status(adapter_load(all, base.dev, folder), ST_NOT_FOUND);
    assert_message("k_proj.lora_A.weight is missing");
    struct adapter *q = adapter_of("{\"r\":3,\"target_modules\":[\"q_proj\"]}");
    assert_status(adapter_load(q, base.dev, folder), ST_UNSUPPORTED);
    assert_message("v_proj.lora_A.weight is none that target_modules calls for");
    struct adapter *rank = adapter_of("{\"r\":2,\"target_modules\":[\"q_proj\",\"v_proj\"]}");
    assert_status(adapter_load(rank, base.dev, folder), ST_MISMATCH);
    assert_message("has shape (3, 32); adapter_config.json calls for (2, 32)");
    release(a);
    release(b);
    release(all);
    release(q);
    release(rank);
}

// ---- the forward pass ---------------------------------------------------------------------------
static const int32_t ids[TOKENS] = {3, 14, 15, 9, 26, 5};

// Logits of the same ids as n sequences of one batch, each with its adapter: (n, TOKENS, VOCAB).
static void logits_of(const int *adapter, int n, float *ret)
{
    void *x;
    batch_clear(base.batch);
    for (int s = 0; s < n; s++)
        assert_ok(batch_add_packed(base.batch, ids, TOKENS, -1, adapter[s], NULL));
    for (int i = 0; i < n * TOKENS; i++) assert_ok(batch_want_row(base.batch, i));
    assert_ok(batch_commit(base.batch, 0, 0));
    model_forward(base.model, batch_view(base.batch), NULL, NULL, &x);
    model_head(base.model, x, batch_rows_device(base.batch), 0, n * TOKENS);
    memcpy(ret, base.model->logits, (size_t)n * TOKENS * VOCAB * sizeof *ret);
}

TEST(one_batch_has_several)
{
    enum { N = 4, EACH = TOKENS * VOCAB };
    static float alone[3][EACH], plain[EACH], together[N * EACH];
    static const int order[N] = {1, -1, 0, 1};
    struct adapter *a = random_adapter(ALL, 5), *b = random_adapter(QV, 6);
    struct adapter_table *table;
    reference_logits(&base, ids, TOKENS, plain); // without a table
    assert_ok(adapter_table_new(base.dev, base.weights, 2, 4, &table));
    base.model->adapters = table;
    assert_ok(adapter_table_set(table, 0, a));
    assert_ok(adapter_table_set(table, 1, b));
    for (int i = -1; i < 2; i++) logits_of(&i, 1, alone[i + 1]);
    logits_of(order, N, together);
    for (int s = 0; s < N; s++)
        assert_memory_equal(together + s * EACH, alone[order[s] + 1], sizeof plain);
    assert_memory_equal(alone[0], plain, sizeof plain);
    assert_memory_not_equal(alone[1], plain, sizeof plain);
    assert_memory_not_equal(alone[2], alone[1], sizeof plain);
    // one that is taken out changes nothing any more
    assert_ok(adapter_table_set(table, 1, NULL));
    logits_of((int[]){1}, 1, together);
    assert_memory_equal(together, plain, sizeof plain);
    assert_status(adapter_table_set(table, 2, a), ST_INVALID);
    base.model->adapters = NULL;
    adapter_table_free(table);
    release(a);
    release(b);
}

// By which captured steps are known: it says which blocks have an operation of their own.
TEST(sites_are_told_apart)
{
    struct adapter *all = random_adapter(ALL, 5), *qv = random_adapter(QV, 6);
    struct adapter_table *table;
    assert_ok(adapter_table_new(base.dev, base.weights, 2, 4, &table));
    assert_true(adapter_table_sites(table) == 0);
    assert_ok(adapter_table_set(table, 0, all));
    const uint64_t of_all = adapter_table_sites(table);
    assert_ok(adapter_table_set(table, 1, qv)); // it changes nothing that the first does not
    assert_true(adapter_table_sites(table) == of_all);
    assert_ok(adapter_table_set(table, 0, NULL));
    const uint64_t of_qv = adapter_table_sites(table);
    assert_true(of_qv != 0 && of_all != 0 && of_qv != of_all);
    assert_ok(adapter_table_set(table, 1, NULL));
    assert_true(adapter_table_sites(table) == 0);
    assert_ok(adapter_table_set(table, 1, all)); // wherever it is
    assert_true(adapter_table_sites(table) == of_all);
    adapter_table_free(table);
    release(all);
    release(qv);
}

// vLLM's PEFTHelper: r, lora_alpha and target_modules must be there, bias is "none", and
// modules_to_save and use_dora are not set.
TEST(our_config_is_one_for_vllm)
{
    static const char *const targets[] = {"all-linear", "q_proj,v_proj"};
    for (size_t i = 0; i < 2; i++) {
        json_t *json;
        assert_ok(adapter_config_json(4, 8, 0.1, true, targets[i], &json));
        assert_int_equal(json_integer_value(json_object_get(json, "r")), 4);
        assert_true(json_number_value(json_object_get(json, "lora_alpha")) == 8);
        assert_true(json_is_true(json_object_get(json, "use_rslora")));
        const json_t *modules = json_object_get(json, "target_modules");
        assert_true(i ? json_array_size(modules) == 2 : json_is_string(modules));
        assert_string_equal(json_string_value(json_object_get(json, "bias")), "none");
        assert_null(json_object_get(json, "modules_to_save"));
        assert_null(json_object_get(json, "use_dora"));
        json_decref(json);
    }
}

TEST(peft_opens_our_folder)
{
    static float have[TOKENS * VOCAB];
    const char *python = peft_python(), *folder = test_folder();
    json_t *json;
    struct adapter_config *config;
    struct adapter *made, *a = random_adapter(ALL, 8);
    struct adapter_table *table;
    // with a config of our own making
    assert_ok(adapter_config_json(4, 8, 0.1, false, "all-linear", &json));
    assert_ok(adapter_config_from_json("test", json, &config));
    json_decref(json);
    assert_ok(adapter_new(config, base.weights, DT_F32, &made));
    weights_bind(made->weights, a->weights->base);
    assert_ok(adapter_save(made, base.dev, folder, DT_F32));
    assert_ok(adapter_table_new(base.dev, base.weights, 1, 4, &table));
    assert_ok(adapter_table_set(table, 0, made));
    base.model->adapters = table;
    logits_of((int[]){0}, 1, have);
    peft_agrees(python, base_folder(), folder, ids, TOKENS, have, VOCAB);
    base.model->adapters = NULL;
    adapter_table_free(table);
    adapter_free(made);
    release(a);
}

TESTS_BETWEEN(open_base, close_base)
