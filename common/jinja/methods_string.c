/* methods_string.c: the methods of Python's str. v[0] is the string; results of markup are markup.
 * One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"

#define METHOD(name)                                                                               \
    static enum status name(struct run *r, const struct value *v, const struct arguments *all,     \
                            struct value *ret)

static const struct string *self(const struct value *v)
{
    return v[0].string;
}

static enum status part(struct run *r, const struct value *v, size_t start, size_t end,
                        struct value *ret)
{
    return string_like(r, self(v), self(v)->data + start, end - start, ret);
}

static enum status take_like(struct run *r, const struct value *v, enum status st,
                             struct bytes *built, struct value *ret)
{
    struct value plain;
    st = run_take(r, st, built, &plain);
    return st == ST_OK ? string_like(r, self(v), plain.string->data, plain.string->n_bytes, ret)
                       : st;
}

// ---- case ---------------------------------------------------------------------------------------

static enum status cased(struct run *r, const struct value *v, enum text_case to, struct value *ret)
{
    struct bytes text = BYTES_INIT;
    enum status st = run_steps(r, self(v)->n_bytes >> 4);
    if (st == ST_OK) text_put_case(self(v)->data, self(v)->n_bytes, to, &text);
    return take_like(r, v, st, &text, ret);
}

METHOD(upper)
{
    (void)all;
    return cased(r, v, CASE_UPPER, ret);
}

METHOD(lower)
{
    (void)all;
    return cased(r, v, CASE_LOWER, ret);
}

METHOD(capitalize)
{
    (void)all;
    return cased(r, v, CASE_CAPITALIZE, ret);
}

METHOD(title)
{
    (void)all;
    return cased(r, v, CASE_TITLE, ret);
}

METHOD(swapcase)
{
    (void)all;
    return cased(r, v, CASE_SWAP, ret);
}

METHOD(casefold)
{
    (void)all;
    return cased(r, v, CASE_FOLD, ret);
}

// ---- what it consists of ------------------------------------------------------------------------

static enum status has_case(struct run *r, const struct value *v, enum text_case which,
                            struct value *ret)
{
    *ret = value_bool(text_has_case(self(v)->data, self(v)->n_bytes, which));
    return run_steps(r, self(v)->n_bytes >> 4);
}

METHOD(islower_all)
{
    (void)all;
    return has_case(r, v, CASE_LOWER, ret);
}

METHOD(isupper_all)
{
    (void)all;
    return has_case(r, v, CASE_UPPER, ret);
}

METHOD(istitle_all)
{
    (void)all;
    return has_case(r, v, CASE_TITLE, ret);
}

enum { IS_SPACE = TEXT_ALNUM + 1, IS_PRINTABLE, IS_ASCII };

static enum status consists_of(struct run *r, const struct value *v, int of, struct value *ret)
{
    const struct string *s = self(v);
    bool all = s->n_bytes > 0 || of == IS_PRINTABLE || of == IS_ASCII;
    int n;
    for (size_t at = 0; all && at < s->n_bytes; at += (size_t)n) {
        uint32_t c = text_char(s->data + at, s->n_bytes - at, &n);
        all = of == IS_SPACE       ? text_is_space(c)
              : of == IS_PRINTABLE ? text_is_printable(c)
              : of == IS_ASCII     ? c < 0x80
                                   : text_is(c, (enum text_class)of);
    }
    *ret = value_bool(all);
    return run_steps(r, s->n_bytes >> 4);
}

METHOD(isalpha_all)
{
    (void)all;
    return consists_of(r, v, TEXT_ALPHA, ret);
}

METHOD(isalnum_all)
{
    (void)all;
    return consists_of(r, v, TEXT_ALNUM, ret);
}

METHOD(isdecimal_all)
{
    (void)all;
    return consists_of(r, v, TEXT_DECIMAL, ret);
}

METHOD(isdigit_all)
{
    (void)all;
    return consists_of(r, v, TEXT_DIGIT, ret);
}

METHOD(isnumeric_all)
{
    (void)all;
    return consists_of(r, v, TEXT_NUMERIC, ret);
}

METHOD(isspace_all)
{
    (void)all;
    return consists_of(r, v, IS_SPACE, ret);
}

METHOD(isprintable_all)
{
    (void)all;
    return consists_of(r, v, IS_PRINTABLE, ret);
}

METHOD(isascii_all)
{
    (void)all;
    return consists_of(r, v, IS_ASCII, ret);
}

METHOD(isidentifier_all)
{
    const struct string *s = self(v);
    bool yes = s->n_bytes > 0;
    int n;
    (void)all;
    for (size_t at = 0; yes && at < s->n_bytes; at += (size_t)n)
        yes = text_is_identifier(text_char(s->data + at, s->n_bytes - at, &n), at == 0);
    *ret = value_bool(yes);
    return run_steps(r, s->n_bytes >> 4);
}

// ---- strip --------------------------------------------------------------------------------------

static bool in_set(const struct string *set, const char *c, int n)
{
    return memmem(set->data, set->n_bytes, c, (size_t)n) != NULL;
}

static enum status strip_set(struct run *r, const struct value *v, const struct string *set,
                             bool left, bool right, struct value *ret)
{
    const struct string *s = self(v);
    size_t start = 0, end = s->n_bytes;
    int n;
    while (left && start < end) {
        text_char(s->data + start, end - start, &n);
        if (!in_set(set, s->data + start, n)) break;
        start += (size_t)n;
    }
    while (right && end > start) {
        size_t last = end - 1;
        while (last > start && ((unsigned char)s->data[last] & 0xc0) == 0x80) last--;
        if (!in_set(set, s->data + last, (int)(end - last))) break;
        end = last;
    }
    enum status st = run_steps(r, ((s->n_bytes - (end - start)) * set->n_bytes) >> 4);
    return st == ST_OK ? part(r, v, start, end, ret) : st;
}

static enum status stripped(struct run *r, const struct value *v, bool left, bool right,
                            struct value *ret)
{
    const struct string *s = self(v), *set;
    if (given(&v[1]) && v[1].kind != V_NONE) {
        enum status st = need_string(&v[1], "strip arg", &set);
        return st == ST_OK ? strip_set(r, v, set, left, right, ret) : st;
    }
    size_t end = right ? text_without_trailing_spaces(s->data, s->n_bytes) : s->n_bytes;
    size_t start = left ? text_leading_spaces(s->data, end) : 0;
    enum status st = run_steps(r, (s->n_bytes - (end - start)) >> 4);
    return st == ST_OK ? part(r, v, start, end, ret) : st;
}

METHOD(strip)
{
    (void)all;
    return stripped(r, v, true, true, ret);
}

METHOD(lstrip)
{
    (void)all;
    return stripped(r, v, true, false, ret);
}

METHOD(rstrip)
{
    (void)all;
    return stripped(r, v, false, true, ret);
}

static bool starts(const struct string *s, const struct string *with)
{
    return s->n_bytes >= with->n_bytes && memcmp(s->data, with->data, with->n_bytes) == 0;
}

static bool ends(const struct string *s, const struct string *with)
{
    return s->n_bytes >= with->n_bytes &&
           memcmp(s->data + s->n_bytes - with->n_bytes, with->data, with->n_bytes) == 0;
}

METHOD(removeprefix)
{
    const struct string *prefix;
    (void)all;
    enum status st = need_string(&v[1], "prefix", &prefix);
    if (st != ST_OK) return st;
    return part(r, v, starts(self(v), prefix) ? prefix->n_bytes : 0, self(v)->n_bytes, ret);
}

METHOD(removesuffix)
{
    const struct string *suffix;
    (void)all;
    enum status st = need_string(&v[1], "suffix", &suffix);
    if (st != ST_OK) return st;
    size_t n = self(v)->n_bytes;
    return part(r, v, 0, ends(self(v), suffix) ? n - suffix->n_bytes : n, ret);
}

// ---- search -------------------------------------------------------------------------------------

// The part of the string that optional start and end (in characters) leave: as bytes. False: the
// start lies beyond the end, where even "" is not found.
static enum status window(const struct value *v, const struct value *bounds, size_t *ret_start,
                          size_t *ret_end, bool *ret_valid)
{
    const struct string *s = self(v);
    int64_t n = (int64_t)s->n_chars, start = 0, end = n;
    enum status st;
    CHECK(need_int(&bounds[0], "start", &start));
    CHECK(need_int(&bounds[1], "end", &end));
    if (start < 0) start = start + n < 0 ? 0 : start + n;
    if (end < 0) end = end + n < 0 ? 0 : end + n;
    if (end > n) end = n;
    *ret_valid = start <= end;
    *ret_start = *ret_end = 0;
    if (start > end) return ST_OK;
    *ret_start = string_offset(s, (size_t)start);
    *ret_end = string_offset(s, (size_t)end);
out:
    return st;
}

static const char *find_last(const char *s, size_t n, const struct string *what)
{
    for (size_t at = n + 1; at-- > what->n_bytes;)
        if (memcmp(s + at - what->n_bytes, what->data, what->n_bytes) == 0)
            return s + at - what->n_bytes;
    return NULL;
}

static enum status search(struct run *r, const struct value *v, bool last, bool must,
                          struct value *ret)
{
    const struct string *s = self(v), *what;
    size_t start, end;
    bool valid;
    enum status st;
    CHECK(need_string(&v[1], "sub", &what));
    CHECK(window(v, &v[2], &start, &end, &valid));
    CHECK(run_steps(r, (end - start) >> 4));
    const char *found = NULL;
    if (valid && last)
        found = find_last(s->data + start, end - start, what);
    else if (valid)
        found = memmem(s->data + start, end - start, what->data, what->n_bytes);
    if (!found && must) return status_fail(ST_INVALID, "substring not found");
    *ret = value_int(found ? (int64_t)utf8_count(s->data, (size_t)(found - s->data)) : -1);
out:
    return st;
}

METHOD(find)
{
    (void)all;
    return search(r, v, false, false, ret);
}

METHOD(rfind)
{
    (void)all;
    return search(r, v, true, false, ret);
}

METHOD(index_of)
{
    (void)all;
    return search(r, v, false, true, ret);
}

METHOD(last_index_of)
{
    (void)all;
    return search(r, v, true, true, ret);
}

METHOD(count)
{
    const struct string *s = self(v), *what;
    size_t at, end;
    bool valid;
    int64_t n = 0;
    enum status st;
    (void)all;
    CHECK(need_string(&v[1], "sub", &what));
    CHECK(window(v, &v[2], &at, &end, &valid));
    CHECK(run_steps(r, (end - at) >> 4));
    if (valid && what->n_bytes == 0) n = (int64_t)utf8_count(s->data + at, end - at) + 1;
    while (valid && what->n_bytes > 0) {
        const char *found = memmem(s->data + at, end - at, what->data, what->n_bytes);
        if (!found) break;
        n++;
        at = (size_t)(found - s->data) + what->n_bytes;
    }
    *ret = value_int(n);
out:
    return st;
}

// startswith and endswith take one text or a tuple of them.
static enum status has_affix(struct run *r, const struct value *v, bool at_end, struct value *ret)
{
    bool valid, found = false;
    size_t start, end;
    enum status st;
    CHECK(window(v, &v[2], &start, &end, &valid));
    struct string inside = {self(v)->data + start, end - start, 0, false};
    struct list one = {.items = &v[1], .n = 1}, affixes = v[1].kind == V_TUPLE ? *v[1].list : one;
    CHECK(run_steps(r, affixes.n));
    for (size_t i = 0; i < affixes.n; i++) {
        const struct value *affix = &affixes.items[i];
        if (affix->kind != V_STRING)
            return status_fail(ST_INVALID, "%s first arg must be str or a tuple of str, not %s",
                               at_end ? "endswith" : "startswith", value_type(affix));
        found |= valid && (at_end ? ends : starts)(&inside, affix->string);
    }
    *ret = value_bool(found);
out:
    return st;
}

METHOD(startswith)
{
    (void)all;
    return has_affix(r, v, false, ret);
}

METHOD(endswith)
{
    (void)all;
    return has_affix(r, v, true, ret);
}

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
    return st == ST_OK ? part(p->run, p->of, start, end, &p->items[p->n++]) : st;
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
        const char *found = find_last(s->data, end, by);
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
    const char *found = last ? find_last(s->data, s->n_bytes, by)
                             : memmem(s->data, s->n_bytes, by->data, by->n_bytes);
    size_t at = found ? (size_t)(found - s->data) : last ? 0 : s->n_bytes;
    size_t after = found ? at + by->n_bytes : at;
    CHECK(list_make(&r->arena, V_TUPLE, 3, &items, ret));
    CHECK(part(r, v, 0, at, &items[0]));
    CHECK(part(r, v, at, after, &items[1]));
    CHECK(part(r, v, after, s->n_bytes, &items[2]));
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
    return take_like(r, v, st, &text, ret);
}

// ---- replace, pad -------------------------------------------------------------------------------

// "" stands before every character and at the end.
static void replace_nothing(struct run *r, const struct string *s, const struct string *with,
                            int64_t most, struct bytes *to)
{
    size_t at = 0;
    int n = 0;
    for (; most != 0 && at <= s->n_bytes && !to->failed; at += (size_t)n) {
        run_put(r, to, with->data, with->n_bytes);
        if (most > 0) most--;
        if (at == s->n_bytes) return;
        text_char(s->data + at, s->n_bytes - at, &n);
        run_put(r, to, s->data + at, (size_t)n);
    }
    if (at < s->n_bytes) run_put(r, to, s->data + at, s->n_bytes - at);
}

METHOD(replace)
{
    const struct string *s = self(v), *old, *with;
    struct bytes text = BYTES_INIT;
    struct value safe;
    int64_t most = -1;
    enum status st;
    size_t at = 0;
    (void)all;
    CHECK(need_string(&v[1], "old", &old));
    CHECK(need_string(&v[2], "new", &with));
    CHECK(need_int(&v[3], "count", &most));
    if (s->markup) {
        CHECK(value_escape(r, &v[2], &safe));
        with = safe.string;
    }
    CHECK(run_steps(r, s->n_bytes >> 4));
    if (old->n_bytes == 0) {
        replace_nothing(r, s, with, most, &text);
        return take_like(r, v, ST_OK, &text, ret);
    }
    while (most != 0 && !text.failed) {
        const char *found = memmem(s->data + at, s->n_bytes - at, old->data, old->n_bytes);
        if (!found) break;
        run_put(r, &text, s->data + at, (size_t)(found - s->data) - at);
        run_put(r, &text, with->data, with->n_bytes);
        at = (size_t)(found - s->data) + old->n_bytes;
        if (most > 0) most--;
    }
    run_put(r, &text, s->data + at, s->n_bytes - at);
    return take_like(r, v, ST_OK, &text, ret);
out:
    return st;
}

static enum status pad(struct run *r, const struct value *v, int64_t left, int64_t right,
                       struct value *ret)
{
    const struct string *fill = NULL;
    struct bytes text = BYTES_INIT;
    enum status st = ST_OK;
    if (given(&v[2])) CHECK(need_string(&v[2], "fillchar", &fill));
    if (fill && fill->n_chars != 1)
        return status_fail(ST_INVALID, "The fill character must be exactly one character long");
    const char *c = fill ? fill->data : " ";
    size_t n = fill ? fill->n_bytes : 1;
    CHECK(run_steps(r, (size_t)((left > 0 ? left : 0) + (right > 0 ? right : 0)) >> 4));
    for (int64_t i = 0; i < left && !text.failed; i++) run_put(r, &text, c, n);
    run_put(r, &text, self(v)->data, self(v)->n_bytes);
    for (int64_t i = 0; i < right && !text.failed; i++) run_put(r, &text, c, n);
    return take_like(r, v, ST_OK, &text, ret);
out:
    return st;
}

// Characters that are wanting to the width given; at most what an output may hold.
static enum status wanting(const struct value *v, int64_t *ret)
{
    int64_t width = 0;
    enum status st = need_int(&v[1], "width", &width);
    if (width > INT32_MAX) return status_fail(ST_NO_MEMORY, "a width of that size is too much");
    *ret = width > (int64_t)self(v)->n_chars ? width - (int64_t)self(v)->n_chars : 0;
    return st;
}

METHOD(ljust)
{
    int64_t n = 0;
    (void)all;
    enum status st = wanting(v, &n);
    return st == ST_OK ? pad(r, v, 0, n, ret) : st;
}

METHOD(rjust)
{
    int64_t n = 0;
    (void)all;
    enum status st = wanting(v, &n);
    return st == ST_OK ? pad(r, v, n, 0, ret) : st;
}

METHOD(center)
{
    int64_t n = 0;
    (void)all;
    enum status st = wanting(v, &n);
    if (st != ST_OK) return st;
    int64_t width = n + (int64_t)self(v)->n_chars, left = n / 2 + (n & width & 1);
    return pad(r, v, left, n - left, ret);
}

METHOD(zfill)
{
    const struct string *s = self(v);
    struct bytes text = BYTES_INIT;
    int64_t n = 0;
    (void)all;
    enum status st = wanting(v, &n);
    if (st == ST_OK) st = run_steps(r, (size_t)n >> 4);
    if (st != ST_OK) return st;
    size_t sign = s->n_bytes > 0 && (s->data[0] == '-' || s->data[0] == '+');
    run_put(r, &text, s->data, sign);
    for (int64_t i = 0; i < n && !text.failed; i++) run_puts(r, &text, "0");
    run_put(r, &text, s->data + sign, s->n_bytes - sign);
    return take_like(r, v, ST_OK, &text, ret);
}

METHOD(expandtabs)
{
    const struct string *s = self(v);
    struct bytes text = BYTES_INIT;
    int64_t size = 8, column = 0;
    int n;
    (void)all;
    enum status st = need_int(&v[1], "tabsize", &size);
    if (size > 1000) size = 1000;
    for (size_t at = 0; st == ST_OK && at < s->n_bytes; at += (size_t)n) {
        uint32_t c = text_char(s->data + at, s->n_bytes - at, &n);
        if (c == '\t') {
            int64_t spaces = size > 0 ? size - column % size : 0;
            for (int64_t i = 0; i < spaces; i++) run_puts(r, &text, " ");
            column += spaces;
        } else {
            run_put(r, &text, s->data + at, (size_t)n);
            column = c == '\n' || c == '\r' ? 0 : column + 1;
        }
    }
    return take_like(r, v, st, &text, ret);
}

METHOD(format)
{
    return format_braces(r, self(v), all, ret);
}

METHOD(format_map)
{
    (void)all;
    if (v[1].kind != V_DICT) return type_fail("format_map() wants a mapping", &v[1]);
    const struct dict *d = v[1].dict;
    struct named_value *named = arena_array(&r->arena, d->n, sizeof *named);
    struct arguments arguments = {.named = named};
    if (!named) return ST_NO_MEMORY;
    for (size_t i = 0; i < d->n; i++)
        if (d->entries[i].key.kind == V_STRING)
            named[arguments.n_named++] =
                (struct named_value){d->entries[i].key.string, d->entries[i].value};
    return format_braces(r, self(v), &arguments, ret);
}

METHOD(not_supported)
{
    (void)r, (void)v, (void)all, (void)ret;
    return status_fail(ST_UNSUPPORTED, "this method of strings is not supported");
}

const struct builtin string_methods[] = {
    {"capitalize", capitalize, "", 0},
    {"casefold", casefold, "", 0},
    {"center", center, "/width fillchar", 1},
    {"count", count, "/sub start end", 1},
    {"encode", not_supported, NULL, 0},
    {"endswith", endswith, "/suffix start end", 1},
    {"expandtabs", expandtabs, "tabsize", 0},
    {"find", find, "/sub start end", 1},
    {"format", format, NULL, 0},
    {"format_map", format_map, "/mapping", 1},
    {"index", index_of, "/sub start end", 1},
    {"isalnum", isalnum_all, "", 0},
    {"isalpha", isalpha_all, "", 0},
    {"isascii", isascii_all, "", 0},
    {"isdecimal", isdecimal_all, "", 0},
    {"isdigit", isdigit_all, "", 0},
    {"isidentifier", isidentifier_all, "", 0},
    {"islower", islower_all, "", 0},
    {"isnumeric", isnumeric_all, "", 0},
    {"isprintable", isprintable_all, "", 0},
    {"isspace", isspace_all, "", 0},
    {"istitle", istitle_all, "", 0},
    {"isupper", isupper_all, "", 0},
    {"join", join, "/iterable", 1},
    {"ljust", ljust, "/width fillchar", 1},
    {"lower", lower, "", 0},
    {"lstrip", lstrip, "/chars", 0},
    {"maketrans", not_supported, NULL, 0},
    {"partition", partition, "/sep", 1},
    {"removeprefix", removeprefix, "/prefix", 1},
    {"removesuffix", removesuffix, "/suffix", 1},
    {"replace", replace, "/old new count", 2},
    {"rfind", rfind, "/sub start end", 1},
    {"rindex", last_index_of, "/sub start end", 1},
    {"rjust", rjust, "/width fillchar", 1},
    {"rpartition", rpartition, "/sep", 1},
    {"rsplit", rsplit, "sep maxsplit", 0},
    {"rstrip", rstrip, "/chars", 0},
    {"split", split, "sep maxsplit", 0},
    {"splitlines", splitlines, "keepends", 0},
    {"startswith", startswith, "/prefix start end", 1},
    {"strip", strip, "/chars", 0},
    {"swapcase", swapcase, "", 0},
    {"title", title, "", 0},
    {"translate", not_supported, NULL, 0},
    {"upper", upper, "", 0},
    {"zfill", zfill, "/width", 1},
};
const size_t n_string_methods = sizeof string_methods / sizeof *string_methods;
