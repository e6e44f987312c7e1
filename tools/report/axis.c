/* axis.c: round numbers along an axis. Stateless. */
#include "tools/report/axis.h"

#include <math.h>
#include <stdio.h>

// The smallest round number that is not below `x` (> 0), but for rounding.
static double round_step(double x)
{
    static const double steps[] = {1, 2, 2.5, 5};
    double power = pow(10, floor(log10(x)));
    for (int i = 0; i < 4; i++)
        if (steps[i] * power >= x * (1 - 1e-9)) return steps[i] * power;
    return 10 * power;
}

struct axis axis_fit(double lo, double hi, int n_ticks, bool whole)
{
    // A range so small beside its place that doubles can hardly divide it counts as one value.
    if (hi - lo <= 1e-9 * fmax(fabs(lo), fabs(hi))) {
        if (lo > 0)
            lo = 0;
        else if (hi < 0)
            hi = 0;
        else
            hi = 1;
    }
    double step = round_step((hi - lo) / n_ticks);
    if (whole && step < 1) step = 1;
    if (whole && step == 2.5) step = 5;
    return (struct axis){
        .lo = floor(lo / step + 1e-9) * step, .hi = ceil(hi / step - 1e-9) * step, .step = step};
}

int axis_ticks(const struct axis *a)
{
    return (int)lround((a->hi - a->lo) / a->step) + 1;
}

double axis_tick(const struct axis *a, int i)
{
    double tick = (round(a->lo / a->step) + i) * a->step;
    return tick == 0 ? 0 : tick; // no -0
}

const char *axis_label(const struct axis *a, int i, char ret[TICK_ROOM])
{
    static const struct {
        double unit;
        const char *name;
    } units[] = {{1e9, "G"}, {1e6, "M"}, {1e3, "k"}, {1, ""}};
    double largest = fmax(fabs(a->lo), fabs(a->hi)), tick = axis_tick(a, i);
    int k = 0;
    if (tick == 0) return "0";
    if (largest >= 1e13 || a->step < 1e-4) {
        snprintf(ret, TICK_ROOM, "%.6g", tick);
        return ret;
    }
    while (k < 3 && largest < 10 * units[k].unit) k++;
    double step = a->step / units[k].unit;
    int decimals = 0;
    for (; decimals < 9 && fabs(step - round(step)) > 1e-6 * step; decimals++) step *= 10;
    snprintf(ret, TICK_ROOM, "%.*f%s", decimals, tick / units[k].unit, units[k].name);
    return ret;
}
