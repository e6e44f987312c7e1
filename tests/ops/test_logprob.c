/* test_logprob.c: log-probabilities, distillation, and their gradients. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

// p: n vocab temperature(tenths)

enum { LP_LOGPROB, LP_LSE, LP_ENTROPY, LP_LOGITS, LP_TARGET };

static void logprob_setup(struct op_test *t)
{
    floats(t, "logprob", OUT, F32, t->p[0], 1);
    floats(t, "lse", OUT, F32, t->p[0], 1);
    floats(t, "entropy", OUT, F32, t->p[0], 1);
    float *logits = floats(t, "logits", IN, F32, (int64_t)t->p[0] * t->p[1], 4);
    int32_t *target = ints(t, "target", t->p[0]);
    for (int i = 0; i < t->p[0]; i++) target[i] = (int32_t)rng_below(&t->rng, (uint32_t)t->p[1]);
    if (t->p[0] > 1) logits[t->p[1] + (target[1] + 1) % t->p[1]] = -INFINITY; // a forbidden token
}

static void logprob_launch(struct op_test *t, void **d)
{
    const struct head_args head = {d[LP_LOGITS], d[LP_TARGET], t->p[0], t->p[1],
                                   (float)t->p[2] / 10};
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

static void logprob_reference(struct op_test *t, double **v)
{
    double temperature = (double)((float)t->p[2] / 10);
    for (int i = 0; i < t->p[0]; i++) {
        const double *row = v[LP_LOGITS] + (int64_t)i * t->p[1];
        double lse = log_sum_exp(row, t->p[1], temperature, &t->a[LP_ENTROPY].expect[i]);
        t->a[LP_LSE].expect[i] = lse;
        t->a[LP_LOGPROB].expect[i] = row[t->a[LP_TARGET].i[i]] / temperature - lse;
    }
}

OP(logprob, "logprob");

// p: n vocab temperature * 10, whether with a term of the entropy
enum { LB_DLOGITS, LB_DLOGPROB, LB_LOGITS, LB_LSE, LB_DENTROPY, LB_ENTROPY, LB_TARGET };

static void logprob_back_setup(struct op_test *t)
{
    floats(t, "dlogits", OUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
    float *dlogprob = floats(t, "dlogprob", IN, F32, t->p[0], 1);
    float *logits = floats(t, "logits", IN, F32, (int64_t)t->p[0] * t->p[1], 3);
    float *lse = floats(t, "lse", IN, F32, t->p[0], 1);
    float *dentropy = floats(t, "dentropy", IN, F32, t->p[0], 1);
    float *entropy = floats(t, "entropy", IN, F32, t->p[0], 1);
    int32_t *target = ints(t, "target", t->p[0]);
    double *z = op_host((size_t)t->p[1] * sizeof *z);
    for (int i = 0; i < t->p[0]; i++) {
        target[i] = (int32_t)rng_below(&t->rng, (uint32_t)t->p[1]);
        for (int c = 0; c < t->p[1]; c++) z[c] = logits[(int64_t)i * t->p[1] + c];
        double of_row;
        lse[i] = (float)log_sum_exp(z, t->p[1], (double)((float)t->p[2] / 10), &of_row);
        entropy[i] = (float)of_row;
        if (!t->p[3]) dentropy[i] = 0;
    }
    if (t->p[0] > 2) dlogprob[2] = 0; // a masked token
    if (t->p[0] > 3) dentropy[3] = 0;
}

static void logprob_back_launch(struct op_test *t, void **d)
{
    const struct head_args head = {d[LB_LOGITS], d[LB_TARGET], t->p[0], t->p[1],
                                   (float)t->p[2] / 10};
    const struct head_grads grads = {.dlogprob = d[LB_DLOGPROB],
                                     .lse = d[LB_LSE],
                                     .dentropy = t->p[3] ? d[LB_DENTROPY] : NULL,
                                     .entropy = d[LB_ENTROPY]};
    ops->logprob_back(dev, d[LB_DLOGITS], &grads, &head, dt);
}

static double logprob_loss(struct op_test *t, double **v)
{
    double temperature = (double)((float)t->p[2] / 10), loss = 0;
    for (int i = 0; i < t->p[0]; i++) {
        const double *row = v[LB_LOGITS] + (int64_t)i * t->p[1];
        double entropy;
        loss += v[LB_DLOGPROB][i] * (row[t->a[LB_TARGET].i[i]] / temperature -
                                     log_sum_exp(row, t->p[1], temperature, &entropy));
        loss += v[LB_DENTROPY][i] * entropy;
    }
    return loss;
}

OP_BACK(logprob_back, "logprob_back", logprob_loss);

// p: n vocab teacher_vocab temperature * 10, whether without gradient, beta * 10, whether rows have
// weights and the gradient is added
enum { DI_DIVERGENCE, DI_OVERLAP, DI_AGREES, DI_DSTUDENT, DI_STUDENT, DI_TEACHER, DI_WEIGHTS };

static const float distill_scale = 0.37f;

static void distill_setup(struct op_test *t)
{
    floats(t, "divergence", OUT, F32, t->p[0], 1);
    floats(t, "overlap", OUT, F32, t->p[0], 1);
    floats(t, "agrees", OUT, F32, t->p[0], 1);
    floats(t, "dstudent", t->p[6] ? INOUT : OUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
    float *student = floats(t, "student", IN, F32, (int64_t)t->p[0] * t->p[1], 1);
    float *teacher = floats(t, "teacher", IN, F32, (int64_t)t->p[0] * t->p[2], 2);
    floats(t, "weights", IN, F32, t->p[0], 1);
    for (int i = 0; i < t->p[0]; i++) {
        for (int c = 0; c < t->p[1]; c++)
            student[(int64_t)i * t->p[1] + c] += teacher[(int64_t)i * t->p[2] + c];
        // of padding rows of an embedding anything may come
        for (int c = t->p[1]; c < t->p[2]; c++)
            teacher[(int64_t)i * t->p[2] + c] = c % 2 ? 30 : NAN;
    }
    // a forbidden token, which of reverse is the student's
    if (t->p[0] > 1 && t->p[5] < 10) teacher[t->p[2] + 3] = -INFINITY;
    if (t->p[0] > 1 && t->p[5] > 0) student[t->p[1] + 5] = -INFINITY;
}

static void distill_launch(struct op_test *t, void **d)
{
    const struct distill_args args = {.student = d[DI_STUDENT],
                                      .teacher = d[DI_TEACHER],
                                      .n = t->p[0],
                                      .vocab = t->p[1],
                                      .teacher_vocab = t->p[2],
                                      .temperature = (float)t->p[3] / 10,
                                      .beta = (float)t->p[5] / 10,
                                      .scale = distill_scale,
                                      .weights = t->p[6] ? d[DI_WEIGHTS] : NULL,
                                      .add = t->p[6],
                                      .agrees = d[DI_AGREES]};
    ops->distill(dev, d[DI_DIVERGENCE], d[DI_OVERLAP], t->p[4] ? NULL : d[DI_DSTUDENT], &args, dt);
}

static double relative_to(double p, double q) // p log(p / q)
{
    return p > 0 ? p * log(p / q) : 0;
}

// Of a row, over the vocabulary; ret: divergence, overlap, agrees.
static void divergence(struct op_test *t, double **v, int row, double *ret)
{
    const double temperature = (double)((float)t->p[3] / 10), beta = (double)((float)t->p[5] / 10);
    const double *p = v[DI_TEACHER] + (int64_t)row * t->p[2];
    const double *q = v[DI_STUDENT] + (int64_t)row * t->p[1];
    const double p_lse = log_sum_exp(p, t->p[1], temperature, NULL),
                 q_lse = log_sum_exp(q, t->p[1], temperature, NULL);
    int best_p = 0, best_q = 0;
    memset(ret, 0, 3 * sizeof *ret);
    for (int i = 0; i < t->p[1]; i++) {
        const double of_p = exp(p[i] / temperature - p_lse), of_q = exp(q[i] / temperature - q_lse);
        const double m = beta * of_p + (1 - beta) * of_q;
        ret[0] += beta == 0   ? relative_to(of_p, of_q)
                  : beta == 1 ? relative_to(of_q, of_p)
                              : beta * relative_to(of_p, m) + (1 - beta) * relative_to(of_q, m);
        ret[1] += fmin(of_p, of_q);
        if (p[i] > p[best_p]) best_p = i;
        if (q[i] > q[best_q]) best_q = i;
    }
    ret[2] = best_p == best_q;
}

static double distill_loss(struct op_test *t, double **v)
{
    double loss = 0, row[3];
    for (int i = 0; i < t->p[0]; i++) {
        divergence(t, v, i, row);
        for (int k = 0; k < 3; k++) t->a[DI_DIVERGENCE + k].expect[i] = row[k];
        loss += (double)distill_scale * (t->p[6] ? v[DI_WEIGHTS][i] : 1) * row[0];
    }
    return loss;
}

static void distill_reference(struct op_test *t, double **v)
{
    if (!t->p[4]) differentiate(t, v, DI_DSTUDENT, DI_STUDENT, t->p[6], distill_loss);
    distill_loss(t, v); // leaves the values at the inputs themselves
}

OP(distill, "distill");

static const struct op_case cases[] = {
    {&op_logprob, "n4 vocab11", {4, 11, 10}, false},
    {&op_logprob, "n3 vocab50257 t0.7", {3, 50257, 7}, false},
    {&op_logprob, "n2 vocab151936", {2, 151936, 10}, false},
    {&op_logprob_back, "n4 vocab11", {4, 11, 10}, false},
    {&op_logprob_back, "n5 vocab11 entropy", {5, 11, 10, 1}, false},
    {&op_logprob_back, "n6 vocab1003 t0.7 entropy", {6, 1003, 7, 1}, false},
    {&op_logprob_back, "n3 vocab1003 t0.7", {3, 1003, 7}, false},
    {&op_logprob_back, "n33 vocab50257", {33, 50257, 10}, true},
    {&op_distill, "n4 vocab11", {4, 11, 11, 10, 0}, false},
    {&op_distill, "n3 vocab44/64 t1.5", {3, 44, 64, 15, 0}, false},
    {&op_distill, "n3 vocab1003/1024 t0.7", {3, 1003, 1024, 7, 0}, false},
    {&op_distill, "n3 vocab1003 values", {3, 1003, 1003, 10, 1}, false},
    {&op_distill, "n2 vocab151936 values", {2, 151936, 151936, 10, 1}, false},
    {&op_distill, "n4 vocab11 reverse", {4, 11, 11, 10, 0, 10}, false},
    {&op_distill, "n3 vocab1003/1024 t0.7 reverse, added", {3, 1003, 1024, 7, 0, 10, 1}, false},
    {&op_distill, "n3 vocab44/64 t1.5 beta0.5", {3, 44, 64, 15, 0, 5, 0}, false},
    {&op_distill, "n3 vocab1003 beta0.1, added", {3, 1003, 1003, 10, 0, 1, 1}, false},
    {&op_distill, "n3 vocab1004, added", {3, 1004, 1004, 10, 0, 0, 1}, false},
    {&op_distill, "n2 vocab151936 beta0.9 values", {2, 151936, 151936, 10, 1, 9}, false},
    {&op_distill, "n33 vocab50257/50304", {33, 50257, 50304, 10, 0}, true},
    {&op_distill, "n5 vocab151936/152064 t0.7", {5, 151936, 152064, 7, 0}, true},
};

OP_TESTS(cases)
