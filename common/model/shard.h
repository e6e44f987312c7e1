/* shard.h: tensor parallelism (Shoeybi et al. 2019, Megatron-LM): which part of a model one of
 * several ranks holds and computes, and which part of a Hugging Face tensor that is.
 *
 * Ranks hold equal parts of attention's heads, of the inner columns of every MLP (plain, expert or
 * shared) and of the vocabulary, in rank order. Where there are fewer key-value heads than ranks,
 * neighbours hold the same one. Norms, routers and biases of the residual stream are whole on every
 * rank. Plain data and arithmetic; any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_SHARD_H
#define COMMON_MODEL_SHARD_H

#include <stdint.h>

struct shard { // {0, 1}: one rank holds all
    int rank, size;
};

// The first of the `own` rows or columns that a rank holds of `all`: 0 where it holds them all.
static inline int64_t shard_first(struct shard s, int64_t all, int64_t own)
{
    return s.rank * all / s.size / own * own;
}

// What is held of a Hugging Face tensor: runs of its rows, one after the other, and of those rows
// the columns from first_col on. With one rank one run, of everything.
struct row_run {
    int64_t first, n;
    int replicas; // ranks that hold these rows, of these columns
};
#define MAX_ROW_RUNS 3 // queries, keys and values in one tensor (Phi-3)
struct tensor_slice {
    int64_t whole[2]; // shape of the Hugging Face tensor
    int n_runs;
    struct row_run runs[MAX_ROW_RUNS];
    int64_t first_col;
};

#endif
