/* masks_ahead.c: see masks_ahead.h. The tokens come into pinned memory, where the thread looks for
 * them every few microseconds: it asks nothing of the device, whose calls would wait for the
 * engine's, which launches meanwhile. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/masks_ahead.h"
#include "common/base/spawn.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOOK_NS 20000

struct masks_job {
    struct masks_ahead *of;
    struct constraint_row *rows; // (max_rows)
    int n;
    const struct sample_result *results;
    uint32_t *masks;
    bool begun, taken;       // and not made; the tokens are
    int abandoned;           // atomic
    struct status_kept kept; // what came of it
};

struct masks_ahead {
    pthread_t thread;
    pthread_mutex_t lock; // of `ended`, and of jobs' `begun` and `taken`
    pthread_cond_t changed;
    bool running, ended; // ended: the thread is to end
    struct masks_job jobs[2];
    int next; // the job that begins next; the engine's
};

enum status masks_make(const struct constraint_row *rows, int n, uint32_t *ret)
{
    const enum status st = constraint_masks(rows, n, ret);
    return st == ST_TOO_LONG || st == ST_UNSUPPORTED ? ST_OK : st;
}

// False: they were abandoned.
static bool await_tokens(struct masks_job *job)
{
    const struct timespec pause = {0, LOOK_NS};
    for (int i = 0; i < job->n; i++) {
        if (job->rows[i].token < 0) continue;
        const int32_t *token = &job->results[job->rows[i].token].token;
        int32_t come;
        while ((come = __atomic_load_n(token, __ATOMIC_ACQUIRE)) == MASKS_AHEAD_NO_TOKEN) {
            if (__atomic_load_n(&job->abandoned, __ATOMIC_RELAXED)) return false;
            nanosleep(&pause, NULL);
        }
        job->rows[i].token = come;
    }
    return true;
}

static void make(struct masks_job *job)
{
    const bool come = await_tokens(job);
    job->kept.code = ST_OK;
    pthread_mutex_lock(&job->of->lock);
    job->taken = true;
    pthread_cond_broadcast(&job->of->changed);
    pthread_mutex_unlock(&job->of->lock);
    if (!come) return;
    const enum status st = masks_make(job->rows, job->n, job->masks);
    if (st != ST_OK) status_keep(&job->kept, st);
}

static void *work(void *context)
{
    struct masks_ahead *m = context;
    pthread_mutex_lock(&m->lock);
    for (int at = 0; !m->ended;) {
        struct masks_job *job = &m->jobs[at];
        if (!job->begun) {
            pthread_cond_wait(&m->changed, &m->lock);
            continue;
        }
        pthread_mutex_unlock(&m->lock);
        make(job);
        pthread_mutex_lock(&m->lock);
        job->begun = false;
        at = !at;
        pthread_cond_broadcast(&m->changed);
    }
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

enum status masks_ahead_new(int max_rows, struct masks_ahead **ret)
{
    enum status st = ST_OK;
    struct masks_ahead *m = calloc(1, sizeof *m);
    if (!m) return status_fail(ST_NO_MEMORY, "no memory for masks");
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->changed, NULL);
    for (int i = 0; i < 2; i++) {
        m->jobs[i].of = m;
        m->jobs[i].rows = malloc((size_t)max_rows * sizeof *m->jobs[i].rows);
        if (!m->jobs[i].rows) FAIL(ST_NO_MEMORY, "no memory for masks of %d rows", max_rows);
    }
    const int error = thread_start(&m->thread, work, m);
    if (error) FAIL(ST_IO, "no thread for masks: %s", strerror(error));
    m->running = true;
    *ret = m;
    return ST_OK;
out:
    masks_ahead_free(m);
    return st;
}

void masks_ahead_free(struct masks_ahead *m)
{
    if (!m) return;
    pthread_mutex_lock(&m->lock);
    m->ended = true;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
    if (m->running) pthread_join(m->thread, NULL);
    pthread_cond_destroy(&m->changed);
    pthread_mutex_destroy(&m->lock);
    for (int i = 0; i < 2; i++) free(m->jobs[i].rows);
    free(m);
}

struct masks_job *masks_ahead_begin(struct masks_ahead *m, const struct constraint_row *rows, int n,
                                    const struct sample_result *results, uint32_t *ret)
{
    struct masks_job *job = &m->jobs[m->next], *other = &m->jobs[!m->next];
    m->next = !m->next;
    for (int i = 0; i < n; i++) constraint_hold(rows[i].constraint);
    memcpy(job->rows, rows, (size_t)n * sizeof *rows);
    job->n = n;
    job->results = results;
    job->masks = ret;
    job->abandoned = 0;
    pthread_mutex_lock(&m->lock);
    while (other->begun && !other->taken) pthread_cond_wait(&m->changed, &m->lock);
    job->begun = true;
    job->taken = false;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
    return job;
}

void masks_job_await(void *context)
{
    struct masks_job *job = context;
    pthread_mutex_lock(&job->of->lock);
    while (job->begun) pthread_cond_wait(&job->of->changed, &job->of->lock);
    pthread_mutex_unlock(&job->of->lock);
}

enum status masks_job_finish(struct masks_job *job, bool abandon)
{
    if (abandon) __atomic_store_n(&job->abandoned, 1, __ATOMIC_RELAXED);
    masks_job_await(job);
    for (int i = 0; i < job->n; i++) constraint_release(job->rows[i].constraint);
    return job->kept.code == ST_OK ? ST_OK : status_recall(&job->kept);
}
