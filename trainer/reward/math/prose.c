/* prose.c: PCRE2 over prose, and the numbers in it: one expression knows what a number looks like;
 * the rules only choose where it starts and ends. Owns the compiled expressions, for the life of
 * the process. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/math/prose.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <math.h>
#include <pcre2.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pcre2_code *compiled(struct prose *p)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int error;
    PCRE2_SIZE at;
    pthread_mutex_lock(&lock);
    if (!p->code) {
        p->code = pcre2_compile((PCRE2_SPTR)p->expression, PCRE2_ZERO_TERMINATED,
                                PCRE2_EXTENDED | PCRE2_DOTALL, &error, &at, NULL);
        if (p->code) pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); // or it is interpreted
    }
    pcre2_code *code = p->code;
    pthread_mutex_unlock(&lock);
    return code;
}

bool prose_find(struct prose *p, const char *text, const char *from, const char *end,
                struct prose_match *ret)
{
    pcre2_code *code = from <= end ? compiled(p) : NULL;
    pcre2_match_data *match = code ? pcre2_match_data_create(PROSE_GROUPS, NULL) : NULL;
    int n = PCRE2_ERROR_JIT_STACKLIMIT;
    // the interpreter keeps its state on the heap
    for (int jit = 1; match && jit >= 0 && n == PCRE2_ERROR_JIT_STACKLIMIT; jit--)
        n = pcre2_match(code, (PCRE2_SPTR)text, (size_t)(end - text), (size_t)(from - text),
                        jit ? 0 : PCRE2_NO_JIT, match, NULL);
    *ret = (struct prose_match){0};
    for (int i = 0; i < n; i++) {
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(match) + 2 * i;
        if (at[0] == PCRE2_UNSET) continue;
        ret->begin[i] = text + at[0];
        ret->end[i] = text + at[1];
    }
    pcre2_match_data_free(match);
    return n > 0;
}

const char *behind_last(const char *begin, const char *end, const char *mark)
{
    const size_t n = strlen(mark);
    for (const char *at = end; at >= begin + n; at--)
        if (strncasecmp(at - n, mark, n) == 0) return at;
    return NULL;
}

const char *behind_braces(const char *at, const char *end)
{
    int open = 0;
    for (const char *begin = at; at < end && at - begin < PROSE_LONGEST; at++) {
        open += *at == '{' ? 1 : *at == '}' ? -1 : 0;
        if (open == 0) return at + 1;
    }
    return NULL;
}

// ---- one number ---------------------------------------------------------------------------------

// A thousands separator: a comma, also as TeX has it, or one of TeX's small spaces, before exactly
// three digits.
#define SEPARATOR "(?: \\{,\\} (?:\\\\!)? | , (?:\\\\!)? | \\\\[,!;:\\ ] ) (?=\\d{3}(?!\\d))"
#define WHOLE     "(?> \\d+ (?: " SEPARATOR " \\d{3} )* )"
#define DECIMAL   "(?: " WHOLE " (?:\\.\\d+)? | (?<!\\d)\\.\\d+ )"
// Of a TeX fraction: a number in braces, or one digit.
#define PART "\\ * (?: \\d | \\{ \\ * -? " DECIMAL " \\ * \\} )"
#define TEX  "\\\\[dtc]?frac (" PART ") (?= \\ *(?:\\{[^}]*)?[1-9] ) (" PART ")"
// "3/4", but not what is a date ("3/4/2025") or no fraction of whole numbers.
#define PLAIN "(?<!/) (" WHOLE ") / (?=0*[1-9]) (" WHOLE ") (?! \\.\\d | /\\d )"
// What has a power or stands before a root is no number, nor is the power ("90^\circ" is one).
#define POWER "\\^ \\ * \\{? \\ * -? (?: \\d+ | [a-z] (?![a-z]) )"
#define ALONE "(?! \\ *" POWER " | \\ *\\\\sqrt )"
// "-5", "-$5", "$-5", TeX's "-\$5" and "-{5}", also with U+2212; not the minus of "7-5".
#define MINUS "(?: (?<![A-Za-z0-9)]) (-|\xe2\x88\x92) \\\\? \\$? \\{? )?"

enum group { ALL, SIGN, NUMBER, ABOVE, BELOW, INTEGER, PART_ABOVE, PART_BELOW, OTHER };

// What is no number is the name of a TeX fraction that is not one of two numbers, a root or a
// power.
static struct prose number = {MINUS "( (?|" TEX "|" PLAIN ") | (" WHOLE ") (?!\\.\\d) (?|\\ ?" TEX
                                    "|\\ " PLAIN ") | (?>" DECIMAL ") " ALONE
                                    ") | (\\\\[dtc]?frac | \\\\sqrt | " POWER ")",
                              NULL};

// Of a group's digits, its point and its minus.
static double decimal(const struct prose_match *m, enum group group)
{
    char digits[64];
    size_t n = 0;
    for (const char *s = m->begin[group]; s < m->end[group] && n < sizeof digits - 1; s++)
        if (strchr("0123456789.-", *s)) digits[n++] = *s;
    digits[n] = '\0';
    return strtod(digits, NULL);
}

struct numbers { // of a text, one after another
    const char *text, *end, *at;
    const char *start; // of the last, behind its sign
    double value;
    bool others; // fractions of other things came before it
};

static bool next_number(struct numbers *in)
{
    struct prose_match m;
    while (prose_find(&number, in->text, in->at, in->end, &m)) {
        in->at = m.end[ALL];
        if (m.begin[NUMBER]) {
            double value = m.begin[ABOVE]     ? decimal(&m, ABOVE) / decimal(&m, BELOW)
                           : m.begin[INTEGER] ? decimal(&m, INTEGER)
                                              : decimal(&m, NUMBER);
            const double part =
                m.begin[INTEGER] ? decimal(&m, PART_ABOVE) / decimal(&m, PART_BELOW) : 0;
            if (part > 0 && part < 1)
                value += part;
            else if (m.begin[INTEGER])
                in->at = m.end[INTEGER]; // the fraction is a number of its own
            in->start = m.begin[NUMBER];
            in->value = m.begin[SIGN] ? -value : value;
            return true;
        }
        in->others = true;
        for (int part = 0; part < 2 && in->at < in->end && *in->at == '{'; part++) {
            const char *behind = behind_braces(in->at, in->end);
            in->at = behind ? behind : in->end;
        }
    }
    return false;
}

static bool last_number(struct numbers in, bool all_numbers, double *ret_value)
{
    bool found = false;
    while (next_number(&in)) found = true;
    if (!found || (all_numbers && in.others)) return false;
    *ret_value = in.value;
    return true;
}

static struct numbers numbers_of(const char *text, const char *end)
{
    return (struct numbers){.text = text, .end = end, .at = text};
}

bool number_last(const char *text, double *ret_value)
{
    return last_number(numbers_of(text, text + strlen(text)), false, ret_value);
}

// ---- the answer of a solution -------------------------------------------------------------------

// The first number of what follows a mark, or the last in its last \boxed{...}. None in one that
// holds a fraction of other things than two numbers: what else it holds is not the answer.
static bool marked_number(const char *tail, const char *end, double *ret_value)
{
    static const char box[] = "\\boxed{";
    const char *content = behind_last(tail, end, box);
    struct numbers in = numbers_of(tail, end);
    if (content) {
        const char *close = behind_braces(content - 1, end), *to = close ? close - 1 : end;
        const char *equal = behind_last(content, to, "=");
        return (equal && last_number(numbers_of(equal, to), true, ret_value)) ||
               last_number(numbers_of(content, to), true, ret_value);
    }
    if (!next_number(&in) || in.others) return false;
    *ret_value = in.value;
    return true;
}

/* A Markdown heading, "#### Step 2: ...", is no answer's mark: a word that does not introduce an
 * answer ("#### Final answer: 18") stands before any number. The text's last line is one only where
 * a colon is behind its number: "#### about 5" is an answer; as is, in any line, a number that
 * something says to be one: "x = 5", "Total: 18". */
static bool is_heading(const char *line, const char *end)
{
    static struct prose heading = {"\\G \\ * \\#{4,}+ (?: [^A-Za-z\\\\\\d] | "
                                   "(?i:the|final|answer|is)(?![A-Za-z]) )*+ [A-Za-z]",
                                   NULL};
    static struct prose label = {"[=:] [\\ $*\\\\{(-]* \\z", NULL};
    struct prose_match m;
    struct numbers in = numbers_of(line, end);
    if (!prose_find(&heading, line, line, end, &m)) return false;
    const bool last = end[strspn(end, " \n")] == '\0';
    in.at = m.end[0] - 1;
    if (!next_number(&in)) return !last;
    return !prose_find(&label, line, line, in.start, &m) && (!last || *in.at == ':');
}

bool number_answer(const char *text, double *ret_value)
{
    const char *mark = NULL, *said, *all = text + strlen(text);
    double last = 0;
    bool found = false;
    for (const char *line = text, *end; line; line = *end ? end + 1 : NULL) {
        end = line + strcspn(line, "\n");
        if (is_heading(line, end)) continue;
        const char *tail = behind_last(line, end, "####");
        if (tail) mark = tail;
        found |= last_number(numbers_of(line, end), false, &last);
    }
    if (mark) return marked_number(mark, all, ret_value);
    said = behind_last(text, all, "the answer is");
    if (said && marked_number(said, all, ret_value)) return true;
    if (behind_last(text, all, "\\boxed{")) return marked_number(text, all, ret_value);
    if (found) *ret_value = last;
    return found;
}

bool number_same(double a, double b)
{
    return fabs(a - b) <= 1e-9 * fmin(1, fmax(fabs(a), fabs(b)));
}
