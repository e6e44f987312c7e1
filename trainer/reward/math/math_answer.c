/* math_answer.c: finds formulas and numbers in prose and ranks them. Stateless; any thread. */
#include "trainer/reward/math/math.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SPANS 512  // of a text, the last ones
#define LONGEST   4000 // formula, in characters
#define NEAR      50   // characters between "answer" and what it announces
#define FAR       100  // between "final answer" and "is"

enum rank { RANK_BOXED, RANK_FINAL, RANK_COLON, RANK_ANSWER, RANK_PLAIN };

struct span { // a formula's inside, or a number
    const char *begin, *end;
    const char *from, *to; // with its signs, and a percent sign behind it
    bool percent, number;
    enum rank rank;
    int joined; // spans before this one that it makes a list with: "$1$ and $2$"
};

struct spans {
    struct span items[MAX_SPANS];
    int n;
};

static bool starts(const char *at, const char *word)
{
    return strncmp(at, word, strlen(word)) == 0;
}

static bool starts_any_case(const char *at, const char *word)
{
    return strncasecmp(at, word, strlen(word)) == 0;
}

static const char *skip_space(const char *at)
{
    while (isspace((unsigned char)*at)) at++;
    return at;
}

// Behind a percent sign or word at `at`; NULL: there is none.
static const char *behind_percent(const char *at)
{
    static const char *const words[] = {"\\%", "%", "percentage", "percent", "pct"};
    at = skip_space(at);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        const char *end = at + strlen(words[i]);
        const bool word = isalpha((unsigned char)words[i][0]);
        if (starts_any_case(at, words[i]) && !(word && isalpha((unsigned char)*end))) return end;
    }
    return NULL;
}

static void add(struct spans *all, struct span one)
{
    const char *percent = behind_percent(one.to);
    one.percent = percent != NULL;
    if (percent) one.to = percent;
    if (all->n == MAX_SPANS) {
        memmove(all->items, all->items + MAX_SPANS / 2, MAX_SPANS / 2 * sizeof *all->items);
        all->n = MAX_SPANS / 2;
    }
    all->items[all->n++] = one;
}

// ---- formulas -----------------------------------------------------------------------------------
static const struct {
    const char *open, *close;
    bool one_line;
} signs[] = {{"$$", "$$", false}, {"\\[", "\\]", false}, {"$", "$", true}, {"\\(", "\\)", true}};

// Its end: where `close` begins; NULL: it is none.
static const char *formula_end(const char *at, const char *close, bool one_line)
{
    for (const char *begin = at; *at && at - begin < LONGEST; at++) {
        if (one_line && *at == '\n') return NULL;
        if (starts(at, close) && at > begin) return at;
        if (*at == '\\' && at[1] && !starts(at, close))
            at++;
        else if (*close == '$' && *at == '$')
            return NULL;
    }
    return NULL;
}

// Takes the formula that begins at `at`; returns where the text goes on, NULL: none does.
static const char *take_formula(const char *text, const char *at, struct spans *all)
{
    if (*at != '$' && *at != '\\') return NULL;
    if (*at == '$' && at > text && (at[-1] == '\\' || isdigit((unsigned char)at[-1])) &&
        at[1] != '$')
        return NULL;
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) {
        if (!starts(at, signs[i].open)) continue;
        const char *begin = at + strlen(signs[i].open);
        const char *end = formula_end(begin, signs[i].close, signs[i].one_line);
        if (!end) continue;
        add(all, (struct span){
                     .begin = begin, .end = end, .from = at, .to = end + strlen(signs[i].close)});
        return end + strlen(signs[i].close);
    }
    return NULL;
}

// Behind the braces that open at `at`; NULL: they are not closed.
static const char *behind_braces(const char *at)
{
    int open = 0;
    for (const char *begin = at; *at && at - begin < LONGEST; at++) {
        open += *at == '{' ? 1 : *at == '}' ? -1 : 0;
        if (open == 0) return at + 1;
    }
    return NULL;
}

// \frac{1}{2} outside of any formula.
static const char *take_fraction(const char *text, const char *at, struct spans *all)
{
    const char *from = at > text && at[-1] == '-' ? at - 1 : at, *end;
    if (!starts(at, "\\frac{") || !(end = behind_braces(at + 5)) || *end != '{') return NULL;
    end = behind_braces(end);
    if (end) add(all, (struct span){.begin = from, .end = end, .from = from, .to = end});
    return end;
}

// ---- numbers ------------------------------------------------------------------------------------
static bool is_digit(char c)
{
    return isdigit((unsigned char)c);
}

// Behind a currency's sign at `at`, if there is one.
static const char *behind_currency(const char *at)
{
    static const char *const currencies[] = {
        "$", "\xc2\xa3", "\xc2\xa5", "\xe2\x82\xac", "\xe2\x82\xb9", "\xe2\x82\xbd"};
    for (size_t i = 0; i < sizeof currencies / sizeof *currencies; i++)
        if (starts(at, currencies[i])) return at + strlen(currencies[i]);
    return at;
}

// Digits with thousands ("1,234", "1 234"), or a decimal point or comma.
static const char *number_end(const char *at)
{
    const char *begin = at += *at == '-';
    while (is_digit(*at)) at++;
    const bool groups = at > begin && at - begin <= 3 && *begin != '0';
    const char *first = at;
    while (groups && (*at == ',' || *at == ' ') && is_digit(at[1]) && is_digit(at[2]) &&
           is_digit(at[3]) && !is_digit(at[4]))
        at += 4;
    if ((*at == '.' || (*at == ',' && at == first)) && is_digit(at[1]))
        for (at++; is_digit(*at);) at++;
    return at > begin ? at : NULL;
}

static bool is_operator(char c)
{
    return c && strchr("+-*/^()", c);
}

// Behind an expression of numbers with an operator in it: "3/4", "(1+2)*3 "; NULL: there is none.
static const char *expression_end(const char *at)
{
    const char *begin = at, *end = NULL;
    bool any = false;
    if (*at == '-') at++;
    if (*at == '(') at++;
    if (*at == '-') at++;
    if (!is_digit(*at)) return NULL;
    for (; at - begin < LONGEST / 16; at++) {
        if (!is_digit(*at) && !is_operator(*at) && (!*at || !strchr(". \n", *at))) break;
        any |= is_operator(*at) && at > begin;
        const char after = at[1];
        const bool closes =
            after == '\0' || isspace((unsigned char)after) || strchr(".,:)$", after);
        if (any && (is_digit(*at) || *at == ')') && closes) end = at + 1;
    }
    return end;
}

static const char *take_number(const char *text, const char *at, struct spans *all)
{
    const bool anchored =
        at == text || isspace((unsigned char)at[-1]) || at[-1] == '=' || at[-1] == '*';
    const char *begin = anchored ? behind_currency(at) : at;
    if (!anchored || !(is_digit(*begin) || strchr("-.(", *begin)) || !*begin) return NULL;
    const char *end = expression_end(begin);
    if (!end && *begin != '(') end = number_end(begin);
    if (end)
        add(all, (struct span){.begin = begin, .end = end, .from = at, .to = end, .number = true});
    return end;
}

// ---- which of them ------------------------------------------------------------------------------
// Behind the word, where it ends within `max` characters before `at`; NULL: it does not.
static const char *announced_by(const char *text, const char *at, const char *word, long max)
{
    const long n = (long)strlen(word);
    for (const char *from = at - n; from >= text && at - n - from <= max; from--)
        if (starts_any_case(from, word)) return from + n;
    return NULL;
}

static bool has_is(const char *from, const char *to)
{
    for (const char *at = from; at + 2 <= to; at++)
        if (starts(at, "is") && isspace((unsigned char)at[-1])) {
            for (at += 2; at < to && (isspace((unsigned char)*at) || *at == ':');) at++;
            return at >= to;
        }
    return false;
}

// before: the span before it, or NULL. "answer" announces what comes first behind it, or what is
// behind the last equals sign.
static enum rank rank_of(const char *text, const struct span *s, const struct span *before)
{
    const char *final = announced_by(text, s->from, "final answer", FAR + 4);
    const char *answer = announced_by(text, s->from, "answer", NEAR);
    const char *sign = s->from;
    while (sign > text && isspace((unsigned char)sign[-1])) sign--;
    const bool equals = sign > text && sign[-1] == '=';
    if (!equals && before && answer && before->from >= answer) answer = NULL;
    if (final && has_is(final, s->from)) {
        const char *hope = s->to + (*s->to == '.');
        return starts(skip_space(hope), "I hope") ? RANK_BOXED : RANK_FINAL;
    }
    if (!answer) return RANK_PLAIN;
    return *answer == ':' ? RANK_COLON : RANK_ANSWER;
}

// Whether nothing but "and", "or" or a comma is between.
static bool joins(const char *at, const char *to)
{
    bool any = false;
    while (at < to) {
        const size_t n = starts(at, "and") ? 3 : starts(at, "or") ? 2 : *at == ',' ? 1 : 0;
        if (n == 0 && !isspace((unsigned char)*at)) return false;
        any |= n > 0;
        at += n > 0 ? n : 1;
    }
    return any;
}

static void find_spans(const char *text, struct spans *all)
{
    for (const char *at = text; *at;) {
        const char *next = take_formula(text, at, all);
        const bool formula = next != NULL;
        if (!next) next = take_fraction(text, at, all);
        if (!next) next = take_number(text, at, all);
        if (next) {
            struct span *s = &all->items[all->n - 1], *last = all->n > 1 ? s - 1 : NULL;
            s->rank = rank_of(text, s, last);
            if (formula && last && last->to != last->end && joins(last->to, s->from) &&
                last->joined < 5) {
                s->joined = last->joined + 1;
                if (last->rank < s->rank) s->rank = last->rank;
            }
        }
        at = next ? next : at + 1;
    }
}

// ---- boxes --------------------------------------------------------------------------------------
struct box {
    const char *from, *begin, *end;
    const struct span *in; // the formula that it stands in; NULL: none
};

static bool take_box(const struct spans *all, const char *at, struct box *ret)
{
    const char *open = starts(at, "\\boxed") ? at + 6 : starts(at, "\\fbox") ? at + 5 : NULL;
    if (!open) return false;
    open = skip_space(open);
    if (*open != '{') return false;
    const char *end = behind_braces(open);
    *ret = (struct box){at, open + 1, end ? end - 1 : open + strlen(open), NULL};
    for (int i = 0; i < all->n; i++)
        if (all->items[i].begin <= at && at < all->items[i].end) ret->in = &all->items[i];
    return true;
}

static bool is_word(const char *at, const char *word)
{
    return starts(at, word) && !isalpha((unsigned char)at[-1]) &&
           !isalpha((unsigned char)at[strlen(word)]);
}

// Whether two boxes make a list.
static bool are_near(const struct box *a, const struct box *b)
{
    const char *at = a->end + (*a->end == '}');
    const long gap = b->from - at, n = a->end - a->begin;
    const bool same = n == b->end - b->begin && memcmp(a->begin, b->begin, (size_t)n) == 0;
    if (a->in && b->in) return a->in == b->in || joins(a->in->to, b->in->from);
    if (gap < 10) return true;
    if (same || gap >= 70) return false;
    for (; at < b->from; at++)
        if (*at == ',' || *at == ';' || is_word(at, "and") || is_word(at, "or")) return true;
    return false;
}

// The last boxes that stand together; ret_end: behind them.
static bool take_boxes(const struct spans *all, const char *text, struct bytes *ret,
                       const char **ret_end)
{
    struct box box, last = {0};
    const char *percent;
    for (const char *at = text; (at = strchr(at, '\\')); at++) {
        if (!take_box(all, at, &box)) continue;
        const bool near = last.begin && are_near(&last, &box);
        if (!near) bytes_release(ret);
        const long n = box.end - box.begin;
        const bool same =
            near && n == last.end - last.begin && memcmp(box.begin, last.begin, (size_t)n) == 0;
        if (near && !same) bytes_puts(ret, ",");
        if (!same) bytes_append(ret, box.begin, (size_t)n);
        last = box;
        if (*box.end == '\0') break;
        at = box.end - 1;
    }
    if (!last.begin) return false;
    const char *behind = last.end + (*last.end == '}');
    *ret_end = behind;
    while (*behind == '$' || starts(behind, "\\)") || starts(behind, "\\]"))
        behind += *behind == '$' ? 1 : 2;
    if ((percent = behind_percent(behind))) bytes_puts(ret, "\\%");
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
        else if (*at != ',' &&
                 !(*at == ' ' && is_digit(at[1]) && at > s->begin && is_digit(at[-1])))
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
    find_spans(text, all);
    bool boxed = take_boxes(all, text, &boxes, &box_end);
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
            if (s->number)
                put_number(s, &ret[n++]);
            else
                put_span(s, &ret[n++]);
        }
    if (boxed && n < MATH_ANSWERS) {
        ret[n++] = boxes;
        boxes = (struct bytes)BYTES_INIT;
    }
    bytes_release(&boxes);
    free(all);
    return n;
}
