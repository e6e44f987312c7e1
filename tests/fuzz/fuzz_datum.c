/* fuzz_datum.c: any bytes as the body of the Tinker API's forward_backward: refused in a sentence,
 * or datums whose every number the learner may rely on. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/datum.h"

#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct datum *d, const struct datum_limits *limits)
{
    if (d->n < 1 || d->n > limits->longest || d->each < 1) abort();
    for (int i = 0; i < d->n; i++)
        if (d->tokens[i] < 0 || d->tokens[i] >= limits->vocab) abort();
    for (int64_t i = 0; i < (int64_t)d->n * d->each; i++) {
        if (d->targets[i] < 0 || d->targets[i] >= limits->vocab) abort();
        for (int k = 0; k < LOSS_INPUTS; k++)
            if (d->inputs[k] && !isfinite(d->inputs[k][i])) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct datum_limits limits = {.vocab = 300, .longest = 64};
    struct forward_backward request;
    if (forward_backward_parse((const char *)data, size, &limits, &request) != ST_OK) return 0;
    for (int i = 0; i < request.n; i++) check(&request.data[i], &limits);
    forward_backward_release(&request);
    return 0;
}
