/* tool_form.c: the table of forms, and the matching of their patterns. */
#include "infer-server/http/tool_form.h"

#include <ctype.h>
#include <string.h>

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

bool json_reach_step(struct json_reach *s, char c)
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

bool tool_match_begin(const struct tool_form *form, int i, size_t at, bool text_before,
                      struct tool_match *ret)
{
    const char *pattern = i < PATTERNS_MAX ? form->patterns[i] : NULL;
    if (!pattern) return false;
    *ret = (struct tool_match){.next = pattern, .at = at};
    if (*pattern == *FIRST) ret->next = text_before ? NULL : pattern + 1;
    return true;
}

static bool is_name(char c)
{
    return (unsigned char)c > ' ' && !strchr("<[{\"", c);
}

// To the end of a name, or of another word.
static enum tool_match_state read_name(struct tool_match *m, const char *text, size_t len, bool end)
{
    const size_t from = m->name_len ? m->name : m->at;
    while (m->at < len && is_name(text[m->at])) m->at++;
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

enum tool_match_state tool_match_go_on(struct tool_match *m, const char *text, size_t len, bool end)
{
    enum tool_match_state state = m->next ? TOOL_MATCH_YES : TOOL_MATCH_NO;
    while (state == TOOL_MATCH_YES && *m->next) {
        state = read_next(m, text, len, end);
        if (state == TOOL_MATCH_YES) m->next++;
    }
    if (state == TOOL_MATCH_NO) m->next = NULL;
    return state;
}
