/* spec_metrics.h: speculative decoding of a step in metrics.jsonl and in the log. One thread. */
#ifndef TRAINER_SPEC_METRICS_H
#define TRAINER_SPEC_METRICS_H

#include "trainer/rollout/spec_counters.h"

// spec_decode/num_drafts and so on into a line of metrics.jsonl; nothing where not `present`. A
// rate of nothing is null.
void spec_counters_put(const struct spec_counters *c, json_t *metrics);
// vLLM's log line: "SpecDecoding metrics: Mean acceptance length: 2.50, ...".
void spec_counters_say(const struct spec_counters *c, double seconds, struct bytes *ret);

#endif
