/* rollout_queue.c: a ring of steps under one mutex. Those from `first` on are put and not taken;
 * the first of these that is not filled is the next to be worked on. A step that is worked on is
 * the worker's alone, without the mutex. */
#include "trainer/rollout/rollout_queue.h"
#include "common/base/clock.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct rollout_queue {
    int length;
    rollout_work_fn work;
    void *context;
    pthread_t thread; // where length > 1
    bool started;
    _Atomic bool cancelled;
    pthread_mutex_t lock; // guards the rest
    pthread_cond_t changed;
    struct rollout_step **steps; // (length)
    int first, n;
    bool working, paused;
    int64_t idle_ns;    // when the last work ended; 0: there was none
    enum status status; // of the first step that is not filled
    char *sentence;     // of that failure
};

void rollout_step_free(struct rollout_step *step)
{
    if (!step) return;
    rollout_free(step->rollout);
    scores_release(&step->scores);
    free(step);
}

static struct rollout_step *step_at(const struct rollout_queue *q, int i)
{
    return q->steps[(q->first + i) % q->length];
}

// The first that is not filled; NULL: all are.
static struct rollout_step *to_fill(const struct rollout_queue *q)
{
    for (int i = 0; i < q->n; i++)
        if (!step_at(q, i)->filled) return step_at(q, i);
    return NULL;
}

// Fills a step, with the mutex held but for the work itself.
static void work(struct rollout_queue *q, struct rollout_step *step)
{
    if (q->idle_ns) step->idle_s += clock_ms_since(q->idle_ns) / 1e3;
    q->working = true;
    pthread_mutex_unlock(&q->lock);
    enum status st = q->work(q->context, step);
    pthread_mutex_lock(&q->lock);
    q->working = false;
    q->idle_ns = clock_now_ns();
    q->status = st;
    step->filled = st == ST_OK;
    if (st != ST_OK) q->sentence = strdup(status_message());
    pthread_cond_broadcast(&q->changed);
}

static void *work_ahead(void *context)
{
    struct rollout_queue *q = context;
    pthread_mutex_lock(&q->lock);
    while (!q->cancelled && q->status == ST_OK) {
        struct rollout_step *step = q->paused ? NULL : to_fill(q);
        if (step)
            work(q, step);
        else
            pthread_cond_wait(&q->changed, &q->lock);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

enum status rollout_queue_new(int length, rollout_work_fn work_fn, void *context,
                              struct rollout_queue **ret)
{
    struct rollout_queue *q = calloc(1, sizeof *q);
    if (!q || !(q->steps = calloc((size_t)length, sizeof(struct rollout_step *)))) {
        free(q);
        return status_fail(ST_NO_MEMORY, "no memory for a queue of %d steps", length);
    }
    q->length = length;
    q->work = work_fn;
    q->context = context;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->changed, NULL);
    q->started = length > 1 && pthread_create(&q->thread, NULL, work_ahead, q) == 0;
    if (length > 1 && !q->started) {
        rollout_queue_free(q);
        return status_fail(ST_IO, "the thread that pulls rollouts cannot be started");
    }
    *ret = q;
    return ST_OK;
}

void rollout_queue_free(struct rollout_queue *q)
{
    if (!q) return;
    pthread_mutex_lock(&q->lock);
    q->cancelled = true;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
    if (q->started) pthread_join(q->thread, NULL);
    for (int i = 0; i < q->n; i++) rollout_step_free(step_at(q, i));
    pthread_cond_destroy(&q->changed);
    pthread_mutex_destroy(&q->lock);
    free(q->steps);
    free(q->sentence);
    free(q);
}

const _Atomic bool *rollout_queue_cancelled(const struct rollout_queue *q)
{
    return &q->cancelled;
}

static enum status put(struct rollout_queue *q, struct rollout_step *step, bool first)
{
    if (q->n == q->length)
        return status_fail(ST_BUSY, "%d steps are ordered and not taken, which is all that fit",
                           q->n);
    pthread_mutex_lock(&q->lock);
    q->n++;
    if (first) q->first = (q->first + q->length - 1) % q->length;
    q->steps[(q->first + (first ? 0 : q->n - 1)) % q->length] = step;
    step->filled = false;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
    return ST_OK;
}

enum status rollout_queue_put(struct rollout_queue *q, struct rollout_step *step)
{
    return put(q, step, false);
}

enum status rollout_queue_put_back(struct rollout_queue *q, struct rollout_step *step)
{
    return put(q, step, true);
}

int rollout_queue_count(const struct rollout_queue *q)
{
    return q->n; // only the caller changes it
}

enum status rollout_queue_take(struct rollout_queue *q, struct rollout_step **ret)
{
    if (q->n == 0) return status_fail(ST_INVALID, "no step of rollouts was ordered");
    pthread_mutex_lock(&q->lock);
    struct rollout_step *step = step_at(q, 0);
    while (!step->filled && q->status == ST_OK) {
        if (q->started)
            pthread_cond_wait(&q->changed, &q->lock);
        else
            work(q, step);
    }
    enum status st = step->filled ? ST_OK : q->status;
    if (st == ST_OK) {
        *ret = step;
        q->first = (q->first + 1) % q->length;
        q->n--;
    } else {
        status_fail(st, "%s", q->sentence ? q->sentence : status_words(st));
    }
    pthread_mutex_unlock(&q->lock);
    return st;
}

void rollout_queue_pause(struct rollout_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->paused = true;
    while (q->working) pthread_cond_wait(&q->changed, &q->lock);
    pthread_mutex_unlock(&q->lock);
}

void rollout_queue_resume(struct rollout_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->paused = false;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
}
