/* run.h: one rendering: its memory, its limits, and what its parts call of each other. One thread.
 *
 * A failure is an enum status whose sentence says what Jinja or Python would; render.c puts the
 * place before it. Nothing needs freeing on the way but buffers of text. */
#ifndef COMMON_JINJA_RUN_H
#define COMMON_JINJA_RUN_H

#include "common/base/bytes.h"
#include "common/jinja/ast.h"
#include <time.h>

#define MAX_DEPTH 800 // of evaluations within each other

struct variable {
    const struct string *name;
    struct value value;
    struct variable *next;
};
struct scope {
    const struct scope *outer; // NULL: the template's own, behind which are the variables given
    struct variable *variables;
};

enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };

struct run {
    struct arena arena;
    int64_t steps; // left
    size_t max_output;
    int depth;
    const struct tm *now; // NULL: the clock
    const struct dict *variables;
    struct scope top;
    struct bytes *out;            // where text goes
    struct value block;           // what filters of a block are applied to
    enum flow flow;               // set by break and continue until their loop sees it
    const struct node *failed_at; // the innermost; NULL: nothing failed
};

// ---- limits -------------------------------------------------------------------------------------

enum status run_steps(struct run *r, size_t n); // takes n of what is left
enum status run_deeper(struct run *r);          // the caller takes it back: r->depth--

// Text being built; too much of it makes the buffer fail, as does want of memory.
void run_put(const struct run *r, struct bytes *to, const char *data, size_t n);
void run_puts(const struct run *r, struct bytes *to, const char *text);
// What was built as a string, the buffer released; with `st` not ST_OK only the latter.
enum status run_take(struct run *r, enum status st, struct bytes *built, struct value *ret);

// ---- render.c, evaluate.c -----------------------------------------------------------------------

enum status jinja_evaluate(struct run *r, struct scope *scope, const struct node *node,
                           struct value *ret);
// `caller`: of a call block; NULL: none.
enum status jinja_evaluate_call(struct run *r, struct scope *scope, const struct node *node,
                                const struct value *caller, struct value *ret);
enum status jinja_render_body(struct run *r, struct scope *scope, const struct node_list *body);
// The text of a body, kept from the output.
enum status jinja_render_captured(struct run *r, struct scope *scope, const struct node_list *body,
                                  struct value *ret);
enum status scope_set(struct run *r, struct scope *scope, const struct string *name,
                      struct value value);
enum status scope_assign(struct run *r, struct scope *scope, const struct node *target,
                         struct value value);

// ---- call.c -------------------------------------------------------------------------------------

struct named_value {
    const struct string *name;
    struct value value;
};
struct arguments {
    const struct value *positional;
    int n_positional;
    const struct named_value *named;
    int n_named;
};

// A function of this program: v[0] is what it is applied to (filters, tests, methods; V_MISSING for
// plain functions), v[1...] its parameters in order, V_MISSING where one was not given. `all` holds
// what was given, for those that take any number (params NULL).
typedef enum status (*builtin_call)(struct run *r, const struct value *v,
                                    const struct arguments *all, struct value *ret);
struct builtin {
    const char *name;
    builtin_call call;
    const char *params; // their names, a blank between; "/" first: by place only; NULL: any
    int n_required;
};
#define MAX_PARAMS 6

struct method {
    struct value self;
    const struct builtin *function;
};

// Of an argument: the text, or a failure that names the parameter. need_int leaves *ret as it is
// where the argument was not given or is None.
enum status need_string(const struct value *v, const char *what, const struct string **ret);
enum status need_int(const struct value *v, const char *what, int64_t *ret);

const struct builtin *builtin_find(const struct builtin *table, size_t n,
                                   const struct string *name);
// `self` is v[0].
enum status builtin_invoke(struct run *r, const struct builtin *f, const struct value *self,
                           const struct arguments *arguments, struct value *ret);
enum status call_value(struct run *r, const struct value *function,
                       const struct arguments *arguments, struct value *ret);

struct macro {
    const struct node *node; // N_MACRO, N_CALL_BLOCK
    struct scope *scope;     // where it was defined
};

// The tables: filters*.c, tests.c, functions.c. NULL: there is none of that name.
const struct builtin *filter_find(const struct string *name);
const struct builtin *test_find(const struct string *name);
const struct builtin *function_find(const struct string *name);
enum status filter_apply(struct run *r, const struct string *name, const struct value *input,
                         const struct arguments *arguments, struct value *ret);
enum status test_apply(struct run *r, const struct string *name, const struct value *input,
                       const struct arguments *arguments, bool *ret);

// ---- loop.c -------------------------------------------------------------------------------------

enum status loop_render(struct run *r, struct scope *scope, const struct node *node,
                        const struct value *iterable, int64_t depth0);
enum status loop_attribute(struct run *r, struct loop *loop, const struct string *name,
                           struct value *ret);
enum status loop_call(struct run *r, struct loop *loop, const struct arguments *arguments,
                      struct value *ret);
enum status loop_changed(struct run *r, struct loop *loop, const struct arguments *arguments,
                         struct value *ret);
enum status loop_length(struct run *r, struct loop *loop, int64_t *ret);
int64_t loop_index(const struct loop *loop);

// ---- methods*.c
// -----------------------------------------------------------------------------------

const struct builtin *method_find(const struct value *of, const struct string *name);

// ---- attribute.c --------------------------------------------------------------------------------

enum status get_attribute(struct run *r, const struct value *of, const struct string *name,
                          struct value *ret);
enum status get_item(struct run *r, const struct value *of, const struct value *index,
                     struct value *ret);
enum status get_slice(struct run *r, const struct value *of, const struct value part[3],
                      struct value *ret);
// "a.b.0" from the filters' `attribute`; V_MISSING: the value itself.
enum status get_path(struct run *r, const struct value *of, const struct value *path,
                     const struct value *otherwise, struct value *ret);

// ---- compare.c ----------------------------------------------------------------------------------

enum status value_truth(struct run *r, const struct value *v, bool *ret);
enum status value_equal(struct run *r, const struct value *a, const struct value *b, bool *ret);
// op: T_LT, T_LE, T_GT, T_GE
enum status value_compare(struct run *r, int op, const struct value *a, const struct value *b,
                          bool *ret);
enum status value_in(struct run *r, const struct value *item, const struct value *in, bool *ret);
bool value_is_number(const struct value *v);            // bool, int, float
bool value_as_int(const struct value *v, int64_t *ret); // bool, int
double value_as_double(const struct value *v);          // of a number
enum status dict_find(struct run *r, const struct dict *d, const struct value *key,
                      struct value *ret); // V_MISSING: not there
enum status dict_set(struct run *r, struct dict *d, const struct value *key, struct value value);
// Stable. `keys` decide; both lists are in the caller's hands.
enum status sort_by_keys(struct run *r, struct value *items, struct value *keys, size_t n,
                         bool reverse);

// ---- items.c ----------------------------------------------------------------------------------

// What Python's list() gives; the items may be the value's own.
enum status value_items(struct run *r, const struct value *v, struct list *ret);
enum status value_length(struct run *r, const struct value *v, int64_t *ret); // len()
bool value_has_length(const struct value *v);
bool value_is_iterable(const struct value *v);
enum status list_of(struct run *r, struct list items, struct value *ret); // as V_LIST
enum status range_make(struct run *r, int64_t start, int64_t stop, int64_t step, struct value *ret);
struct value range_at(const struct range *range, size_t i);

// ---- arithmetic.c, format.c ---------------------------------------------------------------------

enum status arithmetic(struct run *r, int op, const struct value *a, const struct value *b,
                       struct value *ret);
enum status arithmetic_sign(struct run *r, const struct value *v, bool minus, struct value *ret);
enum status format_percent(struct run *r, const struct string *format, const struct value *values,
                           struct value *ret);
enum status format_braces(struct run *r, const struct string *format,
                          const struct arguments *arguments, struct value *ret);
double round_to(double x, int64_t digits); // Python's round()
// str.join and such: a string of `self`'s kind (markup or not).
enum status string_like(struct run *r, const struct string *self, const char *data, size_t n,
                        struct value *ret);

// ---- repr.c, json.c -----------------------------------------------------------------------------

enum status put_str(struct run *r, const struct value *v, struct bytes *to);    // str(v)
enum status put_repr(struct run *r, const struct value *v, struct bytes *to);   // repr(v)
enum status value_str(struct run *r, const struct value *v, struct value *ret); // a V_STRING
void put_float(double x, struct bytes *to);
enum status value_escape(struct run *r, const struct value *v, struct value *ret); // markup
enum status markup_of(struct run *r, const struct string *s, struct value *ret);   // as it is

struct json_style {
    bool ensure_ascii, sort_keys, lines; // lines: one an item, indented
    const char *indent, *item_separator, *key_separator;
};
enum status put_json(struct run *r, const struct value *v, const struct json_style *style,
                     struct bytes *to);

// ---- errors -------------------------------------------------------------------------------------

enum status undefined_make(struct run *r, const char *hint, const struct value *object,
                           struct value name, struct value *ret);
enum status undefined_fail(const struct undefined *u); // what using it says
// "expected X, got 'int'": of an argument of the wrong type.
enum status type_fail(const char *what, const struct value *v);

#endif
