/* lexer.c: text to tokens, by the rules of Jinja's own lexer. Outside of tags it looks for the next
 * "{{", "{%" or "{#"; what stands before is data, cut as the sign behind the brackets says ("-":
 * all white space, "+": none, neither: blanks between a line's start and a block). Behind a block
 * or comment one newline goes (trim_blocks). Inside of tags an end counts only where all brackets
 * are closed. Any thread, each on its own arena. */
#include "common/jinja/lexer.h"
#include "common/base/bytes.h"
#include "common/jinja/text.h"
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_BRACKETS 200

struct lexer {
    struct arena *arena;
    const char *text;
    size_t len, at;
    int line, column;
    size_t counted; // line and column are those of this place
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
    return words[type];
}

enum status place_error(int line, int column, const char *format, ...)
{
    char words[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    return status_fail(ST_FORMAT, "line %d, column %d: %s", line, column, words);
}

// Line and column of a place that is not before the last one asked for.
static void place(struct lexer *l, size_t at, int *ret_line, int *ret_column)
{
    for (; l->counted < at; l->counted++) {
        bool newline = l->text[l->counted] == '\n';
        l->line += newline;
        if (newline)
            l->column = 1;
        else
            l->column += ((unsigned char)l->text[l->counted + 1] & 0xc0) != 0x80;
    }
    *ret_line = l->line;
    *ret_column = l->column;
}

static enum status fail_at(struct lexer *l, size_t at, const char *message)
{
    int line, column;
    place(l, at, &line, &column);
    return place_error(line, column, "%s", message);
}

static enum status add(struct lexer *l, enum token_type type, size_t at, struct value value)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 64;
        struct token *larger = arena_array(l->arena, cap, sizeof *larger);
        if (!larger) return ST_NO_MEMORY;
        if (l->n > 0) memcpy(larger, l->tokens, l->n * sizeof *larger);
        l->tokens = larger;
        l->cap = cap;
    }
    struct token *t = &l->tokens[l->n++];
    t->type = type;
    t->value = value;
    place(l, at, &t->line, &t->column);
    return ST_OK;
}

static enum status add_text(struct lexer *l, enum token_type type, size_t start, size_t end)
{
    struct value text;
    enum status st = string_borrow(l->arena, l->text + start, end - start, &text);
    return st == ST_OK ? add(l, type, start, text) : st;
}

static bool here(const struct lexer *l, size_t at, const char *mark)
{
    size_t n = strlen(mark);
    return l->len - at >= n && memcmp(l->text + at, mark, n) == 0;
}

static size_t skip_spaces(const struct lexer *l, size_t at)
{
    return at + text_leading_spaces(l->text + at, l->len - at);
}

// ---- white space around tags --------------------------------------------------------------------

// End of the data from `start` to a tag at `end`, whose sign is `sign` (0: none).
static size_t cut_data(const struct lexer *l, size_t start, size_t end, char sign, bool lstrip)
{
    if (sign == '-') return start + text_without_trailing_spaces(l->text + start, end - start);
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
    if (sign == '-' && here(l, at + 1, end)) return skip_spaces(l, at + 3);
    if (sign == '+' && plus && here(l, at + 1, end)) return at + 3;
    return 0;
}

static void go(struct lexer *l, size_t at)
{
    if (at > l->at) l->line_starting = l->text[at - 1] == '\n';
    l->at = at;
}

static enum status add_data(struct lexer *l, size_t start, size_t end)
{
    return end > start ? add_text(l, T_DATA, start, end) : ST_OK;
}

// ---- comments and raw blocks --------------------------------------------------------------------

static enum status skip_comment(struct lexer *l, size_t tag)
{
    for (size_t at = l->at; at < l->len; at++) {
        size_t end = after_end(l, at, "#}", true, true);
        if (!end) continue;
        go(l, end);
        return ST_OK;
    }
    if (l->at == l->len) return ST_OK; // as Jinja has it
    return fail_at(l, tag, "Missing end of comment tag");
}

// Behind "{% raw %}" at a "{%"; 0: it is another block.
static size_t raw_begin(const struct lexer *l, size_t tag)
{
    size_t at = tag + 2;
    if (sign_at(l, at)) at++;
    at = skip_spaces(l, at);
    if (!here(l, at, "raw")) return 0;
    return after_end(l, skip_spaces(l, at + 3), "%}", false, false);
}

static enum status read_raw(struct lexer *l, size_t tag)
{
    size_t start = l->at;
    for (size_t at = start; at < l->len; at++) {
        if (!here(l, at, "{%")) continue;
        char sign = sign_at(l, at + 2);
        size_t word = skip_spaces(l, at + 2 + (sign != 0));
        if (!here(l, word, "endraw")) continue;
        size_t end = after_end(l, skip_spaces(l, word + 6), "%}", true, true);
        if (!end) continue;
        enum status st = add_data(l, start, cut_data(l, start, at, sign, true));
        go(l, end);
        return st;
    }
    if (start == l->len) return ST_OK;
    return fail_at(l, tag, "Missing end of raw directive");
}

// ---- numbers ------------------------------------------------------------------------------------

// (\d+_)*\d+, or the digits of another base with one "_" before each
static size_t digits(const struct lexer *l, size_t at, const char *set, bool leading_underscore)
{
    size_t end = at;
    for (;;) {
        size_t next = end;
        if ((end > at || leading_underscore) && next < l->len && l->text[next] == '_') next++;
        if (next >= l->len || !l->text[next] || !strchr(set, l->text[next])) return end;
        end = next + 1;
    }
}

static size_t float_end(const struct lexer *l, size_t at)
{
    if (at > 0 && l->text[at - 1] == '.') return 0;
    size_t end = digits(l, at, "0123456789", false);
    bool fraction = false;
    if (end == at) return 0;
    if (end < l->len && l->text[end] == '.') {
        size_t more = digits(l, end + 1, "0123456789", false);
        fraction = more > end + 1;
        if (fraction) end = more;
    }
    if (end < l->len && (l->text[end] | 0x20) == 'e') {
        size_t sign = end + 1 + (sign_at(l, end + 1) != 0);
        size_t more = digits(l, sign, "0123456789", false);
        if (more > sign) return more;
    }
    return fraction ? end : 0;
}

static size_t integer_end(const struct lexer *l, size_t at, int *ret_base)
{
    static const struct {
        char letter;
        int base;
        const char *set;
    } bases[] = {{'b', 2, "01"}, {'o', 8, "01234567"}, {'x', 16, "0123456789abcdefABCDEF"}};
    *ret_base = 10;
    if (l->text[at] != '0') return digits(l, at, "0123456789", false);
    for (size_t i = 0; at + 1 < l->len && i < 3; i++) {
        if ((l->text[at + 1] | 0x20) != bases[i].letter) continue;
        size_t end = digits(l, at + 2, bases[i].set, true);
        if (end > at + 2) {
            *ret_base = bases[i].base;
            return end;
        }
    }
    return digits(l, at, "0", false);
}

static enum status read_number(struct lexer *l)
{
    char plain[400];
    size_t n = 0, start = l->at, end = float_end(l, start);
    bool real = end > 0;
    int base = 10;
    if (!real) end = integer_end(l, start, &base);
    for (size_t i = start + (base != 10 ? 2 : 0); i < end && n + 1 < sizeof plain; i++)
        if (l->text[i] != '_') plain[n++] = l->text[i];
    plain[n] = 0;
    if (n + 1 >= sizeof plain) return fail_at(l, start, "a number of too many digits");
    go(l, end);
    if (real) return add(l, T_FLOAT, start, value_float(strtod(plain, NULL)));
    errno = 0;
    int64_t integer = strtoll(plain, NULL, base);
    if (errno != 0) return fail_at(l, start, "a whole number beyond 64 bits is not supported");
    return add(l, T_INTEGER, start, value_int(integer));
}

// ---- strings ------------------------------------------------------------------------------------

static int hex_value(const char *s, size_t n, size_t want, uint32_t *ret)
{
    uint32_t x = 0;
    if (n < want) return 0;
    for (size_t i = 0; i < want; i++) {
        if (!isxdigit((unsigned char)s[i])) return 0;
        int c = tolower((unsigned char)s[i]);
        x = x * 16 + (uint32_t)(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    *ret = x;
    return 1;
}

// What stands behind a backslash; *i is moved beyond it. NULL, or what is wrong.
static const char *unescape(const char *s, size_t n, size_t *i, struct bytes *ret)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = s[*i], encoded[4];
    uint32_t code = 0;
    const char *known = strchr(from, c);
    size_t hex = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    (*i)++;
    if (c == '\n') return NULL;
    if (c && known) {
        bytes_append(ret, &to[known - from], 1);
        return NULL;
    }
    if (c == 'N') return "characters by name (\\N{...}) are not supported; write \\uXXXX";
    if (hex > 0) {
        if (!hex_value(s + *i, n - *i, hex, &code)) return "a truncated \\x, \\u or \\U escape";
        *i += hex;
    } else if (c >= '0' && c <= '7') {
        code = (uint32_t)(c - '0');
        for (int k = 0; k < 2 && *i < n && s[*i] >= '0' && s[*i] <= '7'; k++)
            code = code * 8 + (uint32_t)(s[(*i)++] - '0');
    } else {
        bytes_append(ret, "\\", 1);
        (*i)--;
        return NULL;
    }
    if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return "an escape that is no Unicode character";
    bytes_append(ret, encoded, (size_t)utf8_encode(code, encoded));
    return NULL;
}

static enum status read_string(struct lexer *l)
{
    size_t start = l->at, end = start + 1;
    bool escapes = false;
    while (end < l->len && l->text[end] != l->text[start]) {
        escapes |= l->text[end] == '\\';
        end += l->text[end] == '\\' ? 2 : 1;
    }
    if (end >= l->len) return fail_at(l, start, "this string has no end");
    go(l, end + 1);
    if (!escapes) {
        struct value text;
        enum status st = string_borrow(l->arena, l->text + start + 1, end - start - 1, &text);
        return st == ST_OK ? add(l, T_STRING, start, text) : st;
    }
    struct bytes plain = BYTES_INIT;
    const char *s = l->text + start + 1, *wrong = NULL;
    size_t n = end - start - 1;
    for (size_t i = 0; !wrong && i < n;) {
        if (s[i] == '\\') {
            i++;
            wrong = unescape(s, n, &i, &plain);
        } else {
            bytes_append(&plain, &s[i++], 1);
        }
    }
    struct value text;
    enum status st = wrong ? fail_at(l, start, wrong) : bytes_status(&plain);
    if (st == ST_OK) st = string_make(l->arena, bytes_text(&plain), plain.len, &text);
    if (st == ST_OK) st = add(l, T_STRING, start, text);
    bytes_release(&plain);
    return st;
}

// ---- the rest of a tag --------------------------------------------------------------------------

static size_t name_end(const struct lexer *l, size_t at)
{
    while (at < l->len) {
        unsigned char c = (unsigned char)l->text[at];
        int n = c < 0x80 ? 1 : utf8_sequence(l->text + at, l->len - at);
        bool part = c < 0x80 ? isalnum(c) || c == '_'
                             : text_is_identifier(utf8_decode(l->text + at, n), false);
        if (!part) break;
        at += (size_t)n;
    }
    return at;
}

static enum token_type operator_at(const struct lexer *l, size_t *ret_n)
{
    for (*ret_n = 2; *ret_n > 0; --*ret_n)
        for (int type = T_ADD; type <= T_SEMICOLON; type++)
            if (strlen(token_words(type)) == *ret_n && here(l, l->at, token_words(type)))
                return type;
    return T_END;
}

static enum status read_operator(struct lexer *l, char *open, int *n_open)
{
    size_t n, start = l->at;
    enum token_type type = operator_at(l, &n);
    char message[80], c = l->text[start];
    if (type == T_END) {
        snprintf(message, sizeof message, "unexpected char '%.*s'",
                 utf8_sequence(l->text + start, l->len - start), l->text + start);
        return fail_at(l, start, message);
    }
    if (type == T_LBRACE || type == T_LPAREN || type == T_LBRACKET) {
        if (*n_open == MAX_BRACKETS) return fail_at(l, start, "brackets are nested too deeply");
        open[(*n_open)++] = type == T_LBRACE ? '}' : type == T_LPAREN ? ')' : ']';
    }
    if (type == T_RBRACE || type == T_RPAREN || type == T_RBRACKET) {
        if (*n_open == 0)
            snprintf(message, sizeof message, "unexpected '%c'", c);
        else
            snprintf(message, sizeof message, "unexpected '%c', expected '%c'", c,
                     open[*n_open - 1]);
        if (*n_open == 0 || open[*n_open - 1] != c) return fail_at(l, start, message);
        (*n_open)--;
    }
    go(l, start + n);
    return add(l, type, start, MISSING);
}

// From behind "{{" or "{%" to behind its end. One that has none is left to the parser to notice.
static enum status read_tag(struct lexer *l, bool block)
{
    char open[MAX_BRACKETS];
    int n_open = 0;
    while (l->at < l->len) {
        size_t start = l->at, end = 0;
        if (n_open == 0) end = after_end(l, start, block ? "%}" : "}}", block, block);
        if (end) {
            go(l, end);
            return add(l, block ? T_BLOCK_END : T_PRINT_END, start, MISSING);
        }
        enum status st = ST_OK;
        unsigned char c = (unsigned char)l->text[start];
        size_t space = skip_spaces(l, start);
        if (space > start) {
            go(l, space);
        } else if (isdigit(c)) {
            st = read_number(l);
        } else if (name_end(l, start) > start) {
            go(l, name_end(l, start));
            st = add_text(l, T_NAME, start, l->at);
        } else if (c == '\'' || c == '"') {
            st = read_string(l);
        } else {
            st = read_operator(l, open, &n_open);
        }
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

// The next "{{", "{%" or "{#"; len if there is none.
static size_t next_tag(const struct lexer *l)
{
    for (size_t at = l->at; at + 1 < l->len; at++) {
        const char *brace = memchr(l->text + at, '{', l->len - at - 1);
        if (!brace) break;
        at = (size_t)(brace - l->text);
        if (brace[1] == '{' || brace[1] == '%' || brace[1] == '#') return at;
    }
    return l->len;
}

static enum status read_piece(struct lexer *l)
{
    size_t start = l->at, tag = next_tag(l);
    if (tag == l->len) {
        l->at = l->len;
        return add_data(l, start, tag);
    }
    char kind = l->text[tag + 1], sign = sign_at(l, tag + 2);
    enum status st = add_data(l, start, cut_data(l, start, tag, sign, kind != '{'));
    if (st != ST_OK) return st;
    size_t raw = kind == '%' ? raw_begin(l, tag) : 0;
    go(l, raw ? raw : tag + 2 + (sign != 0));
    if (raw) return read_raw(l, tag);
    if (kind == '#') return skip_comment(l, tag);
    st = add(l, kind == '%' ? T_BLOCK_BEGIN : T_PRINT_BEGIN, tag, MISSING);
    return st == ST_OK ? read_tag(l, kind == '%') : st;
}

// A copy with "\n" for every newline, and without the one at the very end.
static enum status normalise(struct arena *a, const char *text, size_t len, struct lexer *l)
{
    char *copy = arena_alloc(a, len + 1);
    size_t n = 0;
    if (!copy) return ST_NO_MEMORY;
    for (size_t i = 0; i < len; i++) {
        if (text[i] == '\r' && i + 1 < len && text[i + 1] == '\n') continue;
        copy[n++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (n > 0 && copy[n - 1] == '\n') n--;
    l->text = copy;
    l->len = n;
    return ST_OK;
}

enum status lexer_run(struct arena *a, const char *text, size_t len, struct token_stream *ret)
{
    struct lexer l = {.arena = a, .line = 1, .column = 1, .line_starting = true};
    enum status st = normalise(a, text, len, &l);
    if (st != ST_OK) return st;
    for (size_t i = 0; i < l.len;) {
        int n = utf8_sequence(l.text + i, l.len - i);
        if (n <= 0) return fail_at(&l, i, "the text is not UTF-8");
        i += (size_t)n;
    }
    while (st == ST_OK && l.at < l.len) st = read_piece(&l);
    if (st == ST_OK) st = add(&l, T_END, l.len, MISSING);
    *ret = (struct token_stream){l.tokens, l.n};
    return st;
}
