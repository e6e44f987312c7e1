/* format.c: "..." % values and "...".format(values). Both come down to one description of a field
 * and one function that fills it. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_PRECISION 300

struct field {
    char fill[4];
    int n_fill;     // 0: a blank
    char align;     // < > ^ =, 0: by the value's type
    char sign;      // + - or blank; 0: -
    bool alternate; // #
    char group;     // , or _; 0: none
    int64_t width;
    int precision; // -1: none
    char type;     // 0: by the value's type
};

// ---- filling a field ----------------------------------------------------------------------------

static void put_fill(const struct run *r, const struct field *f, int64_t n, struct bytes *to)
{
    for (int64_t i = 0; i < n && !to->failed; i++)
        run_put(r, to, f->n_fill ? f->fill : " ", f->n_fill ? (size_t)f->n_fill : 1);
}

// `lead` bytes of text (a sign, "0x") stay in front where the padding goes behind them ('=').
static void put_aligned(const struct run *r, const struct field *f, char otherwise,
                        const char *text, size_t len, size_t lead, struct bytes *to)
{
    char align = f->align ? f->align : otherwise;
    int64_t pad = f->width - (int64_t)utf8_count(text, len);
    if (pad < 0) pad = 0;
    int64_t left = align == '>' ? pad : align == '^' ? pad / 2 : 0;
    put_fill(r, f, left, to);
    run_put(r, to, text, lead);
    if (align == '=') put_fill(r, f, pad, to);
    run_put(r, to, text + lead, len - lead);
    if (align != '=') put_fill(r, f, pad - left, to);
}

static enum status put_text(struct run *r, const struct field *f, char otherwise,
                            const struct string *s, struct bytes *to)
{
    size_t n = s->n_bytes;
    if (f->precision >= 0 && (size_t)f->precision < s->n_chars)
        n = string_offset(s, (size_t)f->precision);
    put_aligned(r, f, otherwise, s->data, n, 0, to);
    return run_steps(r, (size_t)(f->width > 0 ? f->width >> 6 : 0));
}

// A separator every three digits (four with "_" in other bases) of the leading run of digits.
static void put_grouped(const char *digits, char group, int every, struct bytes *to)
{
    size_t n = strspn(digits, "0123456789abcdefABCDEF");
    if (every == 3) n = strspn(digits, "0123456789");
    for (size_t i = 0; i < n; i++) {
        if (group && i > 0 && (n - i) % (size_t)every == 0) bytes_append(to, &group, 1);
        bytes_append(to, digits + i, 1);
    }
    bytes_puts(to, digits + n);
}

// Digits with sign and prefix, then aligned.
static enum status put_number(struct run *r, const struct field *f, bool negative,
                              const char *prefix, const char *digits, struct bytes *to)
{
    struct bytes text = BYTES_INIT;
    int every = f->group == '_' && f->type && strchr("boxX", f->type) ? 4 : 3;
    if (negative)
        bytes_puts(&text, "-");
    else if (f->sign == '+' || f->sign == ' ')
        bytes_append(&text, &f->sign, 1);
    bytes_puts(&text, prefix);
    size_t lead = text.len;
    put_grouped(digits, f->group, every, &text);
    enum status st = bytes_status(&text);
    if (st == ST_OK) put_aligned(r, f, '>', bytes_text(&text), text.len, lead, to);
    bytes_release(&text);
    return st == ST_OK ? run_steps(r, (size_t)(f->width > 0 ? f->width >> 6 : 0)) : st;
}

static enum status put_integer(struct run *r, const struct field *f, int64_t x, struct bytes *to)
{
    char digits[80], *at = digits + sizeof digits - 1;
    unsigned base = f->type == 'b' ? 2 : f->type == 'o' ? 8 : (f->type | 0x20) == 'x' ? 16 : 10;
    const char *alphabet = f->type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
    uint64_t rest = x < 0 ? 0 - (uint64_t)x : (uint64_t)x;
    char prefix[3] = {'0', f->type, 0};
    if (!f->alternate || base == 10) prefix[0] = 0;
    *at = 0;
    do {
        *--at = alphabet[rest % base];
        rest /= base;
    } while (rest > 0);
    for (int n = (int)strlen(at); n < f->precision && at > digits; n++) *--at = '0';
    return put_number(r, f, x < 0, prefix, at, to);
}

static enum status put_real(struct run *r, const struct field *f, double x, struct bytes *to)
{
    struct bytes digits = BYTES_INIT;
    double size = fabs(x);
    bool percent = f->type == '%';
    char format[12], type = percent ? 'f' : f->type == 'n' ? 'g' : f->type;
    if (percent) size *= 100;
    if (isnan(x) || isinf(x)) {
        bytes_puts(&digits,
                   isnan(x) ? (isupper(type) ? "NAN" : "nan") : (isupper(type) ? "INF" : "inf"));
    } else if (!type && f->precision < 0) {
        put_float(size, &digits);
    } else {
        snprintf(format, sizeof format, "%%%s.*%c", f->alternate ? "#" : "", type ? type : 'g');
        bytes_printf(&digits, format, f->precision < 0 ? 6 : f->precision, size);
        if (!type && !strpbrk(bytes_text(&digits), ".e")) bytes_puts(&digits, ".0");
    }
    if (percent) bytes_puts(&digits, "%");
    enum status st = bytes_status(&digits);
    if (st == ST_OK) st = put_number(r, f, signbit(x) && !isnan(x), "", bytes_text(&digits), to);
    bytes_release(&digits);
    return st;
}

static enum status put_character(struct run *r, const struct field *f, int64_t code, char otherwise,
                                 struct bytes *to)
{
    char encoded[4];
    if (code < 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return status_fail(ST_INVALID, "%%c arg not in range(0x110000)");
    int n = utf8_encode((uint32_t)code, encoded);
    put_aligned(r, f, otherwise, encoded, (size_t)n, 0, to);
    return ST_OK;
}

// ---- "%" ----------------------------------------------------------------------------------------

struct percent {
    struct run *run;
    const char *at, *end;
    const struct value *values;
    size_t next; // of a tuple
    bool markup, keyed;
};

static enum status next_value(struct percent *p, struct value *ret)
{
    const struct value *v = p->values;
    size_t n = v->kind == V_TUPLE ? v->list->n : 1;
    if (p->next >= n) return status_fail(ST_INVALID, "not enough arguments for format string");
    *ret = v->kind == V_TUPLE ? v->list->items[p->next] : *v;
    p->next++;
    return ST_OK;
}

static enum status keyed_value(struct percent *p, struct value *ret)
{
    const char *start = ++p->at;
    struct value key;
    int open = 1;
    for (; p->at < p->end; p->at++) {
        open += (*p->at == '(') - (*p->at == ')');
        if (open == 0) break;
    }
    if (p->at == p->end) return status_fail(ST_INVALID, "incomplete format key");
    if (p->values->kind != V_DICT) return status_fail(ST_INVALID, "format requires a mapping");
    p->keyed = true;
    enum status st = string_borrow(&p->run->arena, start, (size_t)(p->at++ - start), &key);
    if (st == ST_OK) st = dict_find(p->run, p->values->dict, &key, ret);
    if (st == ST_OK && !given(ret))
        st = status_fail(ST_INVALID, "KeyError: '%.*s'", (int)(p->at - 1 - start), start);
    return st;
}

// A number, or "*": the next value.
static enum status read_size(struct percent *p, int64_t *ret)
{
    if (p->at < p->end && *p->at == '*') {
        struct value v;
        enum status st = next_value(p, &v);
        p->at++;
        if (st == ST_OK && !value_as_int(&v, ret)) st = status_fail(ST_INVALID, "* wants int");
        return st;
    }
    for (*ret = 0; p->at < p->end && isdigit((unsigned char)*p->at); p->at++)
        if (*ret < 100000000) *ret = *ret * 10 + (*p->at - '0');
    return ST_OK;
}

static enum status read_percent_field(struct percent *p, struct field *f)
{
    enum status st;
    int64_t precision = 0;
    for (; p->at < p->end && strchr("-+ #0", *p->at) && *p->at; p->at++) {
        if (*p->at == '-') f->align = '<';
        if (*p->at == '+' || (*p->at == ' ' && f->sign != '+')) f->sign = *p->at;
        if (*p->at == '#') f->alternate = true;
        if (*p->at == '0' && f->align != '<') f->align = '=';
    }
    CHECK(read_size(p, &f->width));
    if (f->width < 0) {
        f->align = '<';
        f->width = f->width < -100000000 ? 100000000 : -f->width;
    }
    if (p->at < p->end && *p->at == '.') {
        p->at++;
        CHECK(read_size(p, &precision));
        if (precision > MAX_PRECISION)
            return status_fail(ST_INVALID, "precision too big (the limit is %d)", MAX_PRECISION);
        f->precision = precision < 0 ? 0 : (int)precision;
    }
    while (p->at < p->end && strchr("hlL", *p->at) && *p->at) p->at++;
    if (p->at == p->end) return status_fail(ST_INVALID, "incomplete format");
    f->type = *p->at++;
out:
    return st;
}

static enum status put_percent_text(struct percent *p, struct field *f, const struct value *v,
                                    struct bytes *to)
{
    struct value text;
    struct bytes repr = BYTES_INIT;
    enum status st;
    if (f->align == '=') f->align = 0; // "0" is for numbers
    if (f->type == 's') {
        CHECK(p->markup ? value_escape(p->run, v, &text) : value_str(p->run, v, &text));
    } else {
        CHECK(run_take(p->run, put_repr(p->run, v, &repr), &repr, &text));
    }
    st = put_text(p->run, f, '>', text.string, to);
out:
    return st;
}

static enum status put_percent_number(struct percent *p, struct field *f, const struct value *v,
                                      struct bytes *to)
{
    int64_t x;
    if (v->kind == V_UNDEFINED) return undefined_fail(v->undefined);
    if (f->align == '=') {
        f->fill[0] = '0';
        f->n_fill = 1;
    }
    bool real = strchr("eEfFgG", f->type);
    if (!value_is_number(v))
        return status_fail(ST_INVALID, "%%%c format: a real number is required, not %s", f->type,
                           value_type(v));
    if (real) return put_real(p->run, f, value_as_double(v), to);
    if (!value_as_int(v, &x)) {
        if (!strchr("diu", f->type))
            return status_fail(ST_INVALID, "%%%c format: an integer is required, not %s", f->type,
                               value_type(v));
        if (!(fabs(v->real) < 0x1p63))
            return status_fail(ST_INVALID, "cannot convert this float to integer");
        x = (int64_t)v->real;
    }
    return put_integer(p->run, f, x, to);
}

static enum status put_percent(struct percent *p, struct bytes *to)
{
    struct field f = {.precision = -1};
    struct value v = MISSING;
    int64_t code = 0;
    enum status st;
    if (p->at < p->end && *p->at == '(') CHECK(keyed_value(p, &v));
    CHECK(read_percent_field(p, &f));
    if (f.type == '%') {
        run_puts(p->run, to, "%");
        return ST_OK;
    }
    if (!f.type || !strchr("sradiuoxXeEfFgGc", f.type))
        return status_fail(ST_INVALID, "unsupported format character '%c' (0x%x)", f.type,
                           (unsigned char)f.type);
    if (!given(&v)) CHECK(next_value(p, &v));
    if (strchr("sra", f.type)) return put_percent_text(p, &f, &v, to);
    if (f.type != 'c') return put_percent_number(p, &f, &v, to);
    if (v.kind == V_STRING && v.string->n_chars == 1)
        return put_text(p->run, &f, '>', v.string, to);
    if (!value_as_int(&v, &code)) return status_fail(ST_INVALID, "%%c requires int or char");
    st = put_character(p->run, &f, code, '>', to);
out:
    return st;
}

enum status format_percent(struct run *r, const struct string *format, const struct value *values,
                           struct value *ret)
{
    struct bytes text = BYTES_INIT;
    struct percent p = {.run = r,
                        .at = format->data,
                        .end = format->data + format->n_bytes,
                        .values = values,
                        .markup = format->markup};
    enum status st = ST_OK;
    while (st == ST_OK && p.at < p.end) {
        const char *mark = memchr(p.at, '%', (size_t)(p.end - p.at));
        run_put(r, &text, p.at, (size_t)((mark ? mark : p.end) - p.at));
        p.at = mark ? mark + 1 : p.end;
        if (mark) st = put_percent(&p, &text);
        if (st == ST_OK) st = run_steps(r, 1);
    }
    size_t n = values->kind == V_TUPLE ? values->list->n : 1;
    bool may_remain = p.keyed || values->kind == V_DICT || values->kind == V_LIST ||
                      values->kind == V_UNDEFINED || values->kind == V_RANGE;
    if (st == ST_OK && p.next < n && !may_remain)
        st = status_fail(ST_INVALID, "not all arguments converted during string formatting");
    struct value plain;
    st = run_take(r, st, &text, &plain);
    return st == ST_OK ? string_like(r, format, plain.string->data, plain.string->n_bytes, ret)
                       : st;
}

// ---- "{}" ---------------------------------------------------------------------------------------

static enum status read_format_spec(const char *s, size_t n, struct field *f)
{
    const char *at = s, *end = s + n;
    int first = n > 0 ? utf8_sequence(s, n) : 0;
    if (first > 0 && at + first < end && strchr("<>=^", at[first])) {
        memcpy(f->fill, at, (size_t)first);
        f->n_fill = first;
        f->align = at[first];
        at += first + 1;
    } else if (at < end && strchr("<>=^", *at)) {
        f->align = *at++;
    }
    if (at < end && strchr("+- ", *at)) f->sign = *at++;
    if (at < end && *at == 'z') at++;
    if (at < end && *at == '#') f->alternate = at++ != NULL;
    if (at < end && *at == '0') {
        at++;
        if (!f->n_fill) f->fill[0] = '0';
        if (!f->n_fill) f->n_fill = 1;
        if (!f->align) f->align = '=';
    }
    for (; at < end && isdigit((unsigned char)*at); at++)
        if (f->width < 100000000) f->width = f->width * 10 + (*at - '0');
    if (at < end && (*at == ',' || *at == '_')) f->group = *at++;
    if (at < end && *at == '.') {
        if (++at == end || !isdigit((unsigned char)*at))
            return status_fail(ST_INVALID, "Format specifier missing precision");
        for (f->precision = 0; at < end && isdigit((unsigned char)*at); at++)
            if (f->precision <= MAX_PRECISION) f->precision = f->precision * 10 + (*at - '0');
        if (f->precision > MAX_PRECISION)
            return status_fail(ST_INVALID, "precision too big (the limit is %d)", MAX_PRECISION);
    }
    if (at < end) f->type = *at++;
    if (at < end || (f->type && (unsigned char)f->type > 0x7f))
        return status_fail(ST_INVALID, "Invalid format specifier");
    return ST_OK;
}

static enum status bad_code(const struct field *f, const struct value *v)
{
    return status_fail(ST_INVALID, "Unknown format code '%c' for object of type '%s'", f->type,
                       value_type(v));
}

static enum status put_formatted(struct run *r, const struct field *f, const struct value *v,
                                 struct bytes *to)
{
    int64_t x;
    if (v->kind == V_STRING) {
        if (f->type && f->type != 's') return bad_code(f, v);
        if (f->align == '=' && f->fill[0] != '0')
            return status_fail(ST_INVALID, "'=' alignment not allowed in string format specifier");
        struct field text = *f;
        if (text.align == '=') text.align = '<';
        return put_text(r, &text, '<', v->string, to);
    }
    if (!value_is_number(v))
        return status_fail(ST_INVALID, "unsupported format string passed to %s.__format__",
                           value_type(v));
    bool real = f->type && strchr("eEfFgG%", f->type);
    if (real || v->kind == V_FLOAT) {
        if (f->type && !real && f->type != 'n') return bad_code(f, v);
        return put_real(r, f, value_as_double(v), to);
    }
    value_as_int(v, &x);
    if (f->type && !strchr("dboxXcn", f->type)) return bad_code(f, v);
    if (f->precision >= 0)
        return status_fail(ST_INVALID, "Precision not allowed in integer format specifier");
    return f->type == 'c' ? put_character(r, f, x, '<', to) : put_integer(r, f, x, to);
}

struct braces {
    struct run *run;
    const struct arguments *arguments;
    int next; // of the fields without a number
    bool by_number;
    bool markup;
};

static enum status first_value(struct braces *b, const char *name, size_t n, struct value *ret)
{
    const struct arguments *a = b->arguments;
    char *end;
    long i = strtol(name, &end, 10);
    if (n > 0 && (end != name + n || !isdigit((unsigned char)*name))) {
        for (int k = 0; k < a->n_named; k++)
            if (a->named[k].name->n_bytes == n && memcmp(a->named[k].name->data, name, n) == 0) {
                *ret = a->named[k].value;
                return ST_OK;
            }
        return status_fail(ST_INVALID, "KeyError: '%.*s'", (int)(n < 100 ? n : 100), name);
    }
    if (n == 0 ? b->by_number : b->next > 0)
        return status_fail(ST_INVALID, "numbered and unnumbered fields are mixed");
    b->by_number = n > 0;
    if (n == 0) i = b->next++;
    if (i < 0 || i >= a->n_positional)
        return status_fail(ST_INVALID,
                           "Replacement index %ld out of range for positional args tuple", i);
    *ret = a->positional[i];
    return ST_OK;
}

// "name.attribute[key]"
static enum status field_value(struct braces *b, const char *name, size_t n, struct value *ret)
{
    size_t at = 0;
    while (at < n && name[at] != '.' && name[at] != '[') at++;
    enum status st = first_value(b, name, at, ret);
    while (st == ST_OK && at < n) {
        bool dot = name[at++] == '.';
        size_t start = at;
        while (at < n && (dot ? name[at] != '.' && name[at] != '[' : name[at] != ']')) at++;
        if (!dot && at == n) return status_fail(ST_INVALID, "Missing ']' in format string");
        struct value key, of = *ret;
        st = string_borrow(&b->run->arena, name + start, at - start, &key);
        if (st != ST_OK) break;
        if (dot) {
            st = get_attribute(b->run, &of, key.string, ret);
            continue;
        }
        char *end;
        long number = strtol(name + start, &end, 10);
        if (end == name + at && at > start) key = value_int(number);
        st = get_item(b->run, &of, &key, ret);
        at++; // "]"
    }
    return st;
}

static enum status put_field(struct braces *b, const char *s, size_t n, struct bytes *to)
{
    struct field f = {.precision = -1};
    struct value v, text;
    enum status st;
    size_t name = 0, spec;
    char conversion = 0;
    while (name < n && s[name] != ':' && s[name] != '!')
        name += s[name] == '[' ? strcspn(s + name, "]") : 1;
    if (name > n) name = n;
    spec = name;
    if (spec < n && s[spec] == '!') {
        conversion = spec + 1 < n ? s[spec + 1] : 0;
        spec += 2;
    }
    if (spec < n && s[spec] != ':') return status_fail(ST_INVALID, "expected ':' after conversion");
    CHECK(field_value(b, s, name, &v));
    if (conversion == 'r' || conversion == 'a') {
        struct bytes repr = BYTES_INIT;
        CHECK(run_take(b->run, put_repr(b->run, &v, &repr), &repr, &v));
    } else if (conversion == 's') {
        CHECK(value_str(b->run, &v, &v));
    } else if (conversion) {
        return status_fail(ST_INVALID, "Unknown conversion specifier %c", conversion);
    }
    if (spec + 1 < n) {
        CHECK(read_format_spec(s + spec + 1, n - spec - 1, &f));
        return put_formatted(b->run, &f, &v, to);
    }
    CHECK(b->markup ? value_escape(b->run, &v, &text) : value_str(b->run, &v, &text));
    run_put(b->run, to, text.string->data, text.string->n_bytes);
out:
    return st;
}

// End of the field whose "{" is before s: its "}", with braces within it in pairs; n: there is
// none.
static size_t field_end(const char *s, size_t n)
{
    int open = 1;
    for (size_t i = 0; i < n; i++) {
        open += (s[i] == '{') - (s[i] == '}');
        if (open == 0) return i;
    }
    return n;
}

static enum status put_braces(struct braces *b, const struct string *format, struct bytes *to)
{
    const char *s = format->data;
    size_t n = format->n_bytes;
    enum status st = ST_OK;
    for (size_t i = 0; st == ST_OK && i < n; i++) {
        if ((s[i] == '{' || s[i] == '}') && i + 1 < n && s[i + 1] == s[i]) {
            run_put(b->run, to, &s[i++], 1);
        } else if (s[i] == '}') {
            st = status_fail(ST_INVALID, "Single '}' encountered in format string");
        } else if (s[i] == '{') {
            size_t len = field_end(s + i + 1, n - i - 1);
            if (i + 1 + len >= n)
                return status_fail(ST_INVALID, "expected '}' before end of string");
            if (memchr(s + i + 1, '{', len))
                return status_fail(ST_INVALID, "fields within fields are not supported");
            st = put_field(b, s + i + 1, len, to);
            i += 1 + len;
        } else {
            run_put(b->run, to, &s[i], 1);
        }
    }
    return st;
}

enum status format_braces(struct run *r, const struct string *format,
                          const struct arguments *arguments, struct value *ret)
{
    struct bytes text = BYTES_INIT;
    struct braces b = {.run = r, .arguments = arguments, .markup = format->markup};
    struct value plain;
    enum status st = run_steps(r, format->n_bytes >> 3);
    if (st == ST_OK) st = put_braces(&b, format, &text);
    st = run_take(r, st, &text, &plain);
    return st == ST_OK ? string_like(r, format, plain.string->data, plain.string->n_bytes, ret)
                       : st;
}
