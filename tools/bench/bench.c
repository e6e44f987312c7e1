/* bench.c: opens what the benchmarks run on, and prints what they report. */
// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/bench.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "infer-server/weights/weights_owner.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Sizes the benchmarks are quoted for.
static const char config_100m[] =
    "{\"model_type\":\"qwen2\",\"architectures\":[\"Qwen2ForCausalLM\"],\"vocab_size\":32000,"
    "\"hidden_size\":768,"
    "\"intermediate_size\":2048,\"num_hidden_layers\":12,\"num_attention_heads\":12,\"num_key_"
    "value_heads\":4,"
    "\"max_position_embeddings\":32768,\"rope_theta\":1000000.0,\"tie_word_embeddings\":true}";
static const char config_1500m[] =
    "{\"model_type\":\"qwen2\",\"architectures\":[\"Qwen2ForCausalLM\"],\"vocab_size\":151936,"
    "\"hidden_size\":1536,\"intermediate_size\":8960,\"num_hidden_layers\":28,\"num_attention_"
    "heads\":12,"
    "\"num_key_value_heads\":2,\"max_position_embeddings\":32768,\"rope_theta\":1000000.0,"
    "\"tie_word_embeddings\":true}";

enum status bench_load_config(const struct bench_options *o, bool cuda, struct model_config **ret)
{
    json_t *json = NULL;
    enum status st;
    if (o->model) return model_config_load(o->model, ret);
    if (o->config) return model_config_load_file(o->config, ret);
    const char *text = cuda ? config_1500m : config_100m;
    st = json_parse("the built-in config", text, strlen(text), &json);
    if (st == ST_OK) st = model_config_from_json("the built-in config", json, ret);
    json_decref(json);
    return st;
}

enum status bench_load_weights(struct device *dev, const struct model_config *config, enum dtype dt,
                               const char *folder, uint64_t seed, struct weights **ret_weights,
                               void **ret_arena)
{
    enum status st = weights_plan(config, dt, ret_weights);
    if (st == ST_OK) st = device_alloc(dev, (*ret_weights)->bytes, ret_arena);
    if (st != ST_OK) return st;
    weights_bind(*ret_weights, *ret_arena);
    return folder ? weights_load(*ret_weights, dev, folder)
                  : weights_init_random(*ret_weights, dev, seed);
}

enum status bench_open(struct bench *b, const struct bench_options *o, const char *bridge_path)
{
    enum status st;
    b->o = *o;
    CHECK(device_open(o->device, &b->dev));
    b->ops = device_ops(b->dev);
    bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    b->dt = o->dtype ? (enum dtype)(o->dtype - 1) : device_default_dtype(b->dev);
    if (b->o.batch == 0) b->o.batch = cuda ? 16 : 1;
    CHECK(bench_load_config(o, cuda, &b->config));
    b->config->quantization = (enum quantization)o->quantization;
    b->config->kv_cache = (enum kv_cache)o->kv_cache;
    if (bridge_path) {
        const struct weights_source sources[WEIGHTS_ROLES] = {{b->config, o->model}};
        CHECK(weights_owner_new(b->dev, NULL, sources, b->dt, false, bridge_path, &b->owner));
        b->weights = weights_owner_weights(b->owner, WEIGHTS_POLICY);
    } else {
        CHECK(bench_load_weights(b->dev, b->config, b->dt, o->model, (uint64_t)o->seed, &b->plan,
                                 &b->arena));
        b->weights = b->plan;
    }
out:
    return st;
}

void bench_close(struct bench *b)
{
    weights_owner_free(b->owner);
    device_release(b->dev, b->arena);
    weights_free(b->plan);
    model_config_free(b->config);
    device_free(b->dev);
}

enum status bench_time(int64_t warmup, int64_t repeats, enum status (*pass)(void *context),
                       void *context, double *ret_ms)
{
    double *ms = calloc((size_t)repeats, sizeof *ms);
    enum status st = ST_OK;
    if (!ms) return status_fail(ST_NO_MEMORY, "no memory for %lld times", (long long)repeats);
    for (int64_t i = -warmup; i < repeats; i++) {
        int64_t start = clock_now_ns();
        CHECK(pass(context));
        if (i >= 0) ms[i] = clock_ms_since(start);
    }
    *ret_ms = median(ms, (int)repeats);
out:
    free(ms);
    return st;
}

void bench_print(const struct bench *b, const char *what, json_t *figures, const char *format, ...)
{
    if (b->o.json) {
        json_t *report = json_pack("{s:s, s:s, s:s, s:I}", "benchmark", what, "device",
                                   device_name(b->dev), "dtype", dtype_name(b->dt), "parameters",
                                   (json_int_t)b->weights->n_parameters);
        if (b->bandwidth > 0) {
            json_object_set_new(report, "bandwidth_gb_s", json_real(b->bandwidth / 1e9));
            json_object_set_new(report, "read_gb_s", json_real(b->read_bandwidth / 1e9));
        }
        json_object_update(report, figures);
        json_dumpf(report, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
        putchar('\n');
        json_decref(report);
    } else {
        va_list args;
        va_start(args, format);
        printf("%s, %.1f M parameters, %s: ", device_name(b->dev),
               (double)b->weights->n_parameters / 1e6, dtype_name(b->dt));
        vprintf(format, args);
        va_end(args);
    }
    fflush(stdout);
    json_decref(figures);
}
