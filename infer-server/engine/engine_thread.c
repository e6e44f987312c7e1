/* engine_thread.c: the engine's thread: the loop that steps, lets the trainer write between steps,
 * and carries out commands. What a step is stands in executor.c, the weights' sharing in
 * weights_owner.c.
 *
 * The thread opens the device, since a device belongs to one thread, loads, and then goes round:
 *   take what arrived -> commands -> quiesce, if the trainer asked -> one step -> statistics
 * All device work of a step is waited for within it, so everything between two steps happens at a
 * step boundary. With nothing to do the thread sleeps on the control page's doorbell, by which
 * submitters and the trainer notify it.
 *
 * Events are delivered, and done() of commands is called, without the lock. The statistics' other
 * copy (`live`) is the thread's alone, as are the executor and, but for its control page's doorbell
 * and info, the owner of the weights.
 *
 * Faults. Torn weights: requests are refused (ST_TORN), those in flight wait, the weights are
 * restored, and every key and value is computed again. A failed device, or weights that cannot be
 * restored: every sample ends with FINISH_ERROR, the state is ENGINE_FAILED, and nothing is served
 * any more; the program is expected to end and be started again. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/engine_thread.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEARTBEAT_MS 50

// ---- state -------------------------------------------------------------------------------------

// How many samples run with each adapter. Under the lock.
static void count_running(struct engine *e)
{
    const struct scheduler *s = e->executor->scheduler;
    for (int i = 0; i < e->n_adapters; i++) e->adapter_list[i].running = 0;
    for (int i = 0; i < scheduler_running(s); i++) {
        struct adapter_info *info =
            engine_adapter(e, &scheduler_at(s, i)->request->sampling.adapter);
        if (info) info->running++;
    }
}

// Makes the live statistics what other threads see.
void engine_publish(struct engine *e)
{
    if (e->executor) executor_note_state(e->executor);
    pthread_mutex_lock(&e->lock);
    e->stats = e->live;
    for (const struct request *r = e->inbox; r; r = r->next) e->stats.waiting += r->sampling.n;
    if (e->n_adapters > 0 && e->executor) count_running(e);
    pthread_mutex_unlock(&e->lock);
}

void engine_set_state(struct engine *e, enum engine_state state, const char *detail)
{
    e->live.state = state;
    snprintf(e->live.state_detail, sizeof e->live.state_detail, "%s", detail);
    engine_publish(e);
}

void engine_on_event(void *context, const struct engine_event *event)
{
    struct engine *e = context;
    if (event->finish != FINISH_NONE) {
        pthread_mutex_lock(&e->lock);
        e->n_inside--;
        struct adapter_info *adapter = engine_adapter(e, &event->request->sampling.adapter);
        if (adapter) {
            adapter->samples--;
            adapter->generated_tokens += (uint64_t)event->telemetry->generated_tokens;
        }
        pthread_mutex_unlock(&e->lock);
    }
    e->on_event(e->context, event);
}

static void take_inbox(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    struct request *r = e->inbox;
    e->inbox = NULL;
    e->inbox_end = &e->inbox;
    pthread_mutex_unlock(&e->lock);
    while (r) {
        struct request *next = r->next;
        r->next = NULL;
        executor_add(e->executor, r);
        r = next;
    }
}

// Ends everything in the engine and stays: see the head of the file.
void engine_fail(struct engine *e, const char *message)
{
    log_error("engine: %s", message);
    engine_set_state(e, ENGINE_FAILED,
                     message); // before the inbox is emptied, so that no request follows
    if (e->executor) {
        take_inbox(e);
        executor_end_all(e->executor, FINISH_ERROR, e->live.state_detail);
        engine_publish(e);
    }
    pthread_mutex_lock(&e->lock);
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

void engine_settle(struct engine *e)
{
    if (e->executor && e->live.state != ENGINE_FAILED && executor_settle(e->executor) != ST_OK)
        engine_fail(e, status_message());
}

// ---- the loop ----------------------------------------------------------------------------------

// Time to leave: told to, and nothing left to finish or no time to.
static bool is_over(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    bool over = e->stopping && (e->n_inside == 0 || clock_now_ns() >= e->stop_deadline_ns);
    bool began = e->stopping && e->live.state == ENGINE_OK;
    pthread_mutex_unlock(&e->lock);
    if (began) engine_set_state(e, ENGINE_DRAINING, "shutting down");
    return over;
}

static void run(struct engine *e)
{
    struct control *control = weights_owner_control(e->owner);
    while (e->live.state != ENGINE_FAILED) {
        const uint32_t seen = control_doorbell(control);
        bool stepped = false;
        if (clock_ms_since(e->last_heartbeat_ns) >= HEARTBEAT_MS) {
            e->last_heartbeat_ns = clock_now_ns();
            control_heartbeat(control);
        }
        // Read before the inbox: what was cancelled by now was submitted before that, and is found.
        const bool cancels = atomic_exchange(&e->cancels, false);
        take_inbox(e);
        if (cancels) engine_settle(e);
        if (cancels) executor_end_cancelled(e->executor);
        engine_run_commands(e);
        engine_free_retired(e);
        if (is_over(e)) break;
        if (group_check(e->group) != ST_OK) engine_fail(e, status_message());
        if (e->live.state != ENGINE_FAILED) engine_serve_writer(e);
        if (e->live.state != ENGINE_FAILED && !e->paused) {
            enum status st = executor_step(e->executor, e->live.weight_version,
                                           e->draining ? ADMIT_STARTED : ADMIT_ALL, &stepped);
            if (st != ST_OK) engine_fail(e, status_message());
        }
        engine_publish(e);
        // A drain that has nothing to step any more is granted on the next round, at once.
        if (!stepped && !e->draining) control_wait(control, seen, ENGINE_IDLE_MS);
    }
}

// Nothing is served any more; commands are refused until somebody ends the engine.
static void stay_failed(struct engine *e)
{
    for (;;) {
        engine_run_commands(e);
        pthread_mutex_lock(&e->lock);
        while (!e->stopping && !e->commands && e->pause_wanted == e->paused)
            pthread_cond_wait(&e->changed, &e->lock);
        bool stopping = e->stopping;
        pthread_mutex_unlock(&e->lock);
        if (stopping) return;
    }
}

static void leave(struct engine *e)
{
    struct weights_owner *owner = e->owner;
    if (e->executor) {
        take_inbox(e);
        executor_end_all(e->executor, FINISH_CANCELLED, NULL);
    }
    pthread_mutex_lock(&e->lock);
    e->owner = NULL; // nobody notifies a page that is gone
    pthread_mutex_unlock(&e->lock);
    group_end(e->group);
    executor_free(e->executor);
    e->executor = NULL;
    engine_run_commands(e); // refuses what came last
    weights_owner_free(owner);
    group_free(e->group);
    device_free(e->dev);
}

void *engine_thread(void *arg)
{
    struct engine *e = arg;
    pthread_setname_np(pthread_self(), "engine");
    enum status st = engine_open_device(e);
    pthread_mutex_lock(&e->lock);
    e->opened = true;
    status_keep(&e->open_status, st);
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    if (st == ST_OK) {
        st = engine_load(e);
        if (st == ST_OK)
            run(e);
        else
            engine_fail(e, status_message());
        if (e->live.state == ENGINE_FAILED) stay_failed(e);
    }
    leave(e);
    return NULL;
}
