/* adapter_table.h: the adapters that a model's forward pass can compute with, in device memory: for
 * every adapted block of every layer whose factors are where. A batch's rows name them by index
 * (struct batch_seq), so that one batch has rows of several, and of none. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_ADAPTER_TABLE_H
#define COMMON_MODEL_ADAPTER_TABLE_H

#include "common/model/adapter.h"
#include "kernels/ops.h"

struct adapter_table;

// Room for max_adapters of ranks up to max_rank. base is borrowed, and need not be bound.
enum status adapter_table_new(struct device *dev, const struct weights *base, int max_adapters,
                              int max_rank, struct adapter_table **ret);
void adapter_table_free(struct adapter_table *t);
// Makes index `at` that adapter, which is bound and borrowed; NULL: nobody's. Waits.
enum status adapter_table_set(struct adapter_table *t, int at, const struct adapter *a);

// A digest of which blocks any of the adapters changes, 0 where there is none. A step captured with
// the table computes with what it holds at the time of a launch, but for the blocks that have no
// operation in it: it holds for tables of the same digest.
uint64_t adapter_table_sites(const struct adapter_table *t);

// Of the calls from now on; its matrix is each block's own. p 0: none, as in a new table.
void adapter_table_drop(struct adapter_table *t, const struct lora_dropout *dropout);
// The call for `rows` rows of a layer's block; false where no adapter changes it.
bool adapter_table_args(const struct adapter_table *t, enum tensor_role role, int layer, int rows,
                        const int32_t *adapter, struct lora_args *ret);

// Where the gradients of an adapter's factors for that block lie: grads is the plan of its arena in
// f32, bound. NULL pointers for parts that it leaves alone.
void adapter_grads(const struct adapter *a, const struct weights *grads, enum tensor_role role,
                   int layer, struct lora_grads ret[LORA_PARTS]);

#endif
