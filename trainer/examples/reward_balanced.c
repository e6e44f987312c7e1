/* reward_balanced.c: an example of a reward in a shared object (trainer/reward/reward_plugin.h):
 * the share of brackets that have their partner, 1 for a text without any. Build and use:
 *
 *     cc -shared -fPIC -I. -o reward_balanced.so trainer/examples/reward_balanced.c
 *     cw-trainer train --reward plugin:./reward_balanced.so ...
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/reward_plugin.h"

#include <stdio.h>

#define MAX_DEPTH 1000

static int score(void *state, const struct reward_plugin_sample *sample, double *ret_score,
                 char *error, size_t error_size)
{
    char open[MAX_DEPTH];
    int depth = 0, brackets = 0, paired = 0;
    (void)state;
    for (const char *s = sample->completion; *s; s++) {
        if (*s == '(' || *s == '[') {
            if (depth == MAX_DEPTH) {
                snprintf(error, error_size, "brackets are more than %d deep", MAX_DEPTH);
                return 1;
            }
            open[depth++] = *s;
            brackets++;
        } else if (*s == ')' || *s == ']') {
            brackets++;
            if (depth && open[depth - 1] == (*s == ')' ? '(' : '[')) {
                depth--;
                paired += 2;
            }
        }
    }
    *ret_score = brackets ? (double)paired / brackets : 1;
    return 0;
}

extern const struct reward_plugin commonweight_reward_plugin;
const struct reward_plugin commonweight_reward_plugin = {
    .version = REWARD_PLUGIN_VERSION,
    .name = "balanced",
    .score = score,
};
