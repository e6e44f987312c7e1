/* run_metrics.c: the line of metrics.jsonl of a step: the table of metrics of a loss, those of
 * speculative decoding, and what else there is of a step. Keys are TRL's where TRL logs the same;
 * the wording of speculative decoding's log line is vLLM's, so that what reads its logs reads
 * these. The main thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/learner.h"
#include "trainer/rollout/source.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <math.h>

#define LENGTH_CLASSES 4 // of samples, in rollout/staleness_by_length

// ---- of a loss ----------------------------------------------------------------------------------

enum figure { PER_UPDATE, POLICY_LOSS, MEAN, MIN, MAX };

static const struct {
    const char *key;
    enum statistic stat;
    enum figure figure;
} rows[] = {
    {"loss", STAT_LOSS, PER_UPDATE},
    {"kl", STAT_KL, MEAN},
    {"entropy", STAT_ENTROPY, MEAN},
    {"policy_loss", STAT_EXTRA_LOSS, POLICY_LOSS},
    {"aux_loss", STAT_AUX_LOSS, PER_UPDATE},
    {"teacher/divergence", STAT_TEACHER_DIVERGENCE, MEAN},
    {"teacher/agreement", STAT_TEACHER_AGREES, MEAN},
    {"teacher/divergence/to_32", STAT_TEACHER_TO_32, MEAN},
    {"teacher/divergence/to_128", STAT_TEACHER_TO_128, MEAN},
    {"teacher/divergence/to_512", STAT_TEACHER_TO_512, MEAN},
    {"teacher/divergence/beyond", STAT_TEACHER_BEYOND, MEAN},
    {"off_policy_mask/sequences", STAT_OFF_POLICY, MEAN},
    {"clip_ratio/low_mean", STAT_CLIP_LOW, MEAN},
    {"clip_ratio/low_min", STAT_SEQ_CLIP_LOW, MIN},
    {"clip_ratio/high_mean", STAT_CLIP_HIGH, MEAN},
    {"clip_ratio/high_max", STAT_SEQ_CLIP_HIGH, MAX},
    {"clip_ratio/region_mean", STAT_CLIP_REGION, MEAN},
    {"cispo_clip_ratio", STAT_CISPO_CLIP, MEAN},
    {"clip_ratio/delta_mean", STAT_CLIP_DELTA, MEAN},
    {"importance_ratio/mean", STAT_RATIO, MEAN},
    {"importance_ratio/min", STAT_RATIO, MIN},
    {"importance_ratio/max", STAT_RATIO, MAX},
    {"sampling/importance_sampling_ratio/mean", STAT_TIS, MEAN},
    {"sampling/importance_sampling_ratio/min", STAT_TIS, MIN},
    {"sampling/importance_sampling_ratio/max", STAT_TIS, MAX},
    {"sampling/importance_sampling_ratio/cut", STAT_TIS_CUT, MEAN},
    {"sampler_mismatch/mean", STAT_MISMATCH, MEAN},
    {"sampler_mismatch/max", STAT_MISMATCH_NOW, MAX},
    {"sampler_mismatch/k3", STAT_MISMATCH_K3, MEAN},
    {"mean_token_accuracy", STAT_LIKELIEST, MEAN},
    {"rewards/chosen", STAT_CHOSEN_REWARD, MEAN},
    {"rewards/rejected", STAT_REJECTED_REWARD, MEAN},
    {"rewards/margins", STAT_MARGIN, MEAN},
    {"rewards/accuracies", STAT_RIGHT, MEAN},
    {"logps/chosen", STAT_CHOSEN_LOGPROB, MEAN},
    {"logps/rejected", STAT_REJECTED_LOGPROB, MEAN},
};

static double figure_of(const struct update_stats *s, enum statistic stat, enum figure figure)
{
    switch (figure) {
    case PER_UPDATE:
        return stats_per_update(s, stat);
    case POLICY_LOSS:
        return stats_per_update(s, STAT_LOSS) - stats_per_update(s, STAT_EXTRA_LOSS);
    case MEAN:
        return stats_mean(s, stat);
    case MIN:
        return s->range[stat].min;
    case MAX:
        break;
    }
    return s->range[stat].max;
}

void stats_put(const struct update_stats *stats, uint64_t given, const char *prefix,
               json_t *metrics)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (given & STAT_BIT(rows[i].stat))
            metrics_putf(metrics, figure_of(stats, rows[i].stat, rows[i].figure), "%s%s", prefix,
                         rows[i].key);
}

void ranks_put(const struct update_stats *stats, const struct comm *all, json_t *metrics)
{
    if (!all) return;
    metrics_put(metrics, "ranks/size", comm_size(all));
    metrics_put(metrics, "ranks/gradient_wait_ms", stats->gradient_wait_ms);
}

void spec_counters_put(const struct spec_counters *c, json_t *metrics)
{
    if (!c->present) return;
    metrics_put(metrics, "spec_decode/num_drafts", c->num_drafts);
    metrics_put(metrics, "spec_decode/num_draft_tokens", c->num_draft_tokens);
    metrics_put(metrics, "spec_decode/num_accepted_tokens", c->num_accepted_tokens);
    metrics_put(metrics, "spec_decode/acceptance_rate", spec_acceptance_rate(c));
    metrics_put(metrics, "spec_decode/acceptance_length", spec_acceptance_length(c));
    for (int i = 0; i < c->n_positions; i++)
        metrics_putf(metrics, spec_acceptance_at(c, i), "spec_decode/acceptance_rate_pos_%d", i);
}

void spec_counters_text(const struct spec_counters *c, double seconds, struct bytes *ret)
{
    bytes_printf(ret,
                 "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f "
                 "tokens/s, Drafted throughput: %.2f tokens/s, Accepted: %.0f tokens, Drafted: "
                 "%.0f tokens, Per-position acceptance rate: ",
                 spec_acceptance_length(c), c->num_accepted_tokens / seconds,
                 c->num_draft_tokens / seconds, c->num_accepted_tokens, c->num_draft_tokens);
    for (int i = 0; i < c->n_positions; i++)
        bytes_printf(ret, "%s%.3f", i ? ", " : "", spec_acceptance_at(c, i));
    bytes_printf(ret, ", Avg Draft acceptance rate: %.1f%%", 100 * spec_acceptance_rate(c));
}

// ---- of a step ----------------------------------------------------------------------------------

double run_accuracy(const struct run *run, const struct scores *s)
{
    double mean;
    int term = reward_info(run->reward)->accuracy_term;
    if (term < 0 || !s->terms) return -1; // of scores that are an environment's there are no terms
    mean_std(s->terms + (size_t)term * (size_t)s->n, s->n, &mean, NULL);
    return mean;
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
    metrics_put(metrics, "completions/clipped_ratio", (double)(all.n - terminated.n) / all.n);
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
        double mean, std, weight = cost_signed_weight(run->scoring->weights, k);
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
    for (size_t k = 0; k < sizeof told / sizeof *told; k++)
        metrics_putf(metrics, means[told[k]], "inference/%s", cost_terms[told[k]].quantity);
}

static void put_update(json_t *metrics, const struct run *run, const struct update_stats *u)
{
    uint64_t given = loss_stats(&run->resolved.loss);
    if (entropy_has_bonus(&run->config->entropy)) {
        given |= STAT_BIT(STAT_EXTRA_LOSS);
        metrics_put(metrics, "entropy_coef", run->entropy.coef);
    }
    if (learner_info(run->learner)->balance_coef > 0) given |= STAT_BIT(STAT_AUX_LOSS);
    if (run->config->teacher)
        given |=
            STAT_BIT(STAT_EXTRA_LOSS) | STAT_BITS(STAT_TEACHER_DIVERGENCE, STAT_TEACHER_BEYOND);
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
    if (run->mapped.draft) {
        const bool any = u->draft_targets > 0; // else null: nothing was compared
        metrics_put(metrics, "draft_loss", any ? stats_mean(u, STAT_DRAFT_KL) : NAN);
        metrics_put(metrics, "draft_overlap", any ? stats_mean(u, STAT_DRAFT_OVERLAP) : NAN);
        metrics_put(metrics, "draft_grad_norm",
                    any && !u->draft_skipped ? u->draft_grad_norm : NAN);
        metrics_put(metrics, "draft_learning_rate", run_draft_rate(run, run->step - 1));
    }
    if (run->config->sampling.tandem.on) {
        const double frozen = u->range[STAT_FROZEN].n > 0 ? stats_mean(u, STAT_FROZEN) : NAN;
        metrics_put(metrics, "tandem/primary_token_fraction", 1 - frozen);
        metrics_put(metrics, "tandem/frozen_token_fraction", frozen);
    }
}

static double updates_since(const struct run *run, uint64_t version)
{
    return ((double)run->step_version - (double)version) / 2; // both are even
}

// Mean over the tokens of samples of each class of length, a quarter of --max-completion-length
// wide: null where there is none.
static void put_staleness_by_length(const struct run *run, const struct rollout *r, json_t *metrics)
{
    double sum[LENGTH_CLASSES] = {0}, n[LENGTH_CLASSES] = {0};
    const double max = (double)run->config->sampling.max_tokens;
    for (int i = 0; i < r->n_groups * r->n_per_group; i++) {
        const struct completion *c = &r->completions[i];
        const int k = (int)(LENGTH_CLASSES * fmin(run_length(c), max - 1) / max);
        for (int t = 0; t < c->n; t++) sum[k] += updates_since(run, c->versions[t]);
        n[k] += c->n;
    }
    for (int k = 0; k < LENGTH_CLASSES; k++)
        metrics_putf(metrics, n[k] > 0 ? sum[k] / n[k] : NAN, "rollout/staleness_by_length/%d",
                     k + 1);
}

// Of a step learned from by the weights of run->step_version: how many updates older those were
// that sampled it, and how long each side waited for the other. Nothing without --async.
static void put_staleness(const struct run *run, const struct rollout_step *s, double wait_s,
                          json_t *metrics)
{
    const struct rollout *r = s->rollout;
    double sum = 0, max = 0;
    if (!run->resolved.async && run->resolved.max_staleness == 0) return;
    for (int i = 0; i < r->n_groups * r->n_per_group; i++)
        for (int t = 0; t < r->completions[i].n; t++) {
            const double updates = updates_since(run, r->completions[i].versions[t]);
            sum += updates;
            max = fmax(max, updates);
        }
    metrics_put(metrics, "rollout/staleness_mean", r->n_tokens ? sum / (double)r->n_tokens : 0);
    metrics_put(metrics, "rollout/staleness_max", max);
    for (int64_t age = 0; age <= run->resolved.max_staleness; age++) {
        int n = 0;
        for (int g = 0; g < r->n_groups; g++) {
            const uint64_t oldest = rollout_oldest(r, g);
            n += (oldest == UINT64_MAX ? 0 : updates_since(run, oldest)) == (double)age;
        }
        metrics_putf(metrics, n, "rollout/staleness_groups/%" PRId64, age);
    }
    put_staleness_by_length(run, r, metrics);
    metrics_put(metrics, "rollout/carried_groups", s->n_carried);
    metrics_put(metrics, "rollout/generated_again", (double)s->n_again / r->n_groups);
    metrics_put(metrics, "rollout/trainer_wait_s", wait_s);
    metrics_put(metrics, "rollout/sampler_wait_s", s->idle_s);
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
    if (run->config->filter_groups > 0) {
        metrics_put(metrics, "filter_groups/drawn", s->filter.drawn);
        metrics_put(metrics, "filter_groups/flat", (double)s->filter.flat / rollout->n_groups);
        metrics_put(metrics, "filter_groups/reward",
                    s->filter.n_rewards > 0 ? s->filter.reward_sum / s->filter.n_rewards : NAN);
    }
    put_staleness(run, s, wait_s, metrics);
    for (const struct source_count *c = s->counts.items; c < s->counts.items + s->counts.n; c++)
        metrics_put(metrics, c->key, c->of > 0 ? c->sum / c->of : c->sum);
    metrics_put(metrics, "sync/time_s", run->settle_s + update->publish.total_ms / 1e3);
    metrics_put(metrics, "sync/bytes_written", run->written_bytes);
    run->settle_s = run->written_bytes = 0;
    metrics_put(metrics, "rollout_s", rollout->seconds);
    metrics_put(metrics, "train_s", train_s);
    metrics_put(metrics, "step_s", step_s);
    metrics_put(metrics, "tokens_per_s", (double)rollout->n_tokens / step_s);
    return metrics;
}
