/* unicode.c: classes of characters, from utf8proc's categories. No state; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/unicode.h"
#include "common/base/bytes.h"
#include <stddef.h>
#include <utf8proc.h>

bool unicode_is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

static bool has_category(uint32_t c, uint32_t categories)
{
    return categories >> utf8proc_category((utf8proc_int32_t)c) & 1;
}

bool unicode_is_word(uint32_t c)
{
    return has_category(c, CATEGORY(LU) | CATEGORY(LL) | CATEGORY(LT) | CATEGORY(LM) |
                               CATEGORY(LO) | CATEGORY(MN) | CATEGORY(MC) | CATEGORY(ME) |
                               CATEGORY(ND) | CATEGORY(NL) | CATEGORY(PC)) ||
           c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
           (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
           (c >= 0x1F170 && c <= 0x1F189);
}

bool unicode_is_numeric(uint32_t c)
{
    return has_category(c, CATEGORY(ND) | CATEGORY(NL) | CATEGORY(NO));
}

size_t unicode_skip(const char *s, size_t start, size_t end, bool (*is)(uint32_t c))
{
    for (size_t next = start; start < end && is(utf8_next(s, end, &next));) start = next;
    return start;
}

size_t unicode_skip_back(const char *s, size_t start, size_t end, bool (*is)(uint32_t c))
{
    for (size_t before = end; end > start && is(utf8_before(s, &before));) end = before;
    return end;
}

bool unicode_normalizes_since_9(uint32_t c)
{
    static const struct {
        uint32_t first, last;
    } ranges[] = {
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
    size_t low = 0, high = sizeof(ranges) / sizeof(ranges[0]);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (c > ranges[middle].last)
            low = middle + 1;
        else
            high = middle;
    }
    return low < sizeof(ranges) / sizeof(ranges[0]) && c >= ranges[low].first;
}
