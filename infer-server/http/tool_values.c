/* tool_values.c: arguments of tool calls that models write otherwise than as JSON: texts between
 * tags, whose types the tool's schema knows, Python's literals and calls, and Gemma 4's objects.
 * Pure functions; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/tool_calls.h"

#include <ctype.h>
#include <string.h>

// ---- literals ----------------------------------------------------------------------------------

// Types as bits, by jansson's numbers.
#define TYPE(x)  (1u << (x))
#define ANY_TYPE (~0u)

static unsigned named_types(const char *name)
{
    static const unsigned number = TYPE(JSON_INTEGER) | TYPE(JSON_REAL);
    static const struct {
        const char *name;
        unsigned types;
    } all[] = {{"string", TYPE(JSON_STRING)}, {"number", number},
               {"integer", number},           {"boolean", TYPE(JSON_TRUE) | TYPE(JSON_FALSE)},
               {"null", TYPE(JSON_NULL)},     {"array", TYPE(JSON_ARRAY)},
               {"object", TYPE(JSON_OBJECT)}};
    for (size_t i = 0; name && i < sizeof all / sizeof *all; i++)
        if (strcmp(name, all[i].name) == 0) return all[i].types;
    return ANY_TYPE;
}

// What its "$ref" names, in the form that pydantic and zod write.
static const json_t *referred(const json_t *root, const json_t *schema)
{
    static const char *const places[] = {"$defs", "definitions"};
    const char *ref = json_string_value(json_object_get(schema, "$ref"));
    for (int i = 0; ref && i < 2; i++) {
        const size_t n = strlen(places[i]);
        if (strncmp(ref, "#/", 2) == 0 && strncmp(ref + 2, places[i], n) == 0 && ref[2 + n] == '/')
            return json_object_get(json_object_get(root, places[i]), ref + 3 + n);
    }
    return schema;
}

// What a schema within `root` may take; all where it says nothing.
static unsigned taken_types(const json_t *root, const json_t *schema, int depth)
{
    static const char *const branches[] = {"anyOf", "oneOf"};
    schema = referred(root, schema);
    const json_t *type = json_object_get(schema, "type"), *constant, *one;
    unsigned types = 0;
    size_t i;
    if (json_is_string(type)) return named_types(json_string_value(type));
    if ((constant = json_object_get(schema, "const"))) return TYPE(json_typeof(constant));
    json_array_foreach (type, i, one) types |= named_types(json_string_value(one));
    json_array_foreach (json_object_get(schema, "enum"), i, one) types |= TYPE(json_typeof(one));
    for (int k = 0; k < 2 && depth < 8; k++)
        json_array_foreach (json_object_get(schema, branches[k]), i, one)
            types |= taken_types(root, one, depth + 1);
    return types ? types : ANY_TYPE;
}

// \n, \x41, ab and the like, behind the backslash; what is none stays, backslash included.
static size_t read_escape(const char *s, size_t len, struct bytes *to)
{
    static const char from[] = "abfnrtv\\'\"\n", into[] = "\a\b\f\n\r\t\v\\'\"";
    const char *plain = memchr(from, s[0], sizeof from - 1);
    const size_t digits = s[0] == 'x' ? 2 : s[0] == 'u' ? 4 : s[0] == 'U' ? 8 : 0;
    uint32_t code = 0;
    size_t n = 0;
    if (plain && *plain != '\n') bytes_append(to, &into[plain - from], 1);
    if (plain) return 1;
    for (; n < digits && n + 1 < len && isxdigit((unsigned char)s[n + 1]); n++) {
        const int c = tolower((unsigned char)s[n + 1]);
        code = code << 4 | (uint32_t)(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    char character[4];
    const bool is_code = digits && n == digits && code < 0x110000 && (code & ~0x7ffu) != 0xd800;
    if (is_code)
        bytes_append(to, character, (size_t)utf8_encode(code, character));
    else
        bytes_puts(to, "\\");
    return is_code ? 1 + digits : 0;
}

// The string that begins with a quote at s[at], as JSON; the index behind it.
static size_t put_python_string(const char *s, size_t len, size_t at, struct bytes *to)
{
    const char quote = s[at++];
    struct bytes text = BYTES_INIT;
    struct json_out out = {to, false};
    while (at < len && s[at] != quote) {
        if (s[at] == '\\' && at + 1 < len)
            at += 1 + read_escape(s + at + 1, len - at - 1, &text);
        else
            bytes_append(&text, &s[at++], 1);
    }
    json_out_string(&out, NULL, bytes_text(&text), text.len);
    to->failed |= text.failed;
    bytes_release(&text);
    return at + 1;
}

// A word, a bracket or another character that stands outside of strings.
static size_t put_python_token(const char *s, size_t len, size_t at, struct bytes *to)
{
    static const char *const words[][2] = {{"True", "true"}, {"False", "false"}, {"None", "null"}};
    size_t n = 0, next = at + 1;
    while (at + n < len && (isalpha((unsigned char)s[at + n]) || s[at + n] == '_')) n++;
    for (size_t i = 0; n > 0 && i < sizeof words / sizeof *words; i++)
        if (n == strlen(words[i][0]) && memcmp(s + at, words[i][0], n) == 0) {
            bytes_puts(to, words[i][1]);
            return at + n;
        }
    if (n > 0) {
        bytes_append(to, s + at, n);
        return at + n;
    }
    while (next < len && isspace((unsigned char)s[next])) next++;
    const bool closes = next < len && strchr(")]}", s[next]);
    const char c = s[at] == '(' ? '[' : s[at] == ')' ? ']' : s[at];
    if (c != ',' || !closes) bytes_append(to, &c, 1); // a comma may stand behind the last element
    return at + 1;
}

// The one value of a text, in brackets; NULL: it is not JSON.
static json_t *parse_one(const char *text, size_t len)
{
    struct bytes list = BYTES_INIT;
    json_t *value = NULL;
    bytes_puts(&list, "[");
    bytes_append(&list, text, len);
    bytes_puts(&list, "]");
    if (list.failed || json_parse("value", list.data, list.len, &value) != ST_OK) value = NULL;
    bytes_release(&list);
    if (json_array_size(value) == 1) return value;
    json_decref(value);
    return NULL;
}

// As JSON or a literal of Python; 0: it is neither, and nothing is appended. Else its type.
static unsigned put_literal(const char *text, size_t len, struct bytes *to)
{
    const size_t start = to->len;
    json_t *list = parse_one(text, len);
    if (list) bytes_append(to, text, len);
    for (size_t at = 0; !list && at < len;)
        at = (text[at] == '"' || text[at] == '\'' ? put_python_string : put_python_token)(text, len,
                                                                                          at, to);
    if (!list) list = parse_one(bytes_text(to) + start, to->len - start);
    const unsigned type = list ? TYPE(json_typeof(json_array_get(list, 0))) : 0;
    json_decref(list);
    if (!type) to->len = start;
    return type;
}

bool tool_takes_text(const json_t *root, const json_t *schema)
{
    return taken_types(root, schema, 0) & TYPE(JSON_STRING);
}

void tool_put_value(const json_t *root, const json_t *schema, const char *text, size_t len,
                    struct bytes *to)
{
    const unsigned types = taken_types(root, schema, 0);
    const size_t start = to->len;
    struct json_out out = {to, false};
    size_t from = 0, end = len;
    while (from < end && isspace((unsigned char)text[from])) from++;
    while (end > from && isspace((unsigned char)text[end - 1])) end--;
    const unsigned type =
        types == TYPE(JSON_STRING) ? 0 : put_literal(text + from, end - from, to) & types;
    if (type && type != TYPE(JSON_STRING)) return;
    to->len = start;
    json_out_string(&out, NULL, text, len);
}

// ---- calls -------------------------------------------------------------------------------------

static size_t skip(const char *s, size_t len, size_t at, const char *what)
{
    while (at < len && (isspace((unsigned char)s[at]) || (*what && s[at] == *what))) at++;
    return at;
}

// Up to a comma or a bracket that closes, which is none of the value's.
static size_t value_end(const char *s, size_t len, size_t at)
{
    struct json_reach reach = {.python = true};
    for (; at < len; at++) {
        if (!reach.quote && reach.depth == 0 && strchr(",)]", s[at])) break;
        json_reach_step(&reach, s[at]);
    }
    return at;
}

bool tool_next_python_call(const char *list, size_t len, size_t *at, struct slice *ret_name,
                           struct bytes *ret_arguments)
{
    struct json_out out = {ret_arguments, false};
    size_t i = skip(list, len, *at, ",");
    bytes_clear(ret_arguments);
    ret_name->text = list + i;
    while (i < len && (isalnum((unsigned char)list[i]) || strchr("_.-", list[i]))) i++;
    ret_name->len = (size_t)(list + i - ret_name->text);
    if (i >= len || list[i] != '(') return false;
    json_out_open(&out, NULL, '{');
    for (i = skip(list, len, i + 1, ""); i < len && list[i] != ')'; i = skip(list, len, i, ",")) {
        const size_t key = i;
        while (i < len && (isalnum((unsigned char)list[i]) || list[i] == '_')) i++;
        const size_t key_end = i, value = skip(list, len, i, "=");
        if (key_end == key || value == key_end) return false;
        if (ret_arguments->len > 1) bytes_puts(ret_arguments, ", ");
        bytes_printf(ret_arguments, "\"%.*s\": ", (int)(key_end - key), list + key);
        i = value_end(list, len, value);
        if (!put_literal(list + value, i - value, ret_arguments)) return false;
    }
    bytes_puts(ret_arguments, "}");
    *at = i + 1;
    return i < len;
}

// ---- bare objects ------------------------------------------------------------------------------

// A text between marks, one of JSON, a number or another word, as JSON; the index behind it.
static size_t put_bare_value(const char *s, size_t len, size_t at, bool is_key, struct bytes *to)
{
    static const char mark[] = TOOL_BARE_QUOTE;
    const size_t n = sizeof mark - 1;
    struct json_out out = {to, false};
    if (len - at >= n && memcmp(s + at, mark, n) == 0) {
        const char *text = s + at + n, *end = memmem(text, len - at - n, mark, n);
        json_out_string(&out, NULL, text, end ? (size_t)(end - text) : len - at - n);
        return end ? (size_t)(end - s) + n : len;
    }
    struct json_reach reach = {0};
    size_t end = at, next;
    if (s[at] == '"')
        while (end < len && !json_reach_step(&reach, s[end++])) {
        }
    else
        while (end < len && !strchr(is_key ? ":" : ",]}", s[end])) end++;
    for (next = end; end > at && isspace((unsigned char)s[end - 1]);) end--;
    json_t *list = is_key ? NULL : parse_one(s + at, end - at);
    if (list || s[at] == '"')
        bytes_append(to, s + at, end - at);
    else
        json_out_string(&out, NULL, s + at, end - at);
    json_decref(list);
    return next;
}

bool tool_put_bare(const char *object, size_t len, struct bytes *to)
{
    enum { MAX_DEPTH = 64 };
    char open[MAX_DEPTH + 1] = "";
    int depth = 0;
    bool key = false;
    for (size_t at = 0; at < len;) {
        const char c = object[at];
        if (c && strchr("{[", c)) {
            if (depth == MAX_DEPTH) return false;
            open[++depth] = c;
        }
        if (c && strchr("}]", c) && depth-- == 0) return false;
        if (!c || !strchr("{[}],:", c)) {
            at = isspace((unsigned char)c) ? at + 1 : put_bare_value(object, len, at, key, to);
            continue;
        }
        bytes_append(to, &c, 1);
        if (c == ',' || c == ':') bytes_puts(to, " ");
        key = c == '{' || (c == ',' && open[depth] == '{');
        at++;
    }
    json_t *list = parse_one(bytes_text(to), to->len);
    const bool is = json_is_object(json_array_get(list, 0));
    json_decref(list);
    return is;
}
