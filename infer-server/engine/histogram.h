/* histogram.h: counts of values by ranges, as Prometheus has them, and the ranges of each metric:
 * vLLM's bounds, so that its dashboards and alerts find the buckets they name, with finer ones
 * below where small models are faster. A histogram is plain data, of whoever keeps it. */
#ifndef INFER_SERVER_HISTOGRAM_H
#define INFER_SERVER_HISTOGRAM_H

#include <stdint.h>

#define HISTOGRAM_BOUNDS_MAX 32

struct histogram_bounds {
    int n;
    double at[HISTOGRAM_BOUNDS_MAX]; // ascending
};

// count i is of values <= at[i] and above at[i - 1] (not cumulative); count n of all above.
struct histogram { // all zero: empty
    uint64_t counts[HISTOGRAM_BOUNDS_MAX + 1];
    double sum;
};

extern const struct histogram_bounds bounds_first_token; // seconds
extern const struct histogram_bounds bounds_next_token;  // seconds
extern const struct histogram_bounds bounds_request;     // seconds
extern const struct histogram_bounds bounds_step_tokens; // tokens of one step
extern const struct histogram_bounds bounds_n;           // samples of a prompt

// 1, 2, 5, 10, 20, ... up to `most`: tokens of a request, of at most the context's.
void histogram_bounds_tokens(int most, struct histogram_bounds *ret);

void histogram_add(struct histogram *h, const struct histogram_bounds *bounds, double value);

#endif
