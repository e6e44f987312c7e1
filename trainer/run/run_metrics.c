/* run_metrics.c: what a run measures of itself: the line of metrics.jsonl, evaluations, sampled
 * text. The main thread. Keys are TRL's where TRL logs the same.
 */
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "trainer/learn/learner.h"
#include "trainer/rollout/rollout_queue.h"
#include "trainer/run/evaluate.h"
#include "trainer/run/run.h"
#include "trainer/run/runlog.h"
#include "trainer/run/tensorboard.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define ROLLOUT_STREAM ((uint64_t)1 << 32) // apart from the data order's streams, which are epochs

struct sampling_options run_sampling(const struct run *run, int64_t step)
{
    struct sampling_options sampling = run->config->sampling;
    struct rng rng;
    sampling.text_offset = run->config->log_completions && run->config->log_logprobs;
    rng_init(&rng, (uint64_t)run->config->seed, ROLLOUT_STREAM + (uint64_t)step);
    sampling.seed = rng_u64(&rng) >> 1;
    return sampling;
}

double run_accuracy(const struct run *run, const struct scores *s)
{
    double mean;
    int term = reward_info(run->reward)->accuracy_term;
    if (term < 0 || !s->terms) return -1; // of scores that are an environment's there are no terms
    mean_std(s->terms + (size_t)term * (size_t)s->n, s->n, &mean, NULL);
    return mean;
}

double run_cut_off(const struct rollout *r)
{
    const int n = r->n_groups * r->n_per_group;
    int cut_off = 0;
    for (int i = 0; i < n; i++) cut_off += r->completions[i].truncated;
    return (double)cut_off / n;
}

int run_length(const struct completion *sample)
{
    int n = 0;
    for (int t = 0; t < sample->n; t++) n += token_author(sample->authors, t) != AUTHOR_OTHER;
    return n;
}

static void put_length(json_t *metrics, const char *name, const struct range_stats *lengths)
{
    metrics_putf(metrics, range_mean(lengths), "completions/mean_%s", name);
    metrics_putf(metrics, lengths->min, "completions/min_%s", name);
    metrics_putf(metrics, lengths->max, "completions/max_%s", name);
}

// Terminated are samples that came to an end of their own; 0 where none did, as in TRL.
static void put_lengths(json_t *metrics, const struct rollout *r)
{
    struct range_stats all = {0}, terminated = {0};
    for (int i = 0; i < r->n_groups * r->n_per_group; i++) {
        const int length = run_length(&r->completions[i]);
        range_add(&all, length);
        if (!r->completions[i].truncated) range_add(&terminated, length);
    }
    put_length(metrics, "length", &all);
    put_length(metrics, "terminated_length", &terminated);
    metrics_put(metrics, "completions/clipped_ratio", run_cut_off(r));
}

static void put_rewards(json_t *metrics, const struct run *run, const struct scores *s)
{
    metrics_put(metrics, "reward", s->stats.reward_mean);
    metrics_put(metrics, "reward_std", s->stats.reward_std);
    metrics_put(metrics, "reward_group_std", s->stats.group_std);
    metrics_put(metrics, "frac_reward_zero_std", s->stats.frac_zero_std);
    metrics_put(metrics, "advantage_mean", s->stats.mean);
    metrics_put(metrics, "advantage_std", s->stats.std);
    for (int k = 0; k < s->n_terms; k++) {
        double mean, std;
        mean_std(s->terms + (size_t)k * (size_t)s->n, s->n, &mean, &std);
        metrics_putf(metrics, mean, "rewards/%s/mean", reward_info(run->reward)->terms[k].name);
        metrics_putf(metrics, std, "rewards/%s/std", reward_info(run->reward)->terms[k].name);
    }
    if (run_accuracy(run, s) >= 0) metrics_put(metrics, "accuracy", run_accuracy(run, s));
}

// What serving the samples cost: each quantity, and what it adds to the reward.
static void put_costs(json_t *metrics, const struct run *run, const struct rollout_step *step)
{
    const struct scores *s = &step->scores;
    const double kl = run->config->kl_reward_coef * step->kl;
    double costs = 0;
    if (!s->costs) return;
    for (int k = 0; k < COST_TERMS; k++) {
        double mean, std, weight = cost_signed_weight(&run->scoring->weights, k);
        mean_std(s->costs + (size_t)k * (size_t)s->n, s->n, &mean, &std);
        metrics_putf(metrics, mean, "inference/%s", cost_terms[k].quantity);
        metrics_putf(metrics, weight * mean, "rewards/cost/%s", cost_terms[k].name);
        metrics_putf(metrics, fabs(weight) * std, "rewards/cost/%s/std", cost_terms[k].name);
        costs += weight * mean;
    }
    metrics_put(metrics, "rewards/cost", costs);
    metrics_put(metrics, "rewards/task", s->stats.reward_mean - costs + kl);
    metrics_put(metrics, "inference/undrafted", (double)s->n_undrafted / s->n);
    const struct latency_model *m = &run->latency;
    if (!run->scoring->latency) return;
    metrics_put(metrics, "latency_model/base_ms", m->base_ms);
    metrics_put(metrics, "latency_model/ms_per_prefill_token", m->ms_per[LATENCY_PREFILL]);
    metrics_put(metrics, "latency_model/ms_per_generated_token", m->ms_per[LATENCY_GENERATED]);
    metrics_put(metrics, "latency_model/ms_per_draft_token", m->ms_per[LATENCY_DRAFT]);
    metrics_put(metrics, "latency_model/ms_per_accepted_token", m->ms_per[LATENCY_ACCEPTED]);
    metrics_put(metrics, "latency_model/r2", m->r2);
}

// What serving took, as the server measured it. With --cost, put_costs() says it; tokens and
// acceptance have keys of their own.
static void put_inference(json_t *metrics, const struct rollout *r, const struct scores *s)
{
    static const enum cost_term told[] = {COST_LATENCY, COST_KV, COST_CACHE};
    const int n = r->n_groups * r->n_per_group;
    double means[COST_TERMS] = {0};
    if (s->costs) return;
    for (int i = 0; i < n; i++) {
        struct completion_cost sample;
        double quantities[COST_TERMS];
        if (cost_read(r->completions[i].telemetry, &sample) != ST_OK) return; // not told: no metric
        cost_quantities(&sample, sample.latency_ms, quantities);
        for (int k = 0; k < COST_TERMS; k++) means[k] += quantities[k] / n;
    }
    for (size_t k = 0; k < sizeof told / sizeof *told; k++) {
        metrics_putf(metrics, means[told[k]], "inference/%s", cost_terms[told[k]].quantity);
    }
}

static void put_draft(json_t *metrics, const struct update_stats *u, double lr)
{
    bool any = u->draft_targets > 0; // else null: nothing was compared
    metrics_put(metrics, "draft_loss", any ? stats_mean(u, STAT_DRAFT_KL) : NAN);
    metrics_put(metrics, "draft_overlap", any ? stats_mean(u, STAT_DRAFT_OVERLAP) : NAN);
    metrics_put(metrics, "draft_grad_norm", any && !u->draft_skipped ? u->draft_grad_norm : NAN);
    metrics_put(metrics, "draft_learning_rate", lr);
}

static void put_update(json_t *metrics, const struct run *run, const struct update_stats *u)
{
    uint64_t given = loss_stats(&run->resolved.loss);
    if (entropy_has_bonus(&run->config->entropy)) {
        given |= STAT_BIT(STAT_EXTRA_LOSS);
        metrics_put(metrics, "entropy_coef", run->entropy.coef);
    }
    if (learner_info(run->learner)->balance_coef > 0) given |= STAT_BIT(STAT_AUX_LOSS);
    stats_put(u, given, "", metrics);
    metrics_put(metrics, "grad_norm", u->grad_norm);
    metrics_put(metrics, "learning_rate", u->lr);
    json_object_set_new(metrics, "skipped_updates", json_integer(run->skipped));
    json_object_set_new(metrics, "weight_version",
                        json_integer((json_int_t)mapped_version(&run->mapped)));
    metrics_put(metrics, "publish/wait_ms", u->publish.wait_ms);
    metrics_put(metrics, "publish/write_ms", u->publish.write_ms);
    metrics_put(metrics, "publish/total_ms", u->publish.total_ms);
    ranks_put(u, run->ranks.all, metrics);
}

static void put_tandem(json_t *metrics, const struct update_stats *u)
{
    const double frozen = u->range[STAT_FROZEN].n > 0 ? stats_mean(u, STAT_FROZEN) : NAN;
    metrics_put(metrics, "tandem/primary_token_fraction", 1 - frozen);
    metrics_put(metrics, "tandem/frozen_token_fraction", frozen);
}

static void put_source(json_t *metrics, const struct source_counts *counts)
{
    for (const struct source_count *c = counts->items; c < counts->items + counts->n; c++)
        metrics_put(metrics, c->key, c->of > 0 ? c->sum / c->of : c->sum);
}

json_t *run_metrics(struct run *run, const struct rollout_step *s,
                    const struct update_stats *update, double wait_s, double train_s)
{
    const struct rollout *rollout = s->rollout;
    const struct scores *scores = &s->scores;
    const double step_s = wait_s + train_s;
    json_t *metrics = json_object();
    if (!metrics) return NULL;
    json_object_set_new(metrics, "step", json_integer(run->step));
    put_rewards(metrics, run, scores);
    if (run->config->kl_reward_coef != 0) {
        metrics_put(metrics, "kl_reward/kl", s->kl);
        metrics_put(metrics, "rewards/kl", -run->config->kl_reward_coef * s->kl);
    }
    put_costs(metrics, run, s);
    put_inference(metrics, rollout, scores);
    spec_counters_put(&s->spec, metrics);
    put_lengths(metrics, rollout);
    metrics_put(metrics, "num_tokens", (double)run->num_tokens);
    put_update(metrics, run, update);
    if (run->mapped.draft) put_draft(metrics, update, run_draft_rate(run, run->step - 1));
    if (run->config->sampling.tandem.on) put_tandem(metrics, update);
    run_put_filter(run, s, metrics);
    run_put_staleness(run, s, wait_s, metrics);
    put_source(metrics, &s->counts);
    metrics_put(metrics, "sync/time_s", run->settle_s + update->publish.total_ms / 1e3);
    metrics_put(metrics, "sync/bytes_written", run->written_bytes);
    run->settle_s = run->written_bytes = 0;
    metrics_put(metrics, "rollout_s", rollout->seconds);
    metrics_put(metrics, "train_s", train_s);
    metrics_put(metrics, "step_s", step_s);
    metrics_put(metrics, "tokens_per_s", (double)rollout->n_tokens / step_s);
    return metrics;
}

enum status run_evaluate(struct run *run, json_t *metrics)
{
    struct sampling_options sampling = run_sampling(run, run->step);
    const char *metric = run->best_metric;
    struct eval_result r;
    struct bytes samples = BYTES_INIT;
    char best[BEST_WORDS], key[64], judged[96] = "";
    sampling.temperature = run->config->eval_temperature;
    sampling.tandem.on = false; // the policy alone is evaluated
    const struct evaluation evaluation = {
        .source = run->source,
        .comm = run->ranks.all,
        .data = run->eval_data,
        .limit = (int)run->config->eval_limit,
        .n_samples = (int)run->config->num_generations_eval,
        .step = run->step,
        .reward = run->reward,
        .sampling = &sampling,
    };
    spans_lap(&run->spans, SPAN_LOG);
    rollout_queue_pause(run->queue);
    enum status st = run_settle(run, run->step, true);
    if (st == ST_OK) st = evaluate(&evaluation, &samples, &r);
    rollout_queue_resume(run->queue);
    if (st == ST_OK) st = train_ranks_agree(&run->ranks, &r, sizeof r);
    if (st == ST_OK) st = runlog_rollouts(run->log, run->step, true, &samples);
    bytes_release(&samples);
    if (st != ST_OK) return st;
    eval_result_put(&r, "eval/", metrics);
    snprintf(key, sizeof key, "eval/%s", metric);
    const json_t *score = json_object_get(metrics, key);
    best_words(&run->best,
               best_consider(&run->best, run->step,
                             json_is_number(score) ? json_number_value(score) : NAN),
               run->step, best);
    if (strcmp(metric, r.accuracy >= 0 ? "accuracy" : "reward") != 0)
        snprintf(judged, sizeof judged, ", %s %.4f", metric, json_number_value(score));
    spans_lap(&run->spans, SPAN_EVAL);
    log_progress_end();
    if (r.accuracy >= 0)
        log_info("step %" PRId64 ": held-out accuracy %.1f%% +- %.1f%% on %d prompts%s%s",
                 run->step, 100 * r.accuracy, 100 * eval_error(&r.correct), r.n, judged, best);
    else
        log_info("step %" PRId64 ": held-out reward %.4f +- %.4f on %d prompts%s%s", run->step,
                 r.reward.mean, eval_error(&r.reward), r.n, judged, best);
    return ST_OK;
}

bool run_out_of_patience(const struct run *run)
{
    return best_out_of_patience(&run->best, run->config->early_stop_patience);
}

enum status run_finish_line(struct run *run)
{
    if (run->evaluation_due) {
        enum status st = run->task->kind->evaluate(run, run->line);
        if (st != ST_OK) return st;
    }
    run->evaluation_due = false;
    json_t *line = run->line;
    run->line = NULL;
    return run_write_line(run, line);
}

enum status run_write_line(struct run *run, json_t *line)
{
    struct spans *spans = &run->spans;
    spans_lap(spans, SPAN_LOG);
    for (int i = 0; i < N_SPANS && !run->given; i++) {
        metrics_putf(line, spans->seconds[i], "spans/%s_s", span_names[i]);
        spans->seconds[i] = 0;
    }
    return runlog_write(run->log, line);
}

// What sample i's reward is made of: the task's terms as they are, the costs with their weights.
static json_t *reward_parts(const struct run *run, const struct scores *s, int i)
{
    json_t *parts = json_object();
    for (int k = 0; parts && k < s->n_terms; k++)
        metrics_put(parts, reward_info(run->reward)->terms[k].name,
                    s->terms[(size_t)k * (size_t)s->n + (size_t)i]);
    for (int k = 0; parts && s->costs && k < COST_TERMS; k++) {
        metrics_putf(parts,
                     cost_signed_weight(&run->scoring->weights, k) *
                         s->costs[(size_t)k * (size_t)s->n + (size_t)i],
                     "cost/%s", cost_terms[k].name);
    }
    return parts;
}

// A list with an entry for each token t of n, of the object `to`; ok: nothing has failed yet.
#define PUT_LIST(ok, to, key, t, n, entry)                                                         \
    do {                                                                                           \
        json_t *list_ = json_array();                                                              \
        for (int t = 0; (ok) && t < (n); t++) (ok) = json_array_append_new(list_, (entry)) == 0;   \
        (ok) = json_object_set_new((to), (key), list_) == 0 && (ok);                               \
    } while (0)

// null where it is not finite, which JSON cannot say: of a policy that diverges.
static json_t *real(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

// What is known of each token. logprobs: the trainer's; NULL: none are wanted.
static bool put_tokens(json_t *line, const struct completion *s, const double *logprobs)
{
    bool ok = true;
    if (s->accepted) PUT_LIST(ok, line, "accepted", t, s->n, json_integer(s->accepted[t]));
    if (s->text_offset) PUT_LIST(ok, line, "text_offset", t, s->n, json_integer(s->text_offset[t]));
    if (s->authors)
        PUT_LIST(ok, line, "model_mask", t, s->n, json_integer(s->authors[t] == AUTHOR_POLICY));
    if (!logprobs) return ok;
    if (s->logprobs) PUT_LIST(ok, line, "logprobs", t, s->n, real(s->logprobs[t]));
    PUT_LIST(ok, line, "trainer_logprobs", t, s->n, real(logprobs[t]));
    return ok;
}

// Rows of one prompt follow each other, so it stands on the first of them only. logprobs: of the
// sample's tokens; NULL: none are wanted.
static json_t *rollout_line(const struct run *run, const struct rollout *r, const struct scores *s,
                            int i, const double *logprobs)
{
    const struct completion *sample = &r->completions[i];
    const struct example *e = r->examples[i / r->n_per_group];
    int number = i % r->n_per_group;
    json_t *line = json_pack(
        "{s:i, s:i, s:s*, s:s, s:o, s:f, s:o*, s:i, s:b, s:O*}", "line", e->line, "sample", number,
        "answer", e->answer, "completion", sample->text, "reward", real(s->rewards[i]), "advantage",
        (double)s->advantages[i], "terms", reward_parts(run, s, i), "tokens", sample->n,
        "truncated", sample->truncated, "telemetry", sample->telemetry);
    bool ok = line != NULL;
    if (ok && number == 0 && e->prompt_json)
        ok = json_object_set(line, "prompt", (json_t *)e->prompt_json) == 0;
    if (ok && number == 0 && e->prompt_text)
        ok = json_object_set(line, "prompt_text", e->prompt_text) == 0;
    if (ok && put_tokens(line, sample, logprobs)) return line;
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
