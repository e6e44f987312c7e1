/* batch.h: builds a batch_view: host lists first, then one copy to fixed device memory, so that the
 * view's pointers never change between steps and captured work stays valid. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_BATCH_H
#define COMMON_MODEL_BATCH_H

#include "kernels/batch_view.h"
#include "kernels/device.h"

struct batch; // opaque

// What a sequence has beside its tokens: whose adapter it is computed with (model.h); and, paged,
// the slots of the pool's states (batch_view.h) with which it begins and in which it leaves its
// own. -1: none.
struct batch_seq {
    int adapter, state_from, state_slot;
};
static const struct batch_seq batch_plain = {-1, -1, -1};

// Room for max_tokens rows, max_seqs sequences, max_blocks block-table entries a sequence (0:
// packed batches only), and max_rows wanted rows.
enum status batch_new(struct device *dev, int max_tokens, int max_seqs, int max_blocks,
                      int max_rows, struct batch **ret);
// Device memory that batch_new() takes.
size_t batch_bytes(int max_tokens, int max_seqs, int max_blocks, int max_rows);
void batch_free(struct batch *b);
void batch_clear(struct batch *b);

// Paged: appends n tokens at positions first_position.. of a sequence whose block table is given
// (block numbers covering first_position + n positions). One that attends to rows of another of
// this batch goes on in the same blocks where the one before it ends. ST_INVALID when there is no
// room.
enum status batch_add_paged(struct batch *b, const int32_t *tokens, int n, int first_position,
                            const int32_t *blocks, int n_blocks, int block_size,
                            struct batch_seq seq);
// Packed: appends n tokens; parent is the index of an earlier sequence of this batch behind all of
// whose rows these go on (-1: none). Trees come depth first: nothing but what goes on behind the
// parent may lie after it. adapter: as in batch_seq. ret_seq may be NULL.
enum status batch_add_packed(struct batch *b, const int32_t *tokens, int n, int parent, int adapter,
                             int *ret_seq);
// Asks for the logits of a row (0..T-1). Rows may repeat (one prompt row, several first tokens).
enum status batch_want_row(struct batch *b, int row);

// Every sequence is paged and has one row.
bool batch_decodes(const struct batch *b);

// Copies to the device; nothing may be added until batch_clear(). A batch that decodes is padded to
// pad_seqs sequences and pad_rows wanted rows where it has fewer (0: no padding).
enum status batch_commit(struct batch *b, int pad_seqs, int pad_rows);

// A committed batch as bytes, for another process; and those bytes as what a batch of the same room
// holds, committed. ST_FORMAT where they are of another room.
struct bytes;
enum status batch_write(const struct batch *b, struct bytes *to);
enum status batch_read(struct batch *b, const void *data, size_t n);

const struct batch_view *batch_view(const struct batch *b);
int batch_tokens(const struct batch *b); // T without padding
int batch_rows(const struct batch *b);   // wanted rows, padding included after commit
const int32_t *batch_rows_device(const struct batch *b); // (batch_rows) i32, device
// (batch_rows) i32, device: 0.. sorted by row, for scatter_add_rows; and the same for the tokens
const int32_t *batch_rows_order(const struct batch *b);
const int32_t *batch_tokens_order(const struct batch *b);

#endif
