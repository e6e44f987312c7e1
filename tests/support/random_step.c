/* random_step.c: draws the tokens of a step. Stateless; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/random_step.h"
#include "common/base/rng.h"
#include "tests/support/support.h"

static int longest(const int *lengths, int n)
{
    int max = 0;
    for (int i = 0; i < n; i++)
        if (lengths[i] > max) max = lengths[i];
    return max;
}

// As many as the longest has, so that one length changes no other's tokens.
static void random_ids(struct rng *rng, int vocab, int n, int32_t *ret)
{
    for (int i = 0; i < n; i++) ret[i] = (int32_t)rng_below(rng, (uint32_t)vocab);
}

void random_step_make(const struct step_shape *shape, struct random_step *ret)
{
    struct rng rng;
    int n = shape->n_groups * shape->n_per_group;
    int prompt = longest(shape->prompts, shape->n_groups);
    int completion = longest(shape->completions, n);
    assert_true(shape->n_groups <= STEP_MAX_GROUPS && n <= STEP_MAX_SAMPLES);
    assert_true(prompt <= STEP_MAX_TOKENS && completion <= STEP_MAX_TOKENS);
    rng_init(&rng, shape->seed, 0);
    for (int g = 0; g < shape->n_groups; g++) {
        random_ids(&rng, shape->vocab, prompt, ret->prompts[g]);
        ret->groups[g] =
            (struct pack_group){.prompt = ret->prompts[g],
                                .n_prompt = shape->prompts[g],
                                .completions = &ret->completions[g * shape->n_per_group],
                                .n = shape->n_per_group};
    }
    for (int i = 0; i < n; i++) {
        random_ids(&rng, shape->vocab, completion, ret->ids[i]);
        ret->completions[i] =
            (struct pack_completion){.ids = ret->ids[i], .n = shape->completions[i]};
    }
}
