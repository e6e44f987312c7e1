/* math_set.c: sets of real numbers, compared by what is in them: at their ends, beside them and
 * between. Stateless; any thread. */
#include "trainer/reward/math/math_set.h"
#include "trainer/reward/math/math_value.h"

#include <math.h>
#include <string.h>

#define MAX_ENDS 64 // of intervals

bool math_is_ordered(const struct math_node *n)
{
    return n->kind == MATH_LIST && (n->open == '(' || n->open == '[');
}

bool math_real_of(const struct math_node *n, double *ret)
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
    if (math_any_node(n, math_is_letter) || !math_eval(n, &anywhere, &v) || cimag(v.x) != 0)
        return false;
    *ret = creal(v.x);
    return true;
}

bool math_is_interval(const struct math_node *n)
{
    double x;
    return math_is_ordered(n) && n->n == 2 && math_real_of(n->first, &x) &&
           math_real_of(n->last, &x);
}

bool math_is_set(const struct math_node *n)
{
    return math_is_interval(n) || n->kind == MATH_UNION || n->kind == MATH_INTERSECTION ||
           n->kind == MATH_DIFFERENCE;
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
    if (n->kind < MATH_RELATION && math_real_of(n, &x)) {
        add_end(ret, x);
        add_end(ret, -x);
        return;
    }
    for (const struct math_node *a = n->first; a; a = a->next) collect_ends(a, ret);
}

static bool is_unknown(const struct math_node *n)
{
    return math_is_letter(n) || (n->kind == MATH_CALL && strlen(n->name) == 1);
}

// The one letter, or function of nobody's, that a relation is about; NULL: several, or none.
static const char *unknown_of(const struct math_node *n, const char *found)
{
    static const char several[] = "";
    if (is_unknown(n)) return !found || strcmp(found, n->name) == 0 ? n->name : several;
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
        for (; a; a = a->next)
            if (!contains(a, x, letter)) return false;
        return true;
    case MATH_RELATION:
        return math_eval(a, &point, &left) && math_eval(b, &point, &right) &&
               holds(n->name, creal(left.x), creal(right.x));
    case MATH_UNION:
        return contains(a, x, letter) || contains(b, x, letter);
    case MATH_INTERSECTION:
        return contains(a, x, letter) && contains(b, x, letter);
    case MATH_DIFFERENCE:
        return contains(a, x, letter) && !contains(b, x, letter);
    default:
        break;
    }
    if (math_is_interval(n) && math_real_of(a, &low) && math_real_of(b, &high))
        return (n->open == '[' ? x >= low : x > low) && (n->close == ']' ? x <= high : x < high);
    for (; a; a = a->next)
        if (math_real_of(a, &low) && low == x) return true;
    return false;
}

bool math_same_sets(const struct math_node *wanted, const struct math_node *got)
{
    struct ends ends = {.n = 0};
    const bool relation = wanted->kind == MATH_RELATION || wanted->kind == MATH_CHAIN;
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
