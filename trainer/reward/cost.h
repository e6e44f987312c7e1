/* cost.h: what serving a sample cost, as terms of its reward (docs/rewards.md):
 *
 *   reward = task - alpha latency_ms - beta generated_tokens - gamma kv_memory_mb
 *                 + delta accept_rate + epsilon cache_reuse_ratio
 *
 * Pure functions on one sample's telemetry. */
#ifndef TRAINER_COST_H
#define TRAINER_COST_H

#include "common/base/status.h"
#include <jansson.h>

enum cost_term { COST_LATENCY, COST_TOKENS, COST_KV, COST_ACCEPTANCE, COST_CACHE, COST_TERMS };
const char *cost_term_name(enum cost_term term);     // "latency"
const char *cost_quantity_name(enum cost_term term); // "latency_ms": what it is multiplied with

struct cost_weights { // all >= 0; the first three are taken off the reward, the others added
    double latency, tokens, kv, acceptance, cache;
};
double cost_signed_weight(const struct cost_weights *w, enum cost_term term);

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

#endif
