/* source.c: what the sources of samples have in common: orders and counts. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/source.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void rollout_step_free(struct rollout_step *step)
{
    if (!step) return;
    rollout_free(step->rollout);
    scores_release(&step->scores);
    free(step->logprobs);
    free(step);
}

struct source_count *source_count(struct source_counts *counts, const char *key, ...)
{
    struct source_count *next = &counts->items[counts->n];
    va_list args;
    va_start(args, key);
    vsnprintf(next->key, sizeof next->key, key, args);
    va_end(args);
    for (struct source_count *c = counts->items; c < next; c++)
        if (strcmp(c->key, next->key) == 0) return c;
    next->sum = next->of = 0;
    if (counts->n < SOURCE_COUNTS - 1) counts->n++;
    return next;
}

enum status source_counts_sum(struct source_counts *counts, struct comm *comm)
{
    double sums[2 * SOURCE_COUNTS];
    for (int i = 0; i < counts->n; i++) {
        sums[2 * i] = counts->items[i].sum;
        sums[2 * i + 1] = counts->items[i].of;
    }
    enum status st = comm_sum_host(comm, sums, 2 * counts->n);
    for (int i = 0; st == ST_OK && i < counts->n; i++) {
        counts->items[i].sum = sums[2 * i];
        counts->items[i].of = sums[2 * i + 1];
    }
    return st;
}

// Who pulls is the first that can; who orders and polls the source that they all stand on.
enum status source_sample(struct source *source, struct rollout_step *step)
{
    step->again = false;
    step->puller = NULL;
    for (; source->on; source = source->on)
        if (!step->puller && !(source->own_prompts && step->evaluation)) step->puller = source;
    const enum status st = source->order(source, step);
    return st == ST_OK ? source->poll(source, step) : st;
}

struct source *source_that_settles(struct source *source)
{
    while (source && !source->settle) source = source->on;
    return source;
}

void source_close(struct source *source)
{
    while (source) {
        struct source *on = source->on;
        if (source->close)
            source->close(source);
        else
            free(source);
        source = on;
    }
}
