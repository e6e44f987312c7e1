/* train.c: the train benchmark: the learner's own passes (trainer/learn) over random sequences, in
 * one micro-batch. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tools/bench/bench.h"
#include "trainer/learn/learner.h"
#include <stdlib.h>

// A prompt of one token and a completion of `sequence` ones, which have as many rows and targets.
struct sequences {
    int32_t *ids; // (n, 1 + sequence)
    struct pack_completion *completions;
    struct pack_group *groups;
    int n;
};

static enum status sequences_new(const struct bench *b, struct sequences *s)
{
    const int length = (int)b->o.sequence + 1;
    struct rng r;
    s->n = (int)(b->o.tokens / b->o.sequence);
    s->ids = malloc((size_t)s->n * (size_t)length * sizeof *s->ids);
    s->completions = calloc((size_t)s->n, sizeof *s->completions);
    s->groups = calloc((size_t)s->n, sizeof *s->groups);
    if (!s->ids || !s->completions || !s->groups)
        return status_fail(ST_NO_MEMORY, "no memory for %d sequences", s->n);
    rng_init(&r, (uint64_t)b->o.seed, 5);
    for (int i = 0; i < s->n * length; i++)
        s->ids[i] = (int32_t)rng_below(&r, (uint32_t)b->config->vocab_size);
    for (int i = 0; i < s->n; i++) {
        const int32_t *ids = s->ids + (size_t)i * (size_t)length;
        s->completions[i] = (struct pack_completion){.ids = ids + 1, .n = length - 1};
        s->groups[i] = (struct pack_group){
            .prompt = ids, .n_prompt = 1, .completions = &s->completions[i], .n = 1};
    }
    return ST_OK;
}

static enum status open_learner(struct bench *b, struct learner **ret)
{
    const int tokens = (int)b->o.tokens;
    const struct learner_config config = {.optimizer = {.beta1 = 0.9,
                                                        .beta2 = 0.999,
                                                        .eps = 1e-8,
                                                        .max_grad_norm = 1,
                                                        .moments = (enum moments_kind)b->o.moments},
                                          .recompute = b->o.recompute,
                                          .temperature = 1,
                                          .token_budget = tokens,
                                          .max_seqs = 2 * (tokens / (int)b->o.sequence),
                                          .max_context = (int)b->o.sequence + 1};
    enum status st = learner_new(b->dev, b->config, b->weights, false, &config, ret);
    return st == ST_OK ? learner_prepare(*ret) : st;
}

struct passes {
    struct learner *learner;
    struct sequences sequences;
    int n_tokens;
};

// The mean of all targets' log-probabilities, downwards.
static void mean_loss(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    const struct passes *p = context;
    const struct micro_batch *mb = rows->mb;
    for (int i = 0; i < mb->first[mb->n_seqs]; i++) ret_dlogprobs[i] = -1.0f / (float)p->n_tokens;
}

static enum status pass(void *context)
{
    struct passes *p = context;
    return learner_run(p->learner, PASS_STEP, p->sequences.groups, p->sequences.n, mean_loss, p,
                       NULL);
}

enum status bench_train(struct bench *b)
{
    struct passes p = {0};
    bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    const struct model_config *c = b->config;
    double flops = 0, pass_ms;
    enum status st;
    if (b->o.tokens == 0) b->o.tokens = cuda ? 8192 : 512;
    if (b->o.sequence == 0) b->o.sequence = cuda ? 512 : 128;
    if (b->o.sequence > b->o.tokens) b->o.sequence = b->o.tokens;
    CHECK(limits_bandwidth(b));
    CHECK(limits_matmul(b, &flops));
    CHECK(open_learner(b, &p.learner));
    CHECK(sequences_new(b, &p.sequences));
    p.n_tokens = p.sequences.n * (int)b->o.sequence;
    CHECK(bench_time(b->o.warmup, b->o.steps, pass, &p, &pass_ms));
    // 6 operations a parameter and token, and the attention scores and sums of causal sequences
    double n = p.n_tokens, work = 6 * limits_row_parameters(b) * n +
                                  3 * n * (double)b->o.sequence * limits_attn_products(b);
    if (!c->tie_embeddings)
        work -= 6 * (double)c->vocab_size * c->hidden * n; // looked up, not multiplied
    double limit_ms = 1e3 * work / flops;
    bench_print(b, "train",
                json_pack("{s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "tokens", p.n_tokens,
                          "sequence", (json_int_t)b->o.sequence, "ms_per_pass", pass_ms,
                          "tokens_per_s", n * 1e3 / pass_ms, "tflops", work / pass_ms / 1e9,
                          "product_tflops", flops / 1e12, "limit_ms", limit_ms, "ratio_to_limit",
                          limit_ms / pass_ms),
                "train, %d tokens in sequences of %lld: %.1f ms forward and backward, %.0f "
                "tokens/s, %.2f TFLOP/s; limit %.1f ms at %.2f TFLOP/s, reached %.0f%%\n",
                p.n_tokens, (long long)b->o.sequence, pass_ms, n * 1e3 / pass_ms,
                work / pass_ms / 1e9, limit_ms, flops / 1e12, 100 * limit_ms / pass_ms);
out:
    free(p.sequences.ids);
    free(p.sequences.completions);
    free(p.sequences.groups);
    learner_free(p.learner);
    return st;
}
