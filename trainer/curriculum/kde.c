/* kde.c: density estimate and valleys. Owns nothing; the trainer's thread, once an epoch.
 *
 * The plain sum over all samples at each point: 512 points and a data set of 10,000 take 5 million
 * exponentials, tens of milliseconds beside an epoch of minutes.
 */
#include "trainer/curriculum/kde.h"
#include "trainer/reward/advantage.h"

#include <math.h>
#include <stdlib.h>

#define RIPPLE 1e-6 // of the highest density: a shallower valley is the sum's rounding

double kde_bandwidth(const double *x, int n)
{
    double std;
    mean_std(x, n, NULL, &std);
    return n > 1 ? std * pow(n, -0.2) : 0;
}

void kde_density(const double *x, int n, double bandwidth, const double *at, int n_at,
                 double *ret_density)
{
    const double scale = 1 / (n * bandwidth * sqrt(2 * M_PI));
    for (int k = 0; k < n_at; k++) {
        double sum = 0;
        for (int i = 0; i < n; i++) {
            double z = (at[k] - x[i]) / bandwidth;
            sum += exp(-0.5 * z * z);
        }
        ret_density[k] = scale * sum;
    }
}

// Highest density on the way from `from` by `step`, up to where it falls below `floor`.
static double rise(const double *density, int n, int from, int step, double floor)
{
    double highest = floor;
    for (int i = from; i >= 0 && i < n && density[i] >= floor; i += step)
        highest = fmax(highest, density[i]);
    return highest;
}

struct valley {
    int at;
    double prominence;
};

static int by_place(const void *a, const void *b)
{
    return ((const struct valley *)a)->at - ((const struct valley *)b)->at;
}

// Puts v among those kept, the most prominent first; returns how many are kept then.
static int keep(struct valley *kept, int n, int max, struct valley v)
{
    int place = n;
    while (place > 0 && kept[place - 1].prominence < v.prominence) place--;
    if (place >= max) return n;
    if (n < max) n++;
    for (int k = n - 1; k > place; k--) kept[k] = kept[k - 1];
    kept[place] = v;
    return n;
}

int kde_valleys(const double *density, int n, int max, int *ret_at)
{
    struct valley kept[KDE_MAX_VALLEYS];
    double top = 0;
    int found = 0;
    if (max > KDE_MAX_VALLEYS) max = KDE_MAX_VALLEYS;
    for (int i = 0; i < n; i++) top = fmax(top, density[i]);
    for (int first = 1, last; first < n - 1; first = last + 1) {
        double floor = density[first];
        for (last = first; last < n - 1 && density[last + 1] == floor;) last++;
        if (last == n - 1 || density[first - 1] <= floor || density[last + 1] < floor) continue;
        double prominence =
            fmin(rise(density, n, first, -1, floor), rise(density, n, last, 1, floor)) - floor;
        if (prominence > RIPPLE * top)
            found = keep(kept, found, max, (struct valley){(first + last) / 2, prominence});
    }
    qsort(kept, (size_t)found, sizeof *kept, by_place);
    for (int k = 0; k < found; k++) ret_at[k] = kept[k].at;
    return found;
}
