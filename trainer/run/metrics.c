/* metrics.c: the table of metrics of a loss, whose keys are TRL's where TRL logs the same, and
 * those of speculative decoding. The wording of the latter's log line is vLLM's, so that what reads
 * its logs reads these. Stateless. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/comm.h"
#include "trainer/learn/stats.h"
#include "trainer/rollout/spec_counters.h"
#include "trainer/run/runlog.h"

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
    for (int i = 0; i < c->n_positions; i++) {
        metrics_putf(metrics, spec_acceptance_at(c, i), "spec_decode/acceptance_rate_pos_%d", i);
    }
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
