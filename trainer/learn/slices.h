/* slices.h: how ranks divide the optimizer's work (ZeRO-1, Rajbhandari et al. 2020). What is
 * trained is cut into slices of whole blocks, in the arena's order; each rank updates one part of
 * every slice, and keeps moments and residual of it alone. Parts are equal; the few elements of a
 * slice that are left over are updated by every rank, alike. With one rank each range is one slice,
 * all of it that rank's. Plain data. */
#ifndef TRAINER_SLICES_H
#define TRAINER_SLICES_H

#include "trainer/learn/param_range.h"

// Elements of a slice, at least, but for the last of a range: a transfer between ranks.
#define SLICE_ELEMENTS (1 << 18)

struct slice {
    int range;
    int64_t first, n; // elements, from the range's start
    int64_t part;     // elements of each rank, in rank order
};
// What a rank updates of a slice. Where its state lies is the same on every rank.
struct stretch {
    int slice;
    bool shared;              // what is left over: every rank's
    int64_t n;                // elements
    int64_t state_at, low_at; // elements of moments, and of the residual, before it
};
struct slices {
    int n_ranks, n;
    struct slice *list; // in the order of the ranges
    int n_stretches;
    struct stretch *stretches; // in the order of the slices, what is shared after the part
    int64_t n_state, n_low;    // elements of all stretches, and of those in bf16
};

enum status slices_new(const struct param_ranges *ranges, int n_ranks, struct slices *ret);
void slices_release(struct slices *s);
// Without the lists.
struct slices slices_count(const struct param_ranges *ranges, int n_ranks);
// Where a rank's stretch begins, in elements from its range's start.
int64_t stretch_first(const struct slices *s, const struct stretch *t, int rank);

#endif
