/* adjust.c: see adjust.h. The engine's thread, but for logit_list_init() (the submitter's).
 *
 * A row's list goes to the device as a whole each time. It holds each token of prompt and
 * completion once: a few thousand entries of 16 bytes beside a pass over all weights. Drafts before
 * the row are counted in the copy only, since they may be refused. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/adjust.h"
#include <stdlib.h>
#include <string.h>

// ---- lists -------------------------------------------------------------------------------------

static int by_token(const void *a, const void *b)
{
    const int32_t x = ((const struct logit_entry *)a)->token;
    const int32_t y = ((const struct logit_entry *)b)->token;
    return (x > y) - (x < y);
}

// Sorts the entries and leaves one for each token.
static void merge_entries(struct logit_list *l)
{
    int n = 0;
    qsort(l->at, (size_t)l->n, sizeof *l->at, by_token);
    for (int i = 0; i < l->n; i++) {
        if (n > 0 && l->at[n - 1].token == l->at[i].token) {
            l->at[n - 1].seen |= l->at[i].seen;
            l->at[n - 1].bias += l->at[i].bias;
        } else {
            l->at[n++] = l->at[i];
        }
    }
    l->n = n;
}

enum status logit_list_init(const struct sampling *s, const int32_t *prompt, int n_prompt,
                            struct logit_list *ret)
{
    const int n_seen = sampling_repeats(s) ? n_prompt : 0;
    struct logit_list l = {.cap =
                               n_seen + s->n_logit_bias + (sampling_counts(s) ? s->max_tokens : 0)};
    l.at = malloc((size_t)(l.cap + 1) * sizeof *l.at);
    if (!l.at) return status_fail(ST_NO_MEMORY, "no memory for the penalties of %d tokens", l.cap);
    for (int i = 0; i < n_seen; i++)
        l.at[l.n++] = (struct logit_entry){.token = prompt[i], .seen = 1};
    for (int i = 0; i < s->n_logit_bias; i++)
        l.at[l.n++] =
            (struct logit_entry){.token = s->logit_bias[i].token, .bias = s->logit_bias[i].bias};
    merge_entries(&l);
    *ret = l;
    return ST_OK;
}

void logit_list_release(struct logit_list *l)
{
    free(l->at);
    *l = (struct logit_list){0};
}

// One more of `token` among n entries, which have room for one; returns how many there are then.
static int count_token(struct logit_entry *entries, int n, int32_t token)
{
    int i = 0;
    while (i < n && entries[i].token != token) i++;
    if (i == n) entries[n++] = (struct logit_entry){.token = token};
    entries[i].seen = 1;
    entries[i].count++;
    return n;
}

void logit_list_count(struct logit_list *l, const struct sampling *s, const int32_t *generated,
                      int n)
{
    if (!sampling_counts(s)) return;
    for (; l->n_counted < n; l->n_counted++)
        l->n = count_token(l->at, l->n, generated[l->n_counted]);
}

// ---- rows --------------------------------------------------------------------------------------

static void release_entries(struct adjuster *a)
{
    device_release(a->dev, a->entries);
    device_release(a->dev, a->saved);
    device_host_release(a->dev, a->host_entries);
    a->entries = a->host_entries = NULL;
    a->saved = NULL;
    a->cap_entries = 0;
}

void adjuster_release(struct adjuster *a)
{
    if (!a->dev) return;
    release_entries(a);
    device_release(a->dev, a->rows);
    device_host_release(a->dev, a->host_rows);
    device_release(a->dev, a->masks);
    device_host_release(a->dev, a->host_masks);
    free(a->wanted);
}

static enum status reserve(struct adjuster *a, int n)
{
    enum status st = ST_OK;
    const size_t rows = (size_t)a->max_rows * sizeof *a->rows;
    if (!a->rows) CHECK(device_alloc(a->dev, rows, (void **)&a->rows));
    if (!a->host_rows) CHECK(device_host_alloc(a->dev, rows, (void **)&a->host_rows));
    if (n <= a->cap_entries) return ST_OK;
    struct logit_entry *held = NULL; // the rows before this one
    const size_t cap = (size_t)n + (size_t)n / 2;
    CHECK(device_host_alloc(a->dev, cap * sizeof *held, (void **)&held));
    if (a->n_entries > 0) memcpy(held, a->host_entries, (size_t)a->n_entries * sizeof *held);
    release_entries(a);
    a->host_entries = held;
    CHECK(device_alloc(a->dev, cap * sizeof *a->entries, (void **)&a->entries));
    CHECK(device_alloc(a->dev, cap * sizeof *a->saved, (void **)&a->saved));
    a->cap_entries = (int)cap;
out:
    return st;
}

// Room for n masks; what is on the device comes there as a whole, later.
static enum status reserve_masks(struct adjuster *a, int n)
{
    enum status st = ST_OK;
    const size_t words = MASK_WORDS((size_t)a->vocab) * sizeof *a->masks,
                 rows = (size_t)a->max_rows, cap = 2 * (size_t)n;
    if (!a->wanted) a->wanted = malloc(rows * sizeof *a->wanted);
    if (!a->wanted) return status_fail(ST_NO_MEMORY, "no memory for masks");
    if (!a->host_masks) CHECK(device_host_alloc(a->dev, rows * words, (void **)&a->host_masks));
    if (n <= a->cap_masked) return ST_OK;
    device_release(a->dev, a->masks);
    a->masks = NULL;
    a->cap_masked = 0;
    CHECK(device_alloc(a->dev, cap * words, (void **)&a->masks));
    a->cap_masked = (int)cap;
out:
    return st;
}

static enum status add_mask(struct adjuster *a, const struct adjustment *adjustment)
{
    const enum status st = reserve_masks(a, a->n_masked + 1);
    if (st != ST_OK) return st;
    a->wanted[a->n_masked++] =
        (struct constraint_row){adjustment->constraint, adjustment->state, -1};
    return ST_OK;
}

enum status adjuster_begin_masks(struct adjuster *a, struct masks_ahead *masks,
                                 const struct constraint_row *rows, int n,
                                 const struct sample_result *results, struct masks_job **ret)
{
    const enum status st = reserve_masks(a, n);
    if (st != ST_OK) return st;
    a->n_made = n;
    *ret = a->coming = masks_ahead_begin(masks, rows, n, results, a->host_masks);
    return ST_OK;
}

void adjuster_begin(struct adjuster *a)
{
    a->n_rows = a->n_entries = 0;
    a->n_masked = a->n_made;
}

enum status adjuster_finish(struct adjuster *a)
{
    const int first = a->n_made;
    a->n_made = 0;
    if (a->n_masked == first) return ST_OK;
    return masks_make(a->wanted + first, a->n_masked - first,
                      a->host_masks + (size_t)first * MASK_WORDS((size_t)a->vocab));
}

enum status adjuster_add(struct adjuster *a, int row, const struct sampling *s,
                         const struct adjustment *adjustment)
{
    static const struct logit_list empty = {0};
    const struct logit_list *list = adjustment->list ? adjustment->list : &empty;
    const int n_ahead = sampling_counts(s) ? adjustment->n_ahead : 0;
    enum status st = adjustment->constraint && !adjustment->made ? add_mask(a, adjustment) : ST_OK;
    if (st != ST_OK || list->n + n_ahead == 0) return st; // nothing was generated yet
    st = reserve(a, a->n_entries + list->n + n_ahead);
    if (st != ST_OK) return st;
    struct logit_entry *entries = a->host_entries + a->n_entries;
    int n = list->n;
    if (n > 0) memcpy(entries, list->at, (size_t)n * sizeof *entries);
    for (int i = 0; i < n_ahead; i++) n = count_token(entries, n, adjustment->ahead[i]);
    a->host_rows[a->n_rows++] =
        (struct logit_row){.row = row,
                           .first = a->n_entries,
                           .n = n,
                           .repetition = sampling_repeats(s) ? s->repetition_penalty : 1,
                           .frequency = s->frequency_penalty,
                           .presence = s->presence_penalty};
    a->n_entries += n;
    return ST_OK;
}

static void adjust_rows(struct adjuster *a, float *logits, bool undo)
{
    device_ops(a->dev)->adjust_logits(a->dev, logits, a->saved, a->rows, a->entries, a->n_rows,
                                      a->vocab, undo);
}

void adjuster_apply(struct adjuster *a, float *logits)
{
    const size_t masks = (size_t)a->n_masked * MASK_WORDS((size_t)a->vocab) * sizeof *a->masks;
    if (a->n_rows > 0) {
        device_copy_in(a->dev, a->rows, a->host_rows, (size_t)a->n_rows * sizeof *a->rows);
        device_copy_in(a->dev, a->entries, a->host_entries,
                       (size_t)a->n_entries * sizeof *a->entries);
        adjust_rows(a, logits, false);
    }
    if (a->coming) device_call_beside(a->dev, masks_job_await, a->coming);
    a->coming = NULL;
    // the last step's masks are done with, as its tokens are there
    device_copy_in_beside(a->dev, a->masks, a->host_masks, masks);
}

void adjuster_undo(struct adjuster *a, float *logits)
{
    if (a->n_rows > 0) adjust_rows(a, logits, true);
}
