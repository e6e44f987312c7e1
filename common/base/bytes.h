/* bytes.h: a growable byte buffer, always followed by a NUL that `len` does not count, and base64.
 * Appending fails only for want of memory; such a failure sticks (`failed`) and later appends do
 * nothing, so that a caller builds a whole text and checks once with bytes_status(). */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_BYTES_H
#define COMMON_BASE_BYTES_H

#include "common/base/status.h"
#include <stdarg.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct bytes {
    char *data; // NULL until the first append; use bytes_text() where a string is needed
    size_t len, cap;
    bool failed;
};
#define BYTES_INIT                                                                                 \
    {                                                                                              \
        NULL, 0, 0, false                                                                          \
    }

void bytes_release(struct bytes *b); // frees; leaves BYTES_INIT
void bytes_clear(struct bytes *b);   // len = 0, keeps the memory
void bytes_append(struct bytes *b, const void *data, size_t len);
void bytes_puts(struct bytes *b, const char *text);
void bytes_printf(struct bytes *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void bytes_vprintf(struct bytes *b, const char *format, va_list arguments)
    __attribute__((format(printf, 2, 0)));
bool bytes_reserve(struct bytes *b, size_t more); // room for `more` bytes after len
const char *bytes_text(const struct bytes *b);    // never NULL
enum status bytes_status(const struct bytes *b);

// Room for one more behind the n elements of an array that only ever grows by one: the array, moved
// where it was full, which it is at every power of two; NULL for want of memory, and the array is
// as it was.
void *array_room(void *array, size_t n, size_t size);

// Takes `item` out of the list that begins with `first` and is linked by `next`, where it is.
#define LIST_REMOVE(first, item)                                                                   \
    do {                                                                                           \
        __typeof__(item) *link_ = &(first);                                                        \
        while (*link_ != (item)) link_ = &(*link_)->next;                                          \
        *link_ = (item)->next;                                                                     \
    } while (0)

// RFC 4648 with padding. Decoding refuses anything that is not whole base64. The
// result replaces what an initialised buffer held.
enum status base64_encode(const void *data, size_t len, struct bytes *ret_text);
enum status base64_decode(const char *text, struct bytes *ret_data);

// Strict UTF-8 (no surrogates, no overlong forms). Length of the sequence at s (1..4), 0 if it is
// malformed, -1 if it is well formed so far but cut off at `len`.
int utf8_sequence(const char *s, size_t len);
uint32_t utf8_decode(const char *s, int n); // the code point of a well-formed sequence of n bytes
int utf8_encode(uint32_t code_point, char ret[4]);
// The character at *at < len, which is moved behind it; a byte that begins none is U+FFFD.
uint32_t utf8_next(const char *s, size_t len, size_t *at);
uint32_t utf8_before(const char *s, size_t *at);     // the one before *at > 0, which is moved to it
size_t utf8_count(const char *data, size_t n_bytes); // characters of valid UTF-8
size_t utf8_valid(const char *s, size_t len);        // bytes of whole characters at the start

#ifdef __cplusplus
}
#endif
#endif
