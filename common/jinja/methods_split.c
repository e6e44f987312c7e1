/* methods_split.c: str's methods between one text and many: split, partition, join. One thread. */
#include "common/jinja/methods_string.h"
#include "common/jinja/text.h"

// ---- split and join -----------------------------------------------------------------------------

struct parts { // a list that grows
    struct run *run;
    const struct value *of;
    struct value *items;
    size_t n, cap;
};

static enum status add_part(struct parts *p, size_t start, size_t end)
{
    if (p->n == p->cap) {
        size_t cap = p->cap ? 2 * p->cap : 8;
        struct value *larger = arena_array(&p->run->arena, cap, sizeof *larger);
        if (!larger) return ST_NO_MEMORY;
        if (p->n > 0) memcpy(larger, p->items, p->n * sizeof *larger);
        p->items = larger;
        p->cap = cap;
    }
    enum status st = run_steps(p->run, 1);
    return st == ST_OK ? string_part(p->run, p->of, start, end, &p->items[p->n++]) : st;
}

static enum status split_at(struct parts *p, const struct string *by, int64_t most)
{
    const struct string *s = self(p->of);
    size_t start = 0;
    enum status st = ST_OK;
    while (st == ST_OK && most-- != 0) {
        const char *found = memmem(s->data + start, s->n_bytes - start, by->data, by->n_bytes);
        if (!found) break;
        st = add_part(p, start, (size_t)(found - s->data));
        start = (size_t)(found - s->data) + by->n_bytes;
    }
    return st == ST_OK ? add_part(p, start, s->n_bytes) : st;
}

static enum status split_at_spaces(struct parts *p, int64_t most)
{
    const struct string *s = self(p->of);
    enum status st = ST_OK;
    size_t at = text_leading_spaces(s->data, s->n_bytes);
    int n;
    while (st == ST_OK && at < s->n_bytes) {
        size_t end = at;
        if (most-- == 0) // the last part: all that is left
            end = s->n_bytes;
        while (end < s->n_bytes && !text_is_space(text_char(s->data + end, s->n_bytes - end, &n)))
            end += (size_t)n;
        st = add_part(p, at, end);
        at = end + text_leading_spaces(s->data + end, s->n_bytes - end);
    }
    return st;
}

static void reverse(struct parts *p)
{
    for (size_t i = 0; i < p->n / 2; i++) {
        struct value swap = p->items[i];
        p->items[i] = p->items[p->n - 1 - i];
        p->items[p->n - 1 - i] = swap;
    }
}

static enum status split_from_end(struct parts *p, const struct string *by, int64_t most)
{
    const struct string *s = self(p->of);
    size_t end = s->n_bytes;
    enum status st = ST_OK;
    while (st == ST_OK && most-- != 0) {
        const char *found = string_find_last(s->data, end, by);
        if (!found) break;
        st = add_part(p, (size_t)(found - s->data) + by->n_bytes, end);
        end = (size_t)(found - s->data);
    }
    if (st == ST_OK) st = add_part(p, 0, end);
    reverse(p);
    return st;
}

static enum status split_spaces_from_end(struct parts *p, int64_t most)
{
    const struct string *s = self(p->of);
    size_t first = text_leading_spaces(s->data, s->n_bytes);
    size_t end = text_without_trailing_spaces(s->data, s->n_bytes);
    enum status st = ST_OK;
    int n;
    while (st == ST_OK && end > first) {
        size_t start = end;
        if (most-- == 0) {
            start = 0;
        } else {
            while (start > first) {
                size_t before = start - 1;
                while (before > first && ((unsigned char)s->data[before] & 0xc0) == 0x80) before--;
                if (text_is_space(text_char(s->data + before, end - before, &n))) break;
                start = before;
            }
        }
        st = add_part(p, start, end);
        end = text_without_trailing_spaces(s->data, start);
    }
    reverse(p);
    return st;
}

static enum status split_into(struct run *r, const struct value *v, bool from_end,
                              struct value *ret)
{
    struct parts p = {.run = r, .of = v};
    const struct string *by;
    int64_t most = -1;
    enum status st;
    CHECK(need_int(&v[2], "maxsplit", &most));
    if (most < 0) most = -1;
    CHECK(run_steps(r, self(v)->n_bytes >> 6));
    if (!given(&v[1]) || v[1].kind == V_NONE) {
        st = (from_end ? split_spaces_from_end : split_at_spaces)(&p, most);
    } else {
        CHECK(need_string(&v[1], "sep", &by));
        if (by->n_bytes == 0) return status_fail(ST_INVALID, "empty separator");
        st = (from_end ? split_from_end : split_at)(&p, by, most);
    }
    if (st == ST_OK) st = list_of(r, (struct list){.items = p.items, .n = p.n}, ret);
out:
    return st;
}

METHOD(split)
{
    (void)all;
    return split_into(r, v, false, ret);
}

METHOD(rsplit)
{
    (void)all;
    return split_into(r, v, true, ret);
}

METHOD(splitlines)
{
    const struct string *s = self(v);
    struct parts p = {.run = r, .of = v};
    bool keep = false;
    enum status st = ST_OK;
    int n;
    (void)all;
    if (given(&v[1])) CHECK(value_truth(r, &v[1], &keep));
    for (size_t start = 0, at = 0; at < s->n_bytes;) {
        uint32_t c = text_char(s->data + at, s->n_bytes - at, &n);
        size_t end = at;
        at += (size_t)n;
        bool line_end = text_is_line_end(c);
        if (c == '\r' && at < s->n_bytes && s->data[at] == '\n') at++;
        if (!line_end && at < s->n_bytes) continue;
        CHECK(add_part(&p, start, keep || !line_end ? at : end));
        start = at;
    }
    CHECK(run_steps(r, s->n_bytes >> 4));
    st = list_of(r, (struct list){.items = p.items, .n = p.n}, ret);
out:
    return st;
}

static enum status partition_at(struct run *r, const struct value *v, bool last, struct value *ret)
{
    const struct string *s = self(v), *by;
    struct value *items;
    enum status st;
    CHECK(need_string(&v[1], "sep", &by));
    if (by->n_bytes == 0) return status_fail(ST_INVALID, "empty separator");
    CHECK(run_steps(r, s->n_bytes >> 6));
    const char *found = last ? string_find_last(s->data, s->n_bytes, by)
                             : memmem(s->data, s->n_bytes, by->data, by->n_bytes);
    size_t at = found ? (size_t)(found - s->data) : last ? 0 : s->n_bytes;
    size_t after = found ? at + by->n_bytes : at;
    CHECK(list_make(&r->arena, V_TUPLE, 3, &items, ret));
    CHECK(string_part(r, v, 0, at, &items[0]));
    CHECK(string_part(r, v, at, after, &items[1]));
    CHECK(string_part(r, v, after, s->n_bytes, &items[2]));
out:
    return st;
}

METHOD(partition)
{
    (void)all;
    return partition_at(r, v, false, ret);
}

METHOD(rpartition)
{
    (void)all;
    return partition_at(r, v, true, ret);
}

METHOD(join)
{
    struct bytes text = BYTES_INIT;
    struct list items;
    enum status st = value_items(r, &v[1], &items);
    (void)all;
    for (size_t i = 0; st == ST_OK && i < items.n; i++) {
        struct value item = items.items[i];
        if (item.kind != V_STRING) {
            st = status_fail(ST_INVALID, "sequence item %zu: expected str instance, %s found", i,
                             value_type(&item));
            break;
        }
        if (self(v)->markup) st = value_escape(r, &item, &item);
        if (i > 0) run_put(r, &text, self(v)->data, self(v)->n_bytes);
        run_put(r, &text, item.string->data, item.string->n_bytes);
    }
    return string_take(r, v, st, &text, ret);
}
const struct builtin split_methods[] = {
    {"join", join, "/iterable", 1},        {"partition", partition, "/sep", 1},
    {"rpartition", rpartition, "/sep", 1}, {"rsplit", rsplit, "sep maxsplit", 0},
    {"split", split, "sep maxsplit", 0},   {"splitlines", splitlines, "keepends", 0},
};
const size_t n_split_methods = sizeof split_methods / sizeof *split_methods;
