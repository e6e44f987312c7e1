/* test_ops.c: every operation of kernels/ops.h, driven by one table. A case is an operation and a
 * shape; for each, with fresh random inputs and outputs poisoned with NaN:
 *   reference  the CPU against a plain double-precision version written here. Gradients are held
 *              against central differences of the double-precision forward formula.
 *   cuda f32   CUDA against the CPU on the same inputs.
 *   cuda bf16  the same, inputs rounded to bf16 first and the CPU run on the rounded values.
 * Errors are relative to the largest entry of the array. Memory behind every array is guarded.
 *
 *   test_ops [--device cuda:N] [FILTER]     FILTER: operations whose name contains it */
#include "common/base/rng.h"
#include "kernels/moments.h"
#include "kernels/ops.h"
#include "tests/support/sampling.h"
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { MAX_ARRAYS = 16, GUARD = 256, FD_SAMPLES = 96 };

// f32 sums of up to some thousand terms; bf16 keeps 8 bits, so one rounding is up to 0.4%.
#define TOLERANCE_F32  1e-5
#define TOLERANCE_BF16 1e-2
// central differences in double are good to about 1e-8; what is left is the operation's f32
#define TOLERANCE_REFERENCE 1e-5

enum role { IN, OUT, INOUT };
enum kind { DATA, F32, F64, I32 }; // DATA: f32 here, the case's dtype on the device

struct array {
    const char *name;
    enum role role;
    enum kind kind;
    int64_t n;
    float *f;       // DATA, F32: values before the run
    int32_t *i;     // I32
    double *expect; // outputs; NaN: not compared
};

struct test {
    const struct op_case *c;
    struct array a[MAX_ARRAYS];
    int n_arrays;
    struct rng rng;
    struct batch_view batch; // host numbers; pointers are set from the arrays at launch
    enum dtype dt;
};

struct op_def {
    const char *name;
    void (*setup)(struct test *);
    void (*launch)(struct test *, struct device *, const struct ops *, void **d);
    void (*reference)(struct test *, double **v); // v: inputs in double; fills expect
};

struct op_case {
    const struct op_def *op;
    const char *shape;
    int p[9];
    bool big; // too large for the double-precision reference; CUDA against CPU only
};

static struct device *cpu, *cuda;

// ---- arrays ------------------------------------------------------------------------------------

static void *must(void *p)
{
    if (!p) {
        fprintf(stderr, "test_ops: out of memory\n");
        exit(1);
    }
    return p;
}

static struct array *array_new(struct test *t, const char *name, enum role role, enum kind kind,
                               int64_t n)
{
    assert_true(t->n_arrays < MAX_ARRAYS);
    struct array *a = &t->a[t->n_arrays++];
    *a = (struct array){.name = name, .role = role, .kind = kind, .n = n};
    if (kind == I32)
        a->i = must(calloc((size_t)n + 1, sizeof *a->i));
    else
        a->f = must(calloc((size_t)n + 1, sizeof *a->f));
    if (role != IN) {
        a->expect = must(calloc((size_t)n + 1, sizeof *a->expect));
        for (int64_t i = 0; i < n; i++) a->expect[i] = NAN;
    }
    return a;
}

static float *floats(struct test *t, const char *name, enum role role, enum kind kind, int64_t n,
                     float scale)
{
    struct array *a = array_new(t, name, role, kind, n);
    if (role != OUT)
        for (int64_t i = 0; i < n; i++) a->f[i] = scale * rng_normal(&t->rng);
    return a->f;
}

static int32_t *ints(struct test *t, const char *name, int64_t n)
{
    return array_new(t, name, IN, I32, n)->i;
}

static void round_to_bf16(struct test *t)
{
    for (int k = 0; k < t->n_arrays; k++)
        if (t->a[k].kind == DATA)
            for (int64_t i = 0; i < t->a[k].n; i++)
                t->a[k].f[i] = f32_from_bf16(bf16_from_f32(t->a[k].f[i]));
}

static void test_release(struct test *t)
{
    for (int k = 0; k < t->n_arrays; k++) {
        free(t->a[k].f);
        free(t->a[k].i);
        free(t->a[k].expect);
    }
}

static size_t element_size(const struct array *a, enum dtype dt)
{
    if (a->kind == F64) return 8;
    return a->kind == DATA ? dtype_size(dt) : 4;
}

static void sync_or_fail(struct device *dev)
{
    if (device_sync(dev) != ST_OK) fail_msg("%s", status_message());
}

// Runs the case on `dev` in `dt`; results[k] (double, caller frees) for every output. False after a
// printed complaint.
static bool run_on(struct test *t, struct device *dev, enum dtype dt, double **results)
{
    void *d[MAX_ARRAYS] = {0};
    bool good = true;
    for (int k = 0; k < t->n_arrays; k++) {
        const struct array *a = &t->a[k];
        size_t size = element_size(a, dt), bytes = (size_t)a->n * size;
        if (device_alloc(dev, bytes + GUARD, &d[k]) != ST_OK) fail_msg("%s", status_message());
        device_fill(dev, d[k], 0xFF, bytes + GUARD);
        if (a->role == OUT) continue;
        if (a->kind == DATA && dt == DT_BF16) {
            uint16_t *half = must(malloc(bytes + 1));
            for (int64_t i = 0; i < a->n; i++) half[i] = bf16_from_f32(a->f[i]);
            device_copy_in(dev, d[k], half, bytes);
            sync_or_fail(dev);
            free(half);
        } else {
            device_copy_in(dev, d[k], a->kind == I32 ? (void *)a->i : (void *)a->f, bytes);
        }
    }
    t->dt = dt;
    t->c->op->launch(t, dev, device_ops(dev), d);
    if (device_sync(dev) != ST_OK) {
        printf("FAIL %s %s: %s\n", t->c->op->name, t->c->shape, status_message());
        good = false;
    }
    for (int k = 0; k < t->n_arrays; k++) {
        const struct array *a = &t->a[k];
        size_t size = element_size(a, dt), bytes = (size_t)a->n * size;
        unsigned char *host = must(malloc(bytes + GUARD));
        device_copy_out(dev, host, d[k], bytes + GUARD);
        sync_or_fail(dev);
        for (int g = 0; g < GUARD && good; g++)
            if (host[bytes + g] != 0xFF) {
                printf("FAIL %s %s %s on %s: %s: wrote past the end of the array\n", t->c->op->name,
                       t->c->shape, dtype_name(dt), device_spec(dev), a->name);
                good = false;
            }
        if (a->role != IN) {
            results[k] = must(malloc(((size_t)a->n + 1) * sizeof(double)));
            for (int64_t i = 0; i < a->n; i++) {
                if (a->kind == F64)
                    results[k][i] = ((double *)host)[i];
                else if (a->kind == I32)
                    results[k][i] = ((int32_t *)host)[i];
                else if (size == 2)
                    results[k][i] = f32_from_bf16(((uint16_t *)host)[i]);
                else
                    results[k][i] = ((float *)host)[i];
            }
        }
        free(host);
        device_release(dev, d[k]);
    }
    return good;
}

// Largest |got - want| over the largest |want|, entries with want NaN left out of it where
// `skip_nan`, else they must be NaN in both. Complains above the tolerance.
static double compare(struct test *t, const char *what, double **got, double **want,
                      double tolerance, bool skip_nan, bool *good)
{
    double worst = 0;
    for (int k = 0; k < t->n_arrays; k++) {
        if (t->a[k].role == IN) continue;
        double largest = 0, error = 0;
        int64_t at = 0;
        for (int64_t i = 0; i < t->a[k].n; i++)
            if (isfinite(want[k][i])) largest = fmax(largest, fabs(want[k][i]));
        for (int64_t i = 0; i < t->a[k].n; i++) {
            double x = got[k][i], y = want[k][i];
            if (isnan(y) && (skip_nan || isnan(x))) continue;
            if (x == y) continue;
            double e = isfinite(x) && isfinite(y) ? fabs(x - y) / largest : INFINITY;
            if (e > error) error = e, at = i;
        }
        if (error > (t->a[k].kind == I32 ? 0 : tolerance)) { // numbers of things are exact
            printf("FAIL %s %s %s: %s[%lld] is %.9g, want %.9g (error %.3g of the largest, %.3g; "
                   "allowed %.0e)\n",
                   t->c->op->name, t->c->shape, what, t->a[k].name, (long long)at, got[k][at],
                   want[k][at], error, largest, tolerance);
            *good = false;
        }
        worst = fmax(worst, error);
    }
    return worst;
}

// ---- finite differences ------------------------------------------------------------------------

/* Adds to expect (of the array `gradient`) the derivative of loss() by entries of input `input`,
 * through central differences in double. `base` is what the gradient is added to. Large inputs: a
 * random sample of entries; the rest stay NaN. */
static void differentiate(struct test *t, double **v, int gradient, int input, bool add,
                          double (*loss)(struct test *, double **v))
{
    int64_t n = t->a[input].n;
    assert_int_equal(n, t->a[gradient].n);
    bool all = n <= FD_SAMPLES;
    for (int64_t s = 0; s < (all ? n : FD_SAMPLES); s++) {
        int64_t i = all ? s : rng_below(&t->rng, (uint32_t)n);
        double x = v[input][i], h = 1e-5;
        v[input][i] = x + h;
        double up = loss(t, v);
        v[input][i] = x - h;
        double down = loss(t, v);
        v[input][i] = x;
        t->a[gradient].expect[i] = (add ? v[gradient][i] : 0) + (up - down) / (2 * h);
    }
}

// ---- operations: matmul ------------------------------------------------------------------------

// p: m n k trans_a trans_b beta bias out_f32

static void matmul_setup(struct test *t)
{
    const int *p = t->c->p;
    floats(t, "c", p[5] ? INOUT : OUT, p[7] ? F32 : DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "a", IN, DATA, (int64_t)p[0] * p[2], 1);
    floats(t, "b", IN, DATA, (int64_t)p[1] * p[2], 1);
    floats(t, "bias", IN, DATA, p[1], 1);
}

static void matmul_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    struct matmul shape = {.m = p[0], .n = p[1], .k = p[2], .trans_a = p[3], .trans_b = p[4]};
    shape.beta = (float)p[5];
    shape.in = t->dt;
    shape.out = p[7] ? DT_F32 : t->dt;
    ops->matmul(dev, d[0], d[1], d[2], p[6] ? d[3] : NULL, &shape);
}

static void matmul_reference(struct test *t, double **v)
{
    const int *p = t->c->p, m = p[0], n = p[1], k = p[2];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = p[5] ? v[0][(int64_t)i * n + j] : 0;
            if (p[6]) sum += v[3][j];
            for (int l = 0; l < k; l++)
                sum += v[1][p[3] ? (int64_t)l * m + i : (int64_t)i * k + l] *
                       v[2][p[4] ? (int64_t)j * k + l : (int64_t)l * n + j];
            t->a[0].expect[(int64_t)i * n + j] = sum;
        }
}

static const struct op_def op_matmul = {"matmul", matmul_setup, matmul_launch, matmul_reference};

// ---- rows --------------------------------------------------------------------------------------
// gather_rows, scatter_add_rows: p: n width table_rows

static void gather_setup(struct test *t)
{
    const int *p = t->c->p;
    floats(t, "y", OUT, DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "table", IN, DATA, (int64_t)p[2] * p[1], 1);
    int32_t *index = ints(t, "index", p[0]);
    for (int i = 0; i < p[0]; i++) index[i] = (int32_t)rng_below(&t->rng, (uint32_t)p[2]);
}

static void gather_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    ops->gather_rows(dev, d[0], d[1], d[2], t->c->p[0], t->c->p[1], 1.5f, t->dt);
}

static void gather_reference(struct test *t, double **v)
{
    const int *p = t->c->p;
    for (int i = 0; i < p[0]; i++)
        for (int c = 0; c < p[1]; c++)
            t->a[0].expect[(int64_t)i * p[1] + c] = 1.5 * v[1][(int64_t)t->a[2].i[i] * p[1] + c];
}

static const struct op_def op_gather = {"gather_rows", gather_setup, gather_launch,
                                        gather_reference};

static const int32_t *sort_index;

static int by_index(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (sort_index[x] != sort_index[y]) return sort_index[x] < sort_index[y] ? -1 : 1;
    return x < y ? -1 : x > y;
}

static void scatter_setup(struct test *t)
{
    const int *p = t->c->p;
    floats(t, "table", INOUT, F32, (int64_t)p[2] * p[1], 1);
    floats(t, "y", IN, DATA, (int64_t)p[0] * p[1], 1);
    int32_t *index = ints(t, "index", p[0]), *order = ints(t, "order", p[0]);
    for (int i = 0; i < p[0]; i++) {
        index[i] = (int32_t)rng_below(&t->rng, (uint32_t)p[2]);
        order[i] = i;
    }
    sort_index = index;
    qsort(order, (size_t)p[0], sizeof *order, by_index);
}

static void scatter_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const struct scatter_args args = {d[2], d[3], t->c->p[0], t->c->p[1], 0.5f, t->dt, DT_F32};
    ops->scatter_add_rows(dev, d[0], d[1], &args);
}

static void scatter_reference(struct test *t, double **v)
{
    const int *p = t->c->p;
    double *table = t->a[0].expect;
    for (int64_t i = 0; i < t->a[0].n; i++) table[i] = v[0][i];
    for (int i = 0; i < p[0]; i++)
        for (int c = 0; c < p[1]; c++)
            table[(int64_t)t->a[2].i[i] * p[1] + c] += 0.5 * v[1][(int64_t)i * p[1] + c];
}

static const struct op_def op_scatter = {"scatter_add_rows", scatter_setup, scatter_launch,
                                         scatter_reference};

// add: p: n.  column_sum: p: rows cols

static void add_setup(struct test *t)
{
    floats(t, "y", INOUT, DATA, t->c->p[0], 1);
    floats(t, "x", IN, DATA, t->c->p[0], 1);
}

static void add_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    ops->add(dev, d[0], d[1], t->c->p[0], t->dt);
}

static void add_reference(struct test *t, double **v)
{
    for (int i = 0; i < t->c->p[0]; i++) t->a[0].expect[i] = v[0][i] + v[1][i];
}

static const struct op_def op_add = {"add", add_setup, add_launch, add_reference};

static void column_setup(struct test *t)
{
    floats(t, "out", INOUT, F32, t->c->p[1], 1);
    floats(t, "x", IN, DATA, (int64_t)t->c->p[0] * t->c->p[1], 1);
}

static void column_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    ops->column_sum(dev, d[0], d[1], t->c->p[0], t->c->p[1], t->dt);
}

static void column_reference(struct test *t, double **v)
{
    const int *p = t->c->p;
    for (int c = 0; c < p[1]; c++) {
        double sum = v[0][c];
        for (int r = 0; r < p[0]; r++) sum += v[1][(int64_t)r * p[1] + c];
        t->a[0].expect[c] = sum;
    }
}

static const struct op_def op_column = {"column_sum", column_setup, column_launch,
                                        column_reference};

// ---- norms -------------------------------------------------------------------------------------

// p: kind tokens width heads bias gap(elements between heads' end and the next token) add in_place

static struct norm_shape norm_shape_of(const int *p)
{
    return (struct norm_shape){.kind = (enum norm_kind)p[0],
                               .rows = p[1] * p[3],
                               .width = p[2],
                               .heads = p[3],
                               .stride = (int64_t)p[2] * p[3] + p[5],
                               .eps = 1e-5f};
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
                (in[c] - m) * factor * (w[c] + (s->kind == NORM_RMS_PLUS_ONE)) + (b ? b[c] : 0);
        if (rstd) rstd[r] = factor;
        if (mean) mean[r] = m;
    }
}

static void norm_setup(struct test *t)
{
    const int *p = t->c->p;
    struct norm_shape s = norm_shape_of(p);
    int64_t n = p[1] * s.stride;
    if (p[7]) {
        floats(t, "x, y", INOUT, DATA, n, 2);
    } else {
        floats(t, "y", OUT, DATA, n, 1);
    }
    floats(t, "rstd", OUT, F32, s.rows, 1);
    floats(t, "mean", s.kind == NORM_LAYER ? OUT : IN, F32, s.rows, 1);
    floats(t, "x", IN, DATA, n, 2);
    floats(t, "w", IN, DATA, s.width, 1);
    floats(t, "b", IN, DATA, s.width, 1);
}

static void norm_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    struct norm_shape s = norm_shape_of(t->c->p);
    s.dt = t->dt;
    const struct norm_args args = {t->c->p[7] ? d[0] : d[3], d[4], t->c->p[4] ? d[5] : NULL, d[1],
                                   s.kind == NORM_LAYER ? d[2] : NULL};
    ops->norm(dev, d[0], &args, &s);
}

static void norm_reference(struct test *t, double **v)
{
    struct norm_shape s = norm_shape_of(t->c->p);
    norm_formula(&s, t->a[0].expect, t->a[1].expect, t->a[2].expect, v[t->c->p[7] ? 0 : 3], v[4],
                 t->c->p[4] ? v[5] : NULL);
}

static const struct op_def op_norm = {"norm", norm_setup, norm_launch, norm_reference};

enum { NB_DX, NB_DW, NB_DB, NB_DY, NB_X, NB_W, NB_B, NB_RSTD, NB_MEAN };

static void norm_back_setup(struct test *t)
{
    const int *p = t->c->p;
    struct norm_shape s = norm_shape_of(p);
    int64_t n = p[1] * s.stride;
    floats(t, "dx", p[6] || p[7] ? INOUT : OUT, DATA, n, 1);
    floats(t, "dw", INOUT, F32, s.width, 1);
    floats(t, "db", p[4] ? INOUT : IN, F32, s.width, 1);
    floats(t, "dy", IN, DATA, n, 1);
    float *x = floats(t, "x", IN, DATA, n, 2);
    float *w = floats(t, "w", IN, DATA, s.width, 1);
    floats(t, "b", IN, DATA, s.width, 1);
    float *rstd = floats(t, "rstd", IN, F32, s.rows, 1);
    float *mean = floats(t, "mean", IN, F32, s.rows, 1);
    double *xd = must(malloc((size_t)n * 8)), *wd = must(malloc((size_t)s.width * 8));
    double *y = must(malloc((size_t)n * 8)), *r = must(malloc((size_t)s.rows * 16));
    for (int64_t i = 0; i < n; i++) xd[i] = x[i];
    for (int i = 0; i < s.width; i++) wd[i] = w[i];
    norm_formula(&s, y, r, r + s.rows, xd, wd, NULL);
    for (int i = 0; i < s.rows; i++) {
        rstd[i] = (float)r[i];
        mean[i] = (float)r[s.rows + i];
    }
    free(xd);
    free(wd);
    free(y);
    free(r);
}

static void norm_back_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    struct norm_shape s = norm_shape_of(p);
    const struct norm_args args = {d[NB_X], d[NB_W], NULL, d[NB_RSTD],
                                   s.kind == NORM_LAYER ? d[NB_MEAN] : NULL};
    s.dt = t->dt;
    ops->norm_back(dev, d[NB_DX], d[NB_DW], p[4] ? d[NB_DB] : NULL, p[7] ? d[NB_DX] : d[NB_DY],
                   &args, &s, p[6]);
}

static double norm_loss(struct test *t, double **v)
{
    struct norm_shape s = norm_shape_of(t->c->p);
    const double *dy = v[t->c->p[7] ? NB_DX : NB_DY];
    double *y = must(malloc((size_t)t->a[NB_X].n * 8)), loss = 0;
    norm_formula(&s, y, NULL, NULL, v[NB_X], v[NB_W], t->c->p[4] ? v[NB_B] : NULL);
    for (int r = 0; r < s.rows; r++)
        for (int c = 0; c < s.width; c++) loss += dy[norm_at(&s, r) + c] * y[norm_at(&s, r) + c];
    free(y);
    return loss;
}

static void norm_back_reference(struct test *t, double **v)
{
    const int *p = t->c->p;
    struct norm_shape s = norm_shape_of(p);
    differentiate(t, v, NB_DX, NB_X, p[6], norm_loss);
    for (int64_t i = 0; i < t->a[NB_DX].n; i++) // gaps between rows are nobody's
        if (i % s.stride >= (int64_t)s.width * s.heads) t->a[NB_DX].expect[i] = NAN;
    differentiate(t, v, NB_DW, NB_W, true, norm_loss);
    if (p[4]) differentiate(t, v, NB_DB, NB_B, true, norm_loss);
}

static const struct op_def op_norm_back = {"norm_back", norm_back_setup, norm_back_launch,
                                           norm_back_reference};

// ---- rope --------------------------------------------------------------------------------------

// p: rows heads(rotated) head_dim rot_dim extra(elements after the rotated heads) sign

static void rope_setup(struct test *t)
{
    const int *p = t->c->p, positions = 64, half = p[3] / 2;
    floats(t, "qkv", INOUT, DATA, (int64_t)p[0] * (p[1] * p[2] + p[4]), 1);
    float *table = floats(t, "table", IN, F32, (int64_t)positions * half * 2, 1);
    for (int i = 0; i < positions * half; i++) {
        double angle = i / half * pow(10000, -(double)(i % half) / half);
        table[2 * i] = (float)cos(angle);
        table[2 * i + 1] = (float)sin(angle);
    }
    int32_t *position = ints(t, "positions", p[0]);
    for (int r = 0; r < p[0]; r++) position[r] = (int32_t)rng_below(&t->rng, positions);
}

static void rope_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    const struct rope_args args = {.table = d[1],
                                   .positions = d[2],
                                   .rows = p[0],
                                   .n = p[1],
                                   .head_dim = p[2],
                                   .rot_dim = p[3],
                                   .stride = p[1] * p[2] + p[4],
                                   .sign = (float)p[5],
                                   .dt = t->dt};
    ops->rope(dev, d[0], &args);
}

static void rope_reference(struct test *t, double **v)
{
    const int *p = t->c->p, half = p[3] / 2;
    const int64_t stride = p[1] * p[2] + p[4];
    for (int64_t i = 0; i < t->a[0].n; i++) t->a[0].expect[i] = v[0][i];
    for (int r = 0; r < p[0]; r++)
        for (int h = 0; h < p[1]; h++)
            for (int i = 0; i < half; i++) {
                int64_t at = r * stride + h * p[2] + i;
                double c = v[1][((int64_t)t->a[2].i[r] * half + i) * 2];
                double s = p[5] * v[1][((int64_t)t->a[2].i[r] * half + i) * 2 + 1];
                t->a[0].expect[at] = v[0][at] * c - v[0][at + half] * s;
                t->a[0].expect[at + half] = v[0][at + half] * c + v[0][at] * s;
            }
}

static const struct op_def op_rope = {"rope", rope_setup, rope_launch, rope_reference};

// ---- activations -------------------------------------------------------------------------------

// p: rows width kind gated

static double act_formula(double x, int kind)
{
    if (kind == ACT_SILU) return x / (1 + exp(-x));
    if (kind == ACT_GELU) return 0.5 * x * (1 + erf(x / sqrt(2)));
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static double act_at(const int *p, const double *x, int r, int c)
{
    if (!p[3]) return act_formula(x[(int64_t)r * p[1] + c], p[2]);
    const double *row = x + (int64_t)r * 2 * p[1];
    return act_formula(row[c], p[2]) * row[p[1] + c];
}

static void act_setup(struct test *t)
{
    const int *p = t->c->p;
    floats(t, "y", OUT, DATA, (int64_t)p[0] * p[1], 1);
    float *x = floats(t, "x", IN, DATA, (int64_t)p[0] * p[1] * (p[3] ? 2 : 1), 3);
    x[0] = -30;
    x[1] = 30;
}

static void act_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    const struct act_shape shape = {p[0], p[1], (enum act_kind)p[2], p[3], t->dt};
    ops->act(dev, d[0], d[1], &shape);
}

static void act_reference(struct test *t, double **v)
{
    const int *p = t->c->p;
    for (int r = 0; r < p[0]; r++)
        for (int c = 0; c < p[1]; c++)
            t->a[0].expect[(int64_t)r * p[1] + c] = act_at(p, v[1], r, c);
}

static const struct op_def op_act = {"act", act_setup, act_launch, act_reference};

static void act_back_setup(struct test *t)
{
    const int *p = t->c->p;
    int64_t n = (int64_t)p[0] * p[1] * (p[3] ? 2 : 1);
    floats(t, "dx", OUT, DATA, n, 1);
    floats(t, "dy", IN, DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "x", IN, DATA, n, 2);
}

static void act_back_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    const struct act_shape shape = {p[0], p[1], (enum act_kind)p[2], p[3], t->dt};
    ops->act_back(dev, d[0], d[1], d[2], &shape);
}

static double act_loss(struct test *t, double **v)
{
    const int *p = t->c->p;
    double loss = 0;
    for (int r = 0; r < p[0]; r++)
        for (int c = 0; c < p[1]; c++) loss += v[1][(int64_t)r * p[1] + c] * act_at(p, v[2], r, c);
    return loss;
}

static void act_back_reference(struct test *t, double **v)
{
    differentiate(t, v, 0, 2, false, act_loss);
}

static const struct op_def op_act_back = {"act_back", act_back_setup, act_back_launch,
                                          act_back_reference};

// softcap, softcap_back: p: n cap

static void softcap_setup(struct test *t)
{
    floats(t, "x", INOUT, F32, t->c->p[0], 30);
}

static void softcap_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    ops->softcap(dev, d[0], t->c->p[0], (float)t->c->p[1]);
}

static void softcap_reference(struct test *t, double **v)
{
    const double cap = t->c->p[1];
    for (int i = 0; i < t->c->p[0]; i++) t->a[0].expect[i] = cap * tanh(v[0][i] / cap);
}

static const struct op_def op_softcap = {"softcap", softcap_setup, softcap_launch,
                                         softcap_reference};

static void softcap_back_setup(struct test *t)
{
    floats(t, "dx", INOUT, F32, t->c->p[0], 1);
    float *capped = floats(t, "capped", IN, F32, t->c->p[0], 1);
    float *x = floats(t, "x", IN, F32, t->c->p[0], 20);
    const double cap = t->c->p[1];
    for (int i = 0; i < t->c->p[0]; i++) capped[i] = (float)(cap * tanh(x[i] / cap));
}

static void softcap_back_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    ops->softcap_back(dev, d[0], d[1], t->c->p[0], (float)t->c->p[1]);
}

static double softcap_loss(struct test *t, double **v)
{
    const double cap = t->c->p[1];
    double loss = 0;
    for (int i = 0; i < t->c->p[0]; i++) loss += v[0][i] * cap * tanh(v[2][i] / cap);
    return loss;
}

static void softcap_back_reference(struct test *t, double **v)
{
    differentiate(t, v, 0, 2, false, softcap_loss);
}

static const struct op_def op_softcap_back = {"softcap_back", softcap_back_setup,
                                              softcap_back_launch, softcap_back_reference};

// ---- mixture of experts ------------------------------------------------------------------------
// moe_route: p: rows n_experts top_k pattern of the logits

enum logits { ANY, TIES, ONE, FEW }; // ONE: the last expert always; FEW: never every third one

static struct moe_shape moe_shape_of(int rows, int n_experts, int top_k)
{
    return (struct moe_shape){
        .rows = rows, .n_experts = n_experts, .top_k = top_k, .norm_topk = true, .scale = 1};
}

static void router_logits(struct test *t, float *x, int rows, int n_experts, enum logits pattern)
{
    for (int i = 0; i < rows; i++)
        for (int e = 0; e < n_experts; e++) {
            float *logit = &x[(int64_t)i * n_experts + e];
            if (pattern == TIES) *logit = (float)rng_below(&t->rng, 3);
            if (pattern == ONE && e == n_experts - 1) *logit += 40;
            if (pattern == FEW && e % 3 == 1) *logit -= 60;
        }
}

// The chosen experts of a row, best first, and the softmax over their logits.
static void choose(int32_t *expert, double *weight, const double *logits, int n_experts, int top_k)
{
    double sum = 0;
    for (int j = 0; j < top_k; j++) {
        int best = -1;
        for (int e = 0; e < n_experts; e++) {
            bool taken = false;
            for (int i = 0; i < j; i++) taken |= expert[i] == e;
            if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        expert[j] = best;
        weight[j] = exp(logits[best] - logits[expert[0]]);
        sum += weight[j];
    }
    for (int j = 0; j < top_k; j++) weight[j] /= sum;
}

// Where each of n assignments stands when sorted by expert: after all of lower experts, and after
// those of its own that come before it.
static void sort_places(int32_t *place, const int32_t *expert, int n)
{
    for (int a = 0; a < n; a++) {
        place[a] = 0;
        for (int b = 0; b < n; b++)
            place[a] += expert[b] < expert[a] || (expert[b] == expert[a] && b < a);
    }
}

enum { RT_EXPERT, RT_WEIGHT, RT_ROW, RT_PLACE, RT_OFFSETS, RT_LOGITS };

// The arrays of a routing come first, in this order.
static void routing_arrays(struct test *t, int rows, int n_experts, int top_k, enum logits pattern)
{
    array_new(t, "expert", OUT, I32, (int64_t)rows * top_k);
    array_new(t, "weight", OUT, F32, (int64_t)rows * top_k);
    array_new(t, "row", OUT, I32, (int64_t)rows * top_k);
    array_new(t, "place", OUT, I32, (int64_t)rows * top_k);
    array_new(t, "offsets", OUT, I32, n_experts + 1);
    float *logits = floats(t, "logits", IN, F32, (int64_t)rows * n_experts, 2);
    router_logits(t, logits, rows, n_experts, pattern);
}

static struct moe_routing routing_of(void **d)
{
    return (struct moe_routing){d[RT_EXPERT], d[RT_WEIGHT], d[RT_ROW], d[RT_PLACE], d[RT_OFFSETS]};
}

static void route_setup(struct test *t)
{
    const int *p = t->c->p;
    routing_arrays(t, p[0], p[1], p[2], (enum logits)p[3]);
}

static void route_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    struct moe_routing routing = routing_of(d);
    const struct moe_shape shape = moe_shape_of(p[0], p[1], p[2]);
    ops->moe_route(dev, &routing, d[RT_LOGITS], NULL, &shape);
}

static void route_reference(struct test *t, double **v)
{
    const int *p = t->c->p, n_experts = p[1], top_k = p[2], n = p[0] * top_k;
    int32_t *expert = must(malloc((size_t)n * sizeof *expert));
    int32_t *place = must(malloc((size_t)n * sizeof *place));
    for (int i = 0; i < p[0]; i++)
        choose(expert + i * top_k, t->a[RT_WEIGHT].expect + i * top_k,
               v[RT_LOGITS] + (int64_t)i * n_experts, n_experts, top_k);
    sort_places(place, expert, n);
    for (int a = 0; a < n; a++) {
        t->a[RT_EXPERT].expect[a] = expert[a];
        t->a[RT_PLACE].expect[a] = place[a];
        t->a[RT_ROW].expect[place[a]] = a / top_k;
    }
    for (int e = 0; e <= n_experts; e++) {
        int lower = 0;
        for (int a = 0; a < n; a++) lower += expert[a] < e;
        t->a[RT_OFFSETS].expect[e] = lower;
    }
    free(expert);
    free(place);
}

static const struct op_def op_route = {"moe_route", route_setup, route_launch, route_reference};

// moe_combine: p: rows top_k width weighted add

enum { CB_Y, CB_X, CB_PLACE, CB_WEIGHT };

static void combine_setup(struct test *t)
{
    const int *p = t->c->p, n = p[0] * p[1];
    floats(t, "y", p[4] ? INOUT : OUT, DATA, (int64_t)p[0] * p[2], 1);
    floats(t, "x", IN, DATA, (int64_t)n * p[2], 1);
    int32_t *place = ints(t, "place", n);
    floats(t, "weight", IN, F32, n, 1);
    for (int a = 0; a < n; a++) { // a random permutation
        int other = (int)rng_below(&t->rng, (uint32_t)a + 1);
        place[a] = place[other];
        place[other] = a;
    }
}

static void combine_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    struct moe_shape shape = moe_shape_of(p[0], 8, p[1]);
    shape.width = p[2];
    shape.dt = t->dt;
    ops->moe_combine(dev, d[CB_Y], d[CB_X], d[CB_PLACE], p[3] ? d[CB_WEIGHT] : NULL, &shape, p[4]);
}

static void combine_reference(struct test *t, double **v)
{
    const int *p = t->c->p, top_k = p[1], width = p[2];
    for (int i = 0; i < p[0]; i++)
        for (int c = 0; c < width; c++) {
            double sum = p[4] ? v[CB_Y][(int64_t)i * width + c] : 0;
            for (int a = i * top_k; a < (i + 1) * top_k; a++)
                sum += (p[3] ? v[CB_WEIGHT][a] : 1) *
                       v[CB_X][(int64_t)t->a[CB_PLACE].i[a] * width + c];
            t->a[CB_Y].expect[(int64_t)i * width + c] = sum;
        }
}

static const struct op_def op_combine = {"moe_combine", combine_setup, combine_launch,
                                         combine_reference};

/* moe_combine_back and moe_route_back, chained as in a backward pass. p: rows n_experts top_k
 * pattern width. The loss is the sum of dy * combine(x) under the weights of the logits; which
 * experts are chosen does not depend on them, and neither does a sorted row of x. */

enum { MB_DX = RT_LOGITS + 1, MB_DWEIGHT, MB_DLOGITS, MB_DY, MB_X };

static void moe_back_setup(struct test *t)
{
    const int *p = t->c->p, n = p[0] * p[2];
    routing_arrays(t, p[0], p[1], p[2], (enum logits)p[3]);
    floats(t, "dx", OUT, DATA, (int64_t)n * p[4], 1);
    floats(t, "dweight", OUT, F32, n, 1);
    floats(t, "dlogits", OUT, DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "dy", IN, DATA, (int64_t)p[0] * p[4], 1);
    floats(t, "x", IN, DATA, (int64_t)n * p[4], 1);
}

static void moe_back_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    struct moe_shape shape = moe_shape_of(p[0], p[1], p[2]);
    struct moe_routing routing = routing_of(d);
    shape.width = p[4];
    shape.dt = t->dt;
    ops->moe_route(dev, &routing, d[RT_LOGITS], NULL, &shape);
    ops->moe_combine_back(dev, d[MB_DX], d[MB_DWEIGHT], d[MB_DY], d[MB_X], &routing, &shape);
    ops->moe_route_back(dev, d[MB_DLOGITS], d[MB_DWEIGHT], d[RT_LOGITS], &routing, &shape);
}

// In v: the weights and choices of RT_WEIGHT and RT_EXPERT, the latter as numbers in double.
static double moe_loss(struct test *t, double **v)
{
    const int *p = t->c->p, n_experts = p[1], top_k = p[2], width = p[4];
    double loss = 0;
    for (int i = 0; i < p[0]; i++) {
        double sum = 0, weighted = 0;
        for (int j = 0; j < top_k; j++) {
            int a = i * top_k + j;
            double dot = 0;
            for (int c = 0; c < width; c++)
                dot +=
                    v[MB_DY][(int64_t)i * width + c] * v[MB_X][(int64_t)v[RT_PLACE][a] * width + c];
            double e = exp(v[RT_LOGITS][i * n_experts + (int)v[RT_EXPERT][a]]);
            sum += e;
            weighted += e * dot;
        }
        loss += weighted / sum;
    }
    return loss;
}

// dweight by way of the loss with the weights themselves as the variables
static double weight_loss(struct test *t, double **v)
{
    const int *p = t->c->p, top_k = p[2], width = p[4];
    double loss = 0;
    for (int a = 0; a < p[0] * top_k; a++)
        for (int c = 0; c < width; c++)
            loss += v[RT_WEIGHT][a] * v[MB_DY][(int64_t)(a / top_k) * width + c] *
                    v[MB_X][(int64_t)v[RT_PLACE][a] * width + c];
    return loss;
}

static void moe_back_reference(struct test *t, double **v)
{
    const int *p = t->c->p, n = p[0] * p[2];
    route_reference(t, v);
    v[RT_EXPERT] = must(malloc((size_t)n * sizeof(double)));
    v[RT_PLACE] = must(malloc((size_t)n * sizeof(double)));
    for (int a = 0; a < n; a++) {
        v[RT_EXPERT][a] = t->a[RT_EXPERT].expect[a];
        v[RT_PLACE][a] = t->a[RT_PLACE].expect[a];
        v[RT_WEIGHT][a] = t->a[RT_WEIGHT].expect[a];
    }
    differentiate(t, v, MB_DX, MB_X, false, moe_loss);
    differentiate(t, v, MB_DLOGITS, RT_LOGITS, false, moe_loss);
    differentiate(t, v, MB_DWEIGHT, RT_WEIGHT, false, weight_loss);
}

static const struct op_def op_moe_back = {"moe_back", moe_back_setup, moe_back_launch,
                                          moe_back_reference};

// matmul_experts: p: m n k n_experts pattern trans_b out_f32

enum rows { SPREAD, FIRST, LAST, GAPS, UNEVEN }; // which experts have rows; GAPS: every second

static void fill_offsets(struct test *t, int32_t *offsets, int m, int n_experts, enum rows pattern)
{
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

static void experts_setup(struct test *t)
{
    const int *p = t->c->p;
    floats(t, "c", OUT, p[6] ? F32 : DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "a", IN, DATA, (int64_t)p[0] * p[2], 1);
    floats(t, "b", IN, DATA, (int64_t)p[3] * p[1] * p[2], 1);
    fill_offsets(t, ints(t, "offsets", p[3] + 1), p[0], p[3], (enum rows)p[4]);
}

static void experts_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    const struct matmul shape = {.m = p[0],
                                 .n = p[1],
                                 .k = p[2],
                                 .trans_b = p[5],
                                 .in = t->dt,
                                 .out = p[6] ? DT_F32 : t->dt};
    ops->matmul_experts(dev, d[EX_C], d[EX_A], d[EX_B], d[EX_OFFSETS], p[3], &shape);
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

static void experts_reference(struct test *t, double **v)
{
    const int *p = t->c->p, n = p[1];
    const int32_t *offsets = t->a[EX_OFFSETS].i;
    for (int e = 0; e < p[3]; e++)
        for (int i = offsets[e]; i < offsets[e + 1]; i++)
            for (int j = 0; j < n; j++)
                t->a[EX_C].expect[(int64_t)i * n + j] =
                    expert_dot(v[EX_A], v[EX_B], n, p[2], p[5], e, i, j);
}

static const struct op_def op_experts = {"matmul_experts", experts_setup, experts_launch,
                                         experts_reference};

// matmul_experts_back: p: m n k n_experts pattern. The loss is the sum of dy * (x . w^T).

enum { XB_DW, XB_DY, XB_X, XB_OFFSETS, XB_W };

static void experts_back_setup(struct test *t)
{
    const int *p = t->c->p;
    int64_t n_weights = (int64_t)p[3] * p[1] * p[2];
    floats(t, "dw", INOUT, F32, n_weights, 1);
    floats(t, "dy", IN, DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "x", IN, DATA, (int64_t)p[0] * p[2], 1);
    fill_offsets(t, ints(t, "offsets", p[3] + 1), p[0], p[3], (enum rows)p[4]);
    floats(t, "w", IN, F32, n_weights, 1);
}

static void experts_back_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    const struct matmul shape = {.m = p[0], .n = p[1], .k = p[2], .in = t->dt};
    ops->matmul_experts_back(dev, d[XB_DW], d[XB_DY], d[XB_X], d[XB_OFFSETS], p[3], &shape);
}

static double experts_loss(struct test *t, double **v)
{
    const int *p = t->c->p, n = p[1];
    const int32_t *offsets = t->a[XB_OFFSETS].i;
    double loss = 0;
    for (int e = 0; e < p[3]; e++)
        for (int i = offsets[e]; i < offsets[e + 1]; i++)
            for (int j = 0; j < n; j++)
                loss += v[XB_DY][(int64_t)i * n + j] *
                        expert_dot(v[XB_X], v[XB_W], n, p[2], true, e, i, j);
    return loss;
}

static void experts_back_reference(struct test *t, double **v)
{
    differentiate(t, v, XB_DW, XB_W, true, experts_loss);
}

static const struct op_def op_experts_back = {"matmul_experts_back", experts_back_setup,
                                              experts_back_launch, experts_back_reference};

// ---- attention ---------------------------------------------------------------------------------

// p: n_heads n_kv_heads head_dim layout scale window softcap (packed); block_size at p[7] (paged)

// Packed layouts, lengths times `scale`; {prefix of: index of the sequence that is its prefix or
// -1}
struct layout_seq {
    int len, prefix;
};
static const struct layout_seq layouts[][8] = {
    {{13, -1}},
    {{5, -1}, {1, -1}, {9, -1}},
    {{6, -1}, {4, 0}, {1, 0}, {7, 0}, {5, -1}, {3, -1}, {2, 5}, {8, 5}},
};

static struct attn_shape attn_shape_of(const int *p)
{
    return (struct attn_shape){.n_heads = p[0],
                               .n_kv_heads = p[1],
                               .head_dim = p[2],
                               .scale = 1.0f / sqrtf((float)p[2]),
                               .window = p[5],
                               .softcap = (float)p[6]};
}

// The seven index arrays of a packed batch, as arrays first..first + 6.
static void packed_setup(struct test *t, const struct layout_seq *seqs, int scale)
{
    int n_seqs = 0, rows = 0, longest = 0, context = 0;
    while (n_seqs < 8 && seqs[n_seqs].len) {
        int len = seqs[n_seqs].len * scale, prefix = seqs[n_seqs].prefix;
        int whole = len + (prefix >= 0 ? seqs[prefix].len * scale : 0);
        rows += len;
        longest = len > longest ? len : longest;
        context = whole > context ? whole : context;
        n_seqs++;
    }
    int32_t *positions = ints(t, "positions", rows), *seq_of = ints(t, "seq_of", rows);
    int32_t *start = ints(t, "query_start", n_seqs + 1);
    int32_t *prefix_start = ints(t, "prefix_start", n_seqs);
    int32_t *prefix_len = ints(t, "prefix_len", n_seqs), *end = ints(t, "attend_end", n_seqs);
    int row = 0;
    for (int s = 0; s < n_seqs; s++) {
        int prefix = seqs[s].prefix;
        start[s] = row;
        if (prefix >= 0) {
            prefix_start[s] = start[prefix];
            prefix_len[s] = seqs[prefix].len * scale;
        }
        for (int i = 0; i < seqs[s].len * scale; i++, row++) {
            positions[row] = prefix_len[s] + i;
            seq_of[row] = s;
        }
        end[s] = row;
        if (prefix >= 0) end[prefix] = row;
    }
    start[n_seqs] = row;
    t->batch = (struct batch_view){.n_tokens = rows,
                                   .n_seqs = n_seqs,
                                   .max_query = longest,
                                   .max_context = context,
                                   .packed = true};
}

static struct batch_view packed_view(const struct test *t, void **d)
{
    struct batch_view b = t->batch;
    b.positions = d[0];
    b.seq_of = d[1];
    b.query_start = d[2];
    b.prefix_start = d[3];
    b.prefix_len = d[4];
    b.attend_end = d[5];
    return b;
}

/* One row's attention in double: keys and values given as pointers per visible entry. */
static double attention_row(double *out, const double *q, const double **k, const double **v, int n,
                            const struct attn_shape *s)
{
    double *p = must(malloc((size_t)n * sizeof *p)), max = -INFINITY, sum = 0;
    for (int j = 0; j < n; j++) {
        p[j] = 0;
        for (int d = 0; d < s->head_dim; d++) p[j] += q[d] * k[j][d];
        p[j] *= s->scale;
        if (s->softcap > 0) p[j] = s->softcap * tanh(p[j] / s->softcap);
        max = fmax(max, p[j]);
    }
    for (int j = 0; j < n; j++) sum += p[j] = exp(p[j] - max);
    for (int d = 0; d < s->head_dim; d++) out[d] = 0;
    for (int j = 0; j < n; j++)
        for (int d = 0; d < s->head_dim; d++) out[d] += p[j] / sum * v[j][d];
    free(p);
    return max + log(sum);
}

// out, lse of a packed batch in double, from the masks as batch_view.h words them
static void packed_formula(struct test *t, int index_arrays, double *out, double *lse,
                           const double *qkv)
{
    const struct attn_shape s = attn_shape_of(t->c->p);
    const struct array *a = t->a + index_arrays;
    const int64_t width = (int64_t)(s.n_heads + 2 * s.n_kv_heads) * s.head_dim;
    const double **k = must(malloc((size_t)t->batch.n_tokens * sizeof *k));
    const double **v = must(malloc((size_t)t->batch.n_tokens * sizeof *v));
    for (int row = 0; row < t->batch.n_tokens; row++)
        for (int h = 0; h < s.n_heads; h++) {
            int seq = a[1].i[row], kv = h / (s.n_heads / s.n_kv_heads), n = 0;
            for (int j = 0; j <= row; j++) {
                bool prefix = j >= a[3].i[seq] && j < a[3].i[seq] + a[4].i[seq];
                if (!prefix && j < a[2].i[seq]) continue;
                if (s.window && a[0].i[j] <= a[0].i[row] - s.window) continue;
                k[n] = qkv + j * width + (s.n_heads + kv) * s.head_dim;
                v[n] = k[n] + s.n_kv_heads * s.head_dim;
                n++;
            }
            double l = attention_row(out + ((int64_t)row * s.n_heads + h) * s.head_dim,
                                     qkv + row * width + h * s.head_dim, k, v, n, &s);
            if (lse) lse[(int64_t)row * s.n_heads + h] = l;
        }
    free(k);
    free(v);
}

enum { AP_INDEX, AP_OUT = 6, AP_LSE, AP_QKV };

static void attn_packed_setup(struct test *t)
{
    const int *p = t->c->p;
    packed_setup(t, layouts[p[3]], p[4]);
    int64_t rows = t->batch.n_tokens;
    floats(t, "out", OUT, DATA, rows * p[0] * p[2], 1);
    floats(t, "lse", OUT, F32, rows * p[0], 1);
    floats(t, "qkv", IN, DATA, rows * (p[0] + 2 * p[1]) * p[2], 1);
}

static void attn_packed_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    struct attn_shape s = attn_shape_of(t->c->p);
    struct batch_view b = packed_view(t, d);
    s.dt = t->dt;
    ops->attn_packed(dev, d[AP_OUT], d[AP_LSE], d[AP_QKV], &b, &s);
}

static void attn_packed_reference(struct test *t, double **v)
{
    packed_formula(t, AP_INDEX, t->a[AP_OUT].expect, t->a[AP_LSE].expect, v[AP_QKV]);
}

static const struct op_def op_attn_packed = {"attn_packed", attn_packed_setup, attn_packed_launch,
                                             attn_packed_reference};

enum { AB_INDEX, AB_DQKV = 6, AB_DOUT, AB_OUT, AB_LSE, AB_QKV };

static void attn_back_setup(struct test *t)
{
    const int *p = t->c->p;
    packed_setup(t, layouts[p[3]], p[4]);
    int64_t rows = t->batch.n_tokens, n = rows * p[0] * p[2];
    floats(t, "dqkv", OUT, DATA, rows * (p[0] + 2 * p[1]) * p[2], 1);
    floats(t, "dout", IN, DATA, n, 1);
    float *out = floats(t, "out", IN, DATA, n, 1);
    float *lse = floats(t, "lse", IN, F32, rows * p[0], 1);
    struct array *qkv = &t->a[t->n_arrays];
    floats(t, "qkv", IN, DATA, t->a[AB_DQKV].n, 1);
    double *x = must(malloc((size_t)qkv->n * 8)), *o = must(malloc((size_t)n * 8));
    double *l = must(malloc((size_t)rows * p[0] * 8));
    for (int64_t i = 0; i < qkv->n; i++) // rounded as bf16 first, so that out and lse fit both runs
        x[i] = qkv->f[i] = f32_from_bf16(bf16_from_f32(qkv->f[i]));
    packed_formula(t, AB_INDEX, o, l, x);
    for (int64_t i = 0; i < n; i++) out[i] = (float)o[i];
    for (int64_t i = 0; i < rows * p[0]; i++) lse[i] = (float)l[i];
    free(x);
    free(o);
    free(l);
}

static void attn_back_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    struct attn_shape s = attn_shape_of(t->c->p);
    struct batch_view b = packed_view(t, d);
    s.dt = t->dt;
    ops->attn_packed_back(dev, d[AB_DQKV], d[AB_DOUT], d[AB_OUT], d[AB_LSE], d[AB_QKV], &b, &s);
}

static double attn_loss(struct test *t, double **v)
{
    double *out = must(malloc((size_t)t->a[AB_OUT].n * 8)), loss = 0;
    packed_formula(t, AB_INDEX, out, NULL, v[AB_QKV]);
    for (int64_t i = 0; i < t->a[AB_OUT].n; i++) loss += v[AB_DOUT][i] * out[i];
    free(out);
    return loss;
}

static void attn_back_reference(struct test *t, double **v)
{
    differentiate(t, v, AB_DQKV, AB_QKV, false, attn_loss);
}

static const struct op_def op_attn_back = {"attn_packed_back", attn_back_setup, attn_back_launch,
                                           attn_back_reference};

/* Paged: sequences with a context and some rows at its end (layout 0: decode, 1: chunks of
 * prefill), the last one padding. Layer 1 of a pool of two layers; blocks in random order. kv_store
 * writes the rows' keys and values first, so one case covers both operations. */
static const struct {
    int context, rows;
} paged_layouts[][6] = {
    {{1, 1}, {17, 1}, {5, 1}, {33, 1}},
    {{9, 9}, {20, 4}, {31, 1}, {16, 16}, {7, 2}},
};

enum { PG_OUT, PG_K, PG_V, PG_QKV, PG_POSITIONS, PG_SEQ, PG_START, PG_SLOTS, PG_CONTEXT, PG_TABLE };

static void attn_paged_setup(struct test *t)
{
    const int *p = t->c->p, block = p[7], layout = p[3], scale = p[4];
    int n_seqs = 0, rows = 1, blocks = 0, table_stride = 0, max_query = 1, max_context = 1;
    while (n_seqs < 5 && paged_layouts[layout][n_seqs].context) {
        int context = paged_layouts[layout][n_seqs].context * scale;
        int queries = paged_layouts[layout][n_seqs].rows * (layout ? scale : 1);
        int need = (context + block - 1) / block;
        rows += queries;
        blocks += need;
        table_stride = need > table_stride ? need : table_stride;
        max_query = queries > max_query ? queries : max_query;
        max_context = context > max_context ? context : max_context;
        n_seqs++;
    }
    int64_t pool = (int64_t)2 * blocks * block * p[1] * p[2];
    floats(t, "out", OUT, DATA, (int64_t)rows * p[0] * p[2], 1);
    floats(t, "pool keys", INOUT, DATA, pool, 1);
    floats(t, "pool values", INOUT, DATA, pool, 1);
    floats(t, "qkv", IN, DATA, (int64_t)rows * (p[0] + 2 * p[1]) * p[2], 1);
    int32_t *positions = ints(t, "positions", rows), *seq_of = ints(t, "seq_of", rows);
    int32_t *start = ints(t, "query_start", n_seqs + 2), *slots = ints(t, "slots", rows);
    int32_t *context_len = ints(t, "context_len", n_seqs + 1);
    int32_t *table = ints(t, "block_table", (int64_t)(n_seqs + 1) * table_stride);
    int32_t *order = must(malloc((size_t)blocks * sizeof *order));
    for (int i = 0; i < blocks; i++) order[i] = i;
    for (int i = blocks - 1; i > 0; i--) {
        int j = (int)rng_below(&t->rng, (uint32_t)i + 1), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    int row = 0, next = 0;
    for (int s = 0; s < n_seqs; s++) {
        int context = paged_layouts[layout][s].context * scale;
        int queries = paged_layouts[layout][s].rows * (layout ? scale : 1);
        start[s] = row;
        context_len[s] = context;
        for (int i = 0; i < (context + block - 1) / block; i++)
            table[s * table_stride + i] = order[next++];
        for (int i = 0; i < queries; i++, row++) {
            positions[row] = context - queries + i;
            seq_of[row] = s;
            slots[row] =
                table[s * table_stride + positions[row] / block] * block + positions[row] % block;
        }
    }
    start[n_seqs] = row;
    seq_of[row] = n_seqs; // padding: one row, slot -1, context_len 0
    slots[row] = -1;
    start[n_seqs + 1] = row + 1;
    free(order);
    t->batch = (struct batch_view){.n_tokens = rows,
                                   .n_seqs = n_seqs + 1,
                                   .max_query = max_query,
                                   .max_context = max_context,
                                   .table_stride = table_stride};
}

static void attn_paged_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    struct attn_shape s = attn_shape_of(t->c->p);
    struct batch_view b = t->batch;
    b.positions = d[PG_POSITIONS];
    b.seq_of = d[PG_SEQ];
    b.query_start = d[PG_START];
    b.slots = d[PG_SLOTS];
    b.context_len = d[PG_CONTEXT];
    b.block_table = d[PG_TABLE];
    int block = t->c->p[7];
    struct kv_view kv = {.k = d[PG_K],
                         .v = d[PG_V],
                         .layer_stride = t->a[PG_K].n / 2,
                         .n_blocks = (int)(t->a[PG_K].n / 2 / block / s.n_kv_heads / s.head_dim),
                         .block_size = block,
                         .dt = t->dt};
    ops->kv_store(dev, &kv, 1, d[PG_QKV], &b, &s);
    ops->attn_paged(dev, d[PG_OUT], d[PG_QKV], &kv, 1, &b, &s);
}

static void attn_paged_reference(struct test *t, double **v)
{
    const struct attn_shape s = attn_shape_of(t->c->p);
    const int block = t->c->p[7];
    const int64_t kv_width = (int64_t)s.n_kv_heads * s.head_dim;
    const int64_t width = s.n_heads * s.head_dim + 2 * kv_width, layer = t->a[PG_K].n / 2;
    double *pool_k = t->a[PG_K].expect, *pool_v = t->a[PG_V].expect;
    for (int64_t i = 0; i < t->a[PG_K].n; i++) {
        pool_k[i] = v[PG_K][i];
        pool_v[i] = v[PG_V][i];
    }
    for (int row = 0; row < t->batch.n_tokens; row++)
        for (int64_t c = 0; c < kv_width && t->a[PG_SLOTS].i[row] >= 0; c++) {
            const double *from = v[PG_QKV] + row * width + s.n_heads * s.head_dim;
            int64_t to = layer + t->a[PG_SLOTS].i[row] * kv_width + c;
            pool_k[to] = from[c];
            pool_v[to] = from[kv_width + c];
        }
    const double **k = must(malloc((size_t)t->batch.max_context * sizeof *k));
    const double **w = must(malloc((size_t)t->batch.max_context * sizeof *w));
    for (int row = 0; row < t->batch.n_tokens; row++)
        for (int h = 0; h < s.n_heads; h++) {
            double *out = t->a[PG_OUT].expect + ((int64_t)row * s.n_heads + h) * s.head_dim;
            int seq = t->a[PG_SEQ].i[row], n = 0, last = t->a[PG_POSITIONS].i[row];
            if (t->a[PG_SLOTS].i[row] < 0) {
                for (int c = 0; c < s.head_dim; c++) out[c] = 0;
                continue;
            }
            for (int j = 0; j <= last; j++) {
                if (s.window && j <= last - s.window) continue;
                int32_t number = t->a[PG_TABLE].i[seq * t->batch.table_stride + j / block];
                int64_t at = layer + ((int64_t)number * block + j % block) * kv_width +
                             h / (s.n_heads / s.n_kv_heads) * s.head_dim;
                k[n] = pool_k + at;
                w[n++] = pool_v + at;
            }
            attention_row(out, v[PG_QKV] + row * width + h * s.head_dim, k, w, n, &s);
        }
    free(k);
    free(w);
}

static const struct op_def op_attn_paged = {"attn_paged", attn_paged_setup, attn_paged_launch,
                                            attn_paged_reference};

// ---- log-probabilities -------------------------------------------------------------------------

// p: n vocab temperature(tenths)

enum { LP_LOGPROB, LP_LSE, LP_ENTROPY, LP_LOGITS, LP_TARGET };

static void logprob_setup(struct test *t)
{
    const int *p = t->c->p;
    floats(t, "logprob", OUT, F32, p[0], 1);
    floats(t, "lse", OUT, F32, p[0], 1);
    floats(t, "entropy", OUT, F32, p[0], 1);
    float *logits = floats(t, "logits", IN, F32, (int64_t)p[0] * p[1], 4);
    int32_t *target = ints(t, "target", p[0]);
    for (int i = 0; i < p[0]; i++) target[i] = (int32_t)rng_below(&t->rng, (uint32_t)p[1]);
    if (p[0] > 1) logits[p[1] + (target[1] + 1) % p[1]] = -INFINITY; // a forbidden token
}

static void logprob_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    const struct head_args head = {d[LP_LOGITS], d[LP_TARGET], p[0], p[1], (float)p[2] / 10};
    ops->logprob(dev, d[LP_LOGPROB], d[LP_LSE], d[LP_ENTROPY], &head);
}

static double log_sum_exp(const double *z, int n, double temperature, double *ret_entropy)
{
    double max = -INFINITY, sum = 0, weighted = 0;
    for (int i = 0; i < n; i++) max = fmax(max, z[i] / temperature);
    for (int i = 0; i < n; i++) {
        double x = z[i] / temperature - max, e = exp(x);
        sum += e;
        if (e > 0) weighted += e * x;
    }
    if (ret_entropy) *ret_entropy = log(sum) - weighted / sum;
    return max + log(sum);
}

static void logprob_reference(struct test *t, double **v)
{
    const int *p = t->c->p;
    double temperature = (double)((float)p[2] / 10);
    for (int i = 0; i < p[0]; i++) {
        const double *row = v[LP_LOGITS] + (int64_t)i * p[1];
        double lse = log_sum_exp(row, p[1], temperature, &t->a[LP_ENTROPY].expect[i]);
        t->a[LP_LSE].expect[i] = lse;
        t->a[LP_LOGPROB].expect[i] = row[t->a[LP_TARGET].i[i]] / temperature - lse;
    }
}

static const struct op_def op_logprob = {"logprob", logprob_setup, logprob_launch,
                                         logprob_reference};

enum { LB_DLOGITS, LB_DLOGPROB, LB_LOGITS, LB_LSE, LB_TARGET };

static void logprob_back_setup(struct test *t)
{
    const int *p = t->c->p;
    floats(t, "dlogits", OUT, DATA, (int64_t)p[0] * p[1], 1);
    float *dlogprob = floats(t, "dlogprob", IN, F32, p[0], 1);
    float *logits = floats(t, "logits", IN, F32, (int64_t)p[0] * p[1], 3);
    float *lse = floats(t, "lse", IN, F32, p[0], 1);
    int32_t *target = ints(t, "target", p[0]);
    double *z = must(malloc((size_t)p[1] * sizeof *z));
    for (int i = 0; i < p[0]; i++) {
        target[i] = (int32_t)rng_below(&t->rng, (uint32_t)p[1]);
        for (int c = 0; c < p[1]; c++) z[c] = logits[(int64_t)i * p[1] + c];
        lse[i] = (float)log_sum_exp(z, p[1], (double)((float)p[2] / 10), NULL);
    }
    if (p[0] > 2) dlogprob[2] = 0; // a masked token
    free(z);
}

static void logprob_back_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    const struct head_args head = {d[LB_LOGITS], d[LB_TARGET], p[0], p[1], (float)p[2] / 10};
    ops->logprob_back(dev, d[LB_DLOGITS], d[LB_DLOGPROB], d[LB_LSE], &head, t->dt);
}

static double logprob_loss(struct test *t, double **v)
{
    const int *p = t->c->p;
    double temperature = (double)((float)p[2] / 10), loss = 0;
    for (int i = 0; i < p[0]; i++) {
        const double *row = v[LB_LOGITS] + (int64_t)i * p[1];
        loss += v[LB_DLOGPROB][i] * (row[t->a[LB_TARGET].i[i]] / temperature -
                                     log_sum_exp(row, p[1], temperature, NULL));
    }
    return loss;
}

static void logprob_back_reference(struct test *t, double **v)
{
    differentiate(t, v, LB_DLOGITS, LB_LOGITS, false, logprob_loss);
}

static const struct op_def op_logprob_back = {"logprob_back", logprob_back_setup,
                                              logprob_back_launch, logprob_back_reference};

// p: n vocab teacher_vocab temperature * 10, whether without gradient
enum { DI_KL, DI_OVERLAP, DI_DSTUDENT, DI_STUDENT, DI_TEACHER };

static const float distill_scale = 0.37f;

static void distill_setup(struct test *t)
{
    const int *p = t->c->p;
    floats(t, "kl", OUT, F32, p[0], 1);
    floats(t, "overlap", OUT, F32, p[0], 1);
    floats(t, "dstudent", OUT, DATA, (int64_t)p[0] * p[1], 1);
    float *student = floats(t, "student", IN, F32, (int64_t)p[0] * p[1], 1);
    float *teacher = floats(t, "teacher", IN, F32, (int64_t)p[0] * p[2], 2);
    for (int i = 0; i < p[0]; i++) {
        for (int c = 0; c < p[1]; c++)
            student[(int64_t)i * p[1] + c] += teacher[(int64_t)i * p[2] + c];
        // of padding rows of an embedding anything may come
        for (int c = p[1]; c < p[2]; c++) teacher[(int64_t)i * p[2] + c] = c % 2 ? 30 : NAN;
    }
    if (p[0] > 1) teacher[p[2] + 3] = -INFINITY; // a forbidden token
}

static void distill_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    const struct distill_args args = {d[DI_STUDENT], d[DI_TEACHER],    p[0],         p[1],
                                      p[2],          (float)p[3] / 10, distill_scale};
    ops->distill(dev, d[DI_KL], d[DI_OVERLAP], p[4] ? NULL : d[DI_DSTUDENT], &args, t->dt);
}

static double divergence(const double *p, double p_lse, const double *q, double q_lse, int n,
                         double temperature, double *ret_overlap)
{
    double kl = 0, overlap = 0;
    for (int i = 0; i < n; i++) {
        double log_p = p[i] / temperature - p_lse, log_q = q[i] / temperature - q_lse;
        if (exp(log_p) > 0) kl += exp(log_p) * (log_p - log_q);
        overlap += fmin(exp(log_p), exp(log_q));
    }
    if (ret_overlap) *ret_overlap = overlap;
    return kl;
}

static double distill_loss(struct test *t, double **v)
{
    const int *p = t->c->p;
    double temperature = (double)((float)p[3] / 10), loss = 0;
    for (int i = 0; i < p[0]; i++) {
        const double *teacher = v[DI_TEACHER] + (int64_t)i * p[2];
        const double *student = v[DI_STUDENT] + (int64_t)i * p[1];
        double kl = divergence(teacher, log_sum_exp(teacher, p[1], temperature, NULL), student,
                               log_sum_exp(student, p[1], temperature, NULL), p[1], temperature,
                               &t->a[DI_OVERLAP].expect[i]);
        t->a[DI_KL].expect[i] = kl;
        loss += (double)distill_scale * kl;
    }
    return loss;
}

static void distill_reference(struct test *t, double **v)
{
    if (!t->c->p[4]) differentiate(t, v, DI_DSTUDENT, DI_STUDENT, false, distill_loss);
    distill_loss(t, v); // leaves the values at the inputs themselves
}

static const struct op_def op_distill = {"distill", distill_setup, distill_launch,
                                         distill_reference};

// ---- optimizer ---------------------------------------------------------------------------------
// sum_squares: p: n.  adamw: p: n step

static void squares_setup(struct test *t)
{
    array_new(t, "out", OUT, F64, 1);
    floats(t, "x", IN, F32, t->c->p[0], 1);
}

static void squares_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    ops->sum_squares(dev, d[0], d[1], t->c->p[0]);
}

static void squares_reference(struct test *t, double **v)
{
    double sum = 0;
    for (int i = 0; i < t->c->p[0]; i++) sum += v[1][i] * v[1][i];
    t->a[0].expect[0] = sum;
}

static const struct op_def op_squares = {"sum_squares", squares_setup, squares_launch,
                                         squares_reference};

static struct adamw adamw_of(int step)
{
    struct adamw a = {
        .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
    a.step = (uint32_t)step;
    a.bias_correction1 = (float)(1 - pow((double)a.beta1, step));
    a.bias_correction2 = (float)(1 - pow((double)a.beta2, step));
    return a;
}

static void adamw_setup(struct test *t)
{
    int n = t->c->p[0];
    floats(t, "w", INOUT, F32, n, 1);
    floats(t, "m", INOUT, F32, n, 0.1f);
    float *v = floats(t, "v", INOUT, F32, n, 0.1f);
    for (int i = 0; i < n; i++) v[i] = v[i] * v[i];
    floats(t, "grad", IN, F32, n, 0.5f);
    floats(t, "grad_scale", IN, F32, 1, 1)[0] = 0.7f;
}

static void adamw_launch(struct test *t, struct device *dev, const struct ops *ops, void **d)
{
    struct adamw a = adamw_of(t->c->p[1]);
    struct moments moments = {MOMENTS_F32, d[1], d[2], NULL, NULL};
    a.grad_scale = d[4];
    ops->adamw(dev, d[0], NULL, &moments, d[3], t->c->p[0], &a, DT_F32);
}

static void adamw_reference(struct test *t, double **v)
{
    struct adamw a = adamw_of(t->c->p[1]);
    for (int i = 0; i < t->c->p[0]; i++) {
        double g = v[3][i] * v[4][0], p = v[0][i] - (double)a.lr * a.weight_decay * v[0][i];
        double m = a.beta1 * v[1][i] + (1 - (double)a.beta1) * g;
        double s = a.beta2 * v[2][i] + (1 - (double)a.beta2) * g * g;
        double step = a.lr / a.bias_correction1 * m / (sqrt(s) / sqrt(a.bias_correction2) + a.eps);
        t->a[0].expect[i] = p - step;
        t->a[1].expect[i] = m;
        t->a[2].expect[i] = s;
    }
}

static const struct op_def op_adamw = {"adamw", adamw_setup, adamw_launch, adamw_reference};

// ---- the table ---------------------------------------------------------------------------------

static const struct op_case cases[] = {
    {&op_matmul, "m1 n7 k5 NT", {1, 7, 5, 0, 1, 0, 0, 0}, false},
    {&op_matmul, "m1 n130 k64 NT bias", {1, 130, 64, 0, 1, 0, 1, 0}, false},
    {&op_matmul, "m2 n65 k33 NT add", {2, 65, 33, 0, 1, 1, 0, 0}, false},
    {&op_matmul, "m3 n66 k100 NT bias out_f32", {3, 66, 100, 0, 1, 0, 1, 1}, false},
    {&op_matmul, "m4 n31 k17 NT bias", {4, 31, 17, 0, 1, 0, 1, 0}, false},
    {&op_matmul, "m5 n64 k96 NT bias", {5, 64, 96, 0, 1, 0, 1, 0}, false},
    {&op_matmul, "m37 n53 k71 NN", {37, 53, 71, 0, 0, 0, 0, 0}, false},
    {&op_matmul, "m37 n53 k71 TN add", {37, 53, 71, 1, 0, 1, 0, 0}, false},
    {&op_matmul, "m37 n53 k71 TT", {37, 53, 71, 1, 1, 0, 0, 0}, false},
    {&op_matmul, "m37 n53 k71 NT add bias", {37, 53, 71, 0, 1, 1, 1, 0}, false},
    {&op_matmul, "m128 n64 k256 TN add out_f32", {128, 64, 256, 1, 0, 1, 0, 1}, false},
    {&op_matmul, "m129 n384 k128 NN add out_f32", {129, 384, 128, 0, 0, 1, 0, 1}, false},
    {&op_matmul, "m256 n512 k1024 NT", {256, 512, 1024, 0, 1, 0, 0, 0}, false},
    {&op_matmul, "m1 n1000 k2048 NT", {1, 1000, 2048, 0, 1, 0, 0, 0}, false},
    {&op_matmul, "m515 n2049 k1537 NT out_f32", {515, 2049, 1537, 0, 1, 0, 0, 1}, true},
    {&op_matmul, "m1536 n1024 k513 TN out_f32", {1536, 1024, 513, 1, 0, 0, 0, 1}, true},
    {&op_matmul, "m16 n8960 k1536 NT bias", {16, 8960, 1536, 0, 1, 0, 1, 0}, true},
    {&op_matmul, "m3 n8961 k64 NT add", {3, 8961, 64, 0, 1, 1, 0, 0}, true},
    {&op_matmul, "m9 n1536 k8960 NT add", {9, 1536, 8960, 0, 1, 1, 0, 0}, true},
    {&op_matmul, "m7 n301 k4096 NT add bias out_f32", {7, 301, 4096, 0, 1, 1, 1, 1}, true},
    {&op_matmul, "m27 n2049 k1568 NT bias", {27, 2049, 1568, 0, 1, 0, 1, 0}, true},

    {&op_gather, "n9 width33 of 20", {9, 33, 20}, false},
    {&op_gather, "n300 width1536 of 1000", {300, 1536, 1000}, false},
    {&op_scatter, "n50 width33 of 7", {50, 33, 7}, false},
    {&op_scatter, "n1000 width256 of 300", {1000, 256, 300}, false},
    {&op_scatter, "n5 width8 of 1000", {5, 8, 1000}, false},
    {&op_add, "n7", {7}, false},
    {&op_add, "n100003", {100003}, false},
    {&op_column, "5 x 3", {5, 3}, false},
    {&op_column, "333 x 517", {333, 517}, false},
    {&op_column, "1 x 2048", {1, 2048}, false},

    {&op_norm, "rms 5 x 7", {NORM_RMS, 5, 7, 1, 0, 0, 0, 0}, false},
    {&op_norm, "rms 67 x 1536", {NORM_RMS, 67, 1536, 1, 0, 0, 0, 0}, false},
    {&op_norm, "rms in place 33 x 896", {NORM_RMS, 33, 896, 1, 0, 0, 0, 1}, false},
    {&op_norm, "rms heads 9 x 6 x 64", {NORM_RMS, 9, 64, 6, 0, 128, 0, 0}, false},
    {&op_norm, "rms heads in place 9 x 3 x 128", {NORM_RMS, 9, 128, 3, 0, 64, 0, 1}, false},
    {&op_norm, "rms+1 11 x 100", {NORM_RMS_PLUS_ONE, 11, 100, 1, 0, 0, 0, 0}, false},
    {&op_norm, "layer 13 x 97 bias", {NORM_LAYER, 13, 97, 1, 1, 0, 0, 0}, false},
    {&op_norm, "layer 13 x 1024", {NORM_LAYER, 13, 1024, 1, 0, 0, 0, 0}, false},
    {&op_norm, "rms 2048 x 5001", {NORM_RMS, 2048, 5001, 1, 0, 0, 0, 0}, true},
    {&op_norm_back, "rms 5 x 7", {NORM_RMS, 5, 7, 1, 0, 0, 0, 0}, false},
    {&op_norm_back, "rms add 37 x 96", {NORM_RMS, 37, 96, 1, 0, 0, 1, 0}, false},
    {&op_norm_back, "rms in place 6 x 130", {NORM_RMS, 6, 130, 1, 0, 0, 0, 1}, false},
    {&op_norm_back, "rms heads in place 4 x 5 x 64", {NORM_RMS, 4, 64, 5, 0, 96, 0, 1}, false},
    {&op_norm_back, "rms+1 7 x 40", {NORM_RMS_PLUS_ONE, 7, 40, 1, 0, 0, 0, 0}, false},
    {&op_norm_back, "layer 7 x 33 bias", {NORM_LAYER, 7, 33, 1, 1, 0, 0, 0}, false},
    {&op_norm_back, "layer add 9 x 64", {NORM_LAYER, 9, 64, 1, 0, 0, 1, 0}, false},
    {&op_norm_back, "rms 515 x 1536", {NORM_RMS, 515, 1536, 1, 0, 0, 0, 0}, true},
    {&op_norm_back, "rms heads 700 x 12 x 128", {NORM_RMS, 700, 128, 12, 0, 512, 0, 1}, true},

    {&op_rope, "5 rows 3 x 8", {5, 3, 8, 8, 8, 1}, false},
    {&op_rope, "33 rows 6 x 64 partial 16", {33, 6, 64, 16, 128, 1}, false},
    {&op_rope, "17 rows 14 x 128 inverse", {17, 14, 128, 128, 256, -1}, false},

    {&op_act, "silu gated 5 x 7", {5, 7, ACT_SILU, 1}, false},
    {&op_act, "silu gated 33 x 513", {33, 513, ACT_SILU, 1}, false},
    {&op_act, "silu 9 x 100", {9, 100, ACT_SILU, 0}, false},
    {&op_act, "gelu_tanh gated 9 x 100", {9, 100, ACT_GELU_TANH, 1}, false},
    {&op_act, "gelu_tanh 9 x 100", {9, 100, ACT_GELU_TANH, 0}, false},
    {&op_act, "gelu 9 x 100", {9, 100, ACT_GELU, 0}, false},
    {&op_act, "gelu gated 3 x 65", {3, 65, ACT_GELU, 1}, false},
    {&op_act, "silu gated 200 x 4096", {200, 4096, ACT_SILU, 1}, true},
    {&op_act_back, "silu gated 5 x 7", {5, 7, ACT_SILU, 1}, false},
    {&op_act_back, "silu 3 x 33", {3, 33, ACT_SILU, 0}, false},
    {&op_act_back, "gelu_tanh gated 3 x 17", {3, 17, ACT_GELU_TANH, 1}, false},
    {&op_act_back, "gelu_tanh 3 x 17", {3, 17, ACT_GELU_TANH, 0}, false},
    {&op_act_back, "gelu gated 3 x 17", {3, 17, ACT_GELU, 1}, false},
    {&op_act_back, "gelu 3 x 17", {3, 17, ACT_GELU, 0}, false},
    {&op_act_back, "silu gated 301 x 1001", {301, 1001, ACT_SILU, 1}, true},
    {&op_softcap, "n1001", {1001, 30}, false},
    {&op_softcap_back, "n77", {77, 30}, false},

    {&op_route, "1 row, 2 of 8", {1, 8, 2, ANY}, false},
    {&op_route, "37 rows, 2 of 8", {37, 8, 2, ANY}, false},
    {&op_route, "37 rows, 3 of 6 ties", {37, 6, 3, TIES}, false},
    {&op_route, "100 rows, 1 of 8 all to one", {100, 8, 1, ONE}, false},
    {&op_route, "67 rows, 2 of 8 some unused", {67, 8, 2, FEW}, false},
    {&op_route, "9 rows, 7 of 7 ties", {9, 7, 7, TIES}, false},
    {&op_route, "5 rows, 1 of 1", {5, 1, 1, ANY}, false},
    {&op_route, "130 rows, 6 of 64", {130, 64, 6, ANY}, false},
    {&op_route, "33 rows, 40 of 100 ties", {33, 100, 40, TIES}, false},
    {&op_route, "700 rows, 2 of 8 ties", {700, 8, 2, TIES}, false},
    {&op_route, "20001 rows, 2 of 8", {20001, 8, 2, ANY}, true},
    {&op_route, "8191 rows, 3 of 6 ties", {8191, 6, 3, TIES}, true},
    {&op_route, "3000 rows, 8 of 1000", {3000, 1000, 8, ANY}, true},
    {&op_combine, "1 row, 2 x 33", {1, 2, 33, 1, 0}, false},
    {&op_combine, "19 rows, 3 x 100 add", {19, 3, 100, 1, 1}, false},
    {&op_combine, "19 rows, 2 x 128 unweighted add", {19, 2, 128, 0, 1}, false},
    {&op_combine, "5 rows, 8 x 2056", {5, 8, 2056, 1, 0}, false},
    {&op_combine, "700 rows, 2 x 4096 add", {700, 2, 4096, 1, 1}, true},
    {&op_moe_back, "3 rows, 2 of 4 width 9", {3, 4, 2, ANY, 9}, false},
    {&op_moe_back, "12 rows, 2 of 8 width 64", {12, 8, 2, ANY, 64}, false},
    {&op_moe_back, "11 rows, 3 of 6 width 40", {11, 6, 3, FEW, 40}, false},
    {&op_moe_back, "7 rows, 5 of 5 width 33", {7, 5, 5, TIES, 33}, false},
    {&op_moe_back, "6 rows, 2 of 3 width 17", {6, 3, 2, ANY, 17}, false},
    {&op_moe_back, "4 rows, 33 of 70 width 8", {4, 70, 33, ANY, 8}, false},
    {&op_moe_back, "1001 rows, 2 of 8 width 1536", {1001, 8, 2, ANY, 1536}, true},
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
    {&op_experts_back, "m5 n3 k4 e2", {5, 3, 4, 2, SPREAD}, false},
    {&op_experts_back, "m37 n17 k13 e6 gaps", {37, 17, 13, 6, GAPS}, false},
    {&op_experts_back, "m40 n24 k40 e4 last", {40, 24, 40, 4, LAST}, false},
    {&op_experts_back, "m70 n40 k16 e3 uneven", {70, 40, 16, 3, UNEVEN}, false},
    {&op_experts_back, "m1999 n1160 k1032 e8", {1999, 1160, 1032, 8, UNEVEN}, true},
    {&op_experts_back, "m300 n517 k333 e6", {300, 517, 333, 6, GAPS}, true},

    // heads kv_heads head_dim layout scale window softcap
    {&op_attn_packed, "h2/2 d8 one", {2, 2, 8, 0, 1, 0, 0}, false},
    {&op_attn_packed, "h4/2 d16 three", {4, 2, 16, 1, 1, 0, 0}, false},
    {&op_attn_packed, "h6/2 d32 shared", {6, 2, 32, 2, 1, 0, 0}, false},
    {&op_attn_packed, "h4/1 d64 shared x5", {4, 1, 64, 2, 5, 0, 0}, false},
    {&op_attn_packed, "h2/1 d80 shared x3 window", {2, 1, 80, 2, 3, 7, 0}, false},
    {&op_attn_packed, "h3/3 d96 shared x2", {3, 3, 96, 2, 2, 0, 0}, false},
    {&op_attn_packed, "h7/1 d128 shared x4", {7, 1, 128, 2, 4, 0, 0}, false},
    {&op_attn_packed, "h2/1 d256 shared softcap", {2, 1, 256, 2, 1, 0, 2}, false},
    {&op_attn_packed, "h14/2 d64 three x11 window softcap", {14, 2, 64, 1, 11, 20, 5}, false},
    {&op_attn_packed, "h12/2 d128 shared x40", {12, 2, 128, 2, 40, 0, 0}, true},
    {&op_attn_packed, "h8/2 d64 one x100", {8, 2, 64, 0, 100, 0, 0}, true},
    {&op_attn_back, "h2/2 d8 one", {2, 2, 8, 0, 1, 0, 0}, false},
    {&op_attn_back, "h4/2 d16 three", {4, 2, 16, 1, 1, 0, 0}, false},
    {&op_attn_back, "h6/2 d32 shared", {6, 2, 32, 2, 1, 0, 0}, false},
    {&op_attn_back, "h4/1 d64 shared window", {4, 1, 64, 2, 1, 5, 0}, false},
    {&op_attn_back, "h2/1 d80 shared softcap", {2, 1, 80, 2, 1, 0, 2}, false},
    {&op_attn_back, "h3/1 d96 shared window softcap", {3, 1, 96, 2, 1, 6, 2}, false},
    {&op_attn_back, "h6/3 d128 three", {6, 3, 128, 1, 1, 0, 0}, false},
    {&op_attn_back, "h2/1 d256 shared", {2, 1, 256, 2, 1, 0, 0}, false},
    {&op_attn_back, "h12/2 d128 shared x20", {12, 2, 128, 2, 20, 0, 0}, true},
    {&op_attn_back, "h14/2 d64 one x50", {14, 2, 64, 0, 50, 0, 0}, true},
    {&op_attn_back, "h4/4 d64 shared x9 window", {4, 4, 64, 2, 9, 30, 0}, true},
    // ... and block_size; layout 0 decodes, 1 prefills in chunks
    {&op_attn_paged, "decode h2/2 d8 b4", {2, 2, 8, 0, 1, 0, 0, 4}, false},
    {&op_attn_paged, "decode h14/2 d64 b16", {14, 2, 64, 0, 3, 0, 0, 16}, false},
    {&op_attn_paged, "decode h4/1 d80 b16 window", {4, 1, 80, 0, 2, 9, 0, 16}, false},
    {&op_attn_paged, "decode h12/2 d128 b32", {12, 2, 128, 0, 7, 0, 0, 32}, false},
    {&op_attn_paged, "decode h2/1 d256 b16 softcap", {2, 1, 256, 0, 2, 0, 3, 16}, false},
    {&op_attn_paged, "chunks h4/2 d16 b4", {4, 2, 16, 1, 1, 0, 0, 4}, false},
    {&op_attn_paged, "chunks h6/3 d32 b8 window", {6, 3, 32, 1, 2, 11, 0, 8}, false},
    {&op_attn_paged, "chunks h8/2 d64 b16", {8, 2, 64, 1, 3, 0, 0, 16}, false},
    {&op_attn_paged, "chunks h3/1 d96 b16", {3, 1, 96, 1, 2, 0, 0, 16}, false},
    {&op_attn_paged, "chunks h7/1 d128 b16 softcap", {7, 1, 128, 1, 2, 0, 4, 16}, false},
    {&op_attn_paged, "decode h12/2 d128 b16 long", {12, 2, 128, 0, 120, 0, 0, 16}, true},
    {&op_attn_paged, "chunks h12/2 d128 b16 long", {12, 2, 128, 1, 20, 0, 0, 16}, true},

    {&op_logprob, "n4 vocab11", {4, 11, 10}, false},
    {&op_logprob, "n3 vocab50257 t0.7", {3, 50257, 7}, false},
    {&op_logprob, "n2 vocab151936", {2, 151936, 10}, false},
    {&op_logprob_back, "n4 vocab11", {4, 11, 10}, false},
    {&op_logprob_back, "n3 vocab1003 t0.7", {3, 1003, 7}, false},
    {&op_logprob_back, "n33 vocab50257", {33, 50257, 10}, true},
    {&op_distill, "n4 vocab11", {4, 11, 11, 10, 0}, false},
    {&op_distill, "n3 vocab44/64 t1.5", {3, 44, 64, 15, 0}, false},
    {&op_distill, "n3 vocab1003/1024 t0.7", {3, 1003, 1024, 7, 0}, false},
    {&op_distill, "n3 vocab1003 values", {3, 1003, 1003, 10, 1}, false},
    {&op_distill, "n2 vocab151936 values", {2, 151936, 151936, 10, 1}, false},
    {&op_distill, "n33 vocab50257/50304", {33, 50257, 50304, 10, 0}, true},
    {&op_distill, "n5 vocab151936/152064 t0.7", {5, 151936, 152064, 7, 0}, true},
    {&op_squares, "n1", {1}, false},
    {&op_squares, "n1000003", {1000003}, false},
    {&op_adamw, "n5 step 1", {5, 1}, false},
    {&op_adamw, "n100001 step 10", {100001, 10}, false},
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

// Worst errors of one operation, for its line.
struct summary {
    double reference, cuda_f32, cuda_bf16;
    int n, failed;
};

static void free_results(double **results)
{
    for (int k = 0; k < MAX_ARRAYS; k++) free(results[k]);
}

static void against_reference(struct test *t, struct summary *sum)
{
    double *got[MAX_ARRAYS] = {0}, *want[MAX_ARRAYS] = {0}, *v[MAX_ARRAYS] = {0};
    for (int k = 0; k < t->n_arrays; k++) {
        want[k] = t->a[k].expect;
        if (t->a[k].kind == I32) continue;
        v[k] = must(malloc(((size_t)t->a[k].n + 1) * sizeof(double)));
        for (int64_t i = 0; i < t->a[k].n; i++) v[k][i] = t->a[k].f[i];
    }
    bool good = run_on(t, cpu, DT_F32, got);
    t->c->op->reference(t, v);
    sum->reference = fmax(sum->reference, compare(t, "cpu f32 against reference", got, want,
                                                  TOLERANCE_REFERENCE, true, &good));
    sum->failed += !good;
    free_results(got);
    free_results(v);
}

static double against_cuda(struct test *t, enum dtype dt, struct summary *sum)
{
    double *got[MAX_ARRAYS] = {0}, *want[MAX_ARRAYS] = {0};
    if (dt == DT_BF16) round_to_bf16(t);
    bool good = run_on(t, cpu, DT_F32, want);
    good &= run_on(t, cuda, dt, got);
    double error = compare(t, dt == DT_F32 ? "cuda f32 against cpu" : "cuda bf16 against cpu", got,
                           want, dt == DT_F32 ? TOLERANCE_F32 : TOLERANCE_BF16, false, &good);
    sum->failed += !good;
    free_results(got);
    free_results(want);
    return error;
}

static const char *filter = "";

static void test_table(void **state)
{
    (void)state;
    int failed = 0;
    for (int i = 0; i < N_CASES;) {
        const struct op_def *op = cases[i].op;
        struct summary sum = {0};
        for (; i < N_CASES && cases[i].op == op; i++) {
            if (!strstr(op->name, filter) || (cases[i].big && !cuda)) continue;
            struct test t = {.c = &cases[i]};
            rng_init(&t.rng, 1234, (uint64_t)i);
            op->setup(&t);
            sum.n++;
            if (!cases[i].big) against_reference(&t, &sum);
            if (cuda) {
                sum.cuda_f32 = fmax(sum.cuda_f32, against_cuda(&t, DT_F32, &sum));
                sum.cuda_bf16 = fmax(sum.cuda_bf16, against_cuda(&t, DT_BF16, &sum));
            }
            test_release(&t);
        }
        if (sum.n == 0) continue;
        printf("%-18s %2d shapes  cpu f32 %.1e", op->name, sum.n, sum.reference);
        if (cuda) printf("  cuda f32 %.1e  cuda bf16 %.1e", sum.cuda_f32, sum.cuda_bf16);
        printf("  %s\n", sum.failed ? "FAIL" : "ok");
        fflush(stdout);
        failed += sum.failed;
    }
    if (failed) fail_msg("%d comparisons failed; the lines above name them", failed);
}

// ---- operations with tests of their own --------------------------------------------------------

// Runs `body` on the CPU and, where there is one, on CUDA.
static void on_each_device(const char *op, void (*body)(struct device *dev))
{
    if (!strstr(op, filter)) return;
    body(cpu);
    printf("%-18s on cpu ok\n", op);
    if (!cuda) return;
    body(cuda);
    printf("%-18s on %s ok\n", op, device_spec(cuda));
}

static void *to_device(struct device *dev, const void *host, size_t bytes)
{
    void *d;
    if (device_alloc(dev, bytes, &d) != ST_OK) fail_msg("%s", status_message());
    if (host)
        device_copy_in(dev, d, host, bytes);
    else
        device_fill(dev, d, 0xFF, bytes);
    sync_or_fail(dev);
    return d;
}

static void from_device(struct device *dev, void *host, const void *d, size_t bytes)
{
    device_copy_out(dev, host, d, bytes);
    sync_or_fail(dev);
}

// drafts (n) or NULL, whose rows are of draft_logits (n, draft_vocab).
static void judge_rows(struct device *dev, struct sample_result *result, const float *logits,
                       const struct sample_params *params, const struct sample_draft *drafts,
                       const float *draft_logits, int n, int vocab, int draft_vocab)
{
    float *d_logits = to_device(dev, logits, (size_t)n * vocab * sizeof *logits);
    struct sample_params *d_params = to_device(dev, params, (size_t)n * sizeof *params);
    struct sample_result *d_result = to_device(dev, NULL, (size_t)n * sizeof *result);
    struct sample_draft *d_drafts = NULL;
    float *d_draft_logits = NULL;
    if (drafts) {
        d_drafts = to_device(dev, drafts, (size_t)n * sizeof *drafts);
        d_draft_logits = to_device(dev, draft_logits, (size_t)n * draft_vocab * sizeof(float));
    }
    const struct sample_args args = {d_logits, d_params,       n,          vocab,
                                     d_drafts, d_draft_logits, draft_vocab};
    device_ops(dev)->sample(dev, d_result, &args);
    from_device(dev, result, d_result, (size_t)n * sizeof *result);
    void *all[] = {d_logits, d_params, d_result, d_drafts, d_draft_logits};
    for (int k = 0; k < (drafts ? 5 : 3); k++) device_release(dev, all[k]);
}

static void sample_rows(struct device *dev, struct sample_result *result, const float *logits,
                        const struct sample_params *params, int n, int vocab)
{
    judge_rows(dev, result, logits, params, NULL, NULL, n, vocab, 0);
}

static void sample_distribution(struct device *dev)
{
    enum { VOCAB = 13, DRAWS = 20000 };
    static const struct sample_params settings[] = {
        {1.0f, 1, 0, 0, 7, 0},         {0.7f, 1, 0, 0, 7, 0},     {1.0f, 1, 0, 4, 7, 0},
        {1.0f, 0.6f, 0, 0, 7, 0},      {1.0f, 1, 0.15f, 0, 7, 0}, {1.3f, 0.8f, 0.1f, 6, 7, 0},
        {1.0f, 0.9f, 0, 5, 7, 0},      {1.0f, 0, 0, 0, 7, 0},     {1.0f, 1, 0, 1, 7, 0},
        {0.5f, 0.95f, 0.02f, 8, 7, 0},
    };
    // with ties at the places where cuts fall
    static const float row[VOCAB] = {0.1f, 2.0f, -1.5f, 1.0f, 1.0f, 1.0f,     0.5f,
                                     3.0f, 0.5f, -4.0f, 2.0f, 0.2f, -INFINITY};
    float *logits = must(malloc(sizeof(float) * VOCAB * DRAWS));
    struct sample_params *params = must(malloc(sizeof *params * DRAWS));
    struct sample_result *result = must(malloc(sizeof *result * DRAWS));
    for (size_t k = 0; k < sizeof settings / sizeof settings[0]; k++) {
        for (int i = 0; i < DRAWS; i++) {
            memcpy(logits + (size_t)i * VOCAB, row, sizeof row);
            params[i] = settings[k];
            params[i].position = (uint64_t)i;
        }
        sample_rows(dev, result, logits, params, DRAWS, VOCAB);
        bool kept[VOCAB];
        double all, mass, chi = 0, t = settings[k].temperature;
        cut_formula(row, VOCAB, &settings[k], kept, &all, &mass);
        int count[VOCAB] = {0}, free_cells = -1;
        for (int i = 0; i < DRAWS; i++) {
            const struct sample_result *r = &result[i];
            assert_in_range(r->token, 0, VOCAB - 1);
            if (!kept[r->token]) fail_msg("setting %zu drew token %d, which is cut", k, r->token);
            count[r->token]++;
            double z = row[r->token] / t - 3.0 / t;
            if (fabs(r->logprob - (z - log(all))) > 1e-5 ||
                fabs(r->processed_logprob - (z - log(mass))) > 1e-5 ||
                fabs(r->retained_mass - mass / all) > 1e-5)
                fail_msg("setting %zu token %d: logprob %.7g cut %.7g mass %.7g; want %.7g %.7g "
                         "%.7g",
                         k, r->token, r->logprob, r->processed_logprob, r->retained_mass,
                         z - log(all), z - log(mass), mass / all);
        }
        for (int c = 0; c < VOCAB; c++) {
            double expected = DRAWS * exp(row[c] / t - 3.0 / t) / mass;
            if (!kept[c] || expected == 0) continue;
            chi += (count[c] - expected) * (count[c] - expected) / expected;
            free_cells++;
        }
        // mean + 5 standard deviations of chi-square; the draws are fixed by their seed
        double limit = free_cells + 5 * sqrt(2.0 * free_cells) + 1e-9;
        if (chi > limit)
            fail_msg("setting %zu: chi-square %.1f over %d cells (limit %.1f)", k, chi, free_cells,
                     limit);
    }
    free(logits);
    free(params);
    free(result);
}

// Every draw of a large vocabulary against the formula in double.
static void sample_large(struct device *dev)
{
    enum { VOCAB = 5003, ROWS = 24 };
    struct rng rng;
    rng_init(&rng, 99, 0);
    float *logits = must(malloc(sizeof(float) * VOCAB * ROWS));
    struct sample_params params[ROWS];
    struct sample_result result[ROWS];
    bool *kept = must(malloc(VOCAB));
    for (int i = 0; i < VOCAB * ROWS; i++)
        logits[i] = (i / VOCAB % 3 == 0 ? 0.1f : 4.0f) * rng_normal(&rng);
    for (int i = 0; i < ROWS; i++)
        params[i] = (struct sample_params){.temperature = i % 5 == 4 ? 0 : 0.6f + 0.1f * (i % 7),
                                           .top_p = i % 4 == 1 ? 0.9f : 1,
                                           .min_p = i % 6 == 3 ? 0.05f : 0,
                                           .top_k = i % 4 >= 2 ? 50 * (i % 4) : 0,
                                           .seed = rng_u64(&rng),
                                           .position = ((uint64_t)i << 33) + 5};
    sample_rows(dev, result, logits, params, ROWS, VOCAB);
    for (int i = 0; i < ROWS; i++) {
        const float *row = logits + (size_t)i * VOCAB;
        double all, mass, best = -INFINITY, second = -INFINITY, max = -INFINITY;
        double t = params[i].temperature > 0 ? (double)params[i].temperature : 1;
        int token = 0;
        cut_formula(row, VOCAB, &params[i], kept, &all, &mass);
        for (int c = 0; c < VOCAB; c++) {
            max = fmax(max, row[c] / t);
            if (!kept[c]) continue;
            double noise = params[i].temperature > 0 ? noise_formula(&params[i], c) : 0;
            double score = row[c] / t + noise;
            if (score > best) {
                second = best;
                best = score;
                token = c;
            } else {
                second = fmax(second, score);
            }
        }
        if (result[i].token != token && best - second > 1e-5)
            fail_msg("row %d: token %d, want %d (ahead by %.3g)", i, result[i].token, token,
                     best - second);
        double z = row[result[i].token] / t - max;
        if (fabs(result[i].logprob - (z - log(all))) > 2e-5 ||
            fabs(result[i].processed_logprob - (z - log(mass))) > 2e-5 ||
            fabs(result[i].retained_mass - mass / all) > 1e-5)
            fail_msg("row %d: logprob %.7g cut %.7g mass %.7g; want %.7g %.7g %.7g", i,
                     result[i].logprob, result[i].processed_logprob, result[i].retained_mass,
                     z - log(all), z - log(mass), mass / all);
    }
    free(logits);
    free(kept);
}

static void sample_greedy(struct device *dev)
{
    enum { VOCAB = 1001 };
    float logits[VOCAB];
    struct sample_params params = {.temperature = 0, .top_p = 1};
    struct sample_result result;
    for (int i = 0; i < VOCAB; i++) logits[i] = -1;
    logits[300] = logits[7] = logits[999] = 2.5f; // equal: the first wins
    sample_rows(dev, &result, logits, &params, 1, VOCAB);
    assert_int_equal(result.token, 7);
    double want = -log(3 + (VOCAB - 3) * exp(-3.5));
    assert_true(fabs(result.logprob - want) < 1e-5);
    assert_true(fabs(result.retained_mass - 1) < 1e-6);
}

// A draft at one row of the test below.
struct judged {
    const float *logits;
    const double *p, *q; // (vocab), q 0 from the draft's vocabulary on
    const struct sample_params *params;
    int vocab, draft;
};

/* The token that the rule gives in double, and how far the decision was from another: the distance
 * of u q(d) from p(d) relative to the larger, and the winner's lead over the next. */
static int judge_formula(const struct judged *j, bool *ret_accepted, double *ret_margin)
{
    double bar = acceptance_formula(j->params) * j->q[j->draft], p = j->p[j->draft];
    double margin = fabs(bar - p) / fmax(bar, p);
    int token = j->draft;
    *ret_accepted = bar < p;
    if (bar >= p) {
        double best = -INFINITY, second = -INFINITY;
        for (int t = 0; t < j->vocab; t++) {
            if (j->p[t] <= j->q[t]) continue;
            double score = log(j->p[t] - j->q[t]) + noise_formula(j->params, t);
            if (score > best) {
                second = best;
                best = score;
                token = t;
            } else {
                second = fmax(second, score);
            }
        }
        margin = fmin(margin, best - second);
    }
    *ret_margin = margin;
    return token;
}

// Every judgement over a large vocabulary against the rule in double; p and q overlap by a half or
// so. Draft rows are taken in another order than the rows they are for.
static void sample_drafts(struct device *dev, int vocab, int draft_vocab)
{
    enum { ROWS = 48 };
    struct rng rng;
    rng_init(&rng, 77, (uint64_t)draft_vocab);
    float *logits = must(calloc((size_t)vocab * ROWS, sizeof *logits));
    float *draft_logits = must(calloc((size_t)draft_vocab * ROWS, sizeof *draft_logits));
    double *p = must(calloc((size_t)vocab * 2, sizeof *p)), *q = p + vocab;
    struct sample_params params[ROWS], draft_params[ROWS];
    struct sample_draft drafts[ROWS];
    struct sample_result result[ROWS], plain[ROWS];
    for (int i = 0; i < ROWS; i++) {
        float *row = logits + (size_t)i * vocab;
        float *draft_row = draft_logits + (size_t)(ROWS - 1 - i) * draft_vocab;
        for (int c = 0; c < vocab; c++) {
            row[c] = (i % 3 == 0 ? 0.1f : 4.0f) * rng_normal(&rng);
            if (c < draft_vocab) draft_row[c] = row[c] + (i % 5 + 0.2f) * rng_normal(&rng);
        }
        params[i] = (struct sample_params){.temperature = i % 12 == 11 ? 0 : 0.6f + 0.1f * (i % 7),
                                           .top_p = i % 4 == 1 ? 0.9f : 1,
                                           .min_p = i % 6 == 3 ? 0.05f : 0,
                                           .top_k = i % 4 >= 2 ? 50 * (i % 4) : 0,
                                           .seed = rng_u64(&rng),
                                           .position = ((uint64_t)i << 33) + 5};
        draft_params[ROWS - 1 - i] = params[i];
        draft_params[ROWS - 1 - i].seed = rng_u64(&rng);
    }
    sample_rows(dev, result, draft_logits, draft_params, ROWS, draft_vocab);
    sample_rows(dev, plain, logits, params, ROWS, vocab);
    for (int i = 0; i < ROWS; i++)
        drafts[i] =
            (struct sample_draft){i % 8 == 7 ? -1 : result[ROWS - 1 - i].token, ROWS - 1 - i};
    judge_rows(dev, result, logits, params, drafts, draft_logits, ROWS, vocab, draft_vocab);
    int n_accepted = 0, n_refused = 0;
    for (int i = 0; i < ROWS; i++) {
        const struct sample_result *r = &result[i];
        if (drafts[i].token < 0 || params[i].temperature == 0) {
            if (memcmp(r, &plain[i], sizeof *r) != 0)
                fail_msg("row %d: token %d; without drafts %d", i, r->token, plain[i].token);
            continue;
        }
        const float *row = logits + (size_t)i * vocab;
        distribution_formula(row, vocab, &params[i], p);
        memset(q, 0, (size_t)vocab * sizeof *q);
        distribution_formula(draft_logits + (size_t)drafts[i].row * draft_vocab, draft_vocab,
                             &params[i], q);
        struct judged judged = {row, p, q, &params[i], vocab, drafts[i].token};
        bool accepted;
        double margin;
        int token = judge_formula(&judged, &accepted, &margin);
        n_accepted += accepted;
        n_refused += !accepted;
        if (margin <= 1e-4) continue; // rounding decides
        if (r->token != token)
            fail_msg("row %d: token %d, want %d (draft %d, %s; margin %.3g)", i, r->token, token,
                     drafts[i].token, accepted ? "accepted" : "refused", margin);
        // the other fields, from those of the plain draw: the masses are the row's
        double z = (row[token] - row[plain[i].token]) / (double)params[i].temperature;
        if (fabs(r->logprob - (plain[i].logprob + z)) > 2e-5 ||
            fabs(r->processed_logprob - log(p[token])) > 2e-5 ||
            r->retained_mass != plain[i].retained_mass)
            fail_msg("row %d: logprob %.7g cut %.7g mass %.7g; want %.7g %.7g %.7g", i, r->logprob,
                     r->processed_logprob, r->retained_mass, plain[i].logprob + z, log(p[token]),
                     plain[i].retained_mass);
    }
    if (n_accepted < 8 || n_refused < 8)
        fail_msg("%d accepted and %d refused: too few to prove anything", n_accepted, n_refused);
    // nothing to be judged: the same bits as without drafts
    for (int i = 0; i < ROWS; i++) drafts[i].token = -1;
    judge_rows(dev, result, logits, params, drafts, draft_logits, ROWS, vocab, draft_vocab);
    assert_memory_equal(result, plain, sizeof result);
    free(logits);
    free(draft_logits);
    free(p);
}

static void sample_drafts_odd(struct device *dev)
{
    sample_drafts(dev, 5003, 5003);
    sample_drafts(dev, 5003, 4801);
}

static void sample_drafts_aligned(struct device *dev)
{
    sample_drafts(dev, 8448, 8448);
    sample_drafts(dev, 8448, 4000);
}

// Shapes and, where they can be read (on the CPU), drafts that make no sense are refused by name.
static void sample_refuses(struct device *dev)
{
    enum { VOCAB = 8 };
    static const struct sample_draft wrong[] = {{VOCAB - 1, 0}, {0, -1}};
    const struct sample_params params = {.temperature = 1, .top_p = 1};
    const struct ops *ops = device_ops(dev);
    float *logits = to_device(dev, NULL, VOCAB * sizeof *logits);
    void *d_params = to_device(dev, &params, sizeof params), *drafts = to_device(dev, NULL, 8);
    void *result = to_device(dev, NULL, sizeof(struct sample_result));
    struct sample_args args = {logits, d_params, 1, VOCAB - 1, drafts, logits, VOCAB};
    ops->sample(dev, result, &args);
    assert_int_equal(device_sync(dev), ST_DEVICE);
    assert_non_null(strstr(status_message(), "draft vocabulary of 8"));
    const struct distill_args distill = {logits, logits, 1, VOCAB, VOCAB - 1, 1, 1};
    ops->distill(dev, logits, logits, NULL, &distill, DT_F32);
    assert_int_equal(device_sync(dev), ST_DEVICE);
    assert_non_null(strstr(status_message(), "teacher vocabulary of 7"));
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0] && dev == cpu; i++) {
        device_copy_in(dev, drafts, &wrong[i], sizeof wrong[i]);
        args.vocab = VOCAB;
        args.draft_vocab = VOCAB - 1;
        ops->sample(dev, result, &args);
        assert_int_equal(device_sync(dev), ST_DEVICE);
        assert_non_null(strstr(status_message(), "outside the vocabulary of 7"));
    }
    void *all[] = {logits, d_params, drafts, result};
    for (int k = 0; k < 4; k++) device_release(dev, all[k]);
}

static void test_sample(void **state)
{
    (void)state;
    on_each_device("sample greedy", sample_greedy);
    on_each_device("sample cuts", sample_distribution);
    on_each_device("sample draws", sample_large);
    on_each_device("sample drafts", sample_drafts_odd);
    on_each_device("sample drafts x4", sample_drafts_aligned);
    on_each_device("sample refuses", sample_refuses);
}

// 1,000 steps: bf16 weights with their residuals hold the same bits as a plain f32 run.
static void adamw_exact(struct device *dev)
{
    enum { N = 4099, STEPS = 1000 };
    struct rng rng;
    rng_init(&rng, 5, 0);
    float *host = must(malloc(N * sizeof *host)), *grad = must(malloc(N * sizeof *grad));
    uint16_t *high = must(malloc(N * 2)), *low = must(malloc(N * 2));
    for (int i = 0; i < N; i++) {
        host[i] = 0.02f * rng_normal(&rng);
        high[i] = master_high(host[i]);
        low[i] = master_low(host[i]);
    }
    float one = 0.9f;
    void *w32 = to_device(dev, host, N * 4), *w16 = to_device(dev, high, N * 2);
    void *residual = to_device(dev, low, N * 2), *scale = to_device(dev, &one, 4);
    void *g = to_device(dev, host, N * 4), *moments[4];
    for (int k = 0; k < 4; k++) {
        moments[k] = to_device(dev, NULL, N * 4);
        device_fill(dev, moments[k], 0, N * 4);
    }
    const struct ops *ops = device_ops(dev);
    for (int step = 1; step <= STEPS; step++) {
        struct adamw a = adamw_of(step);
        a.lr = step % 100 < 50 ? 1e-6f : 1e-3f;
        for (int i = 0; i < N; i++) grad[i] = 1e-3f * ((float)rng_below(&rng, 2001) - 1000);
        device_copy_in(dev, g, grad, N * 4);
        struct moments of32 = {MOMENTS_F32, moments[0], moments[1], NULL, NULL};
        struct moments of16 = {MOMENTS_F32, moments[2], moments[3], NULL, NULL};
        a.grad_scale = scale;
        ops->adamw(dev, w32, NULL, &of32, g, N, &a, DT_F32);
        ops->adamw(dev, w16, residual, &of16, g, N, &a, DT_BF16);
        sync_or_fail(dev);
    }
    float *start = must(malloc(N * sizeof *start));
    memcpy(start, host, N * 4);
    from_device(dev, host, w32, N * 4);
    from_device(dev, high, w16, N * 2);
    from_device(dev, low, residual, N * 2);
    int moved = 0;
    for (int i = 0; i < N; i++) {
        float joined = master_join(high[i], low[i]);
        moved += host[i] != start[i];
        if (memcmp(&joined, &host[i], 4) != 0)
            fail_msg("weight %d: %.9g in two halves, %.9g in f32", i, joined, host[i]);
    }
    assert_true(moved > N * 9 / 10);
    device_release(dev, w32);
    device_release(dev, w16);
    device_release(dev, residual);
    device_release(dev, scale);
    device_release(dev, g);
    for (int k = 0; k < 4; k++) device_release(dev, moments[k]);
    free(host);
    free(grad);
    free(high);
    free(low);
    free(start);
}

static void test_adamw_exact(void **state)
{
    (void)state;
    on_each_device("adamw exact", adamw_exact);
}

// ---- moments of fewer bits ----------------------------------------------------------------------

struct narrow { // what a run of AdamW leaves: its arrays, guarded, one after the other
    unsigned char *bytes;
    size_t n;
};

// 30 steps over n weights. Gradients lie orders of magnitude apart, and some are always 0.
static struct narrow narrow_run(struct device *dev, enum moments_kind kind, enum dtype w_dt, int n)
{
    size_t moment = kind == MOMENTS_F32 ? 4 : kind == MOMENTS_BF16 ? 2 : 1;
    size_t scales = kind == MOMENTS_8BIT ? (size_t)(n + MOMENT_BLOCK - 1) / MOMENT_BLOCK * 4 : 0;
    size_t part[6] = {(size_t)n * dtype_size(w_dt),
                      w_dt == DT_BF16 ? (size_t)n * 2 : 0,
                      (size_t)n * moment,
                      (size_t)n * moment,
                      scales,
                      scales};
    float clip = 0.7f, *grad = must(malloc((size_t)n * sizeof *grad)),
          *w = must(malloc((size_t)n * 4));
    uint16_t *half = must(malloc((size_t)n * 2));
    struct rng rng;
    void *d[6];
    struct narrow ret = {NULL, 0};
    rng_init(&rng, 17, 0);
    for (int i = 0; i < n; i++) {
        half[i] = bf16_from_f32(0.02f * rng_normal(&rng));
        w[i] = f32_from_bf16(half[i]);
    }
    for (int k = 0; k < 6; k++) {
        d[k] = to_device(dev, NULL, part[k] + GUARD);
        device_fill(dev, d[k], 0, part[k] + GUARD);
        ret.n += part[k] + GUARD;
    }
    device_copy_in(dev, d[0], w_dt == DT_F32 ? (void *)w : (void *)half, part[0]);
    void *g = to_device(dev, w, (size_t)n * 4), *scale = to_device(dev, &clip, 4);
    struct moments m = {kind, d[2], d[3], scales ? d[4] : NULL, scales ? d[5] : NULL};
    for (int step = 1; step <= 30; step++) {
        struct adamw a = adamw_of(step);
        for (int i = 0; i < n; i++)
            grad[i] = i % 7 == 3 ? 0 : rng_normal(&rng) * powf(10, (float)(i % 5) - 6);
        device_copy_in(dev, g, grad, (size_t)n * 4);
        a.grad_scale = scale;
        device_ops(dev)->adamw(dev, d[0], w_dt == DT_BF16 ? d[1] : NULL, &m, g, n, &a, w_dt);
        sync_or_fail(dev);
    }
    ret.bytes = must(malloc(ret.n));
    unsigned char *at = ret.bytes;
    for (int k = 0; k < 6; k++, at += GUARD) {
        from_device(dev, at, d[k], part[k] + GUARD);
        at += part[k];
        for (int i = 0; i < GUARD; i++) assert_int_equal(at[i], 0);
        device_release(dev, d[k]);
    }
    device_release(dev, g);
    device_release(dev, scale);
    free(grad);
    free(w);
    free(half);
    return ret;
}

// bf16 and 8-bit moments: f32 weights and their two halves stay the same; CUDA and the CPU give the
// same bits, of the weights, the moments and their scales.
static void test_adamw_narrow(void **state)
{
    (void)state;
    static const int sizes[] = {5, 128, 4099, 100000};
    for (int k = 0; k < 8; k++) {
        enum moments_kind kind = k < 4 ? MOMENTS_BF16 : MOMENTS_8BIT;
        int n = sizes[k % 4];
        struct narrow whole = narrow_run(cpu, kind, DT_F32, n);
        struct narrow halves = narrow_run(cpu, kind, DT_BF16, n);
        const float *w = (const float *)whole.bytes;
        for (int i = 0; i < n; i++) {
            uint16_t high, low;
            memcpy(&high, halves.bytes + 2 * i, 2);
            memcpy(&low, halves.bytes + 2 * n + GUARD + 2 * i, 2);
            float joined = master_join(high, low);
            assert_memory_equal(&joined, &w[i], 4);
        }
        for (int half = 0; cuda && half < 2; half++) {
            const struct narrow *want = half ? &halves : &whole;
            struct narrow have = narrow_run(cuda, kind, half ? DT_BF16 : DT_F32, n);
            assert_int_equal(have.n, want->n);
            for (size_t i = 0; i < have.n; i++)
                if (have.bytes[i] != want->bytes[i])
                    fail_msg("%s moments, %s weights, n %d: byte %zu of %zu is %02x on CUDA, %02x "
                             "on the CPU",
                             kind == MOMENTS_BF16 ? "bf16" : "8-bit", half ? "bf16" : "f32", n, i,
                             have.n, have.bytes[i], want->bytes[i]);
            free(have.bytes);
        }
        free(whole.bytes);
        free(halves.bytes);
    }
    printf("adamw narrow moments: %s\n", cuda ? "CUDA as the CPU, to the bit" : "cpu only");
}

static void checksum_regions(struct device *dev)
{
    enum { BYTES = 1 << 20, REGIONS = 5 };
    unsigned char *host = must(malloc(BYTES));
    struct rng rng;
    rng_init(&rng, 8, 0);
    for (int i = 0; i < BYTES; i++) host[i] = (unsigned char)rng_u32(&rng);
    const uint64_t offset[REGIONS] = {0, 256, 4096, 512, 65536};
    const uint64_t bytes[REGIONS] = {4, 7, 65536, 0, BYTES - 65536 - 1};
    uint64_t sums[REGIONS], changed[REGIONS];
    void *d = to_device(dev, host, BYTES);
    device_ops(dev)->checksum(dev, sums, d, offset, bytes, REGIONS);
    for (int r = 0; r < REGIONS; r++) {
        uint64_t want = 0;
        for (uint64_t j = 0; j * 4 < bytes[r]; j++) {
            uint64_t x = 0;
            for (uint64_t b = 0; b < 4 && j * 4 + b < bytes[r]; b++)
                x |= (uint64_t)host[offset[r] + j * 4 + b] << (8 * b);
            x += j * 0x9E3779B97F4A7C15u;
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
            x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
            want += x ^ (x >> 31);
        }
        if (sums[r] != want) fail_msg("region %d: %016lx, want %016lx", r, sums[r], want);
    }
    // two swapped words change it
    memcpy(host + BYTES - 16, host + 65536, 4);
    device_copy_in(dev, d, host, BYTES);
    device_ops(dev)->checksum(dev, changed, d, offset, bytes, REGIONS);
    assert_true(changed[4] != sums[4]);
    assert_true(changed[2] == sums[2]);
    device_release(dev, d);
    free(host);
}

static void test_checksum(void **state)
{
    (void)state;
    on_each_device("checksum", checksum_regions);
}

static void convert_all(struct device *dev)
{
    enum { N = 70001 };
    static const enum dtype from[] = {DT_F32, DT_BF16, DT_F16}, to[] = {DT_F32, DT_BF16};
    struct rng rng;
    rng_init(&rng, 3, 0);
    uint32_t *host = must(malloc(N * 4)), *got = must(malloc(N * 4));
    for (int i = 0; i < N; i++) host[i] = rng_u32(&rng) & 0xbfffbfffu; // no infinities, no NaN
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 2; b++) {
            void *x = to_device(dev, host, N * 4), *y = to_device(dev, NULL, N * 4);
            device_ops(dev)->convert(dev, y, to[b], x, from[a], N);
            from_device(dev, got, y, N * 4);
            for (int i = 0; i < N; i++) {
                float value, result;
                if (from[a] == DT_F32)
                    memcpy(&value, &host[i], 4);
                else if (from[a] == DT_BF16)
                    value = f32_from_bf16(((uint16_t *)host)[i]);
                else
                    value = f32_from_f16(((uint16_t *)host)[i]);
                if (to[b] == DT_F32) {
                    memcpy(&result, &got[i], 4);
                } else {
                    value = f32_from_bf16(bf16_from_f32(value));
                    result = f32_from_bf16(((uint16_t *)got)[i]);
                }
                if (memcmp(&value, &result, 4) != 0)
                    fail_msg("%s to %s: entry %d is %.9g, want %.9g", dtype_name(from[a]),
                             dtype_name(to[b]), i, result, value);
            }
            device_release(dev, x);
            device_release(dev, y);
        }
    free(host);
    free(got);
}

static void test_convert(void **state)
{
    (void)state;
    on_each_device("convert", convert_all);
}

/* The same sequence as a packed batch, as one paged prefill, and row by row as decode steps: on the
 * CPU the same bits, whatever the batch and the block size. */
static void attention_forms(struct device *dev)
{
    enum { ROWS = 45, HEADS = 6, KV_HEADS = 2, DIM = 32, BLOCK = 8, BLOCKS = 6 };
    enum { WIDTH = (HEADS + 2 * KV_HEADS) * DIM, OUT_WIDTH = HEADS * DIM };
    struct rng rng;
    rng_init(&rng, 21, 0);
    static float qkv[ROWS * WIDTH], packed[ROWS * OUT_WIDTH], paged[ROWS * OUT_WIDTH],
        decoded[ROWS * OUT_WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++) qkv[i] = rng_normal(&rng);
    int32_t positions[ROWS], zeros[ROWS] = {0}, slots[ROWS], start[2] = {0, ROWS};
    static const int32_t table[BLOCKS] = {3, 0, 5, 1, 4, 2};
    int32_t rows = ROWS;
    for (int i = 0; i < ROWS; i++) {
        positions[i] = i;
        slots[i] = table[i / BLOCK] * BLOCK + i % BLOCK;
    }
    const struct ops *ops = device_ops(dev);
    const struct attn_shape shape = {
        .n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, .scale = 0.17f, .window = 20};
    float *d_qkv = to_device(dev, qkv, sizeof qkv), *d_out = to_device(dev, NULL, sizeof packed);
    float *d_lse = to_device(dev, NULL, ROWS * HEADS * sizeof *d_lse);
    int32_t *d_positions = to_device(dev, positions, sizeof positions);
    int32_t *d_zeros = to_device(dev, zeros, sizeof zeros);
    int32_t *d_slots = to_device(dev, slots, sizeof slots);
    int32_t *d_start = to_device(dev, start, sizeof start);
    int32_t *d_table = to_device(dev, table, sizeof table);
    int32_t *d_rows = to_device(dev, &rows, sizeof rows);
    float *pool = to_device(dev, NULL, sizeof(float) * 2 * BLOCKS * BLOCK * KV_HEADS * DIM);
    struct batch_view batch = {.n_tokens = ROWS,
                               .n_seqs = 1,
                               .max_query = ROWS,
                               .max_context = ROWS,
                               .packed = true,
                               .positions = d_positions,
                               .seq_of = d_zeros,
                               .query_start = d_start,
                               .prefix_start = d_zeros,
                               .prefix_len = d_zeros,
                               .attend_end = d_rows};
    ops->attn_packed(dev, d_out, d_lse, d_qkv, &batch, &shape);
    from_device(dev, packed, d_out, sizeof packed);

    struct kv_view kv = {pool, pool + BLOCKS * BLOCK * KV_HEADS * DIM, 0, BLOCKS, BLOCK, DT_F32};
    batch.packed = false;
    batch.slots = d_slots;
    batch.context_len = d_rows;
    batch.block_table = d_table;
    batch.table_stride = BLOCKS;
    ops->kv_store(dev, &kv, 0, d_qkv, &batch, &shape);
    ops->attn_paged(dev, d_out, d_qkv, &kv, 0, &batch, &shape);
    from_device(dev, paged, d_out, sizeof paged);

    device_fill(dev, d_out, 0xFF, sizeof packed);
    for (int i = 0; i < ROWS; i++) {
        int32_t one_row[2] = {0, 1}, context = i + 1;
        device_copy_in(dev, d_start, one_row, sizeof one_row);
        device_copy_in(dev, d_rows, &context, sizeof context);
        struct batch_view row = batch;
        row.n_tokens = row.max_query = 1;
        row.max_context = i + 1;
        row.positions = d_positions + i;
        row.slots = d_slots + i;
        ops->attn_paged(dev, d_out + i * OUT_WIDTH, d_qkv + i * WIDTH, &kv, 0, &row, &shape);
        sync_or_fail(dev);
    }
    from_device(dev, decoded, d_out, sizeof decoded);
    double worst = 0;
    for (int i = 0; i < ROWS * OUT_WIDTH; i++) {
        assert_true(isfinite(packed[i]) && isfinite(paged[i]) && isfinite(decoded[i]));
        worst = fmax(worst, fabs((double)packed[i] - paged[i]));
        worst = fmax(worst, fabs((double)packed[i] - decoded[i]));
    }
    printf("attention: packed, paged and decoded differ by %.2g on %s\n", worst, device_spec(dev));
    assert_true(worst <= (dev == cpu ? 0 : 1e-5));
    void *all[] = {d_qkv,   d_out,   d_lse,   d_positions, d_zeros,
                   d_slots, d_start, d_table, d_rows,      pool};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_release(dev, all[i]);
}

/* A row of activations times a weight, alone and among others: on the CPU the same bits. */
static void matmul_rows(struct device *dev)
{
    enum { M = 37, N = 70, K = 1100 };
    struct rng rng;
    rng_init(&rng, 22, 0);
    static float a[M * K], b[N * K], bias[N], together[M * N], alone[M * N];
    for (int i = 0; i < M * K; i++) a[i] = rng_normal(&rng);
    for (int i = 0; i < N * K; i++) b[i] = rng_normal(&rng);
    for (int i = 0; i < N; i++) bias[i] = rng_normal(&rng);
    float *d_a = to_device(dev, a, sizeof a), *d_b = to_device(dev, b, sizeof b);
    float *d_bias = to_device(dev, bias, sizeof bias), *d_c = to_device(dev, NULL, sizeof together);
    double worst = 0;
    device_ops(dev)->matmul(dev, d_c, d_a, d_b, d_bias,
                            &(struct matmul){.m = M, .n = N, .k = K, .trans_b = true});
    from_device(dev, together, d_c, sizeof together);
    for (int rows = 1; rows <= 12; rows += rows < 4 ? 1 : 4) {
        device_fill(dev, d_c, 0xFF, sizeof together);
        for (int i = 0; i < M; i += rows) {
            int m = M - i < rows ? M - i : rows;
            device_ops(dev)->matmul(dev, d_c + i * N, d_a + i * K, d_b, d_bias,
                                    &(struct matmul){.m = m, .n = N, .k = K, .trans_b = true});
        }
        from_device(dev, alone, d_c, sizeof alone);
        for (int i = 0; i < M * N; i++) {
            assert_true(isfinite(alone[i]));
            worst = fmax(worst, fabs((double)together[i] - alone[i]) / sqrt(K));
        }
    }
    printf("matmul: rows alone and together differ by %.2g on %s\n", worst, device_spec(dev));
    assert_true(worst <= (dev == cpu ? 0 : 1e-5));
    device_release(dev, d_a);
    device_release(dev, d_b);
    device_release(dev, d_bias);
    device_release(dev, d_c);
}

static void test_matmul_rows(void **state)
{
    (void)state;
    on_each_device("matmul rows", matmul_rows);
}

/* A token through a mixture of experts, alone and among others: on the CPU the same bits. NaN
 * logits still choose experts, and show in the weights. */
static void moe_rows(struct device *dev)
{
    enum { ROWS = 41, EXPERTS = 6, TOP = 3, WIDTH = 70, INNER = 600, A = ROWS * TOP };
    struct rng rng;
    rng_init(&rng, 23, 0);
    static float x[ROWS * WIDTH], w[EXPERTS * INNER * WIDTH], logits[ROWS * EXPERTS];
    static float together[ROWS * INNER], alone[ROWS * INNER], weight[A];
    static int32_t expert[A];
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = rng_normal(&rng);
    for (int i = 0; i < EXPERTS * INNER * WIDTH; i++) w[i] = rng_normal(&rng);
    for (int i = 0; i < ROWS * EXPERTS; i++) logits[i] = rng_normal(&rng);
    const struct ops *ops = device_ops(dev);
    float *d_x = to_device(dev, x, sizeof x), *d_w = to_device(dev, w, sizeof w);
    float *d_logits = to_device(dev, logits, sizeof logits);
    float *d_in = to_device(dev, NULL, A * WIDTH * sizeof *d_in);
    float *d_out = to_device(dev, NULL, A * INNER * sizeof *d_out);
    float *d_y = to_device(dev, NULL, sizeof together);
    struct moe_routing r = {to_device(dev, NULL, A * 4), to_device(dev, NULL, A * 4),
                            to_device(dev, NULL, A * 4), to_device(dev, NULL, A * 4),
                            to_device(dev, NULL, (EXPERTS + 1) * 4)};
    double worst = 0;
    for (int rows = ROWS; rows >= 1; rows = rows == ROWS ? 7 : rows == 7 ? 1 : 0) {
        device_fill(dev, d_y, 0xFF, sizeof together);
        for (int i = 0; i < ROWS; i += rows) {
            struct moe_shape shape = moe_shape_of(ROWS - i < rows ? ROWS - i : rows, EXPERTS, TOP);
            shape.width = INNER;
            int n = shape.rows * TOP;
            ops->moe_route(dev, &r, d_logits + i * EXPERTS, NULL, &shape);
            ops->gather_rows(dev, d_in, d_x + i * WIDTH, r.row, n, WIDTH, 1, DT_F32);
            ops->matmul_experts(dev, d_out, d_in, d_w, r.offsets, EXPERTS,
                                &(struct matmul){.m = n, .n = INNER, .k = WIDTH, .trans_b = true});
            ops->moe_combine(dev, d_y + i * INNER, d_out, r.place, r.weight, &shape, false);
        }
        from_device(dev, rows == ROWS ? together : alone, d_y, sizeof together);
        for (int i = 0; rows < ROWS && i < ROWS * INNER; i++) {
            assert_true(isfinite(alone[i]));
            worst = fmax(worst, fabs((double)together[i] - alone[i]) / sqrt(WIDTH));
        }
    }
    printf("experts: rows alone and together differ by %.2g on %s\n", worst, device_spec(dev));
    assert_true(worst <= (dev == cpu ? 0 : 1e-5));

    for (int i = 0; i < EXPERTS; i++) logits[i] = NAN;
    logits[EXPERTS + 4] = NAN;
    device_copy_in(dev, d_logits, logits, sizeof logits);
    const struct moe_shape shape = moe_shape_of(ROWS, EXPERTS, TOP);
    ops->moe_route(dev, &r, d_logits, NULL, &shape);
    from_device(dev, expert, r.expert, sizeof expert);
    from_device(dev, weight, r.weight, sizeof weight);
    for (int i = 0; i < A; i++) {
        assert_true(expert[i] >= 0 && expert[i] < EXPERTS);
        assert_true(isnan(weight[i]) == (i < 2 * TOP));
    }
    assert_int_equal(expert[TOP], 4);
    void *all[] = {d_x,      d_w,   d_logits, d_in,    d_out,    d_y,
                   r.expert, r.row, r.weight, r.place, r.offsets};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_release(dev, all[i]);
}

static void test_moe_rows(void **state)
{
    (void)state;
    on_each_device("moe rows", moe_rows);
}

static void test_attention_forms(void **state)
{
    (void)state;
    on_each_device("attn forms", attention_forms);
}

static char no_cuda[512]; // why there is none

// Makes a run without a GPU visible as a skipped test.
static void test_cuda_compared(void **state)
{
    (void)state;
    if (cuda) return;
    printf("no comparison with CUDA: %s\n", no_cuda);
    skip();
}

int main(int argc, char **argv)
{
    const char *spec = "cuda:0";
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            spec = argv[++i];
        else if (argv[i][0] != '-')
            filter = argv[i];
        else {
            fprintf(stderr, "usage: test_ops [--device cuda:N] [FILTER]\n");
            return 2;
        }
    }
    if (device_open("cpu", &cpu) != ST_OK) {
        fprintf(stderr, "test_ops: %s\n", status_message());
        return 1;
    }
    if (device_open(spec, &cuda) != ST_OK)
        snprintf(no_cuda, sizeof no_cuda, "%s", status_message());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),        cmocka_unit_test(test_attention_forms),
        cmocka_unit_test(test_matmul_rows),  cmocka_unit_test(test_moe_rows),
        cmocka_unit_test(test_sample),       cmocka_unit_test(test_adamw_exact),
        cmocka_unit_test(test_adamw_narrow), cmocka_unit_test(test_checksum),
        cmocka_unit_test(test_convert),      cmocka_unit_test(test_cuda_compared),
    };
    int failed = cmocka_run_group_tests_name("ops", tests, NULL, NULL);
    device_free(cuda);
    device_free(cpu);
    return failed;
}
