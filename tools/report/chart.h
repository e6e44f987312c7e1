/* chart.h: a line chart as inline SVG: axes, ticks, legend, and the values of a step as a tooltip.
 */
#ifndef TOOLS_REPORT_CHART_H
#define TOOLS_REPORT_CHART_H

#include "common/base/bytes.h"
#include "tools/report/series.h"

#define CHART_POINTS    1000 // of a line at most; longer series are reduced to bucket means
#define CHART_MAX_LINES 16

struct chart_line {                      // borrowed
    const struct series *series, *error; // error: half-widths of its error bars, or NULL
};
struct chart {                // borrowed
    const char *title, *unit; // unit "%": values are shares of 1
    int64_t first_step, last_step;
    struct chart_line lines[CHART_MAX_LINES];
    int n_lines;
};

// Appends one <figure>. Each line's group carries its key as data-metric.
enum status chart_draw(const struct chart *chart, struct bytes *to);

#endif
