/* balance.c: the load-balancing loss of routers. No state. */
#include "trainer/learn/balance.h"

// The routing of the layers that have experts, or of the first layer.
static const struct moe_shape *routing_of(const struct model_config *model)
{
    int l = 0;
    while (l + 1 < model->n_layers && model->layers[l].moe.n_experts == 0) l++;
    return &model->layers[l].moe;
}

enum status balance_coef(const struct model_config *model, double wanted, double *ret)
{
    const struct moe_shape *routing = routing_of(model);
    const double coef = wanted < 0 ? model->router_aux_loss_coef : wanted;
    if (wanted < 0 && wanted != -1)
        return status_fail(ST_INVALID,
                           "--router-aux-loss-coef %g: give 0 or more, or -1 for what the model's "
                           "config.json says",
                           wanted);
    if (coef > 0 && routing->n_experts == 0)
        return status_fail(ST_INVALID,
                           "--router-aux-loss-coef %g: the model (%s) is no mixture of experts, "
                           "there are no routers whose load could be balanced; leave it out",
                           coef, model->model_type);
    if (coef > 0 && (routing->scoring != MOE_SOFTMAX || routing->n_group > 1))
        return status_fail(ST_UNSUPPORTED,
                           "--router-aux-loss-coef %g: the load-balancing loss is of routers that "
                           "take the best of a softmax, and those of %s %s; leave it out",
                           coef, model->model_type,
                           routing->scoring != MOE_SOFTMAX ? "score each expert by a sigmoid"
                                                           : "choose among groups of experts");
    *ret = coef;
    return ST_OK;
}

double balance_scale(const struct model_config *model, int rows)
{
    int layers = 0;
    for (int l = 0; l < model->n_layers; l++) layers += model->layers[l].moe.n_experts > 0;
    const double all = (double)rows * layers;
    return config_experts(model) / (all * all);
}

double balance_sum(const struct model_config *model, const float *sums)
{
    const int n = config_experts(model);
    double sum = 0;
    for (int e = 0; e < n; e++) sum += (double)sums[e] * sums[n + e];
    return sum;
}
