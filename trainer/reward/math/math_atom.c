/* math_atom.c: what an operator stands between: numbers, letters, words, commands with their
 * arguments, and what is in brackets. Any thread. */
#include "trainer/reward/math/math_parser.h"

#include <ctype.h>
#include <string.h>

// Within braces, or one digit or letter, as TeX takes it: \frac12.
struct math_node *math_argument(struct math_parser *p)
{
    if (math_peek(p) == '{') {
        p->at++;
        p->commas++;
        struct math_node *inner = math_list(p);
        p->commas--;
        if (!math_take(p, "}") && p->at < p->end) return math_fail(p);
        return inner;
    }
    if (isdigit((unsigned char)math_peek(p))) return math_node_new(p, MATH_NUMBER, p->at++, 1);
    return math_atom(p);
}

// Adds "_" and the subscript's letters and digits to a name.
static void subscript(struct math_parser *p, struct math_node *n)
{
    const char *text = p->at;
    size_t len = 1, used = strlen(n->name);
    if (!math_take(p, "_")) return;
    if (math_peek(p) == '{')
        text = math_braces(p, &len);
    else
        text = p->at < p->end ? p->at++ : (math_fail(p), text);
    if (used + len + 2 >= MATH_NAME) {
        math_fail(p);
        return;
    }
    n->name[used++] = '_';
    for (size_t i = 0; i < len; i++)
        if (isalnum((unsigned char)text[i])) n->name[used++] = text[i];
    n->name[used] = '\0';
}

// ---- commands -----------------------------------------------------------------------------------
struct math_node *math_call(struct math_parser *p, const char *name, struct math_node *arg)
{
    struct math_node *n = arg ? math_node_new(p, MATH_CALL, name, strlen(name)) : math_fail(p);
    math_push(n, arg);
    return n;
}

static struct math_node *root(struct math_parser *p)
{
    struct math_node *index = NULL;
    if (math_peek(p) == '[') {
        p->at++;
        index = math_list(p);
        if (!math_take(p, "]")) return math_fail(p);
    }
    struct math_node *of = math_argument(p);
    struct math_node *one = math_node_new(p, MATH_NUMBER, "1", 1);
    if (!index) return math_call(p, "sqrt", of);
    return math_of_two(p, MATH_POWER, of, math_of_two(p, MATH_QUOTIENT, one, index));
}

// sin, log and the like, at the next place; the longer first.
static const char *const functions[] = {"arcsin", "arccos", "arctan", "arccot", "sinh",  "cosh",
                                        "tanh",   "sin",    "cos",    "tan",    "cot",   "sec",
                                        "csc",    "exp",    "ln",     "log",    "lg",    "det",
                                        "max",    "min",    "gcd",    "lcm",    "Gamma", NULL};

static struct math_node *function(struct math_parser *p, const char *name)
{
    struct math_node *exponent = NULL, *base = NULL;
    for (int i = 0; i < 2; i++) {
        if (math_take(p, "_")) base = math_argument(p);
        if (math_take(p, "^")) exponent = math_argument(p);
    }
    struct math_node *arg =
        math_peek(p) == '(' || math_peek(p) == '{' ? math_power(p) : math_operand(p);
    struct math_node *n = math_call(p, name, arg);
    if (n && base) math_push(n, base);
    if (!exponent) return n;
    const struct math_node *minus = exponent->kind == MATH_NEGATIVE ? exponent->first : NULL;
    if (minus && strcmp(minus->name, "1") == 0 && n && strlen(n->name) == 3) { // sin^{-1}
        memmove(n->name + 3, n->name, 4);
        memcpy(n->name, "arc", 3);
        return n;
    }
    return math_of_two(p, MATH_POWER, n, exponent);
}

// Elements of a matrix, to \end{...}.
static struct math_node *matrix(struct math_parser *p)
{
    struct math_node *m = math_node_new(p, MATH_MATRIX, "", 0),
                     *row = math_node_new(p, MATH_LIST, "", 0);
    size_t len;
    if (!math_braces(p, &len)) return math_fail(p);
    if (math_peek(p) == '{') math_braces(p, &len); // an array's columns
    p->cells++;
    while (!p->failed && !math_take(p, "\\end")) {
        if (p->at >= p->end) return math_fail(p);
        if (math_take(p, "\\\\") || math_take(p, "\\hline")) {
            if (row && row->n) math_push(m, row);
            row = math_node_new(p, MATH_LIST, "", 0);
            continue;
        }
        math_push(row, math_list(p));
        math_take(p, "&");
    }
    p->cells--;
    if (row && row->n) math_push(m, row);
    math_braces(p, &len);
    return m;
}

static struct math_node *words(struct math_parser *p)
{
    size_t len;
    const char *text = math_braces(p, &len);
    if (!text) return math_fail(p);
    while (len && isspace((unsigned char)*text)) text++, len--;
    while (len && isspace((unsigned char)text[len - 1])) len--;
    if (len == 1 && isalpha((unsigned char)*text)) return math_node_new(p, MATH_SYMBOL, text, 1);
    if (len && strspn(text, "0123456789") >= len) return math_node_new(p, MATH_NUMBER, text, len);
    if (len > 2 && text[0] == '(' && text[len - 1] == ')') text++, len -= 2;
    return math_node_new(p, MATH_TEXT, text, len < MATH_NAME ? len : MATH_NAME - 1);
}

static struct math_node *binomial(struct math_parser *p)
{
    struct math_node *n = math_argument(p), *k = math_argument(p);
    struct math_node *b = math_call(p, "binom", n);
    math_push(b, k);
    return b;
}

static struct math_node *fraction(struct math_parser *p)
{
    struct math_node *over = math_argument(p);
    return math_of_two(p, MATH_QUOTIENT, over, math_argument(p));
}

// Between two commands: \lfloor x \rfloor.
static struct math_node *between(struct math_parser *p, const char *name, const char *close)
{
    struct math_node *n = math_call(p, name, math_list(p));
    return math_take(p, close) ? n : math_fail(p);
}

static struct math_node *command(struct math_parser *p)
{
    static const char *const fractions[] = {"\\frac", "\\dfrac", "\\tfrac", "\\cfrac", NULL};
    static const char *const texts[] = {"\\text",       "\\textbf",       "\\textit", "\\textrm",
                                        "\\mbox",       "\\mathrm",       "\\mathbf", "\\mathit",
                                        "\\textnormal", "\\operatorname", NULL};
    static const char *const binomials[] = {"\\binom", "\\dbinom", "\\tbinom", NULL};
    static const char *const empties[] = {"\\emptyset", "\\varnothing", NULL};
    if (math_take_any(p, fractions)) return fraction(p);
    if (math_take(p, "\\sqrt")) return root(p);
    if (math_take_any(p, texts)) return words(p);
    if (math_take_any(p, binomials)) return binomial(p);
    if (math_take(p, "\\begin")) return matrix(p);
    if (math_take(p, "\\infty")) return math_node_new(p, MATH_INFINITY, "", 0);
    if (math_take_any(p, empties)) return math_node_new(p, MATH_EMPTY, "", 0);
    if (math_take(p, "\\lfloor")) return between(p, "floor", "\\rfloor");
    if (math_take(p, "\\lceil")) return between(p, "ceil", "\\rceil");
    if (math_take(p, "\\lvert")) return between(p, "abs", "\\rvert");
    p->at++;
    for (int i = 0; functions[i]; i++)
        if (math_take(p, functions[i])) return function(p, functions[i]);
    size_t len = 0;
    while (p->at + len < p->end && isalpha((unsigned char)p->at[len])) len++;
    if (len == 0) return math_fail(p);
    struct math_node *n = math_node_new(p, MATH_SYMBOL, p->at, len);
    p->at += len;
    if (n) subscript(p, n);
    return n;
}

// ---- brackets -----------------------------------------------------------------------------------
// A list as a bracket holds it; one element within ( or a TeX group is that element.
static struct math_node *bracketed(struct math_parser *p, char open, const char *const closes[])
{
    p->commas++;
    struct math_node *inner = math_list(p);
    p->commas--;
    if (!inner) return math_fail(p);
    math_skip_blanks(p);
    const char *at = p->at;
    if (!math_take_any(p, closes)) return math_fail(p);
    const char close = *at == '\\' ? at[1] : *at;
    const bool bare = inner->kind == MATH_LIST && !inner->open;
    if (!bare && (open == '(' || open == 'g') && close != ']') return inner;
    if (!bare) {
        struct math_node *one = inner;
        inner = math_node_new(p, MATH_LIST, "", 0);
        math_push(inner, one);
    }
    if (inner) inner->open = open == 'g' ? '{' : open;
    if (inner) inner->close = close;
    return inner;
}

// f(x, y): letters that are functions where a bracket follows at once.
static struct math_node *letter(struct math_parser *p)
{
    struct math_node *n = math_node_new(p, MATH_SYMBOL, p->at, 1);
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
        math_push(n, args);
    }
    return n;
}

static struct math_node *absolute(struct math_parser *p)
{
    p->bars++;
    struct math_node *n = math_call(p, "abs", math_list(p));
    p->bars--;
    return math_take(p, "|") ? n : math_fail(p);
}

struct math_node *math_atom(struct math_parser *p)
{
    static const char *const round[] = {")", "]", NULL}, *const square[] = {"]", ")", NULL},
                             *const curly[] = {"\\}", "\\rbrace", "}", NULL},
                             *const group[] = {"}", NULL};
    const char c = math_peek(p);
    if (p->failed || p->at >= p->end) return math_fail(p);
    if (isdigit((unsigned char)c) || (c == '.' && math_is_digit(p, p->at + 1))) {
        struct math_node *n = math_number(p);
        if (n && p->at < p->end && *p->at == '_') subscript(p, n);
        return n;
    }
    if (math_take(p, "\\{") || math_take(p, "\\lbrace")) {
        if (math_take(p, "\\}")) return math_node_new(p, MATH_EMPTY, "", 0);
        return bracketed(p, '{', curly);
    }
    if (math_take(p, "(")) return bracketed(p, '(', round);
    if (math_take(p, "[") || math_take(p, "\\lbrack")) return bracketed(p, '[', square);
    if (math_take(p, "{")) return bracketed(p, 'g', group);
    if (c == '|' && p->bars == 0 && math_take(p, "|")) return absolute(p);
    if (c == '\\') return command(p);
    for (int i = 0; functions[i]; i++)
        if (strlen(functions[i]) > 1 && math_take(p, functions[i]))
            return function(p, functions[i]);
    if (math_take(p, "sqrt")) return math_call(p, "sqrt", math_atom(p));
    if (math_take(p, "pi") || math_take(p, "\xcf\x80"))
        return math_node_new(p, MATH_SYMBOL, "pi", 2);
    if (isalpha((unsigned char)c)) return letter(p);
    return math_fail(p);
}
