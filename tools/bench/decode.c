/* decode.c: the decode benchmark, and the decoding batch that sync runs beside its publishes: as
 * the engine has it, without the engine. */
#include "tools/bench/decode.h"
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/model/model.h"
#include <stdlib.h>
#include <string.h>

#define BLOCK 16

static enum status decoder_prefill(struct decoder *d)
{
    int context = (int)d->b->o.context;
    int32_t *prompt = malloc((size_t)context * sizeof *prompt);
    struct rng r;
    enum status st = ST_OK;
    if (!prompt) return status_fail(ST_NO_MEMORY, "no memory for a prompt of %d tokens", context);
    rng_init(&r, (uint64_t)d->b->o.seed, 99);
    for (int s = 0; s < d->n; s++) {
        for (int i = 0; i < context; i++)
            prompt[i] = (int32_t)rng_below(&r, (uint32_t)d->b->config->vocab_size);
        for (int at = 0; at < context; at += d->model->max_tokens) {
            int n = context - at < d->model->max_tokens ? context - at : d->model->max_tokens;
            batch_clear(d->batch);
            CHECK(batch_add_paged(d->batch, prompt + at, n, at, d->blocks + s * d->blocks_each,
                                  d->blocks_each, BLOCK));
            CHECK(batch_commit(d->batch, 0));
            model_step(d->model, d->batch, &d->kv.view);
            CHECK(device_sync(d->b->dev));
        }
        d->tokens[s] = prompt[0];
    }
out:
    free(prompt);
    return st;
}

void decoder_close(struct decoder *d)
{
    if (!d->b) return;
    kv_memory_release(&d->kv);
    sampler_free(d->sampler);
    batch_free(d->batch);
    model_free(d->model);
    free(d->rows);
    free(d->top);
    free(d->tokens);
    free(d->blocks);
}

enum status decoder_open(struct decoder *d, struct bench *b)
{
    int last = (int)b->o.context + 2, chunk = (int)(b->o.batch > 512 ? b->o.batch : 512);
    static const struct sampling plain = {
        .temperature = 1, .top_p = 1, .repetition_penalty = 1, .ignore_eos = true};
    enum status st;
    memset(d, 0, sizeof *d);
    d->b = b;
    d->n = (int)b->o.batch;
    d->blocks_each = (last + BLOCK - 1) / BLOCK;
    d->tokens = calloc((size_t)d->n, sizeof *d->tokens);
    d->blocks = calloc((size_t)d->n * (size_t)d->blocks_each, sizeof *d->blocks);
    d->rows = calloc((size_t)d->n, sizeof *d->rows);
    d->top = calloc((size_t)d->n, sizeof *d->top);
    if (!d->tokens || !d->blocks || !d->rows || !d->top)
        return status_fail(ST_NO_MEMORY, "no memory for %d sequences", d->n);
    for (int i = 0; i < d->n * d->blocks_each; i++) d->blocks[i] = i;
    CHECK(kv_memory_alloc(&d->kv, b->dev, b->config, b->dt, BLOCK, d->n * d->blocks_each));
    // room for padding a batch up to the next captured size
    int rows = d->n < 32 ? d->n + 8 : d->n + 32;
    CHECK(model_new(b->dev, b->config, b->weights, chunk + 32, rows, last, &d->model));
    CHECK(batch_new(b->dev, chunk + 32, rows, d->blocks_each, rows, &d->batch));
    CHECK(sampler_new(b->dev, rows, b->config->vocab_size, NULL, 0, &d->sampler));
    for (int i = 0; i < d->n; i++)
        d->rows[i] = (struct sampler_row){.sampling = &plain,
                                          .stream = (uint64_t)i,
                                          .position = (uint64_t)b->o.context,
                                          .draft = SAMPLER_NO_DRAFT};
    st = decoder_prefill(d);
out:
    return st;
}

enum status decoder_step(struct decoder *d)
{
    int at = (int)d->b->o.context;
    const struct sample_result *results;
    enum status st = ST_OK;
    batch_clear(d->batch);
    for (int s = 0; s < d->n; s++) {
        CHECK(batch_add_paged(d->batch, &d->tokens[s], 1, at, d->blocks + s * d->blocks_each,
                              d->blocks_each, BLOCK));
        CHECK(batch_want_row(d->batch, s));
    }
    CHECK(batch_commit(d->batch, model_decode_padding(d->model, d->n)));
    model_step(d->model, d->batch, &d->kv.view);
    CHECK(sampler_draw(d->sampler, d->model->logits, d->rows, d->n, NULL, &results, d->top));
    for (int s = 0; s < d->n; s++) d->tokens[s] = results[s].token;
out:
    return st;
}

enum status bench_decode(struct bench *b)
{
    struct decoder d = {0};
    int steps = (int)b->o.steps;
    double *ms = calloc((size_t)steps, sizeof *ms);
    const struct model_config *c = b->config;
    enum status st;
    if (!ms) return status_fail(ST_NO_MEMORY, "no memory for %d times", steps);
    CHECK(limits_bandwidth(b));
    CHECK(decoder_open(&d, b));
    for (int i = -(int)b->o.warmup; i < steps; i++) {
        int64_t start = clock_now_ns();
        CHECK(decoder_step(&d));
        if (i >= 0) ms[i] = clock_ms_since(start);
    }
    double step_ms = median(ms, steps);
    // an untied input embedding is looked up, not read through
    double read = (double)b->weights->n_parameters -
                  (c->tie_embeddings ? 0 : (double)c->vocab_size * c->hidden);
    read += (double)d.n * (double)b->o.context * (double)config_kv_elements(c);
    double floor_ms = 1e3 * read * (double)dtype_size(b->dt) / b->read_bandwidth;
    json_t *report = bench_report(b, "decode");
    json_object_set_new(report, "batch", json_integer(d.n));
    json_object_set_new(report, "context", json_integer(b->o.context));
    json_object_set_new(report, "ms_per_step", json_real(step_ms));
    json_object_set_new(report, "tokens_per_s", json_real(d.n * 1e3 / step_ms));
    json_object_set_new(report, "limit_ms", json_real(floor_ms));
    json_object_set_new(report, "ratio_to_limit", json_real(floor_ms / step_ms));
    bench_print(b, report,
                "decode, batch %d, context %lld: %.3f ms a step, %.0f tokens/s; limit %.3f ms at "
                "%.1f GB/s, "
                "reached %.0f%%\n",
                d.n, (long long)b->o.context, step_ms, d.n * 1e3 / step_ms, floor_ms,
                b->read_bandwidth / 1e9, 100 * floor_ms / step_ms);
out:
    decoder_close(&d);
    free(ms);
    return st;
}
