/* step_cost.c: a table of moving averages over sizes that grow by an eighth.
 *
 * What is compared is a plain step and a verifying one of the same moment, but one of the two kinds
 * is seldom run while the other is, and a step's time changes as contexts grow, or with the machine's
 * load, by more than drafts gain. Such changes move both kinds alike, so both tables are kept in
 * units of a level that follows the plain steps quickly; the table of plain steps moves slowly, as it
 * only says how sizes differ. A spike (a page fault, a busy machine) is
 * let in at MOST_SPIKE times what was expected, or one would silence drafts for long; a time much
 * shorter than expected says that what was believed was one. */
#include "infer-server/step_cost.h"

#define WEIGHT        0.1
#define WEIGHT_PLAIN  0.01
#define WEIGHT_LEVEL  0.2
#define WEIGHT_SPIKED 0.5
#define MOST_SPIKE    1.5
#define SPIKED        0.75 // of what was believed

// Sizes 1..16 have a bucket each; above, eight buckets to a doubling.
static int bucket_of(int rows)
{
    if (rows <= 16) return rows < 1 ? 0 : rows - 1;
    int doubling = 0;
    while ((rows >> doubling) >= 32) doubling++;
    int b = 16 + doubling * 8 + ((rows >> doubling) - 16) / 2;
    return b < STEP_COST_BUCKETS ? b : STEP_COST_BUCKETS - 1;
}

static double follow(double old, double measured, double weight)
{
    if (measured > MOST_SPIKE * old) measured = MOST_SPIKE * old;
    if (measured < SPIKED * old) weight = WEIGHT_SPIKED;
    return old + weight * (measured - old);
}

void step_cost_learn(struct step_cost *c, int rows, bool verifying, double ms)
{
    const int b = bucket_of(rows);
    double *table_rows = &c->kind[verifying].rows[b], *table_ms = &c->kind[verifying].ms[b];
    if (c->level <= 0) c->level = 1;
    if (*table_rows <= 0) {
        *table_rows = rows;
        *table_ms = ms / c->level;
        return;
    }
    *table_rows += WEIGHT * (rows - *table_rows);
    if (verifying) {
        *table_ms = follow(*table_ms, ms / c->level, WEIGHT);
        return;
    }
    c->level = follow(c->level, ms / *table_ms, WEIGHT_LEVEL);
    *table_ms += WEIGHT_PLAIN * (ms / c->level - *table_ms);
}

struct point {
    double rows, ms;
};

static double on_line(struct point a, struct point b, double rows)
{
    return a.ms + (b.ms - a.ms) * (rows - a.rows) / (b.rows - a.rows);
}

double step_cost_plain_ms(const struct step_cost *c, int rows)
{
    struct point below = {0, 0};
    for (int b = 0; b < STEP_COST_BUCKETS; b++) {
        const struct point at = {c->kind[0].rows[b], c->kind[0].ms[b]};
        if (at.rows <= 0) continue;
        if (at.rows < rows) below = at;
        else return c->level * (below.rows > 0 ? on_line(below, at, rows) : at.ms);
    }
    return c->level * below.ms;
}

double step_cost_verify_ms(const struct step_cost *c, int n_seqs, int rows)
{
    struct point before, last = {n_seqs, step_cost_plain_ms(c, n_seqs)};
    before = last;
    if (last.ms <= 0) return 0;
    for (int b = bucket_of(n_seqs); b < STEP_COST_BUCKETS; b++) {
        const struct point at = {c->kind[1].rows[b], c->level * c->kind[1].ms[b]};
        if (at.rows <= n_seqs) continue;
        if (at.rows >= rows) return on_line(last, at, rows);
        before = last;
        last = at;
    }
    if (last.ms <= before.ms) return last.ms;
    return on_line(before, last, rows);
}

int step_cost_reach(const struct step_cost *c)
{
    for (int b = STEP_COST_BUCKETS - 1; b >= 0; b--)
        if (c->kind[1].rows[b] > 0) return (int)c->kind[1].rows[b];
    return 0;
}
