/* value.h: the memory of a template or a rendering, and the values in it, which behave as Python's
 * do. None ever changes once made, but for namespaces, iterators, loops, cyclers and joiners. One
 * thread at a time. */
#ifndef COMMON_TEXT_JINJA_VALUE_H
#define COMMON_TEXT_JINJA_VALUE_H

#include "common/base/status.h"
#include <jansson.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>

// ---- arenas -------------------------------------------------------------------------------------

// Memory handed out piece by piece, freed as a whole. Because nothing else needs freeing, a failure
// leaves at once: arena_fail() jumps out of arena_try(), however deep the parser or the interpreter
// is, and no function between carries a status. Only jinja_parse(), jinja_render() and generators
// (builtins.c) try.
struct arena_block;
struct arena {
    struct arena_block *blocks;
    size_t used, limit; // bytes handed out, and how many may be
    jmp_buf *escape;    // of the innermost arena_try()
    enum status status; // what it returns
};

// Runs body(context); the status of arena_fail() within, or ST_OK. Memory stays.
enum status arena_try(struct arena *a, void (*body)(void *context), void *context);
_Noreturn void arena_fail(struct arena *a, enum status st, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// Zeroed, aligned for anything, never NULL: fails where there is no memory or the limit is reached.
void *arena_alloc(struct arena *a, size_t bytes);
void *arena_array(struct arena *a, size_t n, size_t bytes_each);
// `items` with room for one more than n: itself, or a larger copy where n has reached *cap.
void *arena_room(struct arena *a, void *items, size_t n, size_t *cap, size_t bytes_each);
void arena_release(struct arena *a);

// ---- kinds --------------------------------------------------------------------------------------

// name, Python's type(v).__name__
#define KIND_TABLE(X)                                                                              \
    X(V_MISSING, "missing") /* an argument that was not given, an item that is not there */        \
    X(V_UNDEFINED, "Undefined")                                                                    \
    X(V_NONE, "NoneType")                                                                          \
    X(V_BOOL, "bool")                                                                              \
    X(V_INT, "int") /* 64 bits; what goes beyond is an error */                                    \
    X(V_FLOAT, "float")                                                                            \
    X(V_STRING, "str")                                                                             \
    X(V_LIST, "list")                                                                              \
    X(V_TUPLE, "tuple")                                                                            \
    X(V_DICT, "dict")                                                                              \
    X(V_KEYS, "dict_keys") /* views of a dict: lists that it has made */                           \
    X(V_VALUES, "dict_values")                                                                     \
    X(V_ITEMS, "dict_items")                                                                       \
    X(V_RANGE, "range")                                                                            \
    X(V_ITERATOR, "generator") /* goes over its items once, as Python's generators do */           \
    X(V_NAMESPACE, "Namespace")                                                                    \
    X(V_MACRO, "Macro")                                                                            \
    X(V_FUNCTION, "function")                                                                      \
    X(V_METHOD, "method")                                                                          \
    X(V_LOOP, "LoopContext")                                                                       \
    X(V_CYCLER, "Cycler")                                                                          \
    X(V_JOINER, "Joiner")

enum value_kind {
#define X(name, type) name,
    KIND_TABLE(X)
#undef X
};

// Sets of kinds.
#define KIND(kind) (1u << (kind))
#define NUMBERS    (KIND(V_BOOL) | KIND(V_INT) | KIND(V_FLOAT))
#define SEQUENCES  (KIND(V_STRING) | KIND(V_LIST) | KIND(V_TUPLE))
#define PLACES     (SEQUENCES | KIND(V_RANGE)) // a[1]
#define LISTS                                                                                      \
    (KIND(V_LIST) | KIND(V_TUPLE) | KIND(V_RANGE) | KIND(V_KEYS) | KIND(V_VALUES) |                \
     KIND(V_ITEMS)) // items lie in v.list
#define SIZED     (LISTS | KIND(V_UNDEFINED) | KIND(V_STRING) | KIND(V_DICT) | KIND(V_LOOP)) // len()
#define ITERABLES (SIZED | KIND(V_ITERATOR))

struct string {
    const char *data; // UTF-8, n_bytes of it; U+0000 may be among them
    size_t n_bytes, n_chars;
    bool markup; // safe HTML: what is joined to it is escaped first
};

struct value {
    enum value_kind kind;
    union {
        bool truth;
        int64_t integer;
        double real;
        const struct string *string;
        const struct list *list;   // LISTS
        struct dict *dict;         // V_DICT, V_NAMESPACE
        struct iterator *iterator; // V_ITERATOR, V_CYCLER, V_JOINER
        struct undefined *undefined;
        const struct macro *macro;
        const struct builtin *function;
        const struct method *method;
        struct loop *loop;
    };
};

struct list {
    struct value *items; // written by whoever makes the list, and never after
    size_t n;
    bool group;           // of groupby: its two items are also called grouper and list
    const int64_t *range; // of V_RANGE: start, stop, step
};

struct dict_entry {
    struct value key, value;
};
struct dict { // in the order of insertion; looked through from the front
    struct dict_entry *entries;
    size_t n, cap;
};

struct iterator { // a joiner has one item: its separator
    struct list items;
    size_t at;
    const char *failure; // what asking for more than the items ends in; NULL: they are all
};

struct undefined {
    const char *hint;      // why it is undefined; NULL: the others say it
    struct value of, name; // what has no such attribute or element; V_MISSING: no such variable
};

// The field after `kind` is set by name: value_of(.kind = V_INT, .integer = 3).
#define value_of(...)   ((struct value){__VA_ARGS__})
#define NONE            value_of(.kind = V_NONE)
#define MISSING         value_of(.kind = V_MISSING)
#define value_bool(x)   value_of(.kind = V_BOOL, .truth = (x))
#define value_int(x)    value_of(.kind = V_INT, .integer = (x))
#define value_float(x)  value_of(.kind = V_FLOAT, .real = (x))
#define value_string(x) value_of(.kind = V_STRING, .string = (x))

static inline bool of_kinds(struct value v, unsigned kinds)
{
    return kinds >> v.kind & 1;
}

static inline bool given(struct value v)
{
    return v.kind != V_MISSING;
}

// ---- making them --------------------------------------------------------------------------------

// `data` must live as long as the arena.
struct value string_new(struct arena *a, const char *data, size_t n_bytes, bool markup);
struct value string_copy(struct arena *a, const char *data, size_t n_bytes, bool markup);
struct value string_of(struct arena *a, const char *text);              // borrows
struct value list_new(struct arena *a, enum value_kind kind, size_t n); // n times V_MISSING
struct value list_of(struct arena *a, enum value_kind kind, struct list items);
struct value pair_of(struct arena *a, struct value first, struct value second); // a tuple
struct value iterator_of(struct arena *a, struct list items);
struct value dict_new(struct arena *a, size_t cap);
// Without looking for the key.
void dict_append(struct arena *a, struct dict *d, struct value key, struct value value);
struct value value_from_json(struct arena *a, const json_t *json, int depth); // depth: 0

// ---- strings ------------------------------------------------------------------------------------

bool string_equal(const struct string *a, const struct string *b);
bool string_is(const struct string *s, const char *text);
// Which of the words in `words`, a blank between, it is: from 0; -1: none of them.
int string_word(const struct string *s, const char *words);
bool value_is(struct value v, const char *text); // a string of that text
// The byte at which character `i` begins; i <= n_chars.
size_t string_offset(const struct string *s, size_t i);
// A string for "%.*s": its length, but no more than fits an error, and its text.
#define SHOWN(s) (int)((s)->n_bytes < 200 ? (s)->n_bytes : 200), (s)->data

const char *value_type(struct value v); // Python's type(v).__name__

#endif
