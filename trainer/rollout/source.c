/* source.c: what the sources of samples have in common: orders and counts; and the plainest of
 * them, `served`, whose servers sample by weights that nobody brings them. */
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
    free(step->sentence);
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
    enum status st;
    step->again = false;
    step->puller = NULL;
    for (; source->on; source = source->on)
        if (!step->puller && !(source->own_prompts && step->evaluation)) step->puller = source;
    CHECK(source->order(source, step));
    st = source->poll(source, step);
out:
    return st;
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
        source->close(source);
        source = on;
    }
}

// ---- served -------------------------------------------------------------------------------------

struct served {
    struct source source;
    const struct rollout_servers *servers;
};

enum status served_order(const struct rollout_servers *servers, struct rollout_step *step)
{
    enum status st = ST_OK;
    step->via = *servers;
    if (step->evaluation) step->via.n_servers = 1; // others' weights are those of a step before
    if (step->ahead) CHECK(http_client_another(servers->http, &step->http));
    if (step->ahead) step->via.http = step->http;
out:
    return st;
}

enum status served_poll(struct rollout_step *step)
{
    struct source *by = step->puller;
    enum status st =
        by ? by->pull(by, step) : rollout_pull(&step->via, &step->sampling, step->rollout);
    http_client_free(step->http);
    step->http = NULL;
    return st;
}

static enum status order_served(struct source *source, struct rollout_step *step)
{
    return served_order(((struct served *)source)->servers, step);
}

static enum status poll_served(struct source *source, struct rollout_step *step)
{
    (void)source;
    return served_poll(step);
}

static void close_served(struct source *source)
{
    free(source);
}

enum status served_new(const struct rollout_servers *servers, struct source **ret)
{
    struct served *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for a source of samples");
    s->source = (struct source){.order = order_served, .poll = poll_served, .close = close_served};
    s->servers = servers;
    *ret = &s->source;
    return ST_OK;
}
