/* bridge_file.c: the bridge file: written by the server once its weights are loaded, read by every
 * client. Plain data, no state; any thread.
 *
 * The keys that tools for vLLM-style bridges read stand first and describe roles[0], the policy.
 * What those keys cannot say (several roles, who owns the memory, which boot) follows in keys of
 * our own; a role other than the policy carries its tensors in the same three keys inside its own
 * entry (bridge_tensors.c). docs/internals/bridge.md lists every key.
 *
 * A role that this program does not know is no fault: servers of later versions share more, and
 * what is not known is not mapped. What is known is read strictly. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "bridge/bridge_json.h"
#include "common/base/bytes.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/process.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE_BYTES (64u << 20)
#define MAX_ROLES      4352 // models and the adapters that a server may hold, of up to 64 ranks

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
    enum status st = status_fail(
        ST_NOT_FOUND,
        "no bridge file: looked for %s; start cw-infer-server, or name its file with --bridge",
        looked.len ? bytes_text(&looked) : "nothing, as the path is empty");
    bytes_release(&looked);
    return st;
}

// ---- writing ------------------------------------------------------------------------------------

#define SHARD "shard:" // and the rank
static enum status from_json(const char *where, const json_t *json, struct bridge_file **ret);

void bridge_shard_name(const char *role, int rank, char ret[SHARD_NAME])
{
    if (rank == 0)
        snprintf(ret, SHARD_NAME, "%s", role);
    else if (strcmp(role, "policy") == 0)
        snprintf(ret, SHARD_NAME, SHARD "%d", rank);
    else
        snprintf(ret, SHARD_NAME, SHARD "%d:%s", rank, role);
}

bool bridge_is_shard(const struct bridge_role *role)
{
    return strncmp(role->role, SHARD, sizeof SHARD - 1) == 0;
}

const char *bridge_role_device(const struct bridge_file *file, const struct bridge_role *role)
{
    return bridge_is_shard(role) ? role->holder.device : file->device;
}

static void put_holder(json_t *role, const struct bridge_holder *h)
{
    json_t *keys =
        json_pack("{s:s, s:s, s:i, s:I}", "device", h->device, "device_uuid", h->device_uuid, "pid",
                  (int)h->pid, "pid_start_time", (json_int_t)h->pid_start_time);
    json_object_update(role, keys);
    json_decref(keys);
}

enum status bridge_file_write(const struct bridge_file *file)
{
    json_t *json = NULL, *segments = json_array(), *roles = json_array();
    struct bridge_file *again = NULL;
    enum status st = ST_OK;
    if (file->n_roles < 1) FAIL(ST_INVALID, "%s: a bridge file needs a role", file->path);
    const struct bridge_role *policy = &file->roles[0];
    json = json_pack("{s:s, s:i, s:b, s:i, s:i, s:s, s:i, s:I, s:s, s:s, s:s, s:s, s:s, s:O, s:O}",
                     "model", policy->model, "tp_degree", file->tp_degree > 1 ? file->tp_degree : 1,
                     "single_copy_enabled", 1, "num_params", policy->n_tensors, "format_version",
                     BRIDGE_FORMAT_VERSION, "boot_id", file->boot_id, "pid", (int)file->pid,
                     "pid_start_time", (json_int_t)file->pid_start_time, "device", file->device,
                     "device_uuid", file->device_uuid, "control_page", file->control_page,
                     "layout_hash", policy->layout_hash, "socket", file->socket, "segments",
                     segments, "roles", roles);
    if (file->expert_parallel) json_object_set_new(json, "expert_parallel", json_true());
    for (int i = 0; i < file->n_roles; i++) {
        const struct bridge_role *r = &file->roles[i];
        const char *device = bridge_role_device(file, r);
        json_array_append_new(segments,
                              json_pack("{s:s, s:s, s:s, s:I, s:i}", "role", r->role, "kind",
                                        r->kind, "handle", r->handle, "bytes", (json_int_t)r->bytes,
                                        "device_index", bridge_device_number(device)));
        json_t *role = json_pack(
            "{s:s, s:s, s:i, s:s, s:s, s:I, s:i, s:I, s:i}", "role", r->role, "model", r->model,
            "segment", i, "dtype", dtype_torch_name(r->dt), "layout_hash", r->layout_hash,
            "canary_offset", (json_int_t)r->canary_offset, "num_params", r->n_tensors,
            "num_parameters", (json_int_t)r->n_parameters, "rope_context", r->rope_context);
        json_object_set_new(role, "quantization", json_string(quantization_names[r->quantization]));
        if (r->inference_only) json_object_set_new(role, "inference_only", json_true());
        json_object_set_new(role, "kv_cache_dtype", json_string(kv_cache_names[r->kv_cache]));
        json_array_append_new(roles, role);
        if (bridge_is_shard(r)) put_holder(role, &r->holder);
        CHECK(bridge_tensors_put(i == 0 ? json : role, file, r));
    }
    // What a client would refuse is not written; this also finds values that JSON could not take.
    st = status_context(from_json(file->path, json, &again), "not written");
    if (st == ST_OK && again->n_roles != file->n_roles)
        st = status_fail(ST_INVALID, "%s: not written: no client knows the role %s", file->path,
                         again->ignored);
    if (st == ST_OK) st = json_write_file(file->path, 0600, json);
out:
    bridge_file_free(again);
    json_decref(json);
    json_decref(segments);
    json_decref(roles);
    return st;
}

// ---- reading ------------------------------------------------------------------------------------

static enum status read_segment(const char *path, const json_t *segments, int64_t i,
                                const struct bridge_file *file, struct bridge_role *role)
{
    char where[PATH_MAX + 64], name[sizeof role->role];
    int64_t bytes = 0, index = 0;
    enum status st;
    snprintf(where, sizeof where, "%s: segments[%lld]", path, (long long)i);
    const json_t *segment = json_array_get(segments, (size_t)i);
    if (!json_is_object(segment)) return status_fail(ST_FORMAT, "%s is not an object", where);
    CHECK(bridge_need_string(where, segment, "role", name, sizeof name));
    if (strcmp(name, role->role) != 0)
        return status_fail(ST_MISMATCH, "%s: it is of role %s, but role %s refers to it", where,
                           name, role->role);
    CHECK(bridge_need_string(where, segment, "kind", role->kind, sizeof role->kind));
    bool cuda = strcmp(role->kind, "cuda-ipc") == 0;
    if (!cuda && strcmp(role->kind, "posix-shm") != 0)
        return status_fail(ST_UNSUPPORTED, "%s: kind \"%s\" is neither cuda-ipc nor posix-shm",
                           where, role->kind);
    const char *device = bridge_role_device(file, role);
    if (cuda != (bridge_device_number(device) >= 0))
        return status_fail(ST_MISMATCH, "%s: kind %s does not go with device \"%s\"", where,
                           role->kind, device);
    CHECK(bridge_need_string(where, segment, "handle", role->handle, sizeof role->handle));
    CHECK(bridge_need_int(where, segment, "bytes", 1, INT64_MAX, &bytes));
    CHECK(bridge_need_int(where, segment, "device_index", -1, INT_MAX, &index));
    if (index != bridge_device_number(device))
        return status_fail(ST_MISMATCH, "%s: device_index is %lld, the file's device \"%s\"", where,
                           (long long)index, device);
    role->bytes = (uint64_t)bytes;
out:
    return st;
}

// An adapter has a name of its own after the colon, a shard its rank.
static bool role_is_known(const char *role)
{
    static const char *const known[] = {"policy", "draft", MTP_ROLE, "reference", "frozen"};
    static const char *const named[] = {"adapter:", SHARD};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(role, known[i]) == 0) return true;
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (strncmp(role, named[i], strlen(named[i])) == 0 && role[strlen(named[i])]) return true;
    return false;
}

// "cpu" or "cuda:N".
static enum status check_device(const char *where, const char *name)
{
    char device[32];
    snprintf(device, sizeof device, "cuda:%d", bridge_device_number(name));
    if (strcmp(name, "cpu") == 0 || (strcmp(name, device) == 0 && bridge_device_number(name) >= 0))
        return ST_OK;
    return status_fail(ST_FORMAT, "%s: \"device\" is \"%s\"; it must be cpu or cuda:N", where,
                       name);
}

static enum status read_holder(const char *where, const json_t *object, struct bridge_holder *ret)
{
    int64_t pid = 0, start = 0;
    enum status st;
    CHECK(bridge_need_string(where, object, "device", ret->device, sizeof ret->device));
    CHECK(check_device(where, ret->device));
    CHECK(bridge_need_string(where, object, "device_uuid", ret->device_uuid,
                             sizeof ret->device_uuid));
    CHECK(bridge_need_int(where, object, "pid", 1, INT_MAX, &pid));
    CHECK(bridge_need_int(where, object, "pid_start_time", 1, INT64_MAX, &start));
    ret->pid = (pid_t)pid;
    ret->pid_start_time = (uint64_t)start;
out:
    return st;
}

// One of names; a role of a file that does not say has the first.
static enum status read_choice(const char *where, const json_t *object, const char *key,
                               const char *const names[], int *ret)
{
    const char *name = names[0];
    enum status st = json_get_string(where, object, key, &name);
    for (int i = 0; st == ST_OK && names[i]; i++)
        if (strcmp(name, names[i]) == 0) {
            *ret = i;
            return ST_OK;
        }
    return st != ST_OK ? st
                       : status_fail(ST_UNSUPPORTED,
                                     "%s: \"%s\" is %s, which this program does not "
                                     "know: run server and client of the same version",
                                     where, key, name);
}

// The i-th entry of "roles" becomes the file's next role, where this program knows it.
static enum status read_role(const char *path, const json_t *json, size_t i,
                             struct bridge_file *file)
{
    struct bridge_role *role = &file->roles[file->n_roles];
    char where[PATH_MAX + 64];
    int64_t segment = 0, canary = 0, tensors = 0;
    enum status st;
    snprintf(where, sizeof where, "%s: roles[%zu]", path, i);
    const json_t *object = json_array_get(json_object_get(json, "roles"), i);
    const json_t *segments = json_object_get(json, "segments");
    if (!json_is_object(object)) return status_fail(ST_FORMAT, "%s is not an object", where);
    CHECK(bridge_need_string(where, object, "role", role->role, sizeof role->role));
    if ((i == 0) != (strcmp(role->role, "policy") == 0))
        return status_fail(ST_FORMAT, "%s: roles[0], and no other, must be the policy; this is %s",
                           where, role->role);
    if (!role_is_known(role->role)) {
        const size_t len = strlen(file->ignored);
        snprintf(file->ignored + len, sizeof file->ignored - len, "%s\"%s\"", len ? ", " : "",
                 role->role);
        return ST_OK;
    }
    if (bridge_file_role(file, role->role))
        return status_fail(ST_FORMAT, "%s: role %s is there twice", where, role->role);
    file->n_roles++; // also of a role that is read by half, so that it is freed
    if (bridge_is_shard(role)) CHECK(read_holder(where, object, &role->holder));
    CHECK(bridge_need_string(where, object, "model", role->model, sizeof role->model));
    CHECK(bridge_need_string(where, object, "layout_hash", role->layout_hash,
                             sizeof role->layout_hash));
    CHECK(bridge_need_dtype(where, object, &role->dt));
    CHECK(bridge_need_int(where, object, "segment", 0, (int64_t)json_array_size(segments) - 1,
                          &segment));
    CHECK(read_segment(path, segments, segment, file, role));
    CHECK(bridge_need_int(where, object, "canary_offset", 0, INT64_MAX, &canary));
    if (canary % 8 != 0 || role->bytes < BRIDGE_CANARY_BYTES ||
        (uint64_t)canary > role->bytes - BRIDGE_CANARY_BYTES)
        return status_fail(ST_FORMAT,
                           "%s: canary_offset is %lld; it must be a multiple of 8 with %d bytes "
                           "before the segment's end (%llu)",
                           where, (long long)canary, BRIDGE_CANARY_BYTES,
                           (unsigned long long)role->bytes);
    role->canary_offset = (uint64_t)canary;
    CHECK(bridge_need_int(where, object, "num_params", 1, BRIDGE_MAX_TENSORS, &tensors));
    role->n_tensors = (int)tensors;
    CHECK(bridge_need_int(where, object, "num_parameters", 1, INT64_MAX, &role->n_parameters));
    CHECK(json_get_int32(where, object, "rope_context", 0, INT_MAX, &role->rope_context));
    int quantization = 0, kv_cache = 0;
    CHECK(read_choice(where, object, "quantization", quantization_names, &quantization));
    CHECK(read_choice(where, object, "kv_cache_dtype", kv_cache_names, &kv_cache));
    role->quantization = (enum quantization)quantization;
    role->kv_cache = (enum kv_cache)kv_cache;
    CHECK(json_get_bool(where, object, "inference_only", &role->inference_only));
    CHECK(bridge_tensors_read(i == 0 ? path : where, i == 0 ? json : object, file, role));
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
    CHECK(bridge_need_string(where, json, "model", text, sizeof text));
    if (strcmp(text, policy->model) != 0)
        return status_fail(ST_MISMATCH, "%s: \"model\" is %s, that of roles[0] %s", where, text,
                           policy->model);
    CHECK(bridge_need_string(where, json, "layout_hash", text, sizeof text));
    if (strcmp(text, policy->layout_hash) != 0)
        return status_fail(ST_MISMATCH, "%s: \"layout_hash\" differs from that of roles[0]", where);
    CHECK(bridge_need_int(where, json, "num_params", 1, BRIDGE_MAX_TENSORS, &n));
    if (n != policy->n_tensors)
        return status_fail(ST_MISMATCH, "%s: \"num_params\" is %lld, that of roles[0] %d", where,
                           (long long)n, policy->n_tensors);
    CHECK(json_get_bool(where, json, "single_copy_enabled", &single));
    if (!single)
        return status_fail(ST_UNSUPPORTED,
                           "%s: \"single_copy_enabled\" is not true: its memory is not shared",
                           where);
out:
    return st;
}

static const struct bridge_role *shard_of(const struct bridge_file *file,
                                          const struct bridge_role *first, int rank)
{
    char name[SHARD_NAME];
    bridge_shard_name(first->role, rank, name);
    return bridge_file_role(file, name);
}

// Of each role as many shards as ranks, and each tensor says which part it is.
static enum status check_shards(const char *where, const json_t *json, struct bridge_file *file)
{
    int64_t n = 0;
    int others = 0;
    enum status st;
    CHECK(bridge_need_int(where, json, "tp_degree", 1, MAX_ROLES, &n));
    CHECK(json_get_bool(where, json, "expert_parallel", &file->expert_parallel));
    file->tp_degree = (int)n;
    memcpy(file->page_layout, file->roles[0].layout_hash, sizeof file->page_layout);
    for (int i = 0; i < file->n_roles; i++) others += bridge_is_shard(&file->roles[i]);
    for (int i = file->n_roles * file->tp_degree - 1; i >= 0; i--) {
        const struct bridge_role *first = &file->roles[i / file->tp_degree];
        if (bridge_is_shard(first)) continue;
        const int rank = i % file->tp_degree;
        const struct bridge_role *role = shard_of(file, first, rank);
        if (!role)
            FAIL(ST_FORMAT, "%s: \"tp_degree\" is %d, and there is no shard of rank %d of the %s",
                 where, file->tp_degree, rank, first->role);
        others -= rank > 0;
        for (int t = 0; t < role->n_tensors; t++)
            if ((role->tensors[t].slice.n_runs > 0) != (file->tp_degree > 1))
                FAIL(ST_FORMAT, "%s: role %s: tensor %s %s \"shard\", and \"tp_degree\" is %d",
                     where, role->role, role->tensors[t].name,
                     file->tp_degree > 1 ? "lacks its" : "has a", file->tp_degree);
    }
    if (others != 0)
        FAIL(ST_FORMAT, "%s: \"tp_degree\" is %d, and there are %d further shards", where,
             file->tp_degree, others);
out:
    return st;
}

// What stands in the file before its roles.
static enum status read_head(const char *where, const json_t *json, struct bridge_file *file)
{
    struct bridge_holder server;
    int64_t version = 0;
    enum status st;
    if (!json_has(json, "format_version"))
        return status_fail(ST_FORMAT,
                           "%s: \"format_version\" is missing: this bridge was not written by "
                           "cw-infer-server and cannot be attached",
                           where);
    CHECK(bridge_need_int(where, json, "format_version", 0, INT64_MAX, &version));
    if (version != BRIDGE_FORMAT_VERSION)
        return status_fail(ST_UNSUPPORTED,
                           "%s: \"format_version\" is %lld, this program reads %d: run server and "
                           "client of the same version",
                           where, (long long)version, BRIDGE_FORMAT_VERSION);
    snprintf(file->path, sizeof file->path, "%s", where);
    CHECK(bridge_need_string(where, json, "boot_id", file->boot_id, sizeof file->boot_id));
    CHECK(read_holder(where, json, &server));
    file->pid = server.pid;
    file->pid_start_time = server.pid_start_time;
    memcpy(file->device, server.device, sizeof file->device);
    memcpy(file->device_uuid, server.device_uuid, sizeof file->device_uuid);
    CHECK(bridge_need_string(where, json, "control_page", file->control_page,
                             sizeof file->control_page));
    CHECK(bridge_need_string(where, json, "socket", file->socket, sizeof file->socket));
out:
    return st;
}

static enum status from_json(const char *where, const json_t *json, struct bridge_file **ret)
{
    const json_t *roles = NULL, *segments = NULL;
    enum status st;
    struct bridge_file *file = calloc(1, sizeof *file);
    if (!file) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    if (!json_is_object(json)) FAIL(ST_FORMAT, "%s: it is not a JSON object", where);
    CHECK(read_head(where, json, file));
    CHECK(bridge_need_value(where, json, "segments", JSON_ARRAY, "a list", &segments));
    CHECK(bridge_need_value(where, json, "roles", JSON_ARRAY, "a list", &roles));
    size_t n = json_array_size(roles);
    if (n < 1 || n > MAX_ROLES || json_array_size(segments) != n)
        FAIL(ST_FORMAT,
             "%s: %zu roles and %zu segments; 1 to %d roles with a segment each are taken", where,
             n, json_array_size(segments), MAX_ROLES);
    file->roles = calloc(n, sizeof *file->roles);
    if (!file->roles) FAIL(ST_NO_MEMORY, "%s: out of memory", where);
    for (size_t i = 0; i < n; i++) CHECK(read_role(where, json, i, file));
    CHECK(check_old_keys(where, json, &file->roles[0]));
    CHECK(check_shards(where, json, file));
    *ret = TAKE_PTR(file);
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

enum status bridge_file_take_shard(struct bridge_file *file, int rank)
{
    int n = 1;
    if (rank < 0 || rank >= file->tp_degree)
        return status_fail(ST_INVALID,
                           "%s: the server's weights have %d shards: there is none of rank %d",
                           file->path, file->tp_degree, rank);
    for (int i = 0; i < file->n_roles && rank > 0; i++) {
        const struct bridge_role *first = &file->roles[i], *wanted = shard_of(file, first, rank);
        if (bridge_is_shard(first)) continue;
        struct bridge_role own = *wanted, other = *first; // each in the other's place and name
        memcpy(own.role, first->role, sizeof own.role);
        memcpy(other.role, wanted->role, sizeof other.role);
        memcpy(file->device, own.holder.device, sizeof file->device);
        memcpy(file->device_uuid, own.holder.device_uuid, sizeof file->device_uuid);
        file->roles[wanted - file->roles] = other;
        file->roles[first - file->roles] = own;
    }
    for (int i = 1; i < file->n_roles; i++) {
        if (bridge_is_shard(&file->roles[i]))
            free(file->roles[i].tensors);
        else
            file->roles[n++] = file->roles[i];
    }
    file->n_roles = n;
    file->shard = rank;
    return ST_OK;
}

// ---- against this machine -----------------------------------------------------------------------

enum status bridge_file_check_boot(const struct bridge_file *file)
{
    char boot[40];
    process_boot_id(boot);
    if (strcmp(boot, file->boot_id) != 0)
        return status_fail(ST_MISMATCH,
                           "%s was written in boot %s of a machine, this is boot %s: the server "
                           "that wrote it is not running here; start cw-infer-server",
                           file->path, file->boot_id, boot[0] ? boot : "(unknown)");
    return ST_OK;
}

enum status bridge_file_check_process(const struct bridge_file *file)
{
    if (process_alive(file->pid, file->pid_start_time)) return ST_OK;
    uint64_t start = process_start_time(file->pid);
    return status_fail(
        ST_PEER_GONE, "%s: the server that wrote it (pid %d) %s; start cw-infer-server again",
        file->path, (int)file->pid,
        start && start != file->pid_start_time ? "is gone, and its pid was given to another process"
                                               : "is dead");
}

enum status bridge_file_check(const struct bridge_file *file)
{
    enum status st = bridge_file_check_boot(file);
    return st == ST_OK ? bridge_file_check_process(file) : st;
}

enum status bridge_file_open(const char *explicit_path, struct bridge_file **ret)
{
    char path[sizeof((struct bridge_file *)0)->path];
    struct bridge_file *file = NULL;
    enum status st;
    CHECK(bridge_find(explicit_path, path, sizeof path));
    CHECK(bridge_file_read(path, &file));
    CHECK(bridge_file_check(file));
    *ret = TAKE_PTR(file);
out:
    bridge_file_free(file);
    return st;
}
