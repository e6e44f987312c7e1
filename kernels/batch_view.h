/* batch_view.h: the one batch shape, as operations see it: a flat list of T tokens, the rows of
 * every activation matrix, and S sequences that own contiguous runs of rows. All pointers are
 * device memory.
 *
 * Two kinds of context, never mixed in one batch:
 *  - paged (serving): keys and values of a sequence, those of this batch's rows included, lie in
 *    the block pool (struct kv_view). Row i of sequence s has position positions[i] and attends to
 *    keys 0..positions[i] of its block table. A row's own key and value are written to slots[i]
 *    before. Sequences may share blocks and attend to each other's rows, as a draft to be verified
 *    does to those before it; of a sequence's keys, the first stored[s] are of earlier batches.
 *  - packed (training): no cache. Sequences are the nodes of trees, each a run of tokens that goes
 *    on behind all rows of its parent (parent[s]; -1: a tree begins), as completions do behind the
 *    prompt that they share, or the turns of a conversation. Row i of sequence s attends to all
 *    rows of its ancestors, which are the first first_position[s] of its context, and to rows
 *    query_start[s]..i of its own. Trees lie depth first, so rows that can attend to row j are
 *    exactly j .. attend_end[s of j] - 1.
 * A decode batch may be padded with sequences of one row whose slot is -1 and context_len 0:
 * nothing is stored for them and their outputs are zeros. Where layers carry a state along the
 * sequence (ops.h, delta_shape), a paged sequence begins with what lies in one slot of them and
 * leaves its own in another or the same; -1 of padding. One that begins where the sequence before
 * it leaves its own goes on from that one: drafts do, which all leave one state that can be taken
 * back (delta_shape.ahead).
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_BATCH_VIEW_H
#define KERNELS_BATCH_VIEW_H

#include "common/base/dtype.h"
#include <stdbool.h>
#include <stdint.h>

struct batch_view {
    int n_tokens;    // T
    int n_seqs;      // S
    int max_query;   // rows of the longest sequence in this batch; 1 for pure decode
    int max_context; // no context_len (paged) or first_position + rows (packed) is above this
    int depth;       // ancestors that a sequence has, at most (packed)
    bool packed;
    const int32_t *tokens;      // (T) ids
    const int32_t *positions;   // (T) position in its sequence, 0-based
    const int32_t *seq_of;      // (T) 0..S-1
    const int32_t *adapter;     // (T) which adapter's (ops.h, lora); -1: the base model alone
    const int32_t *query_start; // (S + 1) first row of each sequence; [S] = T
    // paged
    const int32_t *slots;       // (T) block * block_size + offset, or -1
    const int32_t *context_len; // (S) keys after this batch: position of its last row + 1
    const int32_t *stored;      // (S) keys that were in the pool before this batch; see above
    const int32_t *block_table; // (S, table_stride) block numbers
    int table_stride;
    const int32_t *state_from; // (S) slot of the pool's states, where layers have any; or -1
    const int32_t *state_slot; // (S) where it leaves its own
    // packed
    const int32_t *parent;         // (S) an earlier sequence, or -1
    const int32_t *first_position; // (S) rows of its ancestors
    const int32_t *attend_end; // (S) row after the last one that attends to this sequence's rows
};

// A layer's keys in the block pool of a model begin `offset` elements behind k, its values as many
// behind v: (n_blocks, block_size, width), of which a token's n_kv_heads * head_dim come first. Of
// latent attention (ops.h, struct attn_shape) there are no values, and v may be NULL.
//
// In e4m3 each head of a token's key, and of its value, is a row as e4m3.h has it: codes, and a
// scale, which lies kv_scale_at() behind scales + `scales`.
struct kv_layer {
    int64_t offset;
    int width;
    int64_t scales;
    int64_t state; // where what it carries along a sequence begins in a slot of the states
};
struct kv_view {
    void *k, *v;
    int8_t *scales;                // of DT_E4M3
    const struct kv_layer *layers; // (n_layers), host memory
    int n_blocks, block_size;
    enum dtype dt; // that of the rows (ops.h, struct attn_shape), or DT_E4M3
    // What layers with a recurrence carry along a sequence: (n_slots, slot_elements). A sequence
    // whose first row has position 0 begins with zeros, whatever its slot holds.
    float *states;
    int64_t slot_elements;
};
// Of a layer's scales (n_blocks, n_kv_heads, 2, block_size), that of the key (0) or value (1) in
// the slot `offset` of a block.
#define KV_SCALES 2 // a token and head, also where there are no values
DTYPE_INLINE int64_t kv_scale_at(int64_t block, int offset, int block_size, int n_kv_heads,
                                 int head, int value)
{
    return ((block * n_kv_heads + head) * KV_SCALES + value) * block_size + offset;
}

#endif
