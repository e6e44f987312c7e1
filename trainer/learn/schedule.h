/* schedule.h: the learning rate of a step, as transformers' schedulers of the same names give it.
 */
#ifndef TRAINER_SCHEDULE_H
#define TRAINER_SCHEDULE_H

#include "common/base/status.h"
#include <stdint.h>

enum schedule_type { SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_CONSTANT };
extern const char *const schedule_type_names[];

struct schedule {
    enum schedule_type type;
    double peak;
    int64_t warmup_steps, total_steps;
};
double schedule_at(const struct schedule *s, int64_t step); // step: 0-based

#endif
