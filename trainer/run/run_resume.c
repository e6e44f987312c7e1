/* run_resume.c: taking a run up again from a checkpoint, and serving the best one at the end. The
 * main thread.
 *
 * Taking it up with another data set, seed or --freeze would silently be another run, and is
 * refused. Evaluations of other prompts or by another reward cannot be compared: there the best is
 * looked for anew. */
#include "bridge/attach.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/learn/learner.h"
#include "trainer/rollout/scoring.h"
#include "trainer/run/adapter_folder.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/run.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

// ST_MISMATCH names what `state`, of the checkpoint in `folder`, has otherwise.
static enum status check_same_run(const struct run *run, const char *folder, const json_t *state)
{
    const struct train_config *c = run->config;
    const char *now = run->task->command;
    char digest[DIGEST_ROOM];
    const char *command = json_string_value(json_object_get(state, "command"));
    if (!command) command = "train";
    if (strcmp(command, now) != 0)
        return status_fail(ST_MISMATCH,
                           "%s is of a run of cw-trainer %s, not of %s: go on with that, or begin "
                           "another run from it (%s)",
                           folder, command, now, run->given ? "--model" : "--start-from");
    const char *old_digest = json_string_value(json_object_get(state, "data_digest"));
    if (!old_digest || strcmp(run_digest(run->data, digest), old_digest) != 0)
        return status_fail(ST_MISMATCH,
                           "%s was made with another content of %s; take that one or another "
                           "--run-dir",
                           folder, run->data->path);
    json_int_t seed = json_integer_value(json_object_get(state, "seed"));
    if (seed != c->seed)
        return status_fail(ST_MISMATCH, "%s was made with --seed %" JSON_INTEGER_FORMAT, folder,
                           seed);
    const char *freeze = c->learning.freeze,
               *old_freeze = json_string_value(json_object_get(state, "freeze"));
    if (strcmp(freeze ? freeze : "", old_freeze ? old_freeze : "") != 0)
        return status_fail(ST_MISMATCH,
                           "%s was made with --freeze \"%s\", and what is trained cannot change "
                           "within a run; take that, or begin another run from %s",
                           folder, old_freeze ? old_freeze : "", folder);
    const char *old_adapter = json_string_value(json_object_get(state, ADAPTER_STATE));
    if (!old_adapter != !run->mapped.adapter)
        return status_fail(ST_MISMATCH,
                           "%s was made %s --lora-r, and what is trained cannot change "
                           "within a run",
                           folder, old_adapter ? "with" : "without");
    const char *device = device_name(bridge_device(run->mapped.bridge));
    const char *old_device = json_string_value(json_object_get(state, "device"));
    if (c->exact && old_device && strcmp(device, old_device) != 0)
        return status_fail(ST_MISMATCH,
                           "--exact: %s was made on \"%s\", and this is \"%s\", whose sums have "
                           "another order; set OMP_NUM_THREADS as it was, or leave --exact away",
                           folder, old_device, device);
    // here, so that what differs is named before the optimizer's tensors are
    if (!run->mapped.adapter) return ST_OK;
    enum status st = adapter_check(run->mapped.adapter, folder);
    return st == ST_OK ? adapter_base_check(folder, run->mapped.base) : st;
}

// The coefficient goes on where it was; a run that did not adapt begins with the option's.
static void resume_entropy(struct run *run, const json_t *entropy)
{
    if (!entropy || !run->config->entropy.adaptive) return;
    run->entropy.coef = json_number_value(json_object_get(entropy, "coef"));
    const json_t *last = json_object_get(entropy, "last");
    if (json_is_number(last)) run->entropy.last = json_number_value(last);
}

static enum status resume_best(struct run *run, const char *folder, const struct checkpoint *c)
{
    enum status st;
    const char *metric = json_string_value(json_object_get(c->best_of, "metric"));
    CHECK(best_from_json(folder, c->best, &run->best));
    if (c->best_of && !run->given && !metric) { // of before it could be chosen
        metric = reward_info(run->reward)->accuracy_term >= 0 ? "accuracy" : "reward";
        json_object_set_new(c->best_of, "metric", json_string(metric));
    }
    if (metric && !run->config->best_metric) run->best_metric = metric;
    run->best_of = run->eval_data ? run_evaluation_of(run) : json_incref(c->best_of);
    if (run->eval_data && !run->best_of) FAIL(ST_NO_MEMORY, "no memory to resume %s", folder);
    metric = json_string_value(json_object_get(run->best_of, "metric")); // which lives on
    if (metric) run->best_metric = metric;
    if (run->best.step < 0 || !c->best_of || json_equal(run->best_of, c->best_of)) return ST_OK;
    log_warn(
        "the evaluations until now were of other held-out prompts, or by another reward or metric: "
        "their best, step %" PRId64 ", is not compared with those to come",
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

// The draft's part of resuming: its optimizer, and where its weights lie ("": it starts as the
// server serves it).
static enum status resume_draft(struct run *run, const char *folder, const struct checkpoint *c,
                                char ret_draft_folder[PATH_ROOM])
{
    const bool held = c->draft_optimizer_steps >= 0;
    enum status st;
    if (run->mapped.draft && !held)
        log_info("%s holds no draft model: it starts as the server serves it", folder);
    if (!run->mapped.draft && held)
        log_warn("%s holds a trained draft model, and the server keeps the one it serves; "
                 "--train-draft goes on with it",
                 folder);
    if (!run->mapped.draft || !held) return ST_OK;
    CHECK(path_put(ret_draft_folder, folder, DRAFT_FOLDER));
    st = checkpoint_load_optimizer(ret_draft_folder, c->draft_optimizer_steps,
                                   learner_optimizer(learner_draft(run->learner)));
out:
    return st;
}

enum status run_resume(struct run *run, const char *folder)
{
    enum status st;
    struct checkpoint c = {0};
    char draft_folder[PATH_ROOM] = "";
    CHECK(checkpoint_read(folder, &c));
    CHECK(check_same_run(run, folder, c.same));
    if (run->scoring->latency && c.latency_model)
        CHECK(latency_model_from_json(c.latency_model, &run->latency));
    CHECK(status_context(curriculum_from_json(run->curriculum, c.curriculum, c.data_index), "%s",
                         folder));
    CHECK(resume_best(run, folder, &c));
    CHECK(checkpoint_load_optimizer(folder, c.optimizer_steps, learner_optimizer(run->learner)));
    CHECK(resume_draft(run, folder, &c, draft_folder));
    run->start = json_incref(c.start);
    CHECK(run_resume_reference(run, folder));
    CHECK(run_load_weights(run, folder, draft_folder[0] ? draft_folder : NULL));
    run->step = c.step;
    run->saved.step = c.step;
    run->saved.interim_step = c.interim ? c.step : -1;
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
