/* schedule.h: the learning rate of a step, as transformers' schedulers of the same names give it.
 */
#ifndef TRAINER_SCHEDULE_H
#define TRAINER_SCHEDULE_H

#include "common/base/status.h"
#include <stdint.h>

enum schedule_type { SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_CONSTANT };

struct schedule {
    enum schedule_type type;
    double peak;
    int64_t warmup_steps, total_steps;
};
enum status schedule_type_from_name(const char *name, enum schedule_type *ret);
double schedule_at(const struct schedule *s, int64_t step); // step: 0-based

#endif
