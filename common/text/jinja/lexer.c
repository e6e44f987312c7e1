/* lexer.c: text to tokens, by the rules of Jinja's own lexer. Outside of tags it looks for the next
 * "{{", "{%" or "{#"; what stands before is data, cut as the sign behind the brackets says ("-":
 * all white space, "+": none, neither: blanks between a line's start and a block). Behind a block
 * or comment one newline goes (trim_blocks). Inside of tags an end counts only where all brackets
 * are closed. Any thread, each on its own run. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/syntax.h"
#include "common/base/unicode.h"
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>

#define MAX_BRACKETS 200

static const char decimal[] = "0123456789", hex[] = "0123456789abcdefABCDEF", octal[] = "01234567";

struct lexer {
    struct render *run;
    const char *text;
    size_t len, at;
    size_t counted; // run.at is this place
    struct token *tokens;
    size_t n, cap;
    bool line_starting; // what was read last ended on a newline
};

const char *token_words(enum token_type type)
{
    static const char *const words[] = {
#define X(name, text) text,
        TOKEN_TABLE(X)
#undef X
    };
    static const char characters[] = "+\0-\0/\0*\0%\0~\0[\0]\0(\0)\0{\0}\0>\0<\0=\0.\0:\0|\0,\0;";
    if (type > T_CHARACTERS) return words[type - T_CHARACTERS - 1];
    const char *found = type ? memchr(characters, (int)type, sizeof characters) : NULL;
    return found ? found : "end of template";
}

// Line and column of `at`, which is not before the last one asked for.
static void find_place(struct lexer *l, size_t at)
{
    struct position *place = &l->run->at;
    for (; l->counted < at; l->counted++) {
        if (l->text[l->counted] == '\n')
            *place = (struct position){place->line + 1, 1};
        else
            place->column += ((unsigned char)l->text[l->counted + 1] & 0xc0) != 0x80;
    }
}

#define fail_here(l, at, ...) (find_place(l, at), fail((l)->run, __VA_ARGS__))

static void add(struct lexer *l, enum token_type type, size_t at, struct value value)
{
    l->tokens = run_room(l->run, l->tokens, l->n, &l->cap, sizeof *l->tokens);
    find_place(l, at);
    l->tokens[l->n++] = (struct token){type, l->run->at, value};
}

static void add_text(struct lexer *l, enum token_type type, size_t start, size_t end)
{
    if (end > start) add(l, type, start, string_new(l->run, l->text + start, end - start, false));
}

static bool here(const struct lexer *l, size_t at, const char *mark)
{
    size_t n = strlen(mark);
    return l->len - at >= n && memcmp(l->text + at, mark, n) == 0;
}

static size_t skip_spaces(const struct lexer *l, size_t at)
{
    return unicode_skip(l->text, at, l->len, STR_SPACE);
}

// ---- white space around tags --------------------------------------------------------------------

// End of the data from `start` to a tag at `end`, whose sign is `sign` (0: none).
static size_t cut_data(const struct lexer *l, size_t start, size_t end, char sign, bool lstrip)
{
    if (sign == '-') return unicode_skip_back(l->text, start, end, STR_SPACE);
    if (sign == '+' || !lstrip) return end;
    size_t line = end;
    while (line > start && l->text[line - 1] != '\n') line--;
    if (line == start && !l->line_starting) return end;
    return skip_spaces(l, line) >= end ? line : end;
}

static char sign_at(const struct lexer *l, size_t at)
{
    return at < l->len && (l->text[at] == '-' || l->text[at] == '+') ? l->text[at] : 0;
}

// Behind the end of a tag at `at` ("%}", "-%}", "+%}"): the place to go on, 0 if there is none.
static size_t after_end(const struct lexer *l, size_t at, const char *end, bool plus, bool trim)
{
    if (here(l, at, end)) {
        at += 2;
        return trim && at < l->len && l->text[at] == '\n' ? at + 1 : at;
    }
    char sign = sign_at(l, at);
    if (!sign || !here(l, at + 1, end)) return 0;
    return sign == '-' ? skip_spaces(l, at + 3) : plus ? at + 3 : 0;
}

static void go(struct lexer *l, size_t at)
{
    if (at > l->at) l->line_starting = l->text[at - 1] == '\n';
    l->at = at;
}

// ---- comments and raw blocks --------------------------------------------------------------------

// Behind a tag of that one word at a "{%"; 0: it is another.
static size_t after_word(const struct lexer *l, size_t tag, const char *word, bool plus, bool trim)
{
    size_t at = skip_spaces(l, tag + 2 + (sign_at(l, tag + 2) != 0));
    if (!here(l, tag, "{%") || !here(l, at, word)) return 0;
    return after_end(l, skip_spaces(l, at + strlen(word)), "%}", plus, trim);
}

// To behind the end of a comment or, `raw`, of a raw block, whose text is data.
static void read_to_end(struct lexer *l, size_t tag, bool raw)
{
    size_t start = l->at;
    for (size_t at = start; at < l->len; at++) {
        size_t end =
            raw ? after_word(l, at, "endraw", true, true) : after_end(l, at, "#}", true, true);
        if (!end) continue;
        if (raw) add_text(l, T_DATA, start, cut_data(l, start, at, sign_at(l, at + 2), true));
        go(l, end);
        return;
    }
    if (start < l->len) // as Jinja has it
        fail_here(l, tag, "Missing end of %s", raw ? "raw directive" : "comment tag");
}

// ---- numbers and strings, as Python's literals --------------------------------------------------

// Behind digits of a set with single "_" between them, and before them where that is allowed.
static size_t digits(const char *s, size_t at, const char *set, bool leading_underscore)
{
    for (size_t end = at, next;; end = next + 1) {
        next = end + (s[end] == '_' && (end > at || leading_underscore));
        if (!s[next] || !strchr(set, s[next])) return end;
    }
}

// Behind the fraction and the exponent that may follow whole digits.
static size_t float_end(const char *s, size_t at)
{
    size_t more = s[at] == '.' ? digits(s, at + 1, decimal, false) : 0;
    if (more > at + 1) at = more;
    if ((s[at] | 0x20) != 'e') return at;
    size_t sign = at + 1 + (s[at + 1] == '-' || s[at + 1] == '+');
    more = digits(s, sign, decimal, false);
    return more > sign ? more : at;
}

static void read_number(struct lexer *l)
{
    char plain[400];
    const char *s = l->text;
    size_t start = l->at, n = 0, from = start + 2;
    const char kind = s[start] == '0' ? (char)(s[start + 1] | 0x20) : 0;
    int base = kind == 'b' ? 2 : kind == 'o' ? 8 : kind == 'x' ? 16 : 10;
    size_t end = digits(s, from, base == 2 ? "01" : base == 8 ? octal : hex, true);
    bool real = false;
    if (base == 10 || end == from) {
        base = 10;
        from = start;
        end = digits(s, start, decimal, false);
        bool after_dot = start > 0 && s[start - 1] == '.'; // of a.0.5, which is no float
        size_t more = after_dot ? end : float_end(s, end);
        real = more > end;
        end = real ? more : s[start] == '0' ? digits(s, start, "0", false) : end;
    }
    for (size_t i = from; i < end && n + 1 < sizeof plain; i++)
        if (s[i] != '_') plain[n++] = s[i];
    plain[n] = 0;
    errno = 0;
    struct value v =
        real ? value_float(strtod(plain, NULL)) : value_int(strtoll(plain, NULL, base));
    if (n + 1 >= sizeof plain) fail_here(l, start, "a number of too many digits");
    if (!real && errno != 0) fail_here(l, start, "a whole number beyond 64 bits is not supported");
    go(l, end);
    add(l, real ? T_FLOAT : T_INTEGER, start, v);
}

// Writes what stands behind a backslash at *at, in the string literal from l->at to `end`, to `to`
// (at most four bytes, returned how many), and moves *at beyond it.
static size_t unescape(struct lexer *l, size_t end, size_t *at, char *to)
{
    static const char from[] = "\\'\"abfnrtv", plain[] = "\\'\"\a\b\f\n\r\t\v";
    char c = l->text[(*at)++], number[9] = "";
    const char *known = c ? strchr(from, c) : NULL;
    size_t wide = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0, n = 0;
    if (c == '\n') return 0;
    if (c == 'N')
        fail_here(l, l->at, "characters by name (\\N{...}) are not supported; write \\uXXXX");
    if (known || (!wide && (c < '0' || c > '7'))) { // of an unknown one the backslash stays
        *to = known ? plain[known - from] : '\\';
        *at -= !known;
        return 1;
    }
    *at -= !wide;
    const bool whole = end - *at >= wide;
    const char *set = wide ? hex : octal;
    while (n < (wide ? wide : 3) && *at < end && l->text[*at] && strchr(set, l->text[*at]))
        number[n++] = l->text[(*at)++];
    unsigned long code = strtoul(number, NULL, wide ? 16 : 8);
    if (whole && (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)))
        fail_here(l, l->at, "an escape that is no Unicode character");
    if (n < wide) fail_here(l, l->at, "a truncated \\x, \\u or \\U escape");
    return (size_t)utf8_encode((uint32_t)code, to);
}

static void read_string(struct lexer *l)
{
    size_t start = l->at, end = start + 1, n = 0;
    for (; end < l->len && l->text[end] != l->text[start]; end++) end += l->text[end] == '\\';
    if (end >= l->len) fail_here(l, start, "this string has no end");
    // no escape is shorter than what it stands for
    char *plain = run_alloc(l->run, end - start + 3, 1);
    for (size_t at = start + 1; at < end;) {
        char c = l->text[at++];
        if (c == '\\')
            n += unescape(l, end, &at, plain + n);
        else
            plain[n++] = c;
    }
    go(l, end + 1);
    add(l, T_STRING, start, string_new(l->run, plain, n, false));
}

// ---- the inside of a tag ------------------------------------------------------------------------

static size_t name_end(const struct lexer *l, size_t at)
{
    for (size_t next = at; at < l->len; at = next)
        if (!unicode_is(utf8_next(l->text, l->len, &next), STR_NAME_PART)) break;
    return at;
}

static void read_operator(struct lexer *l, char *open, int *n_open)
{
    static const char pairs[] = "{}()[]";
    size_t start = l->at;
    unsigned char c = (unsigned char)l->text[start];
    enum token_type type = c;
    for (int t = T_FLOORDIV; t <= T_LE; t++)
        if (here(l, start, token_words(t))) type = t;
    if (type == c && token_words(c)[0] != (char)c)
        fail_here(l, start, "unexpected char '%.*s'",
                  utf8_sequence(l->text + start, l->len - start), l->text + start);
    const char *bracket = strchr(pairs, c);
    if (bracket && (bracket - pairs) % 2 == 0) {
        if (*n_open == MAX_BRACKETS) fail_here(l, start, "brackets are nested too deeply");
        open[(*n_open)++] = bracket[1];
    } else if (bracket) {
        char wanted = *n_open > 0 ? open[--*n_open] : 0;
        if (!wanted) fail_here(l, start, "unexpected '%c'", c);
        if (wanted != (char)c) fail_here(l, start, "unexpected '%c', expected '%c'", c, wanted);
    }
    go(l, start + strlen(token_words(type)));
    add(l, type, start, MISSING);
}

// From behind "{{" or "{%" to behind its end. One that has none is left to the parser to notice.
static void read_tag(struct lexer *l, bool block)
{
    char open[MAX_BRACKETS];
    int n_open = 0;
    while (l->at < l->len) {
        size_t start = l->at, end = 0;
        if (n_open == 0) end = after_end(l, start, block ? "%}" : "}}", block, block);
        if (end) {
            go(l, end);
            add(l, block ? T_BLOCK_END : T_PRINT_END, start, MISSING);
            return;
        }
        char c = l->text[start];
        if (skip_spaces(l, start) > start) {
            go(l, skip_spaces(l, start));
        } else if (isdigit((unsigned char)c)) {
            read_number(l);
        } else if (c == '\'' || c == '"') {
            read_string(l);
        } else if (name_end(l, start) > start) {
            go(l, name_end(l, start));
            add_text(l, T_NAME, start, l->at);
        } else {
            read_operator(l, open, &n_open);
        }
    }
}

// ---- all of it ----------------------------------------------------------------------------------

// Data up to the next "{{", "{%" or "{#", or to the end, and that tag.
static void read_piece(struct lexer *l)
{
    size_t start = l->at, tag = start;
    while (tag < l->len && !here(l, tag, "{{") && !here(l, tag, "{%") && !here(l, tag, "{#")) {
        const char *brace = memchr(l->text + tag + 1, '{', l->len - tag - 1);
        tag = brace ? (size_t)(brace - l->text) : l->len;
    }
    if (tag == l->len) {
        l->at = l->len;
        add_text(l, T_DATA, start, tag);
        return;
    }
    char kind = l->text[tag + 1], sign = sign_at(l, tag + 2);
    add_text(l, T_DATA, start, cut_data(l, start, tag, sign, kind != '{'));
    size_t raw = after_word(l, tag, "raw", false, false);
    go(l, raw ? raw : tag + 2 + (sign != 0));
    if (raw || kind == '#') {
        read_to_end(l, tag, raw);
    } else {
        add(l, kind == '%' ? T_BLOCK_BEGIN : T_PRINT_BEGIN, tag, MISSING);
        read_tag(l, kind == '%');
    }
}

// A copy with "\n" for every newline, and without the one at the very end.
static void normalise(struct lexer *l, const char *text, size_t len)
{
    char *copy = run_alloc(l->run, len + 1, 1);
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        if (text[i] == '\r' && i + 1 < len && text[i + 1] == '\n') continue;
        copy[n++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (n > 0 && copy[n - 1] == '\n') n--;
    l->text = copy;
    l->len = n;
}

struct token *lexer_run(struct render *r, const char *text, size_t len)
{
    struct lexer l = {.run = r, .line_starting = true};
    r->at = (struct position){1, 1};
    normalise(&l, text, len);
    size_t valid = utf8_valid(l.text, l.len);
    if (valid < l.len) fail_here(&l, valid, "the text is not UTF-8");
    while (l.at < l.len) read_piece(&l);
    add(&l, T_END, l.len, MISSING);
    return l.tokens;
}
