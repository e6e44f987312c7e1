/* builtins.c: filters that go over items, the methods of lists, dicts, numbers and cyclers, tests,
 * and the functions that a template finds without being given them. Filters that give a generator
 * in Jinja give an iterator here: true even when empty, without a length, gone over once. Methods
 * that would change a list or a dict are not here: Jinja's sandbox forbids them (run.c). One
 * thread. */
#include "common/text/jinja/run.h"
#include <math.h>

// ---- calls --------------------------------------------------------------------------------------

static bool has_sign(const struct builtin *f, char sign)
{
    return memchr(f->params, sign, strspn(f->params, BUILTIN_SIGNS));
}

static void bind(struct run *r, const struct builtin *f, const struct arguments *a, struct value *v)
{
    const char *params = builtin_params(f);
    size_t n = *params != 0;
    for (const char *p = params; *p; p++) n += *p == ' ';
    if (a->positional.n > n)
        fail(r, "%.*s() takes at most %zu arguments (%zu given)", NAME(f), n, a->positional.n);
    if (has_sign(f, '/') && a->named.n > 0) fail(r, "%.*s() takes no keyword arguments", NAME(f));
    for (size_t i = 0; i < a->positional.n; i++) v[i] = a->positional.items[i];
    for (size_t i = 0; i < a->named.n; i++) {
        const struct string *name = a->named.entries[i].key.string;
        int at = string_word(name, params);
        if (at < 0)
            fail(r, "%.*s() got an unexpected keyword argument '%.*s'", NAME(f), SHOWN(name));
        if (given(v[at]))
            fail(r, "%.*s() got multiple values for argument '%.*s'", NAME(f), SHOWN(name));
        v[at] = a->named.entries[i].value;
    }
    for (int i = 0; i < f->n_required; i++)
        if (!given(v[i]))
            fail(r, "%.*s() is missing a required argument (\"%s\")", NAME(f), params);
}

struct generation {
    const struct call *call;
    struct value made;
};

static void generate(void *context)
{
    struct generation *g = context;
    g->made = g->call->function->call(g->call->run, g->call);
}

// A generator fails when somebody goes over it, not when it is made: its failure is kept for then.
// Limits are not kept.
static struct value call_generator(struct run *r, const struct call *c)
{
    struct generation g = {.call = c};
    struct run before = *r;
    enum status st = arena_try(&r->arena, generate, &g);
    if (st == ST_OK) return g.made;
    if (st != ST_INVALID || r->steps <= 0) arena_fail(&r->arena, st, "%s", status_message());
    r->depth = before.depth;
    r->at = before.at;
    r->text.len = before.text.len;
    const char *message = status_message();
    struct value failure = string_copy(&r->arena, message, strlen(message), false);
    struct value v = iterator_of(&r->arena, (struct list){.n = 0});
    v.iterator->failure = failure.string->data;
    return v;
}

struct value builtin_invoke(struct run *r, const struct builtin *f, struct value self,
                            const struct arguments *arguments)
{
    struct call c = {.run = r, .function = f, .all = arguments};
    run_deeper(r);
    c.v[0] = has_sign(f, '$') ? value_str(r, self) : self;
    if (!has_sign(f, '*')) bind(r, f, arguments, c.v + 1);
    struct value v = has_sign(f, '~') ? call_generator(r, &c) : f->call(r, &c);
    r->depth--;
    return v;
}

// ---- ends ---------------------------------------------------------------------------------------

BUILTIN(first)
{
    struct iterator *i = c->v[0].kind == V_ITERATOR ? c->v[0].iterator : NULL;
    if (i && i->at < i->items.n) return i->items.items[i->at++]; // takes no more than the one
    struct list items = value_items(r, c->v[0]);
    return items.n ? items.items[0] : undefined_because(r, "No first item, sequence was empty.");
}

BUILTIN(last)
{
    if (!of_kinds(c->v[0], SIZED) || c->v[0].kind == V_LOOP)
        fail(r, "'%s' object is not reversible", value_type(c->v[0]));
    struct list items = value_items(r, c->v[0]);
    return items.n ? items.items[items.n - 1]
                   : undefined_because(r, "No last item, sequence was empty.");
}

BUILTIN(length)
{
    return value_int(value_length(r, c->v[0]));
}

BUILTIN(list)
{
    return list_of(&r->arena, V_LIST, value_items(r, c->v[0]));
}

BUILTIN(reverse)
{
    const struct value backwards[3] = {NONE, NONE, value_int(-1)};
    if (c->v[0].kind == V_STRING) return get_slice(r, c->v[0], backwards);
    if (!of_kinds(c->v[0], ITERABLES)) type_fail(r, "argument must be iterable", c->v[0]);
    struct list items = items_copy(r, c->v[0]);
    items_reverse(items);
    return c->v[0].kind == V_ITERATOR ? list_of(&r->arena, V_LIST, items)
                                      : iterator_of(&r->arena, items);
}

BUILTIN(join)
{
    struct list items = value_items(r, c->v[0]);
    struct value between = given(c->v[1]) ? value_str(r, c->v[1]) : MISSING;
    size_t text = text_begin(r);
    for (size_t i = 0; i < items.n; i++) {
        struct value item = get_path(r, items.items[i], c->v[2], MISSING);
        if (i > 0 && given(between)) run_put_string(r, between.string);
        put_str(r, item);
    }
    return text_end(r, text, false);
}

BUILTIN(sum)
{
    struct list items = value_items(r, c->v[0]);
    struct value total = given(c->v[2]) ? c->v[2] : value_int(0);
    if (total.kind == V_STRING) fail(r, "sum() can't sum strings [use ''.join(seq) instead]");
    for (size_t i = 0; i < items.n; i++)
        total = arithmetic(r, T_ADD, total, get_path(r, items.items[i], c->v[1], MISSING));
    return total;
}

BUILTIN(items)
{
    struct value v = c->v[0];
    if (v.kind == V_UNDEFINED) return iterator_of(&r->arena, (struct list){.n = 0});
    if (v.kind != V_DICT) fail(r, "Can only get item pairs from a mapping.");
    return iterator_of(&r->arena, *dict_view(r, v.dict, V_ITEMS).list);
}

// ---- slices -------------------------------------------------------------------------------------

// Items [start, end) as a list, and behind them `fill` times parameter 2.
static struct value slice_of(const struct call *c, struct list items, size_t start, size_t end,
                             size_t fill)
{
    struct value slice = list_new(&c->run->arena, V_LIST, end - start + fill);
    for (size_t i = 0; i < slice.list->n; i++)
        slice.list->items[i] = start + i < end ? items.items[start + i] : c->v[2];
    return slice;
}

static struct list room_for(struct run *r, size_t n)
{
    return (struct list){.items = arena_array(&r->arena, n, sizeof(struct value))};
}

BUILTIN(batch)
{
    struct list items = value_items(r, c->v[0]);
    int64_t size = 0;
    if (!value_as_int(c->v[1], &size) && c->v[1].kind != V_FLOAT)
        type_fail(r, "batch wants a number", c->v[1]);
    if (size <= 0) size = items.n ? (int64_t)items.n : 1; // never full
    size_t each = (size_t)size;
    struct list batches = room_for(r, items.n / each + 1);
    for (size_t at = 0; at < items.n; at += each) {
        size_t end = items.n - at < each ? items.n : at + each;
        size_t fill = arg_given(c, 2) ? each - (end - at) : 0;
        batches.items[batches.n++] = slice_of(c, items, at, end, fill);
    }
    return iterator_of(&r->arena, batches);
}

BUILTIN(slice)
{
    struct list items = value_items(r, c->v[0]);
    int64_t number = 0;
    if (!value_as_int(c->v[1], &number)) type_fail(r, "slice wants a whole number", c->v[1]);
    if (number == 0) fail(r, "integer division or modulo by zero");
    size_t n = number < 0 ? 0 : (size_t)number, at = 0;
    run_steps(r, n);
    struct list slices = room_for(r, n);
    while (slices.n < n) {
        bool longer = slices.n < items.n % n;
        size_t end = at + items.n / n + longer;
        slices.items[slices.n++] = slice_of(c, items, at, end, arg_given(c, 2) && !longer);
        at = end;
    }
    return iterator_of(&r->arena, slices);
}

// ---- map, select and the like -------------------------------------------------------------------

static struct value named(const struct call *c, const char *name)
{
    struct string key = {name, strlen(name), strlen(name), false};
    return dict_find(c->run, &c->all->named, value_string(&key));
}

// A filter or a test of an item: argument n is its name, those behind it are its own.
static struct value apply_named(const struct call *c, size_t n, bool is_test, struct value item)
{
    const struct arguments *all = c->all;
    const char *kind = is_test ? "test" : "filter";
    const struct string *name = need_string(c->run, all->positional.items[n], kind);
    const struct builtin *f = builtin_find(c->run->builtins, is_test ? TEST : FILTER, name);
    struct arguments behind = {
        {.items = all->positional.items + n + 1, .n = all->positional.n - n - 1}, all->named};
    if (!f) fail(c->run, "No %s named '%.*s'.", kind, SHOWN(name));
    return builtin_invoke(c->run, f, item, &behind);
}

static struct value map_item(const struct call *c, struct value item)
{
    const struct arguments *all = c->all;
    struct value attribute = named(c, "attribute");
    if (all->positional.n > 0) return apply_named(c, 0, false, item);
    if (!given(attribute)) fail(c->run, "map requires a filter argument");
    for (size_t i = 0; i < all->named.n; i++)
        if (string_word(all->named.entries[i].key.string, "attribute default") < 0)
            fail(c->run, "Unexpected keyword argument '%.*s'",
                 SHOWN(all->named.entries[i].key.string));
    return get_path(c->run, item, attribute, named(c, "default"));
}

BUILTIN(map)
{
    struct list mapped = {.n = 0};
    if (value_truth(r, c->v[0])) mapped = items_copy(r, c->v[0]);
    for (size_t i = 0; i < mapped.n; i++) mapped.items[i] = map_item(c, mapped.items[i]);
    return iterator_of(&r->arena, mapped);
}

enum { REJECT = 1, BY_ATTRIBUTE = 2 };

static bool is_selected(const struct call *c, struct value item)
{
    size_t n = 0;
    if (c->function->which & BY_ATTRIBUTE)
        item = get_path(c->run, item, c->all->positional.items[n++], MISSING);
    if (c->all->positional.n == n) return value_truth(c->run, item);
    return apply_named(c, n, true, item).truth;
}

// which: REJECT, BY_ATTRIBUTE
BUILTIN(select_items)
{
    struct list items = {.n = 0};
    if (value_truth(r, c->v[0])) {
        if (c->function->which & BY_ATTRIBUTE && c->all->positional.n == 0)
            fail(r, "Missing parameter for attribute name");
        items = items_copy(r, c->v[0]);
    }
    struct list kept = {.items = items.items};
    for (size_t i = 0; i < items.n; i++)
        if (is_selected(c, items.items[i]) != (c->function->which & REJECT))
            kept.items[kept.n++] = items.items[i];
    return iterator_of(&r->arena, kept);
}

// ---- order: filters that order, compare and group items by a key --------------------------------

// What items are compared by.
struct key {
    struct value path, otherwise;
    bool sensitive; // to case; else strings are compared in lower case
    bool several;   // the path may name several ("a,b.c")
};

static struct value item_key(struct run *r, struct value item, struct value path,
                             const struct key *by)
{
    struct value key = get_path(r, item, path, by->otherwise);
    return key.kind == V_STRING && !by->sensitive ? string_lower(r, key.string) : key;
}

// The items, each under its key.
static struct dict keyed(struct run *r, struct value of, const struct key *by)
{
    static const struct string comma = {",", 1, 1, false};
    struct list items = value_items(r, of), paths = {.n = 0};
    struct dict d = *dict_new(&r->arena, items.n).dict;
    bool several = by->several && by->path.kind == V_STRING;
    if (several) paths = split_string(r, by->path.string, &comma, -1, false);
    for (size_t i = 0; i < items.n; i++) {
        struct value key = several ? list_new(&r->arena, V_LIST, paths.n)
                                   : item_key(r, items.items[i], by->path, by);
        for (size_t k = 0; k < paths.n; k++)
            key.list->items[k] = item_key(r, items.items[i], paths.items[k], by);
        dict_append(&r->arena, &d, key, items.items[i]);
    }
    return d;
}

static struct value sorted(struct run *r, struct value of, const struct key *by, bool backwards)
{
    struct dict d = keyed(r, of, by);
    entries_sort(r, &d, backwards);
    return list_of(&r->arena, V_LIST, *dict_view(r, &d, V_VALUES).list);
}

BUILTIN(sort)
{
    const struct key by = {c->v[3], MISSING, arg_truth(c, 2, false), true};
    return sorted(r, c->v[0], &by, arg_truth(c, 1, false));
}

BUILTIN(dictsort)
{
    bool by_value = value_is(c->v[2], "value");
    const struct key by = {value_int(by_value), MISSING, arg_truth(c, 1, false), false};
    if (c->v[0].kind != V_DICT) type_fail(r, "dictsort wants a mapping", c->v[0]);
    if (given(c->v[2]) && !by_value && !value_is(c->v[2], "key"))
        fail(r, "You can only sort by either \"key\" or \"value\"");
    struct value items = dict_view(r, c->v[0].dict, V_ITEMS);
    return sorted(r, items, &by, arg_truth(c, 3, false));
}

// which: T_LT for the least, T_GT for the most
BUILTIN(extreme)
{
    const struct key by = {c->v[2], MISSING, arg_truth(c, 1, false), false};
    struct dict d = keyed(r, c->v[0], &by);
    const struct dict_entry *best = d.entries;
    if (d.n == 0) return undefined_because(r, "No aggregated item, sequence was empty.");
    for (const struct dict_entry *e = d.entries; e < d.entries + d.n; e++)
        if (e != best && value_compare(r, c->function->which, e->key, best->key)) best = e;
    return best->value;
}

BUILTIN(unique)
{
    const struct key by = {c->v[2], MISSING, arg_truth(c, 1, false), false};
    struct dict d = keyed(r, c->v[0], &by), *seen = dict_new(&r->arena, 8).dict;
    for (size_t i = 0; i < d.n; i++)
        if (!given(dict_find(r, seen, d.entries[i].key)))
            dict_append(&r->arena, seen, d.entries[i].key, d.entries[i].value);
    return iterator_of(&r->arena, *dict_view(r, seen, V_VALUES).list);
}

// Pairs of key and items; the key as the first item of its group has it.
BUILTIN(groupby)
{
    const struct key by = {c->v[1], c->v[2], arg_truth(c, 3, false), false};
    struct dict d = keyed(r, c->v[0], &by);
    entries_sort(r, &d, false);
    struct value items = dict_view(r, &d, V_VALUES);
    struct list found = {.items = arena_array(&r->arena, d.n, sizeof *found.items)};
    for (size_t start = 0, end; start < d.n; start = end) {
        end = start + 1;
        while (end < d.n && value_equal(r, d.entries[start].key, d.entries[end].key)) end++;
        struct list members = {.items = items.list->items + start, .n = end - start};
        struct value pair = pair_of(&r->arena, get_path(r, members.items[0], c->v[1], c->v[2]),
                                    list_of(&r->arena, V_LIST, members));
        struct list group = {pair.list->items, 2, .group = true};
        found.items[found.n++] = list_of(&r->arena, V_TUPLE, group);
    }
    return list_of(&r->arena, V_LIST, found);
}

// ---- methods ------------------------------------------------------------------------------------

BUILTIN(count)
{
    struct list items = value_items(r, c->v[0]);
    int64_t n = 0;
    for (size_t i = 0; i < items.n; i++) n += value_equal(r, items.items[i], c->v[1]);
    return value_int(n);
}

BUILTIN(index_of)
{
    struct list items = value_items(r, c->v[0]);
    int64_t start, end;
    arg_window(c, (int64_t)items.n, &start, &end);
    for (int64_t i = start; i < end; i++)
        if (value_equal(r, items.items[i], c->v[1])) return value_int(i);
    fail(r, "the value is not in the %s", value_type(c->v[0]));
}

// A copy, as nothing changes either; or the text that it was made.
BUILTIN(itself)
{
    return c->v[0];
}

BUILTIN(get)
{
    struct value v = dict_find(r, c->v[0].dict, c->v[1]);
    return given(v) ? v : given(c->v[2]) ? c->v[2] : NONE;
}

BUILTIN(view)
{
    return dict_view(r, c->v[0].dict, (enum value_kind)c->function->which);
}

BUILTIN(is_integer)
{
    return value_bool(isfinite(c->v[0].real) && floor(c->v[0].real) == c->v[0].real);
}

BUILTIN(bit_length)
{
    int64_t x = 0, n = 0;
    value_as_int(c->v[0], &x);
    for (uint64_t size = x < 0 ? 0 - (uint64_t)x : (uint64_t)x; size > 0; size >>= 1) n++;
    return value_int(n);
}

BUILTIN(next)
{
    struct iterator *cycler = c->v[0].iterator;
    struct value v = cycler->items.items[cycler->at];
    cycler->at = (cycler->at + 1) % cycler->items.n;
    return v;
}

BUILTIN(reset)
{
    c->v[0].iterator->at = 0;
    return NONE;
}

BUILTIN(loop_changed)
{
    struct loop *l = c->v[0].loop;
    struct value now = list_of(&r->arena, V_TUPLE, c->all->positional);
    bool same = given(l->last_changed) && value_equal(r, l->last_changed, now);
    l->last_changed = now;
    return value_bool(!same);
}

BUILTIN(loop_cycle)
{
    size_t n = c->all->positional.n;
    if (n == 0) fail(r, "no items for cycling given");
    return c->all->positional.items[(size_t)c->v[0].loop->index0 % n];
}

// ---- tests: what may stand behind `is` ----------------------------------------------------------

// which: a set of kinds
BUILTIN(is_of_kind)
{
    return value_bool(c->function->which >> c->v[0].kind & 1);
}

// which: true or false
BUILTIN(is_truth)
{
    return value_bool(c->v[0].kind == V_BOOL && c->v[0].truth == c->function->which);
}

BUILTIN(is_escaped)
{
    return value_bool(c->v[0].kind == V_STRING && c->v[0].string->markup);
}

// The same object. Numbers and texts of one value count as one here, whatever Python does.
BUILTIN(is_same)
{
    struct value a = c->v[0], b = c->v[1];
    if (a.kind != b.kind) return value_bool(false);
    return value_bool(a.kind <= V_STRING ? value_equal(r, a, b) : a.list == b.list);
}

// which: the remainder, by parameter 1 or by two
BUILTIN(has_remainder)
{
    struct value by = given(c->v[1]) ? c->v[1] : value_int(2);
    return value_bool(
        value_equal(r, arithmetic(r, T_MOD, c->v[0], by), value_int(c->function->which)));
}

// which: the operator
BUILTIN(is_compared)
{
    return value_bool(value_compare(r, c->function->which, c->v[0], c->v[1]));
}

// which: FILTER or TEST
BUILTIN(is_known)
{
    return value_bool(c->v[0].kind == V_STRING &&
                      builtin_find(r->builtins, c->function->which, c->v[0].string));
}

// ---- functions ----------------------------------------------------------------------------------

BUILTIN(raise_exception)
{
    const struct string *text = value_str(r, c->v[1]).string;
    size_t n = text->n_bytes;
    fail(r, "%.*s", (int)(n < 1500 ? n : 1500), text->data);
}

BUILTIN(range)
{
    int64_t bound[3] = {0, 0, 1};
    for (int i = 0; i < 3; i++)
        if (given(c->v[i + 1]) && !value_as_int(c->v[i + 1], &bound[i]))
            type_fail(r, "range() wants whole numbers", c->v[i + 1]);
    if (!given(c->v[2])) return range_make(r, 0, bound[0], 1);
    return range_make(r, bound[0], bound[1], bound[2]);
}

BUILTIN(dict)
{
    const struct arguments *all = c->all;
    struct value d = dict_new(&r->arena, 4);
    if (all->positional.n > 1)
        fail(r, "dict expected at most 1 argument, got %zu", all->positional.n);
    struct value from = all->positional.n == 1 ? all->positional.items[0] : d; // a dict or pairs
    if (from.kind == V_DICT) from = dict_view(r, from.dict, V_ITEMS);
    struct list pairs = value_items(r, from);
    for (size_t i = 0; i < pairs.n; i++) {
        struct list pair = value_items(r, pairs.items[i]);
        if (pair.n != 2)
            fail(r, "dictionary update sequence element #%zu has length %zu; 2 is required", i,
                 pair.n);
        dict_set(r, d.dict, pair.items[0], pair.items[1]);
    }
    for (size_t i = 0; i < all->named.n; i++)
        dict_set(r, d.dict, all->named.entries[i].key, all->named.entries[i].value);
    return d;
}

BUILTIN(namespace)
{
    struct value space = dict(r, c);
    for (size_t i = 0; i < space.dict->n; i++) {
        struct value key = space.dict->entries[i].key;
        if (key.kind == V_STRING && key.string->n_bytes > 0 && key.string->data[0] == '_')
            fail(r, "Chat templates cannot store underscore-prefixed attributes on a namespace");
    }
    space.kind = V_NAMESPACE;
    return space;
}

BUILTIN(cycler)
{
    const struct arguments *all = c->all;
    if (all->positional.n == 0) fail(r, "at least one item has to be provided");
    if (all->named.n > 0) fail(r, "cycler() takes no keyword arguments");
    struct value v = iterator_of(&r->arena, all->positional);
    v.kind = V_CYCLER;
    return v;
}

BUILTIN(joiner)
{
    struct value separator = list_new(&r->arena, V_LIST, 1);
    separator.list->items[0] = given(c->v[1]) ? c->v[1] : string_of(&r->arena, ", ");
    struct value v = iterator_of(&r->arena, *separator.list);
    v.kind = V_JOINER;
    return v;
}

// ---- the clock ----------------------------------------------------------------------------------

// One item of strftime's: "%", flags ("-", "_", "0", "^", "#"), a width, one letter. Its end.
static const char *put_time(struct run *r, const char *mark, const char *end, const struct tm *tm,
                            long microseconds)
{
    char text[300], item[12];
    size_t n = 1;
    while (n < 8 && mark + n < end && strchr("-_0^#:EO123456789", mark[n]) && mark[n]) n++;
    n += mark + n < end;
    memcpy(item, mark, n);
    item[n] = 0;
    bool whole = n > 1 && strlen(item) == n;
    if (whole) run_steps(r, 8);
    if (!whole)
        run_put(r, mark, n);
    else if (strcmp(item, "%f") == 0)
        run_printf(r, "%06ld", microseconds);
    else if (item[n - 1] != 'z' && item[n - 1] != 'Z') // a time without a zone
        run_put(r, text, strftime(text, sizeof text, item, tm));
    return mark + n;
}

BUILTIN(strftime_now)
{
    const struct string *format = arg_string(c, 1);
    struct timespec now = {0, 0};
    struct tm tm;
    if (r->now)
        tm = *r->now;
    else if (clock_gettime(CLOCK_REALTIME, &now) != 0 || !localtime_r(&now.tv_sec, &tm))
        arena_fail(&r->arena, ST_IO, "the clock cannot be read");
    size_t text = text_begin(r);
    const char *at = format->data, *end = at + format->n_bytes;
    while (at < end) {
        const char *mark = memchr(at, '%', (size_t)(end - at));
        run_put(r, at, (size_t)((mark ? mark : end) - at));
        at = mark ? put_time(r, mark, end, &tm, now.tv_nsec / 1000) : end;
    }
    return text_end(r, text, false);
}

// ---- any value ----------------------------------------------------------------------------------

BUILTIN(default_value)
{
    bool by_truth = arg_truth(c, 2, false), truth = value_truth(r, c->v[0]);
    if (c->v[0].kind != V_UNDEFINED && (truth || !by_truth)) return c->v[0];
    return given(c->v[1]) ? c->v[1] : string_of(&r->arena, "");
}

BUILTIN(attr)
{
    const struct string *name = arg_string(c, 1);
    if (c->v[0].kind != V_DICT || builtin_find(r->builtins, METHOD(V_DICT), name))
        return get_attribute(r, c->v[0], name);
    return undefined_item(r, c->v[0], c->v[1]); // an item is not an attribute
}

#define CALLABLES                                                                                  \
    (KIND(V_MACRO) | KIND(V_FUNCTION) | KIND(V_METHOD) | KIND(V_JOINER) | KIND(V_LOOP) |           \
     KIND(V_UNDEFINED))

const struct builtin value_builtins[] = {
    {FILTER, "default d", default_value, 0, "default_value boolean", 0},
    {FILTER, "attr", attr, 0, "name", 1},
    {FILTER, "first", first, 0, "", 0},
    {FILTER, "last", last, 0, "", 0},
    {FILTER, "length count", length, 0, "", 0},
    {FILTER, "list", list, 0, "", 0},
    {FILTER, "reverse", reverse, 0, "", 0},
    {FILTER, "join", join, 0, "d attribute", 0},
    {FILTER, "sum", sum, 0, "attribute start", 0},
    {FILTER, "items", items, 0, "~", 0},
    {FILTER, "batch", batch, 0, "~linecount fill_with", 1},
    {FILTER, "slice", slice, 0, "~slices fill_with", 1},
    {FILTER, "map", map, 0, "~*", 0},
    {FILTER, "select", select_items, 0, "~*", 0},
    {FILTER, "reject", select_items, REJECT, "~*", 0},
    {FILTER, "selectattr", select_items, BY_ATTRIBUTE, "~*", 0},
    {FILTER, "rejectattr", select_items, BY_ATTRIBUTE | REJECT, "~*", 0},
    {FILTER, "sort", sort, 0, "reverse case_sensitive attribute", 0},
    {FILTER, "dictsort", dictsort, 0, "case_sensitive by reverse", 0},
    {FILTER, "min", extreme, T_LT, "case_sensitive attribute", 0},
    {FILTER, "max", extreme, T_GT, "case_sensitive attribute", 0},
    {FILTER, "unique", unique, 0, "~case_sensitive attribute", 0},
    {FILTER, "groupby", groupby, 0, "attribute default case_sensitive", 1},
    {METHODS(PLACES & ~KIND(V_STRING)), "count", count, 0, "/value", 1},
    {METHODS(PLACES & ~KIND(V_STRING)), "index", index_of, 0, "/value start stop", 1},
    {METHODS(KIND(V_LIST) | KIND(V_DICT)), "copy", itself, 0, "", 0},
    {FILTER, "string", itself, 0, "$", 0},
    {METHOD(V_DICT), "get", get, 0, "/key default", 1},
    {METHOD(V_DICT), "items", view, V_ITEMS, "", 0},
    {METHOD(V_DICT), "keys", view, V_KEYS, "", 0},
    {METHOD(V_DICT), "values", view, V_VALUES, "", 0},
    {METHOD(V_FLOAT), "is_integer", is_integer, 0, "", 0},
    {METHODS(KIND(V_INT) | KIND(V_BOOL)), "bit_length", bit_length, 0, "", 0},
    {METHOD(V_CYCLER), "next", next, 0, "", 0},
    {METHOD(V_CYCLER), "reset", reset, 0, "", 0},
    {TEST, "defined", is_of_kind, (int)~KIND(V_UNDEFINED), "", 0},
    {TEST, "undefined", is_of_kind, KIND(V_UNDEFINED), "", 0},
    {TEST, "none", is_of_kind, KIND(V_NONE), "", 0},
    {TEST, "boolean", is_of_kind, KIND(V_BOOL), "", 0},
    {TEST, "true", is_truth, true, "", 0},
    {TEST, "false", is_truth, false, "", 0},
    {TEST, "integer", is_of_kind, KIND(V_INT), "", 0},
    {TEST, "float", is_of_kind, KIND(V_FLOAT), "", 0},
    {TEST, "number", is_of_kind, NUMBERS, "", 0},
    {TEST, "string", is_of_kind, KIND(V_STRING), "", 0},
    {TEST, "mapping", is_of_kind, KIND(V_DICT), "", 0},
    {TEST, "iterable", is_of_kind, ITERABLES, "", 0},
    {TEST, "sequence", is_of_kind, PLACES | KIND(V_UNDEFINED) | KIND(V_DICT), "", 0},
    {TEST, "escaped", is_escaped, 0, "", 0},
    {TEST, "callable", is_of_kind, CALLABLES, "", 0},
    {TEST, "sameas", is_same, 0, "other", 1},
    {TEST, "odd", has_remainder, 1, "", 0},
    {TEST, "even", has_remainder, 0, "", 0},
    {TEST, "divisibleby", has_remainder, 0, "num", 1},
    {TEST, "eq equalto ==", is_compared, T_EQ, "/other", 1},
    {TEST, "ne !=", is_compared, T_NE, "/other", 1},
    {TEST, "gt greaterthan >", is_compared, T_GT, "/other", 1},
    {TEST, "ge >=", is_compared, T_GE, "/other", 1},
    {TEST, "lt lessthan <", is_compared, T_LT, "/other", 1},
    {TEST, "le <=", is_compared, T_LE, "/other", 1},
    {TEST, "in", is_compared, OP_IN, "seq", 1},
    {TEST, "filter", is_known, FILTER, "", 0},
    {TEST, "test", is_known, TEST, "", 0},
    {FUNCTION, "raise_exception", raise_exception, 0, "message", 1},
    {FUNCTION, "strftime_now", strftime_now, 0, "format", 1},
    {FUNCTION, "range", range, 0, "/start stop step", 1},
    {FUNCTION, "dict", dict, 0, "*", 0},
    {FUNCTION, "namespace", namespace, 0, "*", 0},
    {FUNCTION, "cycler", cycler, 0, "*", 0},
    {FUNCTION, "joiner", joiner, 0, "sep", 0},
    {METHOD(V_LOOP), "cycle", loop_cycle, 0, "*", 0},
    {METHOD(V_LOOP), "changed", loop_changed, 0, "*", 0},
    {.name = NULL},
};
