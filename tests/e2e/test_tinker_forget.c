/* test_tinker_forget.c: what cw-trainer serve waits for, and keeps, for so long and no longer: a
 * request whose number never comes, and clients that are gone, with their sampling sessions. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

#define MAX_MS 20000

static struct tinker_pair pair;
static char session[128];
static struct tinker_run run;

static void start(const char *const more[])
{
    tinker_pair_start(&pair, NULL, NULL, more);
    run = tinker_whole(&pair.server, session);
}

static json_t *save(int seq_id)
{
    return tinker_post(&pair.server, "save_weights", 200,
                       "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":\"at-%d\"}", run.id, seq_id,
                       seq_id);
}

TEST(test_gap)
{
    start(OPTIONS("--gap-timeout", "0.5"));
    tinker_retrieve(&pair.server, save(1));
    json_t *held = save(4), *held_too = save(3);
    tinker_refused(tinker_retrieve(&pair.server, held), "request 2, which goes before it");
    tinker_refused(tinker_retrieve(&pair.server, held_too), "request 3 of");
    tinker_refused(tinker_retrieve(&pair.server, save(5)),
                   "create_training_client_from_state"); // at once
    json_t *late = tinker_retrieve(&pair.server, save(2));
    assert_non_null(json_object_get(late, "path"));
    tinker_refused(tinker_retrieve(&pair.server, save(6)), "have no gaps");
    tinker_pair_stop(&pair);
}

static bool is_there(const char *sampler)
{
    char whole[256];
    struct wire_answer a;
    snprintf(whole, sizeof whole, "/api/v1/samplers/%s", sampler);
    tinker_request(&pair.server, "GET", whole, NULL, NULL, &a);
    const bool there = a.status == 200;
    if (!there) assert_contains(bytes_text(&a.body), "--session-timeout");
    return there;
}

// One that finished is forgotten; one that sends heartbeats is not, nor one that has the weights.
TEST(test_sessions)
{
    char gone[160], alive[160];
    start(OPTIONS("--session-timeout", "1"));
    tinker_run_snapshot(&run, "", gone);
    tinker_finish(&pair.server, session);
    run = tinker_whole(&pair.server, session);
    tinker_run_snapshot(&run, "", alive);
    for (const int64_t deadline = clock_deadline_ns(MAX_MS); is_there(gone); clock_sleep_ms(100)) {
        assert_true(clock_now_ns() < deadline);
        tinker_post(&pair.server, "session_heartbeat", 200, "{\"session_id\":\"%s\"}", session);
    }
    assert_true(is_there(alive));
    clock_sleep_ms(2000); // no heartbeats
    assert_true(is_there(alive));
    tinker_refused(tinker_post(&pair.server, "asample", 404,
                               "{\"sampling_session_id\":\"%s\",\"seq_id\":0}", gone),
                   "--session-timeout");
    tinker_post(&pair.server, "get_info", 200, "{\"model_id\":\"%s\"}", run.id);
    tinker_pair_stop(&pair);
}
