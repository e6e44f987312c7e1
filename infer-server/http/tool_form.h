/* tool_form.h: the forms in which models write tool calls, and how one call is found in a text
 * that arrives in pieces. A form is an entry of the table in tool_form.c: patterns of markers,
 * white space, a name and JSON. Pure functions over a text; any thread. */
#ifndef INFER_SERVER_TOOL_FORM_H
#define INFER_SERVER_TOOL_FORM_H

#include <stdbool.h>
#include <stddef.h>

// Values of --tool-call-parser: tool_parser_names[TOOL_PARSER_FORMS + i] is form i.
enum { TOOL_PARSER_AUTO, TOOL_PARSER_OFF, TOOL_PARSER_FORMS };
extern const char *const tool_parser_names[]; // ended by NULL

struct tool_form;
const struct tool_form *tool_form_at(int i); // NULL past the last
const char *tool_form_name(const struct tool_form *form);
// A marker of the form holds this token's text: the token has to stay in a text that is searched
// for calls, special or not.
bool tool_form_mentions(const struct tool_form *form, const char *token);

// How far through a JSON value a reader has come.
struct json_reach {
    int depth;
    bool in_string, escaped;
};
// Goes on by one character; true: the value, a string, an object or a list, ends with it.
bool json_reach_step(struct json_reach *s, char c);

enum tool_json { TOOL_ARGUMENTS, TOOL_CALL, TOOL_CALLS }; // what the JSON of a pattern is

// A pattern laid against a text from some byte on, as far as the text goes.
struct tool_match {
    const char *next;      // in the pattern: what has to come
    size_t at;             // in the text: read up to here
    bool optional;         // `next` is within a literal that may be absent,
    size_t optional_at;    // which would begin here
    size_t name, name_len; // 0: none
    size_t json, json_len; // 0: not yet there, or not yet at its end
    enum tool_json kind;
    struct json_reach reach;
};

enum tool_match_state { TOOL_MATCH_NO, TOOL_MATCH_OPEN, TOOL_MATCH_YES };

// Lays pattern i of the form against a text from `at` on. False: there is no such pattern. A match
// that cannot be, because other text stands before it, begins with next NULL.
bool tool_match_begin(const struct tool_form *form, int i, size_t at, bool text_before,
                      struct tool_match *ret);
// Goes on through text[at..len). TOOL_MATCH_OPEN, never where the text ends there (`end`): more
// text has to decide. The last markers may be missing at the end: one of them may have been the
// stop token.
enum tool_match_state tool_match_go_on(struct tool_match *m, const char *text, size_t len,
                                       bool end);

#endif
