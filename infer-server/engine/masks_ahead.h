/* masks_ahead.h: the masks of a step that is launched before the tokens of the step before it are
 * there, on a thread of its own: it waits for these, follows the constraints over them and makes
 * the masks, which the device waits for.
 *
 * The engine's thread calls, but for masks_job_await() (the device's). */
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
struct masks_job; // one step's masks
// Jobs of at most max_rows rows. ST_NO_MEMORY, ST_IO: no thread.
enum status masks_ahead_new(int max_rows, struct masks_ahead **ret);
void masks_ahead_free(struct masks_ahead *m); // every job is finished

// Begins with the masks of n rows, into ret as masks_make() has it; at most one other job is not
// finished, whose results are there, and may be overwritten from here on. A row's token is the row
// of `results` whose token comes before the mask, or -1: there is none to come. Results and ret are
// borrowed, and the constraints held, until it is finished. Tokens of results that have not come
// are MASKS_AHEAD_NO_TOKEN.
struct masks_job *masks_ahead_begin(struct masks_ahead *m, const struct constraint_row *rows, int n,
                                    const struct sample_result *results, uint32_t *ret);
// Returns when a struct masks_job's are made, or abandoned: for device_call_beside().
void masks_job_await(void *job);
// Waits for it, and it is over; all its results are there. Or, where they will not come: abandons
// it. ST_NO_MEMORY.
enum status masks_job_finish(struct masks_job *job, bool abandon);

#endif
