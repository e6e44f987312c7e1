/* metrics.c: Prometheus text from the server's own counters and a snapshot of the engine's. Loop's
 * thread. */
#include "infer-server/http/metrics.h"

#include <inttypes.h>

static void observe(struct histogram *h, double seconds)
{
    int i = 0;
    while (i < ENGINE_BUCKETS - 1 && seconds > engine_bucket_bounds[i]) i++;
    h->counts[i]++;
    h->sum += seconds;
}

void metrics_sample(struct metrics *m, enum finish_reason finish,
                    const struct sample_telemetry *telemetry)
{
    m->finished[finish]++;
    if (finish != FINISH_STOP && finish != FINISH_LENGTH) return;
    observe(&m->queue, telemetry->queue_ms / 1e3);
    observe(&m->whole, telemetry->latency_ms / 1e3);
}

struct page {
    struct bytes *to;
    const char *model; // label
};

static void put_head(struct page *p, const char *name, const char *type, const char *help)
{
    bytes_printf(p->to, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void put_labels(struct page *p, const char *key, const char *value)
{
    bytes_puts(p->to, "{model_name=\"");
    for (const char *c = p->model; *c; c++) {
        if (*c == '"' || *c == '\\') bytes_puts(p->to, "\\");
        bytes_append(p->to, *c == '\n' ? " " : c, 1);
    }
    bytes_puts(p->to, "\"");
    if (key) bytes_printf(p->to, ",%s=\"%s\"", key, value);
    bytes_puts(p->to, "}");
}

static void put_number(struct page *p, const char *name, const char *type, const char *help,
                       double value)
{
    put_head(p, name, type, help);
    bytes_puts(p->to, name);
    put_labels(p, NULL, NULL);
    bytes_printf(p->to, " %.17g\n", value);
}

static void put_histogram(struct page *p, const char *name, const char *help,
                          const uint64_t counts[ENGINE_BUCKETS], double sum)
{
    uint64_t total = 0;
    char bound[32];
    put_head(p, name, "histogram", help);
    for (int i = 0; i < ENGINE_BUCKETS; i++) {
        total += counts[i];
        if (i < ENGINE_BUCKETS - 1)
            snprintf(bound, sizeof bound, "%g", engine_bucket_bounds[i]);
        else
            snprintf(bound, sizeof bound, "+Inf");
        bytes_printf(p->to, "%s_bucket", name);
        put_labels(p, "le", bound);
        bytes_printf(p->to, " %" PRIu64 "\n", total);
    }
    bytes_printf(p->to, "%s_sum", name);
    put_labels(p, NULL, NULL);
    bytes_printf(p->to, " %.9g\n%s_count", sum, name);
    put_labels(p, NULL, NULL);
    bytes_printf(p->to, " %" PRIu64 "\n", total);
}

static void put_finished(struct page *p, const struct metrics *m)
{
    static const struct {
        enum finish_reason finish;
        const char *name;
    } reasons[] = {{FINISH_STOP, "stop"},
                   {FINISH_LENGTH, "length"},
                   {FINISH_CANCELLED, "abort"},
                   {FINISH_ERROR, "error"}};
    const char *name = "vllm:request_success_total";
    put_head(p, name, "counter", "Samples that ended, by reason.");
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        bytes_puts(p->to, name);
        put_labels(p, "finished_reason", reasons[i].name);
        bytes_printf(p->to, " %" PRIu64 "\n", m->finished[reasons[i].finish]);
    }
}

// Nothing where no drafts were ever asked for.
static void put_drafts(struct page *p, const struct engine_stats *e)
{
    static const char *const per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
    if (e->draft_positions == 0) return;
    put_number(p, "vllm:spec_decode_num_drafts_total", "counter",
               "Times that drafts of a sample were verified.", (double)e->num_drafts);
    put_number(p, "vllm:spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified.",
               (double)e->num_draft_tokens);
    put_number(p, "vllm:spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted.",
               (double)e->num_accepted_tokens);
    put_head(p, per_pos, "counter", "Draft tokens accepted, by place among a sample's drafts.");
    for (int i = 0; i < e->draft_positions; i++) {
        char position[16];
        snprintf(position, sizeof position, "%d", i);
        bytes_puts(p->to, per_pos);
        put_labels(p, "position", position);
        bytes_printf(p->to, " %" PRIu64 "\n", e->num_accepted_tokens_per_pos[i]);
    }
}

// What vLLM has too, under its names.
static void put_usual(struct page *p, const struct metrics *m, const struct engine_stats *e)
{
    double used = e->kv_blocks_total ? (double)e->kv_blocks_used / e->kv_blocks_total : 0;

    put_number(p, "vllm:num_requests_running", "gauge", "Sequences being generated.", e->running);
    put_number(p, "vllm:num_requests_waiting", "gauge", "Sequences waiting.", e->waiting);
    put_number(p, "vllm:gpu_cache_usage_perc", "gauge", "Used share of KV blocks (1 is full).",
               used);
    put_number(p, "vllm:kv_cache_usage_perc", "gauge", "Used share of KV blocks (1 is full).",
               used);
    put_number(p, "vllm:num_preemptions_total", "counter",
               "Sequences put back for want of KV blocks.", (double)e->preemptions);
    put_number(p, "vllm:prompt_tokens_total", "counter", "Prompt tokens prefilled.",
               (double)e->prompt_tokens);
    put_number(p, "vllm:generation_tokens_total", "counter", "Tokens generated.",
               (double)e->generated_tokens);
    put_number(p, "vllm:prefix_cache_queries_total", "counter",
               "Prompt tokens looked up in the prefix cache.", (double)e->cache_queries);
    put_number(p, "vllm:prefix_cache_hits_total", "counter",
               "Prompt tokens found in the prefix cache.", (double)e->cache_hits);
    put_finished(p, m);
    put_histogram(p, "vllm:time_to_first_token_seconds", "From queued to the first token.",
                  e->ttft_buckets, e->ttft_sum);
    put_histogram(p, "vllm:time_per_output_token_seconds", "Between two tokens of a sample.",
                  e->itl_buckets, e->itl_sum);
    put_histogram(p, "vllm:inter_token_latency_seconds", "Between two tokens of a sample.",
                  e->itl_buckets, e->itl_sum);
    put_histogram(p, "vllm:e2e_request_latency_seconds", "From queued to the last token.",
                  m->whole.counts, m->whole.sum);
    put_histogram(p, "vllm:request_queue_time_seconds", "Time in the queue.", m->queue.counts,
                  m->queue.sum);

    put_drafts(p, e);
}

void metrics_write(const struct metrics *m, const struct metrics_facts *facts, struct bytes *ret)
{
    const struct engine_stats *e = facts->engine;
    struct page page = {ret, facts->model}, *p = &page;
    put_usual(p, m, e);
    put_number(p, "commonweight:weight_version", "gauge",
               "Even: whole; odd: being written or torn.", (double)e->weight_version);
    put_number(p, "commonweight:updates_total", "counter", "Weight updates taken up by the engine.",
               (double)e->updates);
    put_number(p, "commonweight:restores_total", "counter", "Torn weights restored.",
               (double)e->restores);
    put_number(p, "commonweight:last_pause_seconds", "gauge",
               "Pause of generation at the last update.", e->last_pause_ms / 1e3);
    put_number(p, "commonweight:up", "gauge", "1 where requests are served.",
               e->state == ENGINE_OK && !facts->draining);
    put_number(p, "commonweight:torn", "gauge", "1 while the weights are torn.",
               e->state == ENGINE_TORN);
    put_number(p, "commonweight:paused", "gauge", "1 between /bridge/pause and /bridge/resume.",
               facts->paused);
    put_number(p, "commonweight:steps_total", "counter", "Forward passes.", (double)e->steps);
    put_number(p, "commonweight:engine_busy_seconds_total", "counter", "Time in forward passes.",
               e->busy_seconds);
    put_number(p, "commonweight:weight_bytes", "gauge", "Bytes of the one copy of the weights.",
               (double)e->weight_bytes);
    if (e->draft_weight_bytes)
        put_number(p, "commonweight:draft_weight_bytes", "gauge", "Bytes of the draft model.",
                   (double)e->draft_weight_bytes);
    put_number(p, "commonweight:kv_blocks", "gauge", "KV blocks in the pool.", e->kv_blocks_total);
    put_number(p, "commonweight:kv_bytes_used", "gauge", "Bytes of KV blocks in use.",
               (double)e->kv_blocks_used * (double)e->kv_bytes_per_block);
    put_number(p, "commonweight:open_requests", "gauge", "HTTP requests under way.",
               facts->open_requests);
    put_number(p, "commonweight:requests_refused_total", "counter",
               "Requests for text answered with an error before generation.", (double)m->refused);
    put_number(p, "commonweight:disconnects_total", "counter",
               "Clients that left before their answer was whole.", (double)m->disconnects);
}
