/* test_state_cache.c: models that carry a state along each sequence (tests/golden) and the prefix
 * cache: whatever of a prompt is found, evicted, preempted, drafted or written by two models, what
 * is sampled has the bits of an engine that finds nothing, and of the packed pass. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "infer-server/engine/kv_memory.h"
#include "tests/support/engine_bench.h"
#include "tests/support/loaded.h"

enum { MIX = 60, LONGEST = 150, LIKE = 128 }; // tokens that all of these models know

static const char *const families[] = {"qwen35", "qwen3-next", "nemotron-h-moe", "lfm2"};
enum { FAMILIES = sizeof families / sizeof *families };

static int32_t prompts[MIX][LONGEST];
static int lengths[MIX];

// Two texts up to some place, and then of their own: beyond borders of 64 positions.
static void fill_prompts(void)
{
    struct rng r;
    rng_init(&r, 77, 0);
    for (int i = 0; i < MIX; i++) {
        const uint32_t text = 3 + 8 * rng_below(&r, 2);
        const int turn = (int)rng_below(&r, LONGEST + 90);
        lengths[i] = 1 + (int)rng_below(&r, LONGEST);
        for (int k = 0; k < lengths[i]; k++)
            prompts[i][k] = (int32_t)((text * (uint32_t)(k + 1) + (k < turn ? 0 : (uint32_t)i) +
                                       (uint32_t)(k * k) % 11) %
                                      LIKE);
    }
}

static struct engine_options options_for(const char *policy, const char *frozen)
{
    struct engine_options options = plain_options();
    options.model_folder = policy;
    options.frozen_folder = frozen;
    options.max_context = LONGEST + 32;
    options.max_queue = 256;
    options.prefill_chunk = 70;
    options.speculative_fixed = 1;
    options.kv_bytes = 16 << 20;
    return options;
}

static struct sampling sampling_of(int i, bool tandem, bool drafts)
{
    struct sampling s = random_sampling(2 + i * 7 % 25, (uint64_t)i + 1);
    s.n = i % 4 ? 1 : 3;
    s.logprobs = 0;
    if (tandem)
        s.tandem =
            (struct tandem_choice){.on = true, .selector = TANDEM_CHUNK, .p = 0.5, .chunk = 3};
    else if (drafts && i % 3 == 0)
        s.speculative = (struct speculative_choice){.chosen = true, .k[SPECULATIVE_NGRAM] = 4};
    return s;
}

static struct engine_stats run_mix(const struct engine_options *options, struct take *ret[MIX])
{
    struct bench b;
    bench_start(&b, options);
    for (int i = 0, n_awaited = 0; i < MIX || n_awaited < MIX; i++) {
        const bool drafts = speculative_max(options->speculative) > 0;
        const struct sampling s = sampling_of(i, options->frozen_folder != NULL, drafts);
        if (i < MIX) ret[i] = submit_ids(&b, prompts[i], lengths[i], &s);
        if (i >= 12) await_done(&b, ret[n_awaited++]);
    }
    const struct engine_stats stats = idle_stats(&b);
    assert_int_equal(stats.kv_blocks_used, 0);
    bench_end(&b);
    return stats;
}

static void assert_same_mix(struct take *const a[MIX], struct take *const b[MIX])
{
    for (int i = 0; i < MIX; i++)
        for (int k = 0; k < MAX_SAMPLES; k++) assert_same_records(a[i], k, b[i], k);
}

// With nothing to find, with room for all, and with that for few states.
static void serve_mix(const char *policy, const char *frozen)
{
    struct take *off[MIX], *roomy[MIX], *tight[MIX];
    struct engine_options options = options_for(policy, frozen);
    struct model_config *config = config_of(policy);
    int64_t state_bytes = kv_memory_state_bytes(config);
    if (frozen) state_bytes += kv_memory_state_bytes(config_of(frozen));
    fill_prompts();
    options.prefix_cache_off = true;
    assert_true(run_mix(&options, off).cache_hits == 0);
    options.prefix_cache_off = false;
    options.speculative.k[SPECULATIVE_NGRAM] = frozen ? 0 : 4;
    const struct engine_stats all = run_mix(&options, roomy);
    assert_true(all.cache_hits * 5 > all.cache_queries);
    assert_same_mix(off, roomy);

    const bool bound = 18 * state_bytes > 1 << 17; // half of it are states: 9
    options.kv_bytes = bound ? 18 * state_bytes : 1 << 17;
    options.max_batch = 6;
    options.prefill_chunk = 21;
    const struct engine_stats few = run_mix(&options, tight);
    assert_true(few.cache_hits > 0 && (!bound || few.cache_hits < all.cache_hits));
    assert_same_mix(off, tight);
    printf("%s: %d of %d tokens found, with few states %d\n", policy, (int)all.cache_hits,
           (int)all.cache_queries, (int)few.cache_hits);
    struct reference *r = reference_of(policy);
    for (int i = 0; i < MIX && !frozen; i++)
        for (int k = 0; k < sampling_of(i, false, false).n; k++)
            assert_as_packed(r, prompts[i], lengths[i], tight[i], k);
}

TEST(kept_states_change_no_bit)
{
    for (int i = 0; i < FAMILIES; i++) serve_mix(lasting_model(test_golden(families[i])), NULL);
}

// Either of the two that write, or both, may carry states.
TEST(two_models_write_as_each_alone)
{
    serve_mix(lasting_model(test_golden("qwen35")), test_golden("olmo2"));
    serve_mix(test_golden("olmo2"), lasting_model(test_golden("qwen35")));
    serve_mix(lasting_model(test_golden("nemotron-h-moe")),
              lasting_model(test_golden("qwen3-next")));
}

// Each token of a tandem's group is its author's, to the bit.
TEST(each_token_is_its_authors)
{
    enum { PROMPT = 83, NEW = 60, GROUP = 4 };
    const char *policy = lasting_model(test_golden("qwen35")), *frozen = test_golden("olmo2");
    struct engine_options options = options_for(policy, frozen);
    struct bench *b = bench_of(&options);
    struct reference *r[2] = {reference_of(policy), reference_of(frozen)};
    for (int selector = TANDEM_BERNOULLI; selector <= TANDEM_CHUNK; selector++) {
        struct sampling s = random_sampling(NEW, (uint64_t)selector);
        int32_t prompt[PROMPT];
        int n_frozen = 0;
        for (int i = 0; i < PROMPT; i++) prompt[i] = (i * i + 7 * i + selector) % LIKE;
        s.n = GROUP;
        s.logprobs = 0;
        s.tandem = (struct tandem_choice){.on = true, .selector = selector, .p = 0.5, .chunk = 5};
        struct take *take = run_ids(b, prompt, PROMPT, &s);
        for (int k = 0; k < GROUP; k++) {
            float packed[2][MAX_TOKENS];
            for (int m = 0; m < 2; m++) packed_logprobs(r[m], prompt, PROMPT, take, k, packed[m]);
            assert_int_equal(take->sample[k].n, NEW);
            for (int i = 0; i < NEW; i++) {
                const struct token_record *token = &take->sample[k].tokens[i];
                assert_same_logprob(token, packed[token->frozen][i], i);
                n_frozen += token->frozen;
            }
        }
        assert_in_range(n_frozen, 1, GROUP * NEW - 1);
    }
}

static int cached_of(const struct take *take)
{
    return take->sample[0].telemetry.cached_prompt_tokens;
}

// New weights find nothing that older ones left, and what begins at a kept state is of one version.
TEST(states_are_of_one_version)
{
    struct engine_options options = options_for(test_golden("qwen35"), NULL);
    options.kv_policy = KV_KEEP;
    struct bench *b = bench_of(&options);
    int32_t prompt[80];
    for (int i = 0; i < 80; i++) prompt[i] = i * i % LIKE;
    struct take *first = greedy_of(b, prompt, 71, 12), *again = greedy_of(b, prompt, 71, 12);
    assert_int_equal(cached_of(first), 0);
    assert_int_equal(cached_of(again), 68);
    assert_same_records(first, 0, again, 0);
    b->slow_ms = 2;
    struct sampling s = random_sampling(90, 9);
    struct take *running = submit_ids(b, prompt, 80, &s);
    await_tokens(b, running, 0, 2);
    assert_ok(engine_pause(b->engine, 10000));
    run_writer(test_golden("qwen35"), "1", false);
    assert_ok(engine_resume(b->engine));
    struct take *after = greedy_of(b, prompt, 71, 12), *last = greedy_of(b, prompt, 71, 12);
    assert_true(after->sample[0].tokens[0].weight_version == 4);
    assert_int_equal(cached_of(after), 0);
    assert_int_equal(cached_of(last), 68);
    assert_same_tokens(first, 0, last, 0); // the same numbers were written
    b->slow_ms = 0;
    await_done(b, running);
}

// Without a prefix cache no memory is for states that nobody finds, and no prompt is cut for one.
TEST(without_a_cache_none_is_kept)
{
    struct engine_options options = options_for(longer_model(test_golden("qwen35")), NULL);
    int blocks[2];
    int32_t prompt[70];
    for (int i = 0; i < 70; i++) prompt[i] = i * i % LIKE;
    options.kv_bytes = 2 << 20;
    options.max_context = 2048;
    options.max_batch = 4;
    for (int off = 0; off < 2; off++) {
        options.prefix_cache_off = off;
        struct bench b;
        bench_start(&b, &options);
        greedy_of(&b, prompt, 70, 1);
        while (stats_of(&b).steps == 0) clock_sleep_ms(1); // they come behind a step's events
        const struct engine_stats stats = idle_stats(&b);
        bench_end(&b);
        assert_int_equal(stats.steps, off ? 1 : 2);
        blocks[off] = stats.kv_blocks_total;
    }
    assert_true(blocks[1] > blocks[0]);
}

TESTS_BETWEEN(engine_bench_set_up, NULL)

int main(int argc, char **argv)
{
    if (argc > 4 && strcmp(argv[1], "--writer") == 0) return writer_main(argc, argv);
    test_only(argc, argv);
    return test_main();
}
