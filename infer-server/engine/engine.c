/* engine.c: the engine as other threads see it: life, questions, requests, commands. Its own thread
 * is engine_thread.c.
 *
 * `lock` guards what both sides touch: the inbox, the command list, the snapshot of the statistics,
 * the wishes to pause and to stop, and what appears once the model is loaded. It is held for a few
 * instructions only; nobody waits for the device under it. */
#include "infer-server/engine/engine.h"
#include "common/base/clock.h"
#include "infer-server/engine/draft_folder.h"
#include "infer-server/engine/engine_thread.h"
#include "infer-server/engine/sampler.h"
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_BATCH 64
#define DEFAULT_CHUNK 512
#define DEFAULT_BLOCK 16
#define DEFAULT_QUEUE 1024

// Rings whatever the thread sleeps on. Under the lock.
static void wake(struct engine *e)
{
    pthread_cond_broadcast(&e->changed);
    if (e->owner) control_ring(weights_owner_control(e->owner));
}

// ---- life --------------------------------------------------------------------------------------

const char *const kv_policy_names[] = {"keep", "recompute", "drain", NULL};

static enum status check_choice(const struct engine_options *o, struct speculative_choice choice,
                                const char *where)
{
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (choice.k[m] < 0 || choice.k[m] > SPECULATIVE_MOST)
            return status_fail(ST_INVALID, "%s: K is %d; it must be 1 to %d", where, choice.k[m],
                               SPECULATIVE_MOST);
    if (choice.k[SPECULATIVE_DRAFT_MODEL] && !o->draft_folder)
        return status_fail(
            ST_INVALID,
            "%s: draft_model needs a draft model, and the server was started without "
            "one; start it with --draft DIR",
            where);
    return ST_OK;
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
        return status_fail(ST_INVALID,
                           "--max-context, the queue and --kv-memory cannot be negative");
    if (!(o->kv_percent >= 0 && o->kv_percent <= 100))
        return status_fail(ST_INVALID, "--kv-memory %g%%: it must be 0%% to 100%%", o->kv_percent);
    enum status st = check_choice(o, o->speculative, "--speculative");
    if (st != ST_OK) return st;
    if (!o->bridge_path || !o->bridge_path[0])
        return status_fail(ST_INVALID, "--bridge: a path is needed");
    if (!o->socket_path || !o->socket_path[0])
        return status_fail(ST_INVALID, "--socket: a path is needed");
    return ST_OK;
}

// Once for all who compute with these weights: the bridge file tells it to trainers.
static void choose_rope(struct engine *e)
{
    const int context = executor_wished_context(e->config, e->options.max_context);
    struct model_config *draft = e->draft_config;
    e->config->rope_context = context;
    if (draft)
        draft->rope_context = context < draft->max_positions ? context : draft->max_positions;
}

static void engine_release(struct engine *e)
{
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    model_config_free(e->config);
    model_config_free(e->draft_config);
    free(e);
}

static enum status start_thread(struct engine *e)
{
    // Signals belong to the main thread's loop; the engine's children (OpenMP) inherit this mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(&e->thread, NULL, engine_thread, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return status_fail(ST_NO_MEMORY, "the engine's thread cannot be started: %s",
                           strerror(error));
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
    CHECK(model_config_load(options->model_folder, &e->config));
    if (options->draft_folder)
        CHECK(draft_folder_load(options->draft_folder, options->model_folder, e->config,
                                &e->draft_config));
    choose_rope(e);
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

// ---- questions ---------------------------------------------------------------------------------

const struct model_config *engine_config(const struct engine *e)
{
    return e->config;
}
const char *engine_bridge_path(const struct engine *e)
{
    return e->options.bridge_path;
}

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
    return owner ? weights_owner_weights(owner, WEIGHTS_POLICY) : NULL;
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

// ---- requests ----------------------------------------------------------------------------------

static enum status check_ids(const struct model_config *config, const char *what,
                             const int32_t *ids, int n)
{
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= config->vocab_size)
            return status_fail(ST_INVALID, "%s %d is %d, outside the vocabulary of %d tokens", what,
                               i, (int)ids[i], config->vocab_size);
    return ST_OK;
}

// How many likeliest tokens can be listed beside one: `most`, or all of a smaller vocabulary.
static enum status check_listed(const struct model_config *config, const char *what, int n,
                                int most)
{
    if (most > config->vocab_size) most = config->vocab_size;
    if (n <= most) return ST_OK;
    return status_fail(ST_INVALID, "%s is %d; at most %d can be listed", what, n, most);
}

static enum status check_adjustments(const struct model_config *config, const struct sampling *s)
{
    if (!(s->repetition_penalty >= 0) || isinf(s->repetition_penalty))
        return status_fail(ST_INVALID, "repetition_penalty is %g; it must be above 0 (1 is off)",
                           s->repetition_penalty);
    if (!isfinite(s->frequency_penalty) || !isfinite(s->presence_penalty))
        return status_fail(ST_INVALID,
                           "frequency_penalty is %g and presence_penalty %g; they must "
                           "be finite",
                           s->frequency_penalty, s->presence_penalty);
    for (int i = 0; i < s->n_logit_bias; i++) {
        const struct token_bias *bias = &s->logit_bias[i];
        enum status st = check_ids(config, "logit_bias: token", &bias->token, 1);
        if (st != ST_OK) return st;
        if (!isfinite(bias->bias))
            return status_fail(ST_INVALID, "logit_bias of token %d is %g; it must be finite",
                               (int)bias->token, bias->bias);
    }
    return check_listed(config, "prompt_logprobs", s->prompt_top, TOP_LOGPROBS_MOST);
}

static enum status check_sampling(const struct model_config *config, const struct sampling *s)
{
    if (s->max_tokens < 0)
        return status_fail(ST_INVALID, "max_tokens is %d; it cannot be negative", s->max_tokens);
    if (!(s->temperature >= 0) || isinf(s->temperature))
        return status_fail(ST_INVALID, "temperature is %g; it must be 0 or more", s->temperature);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return status_fail(ST_INVALID, "top_p is %g; it must be above 0 and at most 1", s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return status_fail(ST_INVALID, "min_p is %g; it must be 0 to 1", s->min_p);
    if (s->top_k < 0)
        return status_fail(ST_INVALID, "top_k is %d; it must be 0 (off) or more", s->top_k);
    const int most = (int)(sizeof s->stop_ids / sizeof s->stop_ids[0]);
    if (s->n_stop_ids < 0 || s->n_stop_ids > most)
        return status_fail(ST_INVALID, "%d stop token ids; at most %d are taken", s->n_stop_ids,
                           most);
    enum status st = check_ids(config, "stop token id", s->stop_ids, s->n_stop_ids);
    if (st == ST_OK) st = check_listed(config, "logprobs", s->logprobs, SAMPLER_MOST_TOP);
    return st == ST_OK ? check_adjustments(config, s) : st;
}

// Under the lock.
static enum status check_state(const struct engine *e, const struct request *r)
{
    const char *detail = e->stats.state_detail;
    if (e->stopping) return status_fail(ST_BUSY, "the server is shutting down");
    switch (e->stats.state) {
    case ENGINE_LOADING:
        return status_fail(ST_BUSY, "the model is still being loaded");
    case ENGINE_TORN:
        return status_fail(ST_TORN, "%s; try again in a moment", detail);
    case ENGINE_FAILED:
        return status_fail(ST_DEVICE, "the engine has failed: %s", detail);
    default:
        break;
    }
    // Fitting the context is fitting the KV pool: executor_new() saw to it that one longest
    // sequence fits.
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
        return status_fail(ST_BUSY,
                           "the queue is full: %d samples are running or waiting, at most %d "
                           "are taken; try again later",
                           e->n_inside, most);
    return ST_OK;
}

enum status engine_submit(struct engine *e, struct request *r)
{
    enum status st = check_ids(e->config, "prompt token", r->prompt, r->n_prompt);
    if (st == ST_OK) st = check_sampling(e->config, &r->sampling);
    if (st == ST_OK) st = check_choice(&e->options, r->sampling.speculative, "speculative");
    if (st != ST_OK) return st;
    const int64_t now_ns = clock_now_ns();
    pthread_mutex_lock(&e->lock);
    st = check_state(e, r);
    pthread_mutex_unlock(&e->lock);
    const uint64_t cache_salt = e->options.prefix_cache_off ? ++e->n_salts : r->sampling.cache_salt;
    if (st == ST_OK) st = request_prepare(r, e->options.block_size, cache_salt);
    if (st != ST_OK) return st;
    for (int i = 0; i < r->sampling.n; i++) r->samples[i].queued_ns = now_ns;
    pthread_mutex_lock(&e->lock);
    CHECK(check_state(e, r)); // memory for thousands of samples takes a while
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

// ---- commands ----------------------------------------------------------------------------------

enum status engine_pause(struct engine *e, int timeout_ms)
{
    enum status st = ST_OK;
    const int64_t deadline_ns = clock_deadline_ns(timeout_ms);
    const struct timespec until = {.tv_sec = deadline_ns / NS_PER_S,
                                   .tv_nsec = deadline_ns % NS_PER_S};
    pthread_mutex_lock(&e->lock);
    const uint64_t resumes = e->resumes;
    e->pause_wanted = true;
    wake(e);
    while (!e->paused && e->resumes == resumes && !e->stopping && e->stats.state != ENGINE_FAILED) {
        if (clock_now_ns() >= deadline_ns) break;
        pthread_cond_timedwait(&e->changed, &e->lock, &until);
    }
    if (e->resumes != resumes) {
        st = status_fail(ST_CANCELLED, "the engine was told to resume before it had paused");
    } else if (!e->paused) {
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
    e->resumes++;
    wake(e);
    pthread_mutex_unlock(&e->lock);
    return ST_OK;
}

bool engine_paused(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    bool paused = e->pause_wanted && e->paused;
    pthread_mutex_unlock(&e->lock);
    return paused;
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

enum status engine_reload(struct engine *e, const char *folder, const char *draft_folder,
                          void (*done)(void *context, enum status, const char *message,
                                       uint64_t version),
                          void *context)
{
    struct command c = {.kind = COMMAND_RELOAD, .context = context, .reload_done = done};
    enum status st;
    c.folder = strdup(folder);
    if (draft_folder) c.draft_folder = strdup(draft_folder);
    if (!c.folder || (draft_folder && !c.draft_folder)) {
        st = status_fail(ST_NO_MEMORY, "no memory for a command");
        goto out;
    }
    CHECK(queue_command(e, &c));
    return ST_OK;
out:
    free(c.folder);
    free(c.draft_folder);
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
