/* status.c: the error sentence of each thread. The buffer is thread-local and of fixed size, so
 * that recording an error never allocates and never waits; a longer sentence is cut at a character.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/status.h"
#include "common/base/bytes.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MESSAGE_BYTES 2048

static _Thread_local char message[MESSAGE_BYTES];

const char *status_words(enum status code)
{
    static const char *const words[] = {
#define X(name, text) [name] = text,
        STATUS_TABLE(X)
#undef X
    };
    return (size_t)code < sizeof words / sizeof *words ? words[code] : "unknown error";
}

// Cuts a sentence that is too long without splitting a UTF-8 character: it may end up in a JSON
// response.
static void record(const char *sentence)
{
    size_t len = strnlen(sentence, MESSAGE_BYTES);
    if (len == MESSAGE_BYTES) len--;
    while (sentence[len] && len > 0 && ((unsigned char)sentence[len] & 0xc0) == 0x80) len--;
    memcpy(message, sentence, len);
    message[len] = 0;
}

enum status status_fail(enum status code, const char *format, ...)
{
    char sentence[MESSAGE_BYTES + 1] = ""; // not `message`, which may be among the arguments
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    record(sentence);
    return code;
}

enum status status_context(enum status code, const char *format, ...)
{
    if (code == ST_OK) return code;
    char sentence[2 * MESSAGE_BYTES + 1] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, MESSAGE_BYTES + 1, format, arguments);
    va_end(arguments);
    size_t len = strlen(sentence);
    snprintf(sentence + len, sizeof sentence - len, ": %s", message);
    record(sentence);
    return code;
}

const char *text_cut(const char *text, size_t len, size_t max, char *ret)
{
    size_t n = 0;
    len = strnlen(text, len > max ? max + 1 : len);
    for (size_t step; len > max && n < max; n += step) {
        const int character = utf8_sequence(text + n, len - n);
        step = character > 0 ? (size_t)character : 1;
        if (text[n] == '\\') step = text[n + 1] == 'u' ? strlen("\\uXXXX") : 2;
        if (n + step > max) break;
    }
    if (len <= max) n = len;
    memcpy(ret, text, n);
    strcpy(ret + n, n < len ? "..." : "");
    return ret;
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
