/* math_token.c: nodes of an expression's tree, and the words, numbers and braces of its text.
 * Blanks, sizes of brackets and styles are passed over wherever a token may begin. Any thread. */
#include "trainer/reward/math/math_parser.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NODES 500

struct math_arena {
    struct math_node *nodes; // (MAX_NODES), of which the first n are used
    int n;
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
struct math_node *math_fail(struct math_parser *p)
{
    p->failed = true;
    return NULL;
}

struct math_node *math_node_new(struct math_parser *p, enum math_kind kind, const char *name,
                                size_t len)
{
    if (p->arena->n >= MAX_NODES || len >= MATH_NAME) return math_fail(p);
    struct math_node *n = &p->arena->nodes[p->arena->n++];
    *n = (struct math_node){.kind = kind};
    memcpy(n->name, name, len);
    return n;
}

void math_push(struct math_node *parent, struct math_node *arg)
{
    if (!parent || !arg) return;
    if (parent->last)
        parent->last->next = arg;
    else
        parent->first = arg;
    parent->last = arg;
    parent->n++;
}

struct math_node *math_of_two(struct math_parser *p, enum math_kind kind, struct math_node *a,
                              struct math_node *b)
{
    struct math_node *n = a && b ? math_node_new(p, kind, "", 0) : math_fail(p);
    math_push(n, a);
    math_push(n, b);
    return n;
}

struct math_node *math_of_one(struct math_parser *p, enum math_kind kind, struct math_node *a)
{
    struct math_node *n = a ? math_node_new(p, kind, "", 0) : math_fail(p);
    math_push(n, a);
    return n;
}

// ---- tokens -------------------------------------------------------------------------------------
// Length of the word at the next place, which is not part of a longer one; 0: another.
size_t math_matches(const struct math_parser *p, const char *word)
{
    const size_t n = strlen(word);
    if ((size_t)(p->end - p->at) < n || memcmp(p->at, word, n) != 0) return 0;
    const bool longer = p->at + n < p->end && isalpha((unsigned char)p->at[n]);
    return isalpha((unsigned char)word[n - 1]) && longer ? 0 : n;
}

size_t math_matches_any(const struct math_parser *p, const char *const words[])
{
    size_t n = 0;
    for (int i = 0; words[i] && n == 0; i++) n = math_matches(p, words[i]);
    return n;
}

void math_skip_blanks(struct math_parser *p)
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
        else if ((n = math_matches_any(p, nothing)) > 0)
            p->at += n;
        else if (p->end - p->at > 5 && memcmp(p->at, "\\quad", 5) == 0) // also in front of a letter
            p->at += 5;
        else
            return;
    }
}

bool math_take(struct math_parser *p, const char *word)
{
    math_skip_blanks(p);
    const size_t n = math_matches(p, word);
    p->at += n;
    return n > 0;
}

bool math_take_any(struct math_parser *p, const char *const words[])
{
    for (int i = 0; words[i]; i++)
        if (math_take(p, words[i])) return true;
    return false;
}

char math_peek(struct math_parser *p)
{
    math_skip_blanks(p);
    return p->at < p->end ? *p->at : '\0';
}

bool math_is_digit(const struct math_parser *p, const char *at)
{
    return at < p->end && isdigit((unsigned char)*at);
}

// ---- numbers, letters, words --------------------------------------------------------------------
// Where three digits and no fourth begin behind a separator of thousands at `at`; NULL: none.
static const char *thousands(const struct math_parser *p, const char *at)
{
    static const char *const forms[] = {"{,}\\!", "{,}", ",\\!", ",", "\\,", "\\!", "\\;"};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const size_t n = strlen(forms[i]);
        if ((size_t)(p->end - at) < n || memcmp(at, forms[i], n) != 0) continue;
        if (p->commas && strcmp(forms[i], ",") == 0) return NULL;
        const char *to = at + n;
        while (n > 2 && to < p->end && *to == ' ') to++; // behind TeX's negative space
        const bool three =
            math_is_digit(p, to) && math_is_digit(p, to + 1) && math_is_digit(p, to + 2);
        return three && !math_is_digit(p, to + 3) ? to : NULL;
    }
    return NULL;
}

struct math_node *math_number(struct math_parser *p)
{
    char digits[MATH_NAME];
    size_t n = 0, whole = 0;
    bool point = false;
    while (p->at < p->end && n < sizeof digits - 1) {
        const char *to;
        if (math_is_digit(p, p->at) || (*p->at == '.' && !point && math_is_digit(p, p->at + 1))) {
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
    if (math_is_digit(p, p->at)) return math_fail(p); // longer than any
    return math_node_new(p, MATH_NUMBER, digits, n);
}

// The text within the braces that begin here, which it passes; NULL: there are none.
const char *math_braces(struct math_parser *p, size_t *ret_len)
{
    int open = 1;
    if (math_peek(p) != '{') return NULL;
    const char *begin = ++p->at;
    for (; p->at < p->end; p->at++) {
        open += *p->at == '{' ? 1 : *p->at == '}' ? -1 : 0;
        if (open == 0) break;
    }
    *ret_len = (size_t)(p->at - begin);
    if (p->at < p->end) p->at++;
    return begin;
}
