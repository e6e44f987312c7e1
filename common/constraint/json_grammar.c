/* json_grammar.c: see json_grammar.h. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/json_grammar.h"
#include "common/base/bytes.h"
#include "common/constraint/pattern.h"

#include <stdlib.h>
#include <string.h>

#define HEX "[0-9a-fA-F]"
static const char any_blanks[] = "space ::= [ \t\n\r]\n"
                                 "blank ::= space{0,64}\n"
                                 "comma ::= blank \",\" blank\n"
                                 "colon ::= blank \":\" blank\n";
static const char strict_blanks[] = "blank ::= \"\"\n"
                                    "comma ::= \", \"\n"
                                    "colon ::= \": \"\n";
static const char values[] =
    "value ::= object | array | string | number | \"true\" | \"false\" | \"null\"\n"
    "object ::= \"{\" blank (string colon value (comma string colon value)* blank)? \"}\"\n"
    "array ::= \"[\" blank (value (comma value)* blank)? \"]\"\n"
    "string ::= \"\\\"\" character* \"\\\"\"\n"
    "character ::= [^\"\\\\\\x00-\\x1f] | \"\\\\\" ([\"\\\\/bfnrt] | \"u\" escape)\n"
    "escape ::= [0-9abcefABCEF] " HEX "{3} | [dD] [0-7] " HEX
    "{2}\n" // but for surrogates, in pairs
    "    | [dD] [89abAB] " HEX "{2} \"\\\\u\" [dD] [c-fC-F] " HEX "{2}\n"
    "number ::= integer (\".\" [0-9]+)? ([eE] [-+]? [0-9]+)?\n"
    "integer ::= \"-\"? (\"0\" | [1-9] [0-9]*)\n";

enum status json_grammar_build(struct automaton *a, bool strict_whitespace,
                               struct json_grammar *ret)
{
    static const char *const names[RULES] = {"blank",  "comma",  "colon",   "value",
                                             "object", "number", "integer", "character"};
    struct bytes text = BYTES_INIT;
    struct json_grammar g = {.a = a};
    bytes_puts(&text, strict_whitespace ? strict_blanks : any_blanks);
    bytes_puts(&text, values);
    enum status st = bytes_status(&text);
    if (st == ST_OK) st = grammar_build(a, bytes_text(&text), names, RULES, g.rules);
    if (st == ST_OK) automaton_set_slice(a, g.rules[RULE_CHARACTER], SLICE_STRING);
    if (st == ST_OK) *ret = g;
    bytes_release(&text);
    return st;
}

int json_rule(const struct json_grammar *g, enum json_rule rule, int next)
{
    return automaton_call(g->a, g->rules[rule], next);
}

static int text(const struct json_grammar *g, const char *what, int next)
{
    return automaton_text(g->a, what, strlen(what), next);
}

// ---- strings ------------------------------------------------------------------------------------

int json_string_of(const struct json_grammar *g, int64_t min, int64_t max, int next)
{
    const int character = g->rules[RULE_CHARACTER];
    return text(g, "\"",
                automaton_repeat(g->a, character, character, min, max, text(g, "\"", next)));
}

struct names { // the n of them from `at` on begin alike, with `done` bytes
    const char *const *at;
    int n;
    size_t done;
};

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* What may follow the beginning that sorted names share, so that the string is none of them: the
 * end, unless one of them ends there; a character that none has there, and then anything; or one
 * that some have. `free` is what follows anything; `end` the closing quote. */
static int other_rest(const struct json_grammar *g, struct names names, int free_rest, int end)
{
    int made = -1, i = 0;
    uint32_t from = 0;
    if (names.at[0][names.done] == '\0') // the first of those that begin alike is the shortest
        i = 1;
    else
        made = end;
    while (i < names.n) {
        const char *at = names.at[i] + names.done;
        const int bytes = utf8_sequence(at, strlen(at));
        if (bytes <= 0) return -1;
        const uint32_t point = utf8_decode(at, bytes);
        struct names same = {names.at + i, 0, names.done + (size_t)bytes};
        while (i < names.n && strncmp(names.at[i] + names.done, at, (size_t)bytes) == 0) {
            same.n++;
            i++;
        }
        if (point > from)
            made = automaton_either(g->a, made,
                                    automaton_character(g->a, from, point - 1, true, free_rest));
        made = automaton_either(
            g->a, made,
            automaton_character(g->a, point, point, true, other_rest(g, same, free_rest, end)));
        from = point + 1;
    }
    return automaton_either(g->a, made, automaton_character(g->a, from, 0x10ffff, true, free_rest));
}

int json_other_string(const struct json_grammar *g, const char *const *names, int n, int next)
{
    const char **sorted = malloc((size_t)(n + 1) * sizeof *sorted);
    if (!sorted) return -1;
    const int end = text(g, "\"", next);
    const int rest =
        automaton_repeat(g->a, g->rules[RULE_CHARACTER], g->rules[RULE_CHARACTER], 0, -1, end);
    int made = rest, n_sorted = 0;
    if (n > 0) {
        memcpy(sorted, names, (size_t)n * sizeof *sorted);
        qsort(sorted, (size_t)n, sizeof *sorted, by_text);
        for (int i = 0; i < n; i++) // each once
            if (n_sorted == 0 || strcmp(sorted[n_sorted - 1], sorted[i]) != 0)
                sorted[n_sorted++] = sorted[i];
        made = other_rest(g, (struct names){sorted, n_sorted, 0}, rest, end);
    }
    free(sorted);
    return text(g, "\"", made);
}

// ---- values -------------------------------------------------------------------------------------

int json_string_literal(const struct json_grammar *g, const char *s, size_t n, int next)
{
    int made = text(g, "\"", next);
    while (n > 0) {
        const uint32_t point = utf8_before(s, &n);
        const bool plain = point >= ' ' && point < 0x7f && point != '"' && point != '\\';
        made = plain ? automaton_byte(g->a, (int)point, (int)point, made)
                     : automaton_character(g->a, point, point, true, made);
    }
    return text(g, "\"", made);
}

// A number in as few digits as say it, or a word.
static int literal_text(const struct json_grammar *g, const json_t *value, int next)
{
    char *dump = NULL;
    for (size_t digits = 1; digits <= 17; digits++) {
        free(dump);
        dump = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(digits));
        if (!dump || !json_is_real(value) || strtod(dump, NULL) == json_real_value(value)) break;
    }
    const int made = dump ? text(g, dump, next) : -1;
    free(dump);
    return made;
}

// Members from one on; end: what follows the last.
static int literal_members(const struct json_grammar *g, json_t *object, void *at, int end)
{
    if (!at) return end;
    const char *key = json_object_iter_key(at);
    void *after = json_object_iter_next(object, at);
    int rest = literal_members(g, object, after, end);
    if (after) rest = json_rule(g, RULE_COMMA, rest);
    rest = json_literal(g, json_object_iter_value(at), rest);
    return json_string_literal(g, key, strlen(key), json_rule(g, RULE_COLON, rest));
}

int json_literal(const struct json_grammar *g, const json_t *value, int next)
{
    const bool is_object = json_is_object(value);
    json_t *all = (json_t *)value;
    if (json_is_string(value))
        return json_string_literal(g, json_string_value(value), json_string_length(value), next);
    if (!is_object && !json_is_array(value)) return literal_text(g, value, next);
    int made = json_rule(g, RULE_BLANK, text(g, is_object ? "}" : "]", next));
    if (is_object) made = literal_members(g, all, json_object_iter(all), made);
    for (size_t i = json_array_size(value); i > 0; i--) {
        if (i < json_array_size(value)) made = json_rule(g, RULE_COMMA, made);
        made = json_literal(g, json_array_get(value, i - 1), made);
    }
    return text(g, is_object ? "{" : "[", json_rule(g, RULE_BLANK, made));
}

// ---- numbers in a range -------------------------------------------------------------------------

/* Numbers that are not negative, digit by digit beside those of the bounds, which are aligned: a
 * number's digits decide where they first differ from a bound's. Its first digit stands at that of
 * its power of ten, so that a shorter number begins further behind. */
struct digits {
    const struct json_grammar *g;
    bool whole, above, below;
    const char *low, *high; // (n) high == NULL: no bound
    int n_whole, n, next;
    int *free; // (n_whole + 1) what follows so many digits that no bound decides on any more
};

static int some(const struct json_grammar *g, char low, char high, int next) // any number of digits
{
    const int open = automaton_open(g->a);
    automaton_close(g->a, open, automaton_byte(g->a, low, high, open), next);
    return open;
}

static bool is_zero(const char *digits, int n)
{
    return (int)strspn(digits, "0") >= n;
}

// Whether a number may end with i digits, which are so far those of the bounds (low, high).
static bool may_end(const struct digits *d, int i, bool low, bool high)
{
    if (i < d->n_whole) return false;
    if (low && (d->above || !is_zero(d->low + i, d->n - i))) return false;
    return !high || !d->below || !is_zero(d->high + i, d->n - i);
}

static int digits_from(const struct digits *d, int i, int least, bool low, bool high)
{
    struct automaton *a = d->g->a;
    const int end = may_end(d, i, low, high) ? d->next : -1;
    int made = -1;
    if (!low && !high) return i <= d->n_whole ? d->free[i] : some(d->g, '0', '9', d->next);
    if (i >= d->n_whole && d->whole) return end;
    if (i == d->n && (low || end >= 0) && high) return end < 0 ? -1 : some(d->g, '0', '0', end);
    if (i == d->n && high) return -1;
    if (i == d->n) // behind the lower bound, which is met already unless the number must be above
        return d->above ? some(d->g, '0', '0',
                               automaton_byte(a, '1', '9', some(d->g, '0', '9', d->next)))
                        : some(d->g, '0', '9', d->next);
    const int from = low && d->low[i] - '0' > least ? d->low[i] - '0' : least;
    const int to = high ? d->high[i] - '0' : 9;
    for (int c = from; c <= to; c++) {
        const bool at_low = low && c == d->low[i] - '0', at_high = high && c == to;
        int last = c; // of those that go on alike
        while (!at_low && !at_high && last < to - high) last++;
        made = automaton_either(
            a, made,
            automaton_byte(a, '0' + c, '0' + last, digits_from(d, i + 1, 0, at_low, at_high)));
        c = last;
    }
    if (i == d->n_whole) made = text(d->g, ".", made);
    return automaton_either(a, made, end);
}

struct bound {
    const char *at;
    int n_whole, n_fraction;
};

static struct bound bound_of(const char *digits)
{
    struct bound b = {.at = digits + (*digits == '-')};
    while (*b.at == '0' && b.at[1] >= '0' && b.at[1] <= '9') b.at++;
    b.n_whole = (int)strcspn(b.at, ".");
    b.n_fraction = (int)strlen(b.at) - b.n_whole - (b.at[b.n_whole] == '.');
    return b;
}

// Its digits, with zeros on both sides.
static void align(struct bound b, int n_whole, int n, char *ret)
{
    memset(ret, '0', (size_t)n);
    ret[n] = '\0';
    memcpy(ret + n_whole - b.n_whole, b.at, (size_t)b.n_whole);
    if (b.n_fraction > 0) memcpy(ret + n_whole, b.at + b.n_whole + 1, (size_t)b.n_fraction);
}

// Numbers that are not negative; the signs of the range's ends count for nothing.
static int positive(const struct json_grammar *g, const struct number_range *r, int next)
{
    const struct bound low = bound_of(r->low), high = bound_of(r->high ? r->high : "0");
    struct digits d = {
        .g = g, .whole = r->whole, .above = r->above, .below = r->below, .next = next};
    d.n_whole = low.n_whole > high.n_whole ? low.n_whole : high.n_whole;
    d.n = d.n_whole + 1 + (low.n_fraction > high.n_fraction ? low.n_fraction : high.n_fraction);
    char *room = malloc(2 * ((size_t)d.n + 1));
    d.free = malloc(((size_t)d.n_whole + 1) * sizeof *d.free);
    int made = -1;
    if (!room || !d.free) goto out;
    align(low, d.n_whole, d.n, room);
    align(high, d.n_whole, d.n, room + d.n + 1);
    d.low = room;
    d.high = r->high ? room + d.n + 1 : NULL;
    for (int i = d.n_whole; i >= 0; i--) {
        const int fraction = text(g, ".", automaton_byte(g->a, '0', '9', some(g, '0', '9', next)));
        d.free[i] = i < d.n_whole ? automaton_byte(g->a, '0', '9', d.free[i + 1])
                    : r->whole    ? next
                                  : automaton_either(g->a, fraction, next);
    }
    for (int i = 0; i < d.n_whole && is_zero(d.low, i); i++) // numbers of n_whole - i digits
        made = automaton_either(
            g->a, made, digits_from(&d, i, i < d.n_whole - 1, true, d.high && is_zero(d.high, i)));
    if (!d.high) // longer ones
        made = automaton_either(g->a, made,
                                automaton_byte(g->a, '1', '9', some(g, '0', '9', d.free[0])));
out:
    free(room);
    free(d.free);
    return made;
}

int json_number_between(const struct json_grammar *g, const struct number_range *r, int next)
{
    const bool low_negative = !r->low || r->low[0] == '-';
    const bool high_negative = r->high && r->high[0] == '-';
    struct number_range up = *r, down = {r->high, r->low, r->below, r->above, r->whole};
    int made = -1;
    if (low_negative) up.low = "0", up.above = false;
    if (!high_negative) made = positive(g, &up, next);
    if (!low_negative) return made;
    if (!high_negative) down.low = "0", down.above = true;
    return automaton_either(g->a, made, text(g, "-", positive(g, &down, next)));
}
