/* samples.h: what is kept of every sample in a run's rollouts/: enough to list, filter and sort
 * them. Texts stay in their files. One thread. */
#ifndef TOOLS_REPORT_SAMPLES_H
#define TOOLS_REPORT_SAMPLES_H

#include "common/base/status.h"
#include <jansson.h>
#include <stdint.h>

struct sample {
    int32_t step;
    int32_t row;             // of its step's file, from 0
    int32_t line, number;    // of the data; in its group
    int32_t tokens;          // -1: not said
    float reward, advantage; // NAN: none
    uint8_t truncated;       // 0 or 1
};
struct prompt {
    int32_t line; // of the data
    char *text;   // how it begins, UTF-8
};
struct samples {
    struct sample *samples; // (n) by step and row
    size_t n;
    struct prompt *prompts; // (n_prompts) in the order in which they appeared
    size_t n_prompts;
    json_t *known; // lines of the data that have one
    int64_t n_bad; // lines that were left out
};

// Adds a step's file, after all before it; a line that cannot be read is left out and counted.
enum status samples_add(struct samples *s, int32_t step, const char *path);
void samples_release(struct samples *s);

#endif
