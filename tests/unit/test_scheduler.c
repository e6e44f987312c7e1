/* test_scheduler.c: plans without a device. `run_step` plays the engine: it checks a plan against
 * the rules that every plan must keep, keeps a model of what each block of the pool holds, and
 * "draws". */
#include "tests/support/support.h"
#include "common/base/rng.h"
#include "infer-server/sampler.h"
#include "infer-server/scheduler.h"
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 4, MOST_BLOCKS = 512 };

struct world {
    struct scheduler *scheduler;
    struct kv_cache *cache;
    int max_batch, chunk;
    int steps, most_running;
    int32_t content[MOST_BLOCKS * BLOCK]; // the token whose keys and values lie at each slot
    int64_t computed_tokens;
};

static void world_init(struct world *w, int n_blocks, int max_batch, int chunk)
{
    memset(w, 0, sizeof *w);
    const struct scheduler_limits limits = {.max_batch = max_batch, .prefill_chunk = chunk};
    w->max_batch = max_batch;
    w->chunk = chunk;
    assert_ok(kv_cache_new(n_blocks, BLOCK, &w->cache));
    assert_ok(scheduler_new(&limits, w->cache, &w->scheduler));
    scheduler_update(w->scheduler, 2, false);
}

static void world_release(struct world *w)
{
    scheduler_free(w->scheduler);
    kv_cache_free(w->cache);
}

static struct request *add(struct world *w, int n_prompt, int n, int max_tokens)
{
    struct request *r = NULL;
    int32_t prompt[256];
    const struct sampling sampling = {.n = n, .max_tokens = max_tokens, .top_p = 1};
    for (int i = 0; i < n_prompt; i++) prompt[i] = 1000 * n_prompt + i;
    assert_ok(request_new(prompt, n_prompt, &sampling, NULL, &r));
    assert_ok(request_prepare(r, BLOCK, 0));
    assert_true(scheduler_add(w->scheduler, r));
    return r;
}

static int32_t next_token(const struct sample *s) // a function of the sample and the position
{
    return 100000 + s->index * 1000 + s->n_generated;
}

static void check_item(struct world *w, const struct step_item *item)
{
    const struct sample *s = item->sample;
    assert_int_equal(s->state, SAMPLE_RUNNING);
    assert_true(item->n >= 1 && item->first + item->n <= sample_length(s));
    assert_true(s->n_blocks * BLOCK >= item->first + item->n);
    for (int p = item->first; p < item->first + item->n; p++) { // writes only into its own blocks
        int32_t token;
        sample_tokens(s, p, 1, &token);
        assert_int_equal(kv_cache_holders(w->cache, s->blocks[p / BLOCK]), 1);
        w->content[s->blocks[p / BLOCK] * BLOCK + p % BLOCK] = token;
        w->computed_tokens++;
    }
    for (int p = 0; p < item->first; p++) { // and reads what it would have written
        int32_t token;
        sample_tokens(s, p, 1, &token);
        assert_int_equal(w->content[s->blocks[p / BLOCK] * BLOCK + p % BLOCK], token);
    }
}

// False where there was nothing to do. Samples that reach max_tokens are removed.
static bool run_step(struct world *w, enum scheduler_admit admit)
{
    const struct step *step = scheduler_plan(w->scheduler, admit);
    int n_prefill = 0, n_tokens = 0;
    bool pure = true;
    // A prompt's blocks are written before siblings that fork become holders, in the engine by the
    // order of the device's work; here forks of this very step are told apart by their copies.
    for (int i = 0; i < step->n_items; i++) {
        const struct step_item *item = &step->items[i];
        const struct sample *s = item->sample;
        bool forked = false;
        for (int d = 0; d < step->n_draws; d++)
            forked |= step->draws[d].item == i && step->draws[d].sample != s;
        if (!forked) {
            check_item(w, item);
        } else {
            for (int p = item->first; p < item->first + item->n; p++)
                sample_tokens(s, p, 1, &w->content[s->blocks[p / BLOCK] * BLOCK + p % BLOCK]);
            w->computed_tokens += item->n;
        }
        n_tokens += item->n;
        if (item->n > 1 || s->n_generated == 0) n_prefill += item->n;
        pure &= item->n == 1 && i < step->n_draws && step->draws[i].sample == s;
    }
    for (int i = 0; i < step->n_copies; i++)
        memcpy(w->content + step->copies[i].to * BLOCK, w->content + step->copies[i].from * BLOCK,
               BLOCK * sizeof *w->content);
    assert_int_equal(step->n_tokens, n_tokens);
    assert_true(n_prefill <= w->chunk);
    assert_true(step->n_items <= w->max_batch && step->n_draws <= w->max_batch);
    assert_true(scheduler_running(w->scheduler) <= w->max_batch);
    if (step->n_items) assert_int_equal(step->pure_decode, pure && step->n_draws == step->n_items);
    if (scheduler_running(w->scheduler) > w->most_running)
        w->most_running = scheduler_running(w->scheduler);
    for (int i = 0; i < step->n_draws; i++) {
        struct sample *s = step->draws[i].sample;
        assert_int_equal(s->computed, sample_length(s));
        scheduler_drawn(w->scheduler, s, next_token(s));
    }
    for (int i = 0; i < step->n_draws; i++) {
        struct sample *s = step->draws[i].sample;
        if (s->n_generated == s->request->sampling.max_tokens) scheduler_remove(w->scheduler, s);
    }
    w->steps += step->n_items > 0;
    return step->n_items > 0;
}

static void run_all(struct world *w)
{
    for (int i = 0; scheduler_running(w->scheduler) + scheduler_waiting(w->scheduler) > 0; i++) {
        assert_true(i < 100000);
        assert_true(run_step(w, ADMIT_ALL)); // never stuck
    }
    assert_int_equal(kv_cache_used(w->cache), 0);
}

static void assert_all_done(const struct request *r)
{
    for (int i = 0; i < r->sampling.n; i++) {
        const struct sample *s = &r->samples[i];
        assert_int_equal(s->state, SAMPLE_DONE);
        assert_int_equal(s->n_generated, r->sampling.max_tokens);
        for (int k = 0; k < s->n_generated; k++)
            assert_int_equal(s->generated[k], 100000 + i * 1000 + k);
    }
}

static void prompt_goes_in_chunks(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 64, 4, 8);
    struct request *r = add(&w, 20, 1, 3);
    const int wanted[] = {8, 8, 4, 1, 1};
    for (int i = 0; i < 5; i++) {
        int64_t before = w.computed_tokens;
        assert_true(run_step(&w, ADMIT_ALL));
        assert_int_equal(w.computed_tokens - before, wanted[i]);
    }
    assert_false(run_step(&w, ADMIT_ALL));
    assert_all_done(r);
    request_free(r);
    world_release(&w);
}

static void decode_goes_on_beside_prefill(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 64, 4, 8);
    struct request *a = add(&w, 3, 1, 10);
    assert_true(run_step(&w, ADMIT_ALL));
    struct request *b = add(&w, 24, 1, 2);
    for (int i = 0; i < 3; i++) assert_true(run_step(&w, ADMIT_ALL));
    assert_int_equal(a->samples[0].n_generated, 4); // one token in each of the prefill's steps
    assert_int_equal(b->samples[0].n_generated, 1);
    run_all(&w);
    assert_all_done(a);
    assert_all_done(b);
    request_free(a);
    request_free(b);
    world_release(&w);
}

static void group_computes_its_prompt_once(void **state)
{
    (void)state;
    for (int n_prompt = 1; n_prompt <= 13; n_prompt++) {
        struct world w;
        world_init(&w, 128, 8, 5);
        struct request *r = add(&w, n_prompt, 6, 4);
        while (r->samples[0].n_generated == 0) assert_true(run_step(&w, ADMIT_ALL));
        assert_int_equal(w.computed_tokens, n_prompt);
        for (int i = 0; i < 6; i++) assert_int_equal(r->samples[i].n_generated, 1);
        // the full blocks once, and for each sample the last one, where it is partly filled
        assert_int_equal(kv_cache_used(w.cache), n_prompt / BLOCK + (n_prompt % BLOCK ? 6 : 0));
        run_all(&w);
        assert_int_equal(w.computed_tokens, n_prompt + 6 * 3);
        assert_all_done(r);
        request_free(r);
        world_release(&w);
    }
}

static void group_larger_than_batch(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 128, 3, 16);
    struct request *r = add(&w, 9, 8, 5);
    struct request *behind = add(&w, 2, 1, 2);
    run_all(&w);
    assert_all_done(r);
    assert_all_done(behind);
    assert_int_equal(w.most_running, 3);
    request_free(r);
    request_free(behind);
    world_release(&w);
}

static void held_siblings_do_not_hold_up_others(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 128, 8, 4);
    struct request *group = add(&w, 40, 4, 2); // ten chunks
    struct request *single = add(&w, 2, 1, 2);
    assert_true(run_step(&w, ADMIT_ALL));
    assert_int_equal(scheduler_running(w.scheduler), 2); // the leader and the single
    assert_int_equal(scheduler_waiting(w.scheduler), 3);
    run_all(&w);
    assert_all_done(group);
    assert_all_done(single);
    request_free(group);
    request_free(single);
    world_release(&w);
}

static void preempts_the_youngest(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 8, 4, 16);                                      // 32 tokens
    struct request *a = add(&w, 8, 1, 16), *b = add(&w, 8, 1, 16); // each grows to 6 blocks
    int64_t order = 0;
    while (!scheduler_preemptions(w.scheduler)) assert_true(run_step(&w, ADMIT_ALL));
    assert_int_equal(a->samples[0].state, SAMPLE_RUNNING);
    assert_int_equal(b->samples[0].state, SAMPLE_WAITING);
    assert_true(b->samples[0].n_generated > 0); // its tokens stay
    assert_int_equal(b->samples[0].n_blocks, 0);
    while (a->samples[0].state != SAMPLE_DONE) {
        assert_true(run_step(&w, ADMIT_ALL));
        order += b->samples[0].state == SAMPLE_DONE;
    }
    assert_int_equal(order, 0);
    run_all(&w);
    assert_all_done(a);
    assert_all_done(b);
    request_free(a);
    request_free(b);
    world_release(&w);
}

static void update_recomputes_and_shares_again(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 128, 8, 64);
    struct request *r = add(&w, 10, 4, 8);
    for (int i = 0; i < 3; i++) assert_true(run_step(&w, ADMIT_ALL));
    scheduler_update(w.scheduler, 4, true);
    assert_int_equal(scheduler_running(w.scheduler), 0);
    assert_int_equal(scheduler_in_flight(w.scheduler), 4);
    assert_int_equal(kv_cache_used(w.cache), 0);
    int64_t before = w.computed_tokens;
    for (int i = 0; i < 2; i++) assert_true(run_step(&w, ADMIT_ALL));
    // the first computes 10 + 3 again and draws; the others share two full blocks of the prompt;
    // beside them the first decodes on
    assert_int_equal(w.computed_tokens - before, 13 + 3 * (13 - 8) + 1);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(r->samples[i].kv_version, 4);
        for (int k = 0; k < 2; k++)
            assert_int_equal(r->samples[i].blocks[k], r->samples[0].blocks[k]);
    }
    run_all(&w);
    assert_all_done(r);
    request_free(r);
    world_release(&w);
}

static void update_keeps(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 128, 2, 64);
    struct request *r = add(&w, 10, 4, 3); // two at a time
    assert_true(run_step(&w, ADMIT_ALL));
    scheduler_update(w.scheduler, 4, false);
    assert_int_equal(scheduler_running(w.scheduler), 2);
    int64_t before = w.computed_tokens;
    run_all(&w);
    // 2 * 2 decodes, and the late ones compute their prompt anew rather than read version 2's
    // blocks
    assert_int_equal(w.computed_tokens - before, 4 + 10 + 4);
    assert_all_done(r);
    request_free(r);
    world_release(&w);
}

static void drain_admits_only_started(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 8, 4, 16);
    struct request *a = add(&w, 8, 1, 16), *b = add(&w, 8, 1, 16);
    while (!scheduler_preemptions(w.scheduler)) assert_true(run_step(&w, ADMIT_ALL));
    struct request *c = add(&w, 2, 1, 2);
    while (scheduler_in_flight(w.scheduler)) assert_true(run_step(&w, ADMIT_STARTED));
    assert_all_done(a);
    assert_all_done(b);
    assert_int_equal(c->samples[0].state, SAMPLE_WAITING);
    assert_false(run_step(&w, ADMIT_STARTED));
    run_all(&w);
    assert_all_done(c);
    request_free(a);
    request_free(b);
    request_free(c);
    world_release(&w);
}

static void leader_cancelled(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 64, 4, 4);
    struct request *r = add(&w, 13, 3, 4);
    assert_true(run_step(&w, ADMIT_ALL));
    assert_ptr_equal(r->leader, &r->samples[0]);
    scheduler_remove(w.scheduler, &r->samples[0]);
    assert_null(r->leader);
    assert_int_equal(kv_cache_used(w.cache), 0);
    run_all(&w);
    assert_int_equal(r->samples[1].n_generated, 4);
    assert_int_equal(r->samples[2].n_generated, 4);
    request_free(r);
    world_release(&w);
}

// Requests of all shapes in a pool that is far too small, with updates and cancellations between
// the steps: every plan keeps the rules, every sample reads its own text, all end, no block is
// lost.
static void random_load(void **state)
{
    (void)state;
    enum { N = 60 };
    for (uint64_t seed = 0; seed < 40; seed++) {
        struct world w;
        struct request *requests[N];
        struct rng r;
        int n = 0;
        rng_init(&r, seed, 0);
        world_init(&w, 16 + (int)rng_below(&r, 24), 1 + (int)rng_below(&r, 9),
                   1 + (int)rng_below(&r, 20));
        uint64_t version = 2;
        while (n < N || scheduler_running(w.scheduler) + scheduler_waiting(w.scheduler) > 0) {
            if (n < N && rng_below(&r, 3) == 0) {
                int n_prompt = 1 + (int)rng_below(&r, 40), most = 64 - n_prompt;
                requests[n++] = add(&w, n_prompt, 1 + (int)rng_below(&r, 6),
                                    1 + (int)rng_below(&r, (uint32_t)(most < 24 ? most : 24)));
            }
            if (rng_below(&r, 40) == 0) {
                version += 2;
                scheduler_update(w.scheduler, version, rng_below(&r, 2));
            }
            int inside = scheduler_running(w.scheduler) + scheduler_waiting(w.scheduler);
            if (inside && rng_below(&r, 60) == 0)
                scheduler_remove(w.scheduler,
                                 scheduler_at(w.scheduler, (int)rng_below(&r, (uint32_t)inside)));
            inside = scheduler_running(w.scheduler) + scheduler_waiting(w.scheduler);
            bool stepped = run_step(&w, ADMIT_ALL);
            assert_true(stepped || inside == 0);
            assert_true(w.steps < 100000);
        }
        assert_int_equal(kv_cache_used(w.cache), 0);
        for (int i = 0; i < n; i++) request_free(requests[i]);
        world_release(&w);
    }
}

static void streams_differ(void **state)
{
    (void)state;
    assert_true(sampler_stream(1, 0) == sampler_stream(1, 0));
    assert_true(sampler_stream(1, 0) != sampler_stream(1, 1));
    assert_true(sampler_stream(1, 0) != sampler_stream(2, 0));
    assert_true(sampler_stream(1, 0) != sampler_stream(1 + ((uint64_t)1 << 32), 0));
}

static void most_likely_tokens(void **state)
{
    (void)state;
    const float logits[] = {1, 3, 2, 3, -1};
    struct top_logprob top[5];
    sampler_top(logits, 5, 0, 3, top);
    assert_int_equal(top[0].token, 1); // equal ones by id
    assert_int_equal(top[1].token, 3);
    assert_int_equal(top[2].token, 2);
    assert_float_equal(top[0].logprob, -0.924866f, 1e-5f);
    assert_float_equal(top[2].logprob, -1.924866f, 1e-5f);
    sampler_top(logits, 5, 0.5f, 5, top); // logits 2 6 4 6 -2
    assert_int_equal(top[4].token, 4);
    assert_float_equal(top[0].logprob, -0.767320f, 1e-5f);
    assert_float_equal(top[3].logprob, -4.767320f, 1e-5f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompt_goes_in_chunks),
        cmocka_unit_test(decode_goes_on_beside_prefill),
        cmocka_unit_test(group_computes_its_prompt_once),
        cmocka_unit_test(group_larger_than_batch),
        cmocka_unit_test(held_siblings_do_not_hold_up_others),
        cmocka_unit_test(preempts_the_youngest),
        cmocka_unit_test(update_recomputes_and_shares_again),
        cmocka_unit_test(update_keeps),
        cmocka_unit_test(drain_admits_only_started),
        cmocka_unit_test(leader_cancelled),
        cmocka_unit_test(random_load),
        cmocka_unit_test(streams_differ),
        cmocka_unit_test(most_likely_tokens),
    };
    return cmocka_run_group_tests_name("scheduler", tests, NULL, NULL);
}
