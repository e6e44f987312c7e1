/* train.c: the train benchmark. */
#include "tools/bench/bench.h"
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/model/model.h"
#include "trainer/learn/backward.h"
#include "trainer/learn/optimizer.h"
#include <stdlib.h>

struct learner_bench {
    struct model *model;
    struct batch *batch;
    struct tape *tape;
    struct optimizer *optimizer;
    struct backward *backward;
    int32_t *targets;
    float *logprobs, *dlogprobs;
    int n;
};

static enum status learner_open(struct bench *b, struct learner_bench *l)
{
    struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0.0, 1.0, MOMENTS_F32};
    int tokens = (int)b->o.tokens, sequence = (int)b->o.sequence,
        logits_chunk = tokens < 1024 ? tokens : 1024;
    int32_t *ids = malloc((size_t)sequence * sizeof *ids);
    struct rng r;
    enum status st;
    if (!ids) return status_fail(ST_NO_MEMORY, "no memory for a sequence of %d tokens", sequence);
    rng_init(&r, (uint64_t)b->o.seed, 5);
    CHECK(model_new(b->dev, b->config, b->weights, tokens, logits_chunk, sequence + 1, &l->model));
    CHECK(batch_new(b->dev, tokens, tokens / sequence + 1, 0, tokens, &l->batch));
    CHECK(tape_new(l->model, tokens, RECOMPUTE_NONE, &l->tape));
    CHECK(optimizer_new_whole(b->dev, b->weights, &adamw, &l->optimizer));
    CHECK(backward_new(l->model, optimizer_grads(l->optimizer, 0), tokens, tokens, &l->backward));
    l->targets = calloc((size_t)tokens, sizeof *l->targets);
    l->logprobs = calloc((size_t)tokens, sizeof *l->logprobs);
    l->dlogprobs = calloc((size_t)tokens, sizeof *l->dlogprobs);
    if (!l->targets || !l->logprobs || !l->dlogprobs) {
        st = status_fail(ST_NO_MEMORY, "no memory for %d targets", tokens);
        goto out;
    }
    batch_clear(l->batch);
    for (int at = 0; at + sequence <= tokens; at += sequence) {
        for (int i = 0; i < sequence; i++)
            ids[i] = (int32_t)rng_below(&r, (uint32_t)b->config->vocab_size);
        CHECK(batch_add_packed(l->batch, ids, sequence, -1, NULL));
        for (int i = 0; i < sequence; i++) {
            CHECK(batch_want_row(l->batch, at + i));
            l->targets[l->n] = ids[(i + 1) % sequence];
            l->dlogprobs[l->n++] = -1.0f / (float)tokens;
        }
    }
    st = batch_commit(l->batch, 0);
out:
    free(ids);
    return st;
}

static void learner_close(struct bench *b, struct learner_bench *l)
{
    free(l->targets);
    free(l->logprobs);
    free(l->dlogprobs);
    backward_free(l->backward);
    optimizer_free(l->optimizer);
    tape_free(b->dev, l->tape);
    batch_free(l->batch);
    model_free(l->model);
}

static enum status learner_pass(struct learner_bench *l)
{
    void *x;
    enum status st;
    model_forward(l->model, batch_view(l->batch), NULL, l->tape, &x);
    CHECK(backward_logprobs(l->backward, l->batch, x, l->targets, 1.0f, l->logprobs, NULL));
    st = backward_run(l->backward, l->batch, l->tape, l->dlogprobs, 1.0f);
out:
    return st;
}

enum status bench_train(struct bench *b)
{
    struct learner_bench l = {0};
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
    CHECK(limits_products(b, &flops));
    CHECK(learner_open(b, &l));
    for (int i = -(int)b->o.warmup; i < steps; i++) {
        optimizer_clear_grads(l.optimizer);
        int64_t start = clock_now_ns();
        CHECK(learner_pass(&l));
        if (i >= 0) ms[i] = clock_ms_since(start);
    }
    double pass_ms = median(ms, steps), n = l.n;
    // 6 operations a parameter and token, and the attention scores and sums of causal sequences
    double work = 6 * (double)b->weights->n_parameters * n +
                  6.0 * c->n_layers * n * (double)b->o.sequence * layer_q_width(c->layers);
    if (!c->tie_embeddings)
        work -= 6 * (double)c->vocab_size * c->hidden * n; // looked up, not multiplied
    double floor_ms = 1e3 * work / flops;
    json_t *report = bench_report(b, "train");
    json_object_set_new(report, "tokens", json_integer(l.n));
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
                l.n, (long long)b->o.sequence, pass_ms, n * 1e3 / pass_ms, work / pass_ms / 1e9,
                floor_ms, flops / 1e12, 100 * floor_ms / pass_ms);
out:
    learner_close(b, &l);
    free(ms);
    return st;
}
