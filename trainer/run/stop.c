/* stop.c: signals and the watching thread. The handler only counts; the thread looks every
 * WATCH_MS, and ends at once when it is told to.
 *
 * A second signal must not tear the weights: the thread takes the publish lock, which the main
 * thread holds from the request to quiesce to the even version, or revokes a request that is not
 * granted yet, before it ends the process. A dead server has no weights to tear: there the main
 * thread, which maps the last whole ones, gets GONE_MS to write its checkpoint and end with its own
 * sentence. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/stop.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/options.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define WATCH_MS 100
#define GRACE_MS 1000             // of a main thread before it is said that it is waited for
#define GONE_MS  (10 * 60 * 1000) // after which it counts as hung

static _Atomic int signals_seen; // two signals may come to two threads at once
static _Atomic bool requested;
static const char *_Atomic sentence; // of the first, until it is logged; NULL: none

struct stop {
    pthread_t thread;
    pthread_mutex_t publish_lock, end_lock;
    pthread_cond_t end; // ended is set
    struct stop_options options;
    _Atomic bool ended, saving;
    int64_t gone_ns; // since when the server is found gone; 0: it lives. Of the thread
    bool gone_said;
};

// SIGHUP is never a second signal (program_hears_hangup(), options.h).
static void on_signal(int number)
{
    int none = 0;
    if (number == SIGHUP)
        atomic_compare_exchange_strong(&signals_seen, &none, 1);
    else
        atomic_fetch_add(&signals_seen, 1);
    requested = true;
}

void stop_catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    if (program_hears_hangup()) sigaction(SIGHUP, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
}

// By who sees the signal first: what comes of it is logged behind it.
static void say_first(void)
{
    const char *first = signals_seen ? atomic_exchange(&sentence, NULL) : NULL;
    if (first) log_info("signal: %s; a second one ends it at once", first);
}

bool stop_requested(void)
{
    if (requested) say_first();
    return requested;
}

const _Atomic bool *stop_flag(void)
{
    return &requested;
}

// Ends the process once no update can be under way: with the publish lock, or with the main
// thread's request to quiesce revoked. Returns where the run has ended by itself.
static void end_at_once(struct stop *s)
{
    bool cancelled = false;
    while (!cancelled && pthread_mutex_trylock(&s->publish_lock) != 0) {
        cancelled = control_quiesce_cancel(s->options.control);
        if (!cancelled) clock_sleep_ms(WATCH_MS / 10);
    }
    if (cancelled || !s->ended) {
        log_warn("second signal: ending at once");
        if (s->options.leave) s->options.leave(s->options.context);
        _exit(1);
    }
    pthread_mutex_unlock(&s->publish_lock);
}

// Whether the server is gone, and for how long, is looked at; said once.
static void look_at_server(struct stop *s)
{
    if (!s->options.control || control_owner_alive(s->options.control) == ST_OK) return;
    if (!s->gone_ns) s->gone_ns = clock_now_ns();
    const double ms = clock_ms_since(s->gone_ns);
    if (ms >= GRACE_MS && !s->gone_said && !s->saving) {
        log_warn("%s: the run ends with a checkpoint once the computation under way is done; a "
                 "second signal ends it at once, without",
                 status_message());
        s->gone_said = true;
    }
    if (ms < GONE_MS || s->saving) return;
    log_error("%s; the computation under way does not end, so that what was learned since the last "
              "checkpoint is lost",
              status_message());
    _exit(1);
}

static void *watch(void *context)
{
    struct stop *s = context;
    while (!s->ended) {
        const int64_t until = clock_deadline_ns(WATCH_MS);
        pthread_mutex_lock(&s->end_lock);
        while (!s->ended && clock_now_ns() < until) clock_cond_wait(&s->end, &s->end_lock, until);
        pthread_mutex_unlock(&s->end_lock);
        say_first(); // a step may take minutes
        if (signals_seen > 1) {
            end_at_once(s);
            return NULL;
        }
        look_at_server(s);
    }
    return NULL;
}

static void release(struct stop *s)
{
    pthread_cond_destroy(&s->end);
    pthread_mutex_destroy(&s->end_lock);
    pthread_mutex_destroy(&s->publish_lock);
    free(s);
}

enum status stop_watch_new(const struct stop_options *options, struct stop **ret)
{
    struct stop *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for the watching thread");
    s->options = *options;
    sentence = options->first;
    pthread_mutex_init(&s->publish_lock, NULL);
    pthread_mutex_init(&s->end_lock, NULL);
    clock_cond_init(&s->end);
    if (pthread_create(&s->thread, NULL, watch, s) != 0) {
        release(s);
        return status_fail(ST_IO, "the watching thread cannot be started");
    }
    *ret = s;
    return ST_OK;
}

void stop_watch_end(struct stop *s)
{
    if (!s) return;
    pthread_mutex_lock(&s->end_lock);
    s->ended = true;
    pthread_cond_signal(&s->end);
    pthread_mutex_unlock(&s->end_lock);
    pthread_join(s->thread, NULL);
    sentence = NULL;
    release(s);
}

void stop_saving(struct stop *s)
{
    s->saving = true;
}

pthread_mutex_t *stop_publish_lock(struct stop *s)
{
    return &s->publish_lock;
}
