/* section.c: the walk over nested Sequences, its depth bounded. No state; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "common/base/json.h"
#include "common/base/names.h"
#include <string.h>

#define MAX_DEPTH 8

struct walk {
    const char *where, *name, *parts;
    section_visit visit;
    void *context;
};

static enum status walk(const struct walk *w, const json_t *section, int depth)
{
    const json_t *type = json_object_get(section, "type");
    if (!json_is_string(type))
        return status_fail(ST_FORMAT, "%s: %s.type is not a string", w->where, w->name);
    if (strcmp(json_string_value(type), "Sequence") != 0)
        return w->visit(w->context, w->where, json_string_value(type), section);
    const json_t *parts = json_object_get(section, w->parts);
    if (!json_is_array(parts) || depth > MAX_DEPTH)
        return status_fail(ST_FORMAT, "%s: %s.%s is not an array", w->where, w->name, w->parts);
    enum status st = ST_OK;
    for (size_t i = 0; st == ST_OK && i < json_array_size(parts); i++)
        st = walk(w, json_array_get(parts, i), depth + 1);
    return st;
}

enum status section_each(const char *where, const char *name, const char *parts,
                         const json_t *section, section_visit visit, void *context)
{
    if (!section || json_is_null(section)) return ST_OK;
    return walk(&(struct walk){where, name, parts, visit, context}, section, 0);
}

enum status section_character(const char *where, const char *field, const char *text, char ret[5])
{
    size_t len = strlen(text);
    if (len == 0 || utf8_sequence(text, len) != (int)len)
        return status_fail(ST_FORMAT, "%s: %s \"%s\" is not one character", where, field, text);
    memcpy(ret, text, len + 1);
    return ST_OK;
}

enum status section_metaspace(const char *where, const char *name, const json_t *part,
                              char ret_replacement[5], enum prepend_scheme *ret_scheme)
{
    static const char *const schemes[] = {"always", "first", "never", NULL};
    const char *replacement = "\xe2\x96\x81", *scheme = "always";
    char field[80];
    bool prefix = true;
    enum status st;
    CHECK(json_get_string(where, part, "replacement", &replacement));
    CHECK(json_get_bool(where, part, "add_prefix_space", &prefix)); // how older files say it
    if (!prefix) scheme = "never";
    CHECK(json_get_string(where, part, "prepend_scheme", &scheme));
    int found = name_find(schemes, scheme);
    if (found < 0)
        return status_fail(ST_UNSUPPORTED, "%s: %s.prepend_scheme \"%s\" is not supported", where,
                           name, scheme);
    *ret_scheme = (enum prepend_scheme)found;
    snprintf(field, sizeof(field), "%s.replacement", name);
    st = section_character(where, field, replacement, ret_replacement);
out:
    return st;
}
