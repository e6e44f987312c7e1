/* runlog.h: what a run leaves for people and plots: metrics.jsonl (one object a step), rollouts/
 * (the sampled text, on request) and the progress line. One thread. */
#ifndef TRAINER_RUNLOG_H
#define TRAINER_RUNLOG_H

#include "common/base/status.h"
#include <jansson.h>
#include <stdint.h>

struct runlog;

// folder: the run's, which exists. Resuming at `step`: lines of later steps, which will be run
// again, are taken out first.
enum status runlog_new(const char *folder, int64_t step, int64_t total_steps, int64_t logging_steps,
                       struct runlog **ret);
void runlog_free(struct runlog *log);
void runlog_set_total(struct runlog *log, int64_t total_steps);

// A number of such a line; null where it is not finite, which JSON cannot say.
void metrics_put(json_t *metrics, const char *key, double value);
// Appends one line and flushes it to the file; takes the reference to `metrics`, on failure too.
enum status runlog_write(struct runlog *log, json_t *metrics);
// rollouts/step-N.jsonl, atomically: an array of samples, one object a line.
enum status runlog_rollouts(struct runlog *log, int64_t step, const json_t *samples);

struct progress {
    int64_t step;                                             // steps done
    double reward, accuracy, loss, mean_length, tokens_per_s; // accuracy < 0: there is none
};
// The live line, or a plain one every logging_steps.
void runlog_progress(struct runlog *log, const struct progress *progress);

#endif
