/* metrics.c: Prometheus text from the server's own counters and a snapshot of the engine's.
 * Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/metrics.h"
#include "infer-server/http/response.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

struct page {
    struct bytes *to;
    const char *model; // label
};

static void put_head(struct page *p, const char *name, const char *type, const char *help)
{
    bytes_printf(p->to, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

// A label's value, as it stands between quotes.
static void put_escaped(struct bytes *to, const char *text)
{
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\') bytes_puts(to, "\\");
        bytes_append(to, *c == '\n' ? " " : c, 1);
    }
}

// `more`: further labels as they stand in the text, or NULL.
static void put_labels(struct page *p, const char *more)
{
    bytes_puts(p->to, "{model_name=\"");
    put_escaped(p->to, p->model);
    bytes_puts(p->to, "\"");
    if (more) bytes_printf(p->to, ",%s", more);
    bytes_puts(p->to, "}");
}

static void put_row(struct page *p, const char *name, const char *labels, double value)
{
    bytes_puts(p->to, name);
    put_labels(p, labels);
    bytes_printf(p->to, " %.17g\n", value);
}

struct number { // a metric of one row
    const char *name, *type, *help;
    double value;
};

static void put_numbers(struct page *p, const struct number *numbers, int n)
{
    for (const struct number *x = numbers; x < numbers + n; x++) {
        put_head(p, x->name, x->type, x->help);
        put_row(p, x->name, NULL, x->value);
    }
}
#define PUT_NUMBERS(p, numbers) put_numbers(p, numbers, (int)(sizeof(numbers) / sizeof *(numbers)))

static void put_histogram(struct page *p, const char *name, const char *help,
                          const struct histogram *h, const struct histogram_bounds *bounds)
{
    uint64_t total = 0;
    char bound[40];
    put_head(p, name, "histogram", help);
    for (int i = 0; i <= bounds->n; i++) {
        total += h->counts[i];
        if (i < bounds->n)
            snprintf(bound, sizeof bound, "le=\"%.9g\"", bounds->at[i]);
        else
            snprintf(bound, sizeof bound, "le=\"+Inf\"");
        bytes_printf(p->to, "%s_bucket", name);
        put_labels(p, bound);
        bytes_printf(p->to, " %" PRIu64 "\n", total);
    }
    bytes_printf(p->to, "%s_sum", name);
    put_labels(p, NULL);
    bytes_printf(p->to, " %.9g\n%s_count", h->sum, name);
    put_labels(p, NULL);
    bytes_printf(p->to, " %" PRIu64 "\n", total);
}

static void put_finished(struct page *p, const struct metrics *m)
{
    const char *name = "vllm:request_success_total";
    put_head(p, name, "counter", "Samples that ended, by reason.");
    for (int i = FINISH_STOP; i <= FINISH_ERROR; i++) {
        char label[40];
        snprintf(label, sizeof label, "finished_reason=\"%s\"", finish_reason_names[i]);
        put_row(p, name, label, m->finished[i]);
    }
}

// Nothing where no drafts were ever asked for.
static void put_drafts(struct page *p, const struct draft_counts *c)
{
    static const char *const per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
    const struct number numbers[] = {
        {"vllm:spec_decode_num_drafts_total", "counter",
         "Times that drafts of a sample were verified.", c->num_drafts},
        {"vllm:spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified.",
         c->num_draft_tokens},
        {"vllm:spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted.",
         c->num_accepted_tokens},
    };
    if (c->draft_positions == 0) return;
    PUT_NUMBERS(p, numbers);
    put_head(p, per_pos, "counter", "Draft tokens accepted, by place among a sample's drafts.");
    for (int i = 0; i < c->draft_positions; i++) {
        char position[32];
        snprintf(position, sizeof position, "position=\"%d\"", i);
        put_row(p, per_pos, position, c->num_accepted_tokens_per_pos[i]);
    }
}

static void put_histograms(struct page *p, const struct metrics *m, const struct engine_stats *e)
{
    const struct {
        const char *name, *help;
        const struct histogram *histogram;
        const struct histogram_bounds *bounds;
    } all[] = {
        {"vllm:time_to_first_token_seconds", "From queued to the first token.", &e->first_token,
         &bounds_first_token},
        {"vllm:time_per_output_token_seconds", "Between two tokens of a sample.", &e->next_token,
         &bounds_next_token},
        {"vllm:inter_token_latency_seconds", "Between two tokens of a sample.", &e->next_token,
         &bounds_next_token},
        {"vllm:iteration_tokens_total", "Prompt tokens computed and tokens generated, by step.",
         &e->step_tokens, &bounds_step_tokens},
        {"vllm:e2e_request_latency_seconds", "From queued to the last token.", &m->whole,
         &bounds_request},
        {"vllm:request_queue_time_seconds", "Time in the queue.", &m->queue, &bounds_request},
        {"vllm:request_prefill_time_seconds", "From the first prefill to the first token.",
         &m->prefill, &bounds_request},
        {"vllm:request_decode_time_seconds", "From the first token to the last.", &m->decode,
         &bounds_request},
        {"vllm:request_inference_time_seconds", "From the first prefill to the last token.",
         &m->inference, &bounds_request},
        {"vllm:request_time_per_output_token_seconds", "Mean time between a sample's tokens.",
         &m->per_token, &bounds_next_token},
        {"vllm:request_prompt_tokens", "Prompt tokens of a sample.", &m->prompt_tokens, &m->tokens},
        {"vllm:request_generation_tokens", "Tokens generated for a sample.", &m->generated_tokens,
         &m->tokens},
        {"vllm:request_prefill_kv_computed_tokens",
         "Prompt tokens of a sample that were not in the prefix cache.", &m->computed_tokens,
         &m->tokens},
        {"vllm:request_params_n", "Samples asked for, by prompt.", &m->asked_n, &bounds_n},
        {"vllm:request_params_max_tokens", "max_tokens asked for, by prompt.", &m->asked_tokens,
         &m->tokens},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        put_histogram(p, all[i].name, all[i].help, all[i].histogram, all[i].bounds);
}

// A gauge of 1 whose labels say it.
static void put_cache_config(struct page *p, const struct metrics_info *info)
{
    const struct engine_stats *e = info->engine;
    const char *name = "vllm:cache_config_info";
    char labels[256];
    snprintf(labels, sizeof labels,
             "block_size=\"%d\",cache_dtype=\"%s\",enable_prefix_caching=\"%s\",engine=\"0\",kv_"
             "cache_size_tokens=\"%" PRId64 "\",num_gpu_blocks=\"%d\"",
             e->kv_block_tokens, info->kv_dtype, info->prefix_cache ? "True" : "False",
             (int64_t)e->kv_blocks_total * e->kv_block_tokens, e->kv_blocks_total);
    put_head(p, name, "gauge", "How the KV cache is set up; always 1.");
    put_row(p, name, labels, 1);
}

// Names of the adapters that have samples, running or else waiting, behind each other.
static void put_busy(struct bytes *labels, const struct metrics_info *info, bool running)
{
    const char *comma = "";
    for (const struct adapter_info *a = info->adapters; a < info->adapters + info->n_adapters; a++)
        if (running ? a->running > 0 : a->samples > a->running) {
            bytes_puts(labels, comma);
            put_escaped(labels, a->name);
            comma = ",";
        }
}

// One row an adapter: as many as --max-adapters.
static void put_adapters(struct page *p, const struct metrics_info *info)
{
    static const struct {
        const char *name, *type, *help;
    } all[] = {
        {"commonweight:adapter_requests_running", "gauge", "Sequences being generated by it."},
        {"commonweight:adapter_requests_waiting", "gauge", "Sequences waiting for it."},
        {"commonweight:adapter_generation_tokens_total", "counter",
         "Tokens of sequences of it that have ended."},
    };
    const char *name = "vllm:lora_requests_info";
    struct bytes labels = BYTES_INIT;
    if (info->max_adapters == 0) return;
    bytes_printf(&labels, "max_lora=\"%d\",running_lora_adapters=\"", info->max_adapters);
    put_busy(&labels, info, true);
    bytes_puts(&labels, "\",waiting_lora_adapters=\"");
    put_busy(&labels, info, false);
    bytes_puts(&labels, "\"");
    put_head(p, name, "gauge", "Adapters in use, in labels; the time, in seconds since 1970.");
    put_row(p, name, bytes_text(&labels), time(NULL));
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        put_head(p, all[i].name, all[i].type, all[i].help);
        for (int j = 0; j < info->n_adapters; j++) {
            const struct adapter_info *a = &info->adapters[j];
            // the two are counted at different moments of a step
            const int waiting = a->samples > a->running ? a->samples - a->running : 0;
            const double values[] = {a->running, waiting, a->generated_tokens};
            labels.len = 0;
            bytes_puts(&labels, "adapter=\"");
            put_escaped(&labels, a->name);
            bytes_puts(&labels, "\"");
            put_row(p, all[i].name, bytes_text(&labels), values[i]);
        }
    }
    bytes_release(&labels);
}

void metrics_write(const struct metrics *m, const struct metrics_info *info, struct bytes *ret)
{
    const struct engine_stats *e = info->engine;
    struct page page = {ret, info->model}, *p = &page;
    const double used = e->kv_blocks_total ? (double)e->kv_blocks_used / e->kv_blocks_total : 0;
    const struct number usual[] = {
        // what vLLM has too, under its names
        {"vllm:num_requests_running", "gauge", "Sequences being generated.", e->running},
        {"vllm:num_requests_waiting", "gauge", "Sequences waiting.", e->waiting},
        {"vllm:gpu_cache_usage_perc", "gauge", "Used share of KV blocks (1 is full).", used},
        {"vllm:kv_cache_usage_perc", "gauge", "Used share of KV blocks (1 is full).", used},
        {"vllm:num_preemptions_total", "counter", "Sequences put back for want of KV blocks.",
         e->preemptions},
        {"vllm:prompt_tokens_total", "counter", "Prompt tokens prefilled.", e->prompt_tokens},
        {"vllm:generation_tokens_total", "counter", "Tokens generated.", e->generated_tokens},
        {"vllm:prefix_cache_queries_total", "counter",
         "Prompt tokens looked up in the prefix cache.", e->cache_queries},
        {"vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
         e->cache_hits},
    };
    const struct number own[] = {
        {"commonweight:weight_version", "gauge", "Even: whole; odd: being written or torn.",
         e->weight_version},
        {"commonweight:updates_total", "counter", "Weight updates taken up by the engine.",
         e->updates},
        {"commonweight:restores_total", "counter", "Torn weights restored.", e->restores},
        {"commonweight:last_pause_seconds", "gauge", "Pause of generation at the last update.",
         e->last_pause_ms / 1e3},
        {"commonweight:up", "gauge", "1 where requests are served.",
         e->state == ENGINE_OK && !info->draining},
        {"commonweight:torn", "gauge", "1 while the weights are torn.", e->state == ENGINE_TORN},
        {"commonweight:paused", "gauge", "1 between /bridge/pause and /bridge/resume.",
         info->paused},
        {"commonweight:steps_total", "counter", "Forward passes.", e->steps},
        {"commonweight:engine_busy_seconds_total", "counter", "Time in forward passes.",
         e->busy_seconds},
        {"commonweight:weight_bytes", "gauge", "Bytes of the one copy of the weights.",
         e->weight_bytes},
        {"commonweight:kv_blocks", "gauge", "KV blocks in the pool.", e->kv_blocks_total},
        {"commonweight:kv_bytes_used", "gauge", "Bytes of KV blocks in use.",
         e->kv_blocks_used * e->kv_bytes_per_block},
        {"commonweight:open_requests", "gauge", "HTTP requests under way.", info->open_requests},
        {"commonweight:requests_refused_total", "counter",
         "Requests for text answered with an error before generation.", m->refused},
        {"commonweight:disconnects_total", "counter",
         "Clients that left before their answer was whole.", m->disconnects},
    };
    const struct number draft = {"commonweight:draft_weight_bytes", "gauge",
                                 "Bytes of the draft model.", e->draft_weight_bytes};
    const struct number frozen = {"commonweight:frozen_weight_bytes", "gauge",
                                  "Bytes of the frozen model.", e->frozen_weight_bytes};
    PUT_NUMBERS(p, usual);
    put_finished(p, m);
    put_histograms(p, m, e);
    put_drafts(p, &e->drafts);
    put_cache_config(p, info);
    PUT_NUMBERS(p, own);
    put_adapters(p, info);
    if (e->draft_weight_bytes) put_numbers(p, &draft, 1);
    if (e->frozen_weight_bytes) put_numbers(p, &frozen, 1);
}
