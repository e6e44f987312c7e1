/* gguf.c: the container: "GGUF", version, numbers of tensors and of metadata, the metadata (key,
 * type, value), the tensors (name, sizes from the innermost on, type, offset), and behind the next
 * multiple of general.alignment their data. Little endian. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/gguf.h"
#include "common/base/json.h"
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAGIC        0x46554747 // "GGUF"
#define MAX_ELEMENTS (1 << 22)  // of an array; the largest vocabularies have 2^18

enum { TYPE_F32 = 6, TYPE_BOOL, TYPE_STRING, TYPE_ARRAY, TYPE_F64 = 12 };

// What is left of the file. Reading past its end gives zeros and is kept in mind.
struct cursor {
    const char *where;
    const uint8_t *at, *end;
    bool cut;
};

void gguf_free(struct gguf *g)
{
    if (!g) return;
    file_map_release(&g->map);
    json_decref(g->metadata);
    free(g->tensors);
    free(g->where);
    free(g);
}

static uint64_t take_number(struct cursor *c, size_t bytes)
{
    uint64_t x = 0;
    c->cut |= (size_t)(c->end - c->at) < bytes;
    for (size_t i = 0; i < bytes && !c->cut; i++) x |= (uint64_t)*c->at++ << (8 * i);
    return x;
}

static enum status check_cut(const struct cursor *c)
{
    if (!c->cut) return ST_OK;
    return status_fail(ST_FORMAT, "%s: the file ends within its header; it is truncated or damaged",
                       c->where);
}

// Not ended by a NUL; "" where the file is too short.
static const char *take_text(struct cursor *c, size_t *ret_len)
{
    const uint64_t len = take_number(c, 8);
    const char *text = (const char *)c->at;
    c->cut |= len > (size_t)(c->end - c->at);
    *ret_len = c->cut ? 0 : (size_t)len;
    c->at += *ret_len;
    return text;
}

static enum status take_name(struct cursor *c, char ret[GGUF_NAME])
{
    size_t len = 0;
    const char *text = take_text(c, &len);
    if (len >= GGUF_NAME)
        return status_fail(ST_FORMAT, "%s: a name of %zu bytes; it is damaged", c->where, len);
    memcpy(ret, text, len);
    ret[len] = '\0';
    return check_cut(c);
}

static json_t *take_scalar(struct cursor *c, uint32_t type)
{
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    size_t len = 0;
    float f;
    double d;
    if (type == TYPE_STRING) {
        const char *text = take_text(c, &len);
        return json_stringn(text, len);
    }
    const uint64_t x = take_number(c, sizes[type]);
    const int spare = 64 - 8 * sizes[type];
    memcpy(&f, &(uint32_t){(uint32_t)x}, sizeof f);
    memcpy(&d, &x, sizeof d);
    if (type == TYPE_BOOL) return json_boolean(x);
    if (type == TYPE_F32 || type == TYPE_F64) return json_real(type == TYPE_F32 ? f : d);
    const bool has_sign = type % 2 == (type < TYPE_F32);
    return json_integer(has_sign ? (int64_t)(x << spare) >> spare : (int64_t)x);
}

static enum status take_value(struct cursor *c, json_t *metadata)
{
    char key[GGUF_NAME];
    enum status st = take_name(c, key);
    if (st != ST_OK) return st;
    uint32_t type = (uint32_t)take_number(c, 4);
    json_t *list = type == TYPE_ARRAY ? json_array() : NULL, *value = list;
    if (list) type = (uint32_t)take_number(c, 4);
    const uint64_t n = list ? take_number(c, 8) : 1;
    bool good = type <= TYPE_F64 && type != TYPE_ARRAY && n <= MAX_ELEMENTS;
    for (uint64_t i = 0; good && i < n && !c->cut; i++) {
        json_t *one = take_scalar(c, type);
        good = list ? json_array_append_new(list, one) == 0 : one != NULL;
        if (!list) value = one;
    }
    good = good && json_object_set(metadata, key, value) == 0;
    json_decref(value);
    if (c->cut || good) return check_cut(c);
    return status_fail(ST_FORMAT,
                       "%s: %s has an unknown type, too many elements, text that is not UTF-8 or a "
                       "number that is not finite",
                       c->where, key);
}

// `ret_at`: where in the data it begins.
static enum status take_tensor(struct cursor *c, struct gguf_tensor *t, uint64_t *ret_at)
{
    uint64_t count = 1;
    enum status st = take_name(c, t->name);
    if (st != ST_OK) return st;
    const uint64_t n_dims = take_number(c, 4);
    bool possible = n_dims >= 1 && n_dims <= 4;
    t->n_dims = possible ? (int)n_dims : 0;
    for (int d = t->n_dims - 1; possible && d >= 0; d--) {
        const uint64_t size = take_number(c, 8);
        possible = size > 0 && size < (uint64_t)LLONG_MAX / 8 / count;
        if (!possible) break;
        t->shape[d] = (int64_t)size;
        count *= size;
    }
    const uint32_t number = (uint32_t)take_number(c, 4);
    *ret_at = take_number(c, 8);
    if (c->cut) return check_cut(c);
    if (!possible)
        return status_fail(ST_FORMAT, "%s: tensor %s has an impossible size", c->where, t->name);
    t->type = quant_type_at(number);
    if (!t->type || !t->type->read)
        return status_fail(ST_UNSUPPORTED,
                           "%s: tensor %s is of type %s (%u), which is not supported; F32, F16, "
                           "BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K are",
                           c->where, t->name, t->type ? t->type->name : "unknown", number);
    if (t->shape[t->n_dims - 1] % t->type->values != 0)
        return status_fail(ST_FORMAT, "%s: tensor %s: rows of %lld are not whole blocks of %s",
                           c->where, t->name, (long long)t->shape[t->n_dims - 1], t->type->name);
    t->bytes = count / (uint64_t)t->type->values * (uint64_t)t->type->bytes;
    return ST_OK;
}

static enum status read_file(struct gguf *g, const uint8_t *data, size_t len)
{
    struct cursor c = {g->where, data, data + len, false};
    int64_t alignment = 32;
    uint64_t *at = NULL;
    enum status st = ST_OK;
    if (take_number(&c, 4) != MAGIC) FAIL(ST_FORMAT, "%s: not a GGUF file", g->where);
    const uint64_t version = take_number(&c, 4), n = take_number(&c, 8), m = take_number(&c, 8);
    CHECK(check_cut(&c));
    if (version != 2 && version != 3)
        FAIL(ST_UNSUPPORTED, "%s: GGUF version %llu%s; 2 and 3 are supported", g->where,
             (unsigned long long)version, version > 0xffff ? " (of the other byte order)" : "");
    if (n > MAX_ELEMENTS || n > len / 24)
        FAIL(ST_FORMAT, "%s: more tensors than it has room for; it is damaged", g->where);
    g->metadata = json_object();
    g->tensors = calloc((size_t)n + 1, sizeof *g->tensors);
    at = calloc((size_t)n + 1, sizeof *at);
    if (!g->metadata || !g->tensors || !at) FAIL(ST_NO_MEMORY, "%s: no memory", g->where);
    g->n_tensors = (int)n;
    for (uint64_t i = 0; i < m; i++) CHECK(take_value(&c, g->metadata));
    for (uint64_t i = 0; i < n; i++) CHECK(take_tensor(&c, &g->tensors[i], &at[i]));
    CHECK(json_get_int(g->where, g->metadata, "general.alignment", 1, 1 << 20, &alignment));
    const size_t used = (size_t)(c.at - data), align = (size_t)alignment;
    const size_t begin = (used + align - 1) / align * align, room = len > begin ? len - begin : 0;
    for (uint64_t i = 0; i < n; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        if (at[i] > room || t->bytes > room - at[i])
            FAIL(ST_FORMAT,
                 "%s: tensor %s leaves the file, which has %zu bytes of data; it is truncated or "
                 "damaged",
                 g->where, t->name, room);
        t->data = data + begin + at[i];
    }
out:
    free(at);
    return st;
}

// `data` NULL: the file at `where` is mapped.
static enum status open_file(const char *where, const void *data, size_t len, struct gguf **ret)
{
    struct gguf *g = calloc(1, sizeof *g);
    enum status st = ST_OK;
    if (!g || !(g->where = strdup(where))) FAIL(ST_NO_MEMORY, "%s: no memory", where);
    if (!data) CHECK(file_map_open(where, &g->map));
    CHECK(read_file(g, data ? data : g->map.data, data ? len : g->map.len));
    *ret = TAKE_PTR(g);
out:
    gguf_free(g);
    return st;
}

enum status gguf_parse(const char *where, const void *data, size_t len, struct gguf **ret)
{
    return open_file(where, data ? data : "", len, ret);
}

enum status gguf_open(const char *path, struct gguf **ret)
{
    return open_file(path, NULL, 0, ret);
}

bool gguf_is_file(const char *path)
{
    char begin[4] = "";
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const bool is = fd >= 0 && read(fd, begin, 4) == 4 && memcmp(begin, "GGUF", 4) == 0;
    if (fd >= 0) close(fd);
    return is;
}

const struct gguf_tensor *gguf_find(const struct gguf *g, const char *name)
{
    for (int i = 0; i < g->n_tensors; i++)
        if (strcmp(g->tensors[i].name, name) == 0) return &g->tensors[i];
    return NULL;
}
