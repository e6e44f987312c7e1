/* runlog.h: what a run leaves for people and plots: metrics.jsonl (one object a step), the same as
 * a TensorBoard event file, rollouts/ (the sampled text, on request) and the progress line. One
 * thread. */
#ifndef TRAINER_RUNLOG_H
#define TRAINER_RUNLOG_H

#include "common/base/bytes.h"
#include <jansson.h>
#include <stdint.h>

struct comm;
struct runlog;
struct spec_counters;
struct update_stats;

// folder: the run's, which exists; NULL: nothing is written, and no progress logged. Resuming at
// `step`: lines of later steps, which will be run again, are taken out first; a new event file says
// so to TensorBoard.
enum status runlog_new(const char *folder, int64_t step, int64_t total_steps, int64_t logging_steps,
                       struct runlog **ret);
void runlog_free(struct runlog *log);
bool runlog_has_steps(const char *folder); // metrics.jsonl there has a line of a step above 0
void runlog_set_total(struct runlog *log, int64_t total_steps);

// A number of such a line; null where it is not finite, which JSON cannot say.
void metrics_put(json_t *metrics, const char *key, double value);
void metrics_putf(json_t *metrics, double value, const char *key, ...) // the key by a format
    __attribute__((format(printf, 3, 4)));
// metrics.c: what updates and speculative decoding give. Statistics of an update or of an
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

struct progress {                // what a step's line says, and what is looked at for divergence.h
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
// The live line, or a plain one every logging_steps.
void runlog_progress(struct runlog *log, const struct progress *progress);

#endif
