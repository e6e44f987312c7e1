/* adjust.h: penalties, logit_bias and constraints. A sample that has some keeps a list of the
 * tokens whose logits they change, with how often each was generated; before a row is sampled its
 * list goes to the device (ops.h, adjust_logits), and afterwards the logits are put back, so that
 * raw log-probabilities can be read; the mask of its constraint is sampled with. Requests without
 * any have empty lists, and cost nothing. The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_ADJUST_H
#define INFER_SERVER_ADJUST_H

#include "infer-server/engine/engine_info.h"
#include "infer-server/engine/masks_ahead.h"
#include "kernels/ops.h"

struct logit_list {         // of one sample; all zero: nothing is adjusted
    struct logit_entry *at; // (cap)
    int n, cap;
    int n_counted; // of its generated tokens, these are counted
};

// The prompt's tokens and the biases; room for whatever is generated.
enum status logit_list_init(const struct sampling *s, const int32_t *prompt, int n_prompt,
                            struct logit_list *ret);
void logit_list_release(struct logit_list *l);
// Counts those of the n generated tokens that are not counted yet.
void logit_list_count(struct logit_list *l, const struct sampling *s, const int32_t *generated,
                      int n);

struct adjustment {                // of one row that is to be sampled
    const struct logit_list *list; // NULL: none
    const int32_t *ahead;          // drafts before the row, which count as generated
    int n_ahead;
    struct constraint *constraint; // what may come; NULL: anything
    int state;                     // of it, before the row
    int made; // 1 and which of adjuster_begin_masks()'s is the row's; 0: it is to be made
};
static inline bool adjustment_is_any(const struct adjustment *a)
{
    return a->list || a->constraint;
}

// Carries a step's adjusted rows to the device, in buffers that grow with the longest step so far:
// a request without penalties or a constraint never has any.
struct adjuster { // but for the first line all zero at first
    struct device *dev;
    int max_rows, vocab;
    int n_rows, n_entries;                      // of the present step
    struct logit_row *rows, *host_rows;         // (max_rows), once wanted
    struct logit_entry *entries, *host_entries; // (cap_entries)
    float *saved;                               // (cap_entries)
    int cap_entries;
    int n_masked, n_made;          // masks of the present step, or made for the next one to begin
    struct constraint_row *wanted; // (max_rows) of which constraint
    uint32_t *masks, *host_masks;  // (cap_masked), (max_rows) MASK_WORDS(vocab) each
    int cap_masked;
    struct masks_job *coming; // makes those n_made; NULL: none is on its way
};
void adjuster_release(struct adjuster *a);

// Begins with n masks of the step that is adjusted next (masks_ahead.h); the device waits for them
// where they are applied. *ret is to be finished behind that step.
enum status adjuster_begin_masks(struct adjuster *a, struct masks_ahead *masks,
                                 const struct constraint_row *rows, int n,
                                 const struct sample_result *results,
                                 struct masks_job **ret); // ST_NO_MEMORY
// Row by row what is to be sampled next: adjuster_begin(), adjuster_add() of those that are
// adjusted, then the whole: adjuster_finish() makes the masks.
void adjuster_begin(struct adjuster *a);
enum status adjuster_add(struct adjuster *a, int row, const struct sampling *s,
                         const struct adjustment *adjustment); // ST_NO_MEMORY
enum status adjuster_finish(struct adjuster *a);               // ST_NO_MEMORY
// The masks are those that were made, and then those rows' that have another, in their order:
// `masks`, once they are applied.
// Enqueues the adjustment of logits (max_rows, vocab), and its way back, where rows were added.
void adjuster_apply(struct adjuster *a, float *logits);
void adjuster_undo(struct adjuster *a, float *logits);

#endif
