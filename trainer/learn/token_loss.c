/* token_loss.c: the table of losses that a client weighs token by token. Pure functions.
 *
 * With lp the policy's log-probability of a token, q its sampler's, A its advantage, w its weight,
 * r = exp(lp - q) or, for gspo, the geometric mean of that over the marked tokens of the sequence:
 *     cross_entropy         -w lp
 *     importance_sampling   -r A
 *     ppo, gspo             -min(r A, clip(r) A)
 *     cispo                 -clip(r) A lp, the ratio a constant
 *     dro                   -(A lp - beta / 2 (lp - q)^2)
 * The ratio of gspo is the sequence's by value; its derivative is by each token's own lp. What a
 * loss does not want of a token (a weight or an advantage of 0) leaves no trace of it, but for dro,
 * whose penalty counts everywhere. */
#include "trainer/learn/token_loss.h"

#include <math.h>
#include <string.h>

const char *const token_input_names[] = {"weights",
                                         "logprobs",
                                         "advantages",
                                         "sequence_ratio_mask",
                                         "clip_low_threshold",
                                         "clip_high_threshold",
                                         NULL};
const char *const token_setting_names[] = {"clip_low_threshold", "clip_high_threshold", "beta",
                                           NULL};

struct token {
    double logprob, sampler, advantage, weight, ratio, low, high, beta;
};
struct term {
    double loss, by_logprob;
};

struct token_loss {
    const char *name;
    struct term (*term)(const struct token *t);
    bool of_sequence;             // the ratio
    unsigned needs, takes, knows; // bits: of enum token_input, token_input, token_setting
    double settings[TOKEN_SETTINGS];
};

static double clip(const struct token *t)
{
    return fmin(fmax(t->ratio, t->low), t->high);
}

static struct term cross_entropy(const struct token *t)
{
    return (struct term){-t->weight * t->logprob, -t->weight};
}

static struct term importance_sampling(const struct token *t)
{
    const double value = t->ratio * t->advantage;
    return (struct term){-value, -value};
}

static struct term clipped(const struct token *t)
{
    const double plain = t->ratio * t->advantage, cut = clip(t) * t->advantage;
    const bool is_cut = cut < plain;
    return (struct term){is_cut ? -cut : -plain, is_cut ? 0 : -plain};
}

static struct term cispo(const struct token *t)
{
    const double weight = clip(t) * t->advantage;
    return (struct term){-weight * t->logprob, -weight};
}

static struct term dro(const struct token *t)
{
    const double distance = t->logprob - t->sampler;
    return (struct term){-(t->advantage * t->logprob - t->beta / 2 * distance * distance),
                         -(t->advantage - t->beta * distance)};
}

#define BIT(x) (1u << (x))
#define POLICY (BIT(INPUT_LOGPROBS) | BIT(INPUT_ADVANTAGES))
#define BOUNDS (BIT(INPUT_CLIP_LOW) | BIT(INPUT_CLIP_HIGH))
#define CLIPS  (BIT(SETTING_CLIP_LOW) | BIT(SETTING_CLIP_HIGH))

static const struct token_loss losses[] = {
    {"cross_entropy", cross_entropy, false, BIT(INPUT_WEIGHTS), 0, 0, {0}},
    {"importance_sampling", importance_sampling, false, POLICY, 0, 0, {0}},
    {"ppo", clipped, false, POLICY, BOUNDS, CLIPS, {0.8, 1.2, 0}},
    {"cispo", cispo, false, POLICY, BOUNDS, CLIPS, {0, 4, 0}},
    {"dro", dro, false, POLICY, 0, BIT(SETTING_BETA), {0, 0, 0.05}},
    {"gspo", clipped, true, POLICY | BIT(INPUT_RATIO_MASK), BOUNDS, CLIPS, {0.8, 1.2, 0}},
};
#define N_LOSSES (sizeof losses / sizeof *losses)

enum status token_loss_find(const char *name, struct token_loss_config *ret)
{
    for (size_t i = 0; i < N_LOSSES; i++) {
        if (strcmp(losses[i].name, name) != 0) continue;
        ret->loss = &losses[i];
        memcpy(ret->settings, losses[i].settings, sizeof ret->settings);
        return ST_OK;
    }
    if (strcmp(name, "stable_reinforce") == 0)
        return status_fail(ST_UNSUPPORTED, "the formula of the loss stable_reinforce is not "
                                           "published: take loss_fn=importance_sampling");
    return status_fail(ST_INVALID,
                       "\"loss_fn\" is \"%.60s\"; there are cross_entropy, importance_sampling, "
                       "ppo, cispo, dro and gspo",
                       name);
}

bool token_loss_has_setting(const struct token_loss_config *config, enum token_setting setting)
{
    return config->loss->knows & BIT(setting);
}

bool token_loss_needs(const struct token_loss_config *config, enum token_input input)
{
    return config->loss->needs & BIT(input);
}

bool token_loss_takes(const struct token_loss_config *config, enum token_input input)
{
    return (config->loss->needs | config->loss->takes) & BIT(input);
}

static double input_or(const float *array, int t, double otherwise)
{
    return array ? array[t] : otherwise;
}

// The geometric mean of the ratios of the marked tokens; 1 where none is.
static double sequence_ratio(int n, const float *logprobs, const float *const inputs[TOKEN_INPUTS])
{
    double sum = 0;
    long marked = 0;
    for (int t = 0; t < n; t++) {
        if (input_or(inputs[INPUT_RATIO_MASK], t, 0) == 0) continue;
        sum += (double)logprobs[t] - input_or(inputs[INPUT_LOGPROBS], t, 0);
        marked++;
    }
    return exp(sum / (double)(marked > 0 ? marked : 1));
}

double token_loss_compute(const struct token_loss_config *config, int n, const float *logprobs,
                          const float *const inputs[TOKEN_INPUTS], float *ret_dlogprobs)
{
    const struct token_loss *loss = config->loss;
    const double shared = loss->of_sequence ? sequence_ratio(n, logprobs, inputs) : 0;
    double sum = 0;
    for (int i = 0; i < n; i++) {
        struct token t = {
            .logprob = logprobs[i],
            .sampler = input_or(inputs[INPUT_LOGPROBS], i, 0),
            .advantage = input_or(inputs[INPUT_ADVANTAGES], i, 0),
            .weight = input_or(inputs[INPUT_WEIGHTS], i, 0),
            .low = input_or(inputs[INPUT_CLIP_LOW], i, config->settings[SETTING_CLIP_LOW]),
            .high = input_or(inputs[INPUT_CLIP_HIGH], i, config->settings[SETTING_CLIP_HIGH]),
            .beta = config->settings[SETTING_BETA],
        };
        t.ratio = loss->of_sequence ? shared : exp(t.logprob - t.sampler);
        const struct term term = loss->term(&t);
        sum += term.loss;
        ret_dlogprobs[i] = (float)term.by_logprob;
    }
    return sum;
}
