/* unicode.c: classes of characters, from utf8proc's categories, and cases. Cases that change a
 * character's number of code points follow from its case folding ("ß" folds to "ss", so its upper
 * case is "SS"). */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/unicode.h"
#include <utf8proc.h>

// ---- classes ------------------------------------------------------------------------------------

// Of a set of general categories: CATEGORY(LU) | CATEGORY(LL)
#define CATEGORY(name) (1u << UTF8PROC_CATEGORY_##name)

static bool has_category(uint32_t c, uint32_t categories)
{
    return categories >> utf8proc_category((utf8proc_int32_t)c) & 1;
}

// What belongs to a class beside the characters of its categories.
static bool is_beside(uint32_t c, enum unicode_class class)
{
    switch (class) {
    case STR_SPACE:
    case UNICODE_SPACE:
        return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
               (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
               c == 0x205F || c == 0x3000 || (class == STR_SPACE && c >= 0x1c && c <= 0x1f);
    case UNICODE_WORD:
        return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
               (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
               (c >= 0x1F170 && c <= 0x1F189);
    case STR_DIGIT: // superscripts, subscripts and circled digits, which are no decimals
        return c == 0xb2 || c == 0xb3 || c == 0xb9 || c == 0x2070 || (c >= 0x2074 && c <= 0x2079) ||
               (c >= 0x2080 && c <= 0x2089) || (c >= 0x2460 && c <= 0x2468) ||
               (c >= 0x2474 && c <= 0x247c) || (c >= 0x2488 && c <= 0x2490);
    case STR_PRINTABLE:
        return c == ' ';
    case STR_ASCII:
        return c < 0x80;
    case STR_LINE_END:
        return (c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
               c == 0x2029;
    case STR_WORD:
    case STR_NAME_START:
    case STR_NAME_PART:
        return c == '_';
    default:
        return false;
    }
}

bool unicode_is(uint32_t c, enum unicode_class class)
{
    enum {
        ALPHA = CATEGORY(LU) | CATEGORY(LL) | CATEGORY(LT) | CATEGORY(LM) | CATEGORY(LO),
        NUMERIC = CATEGORY(ND) | CATEGORY(NL) | CATEGORY(NO),
        NAME_START = ALPHA | CATEGORY(NL),
        NAME_PART = NAME_START | CATEGORY(ND) | CATEGORY(MN) | CATEGORY(MC) | CATEGORY(PC),
        SEPARATORS_AND_CONTROLS = CATEGORY(CN) | CATEGORY(ZS) | CATEGORY(ZL) | CATEGORY(ZP) |
                                  CATEGORY(CC) | CATEGORY(CF) | CATEGORY(CS) | CATEGORY(CO),
    };
    static const uint32_t categories[] = {
        [UNICODE_WORD] = NAME_PART | CATEGORY(ME),
        [STR_ALPHA] = ALPHA,
        [STR_DECIMAL] = CATEGORY(ND),
        [STR_DIGIT] = CATEGORY(ND),
        [STR_NUMERIC] = NUMERIC,
        [STR_ALNUM] = ALPHA | NUMERIC,
        [STR_PRINTABLE] = ~(uint32_t)SEPARATORS_AND_CONTROLS,
        [STR_WORD] = ALPHA | NUMERIC,
        [STR_NAME_START] = NAME_START,
        [STR_NAME_PART] = NAME_PART,
    };
    return has_category(c, categories[class]) || is_beside(c, class);
}

size_t unicode_skip(const char *s, size_t start, size_t end, enum unicode_class class)
{
    for (size_t next = start; start < end && unicode_is(utf8_next(s, end, &next), class);)
        start = next;
    return start;
}

size_t unicode_skip_back(const char *s, size_t start, size_t end, enum unicode_class class)
{
    for (size_t before = end; end > start && unicode_is(utf8_before(s, &before), class);)
        end = before;
    return end;
}

bool unicode_normalizes_since_9(uint32_t c)
{
    static const uint32_t ranges[][2] = {
        {0x7FD, 0x7FD},     {0x897, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
        {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0xECE, 0xECE},
        {0x1715, 0x1715},   {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},   {0x32FF, 0x32FF},
        {0xA7F1, 0xA7F4},   {0xA82C, 0xA82C},   {0xAB69, 0xAB69},   {0x105C9, 0x105C9},
        {0x105E4, 0x105E4}, {0x10781, 0x10785}, {0x10787, 0x107B0}, {0x107B2, 0x107BA},
        {0x10D24, 0x10D27}, {0x10D69, 0x10D6D}, {0x10EAB, 0x10EAC}, {0x10EFC, 0x10EFF},
        {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B},
        {0x11383, 0x11383}, {0x11385, 0x11385}, {0x1138E, 0x1138E}, {0x11391, 0x11391},
        {0x113C5, 0x113C5}, {0x113C7, 0x113C8}, {0x113CE, 0x113D0}, {0x1145E, 0x1145E},
        {0x11839, 0x1183A}, {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943},
        {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99},
        {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42},
        {0x16121, 0x16128}, {0x1612F, 0x1612F}, {0x16D68, 0x16D6A}, {0x16FF0, 0x16FF1},
        {0x1CCD6, 0x1CCF9}, {0x1E030, 0x1E06D}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136},
        {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1E5EE, 0x1E5EF},
        {0x1F16C, 0x1F16C}, {0x1FBF0, 0x1FBF9},
    };
    size_t low = 0, high = sizeof ranges / sizeof *ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (c > ranges[middle][1])
            low = middle + 1;
        else
            high = middle;
    }
    return low < sizeof ranges / sizeof *ranges && c >= ranges[low][0];
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

void unicode_put_case(const char *s, size_t len, enum text_case to, struct bytes *ret)
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

bool unicode_has_case(const char *s, size_t len, enum text_case which)
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
