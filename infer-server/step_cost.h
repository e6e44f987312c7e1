/* step_cost.h: the time of a decoding step as a function of its rows, learned from the steps
 * themselves. Plain steps (one row a sequence; CUDA replays a captured graph for them) and
 * verifying ones are two functions. The engine's thread. */
#ifndef INFER_SERVER_STEP_COST_H
#define INFER_SERVER_STEP_COST_H

#include <stdbool.h>

#define STEP_COST_BUCKETS 64

struct step_cost { // all zero: nothing known
    double level;  // what plain steps take of late, in units of their table; 0: nothing known
    struct {
        double rows[STEP_COST_BUCKETS]; // moving average of the sizes measured; 0: none
        double ms[STEP_COST_BUCKETS];   // and of their times, over the level
        int n[STEP_COST_BUCKETS];       // measurements, up to a few
    } kind[2];                          // plain, verifying
};

void step_cost_learn(struct step_cost *c, int rows, bool verifying, double ms);
// Of a plain step: between measured sizes by interpolation, beyond them the nearest one's. 0 where
// none was measured.
double step_cost_plain_ms(const struct step_cost *c, int rows);
// Of a step that verifies rows - n_seqs drafts of n_seqs sequences: between the plain step without
// them and the measured sizes by interpolation, beyond those by the last slope, and never less than
// a smaller one; a plain step's where none was measured. 0 where no plain step was.
double step_cost_verify_ms(const struct step_cost *c, int n_seqs, int rows);
// The largest size of a verifying step that was measured; 0: none.
int step_cost_reach(const struct step_cost *c);

#endif
