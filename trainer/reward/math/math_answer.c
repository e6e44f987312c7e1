/* math_answer.c: finds formulas and numbers in prose and ranks them. Stateless; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/math/math.h"
#include "trainer/reward/math/prose.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SPANS 512 // of a text, the last ones
#define NEAR      50  // characters between "answer" and what it announces
#define FAR       100 // between "final answer" and "is"

enum rank { RANK_BOXED, RANK_FINAL, RANK_COLON, RANK_ANSWER, RANK_PLAIN };

struct span {
    const char *begin, *end;                      // a formula's inside, or a number
    const char *from, *to;                        // with its signs, and a percent sign behind it
    enum { ALL, FORMULA, FRACTION, NUMBER } kind; // also the groups of the expression below
    bool percent;
    enum rank rank;
    int joined; // spans before this one that it makes a list with: "$1$ and $2$"
};

struct spans {
    const char *text, *end; // where they are
    struct span items[MAX_SPANS];
    int n;
};

// Whether the expression is found between the two.
static bool holds(struct prose *p, const char *begin, const char *end)
{
    struct prose_match m;
    return prose_find(p, begin, begin, end, &m);
}

// ---- formulas and numbers -----------------------------------------------------------------------

#define DOLLARS "\\$\\$(?!\\$) ([^$\\\\]*+ (?: \\\\. [^$\\\\]*+ )*+) \\$\\$"
#define DOLLAR  "(?<![\\\\\\d]) \\$(?!\\$) ([^$\\\\\n]*+ (?: \\\\. [^$\\\\\n]*+ )*+) \\$"
// Of these two the end must be near: a text may begin many and end none.
#define BRACKET "\\\\\\[ (?=.{1,4000}?\\\\\\]) ([^\\\\]*+ (?: \\\\[^\\]] [^\\\\]*+ )*+) \\\\\\]"
#define PAREN   "\\\\\\( (?=[^\n]{1,4000}?\\\\\\)) ([^\\\\\n]*+ (?: \\\\[^)] [^\\\\\n]*+ )*+) \\\\\\)"
// The pound's, yen's, euro's, rupee's and rouble's signs.
#define CURRENCY "(?: \\$ | \xc2\xa3 | \xc2\xa5 | \xe2\x82\xac | \xe2\x82\xb9 | \xe2\x82\xbd )?+"
// Numbers with an operator in between: "3/4", "(1+2)*3".
#define EXPRESSION                                                                                 \
    "-?\\(?-?\\d [\\d.\\ \n]{0,250}+ [-+*/^()] [-+*/^().\\d\\ \n]{0,250} (?<=[\\d)])"              \
    "(?= [\\s.,:)$] | \\z )"
// Digits with thousands ("1,234", "1 234"), or a decimal point or comma.
#define DIGITS                                                                                     \
    "-? (?: [1-9]\\d{0,2} (?: [,\\ ]\\d{3}(?!\\d) )++ (?:\\.\\d+)? |"                              \
    " (?=[.,]?\\d) \\d*+ (?:[.,]\\d+)? )"
#define PERCENT "\\s*+ (?i: \\\\?% | (?:percentage|percent|pct)(?![A-Za-z]) )"

static struct prose a_span = {"(?|" DOLLARS "|" BRACKET "|" DOLLAR "|" PAREN
                              ") | (-?\\\\frac)(?=\\{) |"
                              "(?<![^\\s=*])" CURRENCY "(?=[-.(\\d]) (" EXPRESSION "|" DIGITS ")",
                              NULL};
static struct prose a_percent = {"\\G" PERCENT, NULL};

// The next one from `at` on.
static bool next_span(const struct spans *all, const char *at, struct span *ret)
{
    struct prose_match m;
    while (prose_find(&a_span, all->text, at, all->end, &m)) {
        struct span s = {.kind = m.begin[FORMULA] ? FORMULA : m.begin[NUMBER] ? NUMBER : FRACTION};
        at = m.end[ALL];
        s.begin = m.begin[s.kind];
        s.end = m.end[s.kind];
        s.from = m.begin[ALL];
        s.to = at;
        if (s.kind == FRACTION) { // \frac{1}{2} outside of any formula
            const char *end = behind_braces(at, all->end);
            if (!end || *end != '{' || !(end = behind_braces(end, all->end))) continue;
            s.end = s.to = end;
        }
        if (s.end - s.begin >= PROSE_LONGEST) {
            at = s.begin;
            continue;
        }
        s.percent = prose_find(&a_percent, all->text, s.to, all->end, &m);
        if (s.percent) s.to = m.end[ALL];
        *ret = s;
        return true;
    }
    return false;
}

// ---- which of them ------------------------------------------------------------------------------
// Behind the word, where it ends within `max` characters before `at`; NULL: it does not.
static const char *announced_by(const char *text, const char *at, const char *word, size_t max)
{
    max += strlen(word);
    return behind_last((size_t)(at - text) > max ? at - max : text, at, word);
}

// before: the span before it, or NULL. "answer" announces what comes first behind it, or what is
// behind the last equals sign.
static enum rank rank_of(const struct spans *all, const struct span *s, const struct span *before)
{
    static struct prose is = {"\\A (?: (?!\\sis). )*+ \\s is [\\s:]* \\z", NULL};
    static struct prose equals = {"= \\s* \\z", NULL}, hope = {"\\A \\.? \\s* I\\ hope", NULL};
    const char *final = announced_by(all->text, s->from, "final answer", FAR + 4);
    const char *answer = announced_by(all->text, s->from, "answer", NEAR);
    if (final && holds(&is, final, s->from))
        return holds(&hope, s->to, all->end) ? RANK_BOXED : RANK_FINAL;
    if (!answer || (before && before->from >= answer && !holds(&equals, answer, s->from)))
        return RANK_PLAIN;
    return *answer == ':' ? RANK_COLON : RANK_ANSWER;
}

// Whether nothing but "and", "or" or a comma is between.
static bool joins(const char *begin, const char *end)
{
    static struct prose words = {"\\A \\s*+ (?: (?:and|or|,) \\s*+ )++ \\z", NULL};
    return holds(&words, begin, end);
}

static void find_spans(struct spans *all)
{
    struct span one;
    for (const char *at = all->text; next_span(all, at, &one); at = one.to) {
        const struct span *last = all->n ? &all->items[all->n - 1] : NULL;
        one.rank = rank_of(all, &one, last);
        if (one.kind == FORMULA && last && last->to != last->end && joins(last->to, one.from) &&
            last->joined < 5) {
            one.joined = last->joined + 1;
            if (last->rank < one.rank) one.rank = last->rank;
        }
        if (all->n == MAX_SPANS) {
            all->n /= 2;
            memmove(all->items, all->items + all->n, (size_t)all->n * sizeof *all->items);
            for (int i = 0; i < all->n && all->items[i].joined > i; i++) all->items[i].joined = i;
        }
        all->items[all->n++] = one;
    }
}

// ---- boxes --------------------------------------------------------------------------------------
struct box {
    const char *from, *begin, *end, *behind;
    const struct span *in; // the formula that it stands in; NULL: none
};

// The next one from `at` on; one that is not closed reaches to the text's end.
static bool next_box(const struct spans *all, const char *at, struct box *ret)
{
    static struct prose box = {"\\\\(?:boxed|fbox) \\s* \\{", NULL};
    struct prose_match m;
    if (!prose_find(&box, all->text, at, all->end, &m)) return false;
    const char *behind = behind_braces(m.end[0] - 1, all->end);
    *ret = (struct box){.from = m.begin[0],
                        .begin = m.end[0],
                        .end = behind ? behind - 1 : all->end,
                        .behind = behind ? behind : all->end};
    for (int i = 0; i < all->n; i++)
        if (all->items[i].begin <= ret->from && ret->from < all->items[i].end)
            ret->in = &all->items[i];
    return true;
}

static bool same_content(const struct box *a, const struct box *b)
{
    const size_t n = (size_t)(a->end - a->begin);
    return n == (size_t)(b->end - b->begin) && memcmp(a->begin, b->begin, n) == 0;
}

// Whether two boxes make a list.
static bool are_near(const struct box *a, const struct box *b)
{
    static struct prose join = {"[,;] | (?<![A-Za-z])(?:and|or)(?![A-Za-z])", NULL};
    if (a->in && b->in) return a->in == b->in || joins(a->in->to, b->in->from);
    if (b->from - a->behind < 10) return true;
    return !same_content(a, b) && b->from - a->behind < 70 && holds(&join, a->behind, b->from);
}

// The last boxes that stand together; ret_end: behind them.
static bool take_boxes(const struct spans *all, struct bytes *ret, const char **ret_end)
{
    static struct prose percent = {"\\G (?: \\$ | \\\\[)\\]] )*+" PERCENT, NULL};
    struct box box, last = {0};
    for (const char *at = all->text; next_box(all, at, &box); at = box.end) {
        const bool near = last.begin && are_near(&last, &box);
        if (!near) bytes_release(ret);
        if (!near || !same_content(&last, &box)) {
            if (near) bytes_puts(ret, ",");
            bytes_append(ret, box.begin, (size_t)(box.end - box.begin));
        }
        last = box;
    }
    if (!last.begin) return false;
    *ret_end = last.behind;
    if (holds(&percent, last.behind, all->end)) bytes_puts(ret, "\\%");
    return true;
}

// ---- the whole ----------------------------------------------------------------------------------
static void put_span(const struct span *s, struct bytes *ret)
{
    for (const struct span *one = s - s->joined; one <= s; one++) {
        if (one > s - s->joined) bytes_puts(ret, ",");
        bytes_append(ret, one->begin, (size_t)(one->end - one->begin));
        if (one->percent) bytes_puts(ret, "\\%");
    }
}

// A number of prose, without its spaces and thousands' commas, its decimal comma a point.
static void put_number(const struct span *s, struct bytes *ret)
{
    const char *comma = memchr(s->begin, ',', (size_t)(s->end - s->begin));
    const bool decimal = comma && !memchr(comma + 1, ',', (size_t)(s->end - comma - 1)) &&
                         !memchr(comma, '.', (size_t)(s->end - comma)) &&
                         (s->end - comma != 4 || s->begin[0] == '0');
    for (const char *at = s->begin; at < s->end; at++) {
        if (*at == ',' && decimal)
            bytes_puts(ret, ".");
        else if (*at != ',' && !(*at == ' ' && isdigit((unsigned char)at[1]) && at > s->begin &&
                                 isdigit((unsigned char)at[-1])))
            bytes_append(ret, at, 1);
    }
    if (s->percent) bytes_puts(ret, "\\%");
}

int math_answers(const char *text, struct bytes ret[MATH_ANSWERS])
{
    struct spans *all = calloc(1, sizeof *all);
    struct bytes boxes = BYTES_INIT;
    const char *box_end = NULL;
    int n = 0;
    if (!all) return 0;
    all->text = text;
    all->end = text + strlen(text);
    find_spans(all);
    bool boxed = take_boxes(all, &boxes, &box_end);
    for (int rank = RANK_BOXED; rank <= RANK_PLAIN && n < MATH_ANSWERS; rank++)
        for (int i = all->n - 1; i >= 0 && n < MATH_ANSWERS; i--) {
            const struct span *s = &all->items[i];
            if ((int)s->rank != rank) continue;
            if (boxed && (rank > RANK_BOXED || s->end < box_end)) {
                ret[n++] = boxes;
                boxes = (struct bytes)BYTES_INIT;
                boxed = false;
            }
            if (n == MATH_ANSWERS) break;
            (s->kind == NUMBER ? put_number : put_span)(s, &ret[n++]);
        }
    if (boxed && n < MATH_ANSWERS) {
        ret[n++] = boxes;
        boxes = (struct bytes)BYTES_INIT;
    }
    bytes_release(&boxes);
    free(all);
    return n;
}
