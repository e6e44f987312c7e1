/* notices.h: what a run's settings leave out of the training, said once before the first step. The
 * main thread; logs. */
#ifndef TRAINER_NOTICES_H
#define TRAINER_NOTICES_H

#include "common/model/config.h"
#include "trainer/run/config.h"

// A mixture of experts is trained without its router's load-balancing loss.
void notice_router(const struct model_config *model);
// --top-p, --top-k, --min-p: samples come from another distribution than the loss is of.
void notice_filtering(const struct train_config *config);
// --rollout-ahead: samples come from older weights than those that learn.
void notice_ahead(const struct train_config *config);

#endif
