/* rollout_queue.c: a ring of steps under one mutex, in order from `first` on. Each goes through the
 * states of enum rollout_state, and whichever thread is free takes the first work there is. A step
 * that is worked on is that thread's alone, without the mutex. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/rollout_queue.h"
#include "common/base/clock.h"

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
