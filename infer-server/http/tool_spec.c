/* tool_spec.c: an answer that has to hold tool calls, or may hold none but whole ones, as a spec of
 * a constraint (common/constraint/constraint.h). It is made of the patterns that calls are parsed
 * by, so that what it lets through is what the parser finds. White space in a pattern is the
 * model's to choose, two characters of it at most. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/tool_forms.h"

#include <string.h>

// A function in a pattern.
struct called {
    const struct tool_form *form;
    const struct tool_ask *ask;
    const char *pattern;
    const json_t *function;
    bool typed;         // its schema holds; else any arguments do
    const char *key;    // of the argument that MANY is at; NULL: any
    const json_t *type; // its schema
};

static json_t *sequence(const struct called *f, const char **at, char end);

static json_t *optional(json_t *spec)
{
    return json_pack("{s:[s, o]}", "either", "", spec);
}

static const json_t *parameters(const struct called *f)
{
    return f->typed ? json_object_get(f->function, "parameters") : NULL;
}

// A schema with what its references are to.
static json_t *schema_spec(const struct called *f, const json_t *schema)
{
    static const char *const kept[] = {"$defs", "definitions"};
    json_t *copy = schema ? json_copy((json_t *)schema) : json_pack("{s:s}", "type", "object");
    for (int i = 0; i < 2; i++) {
        json_t *definitions = json_object_get(parameters(f), kept[i]);
        if (definitions) json_object_set(copy, kept[i], definitions);
    }
    return json_pack("{s:o}", "json_schema", copy);
}

// One of the texts of an enum, between marks; NULL: it has others than texts, or is none.
static json_t *choice_of_texts(const json_t *type, const char *mark)
{
    const json_t *list = json_object_get(type, "enum"), *one;
    json_t *texts = json_array();
    size_t i;
    json_array_foreach (list, i, one)
        if (json_is_string(one))
            json_array_append_new(texts,
                                  json_sprintf("%s%s%s", mark, json_string_value(one), mark));
    if (json_array_size(texts) > 0 && json_array_size(texts) == json_array_size(list))
        return json_pack("{s:o}", "choice", texts);
    json_decref(texts);
    return NULL;
}

// Up to the text at *at in a pattern, and with it.
static json_t *value_spec(const struct called *f, const char **at, bool lines)
{
    struct bytes end = BYTES_INIT; // of a value that is no free text
    json_t *spec = choice_of_texts(f->type, "");
    size_t n = 0;
    while (!IS_SPECIAL((*at)[n])) n++;
    bytes_puts(&end, lines ? "\n" : "");
    bytes_append(&end, *at, n);
    *at += n;
    if (spec)
        spec = json_pack("{s:[o, s]}", "sequence", spec, bytes_text(&end));
    else if (!f->type || tool_takes_text(parameters(f), f->type))
        spec = json_pack("{s:[s]}", "until", bytes_text(&end) + lines);
    else
        spec = json_pack("{s:[o, s]}", "sequence", schema_spec(f, f->type), bytes_text(&end));
    bytes_release(&end);
    return lines ? json_pack("{s:[s, o]}", "sequence", "\n", spec) : spec;
}

static bool is_required(const json_t *schema, const char *key)
{
    const json_t *one;
    size_t i;
    json_array_foreach (json_object_get(schema, "required"), i, one)
        if (json_is_string(one) && strcmp(json_string_value(one), key) == 0) return true;
    return false;
}

// MANY: the arguments in the schema's order, or, where it names none, any.
static json_t *tagged_spec(const struct called *f, const char **at)
{
    const json_t *schema = parameters(f);
    json_t *properties = json_object_get(schema, "properties"), *type, *all = json_array(), *one;
    const char *begin = *at, *key;
    json_object_foreach (properties, key, type) {
        struct called argument = *f;
        argument.key = key;
        argument.type = type;
        *at = begin;
        one = sequence(&argument, at, *"\014");
        json_array_append_new(all, is_required(schema, key) ? one : optional(one));
    }
    if (f->typed && json_array_size(all) == 0) *at = strchr(begin, *"\014") + 1;
    if (f->typed) return json_pack("{s:o}", "sequence", all);
    json_decref(all);
    one = sequence(f, at, *"\014");
    return json_pack("{s:o}", "repeat", one);
}

// KEY:VALUE, as Gemma 4 writes it but for what is within lists and objects.
static json_t *bare_argument(const struct called *f, const char *key, const json_t *type)
{
    static const char mark[] = TOOL_BARE_QUOTE;
    json_t *value = choice_of_texts(type, mark);
    if (!value && tool_takes_text(parameters(f), type))
        value = json_pack("{s:[s, {s:[s]}]}", "sequence", mark, "until", mark);
    else if (!value)
        value = schema_spec(f, type);
    return json_pack("{s:[s, s, o]}", "sequence", key, ":", value);
}

// KEY=VALUE, as Python writes it but for what is within lists and objects.
static json_t *python_argument(const struct called *f, const char *key, const json_t *type)
{
    const char *name = json_string_value(json_object_get(type, "type"));
    json_t *value = name && strcmp(name, "boolean") == 0
                        ? json_pack("{s:[s, s]}", "choice", "True", "False")
                        : schema_spec(f, type);
    return json_pack("{s:[s, s, o]}", "sequence", key, "=", value);
}

// Arguments in the schema's order: commas stand between those that are there.
static json_t *listed_arguments(const struct called *f, const char *comma,
                                json_t *(*put)(const struct called *, const char *, const json_t *))
{
    const json_t *schema = parameters(f);
    json_t *properties = json_object_get(schema, "properties"), *type;
    json_t *first = json_string(""), *behind = json_string("");
    const char *key;
    json_t *keys = json_array(); // the last one first
    json_object_foreach (properties, key, type) json_array_insert_new(keys, 0, json_string(key));
    for (size_t i = 0; i < json_array_size(keys); i++) {
        key = json_string_value(json_array_get(keys, i));
        json_t *one = put(f, key, json_object_get(properties, key));
        json_t *led = json_pack("{s:[o, O]}", "sequence", one, behind);
        json_t *next = json_pack("{s:[s, O]}", "sequence", comma, led);
        if (is_required(schema, key)) {
            json_decref(first);
            json_decref(behind);
            first = led;
            behind = next;
        } else {
            first = json_pack("{s:[o, o]}", "either", led, first);
            behind = json_pack("{s:[o, o]}", "either", next, behind);
        }
    }
    json_decref(keys);
    json_decref(behind);
    return first;
}

static json_t *python_call(const struct called *f, const char *name)
{
    return json_pack("{s:[s, s, o, s]}", "sequence", name, "(",
                     listed_arguments(f, ", ", python_argument), ")");
}

// Of a function without a schema any text up to the call's end.
static json_t *bare_arguments(const struct called *f)
{
    json_t *all = f->typed ? listed_arguments(f, ",", bare_argument)
                           : json_pack("{s:[s]}", "without", "<tool_call|>");
    return json_pack("{s:[s, o, s]}", "sequence", "{", all, "}");
}

static json_t *json_call(const struct called *f, const char *name)
{
    return json_pack("{s:[s, s, s, s, s, s, s, o, s]}", "sequence", "{\"",
                     f->form->name ? f->form->name : "name", "\": \"", name, "\", \"",
                     f->form->key ? f->form->key : "arguments",
                     "\": ", schema_spec(f, parameters(f)), "}");
}

// A call of one of the functions that are asked for, as put() writes it.
static json_t *any_call(const struct tool_form *form, const struct tool_ask *ask,
                        const char *pattern,
                        json_t *(*put)(const struct called *f, const char *name))
{
    json_t *all = json_array();
    const json_t *tool;
    size_t i;
    json_array_foreach (ask->tools, i, tool) {
        const json_t *inner = json_object_get(tool, "function"), *function = inner ? inner : tool;
        const char *name = json_string_value(json_object_get(function, "name"));
        const bool strict = json_is_true(json_object_get(function, "strict"));
        const struct called f = {.form = form,
                                 .ask = ask,
                                 .pattern = pattern,
                                 .function = function,
                                 .typed = ask->required || strict};
        if (name && !(ask->name && strcmp(name, ask->name) != 0))
            json_array_append_new(all, put(&f, name));
    }
    return json_pack("{s:o}", "either", all);
}

static json_t *calls_between(json_t *call, bool several, json_t *between)
{
    json_t *spec = json_pack("{s:o, s:i, s:o}", "repeat", call, "min", 1, "between", between);
    if (!several) json_object_set_new(spec, "max", json_integer(1));
    return spec;
}

static json_t *list_spec(const struct called *f,
                         json_t *(*put)(const struct called *, const char *))
{
    return json_pack(
        "{s:[s, o, s]}", "sequence", "[",
        calls_between(any_call(f->form, f->ask, NULL, put), f->ask->several, json_string(", ")),
        "]");
}

static json_t *space(void)
{
    return json_pack("{s:s}", "regex", "[ \\n]{0,2}");
}

// What stands at *at in a pattern, which is moved behind it.
static json_t *element(const struct called *f, const char **at)
{
    const char *name = json_string_value(json_object_get(f->function, "name")), *from = *at;
    size_t n = 0;
    while (!IS_SPECIAL(from[n])) n++;
    *at += n ? n : 1;
    if (n) return json_stringn(from, n);
    switch (*from) {
    case '\001': // NAME
        return json_string(name);
    case '\002': // WORD
        return json_pack("{s:s}", "regex", "[a-zA-Z0-9]{9}");
    case '\003': // ARGUMENTS
        return schema_spec(f, parameters(f));
    case '\004': // CALL
        return json_call(f, name);
    case '\005': // CALLS
        return list_spec(f, json_call);
    case '\006': // MAY
        return optional(sequence(f, at, *"\007"));
    case '\013': // MANY
        return tagged_spec(f, at);
    case '\015': // KEY
        return f->key ? json_string(f->key) : json_pack("{s:s}", "regex", "[A-Za-z_][A-Za-z_0-9]*");
    case '\016': // VALUE
    case '\017': // LINES
        return value_spec(f, at, *from == *LINES);
    case '\020': // PYTHON
        return list_spec(f, python_call);
    case '\022': // BARE
        return bare_arguments(f);
    case '\021': // FREE
        while (!IS_SPECIAL((*at)[n])) n++;
        return json_pack("{s:[o]}", "without", json_stringn(*at, n));
    case ' ':
        return space();
    default: // FIRST
        return json_string("");
    }
}

// Up to `end`, which is passed.
static json_t *sequence(const struct called *f, const char **at, char end)
{
    json_t *parts = json_array();
    while (**at && **at != end) json_array_append_new(parts, element(f, at));
    if (**at) ++*at;
    return json_pack("{s:o}", "sequence", parts);
}

static json_t *written(const struct called *f, const char *name)
{
    const char *at = f->pattern;
    (void)name;
    return sequence(f, &at, 0);
}

// Calls behind one another; of a pattern that has a list of them, one list.
static json_t *calls_spec(const struct tool_form *form, const struct tool_ask *ask)
{
    json_t *all = json_array(), *singles = json_array();
    const int n = form->n_written ? form->n_written : PATTERNS_MAX;
    for (int i = 0; i < n && form->patterns[i]; i++) {
        const struct called list = {.form = form, .ask = ask, .pattern = form->patterns[i]};
        if (strpbrk(form->patterns[i], CALLS PYTHON))
            json_array_append_new(all, written(&list, NULL));
        else
            json_array_append_new(singles, any_call(form, ask, form->patterns[i], written));
    }
    if (json_array_size(singles) > 0)
        json_array_append_new(
            all, calls_between(json_pack("{s:O}", "either", singles), ask->several, space()));
    json_decref(singles);
    return json_pack("{s:o}", "either", all);
}

// The texts that calls begin with, which free text does not have.
static json_t *openings(const struct tool_form *form)
{
    json_t *all = json_array();
    for (int i = 0; form->patterns[i]; i++)
        for (const char *at = form->patterns[i];
             *at && (!IS_SPECIAL(*at) || strchr(MAY(" "), *at));) {
            size_t n = 0;
            while (!IS_SPECIAL(at[n])) n++;
            if (n) json_array_append_new(all, json_stringn(at, n));
            at += n ? n : 1;
        }
    return all;
}

json_t *tool_form_spec(const struct tool_form *form, const struct tool_ask *ask)
{
    const struct called none = {.form = form, .ask = ask};
    const char *thought = form->thought ? form->thought : "<think>" FREE "</think> ";
    if (ask->alone) return calls_spec(form, ask);
    if (!ask->required && form->thought) return NULL;
    if (!ask->required && *form->patterns[0] == *FIRST)
        return json_pack("{s:[o, {s:s}]}", "either", calls_spec(form, ask), "regex",
                         "([^{\\s][\\s\\S]*)?");
    if (!ask->required)
        return json_pack("{s:[{s:o}, o]}", "sequence", "without", openings(form),
                         optional(calls_spec(form, ask)));
    if (!ask->thinks && !ask->in_thought && !form->thought) return calls_spec(form, ask);
    while (ask->in_thought && !IS_SPECIAL(*thought)) thought++;
    json_t *before = sequence(&none, &thought, 0);
    return json_pack("{s:[o, o]}", "sequence", ask->in_thought ? before : optional(before),
                     calls_spec(form, ask));
}
