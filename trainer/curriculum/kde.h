/* kde.h: Gaussian kernel density estimate of numbers, and the valleys of a density. Pure functions,
 * in double. */
#ifndef TRAINER_KDE_H
#define TRAINER_KDE_H

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
