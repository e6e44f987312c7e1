/* loss.c: the policy-gradient losses and their derivatives, token by token. Pure functions.
 *
 * Every loss of samples is a weighted sum over tokens of
 *     -weight * surrogate(ratio, advantage) + beta * kl,
 * and the types differ in two things only: the weight of a token and what is done to the importance
 * ratio (both in losses.c, with what pairs lose). The weights are normalised over the whole
 * optimizer step, so the micro-batches of a step simply add up, however they were cut; BNPO, whose
 * name says "batch normalised", therefore equals DAPO here. The ratio is that of a token, or,
 * sequence_level, the geometric mean over its sequence: then each token's log-probability moves all
 * of them, so the derivatives through the ratio are summed over the sequence before any is written.
 * GMPO's ratio is such a mean too, of what clipping leaves of each token's.
 *
 * Two quotients of probabilities are kept apart. The ratio is the policy now over the policy before
 * the step's first update, both by the trainer: it is exactly 1 in the first iteration, moves with
 * the updates and is what clipping bounds. The weight of truncated importance sampling (tis) is the
 * policy before the first update, by the trainer, over the one that sampled the token, by the
 * sampler: rounding, and updates made while the token was in flight. It is a constant of the step.
 * Their product is the whole quotient.
 *
 * Tokens that a frozen model wrote among the policy's (tandem) take part with a weight of their
 * own, in the sum and in what it is divided by; those of an environment with none. The sampler's
 * log-probability of such a token is not the policy's: it has no part in tis, nor the token in a
 * sequence's ratio or in what is counted of ratios.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/loss.h"
#include "trainer/learn/stats.h"

#include <math.h>
#include <string.h>

const char *const kl_estimator_names[] = {"k1", "k2", "k3", NULL};
const char *const tis_mode_names[] = {
    "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", NULL};

// n: of its sequence, frozen ones by their weight.
static double token_weight(const struct loss_config *config, const struct loss_scale *scale,
                           double n)
{
    const double seqs = scale->seqs > 0 ? scale->seqs : 1;
    switch (losses[config->type].weight) {
    case BY_SEQUENCE:
        return n > 0 ? 1.0 / (n * seqs) : 0;
    case BY_CONSTANT:
        return 1.0 / (seqs * config->max_completion_length);
    case BY_SUM:
        return 1.0 / seqs;
    case PLAIN_SUM:
        return 1;
    case BY_TOKEN:
        break;
    }
    return 1.0 / (scale->tokens > 0 ? scale->tokens : 1);
}

#define MAX_TOKEN_LOG_RATIO    20
#define MAX_SEQUENCE_LOG_RATIO 10

// A log-ratio within clamp_log_ratios, or as it is without it: of a token, or of a sequence, which
// has no lower bound. ret_held: it was taken to a bound, where it has no derivative.
static double log_ratio_clamped(const struct loss_config *config, double log_ratio,
                                bool of_sequence, bool *ret_held)
{
    const double low = of_sequence ? -INFINITY : -MAX_TOKEN_LOG_RATIO,
                 high = of_sequence ? MAX_SEQUENCE_LOG_RATIO : MAX_TOKEN_LOG_RATIO;
    *ret_held = config->clamp_log_ratios && (log_ratio < low || log_ratio > high);
    return *ret_held ? fmin(fmax(log_ratio, low), high) : log_ratio;
}

// ---- KL to the reference ------------------------------------------------------------------------

#define MAX_K3 10

static double kl_estimate(const struct loss_config *config, double logprob, double ref,
                          double *ret_by_logprob)
{
    double d = ref - logprob;
    bool held;
    switch (config->kl_estimator) {
    case KL_K1:
        *ret_by_logprob = 1;
        return -d;
    case KL_K2:
        *ret_by_logprob = -d;
        return d * d / 2;
    case KL_K3:
        break;
    }
    d = log_ratio_clamped(config, d, false, &held);
    const double k3 = expm1(d) - d;
    const bool above = config->clamp_log_ratios && k3 > MAX_K3;
    *ret_by_logprob = held || above ? 0 : -expm1(d);
    return above ? MAX_K3 : k3;
}

// ---- truncated importance sampling --------------------------------------------------------------

struct tis {
    double weight;
    bool cut; // truncated or masked
};

static bool tis_is_of_sequence(const struct loss_config *config)
{
    return config->tis == TIS_SEQUENCE_TRUNCATE || config->tis == TIS_SEQUENCE_MASK;
}

static struct tis tis_weight(const struct loss_config *config, double log_weight)
{
    bool mask = config->tis == TIS_TOKEN_MASK || config->tis == TIS_SEQUENCE_MASK;
    bool held;
    double weight = exp(log_ratio_clamped(config, log_weight, false, &held));
    bool below = config->tis_min > 0 && weight < config->tis_min;
    bool above = config->tis_max > 0 && weight > config->tis_max;
    if (below || above) weight = mask ? 0 : below ? config->tis_min : config->tis_max;
    return (struct tis){weight, below || above};
}

static void count_tis(struct tis c, struct update_stats *stats)
{
    stats_add(stats, STAT_TIS, c.weight);
    stats_add(stats, STAT_TIS_CUT, c.cut);
}

// ---- a sequence ---------------------------------------------------------------------------------

struct sequence { // one completion
    const struct loss_config *config;
    const struct loss *loss;
    const struct pack_completion *c;
    const struct loss_rows *rows;
    const float *old, *sampler; // what the ratio is to; NULL: no importance sampling
    int n_policy, n_ratio;      // tokens of the policy; of its own ratio
    double weight;              // of all its tokens
    double log_ratio;           // mean over n_ratio tokens; OF_LOGS: of what clipping left
    bool far;                   // that mask is on, and drift above its threshold
    double drift;               // mean log-ratio of the sampler to the policy now
    struct tis tis;             // where it is the whole sequence's
};

static double weight_of(const struct sequence *s, int t)
{
    const double weights[] = {[AUTHOR_POLICY] = 1, [AUTHOR_FROZEN] = s->config->frozen_weight};
    return weights[token_author(s->c->authors, t)];
}

static double advantage_of(const struct sequence *s, int t)
{
    const float *of_tokens = s->c->inputs[s->loss->advantages];
    return of_tokens ? of_tokens[t] : s->c->advantage;
}

// One ratio for all tokens of a sequence, which all of them move.
static bool shares_ratio(const struct sequence *s)
{
    return s->config->sequence_level || s->loss->bounds == OF_LOGS;
}

static struct sequence sequence_of(const struct loss_config *config,
                                   const struct pack_completion *c, const struct loss_rows *rows)
{
    const struct loss *loss = &losses[config->type];
    const float *sampler = c->inputs[INPUT_LOGPROBS], *mask = c->inputs[INPUT_RATIO_MASK];
    const float *old = loss->weight == PLAIN_SUM ? sampler : rows->old;
    double log_weight = 0;
    if (!old) old = rows->logprobs;
    struct sequence s = {.config = config, .loss = loss, .c = c, .rows = rows, .old = old};
    if (config->tis != TIS_OFF) s.sampler = sampler;
    for (int t = 0; t < rows->n; t++) {
        s.weight += weight_of(&s, t);
        if (!completion_wrote(c, t)) continue;
        s.n_policy++;
        const double log_ratio = (double)rows->logprobs[t] - old[t];
        if (!mask || mask[t] != 0) {
            s.n_ratio++;
            s.log_ratio += loss->bounds == OF_LOGS
                               ? clip_log_ratio(config, log_ratio, advantage_of(&s, t)).log_ratio
                               : log_ratio;
        }
        s.drift += (double)(sampler ? sampler : old)[t] - rows->logprobs[t];
        if (s.sampler) log_weight += (double)old[t] - s.sampler[t];
    }
    if (s.n_ratio > 0) s.log_ratio /= s.n_ratio;
    if (s.n_policy > 0) s.drift /= s.n_policy;
    s.far = config->off_policy_mask && s.drift > config->off_policy_threshold;
    s.tis = tis_weight(config, log_weight);
    return s;
}

static bool has_kl(const struct sequence *s)
{
    return s->config->beta != 0 && s->rows->ref;
}

struct term { // of one token, before its weight in the mean
    double ratio;
    struct tis tis;
    struct surrogate surrogate;
    double kl, loss;
    double by_log_ratio, by_logprob; // derivatives of loss
};

static struct token token_of(const struct sequence *s, int t, double ratio)
{
    const struct loss_config *c = s->config;
    const float *low = s->c->inputs[INPUT_CLIP_LOW], *high = s->c->inputs[INPUT_CLIP_HIGH];
    struct token token = {c, s->rows->logprobs[t], s->old[t], ratio, advantage_of(s, t), 0, 0};
    const enum bounds bounds = s->loss->bounds;
    token.low = bounds == AROUND_ONE ? 1 - c->epsilon : bounds == AS_GIVEN ? c->epsilon : 0;
    token.high = bounds == AROUND_ONE ? 1 + c->epsilon_high : c->epsilon_high;
    if (low) token.low = low[t];
    if (high) token.high = high[t];
    return token;
}

static struct term term_of(const struct sequence *s, int t)
{
    const struct loss_config *config = s->config;
    const double logprob = s->rows->logprobs[t], own = logprob - s->old[t];
    const double log_ratio = shares_ratio(s) || s->loss->sequence_value ? s->log_ratio : own;
    bool held = false; // as verl, GMPO's has its clips alone
    struct term term = {.tis = {1, false}};
    term.ratio = exp(s->loss->bounds == OF_LOGS
                         ? log_ratio
                         : log_ratio_clamped(config, log_ratio, config->sequence_level, &held));
    if (tis_is_of_sequence(config))
        term.tis = s->tis;
    else if (s->sampler && completion_wrote(s->c, t))
        term.tis = tis_weight(config, (double)s->old[t] - s->sampler[t]);
    const struct token token = token_of(s, t, term.ratio);
    term.surrogate = s->loss->surrogate(&token);
    if (!(s->far && token.advantage < 0) &&
        (!s->rows->chosen || s->rows->chosen[t])) { // it has a part in the policy's term
        term.loss = -term.tis.weight * term.surrogate.value;
        term.by_log_ratio = -term.tis.weight * term.surrogate.by_log_ratio;
        term.by_logprob = -term.tis.weight * term.surrogate.by_logprob;
    }
    if (has_kl(s)) {
        double by_logprob, scale = config->beta * (config->bias_correction_kl ? term.ratio : 1);
        term.kl = kl_estimate(config, logprob, s->rows->ref[t], &by_logprob);
        term.loss += scale * term.kl;
        term.by_logprob += scale * by_logprob;
        if (config->bias_correction_kl) term.by_log_ratio += scale * term.kl;
    }
    if (held) term.by_log_ratio = 0;
    return term;
}

static void count_term(const struct sequence *s, const struct term *term, bool first,
                       struct update_stats *stats)
{
    if (s->sampler && !tis_is_of_sequence(s->config)) count_tis(term->tis, stats);
    if (s->config->sequence_level && !first) return; // one ratio for all of them
    stats_add(stats, STAT_RATIO, term->ratio);
    stats_add(stats, STAT_CLIP_LOW, term->surrogate.low);
    stats_add(stats, STAT_CLIP_HIGH, term->surrogate.high);
    stats_add(stats, STAT_CLIP_REGION, term->surrogate.low || term->surrogate.high);
    stats_add(stats, STAT_CISPO_CLIP, term->surrogate.high);
    stats_add(stats, STAT_CLIP_DELTA, term->surrogate.delta);
}

static void loss_sequence(const struct sequence *s, const struct loss_scale *scale,
                          struct update_stats *stats, float *ret_dlogprobs)
{
    const double share = token_weight(s->config, scale, s->weight);
    double shared = 0, low = 0, high = 0;
    int n_counted = 0;

    // Every token of the policy in a sequence moves its ratio by 1 / n.
    if (shares_ratio(s) && s->n_policy > 0)
        for (int t = 0; t < s->rows->n; t++)
            shared += weight_of(s, t) * term_of(s, t).by_log_ratio / s->n_policy;
    for (int t = 0; t < s->rows->n; t++) {
        const struct term term = term_of(s, t);
        const double weight = weight_of(s, t);
        double through_ratio = weight * term.by_log_ratio;
        if (shares_ratio(s))
            through_ratio = completion_wrote(s->c, t) && !term.surrogate.held ? shared : 0;
        ret_dlogprobs[t] = (float)(share * (weight * term.by_logprob + through_ratio));
        stats_add(stats, STAT_LOSS, share * weight * term.loss);
        if (has_kl(s) && token_author(s->c->authors, t) != AUTHOR_OTHER)
            stats_add(stats, STAT_KL, term.kl);
        if (!completion_wrote(s->c, t)) continue;
        low += term.surrogate.low;
        high += term.surrogate.high;
        count_term(s, &term, n_counted++ == 0, stats);
    }
    if (tis_is_of_sequence(s->config)) count_tis(s->tis, stats);
    stats_add(stats, STAT_OFF_POLICY, s->far && s->c->advantage < 0);
    if (s->n_policy == 0) return;
    stats_add(stats, STAT_SEQ_CLIP_LOW, low / s->n_policy);
    stats_add(stats, STAT_SEQ_CLIP_HIGH, high / s->n_policy);
}

static double sum_of(const struct loss_rows *rows)
{
    double sum = 0;
    for (int i = 0; i < rows->n; i++) sum += rows->logprobs[i];
    return sum;
}

// The rewards and their margin are as TRL has them.
static void loss_pair(const struct loss_config *config, const struct loss_scale *scale,
                      const struct pack_completion c[2], const struct loss_rows rows[2],
                      struct update_stats *stats, float *ret_dlogprobs)
{
    const double chosen = sum_of(&rows[0]), rejected = sum_of(&rows[1]);
    const double weight = token_weight(config, scale, 0),
                 per_token = config->sft_weight / (scale->tokens > 0 ? scale->tokens : 1);
    const struct pair pair = {chosen - c[0].reference, rejected - c[1].reference, rows[0].n,
                              rows[1].n};
    const struct pair_loss loss = losses[config->type].pair(config, &pair);
    stats_add(stats, STAT_LOSS, loss.loss * weight - chosen * per_token);
    stats_add(stats, STAT_CHOSEN_REWARD, config->beta * pair.chosen);
    stats_add(stats, STAT_REJECTED_REWARD, config->beta * pair.rejected);
    stats_add(stats, STAT_MARGIN, config->beta * (pair.chosen - pair.rejected));
    stats_add(stats, STAT_RIGHT, pair.chosen > pair.rejected);
    stats_add(stats, STAT_CHOSEN_LOGPROB, chosen);
    stats_add(stats, STAT_REJECTED_LOGPROB, rejected);
    for (int i = 0; i < rows[0].n + rows[1].n; i++)
        ret_dlogprobs[i] = (float)(i < rows[0].n ? loss.by_chosen * weight - per_token
                                                 : loss.by_rejected * weight);
}

uint64_t loss_stats(const struct loss_config *c)
{
    const uint64_t given = STAT_BIT(STAT_LOSS) | STAT_BIT(STAT_ENTROPY),
                   of_data = given | STAT_BIT(STAT_LIKELIEST);
    if (c->type == LOSS_CROSS_ENTROPY) return of_data;
    if (losses[c->type].pair) return of_data | STAT_BITS(STAT_CHOSEN_REWARD, STAT_REJECTED_LOGPROB);
    return given | STAT_BITS(STAT_MISMATCH, STAT_MISMATCH_NOW) |
           STAT_BITS(STAT_RATIO, STAT_SEQ_CLIP_HIGH) | (c->beta > 0 ? STAT_BIT(STAT_KL) : 0) |
           (c->delta > 0 ? STAT_BIT(STAT_CLIP_DELTA) : 0) |
           (c->type == LOSS_CISPO ? STAT_BIT(STAT_CISPO_CLIP) : 0) |
           (c->off_policy_mask ? STAT_BIT(STAT_OFF_POLICY) : 0) |
           (c->tis != TIS_OFF ? STAT_BITS(STAT_TIS, STAT_TIS_CUT) : 0);
}

void loss_compute(const struct loss_config *config, const struct loss_scale *scale,
                  const struct pack_completion *c, const struct loss_rows *rows,
                  struct update_stats *stats, float *ret_dlogprobs)
{
    if (losses[config->type].pair) {
        loss_pair(config, scale, c, rows, stats, ret_dlogprobs);
    } else if (rows->n > 0 && !c->masked) {
        const struct sequence s = sequence_of(config, c, rows);
        loss_sequence(&s, scale, stats, ret_dlogprobs);
    } else {
        memset(ret_dlogprobs, 0, (size_t)rows->n * sizeof *ret_dlogprobs);
        stats_add(stats, STAT_OFF_POLICY, 0);
    }
}
