/* loss.c: the policy-gradient losses and their derivatives, token by token. Pure functions.
 *
 * Every loss is a weighted sum over tokens of
 *     -surrogate(ratio, advantage) + beta * kl,
 * and the types differ in two things only: the weight of a token (token_weight) and what is done to
 * the importance ratio (surrogate). The weights are normalised over the whole optimizer step, so
 * the micro-batches of a step simply add up, however they were cut; BNPO, whose name says "batch
 * normalised", therefore equals DAPO here. The ratio is that of a token, or, sequence_level, the
 * geometric mean over its sequence: then each token's log-probability moves all of them.
 */
#include "trainer/loss.h"

#include <math.h>
#include <string.h>

static const struct {
    const char *name;
    enum loss_type type;
} loss_names[] = {
    {"grpo", LOSS_GRPO},       {"bnpo", LOSS_BNPO},   {"dapo", LOSS_DAPO},
    {"dr_grpo", LOSS_DR_GRPO}, {"cispo", LOSS_CISPO},
};

enum status loss_type_from_name(const char *name, enum loss_type *ret)
{
    for (size_t i = 0; i < sizeof loss_names / sizeof *loss_names; i++)
        if (strcmp(name, loss_names[i].name) == 0) {
            *ret = loss_names[i].type;
            return ST_OK;
        }
    if (strcmp(name, "gspo") == 0)
        return status_fail(ST_INVALID, "loss type \"gspo\": GSPO is loss type \"grpo\" with "
                                       "importance sampling level \"sequence\"");
    return status_fail(ST_INVALID,
                       "loss type \"%s\" is not one of grpo, bnpo, dapo, dr_grpo, cispo", name);
}

// Share of one token of a sequence of n in the mean over the step.
static double token_weight(const struct loss_config *config, const struct loss_batch *batch, int n)
{
    double seqs = batch->step_seqs > 0 ? batch->step_seqs : 1;
    switch (config->type) {
    case LOSS_GRPO:
        return 1.0 / (n * seqs);
    case LOSS_DR_GRPO:
        return 1.0 / (seqs * config->max_completion_length);
    case LOSS_BNPO:
    case LOSS_DAPO:
    case LOSS_CISPO:
        break;
    }
    return 1.0 / (double)(batch->step_tokens > 0 ? batch->step_tokens : 1);
}

struct surrogate {
    double value;        // what is maximised
    double by_log_ratio; // its derivative through the ratio; 0 where clipped
    double by_logprob;   // its derivative by the token's own log-probability (CISPO)
    bool low, high;      // clipped at that bound
};

static struct surrogate surrogate(const struct loss_config *config, double ratio, double logprob,
                                  double advantage)
{
    double low = 1 - config->epsilon, high = 1 + config->epsilon_high;
    struct surrogate s = {0};
    s.low = advantage < 0 && ratio < low;
    s.high = advantage > 0 && ratio > high;
    if (config->type == LOSS_CISPO) { // the ratio is a constant weight of log p, cut above
        double weight = ratio > high ? high : ratio;
        s.low = false;
        s.value = weight * advantage * logprob;
        s.by_logprob = weight * advantage;
    } else if (s.low || s.high) {
        s.value = (s.low ? low : high) * advantage;
    } else {
        s.value = s.by_log_ratio = ratio * advantage;
    }
    return s;
}

static void loss_sequence(const struct loss_config *config, const struct loss_batch *batch, int seq,
                          struct loss_stats *stats, float *ret_dlogprobs)
{
    int first = batch->first[seq], n = batch->first[seq + 1] - first;
    const float *logprobs = batch->logprobs + first, *old = batch->old_logprobs + first;
    const float *ref = config->beta != 0 ? batch->ref_logprobs + first : NULL;
    double advantage = batch->advantages[seq], weight = token_weight(config, batch, n);
    float *dlogprobs = ret_dlogprobs + first;

    double mean_log_ratio = 0;
    if (config->sequence_level) {
        for (int t = 0; t < n; t++) mean_log_ratio += (double)logprobs[t] - old[t];
        mean_log_ratio /= n;
    }
    double through_sequence = 0; // sum over tokens of d loss / d mean_log_ratio
    for (int t = 0; t < n; t++) {
        double logprob = logprobs[t];
        double ratio = exp(config->sequence_level ? mean_log_ratio : logprob - old[t]);
        struct surrogate s = surrogate(config, ratio, logprob, advantage);
        double loss = -s.value, derivative = -s.by_logprob;
        if (config->sequence_level)
            through_sequence -= weight * s.by_log_ratio;
        else
            derivative -= s.by_log_ratio;
        if (ref) {
            double delta = ref[t] - logprob, kl = expm1(delta) - delta;
            loss += config->beta * kl;
            derivative -= config->beta * expm1(delta);
            stats->kl += kl;
        }
        dlogprobs[t] = (float)(weight * derivative);
        stats->loss += weight * loss;
        stats->ratio += ratio;
        stats->clip_low += s.low;
        stats->clip_high += s.high;
        if (stats->tokens == 0 || ratio < stats->ratio_min) stats->ratio_min = ratio;
        if (stats->tokens == 0 || ratio > stats->ratio_max) stats->ratio_max = ratio;
        stats->tokens++;
    }
    if (config->sequence_level)
        for (int t = 0; t < n; t++) dlogprobs[t] += (float)(through_sequence / n);
}

void loss_compute(const struct loss_config *config, const struct loss_batch *batch,
                  struct loss_stats *stats, float *ret_dlogprobs)
{
    for (int seq = 0; seq < batch->n_seqs; seq++) {
        stats->seqs++;
        if (batch->first[seq + 1] > batch->first[seq])
            loss_sequence(config, batch, seq, stats, ret_dlogprobs);
    }
}
