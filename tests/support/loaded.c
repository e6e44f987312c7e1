/* loaded.c: see loaded.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/loaded.h"
#include "tests/support/support.h"

void loaded_config(const char *folder, struct loaded *ret)
{
    *ret = (struct loaded){0};
    assert_ok(device_open("cpu", &ret->dev));
    assert_ok(model_config_load(folder, &ret->config));
}

void loaded_zeros(struct loaded *m, enum dtype dt)
{
    assert_ok(weights_plan(m->config, dt, &m->weights));
    assert_ok(weights_alloc(m->weights, m->dev));
}

void loaded_plan(const char *folder, enum dtype dt, struct loaded *ret)
{
    loaded_config(folder, ret);
    loaded_zeros(ret, dt);
}

enum status loaded_open(const char *folder, enum dtype dt, struct loaded *ret)
{
    loaded_plan(folder, dt, ret);
    return weights_load(ret->weights, ret->dev, folder);
}

void loaded_close(struct loaded *m)
{
    weights_free(m->weights);
    model_config_free(m->config);
    device_free(m->dev);
}

int tensor_sources(const struct safetensors *set, struct safetensors_source *ret)
{
    const int n = safetensors_count(set);
    for (int i = 0; i < n; i++) {
        const struct safetensors_entry *e = safetensors_at(set, i);
        ret[i] = (struct safetensors_source){.dt = e->dt, .n_dims = e->n_dims, .tag = e->data};
        memcpy(ret[i].shape, e->shape, sizeof e->shape);
        snprintf(ret[i].name, sizeof ret[i].name, "%s", e->name);
    }
    return n;
}

static enum status copy_tag(void *context, const struct safetensors_source *source, size_t bytes,
                            void *to)
{
    (void)context;
    memcpy(to, source->tag, bytes);
    return ST_OK;
}

void tensors_write(const char *folder, const struct safetensors_source *sources, int n)
{
    assert_ok(safetensors_write(test_path(folder, "model.safetensors"), sources, n, NULL, copy_tag,
                                NULL));
}
