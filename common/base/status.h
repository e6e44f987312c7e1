/* status.h: the one error type.
 *
 * A function that can fail returns `enum status`, ST_OK being 0. The sentence for a person (which
 * file, tensor or field, which value, which way out) is kept per thread, as errno is, and is set
 * where the fault is found. Callers pass the code on unchanged; they may put a few words before the
 * sentence with status_context(). Only a main prints it. The first error wins: clean-up code that
 * runs after a failure must not call status_fail() (its own failures are not news).
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_STATUS_H
#define COMMON_BASE_STATUS_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// name, words for "what kind of error"
#define STATUS_TABLE(X)                                                                            \
    X(ST_OK, "ok")                                                                                 \
    X(ST_NO_MEMORY, "out of memory")                                                               \
    X(ST_INVALID, "invalid argument")  /* a caller's value: flag, field, request */                \
    X(ST_FORMAT, "malformed input")    /* a file or message that does not parse or add up */       \
    X(ST_UNSUPPORTED, "not supported") /* well formed, but nothing here can do it */               \
    X(ST_TOO_LONG, "too long")         /* a prompt and its completion, for the context */          \
    X(ST_NOT_FOUND, "not found")                                                                   \
    X(ST_IO, "input/output error")  /* the system refused: open, read, write, socket */            \
    X(ST_MISMATCH, "mismatch")      /* two sides disagree: shape, dtype, layout, boot, GPU */      \
    X(ST_BUSY, "busy")              /* somebody else holds it: lease, queue full */                \
    X(ST_TIMEOUT, "timed out")      /* a deadline passed */                                        \
    X(ST_PEER_GONE, "peer is gone") /* the other process died or closed */                         \
    X(ST_TORN, "weights are torn")  /* an update was cut off half way */                           \
    X(ST_DEVICE, "device error")    /* CUDA, cuBLAS */                                             \
    X(ST_CANCELLED, "cancelled")

enum status {
#define X(name, words) name,
    STATUS_TABLE(X)
#undef X
};

// "malformed input" for ST_FORMAT; never NULL
const char *status_words(enum status code);

// Records the sentence for this thread and returns `code`, so that `return status_fail(...)` reads
// well.
enum status status_fail(enum status code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// Puts "<words>: " before the recorded sentence; returns `code`. Does nothing where code is ST_OK.
enum status status_context(enum status code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// The last sentence recorded on this thread; "" if none. Valid until the next call on this thread.
const char *status_message(void);

// What a sentence quotes of others' text (a request, a line, a value of JSON): no more than `max`
// bytes, whole characters and whole escapes ("\\n", "\\u00e9"), and "..." where that is not all of
// it.
#define CUT(text, max) text_cut(text, (size_t)-1, max, (char[(max) + 4]){0})
// The same of the first `len` bytes. ret: room for max + 4, which is returned.
const char *text_cut(const char *text, size_t len, size_t max, char *ret);

// A failure on its way to another thread.
struct status_kept {
    enum status code;
    char message[2048];
};
void status_keep(struct status_kept *kept, enum status code); // with this thread's sentence
enum status status_recall(const struct status_kept *kept);    // records it here; returns its code

// goto out on failure, for functions with `enum status st` and a label `out`
#define CHECK(expression)                                                                          \
    do {                                                                                           \
        st = (expression);                                                                         \
        if (st != ST_OK) goto out;                                                                 \
    } while (0)
// The same with a failure of this function's own: code, format, arguments.
#define FAIL(...) CHECK(status_fail(__VA_ARGS__))
// A pointer's value, which its owner gives away: what is behind `out` finds NULL.
#define TAKE_PTR(pointer)                                                                          \
    ({                                                                                             \
        __typeof__(pointer) taken_ = (pointer);                                                    \
        (pointer) = NULL;                                                                          \
        taken_;                                                                                    \
    })

#ifdef __cplusplus
}
#endif
#endif
