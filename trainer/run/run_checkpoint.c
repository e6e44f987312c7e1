/* run_checkpoint.c: when a run saves, and what, and how it is taken up again. All its ranks write a
 * checkpoint together, of which rank 0 writes the folder and the others give it their parts. The
 * main thread.
 *
 * What a run depends on, beyond its options, is in trainer_state.json: the step, the next example,
 * the seed, the curriculum, the best evaluation and what it was of, what the run started from, and
 * a digest of the data. A step whose evaluation did not come to its end (the server was gone) keeps
 * its line there, and it is evaluated first when the run goes on.
 *
 * Taking a run up with another data set, seed or --freeze would silently be another run, and is
 * refused. Evaluations of other prompts or by another reward cannot be compared: there the best is
 * looked for anew. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "trainer/learn/learner.h"
#include "trainer/rollout/rollout_queue.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/run.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIGEST_ROOM 24 // of a data set's digest as text

// ---- what is saved ------------------------------------------------------------------------------

// The digest goes as text: JSON numbers do not hold 64 bits everywhere.
static const char *digest_of(const struct dataset *data, char ret[DIGEST_ROOM])
{
    snprintf(ret, DIGEST_ROOM, "%016" PRIx64, data->digest);
    return ret;
}

// What the scores of evaluations depend on beside the weights. New reference; NULL: no memory.
static json_t *evaluation_of(const struct run *run)
{
    const struct train_config *c = run->config;
    char digest[DIGEST_ROOM];
    if (run->given)
        return json_pack("{s:s, s:I}", "data_digest", digest_of(run->eval_data, digest), "limit",
                         (json_int_t)c->eval_limit);
    json_t *of = json_pack("{s:s, s:s, s:I, s:s, s:s?, s:s?, s:f, s:I}", "metric", run->best_metric,
                           "data_digest", digest_of(run->eval_data, digest), "limit",
                           (json_int_t)c->eval_limit, "reward", c->reward.names, "reward_weights",
                           c->reward.weights, "reward_pattern", c->reward.pattern, "length_target",
                           c->reward.length_target, "max_completion_length",
                           (json_int_t)c->sampling.max_tokens);
    // Only where they are used: checkpoints of before have none of them.
    const struct {
        const char *name;
        bool used;
        double value;
    } newer[] = {
        {"num_generations", c->num_generations_eval > 1, (double)c->num_generations_eval},
        {"temperature", c->eval_temperature > 0, c->eval_temperature},
        {"overlong_buffer", c->reward.overlong_buffer > 0, (double)c->reward.overlong_buffer},
        {"repetition_ngram", strstr(c->reward.names, "repetition") != NULL,
         (double)c->reward.repetition_ngram},
    };
    bool ok = of != NULL;
    for (size_t i = 0; i < sizeof newer / sizeof *newer; i++)
        if (ok && newer[i].used)
            ok = json_object_set_new(of, newer[i].name, json_real(newer[i].value)) == 0;
    if (ok) return of;
    json_decref(of);
    return NULL;
}

// New reference; NULL: no memory.
static json_t *run_state(struct run *run, bool interim)
{
    const struct train_config *c = run->config;
    const struct entropy_state *e = &run->entropy;
    char digest[DIGEST_ROOM];
    json_t *state = json_pack(
        "{s:I, s:I, s:I, s:I, s:b, s:b, s:o, s:o, s:O*, s:O*}", "step", (json_int_t)run->step,
        "data_index", (json_int_t)curriculum_taken(run->curriculum), "num_tokens",
        (json_int_t)run->num_tokens, "skipped_updates", (json_int_t)run->skipped, "interim",
        interim, "evaluation_due", run->line && run->evaluation_due, "best",
        best_to_json(&run->best), "curriculum", curriculum_to_json(run->curriculum), "line",
        run->line, "start", run->start);
    // what must not change while a run goes on: check_same_run()
    const enum quantization q = run->mapped.model->quantization;
    const enum kv_cache kv = run->mapped.model->kv_cache;
    json_t *same = json_pack(
        "{s:s*, s:I, s:s, s:s*, s:s*, s:s*, s:s, s:s}", "command",
        run->given ? run->task->command : NULL, "seed", (json_int_t)c->seed, "data_digest",
        digest_of(run->data, digest), "freeze", c->learner.freeze, "quantization",
        q ? quantization_names[q] : NULL, "kv_cache_dtype", kv ? kv_cache_names[kv] : NULL,
        "version", COMMONWEIGHT_VERSION, "device", device_name(bridge_device(run->mapped.bridge)));
    bool ok = state && same && json_object_update(state, same) == 0;
    json_decref(same);
    if (run->eval_data && !run->best_of) run->best_of = evaluation_of(run);
    if (ok && (run->eval_data || run->best_of))
        ok = json_object_set(state, "best_of", run->best_of) == 0;
    if (ok && run->scoring->latency)
        ok = json_object_set_new(state, "latency_model", latency_model_to_json(&run->latency)) == 0;
    if (ok && run->queue) ok = json_object_set_new(state, "orders", run_orders(run)) == 0;
    if (ok && c->entropy.adaptive)
        ok = json_object_set_new(
                 state, "entropy",
                 json_pack("{s:f, s:o}", "coef", e->coef, "last", json_finite(e->last))) == 0;
    if (ok) return state;
    json_decref(state);
    return NULL;
}

// ---- written by all ranks -----------------------------------------------------------------------

// This rank's parts of what rank 0 writes, in its order; of the weights where it holds another
// shard of rank 0's server.
static enum status give_parts(const struct run *run, const struct model_folder *m)
{
    enum status st = ST_OK;
    if (!m) return ST_OK;
    if (run->ranks.shards && comm_rank(run->ranks.copies) == 0)
        CHECK(weights_save_part(m->adapter ? m->adapter->weights : m->weights,
                                bridge_device(run->mapped.bridge)));
    if (m->optimizer && optimizer_steps(m->optimizer) > 0)
        CHECK(optimizer_save(m->optimizer, NULL));
    CHECK(give_parts(run, m->draft));
    st = give_parts(run, m->reference);
out:
    return st;
}

enum status run_write_model(const struct run *run, const char *folder, const struct model_folder *m)
{
    return train_ranks_lead(&run->ranks)
               ? model_folder_write(folder, bridge_device(run->mapped.bridge), m)
               : give_parts(run, m);
}

// ret_folder: on every rank what rank 0 has written.
static enum status write_folder(const struct run *run, const struct model_folder *m,
                                char ret_folder[PATH_ROOM])
{
    const struct saved *s = &run->saved;
    const struct checkpoint_others others = {
        .best_step = run->best.step >= 0 ? &run->best.step : NULL,
        .replaced_step = s->interim_step >= 0 ? &s->interim_step : NULL,
        .keep_start = run->resolved.has_reference,
        .keep = (int)run->config->saving.save_total_limit};
    enum status st;
    ret_folder[0] = '\0';
    if (train_ranks_lead(&run->ranks))
        CHECK(checkpoint_write(run->folder, bridge_device(run->mapped.bridge), m, &others,
                               ret_folder));
    else
        CHECK(give_parts(run, m));
    st = train_ranks_agree(&run->ranks, ret_folder, PATH_ROOM);
out:
    if (st != ST_OK && s->step >= 0 && s->step < run->step)
        return status_context(st,
                              "checkpoint of step %" PRId64 " (that of step %" PRId64
                              " is whole; --resume goes on from it)",
                              run->step, s->step);
    return status_context(st, "checkpoint of step %" PRId64, run->step);
}

enum status run_save(struct run *run, bool interim)
{
    enum status st = ST_OK;
    char folder[PATH_ROOM] = "";
    const int64_t start_ns = clock_now_ns();
    struct learner *l = run->learner;
    struct model_folder model = mapped_folder(&run->mapped);
    struct model_folder draft = {.weights = run->mapped.draft,
                                 .source_folder = run->mapped.draft_folder},
                        reference = {.weights = learner_info(l)->reference,
                                     .as = run->mapped.policy->dt,
                                     .source_folder = run->mapped.model_folder};
    if (run->saved.step == run->step || !run->folder[0]) return ST_OK;
    phase_timers_lap(&run->phases, PHASE_LOG);
    model.optimizer = learner_info(l)->optimizer;
    if (run->mapped.draft) {
        draft.as = run->mapped.draft->dt;
        draft.optimizer = learner_info(learner_info(l)->draft)->optimizer;
        model.draft = &draft;
    }
    if (run->config->sync_ref_model) model.reference = &reference;
    if (model.adapter) model.adapter_name = run->config->lora.name;
    if (!(model.state = run_state(run, interim))) FAIL(ST_NO_MEMORY, "no memory for a checkpoint");
    CHECK(write_folder(run, &model, folder));
    run->saved = (struct saved){run->step, interim ? run->step : -1, clock_now_ns(), false};
    log_debug("step %" PRId64 ": checkpoint %s written in %.2f s", run->step, folder,
              clock_ms_since(start_ns) / 1e3);
    // What the server restores should this process die in the middle of an update.
    CHECK(control_set_snapshot(mapped_control(&run->mapped), folder));
    // up to the first step whose order is not wholly learned from
    CHECK(journal_forget(run->folder,
                         run->queue ? run->ordered - rollout_queue_count(run->queue) : run->step));
out:
    run->saved.failed = st != ST_OK;
    json_decref(model.state);
    phase_timers_lap(&run->phases, PHASE_CHECKPOINT);
    return st;
}

// ---- when -------------------------------------------------------------------------------------

bool run_keeps(const struct run *run)
{
    return step_due(run->step, run->config->saving.save_steps, run->total_steps) ||
           run->best.step == run->step;
}

enum status run_save_if_due(struct run *run)
{
    const double every = run->config->saving.save_minutes;
    bool interim = every > 0 && clock_ms_since(run->saved.ns) / 60e3 >= every;
    enum status st = ST_OK;
    if (run_keeps(run)) return run_save(run, false);
    if (every > 0) st = train_ranks_agree(&run->ranks, &interim, sizeof interim); // clocks differ
    return st == ST_OK && interim ? run_save(run, true) : st;
}

static enum status save_remains(struct run *run)
{
    enum status st;
    // Between two of a step's updates moments and weights belong together, but to no step.
    const bool within = mapped_version(&run->mapped) != run->step_version;
    if (within && run->config->exact) {
        log_warn("the error came between two updates of step %" PRId64
                 ", which are not saved: --exact goes on from the checkpoint of step %" PRId64,
                 run->step + 1, run->saved.step);
        return ST_OK;
    }
    stop_saving(run->stop);
    CHECK(run_save(run, true));
    log_info("what was learned is saved: %s/checkpoints/step-%" PRId64 "%s", run->folder, run->step,
             within ? ", with the first of the next step's updates" : "");
out:
    return st;
}

void run_save_remains(struct run *run, enum status why)
{
    const struct control *control = mapped_control(&run->mapped);
    if (run->step == 0 || run->step == run->saved.step || run->saved.failed || !run->folder[0])
        return;
    char *sentence = strdup(status_message());
    log_progress_end();
    if (run->ranks.all)
        log_warn("what was learned since the checkpoint of step %" PRId64
                 " is not saved: that takes all ranks; --resume goes on from it",
                 run->saved.step);
    else if (!control_as_left(control))
        log_warn("what was learned since the checkpoint of step %" PRId64
                 " is not saved: the weights are not as this run left them",
                 run->saved.step);
    else if (save_remains(run) != ST_OK)
        log_error("%s", status_message());
    status_fail(why, "%s", sentence ? sentence : "the run ended by an error");
    free(sentence);
}

// ---- taken up again -----------------------------------------------------------------------------

// ST_MISMATCH names what `state`, of the checkpoint in `folder`, has otherwise.
// plain: of a state that does not say.
static enum status check_same_numbers(const char *folder, const json_t *state, const char *key,
                                      const char *option, const char *now, const char *plain)
{
    const char *old = json_string_value(json_object_get(state, key));
    if (!old) old = plain;
    if (strcmp(now, old) == 0) return ST_OK;
    return status_fail(
        ST_MISMATCH,
        "%s was made on a server with --%s %s, and this one has %s, which is another "
        "policy; start it as it was, or begin another run from %s",
        folder, option, old, now, folder);
}

static enum status check_same_run(const struct run *run, const char *folder, const json_t *state)
{
    const struct train_config *c = run->config;
    const char *now = run->task->command, *freeze = c->learner.freeze,
               *device = device_name(bridge_device(run->mapped.bridge)),
               *command = json_string_value(json_object_get(state, "command")),
               *old_digest = json_string_value(json_object_get(state, "data_digest")),
               *old_freeze = json_string_value(json_object_get(state, "freeze")),
               *old_adapter = json_string_value(json_object_get(state, ADAPTER_STATE)),
               *old_device = json_string_value(json_object_get(state, "device")),
               *quantization = quantization_names[run->mapped.model->quantization],
               *kv_cache = kv_cache_names[run->mapped.model->kv_cache];
    const json_int_t seed = json_integer_value(json_object_get(state, "seed"));
    char digest[DIGEST_ROOM];
    enum status st = ST_OK;
    if (!command) command = "train";
    if (strcmp(command, now) != 0)
        FAIL(ST_MISMATCH,
             "%s is of a run of cw-trainer %s, not of %s: go on with that, or begin another run "
             "from it (%s)",
             folder, command, now, run->given ? "--model" : "--start-from");
    if (!old_digest || strcmp(digest_of(run->data, digest), old_digest) != 0)
        FAIL(ST_MISMATCH,
             "%s was made with another content of %s; take that one or another --run-dir", folder,
             run->data->path);
    if (seed != c->seed)
        FAIL(ST_MISMATCH,
             "%s was made with --seed %" JSON_INTEGER_FORMAT "; take that one or another --run-dir",
             folder, seed);
    if (strcmp(freeze ? freeze : "", old_freeze ? old_freeze : "") != 0)
        FAIL(ST_MISMATCH,
             "%s was made with --freeze \"%s\", and what is trained cannot change within a run; "
             "take that, or begin another run from %s",
             folder, old_freeze ? old_freeze : "", folder);
    CHECK(check_same_numbers(folder, state, "quantization", "quantization", quantization,
                             quantization_names[0]));
    CHECK(check_same_numbers(folder, state, "kv_cache_dtype", "kv-cache-dtype", kv_cache,
                             kv_cache_names[0]));
    if (!old_adapter != !run->mapped.adapter)
        FAIL(ST_MISMATCH, "%s was made %s --lora-r, and what is trained cannot change within a run",
             folder, old_adapter ? "with" : "without");
    if (c->exact && old_device && strcmp(device, old_device) != 0)
        FAIL(ST_MISMATCH,
             "--exact: %s was made on \"%s\", and this is \"%s\", whose sums have another order; "
             "set OMP_NUM_THREADS as it was, or leave --exact away",
             folder, old_device, device);
    // here, so that what differs is named before the optimizer's tensors are
    if (!run->mapped.adapter) return ST_OK;
    CHECK(adapter_check(run->mapped.adapter, folder));
    st = adapter_base_check(folder, run->mapped.base);
out:
    return st;
}

static enum status resume_best(struct run *run, const char *folder, const json_t *state)
{
    enum status st;
    json_t *best_of = json_object_get(state, "best_of");
    const char *metric = json_string_value(json_object_get(best_of, "metric"));
    CHECK(best_from_json(folder, json_object_get(state, "best"), &run->best));
    if (best_of && !run->given && !metric) { // of before it could be chosen
        metric = reward_info(run->reward)->accuracy_term >= 0 ? "accuracy" : "reward";
        json_object_set_new(best_of, "metric", json_string(metric));
    }
    if (metric && !run->config->best_metric) run->best_metric = metric;
    run->best_of = run->eval_data ? evaluation_of(run) : json_incref(best_of);
    if (run->eval_data && !run->best_of) FAIL(ST_NO_MEMORY, "no memory to resume %s", folder);
    metric = json_string_value(json_object_get(run->best_of, "metric")); // which lives on
    if (metric) run->best_metric = metric;
    if (run->best.step < 0 || !best_of || json_equal(run->best_of, best_of)) return ST_OK;
    log_warn("the evaluations until now were of other held-out prompts, or by another reward or "
             "metric: their best, step %" PRId64 ", is not compared with those to come",
             run->best.step);
    run->best = BEST_NONE;
    if (run->given || run->config->best_metric) return ST_OK;
    run->best_metric = "reward"; // as a new run, whose reward may have no other
    if (json_object_set_new(run->best_of, "metric", json_string(run->best_metric)) != 0)
        FAIL(ST_NO_MEMORY, "no memory to resume %s", folder);
out:
    return st;
}

struct restore {
    struct run *run;
    const char *folder, *draft_folder;
};

static enum status load_weights(void *context)
{
    struct restore *r = context;
    struct device *dev = bridge_device(r->run->mapped.bridge);
    control_set_origin(bridge_control(r->run->mapped.bridge), r->folder);
    enum status st = r->run->mapped.adapter ? adapter_load(r->run->mapped.adapter, dev, r->folder)
                                            : weights_load(r->run->mapped.policy, dev, r->folder);
    return st == ST_OK && r->draft_folder ? weights_load(r->run->mapped.draft, dev, r->draft_folder)
                                          : st;
}

enum status run_load_weights(struct run *run, const char *folder, const char *draft_folder)
{
    struct restore restore = {run, folder, draft_folder};
    struct publish_times times;
    enum status st;
    CHECK(run->mapped.adapter ? adapter_check(run->mapped.adapter, folder)
                              : weights_check(run->mapped.policy, folder));
    if (draft_folder) CHECK(weights_check(run->mapped.draft, draft_folder));
    // First, so that a death in the middle of this very update is repaired from it as well.
    CHECK(control_set_snapshot(mapped_control(&run->mapped), folder));
    pthread_mutex_lock(stop_publish_lock(run->stop));
    st = bridge_publish(run->mapped.bridge, (int64_t)(run->config->quiesce_timeout * 1e3),
                        load_weights, &restore, &times);
    pthread_mutex_unlock(stop_publish_lock(run->stop));
out:
    return st;
}

enum status run_resume(struct run *run, const char *folder)
{
    enum status st;
    struct checkpoint c = {0};
    char draft_folder[PATH_ROOM] = "";
    CHECK(checkpoint_read(folder, &c));
    CHECK(check_same_run(run, folder, c.state));
    const json_t *latency = json_object_get(c.state, "latency_model"),
                 *curriculum = json_object_get(c.state, "curriculum"),
                 *entropy = json_object_get(c.state, "entropy"),
                 *last_entropy = json_object_get(entropy, "last");
    if (run->scoring->latency && latency) CHECK(latency_model_from_json(latency, &run->latency));
    CHECK(status_context(curriculum_from_json(run->curriculum, curriculum, c.data_index), "%s",
                         folder));
    CHECK(resume_best(run, folder, c.state));
    CHECK(checkpoint_load_optimizer(folder, c.optimizer_steps,
                                    learner_info(run->learner)->optimizer));
    const bool held = c.draft_optimizer_steps >= 0;
    if (run->mapped.draft && !held)
        log_info("%s holds no draft model: it starts as the server serves it", folder);
    if (!run->mapped.draft && held)
        log_warn("%s holds a trained draft model, and the server keeps the one it serves; "
                 "--train-draft goes on with it",
                 folder);
    if (run->mapped.draft && held) {
        CHECK(path_put(draft_folder, folder, DRAFT_FOLDER));
        CHECK(
            checkpoint_load_optimizer(draft_folder, c.draft_optimizer_steps,
                                      learner_info(learner_info(run->learner)->draft)->optimizer));
    }
    run->start = json_incref(json_object_get(c.state, "start"));
    CHECK(run_resume_reference(run, folder));
    CHECK(run_load_weights(run, folder, draft_folder[0] ? draft_folder : NULL));
    run->step = c.step;
    CHECK(run_resume_orders(run, json_object_get(c.state, "orders")));
    run->saved.step = c.step;
    run->saved.interim_step = json_is_true(json_object_get(c.state, "interim")) ? c.step : -1;
    run->line = json_incref(json_object_get(c.state, "line"));
    run->evaluation_due = json_is_true(json_object_get(c.state, "evaluation_due"));
    run->skipped = c.skipped_updates;
    run->num_tokens = c.num_tokens;
    if (entropy && run->config->entropy.adaptive) { // else it begins with the option's
        run->entropy.coef = json_number_value(json_object_get(entropy, "coef"));
        if (json_is_number(last_entropy)) run->entropy.last = json_number_value(last_entropy);
    }
    if (run->given)
        log_info("resumed at step %" PRId64 " from %s", run->step, folder);
    else
        log_info("resumed at step %" PRId64 " from %s; its weights are served, version %" PRIu64,
                 run->step, folder, mapped_version(&run->mapped));
out:
    json_decref(c.state);
    return status_context(st, "resuming");
}

enum status run_serve_best(struct run *run)
{
    enum status st;
    char folder[PATH_ROOM], draft_folder[PATH_ROOM];
    if (run->best.step < 0 || run->best.step == run->step) return ST_OK;
    CHECK(checkpoint_find(run->folder, "best", folder));
    if (!folder[0])
        FAIL(ST_NOT_FOUND, "%s/checkpoints/best: there is no such checkpoint any more",
             run->folder);
    CHECK(path_put(draft_folder, folder, DRAFT_FOLDER));
    CHECK(run_load_weights(run, folder,
                           run->mapped.draft && file_exists(draft_folder) ? draft_folder : NULL));
    log_info("%s of step %" PRId64 ", the best",
             run->given ? "the weights are those" : "serving the weights", run->best.step);
out:
    return status_context(st, "--load-best-model-at-end");
}
