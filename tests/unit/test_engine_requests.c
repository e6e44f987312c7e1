/* test_engine_requests.c: what a request can ask of the engine, what is refused, cancelling, and
 * how an engine begins and ends. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/dtype.h"
#include "tests/support/engine_bench.h"
#include "tests/support/tiny_model.h"

// ---- what a request can ask --------------------------------------------------------------------

TEST(stops_and_minimum)
{
    struct bench *b = bench_plain();
    struct sampling s = greedy(20);
    struct take *whole = run(b, 10, 3, &s);
    int at = 1; // the first token that was not there before it
    for (bool seen = true; seen; at++) {
        seen = false;
        for (int i = 0; i < at; i++)
            seen |= whole->sample[0].tokens[i].token == whole->sample[0].tokens[at].token;
        if (!seen) break;
    }
    s.n_stop_ids = 1;
    s.stop_ids[0] = whole->sample[0].tokens[at].token;
    struct take *stopped = run(b, 10, 3, &s);
    assert_int_equal(stopped->sample[0].finish, FINISH_STOP);
    assert_int_equal(stopped->sample[0].n, at + 1); // the stop token is there
    assert_int_equal(stopped->sample[0].tokens[at].token, s.stop_ids[0]);
    s.min_tokens = 15;
    struct take *late = run(b, 10, 3, &s);
    assert_true(late->sample[0].n >= 15);
    for (int i = 0; i < 15; i++)
        assert_int_not_equal(late->sample[0].tokens[i].token, s.stop_ids[0]);
}

TEST(eos_of_the_config)
{
    struct bench b;
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    struct sampling s = greedy(20);
    struct take *whole = run(&b, 10, 3, &s);
    bench_end(&b);
    const char *with_eos = test_path(folder, "eos");
    const struct tiny_model shape = {.hidden = 32,
                                     .layers = 2,
                                     .vocab = VOCAB,
                                     .seed = 1,
                                     .eos_id = whole->sample[0].tokens[4].token};
    assert_ok(tiny_model_write_as(with_eos, &shape));
    options.model_folder = with_eos;
    bench_start(&b, &options);
    struct take *ignored = run(&b, 10, 3, &s);
    assert_same_tokens(whole, 0, ignored, 0);
    s.ignore_eos = false;
    struct take *ended = run(&b, 10, 3, &s);
    assert_int_equal(ended->sample[0].finish, FINISH_STOP);
    assert_true(ended->sample[0].n <= 5);
    assert_int_equal(ended->sample[0].tokens[ended->sample[0].n - 1].token, shape.eos_id);
    bench_end(&b);
}

TEST(lists_most_likely)
{
    struct bench *b = bench_plain();
    struct sampling s = random_sampling(20, 77);
    s.temperature = 0.7f;
    s.logprobs = 3;
    struct take *take = run(b, 10, 3, &s);
    int found = 0;
    for (int t = 0; t < 20; t++) {
        const struct top_logprob *top = take->sample[0].top[t];
        const struct token_record *sampled = &take->sample[0].tokens[t];
        assert_true(top[0].logprob >= top[1].logprob && top[1].logprob >= top[2].logprob);
        for (int i = 0; i < 3; i++) {
            if (top[i].token != sampled->token) continue;
            found++;
            assert_float_equal(top[i].logprob, sampled->logprob, 1e-4f);
        }
        assert_float_equal(sampled->processed_logprob, sampled->logprob, 1e-6f); // nothing was cut
    }
    assert_true(found > 0);
}

TEST(refuses_what_it_cannot_do)
{
    struct request *r = NULL;
    int32_t prompt[600];
    struct engine_options options = plain_options();
    options.max_batch = 2;
    options.max_queue = 3;
    struct bench *b = bench_of(&options);
    struct engine_info info;
    engine_info(b->engine, &info);
    assert_int_equal(info.max_context, 512);
    make_prompt(prompt, 600, 1);
    const struct {
        int n_prompt;
        struct sampling s;
        const char *part;
    } cases[] = {
        {500, {.max_tokens = 13}, "500 tokens and max_tokens 13 are over the context of 512"},
        {5, {.max_tokens = -1}, "max_tokens is -1"},
        {5, {.temperature = NAN}, "temperature"},
        {5, {.top_p = -1}, "top_p"},
        {5, {.logprobs = 21}, "logprobs is 21"},
        {5, {.n_stop_ids = 1, .stop_ids = {VOCAB}}, "stop token id 0 is 320"},
        {5, {.n = 6}, "n is 6"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sampling bad = cases[i].s;
        if (bad.n == 0) bad.n = 1;
        if (bad.top_p == 0) bad.top_p = 1;
        assert_refused(b, prompt, cases[i].n_prompt, &bad, ST_INVALID, cases[i].part);
    }
    struct sampling s = greedy(4);
    s.top_p = 0;
    assert_refused(b, prompt, 5, &s, ST_INVALID, "top_p");
    s = greedy(4);
    prompt[3] = VOCAB;
    assert_refused(b, prompt, 5, &s, ST_INVALID,
                   "prompt token 3 is 320, outside the vocabulary of 320");
    prompt[3] = -1;
    assert_refused(b, prompt, 5, &s, ST_INVALID, "prompt token 3 is -1");
    assert_status(request_new(prompt, 0, &s, NULL, &r), ST_INVALID);
    s.n = 0;
    assert_status(request_new(prompt, 5, &s, NULL, &r), ST_INVALID);
    assert_null(r);

    assert_ok(engine_pause(b->engine, 10000));
    prompt[3] = 1;
    s = greedy(4);
    s.n = 5;
    struct take *full = submit_ids(b, prompt, 5, &s);
    s.n = 1;
    assert_refused(b, prompt, 5, &s, ST_BUSY, "the queue is full");
    assert_int_equal(full->sample[0].n, 0); // paused
    assert_ok(engine_resume(b->engine));
    await_done(b, full);
    struct take *after = run_ids(b, prompt, 5, &s);
    assert_same_tokens(full, 0, after, 0);
}

TEST(wrong_options)
{
    struct engine *e = NULL;
    struct engine_options options = plain_options();
    options.device = "abacus";
    assert_fails(engine_new(&options, on_event, NULL, &e), ST_INVALID, "abacus");
    options = plain_options();
    options.dtype = DT_BF16;
    assert_fails(engine_new(&options, on_event, NULL, &e), ST_UNSUPPORTED, "bf16");
    options = plain_options();
    options.model_folder = test_path(folder, "nowhere");
    assert_status(engine_new(&options, on_event, NULL, &e), ST_NOT_FOUND);
    assert_null(e);
}

static void start_failing(struct engine_options *options, const char *part)
{
    struct bench b = {0};
    struct engine_stats stats = {0};
    pthread_mutex_init(&b.lock, NULL);
    pthread_cond_init(&b.changed, NULL);
    assert_ok(engine_new(options, on_event, &b, &b.engine));
    for (int i = 0; i < WAIT_MS && stats.state != ENGINE_FAILED; i++) {
        clock_sleep_ms(1);
        engine_stats(b.engine, &stats);
    }
    assert_int_equal(stats.state, ENGINE_FAILED);
    assert_contains(stats.state_detail, part);
    int32_t prompt[1] = {1};
    struct sampling s = greedy(1);
    assert_refused(&b, prompt, 1, &s, ST_DEVICE, part);
    assert_status(engine_pause(b.engine, 1000), ST_TIMEOUT);
    assert_false(file_exists(options->bridge_path));
    bench_end(&b);
}

TEST(loading_fails)
{
    struct engine_options options = plain_options();
    options.max_context = 512;
    options.kv_bytes = 1000;
    start_failing(&options, "--kv-memory");
    options = plain_options();
    options.max_context = 513;
    start_failing(&options, "512 positions");
    options = plain_options();
    options.model_folder = test_path(folder, "hollow"); // config.json and no weights
    const struct tiny_model shape = {.hidden = 32, .layers = 2, .vocab = VOCAB, .eos_id = -1};
    assert_ok(tiny_model_write_as(options.model_folder, &shape));
    assert_int_equal(unlink(test_path(options.model_folder, "model.safetensors")), 0);
    start_failing(&options, "safetensors");
}

TEST(cancels)
{
    struct bench *b = bench_plain();
    struct sampling s = random_sampling(450, 5);
    s.n = 4;
    b->slow_ms = 1;
    struct take *take = submit(b, 20, 1, &s);
    await_tokens(b, take, 1, 2);
    engine_cancel(b->engine, take->request, 1);
    await_tokens(b, take, 0, tokens_of(b, take, 0) + 2);
    engine_cancel(b->engine, take->request, -1);
    await_done(b, take);
    assert_int_equal(take->sample[1].finish, FINISH_CANCELLED);
    assert_int_equal(take->sample[1].telemetry.generated_tokens, take->sample[1].n);
    assert_int_equal(idle_stats(b).kv_blocks_used, 0);
    // cancelled before it was ever looked at
    assert_ok(engine_pause(b->engine, 10000));
    take = submit(b, 20, 1, &s);
    engine_cancel(b->engine, take->request, -1);
    await_done(b, take);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(take->sample[i].finish, FINISH_CANCELLED);
        assert_int_equal(take->sample[i].n, 0);
    }
}

TEST(ends_with_and_without_drain)
{
    struct bench b;
    struct engine_options options = plain_options();
    struct sampling s = greedy(100);
    for (int drain_ms = 0; drain_ms <= WAIT_MS; drain_ms += WAIT_MS) {
        bench_start(&b, &options);
        if (!drain_ms) assert_ok(engine_pause(b.engine, 10000));
        struct take *take = submit(&b, 20, 1, &s);
        assert_true(file_exists(options.bridge_path));
        engine_free(b.engine, drain_ms);
        assert_false(file_exists(options.bridge_path));
        assert_true(take->done);
        assert_int_equal(take->sample[0].finish, drain_ms ? FINISH_LENGTH : FINISH_CANCELLED);
        assert_int_equal(take->sample[0].n, drain_ms ? 100 : 0);
        request_free(take->request);
    }
}

TESTS_BETWEEN(engine_bench_set_up, NULL)
