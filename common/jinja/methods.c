/* methods.c: which value has which methods, and those of lists, dicts, numbers and cyclers. Those
 * that would change a list or a dict are not here: Jinja's sandbox forbids them (attribute.c). One
 * thread. */
#include "common/jinja/strings.h"
#include "common/jinja/text.h"
#include <math.h>

// ---- strings ------------------------------------------------------------------------------------

static BUILTIN(format)
{
    return format_braces(c->run, c->v[0].string, c->all);
}

static BUILTIN(format_map)
{
    if (c->v[1].kind != V_DICT) type_fail(c->run, "format_map() wants a mapping", c->v[1]);
    const struct dict *d = c->v[1].dict;
    struct named_value *named = arena_array(&c->run->arena, d->n, sizeof *named);
    struct arguments arguments = {.named = named};
    for (size_t i = 0; i < d->n; i++)
        if (d->entries[i].key.kind == V_STRING)
            named[arguments.n_named++] =
                (struct named_value){d->entries[i].key.string, d->entries[i].value};
    return format_braces(c->run, c->v[0].string, &arguments);
}

static BUILTIN(not_supported)
{
    arena_fail(&c->run->arena, ST_UNSUPPORTED, "this method of strings is not supported");
}

static const struct builtin string_methods[] = {
    {"capitalize", string_cased, CASE_CAPITALIZE, "", 0},
    {"casefold", string_cased, CASE_FOLD, "", 0},
    {"center", string_pad, PAD_LEFT | PAD_RIGHT, "/width fillchar", 1},
    {"count", string_count, 0, "/sub start end", 1},
    {"encode", not_supported, 0, "*", 0},
    {"endswith", string_affix, AT_END, "/suffix start end", 1},
    {"expandtabs", string_expandtabs, 0, "tabsize", 0},
    {"find", string_find, 0, "/sub start end", 1},
    {"format", format, 0, "*", 0},
    {"format_map", format_map, 0, "/mapping", 1},
    {"index", string_find, FIND_OR_FAIL, "/sub start end", 1},
    {"isalnum", string_consists_of, TEXT_ALNUM, "", 0},
    {"isalpha", string_consists_of, TEXT_ALPHA, "", 0},
    {"isascii", string_consists_of, TEXT_ASCII, "", 0},
    {"isdecimal", string_consists_of, TEXT_DECIMAL, "", 0},
    {"isdigit", string_consists_of, TEXT_DIGIT, "", 0},
    {"isidentifier", string_is_identifier, 0, "", 0},
    {"islower", string_has_case, CASE_LOWER, "", 0},
    {"isnumeric", string_consists_of, TEXT_NUMERIC, "", 0},
    {"isprintable", string_consists_of, TEXT_PRINTABLE, "", 0},
    {"isspace", string_consists_of, TEXT_SPACE, "", 0},
    {"istitle", string_has_case, CASE_TITLE, "", 0},
    {"isupper", string_has_case, CASE_UPPER, "", 0},
    {"join", string_join, 0, "/iterable", 1},
    {"ljust", string_pad, PAD_RIGHT, "/width fillchar", 1},
    {"lower", string_cased, CASE_LOWER, "", 0},
    {"lstrip", string_strip, STRIP_LEFT, "/chars", 0},
    {"maketrans", not_supported, 0, "*", 0},
    {"partition", string_partition, AT_START, "/sep", 1},
    {"removeprefix", string_remove, AT_START, "/prefix", 1},
    {"removesuffix", string_remove, AT_END, "/suffix", 1},
    {"replace", string_replace, 0, "/old new count", 2},
    {"rfind", string_find, FIND_LAST, "/sub start end", 1},
    {"rindex", string_find, FIND_LAST | FIND_OR_FAIL, "/sub start end", 1},
    {"rjust", string_pad, PAD_LEFT, "/width fillchar", 1},
    {"rpartition", string_partition, AT_END, "/sep", 1},
    {"rsplit", string_split, AT_END, "sep maxsplit", 0},
    {"rstrip", string_strip, STRIP_RIGHT, "/chars", 0},
    {"split", string_split, AT_START, "sep maxsplit", 0},
    {"splitlines", string_splitlines, 0, "keepends", 0},
    {"startswith", string_affix, AT_START, "/prefix start end", 1},
    {"strip", string_strip, STRIP_LEFT | STRIP_RIGHT, "/chars", 0},
    {"swapcase", string_cased, CASE_SWAP, "", 0},
    {"title", string_cased, CASE_TITLE, "", 0},
    {"translate", not_supported, 0, "*", 0},
    {"upper", string_cased, CASE_UPPER, "", 0},
    {"zfill", string_zfill, 0, "/width", 1},
    {.name = NULL},
};

// ---- lists, tuples, ranges ----------------------------------------------------------------------

static BUILTIN(count)
{
    struct list items = value_items(c->run, c->v[0]);
    int64_t n = 0;
    for (size_t i = 0; i < items.n; i++) n += value_equal(c->run, items.items[i], c->v[1]);
    return value_int(n);
}

static BUILTIN(index_of)
{
    struct list items = value_items(c->run, c->v[0]);
    int64_t start, end;
    arg_window(c, (int64_t)items.n, &start, &end);
    for (int64_t i = start; i < end; i++)
        if (value_equal(c->run, items.items[i], c->v[1])) return value_int(i);
    fail(c->run, "the value is not in the %s", value_type(c->v[0]));
}

static BUILTIN(copy)
{
    return c->v[0]; // nothing changes either
}

static const struct builtin tuple_methods[] = {
    {"count", count, 0, "/value", 1},
    {"index", index_of, 0, "/value start stop", 1},
    {.name = NULL},
};
static const struct builtin list_methods[] = {
    {"count", count, 0, "/value", 1},
    {"index", index_of, 0, "/value start stop", 1},
    {"copy", copy, 0, "", 0},
    {.name = NULL},
};

// ---- dicts --------------------------------------------------------------------------------------

static BUILTIN(get)
{
    struct value v = dict_find(c->run, c->v[0].dict, c->v[1]);
    return given(v) ? v : given(c->v[2]) ? c->v[2] : NONE;
}

static BUILTIN(view)
{
    return dict_view(c->run, c->v[0].dict, (enum view_of)c->function->which);
}

static const struct builtin dict_methods[] = {
    {"get", get, 0, "/key default", 1},   {"items", view, VIEW_ITEMS, "", 0},
    {"keys", view, VIEW_KEYS, "", 0},     {"copy", copy, 0, "", 0},
    {"values", view, VIEW_VALUES, "", 0}, {.name = NULL},
};

// ---- numbers, cyclers, loops --------------------------------------------------------------------

static BUILTIN(is_integer)
{
    return value_bool(isfinite(c->v[0].real) && floor(c->v[0].real) == c->v[0].real);
}

static BUILTIN(bit_length)
{
    int64_t x = 0, n = 0;
    value_as_int(c->v[0], &x);
    for (uint64_t size = x < 0 ? 0 - (uint64_t)x : (uint64_t)x; size > 0; size >>= 1) n++;
    return value_int(n);
}

static BUILTIN(next)
{
    struct cycler *cycler = c->v[0].cycler;
    struct value v = cycler->items.items[cycler->at];
    cycler->at = (cycler->at + 1) % cycler->items.n;
    return v;
}

static BUILTIN(reset)
{
    c->v[0].cycler->at = 0;
    return NONE;
}

static const struct builtin float_methods[] = {{"is_integer", is_integer, 0, "", 0},
                                               {.name = NULL}};
static const struct builtin int_methods[] = {{"bit_length", bit_length, 0, "", 0}, {.name = NULL}};
static const struct builtin cycler_methods[] = {
    {"next", next, 0, "", 0}, {"reset", reset, 0, "", 0}, {.name = NULL}};
static const struct builtin loop_methods[] = {
    {"cycle", loop_cycle, 0, "*", 0}, {"changed", loop_changed, 0, "*", 0}, {.name = NULL}};

const struct builtin *method_find(struct value of, const struct string *name)
{
    static const struct builtin *const tables[] = {
        [V_STRING] = string_methods, [V_LIST] = list_methods, [V_TUPLE] = tuple_methods,
        [V_RANGE] = tuple_methods,   [V_DICT] = dict_methods, [V_FLOAT] = float_methods,
        [V_INT] = int_methods,       [V_BOOL] = int_methods,  [V_CYCLER] = cycler_methods,
        [V_LOOP] = loop_methods,     [V_JOINER] = NULL,
    };
    return tables[of.kind] ? builtin_find(tables[of.kind], name) : NULL;
}
