/* series.h: metrics.jsonl as series, one for each key, and their reduction to what a chart can
 * show. One thread. */
#ifndef TOOLS_REPORT_SERIES_H
#define TOOLS_REPORT_SERIES_H

#include "common/base/status.h"
#include <jansson.h>
#include <stdint.h>

struct point {
    int64_t step;
    double value; // finite
};
struct series { // of one key; steps ascend
    char *key;
    struct point *points;
    size_t n;
    bool claimed; // stands on the page
};
struct metrics {
    struct series *series; // (n) in the order in which keys appeared
    int n;
    json_t *index;                 // key -> place in series
    int64_t first_step, last_step; // -1: no line
    int64_t n_lines, n_bad; // bad: no JSON object with a "step" above that of the line before
};

// Reads line by line. A last line without its end (the run goes on, or was killed) is passed over;
// others that cannot be read are counted. ST_FORMAT where no line could be.
enum status metrics_read(const char *path, struct metrics *ret);
void metrics_release(struct metrics *m);
struct series *metrics_find(const struct metrics *m, const char *key); // NULL: none

struct curve_point { // a run of neighbouring points of a series
    double step;     // their mean
    double mean, min, max;
    double error; // mean of theirs; NAN: none
};
struct curve {
    struct curve_point *points;
    int n;
    bool reduced; // fewer points than the series has
};
// At most max_points buckets of equally many points (the last may have fewer). error: a series of
// half-widths at the same steps, may be NULL.
enum status curve_new(const struct series *s, const struct series *error, int max_points,
                      struct curve *ret);
void curve_release(struct curve *c);

#endif
