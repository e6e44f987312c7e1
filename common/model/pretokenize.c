/* pretokenize.c: a flat list of stages; each takes the words of the one before and gives more,
 * smaller ones. The semantics are those of the tokenizers library: a stage sees one word at a time,
 * so that an expression's look-ahead ends with its word. */
#include "common/model/pretokenize.h"
#include "common/base/json.h"
#include "common/model/pattern.h"
#include "common/model/unicode.h"
#include <stdlib.h>
#include <string.h>

#define GPT2_EXPRESSION                                                                            \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

enum prepend_scheme { PREPEND_ALWAYS, PREPEND_FIRST, PREPEND_NEVER };
enum stage_kind { STAGE_SPLIT, STAGE_DIGITS, STAGE_BYTE_LEVEL, STAGE_METASPACE };
enum behavior { REMOVED, ISOLATED, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT, CONTIGUOUS };

struct stage {
    enum stage_kind kind;
    struct pattern *pattern;    // SPLIT; BYTE_LEVEL with use_regex; METASPACE: its replacement
    enum behavior behavior;     // SPLIT, DIGITS
    bool invert;                // SPLIT: what does not match counts as the match
    bool prefix_space;          // BYTE_LEVEL
    enum prepend_scheme scheme; // METASPACE
    bool split;                 // METASPACE: cut before each replacement
    char replacement[5];        // METASPACE
};

struct pretokenizer {
    struct stage *stages;
    size_t n;
};

// Words while they are made: spans of `text`; a span's id is 1 where it is the start of the input.
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

void pretokenizer_free(struct pretokenizer *p)
{
    if (!p) return;
    for (size_t i = 0; i < p->n; i++) pattern_free(p->stages[i].pattern);
    free(p->stages);
    free(p);
}

static struct stage *new_stage(struct pretokenizer *p)
{
    struct stage *stages = realloc(p->stages, (p->n + 1) * sizeof(*stages));
    if (!stages) return NULL;
    p->stages = stages;
    stages[p->n] = (struct stage){.behavior = ISOLATED};
    return &stages[p->n++];
}

static enum status parse_split(const char *where, const json_t *section, struct stage *s)
{
    static const char *const names[] = {
        [REMOVED] = "Removed",
        [ISOLATED] = "Isolated",
        [MERGED_WITH_PREVIOUS] = "MergedWithPrevious",
        [MERGED_WITH_NEXT] = "MergedWithNext",
        [CONTIGUOUS] = "Contiguous",
    };
    const char *name = "";
    int behavior = -1;
    enum status st;
    s->kind = STAGE_SPLIT;
    CHECK(pattern_parse(where, "pre_tokenizer.pattern", json_object_get(section, "pattern"),
                        &s->pattern));
    CHECK(json_get_bool(where, section, "invert", &s->invert));
    CHECK(json_get_string(where, section, "behavior", &name));
    for (int i = 0; i <= CONTIGUOUS; i++)
        if (strcmp(name, names[i]) == 0) behavior = i;
    if (behavior < 0)
        return status_fail(ST_UNSUPPORTED, "%s: pre_tokenizer.behavior \"%s\" is not supported",
                           where, name);
    s->behavior = (enum behavior)behavior;
out:
    return st;
}

static enum status parse_metaspace(const char *where, const json_t *section, struct stage *s)
{
    const char *replacement = "\xe2\x96\x81", *scheme = "always";
    bool prefix = true;
    enum status st;
    s->kind = STAGE_METASPACE;
    s->split = true;
    CHECK(json_get_string(where, section, "replacement", &replacement));
    CHECK(json_get_bool(where, section, "split", &s->split));
    CHECK(json_get_bool(where, section, "add_prefix_space", &prefix)); // how older files say it
    if (!prefix) scheme = "never";
    CHECK(json_get_string(where, section, "prepend_scheme", &scheme));
    size_t len = strlen(replacement);
    if (len == 0 || utf8_sequence(replacement, len) != (int)len)
        return status_fail(ST_FORMAT, "%s: pre_tokenizer.replacement \"%s\" is not one character",
                           where, replacement);
    memcpy(s->replacement, replacement, len + 1);
    if (strcmp(scheme, "always") == 0)
        s->scheme = PREPEND_ALWAYS;
    else if (strcmp(scheme, "first") == 0)
        s->scheme = PREPEND_FIRST;
    else if (strcmp(scheme, "never") == 0)
        s->scheme = PREPEND_NEVER;
    else
        return status_fail(ST_UNSUPPORTED,
                           "%s: pre_tokenizer.prepend_scheme \"%s\" is not supported", where,
                           scheme);
    json_t *literal = json_pack("{s:s}", "String", replacement);
    st = pattern_parse(where, "pre_tokenizer.replacement", literal, &s->pattern);
    json_decref(literal);
out:
    return st;
}

static enum status parse_byte_level(const char *where, const json_t *section, struct stage *s)
{
    bool use_regex = true;
    enum status st;
    s->kind = STAGE_BYTE_LEVEL;
    s->prefix_space = true;
    CHECK(json_get_bool(where, section, "add_prefix_space", &s->prefix_space));
    CHECK(json_get_bool(where, section, "use_regex", &use_regex));
    if (use_regex)
        st = pattern_regex(where, "pre_tokenizer", GPT2_EXPRESSION, strlen(GPT2_EXPRESSION),
                           &s->pattern);
out:
    return st;
}

static enum status parse_section(const char *where, const json_t *section, int depth,
                                 struct pretokenizer *p)
{
    const json_t *type = json_object_get(section, "type");
    if (!json_is_string(type))
        return status_fail(ST_FORMAT, "%s: pre_tokenizer.type is not a string", where);
    const char *name = json_string_value(type);
    if (strcmp(name, "Sequence") == 0) {
        const json_t *parts = json_object_get(section, "pretokenizers");
        if (!json_is_array(parts) || depth > 8)
            return status_fail(ST_FORMAT, "%s: pre_tokenizer.pretokenizers is not an array", where);
        for (size_t i = 0; i < json_array_size(parts); i++) {
            enum status st = parse_section(where, json_array_get(parts, i), depth + 1, p);
            if (st != ST_OK) return st;
        }
        return ST_OK;
    }
    struct stage *s = new_stage(p);
    if (!s) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    if (strcmp(name, "Split") == 0) return parse_split(where, section, s);
    if (strcmp(name, "ByteLevel") == 0) return parse_byte_level(where, section, s);
    if (strcmp(name, "Metaspace") == 0) return parse_metaspace(where, section, s);
    if (strcmp(name, "Digits") == 0) {
        bool individual = false;
        enum status st = json_get_bool(where, section, "individual_digits", &individual);
        s->kind = STAGE_DIGITS;
        s->behavior = individual ? ISOLATED : CONTIGUOUS;
        return st;
    }
    return status_fail(ST_UNSUPPORTED, "%s: pre_tokenizer.type \"%s\" is not supported", where,
                       name);
}

enum status pretokenizer_parse(const char *where, const json_t *section, struct pretokenizer **ret)
{
    struct pretokenizer *p = calloc(1, sizeof(*p));
    if (!p) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    enum status st = ST_OK;
    if (section && !json_is_null(section)) st = parse_section(where, section, 0, p);
    if (st != ST_OK)
        pretokenizer_free(p);
    else
        *ret = p;
    return st;
}

// ---- splitting ---------------------------------------------------------------------------------

// A stretch of a word: pattern matches and what lies between them, in order.
struct stretch {
    size_t start, end;
    bool match;
};

struct stretches {
    struct stretch *items;
    size_t n;
};

// Every byte of the word, as alternating stretches.
static enum status stretches_of(const struct span_list *found, size_t len, bool invert,
                                struct stretches *ret)
{
    ret->items = malloc((2 * found->n + 1) * sizeof(*ret->items));
    if (!ret->items) return status_fail(ST_NO_MEMORY, "out of memory for %zu words", found->n);
    size_t at = 0, n = 0;
    for (size_t i = 0; i < found->n; i++) {
        struct span s = found->items[i];
        if (at < s.start) ret->items[n++] = (struct stretch){at, s.start, invert};
        ret->items[n++] = (struct stretch){s.start, s.end, !invert};
        at = s.end;
    }
    if (at < len) ret->items[n++] = (struct stretch){at, len, invert};
    ret->n = n;
    return ST_OK;
}

// Joins stretches as the behaviour says; those left over are the words.
static void join_stretches(struct stretches *s, enum behavior behavior)
{
    size_t n = 0;
    bool previous = false;
    if (behavior == MERGED_WITH_NEXT) { // the same as with the previous one, from the right
        size_t top = s->n;
        for (size_t i = s->n; i-- > 0;) {
            struct stretch x = s->items[i];
            if (x.match && !previous && top < s->n)
                s->items[top].start = x.start;
            else
                s->items[--top] = x;
            previous = x.match;
        }
        n = s->n - top;
        memmove(s->items, s->items + top, n * sizeof(*s->items));
    } else {
        for (size_t i = 0; i < s->n; i++) {
            struct stretch x = s->items[i];
            bool join = n > 0 && ((behavior == MERGED_WITH_PREVIOUS && x.match && !previous) ||
                                  (behavior == CONTIGUOUS && x.match == previous));
            if (join)
                s->items[n - 1].end = x.end;
            else if (!(behavior == REMOVED && x.match))
                s->items[n++] = x;
            previous = x.match;
        }
    }
    s->n = n;
}

static bool put_word(struct words *out, const char *text, size_t len, bool at_start)
{
    if (len == 0) return true;
    size_t start = out->text.len;
    bytes_append(&out->text, text, len);
    return !out->text.failed && piece_list_push(&out->list, start, len, at_start);
}

static enum status put_stretches(struct words *out, const struct stretches *s, const char *text,
                                 bool at_start)
{
    for (size_t i = 0; i < s->n; i++) {
        struct stretch x = s->items[i];
        if (!put_word(out, text + x.start, x.end - x.start, at_start && x.start == 0))
            return status_fail(ST_NO_MEMORY, "out of memory for words");
    }
    return ST_OK;
}

static enum status split_found(const struct span_list *found, enum behavior behavior, bool invert,
                               const char *text, size_t len, bool at_start, struct words *out)
{
    struct stretches s = {NULL, 0};
    enum status st = stretches_of(found, len, invert, &s);
    if (st == ST_OK) {
        join_stretches(&s, behavior);
        st = put_stretches(out, &s, text, at_start);
    }
    free(s.items);
    return st;
}

static enum status find_digits(const char *text, size_t len, struct span_list *found)
{
    for (size_t i = 0; i < len;) {
        int n = utf8_sequence(text + i, len - i);
        if (n <= 0) return status_fail(ST_INVALID, "text is not UTF-8 at byte %zu", i);
        if (unicode_is_numeric(utf8_decode(text + i, n)) &&
            !span_list_push(found, i, i + (size_t)n))
            return status_fail(ST_NO_MEMORY, "out of memory for words");
        i += (size_t)n;
    }
    return ST_OK;
}

// Cuts a word (with the expression, if there is one), and writes each part in the alphabet.
static enum status byte_level(const struct stage *s, const char *text, size_t len, bool at_start,
                              struct span_list *found, struct bytes *work, struct words *out)
{
    if (s->prefix_space && text[0] != ' ') {
        bytes_clear(work);
        bytes_puts(work, " ");
        bytes_append(work, text, len);
        text = bytes_text(work);
        len++;
    }
    struct words cut = {BYTES_INIT, PIECE_LIST_INIT};
    enum status st = bytes_status(work);
    if (st == ST_OK && s->pattern) st = pattern_find_all(s->pattern, text, len, found);
    if (st == ST_OK) st = split_found(found, ISOLATED, false, text, len, at_start, &cut);
    for (size_t i = 0; st == ST_OK && i < cut.list.n; i++) {
        const struct text_piece *word = &cut.list.items[i];
        size_t start = out->text.len;
        for (size_t k = 0; k < word->len; k++) {
            char c[4];
            int n = byte_level_char((unsigned char)cut.text.data[word->start + k], c);
            bytes_append(&out->text, c, (size_t)n);
        }
        if (out->text.failed ||
            !piece_list_push(&out->list, start, out->text.len - start, word->id))
            st = status_fail(ST_NO_MEMORY, "out of memory for words");
    }
    bytes_release(&cut.text);
    piece_list_release(&cut.list);
    return st;
}

// Spaces become the replacement character; one is put in front unless the word starts with it.
static enum status metaspace(const struct stage *s, const char *text, size_t len, bool at_start,
                             struct span_list *found, struct bytes *work, struct words *out)
{
    size_t mark = strlen(s->replacement);
    struct bytes spaced = BYTES_INIT;
    for (size_t i = 0; i < len; i++)
        bytes_append(&spaced, text[i] == ' ' ? s->replacement : text + i,
                     text[i] == ' ' ? mark : 1);
    bytes_clear(work);
    bool starts = spaced.len >= mark && memcmp(bytes_text(&spaced), s->replacement, mark) == 0;
    if (!starts && (s->scheme == PREPEND_ALWAYS || (s->scheme == PREPEND_FIRST && at_start)))
        bytes_puts(work, s->replacement);
    bytes_append(work, bytes_text(&spaced), spaced.len);
    enum status st = bytes_status(&spaced);
    bytes_release(&spaced);
    if (st == ST_OK) st = bytes_status(work);
    if (st == ST_OK && s->split) st = pattern_find_all(s->pattern, work->data, work->len, found);
    if (st == ST_OK)
        st =
            split_found(found, MERGED_WITH_NEXT, false, bytes_text(work), work->len, at_start, out);
    return st;
}

static enum status apply_stage(const struct stage *s, const struct words *in, struct words *out)
{
    struct span_list found = SPAN_LIST_INIT;
    struct bytes work = BYTES_INIT;
    enum status st = ST_OK;
    for (size_t i = 0; st == ST_OK && i < in->list.n; i++) {
        const struct text_piece *word = &in->list.items[i];
        const char *text = in->text.data + word->start;
        found.n = 0;
        switch (s->kind) {
        case STAGE_SPLIT:
            st = pattern_find_all(s->pattern, text, word->len, &found);
            if (st == ST_OK)
                st = split_found(&found, s->behavior, s->invert, text, word->len, word->id, out);
            break;
        case STAGE_DIGITS:
            st = find_digits(text, word->len, &found);
            if (st == ST_OK)
                st = split_found(&found, s->behavior, false, text, word->len, word->id, out);
            break;
        case STAGE_BYTE_LEVEL:
            st = byte_level(s, text, word->len, word->id, &found, &work, out);
            break;
        case STAGE_METASPACE:
            st = metaspace(s, text, word->len, word->id, &found, &work, out);
            break;
        }
    }
    span_list_release(&found);
    bytes_release(&work);
    return st;
}

enum status pretokenizer_apply(const struct pretokenizer *p, const char *text, size_t len,
                               bool at_start, struct bytes *ret_text, struct piece_list *ret_words)
{
    struct words in = {BYTES_INIT, PIECE_LIST_INIT}, out = {*ret_text, *ret_words};
    enum status st = ST_OK;
    bytes_clear(&out.text);
    out.list.n = 0;
    if (!put_word(&out, text, len, at_start))
        st = status_fail(ST_NO_MEMORY, "out of memory for words");
    for (size_t i = 0; st == ST_OK && i < p->n; i++) {
        struct words swap = in;
        in = out;
        out = swap;
        bytes_clear(&out.text);
        out.list.n = 0;
        st = apply_stage(&p->stages[i], &in, &out);
    }
    *ret_text = out.text;
    *ret_words = out.list;
    bytes_release(&in.text);
    piece_list_release(&in.list);
    return st;
}
