/* metrics.h: what updates and speculative decoding give, as metrics (runlog.h). */
#ifndef TRAINER_METRICS_H
#define TRAINER_METRICS_H

#include "trainer/learn/stats.h"
#include "trainer/rollout/spec_counters.h"

#include <jansson.h>

// Statistics of an update or of an evaluation that are given (STAT_BIT each), under keys that begin
// with the prefix.
void stats_put(const struct update_stats *stats, uint64_t given, const char *prefix,
               json_t *metrics);
// How many ranks there are, and what waiting for their gradients took; nothing of one.
void ranks_put(const struct update_stats *stats, const struct comm *all, json_t *metrics);

// spec_decode/num_drafts and so on into a line of metrics.jsonl; nothing where not `present`. A
// rate of nothing is null.
void spec_counters_put(const struct spec_counters *c, json_t *metrics);
// vLLM's log line: "SpecDecoding metrics: Mean acceptance length: 2.50, ...".
void spec_counters_text(const struct spec_counters *c, double seconds, struct bytes *ret);

#endif
