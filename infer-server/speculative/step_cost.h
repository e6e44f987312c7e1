/* step_cost.h: the time of a decoding step as a function of its rows and of what they attend to,
 * measured when the server starts (step_cost_measure) and learned from the steps themselves since.
 * A step that verifies drafts is one of more rows: there is one table for both.
 *
 *   ms(rows, attended) = level (table[rows] + token_ms attended)
 *
 * attended: the lengths of the rows' contexts, summed. The engine's thread. */
#ifndef INFER_SERVER_STEP_COST_H
#define INFER_SERVER_STEP_COST_H

#include "common/base/status.h"
#include <stdint.h>

struct runner;

#define STEP_COST_BUCKETS 64

struct step_cost {               // all zero: nothing known
    const struct runner *runner; // whose captured sizes are the table's; NULL: any size is one
    double level;                // what steps take of late, in units of the table; 0: nothing known
    double token_ms;
    double rows[STEP_COST_BUCKETS]; // moving average of the sizes measured; 0: none
    double ms[STEP_COST_BUCKETS];   // and of their times, over the level; never falls with rows
    int n[STEP_COST_BUCKETS];       // measurements, up to a few
};

void step_cost_learn(struct step_cost *c, int rows, int64_t attended, double ms);
// Between measured sizes by interpolation; beyond them the nearest one's, so that what was never
// tried looks cheap. 0 where nothing is known.
double step_cost_ms(const struct step_cost *c, int rows, int64_t attended);
// The largest size that was measured; 0: none.
int step_cost_reach(const struct step_cost *c);

// What a runner takes for decoding steps of 1..most_rows rows, larger sizes only within a second or
// so. Writes to the KV pool at will: nobody may have anything in it. Captures the steps on CUDA.
// ST_DEVICE.
enum status step_cost_measure(struct runner *runner, int most_rows, struct step_cost *ret);

#endif
