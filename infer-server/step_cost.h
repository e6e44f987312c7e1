/* step_cost.h: the time of a decoding step as a function of its rows, learned from the steps
 * themselves. Plain steps (one row a sequence; CUDA replays a captured graph for them) and
 * verifying ones are two functions. The engine's thread. */
#ifndef INFER_SERVER_STEP_COST_H
#define INFER_SERVER_STEP_COST_H

#include <stdbool.h>

#define STEP_COST_BUCKETS 64

struct step_cost { // all zero: nothing known
    struct {
        double ms[STEP_COST_BUCKETS]; // moving average; 0: not measured
    } kind[2];                        // plain, verifying
};

void step_cost_learn(struct step_cost *c, int rows, bool verifying, double ms);
// Between measured sizes by interpolation; beyond them the nearest one's, which is too little for
// larger steps: they are tried and then known. A kind never measured
// counts as the other. 0 where nothing is known at all.
double step_cost_ms(const struct step_cost *c, int rows, bool verifying);

#endif
