/* response_format.c: what a request, a line of data or an environment's turn asks of a response, to
 * a spec of a constraint: OpenAI's "response_format", and structural tags as vLLM and SGLang take
 * them, in the form of XGrammar's documentation. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/constraint.h"

#include <string.h>

struct tag_type {
    const char *type;
    // A format of a structural tag to a spec. `ends`: what ends the tag that it is in, which free
    // text has not. A new reference.
    enum status (*read)(const struct tag_type *t, const json_t *format, const json_t *ends,
                        json_t **ret);
    const char *spec;  // what the spec is an object of; NULL: another, or a text
    const char *field; // read_value(): what the format must have
    bool is_text;      // that; else a schema
    int min, max;      // read_times(); max < 0: any number
};
static enum status read_tag_format(const json_t *format, const json_t *ends, json_t **ret);

static enum status give(json_t *spec, json_t **ret)
{
    *ret = spec;
    return spec ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for a constraint");
}

static enum status lacks(const json_t *format, const char *field, const char *what)
{
    const char *type = json_string_value(json_object_get(format, "type"));
    return status_fail(ST_INVALID, "a structural tag's \"%s\": \"%s\" must be %s",
                       type ? CUT(type, 40) : "format", field, what);
}

static enum status read_value(const struct tag_type *t, const json_t *format, const json_t *ends,
                              json_t **ret)
{
    json_t *value = json_object_get(format, t->field);
    (void)ends;
    if (t->is_text ? !json_is_string(value) : !value)
        return lacks(format, t->field, t->is_text ? "a text" : "a schema");
    return give(t->spec ? json_pack("{s:O}", t->spec, value) : json_incref(value), ret);
}

// Free text without `texts` (optional), "excludes" and `ends`.
static enum status read_free(const json_t *format, const json_t *texts, const json_t *ends,
                             json_t **ret)
{
    const json_t *excludes = json_object_get(format, "excludes");
    json_t *all = json_array();
    if (excludes && !json_is_array(excludes)) {
        json_decref(all);
        return lacks(format, "excludes", "an array of texts");
    }
    json_array_extend(all, (json_t *)texts); // neither is an error where it is none
    json_array_extend(all, (json_t *)excludes);
    json_array_extend(all, (json_t *)ends);
    if (json_array_size(all) > 0) return give(json_pack("{s:o}", "without", all), ret);
    json_decref(all);
    return give(json_pack("{s:s}", "regex", "[\\s\\S]*"), ret);
}

static enum status read_any_text(const struct tag_type *t, const json_t *format, const json_t *ends,
                                 json_t **ret)
{
    (void)t;
    return read_free(format, NULL, ends, ret);
}

static enum status read_tag(const struct tag_type *t, const json_t *format, const json_t *ends,
                            json_t **ret);

// An array of formats, or of tags, whose "type" may be left out, to a spec of theirs.
static enum status read_list(const json_t *format, const char *field, const char *what,
                             const char *spec, const json_t *ends, json_t **ret)
{
    const bool tags = strcmp(field, "tags") == 0;
    const json_t *list = json_object_get(format, field), *one;
    json_t *all = json_array(), *its;
    enum status st = json_array_size(list) > 0 ? ST_OK : lacks(format, field, what);
    size_t i;
    json_array_foreach (list, i, one) {
        if (st == ST_OK)
            st = tags ? read_tag(NULL, one, ends, &its) : read_tag_format(one, ends, &its);
        if (st == ST_OK) json_array_append_new(all, its);
    }
    if (st == ST_OK) return give(json_pack("{s:o}", spec, all), ret);
    json_decref(all);
    return st;
}

static enum status read_elements(const struct tag_type *t, const json_t *format, const json_t *ends,
                                 json_t **ret)
{
    return read_list(format, "elements", "an array, not empty", t->spec, ends, ret);
}

static enum status read_tags(const json_t *format, const json_t *ends, json_t **ret)
{
    return read_list(format, "tags", "an array of tags", "either", ends, ret);
}

// "content", `min` to `max` times.
static enum status read_times(const struct tag_type *t, const json_t *format, const json_t *ends,
                              json_t **ret)
{
    json_t *spec;
    const enum status st = read_tag_format(json_object_get(format, "content"), ends, &spec);
    if (st != ST_OK) return st;
    spec = json_pack("{s:o, s:i}", "repeat", spec, "min", t->min);
    if (t->max >= 0) json_object_set_new(spec, "max", json_integer(t->max));
    return give(spec, ret);
}

// "end" is a text, "" for none, or several of which one comes.
static enum status read_tag(const struct tag_type *t, const json_t *format, const json_t *ends,
                            json_t **ret)
{
    json_t *begin = json_object_get(format, "begin"), *end = json_object_get(format, "end");
    json_t *own = json_is_array(end) ? json_incref(end) : json_pack("[O]", end), *content = NULL;
    enum status st = ST_OK;
    (void)t;
    if (!json_is_string(begin))
        st = lacks(format, "begin", "a text");
    else if (json_array_size(own) == 0 || !json_is_string(json_array_get(own, 0)))
        st = lacks(format, "end", "a text or an array of texts");
    const bool closed = st == ST_OK && json_string_length(json_array_get(own, 0)) > 0;
    if (st == ST_OK)
        st = read_tag_format(json_object_get(format, "content"), closed ? own : ends, &content);
    if (st == ST_OK && closed)
        st = give(json_pack("{s:[O, O, {s:O}]}", "sequence", begin, content, "choice", own), ret);
    else if (st == ST_OK)
        st = give(json_pack("{s:[O, O]}", "sequence", begin, content), ret);
    json_decref(content);
    json_decref(own);
    return st;
}

// ST_INVALID: a tag that no trigger begins could never come.
static enum status check_triggers(const json_t *format)
{
    const json_t *triggers = json_object_get(format, "triggers"), *tag, *one;
    size_t i, j;
    if (json_array_size(triggers) == 0) return lacks(format, "triggers", "an array of texts");
    json_array_foreach (json_object_get(format, "tags"), i, tag) {
        const char *begin = json_string_value(json_object_get(tag, "begin"));
        bool found = !begin; // read_tag() says so
        json_array_foreach (triggers, j, one) {
            const char *text = json_string_value(one);
            if (!text || !*text) return lacks(format, "triggers", "texts, none empty");
            found |= begin && strncmp(begin, text, strlen(text)) == 0;
        }
        if (!found)
            return status_fail(ST_INVALID,
                               "a structural tag's \"begin\" is \"%s\", which begins with none of "
                               "\"triggers\"",
                               CUT(begin, 40));
    }
    return ST_OK;
}

// Free text in which a trigger begins a tag.
static enum status read_triggered(const struct tag_type *t, const json_t *format,
                                  const json_t *ends, json_t **ret)
{
    const bool needed = json_is_true(json_object_get(format, "at_least_one"));
    const bool single = json_is_true(json_object_get(format, "stop_after_first"));
    json_t *tags = NULL, *text = NULL, *parts = NULL;
    enum status st;
    (void)t;
    CHECK(check_triggers(format));
    CHECK(read_tags(format, ends, &tags));
    CHECK(read_free(format, json_object_get(format, "triggers"), ends, &text));
    if (single) {
        st = needed ? give(json_incref(tags), ret)
                    : give(json_pack("{s:[O, {s:[s, O]}]}", "sequence", text, "either", "", tags),
                           ret);
        goto out;
    }
    parts = json_pack("[O, {s:{s:[O, O]}}]", text, "repeat", "sequence", tags, text);
    if (needed) json_array_insert(parts, 0, tags);
    st = give(json_pack("{s:O}", "sequence", parts), ret);
out:
    json_decref(tags);
    json_decref(text);
    json_decref(parts);
    return st;
}

static enum status read_separated(const struct tag_type *t, const json_t *format,
                                  const json_t *ends, json_t **ret)
{
    json_t *separator = json_object_get(format, "separator"), *tags, *spec;
    (void)t;
    if (!json_is_string(separator)) return lacks(format, "separator", "a text");
    const enum status st = read_tags(format, ends, &tags);
    if (st != ST_OK) return st;
    spec = json_pack("{s:o, s:O, s:i}", "repeat", tags, "between", separator, "min",
                     json_is_true(json_object_get(format, "at_least_one")));
    if (json_is_true(json_object_get(format, "stop_after_first")))
        json_object_set_new(spec, "max", json_integer(1));
    return give(spec, ret);
}

static enum status read_tag_format(const json_t *format, const json_t *ends, json_t **ret)
{
    static const struct tag_type types[] = {
        {"const_string", read_value, NULL, "value", true, 0, 0},
        {"json_schema", read_value, "json_schema", "json_schema", false, 0, 0},
        {"regex", read_value, "regex", "pattern", true, 0, 0},
        {"grammar", read_value, "grammar", "grammar", true, 0, 0},
        {"any_text", read_any_text, NULL, NULL, false, 0, 0},
        {"sequence", read_elements, "sequence", NULL, false, 0, 0},
        {"or", read_elements, "either", NULL, false, 0, 0},
        {"optional", read_times, NULL, NULL, false, 0, 1},
        {"star", read_times, NULL, NULL, false, 0, -1},
        {"plus", read_times, NULL, NULL, false, 1, -1},
        {"tag", read_tag, NULL, NULL, false, 0, 0},
        {"triggered_tags", read_triggered, NULL, NULL, false, 0, 0},
        {"tags_with_separator", read_separated, NULL, NULL, false, 0, 0}};
    const char *type = json_string_value(json_object_get(format, "type"));
    if (!type)
        return status_fail(ST_INVALID, "a structural tag's format must be an object with a "
                                       "\"type\"");
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].type, type) == 0) return types[i].read(&types[i], format, ends, ret);
    return status_fail(ST_UNSUPPORTED, "a structural tag's format \"%s\" is not supported",
                       CUT(type, 40));
}

// What came before "format": tags of a schema each.
static enum status read_structures(const json_t *given, json_t **ret)
{
    json_t *tags = json_array(), *one, *format;
    size_t i;
    json_array_foreach (json_object_get(given, "structures"), i, one)
        json_array_append_new(
            tags, json_pack("{s:O?, s:O?, s:{s:s, s:O?}}", "begin", json_object_get(one, "begin"),
                            "end", json_object_get(one, "end"), "content", "type", "json_schema",
                            "json_schema", json_object_get(one, "schema")));
    format = json_pack("{s:s, s:O?, s:o}", "type", "triggered_tags", "triggers",
                       json_object_get(given, "triggers"), "tags", tags);
    const enum status st = read_tag_format(format, NULL, ret);
    json_decref(format);
    return st;
}

enum status constraint_of_format(const json_t *format, json_t **ret)
{
    const char *type = json_string_value(json_object_get(format, "type"));
    const json_t *schema = json_object_get(json_object_get(format, "json_schema"), "schema");
    *ret = NULL;
    if (!format || json_is_null(format)) return ST_OK;
    if (!type) return status_fail(ST_INVALID, "it must be an object with a \"type\"");
    if (strcmp(type, "text") == 0) return ST_OK;
    if (strcmp(type, "json_object") == 0)
        return !json_object_get(format, "schema")
                   ? give(json_pack("{s:b}", "json_object", 1), ret)
                   : status_fail(ST_INVALID, "a \"schema\" goes with {\"type\": \"json_schema\", "
                                             "\"json_schema\": {\"schema\": ...}}");
    if (strcmp(type, "json_schema") == 0)
        return schema ? give(json_pack("{s:O}", "json_schema", schema), ret)
                      : status_fail(ST_INVALID, "the type json_schema needs \"json_schema\": "
                                                "{\"schema\": ...}");
    if (strcmp(type, "structural_tag") == 0)
        return json_object_get(format, "structures")
                   ? read_structures(format, ret)
                   : read_tag_format(json_object_get(format, "format"), NULL, ret);
    return status_fail(ST_UNSUPPORTED,
                       "the type \"%s\" is not supported; text, json_object, json_schema and "
                       "structural_tag are",
                       CUT(type, 40));
}
