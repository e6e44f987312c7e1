/* run.h: one run, of the parser or of the interpreter: its memory, its limits, its failure, the
 * text it builds; and values, which behave as Python's do. None ever changes once made, but for
 * namespaces, iterators, loops, cyclers and joiners. One thread at a time. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_JINJA_RUN_H
#define COMMON_TEXT_JINJA_RUN_H

#include "common/base/bytes.h"
#include <jansson.h>
#include <setjmp.h>
#include <string.h>
#include <time.h>

struct position { // in a template's text, from 1
    int line, column;
};

// Memory is handed out piece by piece and freed as a whole, and all text under construction stands
// in one buffer, an inner text behind the outer one. Because nothing else needs freeing, a failure
// leaves at once: fail() jumps out of run_try(), however deep the parser or the interpreter is, and
// no function between carries a status.
struct render {
    enum status fault; // what fail() ends in
    struct block *blocks;
    size_t used, limit; // bytes handed out, and how many may be
    int64_t steps;      // remaining
    size_t bytes;       // gone through that no step was taken for yet
    int depth, max_depth;
    struct position at; // what is being read or evaluated; line 0: not begun
    struct bytes text;  // what is being built: the output, then texts within it
    jmp_buf *escape;    // of the innermost run_try()
    enum status status;
    const struct builtin *const *builtins; // tables, up to a NULL: what there is, a run is told
    // of a rendering
    size_t max_output;
    const struct tm *now;                             // NULL: the clock
    struct scope *top;                                // the template's own variables
    enum { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE } flow; // until the loop that is meant has seen it
};

// Runs body(context); the status of fail() within, or ST_OK. Memory stays.
enum status run_try(struct render *r, void (*body)(void *context), void *context);
void run_release(struct render *r);
_Noreturn void fail_as(struct render *r, enum status st, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
#define fail(r, ...)           fail_as(r, (r)->fault, __VA_ARGS__)
#define fail_at(r, place, ...) ((r)->at = (place), fail(r, __VA_ARGS__))

void run_steps(struct render *r, size_t n); // takes n of what remains
// A step for every 16 bytes that an operation goes through: operands may be megabytes, and what is
// made of them is not always charged as memory. Before the work.
void run_bytes(struct render *r, size_t n);
void run_deeper(struct render *r); // the caller takes it back: r->depth--

// Zeroed, aligned for anything, never NULL: fails where there is no memory or the limit is reached.
void *run_alloc(struct render *r, size_t n, size_t bytes_each);
// `items` with room for one more than n: itself, or a larger copy where n has reached *cap.
void *run_room(struct render *r, void *items, size_t n, size_t *cap, size_t bytes_each);

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
#define STRING(text)                                                                               \
    {                                                                                              \
        text, sizeof(text) - 1, sizeof(text) - 1, false                                            \
    } // of ASCII

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
#define LIST(first, count) ((struct list){.items = (first), .n = (count)})

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

const char *value_type(struct value v); // Python's type(v).__name__

// ---- making them --------------------------------------------------------------------------------

// `data` and `text` must live as long as the run.
struct value string_new(struct render *r, const char *data, size_t n_bytes, bool markup);
struct value string_of(struct render *r, const char *text);
// Bytes [start, end) of a string, markup if it is.
struct value string_part(struct render *r, const struct string *of, size_t start, size_t end);
struct value list_new(struct render *r, enum value_kind kind, size_t n); // n times V_MISSING
struct value list_of(struct render *r, enum value_kind kind, struct list items);
struct value pair_of(struct render *r, struct value first, struct value second); // a tuple
struct value iterator_of(struct render *r, struct list items);
struct value dict_new(struct render *r, size_t cap);
// Without looking for the key.
void dict_append(struct render *r, struct dict *d, struct value key, struct value value);
struct value value_from_json(struct render *r, const json_t *json, int depth); // depth: 0

// ---- strings ------------------------------------------------------------------------------------

bool string_equal(const struct string *a, const struct string *b);
// Which of the words in `words`, a blank between, it is: from 0; -1: none of them.
int string_word(const struct string *s, const char *words);
bool value_is(struct value v, const char *text); // a string of that text
// The byte at which character `i` begins; i <= n_chars.
size_t string_offset(const struct string *s, size_t i);
// A string for "%s": no more of it than fits an error.
#define SHOWN(s) text_cut((s)->data, (s)->n_bytes, 200, (char[204]){0})

// ---- text at the end of what is being built -----------------------------------------------------

void put_bytes(struct render *r, const char *data, size_t n);
void put_text(struct render *r, const char *text);
void put_fill(struct render *r, const struct string *s, int64_t times);
void put_printf(struct render *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
void put_string(struct render *r, const struct string *s);
// What was put since r->text.len was `begin`, taken off the buffer.
struct value text_end(struct render *r, size_t begin, bool markup);

#endif
