/* regex.c: see regex.h. A pattern becomes a tree, which is then built from its end to its
 * beginning, as nodes are; what is repeated is built once, as a rule. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/regex.h"
#include "common/base/bytes.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 100 // groups within each other
#define MAX_COUNT 100000
#define MAX_POINT 0x10ffffu
#define UNBOUNDED (-1)

enum tree_kind { TREE_EMPTY, TREE_SET, TREE_BOTH, TREE_EITHER, TREE_REPEAT };

struct tree {
    enum tree_kind kind;
    int one, other; // parts; SET: the first and the number of its ranges
    int min, max;   // REPEAT
};

struct range {
    uint32_t low, high;
};

struct parser {
    const char *pattern, *at;
    struct automaton *a;
    enum regex_form form;
    struct tree *trees;
    int n_trees;
    struct range *ranges;
    int n_ranges;
    int depth;
    bool failed; // no memory
};

static enum status refuse(const struct parser *p, enum status code, const char *what)
{
    return status_fail(code, "the pattern \"%s\", at character %zu: %s", CUT(p->pattern, 100),
                       (size_t)(p->at - p->pattern) + 1, what);
}

// ---- trees --------------------------------------------------------------------------------------

static int add_tree(struct parser *p, struct tree tree)
{
    struct tree *trees = array_room(p->trees, (size_t)p->n_trees, sizeof *trees);
    if (!trees) {
        p->failed = true;
        return 0;
    }
    p->trees = trees;
    trees[p->n_trees] = tree;
    return p->n_trees++;
}

static void add_range(struct parser *p, uint32_t low, uint32_t high)
{
    struct range *ranges = array_room(p->ranges, (size_t)p->n_ranges, sizeof *ranges);
    if (!ranges) {
        p->failed = true;
        return;
    }
    p->ranges = ranges;
    ranges[p->n_ranges++] = (struct range){low, high};
}

static int by_low(const void *a, const void *b)
{
    const struct range *x = a, *y = b;
    return (x->low > y->low) - (x->low < y->low);
}

// The ranges from `first` on in order and apart from each other; inverted: what lies between them.
static void tidy(struct parser *p, int first, bool inverted)
{
    int n = 0;
    uint32_t from = 0;
    struct range *r = p->ranges + first;
    if (p->n_ranges > first) qsort(r, (size_t)(p->n_ranges - first), sizeof *r, by_low);
    const int end = p->n_ranges - first;
    for (int i = 0; i < end; i++)
        if (n > 0 && r[i].low <= r[n - 1].high + 1)
            r[n - 1].high = r[i].high > r[n - 1].high ? r[i].high : r[n - 1].high;
        else
            r[n++] = r[i];
    p->n_ranges = first + n;
    if (!inverted) return;
    for (int i = 0; i < n; i++) {
        const struct range was = p->ranges[first + i];
        if (was.low > from) add_range(p, from, was.low - 1);
        from = was.high + 1;
    }
    if (from <= MAX_POINT) add_range(p, from, MAX_POINT);
    if (p->failed) return;
    memmove(p->ranges + first, p->ranges + first + n,
            (size_t)(p->n_ranges - first - n) * sizeof *p->ranges);
    p->n_ranges -= n;
}

static int set_from(struct parser *p, int first, bool inverted)
{
    tidy(p, first, inverted);
    return add_tree(p, (struct tree){TREE_SET, first, p->n_ranges - first, 0, 0});
}

// ---- characters ---------------------------------------------------------------------------------

// What \d, \w and \s are, as ECMAScript has them.
static bool add_class(struct parser *p, char letter)
{
    static const struct range digits[] = {{'0', '9'}},
                              words[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
                              spaces[] = {{'\t', '\r'},     {' ', ' '},       {0xa0, 0xa0},
                                          {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029},
                                          {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000},
                                          {0xfeff, 0xfeff}};
    static const struct {
        char letter;
        const struct range *ranges;
        int n;
    } classes[] = {{'d', digits, 1}, {'w', words, 4}, {'s', spaces, 10}};
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        const struct range *r = classes[i].ranges;
        uint32_t from = 0;
        if (letter == classes[i].letter) {
            for (int k = 0; k < classes[i].n; k++) add_range(p, r[k].low, r[k].high);
            return true;
        }
        if (letter != toupper(classes[i].letter)) continue;
        for (int k = 0; k < classes[i].n; k++) {
            add_range(p, from, r[k].low - 1);
            from = r[k].high + 1;
        }
        add_range(p, from, MAX_POINT);
        return true;
    }
    return false;
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

// What follows a backslash: a class, whose ranges are added (*ret_class), or a character.
static enum status read_escape(struct parser *p, bool *ret_class, uint32_t *ret)
{
    static const char letters[] = "tnrfv0", meant[] = "\t\n\r\f\v";
    const char c = *p->at;
    const char *letter = c ? strchr(letters, c) : NULL;
    *ret_class = false;
    if (!c) return refuse(p, ST_INVALID, "nothing follows the last \\");
    if (strchr("pP", c)) return refuse(p, ST_UNSUPPORTED, "\\p is not supported");
    if (strchr("bB", c)) return refuse(p, ST_UNSUPPORTED, "\\b is not supported");
    if (strchr("123456789k", c))
        return refuse(p, ST_UNSUPPORTED, "back references are not supported");
    if ((*ret_class = add_class(p, c))) {
        p->at++;
        return ST_OK;
    }
    if (c == 'u' || c == 'x') {
        p->at++;
        return c == 'u' ? read_unicode(p, ret) : read_hex(p, 2, ret);
    }
    if (c == 'c' && isalpha((unsigned char)p->at[1])) {
        *ret = (uint32_t)p->at[1] % 32;
        p->at += 2;
        return ST_OK;
    }
    if (letter) {
        *ret = (uint8_t)meant[letter - letters];
        p->at++;
        return ST_OK;
    }
    if (isalnum((unsigned char)c)) return refuse(p, ST_INVALID, "there is no such escape");
    const int n = utf8_sequence(p->at, strlen(p->at));
    if (n <= 0) return refuse(p, ST_INVALID, "the pattern is not UTF-8");
    *ret = utf8_decode(p->at, n);
    p->at += n;
    return ST_OK;
}

static enum status read_character(struct parser *p, bool *ret_class, uint32_t *ret)
{
    *ret_class = false;
    if (*p->at == '\\') {
        p->at++;
        return read_escape(p, ret_class, ret);
    }
    const int n = utf8_sequence(p->at, strlen(p->at));
    if (n <= 0) return refuse(p, ST_INVALID, "the pattern is not UTF-8");
    *ret = utf8_decode(p->at, n);
    p->at += n;
    return ST_OK;
}

// [...]; p->at is behind the bracket.
static enum status read_set(struct parser *p, int *ret)
{
    const int first = p->n_ranges;
    const bool inverted = *p->at == '^';
    uint32_t low, high;
    bool is_class;
    enum status st = ST_OK;
    p->at += inverted;
    while (*p->at && *p->at != ']') {
        if (p->at[0] == '\\' && p->at[1] == 'b') { // a backspace, in a set
            p->at += 2;
            add_range(p, '\b', '\b');
            continue;
        }
        CHECK(read_character(p, &is_class, &low));
        if (is_class) continue;
        high = low;
        if (p->at[0] == '-' && p->at[1] && p->at[1] != ']') {
            p->at++;
            CHECK(read_character(p, &is_class, &high));
            if (is_class || high < low)
                FAIL(ST_INVALID,
                     "the pattern \"%s\": a range of a set ends "
                     "before it begins",
                     CUT(p->pattern, 100));
        }
        add_range(p, low, high);
    }
    if (!*p->at) st = refuse(p, ST_INVALID, "a [ is not closed");
    p->at++;
    *ret = set_from(p, first, inverted);
out:
    return st;
}

// ---- the pattern --------------------------------------------------------------------------------

static enum status read_alternatives(struct parser *p, int *ret);

// (...); p->at is behind the parenthesis.
static enum status read_group(struct parser *p, int *ret)
{
    enum status st;
    if (p->at[0] == '?') {
        if (p->at[1] == ':')
            p->at += 2;
        else if (p->at[1] == '<' && p->at[2] != '=' && p->at[2] != '!' && strchr(p->at, '>'))
            p->at = strchr(p->at, '>') + 1;
        else if (p->at[1] == 'P' && p->at[2] == '<' && strchr(p->at, '>'))
            p->at = strchr(p->at, '>') + 1;
        else
            return refuse(p, ST_UNSUPPORTED, "look-around and flags are not supported");
    }
    if (++p->depth > MAX_DEPTH) return refuse(p, ST_TOO_LONG, "more than 100 groups deep");
    CHECK(read_alternatives(p, ret));
    if (*p->at != ')')
        FAIL(ST_INVALID, "the pattern \"%s\": a ( is not closed", CUT(p->pattern, 100));
    p->at++;
    p->depth--;
out:
    return st;
}

static enum status read_atom(struct parser *p, int *ret)
{
    const int first = p->n_ranges;
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
        *ret = set_from(p, first, true);
        return ST_OK;
    case '*':
    case '+':
    case '?':
        return refuse(p, ST_INVALID, "there is nothing to repeat");
    case '^':
    case '$':
        return refuse(p, ST_UNSUPPORTED, "^ and $ are supported at the ends of the pattern alone");
    default:
        CHECK(read_character(p, &is_class, &point));
        if (!is_class) add_range(p, point, point);
        *ret = set_from(p, first, false);
    }
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

static enum status read_repeated(struct parser *p, int *ret)
{
    long min, max;
    enum status st;
    CHECK(read_atom(p, ret));
    for (;;) {
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
        if (*p->at == '?') p->at++; // what is preferred changes no language
        if (*p->at == '+') return refuse(p, ST_UNSUPPORTED, "possessive counts are not supported");
        *ret = add_tree(p, (struct tree){TREE_REPEAT, *ret, 0, (int)min, (int)max});
    }
out:
    return st;
}

// ^ may open and $ may end an alternative that stands at the top.
static bool anchor(struct parser *p, char which)
{
    if (p->depth > 0 || *p->at != which) return false;
    if (which == '$' && p->at[1] && p->at[1] != '|') return false;
    p->at++;
    return true;
}

static int anything(struct parser *p)
{
    const int first = p->n_ranges;
    add_range(p, 0, MAX_POINT);
    const int set = set_from(p, first, false);
    return add_tree(p, (struct tree){TREE_REPEAT, set, 0, 0, UNBOUNDED});
}

static enum status read_alternative(struct parser *p, int *ret)
{
    const bool open = p->depth == 0 && p->form == REGEX_SOMEWHERE;
    const bool begins = anchor(p, '^');
    int part,
        whole = open && !begins ? anything(p) : add_tree(p, (struct tree){.kind = TREE_EMPTY});
    enum status st = ST_OK;
    bool ends = false;
    while (*p->at && *p->at != '|' && *p->at != ')' && !(ends = anchor(p, '$'))) {
        CHECK(read_repeated(p, &part));
        whole = add_tree(p, (struct tree){TREE_BOTH, whole, part, 0, 0});
    }
    if (open && !ends) {
        part = anything(p);
        whole = add_tree(p, (struct tree){TREE_BOTH, whole, part, 0, 0});
    }
    *ret = whole;
out:
    return st;
}

static enum status read_alternatives(struct parser *p, int *ret)
{
    int other;
    enum status st;
    CHECK(read_alternative(p, ret));
    while (*p->at == '|') {
        p->at++;
        CHECK(read_alternative(p, &other));
        *ret = add_tree(p, (struct tree){TREE_EITHER, *ret, other, 0, 0});
    }
out:
    return st;
}

// ---- building -----------------------------------------------------------------------------------

static int hex_digit(struct automaton *a, int low, int high, int next)
{
    int made = -1;
    static const int spans[][3] = {{0, 9, '0'}, {10, 15, 'a'}, {10, 15, 'A'}};
    for (int i = 0; i < 3; i++) {
        const int from = low > spans[i][0] ? low : spans[i][0];
        const int to = high < spans[i][1] ? high : spans[i][1];
        made = automaton_either(a, made,
                                automaton_byte(a, spans[i][2] + from - spans[i][0],
                                               spans[i][2] + to - spans[i][0], next));
    }
    return made;
}

// n hexadecimal digits of the numbers from low to high.
static int hex_span(struct automaton *a, uint32_t low, uint32_t high, int n, int next)
{
    if (n == 0) return next;
    const int shift = 4 * (n - 1);
    const uint32_t below = (1u << shift) - 1;
    const uint32_t l = low >> shift, h = high >> shift;
    if (l == h)
        return hex_digit(a, (int)l, (int)l, hex_span(a, low & below, high & below, n - 1, next));
    const bool whole_low = (low & below) == 0, whole_high = (high & below) == below;
    const int first = (int)l + !whole_low, last = (int)h - !whole_high;
    const int middle =
        first > last ? -1 : hex_digit(a, first, last, hex_span(a, 0, below, n - 1, next));
    const int begin =
        whole_low ? -1 : hex_digit(a, (int)l, (int)l, hex_span(a, low & below, below, n - 1, next));
    const int end =
        whole_high ? -1 : hex_digit(a, (int)h, (int)h, hex_span(a, 0, high & below, n - 1, next));
    return automaton_either(a, begin, automaton_either(a, middle, end));
}

// \u and four digits for those up to 0xffff, surrogates left out, a pair of surrogates beyond.
static int escaped(struct automaton *a, uint32_t low, uint32_t high, int next)
{
    static const struct range planes[] = {{0, 0xd7ff}, {0xe000, 0xffff}};
    int made = -1;
    for (int i = 0; i < 2; i++) {
        const uint32_t from = low > planes[i].low ? low : planes[i].low;
        const uint32_t to = high < planes[i].high ? high : planes[i].high;
        if (from <= to)
            made = automaton_either(a, made,
                                    automaton_text(a, "\\u", 2, hex_span(a, from, to, 4, next)));
    }
    if (high < 0x10000) return made;
    uint32_t from = (low > 0x10000 ? low : 0x10000) - 0x10000;
    const uint32_t to = high - 0x10000;
    while (from <= to) { // as many as share their second surrogates
        const uint32_t first = from >> 10, last = to >> 10;
        uint32_t end = from | 0x3ff;
        if ((from & 0x3ff) == 0 && last > first)
            end = (to & 0x3ff) == 0x3ff ? to : (last << 10) - 1;
        if (end > to) end = to;
        const uint32_t low_from = end >> 10 == first ? from & 0x3ff : 0,
                       low_to = end >> 10 == first ? end & 0x3ff : 0x3ff;
        int tail = hex_span(a, 0xdc00 + low_from, 0xdc00 + low_to, 4, next);
        tail = automaton_text(a, "\\u", 2, tail);
        tail = hex_span(a, 0xd800 + first, 0xd800 + (end >> 10), 4, tail);
        made = automaton_either(a, made, automaton_text(a, "\\u", 2, tail));
        from = end + 1;
    }
    return made;
}

int json_character(struct automaton *a, uint32_t low, uint32_t high, int next)
{
    static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    static const struct range plain[] = {{0x20, 0x21}, {0x23, 0x5b}, {0x5d, MAX_POINT}};
    int made = escaped(a, low, high, next);
    for (int i = 0; i < 3; i++) {
        const uint32_t from = low > plain[i].low ? low : plain[i].low;
        const uint32_t to = high < plain[i].high ? high : plain[i].high;
        if (from <= to) made = automaton_either(a, made, automaton_character(a, from, to, next));
    }
    for (int i = 0; letters[i]; i++)
        if ((uint32_t)meant[i] >= low && (uint32_t)meant[i] <= high)
            made = automaton_either(a, made,
                                    automaton_text(a, (const char[]){'\\', letters[i]}, 2, next));
    return made;
}

static int build(struct parser *p, int tree, int next);

static int build_set(struct parser *p, const struct tree *t, int next)
{
    int made = -1;
    for (int i = 0; i < t->other; i++) {
        const struct range r = p->ranges[t->one + i];
        made =
            automaton_either(p->a, made,
                             p->form == REGEX_WHOLE ? automaton_character(p->a, r.low, r.high, next)
                                                    : json_character(p->a, r.low, r.high, next));
    }
    return made;
}

static int build_repeat(struct parser *p, const struct tree *t, int next)
{
    struct automaton *a = p->a;
    const int rule = automaton_rule(a);
    int made = next;
    automaton_define(a, rule, build(p, t->one, AUTOMATON_END));
    if (t->max == UNBOUNDED) {
        made = automaton_open(a);
        automaton_loop(a, made, automaton_call(a, rule, made), next);
    }
    for (int i = t->min; i < t->max; i++)
        made = automaton_either(a, automaton_call(a, rule, made), next);
    for (int i = 0; i < t->min && made >= 0; i++) made = automaton_call(a, rule, made);
    return made;
}

static int build(struct parser *p, int tree, int next)
{
    const struct tree *t = &p->trees[tree];
    switch (t->kind) {
    case TREE_SET:
        return build_set(p, t, next);
    case TREE_BOTH:
        return build(p, t->one, build(p, t->other, next));
    case TREE_EITHER:
        return automaton_either(p->a, build(p, t->one, next), build(p, t->other, next));
    case TREE_REPEAT:
        return build_repeat(p, t, next);
    default:
        return next;
    }
}

enum status regex_build(struct automaton *a, const char *pattern, enum regex_form form, int next,
                        int *ret)
{
    struct parser p = {.pattern = pattern, .at = pattern, .a = a, .form = form};
    int tree;
    enum status st;
    CHECK(read_alternatives(&p, &tree));
    if (*p.at) FAIL(ST_INVALID, "the pattern \"%s\": a ) without its (", CUT(pattern, 100));
    if (p.failed) FAIL(ST_NO_MEMORY, "no memory for a pattern");
    *ret = build(&p, tree, next);
out:
    free(p.trees);
    free(p.ranges);
    return st;
}
