/* entropy.c: the entropy bonus' coefficient and the choice of tokens by entropy. No state. */
#include "trainer/learn/entropy.h"

#include <math.h>
#include <stdlib.h>

struct entropy_state entropy_begin(const struct entropy_config *config)
{
    return (struct entropy_state){.coef = config->coef, .last = INFINITY};
}

bool entropy_has_bonus(const struct entropy_config *config)
{
    return config->coef != 0 || config->adaptive;
}

bool entropy_is_used(const struct entropy_config *config)
{
    return entropy_has_bonus(config) || config->top_quantile < 1;
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
