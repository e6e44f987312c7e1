/* math_expr.c: reads LaTeX by recursive descent, straight from the text: blanks, sizes of brackets
 * and styles are passed over wherever a token may begin. What cannot be read makes the whole text
 * no expression. Any thread. */
#include "trainer/rollout/math_expr.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NODES 500
#define MAX_DEPTH 60
#define MAX_LISTS 4 // within each other

struct math_arena {
    struct math_node *nodes; // (MAX_NODES), of which the first n are used
    int n;
};

struct parser {
    struct math_arena *arena;
    const char *at, *end;
    int depth;
    int bars;   // open |
    int cells;  // matrices, in which & stands between elements
    int commas; // brackets within which a comma stands between numbers, not within one
    bool failed;
};

struct math_arena *math_arena_new(void)
{
    struct math_arena *arena = calloc(1, sizeof *arena);
    if (arena) arena->nodes = malloc(MAX_NODES * sizeof *arena->nodes);
    if (arena && arena->nodes) return arena;
    free(arena);
    return NULL;
}

void math_arena_free(struct math_arena *arena)
{
    if (arena) free(arena->nodes);
    free(arena);
}

// ---- nodes --------------------------------------------------------------------------------------
static struct math_node *fail(struct parser *p)
{
    p->failed = true;
    return NULL;
}

static struct math_node *node(struct parser *p, enum math_kind kind, const char *name, size_t len)
{
    if (p->arena->n >= MAX_NODES || len >= MATH_NAME) return fail(p);
    struct math_node *n = &p->arena->nodes[p->arena->n++];
    *n = (struct math_node){.kind = kind};
    memcpy(n->name, name, len);
    return n;
}

static void push(struct math_node *parent, struct math_node *arg)
{
    if (!parent || !arg) return;
    if (parent->last)
        parent->last->next = arg;
    else
        parent->first = arg;
    parent->last = arg;
    parent->n++;
}

static struct math_node *of_two(struct parser *p, enum math_kind kind, struct math_node *a,
                                struct math_node *b)
{
    struct math_node *n = a && b ? node(p, kind, "", 0) : fail(p);
    push(n, a);
    push(n, b);
    return n;
}

static struct math_node *of_one(struct parser *p, enum math_kind kind, struct math_node *a)
{
    struct math_node *n = a ? node(p, kind, "", 0) : fail(p);
    push(n, a);
    return n;
}

// ---- tokens -------------------------------------------------------------------------------------
// Length of the word at the next place, which is not part of a longer one; 0: another.
static size_t matches(const struct parser *p, const char *word)
{
    const size_t n = strlen(word);
    if ((size_t)(p->end - p->at) < n || memcmp(p->at, word, n) != 0) return 0;
    const bool longer = p->at + n < p->end && isalpha((unsigned char)p->at[n]);
    return isalpha((unsigned char)word[n - 1]) && longer ? 0 : n;
}

static size_t matches_any(const struct parser *p, const char *const words[])
{
    size_t n = 0;
    for (int i = 0; words[i] && n == 0; i++) n = matches(p, words[i]);
    return n;
}

static void skip_blanks(struct parser *p)
{
    static const char *const nothing[] = {
        "\\,",      "\\;",     "\\!",      "\\:",         "\\ ",     "~",        "\\quad",
        "\\qquad",  "\\left",  "\\right",  "\\big",       "\\Big",   "\\bigl",   "\\bigr",
        "\\Bigl",   "\\Bigr",  "\\bigg",   "\\Bigg",      "\\mleft", "\\mright", "\\displaystyle",
        "\\limits", "\\boxed", "\\fbox",   "\\textstyle", "\\$",     "$",        "&",
        "\"",       "\\space", "\\mathop", NULL};
    size_t n;
    while (p->at < p->end && !(*p->at == '&' && p->cells > 0)) {
        if (isspace((unsigned char)*p->at))
            p->at++;
        else if ((n = matches_any(p, nothing)) > 0)
            p->at += n;
        else if (p->end - p->at > 5 && memcmp(p->at, "\\quad", 5) == 0) // also in front of a letter
            p->at += 5;
        else
            return;
    }
}

static bool take(struct parser *p, const char *word)
{
    skip_blanks(p);
    const size_t n = matches(p, word);
    p->at += n;
    return n > 0;
}

static bool take_any(struct parser *p, const char *const words[])
{
    for (int i = 0; words[i]; i++)
        if (take(p, words[i])) return true;
    return false;
}

static char peek(struct parser *p)
{
    skip_blanks(p);
    return p->at < p->end ? *p->at : '\0';
}

static bool is_digit_at(const struct parser *p, const char *at)
{
    return at < p->end && isdigit((unsigned char)*at);
}

// ---- numbers, letters, words --------------------------------------------------------------------
// Where three digits and no fourth begin behind a separator of thousands at `at`; NULL: none.
static const char *thousands(const struct parser *p, const char *at)
{
    static const char *const forms[] = {"{,}\\!", "{,}", ",\\!", ",", "\\,", "\\!", "\\;"};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const size_t n = strlen(forms[i]);
        if ((size_t)(p->end - at) < n || memcmp(at, forms[i], n) != 0) continue;
        if (p->commas && strcmp(forms[i], ",") == 0) return NULL;
        const char *to = at + n;
        while (n > 2 && to < p->end && *to == ' ') to++; // behind TeX's negative space
        const bool three = is_digit_at(p, to) && is_digit_at(p, to + 1) && is_digit_at(p, to + 2);
        return three && !is_digit_at(p, to + 3) ? to : NULL;
    }
    return NULL;
}

static struct math_node *number(struct parser *p)
{
    char digits[MATH_NAME];
    size_t n = 0, whole = 0;
    bool point = false;
    while (p->at < p->end && n < sizeof digits - 1) {
        const char *to;
        if (is_digit_at(p, p->at) || (*p->at == '.' && !point && is_digit_at(p, p->at + 1))) {
            point |= *p->at == '.';
            whole += !point;
            digits[n++] = *p->at++;
        } else if (!point && whole <= 3 && (to = thousands(p, p->at)) != NULL) {
            p->at = to;
            whole = 0;
        } else {
            break;
        }
    }
    if (is_digit_at(p, p->at)) return fail(p); // longer than any
    return node(p, MATH_NUMBER, digits, n);
}

// The text within the braces that begin here, which it passes; NULL: there are none.
static const char *braces(struct parser *p, size_t *ret_len)
{
    int open = 1;
    if (peek(p) != '{') return NULL;
    const char *begin = ++p->at;
    for (; p->at < p->end; p->at++) {
        open += *p->at == '{' ? 1 : *p->at == '}' ? -1 : 0;
        if (open == 0) break;
    }
    *ret_len = (size_t)(p->at - begin);
    if (p->at < p->end) p->at++;
    return begin;
}

static struct math_node *list(struct parser *p);
static struct math_node *product_operand(struct parser *p);
static struct math_node *power(struct parser *p);
static struct math_node *atom(struct parser *p);

// Within braces, or one digit or letter, as TeX takes it: \frac12.
static struct math_node *argument(struct parser *p)
{
    if (peek(p) == '{') {
        p->at++;
        p->commas++;
        struct math_node *inner = list(p);
        p->commas--;
        if (!take(p, "}") && p->at < p->end) return fail(p);
        return inner;
    }
    if (isdigit((unsigned char)peek(p))) return node(p, MATH_NUMBER, p->at++, 1);
    return atom(p);
}

// Adds "_" and the subscript's letters and digits to a name.
static void subscript(struct parser *p, struct math_node *n)
{
    const char *text = p->at;
    size_t len = 1, used = strlen(n->name);
    if (!take(p, "_")) return;
    if (peek(p) == '{')
        text = braces(p, &len);
    else
        text = p->at < p->end ? p->at++ : (fail(p), text);
    if (used + len + 2 >= MATH_NAME) {
        fail(p);
        return;
    }
    n->name[used++] = '_';
    for (size_t i = 0; i < len; i++)
        if (isalnum((unsigned char)text[i])) n->name[used++] = text[i];
    n->name[used] = '\0';
}

// ---- commands -----------------------------------------------------------------------------------
static struct math_node *call(struct parser *p, const char *name, struct math_node *arg)
{
    struct math_node *n = arg ? node(p, MATH_CALL, name, strlen(name)) : fail(p);
    push(n, arg);
    return n;
}

static struct math_node *root(struct parser *p)
{
    struct math_node *index = NULL;
    if (peek(p) == '[') {
        p->at++;
        index = list(p);
        if (!take(p, "]")) return fail(p);
    }
    struct math_node *of = argument(p);
    struct math_node *one = node(p, MATH_NUMBER, "1", 1);
    if (!index) return call(p, "sqrt", of);
    return of_two(p, MATH_POWER, of, of_two(p, MATH_QUOTIENT, one, index));
}

// sin, log and the like, at the next place; the longer first.
static const char *const functions[] = {"arcsin", "arccos", "arctan", "arccot", "sinh",  "cosh",
                                        "tanh",   "sin",    "cos",    "tan",    "cot",   "sec",
                                        "csc",    "exp",    "ln",     "log",    "lg",    "det",
                                        "max",    "min",    "gcd",    "lcm",    "Gamma", NULL};

static struct math_node *function(struct parser *p, const char *name)
{
    struct math_node *exponent = NULL, *base = NULL;
    for (int i = 0; i < 2; i++) {
        if (take(p, "_")) base = argument(p);
        if (take(p, "^")) exponent = argument(p);
    }
    struct math_node *arg = peek(p) == '(' || peek(p) == '{' ? power(p) : product_operand(p);
    struct math_node *n = call(p, name, arg);
    if (n && base) push(n, base);
    if (!exponent) return n;
    const struct math_node *minus = exponent->kind == MATH_NEGATIVE ? exponent->first : NULL;
    if (minus && strcmp(minus->name, "1") == 0 && n && strlen(n->name) == 3) { // sin^{-1}
        memmove(n->name + 3, n->name, 4);
        memcpy(n->name, "arc", 3);
        return n;
    }
    return of_two(p, MATH_POWER, n, exponent);
}

// Elements of a matrix, to \end{...}.
static struct math_node *matrix(struct parser *p)
{
    struct math_node *m = node(p, MATH_MATRIX, "", 0), *row = node(p, MATH_LIST, "", 0);
    size_t len;
    if (!braces(p, &len)) return fail(p);
    if (peek(p) == '{') braces(p, &len); // an array's columns
    p->cells++;
    while (!p->failed && !take(p, "\\end")) {
        if (p->at >= p->end) return fail(p);
        if (take(p, "\\\\") || take(p, "\\hline")) {
            if (row && row->n) push(m, row);
            row = node(p, MATH_LIST, "", 0);
            continue;
        }
        push(row, list(p));
        take(p, "&");
    }
    p->cells--;
    if (row && row->n) push(m, row);
    braces(p, &len);
    return m;
}

static struct math_node *words(struct parser *p)
{
    size_t len;
    const char *text = braces(p, &len);
    if (!text) return fail(p);
    while (len && isspace((unsigned char)*text)) text++, len--;
    while (len && isspace((unsigned char)text[len - 1])) len--;
    if (len == 1 && isalpha((unsigned char)*text)) return node(p, MATH_SYMBOL, text, 1);
    if (len && strspn(text, "0123456789") >= len) return node(p, MATH_NUMBER, text, len);
    if (len > 2 && text[0] == '(' && text[len - 1] == ')') text++, len -= 2;
    return node(p, MATH_TEXT, text, len < MATH_NAME ? len : MATH_NAME - 1);
}

static struct math_node *binomial(struct parser *p)
{
    struct math_node *n = argument(p), *k = argument(p);
    struct math_node *b = call(p, "binom", n);
    push(b, k);
    return b;
}

static struct math_node *fraction(struct parser *p)
{
    struct math_node *over = argument(p);
    return of_two(p, MATH_QUOTIENT, over, argument(p));
}

// Between two commands: \lfloor x \rfloor.
static struct math_node *between(struct parser *p, const char *name, const char *close)
{
    struct math_node *n = call(p, name, list(p));
    return take(p, close) ? n : fail(p);
}

static struct math_node *command(struct parser *p)
{
    static const char *const fractions[] = {"\\frac", "\\dfrac", "\\tfrac", "\\cfrac", NULL};
    static const char *const texts[] = {"\\text",       "\\textbf",       "\\textit", "\\textrm",
                                        "\\mbox",       "\\mathrm",       "\\mathbf", "\\mathit",
                                        "\\textnormal", "\\operatorname", NULL};
    static const char *const binomials[] = {"\\binom", "\\dbinom", "\\tbinom", NULL};
    static const char *const empties[] = {"\\emptyset", "\\varnothing", NULL};
    if (take_any(p, fractions)) return fraction(p);
    if (take(p, "\\sqrt")) return root(p);
    if (take_any(p, texts)) return words(p);
    if (take_any(p, binomials)) return binomial(p);
    if (take(p, "\\begin")) return matrix(p);
    if (take(p, "\\infty")) return node(p, MATH_INFINITY, "", 0);
    if (take_any(p, empties)) return node(p, MATH_EMPTY, "", 0);
    if (take(p, "\\lfloor")) return between(p, "floor", "\\rfloor");
    if (take(p, "\\lceil")) return between(p, "ceil", "\\rceil");
    if (take(p, "\\lvert")) return between(p, "abs", "\\rvert");
    p->at++;
    for (int i = 0; functions[i]; i++)
        if (take(p, functions[i])) return function(p, functions[i]);
    size_t len = 0;
    while (p->at + len < p->end && isalpha((unsigned char)p->at[len])) len++;
    if (len == 0) return fail(p);
    struct math_node *n = node(p, MATH_SYMBOL, p->at, len);
    p->at += len;
    if (n) subscript(p, n);
    return n;
}

// ---- brackets -----------------------------------------------------------------------------------
// A list as a bracket holds it; one element within ( or a TeX group is that element.
static struct math_node *bracketed(struct parser *p, char open, const char *const closes[])
{
    p->commas++;
    struct math_node *inner = list(p);
    p->commas--;
    if (!inner) return fail(p);
    skip_blanks(p);
    const char *at = p->at;
    if (!take_any(p, closes)) return fail(p);
    const char close = *at == '\\' ? at[1] : *at;
    const bool bare = inner->kind == MATH_LIST && !inner->open;
    if (!bare && (open == '(' || open == 'g') && close != ']') return inner;
    if (!bare) {
        struct math_node *one = inner;
        inner = node(p, MATH_LIST, "", 0);
        push(inner, one);
    }
    if (inner) inner->open = open == 'g' ? '{' : open;
    if (inner) inner->close = close;
    return inner;
}

// f(x, y): letters that are functions where a bracket follows at once.
static struct math_node *letter(struct parser *p)
{
    struct math_node *n = node(p, MATH_SYMBOL, p->at, 1);
    static const char *const closes[] = {")", NULL};
    const bool names_function = strchr("fghFGHPQRTW", *p->at++) != NULL;
    if (n) subscript(p, n);
    while (n && p->at < p->end && *p->at == '\'' && strlen(n->name) + 1 < MATH_NAME)
        strncat(n->name, p->at++, 1);
    if (!n || !names_function || p->at >= p->end || *p->at != '(') return n;
    p->at++;
    struct math_node *args = bracketed(p, '(', closes);
    n->kind = MATH_CALL;
    if (args && args->kind == MATH_LIST && args->open == '(') {
        n->first = args->first;
        n->last = args->last;
        n->n = args->n;
    } else {
        push(n, args);
    }
    return n;
}

static struct math_node *absolute(struct parser *p)
{
    p->bars++;
    struct math_node *n = call(p, "abs", list(p));
    p->bars--;
    return take(p, "|") ? n : fail(p);
}

static struct math_node *atom(struct parser *p)
{
    static const char *const round[] = {")", "]", NULL}, *const square[] = {"]", ")", NULL},
                             *const curly[] = {"\\}", "\\rbrace", "}", NULL},
                             *const group[] = {"}", NULL};
    const char c = peek(p);
    if (p->failed || p->at >= p->end) return fail(p);
    if (isdigit((unsigned char)c) || (c == '.' && is_digit_at(p, p->at + 1))) {
        struct math_node *n = number(p);
        if (n && p->at < p->end && *p->at == '_') subscript(p, n);
        return n;
    }
    if (take(p, "\\{") || take(p, "\\lbrace")) {
        if (take(p, "\\}")) return node(p, MATH_EMPTY, "", 0);
        return bracketed(p, '{', curly);
    }
    if (take(p, "(")) return bracketed(p, '(', round);
    if (take(p, "[") || take(p, "\\lbrack")) return bracketed(p, '[', square);
    if (take(p, "{")) return bracketed(p, 'g', group);
    if (c == '|' && p->bars == 0 && take(p, "|")) return absolute(p);
    if (c == '\\') return command(p);
    for (int i = 0; functions[i]; i++)
        if (strlen(functions[i]) > 1 && take(p, functions[i])) return function(p, functions[i]);
    if (take(p, "sqrt")) return call(p, "sqrt", atom(p));
    if (take(p, "pi") || take(p, "\xcf\x80")) return node(p, MATH_SYMBOL, "pi", 2);
    if (isalpha((unsigned char)c)) return letter(p);
    return fail(p);
}

// ---- operators ----------------------------------------------------------------------------------
static bool take_degree(struct parser *p)
{
    static const char *const degrees[] = {"^\\circ",  "^{\\circ}", "^{\\degree}",
                                          "\\degree", "\xc2\xb0",  NULL};
    return take_any(p, degrees);
}

static struct math_node *power(struct parser *p)
{
    static const char *const percents[] = {
        "\\%", "%", "percent", "percentage", "pct", "\\text{percent}", NULL};
    struct math_node *n = atom(p);
    while (n && !p->failed) {
        if (take_degree(p)) continue; // an angle in degrees is its number
        if (matches(p, "!") && !matches(p, "!=") && take(p, "!"))
            n = call(p, "factorial", n);
        else if (take_any(p, percents))
            n = of_one(p, MATH_PERCENT, n);
        else if (take(p, "^") || take(p, "**"))
            n = of_two(p, MATH_POWER, n,
                       take(p, "-")     ? of_one(p, MATH_NEGATIVE, power(p))
                       : peek(p) == '{' ? argument(p)
                                        : atom(p));
        else
            break;
    }
    return n;
}

static struct math_node *signed_operand(struct parser *p)
{
    static const char *const minus[] = {"-", "\xe2\x88\x92", "\xe2\x80\x93", NULL};
    if (++p->depth > MAX_DEPTH) return fail(p);
    struct math_node *n = take_any(p, minus) ? of_one(p, MATH_NEGATIVE, signed_operand(p))
                          : take(p, "+")     ? signed_operand(p)
                          : take(p, "\\pm") || take(p, "\xc2\xb1")
                              ? of_one(p, MATH_EITHER, signed_operand(p))
                              : power(p);
    p->depth--;
    return n;
}

// What a function without brackets takes: sin 2x.
static struct math_node *product_operand(struct parser *p)
{
    struct math_node *n = signed_operand(p);
    if (!n || n->kind != MATH_NUMBER || !isalpha((unsigned char)peek(p))) return n;
    return of_two(p, MATH_PRODUCT, n, power(p));
}

// Whether a factor may begin here without a sign of multiplication.
static bool begins_factor(struct parser *p)
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
    const char c = peek(p);
    if (p->at >= p->end || matches_any(p, others)) return false;
    if (c == '\\' || c == '(' || c == '{' || c == '[') return true;
    if (c == '|') return p->bars == 0;
    return isalnum((unsigned char)c) || c == '\xcf' || (c == '.' && is_digit_at(p, p->at + 1));
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

static struct math_node *product(struct parser *p)
{
    static const char *const times[] = {"*", "\\cdot", "\\times", "\xc3\x97", "\xc2\xb7", NULL};
    static const char *const over[] = {"/", "\\div", "\xc3\xb7", ":", NULL};
    struct math_node *n = signed_operand(p), *sum;
    while (n && !p->failed) {
        if (take_any(p, times)) {
            n = of_two(p, MATH_PRODUCT, n, signed_operand(p));
        } else if (take_any(p, over)) {
            n = of_two(p, MATH_QUOTIENT, n, signed_operand(p));
        } else if (begins_factor(p)) {
            const bool command = *p->at == '\\';
            struct math_node *next = power(p);
            if (is_words(next) && !is_words(n)) continue; // a unit
            if (command && is_mixed(n, next)) {
                sum = of_two(p, MATH_SUM, n, next);
                n = sum;
            } else {
                n = of_two(p, MATH_PRODUCT, n, next);
            }
        } else {
            break;
        }
    }
    return n;
}

static struct math_node *sum(struct parser *p)
{
    static const char *const minus[] = {"-", "\xe2\x88\x92", "\xe2\x80\x93", NULL};
    struct math_node *n = product(p);
    while (n && !p->failed) {
        if (take(p, "+"))
            n = of_two(p, MATH_SUM, n, product(p));
        else if (take_any(p, minus))
            n = of_two(p, MATH_SUM, n, of_one(p, MATH_NEGATIVE, product(p)));
        else if (take(p, "\\pm") || take(p, "\\mp") || take(p, "\xc2\xb1"))
            n = of_two(p, MATH_EITHER, n, product(p));
        else
            break;
    }
    return n;
}

static struct math_node *sets(struct parser *p)
{
    static const char *const unions[] = {"\\cup", "\xe2\x88\xaa", "\\bigcup", NULL};
    static const char *const less[] = {"\\setminus", "\\backslash", NULL};
    struct math_node *n = sum(p);
    while (n && !p->failed) {
        if (take_any(p, unions))
            n = of_two(p, MATH_UNION, n, sum(p));
        else if (take(p, "\\cap"))
            n = of_two(p, MATH_INTERSECTION, n, sum(p));
        else if (take_any(p, less))
            n = of_two(p, MATH_DIFFERENCE, n, sum(p));
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

static const char *take_relation(struct parser *p)
{
    for (size_t i = 0; i < sizeof relations / sizeof *relations; i++)
        if (take(p, relations[i].sign)) return relations[i].name;
    return NULL;
}

static struct math_node *relation(struct parser *p)
{
    struct math_node *left = sets(p), *chain = NULL, *one = NULL;
    const char *name;
    while (left && !p->failed && (name = take_relation(p)) != NULL) {
        struct math_node *right = sets(p);
        // a node has one place in the tree: the middle of a chain is there twice
        struct math_node *copy = right ? node(p, right->kind, "", 0) : fail(p);
        if (!copy) return NULL;
        *copy = *right;
        if (one && !chain) chain = of_one(p, MATH_CHAIN, one);
        one = of_two(p, MATH_RELATION, left, right);
        if (!one) return NULL;
        memcpy(one->name, name, strlen(name));
        if (chain) push(chain, one);
        left = copy;
    }
    return chain ? chain : one ? one : left;
}

static bool take_separator(struct parser *p)
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
    while (take_any(p, joins)) any = true;
    return any;
}

static struct math_node *list(struct parser *p)
{
    if (++p->depth > MAX_DEPTH) return fail(p);
    struct math_node *first = relation(p), *all = NULL;
    while (!p->failed && take_separator(p)) {
        const char c = peek(p);
        if (c == '\0' || c == '}' || c == ')') break; // a comma at the end
        if (!all) all = of_one(p, MATH_LIST, first);
        push(all, relation(p));
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
    struct parser p = {.arena = arena, .at = text, .end = text + len};
    const struct math_node *n = list(&p);
    if (n && take(&p, "\\pmod")) braces(&p, &len);
    if (n && take(&p, ".")) skip_blanks(&p);
    skip_blanks(&p);
    return p.failed || p.at < p.end || !n || levels(n) > MAX_LISTS ? NULL : n;
}
