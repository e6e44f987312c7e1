/* surrogate.c: the surrogates of loss.h's types. The ratio comes in as it is; what is done to it is
 * the whole difference between the types, but for the weight of a token. */
#include "trainer/learn/surrogate.h"

#include <math.h>

#define SEQUENCE_MOST 10

// The ratio is a constant weight of log p, cut above.
static struct surrogate cispo(const struct loss_config *config, double ratio, double logprob,
                              double advantage)
{
    const double weight = fmin(ratio, config->epsilon_high);
    return (struct surrogate){
        .value = weight * advantage * logprob,
        .by_logprob = weight * advantage,
        .high = advantage > 0 && ratio > config->epsilon_high,
    };
}

// A gate whose slope falls off where clipping would begin.
static struct surrogate sapo(const struct loss_config *config, double ratio, double advantage)
{
    const double temperature =
        advantage > 0 ? config->sapo_temperature_pos : config->sapo_temperature_neg;
    const double gate = 1 / (1 + exp(-temperature * (ratio - 1)));
    return (struct surrogate){
        .value = gate * 4 / temperature * advantage,
        .by_log_ratio = 4 * gate * (1 - gate) * ratio * advantage,
    };
}

struct surrogate surrogate(const struct loss_config *config, double ratio, double logprob,
                           double advantage)
{
    struct surrogate s = {0};
    if (config->type == LOSS_CISPO) return cispo(config, ratio, logprob, advantage);
    if (config->type == LOSS_SAPO) return sapo(config, ratio, advantage);
    // The worse of two values: the ratio clipped on both sides, and the ratio as it is. The second
    // has no bound where the advantage is negative: the dual clip gives it one.
    double low = 1 - config->epsilon, high = 1 + config->epsilon_high;
    double clipped = fmin(fmax(ratio, low), high) * advantage;
    bool cut = config->delta > 0 && ratio > config->delta;
    double plain = (cut ? config->delta : ratio) * advantage;
    s.low = advantage < 0 && ratio < low;
    s.high = advantage > 0 && ratio > high;
    if (plain < clipped) {
        s.value = plain;
        s.by_log_ratio = cut ? 0 : plain;
        s.delta = cut;
    } else {
        s.value = clipped;
        s.by_log_ratio = ratio >= low && ratio <= high ? clipped : 0;
    }
    return s;
}

struct gmpo_clip gmpo_clip(const struct loss_config *config, double log_ratio, double advantage)
{
    // as verl: sign(advantage) is a factor
    struct gmpo_clip clip = {.log_ratio = advantage == 0 ? 0 : log_ratio};
    clip.low = advantage < 0 && log_ratio < -config->epsilon;
    clip.high = advantage > 0 && log_ratio > config->epsilon_high;
    if (clip.low) clip.log_ratio = -config->epsilon;
    if (clip.high) clip.log_ratio = config->epsilon_high;
    return clip;
}

struct surrogate gmpo_surrogate(const struct loss_config *config, double ratio, double log_ratio,
                                double advantage)
{
    const struct gmpo_clip clip = gmpo_clip(config, log_ratio, advantage);
    return (struct surrogate){
        .value = ratio * advantage,
        .by_log_ratio = ratio * advantage,
        .low = clip.low,
        .high = clip.high,
        .held = clip.low || clip.high,
    };
}

double log_ratio_clamped(const struct loss_config *config, double log_ratio, bool of_sequence,
                         bool *ret_held)
{
    const double low = of_sequence ? -INFINITY : -LOG_RATIO_MOST,
                 high = of_sequence ? SEQUENCE_MOST : LOG_RATIO_MOST;
    *ret_held = config->clamp_log_ratios && (log_ratio < low || log_ratio > high);
    return *ret_held ? fmin(fmax(log_ratio, low), high) : log_ratio;
}
