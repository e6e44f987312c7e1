/* test_moe.c: mixtures of experts: routing, its balance, the weighted sum of what the experts give,
 * and the gradients of all three. The experts' matmuls are in test_experts.c. */
// SPDX-License-Identifier: Apache-2.0
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
    routing_arrays(t, t->p[0], t->p[1], t->p[2], (enum logits)t->p[3]);
}

static void route_launch(struct op_test *t, void **d)
{
    struct moe_routing routing = routing_of(d);
    const struct moe_shape shape = moe_shape_of(t->p[0], t->p[1], t->p[2], (enum router)t->p[4]);
    ops->moe_route(dev, &routing, d[RT_LOGITS], has_bias((enum router)t->p[4]) ? d[RT_BIAS] : NULL,
                   &shape);
}

static void routing_reference(struct op_test *t, double **v, enum router router)
{
    const int *p = t->p, n_experts = p[1], top_k = p[2], n = p[0] * top_k;
    const struct moe_shape shape = moe_shape_of(p[0], n_experts, top_k, router);
    int32_t *expert = op_host((size_t)n * sizeof *expert);
    int32_t *place = op_host((size_t)n * sizeof *place);
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
}

static void route_reference(struct op_test *t, double **v)
{
    routing_reference(t, v, (enum router)t->p[4]);
}

OP(route, "moe_route");

// moe_combine: p: rows top_k width weighted add

enum { CB_Y, CB_X, CB_PLACE, CB_WEIGHT };

static void combine_setup(struct op_test *t)
{
    const int *p = t->p, n = p[0] * p[1];
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

static void combine_launch(struct op_test *t, void **d)
{
    struct moe_shape shape = moe_shape_of(t->p[0], 8, t->p[1], MIXTRAL);
    shape.width = t->p[2];
    shape.dt = dt;
    ops->moe_combine(dev, d[CB_Y], d[CB_X], d[CB_PLACE], t->p[3] ? d[CB_WEIGHT] : NULL, &shape,
                     t->p[4]);
}

static void combine_reference(struct op_test *t, double **v)
{
    const int *p = t->p, top_k = p[1], width = p[2];
    for (int i = 0; i < p[0]; i++)
        for (int c = 0; c < width; c++) {
            double sum = p[4] ? v[CB_Y][(int64_t)i * width + c] : 0;
            for (int a = i * top_k; a < (i + 1) * top_k; a++)
                sum += (p[3] ? v[CB_WEIGHT][a] : 1) *
                       v[CB_X][(int64_t)t->a[CB_PLACE].i[a] * width + c];
            t->a[CB_Y].expect[(int64_t)i * width + c] = sum;
        }
}

OP(combine, "moe_combine");

/* moe_combine_back and moe_route_back, chained as in a backward pass. p: rows n_experts top_k
 * pattern width router. The loss is the sum of dy * combine(x) under the weights of the logits;
 * which experts are chosen does not depend on them, and neither does a sorted row of x. */

enum { MB_DX = RT_BIAS + 1, MB_DWEIGHT, MB_DLOGITS, MB_DY, MB_X };

static void moe_back_setup(struct op_test *t)
{
    const int *p = t->p, n = p[0] * p[2];
    routing_arrays(t, p[0], p[1], p[2], (enum logits)p[3]);
    floats(t, "dx", OUT, DATA, (int64_t)n * p[4], 1);
    floats(t, "dweight", OUT, F32, n, 1);
    floats(t, "dlogits", OUT, DATA, (int64_t)p[0] * p[1], 1);
    floats(t, "dy", IN, DATA, (int64_t)p[0] * p[4], 1);
    floats(t, "x", IN, DATA, (int64_t)n * p[4], 1);
}

static void moe_back_launch(struct op_test *t, void **d)
{
    struct moe_shape shape = moe_shape_of(t->p[0], t->p[1], t->p[2], (enum router)t->p[5]);
    struct moe_routing routing = routing_of(d);
    shape.width = t->p[4];
    shape.dt = dt;
    ops->moe_route(dev, &routing, d[RT_LOGITS], has_bias((enum router)t->p[5]) ? d[RT_BIAS] : NULL,
                   &shape);
    ops->moe_combine_back(dev, d[MB_DX], d[MB_DWEIGHT], d[MB_DY], d[MB_X], &routing, &shape);
    ops->moe_route_back(dev, d[MB_DLOGITS], d[MB_DWEIGHT], d[RT_LOGITS], &routing, &shape);
}

// In v: the weights and choices of RT_WEIGHT and RT_EXPERT, the latter as numbers in double.
static double moe_loss(struct op_test *t, double **v)
{
    const int *p = t->p, n_experts = p[1], top_k = p[2], width = p[4];
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
    const int *p = t->p, top_k = p[2], width = p[4];
    double loss = 0;
    for (int a = 0; a < p[0] * top_k; a++)
        for (int c = 0; c < width; c++)
            loss += v[RT_WEIGHT][a] * v[MB_DY][(int64_t)(a / top_k) * width + c] *
                    v[MB_X][(int64_t)v[RT_PLACE][a] * width + c];
    return loss;
}

static void moe_back_reference(struct op_test *t, double **v)
{
    const int *p = t->p, n = p[0] * p[2];
    routing_reference(t, v, (enum router)p[5]);
    v[RT_EXPERT] = op_host((size_t)n * sizeof(double));
    v[RT_PLACE] = op_host((size_t)n * sizeof(double));
    for (int a = 0; a < n; a++) {
        v[RT_EXPERT][a] = t->a[RT_EXPERT].expect[a];
        v[RT_PLACE][a] = t->a[RT_PLACE].expect[a];
        v[RT_WEIGHT][a] = t->a[RT_WEIGHT].expect[a];
    }
    differentiate(t, v, MB_DX, MB_X, false, moe_loss);
    differentiate(t, v, MB_DLOGITS, RT_LOGITS, false, moe_loss);
    differentiate(t, v, MB_DWEIGHT, RT_WEIGHT, false, weight_loss);
}

OP(moe_back, "moe_back");

// moe_balance: p: rows n_experts top_k pattern of the logits. moe_balance_back: rows n_experts.

enum { BC_PROBS, BC_COUNTS, BC_LOGITS, BC_OFFSETS };

// Three quarters of n rows, about, are one expert's.
static void uneven_offsets(struct op_test *t, int32_t *offsets, int n, int n_experts)
{
    for (int r = 0; r < n; r++) {
        int e = (int)rng_below(&t->rng, (uint32_t)n_experts);
        offsets[(rng_below(&t->rng, 4) > 0 ? n_experts / 2 : e) + 1]++;
    }
    for (int e = 0; e < n_experts; e++) offsets[e + 1] += offsets[e];
}

static void balance_setup(struct op_test *t)
{
    floats(t, "probs", OUT, F32, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "counts", INOUT, F32, t->p[1], 1);
    router_logits(t, floats(t, "logits", IN, F32, (int64_t)t->p[0] * t->p[1], 1), t->p[0], t->p[1],
                  (enum logits)t->p[3]);
    uneven_offsets(t, ints(t, "offsets", t->p[1] + 1), t->p[0] * t->p[2], t->p[1]);
}

static void balance_launch(struct op_test *t, void **d)
{
    const struct moe_shape shape = moe_shape_of(t->p[0], t->p[1], t->p[2], MIXTRAL);
    const struct moe_routing routing = {.offsets = d[BC_OFFSETS]};
    ops->moe_balance(dev, d[BC_PROBS], d[BC_COUNTS], d[BC_LOGITS], &routing, &shape);
}

static void balance_reference(struct op_test *t, double **v)
{
    const int32_t *offsets = t->a[BC_OFFSETS].i;
    const struct moe_shape shape = moe_shape_of(t->p[0], t->p[1], t->p[2], MIXTRAL);
    for (int i = 0; i < t->p[0] * t->p[1]; i++)
        t->a[BC_PROBS].expect[i] =
            score_of(v[BC_LOGITS] + i / t->p[1] * t->p[1], &shape, i % t->p[1]);
    for (int e = 0; e < t->p[1]; e++)
        t->a[BC_COUNTS].expect[e] = v[BC_COUNTS][e] + offsets[e + 1] - offsets[e];
}

OP(balance, "moe_balance");

enum { LB_DLOGITS, LB_LOGITS, LB_COUNTS };
#define BALANCE_SCALE 0.3f

static void balance_back_setup(struct op_test *t)
{
    floats(t, "dlogits", INOUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "logits", IN, F32, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "counts", IN, F32, t->p[1], 5);
}

static void balance_back_launch(struct op_test *t, void **d)
{
    struct moe_shape shape = moe_shape_of(t->p[0], t->p[1], 1, MIXTRAL);
    shape.dt = dt;
    ops->moe_balance_back(dev, d[LB_DLOGITS], d[LB_LOGITS], d[LB_COUNTS], &shape, BALANCE_SCALE);
}

static double balance_loss(struct op_test *t, double **v)
{
    const struct moe_shape shape = moe_shape_of(t->p[0], t->p[1], 1, MIXTRAL);
    double loss = 0;
    for (int i = 0; i < t->p[0] * t->p[1]; i++)
        loss += (double)BALANCE_SCALE * v[LB_COUNTS][i % t->p[1]] *
                score_of(v[LB_LOGITS] + i / t->p[1] * t->p[1], &shape, i % t->p[1]);
    return loss;
}

OP_BACK(balance_back, "moe_balance_back", balance_loss);

static const struct op_case cases[] = {
    {&op_balance, "1 row, 1 of 3", {1, 3, 1, ANY}, false},
    {&op_balance, "37 rows, 2 of 8", {37, 8, 2, ANY}, false},
    {&op_balance, "33 rows, 40 of 100 far apart", {33, 100, 40, ONE}, false},
    {&op_balance, "3001 rows, 8 of 128", {3001, 128, 8, ANY}, true},
    {&op_balance_back, "1 row of 3 experts", {1, 3}, false},
    {&op_balance_back, "19 rows of 8 experts", {19, 8}, false},
    {&op_balance_back, "5 rows of 70 experts", {5, 70}, false},
    {&op_balance_back, "2001 rows of 128 experts", {2001, 128}, true},
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
};

/* A token through a mixture of experts, alone and among others: on the CPU the same bits. NaN
 * logits still choose experts, and show in the weights. */
ON_EACH_DEVICE(moe_rows)
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
    float *d_x = to_device(x, sizeof x), *d_w = to_device(w, sizeof w);
    float *d_logits = to_device(logits, sizeof logits);
    float *d_in = to_device(NULL, A * WIDTH * sizeof *d_in);
    float *d_out = to_device(NULL, A * INNER * sizeof *d_out);
    float *d_y = to_device(NULL, sizeof together);
    struct moe_routing r = {to_device(NULL, A * 4), to_device(NULL, A * 4), to_device(NULL, A * 4),
                            to_device(NULL, A * 4), to_device(NULL, (EXPERTS + 1) * 4)};
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
            ops->matmul(dev, d_out, d_in, d_w, NULL,
                        &(struct matmul){.m = n,
                                         .n = INNER,
                                         .k = WIDTH,
                                         .trans_b = true,
                                         .offsets = r.offsets,
                                         .n_experts = EXPERTS});
            ops->moe_combine(dev, d_y + i * INNER, d_out, r.place, r.weight, &shape, false);
        }
        from_device(rows == ROWS ? together : alone, d_y, sizeof together);
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
    from_device(expert, r.expert, sizeof expert);
    from_device(weight, r.weight, sizeof weight);
    for (int i = 0; i < A; i++) {
        assert_true(expert[i] >= 0 && expert[i] < EXPERTS);
        assert_true(isnan(weight[i]) == (i < 2 * TOP));
    }
    assert_int_equal(expert[TOP], 4);
}

OP_TESTS(cases)
