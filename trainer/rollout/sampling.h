/* sampling.h: what sampling is asked for. Plain data. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SAMPLING_H
#define TRAINER_SAMPLING_H

#include "common/model/tandem_selector.h"

#include <stdbool.h>
#include <stdint.h>

struct sampling_options {
    double temperature, top_p, min_p; // temperature 0: greedy
    int64_t top_k, max_tokens;
    uint64_t seed;
    bool ignore_eos;
    bool text_offset; // the places of tokens in the text are wanted, too
    const char *stop; // NULL: none
    struct tandem_options {
        bool on;      // the server's frozen model writes with the policy
        int selector; // enum tandem_selector
        double p;
        int64_t chunk;
        bool shared; // all samples have the same authors at the same places
    } tandem;
};

// Whether samples come from another distribution than the model's.
static inline bool sampling_is_filtered(const struct sampling_options *s)
{
    return s->temperature > 0 && (s->top_k > 0 || s->top_p < 1 || s->min_p > 0);
}

#endif
