/* pretokenize.c: each step takes the words of the one before and gives more, smaller ones. The
 * semantics are those of the tokenizers library: a step sees one word at a time, so that an
 * expression's look-ahead ends with its word. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/base/names.h"
#include "common/text/tokenizer_parts.h"
#include "common/base/unicode.h"
#include <string.h>

#define GPT2_EXPRESSION                                                                            \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

enum { SPLIT, DIGITS, BYTE_LEVEL, METASPACE };
enum behavior { REMOVED, ISOLATED, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT, CONTIGUOUS };

// Words while they are made: pieces of `text`; a piece's id is 1 where it is the start of the
// input.
struct words {
    struct bytes text;
    struct piece_list list;
};

// ---- the byte-level alphabet -------------------------------------------------------------------

// Printable bytes stand for themselves, the 68 others for U+0100 onwards, in their order.
static bool stands_for_itself(int b)
{
    return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
}

int byte_level_char(unsigned char byte, char ret[4])
{
    uint32_t c = byte;
    if (!stands_for_itself(byte)) { // the rank among the others
        if (byte <= 0x20)
            c = 0x100u + byte;
        else if (byte < 0xAD)
            c = 0x100u + 33u + (byte - 0x7Fu);
        else
            c = 0x100u + 67u;
    }
    return utf8_encode(c, ret);
}

int byte_level_byte(uint32_t c)
{
    if (c < 0x100) return stands_for_itself((int)c) ? (int)c : -1;
    if (c <= 0x120) return (int)(c - 0x100);
    if (c < 0x100 + 67) return (int)(c - 0x121 + 0x7F);
    return c == 0x100 + 67 ? 0xAD : -1;
}

// ---- loading -----------------------------------------------------------------------------------

static enum status parse_split(const char *where, const char *name, struct step *s)
{
    static const char *const behaviors[] = {[REMOVED] = "Removed",
                                            [ISOLATED] = "Isolated",
                                            [MERGED_WITH_PREVIOUS] = "MergedWithPrevious",
                                            [MERGED_WITH_NEXT] = "MergedWithNext",
                                            [CONTIGUOUS] = "Contiguous",
                                            NULL};
    const char *behavior = "";
    char field[64];
    enum status st;
    snprintf(field, sizeof field, "%s.pattern", name);
    CHECK(pattern_parse(where, field, json_object_get(s->json, "pattern"), &s->pattern));
    CHECK(json_get_bool(where, s->json, "invert", &s->invert));
    CHECK(json_get_string(where, s->json, "behavior", &behavior));
    s->behavior = name_find(behaviors, behavior);
    if (s->behavior < 0)
        FAIL(ST_UNSUPPORTED, "%s: %s.behavior \"%s\" is not supported", where, name, behavior);
out:
    return st;
}

static enum status parse_byte_level(const char *where, const char *name, struct step *s)
{
    bool use_regex = true;
    enum status st;
    s->prefix_space = true;
    CHECK(json_get_bool(where, s->json, "add_prefix_space", &s->prefix_space));
    CHECK(json_get_bool(where, s->json, "use_regex", &use_regex));
    if (use_regex)
        st = pattern_new(where, name, GPT2_EXPRESSION, strlen(GPT2_EXPRESSION), false, &s->pattern);
out:
    return st;
}

static enum status parse_digits(const char *where, const char *name, struct step *s)
{
    bool individual = false;
    enum status st = json_get_bool(where, s->json, "individual_digits", &individual);
    (void)name;
    s->behavior = individual ? ISOLATED : CONTIGUOUS;
    return st;
}

static const struct step_type types[] = {
    {"Split", SPLIT, 0, parse_split},
    {"ByteLevel", BYTE_LEVEL, 0, parse_byte_level},
    {"Metaspace", METASPACE, 0, step_parse_metaspace},
    {"Digits", DIGITS, 0, parse_digits},
    {NULL, 0, 0, NULL},
};

enum status pretokenizer_parse(const char *where, const json_t *section, struct step_list *ret)
{
    return step_list_parse(where, "pre_tokenizer", "pretokenizers", section, types, ret);
}

// ---- splitting ---------------------------------------------------------------------------------

// Joins the pieces of a word, matches and what lies between, as the behaviour says; those that are
// left over are the words.
static void join_pieces(struct piece_list *list, enum behavior behavior, bool invert)
{
    struct text_piece *items = list->items;
    size_t n = 0, top = list->n;
    bool previous = false;
    if (behavior == MERGED_WITH_NEXT) { // the same as with the previous one, from the right
        for (size_t i = list->n; i-- > 0;) {
            struct text_piece x = items[i];
            bool match = (x.id != 0) != invert;
            if (match && !previous && top < list->n)
                items[top] = (struct text_piece){x.start, x.len + items[top].len, x.id};
            else
                items[--top] = x;
            previous = match;
        }
        n = list->n - top;
        memmove(items, items + top, n * sizeof(*items));
    } else {
        for (size_t i = 0; i < list->n; i++) {
            struct text_piece x = items[i];
            bool match = (x.id != 0) != invert;
            bool join = n > 0 && ((behavior == MERGED_WITH_PREVIOUS && match && !previous) ||
                                  (behavior == CONTIGUOUS && match == previous));
            if (join)
                items[n - 1].len += x.len;
            else if (!(behavior == REMOVED && match))
                items[n++] = x;
            previous = match;
        }
    }
    list->n = n;
}

static enum status put_word(struct words *out, const char *text, size_t len, bool at_start)
{
    size_t start = out->text.len;
    bytes_append(&out->text, text, len);
    enum status st = bytes_status(&out->text);
    return st == ST_OK && len > 0 ? piece_list_push(&out->list, start, len, at_start) : st;
}

// Pieces of a word, joined, as words.
static enum status put_joined(struct words *out, const char *text, bool at_start,
                              struct piece_list *pieces, enum behavior behavior, bool invert)
{
    enum status st = ST_OK;
    join_pieces(pieces, behavior, invert);
    for (size_t i = 0; st == ST_OK && i < pieces->n; i++) {
        const struct text_piece *x = &pieces->items[i];
        st = put_word(out, text + x->start, x->len, at_start && x->start == 0);
    }
    return st;
}

// With no pattern the text is one piece.
static enum status cut(const struct pattern *p, const char *text, size_t len,
                       struct piece_list *pieces)
{
    if (p) return pattern_cut(p, text, len, pieces);
    pieces->n = 0;
    return piece_list_push(pieces, 0, len, 0);
}

static enum status cut_digits(const char *text, size_t len, struct piece_list *pieces)
{
    enum status st = ST_OK;
    pieces->n = 0;
    for (size_t start = 0, at = 0; st == ST_OK && at < len; start = at) {
        bool digit = unicode_is(utf8_next(text, len, &at), STR_NUMERIC);
        if (!digit && pieces->n > 0 && !pieces->items[pieces->n - 1].id)
            pieces->items[pieces->n - 1].len += at - start;
        else
            st = piece_list_push(pieces, start, at - start, digit);
    }
    return st;
}

// Cuts a word (with the expression, if there is one), and writes each part in the alphabet.
static enum status byte_level(const struct step *s, const char *text, size_t len, bool at_start,
                              struct piece_list *pieces, struct bytes *work, struct words *out)
{
    if (s->prefix_space && text[0] != ' ') {
        bytes_clear(work);
        bytes_puts(work, " ");
        bytes_append(work, text, len);
        text = bytes_text(work);
        len++;
    }
    enum status st = bytes_status(work);
    if (st == ST_OK) st = cut(s->pattern, text, len, pieces);
    for (size_t i = 0; st == ST_OK && i < pieces->n; i++) {
        const struct text_piece *word = &pieces->items[i];
        size_t start = out->text.len;
        for (size_t k = 0; k < word->len; k++) {
            char c[4];
            int n = byte_level_char((unsigned char)text[word->start + k], c);
            bytes_append(&out->text, c, (size_t)n);
        }
        st = bytes_status(&out->text);
        if (st == ST_OK && word->len > 0)
            st = piece_list_push(&out->list, start, out->text.len - start,
                                 at_start && word->start == 0);
    }
    return st;
}

// Spaces become the replacement character; one is put in front unless the word starts with it.
static enum status metaspace(const struct step *s, const char *text, size_t len, bool at_start,
                             struct piece_list *pieces, struct bytes *work, struct words *out)
{
    size_t mark = strlen(s->character);
    bool starts = text[0] == ' ' || (len >= mark && memcmp(text, s->character, mark) == 0);
    bytes_clear(work);
    if (!starts && (s->scheme == PREPEND_ALWAYS || (s->scheme == PREPEND_FIRST && at_start)))
        bytes_puts(work, s->character);
    for (size_t i = 0; i < len; i++)
        bytes_append(work, text[i] == ' ' ? s->character : text + i, text[i] == ' ' ? mark : 1);
    enum status st = bytes_status(work);
    if (st == ST_OK) st = cut(s->split ? s->pattern : NULL, bytes_text(work), work->len, pieces);
    return st == ST_OK
               ? put_joined(out, bytes_text(work), at_start, pieces, MERGED_WITH_NEXT, false)
               : st;
}

static enum status apply_step(const struct step *s, const struct words *in, struct words *out)
{
    struct piece_list pieces = {0};
    struct bytes work = BYTES_INIT;
    enum status st = ST_OK;
    for (size_t i = 0; st == ST_OK && i < in->list.n; i++) {
        const struct text_piece *word = &in->list.items[i];
        const char *text = in->text.data + word->start;
        if (s->type->kind == BYTE_LEVEL) {
            st = byte_level(s, text, word->len, word->id, &pieces, &work, out);
        } else if (s->type->kind == METASPACE) {
            st = metaspace(s, text, word->len, word->id, &pieces, &work, out);
        } else {
            st = s->type->kind == DIGITS ? cut_digits(text, word->len, &pieces)
                                         : cut(s->pattern, text, word->len, &pieces);
            if (st == ST_OK)
                st =
                    put_joined(out, text, word->id, &pieces, (enum behavior)s->behavior, s->invert);
        }
    }
    piece_list_release(&pieces);
    bytes_release(&work);
    return st;
}

enum status pretokenizer_apply(const struct step_list *p, const char *text, size_t len,
                               bool at_start, struct bytes *ret_text, struct piece_list *ret_words)
{
    struct words in = {BYTES_INIT, {0}}, out = {*ret_text, *ret_words};
    bytes_clear(&out.text);
    out.list.n = 0;
    enum status st = put_word(&out, text, len, at_start);
    for (size_t i = 0; st == ST_OK && i < p->n; i++) {
        struct words swap = in;
        in = out;
        out = swap;
        bytes_clear(&out.text);
        out.list.n = 0;
        st = apply_step(&p->items[i], &in, &out);
    }
    *ret_text = out.text;
    *ret_words = out.list;
    bytes_release(&in.text);
    piece_list_release(&in.list);
    return st;
}
