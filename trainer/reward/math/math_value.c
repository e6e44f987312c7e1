/* math_value.c: evaluates trees. Stateless; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/math/math.h"
#include "common/base/hash.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PRIME ((UINT64_C(1) << 61) - 1)

// ---- residues -----------------------------------------------------------------------------------
static uint64_t times(uint64_t a, uint64_t b)
{
    return (uint64_t)((unsigned __int128)a * b % PRIME);
}

static uint64_t to_power(uint64_t a, uint64_t n)
{
    uint64_t r = 1;
    for (; n; n >>= 1, a = times(a, a))
        if (n & 1) r = times(r, a);
    return r;
}

static uint64_t inverse(uint64_t a)
{
    return to_power(a, PRIME - 2);
}

// ---- arithmetic ---------------------------------------------------------------------------------
static struct math_value inexact(double complex x)
{
    return (struct math_value){.x = x};
}

static struct math_value whole(int64_t n)
{
    const uint64_t size = (uint64_t)(n < 0 ? -n : n) % PRIME;
    return (struct math_value){
        .x = (double)n, .residue = n < 0 && size ? PRIME - size : size, .exact = true};
}

static struct math_value plus(struct math_value a, struct math_value b)
{
    return (struct math_value){
        .x = a.x + b.x, .residue = (a.residue + b.residue) % PRIME, .exact = a.exact && b.exact};
}

static struct math_value product(struct math_value a, struct math_value b)
{
    return (struct math_value){
        .x = a.x * b.x, .residue = times(a.residue, b.residue), .exact = a.exact && b.exact};
}

static struct math_value negative(struct math_value a)
{
    struct math_value v = product(a, whole(-1));
    v.decimal = a.decimal;
    return v;
}

static bool is_zero(const struct math_value *a)
{
    return a->exact ? a->residue == 0 : a->x == 0;
}

static bool quotient(struct math_value a, struct math_value b, struct math_value *ret)
{
    if (is_zero(&b)) return false;
    *ret = (struct math_value){.x = a.x / b.x,
                               .residue = b.exact ? times(a.residue, inverse(b.residue)) : 0,
                               .exact = a.exact && b.exact};
    return true;
}

static bool power(struct math_value a, struct math_value b, struct math_value *ret)
{
    const double n = creal(b.x);
    const bool by_whole = b.exact && n == floor(n) && fabs(n) < 1e6;
    if (is_zero(&a) && n <= 0) return false;
    *ret = inexact(by_whole && cimag(a.x) == 0 ? pow(creal(a.x), n) : cpow(a.x, b.x));
    if (!a.exact || !by_whole) return true;
    const uint64_t base = n < 0 ? inverse(a.residue) : a.residue;
    ret->residue = to_power(base, (uint64_t)fabs(n));
    ret->exact = true;
    return true;
}

static bool factorial(struct math_value a, struct math_value *ret)
{
    const double n = creal(a.x);
    if (cimag(a.x) == 0 && n != floor(n)) { // as letters have it
        *ret = inexact(tgamma(n + 1));
        return true;
    }
    if (!a.exact || n < 0 || n > 1000) return false;
    *ret = whole(1);
    for (int64_t i = 2; i <= (int64_t)n; i++) *ret = product(*ret, whole(i));
    return true;
}

// ---- leaves -------------------------------------------------------------------------------------
// Digits in a base, of which a subscript tells: 204_5.
static bool number(const char *digits, struct math_value *ret)
{
    const char *subscript = strchr(digits, '_'), *point = strchr(digits, '.');
    const int base = subscript ? atoi(subscript + 1) : 10;
    uint64_t scale = 1;
    if (base < 2 || base > 36 || (subscript && point)) return false;
    struct math_value v = whole(0);
    for (const char *at = digits; *at && *at != '_'; at++) {
        if (*at == '.') continue;
        if (*at - '0' >= base) return false;
        v = plus(product(v, whole(base)), whole(*at - '0'));
        if (point && at > point) scale = times(scale, 10);
    }
    v.residue = times(v.residue, inverse(scale));
    v.x = subscript ? v.x : strtod(digits, NULL);
    v.decimal = point != NULL;
    *ret = v;
    return true;
}

static uint64_t hash_of(const char *name, uint64_t seed)
{
    return hash_mix(hash_fnv1a(name, strlen(name)) ^ seed);
}

// A letter's value at a point: so many 64ths.
static struct math_value letter(const char *name, const struct math_point *p)
{
    if (p->letter && strcmp(name, p->letter) == 0) return inexact(p->at);
    const uint64_t h = hash_of(name, (uint64_t)p->number * HASH_SPREAD);
    const int64_t n = 30 + (int64_t)(h >> 20) % 300;
    struct math_value v = whole(p->number % 2 && h >> 13 & 1 ? -n : n);
    v.x /= 64;
    v.residue = times(v.residue, inverse(64));
    return v;
}

// Of pi, e and i; false of letters.
static bool constant(const char *name, struct math_value *ret)
{
    if (strcmp(name, "pi") == 0)
        *ret = inexact(M_PI);
    else if (strcmp(name, "e") == 0)
        *ret = inexact(M_E);
    else if (strcmp(name, "i") == 0)
        *ret = inexact(I);
    else
        return false;
    return true;
}

bool math_is_letter(const struct math_node *n)
{
    struct math_value v;
    return n->kind == MATH_SYMBOL && !constant(n->name, &v);
}

// ---- functions ----------------------------------------------------------------------------------
static bool elementary(const char *name, struct math_value a, struct math_value *ret)
{
    static const struct {
        const char *name;
        double complex (*call)(double complex);
        bool reciprocal, of_reciprocal;
    } table[] = {{"sin", csin, 0, 0},     {"cos", ccos, 0, 0},     {"tan", ctan, 0, 0},
                 {"sec", ccos, 1, 0},     {"csc", csin, 1, 0},     {"cot", ctan, 1, 0},
                 {"arcsin", casin, 0, 0}, {"arccos", cacos, 0, 0}, {"arctan", catan, 0, 0},
                 {"arccot", catan, 0, 1}, {"sinh", csinh, 0, 0},   {"cosh", ccosh, 0, 0},
                 {"tanh", ctanh, 0, 0},   {"exp", cexp, 0, 0},     {"ln", clog, 0, 0},
                 {"sqrt", csqrt, 0, 0}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(name, table[i].name) != 0) continue;
        const double complex x = table[i].call(table[i].of_reciprocal ? 1 / a.x : a.x);
        *ret = inexact(table[i].reciprocal ? 1 / x : x);
        const double r = round(creal(x));
        if (table[i].call == csqrt && a.exact && cimag(x) == 0 && r <= 1e9 &&
            whole((int64_t)(r * r)).residue == a.residue)
            *ret = whole((int64_t)r); // a square root of a square is exact
        return true;
    }
    return false;
}

static bool real_function(const char *name, struct math_value a, struct math_value *ret)
{
    const double x = creal(a.x);
    if (strcmp(name, "abs") == 0) {
        *ret = cimag(a.x) != 0 || !a.exact ? inexact(cabs(a.x)) : x >= 0 ? a : negative(a);
        ret->decimal = false;
    } else if (cimag(a.x) != 0) {
        return false;
    } else if (strcmp(name, "Gamma") == 0) {
        *ret = inexact(tgamma(x));
    } else if ((strcmp(name, "floor") == 0 || strcmp(name, "ceil") == 0) && isfinite(x)) {
        *ret = fabs(x) < 0x1p53 ? whole((int64_t)(*name == 'f' ? floor(x) : ceil(x)))
               : a.exact        ? a // the places behind the point are lost
                                : inexact(x);
    } else {
        return false;
    }
    return true;
}

static bool function(const struct math_node *n, const struct math_point *p, struct math_value *ret)
{
    struct math_value args[4];
    int n_args = 0;
    for (const struct math_node *a = n->first; a && n_args < 4; a = a->next)
        if (!math_eval(a, p, &args[n_args++])) return false;
    if (n_args != n->n || n_args == 0) return false;
    if (strcmp(n->name, "factorial") == 0) return factorial(args[0], ret);
    if (strcmp(n->name, "binom") == 0 && n_args == 2) {
        struct math_value over, under, beside;
        return factorial(args[0], &over) && factorial(args[1], &under) &&
               factorial(plus(args[0], negative(args[1])), &beside) &&
               quotient(over, product(under, beside), ret);
    }
    if (strcmp(n->name, "log") == 0 || strcmp(n->name, "lg") == 0) {
        // without a base: natural, as in sympy
        const double complex base = n_args == 2 ? clog(args[1].x) : n->name[1] == 'g' ? log(10) : 1;
        *ret = inexact(clog(args[0].x) / base);
        return true;
    }
    if (n_args == 1 && (elementary(n->name, args[0], ret) || real_function(n->name, args[0], ret)))
        return true;
    // what nobody knows is another number for every name and arguments
    const double h = (double)(hash_of(n->name, 0) % 1000) / 1000;
    double sum = 0.3 + h;
    for (int i = 0; i < n_args; i++)
        sum += (0.7 + h * 0.1 + i) * cos(1.3 * creal(args[i].x) + 0.9 * h + i);
    const bool given = p->letter && strcmp(n->name, p->letter) == 0;
    *ret = inexact(given ? p->at : sum);
    return true;
}

// ---- the whole ----------------------------------------------------------------------------------
static bool evaluate(const struct math_node *n, const struct math_point *p, struct math_value *ret)
{
    struct math_value a, b = whole(0); // of one: b is none
    if (n->kind == MATH_NUMBER) return number(n->name, ret);
    if (n->kind == MATH_SYMBOL) {
        if (!constant(n->name, ret)) *ret = letter(n->name, p);
        return true;
    }
    if (n->kind == MATH_CALL) return function(n, p, ret);
    if (n->n < 1 || n->n > 2 || !math_eval(n->first, p, &a)) return false;
    if (n->n == 2 && !math_eval(n->last, p, &b)) return false;
    switch (n->kind) {
    case MATH_SUM:
        *ret = plus(a, b);
        return true;
    case MATH_EITHER:
        if (n->n == 1) *ret = p->sign < 0 ? negative(a) : a;
        if (n->n == 2) *ret = plus(a, p->sign < 0 ? negative(b) : b);
        return true;
    case MATH_PRODUCT:
        *ret = product(a, b);
        return true;
    case MATH_QUOTIENT:
        return quotient(a, b, ret);
    case MATH_POWER:
        return power(a, b, ret);
    case MATH_NEGATIVE:
        *ret = negative(a);
        return true;
    case MATH_PERCENT:
        quotient(a, whole(100), ret);
        ret->decimal = a.decimal;
        return true;
    default:
        return false;
    }
}

bool math_eval(const struct math_node *n, const struct math_point *p, struct math_value *ret)
{
    struct math_value v;
    if (!evaluate(n, p, &v)) return false;
    const bool finite = isfinite(creal(v.x)) && isfinite(cimag(v.x));
    if (!finite && !v.exact) return false;
    *ret = v;
    return true;
}

// ---- matrices -----------------------------------------------------------------------------------
// Either may be a number.
static bool matrix_product(const struct math_matrix *a, const struct math_matrix *b,
                           struct math_matrix *ret)
{
    const bool scaled = a->number || b->number;
    const int rows = a->number ? b->rows : a->rows, cols = b->number ? a->cols : b->cols;
    if (rows * cols > MATH_ENTRIES || (!scaled && a->cols != b->rows)) return false;
    *ret = (struct math_matrix){.number = a->number && b->number, .rows = rows, .cols = cols};
    for (int e = 0; e < rows * cols; e++) {
        ret->entries[e] = whole(0);
        for (int k = 0; k < (scaled ? 1 : a->cols); k++) {
            const int x = a->number ? 0
                          : scaled  ? e
                                    : e / cols * a->cols + k,
                      y = b->number ? 0
                          : scaled  ? e
                                    : k * cols + e % cols;
            ret->entries[e] = plus(ret->entries[e], product(a->entries[x], b->entries[y]));
        }
    }
    return true;
}

bool math_eval_matrix(const struct math_node *n, const struct math_point *p,
                      struct math_matrix *ret)
{
    struct math_matrix a = {true, 1, 1, {whole(-1)}}, b;
    if (n->kind == MATH_MATRIX) {
        int k = 0;
        *ret = (struct math_matrix){.rows = n->n, .cols = n->first ? n->first->n : 0};
        if (ret->rows * ret->cols == 0 || ret->rows * ret->cols > MATH_ENTRIES) return false;
        for (const struct math_node *row = n->first; row; row = row->next) {
            if (row->n != ret->cols) return false;
            for (const struct math_node *one = row->first; one; one = one->next)
                if (!math_eval(one, p, &ret->entries[k++])) return false;
        }
        return true;
    }
    if (n->kind != MATH_SUM && n->kind != MATH_PRODUCT && n->kind != MATH_NEGATIVE) {
        *ret = (struct math_matrix){.number = true, .rows = 1, .cols = 1};
        return math_eval(n, p, &ret->entries[0]);
    }
    if (n->kind != MATH_NEGATIVE && !math_eval_matrix(n->first, p, &a)) return false;
    if (!math_eval_matrix(n->last, p, &b)) return false;
    if (n->kind != MATH_SUM) return matrix_product(&a, &b, ret);
    if (a.number != b.number || a.rows != b.rows || a.cols != b.cols) return false;
    for (int e = 0; e < a.rows * a.cols; e++) a.entries[e] = plus(a.entries[e], b.entries[e]);
    *ret = a;
    return true;
}

bool math_value_same(const struct math_value *a, const struct math_value *b)
{
    if (a->exact && b->exact) return a->residue == b->residue;
    const double larger = fmax(cabs(a->x), cabs(b->x));
    return cabs(a->x - b->x) <= 1e-10 * larger + 1e-13;
}
