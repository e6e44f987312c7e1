/* lexer.h: a template's text cut into tokens, white space control applied. */
#ifndef COMMON_JINJA_LEXER_H
#define COMMON_JINJA_LEXER_H

#include "common/jinja/value.h"

// name, what errors call it
#define TOKEN_TABLE(X)                                                                             \
    X(T_END, "end of template")                                                                    \
    X(T_DATA, "template data")                                                                     \
    X(T_PRINT_BEGIN, "begin of print statement")                                                   \
    X(T_PRINT_END, "end of print statement")                                                       \
    X(T_BLOCK_BEGIN, "begin of statement block")                                                   \
    X(T_BLOCK_END, "end of statement block")                                                       \
    X(T_NAME, "name")                                                                              \
    X(T_STRING, "string")                                                                          \
    X(T_INTEGER, "integer")                                                                        \
    X(T_FLOAT, "float")                                                                            \
    X(T_ADD, "+")                                                                                  \
    X(T_SUB, "-")                                                                                  \
    X(T_DIV, "/")                                                                                  \
    X(T_FLOORDIV, "//")                                                                            \
    X(T_MUL, "*")                                                                                  \
    X(T_MOD, "%")                                                                                  \
    X(T_POW, "**")                                                                                 \
    X(T_TILDE, "~")                                                                                \
    X(T_LBRACKET, "[")                                                                             \
    X(T_RBRACKET, "]")                                                                             \
    X(T_LPAREN, "(")                                                                               \
    X(T_RPAREN, ")")                                                                               \
    X(T_LBRACE, "{")                                                                               \
    X(T_RBRACE, "}")                                                                               \
    X(T_EQ, "==")                                                                                  \
    X(T_NE, "!=")                                                                                  \
    X(T_GT, ">")                                                                                   \
    X(T_GE, ">=")                                                                                  \
    X(T_LT, "<")                                                                                   \
    X(T_LE, "<=")                                                                                  \
    X(T_ASSIGN, "=")                                                                               \
    X(T_DOT, ".")                                                                                  \
    X(T_COLON, ":")                                                                                \
    X(T_PIPE, "|")                                                                                 \
    X(T_COMMA, ",")                                                                                \
    X(T_SEMICOLON, ";")

enum token_type {
#define X(name, words) name,
    TOKEN_TABLE(X)
#undef X
};

struct token {
    enum token_type type;
    int line, column;   // 1-based, of its first character
    struct value value; // text of T_DATA, T_NAME and T_STRING; the number of the others
};

struct token_stream {
    struct token *tokens; // in the arena; the last is T_END
    size_t n;
};

const char *token_words(enum token_type type);

// Fails where a token is none, with a sentence that begins with the place: "line 3, column 7: ".
struct token_stream lexer_run(struct arena *a, const char *text, size_t len);
_Noreturn void place_fail(struct arena *a, int line, int column, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

// ---- literal.c: numbers and strings -------------------------------------------------------------

// A literal that begins at `at` in a text that a NUL ends: its value, and the place behind it; or
// in *ret_wrong what is wrong with it.
size_t literal_number(const char *s, size_t at, struct value *ret, const char **ret_wrong);
size_t literal_string(struct arena *a, const char *s, size_t len, size_t at, struct value *ret,
                      const char **ret_wrong);

#endif
