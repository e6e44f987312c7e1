/* test_tokenizer_reference.c: tokenizers and chats against the reference vectors of the shared test
 * data, which are skipped where it is absent. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "tests/support/support.h"
#include "tests/support/tokens.h"

static int32_t *read_ids(const json_t *list, int *ret_n)
{
    *ret_n = (int)json_array_size(list);
    int32_t *ids = calloc((size_t)*ret_n + 1, sizeof(*ids));
    assert_non_null(ids);
    for (int i = 0; i < *ret_n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return ids;
}

static struct tokenizer *load_data(const char *name, char ret_folder[PATH_MAX])
{
    struct tokenizer *t = NULL;
    test_data_folder(name, ret_folder);
    assert_ok(tokenizer_load(ret_folder, &t));
    return t;
}

// One line of a vector file: ids of `text` (after `skip` of them), then each kind of decoded text.
static void check_line(const struct tokenizer *t, const json_t *line, const char *ids_key, int skip,
                       const char *decoded_key, const char *skipped_key)
{
    int n;
    int32_t *ids = test_keep(read_ids(json_object_get(line, ids_key), &n));
    const json_t *text = json_object_get(line, "text");
    assert_ids(t, json_string_value(text), json_string_length(text), false, ids + skip, n - skip);
    const json_t *decoded = json_object_get(line, decoded_key),
                 *skipped = json_object_get(line, skipped_key);
    assert_text(t, ids, n, false, json_string_value(decoded), json_string_length(decoded));
    if (skipped)
        assert_text(t, ids, n, true, json_string_value(skipped), json_string_length(skipped));
}

static void check_file(const char *tokenizer, const char *vectors, const char *ids_key, int skip,
                       const char *decoded_key, const char *skipped_key)
{
    char folder[PATH_MAX], path[PATH_MAX];
    struct tokenizer *t = load_data(tokenizer, folder);
    test_data_folder(vectors, path);
    json_t *lines = json_of_lines_file(path);
    assert_true(json_array_size(lines) > 0);
    for (size_t i = 0; i < json_array_size(lines); i++)
        check_line(t, json_array_get(lines, i), ids_key, skip, decoded_key, skipped_key);
    print_message("%s: %zu vectors equal\n", vectors, json_array_size(lines));
    tokenizer_free(t);
}

static void check_chat(const char *tokenizer, const char *vectors)
{
    char folder[PATH_MAX], path[PATH_MAX];
    struct tokenizer *t = load_data(tokenizer, folder);
    struct chat_template *template = NULL;
    test_data_folder(vectors, path);
    assert_ok(chat_template_find(folder, &(struct chat_template_choice){NULL, NULL}, &template));
    json_t *lines = json_of_lines_file(path);
    assert_true(json_array_size(lines) > 0);
    for (size_t i = 0; i < json_array_size(lines); i++) {
        const json_t *line = json_array_get(lines, i), *text = json_object_get(line, "text");
        SCOPED(bytes_release) struct bytes got = BYTES_INIT;
        int n;
        int32_t *ids = test_keep(read_ids(json_object_get(line, "ids"), &n));
        struct chat_input input = {
            .messages = json_object_get(line, "messages"),
            .add_generation_prompt = json_is_true(json_object_get(line, "add_generation_prompt"))};
        assert_ok(chat_template_render(template, &input, &got));
        assert_int_equal(got.len, json_string_length(text));
        assert_memory_equal(got.data, json_string_value(text), got.len);
        assert_ids(t, got.data, got.len, false, ids, n);
    }
    print_message("%s: %zu vectors equal\n", vectors, json_array_size(lines));
    chat_template_free(template);
    tokenizer_free(t);
}

static void check_reference(const char *name)
{
    char vectors[200], chat[200];
    snprintf(vectors, sizeof(vectors), "tokenizer-vectors/reference/%s.jsonl", name);
    snprintf(chat, sizeof(chat), "tokenizer-vectors/reference/%s.chat.jsonl", name);
    check_file(name, vectors, "ids", 0, "decoded", "-");
    check_chat(name, chat);
}

TEST(reference_qwen)
{
    check_reference("qwen2.5-tokenizer");
}

TEST(reference_phi)
{
    check_reference("phi3-tokenizer");
}

TEST(reference_minimind)
{
    check_reference("minimind-tokenizer");
}

TEST(conformance)
{
    static const struct {
        const char *tokenizer, *vectors;
        int skip; // ids at the start that add_special put there
    } files[] = {{"qwen2.5-tokenizer", "tokenizer-vectors/hf/qwen2.5.a.jsonl", 0},
                 {"qwen2.5-tokenizer", "tokenizer-vectors/hf/qwen2.5.b.jsonl", 0},
                 {"phi3-tokenizer", "tokenizer-vectors/hf/tinyllama.a.jsonl", 1},
                 {"phi3-tokenizer", "tokenizer-vectors/hf/tinyllama.b.jsonl", 1}};
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
        check_file(files[i].tokenizer, files[i].vectors, "input_ids", files[i].skip,
                   "decoded_with_special", "decoded_skip_special");
}

// The next case of a .inp file, cut off at its separator; its ids stand in one line of the .out
// file.
static void check_case(const struct tokenizer *t, const char *text, size_t len, const char *line)
{
    int32_t *want = test_keep(calloc(strlen(line) + 1, sizeof(*want)));
    int n = 0;
    assert_non_null(want);
    for (char *end; *line && *line != '\n'; line = end) {
        long id = strtol(line, &end, 10);
        if (end == line) break;
        want[n++] = (int32_t)id;
    }
    assert_ids(t, text, len, false, want, n);
}

static void check_ggml(const char *tokenizer, const char *name)
{
    static const char separator[] = "\n__ggml_vocab_test__\n";
    char folder[PATH_MAX], path[PATH_MAX], file[200];
    struct tokenizer *t = load_data(tokenizer, folder);
    snprintf(file, sizeof(file), "tokenizer-vectors/ggml/%s.inp", name);
    test_data_folder(file, path);
    char *inputs = test_read(path);
    snprintf(file, sizeof(file), "tokenizer-vectors/ggml/%s.out", name);
    test_data_folder(file, path);
    char *outputs = test_read(path), *line = outputs;
    int n = 0;
    for (char *text = inputs, *end; (end = strstr(text, separator));
         text = end + sizeof(separator) - 1) {
        check_case(t, text, (size_t)(end - text), line);
        line += strcspn(line, "\n");
        line += *line == '\n';
        n++;
    }
    assert_int_equal(n, 23);
    print_message("%s: %d vectors equal\n", name, n);
    tokenizer_free(t);
}

TEST(ggml)
{
    check_ggml("qwen2.5-tokenizer", "qwen2");
    check_ggml("phi3-tokenizer", "phi-3");
    check_ggml("phi3-tokenizer", "llama-spm");
}
