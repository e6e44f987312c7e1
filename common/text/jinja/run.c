/* run.c: memory, limits, failure, making values, and text under construction. Memory is a chain of
 * blocks, each filled from its start; a piece larger than a block gets its own. JSON becomes values
 * once, at the start of a rendering; its strings are borrowed. One thread at a time. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/run.h"
#include <stdalign.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_JSON_DEPTH 200
#define BLOCK_BYTES    ((size_t)64 << 10)

struct block {
    struct block *next;
    size_t used, size;
    alignas(max_align_t) char data[];
};

// ---- failure and limits -------------------------------------------------------------------------

enum status run_try(struct render *r, void (*body)(void *context), void *context)
{
    jmp_buf here, *outer = r->escape;
    r->escape = &here;
    if (setjmp(here) == 0) {
        body(context);
        r->status = ST_OK;
    }
    r->escape = outer;
    return r->status;
}

void fail_as(struct render *r, enum status st, const char *format, ...)
{
    char words[2000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    r->status = status_fail(st, "%s", words);
    longjmp(*r->escape, 1);
}

void run_steps(struct render *r, size_t n)
{
    if ((uint64_t)r->steps < n) r->steps = 0;
    if (r->steps == 0) fail(r, "the template takes more steps than the limit allows");
    r->steps -= (int64_t)n;
}

void run_bytes(struct render *r, size_t n)
{
    r->bytes += n;
    if (r->bytes >= 16) run_steps(r, r->bytes >> 4);
    r->bytes &= 15;
}

void run_deeper(struct render *r)
{
    if (++r->depth > r->max_depth)
        fail(r, "nested deeper than %d levels, which is the limit", r->max_depth);
    run_steps(r, 1);
}

// ---- memory -------------------------------------------------------------------------------------

void *run_alloc(struct render *r, size_t n, size_t bytes_each)
{
    const size_t align = alignof(max_align_t);
    size_t bytes;
    if (__builtin_mul_overflow(n, bytes_each, &bytes) || bytes > r->limit - r->used ||
        bytes > SIZE_MAX / 2)
        fail_as(r, ST_NO_MEMORY, "it needs more than %zu MiB of memory, which is the limit",
                r->limit >> 20);
    size_t rounded = (bytes + (bytes == 0) + align - 1) / align * align;
    struct block *block = r->blocks;
    if (!block || rounded > block->size - block->used) {
        const size_t size = rounded > BLOCK_BYTES ? rounded : BLOCK_BYTES;
        block = calloc(1, sizeof *block + size);
        if (!block) fail_as(r, ST_NO_MEMORY, "out of memory");
        block->size = size;
        // the block in use stays in front of one that is full
        struct block **at = r->blocks && size > BLOCK_BYTES ? &r->blocks->next : &r->blocks;
        block->next = *at;
        *at = block;
    }
    void *piece = block->data + block->used;
    block->used += rounded;
    r->used = rounded > r->limit - r->used ? r->limit : r->used + rounded;
    return piece;
}

void *run_room(struct render *r, void *items, size_t n, size_t *cap, size_t bytes_each)
{
    if (n < *cap) return items;
    size_t larger = *cap ? 2 * *cap : 4;
    void *copy = run_alloc(r, larger, bytes_each);
    if (n > 0) memcpy(copy, items, n * bytes_each);
    *cap = larger;
    return copy;
}

void run_release(struct render *r)
{
    while (r->blocks) {
        struct block *block = r->blocks;
        r->blocks = block->next;
        free(block);
    }
    bytes_release(&r->text);
}

// ---- values -------------------------------------------------------------------------------------

const char *value_type(struct value v)
{
    static const char *const names[] = {
#define X(name, type) type,
        KIND_TABLE(X)
#undef X
    };
    return v.kind == V_STRING && v.string->markup ? "Markup" : names[v.kind];
}

struct value string_new(struct render *r, const char *data, size_t n_bytes, bool markup)
{
    struct string *s = run_alloc(r, 1, sizeof *s);
    *s = (struct string){data, n_bytes, utf8_count(data, n_bytes), markup};
    return value_string(s);
}

struct value string_of(struct render *r, const char *text)
{
    return string_new(r, text, strlen(text), false);
}

struct value string_part(struct render *r, const struct string *of, size_t start, size_t end)
{
    run_bytes(r, end - start);
    return string_new(r, of->data + start, end - start, of->markup);
}

struct value list_of(struct render *r, enum value_kind kind, struct list items)
{
    struct list *list = run_alloc(r, 1, sizeof *list);
    *list = items;
    return value_of(.kind = kind, .list = list);
}

struct value list_new(struct render *r, enum value_kind kind, size_t n)
{
    return list_of(r, kind, LIST(run_alloc(r, n, sizeof(struct value)), n));
}

struct value pair_of(struct render *r, struct value first, struct value second)
{
    struct value pair = list_new(r, V_TUPLE, 2);
    pair.list->items[0] = first;
    pair.list->items[1] = second;
    return pair;
}

struct value iterator_of(struct render *r, struct list items)
{
    struct iterator *iterator = run_alloc(r, 1, sizeof *iterator);
    iterator->items = items;
    return value_of(.kind = V_ITERATOR, .iterator = iterator);
}

struct value dict_new(struct render *r, size_t cap)
{
    struct dict *d = run_alloc(r, 1, sizeof *d);
    *d = (struct dict){run_alloc(r, cap, sizeof *d->entries), 0, cap};
    return value_of(.kind = V_DICT, .dict = d);
}

void dict_append(struct render *r, struct dict *d, struct value key, struct value value)
{
    d->entries = run_room(r, d->entries, d->n, &d->cap, sizeof *d->entries);
    d->entries[d->n++] = (struct dict_entry){key, value};
}

struct value value_from_json(struct render *r, const json_t *json, int depth)
{
    struct value v = NONE;
    if (depth > MAX_JSON_DEPTH)
        fail(r, "the messages are nested deeper than %d levels", MAX_JSON_DEPTH);
    switch (json_typeof(json)) {
    case JSON_OBJECT:
        v = dict_new(r, json_object_size(json));
        for (void *at = json_object_iter((json_t *)json); at; // only read
             at = json_object_iter_next((json_t *)json, at))
            dict_append(r, v.dict, string_of(r, json_object_iter_key(at)),
                        value_from_json(r, json_object_iter_value(at), depth + 1));
        break;
    case JSON_ARRAY:
        v = list_new(r, V_LIST, json_array_size(json));
        for (size_t i = 0; i < v.list->n; i++)
            v.list->items[i] = value_from_json(r, json_array_get(json, i), depth + 1);
        break;
    case JSON_STRING:
        return string_new(r, json_string_value(json), json_string_length(json), false);
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
    return v.kind == V_STRING &&
           string_equal(v.string, &(struct string){.data = text, .n_bytes = strlen(text)});
}

size_t string_offset(const struct string *s, size_t i)
{
    if (s->n_chars == s->n_bytes) return i;
    size_t at = 0;
    for (; i > 0 && at < s->n_bytes; i--) utf8_next(s->data, s->n_bytes, &at);
    return at;
}

// ---- text under construction --------------------------------------------------------------------

static void check_text(struct render *r, size_t more)
{
    if (r->text.failed || more > r->limit || r->text.len > r->limit - more)
        fail_as(r, ST_NO_MEMORY, "a text grows beyond %zu MiB, which is the limit", r->limit >> 20);
}

void put_bytes(struct render *r, const char *data, size_t n)
{
    check_text(r, n);
    run_bytes(r, n + 1);
    bytes_append(&r->text, data, n);
}

void put_fill(struct render *r, const struct string *s, int64_t times)
{
    for (int64_t i = 0; i < times; i++) put_string(r, s);
}

void put_text(struct render *r, const char *text)
{
    put_bytes(r, text, strlen(text));
}

void put_string(struct render *r, const struct string *s)
{
    put_bytes(r, s->data, s->n_bytes);
}

void put_printf(struct render *r, const char *format, ...)
{
    char text[800];
    va_list arguments;
    run_steps(r, 1);
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    put_text(r, text);
}

struct value text_end(struct render *r, size_t begin, bool markup)
{
    check_text(r, 0);
    size_t n = r->text.len - begin;
    run_bytes(r, n);
    char *copy = run_alloc(r, n + 1, 1);
    memcpy(copy, bytes_text(&r->text) + begin, n);
    r->text.len = begin;
    return string_new(r, copy, n, markup);
}
