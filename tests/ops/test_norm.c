/* test_norm.c: norms over rows and their gradients. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

// p: kind tokens width heads bias gap(elements between heads' end and the next token) add in_place
// without(weights) own(weights of each head)

static struct norm_shape norm_shape_of(const int *p)
{
    return (struct norm_shape){.kind = (enum norm_kind)p[0],
                               .rows = p[1] * p[3],
                               .width = p[2],
                               .heads = p[3],
                               .stride = (int64_t)p[2] * p[3] + p[5],
                               .eps = 1e-5f,
                               .own_weights = p[9]};
}

// Elements of w, and where those of row r begin.
static int weights_of(const struct norm_shape *s)
{
    return s->own_weights ? s->heads * s->width : s->width;
}

static int own_weights(const struct norm_shape *s, int r)
{
    return s->own_weights ? r % s->heads * s->width : 0;
}

static int64_t norm_at(const struct norm_shape *s, int r)
{
    return r / s->heads * s->stride + (int64_t)(r % s->heads) * s->width;
}

// y = norm(x) in double; rstd and mean where not NULL
static void norm_formula(const struct norm_shape *s, double *y, double *rstd, double *mean,
                         const double *x, const double *w, const double *b)
{
    for (int r = 0; r < s->rows; r++) {
        const double *in = x + norm_at(s, r);
        double m = 0, squares = 0;
        if (s->kind == NORM_LAYER) {
            for (int c = 0; c < s->width; c++) m += in[c];
            m /= s->width;
        }
        for (int c = 0; c < s->width; c++) squares += (in[c] - m) * (in[c] - m);
        double factor = 1 / sqrt(squares / s->width + s->eps);
        for (int c = 0; c < s->width; c++)
            y[norm_at(s, r) + c] =
                (in[c] - m) * factor *
                    ((w ? w[own_weights(s, r) + c] : 1) + (s->kind == NORM_RMS_PLUS_ONE)) +
                (b ? b[c] : 0);
        if (rstd)
            rstd[s->own_weights ? r % s->heads * (s->rows / s->heads) + r / s->heads : r] = factor;
        if (mean) mean[r] = m;
    }
}

static void norm_setup(struct op_test *t)
{
    struct norm_shape s = norm_shape_of(t->p);
    int64_t n = t->p[1] * s.stride;
    if (t->p[7]) {
        floats(t, "x, y", INOUT, DATA, n, 2);
    } else {
        floats(t, "y", OUT, DATA, n, 1);
    }
    floats(t, "rstd", OUT, F32, s.rows, 1);
    floats(t, "mean", s.kind == NORM_LAYER ? OUT : IN, F32, s.rows, 1);
    floats(t, "x", IN, DATA, n, 2);
    floats(t, "w", IN, DATA, weights_of(&s), 1);
    floats(t, "b", IN, DATA, s.width, 1);
}

static void norm_launch(struct op_test *t, void **d)
{
    struct norm_shape s = norm_shape_of(t->p);
    s.dt = dt;
    const struct norm_args args = {.x = t->p[7] ? d[0] : d[3],
                                   .w = t->p[8] ? NULL : d[4],
                                   .b = t->p[4] ? d[5] : NULL,
                                   .rstd = d[1],
                                   .mean = s.kind == NORM_LAYER ? d[2] : NULL};
    ops->norm(dev, d[0], &args, &s);
}

static void norm_reference(struct op_test *t, double **v)
{
    struct norm_shape s = norm_shape_of(t->p);
    norm_formula(&s, t->a[0].expect, t->a[1].expect, t->a[2].expect, v[t->p[7] ? 0 : 3],
                 t->p[8] ? NULL : v[4], t->p[4] ? v[5] : NULL);
}

OP(norm, "norm");

enum { NB_DX, NB_DW, NB_DB, NB_DY, NB_X, NB_W, NB_B, NB_RSTD, NB_MEAN };

static void norm_back_setup(struct op_test *t)
{
    struct norm_shape s = norm_shape_of(t->p);
    int64_t n = t->p[1] * s.stride;
    floats(t, "dx", t->p[6] || t->p[7] ? INOUT : OUT, DATA, n, 1);
    floats(t, "dw", t->p[8] ? IN : INOUT, F32, weights_of(&s), 1);
    floats(t, "db", t->p[4] ? INOUT : IN, F32, s.width, 1);
    floats(t, "dy", IN, DATA, n, 1);
    float *x = floats(t, "x", IN, DATA, n, 2);
    float *w = floats(t, "w", IN, DATA, weights_of(&s), 1);
    floats(t, "b", IN, DATA, s.width, 1);
    float *rstd = floats(t, "rstd", IN, F32, s.rows, 1);
    float *mean = floats(t, "mean", IN, F32, s.rows, 1);
    double *xd = op_host((size_t)n * 8), *wd = op_host((size_t)weights_of(&s) * 8);
    double *y = op_host((size_t)n * 8), *r = op_host((size_t)s.rows * 16);
    for (int64_t i = 0; i < n; i++) xd[i] = x[i];
    for (int i = 0; i < weights_of(&s); i++) wd[i] = w[i];
    norm_formula(&s, y, r, r + s.rows, xd, t->p[8] ? NULL : wd, NULL);
    for (int i = 0; i < s.rows; i++) {
        rstd[i] = (float)r[i];
        mean[i] = (float)r[s.rows + i];
    }
}

static void norm_back_launch(struct op_test *t, void **d)
{
    struct norm_shape s = norm_shape_of(t->p);
    const struct norm_args args = {.x = d[NB_X],
                                   .w = t->p[8] ? NULL : d[NB_W],
                                   .rstd = d[NB_RSTD],
                                   .mean = s.kind == NORM_LAYER ? d[NB_MEAN] : NULL};
    s.dt = dt;
    ops->norm_back(dev, d[NB_DX], t->p[8] ? NULL : d[NB_DW], t->p[4] ? d[NB_DB] : NULL,
                   t->p[7] ? d[NB_DX] : d[NB_DY], &args, &s, t->p[6]);
}

static double norm_loss(struct op_test *t, double **v)
{
    struct norm_shape s = norm_shape_of(t->p);
    const double *dy = v[t->p[7] ? NB_DX : NB_DY];
    double *y = op_host((size_t)t->a[NB_X].n * 8), loss = 0;
    norm_formula(&s, y, NULL, NULL, v[NB_X], t->p[8] ? NULL : v[NB_W], t->p[4] ? v[NB_B] : NULL);
    for (int r = 0; r < s.rows; r++)
        for (int c = 0; c < s.width; c++) loss += dy[norm_at(&s, r) + c] * y[norm_at(&s, r) + c];
    return loss;
}

static void norm_back_reference(struct op_test *t, double **v)
{
    struct norm_shape s = norm_shape_of(t->p);
    differentiate(t, v, NB_DX, NB_X, t->p[6], norm_loss);
    for (int64_t i = 0; i < t->a[NB_DX].n; i++) // gaps between rows are nobody's
        if (i % s.stride >= (int64_t)s.width * s.heads) t->a[NB_DX].expect[i] = NAN;
    if (!t->p[8]) differentiate(t, v, NB_DW, NB_W, true, norm_loss);
    if (t->p[4]) differentiate(t, v, NB_DB, NB_B, true, norm_loss);
}

OP(norm_back, "norm_back");

static const struct op_case cases[] = {
    {&op_norm, "rms 5 x 7", {NORM_RMS, 5, 7, 1, 0, 0, 0, 0}, false},
    {&op_norm, "rms 67 x 1536", {NORM_RMS, 67, 1536, 1, 0, 0, 0, 0}, false},
    {&op_norm, "rms in place 33 x 896", {NORM_RMS, 33, 896, 1, 0, 0, 0, 1}, false},
    {&op_norm, "rms heads 9 x 6 x 64", {NORM_RMS, 9, 64, 6, 0, 128, 0, 0}, false},
    {&op_norm, "rms heads in place 9 x 3 x 128", {NORM_RMS, 9, 128, 3, 0, 64, 0, 1}, false},
    {&op_norm, "rms own heads 9 x 3 x 100", {NORM_RMS, 9, 100, 3, 0, 0, 0, 0, 0, 1}, false},
    {&op_norm, "rms own heads 9 x 8 x 64", {NORM_RMS, 9, 64, 8, 0, 0, 0, 0, 0, 1}, false},
    {&op_norm, "rms+1 11 x 100", {NORM_RMS_PLUS_ONE, 11, 100, 1, 0, 0, 0, 0}, false},
    {&op_norm, "layer 13 x 97 bias", {NORM_LAYER, 13, 97, 1, 1, 0, 0, 0}, false},
    {&op_norm, "rms heads 9 x 2 x 24 no weights", {NORM_RMS, 9, 24, 2, 0, 96, 0, 1, 1}, false},
    {&op_norm, "layer 13 x 1024", {NORM_LAYER, 13, 1024, 1, 0, 0, 0, 0}, false},
    {&op_norm, "rms 2048 x 5001", {NORM_RMS, 2048, 5001, 1, 0, 0, 0, 0}, true},
    {&op_norm_back, "rms 5 x 7", {NORM_RMS, 5, 7, 1, 0, 0, 0, 0}, false},
    {&op_norm_back, "rms add 37 x 96", {NORM_RMS, 37, 96, 1, 0, 0, 1, 0}, false},
    {&op_norm_back, "rms in place 6 x 130", {NORM_RMS, 6, 130, 1, 0, 0, 0, 1}, false},
    {&op_norm_back, "rms heads in place 4 x 5 x 64", {NORM_RMS, 4, 64, 5, 0, 96, 0, 1}, false},
    {&op_norm_back, "rms own heads 4 x 3 x 20", {NORM_RMS, 4, 20, 3, 0, 0, 0, 1, 0, 1}, false},
    {&op_norm_back, "rms own heads add 5 x 2 x 16", {NORM_RMS, 5, 16, 2, 0, 0, 1, 0, 0, 1}, false},
    {&op_norm_back, "rms+1 7 x 40", {NORM_RMS_PLUS_ONE, 7, 40, 1, 0, 0, 0, 0}, false},
    {&op_norm_back, "layer 7 x 33 bias", {NORM_LAYER, 7, 33, 1, 1, 0, 0, 0}, false},
    {&op_norm_back, "rms heads 9 x 2 x 24 no weights", {NORM_RMS, 9, 24, 2, 0, 96, 0, 1, 1}, false},
    {&op_norm_back, "layer add 9 x 64", {NORM_LAYER, 9, 64, 1, 0, 0, 1, 0}, false},
    {&op_norm_back, "rms 515 x 1536", {NORM_RMS, 515, 1536, 1, 0, 0, 0, 0}, true},
    {&op_norm_back, "rms heads 700 x 12 x 128", {NORM_RMS, 700, 128, 12, 0, 512, 0, 1}, true},
};

OP_TESTS(cases)
