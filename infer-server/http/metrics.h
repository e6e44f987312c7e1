/* metrics.h: GET /metrics in Prometheus' text format. Counters and histograms of whole samples are
 * kept here (loop's thread), for only the server knows that a sample cut at a stop string
 * succeeded; gauges and step counters come from engine_stats(). Names are vLLM's where vLLM has the
 * metric. */
#ifndef INFER_SERVER_METRICS_H
#define INFER_SERVER_METRICS_H

#include "common/base/bytes.h"
#include "infer-server/engine/engine.h"

struct histogram { // bounds: engine_bucket_bounds
    uint64_t counts[ENGINE_BUCKETS];
    double sum; // seconds
};

struct metrics {
    struct histogram whole, queue;
    uint64_t finished[5]; // samples by enum finish_reason
    uint64_t refused;     // requests answered with 4xx or 5xx before generation
    uint64_t disconnects; // clients that left before their answer was whole
};

// A sample that ended: `finish` is what the client was told.
void metrics_sample(struct metrics *m, enum finish_reason finish,
                    const struct sample_telemetry *telemetry);

struct metrics_facts { // what else stands in the text
    const char *model;
    const struct engine_stats *engine;
    bool paused, draining;
    int open_requests;
};
void metrics_write(const struct metrics *m, const struct metrics_facts *facts, struct bytes *ret);

#endif
