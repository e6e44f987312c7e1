/* schedule.c: warm-up, then linear or cosine decay to 0 at the last step, or none. Pure functions.
 */
#include "trainer/learn/schedule.h"

#include <math.h>

const char *const schedule_type_names[] = {"linear", "cosine", "constant", NULL};

double schedule_at(const struct schedule *s, int64_t step)
{
    if (step < s->warmup_steps) return s->peak * (double)step / (double)s->warmup_steps;
    double left = (double)(s->total_steps - s->warmup_steps);
    double done = left > 0 ? (double)(step - s->warmup_steps) / left : 1;
    if (done > 1) done = 1;
    switch (s->type) {
    case SCHEDULE_LINEAR:
        return s->peak * (1 - done);
    case SCHEDULE_COSINE:
        return s->peak * 0.5 * (1 + cos(3.14159265358979323846 * done));
    case SCHEDULE_CONSTANT:
        break;
    }
    return s->peak;
}
