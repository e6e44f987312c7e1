/* balance.h: the load-balancing loss of a mixture's routers (Fedus et al. 2021, Switch
 * Transformers), as transformers' load_balancing_loss_func has it: over the R rows of all layers
 * with experts together, n_experts * sum over experts of (assignments / R) * (probability / R).
 * Assignments are taken as given. Plain functions. */
#ifndef TRAINER_BALANCE_H
#define TRAINER_BALANCE_H

#include "common/model/config.h"

// The coefficient of the loss: wanted, or, -1, what the model's config says. ST_INVALID where one
// is wanted and the model has no experts, ST_UNSUPPORTED where transformers has no such loss for
// its routers (sigmoids, groups of experts).
enum status balance_coef(const struct model_config *model, double wanted, double *ret);
// By what sum over experts of assignments * probability (struct tape, `balance`) is multiplied,
// after a pass over `rows` rows.
double balance_scale(const struct model_config *model, int rows);
// That sum; sums (2, n_experts) host.
double balance_sum(const struct model_config *model, const float *sums);

#endif
