/* test_engine_takeover.c: two servers and one bridge: a second one is refused, a killed one is
 * replaced and its memory freed. The other server is this program again with --daemon as its first
 * word. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/engine_bench.h"

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

TEST(second_daemon_is_refused)
{
    struct test_child child;
    const int32_t prompt[5] = {1, 2, 3, 4, 5};
    struct bench *b = bench_plain();
    start_self(&child, "--daemon", model_a, "0", false);
    assert_int_equal(test_wait(&child, WAIT_MS), 1);
    assert_contains(test_read(child.log), "another server uses this bridge");
    assert_true(file_exists(bridge_path));
    run_writer(model_b, "1", false); // and the first one's bridge works
    assert_int_equal(greedy_of(b, prompt, 5, 5)->sample[0].tokens[0].weight_version, 4);
}

struct left { // of a daemon in shared memory: paths
    char arena[192], page[192];
};

static struct left left_by(const char *bridge)
{
    struct left ret;
    struct bridge_file *file = NULL;
    assert_ok(bridge_file_read(bridge, &file));
    snprintf(ret.arena, sizeof ret.arena, "/dev/shm%s", file->roles[0].handle);
    snprintf(ret.page, sizeof ret.page, "/dev/shm%s", file->control_page);
    bridge_file_free(file);
    assert_true(file_exists(ret.arena) && file_exists(ret.page));
    return ret;
}

// Any server that starts may free what it left, of a test beside this one, too: so it is looked at
// before.
static struct left killed_daemon(void)
{
    struct test_child child;
    start_self(&child, "--daemon", model_a, "0", true);
    for (int i = 0; i < WAIT_MS && !file_exists(bridge_path); i++) clock_sleep_ms(1);
    const struct left left = left_by(bridge_path);
    test_end(&child); // SIGKILL
    return left;
}

// A daemon that was killed leaves page, arena and bridge file; the next one takes their place.
TEST(killed_daemon_is_replaced)
{
    const struct engine_options options = plain_options();
    const struct left left = killed_daemon();
    struct bench *b = bench_of(&options);
    assert_false(file_exists(left.arena));
    run_writer(model_b, "1", false);
    assert_int_equal(stats_of(b).updates, 1);
    test_now(b);
    assert_false(file_exists(options.bridge_path));
}

// What it left in shared memory goes when any daemon starts, also one with another bridge; what a
// living one uses stays.
TEST(killed_daemons_memory_is_freed)
{
    const struct engine_options options = plain_options();
    struct engine_options other = options;
    const struct left left = killed_daemon();
    other.bridge_path = test_path(folder, "other-bridge.json");
    bench_of(&other);
    assert_false(file_exists(left.arena) || file_exists(left.page));
    const struct left living = left_by(other.bridge_path);
    bench_of(&options);
    assert_true(file_exists(living.page));
}

TESTS_BETWEEN(engine_bench_set_up, NULL)

int main(int argc, char **argv)
{
    if (argc > 4 && strcmp(argv[1], "--writer") == 0) return writer_main(argc, argv);
    if (argc > 4 && strcmp(argv[1], "--daemon") == 0) return daemon_main(argc > 5, argv);
    return test_main();
}
