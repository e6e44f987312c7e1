/* curriculum.h: which prompts a step takes, and how many samples of each. One thread.
 *
 * off      the seeded order (data.h), epochs without a gap between them, and the same number of
 *          samples of every prompt.
 * kde      an epoch's examples are sorted into buckets by the rewards they got so far (buckets.c);
 *          a step takes prompts of one bucket, and the lower its rewards, the more samples of each:
 *              rollouts = base x (1 + alpha x (1 - level))    rounded; level 0..1 (struct bucket)
 *          so base for the highest rewards and base x (1 + alpha) for the lowest. Examples not seen
 *          yet are a bucket of their own of level 0.5: the whole first epoch.
 * uniform  the control of kde: the same buckets, batches and order, and the same sum of rollouts
 *          over the epoch, but spread evenly over all prompts.
 *
 * With kde and uniform every example comes exactly once an epoch. A bucket's prompts are divided
 * into batches as equal as can be, of at most prompts_per_step; their order is sampled from (seed,
 * epoch). All of it is a function of the options, the seed and what was recorded. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_CURRICULUM_H
#define TRAINER_CURRICULUM_H

#include "common/base/status.h"

#include <jansson.h>
#include <stdint.h>

// ---- buckets of rewards (buckets.c: pure functions, in double) ----------------------------------

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

// ---- the curriculum -----------------------------------------------------------------------------

enum curriculum_mode { CURRICULUM_OFF, CURRICULUM_UNIFORM, CURRICULUM_KDE };
extern const char *const curriculum_mode_names[];

struct curriculum_options {
    enum curriculum_mode mode;
    uint64_t seed;
    int64_t prompts_per_step; // at most, with buckets
    int64_t num_generations;  // samples of a prompt, with CURRICULUM_OFF
    // the others
    int64_t n_buckets, min_bucket_size; // 0: as prompts_per_step
    int64_t base;                       // samples of a prompt of the highest bucket
    double alpha;                       // how much more the lowest gets
    double ema;                         // weight of the old value in an example's average
};

// Samples of a prompt whose bucket has that level, and the largest number that any can get.
int curriculum_rollouts(const struct curriculum_options *o, double level);
int curriculum_max_rollouts(const struct curriculum_options *o);

struct curriculum;
enum status curriculum_new(const struct curriculum_options *options, int n_examples,
                           struct curriculum **ret);
void curriculum_free(struct curriculum *c);

struct curriculum_batch { // of one step; borrowed until the next call
    const int *examples;  // (n) indices into the data set
    int n;
    int rollouts; // of each
    int bucket;   // of the last epoch's buckets; -1: not in one
};
// Of the next step, or of one `ahead` steps behind it. False where that depends on rewards that are
// not recorded yet: with buckets, behind an epoch's last step.
bool curriculum_next(struct curriculum *c, int ahead, struct curriculum_batch *ret);
// The step on that batch is done; rewards (n): the mean over each prompt's samples. The first
// reward of an example is its average, later ones move it: ema x old + (1 - ema) x new.
// ret_buckets: where this was an epoch's last step, what its rewards were sorted into (borrowed
// until the next epoch ends), else NULL; always NULL with CURRICULUM_OFF.
enum status curriculum_record(struct curriculum *c, const double *rewards,
                              const struct buckets **ret_buckets);

int64_t curriculum_taken(const struct curriculum *c); // examples so far
// Steps until `examples` in all were taken. Those of epochs after this one are counted as if they
// had no buckets, of which each may cost a step more.
int64_t curriculum_steps_left(const struct curriculum *c, int64_t examples);
int64_t curriculum_samples(const struct curriculum *c); // rollouts so far; 0 with CURRICULUM_OFF
// What a prompt of that bucket gets in the present epoch; with CURRICULUM_UNIFORM the mean over
// all.
double curriculum_bucket_rollouts(const struct curriculum *c, int bucket);

// For checkpoints. The new reference is null where the state is `taken` alone; NULL: no memory.
json_t *curriculum_to_json(const struct curriculum *c);
// Takes up a new curriculum where another one of the same data was. ST_MISMATCH where the options
// would make another run of it, ST_FORMAT where it is no such state.
enum status curriculum_from_json(struct curriculum *c, const json_t *json, int64_t taken);

#endif
