/* commands.c: what is asked of a running engine beside requests: a pause, other weights, adapters,
 * info. Any thread queues it; the engine's own carries it out, at a step boundary.
 *
 * LoRA adapters. A new one's id is in the names of the KV blocks computed with it (request.c), so
 * it never finds those of another. Weights that are replaced in place keep the id and move the
 * version, as a trainer's update does. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "infer-server/engine/engine_thread.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- queueing ----------------------------------------------------------------------------------

enum { COMMAND_TEXTS = 5 };

static void list_texts(struct command *c, const char **ret[COMMAND_TEXTS])
{
    const char **texts[COMMAND_TEXTS] = {&c->order.name, &c->order.folder, &c->order.config,
                                         &c->order.copy_of, &c->draft_folder};
    memcpy(ret, texts, sizeof texts);
}

static void command_free(struct command *c)
{
    const char **texts[COMMAND_TEXTS];
    if (!c) return;
    list_texts(c, texts);
    for (int i = 0; i < COMMAND_TEXTS; i++) free((char *)*texts[i]);
    free(c);
}

static enum status queue_command(struct engine *e, const struct command *wanted)
{
    enum status st;
    struct command *c = malloc(sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "no memory for a command");
    *c = *wanted;
    // The texts, which were the caller's, become its own.
    const char **texts[COMMAND_TEXTS];
    bool copied = true;
    list_texts(c, texts);
    for (int i = 0; i < COMMAND_TEXTS; i++)
        if (*texts[i]) copied &= (*texts[i] = strdup(*texts[i])) != NULL;
    if (!copied) FAIL(ST_NO_MEMORY, "no memory for a command");
    pthread_mutex_lock(&e->lock);
    st = engine_check_state(e);
    if (st == ST_OK) {
        *e->commands_end = c;
        e->commands_end = &c->next;
        c = NULL;
        engine_wake(e);
    }
    pthread_mutex_unlock(&e->lock);
out:
    command_free(c);
    return st;
}

enum status engine_reload(struct engine *e, const char *folder, const char *draft_folder,
                          engine_done_fn done, void *context)
{
    const struct command c = {.kind = COMMAND_RELOAD,
                              .context = context,
                              .done = done,
                              .order.folder = folder,
                              .draft_folder = draft_folder};
    return queue_command(e, &c);
}

enum status engine_load_adapter(struct engine *e, const struct adapter_request *order,
                                engine_done_fn done, void *context)
{
    const struct command c = {
        .kind = COMMAND_LOAD_ADAPTER, .context = context, .done = done, .order = *order};
    return queue_command(e, &c);
}

enum status engine_unload_adapter(struct engine *e, const char *name, pid_t writer,
                                  engine_done_fn done, void *context)
{
    const struct command c = {.kind = COMMAND_UNLOAD_ADAPTER,
                              .context = context,
                              .done = done,
                              .order.name = name,
                              .writer = writer};
    return queue_command(e, &c);
}

enum status engine_bridge_info(struct engine *e, bool checksums,
                               void (*done)(void *context, const struct engine_bridge_info *),
                               void *context)
{
    const struct command c = {
        .kind = COMMAND_INFO, .context = context, .checksums = checksums, .info_done = done};
    return queue_command(e, &c);
}

// ---- pause -------------------------------------------------------------------------------------

enum status engine_pause(struct engine *e, int timeout_ms)
{
    enum status st = ST_OK;
    const int64_t deadline_ns = clock_deadline_ns(timeout_ms);
    pthread_mutex_lock(&e->lock);
    const uint64_t resumes = e->resumes;
    e->pause_wanted = true;
    engine_wake(e);
    while (!e->paused && e->resumes == resumes && !e->stopping && e->stats.state != ENGINE_FAILED) {
        if (clock_now_ns() >= deadline_ns) break;
        clock_cond_wait(&e->changed, &e->lock, deadline_ns);
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
    engine_wake(e);
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

// ---- adapters ----------------------------------------------------------------------------------

// What other threads see; counts of those that stay are kept.
static void publish_list(struct engine *e)
{
    const struct adapters *a = weights_owner_adapters(e->owner);
    struct adapter_info list[ADAPTERS_MAX];
    int n = 0;
    pthread_mutex_lock(&e->lock);
    for (int i = 0; i < adapters_max(a); i++) {
        const struct adapter_info *info = adapters_info(a, i);
        if (!info) continue;
        const struct adapter_info *before = engine_adapter(e, &info->ref);
        list[n] = *info;
        if (before) {
            list[n].samples = before->samples;
            list[n].running = before->running;
            list[n].generated_tokens = before->generated_tokens;
        }
        n++;
    }
    memcpy(e->adapter_list, list, (size_t)n * sizeof *list);
    e->n_adapters = n;
    pthread_mutex_unlock(&e->lock);
}

// Of a folder that records another base than this one: a warning, or with --exact a failure.
static enum status check_base(struct engine *e, const char *folder, char *warning, size_t size)
{
    const json_t *base;
    enum status st = weights_owner_base(e->owner, &base);
    if (st == ST_OK) st = adapter_base_check(folder, base);
    if (st != ST_MISMATCH || e->options.exact) return status_context(st, "--exact");
    snprintf(warning, size, "%s", status_message());
    log_warn("engine: %s", warning);
    return ST_OK;
}

static enum status load(struct engine *e, const struct command *c, char *warning, size_t size)
{
    const struct adapters *a = weights_owner_adapters(e->owner);
    const struct adapter_request *o = &c->order;
    const int slot = adapters_find(a, o->name);
    enum status st = ST_OK;
    if (o->folder && (slot < 0 || o->in_place)) CHECK(check_base(e, o->folder, warning, size));
    if (slot < 0) {
        CHECK(weights_owner_add_adapter(e->owner, o));
        executor_use_adapters(e->executor, a);
        if (o->copy_of) // one a step, where a trainer keeps snapshots
            log_debug("engine: adapter '%s': a copy of '%s'", o->name, o->copy_of);
        else
            log_info("engine: adapter '%s': %s%s", o->name, o->folder ? "loaded from " : "made new",
                     o->folder ? o->folder : "");
    } else if (o->in_place && o->folder) {
        CHECK(weights_owner_reload_adapter(e->owner, slot, o->folder));
        engine_take_version(e, e->options.kv_policy != KV_KEEP);
        log_info("engine: adapter '%s': weights replaced from %s, version %llu", o->name, o->folder,
                 (unsigned long long)e->live.weight_version);
    } else if (o->in_place && o->config) {
        CHECK(adapters_check(a, slot, o->config));
    } else {
        st = status_fail(ST_INVALID,
                         "the adapter '%s' has already been loaded; to replace its weights send "
                         "\"load_inplace\": true",
                         o->name);
    }
out:
    return st;
}

// Its name goes at once, so that no request comes to it any more; the rest when the last sample
// with it has ended (engine_free_retired).
static enum status unload(struct engine *e, const struct command *c)
{
    const struct adapters *a = weights_owner_adapters(e->owner);
    const int slot = adapters_find(a, c->order.name);
    if (slot < 0) return status_fail(ST_NOT_FOUND, "there is no adapter '%s'", c->order.name);
    enum status st = weights_owner_retire_adapter(e->owner, slot, c->writer);
    if (st == ST_OK)
        log_line(c->writer ? LOG_DEBUG : LOG_INFO, "engine: adapter '%s' unloaded", c->order.name);
    return st;
}

void engine_free_retired(struct engine *e)
{
    int slots[ADAPTERS_MAX], n = 0;
    pthread_mutex_lock(&e->lock);
    for (int i = e->n_adapters - 1; i >= 0; i--) {
        if (e->adapter_list[i].name[0] || e->adapter_list[i].samples > 0) continue;
        slots[n++] = e->adapter_list[i].ref.index - 1;
        e->adapter_list[i] = e->adapter_list[--e->n_adapters];
    }
    pthread_mutex_unlock(&e->lock);
    if (n > 0) engine_settle(e);
    for (int i = 0; i < n; i++)
        if (weights_owner_remove_adapter(e->owner, slots[i]) != ST_OK)
            engine_fail(e, status_message());
    if (n > 0) executor_use_adapters(e->executor, weights_owner_adapters(e->owner));
}

static void change_adapters(struct engine *e, const struct command *c)
{
    char message[1024] = ""; // of a failure, or a warning
    enum status st = ST_OK;
    if (!weights_owner_adapters(e->owner))
        st = status_fail(ST_UNSUPPORTED,
                         "this server holds no adapters; start it with --max-adapters N, where "
                         "cw-trainer starts it by --server-args");
    else
        st = c->kind == COMMAND_LOAD_ADAPTER ? load(e, c, message, sizeof message) : unload(e, c);
    if (st != ST_OK) snprintf(message, sizeof message, "%s", status_message());
    if (weights_owner_adapters(e->owner)) publish_list(e);
    engine_publish(e);
    if (st == ST_DEVICE || st == ST_TORN) engine_fail(e, message);
    c->done(c->context, st, message, e->live.weight_version);
}

// ---- carrying out ------------------------------------------------------------------------------

static void report_info(struct engine *e, struct command *c)
{
    struct engine_bridge_info info = {.version = e->live.weight_version,
                                      .n_shards = weights_owner_shards(e->owner),
                                      .n_tensors = weights_owner_tensors(e->owner)};
    uint64_t *sums = NULL, *canaries = calloc((size_t)info.n_shards, sizeof *canaries);
    enum status st =
        canaries ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for %d words", info.n_shards);
    if (st == ST_OK && c->checksums) {
        sums = calloc((size_t)info.n_tensors, sizeof *sums);
        if (!sums) st = status_fail(ST_NO_MEMORY, "no memory for %d checksums", info.n_tensors);
        if (st == ST_OK) st = weights_owner_checksums(e->owner, sums);
        if (st == ST_OK) st = weights_owner_base(e->owner, &info.base);
    }
    info.checksums = sums;
    info.canaries = canaries;
    if (st == ST_OK) st = weights_owner_canaries(e->owner, canaries);
    c->info_done(c->context, st == ST_OK ? &info : NULL);
    if (st == ST_DEVICE || st == ST_PEER_GONE) engine_fail(e, status_message());
    free(sums);
    free(canaries);
}

void engine_run_commands(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    const bool any = e->commands || e->paused != e->pause_wanted;
    pthread_mutex_unlock(&e->lock);
    if (!any) return;
    engine_settle(e);
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
        const bool failed = e->live.state == ENGINE_FAILED;
        if ((failed || !e->executor) && c->kind == COMMAND_INFO)
            c->info_done(c->context, NULL);
        else if (failed || !e->executor)
            c->done(c->context, ST_CANCELLED,
                    failed ? e->live.state_detail : "the engine is ending", e->live.weight_version);
        else if (c->kind == COMMAND_RELOAD)
            engine_reload_weights(e, c);
        else if (c->kind != COMMAND_INFO)
            change_adapters(e, c);
        else
            report_info(e, c);
        command_free(c);
        c = next;
    }
}
