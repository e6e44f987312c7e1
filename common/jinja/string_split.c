/* string_split.c: str's methods between one text and many (split, partition, join), and those that
 * fill up to a width. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"

// ---- split --------------------------------------------------------------------------------------

struct parts { // a list that grows
    struct run *run;
    const struct string *of;
    struct list list;
    size_t cap;
};

static void add_part(struct parts *p, size_t start, size_t end)
{
    struct list *list = &p->list;
    run_steps(p->run, 1);
    list->items = arena_room(&p->run->arena, list->items, list->n, &p->cap, sizeof *list->items);
    list->items[list->n++] = string_part(p->run, p->of, start, end);
}

static void split_at(struct parts *p, const struct string *by, int64_t max)
{
    const struct string *s = p->of;
    size_t start = 0;
    while (max-- != 0) {
        const char *found = memmem(s->data + start, s->n_bytes - start, by->data, by->n_bytes);
        if (!found) break;
        add_part(p, start, (size_t)(found - s->data));
        start = (size_t)(found - s->data) + by->n_bytes;
    }
    add_part(p, start, s->n_bytes);
}

static void split_at_spaces(struct parts *p, int64_t max)
{
    const struct string *s = p->of;
    size_t at = text_leading_spaces(s->data, s->n_bytes);
    while (at < s->n_bytes) {
        size_t end = at, next = at;
        if (max-- == 0) end = s->n_bytes; // the last part: all that is left
        while (end < s->n_bytes && !text_is(utf8_next(s->data, s->n_bytes, &next), TEXT_SPACE))
            end = next;
        add_part(p, at, end);
        at = end + text_leading_spaces(s->data + end, s->n_bytes - end);
    }
}

// The parts from the last one backwards.
static void split_from_end(struct parts *p, const struct string *by, int64_t max)
{
    const struct string *s = p->of;
    size_t end = s->n_bytes;
    while (max-- != 0) {
        const char *found = string_find_last(p->run, s->data, end, by);
        if (!found) break;
        add_part(p, (size_t)(found - s->data) + by->n_bytes, end);
        end = (size_t)(found - s->data);
    }
    add_part(p, 0, end);
    items_reverse(p->list);
}

// Those before the last `max` are one, with the white space between and before them.
static void join_first(struct parts *p, int64_t max)
{
    if (max < 0 || (size_t)max >= p->list.n) return;
    size_t one = p->list.n - (size_t)max - 1;
    const struct string *last = p->list.items[one].string;
    size_t end = (size_t)(last->data - p->of->data) + last->n_bytes;
    p->list.items[one] = string_part(p->run, p->of, 0, end);
    p->list.items += one;
    p->list.n -= one;
}

static struct list split_either(struct run *r, const struct string *s, const struct string *by,
                                int64_t max, bool from_end)
{
    struct parts p = {.run = r, .of = s};
    run_bytes(r, s->n_bytes);
    if (!by)
        split_at_spaces(&p, from_end ? -1 : max);
    else
        (from_end ? split_from_end : split_at)(&p, by, max);
    if (!by && from_end) join_first(&p, max);
    return p.list;
}

struct list split_string(struct run *r, const struct string *s, const struct string *by,
                         int64_t max)
{
    return split_either(r, s, by, max, false);
}

static const struct string *separator(const struct call *c)
{
    const struct string *by = arg_string(c, 1);
    if (by->n_bytes == 0) fail(c->run, "empty separator");
    return by;
}

enum { AT_START, AT_END };

// sep, maxsplit; which: AT_START or AT_END, where it begins
BUILTIN(split)
{
    const struct string *by = arg_given(c, 1) ? separator(c) : NULL;
    int64_t max = arg_int(c, 2, -1);
    return list_of(
        &r->arena, V_LIST,
        split_either(r, c->v[0].string, by, max < 0 ? -1 : max, c->function->which == AT_END));
}

struct list split_lines(struct run *r, const struct string *s, bool keep_ends)
{
    struct parts p = {.run = r, .of = s};
    run_bytes(r, s->n_bytes);
    for (size_t start = 0, at = 0; at < s->n_bytes;) {
        size_t end = at;
        uint32_t c = utf8_next(s->data, s->n_bytes, &at);
        bool line_end = text_is(c, TEXT_LINE_END);
        if (c == '\r' && at < s->n_bytes && s->data[at] == '\n') at++;
        if (!line_end && at < s->n_bytes) continue;
        add_part(&p, start, keep_ends || !line_end ? at : end);
        start = at;
    }
    return p.list;
}

BUILTIN(splitlines)
{
    return list_of(&r->arena, V_LIST, split_lines(r, c->v[0].string, arg_truth(c, 1, false)));
}

// sep; which: AT_START or AT_END
BUILTIN(partition)
{
    const struct string *s = c->v[0].string, *by = separator(c);
    bool last = c->function->which == AT_END;
    run_bytes(r, s->n_bytes);
    const char *found = last ? string_find_last(r, s->data, s->n_bytes, by)
                             : memmem(s->data, s->n_bytes, by->data, by->n_bytes);
    size_t at = found ? (size_t)(found - s->data) : last ? 0 : s->n_bytes;
    size_t after = found ? at + by->n_bytes : at;
    struct value v = list_new(&r->arena, V_TUPLE, 3);
    v.list->items[0] = string_part(r, s, 0, at);
    v.list->items[1] = string_part(r, s, at, after);
    v.list->items[2] = string_part(r, s, after, s->n_bytes);
    return v;
}

BUILTIN(join)
{
    const struct string *s = c->v[0].string;
    struct list items = value_items(r, c->v[1]);
    size_t text = text_begin(r);
    for (size_t i = 0; i < items.n; i++) {
        struct value item = items.items[i];
        if (item.kind != V_STRING)
            fail(r, "sequence item %zu: expected str instance, %s found", i, value_type(item));
        if (s->markup) item = value_escape(r, item);
        if (i > 0) run_put_string(r, s);
        run_put_string(r, item.string);
    }
    return text_end(r, text, s->markup);
}

// ---- fill ---------------------------------------------------------------------------------------

// Characters that are wanting to the width in parameter 1.
static int64_t wanting(const struct call *c)
{
    int64_t width = given(c->v[1]) ? arg_int(c, 1, 0) : 80; // the filter's default
    int64_t n = (int64_t)c->v[0].string->n_chars;
    if (width > INT32_MAX)
        arena_fail(&c->run->arena, ST_NO_MEMORY, "a width of that size is too much");
    return width > n ? width - n : 0;
}

enum { PAD_LEFT = 1, PAD_RIGHT = 2 };

// width, fillchar; which: PAD_LEFT, PAD_RIGHT or both
BUILTIN(pad)
{
    const struct string *s = c->v[0].string;
    static const struct string blank = {" ", 1, 1, false};
    const struct string *fill = given(c->v[2]) ? arg_string(c, 2) : &blank;
    int64_t n = wanting(c), left = c->function->which & PAD_LEFT ? n : 0;
    if (fill->n_chars != 1) fail(r, "The fill character must be exactly one character long");
    if (c->function->which == (PAD_LEFT | PAD_RIGHT))
        left = n / 2 + (n & (n + (int64_t)s->n_chars) & 1);
    size_t text = text_begin(r);
    run_fill(r, fill->data, fill->n_bytes, left);
    run_put_string(r, s);
    run_fill(r, fill->data, fill->n_bytes, n - left);
    return text_end(r, text, s->markup);
}

BUILTIN(zfill)
{
    const struct string *s = c->v[0].string;
    int64_t n = wanting(c);
    size_t sign = s->n_bytes > 0 && (s->data[0] == '-' || s->data[0] == '+');
    size_t text = text_begin(r);
    run_put(r, s->data, sign);
    run_fill(r, "0", 1, n);
    run_put(r, s->data + sign, s->n_bytes - sign);
    return text_end(r, text, s->markup);
}

BUILTIN(expandtabs)
{
    const struct string *s = c->v[0].string;
    int64_t size = arg_int(c, 1, 8), column = 0;
    size_t text = text_begin(r);
    if (size > 1000) size = 1000;
    run_bytes(r, s->n_bytes);
    for (size_t at = 0; at < s->n_bytes;) {
        size_t start = at;
        uint32_t character = utf8_next(s->data, s->n_bytes, &at);
        if (character == '\t') {
            int64_t spaces = size > 0 ? size - column % size : 0;
            run_fill(r, " ", 1, spaces);
            column += spaces;
        } else {
            run_put(r, s->data + start, at - start);
            column = character == '\n' || character == '\r' ? 0 : column + 1;
        }
    }
    return text_end(r, text, s->markup);
}

#define STRING METHOD(V_STRING)

const struct builtin split_builtins[] = {
    {STRING, "split", split, AT_START, "sep maxsplit", 0},
    {STRING, "rsplit", split, AT_END, "sep maxsplit", 0},
    {STRING, "splitlines", splitlines, 0, "keepends", 0},
    {STRING, "partition", partition, AT_START, "/sep", 1},
    {STRING, "rpartition", partition, AT_END, "/sep", 1},
    {STRING, "join", join, 0, "/iterable", 1},
    {STRING, "center", pad, PAD_LEFT | PAD_RIGHT, "/width fillchar", 1},
    {FILTER, "center", pad, PAD_LEFT | PAD_RIGHT, "$width", 0},
    {STRING, "ljust", pad, PAD_RIGHT, "/width fillchar", 1},
    {STRING, "rjust", pad, PAD_LEFT, "/width fillchar", 1},
    {STRING, "zfill", zfill, 0, "/width", 1},
    {STRING, "expandtabs", expandtabs, 0, "tabsize", 0},
    {.name = NULL},
};
