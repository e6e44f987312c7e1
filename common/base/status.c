/* status.c: the error sentence of each thread. The buffer is thread-local and of fixed size, so
 * that recording an error never allocates and never waits; a longer sentence is cut at a character.
 */
#include "common/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MESSAGE_BYTES 2048

static _Thread_local char message[MESSAGE_BYTES];

const char *status_words(enum status code)
{
    switch (code) {
#define X(name, words)                                                                             \
    case name:                                                                                     \
        return words;
        STATUS_TABLE(X)
#undef X
    }
    return "unknown error";
}

// Appends at `at`, cut to what fits without splitting a UTF-8 character (the sentence may end up in
// a JSON answer). Returns the new length.
static size_t put(char *buffer, size_t at, const char *text, size_t len)
{
    if (len > MESSAGE_BYTES - 1 - at) {
        len = MESSAGE_BYTES - 1 - at;
        while (len > 0 && ((unsigned char)text[len] & 0xc0) == 0x80) len--;
    }
    memcpy(buffer + at, text, len);
    buffer[at + len] = 0;
    return at + len;
}

// Formats into a second buffer first: an argument may be status_message() itself. One byte longer
// than a message, so that put() sees where a too long sentence has to be cut.
static size_t format_words(char words[MESSAGE_BYTES + 1], const char *format, va_list arguments)
{
    words[0] = 0;
    int n = vsnprintf(words, MESSAGE_BYTES + 1, format, arguments);
    if (n < 0) return 0;
    return (size_t)n < MESSAGE_BYTES ? (size_t)n : MESSAGE_BYTES;
}

enum status status_fail(enum status code, const char *format, ...)
{
    char words[MESSAGE_BYTES + 1];
    va_list arguments;
    va_start(arguments, format);
    size_t len = format_words(words, format, arguments);
    va_end(arguments);
    put(message, 0, words, len);
    return code;
}

enum status status_context(enum status code, const char *format, ...)
{
    if (code == ST_OK) return code;
    char words[MESSAGE_BYTES + 1], whole[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    size_t len = format_words(words, format, arguments);
    va_end(arguments);
    size_t at = put(whole, 0, words, len);
    at = put(whole, at, ": ", 2);
    at = put(whole, at, message, strlen(message));
    memcpy(message, whole, at + 1);
    return code;
}

const char *status_message(void)
{
    return message;
}

void status_keep(struct status_kept *kept, enum status code)
{
    kept->code = code;
    snprintf(kept->message, sizeof kept->message, "%s", code == ST_OK ? "" : message);
}

enum status status_recall(const struct status_kept *kept)
{
    return kept->code == ST_OK ? ST_OK : status_fail(kept->code, "%s", kept->message);
}
