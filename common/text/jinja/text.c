/* text.c: what Python's str knows of characters, by utf8proc's tables. Cases that change a
 * character's number of code points follow from its case folding ("ß" folds to "ss", so its upper
 * case is "SS"). No state; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/text.h"
#include "common/base/unicode.h"
#include <utf8proc.h>

// ---- classes ------------------------------------------------------------------------------------

static bool has_category(uint32_t c, uint32_t categories)
{
    return categories >> utf8proc_category((utf8proc_int32_t)c) & 1;
}

static bool is_space(uint32_t c)
{
    return unicode_is_space(c) || (c >= 0x1c && c <= 0x1f);
}

static bool is_line_end(uint32_t c)
{
    return (c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
           c == 0x2029;
}

// Superscripts, subscripts and circled digits: digits that are no decimals.
static bool is_small_digit(uint32_t c)
{
    return c == 0xb2 || c == 0xb3 || c == 0xb9 || c == 0x2070 || (c >= 0x2074 && c <= 0x2079) ||
           (c >= 0x2080 && c <= 0x2089) || (c >= 0x2460 && c <= 0x2468) ||
           (c >= 0x2474 && c <= 0x247c) || (c >= 0x2488 && c <= 0x2490);
}

bool text_is(uint32_t c, enum text_class of)
{
    enum {
        ALPHA = CATEGORY(LU) | CATEGORY(LL) | CATEGORY(LT) | CATEGORY(LM) | CATEGORY(LO),
        NUMERIC = CATEGORY(ND) | CATEGORY(NL) | CATEGORY(NO),
        NAME_START = ALPHA | CATEGORY(NL),
        SEPARATORS_AND_CONTROLS = CATEGORY(CN) | CATEGORY(ZS) | CATEGORY(ZL) | CATEGORY(ZP) |
                                  CATEGORY(CC) | CATEGORY(CF) | CATEGORY(CS) | CATEGORY(CO),
    };
    static const uint32_t classes[] = {
        [TEXT_ALPHA] = ALPHA,
        [TEXT_DECIMAL] = CATEGORY(ND),
        [TEXT_DIGIT] = CATEGORY(ND),
        [TEXT_NUMERIC] = NUMERIC,
        [TEXT_ALNUM] = ALPHA | NUMERIC,
        [TEXT_PRINTABLE] = ~SEPARATORS_AND_CONTROLS,
        [TEXT_WORD] = ALPHA | NUMERIC,
        [TEXT_NAME_START] = NAME_START,
        [TEXT_NAME_PART] = NAME_START | CATEGORY(ND) | CATEGORY(MN) | CATEGORY(MC) | CATEGORY(PC),
    };
    if (of == TEXT_SPACE) return is_space(c);
    if (of == TEXT_LINE_END) return is_line_end(c);
    if (of == TEXT_ASCII) return c < 0x80;
    if (has_category(c, classes[of])) return true;
    return of == TEXT_DIGIT       ? is_small_digit(c)
           : of == TEXT_PRINTABLE ? c == ' '
                                  : c == '_' && of >= TEXT_WORD;
}

size_t text_leading_spaces(const char *s, size_t len)
{
    return unicode_skip(s, 0, len, is_space);
}

size_t text_without_trailing_spaces(const char *s, size_t len)
{
    return unicode_skip_back(s, 0, len, is_space);
}

// ---- case ---------------------------------------------------------------------------------------

static bool is_upper(uint32_t c)
{
    return has_category(c, CATEGORY(LU));
}

static bool is_lower(uint32_t c)
{
    utf8proc_int32_t code = (utf8proc_int32_t)c;
    return has_category(c, CATEGORY(LL)) || c == 0xaa || c == 0xba ||
           (utf8proc_tolower(code) == code && utf8proc_toupper(code) != code);
}

static bool is_cased(uint32_t c)
{
    return has_category(c, CATEGORY(LU) | CATEGORY(LT)) || is_lower(c);
}

static void put_char(utf8proc_int32_t c, struct bytes *ret)
{
    char encoded[4];
    bytes_append(ret, encoded, (size_t)utf8_encode((uint32_t)c, encoded));
}

// Upper, title or folded case; by its folding where that is several code points.
static void put_folded(uint32_t c, enum text_case to, struct bytes *ret)
{
    utf8proc_int32_t folded[8], code = (utf8proc_int32_t)c, title = utf8proc_totitle(code);
    int last = 0, n = (int)utf8proc_decompose_char(code, folded, 8, UTF8PROC_CASEFOLD, &last);
    bool known = n >= 1 && n <= 8;
    bool one = !known || n == 1 || c < 0x80 || is_upper(c) ||
               (to == CASE_TITLE && has_category((uint32_t)title, CATEGORY(LT)));
    if (one && to != CASE_FOLD) {
        put_char(to == CASE_UPPER ? utf8proc_toupper(code) : title, ret);
        return;
    }
    if (!known) put_char(code, ret);
    for (int i = 0; known && i < n; i++)
        put_char(to == CASE_UPPER             ? utf8proc_toupper(folded[i])
                 : to == CASE_TITLE && i == 0 ? utf8proc_totitle(folded[i])
                                              : folded[i],
                 ret);
}

// A Σ that ends a word: after a cased character and before none, marks aside.
static bool is_final_sigma(const char *s, size_t len, size_t start, size_t end)
{
    bool cased = false;
    while (start > 0 && !cased) {
        uint32_t c = utf8_before(s, &start);
        cased = is_cased(c);
        if (!cased && !has_category(c, CATEGORY(MN))) return false;
    }
    while (cased && end < len) {
        uint32_t c = utf8_next(s, len, &end);
        if (is_cased(c)) return false;
        if (!has_category(c, CATEGORY(MN))) return true;
    }
    return cased;
}

void text_put_case(const char *s, size_t len, enum text_case to, struct bytes *ret)
{
    bool inside = false; // of a word, or behind the first character
    for (size_t at = 0; at < len;) {
        size_t start = at;
        uint32_t c = utf8_next(s, len, &at);
        bool starts = !inside && (to == CASE_TITLE || to == CASE_CAPITALIZE);
        if (to == CASE_UPPER || (to == CASE_SWAP && is_lower(c)))
            put_folded(c, CASE_UPPER, ret);
        else if (to == CASE_FOLD || starts)
            put_folded(c, starts ? CASE_TITLE : CASE_FOLD, ret);
        else if (to == CASE_SWAP && !is_upper(c))
            put_char((utf8proc_int32_t)c, ret);
        else if (c == 0x130) // the one whose lower case is two
            bytes_puts(ret, "i\xcc\x87");
        else if (c == 0x3a3 && is_final_sigma(s, len, start, at))
            put_char(0x3c2, ret);
        else
            put_char(utf8proc_tolower((utf8proc_int32_t)c), ret);
        inside = to == CASE_TITLE ? is_cased(c) : true;
    }
}

bool text_has_case(const char *s, size_t len, enum text_case which)
{
    bool any = false, inside = false;
    for (size_t at = 0; at < len;) {
        uint32_t c = utf8_next(s, len, &at);
        bool upper = has_category(c, CATEGORY(LU) | CATEGORY(LT)), cased = upper || is_lower(c);
        if (which == CASE_LOWER && upper) return false;
        if (which == CASE_UPPER && cased && !is_upper(c)) return false;
        if (which == CASE_TITLE && cased && upper == inside) return false;
        inside = cased;
        any |= cased;
    }
    return any;
}
