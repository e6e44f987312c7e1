/* cost.c: a sample's telemetry as the terms of the cost formula, and running least squares of its
 * latency. No state but the caller's.
 *
 * Of the fit only means and sums of products are kept, so a refit each step costs nothing and looks
 * at the whole run. Inputs depend on each other (without speculation nothing is drafted; generated
 * tokens and accepted drafts grow together), so the fit is on correlations with a small ridge: an
 * input that never varied gets 0, and inputs that cannot be told apart share what they explain. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/cost.h"
#include "common/base/json.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

const struct cost_term_info cost_terms[COST_TERMS] = {
    [COST_LATENCY] = {"latency", "latency_ms", -1},
    [COST_TOKENS] = {"tokens", "generated_tokens", -1},
    [COST_KV] = {"kv", "kv_memory_mb", -1},
    [COST_ACCEPTANCE] = {"acceptance", "accept_rate", 1},
    [COST_CACHE] = {"cache", "cache_reuse_ratio", 1},
};

double cost_signed_weight(const double *weights, enum cost_term term)
{
    return cost_terms[term].sign * weights[term];
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

// ---- modelled latency ---------------------------------------------------------------------------

#define N     LATENCY_INPUTS
#define RIDGE 1e-6

static void inputs(const struct completion_cost *s, double x[N])
{
    x[LATENCY_PREFILL] = s->prompt_tokens - s->cached_prompt_tokens;
    x[LATENCY_GENERATED] = s->generated_tokens;
    x[LATENCY_DRAFT] = s->num_draft_tokens;
    x[LATENCY_ACCEPTED] = s->num_accepted_tokens;
}

void latency_model_add(struct latency_model *m, const struct completion_cost *s)
{
    double x[N + 1], before[N + 1];
    inputs(s, x);
    x[N] = s->latency_ms - s->queue_ms;
    m->n += 1;
    for (int i = 0; i <= N; i++) {
        before[i] = x[i] - m->means[i];
        m->means[i] += before[i] / m->n;
    }
    for (int i = 0; i <= N; i++)
        for (int j = 0; j <= N; j++) m->products[i][j] += before[i] * (x[j] - m->means[j]);
}

// Solves a x = b for a symmetric positive definite a (n, n) of row length N, in place (Cholesky);
// x is left in b.
static void solve(double a[N][N], double *b, int n)
{
    for (int i = 0; i < n; i++) {
        for (int j = 0; j <= i; j++) {
            double sum = a[i][j];
            for (int k = 0; k < j; k++) sum -= a[i][k] * a[j][k];
            a[i][j] = i == j ? sqrt(fmax(sum, RIDGE * RIDGE)) : sum / a[j][j];
        }
        for (int k = 0; k < i; k++) b[i] -= a[i][k] * b[k];
        b[i] /= a[i][i];
    }
    for (int i = n - 1; i >= 0; i--) {
        for (int k = i + 1; k < n; k++) b[i] -= a[k][i] * b[k];
        b[i] /= a[i][i];
    }
}

void latency_model_fit(struct latency_model *m)
{
    int used[N], n = 0;
    double a[N][N], b[N], scale[N], total = m->products[N][N], explained = 0;
    for (int i = 0; i < N; i++) {
        m->ms_per[i] = 0;
        // deviations above what rounding of the means leaves
        double deviation = sqrt(m->products[i][i]);
        if (deviation <= 1e-9 * (1 + fabs(m->means[i])) * sqrt(m->n)) continue;
        scale[n] = deviation;
        used[n++] = i;
    }
    for (int i = 0; i < n; i++) {
        b[i] = m->products[used[i]][N] / scale[i];
        for (int j = 0; j < n; j++)
            a[i][j] = m->products[used[i]][used[j]] / (scale[i] * scale[j]) + (i == j ? RIDGE : 0);
    }
    solve(a, b, n);
    m->base_ms = m->means[N];
    for (int i = 0; i < n; i++) {
        m->ms_per[used[i]] = b[i] / scale[i];
        m->base_ms -= m->ms_per[used[i]] * m->means[used[i]];
        explained += m->ms_per[used[i]] * m->products[used[i]][N];
    }
    m->r2 = total > 0 ? explained / total : 0;
}

double latency_model_ms(const struct latency_model *m, const struct completion_cost *s)
{
    double x[N], ms = m->base_ms;
    inputs(s, x);
    for (int i = 0; i < N; i++) ms += m->ms_per[i] * x[i];
    return fmax(ms, 0);
}

// The measurements are the struct's first numbers.
#define N_SAVED (1 + (N + 1) + (N + 1) * (N + 1))
_Static_assert(offsetof(struct latency_model, base_ms) == N_SAVED * sizeof(double), "no others");

json_t *latency_model_to_json(const struct latency_model *m)
{
    double values[N_SAVED];
    memcpy(values, m, sizeof values);
    return json_reals(values, N_SAVED);
}

enum status latency_model_from_json(const json_t *json, struct latency_model *ret)
{
    double values[N_SAVED];
    struct latency_model m = {0};
    if (json_array_size(json) != N_SAVED)
        return status_fail(ST_FORMAT, "field \"latency_model\" is not a list of %d numbers",
                           N_SAVED);
    for (int i = 0; i < N_SAVED; i++) {
        const json_t *value = json_array_get(json, (size_t)i);
        if (!json_is_number(value))
            return status_fail(ST_FORMAT, "field \"latency_model\", entry %d is not a number", i);
        values[i] = json_number_value(value);
    }
    memcpy(&m, values, sizeof values);
    latency_model_fit(&m);
    *ret = m;
    return ST_OK;
}
