/* test_moe.c: mixtures of experts: routing, its balance, the experts' matmuls, their weighted
 * sum, and the gradients of all four. */
#include "tests/support/op_table.h"

// moe_route: p: rows n_experts top_k pattern of the logits, router

enum logits { ANY, TIES, ONE, FEW }; // ONE: the last expert always; FEW: never every third one

// How published models route; the last ones for the sake of the code. p names one by number.
enum router { MIXTRAL, QWEN2, DEEPSEEK2, DEEPSEEK3, GLM4, SIGMOID, BIASED };
static const struct moe_shape routers[] = {
    [MIXTRAL] = {.norm_topk = true, .scale = 1},
    [QWEN2] = {.scale = 1},
    [DEEPSEEK2] = {.n_group = 4, .topk_group = 2, .scale = 16},
    [DEEPSEEK3] =
        {.scoring = MOE_SIGMOID, .norm_topk = true, .n_group = 4, .topk_group = 2, .scale = 2.5f},
    [GLM4] = {.scoring = MOE_SIGMOID, .norm_topk = true, .n_group = 1, .topk_group = 1, .scale = 1},
    [SIGMOID] = {.scoring = MOE_SIGMOID, .scale = 0.7f},
    [BIASED] = {.norm_topk = true, .scale = 1},
};

static bool has_bias(enum router router)
{
    return router == DEEPSEEK3 || router == GLM4 || router == BIASED;
}

static struct moe_shape moe_shape_of(int rows, int n_experts, int top_k, enum router router)
{
    struct moe_shape shape = routers[router];
    shape.rows = rows;
    shape.n_experts = n_experts;
    shape.top_k = top_k;
    return shape;
}

static void router_logits(struct op_test *t, float *x, int rows, int n_experts, enum logits pattern)
{
    for (int i = 0; i < rows; i++)
        for (int e = 0; e < n_experts; e++) {
            float *logit = &x[(int64_t)i * n_experts + e];
            if (pattern == TIES) *logit = (float)rng_below(&t->rng, 3);
            if (pattern == ONE && e == n_experts - 1) *logit += 40;
            if (pattern == FEW && e % 3 == 1) *logit -= 60;
        }
}

// An expert's score.
static double score_of(const double *logits, const struct moe_shape *m, int e)
{
    double sum = 0;
    if (m->scoring == MOE_SIGMOID) return 1 / (1 + exp(-logits[e]));
    for (int i = 0; i < m->n_experts; i++) sum += exp(logits[i] - logits[e]);
    return 1 / sum;
}

// The number of the largest key that is not taken, the lowest of equals; takes it.
static int take_largest(const double *key, bool *taken, int n)
{
    int best = -1;
    for (int e = 0; e < n; e++)
        if (!taken[e] && (best < 0 || key[e] > key[best])) best = e;
    taken[best] = true;
    return best;
}

// Takes, so that they are not chosen, the experts of all groups but the best.
static void take_other_groups(const double *key, bool *taken, const struct moe_shape *m)
{
    double of_group[16];
    bool best[16] = {false};
    const int size = m->n_experts / m->n_group;
    for (int g = 0; g < m->n_group; g++) {
        bool counted[1024] = {false};
        of_group[g] = key[g * size + take_largest(key + g * size, counted, size)];
        if (m->scoring == MOE_SIGMOID && size > 1)
            of_group[g] += key[g * size + take_largest(key + g * size, counted, size)];
    }
    for (int i = 0; i < m->topk_group; i++) take_largest(of_group, best, m->n_group);
    for (int e = 0; e < m->n_experts; e++) taken[e] = !best[e / size];
}

// Weights of a row's chosen experts.
static void weigh(double *weight, const int32_t *expert, const double *logits,
                  const struct moe_shape *m)
{
    double sum = 0;
    for (int j = 0; j < m->top_k; j++) {
        weight[j] = m->scale * score_of(logits, m, expert[j]);
        sum += weight[j] / m->scale;
    }
    for (int j = 0; m->norm_topk && j < m->top_k; j++) weight[j] /= sum;
}

// The chosen experts of a row, best first, and their weights. bias: NULL where there is none.
static void choose(int32_t *expert, double *weight, const double *logits, const double *bias,
                   const struct moe_shape *m)
{
    double key[1024];
    bool taken[1024] = {false};
    for (int e = 0; e < m->n_experts; e++) {
        key[e] = m->scoring == MOE_SOFTMAX && !bias ? logits[e] : score_of(logits, m, e);
        if (bias) key[e] += bias[e];
    }
    if (m->n_group > 1) take_other_groups(key, taken, m);
    for (int j = 0; j < m->top_k; j++) expert[j] = take_largest(key, taken, m->n_experts);
    weigh(weight, expert, logits, m);
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

enum { RT_EXPERT, RT_WEIGHT, RT_ROW, RT_PLACE, RT_OFFSETS, RT_LOGITS, RT_BIAS };

// The arrays of a routing come first, in this order.
static void routing_arrays(struct op_test *t, int rows, int n_experts, int top_k,
                           enum logits pattern)
{
    array_new(t, "expert", OUT, I32, (int64_t)rows * top_k);
    array_new(t, "weight", OUT, F32, (int64_t)rows * top_k);
    array_new(t, "row", OUT, I32, (int64_t)rows * top_k);
    array_new(t, "place", OUT, I32, (int64_t)rows * top_k);
    array_new(t, "offsets", OUT, I32, n_experts + 1);
    float *logits = floats(t, "logits", IN, F32, (int64_t)rows * n_experts, 2);
    router_logits(t, logits, rows, n_experts, pattern);
    floats(t, "bias", IN, F32, n_experts, 0.3f);
}

static struct moe_routing routing_of(void **d)
{
    return (struct moe_routing){d[RT_EXPERT], d[RT_WEIGHT], d[RT_ROW], d[RT_PLACE], d[RT_OFFSETS]};
}

static void route_setup(struct op_test *t)
{
    const int *p = t->c->p;
    routing_arrays(t, p[0], p[1], p[2], (enum logits)p[3]);
}

static void route_launch(struct op_test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    struct moe_routing routing = routing_of(d);
    const struct moe_shape shape = moe_shape_of(p[0], p[1], p[2], (enum router)p[4]);
    ops->moe_route(dev, &routing, d[RT_LOGITS], has_bias((enum router)p[4]) ? d[RT_BIAS] : NULL,
                   &shape);
}

static void routing_reference(struct op_test *t, double **v, enum router router)
{
    const int *p = t->c->p, n_experts = p[1], top_k = p[2], n = p[0] * top_k;
    const struct moe_shape shape = moe_shape_of(p[0], n_experts, top_k, router);
    int32_t *expert = must(malloc((size_t)n * sizeof *expert));
    int32_t *place = must(malloc((size_t)n * sizeof *place));
    for (int i = 0; i < p[0]; i++)
        choose(expert + i * top_k, t->a[RT_WEIGHT].expect + i * top_k,
               v[RT_LOGITS] + (int64_t)i * n_experts, has_bias(router) ? v[RT_BIAS] : NULL, &shape);
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

static void route_reference(struct op_test *t, double **v)
{
    routing_reference(t, v, (enum router)t->c->p[4]);
}

static const struct op_def op_route = {"moe_route", route_setup, route_launch, route_reference};

// moe_combine: p: rows top_k width weighted add

enum { CB_Y, CB_X, CB_PLACE, CB_WEIGHT };

static void combine_setup(struct op_test *t)
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

static void combine_launch(struct op_test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    struct moe_shape shape = moe_shape_of(p[0], 8, p[1], MIXTRAL);
    shape.width = p[2];
    shape.dt = t->dt;
    ops->moe_combine(dev, d[CB_Y], d[CB_X], d[CB_PLACE], p[3] ? d[CB_WEIGHT] : NULL, &shape, p[4]);
}

static void combine_reference(struct op_test *t, double **v)
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
 * pattern width router. The loss is the sum of dy * combine(x) under the weights of the logits;
 * which experts are chosen does not depend on them, and neither does a sorted row of x. */

enum { MB_DX = RT_BIAS + 1, MB_DWEIGHT, MB_DLOGITS, MB_DY, MB_X };

static void moe_back_setup(struct op_test *t)
{
    const int *p = t->c->p, n = p[0] * p[2];
    routing_arrays(t, p[0], p[1], p[2], (enum logits)p[3]);
    floats(t, "dx", OUT, DATA, (int64_t)n * p[4], 1);
    floats(t, "dweight", OUT, F32, n, 1);
    floats(t, "dlogits", OUT, DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "dy", IN, DATA, (int64_t)p[0] * p[4], 1);
    floats(t, "x", IN, DATA, (int64_t)n * p[4], 1);
}

static void moe_back_launch(struct op_test *t, struct device *dev, const struct ops *ops, void **d)
{
    const int *p = t->c->p;
    struct moe_shape shape = moe_shape_of(p[0], p[1], p[2], (enum router)p[5]);
    struct moe_routing routing = routing_of(d);
    shape.width = p[4];
    shape.dt = t->dt;
    ops->moe_route(dev, &routing, d[RT_LOGITS], has_bias((enum router)p[5]) ? d[RT_BIAS] : NULL,
                   &shape);
    ops->moe_combine_back(dev, d[MB_DX], d[MB_DWEIGHT], d[MB_DY], d[MB_X], &routing, &shape);
    ops->moe_route_back(dev, d[MB_DLOGITS], d[MB_DWEIGHT], d[RT_LOGITS], &routing, &shape);
}

// In v: the weights and choices of RT_WEIGHT and RT_EXPERT, the latter as numbers in double.
static double moe_loss(struct op_test *t, double **v)
{
    const int *p = t->c->p, n_experts = p[1], top_k = p[2], width = p[4];
    const struct moe_shape shape = moe_shape_of(p[0], n_experts, top_k, (enum router)p[5]);
    double loss = 0, weight[64];
    int32_t expert[64];
    for (int i = 0; i < p[0]; i++) {
        for (int j = 0; j < top_k; j++) expert[j] = (int32_t)v[RT_EXPERT][i * top_k + j];
        weigh(weight, expert, v[RT_LOGITS] + (int64_t)i * n_experts, &shape);
        for (int j = 0; j < top_k; j++) {
            int64_t place = (int64_t)v[RT_PLACE][i * top_k + j];
            for (int c = 0; c < width; c++)
                loss += weight[j] * v[MB_DY][(int64_t)i * width + c] * v[MB_X][place * width + c];
        }
    }
    return loss;
}

// dweight by way of the loss with the weights themselves as the variables
static double weight_loss(struct op_test *t, double **v)
{
    const int *p = t->c->p, top_k = p[2], width = p[4];
    double loss = 0;
    for (int a = 0; a < p[0] * top_k; a++)
        for (int c = 0; c < width; c++)
            loss += v[RT_WEIGHT][a] * v[MB_DY][(int64_t)(a / top_k) * width + c] *
                    v[MB_X][(int64_t)v[RT_PLACE][a] * width + c];
    return loss;
}

static void moe_back_reference(struct op_test *t, double **v)
{
    const int *p = t->c->p, n = p[0] * p[2];
    routing_reference(t, v, (enum router)p[5]);
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

static void fill_offsets(struct op_test *t, int32_t *offsets, int m, int n_experts,
                         enum rows pattern)
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

static void experts_setup(struct op_test *t)
{
    const int *p = t->c->p;
    floats(t, "c", OUT, p[6] ? F32 : DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "a", IN, DATA, (int64_t)p[0] * p[2], 1);
    floats(t, "b", IN, DATA, (int64_t)p[3] * p[1] * p[2], 1);
    fill_offsets(t, ints(t, "offsets", p[3] + 1), p[0], p[3], (enum rows)p[4]);
}

static void experts_launch(struct op_test *t, struct device *dev, const struct ops *ops, void **d)
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

static void experts_reference(struct op_test *t, double **v)
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

static void experts_back_setup(struct op_test *t)
{
    const int *p = t->c->p;
    int64_t n_weights = (int64_t)p[3] * p[1] * p[2];
    floats(t, "dw", INOUT, F32, n_weights, 1);
    floats(t, "dy", IN, DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "x", IN, DATA, (int64_t)p[0] * p[2], 1);
    fill_offsets(t, ints(t, "offsets", p[3] + 1), p[0], p[3], (enum rows)p[4]);
    floats(t, "w", IN, F32, n_weights, 1);
}

static void experts_back_launch(struct op_test *t, struct device *dev, const struct ops *ops,
                                void **d)
{
    const int *p = t->c->p;
    const struct matmul shape = {.m = p[0], .n = p[1], .k = p[2], .in = t->dt};
    ops->matmul_experts_back(dev, d[XB_DW], d[XB_DY], d[XB_X], d[XB_OFFSETS], p[3], &shape);
}

static double experts_loss(struct op_test *t, double **v)
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

static void experts_back_reference(struct op_test *t, double **v)
{
    differentiate(t, v, XB_DW, XB_W, true, experts_loss);
}

static const struct op_def op_experts_back = {"matmul_experts_back", experts_back_setup,
                                              experts_back_launch, experts_back_reference};

// experts_bias: p: rows width n_experts pattern

enum { BI_Y, BI_BIAS, BI_OFFSETS };

static void bias_setup(struct op_test *t)
{
    const int *p = t->c->p;
    floats(t, "y", INOUT, DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "bias", IN, DATA, (int64_t)p[2] * p[1], 1);
    fill_offsets(t, ints(t, "offsets", p[2] + 1), p[0], p[2], (enum rows)p[3]);
}

static struct expert_rows bias_shape(const struct op_test *t)
{
    const int *p = t->c->p;
    return (struct expert_rows){p[0], p[2], p[1], t->dt};
}

static void bias_launch(struct op_test *t, struct device *dev, const struct ops *ops, void **d)
{
    const struct expert_rows shape = bias_shape(t);
    ops->experts_bias(dev, d[BI_Y], d[BI_BIAS], d[BI_OFFSETS], &shape);
}

static void bias_reference(struct op_test *t, double **v)
{
    const int *p = t->c->p, width = p[1];
    const int32_t *offsets = t->a[BI_OFFSETS].i;
    for (int e = 0; e < p[2]; e++)
        for (int64_t i = (int64_t)offsets[e] * width; i < (int64_t)offsets[e + 1] * width; i++)
            t->a[BI_Y].expect[i] = v[BI_Y][i] + v[BI_BIAS][e * width + i % width];
}

static const struct op_def op_bias = {"experts_bias", bias_setup, bias_launch, bias_reference};

// experts_bias_back: p as above. The loss is the sum of dy * (y + bias).

enum { BB_DBIAS, BB_DY, BB_OFFSETS, BB_BIAS };

static void bias_back_setup(struct op_test *t)
{
    const int *p = t->c->p;
    floats(t, "dbias", INOUT, F32, (int64_t)p[2] * p[1], 1);
    floats(t, "dy", IN, DATA, (int64_t)p[0] * p[1], 1);
    fill_offsets(t, ints(t, "offsets", p[2] + 1), p[0], p[2], (enum rows)p[3]);
    floats(t, "bias", IN, F32, (int64_t)p[2] * p[1], 1);
}

static void bias_back_launch(struct op_test *t, struct device *dev, const struct ops *ops, void **d)
{
    const struct expert_rows shape = bias_shape(t);
    ops->experts_bias_back(dev, d[BB_DBIAS], d[BB_DY], d[BB_OFFSETS], &shape);
}

static double bias_loss(struct op_test *t, double **v)
{
    const int *p = t->c->p, width = p[1];
    const int32_t *offsets = t->a[BB_OFFSETS].i;
    double loss = 0;
    for (int e = 0; e < p[2]; e++)
        for (int64_t i = (int64_t)offsets[e] * width; i < (int64_t)offsets[e + 1] * width; i++)
            loss += v[BB_DY][i] * v[BB_BIAS][e * width + i % width];
    return loss;
}

static void bias_back_reference(struct op_test *t, double **v)
{
    differentiate(t, v, BB_DBIAS, BB_BIAS, true, bias_loss);
}

static const struct op_def op_bias_back = {"experts_bias_back", bias_back_setup, bias_back_launch,
                                           bias_back_reference};

// moe_balance: p: rows n_experts top_k pattern of the logits. moe_balance_back: rows n_experts.

enum { BC_PROBS, BC_COUNTS, BC_LOGITS, BC_OFFSETS };

static void balance_setup(struct op_test *t)
{
    const int *p = t->c->p;
    floats(t, "probs", OUT, F32, (int64_t)p[0] * p[1], 1);
    floats(t, "counts", INOUT, F32, p[1], 1);
    router_logits(t, floats(t, "logits", IN, F32, (int64_t)p[0] * p[1], 1), p[0], p[1],
                  (enum logits)p[3]);
    fill_offsets(t, ints(t, "offsets", p[1] + 1), p[0] * p[2], p[1], UNEVEN);
}

static void balance_launch(struct op_test *t, struct device *dev, const struct ops *ops, void **d)
{
    const struct moe_shape shape = moe_shape_of(t->c->p[0], t->c->p[1], t->c->p[2], MIXTRAL);
    const struct moe_routing routing = {.offsets = d[BC_OFFSETS]};
    ops->moe_balance(dev, d[BC_PROBS], d[BC_COUNTS], d[BC_LOGITS], &routing, &shape);
}

static void balance_reference(struct op_test *t, double **v)
{
    const int *p = t->c->p;
    const int32_t *offsets = t->a[BC_OFFSETS].i;
    const struct moe_shape shape = moe_shape_of(p[0], p[1], p[2], MIXTRAL);
    for (int i = 0; i < p[0] * p[1]; i++)
        t->a[BC_PROBS].expect[i] = score_of(v[BC_LOGITS] + i / p[1] * p[1], &shape, i % p[1]);
    for (int e = 0; e < p[1]; e++)
        t->a[BC_COUNTS].expect[e] = v[BC_COUNTS][e] + offsets[e + 1] - offsets[e];
}

static const struct op_def op_balance = {"moe_balance", balance_setup, balance_launch,
                                         balance_reference};

enum { LB_DLOGITS, LB_LOGITS, LB_COUNTS };
#define BALANCE_SCALE 0.3f

static void balance_back_setup(struct op_test *t)
{
    const int *p = t->c->p;
    floats(t, "dlogits", INOUT, DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "logits", IN, F32, (int64_t)p[0] * p[1], 1);
    floats(t, "counts", IN, F32, p[1], 5);
}

static void balance_back_launch(struct op_test *t, struct device *dev, const struct ops *ops,
                                void **d)
{
    struct moe_shape shape = moe_shape_of(t->c->p[0], t->c->p[1], 1, MIXTRAL);
    shape.dt = t->dt;
    ops->moe_balance_back(dev, d[LB_DLOGITS], d[LB_LOGITS], d[LB_COUNTS], &shape, BALANCE_SCALE);
}

static double balance_loss(struct op_test *t, double **v)
{
    const int *p = t->c->p;
    const struct moe_shape shape = moe_shape_of(p[0], p[1], 1, MIXTRAL);
    double loss = 0;
    for (int i = 0; i < p[0] * p[1]; i++)
        loss += (double)BALANCE_SCALE * v[LB_COUNTS][i % p[1]] *
                score_of(v[LB_LOGITS] + i / p[1] * p[1], &shape, i % p[1]);
    return loss;
}

static void balance_back_reference(struct op_test *t, double **v)
{
    differentiate(t, v, LB_DLOGITS, LB_LOGITS, true, balance_loss);
}

static const struct op_def op_balance_back = {"moe_balance_back", balance_back_setup,
                                              balance_back_launch, balance_back_reference};

static const struct op_case cases[] = {
    {&op_balance, "1 row, 1 of 3", {1, 3, 1, ANY}, false},
    {&op_balance, "37 rows, 2 of 8", {37, 8, 2, ANY}, false},
    {&op_balance, "33 rows, 40 of 100 far apart", {33, 100, 40, ONE}, false},
    {&op_balance, "3001 rows, 8 of 128", {3001, 128, 8, ANY}, true},
    {&op_balance_back, "1 row of 3 experts", {1, 3}, false},
    {&op_balance_back, "19 rows of 8 experts", {19, 8}, false},
    {&op_balance_back, "5 rows of 70 experts", {5, 70}, false},
    {&op_balance_back, "2001 rows of 128 experts", {2001, 128}, true},
    {&op_bias, "1 row of 7, 3 experts", {1, 7, 3, SPREAD}, false},
    {&op_bias, "40 rows of 64, 8 experts gaps", {40, 64, 8, GAPS}, false},
    {&op_bias, "33 rows of 130, 5 experts last", {33, 130, 5, LAST}, false},
    {&op_bias, "2000 rows of 5760, 128 experts", {2000, 5760, 128, SPREAD}, true},
    {&op_bias_back, "9 rows of 7, 3 experts", {9, 7, 3, SPREAD}, false},
    {&op_bias_back, "40 rows of 64, 8 experts gaps", {40, 64, 8, GAPS}, false},
    {&op_bias_back, "33 rows of 130, 5 experts first", {33, 130, 5, FIRST}, false},
    {&op_bias_back, "2000 rows of 2880, 32 experts", {2000, 2880, 32, UNEVEN}, true},
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
    {&op_route, "37 rows, 4 of 60, Qwen2-MoE", {37, 60, 4, ANY, QWEN2}, false},
    {&op_route, "21 rows, 6 of 64, DeepSeek-V2", {21, 64, 6, ANY, DEEPSEEK2}, false},
    {&op_route, "40 rows, 3 of 8 ties, DeepSeek-V2", {40, 8, 3, TIES, DEEPSEEK2}, false},
    {&op_route, "33 rows, 8 of 64, DeepSeek-V3", {33, 64, 8, ANY, DEEPSEEK3}, false},
    {&op_route, "9 rows, 2 of 4, DeepSeek-V3", {9, 4, 2, ANY, DEEPSEEK3}, false},
    {&op_route, "40 rows, 4 of 8 some unused, DeepSeek-V3", {40, 8, 4, FEW, DEEPSEEK3}, false},
    {&op_route, "19 rows, 8 of 128, GLM-4-MoE", {19, 128, 8, ANY, GLM4}, false},
    {&op_route, "19 rows, 3 of 9 ties, sigmoid", {19, 9, 3, TIES, SIGMOID}, false},
    {&op_route, "50 rows, 4 of 33, softmax and bias", {50, 33, 4, ANY, BIASED}, false},
    {&op_route, "3000 rows, 8 of 256, DeepSeek-V3", {3000, 256, 8, ANY, DEEPSEEK3}, true},
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
    {&op_moe_back, "5 rows, 4 of 9 width 12, Qwen2-MoE", {5, 9, 4, ANY, 12, QWEN2}, false},
    {&op_moe_back, "5 rows, 3 of 8 width 12, DeepSeek-V2", {5, 8, 3, ANY, 12, DEEPSEEK2}, false},
    {&op_moe_back, "6 rows, 3 of 8 width 12, DeepSeek-V3", {6, 8, 3, ANY, 12, DEEPSEEK3}, false},
    {&op_moe_back, "4 rows, 3 of 8 width 12, sigmoid", {4, 8, 3, ANY, 12, SIGMOID}, false},
    {&op_moe_back, "4 rows, 2 of 7 width 9, softmax and bias", {4, 7, 2, ANY, 9, BIASED}, false},
    {&op_moe_back,
     "301 rows, 8 of 64, width 256, DeepSeek-V3",
     {301, 64, 8, ANY, 256, DEEPSEEK3},
     true},
    {&op_moe_back, "301 rows, 4 of 60, width 256, Qwen2-MoE", {301, 60, 4, ANY, 256, QWEN2}, true},
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
};

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
            struct moe_shape shape =
                moe_shape_of(ROWS - i < rows ? ROWS - i : rows, EXPERTS, TOP, MIXTRAL);
            shape.width = INNER;
            int n = shape.rows * TOP;
            ops->moe_route(dev, &r, d_logits + i * EXPERTS, NULL, &shape);
            ops->gather_rows(dev, d_in, d_x + i * WIDTH,
                             &(struct gather_args){r.row, n, WIDTH, 1, DT_F32, 0, 0});
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
    assert_true(worst <= (device_kind(dev) == DEVICE_CPU ? 0 : 1e-5));

    for (int i = 0; i < EXPERTS; i++) logits[i] = NAN;
    logits[EXPERTS + 4] = NAN;
    device_copy_in(dev, d_logits, logits, sizeof logits);
    const struct moe_shape shape = moe_shape_of(ROWS, EXPERTS, TOP, MIXTRAL);
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

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_moe_rows),
};

int main(int argc, char **argv)
{
    return op_main(argc, argv, cases, sizeof cases / sizeof cases[0], tests,
                   sizeof tests / sizeof tests[0]);
}
