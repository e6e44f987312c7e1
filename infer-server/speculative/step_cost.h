/* step_cost.h: the time of a decoding step as a function of its rows and of what they attend to,
 * measured when the server starts (engine/step_timing.c) and learned from the steps themselves
 * since. A step that verifies drafts is one of more rows: there is one table for both.
 *
 *   ms(rows, attended) = load (table[rows] + token_ms attended)
 *
 * attended: the lengths of the rows' contexts, summed. The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_STEP_COST_H
#define INFER_SERVER_STEP_COST_H

#include <stdbool.h>
#include <stdint.h>

#define STEP_COST_BUCKETS 64

struct step_cost { // all zero: nothing known
    bool padded; // steps run at certain sizes alone, the table's: what lies between takes the next
    double load; // what steps take of late, in units of the table; 0: nothing known
    double token_ms;
    int rows[STEP_COST_BUCKETS];  // the size measured; 0: none
    double ms[STEP_COST_BUCKETS]; // its time over the load, an average; never falls with rows
    int n[STEP_COST_BUCKETS];     // measurements, up to a few
    unsigned n_learned, learned_at[STEP_COST_BUCKETS]; // measurements of all, at each one's last
};

void step_cost_learn(struct step_cost *c, int rows, int64_t attended, double ms);
// Between measured sizes by interpolation; beyond them the nearest one's, so that what was never
// tried looks cheap. 0 where nothing is known.
double step_cost_ms(const struct step_cost *c, int rows, int64_t attended);

#endif
