/* schedule.c: warm-up, then what the type says until the last step. Pure functions. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/schedule.h"

#include <inttypes.h>
#include <math.h>

#define PI 3.14159265358979323846

#define NAME(symbol, name) name,
const char *const schedule_type_names[] = {SCHEDULE_TYPES(NAME) NULL};
const char *const decay_type_names[] = {"cosine", "linear", "1-sqrt", NULL};

static int64_t steps_of(double n, int64_t total)
{
    return (int64_t)(n < 1 ? ceil((double)total * n) : n);
}

static double decayed(enum decay_type type, double done)
{
    switch (type) {
    case DECAY_COSINE:
        return 0.5 * (1 + cos(PI * done));
    case DECAY_1_SQRT:
        return 1 - sqrt(done);
    case DECAY_LINEAR:
        break;
    }
    return 1 - done;
}

static double above(double min, double factor)
{
    return factor * (1 - min) + min;
}

// Behind the warm-up, of the peak.
static double factor_at(const struct schedule *s, int64_t step, int64_t warmup)
{
    int64_t stable = 0;
    if (s->type == SCHEDULE_WARMUP_STABLE_DECAY)
        stable = s->total_steps - warmup - steps_of(s->decay_steps, s->total_steps);
    if (step < warmup + stable) return 1;
    const double left = (double)(s->total_steps - warmup - stable);
    double done = left > 0 ? (double)(step - warmup - stable) / left : 1;
    if (done > 1) done = 1;
    switch (s->type) {
    case SCHEDULE_LINEAR:
        return 1 - done;
    case SCHEDULE_COSINE:
        return decayed(DECAY_COSINE, done);
    case SCHEDULE_COSINE_WITH_MIN_LR:
        return above(s->min_ratio, decayed(DECAY_COSINE, done));
    case SCHEDULE_WARMUP_STABLE_DECAY:
        return above(s->min_ratio, decayed(s->decay, done));
    case SCHEDULE_CONSTANT:
    case SCHEDULE_CONSTANT_WITH_WARMUP:
        break;
    }
    return 1;
}

double schedule_at(const struct schedule *s, int64_t step)
{
    const int64_t warmup = steps_of(s->warmup_steps, s->total_steps);
    if (step >= warmup) return s->peak * factor_at(s, step, warmup);
    if (s->type == SCHEDULE_WARMUP_STABLE_DECAY)
        return s->peak * above(s->min_ratio, (double)step / (double)warmup);
    return s->peak * (double)step / (double)warmup;
}

enum status schedule_check(const struct schedule *s)
{
    const bool falls = s->type == SCHEDULE_WARMUP_STABLE_DECAY;
    const int64_t warmup = steps_of(s->warmup_steps, s->total_steps),
                  decay = steps_of(s->decay_steps, s->total_steps);
    const char *type = schedule_type_names[s->type];
    if (s->type == SCHEDULE_COSINE_WITH_MIN_LR && s->min_ratio == 0)
        return status_fail(ST_INVALID,
                           "--lr-scheduler-type %s needs --min-lr-ratio, the share of the "
                           "peak that it ends at; take cosine to end at 0",
                           type);
    if (s->min_ratio > 0 && !falls && s->type != SCHEDULE_COSINE_WITH_MIN_LR)
        return status_fail(ST_INVALID,
                           "--min-lr-ratio with --lr-scheduler-type %s: it is for "
                           "cosine_with_min_lr and warmup_stable_decay",
                           type);
    if (falls && s->decay_steps == 0)
        return status_fail(ST_INVALID,
                           "--lr-scheduler-type %s needs --num-decay-steps, how many of the last "
                           "steps come down",
                           type);
    if (!falls && (s->decay_steps > 0 || s->decay != DECAY_COSINE))
        return status_fail(ST_INVALID,
                           "--%s with --lr-scheduler-type %s: it is for warmup_stable_decay",
                           s->decay_steps > 0 ? "num-decay-steps" : "decay-type", type);
    if (falls && s->total_steps > 0 && warmup + decay > s->total_steps)
        return status_fail(ST_INVALID,
                           "--warmup-steps (%" PRId64 ") and --num-decay-steps (%" PRId64
                           ") are more than the run's %" PRId64 " steps; lower one of them",
                           warmup, decay, s->total_steps);
    return ST_OK;
}
