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

LATER(loaded_close)
LATER(model_config_free)
LATER(safetensors_free)
LATER(device_free)

struct model_config *config_of(const char *folder)
{
    struct model_config *c = NULL;
    assert_ok(model_config_load(folder, &c));
    return test_later(c, model_config_free_later);
}

struct safetensors *tensors_of(const char *folder)
{
    struct safetensors *set = NULL;
    assert_ok(safetensors_open(folder, &set));
    return test_later(set, safetensors_free_later);
}

struct safetensors *tensors_of_file(const char *path)
{
    struct safetensors *set = NULL;
    assert_ok(safetensors_open_file(path, &set));
    return test_later(set, safetensors_free_later);
}

struct device *test_cpu(void)
{
    struct device *dev = NULL;
    assert_ok(device_open("cpu", &dev));
    return test_later(dev, device_free_later);
}

struct loaded *loaded_planned(const char *folder, enum dtype dt)
{
    struct loaded *m = test_keep(calloc(1, sizeof *m));
    loaded_plan(folder, dt, m);
    return test_later(m, loaded_close_later);
}

struct loaded *loaded_of(const char *folder, enum dtype dt)
{
    struct loaded *m = loaded_planned(folder, dt);
    assert_ok(weights_load(m->weights, m->dev, folder));
    return m;
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
