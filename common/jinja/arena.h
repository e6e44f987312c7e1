/* arena.h: memory of one template or one rendering: handed out piece by piece, freed as a whole.
 * One thread at a time. */
#ifndef COMMON_JINJA_ARENA_H
#define COMMON_JINJA_ARENA_H

#include "common/base/status.h"
#include <stddef.h>
#include <stdint.h>

struct arena_block;
struct arena {
    struct arena_block *blocks;
    size_t used, limit; // bytes handed out, and how many may be
};

// Zeroed, aligned for anything; NULL: no memory, or over the limit (the status message says which).
void *arena_alloc(struct arena *a, size_t bytes);
void *arena_array(struct arena *a, size_t n, size_t bytes_each);
void arena_release(struct arena *a);

#endif
