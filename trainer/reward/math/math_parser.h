/* math_parser.h: what the files of the parser of expressions share: math_token.c has nodes and
 * tokens, math_atom.c what an operator stands between, math_expr.c operators, relations and lists.
 * Private to them. */
#ifndef TRAINER_MATH_PARSER_H
#define TRAINER_MATH_PARSER_H

#include "trainer/reward/math/math_expr.h"

struct math_parser {
    struct math_arena *arena;
    const char *at, *end;
    int depth;
    int bars;      // open |
    int cells;     // matrices, in which & stands between elements
    int relations; // under way on the right of another, whose sides are in the tree twice
    int commas;    // brackets within which a comma stands between numbers, not within one
    bool failed;
};

// Nodes; NULL where there is no room, or an argument is NULL, and the text then is no expression.
struct math_node *math_fail(struct math_parser *p);
struct math_node *math_node_new(struct math_parser *p, enum math_kind kind, const char *name,
                                size_t len);
void math_push(struct math_node *parent, struct math_node *arg);
struct math_node *math_of_one(struct math_parser *p, enum math_kind kind, struct math_node *a);
struct math_node *math_of_two(struct math_parser *p, enum math_kind kind, struct math_node *a,
                              struct math_node *b);

// Tokens: of the word at the next place, behind blanks but for the first two. Lists of words are
// NULL-ended.
size_t math_matches(const struct math_parser *p, const char *word); // its length; 0: another
size_t math_matches_any(const struct math_parser *p, const char *const words[]);
bool math_take(struct math_parser *p, const char *word);
bool math_take_any(struct math_parser *p, const char *const words[]);
char math_peek(struct math_parser *p);
void math_skip_blanks(struct math_parser *p);
bool math_is_digit(const struct math_parser *p, const char *at);
struct math_node *math_number(struct math_parser *p);
// The text within the braces that begin here, which it passes; NULL: there are none.
const char *math_braces(struct math_parser *p, size_t *ret_len);

struct math_node *math_atom(struct math_parser *p);
struct math_node *math_call(struct math_parser *p, const char *name, struct math_node *arg);
struct math_node *math_argument(struct math_parser *p); // of a command
struct math_node *math_power(struct math_parser *p);    // an atom and what stands behind it
struct math_node *math_operand(struct math_parser *p);  // of a function without brackets
struct math_node *math_list(struct math_parser *p);

#endif
