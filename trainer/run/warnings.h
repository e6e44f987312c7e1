/* warnings.h: what a run leaves out or alone, said once before the first step. The
 * main thread; logs. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_WARNINGS_H
#define TRAINER_WARNINGS_H

#include "bridge/bridge_file.h"
#include "trainer/run/config.h"

struct adapter;
struct model_config;

// Options that were given, and are part of something that was not.
void warn_idle(const struct option_set *set, const void *config);
// What a model is trained with or as: a mixture of experts, its load-balancing loss by that
// coefficient (0: without); MXFP4.
void warn_model(const struct model_config *model, double balance_coef);
// An adapter whose folder another loader takes otherwise.
void warn_adapter(const struct adapter *a);
// adapter_base_check(), which without `exact` is a warning.
enum status warn_adapter_base(const char *folder, const json_t *base, bool exact);
// Options of train by which samples come from another distribution than the loss is of (--top-p,
// --top-k, --min-p), than updates are of (--lora-dropout), or from older weights (--async).
void warn_options(const struct train_config *config, const struct train_resolved *resolved);
// How a data set was read: its chat template, what of it was ignored, and left out for its length.
void warn_data(const struct dataset *data, int left_out);
void warn_left_out(const struct dataset *data, int left_out); // the last alone
// Roles of a newer server; then the policy's. ST_NOT_FOUND where there is none.
enum status warn_roles(const struct bridge_file *file, const struct bridge_role **ret_policy);

#endif
