/* section.c: the steps of a section, read by the table of those that it may have, and what several
 * sections' steps have alike; and the lists of pieces that they cut a text into. No state; any
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "common/base/json.h"
#include "common/base/names.h"
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 8

struct reading {
    const char *where, *name, *parts;
    const struct step_type *types;
    struct step_list *list;
};

static enum status read_steps(const struct reading *r, const json_t *section, int depth)
{
    const char *type = json_string_value(json_object_get(section, "type"));
    const json_t *parts = json_object_get(section, r->parts), *part;
    const struct step_type *t = r->types;
    size_t i;
    enum status st = ST_OK;
    if (!type) FAIL(ST_FORMAT, "%s: %s.type is not a string", r->where, r->name);
    if (strcmp(type, "Sequence") == 0) {
        if (!json_is_array(parts) || depth > MAX_DEPTH)
            FAIL(ST_FORMAT, "%s: %s.%s is not an array", r->where, r->name, r->parts);
        json_array_foreach (parts, i, part) CHECK(read_steps(r, part, depth + 1));
        return ST_OK;
    }
    while (t->name && strcmp(t->name, type) != 0) t++;
    if (!t->name)
        FAIL(ST_UNSUPPORTED, "%s: %s.type \"%s\" is not supported", r->where, r->name, type);
    struct step *items = array_room(r->list->items, r->list->n, sizeof(*items));
    if (!items) FAIL(ST_NO_MEMORY, "%s: out of memory", r->where);
    r->list->items = items;
    items += r->list->n++;
    *items = (struct step){.type = t, .json = section};
    if (t->parse) st = t->parse(r->where, r->name, items);
out:
    return st;
}

enum status step_list_parse(const char *where, const char *name, const char *parts,
                            const json_t *section, const struct step_type *types,
                            struct step_list *ret)
{
    if (!section || json_is_null(section)) return ST_OK;
    return read_steps(&(struct reading){where, name, parts, types, ret}, section, 0);
}

void step_list_release(struct step_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        pattern_free(list->items[i].pattern);
        bytes_release(&list->items[i].with);
    }
    free(list->items);
    *list = (struct step_list){0};
}

enum status step_parse_replace(const char *where, const char *name, struct step *s)
{
    const json_t *with = json_object_get(s->json, "content");
    char field[80];
    enum status st;
    if (!json_is_string(with)) FAIL(ST_FORMAT, "%s: %s.content is not a string", where, name);
    bytes_append(&s->with, json_string_value(with), json_string_length(with));
    CHECK(bytes_status(&s->with));
    snprintf(field, sizeof(field), "%s.pattern", name);
    st = pattern_parse(where, field, json_object_get(s->json, "pattern"), &s->pattern);
out:
    return st;
}

enum status step_parse_character(const char *where, const char *name, const char *key,
                                 const char *otherwise, struct step *s)
{
    const char *text = otherwise;
    enum status st = json_get_string(where, s->json, key, &text);
    size_t len = strlen(text);
    if (st == ST_OK && (len == 0 || utf8_sequence(text, len) != (int)len))
        st =
            status_fail(ST_FORMAT, "%s: %s.%s \"%s\" is not one character", where, name, key, text);
    if (st == ST_OK) memcpy(s->character, text, len + 1);
    return st;
}

enum status step_parse_metaspace(const char *where, const char *name, struct step *s)
{
    static const char *const schemes[] = {"always", "first", "never", NULL};
    const char *scheme = "always";
    char field[80];
    bool prefix = true;
    enum status st;
    s->split = true;
    CHECK(json_get_bool(where, s->json, "split", &s->split));
    CHECK(step_parse_character(where, name, "replacement", "\xe2\x96\x81", s));
    CHECK(json_get_bool(where, s->json, "add_prefix_space", &prefix)); // how older files say it
    if (!prefix) scheme = "never";
    CHECK(json_get_string(where, s->json, "prepend_scheme", &scheme));
    int found = name_find(schemes, scheme);
    if (found < 0)
        FAIL(ST_UNSUPPORTED, "%s: %s.prepend_scheme \"%s\" is not supported", where, name, scheme);
    s->scheme = (enum prepend_scheme)found;
    bytes_puts(&s->with, " ");
    CHECK(bytes_status(&s->with));
    snprintf(field, sizeof(field), "%s.replacement", name);
    st = pattern_new(where, field, s->character, strlen(s->character), true, &s->pattern);
out:
    return st;
}

// ---- pieces -------------------------------------------------------------------------------------

void piece_list_release(struct piece_list *list)
{
    free(list->items);
    *list = (struct piece_list){0};
}

enum status piece_list_push(struct piece_list *list, size_t start, size_t len, int id)
{
    struct text_piece *items = list->items;
    if (list->n == list->cap) {
        size_t cap = list->cap ? 2 * list->cap : 64;
        items = realloc(items, cap * sizeof(*items));
        if (!items) return status_fail(ST_NO_MEMORY, "out of memory for pieces of text");
        list->items = items;
        list->cap = cap;
    }
    items[list->n++] = (struct text_piece){start, len, id};
    return ST_OK;
}
