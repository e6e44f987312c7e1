/* run_checkpoint.c: saving a run and taking it up again. The main thread.
 *
 * What a run depends on, beyond its options, is in trainer_state.json: the step, the next example,
 * the seed, the curriculum, the best evaluation and what it was of, what the run started from, and
 * a digest of the data. A step whose evaluation did not come to its end (the server was gone) keeps
 * its line there, and it is evaluated first when the run goes on.
 * Taking it up with another data set, seed or --freeze would silently be another run, and is
 * refused. Evaluations of other prompts or by another reward cannot be compared: there the best is
 * looked for anew.
 */
#include "common/base/clock.h"
#include "bridge/attach.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/learn/learner.h"
#include "trainer/rollout/journal.h"
#include "trainer/rollout/scoring.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/run.h"
#include "trainer/run/same_run.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What the scores of evaluations depend on beside the weights. New reference; NULL: no memory.
static json_t *evaluation_of(const struct run *run)
{
    const struct train_config *c = run->config;
    char digest[DIGEST_ROOM];
    json_t *of = json_pack(
        "{s:s, s:I, s:s, s:s?, s:s?, s:f, s:I}", "data_digest", digest_text(run->eval_data, digest),
        "limit", (json_int_t)c->eval_limit, "reward", c->reward.names, "reward_weights",
        c->reward.weights, "reward_pattern", c->reward.pattern, "length_target",
        c->reward.length_target, "max_completion_length", (json_int_t)c->sampling.max_tokens);
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

// The coefficient goes on where it was; a run that did not adapt begins with the option's.
static void resume_entropy(struct run *run, const json_t *entropy)
{
    if (!entropy || !run->config->entropy.adaptive) return;
    run->entropy.coef = json_number_value(json_object_get(entropy, "coef"));
    const json_t *last = json_object_get(entropy, "last");
    if (json_is_number(last)) run->entropy.last = json_number_value(last);
}

static struct same_run same_run_of(const struct run *run)
{
    const struct train_config *c = run->config;
    return (struct same_run){
        .command = run->given ? run->task->command : NULL,
        .data = run->data,
        .seed = c->seed,
        .freeze = c->learning.freeze,
        .adapter = run->mapped.adapter,
        .adapter_name = c->lora.name,
        .base = run->mapped.base,
        .dev = bridge_device(run->mapped.bridge),
        .exact = c->exact,
    };
}

static enum status run_state(struct run *run, bool interim, struct checkpoint *ret)
{
    const struct same_run same = same_run_of(run);
    const bool evaluates = run->eval_data != NULL, adapts = run->config->entropy.adaptive,
               models = run->scoring->latency != NULL;
    if (evaluates && !run->best_of) run->best_of = evaluation_of(run);
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
        .same = same_run_state(&same),
    };
    if (c.same && c.best && c.curriculum && (c.best_of || !evaluates) &&
        (c.latency_model || !models) && (c.entropy || !adapts)) {
        *ret = c;
        return ST_OK;
    }
    checkpoint_release(&c);
    return status_fail(ST_NO_MEMORY, "no memory for a checkpoint");
}

enum status run_save(struct run *run, bool interim)
{
    enum status st = ST_OK;
    char *folder = NULL;
    struct checkpoint c = {0};
    struct learner *l = run->learner;
    struct model_folder model = {.weights = run->mapped.policy,
                                 .as = run->mapped.policy->dt,
                                 .source_folder = run->mapped.files_folder,
                                 .adapter = run->mapped.adapter,
                                 .optimizer = learner_optimizer(l)};
    struct model_folder draft = {.weights = run->mapped.draft,
                                 .source_folder = run->mapped.draft_folder},
                        reference = {.weights = learner_reference(l),
                                     .as = run->mapped.policy->dt,
                                     .source_folder = run->mapped.model_folder};
    if (run->saver.step == run->step || !run->folder[0]) return ST_OK;
    spans_lap(&run->spans, SPAN_LOG);
    if (run->mapped.draft) {
        draft.as = run->mapped.draft->dt;
        draft.optimizer = learner_optimizer(learner_draft(l));
        model.draft = &draft;
    }
    if (run->config->sync_ref_model) model.reference = &reference;
    CHECK(run_state(run, interim, &c));
    CHECK(saver_write(&run->saver, run->folder, bridge_device(run->mapped.bridge), &model, &c,
                      &run->best, &run->ranks, &folder));
    // What the server restores should this process die in the middle of an update.
    CHECK(control_set_snapshot(mapped_control(&run->mapped), folder));
    CHECK(journal_forget(run->folder, run->step));
out:
    run->saver.failed = st != ST_OK;
    checkpoint_release(&c);
    free(folder);
    spans_lap(&run->spans, SPAN_CHECKPOINT);
    return st;
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
                 run->step + 1, run->saver.step);
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
    if (run->step == 0 || run->step == run->saver.step || run->saver.failed || !run->folder[0])
        return;
    char *sentence = strdup(status_message());
    log_progress_end();
    if (run->ranks.all)
        log_warn("what was learned since the checkpoint of step %" PRId64
                 " is not saved: that takes all ranks; --resume goes on from it",
                 run->saver.step);
    else if (!control_as_left(control))
        log_warn("what was learned since the checkpoint of step %" PRId64
                 " is not saved: the weights are not as this run left them",
                 run->saver.step);
    else if (save_remains(run) != ST_OK)
        log_error("%s", status_message());
    status_fail(why, "%s", sentence ? sentence : "the run ended by an error");
    free(sentence);
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

// The draft's part of resuming: its optimizer, and where its weights lie ("": it starts as the
// server serves it).
static enum status resume_draft(struct run *run, const char *folder, const struct checkpoint *c,
                                char ret_draft_folder[PATH_ROOM])
{
    if (!checkpoint_has_draft(c)) {
        if (run->mapped.draft)
            log_info("%s holds no draft model: it starts as the server serves it", folder);
        return ST_OK;
    }
    if (!run->mapped.draft) {
        log_warn("%s holds a trained draft model, and the server keeps the one it serves; "
                 "--train-draft goes on with it",
                 folder);
        return ST_OK;
    }
    enum status st =
        checkpoint_load_draft_optimizer(folder, c, learner_optimizer(learner_draft(run->learner)));
    return st == ST_OK ? path_put(ret_draft_folder, folder, DRAFT_FOLDER) : st;
}

enum status run_resume(struct run *run, const char *folder)
{
    enum status st;
    struct checkpoint c = {0};
    char draft_folder[PATH_ROOM] = "";
    CHECK(checkpoint_read(folder, &c));
    const struct same_run same = same_run_of(run);
    CHECK(same_run_check(&same, folder, c.same));
    if (run->scoring->latency && c.latency_model)
        CHECK(latency_model_from_json(c.latency_model, &run->latency));
    CHECK(status_context(curriculum_from_json(run->curriculum, c.curriculum, c.data_index), "%s",
                         folder));
    if (run->eval_data && !run->best_of && !(run->best_of = evaluation_of(run)))
        FAIL(ST_NO_MEMORY, "no memory to resume %s", folder);
    CHECK(best_resume(&run->best, folder, c.best, c.best_of, &run->best_of));
    CHECK(checkpoint_load_optimizer(folder, &c, learner_optimizer(run->learner)));
    CHECK(resume_draft(run, folder, &c, draft_folder));
    run->start = json_incref(c.start);
    CHECK(run_resume_reference(run, folder));
    CHECK(run_load_weights(run, folder, draft_folder[0] ? draft_folder : NULL));
    run->step = c.step;
    saver_resume(&run->saver, &c);
    run->line = json_incref(c.line);
    run->evaluation_due = c.evaluation_due;
    run->skipped = c.skipped_updates;
    run->num_tokens = c.num_tokens;
    resume_entropy(run, c.entropy);
    if (run->given)
        log_info("resumed at step %" PRId64 " from %s", run->step, folder);
    else
        log_info("resumed at step %" PRId64 " from %s; its weights are served, version %" PRIu64,
                 run->step, folder, mapped_version(&run->mapped));
out:
    checkpoint_release(&c);
    return status_context(st, "resuming");
}

enum status run_serve_best(struct run *run)
{
    enum status st;
    char *folder = NULL, draft_folder[PATH_ROOM];
    if (run->best.step < 0 || run->best.step == run->step) return ST_OK;
    CHECK(checkpoint_best(run->folder, &folder));
    if (!folder)
        FAIL(ST_NOT_FOUND, "%s/checkpoints/best: there is no such checkpoint any more",
             run->folder);
    CHECK(path_put(draft_folder, folder, DRAFT_FOLDER));
    CHECK(run_load_weights(run, folder,
                           run->mapped.draft && file_exists(draft_folder) ? draft_folder : NULL));
    log_info("%s of step %" PRId64 ", the best",
             run->given ? "the weights are those" : "serving the weights", run->best.step);
out:
    free(folder);
    return status_context(st, "--load-best-model-at-end");
}
