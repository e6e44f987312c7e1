/* test_experts.c: the matmuls and biases of a mixture's experts over their sorted rows, and their
 * gradients: of every width, and with numbers of rows on and beside the borders of tiles. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

// Matmuls: p: m n k n_experts pattern trans_b out_f32

// Which experts have rows; GAPS: every second; BORDERS: as many as `borders` says.
enum rows { SPREAD, FIRST, LAST, GAPS, UNEVEN, BORDERS };
enum { N_BORDERS = 8, BORDER_ROWS = 577 }; // BORDER_ROWS: their sum
static const int borders[N_BORDERS] = {65, 0, 1, 129, 63, 64, 127, 128};

static void fill_borders(int32_t *offsets, int m, int n_experts)
{
    for (int e = 0; e < n_experts; e++) offsets[e + 1] = offsets[e] + borders[e % N_BORDERS];
    assert_int_equal(offsets[n_experts], m);
}

static void fill_offsets(struct op_test *t, int32_t *offsets, int m, int n_experts,
                         enum rows pattern)
{
    if (pattern == BORDERS) {
        fill_borders(offsets, m, n_experts);
        return;
    }
    for (int r = 0; r < m; r++) {
        int e = (int)rng_below(&t->rng, (uint32_t)n_experts);
        if (pattern == FIRST) e = 0;
        if (pattern == LAST) e = n_experts - 1;
        if (pattern == GAPS) e = e / 2 * 2;
        if (pattern == UNEVEN && rng_below(&t->rng, 4) > 0) e = n_experts / 2;
        offsets[e + 1]++;
    }
    for (int e = 0; e < n_experts; e++) offsets[e + 1] += offsets[e];
}

enum { EX_C, EX_A, EX_B, EX_OFFSETS };

static void experts_setup(struct op_test *t)
{
    floats(t, "c", OUT, t->p[6] ? F32 : DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "a", IN, DATA, (int64_t)t->p[0] * t->p[2], 1);
    floats(t, "b", IN, DATA, (int64_t)t->p[3] * t->p[1] * t->p[2], 1);
    fill_offsets(t, ints(t, "offsets", t->p[3] + 1), t->p[0], t->p[3], (enum rows)t->p[4]);
}

static void experts_launch(struct op_test *t, void **d)
{
    const struct matmul shape = {.m = t->p[0],
                                 .n = t->p[1],
                                 .k = t->p[2],
                                 .trans_b = t->p[5],
                                 .in = dt,
                                 .out = t->p[6] ? DT_F32 : dt,
                                 .offsets = d[EX_OFFSETS],
                                 .n_experts = t->p[3]};
    ops->matmul(dev, d[EX_C], d[EX_A], d[EX_B], NULL, &shape);
}

// Entry (i, j) of expert e's product.
static double expert_dot(const double *a, const double *b, int n, int k, bool trans_b, int e, int i,
                         int j)
{
    double sum = 0;
    b += (int64_t)e * n * k;
    for (int l = 0; l < k; l++)
        sum += a[(int64_t)i * k + l] * b[trans_b ? (int64_t)j * k + l : (int64_t)l * n + j];
    return sum;
}

static void experts_reference(struct op_test *t, double **v)
{
    const int *p = t->p, n = p[1];
    const int32_t *offsets = t->a[EX_OFFSETS].i;
    for (int e = 0; e < p[3]; e++)
        for (int i = offsets[e]; i < offsets[e + 1]; i++)
            for (int j = 0; j < n; j++)
                t->a[EX_C].expect[(int64_t)i * n + j] =
                    expert_dot(v[EX_A], v[EX_B], n, p[2], p[5], e, i, j);
}

OP(experts, "matmul of experts");

// Gradients of their weights: p: m n k n_experts pattern. The loss is the sum of dy * (x . w^T).

enum { XB_DW, XB_DY, XB_X, XB_OFFSETS, XB_W };

static void experts_back_setup(struct op_test *t)
{
    int64_t n_weights = (int64_t)t->p[3] * t->p[1] * t->p[2];
    floats(t, "dw", INOUT, F32, n_weights, 1);
    floats(t, "dy", IN, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "x", IN, DATA, (int64_t)t->p[0] * t->p[2], 1);
    fill_offsets(t, ints(t, "offsets", t->p[3] + 1), t->p[0], t->p[3], (enum rows)t->p[4]);
    floats(t, "w", IN, F32, n_weights, 1);
}

static struct matmul back_shape(int m, int n, int k, const int32_t *offsets, int n_experts)
{
    return (struct matmul){.m = n,
                           .n = k,
                           .k = m,
                           .trans_a = true,
                           .beta = 1,
                           .in = dt,
                           .out = DT_F32,
                           .offsets = offsets,
                           .n_experts = n_experts};
}

static void experts_back_launch(struct op_test *t, void **d)
{
    const struct matmul shape = back_shape(t->p[0], t->p[1], t->p[2], d[XB_OFFSETS], t->p[3]);
    ops->matmul(dev, d[XB_DW], d[XB_DY], d[XB_X], NULL, &shape);
}

static double experts_loss(struct op_test *t, double **v)
{
    const int *p = t->p, n = p[1];
    const int32_t *offsets = t->a[XB_OFFSETS].i;
    double loss = 0;
    for (int e = 0; e < p[3]; e++)
        for (int i = offsets[e]; i < offsets[e + 1]; i++)
            for (int j = 0; j < n; j++)
                loss += v[XB_DY][(int64_t)i * n + j] *
                        expert_dot(v[XB_X], v[XB_W], n, p[2], true, e, i, j);
    return loss;
}

OP_BACK(experts_back, "matmul of experts, back", experts_loss);

// experts_bias: p: rows width n_experts pattern

enum { BI_Y, BI_BIAS, BI_OFFSETS };

static void bias_setup(struct op_test *t)
{
    floats(t, "y", INOUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "bias", IN, DATA, (int64_t)t->p[2] * t->p[1], 1);
    fill_offsets(t, ints(t, "offsets", t->p[2] + 1), t->p[0], t->p[2], (enum rows)t->p[3]);
}

static struct expert_rows bias_shape(const struct op_test *t)
{
    return (struct expert_rows){t->p[0], t->p[2], t->p[1], dt};
}

static void bias_launch(struct op_test *t, void **d)
{
    const struct expert_rows shape = bias_shape(t);
    ops->experts_bias(dev, d[BI_Y], d[BI_BIAS], d[BI_OFFSETS], &shape);
}

static void bias_reference(struct op_test *t, double **v)
{
    const int *p = t->p, width = p[1];
    const int32_t *offsets = t->a[BI_OFFSETS].i;
    for (int e = 0; e < p[2]; e++)
        for (int64_t i = (int64_t)offsets[e] * width; i < (int64_t)offsets[e + 1] * width; i++)
            t->a[BI_Y].expect[i] = v[BI_Y][i] + v[BI_BIAS][e * width + i % width];
}

OP(bias, "experts_bias");

// column_sum of experts: p as above. The loss is the sum of dy * (y + bias).

enum { BB_DBIAS, BB_DY, BB_OFFSETS, BB_BIAS };

static void bias_back_setup(struct op_test *t)
{
    floats(t, "dbias", INOUT, F32, (int64_t)t->p[2] * t->p[1], 1);
    floats(t, "dy", IN, DATA, (int64_t)t->p[0] * t->p[1], 1);
    fill_offsets(t, ints(t, "offsets", t->p[2] + 1), t->p[0], t->p[2], (enum rows)t->p[3]);
    floats(t, "bias", IN, F32, (int64_t)t->p[2] * t->p[1], 1);
}

static void bias_back_launch(struct op_test *t, void **d)
{
    const struct expert_rows shape = bias_shape(t);
    ops->column_sum(dev, d[BB_DBIAS], d[BB_DY], d[BB_OFFSETS], &shape);
}

static double bias_loss(struct op_test *t, double **v)
{
    const int *p = t->p, width = p[1];
    const int32_t *offsets = t->a[BB_OFFSETS].i;
    double loss = 0;
    for (int e = 0; e < p[2]; e++)
        for (int64_t i = (int64_t)offsets[e] * width; i < (int64_t)offsets[e + 1] * width; i++)
            loss += v[BB_DY][i] * v[BB_BIAS][e * width + i % width];
    return loss;
}

OP_BACK(bias_back, "column_sum", bias_loss);

static const struct op_case cases[] = {
    {&op_bias, "1 row of 7, 3 experts", {1, 7, 3, SPREAD}, false},
    {&op_bias, "40 rows of 64, 8 experts gaps", {40, 64, 8, GAPS}, false},
    {&op_bias, "33 rows of 130, 5 experts last", {33, 130, 5, LAST}, false},
    {&op_bias, "2000 rows of 5760, 128 experts", {2000, 5760, 128, SPREAD}, true},
    {&op_bias_back, "9 rows of 7, 3 experts", {9, 7, 3, SPREAD}, false},
    {&op_bias_back, "40 rows of 64, 8 experts gaps", {40, 64, 8, GAPS}, false},
    {&op_bias_back, "33 rows of 130, 5 experts first", {33, 130, 5, FIRST}, false},
    {&op_bias_back, "2000 rows of 2880, 32 experts", {2000, 2880, 32, UNEVEN}, true},
    {&op_experts, "m1 n7 k5 e3", {1, 7, 5, 3, SPREAD, 1, 0}, false},
    {&op_experts, "m2 n130 k64 e8", {2, 130, 64, 8, SPREAD, 1, 0}, false},
    {&op_experts, "m9 n48 k96 e4 first out_f32", {9, 48, 96, 4, FIRST, 1, 1}, false},
    {&op_experts, "m16 n40 k32 e8 last", {16, 40, 32, 8, LAST, 1, 0}, false},
    {&op_experts, "m60 n72 k160 e8 gaps", {60, 72, 160, 8, GAPS, 1, 0}, false},
    {&op_experts, "m60 n72 k160 e8 uneven out_f32", {60, 72, 160, 8, UNEVEN, 1, 1}, false},
    {&op_experts, "m37 n53 k71 e6 gaps", {37, 53, 71, 6, GAPS, 1, 0}, false},
    {&op_experts, "m100 n136 k40 e3 uneven", {100, 136, 40, 3, UNEVEN, 1, 0}, false},
    {&op_experts, "m300 n264 k72 e2 last out_f32", {300, 264, 72, 2, LAST, 1, 1}, false},
    {&op_experts, "m200 n64 k48 e40", {200, 64, 48, 40, SPREAD, 1, 0}, false},
    {&op_experts, "m400 n24 k24 e70 gaps", {400, 24, 24, 70, GAPS, 1, 0}, false},
    {&op_experts, "m1 n5 k7 e3 NN", {1, 5, 7, 3, SPREAD, 0, 0}, false},
    {&op_experts, "m37 n53 k71 e6 NN first", {37, 53, 71, 6, FIRST, 0, 0}, false},
    {&op_experts, "m60 n72 k160 e8 NN gaps", {60, 72, 160, 8, GAPS, 0, 0}, false},
    {&op_experts, "m300 n136 k104 e4 NN uneven out_f32", {300, 136, 104, 4, UNEVEN, 0, 1}, false},
    {&op_experts, "m32 n8192 k1024 e8", {32, 8192, 1024, 8, SPREAD, 1, 0}, true},
    {&op_experts, "m6 n1024 k4096 e6", {6, 1024, 4096, 6, UNEVEN, 1, 0}, true},
    {&op_experts, "m60 n1000 k4096 e8", {60, 1000, 4096, 8, UNEVEN, 1, 0}, true},
    {&op_experts, "m1999 n1160 k1032 e8", {1999, 1160, 1032, 8, UNEVEN, 1, 0}, true},
    {&op_experts, "m1999 n1160 k1032 e8 NN", {1999, 1160, 1032, 8, GAPS, 0, 0}, true},
    {&op_experts, "m577 n264 k72 e8 borders", {BORDER_ROWS, 264, 72, 8, BORDERS, 1, 0}, false},
    {&op_experts, "m577 n72 k200 e8 NN borders", {BORDER_ROWS, 72, 200, 8, BORDERS, 0, 0}, false},
    {&op_experts,
     "m577 n136 k40 e8 borders out_f32",
     {BORDER_ROWS, 136, 40, 8, BORDERS, 1, 1},
     false},
    {&op_experts,
     "m577 n520 k328 e8 NN borders out_f32",
     {BORDER_ROWS, 520, 328, 8, BORDERS, 0, 1},
     true},
    {&op_experts, "m8 n200 k320 e128", {8, 200, 320, 128, SPREAD, 1, 0}, true},
    {&op_experts, "m512 n264 k128 e128 out_f32", {512, 264, 128, 128, SPREAD, 1, 1}, true},
    {&op_experts, "m2048 n200 k320 e128 uneven", {2048, 200, 320, 128, UNEVEN, 1, 0}, true},
    {&op_experts, "m9000 n200 k320 e128", {9000, 200, 320, 128, SPREAD, 1, 0}, true},
    {&op_experts, "m9000 n320 k200 e128 NN", {9000, 320, 200, 128, UNEVEN, 0, 0}, true},
    {&op_experts_back, "m577 n264 k72 e8 borders", {BORDER_ROWS, 264, 72, 8, BORDERS}, true},
    {&op_experts_back, "m577 n200 k520 e8 borders", {BORDER_ROWS, 200, 520, 8, BORDERS}, true},
    {&op_experts_back, "m3000 n200 k328 e128", {3000, 200, 328, 128, SPREAD}, true},
    {&op_experts_back, "m5 n3 k4 e2", {5, 3, 4, 2, SPREAD}, false},
    {&op_experts_back, "m37 n17 k13 e6 gaps", {37, 17, 13, 6, GAPS}, false},
    {&op_experts_back, "m40 n24 k40 e4 last", {40, 24, 40, 4, LAST}, false},
    {&op_experts_back, "m70 n40 k16 e3 uneven", {70, 40, 16, 3, UNEVEN}, false},
    {&op_experts_back, "m1999 n1160 k1032 e8", {1999, 1160, 1032, 8, UNEVEN}, true},
    {&op_experts_back, "m300 n517 k333 e6", {300, 517, 333, 6, GAPS}, true},
};

// With an act it has the bits of the matmul and act, the matmul's result being kept or not.
static void check_act(int m, int inner, int k, bool gated, enum act_kind kind)
{
    enum { EXPERTS = 6 };
    const int n = gated ? 2 * inner : inner;
    struct matmul shape = {.m = m, .n = n, .k = k, .trans_b = true, .in = dt, .out = dt};
    const struct act_shape act = {.rows = m,
                                  .width = inner,
                                  .kind = kind,
                                  .gated = gated,
                                  .dt = dt,
                                  .alpha = 1.702f,
                                  .limit = 1.3f};
    size_t x_bytes = (size_t)m * (size_t)n * dtype_size(dt), bytes = x_bytes / (gated ? 2 : 1);
    int32_t host[EXPERTS + 1] = {0, m / 3, m / 3, m / 2, m - 1, m, m};
    void *a = normal_on_device(dt, (size_t)m * (size_t)k, 0.125f, 1);
    void *b = normal_on_device(dt, EXPERTS * (size_t)n * (size_t)k, 0.125f, 2);
    int32_t *offsets = to_device(host, sizeof host);
    void *x = to_device(NULL, x_bytes), *kept = to_device(NULL, x_bytes);
    void *y = to_device(NULL, bytes), *other = to_device(NULL, bytes);
    shape.offsets = offsets;
    shape.n_experts = EXPERTS;
    ops->matmul(dev, x, a, b, NULL, &shape);
    ops->act(dev, y, x, &act);
    shape.act = &act;
    shape.x = kept;
    shape.keep = true;
    ops->matmul(dev, other, a, b, NULL, &shape);
    assert_same_bytes("matmul of experts and act", other, y, bytes);
    assert_same_bytes("matmul of experts before act", kept, x, x_bytes);
    device_fill(dev, other, 0x7b, bytes);
    shape.keep = false;
    ops->matmul(dev, other, a, b, NULL, &shape);
    assert_same_bytes("matmul of experts and act", other, y, bytes);
}

ON_EACH_DTYPE(experts_act)
{
    static const int rows[] = {1, 8, 17, 40, 64, 130, 600};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        check_act(rows[i], 96, 128, true, ACT_SILU);
        check_act(rows[i], 100, 192, true, ACT_GELU_TANH);
    }
    check_act(40, 37, 72, true, ACT_SILU);
    check_act(40, 64, 64, true, ACT_CLAMPED);
    check_act(40, 64, 64, false, ACT_GELU);
}

// Calls for some neighbouring experts at a time give together what one for all of them gives, as
// ranks that hold some each need it.
static void check_some(int m, int n, int k)
{
    enum { EXPERTS = 6 };
    static const int firsts[] = {0, 2, 3, EXPERTS};
    const size_t e = dtype_size(dt), matrix = (size_t)n * (size_t)k, y_bytes = (size_t)(m * n) * e;
    const size_t dw_bytes = EXPERTS * matrix * sizeof(float), db = EXPERTS * (size_t)n;
    int32_t host[EXPERTS + 1] = {0, m / 3, m / 3, m / 2, m - 1, m, m};
    struct matmul shape = {.m = m, .n = n, .k = k, .trans_b = true, .in = dt, .out = dt};
    char *a = normal_on_device(dt, (size_t)(m * k), 0.125f, 1);
    char *b = normal_on_device(dt, EXPERTS * matrix, 0.125f, 2);
    char *bias = normal_on_device(dt, db, 1, 3);
    int32_t *offsets = to_device(host, sizeof host);
    void *y[2];
    float *dw[2], *dbias[2];
    for (int i = 0; i < 2; i++) { // all at once, some at a time
        y[i] = to_device(NULL, y_bytes);
        dw[i] = to_device(NULL, dw_bytes);
        dbias[i] = to_device(NULL, db * sizeof(float));
        device_fill(dev, dw[i], 0, dw_bytes);
        device_fill(dev, dbias[i], 0, db * sizeof(float));
        for (int part = 0; part < (i ? 3 : 1); part++) {
            const size_t first = i ? (size_t)firsts[part] : 0;
            const int own = i ? firsts[part + 1] - firsts[part] : EXPERTS;
            const struct expert_rows rows = {m, own, n, dt};
            shape.offsets = offsets + first;
            shape.n_experts = own;
            ops->matmul(dev, y[i], a, b + first * matrix * e, NULL, &shape);
            ops->experts_bias(dev, y[i], bias + first * (size_t)n * e, offsets + first, &rows);
            const struct matmul back = back_shape(m, n, k, offsets + first, own);
            ops->matmul(dev, dw[i] + first * matrix, y[i], a, NULL, &back);
            ops->column_sum(dev, dbias[i] + first * (size_t)n, y[i], offsets + first, &rows);
        }
    }
    assert_same_bytes("some experts", y[1], y[0], y_bytes);
    assert_same_bytes("gradients of some experts", dw[1], dw[0], dw_bytes);
    assert_same_bytes("gradients of their biases", dbias[1], dbias[0], db * sizeof(float));
}

ON_EACH_DTYPE(some_experts)
{
    static const int rows[] = {3, 17, 64, 130, 600};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        check_some(rows[i], 96, 128);
        check_some(rows[i], 37, 72);
    }
}

OP_TESTS(cases)
