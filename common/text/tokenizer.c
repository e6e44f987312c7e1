/* tokenizer.c: the way through a Hugging Face tokenizer's parts:
 *
 *   text -> added tokens cut out -> normalizer -> added tokens cut out of the normalized text
 *        -> pre-tokenizer: words -> BPE: ids        (added_tokens, normalizer, pretokenize, bpe)
 *   ids  -> token texts -> decoder -> text          (detokenize)
 *
 * An encoding has its own scratch memory, so one tokenizer serves all threads. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer.h"
#include "common/text/tokenizer_parts.h"
#include <stdlib.h>
#include <string.h>

#define MAX_TEXT_BYTES ((size_t)256 << 20)

struct detokenizer {
    const struct tokenizer *tokenizer;
    bool skip_special;
    struct decoding state;
};

void token_list_release(struct token_list *list)
{
    free(list->ids);
    *list = (struct token_list)TOKEN_LIST_INIT;
}

enum status token_list_push(struct token_list *list, int32_t id)
{
    if (list->n == list->cap) {
        int cap = list->cap ? 2 * list->cap : 64;
        int32_t *ids = realloc(list->ids, (size_t)cap * sizeof(*ids));
        if (!ids) return status_fail(ST_NO_MEMORY, "out of memory for %d tokens", list->n);
        list->ids = ids;
        list->cap = cap;
    }
    list->ids[list->n++] = id;
    return ST_OK;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t) return;
    bpe_free(t->bpe);
    added_tokens_release(&t->added);
    step_list_release(&t->normalizer);
    step_list_release(&t->pretokenizer);
    step_list_release(&t->decoder);
    token_list_release(&t->prefix);
    token_list_release(&t->suffix);
    free(t);
}

// ---- encoding ----------------------------------------------------------------------------------

// Memory of one encoding.
struct scratch {
    struct piece_list raw, normal, words;
    struct bytes normalized, text;
    struct bpe_scratch bpe;
};

// A stretch without added tokens, normalized; at_start: it begins the whole text.
static enum status encode_words(const struct tokenizer *t, struct scratch *s, const char *text,
                                size_t len, bool at_start, struct token_list *ret)
{
    enum status st = pretokenizer_apply(&t->pretokenizer, text, len, at_start, &s->text, &s->words);
    for (size_t i = 0; st == ST_OK && i < s->words.n; i++)
        st = bpe_encode(t->bpe, &s->bpe, s->text.data + s->words.items[i].start,
                        s->words.items[i].len, ret);
    return st;
}

// A stretch between the added tokens of the raw text.
static enum status encode_stretch(const struct tokenizer *t, struct scratch *s, const char *text,
                                  size_t len, bool at_start, struct token_list *ret)
{
    enum status st;
    CHECK(normalizer_apply(&t->normalizer, text, len, at_start || !t->prefix_once, &s->normalized));
    const char *normal = bytes_text(&s->normalized);
    CHECK(added_tokens_split(&t->added, true, normal, s->normalized.len, &s->normal));
    for (size_t i = 0; i < s->normal.n; i++) {
        const struct text_piece *piece = &s->normal.items[i];
        if (piece->id >= 0)
            CHECK(token_list_push(ret, piece->id));
        else
            CHECK(encode_words(t, s, normal + piece->start, piece->len,
                               at_start && piece->start == 0, ret));
    }
out:
    return st;
}

static enum status check_text(const char *text, size_t len)
{
    if (len > MAX_TEXT_BYTES)
        return status_fail(ST_INVALID,
                           "a text of %zu bytes is too long; at most %zu can be tokenized", len,
                           MAX_TEXT_BYTES);
    size_t valid = utf8_valid(text, len);
    return valid == len ? ST_OK
                        : status_fail(ST_INVALID, "the text is not UTF-8 at byte %zu", valid);
}

enum status tokenizer_encode(const struct tokenizer *t, const char *text, size_t len,
                             bool add_special, struct token_list *ret)
{
    struct scratch s = {0};
    int before = ret->n;
    enum status st;
    CHECK(check_text(text, len));
    for (int i = 0; add_special && i < t->prefix.n; i++)
        CHECK(token_list_push(ret, t->prefix.ids[i]));
    CHECK(added_tokens_split(&t->added, false, text, len, &s.raw));
    for (size_t i = 0; i < s.raw.n; i++) {
        const struct text_piece *piece = &s.raw.items[i];
        if (piece->id >= 0)
            CHECK(token_list_push(ret, piece->id));
        else
            CHECK(encode_stretch(t, &s, text + piece->start, piece->len, piece->start == 0, ret));
    }
    for (int i = 0; add_special && i < t->suffix.n; i++)
        CHECK(token_list_push(ret, t->suffix.ids[i]));
out:
    if (st != ST_OK) ret->n = before;
    piece_list_release(&s.raw);
    piece_list_release(&s.normal);
    piece_list_release(&s.words);
    bytes_release(&s.normalized);
    bytes_release(&s.text);
    bpe_scratch_release(&s.bpe);
    return st;
}

// ---- decoding ----------------------------------------------------------------------------------

static const char *token_text(const struct tokenizer *t, int id, size_t *ret_len)
{
    const char *text = token_map_text(&t->added.map, id, ret_len);
    return text ? text : token_map_text(bpe_vocab(t->bpe), id, ret_len);
}

static enum status push_token(const struct tokenizer *t, struct decoding *state, bool skip_special,
                              int32_t id, struct bytes *ret)
{
    size_t len;
    if (id < 0) return status_fail(ST_INVALID, "%d is not a token id", id);
    const char *text = token_text(t, id, &len);
    if (!text || (skip_special && tokenizer_is_special(t, id))) return ST_OK;
    return decoding_push(&t->decoder, state, text, len, ret);
}

enum status tokenizer_decode(const struct tokenizer *t, const int32_t *ids, int n,
                             bool skip_special, struct bytes *ret)
{
    struct decoding state = {.pending = BYTES_INIT};
    size_t before = ret->len;
    enum status st = ST_OK;
    decoding_reset(&t->decoder, &state);
    for (int i = 0; st == ST_OK && i < n; i++)
        st = push_token(t, &state, skip_special, ids[i], ret);
    if (st == ST_OK) st = decoding_flush(&t->decoder, &state, ret);
    if (st != ST_OK && ret->data) {
        ret->len = before;
        ret->data[before] = '\0';
    }
    bytes_release(&state.pending);
    return st;
}

enum status tokenizer_decode_inside(const struct tokenizer *t, int32_t id, struct bytes *ret)
{
    struct decoding state = {.pending = BYTES_INIT};
    decoding_set_inside(&state);
    enum status st = push_token(t, &state, false, id, ret);
    if (st == ST_OK) st = decoding_flush(&t->decoder, &state, ret);
    bytes_release(&state.pending);
    return st;
}

enum status tokenizer_token_bytes(const struct tokenizer *t, int32_t id, struct bytes *ret)
{
    size_t len;
    const char *text = id < 0 ? NULL : token_text(t, id, &len);
    return text ? decoding_bytes(&t->decoder, text, len, ret) : ST_OK;
}

enum status detokenizer_new(const struct tokenizer *t, bool skip_special, struct detokenizer **ret)
{
    struct detokenizer *d = calloc(1, sizeof(*d));
    if (!d) return status_fail(ST_NO_MEMORY, "out of memory");
    d->tokenizer = t;
    d->skip_special = skip_special;
    decoding_reset(&t->decoder, &d->state);
    *ret = d;
    return ST_OK;
}

void detokenizer_free(struct detokenizer *d)
{
    if (!d) return;
    bytes_release(&d->state.pending);
    free(d);
}

// Only how the text begins matters, so that mostly one token decides. A character that the last of
// these ids leave open is not completed: its bytes are the other text's.
enum status detokenizer_follow(struct detokenizer *d, const int32_t *ids, int n)
{
    const struct step_list *decoder = &d->tokenizer->decoder;
    struct bytes text = BYTES_INIT;
    enum status st = ST_OK;
    for (int i = 0; st == ST_OK && i < n && !decoding_is_inside(decoder, &d->state); i++)
        st = push_token(d->tokenizer, &d->state, d->skip_special, ids[i], &text);
    if (d->state.pending.len > 0) decoding_set_inside(&d->state);
    bytes_clear(&d->state.pending);
    bytes_release(&text);
    return st;
}

enum status detokenizer_push(struct detokenizer *d, int32_t id, struct bytes *ret_text)
{
    return push_token(d->tokenizer, &d->state, d->skip_special, id, ret_text);
}

enum status detokenizer_flush(struct detokenizer *d, struct bytes *ret_text)
{
    return decoding_flush(&d->tokenizer->decoder, &d->state, ret_text);
}

// ---- queries -----------------------------------------------------------------------------------

int tokenizer_vocab_size(const struct tokenizer *t)
{
    return t->n_ids;
}

size_t tokenizer_max_token_bytes(const struct tokenizer *t)
{
    return t->max_token_bytes;
}

int tokenizer_id_of(const struct tokenizer *t, const char *text, size_t len)
{
    int id = token_map_id(&t->added.map, text, len);
    return id >= 0 ? id : token_map_id(bpe_vocab(t->bpe), text, len);
}

int tokenizer_id(const struct tokenizer *t, const char *token)
{
    return tokenizer_id_of(t, token, strlen(token));
}

const char *tokenizer_token(const struct tokenizer *t, int id)
{
    return token_text(t, id, NULL);
}

bool tokenizer_is_special(const struct tokenizer *t, int id)
{
    const struct added_token *token = added_tokens_find(&t->added, id);
    return token && token->special;
}

int tokenizer_eos(const struct tokenizer *t)
{
    return t->eos;
}
