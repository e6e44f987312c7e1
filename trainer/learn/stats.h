/* stats.h: what updates give beside new weights: statistics of their tokens, sequences and pairs,
 * each a range, of which a metric is the mean, the least or the largest, and where a step's time
 * goes. A loss adds to the statistics, and whoever drives the learner owns them. Plain data. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_STATS_H
#define TRAINER_STATS_H

#include "bridge/attach.h"
#include "kernels/comm.h"

struct range_stats { // sum / n is the mean; min and max are 0 where n is
    double sum, min, max;
    long n;
};
void range_add(struct range_stats *r, double x);
double range_mean(const struct range_stats *r); // 0 where it has no entry

enum statistic {
    // of the first iteration alone, where several learn from the same samples
    STAT_LOSS,          // what is added up to it; its sum is normalised over each update already
    STAT_EXTRA_LOSS,    // that part of it which is no policy's: the entropy's bonus, the routers'
    STAT_AUX_LOSS,      // routers' load-balancing loss, without its coefficient
    STAT_KL,            // of tokens, as estimated, without the ratio
    STAT_ENTROPY,       // of tokens
    STAT_FROZEN,        // of tokens that a model wrote, 1: the frozen one did
    STAT_MISMATCH,      // |trainer's - server's log-probability| of the policy's tokens
    STAT_MISMATCH_K3,   // by Schulman's estimator
    STAT_MISMATCH_NOW,  // as STAT_MISMATCH, of tokens of the present weights, or of unknown ones
    STAT_DRAFT_KL,      // of targets, KL(policy || draft)
    STAT_DRAFT_OVERLAP, // sum min(p, q), the acceptance to expect
    STAT_TEACHER_DIVERGENCE, // of targets that are held to a teacher, from it
    STAT_TEACHER_AGREES,     // 1: both find the same token likeliest
    STAT_TEACHER_TO_32,      // STAT_TEACHER_DIVERGENCE of a completion's first 32 tokens
    STAT_TEACHER_TO_128,     // of those behind them, up to the 128th
    STAT_TEACHER_TO_512,
    STAT_TEACHER_BEYOND,
    FIRST_STATS, // so many
    // of all updates: one entry a token of the policy; a sequence with sequence_level
    STAT_RATIO = FIRST_STATS,
    STAT_CLIP_LOW, // here and below, 1 where it is so: the mean is a share
    STAT_CLIP_HIGH,
    STAT_CLIP_REGION,  // at either bound
    STAT_SEQ_CLIP_LOW, // the clipped share of each sequence that has tokens
    STAT_SEQ_CLIP_HIGH,
    STAT_CISPO_CLIP, // as STAT_CLIP_HIGH
    STAT_CLIP_DELTA,
    STAT_TIS,        // weights as used; of tokens, or of sequences in the sequence_ modes
    STAT_TIS_CUT,    // truncated or masked
    STAT_OFF_POLICY, // of sequences: off_policy_threshold took it out
    // of completions that are given
    STAT_LIKELIEST, // of tokens: it was the likeliest
    STAT_CHOSEN_REWARD,
    STAT_REJECTED_REWARD,
    STAT_MARGIN,
    STAT_RIGHT, // the chosen completion has gained more
    STAT_CHOSEN_LOGPROB,
    STAT_REJECTED_LOGPROB,
    N_STATS
};
#define STAT_BIT(stat)         ((uint64_t)1 << (stat))
#define STAT_BITS(first, last) (STAT_BIT((last) + 1) - STAT_BIT(first))

struct update_stats { // zero-initialise
    struct range_stats range[N_STATS];
    bool again;    // a later iteration: the first's statistics are complete
    int n_updates; // of the first iteration
    // of updates as such: alike on all ranks
    double lr;                    // of the last one
    double grad_norm;             // of the last that was applied, before clipping
    int applied, skipped;         // skipped: the gradient was not finite
    long draft_targets;           // of the first iteration, which is the draft's only one
    double draft_grad_norm;       // before clipping
    bool draft_skipped;           // its gradient was not finite
    struct publish_times publish; // summed
    double gradient_wait_ms;      // likewise: optimizer_wait_ms()
};

void stats_add(struct update_stats *s, enum statistic stat, double x);
double stats_mean(const struct update_stats *s, enum statistic stat);
double stats_per_update(const struct update_stats *s,
                        enum statistic stat); // the sum over each, averaged
// Adds the statistics of all ranks, in their order; NULL: there is one.
enum status stats_merge(struct comm *comm, struct update_stats *s);

// ---- time ---------------------------------------------------------------------------------------

// A clock with laps: whatever the main thread does is some phase's, so that the phases of a step
// are together the time it took. One thread.
enum phase {
    PHASE_WAIT, // for rollouts that others sample and score meanwhile (--async), for other ranks
    PHASE_ROLLOUT,
    PHASE_SCORE,
    PHASE_PACK,
    PHASE_FORWARD,   // the reference's and the draft's too
    PHASE_BACKWARD,  // the device's work of one micro-batch may run on while the next is packed
    PHASE_OPTIMIZER, // gradient norm, sums over ranks that the backward pass did not hide, AdamW
    PHASE_PUBLISH,   // quiescing the server, and letting it go on
    PHASE_LOG,       // metrics, rollouts/, and all that has no phase of its own
    PHASE_EVAL,
    PHASE_CHECKPOINT,
    N_PHASES
};
extern const char *const phase_names[]; // "wait", "rollout"...

struct phase_timers {
    int64_t since_ns; // the last lap's end, or when the first began
    double seconds[N_PHASES];
};

// The time since the last lap was that phase's. NULL: nobody counts.
void phase_timers_lap(struct phase_timers *s, enum phase phase);
// So many of the seconds of one, at most all, were another's.
void phase_timers_move(struct phase_timers *s, enum phase from, enum phase to, double seconds);

#endif
