/* tool_calls.c: the table of forms (tool_forms.h), the matching of their patterns, and calls found
 * by it in an answer. At each byte all patterns of the form are tried; while one of them may still
 * match, nothing behind that byte is given. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/tool_forms.h"
#include "common/base/json.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

// Hermes', which Qwen 2.5 and 3 write too; Llama 3.1 to 3.3; Mistral's until and since tokenizer
// v11 (whose first version has an id); DeepSeek's of V3 and R1, and of V3.1; gpt-oss's harmony,
// where the recipient stands before or behind the channel; Qwen3-Coder's, which Qwen3.5 and
// Nemotron 3 write too; GLM's since 4.5; LFM2's; Seed-OSS's; MiniMax-M2's; Granite's of 3;
// Cohere's; HunYuan's; Gemma's of 4.
const char *const tool_parser_names[] = {"auto",     "off",     "hermes",      "llama3", "mistral",
                                         "deepseek", "gpt-oss", "qwen3-coder", "glm",    "lfm2",
                                         "seed-oss", "minimax", "granite",     "cohere", "hunyuan",
                                         "gemma4",   NULL};

#define DEEPSEEK_BEGIN MAY("<｜tool▁calls▁begin｜> ") "<｜tool▁call▁begin｜>"
#define DEEPSEEK_END   "<｜tool▁call▁end｜>" MAY(" <｜tool▁calls▁end｜>")
#define CHANNEL        MAY("<|channel|>commentary") MAY("<|channel|>analysis")

static const struct tool_form forms[] = {
    {.patterns = {"<tool_call> " CALL " </tool_call>"}},
    {.patterns = {FIRST MAY("; ") CALL, "<|python_tag|> " CALL}, .key = "parameters"},
    {.patterns = {"[TOOL_CALLS] " CALLS, "[TOOL_CALLS] " NAME MAY("[ARGS]") " " ARGUMENTS,
                  "[TOOL_CALLS] " NAME "[CALL_ID]" WORD "[ARGS] " ARGUMENTS}},
    {.patterns = {DEEPSEEK_BEGIN "function<｜tool▁sep｜>" NAME " ```json " ARGUMENTS
                                 " ```" DEEPSEEK_END,
                  DEEPSEEK_BEGIN NAME "<｜tool▁sep｜> " ARGUMENTS " " DEEPSEEK_END}},
    {.patterns = {MAY("<|start|>assistant") "<|channel|>commentary to=functions." NAME
                                            " <|constrain|>json<|message|>" ARGUMENTS MAY(
                                                "<|call|>"),
                  MAY("<|start|>assistant") CHANNEL
                  " to=functions." NAME CHANNEL " " MAY("<|constrain|>") MAY("json")
                      MAY("code") " <|message|> " ARGUMENTS MAY(" <|call|>")},
     .n_written = 1,
     .thought = "<|channel|>analysis<|message|>" FREE "<|end|><|start|>assistant"},
    {.patterns = {MAY("<tool_call> ") "<function=" NAME "> " MANY(
         "<parameter=" KEY ">" LINES "</parameter> ") "</function>" MAY(" </tool_call>")}},
    {.patterns = {"<tool_call> " NAME " " MANY("<arg_key>" KEY "</arg_key> <arg_value>" VALUE
                                               "</arg_value> ") "</tool_call>"}},
    {.patterns = {"<|tool_call_start|> " PYTHON " <|tool_call_end|>"}},
    {.patterns = {MAY("<seed:tool_call> ") "<function=" NAME "> " MANY(
         "<parameter=" KEY ">" VALUE "</parameter> ") "</function>" MAY(" </seed:tool_call>")}},
    {.patterns = {MAY("<minimax:tool_call> ") "<invoke name=\"" NAME "\"> " MANY(
         "<parameter name=\"" KEY "\">" VALUE
         "</parameter> ") "</invoke>" MAY(" </minimax:tool_call>")}},
    {.patterns = {"<|tool_call|> " CALLS}},
    {.patterns = {"<|START_ACTION|> " CALLS " <|END_ACTION|>"},
     .key = "parameters",
     .name = "tool_name"},
    {.patterns = {"<tool_calls> " CALLS " </tool_calls>"}},
    {.patterns = {"<|tool_call>call:" NAME BARE " <tool_call|>"}},
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
        if (strstr(form->patterns[i], token) ||
            (strpbrk(form->patterns[i], BARE) && strcmp(token, TOOL_BARE_QUOTE) == 0))
            return true;
    return false;
}

// Whether c belongs to a text between two TOOL_BARE_QUOTEs, or to one of these.
static bool is_bare_text(struct json_reach *s, char c)
{
    static const char mark[] = TOOL_BARE_QUOTE;
    s->mark = c == mark[s->mark] ? s->mark + 1 : c == *mark;
    if (mark[s->mark]) return s->marked || s->mark > 0;
    s->mark = 0;
    s->marked = !s->marked;
    return true;
}

bool json_reach_step(struct json_reach *s, char c)
{
    if (s->bare && !s->quote && is_bare_text(s, c)) return false;
    if (s->quote) {
        const bool ends = c == s->quote && !s->escaped;
        s->escaped = c == '\\' && !s->escaped;
        if (ends) s->quote = 0;
        return ends && s->depth == 0;
    }
    const bool opens = c == '{' || c == '[' || (s->python && c == '(');
    const bool closes = c == '}' || c == ']' || (s->python && c == ')');
    s->depth += opens - closes;
    if (c == '"' || (s->python && c == '\'')) s->quote = c;
    return closes && s->depth <= 0;
}

// ---- JSON ---------------------------------------------------------------------------------------

static bool is_space(char c)
{
    return isspace((unsigned char)c);
}

static size_t skip_space(struct slice s, size_t at)
{
    while (at < s.len && is_space(s.text[at])) at++;
    return at;
}

// The value that begins at *at, which is moved behind it. s is well-formed JSON, or its beginning.
static struct slice next_value(struct slice s, size_t *at)
{
    struct json_reach reach = {0};
    const size_t from = *at;
    if (from >= s.len) return (struct slice){s.text + s.len, 0};
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

// The text of a member of such an object; the last of several, as jansson has it.
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

// ---- one match ---------------------------------------------------------------------------------

// What a pattern has beside a name.
enum tool_json { TOOL_ARGUMENTS, TOOL_CALL, TOOL_CALLS, TOOL_TAGS, TOOL_PYTHON, TOOL_BARE };

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
    size_t arguments, arguments_len; // within the JSON of a call; 0: likewise
    const char *many;                // in the pattern: where MANY begins
    size_t key, key_len;             // the last one
    struct bytes tagged;             // arguments between tags, as JSON
    const json_t *tools;
};

// The function of that name, of the request's tools; NULL: there is none.
static const json_t *find_function(const json_t *tools, struct slice name)
{
    const json_t *tool;
    size_t i;
    json_array_foreach (tools, i, tool) {
        const json_t *inner = json_object_get(tool, "function"), *function = inner ? inner : tool;
        const json_t *known = json_object_get(function, "name");
        if (json_string_length(known) == name.len && name.len > 0 &&
            memcmp(json_string_value(known), name.text, name.len) == 0)
            return function;
    }
    return NULL;
}

enum tool_match_state { TOOL_MATCH_NO, TOOL_MATCH_OPEN, TOOL_MATCH_YES };

// Lays pattern i of the form against a text from `at` on. False: there is no such pattern. A match
// that cannot be, because other text stands before it, begins with next NULL.
static bool tool_match_begin(const struct tool_form *form, int i, size_t at, bool text_before,
                             struct tool_match *ret)
{
    const char *pattern = i < PATTERNS_MAX ? form->patterns[i] : NULL;
    struct bytes tagged = ret->tagged;
    if (!pattern) return false;
    bytes_clear(&tagged);
    *ret = (struct tool_match){.next = pattern, .at = at, .tagged = tagged, .tools = ret->tools};
    if (*pattern == *FIRST) ret->next = text_before ? NULL : pattern + 1;
    return true;
}

// To the end of a name, or of another word.
static enum tool_match_state read_name(struct tool_match *m, const char *text, size_t len, bool end)
{
    const size_t from = m->name_len ? m->name : m->at;
    while (m->at < len && (unsigned char)text[m->at] > ' ' && !strchr("<>([{\"`", text[m->at]))
        m->at++;
    if (*m->next == *NAME && m->at > from) {
        m->name = from;
        m->name_len = m->at - from;
    }
    if (m->at == len && !end) return TOOL_MATCH_OPEN;
    return m->at > from ? TOOL_MATCH_YES : TOOL_MATCH_NO;
}

static struct slice part(const char *text, size_t at, size_t len)
{
    return (struct slice){text + at, len};
}

// The function's name in the object of a call: Cohere has a key of its own.
static bool find_name(struct slice object, struct slice *ret)
{
    return find_member(object, "name", ret) || find_member(object, "tool_name", ret);
}

// A bracket opens at m->at within the object of a call: whether its arguments do, the name being
// there, is seen by the key before it.
static void find_arguments(struct tool_match *m, const char *text)
{
    static const char *const keys[] = {"\"arguments\"", "\"parameters\""};
    const struct slice head = part(text, m->json, m->at - m->json);
    struct slice name;
    size_t colon = m->at - 1;
    while (is_space(text[colon])) colon--;
    size_t behind = colon;
    while (is_space(text[behind - 1])) behind--;
    for (int i = 0; i < 2 && text[colon] == ':'; i++) {
        const size_t n = strlen(keys[i]);
        if (behind - m->json < n || memcmp(text + behind - n, keys[i], n) != 0) continue;
        if (!find_name(head, &name) || name.len < 2) continue;
        m->name = (size_t)(name.text - text) + 1;
        m->name_len = name.len - 2;
        m->arguments = m->at;
    }
}

// What cannot stand in JSON, but within a string, ends it: a text that only begins as JSON does is
// not held back for long.
static enum tool_match_state read_json(struct tool_match *m, const char *text, size_t len, bool end)
{
    const bool inside = m->reach.depth > 0, python = *m->next == *PYTHON, bare = *m->next == *BARE;
    if (m->at == len) return end ? TOOL_MATCH_NO : TOOL_MATCH_OPEN;
    if (!inside && text[m->at] != (*m->next == *CALLS || python ? '[' : '{')) return TOOL_MATCH_NO;
    if (!inside) m->json = m->at;
    m->kind = python ? TOOL_PYTHON : bare ? TOOL_BARE : (enum tool_json)(*m->next - *ARGUMENTS);
    m->reach.python = python;
    m->reach.bare = bare;
    if (m->kind == TOOL_ARGUMENTS) m->arguments = m->json;
    while (m->at < len) {
        const char c = text[m->at];
        if (!m->reach.quote && !python && !bare &&
            !(c && strchr("{}[]\":, \t\r\n+-.0123456789eEtrufalsn", c)))
            return TOOL_MATCH_NO;
        if (c == '{' && m->kind == TOOL_CALL && m->reach.depth == 1 && !m->reach.quote &&
            !m->arguments)
            find_arguments(m, text);
        m->at++;
        const bool over = json_reach_step(&m->reach, c);
        if ((c == '}' || c == ']') && m->reach.depth == 1 && !m->reach.quote && m->arguments &&
            !m->arguments_len)
            m->arguments_len = m->at - m->arguments;
        if (!over) continue;
        m->json_len = m->at - m->json;
        if (m->kind == TOOL_ARGUMENTS) m->arguments_len = m->json_len;
        return TOOL_MATCH_YES;
    }
    return end ? TOOL_MATCH_NO : TOOL_MATCH_OPEN;
}

// A key or a value, up to the text that stands behind it in the pattern.
static enum tool_match_state read_tagged(struct tool_match *m, const char *text, size_t len,
                                         bool end)
{
    const char *behind = m->next + 1;
    size_t n = 0;
    while (!IS_SPECIAL(behind[n])) n++;
    const char *found = memmem(text + m->at, len - m->at, behind, n);
    if (!found) return end ? TOOL_MATCH_NO : TOOL_MATCH_OPEN;
    size_t from = m->at, to = (size_t)(found - text);
    m->at = to;
    if (*m->next == *KEY) {
        while (from < to && is_space(text[from])) from++;
        while (from < to && is_space(text[to - 1])) to--;
        m->optional = false;
        m->key = from;
        m->key_len = to - from;
        return TOOL_MATCH_YES;
    }
    if (*m->next == *LINES && from < to && text[from] == '\n') from++;
    if (*m->next == *LINES && from < to && text[to - 1] == '\n') to--;
    const json_t *function = find_function(m->tools, part(text, m->name, m->name_len));
    const json_t *root = json_object_get(function, "parameters");
    const json_t *properties = json_object_get(root, "properties");
    struct json_out out = {&m->tagged, false};
    bytes_puts(&m->tagged, m->tagged.len ? ", " : "{");
    json_out_string(&out, NULL, text + m->key, m->key_len);
    bytes_puts(&m->tagged, ": ");
    tool_put_value(root, json_object_getn(properties, text + m->key, m->key_len), text + from,
                   to - from, &m->tagged);
    return TOOL_MATCH_YES;
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
        m->next = strpbrk(m->next, "\007\014");
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
    case '\020': // PYTHON
    case '\022': // BARE
        return read_json(m, text, len, end);
    case '\006': // MAY(
        m->optional = true;
        m->optional_at = m->at;
        return TOOL_MATCH_YES;
    case '\007': // )
        m->optional = false;
        return TOOL_MATCH_YES;
    case '\013': // MANY(
        m->many = m->next;
        m->kind = TOOL_TAGS;
        m->optional = true;
        m->optional_at = m->at;
        return TOOL_MATCH_YES;
    case '\014': // )
        m->next = m->many - 1;
        return TOOL_MATCH_YES;
    case '\015': // KEY
    case '\016': // VALUE
    case '\017': // LINES
        return read_tagged(m, text, len, end);
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

enum status tool_calls_new(const struct tool_form *form, const json_t *tools, bool early,
                           struct tool_calls **ret)
{
    struct tool_calls *c = calloc(1, sizeof *c);
    struct tool_match m = {0};
    if (!c) return status_fail(ST_NO_MEMORY, "out of memory");
    c->form = form;
    c->tools = tools;
    c->early = early;
    while (tool_match_begin(form, c->n_matches, 0, false, &m)) c->n_matches++;
    c->matches = calloc((size_t)c->n_matches, sizeof *c->matches);
    if (!c->matches) {
        tool_calls_free(c);
        return status_fail(ST_NO_MEMORY, "out of memory");
    }
    for (int i = 0; i < c->n_matches; i++) c->matches[i].tools = tools;
    *ret = c;
    return ST_OK;
}

// The calls from number n on are none.
static void drop_calls(struct tool_calls *c, int n)
{
    for (; c->n > n; c->n--) {
        free(c->list[c->n - 1].name);
        bytes_release(&c->list[c->n - 1].arguments);
    }
}

void tool_calls_free(struct tool_calls *c)
{
    if (!c) return;
    drop_calls(c, 0);
    for (int i = 0; c->matches && i < c->n_matches; i++) bytes_release(&c->matches[i].tagged);
    bytes_release(&c->content);
    free(c->list);
    free(c->matches);
    free(c);
}

// ---- one call ----------------------------------------------------------------------------------

static void make_id(char ret[TOOL_CALL_ID_BYTES])
{
    static const char digits[] = "abcdefghijklmnopqrstuvwxyz0123456789";
    uint64_t bits = 0;
    if (getrandom(&bits, sizeof bits, 0) != sizeof bits) bits = (uint64_t)(uintptr_t)ret;
    for (int i = 0; i < TOOL_CALL_ID_BYTES - 1; i++, bits /= 36) ret[i] = digits[bits % 36];
    ret[TOOL_CALL_ID_BYTES - 1] = 0;
}

// One without arguments yet.
static enum status new_call(struct tool_calls *c, struct slice name, struct tool_call **ret)
{
    struct tool_call *list = array_room(c->list, (size_t)c->n, sizeof *list);
    if (!list) return status_fail(ST_NO_MEMORY, "out of memory");
    c->list = list;
    *ret = &list[c->n++];
    **ret = (struct tool_call){.name = strndup(name.text, name.len)};
    make_id((*ret)->id);
    return (*ret)->name ? ST_OK : status_fail(ST_NO_MEMORY, "out of memory");
}

// *ret_is false: it is no call.
static enum status add_call(struct tool_calls *c, struct slice name, struct slice arguments,
                            bool *ret_is)
{
    json_t *parsed = NULL;
    struct tool_call *call;
    *ret_is = find_function(c->tools, name) &&
              json_parse("arguments", arguments.text, arguments.len, &parsed) == ST_OK &&
              json_is_object(parsed);
    json_decref(parsed);
    if (!*ret_is) return ST_OK;
    enum status st = new_call(c, name, &call);
    if (st != ST_OK) return st;
    bytes_append(&call->arguments, arguments.text, arguments.len);
    return bytes_status(&call->arguments);
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
    if (!name) name = json_object_get(parsed, "tool_name");
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
    if (!*ret_are) drop_calls(c, before);
    return st;
}

static enum status add_python(struct tool_calls *c, struct slice list, bool *ret_are)
{
    struct bytes arguments = BYTES_INIT;
    struct slice name;
    const int before = c->n;
    enum status st = ST_OK;
    *ret_are = true;
    for (size_t at = skip_space(list, 1); st == ST_OK && *ret_are && at + 1 < list.len;
         at = skip_space(list, at)) {
        *ret_are = tool_next_python_call(list.text, list.len - 1, &at, &name, &arguments);
        if (*ret_are)
            st = add_call(c, name, (struct slice){bytes_text(&arguments), arguments.len}, ret_are);
    }
    if (!*ret_are) drop_calls(c, before);
    *ret_are = c->n > before;
    bytes_release(&arguments);
    return st;
}

static enum status add_bare(struct tool_calls *c, struct slice name, struct slice object,
                            bool *ret_is)
{
    struct bytes arguments = BYTES_INIT;
    enum status st = ST_OK;
    *ret_is = tool_put_bare(object.text, object.len, &arguments);
    if (*ret_is)
        st = add_call(c, name, (struct slice){bytes_text(&arguments), arguments.len}, ret_is);
    bytes_release(&arguments);
    return st;
}

// What the pattern has matched.
static enum status add_match(struct tool_calls *c, const struct tool_match *m, const char *text,
                             bool *ret_is)
{
    const struct slice name = part(text, m->name, m->name_len),
                       json = part(text, m->json, m->json_len),
                       tagged = {bytes_text(&m->tagged), m->tagged.len};
    if (m->kind == TOOL_CALL) return add_object(c, json, ret_is);
    if (m->kind == TOOL_CALLS) return add_list(c, json, ret_is);
    if (m->kind == TOOL_PYTHON) return add_python(c, json, ret_is);
    if (m->kind == TOOL_BARE) return add_bare(c, name, json, ret_is);
    return add_call(c, name, m->kind == TOOL_TAGS ? tagged : json, ret_is);
}

// Gives the call that m has begun, where its name is known and its arguments begin, and what has
// come of them since.
static enum status grow(struct tool_calls *c, const struct tool_match *m, const char *text)
{
    const struct slice name = part(text, m->name, m->name_len);
    struct slice all =
        part(text, m->arguments, m->arguments_len ? m->arguments_len : m->at - m->arguments);
    struct tool_call *call;
    if (m->kind == TOOL_TAGS) all = (struct slice){bytes_text(&m->tagged), m->tagged.len};
    if (!(m->kind == TOOL_TAGS ? m->key : m->arguments)) return ST_OK;
    if (!c->growing) {
        if (!find_function(c->tools, name)) return ST_OK;
        enum status st = new_call(c, name, &call);
        if (st != ST_OK) return st;
        c->growing = m;
    }
    call = &c->list[c->n - 1];
    bytes_append(&call->arguments, all.text + call->arguments.len, all.len - call->arguments.len);
    return bytes_status(&call->arguments);
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
        if (c->growing && c->growing != m) continue;
        if (!c->begun) tool_match_begin(c->form, i, c->open, c->text_before, m);
        const enum tool_match_state one = tool_match_go_on(m, text, len, end);
        const bool over = one == TOOL_MATCH_YES;
        bool is_call = false;
        enum status st = ST_OK;
        if (over && m->kind == TOOL_TAGS) bytes_puts(&m->tagged, m->tagged.len ? "}" : "{}");
        if (c->early) st = grow(c, m, text);
        if (st == ST_OK && over && !c->growing) st = add_match(c, m, text, &is_call);
        if (st != ST_OK) return st;
        if (c->growing && one != TOOL_MATCH_OPEN) { // whole, or broken
            is_call = true;
            c->growing = NULL;
        }
        if (over) m->next = NULL;
        *ret_to = m->at;
        if (is_call) all = TOOL_MATCH_YES;
        if (one == TOOL_MATCH_OPEN) all = TOOL_MATCH_OPEN;
    }
    c->begun = all == TOOL_MATCH_OPEN;
    *ret_state = all;
    return ST_OK;
}

// The text before the newest calls has been given.
static void place(struct tool_calls *c)
{
    for (; c->n_placed < c->n; c->n_placed++) c->list[c->n_placed].content_at = c->content.len;
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
            place(c);
            c->at = c->open = to;
            c->behind_call = true;
        } else {
            c->open++;
            c->text_before |= !space;
        }
    }
    (end ? give : give_but_space)(c, text, c->open);
    place(c);
    return bytes_status(&c->content);
}

// i < 0: it has no index.
static void put_call(struct json_out *o, const struct tool_call *call, int i,
                     struct slice arguments)
{
    json_out_open(o, NULL, '{');
    if (i >= 0) json_out_int(o, "index", i);
    json_out_text(o, "id", call->id);
    json_out_text(o, "type", "function");
    json_out_open(o, "function", '{');
    json_out_text(o, "name", call->name);
    json_out_string(o, "arguments", arguments.text, arguments.len);
    json_out_close(o, '}');
    json_out_close(o, '}');
}

void put_tool_call(struct json_out *o, const struct tool_call *call)
{
    put_call(o, call, -1, (struct slice){bytes_text(&call->arguments), call->arguments.len});
}

void put_tool_call_delta(struct json_out *o, const struct tool_call *call, int i, bool first,
                         size_t from)
{
    const struct bytes *arguments = &call->arguments;
    if (first) put_call(o, call, i, (struct slice){"", 0});
    if (arguments->len == from) return;
    json_out_open(o, NULL, '{');
    json_out_int(o, "index", i);
    json_out_open(o, "function", '{');
    json_out_string(o, "arguments", bytes_text(arguments) + from, arguments->len - from);
    json_out_close(o, '}');
    json_out_close(o, '}');
}
