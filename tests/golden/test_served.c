/* test_served.c: every model of tests/golden, served: prompts in chunks that share a beginning, a
 * pool too small for all requests at once, drafts, of which some are accepted in each. The
 * log-probability of each sampled token is that of the packed pass over the finished text, to the
 * bit: the trainer's. On a GPU (COMMONWEIGHT_TEST_DEVICE) in bf16. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/kv_memory.h"
#include "tests/support/engine_bench.h"

enum { REQUESTS = 7, PROMPT = 21, SHARED = 13, NEW = 18, BLOCKS = 24, BLOCK_TOKENS = 4 };

static struct engine_stats all; // counters of all folders

// Prompts that begin alike and repeat themselves, so that there is something to draft.
static void fill_prompt(int32_t *prompt, int request, int vocab)
{
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (i % 5 * 31 + 7 + (i >= SHARED ? request * 17 : 0)) % vocab;
}

static struct take *submit_one(struct bench *b, const int32_t *prompt, int request)
{
    struct sampling s = request % 2 ? random_sampling(NEW, (uint64_t)request) : greedy(NEW);
    s.logprobs = 0;
    return submit_ids(b, prompt, PROMPT, &s);
}

static void serve(const char *model, enum quantization quantization, enum kv_cache kv_cache)
{
    struct bench b;
    SCOPED(reference_close) struct reference r;
    int32_t prompts[REQUESTS][PROMPT];
    struct take *takes[REQUESTS];
    struct engine_options options = plain_options();
    reference_open_as(model, test_device(), quantization, &r);
    const int64_t state_bytes = kv_memory_state_bytes(r.config);
    options.model_folder = model;
    options.device = test_device();
    options.quantization = quantization;
    options.kv_cache = r.config->kv_cache = kv_cache;
    options.exact = true;
    options.block_size = BLOCK_TOKENS;
    options.max_context = BLOCKS * BLOCK_TOKENS; // long, as the reference, by longrope
    options.prefill_chunk = 5;
    options.speculative_fixed = 1;
    options.speculative = (struct speculative_choice){
        .chosen = true, .k[SPECULATIVE_NGRAM] = 3, .k[SPECULATIVE_SUFFIX] = 3};
    options.kv_bytes =
        BLOCKS * kv_memory_block_bytes(r.config, r.weights->dt, BLOCK_TOKENS) + 16 * state_bytes;
    bench_start(&b, &options);
    for (int i = 0; i < REQUESTS - 1; i++) {
        fill_prompt(prompts[i], i, r.config->vocab_size);
        takes[i] = submit_one(&b, prompts[i], i);
    }
    for (int i = 0; i < REQUESTS - 1; i++) await_done(&b, takes[i]);
    // Once more, so that what it writes is known.
    fill_prompt(prompts[REQUESTS - 1], 0, r.config->vocab_size);
    takes[REQUESTS - 1] = submit_one(&b, prompts[REQUESTS - 1], 0);
    await_done(&b, takes[REQUESTS - 1]);
    const struct engine_stats stats = idle_stats(&b);
    all.preemptions += stats.preemptions;
    all.cache_hits += stats.cache_hits;
    assert_true(stats.drafts.num_accepted_tokens > 0);
    assert_true(stats.drafts.num_draft_tokens > stats.drafts.num_accepted_tokens);
    bench_end(&b);
    for (int i = 0; i < REQUESTS; i++) {
        assert_int_equal(takes[i]->sample[0].n, NEW);
        assert_as_packed(&r, prompts[i], PROMPT, takes[i], 0);
    }
}

static void one_model(void **state)
{
    reference_skip_inexact(*state);
    serve(*state, QUANTIZATION_NONE, KV_CACHE_AUTO);
}

static void in_e4m3(void **state)
{
    reference_skip_inexact(*state);
    serve(*state, QUANTIZATION_FP8_WEIGHTS, KV_CACHE_AUTO);
}

static void with_kv_in_e4m3(void **state)
{
    reference_skip_inexact(*state);
    serve(*state, QUANTIZATION_NONE, KV_CACHE_FP8);
}

static void both_in_e4m3(void **state)
{
    reference_skip_inexact(*state);
    serve(*state, QUANTIZATION_FP8_WEIGHTS, KV_CACHE_FP8);
}

static void rounded(void **state)
{
    reference_skip_inexact(*state);
    serve(*state, QUANTIZATION_FP8, KV_CACHE_AUTO);
}

TEST(all_was_seen)
{
    reference_skip_inexact(NULL);
    assert_true(all.preemptions > 0 && all.cache_hits > 0);
}

TESTS_BETWEEN(engine_bench_set_up, NULL)

int main(int argc, char **argv)
{
    test_only(argc, argv);
    reference_list_golden(one_model, "");
    reference_list_golden(rounded, " in e4m3, rows too");
    // as in test_trained_exact.c
    if (!on_cpu()) reference_list_golden(in_e4m3, " in e4m3");
    if (!on_cpu()) reference_list_golden(with_kv_in_e4m3, " with keys and values in e4m3");
    reference_list_golden(both_in_e4m3, " all in e4m3");
    return test_main();
}
