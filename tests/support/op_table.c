/* op_table.c: arrays, runs on a device, comparisons and finite differences of op_table.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

enum { FD_SAMPLES = 96 };

// f32 sums of up to some thousand terms; bf16 keeps 8 bits, so one rounding is up to 0.4%.
#define TOLERANCE_F32  1e-5
#define TOLERANCE_BF16 1e-2
// central differences in double are good to about 1e-8; what is left is the operation's f32
#define TOLERANCE_REFERENCE 1e-5

struct device *op_cpu, *op_cuda, *dev;
const struct ops *ops;
enum dtype dt;
static const char *filter = "";
static char no_cuda[512]; // why there is none
static const struct op_case *cases;
static size_t n_cases;

// ---- memory ------------------------------------------------------------------------------------

static struct held {
    struct device *dev; // NULL: the host's
    void *memory;
} * held;
static size_t n_held, room;

static void *hold(struct device *of, void *memory)
{
    if (n_held == room) {
        room = 2 * room + 64;
        held = realloc(held, room * sizeof *held);
    }
    if (!held || !memory) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    held[n_held++] = (struct held){of, memory};
    return memory;
}

size_t op_mark(void)
{
    return n_held;
}

void op_release(size_t mark)
{
    for (; n_held > mark; n_held--)
        if (held[n_held - 1].dev)
            device_release(held[n_held - 1].dev, held[n_held - 1].memory);
        else
            free(held[n_held - 1].memory);
}

void *op_host(size_t bytes)
{
    return hold(NULL, calloc(bytes + 1, 1));
}

void sync_or_fail(void)
{
    if (device_sync(dev) != ST_OK) fail_msg("%s", status_message());
}

void *to_device(const void *host, size_t bytes)
{
    void *d;
    if (device_alloc(dev, bytes, &d) != ST_OK) fail_msg("%s", status_message());
    if (host)
        device_copy_in(dev, d, host, bytes);
    else
        device_fill(dev, d, 0xFF, bytes);
    sync_or_fail();
    return hold(dev, d);
}

void from_device(void *host, const void *d, size_t bytes)
{
    device_copy_out(dev, host, d, bytes);
    sync_or_fail();
}

float *normal_numbers(struct rng *rng, size_t n, float scale)
{
    float *x = op_host(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * rng_normal(rng);
    return x;
}

void *normal_on_device(enum dtype as, size_t n, float scale, uint64_t seed)
{
    void *ret = to_device(NULL, n * dtype_size(as));
    const size_t mark = op_mark();
    struct rng rng;
    rng_init(&rng, seed, 0);
    void *wide = to_device(normal_numbers(&rng, n, scale), n * sizeof(float));
    ops->convert(dev, ret, as, wide, DT_F32, (int64_t)n);
    sync_or_fail();
    op_release(mark);
    return ret;
}

void op_kv_store(const struct kv_view *kv, int layer, void *qkv, const struct batch_view *batch,
                 const struct attn_shape *shape)
{
    struct rope_args store = rope_of_batch(NULL, 0, batch, shape, 1);
    store.kv = kv;
    store.layer = layer;
    ops->rope(dev, qkv, &store);
}

void assert_same_bytes(const char *what, const void *a, const void *b, size_t bytes)
{
    const size_t mark = op_mark();
    char *x = op_host(bytes), *y = op_host(bytes);
    size_t at = 0;
    from_device(x, a, bytes);
    from_device(y, b, bytes);
    while (at < bytes && x[at] == y[at]) at++;
    if (at < bytes)
        fail_msg("%s on %s, %s: byte %zu of %zu differs", what, device_spec(dev), dtype_name(dt),
                 at, bytes);
    op_release(mark);
}

// ---- arrays ------------------------------------------------------------------------------------

struct array *array_new(struct op_test *t, const char *name, enum role role, enum kind kind,
                        int64_t n)
{
    assert_true(t->n_arrays < MAX_ARRAYS);
    struct array *a = &t->a[t->n_arrays++];
    *a = (struct array){.name = name, .role = role, .kind = kind, .n = n};
    if (kind == I32)
        a->i = op_host((size_t)n * sizeof *a->i);
    else
        a->f = op_host((size_t)n * sizeof *a->f);
    if (role != IN) {
        a->expect = op_host((size_t)n * sizeof *a->expect);
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

static size_t element_size(const struct array *a)
{
    if (a->kind == F64) return 8;
    return a->kind == DATA ? dtype_size(dt) : 4;
}

void op_use(struct device *device, enum dtype as)
{
    dev = device;
    ops = device_ops(device);
    dt = as;
}

// Runs the case on `on` in `as`; results[k] gets every output. False after a printed complaint.
static bool run_on(struct op_test *t, struct device *on, enum dtype as, double **results)
{
    void *d[MAX_ARRAYS] = {0};
    bool good = true;
    op_use(on, as);
    for (int k = 0; k < t->n_arrays; k++) {
        const struct array *a = &t->a[k];
        size_t bytes = (size_t)a->n * element_size(a);
        const void *from = a->kind == I32 ? (void *)a->i : (void *)a->f;
        d[k] = to_device(NULL, bytes + GUARD);
        if (a->role == OUT) continue;
        if (a->kind == DATA && dt == DT_BF16) {
            uint16_t *half = op_host(bytes);
            for (int64_t i = 0; i < a->n; i++) half[i] = bf16_from_f32(a->f[i]);
            from = half;
        }
        device_copy_in(dev, d[k], from, bytes);
    }
    t->c->op->launch(t, d);
    if (device_sync(dev) != ST_OK) {
        printf("FAIL %s %s: %s\n", t->c->op->name, t->c->shape, status_message());
        good = false;
    }
    for (int k = 0; k < t->n_arrays; k++) {
        const struct array *a = &t->a[k];
        size_t size = element_size(a), bytes = (size_t)a->n * size;
        unsigned char *host = op_host(bytes + GUARD);
        from_device(host, d[k], bytes + GUARD);
        for (int g = 0; g < GUARD && good; g++)
            if (host[bytes + g] != 0xFF) {
                printf("FAIL %s %s %s on %s: %s: wrote past the end of the array\n", t->c->op->name,
                       t->c->shape, dtype_name(dt), device_spec(dev), a->name);
                good = false;
            }
        if (a->role == IN) continue;
        results[k] = op_host((size_t)a->n * sizeof(double));
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
        double largest = 0, error = 0, most = fmax(tolerance, t->a[k].noise);
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
        if (error > (t->a[k].kind == I32 ? 0 : most)) { // numbers of things are exact
            printf("FAIL %s %s %s: %s[%lld] is %.9g, want %.9g (error %.3g of the largest, %.3g; "
                   "allowed %.0e)\n",
                   t->c->op->name, t->c->shape, what, t->a[k].name, (long long)at, got[k][at],
                   want[k][at], error, largest, most);
            *good = false;
        }
        worst = fmax(worst, error);
    }
    return worst;
}

// ---- finite differences ------------------------------------------------------------------------

double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

void differentiate(struct op_test *t, double **v, int gradient, int input, bool add,
                   double (*loss)(struct op_test *, double **v))
{
    int64_t n = t->a[input].n;
    assert_int_equal(n, t->a[gradient].n);
    bool all = n <= FD_SAMPLES;
    for (int64_t s = 0; s < (all ? n : FD_SAMPLES); s++) {
        int64_t i = all ? s : rng_below(&t->rng, (uint32_t)n);
        const size_t mark = op_mark();
        double x = v[input][i], h = 1e-5;
        v[input][i] = x + h;
        double up = loss(t, v);
        v[input][i] = x - h;
        double down = loss(t, v);
        v[input][i] = x;
        op_release(mark);
        t->a[gradient].expect[i] = (add ? v[gradient][i] : 0) + (up - down) / (2 * h);
    }
}

// Every output "dX" by the input "X"; added to what is there where it is an input too.
static void differentiate_all(struct op_test *t, double **v)
{
    for (int k = 0; k < t->n_arrays; k++)
        for (int i = 0; i < t->n_arrays && t->a[k].role != IN; i++)
            if (t->a[k].name[0] == 'd' && strcmp(t->a[k].name + 1, t->a[i].name) == 0)
                differentiate(t, v, k, i, t->a[k].role == INOUT, t->c->op->loss);
}

// ---- the table ---------------------------------------------------------------------------------

// Worst errors of one operation, for its line.
struct summary {
    double reference, cuda_f32, cuda_bf16;
    int n, failed;
};

static void against_reference(struct op_test *t, struct summary *sum)
{
    double *got[MAX_ARRAYS] = {0}, *want[MAX_ARRAYS] = {0}, *v[MAX_ARRAYS] = {0};
    for (int k = 0; k < t->n_arrays; k++) {
        want[k] = t->a[k].expect;
        if (t->a[k].kind == I32) continue;
        v[k] = op_host((size_t)t->a[k].n * sizeof(double));
        for (int64_t i = 0; i < t->a[k].n; i++) v[k][i] = t->a[k].f[i];
    }
    bool good = run_on(t, op_cpu, DT_F32, got);
    if (t->c->op->loss) differentiate_all(t, v);
    if (t->c->op->reference) t->c->op->reference(t, v);
    sum->reference = fmax(sum->reference, compare(t, "cpu f32 against reference", got, want,
                                                  TOLERANCE_REFERENCE, true, &good));
    sum->failed += !good;
}

static double against_cuda(struct op_test *t, enum dtype as, struct summary *sum)
{
    double *got[MAX_ARRAYS] = {0}, *want[MAX_ARRAYS] = {0};
    const size_t mark = op_mark();
    if (as == DT_BF16) round_to_bf16(t);
    bool good = run_on(t, op_cpu, DT_F32, want);
    good &= run_on(t, op_cuda, as, got);
    double error = compare(t, as == DT_F32 ? "cuda f32 against cpu" : "cuda bf16 against cpu", got,
                           want, as == DT_F32 ? TOLERANCE_F32 : TOLERANCE_BF16, false, &good);
    sum->failed += !good;
    op_release(mark);
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
            if (!op_wanted(op->name) || (cases[i].big && !op_cuda)) continue;
            const size_t mark = op_mark();
            struct op_test t = {.c = &cases[i], .p = cases[i].p};
            op_use(op_cpu, DT_F32);
            rng_init(&t.rng, 1234, (uint64_t)i);
            op->setup(&t);
            sum.n++;
            if (!cases[i].big) against_reference(&t, &sum);
            if (op_cuda) {
                sum.cuda_f32 = fmax(sum.cuda_f32, against_cuda(&t, DT_F32, &sum));
                sum.cuda_bf16 = fmax(sum.cuda_bf16, against_cuda(&t, DT_BF16, &sum));
            }
            op_release(mark);
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

bool op_wanted(const char *name)
{
    return strstr(name, filter);
}

void op_on_each(const char *name, void (*body)(void), bool each_dtype)
{
    struct device *const devices[] = {op_cpu, op_cuda};
    for (int i = 0; i < 2 && devices[i] && (!name || op_wanted(name)); i++) {
        for (enum dtype as = DT_F32; as <= (each_dtype ? DT_BF16 : DT_F32); as++) {
            const size_t mark = op_mark();
            op_use(devices[i], as);
            if (device_computes_in(dev, dt)) body();
            op_release(mark);
        }
        if (name) printf("%-18s on %s ok\n", name, device_spec(dev));
    }
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
    op_release(0);
    free(held);
    device_free(op_cuda);
    device_free(op_cpu);
    return failed;
}
