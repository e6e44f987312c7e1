/* test_revoke.c: revoking the lease of a writer that lives but stands still. It is stopped with
 * SIGSTOP and wakes at the worst instant: between the owner's look at it and what the owner does
 * about it, a window that the page's test hook holds open. Whatever happens, nothing is written
 * under an even version, nor after the owner was told that it may restore. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control_page.h"
#include "common/base/process.h"
#include "tests/support/control_test.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define WORDS 4096

// What owner and writer share beside the page.
static struct shared {
    _Atomic uint64_t writes; // counts stores, so that one who still writes is seen
    _Atomic bool begun, ended;
    _Atomic int32_t target; // the writer to stop and wake
    _Atomic uint64_t weights[WORDS];
} * shared;

static void map_shared(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
}

static void unmap_shared(void)
{
    munmap(shared, sizeof *shared);
}

static void forget(void)
{
    shared->begun = shared->ended = false;
}

static void wait_for(_Atomic bool *flag)
{
    int64_t deadline = clock_deadline_ns(CONTROL_TEST_MS);
    while (!*flag && clock_now_ns() < deadline) clock_sleep_ms(1);
    assert_true(*flag);
}

static bool is_dead(pid_t pid) // and still a zombie
{
    siginfo_t info = {0};
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT), 0);
    return info.si_pid == pid;
}

static void assert_writes_no_more(void)
{
    uint64_t before = shared->writes;
    clock_sleep_ms(50);
    assert_true(shared->writes == before);
}

// ---- the window held open -----------------------------------------------------------------------

static pid_t stopped; // the writer that the hook wakes

// Wakes the writer once, and goes on when it has begun its update.
static void wake_it(void)
{
    if (!stopped) return;
    kill(stopped, SIGCONT);
    stopped = 0;
    wait_for(&shared->begun);
}

// A writer that stops between the grant and its first step, and writes on and on once it woke;
// `beats`: with a heartbeat, and to an end.
static pid_t fork_writer(bool beats)
{
    pid_t pid = control_test_fork();
    if (pid != 0) return pid;
    struct control *w = control_test_writer();
    if (control_quiesce(w, clock_deadline_ns(CONTROL_TEST_MS)) != ST_OK) _exit(1);
    raise(SIGSTOP);
    if (beats) control_heartbeat(w);
    if (control_write_begin(w) != ST_OK) _exit(2);
    shared->begun = true;
    int64_t until = clock_deadline_ns(beats ? 200 : CONTROL_TEST_MS);
    while (clock_now_ns() < until) {
        shared->writes++;
        if (beats) control_heartbeat(w);
    }
    if (control_write_end(w) != ST_OK) _exit(3);
    control_resume(w);
    control_lease_release(w);
    _exit(0);
}

static struct control *owner_with_hook(pid_t pid)
{
    struct control *c = control_test_owner();
    control_set_heartbeat_limit(c, 300);
    c->on_lost_writer = wake_it;
    stopped = pid;
    return c;
}

TEST(test_wakes_and_writes)
{
    forget();
    struct control *c = owner_with_hook(0);
    stopped = fork_writer(false);
    pid_t pid = stopped;
    assert_int_equal(control_test_event(c), CONTROL_TORN);
    // The owner restores from here on: nobody else may write.
    assert_true(control_version(c) & 1);
    assert_true(is_dead(pid));
    assert_writes_no_more();
    assert_int_equal(control_test_status(pid), 128 + SIGKILL);
    control_owner_update_begin(c);
    control_owner_update_end(c);
    assert_int_equal(control_check_writer(c), CONTROL_NONE);
    control_test_end(c);
}

// One that wakes for good is no longer lost: its update counts.
TEST(test_wakes_and_ends)
{
    forget();
    struct control *c = owner_with_hook(0);
    stopped = fork_writer(true);
    pid_t pid = stopped;
    assert_int_equal(control_test_event(c), CONTROL_UPDATED);
    assert_int_equal(control_version(c), 4);
    assert_int_equal(control_test_status(pid), 0);
    assert_int_equal(control_check_writer(c), CONTROL_NONE);
    control_test_end(c);
}

// ---- at any instant -----------------------------------------------------------------------------

// Publishes for ever: every weight is the version that follows.
static void write_for_ever(void)
{
    struct control *w = control_test_writer();
    for (;;) {
        control_heartbeat(w);
        if (control_quiesce(w, clock_deadline_ns(CONTROL_TEST_MS)) != ST_OK) _exit(0);
        if (control_write_begin(w) != ST_OK) _exit(0);
        for (int i = 0; i < WORDS; i++) {
            if (i == WORDS / 2) usleep(300); // so that it is also stopped half way
            shared->weights[i] = w->version + 2;
        }
        if (control_write_end(w) != ST_OK) _exit(0);
        control_resume(w);
    }
}

static void fill(uint64_t version)
{
    for (int i = 0; i < WORDS; i++) shared->weights[i] = version;
}

// While the owner samples, all weights are of one update, and none changes.
static void assert_whole(void)
{
    uint64_t first = shared->weights[0];
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < WORDS; i++)
            if (shared->weights[i] != first)
                fail_msg("weight %d is of version %d beside %d", i, (int)shared->weights[i],
                         (int)first);
}

// Stops and wakes whoever writes, at random instants, until told to end.
static void stop_and_wake(void)
{
    for (unsigned seed = 7; !shared->ended;) {
        pid_t now = shared->target;
        if (now) kill(now, SIGSTOP);
        usleep((useconds_t)rand_r(&seed) % 130000); // the owner looks every 100 ms
        if (now) kill(now, SIGCONT);
        usleep((useconds_t)rand_r(&seed) % 3000);
    }
}

TEST(test_stopped_at_random)
{
    enum { ROUNDS = 20 };
    struct control *c = control_test_owner();
    control_set_heartbeat_limit(c, 5);
    fill(2);
    forget();
    shared->target = 0;
    pid_t troubler = control_test_fork();
    if (troubler == 0) {
        stop_and_wake();
        _exit(0);
    }
    int gone = 0, torn = 0;
    for (int round = 0; round < ROUNDS; round++) {
        pid_t pid = control_test_fork();
        if (pid == 0) write_for_ever();
        shared->target = pid;
        for (bool lost = false; !lost;) {
            enum control_event event = control_test_event(c);
            assert_true(event != CONTROL_HELD);
            if (event == CONTROL_TORN) {
                assert_true(is_dead(pid));
                control_owner_update_begin(c);
                fill(control_version(c) + 1);
                assert_whole();
                control_owner_update_end(c);
                torn++;
            }
            gone += event == CONTROL_WRITER_GONE;
            assert_false(control_version(c) & 1);
            assert_whole();
            lost = event != CONTROL_UPDATED;
        }
        shared->target = 0;
        kill(pid, SIGKILL);
        control_test_status(pid);
    }
    shared->ended = true;
    assert_int_equal(control_test_status(troubler), 0);
    assert_int_equal(gone + torn, ROUNDS);
    print_message("%d revoked at an even version, %d torn\n", gone, torn);
    control_test_end(c);
}

// ---- ending a process ---------------------------------------------------------------------------

TEST(test_kill_process)
{
    pid_t pid = control_test_fork();
    if (pid == 0)
        for (;;) pause();
    uint64_t start = process_start_time(pid);
    assert_ok(process_kill(pid, start + 1, CONTROL_TEST_MS)); // another's: it is left alone
    assert_true(process_alive(pid, start));
    kill(pid, SIGSTOP);
    assert_ok(process_kill(pid, start, CONTROL_TEST_MS));
    assert_true(is_dead(pid));
    assert_ok(process_kill(pid, start, CONTROL_TEST_MS)); // dead already
    assert_int_equal(control_test_status(pid), 128 + SIGKILL);
}

TEST(test_may_not_kill)
{
    if (getuid() != 0) test_skip("only root can become somebody who may not kill");
    pid_t victim = control_test_fork();
    if (victim == 0)
        for (;;) pause();
    uint64_t start = process_start_time(victim);
    pid_t pid = control_test_fork();
    if (pid == 0) {
        if (setuid(65534) != 0) _exit(1);
        _exit(process_kill(victim, start, 1000) == ST_IO ? 0 : 2);
    }
    assert_int_equal(control_test_status(pid), 0);
    assert_true(process_alive(victim, start));
    kill(victim, SIGKILL);
    control_test_status(victim);
}

// A daemon whose connections took every descriptor must not take its trainer for dead.
TEST(test_alive_without_descriptors)
{
    uint64_t start = process_start_time(getpid());
    struct rlimit before, none;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = 0;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    bool alive = process_alive(getpid(), start);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_true(alive);
}

TESTS_BETWEEN(map_shared, unmap_shared)
