/* surrogate.h: what each type of loss maximises of a token, by its importance ratio and advantage.
 * Private to loss.c. Pure functions. */
#ifndef TRAINER_SURROGATE_H
#define TRAINER_SURROGATE_H

#include "trainer/learn/loss.h"

struct surrogate {
    double value;        // what is maximised
    double by_log_ratio; // its derivative through the ratio; 0 where clipped
    double by_logprob;   // its derivative by the token's own log-probability (CISPO)
    bool low, high;      // clipped at that bound
    bool delta;          // cut by the dual clip
    bool held;           // the token's own log-ratio was clipped, and moves no ratio (GMPO)
};

// Of all types but LOSS_GMPO.
struct surrogate surrogate(const struct loss_config *config, double ratio, double logprob,
                           double advantage);

// LOSS_GMPO: what of a token's log-ratio goes into the mean over its sequence.
struct gmpo_clip {
    double log_ratio;
    bool low, high;
};
struct gmpo_clip gmpo_clip(const struct loss_config *config, double log_ratio, double advantage);
// ratio: of the sequence.
struct surrogate gmpo_surrogate(const struct loss_config *config, double ratio, double log_ratio,
                                double advantage);

// A log-ratio within clamp_log_ratios, or as it is without it: of a token, or of a sequence, which
// has no lower bound. ret_held: it was taken to a bound, where it has no derivative.
#define LOG_RATIO_MOST 20
double log_ratio_clamped(const struct loss_config *config, double log_ratio, bool of_sequence,
                         bool *ret_held);

#endif
