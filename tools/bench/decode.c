/* decode.c: the decode benchmark, the decoding batch that sync runs beside its publishes, and the
 * prefill benchmark: the engine's runner, without the engine. Prompts that nothing is known of go
 * through it as many tokens at a time as it takes, and the last row of each is sampled. One
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/bench.h"
#include "infer-server/engine/runner.h"
#include "common/base/rng.h"
#include <stdlib.h>
#include <string.h>

#define BLOCK 16

void decoder_close(struct decoder *d)
{
    runner_free(d->runner);
    free(d->prompts);
    free(d->tokens);
    free(d->blocks);
}

enum status decoder_open(struct decoder *d, struct bench *b, int max_tokens)
{
    struct rng r;
    enum status st;
    memset(d, 0, sizeof *d);
    d->b = b;
    d->n = (int)b->o.batch;
    d->context = (int)b->o.context;
    d->blocks_each = (d->context + 2 + BLOCK - 1) / BLOCK;
    const int padded = d->n < 32 ? d->n + 8 : d->n + 32; // room up to the next captured size
    const struct runner_limits limits = {.max_tokens = max_tokens,
                                         .max_seqs = padded,
                                         .max_rows = padded,
                                         .max_context = d->context + 2,
                                         .block_size = BLOCK};
    const size_t n = (size_t)d->n, n_tokens = n * (size_t)d->context;
    d->prompts = malloc(n_tokens * sizeof *d->prompts);
    d->tokens = calloc(n, sizeof *d->tokens);
    d->blocks = calloc(n * (size_t)d->blocks_each, sizeof *d->blocks);
    if (!d->prompts || !d->tokens || !d->blocks)
        return status_fail(ST_NO_MEMORY, "no memory for %d sequences", d->n);
    rng_init(&r, (uint64_t)b->o.seed, 99);
    for (size_t i = 0; i < n_tokens; i++)
        d->prompts[i] = (int32_t)rng_below(&r, (uint32_t)b->config->vocab_size);
    for (int i = 0; i < d->n * d->blocks_each; i++) d->blocks[i] = i;
    CHECK(runner_new(b->dev, b->weights, &limits, &d->runner));
    st = runner_allocate_kv(d->runner, d->n * d->blocks_each, d->n);
out:
    return st;
}

// n tokens of sequence s at position `at`, with a sample behind the last of them if that is wanted.
static enum status feed(struct decoder *d, const int32_t *tokens, int n, int s, int at, bool wanted)
{
    static const struct sampling sampling = {
        .n = 1, .max_tokens = 1, .temperature = 1, .top_p = 1, .logprobs = -1};
    const struct sampler_row row = {.sampling = &sampling,
                                    .stream = (uint64_t)s,
                                    .position = (uint64_t)(at + n),
                                    .draft = SAMPLER_NO_DRAFT};
    enum status st = runner_feed(d->runner, tokens, n, at, d->blocks + s * d->blocks_each,
                                 d->blocks_each, (struct batch_seq){-1, s, s});
    if (st != ST_OK || !wanted) return st;
    return runner_want(d->runner, batch_tokens(d->runner->batch) - 1, &row);
}

// One step, whose samples become the tokens of the sequences from `first` on.
static enum status step(struct decoder *d, int first)
{
    enum status st;
    CHECK(runner_step(d->runner));
    CHECK(runner_sample(d->runner));
    CHECK(runner_collect(d->runner));
    for (int i = 0; i < d->runner->n_rows; i++) d->tokens[first + i] = d->runner->results[i].token;
out:
    return st;
}

// The prompts of the first n sequences.
static enum status prefill(struct decoder *d, int n_seqs)
{
    const int max = d->runner->limits.max_tokens;
    enum status st = ST_OK;
    for (int s = 0, at = 0; s < n_seqs;) {
        const int first = s;
        runner_clear(d->runner);
        for (int room = max; s < n_seqs && room > 0;) {
            const int left = d->context - at, n = left < room ? left : room;
            CHECK(feed(d, d->prompts + (size_t)s * (size_t)d->context + at, n, s, at, n == left));
            room -= n;
            at = n == left ? 0 : at + n;
            s += n == left;
        }
        CHECK(step(d, first));
    }
out:
    return st;
}

enum status decoder_prefill(void *decoder)
{
    struct decoder *d = decoder;
    return prefill(d, d->n);
}

// All sequences become the first one, each in blocks of its own: of long contexts to compute them
// all would take minutes, and a step takes as long whatever they hold.
static enum status fill(struct decoder *d)
{
    enum status st;
    CHECK(prefill(d, 1));
    for (int s = 1; s < d->n; s++) {
        d->tokens[s] = d->tokens[0];
        for (int i = 0; i < d->blocks_each; i++)
            CHECK(runner_copy(
                d->runner,
                &(struct kv_copy){d->blocks[i], d->blocks[s * d->blocks_each + i], false}));
        CHECK(runner_copy(d->runner, &(struct kv_copy){0, s, true}));
    }
out:
    return st;
}

enum status decoder_step(void *decoder)
{
    struct decoder *d = decoder;
    enum status st = ST_OK;
    runner_clear(d->runner);
    for (int s = 0; s < d->n; s++) CHECK(feed(d, &d->tokens[s], 1, s, d->context, true));
    st = step(d, 0);
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
    CHECK(decoder_open(&d, b, DECODER_TOKENS(b)));
    CHECK(fill(&d));
    CHECK(bench_time(b->o.warmup, b->o.steps, decoder_step, &d, &step_ms));
    // an untied input embedding is looked up, not read through
    const double looked_up = c->tie_embeddings ? 0 : (double)c->vocab_size * c->hidden;
    const double e = (double)dtype_size(b->dt);
    const double weights = limits_read_bytes(b, d.n) - looked_up * e;
    const double keys = (double)d.n * (double)b->o.context;
    const double read_ms =
        1e3 * (weights + keys * (double)config_kv_bytes(c, b->dt) + d.n * limits_state_bytes(b)) /
        b->read_bandwidth;
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

enum status bench_prefill(struct bench *b)
{
    struct decoder d = {0};
    const struct model_config *c = b->config;
    double flops = 0, pass_ms;
    enum status st;
    if (b->o.tokens == 0) b->o.tokens = device_kind(b->dev) == DEVICE_CUDA ? 8192 : 512;
    CHECK(limits_bandwidth(b));
    CHECK(limits_matmul(b, &flops));
    CHECK(decoder_open(&d, b, (int)b->o.tokens));
    CHECK(bench_time(b->o.warmup, b->o.steps, decoder_prefill, &d, &pass_ms));
    // 2 operations a parameter and token, the head for the last token alone, an embedding for none;
    // and the attention scores and sums of causal sequences
    const double n = (double)d.n * d.context, head = (double)c->vocab_size * c->hidden;
    const double layers = limits_row_parameters(b) - (c->tie_embeddings ? 1 : 2) * head;
    const double work = 2 * layers * n + 2 * head * d.n + n * d.context * limits_attn_products(b);
    const double limit_ms = 1e3 * work / flops;
    bench_print(b, "prefill",
                json_pack("{s:i, s:i, s:I, s:f, s:f, s:f, s:f, s:f}", "batch", d.n, "context",
                          d.context, "tokens_per_step", (json_int_t)b->o.tokens, "ms_per_pass",
                          pass_ms, "tokens_per_s", n * 1e3 / pass_ms, "product_tflops",
                          flops / 1e12, "limit_ms", limit_ms, "ratio_to_limit", limit_ms / pass_ms),
                "prefill, %d prompts of %d tokens, %lld at a time: %.2f ms, %.0f tokens/s; limit "
                "%.2f ms at %.2f TFLOP/s, reached %.0f%%\n",
                d.n, d.context, (long long)b->o.tokens, pass_ms, n * 1e3 / pass_ms, limit_ms,
                flops / 1e12, 100 * limit_ms / pass_ms);
out:
    decoder_close(&d);
    return st;
}
