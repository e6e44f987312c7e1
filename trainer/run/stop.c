/* stop.c: signals and the watching thread. The handler only counts; the thread looks every
 * WATCH_MS.
 *
 * A second signal must not tear the weights: the thread takes the publish lock, which the main
 * thread holds from the request for quiet to the even version, before it ends the process. A
 * request that is not granted yet, which may take as long as the quiet time-out, it revokes
 * instead. A dead daemon has no weights to tear: there the main thread gets GRACE_MS to end by
 * itself, with its own sentence.
 */
#include "trainer/run/stop.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define WATCH_MS 100
#define GRACE_MS 1000

static _Atomic int signals_seen; // two signals may come to two threads at once

struct stop {
    pthread_t thread;
    pthread_mutex_t publish_lock;
    struct control *control;
    _Atomic bool ended;
};

static void on_signal(int number)
{
    (void)number;
    atomic_fetch_add(&signals_seen, 1);
}

void stop_catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool stop_requested(void)
{
    return signals_seen > 0;
}

// Ends the process once no update can be under way: with the publish lock, or with the main
// thread's request for quiet revoked. Returns where the run has ended by itself.
static void end_at_once(struct stop *s)
{
    bool cancelled = false;
    while (!cancelled && pthread_mutex_trylock(&s->publish_lock) != 0) {
        cancelled = control_quiet_cancel(s->control);
        if (!cancelled) clock_sleep_ms(WATCH_MS / 10);
    }
    if (cancelled || !s->ended) {
        log_warn("second signal: ending at once");
        _exit(1);
    }
    pthread_mutex_unlock(&s->publish_lock);
}

static void *watch(void *context)
{
    struct stop *s = context;
    bool said = false;
    while (!s->ended) {
        clock_sleep_ms(WATCH_MS);
        if (signals_seen == 1 && !said) { // a step may take minutes
            log_info("signal: the run ends with a checkpoint once this step is done; a second one "
                     "ends it at once");
            said = true;
        }
        if (signals_seen > 1) {
            end_at_once(s);
            return NULL;
        }
        if (control_owner_alive(s->control) == ST_OK) continue;
        for (int64_t deadline = clock_deadline_ns(GRACE_MS); clock_ms_until(deadline) > 0;) {
            if (s->ended) return NULL;
            clock_sleep_ms(WATCH_MS / 10);
        }
        log_error("%s; what was learned since the last checkpoint is lost", status_message());
        _exit(1);
    }
    return NULL;
}

enum status stop_watch_new(struct control *control, struct stop **ret)
{
    struct stop *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for the watching thread");
    s->control = control;
    pthread_mutex_init(&s->publish_lock, NULL);
    if (pthread_create(&s->thread, NULL, watch, s) != 0) {
        pthread_mutex_destroy(&s->publish_lock);
        free(s);
        return status_fail(ST_IO, "the watching thread cannot be started");
    }
    *ret = s;
    return ST_OK;
}

void stop_watch_end(struct stop *s)
{
    if (!s) return;
    s->ended = true;
    pthread_join(s->thread, NULL);
    pthread_mutex_destroy(&s->publish_lock);
    free(s);
}

pthread_mutex_t *stop_publish_lock(struct stop *s)
{
    return &s->publish_lock;
}
