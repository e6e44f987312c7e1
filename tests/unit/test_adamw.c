/* test_adamw.c: AdamW's betas near 1, against the formula in double: 1 - beta is not what is left
 * of a float. On the CPU, and on a GPU where there is one, to the same bits. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops.h"
#include "tests/support/support.h"

enum { N = 300 };

static const float grads[2] = {0.25f, -1.5f};

// v of N parameters after the two gradients, and the weights.
static void two_steps(const char *device, double beta1, double beta2, float *ret_w, float *ret_v)
{
    struct device *dev;
    void *memory[5]; // w, m, v, gradient, its scale
    float host[N] = {0}, one = 1;
    assert_ok(device_open(device, &dev));
    for (int i = 0; i < 5; i++) {
        assert_ok(device_alloc(dev, sizeof host, &memory[i]));
        device_copy_in(dev, memory[i], host, sizeof host);
    }
    device_copy_in(dev, memory[4], &one, sizeof one);
    struct moments moments = {.kind = MOMENTS_F32, .m = memory[1], .v = memory[2]};
    for (int step = 1; step <= 2; step++) {
        struct adamw a = {.lr = 1e-3f, .beta1 = beta1, .beta2 = beta2, .eps = 1e-8f};
        a.bias_correction1 = (float)(1 - pow(beta1, step));
        a.bias_correction2 = (float)(1 - pow(beta2, step));
        a.step = (uint32_t)step;
        for (int i = 0; i < N; i++) host[i] = grads[step - 1] * (float)(1 + i % 7);
        device_copy_in(dev, memory[3], host, sizeof host);
        a.grad_scale = memory[4];
        device_ops(dev)->adamw(dev, memory[0], NULL, &moments, memory[3], N, &a, DT_F32);
    }
    device_copy_out(dev, ret_w, memory[0], N * sizeof *ret_w);
    device_copy_out(dev, ret_v, memory[2], N * sizeof *ret_v);
    assert_ok(device_sync(dev));
    for (int i = 0; i < 5; i++) device_release(dev, memory[i]);
    device_free(dev);
}

static void near_in_double(const float *w, const float *v, double beta1, double beta2)
{
    for (int i = 0; i < N; i++) {
        double p = 0, m = 0, s = 0;
        for (int step = 1; step <= 2; step++) {
            double g = (double)grads[step - 1] * (1 + i % 7);
            m = beta1 * m + (1 - beta1) * g;
            s = beta2 * s + (1 - beta2) * g * g;
            p -= 1e-3 / (1 - pow(beta1, step)) * m / (sqrt(s) / sqrt(1 - pow(beta2, step)) + 1e-8);
        }
        if (!(fabs(v[i] / s - 1) < 5e-7) || !(fabs(w[i] / p - 1) < 2e-6))
            fail_msg("betas %g and %g: v %g, not %g; w %g, not %g", beta1, beta2, (double)v[i], s,
                     (double)w[i], p);
    }
}

static bool has_cuda(void)
{
    struct device *dev;
    if (device_open("cuda:0", &dev) != ST_OK) return false;
    device_free(dev);
    return true;
}

TEST(betas_near_one)
{
    static const double betas[][2] = {
        {0.9, 0.999}, {0.9, 0.99999}, {0.99999, 0.999999}, {0.3, 0.6}};
    float w[N], v[N], cuda_w[N], cuda_v[N];
    const bool cuda = has_cuda();
    for (size_t k = 0; k < sizeof betas / sizeof *betas; k++) {
        two_steps("cpu", betas[k][0], betas[k][1], w, v);
        near_in_double(w, v, betas[k][0], betas[k][1]);
        if (!cuda) continue;
        two_steps("cuda:0", betas[k][0], betas[k][1], cuda_w, cuda_v);
        assert_memory_equal(w, cuda_w, sizeof w);
        assert_memory_equal(v, cuda_v, sizeof v);
    }
    if (!cuda) printf("cpu only\n");
}
