/* loss.h: the policy-gradient losses, on host arrays, in double: from log-probabilities to the loss
 * and its derivative by each log-probability. No device, no model: small, exact, easy to check.
 * Formulas: GRPO (Shao et al. 2024), Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025), GSPO (Zheng
 * et al. 2025), CISPO (MiniMax 2025), named and defaulted as in TRL's GRPOConfig. */
#ifndef TRAINER_LOSS_H
#define TRAINER_LOSS_H

#include "common/base/status.h"

enum loss_type { LOSS_GRPO, LOSS_BNPO, LOSS_DAPO, LOSS_DR_GRPO, LOSS_CISPO };

struct loss_config {
    enum loss_type type;
    bool sequence_level; // importance ratio of the whole sequence (GSPO) instead of each token
    double epsilon, epsilon_high; // ratio kept in [1 - epsilon, 1 + epsilon_high]
    double beta;                  // weight of the k3 estimate of KL to the reference; 0: off
    int max_completion_length;    // LOSS_DR_GRPO's constant
};

// The sequences of one micro-batch, flat: sequence s owns entries first[s] .. first[s+1]-1.
struct loss_batch {
    int n_seqs;
    const int *first;          // (n_seqs + 1)
    const float *logprobs;     // of the policy now
    const float *old_logprobs; // of the sampler
    const float *ref_logprobs; // of the reference; NULL where beta is 0
    const float *advantages;   // (n_seqs)
    // of the whole optimizer step that this micro-batch is a part of
    int step_seqs;
    long step_tokens;
};
struct loss_stats { // sums, so that micro-batches add up; divide by tokens or seqs for means
    double loss;    // already normalised over the step
    double kl, ratio, clip_low, clip_high; // sums over tokens
    double ratio_min, ratio_max;
    long tokens;
    int seqs;
};
// Adds to *stats; ret_dlogprobs (first[n_seqs]) is d loss / d logprob. An empty sequence counts as
// one with a zero term, as in TRL.
void loss_compute(const struct loss_config *config, const struct loss_batch *batch,
                  struct loss_stats *stats, float *ret_dlogprobs);
enum status loss_type_from_name(const char *name, enum loss_type *ret); // "gspo" is not a type

#endif
