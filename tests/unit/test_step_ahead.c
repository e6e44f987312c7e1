/* test_step_ahead.c: an engine that launches each step before the one before it is collected gives
 * every request what it gives without, to the bit: random requests of every kind, with few blocks,
 * in groups, stopped, cancelled, and over updates. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "common/model/config.h"
#include "infer-server/engine/engine_thread.h"
#include "infer-server/engine/masks_ahead.h"
#include "kernels/backend.h"
#include "tests/support/engine_bench.h"
#include "tests/support/loaded.h"
#include "tests/support/tiny_latent.h"
#include "tests/support/tiny_tokenizer.h"

#define REQUESTS 40
#define END      300 // of a text under a constraint

static struct tokenizer *tokenizer;
static struct constraints *constraints;
static struct constraint *some[2];

static void set_up(void)
{
    static const int ends[] = {END};
    const char *bytes = test_folder();
    json_t *specs[] = {test_keep(json_pack("{s:b}", "json_object", 1)),
                       test_keep(json_pack("{s:s}", "regex", "([a-z]{2,9}[0-9 ]+)*!"))};
    engine_bench_set_up();
    assert_ok(tiny_tokenizer_write_bytes(bytes));
    assert_ok(tokenizer_load(bytes, &tokenizer));
    assert_ok(constraints_new(tokenizer, VOCAB, ends, 1, &constraints));
    for (int i = 0; i < 2; i++) assert_ok(constraints_get(constraints, specs[i], &some[i]));
}

static void tear_down(void)
{
    for (int i = 0; i < 2; i++) constraint_release(some[i]);
    constraints_free(constraints);
    tokenizer_free(tokenizer);
}

// On the tests' device, where rows are computed alone: on the CPU, and in bf16 on a Hopper GPU.
static struct engine_options options_here(void)
{
    struct engine_options options = plain_options();
    options.device = test_device();
    return options;
}

// What the i-th request asks for; `plain`: nothing that a step has to wait for.
static struct sampling asked(int i, bool plain)
{
    struct rng r;
    rng_init(&r, 7, (uint64_t)i);
    struct sampling s = random_sampling(1 + (int)rng_below(&r, 40), (uint64_t)i);
    s.n = rng_below(&r, 3) ? 1 : 1 + (int)rng_below(&r, 4);
    if (rng_below(&r, 4) == 0) s.temperature = 0;
    if (rng_below(&r, 3) == 0) s.top_p = 0.8f;
    s.n_stop_ids = 12; // one ends a random sample soon
    for (int k = 0; k < s.n_stop_ids; k++) s.stop_ids[k] = (int32_t)rng_below(&r, VOCAB);
    if (rng_below(&r, 3) == 0) s.min_tokens = s.max_tokens / 2;
    if (rng_below(&r, 9) == 0) s.max_tokens = 0;
    if (plain) return s;
    if (rng_below(&r, 2) == 0) { // its stops are few
        s.constraint = some[rng_below(&r, 2)];
        s.n_stop_ids = 1;
        s.stop_ids[0] = END;
    }
    if (rng_below(&r, 6) == 0) s.logprobs = 3;
    if (rng_below(&r, 6) == 0) s.repetition_penalty = 1.3f;
    if (rng_below(&r, 6) == 0) s.prompt_logprobs = true;
    if (rng_below(&r, 6) == 0) {
        s.speculative.chosen = true;
        s.speculative.k[SPECULATIVE_NGRAM] = 4;
    }
    return s;
}

static void serve(const struct engine_options *options, bool plain, struct take **ret,
                  struct engine_stats *ret_stats)
{
    struct bench b;
    bench_start(&b, options);
    assert_ok(engine_pause(b.engine, WAIT_MS)); // all begin at once
    for (int i = 0; i < REQUESTS; i++) {
        const struct sampling s = asked(i, plain);
        ret[i] = submit(&b, 1 + i * 7 % 60, (uint64_t)(i % 5), &s);
    }
    assert_ok(engine_resume(b.engine));
    for (int i = 0; i < REQUESTS; i++) await_done(&b, ret[i]);
    *ret_stats = idle_stats(&b);
    bench_end(&b);
}

static void assert_same_takes(const struct take *a, const struct take *b, int n)
{
    for (int k = 0; k < n; k++) {
        assert_same_records(a, k, b, k);
        assert_int_equal(a->sample[k].finish, b->sample[k].finish);
        if (a->sample[k].n > 0)
            assert_memory_equal(a->sample[k].top[0], b->sample[k].top[0],
                                sizeof a->sample[k].top[0]);
    }
}

static void compare(struct engine_options options, bool plain, int64_t kv_bytes, bool preempts)
{
    struct take *without[REQUESTS], *ahead[REQUESTS];
    struct engine_stats stats;
    options.max_queue = 200;
    options.max_batch = 12;
    options.kv_bytes = kv_bytes;
    options.step_ahead = STEP_AHEAD_OFF;
    serve(&options, plain, without, &stats);
    assert_int_equal(stats.steps_ahead, 0);
    options.step_ahead = STEP_AHEAD_ON;
    serve(&options, plain, ahead, &stats);
    assert_true(stats.steps_ahead > 0);
    if (plain) assert_true(stats.steps_ahead > stats.steps / 2);
    assert_true(!preempts || stats.preemptions > 0);
    assert_int_equal(stats.kv_blocks_used, 0);
    for (int i = 0; i < REQUESTS; i++) {
        const struct sampling s = asked(i, plain);
        assert_same_takes(without[i], ahead[i], s.n);
    }
}

TEST(plain_requests)
{
    compare(options_here(), true, 8 << 20, false);
}

TEST(every_kind_of_request)
{
    compare(options_here(), false, 8 << 20, false);
}

// Samples are preempted while one of their tokens is on its way.
TEST(few_blocks)
{
    struct engine_options options = options_here();
    const int64_t kv_bytes = strcmp(options.device, "cpu") == 0 ? 64 << 10 : 32 << 10;
    options.max_context = 128;
    compare(options, true, kv_bytes, true);
    options.prefix_cache_off = 1;
    compare(options, false, kv_bytes, true);
}

// What a sample leaves in the prefix cache is what it leaves without, to its last whole block.
TEST(leaves_its_blocks)
{
    for (int max_tokens = 30; max_tokens < 38; max_tokens++) {
        int cached[2];
        for (int ahead = 0; ahead < 2; ahead++) {
            struct engine_options options = options_here();
            int32_t turns[20 + 40];
            options.step_ahead = ahead ? STEP_AHEAD_ON : STEP_AHEAD_OFF;
            struct bench *b = bench_of(&options);
            make_prompt(turns, 20, 3);
            struct take *first = greedy_of(b, turns, 20, max_tokens);
            for (int i = 0; i < max_tokens; i++) turns[20 + i] = first->sample[0].tokens[i].token;
            turns[20 + max_tokens] = 1;
            struct take *second = greedy_of(b, turns, 21 + max_tokens, 5);
            cached[ahead] = second->sample[0].telemetry.cached_prompt_tokens;
        }
        assert_true(cached[0] > 40);
        assert_int_equal(cached[0], cached[1]);
    }
}

static void serve_golden(const char *model)
{
    struct engine_options options = options_here();
    options.model_folder = model;
    options.max_context = 100;
    options.prefill_chunk = 16;
    struct take *take[2];
    struct model_config *config = config_of(model);
    const bool alone = config->hidden % 16 == 0 || strcmp(options.device, "cpu") == 0;
    if (!alone) return; // a GPU's bits may depend on the rows beside (docs/use/limits.md)
    for (int ahead = 0; ahead < 2; ahead++) {
        struct bench b;
        struct sampling s = random_sampling(20, 5);
        options.step_ahead = ahead ? STEP_AHEAD_ON : STEP_AHEAD_OFF;
        s.n = 3;
        bench_start(&b, &options);
        int32_t prompt[40];
        struct rng r;
        rng_init(&r, 3, 0);
        for (int i = 0; i < 40; i++) prompt[i] = (int32_t)rng_below(&r, 64);
        struct take *beside = submit_ids(&b, prompt + 1, 30, &s);
        take[ahead] = submit_ids(&b, prompt, 40, &s);
        await_done(&b, beside);
        await_done(&b, take[ahead]);
        assert_true((idle_stats(&b).steps_ahead > 0) == ahead);
        bench_end(&b);
    }
    assert_same_takes(take[0], take[1], 3);
}

TEST(every_golden_model)
{
    for_each_golden(serve_golden);
}

// Drafts of a layer that foretells nothing are declined: steps go ahead then, and greedy tokens are
// those of steps that do not. A layer that always drafts never lets them.
TEST(drafts_that_are_declined)
{
    enum { TOKENS = 200, PLAIN, WAITS, AHEAD, FIXED, WAYS };
    struct take *takes[WAYS];
    for (int way = PLAIN; way < WAYS; way++) {
        struct engine_options options = options_here();
        struct bench b;
        const struct sampling s = greedy(TOKENS);
        options.model_folder = tiny_mtp_folder(VOCAB);
        options.max_context = 256;
        options.step_ahead = way == WAITS ? STEP_AHEAD_OFF : STEP_AHEAD_ON;
        options.speculative_fixed = way == FIXED;
        assert_ok(speculative_parse(way == PLAIN ? "off" : "mtp:3", &options.speculative));
        bench_start(&b, &options);
        takes[way] = submit(&b, 20, 3, &s);
        await_done(&b, takes[way]);
        const struct engine_stats stats = idle_stats(&b);
        printf("%lld of %lld steps ahead, %lld drafts\n", (long long)stats.steps_ahead,
               (long long)stats.steps, (long long)stats.drafts.num_drafts);
        if (way != FIXED) assert_true((stats.steps_ahead > TOKENS / 4) == (way != WAITS));
        if (way == FIXED) assert_true(stats.drafts.num_drafts > TOKENS / 4);
        bench_end(&b);
        assert_same_takes(takes[PLAIN], takes[way], 1);
    }
}

// A command waits for nothing that is on its way: tokens carry the version that sampled them, and
// what was computed under the old one is computed anew.
TEST(weights_change)
{
    struct engine_options options = options_here();
    options.step_ahead = STEP_AHEAD_ON;
    options.kv_policy = KV_RECOMPUTE;
    struct bench *b = bench_of(&options);
    struct sampling s = greedy(200);
    b->slow_ms = 1;
    struct take *take = submit(b, 20, 3, &s);
    await_tokens(b, take, 0, 30);
    assert_ok(engine_reload(b->engine, model_b, NULL, on_command, b));
    await_command(b);
    await_done(b, take);
    int at = 0; // of the first token of the other weights
    while (at < 200 && take->sample[0].tokens[at].weight_version == 2) at++;
    assert_true(at >= 30 && at < 200);
    for (int i = 1; i < 200; i++)
        assert_true(take->sample[0].tokens[i].weight_version >=
                    take->sample[0].tokens[i - 1].weight_version);
    assert_int_equal(take->sample[0].tokens[at].weight_version, b->version);

    int32_t whole[20 + 200]; // what the other weights say behind it
    make_prompt(whole, 20, 3);
    for (int i = 0; i < at; i++) whole[20 + i] = take->sample[0].tokens[i].token;
    b->slow_ms = 0;
    struct take *behind = greedy_of(b, whole, 20 + at, 200 - at);
    for (int i = at; i < 200; i++)
        assert_int_equal(take->sample[0].tokens[i].token, behind->sample[0].tokens[i - at].token);
}

TEST(pauses_and_cancels)
{
    struct engine_options options = options_here();
    options.step_ahead = STEP_AHEAD_ON;
    struct bench *b = bench_of(&options);
    struct sampling s = greedy(300);
    s.n = 4;
    b->slow_ms = 1;
    struct take *take = submit(b, 20, 3, &s), *other = submit(b, 30, 4, &s);
    await_tokens(b, take, 2, 5);
    assert_ok(engine_pause(b->engine, WAIT_MS));
    const int n = tokens_of(b, take, 0);
    clock_sleep_ms(50);
    assert_int_equal(tokens_of(b, take, 0), n); // all that was on its way had come
    assert_ok(engine_resume(b->engine));
    engine_cancel(b->engine, take->request, 1);
    await_tokens(b, take, 2, n + 5);
    engine_cancel(b->engine, take->request, -1);
    await_done(b, take);
    assert_int_equal(take->sample[1].finish, FINISH_CANCELLED);
    engine_cancel(b->engine, other->request, -1);
    await_done(b, other);
    assert_int_equal(idle_stats(b).kv_blocks_used, 0);
}

// Two steps' masks, as the engine has them: the results of a step lie where those of the step
// before the last one lay, so a job's tokens are taken before the next one begins.
TEST(masks_of_two_steps)
{
    enum { STEPS = 300 };
    struct sample_result results[2] = {{.token = 'a'}};
    const size_t size = (size_t)constraint_words(some[1]) * sizeof(uint32_t);
    uint32_t *masks[2], *want = test_keep(malloc(size));
    struct masks_job *before = NULL;
    struct masks_ahead *m;
    int behind;
    assert_ok(constraint_next(some[1], CONSTRAINT_START, 'a', &behind));
    assert_ok(constraint_mask(some[1], behind, want));
    for (int i = 0; i < 2; i++) masks[i] = test_keep(malloc(size));
    assert_ok(masks_ahead_new(1, &m));
    for (int i = 0; i < STEPS; i++) { // step i samples into results[i % 2] what comes before i + 1
        const struct constraint_row row = {some[1], CONSTRAINT_START, 0};
        struct sample_result *now = &results[i % 2], *next = &results[(i + 1) % 2];
        struct masks_job *job = masks_ahead_begin(m, &row, 1, now, masks[i % 2]);
        next->token = MASKS_AHEAD_NO_TOKEN; // launched
        if (before) assert_ok(masks_job_finish(before, false));
        if (before) assert_memory_equal(masks[(i + 1) % 2], want, size);
        __atomic_store_n(&now->token, 'a', __ATOMIC_RELEASE); // it comes
        before = job;
    }
    masks_job_await(before);
    assert_ok(masks_job_finish(before, false));
    masks_ahead_free(m);
}

// A device as a GPU is: what it calls beside its work may be over no sooner than its work is.
static struct {
    struct backend backend;
    void (*call)(void *context);
    void *context;
    pthread_t thread;
    bool calls;
    int n;
} late;

static void *call_late(void *unused)
{
    (void)unused;
    clock_sleep_ms(20);
    late.call(late.context);
    return NULL;
}

static void end_call(void)
{
    if (late.calls) pthread_join(late.thread, NULL);
    late.calls = false;
}

static void call_beside(struct device *dev, void (*call)(void *), void *context)
{
    (void)dev;
    call(context); // the copy behind it is made at once here
    end_call();
    late.call = call;
    late.context = context;
    late.calls = pthread_create(&late.thread, NULL, call_late, NULL) == 0;
    late.n++;
}

static enum status sync_late(struct device *dev)
{
    end_call();
    return backend_cpu.sync(dev);
}

// An engine that ends while constrained requests run frees their masks when the device's calls,
// which wait for these, are over.
TEST(ends_with_masks_on_their_way)
{
    if (strcmp(test_device(), "cpu") != 0) test_skip("a GPU is late by itself");
    struct engine_options options = options_here();
    options.step_ahead = STEP_AHEAD_ON;
    late.backend = backend_cpu;
    late.backend.call_beside = call_beside;
    late.backend.sync = sync_late;
    for (int i = 0; i < 3; i++) {
        struct bench b;
        struct sampling s = random_sampling(200, 3);
        s.constraint = some[1];
        bench_start(&b, &options);
        assert_ok(engine_pause(b.engine, WAIT_MS));
        b.engine->dev->backend = &late.backend;
        struct take *take = submit(&b, 20, 3, &s);
        assert_ok(engine_resume(b.engine));
        await_tokens(&b, take, 0, 4);
        bench_end(&b);
        const bool pending = late.calls;
        end_call();
        assert_false(pending);
        assert_int_equal(take->sample[0].finish, FINISH_CANCELLED);
    }
    assert_true(late.n > 6);
}

TESTS_BETWEEN(set_up, tear_down)

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--writer") == 0) return writer_main(argc, argv);
    return test_main();
}
