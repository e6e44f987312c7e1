/* axis.h: round numbers along an axis. */
#ifndef TOOLS_REPORT_AXIS_H
#define TOOLS_REPORT_AXIS_H

#include <stdbool.h>

struct axis {
    double lo, hi; // both multiples of step
    double step;   // 1, 2, 2.5 or 5 times a power of ten
};

// The axis that holds lo to hi (finite, lo <= hi) with about n_ticks steps. A range of one value
// reaches to 0, that of 0 to 1. whole: steps of less than 1 are none.
struct axis axis_fit(double lo, double hi, int n_ticks, bool whole);
int axis_ticks(const struct axis *a);          // how many, both ends included
double axis_tick(const struct axis *a, int i); // 0 based
#define TICK_ROOM 32
const char *axis_label(const struct axis *a, int i, char ret[TICK_ROOM]); // "0.25", "20k", "2e-05"

#endif
