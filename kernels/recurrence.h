/* recurrence.h: how recurrences (ops.h, delta_shape) go over a batch, and where they keep what; of
 * both backends. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_RECURRENCE_H
#define KERNELS_RECURRENCE_H

#include "kernels/ops.h"

// Whether sequence s goes on from no other of the batch.
DTYPE_INLINE bool unit_begins(const struct batch_view *b, int s)
{
    if (b->packed) return b->parent[s] < 0;
    return s == 0 || b->state_slot[s] < 0 || b->state_slot[s - 1] != b->state_from[s];
}

// The sequence behind the last that goes on from s, which begins.
DTYPE_INLINE int unit_end(const struct batch_view *b, int s)
{
    do s++;
    while (s < b->n_seqs && !unit_begins(b, s));
    return s;
}

// The position of a sequence's first row.
DTYPE_INLINE int unit_position(const struct batch_view *b, int s)
{
    return b->packed ? b->first_position[s] : b->positions[b->query_start[s]];
}

// The row that has `position` in the context of sequence s of a packed batch; -1: there is none.
DTYPE_INLINE int row_at(const struct batch_view *b, int s, int position)
{
    while (s >= 0 && position < b->first_position[s]) s = b->parent[s];
    return s >= 0 && position >= 0 ? b->query_start[s] + position - b->first_position[s] : -1;
}

// The row that stands `back` rows before row r of it; -1: there is none.
DTYPE_INLINE int row_before(const struct batch_view *b, int r, int back)
{
    const int s = b->seq_of[r];
    return row_at(b, s, b->first_position[s] + r - b->query_start[s] - back);
}

// Value heads of a key head.
DTYPE_INLINE int heads_each(const struct delta_shape *s)
{
    return s->n_heads / s->n_key_heads;
}

// Where the query, key and value of a value head begin in a row as the convolution gives it.
struct delta_columns {
    int q, k, v;
};
DTYPE_INLINE struct delta_columns delta_columns_of(const struct delta_shape *s, bool is_scan,
                                                   int head)
{
    const int keys = delta_key_width(s), values = delta_value_width(s);
    const int before = head / heads_each(s) * s->key_dim;
    struct delta_columns c;
    c.q = before + (is_scan ? values + keys : 0);
    c.k = before + (is_scan ? values : keys);
    c.v = head * s->head_dim + (is_scan ? 0 : 2 * keys);
    return c;
}

// Of a value head: S at the border, and of the open chunk's rows what the rows behind them need: k
// (CHUNK, key_dim), u (CHUNK, head_dim), what the row added to S, and G (CHUNK), the sum of the log
// decays from the chunk's first row on.
struct delta_state {
    float *k, *S, *u, *G;
};

// In a key head's state (ops.h, delta_state_elements) that of its value head `index`.
DTYPE_INLINE struct delta_state delta_state_of(float *group, const struct delta_shape *s, int index)
{
    struct delta_state st;
    st.k = group;
    st.S = group + DELTA_CHUNK * s->key_dim + index * delta_head_elements(s);
    st.u = st.S + s->key_dim * s->head_dim;
    st.G = st.u + DELTA_CHUNK * s->head_dim;
    return st;
}

#endif
