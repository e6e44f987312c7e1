/* runlog.h: what a run leaves for people and plots: metrics.jsonl (one object a step), the same as
 * a TensorBoard event file, rollouts/ (the sampled text, on request), the report of a curriculum's
 * epoch, and the progress line with what tells, while it goes on, that a run learns nothing or goes
 * astray (rewards without spread, no right sample, gradients, KL divergence or entropy out of all
 * proportion), and the best of its evaluations. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_RUNLOG_H
#define TRAINER_RUNLOG_H

#include "common/base/bytes.h"
#include "trainer/curriculum/curriculum.h"

#include <jansson.h>

struct comm;
struct progress;
struct runlog;
struct spec_counters;
struct tensorboard;
struct update_stats;

// folder: the run's, which exists; NULL: nothing is written, and no progress logged. Resuming at
// `step`: lines of later steps, which will be run again, are taken out first; a new event file says
// so to TensorBoard.
enum status runlog_new(const char *folder, int64_t step, int64_t logging_steps,
                       struct runlog **ret);
void runlog_free(struct runlog *log);
bool runlog_has_steps(const char *folder); // metrics.jsonl there has a line of a step above 0

// Significant digits of a number, in metrics.jsonl and so in TensorBoard's file: a scalar is the
// float nearest to what the line says, not to what was rounded for the line.
#define METRICS_DIGITS 9
// A number of such a line; null where it is not finite, which JSON cannot say.
json_t *json_finite(double x);
void metrics_put(json_t *metrics, const char *key, double value);
void metrics_putf(json_t *metrics, double value, const char *key, ...) // the key by a format
    __attribute__((format(printf, 3, 4)));
// run_metrics.c: what updates and speculative decoding give. Statistics of an update or of an
// evaluation that are given (STAT_BIT each), under keys that begin with the prefix.
void stats_put(const struct update_stats *stats, uint64_t given, const char *prefix,
               json_t *metrics);
// How many ranks there are, and what waiting for their gradients took; nothing of one.
void ranks_put(const struct update_stats *stats, const struct comm *all, json_t *metrics);

// spec_decode/num_drafts and so on into a line of metrics.jsonl; nothing where not `present`. A
// rate of nothing is null.
void spec_counters_put(const struct spec_counters *c, json_t *metrics);
// vLLM's log line: "SpecDecoding metrics: Mean acceptance length: 2.50, ...".
void spec_counters_text(const struct spec_counters *c, double seconds, struct bytes *ret);

// Appends one line and one event and flushes them to their files; takes the reference to `metrics`,
// on failure too.
enum status runlog_write(struct runlog *log, json_t *metrics);
// rollouts/step-N.jsonl, atomically: lines of samples; of an evaluation, eval-step-N.jsonl.
enum status runlog_rollouts(struct runlog *log, int64_t step, bool evaluation,
                            const struct bytes *lines);

// The live line, or a plain one every logging_steps.
void runlog_progress(const struct runlog *log, const struct progress *progress,
                     int64_t total_steps);

// ---- the event file -----------------------------------------------------------------------------
// events.out.tfevents.* in the run's folder. Formats: TFRecord framing
// (tensorflow/core/lib/io/record_writer.h) around Event messages
// (tensorflow/core/util/event.proto).

// A new file in `folder`, which exists. What files of earlier processes say of the steps after
// `step` (the last one done; 0: of all steps) no longer counts for readers.
enum status tensorboard_new(const char *folder, int64_t step, struct tensorboard **ret);
void tensorboard_free(struct tensorboard *tb);

// One event: a scalar for each number of the object, at its "step". Booleans, nulls and what is not
// finite as a float are left out. ST_IO where the file cannot take it.
enum status tensorboard_write(struct tensorboard *tb, const json_t *metrics);

// CRC-32C (Castagnoli, reflected 0x82f63b78), RFC 3720 appendix B.4; and as TFRecord stores it.
uint32_t crc32c(const void *data, size_t len);
uint32_t crc32c_masked(const void *data, size_t len);

// ---- how it goes --------------------------------------------------------------------------------

struct progress {                // what a step's line says, and what divergence is looked for in
    int64_t step;                // steps done
    double reward;               // mean over the step's samples; NAN: there is none
    double teacher;              // mean divergence from it; NAN: there is none
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

// The end of an evaluation's line.
#define BEST_WORDS 96
void best_words(const struct best *b, bool is_best, int64_t step, char ret[BEST_WORDS]);

// For checkpoints. The new reference is null where there was no evaluation; NULL: no memory.
json_t *best_to_json(const struct best *b);
// `json` NULL or null: none. ST_FORMAT, naming `where`, where it is no such object.
enum status best_from_json(const char *where, const json_t *json, struct best *ret);

// ---- a curriculum's report of an epoch ----------------------------------------------------------

struct cluster_report {
    const char *mode;              // "kde", "uniform"
    int64_t epoch;                 // that ended, from 1
    const struct buckets *buckets; // at least one
    double rollouts[BUCKETS_MAX];  // of a prompt of each in the next epoch
};

// Appends; bytes_status() tells of want of memory.
void cluster_report_text(const struct cluster_report *r, struct bytes *ret);
// One line for the console.
void cluster_report_line(const struct cluster_report *r, struct bytes *ret);
// Adds curriculum/... keys; a bucket's are curriculum/bucket_K/..., K from 1.
void cluster_report_metrics(const struct cluster_report *r, json_t *metrics);

#endif
