/* tiny_sentencepiece.c: a tokenizer of 3 special tokens, 256 bytes, and a few words with what they
 * are merged of. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tiny_sentencepiece.h"
#include "tests/support/tiny_model.h"
#include "common/base/file.h"
#include "common/base/json.h"

#include <stdio.h>
#include <stdlib.h>

#define SPACE "\xe2\x96\x81"

// from id 259 on; the rest up to the last are plain letters
static const char *const pieces[] = {SPACE,     "a",  "t",         "i",  "m", "e",
                                     "o",       "n",  "c",         "u",  "p", SPACE "a",
                                     SPACE "t", "im", SPACE "tim", "on", "up"};
static const char *const merges[] = {SPACE " a", SPACE " t", "i m",        SPACE "t im",
                                     "o n",      "u p",      SPACE "tim e"};

static json_t *special(int id, const char *content)
{
    return json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", id, "content", content,
                     "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1);
}

static json_t *vocabulary(void)
{
    json_t *vocab = json_pack("{s:i, s:i, s:i}", "<unk>", 0, "<s>", 1, "</s>", 2);
    char token[16];
    int id = TINY_SENTENCEPIECE_BYTES;
    for (int b = 0; b < 256; b++) {
        snprintf(token, sizeof token, "<0x%02X>", (unsigned)b);
        json_object_set_new(vocab, token, json_integer(id++));
    }
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        json_object_set_new(vocab, pieces[i], json_integer(id++));
    for (char c = 'A'; id < TINY_SENTENCEPIECE_TIME; c++) {
        snprintf(token, sizeof token, "%c", c);
        json_object_set_new(vocab, token, json_integer(id++));
    }
    json_object_set_new(vocab, SPACE "time", json_integer(TINY_SENTENCEPIECE_TIME));
    return vocab;
}

static json_t *tokenizer_file(void)
{
    json_t *list = json_array();
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++)
        json_array_append_new(list, json_string(merges[i]));
    return json_pack("{s:s, s:[o,o,o], s:{s:s, s:[{s:s,s:s},{s:s,s:{s:s},s:s}]}, s:n,"
                     " s:{s:s, s:[{s:{s:s,s:i}},{s:{s:s,s:i}}], s:[], s:{s:{s:s,s:[i],s:[s]}}},"
                     " s:{s:s, s:[{s:s,s:{s:s},s:s},{s:s},{s:s},{s:s,s:s,s:i,s:i}]},"
                     " s:{s:s, s:s, s:b, s:b, s:o, s:o}}",
                     "version", "1.0", "added_tokens", special(0, "<unk>"), special(1, "<s>"),
                     special(2, "</s>"), "normalizer", "type", "Sequence", "normalizers", "type",
                     "Prepend", "prepend", SPACE, "type", "Replace", "pattern", "String", " ",
                     "content", SPACE, "pre_tokenizer", "post_processor", "type",
                     "TemplateProcessing", "single", "SpecialToken", "id", "<s>", "type_id", 0,
                     "Sequence", "id", "A", "type_id", 0, "pair", "special_tokens", "<s>", "id",
                     "<s>", "ids", 1, "tokens", "<s>", "decoder", "type", "Sequence", "decoders",
                     "type", "Replace", "pattern", "String", SPACE, "content", " ", "type",
                     "ByteFallback", "type", "Fuse", "type", "Strip", "content", " ", "start", 1,
                     "stop", 0, "model", "type", "BPE", "unk_token", "<unk>", "fuse_unk", 1,
                     "byte_fallback", 1, "vocab", vocabulary(), "merges", list);
}

enum status tiny_sentencepiece_write(const char *folder)
{
    json_t *config = json_pack("{s:s, s:s, s:s}", "tokenizer_class", "LlamaTokenizer", "bos_token",
                               "<s>", "eos_token", "</s>");
    enum status st = tiny_json_write(folder, "tokenizer.json", tokenizer_file());
    return st ? st : tiny_json_write(folder, "tokenizer_config.json", config);
}
