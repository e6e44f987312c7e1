/* step_cost.c: a table of moving averages over sizes that grow by an eighth.
 *
 * What is compared is a plain step and a verifying one of the same moment, but one of the two kinds
 * is seldom run while the other is, and a step's time changes as contexts grow, or with the
 * machine's load, by more than drafts gain. Such changes move both kinds alike, so both tables are
 * kept in units of a level that follows the plain steps quickly; the table of plain steps moves
 * slowly, as it only says how sizes differ.
 *
 * On a busy machine some steps take several times what they should. A mean of one kind would follow
 * them otherwise than the other kind's, which has other weights and other moments, and drafts would
 * seem to pay, or not to. So every measurement moves an average by a bounded share, up as well as
 * down, which makes it near a median; the first few of a size count by the least of them. */
#include "infer-server/step_cost.h"

#define WEIGHT       0.1
#define WEIGHT_PLAIN 0.01
#define WEIGHT_LEVEL 0.3
#define MOST_OFF     0.2 // of an average, that a measurement counts as away from it
#define FIRST        3   // measurements

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
    double off = measured / old - 1;
    if (off > MOST_OFF) off = MOST_OFF;
    if (off < -MOST_OFF) off = -MOST_OFF;
    return old * (1 + weight * off);
}

void step_cost_learn(struct step_cost *c, int rows, bool verifying, double ms)
{
    const int b = bucket_of(rows);
    double *table_rows = &c->kind[verifying].rows[b], *table_ms = &c->kind[verifying].ms[b];
    int *n = &c->kind[verifying].n[b];
    if (c->level <= 0) c->level = 1;
    *table_rows += (*n == 0 ? 1 : WEIGHT) * (rows - *table_rows);
    if (*n < FIRST) {
        if (++*n == 1 || ms / c->level < *table_ms) *table_ms = ms / c->level;
        return;
    }
    if (verifying) {
        *table_ms = follow(*table_ms, ms / c->level, WEIGHT);
        return;
    }
    c->level = follow(c->level, ms / *table_ms, WEIGHT_LEVEL);
    *table_ms = follow(*table_ms, ms / c->level, WEIGHT_PLAIN);
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
        if (at.rows < rows)
            below = at;
        else
            return c->level * (below.rows > 0 ? on_line(below, at, rows) : at.ms);
    }
    return c->level * below.ms;
}

double step_cost_verify_ms(const struct step_cost *c, int n_seqs, int rows)
{
    struct point before, last = {n_seqs, step_cost_plain_ms(c, n_seqs)};
    before = last;
    if (last.ms <= 0) return 0;
    for (int b = bucket_of(n_seqs); b < STEP_COST_BUCKETS; b++) {
        struct point at = {c->kind[1].rows[b], c->level * c->kind[1].ms[b]};
        if (at.rows <= n_seqs) continue;
        if (at.ms < last.ms) at.ms = last.ms;
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
