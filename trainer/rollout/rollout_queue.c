/* rollout_queue.c: a ring of steps under one mutex, in order from `first` on. Each goes through the
 * states of enum rollout_state, and whichever thread is free takes the first work there is. A step
 * that is worked on is that thread's alone, without the mutex. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/rollout_queue.h"
#include "common/base/clock.h"

#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>

struct rollout_queue {
    int length;
    struct rollout_work work;
    pthread_t *threads; // (n_threads) with length > 1
    int n_threads;
    _Atomic bool cancelled;
    pthread_mutex_t lock; // guards the rest
    pthread_cond_t changed;
    struct rollout_step **steps; // (length)
    int first, n;
    int n_working, n_sampling; // threads
    bool scoring, paused;
    int64_t idle_ns; // since when nothing is sampled; 0: nothing ever was
};

static struct rollout_step *step_at(const struct rollout_queue *q, int i)
{
    return q->steps[(q->first + i) % q->length];
}

// The first step to be sampled, or to be scored now that all before it are; NULL: there is none.
static struct rollout_step *next_work(const struct rollout_queue *q)
{
    bool in_turn = !q->scoring;
    for (int i = 0; i < q->n; i++) {
        struct rollout_step *s = step_at(q, i);
        if (s->result.code != ST_OK) return NULL;
        if (s->state == ROLLOUT_ORDERED || (s->state == ROLLOUT_SAMPLED && in_turn)) return s;
        in_turn = in_turn && s->state == ROLLOUT_SCORED;
    }
    return NULL;
}

// Samples or scores a step, with the mutex held but for the work itself.
static void work(struct rollout_queue *q, struct rollout_step *s)
{
    const bool sample = s->state == ROLLOUT_ORDERED;
    if (!sample) {
        q->scoring = true;
    } else {
        if (q->n_sampling++ == 0 && q->idle_ns) s->idle_s += clock_ms_since(q->idle_ns) / 1e3;
        s->state = ROLLOUT_BEING_SAMPLED;
    }
    q->n_working++;
    pthread_mutex_unlock(&q->lock);
    enum status st = (sample ? q->work.sample : q->work.score)(q->work.context, s);
    pthread_mutex_lock(&q->lock);
    q->n_working--;
    if (!sample)
        q->scoring = false;
    else if (--q->n_sampling == 0)
        q->idle_ns = clock_now_ns();
    status_keep(&s->result, st);
    if (st == ST_OK) s->state = sample ? ROLLOUT_SAMPLED : ROLLOUT_SCORED;
    pthread_cond_broadcast(&q->changed);
}

static void *work_ahead(void *context)
{
    struct rollout_queue *q = context;
    pthread_mutex_lock(&q->lock);
    while (!q->cancelled) {
        struct rollout_step *step = q->paused ? NULL : next_work(q);
        if (step)
            work(q, step);
        else
            pthread_cond_wait(&q->changed, &q->lock);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

enum status rollout_queue_new(int length, const struct rollout_work *work,
                              struct rollout_queue **ret)
{
    enum status st = ST_OK;
    struct rollout_queue *q = calloc(1, sizeof *q);
    if (!q) return status_fail(ST_NO_MEMORY, "no memory for a queue of %d steps", length);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->changed, NULL);
    q->length = length;
    q->work = *work;
    q->steps = calloc((size_t)length, sizeof(struct rollout_step *));
    q->threads = calloc((size_t)length, sizeof *q->threads);
    if (!q->steps || !q->threads) FAIL(ST_NO_MEMORY, "no memory for a queue of %d steps", length);
    for (; length > 1 && q->n_threads < length; q->n_threads++)
        if (pthread_create(&q->threads[q->n_threads], NULL, work_ahead, q) != 0)
            FAIL(ST_IO, "a thread that pulls rollouts cannot be started");
    *ret = q;
out:
    if (st != ST_OK) rollout_queue_free(q);
    return st;
}

void rollout_queue_free(struct rollout_queue *q)
{
    if (!q) return;
    pthread_mutex_lock(&q->lock);
    q->cancelled = true;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
    for (int i = 0; i < q->n_threads; i++) pthread_join(q->threads[i], NULL);
    for (int i = 0; i < q->n; i++) rollout_step_free(step_at(q, i));
    pthread_cond_destroy(&q->changed);
    pthread_mutex_destroy(&q->lock);
    free(q->threads);
    free(q->steps);
    free(q);
}

const _Atomic bool *rollout_queue_cancelled(const struct rollout_queue *q)
{
    return &q->cancelled;
}

enum status rollout_queue_put(struct rollout_queue *q, struct rollout_step *step, bool first)
{
    if (q->n == q->length)
        return status_fail(ST_BUSY, "%d steps are ordered and not taken, which is all that fit",
                           q->n);
    pthread_mutex_lock(&q->lock);
    q->n++;
    if (first) q->first = (q->first + q->length - 1) % q->length;
    q->steps[(q->first + (first ? 0 : q->n - 1)) % q->length] = step;
    step->state = ROLLOUT_ORDERED;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
    return ST_OK;
}

int rollout_queue_count(const struct rollout_queue *q)
{
    return q->n; // only the caller changes it
}

bool rollout_queue_failed(struct rollout_queue *q)
{
    bool failed = false;
    pthread_mutex_lock(&q->lock);
    for (int i = 0; i < q->n; i++) failed |= step_at(q, i)->result.code != ST_OK;
    pthread_mutex_unlock(&q->lock);
    return failed;
}

enum status rollout_queue_take(struct rollout_queue *q, struct rollout_step **ret)
{
    if (q->n == 0) return status_fail(ST_INVALID, "no step of rollouts was ordered");
    pthread_mutex_lock(&q->lock);
    struct rollout_step *step = step_at(q, 0);
    while (step->state != ROLLOUT_SCORED && step->result.code == ST_OK) {
        if (q->n_threads > 0)
            pthread_cond_wait(&q->changed, &q->lock);
        else
            work(q, step);
    }
    const enum status st = step->result.code;
    if (st == ST_OK) {
        *ret = step;
        q->first = (q->first + 1) % q->length;
        q->n--;
    }
    pthread_mutex_unlock(&q->lock);
    return st == ST_OK ? ST_OK : status_recall(&step->result);
}

// ---- with a budget ------------------------------------------------------------------------------

#define GATHER_MS 5 // between looks at what is whole

struct candidate { // a group that no step has
    struct rollout_step *order;
    int group;
};

static int list_candidates(const struct rollout_queue *q, struct candidate *ret)
{
    int n = 0;
    for (int i = 0; i < q->n; i++) {
        struct rollout_step *s = step_at(q, i);
        for (int g = 0; g < s->rollout->n_groups; g++)
            if (!s->rollout->gathered[g]) ret[n++] = (struct candidate){s, g};
    }
    return n;
}

// The work that failed first in the queue's order, and ends it.
static enum status failure(struct rollout_queue *q)
{
    const struct rollout_step *failed = NULL;
    pthread_mutex_lock(&q->lock);
    for (int i = 0; i < q->n && !failed; i++)
        if (step_at(q, i)->result.code != ST_OK) failed = step_at(q, i);
    pthread_mutex_unlock(&q->lock);
    return failed ? status_recall(&failed->result) : ST_OK;
}

// Whether the step can close; ret: the first `wanted` candidates that are whole.
static bool closes(const struct rollout_budget *budget, int64_t step, const struct candidate *c,
                   const double *whole, int n, int wanted, int *ret)
{
    int n_chosen = 0, in_turn = 0;
    for (int i = 0; i < n; i++) {
        if (whole[i] == 0 && c[i].order->step + budget->carried <= step) return false;
        in_turn += i < wanted && whole[i] > 0;
        if (whole[i] > 0 && n_chosen < wanted) ret[n_chosen++] = i;
    }
    return n_chosen == wanted && in_turn >= budget->enough;
}

static bool is_empty(const struct rollout_step *s)
{
    for (int g = 0; g < s->rollout->n_groups; g++)
        if (!s->rollout->gathered[g]) return false;
    return true;
}

// What is left of an order of which all groups were gathered, once its thread has let go of it.
static enum status end_orders(struct rollout_queue *q, struct rollout_step *into)
{
    while (q->n > 0 && is_empty(step_at(q, 0))) {
        struct rollout_step *s = NULL;
        enum status st = rollout_queue_take(q, &s);
        if (st != ST_OK) return st;
        for (int i = 0; i < s->counts.n; i++) {
            const struct source_count *from = &s->counts.items[i];
            struct source_count *to = source_count(&into->counts, "%s", from->key);
            to->sum += from->sum;
            to->of += from->of;
        }
        into->rollout->seconds += s->rollout->seconds;
        into->idle_s += s->idle_s;
        rollout_step_free(s);
    }
    return ST_OK;
}

enum status rollout_queue_gather(struct rollout_queue *q, const struct rollout_budget *budget,
                                 struct comm *comm, struct rollout_step *into)
{
    const int wanted = into->rollout->n_groups;
    const size_t max = (size_t)q->length * (size_t)wanted;
    struct candidate *candidates = calloc(max, sizeof *candidates);
    double *whole = calloc(max, sizeof *whole);
    int *chosen = calloc((size_t)wanted, sizeof *chosen);
    enum status st = ST_OK;
    if (!candidates || !whole || !chosen) FAIL(ST_NO_MEMORY, "no memory to gather a step");
    const int n = list_candidates(q, candidates);
    if (n < wanted) FAIL(ST_INVALID, "%d groups are ordered for a step of %d", n, wanted);
    for (;;) {
        CHECK(failure(q));
        for (int i = 0; i < n; i++)
            whole[i] = candidates[i].order->rollout->whole[candidates[i].group];
        CHECK(comm_sum_host(comm, whole, n));
        if (closes(budget, into->step, candidates, whole, n, wanted, chosen)) break;
        clock_sleep_ms(GATHER_MS);
    }
    for (int g = 0; g < wanted; g++) {
        const struct candidate *c = &candidates[chosen[g]];
        rollout_gather(into->rollout, g, c->order->rollout, c->group);
        into->n_carried += c->order->step < into->step;
    }
    CHECK(end_orders(q, into));
out:
    free(candidates);
    free(whole);
    free(chosen);
    return st;
}

json_t *rollout_queue_gathered(const struct rollout_queue *q)
{
    json_t *orders = json_array();
    for (int i = 0; i < q->n; i++) {
        const struct rollout *r = step_at(q, i)->rollout;
        json_t *groups = json_array();
        for (int g = 0; g < r->n_groups; g++)
            if (r->gathered[g]) json_array_append_new(groups, json_integer(g));
        json_array_append_new(orders, groups);
    }
    return json_pack("{s:I, s:o}", "first", (json_int_t)(q->n > 0 ? step_at(q, 0)->step : 0),
                     "groups", orders);
}

void rollout_queue_pause(struct rollout_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->paused = true;
    while (q->n_working > 0) pthread_cond_wait(&q->changed, &q->lock);
    pthread_mutex_unlock(&q->lock);
}

void rollout_queue_resume(struct rollout_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->paused = false;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
}
