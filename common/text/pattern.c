/* pattern.c: literal and regular-expression patterns of tokenizer.json.
 *
 * The expressions are written for Oniguruma (Ruby syntax), which the tokenizers library uses; here
 * PCRE2 runs them. translate() rewrites the few constructs that mean something else there:
 * \s, \S and \w (other character sets), \h, (?m), \uHHHH, and it refuses what PCRE2 would silently
 * read in another way (sets within sets, && in a set). The result is compiled once, with JIT;
 * matching allocates its own match data, so that any thread may use a pattern. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

// Unicode's White_Space; PCRE2's own \s also has U+180E.
#define SPACE_SET                                                                                  \
    "\\t-\\r\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}"   \
    "\\x{3000}"
// Oniguruma's word characters: Alphabetic, marks, decimal digits, connector punctuation.
#define WORD_SET                                                                                   \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24B6}-\\x{24E9}\\x{1F130}-\\x{1F149}"                    \
    "\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}"
#define HEX_SET "0-9A-Fa-f"

#define MATCH_LIMIT 200000000u // backtracking steps of one match; far above any real text's

struct pattern {
    pcre2_code *code;
    struct bytes name; // file and field, for errors while matching
};

struct translation {
    const char *where, *field, *expression;
    struct bytes out;
};

static enum status refuse(const struct translation *t, const char *what)
{
    return status_fail(ST_UNSUPPORTED, "%s: %s: regular expression \"%s\": %s is not supported",
                       t->where, t->field, CUT(t->expression, 200), what);
}

// The escape at s[0] == '\\'; *used is its length.
static enum status translate_escape(struct translation *t, const char *s, size_t len, bool in_set,
                                    size_t *used)
{
    static const struct {
        char letter;              // of the set; its capital is the others
        const char *set, *in_set; // in_set: what is refused
    } sets[] = {{'s', SPACE_SET, "\\S within a set"},
                {'w', WORD_SET, "\\W within a set"},
                {'h', HEX_SET, "\\H within a set"}};
    if (len < 2)
        return status_fail(ST_FORMAT, "%s: %s: regular expression \"%s\" ends in a backslash",
                           t->where, t->field, CUT(t->expression, 200));
    *used = 2;
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        bool negated = s[1] == sets[i].letter - 'a' + 'A';
        if (s[1] != sets[i].letter && !negated) continue;
        if (in_set && negated) return refuse(t, sets[i].in_set);
        bytes_printf(&t->out, in_set ? "%s%s" : "[%s%s]", negated ? "^" : "", sets[i].set);
        return ST_OK;
    }
    if (s[1] == 'u') {
        if (len < 6) return refuse(t, "a \\u without four digits");
        bytes_printf(&t->out, "\\x{%.4s}", s + 2);
        *used = 6;
    } else if (s[1] == 'Q' || s[1] == 'E') { // quoting in PCRE2, plain letters in Oniguruma
        bytes_append(&t->out, s + 1, 1);
    } else {
        bytes_append(&t->out, s, 2);
    }
    return ST_OK;
}

// "(?imx-imx" up to ':' or ')': Ruby's m (dot matches newline) is PCRE2's s.
static size_t translate_flags(struct translation *t, const char *s, size_t len)
{
    size_t n = 2;
    while (n < len && strchr("imx-", s[n])) n++;
    if (n == 2 || n == len || (s[n] != ':' && s[n] != ')')) return 0;
    for (size_t i = 0; i < n; i++) bytes_append(&t->out, s[i] == 'm' ? "s" : &s[i], 1);
    return n;
}

static enum status translate(struct translation *t, const char *s, size_t len)
{
    bool in_set = false;
    size_t set_start = 0; // where the set's first member may stand
    for (size_t i = 0; i < len;) {
        size_t used = 1;
        if (s[i] == '\\') {
            enum status st = translate_escape(t, s + i, len - i, in_set, &used);
            if (st != ST_OK) return st;
        } else if (in_set) {
            if (s[i] == '[') return refuse(t, "a set within a set");
            if (s[i] == '&' && i + 1 < len && s[i + 1] == '&') return refuse(t, "&& in a set");
            if (s[i] == ']' && i != set_start) in_set = false;
            bytes_append(&t->out, s + i, 1);
        } else if (s[i] == '[') {
            in_set = true;
            if (i + 1 < len && s[i + 1] == '^') used = 2;
            set_start = i + used;
            bytes_append(&t->out, s + i, used);
        } else {
            size_t flags = 0;
            if (s[i] == '(' && i + 1 < len && s[i + 1] == '?')
                flags = translate_flags(t, s + i, len - i);
            if (flags)
                used = flags;
            else
                bytes_append(&t->out, s + i, 1);
        }
        i += used;
    }
    return bytes_status(&t->out);
}

void pattern_free(struct pattern *p)
{
    if (!p) return;
    pcre2_code_free(p->code);
    bytes_release(&p->name);
    free(p);
}

enum status pattern_new(const char *where, const char *field, const char *text, size_t len,
                        bool literal, struct pattern **ret)
{
    struct translation t = {where, field, text, BYTES_INIT};
    struct pattern *p = calloc(1, sizeof(*p));
    enum status st = ST_OK;
    int error;
    PCRE2_SIZE offset;
    if (!p) FAIL(ST_NO_MEMORY, "%s: %s: out of memory", where, field);
    bytes_printf(&p->name, "%s: %s", where, field);
    CHECK(bytes_status(&p->name));
    if (!literal) CHECK(translate(&t, text, len));
    p->code =
        literal
            ? pcre2_compile((PCRE2_SPTR)text, len, PCRE2_UTF | PCRE2_LITERAL, &error, &offset, NULL)
            : pcre2_compile((PCRE2_SPTR)bytes_text(&t.out), t.out.len,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &offset, NULL);
    if (!p->code) {
        unsigned char words[200] = "";
        pcre2_get_error_message(error, words, sizeof(words));
        FAIL(ST_UNSUPPORTED, "%s: %s: regular expression \"%s\": %s", where, field, CUT(text, 200),
             (const char *)words);
    }
    pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); // without JIT the interpreter does the same
    *ret = TAKE_PTR(p);
out:
    pattern_free(p);
    bytes_release(&t.out);
    return st;
}

enum status pattern_parse(const char *where, const char *field, const json_t *value,
                          struct pattern **ret)
{
    const json_t *regex = json_object_get(value, "Regex"),
                 *text = json_is_string(regex) ? regex : json_object_get(value, "String");
    if (!json_is_string(text))
        return status_fail(ST_FORMAT, "%s: %s is neither {\"String\": ...} nor {\"Regex\": ...}",
                           where, field);
    if (text != regex && json_string_length(text) == 0)
        return status_fail(ST_UNSUPPORTED, "%s: %s is an empty string", where, field);
    return pattern_new(where, field, json_string_value(text), json_string_length(text),
                       text != regex, ret);
}

static int match_at(const struct pattern *p, const char *text, size_t len, size_t at,
                    uint32_t options, pcre2_match_data *match, pcre2_match_context *context)
{
    return pcre2_match(p->code, (PCRE2_SPTR)text, len, at, PCRE2_NO_UTF_CHECK | options, match,
                       context);
}

enum status pattern_cut(const struct pattern *p, const char *text, size_t len,
                        struct piece_list *ret)
{
    enum status st = ST_OK;
    size_t done = 0; // everything before is in *ret
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    pcre2_match_context *context = pcre2_match_context_create(NULL);
    ret->n = 0;
    if (!match || !context) FAIL(ST_NO_MEMORY, "%s: out of memory", bytes_text(&p->name));
    pcre2_set_match_limit(context, MATCH_LIMIT);
    for (size_t at = 0; at <= len && len > 0;) {
        int rc = match_at(p, text, len, at, 0, match, context);
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT) // the interpreter keeps its state on the heap
            rc = match_at(p, text, len, at, PCRE2_NO_JIT, match, context);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0) {
            unsigned char words[200] = "";
            pcre2_get_error_message(rc, words, sizeof(words));
            FAIL(ST_UNSUPPORTED, "%s: cannot match this text: %s", bytes_text(&p->name),
                 (const char *)words);
        }
        const PCRE2_SIZE *found = pcre2_get_ovector_pointer(match);
        if (found[1] < found[0]) break; // \K in a look-ahead; no tokenizer has it
        if (found[0] > done) CHECK(piece_list_push(ret, done, found[0] - done, 0));
        CHECK(piece_list_push(ret, found[0], found[1] - found[0], 1));
        done = at = found[1];
        if (found[0] == found[1]) { // empty: go on one character further
            if (at == len) break;
            utf8_next(text, len, &at);
        }
    }
    if (done < len) st = piece_list_push(ret, done, len - done, 0);
out:
    pcre2_match_context_free(context);
    pcre2_match_data_free(match);
    return st;
}

enum status pattern_replace(const struct pattern *p, const char *text, size_t len, const char *with,
                            size_t with_len, struct bytes *ret)
{
    struct piece_list pieces = {0};
    enum status st = pattern_cut(p, text, len, &pieces);
    for (size_t i = 0; st == ST_OK && i < pieces.n; i++) {
        const struct text_piece *piece = &pieces.items[i];
        bytes_append(ret, piece->id ? with : text + piece->start,
                     piece->id ? with_len : piece->len);
    }
    piece_list_release(&pieces);
    return st == ST_OK ? bytes_status(ret) : st;
}
