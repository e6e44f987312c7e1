/* test_adapter.c: LoRA adapters: PEFT's config and folder (common/model/adapter.h), and a forward
 * pass over rows of several adapters (its table), whose logits are wanted in any order; of models
 * whose head is a matrix of its own and of those where it is the embeddings. That the numbers are
 * PEFT's, tests/golden tells. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/safetensors.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_adapter.h"
#include "tests/support/tiny_model.h"

enum { HIDDEN = 32, VOCAB = 50, LAYERS = 2, TOKENS = 6 };

LATER(adapter_config_free)

// Freed with the test.
static struct adapter_config *config_of(const char *text)
{
    return test_later(tiny_adapter_config(text), adapter_config_free_later);
}

// ---- the config ---------------------------------------------------------------------------------

TEST_EACH(targets_match_as_in_peft, "adapter")
{
    char text[512];
    int rank;
    float scale;
    snprintf(text, sizeof text, "{'peft_type': 'LORA', %s}", row_text(cases, i, "fields"));
    for (char *c = text; *c; c++)
        if (*c == '\'') *c = '"';
    assert_ok(
        adapter_config_match(config_of(text), row_text(cases, i, "module"), false, &rank, &scale));
    if (rank != row_int(cases, i, "rank") ||
        (rank && fabs(scale - row_number(cases, i, "scale")) > 1e-6))
        fail_msg("%s: %s has rank %d and scale %g", text, row_text(cases, i, "module"), rank,
                 scale);
}

TEST_EACH(targets_of_the_head, "adapter")
{
    int rank;
    float scale;
    assert_ok(adapter_config_match(config_of(row_text(cases, i, "text")), "lm_head", true, &rank,
                                   &scale));
    if (rank != row_int(cases, i, "rank"))
        fail_msg("%s: rank %d", row_text(cases, i, "text"), rank);
}

TEST_EACH(other_kinds_are_refused_by_name, "adapter")
{
    struct adapter_config *config = NULL;
    assert_fails(adapter_config_from_json("test", json_of(row_text(cases, i, "text")), &config),
                 row_status(cases, i, "code"), row_text(cases, i, "says"));
    assert_null(config);
}

TEST_EACH(broken_patterns, "adapter")
{
    int rank;
    float scale;
    assert_fails(
        adapter_config_match(config_of(row_text(cases, i, "text")), "a", false, &rank, &scale),
        ST_INVALID, row_text(cases, i, "says"));
}

// ---- the folder ---------------------------------------------------------------------------------

static void open_model(bool tied, const char *folder, struct reference *ret)
{
    const struct tiny_model shape = {.hidden = HIDDEN,
                                     .layers = LAYERS,
                                     .vocab = VOCAB,
                                     .tie_embeddings = tied,
                                     .eos_id = -1,
                                     .seed = 3};
    assert_ok(tiny_model_write_as(folder, &shape));
    reference_open(folder, "cpu", ret);
}

LATER(reference_close)
LATER(adapter_free)
LATER(adapter_table_free)

// Closed with the test.
static struct reference *model_of(bool tied, const char *folder)
{
    struct reference *r = test_keep(calloc(1, sizeof *r));
    open_model(tied, folder, r);
    return test_later(r, reference_close_later);
}

static struct reference base; // a tiny model, opened
static const char *base_folder;

static void open_base(void)
{
    base_folder = test_folder();
    open_model(false, base_folder, &base);
}

static void close_base(void)
{
    reference_close(&base);
}

static struct adapter *adapter_for(const struct reference *r, const char *text)
{
    return test_later(tiny_adapter_new(r->dev, r->weights, text), adapter_free_later);
}

static struct adapter *adapter_of(const char *text)
{
    return adapter_for(&base, text);
}

// One that was trained: B is not zero.
static struct adapter *random_adapter(const struct reference *r, const char *text, uint64_t seed)
{
    struct adapter *a = adapter_for(r, text);
    assert_ok(tiny_adapter_fill(a, r->dev, seed));
    return a;
}

static struct adapter_table *table_of(const struct reference *r, int n)
{
    struct adapter_table *table;
    assert_ok(adapter_table_new(r->dev, r->weights, n, 4, &table));
    return test_later(table, adapter_table_free_later);
}

#define ALL "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":8,\"target_modules\":\"all-linear\"}"
#define QV                                                                                         \
    "{\"peft_type\":\"LORA\",\"r\":3,\"lora_alpha\":8,\"target_modules\":[\"q_proj\",\"v_proj\"]}"
#define HEAD "{\"r\":4,\"lora_alpha\":8,\"target_modules\":[\"lm_head\"]}"
#define BOTH                                                                                       \
    "{\"peft_type\":\"LORA\",\"r\":3,\"lora_alpha\":8,\"target_modules\":[\"lm_head\",\"q_proj\"]" \
    "}"

TEST(a_plan_lists_what_is_adapted)
{
    struct adapter *a = adapter_of(ALL);
    assert_int_equal(a->n, 7 * LAYERS);
    assert_int_equal(a->weights->n_tensors, 14 * LAYERS);
    assert_string_equal(a->weights->tensors[0].name,
                        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
    for (int i = 0; i < a->weights->n_tensors; i++)
        assert_int_equal(a->weights->tensors[i].offset % 128, 0);
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
    float x[4096], max = 0;
    assert_ok(adapter_init(a, base.dev, 9));
    assert_ok(weights_read(a->weights, base.dev, a->list[0].a, x));
    for (int i = 0; i < 4 * 32; i++) max = fmaxf(max, fabsf(x[i]));
    assert_true(max <= 1 / sqrtf(32) && max > 0.9f / sqrtf(32));
    assert_ok(weights_read(a->weights, base.dev, a->list[0].b, x));
    for (int i = 0; i < 32 * 4; i++) assert_true(x[i] == 0);
}

TEST(a_folder_goes_and_comes)
{
    const char *folder = test_folder();
    struct adapter *a = random_adapter(&base, QV, 5), *b = adapter_of(QV);
    assert_ok(adapter_save(a, base.dev, folder, DT_F32));
    assert_ok(adapter_load(b, base.dev, folder));
    assert_memory_equal(a->weights->base, b->weights->base, (size_t)a->weights->n_elements * 4);
    // another config: tensors are missing, or too many
    struct adapter *all = adapter_of("{\"r\":3,\"target_modules\":\"all-linear\"}");
    assert_fails(adapter_load(all, base.dev, folder), ST_NOT_FOUND,
                 "k_proj.lora_A.weight is missing");
    struct adapter *q = adapter_of("{\"r\":3,\"target_modules\":[\"q_proj\"]}");
    assert_fails(adapter_load(q, base.dev, folder), ST_UNSUPPORTED,
                 "v_proj.lora_A.weight is none that target_modules calls for");
    struct adapter *rank = adapter_of("{\"r\":2,\"target_modules\":[\"q_proj\",\"v_proj\"]}");
    assert_fails(adapter_load(rank, base.dev, folder), ST_MISMATCH,
                 "has shape (3, 32); adapter_config.json calls for (2, 32)");
}

// ---- of the head --------------------------------------------------------------------------------
// The head is the last that is listed, under PEFT's name, whichever matrix of the base it is.
TEST(the_head_is_listed_last)
{
    for (int tied = 0; tied < 2; tied++) {
        const struct reference *r = model_of(tied, test_folder());
        struct adapter *a = adapter_for(r, BOTH), *none = NULL;
        assert_int_equal(a->n, LAYERS + 1);
        assert_true(adapter_changes(a, ROLE_HEAD) && adapter_changes(a, ROLE_QKV));
        const struct adapted *head = &a->list[LAYERS];
        assert_int_equal(head->role, ROLE_HEAD);
        assert_int_equal(r->weights->tensors[head->base].role, tied ? ROLE_EMBED : ROLE_HEAD);
        assert_string_equal(a->weights->tensors[head->b].name,
                            "base_model.model.lm_head.lora_B.weight");
        assert_int_equal(a->weights->tensors[head->b].shape[0], VOCAB);
        assert_int_equal(a->weights->tensors[head->a].shape[1], HIDDEN);
        // the embeddings are not what it changes
        assert_status(adapter_new(tiny_adapter_config("{\"target_modules\":[\"embed_tokens\"]}"),
                                  r->weights, DT_F32, &none),
                      ST_INVALID);
        const enum status tying =
            adapter_new(tiny_adapter_config("{\"target_modules\":[\"lm_head\"],"
                                            "\"ensure_weight_tying\":true}"),
                        r->weights, DT_F32, &none);
        assert_int_equal(tying, tied ? ST_UNSUPPORTED : ST_OK);
        if (tied) assert_message("ensure_weight_tying is set, and lm_head is the embeddings too");
        if (!tied) test_later(none, adapter_free_later);
    }
}

struct peft_folder { // the factors, and what PEFT saves beside them
    const struct adapter *adapter;
    int64_t rows; // of the base's matrix
};

static enum status read_factor(void *context, const struct safetensors_source *source, size_t bytes,
                               void *to)
{
    const struct peft_folder *f = context;
    const struct weights *w = f->adapter->weights;
    const struct weight_tensor *t = weights_find(w, source->name);
    if (t)
        memcpy(to, (float *)w->base + t->offset, bytes);
    else
        memset(to, 0, bytes);
    return ST_OK;
}

// As PEFT writes it: with the base's matrix of the head.
static void write_as_peft(const struct peft_folder *f, const char *folder)
{
    const struct weights *w = f->adapter->weights;
    struct safetensors_source sources[3] = {{.dt = DT_F32, .n_dims = 2}};
    for (int i = 0; i < 2; i++) {
        sources[i] = (struct safetensors_source){
            .dt = DT_F32, .n_dims = 2, .shape = {w->tensors[i].shape[0], w->tensors[i].shape[1]}};
        strcpy(sources[i].name, w->tensors[i].name);
    }
    sources[2] = (struct safetensors_source){.dt = DT_F32, .n_dims = 2, .shape = {f->rows, HIDDEN}};
    strcpy(sources[2].name, "base_model.model.lm_head.base_layer.weight");
    assert_ok(safetensors_write(test_path(folder, "adapter_model.safetensors"), sources, 3, NULL,
                                read_factor, (void *)f));
}

TEST(the_bases_matrix_may_lie_beside)
{
    const struct reference *r = model_of(true, test_folder());
    const char *folder = test_folder();
    struct adapter *a = random_adapter(r, HEAD, 4), *b = adapter_for(r, HEAD);
    write_as_peft(&(struct peft_folder){a, VOCAB}, folder);
    assert_ok(adapter_load(b, r->dev, folder));
    assert_memory_equal(a->weights->base, b->weights->base, (size_t)a->weights->n_elements * 4);
    write_as_peft(&(struct peft_folder){a, VOCAB + 1}, folder); // of a model with more tokens
    assert_fails(adapter_load(b, r->dev, folder), ST_UNSUPPORTED, "lm_head.base_layer.weight");
    assert_fails(adapter_merge(a, r->weights, r->dev), ST_UNSUPPORTED, "the embeddings too");
}

// ---- the forward pass ---------------------------------------------------------------------------
static const int32_t ids[TOKENS] = {3, 14, 15, 9, 26, 5};

// Of row rows[i] (NULL: all rows) of n sequences of the same ids, each with its adapter: (wanted,
// VOCAB).
static void logits_of(struct reference *r, const int *adapter, int n, const int *rows, int wanted,
                      float *ret)
{
    void *x;
    batch_clear(r->batch);
    for (int s = 0; s < n; s++)
        assert_ok(batch_add_packed(r->batch, ids, TOKENS, -1, adapter[s], NULL));
    for (int i = 0; i < wanted; i++) assert_ok(batch_want_row(r->batch, rows ? rows[i] : i));
    assert_ok(batch_commit(r->batch, 0, 0));
    model_forward(r->model, batch_view(r->batch), NULL, NULL, &x);
    model_head(r->model, x, batch_rows_device(r->batch), 0, wanted);
    memcpy(ret, r->model->logits, (size_t)wanted * VOCAB * sizeof *ret);
}

TEST(one_batch_has_several)
{
    enum { N = 4, EACH = TOKENS * VOCAB };
    static float alone[3][EACH], plain[EACH], together[N * EACH];
    static const int order[N] = {1, -1, 0, 1};
    struct adapter *a = random_adapter(&base, ALL, 5), *b = random_adapter(&base, QV, 6);
    struct adapter_table *table;
    reference_logits(&base, ids, TOKENS, plain); // without a table
    table = table_of(&base, 2);
    base.model->adapters = table;
    assert_ok(adapter_table_set(table, 0, a));
    assert_ok(adapter_table_set(table, 1, b));
    for (int i = -1; i < 2; i++) logits_of(&base, &i, 1, NULL, TOKENS, alone[i + 1]);
    logits_of(&base, order, N, NULL, N * TOKENS, together);
    for (int s = 0; s < N; s++)
        assert_memory_equal(together + s * EACH, alone[order[s] + 1], sizeof plain);
    assert_memory_equal(alone[0], plain, sizeof plain);
    assert_memory_not_equal(alone[1], plain, sizeof plain);
    assert_memory_not_equal(alone[2], alone[1], sizeof plain);
    // one that is taken out changes nothing any more
    assert_ok(adapter_table_set(table, 1, NULL));
    logits_of(&base, (int[]){1}, 1, NULL, TOKENS, together);
    assert_memory_equal(together, plain, sizeof plain);
    assert_status(adapter_table_set(table, 2, a), ST_INVALID);
    base.model->adapters = NULL;
}

static void rows_are_in_any_order(struct reference *r, struct adapter_table *table)
{
    enum { N = 4 };
    static const int order[N] = {1, -1, 0, 2};
    static float alone[4][TOKENS * VOCAB], together[N * TOKENS * VOCAB];
    int rows[N * TOKENS];
    r->model->adapters = table;
    for (int i = -1; i < 3; i++) logits_of(r, &i, 1, NULL, TOKENS, alone[i + 1]);
    for (int i = 0; i < N * TOKENS; i++) rows[i] = (i * 7 + 3) % (N * TOKENS);
    logits_of(r, order, N, rows, N * TOKENS, together);
    for (int i = 0; i < N * TOKENS; i++)
        assert_memory_equal(together + i * VOCAB,
                            alone[order[rows[i] / TOKENS] + 1] + rows[i] % TOKENS * VOCAB,
                            VOCAB * sizeof(float));
    for (int i = 1; i < 4; i++) assert_memory_not_equal(alone[i], alone[0], sizeof alone[0]);
    r->model->adapters = NULL;
}

TEST(a_row_has_its_adapter)
{
    static const char *const configs[] = {HEAD, ALL, BOTH};
    for (int tied = 0; tied < 2; tied++) {
        struct reference *r = model_of(tied, test_folder());
        struct adapter_table *table = table_of(r, 3);
        for (int i = 0; i < 3; i++)
            assert_ok(adapter_table_set(table, i, random_adapter(r, configs[i], (uint64_t)i)));
        rows_are_in_any_order(r, table);
    }
}

// By which captured steps are known: it says which blocks have an operation of their own.
TEST(sites_are_told_apart)
{
    struct adapter *all = random_adapter(&base, ALL, 5), *qv = random_adapter(&base, QV, 6);
    struct adapter_table *table = table_of(&base, 2);
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
}

TEST(our_config_is_one_for_vllm)
{
    static const char *const targets[] = {"all-linear", "q_proj,v_proj"};
    for (size_t i = 0; i < 2; i++) {
        json_t *json;
        assert_ok(adapter_config_json(4, 8, 0.1, true, targets[i], &json));
        assert_json(test_keep(json), "{'r': 4, 'lora_alpha': 8, 'use_rslora': true, 'bias': 'none',"
                                     " 'modules_to_save': null, 'use_dora': null}");
        const json_t *modules = json_at(json, "target_modules");
        assert_true(i ? json_array_size(modules) == 2 : json_is_string(modules));
    }
}

#define PEFT_MODULES "torch, transformers, peft"

// PEFT's logits of `ids`, with the model's and the adapter's folder, are these.
static void peft_agrees(const char *python, const char *model, const char *adapter,
                        const float *logits)
{
    const char *out = test_path(adapter, "logits"), *log = test_path(adapter, "peft.log");
    char numbers[TOKENS][16];
    const char *argv[TOKENS + 6] = {python, test_path(test_root(), "tests/clients/peft_logits.py"),
                                    model, adapter, out};
    for (int i = 0; i < TOKENS; i++) {
        snprintf(numbers[i], sizeof numbers[i], "%d", ids[i]);
        argv[5 + i] = numbers[i];
    }
    if (test_command(log, 120000, argv) != 0) fail_msg("%s", test_read(log));
    const float *want = (const float *)(const void *)test_read(out);
    double max = 0, worst = 0;
    for (int i = 0; i < TOKENS * VOCAB; i++) {
        max = fmax(max, fabs((double)want[i]));
        worst = fmax(worst, fabs((double)want[i] - logits[i]));
    }
    print_message("logits differ by %.2g of the largest\n", worst / max);
    assert_true(worst / max <= 1e-5);
}

static void peft_agrees_with(struct reference *r, const char *model, struct adapter *a)
{
    static float have[TOKENS * VOCAB];
    const char *folder = test_folder();
    assert_ok(adapter_save(a, r->dev, folder, DT_F32));
    struct adapter_table *table = table_of(r, 1);
    assert_ok(adapter_table_set(table, 0, a));
    r->model->adapters = table;
    logits_of(r, (int[]){0}, 1, NULL, TOKENS, have);
    peft_agrees(test_python(PEFT_MODULES), model, folder, have);
    r->model->adapters = NULL;
}

TEST(peft_opens_our_folder)
{
    json_t *json;
    struct adapter_config *config;
    struct adapter *made;
    test_python(PEFT_MODULES); // or this is skipped
    // with a config of our own making
    assert_ok(adapter_config_json(4, 8, 0.1, false, "all-linear", &json));
    assert_ok(adapter_config_from_json("test", test_keep(json), &config));
    assert_ok(adapter_new(config, base.weights, DT_F32, &made));
    test_later(made, adapter_free_later);
    assert_ok(weights_alloc(made->weights, base.dev));
    assert_ok(tiny_adapter_fill(made, base.dev, 8));
    peft_agrees_with(&base, base_folder, made);
    for (int tied = 0; tied < 2; tied++) {
        const char *model = test_folder();
        struct reference *r = model_of(tied, model);
        peft_agrees_with(r, model, random_adapter(r, BOTH, 6));
    }
}

TESTS_BETWEEN(open_base, close_base)
