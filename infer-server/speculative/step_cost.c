/* step_cost.c: a table of moving averages over sizes that grow by an eighth.
 *
 * A step's time changes with the machine's load by more than drafts gain, and sizes are not all run
 * at the same moment. Such changes move all sizes alike, so the table is kept in units of a load
 * that follows every step quickly, while the table moves slowly: it only says how sizes differ.
 *
 * On a busy machine some steps take several times what they should. So every measurement moves an
 * average by a bounded share, up as well as down, which makes it near a median; the first few of a
 * size count by the least of them. And no size is taken to need longer than a larger one: what was
 * once overrated would else never be tried again. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/speculative/step_cost.h"

#define WEIGHT      0.02 // in a size's average, for each step since its last measurement: slowly
#define MAX_WEIGHT  0.2  // and at most so much, as one measurement may be off
#define WEIGHT_LOAD 0.1  // in the load's: it comes and goes within some ten steps
#define MAX_OFF     0.2  // of what was expected, that a measurement counts as away from it
#define FIRST       3    // measurements of a size that count by the least: caches are cold at first

// Sizes 1..16 have a bucket each; above, eight buckets to a doubling.
static int bucket_of(int rows)
{
    if (rows <= 16) return rows < 1 ? 0 : rows - 1;
    int doubling = 0;
    while ((rows >> doubling) >= 32) doubling++;
    int b = 16 + doubling * 8 + ((rows >> doubling) - 16) / 2;
    return b < STEP_COST_BUCKETS ? b : STEP_COST_BUCKETS - 1;
}

// The size measured that a step of so many rows runs at, or its own place.
static int place_of(const struct step_cost *c, int rows)
{
    const int own = bucket_of(rows);
    for (int b = own; c->padded && b < STEP_COST_BUCKETS; b++)
        if (c->rows[b] >= rows) return b;
    return own;
}

static double follow(double old, double measured, double weight)
{
    double off = measured / old - 1;
    if (off > MAX_OFF) off = MAX_OFF;
    if (off < -MAX_OFF) off = -MAX_OFF;
    return old * (1 + weight * off);
}

// Smaller sizes take no longer.
static void hold_below(struct step_cost *c, int b)
{
    for (int i = b - 1; i >= 0; i--)
        if (c->ms[i] > c->ms[b]) c->ms[i] = c->ms[b];
}

void step_cost_learn(struct step_cost *c, int rows, int64_t attended, double ms)
{
    const int b = place_of(c, rows);
    if (c->load <= 0) c->load = 1;
    const double attention = c->token_ms * (double)attended, floor = 0.1 * ms / c->load;
    double own = ms / c->load - attention;
    if (own < floor) own = floor;
    double weight = WEIGHT * (++c->n_learned - c->learned_at[b]);
    if (weight > MAX_WEIGHT) weight = MAX_WEIGHT;
    c->learned_at[b] = c->n_learned;
    if (!c->padded || c->rows[b] < rows) c->rows[b] = rows;
    if (c->n[b] < FIRST) {
        if (++c->n[b] == 1 || own < c->ms[b]) c->ms[b] = own;
    } else {
        c->load = follow(c->load, ms / (c->ms[b] + attention), WEIGHT_LOAD);
        c->ms[b] = follow(c->ms[b], own, weight);
    }
    hold_below(c, b);
}

double step_cost_ms(const struct step_cost *c, int rows, int64_t attended)
{
    const int b = place_of(c, rows);
    int below = b, above = b;
    while (above < STEP_COST_BUCKETS && c->rows[above] < rows) above++;
    while (below >= 0 && (c->rows[below] <= 0 || c->rows[below] > rows)) below--;
    if (above == STEP_COST_BUCKETS) above = below;
    if (below < 0) below = above;
    if (below < 0) return 0;
    double own = c->ms[above];
    if (!c->padded && c->rows[above] > c->rows[below])
        own = c->ms[below] + (c->ms[above] - c->ms[below]) * (rows - c->rows[below]) /
                                 (c->rows[above] - c->rows[below]);
    return c->load * (own + c->token_ms * (double)attended);
}
