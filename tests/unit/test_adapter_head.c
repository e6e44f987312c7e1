/* test_adapter_head.c: adapters of the head, of models whose head is a matrix of its own and of
 * those where it is the embeddings: PEFT's targets and folders, and rows of several adapters of one
 * batch, whose logits are wanted in any order. That the numbers are PEFT's, tests/golden tells. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/safetensors.h"
#include "tests/support/peft.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_adapter.h"
#include "tests/support/tiny_model.h"

enum { HIDDEN = 32, VOCAB = 50, LAYERS = 2, TOKENS = 6 };
#define HEAD "{\"r\":4,\"lora_alpha\":8,\"target_modules\":[\"lm_head\"]}"
#define BOTH                                                                                       \
    "{\"peft_type\":\"LORA\",\"r\":3,\"lora_alpha\":8,\"target_modules\":[\"lm_head\",\"q_proj\"]" \
    "}"
#define ALL "{\"r\":3,\"target_modules\":\"all-linear\"}"

static const int32_t ids[TOKENS] = {3, 14, 15, 9, 26, 5};

// ---- PEFT's targets and folders -----------------------------------------------------------------
TEST(targets_are_pefts)
{
    const json_t *cases = test_rows("adapter_head", "targets_are_pefts");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        int rank;
        float scale;
        struct adapter_config *config = tiny_adapter_config(row_text(cases, i, "text"));
        assert_ok(adapter_config_match(config, "lm_head", true, &rank, &scale));
        if (rank != row_int(cases, i, "rank"))
            fail_msg("%s: rank %d", row_text(cases, i, "text"), rank);
        adapter_config_free(config);
    }
}

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

// The head is the last that is listed, under PEFT's name, whichever matrix of the base it is.
TEST(the_head_is_listed_last)
{
    for (int tied = 0; tied < 2; tied++) {
        struct reference r;
        open_model(tied, test_folder(), &r);
        struct adapter *a = tiny_adapter_new(r.dev, r.weights, BOTH), *none = NULL;
        assert_int_equal(a->n, LAYERS + 1);
        assert_true(adapter_changes(a, ROLE_HEAD) && adapter_changes(a, ROLE_QKV));
        const struct adapted *head = &a->list[LAYERS];
        assert_int_equal(head->role, ROLE_HEAD);
        assert_int_equal(r.weights->tensors[head->base].role, tied ? ROLE_EMBED : ROLE_HEAD);
        assert_string_equal(a->weights->tensors[head->b].name,
                            "base_model.model.lm_head.lora_B.weight");
        assert_int_equal(a->weights->tensors[head->b].shape[0], VOCAB);
        assert_int_equal(a->weights->tensors[head->a].shape[1], HIDDEN);
        // the embeddings are not what it changes
        assert_status(adapter_new(tiny_adapter_config("{\"target_modules\":[\"embed_tokens\"]}"),
                                  r.weights, DT_F32, &none),
                      ST_INVALID);
        const enum status tying =
            adapter_new(tiny_adapter_config("{\"target_modules\":[\"lm_head\"],"
                                            "\"ensure_weight_tying\":true}"),
                        r.weights, DT_F32, &none);
        assert_int_equal(tying, tied ? ST_UNSUPPORTED : ST_OK);
        if (tied) assert_message("ensure_weight_tying is set, and lm_head is the embeddings too");
        if (!tied) adapter_free(none);
        adapter_free(a);
        reference_close(&r);
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
    struct reference r;
    open_model(true, test_folder(), &r);
    const char *folder = test_folder();
    struct adapter *a = tiny_adapter_new(r.dev, r.weights, HEAD),
                   *b = tiny_adapter_new(r.dev, r.weights, HEAD);
    assert_ok(tiny_adapter_fill(a, r.dev, 4));
    write_as_peft(&(struct peft_folder){a, VOCAB}, folder);
    assert_ok(adapter_load(b, r.dev, folder));
    assert_memory_equal(a->weights->base, b->weights->base, (size_t)a->weights->n_elements * 4);
    write_as_peft(&(struct peft_folder){a, VOCAB + 1}, folder); // of a model with more tokens
    assert_status(adapter_load(b, r.dev, folder), ST_UNSUPPORTED);
    assert_message("lm_head.base_layer.weight");
    assert_status(adapter_merge(a, r.weights, r.dev), ST_UNSUPPORTED);
    assert_message("the embeddings too");
    adapter_free(a);
    adapter_free(b);
    reference_close(&r);
}

// ---- the logits ---------------------------------------------------------------------------------
// Of row rows[i] of n sequences of the same ids, each with its adapter: (wanted, VOCAB).
static void logits_of(struct reference *r, const int *adapter, int n, const int *rows, int wanted,
                      float *ret)
{
    void *x;
    batch_clear(r->batch);
    for (int s = 0; s < n; s++)
        assert_ok(batch_add_packed(r->batch, ids, TOKENS, -1, adapter[s], NULL));
    for (int i = 0; i < wanted; i++) assert_ok(batch_want_row(r->batch, rows[i]));
    assert_ok(batch_commit(r->batch, 0, 0));
    model_forward(r->model, batch_view(r->batch), NULL, NULL, &x);
    model_head(r->model, x, batch_rows_device(r->batch), 0, wanted);
    memcpy(ret, r->model->logits, (size_t)wanted * VOCAB * sizeof *ret);
}

static void rows_are_in_any_order(struct reference *r, struct adapter_table *table)
{
    enum { N = 4 };
    static const int order[N] = {1, -1, 0, 2}, all[TOKENS] = {0, 1, 2, 3, 4, 5};
    static float alone[4][TOKENS * VOCAB], together[N * TOKENS * VOCAB];
    int rows[N * TOKENS];
    r->model->adapters = table;
    for (int i = -1; i < 3; i++) logits_of(r, &i, 1, all, TOKENS, alone[i + 1]);
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
        struct reference r;
        struct adapter *a[3];
        struct adapter_table *table;
        open_model(tied, test_folder(), &r);
        assert_ok(adapter_table_new(r.dev, r.weights, 3, 4, &table));
        for (int i = 0; i < 3; i++) {
            a[i] = tiny_adapter_new(r.dev, r.weights, configs[i]);
            assert_ok(tiny_adapter_fill(a[i], r.dev, (uint64_t)i));
            assert_ok(adapter_table_set(table, i, a[i]));
        }
        rows_are_in_any_order(&r, table);
        adapter_table_free(table);
        for (int i = 0; i < 3; i++) adapter_free(a[i]);
        reference_close(&r);
    }
}

TEST(peft_opens_our_folder)
{
    static const int all[TOKENS] = {0, 1, 2, 3, 4, 5};
    static float have[TOKENS * VOCAB];
    const char *python = peft_python();
    for (int tied = 0; tied < 2; tied++) {
        const char *model = test_folder(), *folder = test_folder();
        struct reference r;
        struct adapter_table *table;
        open_model(tied, model, &r);
        struct adapter *a = tiny_adapter_new(r.dev, r.weights, BOTH);
        assert_ok(tiny_adapter_fill(a, r.dev, 6));
        assert_ok(adapter_save(a, r.dev, folder, DT_F32));
        assert_ok(adapter_table_new(r.dev, r.weights, 1, 4, &table));
        assert_ok(adapter_table_set(table, 0, a));
        r.model->adapters = table;
        logits_of(&r, (int[]){0}, 1, all, TOKENS, have);
        peft_agrees(python, model, folder, ids, TOKENS, have, VOCAB);
        adapter_table_free(table);
        adapter_free(a);
        reference_close(&r);
    }
}
