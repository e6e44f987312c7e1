/* matmul.c: matrix products. A few rows times a weight (decoding) is bound by reading the weight, and
 * runs on a kernel of our own that streams it once; everything else is OpenBLAS. */
#include "kernels/cpu/cpu.h"
#include <cblas.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

enum {
    FEW_ROWS = 4, // up to this many rows of A take the streaming kernel
    TILE = 4      // rows of B at once
};

static inline float lane_sum(vec v)
{
    float sum[LANES];
    memcpy(sum, &v, sizeof v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) sum[i] += sum[i + width];
    return sum[0];
}

// c[i * ldc + j] = dot(a row i, b row j) + c's old value (accumulate) for i < rows, j < TILE.
static inline __attribute__((always_inline)) void dot_tile(float *c, int64_t ldc, const float *a,
                                                           const float *b, int k, int rows,
                                                           int cols, bool accumulate,
                                                           const float *bias)
{
    vec sum[FEW_ROWS][TILE] = {0};
    int whole = k / LANES * LANES;
    for (int p = 0; p < whole; p += LANES)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++)
                sum[i][j] += *(const vec *)(a + (int64_t)i * k + p) *
                             *(const vec *)(b + (int64_t)j * k + p);
    if (whole < k)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++) {
                vec x = {0}, y = {0};
                memcpy(&x, a + (int64_t)i * k + whole, (size_t)(k - whole) * 4);
                memcpy(&y, b + (int64_t)j * k + whole, (size_t)(k - whole) * 4);
                sum[i][j] += x * y;
            }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) {
            float value = lane_sum(sum[i][j]);
            if (accumulate) value += c[i * ldc + j];
            if (bias) value += bias[j];
            c[i * ldc + j] = value;
        }
}

static void few_rows(float *c, const float *a, const float *b, const float *bias,
                     const struct matmul *shape)
{
    const int n = shape->n, k = shape->k;
    const bool add = shape->beta != 0;
#pragma omp parallel for if ((int64_t)n * k > PARALLEL_WORK * 2)
    for (int j = 0; j < n; j += TILE) {
        const float *rows = b + (int64_t)j * k, *offset = bias ? bias + j : NULL;
        if (n - j < TILE) {
            for (int i = 0; i < shape->m; i++)
                for (int l = 0; l < n - j; l++)
                    dot_tile(c + (int64_t)i * n + j + l, n, a + (int64_t)i * k,
                             rows + (int64_t)l * k, k, 1, 1, add, offset ? offset + l : NULL);
            continue;
        }
        switch (shape->m) {
        case 1: dot_tile(c + j, n, a, rows, k, 1, TILE, add, offset); break;
        case 2: dot_tile(c + j, n, a, rows, k, 2, TILE, add, offset); break;
        case 3: dot_tile(c + j, n, a, rows, k, 3, TILE, add, offset); break;
        case 4: dot_tile(c + j, n, a, rows, k, 4, TILE, add, offset); break;
        }
    }
}

static void add_bias(float *c, const float *bias, int m, int n)
{
#pragma omp parallel for if ((int64_t)m * n > PARALLEL_WORK)
    for (int i = 0; i < m; i++) {
        float *row = c + (int64_t)i * n;
#pragma omp simd
        for (int j = 0; j < n; j++) row[j] += bias[j];
    }
}

void cpu_matmul(struct device *dev, void *c, const void *a, const void *b, const void *bias,
                const struct matmul *shape)
{
    if (!cpu_is_f32(dev, "matmul", shape->in) || !cpu_is_f32(dev, "matmul", shape->out)) return;
    const int m = shape->m, n = shape->n, k = shape->k;
    if (m <= 0 || n <= 0) return;
    if (m <= FEW_ROWS && !shape->trans_a && shape->trans_b) {
        few_rows(c, a, b, bias, shape);
        return;
    }
    if (k > 0)
        cblas_sgemm(CblasRowMajor, shape->trans_a ? CblasTrans : CblasNoTrans,
                    shape->trans_b ? CblasTrans : CblasNoTrans, m, n, k, 1.0f, a,
                    shape->trans_a ? m : k, b, shape->trans_b ? k : n, shape->beta, c, n);
    else if (shape->beta == 0)
        memset(c, 0, (size_t)m * (size_t)n * sizeof(float));
    if (bias) add_bias(c, bias, m, n);
}
