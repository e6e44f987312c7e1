/* json_grammar.c: see json_grammar.h. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/json_grammar.h"
#include "common/base/bytes.h"
#include "common/constraint/pattern.h"

#include <math.h>
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
    "digit ::= [0-9]\n"
    "digits ::= digit*\n"
    "zeros ::= \"0\"*\n"
    "fraction ::= (\".\" digit+)?\n"
    "number ::= integer fraction ([eE] [-+]? digit+)?\n"
    "integer ::= \"-\"? (\"0\" | [1-9] digits)\n";

enum status json_grammar_build(struct automaton *a, bool strict_whitespace,
                               struct json_grammar *ret)
{
    static const char *const names[RULES] = {"blank",  "comma",  "colon",   "value",
                                             "object", "number", "integer", "character",
                                             "digit",  "digits", "zeros",   "fraction"};
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
    return text(g, "\"",
                automaton_repeat(g->a, g->rules[RULE_CHARACTER], min, max, text(g, "\"", next)));
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
    const int rest = automaton_repeat(g->a, g->rules[RULE_CHARACTER], 0, -1, end);
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

struct bound { // of numbers that are not negative
    char digits[NUMBER_ROOM];
    int n_whole, n; // digits before the point, and all
    bool is_out;    // itself
};

static struct bound bound_of(const char *text, bool is_out)
{
    struct bound b = {.is_out = is_out};
    for (text += *text == '-'; *text; text++)
        if (*text == '.')
            b.n_whole = b.n;
        else
            b.digits[b.n++] = *text;
    if (b.n_whole == 0) b.n_whole = b.n;
    return b;
}

static int digit_of(const struct bound *b, int i)
{
    return i < b->n ? b->digits[i] - '0' : 0;
}

static bool is_zero_from(const struct bound *b, int i)
{
    return i >= b->n || (int)strspn(b->digits + i, "0") == b->n - i;
}

/* What may follow i digits of a number that has n_whole before its point. They are so far those of
 * `low` and of `high`; NULL: what is above, or below, for certain. */
static int digits_from(const struct json_grammar *g, bool whole, int n_whole, int i,
                       const struct bound *low, const struct bound *high, int next)
{
    struct automaton *a = g->a;
    const bool ends = i >= n_whole && !(low && (low->is_out || !is_zero_from(low, i))) &&
                      !(high && high->is_out && is_zero_from(high, i));
    const int end = ends ? next : -1, any = json_rule(g, RULE_DIGITS, next);
    int made = -1;
    if (i >= n_whole && whole) return end;
    if (!low && !high && i > n_whole) return any;
    if (!low && !high && (i > 0 || n_whole == 1))
        return automaton_repeat(a, g->rules[RULE_DIGIT], n_whole - i, n_whole - i,
                                whole ? next : json_rule(g, RULE_FRACTION, next));
    if (i > n_whole && (!low || i >= low->n) && (!high || i >= high->n)) { // zeros are left
        if (high) return json_rule(g, RULE_ZEROS, end);
        return low->is_out ? json_rule(g, RULE_ZEROS, automaton_byte(a, '1', '9', any)) : any;
    }
    const int first = i == 0 && n_whole > 1, from = low ? digit_of(low, i) : first,
              to = high ? digit_of(high, i) : 9;
    for (int c = from; c <= to; c++) {
        const bool is_low = low && c == from, is_high = high && c == to;
        const int begin = c;
        if (!is_low && !is_high) c = high ? to - 1 : to; // which go on alike
        made = automaton_either(
            a, made,
            automaton_byte(a, '0' + begin, '0' + c,
                           digits_from(g, whole, n_whole, i + 1, is_low ? low : NULL,
                                       is_high ? high : NULL, next)));
    }
    return automaton_either(a, i == n_whole ? text(g, ".", made) : made, end);
}

// Numbers that are not negative; the signs of the range's ends count for nothing.
static int positive(const struct json_grammar *g, const struct number_range *r, int next)
{
    const struct bound low = bound_of(r->low, r->above),
                       high = bound_of(r->high ? r->high : r->low, r->below);
    const int after = r->whole ? next : json_rule(g, RULE_FRACTION, next);
    int made = -1;
    for (int n = low.n_whole; n <= high.n_whole; n++)
        made = automaton_either(g->a, made,
                                digits_from(g, r->whole, n, 0, n == low.n_whole ? &low : NULL,
                                            r->high && n == high.n_whole ? &high : NULL, next));
    if (r->high) return made;
    return automaton_either(
        g->a, made, // those that are longer
        automaton_byte(g->a, '1', '9',
                       automaton_repeat(g->a, g->rules[RULE_DIGIT], low.n_whole, -1, after)));
}

int json_number_between(const struct json_grammar *g, const struct number_range *r, int next)
{
    const double low = r->low ? strtod(r->low, NULL) : -INFINITY,
                 high = r->high ? strtod(r->high, NULL) : INFINITY;
    const bool zero =
        (low < 0 || (low == 0 && !r->above)) && (high > 0 || (high == 0 && !r->below));
    const struct number_range up = {low > 0 ? r->low : "0", r->high, low > 0 ? r->above : !zero,
                                    r->below, r->whole},
                              down = {high < 0 ? r->high : "0", r->low, high < 0 ? r->below : !zero,
                                      r->above, r->whole};
    const int made = high < 0 ? -1 : positive(g, &up, next);
    return low > 0 ? made : automaton_either(g->a, made, text(g, "-", positive(g, &down, next)));
}
