/* tool_calls.h: the forms in which models write tool calls, each an entry of the table in
 * tool_calls.c: patterns of markers, white space, a name and JSON; and a chat's answer taken apart:
 * the tool calls in it, and the text that is none.
 * The answer's text arrives in pieces, and what comes of it does not depend on where they end: a
 * call is given once it is whole, and text that may yet become one is held back. White space beside
 * a call goes with it. What only looks like a call (broken JSON, a function that the request does
 * not have) stays text, markers included. Loop's thread. */
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

// ---- answers -----------------------------------------------------------------------------------

#define TOOL_CALL_ID_BYTES 10 // nine letters and digits, which Mistral's templates insist on

struct tool_call {
    char id[TOOL_CALL_ID_BYTES]; // random
    char *name;
    char *arguments; // the text of a JSON object, as the model wrote it
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
    bool begun;       // there are matches
    size_t at, open;  // text before `at` has been given; no call begins between the two
    bool text_before; // other than white space
    bool behind_call; // `at` is
};

// tools: the list of the request, from which the names of functions are; it must outlive *ret.
enum status tool_calls_new(const struct tool_form *form, const json_t *tools,
                           struct tool_calls **ret);
void tool_calls_free(struct tool_calls *c);
// text[0..len) is the answer's so far, which only ever grows; end: it is whole.
enum status tool_calls_read(struct tool_calls *c, const char *text, size_t len, bool end);

// The i-th call of an answer as OpenAI's object; of a stream as two, as clients expect: what is
// called, then with what.
void put_tool_call(struct json_out *o, const struct tool_call *call, int i, bool chunk);

#endif
