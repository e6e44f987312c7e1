/* run.h: one rendering: its memory, its limits, and what its parts call of each other. One thread.
 *
 * A failure leaves with arena_fail(), its sentence being what Jinja or Python would say;
 * interpret.c puts the place before it. All memory is the arena's, and all text under construction
 * stands in one buffer, an inner text behind the outer one: so there is nothing to free on the way.
 */
#ifndef COMMON_TEXT_JINJA_RUN_H
#define COMMON_TEXT_JINJA_RUN_H

#include "common/base/bytes.h"
#include "common/text/jinja/syntax.h"
#include <time.h>

#define MAX_DEPTH 800 // of evaluations within each other

struct scope {
    const struct scope *outer; // NULL: this one has the variables given
    struct dict variables;
};

enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };

struct run {
    struct arena arena;
    int64_t steps; // remaining
    size_t bytes;  // gone through that no step was taken for yet
    size_t max_output;
    int depth;
    const struct tm *now;                  // NULL: the clock
    const struct builtin *const *builtins; // tables, up to a NULL
    struct scope top;                      // the template's own
    struct bytes text;                     // what is being built: the output, then texts within it
    enum flow flow;                        // set by break and continue until their loop sees it
    const struct node *at;                 // being evaluated; NULL: not begun
};

// ---- failures and limits ------------------------------------------------------------------------

#define fail(r, ...) arena_fail(&(r)->arena, ST_INVALID, __VA_ARGS__)
_Noreturn void undefined_fail(struct run *r, struct value v); // what using it says
// "expected X, got 'int'": of an argument of the wrong type.
_Noreturn void type_fail(struct run *r, const char *what, struct value v);

void run_steps(struct run *r, size_t n); // takes n of what remains
// A step for every 16 bytes that an operation goes through: operands may be megabytes, and what is
// made of them is not always charged as memory. Before the work.
void run_bytes(struct run *r, size_t n);
// Charged: a byte for looking, and what there is to compare.
bool run_same(struct run *r, const struct string *a, const struct string *b);
void run_deeper(struct run *r); // the caller takes it back: r->depth--

// Text at the end of what is being built.
void run_put(struct run *r, const char *data, size_t n);
void run_puts(struct run *r, const char *text);
void run_fill(struct run *r, const char *data, size_t n, int64_t times);
void run_printf(struct run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
void run_put_string(struct run *r, const struct string *s);
// A text of its own: from text_begin() to text_end(), which takes it off the buffer.
size_t text_begin(const struct run *r);
struct value text_end(struct run *r, size_t begin, bool markup);
// Bytes [start, end) of a string, markup if it is.
struct value string_part(struct run *r, const struct string *of, size_t start, size_t end);

struct value undefined_because(struct run *r, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
// `of` V_MISSING: a variable.
struct value undefined_item(struct run *r, struct value of, struct value name);

// ---- functions for templates --------------------------------------------------------------------

struct arguments {
    struct list positional;
    struct dict named; // its keys are strings
};

#define MAX_PARAMS 4
struct call {
    struct run *run;
    const struct builtin *function;
    struct value v[1 + MAX_PARAMS]; // v[0]: what it is applied to (filters, tests, methods); then
                                    // the parameters in order, V_MISSING where not given
    const struct arguments *all;    // as given, for those that take any number
};

// A filter, a test, a method or a function of this program.
struct builtin {
    int of;           // what it is: FILTER, TEST, FUNCTION, and METHOD of a kind of value
    const char *name; // or several that mean the same, a blank between
    struct value (*call)(struct run *r, const struct call *c);
    int which; // of several that one function does
    // The names of the parameters, a blank between. Signs may stand first:
    //   $  v[0] is made a str
    //   ~  it is a generator: a failure waits until somebody goes over it
    //   /  arguments by place only
    //   *  any arguments: the function looks at `all`
    const char *params;
    int n_required;
};
#define BUILTIN_SIGNS "$~/*"
// For "%.*s": the first of its names.
#define NAME(f) (int)strcspn((f)->name, " "), (f)->name
// The definition of one.
#define UNUSED        __attribute__((unused))
#define BUILTIN(name) static struct value name(UNUSED struct run *r, UNUSED const struct call *c)

enum { FILTER = 1, TEST = 2, FUNCTION = 4 };
#define METHODS(kinds) ((int)(kinds) << 3)
#define METHOD(kind)   METHODS(KIND(kind))

// Each file that has some has a table of them, which ends on a name NULL; which tables there are, a
// rendering is told.
extern const struct builtin value_builtins[], string_builtins[], number_builtins[],
    format_builtins[];

// NULL: there is none of that name.
const struct builtin *builtin_find(const struct builtin *const *tables, int of,
                                   const struct string *name);
const char *builtin_params(const struct builtin *f); // the names, behind the signs
struct value builtin_invoke(struct run *r, const struct builtin *f, struct value self,
                            const struct arguments *arguments);

// Parameter i as what it must be; `otherwise` where it was not given, or, of an int, is None.
const struct string *arg_string(const struct call *c, int i);
int64_t arg_int(const struct call *c, int i, int64_t otherwise);
bool arg_truth(const struct call *c, int i, bool otherwise);
bool arg_given(const struct call *c, int i); // and not None
// Parameters 2 and 3 as start and end among n items, Python's negative ones too; false: the start
// lies beyond the end.
bool arg_window(const struct call *c, int64_t n, int64_t *ret_start, int64_t *ret_end);
const struct string *need_string(struct run *r, struct value v, const char *what);

struct macro {
    const struct node *node; // N_MACRO, N_CALL_BLOCK
    struct scope *scope;     // where it was defined
};

struct method {
    struct value self;
    const struct builtin *function;
};

// ---- loops --------------------------------------------------------------------------------------

// A `for`. Items are taken one by one, and its test ("for x in y if z") is asked when an item is
// due, as in Jinja: what the body has changed in a namespace counts.
struct loop {
    struct run *run;
    struct scope *scope; // around it
    const struct node *node;
    struct list items;
    size_t at;                                        // the next of them to be looked at
    bool (*passes)(struct loop *, struct value item); // NULL: no test, or it was asked of all
    int64_t index0, length, depth0;                   // length -1: not known yet
    struct value previous, current, after; // after: looked ahead; V_MISSING: not, or none
    struct value last_changed;             // V_MISSING: changed() was not called yet
};
bool loop_advance(struct loop *l); // to the next item; false: there is none
int64_t loop_length(struct loop *l);
struct value loop_attribute(struct loop *l, const struct string *name); // V_MISSING: it has none

// ---- values -------------------------------------------------------------------------------------

struct value get_attribute(struct run *r, struct value of, const struct string *name);
struct value get_item(struct run *r, struct value of, struct value index);
struct value get_slice(struct run *r, struct value of, const struct value part[3]);
// "a.b.0" from the filters' `attribute`; V_MISSING or None: the value itself.
struct value get_path(struct run *r, struct value of, struct value path, struct value otherwise);

bool value_truth(struct run *r, struct value v);
bool value_equal(struct run *r, struct value a, struct value b);
// op: T_LT, T_LE, T_GT, T_GE, T_EQ, T_NE, OP_IN, OP_NOT_IN
bool value_compare(struct run *r, int op, struct value a, struct value b);
bool value_as_int(struct value v, int64_t *ret); // bool, int
double value_as_double(struct value v);          // of a number

struct value dict_find(struct run *r, const struct dict *d, struct value key); // V_MISSING: not
struct dict_entry *dict_look(struct run *r, const struct dict *d, struct value key); // NULL: not
void dict_set(struct run *r, struct dict *d, struct value key, struct value value);
// Its keys, values or pairs of both: V_KEYS, V_VALUES, V_ITEMS.
struct value dict_view(struct run *r, const struct dict *d, enum value_kind kind);

// What Python's list() gives; the items may be the value's own.
struct list value_items(struct run *r, struct value v);
struct list items_copy(struct run *r, struct value v); // to be changed
void items_reverse(struct list items);
void entries_sort(struct run *r, struct dict *d, bool reverse); // by key; stable
int64_t value_length(struct run *r, struct value v);            // len()
struct value range_make(struct run *r, int64_t start, int64_t stop, int64_t step);
struct value value_repeat(struct run *r, struct value v, int64_t times); // a string, a list

// ---- numbers.c ----------------------------------------------------------------------------------

struct value arithmetic(struct run *r, int op, struct value a, struct value b);
struct value arithmetic_sign(struct run *r, struct value v, bool minus);

// ---- text of values: format.c -------------------------------------------------------------------

void put_str(struct run *r, struct value v);              // str(v)
struct value value_str(struct run *r, struct value v);    // a V_STRING, which may be markup
struct value value_escape(struct run *r, struct value v); // markup
// "..." % values
struct value format_percent(struct run *r, const struct string *format, struct value values);
struct value string_as(struct run *r, const struct string *s, bool markup); // the same text

// ---- strings.c ----------------------------------------------------------------------------------

struct value string_lower(struct run *r, const struct string *s);
// `by` NULL: at runs of white space; max -1: any number.
struct list split_string(struct run *r, const struct string *s, const struct string *by,
                         int64_t max, bool from_end);

#endif
