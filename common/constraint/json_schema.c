/* json_schema.c: see json_schema.h.
 *
 * A schema is built once for each place where it stands, but for those that a $ref leads to, which
 * are rules. What may be built of several (allOf, a $ref or anyOf with siblings) is merged into one
 * schema first (merge()), where the keywords of both can stand in one; else it is refused. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/json_schema.h"
#include "common/base/bytes.h"
#include "common/constraint/pattern.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 128
#define MAX_COUNT 100000
#define MAX_WORK  50000 // schemas that are built or merged, those that $refs lead to each time

struct builder {
    const struct json_grammar *g;
    struct automaton *a; // the grammar's
    const json_t *root;
    json_t *rules; // of pointers: the rule's number
    int depth, work;
    enum status failed; // the first failure: nothing is built any more
};

// The node of what a schema takes; -1: no value meets it, or it failed.
static int build(struct builder *b, const json_t *schema, int next);

static int fail(struct builder *b, enum status st)
{
    if (b->failed == ST_OK) b->failed = st;
    return -1;
}

static enum status wrong(enum status code, const char *name, const char *what)
{
    return status_fail(code, "the JSON schema's \"%s\" %s", name, what);
}

static enum status count_work(struct builder *b)
{
    if (automaton_failed(b->a))
        return status_fail(ST_TOO_LONG, "the JSON schema takes more than %d nodes",
                           AUTOMATON_NODES);
    if (++b->work <= MAX_WORK) return ST_OK;
    return status_fail(ST_TOO_LONG,
                       "the JSON schema is more than %d schemas, each $ref and each "
                       "combination counted",
                       MAX_WORK);
}

// ---- keywords -----------------------------------------------------------------------------------

// Names, each between two blanks.
static const char supported[] =
    " type enum const anyOf oneOf allOf $ref properties required additionalProperties items "
    "prefixItems additionalItems minItems maxItems minLength maxLength pattern format minimum "
    "maximum exclusiveMinimum exclusiveMaximum ";
static const char refused[] =
    " not if then else $dynamicRef $recursiveRef patternProperties propertyNames minProperties "
    "maxProperties dependencies dependentRequired dependentSchemas unevaluatedProperties "
    "unevaluatedItems contains minContains maxContains uniqueItems multipleOf ";

static bool is_among(const char *name, const char *names)
{
    const size_t n = strlen(name);
    for (const char *at = names; n > 0 && (at = strstr(at, name)); at++)
        if (at[-1] == ' ' && at[n] == ' ' && !strchr(name, ' ')) return true;
    return false;
}

static bool is_annotation(const char *name)
{
    return !is_among(name, supported) && !is_among(name, refused);
}

static enum status check_keywords(const json_t *schema)
{
    const char *name;
    json_t *value;
    json_object_foreach ((json_t *)schema, name, value)
        if (is_among(name, refused) && !(strcmp(name, "uniqueItems") == 0 && json_is_false(value)))
            return wrong(ST_UNSUPPORTED, name, "is not supported");
    return ST_OK;
}

// Whether it says anything but what `apart` does.
static bool has_siblings(const json_t *schema, const char *apart)
{
    const char *name;
    json_t *value;
    json_object_foreach ((json_t *)schema, name, value)
        if (!is_annotation(name) && strcmp(name, apart) != 0) return true;
    return false;
}

enum type { T_OBJECT, T_ARRAY, T_STRING, T_INTEGER, T_NUMBER, T_BOOLEAN, T_NULL, TYPES };
#define NUMBERS (1u << T_INTEGER | 1u << T_NUMBER)
static const char *const type_names[TYPES] = {"object", "array",   "string", "integer",
                                              "number", "boolean", "null"};

// A bit of each type that a value may have; integers are numbers.
static enum status types_of(const json_t *schema, unsigned *ret)
{
    const json_t *type = json_object_get(schema, "type");
    const size_t n = json_is_array(type) ? json_array_size(type) : 1;
    *ret = type ? 0 : (1u << TYPES) - 1;
    for (size_t i = 0; type && i < n; i++) {
        const char *name = json_string_value(json_is_array(type) ? json_array_get(type, i) : type);
        int t = 0;
        while (t < TYPES && !(name && strcmp(name, type_names[t]) == 0)) t++;
        if (t == TYPES)
            return status_fail(ST_INVALID,
                               "the JSON schema's type \"%s\" is none of object, array, string, "
                               "integer, number, boolean and null",
                               name ? CUT(name, 40) : "");
        *ret |= t == T_NUMBER ? NUMBERS : 1u << t;
    }
    return ST_OK;
}

static unsigned types_of_value(const json_t *value)
{
    static const unsigned types[] = {[JSON_OBJECT] = 1u << T_OBJECT, [JSON_ARRAY] = 1u << T_ARRAY,
                                     [JSON_STRING] = 1u << T_STRING, [JSON_INTEGER] = NUMBERS,
                                     [JSON_REAL] = 1u << T_NUMBER,   [JSON_TRUE] = 1u << T_BOOLEAN,
                                     [JSON_FALSE] = 1u << T_BOOLEAN, [JSON_NULL] = 1u << T_NULL};
    const double x = json_real_value(value);
    return json_is_real(value) && floor(x) == x ? NUMBERS : types[json_typeof(value)];
}

// The values that it lists, as an array (new reference); NULL: it lists none.
static json_t *listed(const json_t *schema)
{
    json_t *values = json_object_get(schema, "enum"), *one = json_object_get(schema, "const");
    return values ? json_incref(values) : one ? json_pack("[O]", one) : NULL;
}

static bool requires(const json_t *schema, const char *name)
{
    size_t i;
    json_t *one;
    json_array_foreach (json_object_get(schema, "required"), i, one)
        if (json_is_string(one) && strcmp(json_string_value(one), name) == 0) return true;
    return false;
}

enum status json_count(const json_t *object, const char *name, int64_t fallback, int64_t *ret)
{
    const json_t *value = json_object_get(object, name);
    const double x = json_number_value(value);
    *ret = fallback;
    if (!value) return ST_OK;
    if (!json_is_number(value) || x < 0 || x != floor(x))
        return status_fail(ST_INVALID, "\"%s\" is no count", name);
    if (x > MAX_COUNT) return status_fail(ST_TOO_LONG, "\"%s\" is over %d", name, MAX_COUNT);
    *ret = (int64_t)x;
    return ST_OK;
}

static int64_t count_of(struct builder *b, const json_t *schema, const char *name, int64_t fallback)
{
    int64_t count = fallback;
    if (!b->failed) fail(b, json_count(schema, name, fallback, &count));
    return count;
}

// ---- references ---------------------------------------------------------------------------------

// The next step of a JSON pointer, with its escapes and those of a URL.
static const char *pointer_step(const char *at, char *ret, size_t size)
{
    size_t n = 0;
    for (; *at && *at != '/' && n + 1 < size; at++) {
        unsigned point;
        if (*at == '%' && sscanf(at + 1, "%2x", &point) == 1) {
            ret[n++] = (char)point;
            at += 2;
        } else if (*at == '~' && (at[1] == '0' || at[1] == '1')) {
            ret[n++] = *++at == '0' ? '~' : '/';
        } else {
            ret[n++] = *at;
        }
    }
    ret[n] = '\0';
    return at;
}

static enum status find(const struct builder *b, const char *ref, const json_t **ret)
{
    const json_t *at = b->root;
    char step[512];
    const char *rest = ref + 1;
    if (*ref != '#' || (*rest && *rest != '/'))
        return status_fail(ST_UNSUPPORTED,
                           "the JSON schema's $ref \"%s\": those within the schema are supported, "
                           "as #/$defs/NAME",
                           CUT(ref, 100));
    while (at && *rest == '/') {
        rest = pointer_step(rest + 1, step, sizeof step);
        at = json_is_array(at) ? json_array_get(at, strtoul(step, NULL, 10))
                               : json_object_get(at, step);
    }
    if (!at) return status_fail(ST_INVALID, "the JSON schema has no \"%s\"", CUT(ref, 100));
    *ret = at;
    return ST_OK;
}

// What a schema is once it is no $ref alone.
static enum status resolve(const struct builder *b, const json_t **schema)
{
    enum status st = ST_OK;
    for (int i = 0; st == ST_OK && json_object_get(*schema, "$ref"); i++) {
        const char *ref = json_string_value(json_object_get(*schema, "$ref"));
        if (!ref || i > MAX_DEPTH)
            return status_fail(ST_INVALID,
                               "a $ref of the JSON schema leads to itself, or is no text");
        st = find(b, ref, schema);
    }
    return st;
}

static int build_ref(struct builder *b, const char *ref, int next)
{
    const json_t *known = json_object_get(b->rules, ref), *target;
    if (known) return automaton_call(b->a, (int)json_integer_value(known), next);
    const int rule = automaton_rule(b->a);
    const enum status st = find(b, ref, &target);
    if (st != ST_OK) return fail(b, st);
    json_object_set_new(b->rules, ref, json_integer(rule));
    automaton_define(b->a, rule, build(b, target, AUTOMATON_END));
    return automaton_call(b->a, rule, next);
}

// ---- merging ------------------------------------------------------------------------------------

static enum status merge(struct builder *b, json_t *into, const json_t *other);

static enum status conflict(const char *name)
{
    return status_fail(ST_UNSUPPORTED,
                       "the JSON schema has two \"%s\" for one value, by allOf, or beside $ref or "
                       "anyOf; write what both say as one",
                       name);
}

static enum status merge_properties(struct builder *b, json_t *into, const json_t *other)
{
    const char *name;
    json_t *value;
    enum status st = ST_OK;
    json_object_foreach ((json_t *)other, name, value) {
        const json_t *here = json_object_get(into, name);
        if (!here || json_equal(here, value)) {
            json_object_set(into, name, value);
            continue;
        }
        json_t *both = json_object();
        st = merge(b, both, here);
        if (st == ST_OK) st = merge(b, both, value);
        json_object_set_new(into, name, both);
        if (st != ST_OK) break;
    }
    return st;
}

// Types that both have.
static enum status merge_types(json_t *into, const json_t *other)
{
    unsigned types, others;
    enum status st;
    json_t *names = json_array();
    CHECK(types_of(into, &types));
    CHECK(types_of(other, &others));
    types &= others;
    for (int t = 0; t < TYPES; t++)
        if (types & 1u << t && !(t == T_INTEGER && types & 1u << T_NUMBER))
            json_array_append_new(names, json_string(type_names[t]));
    json_object_set(into, "type", names);
out:
    json_decref(names);
    return st;
}

// additionalProperties: false of one forbids what only the other lists.
static enum status check_closed(const json_t *closed, const json_t *open)
{
    const json_t *more = json_object_get(closed, "additionalProperties");
    const char *name;
    json_t *value;
    if (!more || json_is_true(more)) return ST_OK;
    json_object_foreach (json_object_get(open, "properties"), name, value)
        if (!json_object_get(json_object_get(closed, "properties"), name))
            return conflict("additionalProperties");
    return ST_OK;
}

// What items a schema speaks of depends on its prefixItems: two that differ are not put together.
static enum status check_items(const json_t *into, const json_t *other)
{
    static const char *const names[] = {"items", "prefixItems", "additionalItems"};
    int n[2] = {0}, n_equal = 0;
    for (int i = 0; i < 3; i++) {
        const json_t *x = json_object_get(into, names[i]), *y = json_object_get(other, names[i]);
        n[0] += x != NULL;
        n[1] += y != NULL;
        n_equal += x == y || (x && y && json_equal(x, y));
    }
    return n[0] == 0 || n[1] == 0 || n_equal == 3 ? ST_OK : conflict("items");
}

// Puts what another schema of the same value says into one.
static enum status merge(struct builder *b, json_t *into, const json_t *other)
{
    const char *name;
    json_t *value;
    size_t i;
    enum status st = count_work(b);
    if (st != ST_OK || json_is_true(other)) return st;
    if (!json_is_object(other))
        return status_fail(ST_UNSUPPORTED, "the JSON schema takes no value in one of its branches");
    if (json_object_get(other, "$ref")) {
        const json_t *target = other;
        CHECK(resolve(b, &target));
        CHECK(merge(b, into, target));
    }
    json_array_foreach (json_object_get(other, "allOf"), i, value) CHECK(merge(b, into, value));
    CHECK(check_closed(into, other));
    CHECK(check_closed(other, into));
    CHECK(check_items(into, other));
    json_object_foreach ((json_t *)other, name, value) {
        json_t *here = json_object_get(into, name);
        if (is_annotation(name) || strcmp(name, "$ref") == 0 || strcmp(name, "allOf") == 0)
            continue;
        if (!here)
            json_object_set_new(into, name, json_deep_copy(value));
        else if (strcmp(name, "properties") == 0)
            CHECK(merge_properties(b, here, value));
        else if (strcmp(name, "required") == 0)
            json_array_extend(here, value);
        else if (strcmp(name, "type") == 0)
            CHECK(merge_types(into, other));
        else if (!json_equal(here, value))
            return conflict(name);
    }
out:
    return st;
}

// Two schemas of one value as one; other: NULL, of which the one is put together.
static int build_both(struct builder *b, const json_t *one, const json_t *other, int next)
{
    json_t *both = json_object();
    enum status st = merge(b, both, one);
    if (st == ST_OK && other) st = merge(b, both, other);
    const int made = st == ST_OK ? build(b, both, next) : fail(b, st);
    json_decref(both);
    return made;
}

// ---- branches -----------------------------------------------------------------------------------

static bool lists_differ(const json_t *a, const json_t *b)
{
    json_t *x = listed(a), *y = listed(b), *p, *q;
    bool differ = x && y;
    size_t i, k;
    json_array_foreach (x, i, p)
        json_array_foreach (y, k, q) differ &= !json_equal(p, q);
    json_decref(x);
    json_decref(y);
    return differ;
}

// Whether no value meets both: their types differ, what they list does, or what they list for a
// member that both require.
static bool exclude(const struct builder *b, const json_t *one, const json_t *other)
{
    unsigned t, u;
    const char *name;
    json_t *member;
    if (resolve(b, &one) != ST_OK || resolve(b, &other) != ST_OK) return false;
    if (!json_is_object(one) || !json_is_object(other))
        return json_is_false(one) || json_is_false(other);
    if (types_of(one, &t) != ST_OK || types_of(other, &u) != ST_OK) return false;
    if (!(t & u) || lists_differ(one, other)) return true;
    if (t != 1u << T_OBJECT || u != 1u << T_OBJECT) return false;
    json_object_foreach (json_object_get(one, "properties"), name, member) {
        const json_t *x = member, *y = json_object_get(json_object_get(other, "properties"), name);
        if (!y || !requires(one, name) || !requires(other, name)) continue;
        if (resolve(b, &x) == ST_OK && resolve(b, &y) == ST_OK && lists_differ(x, y)) return true;
    }
    return false;
}

// Of oneOf: whether no value meets two of them.
static enum status check_branches(const struct builder *b, const json_t *branches)
{
    for (size_t i = 0; i < json_array_size(branches); i++)
        for (size_t k = 0; k < i; k++)
            if (!exclude(b, json_array_get(branches, i), json_array_get(branches, k)))
                return status_fail(
                    ST_UNSUPPORTED,
                    "the JSON schema's \"oneOf\": a value may meet branches %zu and %zu both; "
                    "use anyOf, or a member that both require with a \"const\" of its own",
                    k + 1, i + 1);
    return ST_OK;
}

static int build_branches(struct builder *b, const json_t *schema, const char *which, int next)
{
    const json_t *branches = json_object_get(schema, which), *branch;
    json_t *base = has_siblings(schema, which) ? json_copy((json_t *)schema) : NULL;
    int made = -1;
    size_t i;
    if (base) json_object_del(base, which);
    if (json_array_size(branches) == 0)
        fail(b, wrong(ST_INVALID, which, "is no list of schemas"));
    else if (strcmp(which, "oneOf") == 0)
        fail(b, check_branches(b, branches));
    json_array_foreach (branches, i, branch) {
        if (json_is_false(branch) || b->failed) continue;
        made = automaton_either(b->a, made,
                                base ? build_both(b, base, branch, next) : build(b, branch, next));
    }
    json_decref(base);
    return made;
}

// ---- values that are listed ---------------------------------------------------------------------

static int build_listed(struct builder *b, const json_t *schema, const json_t *values, int next)
{
    const json_t *one = json_object_get(schema, "const");
    const char *name;
    json_t *value;
    unsigned types;
    int made = -1;
    size_t i;
    json_object_foreach ((json_t *)schema, name, value)
        if (!is_annotation(name) && !is_among(name, " enum const type "))
            return fail(
                b, wrong(ST_UNSUPPORTED, name, "beside \"enum\" or \"const\" is not supported"));
    const enum status st = types_of(schema, &types);
    if (st != ST_OK) return fail(b, st);
    json_array_foreach (values, i, value)
        if (types & types_of_value(value) && (!one || json_equal(one, value)))
            made = automaton_either(b->a, made, json_literal(b->g, value, next));
    return made;
}

// ---- strings and numbers ------------------------------------------------------------------------

static const struct {
    const char *name, *pattern;
} formats[] = {
#define YEAR "(\\d{3}[1-9]|\\d\\d[1-9]0|\\d[1-9]00|[1-9]000)" // but for 0, which few programs know
#define LEAP "(\\d\\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29"
#define DATE                                                                                       \
    "(" YEAR "-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0[1-"  \
    "9]|1\\d|2[0-8]))|" LEAP ")"
#define TIME                                                                                       \
    "(([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d+)?([Zz]|[+-]([01]\\d|2[0-3]):[0-5]\\d)|23:59:60("  \
    "\\.\\d+)?([Zz]|[+-]00:00))"
#define BYTE          "(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define LABEL         "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define H16           "[0-9A-Fa-f]{1,4}"
#define H(n)          "(" H16 ":){" #n "}"
#define UNTIL(n)      "((" H16 ":){0," #n "}" H16 ")?::"
#define LAST          "(" H16 ":" H16 "|" BYTE "(\\." BYTE "){3})"
#define URI_CHARACTER "([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE "[Tt]" TIME},
    {"uuid", "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"},
    {"email", "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@" LABEL
              "(\\." LABEL ")*"},
    {"ipv4", BYTE "(\\." BYTE "){3}"},
    {"ipv6", H(6) LAST "|::" H(5) LAST "|(" H16 ")?::" H(4) LAST "|" UNTIL(1) H(3) LAST "|" UNTIL(2)
                 H(2) LAST "|" UNTIL(3) H(1) LAST "|" UNTIL(4) LAST "|" UNTIL(5) H16 "|" UNTIL(6)},
    {"uri", "[A-Za-z][A-Za-z0-9+.-]*:" URI_CHARACTER "*(#" URI_CHARACTER "*)?"},
};
static const char known_formats[] =
    " duration hostname idn-email idn-hostname iri iri-reference uri-reference uri-template "
    "json-pointer relative-json-pointer regex ";

static int build_string(struct builder *b, const json_t *schema, int next)
{
    const json_t *pattern = json_object_get(schema, "pattern");
    const char *format = json_string_value(json_object_get(schema, "format")), *form = NULL;
    const int64_t min = count_of(b, schema, "minLength", 0),
                  max = count_of(b, schema, "maxLength", -1);
    int made = automaton_text(b->a, "\"", 1, next);
    for (size_t i = 0; format && i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].name, format) == 0) form = formats[i].pattern;
    if (b->failed) return -1;
    if (format && is_among(format, known_formats))
        return fail(b, status_fail(ST_UNSUPPORTED,
                                   "the JSON schema's format \"%s\" is not supported", format));
    if ((pattern != NULL) + (form != NULL) + (min > 0 || max >= 0) > 1)
        return fail(b,
                    status_fail(ST_UNSUPPORTED,
                                "the JSON schema has \"pattern\", \"format\" and a length for one "
                                "string, of which one is supported: put it into the pattern"));
    if (pattern && !json_is_string(pattern))
        return fail(b, wrong(ST_INVALID, "pattern", "is no text"));
    if (!pattern && !form) return max >= 0 && max < min ? -1 : json_string_of(b->g, min, max, next);
    fail(b, regex_build(b->a, pattern ? json_string_value(pattern) : form,
                        pattern ? REGEX_SOMEWHERE : REGEX_IN_STRING, made, &made));
    return automaton_text(b->a, "\"", 1, made);
}

// A bound as digits, and whether it is out; the narrower where both forms are given. `side`: -1, 1.
static enum status bound_of(const json_t *schema, const char *name, const char *exclusive, int side,
                            char ret[NUMBER_ROOM], const char **ret_text, bool *ret_out)
{
    const json_t *in = json_object_get(schema, name), *out = json_object_get(schema, exclusive);
    *ret_text = NULL;
    *ret_out = false;
    if (!in && !out) return ST_OK;
    if ((in && !json_is_number(in)) || (out && !json_is_number(out)))
        return wrong(ST_INVALID, out ? exclusive : name, "is no number");
    *ret_out = out && (!in || (json_number_value(out) - json_number_value(in)) * side <= 0);
    const json_t *value = *ret_out ? out : in;
    const double x = json_number_value(value) + 0.0; // no -0
    if (json_is_integer(value))
        snprintf(ret, NUMBER_ROOM, "%lld", (long long)json_integer_value(value));
    else if (fabs(x) >= 1e-12 || x == 0)
        for (int digits = 0; digits <= 30; digits++) {
            snprintf(ret, NUMBER_ROOM, "%.*f", digits, x);
            if (strtod(ret, NULL) == x) break;
        }
    else
        return wrong(ST_UNSUPPORTED, name, "is closer to 0 than 1e-12");
    *ret_text = ret;
    return ST_OK;
}

static int build_number(struct builder *b, const json_t *schema, bool whole, int next)
{
    char low[NUMBER_ROOM], high[NUMBER_ROOM];
    struct number_range r = {.whole = whole};
    enum status st = bound_of(schema, "minimum", "exclusiveMinimum", -1, low, &r.low, &r.above);
    if (st == ST_OK)
        st = bound_of(schema, "maximum", "exclusiveMaximum", 1, high, &r.high, &r.below);
    if (st != ST_OK) return fail(b, st);
    return r.low || r.high ? json_number_between(b->g, &r, next)
                           : json_rule(b->g, whole ? RULE_INTEGER : RULE_NUMBER, next);
}

// ---- arrays and objects -------------------------------------------------------------------------

static const struct chain { // of items or members, from the last one on
    int first, rest;        // what may follow none, and some, which a comma comes before
} nothing = {-1, -1};

// Nothing more, and the bracket: white space may come before it, of which an empty value has had
// what there is.
static struct chain end_of(struct builder *b, const char *bracket, int next)
{
    const int end = automaton_text(b->a, bracket, 1, next);
    return (struct chain){end, json_rule(b->g, RULE_BLANK, end)};
}

// From min to max calls of a rule (-1: none), and the end.
static struct chain chain_of(struct builder *b, int rule, int64_t min, int64_t max,
                             struct chain end)
{
    if (rule < 0 || max == 0) return min > 0 ? nothing : end;
    const int one = automaton_call(b->a, rule, AUTOMATON_END),
              further = automaton_rule_of(b->a, json_rule(b->g, RULE_COMMA, one), AUTOMATON_SLICES),
              rest = automaton_repeat(b->a, further, min > 0 ? min - 1 : 0, max < 0 ? max : max - 1,
                                      end.rest),
              first = automaton_call(b->a, rule, rest);
    return (struct chain){min > 0 ? first : automaton_either(b->a, first, end.first),
                          automaton_repeat(b->a, further, min, max, end.rest)};
}

// One more before it, which was built to go on with chain->rest, or what may be in its stead.
static void put_before(struct builder *b, struct chain *chain, int one, struct chain without)
{
    chain->first = automaton_either(b->a, one, without.first);
    chain->rest = automaton_either(b->a, json_rule(b->g, RULE_COMMA, one), without.rest);
}

static int build_array(struct builder *b, const json_t *schema, int next)
{
    const json_t *items = json_object_get(schema, "items"),
                 *prefix = json_object_get(schema, "prefixItems");
    if (json_is_array(items)) { // draft 7's
        prefix = items;
        items = json_object_get(schema, "additionalItems");
    }
    const int64_t min = count_of(b, schema, "minItems", 0),
                  max = count_of(b, schema, "maxItems", -1);
    int64_t n = (int64_t)json_array_size(prefix);
    if (max >= 0 && max < min) return -1;
    if (max >= 0 && max < n) n = max;
    const struct chain end = end_of(b, "]", next);
    const int item = build(b, items ? items : json_true(), AUTOMATON_END);
    struct chain chain = chain_of(b, automaton_rule_of(b->a, item, AUTOMATON_SLICES),
                                  min > n ? min - n : 0, max < 0 ? max : max - n, end);
    while (n-- > 0)
        put_before(b, &chain, build(b, json_array_get(prefix, (size_t)n), chain.rest),
                   n < min ? nothing : end);
    return automaton_text(b->a, "[", 1, json_rule(b->g, RULE_BLANK, chain.first));
}

// A required member that is not listed stands behind those that are, as if it were listed.
static json_t *members_of(const json_t *schema, const json_t *more)
{
    json_t *members = json_copy(json_object_get(schema, "properties")), *one;
    size_t i;
    if (!members) members = json_object();
    json_array_foreach (json_object_get(schema, "required"), i, one)
        if (!json_object_get(members, json_string_value(one)))
            json_object_set(members, json_string_value(one), (json_t *)more);
    return members;
}

static bool is_object(const json_t *schema)
{
    const json_t *properties = json_object_get(schema, "properties"),
                 *required = json_object_get(schema, "required");
    bool good =
        (!properties || json_is_object(properties)) && (!required || json_is_array(required));
    for (size_t i = 0; i < json_array_size(required); i++)
        good &= json_is_string(json_array_get(required, i));
    return good;
}

static int build_object(struct builder *b, const json_t *schema, int next)
{
    const json_t *given = json_object_get(schema, "additionalProperties"),
                 *more = given ? given : json_true();
    if (!is_object(schema))
        return fail(b, status_fail(ST_INVALID, "the JSON schema's \"properties\" or "
                                               "\"required\" is malformed"));
    json_t *members = members_of(schema, more), *value;
    const char **names = malloc((json_object_size(members) + 1) * sizeof *names), *name;
    int n = 0;
    json_object_foreach (members, name, value)
        if (names) names[n++] = name;
    // of members that are not listed
    const int value_of = json_rule(b->g, RULE_COLON, build(b, more, AUTOMATON_END)),
              other = json_other_string(b->g, names, n, value_of),
              rule = automaton_rule_of(b->a, other, AUTOMATON_SLICES);
    struct chain chain = chain_of(b, rule, 0, -1, end_of(b, "}", next));
    while (n-- > 0) {
        const int its =
            chain.rest < 0 ? -1 : build(b, json_object_get(members, names[n]), chain.rest);
        put_before(
            b, &chain,
            json_string_literal(b->g, names[n], strlen(names[n]), json_rule(b->g, RULE_COLON, its)),
            requires(schema, names[n]) ? nothing : chain);
    }
    if (!names) fail(b, status_fail(ST_NO_MEMORY, "no memory for a constraint"));
    free(names);
    json_decref(members);
    return automaton_text(b->a, "{", 1, json_rule(b->g, RULE_BLANK, chain.first));
}

// ---- a schema -----------------------------------------------------------------------------------

static int build_type(struct builder *b, const json_t *schema, enum type type, int next)
{
    switch (type) {
    case T_OBJECT:
        return build_object(b, schema, next);
    case T_ARRAY:
        return build_array(b, schema, next);
    case T_STRING:
        return build_string(b, schema, next);
    case T_INTEGER:
    case T_NUMBER:
        return build_number(b, schema, type == T_INTEGER, next);
    case T_BOOLEAN:
        return automaton_either(b->a, automaton_text(b->a, "true", 4, next),
                                automaton_text(b->a, "false", 5, next));
    default:
        return automaton_text(b->a, "null", 4, next);
    }
}

static int build_types(struct builder *b, const json_t *schema, int next)
{
    unsigned types;
    int made = -1;
    const enum status st = types_of(schema, &types);
    if (st != ST_OK) return fail(b, st);
    for (int t = 0; t < TYPES && !b->failed; t++)
        if (types & 1u << t && !(t == T_INTEGER && types & 1u << T_NUMBER))
            made = automaton_either(b->a, made, build_type(b, schema, (enum type)t, next));
    return made;
}

static int build_one(struct builder *b, const json_t *schema, int next)
{
    const char *ref = json_string_value(json_object_get(schema, "$ref"));
    const enum status st = check_keywords(schema);
    if (st != ST_OK) return fail(b, st);
    if (ref && !has_siblings(schema, "$ref")) return build_ref(b, ref, next);
    if (ref || json_object_get(schema, "allOf")) return build_both(b, schema, NULL, next);
    if (json_object_get(schema, "anyOf")) return build_branches(b, schema, "anyOf", next);
    if (json_object_get(schema, "oneOf")) return build_branches(b, schema, "oneOf", next);
    if (!has_siblings(schema, "")) return json_rule(b->g, RULE_VALUE, next);
    json_t *values = listed(schema);
    const int made = values ? build_listed(b, schema, values, next) : build_types(b, schema, next);
    json_decref(values);
    return made;
}

static int build(struct builder *b, const json_t *schema, int next)
{
    if (b->failed || json_is_false(schema)) return -1;
    const enum status st = count_work(b);
    if (st != ST_OK) return fail(b, st);
    if (json_is_true(schema)) return json_rule(b->g, RULE_VALUE, next);
    if (!json_is_object(schema))
        return fail(b, status_fail(ST_INVALID,
                                   "the JSON schema has neither an object nor true or false where "
                                   "a schema belongs"));
    if (b->depth == MAX_DEPTH)
        return fail(
            b, status_fail(ST_TOO_LONG, "the JSON schema is more than %d schemas deep", MAX_DEPTH));
    b->depth++;
    const int made = build_one(b, schema, next);
    b->depth--;
    return made;
}

enum status json_schema_build(const struct json_grammar *g, const json_t *schema, int next,
                              int *ret)
{
    struct builder b = {.g = g, .a = g->a, .root = schema, .rules = json_object()};
    if (!b.rules) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    const int made = build(&b, schema, next);
    json_decref(b.rules);
    if (b.failed) return b.failed;
    if (automaton_failed(g->a))
        return status_fail(ST_TOO_LONG, "the JSON schema takes more than %d nodes",
                           AUTOMATON_NODES);
    if (made < 0) return status_fail(ST_INVALID, "no value meets the JSON schema");
    *ret = made;
    return ST_OK;
}
