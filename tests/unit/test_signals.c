/* test_signals.c: trainer/run/stop.h: what a training process does with SIGINT and SIGTERM. The
 * trainer is a forked child with the writer's lease, the test its daemon. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/log.h"
#include "tests/support/control_test.h"
#include "trainer/run/stop.h"

#define FOREVER_MS 600000

// Asks to quiesce, as an update does, and waits as long as it takes.
static void ask_for_quiet(void)
{
    struct control *w = control_test_writer();
    struct stop *stop;
    log_open("trainer", LOG_ERROR);
    stop_catch_signals();
    const struct stop_options options = {.control = w, .first = ""};
    if (stop_watch_new(&options, &stop) != ST_OK) _exit(91);
    pthread_mutex_lock(stop_publish_lock(stop));
    enum status st = control_quiesce(w, clock_deadline_ns(FOREVER_MS));
    if (st != ST_OK) {
        clock_sleep_ms(CONTROL_TEST_MS); // it is about to be ended
        _exit(92);
    }
    if (control_write_begin(w) != ST_OK) _exit(93);
    clock_sleep_ms(500); // the second signal comes here
    if (control_write_end(w) != ST_OK) _exit(94);
    control_resume(w);
    pthread_mutex_unlock(stop_publish_lock(stop));
    clock_sleep_ms(CONTROL_TEST_MS);
    _exit(95);
}

static void wait_for_request(struct control *c)
{
    int64_t deadline = clock_deadline_ns(CONTROL_TEST_MS);
    while (!control_quiesce_requested(c) && clock_now_ns() < deadline) clock_sleep_ms(1);
    assert_true(control_quiesce_requested(c));
}

// Ends it after so long, so that a test that waits for it fails and does not hang.
static int status_within(pid_t pid, int ms)
{
    pid_t killer = control_test_fork();
    if (killer == 0) {
        clock_sleep_ms(ms);
        kill(pid, SIGKILL);
        _exit(0);
    }
    int status = control_test_status(pid);
    kill(killer, SIGKILL);
    control_test_status(killer);
    return status;
}

TEST(test_second_signal_while_it_waits)
{
    struct control *c = control_test_owner();
    pid_t pid = control_test_fork();
    if (pid == 0) ask_for_quiet();
    wait_for_request(c); // which is never granted
    kill(pid, SIGINT);
    clock_sleep_ms(150);
    assert_true(control_quiesce_requested(c)); // the first one changes nothing yet
    kill(pid, SIGINT);
    assert_int_equal(status_within(pid, CONTROL_TEST_MS), 1);
    assert_int_equal(control_version(c), 2);
    assert_int_equal(control_grant_quiesce(c), CONTROL_NONE);
    assert_int_equal(control_check_writer(c), CONTROL_WRITER_GONE);
    control_test_end(c);
}

// Never in the middle of an update.
TEST(test_second_signal_while_it_writes)
{
    struct control *c = control_test_owner();
    pid_t pid = control_test_fork();
    if (pid == 0) ask_for_quiet();
    wait_for_request(c);
    kill(pid, SIGINT);
    kill(pid, SIGTERM);
    // granted before the watching thread has looked; where it was first, there is no update at all
    enum control_event event = control_grant_quiesce(c);
    assert_int_equal(status_within(pid, CONTROL_TEST_MS), 1);
    assert_true(event == CONTROL_UPDATED || event == CONTROL_NONE);
    assert_int_equal(control_version(c), event == CONTROL_UPDATED ? 4 : 2);
    control_test_end(c);
}

// ---- counting ----------------------------------------------------------------------------------

static pthread_barrier_t barrier;

static void *raise_one(void *signal)
{
    pthread_barrier_wait(&barrier);
    raise(*(int *)signal);
    return NULL;
}

// Two signals that come to two threads at once are two.
TEST(test_two_at_once)
{
    enum { ROUNDS = 20 };
    struct control *c = control_test_owner();
    for (int round = 0; round < ROUNDS; round++) {
        pid_t pid = control_test_fork();
        if (pid == 0) {
            int numbers[2] = {SIGINT, SIGTERM};
            pthread_t threads[2];
            struct stop *stop;
            struct control *w = NULL;
            log_open("trainer", LOG_ERROR);
            if (control_open(control_test_page, CONTROL_TEST_HASH, &w) != ST_OK) _exit(90);
            stop_catch_signals();
            const struct stop_options options = {.control = w, .first = ""};
            if (stop_watch_new(&options, &stop) != ST_OK) _exit(91);
            pthread_barrier_init(&barrier, NULL, 2);
            for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, raise_one, &numbers[i]);
            for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
            clock_sleep_ms(CONTROL_TEST_MS);
            _exit(92);
        }
        assert_int_equal(status_within(pid, CONTROL_TEST_MS), 1);
    }
    control_test_end(c);
}

// ---- without weights that others see ------------------------------------------------------------

static void write_a_letter(void *fd)
{
    if (write(*(int *)fd, "x", 1) != 1) _exit(93);
}

// What is to be done before the end is done.
TEST(test_second_signal_leaves)
{
    int ends[2];
    char letter = 0;
    assert_int_equal(pipe(ends), 0);
    pid_t pid = control_test_fork();
    if (pid == 0) {
        struct stop *stop;
        const struct stop_options options = {
            .first = "", .leave = write_a_letter, .context = &ends[1]};
        log_open("trainer", LOG_ERROR);
        stop_catch_signals();
        if (stop_watch_new(&options, &stop) != ST_OK) _exit(91);
        raise(SIGINT);
        if (!stop_requested()) _exit(94);
        raise(SIGINT);
        clock_sleep_ms(CONTROL_TEST_MS);
        _exit(92);
    }
    assert_int_equal(status_within(pid, CONTROL_TEST_MS), 1);
    close(ends[1]);
    assert_int_equal(read(ends[0], &letter, 1), 1);
    close(ends[0]);
}

// Who presses Ctrl-C twice at once is told of both.
TEST(test_two_before_it_looks)
{
    int ends[2];
    char text[512];
    assert_int_equal(pipe(ends), 0);
    pid_t pid = control_test_fork();
    if (pid == 0) {
        struct stop *stop;
        dup2(ends[1], STDERR_FILENO);
        log_open("trainer", LOG_INFO);
        stop_catch_signals();
        if (stop_watch_new(&(struct stop_options){.first = "it ends"}, &stop) != ST_OK) _exit(91);
        raise(SIGINT);
        raise(SIGINT);
        clock_sleep_ms(CONTROL_TEST_MS);
        _exit(92);
    }
    assert_int_equal(status_within(pid, CONTROL_TEST_MS), 1);
    close(ends[1]);
    const ssize_t n = read(ends[0], text, sizeof text - 1);
    assert_true(n > 0);
    text[n] = 0;
    close(ends[0]);
    const char *first = strstr(text, "signal: it ends; a second one ends it at once");
    assert_non_null(first);
    assert_non_null(strstr(first, "second signal: ending at once"));
}

// A terminal that is closed asks for an end too, unless nohup says otherwise.
TEST(test_hangup)
{
    for (int ignored = 0; ignored < 2; ignored++) {
        pid_t pid = control_test_fork();
        if (pid == 0) {
            signal(SIGHUP, ignored ? SIG_IGN : SIG_DFL);
            stop_catch_signals();
            raise(SIGHUP);
            _exit(stop_requested() ? 10 : 11);
        }
        assert_int_equal(status_within(pid, CONTROL_TEST_MS), 10 + ignored);
    }
}

// It sends SIGHUP twice, through its shell and by itself, which is one wish; a signal after that is
// the second.
TEST(test_hangup_is_never_second)
{
    static const int numbers[][3] = {{SIGHUP, SIGHUP, SIGHUP},
                                     {SIGTERM, SIGHUP, SIGHUP},
                                     {SIGHUP, SIGHUP, SIGTERM},
                                     {SIGHUP, SIGINT, SIGHUP}};
    for (int i = 0; i < 4; i++) {
        pid_t pid = control_test_fork();
        if (pid == 0) {
            struct stop *stop;
            log_open("trainer", LOG_ERROR);
            signal(SIGHUP, SIG_DFL);
            stop_catch_signals();
            if (stop_watch_new(&(struct stop_options){.first = ""}, &stop) != ST_OK) _exit(91);
            for (int k = 0; k < 3; k++) raise(numbers[i][k]);
            clock_sleep_ms(i < 2 ? 400 : CONTROL_TEST_MS); // it looks every 100 ms
            _exit(10);
        }
        assert_int_equal(status_within(pid, CONTROL_TEST_MS), i < 2 ? 10 : 1);
    }
}

// Every run waits for it: it does not sleep on.
TEST(test_watch_ends_at_once)
{
    struct control *c = control_test_owner();
    const struct stop_options options = {.control = c, .first = ""};
    double least_ms = 1e9; // of some, should the machine be busy
    for (int i = 0; i < 5; i++) {
        struct stop *stop;
        assert_ok(stop_watch_new(&options, &stop));
        clock_sleep_ms(10);
        const int64_t since = clock_now_ns();
        stop_watch_end(stop);
        if (clock_ms_since(since) < least_ms) least_ms = clock_ms_since(since);
    }
    assert_true(least_ms < 50);
    control_test_end(c);
}
