/* masks_ahead.h: the masks of a step whose layers are being launched, on a thread of its own: it
 * waits for the tokens that the step before samples, follows the constraints over them and makes
 * the masks, while the engine's thread launches, and then delivers.
 *
 * The engine's thread calls. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_MASKS_AHEAD_H
#define INFER_SERVER_MASKS_AHEAD_H

#include "common/constraint/constraint.h"
#include "kernels/sampling.h"

#define MASKS_AHEAD_NO_TOKEN (-1) // of a result that has not come

// constraint_masks(), but for bounds that it goes beyond: nothing may come there then, which ends
// the sample, not the step, where its token is taken. ST_NO_MEMORY.
enum status masks_make(const struct constraint_row *rows, int n, uint32_t *ret);

struct masks_ahead;
enum status masks_ahead_new(struct masks_ahead **ret); // ST_NO_MEMORY, ST_IO: no thread
void masks_ahead_free(struct masks_ahead *m);          // nothing is begun

// Begins with the masks of n rows, into ret as masks_make() has it. A row's token is the row
// of `results` whose token comes before the mask, or -1: there is none to come. Rows (which it
// writes), results and ret are borrowed, and the constraints held, until it is finished. Tokens of
// results that have not come are MASKS_AHEAD_NO_TOKEN.
void masks_ahead_begin(struct masks_ahead *m, struct constraint_row *rows, int n,
                       const struct sample_result *results, uint32_t *ret);
// Waits for what was begun, if anything was; all results are there. Or, where they will not come:
// abandons it, and waits for that. ST_NO_MEMORY.
enum status masks_ahead_finish(struct masks_ahead *m, bool abandon);

#endif
