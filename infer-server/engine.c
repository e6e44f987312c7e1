/* engine.c: owns the engine's thread: the loop that steps, lets the trainer write between steps, and
 * carries out commands. What a step is stands in executor.c, the weights' sharing in weights_owner.c.
 *
 * The thread opens the device, since a device belongs to one thread, loads, and then goes round:
 *   take what arrived -> commands -> grant the trainer quiet, if it asked -> one step -> statistics
 * All device work of a step is waited for within it, so everything between two steps happens at a
 * step boundary. With nothing to do the thread sleeps on the control page's bell, which submitters
 * and the trainer ring.
 *
 * `lock` guards what other threads see: the inbox, the command list, the snapshot of the statistics,
 * the wishes to pause and to stop, and the pointers that appear once the model is loaded. Events are
 * delivered, and done() of commands is called, without it. The statistics' other copy (`live`), the
 * executor and the owner of the weights are the thread's alone.
 *
 * Faults. Torn weights: requests are refused (ST_TORN), those in flight wait, the weights are restored,
 * and every key and value is computed again. A failed device, or weights that cannot be restored: every
 * sample ends with FINISH_ERROR, the state is ENGINE_FAILED, and nothing is served any more; the
 * program is expected to end and be started again. */
#include "infer-server/engine.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "infer-server/executor.h"
#include "infer-server/request.h"
#include "infer-server/sampler.h"
#include "infer-server/weights_owner.h"
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IDLE_MS         100 // longest sleep: heartbeat, dead writers
#define BEAT_MS         50
#define DEFAULT_BATCH   64
#define DEFAULT_CHUNK   512
#define DEFAULT_BLOCK   16
#define DEFAULT_QUEUE   1024

enum kv_policy { KV_KEEP, KV_RECOMPUTE, KV_DRAIN };

enum command_kind { COMMAND_RELOAD, COMMAND_FACTS };
struct command {
    enum command_kind kind;
    struct command *next;
    void *context;
    char *folder; // RELOAD; owned
    void (*reload_done)(void *context, enum status, const char *message, uint64_t version);
    bool checksums; // FACTS
    void (*facts_done)(void *context, const struct engine_bridge_facts *);
};

struct engine {
    struct engine_options options; // with defaults filled in
    enum kv_policy policy;
    engine_event_fn on_event;
    void *context;
    struct model_config *config;
    pthread_t thread;

    pthread_mutex_t lock;
    pthread_cond_t changed; // opened, paused, failed; and the bell while there is no control page
    bool opened;            // the device is open, or open_status says why not
    enum status open_status;
    char open_message[512];
    struct engine_stats stats; // snapshot
    struct request *inbox, **inbox_end;
    int n_inside; // samples accepted and not ended
    struct command *commands, **commands_end;
    bool pause_wanted, paused, stopping;
    int64_t stop_deadline_ns;
    struct weights_owner *owner; // NULL while loading
    int max_context, block_size; // 0 while loading
    _Atomic bool cancels;        // some sample's cancel flag was set

    // the thread's
    struct device *dev;
    struct executor *executor;
    struct engine_stats live;
    bool draining; // the trainer waits for what is in flight to end
    int64_t last_beat_ns, last_check_ns;
};

// ---- state -----------------------------------------------------------------------------------------

// Rings whatever the thread sleeps on. Under the lock.
static void wake(struct engine *e)
{
    pthread_cond_broadcast(&e->changed);
    if (e->owner) control_ring(weights_owner_control(e->owner));
}

// Makes the live statistics what other threads see.
static void publish(struct engine *e)
{
    if (e->executor) executor_stats(e->executor, &e->live);
    pthread_mutex_lock(&e->lock);
    e->stats = e->live;
    for (const struct request *r = e->inbox; r; r = r->next) e->stats.waiting += r->sampling.n;
    pthread_mutex_unlock(&e->lock);
}

static void set_state(struct engine *e, enum engine_state state, const char *detail)
{
    e->live.state = state;
    snprintf(e->live.state_detail, sizeof e->live.state_detail, "%s", detail);
    publish(e);
}

static void on_event(void *context, const struct engine_event *event)
{
    struct engine *e = context;
    if (event->finish != FINISH_NONE) {
        pthread_mutex_lock(&e->lock);
        e->n_inside--;
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
static void fail(struct engine *e, const char *message)
{
    log_error("engine: %s", message);
    set_state(e, ENGINE_FAILED, message); // before the inbox is emptied, so that no request follows
    if (e->executor) {
        take_inbox(e);
        executor_end_all(e->executor, FINISH_ERROR, e->live.state_detail);
        publish(e);
    }
    pthread_mutex_lock(&e->lock);
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

// ---- the trainer's updates ---------------------------------------------------------------------------

static void take_version(struct engine *e, bool recompute)
{
    e->live.weight_version = control_version(weights_owner_control(e->owner));
    executor_update(e->executor, e->live.weight_version, recompute);
}

static void restore(struct engine *e)
{
    char from[512];
    log_error("engine: the trainer died in the middle of an update: the weights are torn; restoring");
    set_state(e, ENGINE_TORN, "the trainer died in the middle of an update; restoring the weights");
    const int64_t start_ns = clock_now_ns();
    if (weights_owner_restore(e->owner, from) != ST_OK) {
        char message[256];
        snprintf(message, sizeof message, "torn weights cannot be restored: %s", status_message());
        fail(e, message);
        return;
    }
    e->live.restores++;
    take_version(e, true);
    set_state(e, ENGINE_OK, "");
    log_info("engine: weights restored from %s in %.0f ms, version %llu", from,
             clock_ms_since(start_ns), (unsigned long long)e->live.weight_version);
}

static void after_writer(struct engine *e, enum control_event event)
{
    const uint64_t version = control_version(weights_owner_control(e->owner));
    if (event == CONTROL_TORN || (version & 1)) {
        restore(e);
        return;
    }
    if (event == CONTROL_WRITER_GONE)
        log_warn("engine: the trainer is gone; its lease was taken back, the weights are whole");
    // A writer that was fenced off moves the number too: the weights are the same, but what was
    // computed under the old number must not pass for the new one's.
    if (version != e->live.weight_version) take_version(e, e->policy == KV_RECOMPUTE);
}

static void serve_writer(struct engine *e)
{
    struct control *control = weights_owner_control(e->owner);
    if (control_quiet_requested(control)) {
        e->draining = e->policy == KV_DRAIN && !e->paused && executor_in_flight(e->executor) > 0;
        if (e->draining) return;
        const int64_t start_ns = clock_now_ns();
        enum control_event event = control_grant_quiet(control);
        if (event == CONTROL_UPDATED) {
            e->live.updates++;
            e->live.last_pause_ms = clock_ms_since(start_ns);
        }
        after_writer(e, event);
        return;
    }
    e->draining = false;
    if (clock_ms_since(e->last_check_ns) < IDLE_MS) return;
    e->last_check_ns = clock_now_ns();
    enum control_event event = control_check_writer(control);
    if (event != CONTROL_NONE) after_writer(e, event);
}

// ---- commands ----------------------------------------------------------------------------------------

static void command_free(struct command *c)
{
    free(c->folder);
    free(c);
}

static void refuse_command(struct engine *e, struct command *c)
{
    if (c->kind == COMMAND_RELOAD)
        c->reload_done(c->context, ST_CANCELLED,
                       e->live.state == ENGINE_FAILED ? e->live.state_detail : "the engine is ending",
                       e->live.weight_version);
    else
        c->facts_done(c->context, NULL);
}

static void reload(struct engine *e, struct command *c)
{
    char message[512] = "";
    enum status st = weights_owner_reload(e->owner, c->folder);
    if (st != ST_OK) snprintf(message, sizeof message, "%s", status_message());
    if (st == ST_TORN)
        restore(e);
    else
        take_version(e, st == ST_OK && e->policy != KV_KEEP);
    if (st == ST_OK)
        log_info("engine: weights reloaded from %s, version %llu", c->folder,
                 (unsigned long long)e->live.weight_version);
    publish(e);
    c->reload_done(c->context, st, message, e->live.weight_version);
}

static void tell_facts(struct engine *e, struct command *c)
{
    struct engine_bridge_facts facts = {.version = e->live.weight_version,
                                        .n_tensors = weights_owner_weights(e->owner)->n_tensors};
    uint64_t *sums = NULL;
    enum status st = ST_OK;
    if (c->checksums) {
        sums = calloc((size_t)facts.n_tensors, sizeof *sums);
        if (!sums) st = status_fail(ST_NO_MEMORY, "no memory for %d checksums", facts.n_tensors);
        if (st == ST_OK) st = weights_owner_checksums(e->owner, sums);
    }
    facts.checksums = sums;
    if (st == ST_OK) st = weights_owner_canary(e->owner, &facts.canary);
    c->facts_done(c->context, st == ST_OK ? &facts : NULL);
    if (st == ST_DEVICE) fail(e, status_message());
    free(sums);
}

static void run_commands(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    struct command *c = e->commands;
    e->commands = NULL;
    e->commands_end = &e->commands;
    if (e->paused != e->pause_wanted) {
        e->paused = e->pause_wanted;
        pthread_cond_broadcast(&e->changed);
    }
    pthread_mutex_unlock(&e->lock);
    while (c) {
        struct command *next = c->next;
        if (e->live.state == ENGINE_FAILED || !e->executor)
            refuse_command(e, c);
        else if (c->kind == COMMAND_RELOAD)
            reload(e, c);
        else
            tell_facts(e, c);
        command_free(c);
        c = next;
    }
}

// ---- the loop ----------------------------------------------------------------------------------------

// Time to leave: told to, and nothing left to finish or no time to.
static bool is_over(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    bool over = e->stopping && (e->n_inside == 0 || clock_now_ns() >= e->stop_deadline_ns);
    bool began = e->stopping && e->live.state == ENGINE_OK;
    pthread_mutex_unlock(&e->lock);
    if (began) set_state(e, ENGINE_DRAINING, "shutting down");
    return over;
}

static void run(struct engine *e)
{
    struct control *control = weights_owner_control(e->owner);
    while (e->live.state != ENGINE_FAILED) {
        const uint32_t seen = control_bell(control);
        bool stepped = false;
        if (clock_ms_since(e->last_beat_ns) >= BEAT_MS) {
            e->last_beat_ns = clock_now_ns();
            control_heartbeat(control);
        }
        // Read before the inbox: what was cancelled by now was submitted before that, and is found.
        const bool cancels = atomic_exchange(&e->cancels, false);
        take_inbox(e);
        if (cancels) executor_end_cancelled(e->executor);
        run_commands(e);
        if (is_over(e)) break;
        if (e->live.state != ENGINE_FAILED) serve_writer(e);
        if (e->live.state != ENGINE_FAILED && !e->paused) {
            enum status st = executor_step(e->executor, e->live.weight_version,
                                           e->draining ? ADMIT_STARTED : ADMIT_ALL, &stepped);
            if (st != ST_OK) fail(e, status_message());
        }
        publish(e);
        // A drain that has nothing to step any more is granted on the next round, at once.
        if (!stepped && !e->draining) control_wait(control, seen, IDLE_MS);
    }
}

// Nothing is served any more; commands are refused until somebody ends the engine.
static void stay_failed(struct engine *e)
{
    for (;;) {
        run_commands(e);
        pthread_mutex_lock(&e->lock);
        while (!e->stopping && !e->commands && e->pause_wanted == e->paused)
            pthread_cond_wait(&e->changed, &e->lock);
        bool stopping = e->stopping;
        pthread_mutex_unlock(&e->lock);
        if (stopping) return;
    }
}

static enum status open_device(struct engine *e)
{
    enum status st = device_open(e->options.device, &e->dev);
    if (st != ST_OK) return st;
    if (e->options.dtype < 0) e->options.dtype = device_default_dtype(e->dev);
    if (device_computes_in(e->dev, (enum dtype)e->options.dtype)) return ST_OK;
    return status_fail(ST_UNSUPPORTED, "--dtype %s: %s computes in %s only",
                       dtype_name((enum dtype)e->options.dtype), device_name(e->dev),
                       dtype_name(device_default_dtype(e->dev)));
}

static enum status load(struct engine *e)
{
    enum status st = ST_OK;
    struct weights_owner *owner = NULL;
    const struct engine_options *o = &e->options;
    const int64_t start_ns = clock_now_ns();
    CHECK(weights_owner_new(e->dev, e->config, (enum dtype)o->dtype, o->model_folder, o->bridge_path,
                            &owner));
    CHECK(executor_new(e->dev, e->config, weights_owner_weights(owner), o, on_event, e,
                       &e->executor));
    e->live.weight_version = control_version(weights_owner_control(owner));
    executor_update(e->executor, e->live.weight_version, false);
    CHECK(weights_owner_announce(owner, o->socket_path));
    pthread_mutex_lock(&e->lock);
    e->owner = owner;
    e->max_context = executor_max_context(e->executor);
    e->block_size = executor_block_size(e->executor);
    pthread_mutex_unlock(&e->lock);
    set_state(e, ENGINE_OK, "");
    log_info("engine: %s on %s in %.1f s: %.1f MB of weights (%s), context %d, %d KV blocks of %d "
             "tokens (%.1f MB)",
             o->model_folder, device_name(e->dev), clock_ms_since(start_ns) / 1e3,
             (double)e->live.weight_bytes / 1e6, dtype_name((enum dtype)o->dtype), e->max_context,
             e->live.kv_blocks_total, e->live.kv_block_tokens,
             (double)e->live.kv_blocks_total * (double)e->live.kv_bytes_per_block / 1e6);
    return ST_OK;
out:
    executor_free(e->executor);
    e->executor = NULL;
    weights_owner_free(owner);
    return st;
}

static void leave(struct engine *e)
{
    struct weights_owner *owner = e->owner;
    if (e->executor) {
        take_inbox(e);
        executor_end_all(e->executor, FINISH_CANCELLED, NULL);
    }
    pthread_mutex_lock(&e->lock);
    e->owner = NULL; // nobody rings a page that is gone
    pthread_mutex_unlock(&e->lock);
    executor_free(e->executor);
    e->executor = NULL;
    run_commands(e); // refuses what came last
    weights_owner_free(owner);
    device_free(e->dev);
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    pthread_setname_np(pthread_self(), "engine");
    enum status st = open_device(e);
    pthread_mutex_lock(&e->lock);
    e->opened = true;
    e->open_status = st;
    if (st != ST_OK) snprintf(e->open_message, sizeof e->open_message, "%s", status_message());
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    if (st == ST_OK) {
        st = load(e);
        if (st == ST_OK)
            run(e);
        else
            fail(e, status_message());
        if (e->live.state == ENGINE_FAILED) stay_failed(e);
    }
    leave(e);
    return NULL;
}

// ---- other threads: life -----------------------------------------------------------------------------

static enum status read_policy(const char *name, enum kv_policy *ret)
{
    static const char *const names[] = {"keep", "recompute", "drain"};
    for (int i = 0; i < 3; i++) {
        if (name && strcmp(name, names[i]) != 0) continue;
        *ret = (enum kv_policy)i;
        return ST_OK;
    }
    return status_fail(ST_INVALID, "the KV policy \"%s\" is none of keep, recompute, drain", name);
}

static enum status check_options(struct engine_options *o)
{
    if (!o->max_batch) o->max_batch = DEFAULT_BATCH;
    if (!o->prefill_chunk) o->prefill_chunk = DEFAULT_CHUNK;
    if (!o->block_size) o->block_size = DEFAULT_BLOCK;
    if (!o->max_queue) o->max_queue = DEFAULT_QUEUE;
    if (o->max_batch < 1 || o->max_batch > 4096)
        return status_fail(ST_INVALID, "--max-batch %d: it must be 1 to 4096", o->max_batch);
    if (o->prefill_chunk < 1 || o->prefill_chunk > 1 << 20)
        return status_fail(ST_INVALID, "a prefill chunk of %d tokens: it must be 1 to %d",
                           o->prefill_chunk, 1 << 20);
    if (o->block_size < 1 || o->block_size > 1024)
        return status_fail(ST_INVALID, "KV blocks of %d tokens: they must hold 1 to 1024",
                           o->block_size);
    if (o->max_context < 0 || o->max_queue < 0 || o->kv_bytes < 0)
        return status_fail(ST_INVALID, "--max-context, the queue and --kv-memory cannot be negative");
    if (!(o->kv_percent >= 0 && o->kv_percent <= 100))
        return status_fail(ST_INVALID, "--kv-memory %g%%: it must be 0%% to 100%%", o->kv_percent);
    if (!o->bridge_path || !o->bridge_path[0])
        return status_fail(ST_INVALID, "--bridge: a path is needed");
    if (!o->socket_path || !o->socket_path[0])
        return status_fail(ST_INVALID, "--socket: a path is needed");
    return ST_OK;
}

static void engine_release(struct engine *e)
{
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    model_config_free(e->config);
    free(e);
}

static enum status start_thread(struct engine *e)
{
    // Signals belong to the main thread's loop; the engine's children (OpenMP) inherit this mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(&e->thread, NULL, engine_main, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return status_fail(ST_NO_MEMORY, "the engine's thread cannot be started: %s", strerror(error));
    return ST_OK;
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
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&e->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&e->lock, NULL);
    CHECK(check_options(&e->options));
    CHECK(read_policy(options->kv_policy, &e->policy));
    CHECK(model_config_load(options->model_folder, &e->config));
    CHECK(start_thread(e));
    pthread_mutex_lock(&e->lock);
    while (!e->opened) pthread_cond_wait(&e->changed, &e->lock);
    st = e->open_status;
    pthread_mutex_unlock(&e->lock);
    if (st != ST_OK) {
        pthread_join(e->thread, NULL);
        status_fail(st, "%s", e->open_message);
        goto out;
    }
    *ret = e;
    return ST_OK;
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
    wake(e);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    engine_release(e);
}

// ---- other threads: questions --------------------------------------------------------------------------

const struct model_config *engine_config(const struct engine *e) { return e->config; }
const char *engine_bridge_path(const struct engine *e) { return e->options.bridge_path; }

int engine_max_context(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    int max_context = e->max_context;
    pthread_mutex_unlock(&e->lock);
    return max_context;
}

static struct weights_owner *owner_of(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    struct weights_owner *owner = e->owner;
    pthread_mutex_unlock(&e->lock);
    return owner;
}

const struct weights *engine_weights(struct engine *e)
{
    struct weights_owner *owner = owner_of(e);
    return owner ? weights_owner_weights(owner) : NULL;
}

struct control *engine_control(struct engine *e)
{
    struct weights_owner *owner = owner_of(e);
    return owner ? weights_owner_control(owner) : NULL;
}

void engine_stats(struct engine *e, struct engine_stats *ret)
{
    pthread_mutex_lock(&e->lock);
    *ret = e->stats;
    pthread_mutex_unlock(&e->lock);
}

// ---- other threads: requests ---------------------------------------------------------------------------

static enum status check_ids(const struct model_config *config, const char *what, const int32_t *ids,
                             int n)
{
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= config->vocab_size)
            return status_fail(ST_INVALID, "%s %d is %d, outside the vocabulary of %d tokens", what, i,
                               (int)ids[i], config->vocab_size);
    return ST_OK;
}

static enum status check_sampling(const struct model_config *config, const struct sampling *s)
{
    if (s->max_tokens < 1)
        return status_fail(ST_INVALID, "max_tokens is %d; it must be at least 1", s->max_tokens);
    if (!(s->temperature >= 0) || isinf(s->temperature))
        return status_fail(ST_INVALID, "temperature is %g; it must be 0 or more", s->temperature);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return status_fail(ST_INVALID, "top_p is %g; it must be above 0 and at most 1", s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return status_fail(ST_INVALID, "min_p is %g; it must be 0 to 1", s->min_p);
    if (s->top_k < 0)
        return status_fail(ST_INVALID, "top_k is %d; it must be 0 (off) or more", s->top_k);
    if (s->logprobs > SAMPLER_MOST_TOP || s->logprobs > config->vocab_size)
        return status_fail(ST_INVALID, "logprobs is %d; at most %d can be listed", s->logprobs,
                           SAMPLER_MOST_TOP);
    const int most = (int)(sizeof s->stop_ids / sizeof s->stop_ids[0]);
    if (s->n_stop_ids < 0 || s->n_stop_ids > most)
        return status_fail(ST_INVALID, "%d stop token ids; at most %d are taken", s->n_stop_ids, most);
    return check_ids(config, "stop token id", s->stop_ids, s->n_stop_ids);
}

// Under the lock.
static enum status check_state(const struct engine *e, const struct request *r)
{
    const char *detail = e->stats.state_detail;
    if (e->stopping) return status_fail(ST_BUSY, "the server is shutting down");
    switch (e->stats.state) {
    case ENGINE_LOADING: return status_fail(ST_BUSY, "the model is still being loaded");
    case ENGINE_TORN: return status_fail(ST_TORN, "%s; try again in a moment", detail);
    case ENGINE_FAILED: return status_fail(ST_DEVICE, "the engine has failed: %s", detail);
    default: break;
    }
    // Fitting the context is fitting the KV pool: executor_new() saw to it that one longest sequence
    // fits.
    const struct sampling *s = &r->sampling;
    if ((int64_t)r->n_prompt + s->max_tokens > e->max_context)
        return status_fail(ST_INVALID,
                           "the prompt's %d tokens and max_tokens %d are over the context of %d "
                           "tokens; shorten the prompt or ask for fewer tokens",
                           r->n_prompt, s->max_tokens, e->max_context);
    const int most = e->options.max_batch + e->options.max_queue;
    if (s->n > most)
        return status_fail(ST_INVALID, "n is %d; this server holds at most %d samples", s->n, most);
    if (e->n_inside + s->n > most)
        return status_fail(ST_BUSY, "the queue is full: %d samples are running or waiting, at most %d "
                           "are taken; try again later", e->n_inside, most);
    return ST_OK;
}

enum status engine_submit(struct engine *e, struct request *r)
{
    enum status st = check_ids(e->config, "prompt token", r->prompt, r->n_prompt);
    if (st == ST_OK) st = check_sampling(e->config, &r->sampling);
    if (st != ST_OK) return st;
    const int64_t now_ns = clock_now_ns();
    pthread_mutex_lock(&e->lock);
    CHECK(check_state(e, r));
    CHECK(request_prepare(r, e->block_size));
    for (int i = 0; i < r->sampling.n; i++) r->samples[i].queued_ns = now_ns;
    r->next = NULL;
    *e->inbox_end = r;
    e->inbox_end = &r->next;
    e->n_inside += r->sampling.n;
    wake(e);
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
    wake(e);
    pthread_mutex_unlock(&e->lock);
}

// ---- other threads: commands -----------------------------------------------------------------------------

enum status engine_pause(struct engine *e, int timeout_ms)
{
    enum status st = ST_OK;
    const int64_t deadline_ns = clock_deadline_ns(timeout_ms);
    const struct timespec until = {.tv_sec = deadline_ns / NS_PER_S, .tv_nsec = deadline_ns % NS_PER_S};
    pthread_mutex_lock(&e->lock);
    e->pause_wanted = true;
    wake(e);
    while (!e->paused && !e->stopping && e->stats.state != ENGINE_FAILED) {
        if (clock_now_ns() >= deadline_ns) break;
        pthread_cond_timedwait(&e->changed, &e->lock, &until);
    }
    if (!e->paused) {
        e->pause_wanted = false;
        st = status_fail(ST_TIMEOUT, "the engine did not pause within %d ms", timeout_ms);
    }
    pthread_mutex_unlock(&e->lock);
    return st;
}

enum status engine_resume(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->pause_wanted = false;
    wake(e);
    pthread_mutex_unlock(&e->lock);
    return ST_OK;
}

static enum status queue_command(struct engine *e, const struct command *wanted)
{
    enum status st = ST_OK;
    struct command *c = malloc(sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "no memory for a command");
    *c = *wanted;
    c->next = NULL;
    pthread_mutex_lock(&e->lock);
    if (e->stopping)
        st = status_fail(ST_BUSY, "the server is shutting down");
    else if (e->stats.state == ENGINE_LOADING)
        st = status_fail(ST_BUSY, "the model is still being loaded");
    else if (e->stats.state == ENGINE_FAILED)
        st = status_fail(ST_DEVICE, "the engine has failed: %s", e->stats.state_detail);
    if (st == ST_OK) {
        *e->commands_end = c;
        e->commands_end = &c->next;
        wake(e);
    }
    pthread_mutex_unlock(&e->lock);
    if (st != ST_OK) free(c);
    return st;
}

enum status engine_reload(struct engine *e, const char *folder,
                          void (*done)(void *context, enum status, const char *message, uint64_t version),
                          void *context)
{
    struct command c = {.kind = COMMAND_RELOAD, .context = context, .reload_done = done};
    c.folder = strdup(folder);
    if (!c.folder) return status_fail(ST_NO_MEMORY, "no memory for a command");
    enum status st = queue_command(e, &c);
    if (st != ST_OK) free(c.folder);
    return st;
}

enum status engine_bridge_facts(struct engine *e, bool checksums,
                                void (*done)(void *context, const struct engine_bridge_facts *),
                                void *context)
{
    const struct command c = {
        .kind = COMMAND_FACTS, .context = context, .checksums = checksums, .facts_done = done};
    return queue_command(e, &c);
}
