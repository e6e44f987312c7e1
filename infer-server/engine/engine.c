/* engine.c: the engine as other threads see it: life, questions, requests, commands. Its own thread
 * is engine_thread.c.
 *
 * `lock` guards what both sides touch: the inbox, the command list, the snapshot of the statistics,
 * the requests to pause and to stop, and what appears once the model is loaded. It is held for a
 * few instructions only; nobody waits for the device under it. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/engine.h"
#include "common/base/clock.h"
#include "common/base/spawn.h"
#include "infer-server/weights/adapters.h"
#include "infer-server/engine/engine_thread.h"
#include <stdlib.h>
#include <string.h>

// Rings whatever the thread sleeps on. Under the lock.
void engine_wake(struct engine *e)
{
    pthread_cond_broadcast(&e->changed);
    if (e->owner) control_notify(weights_owner_control(e->owner));
}

// ---- life --------------------------------------------------------------------------------------

static void engine_release(struct engine *e)
{
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    for (int i = 0; i < RUNNERS; i++) model_config_free(e->configs[i]);
    free(e);
}

enum status engine_new(const struct engine_options *options, engine_event_fn on_event_fn,
                       void *context, struct engine **ret)
{
    enum status st = ST_OK;
    struct engine *e = calloc(1, sizeof *e);
    if (!e) return status_fail(ST_NO_MEMORY, "no memory for an engine");
    e->options = *options;
    e->on_event = on_event_fn;
    e->context = context;
    e->inbox_end = &e->inbox;
    e->commands_end = &e->commands;
    clock_cond_init(&e->changed);
    pthread_mutex_init(&e->lock, NULL);
    CHECK(engine_check_options(&e->options));
    CHECK(engine_load_configs(&e->options, e->configs));
    int error = thread_start(&e->thread, engine_thread, e);
    if (error) FAIL(ST_NO_MEMORY, "the engine's thread cannot be started: %s", strerror(error));
    pthread_mutex_lock(&e->lock);
    while (!e->opened) pthread_cond_wait(&e->changed, &e->lock);
    st = status_recall(&e->open_status);
    pthread_mutex_unlock(&e->lock);
    if (st == ST_OK) {
        *ret = e;
        return ST_OK;
    }
    pthread_join(e->thread, NULL);
out:
    engine_release(e);
    return st;
}

void engine_free(struct engine *e, int drain_ms)
{
    if (!e) return;
    pthread_mutex_lock(&e->lock);
    e->stopping = true;
    e->stop_deadline_ns = clock_deadline_ns(drain_ms);
    e->pause_wanted = false;
    engine_wake(e);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    engine_release(e);
}

// ---- questions ---------------------------------------------------------------------------------

void engine_info(struct engine *e, struct engine_info *ret)
{
    pthread_mutex_lock(&e->lock);
    const struct weights_owner *owner = e->owner;
    *ret = (struct engine_info){.bridge_path = e->options.bridge_path,
                                .vocab_size = e->configs[RUNNER_POLICY]->vocab_size,
                                .n_eos = e->configs[RUNNER_POLICY]->n_eos,
                                .eos_ids = e->configs[RUNNER_POLICY]->eos_ids,
                                .max_context = e->max_context,
                                .loaded = owner != NULL};
    pthread_mutex_unlock(&e->lock);
    if (!owner) return;
    const struct weights *w = weights_owner_weights(owner, WEIGHTS_POLICY);
    ret->n_tensors = w->n_tensors;
    ret->n_shards = weights_owner_shards(owner);
    ret->n_parameters = weights_owner_parameters(owner);
    control_info(weights_owner_control(owner), &ret->control);
}

void engine_stats(struct engine *e, struct engine_stats *ret)
{
    pthread_mutex_lock(&e->lock);
    *ret = e->stats;
    pthread_mutex_unlock(&e->lock);
}

// ---- requests ----------------------------------------------------------------------------------

// Whether it can be asked for anything. Under the lock.
enum status engine_check_state(const struct engine *e)
{
    if (e->stopping) return status_fail(ST_BUSY, "the server is shutting down");
    if (e->stats.state == ENGINE_LOADING)
        return status_fail(ST_BUSY, "the model is still being loaded");
    if (e->stats.state == ENGINE_FAILED)
        return status_fail(ST_DEVICE, "the engine has failed: %s", e->stats.state_detail);
    return ST_OK;
}

// Under the lock.
static enum status check_room(const struct engine *e, const struct request *r)
{
    enum status st = engine_check_state(e);
    if (st != ST_OK) return st;
    if (e->stats.state == ENGINE_TORN)
        return status_fail(ST_TORN, "%s; try again in a moment", e->stats.state_detail);
    // Fitting the context is fitting the KV pool: executor_new() saw to it that one longest
    // sequence fits.
    const struct sampling *s = &r->sampling;
    if ((int64_t)r->n_prompt + s->max_tokens > e->max_context)
        return status_fail(ST_INVALID,
                           "the prompt's %d tokens and max_tokens %d are over the context of %d "
                           "tokens; shorten the prompt or ask for fewer tokens",
                           r->n_prompt, s->max_tokens, e->max_context);
    const int max = e->options.max_batch + e->options.max_queue;
    if (s->n > max)
        return status_fail(ST_INVALID, "n is %d; this server holds at most %d samples", s->n, max);
    if (e->n_inside + s->n > max)
        return status_fail(ST_BUSY,
                           "the queue is full: %d samples are running or waiting, at most %d are "
                           "taken; try again later",
                           e->n_inside, max);
    return ST_OK;
}

// Under the lock.
struct adapter_info *engine_adapter(struct engine *e, const struct adapter_ref *ref)
{
    for (int i = 0; i < e->n_adapters && ref->index; i++)
        if (e->adapter_list[i].ref.id == ref->id) return &e->adapter_list[i];
    return NULL;
}

// Under the lock.
static enum status check_adapter(struct engine *e, const struct adapter_ref *ref)
{
    if (ref->index == 0 || engine_adapter(e, ref)) return ST_OK;
    return status_fail(ST_NOT_FOUND, "the request's adapter was unloaded meanwhile");
}

enum status engine_submit(struct engine *e, struct request *r)
{
    enum status st = request_check(&e->options, e->configs[RUNNER_POLICY], r);
    if (st != ST_OK) return st;
    const int64_t now_ns = clock_now_ns();
    pthread_mutex_lock(&e->lock);
    st = check_room(e, r);
    if (st == ST_OK) st = check_adapter(e, &r->sampling.adapter);
    pthread_mutex_unlock(&e->lock);
    const uint64_t cache_salt = e->options.prefix_cache_off ? ++e->n_salts : r->sampling.cache_salt;
    if (st == ST_OK) st = request_prepare(r, e->options.block_size, cache_salt);
    if (st != ST_OK) return st;
    for (int i = 0; i < r->sampling.n; i++) r->samples[i].queued_ns = now_ns;
    pthread_mutex_lock(&e->lock);
    CHECK(check_adapter(e, &r->sampling.adapter));
    CHECK(check_room(e, r)); // memory for thousands of samples takes a while
    r->next = NULL;
    *e->inbox_end = r;
    e->inbox_end = &r->next;
    e->n_inside += r->sampling.n;
    struct adapter_info *adapter = engine_adapter(e, &r->sampling.adapter);
    if (adapter) adapter->samples += r->sampling.n;
    engine_wake(e);
out:
    pthread_mutex_unlock(&e->lock);
    return st;
}

void engine_cancel(struct engine *e, struct request *r, int sample)
{
    for (int i = 0; i < r->sampling.n; i++)
        if (sample == -1 || sample == i) r->samples[i].cancel = true;
    atomic_store(&e->cancels, true);
    pthread_mutex_lock(&e->lock);
    engine_wake(e);
    pthread_mutex_unlock(&e->lock);
}

// ---- adapters ----------------------------------------------------------------------------------

int engine_adapters(struct engine *e, struct adapter_info ret[ADAPTERS_MAX])
{
    pthread_mutex_lock(&e->lock);
    int n = 0;
    for (int i = 0; i < e->n_adapters; i++)
        if (e->adapter_list[i].name[0]) ret[n++] = e->adapter_list[i];
    pthread_mutex_unlock(&e->lock);
    return n;
}

bool engine_find_adapter(struct engine *e, const char *name, struct adapter_ref *ret)
{
    bool found = false;
    pthread_mutex_lock(&e->lock);
    for (int i = 0; i < e->n_adapters && !found; i++) {
        found = name[0] && strcmp(e->adapter_list[i].name, name) == 0;
        if (found) *ret = e->adapter_list[i].ref;
    }
    pthread_mutex_unlock(&e->lock);
    return found;
}
