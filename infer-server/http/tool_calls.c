/* tool_calls.c: the table of forms, the matching of their patterns, and calls found by it in an
 * answer. At each byte all patterns of the form are tried; while one of them may still match,
 * nothing behind that byte is given. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/tool_calls.h"
#include "common/base/json.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* A pattern is text that has to stand there, in which a space is any white space or none, and: */
#define NAME      "\001"             // the function's name
#define WORD      "\002"             // another one, which says nothing
#define ARGUMENTS "\003"             // a JSON object
#define CALL      "\004"             // {"name": ..., "arguments" or "parameters": {...}}
#define CALLS     "\005"             // a list of these
#define MAY(text) "\006" text "\007" // text that may be absent
#define FIRST     "\010"             // no text but calls stands before

#define PATTERNS_MAX 3

struct tool_form {
    const char *patterns[PATTERNS_MAX + 1];
};

// Hermes', which Qwen 2.5 and 3 write too; Llama 3.1 to 3.3; Mistral's until and since tokenizer
// v11 (whose first version has an id); DeepSeek's of V3 and R1, and of V3.1; gpt-oss's harmony,
// where the recipient stands before or behind the channel.
const char *const tool_parser_names[] = {"auto",    "off",      "hermes",  "llama3",
                                         "mistral", "deepseek", "gpt-oss", NULL};

#define DEEPSEEK_BEGIN MAY("<｜tool▁calls▁begin｜> ") "<｜tool▁call▁begin｜>"
#define DEEPSEEK_END   "<｜tool▁call▁end｜>" MAY(" <｜tool▁calls▁end｜>")
#define CHANNEL        MAY("<|channel|>commentary") MAY("<|channel|>analysis")

static const struct tool_form forms[] = {
    {{"<tool_call> " CALL " </tool_call>"}},
    {{FIRST MAY("; ") CALL, "<|python_tag|> " CALL}},
    {{"[TOOL_CALLS] " CALLS, "[TOOL_CALLS] " NAME MAY("[ARGS]") " " ARGUMENTS,
      "[TOOL_CALLS] " NAME "[CALL_ID]" WORD "[ARGS] " ARGUMENTS}},
    {{DEEPSEEK_BEGIN "function<｜tool▁sep｜>" NAME " ```json " ARGUMENTS " ```" DEEPSEEK_END,
      DEEPSEEK_BEGIN NAME "<｜tool▁sep｜> " ARGUMENTS " " DEEPSEEK_END}},
    {{MAY("<|start|>assistant") CHANNEL " to=functions." NAME CHANNEL " " MAY("<|constrain|>")
          MAY("json") MAY("code") " <|message|> " ARGUMENTS MAY(" <|call|>")}},
};

_Static_assert(sizeof tool_parser_names / sizeof *tool_parser_names ==
                   TOOL_PARSER_FORMS + sizeof forms / sizeof *forms + 1,
               "a form, a name");

const struct tool_form *tool_form_at(int i)
{
    return i >= 0 && (size_t)i < sizeof forms / sizeof *forms ? &forms[i] : NULL;
}

const char *tool_form_name(const struct tool_form *form)
{
    return tool_parser_names[TOOL_PARSER_FORMS + (form - forms)];
}

bool tool_form_mentions(const struct tool_form *form, const char *token)
{
    for (int i = 0; token && *token && form->patterns[i]; i++)
        if (strstr(form->patterns[i], token)) return true;
    return false;
}

// How far through a JSON value a reader has come.
struct json_reach {
    int depth;
    bool in_string, escaped;
};
// Goes on by one character; true: the value, a string, an object or a list, ends with it.
static bool json_reach_step(struct json_reach *s, char c)
{
    if (s->in_string) {
        const bool quotes = c == '"' && !s->escaped;
        s->escaped = c == '\\' && !s->escaped;
        s->in_string = !quotes;
        return quotes && s->depth == 0;
    }
    if (c == '{' || c == '[') s->depth++;
    if (c == '}' || c == ']') s->depth--;
    s->in_string = c == '"';
    return (c == '}' || c == ']') && s->depth <= 0;
}

// ---- one match ---------------------------------------------------------------------------------

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
static bool tool_match_begin(const struct tool_form *form, int i, size_t at, bool text_before,
                             struct tool_match *ret)
{
    const char *pattern = i < PATTERNS_MAX ? form->patterns[i] : NULL;
    if (!pattern) return false;
    *ret = (struct tool_match){.next = pattern, .at = at};
    if (*pattern == *FIRST) ret->next = text_before ? NULL : pattern + 1;
    return true;
}

// To the end of a name, or of another word.
static enum tool_match_state read_name(struct tool_match *m, const char *text, size_t len, bool end)
{
    const size_t from = m->name_len ? m->name : m->at;
    while (m->at < len && (unsigned char)text[m->at] > ' ' && !strchr("<[{\"", text[m->at]))
        m->at++;
    if (*m->next == *NAME && m->at > from) {
        m->name = from;
        m->name_len = m->at - from;
    }
    if (m->at == len && !end) return TOOL_MATCH_OPEN;
    return m->at > from ? TOOL_MATCH_YES : TOOL_MATCH_NO;
}

// What cannot stand in JSON, but within a string, ends it: a text that only begins as JSON does is
// not held back for long.
static enum tool_match_state read_json(struct tool_match *m, const char *text, size_t len, bool end)
{
    const bool inside = m->reach.depth > 0;
    if (m->at == len) return end ? TOOL_MATCH_NO : TOOL_MATCH_OPEN;
    if (!inside && text[m->at] != (*m->next == *CALLS ? '[' : '{')) return TOOL_MATCH_NO;
    if (!inside) m->json = m->at;
    m->kind = (enum tool_json)(*m->next - *ARGUMENTS);
    while (m->at < len) {
        const char c = text[m->at];
        if (!m->reach.in_string && !(c && strchr("{}[]\":, \t\r\n+-.0123456789eEtrufalsn", c)))
            return TOOL_MATCH_NO;
        m->at++;
        if (!json_reach_step(&m->reach, c)) continue;
        m->json_len = m->at - m->json;
        return TOOL_MATCH_YES;
    }
    return end ? TOOL_MATCH_NO : TOOL_MATCH_OPEN;
}

static enum tool_match_state read_literal(struct tool_match *m, const char *text, size_t len,
                                          bool end)
{
    if (m->at < len && text[m->at] == *m->next) {
        m->at++;
        return TOOL_MATCH_YES;
    }
    if (m->at == len && !end) return TOOL_MATCH_OPEN;
    if (m->optional) {
        m->at = m->optional_at;
        m->optional = false;
        m->next = strchr(m->next, *"\007");
        return TOOL_MATCH_YES;
    }
    if (m->at < len || m->json_len == 0) return TOOL_MATCH_NO;
    m->next += strlen(m->next) - 1; // the text's end is the call's
    return TOOL_MATCH_YES;
}

static enum tool_match_state read_next(struct tool_match *m, const char *text, size_t len, bool end)
{
    switch (*m->next) {
    case '\001': // NAME
    case '\002': // WORD
        return read_name(m, text, len, end);
    case '\003': // ARGUMENTS
    case '\004': // CALL
    case '\005': // CALLS
        return read_json(m, text, len, end);
    case '\006': // MAY(
        m->optional = true;
        m->optional_at = m->at;
        return TOOL_MATCH_YES;
    case '\007': // )
        m->optional = false;
        return TOOL_MATCH_YES;
    case ' ':
        while (m->at < len && isspace((unsigned char)text[m->at])) m->at++;
        return m->at == len && !end ? TOOL_MATCH_OPEN : TOOL_MATCH_YES;
    default:
        return read_literal(m, text, len, end);
    }
}

// Goes on through text[at..len). TOOL_MATCH_OPEN, never where the text ends there (`end`): more
// text has to decide. The last markers may be missing at the end: one of them may have been the
// stop token.
static enum tool_match_state tool_match_go_on(struct tool_match *m, const char *text, size_t len,
                                              bool end)
{
    enum tool_match_state state = m->next ? TOOL_MATCH_YES : TOOL_MATCH_NO;
    while (state == TOOL_MATCH_YES && *m->next) {
        state = read_next(m, text, len, end);
        if (state == TOOL_MATCH_YES) m->next++;
    }
    if (state == TOOL_MATCH_NO) m->next = NULL;
    return state;
}

// ---- calls -------------------------------------------------------------------------------------

enum status tool_calls_new(const struct tool_form *form, const json_t *tools,
                           struct tool_calls **ret)
{
    struct tool_calls *c = calloc(1, sizeof *c);
    struct tool_match m;
    if (!c) return status_fail(ST_NO_MEMORY, "out of memory");
    c->form = form;
    c->tools = tools;
    while (tool_match_begin(form, c->n_matches, 0, false, &m)) c->n_matches++;
    c->matches = calloc((size_t)c->n_matches, sizeof *c->matches);
    if (!c->matches) {
        tool_calls_free(c);
        return status_fail(ST_NO_MEMORY, "out of memory");
    }
    *ret = c;
    return ST_OK;
}

void tool_calls_free(struct tool_calls *c)
{
    if (!c) return;
    for (int i = 0; i < c->n; i++) {
        free(c->list[i].name);
        free(c->list[i].arguments);
    }
    bytes_release(&c->content);
    free(c->list);
    free(c->matches);
    free(c);
}

// ---- one call ----------------------------------------------------------------------------------

struct slice {
    const char *text;
    size_t len;
};

static bool is_space(char c)
{
    return isspace((unsigned char)c);
}

static size_t skip_space(struct slice s, size_t at)
{
    while (at < s.len && is_space(s.text[at])) at++;
    return at;
}

// The value that begins at *at, which is moved behind it. s is well-formed JSON.
static struct slice next_value(struct slice s, size_t *at)
{
    struct json_reach reach = {0};
    const size_t from = *at;
    const bool scalar = !strchr("{[\"", s.text[from]);
    size_t to = from;
    if (scalar)
        while (to < s.len && !strchr(",]} \t\r\n", s.text[to])) to++;
    else
        while (to < s.len && !json_reach_step(&reach, s.text[to++])) {
        }
    *at = to;
    return (struct slice){s.text + from, to - from};
}

// The text of a member of an object of well-formed JSON; the last of several, as jansson has it.
static bool find_member(struct slice object, const char *key, struct slice *ret)
{
    bool found = false;
    for (size_t at = skip_space(object, 1); at < object.len && object.text[at] == '"';) {
        const struct slice name = next_value(object, &at);
        at = skip_space(object, skip_space(object, at) + 1); // the colon
        const struct slice value = next_value(object, &at);
        if (name.len == strlen(key) + 2 && memcmp(name.text + 1, key, name.len - 2) == 0) {
            *ret = value;
            found = true;
        }
        at = skip_space(object, skip_space(object, at) + 1); // the comma
    }
    return found;
}

static bool is_known(const struct tool_calls *c, struct slice name)
{
    const json_t *tool;
    size_t i;
    json_array_foreach (c->tools, i, tool) {
        const json_t *function = json_object_get(tool, "function");
        const json_t *known = json_object_get(function ? function : tool, "name");
        if (json_string_length(known) == name.len && name.len > 0 &&
            memcmp(json_string_value(known), name.text, name.len) == 0)
            return true;
    }
    return false;
}

static void make_id(char ret[TOOL_CALL_ID_BYTES])
{
    static const char digits[] = "abcdefghijklmnopqrstuvwxyz0123456789";
    uint64_t bits = 0;
    if (getrandom(&bits, sizeof bits, 0) != sizeof bits) bits = (uint64_t)(uintptr_t)ret;
    for (int i = 0; i < TOOL_CALL_ID_BYTES - 1; i++, bits /= 36) ret[i] = digits[bits % 36];
    ret[TOOL_CALL_ID_BYTES - 1] = 0;
}

// *ret_is false: it is no call.
static enum status add_call(struct tool_calls *c, struct slice name, struct slice arguments,
                            bool *ret_is)
{
    json_t *parsed = NULL;
    *ret_is = is_known(c, name) &&
              json_parse("arguments", arguments.text, arguments.len, &parsed) == ST_OK &&
              json_is_object(parsed);
    json_decref(parsed);
    if (!*ret_is) return ST_OK;
    struct tool_call *list = array_room(c->list, (size_t)c->n, sizeof *list);
    if (!list) return status_fail(ST_NO_MEMORY, "out of memory");
    c->list = list;
    struct tool_call *call = &list[c->n];
    make_id(call->id);
    call->name = strndup(name.text, name.len);
    call->arguments = strndup(arguments.text, arguments.len);
    c->n++;
    return call->name && call->arguments ? ST_OK : status_fail(ST_NO_MEMORY, "out of memory");
}

// {"name": ..., "arguments": {...}}, or Llama's "parameters".
static enum status add_object(struct tool_calls *c, struct slice object, bool *ret_is)
{
    json_t *parsed = NULL;
    struct slice arguments = {0};
    enum status st = ST_OK;
    *ret_is = false;
    if (json_parse("call", object.text, object.len, &parsed) != ST_OK) return ST_OK;
    const json_t *name = json_object_get(parsed, "name");
    if (json_is_string(name) && (find_member(object, "arguments", &arguments) ||
                                 find_member(object, "parameters", &arguments)))
        st = add_call(c, (struct slice){json_string_value(name), json_string_length(name)},
                      arguments, ret_is);
    json_decref(parsed);
    return st;
}

// All of them, or none.
static enum status add_list(struct tool_calls *c, struct slice list, bool *ret_are)
{
    json_t *parsed = NULL;
    const int before = c->n;
    enum status st = ST_OK;
    *ret_are = json_parse("calls", list.text, list.len, &parsed) == ST_OK;
    const size_t n = json_array_size(parsed);
    for (size_t i = 0, at = 1; i < n && st == ST_OK && *ret_are; i++) {
        at = skip_space(list, at);
        st = add_object(c, next_value(list, &at), ret_are);
        at = skip_space(list, at) + 1; // the comma
    }
    json_decref(parsed);
    for (; !*ret_are && c->n > before; c->n--) {
        free(c->list[c->n - 1].name);
        free(c->list[c->n - 1].arguments);
    }
    return st;
}

// ---- the text ----------------------------------------------------------------------------------

// text[at..to) is no call's.
static void give(struct tool_calls *c, const char *text, size_t to)
{
    while (c->behind_call && c->at < to && is_space(text[c->at])) c->at++;
    if (c->at == to) return;
    bytes_append(&c->content, text + c->at, to - c->at);
    c->at = to;
    c->behind_call = false;
}

// White space at the end waits for what follows it.
static void give_but_space(struct tool_calls *c, const char *text, size_t to)
{
    while (to > c->at && is_space(text[to - 1])) to--;
    give(c, text, to);
}

// What begins at `open`. On TOOL_MATCH_YES *ret_to is the end of the call.
static enum status look(struct tool_calls *c, const char *text, size_t len, bool end,
                        enum tool_match_state *ret_state, size_t *ret_to)
{
    enum tool_match_state all = TOOL_MATCH_NO;
    for (int i = 0; i < c->n_matches && all != TOOL_MATCH_YES; i++) {
        struct tool_match *m = &c->matches[i];
        if (!c->begun) tool_match_begin(c->form, i, c->open, c->text_before, m);
        enum tool_match_state one = tool_match_go_on(m, text, len, end);
        bool is_call = false;
        if (one == TOOL_MATCH_YES) {
            const struct slice name = {text + m->name, m->name_len},
                               json = {text + m->json, m->json_len};
            enum status st = m->kind == TOOL_ARGUMENTS ? add_call(c, name, json, &is_call)
                             : m->kind == TOOL_CALL    ? add_object(c, json, &is_call)
                                                       : add_list(c, json, &is_call);
            if (st != ST_OK) return st;
            *ret_to = m->at;
            m->next = NULL;
        }
        if (is_call) all = TOOL_MATCH_YES;
        if (one == TOOL_MATCH_OPEN) all = TOOL_MATCH_OPEN;
    }
    c->begun = all == TOOL_MATCH_OPEN;
    *ret_state = all;
    return ST_OK;
}

enum status tool_calls_read(struct tool_calls *c, const char *text, size_t len, bool end)
{
    enum tool_match_state state = TOOL_MATCH_NO;
    while (c->open < len) {
        const bool space = is_space(text[c->open]); // goes before a call, and begins none
        size_t to = 0;
        if (!space) {
            enum status st = look(c, text, len, end, &state, &to);
            if (st != ST_OK) return st;
            if (state == TOOL_MATCH_OPEN) break;
        }
        if (!space && state == TOOL_MATCH_YES) {
            give_but_space(c, text, c->open);
            c->at = c->open = to;
            c->behind_call = true;
        } else {
            c->open++;
            c->text_before |= !space;
        }
    }
    (end ? give : give_but_space)(c, text, c->open);
    return bytes_status(&c->content);
}

void put_tool_call(struct json_out *o, const struct tool_call *call, int i, bool chunk)
{
    json_out_open(o, NULL, '{');
    if (chunk) json_out_int(o, "index", i);
    json_out_text(o, "id", call->id);
    json_out_text(o, "type", "function");
    json_out_open(o, "function", '{');
    json_out_text(o, "name", call->name);
    json_out_text(o, "arguments", chunk ? "" : call->arguments);
    json_out_close(o, '}');
    json_out_close(o, '}');
    if (!chunk) return;
    json_out_open(o, NULL, '{');
    json_out_int(o, "index", i);
    json_out_open(o, "function", '{');
    json_out_text(o, "arguments", call->arguments);
    json_out_close(o, '}');
    json_out_close(o, '}');
}
