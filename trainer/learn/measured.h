/* measured.h: what the trainer's first passes over a rollout say of it: the log-probabilities
 * before any update, how far they are from the server's, and the entropies, by which tokens are
 * chosen. Private to update.c. One thread. */
#ifndef TRAINER_MEASURED_H
#define TRAINER_MEASURED_H

#include "trainer/learn/stats.h"
#include "trainer/rollout/rollout.h"

struct difference { // of the server's and the trainer's log-probability of a token
    int sample, token;
    float server, trainer;
    uint64_t version; // that sampled it
};

struct measured {
    const struct rollout *rollout;
    uint64_t version;      // of the weights
    int n_samples;         // of the rollout
    long *first;           // (n_samples + 1) where each sample's tokens begin below
    float *old_logprobs;   // (n_tokens)
    double *entropies;     // (n_tokens) 0 for those that another rank has
    uint8_t *chosen;       // (n_tokens) by measured_choose()
    long differing;        // log-probabilities that are not the server's
    struct difference far; // one of the farthest
};

// Zero-initialise; the rollout is borrowed.
enum status measured_init(struct measured *m, const struct rollout *rollout, uint64_t version);
void measured_release(struct measured *m);
// The trainer's numbers of a sample's tokens.
void measured_note(struct measured *m, int sample, const float *logprobs, const float *entropies,
                   struct update_stats *stats);
// ST_MISMATCH where a log-probability noted is not the server's to the bit.
enum status measured_check_exact(const struct measured *m);
// Which tokens are chosen: of the samples that count (n_samples; 0 or 1) the policy's own; of these
// those of highest entropy, that share. With a share below 1 all are noted, on all ranks.
enum status measured_choose(struct measured *m, const uint8_t *counts, double top,
                            struct comm *comm);
// How many are of those samples.
long measured_chosen(const struct measured *m, int first_sample, int n_samples);

#endif
