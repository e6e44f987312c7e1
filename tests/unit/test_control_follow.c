/* test_control_follow.c: who writes another shard of weights whose version one writer moves: one
 * process a shard, whose end the owner waits for before it restores what was cut off. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/control_test.h"

static struct control *follower(int shard)
{
    struct control *c;
    assert_ok(control_open(control_test_page, CONTROL_TEST_HASH, &c));
    control_follow(c, shard);
    return c;
}

static enum status followers_end(const struct control *owner, int ms)
{
    return control_await_followers(owner, clock_deadline_ns(ms));
}

// A process that writes that shard until it is killed.
static pid_t fork_follower(struct control *owner, int shard)
{
    const pid_t pid = control_test_fork();
    if (pid == 0) {
        if (control_lease_take(follower(shard)) != ST_OK) _exit(1);
        for (;;) pause();
    }
    for (int i = 0; i < 500 && followers_end(owner, 0) == ST_OK; i++) clock_sleep_ms(10);
    return pid;
}

TEST(the_owner_waits_for_all_of_them)
{
    struct control *owner = control_test_owner(), *second = follower(2);
    assert_ok(followers_end(owner, 0));
    const pid_t first = fork_follower(owner, 1);
    assert_ok(control_lease_take(second));
    assert_status(followers_end(owner, 50), ST_TIMEOUT);
    assert_message("shard 1 still has a writer");
    kill(first, SIGKILL);
    control_test_dead(first);
    assert_status(followers_end(owner, 50), ST_TIMEOUT);
    assert_message("shard 2 still has a writer");
    control_lease_release(second);
    assert_ok(followers_end(owner, 0));
    control_free(second);
    control_test_end(owner);
}

TEST(a_shard_has_one_writer)
{
    struct control *owner = control_test_owner(), *second = follower(1);
    const pid_t first = fork_follower(owner, 1);
    assert_status(control_lease_take(second), ST_BUSY);
    assert_message("another process writes shard 1 of these weights");
    kill(first, SIGKILL);
    control_test_dead(first);
    assert_ok(followers_end(owner, CONTROL_TEST_MS));
    assert_ok(control_lease_take(second));
    assert_ok(control_lease_take(second)); // as often as one likes
    control_free(second);
    assert_ok(followers_end(owner, 0));
    control_test_end(owner);
}
