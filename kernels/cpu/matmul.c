/* matmul.c: matrix multiplication. Activations times a stored weight, the forward pass, run on a
 * kernel of our own (cpu_dots, dot_product); every other transposition, the backward pass, is
 * OpenBLAS.
 *
 * The own kernel exists for two reasons. An entry of C is one dot product whose order of summation
 * depends on k alone, so that a row's result has the same bits alone (decoding), in a chunk of
 * prefill and in a training batch; a BLAS picks its order by the whole shape. And at the few rows
 * of decoding it streams the weight once, at the speed of memory, where a BLAS first packs it.
 *
 * Order of summation: chunks of CHUNK along k, of E4M3_CHUNK where A is in eight bits; in a chunk,
 * lane l adds terms l, l + LANES, ... (vec.h); lanes are added by halves; chunks are added in
 * order, then the old value of C, then the bias. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include "common/base/mxfp4.h"
#include "common/base/e4m3.h"
#include "kernels/comm.h"
#include <cblas.h>

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t lane_list __attribute__((vector_size(WIDTH * 4)));

enum {
    COLS = 4,            // a tile of C: COLS rows of B ...
    ROWS = WIDTH / COLS, // ... times up to ROWS rows of A; its WIDTH sums are one register
    CHUNK = 512,         // of k: BLOCK + COLS rows of it fit the first-level cache,
    BLOCK = 8,           // rows of A that stay there while a chunk of B goes by
    COLUMNS = 32 // columns of C that a thread takes at a time; they stay in the second level
};

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (lane_list){__VA_ARGS__})
#endif

/* Half of a step of adding up lanes: x and y each hold sums spread over groups of 2 * half lanes;
 * the result holds first those of x, then those of y, spread over groups of `half` lanes. */
VEC_INLINE vec fold(vec x, vec y, int half)
{
#if defined(__AVX512F__)
    if (half == 8)
        return SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    if (half == 4)
        return SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    if (half == 2)
        return SHUFFLE(x, y, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               SHUFFLE(x, y, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return SHUFFLE(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    if (half == 4)
        return SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
    if (half == 2)
        return SHUFFLE(x, y, 0, 1, 4, 5, 8, 9, 12, 13) + SHUFFLE(x, y, 2, 3, 6, 7, 10, 11, 14, 15);
    return SHUFFLE(x, y, 0, 2, 4, 6, 8, 10, 12, 14) + SHUFFLE(x, y, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

// Float e of the result is the sum of the floats of sum[e], for e < n (a multiple of COLS).
VEC_INLINE vec fold_all(vec *sum, int n)
{
#pragma GCC unroll 4
    for (int half = WIDTH / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
        for (int e = 0; e < n; e += 2)
            sum[e / 2] = fold(sum[e], e + 1 < n ? sum[e + 1] : sum[e], half);
        n = (n + 1) / 2;
    }
    return sum[0];
}

// Adds to sum[e], for entry e = (i, j) of a tile, the products of n floats from `at` on.
VEC_INLINE void add_products(vec *sum, const float *const *a, const float *const *b, int at, int n,
                             int rows)
{
    vec x[COLS];
#pragma GCC unroll 4
    for (int j = 0; j < COLS; j++) x[j] = load_some(b[j] + at, n);
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        vec y = load_some(a[i] + at, n);
#pragma GCC unroll 4
        for (int j = 0; j < COLS; j++) sum[i * COLS + j] = fma_vec(y, x[j], sum[i * COLS + j]);
    }
}

// The lanes of all entries of a tile, those of registers part .. end - 1 in one pass over k.
VEC_INLINE void add_terms(vec sum[PARTS][ROWS * COLS], const float *const *a, const float *const *b,
                          int k, int rows, int part, int end)
{
    int p = 0;
#pragma GCC unroll 4 // a pass is short
    for (; p + LANES <= k; p += LANES)
#pragma GCC unroll 2
        for (int q = part; q < end; q++) add_products(sum[q], a, b, p + q * WIDTH, WIDTH, rows);
#pragma GCC unroll 2
    for (int q = part; q < end && p < k; q++)
        add_products(sum[q], a, b, p + q * WIDTH, k - p - q * WIDTH, rows);
}

// c[i][j] for i < rows (1..ROWS), j < cols (1..COLS); sums of columns past `cols` are thrown away.
VEC_INLINE void tile(const struct dots *t, int i0, int j0, int rows, int cols)
{
    const float *a[ROWS], *b[COLS];
    vec sum[PARTS][ROWS * COLS] = {0};
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) a[i] = t->a + (i0 + i) * t->lda;
#pragma GCC unroll 4
    for (int j = 0; j < COLS; j++) b[j] = t->b + (j0 + (j < cols ? j : 0)) * t->ldb;
    // of more than one row, the registers of one part are all that the processor has
    const int together = rows == 1 ? PARTS : 1;
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part += together)
        add_terms(sum, a, b, t->k, rows, part, part + together);
#pragma GCC unroll 16
    for (int e = 0; e < rows * COLS && PARTS == 2; e++) sum[0][e] += sum[1][e];
    float result[WIDTH];
    vec folded = fold_all(sum[0], rows * COLS);
    memcpy(result, &folded, sizeof result);
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        float *c = t->c + (i0 + i) * t->ldc + j0;
        if (cols == COLS) {
            quad value = *(const quad *)(result + i * COLS);
            if (t->add) value = *(const quad *)c + value;
            if (t->bias) value += *(const quad *)(t->bias + j0);
            *(quad *)c = value;
            continue;
        }
        for (int j = 0; j < cols; j++) {
            float value = result[i * COLS + j];
            if (t->add) value = c[j] + value;
            if (t->bias) value += t->bias[j0 + j];
            c[j] = value;
        }
    }
}

// All rows of a block times COLS (or, at the edge, fewer) rows of B.
VEC_INLINE void column_tiles(const struct dots *t, int i0, int i1, int j0, int cols)
{
    int i = i0;
    for (; i + ROWS <= i1; i += ROWS) tile(t, i, j0, ROWS, cols);
    switch (i1 - i) {
    case 1:
        tile(t, i, j0, 1, cols);
        break;
    case 2:
        tile(t, i, j0, 2, cols);
        break;
    case 3:
        tile(t, i, j0, ROWS > 3 ? 3 : 1, cols);
        break; // only where ROWS is 4
    }
}

static void edge_tiles(const struct dots *t, int i0, int i1, int j0, int cols)
{
    column_tiles(t, i0, i1, j0, cols);
}

void cpu_dots(const struct dots *t, int i0, int i1, int j0, int j1)
{
    int j = j0;
    for (; j + COLS <= j1; j += COLS) column_tiles(t, i0, i1, j, COLS);
    if (j < j1) edge_tiles(t, i0, i1, j, j1 - j);
}

void cpu_widen_row(float *to, const uint8_t *codes, int8_t scale, int64_t n)
{
    const float factor = e4m3_factor(scale);
    float in_places[16];
    int64_t at = 0;
    for (; at + 16 <= n; at += 16) {
        for (int i = 0; i < 16; i++) in_places[i] = f32_from_e4m3(codes[at + i]) * factor;
        for (int i = 0; i < 16; i++) to[at + i] = in_places[e4m3_place(i, 16)];
    }
    for (; at < n; at++) to[at] = f32_from_e4m3(codes[at]) * factor;
}

// n numbers of a row in MXFP4 (common/base/mxfp4.h) from `first` on, which begins a block.
static void widen_mxfp4(float *to, const uint8_t *codes, const uint8_t *scales, int64_t first,
                        int64_t n)
{
    for (int64_t at = 0; at < n; at += MXFP4_BLOCK) {
        const float factor = mxfp4_factor(scales[(first + at) / MXFP4_BLOCK]);
        for (int64_t i = 0; i < MXFP4_BLOCK; i++)
            to[at + i] = mxfp4_code(codes, first + at + i) * factor;
    }
}

// n numbers of a row of w (.., cols) from `first` on: w has scales, or those of MXFP4.
static void widen_part(float *to, const uint8_t *w, const int8_t *scales, const uint8_t *mx_scales,
                       int64_t cols, int64_t row, int64_t first, int64_t n)
{
    if (mx_scales)
        widen_mxfp4(to, w + row * cols / 2, mx_scales + row * cols / MXFP4_BLOCK, first, n);
    else
        cpu_widen_row(to, w + row * cols + first, scales[row], n);
}

const float *cpu_widened(struct device *dev, const void *w, const int8_t *scales,
                         const uint8_t *mx_scales, int64_t rows, int64_t cols)
{
    if (!scales && !mx_scales) return w;
    float *wide = cpu_workspace(dev, (size_t)(rows * cols) * sizeof *wide);
    if (!wide) return NULL;
#pragma omp parallel for if (rows * cols > PARALLEL_WORK)
    for (int64_t r = 0; r < rows; r++)
        widen_part(wide + r * cols, w, scales, mx_scales, cols, r, 0, cols);
    return wide;
}

// C(m,n) = A(m,k) B(n,k)^T [+ C] [+ bias], A in f32. Of a B with scales a thread widens the chunk
// that it multiplies: rows of it CHUNK apart.
static void dot_product(float *c, const float *a, const void *b, const float *bias,
                        const struct matmul *s)
{
    const int m = s->m, n = s->n, k = s->k, chunk = s->a_scales || s->rounds ? E4M3_CHUNK : CHUNK;
    const bool coded = s->scales || s->mx_scales;
#pragma omp parallel for schedule(dynamic) if ((int64_t)m * n * k > PARALLEL_WORK * 8)
    for (int start = 0; start < n; start += COLUMNS) {
        const int cols = n - start < COLUMNS ? n - start : COLUMNS;
        float wide[COLUMNS * CHUNK];
        for (int p = 0; p == 0 || p < k; p += chunk) {
            const int64_t at = (int64_t)start * k + p;
            struct dots t = {.a = a + p, .c = c + start, .lda = k, .ldb = k, .ldc = n};
            t.k = k - p < chunk ? k - p : chunk;
            t.add = p > 0 || s->beta != 0;
            t.bias = bias && p + chunk >= k ? bias + start : NULL;
            t.b = coded ? wide : (const float *)b + at;
            if (coded) t.ldb = CHUNK;
            for (int j = 0; coded && j < cols; j++)
                widen_part(wide + j * CHUNK, b, s->scales, s->mx_scales, k, start + j, p, t.k);
            for (int i = 0; i < m; i += BLOCK)
                cpu_dots(&t, i, m - i < BLOCK ? m : i + BLOCK, 0, cols);
        }
    }
}

// A gradient that is rounded, times weights in e4m3 that lie across the sum: both are laid out
// anew, A with the powers of two of B's rows.
static void rounded_product(struct device *dev, float *c, const float *a, const uint8_t *b,
                            const struct matmul *s)
{
    const int64_t m = s->m, n = s->n, k = s->k;
    float *rows = cpu_workspace(dev, (size_t)((m + n) * k) * sizeof *rows), *along = rows + m * k;
    struct matmul wide = *s;
    wide.scales = NULL;
    if (!rows) return;
#pragma omp parallel for if (m * k > PARALLEL_WORK)
    for (int64_t i = 0; i < m; i++) {
        for (int64_t l = 0; l < k; l++) rows[i * k + l] = a[i * k + l] * e4m3_factor(s->scales[l]);
        cpu_round_row(rows + i * k, k, s->rounds);
    }
#pragma omp parallel for if (n * k > PARALLEL_WORK)
    for (int64_t start = 0; start < n; start += COLUMNS)
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = start; j < n && j < start + COLUMNS; j++)
                along[j * k + l] = f32_from_e4m3(b[l * n + e4m3_place(j, n)]);
    dot_product(c, rows, along, NULL, &wide);
}

// A rank's columns, put together with the others'.
static void matmul_columns(struct device *dev, const void *a, const void *b, const void *bias,
                           void *c, const struct matmul *shape)
{
    struct matmul own = *shape;
    const size_t width = (size_t)shape->n * sizeof(float), rows = (size_t)shape->m;
    own.columns = NULL;
    cpu_matmul(dev, (char *)shape->parts + (size_t)comm_rank(shape->columns) * rows * width, a, b,
               bias, &own);
    comm_gather_columns(shape->columns, c, shape->parts, rows, width);
}

// An ordinary one for each expert over its rows: with trans_b a row has the same bits whichever
// rows are the same expert's.
static void matmul_experts(struct device *dev, char *c, const char *a, const char *b,
                           const struct matmul *s)
{
    const size_t n = (size_t)s->n, row = (size_t)(s->trans_a ? s->m : s->k), f32 = sizeof(float);
    const size_t of_a = s->a_scales ? 1 : f32, matrix = row * n; // of_a: bytes of an element
    const size_t bytes = s->mx_scales ? matrix / 2 : s->scales ? matrix : matrix * f32;
    for (size_t e = 0; e < (size_t)s->n_experts; e++) {
        const size_t start = (size_t)s->offsets[e];
        struct matmul one = *s;
        one.offsets = NULL;
        *(s->trans_a ? &one.k : &one.m) = s->offsets[e + 1] - s->offsets[e];
        if (s->scales) one.scales += e * (s->trans_b ? n : row);
        if (s->mx_scales) one.mx_scales += e * (matrix / MXFP4_BLOCK);
        if (s->a_scales) one.a_scales += start;
        cpu_matmul(dev, c + (s->trans_a ? e * matrix : start * n) * f32, a + start * row * of_a,
                   b + (s->trans_a ? start * n * f32 : e * bytes), NULL, &one);
    }
}

static void matmul_act(struct device *dev, void *y, const void *a, const void *b, const void *bias,
                       const struct matmul *shape)
{
    struct matmul plain = *shape;
    plain.act = NULL;
    cpu_matmul(dev, shape->x, a, b, bias, &plain);
    cpu_act(dev, y, shape->x, shape->act);
}

static void matmul_blas(struct device *dev, float *c, const float *a, const void *b,
                        const float *bias, const struct matmul *s)
{
    const int rows = s->trans_b ? s->n : s->k, cols = s->trans_b ? s->k : s->n; // of B as stored
    const float *wide = cpu_widened(dev, b, s->scales, s->mx_scales, rows, cols);
    if (!wide) return;
    if (s->k > 0)
        cblas_sgemm(CblasRowMajor, s->trans_a ? CblasTrans : CblasNoTrans,
                    s->trans_b ? CblasTrans : CblasNoTrans, s->m, s->n, s->k, 1.0f, a,
                    s->trans_a ? s->m : s->k, wide, cols, s->beta, c, s->n);
    else if (s->beta == 0)
        memset(c, 0, (size_t)s->m * (size_t)s->n * sizeof(float));
    if (bias) cpu_add_bias(c, bias, s->m, s->n);
}

void cpu_matmul(struct device *dev, void *c, const void *a, const void *b, const void *bias,
                const struct matmul *s)
{
    if (!cpu_is_f32(dev, "matmul", s->in) || !cpu_is_f32(dev, "matmul", s->out)) return;
    if (s->m <= 0 || s->n <= 0) return;
    if (s->act)
        matmul_act(dev, c, a, b, bias, s);
    else if (s->offsets)
        matmul_experts(dev, c, a, b, s);
    else if (s->columns)
        matmul_columns(dev, a, b, bias, c, s);
    else if (s->rounds)
        rounded_product(dev, c, a, b, s);
    else if (s->trans_a || !s->trans_b)
        matmul_blas(dev, c, a, b, bias, s);
    else if ((a = cpu_widened(dev, a, s->a_scales, NULL, s->m, s->k)))
        dot_product(c, a, b, bias, s);
}
