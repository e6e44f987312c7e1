/* test_model_files.c: config.json, safetensors and the weights table: what is read, what is refused
 * and with which words. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include <dirent.h>

// ---- config.json --------------------------------------------------------------------------------
#define SIZES                                                                                      \
    "\"vocab_size\":32,\"hidden_size\":16,\"intermediate_size\":24,\"num_hidden_layers\":2,"       \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"max_position_embeddings\":64"
#define QWEN2 "{\"model_type\":\"qwen2\",\"architectures\":[\"Qwen2ForCausalLM\"]," SIZES
#define LLAMA "{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"]," SIZES

TEST(config_eos_lists)
{
    const char *folder = test_folder();
    test_put(folder, "config.json", QWEN2 ",\"eos_token_id\":5}");
    test_put(folder, "generation_config.json", "{\"eos_token_id\":[7,5]}");
    struct model_config *c = config_of(folder);
    assert_int_equal(c->n_eos, 2);
    assert_int_equal(c->eos_ids[0], 5);
    assert_int_equal(c->eos_ids[1], 7);
}

TEST_EACH(config_refusals, "model_files")
{
    struct model_config *c = NULL;
    const char *folder = test_folder();
    test_put(folder, "config.json", row_text(cases, i, "text"));
    assert_fails(model_config_load_file(test_path(folder, "config.json"), &c),
                 row_status(cases, i, "code"), row_text(cases, i, "words"));
    assert_null(c);
}

// ---- safetensors --------------------------------------------------------------------------------
// A file of this header and `data_len` bytes of data (0, 1, 2, ...).
static void build(struct bytes *file, const char *header, size_t data_len)
{
    size_t len = strlen(header);
    bytes_clear(file);
    for (int i = 0; i < 8; i++) {
        unsigned char byte = (unsigned char)(len >> (8 * i));
        bytes_append(file, &byte, 1);
    }
    bytes_puts(file, header);
    for (size_t i = 0; i < data_len; i++) bytes_append(file, &(unsigned char){(unsigned char)i}, 1);
}

TEST(safetensors_reads)
{
    SCOPED(bytes_release) struct bytes file = BYTES_INIT;
    struct safetensors *set;
    build(&file,
          "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_"
          "offsets\":[8,14]},"
          "\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
          "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,2],\"data_offsets\":[8,8]}}  ",
          14);
    assert_ok(safetensors_parse("t.safetensors", file.data, file.len, &set));
    assert_int_equal(safetensors_count(set), 3);
    const struct safetensors_entry *b = safetensors_find(set, "b");
    assert_int_equal(b->n_dims, 1);
    assert_int_equal(b->bytes, 6);
    assert_int_equal(*(const unsigned char *)b->data, 8);
    assert_null(safetensors_find(set, "c"));
    assert_string_equal(json_string_value(json_object_get(safetensors_metadata(set), "format")),
                        "pt");
    safetensors_free(set);
}

TEST(safetensors_refusals)
{
    const json_t *cases = test_rows("model_files", "safetensors_refusals");
    SCOPED(bytes_release) struct bytes file = BYTES_INIT;
    struct safetensors *set = NULL;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        build(&file, row_text(cases, i, "header"), row_int(cases, i, "data_len"));
        assert_true(safetensors_parse("t.safetensors", file.data, file.len, &set) != ST_OK);
        assert_message(row_text(cases, i, "words"));
        assert_message("t.safetensors");
    }
    build(&file, "{}", 0);
    assert_status(safetensors_parse("t.safetensors", file.data, 7, &set), ST_FORMAT);
    file.data[4] = 1; // the header would be 4 GiB
    assert_fails(safetensors_parse("t.safetensors", file.data, file.len, &set), ST_FORMAT,
                 "truncated");
}

// Of zeros; closed with the test.
static struct loaded *tiny(const char *config)
{
    const char *folder = test_folder();
    test_put(folder, "config.json", config);
    return loaded_planned(folder, DT_F32);
}

// Its random weights are in the folder.
static void save(const struct loaded *m, uint64_t seed, const char *folder)
{
    assert_ok(weights_init_random(m->weights, m->dev, seed));
    assert_ok(weights_save(m->weights, m->dev, folder, DT_F32));
}

static enum status load(const struct loaded *m, const char *folder)
{
    return weights_load(m->weights, m->dev, folder);
}

// Nothing was written over what the test had put there.
static void fill(const struct loaded *m)
{
    memset(m->weights->base, 0x5a, m->weights->bytes);
}

static void assert_filled(const struct loaded *m)
{
    for (size_t i = 0; i < m->weights->bytes; i++)
        assert_int_equal(((unsigned char *)m->weights->base)[i], 0x5a);
}

TEST(plan_is_dense_and_aligned)
{
    struct weights *half;
    const struct loaded *t = tiny(QWEN2 ",\"tie_word_embeddings\":true}");
    assert_ok(weights_plan(t->config, DT_BF16, &half));
    // embed, 2 x (norm, q k v, their biases, o, norm, gate, up, down), final norm
    assert_int_equal(t->weights->n_tensors, 1 + 2 * 12 + 1);
    assert_int_equal(t->weights->n_elements, half->n_elements);
    for (int i = 0; i < t->weights->n_tensors; i++) {
        const struct weight_tensor *w = &t->weights->tensors[i];
        assert_int_equal(w->offset, half->tensors[i].offset);
        if (i > 0) assert_true(w->offset >= w[-1].offset + w[-1].n);
        bool later_part = i > 0 && w->role == w[-1].role && w->role != ROLE_ATTN_NORM;
        if (!later_part) assert_int_equal(w->offset % 128, 0);
    }
    const struct weight_tensor *q =
        weights_find(t->weights, "model.layers.1.self_attn.q_proj.weight");
    const struct weight_tensor *k =
        weights_find(t->weights, "model.layers.1.self_attn.k_proj.weight");
    assert_ptr_equal(t->weights->layers[1].at[ROLE_QKV], (float *)t->weights->base + q->offset);
    assert_int_equal(k->offset, q->offset + q->n);
    assert_ptr_equal(t->weights->at[ROLE_HEAD], t->weights->at[ROLE_EMBED]);
    assert_true(t->weights->canary_offset >= (size_t)t->weights->n_elements * 4);
    char a[65], b[65];
    weights_layout_hash(t->weights, a);
    weights_layout_hash(half, b);
    assert_string_not_equal(a, b);
    weights_free(half);
}

TEST(saved_weights_come_back)
{
    const char *folder = test_folder();
    const struct loaded *a = tiny(LLAMA "}"), *b = tiny(LLAMA "}");
    save(a, 7, folder);
    assert_ok(load(b, folder));
    assert_memory_equal(a->weights->base, b->weights->base, a->weights->bytes);
    // through bf16: each is the nearest bf16
    assert_ok(weights_save(a->weights, a->dev, folder, DT_BF16));
    assert_ok(load(b, folder));
    for (int64_t i = 0; i < a->weights->n_elements; i++) {
        const float x = ((float *)a->weights->base)[i], y = ((float *)b->weights->base)[i];
        if (y != f32_from_bf16(bf16_from_f32(x)))
            fail_msg("element %lld: %g became %g", (long long)i, x, y);
    }
}

TEST(wrong_folders_write_nothing)
{
    const char *folder = test_folder();
    const struct loaded *untied = tiny(LLAMA "}"),
                        *tied = tiny(LLAMA ",\"tie_word_embeddings\":true}"),
                        *biased = tiny(LLAMA ",\"attention_bias\":true}"),
                        *wide = tiny(LLAMA ",\"intermediate_size\":32}");
    fill(biased);
    fill(untied);
    assert_fails(load(biased, folder), ST_NOT_FOUND,
                 "neither model.safetensors nor model.safetensors.index.json");
    save(tied, 1, folder);
    assert_fails(load(untied, folder), ST_NOT_FOUND, "lm_head.weight");
    assert_fails(load(biased, folder), ST_NOT_FOUND, "self_attn.q_proj.bias");
    assert_filled(biased);
    save(biased, 1, folder);
    assert_fails(load(untied, folder), ST_MISMATCH, "bias is not part of");
    save(wide, 1, folder);
    assert_fails(load(untied, folder), ST_MISMATCH,
                 "has shape (32, 16); config.json calls for (24, 16)");
    assert_filled(untied);
}

TEST(shards_are_one_model)
{
    const char *whole = test_folder(), *split = test_folder();
    const struct loaded *a = tiny(LLAMA ",\"tie_word_embeddings\":true}"),
                        *b = tiny(LLAMA ",\"tie_word_embeddings\":true}");
    save(a, 3, whole);
    struct safetensors *set = tensors_of(whole);

    SCOPED(bytes_release) struct bytes index = BYTES_INIT;
    bytes_puts(&index, "{\"weight_map\":{");
    int n = safetensors_count(set);
    for (int part = 0; part < 2; part++) {
        SCOPED(bytes_release)
        struct bytes header = BYTES_INIT, data = BYTES_INIT, file = BYTES_INIT;
        bytes_puts(&header, "{");
        for (int i = part; i < n; i += 2) {
            const struct safetensors_entry *e = safetensors_at(set, i);
            bytes_printf(&header, "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%lld",
                         i > part ? "," : "", e->name, (long long)e->shape[0]);
            if (e->n_dims == 2) bytes_printf(&header, ",%lld", (long long)e->shape[1]);
            bytes_printf(&header, "],\"data_offsets\":[%zu,%zu]}", data.len, data.len + e->bytes);
            bytes_append(&data, e->data, e->bytes);
            bytes_printf(&index, "%s\"%s\":\"part-%d.safetensors\"", i + part > 0 ? "," : "",
                         e->name, part);
        }
        bytes_puts(&header, "}");
        build(&file, header.data, 0);
        bytes_append(&file, data.data, data.len);
        test_write(test_path(split, part ? "part-1.safetensors" : "part-0.safetensors"), file.data,
                   file.len);
    }
    bytes_puts(&index, "}}");
    test_write(test_path(split, "model.safetensors.index.json"), index.data, index.len);
    assert_ok(load(b, split));
    assert_memory_equal(a->weights->base, b->weights->base, a->weights->bytes);

    test_put(split, "model.safetensors.index.json",
             "{\"weight_map\":{\"model.norm.weight\":\"../elsewhere.safetensors\"}}");
    assert_fails(load(b, split), ST_FORMAT, "names no file of this folder");
}

// A folder of every family, loaded and saved, holds the same tensors under the same names: what
// loaders of that family look for.
TEST(every_family_is_saved_as_it_came)
{
    const char *root = test_golden("");
    int n = 0;
    DIR *dir = opendir(root);
    assert_non_null(dir);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        const char *folder = test_path(root, e->d_name), *copy = test_folder();
        if (e->d_name[0] == '.' || !file_exists(test_path(folder, "model.safetensors"))) continue;
        if (config_of(folder)->stored != STORED_PLAIN) continue; // test_mxfp4.c, test_fp8_folder.c
        struct loaded *t = loaded_of(folder, DT_F32);
        assert_ok(weights_save(t->weights, t->dev, copy, DT_F32));
        struct safetensors *a = tensors_of(folder);
        struct safetensors *b = tensors_of(copy);
        assert_int_equal(safetensors_count(a), safetensors_count(b));
        for (int i = 0; i < safetensors_count(a); i++) {
            const struct safetensors_entry *x = safetensors_at(a, i), *y = safetensors_at(b, i);
            assert_string_equal(x->name, y->name);
            assert_int_equal(x->n_dims, y->n_dims);
            assert_int_equal(x->bytes, y->bytes);
            assert_memory_equal(x->shape, y->shape, (size_t)x->n_dims * sizeof x->shape[0]);
            assert_memory_equal(x->data, y->data, x->bytes);
        }
        test_now(t);
        n++;
    }
    closedir(dir);
    assert_true(n >= 10);
}
