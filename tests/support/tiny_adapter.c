/* tiny_adapter.c: see tiny_adapter.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tiny_adapter.h"
#include "common/base/rng.h"
#include "tests/support/support.h"

struct adapter_config *tiny_adapter_config(const char *text)
{
    struct adapter_config *config;
    assert_ok(adapter_config_from_json("adapter_config.json", json_of(text), &config));
    return config;
}

struct adapter *tiny_adapter_new(struct device *dev, const struct weights *base, const char *text)
{
    struct adapter *a;
    assert_ok(adapter_new(tiny_adapter_config(text), base, DT_F32, &a));
    assert_ok(weights_alloc(a->weights, dev));
    return a;
}

enum status tiny_adapter_fill(const struct adapter *a, struct device *dev, uint64_t seed)
{
    enum status st = adapter_init(a, dev, seed);
    for (int i = 0; i < a->n && st == ST_OK; i++) {
        const int64_t n = a->weights->tensors[a->list[i].b].n;
        float *values = malloc((size_t)n * sizeof *values);
        struct rng rng;
        rng_init(&rng, seed, 1000 + (uint64_t)i);
        for (int64_t j = 0; values && j < n; j++) values[j] = rng_normal(&rng);
        st = values ? weights_write(a->weights, dev, a->list[i].b, values) : ST_NO_MEMORY;
        free(values);
    }
    return st;
}

enum status tiny_adapter_write(const char *folder, const char *model, const char *config,
                               uint64_t seed)
{
    enum status st;
    struct device *dev = NULL;
    struct model_config *base_config = NULL;
    struct weights *base = NULL;
    struct adapter_config *adapter_config;
    struct adapter *a = NULL;
    json_t *json = NULL;
    CHECK(file_make_folders(folder));
    CHECK(device_open("cpu", &dev));
    CHECK(model_config_load(model, &base_config));
    CHECK(weights_plan(base_config, DT_F32, &base));
    CHECK(json_parse("config", config, strlen(config), &json));
    CHECK(adapter_config_from_json("config", json, &adapter_config));
    CHECK(adapter_new(adapter_config, base, DT_F32, &a));
    CHECK(weights_alloc(a->weights, dev));
    CHECK(tiny_adapter_fill(a, dev, seed));
    CHECK(adapter_save(a, dev, folder, DT_F32));
out:
    json_decref(json);
    adapter_free(a);
    weights_free(base);
    model_config_free(base_config);
    device_free(dev);
    return st;
}
