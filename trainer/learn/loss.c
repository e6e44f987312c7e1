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
 * own, in the sum and in what it is divided by. The sampler's log-probability of such a token is
 * not the policy's: it has no part in tis, nor the token in a sequence's ratio or in what is
 * counted of ratios.
 */
#include "trainer/learn/loss.h"

#include <math.h>
#include <string.h>

const char *const kl_estimator_names[] = {"k1", "k2", "k3", NULL};
const char *const tis_mode_names[] = {
    "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", NULL};

// n: of its sequence, frozen ones by their weight.
static double token_weight(const struct loss_config *config, const struct loss_batch *batch,
                           double n)
{
    const double seqs = batch->step_seqs > 0 ? batch->step_seqs : 1;
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
    return 1.0 / (batch->step_tokens > 0 ? batch->step_tokens : 1);
}

#define TOKEN_MOST    20
#define SEQUENCE_MOST 10

// A log-ratio within clamp_log_ratios, or as it is without it: of a token, or of a sequence, which
// has no lower bound. ret_held: it was taken to a bound, where it has no derivative.
static double log_ratio_clamped(const struct loss_config *config, double log_ratio,
                                bool of_sequence, bool *ret_held)
{
    const double low = of_sequence ? -INFINITY : -TOKEN_MOST,
                 high = of_sequence ? SEQUENCE_MOST : TOKEN_MOST;
    *ret_held = config->clamp_log_ratios && (log_ratio < low || log_ratio > high);
    return *ret_held ? fmin(fmax(log_ratio, low), high) : log_ratio;
}

// ---- KL to the reference ------------------------------------------------------------------------

static double kl_of(enum kl_estimator estimator, double d, double *ret_by_logprob)
{
    switch (estimator) {
    case KL_K1:
        *ret_by_logprob = 1;
        return -d;
    case KL_K2:
        *ret_by_logprob = -d;
        return d * d / 2;
    case KL_K3:
        break;
    }
    *ret_by_logprob = -expm1(d);
    return expm1(d) - d;
}

#define K3_MOST 10

static double kl_estimate(const struct loss_config *config, double logprob, double ref,
                          double *ret_by_logprob)
{
    bool held;
    const double d = ref - logprob;
    if (!config->clamp_log_ratios || config->kl_estimator != KL_K3)
        return kl_of(config->kl_estimator, d, ret_by_logprob);
    const double kl = kl_of(KL_K3, log_ratio_clamped(config, d, false, &held), ret_by_logprob);
    if (kl > K3_MOST || held) *ret_by_logprob = 0;
    return fmin(kl, K3_MOST);
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

struct sequence {                                // one sequence's share of the batch
    int n, n_policy, n_ratio;                    // tokens; of the policy; of its own ratio
    const float *logprobs, *old, *sampler, *ref; // sampler, ref: NULL where off
    const uint8_t *by_policy;                    // NULL: all are
    double frozen_weight, weight;                // of a token that is not; of all its tokens
    double advantage;
    const float *token_advantages;        // NULL: that one
    const uint8_t *chosen;                // NULL: all tokens
    const float *ratio_mask, *low, *high; // NULL: all count; no bounds of their own
    double log_ratio; // mean over n_ratio tokens; OF_LOGS: of what clipping left
    double drift;     // mean log-ratio of the sampler to the policy now
    struct tis tis;   // where it is the whole sequence's
};

static bool is_policys(const struct sequence *s, int t)
{
    return !s->by_policy || s->by_policy[t];
}
static double weight_of(const struct sequence *s, int t)
{
    return is_policys(s, t) ? 1 : s->frozen_weight;
}

static double advantage_of(const struct sequence *s, int t)
{
    return s->token_advantages ? s->token_advantages[t] : s->advantage;
}

static const float *row(const float *array, int first)
{
    return array ? array + first : NULL;
}

static bool clips_logs(const struct loss_config *config)
{
    return losses[config->type].bounds == OF_LOGS;
}

// One ratio for all tokens of a sequence, which all of them move.
static bool shares_ratio(const struct loss_config *config)
{
    return config->sequence_level || clips_logs(config);
}

static struct sequence sequence_of(const struct loss_config *config, const struct loss_batch *batch,
                                   int seq)
{
    int first = batch->first[seq];
    double log_weight = 0;
    const float *old = (batch->old_logprobs ? batch->old_logprobs : batch->logprobs) + first,
                *sampler = batch->sampler_logprobs ? batch->sampler_logprobs + first : old;
    struct sequence s = {
        .n = batch->first[seq + 1] - first,
        .logprobs = batch->logprobs + first,
        .old = old,
        .sampler = config->tis == TIS_OFF ? NULL : batch->sampler_logprobs + first,
        .ref = config->beta != 0 ? row(batch->ref_logprobs, first) : NULL,
        .by_policy = batch->by_policy ? batch->by_policy + first : NULL,
        .frozen_weight = config->frozen_weight,
        .advantage = batch->advantages[seq],
        .token_advantages = row(batch->token_advantages, first),
        .chosen = batch->chosen ? batch->chosen + first : NULL,
        .ratio_mask = row(batch->ratio_mask, first),
        .low = row(batch->low, first),
        .high = row(batch->high, first),
    };
    for (int t = 0; t < s.n; t++) {
        s.weight += weight_of(&s, t);
        if (!is_policys(&s, t)) continue;
        s.n_policy++;
        const double log_ratio = (double)s.logprobs[t] - s.old[t];
        if (!s.ratio_mask || s.ratio_mask[t] != 0) {
            s.n_ratio++;
            s.log_ratio += clips_logs(config)
                               ? clip_log_ratio(config, log_ratio, advantage_of(&s, t)).log_ratio
                               : log_ratio;
        }
        s.drift += (double)sampler[t] - s.logprobs[t];
        if (s.sampler) log_weight += (double)s.old[t] - s.sampler[t];
    }
    if (s.n_ratio > 0) s.log_ratio /= s.n_ratio;
    if (s.n_policy > 0) s.drift /= s.n_policy;
    s.tis = tis_weight(config, log_weight);
    return s;
}

struct term { // of one token, before its weight in the mean
    double ratio;
    struct tis tis;
    struct surrogate surrogate;
    double kl, loss;
    double by_log_ratio, by_logprob; // derivatives of loss
};

// Whether a token has a part in the policy's term.
static bool counts(const struct loss_config *config, const struct sequence *s, int t)
{
    const bool far = config->off_policy_threshold > 0 && s->drift > config->off_policy_threshold;
    return !(far && advantage_of(s, t) < 0) && (!s->chosen || s->chosen[t]);
}

static struct token token_of(const struct loss_config *c, const struct sequence *s, int t,
                             double ratio)
{
    struct token token = {c, s->logprobs[t], s->old[t], ratio, advantage_of(s, t), 0, 0};
    const enum bounds bounds = losses[c->type].bounds;
    token.low = bounds == AROUND_ONE ? 1 - c->epsilon : bounds == AS_GIVEN ? c->epsilon : 0;
    token.high = bounds == AROUND_ONE ? 1 + c->epsilon_high : c->epsilon_high;
    if (s->low) token.low = s->low[t];
    if (s->high) token.high = s->high[t];
    return token;
}

static struct term term_of(const struct loss_config *config, const struct sequence *s, int t)
{
    const double logprob = s->logprobs[t], own = logprob - s->old[t];
    const struct loss *loss = &losses[config->type];
    const double log_ratio = shares_ratio(config) || loss->sequence_value ? s->log_ratio : own;
    bool held = false; // as verl, GMPO's has its clips alone
    struct term term = {.tis = {1, false}};
    term.ratio = exp(clips_logs(config)
                         ? log_ratio
                         : log_ratio_clamped(config, log_ratio, config->sequence_level, &held));
    if (tis_is_of_sequence(config))
        term.tis = s->tis;
    else if (s->sampler && is_policys(s, t))
        term.tis = tis_weight(config, (double)s->old[t] - s->sampler[t]);
    const struct token token = token_of(config, s, t, term.ratio);
    term.surrogate = loss->surrogate(&token);
    if (counts(config, s, t)) {
        term.loss = -term.tis.weight * term.surrogate.value;
        term.by_log_ratio = -term.tis.weight * term.surrogate.by_log_ratio;
        term.by_logprob = -term.tis.weight * term.surrogate.by_logprob;
    }
    if (s->ref) {
        double by_logprob, scale = config->beta * (config->bias_correction_kl ? term.ratio : 1);
        term.kl = kl_estimate(config, logprob, s->ref[t], &by_logprob);
        term.loss += scale * term.kl;
        term.by_logprob += scale * by_logprob;
        if (config->bias_correction_kl) term.by_log_ratio += scale * term.kl;
    }
    if (held) term.by_log_ratio = 0;
    return term;
}

static void count_term(const struct loss_config *config, const struct sequence *s,
                       const struct term *term, bool first, struct update_stats *stats)
{
    if (s->sampler && !tis_is_of_sequence(config)) count_tis(term->tis, stats);
    if (config->sequence_level && !first) return; // one ratio for all of them
    stats_add(stats, STAT_RATIO, term->ratio);
    stats_add(stats, STAT_CLIP_LOW, term->surrogate.low);
    stats_add(stats, STAT_CLIP_HIGH, term->surrogate.high);
    stats_add(stats, STAT_CLIP_REGION, term->surrogate.low || term->surrogate.high);
    stats_add(stats, STAT_CISPO_CLIP, term->surrogate.high);
    stats_add(stats, STAT_CLIP_DELTA, term->surrogate.delta);
}

static void loss_sequence(const struct loss_config *config, const struct loss_batch *batch, int seq,
                          struct update_stats *stats, float *ret_dlogprobs)
{
    struct sequence s = sequence_of(config, batch, seq);
    double share = token_weight(config, batch, s.weight), shared = 0, low = 0, high = 0;
    float *dlogprobs = ret_dlogprobs + batch->first[seq];
    int n_counted = 0;

    // Every token of the policy in a sequence moves its ratio by 1 / n.
    if (shares_ratio(config) && s.n_policy > 0)
        for (int t = 0; t < s.n; t++)
            shared += weight_of(&s, t) * term_of(config, &s, t).by_log_ratio / s.n_policy;
    for (int t = 0; t < s.n; t++) {
        const struct term term = term_of(config, &s, t);
        const double weight = weight_of(&s, t);
        double through_ratio = weight * term.by_log_ratio;
        if (shares_ratio(config))
            through_ratio = is_policys(&s, t) && !term.surrogate.held ? shared : 0;
        dlogprobs[t] = (float)(share * (weight * term.by_logprob + through_ratio));
        stats_add(stats, STAT_LOSS, share * weight * term.loss);
        if (s.ref) stats_add(stats, STAT_KL, term.kl);
        if (!is_policys(&s, t)) continue;
        low += term.surrogate.low;
        high += term.surrogate.high;
        count_term(config, &s, &term, n_counted++ == 0, stats);
    }
    if (tis_is_of_sequence(config)) count_tis(s.tis, stats);
    stats_add(stats, STAT_OFF_POLICY,
              config->off_policy_threshold > 0 && s.advantage < 0 &&
                  s.drift > config->off_policy_threshold);
    if (s.n_policy == 0) return;
    stats_add(stats, STAT_SEQ_CLIP_LOW, low / s.n_policy);
    stats_add(stats, STAT_SEQ_CLIP_HIGH, high / s.n_policy);
}

// Its summed log-probability, and the derivative by it of each token.
static double sum_of(const struct loss_batch *batch, int seq)
{
    double sum = 0;
    for (int i = batch->first[seq]; i < batch->first[seq + 1]; i++) sum += batch->logprobs[i];
    return sum;
}

static void fill(const struct loss_batch *batch, int seq, double value, float *ret)
{
    for (int i = batch->first[seq]; i < batch->first[seq + 1]; i++) ret[i] = (float)value;
}

// The rewards and their margin are as TRL has them.
static void loss_pair(const struct loss_config *config, const struct loss_batch *batch, int seq,
                      struct update_stats *stats, float *ret_dlogprobs)
{
    const double chosen = sum_of(batch, seq), rejected = sum_of(batch, seq + 1);
    const double weight = token_weight(config, batch, 0),
                 per_token = config->sft_weight / (batch->step_tokens > 0 ? batch->step_tokens : 1);
    const struct pair pair = {
        chosen - batch->references[seq], rejected - batch->references[seq + 1],
        batch->first[seq + 1] - batch->first[seq], batch->first[seq + 2] - batch->first[seq + 1]};
    const struct pair_loss loss = losses[config->type].pair(config, &pair);
    stats_add(stats, STAT_LOSS, loss.loss * weight - chosen * per_token);
    stats_add(stats, STAT_CHOSEN_REWARD, config->beta * pair.chosen);
    stats_add(stats, STAT_REJECTED_REWARD, config->beta * pair.rejected);
    stats_add(stats, STAT_MARGIN, config->beta * (pair.chosen - pair.rejected));
    stats_add(stats, STAT_RIGHT, pair.chosen > pair.rejected);
    stats_add(stats, STAT_CHOSEN_LOGPROB, chosen);
    stats_add(stats, STAT_REJECTED_LOGPROB, rejected);
    fill(batch, seq, loss.by_chosen * weight - per_token, ret_dlogprobs);
    fill(batch, seq + 1, loss.by_rejected * weight, ret_dlogprobs);
}

uint64_t loss_stats(const struct loss_config *c)
{
    const uint64_t tis = STAT_BIT(STAT_TIS) | STAT_BIT(STAT_TIS_CUT);
    const uint64_t given = STAT_BIT(STAT_LOSS) | STAT_BIT(STAT_ENTROPY) | STAT_BIT(STAT_LIKELIEST);
    if (c->type == LOSS_CROSS_ENTROPY) return given;
    if (losses[c->type].pair)
        return given | STAT_BIT(STAT_CHOSEN_REWARD) | STAT_BIT(STAT_REJECTED_REWARD) |
               STAT_BIT(STAT_MARGIN) | STAT_BIT(STAT_RIGHT) | STAT_BIT(STAT_CHOSEN_LOGPROB) |
               STAT_BIT(STAT_REJECTED_LOGPROB);
    return STAT_BIT(STAT_LOSS) | STAT_BIT(STAT_ENTROPY) | STAT_BIT(STAT_RATIO) |
           STAT_BIT(STAT_CLIP_LOW) | STAT_BIT(STAT_CLIP_HIGH) | STAT_BIT(STAT_CLIP_REGION) |
           STAT_BIT(STAT_SEQ_CLIP_LOW) | STAT_BIT(STAT_SEQ_CLIP_HIGH) | STAT_BIT(STAT_MISMATCH) |
           STAT_BIT(STAT_MISMATCH_NOW) | STAT_BIT(STAT_MISMATCH_K3) |
           (c->beta > 0 ? STAT_BIT(STAT_KL) : 0) | (c->delta > 0 ? STAT_BIT(STAT_CLIP_DELTA) : 0) |
           (c->type == LOSS_CISPO ? STAT_BIT(STAT_CISPO_CLIP) : 0) |
           (c->off_policy_threshold > 0 ? STAT_BIT(STAT_OFF_POLICY) : 0) |
           (c->tis != TIS_OFF ? tis : 0);
}

void loss_compute(const struct loss_config *config, const struct loss_batch *batch,
                  struct update_stats *stats, float *ret_dlogprobs)
{
    if (losses[config->type].pair) {
        for (int seq = 0; seq < batch->n_seqs; seq += 2)
            loss_pair(config, batch, seq, stats, ret_dlogprobs);
        return;
    }
    for (int seq = 0; seq < batch->n_seqs; seq++)
        if (batch->first[seq + 1] > batch->first[seq])
            loss_sequence(config, batch, seq, stats, ret_dlogprobs);
        else
            stats_add(stats, STAT_OFF_POLICY, 0);
}
