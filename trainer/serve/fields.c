/* fields.c: requests' fields by their tables. No state. */
#include "trainer/serve/fields.h"

#include <string.h>

static enum status read_field(const char *where, const json_t *object, const struct field *f,
                              void *ret)
{
    switch (f->type) {
    case AS_TEXT:
        *(const char **)ret = NULL;
        return json_get_string(where, object, f->name, ret);
    case AS_JSON:
        *(const json_t **)ret = json_has(object, f->name) ? json_object_get(object, f->name) : NULL;
        return ST_OK;
    case AS_BOOL:
        *(bool *)ret = f->otherwise != 0;
        return json_get_bool(where, object, f->name, ret);
    case AS_INT:
        *(int64_t *)ret = f->otherwise;
        return json_get_int(where, object, f->name, f->min, f->max, ret);
    case AS_REAL:
        *(double *)ret = f->or_else;
        return json_get_double(where, object, f->name, f->from, f->to, ret);
    }
    return ST_OK;
}

enum status fields_read(const char *where, const json_t *object, const struct field *fields,
                        const char *needs, void *ret)
{
    char name[64];
    enum status st = ST_OK;
    for (const struct field *f = fields; f->name; f++)
        CHECK(read_field(where, object, f, (char *)ret + f->offset));
    for (const char *word = needs ? needs : ""; *word; word += strspn(word, " ")) {
        const int n = (int)strcspn(word, " ");
        snprintf(name, sizeof name, "%.*s", n, word);
        if (!json_has(object, name)) FAIL(ST_INVALID, "%s: \"%s\" is missing", where, name);
        word += n;
    }
out:
    return st;
}
