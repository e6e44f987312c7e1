/* format_field.c: sign, prefix, digits and grouping of a number, precision of a text, and padding
 * to a width. One thread. */
#include "common/jinja/format.h"
#include <ctype.h>
#include <math.h>
#include <stdio.h>

// `lead` bytes of text (a sign, "0x") stay in front where the padding goes behind them ('=').
static void put_aligned(struct run *r, const struct field *f, char otherwise, const char *text,
                        size_t len, size_t lead)
{
    const char align = f->align ? f->align : otherwise, *fill = f->n_fill ? f->fill : " ";
    const size_t n_fill = f->n_fill ? (size_t)f->n_fill : 1;
    int64_t pad = f->width - (int64_t)utf8_count(text, len);
    if (pad < 0) pad = 0;
    int64_t left = align == '>' ? pad : align == '^' ? pad / 2 : 0;
    run_fill(r, fill, n_fill, left);
    run_put(r, text, lead);
    if (align == '=') run_fill(r, fill, n_fill, pad);
    run_put(r, text + lead, len - lead);
    if (align != '=') run_fill(r, fill, n_fill, pad - left);
}

void put_text_field(struct run *r, const struct field *f, char otherwise, const struct string *s)
{
    size_t n = s->n_bytes;
    run_bytes(r, n);
    if (f->precision >= 0 && (size_t)f->precision < s->n_chars)
        n = string_offset(s, (size_t)f->precision);
    put_aligned(r, f, otherwise, s->data, n, 0);
}

// Digits with sign and prefix, a separator every three of the leading run of digits (four with "_"
// in other bases), then aligned.
static void put_number(struct run *r, const struct field *f, bool negative, const char *prefix,
                       const char *digits)
{
    bool decimal = f->group != '_' || !f->type || !strchr("boxX", f->type);
    size_t n = strspn(digits, decimal ? "0123456789" : "0123456789abcdefABCDEF");
    size_t every = decimal ? 3 : 4, text = text_begin(r);
    if (negative)
        run_puts(r, "-");
    else if (f->sign == '+' || f->sign == ' ')
        run_put(r, &f->sign, 1);
    run_puts(r, prefix);
    size_t lead = text_begin(r) - text;
    for (size_t i = 0; i < n; i++) {
        if (f->group && i > 0 && (n - i) % every == 0) run_put(r, &f->group, 1);
        run_put(r, digits + i, 1);
    }
    run_puts(r, digits + n);
    const struct string *s = text_end(r, text, false).string;
    put_aligned(r, f, '>', s->data, s->n_bytes, lead);
}

void put_integer_field(struct run *r, const struct field *f, int64_t x)
{
    char digits[80], *at = digits + sizeof digits - 1;
    unsigned base = f->type == 'b' ? 2 : f->type == 'o' ? 8 : (f->type | 0x20) == 'x' ? 16 : 10;
    const char *alphabet = f->type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
    uint64_t remaining = x < 0 ? 0 - (uint64_t)x : (uint64_t)x;
    char prefix[3] = {'0', f->type, 0};
    if (!f->alternate || base == 10) prefix[0] = 0;
    *at = 0;
    do {
        *--at = alphabet[remaining % base];
        remaining /= base;
    } while (remaining > 0);
    for (int n = (int)strlen(at); n < f->precision && at > digits; n++) *--at = '0';
    put_number(r, f, x < 0, prefix, at);
}

void put_real_field(struct run *r, const struct field *f, double x)
{
    bool percent = f->type == '%', negative = signbit(x) && !isnan(x);
    char format[12], type = percent ? 'f' : f->type == 'n' ? 'g' : f->type;
    double size = percent ? fabs(x) * 100 : fabs(x);
    size_t text = text_begin(r);
    if (isnan(x) || isinf(x)) {
        run_puts(r, isnan(x) ? (isupper(type) ? "NAN" : "nan") : (isupper(type) ? "INF" : "inf"));
    } else if (!type && f->precision < 0) {
        put_float(r, size);
    } else {
        snprintf(format, sizeof format, "%%%s.*%c", f->alternate ? "#" : "", type ? type : 'g');
        run_printf(r, format, f->precision < 0 ? 6 : f->precision, size);
        if (!type && !strpbrk(r->text.data + text, ".e")) run_puts(r, ".0");
    }
    if (percent) run_puts(r, "%");
    put_number(r, f, negative, "", text_end(r, text, false).string->data);
}

void put_character_field(struct run *r, const struct field *f, char otherwise, int64_t code)
{
    char encoded[4];
    if (code < 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        fail(r, "%%c arg not in range(0x110000)");
    int n = utf8_encode((uint32_t)code, encoded);
    put_aligned(r, f, otherwise, encoded, (size_t)n, 0);
}

char read_one(const char **at, const char *end, const char *set)
{
    return *at < end && **at && strchr(set, **at) ? *(*at)++ : 0;
}

int64_t read_digits(const char **at, const char *end, int64_t max)
{
    int64_t x = 0;
    for (; *at < end && isdigit((unsigned char)**at); ++*at)
        if (x <= max) x = x * 10 + (**at - '0');
    return x;
}

void check_precision(struct run *r, int64_t precision)
{
    if (precision > MAX_PRECISION) fail(r, "precision too big (the limit is %d)", MAX_PRECISION);
}
