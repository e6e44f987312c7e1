/* arena.c: a chain of blocks, each filled from its start. A piece larger than a block gets its own.
 * One thread at a time. */
#include "common/jinja/arena.h"
#include <stdalign.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES ((size_t)64 << 10)

struct arena_block {
    struct arena_block *next;
    size_t used, size;
    alignas(max_align_t) char data[];
};

enum status arena_try(struct arena *a, void (*body)(void *context), void *context)
{
    jmp_buf here, *outer = a->escape;
    a->escape = &here;
    if (setjmp(here) == 0) {
        body(context);
        a->status = ST_OK;
    }
    a->escape = outer;
    return a->status;
}

void arena_fail(struct arena *a, enum status st, const char *format, ...)
{
    char words[2000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    a->status = status_fail(st, "%s", words);
    longjmp(*a->escape, 1);
}

static struct arena_block *add_block(struct arena *a, size_t size)
{
    struct arena_block *block = calloc(1, sizeof *block + size);
    if (!block) arena_fail(a, ST_NO_MEMORY, "out of memory");
    block->size = size;
    if (a->blocks && size > BLOCK_BYTES) { // the block in use stays in front
        block->next = a->blocks->next;
        a->blocks->next = block;
    } else {
        block->next = a->blocks;
        a->blocks = block;
    }
    return block;
}

void *arena_alloc(struct arena *a, size_t bytes)
{
    const size_t align = alignof(max_align_t);
    if (bytes > a->limit - a->used || bytes > SIZE_MAX / 2)
        arena_fail(a, ST_NO_MEMORY, "it needs more than %zu MiB of memory, which is the limit",
                   a->limit >> 20);
    size_t rounded = (bytes + align - 1) / align * align;
    if (rounded == 0) rounded = align;
    struct arena_block *block = a->blocks;
    if (!block || rounded > block->size - block->used)
        block = add_block(a, rounded > BLOCK_BYTES ? rounded : BLOCK_BYTES);
    void *piece = block->data + block->used;
    block->used += rounded;
    a->used = rounded > a->limit - a->used ? a->limit : a->used + rounded;
    return piece;
}

void *arena_array(struct arena *a, size_t n, size_t bytes_each)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, bytes_each, &bytes)) bytes = SIZE_MAX;
    return arena_alloc(a, bytes);
}

void *arena_room(struct arena *a, void *items, size_t n, size_t *cap, size_t bytes_each)
{
    if (n < *cap) return items;
    size_t larger = *cap ? 2 * *cap : 4;
    void *copy = arena_array(a, larger, bytes_each);
    if (n > 0) memcpy(copy, items, n * bytes_each);
    *cap = larger;
    return copy;
}

void arena_release(struct arena *a)
{
    while (a->blocks) {
        struct arena_block *block = a->blocks;
        a->blocks = block->next;
        free(block);
    }
    a->used = 0;
}
