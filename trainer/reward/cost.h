/* cost.h: what serving a sample cost, as terms of its reward (docs/use/rewards.md):
 *
 *   reward = task - alpha latency_ms - beta generated_tokens - gamma kv_memory_mb
 *                 + delta accept_rate + epsilon cache_reuse_ratio
 *
 * Pure functions on one sample's telemetry. And latency as a linear function of the work that a
 * sample is, fitted by least squares on everything that this run has measured so far:
 *
 *   latency_ms - queue_ms  ~  base + a prefill + b generated + c draft tokens + d accepted tokens
 *
 * Measured latency depends on who else was in the batch; the fit averages that out and keeps what
 * is the sample's own doing. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_COST_H
#define TRAINER_COST_H

#include "common/base/status.h"
#include <jansson.h>

enum cost_term { COST_LATENCY, COST_TOKENS, COST_KV, COST_ACCEPTANCE, COST_CACHE, COST_TERMS };
extern const struct cost_term_info {
    const char *name, *quantity; // "latency"; "latency_ms": what it is multiplied with
    int sign;                    // -1: taken off the reward
} cost_terms[COST_TERMS];
// weights: (COST_TERMS) all >= 0
double cost_signed_weight(const double *weights, enum cost_term term);

struct completion_cost { // of the telemetry
    double latency_ms, queue_ms;
    double prompt_tokens, cached_prompt_tokens, generated_tokens;
    double num_draft_tokens, num_accepted_tokens;
    double kv_memory_mb;      // peak; 1 MB is 2^20 bytes
    double accept_rate;       // 0 where nothing was drafted (scoring.c puts a mean there)
    double cache_reuse_ratio; // cached prompt tokens / prompt tokens
    bool drafted;             // accept_rate was not null
};
// ST_FORMAT naming the field that is missing or not a number at or above 0.
enum status cost_read(const json_t *telemetry, struct completion_cost *ret);
// What each term multiplies: ret (COST_TERMS). latency_ms: measured or modelled.
void cost_quantities(const struct completion_cost *s, double latency_ms, double *ret_quantities);

// prefill: prompt tokens that were not in the prefix cache
enum { LATENCY_PREFILL, LATENCY_GENERATED, LATENCY_DRAFT, LATENCY_ACCEPTED, LATENCY_INPUTS };

struct latency_model { // zero-initialise; plain data
    // of all samples so far, with Welford's updates: count, means, and sums of products of the
    // deviations from the means; the last variable is the latency
    double n, means[LATENCY_INPUTS + 1], products[LATENCY_INPUTS + 1][LATENCY_INPUTS + 1];
    // the last fit
    double base_ms, ms_per[LATENCY_INPUTS]; // 0 for an input that never varied
    double r2;                              // share of the variance explained
};
void latency_model_add(struct latency_model *m, const struct completion_cost *s);
void latency_model_fit(struct latency_model *m);
double latency_model_ms(const struct latency_model *m,
                        const struct completion_cost *s); // never below 0

// The measurements as a JSON list, for checkpoints. New reference, NULL: no memory.
json_t *latency_model_to_json(const struct latency_model *m);
// Takes them up and fits; ST_FORMAT where it is not such a list.
enum status latency_model_from_json(const json_t *json, struct latency_model *ret);

#endif
