/* test_engine.c: the same text, to the bit, whatever is in the batch: crowds, groups that share a
 * prompt, preemption, the prefix cache. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/engine_bench.h"

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
    }
}

TEST(greedy_is_the_same_in_any_batch)
{
    compare_crowds(0);
}

TEST(seed_is_the_same_in_any_batch)
{
    compare_crowds(1);
}

TEST(group_shares_its_prompt)
{
    struct bench *b = bench_plain();
    struct sampling s = random_sampling(400, 5);
    s.n = 6;
    b->slow_ms = 1;
    struct take *group = submit(b, 42, 1, &s);
    await_tokens(b, group, 5, 3);
    assert_ok(engine_pause(b->engine, 10000));
    b->slow_ms = 0;
    int wanted = 42 / 4; // the prompt's full blocks, once
    for (int i = 0; i < 6; i++) {
        int computed = 42 + group->sample[i].n - 1; // the last token's keys come with the next step
        wanted += (computed + 3) / 4 - 42 / 4;
    }
    assert_int_equal(stats_of(b).kv_blocks_used, wanted);
    engine_cancel(b->engine, group->request, -1);
    assert_ok(engine_resume(b->engine));
    await_done(b, group);

    // Sample i draws from the same stream in a group of any size, and not its sibling's.
    s.max_tokens = 12;
    struct take *six = run(b, 42, 1, &s);
    s.n = 3;
    struct take *three = run(b, 42, 1, &s);
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
    assert_int_equal(t->kv_bytes_peak, (42 + 11 + 3) / 4 * stats_of(b).kv_bytes_per_block);
    assert_true(t->queue_ms >= 0 && t->first_token_ms >= t->queue_ms &&
                t->latency_ms >= t->first_token_ms);
    assert_int_equal(idle_stats(b).kv_blocks_used, 0);
}

// With the prompt ending at every place of a block, siblings read what one alone would have
// computed.
TEST(siblings_read_the_whole_prompt)
{
    struct bench *b = bench_plain();
    for (int n_prompt = 2; n_prompt < 14; n_prompt++) {
        struct sampling s = greedy(24);
        struct take *alone = run(b, n_prompt, 50, &s);
        s.n = 4;
        struct take *group = run(b, n_prompt, 50, &s);
        for (int i = 0; i < 4; i++) assert_same_tokens(alone, 0, group, i);
    }
}

// ---- prefix cache ------------------------------------------------------------------------------

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

TEST(cache_changes_no_bit)
{
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
        for (int k = 0; k < MAX_SAMPLES; k++) {
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
    }
    assert_true(cached == stats.cache_hits);
}

TESTS_BETWEEN(engine_bench_set_up, NULL)
