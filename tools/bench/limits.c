/* limits.c: what this machine can do at best: memory bandwidth, and the rate of a large matmul;
 * both the best of their repetitions. */
// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/bench.h"
#include "common/base/rng.h"
#include <math.h>
#include <stdlib.h>

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return x[n / 2];
}

static double minimum(const double *x, int n)
{
    double min = x[0];
    for (int i = 1; i < n; i++) min = x[i] < min ? x[i] : min;
    return min;
}

// A pass that only reads host memory; the sum keeps the compiler from leaving it out.
static float read_through(const float *x, int64_t n)
{
    enum { CHUNK = 1 << 15 };
    float total = 0;
#pragma omp parallel for reduction(+ : total)
    for (int64_t at = 0; at < n; at += CHUNK) {
        int64_t end = n - at < CHUNK ? n : at + CHUNK;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = at; i < end; i++) sum += x[i];
        total += sum;
    }
    return total;
}

#define REPEAT 7

// No more than what is measured is.
static int repeats(const struct bench *b)
{
    return b->o.steps < REPEAT ? (int)b->o.steps : REPEAT;
}

// Reading and writing: the better of a copy and a sum of two arrays, which differ in how many
// streams the memory must follow. Reading alone: a pass of its own on the CPU, where it is slower a
// byte; on CUDA it is taken to be the same.
enum status limits_bandwidth(struct bench *b)
{
    bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    size_t bytes = cuda ? (size_t)4 << 30 : (size_t)256 << 20;
    const int n = repeats(b);
    double copy_ms[REPEAT], read_ms[REPEAT], add_ms[REPEAT];
    volatile float kept = 0;
    void *from = NULL, *to = NULL;
    enum status st;
    CHECK(device_alloc(b->dev, bytes, &from));
    CHECK(device_alloc(b->dev, bytes, &to));
    device_fill(b->dev, from, 0x11, bytes);
    device_fill(b->dev, to, 0x22, bytes);
    for (int i = 0; i < n; i++) {
        device_timer_start(b->dev);
        device_copy(b->dev, to, from, bytes);
        copy_ms[i] = device_timer_stop(b->dev);
        device_timer_start(b->dev);
        if (!cuda) kept = read_through(from, (int64_t)(bytes / sizeof(float)));
        read_ms[i] = device_timer_stop(b->dev);
        device_timer_start(b->dev);
        b->ops->add(b->dev, to, from, (int64_t)(bytes / sizeof(float)), 1.0f, DT_F32);
        add_ms[i] = device_timer_stop(b->dev);
    }
    CHECK(device_sync(b->dev));
    (void)kept;
    b->bandwidth = 1e3 * (double)bytes * fmax(2 / minimum(copy_ms, n), 3 / minimum(add_ms, n));
    b->read_bandwidth = cuda ? b->bandwidth : 1e3 * (double)bytes / minimum(read_ms, n);
out:
    device_release(b->dev, to);
    device_release(b->dev, from);
    return st;
}

static void random_floats(struct device *dev, const struct ops *ops, void *to, enum dtype dt,
                          int64_t n, void *staging_device, float *staging, uint64_t seed)
{
    struct rng r;
    rng_init(&r, seed, 0);
    for (int64_t i = 0; i < n; i++) staging[i] = rng_uniform(&r) - 0.5f;
    device_copy_in(dev, staging_device, staging, (size_t)n * sizeof(float));
    ops->convert(dev, to, dt, staging_device, DT_F32, n);
}

enum status limits_matmul(struct bench *b, double *ret_flops)
{
    bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    int size = cuda ? 8192 : 1024;
    int64_t n = (int64_t)size * size;
    const int repeat = repeats(b);
    double ms[2 * REPEAT];
    void *x = NULL, *y = NULL, *z = NULL, *staging_device = NULL;
    float *staging = malloc((size_t)n * sizeof *staging);
    struct matmul shape = {
        .m = size, .n = size, .k = size, .trans_b = true, .in = b->dt, .out = b->dt};
    enum status st;
    if (!staging) return status_fail(ST_NO_MEMORY, "no memory to measure matmuls");
    CHECK(device_alloc(b->dev, (size_t)n * dtype_size(b->dt), &x));
    CHECK(device_alloc(b->dev, (size_t)n * dtype_size(b->dt), &y));
    CHECK(device_alloc(b->dev, (size_t)n * dtype_size(b->dt), &z));
    CHECK(device_alloc(b->dev, (size_t)n * sizeof(float), &staging_device));
    random_floats(b->dev, b->ops, x, b->dt, n, staging_device, staging, 1);
    random_floats(b->dev, b->ops, y, b->dt, n, staging_device, staging, 2);
    for (int i = -2; i < 2 * repeat; i++) {
        shape.trans_b = i % 2 == 0;
        device_timer_start(b->dev);
        b->ops->matmul(b->dev, z, x, y, NULL, &shape);
        double took = device_timer_stop(b->dev);
        if (i >= 0) ms[i] = took;
    }
    CHECK(device_sync(b->dev));
    *ret_flops = 2e3 * (double)size * (double)size * (double)size / minimum(ms, 2 * repeat);
out:
    device_release(b->dev, x);
    device_release(b->dev, y);
    device_release(b->dev, z);
    device_release(b->dev, staging_device);
    free(staging);
    return st;
}

// ---- what a model needs -------------------------------------------------------------------------
// Of the experts that none of n rows is given to.
static double unread_parameters(const struct bench *b, double n)
{
    const struct model_config *c = b->config;
    double unread = 0;
    for (int i = 0; i < c->n_layers; i++) {
        const struct layer_config *l = &c->layers[i];
        const double each =
            (double)c->hidden * (config_up_width(c, l->intermediate) + l->intermediate);
        const double experts = l->moe.n_experts;
        if (experts > 0) unread += each * experts * pow(1 - l->moe.top_k / experts, n);
    }
    return unread;
}

// All but the table of layers' own inputs, in which rows are looked up.
static double read_parameters(const struct bench *b)
{
    const struct model_config *c = b->config;
    return (double)b->weights->n_parameters -
           (double)config_layer_inputs(c) * config_layer_vocab_rows(c);
}

double limits_read_bytes(const struct bench *b, double n)
{
    const struct weights *twin = b->weights->twin; // of which the experts are
    const double unread = unread_parameters(b, n), e = (double)dtype_size(b->dt);
    const double narrow = twin ? (double)twin->n_parameters - unread : 0;
    return (read_parameters(b) - unread - narrow) * e + narrow;
}

double limits_row_parameters(const struct bench *b)
{
    return read_parameters(b) - unread_parameters(b, 1);
}

double limits_state_bytes(const struct bench *b)
{
    double n = 0;
    for (int i = 0; i < b->config->n_layers; i++) {
        const struct delta_shape *s = &b->config->layers[i].delta;
        if (!delta_is_conv(s)) n += (double)s->n_heads * s->key_dim * s->head_dim;
    }
    return n * sizeof(float);
}

double limits_attn_products(const struct bench *b)
{
    double n = 0;
    for (int i = 0; i < b->config->n_layers; i++) n += layer_attn_products(&b->config->layers[i]);
    return n;
}
