/* arena.h: memory of one template or one rendering: handed out piece by piece, freed as a whole.
 *
 * Because nothing else needs freeing, a failure leaves at once: arena_fail() jumps out of
 * arena_try(), however deep the parser or the interpreter is, and no function between carries a
 * status. Only jinja_parse(), jinja_render() and generators (call.c) try. One thread at a
 * time. */
#ifndef COMMON_JINJA_ARENA_H
#define COMMON_JINJA_ARENA_H

#include "common/base/status.h"
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

struct arena_block;
struct arena {
    struct arena_block *blocks;
    size_t used, limit; // bytes handed out, and how many may be
    jmp_buf *escape;    // of the innermost arena_try()
    enum status status; // what it returns
};

// Runs body(context); the status of arena_fail() within, or ST_OK. Memory stays.
enum status arena_try(struct arena *a, void (*body)(void *context), void *context);
_Noreturn void arena_fail(struct arena *a, enum status st, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// Zeroed, aligned for anything, never NULL: fails where there is no memory or the limit is reached.
void *arena_alloc(struct arena *a, size_t bytes);
void *arena_array(struct arena *a, size_t n, size_t bytes_each);
// `items` with room for one more than n: itself, or a larger copy where n has reached *cap.
void *arena_room(struct arena *a, void *items, size_t n, size_t *cap, size_t bytes_each);
void arena_release(struct arena *a);

#endif
