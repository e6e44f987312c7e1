/* value.c: memory, making values, and their names. An arena is a chain of blocks, each filled from
 * its start; a piece larger than a block gets its own. JSON becomes values once, at the start of a
 * rendering; its strings are borrowed. One thread at a time. */
#include "common/text/jinja/value.h"
#include "common/base/bytes.h"
#include <stdalign.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_JSON_DEPTH 200
#define BLOCK_BYTES    ((size_t)64 << 10)

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

// ---- making them --------------------------------------------------------------------------------

struct value string_new(struct arena *a, const char *data, size_t n_bytes, bool markup)
{
    struct string *s = arena_alloc(a, sizeof *s);
    *s = (struct string){data, n_bytes, utf8_count(data, n_bytes), markup};
    return value_string(s);
}

struct value string_copy(struct arena *a, const char *data, size_t n_bytes, bool markup)
{
    char *copy = arena_alloc(a, n_bytes + 1);
    if (n_bytes > 0) memcpy(copy, data, n_bytes);
    return string_new(a, copy, n_bytes, markup);
}

struct value string_of(struct arena *a, const char *text)
{
    return string_new(a, text, strlen(text), false);
}

struct value list_of(struct arena *a, enum value_kind kind, struct list items)
{
    struct list *list = arena_alloc(a, sizeof *list);
    *list = items;
    return value_of(.kind = kind, .list = list);
}

struct value list_new(struct arena *a, enum value_kind kind, size_t n)
{
    struct value *items = arena_array(a, n, sizeof *items);
    return list_of(a, kind, (struct list){.items = items, .n = n});
}

struct value pair_of(struct arena *a, struct value first, struct value second)
{
    struct value pair = list_new(a, V_TUPLE, 2);
    pair.list->items[0] = first;
    pair.list->items[1] = second;
    return pair;
}

struct value iterator_of(struct arena *a, struct list items)
{
    struct iterator *iterator = arena_alloc(a, sizeof *iterator);
    iterator->items = items;
    return value_of(.kind = V_ITERATOR, .iterator = iterator);
}

struct value dict_new(struct arena *a, size_t cap)
{
    struct dict *d = arena_alloc(a, sizeof *d);
    *d = (struct dict){arena_array(a, cap, sizeof *d->entries), 0, cap};
    return value_of(.kind = V_DICT, .dict = d);
}

void dict_append(struct arena *a, struct dict *d, struct value key, struct value value)
{
    d->entries = arena_room(a, d->entries, d->n, &d->cap, sizeof *d->entries);
    d->entries[d->n++] = (struct dict_entry){key, value};
}

// ---- from JSON ----------------------------------------------------------------------------------

struct value value_from_json(struct arena *a, const json_t *json, int depth)
{
    struct value v = NONE;
    if (depth > MAX_JSON_DEPTH)
        arena_fail(a, ST_INVALID, "the messages are nested deeper than %d levels", MAX_JSON_DEPTH);
    switch (json_typeof(json)) {
    case JSON_OBJECT:
        v = dict_new(a, json_object_size(json));
        for (void *at = json_object_iter((json_t *)json); at; // only read
             at = json_object_iter_next((json_t *)json, at))
            dict_append(a, v.dict, string_of(a, json_object_iter_key(at)),
                        value_from_json(a, json_object_iter_value(at), depth + 1));
        break;
    case JSON_ARRAY:
        v = list_new(a, V_LIST, json_array_size(json));
        for (size_t i = 0; i < v.list->n; i++)
            v.list->items[i] = value_from_json(a, json_array_get(json, i), depth + 1);
        break;
    case JSON_STRING:
        return string_new(a, json_string_value(json), json_string_length(json), false);
    case JSON_INTEGER:
        return value_int(json_integer_value(json));
    case JSON_REAL:
        return value_float(json_real_value(json));
    case JSON_TRUE:
    case JSON_FALSE:
        return value_bool(json_is_true(json));
    case JSON_NULL:
        break;
    }
    return v;
}

// ---- strings ------------------------------------------------------------------------------------

bool string_equal(const struct string *a, const struct string *b)
{
    return a->n_bytes == b->n_bytes && memcmp(a->data, b->data, a->n_bytes) == 0;
}

bool string_is(const struct string *s, const char *text)
{
    return s->n_bytes == strlen(text) && memcmp(s->data, text, s->n_bytes) == 0;
}

int string_word(const struct string *s, const char *words)
{
    for (int i = 0; *words; i++) {
        size_t n = strcspn(words, " ");
        if (n == s->n_bytes && memcmp(words, s->data, n) == 0) return i;
        words += n + (words[n] == ' ');
    }
    return -1;
}

bool value_is(struct value v, const char *text)
{
    return v.kind == V_STRING && string_is(v.string, text);
}

size_t string_offset(const struct string *s, size_t i)
{
    if (s->n_chars == s->n_bytes) return i;
    size_t at = 0;
    for (; i > 0 && at < s->n_bytes; i--) {
        at++;
        while (at < s->n_bytes && ((unsigned char)s->data[at] & 0xc0) == 0x80) at++;
    }
    return at;
}

// ---- names --------------------------------------------------------------------------------------

const char *value_type(struct value v)
{
    static const char *const names[] = {
#define X(name, type) type,
        KIND_TABLE(X)
#undef X
    };
    return v.kind == V_STRING && v.string->markup ? "Markup" : names[v.kind];
}
