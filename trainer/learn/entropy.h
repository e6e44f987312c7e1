/* entropy.h: what the loss does with the entropy of the policy's distributions: a bonus for it,
 * with a fixed or an adaptive coefficient (He et al. 2025, Skywork-OR1), and the choice of the
 * tokens of highest entropy (Wang et al. 2025, Beyond the 80/20 rule). Names and defaults are those
 * of TRL's GRPOConfig. Pure functions. */
#ifndef TRAINER_ENTROPY_H
#define TRAINER_ENTROPY_H

#include <stdbool.h>
#include <stdint.h>

struct entropy_config {
    double coef; // of the mean entropy in the loss; of a run that adapts, at its start
    bool adaptive;
    double coef_min, coef_max, coef_delta;
    double target;       // nats: below it the coefficient grows, else it falls and has no effect
    double top_quantile; // share of tokens, by entropy, whose policy term counts; 1: all
};
struct entropy_state { // after the updates so far; in checkpoints
    double coef, last; // last: mean entropy of the update before; INFINITY: there was none
};

struct entropy_state entropy_begin(const struct entropy_config *config);
bool entropy_has_bonus(const struct entropy_config *config);
bool entropy_is_used(const struct entropy_config *config); // at all
// The coefficient of the next update.
double entropy_coef(const struct entropy_config *config, const struct entropy_state *state);
// After an update that saw that mean entropy.
void entropy_observe(const struct entropy_config *config, double mean, struct entropy_state *state);

// What n tokens of a step add to the loss, of whose step_tokens such tokens' mean entropy the bonus
// is; those that count[i] is 0 of are none. ret_dentropy (n): its derivative by each entropy.
double entropy_bonus(double coef, long step_tokens, int n, const float *entropies,
                     const uint8_t *count, float *ret_dentropy);

// The least entropy that is among the highest `top` of n, by linear interpolation between ranks, as
// torch's quantile. Sorts the array. 0 where n is.
double entropy_threshold(double *entropies, long n, double top);

#endif
