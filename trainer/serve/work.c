/* work.c: the queue from the loop's thread to the main thread. */
#include "trainer/serve/work.h"
#include "common/base/clock.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct work_queue {
    pthread_mutex_t lock;
    pthread_cond_t some;
    struct work *first, **last;
};

enum status work_queue_new(struct work_queue **ret)
{
    pthread_condattr_t monotonic;
    struct work_queue *q = calloc(1, sizeof *q);
    if (!q) return status_fail(ST_NO_MEMORY, "out of memory");
    q->last = &q->first;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->some, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *ret = q;
    return ST_OK;
}

void work_queue_free(struct work_queue *q)
{
    if (!q) return;
    pthread_cond_destroy(&q->some);
    pthread_mutex_destroy(&q->lock);
    free(q);
}

void work_put(struct work_queue *q, struct work *work)
{
    pthread_mutex_lock(&q->lock);
    struct work **place = q->last;
    for (struct work *w = work->group ? q->first : NULL; w; w = w->next)
        if (w->group && strcmp(w->group, work->group) == 0) place = &w->next;
    work->next = *place;
    *place = work;
    if (!work->next) q->last = &work->next;
    pthread_cond_signal(&q->some);
    pthread_mutex_unlock(&q->lock);
}

struct work *work_take(struct work_queue *q, int ms)
{
    const int64_t until = clock_deadline_ns(ms);
    const struct timespec ts = {.tv_sec = until / NS_PER_S, .tv_nsec = until % NS_PER_S};
    pthread_mutex_lock(&q->lock);
    while (!q->first && clock_now_ns() < until) pthread_cond_timedwait(&q->some, &q->lock, &ts);
    struct work *work = q->first;
    if (work) q->first = work->next;
    if (!q->first) q->last = &q->first;
    pthread_mutex_unlock(&q->lock);
    return work;
}
