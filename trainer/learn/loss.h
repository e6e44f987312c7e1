/* loss.h: the losses, on host arrays, in double: from log-probabilities to the loss and its
 * derivative by each log-probability. No device, no model: small, exact, easy to check. A loss is a
 * row of one table (loss.h, losses.c): how a token is weighed in the mean, what is maximised of it,
 * or what a pair of completions loses, and which options it has.
 *
 * Formulas of rewarded samples: GRPO (Shao et al. 2024), Dr. GRPO (Liu et al. 2025), DAPO (Yu et
 * al. 2025), GSPO (Zheng et al. 2025), CISPO (MiniMax 2025), SAPO (Gao et al. 2025), LUSPO (Liu et
 * al. 2026), GMPO (Zhao et al. 2025), two-sided clipping (INTELLECT-2, 2025), KL estimators
 * (Schulman 2020), truncated and masked importance sampling between sampler and trainer (Yao et al.
 * 2025, Liu et al. 2025), masks of sequences far from their sampler (DeepSeek-V3.2, 2025) and of
 * tokens of low entropy (Wang et al. 2025). Names and defaults are those of GRPOConfig in TRL's
 * documentation (1.16); docs/use/losses.md has the formulas and the few differences. Of
 * pairs: DPO (Rafailov et al. 2023) and its relatives, as TRL names and defines them. Of a client:
 * as the Tinker API names and defines them, plain sums over tokens. Pure functions. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_LOSS_H
#define TRAINER_LOSS_H

#include "trainer/learn/samples.h"

struct update_stats;

// Each loss is a line: LOSS_ and its symbol, its name, and its row of the table (struct loss),
// whose functions are losses.c's. Of one kind they stand together. A pair's name is its function's;
// a client's losses are plain sums, LOSS_CLIENT_ and their symbol.
#define TRL_CISPO_CAP 5 // its recommendation; --epsilon would cap every ratio below 1
#define SAMPLE_LOSSES(X)                                                                           \
    X(GRPO, "grpo", BY_SEQUENCE, clipped)                                                          \
    X(BNPO, "bnpo", BY_TOKEN, clipped)                                                             \
    X(DAPO, "dapo", BY_TOKEN, clipped)                                                             \
    X(DR_GRPO, "dr_grpo", BY_CONSTANT, clipped)                                                    \
    X(CISPO, "cispo", BY_TOKEN, capped, .bounds = CAPPED, .epsilon_high = TRL_CISPO_CAP)           \
    X(SAPO, "sapo", BY_SEQUENCE, gated)                                                            \
    X(LUSPO, "luspo", BY_SUM, clipped)                                                             \
    X(GMPO, "gmpo", BY_SEQUENCE, geometric, .bounds = OF_LOGS)
#define PAIR_LOSSES(X)                                                                             \
    X(SIGMOID, sigmoid)                                                                            \
    X(HINGE, hinge)                                                                                \
    X(IPO, ipo)                                                                                    \
    X(EXO_PAIR, exo_pair)                                                                          \
    X(NCA_PAIR, nca_pair)                                                                          \
    X(ROBUST, robust)                                                                              \
    X(BCO_PAIR, bco_pair)                                                                          \
    X(SPPO_HARD, sppo_hard)                                                                        \
    X(APO_ZERO, apo_zero)                                                                          \
    X(APO_DOWN, apo_down)                                                                          \
    X(SIGMOID_NORM, sigmoid_norm)                                                                  \
    X(DISCOPOP, discopop)
#define OF_RATIO (INPUT_BIT(INPUT_LOGPROBS) | INPUT_BIT(INPUT_ADVANTAGES))
#define OF_CLIPS                                                                                   \
    .takes = INPUT_BIT(INPUT_CLIP_LOW) | INPUT_BIT(INPUT_CLIP_HIGH), .knows = KNOWS_LOW | KNOWS_HIGH
#define CLIENT_LOSSES(X)                                                                           \
    X(CROSS_ENTROPY, "cross_entropy", log_likelihood, .advantages = INPUT_WEIGHTS,                 \
      .needs = INPUT_BIT(INPUT_WEIGHTS))                                                           \
    X(IMPORTANCE_SAMPLING, "importance_sampling", clipped, .bounds = AS_GIVEN, .needs = OF_RATIO,  \
      .defaults = {0, INFINITY})                                                                   \
    X(PPO, "ppo", clipped, .bounds = AS_GIVEN, OF_CLIPS, .needs = OF_RATIO,                        \
      .defaults = {0.8, 1.2})                                                                      \
    X(CISPO, "cispo", capped, .bounds = AS_GIVEN, OF_CLIPS, .needs = OF_RATIO, .defaults = {0, 4}) \
    X(DRO, "dro", dro, .needs = OF_RATIO, .knows = KNOWS_BETA, .defaults = {0, 0, 0.05})           \
    X(GSPO, "gspo", clipped, .bounds = AS_GIVEN, .sequence_value = true, OF_CLIPS,                 \
      .needs = OF_RATIO | INPUT_BIT(INPUT_RATIO_MASK), .defaults = {0.8, 1.2})
#define LOSS_SYMBOL(symbol, ...)   LOSS_##symbol,
#define CLIENT_SYMBOL(symbol, ...) LOSS_CLIENT_##symbol,
enum loss_type {
    SAMPLE_LOSSES(LOSS_SYMBOL) PAIR_LOSSES(LOSS_SYMBOL) CLIENT_LOSSES(CLIENT_SYMBOL)
        LOSS_CROSS_ENTROPY, // sft's: the mean over tokens
    N_LOSSES,
    N_SAMPLE_LOSSES = LOSS_SIGMOID // they come first
};
extern const char *const loss_type_names[], *const preference_names[]; // of samples; of pairs
// With d = logprob of the reference - logprob: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
enum kl_estimator { KL_K1, KL_K2, KL_K3 };
// Truncated importance sampling for the train-inference mismatch: the weight w = exp(trainer's -
// sampler's logprob), of each token or of the whole sequence (the product over its tokens): cut to
// [min, max], or 0 outside of it.
enum tis_mode {
    TIS_OFF,
    TIS_TOKEN_TRUNCATE,
    TIS_TOKEN_MASK,
    TIS_SEQUENCE_TRUNCATE,
    TIS_SEQUENCE_MASK
};

struct loss_config {
    enum loss_type type;
    int sequence_level;  // 0 or 1: importance ratio of the whole sequence (GSPO) instead of each
                         // token
    double epsilon;      // ratio kept in [1 - epsilon, 1 + epsilon_high];
    double epsilon_high; // LOSS_CISPO: cap of the ratio itself; LOSS_GMPO: both of its logarithm
    double delta;        // dual clip: cap of the unclipped ratio too; 0: off. Not LOSS_CISPO's.
    double beta; // weight of the KL divergence from the reference; 0: off. Of pairs: how close the
                 // policy is held to the reference
    enum kl_estimator kl_estimator;
    bool bias_correction_kl;   // the KL term times the ratio, which then has a gradient through it
    int max_completion_length; // LOSS_DR_GRPO's constant
    enum tis_mode tis;
    double tis_min, tis_max;                           // 0: none
    double frozen_weight;                              // of a tandem's other model's tokens
    double sapo_temperature_neg, sapo_temperature_pos; // of LOSS_SAPO's gate
    // A sequence of negative advantage counts only while the mean log-ratio of its sampler to the
    // policy now is at most that.
    bool off_policy_mask;
    double off_policy_threshold;
    bool clamp_log_ratios; // as verl: of tokens to +-20, of sequences to 10, of k3 to 10
    double label_smoothing, sft_weight, discopop_tau; // of pairs
    double distill_weight; // of the mean divergence from a teacher, over the policy's tokens
    double distill_lambda; // the share of that in it; the rest is the mean over given completions'
};

// What the means of a step divide by, however it is cut into micro-batches: sequences or pairs;
// tokens, a frozen model's by their weight (of pairs: the chosen completions'); tokens that are
// chosen by entropy.
struct loss_scale {
    int seqs;
    double tokens, given; // given: of completions that are
    long chosen;
};
// A completion's n targets, under several weights.
struct loss_rows {
    int n;
    const float *logprobs; // of the policy now
    // by the trainer, of the policy before this step's first update; NULL: those of now. A client's
    // ratio is to its sampler instead.
    const float *old;
    const float *ref;      // of the reference; NULL where beta is 0
    const uint8_t *chosen; // 0: the token has no part but in the KL term; NULL: all have
};
// Adds to *stats; ret_dlogprobs (n) is d loss / d logprob. Tokens of a frozen model weigh
// frozen_weight, those of anybody else nothing; the sampler's log-probability of them is not looked
// at. An empty sequence counts as one with a zero term, as in TRL; so does a masked one. Of pairs:
// two completions, the chosen one first, with their rows, and the derivatives one after the other.
void loss_compute(const struct loss_config *config, const struct loss_scale *scale,
                  const struct pack_completion *completion, const struct loss_rows *rows,
                  struct update_stats *stats, float *ret_dlogprobs);
// The statistics that it gives, a STAT_BIT each.
uint64_t loss_stats(const struct loss_config *config);

extern const char *const kl_estimator_names[], *const tis_mode_names[];

// ---- rows --------------------------------------------------------------------------------------

struct surrogate {
    double value;        // what is maximised
    double by_log_ratio; // its derivative by the log of the ratio; 0 where clipped
    double by_logprob;   // its derivative by the token's own log-probability
    bool low, high;      // for the metrics: below low where the advantage is negative, above
                         // high where it is positive
    bool delta;          // cut by the dual clip
    bool held;           // the token's own log-ratio moves no ratio: clipped, or without advantage
                         // (GMPO)
};
struct token { // what it is of
    const struct loss_config *config;
    double logprob, old; // by the policy now; of what the ratio is to
    double ratio, advantage;
    double low, high; // bounds of the ratio
};

// The log-probability of each completion, summed over its tokens, minus the reference's.
struct pair {
    double chosen, rejected;
    int n_chosen, n_rejected; // tokens
};
struct pair_loss {
    double loss, by_chosen, by_rejected; // its derivatives by the two
};

enum bounds {
    AROUND_ONE, // where a row says nothing: 1 - epsilon and 1 + epsilon_high
    CAPPED,     // 0 and epsilon_high
    OF_LOGS,    // of each token's log-ratio, before its sequence's mean: -epsilon and epsilon_high
    AS_GIVEN,   // epsilon and epsilon_high
};
enum { KNOWS_LOW = 1, KNOWS_HIGH = 2, KNOWS_BETA = 4 }; // in the order of loss_setting_names

// Share of one token in the step's loss: of its sequence's mean, of the mean over all tokens, of
// max_completion_length; of its sequence's sum; or 1.
enum token_weight { BY_SEQUENCE, BY_TOKEN, BY_CONSTANT, BY_SUM, PLAIN_SUM };
#define INPUT_BIT(input) (1u << (input))

struct loss {
    enum token_weight weight;
    struct surrogate (*surrogate)(const struct token *t);
    struct pair_loss (*pair)(const struct loss_config *config, const struct pair *p); // instead
    enum bounds bounds;
    double epsilon_high;          // where the option says nothing; 0: as epsilon
    bool sequence_value;          // its ratio is the sequence's, but each token moves its own alone
    enum loss_input advantages;   // which input they are
    unsigned needs, takes, knows; // a client's: bits of inputs, and of settings
    double defaults[3];
};
extern const struct loss losses[N_LOSSES];

// GMPO: what of a token's log-ratio goes into the mean over its sequence.
struct clip {
    double log_ratio;
    bool low, high;
};
struct clip clip_log_ratio(const struct loss_config *config, double log_ratio, double advantage);

// Of pairs: ST_INVALID names an option that the loss needs otherwise.
enum status loss_check_pairs(const struct loss_config *config);

// ---- a client's -------------------------------------------------------------------------------

extern const char *const loss_input_names[LOSS_INPUTS + 1]; // NULL-ended
extern const char *const loss_setting_names[];              // likewise
// The loss with its defaults. ST_INVALID lists those that there are; ST_UNSUPPORTED for one whose
// formula is not published.
enum status loss_of_client(const char *name, struct loss_config *ret);
double *loss_setting(struct loss_config *config, int setting); // NULL: it does not know that

// ---- entropy ------------------------------------------------------------------------------------

// What a loss does with the entropy of the policy's distributions: a bonus for it, with a fixed or
// an adaptive coefficient (He et al. 2025, Skywork-OR1), and the choice of the tokens of highest
// entropy (Wang et al. 2025, Beyond the 80/20 rule).
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

bool entropy_has_bonus(const struct entropy_config *config);
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
