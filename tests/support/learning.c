/* learning.c: see learning.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/learning.h"
#include "tests/support/support.h"

static void learning_close(void *learning)
{
    struct learning *l = learning;
    learner_free(l->learner);
    if (l->draft.dev) reference_close(&l->draft);
    reference_close(&l->policy);
}

struct learning *learning_of(const struct learning_setting *setting)
{
    struct learning *l = test_keep(calloc(1, sizeof *l));
    struct learner_config config = setting->config;
    if (config.optimizer.beta1 == 0) config.optimizer.beta1 = 0.9;
    if (config.optimizer.beta2 == 0) config.optimizer.beta2 = 0.999;
    if (config.optimizer.eps == 0) config.optimizer.eps = 1e-8;
    if (config.temperature == 0) config.temperature = 1;
    const char *device = setting->device ? setting->device : "cpu";
    reference_open_as(setting->folder, device, setting->quantization, &l->policy);
    if (setting->draft) reference_open(setting->draft, device, &l->draft);
    assert_ok(learner_new(l->policy.dev, l->policy.config, l->policy.weights, setting->reference,
                          &config, &l->learner));
    if (setting->draft)
        assert_ok(learner_add_draft(
            l->learner, l->draft.config, l->draft.weights,
            &(struct learner_draft_config){config.optimizer, setting->draft_weight, 1}));
    if (setting->teacher)
        assert_ok(learner_add_teacher(
            l->learner, &(struct learner_teacher_config){setting->teacher, setting->beta,
                                                         QUANTIZATION_NONE, false}));
    assert_ok(learner_prepare(l->learner));
    return test_later(l, learning_close);
}

void learning_end(struct learning *l)
{
    test_now(l);
}

struct optimizer *learning_optimizer(const struct learning *l)
{
    return learner_info(l->learner)->optimizer;
}

const float *learning_gradients(const struct learning *l)
{
    return optimizer_grads(learning_optimizer(l), 0)->base;
}

double learning_step(const struct learning *l, double lr)
{
    double norm;
    assert_ok(optimizer_prepare(learning_optimizer(l), &norm));
    assert_ok(optimizer_apply(learning_optimizer(l), lr));
    return norm;
}

void assert_same_gradients(const float *a, const float *b, int64_t n, double max)
{
    double largest = 0, difference = 0;
    for (int64_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)a[i]));
        difference = fmax(difference, fabs((double)a[i] - b[i]));
    }
    assert_true(largest > 1e-3);
    assert_near(difference / largest, 0, max);
}

void learning_no_loss(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    (void)context;
    memset(ret_dlogprobs, 0, (size_t)rows->mb->first[rows->mb->n_seqs] * sizeof *ret_dlogprobs);
}
