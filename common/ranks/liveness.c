/* liveness.c: one thread over poll(): heartbeats out, heartbeats and news in.
 *
 * What comes is {} (a heartbeat), {bye: true}, {failed: sentence} or, from rank 0,
 * {gone: sentence}. The first loss counts; what follows from it is no news. A process that was
 * itself stopped for a while, alone or with the whole job, reads first what came meanwhile, and
 * begins to wait for silence anew. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/liveness.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/spawn.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define HEARTBEATS_IN_SILENCE 6
#define LAST_WORD_MS          1000 // for the bye to go out
#define LOOK_MS               10

struct liveness {
    struct peers *p;
    struct pollfd *polls;
    int64_t heartbeat_ns, silence_ns;
    liveness_fn on_loss;
    void *context;
    pthread_t thread;
    int wake; // eventfd: the end
    pthread_mutex_t lock;
    struct status_kept why; // under the lock; the code is ST_OK until a rank is gone
    _Atomic bool lost;
};

// ---- a loss -------------------------------------------------------------------------------------

static void send_all(struct liveness *l, const char *key, const char *text)
{
    for (int i = 0; i < l->p->n; i++)
        if (l->p->list[i].here)
            conn_send(&l->p->list[i].conn, text ? json_pack("{s:s}", key, text) : json_object());
}

static void lose(struct liveness *l, const char *sentence)
{
    if (l->lost) return;
    pthread_mutex_lock(&l->lock);
    status_keep(&l->why, status_fail(ST_PEER_GONE, "%s", sentence));
    pthread_mutex_unlock(&l->lock);
    l->lost = true;
    if (l->p->self.rank == 0) send_all(l, "gone", sentence);
    if (l->on_loss) l->on_loss(l->context, sentence);
}

static void lose_peer(struct liveness *l, struct peer *peer, const char *how)
{
    char name[HELLO_NAME], sentence[1800];
    snprintf(sentence, sizeof sentence, "%s %s", hello_name(&peer->who, name), how);
    lose(l, sentence); // tells the peer too, which may wake again
    conn_close(&peer->conn);
    peer->here = false;
}

// ---- what comes ---------------------------------------------------------------------------------

static void take_message(struct liveness *l, struct peer *peer, const json_t *message)
{
    const char *gone = NULL, *failed = NULL;
    bool bye = false;
    char how[1600];
    peer->heard_ns = clock_now_ns();
    if (json_get_string("a rank's news", message, "gone", &gone) != ST_OK ||
        json_get_string("a rank's news", message, "failed", &failed) != ST_OK ||
        json_get_bool("a rank's news", message, "bye", &bye) != ST_OK) {
        lose_peer(l, peer, "sends what is no message of a rank");
    } else if (gone) {
        lose(l, gone);
    } else if (failed) {
        snprintf(how, sizeof how, "has failed: %s", CUT(failed, 1500));
        lose_peer(l, peer, how);
    } else if (bye) {
        conn_close(&peer->conn);
        peer->here = false;
    }
}

static void hear(struct liveness *l, struct peer *peer)
{
    json_t *message = NULL;
    enum status st;
    do {
        json_decref(message);
        st = conn_receive(&peer->conn, &message);
        if (message) take_message(l, peer, message);
    } while (st == ST_OK && message && peer->here);
    json_decref(message);
    if (!peer->here) return;
    if (st == ST_OK) st = conn_flush(&peer->conn);
    if (st == ST_PEER_GONE)
        lose_peer(l, peer, "is gone: it was killed or ended without a word");
    else if (st != ST_OK)
        lose_peer(l, peer, "sends what is no message of a rank");
}

static void look_for_silence(struct liveness *l, struct peer *peer, int64_t now)
{
    char how[160];
    if (now - peer->heard_ns < l->silence_ns) return;
    snprintf(how, sizeof how,
             "is gone: nothing was heard of it for %.0f s; it was stopped, or its host or the "
             "network to it is down",
             (double)l->silence_ns / NS_PER_S);
    lose_peer(l, peer, how);
}

// ---- the thread ---------------------------------------------------------------------------------

// False where the end was asked for.
static bool wait_for_any(struct liveness *l, int ms)
{
    nfds_t n = 0;
    l->polls[n++] = (struct pollfd){.fd = l->wake, .events = POLLIN};
    for (int i = 0; i < l->p->n; i++)
        if (l->p->list[i].here)
            l->polls[n++] = (struct pollfd){.fd = l->p->list[i].conn.fd, .events = POLLIN};
    poll(l->polls, n, ms);
    return !(l->polls[0].revents & POLLIN);
}

static void *watch(void *context)
{
    struct liveness *l = context;
    int64_t next_heartbeat_ns = 0, looked = clock_now_ns();
    for (;;) {
        if (clock_ms_until(next_heartbeat_ns) == 0) {
            send_all(l, NULL, NULL);
            next_heartbeat_ns = clock_now_ns() + l->heartbeat_ns;
        }
        if (!wait_for_any(l, clock_ms_until(next_heartbeat_ns))) return NULL;
        // taken once: this process may be stopped anywhere in here
        const int64_t now = clock_now_ns();
        const bool slept = now - looked > l->silence_ns / 2;
        for (int i = 0; i < l->p->n; i++) {
            struct peer *peer = &l->p->list[i];
            if (peer->here) hear(l, peer);
            if (slept) peer->heard_ns = now;
            if (peer->here) look_for_silence(l, peer, now);
        }
        looked = now;
    }
}

// ---- calls --------------------------------------------------------------------------------------

static void release(struct liveness *l)
{
    if (l->wake >= 0) close(l->wake);
    pthread_mutex_destroy(&l->lock);
    peers_free(l->p);
    free(l->polls);
    free(l);
}

enum status liveness_start(struct peers *peers, double silence_s, liveness_fn on_loss,
                           void *context, struct liveness **ret)
{
    struct liveness *l = calloc(1, sizeof *l);
    enum status st;
    if (!l) {
        peers_free(peers);
        return status_fail(ST_NO_MEMORY, "no memory to watch over ranks");
    }
    l->p = peers;
    l->on_loss = on_loss;
    l->context = context;
    l->silence_ns = (int64_t)(silence_s * NS_PER_S);
    l->heartbeat_ns = l->silence_ns / HEARTBEATS_IN_SILENCE;
    pthread_mutex_init(&l->lock, NULL);
    l->polls = calloc((size_t)peers->n + 1, sizeof *l->polls);
    l->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!l->polls || l->wake < 0) FAIL(ST_IO, "no memory or descriptor to watch over ranks");
    for (int i = 0; i < peers->n; i++) peers->list[i].heard_ns = clock_now_ns();
    const int error = thread_start(&l->thread, watch, l);
    if (error) FAIL(ST_IO, "the thread that watches over ranks: %s", strerror(error));
    *ret = l;
    return ST_OK;
out:
    release(l);
    return st;
}

enum status liveness_check(struct liveness *l, int ms)
{
    const int64_t deadline = clock_deadline_ns(ms);
    while (!l->lost && clock_ms_until(deadline) > 0) clock_sleep_ms(LOOK_MS);
    if (!l->lost) return ST_OK;
    pthread_mutex_lock(&l->lock);
    enum status st = status_recall(&l->why);
    pthread_mutex_unlock(&l->lock);
    return st;
}

enum status liveness_watch(void *liveness)
{
    return liveness_check(liveness, 0);
}

void liveness_end(struct liveness *l, enum status outcome)
{
    const uint64_t one = 1;
    struct status_kept own;
    if (!l) return;
    const int64_t deadline = clock_deadline_ns(LAST_WORD_MS);
    status_keep(&own, outcome);
    while (write(l->wake, &one, sizeof one) < 0) continue;
    pthread_join(l->thread, NULL);
    for (int i = 0; i < l->p->n; i++) {
        struct conn *w = &l->p->list[i].conn;
        json_t *word = outcome == ST_OK ? json_pack("{s:b}", "bye", 1)
                                        : json_pack("{s:s}", "failed", own.message);
        if (!l->p->list[i].here)
            json_decref(word);
        else if (conn_send(w, word) == ST_OK)
            conn_finish(w, deadline);
    }
    status_recall(&own); // what did not go out is no news
    release(l);
}
