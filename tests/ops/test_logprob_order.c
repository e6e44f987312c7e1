/* test_logprob_order.c: the log-probability that the sampler gives a token has the bits of the one
 * that training computes for it (logprob), and of the one in a list of the likeliest
 * (top_logprobs), at any temperature and size of vocabulary, filtered or not. On each device. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

enum { ROWS = 40 };

// Some logits far above the others, some -inf.
static float *take_logits(int vocab)
{
    const size_t n = (size_t)ROWS * (size_t)vocab;
    struct rng rng;
    rng_init(&rng, (uint64_t)vocab, 1);
    float *host = op_host(n * sizeof *host);
    for (size_t i = 0; i < n; i++) {
        const uint32_t kind = rng_below(&rng, 100);
        host[i] = kind == 0 ? -INFINITY : rng_normal(&rng) * (kind == 1 ? 6 : 2);
    }
    return to_device(host, n * sizeof *host);
}

static void check(int vocab, float temperature, float top_p)
{
    const size_t mark = op_mark();
    struct sample_params host_params[ROWS], *params = to_device(NULL, sizeof host_params);
    struct sample_result host_results[ROWS], *results = to_device(NULL, sizeof host_results);
    struct token_logprob host_top[ROWS], *top = to_device(NULL, sizeof host_top);
    float host_logprobs[ROWS], *logprobs = to_device(NULL, sizeof host_logprobs);
    float *lse = to_device(NULL, sizeof host_logprobs),
          *entropy = to_device(NULL, sizeof host_logprobs);
    int32_t host_tokens[ROWS], *tokens = to_device(NULL, sizeof host_tokens);
    float *logits = take_logits(vocab);
    for (int i = 0; i < ROWS; i++)
        host_params[i] = (struct sample_params){
            .temperature = temperature, .top_p = top_p, .seed = (uint64_t)i, .position = 9};
    device_copy_in(dev, params, host_params, sizeof host_params);
    ops->sample(
        dev, results,
        &(struct sample_args){.logits = logits, .params = params, .n = ROWS, .vocab = vocab});
    device_copy_out(dev, host_results, results, sizeof host_results);
    assert_ok(device_sync(dev));
    for (int i = 0; i < ROWS; i++) host_tokens[i] = host_results[i].token;
    device_copy_in(dev, tokens, host_tokens, sizeof host_tokens);
    const struct head_args head = {logits, tokens, ROWS, vocab, temperature};
    ops->logprob(dev, logprobs, lse, entropy, &head);
    ops->top_logprobs(dev, top, 0, &head);
    device_copy_out(dev, host_logprobs, logprobs, sizeof host_logprobs);
    device_copy_out(dev, host_top, top, sizeof host_top);
    assert_ok(device_sync(dev));
    for (int i = 0; i < ROWS; i++) {
        const float want = host_results[i].logprob;
        assert_true(want < 0 && isfinite(want));
        if (memcmp(&want, &host_logprobs[i], sizeof want) != 0 ||
            memcmp(&want, &host_top[i].logprob, sizeof want) != 0)
            fail_msg("%s, vocabulary %d, temperature %g, row %d: %.9g sampled, %.9g trained, %.9g "
                     "listed",
                     device_spec(dev), vocab, (double)temperature, i, (double)want,
                     (double)host_logprobs[i], (double)host_top[i].logprob);
    }
    op_release(mark);
}

ON_EACH_DEVICE(sampled_is_trained)
{
    static const int vocabs[] = {37, 4096, 5003, 151936};
    static const float temperatures[] = {1, 0.7f, 1.3f};
    for (int v = 0; v < 4; v++)
        for (int t = 0; t < 3; t++) {
            check(vocabs[v], temperatures[t], 1);
            check(vocabs[v], temperatures[t], 0.9f);
        }
}

OP_BODIES
