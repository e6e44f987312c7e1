/* safetensors.c: reading by mmap, with the header checked whole before any tensor is handed out,
 * and streaming atomic writing. A file is 8 bytes of header length (little endian), a JSON header
 * {"name": {"dtype", "shape", "data_offsets": [begin, end]}}, and the data. Any thread; a set is
 * read-only once opened. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/safetensors.h"
#include "common/base/bytes.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/model/gguf.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HEADER ((size_t)100 << 20) // as the reference reader
#define MAX_SHARDS 1024

struct shard {
    char *path;
    struct file_map map;
    json_t *header;
};
struct safetensors {
    int n_shards, n_entries, cap_entries;
    struct shard *shards;
    struct safetensors_entry *entries; // sorted by name
    const json_t *metadata;
    void *owner; // of what the entries point to, where that is no shard
    void (*free_owner)(void *);
};

void safetensors_free(struct safetensors *set)
{
    if (!set) return;
    for (int i = 0; i < set->n_shards; i++) {
        json_decref(set->shards[i].header);
        file_map_release(&set->shards[i].map);
        free(set->shards[i].path);
    }
    if (set->owner) set->free_owner(set->owner);
    free(set->shards);
    free(set->entries);
    free(set);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct safetensors_entry *)a)->name,
                  ((const struct safetensors_entry *)b)->name);
}

static int by_data(const void *a, const void *b)
{
    const struct safetensors_entry *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes; // empty tensors before what follows them
}

static enum status read_shape(const char *where, const char *name, const json_t *value,
                              struct safetensors_entry *e)
{
    const json_t *list = json_object_get(value, "shape"), *one;
    size_t i, count = 1;
    if (!json_is_array(list) || json_array_size(list) > sizeof e->shape / sizeof e->shape[0])
        return status_fail(ST_FORMAT, "%s: tensor %s: shape must be a list of at most 8 sizes",
                           where, name);
    json_array_foreach (list, i, one) {
        json_int_t size = json_is_integer(one) ? json_integer_value(one) : -1;
        if (size < 0 || (size > 0 && count > (size_t)LLONG_MAX / 8 / (size_t)size))
            return status_fail(ST_FORMAT, "%s: tensor %s: shape has an impossible size", where,
                               name);
        e->shape[e->n_dims++] = size;
        count *= (size_t)size;
    }
    e->bytes = count * dtype_size(e->dt);
    return ST_OK;
}

static enum status read_entry(const char *where, const char *name, const json_t *value,
                              const unsigned char *data, size_t data_len,
                              struct safetensors_entry *ret)
{
    struct safetensors_entry e = {.name = name, .file = where};
    const char *dtype = NULL;
    enum status st = json_get_string(where, value, "dtype", &dtype);
    if (st != ST_OK) return status_context(st, "tensor %s", name);
    int dt = dtype ? dtype_from_name(dtype) : -1;
    if (dt < 0)
        return status_fail(
            ST_UNSUPPORTED,
            "%s: tensor %s: dtype %s is not supported; F32, BF16, F16 and F8_E4M3 are", where, name,
            dtype ? dtype : "(missing)");
    e.dt = (enum dtype)dt;
    st = read_shape(where, name, value, &e);
    if (st != ST_OK) return st;
    const json_t *range = json_object_get(value, "data_offsets");
    const json_t *first = json_array_get(range, 0), *last = json_array_get(range, 1);
    if (json_array_size(range) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return status_fail(ST_FORMAT, "%s: tensor %s: data_offsets must be two integers", where,
                           name);
    json_int_t begin = json_integer_value(first), end = json_integer_value(last);
    if (begin < 0 || end < begin || (uint64_t)end > data_len)
        return status_fail(
            ST_FORMAT,
            "%s: tensor %s: data_offsets [%lld, %lld] leave the file, which has %zu bytes "
            "of data; the file is truncated or damaged",
            where, name, (long long)begin, (long long)end, data_len);
    if ((size_t)(end - begin) != e.bytes)
        return status_fail(ST_FORMAT,
                           "%s: tensor %s: shape and dtype need %zu bytes, data_offsets give %lld",
                           where, name, e.bytes, (long long)(end - begin));
    e.data = data + begin;
    *ret = e;
    return ST_OK;
}

static enum status check_coverage(const char *where, struct safetensors_entry *e, int n,
                                  const unsigned char *data, size_t data_len)
{
    const unsigned char *at = data;
    if (n > 0) qsort(e, (size_t)n, sizeof *e, by_data);
    for (int i = 0; i < n; i++) {
        const unsigned char *begin = e[i].data;
        if (begin < at)
            return status_fail(ST_FORMAT, "%s: tensors %s and %s overlap", where, e[i - 1].name,
                               e[i].name);
        if (begin > at)
            return status_fail(ST_FORMAT, "%s: %zu bytes before tensor %s belong to no tensor",
                               where, (size_t)(begin - at), e[i].name);
        at = begin + e[i].bytes;
    }
    if (at != data + data_len)
        return status_fail(ST_FORMAT, "%s: %zu bytes at the end belong to no tensor", where,
                           (size_t)(data + data_len - at));
    return ST_OK;
}

// Adds one file's tensors to the set. `shard` keeps the header, which owns the names.
static enum status add_file(struct safetensors *set, struct shard *shard, const char *where,
                            const unsigned char *file, size_t len)
{
    uint64_t header_len = 0;
    const char *name;
    json_t *value;
    enum status st = ST_OK;
    if (len < 8)
        return status_fail(ST_FORMAT, "%s: %zu bytes are too few for a safetensors file", where,
                           len);
    for (int i = 0; i < 8; i++) header_len |= (uint64_t)file[i] << (8 * i);
    if (header_len > MAX_HEADER || header_len > len - 8)
        return status_fail(
            ST_FORMAT,
            "%s: the header is said to be %llu bytes, the file has %zu; it is truncated or "
            "not a safetensors file",
            where, (unsigned long long)header_len, len);
    CHECK(json_parse(where, (const char *)file + 8, header_len, &shard->header));
    if (!json_is_object(shard->header) || file[8] != '{')
        return status_fail(ST_FORMAT, "%s: the header is not a JSON object", where);

    const unsigned char *data = file + 8 + header_len;
    size_t data_len = len - 8 - (size_t)header_len;
    int start = set->n_entries, room = start + (int)json_object_size(shard->header);
    struct safetensors_entry *grown = realloc(set->entries, (size_t)(room + 1) * sizeof *grown);
    if (!grown) return status_fail(ST_NO_MEMORY, "%s: no memory for %d tensors", where, room);
    set->entries = grown;
    json_object_foreach (shard->header, name, value) {
        if (strcmp(name, "__metadata__") == 0) {
            if (!set->metadata) set->metadata = value;
            continue;
        }
        CHECK(read_entry(where, name, value, data, data_len, &set->entries[set->n_entries]));
        set->n_entries++;
    }
    st = check_coverage(where, set->entries + start, set->n_entries - start, data, data_len);
out:
    return st;
}

static enum status finish_set(const char *where, struct safetensors *set)
{
    if (set->n_entries > 0)
        qsort(set->entries, (size_t)set->n_entries, sizeof *set->entries, by_name);
    for (int i = 1; i < set->n_entries; i++)
        if (strcmp(set->entries[i - 1].name, set->entries[i].name) == 0)
            return status_fail(ST_FORMAT, "%s: tensor %s is in %s and in %s", where,
                               set->entries[i].name, set->entries[i - 1].file,
                               set->entries[i].file);
    return ST_OK;
}

static enum status new_set(const char *where, int n_shards, struct safetensors **ret)
{
    struct safetensors *set = calloc(1, sizeof *set);
    if (set) set->shards = calloc((size_t)n_shards + 1, sizeof *set->shards);
    if (!set || !set->shards) {
        free(set);
        return status_fail(ST_NO_MEMORY, "%s: no memory", where);
    }
    set->n_shards = n_shards;
    *ret = set;
    return ST_OK;
}

// `data` NULL: the file at `path` is mapped.
static enum status open_shard(struct safetensors *set, struct shard *shard, const char *path,
                              const void *data, size_t len)
{
    enum status st;
    if (!(shard->path = strdup(path))) FAIL(ST_NO_MEMORY, "no memory for a path");
    if (!data) CHECK(file_map_open(path, &shard->map));
    st = add_file(set, shard, shard->path, data ? data : shard->map.data,
                  data ? len : shard->map.len);
out:
    return st;
}

static enum status open_single(const char *path, const void *data, size_t len,
                               struct safetensors **ret)
{
    struct safetensors *set = NULL;
    enum status st;
    CHECK(new_set(path, 1, &set));
    CHECK(open_shard(set, &set->shards[0], path, data, len));
    CHECK(finish_set(path, set));
    *ret = TAKE_PTR(set);
out:
    safetensors_free(set);
    return st;
}

enum status safetensors_from(const char *where, struct safetensors_entry *entries, int n,
                             void *owner, void (*free_owner)(void *), struct safetensors **ret)
{
    struct safetensors *set = NULL;
    enum status st = new_set(where, 0, &set);
    if (st != ST_OK) {
        free(entries);
        free_owner(owner);
        return st;
    }
    set->entries = entries;
    set->n_entries = n;
    set->owner = owner;
    set->free_owner = free_owner;
    st = finish_set(where, set);
    if (st == ST_OK)
        *ret = set;
    else
        safetensors_free(set);
    return st;
}

enum status safetensors_parse(const char *where, const void *data, size_t len,
                              struct safetensors **ret)
{
    return open_single(where, data ? data : "", data ? len : 0, ret);
}

enum status safetensors_open_file(const char *path, struct safetensors **ret)
{
    return open_single(path, NULL, 0, ret);
}

// The distinct file names of an index's weight_map.
static enum status list_shards(const char *where, const json_t *index, const char **ret_names,
                               int *ret_n)
{
    const json_t *map = json_object_get(index, "weight_map");
    const char *tensor;
    json_t *file;
    int n = 0;
    if (!json_is_object(map)) return status_fail(ST_FORMAT, "%s: weight_map is missing", where);
    json_object_foreach ((json_t *)map, tensor, file) {
        const char *name = json_string_value(file);
        if (!name || name[0] == '\0' || strchr(name, '/'))
            return status_fail(ST_FORMAT, "%s: weight_map: tensor %s names no file of this folder",
                               where, tensor);
        int i = 0;
        while (i < n && strcmp(ret_names[i], name) != 0) i++;
        if (i < n) continue;
        if (n == MAX_SHARDS)
            return status_fail(ST_UNSUPPORTED, "%s: more than %d shards", where, n);
        ret_names[n++] = name;
    }
    *ret_n = n;
    return ST_OK;
}

// Every tensor the index promises must be in the file it names.
static enum status check_index(const char *where, const json_t *index,
                               const struct safetensors *set)
{
    const char *tensor;
    json_t *file;
    json_object_foreach (json_object_get(index, "weight_map"), tensor, file) {
        const struct safetensors_entry *e = safetensors_find(set, tensor);
        const char *slash = e ? strrchr(e->file, '/') : NULL;
        if (!e || strcmp(slash ? slash + 1 : e->file, json_string_value(file)) != 0)
            return status_fail(ST_FORMAT, "%s: tensor %s is not in %s", where, tensor,
                               json_string_value(file));
    }
    return ST_OK;
}

enum status safetensors_open(const char *folder, struct safetensors **ret)
{
    struct safetensors *set = NULL;
    json_t *index = NULL;
    const char *names[MAX_SHARDS];
    char path[PATH_ROOM], index_path[PATH_ROOM];
    int n = 0;
    enum status st;
    CHECK(path_put(path, folder, "model.safetensors"));
    CHECK(path_put(index_path, folder, "model.safetensors.index.json"));
    if (gguf_is_file(folder)) {
        struct gguf *g = NULL;
        CHECK(gguf_open(folder, &g));
        st = gguf_tensors(g, ret);
        goto out;
    }
    if (!file_exists(index_path)) {
        st = safetensors_open_file(path, ret);
        if (st == ST_NOT_FOUND && !file_exists(folder))
            FAIL(ST_NOT_FOUND, "%s: no such folder", folder);
        if (st == ST_NOT_FOUND)
            FAIL(ST_NOT_FOUND,
                 "%s: neither model.safetensors nor model.safetensors.index.json is there; "
                 "other weight formats must be converted to safetensors first",
                 folder);
        goto out;
    }
    CHECK(json_read_file(index_path, MAX_HEADER, &index));
    CHECK(list_shards(index_path, index, names, &n));
    CHECK(new_set(folder, n, &set));
    for (int i = 0; i < n; i++) {
        CHECK(path_put(path, folder, "%s", names[i]));
        CHECK(open_shard(set, &set->shards[i], path, NULL, 0));
    }
    CHECK(finish_set(index_path, set));
    CHECK(check_index(index_path, index, set));
    *ret = TAKE_PTR(set);
out:
    safetensors_free(set);
    json_decref(index);
    return st;
}

int safetensors_count(const struct safetensors *set)
{
    return set->n_entries;
}

const struct safetensors_entry *safetensors_at(const struct safetensors *set, int i)
{
    return &set->entries[i];
}

const struct safetensors_entry *safetensors_find(const struct safetensors *set, const char *name)
{
    struct safetensors_entry key = {.name = name};
    if (set->n_entries == 0) return NULL;
    return bsearch(&key, set->entries, (size_t)set->n_entries, sizeof key, by_name);
}

const json_t *safetensors_metadata(const struct safetensors *set)
{
    return set->metadata;
}

// ---- writing ------------------------------------------------------------------------------------
static size_t source_bytes(const struct safetensors_source *s)
{
    size_t n = dtype_size(s->dt);
    for (int d = 0; d < s->n_dims; d++) n *= (size_t)s->shape[d];
    return n;
}

static enum status build_header(const struct safetensors_source *tensors, int n,
                                const json_t *metadata, struct bytes *ret)
{
    uint64_t offset = 0, len;
    json_t *header = json_object();
    if (metadata) json_object_set(header, "__metadata__", (json_t *)metadata);
    for (int i = 0; i < n; i++) {
        const struct safetensors_source *t = &tensors[i];
        json_t *shape = json_array();
        uint64_t end = offset + source_bytes(t);
        for (int d = 0; d < t->n_dims; d++) json_array_append_new(shape, json_integer(t->shape[d]));
        json_object_set_new(header, t->name,
                            json_pack("{s:s, s:o, s:[I, I]}", "dtype",
                                      dtype_safetensors_name(t->dt), "shape", shape, "data_offsets",
                                      (json_int_t)offset, (json_int_t)end));
        offset = end;
    }
    char *text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    if (!text) return status_fail(ST_NO_MEMORY, "no memory for a safetensors header");
    len = (strlen(text) + 7) / 8 * 8; // data starts 8-byte aligned, padded with spaces
    for (int i = 0; i < 8; i++) {
        unsigned char byte = (unsigned char)(len >> (8 * i));
        bytes_append(ret, &byte, 1);
    }
    bytes_puts(ret, text);
    for (size_t have = strlen(text); have < len; have++) bytes_append(ret, " ", 1);
    free(text);
    return bytes_status(ret);
}

enum status safetensors_write(const char *path, const struct safetensors_source *tensors, int n,
                              const json_t *metadata,
                              enum status (*read)(void *context, const struct safetensors_source *,
                                                  size_t bytes, void *to),
                              void *context)
{
    struct bytes header = BYTES_INIT;
    struct file_replacement file = {NULL, -1};
    void *buffer = NULL;
    size_t buffer_bytes = 0;
    enum status st;
    CHECK(build_header(tensors, n, metadata, &header));
    CHECK(file_replace_begin(path, 0644, &file));
    CHECK(file_write_all(file.fd, path, header.data, header.len));
    for (int i = 0; i < n; i++) {
        size_t bytes = source_bytes(&tensors[i]);
        if (bytes > buffer_bytes) {
            free(buffer);
            buffer = malloc(bytes);
            buffer_bytes = bytes;
            if (!buffer) FAIL(ST_NO_MEMORY, "%s: no memory for tensor %s", path, tensors[i].name);
        }
        CHECK(read(context, &tensors[i], bytes, buffer));
        CHECK(file_write_all(file.fd, path, buffer, bytes));
    }
out:
    if (file.fd >= 0) st = file_replace_end(path, &file, st);
    free(buffer);
    bytes_release(&header);
    return st;
}
