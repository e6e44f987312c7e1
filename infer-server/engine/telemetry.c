/* telemetry.c: what becomes of samples is told to their submitters (executor.h), and counted: times
 * of each, histograms of all (engine_info.h). The bounds are those of vLLM 0.24,
 * vllm/v1/metrics/loggers.py. No state of its own; counting is any thread's, the rest the engine's.
 */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/executor.h"
#include "common/base/clock.h"

// ---- histograms --------------------------------------------------------------------------------

const struct histogram_bounds bounds_first_token = {
    22, {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
         1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560}};
const struct histogram_bounds bounds_next_token = {22, {0.001, 0.0025, 0.005, // these are finer
                                                        0.01,  0.025,  0.05,  0.075, 0.1, 0.15, 0.2,
                                                        0.3,   0.4,    0.5,   0.75,  1,   2.5,  5,
                                                        7.5,   10,     20,    40,    80}};
const struct histogram_bounds bounds_request = {
    27, {0.005, 0.01, 0.025, 0.05, 0.1, 0.2, // these are finer
         0.3,   0.5,  0.8,   1,    1.5, 2,   2.5, 5,   10,   15,  20,
         30,    40,   50,    60,   120, 240, 480, 960, 1920, 7680}};
const struct histogram_bounds bounds_step_tokens = {
    13, {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}};
const struct histogram_bounds bounds_n = {5, {1, 2, 5, 10, 20}};

void histogram_bounds_tokens(int max, struct histogram_bounds *ret)
{
    static const int steps[] = {1, 2, 5};
    double power = 1;
    ret->n = 0;
    for (int i = 0; ret->n < HISTOGRAM_BOUNDS_MAX && steps[i] * power <= max; i = (i + 1) % 3) {
        ret->at[ret->n++] = steps[i] * power;
        if (i == 2) power *= 10;
    }
}

void histogram_add(struct histogram *h, const struct histogram_bounds *bounds, double value)
{
    int i = 0;
    while (i < bounds->n && value > bounds->at[i]) i++;
    h->counts[i]++;
    h->sum += value;
}

// ---- delivery ----------------------------------------------------------------------------------

// A sibling that shares a prompt has waited for nothing but the one that computed it: both left the
// queue together.
void delivery_started(const struct engine_step *step, int64_t now_ns)
{
    for (int i = 0; i < step->n_items; i++)
        if (!step->items[i].sample->started_ns) step->items[i].sample->started_ns = now_ns;
    for (int i = 0; i < step->n_sampled; i++) {
        struct sample *sample = step->sampled[i].sample;
        if (!sample->started_ns)
            sample->started_ns = step->items[step->sampled[i].item].sample->started_ns;
    }
}

static const struct sample_telemetry *close_telemetry(const struct executor *x,
                                                      struct sample *sample)
{
    struct sample_telemetry *t = &sample->telemetry;
    const int64_t end = sample->last_token_ns ? sample->last_token_ns : clock_now_ns();
    const int64_t started = sample->started_ns ? sample->started_ns : end;
    const int cached = sample->request->cached_tokens;
    t->queue_ms = (double)(started - sample->queued_ns) / 1e6;
    t->latency_ms = (double)(end - sample->queued_ns) / 1e6;
    t->generated_tokens = sample->text.n_generated;
    t->cached_prompt_tokens = cached > 0 ? cached : 0;
    t->kv_bytes_peak = sample->blocks.peak * x->block_bytes;
    if (sample->blocks.peak > 0) t->kv_bytes_peak += x->state_bytes;
    return t;
}

void deliver_all(struct executor *x)
{
    for (int i = 0; i < x->n_events; i++) {
        x->events[i].more = i + 1 < x->n_events;
        x->on_event(x->context, &x->events[i]);
    }
    x->n_events = 0;
}

// A sample's event, in which `what` stands: with the prompt's log-probabilities where they are due,
// and all that there is to say of it where it ends.
static void deliver(struct executor *x, struct sample *sample, const struct engine_event *what)
{
    struct request *r = sample->request;
    if (x->n_events == x->max_events) deliver_all(x);
    struct engine_event *event = &x->events[x->n_events++];
    *event = *what;
    event->request = r;
    event->sample = sample->index;
    if (r->prompt_tokens && !r->prompt_delivered && request_rows_read(r) == INT32_MAX) {
        event->prompt = r->prompt_tokens;
        event->prompt_top = r->prompt_top;
        r->prompt_delivered = true;
    }
    if (event->finish == FINISH_NONE) return;
    event->telemetry = close_telemetry(x, sample);
    scheduler_remove(x->scheduler, sample);
    x->stats->requests_done[event->finish]++;
    event->request_done = ++r->n_done == r->sampling.n;
}

void deliver_end(struct executor *x, struct sample *sample, enum finish_reason finish,
                 const char *error)
{
    deliver(x, sample, &(struct engine_event){.finish = finish, .error = error});
}

static void count_prompt(const struct executor *x, const struct sample *sample)
{
    if (sample->index == 0) x->stats->prompt_tokens += (uint64_t)sample->telemetry.prompt_tokens;
}

void deliver_prompt(struct executor *x, struct sample *sample, uint64_t version, int64_t now_ns)
{
    struct sample_telemetry *t = &sample->telemetry;
    t->weight_version_first = t->weight_version_last = version;
    sample->last_token_ns = now_ns;
    count_prompt(x, sample);
    deliver_end(x, sample, FINISH_LENGTH, NULL);
}

void deliver_token(struct executor *x, struct sample *sample, int n,
                   const struct token_record *token, const struct top_logprob *top,
                   enum finish_reason finish, int64_t now_ns)
{
    struct sample_telemetry *t = &sample->telemetry;
    x->stats->generated_tokens++;
    if (n == 1) {
        t->weight_version_first = token->weight_version;
        t->first_token_ms = (double)(now_ns - sample->queued_ns) / 1e6;
        histogram_add(&x->stats->first_token, &bounds_first_token, t->first_token_ms / 1e3);
        count_prompt(x, sample);
    } else {
        histogram_add(&x->stats->next_token, &bounds_next_token,
                      (double)(now_ns - sample->last_token_ns) / 1e9);
    }
    t->weight_version_last = token->weight_version;
    sample->last_token_ns = now_ns;
    if (x->n_events == x->max_events) deliver_all(x);
    struct token_record *record = &x->records[x->n_events];
    *record = *token;
    const struct sampler *sampler = x->runners[RUNNER_POLICY]->sampler;
    const bool stop = sampler_is_stop(sampler, &sample->request->sampling, token->token);
    deliver(x, sample,
            &(struct engine_event){.tokens = record,
                                   .n_tokens = 1,
                                   .top = top,
                                   .finish = finish,
                                   .last_is_text = finish == FINISH_STOP && !stop});
}
