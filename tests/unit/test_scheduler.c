/* test_scheduler.c: plans without a device. `run_step` plays the engine: it checks a plan against
 * the rules that every plan must keep, keeps a model of what each block of the pool holds, and
 * "samples". */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "common/base/rng.h"
#include "infer-server/engine/engine.h"
#include "infer-server/engine/scheduler.h"

enum { BLOCK = 4, MAX_BLOCKS = 512, MAX_SAMPLES = 1024, MAX_REQUESTS = 64, MAX_SLOTS = 64 };

struct state { // what a slot holds: that of so many tokens
    int n;
    uint64_t hash;    // of them
    uint64_t version; // the oldest that computed one of them
};

struct world {
    struct scheduler *scheduler;
    struct block_manager *cache;
    int max_batch, chunk;
    int steps, max_running;
    int32_t content[MAX_BLOCKS * BLOCK]; // the token whose keys and values lie at each slot
    uint64_t version, computed_by[MAX_BLOCKS * BLOCK]; // and the version that computed it
    bool states;
    struct state slots[MAX_SLOTS];
    uint64_t admitted_at[MAX_SAMPLES]; // by order: the version when it was last admitted
    int64_t computed_tokens;
    struct request *requests[MAX_REQUESTS]; // (n_requests), freed with it
    int n_requests;
};

static void world_release(void *world)
{
    struct world *w = world;
    for (int i = 0; i < w->n_requests; i++) request_free(w->requests[i]);
    scheduler_free(w->scheduler);
    block_manager_free(w->cache);
}

// Released with the test. n_kept: of a model with states; -1: it has none.
static struct world *world_of(int n_blocks, int max_batch, int chunk, int n_kept)
{
    struct world *w = test_keep(calloc(1, sizeof *w));
    const struct scheduler_limits limits = {.max_batch = max_batch,
                                            .prefill_chunk = chunk,
                                            .states = n_kept >= 0,
                                            .n_kept = n_kept > 0 ? n_kept : 0};
    assert_true(max_batch + n_kept <= MAX_SLOTS);
    w->states = limits.states;
    w->max_batch = max_batch;
    w->chunk = chunk;
    assert_ok(block_manager_new(n_blocks, BLOCK, &w->cache));
    assert_ok(scheduler_new(&limits, w->cache, &w->scheduler));
    w->version = 2;
    scheduler_update(w->scheduler, 2, false);
    return test_later(w, world_release);
}

static struct world *world(int n_blocks, int max_batch, int chunk)
{
    return world_of(n_blocks, max_batch, chunk, -1);
}

static void update(struct world *w, bool recompute)
{
    w->version += 2;
    scheduler_update(w->scheduler, w->version, recompute);
}

static struct request *add_salted(struct world *w, const int32_t *prompt, int n_prompt, int n,
                                  int max_tokens, uint64_t cache_salt)
{
    struct request *r = NULL;
    const struct sampling sampling = {.n = n, .max_tokens = max_tokens, .top_p = 1};
    assert_ok(request_new(prompt, n_prompt, &sampling, NULL, &r));
    assert_ok(request_prepare(r, BLOCK, cache_salt));
    assert_true(scheduler_add(w->scheduler, r));
    assert_true(w->n_requests < MAX_REQUESTS);
    return w->requests[w->n_requests++] = r;
}

// Prompts of one length are the same.
static struct request *add(struct world *w, int n_prompt, int n, int max_tokens)
{
    int32_t prompt[256];
    for (int i = 0; i < n_prompt; i++) prompt[i] = 1000 * n_prompt + i;
    return add_salted(w, prompt, n_prompt, n, max_tokens, 0);
}

static int32_t next_token(const struct sample *s) // a function of the sample and the position
{
    return 100000 + s->index * 1000 + s->text.n_generated;
}

static void write_slot(struct world *w, const struct sample *s, int position)
{
    const int slot = s->blocks.at[position / BLOCK] * BLOCK + position % BLOCK;
    sample_tokens(s, position, 1, &w->content[slot]);
    w->computed_by[slot] = w->version;
    w->computed_tokens++;
}

// What no version before the one that it was admitted under computed: under "keep" it may be older
// than the present one, but then it is its own.
static void check_reads(const struct world *w, const struct sample *s, int n)
{
    for (int p = 0; p < n; p++) {
        const int slot = s->blocks.at[p / BLOCK] * BLOCK + p % BLOCK;
        int32_t token;
        sample_tokens(s, p, 1, &token);
        assert_int_equal(w->content[slot], token);
        assert_true(w->computed_by[slot] >= w->admitted_at[s->queue.order]);
    }
}

static void note_admissions(struct world *w, bool planned)
{
    const int n = scheduler_running(w->scheduler);
    for (int i = 0; i < n + scheduler_waiting(w->scheduler); i++) {
        const struct sample *s = scheduler_at(w->scheduler, i);
        assert_true(s->queue.order < MAX_SAMPLES);
        if (i >= n)
            w->admitted_at[s->queue.order] = 0;
        else if (planned && w->admitted_at[s->queue.order] == 0)
            w->admitted_at[s->queue.order] = w->version;
    }
}

static void check_item(struct world *w, const struct step_item *item)
{
    const struct sample *s = item->sample;
    assert_int_equal(s->queue.state, SAMPLE_RUNNING);
    assert_true(item->n >= 1 && item->first + item->n <= sample_known(s));
    assert_true(s->blocks.n * BLOCK >= item->first + item->n);
    for (int p = item->first; p < item->first + item->n; p++) { // writes only into its own blocks
        assert_int_equal(block_manager_ref_count(w->cache, s->blocks.at[p / BLOCK]), 1);
        write_slot(w, s, p);
    }
    check_reads(w, s, item->first); // and reads what it would have written
}

static uint64_t hash_of(const struct sample *s, int n)
{
    uint64_t hash = 1;
    for (int p = 0; p < n; p++) {
        int32_t token;
        sample_tokens(s, p, 1, &token);
        hash = (hash ^ (uint64_t)token) * 0x100000001b3;
    }
    return hash;
}

// Each sample goes on from the state of its own tokens, whether found or its own, and no slot is
// read that the same step writes for somebody else.
static void check_states(struct world *w, const struct engine_step *step)
{
    for (int i = 0; i < step->n_items; i++) {
        const struct step_item *item = &step->items[i];
        const struct state *from = &w->slots[item->state];
        assert_in_range(item->state, 0, MAX_SLOTS - 1);
        if (item->first > 0) {
            assert_int_equal(from->n, item->first);
            assert_true(from->hash == hash_of(item->sample, item->first));
            assert_true(from->version >= w->admitted_at[item->sample->queue.order]);
        }
        for (int k = 0; k < step->n_items; k++) {
            const int32_t own = step->items[k].sample->states.own;
            assert_true(k == i || (own != item->state && own != item->sample->states.own));
        }
    }
    for (int i = 0; i < step->n_items; i++) {
        const struct step_item *item = &step->items[i];
        const int n = item->first + item->n;
        const uint64_t version = item->first > 0 ? w->slots[item->state].version : w->version;
        w->slots[item->sample->states.own] = (struct state){n, hash_of(item->sample, n), version};
    }
    for (int i = 0; i < step->n_copies; i++) {
        const struct kv_copy *copy = &step->copies[i].what;
        if (copy->of_state) w->slots[copy->to] = w->slots[copy->from];
    }
}

// False where there was nothing to do. Samples that reach max_tokens are removed.
static bool run_step(struct world *w, enum scheduler_admit admit)
{
    note_admissions(w, false);
    const struct engine_step *step = schedule(w->scheduler, admit);
    note_admissions(w, true);
    for (int i = 0; i < step->n_sampled; i++) // a sibling that forks is as old as its leader
        w->admitted_at[step->sampled[i].sample->queue.order] =
            w->admitted_at[step->items[step->sampled[i].item].sample->queue.order];
    int n_prefill = 0, n_tokens = 0;
    // A prompt's blocks are written before siblings that fork become holders, in the engine by the
    // order of the device's work; here forks of this very step are told apart by their copies.
    for (int i = 0; i < step->n_items; i++) {
        const struct step_item *item = &step->items[i];
        const struct sample *s = item->sample;
        bool forked = false;
        for (int d = 0; d < step->n_sampled; d++)
            forked |= step->sampled[d].item == i && step->sampled[d].sample != s;
        if (!forked) {
            check_item(w, item);
        } else {
            check_reads(w, s, item->first);
            for (int p = item->first; p < item->first + item->n; p++) write_slot(w, s, p);
        }
        n_tokens += item->n;
        if (item->n > 1 || s->text.n_generated == 0) n_prefill += item->n;
    }
    for (int i = 0; i < step->n_copies; i++) {
        const struct kv_copy *copy = &step->copies[i].what;
        if (copy->of_state) continue;
        const int to = copy->to * BLOCK, from = copy->from * BLOCK;
        memcpy(w->content + to, w->content + from, BLOCK * sizeof *w->content);
        memcpy(w->computed_by + to, w->computed_by + from, BLOCK * sizeof *w->computed_by);
    }
    if (w->states) check_states(w, step);
    assert_int_equal(step->n_tokens, n_tokens);
    assert_true(n_prefill <= w->chunk);
    assert_true(step->n_items <= w->max_batch && step->n_sampled <= w->max_batch);
    assert_true(scheduler_running(w->scheduler) <= w->max_batch);
    if (scheduler_running(w->scheduler) > w->max_running)
        w->max_running = scheduler_running(w->scheduler);
    for (int i = 0; i < step->n_sampled; i++) {
        struct sample *s = step->sampled[i].sample;
        assert_int_equal(s->kv[RUNNER_POLICY].computed, sample_known(s));
        sample_append(s, next_token(s));
    }
    for (int i = 0; i < step->n_sampled; i++) {
        struct sample *s = step->sampled[i].sample;
        if (s->text.n_generated == s->request->sampling.max_tokens)
            scheduler_remove(w->scheduler, s);
    }
    w->steps += step->n_items > 0;
    return step->n_items > 0;
}

static void run_steps(struct world *w, int n)
{
    for (int i = 0; i < n; i++) assert_true(run_step(w, ADMIT_ALL));
}

static void run_to_preemption(struct world *w)
{
    while (!scheduler_counts(w->scheduler)->preemptions) run_steps(w, 1);
}

static void run_all(struct world *w)
{
    for (int i = 0; scheduler_running(w->scheduler) + scheduler_waiting(w->scheduler) > 0; i++) {
        assert_true(i < 100000);
        assert_true(run_step(w, ADMIT_ALL)); // never stuck
    }
    assert_int_equal(block_manager_used(w->cache), 0);
}

static void assert_all_done(const struct request *r)
{
    for (int i = 0; i < r->sampling.n; i++) {
        const struct sample *s = &r->samples[i];
        assert_int_equal(s->queue.state, SAMPLE_DONE);
        assert_int_equal(s->text.n_generated, r->sampling.max_tokens);
        for (int k = 0; k < s->text.n_generated; k++)
            assert_int_equal(s->text.generated[k], 100000 + i * 1000 + k);
    }
}

// All of its requests come to their ends.
static void run_to_ends(struct world *w)
{
    run_all(w);
    for (int i = 0; i < w->n_requests; i++) assert_all_done(w->requests[i]);
}

TEST(prompt_goes_in_chunks)
{
    struct world *w = world(64, 4, 8);
    struct request *r = add(w, 20, 1, 3);
    const int wanted[] = {8, 8, 4, 1, 1};
    for (int i = 0; i < 5; i++) {
        int64_t before = w->computed_tokens;
        run_steps(w, 1);
        assert_int_equal(w->computed_tokens - before, wanted[i]);
    }
    assert_false(run_step(w, ADMIT_ALL));
    assert_all_done(r);
}

TEST(decode_goes_on_beside_prefill)
{
    struct world *w = world(64, 4, 8);
    struct request *a = add(w, 3, 1, 10);
    run_steps(w, 1);
    struct request *b = add(w, 24, 1, 2);
    run_steps(w, 3);
    assert_int_equal(a->samples[0].text.n_generated, 4); // one token in each of the prefill's steps
    assert_int_equal(b->samples[0].text.n_generated, 1);
    run_to_ends(w);
}

TEST(group_computes_its_prompt_once)
{
    for (int n_prompt = 1; n_prompt <= 13; n_prompt++) {
        struct world *w = world(128, 8, 5);
        struct request *r = add(w, n_prompt, 6, 4);
        while (r->samples[0].text.n_generated == 0) assert_true(run_step(w, ADMIT_ALL));
        assert_int_equal(w->computed_tokens, n_prompt);
        for (int i = 0; i < 6; i++) assert_int_equal(r->samples[i].text.n_generated, 1);
        // the full blocks once, and for each sample the last one, where it is partly filled
        assert_int_equal(block_manager_used(w->cache),
                         n_prompt / BLOCK + (n_prompt % BLOCK ? 6 : 0));
        run_all(w);
        assert_int_equal(w->computed_tokens, n_prompt + 6 * 3);
        assert_all_done(r);
    }
}

TEST(group_larger_than_batch)
{
    struct world *w = world(128, 3, 16);
    struct request *r = add(w, 9, 8, 5);
    struct request *behind = add(w, 2, 1, 2);
    run_all(w);
    assert_all_done(r);
    assert_all_done(behind);
    assert_int_equal(w->max_running, 3);
}

TEST(held_siblings_do_not_hold_up_others)
{
    struct world *w = world(128, 8, 4);
    add(w, 40, 4, 2); // ten chunks
    add(w, 2, 1, 2);
    run_steps(w, 1);
    assert_int_equal(scheduler_running(w->scheduler), 2); // the leader and the single
    assert_int_equal(scheduler_waiting(w->scheduler), 3);
    run_to_ends(w);
}

TEST(preempts_the_youngest)
{
    struct world *w = world(8, 4, 16);                           // 32 tokens
    struct request *a = add(w, 8, 1, 16), *b = add(w, 8, 1, 16); // each grows to 6 blocks
    int64_t order = 0;
    run_to_preemption(w);
    assert_int_equal(a->samples[0].queue.state, SAMPLE_RUNNING);
    assert_int_equal(b->samples[0].queue.state, SAMPLE_WAITING);
    assert_true(b->samples[0].text.n_generated > 0); // its tokens stay
    assert_int_equal(b->samples[0].blocks.n, 0);
    while (a->samples[0].queue.state != SAMPLE_DONE) {
        run_steps(w, 1);
        order += b->samples[0].queue.state == SAMPLE_DONE;
    }
    assert_int_equal(order, 0);
    run_to_ends(w);
}

TEST(update_recomputes_and_shares_again)
{
    struct world *w = world(128, 8, 64);
    struct request *r = add(w, 10, 4, 8);
    run_steps(w, 3);
    update(w, true);
    assert_int_equal(scheduler_running(w->scheduler), 0);
    assert_int_equal(scheduler_in_flight(w->scheduler), 4);
    assert_int_equal(block_manager_used(w->cache), 0);
    int64_t before = w->computed_tokens;
    run_steps(w, 2);
    // the first computes 10 + 3 again and draws; the others share two full blocks of the prompt;
    // beside them the first decodes on
    assert_int_equal(w->computed_tokens - before, 13 + 3 * (13 - 8) + 1);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(r->samples[i].kv[RUNNER_POLICY].version, 4);
        for (int k = 0; k < 2; k++)
            assert_int_equal(r->samples[i].blocks.at[k], r->samples[0].blocks.at[k]);
    }
    run_to_ends(w);
}

TEST(update_keeps)
{
    struct world *w = world(128, 2, 64);
    struct request *r = add(w, 10, 4, 3); // two at a time
    run_steps(w, 1);
    update(w, false);
    assert_int_equal(scheduler_running(w->scheduler), 2);
    int64_t before = w->computed_tokens;
    run_all(w);
    // 2 * 2 decodes, and the late ones compute their prompt anew rather than read version 2's
    // blocks
    assert_int_equal(w->computed_tokens - before, 4 + 10 + 4);
    assert_all_done(r);
}

TEST(drain_admits_only_started)
{
    struct world *w = world(8, 4, 16);
    struct request *a = add(w, 8, 1, 16), *b = add(w, 8, 1, 16);
    run_to_preemption(w);
    struct request *c = add(w, 2, 1, 2);
    while (scheduler_in_flight(w->scheduler)) assert_true(run_step(w, ADMIT_STARTED));
    assert_all_done(a);
    assert_all_done(b);
    assert_int_equal(c->samples[0].queue.state, SAMPLE_WAITING);
    assert_false(run_step(w, ADMIT_STARTED));
    run_to_ends(w);
}

TEST(prefilling_sample_cancelled)
{
    struct world *w = world(64, 4, 4);
    struct request *r = add(w, 13, 3, 4);
    run_steps(w, 1);
    assert_ptr_equal(r->prefilling, &r->samples[0]);
    scheduler_remove(w->scheduler, &r->samples[0]);
    assert_null(r->prefilling);
    assert_int_equal(block_manager_used(w->cache), 0);
    run_all(w);
    assert_int_equal(r->samples[1].text.n_generated, 4);
    assert_int_equal(r->samples[2].text.n_generated, 4);
}

TEST(ended_request_is_found)
{
    for (int n_prompt = 1; n_prompt <= 13; n_prompt++) {
        const int cached = (n_prompt - 1) / BLOCK * BLOCK; // the last token is always computed
        struct world *w = world(64, 8, 64);
        struct request *a = add(w, n_prompt, 1, 2);
        run_all(w);
        assert_int_equal(a->cached_tokens, 0);
        int64_t before = w->computed_tokens;
        struct request *b = add(w, n_prompt, 5, 2); // a group finds it as one does
        run_all(w);
        assert_int_equal(b->cached_tokens, cached);
        assert_int_equal(w->computed_tokens - before, n_prompt - cached + 5);
        assert_int_equal(scheduler_counts(w->scheduler)->queried_tokens, 2 * n_prompt);
        assert_int_equal(scheduler_counts(w->scheduler)->hit_tokens, cached);
        assert_all_done(b);
    }
}

// The next turn of a chat begins with the last one's prompt and answer.
TEST(answer_is_found)
{
    int32_t prompt[64];
    struct world *w = world(64, 4, 64);
    struct request *a = add(w, 6, 1, 13); // 18 of its 19 tokens are ever computed
    run_all(w);
    memcpy(prompt, a->prompt, 6 * sizeof *prompt);
    memcpy(prompt + 6, a->samples[0].text.generated, 13 * sizeof *prompt);
    for (int i = 19; i < 30; i++) prompt[i] = i;
    struct request *b = add_salted(w, prompt, 30, 1, 2, 0);
    run_all(w);
    assert_int_equal(b->cached_tokens, 16);
    prompt[7]++; // another answer: only what is before it
    struct request *c = add_salted(w, prompt, 30, 1, 2, 0);
    run_all(w);
    assert_int_equal(c->cached_tokens, 4);
}

// Drafts that are refused leave keys and values behind that no name may cover.
TEST(refused_drafts_are_not_found)
{
    int32_t prompt[64];
    struct world *w = world(64, 4, 64);
    struct request *a = add(w, 6, 1, 20);
    struct sample *s = &a->samples[0];
    run_steps(w, 1);
    for (int accepted = 0; accepted < 4; accepted++) { // 6 + 1 tokens known, of 8 drafts some stay
        s->draft.n_verify = 8;
        const struct engine_step *step = schedule(w->scheduler, ADMIT_ALL);
        assert_int_equal(step->n_items, 1);
        assert_int_equal(step->items[0].n_drafts, 8);
        const int computed = s->kv[RUNNER_POLICY].computed;
        for (int p = computed - 1; p < computed + 8; p++)
            w->content[s->blocks.at[p / BLOCK] * BLOCK + p % BLOCK] = -1; // drafts, refused
        for (int p = 0; p < computed; p++)
            sample_tokens(s, p, 1, &w->content[s->blocks.at[p / BLOCK] * BLOCK + p % BLOCK]);
        for (int i = 0; i < accepted + 1; i++) sample_append(s, next_token(s));
        scheduler_accept(w->scheduler, s, accepted);
        assert_int_equal(s->kv[RUNNER_POLICY].computed, computed + accepted);
        for (int p = computed; p < s->kv[RUNNER_POLICY].computed; p++)
            sample_tokens(s, p, 1, &w->content[s->blocks.at[p / BLOCK] * BLOCK + p % BLOCK]);
        for (int i = 0; i < MAX_BLOCKS * BLOCK; i++) w->computed_by[i] = 2;
        assert_true(s->blocks.n_cached <= s->kv[RUNNER_POLICY].computed / BLOCK);
    }
    const int length = sample_known(s); // 6 + 1 + 1 + 2 + 3 + 4
    assert_int_equal(length, 17);
    sample_tokens(s, 0, length, prompt);
    for (int i = length; i < 40; i++) prompt[i] = i;
    s->draft.n_verify = 0;
    struct request *b = add_salted(w, prompt, 40, 1, 2, 0);
    run_all(w); // check_item() compares what b reads
    // the step before b's admission covered 12 tokens; what it accepted is named with the next
    assert_int_equal(b->cached_tokens, 12);
}

TEST(salted_requests_share_nothing)
{
    int32_t prompt[20] = {0};
    struct world *w = world(64, 2, 64);
    for (uint64_t salt = 1; salt < 4; salt++) {
        int64_t before = w->computed_tokens;
        struct request *r = add_salted(w, prompt, 18, 4, 3, salt); // two at a time
        run_all(w);
        assert_int_equal(r->cached_tokens, 0);
        // the late siblings find four full blocks of their own group, and compute the rest once
        assert_int_equal(w->computed_tokens - before, 18 + 2 + 4 * 2);
    }
}

// Two equal prompts with an update between them, while others run on over it.
TEST(update_leaves_nothing_to_find)
{
    for (int recompute = 0; recompute < 2; recompute++) {
        struct world *w = world(128, 8, 64);
        add(w, 14, 1, 2);
        run_all(w);
        struct request *running = add(w, 14, 2, 20); // finds it, and has more than that computed
        run_steps(w, 3);
        assert_int_equal(running->cached_tokens, 12);
        update(w, recompute);
        struct request *b = add(w, 14, 1, 2);
        run_steps(w, 9); // fills blocks, over it
        // under "recompute" those that ran have computed the prompt again by then, and came first
        assert_int_equal(b->cached_tokens, 0);
        assert_int_equal(running->samples[0].kv[RUNNER_POLICY].version, recompute ? 4 : 0);
        struct request *c = add(w, 14, 1, 2);
        run_all(w);
        assert_int_equal(c->cached_tokens, 12); // of b, or of those that were computed again
        run_to_ends(w);
    }
}

// A prompt caught half way by an update is of two versions: what it fills is for nobody else.
TEST(update_in_a_prompt)
{
    struct world *w = world(128, 8, 8);
    struct request *a = add(w, 30, 1, 12);
    run_steps(w, 1);
    update(w, false);
    while (a->samples[0].text.n_generated < 8) assert_true(run_step(w, ADMIT_ALL));
    struct request *b = add(w, 30, 1, 2);
    run_all(w);
    assert_int_equal(b->cached_tokens, 0);
    struct request *c = add(w, 30, 1, 2);
    run_all(w);
    assert_int_equal(c->cached_tokens, 28);
}

// A pool that the found blocks and the new ones fill to the last: found blocks are not counted as
// room, nor taken for the same sample's own.
TEST(found_blocks_are_not_room)
{
    for (int n_blocks = 8; n_blocks <= 16; n_blocks++) {
        struct world *w = world(n_blocks, 4, 64);
        add(w, 16, 1, 2);
        run_all(w);
        add(w, 15, 1, 9);
        add(w, 16, 2, 12);
        run_to_ends(w);
    }
}

// What was computed before a preemption is found again, and does not count as cached.
TEST(preempted_finds_its_own)
{
    struct world *w = world(12, 4, 64);
    struct request *a = add(w, 8, 1, 20), *b = add(w, 16, 1, 20);
    run_to_preemption(w);
    assert_int_equal(b->samples[0].queue.state, SAMPLE_WAITING);
    scheduler_remove(w->scheduler, &a->samples[0]);
    const int length = sample_known(&b->samples[0]);
    int64_t before = w->computed_tokens;
    run_steps(w, 1);
    assert_true(w->computed_tokens - before <= 2 * BLOCK && length > 4 * BLOCK);
    run_all(w);
    assert_int_equal(b->cached_tokens, 0);
    assert_all_done(b);
}

// Requests of all shapes in a pool that is far too small, with updates and cancellations between
// the steps: every plan keeps the rules, every sample reads its own text, all end, no block is
// lost.
TEST(random_load)
{
    enum { N = 60 };
    for (uint64_t seed = 0; seed < 80; seed++) { // from 40 on with states
        struct request *requests[N];
        struct rng r;
        int n = 0;
        rng_init(&r, seed, 0);
        struct world *w =
            world_of(16 + (int)rng_below(&r, 24), 1 + (int)rng_below(&r, 9),
                     1 + (int)rng_below(&r, 20), seed < 40 ? -1 : 1 + (int)rng_below(&r, 9));
        while (n < N || scheduler_running(w->scheduler) + scheduler_waiting(w->scheduler) > 0) {
            if (n < N && rng_below(&r, 3) == 0) {
                // one of three texts, and from some place on another: prompts share beginnings of
                // any length
                const int n_prompt = 1 + (int)rng_below(&r, 40), max = 64 - n_prompt;
                const int text = 1000 * (1 + (int)rng_below(&r, 3)), turn = (int)rng_below(&r, 60);
                int32_t prompt[64];
                for (int i = 0; i < n_prompt; i++)
                    prompt[i] = i + (i < turn ? text : 1000 * (10 + n));
                requests[n] = add_salted(w, prompt, n_prompt, 1 + (int)rng_below(&r, 6),
                                         1 + (int)rng_below(&r, (uint32_t)(max < 24 ? max : 24)),
                                         seed % 4 == 0 ? 1 + (uint64_t)n : 0);
                n++;
            }
            if (rng_below(&r, 40) == 0) update(w, rng_below(&r, 2));
            int inside = scheduler_running(w->scheduler) + scheduler_waiting(w->scheduler);
            if (inside && rng_below(&r, 60) == 0)
                scheduler_remove(w->scheduler,
                                 scheduler_at(w->scheduler, (int)rng_below(&r, (uint32_t)inside)));
            inside = scheduler_running(w->scheduler) + scheduler_waiting(w->scheduler);
            bool stepped = run_step(w, ADMIT_ALL);
            assert_true(stepped || inside == 0);
            assert_true(w->steps < 100000);
        }
        assert_int_equal(block_manager_used(w->cache), 0);
        const struct scheduler_counts *counts = scheduler_counts(w->scheduler);
        uint64_t found = 0;
        for (int i = 0; i < n; i++) {
            assert_true(requests[i]->cached_tokens < requests[i]->n_prompt);
            if (requests[i]->cached_tokens > 0) found += (uint64_t)requests[i]->cached_tokens;
        }
        assert_int_equal(counts->hit_tokens, found);
        assert_true(counts->queried_tokens > found && (found > 0) == (seed % 4 != 0));
    }
}

// ---- states -------------------------------------------------------------------------------------

// A request for a prompt that begins as the others up to `turn`; what it found.
static int found_of(struct world *w, int n_prompt, int turn)
{
    static int n_texts;
    int32_t prompt[256];
    for (int i = 0; i < n_prompt; i++) prompt[i] = i + (i < turn ? 0 : 1000 * (1 + n_texts));
    n_texts++;
    struct request *r = add_salted(w, prompt, n_prompt, 1, 2, 0);
    run_all(w);
    assert_all_done(r);
    return r->cached_tokens;
}

// A prompt leaves its state before what fills no block, and where it parts from another.
TEST(states_are_kept_sparingly)
{
    struct world *w = world_of(64, 2, 64, 2);
    const int last = 28; // of 30 tokens
    assert_int_equal(found_of(w, 30, 30), 0);
    assert_int_equal(found_of(w, 30, 30), last);
    assert_int_equal(found_of(w, 50, 30), last); // goes on behind it
    assert_int_equal(found_of(w, 30, 17), 0);    // no state is kept where it parts,
    assert_int_equal(found_of(w, 30, 17), 16);   // but is from then on
    assert_int_equal(found_of(w, 30, 18), 16);
    assert_int_equal(found_of(w, 30, 12), 0);
    assert_int_equal(found_of(w, 30, 12), 12);
}

// Those that were not asked for longest go first, and none is kept where all slots are in use.
TEST(states_in_use_come_first)
{
    struct world *w = world_of(256, 3, 64, 1);
    for (int i = 0; i < 4; i++) assert_int_equal(found_of(w, 30 + BLOCK * i, 0), 0);
    struct request *many[3];
    for (int i = 0; i < 3; i++) many[i] = add(w, 10 + BLOCK * i, 1, 40);
    run_steps(w, 3);
    assert_int_equal(scheduler_running(w->scheduler), 3);
    struct request *first = add(w, 10, 1, 2), *second = add(w, 10 + BLOCK, 1, 2);
    run_to_ends(w); // there was one slot left, for the first's
    assert_int_equal(first->cached_tokens, 8);
    assert_int_equal(second->cached_tokens, 0);
    for (int i = 0; i < 3; i++) assert_all_done(many[i]);
    struct world *full = world_of(256, 1, 64, 0);
    const struct request *first_of_all = add(full, 30, 1, 4);
    run_steps(full, 1); // and its prompt goes in one step
    assert_int_equal(first_of_all->samples[0].text.n_generated, 1);
    struct request *none = add(full, 30, 1, 4);
    run_to_ends(full);
    assert_int_equal(none->cached_tokens, 0);
}

TEST(streams_differ)
{
    assert_true(sampler_stream(1, 0) == sampler_stream(1, 0));
    assert_true(sampler_stream(1, 0) != sampler_stream(1, 1));
    assert_true(sampler_stream(1, 0) != sampler_stream(2, 0));
    assert_true(sampler_stream(1, 0) != sampler_stream(1 + ((uint64_t)1 << 32), 0));
}
