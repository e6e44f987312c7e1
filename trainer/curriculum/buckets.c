/* buckets.c: from rewards to buckets. Owns nothing; the trainer's thread, once an epoch.
 *
 * All work is on the sorted rewards: a boundary is a rank, a bucket a run of ranks, and merging two
 * buckets drops the rank between them. The density is the plain sum over all rewards at each point:
 * 512 points and a data set of 10,000 take 5 million exponentials, tens of milliseconds beside an
 * epoch of minutes. */
#include "trainer/curriculum/buckets.h"
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

struct cut {
    int rank;  // of the first reward above it
    double at; // normalised
    enum boundary_origin origin;
};
struct cutting {
    const double *sorted; // (n) normalised rewards, ascending
    int n, n_cuts;
    struct cut cuts[BUCKETS_MAX - 1]; // ascending
};

const char *boundary_origin_name(enum boundary_origin origin)
{
    return origin == BOUNDARY_VALLEY ? "valley" : "fallback";
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Bucket k is the ranks start(k) up to, but without, start(k + 1).
static int start(const struct cutting *c, int k)
{
    return k == 0 ? 0 : k <= c->n_cuts ? c->cuts[k - 1].rank : c->n;
}

static void insert(struct cutting *c, struct cut cut)
{
    int k = c->n_cuts++;
    for (; k > 0 && c->cuts[k - 1].rank > cut.rank; k--) c->cuts[k] = c->cuts[k - 1];
    c->cuts[k] = cut;
}

static void cut_valleys(struct cutting *c, int max)
{
    double at[GRID], density[GRID];
    int valleys[KDE_MAX_VALLEYS], rank = 0;
    for (int i = 0; i < GRID; i++) at[i] = (double)i / (GRID - 1);
    kde_density(c->sorted, c->n, kde_bandwidth(c->sorted, c->n), at, GRID, density);
    int n = kde_valleys(density, GRID, max, valleys);
    for (int k = 0; k < n; k++) {
        while (c->sorted[rank] < at[valleys[k]]) rank++; // the last is 1, above every valley
        insert(c, (struct cut){rank, at[valleys[k]], BOUNDARY_VALLEY});
    }
}

static bool can_cut(const struct cutting *c, int rank)
{
    return c->sorted[rank - 1] < c->sorted[rank];
}

// Parts that ranks first..end can be divided into: one for each value.
static int values_between(const struct cutting *c, int first, int end)
{
    int n = first < end;
    for (int r = first + 1; r < end; r++) n += can_cut(c, r);
    return n;
}

// Divides ranks first..end into parts as equal as ties allow; ties may allow fewer.
static void cut_evenly(struct cutting *c, int first, int end, int parts)
{
    int before = first;
    for (int p = 1; p < parts; p++) {
        int wanted = first + (int)((int64_t)(end - first) * p / parts), best = -1;
        for (int r = before + 1; r < end; r++)
            if (can_cut(c, r) && (best < 0 || abs(r - wanted) < abs(best - wanted))) best = r;
        if (best < 0) return;
        insert(c, (struct cut){best, c->sorted[best], BOUNDARY_FALLBACK});
        before = best;
    }
}

static void cut_fallback(struct cutting *c, int n_buckets)
{
    int first[BUCKETS_MAX + 1], parts[BUCKETS_MAX], values[BUCKETS_MAX];
    int pieces = c->n_cuts + 1;
    for (int k = 0; k <= pieces; k++) first[k] = start(c, k);
    for (int k = 0; k < pieces; k++) {
        parts[k] = 1;
        values[k] = values_between(c, first[k], first[k + 1]);
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
    for (int k = 0; k < pieces; k++) cut_evenly(c, first[k], first[k + 1], parts[k]);
}

static double mean_of(const struct cutting *c, int k)
{
    double mean;
    mean_std(c->sorted + start(c, k), start(c, k + 1) - start(c, k), &mean, NULL);
    return mean;
}

static void merge_small(struct cutting *c, int min_size)
{
    while (c->n_cuts > 0) {
        int smallest = 0, min = c->n;
        for (int k = 0; k <= c->n_cuts; k++) {
            int n = start(c, k + 1) - start(c, k);
            if (n < min) {
                smallest = k;
                min = n;
            }
        }
        if (min >= min_size) return;
        bool down = smallest == c->n_cuts; // to the neighbour below
        if (smallest > 0 && !down) {
            double mean = mean_of(c, smallest);
            down = mean - mean_of(c, smallest - 1) < mean_of(c, smallest + 1) - mean;
        }
        for (int k = down ? smallest - 1 : smallest; k + 1 < c->n_cuts; k++)
            c->cuts[k] = c->cuts[k + 1];
        c->n_cuts--;
    }
}

double buckets_contrast(const struct buckets *b)
{
    double full = FULL_RANGE * fmax(fabs(b->min), fabs(b->max)), range = b->max - b->min;
    return range >= full ? 1 : range / full;
}

static void describe(const struct cutting *c, const double *sorted, struct buckets *b)
{
    double range = b->max - b->min, contrast = buckets_contrast(b);
    b->n = c->n_cuts + 1;
    for (int k = 0; k < c->n_cuts; k++)
        b->boundary[k] = (struct boundary){b->min + c->cuts[k].at * range, c->cuts[k].origin};
    for (int k = 0; k < b->n; k++) {
        struct bucket *x = &b->bucket[k];
        x->n = start(c, k + 1) - start(c, k);
        x->low = k ? b->boundary[k - 1].at : b->min;
        x->high = k < c->n_cuts ? b->boundary[k].at : b->max;
        mean_std(sorted + start(c, k), x->n, &x->mean, &x->std);
        x->level = 0.5 + (mean_of(c, k) - 0.5) * contrast;
    }
}

enum status buckets_cut(const double *rewards, int n, int n_buckets, int min_size,
                        struct buckets *ret, int8_t *ret_bucket)
{
    struct buckets b = {.n_total = n};
    struct cutting c = {.n = n};
    if (n == 0) {
        *ret = b;
        return ST_OK;
    }
    double *sorted = malloc(2 * (size_t)n * sizeof *sorted);
    if (!sorted) return status_fail(ST_NO_MEMORY, "no memory to sort %d rewards", n);
    for (int i = 0; i < n; i++) sorted[i] = rewards[i];
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    mean_std(sorted, n, &b.mean, &b.std);
    b.min = sorted[0];
    b.max = sorted[n - 1];
    const double range = b.max - b.min;
    double *normal = sorted + n;
    for (int i = 0; i < n; i++) normal[i] = range > 0 ? (sorted[i] - b.min) / range : 0.5;
    c.sorted = normal;
    if (range > 0) {
        if (min_size < 1) min_size = 1;
        cut_valleys(&c, n_buckets - 1);
        merge_small(&c, min_size); // first, so that what is merged makes room for the fallback
        cut_fallback(&c, n_buckets);
        merge_small(&c, min_size);
    }
    describe(&c, sorted, &b);
    for (int i = 0; i < n; i++) {
        double x = range > 0 ? (rewards[i] - b.min) / range : 0.5;
        int k = 0;
        while (k < c.n_cuts && x >= c.cuts[k].at) k++;
        ret_bucket[i] = (int8_t)k;
    }
    *ret = b;
    free(sorted);
    return ST_OK;
}
