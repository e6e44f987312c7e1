/* op_table.c: arrays, runs on a device, comparisons and finite differences of op_table.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

enum { FD_SAMPLES = 96 };

// f32 sums of up to some thousand terms; bf16 keeps 8 bits, so one rounding is up to 0.4%.
#define TOLERANCE_F32  1e-5
#define TOLERANCE_BF16 1e-2
// central differences in double are good to about 1e-8; what is left is the operation's f32
#define TOLERANCE_REFERENCE 1e-5

struct device *op_cpu, *op_cuda;
static const char *filter = "";
static char no_cuda[512]; // why there is none
static const struct op_case *cases;
static size_t n_cases;

// ---- arrays ------------------------------------------------------------------------------------

void *must(void *p)
{
    if (!p) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

struct array *array_new(struct op_test *t, const char *name, enum role role, enum kind kind,
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

float *floats(struct op_test *t, const char *name, enum role role, enum kind kind, int64_t n,
              float scale)
{
    struct array *a = array_new(t, name, role, kind, n);
    if (role != OUT)
        for (int64_t i = 0; i < n; i++) a->f[i] = scale * rng_normal(&t->rng);
    return a->f;
}

int32_t *ints(struct op_test *t, const char *name, int64_t n)
{
    return array_new(t, name, IN, I32, n)->i;
}

static void round_to_bf16(struct op_test *t)
{
    for (int k = 0; k < t->n_arrays; k++)
        if (t->a[k].kind == DATA)
            for (int64_t i = 0; i < t->a[k].n; i++)
                t->a[k].f[i] = f32_from_bf16(bf16_from_f32(t->a[k].f[i]));
}

static void test_release(struct op_test *t)
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

void sync_or_fail(struct device *dev)
{
    if (device_sync(dev) != ST_OK) fail_msg("%s", status_message());
}

// Runs the case on `dev` in `dt`; results[k] (double, caller frees) for every output. False after a
// printed complaint.
static bool run_on(struct op_test *t, struct device *dev, enum dtype dt, double **results)
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
static double compare(struct op_test *t, const char *what, double **got, double **want,
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
void differentiate(struct op_test *t, double **v, int gradient, int input, bool add,
                   double (*loss)(struct op_test *, double **v))
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

// ---- the table ---------------------------------------------------------------------------------

// Worst errors of one operation, for its line.
struct summary {
    double reference, cuda_f32, cuda_bf16;
    int n, failed;
};

static void free_results(double **results)
{
    for (int k = 0; k < MAX_ARRAYS; k++) free(results[k]);
}

static void against_reference(struct op_test *t, struct summary *sum)
{
    double *got[MAX_ARRAYS] = {0}, *want[MAX_ARRAYS] = {0}, *v[MAX_ARRAYS] = {0};
    for (int k = 0; k < t->n_arrays; k++) {
        want[k] = t->a[k].expect;
        if (t->a[k].kind == I32) continue;
        v[k] = must(malloc(((size_t)t->a[k].n + 1) * sizeof(double)));
        for (int64_t i = 0; i < t->a[k].n; i++) v[k][i] = t->a[k].f[i];
    }
    bool good = run_on(t, op_cpu, DT_F32, got);
    t->c->op->reference(t, v);
    sum->reference = fmax(sum->reference, compare(t, "cpu f32 against reference", got, want,
                                                  TOLERANCE_REFERENCE, true, &good));
    sum->failed += !good;
    free_results(got);
    free_results(v);
}

static double against_cuda(struct op_test *t, enum dtype dt, struct summary *sum)
{
    double *got[MAX_ARRAYS] = {0}, *want[MAX_ARRAYS] = {0};
    if (dt == DT_BF16) round_to_bf16(t);
    bool good = run_on(t, op_cpu, DT_F32, want);
    good &= run_on(t, op_cuda, dt, got);
    double error = compare(t, dt == DT_F32 ? "cuda f32 against cpu" : "cuda bf16 against cpu", got,
                           want, dt == DT_F32 ? TOLERANCE_F32 : TOLERANCE_BF16, false, &good);
    sum->failed += !good;
    free_results(got);
    free_results(want);
    return error;
}

static void test_table(void **state)
{
    (void)state;
    int failed = 0;
    for (size_t i = 0; i < n_cases;) {
        const struct op_def *op = cases[i].op;
        struct summary sum = {0};
        for (; i < n_cases && cases[i].op == op; i++) {
            if (!strstr(op->name, filter) || (cases[i].big && !op_cuda)) continue;
            struct op_test t = {.c = &cases[i]};
            rng_init(&t.rng, 1234, (uint64_t)i);
            op->setup(&t);
            sum.n++;
            if (!cases[i].big) against_reference(&t, &sum);
            if (op_cuda) {
                sum.cuda_f32 = fmax(sum.cuda_f32, against_cuda(&t, DT_F32, &sum));
                sum.cuda_bf16 = fmax(sum.cuda_bf16, against_cuda(&t, DT_BF16, &sum));
            }
            test_release(&t);
        }
        if (sum.n == 0) continue;
        printf("%-18s %2d shapes  cpu f32 %.1e", op->name, sum.n, sum.reference);
        if (op_cuda) printf("  cuda f32 %.1e  cuda bf16 %.1e", sum.cuda_f32, sum.cuda_bf16);
        printf("  %s\n", sum.failed ? "FAIL" : "ok");
        fflush(stdout);
        failed += sum.failed;
    }
    if (failed) fail_msg("%d comparisons failed; the lines above name them", failed);
}

// ---- operations with tests of their own --------------------------------------------------------

// Runs `body` on the CPU and, where there is one, on CUDA.
void on_each_device(const char *op, void (*body)(struct device *dev))
{
    if (!strstr(op, filter)) return;
    body(op_cpu);
    printf("%-18s on cpu ok\n", op);
    if (!op_cuda) return;
    body(op_cuda);
    printf("%-18s on %s ok\n", op, device_spec(op_cuda));
}

void *to_device(struct device *dev, const void *host, size_t bytes)
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

void from_device(struct device *dev, void *host, const void *d, size_t bytes)
{
    device_copy_out(dev, host, d, bytes);
    sync_or_fail(dev);
}

// Makes a run without a GPU visible as a skipped test.
static void test_cuda_compared(void **state)
{
    (void)state;
    if (op_cuda) return;
    printf("no comparison with CUDA: %s\n", no_cuda);
    skip();
}

static int read_arguments(int argc, char **argv, const char **ret_spec)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
            *ret_spec = argv[++i];
        } else if (argv[i][0] != '-') {
            filter = argv[i];
        } else {
            fprintf(stderr, "usage: %s [--device cuda:N] [FILTER]\n", argv[0]);
            return 2;
        }
    }
    return 0;
}

int op_main(int argc, char **argv, const struct op_case *table, size_t n_table)
{
    const char *spec = "cuda:0";
    if (read_arguments(argc, argv, &spec) != 0) return 2;
    if (device_open("cpu", &op_cpu) != ST_OK) {
        fprintf(stderr, "%s: %s\n", argv[0], status_message());
        return 1;
    }
    if (device_open(spec, &op_cuda) != ST_OK)
        snprintf(no_cuda, sizeof no_cuda, "%s", status_message());
    cases = table;
    n_cases = n_table;
    if (n_table > 0) test_list(0, (struct CMUnitTest)cmocka_unit_test(test_table));
    test_list(INT_MAX, (struct CMUnitTest)cmocka_unit_test(test_cuda_compared));
    const int failed = test_main();
    device_free(op_cuda);
    device_free(op_cpu);
    return failed;
}
