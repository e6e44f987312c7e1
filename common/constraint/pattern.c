/* pattern.c: see pattern.h. Both syntaxes are read by one parser, which builds what it reads at
 * once: a fragment leads from its start to its end, an open node, which what comes behind it
 * closes. What is repeated is a rule. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/pattern.h"
#include "common/base/bytes.h"

#include <ctype.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 100 // groups within each other
#define MAX_COUNT 100000
#define MAX_POINT 0x10ffffu
#define UNBOUNDED (-1)

struct fragment {
    int start, end;
    int rule; // that it calls, and nothing else; or -1
    enum automaton_slice slice;
};

struct parser {
    const char *text, *at;
    struct automaton *a;
    bool is_grammar;
    enum regex_form form;           // REGEX_WHOLE in a grammar
    struct automaton_range *ranges; // of the set that is read
    int n_ranges;
    json_t *rules; // of a grammar: their numbers, by name
    int depth;
    bool failed; // no memory
};

static enum status refuse(const struct parser *p, enum status code, const char *what)
{
    int line = 1;
    const char *from = p->text;
    for (const char *at = p->text; at < p->at && p->is_grammar; at++)
        if (*at == '\n') line++, from = at + 1;
    if (p->is_grammar)
        return status_fail(code, "the grammar, line %d, at character %zu: %s", line,
                           (size_t)(p->at - from) + 1, what);
    return status_fail(code, "the pattern \"%s\", at character %zu: %s", CUT(p->text, 100),
                       (size_t)(p->at - p->text) + 1, what);
}

// ---- sets of characters -------------------------------------------------------------------------

static void add_range(struct parser *p, uint32_t low, uint32_t high)
{
    struct automaton_range *ranges = array_room(p->ranges, (size_t)p->n_ranges, sizeof *ranges);
    if (!ranges) {
        p->failed = true;
        return;
    }
    p->ranges = ranges;
    ranges[p->n_ranges++] = (struct automaton_range){low, high};
}

static int by_low(const void *a, const void *b)
{
    const struct automaton_range *x = a, *y = b;
    return (x->low > y->low) - (x->low < y->low);
}

// The ranges in order and apart from each other; inverted: what lies between them.
static void tidy(struct parser *p, bool inverted)
{
    int n = 0;
    uint32_t from = 0;
    struct automaton_range *r = p->ranges;
    if (p->n_ranges > 0) qsort(r, (size_t)p->n_ranges, sizeof *r, by_low);
    for (int i = 0; i < p->n_ranges; i++)
        if (n > 0 && r[i].low <= r[n - 1].high + 1)
            r[n - 1].high = r[i].high > r[n - 1].high ? r[i].high : r[n - 1].high;
        else
            r[n++] = r[i];
    p->n_ranges = n;
    if (!inverted) return;
    for (int i = 0; i < n; i++) {
        const struct automaton_range was = p->ranges[i];
        if (was.low > from) add_range(p, from, was.low - 1);
        from = was.high + 1;
    }
    if (from <= MAX_POINT) add_range(p, from, MAX_POINT);
    if (p->failed) return;
    p->n_ranges -= n;
    memmove(p->ranges, p->ranges + n, (size_t)p->n_ranges * sizeof *p->ranges);
}

// One character of the ranges, which are none then.
static struct fragment set_from(struct parser *p, bool inverted)
{
    struct fragment f = {-1, automaton_open(p->a), -1, AUTOMATON_SLICES};
    const bool in_string = p->form != REGEX_WHOLE;
    tidy(p, inverted);
    f.slice = automaton_slice_of(p->ranges, p->n_ranges, in_string);
    for (int i = 0; i < p->n_ranges; i++) {
        const struct automaton_range r = p->ranges[i];
        f.start = automaton_either(p->a, f.start,
                                   automaton_character(p->a, r.low, r.high, in_string, f.end));
    }
    p->n_ranges = 0;
    return f;
}

// What \d, \w and \s are, as ECMAScript has them; what they are not, for \D, \W and \S.
static bool add_class(struct parser *p, char letter)
{
    static const struct {
        char letter;
        int n;
        struct automaton_range ranges[10];
    } classes[] = {{'d', 1, {{'0', '9'}}},
                   {'w', 4, {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}},
                   {'s',
                    10,
                    {{'\t', '\r'},
                     {' ', ' '},
                     {0xa0, 0xa0},
                     {0x1680, 0x1680},
                     {0x2000, 0x200a},
                     {0x2028, 0x2029},
                     {0x202f, 0x202f},
                     {0x205f, 0x205f},
                     {0x3000, 0x3000},
                     {0xfeff, 0xfeff}}}};
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        const struct automaton_range *r = classes[i].ranges;
        const bool is = letter == classes[i].letter;
        uint32_t from = 0;
        if (!is && letter != toupper(classes[i].letter)) continue;
        for (int k = 0; k < classes[i].n; k++) {
            add_range(p, is ? r[k].low : from, is ? r[k].high : r[k].low - 1);
            from = r[k].high + 1;
        }
        if (!is) add_range(p, from, MAX_POINT);
        return true;
    }
    return false;
}

static enum status read_plain(struct parser *p, uint32_t *ret)
{
    const int n = utf8_sequence(p->at, strnlen(p->at, 4));
    if (n <= 0) return refuse(p, ST_INVALID, "it is not UTF-8");
    *ret = utf8_decode(p->at, n);
    p->at += n;
    return ST_OK;
}

static enum status read_hex(struct parser *p, int n, uint32_t *ret)
{
    uint32_t value = 0;
    for (int i = 0; i < n; i++, p->at++) {
        if (!isxdigit((unsigned char)*p->at))
            return refuse(p, ST_INVALID, "hexadecimal digits are missing");
        const int c = tolower((unsigned char)*p->at);
        value = value * 16 + (uint32_t)(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    *ret = value;
    return ST_OK;
}

// \u1234, a pair of them, or \u{12345}; p->at is behind the u.
static enum status read_unicode(struct parser *p, uint32_t *ret)
{
    uint32_t low;
    enum status st;
    if (*p->at == '{') {
        const size_t n = strspn(++p->at, "0123456789abcdefABCDEF");
        if (n < 1 || n > 6 || p->at[n] != '}')
            return refuse(p, ST_INVALID, "\\u{...} holds no code point");
        CHECK(read_hex(p, (int)n, ret));
        p->at++;
    } else {
        CHECK(read_hex(p, 4, ret));
        if (*ret >= 0xd800 && *ret < 0xdc00 && p->at[0] == '\\' && p->at[1] == 'u') {
            p->at += 2;
            CHECK(read_hex(p, 4, &low));
            *ret = 0x10000 + ((*ret - 0xd800) << 10) + (low - 0xdc00);
        }
    }
    st = *ret <= MAX_POINT ? ST_OK : refuse(p, ST_INVALID, "there is no such character");
out:
    return st;
}

// What follows a backslash: a class, whose ranges are added (*ret_class), or a character. Inside: a
// set or a text, where \b is a backspace.
static enum status read_escape(struct parser *p, bool inside, bool *ret_class, uint32_t *ret)
{
    static const char letters[] = "tnrfv0b", meant[] = "\t\n\r\f\v\0\b";
    const char c = *p->at;
    const char *letter = c ? strchr(letters, c) : NULL;
    if (!c) return refuse(p, ST_INVALID, "nothing follows the last \\");
    if (strchr("pP", c)) return refuse(p, ST_UNSUPPORTED, "\\p is not supported");
    if (c == 'B' || (c == 'b' && !inside)) return refuse(p, ST_UNSUPPORTED, "\\b is not supported");
    if (strchr("123456789k", c))
        return refuse(p, ST_UNSUPPORTED, "back references are not supported");
    *ret_class = add_class(p, c);
    if (!*ret_class && !letter && !isalnum((unsigned char)c)) return read_plain(p, ret);
    p->at++;
    if (*ret_class) return ST_OK;
    if (c == 'u') return read_unicode(p, ret);
    if (c == 'x') return read_hex(p, 2, ret);
    if (c == 'U' && p->is_grammar) return read_hex(p, 8, ret);
    *ret = letter ? (uint8_t)meant[letter - letters] : (uint32_t)*p->at % 32;
    if (letter) return ST_OK;
    if (c != 'c' || !isalpha((unsigned char)*p->at))
        return refuse(p, ST_INVALID, "there is no such escape");
    p->at++;
    return ST_OK;
}

static enum status read_character(struct parser *p, bool inside, bool *ret_class, uint32_t *ret)
{
    *ret_class = false;
    if (*p->at != '\\') return read_plain(p, ret);
    p->at++;
    return read_escape(p, inside, ret_class, ret);
}

// [...]; p->at is behind the bracket.
static enum status read_set(struct parser *p, struct fragment *ret)
{
    const bool inverted = *p->at == '^';
    uint32_t low, high;
    bool is_class;
    enum status st = ST_OK;
    p->at += inverted;
    while (*p->at && *p->at != ']') {
        CHECK(read_character(p, true, &is_class, &low));
        if (is_class) continue;
        high = low;
        if (p->at[0] == '-' && p->at[1] && p->at[1] != ']') {
            p->at++;
            CHECK(read_character(p, true, &is_class, &high));
            if (is_class || high < low)
                return refuse(p, ST_INVALID, "a range of a set ends before it begins");
        }
        add_range(p, low, high);
    }
    if (!*p->at) return refuse(p, ST_INVALID, "a [ is not closed");
    p->at++;
    *ret = set_from(p, inverted);
out:
    return st;
}

// ---- fragments ----------------------------------------------------------------------------------

static struct fragment nothing_between(struct parser *p)
{
    const int node = automaton_open(p->a);
    return (struct fragment){node, node, -1, AUTOMATON_SLICES};
}

static struct fragment both(struct parser *p, struct fragment one, struct fragment other)
{
    automaton_close(p->a, one.end, other.start, -1);
    return (struct fragment){one.start, other.end, -1, AUTOMATON_SLICES};
}

static struct fragment repeated(struct parser *p, struct fragment f, long min, long max)
{
    const int rule = f.rule < 0 ? automaton_rule_of(p->a, f.start, f.slice) : f.rule,
              end = automaton_open(p->a);
    automaton_close(p->a, f.end, AUTOMATON_END, -1);
    return (struct fragment){automaton_repeat(p->a, rule, min, max, end), end, -1,
                             AUTOMATON_SLICES};
}

static struct fragment anything(struct parser *p)
{
    add_range(p, 0, MAX_POINT);
    return repeated(p, set_from(p, false), 0, UNBOUNDED);
}

// ---- a grammar's own ----------------------------------------------------------------------------

static void skip_blanks(struct parser *p)
{
    while (p->is_grammar && (isspace((unsigned char)*p->at) || *p->at == '#'))
        p->at += *p->at == '#' ? strcspn(p->at, "\n") : 1;
}

static size_t name_length(const char *at)
{
    size_t n = 0;
    if (!isalpha((unsigned char)*at) && *at != '_') return 0;
    while (isalnum((unsigned char)at[n]) || (at[n] && strchr("_-.", at[n]))) n++;
    return n;
}

// Whether a rule begins here: name ::=
static bool at_rule(const struct parser *p)
{
    const size_t n = p->is_grammar ? name_length(p->at) : 0;
    return n > 0 && strncmp(p->at + n + strspn(p->at + n, " \t"), "::=", 3) == 0;
}

// The rule of a name, which may be defined later.
static int rule_of(struct parser *p, const char *name, size_t n)
{
    json_t *known = json_object_getn(p->rules, name, n);
    if (known) return (int)json_integer_value(known);
    const int rule = automaton_rule(p->a);
    automaton_name(p->a, rule, name, n);
    p->failed |= json_object_setn_new(p->rules, name, n, json_integer(rule)) != 0;
    return rule;
}

static enum status read_text(struct parser *p, struct fragment *ret)
{
    uint32_t point;
    bool is_class;
    enum status st = ST_OK;
    *ret = nothing_between(p);
    for (p->at++; *p->at && *p->at != '"';) {
        CHECK(read_character(p, true, &is_class, &point));
        if (!is_class) add_range(p, point, point);
        *ret = both(p, *ret, set_from(p, false));
        if (automaton_failed(p->a)) return automaton_finish(p->a, -1);
    }
    if (!*p->at) return refuse(p, ST_INVALID, "a \" is not closed");
    p->at++;
out:
    return st;
}

static enum status read_name(struct parser *p, struct fragment *ret)
{
    const size_t n = name_length(p->at);
    if (n == 0) return refuse(p, ST_INVALID, "neither a text, a class, a name nor a group is here");
    *ret = nothing_between(p);
    ret->rule = rule_of(p, p->at, n);
    ret->start = automaton_call(p->a, ret->rule, ret->end);
    p->at += n;
    return ST_OK;
}

// ---- the expression -----------------------------------------------------------------------------

static enum status read_alternatives(struct parser *p, struct fragment *ret);

// (...); p->at is behind the parenthesis.
static enum status read_group(struct parser *p, struct fragment *ret)
{
    enum status st;
    if (p->at[0] == '?' || (p->is_grammar && p->at[0] == '=')) {
        const char *name = p->at + 1 + (p->at[1] == 'P');
        if (p->at[1] == ':')
            p->at += 2;
        else if (*name == '<' && name[1] != '=' && name[1] != '!' && strchr(name, '>'))
            p->at = strchr(name, '>') + 1;
        else
            return refuse(p, ST_UNSUPPORTED, "look-around and flags are not supported");
    }
    if (++p->depth > MAX_DEPTH) return refuse(p, ST_TOO_LONG, "more than 100 groups deep");
    CHECK(read_alternatives(p, ret));
    if (*p->at != ')') return refuse(p, ST_INVALID, "a ( is not closed");
    p->at++;
    p->depth--;
out:
    return st;
}

static enum status read_atom(struct parser *p, struct fragment *ret)
{
    uint32_t point;
    bool is_class;
    enum status st;
    switch (*p->at) {
    case '(':
        p->at++;
        return read_group(p, ret);
    case '[':
        p->at++;
        return read_set(p, ret);
    case '.':
        p->at++;
        add_range(p, '\n', '\n');
        add_range(p, '\r', '\r');
        add_range(p, 0x2028, 0x2029);
        *ret = set_from(p, true);
        return ST_OK;
    case '*':
    case '+':
    case '?':
        return refuse(p, ST_INVALID, "there is nothing to repeat");
    default:
        break;
    }
    if (p->is_grammar) return *p->at == '"' ? read_text(p, ret) : read_name(p, ret);
    if (*p->at == '^' || *p->at == '$')
        return refuse(p, ST_UNSUPPORTED, "^ and $ are supported at the ends of the pattern alone");
    CHECK(read_character(p, false, &is_class, &point));
    if (!is_class) add_range(p, point, point);
    *ret = set_from(p, false);
out:
    return st;
}

// {n}, {n,} or {n,m} at p->at: false where it is none, and stands for itself.
static bool read_counts(struct parser *p, long *ret_min, long *ret_max)
{
    char *end;
    if (!isdigit((unsigned char)p->at[1])) return false;
    *ret_min = *ret_max = strtol(p->at + 1, &end, 10);
    if (*end == ',') {
        *ret_max = UNBOUNDED;
        end++;
        if (isdigit((unsigned char)*end)) *ret_max = strtol(end, &end, 10);
    }
    if (*end != '}') return false;
    p->at = end + 1;
    return true;
}

static enum status read_repeated(struct parser *p, struct fragment *ret)
{
    long min, max;
    enum status st;
    if (automaton_failed(p->a)) return automaton_finish(p->a, -1);
    CHECK(read_atom(p, ret));
    for (;;) {
        skip_blanks(p);
        if (*p->at == '*')
            min = 0, max = UNBOUNDED, p->at++;
        else if (*p->at == '+')
            min = 1, max = UNBOUNDED, p->at++;
        else if (*p->at == '?')
            min = 0, max = 1, p->at++;
        else if (*p->at != '{' || !read_counts(p, &min, &max))
            return ST_OK;
        if (min > MAX_COUNT || max > MAX_COUNT)
            return refuse(p, ST_TOO_LONG, "a count over 100000");
        if (max != UNBOUNDED && max < min)
            return refuse(p, ST_INVALID, "a count ends before it begins");
        if (*p->at == '?' && !p->is_grammar) p->at++; // what is preferred changes no language
        if (*p->at == '+') return refuse(p, ST_UNSUPPORTED, "possessive counts are not supported");
        *ret = repeated(p, *ret, min, max);
    }
out:
    return st;
}

// ^ may open and $ may end an alternative that stands at the top.
static bool anchor(struct parser *p, char which)
{
    if (p->depth > 0 || p->is_grammar || *p->at != which) return false;
    if (which == '$' && p->at[1] && p->at[1] != '|') return false;
    p->at++;
    return true;
}

static enum status read_alternative(struct parser *p, struct fragment *ret)
{
    const bool open = p->depth == 0 && p->form == REGEX_SOMEWHERE;
    const bool begins = anchor(p, '^');
    struct fragment part;
    enum status st = ST_OK;
    bool ends = false;
    *ret = open && !begins ? anything(p) : nothing_between(p);
    for (int n = 0;; n++) {
        skip_blanks(p);
        if (!*p->at || *p->at == '|' || *p->at == ')' || at_rule(p) || (ends = anchor(p, '$')))
            break;
        CHECK(read_repeated(p, &part));
        *ret = n > 0 || open ? both(p, *ret, part) : part;
    }
    if (open && !ends) *ret = both(p, *ret, anything(p));
out:
    return st;
}

static enum status read_alternatives(struct parser *p, struct fragment *ret)
{
    struct fragment other;
    enum status st;
    CHECK(read_alternative(p, ret));
    while (*p->at == '|') {
        p->at++;
        CHECK(read_alternative(p, &other));
        ret->start = automaton_either(p->a, ret->start, other.start);
        automaton_close(p->a, other.end, ret->end, -1);
        if (other.slice == SLICE_PLAIN) ret->slice = SLICE_PLAIN; // which may be of more
        if (ret->slice != SLICE_PLAIN) ret->slice = AUTOMATON_SLICES;
        ret->rule = -1;
    }
out:
    return st;
}

// What is read, up to `next`.
static enum status build(struct parser *p, int next, struct fragment *ret)
{
    enum status st;
    CHECK(read_alternatives(p, ret));
    if (*p->at && !at_rule(p)) return refuse(p, ST_INVALID, "a ) without its (");
    if (p->failed) FAIL(ST_NO_MEMORY, "no memory for a pattern");
    automaton_close(p->a, ret->end, next, -1);
out:
    return st;
}

enum status regex_build(struct automaton *a, const char *pattern, enum regex_form form, int next,
                        int *ret)
{
    struct parser p = {.text = pattern, .at = pattern, .a = a, .form = form};
    struct fragment f;
    const enum status st = build(&p, next, &f);
    if (st == ST_OK) *ret = f.start;
    free(p.ranges);
    return st;
}

static enum status read_rule(struct parser *p)
{
    const char *name = p->at;
    const size_t n = name_length(p->at);
    struct fragment f;
    if (!at_rule(p)) return refuse(p, ST_INVALID, "a rule, name ::= ..., should begin here");
    const int rule = rule_of(p, name, n);
    if (automaton_is_defined(p->a, rule))
        return refuse(p, ST_INVALID, "this rule is there already");
    p->at = strstr(p->at, "::=") + 3;
    const enum status st = build(p, AUTOMATON_END, &f);
    if (st == ST_OK) automaton_define(p->a, rule, f.start);
    if (st == ST_OK) automaton_set_slice(p->a, rule, f.slice);
    return st;
}

enum status grammar_build(struct automaton *a, const char *text, const char *const *names, int n,
                          int *ret_rules)
{
    struct parser p = {
        .text = text, .at = text, .a = a, .is_grammar = true, .rules = json_object()};
    const char *name;
    json_t *rule;
    enum status st = ST_OK;
    if (!p.rules) return status_fail(ST_NO_MEMORY, "no memory for a grammar");
    for (skip_blanks(&p); *p.at; skip_blanks(&p)) CHECK(read_rule(&p));
    for (int i = 0; i < n; i++) ret_rules[i] = rule_of(&p, names[i], strlen(names[i]));
    json_object_foreach (p.rules, name, rule)
        if (!automaton_failed(a) && !automaton_is_defined(a, (int)json_integer_value(rule)))
            FAIL(ST_INVALID, "the grammar has no rule \"%s\"", CUT(name, 100));
out:
    json_decref(p.rules);
    free(p.ranges);
    return st;
}
