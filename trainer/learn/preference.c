/* preference.c: the table of losses of pairs. Pure functions.
 *
 * With c and r the log-ratios of the chosen and the rejected completion to the reference, each the
 * sum over its tokens, d = c - r, s the logistic function, b --beta and e --label-smoothing:
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
 *     sigmoid_norm   -log s(b (c / n_c - r / n_r)) */
#include "trainer/learn/preference.h"

#include <math.h>
#include <stddef.h>

static double logistic(double x)
{
    return 1 / (1 + exp(-x));
}

static double log_logistic(double x)
{
    return x < 0 ? x - log1p(exp(x)) : -log1p(exp(-x));
}

// A loss of a difference alone, whose derivative by it is `slope`.
static struct preference_loss of_difference(double loss, double slope)
{
    return (struct preference_loss){loss, slope, -slope};
}

static struct preference_loss sigmoid(const struct preference_config *o,
                                      const struct preference_pair *p)
{
    const double x = o->beta * (p->chosen - p->rejected);
    return of_difference(-log_logistic(x), -o->beta * logistic(-x));
}

static struct preference_loss hinge(const struct preference_config *o,
                                    const struct preference_pair *p)
{
    const double x = o->beta * (p->chosen - p->rejected);
    return of_difference(fmax(0, 1 - x), x < 1 ? -o->beta : 0);
}

// c / n_c - r / n_r, and a loss of it by each.
static double mean_difference(const struct preference_pair *p)
{
    return p->chosen / fmax(p->n_chosen, 1) - p->rejected / fmax(p->n_rejected, 1);
}

static struct preference_loss of_means(const struct preference_pair *p, double loss, double slope)
{
    return (struct preference_loss){loss, slope / fmax(p->n_chosen, 1),
                                    -slope / fmax(p->n_rejected, 1)};
}

static struct preference_loss ipo(const struct preference_config *o,
                                  const struct preference_pair *p)
{
    const double away = mean_difference(p) - 1 / (2 * o->beta);
    return of_means(p, away * away, 2 * away);
}

static struct preference_loss sigmoid_norm(const struct preference_config *o,
                                           const struct preference_pair *p)
{
    const double x = o->beta * mean_difference(p);
    return of_means(p, -log_logistic(x), -o->beta * logistic(-x));
}

static struct preference_loss exo_pair(const struct preference_config *o,
                                       const struct preference_pair *p)
{
    const double x = o->beta * (p->chosen - p->rejected), e = o->label_smoothing;
    const double won = log_logistic(x) - log1p(-e), lost = log_logistic(-x) - log(e);
    return of_difference(logistic(x) * won + logistic(-x) * lost,
                         o->beta * logistic(x) * logistic(-x) * (won - lost));
}

static struct preference_loss nca_pair(const struct preference_config *o,
                                       const struct preference_pair *p)
{
    const double c = o->beta * p->chosen, r = o->beta * p->rejected;
    return (struct preference_loss){
        .loss = -log_logistic(c) - 0.5 * log_logistic(-c) - 0.5 * log_logistic(-r),
        .by_chosen = o->beta * (0.5 * logistic(c) - logistic(-c)),
        .by_rejected = o->beta * 0.5 * logistic(r),
    };
}

static struct preference_loss robust(const struct preference_config *o,
                                     const struct preference_pair *p)
{
    const double x = o->beta * (p->chosen - p->rejected), e = o->label_smoothing;
    return of_difference((-(1 - e) * log_logistic(x) + e * log_logistic(-x)) / (1 - 2 * e),
                         o->beta * (-(1 - e) * logistic(-x) - e * logistic(x)) / (1 - 2 * e));
}

static struct preference_loss bco_pair(const struct preference_config *o,
                                       const struct preference_pair *p)
{
    const double c = o->beta * p->chosen, r = o->beta * p->rejected;
    return (struct preference_loss){-log_logistic(c) - log_logistic(-r), -o->beta * logistic(-c),
                                    o->beta * logistic(r)};
}

static struct preference_loss sppo_hard(const struct preference_config *o,
                                        const struct preference_pair *p)
{
    const double won = p->chosen - 0.5 / o->beta, lost = p->rejected + 0.5 / o->beta;
    return (struct preference_loss){won * won + lost * lost, 2 * won, 2 * lost};
}

static struct preference_loss apo_zero(const struct preference_config *o,
                                       const struct preference_pair *p)
{
    const double c = logistic(o->beta * p->chosen), r = logistic(o->beta * p->rejected);
    return (struct preference_loss){1 - c + r, -o->beta * c * (1 - c), o->beta * r * (1 - r)};
}

static struct preference_loss apo_down(const struct preference_config *o,
                                       const struct preference_pair *p)
{
    const double c = logistic(o->beta * p->chosen),
                 d = logistic(o->beta * (p->chosen - p->rejected));
    const double by_c = o->beta * c * (1 - c), by_d = -o->beta * d * (1 - d);
    return (struct preference_loss){c + 1 - d, by_c + by_d, -by_d};
}

typedef struct preference_loss loss_fn(const struct preference_config *,
                                       const struct preference_pair *);
static loss_fn *const losses[] = {sigmoid,  hinge,     ipo,      exo_pair, nca_pair,    robust,
                                  bco_pair, sppo_hard, apo_zero, apo_down, sigmoid_norm};
const char *const preference_names[] = {"sigmoid",  "hinge",    "ipo",          "exo_pair",
                                        "nca_pair", "robust",   "bco_pair",     "sppo_hard",
                                        "apo_zero", "apo_down", "sigmoid_norm", NULL};

enum status preference_check(const struct preference_config *o)
{
    if (o->beta <= 0) return status_fail(ST_INVALID, "--beta %g: give more than 0", o->beta);
    if (losses[o->type] == exo_pair && o->label_smoothing == 0)
        return status_fail(ST_INVALID, "--loss-type exo_pair needs --label-smoothing above 0: the "
                                       "share of pairs taken to be the wrong way round, 1e-3 say");
    return ST_OK;
}

bool preference_smooths(const struct preference_config *config)
{
    return losses[config->type] == exo_pair || losses[config->type] == robust;
}

struct preference_loss preference_loss(const struct preference_config *config,
                                       const struct preference_pair *pair)
{
    return losses[config->type](config, pair);
}
