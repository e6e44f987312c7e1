/* test_engine_updates.c: other weights under a running engine: reloaded, and written by another
 * process through the real bridge, which may die over it. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/engine_bench.h"
#include "tests/support/tiny_model.h"

// ---- commands ----------------------------------------------------------------------------------

static void on_info(void *context, const struct engine_bridge_info *info)
{
    struct bench *b = context;
    pthread_mutex_lock(&b->lock);
    b->commanded = true;
    b->info_given = info != NULL;
    if (info) {
        b->version = info->version;
        b->canary = info->canaries[0];
        if (info->checksums) memcpy(b->first_sums, info->checksums, sizeof b->first_sums);
    }
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

static void get_info(struct bench *b, bool checksums)
{
    assert_ok(engine_bridge_info(b->engine, checksums, on_info, b));
    await_command(b);
}

static void reload(struct bench *b, const char *model)
{
    assert_ok(engine_reload(b->engine, model, NULL, on_command, b));
    await_command(b);
    assert_ok(b->command_status);
}

static void await_restores(struct bench *b, int n)
{
    for (int i = 0; i < 5000 && stats_of(b).restores < (uint64_t)n; i++) clock_sleep_ms(1);
    assert_int_equal(stats_of(b).restores, n);
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

TEST(reloads)
{
    int32_t prompt[20];
    make_prompt(prompt, 20, 8);
    struct take *a = reference(model_a, prompt, 20, 30), *in_b = reference(model_b, prompt, 20, 30);
    struct bench *b = bench_plain();
    get_info(b, true);
    assert_true(b->info_given);
    assert_int_equal(b->version, 2);
    const uint64_t sums[2] = {b->first_sums[0], b->first_sums[1]};

    assert_ok(engine_reload(b->engine, test_path(folder, "nowhere"), NULL, on_command, b));
    await_command(b);
    assert_int_not_equal(b->command_status, ST_OK);
    assert_contains(b->message, "nowhere");
    struct take *still = greedy_of(b, prompt, 20, 30);
    assert_same_tokens(a, 0, still, 0);

    reload(b, model_b);
    assert_int_equal(b->version % 2, 0);
    const uint64_t version = b->version;
    struct take *now = greedy_of(b, prompt, 20, 30);
    assert_same_tokens(in_b, 0, now, 0);
    assert_true(now->sample[0].tokens[0].weight_version == version && version > 2);
    get_info(b, true);
    assert_true(b->first_sums[0] != sums[0] && b->first_sums[1] != sums[1]);
}

// ---- another process writes --------------------------------------------------------------------

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
    run_writer(model_b, "1", false); // updates are served while paused
    assert_int_equal(take->sample[0].n, before);
    assert_ok(engine_resume(b.engine));
    await_done(&b, take);
    assert_int_equal(stats_of(&b).updates, 1);
    assert_int_equal(stats_of(&b).weight_version, 4);
    for (int i = 0; i < 2; i++) assert_versions_rise(take, i);
    for (int t = 0; t < 400; t++)
        assert_int_equal(take->sample[0].tokens[t].weight_version, t < before ? 2 : 4);
    assert_ok(engine_bridge_info(b.engine, false, on_info, &b));
    await_command(&b);
    assert_memory_equal(&b.canary, "commonwt", 8);
    bench_end(&b);

    for (int t = 0; t < before; t++) text[30 + t] = take->sample[0].tokens[t].token;
    struct take *remaining = reference(model_b, text, 30 + before, 40);
    int same = 0;
    for (int t = 0; t < 40; t++)
        same += remaining->sample[0].tokens[t].token == take->sample[0].tokens[before + t].token;
    if (policy == KV_RECOMPUTE)
        assert_int_equal(same, 40);
    else
        assert_true(same < 40); // the keys and values of A show
}

TEST(update_keeps_keys)
{
    update_in_flight(KV_KEEP);
}

TEST(update_recomputes_keys)
{
    update_in_flight(KV_RECOMPUTE);
}

// The same prompt before and after an update: the second answer is, to the bit, that of a server
// that started with the new weights, though a sample with the old blocks runs on over the update.
TEST(update_leaves_no_stale_block)
{
    for (int policy = 0; policy < 2; policy++) {
        int32_t prompt[42];
        make_prompt(prompt, 42, 4);
        struct take *old = reference(model_a, prompt, 42, 30);
        struct take *in_b = reference(model_b, prompt, 42, 30);
        struct engine_options options = plain_options();
        options.kv_policy = policy == 0 ? KV_KEEP : KV_RECOMPUTE;
        struct bench *b = bench_of(&options);
        struct take *first = greedy_of(b, prompt, 42, 30);
        struct take *again = greedy_of(b, prompt, 42, 30);
        assert_int_equal(first->sample[0].telemetry.cached_prompt_tokens, 0);
        assert_int_equal(again->sample[0].telemetry.cached_prompt_tokens, 40);
        assert_same_records(old, 0, first, 0);
        assert_same_records(old, 0, again, 0);

        struct sampling s = random_sampling(400, 9);
        b->slow_ms = 2;
        struct take *running = submit_ids(b, prompt, 42, &s);
        await_tokens(b, running, 0, 2);
        assert_ok(engine_pause(b->engine, 10000));
        const int before = tokens_of(b, running, 0);
        assert_true(before < 350);
        run_writer(model_b, "1", false); // updates are served while paused
        assert_ok(engine_resume(b->engine));
        await_tokens(b, running, 0, before + 1);
        struct take *after = greedy_of(b, prompt, 42, 30);
        assert_true(after->sample[0].tokens[0].weight_version == 4);
        assert_same_records(in_b, 0, after, 0);
        // what runs on has computed its prompt again by then, or holds nothing of use
        assert_int_equal(after->sample[0].telemetry.cached_prompt_tokens, policy == 0 ? 0 : 40);
        struct take *last = greedy_of(b, prompt, 42, 30);
        assert_int_equal(last->sample[0].telemetry.cached_prompt_tokens, 40);
        assert_same_records(in_b, 0, last, 0);
        b->slow_ms = 0;
        engine_cancel(b->engine, running->request, -1);
        await_done(b, running);
        const struct engine_stats stats = idle_stats(b);
        assert_true(stats.cache_queries == 5 * 42);
        assert_true(stats.cache_hits == (policy == 0 ? 3 : 4) * 40);
    }
}

TEST(update_waits_for_drain)
{
    struct test_child child;
    struct engine_options options = plain_options();
    options.kv_policy = KV_DRAIN;
    options.max_batch = 2;
    struct bench *b = bench_of(&options);
    assert_ok(engine_pause(b->engine, 10000));
    struct sampling s = greedy(450);
    struct take *first = submit(b, 30, 4, &s), *second = submit(b, 20, 5, &s);
    struct take *third = submit(b, 10, 6, &s);
    b->slow_ms = 1;
    assert_ok(engine_resume(b->engine));
    await_tokens(b, second, 0, 1);
    start_writer(&child, model_b, "1", false);
    await_done(b, first);
    await_done(b, second);
    await_done(b, third);
    assert_int_equal(test_wait(&child, WAIT_MS), 0);
    struct take *last = run(b, 10, 6, &s);
    struct take *all[] = {first, second, third, last};
    for (int i = 0; i < 4; i++) { // nobody saw two versions
        const struct sample_telemetry *t = &all[i]->sample[0].telemetry;
        assert_true(t->weight_version_first == t->weight_version_last);
    }
    assert_true(first->sample[0].telemetry.weight_version_last == 2);
    assert_true(last->sample[0].telemetry.weight_version_last == 4);
}

TEST(many_updates_under_load)
{
    struct test_child child;
    struct bench *b = bench_plain();
    start_writer(&child, model_a, "200", false);
    uint64_t seen = 0;
    for (int round = 0; test_running(&child) || round < 3; round++) {
        struct sampling s = random_sampling(100, (uint64_t)round);
        s.n = 4;
        struct take *take = run(b, 30, 4, &s);
        for (int i = 0; i < 4; i++) {
            assert_versions_rise(take, i);
            for (int t = 0; t < take->sample[i].n; t++)
                assert_true(isfinite(take->sample[i].tokens[t].logprob));
        }
        assert_true(take->sample[0].telemetry.weight_version_first >= seen);
        seen = take->sample[0].telemetry.weight_version_last;
    }
    assert_int_equal(test_wait(&child, WAIT_MS), 0);
    assert_int_equal(stats_of(b).updates, 200);
    assert_int_equal(stats_of(b).weight_version, 402);
}

// The writer is killed with half of the weights overwritten: the same text goes on from restored
// ones.
TEST(torn_weights_are_restored)
{
    int32_t prompt[30];
    make_prompt(prompt, 30, 4);
    struct take *whole = reference(model_a, prompt, 30, 300);
    struct bench *b = bench_plain();
    struct sampling s = greedy(300);
    b->slow_ms = 3;
    struct take *take = submit_ids(b, prompt, 30, &s);
    await_tokens(b, take, 0, 3);
    assert_ok(engine_pause(b->engine, 10000));
    b->slow_ms = 0;
    assert_true(take->sample[0].n < 300);
    run_writer(model_b, "0", true);
    await_restores(b, 1);
    assert_ok(engine_resume(b->engine));
    await_done(b, take);
    assert_same_tokens(whole, 0, take, 0);
    struct engine_stats stats = idle_stats(b);
    assert_int_equal(stats.restores, 1);
    assert_int_equal(stats.state, ENGINE_OK);
    assert_true(stats.weight_version % 2 == 0 && stats.weight_version > 2);
    assert_versions_rise(take, 0);

    // Another trainer takes over, leaves a snapshot, and dies as well.
    run_writer(model_b, "1", true);
    await_restores(b, 2);
    assert_true(stats_of(b).weight_version > stats.weight_version);
    struct take *in_b = reference(model_b, prompt, 30, 40), *now = greedy_of(b, prompt, 30, 40);
    assert_same_tokens(in_b, 0, now, 0);
}

// After a reload the weights to go back to are the reloaded ones: neither those of the start, nor a
// trainer's snapshot from before.
TEST(reloaded_weights_are_restored)
{
    int32_t prompt[30];
    make_prompt(prompt, 30, 4);
    struct take *in_b = reference(model_b, prompt, 30, 40);
    struct bench *b = bench_plain();
    run_writer(model_a, "1", false); // leaves model_a as its snapshot
    reload(b, model_b);
    run_writer(model_a, "0", true);
    await_restores(b, 1);
    struct take *now = greedy_of(b, prompt, 30, 40);
    assert_same_tokens(in_b, 0, now, 0);
}

TESTS_BETWEEN(engine_bench_set_up, NULL)

int main(int argc, char **argv)
{
    if (argc > 4 && strcmp(argv[1], "--writer") == 0) return writer_main(argc, argv);
    return test_main();
}
