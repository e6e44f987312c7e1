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

struct masks_ahead {
    pthread_t thread;
    pthread_mutex_t lock; // of `begun`, `ended` and `kept`
    pthread_cond_t changed;
    bool begun, ended; // ended: the thread is to end
    int abandoned;     // atomic
    struct constraint_row *rows;
    int n;
    const struct sample_result *results;
    uint32_t *masks;
    struct status_kept kept; // what came of it
};

enum status masks_make(const struct constraint_row *rows, int n, uint32_t *ret)
{
    const enum status st = constraint_masks(rows, n, ret);
    return st == ST_TOO_LONG || st == ST_UNSUPPORTED ? ST_OK : st;
}

// False: they were abandoned.
static bool await_tokens(struct masks_ahead *m)
{
    const struct timespec pause = {0, LOOK_NS};
    for (int i = 0; i < m->n; i++) {
        if (m->rows[i].token < 0) continue;
        const int32_t *token = &m->results[m->rows[i].token].token;
        int32_t come;
        while ((come = __atomic_load_n(token, __ATOMIC_ACQUIRE)) == MASKS_AHEAD_NO_TOKEN) {
            if (__atomic_load_n(&m->abandoned, __ATOMIC_RELAXED)) return false;
            nanosleep(&pause, NULL);
        }
        m->rows[i].token = come;
    }
    return true;
}

static void *work(void *context)
{
    struct masks_ahead *m = context;
    pthread_mutex_lock(&m->lock);
    while (!m->ended) {
        if (!m->begun) {
            pthread_cond_wait(&m->changed, &m->lock);
            continue;
        }
        pthread_mutex_unlock(&m->lock);
        m->kept.code = ST_OK;
        if (await_tokens(m)) {
            const enum status st = masks_make(m->rows, m->n, m->masks);
            if (st != ST_OK) status_keep(&m->kept, st);
        }
        pthread_mutex_lock(&m->lock);
        m->begun = false;
        pthread_cond_broadcast(&m->changed);
    }
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

enum status masks_ahead_new(struct masks_ahead **ret)
{
    struct masks_ahead *m = calloc(1, sizeof *m);
    if (!m) return status_fail(ST_NO_MEMORY, "no memory for masks");
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->changed, NULL);
    const int error = thread_start(&m->thread, work, m);
    if (error) {
        pthread_cond_destroy(&m->changed);
        pthread_mutex_destroy(&m->lock);
        free(m);
        return status_fail(ST_IO, "no thread for masks: %s", strerror(error));
    }
    *ret = m;
    return ST_OK;
}

void masks_ahead_free(struct masks_ahead *m)
{
    if (!m) return;
    pthread_mutex_lock(&m->lock);
    m->ended = true;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
    pthread_join(m->thread, NULL);
    pthread_cond_destroy(&m->changed);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

void masks_ahead_begin(struct masks_ahead *m, struct constraint_row *rows, int n,
                       const struct sample_result *results, uint32_t *ret)
{
    if (n == 0) return;
    for (int i = 0; i < n; i++) constraint_hold(rows[i].constraint);
    pthread_mutex_lock(&m->lock);
    m->rows = rows;
    m->n = n;
    m->results = results;
    m->masks = ret;
    m->abandoned = 0;
    m->begun = true;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
}

enum status masks_ahead_finish(struct masks_ahead *m, bool abandon)
{
    if (abandon) __atomic_store_n(&m->abandoned, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&m->lock);
    while (m->begun) pthread_cond_wait(&m->changed, &m->lock);
    pthread_mutex_unlock(&m->lock);
    for (int i = 0; i < m->n; i++) constraint_release(m->rows[i].constraint);
    const bool failed = m->n > 0 && m->kept.code != ST_OK;
    m->n = 0;
    return failed ? status_recall(&m->kept) : ST_OK;
}
