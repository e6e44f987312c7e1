/* tokenizer.h: text to token ids and back, from a Hugging Face folder.
 *
 * Reads tokenizer.json (BPE, byte-level or SentencePiece-style with byte fallback), and, where they
 * are, tokenizer_config.json and special_tokens_map.json. Ids are those of the tokenizers library
 * and of transformers for the same folder; where the two differ (the prefix of SentencePiece-style
 * files) SentencePiece decides, see prefix_once() in tokenizer_load.c. Whatever of tokenizer.json
 * is not implemented is ST_UNSUPPORTED, naming the file, the field and its value; a malformed file
 * is ST_FORMAT.
 *
 * A loaded tokenizer is never written to again: any number of threads may use it at once. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_TOKENIZER_H
#define COMMON_TEXT_TOKENIZER_H

#include "common/base/bytes.h"

struct tokenizer;

// A growable list of token ids, owned by whoever declared it (TOKEN_LIST_INIT).
struct token_list {
    int32_t *ids;
    int n, cap;
};
#define TOKEN_LIST_INIT                                                                            \
    {                                                                                              \
        NULL, 0, 0                                                                                 \
    }
void token_list_release(struct token_list *list);
enum status token_list_push(struct token_list *list, int32_t id);

enum status tokenizer_load(const char *folder, struct tokenizer **ret);
// The same from the files' texts; `where` names the tokenizer.json in errors.
enum tokenizer_file {
    FILE_TOKENIZER,      // tokenizer.json, the one that must be there
    FILE_CONFIG,         // tokenizer_config.json
    FILE_SPECIAL_TOKENS, // special_tokens_map.json
    FILE_MODEL_CONFIG,   // config.json
    TOKENIZER_FILES
};
struct tokenizer_text {
    const char *data; // NULL: there is none
    size_t len;
};
enum status tokenizer_parse(const char *where, const struct tokenizer_text files[TOKENIZER_FILES],
                            struct tokenizer **ret);
void tokenizer_free(struct tokenizer *t);

// Ids of a text (UTF-8, may hold NUL bytes; at most 256 MiB), appended to *ret. Added tokens such
// as
// "<|im_end|>" written out in the text become their ids. add_special: also the tokens that the
// post-processor puts around a text (Llama's <s>). Malformed UTF-8 is ST_INVALID.
enum status tokenizer_encode(const struct tokenizer *t, const char *text, size_t len,
                             bool add_special, struct token_list *ret);

// The text of n ids, appended to *ret; always well-formed UTF-8 (U+FFFD for broken bytes). An id
// without a token (a padded embedding row) gives nothing; a negative one is ST_INVALID.
enum status tokenizer_decode(const struct tokenizer *t, const int32_t *ids, int n,
                             bool skip_special, struct bytes *ret);

// The same of one id, special or not, as it stands behind other text: SentencePiece-style
// tokenizers drop the space that a text's first token begins with.
enum status tokenizer_decode_inside(const struct tokenizer *t, int32_t id, struct bytes *ret);

// Its bytes, of which those of a character may be spread over several tokens.
enum status tokenizer_token_bytes(const struct tokenizer *t, int32_t id, struct bytes *ret);

// ids are 0 .. vocab_size - 1, though not every one need have a token
int tokenizer_vocab_size(const struct tokenizer *t);
// No id stands for more bytes of text, but for white space that an added token takes with it, a
// normaliser strips, or characters that are one unknown token together.
size_t tokenizer_max_token_bytes(const struct tokenizer *t);
int tokenizer_id(const struct tokenizer *t, const char *token); // -1: no such token
const char *tokenizer_token(const struct tokenizer *t, int id); // NULL: no such id
bool tokenizer_is_special(const struct tokenizer *t, int id);
int tokenizer_eos(const struct tokenizer *t); // -1: the config names none
// Whether each token of a folder's tokenizer is t's, which is of the folder `own`: what passes
// between two models is a token id, and must mean the same to both. ST_MISMATCH names one that does
// not, and what the folder is ("draft model").
enum status tokenizer_check_same(const struct tokenizer *t, const char *own, const char *folder,
                                 const char *what);

// Decoding as tokens arrive. The pieces given out, together with the flush, are exactly what
// tokenizer_decode gives for all the ids, and each piece is whole UTF-8. Bytes of a character that
// is not complete are held back; with byte fallback, so is a run of byte tokens until it ends. One
// thread at a time; the tokenizer must outlive it.
struct detokenizer;
enum status detokenizer_new(const struct tokenizer *t, bool skip_special, struct detokenizer **ret);
void detokenizer_free(struct detokenizer *d);
// The text to come stands behind that of these ids (a completion behind its prompt), which is not
// given out. Before the first push.
enum status detokenizer_follow(struct detokenizer *d, const int32_t *ids, int n);
enum status detokenizer_push(struct detokenizer *d, int32_t id, struct bytes *ret_text); // appended
enum status detokenizer_flush(struct detokenizer *d,
                              struct bytes *ret_text); // ready for a new text

#endif
