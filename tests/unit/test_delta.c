/* test_delta.c: a model with linear attention (tests/golden/qwen35) served and trained: its states
 * give the bits of the packed pass whatever the batches, and what does not go with states is
 * refused. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "infer-server/engine/kv_memory.h"
#include "tests/support/engine_bench.h"
#include "tests/support/loaded.h"

enum { LONGEST = 160, LONGER = 330, REQUESTS = 8, NEW = 24 };

static const char *model;

static void set_up(void)
{
    model = lasting_model(test_golden("qwen35"));
    engine_bench_set_up();
}

static int random_ids(int32_t *ids, int n, uint64_t seed, int vocab)
{
    struct rng r;
    rng_init(&r, seed, 0);
    for (int i = 0; i < n; i++) ids[i] = (int32_t)rng_below(&r, (uint32_t)vocab);
    return n;
}

// ---- serving ------------------------------------------------------------------------------------
// Prompts in chunks of 7, alone and in groups, with room for all, and with so little that samples
// are preempted and computed again.
static void serve(int64_t kv_bytes, bool preempts)
{
    struct bench b;
    struct engine_options options = plain_options();
    struct take *takes[REQUESTS];
    int32_t prompts[REQUESTS][LONGEST];
    int lengths[REQUESTS];
    const int longer = preempts ? LONGER : 0; // two do not find room for their blocks
    const char *served = preempts ? longer_model(model) : model;
    options.model_folder = served;
    options.prefill_chunk = 7;
    options.kv_bytes = kv_bytes;
    options.max_context = longer + LONGEST;
    bench_start(&b, &options);
    for (int i = 0; i < REQUESTS; i++) {
        struct sampling s = random_sampling(NEW + longer, (uint64_t)i + 1);
        s.n = i % 3 + 1;
        lengths[i] = random_ids(prompts[i], 3 + 17 * i % 90, (uint64_t)i, 190);
        takes[i] = submit_ids(&b, prompts[i], lengths[i], &s);
    }
    for (int i = 0; i < REQUESTS; i++) await_done(&b, takes[i]);
    const struct engine_stats stats = idle_stats(&b);
    assert_true((stats.preemptions > 0) == preempts);
    assert_int_equal(stats.cache_hits, 0);
    assert_int_equal(stats.kv_blocks_used, 0);
    bench_end(&b);
    struct reference *r = reference_of(served);
    for (int i = 0; i < REQUESTS; i++) {
        for (int k = 0; k < i % 3 + 1; k++) {
            assert_int_equal(takes[i]->sample[k].n, NEW + longer);
            assert_as_packed(r, prompts[i], lengths[i], takes[i], k);
        }
        const struct sample_telemetry *t = &takes[i]->sample[0].telemetry;
        assert_true(t->kv_bytes_peak > kv_memory_state_bytes(r->config));
    }
}

TEST(served_as_packed)
{
    serve(8 << 20, false);
}

TEST(served_as_packed_when_preempted)
{
    serve(330000, true);
}

// With room for the states of few sequences as many run at once, and all are served.
TEST(states_bound_the_batch)
{
    struct bench b;
    struct engine_options options = plain_options();
    struct sampling s = random_sampling(NEW, 3);
    int32_t prompt[16];
    struct model_config *config = config_of(model);
    options.model_folder = model;
    options.max_context = 64;
    options.kv_bytes = 6 * kv_memory_state_bytes(config) + 1;
    bench_start(&b, &options);
    b.slow_ms = 1;
    s.n = 6;
    struct take *take = submit_ids(&b, prompt, random_ids(prompt, 16, 1, 190), &s);
    await_tokens(&b, take, 0, 2);
    const struct engine_stats stats = stats_of(&b);
    assert_int_equal(stats.running, 3); // half of the memory
    b.slow_ms = 0;
    await_done(&b, take);
    for (int i = 0; i < 6; i++) assert_int_equal(take->sample[i].n, NEW);
    bench_end(&b);
    const struct kv_request request = {.bytes = kv_memory_state_bytes(config),
                                       .block_size = 4,
                                       .max_batch = 1,
                                       .max_context = 64,
                                       .block_bytes = 4,
                                       .state_bytes = kv_memory_state_bytes(config)};
    struct kv_plan plan;
    struct device *dev = test_cpu();
    assert_int_equal(kv_memory_plan(dev, &request, &plan), ST_INVALID);
    assert_contains(status_message(), "carries along a sequence; give --kv-memory 163200 or more");
}

// ---- what does not go with states ---------------------------------------------------------------
TEST(drafts_without_memory_are_refused)
{
    struct engine_options options = plain_options();
    struct sampling s = greedy(4);
    struct request *r;
    const int32_t prompt[3] = {1, 2, 3};
    options.model_folder = model;
    struct bench *b = bench_of(&options);
    s.speculative.chosen = true;
    s.speculative.k[SPECULATIVE_NGRAM] = 4;
    assert_ok(request_new(prompt, 3, &s, NULL, &r));
    assert_int_equal(engine_submit(b->engine, r), ST_UNSUPPORTED);
    assert_contains(status_message(), "no memory for those of drafts; start it with --speculative");
    request_free(r);
}

// ---- training -----------------------------------------------------------------------------------
// Sequences behind a prefix that is packed once have the bits that they have with a prefix of their
// own.
TEST(prefixes_are_shared_to_the_bit)
{
    enum { PROMPT = 37, EACH = 11, GROUP = 3 };
    int32_t ids[PROMPT + GROUP * EACH];
    void *x;
    struct reference *r = reference_of(model);
    const size_t hidden = (size_t)r->config->hidden * sizeof(float);
    char *together = test_keep(malloc((PROMPT + GROUP * EACH) * hidden));
    random_ids(ids, PROMPT + GROUP * EACH, 5, 190);
    batch_clear(r->batch);
    assert_ok(batch_add_packed(r->batch, ids, PROMPT, -1, -1, NULL));
    for (int i = 0; i < GROUP; i++)
        assert_ok(batch_add_packed(r->batch, ids + PROMPT + i * EACH, EACH, 0, -1, NULL));
    assert_ok(batch_commit(r->batch, 0, 0));
    model_forward(r->model, batch_view(r->batch), NULL, NULL, &x);
    memcpy(together, x, (PROMPT + GROUP * EACH) * hidden);
    for (int i = 0; i < GROUP; i++) {
        const size_t own = (PROMPT + (size_t)i * EACH) * hidden;
        int32_t alone[PROMPT + EACH];
        memcpy(alone, ids, PROMPT * sizeof *ids);
        memcpy(alone + PROMPT, ids + PROMPT + i * EACH, EACH * sizeof *ids);
        batch_clear(r->batch);
        assert_ok(batch_add_packed(r->batch, alone, PROMPT + EACH, -1, -1, NULL));
        assert_ok(batch_commit(r->batch, 0, 0));
        model_forward(r->model, batch_view(r->batch), NULL, NULL, &x);
        assert_memory_equal((char *)x + PROMPT * hidden, together + own, EACH * hidden);
    }
}

// The scratch of a training step, of a layer that has no heads of attention.
TEST(scratch_is_planned)
{
    struct reference *r = reference_of(model);
    const struct scratch_shape shape = {.attn = r->model->attn[0],
                                        .delta = model_delta_shape(r->model, 0),
                                        .rows = 64,
                                        .max_context = 64,
                                        .hidden = r->config->hidden,
                                        .widest = r->config->hidden,
                                        .logits_chunk = 8,
                                        .vocab = r->config->vocab_size,
                                        .n_elements = 1,
                                        .dt = DT_F32};
    const size_t matrix = (size_t)(shape.delta.key_dim * shape.delta.head_dim) * sizeof(float);
    assert_int_equal(shape.attn.n_heads, 0);
    assert_true(device_ops(r->dev)->scratch_bytes(r->dev, &shape) > 32 * matrix);
}

TESTS_BETWEEN(set_up, NULL)
