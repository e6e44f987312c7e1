/* bridge_tensors.c: the three keys param_names, param_mappings and ipc_handles, in which a role's
 * tensors stand in the bridge file: written and read; and fields that must be there, each fault
 * named by place and key. No state.
 *
 * Reading is strict: a client maps memory and writes into it by these numbers, so whatever is
 * stated twice must agree, every range must lie inside its segment, and no two may overlap. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_json.h"
#include "common/base/bytes.h"
#include "common/base/json.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- fields that must be there ------------------------------------------------------------------

int bridge_device_number(const char *device)
{
    return strncmp(device, "cuda:", 5) == 0 ? (int)strtol(device + 5, NULL, 10) : -1;
}

static enum status missing(const char *where, const char *key)
{
    return status_fail(ST_FORMAT, "%s: \"%s\" is missing", where, key);
}

enum status bridge_need_string(const char *where, const json_t *object, const char *key, char *ret,
                               size_t size)
{
    const char *text = NULL;
    enum status st = json_get_string(where, object, key, &text);
    if (st != ST_OK) return st;
    if (!text) return missing(where, key);
    size_t len = strlen(text);
    if (len == 0 || len >= size)
        return status_fail(ST_FORMAT, "%s: \"%s\" has %zu characters; it must have 1 to %zu", where,
                           key, len, size - 1);
    memcpy(ret, text, len + 1);
    return ST_OK;
}

enum status bridge_need_int(const char *where, const json_t *object, const char *key, int64_t min,
                            int64_t max, int64_t *ret)
{
    if (!json_has(object, key)) return missing(where, key);
    return json_get_int(where, object, key, min, max, ret);
}

enum status bridge_need_value(const char *where, const json_t *object, const char *key,
                              json_type type, const char *words, const json_t **ret)
{
    const json_t *value = json_object_get(object, key);
    if (!value) return missing(where, key);
    if (json_typeof(value) != type)
        return status_fail(ST_FORMAT, "%s: \"%s\" must be %s", where, key, words);
    *ret = value;
    return ST_OK;
}

enum status bridge_need_dtype(const char *where, const json_t *object, enum dtype *ret)
{
    char name[24];
    enum status st = bridge_need_string(where, object, "dtype", name, sizeof name);
    if (st != ST_OK) return st;
    int dt = dtype_from_name(name);
    if (dt < 0 || strcmp(name, dtype_torch_name((enum dtype)dt)) != 0)
        return status_fail(ST_FORMAT,
                           "%s: dtype \"%s\" is unknown; torch.float32, torch.bfloat16 ...", where,
                           name);
    *ret = (enum dtype)dt;
    return ST_OK;
}

// ---- writing ------------------------------------------------------------------------------------

// What ipc_handle_b64 holds: the CUDA handle is base64 already, a shared memory name is not.
static enum status handle_base64(const struct bridge_role *role, struct bytes *ret)
{
    if (strcmp(role->kind, "posix-shm") == 0)
        return base64_encode(role->handle, strlen(role->handle), ret);
    bytes_clear(ret);
    bytes_puts(ret, role->handle);
    return bytes_status(ret);
}

static json_t *int_array(const int64_t *x, int n)
{
    json_t *array = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(array, json_integer(x[i]));
    return array;
}

static json_t *slice_json(const struct bridge_tensor *t)
{
    const struct bridge_slice *s = &t->slice;
    json_t *rows = json_array();
    for (int i = 0; i < s->n_runs; i++)
        json_array_append_new(
            rows, json_pack("[I, I]", (json_int_t)s->runs[i].first, (json_int_t)s->runs[i].n));
    return json_pack("{s:o, s:o, s:I}", "shape", int_array(s->whole, t->n_dims), "rows", rows,
                     "first_column", (json_int_t)s->first_column);
}

enum status bridge_tensors_put(json_t *object, const struct bridge_file *file,
                               const struct bridge_role *role)
{
    struct bytes handle = BYTES_INIT;
    const char *device = bridge_role_device(file, role);
    enum status st = handle_base64(role, &handle);
    if (st != ST_OK) goto out;
    json_t *names = json_array(), *mappings = json_object(), *handles = json_object();
    json_object_set_new(object, "param_names", names);
    json_object_set_new(object, "param_mappings", mappings);
    json_object_set_new(object, "ipc_handles", handles);
    for (int i = 0; i < role->n_tensors; i++) {
        const struct bridge_tensor *t = &role->tensors[i];
        size_t element = dtype_size(t->dt);
        int64_t n = 1;
        for (int d = 0; d < t->n_dims; d++) n *= t->shape[d];
        if (t->offset % element != 0 || t->bytes != (uint64_t)n * element)
            FAIL(ST_INVALID,
                 "%s: tensor %s: %llu bytes at offset %llu do not fit its shape and dtype %s",
                 file->path, t->name, (unsigned long long)t->bytes, (unsigned long long)t->offset,
                 dtype_name(t->dt));
        json_array_append_new(names, json_string(t->name));
        json_object_set_new(mappings, t->name,
                            json_pack("{s:o, s:s, s:s}", "shape", int_array(t->shape, t->n_dims),
                                      "dtype", dtype_torch_name(t->dt), "device", device));
        if (t->is_buffer)
            json_object_set_new(json_object_get(mappings, t->name), "buffer", json_true());
        if (t->slice.n_runs > 0)
            json_object_set_new(json_object_get(mappings, t->name), "shard", slice_json(t));
        json_object_set_new(
            handles, t->name,
            json_pack("{s:i, s:s, s:I, s:I, s:o, s:o, s:s}", "device_index",
                      bridge_device_number(device), "ipc_handle_b64", bytes_text(&handle),
                      "storage_size", (json_int_t)role->bytes, "storage_offset",
                      (json_int_t)(t->offset / element), "shape", int_array(t->shape, t->n_dims),
                      "stride", int_array(t->stride, t->n_dims), "dtype", dtype_torch_name(t->dt)));
    }
out:
    bytes_release(&handle);
    return st;
}

// ---- reading ------------------------------------------------------------------------------------

// "shape" or "stride": 1 to 4 whole numbers from 1 on.
static enum status need_dims(const char *where, const json_t *object, const char *key,
                             int64_t ret_dims[4], int *ret_n)
{
    const json_t *array = NULL;
    enum status st = bridge_need_value(where, object, key, JSON_ARRAY, "a list", &array);
    if (st != ST_OK) return st;
    size_t n = json_array_size(array);
    if (n < 1 || n > 4)
        return status_fail(ST_FORMAT, "%s: \"%s\" has %zu dimensions; 1 to 4 are taken", where, key,
                           n);
    for (size_t i = 0; i < n; i++) {
        const json_t *x = json_array_get(array, i);
        if (!json_is_integer(x) || json_integer_value(x) < 1)
            return status_fail(ST_FORMAT, "%s: \"%s\"[%zu] must be a whole number from 1 on", where,
                               key, i);
        ret_dims[i] = json_integer_value(x);
    }
    *ret_n = (int)n;
    return ST_OK;
}

// One of "rows": [first, n] within a tensor of `all` rows.
static enum status read_run(const char *where, const json_t *run, int64_t all, int64_t *ret_first,
                            int64_t *ret_n)
{
    const json_t *first = json_array_get(run, 0), *n = json_array_get(run, 1);
    const json_int_t from = json_integer_value(first), count = json_integer_value(n);
    if (json_array_size(run) != 2 || !json_is_integer(first) || !json_is_integer(n) || from < 0 ||
        count < 1 || count > all - from)
        return status_fail(ST_FORMAT,
                           "%s: \"rows\" must be lists of a first row and a count within the %lld "
                           "of the whole tensor",
                           where, (long long)all);
    *ret_first = from;
    *ret_n = count;
    return ST_OK;
}

// "shard", where there is one: which part of the whole tensor this is.
static enum status read_slice(const char *where, const json_t *mapping, struct bridge_tensor *t)
{
    const json_t *object = json_object_get(mapping, "shard"), *rows = NULL;
    struct bridge_slice s = {0};
    int64_t held = 0;
    int n_dims = 0;
    enum status st = ST_OK;
    if (!object) return ST_OK;
    CHECK(need_dims(where, object, "shape", s.whole, &n_dims));
    CHECK(bridge_need_value(where, object, "rows", JSON_ARRAY, "a list", &rows));
    CHECK(bridge_need_int(where, object, "first_column", 0, INT64_MAX, &s.first_column));
    const size_t n = json_array_size(rows);
    if (n_dims != t->n_dims || n < 1 || n > BRIDGE_MAX_RUNS)
        FAIL(ST_FORMAT, "%s: a shard of %d dimensions and %zu runs of rows; %d and 1 to %d belong",
             where, n_dims, n, t->n_dims, BRIDGE_MAX_RUNS);
    for (size_t i = 0; i < n; i++, s.n_runs++, held += s.runs[i - 1].n)
        CHECK(read_run(where, json_array_get(rows, i), s.whole[0], &s.runs[i].first, &s.runs[i].n));
    if (held != t->shape[0] ||
        (n_dims > 1 ? t->shape[1] > s.whole[1] - s.first_column : s.first_column > 0))
        FAIL(ST_MISMATCH, "%s: its shard has not as many rows and columns as it", where);
    t->slice = s;
out:
    return st;
}

struct reader { // what the tensors of one role are held against
    const char *where;
    struct bridge_role *role;
    const char *handle; // ipc_handle_b64 that follows from the segment
    const char *device; // of the role
};

// Where it lies in its segment, offset being in elements.
static enum status place_tensor(const char *where, const struct bridge_role *role,
                                struct bridge_tensor *t, int n_strides, int64_t offset)
{
    // n_strides first: a list that is too short would leave strides unread
    int64_t n = 1, bytes = 0, end = 0, element = (int64_t)dtype_size(t->dt);
    bool contiguous = n_strides == t->n_dims, fits = true;
    for (int d = t->n_dims - 1; d >= 0; d--) {
        contiguous = contiguous && t->stride[d] == n;
        fits = fits && !__builtin_mul_overflow(n, t->shape[d], &n);
    }
    fits = fits && !__builtin_mul_overflow(n, element, &bytes) &&
           !__builtin_mul_overflow(offset, element, &offset) &&
           !__builtin_add_overflow(offset, bytes, &end) && (uint64_t)end <= role->bytes;
    if (!fits)
        return status_fail(ST_FORMAT, "%s: it does not end within segment %s (%llu bytes)", where,
                           role->role, (unsigned long long)role->bytes);
    if (!contiguous)
        return status_fail(ST_UNSUPPORTED, "%s: its stride is not that of contiguous rows", where);
    t->offset = (uint64_t)offset;
    t->bytes = (uint64_t)bytes;
    return ST_OK;
}

static enum status read_tensor(const struct reader *r, const char *name, const json_t *mapping,
                               const json_t *handle, struct bridge_tensor *t)
{
    const struct bridge_role *role = r->role;
    char where[PATH_MAX + 256], text[192];
    int64_t shape[4], offset = 0, storage = 0, index = 0;
    int n_dims = 0, n_strides = 0;
    enum dtype dt = DT_F32;
    enum status st;
    snprintf(t->name, sizeof t->name, "%s", name);

    snprintf(where, sizeof where, "%s: param_mappings: %s", r->where, name);
    CHECK(need_dims(where, mapping, "shape", t->shape, &t->n_dims));
    CHECK(bridge_need_dtype(where, mapping, &t->dt));
    CHECK(bridge_need_string(where, mapping, "device", text, sizeof text));
    if (strcmp(text, r->device) != 0)
        return status_fail(ST_MISMATCH, "%s: device is \"%s\", the file's \"%s\"", where, text,
                           r->device);
    CHECK(json_get_bool(where, mapping, "buffer", &t->is_buffer));
    CHECK(read_slice(where, mapping, t));

    snprintf(where, sizeof where, "%s: ipc_handles: %s", r->where, name);
    CHECK(need_dims(where, handle, "shape", shape, &n_dims));
    CHECK(need_dims(where, handle, "stride", t->stride, &n_strides));
    CHECK(bridge_need_dtype(where, handle, &dt));
    if (n_dims != t->n_dims || memcmp(shape, t->shape, (size_t)n_dims * sizeof *shape) != 0)
        return status_fail(ST_MISMATCH, "%s: its shape differs from that in param_mappings", where);
    if (dt != t->dt)
        return status_fail(ST_MISMATCH, "%s: dtype is %s, in param_mappings %s", where,
                           dtype_torch_name(dt), dtype_torch_name(t->dt));
    const bool is_code = (role->inference_only && dt == DT_E4M3) ||
                         (role->quantization == QUANTIZATION_MXFP4 && dt == DT_U8);
    if (dt != (t->is_buffer ? DT_F32 : role->dt) && !is_code)
        return status_fail(ST_MISMATCH, "%s: dtype is %s, that of %s %s %s", where,
                           dtype_torch_name(dt), t->is_buffer ? "buffers in role" : "role",
                           role->role, dtype_torch_name(t->is_buffer ? DT_F32 : role->dt));
    CHECK(bridge_need_string(where, handle, "ipc_handle_b64", text, sizeof text));
    if (strcmp(text, r->handle) != 0)
        return status_fail(ST_MISMATCH, "%s: ipc_handle_b64 is not the handle of segment %s", where,
                           role->role);
    CHECK(bridge_need_int(where, handle, "device_index", -1, INT_MAX, &index));
    if (index != bridge_device_number(r->device))
        return status_fail(ST_MISMATCH, "%s: device_index is %lld, the file's device \"%s\"", where,
                           (long long)index, r->device);
    CHECK(bridge_need_int(where, handle, "storage_size", 1, INT64_MAX, &storage));
    if ((uint64_t)storage != role->bytes)
        return status_fail(ST_MISMATCH, "%s: storage_size is %lld, segment %s has %llu bytes",
                           where, (long long)storage, role->role, (unsigned long long)role->bytes);
    CHECK(bridge_need_int(where, handle, "storage_offset", 0, INT64_MAX, &offset));
    st = place_tensor(where, role, t, n_strides, offset);
out:
    return st;
}

static int by_offset(const void *a, const void *b)
{
    const struct bridge_tensor *x = *(struct bridge_tensor *const *)a,
                               *y = *(struct bridge_tensor *const *)b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

// No two tensors overlap, none covers the canary, and the count of parameters is right.
static enum status check_ranges(const char *where, const struct bridge_role *role)
{
    int n = role->n_tensors;
    const struct bridge_tensor **sorted = malloc((size_t)n * sizeof *sorted);
    if (!sorted) return status_fail(ST_NO_MEMORY, "%s: no memory for %d tensors", where, n);
    enum status st = ST_OK;
    uint64_t parameters = 0; // cannot wrap where nothing overlaps
    for (int i = 0; i < n; i++) {
        sorted[i] = &role->tensors[i];
        const bool halves = sorted[i]->dt == DT_U8; // two numbers a byte (common/base/mxfp4.h)
        parameters += sorted[i]->bytes / dtype_size(sorted[i]->dt) * (halves ? 2 : 1);
    }
    qsort(sorted, (size_t)n, sizeof *sorted, by_offset);
    for (int i = 0; i < n && st == ST_OK; i++) {
        const struct bridge_tensor *t = sorted[i], *next = i + 1 < n ? sorted[i + 1] : NULL;
        uint64_t end = t->offset + t->bytes;
        if (next && strcmp(t->name, next->name) == 0)
            st = status_fail(ST_FORMAT, "%s: param_names lists %s twice", where, t->name);
        else if (next && end > next->offset)
            st =
                status_fail(ST_FORMAT, "%s: tensors %s and %s overlap", where, t->name, next->name);
        else if (end > role->canary_offset && t->offset < role->canary_offset + BRIDGE_CANARY_BYTES)
            st = status_fail(ST_FORMAT, "%s: tensor %s lies over the canary of role %s at %llu",
                             where, t->name, role->role, (unsigned long long)role->canary_offset);
    }
    if (st == ST_OK && parameters != (uint64_t)role->n_parameters)
        st = status_fail(ST_MISMATCH, "%s: role %s: num_parameters is %lld, its tensors have %lld",
                         where, role->role, (long long)role->n_parameters, (long long)parameters);
    free(sorted);
    return st;
}

enum status bridge_tensors_read(const char *where, const json_t *object,
                                const struct bridge_file *file, struct bridge_role *role)
{
    const json_t *names = NULL, *mappings = NULL, *handles = NULL;
    struct bytes handle = BYTES_INIT;
    enum status st;
    CHECK(bridge_need_value(where, object, "param_names", JSON_ARRAY, "a list", &names));
    CHECK(bridge_need_value(where, object, "param_mappings", JSON_OBJECT, "an object", &mappings));
    CHECK(bridge_need_value(where, object, "ipc_handles", JSON_OBJECT, "an object", &handles));
    size_t n = json_array_size(names);
    if (n < 1 || n > BRIDGE_MAX_TENSORS || n != (size_t)role->n_tensors)
        FAIL(ST_MISMATCH, "%s: role %s: param_names lists %zu tensors, num_params says %d", where,
             role->role, n, role->n_tensors);
    if (json_object_size(mappings) != n || json_object_size(handles) != n)
        FAIL(ST_MISMATCH,
             "%s: role %s: %zu names in param_names, %zu in param_mappings, %zu in ipc_handles",
             where, role->role, n, json_object_size(mappings), json_object_size(handles));
    CHECK(handle_base64(role, &handle));
    role->tensors = calloc(n, sizeof *role->tensors);
    if (!role->tensors) FAIL(ST_NO_MEMORY, "%s: no memory for %zu tensors", where, n);
    struct reader reader = {where, role, bytes_text(&handle), bridge_role_device(file, role)};
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(names, i);
        const char *name = json_string_value(item);
        if (!name || json_string_length(item) != strlen(name) ||
            strlen(name) >= sizeof role->tensors->name || !name[0])
            FAIL(ST_FORMAT, "%s: param_names[%zu] must be a name of 1 to %zu characters", where, i,
                 sizeof role->tensors->name - 1);
        const json_t *mapping = json_object_get(mappings, name),
                     *entry = json_object_get(handles, name);
        if (!json_is_object(mapping) || !json_is_object(entry))
            FAIL(ST_FORMAT, "%s: tensor %s has no object in %s", where, name,
                 json_is_object(mapping) ? "ipc_handles" : "param_mappings");
        CHECK(read_tensor(&reader, name, mapping, entry, &role->tensors[i]));
    }
    CHECK(check_ranges(where, role));
out:
    bytes_release(&handle);
    return st;
}
