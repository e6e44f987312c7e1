/* bridge_sample.c: names of this process, and a bridge file with them. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/bridge_sample.h"
#include "common/base/process.h"
#include "kernels/device.h"
#include "tests/support/support.h"

#include <sys/mman.h>

struct bridge_names bridge_names;

void bridge_sample_open(void)
{
    snprintf(bridge_names.folder, sizeof bridge_names.folder, "/tmp/commonweight-bridge-XXXXXX");
    assert_non_null(mkdtemp(bridge_names.folder));
    snprintf(bridge_names.file, sizeof bridge_names.file, "%s/bridge.json", bridge_names.folder);
    snprintf(bridge_names.socket, sizeof bridge_names.socket, "%s/s.sock", bridge_names.folder);
    snprintf(bridge_names.page, sizeof bridge_names.page, "/commonweight-test-page-%d",
             (int)getpid());
    snprintf(bridge_names.arena, sizeof bridge_names.arena, "/commonweight-test-arena-%d",
             (int)getpid());
}

void bridge_sample_close(void)
{
    shm_unlink(bridge_names.page);
    shm_unlink(bridge_names.arena);
    assert_ok(file_remove_tree(bridge_names.folder));
}

void assert_says(const char *words)
{
    if (!strstr(status_message(), words)) fail_msg("\"%s\" lacks \"%s\"", status_message(), words);
}

// A file of this process with a policy of n tensors and, where wanted, a small draft.
struct bridge_file *bridge_sample(int n_tensors, bool draft)
{
    struct bridge_file *f = calloc(1, sizeof *f);
    struct device *dev = NULL;
    assert_int_equal(device_open("cpu", &dev), ST_OK);
    snprintf(f->path, sizeof f->path, "%s", bridge_names.file);
    process_boot_id(f->boot_id);
    f->pid = getpid();
    f->pid_start_time = process_start_time(getpid());
    snprintf(f->device, sizeof f->device, "cpu");
    snprintf(f->device_uuid, sizeof f->device_uuid, "%s", device_uuid(dev));
    snprintf(f->control_page, sizeof f->control_page, "%s", bridge_names.page);
    snprintf(f->socket, sizeof f->socket, "%s", bridge_names.socket);
    f->n_roles = draft ? 2 : 1;
    f->roles = calloc((size_t)f->n_roles, sizeof *f->roles);
    for (int i = 0; i < f->n_roles; i++) {
        struct bridge_role *r = &f->roles[i];
        snprintf(r->role, sizeof r->role, "%s", i ? "draft" : "policy");
        snprintf(r->model, sizeof r->model, "/models/%s", r->role);
        snprintf(r->kind, sizeof r->kind, "posix-shm");
        snprintf(r->handle, sizeof r->handle, "%s%s", bridge_names.arena, i ? "-draft" : "");
        memset(r->layout_hash, i ? 'b' : 'a', 64);
        r->dt = DT_F32;
        r->n_tensors = i ? 2 : n_tensors;
        r->canary_offset = (uint64_t)r->n_tensors * TENSOR_BYTES;
        r->bytes = r->canary_offset + 256;
        r->n_parameters = (int64_t)r->n_tensors * ROWS * COLUMNS;
        r->tensors = calloc((size_t)r->n_tensors, sizeof *r->tensors);
        for (int k = 0; k < r->n_tensors; k++) {
            struct bridge_tensor *t = &r->tensors[k];
            snprintf(t->name, sizeof t->name, "model.layers.%d.weight", k);
            t->n_dims = 2;
            t->shape[0] = ROWS;
            t->shape[1] = t->stride[0] = COLUMNS;
            t->stride[1] = 1;
            t->dt = DT_F32;
            t->bytes = TENSOR_BYTES;
            t->offset = (uint64_t)k * TENSOR_BYTES;
        }
    }
    device_free(dev);
    return f;
}

// Sets or removes the value at the path; fails the test where there is no such place.
void bridge_change(json_t *json, const char *at, const char *value)
{
    char keys[256], *remaining = keys, *key;
    snprintf(keys, sizeof keys, "%s", at);
    json_t *new_value = value ? json_loads(value, JSON_DECODE_ANY, NULL) : NULL;
    assert_true(!value || new_value);
    while ((key = strsep(&remaining, "/")) && remaining)
        json = json_is_array(json) ? json_array_get(json, strtoul(key, NULL, 10))
                                   : json_object_get(json, key);
    assert_non_null(json);
    int failed;
    if (json_is_array(json))
        failed = json_array_set_new(json, strtoul(key, NULL, 10), new_value);
    else
        failed = value ? json_object_set_new(json, key, new_value) : json_object_del(json, key);
    assert_int_equal(failed, 0);
}
