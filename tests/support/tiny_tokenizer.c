/* tiny_tokenizer.c: a byte-level tokenizer as Hugging Face's tokenizers library would save it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/tiny_model.h"
#include "common/base/bytes.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/text/tokenizer_parts.h"
#include "tests/support/support.h"

#include <stdlib.h>

static json_t *vocabulary(void)
{
    static const char *const merged[] = {"he", "ll", "\xc4\xa0t", "hell"};
    json_t *vocab = json_object();
    char token[8];
    for (int b = 0; b < 256; b++) {
        token[byte_level_char((unsigned char)b, token)] = '\0';
        json_object_set_new(vocab, token, json_integer(b));
    }
    for (int i = 0; i < 4; i++) json_object_set_new(vocab, merged[i], json_integer(256 + i));
    return vocab;
}

static json_t *added(int id, const char *content)
{
    return json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", id, "content", content,
                     "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1);
}

enum status tiny_tokenizer_json(json_t **ret_tokenizer, json_t **ret_config)
{
    json_t *tokenizer = json_pack(
        "{s:s, s:n, s:n, s:[o,o,o], s:n, s:{s:s,s:b,s:b,s:b}, s:n, s:{s:s,s:b,s:b,s:b},"
        " s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:o, s:[s,s,s,s]}}",
        "version", "1.0", "truncation", "padding", "added_tokens",
        added(TINY_TOKENIZER_IM_START, "<|im_start|>"), added(TINY_TOKENIZER_IM_END, "<|im_end|>"),
        added(262, "<|endoftext|>"), "normalizer", "pre_tokenizer", "type", "ByteLevel",
        "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 1, "post_processor", "decoder",
        "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 1, "model",
        "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
        "fuse_unk", 0, "byte_fallback", 0, "vocab", vocabulary(), "merges", "h e", "l l",
        "\xc4\xa0 t", "he ll");
    json_t *config =
        json_pack("{s:s, s:s, s:s, s:s}", "tokenizer_class", "Qwen2Tokenizer", "eos_token",
                  "<|im_end|>", "pad_token", "<|endoftext|>", "chat_template",
                  "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
                  "message['content'] "
                  "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
                  "'<|im_start|>assistant\n' }}{% endif %}");
    if (!tokenizer || !config) {
        json_decref(tokenizer);
        json_decref(config);
        return status_fail(ST_NO_MEMORY, "no memory for a tokenizer");
    }
    *ret_tokenizer = tokenizer;
    *ret_config = config;
    return ST_OK;
}

enum status tiny_tokenizer_write(const char *folder)
{
    json_t *tokenizer = NULL, *config = NULL;
    enum status st = tiny_tokenizer_json(&tokenizer, &config);
    if (st == ST_OK) st = tiny_json_write(folder, "tokenizer.json", tokenizer);
    return st ? st : tiny_json_write(folder, "tokenizer_config.json", config);
}

enum status tiny_tokenizer_write_bytes(const char *folder)
{
    json_t *vocab = json_object();
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)i & 0xff);
        json_object_set_new(vocab, name, json_integer(i));
    }
    return tiny_json_write(folder, "tokenizer.json",
                           json_pack("{s:s, s:{s:s}, s:{s:s, s:o, s:[], s:b}}", "version", "1.0",
                                     "decoder", "type", "ByteFallback", "model", "type", "BPE",
                                     "vocab", vocab, "merges", "byte_fallback", 1));
}

const char *tiny_tokenizer_beside(const char *model)
{
    static const char *const files[] = {"config.json", "generation_config.json",
                                        "model.safetensors"};
    const char *folder = test_folder();
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        assert_int_equal(symlink(test_path(model, files[i]), test_path(folder, files[i])), 0);
    assert_ok(tiny_tokenizer_write_bytes(folder));
    return folder;
}
