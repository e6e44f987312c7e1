/* divergence.h: what tells, while a run goes on, that it learns nothing or goes astray: rewards
 * without spread, no right sample, gradients, KL divergence or entropy out of all proportion. Makes
 * sentences; logs nothing. One thread. */
#ifndef TRAINER_DIVERGENCE_H
#define TRAINER_DIVERGENCE_H

#include "trainer/run/runlog.h"

#define DIVERGENCE_STEPS 10 // in a row before it is said that nothing can be learnt

struct divergence {         // zero-initialised
    long steps, flat_steps; // seen; without spread in any group
    int flat, wrong, still; // steps in a row: without spread, without a right sample, gradient of 0
    double norm_mean;       // of late, of norms above 0
    int norms;              // in it
    double first_entropy, most_entropy;
    long said_norm, said_kl, said_entropy,
        said_collapse; // step after which it may be said again; 0: not yet said
};

// Takes in one step. ret_warnings: sentences of what has just shown itself, one a line; often none.
void divergence_check(struct divergence *s, const struct progress *step,
                      struct bytes *ret_warnings);
// The end of a run: a sentence where no step could teach anything; else nothing is appended.
void divergence_summary(const struct divergence *s, struct bytes *ret);

#endif
