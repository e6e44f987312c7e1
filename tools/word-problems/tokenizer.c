/* tokenizer.c: writes a byte-level BPE for the words of the problems. Stateless.
 *
 * Its merges build a word letter by letter (a trie), so that every word, with the blank before it
 * or at the start of a line, is one token; they never touch digits, which stay single.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/bytes.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "tools/word-problems/problem.h"

#include <ctype.h>
#include <stdio.h>

struct words {
    json_t *vocab, *merges;
    int next_id;
    bool line_starts; // words are added as they begin a line, else with the blank before them
    bool failed;      // for want of memory
};

#define END_OF_TEXT "<|endoftext|>"

static void add_token(struct words *w, const char *token)
{
    w->failed |= json_object_set_new(w->vocab, token, json_integer(w->next_id++)) != 0;
}

// Adds the merges that build `word`, letter by letter.
static void add_word(struct words *w, const char *word, size_t len)
{
    char left[64], pair[72];
    size_t n = 0;
    if (w->line_starts)
        left[n++] = word[0];
    else
        n = (size_t)sprintf(left, "\xc4\xa0"); // GPT-2's stand-in for a blank, U+0120
    for (size_t i = w->line_starts; i < len && n + 2 < sizeof left; i++) {
        left[n] = word[i], left[n + 1] = '\0';
        if (!json_object_get(w->vocab, left)) {
            snprintf(pair, sizeof pair, "%.*s %c", (int)n, left, word[i]);
            w->failed |= json_array_append_new(w->merges, json_string(pair)) != 0;
            add_token(w, left);
        }
        n++;
    }
}

// Those of a text that may stand within a line, or the one that may begin it.
static void add_words(void *context, const char *text)
{
    struct words *w = context;
    for (const char *c = text; *c && *c != '|' && (c == text || !w->line_starts);) {
        size_t n = 0;
        while (isalpha((unsigned char)c[n])) n++;
        if (n) add_word(w, c, n);
        c += n ? n : *c == '%' ? 2 : 1;
    }
}

// Bytes are tokens 0 to 255, in the order of GPT-2's printable stand-ins for them.
static void add_bytes(struct words *w)
{
    for (int b = 0, moved = 0; b < 256; b++) {
        char token[5];
        bool plain = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        token[utf8_encode((uint32_t)(plain ? b : 256 + moved), token)] = '\0';
        moved += !plain;
        add_token(w, token);
    }
}

enum status word_tokenizer_write(const char *folder)
{
    enum status st;
    struct words w = {.vocab = json_object(), .merges = json_array()};
    char tokenizer_path[PATH_ROOM], config_path[PATH_ROOM];
    json_t *tokenizer = NULL, *config = NULL;
    CHECK(path_put(tokenizer_path, folder, "tokenizer.json"));
    CHECK(path_put(config_path, folder, "tokenizer_config.json"));
    add_bytes(&w);
    int end = w.next_id++;
    problem_texts(false, add_words, &w); // first: " Tom" must not become " " and "Tom"
    w.line_starts = true;
    problem_texts(true, add_words, &w);
    tokenizer = json_pack(
        "{s:s, s:n, s:n, s:[{s:i, s:s, s:b, s:b, s:b, s:b, s:b}], s:n,"
        " s:{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b, s:b}]}, s:n, s:{s:s, s:b, s:b, s:b},"
        " s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:O, s:O}}",
        "version", "1.0", "truncation", "padding", "added_tokens", "id", end, "content",
        END_OF_TEXT, "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1,
        "normalizer", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Split",
        "pattern", "Regex", " ?\\p{L}+|\\p{N}|[^\\p{L}\\p{N}]", "behavior", "Isolated", "invert", 0,
        "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0,
        "post_processor", "decoder", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
        "use_regex", 0, "model", "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix",
        "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "vocab", w.vocab, "merges",
        w.merges);
    config = json_pack("{s:s, s:s, s:s}", "tokenizer_class", "PreTrainedTokenizerFast", "eos_token",
                       END_OF_TEXT, "pad_token", END_OF_TEXT);
    if (w.failed || !tokenizer || !config) FAIL(ST_NO_MEMORY, "no memory for a tokenizer");
    CHECK(json_write_file(tokenizer_path, 0644, tokenizer));
    CHECK(json_write_file(config_path, 0644, config));
    printf("%s: %d tokens\n", folder, w.next_id);
out:
    json_decref(tokenizer);
    json_decref(config);
    json_decref(w.vocab);
    json_decref(w.merges);
    return st;
}
