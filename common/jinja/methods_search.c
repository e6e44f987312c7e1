/* methods_search.c: str's methods that look for a text, replace it, pad and format. One thread. */
#include "common/jinja/methods_string.h"
#include "common/jinja/text.h"

const char *string_find_last(const char *s, size_t n, const struct string *what)
{
    for (size_t at = n + 1; at-- > what->n_bytes;)
        if (memcmp(s + at - what->n_bytes, what->data, what->n_bytes) == 0)
            return s + at - what->n_bytes;
    return NULL;
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
        found = string_find_last(s->data + start, end - start, what);
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
    return string_part(r, v, starts(self(v), prefix) ? prefix->n_bytes : 0, self(v)->n_bytes, ret);
}

METHOD(removesuffix)
{
    const struct string *suffix;
    (void)all;
    enum status st = need_string(&v[1], "suffix", &suffix);
    if (st != ST_OK) return st;
    size_t n = self(v)->n_bytes;
    return string_part(r, v, 0, ends(self(v), suffix) ? n - suffix->n_bytes : n, ret);
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
        return string_take(r, v, ST_OK, &text, ret);
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
    return string_take(r, v, ST_OK, &text, ret);
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
    return string_take(r, v, ST_OK, &text, ret);
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
    return string_take(r, v, ST_OK, &text, ret);
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
    return string_take(r, v, st, &text, ret);
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

const struct builtin search_methods[] = {
    {"removeprefix", removeprefix, "/prefix", 1},
    {"removesuffix", removesuffix, "/suffix", 1},
    {"center", center, "/width fillchar", 1},
    {"count", count, "/sub start end", 1},
    {"encode", not_supported, NULL, 0},
    {"endswith", endswith, "/suffix start end", 1},
    {"expandtabs", expandtabs, "tabsize", 0},
    {"find", find, "/sub start end", 1},
    {"format", format, NULL, 0},
    {"format_map", format_map, "/mapping", 1},
    {"index", index_of, "/sub start end", 1},
    {"ljust", ljust, "/width fillchar", 1},
    {"maketrans", not_supported, NULL, 0},
    {"replace", replace, "/old new count", 2},
    {"rfind", rfind, "/sub start end", 1},
    {"rindex", last_index_of, "/sub start end", 1},
    {"rjust", rjust, "/width fillchar", 1},
    {"startswith", startswith, "/prefix start end", 1},
    {"translate", not_supported, NULL, 0},
    {"zfill", zfill, "/width", 1},
};
const size_t n_search_methods = sizeof search_methods / sizeof *search_methods;
