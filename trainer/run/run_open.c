/* run_open.c: opens what a training run needs, in the order in which it can be refused cheaply: the
 * bridge, the data, the writer's lease, the run folder, the memory. The main thread.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/constraint/constraint.h"
#include "common/model/config.h"
#include "common/model/model_folder.h"
#include "common/model/weights.h"
#include "common/text/tokenizer.h"
#include "trainer/data/data.h"
#include "trainer/launch/server_process.h"
#include "trainer/learn/learner.h"
#include "trainer/rollout/rollout_queue.h"
#include "trainer/rollout/spec_counters.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/warnings.h"
#include "trainer/run/mapped.h"
#include "trainer/run/runlog.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#define INFO_MS    10000
#define RESTORE_MS 300000 // for a server to load a checkpoint again

static enum status open_draft(struct run *run)
{
    const struct bridge_file *file = bridge_file_of(run->mapped.bridge);
    const struct bridge_role *role = bridge_file_role(file, "draft");
    if (!run->config->train_draft) return ST_OK;
    if (!role) role = bridge_file_role(file, MTP_ROLE);
    if (!role)
        return status_fail(ST_NOT_FOUND,
                           "--train-draft: %s shares no draft model; start the server with one: "
                           "cw-infer-server --draft DIR --speculative draft_model:5, or "
                           "--speculative mtp (with --gpus or --ranks: --server-args)",
                           file->path);
    run->mapped.draft_folder = role->model;
    enum status st = ST_OK;
    if (!run->mapped.draft)
        st = role_open(run->mapped.bridge, role, &run->mapped.draft_model, &run->mapped.draft);
    if (st == ST_OK) run->mapped.draft->comm = run->ranks.shards;
    if (st == ST_OK && run->mapped.draft_model->mtp)
        weights_share_ends(run->mapped.draft, run->mapped.policy);
    return st;
}

// Which model writes with the policy is the server's; it must have one.
static enum status check_tandem(const struct run *run)
{
    const struct bridge_file *file = bridge_file_of(run->mapped.bridge);
    const struct bridge_role *role = bridge_file_role(file, "frozen");
    const bool own = run->config->sync == SYNC_CHECKPOINT; // the sampler says whether it has one
    if (!run->config->sampling.tandem.on) return ST_OK;
    if (!role && !own)
        return status_fail(
            ST_NOT_FOUND,
            "--tandem: the server of %s has no frozen model; start it with one: "
            "cw-infer-server --tandem-model DIR (with --gpus or --ranks: --server-args)",
            file->path);
    const struct tandem_options *t = &run->config->sampling.tandem;
    log_info(
        "--tandem: %s writes with the policy: selector %s, p %g%s; its tokens weigh %g in the loss",
        role ? role->model : "the server's frozen model", tandem_selector_names[t->selector], t->p,
        t->shared ? ", all samples of a step alike" : "", run->config->loss.frozen_weight);
    return ST_OK;
}

static enum status open_policy(struct run *run)
{
    enum status st;
    CHECK(run_open_own(run));
    if (!run->mapped.bridge) CHECK(run_make_adapter(run));
    if (!run->mapped.bridge) CHECK(mapped_attach(&run->mapped));
    const struct bridge_file *file = bridge_file_of(run->mapped.bridge);
    const struct bridge_role *role;
    CHECK(warn_roles(file, &role));
    run->mapped.model_folder = run->mapped.files_folder = role->model;
    CHECK(check_tandem(run));
    if (!run->mapped.policy)
        CHECK(role_open(run->mapped.bridge, role, &run->mapped.model, &run->mapped.policy));
    if (!run->http) CHECK(http_client_new(file->socket, &run->http));
    *run->servers = rollout_servers_of(run->http, mapped_control(&run->mapped),
                                       run->mapped.model->vocab_size, run->config->rollout_timeout);
    CHECK(run_open_adapter(run));
    CHECK(spec_watch_new(bridge_file_of(run->mapped.bridge), run->http, run->config->also_count,
                         &run->watch));
    CHECK(run_open_source(run));
out:
    return st;
}

// The server must be in exact mode for --exact.
static enum status check_exact(const struct run *run)
{
    json_t *info;
    if (!run->config->exact) return ST_OK;
    enum status st = http_get_json(run->http, "/bridge/info", INFO_MS, &info);
    if (st != ST_OK) return status_context(st, "--exact");
    if (!json_is_true(json_object_get(info, "exact")))
        st = status_fail(ST_MISMATCH,
                         "--exact: the server of %s was not started with it; start it as "
                         "cw-infer-server --exact (with --gpus or --ranks: --server-args=--exact)",
                         bridge_file_of(run->mapped.bridge)->path);
    json_decref(info);
    return st;
}

static enum status check_context(const struct run *run, const struct model_config *model,
                                 const char *which)
{
    const struct dataset *d = run->data;
    const int64_t completion = run->config->sampling.max_tokens,
                  longer = completion > d->max_completion ? completion : d->max_completion;
    if (d->max_read + longer <= model->max_positions) return ST_OK;
    if (d->max_prompt + completion <= model->max_positions)
        return status_fail(
            ST_INVALID,
            "%s: the longest prompt or \"teacher_prompt\" (%d tokens) and completion "
            "(%" PRId64 ") are over the %s's context of %d; leave such lines out",
            d->path, d->max_read, longer, which, model->max_positions);
    return status_fail(ST_INVALID,
                       "the longest prompt (%d tokens) and --max-completion-length %" PRId64
                       " are over the %s's context of %d; lower it or --max-prompt-length",
                       d->max_prompt, completion, which, model->max_positions);
}

enum status run_check_context(void *context)
{
    const struct run *run = context;
    const struct train_config *c = run->config;
    enum status st = rollout_check_context(run->servers, run->data, 0, c->sampling.max_tokens);
    if (st == ST_OK && run->eval_data)
        st = rollout_check_context(run->servers, run->eval_data, c->eval_limit,
                                   c->sampling.max_tokens);
    return st;
}

bool run_gives(const struct run *run)
{
    return run->config->teacher && run->config->loss.distill_lambda < 1;
}

// Tokens of a prompt with its completion, at most.
static int64_t longest_of(const struct run *run)
{
    const struct train_config *c = run->config;
    const int64_t positions = run->mapped.model->max_positions, budget = c->learner.token_budget;
    int64_t longest = positions < budget ? positions : budget;
    if (c->rollouts) { // the environment's prompts, or a teacher's in their place
        const bool taught = run->data && run->data->n_taught; // the environment is there first
        const int64_t read = run->server_context + (taught ? run->data->max_read : 0);
        return longest < read ? longest : read;
    }
    return c->atropos ? longest : run->data->max_read + c->sampling.max_tokens;
}

static enum status load_data(struct run *run, const struct prompt_options *options)
{
    const struct train_config *c = run->config;
    enum status st;
    int left_out;
    CHECK(prompts_load(c->data, run->mapped.model_folder, run->mapped.model->vocab_size, options,
                       &run->data, &left_out));
    warn_data(run->data, left_out);
    if (run->data->n_taught > 0 && !c->teacher)
        log_warn("%s: \"teacher_prompt\" of %d lines is not read without --teacher", c->data,
                 run->data->n_taught);
    if (run->data->asks)
        log_info("%s: questions go into the model's chat template as \"%s\" (--prompt-template)",
                 c->data, options->question_template);
    st = scoring_check(run->reward, run->data);
out:
    return st;
}

static enum status open_data(struct run *run)
{
    static const char none[] = "{\"prompt\": \" \"}\n";
    const struct train_config *c = run->config;
    enum status st;
    int left_out;
    struct prompt_options options = c->prompts;
    options.question_template = reward_info(run->reward)->prompt_template;
    options.teacher = c->teacher != NULL;
    options.given = run_gives(run);
    // With Atropos the prompts are the environments': one example without tokens, which no step
    // takes.
    CHECK(c->atropos ? dataset_parse(c->atropos, none, strlen(none), NULL, &run->data)
                     : load_data(run, &options));
    CHECK(curriculum_new(&c->curriculum, run->data->n, &run->curriculum));
    if (c->eval_data) {
        options.max_samples = 0;
        options.teacher = options.given = false;
        CHECK(prompts_load(c->eval_data, run->mapped.model_folder, run->mapped.model->vocab_size,
                           &options, &run->eval_data, &left_out));
        warn_left_out(run->eval_data, left_out);
        CHECK(scoring_check(run->reward, run->eval_data));
    }
    if (c->atropos && !c->eval_data) return ST_OK; // nothing is asked for here
    CHECK(check_context(run, run->mapped.model, "model"));
    if (!run->own.server) CHECK(run_check_context(run));
    if (run->mapped.draft) CHECK(check_context(run, run->mapped.draft_model, "draft model"));
out:
    return st;
}

// ---- sources of samples -------------------------------------------------------------------------

static enum status open_environment(struct run *run)
{
    const struct train_config *c = run->config;
    bool counts = false;
    enum status st;
    if (!c->rollouts) return ST_OK;
    run->server_context = run->mapped.model->max_positions; // of a server that is started later
    if (!run->own.server) CHECK(rollout_context(run->servers, &run->server_context));
    const struct environment_options options = {.line = c->rollouts + strlen(ROLLOUTS_COMMAND),
                                                .n = (int)c->rollout_processes,
                                                .timeout_s = c->rollout_process_timeout,
                                                .max_tokens = (int)longest_of(run)};
    CHECK(environment_new(&options, run->source, &run->source));
    for (int k = 0; k < reward_info(run->reward)->n; k++)
        counts |= strcmp(reward_info(run->reward)->terms[k].name, "environment") == 0;
    if (!counts)
        log_warn("--reward %s: what the environment gives does not count, whose term is "
                 "\"environment\"",
                 c->reward.names);
out:
    return status_context(st, "--rollouts");
}

// Once the run knows where it starts.
static enum status open_atropos(struct run *run)
{
    const struct train_config *c = run->config;
    const int64_t batch = c->curriculum.prompts_per_step * c->curriculum.num_generations;
    const struct atropos_options options = {
        .url = c->atropos,
        .bounds = {.vocab_size = run->mapped.model->vocab_size,
                   .max_tokens = (int)longest_of(run),
                   .temperature = c->sampling.temperature,
                   .needs_logprobs = run->resolved.loss.tis != TIS_OFF,
                   .scale = c->advantage.scale},
        .batch_size = batch,
        .stopped = stop_flag(),
        .run_folder = run->folder,
        .save_steps = c->saving.save_steps,
        .step = run->step,
        .total_steps = run->total_steps,
    };
    enum status st = ST_OK;
    if (!c->atropos) return ST_OK;
    CHECK(atropos_new(&options, run->servers, run->source, &run->source));
    log_info("--atropos %s: registered for batches of %" PRId64 " sequences of at most %" PRId64
             " tokens; environments that ask %s%s%s are trained on",
             c->atropos, batch, longest_of(run), bridge_file_of(run->mapped.bridge)->socket,
             run->mapped.adapter ? " for model " : "", run->mapped.adapter ? c->lora.name : "");
out:
    return st;
}

static void plan_scoring(struct run *run)
{
    const struct train_config *c = run->config;
    *run->scoring = (struct scoring){
        .reward = run->reward,
        .data = run->data->path,
        .advantage = c->advantage,
        .normalise_terms = run->config->normalise_terms,
        .cost = c->cost,
        .weights = c->cost_weights,
        .latency = c->cost && c->latency_modelled ? &run->scored_latency : NULL,
    };
    run->scoring->advantage.pass_k = (int)c->pass_k;
}

// Whether a teacher's folder has the policy's tokens.
static enum status check_teacher_tokens(const struct run *run)
{
    const struct train_config *c = run->config;
    const char *own = run->mapped.files_folder;
    struct tokenizer *tokenizer = NULL;
    enum status st = ST_OK;
    const bool both =
        model_file_exists(own, "tokenizer.json") && model_file_exists(c->teacher, "tokenizer.json");
    if (!both)
        log_warn("--teacher %s: not both models have a tokenizer.json: whether their tokens "
                 "are the same is not checked",
                 c->teacher);
    if (both) CHECK(tokenizer_load(own, &tokenizer));
    if (both) CHECK(tokenizer_check_same(tokenizer, own, c->teacher, "teacher"));
out:
    tokenizer_free(tokenizer);
    return st;
}

static enum status add_teacher(struct run *run)
{
    const struct train_config *c = run->config;
    const struct learner_teacher_config teacher = {c->teacher, (float)c->distill_beta,
                                                   (enum quantization)c->teacher_quantization,
                                                   run->data->n_taught > 0};
    const bool policy = strcmp(c->teacher, TEACHER_POLICY) == 0;
    enum status st = ST_OK;
    const int64_t read = run->server_context + run->data->max_read;
    if (c->rollouts && teacher.prompts && read > run->mapped.model->max_positions)
        FAIL(ST_TOO_LONG,
             "a \"teacher_prompt\" before an environment's trajectory may have %" PRId64
             " tokens, and the model reads %d: serve it with a shorter --max-context",
             read, run->mapped.model->max_positions);
    if (policy && !teacher.prompts)
        FAIL(ST_INVALID,
             "no line of %s has a \"teacher_prompt\": behind the same prompt the policy has "
             "nothing to learn from itself",
             run->data->path);
    const bool folder = !policy && strcmp(c->teacher, TEACHER_BASE) != 0;
    if (!folder && teacher.quantization)
        FAIL(ST_INVALID, "--teacher-quantization is of a folder; these weights are the server's");
    if (folder) CHECK(check_teacher_tokens(run));
    if (teacher.prompts && run->data->n_taught < run->data->n)
        log_info(
            "%s: %d of %d lines have a \"teacher_prompt\"; of the others the teacher reads the "
            "prompt",
            run->data->path, run->data->n_taught, run->data->n);
    st = learner_add_teacher(run->learner, &teacher);
out:
    return status_context(st, "--teacher %s", c->teacher);
}

enum status run_open_learner(struct run *run, const struct learner_shape *shape)
{
    const struct train_config *c = run->config;
    enum status st;
    struct learner_config options;
    CHECK(learner_config_of(&c->learner, shape, c->sampling.temperature, &options));
    options.ranks = run->given != NULL;
    options.constrained = run->constraints != NULL;
    options.many_parts = c->rollouts != NULL;
    options.comm = run->ranks.copies;
    options.shards = run->ranks.shards;
    options.adapter = run->mapped.adapter;
    options.lora_dropout = (float)c->lora.dropout;
    options.seed = (uint64_t)c->seed;
    options.phases = &run->phases;
    CHECK(learner_new(bridge_device(run->mapped.bridge), run->mapped.model, run->mapped.policy,
                      run->resolved.has_reference, &options, &run->learner));
    warn_model(run->mapped.model, learner_info(run->learner)->balance_coef);
    if (c->teacher) CHECK(add_teacher(run));
    if (run->mapped.draft) {
        struct learner_draft_config draft = {options.optimizer, (float)c->draft_loss_weight,
                                             (int)c->draft_depths};
        draft.optimizer.max_grad_norm = run->resolved.draft_max_grad_norm;
        CHECK(learner_add_draft(run->learner, run->mapped.draft_model, run->mapped.draft, &draft));
    }
    memory_log(run->learner,
               run->given               ? "of its own, beside what follows"
               : c->sync == SYNC_SHARED ? "shared with the server (0 extra)"
                                        : "of its own",
               c->learner.freeze);
    CHECK(learner_prepare(run->learner));
out:
    return st;
}

// Once the data is read. The mask of a token is made as the server made it.
static enum status open_constraints(struct run *run)
{
    const struct train_config *c = run->config;
    const struct model_config *model = run->mapped.model;
    const char *folder = run->mapped.files_folder;
    if (c->rollouts || run->data->n_constrained == 0) {
        if (c->constrained_loss)
            log_warn("--constrained-loss has no effect: no line of %s has a \"response_format\"",
                     run->data->path);
        return ST_OK;
    }
    const bool corrected =
        c->importance_sampling_correction && c->processed_logprobs && !c->server_command;
    log_info("%s: %d of %d samples' lines have a \"response_format\"; the loss is of %s",
             run->data->path, run->data->n_constrained, run->data->n,
             c->constrained_loss ? "what it leaves (--constrained-loss)"
             : corrected         ? "the whole distribution, weighed by what it leaves of that "
                                   "(--processed-logprobs)"
                         : "the whole distribution, and nothing corrects for what it rules out");
    if (!c->constrained_loss) return ST_OK;
    enum status st = tokenizer_load(folder, &run->tokenizer);
    if (st == ST_OK)
        st = constraints_new(run->tokenizer, model->vocab_size, model->eos_ids, model->n_eos,
                             &run->constraints);
    return status_context(st, "--constrained-loss");
}

static enum status open_learner(struct run *run)
{
    const struct train_config *c = run->config;
    int64_t samples = c->curriculum.prompts_per_step * curriculum_max_rollouts(&c->curriculum);
    struct learner_shape shape = {
        .longest = longest_of(run),
        .tokens =
            c->curriculum.prompts_per_step * run->data->max_read + samples * c->sampling.max_tokens,
        .seqs = samples + c->curriculum.prompts_per_step,
    };
    if (c->atropos || c->rollouts) { // each sequence may have a prompt of its own
        shape.tokens = samples * shape.longest;
        shape.seqs = 2 * samples;
    }
    if (run_gives(run)) { // and the data's completions, each behind its prompt
        const int64_t given = run->data->max_read + run->data->max_completion;
        shape.longest = given > shape.longest ? given : shape.longest;
        shape.tokens += c->curriculum.prompts_per_step * given;
        shape.seqs += 2 * c->curriculum.prompts_per_step;
    }
    if (!c->atropos && !c->rollouts && !run_gives(run))
        shape.targets = samples * c->sampling.max_tokens;
    if (samples > 1 << 20)
        return status_fail(ST_INVALID,
                           "--prompts-per-step times --num-generations (with a curriculum: "
                           "--rollout-base x (1 + --rollout-alpha)) is %" PRId64
                           ", over 1048576 samples a step",
                           samples);
    return run_open_learner(run, &shape);
}

// A trainer that died in an update leaves weights that the server restores once it notices.
enum status run_retry(enum status restoring, enum status (*attempt)(void *), void *context)
{
    const int64_t deadline = clock_deadline_ns(RESTORE_MS);
    enum status st;
    for (bool first = true; (st = attempt(context)) == restoring; first = false) {
        if (clock_ms_until(deadline) == 0) break;
        if (stop_requested()) {
            log_warn("a signal: no longer waited for: %s", status_message());
            return status_fail(ST_CANCELLED, "told to end while the server was waited for");
        }
        if (first) log_info("waiting up to %d s: %s", RESTORE_MS / 1000, status_message());
        clock_sleep_ms(20);
    }
    return st;
}

static enum status take_lease(void *bridge)
{
    return bridge_become_writer(bridge);
}

enum status run_become_writer(struct bridge *bridge)
{
    return run_retry(ST_TORN, take_lease, bridge);
}

// Until here there is nothing to save, and a signal is the end.
enum status run_catch_signals(struct run *run)
{
    const struct stop_options options = {.control = mapped_control(&run->mapped),
                                         .first = STOP_AT_STEP};
    stop_catch_signals();
    return stop_watch_new(&options, &run->stop);
}

enum status run_begin(struct run *run, bool replaced, bool resumed)
{
    const bool keeps = run->folder[0] && train_ranks_lead(&run->ranks);
    enum status st;
    CHECK(train_ranks_compare(&run->ranks, &run->mapped, run->step));
    run->step_version = mapped_version(&run->mapped);
    if (replaced) CHECK(run_remove(run));
    CHECK(run_folder_describe(run, resumed));
    CHECK(runlog_new(keeps ? run->folder : NULL, run->step, run->config->saving.logging_steps,
                     &run->log));
    run_plan_steps(run);
    st = schedule_check(&run->resolved.schedule);
out:
    return st;
}

enum status run_open(struct run *run)
{
    const struct train_config *c = run->config;
    struct curriculum_batch first;
    enum status st;
    char latest[PATH_ROOM];
    bool replaced = false; // for that train has no option
    CHECK(open_policy(run));
    CHECK(train_ranks_meet(&run->ranks, &run->mapped, c->launch.rank_timeout));
    run->servers->comm = run->ranks.all;
    CHECK(run_catch_signals(run));
    CHECK(check_exact(run));
    CHECK(open_draft(run));
    CHECK(open_environment(run));
    CHECK(open_data(run));
    plan_scoring(run);
    warn_options(c, &run->resolved);
    CHECK(run_become_writer(
        run->mapped.bridge)); // a second trainer is told so, not that memory is short
    CHECK(run_find_base(run));
    CHECK(run_open_folder(run, &replaced, latest));
    CHECK(run_place_server(run));
    control_set_run(mapped_control(&run->mapped), run->folder);
    control_set_role(mapped_control(&run->mapped), run->mapped.role);
    CHECK(open_constraints(run));
    CHECK(open_learner(run));
    CHECK(
        train_ranks_align_versions(&run->ranks, &run->mapped, (int64_t)(c->quiesce_timeout * 1e3)));
    CHECK(latest[0] ? run_resume(run, latest) : run_start(run));
    CHECK(run_begin(run, replaced, latest[0] != 0));
    CHECK(open_atropos(run));
    CHECK(run_open_rollouts(run));
    if (run->source->own_prompts) goto out;
    curriculum_next(run->curriculum, 0, &first);
    log_info("%" PRId64 " steps of %" PRId64 " prompts x %d samples%s from %s (%d examples)",
             run->total_steps, c->curriculum.prompts_per_step, first.rollouts,
             c->curriculum.mode == CURRICULUM_OFF ? "" : " at first", c->data, run->data->n);
out:
    return st;
}

void run_close(struct run *run, enum status outcome)
{
    train_ranks_leave(&run->ranks, outcome);
    rollout_queue_free(run->queue); // works with nearly all of the rest
    source_close(run->source);
    stop_watch_end(run->stop);
    runlog_free(run->log);
    learner_free(run->learner);
    constraints_free(run->constraints);
    tokenizer_free(run->tokenizer);
    train_ranks_free(&run->ranks);
    curriculum_free(run->curriculum);
    dataset_close(run);
    dataset_free(run->eval_data);
    dataset_free(run->data);
    reward_free(run->reward);
    spec_watch_free(run->watch);
    server_process_free(run->own.server);
    device_free(run->own.device);
    mapped_release(&run->mapped);
    run_unload_adapter(run); // which is mapped no more
    http_client_free(run->http);
    json_decref(run->best_of);
    json_decref(run->gathered);
    json_decref(run->start);
    json_decref(run->line);
    if (run->folder_lock >= 0) close(run->folder_lock);
}
