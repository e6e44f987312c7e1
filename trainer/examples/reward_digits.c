/* reward_digits.c: an example of a graded reward in a shared object
 * (trainer/reward/reward_plugin.h): the share of the answer's characters that the completion has
 * in their place, counted from the end, as the digits of a sum are; characters too many count as
 * wrong. docs/use/curriculum.md measures with it.
 *
 *     cc -shared -fPIC -I. -o reward_digits.so trainer/examples/reward_digits.c
 *     cw-trainer train --reward plugin:./reward_digits.so ...
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/reward_plugin.h"

#include <stdio.h>
#include <string.h>

static int score(void *state, const struct reward_plugin_sample *sample, double *ret_score,
                 char *error, size_t error_size)
{
    (void)state;
    if (!sample->answer || !*sample->answer) {
        snprintf(error, error_size, "there is no answer to compare digits with");
        return 1;
    }
    size_t a = strlen(sample->answer), b = strlen(sample->completion), equal = 0;
    for (size_t i = 1; i <= a && i <= b; i++)
        equal += sample->answer[a - i] == sample->completion[b - i];
    *ret_score = (double)equal / (double)(a > b ? a : b);
    return 0;
}

extern const struct reward_plugin commonweight_reward_plugin;
const struct reward_plugin commonweight_reward_plugin = {
    .version = REWARD_PLUGIN_VERSION,
    .name = "digits",
    .score = score,
};
