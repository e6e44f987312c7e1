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

static enum status load_text(const char *text, struct model_config **ret)
{
    const char *path = test_path(test_folder(), "config.json");
    test_write(path, text, strlen(text));
    return model_config_load_file(path, ret);
}

TEST(config_eos_lists)
{
    struct model_config *c;
    const char *folder = test_folder();
    const char *config = QWEN2 ",\"eos_token_id\":5}", *generation = "{\"eos_token_id\":[7,5]}";
    test_write(test_path(folder, "config.json"), config, strlen(config));
    test_write(test_path(folder, "generation_config.json"), generation, strlen(generation));
    assert_ok(model_config_load(folder, &c));
    assert_int_equal(c->n_eos, 2);
    assert_int_equal(c->eos_ids[0], 5);
    assert_int_equal(c->eos_ids[1], 7);
    model_config_free(c);
}

TEST_EACH(config_refusals, "model_files")
{
    struct model_config *c = NULL;
    assert_status(load_text(row_text(cases, i, "text"), &c), row_status(cases, i, "code"));
    assert_message(row_text(cases, i, "words"));
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
    struct bytes file = BYTES_INIT;
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
    bytes_release(&file);
}

TEST(safetensors_refusals)
{
    const json_t *cases = test_rows("model_files", "safetensors_refusals");
    struct bytes file = BYTES_INIT;
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
    bytes_release(&file);
}

// ---- the weights table --------------------------------------------------------------------------
static void open_tiny(struct loaded *t, const char *text)
{
    assert_ok(device_open("cpu", &t->dev));
    assert_ok(load_text(text, &t->config));
    loaded_zeros(t, DT_F32);
}

TEST(plan_is_dense_and_aligned)
{
    struct loaded t;
    struct weights *half;
    open_tiny(&t, QWEN2 ",\"tie_word_embeddings\":true}");
    assert_ok(weights_plan(t.config, DT_BF16, &half));
    // embed, 2 x (norm, q k v, their biases, o, norm, gate, up, down), final norm
    assert_int_equal(t.weights->n_tensors, 1 + 2 * 12 + 1);
    assert_int_equal(t.weights->n_elements, half->n_elements);
    for (int i = 0; i < t.weights->n_tensors; i++) {
        const struct weight_tensor *w = &t.weights->tensors[i];
        assert_int_equal(w->offset, half->tensors[i].offset);
        if (i > 0) assert_true(w->offset >= w[-1].offset + w[-1].n);
        bool later_part = i > 0 && w->role == w[-1].role && w->role != ROLE_ATTN_NORM;
        if (!later_part) assert_int_equal(w->offset % 128, 0);
    }
    const struct weight_tensor *q =
        weights_find(t.weights, "model.layers.1.self_attn.q_proj.weight");
    const struct weight_tensor *k =
        weights_find(t.weights, "model.layers.1.self_attn.k_proj.weight");
    assert_ptr_equal(t.weights->layers[1].qkv, (float *)t.weights->base + q->offset);
    assert_int_equal(k->offset, q->offset + q->n);
    assert_ptr_equal(t.weights->head, t.weights->embed);
    assert_true(t.weights->canary_offset >= (size_t)t.weights->n_elements * 4);
    char a[65], b[65];
    weights_layout_hash(t.weights, a);
    weights_layout_hash(half, b);
    assert_string_not_equal(a, b);
    weights_free(half);
    loaded_close(&t);
}

TEST(saved_weights_come_back)
{
    struct loaded a, b;
    const char *folder = test_folder();
    open_tiny(&a, LLAMA "}");
    open_tiny(&b, LLAMA "}");
    assert_ok(weights_init_random(a.weights, a.dev, 7));
    assert_ok(weights_save(a.weights, a.dev, folder, DT_F32));
    assert_ok(weights_load(b.weights, b.dev, folder));
    assert_memory_equal(a.weights->base, b.weights->base, a.weights->bytes);
    // through bf16: each is the nearest bf16
    assert_ok(weights_save(a.weights, a.dev, folder, DT_BF16));
    assert_ok(weights_load(b.weights, b.dev, folder));
    for (int64_t i = 0; i < a.weights->n_elements; i++) {
        float x = ((float *)a.weights->base)[i], y = ((float *)b.weights->base)[i];
        if (y != f32_from_bf16(bf16_from_f32(x)))
            fail_msg("element %lld: %g became %g", (long long)i, x, y);
    }
    loaded_close(&a);
    loaded_close(&b);
}

TEST(wrong_folders_write_nothing)
{
    struct loaded untied, tied, biased;
    const char *folder = test_folder();
    open_tiny(&untied, LLAMA "}");
    open_tiny(&tied, LLAMA ",\"tie_word_embeddings\":true}");
    open_tiny(&biased, LLAMA ",\"attention_bias\":true}");
    device_fill(biased.dev, biased.weights->base, 0x5a, biased.weights->bytes);
    device_fill(untied.dev, untied.weights->base, 0x5a, untied.weights->bytes);
    assert_fails(weights_load(biased.weights, biased.dev, folder), ST_NOT_FOUND,
                 "neither model.safetensors nor model.safetensors.index.json");

    assert_ok(weights_init_random(tied.weights, tied.dev, 1));
    assert_ok(weights_save(tied.weights, tied.dev, folder, DT_F32));
    assert_fails(weights_load(untied.weights, untied.dev, folder), ST_NOT_FOUND, "lm_head.weight");
    assert_fails(weights_load(biased.weights, biased.dev, folder), ST_NOT_FOUND,
                 "self_attn.q_proj.bias");
    for (size_t i = 0; i < biased.weights->bytes; i++)
        assert_int_equal(((unsigned char *)biased.weights->base)[i], 0x5a);

    assert_ok(weights_init_random(biased.weights, biased.dev, 1));
    assert_ok(weights_save(biased.weights, biased.dev, folder, DT_F32));
    assert_fails(weights_load(untied.weights, untied.dev, folder), ST_MISMATCH,
                 "bias is not part of");

    struct loaded wide;
    open_tiny(&wide, LLAMA ",\"intermediate_size\":32}");
    assert_ok(weights_init_random(wide.weights, wide.dev, 1));
    assert_ok(weights_save(wide.weights, wide.dev, folder, DT_F32));
    assert_fails(weights_load(untied.weights, untied.dev, folder), ST_MISMATCH,
                 "has shape (32, 16); config.json calls for (24, 16)");
    for (size_t i = 0; i < untied.weights->bytes; i++)
        assert_int_equal(((unsigned char *)untied.weights->base)[i], 0x5a);
    loaded_close(&wide);
    loaded_close(&untied);
    loaded_close(&tied);
    loaded_close(&biased);
}

TEST(shards_are_one_model)
{
    struct loaded a, b;
    const char *whole = test_folder(), *split = test_folder();
    struct safetensors *set;
    open_tiny(&a, LLAMA ",\"tie_word_embeddings\":true}");
    open_tiny(&b, LLAMA ",\"tie_word_embeddings\":true}");
    assert_ok(weights_init_random(a.weights, a.dev, 3));
    assert_ok(weights_save(a.weights, a.dev, whole, DT_F32));
    assert_ok(safetensors_open(whole, &set));

    struct bytes index = BYTES_INIT;
    bytes_puts(&index, "{\"weight_map\":{");
    int n = safetensors_count(set);
    for (int part = 0; part < 2; part++) {
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
        bytes_release(&header);
        bytes_release(&data);
        bytes_release(&file);
    }
    bytes_puts(&index, "}}");
    test_write(test_path(split, "model.safetensors.index.json"), index.data, index.len);
    assert_ok(weights_load(b.weights, b.dev, split));
    assert_memory_equal(a.weights->base, b.weights->base, a.weights->bytes);

    const char *bad = "{\"weight_map\":{\"model.norm.weight\":\"../elsewhere.safetensors\"}}";
    test_write(test_path(split, "model.safetensors.index.json"), bad, strlen(bad));
    assert_fails(weights_load(b.weights, b.dev, split), ST_FORMAT, "names no file of this folder");
    bytes_release(&index);
    safetensors_free(set);
    loaded_close(&a);
    loaded_close(&b);
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
        struct loaded t;
        struct safetensors *a, *b;
        if (e->d_name[0] == '.' || !file_exists(test_path(folder, "model.safetensors"))) continue;
        if (strcmp(e->d_name, "gpt-oss-mxfp4") == 0) continue; // test_mxfp4.c
        assert_ok(loaded_open(folder, DT_F32, &t));
        assert_ok(weights_save(t.weights, t.dev, copy, DT_F32));
        assert_ok(safetensors_open(folder, &a));
        assert_ok(safetensors_open(copy, &b));
        assert_int_equal(safetensors_count(a), safetensors_count(b));
        for (int i = 0; i < safetensors_count(a); i++) {
            const struct safetensors_entry *x = safetensors_at(a, i), *y = safetensors_at(b, i);
            assert_string_equal(x->name, y->name);
            assert_int_equal(x->n_dims, y->n_dims);
            assert_int_equal(x->bytes, y->bytes);
            assert_memory_equal(x->shape, y->shape, (size_t)x->n_dims * sizeof x->shape[0]);
            assert_memory_equal(x->data, y->data, x->bytes);
        }
        safetensors_free(a);
        safetensors_free(b);
        loaded_close(&t);
        n++;
    }
    closedir(dir);
    assert_true(n >= 10);
}
