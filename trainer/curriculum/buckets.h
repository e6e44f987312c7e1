/* buckets.h: sorts rewards into buckets, cut where their density has valleys. Pure functions, in
 * double.
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
 * the contrast; where all rewards are equal the level is 0.5. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_BUCKETS_H
#define TRAINER_BUCKETS_H

#include "common/base/status.h"
#include <stdint.h>

#define BUCKETS_MAX 16

enum boundary_origin { BOUNDARY_VALLEY, BOUNDARY_FALLBACK };
extern const char *const boundary_origin_names[]; // "valley", "fallback"

struct bucket {
    int n;            // rewards in it
    double low, high; // its range: boundaries, or the smallest and greatest reward of all
    double mean, std; // of the rewards in it; std with n - 1
    double level;     // 0..1: mean of the normalised rewards, pulled towards 0.5 by the contrast
};
struct boundary {
    double at; // in units of the reward
    enum boundary_origin origin;
    int rank; // rewards below it
};
struct buckets {
    int n;                      // of buckets, 1..BUCKETS_MAX; 0 without rewards
    int n_total;                // of rewards
    double mean, std, min, max; // of all of them
    double contrast;            // 0..1, below 1 where the rewards' range is small beside them
    struct bucket bucket[BUCKETS_MAX];         // by ascending reward
    struct boundary boundary[BUCKETS_MAX - 1]; // (n - 1) between them
};

// n_buckets: 1..BUCKETS_MAX, at most. ret_bucket (n): the bucket of each reward. The only error is
// ST_NO_MEMORY.
enum status buckets_cut(const double *rewards, int n, int n_buckets, int min_size,
                        struct buckets *ret, int8_t *ret_bucket);

// A Gaussian kernel density estimate, and the valleys of a density.

// Scott's rule as scipy.stats.gaussian_kde takes it by default (Scott, "Multivariate density
// estimation", 1992): n^(-1/5) times the standard deviation with n - 1. 0 where all are equal.
double kde_bandwidth(const double *x, int n);

// Density of x (n) under Gaussian kernels of that bandwidth (> 0) at each of `at` (n_at).
void kde_density(const double *x, int n, double bandwidth, const double *at, int n_at,
                 double *ret_density);

#define KDE_MAX_VALLEYS 64

// Local minima of a sampled density (n): the `max` (up to KDE_MAX_VALLEYS) of largest prominence,
// in ascending order, into ret_at. Of equal samples in a row the middle one counts; the ends never
// do. The prominence is that of a peak of the density upside down, as scipy.signal.peak_prominences
// defines it. Returns how many there are.
int kde_valleys(const double *density, int n, int max, int *ret_at);

#endif
