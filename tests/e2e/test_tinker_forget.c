/* test_tinker_forget.c: what cw-trainer serve waits for, and keeps, for so long and no longer: a
 * request whose number never comes, and clients that are gone, with their sampling sessions. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"

#define MAX_MS 20000

static void start(const char *const more[])
{
    tinker_pair_start(NULL, NULL, more);
    trained = tinker_whole();
}

static json_t *save(int seq_id)
{
    return tinker_post("save_weights", 200,
                       "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":\"at-%d\"}", trained.id, seq_id,
                       seq_id);
}

TINKER_TEST(test_gap)
{
    start(args("--gap-timeout 0.5"));
    tinker_retrieve(save(1));
    json_t *held = save(4), *held_too = save(3);
    tinker_refused(tinker_retrieve(held), "request 2, which goes before it");
    tinker_refused(tinker_retrieve(held_too), "request 3 of");
    tinker_refused(tinker_retrieve(save(5)),
                   "create_training_client_from_state"); // at once
    json_t *late = tinker_retrieve(save(2));
    assert_non_null(json_object_get(late, "path"));
    tinker_refused(tinker_retrieve(save(6)), "have no gaps");
}

static bool is_there(const char *sampler)
{
    struct wire_answer a;
    tinker_request("GET", test_text("/api/v1/samplers/%s", sampler), NULL, NULL, &a);
    const bool there = a.status == 200;
    if (!there) assert_contains(bytes_text(&a.body), "--session-timeout");
    return there;
}

// One that finished is forgotten; one that sends heartbeats is not, nor one that has the weights.
TINKER_TEST(test_sessions)
{
    const char *gone, *alive;
    start(args("--session-timeout 1"));
    gone = tinker_run_snapshot(&trained, "");
    tinker_finish(session);
    trained = tinker_whole();
    alive = tinker_run_snapshot(&trained, "");
    for (const int64_t deadline = clock_deadline_ns(MAX_MS); is_there(gone); clock_sleep_ms(100)) {
        assert_true(clock_now_ns() < deadline);
        tinker_post("session_heartbeat", 200, "{\"session_id\":\"%s\"}", session);
    }
    assert_true(is_there(alive));
    clock_sleep_ms(2000); // no heartbeats
    assert_true(is_there(alive));
    tinker_refused(
        tinker_post("asample", 404, "{\"sampling_session_id\":\"%s\",\"seq_id\":0}", gone),
        "--session-timeout");
    tinker_post("get_info", 200, "{\"model_id\":\"%s\"}", trained.id);
}
