/* cost.c: reads a sample's telemetry as the terms of the cost formula. Stateless; any thread.
 */
#include "trainer/reward/cost.h"
#include "common/base/json.h"

#include <math.h>

static const struct {
    const char *name, *quantity;
    int sign;
} terms[COST_TERMS] = {
    [COST_LATENCY] = {"latency", "latency_ms", -1},
    [COST_TOKENS] = {"tokens", "generated_tokens", -1},
    [COST_KV] = {"kv", "kv_memory_mb", -1},
    [COST_ACCEPTANCE] = {"acceptance", "accept_rate", 1},
    [COST_CACHE] = {"cache", "cache_reuse_ratio", 1},
};

const char *cost_term_name(enum cost_term term)
{
    return terms[term].name;
}

const char *cost_quantity_name(enum cost_term term)
{
    return terms[term].quantity;
}

double cost_signed_weight(const struct cost_weights *w, enum cost_term term)
{
    const double weights[COST_TERMS] = {w->latency, w->tokens, w->kv, w->acceptance, w->cache};
    return terms[term].sign * weights[term];
}

static enum status read_number(const json_t *telemetry, const char *key, double *ret)
{
    const json_t *value = json_object_get(telemetry, key);
    if (!json_is_number(value) || !(json_number_value(value) >= 0))
        return status_fail(ST_FORMAT,
                           "telemetry field \"%s\" is %s; the server must give it for --cost", key,
                           value ? "not a number at or above 0" : "missing");
    *ret = json_number_value(value);
    return ST_OK;
}

enum status cost_read(const json_t *telemetry, struct completion_cost *ret)
{
    enum status st;
    struct completion_cost s = {0};
    double kv_bytes = 0;
    CHECK(read_number(telemetry, "latency_ms", &s.latency_ms));
    CHECK(read_number(telemetry, "queue_ms", &s.queue_ms));
    CHECK(read_number(telemetry, "prompt_tokens", &s.prompt_tokens));
    CHECK(read_number(telemetry, "cached_prompt_tokens", &s.cached_prompt_tokens));
    CHECK(read_number(telemetry, "generated_tokens", &s.generated_tokens));
    CHECK(read_number(telemetry, "num_draft_tokens", &s.num_draft_tokens));
    CHECK(read_number(telemetry, "num_accepted_tokens", &s.num_accepted_tokens));
    CHECK(read_number(telemetry, "kv_bytes_peak", &kv_bytes));
    s.drafted = json_has(telemetry, "accept_rate");
    if (s.drafted) CHECK(read_number(telemetry, "accept_rate", &s.accept_rate));
    s.kv_memory_mb = kv_bytes / (1024 * 1024);
    if (s.prompt_tokens > 0) s.cache_reuse_ratio = s.cached_prompt_tokens / s.prompt_tokens;
    *ret = s;
out:
    return st;
}

void cost_quantities(const struct completion_cost *s, double latency_ms, double *ret_quantities)
{
    ret_quantities[COST_LATENCY] = latency_ms;
    ret_quantities[COST_TOKENS] = s->generated_tokens;
    ret_quantities[COST_KV] = s->kv_memory_mb;
    ret_quantities[COST_ACCEPTANCE] = s->accept_rate;
    ret_quantities[COST_CACHE] = s->cache_reuse_ratio;
}
