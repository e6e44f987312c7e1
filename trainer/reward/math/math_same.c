/* math_same.c: compares two trees: what they assign, as relations, as sets and intervals, as lists
 * in order or without, as matrices, as words, and in the end as numbers at a few points, which is
 * how expressions with letters are compared. Stateless; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/math/math.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

#define N_POINTS   8
#define MIN_POINTS 3  // at which both must have values
#define MAX_ITEMS  64 // of a list
#define MAX_ENDS   64 // of intervals

struct item { // a list's element; 1 +- 2 is two of them
    const struct math_node *node;
    int sign; // 1 or -1; 0: as it stands, both where there are both
};

static bool same(struct item wanted, struct item got);

static struct item item_of(const struct math_node *n)
{
    return (struct item){n, 0};
}

static bool is_either(const struct math_node *n)
{
    return n->kind == MATH_EITHER;
}

static bool any_node(const struct math_node *n, bool (*is)(const struct math_node *))
{
    if (is(n)) return true;
    for (const struct math_node *a = n->first; a; a = a->next)
        if (any_node(a, is)) return true;
    return false;
}

// ---- numbers ------------------------------------------------------------------------------------
static bool eval_at(struct item x, int number, struct math_value *ret)
{
    const struct math_point point = {.number = number, .sign = x.sign < 0 ? -1 : 1};
    return math_eval(x.node, &point, ret);
}

// 28% is also 28.
static bool same_percent(struct item wanted, struct item got)
{
    struct math_value a, b;
    if (wanted.node->kind != MATH_PERCENT && got.node->kind != MATH_PERCENT) return false;
    if (wanted.node->kind == MATH_PERCENT) wanted.node = wanted.node->first;
    if (got.node->kind == MATH_PERCENT) got.node = got.node->first;
    return eval_at(wanted, 0, &a) && eval_at(got, 0, &b) && math_value_same(&a, &b) && a.exact &&
           b.exact && cimag(a.x) == 0 && creal(a.x) == floor(creal(a.x)) && cimag(b.x) == 0 &&
           creal(b.x) == floor(creal(b.x));
}

static bool same_numbers(struct item wanted, struct item got)
{
    const char *x = wanted.node->name, *y = got.node->name;
    const size_t digits = strcspn(x, "_");
    int n = 0;
    if (wanted.node->kind == MATH_NUMBER && got.node->kind == MATH_NUMBER &&
        digits == strcspn(y, "_") && !x[digits] != !y[digits] && memcmp(x, y, digits) == 0)
        return true; // 204_5 is also given as 204
    if (same_percent(wanted, got)) return true;
    for (int i = 0; i < N_POINTS; i++) {
        struct math_value a, b;
        if (!eval_at(wanted, i, &a) || !eval_at(got, i, &b)) continue;
        // a decimal number is as good as six of its decimals
        const bool rounded = (a.decimal || b.decimal) && cimag(a.x) == 0 && cimag(b.x) == 0 &&
                             fabs(round(creal(a.x) * 1e6) - round(creal(b.x) * 1e6)) < 0.5;
        if (!rounded && !math_value_same(&a, &b)) return false;
        n++;
    }
    return n >= MIN_POINTS;
}

// ---- words --------------------------------------------------------------------------------------
// The letters of words, or of a product of letters, which words without \text are.
static bool spell(const struct math_node *n, char ret[2 * MATH_NAME])
{
    size_t used = strlen(ret);
    if (n->kind == MATH_TEXT || n->kind == MATH_SYMBOL) {
        for (const char *s = n->name; *s; s++) {
            if (isspace((unsigned char)*s)) continue;
            if (used + 1 >= 2 * MATH_NAME) return false;
            ret[used++] = (char)tolower((unsigned char)*s);
        }
        ret[used] = '\0';
        return true;
    }
    if (n->kind != MATH_PRODUCT) return false;
    for (const struct math_node *a = n->first; a; a = a->next)
        if (!spell(a, ret)) return false;
    return true;
}

// ---- matrices -----------------------------------------------------------------------------------
// One after another, of rows entry by entry.
static bool same_in_order(const struct math_node *wanted, const struct math_node *got, bool rows)
{
    const struct math_node *a = wanted->first, *b = got->first;
    if (wanted->n != got->n) return false;
    for (; a; a = a->next, b = b->next)
        if (rows ? !same_in_order(a, b, false) : !same(item_of(a), item_of(b))) return false;
    return true;
}

// Of sums and products too, by what their entries are worth.
static bool same_matrices(const struct math_node *wanted, const struct math_node *got)
{
    if (wanted->kind == MATH_MATRIX && got->kind == MATH_MATRIX)
        return same_in_order(wanted, got, true);
    for (int i = 0; i < MIN_POINTS; i++) {
        const struct math_point point = {.number = i, .sign = 1};
        struct math_matrix a, b;
        if (!math_eval_matrix(wanted, &point, &a) || a.number ||
            !math_eval_matrix(got, &point, &b) || b.number || a.rows != b.rows || a.cols != b.cols)
            return false;
        for (int e = 0; e < a.rows * a.cols; e++)
            if (!math_value_same(&a.entries[e], &b.entries[e])) return false;
    }
    return true;
}

// ---- intervals and other sets of real numbers ---------------------------------------------------
static bool is_ordered(const struct math_node *n)
{
    return n->kind == MATH_LIST && (n->open == '(' || n->open == '[');
}

static bool real_of(const struct math_node *n, double *ret)
{
    const struct math_point anywhere = {.sign = 1};
    struct math_value v;
    if (n->kind == MATH_INFINITY) {
        *ret = INFINITY;
        return true;
    }
    if (n->kind == MATH_NEGATIVE && n->first->kind == MATH_INFINITY) {
        *ret = -INFINITY;
        return true;
    }
    if (any_node(n, math_is_letter) || !math_eval(n, &anywhere, &v) || cimag(v.x) != 0)
        return false;
    *ret = creal(v.x);
    return true;
}

static bool is_interval(const struct math_node *n)
{
    double x;
    return is_ordered(n) && n->n == 2 && real_of(n->first, &x) && real_of(n->last, &x);
}

static bool is_set(const struct math_node *n)
{
    return is_interval(n) || n->kind == MATH_UNION || n->kind == MATH_INTERSECTION ||
           n->kind == MATH_DIFFERENCE;
}

static bool same_intervals(const struct math_node *wanted, const struct math_node *got)
{
    double a, b;
    if (wanted->open != got->open || wanted->close != got->close) return false;
    for (int last = 0; last < 2; last++) {
        const struct math_node *x = last ? wanted->last : wanted->first,
                               *y = last ? got->last : got->first;
        if (real_of(x, &a) && real_of(y, &b) && (isinf(a) || isinf(b))
                ? a != b
                : !same(item_of(x), item_of(y)))
            return false;
    }
    return true;
}

struct ends {
    double at[MAX_ENDS];
    int n;
};

static void add_end(struct ends *ends, double x)
{
    if (isfinite(x) && ends->n < MAX_ENDS) ends->at[ends->n++] = x;
}

// Every number that stands in it by itself, of either sign: sets change nowhere else.
static void collect_ends(const struct math_node *n, struct ends *ret)
{
    double x;
    if (n->kind < MATH_RELATION && real_of(n, &x)) {
        add_end(ret, x);
        add_end(ret, -x);
        return;
    }
    for (const struct math_node *a = n->first; a; a = a->next) collect_ends(a, ret);
}

// The one letter, or function of nobody's, that a relation is about; NULL: several, or none.
static const char *unknown_of(const struct math_node *n, const char *found)
{
    static const char several[] = "";
    if (math_is_letter(n) || (n->kind == MATH_CALL && strlen(n->name) == 1))
        return !found || strcmp(found, n->name) == 0 ? n->name : several;
    for (const struct math_node *a = n->first; a; a = a->next) found = unknown_of(a, found);
    return found;
}

static bool holds(const char *relation, double a, double b)
{
    switch (relation[0]) {
    case '<':
        return relation[1] ? a <= b : a < b;
    case '>':
        return relation[1] ? a >= b : a > b;
    case '!':
        return a != b;
    default:
        return a == b;
    }
}

// What is in it: a set's elements; of a relation, whatever makes it true.
static bool contains(const struct math_node *n, double x, const char *letter)
{
    const struct math_node *a = n->first, *b = n->last;
    const struct math_point point = {.sign = 1, .letter = letter, .at = x};
    struct math_value left, right;
    double low, high;
    switch (n->kind) {
    case MATH_CHAIN:
        if (!math_eval(a, &point, &left)) return false;
        for (b = a->next; b; b = b->next, left = right)
            if (!math_eval(b->first, &point, &right) ||
                !holds(b->name, creal(left.x), creal(right.x)))
                return false;
        return true;
    case MATH_UNION:
        return contains(a, x, letter) || contains(b, x, letter);
    case MATH_INTERSECTION:
        return contains(a, x, letter) && contains(b, x, letter);
    case MATH_DIFFERENCE:
        return contains(a, x, letter) && !contains(b, x, letter);
    default:
        break;
    }
    if (is_interval(n) && real_of(a, &low) && real_of(b, &high))
        return (n->open == '[' ? x >= low : x > low) && (n->close == ']' ? x <= high : x < high);
    for (; a; a = a->next)
        if (real_of(a, &low) && low == x) return true;
    return false;
}

// The same numbers are in both, by what is in them at their ends, beside them and between. wanted
// may be a relation.
static bool same_sets(const struct math_node *wanted, const struct math_node *got)
{
    struct ends ends = {.n = 0};
    const bool relation = wanted->kind == MATH_CHAIN;
    const char *letter = relation ? unknown_of(wanted, NULL) : NULL;
    if (relation && (!letter || !*letter)) return false;
    collect_ends(wanted, &ends);
    collect_ends(got, &ends);
    if (ends.n == 0) add_end(&ends, 0);
    for (int i = 0; i < ends.n; i++) {
        const double x = ends.at[i], step = 1e-7 * fmax(1, fabs(x));
        double next = x + 2;
        for (int k = 0; k < ends.n; k++)
            if (ends.at[k] > x + 3 * step && ends.at[k] < next) next = ends.at[k];
        const double points[] = {x, x - step, x + step, (x + next) / 2, x + 1e6, x - 1e6};
        for (size_t k = 0; k < sizeof points / sizeof *points; k++)
            if (contains(wanted, points[k], letter) != contains(got, points[k], NULL)) return false;
    }
    return true;
}

// ---- lists --------------------------------------------------------------------------------------
static bool is_list(const struct math_node *n)
{
    return n->kind == MATH_LIST || n->kind == MATH_EMPTY || n->kind == MATH_EITHER ||
           (n->kind < MATH_RELATION && any_node(n, is_either));
}

// The elements, each once; -1: too many.
static int items_of(const struct math_node *n, struct item ret[MAX_ITEMS])
{
    int n_items = 0;
    if (n->kind == MATH_EMPTY) return 0;
    const bool list = n->kind == MATH_LIST;
    for (const struct math_node *a = list ? n->first : n; a; a = list ? a->next : NULL) {
        const bool either = a->kind != MATH_LIST && any_node(a, is_either);
        for (int sign = 1; sign >= (either ? -1 : 1); sign -= 2) {
            const struct item one = {a, either ? sign : 0};
            bool there = false;
            for (int i = 0; i < n_items && !is_ordered(n); i++) there |= same(ret[i], one);
            if (there) continue;
            if (n_items == MAX_ITEMS) return -1;
            ret[n_items++] = one;
        }
    }
    return n_items;
}

static bool same_lists(const struct math_node *wanted, const struct math_node *got)
{
    struct item a[MAX_ITEMS], b[MAX_ITEMS];
    const int n = items_of(wanted, a);
    bool taken[MAX_ITEMS] = {false};
    if (n < 0 || items_of(got, b) != n) return false;
    // an order that is asked for counts, whatever brackets the answer has
    const bool ordered = is_ordered(wanted);
    for (int i = 0; i < n; i++) {
        int k = ordered ? i : 0;
        while (k < n && (taken[k] || !same(a[i], b[k]))) k = ordered ? n : k + 1;
        if (k >= n) return false;
        taken[k] = true;
    }
    return true;
}

// ---- relations ----------------------------------------------------------------------------------
// x in S.
static bool is_member(const struct math_node *n)
{
    return n->kind == MATH_CHAIN && n->n == 2 && strcmp(n->last->name, "in") == 0;
}

static bool is_relation(const struct math_node *n)
{
    return n->kind == MATH_CHAIN && !is_member(n);
}

static bool is_equation(const struct math_node *n)
{
    if (n->kind != MATH_CHAIN) return false;
    for (const struct math_node *a = n->first->next; a; a = a->next)
        if (a->name[0] != '=' && a->name[0] != '~') return false;
    return true;
}

static bool is_name(const struct math_node *n)
{
    if (n->kind == MATH_SYMBOL || n->kind == MATH_TEXT || n->kind == MATH_CALL) return true;
    if (n->kind != MATH_PRODUCT && n->kind != MATH_QUOTIENT && n->kind != MATH_LIST) return false;
    for (const struct math_node *a = n->first; a; a = a->next)
        if (!is_name(a)) return false;
    return true;
}

static bool is_assignment(const struct math_node *n)
{
    return is_equation(n) && is_name(n->first);
}

// What an equation ends on; rounded values at its end are left out.
static const struct math_node *right_of(const struct math_node *n)
{
    const struct math_node *last = n->last;
    for (const struct math_node *a = n->first->next; a; a = a->next)
        if (a->name[0] == '=') last = a;
    return last->first;
}

// + where the left side minus the right one of a and those of b have a positive constant ratio, - a
// negative one; 0: they have none.
static int ratio_of(const struct math_node *const a[2], const struct math_node *const b[2])
{
    double ratio = 0;
    int n = 0;
    for (int i = 0; i < N_POINTS; i++) {
        struct math_value x[4];
        if (!eval_at(item_of(a[0]), i, &x[0]) || !eval_at(item_of(a[1]), i, &x[1]) ||
            !eval_at(item_of(b[0]), i, &x[2]) || !eval_at(item_of(b[1]), i, &x[3]))
            continue;
        const double over = creal(x[0].x - x[1].x), under = creal(x[2].x - x[3].x);
        if (fabs(over) < 1e-12 && fabs(under) < 1e-12) continue;
        if (fabs(over) < 1e-12 || fabs(under) < 1e-12) return 0;
        if (n++ && fabs(over / under - ratio) > 1e-9 * fabs(ratio)) return 0;
        ratio = over / under;
    }
    return n < MIN_POINTS ? 0 : ratio > 0 ? 1 : -1;
}

static bool same_relations(const struct math_node *wanted, const struct math_node *got)
{
    const struct math_node *a[2] = {wanted->first}, *b[2] = {got->first};
    const struct math_node *next = wanted->first->next, *other = got->first->next;
    if (wanted->n != got->n) return false;
    for (; next; next = next->next, other = other->next, a[0] = a[1], b[0] = b[1]) {
        const char *x = next->name, *y = other->name;
        a[1] = next->first;
        b[1] = other->first;
        const int ratio = ratio_of(a, b);
        const bool same_sign =
            strchr("=~!", *x)
                ? *x == *y || (*x != '!' && *y != '!')
                : (x[1] == '=') == (y[1] == '=') && strchr("<>", *y) && (ratio > 0) == (*x == *y);
        if (ratio == 0 || !same_sign) return false;
    }
    return true;
}

// ---- the whole ----------------------------------------------------------------------------------
static bool same_plain(struct item wanted, struct item got)
{
    const struct math_node *a = wanted.node, *b = got.node;
    if (is_relation(a) && is_relation(b)) return same_relations(a, b);
    if (is_relation(a) && is_set(b)) return same_sets(a, b);
    if (is_relation(a) || is_relation(b)) return false;
    if (is_interval(a) && is_interval(b) && same_intervals(a, b)) return true;
    const bool sets = is_set(a) && is_set(b);
    const bool pairs = a->kind == MATH_LIST && b->kind == MATH_LIST && a->open == '(' &&
                       a->close == ')' && b->open == '(' && b->close == ')';
    if (sets && !pairs) return same_sets(a, b);
    if (wanted.sign == 0 && got.sign == 0 && (is_list(a) || is_list(b))) {
        const bool half_open = (is_interval(a) && (a->open == '[' || a->close == ']')) ||
                               (is_interval(b) && (b->open == '[' || b->close == ']'));
        const bool alike = a->kind == MATH_LIST && b->kind == MATH_LIST && a->open == b->open;
        // what a set of one element, or both signs of nothing, wraps
        if (a->kind == MATH_LIST && a->n == 1 && !is_list(b)) return same(item_of(a->first), got);
        if (b->kind == MATH_LIST && b->n == 1 && !is_list(a))
            return same(wanted, item_of(b->first));
        if (!is_list(a) || !is_list(b)) {
            struct item items[MAX_ITEMS];
            const struct math_node *list = is_list(a) ? a : b;
            if (list->kind == MATH_LIST || items_of(list, items) != 1) return false;
            return same_numbers(wanted, got);
        }
        return half_open && !alike ? false : same_lists(a, b);
    }
    double x, y;
    if (real_of(a, &x) && real_of(b, &y) && isinf(x)) return x == y;
    if (same_matrices(a, b)) return true;
    char word[2 * MATH_NAME] = "", other[2 * MATH_NAME] = "";
    if (spell(a, word) && spell(b, other) && strcmp(word, other) == 0) return true;
    return same_numbers(wanted, got);
}

static bool same(struct item wanted, struct item got)
{
    const struct math_node *a = wanted.node, *b = got.node;
    if (is_member(a)) a = a->last->first; // x in S is S
    if (is_member(b)) b = b->last->first;
    if (is_assignment(a) && is_assignment(b)) {
        const struct math_node *x = a->first, *y = b->first;
        const bool names =
            x->kind == MATH_CALL && y->kind == MATH_CALL && strcmp(x->name, y->name) == 0;
        if ((names || same(item_of(x), item_of(y))) &&
            same(item_of(right_of(a)), item_of(right_of(b))))
            return true;
    }
    if (is_equation(b) && !is_equation(a))
        b = right_of(b);
    else if (is_assignment(a) && !is_equation(b))
        a = right_of(a);
    wanted.node = a;
    got.node = b;
    return same_plain(wanted, got);
}

bool math_same(const struct math_node *wanted, const struct math_node *got)
{
    return same(item_of(wanted), item_of(got));
}
