/* runlog.h: what a run leaves for people and plots: metrics.jsonl (one object a step), the same as
 * a TensorBoard event file, rollouts/ (the sampled text, on request) and the progress line. One
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_RUNLOG_H
#define TRAINER_RUNLOG_H

#include "trainer/run/progress.h"

struct comm;
struct runlog;
struct spec_counters;
struct tensorboard;
struct update_stats;

// folder: the run's, which exists; NULL: nothing is written, and no progress logged. Resuming at
// `step`: lines of later steps, which will be run again, are taken out first; a new event file says
// so to TensorBoard.
enum status runlog_new(const char *folder, int64_t step, int64_t total_steps, int64_t logging_steps,
                       struct runlog **ret);
void runlog_free(struct runlog *log);
bool runlog_has_steps(const char *folder); // metrics.jsonl there has a line of a step above 0
void runlog_set_total(struct runlog *log, int64_t total_steps);

// Significant digits of a number, in metrics.jsonl and so in TensorBoard's file: a scalar is the
// float nearest to what the line says, not to what was rounded for the line.
#define METRICS_DIGITS 9
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

// The live line, or a plain one every logging_steps.
void runlog_progress(struct runlog *log, const struct progress *progress);

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

const char *tensorboard_path(const struct tensorboard *tb); // of its file; lives as long as tb

// CRC-32C (Castagnoli, reflected 0x82f63b78), RFC 3720 appendix B.4; and as TFRecord stores it.
uint32_t crc32c(const void *data, size_t len);
uint32_t crc32c_masked(const void *data, size_t len);

#endif
