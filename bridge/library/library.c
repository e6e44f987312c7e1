/* library.c: libcommonweight-bridge.so, the bridge's client side (attach.h) under names that other
 * languages can call. It adds nothing to it but plain types. One thread at a time, the caller's. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/library/commonweight-bridge.h"
#include "bridge/attach.h"

#include <string.h>

// What callers see as struct cw_bridge, which has no content of its own.
static struct bridge *of(const struct cw_bridge *bridge)
{
    return (struct bridge *)bridge;
}

// A caller's update as bridge_publish() calls it.
struct foreign_update {
    int (*update)(void *context);
    void *context;
};

const char *cw_bridge_message(void)
{
    return status_message();
}

const char *cw_bridge_error_words(int code)
{
    return status_words((enum status)code);
}

int cw_bridge_open(const char *path, struct cw_bridge **ret)
{
    struct bridge *b;
    enum status st = bridge_attach(path, NULL, &b);
    if (st == ST_OK) *ret = (struct cw_bridge *)b;
    return st;
}

void cw_bridge_close(struct cw_bridge *bridge)
{
    bridge_detach(of(bridge));
}

static const struct bridge_role *find_role(const struct cw_bridge *bridge, const char *role)
{
    return bridge_file_role(bridge_file_of(of(bridge)), role);
}

const char *cw_bridge_role_at(const struct cw_bridge *bridge, int32_t index)
{
    const struct bridge_file *file = bridge_file_of(of(bridge));
    return index >= 0 && index < file->n_roles ? file->roles[index].role : NULL;
}

int32_t cw_bridge_tensor_count(const struct cw_bridge *bridge, const char *role)
{
    const struct bridge_role *r = find_role(bridge, role);
    return r ? r->n_tensors : 0;
}

int cw_bridge_tensor_at(const struct cw_bridge *bridge, const char *role, int32_t index,
                        struct cw_bridge_tensor *ret)
{
    const struct bridge_role *r = find_role(bridge, role);
    if (!r || index < 0 || index >= r->n_tensors)
        return status_fail(ST_NOT_FOUND, "role \"%s\" has no tensor %d (it has %d)", role, index,
                           r ? r->n_tensors : 0);
    const struct bridge_tensor *t = &r->tensors[index];
    *ret = (struct cw_bridge_tensor){
        .name = t->name,
        .dtype = dtype_torch_name(t->dt) + strlen("torch."),
        .data = (char *)bridge_base(of(bridge), role) + t->offset,
        .bytes = t->bytes,
        .device = device_index(bridge_device(of(bridge))),
        .n_dims = t->n_dims,
    };
    memcpy(ret->shape, t->shape, sizeof ret->shape);
    memcpy(ret->stride, t->stride, sizeof ret->stride);
    return ST_OK;
}

uint64_t cw_bridge_version(const struct cw_bridge *bridge)
{
    return control_version(bridge_control(of(bridge)));
}

const char *cw_bridge_socket(const struct cw_bridge *bridge)
{
    return bridge_file_of(of(bridge))->socket;
}

const char *cw_bridge_model(const struct cw_bridge *bridge)
{
    return bridge_file_of(of(bridge))->roles[0].model;
}

int cw_bridge_check(const struct cw_bridge *bridge)
{
    struct control *control = bridge_control(of(bridge));
    enum status st = control_owner_alive(control);
    if (st != ST_OK) return st;
    struct control_info info;
    control_info(control, &info);
    if (info.torn)
        return status_fail(ST_TORN,
                           "version %llu is odd and nobody writes: the server has yet to restore "
                           "its weights; try again when its /health says ok",
                           (unsigned long long)info.version);
    return ST_OK;
}

// A caller writes tensors, and knows nothing of a twin that must be made of them.
int cw_bridge_take_lease(struct cw_bridge *bridge)
{
    const enum quantization q = bridge_file_of(of(bridge))->roles[0].quantization;
    if (q != QUANTIZATION_NONE)
        return status_fail(ST_UNSUPPORTED,
                           "the server multiplies its weights as --quantization %s makes them, "
                           "which this library does not write; start cw-infer-server without it",
                           quantization_names[q]);
    return bridge_become_writer(of(bridge));
}

void cw_bridge_give_lease(struct cw_bridge *bridge)
{
    bridge_end_writer(of(bridge));
}

static enum status run_foreign_update(void *context)
{
    const struct foreign_update *u = context;
    int code = u->update(u->context);
    if (code == 0) return ST_OK;
    return status_fail(ST_CANCELLED, "the caller's update() returned %d", code);
}

int cw_bridge_publish(struct cw_bridge *bridge, int64_t timeout_ms, int (*update)(void *context),
                      void *context, struct cw_bridge_times *ret_times)
{
    struct foreign_update u = {update, context};
    struct publish_times times;
    enum status st = bridge_publish(of(bridge), timeout_ms, run_foreign_update, &u, &times);
    if (st == ST_OK && ret_times)
        *ret_times = (struct cw_bridge_times){times.wait_ms, times.write_ms, times.total_ms};
    return st;
}

int cw_bridge_set_snapshot(struct cw_bridge *bridge, const char *folder)
{
    return control_set_snapshot(bridge_control(of(bridge)), folder);
}
