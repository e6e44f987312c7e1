/* tool_calls.c: see tool_calls.h. At each byte all patterns of the form are tried; while one of
 * them may still match, nothing behind that byte is given. */
#include "infer-server/http/tool_calls.h"
#include "common/base/json.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

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

static enum status add_match(struct tool_calls *c, const char *text, const struct tool_match *m,
                             bool *ret_is)
{
    const struct slice json = {text + m->json, m->json_len};
    if (m->kind == TOOL_ARGUMENTS)
        return add_call(c, (struct slice){text + m->name, m->name_len}, json, ret_is);
    return (m->kind == TOOL_CALL ? add_object : add_list)(c, json, ret_is);
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
            enum status st = add_match(c, text, m, &is_call);
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
