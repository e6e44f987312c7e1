/* api_constraint.c: what a response is to be, as OpenAI (response_format) and vLLM
 * (structured_outputs, guided_*) have it, to a constraint. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/api_impl.h"

#include <string.h>

static enum status refuse(const char *field, const char *what)
{
    return status_fail(ST_UNSUPPORTED, "request: \"%s\": %s", field, what);
}

static bool asks(const json_t *value)
{
    return value && !json_is_null(value) && !json_is_false(value) &&
           !(json_is_object(value) && json_object_size(value) == 0);
}

// One more field that asks for a constraint.
static enum status add(struct api_request *r, const char *field, const char *kind,
                       const json_t *value)
{
    if (r->constraint)
        return status_fail(ST_INVALID,
                           "request: \"%s\": the response is constrained by another "
                           "field already; give one of them",
                           field);
    r->constraint = json_object();
    if (!r->constraint || json_object_set(r->constraint, kind, (json_t *)value) != 0)
        return status_fail(ST_NO_MEMORY, "out of memory");
    return ST_OK;
}

// A schema, also as a text that holds one.
static enum status add_schema(struct api_request *r, const char *field, const json_t *schema)
{
    json_t *parsed = NULL;
    enum status st = ST_OK;
    if (json_is_string(schema))
        st = json_parse(field, json_string_value(schema), json_string_length(schema), &parsed);
    if (st == ST_OK) st = add(r, field, "json_schema", parsed ? parsed : schema);
    json_decref(parsed);
    return st;
}

// {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema":
// ...}}
static enum status read_format(struct api_request *r)
{
    static const char field[] = "response_format";
    const json_t *format = r->given.response_format,
                 *inner = json_object_get(format, "json_schema");
    const char *type = json_string_value(json_object_get(format, "type"));
    if (!format || json_is_null(format)) return ST_OK;
    if (!type)
        return status_fail(ST_INVALID, "request: \"%s\" must be an object with a \"type\"", field);
    if (strcmp(type, "text") == 0) return ST_OK;
    if (strcmp(type, "json_object") == 0) return add(r, field, "json_object", json_true());
    if (strcmp(type, "json_schema") != 0)
        return status_fail(ST_UNSUPPORTED,
                           "request: \"%s\": the type \"%s\" is not supported; "
                           "text, json_object and json_schema are",
                           field, CUT(type, 40));
    const json_t *schema = json_object_get(inner, "schema");
    if (!schema)
        return status_fail(ST_INVALID,
                           "request: \"%s\" of the type json_schema needs "
                           "\"json_schema\": {\"schema\": ...}",
                           field);
    return add_schema(r, field, schema);
}

// vLLM's object of one of them.
static enum status read_structured(struct api_request *r)
{
    static const char field[] = "structured_outputs";
    const char *key;
    json_t *value;
    enum status st = ST_OK;
    if (!asks(r->given.structured)) return ST_OK;
    if (!json_is_object(r->given.structured))
        return status_fail(ST_INVALID, "request: \"%s\" must be an object", field);
    bool strict = false;
    json_object_foreach ((json_t *)r->given.structured, key, value) {
        if (!asks(value)) continue;
        if (strcmp(key, "json") == 0)
            st = add_schema(r, field, value);
        else if (strcmp(key, "regex") == 0 || strcmp(key, "choice") == 0)
            st = add(r, field, key, value);
        else if (strcmp(key, "json_object") == 0)
            st = add(r, field, key, json_true());
        else if (strcmp(key, "disable_any_whitespace") == 0)
            strict = true;
        else
            st = status_fail(ST_UNSUPPORTED,
                             "request: \"%s\": \"%s\" is not supported; json, "
                             "json_object, regex and choice are",
                             field, CUT(key, 40));
        if (st != ST_OK) return st;
    }
    if (strict && r->constraint) json_object_set(r->constraint, "strict_whitespace", json_true());
    return ST_OK;
}

enum status set_constraint(struct api_request *r, const struct api_model *model)
{
    const struct api_given *given = &r->given;
    json_t *regex = given->regex ? json_string(given->regex) : NULL;
    enum status st;
    CHECK(read_format(r));
    CHECK(read_structured(r));
    if (asks(given->json)) CHECK(add_schema(r, "guided_json", given->json));
    if (regex) CHECK(add(r, "guided_regex", "regex", regex));
    if (asks(given->choice)) CHECK(add(r, "guided_choice", "choice", given->choice));
    if (!r->constraint) goto out;
    if (!model->constraints)
        FAIL(ST_INVALID, "request: a constrained response needs text, and %s has no tokenizer.json",
             model->folder);
    if (r->sampling.ignore_eos)
        st = refuse("ignore_eos", "a constrained response ends where its constraint does");
    else
        st = status_context(
            constraints_get(model->constraints, r->constraint, &r->sampling.constraint), "request");
out:
    json_decref(regex);
    return st;
}
