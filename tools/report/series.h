/* series.h: metrics.jsonl as series, one for each key, read on as the file grows. One thread. */
#ifndef TOOLS_REPORT_SERIES_H
#define TOOLS_REPORT_SERIES_H

#include "common/base/status.h"
#include <jansson.h>
#include <stdint.h>

struct series { // of one key
    char *key;
    int32_t *at;   // (n) lines that have a value, ascending
    float *values; // (n) finite
    size_t n;
};
struct metrics {
    struct series *series; // (n) in the order in which keys appeared
    int n;
    json_t *index;          // key -> place in series
    int32_t *steps;         // (n_lines) ascending
    int32_t n_lines;        // that were read
    int64_t n_bad;          // others: no JSON object with a "step" above that of the line before
    int64_t at;             // byte of the file up to which it was read
    uint64_t device, inode; // of the file
};

// Reads what was appended since the last call; zero-initialised metrics: all there is. A last line
// without its end (the run goes on, or was killed) is left for later. ret_anew: the file is another
// one, or shorter, since the run was resumed: everything was read again. ST_FORMAT where no line of
// a file could be read.
enum status metrics_read(struct metrics *m, const char *path, bool *ret_anew);
void metrics_release(struct metrics *m);
const struct series *metrics_find(const struct metrics *m, const char *key); // NULL: none

#endif
