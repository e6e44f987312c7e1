/* methods_case.c: str's methods on single characters: case, classes, strip. One thread. */
#include "common/jinja/methods_string.h"
#include "common/jinja/text.h"

enum status string_part(struct run *r, const struct value *v, size_t start, size_t end,
                        struct value *ret)
{
    return string_like(r, self(v), self(v)->data + start, end - start, ret);
}

enum status string_take(struct run *r, const struct value *v, enum status st, struct bytes *built,
                        struct value *ret)
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
    return string_take(r, v, st, &text, ret);
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
    return st == ST_OK ? string_part(r, v, start, end, ret) : st;
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
    return st == ST_OK ? string_part(r, v, start, end, ret) : st;
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

const struct builtin case_methods[] = {
    {"capitalize", capitalize, "", 0},
    {"casefold", casefold, "", 0},
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
    {"lower", lower, "", 0},
    {"lstrip", lstrip, "/chars", 0},
    {"rstrip", rstrip, "/chars", 0},
    {"strip", strip, "/chars", 0},
    {"swapcase", swapcase, "", 0},
    {"title", title, "", 0},
    {"upper", upper, "", 0},
};
const size_t n_case_methods = sizeof case_methods / sizeof *case_methods;
