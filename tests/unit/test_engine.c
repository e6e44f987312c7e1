/* test_engine.c: the engine on the CPU with random models: the same text whatever is in the batch,
 * groups, preemption, refusals, cancelling, commands; and updates through the real bridge by
 * another process, which is this program again with --writer as its first word. */
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/rng.h"
#include "common/model/weights.h"
#include "infer-server/engine/engine.h"
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VOCAB = 320, MOST_SAMPLES = 8, MOST_TOKENS = 480, WAIT_MS = 60000 };

static const char *folder, *model_a, *model_b; // two models of one layout
static const char *bridge_path; // of the test's engine; one that failed may still hold its own

// ---- collecting --------------------------------------------------------------------------------

struct take { // what came back of a request; its tag
    struct request *request;
    struct {
        struct token_record tokens[MOST_TOKENS];
        struct top_logprob top[MOST_TOKENS][3];
        int n;
        enum finish_reason finish;
        struct sample_telemetry telemetry;
        char error[128];
    } sample[MOST_SAMPLES];
    bool done;
};
struct bench { // an engine and what the events' thread shares with the test's
    struct engine *engine;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    _Atomic int slow_ms; // the engine is held up by this much an event: time to act in the middle
    bool commanded;
    enum status command_status;
    char message[256];
    uint64_t version, canary, first_sums[2];
    bool facts_given;
};

static void on_event(void *context, const struct engine_event *event)
{
    struct bench *b = context;
    struct take *take = request_tag(event->request);
    pthread_mutex_lock(&b->lock);
    for (int i = 0; i < event->n_tokens; i++) {
        int at = take->sample[event->sample].n++;
        take->sample[event->sample].tokens[at] = event->tokens[i];
        if (event->top)
            memcpy(take->sample[event->sample].top[at], event->top, 3 * sizeof *event->top);
    }
    if (event->finish != FINISH_NONE) {
        take->sample[event->sample].finish = event->finish;
        take->sample[event->sample].telemetry = *event->telemetry;
        snprintf(take->sample[event->sample].error, sizeof take->sample[0].error, "%s",
                 event->error ? event->error : "");
    }
    if (event->request_done) take->done = true;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    if (b->slow_ms) clock_sleep_ms(b->slow_ms);
}

static bool wait_changed(struct bench *b, int64_t deadline_ns) // under the lock; false: too late
{
    struct timespec until;
    if (clock_now_ns() > deadline_ns) return false;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50 * NS_PER_MS;
    if (until.tv_nsec >= NS_PER_S) {
        until.tv_sec++;
        until.tv_nsec -= NS_PER_S;
    }
    pthread_cond_timedwait(&b->changed, &b->lock, &until);
    return true;
}

static void await_done(struct bench *b, struct take *take)
{
    const int64_t deadline = clock_deadline_ns(WAIT_MS);
    pthread_mutex_lock(&b->lock);
    while (!take->done && wait_changed(b, deadline)) {
    }
    bool done = take->done;
    pthread_mutex_unlock(&b->lock);
    assert_true(done);
    request_free(take->request);
    take->request = NULL;
}

static void await_tokens(struct bench *b, struct take *take, int sample, int n)
{
    const int64_t deadline = clock_deadline_ns(WAIT_MS);
    pthread_mutex_lock(&b->lock);
    while (take->sample[sample].n < n && wait_changed(b, deadline)) {
    }
    bool enough = take->sample[sample].n >= n;
    pthread_mutex_unlock(&b->lock);
    assert_true(enough);
}

static int tokens_of(struct bench *b, const struct take *take, int sample)
{
    pthread_mutex_lock(&b->lock);
    int n = take->sample[sample].n;
    pthread_mutex_unlock(&b->lock);
    return n;
}

static void await_state(struct bench *b, enum engine_state state)
{
    struct engine_stats stats;
    for (int i = 0; i < WAIT_MS; i++) {
        engine_stats(b->engine, &stats);
        if (stats.state == state) return;
        if (stats.state == ENGINE_FAILED) fail_msg("the engine failed: %s", stats.state_detail);
        clock_sleep_ms(1);
    }
    fail_msg("the engine is in state %d (%s), not %d", stats.state, stats.state_detail, state);
}

static struct engine_stats stats_of(struct bench *b)
{
    struct engine_stats stats;
    engine_stats(b->engine, &stats);
    return stats;
}

// The statistics of a step become visible after its events: waits for those of an idle engine.
static struct engine_stats idle_stats(struct bench *b)
{
    for (int i = 0; i < WAIT_MS; i++) {
        struct engine_stats stats = stats_of(b);
        if (stats.running + stats.waiting == 0) return stats;
        clock_sleep_ms(1);
    }
    fail_msg("the engine still holds %d samples", stats_of(b).running);
    return stats_of(b);
}

// ---- engines -----------------------------------------------------------------------------------

static struct engine_options plain_options(void)
{
    static int count;
    char name[32];
    snprintf(name, sizeof name, "bridge-%d.json", count++);
    bridge_path = test_path(folder, name);
    return (struct engine_options){.model_folder = model_a,
                                   .device = "cpu",
                                   .dtype = -1,
                                   .max_batch = 16,
                                   .kv_bytes = 8 << 20,
                                   .block_size = 4,
                                   .prefill_chunk = 64,
                                   .max_queue = 64,
                                   .bridge_path = bridge_path,
                                   .socket_path = test_path(folder, "engine.sock"),
                                   .kv_policy = KV_KEEP};
}

static void bench_start(struct bench *b, const struct engine_options *options)
{
    memset(b, 0, sizeof *b);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->changed, NULL);
    assert_ok(engine_new(options, on_event, b, &b->engine));
    await_state(b, ENGINE_OK);
}

static void bench_end(struct bench *b)
{
    engine_free(b->engine, 0);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->lock);
}

static struct sampling greedy(int max_tokens)
{
    return (struct sampling){
        .n = 1, .max_tokens = max_tokens, .top_p = 1, .logprobs = -1, .ignore_eos = true};
}

static struct sampling random_sampling(int max_tokens, uint64_t seed)
{
    struct sampling s = greedy(max_tokens);
    s.temperature = 1;
    s.seed = seed;
    return s;
}

static void make_prompt(int32_t *prompt, int n, uint64_t seed)
{
    struct rng r;
    rng_init(&r, seed, 99);
    for (int i = 0; i < n; i++) prompt[i] = (int32_t)rng_below(&r, VOCAB);
}

static struct take *submit_ids(struct bench *b, const int32_t *prompt, int n_prompt,
                               const struct sampling *sampling)
{
    struct take *take = calloc(1, sizeof *take);
    assert_non_null(take);
    assert_ok(request_new(prompt, n_prompt, sampling, take, &take->request));
    assert_ok(engine_submit(b->engine, take->request));
    return take;
}

static struct take *submit(struct bench *b, int n_prompt, uint64_t prompt_seed,
                           const struct sampling *s)
{
    int32_t prompt[512];
    make_prompt(prompt, n_prompt, prompt_seed);
    return submit_ids(b, prompt, n_prompt, s);
}

static void assert_same_tokens(const struct take *a, int i, const struct take *b, int k)
{
    assert_int_equal(a->sample[i].n, b->sample[k].n);
    for (int t = 0; t < a->sample[i].n; t++)
        assert_int_equal(a->sample[i].tokens[t].token, b->sample[k].tokens[t].token);
}

// ---- the same text -----------------------------------------------------------------------------

enum { CROWD = 12 };
static const int prompt_lengths[CROWD] = {1, 3, 4, 5, 17, 64, 65, 100, 2, 8, 31, 130};

static void run_crowd(const struct engine_options *options, float temperature, bool one_by_one,
                      struct take *ret[CROWD], struct engine_stats *ret_stats)
{
    struct bench b;
    bench_start(&b, options);
    for (int i = 0; i < CROWD; i++) {
        struct sampling s = random_sampling(30 + i, 1000 + (uint64_t)i);
        s.temperature = temperature;
        ret[i] = submit(&b, prompt_lengths[i], (uint64_t)i, &s);
        if (one_by_one) await_done(&b, ret[i]);
    }
    for (int i = 0; i < CROWD && !one_by_one; i++) await_done(&b, ret[i]);
    *ret_stats = idle_stats(&b);
    bench_end(&b);
}

static void compare_crowds(float temperature)
{
    struct take *alone[CROWD], *crowd[CROWD], *tight[CROWD];
    struct engine_stats stats;
    struct engine_options options = plain_options();
    options.max_batch = 1;
    options.prefill_chunk = 256;
    run_crowd(&options, temperature, true, alone, &stats);
    int different = 0;
    for (int i = 1; i < CROWD; i++)
        different += alone[i]->sample[0].tokens[5].token != alone[0]->sample[0].tokens[5].token;
    assert_true(different > CROWD / 2); // the model does not say one thing only

    options.max_batch = 16;
    options.prefill_chunk = 7;
    run_crowd(&options, temperature, false, crowd, &stats);
    assert_int_equal(stats.preemptions, 0);
    assert_int_equal(stats.kv_blocks_used, 0);

    // Room for little more than the longest sequence: others must leave and come back.
    options.prefill_chunk = 33;
    options.max_context = 176;
    options.kv_bytes = 46 * stats.kv_bytes_per_block;
    run_crowd(&options, temperature, false, tight, &stats);
    assert_true(stats.preemptions > 0);
    assert_int_equal(stats.kv_blocks_total, 46);

    for (int i = 0; i < CROWD; i++) {
        assert_int_equal(alone[i]->sample[0].n, 30 + i);
        assert_int_equal(alone[i]->sample[0].finish, FINISH_LENGTH);
        assert_same_tokens(alone[i], 0, crowd[i], 0);
        assert_same_tokens(alone[i], 0, tight[i], 0);
        free(alone[i]);
        free(crowd[i]);
        free(tight[i]);
    }
}

static void greedy_is_the_same_in_any_batch(void **state)
{
    (void)state;
    compare_crowds(0);
}

static void seed_is_the_same_in_any_batch(void **state)
{
    (void)state;
    compare_crowds(1);
}

static void group_shares_its_prompt(void **state)
{
    (void)state;
    struct bench b;
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    struct sampling s = random_sampling(400, 5);
    s.n = 6;
    b.slow_ms = 1;
    struct take *group = submit(&b, 42, 1, &s);
    await_tokens(&b, group, 5, 3);
    assert_ok(engine_pause(b.engine, 10000));
    b.slow_ms = 0;
    int wanted = 42 / 4; // the prompt's full blocks, once
    for (int i = 0; i < 6; i++) {
        int computed = 42 + group->sample[i].n - 1; // the last token's keys come with the next step
        wanted += (computed + 3) / 4 - 42 / 4;
    }
    assert_int_equal(stats_of(&b).kv_blocks_used, wanted);
    engine_cancel(b.engine, group->request, -1);
    assert_ok(engine_resume(b.engine));
    await_done(&b, group);
    free(group);

    // Sample i draws from the same stream in a group of any size, and not its sibling's.
    s.max_tokens = 12;
    struct take *six = submit(&b, 42, 1, &s);
    await_done(&b, six);
    s.n = 3;
    struct take *three = submit(&b, 42, 1, &s);
    await_done(&b, three);
    bool differ = false;
    for (int i = 0; i < 3; i++) {
        assert_same_tokens(six, i, three, i);
        for (int t = 0; i && t < 12; t++)
            differ |= six->sample[i].tokens[t].token != six->sample[0].tokens[t].token;
    }
    assert_true(differ);
    const struct sample_telemetry *t = &six->sample[4].telemetry;
    assert_int_equal(t->prompt_tokens, 42);
    assert_int_equal(t->generated_tokens, 12);
    assert_int_equal(t->kv_bytes_peak, (42 + 11 + 3) / 4 * stats_of(&b).kv_bytes_per_block);
    assert_true(t->queue_ms >= 0 && t->first_token_ms >= t->queue_ms &&
                t->latency_ms >= t->first_token_ms);
    assert_int_equal(idle_stats(&b).kv_blocks_used, 0);
    free(six);
    free(three);
    bench_end(&b);
}

// With the prompt ending at every place of a block, siblings read what one alone would have
// computed.
static void forks_read_the_whole_prompt(void **state)
{
    (void)state;
    struct bench b;
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    for (int n_prompt = 2; n_prompt < 14; n_prompt++) {
        struct sampling s = greedy(24);
        struct take *alone = submit(&b, n_prompt, 50, &s);
        await_done(&b, alone);
        s.n = 4;
        struct take *group = submit(&b, n_prompt, 50, &s);
        await_done(&b, group);
        for (int i = 0; i < 4; i++) assert_same_tokens(alone, 0, group, i);
        free(alone);
        free(group);
    }
    bench_end(&b);
}

// ---- prefix cache ------------------------------------------------------------------------------

// Tokens, and every figure of them but the version, to the bit.
static void assert_same_records(const struct take *a, int i, const struct take *b, int k)
{
    assert_same_tokens(a, i, b, k);
    for (int t = 0; t < a->sample[i].n; t++) {
        const struct token_record *x = &a->sample[i].tokens[t], *y = &b->sample[k].tokens[t];
        assert_memory_equal(&x->logprob, &y->logprob, sizeof x->logprob);
        assert_memory_equal(&x->processed_logprob, &y->processed_logprob,
                            sizeof x->processed_logprob);
        assert_memory_equal(&x->retained_mass, &y->retained_mass, sizeof x->retained_mass);
    }
}

enum { MIX = 300, MIX_TEXTS = 4, MIX_LONGEST = 90 };

// Requests whose prompts are one of a few texts up to some place and then of their own, a third of
// them samples of a group; no more than max_in_flight at a time.
static void run_mix(const struct engine_options *options, int max_in_flight, struct take *ret[MIX],
                    struct engine_stats *ret_stats)
{
    struct bench b;
    struct rng r;
    int n_awaited = 0;
    rng_init(&r, 31, 0);
    bench_start(&b, options);
    for (int i = 0; i < MIX; i++) {
        int32_t prompt[MIX_LONGEST + 1];
        const int n_prompt = 1 + (int)rng_below(&r, MIX_LONGEST);
        const uint64_t text = 900 + rng_below(&r, MIX_TEXTS);
        const int turn = (int)rng_below(&r, MIX_LONGEST + 30);
        make_prompt(prompt, n_prompt, text);
        for (int k = turn; k < n_prompt; k++) prompt[k] = (prompt[k] + i) % VOCAB;
        struct sampling s = random_sampling(1 + (int)rng_below(&r, 30), 2000 + (uint64_t)i);
        if (rng_below(&r, 3) == 0) s.n = 2 + (int)rng_below(&r, 3);
        if (rng_below(&r, 3) == 0)
            s.speculative = (struct speculative_choice){.chosen = true, .k[SPECULATIVE_NGRAM] = 4};
        ret[i] = submit_ids(&b, prompt, n_prompt, &s);
        while (n_awaited <= i - max_in_flight) await_done(&b, ret[n_awaited++]);
    }
    while (n_awaited < MIX) await_done(&b, ret[n_awaited++]);
    *ret_stats = idle_stats(&b);
    assert_int_equal(ret_stats->kv_blocks_used, 0);
    bench_end(&b);
}

static void cache_changes_no_bit(void **state)
{
    (void)state;
    static struct take *off[MIX], *roomy[MIX], *tight[MIX];
    struct engine_stats stats;
    struct engine_options options = plain_options();
    options.max_context = 128;
    options.max_queue = 256;
    options.prefix_cache_off = true;
    run_mix(&options, 24, off, &stats);
    assert_true(stats.cache_hits == 0);

    options.prefix_cache_off = false;
    run_mix(&options, 24, roomy, &stats);
    assert_true(stats.cache_hits * 4 > stats.cache_queries);
    assert_int_equal(stats.preemptions, 0);

    // Little more than the longest sequence: cached blocks are taken for others, samples leave and
    // come back.
    options.kv_bytes = 40 * stats.kv_bytes_per_block;
    options.prefill_chunk = 21;
    run_mix(&options, 24, tight, &stats);
    assert_true(stats.preemptions > 0 && stats.cache_hits > 0);

    uint64_t cached = 0;
    for (int i = 0; i < MIX; i++) {
        for (int k = 0; k < MOST_SAMPLES; k++) {
            const struct sample_telemetry *t = &tight[i]->sample[k].telemetry;
            assert_same_records(off[i], k, roomy[i], k);
            assert_same_records(off[i], k, tight[i], k);
            assert_int_equal(off[i]->sample[k].telemetry.cached_prompt_tokens, 0);
            if (tight[i]->sample[k].n == 0) continue;
            assert_true(t->cached_prompt_tokens < t->prompt_tokens);
            assert_int_equal(t->cached_prompt_tokens,
                             tight[i]->sample[0].telemetry.cached_prompt_tokens);
        }
        cached += (uint64_t)tight[i]->sample[0].telemetry.cached_prompt_tokens;
        free(off[i]);
        free(roomy[i]);
        free(tight[i]);
    }
    assert_true(cached == stats.cache_hits);
}

// ---- what a request can ask --------------------------------------------------------------------

static void stops_and_minimum(void **state)
{
    (void)state;
    struct bench b;
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    struct sampling s = greedy(20);
    struct take *whole = submit(&b, 10, 3, &s);
    await_done(&b, whole);
    int at = 1; // the first token that was not there before it
    for (bool seen = true; seen; at++) {
        seen = false;
        for (int i = 0; i < at; i++)
            seen |= whole->sample[0].tokens[i].token == whole->sample[0].tokens[at].token;
        if (!seen) break;
    }
    s.n_stop_ids = 1;
    s.stop_ids[0] = whole->sample[0].tokens[at].token;
    struct take *stopped = submit(&b, 10, 3, &s);
    await_done(&b, stopped);
    assert_int_equal(stopped->sample[0].finish, FINISH_STOP);
    assert_int_equal(stopped->sample[0].n, at + 1); // the stop token is there
    assert_int_equal(stopped->sample[0].tokens[at].token, s.stop_ids[0]);
    s.min_tokens = 15;
    struct take *late = submit(&b, 10, 3, &s);
    await_done(&b, late);
    assert_true(late->sample[0].n >= 15);
    for (int i = 0; i < 15; i++)
        assert_int_not_equal(late->sample[0].tokens[i].token, s.stop_ids[0]);
    free(whole);
    free(stopped);
    free(late);
    bench_end(&b);
}

static void eos_of_the_config(void **state)
{
    (void)state;
    struct bench b;
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    struct sampling s = greedy(20);
    struct take *whole = submit(&b, 10, 3, &s);
    await_done(&b, whole);
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
    struct take *ignored = submit(&b, 10, 3, &s);
    await_done(&b, ignored);
    assert_same_tokens(whole, 0, ignored, 0);
    s.ignore_eos = false;
    struct take *ended = submit(&b, 10, 3, &s);
    await_done(&b, ended);
    assert_int_equal(ended->sample[0].finish, FINISH_STOP);
    assert_true(ended->sample[0].n <= 5);
    assert_int_equal(ended->sample[0].tokens[ended->sample[0].n - 1].token, shape.eos_id);
    free(whole);
    free(ignored);
    free(ended);
    bench_end(&b);
}

static void lists_most_likely(void **state)
{
    (void)state;
    struct bench b;
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    struct sampling s = random_sampling(20, 77);
    s.temperature = 0.7f;
    s.logprobs = 3;
    struct take *take = submit(&b, 10, 3, &s);
    await_done(&b, take);
    int found = 0;
    for (int t = 0; t < 20; t++) {
        const struct top_logprob *top = take->sample[0].top[t];
        const struct token_record *drawn = &take->sample[0].tokens[t];
        assert_true(top[0].logprob >= top[1].logprob && top[1].logprob >= top[2].logprob);
        for (int i = 0; i < 3; i++) {
            if (top[i].token != drawn->token) continue;
            found++;
            assert_float_equal(top[i].logprob, drawn->logprob, 1e-4f);
        }
        assert_float_equal(drawn->processed_logprob, drawn->logprob, 1e-6f); // nothing was cut
    }
    assert_true(found > 0);
    free(take);
    bench_end(&b);
}

static void refuse(struct bench *b, const int32_t *prompt, int n_prompt, const struct sampling *s,
                   enum status st, const char *part)
{
    struct request *r = NULL;
    assert_ok(request_new(prompt, n_prompt, s, NULL, &r));
    assert_status(engine_submit(b->engine, r), st);
    assert_message(part);
    request_free(r);
}

static void refuses_what_it_cannot_do(void **state)
{
    (void)state;
    struct bench b;
    struct request *r = NULL;
    int32_t prompt[600];
    struct engine_options options = plain_options();
    options.max_batch = 2;
    options.max_queue = 3;
    bench_start(&b, &options);
    assert_int_equal(engine_max_context(b.engine), 512);
    make_prompt(prompt, 600, 1);
    struct sampling s = greedy(13);
    refuse(&b, prompt, 500, &s, ST_INVALID,
           "500 tokens and max_tokens 13 are over the context of 512");
    s.max_tokens = -1;
    refuse(&b, prompt, 5, &s, ST_INVALID, "max_tokens is -1");
    s = greedy(4);
    s.temperature = NAN;
    refuse(&b, prompt, 5, &s, ST_INVALID, "temperature");
    s = greedy(4);
    s.top_p = 0;
    refuse(&b, prompt, 5, &s, ST_INVALID, "top_p");
    s = greedy(4);
    s.logprobs = 21;
    refuse(&b, prompt, 5, &s, ST_INVALID, "logprobs is 21");
    s = greedy(4);
    s.n_stop_ids = 1;
    s.stop_ids[0] = VOCAB;
    refuse(&b, prompt, 5, &s, ST_INVALID, "stop token id 0 is 320");
    s = greedy(4);
    s.n = 6;
    refuse(&b, prompt, 5, &s, ST_INVALID, "n is 6");
    s = greedy(4);
    prompt[3] = VOCAB;
    refuse(&b, prompt, 5, &s, ST_INVALID, "prompt token 3 is 320, outside the vocabulary of 320");
    prompt[3] = -1;
    refuse(&b, prompt, 5, &s, ST_INVALID, "prompt token 3 is -1");
    assert_status(request_new(prompt, 0, &s, NULL, &r), ST_INVALID);
    s.n = 0;
    assert_status(request_new(prompt, 5, &s, NULL, &r), ST_INVALID);
    assert_null(r);

    assert_ok(engine_pause(b.engine, 10000));
    prompt[3] = 1;
    s = greedy(4);
    s.n = 5;
    struct take *full = submit_ids(&b, prompt, 5, &s);
    s.n = 1;
    refuse(&b, prompt, 5, &s, ST_BUSY, "the queue is full");
    assert_int_equal(full->sample[0].n, 0); // paused
    assert_ok(engine_resume(b.engine));
    await_done(&b, full);
    struct take *after = submit_ids(&b, prompt, 5, &s);
    await_done(&b, after);
    assert_same_tokens(full, 0, after, 0);
    free(full);
    free(after);
    bench_end(&b);
}

static void wrong_options(void **state)
{
    (void)state;
    struct engine *e = NULL;
    struct engine_options options = plain_options();
    options.device = "abacus";
    assert_status(engine_new(&options, on_event, NULL, &e), ST_INVALID);
    assert_message("abacus");
    options = plain_options();
    options.dtype = DT_BF16;
    assert_status(engine_new(&options, on_event, NULL, &e), ST_UNSUPPORTED);
    assert_message("bf16");
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
    refuse(&b, prompt, 1, &s, ST_DEVICE, part);
    assert_status(engine_pause(b.engine, 1000), ST_TIMEOUT);
    assert_false(file_exists(options->bridge_path));
    bench_end(&b);
}

static void loading_fails(void **state)
{
    (void)state;
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

static void cancels(void **state)
{
    (void)state;
    struct bench b;
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    struct sampling s = random_sampling(450, 5);
    s.n = 4;
    b.slow_ms = 1;
    struct take *take = submit(&b, 20, 1, &s);
    await_tokens(&b, take, 1, 2);
    engine_cancel(b.engine, take->request, 1);
    await_tokens(&b, take, 0, tokens_of(&b, take, 0) + 2);
    engine_cancel(b.engine, take->request, -1);
    await_done(&b, take);
    assert_int_equal(take->sample[1].finish, FINISH_CANCELLED);
    assert_int_equal(take->sample[1].telemetry.generated_tokens, take->sample[1].n);
    assert_int_equal(idle_stats(&b).kv_blocks_used, 0);
    free(take);
    // cancelled before it was ever looked at
    assert_ok(engine_pause(b.engine, 10000));
    take = submit(&b, 20, 1, &s);
    engine_cancel(b.engine, take->request, -1);
    await_done(&b, take);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(take->sample[i].finish, FINISH_CANCELLED);
        assert_int_equal(take->sample[i].n, 0);
    }
    free(take);
    bench_end(&b);
}

static void ends_with_and_without_drain(void **state)
{
    (void)state;
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
        free(take);
    }
}

// ---- commands ----------------------------------------------------------------------------------

static void on_reload(void *context, enum status st, const char *message, uint64_t version)
{
    struct bench *b = context;
    pthread_mutex_lock(&b->lock);
    b->commanded = true;
    b->command_status = st;
    b->version = version;
    snprintf(b->message, sizeof b->message, "%s", message);
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

static void on_facts(void *context, const struct engine_bridge_facts *facts)
{
    struct bench *b = context;
    pthread_mutex_lock(&b->lock);
    b->commanded = true;
    b->facts_given = facts != NULL;
    if (facts) {
        b->version = facts->version;
        b->canary = facts->canary;
        if (facts->checksums) memcpy(b->first_sums, facts->checksums, sizeof b->first_sums);
    }
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

static void await_command(struct bench *b)
{
    const int64_t deadline = clock_deadline_ns(WAIT_MS);
    pthread_mutex_lock(&b->lock);
    while (!b->commanded && wait_changed(b, deadline)) {
    }
    bool commanded = b->commanded;
    b->commanded = false;
    pthread_mutex_unlock(&b->lock);
    assert_true(commanded);
}

static struct take *greedy_of(struct bench *b, const int32_t *prompt, int n_prompt, int max_tokens)
{
    struct sampling s = greedy(max_tokens);
    struct take *take = submit_ids(b, prompt, n_prompt, &s);
    await_done(b, take);
    return take;
}

// The greedy continuation under a folder's weights, from an engine of its own.
static struct take *reference(const char *model, const int32_t *prompt, int n_prompt,
                              int max_tokens)
{
    struct bench b;
    const char *kept = bridge_path;
    struct engine_options options = plain_options();
    bridge_path = kept;
    options.model_folder = model;
    bench_start(&b, &options);
    struct take *take = greedy_of(&b, prompt, n_prompt, max_tokens);
    bench_end(&b);
    return take;
}

static void reloads(void **state)
{
    (void)state;
    struct bench b;
    int32_t prompt[20];
    struct engine_options options = plain_options();
    make_prompt(prompt, 20, 8);
    struct take *a = reference(model_a, prompt, 20, 30), *in_b = reference(model_b, prompt, 20, 30);
    bench_start(&b, &options);
    assert_ok(engine_bridge_facts(b.engine, true, on_facts, &b));
    await_command(&b);
    assert_true(b.facts_given);
    assert_int_equal(b.version, 2);
    const uint64_t sums[2] = {b.first_sums[0], b.first_sums[1]};

    assert_ok(engine_reload(b.engine, test_path(folder, "nowhere"), NULL, on_reload, &b));
    await_command(&b);
    assert_int_not_equal(b.command_status, ST_OK);
    assert_contains(b.message, "nowhere");
    struct take *still = greedy_of(&b, prompt, 20, 30);
    assert_same_tokens(a, 0, still, 0);

    assert_ok(engine_reload(b.engine, model_b, NULL, on_reload, &b));
    await_command(&b);
    assert_int_equal(b.command_status, ST_OK);
    assert_int_equal(b.version % 2, 0);
    const uint64_t version = b.version;
    struct take *now = greedy_of(&b, prompt, 20, 30);
    assert_same_tokens(in_b, 0, now, 0);
    assert_true(now->sample[0].tokens[0].weight_version == version && version > 2);
    assert_ok(engine_bridge_facts(b.engine, true, on_facts, &b));
    await_command(&b);
    assert_true(b.first_sums[0] != sums[0] && b.first_sums[1] != sums[1]);
    free(a);
    free(in_b);
    free(still);
    free(now);
    bench_end(&b);
}

// ---- another process writes --------------------------------------------------------------------

struct writer {
    struct bridge *bridge;
    struct model_config *config;
    struct weights *weights;
    const char *folder;
    bool die;
};

static enum status write_weights(void *context)
{
    struct writer *w = context;
    if (w->die) {
        memset(w->weights->base, 0xff, w->weights->bytes / 2); // NaN
        raise(SIGKILL);
    }
    return weights_load(w->weights, bridge_device(w->bridge), w->folder);
}

// --writer BRIDGE FOLDER N [die]: N updates to the folder's weights, which is then the snapshot to
// restore from, and one more that kills this process half way. Exits 0 if all went well.
static int writer_main(int argc, char **argv)
{
    struct writer w = {.folder = argv[3]};
    enum status st = ST_OK;
    CHECK(model_config_load(w.folder, &w.config));
    CHECK(weights_plan(w.config, DT_F32, &w.weights));
    CHECK(bridge_attach(argv[2], NULL, &w.bridge));
    weights_bind(w.weights, bridge_base(w.bridge, "policy"));
    CHECK(bridge_become_writer(w.bridge));
    // a canary for facts: the word, whose complement the engine stores beside it
    memcpy((char *)w.weights->base + w.weights->canary_offset, "commonwt", 8);
    for (int i = 0; i < atoi(argv[4]); i++)
        CHECK(bridge_publish(w.bridge, 20000, write_weights, &w, NULL));
    if (atoi(argv[4]) > 0) CHECK(control_set_snapshot(bridge_control(w.bridge), w.folder));
    w.die = argc > 5;
    if (w.die) CHECK(bridge_publish(w.bridge, 20000, write_weights, &w, NULL));
out:
    if (st != ST_OK) fprintf(stderr, "writer: %s\n", status_message());
    bridge_detach(w.bridge);
    weights_free(w.weights);
    model_config_free(w.config);
    return st != ST_OK;
}

static void start_self(struct test_child *child, const char *role, const char *model,
                       const char *times, bool die)
{
    static char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = 0;
    const char *argv[] = {self, role, bridge_path, model, times, die ? "die" : NULL, NULL};
    memset(child, 0, sizeof *child);
    test_spawn(child, test_path(folder, "child.log"), argv);
}

static void start_writer(struct test_child *child, const char *model, const char *times, bool die)
{
    start_self(child, "--writer", model, times, die);
}

static void assert_versions_rise(const struct take *take, int i)
{
    uint64_t last = 0;
    for (int t = 0; t < take->sample[i].n; t++) {
        uint64_t version = take->sample[i].tokens[t].weight_version;
        assert_true(version >= last && version % 2 == 0);
        last = version;
    }
    assert_true(take->sample[i].telemetry.weight_version_first ==
                take->sample[i].tokens[0].weight_version);
    assert_true(take->sample[i].telemetry.weight_version_last == last);
}

// A request is caught in the middle by an update to model B. Under "recompute" the rest must be
// what B says after the text so far; under "keep" it goes on with the keys of A.
static void update_in_flight(enum kv_policy policy)
{
    struct bench b;
    struct test_child child;
    int32_t text[512];
    struct engine_options options = plain_options();
    options.kv_policy = policy;
    bench_start(&b, &options);
    make_prompt(text, 30, 4);
    struct sampling s = greedy(400);
    s.n = 2;
    b.slow_ms = 2;
    struct take *take = submit_ids(&b, text, 30, &s);
    await_tokens(&b, take, 1, 5);
    assert_ok(engine_pause(b.engine, 10000));
    b.slow_ms = 0;
    const int before = take->sample[0].n;
    assert_true(before < 350);
    start_writer(&child, model_b, "1", false); // updates are served while paused
    assert_int_equal(test_wait(&child, WAIT_MS), 0);
    assert_int_equal(take->sample[0].n, before);
    assert_ok(engine_resume(b.engine));
    await_done(&b, take);
    assert_int_equal(stats_of(&b).updates, 1);
    assert_int_equal(stats_of(&b).weight_version, 4);
    for (int i = 0; i < 2; i++) assert_versions_rise(take, i);
    for (int t = 0; t < 400; t++)
        assert_int_equal(take->sample[0].tokens[t].weight_version, t < before ? 2 : 4);
    assert_ok(engine_bridge_facts(b.engine, false, on_facts, &b));
    await_command(&b);
    assert_memory_equal(&b.canary, "commonwt", 8);
    bench_end(&b);

    for (int t = 0; t < before; t++) text[30 + t] = take->sample[0].tokens[t].token;
    struct take *rest = reference(model_b, text, 30 + before, 40);
    int same = 0;
    for (int t = 0; t < 40; t++)
        same += rest->sample[0].tokens[t].token == take->sample[0].tokens[before + t].token;
    if (policy == KV_RECOMPUTE)
        assert_int_equal(same, 40);
    else
        assert_true(same < 40); // the keys and values of A show
    free(rest);
    free(take);
}

static void update_keeps_keys(void **state)
{
    (void)state;
    update_in_flight(KV_KEEP);
}

static void update_recomputes_keys(void **state)
{
    (void)state;
    update_in_flight(KV_RECOMPUTE);
}

// The same prompt before and after an update: the second answer is, to the bit, that of a server
// that started with the new weights, though a sample with the old blocks runs on over the update.
static void update_leaves_no_stale_block(void **state)
{
    (void)state;
    for (int policy = 0; policy < 2; policy++) {
        struct bench b;
        struct test_child child;
        int32_t prompt[42];
        make_prompt(prompt, 42, 4);
        struct take *old = reference(model_a, prompt, 42, 30);
        struct take *in_b = reference(model_b, prompt, 42, 30);
        struct engine_options options = plain_options();
        options.kv_policy = policy == 0 ? KV_KEEP : KV_RECOMPUTE;
        bench_start(&b, &options);
        struct take *first = greedy_of(&b, prompt, 42, 30);
        struct take *again = greedy_of(&b, prompt, 42, 30);
        assert_int_equal(first->sample[0].telemetry.cached_prompt_tokens, 0);
        assert_int_equal(again->sample[0].telemetry.cached_prompt_tokens, 40);
        assert_same_records(old, 0, first, 0);
        assert_same_records(old, 0, again, 0);

        struct sampling s = random_sampling(400, 9);
        b.slow_ms = 2;
        struct take *running = submit_ids(&b, prompt, 42, &s);
        await_tokens(&b, running, 0, 2);
        assert_ok(engine_pause(b.engine, 10000));
        const int before = tokens_of(&b, running, 0);
        assert_true(before < 350);
        start_writer(&child, model_b, "1", false); // updates are served while paused
        assert_int_equal(test_wait(&child, WAIT_MS), 0);
        assert_ok(engine_resume(b.engine));
        await_tokens(&b, running, 0, before + 1);
        struct take *after = greedy_of(&b, prompt, 42, 30);
        assert_true(after->sample[0].tokens[0].weight_version == 4);
        assert_same_records(in_b, 0, after, 0);
        // what runs on has computed its prompt again by then, or holds nothing of use
        assert_int_equal(after->sample[0].telemetry.cached_prompt_tokens, policy == 0 ? 0 : 40);
        struct take *last = greedy_of(&b, prompt, 42, 30);
        assert_int_equal(last->sample[0].telemetry.cached_prompt_tokens, 40);
        assert_same_records(in_b, 0, last, 0);
        b.slow_ms = 0;
        engine_cancel(b.engine, running->request, -1);
        await_done(&b, running);
        const struct engine_stats stats = idle_stats(&b);
        assert_true(stats.cache_queries == 5 * 42);
        assert_true(stats.cache_hits == (policy == 0 ? 3 : 4) * 40);
        bench_end(&b);
        struct take *all[] = {old, in_b, first, again, running, after, last};
        for (int i = 0; i < 7; i++) free(all[i]);
    }
}

static void update_waits_for_drain(void **state)
{
    (void)state;
    struct bench b;
    struct test_child child;
    struct engine_options options = plain_options();
    options.kv_policy = KV_DRAIN;
    options.max_batch = 2;
    bench_start(&b, &options);
    assert_ok(engine_pause(b.engine, 10000));
    struct sampling s = greedy(450);
    struct take *first = submit(&b, 30, 4, &s), *second = submit(&b, 20, 5, &s);
    struct take *third = submit(&b, 10, 6, &s);
    b.slow_ms = 1;
    assert_ok(engine_resume(b.engine));
    await_tokens(&b, second, 0, 1);
    start_writer(&child, model_b, "1", false);
    await_done(&b, first);
    await_done(&b, second);
    await_done(&b, third);
    assert_int_equal(test_wait(&child, WAIT_MS), 0);
    struct take *last = submit(&b, 10, 6, &s);
    await_done(&b, last);
    struct take *all[] = {first, second, third, last};
    for (int i = 0; i < 4; i++) { // nobody saw two versions
        const struct sample_telemetry *t = &all[i]->sample[0].telemetry;
        assert_true(t->weight_version_first == t->weight_version_last);
    }
    assert_true(first->sample[0].telemetry.weight_version_last == 2);
    assert_true(last->sample[0].telemetry.weight_version_last == 4);
    for (int i = 0; i < 4; i++) free(all[i]);
    bench_end(&b);
}

static void many_updates_under_load(void **state)
{
    (void)state;
    struct bench b;
    struct test_child child;
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    start_writer(&child, model_a, "200", false);
    uint64_t seen = 0;
    for (int round = 0; test_running(&child) || round < 3; round++) {
        struct sampling s = random_sampling(100, (uint64_t)round);
        s.n = 4;
        struct take *take = submit(&b, 30, 4, &s);
        await_done(&b, take);
        for (int i = 0; i < 4; i++) {
            assert_versions_rise(take, i);
            for (int t = 0; t < take->sample[i].n; t++)
                assert_true(isfinite(take->sample[i].tokens[t].logprob));
        }
        assert_true(take->sample[0].telemetry.weight_version_first >= seen);
        seen = take->sample[0].telemetry.weight_version_last;
        free(take);
    }
    assert_int_equal(test_wait(&child, WAIT_MS), 0);
    assert_int_equal(stats_of(&b).updates, 200);
    assert_int_equal(stats_of(&b).weight_version, 402);
    bench_end(&b);
}

// The writer is killed with half of the weights overwritten: the same text goes on from restored
// ones.
static void torn_weights_are_restored(void **state)
{
    (void)state;
    struct bench b;
    struct test_child child;
    int32_t prompt[30];
    make_prompt(prompt, 30, 4);
    struct take *whole = reference(model_a, prompt, 30, 300);
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    struct sampling s = greedy(300);
    b.slow_ms = 3;
    struct take *take = submit_ids(&b, prompt, 30, &s);
    await_tokens(&b, take, 0, 3);
    assert_ok(engine_pause(b.engine, 10000));
    b.slow_ms = 0;
    assert_true(take->sample[0].n < 300);
    start_writer(&child, model_b, "0", true);
    assert_int_equal(test_wait(&child, WAIT_MS), 128 + SIGKILL);
    for (int i = 0; i < 5000 && stats_of(&b).restores == 0; i++) clock_sleep_ms(1);
    assert_ok(engine_resume(b.engine));
    await_done(&b, take);
    assert_same_tokens(whole, 0, take, 0);
    struct engine_stats stats = idle_stats(&b);
    assert_int_equal(stats.restores, 1);
    assert_int_equal(stats.state, ENGINE_OK);
    assert_true(stats.weight_version % 2 == 0 && stats.weight_version > 2);
    assert_versions_rise(take, 0);

    // Another trainer takes over, leaves a snapshot, and dies as well.
    start_writer(&child, model_b, "1", true);
    assert_int_equal(test_wait(&child, WAIT_MS), 128 + SIGKILL);
    for (int i = 0; i < 5000 && stats_of(&b).restores == 1; i++) clock_sleep_ms(1);
    assert_int_equal(stats_of(&b).restores, 2);
    assert_true(stats_of(&b).weight_version > stats.weight_version);
    struct take *in_b = reference(model_b, prompt, 30, 40), *now = greedy_of(&b, prompt, 30, 40);
    assert_same_tokens(in_b, 0, now, 0);
    free(whole);
    free(take);
    free(in_b);
    free(now);
    bench_end(&b);
}

// After a reload the weights to go back to are the reloaded ones: neither those of the start, nor a
// trainer's snapshot from before.
static void reloaded_weights_are_restored(void **state)
{
    (void)state;
    struct bench b;
    struct test_child child;
    int32_t prompt[30];
    make_prompt(prompt, 30, 4);
    struct engine_options options = plain_options();
    struct take *in_b = reference(model_b, prompt, 30, 40);
    bench_start(&b, &options);
    start_writer(&child, model_a, "1", false); // leaves model_a as its snapshot
    assert_int_equal(test_wait(&child, WAIT_MS), 0);
    assert_ok(engine_reload(b.engine, model_b, NULL, on_reload, &b));
    await_command(&b);
    assert_int_equal(b.command_status, ST_OK);
    start_writer(&child, model_a, "0", true);
    assert_int_equal(test_wait(&child, WAIT_MS), 128 + SIGKILL);
    for (int i = 0; i < 5000 && stats_of(&b).restores == 0; i++) clock_sleep_ms(1);
    assert_int_equal(stats_of(&b).restores, 1);
    struct take *now = greedy_of(&b, prompt, 30, 40);
    assert_same_tokens(in_b, 0, now, 0);
    free(in_b);
    free(now);
    bench_end(&b);
}

// --daemon BRIDGE FOLDER N [stay]: an engine on the same bridge. Prints how it fared; may stay
// until it is killed.
static int daemon_main(bool stay, char **argv)
{
    struct engine_options options = {.model_folder = argv[3],
                                     .device = "cpu",
                                     .dtype = -1,
                                     .kv_bytes = 1 << 20,
                                     .bridge_path = argv[2],
                                     .socket_path = "s"};
    struct bench b = {0};
    struct engine_stats stats = {0};
    if (engine_new(&options, on_event, &b, &b.engine) != ST_OK) return 2;
    while (stats.state == ENGINE_LOADING) engine_stats(b.engine, &stats);
    printf("%s\n", stats.state_detail);
    while (stay) pause();
    engine_free(b.engine, 0);
    return stats.state != ENGINE_OK;
}

static void second_daemon_is_refused(void **state)
{
    (void)state;
    struct bench b;
    struct test_child child;
    int32_t prompt[5] = {1, 2, 3, 4, 5};
    struct engine_options options = plain_options();
    bench_start(&b, &options);
    start_self(&child, "--daemon", model_a, "0", false);
    assert_int_equal(test_wait(&child, WAIT_MS), 1);
    char *log = test_read(child.log);
    assert_contains(log, "another daemon uses this bridge");
    free(log);
    assert_true(file_exists(options.bridge_path));
    start_writer(&child, model_b, "1", false); // and the first one's bridge works
    assert_int_equal(test_wait(&child, WAIT_MS), 0);
    struct take *take = greedy_of(&b, prompt, 5, 5);
    assert_int_equal(take->sample[0].tokens[0].weight_version, 4);
    free(take);
    bench_end(&b);
}

// A daemon that was killed leaves page, arena and bridge file; the next one takes their place.
static void killed_daemon_is_replaced(void **state)
{
    (void)state;
    struct bench b;
    char left[192];
    struct test_child child;
    struct engine_options options = plain_options();
    start_self(&child, "--daemon", model_a, "0", true);
    for (int i = 0; i < WAIT_MS && !file_exists(options.bridge_path); i++) clock_sleep_ms(1);
    test_kill(&child, SIGKILL);
    test_end(&child);
    struct bridge_file *file = NULL;
    assert_ok(bridge_file_read(options.bridge_path, &file));
    snprintf(left, sizeof left, "/dev/shm%s", file->roles[0].handle);
    bridge_file_free(file);
    assert_true(file_exists(left));
    bench_start(&b, &options);
    assert_false(file_exists(left));
    start_writer(&child, model_b, "1", false);
    assert_int_equal(test_wait(&child, WAIT_MS), 0);
    assert_int_equal(stats_of(&b).updates, 1);
    bench_end(&b);
    assert_false(file_exists(options.bridge_path));
}

// What it left in shared memory goes when any daemon starts, also one with another bridge; what a
// living one uses stays.
static void killed_daemons_memory_is_freed(void **state)
{
    (void)state;
    struct bench b, living;
    char arena[192], page[192], living_page[192];
    struct test_child child;
    struct bridge_file *file = NULL;
    struct engine_options options = plain_options(), other = options;
    start_self(&child, "--daemon", model_a, "0", true);
    for (int i = 0; i < WAIT_MS && !file_exists(options.bridge_path); i++) clock_sleep_ms(1);
    test_end(&child); // SIGKILL
    assert_ok(bridge_file_read(options.bridge_path, &file));
    snprintf(arena, sizeof arena, "/dev/shm%s", file->roles[0].handle);
    snprintf(page, sizeof page, "/dev/shm%s", file->control_page);
    bridge_file_free(file);
    assert_true(file_exists(arena) && file_exists(page));

    other.bridge_path = test_path(folder, "other-bridge.json");
    bench_start(&living, &other);
    assert_false(file_exists(arena) || file_exists(page));
    assert_ok(bridge_file_read(other.bridge_path, &file));
    snprintf(living_page, sizeof living_page, "/dev/shm%s", file->control_page);
    bridge_file_free(file);
    bench_start(&b, &options);
    assert_true(file_exists(living_page));
    bench_end(&b);
    bench_end(&living);
}

// ---- main --------------------------------------------------------------------------------------

static int set_up(void **state)
{
    (void)state;
    folder = test_folder();
    model_a = test_path(folder, "a");
    model_b = test_path(folder, "b");
    return tiny_model_write(model_a, 32, 2, VOCAB, 1) || tiny_model_write(model_b, 32, 2, VOCAB, 2);
}

int main(int argc, char **argv)
{
    if (argc > 4 && strcmp(argv[1], "--writer") == 0) return writer_main(argc, argv);
    if (argc > 4 && strcmp(argv[1], "--daemon") == 0) return daemon_main(argc > 5, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_is_the_same_in_any_batch),
        cmocka_unit_test(seed_is_the_same_in_any_batch),
        cmocka_unit_test(group_shares_its_prompt),
        cmocka_unit_test(forks_read_the_whole_prompt),
        cmocka_unit_test(cache_changes_no_bit),
        cmocka_unit_test(stops_and_minimum),
        cmocka_unit_test(eos_of_the_config),
        cmocka_unit_test(lists_most_likely),
        cmocka_unit_test(refuses_what_it_cannot_do),
        cmocka_unit_test(wrong_options),
        cmocka_unit_test(loading_fails),
        cmocka_unit_test(cancels),
        cmocka_unit_test(ends_with_and_without_drain),
        cmocka_unit_test(reloads),
        cmocka_unit_test(update_keeps_keys),
        cmocka_unit_test(update_recomputes_keys),
        cmocka_unit_test(update_leaves_no_stale_block),
        cmocka_unit_test(update_waits_for_drain),
        cmocka_unit_test(many_updates_under_load),
        cmocka_unit_test(torn_weights_are_restored),
        cmocka_unit_test(reloaded_weights_are_restored),
        cmocka_unit_test(second_daemon_is_refused),
        cmocka_unit_test(killed_daemon_is_replaced),
        cmocka_unit_test(killed_daemons_memory_is_freed),
    };
    return cmocka_run_group_tests_name("engine", tests, set_up, NULL);
}
