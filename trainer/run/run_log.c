/* run_log.c: what a run logs of a step: its progress line, warnings, where its time went. The main
 * thread; logs.
 */
#include "common/base/log.h"
#include "common/model/config.h"
#include "trainer/learn/stats.h"
#include "trainer/rollout/source.h"
#include "trainer/run/run.h"
#include "trainer/run/runlog.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static double metric_of(const struct run *run, const char *key)
{
    return json_number_value(json_object_get(run->line, key));
}

// One warning a line.
static void warn_of_divergence(struct run *run, const struct progress *step)
{
    struct bytes text = BYTES_INIT;
    divergence_check(&run->divergence, step, &text);
    for (char *line = text.data, *end; line && (end = strchr(line, '\n')); line = end + 1)
        log_warn("step %" PRId64 ": %.*s", run->step, (int)(end - line), line);
    bytes_release(&text);
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
                 " steps: the learning rate "
                 "comes to %.3g and not to --learning-rate %g",
                 s->warmup_steps, s->total_steps, schedule_at(s, s->total_steps - 1), s->peak);
    if (run->data->n < each && (run->given || !run->source->own_prompts) &&
        run->config->curriculum.mode == CURRICULUM_OFF)
        log_warn("%s has %d lines, fewer than the %" PRId64 " of a step (--%s-per-step): each step "
                 "has some of them several times",
                 run->data->path, run->data->n, each, run->given ? "examples" : "prompts");
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
        .accuracy = run_accuracy(run, scores),
        .acceptance = s->spec.present && isfinite(acceptance) ? acceptance : -1,
        .zero_spread = scores->stats.frac_zero_std,
        .kl = run->config->loss.beta > 0 ? stats_mean(update, STAT_KL) : NAN,
        .grad_norm = update->applied ? update->grad_norm : NAN,
        .clipped = run->resolved.updates_per_step > 1 ? stats_mean(update, STAT_CLIP_REGION) : -1,
        .cut_off = run_cut_off(rollout),
        .mean_length = metric_of(run, "completions/mean_length"),
        .tokens_per_s = (double)rollout->n_tokens / step_s,
        .entropy = stats_mean(update, STAT_ENTROPY),
        .max_entropy = log(run->mapped.model->vocab_size),
    };
    log_debug("step %" PRId64 ": waited %.3f s for rollouts and scores, gradients and updates "
              "%.3f s (of which publishing %.3f), together %.3f s",
              run->step, wait_s, train_s, update->publish.total_ms / 1e3, step_s);
    log_debug("step %" PRId64 ": published version %" PRIu64
              ": %d updates, waited %.2f ms to quiesce, "
              "wrote %.2f ms, together %.2f ms",
              run->step, mapped_version(&run->mapped), update->applied, update->publish.wait_ms,
              update->publish.write_ms, update->publish.total_ms);
    runlog_progress(run->log, &progress);
    if (train_ranks_lead(&run->ranks)) warn_of_divergence(run, &progress);
}

void run_log_inference(struct run *run, const struct rollout_step *step,
                       const struct update_stats *update)
{
    const struct scores *s = &step->scores;
    const struct train_config *c = run->config;
    const struct latency_model *m = run->scoring->latency ? &run->latency : NULL;
    if (s->n_undrafted && !run->said_undrafted && c->cost_weights.acceptance > 0) {
        run->said_undrafted = true;
        log_progress_end();
        log_info("step %" PRId64 ": nothing was drafted for %d of %d samples; they count with the "
                 "mean accept_rate of their group, or else of the step%s (metric "
                 "inference/undrafted)",
                 run->step, s->n_undrafted, s->n, s->n_undrafted == s->n ? ": 0" : "");
    }
    if (run->step % c->saving.logging_steps != 0 && run->step != run->total_steps) return;
    if (step->spec.present && step->spec.num_drafts > 0) {
        struct bytes line = BYTES_INIT;
        spec_counters_text(&step->spec, step->rollout->seconds, &line);
        log_progress_end();
        log_info("%s", bytes_text(&line));
        bytes_release(&line);
    }
    if (run->resolved.async) {
        log_progress_end();
        log_info("async: samples of %.2f updates ago on average and %.0f at most, %.1f%% of the "
                 "groups generated again; the trainer waited %.2f s for them, the sampler %.2f s "
                 "for the trainer",
                 metric_of(run, "rollout/staleness_mean"), metric_of(run, "rollout/staleness_max"),
                 100 * metric_of(run, "rollout/generated_again"),
                 metric_of(run, "rollout/trainer_wait_s"),
                 metric_of(run, "rollout/sampler_wait_s"));
    }
    if (run->mapped.draft) {
        log_progress_end();
        log_info("draft model: KL divergence %.4f from the policy, acceptance to expect %.1f%%, "
                 "gradient norm %.4f",
                 stats_mean(update, STAT_DRAFT_KL), 100 * stats_mean(update, STAT_DRAFT_OVERLAP),
                 update->draft_grad_norm);
    }
    if (m) {
        log_progress_end();
        log_info("latency model of %.0f samples: %.3f ms + %.4f prefill + %.4f generated + %.4f "
                 "draft + %.4f accepted ms a token, R2 %.3f",
                 m->n, m->base_ms, m->ms_per[LATENCY_PREFILL], m->ms_per[LATENCY_GENERATED],
                 m->ms_per[LATENCY_DRAFT], m->ms_per[LATENCY_ACCEPTED], m->r2);
    }
}

void run_log_end(const struct run *run)
{
    char best[BEST_WORDS];
    const struct best shown = {.step = run->best.step,
                               .score = run->given ? -run->best.score : run->best.score};
    const char *where = run->folder[0] ? "; run folder " : "";
    best_end_words(&shown, run->given ? "loss" : run->best_metric, best);
    struct bytes idle = BYTES_INIT;
    divergence_summary(&run->divergence, &idle);
    log_progress_end();
    if (idle.len) log_warn("%s", bytes_text(&idle));
    bytes_release(&idle);
    if (run->step < run->total_steps && run_out_of_patience(run))
        log_info("stopped early at step %" PRId64 " of %" PRId64 ": %" PRId64
                 " evaluations in a row were no better (--early-stop-patience)%s%s%s",
                 run->step, run->total_steps, run->best.waited, best, where, run->folder);
    else
        log_info("%s at step %" PRId64 " of %" PRId64 "%s%s%s",
                 run->step < run->total_steps ? "stopped" : "done", run->step, run->total_steps,
                 best, where, run->folder);
}
