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
#define MAX_ITEMS 100000
#define MAX_WORK  50000 // schemas that are built or merged, those that $refs lead to each time

enum type { T_OBJECT, T_ARRAY, T_STRING, T_INTEGER, T_NUMBER, T_BOOLEAN, T_NULL, TYPES };
#define ALL_TYPES ((1u << TYPES) - 1)

struct builder {
    const struct json_grammar *g;
    const json_t *root;
    json_t *rules; // of pointers: the rule's number
    int depth, work;
};

static enum status build(struct builder *b, const json_t *schema, int next, int *ret);

static enum status count_work(struct builder *b)
{
    if (automaton_failed(b->g->a))
        return status_fail(ST_TOO_LONG, "the JSON schema takes more than %d nodes",
                           AUTOMATON_NODES);
    if (++b->work <= MAX_WORK) return ST_OK;
    return status_fail(ST_TOO_LONG,
                       "the JSON schema is more than %d schemas, each $ref and each "
                       "combination counted",
                       MAX_WORK);
}

// ---- keywords -----------------------------------------------------------------------------------

static const struct keyword {
    const char *name;
    unsigned types; // that it says something of
    bool supported;
} keywords[] = {
    {"type", ALL_TYPES, true},
    {"enum", ALL_TYPES, true},
    {"const", ALL_TYPES, true},
    {"anyOf", ALL_TYPES, true},
    {"oneOf", ALL_TYPES, true},
    {"allOf", ALL_TYPES, true},
    {"$ref", ALL_TYPES, true},
    {"properties", 1u << T_OBJECT, true},
    {"required", 1u << T_OBJECT, true},
    {"additionalProperties", 1u << T_OBJECT, true},
    {"items", 1u << T_ARRAY, true},
    {"prefixItems", 1u << T_ARRAY, true},
    {"additionalItems", 1u << T_ARRAY, true},
    {"minItems", 1u << T_ARRAY, true},
    {"maxItems", 1u << T_ARRAY, true},
    {"minLength", 1u << T_STRING, true},
    {"maxLength", 1u << T_STRING, true},
    {"pattern", 1u << T_STRING, true},
    {"format", 1u << T_STRING, true},
    {"minimum", 1u << T_INTEGER | 1u << T_NUMBER, true},
    {"maximum", 1u << T_INTEGER | 1u << T_NUMBER, true},
    {"exclusiveMinimum", 1u << T_INTEGER | 1u << T_NUMBER, true},
    {"exclusiveMaximum", 1u << T_INTEGER | 1u << T_NUMBER, true},
    {"not", ALL_TYPES, false},
    {"if", ALL_TYPES, false},
    {"then", ALL_TYPES, false},
    {"else", ALL_TYPES, false},
    {"$dynamicRef", ALL_TYPES, false},
    {"$recursiveRef", ALL_TYPES, false},
    {"patternProperties", 1u << T_OBJECT, false},
    {"propertyNames", 1u << T_OBJECT, false},
    {"minProperties", 1u << T_OBJECT, false},
    {"maxProperties", 1u << T_OBJECT, false},
    {"dependencies", 1u << T_OBJECT, false},
    {"dependentRequired", 1u << T_OBJECT, false},
    {"dependentSchemas", 1u << T_OBJECT, false},
    {"unevaluatedProperties", 1u << T_OBJECT, false},
    {"unevaluatedItems", 1u << T_ARRAY, false},
    {"contains", 1u << T_ARRAY, false},
    {"minContains", 1u << T_ARRAY, false},
    {"maxContains", 1u << T_ARRAY, false},
    {"uniqueItems", 1u << T_ARRAY, false},
    {"multipleOf", 1u << T_INTEGER | 1u << T_NUMBER, false},
};
enum { KEYWORDS = sizeof keywords / sizeof *keywords };

static const struct keyword *keyword_of(const char *name)
{
    for (int i = 0; i < KEYWORDS; i++)
        if (strcmp(keywords[i].name, name) == 0) return &keywords[i];
    return NULL;
}

static enum status check_keywords(const json_t *schema)
{
    const char *name;
    json_t *value;
    json_object_foreach ((json_t *)schema, name, value) {
        const struct keyword *k = keyword_of(name);
        if (!k || k->supported) continue;
        if (strcmp(name, "uniqueItems") == 0 && json_is_false(value)) continue;
        return status_fail(ST_UNSUPPORTED, "the JSON schema's \"%s\" is not supported", name);
    }
    return ST_OK;
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

static enum status build_ref(struct builder *b, const char *ref, int next, int *ret)
{
    json_t *known = json_object_get(b->rules, ref);
    int rule = known ? (int)json_integer_value(known) : automaton_rule(b->g->a), start;
    const json_t *target;
    enum status st = ST_OK;
    if (!known) {
        json_object_set_new(b->rules, ref, json_integer(rule));
        CHECK(find(b, ref, &target));
        CHECK(build(b, target, AUTOMATON_END, &start));
        automaton_define(b->g->a, rule, start);
    }
    *ret = automaton_call(b->g->a, rule, next);
out:
    return st;
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
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

// Types that both have; an integer is a number.
static json_t *merge_types(const json_t *a, const json_t *b)
{
    json_t *made = json_array();
    size_t i, k;
    json_t *x, *y, *as = json_is_array(a) ? json_incref((json_t *)a) : json_pack("[O]", a),
                   *bs = json_is_array(b) ? json_incref((json_t *)b) : json_pack("[O]", b);
    json_array_foreach (as, i, x)
        json_array_foreach (bs, k, y) {
            const char *s = json_string_value(x), *t = json_string_value(y);
            if (!s || !t) continue;
            if (strcmp(s, t) == 0 || (strcmp(s, "integer") == 0 && strcmp(t, "number") == 0))
                json_array_append(made, x);
            else if (strcmp(s, "number") == 0 && strcmp(t, "integer") == 0)
                json_array_append(made, y);
        }
    json_decref(as);
    json_decref(bs);
    return made;
}

static bool is_annotation(const char *name)
{
    return !keyword_of(name);
}

// What items a schema speaks of depends on its prefixItems: two that differ are not put together.
static bool is_of_items(const char *name)
{
    return strcmp(name, "items") == 0 || strcmp(name, "prefixItems") == 0 ||
           strcmp(name, "additionalItems") == 0;
}

static enum status merged_items(const json_t *into, const json_t *other)
{
    static const char *const names[] = {"items", "prefixItems", "additionalItems"};
    for (int i = 0; i < 3; i++) {
        const json_t *a = json_object_get(into, names[i]), *b = json_object_get(other, names[i]);
        if (a != b && (!a || !b || !json_equal(a, b))) return conflict("items");
    }
    return ST_OK;
}

// Puts what another schema of the same value says into one. Objects' members: those that only one
// has follow its additionalProperties alone, where the other's are not given or true.
static enum status merge(struct builder *b, json_t *into, const json_t *other)
{
    const char *name;
    json_t *value;
    enum status st = count_work(b);
    if (st != ST_OK) return st;
    if (json_is_true(other)) return ST_OK;
    if (!json_is_object(other))
        return status_fail(ST_UNSUPPORTED, "the JSON schema takes no value in one of its branches");
    json_object_foreach ((json_t *)other, name, value) {
        json_t *here = json_object_get(into, name);
        if (is_annotation(name)) continue;
        if (is_of_items(name) &&
            (json_object_get(into, "items") || json_object_get(into, "prefixItems"))) {
            st = merged_items(into, other);
            if (st != ST_OK) goto out;
            continue;
        }
        if (strcmp(name, "$ref") == 0) {
            const json_t *target = other;
            CHECK(resolve(b, &target));
            CHECK(merge(b, into, target));
        } else if (strcmp(name, "allOf") == 0) {
            for (size_t i = 0; i < json_array_size(value); i++)
                CHECK(merge(b, into, json_array_get(value, i)));
        } else if (!here) {
            json_object_set_new(into, name, json_deep_copy(value));
        } else if (strcmp(name, "properties") == 0) {
            CHECK(merge_properties(b, here, value));
        } else if (strcmp(name, "required") == 0) {
            json_array_extend(here, value);
        } else if (strcmp(name, "type") == 0) {
            json_object_set_new(into, name, merge_types(here, value));
        } else if (!json_equal(here, value)) {
            st = conflict(name);
            goto out;
        }
    }
out:
    return st;
}

// additionalProperties: false of one part forbids what only another part lists.
static enum status check_closed(const struct builder *b, const json_t *parts)
{
    size_t i, k;
    json_t *part, *other;
    json_array_foreach (parts, i, part) {
        const json_t *closed = part, *open;
        enum status st = resolve(b, &closed);
        if (st != ST_OK) return st;
        const json_t *more = json_object_get(closed, "additionalProperties");
        if (!more || json_is_true(more)) continue;
        json_array_foreach (parts, k, other) {
            const char *name;
            json_t *value;
            open = other;
            if (i == k) continue;
            st = resolve(b, &open);
            if (st != ST_OK) return st;
            json_object_foreach (json_object_get(open, "properties"), name, value)
                if (!json_object_get(json_object_get(closed, "properties"), name))
                    return conflict("additionalProperties");
        }
    }
    return ST_OK;
}

// The schema without `apart`, and a branch of that, as one.
static enum status merge_branch(struct builder *b, const json_t *schema, const char *apart,
                                const json_t *branch, json_t **ret)
{
    json_t *base = json_copy((json_t *)schema), *both = json_object(), *parts = NULL;
    enum status st;
    json_object_del(base, apart);
    parts = json_pack("[O, O]", base, branch);
    CHECK(check_closed(b, parts));
    CHECK(merge(b, both, base));
    CHECK(merge(b, both, branch));
    *ret = both;
    both = NULL;
out:
    json_decref(parts);
    json_decref(base);
    json_decref(both);
    return st;
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

// ---- branches -----------------------------------------------------------------------------------

static const char *const type_names[TYPES] = {"object", "array",   "string", "integer",
                                              "number", "boolean", "null"};

static enum status types_of(const json_t *schema, unsigned *ret)
{
    const json_t *type = json_object_get(schema, "type");
    const size_t n = json_is_array(type) ? json_array_size(type) : 1;
    *ret = type ? 0 : ALL_TYPES;
    for (size_t i = 0; type && i < n; i++) {
        const char *name = json_string_value(json_is_array(type) ? json_array_get(type, i) : type);
        int t = 0;
        while (t < TYPES && !(name && strcmp(name, type_names[t]) == 0)) t++;
        if (t == TYPES)
            return status_fail(ST_INVALID, "the JSON schema's type \"%s\" is none",
                               name ? CUT(name, 40) : "");
        *ret |= 1u << t;
    }
    if (*ret & 1u << T_NUMBER) *ret &= ~(1u << T_INTEGER); // which are among those
    return ST_OK;
}

static unsigned type_of_value(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return 1u << T_OBJECT;
    case JSON_ARRAY:
        return 1u << T_ARRAY;
    case JSON_STRING:
        return 1u << T_STRING;
    case JSON_INTEGER:
    case JSON_REAL:
        return 1u << T_NUMBER;
    case JSON_NULL:
        return 1u << T_NULL;
    default:
        return 1u << T_BOOLEAN;
    }
}

// The values that it lists, as an array (new reference); NULL: it lists none.
static json_t *listed(const json_t *schema)
{
    json_t *values = json_object_get(schema, "enum"), *one = json_object_get(schema, "const");
    return values ? json_incref(values) : one ? json_pack("[O]", one) : NULL;
}

static bool lists_differ(const json_t *a, const json_t *b)
{
    json_t *x = listed(a), *y = listed(b), *p, *q;
    bool differ = x && y;
    size_t i, k;
    if (differ)
        json_array_foreach (x, i, p)
            json_array_foreach (y, k, q) differ &= !json_equal(p, q);
    json_decref(x);
    json_decref(y);
    return differ;
}

static bool requires(const json_t *schema, const char *name)
{
    const json_t *required = json_object_get(schema, "required");
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *one = json_string_value(json_array_get(required, i));
        if (one && strcmp(one, name) == 0) return true;
    }
    return false;
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
    if (t & 1u << T_INTEGER) t |= 1u << T_NUMBER;
    if (u & 1u << T_INTEGER) u |= 1u << T_NUMBER;
    if (!(t & u) || lists_differ(one, other)) return true;
    if (t != 1u << T_OBJECT || u != 1u << T_OBJECT) return false;
    json_object_foreach (json_object_get(one, "properties"), name, member) {
        const json_t *x = member, *y = json_object_get(json_object_get(other, "properties"), name);
        if (!y || !requires(one, name) || !requires(other, name)) continue;
        if (resolve(b, &x) == ST_OK && resolve(b, &y) == ST_OK && lists_differ(x, y)) return true;
    }
    return false;
}

static enum status build_branches(struct builder *b, const json_t *schema, const char *which,
                                  int next, int *ret)
{
    const json_t *branches = json_object_get(schema, which);
    const size_t n = json_array_size(branches);
    const bool siblings = has_siblings(schema, which);
    enum status st = ST_OK;
    *ret = -1;
    if (n == 0)
        return status_fail(ST_INVALID, "the JSON schema's \"%s\" is no list of schemas", which);
    for (size_t i = 0; *which == 'o' && i < n; i++)
        for (size_t k = 0; k < i; k++)
            if (!exclude(b, json_array_get(branches, i), json_array_get(branches, k)))
                return status_fail(ST_UNSUPPORTED,
                                   "the JSON schema's \"oneOf\": a value may meet branches %zu and "
                                   "%zu both; use anyOf, or a member that both require with a "
                                   "\"const\" of its own",
                                   k + 1, i + 1);
    for (size_t i = 0; i < n && st == ST_OK; i++) {
        const json_t *branch = json_array_get(branches, i);
        json_t *merged = NULL;
        int one = -1;
        if (json_is_false(branch)) continue;
        if (siblings) st = merge_branch(b, schema, which, branch, &merged);
        if (st == ST_OK) st = build(b, siblings ? merged : branch, next, &one);
        json_decref(merged);
        *ret = automaton_either(b->g->a, *ret, one);
    }
    return st;
}

// allOf, and a $ref with siblings: one schema of all.
static enum status build_merged(struct builder *b, const json_t *schema, int next, int *ret)
{
    json_t *both = json_object(), *parts = json_copy(json_object_get(schema, "allOf"));
    enum status st = ST_OK;
    if (parts) {
        json_array_append(parts, (json_t *)schema);
        st = check_closed(b, parts);
    }
    if (st == ST_OK) st = merge(b, both, schema);
    if (st == ST_OK) st = build(b, both, next, ret);
    json_decref(parts);
    json_decref(both);
    return st;
}

// ---- values that are listed ---------------------------------------------------------------------

static enum status meets(const json_t *schema, const json_t *value, bool *ret)
{
    unsigned types;
    const enum status st = types_of(schema, &types);
    const unsigned type = type_of_value(value);
    const bool whole =
        json_is_integer(value) ||
        (json_is_real(value) && floor(json_real_value(value)) == json_real_value(value));
    *ret = st == ST_OK && ((types & type) || (whole && types & 1u << T_INTEGER));
    return st;
}

static enum status build_listed(struct builder *b, const json_t *schema, json_t *values, int next,
                                int *ret)
{
    const json_t *one = json_object_get(schema, "const");
    const char *name;
    json_t *value;
    enum status st = ST_OK;
    bool is_met;
    size_t i;
    *ret = -1;
    json_object_foreach ((json_t *)schema, name, value) {
        const bool said =
            strcmp(name, "enum") == 0 || strcmp(name, "const") == 0 || strcmp(name, "type") == 0;
        if (!said && !is_annotation(name))
            return status_fail(ST_UNSUPPORTED,
                               "the JSON schema's \"%s\" beside \"enum\" or "
                               "\"const\" is not supported",
                               name);
    }
    json_array_foreach (values, i, value) {
        CHECK(meets(schema, value, &is_met));
        if (!is_met || (one && !json_equal(one, value))) continue;
        *ret = automaton_either(b->g->a, *ret, json_literal(b->g, value, next));
    }
out:
    return st;
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
static const char *const known_formats[] = {
    "duration",      "hostname",      "idn-email",    "idn-hostname", "iri",
    "iri-reference", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
    "regex"};

static enum status count_of(const json_t *schema, const char *name, int64_t fallback, int64_t *ret)
{
    const json_t *value = json_object_get(schema, name);
    const double x = json_number_value(value);
    *ret = fallback;
    if (!value) return ST_OK;
    if (!json_is_number(value) || x < 0 || x != floor(x))
        return status_fail(ST_INVALID, "the JSON schema's \"%s\" is no count", name);
    if (x > MAX_ITEMS)
        return status_fail(ST_TOO_LONG, "the JSON schema's \"%s\" is over %d", name, MAX_ITEMS);
    *ret = (int64_t)x;
    return ST_OK;
}

static enum status build_pattern(struct builder *b, const char *pattern, enum regex_form form,
                                 int next, int *ret)
{
    const int end = automaton_text(b->g->a, "\"", 1, next);
    const enum status st = regex_build(b->g->a, pattern, form, end, ret);
    if (st == ST_OK) *ret = automaton_text(b->g->a, "\"", 1, *ret);
    return st;
}

static enum status build_string(struct builder *b, const json_t *schema, int next, int *ret)
{
    const json_t *pattern = json_object_get(schema, "pattern");
    const char *format = json_string_value(json_object_get(schema, "format"));
    const char *form = NULL;
    int64_t min, max;
    enum status st;
    CHECK(count_of(schema, "minLength", 0, &min));
    CHECK(count_of(schema, "maxLength", -1, &max));
    for (size_t i = 0; format && i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].name, format) == 0) form = formats[i].pattern;
    for (size_t i = 0; format && i < sizeof known_formats / sizeof *known_formats; i++)
        if (strcmp(known_formats[i], format) == 0)
            FAIL(ST_UNSUPPORTED, "the JSON schema's format \"%s\" is not supported", format);
    if ((pattern != NULL) + (form != NULL) + (min > 0 || max >= 0) > 1)
        FAIL(ST_UNSUPPORTED, "the JSON schema has \"pattern\", \"format\" and a length for one "
                             "string, of which one is supported: put it into the pattern");
    if (pattern && !json_is_string(pattern))
        FAIL(ST_INVALID, "the JSON schema's \"pattern\" is no text");
    if (pattern)
        st = build_pattern(b, json_string_value(pattern), REGEX_SOMEWHERE, next, ret);
    else if (form)
        st = build_pattern(b, form, REGEX_IN_STRING, next, ret);
    else
        *ret = max >= 0 && max < min ? -1 : json_string_of(b->g, min, max, next);
out:
    return st;
}

#define NUMBER_ROOM 400

// A bound as digits, and whether it is out; the narrower where both forms are given. `side`: -1, 1.
static enum status bound_of(const json_t *schema, const char *name, const char *exclusive, int side,
                            char ret[NUMBER_ROOM], const char **ret_text, bool *ret_out)
{
    const json_t *in = json_object_get(schema, name), *out = json_object_get(schema, exclusive);
    *ret_text = NULL;
    *ret_out = false;
    if (!in && !out) return ST_OK;
    if ((in && !json_is_number(in)) || (out && !json_is_number(out)))
        return status_fail(ST_INVALID, "the JSON schema's \"%s\" is no number",
                           out ? exclusive : name);
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
        return status_fail(ST_UNSUPPORTED, "the JSON schema's \"%s\" is closer to 0 than 1e-12",
                           name);
    *ret_text = ret;
    return ST_OK;
}

static enum status build_number(struct builder *b, const json_t *schema, bool whole, int next,
                                int *ret)
{
    char low[NUMBER_ROOM], high[NUMBER_ROOM];
    struct number_range r = {.whole = whole};
    enum status st;
    CHECK(bound_of(schema, "minimum", "exclusiveMinimum", -1, low, &r.low, &r.above));
    CHECK(bound_of(schema, "maximum", "exclusiveMaximum", 1, high, &r.high, &r.below));
    *ret = r.low || r.high ? json_number_between(b->g, &r, next)
                           : json_rule(b->g, whole ? RULE_INTEGER : RULE_NUMBER, next);
out:
    return st;
}

// ---- arrays -------------------------------------------------------------------------------------

// As a rule of its own, which may be called from many places.
static enum status build_rule(struct builder *b, const json_t *schema, int *ret)
{
    int start;
    *ret = automaton_rule(b->g->a);
    const enum status st = build(b, schema, AUTOMATON_END, &start);
    if (st == ST_OK && start < 0) *ret = -1;
    if (st == ST_OK) automaton_define(b->g->a, *ret, start);
    return st;
}

static enum status build_array(struct builder *b, const json_t *schema, int next, int *ret)
{
    struct automaton *a = b->g->a;
    const json_t *items = json_object_get(schema, "items"),
                 *prefix = json_object_get(schema, "prefixItems");
    if (json_is_array(items)) { // draft 7's
        prefix = items;
        items = json_object_get(schema, "additionalItems");
    }
    const int64_t n_prefix = (int64_t)json_array_size(prefix);
    int64_t min, max;
    int rule = -1, one;
    enum status st;
    CHECK(count_of(schema, "minItems", 0, &min));
    CHECK(count_of(schema, "maxItems", -1, &max));
    CHECK(build_rule(b, items ? items : json_true(), &rule));
    if (rule < 0 && (max < 0 || max > n_prefix)) max = n_prefix;
    *ret = -1;
    if (max >= 0 && max < min) goto out;
    // From the last item on: what may follow i items, with a comma or, of none, without.
    const int end = json_rule(b->g, RULE_BLANK, automaton_text(a, "]", 1, next));
    const int64_t bounded = max >= 0 ? max : min > n_prefix ? min : n_prefix;
    int after = end;
    if (max < 0) {
        after = automaton_open(a);
        automaton_close(a, after, json_rule(b->g, RULE_COMMA, automaton_call(a, rule, after)), end);
    }
    int first = -1;
    for (int64_t i = bounded - 1; i >= 0; i--) {
        if (i < n_prefix)
            CHECK(build(b, json_array_get(prefix, (size_t)i), after, &one));
        else
            one = automaton_call(a, rule, after);
        if (i == 0) first = one;
        if (one < 0 && i < min) goto out; // no value is there that must be
        after = automaton_either(a, json_rule(b->g, RULE_COMMA, one), i < min ? -1 : end);
    }
    if (bounded == 0 && max < 0) first = automaton_call(a, rule, after);
    if (min == 0) first = automaton_either(a, first, end);
    *ret = automaton_text(a, "[", 1, json_rule(b->g, RULE_BLANK, first));
out:
    return st;
}

// ---- objects ------------------------------------------------------------------------------------

// Members whose names are not listed: *ret_rule has name, colon and value; -1: there are none.
static enum status build_more(struct builder *b, const json_t *schema, int *ret_rule)
{
    const json_t *more = json_object_get(schema, "additionalProperties"),
                 *properties = json_object_get(schema, "properties");
    const size_t n = json_object_size(properties);
    const char **names = malloc((n + 1) * sizeof *names), *name;
    json_t *value;
    int start, k = 0;
    enum status st = ST_OK;
    *ret_rule = -1;
    if (!names) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    json_object_foreach ((json_t *)properties, name, value) names[k++] = name;
    if (!json_is_false(more)) CHECK(build(b, more ? more : json_true(), AUTOMATON_END, &start));
    if (json_is_false(more) || start < 0) goto out;
    *ret_rule = automaton_rule(b->g->a);
    automaton_define(b->g->a, *ret_rule,
                     json_other_string(b->g, names, k, json_rule(b->g, RULE_COLON, start)));
out:
    free(names);
    return st;
}

struct chain {       // of members, from the last one on
    int first, rest; // what may follow none, and some; -1: nothing
};

static enum status add_member(struct builder *b, const char *name, const json_t *schema,
                              bool required, struct chain *chain)
{
    struct automaton *a = b->g->a;
    int value = -1;
    json_t *key = json_string(name);
    enum status st = ST_OK;
    if (!key) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    if (chain->rest >= 0) CHECK(build(b, schema, chain->rest, &value));
    const int member = json_literal(b->g, key, json_rule(b->g, RULE_COLON, value));
    chain->first = automaton_either(a, member, required ? -1 : chain->first);
    chain->rest =
        automaton_either(a, json_rule(b->g, RULE_COMMA, member), required ? -1 : chain->rest);
out:
    json_decref(key);
    return st;
}

// A required member that is not listed stands behind those that are, as if it were listed.
static json_t *members_of(const json_t *schema)
{
    json_t *members = json_copy(json_object_get(schema, "properties")),
           *more = json_object_get(schema, "additionalProperties");
    const json_t *required = json_object_get(schema, "required");
    if (!members) members = json_object();
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *name = json_string_value(json_array_get(required, i));
        if (name && !json_object_get(members, name))
            json_object_set(members, name, more ? more : json_true());
    }
    return members;
}

static enum status build_object(struct builder *b, const json_t *schema, int next, int *ret)
{
    struct automaton *a = b->g->a;
    const json_t *properties = json_object_get(schema, "properties"),
                 *required = json_object_get(schema, "required");
    json_t *members = NULL, *with = NULL;
    const char **names = NULL, *name;
    json_t *value;
    int rule, n = 0;
    enum status st = ST_OK;
    bool good =
        (!properties || json_is_object(properties)) && (!required || json_is_array(required));
    for (size_t i = 0; i < json_array_size(required); i++)
        good &= json_is_string(json_array_get(required, i));
    if (!good)
        return status_fail(ST_INVALID,
                           "the JSON schema's \"properties\" or \"required\" is malformed");
    members = members_of(schema);
    with = json_copy((json_t *)schema);
    json_object_set(with, "properties", members);
    CHECK(build_more(b, with, &rule));
    const int end = json_rule(b->g, RULE_BLANK, automaton_text(a, "}", 1, next));
    struct chain chain = {end, end};
    if (rule >= 0) {
        chain.rest = automaton_open(a);
        automaton_close(a, chain.rest,
                        json_rule(b->g, RULE_COMMA, automaton_call(a, rule, chain.rest)), end);
        chain.first = automaton_either(a, automaton_call(a, rule, chain.rest), end);
    }
    names = malloc((json_object_size(members) + 1) * sizeof *names);
    if (!names) FAIL(ST_NO_MEMORY, "no memory for a constraint");
    json_object_foreach (members, name, value) names[n++] = name;
    while (n-- > 0)
        CHECK(add_member(b, names[n], json_object_get(members, names[n]),
                         requires(schema, names[n]), &chain));
    *ret = automaton_text(a, "{", 1, json_rule(b->g, RULE_BLANK, chain.first));
out:
    free(names);
    json_decref(with);
    json_decref(members);
    return st;
}

// ---- a schema -----------------------------------------------------------------------------------

static enum status build_type(struct builder *b, const json_t *schema, enum type type, int next,
                              int *ret)
{
    struct automaton *a = b->g->a;
    switch (type) {
    case T_OBJECT:
        return build_object(b, schema, next, ret);
    case T_ARRAY:
        return build_array(b, schema, next, ret);
    case T_STRING:
        return build_string(b, schema, next, ret);
    case T_INTEGER:
    case T_NUMBER:
        return build_number(b, schema, type == T_INTEGER, next, ret);
    case T_BOOLEAN:
        *ret = automaton_either(a, automaton_text(a, "true", 4, next),
                                automaton_text(a, "false", 5, next));
        return ST_OK;
    default:
        *ret = automaton_text(a, "null", 4, next);
        return ST_OK;
    }
}

static enum status build_types(struct builder *b, const json_t *schema, int next, int *ret)
{
    unsigned types;
    enum status st = types_of(schema, &types);
    *ret = -1;
    for (int t = 0; t < TYPES && st == ST_OK; t++) {
        int one = -1;
        if (!(types & 1u << t)) continue;
        st = build_type(b, schema, (enum type)t, next, &one);
        *ret = automaton_either(b->g->a, *ret, one);
    }
    return st;
}

static enum status build_one(struct builder *b, const json_t *schema, int next, int *ret)
{
    const char *ref = json_string_value(json_object_get(schema, "$ref"));
    enum status st;
    json_t *values = NULL;
    CHECK(check_keywords(schema));
    if (ref && !has_siblings(schema, "$ref")) return build_ref(b, ref, next, ret);
    if (ref || json_object_get(schema, "allOf")) return build_merged(b, schema, next, ret);
    if (json_object_get(schema, "anyOf")) return build_branches(b, schema, "anyOf", next, ret);
    if (json_object_get(schema, "oneOf")) return build_branches(b, schema, "oneOf", next, ret);
    values = listed(schema);
    if (values)
        st = build_listed(b, schema, values, next, ret);
    else if (!has_siblings(schema, ""))
        *ret = json_rule(b->g, RULE_VALUE, next);
    else
        st = build_types(b, schema, next, ret);
out:
    json_decref(values);
    return st;
}

// *ret is -1 where no value meets it.
static enum status build(struct builder *b, const json_t *schema, int next, int *ret)
{
    enum status st = count_work(b);
    *ret = -1;
    if (st != ST_OK) return st;
    if (json_is_true(schema))
        *ret = json_rule(b->g, RULE_VALUE, next);
    else if (json_is_object(schema) && b->depth == MAX_DEPTH)
        st = status_fail(ST_TOO_LONG, "the JSON schema is more than %d schemas deep", MAX_DEPTH);
    else if (json_is_object(schema)) {
        b->depth++;
        st = build_one(b, schema, next, ret);
        b->depth--;
    } else if (!json_is_false(schema))
        st =
            status_fail(ST_INVALID, "the JSON schema has neither an object nor true or false where "
                                    "a schema belongs");
    return st;
}

enum status json_schema_build(const struct json_grammar *g, const json_t *schema, int next,
                              int *ret)
{
    struct builder b = {.g = g, .root = schema, .rules = json_object()};
    if (!b.rules) return status_fail(ST_NO_MEMORY, "no memory for a constraint");
    enum status st = build(&b, schema, next, ret);
    if (st == ST_OK && *ret < 0 && automaton_failed(g->a))
        st = status_fail(ST_TOO_LONG, "the JSON schema takes more than %d nodes", AUTOMATON_NODES);
    else if (st == ST_OK && *ret < 0)
        st = status_fail(ST_INVALID, "no value meets the JSON schema");
    json_decref(b.rules);
    return st;
}
