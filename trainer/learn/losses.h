/* losses.h: a row of the table of losses. Private to loss.c and losses.c. Pure functions. */
#ifndef TRAINER_LOSSES_H
#define TRAINER_LOSSES_H

#include "trainer/learn/loss.h"

struct surrogate {
    double value;        // what is maximised
    double by_log_ratio; // its derivative through the ratio; 0 where clipped
    double by_logprob;   // its derivative by the token's own log-probability
    bool low, high;      // clipped at that bound
    bool delta;          // cut by the dual clip
    bool held;           // the token's own log-ratio was clipped, and moves no ratio (GMPO)
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
    AROUND_ONE, // 1 - epsilon and 1 + epsilon_high
    CAPPED,     // 0 and epsilon_high
    OF_LOGS,    // of each token's log-ratio, before its sequence's mean: -epsilon and epsilon_high
    AS_GIVEN,   // epsilon and epsilon_high
};
enum { KNOWS_LOW = 1, KNOWS_HIGH = 2, KNOWS_BETA = 4 }; // in the order of loss_setting_names

struct loss {
    // Share of one token of a sequence of n, frozen ones by their weight, in the step's loss.
    double (*weight)(const struct loss_config *config, const struct loss_batch *batch, double n);
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

#endif
