/* literal.c: numbers and strings as a template writes them, by the rules of Jinja's lexer and of
 * Python's literals. No state; any thread. */
#include "common/base/bytes.h"
#include "common/jinja/lexer.h"
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>

// ---- numbers ------------------------------------------------------------------------------------

// Behind digits of a set with single "_" between them, and before them where that is allowed.
static size_t digits(const char *s, size_t at, const char *set, bool leading_underscore)
{
    for (size_t end = at, next;; end = next + 1) {
        next = end + (s[end] == '_' && (end > at || leading_underscore));
        if (!s[next] || !strchr(set, s[next])) return end;
    }
}

// Behind an integer; *ret_real: a float, whose end it is then.
static size_t number_end(const char *s, size_t at, int *ret_base, bool *ret_real)
{
    static const char decimal[] = "0123456789", hex[] = "0123456789abcdefABCDEF";
    const char kind = s[at] == '0' ? (char)(s[at + 1] | 0x20) : 0;
    *ret_base = kind == 'b' ? 2 : kind == 'o' ? 8 : kind == 'x' ? 16 : 10;
    *ret_real = false;
    if (*ret_base != 10) {
        const char *set = *ret_base == 2 ? "01" : *ret_base == 8 ? "01234567" : hex;
        size_t end = digits(s, at + 2, set, true);
        if (end > at + 2) return end;
        *ret_base = 10;
    }
    size_t end = digits(s, at, decimal, false), more = end;
    bool after_dot = at > 0 && s[at - 1] == '.'; // of a.0.5, which is no float
    if (!after_dot && s[end] == '.' && digits(s, end + 1, decimal, false) > end + 1)
        more = digits(s, end + 1, decimal, false);
    if (!after_dot && (s[more] | 0x20) == 'e') {
        size_t sign = more + 1 + (s[more + 1] == '-' || s[more + 1] == '+');
        if (digits(s, sign, decimal, false) > sign) more = digits(s, sign, decimal, false);
    }
    *ret_real = more > end;
    if (*ret_real) return more;
    return s[at] == '0' ? digits(s, at, "0", false) : end;
}

size_t literal_number(const char *s, size_t at, struct value *ret, const char **ret_wrong)
{
    char plain[400];
    int base;
    bool real;
    size_t n = 0, end = number_end(s, at, &base, &real);
    for (size_t i = at + (base != 10 ? 2 : 0); i < end && n + 1 < sizeof plain; i++)
        if (s[i] != '_') plain[n++] = s[i];
    plain[n] = 0;
    errno = 0;
    *ret = real ? value_float(strtod(plain, NULL)) : value_int(strtoll(plain, NULL, base));
    if (n + 1 >= sizeof plain)
        *ret_wrong = "a number of too many digits";
    else if (!real && errno != 0)
        *ret_wrong = "a whole number beyond 64 bits is not supported";
    return end;
}

// ---- strings ------------------------------------------------------------------------------------

static bool hex_value(const char *s, size_t n, size_t want, uint32_t *ret)
{
    *ret = 0;
    if (n < want) return false;
    for (size_t i = 0; i < want; i++) {
        if (!isxdigit((unsigned char)s[i])) return false;
        int c = tolower((unsigned char)s[i]);
        *ret = *ret * 16 + (uint32_t)(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    return true;
}

// Writes what stands behind a backslash at s + *i to `to` (at most four bytes, returned how many),
// and moves *i beyond it.
static size_t unescape(const char *s, size_t n, size_t *i, char *to, const char **ret_wrong)
{
    static const char from[] = "\\'\"abfnrtv", plain[] = "\\'\"\a\b\f\n\r\t\v";
    char c = s[(*i)++];
    const char *known = c ? strchr(from, c) : NULL;
    size_t hex = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    uint32_t code = 0;
    if (c == '\n') return 0;
    if (known) {
        *to = plain[known - from];
        return 1;
    }
    if (c == 'N') {
        *ret_wrong = "characters by name (\\N{...}) are not supported; write \\uXXXX";
    } else if (hex > 0) {
        if (!hex_value(s + *i, n - *i, hex, &code))
            *ret_wrong = "a truncated \\x, \\u or \\U escape";
        *i += hex;
    } else if (c >= '0' && c <= '7') {
        code = (uint32_t)(c - '0');
        for (int k = 0; k < 2 && *i < n && s[*i] >= '0' && s[*i] <= '7'; k++)
            code = code * 8 + (uint32_t)(s[(*i)++] - '0');
    } else { // the backslash stays
        *to = '\\';
        --*i;
        return 1;
    }
    if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        *ret_wrong = "an escape that is no Unicode character";
    return *ret_wrong ? 0 : (size_t)utf8_encode(code, to);
}

size_t literal_string(struct arena *a, const char *s, size_t len, size_t at, struct value *ret,
                      const char **ret_wrong)
{
    size_t start = at + 1, end = start, n = 0;
    for (; end < len && s[end] != s[at]; end++) end += s[end] == '\\';
    if (end >= len) {
        *ret_wrong = "this string has no end";
        return len;
    }
    // no escape is shorter than what it stands for
    char *plain = arena_alloc(a, end - start + 4);
    for (size_t i = start; i < end && !*ret_wrong;) {
        char c = s[i++];
        if (c == '\\')
            n += unescape(s, end, &i, plain + n, ret_wrong);
        else
            plain[n++] = c;
    }
    *ret = string_new(a, plain, n, false);
    return end + 1;
}
