/* test_act.c: activations, the logits' soft cap, and their gradients. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

// p: rows width kind gated

static double act_formula(double x, int kind)
{
    if (kind == ACT_SILU) return x / (1 + exp(-x));
    if (kind == ACT_RELU2) return x > 0 ? x * x : 0;
    if (kind == ACT_RELU) return x > 0 ? x : 0;
    if (kind == ACT_GELU) return 0.5 * x * (1 + erf(x / sqrt(2)));
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static struct act_shape shape_of(const struct op_test *t)
{
    return (struct act_shape){.rows = t->p[0],
                              .width = t->p[1],
                              .kind = (enum act_kind)t->p[2],
                              .gated = t->p[3],
                              .dt = dt,
                              .alpha = 1.702f,
                              .limit = 1.3f};
}

static double clamped_formula(double gate, double up)
{
    const double alpha = 1.702f, limit = 1.3f, g = fmin(gate, limit);
    return g / (1 + exp(-alpha * g)) * (fmin(fmax(up, -limit), limit) + 1);
}

static double act_at(const int *p, const double *x, int r, int c)
{
    const double *pair = x + (int64_t)r * 2 * p[1];
    if (p[2] == ACT_CLAMPED) return clamped_formula(pair[c], pair[p[1] + c]);
    if (!p[3]) return act_formula(x[(int64_t)r * p[1] + c], p[2]);
    return act_formula(pair[c], p[2]) * pair[p[1] + c];
}

static void act_setup(struct op_test *t)
{
    floats(t, "y", OUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
    float *x = floats(t, "x", IN, DATA, (int64_t)t->p[0] * t->p[1] * (t->p[3] ? 2 : 1), 3);
    x[0] = -30;
    x[1] = 30;
}

static void act_launch(struct op_test *t, void **d)
{
    const struct act_shape shape = shape_of(t);
    ops->act(dev, d[0], d[1], &shape);
}

static void act_rows(const int *p, double *y, const double *x)
{
    for (int r = 0; r < p[0]; r++)
        for (int c = 0; c < p[1]; c++) y[(int64_t)r * p[1] + c] = act_at(p, x, r, c);
}

static void act_reference(struct op_test *t, double **v)
{
    act_rows(t->p, t->a[0].expect, v[1]);
}

OP(act, "act");

static void act_back_setup(struct op_test *t)
{
    int64_t n = (int64_t)t->p[0] * t->p[1] * (t->p[3] ? 2 : 1);
    floats(t, "dx", OUT, DATA, n, 1);
    floats(t, "dy", IN, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "x", IN, DATA, n, 2);
    floats(t, "y", OUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
}

static void act_back_launch(struct op_test *t, void **d)
{
    const struct act_shape shape = shape_of(t);
    ops->act_back(dev, d[0], NULL, d[3], d[1], d[2], &shape);
}

static double act_loss(struct op_test *t, double **v)
{
    double *y = op_host((size_t)t->a[1].n * sizeof *y);
    act_rows(t->p, y, v[2]);
    return dot(v[1], y, t->a[1].n);
}

static void act_back_reference(struct op_test *t, double **v)
{
    differentiate(t, v, 0, 2, false, act_loss);
    act_rows(t->p, t->a[3].expect, v[2]);
}

OP(act_back, "act_back");

// softcap, softcap_back: p: n, cap (0: none), scale in eighths

static double capped_value(const struct op_test *t, double x)
{
    const double cap = t->p[1], scale = t->p[2] / 8.0;
    return cap > 0 ? cap * tanh(scale * x / cap) : scale * x;
}

static void softcap_setup(struct op_test *t)
{
    floats(t, "x", INOUT, F32, t->p[0], 30);
}

static void softcap_launch(struct op_test *t, void **d)
{
    ops->softcap(dev, d[0], t->p[0], (float)t->p[1], (float)t->p[2] / 8.0f);
}

static void softcap_reference(struct op_test *t, double **v)
{
    for (int i = 0; i < t->p[0]; i++) t->a[0].expect[i] = capped_value(t, v[0][i]);
}

OP(softcap, "softcap");

static void softcap_back_setup(struct op_test *t)
{
    floats(t, "dx", INOUT, F32, t->p[0], 1);
    float *capped = floats(t, "capped", IN, F32, t->p[0], 1);
    float *x = floats(t, "x", IN, F32, t->p[0], 20);
    for (int i = 0; i < t->p[0]; i++) capped[i] = (float)capped_value(t, x[i]);
}

static void softcap_back_launch(struct op_test *t, void **d)
{
    ops->softcap_back(dev, d[0], d[1], t->p[0], (float)t->p[1], (float)t->p[2] / 8.0f);
}

static double softcap_loss(struct op_test *t, double **v)
{
    double loss = 0;
    for (int i = 0; i < t->p[0]; i++) loss += v[0][i] * capped_value(t, v[2][i]);
    return loss;
}

static void softcap_back_reference(struct op_test *t, double **v)
{
    differentiate(t, v, 0, 2, false, softcap_loss);
}

OP(softcap_back, "softcap_back");

static const struct op_case cases[] = {
    {&op_act, "silu gated 5 x 7", {5, 7, ACT_SILU, 1}, false},
    {&op_act, "silu gated 33 x 513", {33, 513, ACT_SILU, 1}, false},
    {&op_act, "silu 9 x 100", {9, 100, ACT_SILU, 0}, false},
    {&op_act, "gelu_tanh gated 9 x 100", {9, 100, ACT_GELU_TANH, 1}, false},
    {&op_act, "gelu_tanh 9 x 100", {9, 100, ACT_GELU_TANH, 0}, false},
    {&op_act, "gelu 9 x 100", {9, 100, ACT_GELU, 0}, false},
    {&op_act, "gelu gated 3 x 65", {3, 65, ACT_GELU, 1}, false},
    {&op_act, "relu2 9 x 100", {9, 100, ACT_RELU2, 0}, false},
    {&op_act, "relu2 gated 3 x 65", {3, 65, ACT_RELU2, 1}, false},
    {&op_act, "relu 9 x 100", {9, 100, ACT_RELU, 0}, false},
    {&op_act, "relu gated 3 x 65", {3, 65, ACT_RELU, 1}, false},
    {&op_act, "clamped 5 x 7", {5, 7, ACT_CLAMPED, 1}, false},
    {&op_act, "clamped 9 x 104", {9, 104, ACT_CLAMPED, 1}, false},
    {&op_act, "silu gated 200 x 4096", {200, 4096, ACT_SILU, 1}, true},
    {&op_act_back, "silu gated 5 x 7", {5, 7, ACT_SILU, 1}, false},
    {&op_act_back, "silu 3 x 33", {3, 33, ACT_SILU, 0}, false},
    {&op_act_back, "gelu_tanh gated 3 x 17", {3, 17, ACT_GELU_TANH, 1}, false},
    {&op_act_back, "gelu_tanh 3 x 17", {3, 17, ACT_GELU_TANH, 0}, false},
    {&op_act_back, "gelu gated 3 x 17", {3, 17, ACT_GELU, 1}, false},
    {&op_act_back, "gelu 3 x 17", {3, 17, ACT_GELU, 0}, false},
    {&op_act_back, "relu2 gated 3 x 17", {3, 17, ACT_RELU2, 1}, false},
    {&op_act_back, "relu2 3 x 17", {3, 17, ACT_RELU2, 0}, false},
    {&op_act_back, "relu gated 3 x 17", {3, 17, ACT_RELU, 1}, false},
    {&op_act_back, "relu 3 x 17", {3, 17, ACT_RELU, 0}, false},
    {&op_act_back, "clamped 5 x 7", {5, 7, ACT_CLAMPED, 1}, false},
    {&op_act_back, "clamped 3 x 24", {3, 24, ACT_CLAMPED, 1}, false},
    {&op_act_back, "clamped 301 x 1001", {301, 1001, ACT_CLAMPED, 1}, true},
    {&op_act_back, "silu gated 301 x 1001", {301, 1001, ACT_SILU, 1}, true},
    {&op_softcap, "n1001", {1001, 30, 8}, false},
    {&op_softcap, "n1001 scaled", {1001, 30, 3}, false},
    {&op_softcap, "n1000 scale alone", {1000, 0, 3}, false},
    {&op_softcap_back, "n77", {77, 30, 8}, false},
    {&op_softcap_back, "n80 scaled", {80, 30, 3}, false},
    {&op_softcap_back, "n77 scale alone", {77, 0, 3}, false},
};

OP_TESTS(cases)
