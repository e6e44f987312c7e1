/* spec.c: see spec.h. Specs are built from the end to the beginning, as nodes are. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/spec.h"
#include "common/base/bytes.h"
#include "common/constraint/json_schema.h"
#include "common/constraint/pattern.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 64  // of specs within each other
#define MAX_UNTIL 256 // characters of the texts that free text has not
#define MAX_POINT 0x10ffffu

struct spec_builder {
    struct automaton *a;
    struct json_grammar json[2]; // with any white space, with strict, once wanted
    const char *const *names;    // of special tokens
    int n_names, depth;
    bool strict;
};

static enum status build(struct spec_builder *b, const json_t *spec, int next, int *ret);

static enum status wrong(const char *name, const char *what)
{
    return status_fail(ST_INVALID, "\"%s\" must be %s", name, what);
}

// ---- texts --------------------------------------------------------------------------------------

// The special token whose name a text begins with, the longest of them; -1: none.
static int special_at(const struct spec_builder *b, const char *text)
{
    int found = -1;
    for (int i = 0; i < b->n_names; i++) {
        if (b->names[i][0] != *text) continue;
        const size_t n = strlen(b->names[i]);
        if (strncmp(b->names[i], text, n) == 0 && (found < 0 || n > strlen(b->names[found])))
            found = i;
    }
    return found;
}

// The next character of a text, which is moved behind it; MAX_POINT + 1 + i: special token i.
static uint32_t next_point(const struct spec_builder *b, const char **text)
{
    const int special = special_at(b, *text);
    size_t n = 0;
    const uint32_t point =
        special < 0 ? utf8_next(*text, strnlen(*text, 4), &n) : MAX_POINT + 1 + (uint32_t)special;
    *text += special < 0 ? n : strlen(b->names[special]);
    return point;
}

static int build_point(struct spec_builder *b, uint32_t point, int next)
{
    if (point <= MAX_POINT) return automaton_character(b->a, point, point, false, next);
    const char *name = b->names[point - MAX_POINT - 1];
    return automaton_byte(b->a, SPEC_SPECIAL, SPEC_SPECIAL,
                          automaton_text(b->a, name, strlen(name), next));
}

static int build_text(struct spec_builder *b, const char *text, int next)
{
    uint32_t *points = malloc((strlen(text) + 1) * sizeof *points);
    size_t n = 0;
    if (!points) return -1;
    while (*text && n < AUTOMATON_NODES) points[n++] = next_point(b, &text); // more are too many
    while (n > 0) next = build_point(b, points[--n], next);
    free(points);
    return next;
}

static enum status build_choice(struct spec_builder *b, const json_t *texts, int next, int *ret)
{
    *ret = -1;
    if (!json_is_array(texts) || json_array_size(texts) == 0)
        return wrong("choice", "an array of texts, one at least");
    for (size_t i = 0; i < json_array_size(texts); i++) {
        const json_t *text = json_array_get(texts, i);
        if (!json_is_string(text) || json_string_length(text) == 0)
            return wrong("choice", "an array of texts, none empty");
        *ret = automaton_either(b->a, *ret, build_text(b, json_string_value(text), next));
    }
    return ST_OK;
}

// ---- free text ----------------------------------------------------------------------------------

/* Free text is followed as Aho and Corasick do: a node for each beginning of a text, which is the
 * longest that the free text ends with; `nodes` has that of the first text that begins so. */
struct free_text {
    uint32_t points[MAX_UNTIL]; // of all texts, one after the other
    int first[MAX_UNTIL + 1];   // of each text: where it begins
    int nodes[MAX_UNTIL];       // (points) before that point of its text
    int n;
};

static int length(const struct free_text *f, int text)
{
    return f->first[text + 1] - f->first[text];
}

// Whether n points are a text's first n.
static bool begins(const struct free_text *f, int text, const uint32_t *points, int n)
{
    return n <= length(f, text) &&
           memcmp(f->points + f->first[text], points, (size_t)n * sizeof *points) == 0;
}

// Where free text is that ends with n points: -1, a text is in it; else an index of `nodes`.
static int place_behind(const struct free_text *f, const uint32_t *points, int n)
{
    int longest = -1;
    for (int from = 0; from <= n; from++)
        for (int t = 0; t < f->n; t++)
            if (begins(f, t, points + from, n - from)) {
                if (n - from == length(f, t)) return -1;
                if (longest < 0) longest = f->first[t] + n - from;
            }
    return longest;
}

static int by_value(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

// What follows the free text that ends with the first n points of a text. `whole` is what follows
// one of the texts.
static int behind(struct spec_builder *b, const struct free_text *f, const uint32_t *points, int n,
                  int whole)
{
    uint32_t ends[MAX_UNTIL + 1], sorted[MAX_UNTIL], from = 0;
    const int n_points = f->first[f->n];
    int made = -1;
    memcpy(ends, points, (size_t)n * sizeof *ends);
    memcpy(sorted, f->points, (size_t)n_points * sizeof *sorted);
    qsort(sorted, (size_t)n_points, sizeof *sorted, by_value);
    for (int i = 0; i < n_points; i++) {
        if (i > 0 && sorted[i] == sorted[i - 1]) continue;
        ends[n] = sorted[i];
        const int place = place_behind(f, ends, n + 1);
        const int to = place < 0 ? whole : f->nodes[place];
        made = automaton_either(b->a, made, build_point(b, sorted[i], to));
        if (sorted[i] > from && from <= MAX_POINT)
            made = automaton_either(
                b->a, made,
                automaton_character(b->a, from, sorted[i] > MAX_POINT ? MAX_POINT : sorted[i] - 1,
                                    false, f->nodes[0]));
        from = sorted[i] + 1;
    }
    if (from > MAX_POINT) return made;
    return automaton_either(b->a, made,
                            automaton_character(b->a, from, MAX_POINT, false, f->nodes[0]));
}

static enum status read_texts(struct spec_builder *b, const char *name, const json_t *texts,
                              struct free_text *ret)
{
    size_t i;
    json_t *one;
    int n = 0;
    ret->n = 0;
    json_array_foreach (texts, i, one) {
        const char *text = json_string_value(one);
        if (!text || !*text) return wrong(name, "an array of texts, none empty");
        for (ret->first[ret->n++] = n; *text; n++) {
            if (n == MAX_UNTIL)
                return status_fail(ST_TOO_LONG, "\"%s\" has more than %d characters", name,
                                   MAX_UNTIL);
            ret->points[n] = next_point(b, &text);
        }
    }
    ret->first[ret->n] = n;
    return n > 0 ? ST_OK : wrong(name, "an array of texts, one at least");
}

// Up to and with the first of the texts, or without any of them.
static enum status build_free(struct spec_builder *b, const char *name, const json_t *texts,
                              bool until, int next, int *ret)
{
    struct free_text f;
    enum status st = read_texts(b, name, texts, &f);
    if (st != ST_OK) return st;
    bool plain = true; // plain characters begin none of the texts
    for (int i = 0; i < f.first[f.n]; i++) f.nodes[i] = automaton_open(b->a);
    for (int t = 0; t < f.n; t++) plain &= !automaton_is_unit(SLICE_PLAIN, f.points[f.first[t]]);
    for (int t = 0; t < f.n; t++)
        for (int i = 0; i < length(&f, t); i++) {
            const uint32_t *points = f.points + f.first[t];
            const int node = f.nodes[f.first[t] + i];
            if (place_behind(&f, points, i) != f.first[t] + i) continue;
            int made = automaton_either(b->a, behind(b, &f, points, i, until ? next : -1),
                                        until ? -1 : next);
            if (plain && node == f.nodes[0]) {
                const int one = automaton_unit(b->a, SLICE_PLAIN, AUTOMATON_END);
                made =
                    automaton_repeat(b->a, automaton_rule_of(b->a, one, SLICE_PLAIN), 0, -1, made);
            }
            automaton_close(b->a, node, made, -1);
        }
    *ret = f.nodes[0];
    return ST_OK;
}

// ---- what is put together -----------------------------------------------------------------------

static enum status build_sequence(struct spec_builder *b, const json_t *parts, int next, int *ret)
{
    enum status st = json_is_array(parts) ? ST_OK : wrong("sequence", "an array");
    *ret = next;
    for (size_t i = json_array_size(parts); i > 0 && st == ST_OK; i--)
        st = build(b, json_array_get(parts, i - 1), *ret, ret);
    return st;
}

static enum status build_either(struct spec_builder *b, const json_t *parts, int next, int *ret)
{
    enum status st = json_array_size(parts) > 0 ? ST_OK : wrong("either", "an array, not empty");
    int one;
    *ret = -1;
    for (size_t i = 0; i < json_array_size(parts) && st == ST_OK; i++) {
        st = build(b, json_array_get(parts, i), next, &one);
        if (st == ST_OK) *ret = automaton_either(b->a, *ret, one);
    }
    return st;
}

static enum status build_repeat(struct spec_builder *b, const json_t *spec, int next, int *ret)
{
    const json_t *between = json_object_get(spec, "between");
    int64_t min, max;
    int start, one;
    enum status st;
    CHECK(json_count(spec, "min", 0, &min));
    CHECK(json_count(spec, "max", -1, &max));
    if (max >= 0 && max < min) FAIL(ST_INVALID, "\"max\" is less than \"min\"");
    CHECK(build(b, json_object_get(spec, "repeat"), AUTOMATON_END, &start));
    one = automaton_rule_of(b->a, start, AUTOMATON_SLICES);
    if (between) CHECK(build(b, between, automaton_call(b->a, one, AUTOMATON_END), &start));
    if (between && max != 0) {
        start = automaton_repeat(b->a, automaton_rule_of(b->a, start, AUTOMATON_SLICES),
                                 min > 0 ? min - 1 : 0, max < 0 ? max : max - 1, next);
        *ret = automaton_either(b->a, automaton_call(b->a, one, start), min > 0 ? -1 : next);
    } else
        *ret = automaton_repeat(b->a, one, min, max, next);
out:
    return st;
}

// ---- a spec -------------------------------------------------------------------------------------

static enum status build_json(struct spec_builder *b, const json_t *schema, int next, int *ret)
{
    struct json_grammar *g = &b->json[b->strict];
    enum status st = g->a ? ST_OK : json_grammar_build(b->a, b->strict, g);
    if (st == ST_OK && schema)
        st = json_schema_build(g, schema, next, ret);
    else if (st == ST_OK)
        *ret = json_rule(g, RULE_OBJECT, next);
    return st;
}

static enum status build_grammar(struct spec_builder *b, const char *text, int next, int *ret)
{
    static const char *const root = "root";
    int rule;
    const enum status st = grammar_build(b->a, text, &root, 1, &rule);
    if (st == ST_OK) *ret = automaton_call(b->a, rule, next);
    return st;
}

static enum status build_object(struct spec_builder *b, const json_t *spec, int next, int *ret)
{
    const json_t *value;
    const char *text;
    if ((value = json_object_get(spec, "json_schema"))) return build_json(b, value, next, ret);
    if ((value = json_object_get(spec, "choice"))) return build_choice(b, value, next, ret);
    if ((value = json_object_get(spec, "sequence"))) return build_sequence(b, value, next, ret);
    if ((value = json_object_get(spec, "either"))) return build_either(b, value, next, ret);
    if (json_object_get(spec, "repeat")) return build_repeat(b, spec, next, ret);
    if ((value = json_object_get(spec, "until")))
        return build_free(b, "until", value, true, next, ret);
    if ((value = json_object_get(spec, "without")))
        return build_free(b, "without", value, false, next, ret);
    if ((value = json_object_get(spec, "regex"))) {
        text = json_string_value(value);
        return text ? regex_build(b->a, text, REGEX_WHOLE, next, ret) : wrong("regex", "a text");
    }
    if ((value = json_object_get(spec, "grammar"))) {
        text = json_string_value(value);
        return text ? build_grammar(b, text, next, ret) : wrong("grammar", "a text");
    }
    if (json_is_true(json_object_get(spec, "json_object"))) return build_json(b, NULL, next, ret);
    return status_fail(ST_INVALID, "a constraint is none of those that there are");
}

static enum status build(struct spec_builder *b, const json_t *spec, int next, int *ret)
{
    const bool strict = b->strict;
    enum status st;
    if (json_is_string(spec)) {
        *ret = build_text(b, json_string_value(spec), next);
        return ST_OK;
    }
    if (b->depth == MAX_DEPTH)
        return status_fail(ST_TOO_LONG, "a constraint is more than %d deep", MAX_DEPTH);
    b->depth++;
    b->strict |= json_is_true(json_object_get(spec, "strict_whitespace"));
    st = build_object(b, spec, next, ret);
    b->strict = strict;
    b->depth--;
    return st;
}

enum status spec_build(struct automaton *a, const char *const *names, int n, const json_t *spec,
                       int *ret)
{
    struct spec_builder b = {.a = a, .names = names, .n_names = n};
    return build(&b, spec, AUTOMATON_END, ret);
}
