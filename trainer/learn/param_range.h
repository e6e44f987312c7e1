/* param_range.h: what is trained: a list of ranges of arenas. Gradients, moments, the 16-bit
 * residual, clipping and the optimizer's state on disk (optimizer.h) run over such a list. Full
 * fine-tuning is one range, the whole arena; frozen tensors lie between ranges; parameters of a
 * second arena (adapters, another policy, a shard) are further ranges. Plain data. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_PARAM_RANGE_H
#define TRAINER_PARAM_RANGE_H

#include "common/model/weights.h"

struct param_range {
    const struct weights *weights; // its arena, bound; borrowed
    int64_t first, n;              // elements: whole blocks of tensors and the padding after them
    const char *arena;             // before the tensors' names on disk; NULL: nothing
    int64_t at; // elements of the ranges before it, where gradients of all lie in one array
};
struct param_ranges {
    struct param_range *list;
    int n;
};

// The arena but for what `freeze` names: tensors' names as glob patterns (fnmatch), separated by
// commas; the last that matches decides, and one that begins with '!' is trained again. NULL or "":
// all of it. ST_INVALID names a pattern that matches no tensor, a block of which a part alone would
// be frozen, or that nothing is left to train.
enum status param_ranges_of(const struct weights *w, const char *freeze, struct param_ranges *ret);
void param_ranges_release(struct param_ranges *ranges);
int64_t param_ranges_parameters(const struct param_ranges *ranges); // of the tensors, no padding
// Whether the i-th tensor of its arena is the range's.
bool param_range_holds(const struct param_range *range, int i);

// How ranks divide the optimizer's work (ZeRO-1, Rajbhandari et al. 2020): what is trained is cut
// into slices of whole blocks, in the arena's order; each rank updates one part of every slice, and
// keeps moments and residual of it alone. Parts are equal; the few elements that are left over are
// slices that every rank updates, alike. With one rank each range is one slice, all of it that
// rank's.

// Elements of a slice with what is left over of it, at least, but for the last of a range: a
// transfer between ranks.
#define SLICE_ELEMENTS (1 << 18)

struct slice {
    int range;
    bool shared;              // what is left over: every rank's
    int64_t first;            // element, from the range's start
    int64_t n;                // elements that a rank updates; in parts they are in rank order
    int64_t state_at, low_at; // elements of moments, and of the residual, before it: on all ranks
};
struct slices {
    int n_ranks, n;
    struct slice *list;     // in the order of the ranges
    int64_t n_state, n_low; // elements of all, and of those in bf16
};

enum status slices_new(const struct param_ranges *ranges, int n_ranks, struct slices *ret);
void slices_release(struct slices *s);
// Without the list.
struct slices slices_count(const struct param_ranges *ranges, int n_ranks);
// Where a rank's part begins, in elements from the range's start.
int64_t slice_first(const struct slice *slice, int rank);

// Rows of a tensor that several ranks hold alike, of a sharded model (common/model/config.h): their
// gradients must be the same on all of these, and count once in the norm. Which tensors, and how
// many ranks hold them, stands in the weights table: nothing here knows a layer's shape.
struct replica {
    int64_t at, n; // elements, of the array of all ranges
    int holders;
    bool in_parts; // each holder computes a part of the gradient, of its own heads or experts
};
// ret: (ret_n) the caller's to free. ret_mixed: a tensor with such rows that other rows share a
// block of moments with (kernels/moments.h), or NULL.
enum status replicas_list(const struct param_ranges *ranges, struct replica **ret, int *ret_n,
                          const struct weight_tensor **ret_mixed);

#endif
