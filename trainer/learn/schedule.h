/* schedule.h: the learning rate of a step, as transformers' schedulers of the same names give it.
 * One difference: `constant` warms up where it is asked to, as constant_with_warmup does. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SCHEDULE_H
#define TRAINER_SCHEDULE_H

#include "common/base/status.h"
#include <stdint.h>

#define SCHEDULE_TYPES(X)                                                                          \
    X(LINEAR, "linear")                                                                            \
    X(COSINE, "cosine")                                                                            \
    X(CONSTANT, "constant")                                                                        \
    X(CONSTANT_WITH_WARMUP, "constant_with_warmup")                                                \
    X(COSINE_WITH_MIN_LR, "cosine_with_min_lr")                                                    \
    X(WARMUP_STABLE_DECAY, "warmup_stable_decay")
#define SCHEDULE_SYMBOL(symbol, name) SCHEDULE_##symbol,
enum schedule_type { SCHEDULE_TYPES(SCHEDULE_SYMBOL) };
enum decay_type { DECAY_COSINE, DECAY_LINEAR, DECAY_1_SQRT };
extern const char *const schedule_type_names[], *const decay_type_names[];

struct schedule {
    enum schedule_type type;
    double peak;
    double warmup_steps; // here and below: less than 1 is that share of all steps, rounded up
    int64_t total_steps;
    double decay_steps;    // the last ones; of SCHEDULE_WARMUP_STABLE_DECAY, as is:
    enum decay_type decay; // how it comes down
    double min_ratio;      // of the peak: what the last two types end at; the last begins there too
};
double schedule_at(const struct schedule *s, int64_t step); // step: 0-based
// ST_INVALID names an option that the type needs or does not know, or, once total_steps is known,
// steps that are not enough.
enum status schedule_check(const struct schedule *s);

#endif
