/* metrics.h: GET /metrics in Prometheus' text format. Counters and histograms of whole samples are
 * kept here (loop's thread), for only the server knows that a sample cut at a stop string
 * succeeded; gauges and step counters come from engine_stats(). Names are vLLM's where vLLM has the
 * metric. */
#ifndef INFER_SERVER_METRICS_H
#define INFER_SERVER_METRICS_H

#include "common/base/bytes.h"
#include "infer-server/engine/engine.h"

struct metrics {
    struct histogram_bounds tokens; // of the context; set once it is known (metrics_context)
    struct histogram whole, queue, prefill, decode, inference, per_token; // seconds
    struct histogram prompt_tokens, generated_tokens, computed_tokens;    // by sample
    struct histogram asked_n, asked_tokens;                               // by request
    uint64_t finished[5]; // samples by enum finish_reason
    uint64_t refused;     // requests answered with 4xx or 5xx before generation
    uint64_t disconnects; // clients that left before their answer was whole
};

// Before the first sample: tokens of prompt and completion.
void metrics_context(struct metrics *m, int max_context);
// What a request asks for: samples of a prompt, and at most so many tokens of each.
void metrics_request(struct metrics *m, int n, int max_tokens);
// A sample that ended: `finish` is what the client was told.
void metrics_sample(struct metrics *m, enum finish_reason finish,
                    const struct sample_telemetry *telemetry);

struct metrics_info { // what else stands in the text
    const char *model, *kv_dtype;
    const struct engine_stats *engine;
    bool prefix_cache;
    bool paused, draining;
    int open_requests;
};
void metrics_write(const struct metrics *m, const struct metrics_info *info, struct bytes *ret);

#endif
