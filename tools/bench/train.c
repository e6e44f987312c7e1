/* train.c: the train benchmark: the learner's own passes (trainer/learn) over random sequences, in
 * one micro-batch. */
#include "common/base/clock.h"
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
        s->completions[i] = (struct pack_completion){ids + 1, length - 1};
        s->groups[i] = (struct pack_group){ids, 1, &s->completions[i], 1};
    }
    return ST_OK;
}

static void sequences_release(struct sequences *s)
{
    free(s->ids);
    free(s->completions);
    free(s->groups);
}

static enum status open_learner(struct bench *b, struct learner **ret)
{
    const int tokens = (int)b->o.tokens;
    const struct learner_config config = {
        .optimizer = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .max_grad_norm = 1},
        .temperature = 1,
        .token_budget = tokens,
        .logits_chunk = tokens < 1024 ? tokens : 1024,
        .max_seqs = 2 * (tokens / (int)b->o.sequence),
        .max_context = (int)b->o.sequence + 1};
    enum status st = learner_new(b->dev, b->config, b->weights, false, &config, ret);
    return st == ST_OK ? learner_prepare(*ret) : st;
}

// The mean of all targets' log-probabilities, downwards.
static void mean_loss(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    const int *n_tokens = context;
    const struct micro_batch *mb = rows->mb;
    for (int i = 0; i < mb->first[mb->n_seqs]; i++) ret_dlogprobs[i] = -1.0f / (float)*n_tokens;
}

enum status bench_train(struct bench *b)
{
    struct learner *l = NULL;
    struct sequences s = {0};
    int steps = (int)b->o.steps;
    bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    const struct model_config *c = b->config;
    double *ms = calloc((size_t)steps, sizeof *ms), flops = 0;
    enum status st;
    if (!ms) return status_fail(ST_NO_MEMORY, "no memory for %d times", steps);
    if (b->o.tokens == 0) b->o.tokens = cuda ? 8192 : 512;
    if (b->o.sequence == 0) b->o.sequence = cuda ? 512 : 128;
    if (b->o.sequence > b->o.tokens) b->o.sequence = b->o.tokens;
    CHECK(limits_bandwidth(b));
    CHECK(limits_matmul(b, &flops));
    CHECK(open_learner(b, &l));
    CHECK(sequences_new(b, &s));
    int n_tokens = s.n * (int)b->o.sequence;
    for (int i = -(int)b->o.warmup; i < steps; i++) {
        int64_t start = clock_now_ns();
        CHECK(learner_gradients(l, s.groups, s.n, mean_loss, &n_tokens));
        if (i >= 0) ms[i] = clock_ms_since(start);
    }
    double pass_ms = median(ms, steps), n = n_tokens;
    // 6 operations a parameter and token, and the attention scores and sums of causal sequences
    double work = 6 * (double)b->weights->n_parameters * n +
                  6.0 * c->n_layers * n * (double)b->o.sequence * layer_q_width(c->layers);
    if (!c->tie_embeddings)
        work -= 6 * (double)c->vocab_size * c->hidden * n; // looked up, not multiplied
    double floor_ms = 1e3 * work / flops;
    json_t *report = bench_report(b, "train");
    json_object_set_new(report, "tokens", json_integer(n_tokens));
    json_object_set_new(report, "sequence", json_integer(b->o.sequence));
    json_object_set_new(report, "ms_per_pass", json_real(pass_ms));
    json_object_set_new(report, "tokens_per_s", json_real(n * 1e3 / pass_ms));
    json_object_set_new(report, "tflops", json_real(work / pass_ms / 1e9));
    json_object_set_new(report, "product_tflops", json_real(flops / 1e12));
    json_object_set_new(report, "limit_ms", json_real(floor_ms));
    json_object_set_new(report, "ratio_to_limit", json_real(floor_ms / pass_ms));
    bench_print(b, report,
                "train, %d tokens in sequences of %lld: %.1f ms forward and backward, %.0f "
                "tokens/s, %.2f TFLOP/s; "
                "limit %.1f ms at %.2f TFLOP/s, reached %.0f%%\n",
                n_tokens, (long long)b->o.sequence, pass_ms, n * 1e3 / pass_ms,
                work / pass_ms / 1e9, floor_ms, flops / 1e12, 100 * floor_ms / pass_ms);
out:
    sequences_release(&s);
    learner_free(l);
    free(ms);
    return st;
}
