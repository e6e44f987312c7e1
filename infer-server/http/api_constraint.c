/* api_constraint.c: what a response is to be, as OpenAI (response_format), vLLM
 * (structured_outputs, guided_*) and SGLang (json_schema, regex, ebnf, structural_tag) have it, to
 * a constraint. Any thread. */
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
           !(json_is_object(value) && json_object_size(value) == 0) &&
           !(json_is_string(value) && json_string_length(value) == 0);
}

// What a field asks for, which is taken over; NULL: nothing.
static enum status take(struct api_request *r, const char *field, json_t *spec)
{
    if (spec && r->constraint) {
        json_decref(spec);
        return status_fail(ST_INVALID,
                           "request: \"%s\": the response is constrained by another "
                           "field already; give one of them",
                           field);
    }
    if (spec) {
        r->constraint = spec;
        r->given.constrained_by = field;
    }
    return ST_OK;
}

static enum status parse_text(const char *field, const json_t *value, json_t **ret)
{
    char name[64];
    snprintf(name, sizeof name, "request: \"%s\"", field);
    return json_parse(name, json_string_value(value), json_string_length(value), ret);
}

// One more field that asks for a constraint. A schema and a structural tag may be texts of JSON.
static enum status add(struct api_request *r, const char *field, const char *kind,
                       const json_t *value)
{
    const bool tag = strcmp(kind, "structural_tag") == 0;
    json_t *given = NULL, *spec;
    enum status st = ST_OK;
    if (!asks(value)) return ST_OK;
    if (json_is_string(value) && (tag || strcmp(kind, "json_schema") == 0))
        CHECK(parse_text(field, value, &given));
    else
        given = json_incref((json_t *)value);
    if (tag)
        CHECK(status_context(constraint_of_format(given, &spec), "request: \"%s\"", field));
    else if (!(spec = json_pack("{s:O}", kind, given)))
        FAIL(ST_NO_MEMORY, "out of memory");
    st = take(r, field, spec);
out:
    json_decref(given);
    return st;
}

static enum status read_format(struct api_request *r)
{
    const char *field = r->given.format_field ? r->given.format_field : "response_format";
    json_t *spec;
    const enum status st = status_context(constraint_of_format(r->given.response_format, &spec),
                                          "request: \"%s\"", field);
    return st == ST_OK ? take(r, field, spec) : st;
}

// vLLM's object of one of them.
static enum status read_structured(struct api_request *r)
{
    static const char field[] = "structured_outputs";
    static const struct {
        const char *name, *kind;
    } kinds[] = {{"json", "json_schema"}, {"json_object", "json_object"},
                 {"regex", "regex"},      {"choice", "choice"},
                 {"grammar", "grammar"},  {"structural_tag", "structural_tag"}};
    const json_t *given = r->given.structured;
    const char *key;
    json_t *value;
    if (!asks(given)) return ST_OK;
    if (!json_is_object(given))
        return status_fail(ST_INVALID, "request: \"%s\" must be an object", field);
    json_object_foreach ((json_t *)given, key, value) {
        size_t i = 0;
        while (i < sizeof kinds / sizeof *kinds && strcmp(kinds[i].name, key) != 0) i++;
        if (strcmp(key, "disable_any_whitespace") == 0)
            r->given.strict_whitespace |= asks(value);
        else if (asks(value) && i == sizeof kinds / sizeof *kinds)
            return status_fail(ST_UNSUPPORTED,
                               "request: \"%s\": \"%s\" is not supported; json, "
                               "json_object, regex, choice, grammar and structural_tag are",
                               field, CUT(key, 40));
        else if (asks(value)) {
            const enum status st = add(r, field, kinds[i].kind, value);
            if (st != ST_OK) return st;
        }
    }
    return ST_OK;
}

// Before what is wrong with a constraint stands who asked for it.
static enum status name_fields(const struct api_request *r, enum status st)
{
    const char *field = r->given.constrained_by;
    if (field && r->calls) return status_context(st, "request: \"tools\" or \"%s\"", field);
    return status_context(st, "request: \"%s\"", field ? field : "tools");
}

enum status set_constraint(struct api_request *r, const struct api_model *model)
{
    const struct api_given *given = &r->given;
    const struct {
        const char *field, *kind;
        const json_t *value;
    } fields[] = {{"guided_json", "json_schema", given->guided_json},
                  {"guided_regex", "regex", given->guided_regex},
                  {"guided_choice", "choice", given->guided_choice},
                  {"guided_grammar", "grammar", given->guided_grammar},
                  {"json_schema", "json_schema", given->json_schema},
                  {"regex", "regex", given->regex},
                  {"ebnf", "grammar", given->ebnf},
                  {"structural_tag", "structural_tag", given->structural_tag}};
    enum status st;
    CHECK(read_format(r));
    CHECK(read_structured(r));
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        CHECK(add(r, fields[i].field, fields[i].kind, fields[i].value));
    if (!r->constraint) goto out;
    if (r->calls) { // may come instead
        json_t *either = json_pack("{s:[O, o]}", "either", r->calls, r->constraint);
        r->constraint = either;
        if (!either) FAIL(ST_NO_MEMORY, "out of memory");
    }
    if (given->strict_whitespace)
        json_object_set_new(r->constraint, "strict_whitespace", json_true());
    if (!model->constraints)
        FAIL(ST_INVALID, "request: a constrained response needs text, and %s has no tokenizer.json",
             model->folder);
    if (r->sampling.ignore_eos)
        st = refuse("ignore_eos", "a constrained response ends where its constraint does");
    else
        st = name_fields(
            r, constraints_get(model->constraints, r->constraint, &r->sampling.constraint));
out:
    return st;
}
