/* prefill.c: the prefill benchmark: prompts that nothing is known of go through the engine's
 * runner, as many tokens at a time as --tokens says, and the last row of each is sampled. One
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "infer-server/engine/runner.h"
#include "tools/bench/bench.h"
#include <stdlib.h>

#define BLOCK 16

struct prefill {
    struct runner *runner;
    int n, context, blocks_each; // sequences, and of each
    int32_t *prompt, *blocks;    // (context) all have one; (n, blocks_each)
};

static enum status prefill_open(struct prefill *p, struct bench *b)
{
    struct rng r;
    enum status st;
    p->n = (int)b->o.batch;
    p->context = (int)b->o.context;
    p->blocks_each = (p->context + BLOCK - 1) / BLOCK;
    const struct runner_limits limits = {.max_tokens = (int)b->o.tokens,
                                         .max_seqs = p->n,
                                         .max_rows = p->n,
                                         .max_context = p->context + 1,
                                         .block_size = BLOCK};
    p->prompt = calloc((size_t)p->context, sizeof *p->prompt);
    p->blocks = calloc((size_t)p->n * (size_t)p->blocks_each, sizeof *p->blocks);
    if (!p->prompt || !p->blocks)
        return status_fail(ST_NO_MEMORY, "no memory for %d sequences", p->n);
    rng_init(&r, (uint64_t)b->o.seed, 99);
    for (int i = 0; i < p->context; i++)
        p->prompt[i] = (int32_t)rng_below(&r, (uint32_t)b->config->vocab_size);
    for (int i = 0; i < p->n * p->blocks_each; i++) p->blocks[i] = i;
    CHECK(runner_new(b->dev, b->weights, &limits, &p->runner));
    st = runner_allocate_kv(p->runner, p->n * p->blocks_each, p->n);
out:
    return st;
}

// Feeds what fits of the prompts from sequence *s, token *at on.
static enum status feed_step(struct prefill *p, int *s, int *at)
{
    static const struct sampling sampling = {
        .n = 1, .max_tokens = 1, .temperature = 1, .top_p = 1, .logprobs = -1};
    int row = 0;
    enum status st = ST_OK;
    runner_clear(p->runner);
    while (*s < p->n && row < p->runner->limits.max_tokens) {
        const int room = p->runner->limits.max_tokens - row, left = p->context - *at;
        const int n = left < room ? left : room;
        CHECK(runner_feed(p->runner, p->prompt + *at, n, *at, p->blocks + *s * p->blocks_each,
                          p->blocks_each, (struct batch_seq){-1, *s, *s}));
        row += n;
        *at += n;
        if (*at < p->context) continue;
        const struct sampler_row last = {.sampling = &sampling,
                                         .stream = (uint64_t)*s,
                                         .position = (uint64_t)p->context,
                                         .draft = SAMPLER_NO_DRAFT};
        CHECK(runner_want(p->runner, row - 1, &last));
        *at = 0;
        ++*s;
    }
out:
    return st;
}

static enum status pass(void *context)
{
    struct prefill *p = context;
    enum status st = ST_OK;
    for (int s = 0, at = 0; s < p->n;) {
        CHECK(feed_step(p, &s, &at));
        CHECK(runner_step(p->runner));
        CHECK(runner_sample(p->runner));
        CHECK(runner_collect(p->runner));
    }
out:
    return st;
}

enum status bench_prefill(struct bench *b)
{
    struct prefill p = {0};
    const struct model_config *c = b->config;
    double flops = 0, pass_ms;
    enum status st;
    if (b->o.tokens == 0) b->o.tokens = device_kind(b->dev) == DEVICE_CUDA ? 8192 : 512;
    CHECK(limits_bandwidth(b));
    CHECK(limits_matmul(b, &flops));
    CHECK(prefill_open(&p, b));
    CHECK(bench_time(b->o.warmup, b->o.steps, pass, &p, &pass_ms));
    // 2 operations a parameter and token, the head for the last token alone, an embedding for none;
    // and the attention scores and sums of causal sequences
    const double n = (double)p.n * p.context, head = (double)c->vocab_size * c->hidden;
    const double layers = limits_row_parameters(b) - (c->tie_embeddings ? 1 : 2) * head;
    const double work = 2 * layers * n + 2 * head * p.n + n * p.context * limits_attn_products(b);
    const double limit_ms = 1e3 * work / flops;
    bench_print(b, "prefill",
                json_pack("{s:i, s:i, s:I, s:f, s:f, s:f, s:f, s:f}", "batch", p.n, "context",
                          p.context, "tokens_per_step", (json_int_t)b->o.tokens, "ms_per_pass",
                          pass_ms, "tokens_per_s", n * 1e3 / pass_ms, "product_tflops",
                          flops / 1e12, "limit_ms", limit_ms, "ratio_to_limit", limit_ms / pass_ms),
                "prefill, %d prompts of %d tokens, %lld at a time: %.2f ms, %.0f tokens/s; limit "
                "%.2f ms at %.2f TFLOP/s, reached %.0f%%\n",
                p.n, p.context, (long long)b->o.tokens, pass_ms, n * 1e3 / pass_ms, limit_ms,
                flops / 1e12, 100 * limit_ms / pass_ms);
out:
    runner_free(p.runner);
    free(p.prompt);
    free(p.blocks);
    return st;
}
