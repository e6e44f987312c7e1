/* test_rollout_queue.c: the queue between sampling and learning, with work that is made up: what is
 * done at once and what in order, bound, errors, pauses, and its end at a bad moment. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/rollout/rollout_queue.h"

#include <pthread.h>

#define LIMIT_MS 60000

struct work {                 // what the made-up work does, and what it saw
    _Atomic int begun, done;  // sampling
    _Atomic bool hold;        // it waits while this is set, until it is cancelled
    _Atomic int64_t hold_at;  // the same for this step alone; -1: none
    int64_t fail_at;          // step; -1: none
    _Atomic pthread_t thread; // that the last was scored in
    _Atomic bool scoring;
    _Atomic int scored;
    const _Atomic bool *cancelled;
};

static enum status sample(void *context, struct rollout_step *step)
{
    struct work *w = context;
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    w->begun++;
    while ((w->hold || w->hold_at == step->step) && clock_now_ns() < deadline) {
        if (*w->cancelled) return status_fail(ST_CANCELLED, "not wanted");
        clock_sleep_ms(1);
    }
    if (step->step == w->fail_at)
        return status_fail(ST_FORMAT, "step %d went wrong", (int)step->step);
    step->sampling.seed = 100 + (uint64_t)step->step;
    w->done++;
    return ST_OK;
}

static enum status score(void *context, struct rollout_step *step)
{
    struct work *w = context;
    if (atomic_exchange(&w->scoring, true)) return status_fail(ST_BUSY, "two at once");
    if (step->sampling.seed != 100 + (uint64_t)step->step)
        return status_fail(ST_INVALID, "not sampled");
    w->thread = pthread_self();
    step->scores.n = ++w->scored; // in which order
    w->scoring = false;
    return ST_OK;
}

static struct rollout_queue *queue_of(int length, struct work *w)
{
    struct rollout_queue *q = NULL;
    const struct rollout_work work = {sample, score, w};
    assert_ok(rollout_queue_new(length, &work, &q));
    w->cancelled = rollout_queue_cancelled(q);
    return q;
}

static void put(struct rollout_queue *q, int64_t step)
{
    struct rollout_step *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->step = step;
    assert_ok(rollout_queue_put(q, s, false));
}

// Steps are scored in their order, so each is the step + 1st.
static void assert_takes(struct rollout_queue *q, int64_t step)
{
    struct rollout_step *s = NULL;
    assert_ok(rollout_queue_take(q, &s));
    assert_int_equal(s->step, step);
    assert_int_equal(s->scores.n, step + 1);
    rollout_step_free(s);
}

static void wait_for(const _Atomic int *counter, int n)
{
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    while (*counter < n) {
        assert_true(clock_now_ns() < deadline);
        clock_sleep_ms(1);
    }
}

// The plain loop: a step is worked on by who takes it, when it is taken.
TEST(of_length_one_nothing_runs_ahead)
{
    struct work w = {.fail_at = -1, .hold_at = -1};
    struct rollout_queue *q = queue_of(1, &w);
    struct rollout_step *s = NULL, more = {.step = 9};
    assert_status(rollout_queue_take(q, &s), ST_INVALID);
    for (int step = 0; step < 3; step++) {
        put(q, step);
        assert_int_equal(rollout_queue_count(q), 1);
        assert_status(rollout_queue_put(q, &more, false), ST_BUSY);
        clock_sleep_ms(5);
        assert_int_equal(w.begun, step);
        assert_takes(q, step);
        assert_true(pthread_equal(w.thread, pthread_self()));
        assert_int_equal(rollout_queue_count(q), 0);
    }
    rollout_queue_free(q);
}

// Length 3: two steps are worked on ahead of the first taken, by other threads; a fourth is refused
// until one is taken.
TEST(the_length_bounds_what_runs_ahead)
{
    struct work w = {.fail_at = -1, .hold_at = -1};
    struct rollout_queue *q = queue_of(3, &w);
    struct rollout_step more = {.step = 9};
    for (int step = 0; step < 3; step++) put(q, step);
    assert_fails(rollout_queue_put(q, &more, false), ST_BUSY, "3 steps are ordered");
    wait_for(&w.done, 3);
    wait_for(&w.scored, 1);
    assert_false(pthread_equal(w.thread, pthread_self()));
    for (int step = 0; step < 40; step++) {
        assert_takes(q, step);
        put(q, step + 3);
        assert_int_equal(rollout_queue_count(q), 3);
    }
    for (int step = 40; step < 43; step++) assert_takes(q, step);
    assert_int_equal(w.begun, 43);
    rollout_queue_free(q);
    rollout_queue_free(NULL);
}

// A step that takes long to sample holds back those behind it, but not their sampling.
TEST(all_are_sampled_at_once)
{
    struct work w = {.fail_at = -1, .hold_at = 0};
    struct rollout_queue *q = queue_of(4, &w);
    for (int step = 0; step < 4; step++) put(q, step);
    wait_for(&w.done, 3);
    clock_sleep_ms(10);
    assert_int_equal(w.scored, 0);
    w.hold_at = -1;
    for (int step = 0; step < 4; step++) assert_takes(q, step);
    rollout_queue_free(q);
}

// What was done before a failure is still handed out; the failure comes in its place, with its
// sentence, and stays.
TEST(a_failure_keeps_its_place)
{
    for (int length = 1; length <= 4; length += 3) {
        struct work w = {.fail_at = 2, .hold_at = -1};
        struct rollout_queue *q = queue_of(length, &w);
        struct rollout_step *s = NULL;
        for (int step = 0, ordered = 0; step < 2; step++) {
            for (; ordered < step + length; ordered++) put(q, ordered);
            assert_takes(q, step);
        }
        if (rollout_queue_count(q) == 0) put(q, 2);
        for (int again = 0; again < 2; again++) {
            assert_fails(rollout_queue_take(q, &s), ST_FORMAT, "step 2 went wrong");
            assert_null(s);
        }
        assert_int_equal(w.scored, 2); // nothing behind it
        rollout_queue_free(q);
    }
}

// A step that is put back is worked on anew, and comes before those that were behind it and are
// done.
TEST(what_is_put_back_is_first)
{
    for (int length = 1; length <= 3; length += 2) {
        struct work w = {.fail_at = -1, .hold_at = -1};
        struct rollout_queue *q = queue_of(length, &w);
        struct rollout_step *s = NULL;
        for (int step = 0; step < length; step++) put(q, step);
        assert_ok(rollout_queue_take(q, &s));
        if (length > 1) wait_for(&w.scored, length);
        assert_ok(rollout_queue_put(q, s, true));
        assert_int_equal(rollout_queue_count(q), length);
        s = NULL;
        assert_ok(rollout_queue_take(q, &s));
        assert_int_equal(s->step, 0);
        assert_int_equal(s->scores.n, length + 1);
        rollout_step_free(s);
        for (int step = 1; step < length; step++) assert_takes(q, step);
        assert_int_equal(w.done, length + 1);
        rollout_queue_free(q);
    }
}

TEST(a_pause_waits_for_the_step_under_way)
{
    struct work w = {.fail_at = -1, .hold_at = -1, .hold = true};
    struct rollout_queue *q = queue_of(3, &w);
    put(q, 0);
    put(q, 1);
    wait_for(&w.begun, 1);
    w.hold = false;
    rollout_queue_pause(q);
    const int done = w.done;
    assert_int_equal(w.begun, done); // none is under way
    assert_true(done >= 1);
    put(q, 2);
    clock_sleep_ms(20);
    assert_int_equal(w.begun, done);
    rollout_queue_resume(q);
    for (int step = 0; step < 3; step++) assert_takes(q, step);
    rollout_queue_free(q);
}

// While full: a step done and not taken, and two under way that would take for ever.
TEST(it_ends_while_it_is_full)
{
    struct work w = {.fail_at = -1, .hold_at = -1};
    struct rollout_queue *q = queue_of(3, &w);
    put(q, 0);
    wait_for(&w.done, 1);
    w.hold = true;
    put(q, 1);
    put(q, 2);
    wait_for(&w.begun, 3);
    const int64_t start = clock_now_ns();
    rollout_queue_free(q);
    assert_true(clock_ms_since(start) < LIMIT_MS / 2);
    assert_int_equal(w.begun, 3);
    assert_int_equal(w.done, 1);
}
