/* decode.c: the decode benchmark, and the decoding batch that sync runs beside its publishes: the
 * engine's runner, without the engine. */
// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/bench.h"
#include "infer-server/engine/runner.h"
#include "common/base/rng.h"
#include <stdlib.h>
#include <string.h>

#define BLOCK 16

static enum status decoder_prefill(struct decoder *d)
{
    const int context = (int)d->b->o.context, max = d->runner->limits.max_tokens;
    int32_t *prompt = malloc((size_t)context * sizeof *prompt);
    struct rng r;
    enum status st = ST_OK;
    if (!prompt) return status_fail(ST_NO_MEMORY, "no memory for a prompt of %d tokens", context);
    rng_init(&r, (uint64_t)d->b->o.seed, 99);
    for (int s = 0; s < d->n; s++) {
        for (int i = 0; i < context; i++)
            prompt[i] = (int32_t)rng_below(&r, (uint32_t)d->b->config->vocab_size);
        for (int at = 0; at < context; at += max) {
            int n = context - at < max ? context - at : max;
            runner_clear(d->runner);
            CHECK(runner_feed(d->runner, prompt + at, n, at, d->blocks + s * d->blocks_each,
                              d->blocks_each, (struct batch_seq){-1, s, s}));
            CHECK(runner_step(d->runner));
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
    runner_free(d->runner);
    free(d->tokens);
    free(d->blocks);
}

enum status decoder_open(struct decoder *d, struct bench *b)
{
    const int last = (int)b->o.context + 2, chunk = (int)(b->o.batch > 512 ? b->o.batch : 512);
    enum status st;
    memset(d, 0, sizeof *d);
    d->b = b;
    d->n = (int)b->o.batch;
    d->blocks_each = (last + BLOCK - 1) / BLOCK;
    const int padded = d->n < 32 ? d->n + 8 : d->n + 32; // room up to the next captured size
    const struct runner_limits limits = {.max_tokens = chunk + 32,
                                         .max_seqs = padded,
                                         .max_rows = padded,
                                         .max_context = last,
                                         .block_size = BLOCK};
    d->tokens = calloc((size_t)d->n, sizeof *d->tokens);
    d->blocks = calloc((size_t)d->n * (size_t)d->blocks_each, sizeof *d->blocks);
    if (!d->tokens || !d->blocks)
        return status_fail(ST_NO_MEMORY, "no memory for %d sequences", d->n);
    for (int i = 0; i < d->n * d->blocks_each; i++) d->blocks[i] = i;
    CHECK(runner_new(b->dev, b->weights, &limits, &d->runner));
    CHECK(runner_allocate_kv(d->runner, d->n * d->blocks_each, d->n));
    st = decoder_prefill(d);
out:
    return st;
}

enum status decoder_step(void *decoder)
{
    struct decoder *d = decoder;
    static const struct sampling sampling = {
        .n = 1, .max_tokens = 1, .temperature = 1, .top_p = 1, .logprobs = -1};
    const int at = (int)d->b->o.context;
    enum status st = ST_OK;
    runner_clear(d->runner);
    for (int s = 0; s < d->n; s++) {
        const struct sampler_row row = {.sampling = &sampling,
                                        .stream = (uint64_t)s,
                                        .position = (uint64_t)at,
                                        .draft = SAMPLER_NO_DRAFT};
        CHECK(runner_feed(d->runner, &d->tokens[s], 1, at, d->blocks + s * d->blocks_each,
                          d->blocks_each, (struct batch_seq){-1, s, s}));
        CHECK(runner_want(d->runner, s, &row));
    }
    CHECK(runner_step(d->runner));
    CHECK(runner_sample(d->runner));
    CHECK(runner_collect(d->runner));
    for (int s = 0; s < d->n; s++) d->tokens[s] = d->runner->results[s].token;
out:
    return st;
}

enum status bench_decode(struct bench *b)
{
    struct decoder d = {0};
    const struct model_config *c = b->config;
    double step_ms, flops = 0;
    enum status st;
    CHECK(limits_bandwidth(b));
    CHECK(limits_matmul(b, &flops));
    CHECK(decoder_open(&d, b));
    CHECK(bench_time(b->o.warmup, b->o.steps, decoder_step, &d, &step_ms));
    // an untied input embedding is looked up, not read through
    const double looked_up = c->tie_embeddings ? 0 : (double)c->vocab_size * c->hidden;
    const double weights = limits_read_parameters(b, d.n) - looked_up;
    const double keys = (double)d.n * (double)b->o.context;
    const double read_ms = 1e3 * (weights + keys * (double)config_kv_elements(c)) *
                           (double)dtype_size(b->dt) / b->read_bandwidth;
    // 2 operations a weight and row, and the attention scores and sums
    const double work =
        2 * (limits_row_parameters(b) - looked_up) * d.n + 2 * keys * limits_attn_products(b);
    const double product_ms = 1e3 * work / flops;
    const double limit_ms = read_ms > product_ms ? read_ms : product_ms;
    bench_print(b, "decode",
                json_pack("{s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "batch", d.n, "context",
                          (json_int_t)b->o.context, "ms_per_step", step_ms, "tokens_per_s",
                          d.n * 1e3 / step_ms, "product_tflops", flops / 1e12, "limit_read_ms",
                          read_ms, "limit_product_ms", product_ms, "limit_ms", limit_ms,
                          "ratio_to_limit", limit_ms / step_ms),
                "decode, batch %d, context %lld: %.3f ms a step, %.0f tokens/s; limit %.3f ms to "
                "read at %.1f GB/s, %.3f to multiply at %.2f TFLOP/s, reached %.0f%%\n",
                d.n, (long long)b->o.context, step_ms, d.n * 1e3 / step_ms, read_ms,
                b->read_bandwidth / 1e9, product_ms, flops / 1e12, 100 * limit_ms / step_ms);
out:
    decoder_close(&d);
    return st;
}
