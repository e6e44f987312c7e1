/* literal.c: numbers and strings as a template writes them, by the rules of Jinja's lexer and of
 * Python's literals. No state; any thread. */
#include "common/base/bytes.h"
#include "common/jinja/lexer.h"
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>

// ---- numbers ------------------------------------------------------------------------------------

#define DECIMAL "0123456789"

// Behind digits of a set with single "_" between them, and before them where that is allowed.
static size_t digits(const char *s, size_t len, size_t at, const char *set, bool leading_underscore)
{
    size_t end = at;
    for (;;) {
        size_t next = end;
        if ((end > at || leading_underscore) && next < len && s[next] == '_') next++;
        if (next >= len || !s[next] || !strchr(set, s[next])) return end;
        end = next + 1;
    }
}

// 0: it is no float.
static size_t float_end(const char *s, size_t len, size_t at)
{
    if (at > 0 && s[at - 1] == '.') return 0;
    size_t end = digits(s, len, at, DECIMAL, false);
    bool fraction = false;
    if (end == at) return 0;
    if (end < len && s[end] == '.') {
        size_t more = digits(s, len, end + 1, DECIMAL, false);
        fraction = more > end + 1;
        if (fraction) end = more;
    }
    if (end < len && (s[end] | 0x20) == 'e') {
        size_t sign = end + 1;
        if (sign < len && (s[sign] == '-' || s[sign] == '+')) sign++;
        size_t more = digits(s, len, sign, DECIMAL, false);
        if (more > sign) return more;
    }
    return fraction ? end : 0;
}

static size_t integer_end(const char *s, size_t len, size_t at, int *ret_base)
{
    static const struct {
        char letter;
        int base;
        const char *set;
    } bases[] = {{'b', 2, "01"}, {'o', 8, "01234567"}, {'x', 16, "0123456789abcdefABCDEF"}};
    *ret_base = 10;
    if (s[at] != '0') return digits(s, len, at, DECIMAL, false);
    for (size_t i = 0; at + 1 < len && i < 3; i++) {
        if ((s[at + 1] | 0x20) != bases[i].letter) continue;
        size_t end = digits(s, len, at + 2, bases[i].set, true);
        if (end == at + 2) continue;
        *ret_base = bases[i].base;
        return end;
    }
    return digits(s, len, at, "0", false);
}

size_t literal_number(const char *s, size_t len, size_t at, struct value *ret,
                      const char **ret_wrong)
{
    char plain[400];
    int base = 10;
    size_t n = 0, end = float_end(s, len, at);
    bool real = end > 0;
    if (!real) end = integer_end(s, len, at, &base);
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
