/* json_grammar.c: see json_grammar.h. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/json_grammar.h"
#include "common/base/bytes.h"
#include "common/constraint/regex.h"

#include <stdlib.h>
#include <string.h>

struct json_grammar json_grammar_of(struct automaton *a, bool strict_whitespace)
{
    return (struct json_grammar){a, strict_whitespace, -1, -1, -1};
}

static int text(struct json_grammar *g, const char *what, int next)
{
    return automaton_text(g->a, what, strlen(what), next);
}

int json_blank(struct json_grammar *g, int next)
{
    if (g->strict_whitespace) return next;
    if (g->blank < 0) {
        static const char blanks[] = " \t\n\r";
        const int open = automaton_open(g->a);
        int one = -1;
        for (int i = 0; blanks[i]; i++)
            one = automaton_either(g->a, one, automaton_byte(g->a, blanks[i], blanks[i], open));
        automaton_loop(g->a, open, one, AUTOMATON_END);
        g->blank = automaton_rule(g->a);
        automaton_define(g->a, g->blank, open);
    }
    return automaton_call(g->a, g->blank, next);
}

int json_comma(struct json_grammar *g, int next)
{
    return g->strict_whitespace ? text(g, ", ", next)
                                : json_blank(g, text(g, ",", json_blank(g, next)));
}

int json_colon(struct json_grammar *g, int next)
{
    return g->strict_whitespace ? text(g, ": ", next)
                                : json_blank(g, text(g, ":", json_blank(g, next)));
}

// ---- strings ------------------------------------------------------------------------------------

static int character(struct json_grammar *g, int next)
{
    if (g->character < 0) {
        g->character = automaton_rule(g->a);
        automaton_define(g->a, g->character, json_character(g->a, 0, 0x10ffff, AUTOMATON_END));
    }
    return automaton_call(g->a, g->character, next);
}

int json_string_of(struct json_grammar *g, int64_t min, int64_t max, int next)
{
    const int end = text(g, "\"", next);
    int made = end;
    if (max < 0) {
        made = automaton_open(g->a);
        automaton_loop(g->a, made, character(g, made), end);
    }
    for (int64_t i = min; i < max && made >= 0; i++)
        made = automaton_either(g->a, character(g, made), end);
    for (int64_t i = 0; i < min && made >= 0; i++) made = character(g, made);
    return text(g, "\"", made);
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
static int other_rest(struct json_grammar *g, struct names names, int free_rest, int end)
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
            made = automaton_either(g->a, made, json_character(g->a, from, point - 1, free_rest));
        made = automaton_either(
            g->a, made, json_character(g->a, point, point, other_rest(g, same, free_rest, end)));
        from = point + 1;
    }
    return automaton_either(g->a, made, json_character(g->a, from, 0x10ffff, free_rest));
}

int json_other_string(struct json_grammar *g, const char *const *names, int n, int next)
{
    const char **sorted = malloc((size_t)(n + 1) * sizeof *sorted);
    if (!sorted) return -1;
    const int end = text(g, "\"", next), rest = automaton_open(g->a);
    automaton_loop(g->a, rest, character(g, rest), end);
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

static int digits(struct json_grammar *g, int next) // any number of them
{
    const int open = automaton_open(g->a);
    automaton_loop(g->a, open, automaton_byte(g->a, '0', '9', open), next);
    return open;
}

static int some_digits(struct json_grammar *g, int next)
{
    return automaton_byte(g->a, '0', '9', digits(g, next));
}

int json_number(struct json_grammar *g, int next)
{
    int sign = some_digits(g, next);
    sign = automaton_either(g->a, automaton_byte(g->a, '+', '+', sign),
                            automaton_either(g->a, automaton_byte(g->a, '-', '-', sign), sign));
    const int exponent =
        automaton_either(g->a,
                         automaton_either(g->a, automaton_byte(g->a, 'e', 'e', sign),
                                          automaton_byte(g->a, 'E', 'E', sign)),
                         next);
    const int fraction = automaton_either(g->a, text(g, ".", some_digits(g, exponent)), exponent);
    const int whole = automaton_either(g->a, text(g, "0", fraction),
                                       automaton_byte(g->a, '1', '9', digits(g, fraction)));
    return automaton_either(g->a, text(g, "-", whole), whole);
}

int json_any_object(struct json_grammar *g, int next)
{
    const int end = json_blank(g, text(g, "}", next)), more = automaton_open(g->a);
    const int member = json_string_of(g, 0, -1, json_colon(g, json_any(g, more)));
    automaton_loop(g->a, more, json_comma(g, member), end);
    return text(g, "{", json_blank(g, automaton_either(g->a, member, end)));
}

int json_any_array(struct json_grammar *g, int next)
{
    const int end = json_blank(g, text(g, "]", next)), more = automaton_open(g->a);
    const int item = json_any(g, more);
    automaton_loop(g->a, more, json_comma(g, item), end);
    return text(g, "[", json_blank(g, automaton_either(g->a, item, end)));
}

int json_any(struct json_grammar *g, int next)
{
    if (g->any < 0) {
        static const char *const words[] = {"true", "false", "null"};
        g->any = automaton_rule(g->a);
        int made = json_string_of(g, 0, -1, AUTOMATON_END);
        made = automaton_either(g->a, made, json_number(g, AUTOMATON_END));
        for (int i = 0; i < 3; i++)
            made = automaton_either(g->a, made, text(g, words[i], AUTOMATON_END));
        made = automaton_either(g->a, made, json_any_object(g, AUTOMATON_END));
        made = automaton_either(g->a, made, json_any_array(g, AUTOMATON_END));
        automaton_define(g->a, g->any, made);
    }
    return automaton_call(g->a, g->any, next);
}

// Plain characters as they are, others in any form that JSON has for them.
static int literal_string(struct json_grammar *g, const json_t *value, int next)
{
    const char *s = json_string_value(value);
    size_t at = json_string_length(value);
    int made = text(g, "\"", next);
    while (at > 0) {
        size_t begin = at - 1;
        while (begin > 0 && ((uint8_t)s[begin] & 0xc0) == 0x80) begin--;
        const uint32_t point = utf8_decode(s + begin, (int)(at - begin));
        const bool plain = point >= ' ' && point < 0x7f && point != '"' && point != '\\';
        made = plain ? automaton_byte(g->a, (int)point, (int)point, made)
                     : json_character(g->a, point, point, made);
        at = begin;
    }
    return text(g, "\"", made);
}

// A number in as few digits as say it, or a word.
static int literal_text(struct json_grammar *g, const json_t *value, int next)
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

static int literal_members(struct json_grammar *g, json_t *object, void *at, int end)
{
    if (!at) return end;
    void *after = json_object_iter_next(object, at);
    json_t *key = json_string(json_object_iter_key(at));
    int rest = literal_members(g, object, after, end);
    if (after) rest = json_comma(g, rest);
    rest = json_literal(g, json_object_iter_value(at), rest);
    const int made = key ? literal_string(g, key, json_colon(g, rest)) : -1;
    json_decref(key);
    return made;
}

int json_literal(struct json_grammar *g, const json_t *value, int next)
{
    if (json_is_object(value)) {
        json_t *object = (json_t *)value;
        const int end = json_blank(g, text(g, "}", next));
        return text(g, "{",
                    json_blank(g, literal_members(g, object, json_object_iter(object), end)));
    }
    if (json_is_array(value)) {
        int made = json_blank(g, text(g, "]", next));
        for (size_t i = json_array_size(value); i > 0; i--) {
            if (i < json_array_size(value)) made = json_comma(g, made);
            made = json_literal(g, json_array_get(value, i - 1), made);
        }
        return text(g, "[", json_blank(g, made));
    }
    return json_is_string(value) ? literal_string(g, value, next) : literal_text(g, value, next);
}

// ---- numbers in a range -------------------------------------------------------------------------

/* A bound of a number that is not negative: `whole` without leading zeros, and the digits of its
 * fraction without those at the end. No bound above is whole == NULL. A number's digits are
 * compared with the bound's from the first on, which decides where they differ. */
struct bound {
    const char *whole, *fraction;
    int n_whole, n_fraction;
    bool strict; // the bound itself is out
};

static int digit(struct json_grammar *g, int low, int high, int next)
{
    return automaton_byte(g->a, '0' + low, '0' + high, next);
}

static int optional_digits(struct json_grammar *g, bool whole, int next) // of a fraction
{
    return whole ? next : automaton_either(g->a, text(g, ".", some_digits(g, next)), next);
}

static int zeros(struct json_grammar *g, int next) // any number of them
{
    const int open = automaton_open(g->a);
    automaton_loop(g->a, open, automaton_byte(g->a, '0', '0', open), next);
    return open;
}

// Digits of a fraction, or none, behind i that equal those of the bounds; a bound that does not
// hold any more is NULL. -1: there are none.
static int fraction_digits(struct json_grammar *g, const struct bound *low,
                           const struct bound *high, int i, int next)
{
    const bool behind_low = low && i >= low->n_fraction,
               behind_high = high && i >= high->n_fraction;
    if (behind_low && !low->strict) low = NULL;
    if (behind_high) return high->strict || low ? -1 : zeros(g, next);
    if (!low && !high) return digits(g, next);
    if (behind_low && low && !high)
        return zeros(g, automaton_byte(g->a, '1', '9', digits(g, next)));
    const int l = low && !behind_low ? low->fraction[i] - '0' : 0;
    const int h = high ? high->fraction[i] - '0' : 9;
    int made = low ? -1 : next, same;
    if (low && high && l == h)
        return automaton_either(g->a, made,
                                digit(g, l, l, fraction_digits(g, low, high, i + 1, next)));
    const int from = low ? l + 1 : 0, to = high ? h - 1 : 9;
    if (from <= to) made = automaton_either(g->a, made, digit(g, from, to, digits(g, next)));
    same = low ? fraction_digits(g, low, NULL, i + 1, next) : -1;
    made = automaton_either(g->a, made, digit(g, l, l, same));
    same = high ? fraction_digits(g, NULL, high, i + 1, next) : -1;
    made = automaton_either(g->a, made, digit(g, h, h, same));
    return made;
}

// The fraction, with its point, behind a whole part that equals that of the bounds given.
static int fraction_of(struct json_grammar *g, const struct bound *low, const struct bound *high,
                       bool whole, int next)
{
    const bool zero = (!low || (low->n_fraction == 0 && !low->strict)) &&
                      (!high || high->n_fraction > 0 || !high->strict);
    if (whole) return zero ? next : -1;
    // ".": at least one digit, which fraction_digits() may end without
    int made = -1;
    const int from = low && low->n_fraction > 0 ? low->fraction[0] - '0' : 0;
    const int to = high ? (high->n_fraction > 0 ? high->fraction[0] - '0' : 0) : 9;
    for (int d = from; d <= to; d++) {
        const struct bound *l = low && d == from ? low : NULL, *h = high && d == to ? high : NULL;
        const int rest = fraction_digits(g, l, h, 1, next);
        made = automaton_either(g->a, made, digit(g, d, d, rest));
    }
    made = text(g, ".", made);
    return zero ? automaton_either(g->a, made, next) : made;
}

// Whole parts of as many digits as the bounds have, the i first of which are theirs.
static int whole_digits(struct json_grammar *g, const struct bound *low, const struct bound *high,
                        int n, int i, bool whole, int next)
{
    if (i == n)
        return low || high ? fraction_of(g, low, high, whole, next)
                           : optional_digits(g, whole, next);
    const int least = i == 0 && n > 1 ? 1 : 0;
    const int l = low ? low->whole[i] - '0' : least, h = high ? high->whole[i] - '0' : 9;
    int made = -1;
    for (int d = l; d <= h; d++) {
        const struct bound *a = low && d == l ? low : NULL, *b = high && d == h ? high : NULL;
        int last = d;
        while (!a && !b && last < h - (high ? 1 : 0)) last++;
        const int rest = whole_digits(g, a, b, n, i + 1, whole, next);
        made = automaton_either(g->a, made, digit(g, d, last, rest));
        d = last;
    }
    return made;
}

// Numbers that are not negative, from low to high (whole == NULL: no bound).
static int positive(struct json_grammar *g, const struct bound *low, const struct bound *high,
                    bool whole, int next)
{
    const int max = high->whole ? high->n_whole : low->n_whole;
    int made = -1;
    for (int n = low->n_whole; n <= max; n++) {
        const int one =
            whole_digits(g, n == low->n_whole ? low : NULL,
                         high->whole && n == high->n_whole ? high : NULL, n, 0, whole, next);
        made = automaton_either(g->a, made, one);
    }
    if (high->whole) return made;
    int longer = digits(g, optional_digits(g, whole, next));
    for (int i = 0; i < low->n_whole; i++) longer = automaton_byte(g->a, '0', '9', longer);
    return automaton_either(g->a, made, automaton_byte(g->a, '1', '9', longer));
}

static struct bound bound_of(const char *text, bool strict)
{
    const char *at = text + (*text == '-');
    while (*at == '0' && at[1] >= '0' && at[1] <= '9') at++;
    struct bound b = {.whole = at, .n_whole = (int)strspn(at, "0123456789"), .strict = strict};
    b.fraction = at + b.n_whole + (at[b.n_whole] == '.');
    b.n_fraction = (int)strspn(b.fraction, "0123456789");
    while (b.n_fraction > 0 && b.fraction[b.n_fraction - 1] == '0') b.n_fraction--;
    return b;
}

static bool is_zero(const struct bound *b)
{
    return b->n_whole == 1 && b->whole[0] == '0' && b->n_fraction == 0;
}

// -1, 0, 1
static int compare(const struct bound *a, const struct bound *b)
{
    if (a->n_whole != b->n_whole) return a->n_whole < b->n_whole ? -1 : 1;
    int order = strncmp(a->whole, b->whole, (size_t)a->n_whole);
    const int n = a->n_fraction < b->n_fraction ? a->n_fraction : b->n_fraction;
    if (order == 0) order = strncmp(a->fraction, b->fraction, (size_t)n);
    if (order == 0) order = a->n_fraction - b->n_fraction;
    return (order > 0) - (order < 0);
}

// As positive(), also of bounds that leave one number or none.
static int between(struct json_grammar *g, const struct bound *low, const struct bound *high,
                   bool whole, int next)
{
    const int order = high->whole ? compare(low, high) : -1;
    if (order > 0 || (order == 0 && (low->strict || high->strict))) return -1;
    if (order < 0) return positive(g, low, high, whole, next);
    if (whole && low->n_fraction > 0) return -1;
    if (low->n_fraction > 0)
        next = text(g, ".",
                    automaton_text(g->a, low->fraction, (size_t)low->n_fraction, zeros(g, next)));
    else if (!whole)
        next = automaton_either(g->a, text(g, ".0", zeros(g, next)), next);
    return automaton_text(g->a, low->whole, (size_t)low->n_whole, next);
}

int json_number_between(struct json_grammar *g, const struct number_range *r, int next)
{
    static const struct bound none = {0};
    const struct bound zero = bound_of("0", false), after_zero = bound_of("0", true);
    const bool low_negative = !r->low || r->low[0] == '-',
               high_negative = r->high && r->high[0] == '-';
    const struct bound low = r->low ? bound_of(r->low, r->above) : none;
    const struct bound high = r->high ? bound_of(r->high, r->below) : none;
    int made = -1;
    if (!high_negative) made = between(g, low_negative ? &zero : &low, &high, r->whole, next);
    if (low_negative && !(r->low && is_zero(&low))) // -x: from -high, or beyond 0, to -low
        made = automaton_either(
            g->a, made,
            text(g, "-", between(g, high_negative ? &high : &after_zero, &low, r->whole, next)));
    return made;
}
