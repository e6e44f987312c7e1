/* bytes.c: growable byte buffer, base64 and UTF-8. Plain functions on storage of the caller, no
 * global state: any thread, each on its own buffers. Growth doubles, so that a text built piece by
 * piece costs linear time. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/bytes.h"

#include <limits.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void bytes_release(struct bytes *b)
{
    if (!b) return;
    free(b->data);
    *b = (struct bytes)BYTES_INIT;
}

void bytes_clear(struct bytes *b)
{
    b->len = 0;
    b->failed = false;
    if (b->data) b->data[0] = 0;
}

bool bytes_reserve(struct bytes *b, size_t more)
{
    if (b->failed) return false;
    size_t need;
    if (__builtin_add_overflow(b->len, more, &need) || __builtin_add_overflow(need, 1, &need)) {
        b->failed = true;
        return false;
    }
    if (need <= b->cap) return true;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < need)
        if (__builtin_mul_overflow(cap, 2, &cap)) cap = need;
    char *data = realloc(b->data, cap);
    if (!data) {
        b->failed = true;
        return false;
    }
    if (!b->data) data[0] = 0;
    b->data = data;
    b->cap = cap;
    return true;
}

void bytes_append(struct bytes *b, const void *data, size_t len)
{
    if (!bytes_reserve(b, len)) return;
    if (len > 0) memcpy(b->data + b->len, data, len);
    b->len += len;
    b->data[b->len] = 0;
}

void bytes_puts(struct bytes *b, const char *text)
{
    bytes_append(b, text, strlen(text));
}

void bytes_vprintf(struct bytes *b, const char *format, va_list arguments)
{
    va_list again;
    va_copy(again, arguments);
    int n = b->failed ? 0 : vsnprintf(NULL, 0, format, again);
    va_end(again);
    if (n < 0) b->failed = true;
    if (!bytes_reserve(b, n < 0 ? 0 : (size_t)n)) return;
    vsnprintf(b->data + b->len, (size_t)n + 1, format, arguments);
    b->len += (size_t)n;
}

void bytes_printf(struct bytes *b, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    bytes_vprintf(b, format, arguments);
    va_end(arguments);
}

const char *bytes_text(const struct bytes *b)
{
    return b->data ? b->data : "";
}

enum status bytes_status(const struct bytes *b)
{
    if (!b->failed) return ST_OK;
    return status_fail(ST_NO_MEMORY, "out of memory: a buffer of %zu bytes could not grow", b->len);
}

void *array_room(void *array, size_t n, size_t size)
{
    if (array && (n & (n - 1)) != 0) return array;
    return n > SIZE_MAX / 2 ? NULL : reallocarray(array, n ? 2 * n : 1, size);
}

// ---- base64 -------------------------------------------------------------------------------------

// Puts what was made in the place of what *ret held.
static enum status replace_bytes(struct bytes *made, struct bytes *ret)
{
    enum status st = bytes_status(made);
    if (st == ST_OK) {
        struct bytes swap = *ret;
        *ret = *made;
        *made = swap;
    }
    bytes_release(made);
    return st;
}

enum status base64_encode(const void *data, size_t len, struct bytes *ret_text)
{
    struct bytes text = BYTES_INIT;
    if (len > INT_MAX / 2 || !bytes_reserve(&text, (len + 2) / 3 * 4))
        text.failed = true;
    else
        text.len = (size_t)EVP_EncodeBlock((unsigned char *)text.data, data, (int)len);
    return replace_bytes(&text, ret_text);
}

// Whole groups, the alphabet, padding at the end alone, and unused bits of the last character zero:
// OpenSSL lets more pass.
static enum status base64_check(const char *text, size_t len, size_t padding)
{
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t good = strspn(text, alphabet);
    const int unused = padding == 2 ? 0x0f : padding == 1 ? 0x03 : 0;
    if (len % 4 != 0)
        return status_fail(ST_FORMAT,
                           "base64 text of %zu characters is cut off: its length must be "
                           "a multiple of 4",
                           len);
    if (good < len - padding)
        return status_fail(ST_FORMAT,
                           "base64 text has byte 0x%02x at %zu, which is not of its alphabet",
                           (unsigned char)text[good], good);
    if (padding > 0 && ((strchr(alphabet, text[good - 1]) - alphabet) & unused) != 0)
        return status_fail(ST_FORMAT, "base64 text ends in '%s', whose unused bits are not zero",
                           text + good - 1);
    return ST_OK;
}

enum status base64_decode(const char *text, struct bytes *ret_data)
{
    size_t len = strlen(text);
    size_t padding = len >= 4 && text[len - 1] == '=' ? (text[len - 2] == '=' ? 2 : 1) : 0;
    enum status st = base64_check(text, len, padding);
    if (st != ST_OK) return st;
    struct bytes data = BYTES_INIT;
    if (len > INT_MAX || !bytes_reserve(&data, len / 4 * 3))
        data.failed = true;
    else if (len > 0) // the padding gives zeros
        data.len = (size_t)EVP_DecodeBlock((unsigned char *)data.data, (const unsigned char *)text,
                                           (int)len) -
                   padding;
    bytes_append(&data, "", 0);
    return replace_bytes(&data, ret_data);
}

// ---- UTF-8 (Unicode, table 3-7: well-formed byte sequences) -------------------------------------

int utf8_sequence(const char *s, size_t len)
{
    if (len == 0) return -1;
    const unsigned char *p = (const unsigned char *)s;
    unsigned char first = p[0];
    if (first < 0x80) return 1;
    if (first < 0xc2 || first > 0xf4) return 0;
    int n = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    for (int i = 1; i < n; i++) {
        if ((size_t)i >= len) return -1;
        unsigned char low = 0x80, high = 0xbf;
        if (i == 1) { // the second byte rules out overlong forms, surrogates and beyond U+10FFFF
            if (first == 0xe0) low = 0xa0;
            if (first == 0xed) high = 0x9f;
            if (first == 0xf0) low = 0x90;
            if (first == 0xf4) high = 0x8f;
        }
        if (p[i] < low || p[i] > high) return 0;
    }
    return n;
}

uint32_t utf8_decode(const char *s, int n)
{
    const unsigned char *p = (const unsigned char *)s;
    static const unsigned char first_mask[5] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    uint32_t code = p[0] & first_mask[n];
    for (int i = 1; i < n; i++) code = code << 6 | (p[i] & 0x3fu);
    return code;
}

int utf8_encode(uint32_t code_point, char ret[4])
{
    int n = code_point < 0x80 ? 1 : code_point < 0x800 ? 2 : code_point < 0x10000 ? 3 : 4;
    static const unsigned char first_mark[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (int i = n - 1; i > 0; i--) {
        ret[i] = (char)(0x80 | (code_point & 0x3f));
        code_point >>= 6;
    }
    ret[0] = (char)(first_mark[n] | code_point);
    return n;
}

size_t utf8_count(const char *data, size_t n_bytes)
{
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) n += ((unsigned char)data[i] & 0xc0) != 0x80;
    return n;
}

size_t utf8_valid(const char *s, size_t len)
{
    size_t at = 0;
    for (int n; at < len && (n = utf8_sequence(s + at, len - at)) > 0;) at += (size_t)n;
    return at;
}

uint32_t utf8_next(const char *s, size_t len, size_t *at)
{
    const char *here = s + *at;
    int n = (unsigned char)*here < 0x80 ? 1 : utf8_sequence(here, len - *at);
    *at += n > 0 ? (size_t)n : 1;
    return n > 0 ? utf8_decode(here, n) : 0xFFFD;
}

uint32_t utf8_before(const char *s, size_t *at)
{
    size_t end = *at, start = end - 1;
    while (start > 0 && ((unsigned char)s[start] & 0xC0) == 0x80) start--;
    *at = start;
    return utf8_next(s, end, &start);
}
