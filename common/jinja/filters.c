/* filters.c: finding filters, and those on single values: defaults, attributes, JSON.
 * One thread. */
#include "common/jinja/filters.h"

const struct builtin *filter_find(const struct string *name)
{
    static const struct builtin *const tables[] = {text_filters, html_filters,   order_filters,
                                                   list_filters, number_filters, value_filters};
    const struct builtin *f = NULL;
    for (size_t i = 0; !f && i < sizeof tables / sizeof *tables; i++)
        f = builtin_find(tables[i], name);
    return f;
}

// ---- values -------------------------------------------------------------------------------------

static BUILTIN(default_value)
{
    bool by_truth = arg_truth(c, 2, false), truth = value_truth(c->run, c->v[0]);
    if (c->v[0].kind != V_UNDEFINED && (truth || !by_truth)) return c->v[0];
    return given(c->v[1]) ? c->v[1] : string_of(&c->run->arena, "");
}

static BUILTIN(string)
{
    return c->v[0];
}

static BUILTIN(attr)
{
    const struct string *name = arg_string(c, 1);
    if (c->v[0].kind != V_DICT || method_find(c->v[0], name))
        return get_attribute(c->run, c->v[0], name);
    return undefined_item(c->run, c->v[0], c->v[1]); // an item is not an attribute
}

// ---- JSON ---------------------------------------------------------------------------------------

static void read_indent(const struct call *c, struct json_style *style)
{
    static const struct string comma = {",", 1, 1, false}, blank = {" ", 1, 1, false};
    if (!arg_given(c, 2)) return;
    style->lines = true;
    style->item_separator = &comma;
    if (c->v[2].kind == V_STRING) {
        style->indent = c->v[2].string;
        return;
    }
    int64_t width = arg_int(c, 2, 0);
    if (width > 1000) fail(c->run, "an indent of more than 1000 is refused");
    style->indent = value_repeat(c->run, value_string(&blank), width).string;
}

static BUILTIN(tojson)
{
    static const struct string comma = {", ", 2, 2, false}, colon = {": ", 2, 2, false};
    struct json_style style = {.ensure_ascii = arg_truth(c, 1, false),
                               .sort_keys = arg_truth(c, 4, false),
                               .item_separator = &comma,
                               .key_separator = &colon};
    read_indent(c, &style);
    if (arg_given(c, 3)) {
        struct list items = value_items(c->run, c->v[3]);
        if (items.n != 2) fail(c->run, "separators: two texts are wanted, there are %zu", items.n);
        style.item_separator = need_string(c->run, items.items[0], "separators");
        style.key_separator = need_string(c->run, items.items[1], "separators");
    }
    size_t text = text_begin(c->run);
    put_json(c->run, c->v[0], &style);
    return text_end(c->run, text, false);
}

const struct builtin value_filters[] = {
    {"default", default_value, 0, "default_value boolean", 0},
    {"d", default_value, 0, "default_value boolean", 0},
    {"string", string, 0, "$", 0},
    {"attr", attr, 0, "name", 1},
    {"tojson", tojson, 0, "ensure_ascii indent separators sort_keys", 0},
    {.name = NULL},
};
