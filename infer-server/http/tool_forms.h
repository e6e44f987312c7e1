/* tool_forms.h: in what patterns the forms of tool calls are written down, for the files that read
 * calls by them (tool_calls.c) and constrain answers to them (tool_spec.c). */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_TOOL_FORMS_H
#define INFER_SERVER_TOOL_FORMS_H

#include "infer-server/http/tool_calls.h"

/* A pattern is text that has to stand there, in which a space is any white space or none, and: */
#define NAME      "\001"             // the function's name
#define WORD      "\002"             // another one, which says nothing
#define ARGUMENTS "\003"             // a JSON object
#define CALL      "\004"             // {"name": ..., "arguments" or "parameters": {...}}
#define CALLS     "\005"             // a list of these
#define MAY(text) "\006" text "\007" // text that may be absent
#define FIRST     "\010"             // no text but calls stands before
// Arguments between tags, any number of them, each a KEY and its VALUE, which end where the text
// behind them begins; LINES is a value that stands on lines of its own.
#define MANY(text) "\013" text "\014"
#define KEY        "\015"
#define VALUE      "\016"
#define LINES      "\017"
#define PYTHON     "\020" // [f(a=1), g()]
#define BARE       "\022" // {a:1,b:<|"|>text<|"|>}

// In a thought alone: any text up to the one behind it.
#define FREE "\021"

#define IS_SPECIAL(c) ((unsigned char)(c) <= ' ')

#define PATTERNS_MAX 3

struct tool_form {
    const char *patterns[PATTERNS_MAX + 1];
    int n_written;       // patterns that are asked for; 0: all
    const char *key;     // of a CALL's arguments; NULL: "arguments"
    const char *name;    // of its function's name; NULL: "name"
    const char *thought; // that may stand before the calls which are asked for; NULL: <think>'s
};

#endif
