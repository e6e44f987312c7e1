/* norm.c: RMS norm and layer norm over rows, and their gradients. With n = x * rstd (or
 * (x - mean) * rstd), w' = w or 1 + w, and g = dy * w':
 *   dx = rstd * (g - n * avg(g n) [- avg(g), layer norm])      dw += dy * n      db += dy */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"

static inline int64_t row_offset(const struct norm_shape *shape, int row)
{
    return row / shape->heads * shape->stride + (int64_t)(row % shape->heads) * shape->width;
}

// What row r is multiplied by; NULL: 1.
static inline const float *weights_of(const struct norm_shape *shape, const float *w, int row)
{
    return shape->own_weights ? w + (int64_t)(row % shape->heads) * shape->width : w;
}

static inline float weight(const struct norm_shape *shape, const float *w, int c)
{
    if (!w) return 1.0f;
    return shape->kind == NORM_RMS_PLUS_ONE ? 1.0f + w[c] : w[c];
}

void cpu_norm(struct device *dev, void *y, const struct norm_args *args,
              const struct norm_shape *shape)
{
    if (!cpu_is_f32(dev, "norm", shape->dt)) return;
    const int width = shape->width;
    const float *x = args->x, *bias = args->b;
    const float one = shape->kind == NORM_RMS_PLUS_ONE ? 1.0f : 0.0f;
#pragma omp parallel for if ((int64_t)shape->rows * width > PARALLEL_WORK)
    for (int r = 0; r < shape->rows; r++) {
        const float *in = x + row_offset(shape, r);
        const float *scale = weights_of(shape, args->w, r);
        float *out = (float *)y + row_offset(shape, r);
        const float centre = shape->kind == NORM_LAYER ? sum_f32(in, width) / (float)width : 0;
#pragma omp simd
        for (int c = 0; c < width; c++) out[c] = in[c] - centre;
        const float factor = 1.0f / sqrtf(dot_f32(out, out, width) / (float)width + shape->eps);
#pragma omp simd
        for (int c = 0; c < width; c++)
            out[c] = scale ? out[c] * factor * (one + scale[c]) : out[c] * factor;
        if (bias)
#pragma omp simd
            for (int c = 0; c < width; c++) out[c] += bias[c];
        if (args->rstd) args->rstd[norm_place(shape, r)] = factor;
        if (args->mean && shape->kind == NORM_LAYER) args->mean[r] = centre;
        if (args->codes)
            args->scales[r] = cpu_quantise_row(args->codes + (int64_t)r * width, out, width);
    }
}

// Threads own columns: each sum runs over the rows in order, of head h where they have their own.
static void weight_gradient(float *dw, float *db, const float *dy, const struct norm_args *args,
                            const struct norm_shape *shape, int h)
{
    const int step = shape->own_weights ? shape->heads : 1;
    enum { CHUNK = 32 };
    const float *x = args->x, *rstd = args->rstd;
    const float *mean = shape->kind == NORM_LAYER ? args->mean : NULL;
#pragma omp parallel for if ((int64_t)shape->rows * shape->width > PARALLEL_WORK)
    for (int start = 0; start < shape->width; start += CHUNK) {
        int width = shape->width - start < CHUNK ? shape->width - start : CHUNK;
        float sum[CHUNK] = {0}, bias_sum[CHUNK] = {0};
        for (int r = h; r < shape->rows; r += step) {
            const float *in = x + row_offset(shape, r) + start;
            const float *grad = dy + row_offset(shape, r) + start;
            float factor = rstd[norm_place(shape, r)], centre = mean ? mean[r] : 0;
#pragma omp simd
            for (int c = 0; c < width; c++) {
                sum[c] = fma_f32(grad[c], (in[c] - centre) * factor, sum[c]);
                bias_sum[c] += grad[c];
            }
        }
        for (int c = 0; c < width; c++) {
            if (dw) dw[h * shape->width + start + c] += sum[c];
            if (db) db[start + c] += bias_sum[c];
        }
    }
}

void cpu_norm_back(struct device *dev, void *dx, float *dw, float *db, const void *dy,
                   const struct norm_args *args, const struct norm_shape *shape, bool add)
{
    if (!cpu_is_f32(dev, "norm_back", shape->dt)) return;
    enum { CHUNK = 512 };
    const bool layer = shape->kind == NORM_LAYER;
    const int width = shape->width;
    const float *x = args->x;
    // first, because dx may be written over dy
    for (int h = 0; (dw || db) && h < (shape->own_weights ? shape->heads : 1); h++)
        weight_gradient(dw, db, dy, args, shape, h);
#pragma omp parallel for if ((int64_t)shape->rows * width > PARALLEL_WORK)
    for (int r = 0; r < shape->rows; r++) {
        const float *in = x + row_offset(shape, r);
        const float *grad = (const float *)dy + row_offset(shape, r);
        const float *scale = weights_of(shape, args->w, r);
        float *out = (float *)dx + row_offset(shape, r);
        float factor = args->rstd[norm_place(shape, r)], centre = layer ? args->mean[r] : 0;
        float dot = 0, sum = 0, g[CHUNK], n[CHUNK];
        for (int start = 0; start < width; start += CHUNK) {
            const int part = width - start < CHUNK ? width - start : CHUNK;
#pragma omp simd
            for (int c = 0; c < part; c++) {
                g[c] = grad[start + c] * weight(shape, scale, start + c);
                n[c] = (in[start + c] - centre) * factor;
            }
            dot += dot_f32(g, n, part);
            sum += sum_f32(g, part);
        }
        dot /= (float)width;
        sum = layer ? sum / (float)width : 0;
#pragma omp simd
        for (int c = 0; c < width; c++) {
            float y = (in[c] - centre) * factor;
            float d = factor * (fma_f32(-y, dot, grad[c] * weight(shape, scale, c)) - sum);
            out[c] = add ? out[c] + d : d;
        }
    }
}
