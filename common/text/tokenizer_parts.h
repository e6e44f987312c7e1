/* tokenizer_parts.h: what a tokenizer (tokenizer.c) is made of, in the order in which a text passes
 * through it. All but pieces, which are plain storage of the caller, is filled while tokenizer.json
 * is loaded (one thread), and read-only afterwards (any thread). */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_TOKENIZER_PARTS_H
#define COMMON_TEXT_TOKENIZER_PARTS_H

#include "common/base/bytes.h"
#include "common/text/tokenizer.h"
#include <jansson.h>

// ---- steps --------------------------------------------------------------------------------------
// The sections of tokenizer.json that say how text is processed ("normalizer", "pre_tokenizer",
// "post_processor", "decoder"): one step with a type, or a Sequence of steps; one Sequence within
// another is the same list.

enum prepend_scheme { PREPEND_ALWAYS, PREPEND_FIRST, PREPEND_NEVER };

struct step { // what its type has no use for is zero
    const struct step_type *type;
    const json_t *json;         // its fields; borrowed, for as long as the section is read
    struct pattern *pattern;    // what it looks for
    struct bytes with;          // what comes in its place, or in front
    char character[5];          // Metaspace: what stands for a space; Strip: what is taken off
    enum prepend_scheme scheme; // Metaspace: where one is put in front
    int behavior;               // Split, Digits (pretokenize.c)
    int count;                  // a decoder's Strip: at most so many characters
    bool left, right;           // a normalizer's Strip
    bool invert;                // Split: what does not match counts as the match
    bool prefix_space;          // ByteLevel
    bool split;                 // Metaspace: cut before each replacement
};
struct step_type {
    const char *name;                                                          // NULL ends a table
    int kind;                                                                  // of its section's
    int form;                                                                  // of normal forms
    enum status (*parse)(const char *where, const char *name, struct step *s); // NULL: no fields
};
struct step_list { // all zero: empty
    struct step *items;
    size_t n;
};
// `name` is the section's, `parts` the key of a Sequence's list ("normalizers"). NULL or null:
// there is no step. The list is the caller's to release, also on failure.
enum status step_list_parse(const char *where, const char *name, const char *parts,
                            const json_t *section, const struct step_type *types,
                            struct step_list *ret);
void step_list_release(struct step_list *list);

// Replace: what is matched, and what comes in its place; and Metaspace: spaces are characters of
// another kind.
enum status step_parse_replace(const char *where, const char *name, struct step *s);
enum status step_parse_metaspace(const char *where, const char *name, struct step *s);
// A field of one character, or of that where it is absent, as s->character; ST_FORMAT: it is none
// or more.
enum status step_parse_character(const char *where, const char *name, const char *key,
                                 const char *otherwise, struct step *s);

// ---- token map ----------------------------------------------------------------------------------
// Token text <-> id, the hash table under a tokenizer's vocabulary and added tokens. Texts may hold
// any bytes; each is kept with a NUL behind it.

struct token_text {
    size_t offset; // into token_map.texts
    int len;       // -1: this id has no token
};
struct token_map {
    struct bytes texts;
    struct token_text *tokens; // by id, n_ids of them
    int n_ids, cap_ids;
    int n_tokens;
    int32_t *slots; // id + 1, 0 where empty; a power of two
    int n_slots;
};

void token_map_release(struct token_map *m);
// ST_FORMAT where the text or the id is already there with another partner.
enum status token_map_add(struct token_map *m, const char *text, size_t len, int id);
int token_map_id(const struct token_map *m, const char *text, size_t len); // -1: none
// NULL: no such id. *ret_len may be NULL.
const char *token_map_text(const struct token_map *m, int id, size_t *ret_len);

// ---- piece --------------------------------------------------------------------------------------
// A list of stretches of a text: what a pattern matches and what stands between, added tokens and
// plain text, the words of the pre-tokenizer.

struct text_piece {
    size_t start, len; // bytes
    int id;            // whoever makes the list says what it means
};
struct piece_list { // all zero: empty
    struct text_piece *items;
    size_t n, cap;
};
void piece_list_release(struct piece_list *list);
enum status piece_list_push(struct piece_list *list, size_t start, size_t len, int id);

// ---- pattern ------------------------------------------------------------------------------------
// What tokenizer.json calls a pattern: {"String": literal} or {"Regex": expression}. Used by the
// normalizer, the pre-tokenizer and the decoder.

struct pattern;

// `where` and `field` name the file and the field in errors.
enum status pattern_parse(const char *where, const char *field, const json_t *value,
                          struct pattern **ret);
// `text`: an expression, or what is matched as it stands, which is not empty.
enum status pattern_new(const char *where, const char *field, const char *text, size_t len,
                        bool literal, struct pattern **ret);
void pattern_free(struct pattern *p);

// Well-formed UTF-8 as pieces, in order: matches, from left to right and not overlapping (id 1),
// and what stands between them (id 0). *ret is emptied first.
enum status pattern_cut(const struct pattern *p, const char *text, size_t len,
                        struct piece_list *ret);

// `text` with every match replaced by `with` (taken literally), appended to *ret.
enum status pattern_replace(const struct pattern *p, const char *text, size_t len, const char *with,
                            size_t with_len, struct bytes *ret);

// ---- normalizer ---------------------------------------------------------------------------------
// The "normalizer" section of tokenizer.json: what is done to text before it is split.

enum status normalizer_parse(const char *where, const json_t *section, struct step_list *ret);
// Well-formed UTF-8 in and out; *ret is emptied first. `ret` must not hold `text`. prepend: Prepend
// steps act.
enum status normalizer_apply(const struct step_list *n, const char *text, size_t len, bool prepend,
                             struct bytes *ret);

// ---- added tokens -------------------------------------------------------------------------------
// The tokens that stand outside the model's vocabulary or beside it ("<|im_end|>", "<think>"):
// found in a text before anything else is done to it, each with its own white-space rules.

struct added_token {
    int id;
    bool special;        // left out by skip_special
    bool normalized;     // looked for in the normalized text, not in the raw one
    bool lstrip, rstrip; // takes the white space before or behind with it
    bool single_word;    // only where no word character touches it
};

struct added_search {
    struct token_map map;
    size_t *lengths; // that its texts have, from the longest
    size_t n;
    bool begins[256]; // a text begins with this byte
};
struct added_tokens { // all zero: empty
    struct token_map map;
    struct added_token *tokens; // by id, -1 where there is none; n of them
    int n;
    struct added_search searches[2]; // of texts as they are, and of normalized ones
};
void added_tokens_release(struct added_tokens *a);

// Adds a token, or replaces the flags of the one with this text.
enum status added_tokens_put(struct added_tokens *a, const char *text, size_t len,
                             const struct added_token *token);
// Builds the search tables; after the last put. prepend: as the normalizer takes it.
enum status added_tokens_finish(struct added_tokens *a, const struct step_list *normalizer,
                                bool prepend);

const struct added_token *added_tokens_find(const struct added_tokens *a, int id); // NULL: none

// Cuts a text into runs of plain text (id -1) and added tokens, in order; *ret is emptied first.
// `normalized` picks the tokens that are looked for in normalized text.
enum status added_tokens_split(const struct added_tokens *a, bool normalized, const char *text,
                               size_t len, struct piece_list *ret);

// ---- pre-tokenizer ------------------------------------------------------------------------------
// The "pre_tokenizer" section of tokenizer.json: cuts normalized text into the words that the BPE
// model encodes one by one.

enum status pretokenizer_parse(const char *where, const json_t *section, struct step_list *ret);

// The words of a text: pieces of *ret_text, in order. at_start: the text is the start of the whole
// input (a Metaspace step with prepend_scheme "first" asks). Both outputs are emptied first.
enum status pretokenizer_apply(const struct step_list *p, const char *text, size_t len,
                               bool at_start, struct bytes *ret_text, struct piece_list *ret_words);

// GPT-2's alphabet: every byte has a printable character. UTF-8 of byte b, 1 or 2 bytes.
int byte_level_char(unsigned char byte, char ret[4]);
int byte_level_byte(uint32_t character); // -1: not of the alphabet

// ---- bpe ----------------------------------------------------------------------------------------
// The BPE model of a tokenizer: a vocabulary and ranked merges, over words (pieces of text) that
// the pre-tokenizer made.

struct bpe;
struct bpe_scratch { // working memory of one encoding, reused from word to word; all zero: none yet
    struct bpe_symbol *symbols;
    struct bpe_candidate *heap;
    int n_symbols, cap_symbols, n_heap;
};

enum status bpe_parse(const char *where, const json_t *model, struct bpe **ret);
void bpe_free(struct bpe *b);
const struct token_map *bpe_vocab(const struct bpe *b);

void bpe_scratch_release(struct bpe_scratch *s);

// Ids of one word (well-formed UTF-8), appended. Time is O(n log n) in the word's length.
enum status bpe_encode(const struct bpe *b, struct bpe_scratch *s, const char *word, size_t len,
                       struct token_list *ret);

// ---- decoder ------------------------------------------------------------------------------------
// The "decoder" section of tokenizer.json, parsed. tokenizer.h has the calls that use it
// (detokenizer_push and others).

enum status decoder_parse(const char *where, const json_t *section, struct step_list *ret);

// The state of one text on its way out.
struct decoding {
    struct bytes pending; // bytes held back: an open character, or a run of byte tokens
    bool started;         // a token has been seen
    int strip_left;       // characters that may still be taken off the front
};
void decoding_reset(const struct step_list *d, struct decoding *state);
// What comes no longer depends on what has come: no token is the first, nothing is stripped.
bool decoding_is_inside(const struct step_list *d, const struct decoding *state);
void decoding_set_inside(struct decoding *state);
// One token's text; what can be given out is appended to *ret. bytes_status() tells of failures.
enum status decoding_push(const struct step_list *d, struct decoding *state, const char *token,
                          size_t len, struct bytes *ret);
// The same of a token behind others, as bytes, which may be a part of a character.
enum status decoding_bytes(const struct step_list *d, const char *token, size_t len,
                           struct bytes *ret);
enum status decoding_flush(const struct step_list *d, struct decoding *state, struct bytes *ret);

// ---- all of them --------------------------------------------------------------------------------

struct tokenizer {
    struct bpe *bpe;
    struct added_tokens added;
    struct step_list normalizer, pretokenizer, decoder;
    bool prefix_once;                 // Prepend acts at the start of the whole text only
    struct token_list prefix, suffix; // what add_special puts around a text
    int bos, eos, n_ids;
    size_t max_token_bytes;
};
int tokenizer_id_of(const struct tokenizer *t, const char *text, size_t len); // -1: no such token

#endif
