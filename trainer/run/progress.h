/* progress.h: how a run goes: the figures of a step and its progress line; what tells, while it
 * goes on, that it learns nothing or goes astray (rewards without spread, no right sample,
 * gradients, KL divergence or entropy out of all proportion); and the best of its evaluations.
 * Makes sentences; logs nothing. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_PROGRESS_H
#define TRAINER_PROGRESS_H

#include "common/base/bytes.h"
#include <jansson.h>

struct progress {                // what a step's line says, and what divergence is looked for in
    int64_t step;                // steps done
    double reward;               // mean over the step's samples
    double accuracy, acceptance; // shares of 1; < 0: there is none
    double zero_spread;          // share of groups whose samples all have the same reward
    double kl;                   // mean a token; NAN: there is no KL term
    double grad_norm;            // NAN: nothing was applied
    double clipped;              // share of tokens whose ratio is clipped; < 0: none can be
    double cut_off;              // share of samples that came to the token limit
    double mean_length;          // tokens of a completion
    double tokens_per_s;         // generated tokens over the whole step
    double entropy;              // mean a token, nats
    double max_entropy;          // of a uniform distribution over the vocabulary
};
#define DURATION_ROOM 24
const char *duration_text(double seconds, char ret[DURATION_ROOM]); // "4:09", "1:04:09"

// Appends "step 3/200  1:04 left  reward 0.512  accuracy 51.2%  acceptance 63.0%  zero-spread 25.0%
// ...": what matters most first. Not the loss, which is 0 by construction in a first iteration.
void progress_line(const struct progress *progress, int64_t total_steps, double seconds_left,
                   struct bytes *ret);

#define DIVERGENCE_STEPS 10 // in a row before it is said that nothing can be learnt

struct divergence {         // zero-initialised
    long steps, flat_steps; // seen; without spread in any group
    int flat, wrong, still; // steps in a row: without spread, without a right sample, gradient of 0
    double norm_mean;       // of late, of norms above 0
    int norms;              // in it
    double first_entropy, peak_entropy;
    // step after which it may be said again; 0: not yet said
    long said_norm, said_kl, said_entropy, said_collapse;
};

// Takes in one step. ret_warnings: sentences of what has just shown itself, one a line; often none.
void divergence_check(struct divergence *s, const struct progress *step,
                      struct bytes *ret_warnings);
// The end of a run: a sentence where no step could teach anything; else nothing is appended.
void divergence_summary(const struct divergence *s, struct bytes *ret);

// And how long there has been no better one. Part of a run's checkpoints, so that a resumed run
// counts on.
struct best {
    int64_t step;   // of the best evaluation; -1: there was none yet
    double score;   // higher is better
    int64_t waited; // evaluations since then
};
#define BEST_NONE ((struct best){.step = -1})

// One more evaluation; true where it is the best so far. An equal score is not better, and one that
// is not a number never is.
bool best_consider(struct best *b, int64_t step, double score);

// --early-stop-patience N evaluations in a row were no better; 0: never.
bool best_out_of_patience(const struct best *b, int64_t patience);
// The end of an evaluation's line, and, of what was scored ("accuracy"), of a run's last.
#define BEST_WORDS 96
void best_words(const struct best *b, bool is_best, int64_t step, char ret[BEST_WORDS]);
void best_end_words(const struct best *b, const char *scored, char ret[BEST_WORDS]);

// For checkpoints. The new reference is null where there was no evaluation; NULL: no memory.
json_t *best_to_json(const struct best *b);
// `json` NULL or null: none. ST_FORMAT, naming `where`, where it is no such object.
enum status best_from_json(const char *where, const json_t *json, struct best *ret);

#endif
