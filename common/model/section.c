/* section.c: the walk over nested Sequences, its depth bounded. No state; any thread. */
#include "common/model/section.h"
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
