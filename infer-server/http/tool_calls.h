/* tool_calls.h: the forms in which models write tool calls, each an entry of the table in
 * tool_calls.c: patterns of markers, white space, a name and arguments; and a chat's answer taken
 * apart: the tool calls in it, and the text that is none.
 * The answer's text arrives in pieces, and what comes of it does not depend on where they end: a
 * call is given once it is whole, and text that may yet become one is held back. White space beside
 * a call goes with it. What only looks like a call (broken JSON, a function that the request does
 * not have) stays text, markers included. Where calls are asked for early, one is given as soon as
 * its name stands and its arguments begin, which then grow; it stays a call whatever comes. Loop's
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_TOOL_CALLS_H
#define INFER_SERVER_TOOL_CALLS_H

#include "common/base/json.h"
#include <jansson.h>

// ---- forms -------------------------------------------------------------------------------------
// Pure functions over a text; any thread.

// Values of --tool-call-parser: tool_parser_names[TOOL_PARSER_FORMS + i] is form i.
enum { TOOL_PARSER_AUTO, TOOL_PARSER_OFF, TOOL_PARSER_FORMS };
extern const char *const tool_parser_names[]; // ended by NULL

struct tool_form;
const struct tool_form *tool_form_at(int i); // NULL past the last
const char *tool_form_name(const struct tool_form *form);
// A marker of the form holds this token's text: the token has to stay in a text that is searched
// for calls, special or not.
bool tool_form_mentions(const struct tool_form *form, const char *token);

// ---- constraints (tool_spec.c)
// -------------------------------------------------------------------

struct tool_ask {
    const json_t *tools;
    const char *name; // the only one that may be called; NULL: all
    bool required;    // by their schemas; else text may stand before calls or alone, and the
                      // arguments of tools that are not "strict" are any
    bool alone;       // calls and nothing else, which are not required
    bool several;
    bool thinks;     // the model has a token <think>, and may write a thought before calls
    bool in_thought; // the prompt ends behind <think>
};
// A new spec (common/constraint/constraint.h) of an answer that holds such calls in this form.
// NULL: there is no memory, or, where calls are not required, the form cannot have it.
json_t *tool_form_spec(const struct tool_form *form, const struct tool_ask *ask);

// ---- answers -----------------------------------------------------------------------------------

#define TOOL_CALL_ID_BYTES 10 // nine letters and digits, which Mistral's templates insist on

struct tool_call {
    char id[TOOL_CALL_ID_BYTES]; // random
    char *name;
    size_t content_at;      // bytes of content before it
    struct bytes arguments; // the text of a JSON object, as the model wrote it where it writes JSON
};

struct tool_match;
struct tool_calls {
    struct bytes content;   // the answer's text but for its calls, as far as it is decided
    struct tool_call *list; // (n), in order
    int n;
    // its own
    const struct tool_form *form;
    const json_t *tools;        // the request's; borrowed
    struct tool_match *matches; // one a pattern (tool_calls.c), of a call that may begin at `open`
    int n_matches;
    bool early;
    int n_placed;                     // calls whose content_at is known
    const struct tool_match *growing; // that the last call of the list is given early from
    bool begun;                       // there are matches
    size_t at, open;  // text before `at` has been given; no call begins between the two
    bool text_before; // other than white space
    bool behind_call; // `at` is
};

// tools: the list of the request, from which the names of functions and the types of arguments are;
// it must outlive *ret. early: calls are given before they are whole.
enum status tool_calls_new(const struct tool_form *form, const json_t *tools, bool early,
                           struct tool_calls **ret);
void tool_calls_free(struct tool_calls *c);
// text[0..len) is the answer's so far, which only ever grows; end: it is whole.
enum status tool_calls_read(struct tool_calls *c, const char *text, size_t len, bool end);

// The i-th call of an answer as OpenAI's object; and what is new of it in a stream: first what is
// called, then (`from` bytes of them have been given) its arguments, which clients join.
void put_tool_call(struct json_out *o, const struct tool_call *call);
void put_tool_call_delta(struct json_out *o, const struct tool_call *call, int i, bool first,
                         size_t from);

// ---- values (tool_values.c) ---------------------------------------------------------------------

// How far through a value a reader has come, JSON's or Python's.
struct json_reach {
    int depth;
    char quote; // in a string that ends with it; 0: in none
    bool escaped;
    bool python; // which has other brackets and quotes, too
    bool bare;   // whose texts stand between TOOL_BARE_QUOTEs, too
    bool marked; // in such a text
    int mark;    // bytes of a TOOL_BARE_QUOTE that have come
};
#define TOOL_BARE_QUOTE "<|\"|>"
// Goes on by one character; true: the value, a string, an object or a list, ends with it.
bool json_reach_step(struct json_reach *s, char c);

struct slice {
    const char *text;
    size_t len;
};

// An argument that stands as text, as JSON: a string, or where the schema (NULL: any), in which
// references are to `root`, takes other
// types the JSON value or Python literal that it is.
void tool_put_value(const json_t *root, const json_t *schema, const char *text, size_t len,
                    struct bytes *to);
bool tool_takes_text(const json_t *root, const json_t *schema); // among others
// The call at *at of "f(a=1), g()", which is moved behind it; false: there is none, or a broken
// one.
bool tool_next_python_call(const char *list, size_t len, size_t *at, struct slice *ret_name,
                           struct bytes *ret_arguments);
// An object as Gemma 4 writes it, keys bare and texts between TOOL_BARE_QUOTEs, as JSON; false: it
// is none.
bool tool_put_bare(const char *object, size_t len, struct bytes *to);

#endif
