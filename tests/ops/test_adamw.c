/* test_adamw.c: AdamW, its moments of fewer bits, and the sum of squares behind clipping. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/moments.h"
#include "tests/support/op_table.h"

// sum_squares: p: n.  adamw: p: n step

static void squares_setup(struct op_test *t)
{
    array_new(t, "out", OUT, F64, 1);
    floats(t, "x", IN, F32, t->p[0], 1);
}

static void squares_launch(struct op_test *t, void **d)
{
    ops->sum_squares(dev, d[0], d[1], t->p[0]);
}

static void squares_reference(struct op_test *t, double **v)
{
    double sum = 0;
    for (int i = 0; i < t->p[0]; i++) sum += v[1][i] * v[1][i];
    t->a[0].expect[0] = sum;
}

OP(squares, "sum_squares");

static struct adamw adamw_of(int step)
{
    struct adamw a = {
        .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
    a.step = (uint32_t)step;
    a.bias_correction1 = (float)(1 - pow((double)a.beta1, step));
    a.bias_correction2 = (float)(1 - pow((double)a.beta2, step));
    return a;
}

static void adamw_setup(struct op_test *t)
{
    int n = t->p[0];
    floats(t, "w", INOUT, F32, n, 1);
    floats(t, "m", INOUT, F32, n, 0.1f);
    float *v = floats(t, "v", INOUT, F32, n, 0.1f);
    for (int i = 0; i < n; i++) v[i] = v[i] * v[i];
    floats(t, "grad", IN, F32, n, 0.5f);
    floats(t, "grad_scale", IN, F32, 1, 1)[0] = 0.7f;
}

static void adamw_launch(struct op_test *t, void **d)
{
    struct adamw a = adamw_of(t->p[1]);
    struct moments moments = {MOMENTS_F32, d[1], d[2], NULL, NULL};
    a.grad_scale = d[4];
    ops->adamw(dev, d[0], NULL, &moments, d[3], t->p[0], &a, DT_F32);
}

static void adamw_reference(struct op_test *t, double **v)
{
    struct adamw a = adamw_of(t->p[1]);
    for (int i = 0; i < t->p[0]; i++) {
        double g = v[3][i] * v[4][0], p = v[0][i] - (double)a.lr * a.weight_decay * v[0][i];
        double m = a.beta1 * v[1][i] + (1 - (double)a.beta1) * g;
        double s = a.beta2 * v[2][i] + (1 - (double)a.beta2) * g * g;
        double step = a.lr / a.bias_correction1 * m / (sqrt(s) / sqrt(a.bias_correction2) + a.eps);
        t->a[0].expect[i] = p - step;
        t->a[1].expect[i] = m;
        t->a[2].expect[i] = s;
    }
}

OP(adamw, "adamw");

static const struct op_case cases[] = {
    {&op_squares, "n1", {1}, false},
    {&op_squares, "n1000003", {1000003}, false},
    {&op_adamw, "n5 step 1", {5, 1}, false},
    {&op_adamw, "n100001 step 10", {100001, 10}, false},
};

// 1,000 steps: bf16 weights with their residuals hold the same bits as a plain f32 run.
ON_EACH_DEVICE(adamw_exact)
{
    enum { N = 4099, STEPS = 1000 };
    struct rng rng;
    rng_init(&rng, 5, 0);
    float *host = op_host(N * sizeof *host), *grad = op_host(N * sizeof *grad);
    uint16_t *high = op_host(N * 2), *low = op_host(N * 2);
    for (int i = 0; i < N; i++) {
        host[i] = 0.02f * rng_normal(&rng);
        high[i] = master_high(host[i]);
        low[i] = master_low(host[i]);
    }
    float one = 0.9f;
    void *w32 = to_device(host, N * 4), *w16 = to_device(high, N * 2);
    void *residual = to_device(low, N * 2), *scale = to_device(&one, 4);
    void *g = to_device(host, N * 4), *moments[4];
    for (int k = 0; k < 4; k++) {
        moments[k] = to_device(NULL, N * 4);
        device_fill(dev, moments[k], 0, N * 4);
    }
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
        sync_or_fail();
    }
    float *got = op_host(N * sizeof *got);
    from_device(got, w32, N * 4);
    from_device(high, w16, N * 2);
    from_device(low, residual, N * 2);
    int moved = 0;
    for (int i = 0; i < N; i++) {
        float joined = master_join(high[i], low[i]);
        moved += got[i] != host[i];
        if (memcmp(&joined, &got[i], 4) != 0)
            fail_msg("weight %d: %.9g in two halves, %.9g in f32", i, joined, got[i]);
    }
    assert_true(moved > N * 9 / 10);
}

// ---- moments of fewer bits ----------------------------------------------------------------------

struct narrow { // what a run of AdamW leaves: its arrays, guarded, one after the other
    unsigned char *bytes;
    size_t n;
};

// 30 steps over n weights. Gradients lie orders of magnitude apart, and some are always 0.
static struct narrow narrow_run(struct device *on, enum moments_kind kind, enum dtype w_dt, int n)
{
    op_use(on, DT_F32);
    size_t moment = kind == MOMENTS_F32 ? 4 : kind == MOMENTS_BF16 ? 2 : 1;
    size_t scales = kind == MOMENTS_8BIT ? (size_t)(n + MOMENT_BLOCK - 1) / MOMENT_BLOCK * 4 : 0;
    size_t part[6] = {(size_t)n * dtype_size(w_dt),
                      w_dt == DT_BF16 ? (size_t)n * 2 : 0,
                      (size_t)n * moment,
                      (size_t)n * moment,
                      scales,
                      scales};
    float clip = 0.7f, *grad = op_host((size_t)n * sizeof *grad), *w = op_host((size_t)n * 4);
    uint16_t *half = op_host((size_t)n * 2);
    struct rng rng;
    void *d[6];
    struct narrow ret = {NULL, 0};
    rng_init(&rng, 17, 0);
    for (int i = 0; i < n; i++) {
        half[i] = bf16_from_f32(0.02f * rng_normal(&rng));
        w[i] = f32_from_bf16(half[i]);
    }
    for (int k = 0; k < 6; k++) {
        d[k] = to_device(NULL, part[k] + GUARD);
        device_fill(dev, d[k], 0, part[k] + GUARD);
        ret.n += part[k] + GUARD;
    }
    device_copy_in(dev, d[0], w_dt == DT_F32 ? (void *)w : (void *)half, part[0]);
    void *g = to_device(w, (size_t)n * 4), *scale = to_device(&clip, 4);
    struct moments m = {kind, d[2], d[3], scales ? d[4] : NULL, scales ? d[5] : NULL};
    for (int step = 1; step <= 30; step++) {
        struct adamw a = adamw_of(step);
        for (int i = 0; i < n; i++)
            grad[i] = i % 7 == 3 ? 0 : rng_normal(&rng) * powf(10, (float)(i % 5) - 6);
        device_copy_in(dev, g, grad, (size_t)n * 4);
        a.grad_scale = scale;
        ops->adamw(dev, d[0], w_dt == DT_BF16 ? d[1] : NULL, &m, g, n, &a, w_dt);
        sync_or_fail();
    }
    ret.bytes = op_host(ret.n);
    unsigned char *at = ret.bytes;
    for (int k = 0; k < 6; k++, at += GUARD) {
        from_device(at, d[k], part[k] + GUARD);
        at += part[k];
        for (int i = 0; i < GUARD; i++) assert_int_equal(at[i], 0);
    }
    return ret;
}

// bf16 and 8-bit moments: f32 weights and their two halves stay the same; CUDA and the CPU give the
// same bits, of the weights, the moments and their scales.
TEST(test_adamw_narrow)
{
    static const int sizes[] = {5, 128, 4099, 100000};
    for (int k = 0; k < 8; k++) {
        enum moments_kind kind = k < 4 ? MOMENTS_BF16 : MOMENTS_8BIT;
        int n = sizes[k % 4];
        struct narrow whole = narrow_run(op_cpu, kind, DT_F32, n);
        struct narrow halves = narrow_run(op_cpu, kind, DT_BF16, n);
        const float *w = (const float *)whole.bytes;
        for (int i = 0; i < n; i++) {
            uint16_t high, low;
            memcpy(&high, halves.bytes + 2 * i, 2);
            memcpy(&low, halves.bytes + 2 * n + GUARD + 2 * i, 2);
            float joined = master_join(high, low);
            assert_memory_equal(&joined, &w[i], 4);
        }
        for (int half = 0; op_cuda && half < 2; half++) {
            const struct narrow *want = half ? &halves : &whole;
            struct narrow have = narrow_run(op_cuda, kind, half ? DT_BF16 : DT_F32, n);
            assert_int_equal(have.n, want->n);
            for (size_t i = 0; i < have.n; i++)
                if (have.bytes[i] != want->bytes[i])
                    fail_msg("%s moments, %s weights, n %d: byte %zu of %zu is %02x on CUDA, %02x "
                             "on the CPU",
                             kind == MOMENTS_BF16 ? "bf16" : "8-bit", half ? "bf16" : "f32", n, i,
                             have.n, have.bytes[i], want->bytes[i]);
        }
    }
    printf("adamw narrow moments: %s\n", op_cuda ? "CUDA as the CPU, to the bit" : "cpu only");
}

OP_TESTS(cases)
