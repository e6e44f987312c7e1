/* step_cost.c: a table of moving averages over sizes that grow by an eighth. A spike (a page fault,
 * a busy machine) is let in at twice the average at most, or one would silence drafts for long. */
#include "infer-server/step_cost.h"

// Of a new measurement: one that is shorter weighs more, since what makes a step longer is often
// not its own.
#define WEIGHT_LONGER  0.05
#define WEIGHT_SHORTER 0.3

// Sizes 1..16 have a bucket each; above, eight buckets to a doubling.
static int bucket_of(int rows)
{
    if (rows <= 16) return rows < 1 ? 0 : rows - 1;
    int doubling = 0;
    while ((rows >> doubling) >= 32) doubling++;
    int b = 16 + doubling * 8 + ((rows >> doubling) - 16) / 2;
    return b < STEP_COST_BUCKETS ? b : STEP_COST_BUCKETS - 1;
}

static int rows_of(int bucket) // the least of its sizes
{
    if (bucket < 16) return bucket + 1;
    return (16 + (bucket - 16) % 8 * 2) << ((bucket - 16) / 8);
}

void step_cost_learn(struct step_cost *c, int rows, bool verifying, double ms)
{
    double *at = &c->kind[verifying].ms[bucket_of(rows)];
    if (*at <= 0) {
        *at = ms;
        return;
    }
    if (ms > 2 * *at) ms = 2 * *at;
    *at += (ms > *at ? WEIGHT_LONGER : WEIGHT_SHORTER) * (ms - *at);
}

static double estimate(const double *ms, int rows)
{
    const int b = bucket_of(rows);
    if (ms[b] > 0) return ms[b];
    int below = b - 1, above = b + 1;
    while (below >= 0 && ms[below] <= 0) below--;
    while (above < STEP_COST_BUCKETS && ms[above] <= 0) above++;
    const bool has_below = below >= 0, has_above = above < STEP_COST_BUCKETS;
    if (has_below && has_above) {
        const double share = (double)(rows - rows_of(below)) / (rows_of(above) - rows_of(below));
        return ms[below] + share * (ms[above] - ms[below]);
    }
    return has_below ? ms[below] : has_above ? ms[above] : 0;
}

double step_cost_ms(const struct step_cost *c, int rows, bool verifying)
{
    const double ms = estimate(c->kind[verifying].ms, rows);
    return ms > 0 ? ms : estimate(c->kind[!verifying].ms, rows);
}
