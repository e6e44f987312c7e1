/* bridge_file.c: the bridge file: written by the daemon once its weights are loaded, read by every
 * client. Plain data, no state; any thread.
 *
 * The keys that tools for vLLM-style bridges read stand first and describe roles[0], the policy.
 * What those keys cannot say (several roles, who owns the memory, which boot) follows in keys of
 * our own; a role other than the policy carries its tensors in the same three keys inside its own
 * entry, so that one function writes and one reads them. docs/bridge.md lists every key.
 *
 * Reading is strict: a client maps memory and writes into it by these numbers, so whatever is
 * stated twice must agree, every range must lie inside its segment, and no two may overlap. */
#include "bridge/bridge_file.h"
#include "bridge/process.h"
#include "common/base/bytes.h"
#include "common/base/file.h"
#include "common/base/json.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE_BYTES (64u << 20)
#define MAX_ROLES      16
#define MAX_TENSORS    1000000
#define CANARY_WORDS   2 // the checker's word and the daemon's answer, 64 bits each

// ---- finding it ---------------------------------------------------------------------------------

enum status bridge_find(const char *explicit_path, char *ret_path, size_t size)
{
    const char *set = getenv("COMMONWEIGHT_BRIDGE"), *logdir = getenv("LOGDIR"),
               *runtime = getenv("XDG_RUNTIME_DIR");
    const char *folders[] = {explicit_path, set, logdir, ".", runtime, "/run"};
    const char *names[] = {"",
                           "",
                           "/vllm_bridge_config.json",
                           "/bridge.json",
                           "/commonweight/bridge.json",
                           "/commonweight/bridge.json"};
    int n = explicit_path ? 1 : 6;
    struct bytes looked = BYTES_INIT;
    for (int i = 0; i < n; i++) {
        if (!folders[i] || !folders[i][0]) continue;
        char path[PATH_MAX];
        int len = snprintf(path, sizeof path, "%s%s", folders[i], names[i]);
        if (len >= 0 && (size_t)len < sizeof path && (size_t)len < size && file_exists(path)) {
            memcpy(ret_path, path, (size_t)len + 1);
            bytes_release(&looked);
            return ST_OK;
        }
        bytes_printf(&looked, "%s%s%s", looked.len ? ", " : "", folders[i], names[i]);
    }
    enum status st =
        status_fail(ST_NOT_FOUND,
                    "no bridge file: looked for %s; start cw-infer-server, or name its file with "
                    "--bridge",
                    looked.len ? bytes_text(&looked) : "nothing, as the path is empty");
    bytes_release(&looked);
    return st;
}

// ---- writing ------------------------------------------------------------------------------------

// N of "cuda:N"; -1 for the CPU and for anything else.
static int device_number(const char *device)
{
    return strncmp(device, "cuda:", 5) == 0 ? (int)strtol(device + 5, NULL, 10) : -1;
}

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

static enum status put_tensors(json_t *object, const struct bridge_file *file,
                               const struct bridge_role *role)
{
    struct bytes handle = BYTES_INIT;
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
        if (t->offset % element != 0 || t->bytes != (uint64_t)n * element) {
            st = status_fail(
                ST_INVALID,
                "%s: tensor %s: %llu bytes at offset %llu do not fit its shape and dtype "
                "%s",
                file->path, t->name, (unsigned long long)t->bytes, (unsigned long long)t->offset,
                dtype_name(t->dt));
            goto out;
        }
        json_array_append_new(names, json_string(t->name));
        json_object_set_new(mappings, t->name,
                            json_pack("{s:o, s:s, s:s}", "shape", int_array(t->shape, t->n_dims),
                                      "dtype", dtype_torch_name(t->dt), "device", file->device));
        json_object_set_new(
            handles, t->name,
            json_pack("{s:i, s:s, s:I, s:I, s:o, s:o, s:s}", "device_index",
                      device_number(file->device), "ipc_handle_b64", bytes_text(&handle),
                      "storage_size", (json_int_t)role->bytes, "storage_offset",
                      (json_int_t)(t->offset / element), "shape", int_array(t->shape, t->n_dims),
                      "stride", int_array(t->stride, t->n_dims), "dtype", dtype_torch_name(t->dt)));
    }
out:
    bytes_release(&handle);
    return st;
}

static enum status from_json(const char *where, const json_t *json, struct bridge_file **ret);

enum status bridge_file_write(const struct bridge_file *file)
{
    json_t *json = json_object(), *segments = json_array(), *roles = json_array();
    struct bridge_file *again = NULL;
    enum status st = ST_OK;
    if (file->n_roles < 1) {
        st = status_fail(ST_INVALID, "%s: a bridge file needs a role", file->path);
        goto out;
    }
    const struct bridge_role *policy = &file->roles[0];
    json_object_set_new(json, "model", json_string(policy->model));
    json_object_set_new(json, "tp_degree", json_integer(1));
    json_object_set_new(json, "single_copy_enabled", json_true());
    json_object_set_new(json, "num_params", json_integer(policy->n_tensors));
    json_object_set_new(json, "format_version", json_integer(BRIDGE_FORMAT_VERSION));
    json_object_set_new(json, "boot_id", json_string(file->boot_id));
    json_object_set_new(json, "pid", json_integer(file->pid));
    json_object_set_new(json, "pid_start_time", json_integer((json_int_t)file->pid_start_time));
    json_object_set_new(json, "device", json_string(file->device));
    json_object_set_new(json, "device_uuid", json_string(file->device_uuid));
    json_object_set_new(json, "control_page", json_string(file->control_page));
    json_object_set_new(json, "layout_hash", json_string(policy->layout_hash));
    json_object_set_new(json, "socket", json_string(file->socket));
    json_object_set(json, "segments", segments);
    json_object_set(json, "roles", roles);
    for (int i = 0; i < file->n_roles; i++) {
        const struct bridge_role *r = &file->roles[i];
        json_array_append_new(segments,
                              json_pack("{s:s, s:s, s:s, s:I, s:i}", "role", r->role, "kind",
                                        r->kind, "handle", r->handle, "bytes", (json_int_t)r->bytes,
                                        "device_index", device_number(file->device)));
        json_t *role = json_pack(
            "{s:s, s:s, s:i, s:s, s:s, s:I, s:i, s:I, s:i}", "role", r->role, "model", r->model,
            "segment", i, "dtype", dtype_torch_name(r->dt), "layout_hash", r->layout_hash,
            "canary_offset", (json_int_t)r->canary_offset, "num_params", r->n_tensors,
            "num_parameters", (json_int_t)r->n_parameters, "rope_context", r->rope_context);
        json_array_append_new(roles, role);
        CHECK(put_tensors(i == 0 ? json : role, file, r));
    }
    // What a client would refuse is not written; this also finds values that JSON could not take.
    st = status_context(from_json(file->path, json, &again), "not written");
    if (st == ST_OK) st = json_write_file(file->path, 0600, json);
out:
    bridge_file_free(again);
    json_decref(json);
    json_decref(segments);
    json_decref(roles);
    return st;
}

// ---- reading ------------------------------------------------------------------------------------

static enum status missing(const char *where, const char *key)
{
    return status_fail(ST_FORMAT, "%s: \"%s\" is missing", where, key);
}

static enum status need_string(const char *where, const json_t *object, const char *key, char *ret,
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

static enum status need_int(const char *where, const json_t *object, const char *key, int64_t min,
                            int64_t max, int64_t *ret)
{
    if (!json_has(object, key)) return missing(where, key);
    return json_get_int(where, object, key, min, max, ret);
}

static enum status need_value(const char *where, const json_t *object, const char *key,
                              json_type type, const char *words, const json_t **ret)
{
    const json_t *value = json_object_get(object, key);
    if (!value) return missing(where, key);
    if (json_typeof(value) != type)
        return status_fail(ST_FORMAT, "%s: \"%s\" must be %s", where, key, words);
    *ret = value;
    return ST_OK;
}

static enum status need_dtype(const char *where, const json_t *object, enum dtype *ret)
{
    char name[24];
    enum status st = need_string(where, object, "dtype", name, sizeof name);
    if (st != ST_OK) return st;
    int dt = dtype_from_name(name);
    if (dt < 0 || strcmp(name, dtype_torch_name((enum dtype)dt)) != 0)
        return status_fail(ST_FORMAT,
                           "%s: dtype \"%s\" is unknown; torch.float32, torch.bfloat16 ...", where,
                           name);
    *ret = (enum dtype)dt;
    return ST_OK;
}

// "shape" or "stride": 1 to 4 whole numbers from 1 on.
static enum status need_dims(const char *where, const json_t *object, const char *key,
                             int64_t ret_dims[4], int *ret_n)
{
    const json_t *array = NULL;
    enum status st = need_value(where, object, key, JSON_ARRAY, "a list", &array);
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

struct reader { // what the tensors of one role are held against
    const char *where;
    const struct bridge_file *file;
    struct bridge_role *role;
    const char *handle; // ipc_handle_b64 that follows from the segment
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
    CHECK(need_dtype(where, mapping, &t->dt));
    CHECK(need_string(where, mapping, "device", text, sizeof text));
    if (strcmp(text, r->file->device) != 0)
        return status_fail(ST_MISMATCH, "%s: device is \"%s\", the file's \"%s\"", where, text,
                           r->file->device);

    snprintf(where, sizeof where, "%s: ipc_handles: %s", r->where, name);
    CHECK(need_dims(where, handle, "shape", shape, &n_dims));
    CHECK(need_dims(where, handle, "stride", t->stride, &n_strides));
    CHECK(need_dtype(where, handle, &dt));
    if (n_dims != t->n_dims || memcmp(shape, t->shape, (size_t)n_dims * sizeof *shape) != 0)
        return status_fail(ST_MISMATCH, "%s: its shape differs from that in param_mappings", where);
    if (dt != t->dt)
        return status_fail(ST_MISMATCH, "%s: dtype is %s, in param_mappings %s", where,
                           dtype_torch_name(dt), dtype_torch_name(t->dt));
    if (dt != role->dt)
        return status_fail(ST_MISMATCH, "%s: dtype is %s, that of role %s %s", where,
                           dtype_torch_name(dt), role->role, dtype_torch_name(role->dt));
    CHECK(need_string(where, handle, "ipc_handle_b64", text, sizeof text));
    if (strcmp(text, r->handle) != 0)
        return status_fail(ST_MISMATCH, "%s: ipc_handle_b64 is not the handle of segment %s", where,
                           role->role);
    CHECK(need_int(where, handle, "device_index", -1, INT_MAX, &index));
    if (index != device_number(r->file->device))
        return status_fail(ST_MISMATCH, "%s: device_index is %lld, the file's device \"%s\"", where,
                           (long long)index, r->file->device);
    CHECK(need_int(where, handle, "storage_size", 1, INT64_MAX, &storage));
    if ((uint64_t)storage != role->bytes)
        return status_fail(ST_MISMATCH, "%s: storage_size is %lld, segment %s has %llu bytes",
                           where, (long long)storage, role->role, (unsigned long long)role->bytes);
    CHECK(need_int(where, handle, "storage_offset", 0, INT64_MAX, &offset));
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
        parameters += sorted[i]->bytes / dtype_size(sorted[i]->dt);
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
        else if (end > role->canary_offset && t->offset < role->canary_offset + CANARY_WORDS * 8)
            st = status_fail(ST_FORMAT, "%s: tensor %s lies over the canary of role %s at %llu",
                             where, t->name, role->role, (unsigned long long)role->canary_offset);
    }
    if (st == ST_OK && parameters != (uint64_t)role->n_parameters)
        st = status_fail(ST_MISMATCH, "%s: role %s: num_parameters is %lld, its tensors have %lld",
                         where, role->role, (long long)role->n_parameters, (long long)parameters);
    free(sorted);
    return st;
}

static enum status read_tensors(const char *where, const json_t *object,
                                const struct bridge_file *file, struct bridge_role *role)
{
    const json_t *names = NULL, *mappings = NULL, *handles = NULL;
    struct bytes handle = BYTES_INIT;
    enum status st;
    CHECK(need_value(where, object, "param_names", JSON_ARRAY, "a list", &names));
    CHECK(need_value(where, object, "param_mappings", JSON_OBJECT, "an object", &mappings));
    CHECK(need_value(where, object, "ipc_handles", JSON_OBJECT, "an object", &handles));
    size_t n = json_array_size(names);
    if (n < 1 || n > MAX_TENSORS || n != (size_t)role->n_tensors) {
        st = status_fail(ST_MISMATCH,
                         "%s: role %s: param_names lists %zu tensors, num_params says %d", where,
                         role->role, n, role->n_tensors);
        goto out;
    }
    if (json_object_size(mappings) != n || json_object_size(handles) != n) {
        st = status_fail(ST_MISMATCH,
                         "%s: role %s: %zu names in param_names, %zu in param_mappings, %zu in "
                         "ipc_handles",
                         where, role->role, n, json_object_size(mappings),
                         json_object_size(handles));
        goto out;
    }
    CHECK(handle_base64(role, &handle));
    role->tensors = calloc(n, sizeof *role->tensors);
    if (!role->tensors) {
        st = status_fail(ST_NO_MEMORY, "%s: no memory for %zu tensors", where, n);
        goto out;
    }
    struct reader reader = {where, file, role, bytes_text(&handle)};
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(names, i);
        const char *name = json_string_value(item);
        if (!name || json_string_length(item) != strlen(name) ||
            strlen(name) >= sizeof role->tensors->name || !name[0]) {
            st =
                status_fail(ST_FORMAT, "%s: param_names[%zu] must be a name of 1 to %zu characters",
                            where, i, sizeof role->tensors->name - 1);
            goto out;
        }
        const json_t *mapping = json_object_get(mappings, name),
                     *entry = json_object_get(handles, name);
        if (!json_is_object(mapping) || !json_is_object(entry)) {
            st = status_fail(ST_FORMAT, "%s: tensor %s has no object in %s", where, name,
                             json_is_object(mapping) ? "ipc_handles" : "param_mappings");
            goto out;
        }
        CHECK(read_tensor(&reader, name, mapping, entry, &role->tensors[i]));
    }
    CHECK(check_ranges(where, role));
out:
    bytes_release(&handle);
    return st;
}

static enum status read_segment(const char *path, const json_t *segments, int64_t i,
                                const struct bridge_file *file, struct bridge_role *role)
{
    char where[PATH_MAX + 64], name[sizeof role->role];
    int64_t bytes = 0, index = 0;
    enum status st;
    snprintf(where, sizeof where, "%s: segments[%lld]", path, (long long)i);
    const json_t *segment = json_array_get(segments, (size_t)i);
    if (!json_is_object(segment)) return status_fail(ST_FORMAT, "%s is not an object", where);
    CHECK(need_string(where, segment, "role", name, sizeof name));
    if (strcmp(name, role->role) != 0)
        return status_fail(ST_MISMATCH, "%s: it is of role %s, but role %s refers to it", where,
                           name, role->role);
    CHECK(need_string(where, segment, "kind", role->kind, sizeof role->kind));
    bool cuda = strcmp(role->kind, "cuda-ipc") == 0;
    if (!cuda && strcmp(role->kind, "posix-shm") != 0)
        return status_fail(ST_UNSUPPORTED, "%s: kind \"%s\" is neither cuda-ipc nor posix-shm",
                           where, role->kind);
    if (cuda != (device_number(file->device) >= 0))
        return status_fail(ST_MISMATCH, "%s: kind %s does not go with device \"%s\"", where,
                           role->kind, file->device);
    CHECK(need_string(where, segment, "handle", role->handle, sizeof role->handle));
    CHECK(need_int(where, segment, "bytes", 1, INT64_MAX, &bytes));
    CHECK(need_int(where, segment, "device_index", -1, INT_MAX, &index));
    if (index != device_number(file->device))
        return status_fail(ST_MISMATCH, "%s: device_index is %lld, the file's device \"%s\"", where,
                           (long long)index, file->device);
    role->bytes = (uint64_t)bytes;
out:
    return st;
}

static enum status read_role(const char *path, const json_t *json, int i, struct bridge_file *file)
{
    static const char *const known[] = {"policy", "draft", "frozen", "adapter"};
    struct bridge_role *role = &file->roles[i];
    char where[PATH_MAX + 64];
    int64_t segment = 0, canary = 0, tensors = 0;
    enum status st;
    snprintf(where, sizeof where, "%s: roles[%d]", path, i);
    const json_t *object = json_array_get(json_object_get(json, "roles"), (size_t)i);
    const json_t *segments = json_object_get(json, "segments");
    if (!json_is_object(object)) return status_fail(ST_FORMAT, "%s is not an object", where);
    CHECK(need_string(where, object, "role", role->role, sizeof role->role));
    bool is_known = false;
    for (size_t k = 0; k < sizeof known / sizeof *known; k++)
        is_known = is_known || strcmp(role->role, known[k]) == 0;
    if (!is_known)
        return status_fail(ST_UNSUPPORTED,
                           "%s: role \"%s\" is none of policy, draft, frozen, adapter", where,
                           role->role);
    if ((i == 0) != (strcmp(role->role, "policy") == 0))
        return status_fail(ST_FORMAT, "%s: roles[0], and no other, must be the policy; this is %s",
                           where, role->role);
    for (int k = 0; k < i; k++)
        if (strcmp(role->role, file->roles[k].role) == 0)
            return status_fail(ST_FORMAT, "%s: role %s is there twice", where, role->role);
    CHECK(need_string(where, object, "model", role->model, sizeof role->model));
    CHECK(need_string(where, object, "layout_hash", role->layout_hash, sizeof role->layout_hash));
    CHECK(need_dtype(where, object, &role->dt));
    CHECK(need_int(where, object, "segment", 0, (int64_t)json_array_size(segments) - 1, &segment));
    CHECK(read_segment(path, segments, segment, file, role));
    CHECK(need_int(where, object, "canary_offset", 0, INT64_MAX, &canary));
    if (canary % 8 != 0 || role->bytes < CANARY_WORDS * 8 ||
        (uint64_t)canary > role->bytes - CANARY_WORDS * 8)
        return status_fail(
            ST_FORMAT,
            "%s: canary_offset is %lld; it must be a multiple of 8 with %d bytes before "
            "the segment's end (%llu)",
            where, (long long)canary, CANARY_WORDS * 8, (unsigned long long)role->bytes);
    role->canary_offset = (uint64_t)canary;
    CHECK(need_int(where, object, "num_params", 1, MAX_TENSORS, &tensors));
    role->n_tensors = (int)tensors;
    CHECK(need_int(where, object, "num_parameters", 1, INT64_MAX, &role->n_parameters));
    CHECK(json_get_int32(where, object, "rope_context", 0, INT_MAX, &role->rope_context));
    CHECK(read_tensors(i == 0 ? path : where, i == 0 ? json : object, file, role));
out:
    return st;
}

// The keys of other tools say what roles[0] says.
static enum status check_old_keys(const char *where, const json_t *json,
                                  const struct bridge_role *policy)
{
    char text[sizeof policy->model];
    int64_t n = 0;
    bool single = false;
    enum status st;
    CHECK(need_string(where, json, "model", text, sizeof text));
    if (strcmp(text, policy->model) != 0)
        return status_fail(ST_MISMATCH, "%s: \"model\" is %s, that of roles[0] %s", where, text,
                           policy->model);
    CHECK(need_string(where, json, "layout_hash", text, sizeof text));
    if (strcmp(text, policy->layout_hash) != 0)
        return status_fail(ST_MISMATCH, "%s: \"layout_hash\" differs from that of roles[0]", where);
    CHECK(need_int(where, json, "num_params", 1, MAX_TENSORS, &n));
    if (n != policy->n_tensors)
        return status_fail(ST_MISMATCH, "%s: \"num_params\" is %lld, that of roles[0] %d", where,
                           (long long)n, policy->n_tensors);
    CHECK(need_int(where, json, "tp_degree", 1, INT_MAX, &n));
    if (n != 1)
        return status_fail(ST_UNSUPPORTED, "%s: \"tp_degree\" is %lld; only 1 can be attached",
                           where, (long long)n);
    CHECK(json_get_bool(where, json, "single_copy_enabled", &single));
    if (!single)
        return status_fail(ST_UNSUPPORTED,
                           "%s: \"single_copy_enabled\" is not true: its memory is not "
                           "shared",
                           where);
out:
    return st;
}

// What stands in the file before its roles.
static enum status read_head(const char *where, const json_t *json, struct bridge_file *file)
{
    int64_t version = 0, pid = 0, start = 0;
    enum status st;
    if (!json_has(json, "format_version"))
        return status_fail(ST_FORMAT,
                           "%s: \"format_version\" is missing: this bridge was not written by "
                           "cw-infer-server and cannot be attached",
                           where);
    CHECK(need_int(where, json, "format_version", 0, INT64_MAX, &version));
    if (version != BRIDGE_FORMAT_VERSION)
        return status_fail(
            ST_UNSUPPORTED,
            "%s: \"format_version\" is %lld, this program reads %d: run daemon and client "
            "of the same version",
            where, (long long)version, BRIDGE_FORMAT_VERSION);
    snprintf(file->path, sizeof file->path, "%s", where);
    CHECK(need_string(where, json, "boot_id", file->boot_id, sizeof file->boot_id));
    CHECK(need_int(where, json, "pid", 1, INT_MAX, &pid));
    CHECK(need_int(where, json, "pid_start_time", 1, INT64_MAX, &start));
    file->pid = (pid_t)pid;
    file->pid_start_time = (uint64_t)start;
    CHECK(need_string(where, json, "device", file->device, sizeof file->device));
    char device[32];
    snprintf(device, sizeof device, "cuda:%d", device_number(file->device));
    if (strcmp(file->device, "cpu") != 0 &&
        (strcmp(file->device, device) != 0 || device_number(file->device) < 0))
        return status_fail(ST_FORMAT, "%s: \"device\" is \"%s\"; it must be cpu or cuda:N", where,
                           file->device);
    CHECK(need_string(where, json, "device_uuid", file->device_uuid, sizeof file->device_uuid));
    CHECK(need_string(where, json, "control_page", file->control_page, sizeof file->control_page));
    CHECK(need_string(where, json, "socket", file->socket, sizeof file->socket));
out:
    return st;
}

static enum status from_json(const char *where, const json_t *json, struct bridge_file **ret)
{
    const json_t *roles = NULL, *segments = NULL;
    enum status st;
    struct bridge_file *file = calloc(1, sizeof *file);
    if (!file) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    if (!json_is_object(json)) {
        st = status_fail(ST_FORMAT, "%s: it is not a JSON object", where);
        goto out;
    }
    CHECK(read_head(where, json, file));
    CHECK(need_value(where, json, "segments", JSON_ARRAY, "a list", &segments));
    CHECK(need_value(where, json, "roles", JSON_ARRAY, "a list", &roles));
    size_t n = json_array_size(roles);
    if (n < 1 || n > MAX_ROLES || json_array_size(segments) != n) {
        st = status_fail(
            ST_FORMAT,
            "%s: %zu roles and %zu segments; 1 to %d roles with a segment each are taken", where, n,
            json_array_size(segments), MAX_ROLES);
        goto out;
    }
    file->roles = calloc(n, sizeof *file->roles);
    if (!file->roles) {
        st = status_fail(ST_NO_MEMORY, "%s: out of memory", where);
        goto out;
    }
    for (size_t i = 0; i < n; i++) {
        file->n_roles = (int)i + 1; // so that a half-read file is freed whole
        CHECK(read_role(where, json, (int)i, file));
    }
    CHECK(check_old_keys(where, json, &file->roles[0]));
    *ret = file;
    file = NULL;
out:
    bridge_file_free(file);
    return st;
}

enum status bridge_file_parse(const char *where, const char *text, size_t len,
                              struct bridge_file **ret)
{
    json_t *json = NULL;
    enum status st = json_parse(where, text, len, &json);
    if (st == ST_OK) st = from_json(where, json, ret);
    json_decref(json);
    return st;
}

enum status bridge_file_read(const char *path, struct bridge_file **ret)
{
    struct bytes text = BYTES_INIT;
    enum status st = file_read_own(path, MAX_FILE_BYTES, &text);
    if (st == ST_OK) st = bridge_file_parse(path, bytes_text(&text), text.len, ret);
    bytes_release(&text);
    return st;
}

void bridge_file_free(struct bridge_file *file)
{
    if (!file) return;
    for (int i = 0; i < file->n_roles; i++) free(file->roles[i].tensors);
    free(file->roles);
    free(file);
}

const struct bridge_role *bridge_file_role(const struct bridge_file *file, const char *role)
{
    for (int i = 0; i < file->n_roles; i++)
        if (strcmp(file->roles[i].role, role) == 0) return &file->roles[i];
    return NULL;
}

// ---- against this machine -----------------------------------------------------------------------

enum status bridge_file_check_boot(const struct bridge_file *file)
{
    char boot[40];
    process_boot_id(boot);
    if (strcmp(boot, file->boot_id) != 0)
        return status_fail(
            ST_MISMATCH,
            "%s was written in boot %s of a machine, this is boot %s: the daemon that "
            "wrote it is not running here; start cw-infer-server",
            file->path, file->boot_id, boot[0] ? boot : "(unknown)");
    return ST_OK;
}

enum status bridge_file_check_process(const struct bridge_file *file)
{
    if (process_alive(file->pid, file->pid_start_time)) return ST_OK;
    uint64_t start = process_start_time(file->pid);
    return status_fail(
        ST_PEER_GONE, "%s: the daemon that wrote it (pid %d) %s; start cw-infer-server again",
        file->path, (int)file->pid,
        start && start != file->pid_start_time ? "is gone, and its pid was given to another process"
                                               : "is dead");
}

enum status bridge_file_check(const struct bridge_file *file)
{
    enum status st = bridge_file_check_boot(file);
    return st == ST_OK ? bridge_file_check_process(file) : st;
}
