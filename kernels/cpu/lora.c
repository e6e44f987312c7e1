/* lora.c: low-rank adapters. The forward pass takes its dot products from matmul.c, whose order of
 * summation depends on their length alone: a row has the same bits in any batch, though rows of one
 * adapter that stand together are computed together. The backward pass is OpenBLAS. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include "kernels/dropout.h"
#include <cblas.h>

enum { BLOCK = 8 }; // rows that a thread takes at a time

static const struct lora_factors *factors_at(const struct lora_args *l, int part, int adapter)
{
    return &l->factors[part * l->n_adapters + adapter];
}

static int place_of(const struct lora_args *l, int row)
{
    return l->row ? l->row[row] : row;
}

static int adapter_of(const struct lora_args *l, int row)
{
    return l->adapter[place_of(l, row)];
}

// Rows i0 .. i1 - 1 of one adapter. h (i1 - i0, max_rank) is scratch.
static void run_forward(const struct lora_args *l, int part, float *y, const float *x, float *h,
                        int i0, int i1)
{
    const struct lora_factors *f = factors_at(l, part, adapter_of(l, i0));
    const int width = l->first[l->n_parts], n = i1 - i0;
    if (!f->a) return;
    const struct dots down = {.a = x + (int64_t)i0 * l->k,
                              .b = f->a,
                              .c = h,
                              .lda = l->k,
                              .ldb = l->k,
                              .ldc = f->rank,
                              .k = l->k};
    cpu_dots(&down, 0, n, 0, f->rank);
    for (int i = 0; i < n * f->rank; i++) h[i] *= f->scale;
    const struct dots up = {.a = h,
                            .b = f->b,
                            .c = y + (int64_t)i0 * width + l->first[part],
                            .lda = f->rank,
                            .ldb = f->rank,
                            .ldc = width,
                            .k = f->rank,
                            .add = true};
    cpu_dots(&up, 0, n, 0, l->first[part + 1] - l->first[part]);
}

// to (rows, k) (+)= x times the part's dropout.
static void drop(const struct lora_args *l, int part, float *to, const float *x, bool add)
{
    const struct lora_dropout *d = &l->dropout;
#pragma omp parallel for if ((int64_t)l->rows * l->k > PARALLEL_WORK)
    for (int row = 0; row < l->rows; row++) {
        const int at_row = place_of(l, row);
        for (int c = 0; c < l->k; c += 4) {
            float factors[4];
            dropout_factors(d, part, d->sample[at_row], d->position[at_row], (uint32_t)c / 4,
                            factors);
            for (int i = 0; i < 4 && c + i < l->k; i++) {
                const int64_t at = (int64_t)row * l->k + c + i;
                to[at] = fma_f32(factors[i], x[at], add ? to[at] : 0);
            }
        }
    }
}

// One part, for all rows.
static void part_forward(const struct lora_args *l, int part, float *y, const float *x,
                         float *scratch)
{
    const int blocks = (l->rows + BLOCK - 1) / BLOCK;
    const int64_t work =
        (int64_t)l->rows * l->max_rank * (l->k + l->first[part + 1] - l->first[part]);
#pragma omp parallel for if (work > PARALLEL_WORK * 8)
    for (int block = 0; block < blocks; block++) {
        int end = (block + 1) * BLOCK < l->rows ? (block + 1) * BLOCK : l->rows, to;
        float *h = scratch + (int64_t)block * BLOCK * l->max_rank;
        for (int at = block * BLOCK; at < end; at = to) {
            const int adapter = adapter_of(l, at);
            for (to = at + 1; to < end && adapter_of(l, to) == adapter;) to++;
            if (adapter >= 0) run_forward(l, part, y, x, h, at, to);
        }
    }
}

// Twice h, and x after dropout.
size_t cpu_lora_scratch(int rows, int max_rank, int dropped)
{
    return (size_t)(rows + BLOCK) * (2 * (size_t)max_rank + (size_t)dropped) * sizeof(float);
}

// x: after dropout; it is overwritten where there is any.
static void part_back(const struct lora_args *l, int part, float *dx, const float *x, float *h,
                      float *dropped)
{
    const struct lora_factors *f = factors_at(l, part, 0);
    const struct lora_grads *g = &l->grads[part];
    const float *dy = (const float *)l->dy + l->first[part];
    const int rows = l->rows, k = l->k, r = f->rank, width = l->first[l->n_parts];
    const int n = l->first[part + 1] - l->first[part];
    float *dh = h + (int64_t)rows * r;
    const enum CBLAS_ORDER order = CblasRowMajor;
    const enum CBLAS_TRANSPOSE plain = CblasNoTrans, across = CblasTrans;
    // h = x a^T; db += scale dy^T h; dh = scale dy b; da += dh^T x; dx += dh a
    cblas_sgemm(order, plain, across, rows, r, k, 1, x, k, f->a, k, 0, h, r);
    cblas_sgemm(order, across, plain, n, r, rows, f->scale, dy, width, h, r, 1, g->b, r);
    cblas_sgemm(order, plain, plain, rows, r, n, f->scale, dy, width, f->b, r, 0, dh, r);
    cblas_sgemm(order, across, plain, r, k, rows, 1, dh, r, x, k, 1, g->a, k);
    cblas_sgemm(order, plain, plain, rows, k, r, 1, dh, r, f->a, k, dropped ? 0 : 1,
                dropped ? dropped : dx, k);
    if (dropped) drop(l, part, dx, dropped, true);
}

void cpu_lora(struct device *dev, void *y, const void *x, const struct lora_args *l)
{
    const bool drops = l->dropout.p > 0;
    if (!cpu_is_f32(dev, "lora", l->dt) || !cpu_is_f32(dev, "lora", l->out) || l->rows <= 0) return;
    float *h = cpu_workspace(dev, cpu_lora_scratch(l->rows, l->max_rank, drops ? l->k : 0));
    if (!h) return;
    float *dropped = drops ? h + (int64_t)(l->rows + BLOCK) * 2 * l->max_rank : NULL;
    for (int p = 0; p < l->n_parts; p++) {
        if (l->dy && !factors_at(l, p, 0)->a) continue;
        if (drops) drop(l, p, dropped, x, false);
        if (l->dy)
            part_back(l, p, y, drops ? dropped : x, h, dropped);
        else
            part_forward(l, p, y, drops ? dropped : x, h);
    }
}
