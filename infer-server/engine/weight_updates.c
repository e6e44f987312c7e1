/* weight_updates.c: other weights under a running engine: the trainer's updates, what it left torn,
 * and reloading. Each moves the version, and says what becomes of the keys and values there are.
 * The engine's thread, at step boundaries. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/log.h"
#include "infer-server/engine/engine_thread.h"
#include <stdio.h>

void engine_take_version(struct engine *e, bool recompute)
{
    e->live.weight_version = control_version(weights_owner_control(e->owner));
    scheduler_update(e->executor->scheduler, e->live.weight_version, recompute);
}

// What restored weights lack is told until somebody loads others or trains on from these.
static void note_fallback(struct engine *e, const struct weights_restored *restored)
{
    if (!restored->fault[0]) return;
    snprintf(e->live.weights_warning, sizeof e->live.weights_warning,
             "what was trained is NOT served: the trainer's last snapshot cannot be used (%s); "
             "these are the weights of %s; go on from a good checkpoint (cw-trainer train "
             "--resume) or load one (POST /reload)",
             restored->fault, restored->from);
    log_error("engine: %s", e->live.weights_warning);
}

static void restore(struct engine *e, const char *why)
{
    struct weights_restored restored;
    log_error("engine: weights are torn: %s", why);
    engine_set_state(e, ENGINE_TORN,
                     "an update was cut off in the middle; the weights are being restored");
    const int64_t start_ns = clock_now_ns();
    if (weights_owner_restore(e->owner, &restored) != ST_OK) {
        char message[256];
        snprintf(message, sizeof message, "torn weights cannot be restored: %s", status_message());
        engine_fail(e, message);
        return;
    }
    e->live.restores++;
    engine_take_version(e, true);
    note_fallback(e, &restored);
    engine_set_state(e, ENGINE_OK, "");
    log_info("engine: weights restored from %s in %.0f ms, version %llu", restored.from,
             clock_ms_since(start_ns), (unsigned long long)e->live.weight_version);
}

static void after_writer(struct engine *e, enum control_event event)
{
    const uint64_t version = control_version(weights_owner_control(e->owner));
    if (event == CONTROL_HELD) { // it may go on writing at any time, whatever is done here
        char message[256];
        snprintf(message, sizeof message, "%s; these weights cannot be served any more",
                 status_message());
        engine_fail(e, message);
        return;
    }
    if (event == CONTROL_TORN || (version & 1)) {
        restore(e, "the trainer died or failed in the middle of an update");
        return;
    }
    if (event == CONTROL_WRITER_GONE)
        log_warn("engine: the trainer is gone; its lease was revoked, the weights are whole");
    // A writer that was fenced off moves the number too: the weights are the same, but what was
    // computed under the old number must not pass for the new one's.
    if (version != e->live.weight_version)
        engine_take_version(e, e->options.kv_policy == KV_RECOMPUTE);
}

void engine_serve_writer(struct engine *e)
{
    struct control *control = weights_owner_control(e->owner);
    if (control_quiesce_requested(control)) {
        e->draining = e->options.kv_policy == KV_DRAIN && !e->paused &&
                      scheduler_in_flight(e->executor->scheduler) > 0;
        if (e->draining) return;
        engine_settle(e);
        if (e->live.state == ENGINE_FAILED) return;
        const int64_t start_ns = clock_now_ns();
        enum control_event event = control_grant_quiesce(control);
        if (event == CONTROL_UPDATED) {
            e->live.updates++;
            e->live.last_pause_ms = clock_ms_since(start_ns);
            e->live.weights_warning[0] = 0;
            log_debug("engine: the trainer's update: version %llu, generation paused %.2f ms",
                      (unsigned long long)control_version(control), e->live.last_pause_ms);
        }
        after_writer(e, event);
        return;
    }
    e->draining = false;
    if (clock_ms_since(e->last_check_ns) < ENGINE_IDLE_MS) return;
    e->last_check_ns = clock_now_ns();
    enum control_event event = control_check_writer(control);
    if (event == CONTROL_NONE) return;
    engine_settle(e);
    after_writer(e, event);
}

void engine_reload_weights(struct engine *e, const struct command *c)
{
    char message[512] = "";
    enum status st = weights_owner_reload(e->owner, c->order.folder, c->draft_folder);
    if (st != ST_OK)
        snprintf(message, sizeof message, "%s", status_message());
    else
        e->live.weights_warning[0] = 0;
    if (st == ST_TORN)
        restore(e, message);
    else
        engine_take_version(e, st == ST_OK && e->options.kv_policy != KV_KEEP);
    if (st == ST_OK)
        log_info("engine: weights reloaded from %s%s%s, version %llu", c->order.folder,
                 c->draft_folder ? ", the draft model's from " : "",
                 c->draft_folder ? c->draft_folder : "",
                 (unsigned long long)e->live.weight_version);
    engine_publish(e);
    c->done(c->context, st, message, e->live.weight_version);
}
