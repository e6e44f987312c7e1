/* histogram.c: see engine_info.h. The bounds are those of vLLM 0.24, vllm/v1/metrics/loggers.py. */
#include "infer-server/engine/engine_info.h"

const struct histogram_bounds bounds_first_token = {
    22, {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
         1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560}};
const struct histogram_bounds bounds_next_token = {22, {0.001, 0.0025, 0.005, // these are finer
                                                        0.01,  0.025,  0.05,  0.075, 0.1, 0.15, 0.2,
                                                        0.3,   0.4,    0.5,   0.75,  1,   2.5,  5,
                                                        7.5,   10,     20,    40,    80}};
const struct histogram_bounds bounds_request = {
    27, {0.005, 0.01, 0.025, 0.05, 0.1, 0.2, // these are finer
         0.3,   0.5,  0.8,   1,    1.5, 2,   2.5, 5,   10,   15,  20,
         30,    40,   50,    60,   120, 240, 480, 960, 1920, 7680}};
const struct histogram_bounds bounds_step_tokens = {
    13, {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}};
const struct histogram_bounds bounds_n = {5, {1, 2, 5, 10, 20}};

void histogram_bounds_tokens(int most, struct histogram_bounds *ret)
{
    static const int steps[] = {1, 2, 5};
    double power = 1;
    ret->n = 0;
    for (int i = 0; ret->n < HISTOGRAM_BOUNDS_MAX && steps[i] * power <= most; i = (i + 1) % 3) {
        ret->at[ret->n++] = steps[i] * power;
        if (i == 2) power *= 10;
    }
}

void histogram_add(struct histogram *h, const struct histogram_bounds *bounds, double value)
{
    int i = 0;
    while (i < bounds->n && value > bounds->at[i]) i++;
    h->counts[i]++;
    h->sum += value;
}
