/* param_range.h: what is trained: a list of ranges of arenas. Gradients, moments, the 16-bit
 * residual, clipping and the optimizer's state on disk (optimizer.h) run over such a list. Full
 * fine-tuning is one range, the whole arena; frozen tensors lie between ranges; parameters of a
 * second arena (adapters, another policy, a shard) are further ranges. Plain data. */
#ifndef TRAINER_PARAM_RANGE_H
#define TRAINER_PARAM_RANGE_H

#include "common/model/weights.h"

struct param_range {
    const struct weights *weights; // its arena, bound; borrowed
    int64_t first, n;              // elements: whole blocks of tensors and the padding after them
    const char *arena;             // before the tensors' names on disk; NULL: nothing
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

#endif
