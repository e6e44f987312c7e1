/* run_log.c: what a run logs of a step: its progress line, warnings, where its time went; and the
 * text that was sampled. The main thread; logs.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/model/config.h"
#include "trainer/learn/stats.h"
#include "trainer/run/evaluate.h"
#include "trainer/run/run.h"
#include "trainer/run/runlog.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static double metric_of(const struct run *run, const char *key)
{
    return json_number_value(json_object_get(run->line, key));
}

void run_log_course(const struct run *run)
{
    const struct schedule *s = &run->resolved.schedule;
    const int64_t each = run->config->curriculum.prompts_per_step;
    if (s->peak == 0)
        log_warn("--learning-rate 0: the %s stays as it is, whatever its samples are",
                 run->mapped.adapter ? "adapter" : "model");
    else if (s->warmup_steps > (double)s->total_steps && s->total_steps > 0)
        log_warn("--warmup-steps %g is longer than the run, of %" PRId64
                 " steps: the learning rate comes to %.3g and not to --learning-rate %g",
                 s->warmup_steps, s->total_steps, schedule_at(s, s->total_steps - 1), s->peak);
    if (run->data->n < each && (run->given || !run->source->own_prompts) &&
        run->config->curriculum.mode == CURRICULUM_OFF)
        log_warn("%s has %d lines, fewer than the %" PRId64
                 " of a step (--%s-per-step): each step has some of them several times",
                 run->data->path, run->data->n, each, run->given ? "examples" : "prompts");
}

static void log_inference(struct run *run, const struct rollout_step *step,
                          const struct update_stats *update)
{
    const struct scores *s = &step->scores;
    const struct train_config *c = run->config;
    const struct latency_model *m = &run->latency;
    if (s->n_undrafted && !run->said_undrafted && c->cost_weights[COST_ACCEPTANCE] > 0) {
        run->said_undrafted = true;
        log_progress_end();
        log_info("step %" PRId64
                 ": nothing was drafted for %d of %d samples; they count with the mean accept_rate "
                 "of their group, or else of the step%s (metric inference/undrafted)",
                 run->step, s->n_undrafted, s->n, s->n_undrafted == s->n ? ": 0" : "");
    }
    if (run->step % c->saving.logging_steps != 0 && run->step != run->total_steps) return;
    const bool drafted = step->spec.present && step->spec.num_drafts > 0;
    if (drafted || run->resolved.async || run->mapped.draft || run->scoring->latency)
        log_progress_end();
    if (drafted) {
        struct bytes line = BYTES_INIT;
        spec_counters_text(&step->spec, step->rollout->seconds, &line);
        log_info("%s", bytes_text(&line));
        bytes_release(&line);
    }
    if (run->resolved.async)
        log_info("async: samples of %.2f updates ago on average and %.0f at most, %.1f%% of the "
                 "groups generated again; the trainer waited %.2f s for them, the sampler %.2f s "
                 "for the trainer",
                 metric_of(run, "rollout/staleness_mean"), metric_of(run, "rollout/staleness_max"),
                 100 * metric_of(run, "rollout/generated_again"),
                 metric_of(run, "rollout/trainer_wait_s"),
                 metric_of(run, "rollout/sampler_wait_s"));
    if (run->mapped.draft)
        log_info("draft model: KL divergence %.4f from the policy, acceptance to expect %.1f%%, "
                 "gradient norm %.4f",
                 stats_mean(update, STAT_DRAFT_KL), 100 * stats_mean(update, STAT_DRAFT_OVERLAP),
                 update->draft_grad_norm);
    if (run->scoring->latency)
        log_info("latency model of %.0f samples: %.3f ms + %.4f prefill + %.4f generated + %.4f "
                 "draft + %.4f accepted ms a token, R2 %.3f",
                 m->n, m->base_ms, m->ms_per[LATENCY_PREFILL], m->ms_per[LATENCY_GENERATED],
                 m->ms_per[LATENCY_DRAFT], m->ms_per[LATENCY_ACCEPTED], m->r2);
}

void run_log_step(struct run *run, const struct rollout_step *s, const struct update_stats *update,
                  double wait_s, double train_s)
{
    const struct rollout *rollout = s->rollout;
    const struct scores *scores = &s->scores;
    const double acceptance = spec_acceptance_rate(&s->spec), step_s = wait_s + train_s;
    const struct progress progress = {
        .step = run->step,
        .reward = scores->stats.reward_mean,
        .teacher = run->config->teacher ? stats_mean(update, STAT_TEACHER_DIVERGENCE) : NAN,
        .accuracy = run_accuracy(run, scores),
        .acceptance = s->spec.present && isfinite(acceptance) ? acceptance : -1,
        .zero_spread = scores->stats.frac_zero_std,
        .kl = run->config->loss.beta > 0 ? stats_mean(update, STAT_KL) : NAN,
        .grad_norm = update->applied ? update->grad_norm : NAN,
        .clipped = run->resolved.updates_per_step > 1 ? stats_mean(update, STAT_CLIP_REGION) : -1,
        .cut_off = metric_of(run, "completions/clipped_ratio"),
        .mean_length = metric_of(run, "completions/mean_length"),
        .tokens_per_s = (double)rollout->n_tokens / step_s,
        .entropy = stats_mean(update, STAT_ENTROPY),
        .max_entropy = log(run->mapped.model->vocab_size),
    };
    log_debug("step %" PRId64 ": waited %.3f s for rollouts and scores, gradients and updates %.3f "
              "s (of which publishing %.3f), together %.3f s",
              run->step, wait_s, train_s, update->publish.total_ms / 1e3, step_s);
    log_debug("step %" PRId64 ": published version %" PRIu64
              ": %d updates, waited %.2f ms to quiesce, wrote %.2f ms, together %.2f ms",
              run->step, mapped_version(&run->mapped), update->applied, update->publish.wait_ms,
              update->publish.write_ms, update->publish.total_ms);
    runlog_progress(run->log, &progress, run->total_steps);
    struct bytes text = BYTES_INIT; // one warning a line
    if (train_ranks_lead(&run->ranks)) divergence_check(&run->divergence, &progress, &text);
    for (char *line = text.data, *end; line && (end = strchr(line, '\n')); line = end + 1)
        log_warn("step %" PRId64 ": %.*s", run->step, (int)(end - line), line);
    bytes_release(&text);
    log_inference(run, s, update);
}

// ---- rollouts/step-N.jsonl ----------------------------------------------------------------------

// A list with an entry for each token t of n, of the object `to`; ok: nothing has failed yet.
#define PUT_LIST(ok, to, key, t, n, entry)                                                         \
    do {                                                                                           \
        json_t *list_ = json_array();                                                              \
        for (int t = 0; (ok) && t < (n); t++) (ok) = json_array_append_new(list_, (entry)) == 0;   \
        (ok) = json_object_set_new((to), (key), list_) == 0 && (ok);                               \
    } while (0)

// What is known of each token. logprobs: the trainer's; NULL: none are wanted.
static bool put_tokens(json_t *line, const struct completion *s, const double *logprobs)
{
    bool ok = true;
    if (s->accepted) PUT_LIST(ok, line, "accepted", t, s->n, json_integer(s->accepted[t]));
    if (s->text_offset) PUT_LIST(ok, line, "text_offset", t, s->n, json_integer(s->text_offset[t]));
    if (s->authors)
        PUT_LIST(ok, line, "model_mask", t, s->n, json_integer(s->authors[t] == AUTHOR_POLICY));
    if (!logprobs) return ok;
    if (s->logprobs) PUT_LIST(ok, line, "logprobs", t, s->n, json_finite(s->logprobs[t]));
    PUT_LIST(ok, line, "trainer_logprobs", t, s->n, json_finite(logprobs[t]));
    return ok;
}

// Rows of one prompt follow each other, so it stands on the first of them only. The reward is made
// of the task's terms as they are and of the costs with their weights. logprobs: of the sample's
// tokens; NULL: none are wanted.
static json_t *rollout_line(const struct run *run, const struct rollout *r, const struct scores *s,
                            int i, const double *logprobs)
{
    const struct example *e = r->examples[i / r->n_per_group];
    const bool first = i % r->n_per_group == 0;
    json_t *line = sample_line(r, i, first, run->reward, s->terms, s->rewards[i]),
           *terms = json_object_get(line, "terms");
    for (int k = 0; s->costs && k < COST_TERMS; k++)
        metrics_putf(terms,
                     cost_signed_weight(run->scoring->weights, k) *
                         s->costs[(size_t)k * (size_t)s->n + (size_t)i],
                     "cost/%s", cost_terms[k].name);
    bool ok =
        line && json_object_set_new(line, "advantage", json_real(s->advantages[i])) == 0 &&
        json_object_set_new(line, "truncated", json_boolean(r->completions[i].truncated)) == 0;
    if (ok && first && e->prompt_text)
        ok = json_object_set(line, "prompt_text", e->prompt_text) == 0;
    if (ok && put_tokens(line, &r->completions[i], logprobs)) return line;
    json_decref(line);
    return NULL;
}

enum status run_log_rollout(struct run *run, const struct rollout_step *step)
{
    const struct rollout *r = step->rollout;
    const struct scores *s = &step->scores;
    struct bytes lines = BYTES_INIT;
    const double *logprobs = step->logprobs;
    enum status st = ST_OK;
    for (int i = 0; i < s->n; i++) {
        CHECK(json_put_line(&lines, rollout_line(run, r, s, i, logprobs),
                            JSON_REAL_PRECISION(METRICS_DIGITS)));
        if (logprobs) logprobs += r->completions[i].n;
    }
    st = runlog_rollouts(run->log, run->step, false, &lines);
out:
    bytes_release(&lines);
    return st;
}

// ---- the end ------------------------------------------------------------------------------------

void run_log_end(const struct run *run)
{
    char best[BEST_WORDS] = "";
    const char *where = run->folder[0] ? "; run folder " : "";
    struct bytes idle = BYTES_INIT;
    if (run->best.step >= 0)
        snprintf(best, sizeof best, "; the best was step %" PRId64 " (%s %.4f): checkpoints/best",
                 run->best.step, run->given ? "loss" : run->best_metric,
                 run->given ? -run->best.score : run->best.score);
    divergence_summary(&run->divergence, &idle);
    log_progress_end();
    if (idle.len) log_warn("%s", bytes_text(&idle));
    bytes_release(&idle);
    if (run->step < run->total_steps && run_out_of_patience(run))
        log_info("stopped early at step %" PRId64 " of %" PRId64 ": %" PRId64
                 " evaluations in a row were no better (--early-stop-patience)%s%s%s",
                 run->step, run->total_steps, run->best.waited, best, where, run->folder);
    else if (run->step > run->total_steps)
        log_warn("the run is at step %" PRId64 " already, and --max-steps ends it at %" PRId64
                 ": nothing was trained%s%s",
                 run->step, run->total_steps, where, run->folder);
    else
        log_info("%s at step %" PRId64 " of %" PRId64 "%s%s%s",
                 run->step < run->total_steps ? "stopped" : "done", run->step, run->total_steps,
                 best, where, run->folder);
}
