/* object.h: what values do, as Python has it: what can be gone over and how long it is, truth,
 * equality, order and membership, look-up in dicts, which is by equality, a.b, a["b"], a[1] and
 * a[1:2], operators, and values as text; and the functions that a template finds. Failures leave
 * with fail(), their sentence being what Jinja or Python would say. One thread for each run. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_JINJA_OBJECT_H
#define COMMON_TEXT_JINJA_OBJECT_H

#include "common/text/jinja/syntax.h"

// ---- functions for templates --------------------------------------------------------------------

struct arguments {
    struct list positional;
    struct dict named; // its keys are strings
};

#define MAX_PARAMS 4
struct call {
    const struct builtin *function;
    const struct arguments *all; // as given, for those that take any number
};

// A filter, a test, a method or a function of this program.
struct builtin {
    int of;           // what it is: FILTER, TEST, FUNCTION, and METHOD of a kind of value
    const char *name; // or several that mean the same, a blank between
    // v[0]: what it is applied to (filters, tests, methods); then the parameters in order. TEXT:
    // what it has put is the result.
    struct value (*call)(struct render *r, const struct value *v, const struct call *c);
    int which; // of several that one function does
    // The names of the parameters, a blank between, behind each what it must be: "$" a str, "#" an
    // int, which may have a default, "?" a truth. One that is not given, or of a "$" or "#" that is
    // not required and has no default None, is V_MISSING. Signs may stand before all:
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
#define UNUSED __attribute__((unused))
#define BUILTIN(name)                                                                              \
    static struct value name(UNUSED struct render *r, UNUSED const struct value *v,                \
                             UNUSED const struct call *c)
#define TEXT(is_markup) value_of(.kind = V_MISSING, .truth = (is_markup))

enum { FILTER = 1, TEST = 2, FUNCTION = 4 };
#define METHODS(kinds) ((int)(kinds) << 3)
#define METHOD(kind)   METHODS(KIND(kind))

// Each file that has some has a table of them, which ends on a name NULL.
extern const struct builtin item_builtins[], string_builtins[], number_builtins[],
    format_builtins[];
// Of the run's tables; NULL: there is none of that name.
const struct builtin *builtin_find(const struct render *r, int of, const struct string *name);
struct value builtin_invoke(struct render *r, const struct builtin *f, struct value self,
                            const struct arguments *arguments);

struct method {
    struct value self;
    const struct builtin *function;
};

struct scope {
    const struct scope *outer; // NULL: this one has the variables given
    struct dict variables;
};

struct macro {
    const struct node *node; // N_MACRO, N_CALL_BLOCK
    struct scope *scope;     // where it was defined
};

// ---- loops --------------------------------------------------------------------------------------

// A `for`. Items are taken one by one, and its test ("for x in y if z") is asked when an item is
// due, as in Jinja: what the body has changed in a namespace counts.
struct loop {
    struct render *run;
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

// ---- values -------------------------------------------------------------------------------------

struct value undefined_because(struct render *r, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
// `of` V_MISSING: a variable.
struct value undefined_item(struct render *r, struct value of, struct value name);
_Noreturn void undefined_fail(struct render *r, struct value v); // what using it says
// "expected X, got 'int'": of a value of the wrong type.
_Noreturn void type_fail(struct render *r, const char *what, struct value v);

struct value get_attribute(struct render *r, struct value of, struct value name); // a V_STRING
struct value get_item(struct render *r, struct value of, struct value index);
struct value get_slice(struct render *r, struct value of, const struct value part[3]);
// "a.b.0" from the filters' `attribute`; V_MISSING or None: the value itself.
struct value get_path(struct render *r, struct value of, struct value path, struct value otherwise);

bool value_truth(struct render *r, struct value v);
bool value_equal(struct render *r, struct value a, struct value b);
// op: '<', T_LE, '>', T_GE, T_EQ, T_NE, OP_IN, OP_NOT_IN
bool value_compare(struct render *r, enum token_type op, struct value a, struct value b);
bool value_as_int(struct value v, int64_t *ret); // bool, int
double value_as_double(struct value v);          // of a number

struct dict_entry *dict_look(struct render *r, const struct dict *d, struct value key); // NULL: not
struct value dict_find(struct render *r, const struct dict *d, struct value key); // V_MISSING: not
void dict_set(struct render *r, struct dict *d, struct value key, struct value value);
// Its keys, values or pairs of both: V_KEYS, V_VALUES, V_ITEMS.
struct value dict_view(struct render *r, const struct dict *d, enum value_kind kind);

// What Python's list() gives; the items may be the value's own.
struct list value_items(struct render *r, struct value v);
struct list value_pair(struct render *r, struct value v, const char *what); // of two, or it fails
struct list items_copy(struct render *r, struct value v);                   // to be changed
void items_reverse(struct list items);
void entries_sort(struct render *r, struct dict *d, bool reverse); // by key; stable
int64_t value_length(struct render *r, struct value v);            // len()
struct value range_make(struct render *r, int64_t start, int64_t stop, int64_t step);
// Of strings, or of lists.
struct value value_repeat(struct render *r, struct value v, int64_t times);
struct value value_concatenate(struct render *r, struct value a, struct value b);
// Parameters 2 and 3 as start and end among n items, Python's negative ones too; false: the start
// lies beyond the end.
bool window_of(const struct value *v, int64_t n, int64_t *ret_start, int64_t *ret_end);

struct value arithmetic(struct render *r, enum token_type op, struct value a, struct value b);
struct value arithmetic_sign(struct render *r, struct value v, bool minus);

// ---- text: Python's str(), HTML escapes, and "..." % values -------------------------------------

void put_str(struct render *r, struct value v);              // str(v), at the end of what is built
struct value value_str(struct render *r, struct value v);    // a V_STRING, which may be markup
struct value value_escape(struct render *r, struct value v); // markup
struct value string_as(struct render *r, const struct string *s, bool markup); // the same text
struct value format_percent(struct render *r, const struct string *format, struct value values);
struct value string_lower(struct render *r, const struct string *s);
// `by` NULL: at runs of white space; max -1: any number.
struct list split_string(struct render *r, const struct string *s, const struct string *by,
                         int64_t max, bool from_end);

#endif
