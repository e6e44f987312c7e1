/* test_pause.c: pausing an engine, and a resume that comes before the pause. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "infer-server/engine/engine.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"

#include <pthread.h>

#define WAIT_MS 10000

static struct engine *engine;
static struct bridge *bridge;
static const char *bridge_path;

static void no_event(void *context, const struct engine_event *event)
{
    (void)context;
    (void)event;
}

static void start(void)
{
    const char *folder = test_folder();
    bridge_path = test_path(folder, "bridge.json");
    assert_ok(tiny_model_write(folder, 32, 1, 100, 1));
    const struct engine_options options = {.model_folder = folder,
                                           .device = "cpu",
                                           .dtype = -1,
                                           .kv_bytes = 8 << 20,
                                           .bridge_path = bridge_path,
                                           .socket_path = test_path(folder, "s.sock"),
                                           .kv_policy = KV_KEEP};
    assert_ok(engine_new(&options, no_event, NULL, &engine));
    struct engine_stats stats = {0};
    int64_t deadline = clock_deadline_ns(WAIT_MS);
    while (stats.state != ENGINE_OK && clock_now_ns() < deadline) {
        clock_sleep_ms(1);
        engine_stats(engine, &stats);
    }
    assert_int_equal(stats.state, ENGINE_OK);
}

static void stop(void)
{
    engine_free(engine, 0);
}

TEST(test_pause_and_resume)
{
    assert_false(engine_paused(engine));
    assert_ok(engine_pause(engine, WAIT_MS));
    assert_true(engine_paused(engine));
    assert_ok(engine_pause(engine, WAIT_MS)); // it is already
    assert_ok(engine_resume(engine));
    assert_false(engine_paused(engine));
}

struct pausing {
    enum status st;
    _Atomic bool over;
};

static void *pause_it(void *context)
{
    struct pausing *p = context;
    p->st = engine_pause(engine, WAIT_MS);
    p->over = true;
    return NULL;
}

// Whatever a test left, so that the engine can end.
static int let_go(void **state)
{
    (void)state;
    if (bridge) control_resume(bridge_control(bridge));
    bridge_detach(bridge);
    bridge = NULL;
    return 0;
}

// A trainer's update holds the engine up, so that it cannot pause; meanwhile it is told to resume.
TEST_WITH(test_resumed_before_it_paused, NULL, let_go, NULL)
{
    pthread_t thread;
    struct pausing p = {0};
    assert_ok(bridge_attach(bridge_path, NULL, &bridge));
    assert_ok(bridge_become_writer(bridge));
    // Twice: between two grants the engine has seen what it was told before, to resume.
    assert_ok(control_quiesce(bridge_control(bridge), clock_deadline_ns(WAIT_MS)));
    control_resume(bridge_control(bridge));
    assert_ok(control_quiesce(bridge_control(bridge), clock_deadline_ns(WAIT_MS)));
    assert_int_equal(pthread_create(&thread, NULL, pause_it, &p), 0);
    while (!p.over) { // it may begin late where the machine is busy
        clock_sleep_ms(1);
        assert_ok(engine_resume(engine));
    }
    pthread_join(thread, NULL);
    assert_int_equal(p.st, ST_CANCELLED);
    let_go(NULL);
    assert_false(engine_paused(engine));
    assert_ok(engine_pause(engine, WAIT_MS));
    assert_ok(engine_resume(engine));
}

TESTS_BETWEEN(start, stop)
