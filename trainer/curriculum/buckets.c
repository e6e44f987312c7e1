/* buckets.c: from rewards to buckets, cut where their density has valleys. Owns nothing; the
 * trainer's thread, once an epoch.
 *
 * Rewards are min-max normalised to 0..1, their density is estimated, and its most
 * prominent valleys, up to n_buckets - 1, become boundaries ("valley"). A bucket below the smallest
 * size goes to the neighbour whose mean is nearer. Where fewer buckets than n_buckets are left, the
 * largest are divided into parts of equal count ("fallback"; without any valley these are the
 * quantiles), and what is too small is merged again. A reward on a boundary belongs to the bucket
 * above it.
 *
 * Min-max normalising would make as much of a range of 0.01 as of one of 1, and prompts that are
 * all solved would be sorted by chance. So where the range is less than a quarter of the largest
 * magnitude, levels keep the share of their distance from 0.5 that the range is of that quarter,
 * the contrast; where all rewards are equal the level is 0.5.
 *
 * All work is on the sorted rewards: a boundary is a rank, a bucket a run of ranks, and merging two
 * buckets drops the rank between them. The density is the plain sum over all rewards at each point:
 * 512 points and a data set of 10,000 take 5 million exponentials, tens of milliseconds beside an
 * epoch of minutes. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/curriculum/curriculum.h"
#include "trainer/reward/advantage.h"

#include <math.h>
#include <stdlib.h>

#define GRID       512  // points at which the density is looked at
#define FULL_RANGE 0.25 // of the rewards' largest magnitude
#define RIPPLE     1e-6 // of the highest density: a shallower valley is the sum's rounding

// ---- density ------------------------------------------------------------------------------------

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

static int by_position(const void *a, const void *b)
{
    return ((const struct valley *)a)->at - ((const struct valley *)b)->at;
}

// Puts v among those kept, the most prominent first; returns how many are kept then.
static int keep(struct valley *kept, int n, int max, struct valley v)
{
    int index = n;
    while (index > 0 && kept[index - 1].prominence < v.prominence) index--;
    if (index >= max) return n;
    if (n < max) n++;
    for (int k = n - 1; k > index; k--) kept[k] = kept[k - 1];
    kept[index] = v;
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
    qsort(kept, (size_t)found, sizeof *kept, by_position);
    for (int k = 0; k < found; k++) ret_at[k] = kept[k].at;
    return found;
}

// ---- buckets ------------------------------------------------------------------------------------

// While they are found, b's boundaries are in units of the normalised rewards: x (n_total),
// ascending.

const char *const boundary_origin_names[] = {"valley", "fallback"};

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Bucket k is the ranks start(k) up to, but without, start(k + 1).
static int start(const struct buckets *b, int k)
{
    return k == 0 ? 0 : k < b->n ? b->boundary[k - 1].rank : b->n_total;
}

static void insert(struct buckets *b, struct boundary boundary)
{
    int k = b->n++ - 1;
    for (; k > 0 && b->boundary[k - 1].rank > boundary.rank; k--)
        b->boundary[k] = b->boundary[k - 1];
    b->boundary[k] = boundary;
}

static void cut_valleys(struct buckets *b, const double *x, int max)
{
    double at[GRID], density[GRID];
    int valleys[KDE_MAX_VALLEYS], rank = 0;
    for (int i = 0; i < GRID; i++) at[i] = (double)i / (GRID - 1);
    kde_density(x, b->n_total, kde_bandwidth(x, b->n_total), at, GRID, density);
    int n = kde_valleys(density, GRID, max, valleys);
    for (int k = 0; k < n; k++) {
        while (x[rank] < at[valleys[k]]) rank++; // the last is 1, above every valley
        insert(b, (struct boundary){at[valleys[k]], BOUNDARY_VALLEY, rank});
    }
}

static bool can_cut(const double *x, int rank)
{
    return x[rank - 1] < x[rank];
}

// Divides ranks first..end into parts as equal as ties allow; ties may allow fewer.
static void cut_evenly(struct buckets *b, const double *x, int first, int end, int parts)
{
    int before = first;
    for (int p = 1; p < parts; p++) {
        int wanted = first + (int)((int64_t)(end - first) * p / parts), best = -1;
        for (int r = before + 1; r < end; r++)
            if (can_cut(x, r) && (best < 0 || abs(r - wanted) < abs(best - wanted))) best = r;
        if (best < 0) return;
        insert(b, (struct boundary){x[best], BOUNDARY_FALLBACK, best});
        before = best;
    }
}

static void cut_fallback(struct buckets *b, const double *x, int n_buckets)
{
    int first[BUCKETS_MAX + 1], parts[BUCKETS_MAX], values[BUCKETS_MAX];
    const int pieces = b->n;
    for (int k = 0; k <= pieces; k++) first[k] = start(b, k);
    for (int k = 0; k < pieces; k++) {
        parts[k] = 1;
        values[k] = first[k] < first[k + 1]; // a part is possible for each
        for (int r = first[k] + 1; r < first[k + 1]; r++) values[k] += can_cut(x, r);
    }
    for (int total = pieces; total < n_buckets; total++) {
        int largest = -1; // with the most rewards a part
        for (int k = 0; k < pieces; k++)
            if (parts[k] < values[k] &&
                (largest < 0 || (int64_t)(first[k + 1] - first[k]) * parts[largest] >
                                    (int64_t)(first[largest + 1] - first[largest]) * parts[k]))
                largest = k;
        if (largest < 0) break; // fewer values than buckets
        parts[largest]++;
    }
    for (int k = 0; k < pieces; k++) cut_evenly(b, x, first[k], first[k + 1], parts[k]);
}

static double mean_of(const struct buckets *b, const double *x, int k)
{
    double mean;
    mean_std(x + start(b, k), start(b, k + 1) - start(b, k), &mean, NULL);
    return mean;
}

static void merge_small(struct buckets *b, const double *x, int min_size)
{
    while (b->n > 1) {
        int smallest = 0, min = b->n_total;
        for (int k = 0; k < b->n; k++) {
            int n = start(b, k + 1) - start(b, k);
            if (n < min) {
                smallest = k;
                min = n;
            }
        }
        if (min >= min_size) return;
        bool down = smallest == b->n - 1; // to the neighbour below
        if (smallest > 0 && !down) {
            double mean = mean_of(b, x, smallest);
            down = mean - mean_of(b, x, smallest - 1) < mean_of(b, x, smallest + 1) - mean;
        }
        b->n--;
        for (int k = down ? smallest - 1 : smallest; k < b->n - 1; k++)
            b->boundary[k] = b->boundary[k + 1];
    }
}

enum status buckets_cut(const double *rewards, int n, int n_buckets, int min_size,
                        struct buckets *ret, int8_t *ret_bucket)
{
    struct buckets b = {.n_total = n};
    if (n == 0) {
        *ret = b;
        return ST_OK;
    }
    double *sorted = malloc(2 * (size_t)n * sizeof *sorted), *x = sorted + n;
    if (!sorted) return status_fail(ST_NO_MEMORY, "no memory to sort %d rewards", n);
    for (int i = 0; i < n; i++) sorted[i] = rewards[i];
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    mean_std(sorted, n, &b.mean, &b.std);
    b.n = 1;
    b.min = sorted[0];
    b.max = sorted[n - 1];
    const double range = b.max - b.min, full = FULL_RANGE * fmax(fabs(b.min), fabs(b.max));
    b.contrast = range >= full ? 1 : range / full;
    for (int i = 0; i < n; i++) x[i] = range > 0 ? (sorted[i] - b.min) / range : 0.5;
    if (range > 0) {
        if (min_size < 1) min_size = 1;
        cut_valleys(&b, x, n_buckets - 1);
        merge_small(&b, x, min_size); // first, so that what is merged makes room for the fallback
        cut_fallback(&b, x, n_buckets);
        merge_small(&b, x, min_size);
    }
    for (int k = 0; k < b.n - 1; k++) b.boundary[k].at = b.min + b.boundary[k].at * range;
    for (int k = 0; k < b.n; k++) {
        struct bucket *one = &b.bucket[k];
        one->level = 0.5 + (mean_of(&b, x, k) - 0.5) * b.contrast;
        one->n = start(&b, k + 1) - start(&b, k);
        one->low = k ? b.boundary[k - 1].at : b.min;
        one->high = k < b.n - 1 ? b.boundary[k].at : b.max;
        mean_std(sorted + start(&b, k), one->n, &one->mean, &one->std);
    }
    for (int i = 0; i < n; i++) {
        int k = 0;
        while (k < b.n - 1 && rewards[i] >= sorted[b.boundary[k].rank]) k++;
        ret_bucket[i] = (int8_t)k;
    }
    *ret = b;
    free(sorted);
    return ST_OK;
}
