/* run_checkpoint.c: when a run saves, and what; all its ranks write a checkpoint together, of which
 * rank 0 writes the folder and the others give it their parts. The main thread.
 *
 * What a run depends on, beyond its options, is in trainer_state.json: the step, the next example,
 * the seed, the curriculum, the best evaluation and what it was of, what the run started from, and
 * a digest of the data. A step whose evaluation did not come to its end (the server was gone) keeps
 * its line there, and it is evaluated first when the run goes on. */
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/learn/learner.h"
#include "trainer/rollout/journal.h"
#include "trainer/rollout/scoring.h"
#include "trainer/run/adapter_folder.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/run.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- what is saved ------------------------------------------------------------------------------

// The digest goes as text: JSON numbers do not hold 64 bits everywhere.
const char *run_digest(const struct dataset *data, char ret[DIGEST_ROOM])
{
    snprintf(ret, DIGEST_ROOM, "%016" PRIx64, data->digest);
    return ret;
}

json_t *run_evaluation_of(const struct run *run)
{
    const struct train_config *c = run->config;
    char digest[DIGEST_ROOM];
    if (run->given)
        return json_pack("{s:s, s:I}", "data_digest", run_digest(run->eval_data, digest), "limit",
                         (json_int_t)c->eval_limit);
    json_t *of = json_pack("{s:s, s:s, s:I, s:s, s:s?, s:s?, s:f, s:I}", "metric", run->best_metric,
                           "data_digest", run_digest(run->eval_data, digest), "limit",
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

static json_t *entropy_state_json(const struct entropy_state *s)
{
    return json_pack("{s:f, s:o}", "coef", s->coef, "last",
                     isfinite(s->last) ? json_real(s->last) : json_null());
}

// What must not change while a run goes on (run_resume.c). New reference; NULL: no memory.
static json_t *unchanging(const struct run *run)
{
    const struct train_config *c = run->config;
    char digest[DIGEST_ROOM];
    json_t *adapter =
        run->mapped.adapter ? adapter_state(c->lora.name, run->mapped.base) : json_object();
    json_t *state = json_pack("{s:s*, s:I, s:s, s:s*, s:s, s:s}", "command",
                              run->given ? run->task->command : NULL, "seed", (json_int_t)c->seed,
                              "data_digest", run_digest(run->data, digest), "freeze",
                              c->learning.freeze, "version", COMMONWEIGHT_VERSION, "device",
                              device_name(bridge_device(run->mapped.bridge)));
    const bool ok = state && adapter && json_object_update(state, adapter) == 0;
    json_decref(adapter);
    if (ok) return state;
    json_decref(state);
    return NULL;
}

static enum status run_state(struct run *run, bool interim, struct checkpoint *ret)
{
    const bool evaluates = run->eval_data != NULL, adapts = run->config->entropy.adaptive,
               models = run->scoring->latency != NULL;
    if (evaluates && !run->best_of) run->best_of = run_evaluation_of(run);
    struct checkpoint c = {
        .step = run->step,
        .data_index = curriculum_taken(run->curriculum),
        .num_tokens = run->num_tokens,
        .skipped_updates = run->skipped,
        .interim = interim,
        .line = json_incref(run->line),
        .evaluation_due = run->line && run->evaluation_due,
        .start = json_incref(run->start),
        .best = best_to_json(&run->best),
        .best_of = json_incref(run->best_of),
        .curriculum = curriculum_to_json(run->curriculum),
        .latency_model = models ? latency_model_to_json(&run->latency) : NULL,
        .entropy = adapts ? entropy_state_json(&run->entropy) : NULL,
        .same = unchanging(run),
    };
    if (c.same && c.best && c.curriculum && (c.best_of || !evaluates) &&
        (c.latency_model || !models) && (c.entropy || !adapts)) {
        *ret = c;
        return ST_OK;
    }
    checkpoint_release(&c);
    return status_fail(ST_NO_MEMORY, "no memory for a checkpoint");
}

// ---- written by all ranks -----------------------------------------------------------------------

// This rank's parts of what rank 0 writes, in its order; of the weights where it holds another
// shard of rank 0's server.
static enum status give_parts(const struct run *run, const struct model_folder *m)
{
    const struct train_ranks *ranks = &run->ranks;
    struct optimizer *optimizers[] = {m->optimizer, m->draft ? m->draft->optimizer : NULL};
    enum status st = ST_OK;
    if (ranks->shards && comm_rank(ranks->copies) == 0)
        CHECK(weights_save_part(m->weights, bridge_device(run->mapped.bridge)));
    for (int i = 0; i < 2; i++)
        if (optimizers[i] && optimizer_steps(optimizers[i]) > 0)
            CHECK(optimizer_save(optimizers[i], NULL));
out:
    return st;
}

// ret_folder: on every rank what rank 0 has written.
static enum status write_folder(const struct run *run, const struct model_folder *m,
                                const struct checkpoint *c, char ret_folder[PATH_ROOM])
{
    const struct saved *s = &run->saved;
    const struct checkpoint_others others = {
        .best_step = run->best.step >= 0 ? &run->best.step : NULL,
        .replaced_step = s->interim_step >= 0 ? &s->interim_step : NULL,
        .keep_start = run->resolved.has_reference,
        .keep = (int)run->config->saving.save_total_limit};
    enum status st;
    char *folder = NULL;
    if (train_ranks_lead(&run->ranks))
        CHECK(checkpoint_write(run->folder, bridge_device(run->mapped.bridge), m, c, &others,
                               &folder));
    else
        CHECK(give_parts(run, m));
    snprintf(ret_folder, PATH_ROOM, "%s", folder ? folder : "");
    st = train_ranks_agree(&run->ranks, ret_folder, PATH_ROOM);
out:
    free(folder);
    if (st != ST_OK && s->step >= 0 && s->step < c->step)
        return status_context(st,
                              "checkpoint of step %" PRId64 " (that of step %" PRId64
                              " is whole; --resume goes on from it)",
                              c->step, s->step);
    return status_context(st, "checkpoint of step %" PRId64, c->step);
}

enum status run_save(struct run *run, bool interim)
{
    enum status st = ST_OK;
    char folder[PATH_ROOM] = "";
    const int64_t start_ns = clock_now_ns();
    struct checkpoint c = {0};
    struct learner *l = run->learner;
    struct model_folder model = mapped_folder(&run->mapped);
    struct model_folder draft = {.weights = run->mapped.draft,
                                 .source_folder = run->mapped.draft_folder},
                        reference = {.weights = learner_info(l)->reference,
                                     .as = run->mapped.policy->dt,
                                     .source_folder = run->mapped.model_folder};
    if (run->saved.step == run->step || !run->folder[0]) return ST_OK;
    spans_lap(&run->spans, SPAN_LOG);
    model.optimizer = learner_optimizer(l);
    if (run->mapped.draft) {
        draft.as = run->mapped.draft->dt;
        draft.optimizer = learner_optimizer(learner_draft(l));
        model.draft = &draft;
    }
    if (run->config->sync_ref_model) model.reference = &reference;
    CHECK(run_state(run, interim, &c));
    CHECK(write_folder(run, &model, &c, folder));
    run->saved = (struct saved){run->step, interim ? run->step : -1, clock_now_ns(), false};
    log_debug("step %" PRId64 ": checkpoint %s written in %.2f s", run->step, folder,
              clock_ms_since(start_ns) / 1e3);
    // What the server restores should this process die in the middle of an update.
    CHECK(control_set_snapshot(mapped_control(&run->mapped), folder));
    CHECK(journal_forget(run->folder, run->step));
out:
    run->saved.failed = st != ST_OK;
    checkpoint_release(&c);
    spans_lap(&run->spans, SPAN_CHECKPOINT);
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

// Between two of a step's updates moments and weights belong together, but to no step.
static bool within_a_step(const struct run *run)
{
    return mapped_version(&run->mapped) != run->step_version;
}

static enum status save_remains(struct run *run)
{
    enum status st;
    const bool within = within_a_step(run);
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
