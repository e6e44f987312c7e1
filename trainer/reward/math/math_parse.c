/* math_parse.c: reads LaTeX by recursive descent, straight from the text. What words mean stands in
 * tables; lists of words are separated by '|', the longer ones first. Blanks, sizes of brackets and
 * styles are passed over wherever a token may begin. What cannot be read makes the whole text no
 * expression. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/math/math.h"
#include "trainer/reward/math/prose.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NODES     501
#define MAX_DEPTH     60
#define MAX_RELATIONS 4
#define MAX_LISTS     4 // within each other

struct parser {
    struct math_node *nodes; // (MAX_NODES), of which the first n are used
    int n;
    const char *at, *end;
    int depth;
    int bars;      // open |
    int cells;     // matrices, in which & stands between elements
    int relations; // under way on the right of another
    int commas;    // brackets within which a comma stands between numbers, not within one
    bool failed;
};

// ---- nodes --------------------------------------------------------------------------------------
// NULL where there is no room, or an argument is NULL, and the text then is no expression.

static struct math_node *fail(struct parser *p)
{
    p->failed = true;
    return NULL;
}

static struct math_node *named(struct parser *p, enum math_kind kind, const char *name, size_t len)
{
    if (p->n >= MAX_NODES || len >= MATH_NAME) return fail(p);
    struct math_node *n = &p->nodes[p->n++];
    *n = (struct math_node){.kind = kind};
    memcpy(n->name, name, len);
    return n;
}

static struct math_node *node(struct parser *p, enum math_kind kind)
{
    return named(p, kind, "", 0);
}

static void push(struct math_node *parent, struct math_node *arg)
{
    if (!parent || !arg) return;
    *(parent->last ? &parent->last->next : &parent->first) = arg;
    parent->last = arg;
    parent->n++;
}

static struct math_node *of_one(struct parser *p, enum math_kind kind, const char *name,
                                struct math_node *a)
{
    struct math_node *n = a ? named(p, kind, name, strlen(name)) : fail(p);
    push(n, a);
    return n;
}

static struct math_node *of_two(struct parser *p, enum math_kind kind, const char *name,
                                struct math_node *a, struct math_node *b)
{
    struct math_node *n = b ? of_one(p, kind, name, a) : fail(p);
    push(n, b);
    return n;
}

// ---- tokens -------------------------------------------------------------------------------------

// Length of the first of these words that stands at the next place and is not part of a longer one,
// and which it is (ret_word may be NULL); 0: none does.
static size_t matches(const struct parser *p, const char *words, const char **ret_word)
{
    const size_t left = (size_t)(p->end - p->at);
    for (size_t n; *words; words += n + (words[n] == '|')) {
        n = strcspn(words, "|");
        if (n > left || memcmp(p->at, words, n) != 0) continue;
        const bool longer = n < left && isalpha((unsigned char)p->at[n]);
        if (isalpha((unsigned char)words[n - 1]) && longer) continue;
        if (ret_word) *ret_word = words;
        return n;
    }
    return 0;
}

static void skip_blanks(struct parser *p)
{
    static const char nothing[] =
        "\\,|\\;|\\!|\\:|\\ |~|\\quad|\\qquad|\\left|\\right|\\big|\\Big|\\bigl|\\bigr|\\Bigl|"
        "\\Bigr|\\bigg|\\Bigg|\\mleft|\\mright|\\displaystyle|\\limits|\\boxed|\\fbox|\\textstyle|"
        "\\$|$|&|\"|\\space|\\mathop";
    size_t n;
    while (p->at < p->end && !(*p->at == '&' && p->cells > 0)) {
        if (isspace((unsigned char)*p->at))
            p->at++;
        else if (!strchr("\\~$&\"", *p->at)) // where they begin
            return;
        else if ((n = matches(p, nothing, NULL)) > 0)
            p->at += n;
        else if (p->end - p->at > 5 && memcmp(p->at, "\\quad", 5) == 0) // also in front of a letter
            p->at += 5;
        else
            return;
    }
}

// Passes the first of these words that stands here; its length, 0: none does.
static size_t take_word(struct parser *p, const char *words, const char **ret_word)
{
    skip_blanks(p);
    const size_t n = matches(p, words, ret_word);
    p->at += n;
    return n;
}

static bool take(struct parser *p, const char *words)
{
    return take_word(p, words, NULL) > 0;
}

static char peek(struct parser *p)
{
    skip_blanks(p);
    return p->at < p->end ? *p->at : '\0';
}

static bool is_digit(const struct parser *p, const char *at)
{
    return at < p->end && isdigit((unsigned char)*at);
}

#define NUMBER(comma)                                                                              \
    "\\G (?: \\d{1,3} (?: (?: (?: \\{,\\} (?:\\\\!)? | ,\\\\! )\\ * | \\\\[,!;] " comma            \
    ") \\d{3} (?!\\d) )+ | \\d* ) (?: \\.\\d+ )?"

static struct math_node *number(struct parser *p)
{
    static struct prose plain = {NUMBER("| ,"), NULL}, listed = {NUMBER(""), NULL};
    struct prose_match m;
    char digits[MATH_NAME];
    size_t n = 0;
    if (!prose_find(p->commas ? &listed : &plain, p->at, p->at, p->end, &m)) return fail(p);
    for (; p->at < m.end[0]; p->at++) {
        if (n == sizeof digits) return fail(p); // longer than any
        if (is_digit(p, p->at) || *p->at == '.') digits[n++] = *p->at;
    }
    return named(p, MATH_NUMBER, digits, n);
}

// The text within the braces that begin here, which it passes; NULL: there are none.
static const char *braces(struct parser *p, size_t *ret_len)
{
    if (peek(p) != '{') return NULL;
    const char *begin = p->at + 1, *behind = behind_braces(p->at, p->end);
    p->at = behind ? behind : p->end;
    *ret_len = (size_t)(p->at - begin) - (behind != NULL);
    return begin;
}

// ---- commands -----------------------------------------------------------------------------------

static struct math_node *atom(struct parser *p);
static struct math_node *power(struct parser *p); // an atom and what stands behind it
static struct math_node *operand(struct parser *p);
static struct math_node *list(struct parser *p);

// Of a command: within braces, or one digit or letter, as TeX takes it: \frac12.
static struct math_node *argument(struct parser *p)
{
    if (isdigit((unsigned char)peek(p))) return named(p, MATH_NUMBER, p->at++, 1);
    if (peek(p) != '{') return atom(p);
    p->at++;
    p->commas++;
    struct math_node *inner = list(p);
    p->commas--;
    return take(p, "}") || p->at >= p->end ? inner : fail(p);
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

struct command {
    const char *words;
    struct math_node *(*read)(struct parser *p, const struct command *c);
    enum math_kind kind;
    const char *name, *close;
};

static struct math_node *constant(struct parser *p, const struct command *c)
{
    return node(p, c->kind);
}

static struct math_node *two_arguments(struct parser *p, const struct command *c)
{
    struct math_node *over = argument(p);
    return of_two(p, c->kind, c->name, over, argument(p));
}

// Between two commands: \lfloor x \rfloor.
static struct math_node *between(struct parser *p, const struct command *c)
{
    struct math_node *n = of_one(p, MATH_CALL, c->name, list(p));
    return take(p, c->close) ? n : fail(p);
}

static struct math_node *root(struct parser *p, const struct command *c)
{
    struct math_node *index = NULL;
    if (peek(p) == '[') {
        p->at++;
        index = list(p);
        if (!take(p, "]")) return fail(p);
    }
    struct math_node *radicand = argument(p), *one = named(p, MATH_NUMBER, "1", 1);
    if (!index) return of_one(p, MATH_CALL, c->name, radicand);
    return of_two(p, MATH_POWER, "", radicand, of_two(p, MATH_QUOTIENT, "", one, index));
}

// Elements of a matrix, to \end{...}.
static struct math_node *matrix(struct parser *p, const struct command *c)
{
    struct math_node *m = node(p, c->kind), *row = node(p, MATH_LIST);
    size_t len;
    if (!braces(p, &len)) return fail(p);
    if (peek(p) == '{') braces(p, &len); // an array's columns
    p->cells++;
    while (!p->failed && !take(p, c->close)) {
        if (p->at >= p->end) return fail(p);
        if (take(p, "\\\\|\\hline")) {
            if (row && row->n) push(m, row);
            row = node(p, MATH_LIST);
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

static struct math_node *words(struct parser *p, const struct command *c)
{
    size_t len;
    const char *text = braces(p, &len);
    if (!text) return fail(p);
    while (len && isspace((unsigned char)*text)) text++, len--;
    while (len && isspace((unsigned char)text[len - 1])) len--;
    if (len == 1 && isalpha((unsigned char)*text)) return named(p, MATH_SYMBOL, text, 1);
    if (len && strspn(text, "0123456789") >= len) return named(p, MATH_NUMBER, text, len);
    if (len > 2 && text[0] == '(' && text[len - 1] == ')') text++, len -= 2;
    return named(p, c->kind, text, len < MATH_NAME ? len : MATH_NAME - 1);
}

// \mathbb{R} is the interval of all reals; other sets go by their letter.
static struct math_node *numbers(struct parser *p, const struct command *c)
{
    size_t len;
    const char *text = braces(p, &len);
    if (!text || len == 0) return fail(p);
    if (len != 1 || *text != 'R' || peek(p) == '^' || peek(p) == '_')
        return named(p, MATH_SYMBOL, text, len < MATH_NAME ? len : MATH_NAME - 1);
    struct math_node *all = node(p, c->kind);
    push(all, of_one(p, MATH_NEGATIVE, "", node(p, MATH_INFINITY)));
    push(all, node(p, MATH_INFINITY));
    if (all) all->open = '(', all->close = ')';
    return all;
}

static const struct command commands[] = {
    {"\\frac|\\dfrac|\\tfrac|\\cfrac", two_arguments, MATH_QUOTIENT, "", NULL},
    {"\\sqrt", root, MATH_CALL, "sqrt", NULL},
    {"\\text|\\textbf|\\textit|\\textrm|\\mbox|\\mathrm|\\mathbf|\\mathit|\\textnormal|"
     "\\operatorname",
     words, MATH_TEXT, NULL, NULL},
    {"\\binom|\\dbinom|\\tbinom", two_arguments, MATH_CALL, "binom", NULL},
    {"\\mathbb", numbers, MATH_LIST, NULL, NULL},
    {"\\begin", matrix, MATH_MATRIX, NULL, "\\end"},
    {"\\infty", constant, MATH_INFINITY, NULL, NULL},
    {"\\emptyset|\\varnothing", constant, MATH_EMPTY, NULL, NULL},
    {"\\lfloor", between, MATH_CALL, "floor", "\\rfloor"},
    {"\\lceil", between, MATH_CALL, "ceil", "\\rceil"},
    {"\\lvert", between, MATH_CALL, "abs", "\\rvert"},
};

// With or without a backslash.
static const char functions[] =
    "arcsin|arccos|arctan|arccot|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|exp|ln|log|lg|det|max|min|"
    "gcd|lcm|Gamma";

static struct math_node *function(struct parser *p, const char *name, size_t len)
{
    struct math_node *exponent = NULL, *base = NULL;
    for (int i = 0; i < 2; i++) {
        if (take(p, "_")) base = argument(p);
        if (take(p, "^")) exponent = argument(p);
    }
    struct math_node *arg = peek(p) == '(' || peek(p) == '{' ? power(p) : operand(p);
    struct math_node *n = of_one(p, MATH_CALL, "", arg);
    if (n) memcpy(n->name, name, len);
    push(n, base);
    if (!exponent) return n;
    const struct math_node *minus = exponent->kind == MATH_NEGATIVE ? exponent->first : NULL;
    if (minus && strcmp(minus->name, "1") == 0 && n && len == 3) { // sin^{-1}
        memmove(n->name + 3, n->name, 4);
        memcpy(n->name, "arc", 3);
        return n;
    }
    return of_two(p, MATH_POWER, "", n, exponent);
}

static struct math_node *command(struct parser *p)
{
    const char *name;
    size_t len;
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (take(p, commands[i].words)) return commands[i].read(p, &commands[i]);
    p->at++;
    if ((len = take_word(p, functions, &name)) > 0) return function(p, name, len);
    while (p->at + len < p->end && isalpha((unsigned char)p->at[len])) len++;
    if (len == 0) return fail(p);
    struct math_node *n = named(p, MATH_SYMBOL, p->at, len);
    p->at += len;
    if (n) subscript(p, n);
    return n;
}

// ---- brackets -----------------------------------------------------------------------------------

static const struct bracket {
    const char *opens, *closes;
    char open;   // of the list
    bool groups; // one element within it is that element
} brackets[] = {{"\\{|\\lbrace", "\\}|\\rbrace|}", '{', false},
                {"(", ")|]", '(', true},
                {"[|\\lbrack", "]|)", '[', false},
                {"{", "}", '{', true}};
static const struct bracket arguments = {"(", ")", '(', true};

static struct math_node *bracketed(struct parser *p, const struct bracket *b)
{
    p->commas++;
    struct math_node *inner = list(p);
    p->commas--;
    if (!inner) return fail(p);
    skip_blanks(p);
    const char *at = p->at;
    if (!take(p, b->closes)) return fail(p);
    const char close = *at == '\\' ? at[1] : *at;
    const bool bare = inner->kind == MATH_LIST && !inner->open;
    if (!bare && b->groups && close != ']') return inner;
    if (!bare) inner = of_one(p, MATH_LIST, "", inner);
    if (inner) inner->open = b->open;
    if (inner) inner->close = close;
    return inner;
}

// f(x, y): letters that are functions where a bracket follows at once.
static struct math_node *letter(struct parser *p)
{
    struct math_node *n = named(p, MATH_SYMBOL, p->at, 1);
    const bool names_function = strchr("fghFGHPQRTW", *p->at++) != NULL;
    if (n) subscript(p, n);
    while (n && p->at < p->end && *p->at == '\'' && strlen(n->name) + 1 < MATH_NAME)
        strncat(n->name, p->at++, 1);
    if (!n || !names_function || p->at >= p->end || *p->at != '(') return n;
    p->at++;
    struct math_node *args = bracketed(p, &arguments);
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
    p->at++;
    p->bars++;
    struct math_node *n = of_one(p, MATH_CALL, "abs", list(p));
    p->bars--;
    if (peek(p) != '|') return fail(p);
    p->at++;
    return n;
}

static struct math_node *atom(struct parser *p)
{
    const char c = peek(p), *name;
    size_t len;
    if (p->failed || p->at >= p->end) return fail(p);
    if (isdigit((unsigned char)c) || (c == '.' && is_digit(p, p->at + 1))) {
        struct math_node *n = number(p);
        if (n && p->at < p->end && *p->at == '_') subscript(p, n);
        return n;
    }
    for (size_t i = 0; i < sizeof brackets / sizeof *brackets; i++) {
        if (!take(p, brackets[i].opens)) continue;
        return i == 0 && take(p, "\\}") ? node(p, MATH_EMPTY) : bracketed(p, &brackets[i]);
    }
    if (c == '|' && p->bars == 0) return absolute(p);
    if (c == '\\') return command(p);
    if ((len = take_word(p, functions, &name)) > 0) return function(p, name, len);
    if (take(p, "sqrt")) return of_one(p, MATH_CALL, "sqrt", atom(p));
    if (take(p, "pi|\xcf\x80")) return named(p, MATH_SYMBOL, "pi", 2);
    return isalpha((unsigned char)c) ? letter(p) : fail(p);
}

// ---- operators ----------------------------------------------------------------------------------

enum level { RELATIONS, SETS, SUMS, PRODUCTS }; // the loosest first

#define MINUS "-|\xe2\x88\x92|\xe2\x80\x93"

static const struct infix {
    const char *signs;
    enum level level;
    enum math_kind kind;
    const char *name; // of a relation
    bool negates;     // what stands behind it
} infixes[] = {{"\\leqslant|\\leq|\\le|\xe2\x89\xa4|<=", RELATIONS, MATH_RELATION, "<=", false},
               {"\\geqslant|\\geq|\\ge|\xe2\x89\xa5|>=", RELATIONS, MATH_RELATION, ">=", false},
               {"\\neq|\\ne|!=|\xe2\x89\xa0", RELATIONS, MATH_RELATION, "!=", false},
               {"\\lt|<", RELATIONS, MATH_RELATION, "<", false},
               {"\\gt|>", RELATIONS, MATH_RELATION, ">", false},
               {"\\approx|\\sim|~=|\xe2\x89\x88", RELATIONS, MATH_RELATION, "~", false},
               {"\\equiv|==|=", RELATIONS, MATH_RELATION, "=", false},
               {"\\in|\xe2\x88\x88", RELATIONS, MATH_RELATION, "in", false},
               {"\\cup|\xe2\x88\xaa", SETS, MATH_UNION, "", false},
               {"\\cap", SETS, MATH_INTERSECTION, "", false},
               {"\\setminus|\\backslash", SETS, MATH_DIFFERENCE, "", false},
               {"+", SUMS, MATH_SUM, "", false},
               {MINUS, SUMS, MATH_SUM, "", true},
               {"\\pm|\\mp|\xc2\xb1", SUMS, MATH_EITHER, "", false},
               {"*|\\cdot|\\times|\xc3\x97|\xc2\xb7", PRODUCTS, MATH_PRODUCT, "", false},
               {"/|\\div|\xc3\xb7|:", PRODUCTS, MATH_QUOTIENT, "", false}};
#define N_INFIXES (sizeof infixes / sizeof *infixes)

static struct math_node *power(struct parser *p)
{
    struct math_node *n = atom(p);
    while (n && !p->failed) {
        if (take(p, "^\\circ|^{\\circ}|^{\\degree}|\\degree|\xc2\xb0"))
            continue; // an angle in degrees is its number
        if (matches(p, "!", NULL) && !matches(p, "!=", NULL) && take(p, "!"))
            n = of_one(p, MATH_CALL, "factorial", n);
        else if (take(p, "\\%|%|percent|percentage|pct|\\text{percent}"))
            n = of_one(p, MATH_PERCENT, "", n);
        else if (take(p, "^|**"))
            n = of_two(p, MATH_POWER, "", n,
                       take(p, "-")     ? of_one(p, MATH_NEGATIVE, "", power(p))
                       : peek(p) == '{' ? argument(p)
                                        : atom(p));
        else
            break;
    }
    return n;
}

static struct math_node *signed_operand(struct parser *p)
{
    if (++p->depth > MAX_DEPTH) return fail(p);
    struct math_node *n = take(p, MINUS) ? of_one(p, MATH_NEGATIVE, "", signed_operand(p))
                          : take(p, "+") ? signed_operand(p)
                          : take(p, "\\pm|\xc2\xb1") ? of_one(p, MATH_EITHER, "", signed_operand(p))
                                                     : power(p);
    p->depth--;
    return n;
}

// What a function without brackets takes: sin 2x.
static struct math_node *operand(struct parser *p)
{
    struct math_node *n = signed_operand(p);
    if (!n || n->kind != MATH_NUMBER || !isalpha((unsigned char)peek(p))) return n;
    return of_two(p, MATH_PRODUCT, "", n, power(p));
}

// Whether a factor may begin here without a sign of multiplication.
static bool begins_factor(struct parser *p)
{
    static const char others[] =
        "\\}|\\\\|\\end|\\rfloor|\\rceil|\\rvert|\\rbrace|\\to|\\pmod|\\mod|\\implies|"
        "\\Rightarrow|\\ldots|\\dots|\\cdots|\\mid|\\hline|\\notin|\\land|\\lor|and|or|"
        "\\text{and}|\\text{or}|\\text{ and|\\text{ or|\\text{and |\\text{or ";
    const char c = peek(p);
    if (p->at >= p->end || matches(p, others, NULL)) return false;
    for (size_t i = 0; i < N_INFIXES; i++)
        if (matches(p, infixes[i].signs, NULL)) return false;
    if (c == '\\' || c == '(' || c == '{' || c == '[') return true;
    if (c == '|') return p->bars == 0;
    return isalnum((unsigned char)c) || c == '\xcf' || (c == '.' && is_digit(p, p->at + 1));
}

// Also squared.
static bool is_words(const struct math_node *n)
{
    return n && (n->kind == MATH_TEXT || (n->kind == MATH_POWER && n->first->kind == MATH_TEXT));
}

// A factor without a sign behind n.
static struct math_node *with_factor(struct parser *p, struct math_node *n)
{
    const bool command = *p->at == '\\';
    struct math_node *factor = power(p);
    if (is_words(factor) && !is_words(n)) return n; // a unit
    // 1\frac12 is a sum
    const bool mixed = command && n->kind == MATH_NUMBER && !strchr(n->name, '.') && factor &&
                       factor->kind == MATH_QUOTIENT && factor->first->kind == MATH_NUMBER &&
                       factor->first->next->kind == MATH_NUMBER;
    return of_two(p, mixed ? MATH_SUM : MATH_PRODUCT, "", n, factor);
}

static const struct infix *take_infix(struct parser *p, enum level level)
{
    for (const struct infix *o = infixes; o < infixes + N_INFIXES; o++)
        if (o->level == level && take(p, o->signs)) return o;
    return NULL;
}

// What operators of that level, and of those that bind closer, make.
static struct math_node *expression(struct parser *p, enum level level)
{
    if (level > PRODUCTS) return signed_operand(p);
    struct math_node *n = expression(p, level + 1);
    while (n && !p->failed) {
        const struct infix *o = take_infix(p, level);
        if (!o && (level < PRODUCTS || !begins_factor(p))) break;
        if (!o) {
            n = with_factor(p, n);
            continue;
        }
        struct math_node *right = expression(p, level + 1);
        n = of_two(p, o->kind, o->name, n,
                   o->negates ? of_one(p, MATH_NEGATIVE, "", right) : right);
    }
    return n;
}

// ---- relations and lists ------------------------------------------------------------------------

static struct math_node *relation(struct parser *p)
{
    struct math_node *n = expression(p, SETS), *chain = NULL;
    const struct infix *o;
    while (n && !p->failed && (o = take_infix(p, RELATIONS)) != NULL) {
        if (++p->relations > MAX_RELATIONS) return fail(p);
        struct math_node *side = of_one(p, o->kind, o->name, expression(p, SETS));
        p->relations--;
        if (!chain) chain = of_one(p, MATH_CHAIN, "", n);
        push(chain, side);
    }
    return chain ? chain : n;
}

static struct math_node *list(struct parser *p)
{
    static const char joins[] =
        ",|;|\\text{and}|\\text{or}|\\text{ and }|\\text{ or }|\\text{and }|\\text{ and}|"
        "\\text{, and }|\\text{ or}|\\text{or }|\\land|\\lor|and|or";
    if (++p->depth > MAX_DEPTH) return fail(p);
    struct math_node *first = relation(p), *all = NULL;
    while (!p->failed && take(p, joins)) {
        while (take(p, joins)) continue;
        const char c = peek(p);
        if (c == '\0' || c == '}' || c == ')') break; // a comma at the end
        if (!all) all = of_one(p, MATH_LIST, "", first);
        push(all, relation(p));
    }
    p->depth--;
    return p->failed ? NULL : all ? all : first;
}

// How many lists are within each other.
static int levels(const struct math_node *n)
{
    int max = 0;
    for (const struct math_node *a = n->first; a; a = a->next) {
        const int inner = levels(a);
        if (inner > max) max = inner;
    }
    return max + (n->kind == MATH_LIST);
}

struct math_node *math_parse(const char *text, size_t len)
{
    struct math_node *nodes = malloc(MAX_NODES * sizeof *nodes);
    struct parser p = {.nodes = nodes, .n = 1, .at = text, .end = text + len}; // 0: the root
    const struct math_node *n = nodes ? list(&p) : NULL;
    if (n && take(&p, "\\pmod")) braces(&p, &len);
    if (n && take(&p, ".")) skip_blanks(&p);
    skip_blanks(&p);
    if (p.failed || p.at < p.end || !n || levels(n) > MAX_LISTS) {
        free(nodes);
        return NULL;
    }
    nodes[0] = *n;
    return nodes;
}
