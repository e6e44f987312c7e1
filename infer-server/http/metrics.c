/* metrics.c: what the server itself counts of requests and samples. Loop's thread. */
#include "infer-server/http/metrics.h"

#include <stdio.h>
#include <string.h>

void metrics_context(struct metrics *m, int max_context)
{
    histogram_bounds_tokens(max_context, &m->tokens);
}

void metrics_request(struct metrics *m, int n, int max_tokens)
{
    histogram_add(&m->asked_n, &bounds_n, n);
    histogram_add(&m->asked_tokens, &m->tokens, max_tokens);
}

// Times are cut as vLLM cuts them: queue, prefill up to the first token, decode up to the last.
static void count_times(struct metrics *m, const struct sample_telemetry *t)
{
    const double prefill = (t->first_token_ms - t->queue_ms) / 1e3;
    const double decode = (t->latency_ms - t->first_token_ms) / 1e3;
    const int n = t->generated_tokens;
    histogram_add(&m->queue, &bounds_request, t->queue_ms / 1e3);
    histogram_add(&m->whole, &bounds_request, t->latency_ms / 1e3);
    histogram_add(&m->prefill, &bounds_request, prefill);
    histogram_add(&m->decode, &bounds_request, decode);
    histogram_add(&m->inference, &bounds_request, prefill + decode);
    histogram_add(&m->per_token, &bounds_next_token, n > 1 ? decode / (n - 1) : 0);
}

void metrics_sample(struct metrics *m, const char *request_id, int choice,
                    enum finish_reason finish, const struct sample_telemetry *telemetry)
{
    struct spec_window_entry *e = &m->ended.entries[m->ended.n++ % SPEC_WINDOW_SAMPLES];
    snprintf(e->request_id, sizeof e->request_id, "%s", request_id);
    e->choice = choice;
    e->telemetry = *telemetry;
    m->finished[finish]++;
    if (finish != FINISH_STOP && finish != FINISH_LENGTH) return;
    count_times(m, telemetry);
    histogram_add(&m->prompt_tokens, &m->tokens, telemetry->prompt_tokens);
    histogram_add(&m->generated_tokens, &m->tokens, telemetry->generated_tokens);
    histogram_add(&m->computed_tokens, &m->tokens,
                  telemetry->prompt_tokens - telemetry->cached_prompt_tokens);
}

const struct spec_window_entry *spec_window_find(const struct metrics *m, const char *request_id,
                                                 const struct spec_window_entry *after)
{
    const struct spec_window *w = &m->ended;
    const uint64_t oldest = w->n > SPEC_WINDOW_SAMPLES ? w->n - SPEC_WINDOW_SAMPLES : 0;
    bool found = !after;
    for (uint64_t i = oldest; i < w->n; i++) {
        const struct spec_window_entry *e = &w->entries[i % SPEC_WINDOW_SAMPLES];
        if (found && strcmp(e->request_id, request_id) == 0) return e;
        found |= e == after;
    }
    return NULL;
}
