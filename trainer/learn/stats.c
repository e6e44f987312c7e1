/* stats.c: ranges, and their sums over ranks; laps of the monotonic clock. No state. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/stats.h"
#include "common/base/clock.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void range_add(struct range_stats *r, double x)
{
    if (r->n == 0 || x < r->min) r->min = x;
    if (r->n == 0 || x > r->max) r->max = x;
    r->sum += x;
    r->n++;
}

double range_mean(const struct range_stats *r)
{
    return r->n > 0 ? r->sum / (double)r->n : 0;
}

void stats_add(struct update_stats *s, enum statistic stat, double x)
{
    if (!s->again || stat >= FIRST_STATS) range_add(&s->range[stat], x);
}

double stats_mean(const struct update_stats *s, enum statistic stat)
{
    return range_mean(&s->range[stat]);
}

double stats_per_update(const struct update_stats *s, enum statistic stat)
{
    return s->range[stat].sum / (s->n_updates > 1 ? s->n_updates : 1);
}

enum status stats_merge(struct comm *comm, struct update_stats *s)
{
    const int n = comm_size(comm);
    struct range_stats(*all)[N_STATS] = calloc((size_t)n, sizeof *all);
    if (!all) return status_fail(ST_NO_MEMORY, "no memory for the statistics of %d ranks", n);
    enum status st = comm_gather_host(comm, s->range, all, sizeof *all);
    for (int r = 1; st == ST_OK && r < n; r++)
        for (int i = 0; i < N_STATS; i++) {
            struct range_stats *to = &all[0][i];
            const struct range_stats *other = &all[r][i];
            if (other->n == 0) continue;
            to->min = to->n == 0 ? other->min : fmin(to->min, other->min);
            to->max = to->n == 0 ? other->max : fmax(to->max, other->max);
            to->sum += other->sum;
            to->n += other->n;
        }
    if (st == ST_OK) memcpy(s->range, all[0], sizeof s->range);
    free(all);
    return st;
}

// ---- time ---------------------------------------------------------------------------------------

const char *const phase_names[] = {"wait",    "rollout",  "score",      "pack",
                                   "forward", "backward", "optimizer",  "publish",
                                   "log",     "eval",     "checkpoint", NULL};

void phase_timers_lap(struct phase_timers *s, enum phase phase)
{
    if (!s) return;
    const int64_t now = clock_now_ns();
    s->seconds[phase] += (double)(now - s->since_ns) / NS_PER_S;
    s->since_ns = now;
}

void phase_timers_move(struct phase_timers *s, enum phase from, enum phase to, double seconds)
{
    if (!s) return;
    const double moved = fmin(seconds, s->seconds[from]);
    s->seconds[from] -= moved;
    s->seconds[to] += moved;
}
