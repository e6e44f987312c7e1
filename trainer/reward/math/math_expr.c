/* math_expr.c: reads LaTeX by recursive descent, straight from the text: operators, relations and
 * lists of what math_atom.c reads. What cannot be read makes the whole text no expression. Any
 * thread. */
#include "trainer/reward/math/math_parser.h"

#include <ctype.h>
#include <string.h>

#define MAX_DEPTH     60
#define MAX_RELATIONS 4
#define MAX_LISTS     4 // within each other

// ---- operators ----------------------------------------------------------------------------------
static bool take_degree(struct math_parser *p)
{
    static const char *const degrees[] = {"^\\circ",  "^{\\circ}", "^{\\degree}",
                                          "\\degree", "\xc2\xb0",  NULL};
    return math_take_any(p, degrees);
}

struct math_node *math_power(struct math_parser *p)
{
    static const char *const percents[] = {
        "\\%", "%", "percent", "percentage", "pct", "\\text{percent}", NULL};
    struct math_node *n = math_atom(p);
    while (n && !p->failed) {
        if (take_degree(p)) continue; // an angle in degrees is its number
        if (math_matches(p, "!") && !math_matches(p, "!=") && math_take(p, "!"))
            n = math_call(p, "factorial", n);
        else if (math_take_any(p, percents))
            n = math_of_one(p, MATH_PERCENT, n);
        else if (math_take(p, "^") || math_take(p, "**"))
            n = math_of_two(p, MATH_POWER, n,
                            math_take(p, "-")     ? math_of_one(p, MATH_NEGATIVE, math_power(p))
                            : math_peek(p) == '{' ? math_argument(p)
                                                  : math_atom(p));
        else
            break;
    }
    return n;
}

static struct math_node *signed_operand(struct math_parser *p)
{
    static const char *const minus[] = {"-", "\xe2\x88\x92", "\xe2\x80\x93", NULL};
    if (++p->depth > MAX_DEPTH) return math_fail(p);
    struct math_node *n = math_take_any(p, minus) ? math_of_one(p, MATH_NEGATIVE, signed_operand(p))
                          : math_take(p, "+")     ? signed_operand(p)
                          : math_take(p, "\\pm") || math_take(p, "\xc2\xb1")
                              ? math_of_one(p, MATH_EITHER, signed_operand(p))
                              : math_power(p);
    p->depth--;
    return n;
}

// What a function without brackets takes: sin 2x.
struct math_node *math_operand(struct math_parser *p)
{
    struct math_node *n = signed_operand(p);
    if (!n || n->kind != MATH_NUMBER || !isalpha((unsigned char)math_peek(p))) return n;
    return math_of_two(p, MATH_PRODUCT, n, math_power(p));
}

// Whether a factor may begin here without a sign of multiplication.
static bool begins_factor(struct math_parser *p)
{
    static const char *const others[] = {
        "\\cup",       "\\cap",        "\\setminus",  "\\in",       "\\le",        "\\leq",
        "\\ge",        "\\geq",        "\\lt",        "\\gt",       "\\ne",        "\\neq",
        "\\approx",    "\\pm",         "\\mp",        "\\cdot",     "\\times",     "\\div",
        "\\}",         "\\\\",         "\\end",       "\\rfloor",   "\\rceil",     "\\rvert",
        "\\equiv",     "\\to",         "\\leqslant",  "\\geqslant", "\\pmod",      "\\mod",
        "\\implies",   "\\Rightarrow", "\\rbrace",    "\\ldots",    "\\dots",      "\\cdots",
        "\\mid",       "\\hline",      "\\backslash", "\\sim",      "\\text{and}", "\\text{or}",
        "\\text{ and", "\\text{ or",   "\\text{and ", "\\text{or ", "\\land",      "\\lor",
        "\\notin",     "and",          "or",          NULL};
    const char c = math_peek(p);
    if (p->at >= p->end || math_matches_any(p, others)) return false;
    if (c == '\\' || c == '(' || c == '{' || c == '[') return true;
    if (c == '|') return p->bars == 0;
    return isalnum((unsigned char)c) || c == '\xcf' || (c == '.' && math_is_digit(p, p->at + 1));
}

// 1\frac12 and 1 1/2 are sums.
static bool is_mixed(const struct math_node *whole, const struct math_node *part)
{
    return whole->kind == MATH_NUMBER && !strchr(whole->name, '.') && part &&
           part->kind == MATH_QUOTIENT && part->first->kind == MATH_NUMBER &&
           part->first->next->kind == MATH_NUMBER;
}

// Also squared.
static bool is_words(const struct math_node *n)
{
    return n && (n->kind == MATH_TEXT || (n->kind == MATH_POWER && n->first->kind == MATH_TEXT));
}

static struct math_node *product(struct math_parser *p)
{
    static const char *const times[] = {"*", "\\cdot", "\\times", "\xc3\x97", "\xc2\xb7", NULL};
    static const char *const over[] = {"/", "\\div", "\xc3\xb7", ":", NULL};
    struct math_node *n = signed_operand(p), *sum;
    while (n && !p->failed) {
        if (math_take_any(p, times)) {
            n = math_of_two(p, MATH_PRODUCT, n, signed_operand(p));
        } else if (math_take_any(p, over)) {
            n = math_of_two(p, MATH_QUOTIENT, n, signed_operand(p));
        } else if (begins_factor(p)) {
            const bool command = *p->at == '\\';
            struct math_node *next = math_power(p);
            if (is_words(next) && !is_words(n)) continue; // a unit
            if (command && is_mixed(n, next)) {
                sum = math_of_two(p, MATH_SUM, n, next);
                n = sum;
            } else {
                n = math_of_two(p, MATH_PRODUCT, n, next);
            }
        } else {
            break;
        }
    }
    return n;
}

static struct math_node *sum(struct math_parser *p)
{
    static const char *const minus[] = {"-", "\xe2\x88\x92", "\xe2\x80\x93", NULL};
    struct math_node *n = product(p);
    while (n && !p->failed) {
        if (math_take(p, "+"))
            n = math_of_two(p, MATH_SUM, n, product(p));
        else if (math_take_any(p, minus))
            n = math_of_two(p, MATH_SUM, n, math_of_one(p, MATH_NEGATIVE, product(p)));
        else if (math_take(p, "\\pm") || math_take(p, "\\mp") || math_take(p, "\xc2\xb1"))
            n = math_of_two(p, MATH_EITHER, n, product(p));
        else
            break;
    }
    return n;
}

static struct math_node *sets(struct math_parser *p)
{
    static const char *const unions[] = {"\\cup", "\xe2\x88\xaa", "\\bigcup", NULL};
    static const char *const less[] = {"\\setminus", "\\backslash", NULL};
    struct math_node *n = sum(p);
    while (n && !p->failed) {
        if (math_take_any(p, unions))
            n = math_of_two(p, MATH_UNION, n, sum(p));
        else if (math_take(p, "\\cap"))
            n = math_of_two(p, MATH_INTERSECTION, n, sum(p));
        else if (math_take_any(p, less))
            n = math_of_two(p, MATH_DIFFERENCE, n, sum(p));
        else
            break;
    }
    return n;
}

// ---- relations and lists ------------------------------------------------------------------------
static const struct {
    const char *sign, *name;
} relations[] = {
    {"\\leqslant", "<="},
    {"\\leq", "<="},
    {"\\le", "<="},
    {"\xe2\x89\xa4", "<="},
    {"<=", "<="},
    {"\\geqslant", ">="},
    {"\\geq", ">="},
    {"\\ge", ">="},
    {"\xe2\x89\xa5", ">="},
    {">=", ">="},
    {"\\neq", "!="},
    {"\\ne", "!="},
    {"!=", "!="},
    {"\xe2\x89\xa0", "!="},
    {"\\lt", "<"},
    {"<", "<"},
    {"\\gt", ">"},
    {">", ">"},
    {"\\approx", "~"},
    {"\\sim", "~"},
    {"~=", "~"},
    {"\\equiv", "="},
    {"==", "="},
    {"=", "="},
    {"\\in", "in"},
    {"\xe2\x89\x88", "~"},
    {"\xe2\x88\x88", "in"},
};

static const char *take_relation(struct math_parser *p)
{
    for (size_t i = 0; i < sizeof relations / sizeof *relations; i++)
        if (math_take(p, relations[i].sign)) return relations[i].name;
    return NULL;
}

static struct math_node *relation(struct math_parser *p)
{
    struct math_node *left = sets(p), *chain = NULL, *one = NULL;
    const char *name;
    while (left && !p->failed && (name = take_relation(p)) != NULL) {
        if (++p->relations > MAX_RELATIONS) return math_fail(p);
        struct math_node *right = sets(p);
        p->relations--;
        // a node has one place in the tree: the middle of a chain is there twice
        struct math_node *copy = right ? math_node_new(p, right->kind, "", 0) : math_fail(p);
        if (!copy) return NULL;
        *copy = *right;
        if (one && !chain) chain = math_of_one(p, MATH_CHAIN, one);
        one = math_of_two(p, MATH_RELATION, left, right);
        if (!one) return NULL;
        memcpy(one->name, name, strlen(name));
        if (chain) math_push(chain, one);
        left = copy;
    }
    return chain ? chain : one ? one : left;
}

static bool take_separator(struct math_parser *p)
{
    static const char *const joins[] = {",",
                                        ";",
                                        "\\text{and}",
                                        "\\text{or}",
                                        "\\text{ and }",
                                        "\\text{ or }",
                                        "\\text{and }",
                                        "\\text{ and}",
                                        "\\text{, and }",
                                        "\\text{ or}",
                                        "\\text{or }",
                                        "\\land",
                                        "\\lor",
                                        "and",
                                        "or",
                                        NULL};
    bool any = false;
    while (math_take_any(p, joins)) any = true;
    return any;
}

struct math_node *math_list(struct math_parser *p)
{
    if (++p->depth > MAX_DEPTH) return math_fail(p);
    struct math_node *first = relation(p), *all = NULL;
    while (!p->failed && take_separator(p)) {
        const char c = math_peek(p);
        if (c == '\0' || c == '}' || c == ')') break; // a comma at the end
        if (!all) all = math_of_one(p, MATH_LIST, first);
        math_push(all, relation(p));
    }
    p->depth--;
    return p->failed ? NULL : all ? all : first;
}

// How many lists are within each other.
static int levels(const struct math_node *n)
{
    int most = 0;
    for (const struct math_node *a = n->first; a; a = a->next) {
        const int of = levels(a);
        if (of > most) most = of;
    }
    return most + (n->kind == MATH_LIST);
}

const struct math_node *math_parse(struct math_arena *arena, const char *text, size_t len)
{
    struct math_parser p = {.arena = arena, .at = text, .end = text + len};
    const struct math_node *n = math_list(&p);
    if (n && math_take(&p, "\\pmod")) math_braces(&p, &len);
    if (n && math_take(&p, ".")) math_skip_blanks(&p);
    math_skip_blanks(&p);
    return p.failed || p.at < p.end || !n || levels(n) > MAX_LISTS ? NULL : n;
}
