/* metrics.h: GET /metrics in Prometheus' text format. Counters and histograms of whole samples are
 * kept by those that see them (loop's thread), for only the server knows that a sample cut at a
 * stop string succeeded; gauges and step counters come from engine_stats(). Names are vLLM's where
 * vLLM has the metric. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_METRICS_H
#define INFER_SERVER_METRICS_H

#include "common/base/bytes.h"
#include "infer-server/engine/engine.h"
#include "infer-server/http/api.h"

#define SPEC_WINDOW_SAMPLES 1024

// What was drafted and accepted for the samples that ended last, for GET
// /v1/spec_decode_stats?id=ID. The oldest gives its place to the next: nothing else is kept of a
// finished request.
struct spec_window_entry {
    char request_id[REQUEST_ID_BYTES];
    int choice; // over all prompts of the request
    struct sample_telemetry telemetry;
};
struct spec_window { // all zero: empty
    struct spec_window_entry entries[SPEC_WINDOW_SAMPLES];
    uint64_t n; // ever added
};

struct metrics {
    struct histogram_bounds tokens; // of the context; set once it is known, before the first sample
    struct histogram whole, queue, prefill, decode, inference, per_token; // seconds
    struct histogram prompt_tokens, generated_tokens, computed_tokens;    // by sample
    struct histogram asked_n, asked_tokens;                               // by request
    uint64_t finished[5]; // samples by enum finish_reason
    uint64_t refused;     // requests answered with 4xx or 5xx before generation
    uint64_t disconnects; // clients that left before their answer was whole
    struct spec_window ended;
};

struct metrics_info { // what else stands in the text
    const char *model, *kv_dtype;
    const struct engine_stats *engine;
    const struct adapter_info *adapters; // (n_adapters) those with a name
    int n_adapters, max_adapters;        // max 0: this server holds none
    bool prefix_cache;
    bool paused, draining;
    int open_requests;
};
void metrics_write(const struct metrics *m, const struct metrics_info *info, struct bytes *ret);

#endif
