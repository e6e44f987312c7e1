/* losses.c: what the rows of the table of losses are made of, and the entropy beside them. To add
 * one: its line in loss.h, and here the function that is new with it. Pure functions.
 *
 * Of samples, and of a client's tokens, with lp a token's log-probability, q the one that its ratio
 * r is to, A its advantage (a client's weight, of cross_entropy):
 *     clipped           min(r A, clip(r) A)
 *     capped            min(r, cap) A lp, the ratio a constant
 *     log_likelihood    A lp
 *     dro               A lp - beta / 2 (lp - q)^2
 * What a loss does not want of a token (an advantage of 0) leaves no trace of it, but for dro,
 * whose penalty counts everywhere.
 *
 * Of pairs, with c and r the log-ratios of the chosen and the rejected completion to the reference,
 * each the sum over its tokens, d = c - r, s the logistic function, b --beta, e --label-smoothing,
 * t --discopop-tau:
 *     sigmoid        -log s(b d)                                        (DPO)
 *     hinge          max(0, 1 - b d)                                    (SLiC)
 *     ipo            (c / n_c - r / n_r - 1 / (2 b))^2, n the tokens    (IPO)
 *     exo_pair       KL of (s(b d), s(-b d)) from (1 - e, e)            (EXO)
 *     nca_pair       -log s(b c) - log s(-b c) / 2 - log s(-b r) / 2    (NCA)
 *     robust         (-(1 - e) log s(b d) + e log s(-b d)) / (1 - 2 e)  (robust DPO)
 *     bco_pair       -log s(b c) - log s(-b r)                          (BCO without its shift)
 *     sppo_hard      (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2              (SPPO)
 *     apo_zero       1 - s(b c) + s(b r)                                (APO)
 *     apo_down       s(b c) + 1 - s(b d)                                (APO)
 *     sigmoid_norm   -log s(b (c / n_c - r / n_r))
 *     discopop       -(1 - m) log s(b d) + m exp(-b d), m = s(b d / t) (DiscoPOP) */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/loss.h"
#include "common/base/names.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- surrogates ---------------------------------------------------------------------------------

// The worse of two values: the ratio clipped on both sides, and the ratio as it is. The second has
// no bound where the advantage is negative: the dual clip gives it one.
static struct surrogate clipped(const struct token *t)
{
    const double delta = t->config->delta;
    const double clip = fmin(fmax(t->ratio, t->low), t->high) * t->advantage;
    const bool cut = delta > 0 && t->ratio > delta;
    const double plain = (cut ? delta : t->ratio) * t->advantage;
    struct surrogate s = {.low = t->advantage < 0 && t->ratio<t->low, .high = t->advantage> 0 &&
                                 t->ratio > t->high};
    if (plain < clip) {
        s.value = plain;
        s.by_log_ratio = cut ? 0 : plain;
        s.delta = cut;
    } else {
        s.value = clip;
        s.by_log_ratio = t->ratio >= t->low && t->ratio <= t->high ? clip : 0;
    }
    return s;
}

static struct surrogate capped(const struct token *t)
{
    const double weight = fmin(fmax(t->ratio, t->low), t->high) * t->advantage;
    return (struct surrogate){
        .value = weight * t->logprob,
        .by_logprob = weight,
        .high = t->advantage > 0 && t->ratio > t->high,
    };
}

// A gate whose slope falls off where clipping would begin.
static struct surrogate gated(const struct token *t)
{
    const double temperature =
        t->advantage > 0 ? t->config->sapo_temperature_pos : t->config->sapo_temperature_neg;
    const double gate = 1 / (1 + exp(-temperature * (t->ratio - 1)));
    return (struct surrogate){
        .value = gate * 4 / temperature * t->advantage,
        .by_log_ratio = 4 * gate * (1 - gate) * t->ratio * t->advantage,
    };
}

struct clip clip_log_ratio(const struct loss_config *config, double log_ratio, double advantage)
{
    // as verl: sign(advantage) is a factor
    struct clip clip = {.log_ratio = advantage == 0 ? 0 : log_ratio};
    clip.low = advantage < 0 && log_ratio < -config->epsilon;
    clip.high = advantage > 0 && log_ratio > config->epsilon_high;
    if (clip.low) clip.log_ratio = -config->epsilon;
    if (clip.high) clip.log_ratio = config->epsilon_high;
    return clip;
}

// ratio: of the sequence
static struct surrogate geometric(const struct token *t)
{
    const struct clip clip = clip_log_ratio(t->config, t->logprob - t->old, t->advantage);
    return (struct surrogate){
        .value = t->ratio * t->advantage,
        .by_log_ratio = t->ratio * t->advantage,
        .low = clip.low,
        .high = clip.high,
        .held = clip.low || clip.high || t->advantage == 0,
    };
}

static struct surrogate log_likelihood(const struct token *t)
{
    return (struct surrogate){.value = t->advantage * t->logprob, .by_logprob = t->advantage};
}

static struct surrogate dro(const struct token *t)
{
    const double distance = t->logprob - t->old, beta = t->config->beta;
    return (struct surrogate){
        .value = t->advantage * t->logprob - beta / 2 * distance * distance,
        .by_logprob = t->advantage - beta * distance,
    };
}

// ---- pairs --------------------------------------------------------------------------------------

static double logistic(double x)
{
    return 1 / (1 + exp(-x));
}

static double log_logistic(double x)
{
    return x < 0 ? x - log1p(exp(x)) : -log1p(exp(-x));
}

// A loss of a difference alone, whose derivative by it is `slope`.
static struct pair_loss of_difference(double loss, double slope)
{
    return (struct pair_loss){loss, slope, -slope};
}

static struct pair_loss sigmoid(const struct loss_config *o, const struct pair *p)
{
    const double x = o->beta * (p->chosen - p->rejected);
    return of_difference(-log_logistic(x), -o->beta * logistic(-x));
}

static struct pair_loss hinge(const struct loss_config *o, const struct pair *p)
{
    const double x = o->beta * (p->chosen - p->rejected);
    return of_difference(fmax(0, 1 - x), x < 1 ? -o->beta : 0);
}

// c / n_c - r / n_r, and a loss of it by each.
static double mean_difference(const struct pair *p)
{
    return p->chosen / fmax(p->n_chosen, 1) - p->rejected / fmax(p->n_rejected, 1);
}

static struct pair_loss of_means(const struct pair *p, double loss, double slope)
{
    return (struct pair_loss){loss, slope / fmax(p->n_chosen, 1), -slope / fmax(p->n_rejected, 1)};
}

static struct pair_loss ipo(const struct loss_config *o, const struct pair *p)
{
    const double away = mean_difference(p) - 1 / (2 * o->beta);
    return of_means(p, away * away, 2 * away);
}

static struct pair_loss sigmoid_norm(const struct loss_config *o, const struct pair *p)
{
    const double x = o->beta * mean_difference(p);
    return of_means(p, -log_logistic(x), -o->beta * logistic(-x));
}

static struct pair_loss exo_pair(const struct loss_config *o, const struct pair *p)
{
    const double x = o->beta * (p->chosen - p->rejected), e = o->label_smoothing;
    const double won = log_logistic(x) - log1p(-e), lost = log_logistic(-x) - log(e);
    return of_difference(logistic(x) * won + logistic(-x) * lost,
                         o->beta * logistic(x) * logistic(-x) * (won - lost));
}

static struct pair_loss nca_pair(const struct loss_config *o, const struct pair *p)
{
    const double c = o->beta * p->chosen, r = o->beta * p->rejected;
    return (struct pair_loss){
        .loss = -log_logistic(c) - 0.5 * log_logistic(-c) - 0.5 * log_logistic(-r),
        .by_chosen = o->beta * (0.5 * logistic(c) - logistic(-c)),
        .by_rejected = o->beta * 0.5 * logistic(r),
    };
}

static struct pair_loss robust(const struct loss_config *o, const struct pair *p)
{
    const double x = o->beta * (p->chosen - p->rejected), e = o->label_smoothing;
    return of_difference((-(1 - e) * log_logistic(x) + e * log_logistic(-x)) / (1 - 2 * e),
                         o->beta * (-(1 - e) * logistic(-x) - e * logistic(x)) / (1 - 2 * e));
}

static struct pair_loss bco_pair(const struct loss_config *o, const struct pair *p)
{
    const double c = o->beta * p->chosen, r = o->beta * p->rejected;
    return (struct pair_loss){-log_logistic(c) - log_logistic(-r), -o->beta * logistic(-c),
                              o->beta * logistic(r)};
}

static struct pair_loss sppo_hard(const struct loss_config *o, const struct pair *p)
{
    const double won = p->chosen - 0.5 / o->beta, lost = p->rejected + 0.5 / o->beta;
    return (struct pair_loss){won * won + lost * lost, 2 * won, 2 * lost};
}

static struct pair_loss apo_zero(const struct loss_config *o, const struct pair *p)
{
    const double c = logistic(o->beta * p->chosen), r = logistic(o->beta * p->rejected);
    return (struct pair_loss){1 - c + r, -o->beta * c * (1 - c), o->beta * r * (1 - r)};
}

static struct pair_loss apo_down(const struct loss_config *o, const struct pair *p)
{
    const double c = logistic(o->beta * p->chosen),
                 d = logistic(o->beta * (p->chosen - p->rejected));
    const double by_c = o->beta * c * (1 - c), by_d = -o->beta * d * (1 - d);
    return (struct pair_loss){c + 1 - d, by_c + by_d, -by_d};
}

// exp(-x) stands within the modulation's exponential: the product is small where exp(-x) is none.
static struct pair_loss discopop(const struct loss_config *o, const struct pair *p)
{
    const double x = o->beta * (p->chosen - p->rejected), tau = o->discopop_tau;
    const double m = logistic(x / tau), plain = -log_logistic(x);
    const double steep = exp(log_logistic(x / tau) - x);
    const double by_m = (1 - m) / tau; // the modulation's slope, by itself
    return of_difference((1 - m) * plain + steep,
                         o->beta * (by_m * (steep - m * plain) - (1 - m) * logistic(-x) - steep));
}

// ---- the table ----------------------------------------------------------------------------------

#define SAMPLE_ROW(symbol, name, w, s, ...)                                                        \
    [LOSS_##symbol] = {.weight = w, .surrogate = s, __VA_ARGS__},
#define PAIR_ROW(symbol, p) [LOSS_##symbol] = {.weight = BY_SUM, .pair = p},
#define CLIENT_ROW(symbol, name, s, ...)                                                           \
    [LOSS_CLIENT_##symbol] = {.weight = PLAIN_SUM, .surrogate = s, __VA_ARGS__},

const struct loss losses[N_LOSSES] = {
    SAMPLE_LOSSES(SAMPLE_ROW) PAIR_LOSSES(PAIR_ROW)
        CLIENT_LOSSES(CLIENT_ROW)[LOSS_CROSS_ENTROPY] = {
            .weight = BY_TOKEN, .surrogate = log_likelihood, .advantages = INPUT_WEIGHTS}};

#define NAME(symbol, name, ...) name,
#define PAIR_NAME(symbol, p)    #p,
const char *const loss_type_names[] = {SAMPLE_LOSSES(NAME) NULL};
const char *const preference_names[] = {PAIR_LOSSES(PAIR_NAME) NULL};
static const char *const client_names[] = {CLIENT_LOSSES(NAME) NULL};
const char *const loss_input_names[] = {
    "advantages",          "weights", "logprobs", "sequence_ratio_mask", "clip_low_threshold",
    "clip_high_threshold", NULL};
const char *const loss_setting_names[] = {"clip_low_threshold", "clip_high_threshold", "beta",
                                          NULL};

enum status loss_check_pairs(const struct loss_config *c)
{
    if (c->beta <= 0) return status_fail(ST_INVALID, "--beta %g: give more than 0", c->beta);
    if (c->type == LOSS_EXO_PAIR && c->label_smoothing == 0)
        return status_fail(ST_INVALID, "--loss-type exo_pair needs --label-smoothing above 0: the "
                                       "share of pairs taken to be the wrong way round, 1e-3 say");
    return ST_OK;
}

enum status loss_of_client(const char *name, struct loss_config *ret)
{
    const int client = name_find(client_names, name);
    if (client >= 0) {
        const enum loss_type type = (enum loss_type)(LOSS_CLIENT_CROSS_ENTROPY + client);
        const double *defaults = losses[type].defaults;
        *ret = (struct loss_config){
            .type = type, .epsilon = defaults[0], .epsilon_high = defaults[1], .beta = defaults[2]};
        return ST_OK;
    }
    if (strcmp(name, "stable_reinforce") == 0)
        return status_fail(ST_UNSUPPORTED, "the formula of the loss stable_reinforce is not "
                                           "published: take loss_fn=importance_sampling, or "
                                           "cw-trainer serve --loss-for NAME=OTHER");
    return status_fail(ST_INVALID,
                       "\"loss_fn\" is \"%s\"; there are cross_entropy, importance_sampling, "
                       "ppo, cispo, dro and gspo",
                       CUT(name, 60));
}

double *loss_setting(struct loss_config *config, int setting)
{
    double *const settings[] = {&config->epsilon, &config->epsilon_high, &config->beta};
    return losses[config->type].knows & 1u << setting ? settings[setting] : NULL;
}

// ---- entropy ------------------------------------------------------------------------------------

bool entropy_has_bonus(const struct entropy_config *config)
{
    return config->coef != 0 || config->adaptive;
}

double entropy_coef(const struct entropy_config *config, const struct entropy_state *state)
{
    return config->adaptive && !(state->last <= config->target) ? 0 : state->coef;
}

void entropy_observe(const struct entropy_config *config, double mean, struct entropy_state *state)
{
    if (!config->adaptive) return;
    state->last = mean;
    state->coef = mean <= config->target ? fmin(state->coef + config->coef_delta, config->coef_max)
                                         : fmax(state->coef - config->coef_delta, config->coef_min);
}

double entropy_bonus(double coef, long step_tokens, int n, const float *entropies,
                     const uint8_t *count, float *ret_dentropy)
{
    const double share = -coef / (double)(step_tokens > 0 ? step_tokens : 1);
    double sum = 0;
    for (int i = 0; i < n; i++) {
        ret_dentropy[i] = count[i] ? (float)share : 0;
        if (count[i]) sum += share * entropies[i];
    }
    return sum;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double entropy_threshold(double *entropies, long n, double top)
{
    if (n == 0) return 0;
    qsort(entropies, (size_t)n, sizeof *entropies, by_value);
    const double at = (1 - top) * (double)(n - 1);
    const long low = (long)at;
    if (low >= n - 1) return entropies[n - 1];
    return entropies[low] + (at - (double)low) * (entropies[low + 1] - entropies[low]);
}
