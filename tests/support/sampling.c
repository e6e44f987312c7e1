/* sampling.c: one thread. The cut is found by sorting, in double, unlike anything in kernels/. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/sampling.h"
#include "common/base/rng.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

void cut_formula(const float *logits, int vocab, const struct sample_params *s, bool *kept,
                 double *ret_all, double *ret_kept)
{
    double t = s->temperature > 0 ? (double)s->temperature : 1, max = -INFINITY, all = 0, mass = 0;
    int32_t *order = malloc((size_t)vocab * sizeof *order);
    assert_non_null(order);
    for (int i = 0; i < vocab; i++) max = fmax(max, logits[i] / t);
    for (int i = 0; i < vocab; i++) {
        all += exp(logits[i] / t - max);
        int j = i; // insertion keeps it simple; vocabularies here are small
        for (; j > 0 && logits[order[j - 1]] < logits[i]; j--) order[j] = order[j - 1];
        order[j] = i;
    }
    int n = vocab;
    if (s->top_k > 0 && s->top_k < vocab) {
        n = s->top_k;
        while (n < vocab && logits[order[n]] == logits[order[n - 1]]) n++;
    }
    if (s->top_p < 1) {
        double remaining = 0, sum = 0;
        for (int i = 0; i < n; i++) remaining += exp(logits[order[i]] / t - max);
        int last = 0;
        for (; last < n; last++) {
            sum += exp(logits[order[last]] / t - max);
            if (sum >= s->top_p * remaining) break;
        }
        int whole = n;
        n = last + 1 < n ? last + 1 : n;
        while (n < whole && logits[order[n]] == logits[order[n - 1]]) n++;
    }
    for (int i = 0; i < vocab; i++) kept[i] = false;
    for (int i = 0; i < n; i++) {
        double p = exp(logits[order[i]] / t - max);
        if (p < s->min_p) continue;
        kept[order[i]] = true;
        mass += p;
    }
    *ret_all = all;
    *ret_kept = mass;
    free(order);
}

void distribution_formula(const float *logits, int vocab, const struct sample_params *s,
                          double *ret)
{
    bool *kept = malloc((size_t)vocab * sizeof *kept);
    double t = s->temperature > 0 ? (double)s->temperature : 1, max = -INFINITY, all, mass;
    assert_non_null(kept);
    cut_formula(logits, vocab, s, kept, &all, &mass);
    for (int i = 0; i < vocab; i++) max = fmax(max, logits[i] / t);
    for (int i = 0; i < vocab; i++) ret[i] = kept[i] ? exp(logits[i] / t - max) / mass : 0;
    free(kept);
}

static void words_of(const struct sample_params *s, uint32_t block, uint32_t use, uint32_t ret[4])
{
    const uint32_t key[2] = {(uint32_t)s->seed, (uint32_t)(s->seed >> 32)};
    const uint32_t counter[4] = {block, use, (uint32_t)s->position, (uint32_t)(s->position >> 32)};
    philox4x32(counter, key, ret);
}

double noise_formula(const struct sample_params *s, int token)
{
    uint32_t bits[4], more[4];
    words_of(s, (uint32_t)token / 4, 0, bits);
    words_of(s, (uint32_t)token / 4, 2, more);
    return -log(-log1p(-(double)rng_below1(bits[token % 4], more[token % 4])));
}

double acceptance_formula(const struct sample_params *s)
{
    uint32_t bits[4];
    words_of(s, 0, 1, bits);
    return ((double)((uint64_t)bits[0] << 20 | bits[1] >> 12) + 0.5) * 0x1p-52;
}
