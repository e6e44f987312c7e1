/* test_control.c: the control page between real processes: the test is the owner (the engine),
 * forked children are writers, and they are killed or stopped at every stage of an update; who
 * writes another shard of weights whose version one writer moves: one process a shard, whose end
 * the owner waits for before it restores what was cut off. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control_page.h"
#include "tests/support/control_test.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define WEIGHTS 65536

// ---- creating and opening -----------------------------------------------------------------------

LATER(control_test_end)

static struct control *owner(void)
{
    return test_later(control_test_owner(), control_test_end_later);
}

// Opened without a lease.
static struct control *opened(void)
{
    struct control *c = NULL;
    assert_ok(control_open(control_test_page, CONTROL_TEST_HASH, &c));
    return c;
}

static struct control_info info_of(struct control *c)
{
    struct control_info ret;
    control_info(c, &ret);
    return ret;
}

static void owner_update(struct control *c)
{
    control_owner_update_begin(c);
    control_owner_update_end(c);
}

TEST(test_starts_at_two)
{
    struct control *c = NULL;
    snprintf(control_test_page, CONTROL_TEST_NAME, "/commonweight-test-%d", (int)getpid());
    assert_ok(control_create(control_test_page, CONTROL_TEST_HASH, &c));
    test_later(c, control_test_end_later);
    assert_int_equal(control_version(c), 1);
    assert_false(info_of(c).torn); // being loaded
    control_owner_update_begin(c);
    assert_int_equal(control_version(c), 1);
    control_owner_update_end(c);
    assert_int_equal(control_version(c), 2);
    const struct control_info f = info_of(c);
    assert_true(f.owner_alive);
    assert_int_equal(f.owner_pid, getpid());
    assert_int_equal(f.writer_pid, 0);
    assert_string_equal(f.layout_hash, CONTROL_TEST_HASH);
    control_owner_update_begin(c);
    assert_int_equal(control_version(c), 3);
    assert_false(info_of(c).torn); // a reload
    control_owner_update_end(c);
    assert_int_equal(control_version(c), 4);
}

TEST(test_one_owner)
{
    struct control *c = control_test_owner(), *second = NULL;
    assert_fails(control_create(control_test_page, CONTROL_TEST_HASH, &second), ST_BUSY,
                 "another server uses this bridge");
    assert_null(second);
    control_test_end(c);

    // A killed owner's page is replaced.
    pid_t pid = control_test_fork();
    if (pid == 0) {
        struct control *child = NULL;
        if (control_create(control_test_page, CONTROL_TEST_HASH, &child) != ST_OK) _exit(1);
        kill(getpid(), SIGKILL);
    }
    control_test_dead(pid);
    assert_fails(control_open(control_test_page, CONTROL_TEST_HASH, &c), ST_PEER_GONE, "died");
    assert_ok(control_create(control_test_page, CONTROL_TEST_HASH, &c));
    assert_int_equal(control_test_status(pid), 128 + SIGKILL);
    control_test_end(c);
    assert_int_equal(control_open(control_test_page, CONTROL_TEST_HASH, &c), ST_NOT_FOUND);
}

static void write_shm(const char *name, const char *text, size_t size)
{
    int fd = shm_open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    assert_int_equal(pwrite(fd, text, strlen(text), 0), strlen(text));
    close(fd);
}

TEST(test_open_errors)
{
    static const struct {
        const char *head;
        size_t size;
        const char *words;
    } pages[] = {{"NOTOURS!", 4096, "another program"},
                 {"CWEIGHTS", 100, "100 bytes"},
                 {"CWEIGHTS\x63", 4096, "format 99"}};
    struct control *c = control_test_owner(), *other = NULL;
    char wrong[65] = {0};
    memset(wrong, 'f', 64);
    assert_fails(control_open(control_test_page, wrong, &other), ST_MISMATCH, "layout");
    assert_status(control_open("no-slash", CONTROL_TEST_HASH, &other), ST_INVALID);
    assert_status(control_open("/a/b", CONTROL_TEST_HASH, &other), ST_INVALID);
    assert_fails(control_open("/commonweight-test-none", CONTROL_TEST_HASH, &other), ST_NOT_FOUND,
                 "/commonweight-test-none");
    control_test_end(c);
    for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
        write_shm(control_test_page, pages[i].head, pages[i].size);
        assert_fails(control_open(control_test_page, CONTROL_TEST_HASH, &other), ST_MISMATCH,
                     pages[i].words);
    }
    write_shm(control_test_page, pages[0].head, pages[0].size);
    assert_fails(control_create(control_test_page, CONTROL_TEST_HASH, &other), ST_MISMATCH,
                 "remove /dev/shm/");
    shm_unlink(control_test_page);
    assert_null(other);
}

// ---- updates ------------------------------------------------------------------------------------

// 1,000 publishes by a child while the engine "samples": each number must carry its version.
TEST(test_no_torn_read)
{
    enum { PUBLISHES = 1000 };
    struct control *c = owner();
    uint64_t *weights = mmap(NULL, WEIGHTS * sizeof *weights, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(weights != MAP_FAILED);
    for (int i = 0; i < WEIGHTS; i++) weights[i] = 2;
    pid_t pid = control_test_fork();
    if (pid == 0) {
        struct control *w = control_test_writer();
        for (int n = 0; n < PUBLISHES; n++) {
            control_heartbeat(w);
            if (control_quiesce(w, clock_deadline_ns(CONTROL_TEST_MS)) != ST_OK) _exit(1);
            if (control_write_begin(w) != ST_OK) _exit(2);
            for (int i = 0; i < WEIGHTS; i++) weights[i] += 2;
            if (control_write_end(w) != ST_OK) _exit(3);
            control_resume(w);
        }
        control_lease_release(w);
        control_free(w);
        _exit(0);
    }
    uint64_t updates = 0;
    int64_t deadline = clock_deadline_ns(60000);
    while (updates < PUBLISHES && clock_now_ns() < deadline) {
        if (control_quiesce_requested(c)) {
            enum control_event event = control_grant_quiesce(c);
            assert_int_equal(event, CONTROL_UPDATED);
            updates++;
        }
        uint64_t version = control_version(c); // a forward pass
        for (int i = 0; i < WEIGHTS; i++)
            if (weights[i] != version) fail_msg("weight %d of version %d", i, (int)version);
        assert_int_equal(control_version(c), version);
    }
    assert_int_equal(updates, PUBLISHES);
    assert_int_equal(control_test_status(pid), 0);
    assert_int_equal(control_version(c), 2 + 2 * PUBLISHES);
    const struct control_info f = info_of(c);
    assert_int_equal(f.publishes, PUBLISHES);
    assert_int_equal(f.writer_pid, 0); // released
    print_message("last publish: wait %.3f ms, write %.3f ms, pause %.3f ms\n", f.last_wait_ms,
                  f.last_write_ms, f.last_pause_ms);
    munmap(weights, WEIGHTS * sizeof *weights);
}

enum stage { LEASED, REQUESTED, GRANTED, ODD, EVEN, RESUMED };

static void *kill_soon(void *unused)
{
    (void)unused;
    clock_sleep_ms(50);
    kill(getpid(), SIGKILL);
    return NULL;
}

static void die_at(enum stage wanted, enum stage here)
{
    if (wanted == here) kill(getpid(), SIGKILL);
}

static void writer_that_dies(enum stage stage)
{
    struct control *w = control_test_writer();
    die_at(stage, LEASED);
    if (stage == REQUESTED) {
        pthread_t thread;
        pthread_create(&thread, NULL, kill_soon, NULL);
    }
    if (control_quiesce(w, clock_deadline_ns(CONTROL_TEST_MS)) != ST_OK) _exit(1);
    die_at(stage, GRANTED);
    if (control_write_begin(w) != ST_OK) _exit(2);
    die_at(stage, ODD);
    if (control_write_end(w) != ST_OK) _exit(3);
    die_at(stage, EVEN);
    control_resume(w);
    die_at(stage, RESUMED);
    _exit(4);
}

static void check_death(enum stage stage, enum control_event first, uint64_t version)
{
    struct control *c = control_test_owner();
    pid_t pid = control_test_fork();
    if (pid == 0) writer_that_dies(stage);
    if (stage == LEASED || stage == REQUESTED) control_test_dead(pid);
    if (stage == REQUESTED) assert_true(control_quiesce_requested(c));
    int64_t start = clock_now_ns();
    assert_int_equal(control_test_event(c), first);
    assert_true(clock_ms_since(start) < 1000);
    assert_int_equal(control_version(c), version);
    assert_int_equal(info_of(c).torn, first == CONTROL_TORN);
    if (first == CONTROL_UPDATED) assert_int_equal(control_test_event(c), CONTROL_WRITER_GONE);
    assert_int_equal(control_test_status(pid), 128 + SIGKILL);
    assert_int_equal(control_check_writer(c), CONTROL_NONE);
    assert_false(control_quiesce_requested(c));

    // Another writer comes: refused while the weights are torn, then works.
    struct control *next = opened();
    if (first == CONTROL_TORN) {
        assert_int_equal(control_lease_take(next), ST_TORN);
        control_owner_update_begin(c);
        assert_true(info_of(c).torn); // until the restoration ends
        assert_int_equal(control_lease_take(next), ST_TORN);
        control_owner_update_end(c);
        assert_false(info_of(c).torn);
        assert_int_equal(control_version(c), version + 1);
    }
    assert_ok(control_lease_take(next));
    control_lease_release(next);
    control_free(next);
    pid = control_test_fork();
    if (pid == 0) writer_that_dies(RESUMED);
    assert_int_equal(control_test_event(c), CONTROL_UPDATED);
    assert_int_equal(control_test_status(pid), 128 + SIGKILL);
    control_test_end(c);
}

TEST(test_dies_anywhere)
{
    check_death(LEASED, CONTROL_WRITER_GONE, 2);
    check_death(REQUESTED, CONTROL_WRITER_GONE, 2);
    check_death(GRANTED, CONTROL_WRITER_GONE, 2);
    check_death(ODD, CONTROL_TORN, 3);
    check_death(EVEN, CONTROL_UPDATED, 4);
    check_death(RESUMED, CONTROL_UPDATED, 4);
}
TEST(test_update_fails)
{
    struct control *c = owner();
    pid_t pid = control_test_fork();
    if (pid == 0) {
        struct control *w = control_test_writer();
        if (control_quiesce(w, clock_deadline_ns(CONTROL_TEST_MS)) != ST_OK) _exit(1);
        if (control_write_begin(w) != ST_OK) _exit(2);
        control_resume(w); // the update failed: odd
        clock_sleep_ms(200);
        // whatever it tries afterwards is refused
        _exit(control_write_end(w) == ST_BUSY && control_quiesce(w, 0) == ST_BUSY &&
                      control_set_snapshot(w, "/") == ST_BUSY
                  ? 0
                  : 3);
    }
    assert_int_equal(control_test_event(c), CONTROL_TORN);
    assert_true(control_version(c) & 1);
    assert_int_equal(control_test_status(pid), 0);
    assert_true(control_version(c) & 1); // its late control_write_end() changed nothing
    owner_update(c);
    assert_false(control_version(c) & 1);
    assert_int_equal(control_check_writer(c), CONTROL_NONE);
}

// ---- a writer that stands still -----------------------------------------------------------------

static pid_t fork_stopping_writer(bool while_odd)
{
    pid_t pid = control_test_fork();
    if (pid != 0) return pid;
    struct control *w = control_test_writer();
    if (control_quiesce(w, clock_deadline_ns(CONTROL_TEST_MS)) != ST_OK) _exit(1);
    if (while_odd && control_write_begin(w) != ST_OK) _exit(2);
    raise(SIGSTOP);
    enum status st = while_odd ? control_write_end(w) : control_write_begin(w);
    if (st != ST_BUSY || !strstr(status_message(), "no longer holds")) _exit(3);
    control_heartbeat(w); // must not look like the next holder's
    if (control_quiesce(w, clock_deadline_ns(100)) != ST_BUSY) _exit(4);
    control_resume(w);
    control_lease_release(w);
    _exit(0);
}

TEST(test_stopped_before_writing)
{
    struct control *c = owner();
    control_set_heartbeat_limit(c, 300);
    pid_t pid = fork_stopping_writer(false);
    assert_int_equal(control_test_event(c), CONTROL_WRITER_GONE);
    uint64_t version = control_version(c);
    assert_int_equal(version, 4); // even, and not the number the writer knows
    kill(pid, SIGCONT);
    assert_int_equal(control_test_status(pid), 0);
    assert_int_equal(control_version(c), version);
    assert_int_equal(control_check_writer(c), CONTROL_NONE);
}

TEST(test_stopped_while_writing)
{
    struct control *c = owner();
    control_set_heartbeat_limit(c, 300);
    pid_t pid = fork_stopping_writer(true);
    // It could write on when it wakes, whatever the page says: so it never does.
    assert_int_equal(control_test_event(c), CONTROL_TORN);
    assert_int_equal(control_test_status(pid), 128 + SIGKILL);
    owner_update(c);
    assert_false(control_version(c) & 1);
    assert_int_equal(control_check_writer(c), CONTROL_NONE);
}

// ---- leases and waiting -------------------------------------------------------------------------

TEST(test_one_writer)
{
    struct control *c = owner(), *first = opened(), *second = opened();
    char pid[32];
    assert_int_equal(control_quiesce(first, 0), ST_INVALID);
    assert_int_equal(control_write_begin(first), ST_INVALID);
    assert_int_equal(control_write_end(first), ST_INVALID);
    assert_ok(control_lease_take(first));
    assert_ok(control_lease_take(first));
    assert_int_equal(control_lease_take(second), ST_BUSY);
    snprintf(pid, sizeof pid, "process %d is training", (int)getpid());
    assert_message(pid);
    assert_int_equal(control_write_begin(first), ST_INVALID); // without a grant
    control_lease_release(first);
    assert_ok(control_lease_take(second));
    control_lease_release(first); // holds nothing: changes nothing
    assert_int_equal(info_of(c).writer_pid, getpid());
    assert_true(info_of(c).writer_alive);
    control_lease_release(second);

    // A dead writer's lease is taken over without the owner's help.
    pid_t child = control_test_fork();
    if (child == 0) writer_that_dies(LEASED);
    control_test_dead(child);
    assert_ok(control_lease_take(first));
    assert_int_equal(control_check_writer(c), CONTROL_NONE);
    control_test_status(child);
    control_free(first);
    control_free(second);
}

TEST(test_quiet_times_out)
{
    struct control *c = owner(), *w = opened();
    assert_ok(control_lease_take(w));
    assert_fails(control_quiesce(w, clock_deadline_ns(150)), ST_TIMEOUT, "did not pause");
    assert_false(control_quiesce_requested(c));
    assert_int_equal(control_grant_quiesce(c), CONTROL_NONE);
    control_free(w);
}

TEST(test_owner_rewrote)
{
    struct control *c = owner();
    pid_t pid = control_test_fork();
    if (pid == 0) {
        struct control *w = control_test_writer();
        while (control_version(w) == 2) clock_sleep_ms(5);
        clock_sleep_ms(20); // the owner's update ends
        enum status st = control_quiesce(w, clock_deadline_ns(CONTROL_TEST_MS));
        _exit(st == ST_MISMATCH && strstr(status_message(), "rewrote") ? 0 : 2);
    }
    const int64_t deadline = clock_deadline_ns(CONTROL_TEST_MS);
    while (info_of(c).writer_pid == 0 && clock_now_ns() < deadline) continue;
    clock_sleep_ms(20);
    owner_update(c);
    // The refused update leaves nothing behind; then the writer leaves.
    assert_int_equal(control_test_event(c), CONTROL_WRITER_GONE);
    assert_int_equal(control_version(c), 4);
    assert_int_equal(control_test_status(pid), 0);
}

TEST(test_owner_dies)
{
    for (int orderly = 0; orderly < 2; orderly++) {
        snprintf(control_test_page, CONTROL_TEST_NAME, "/commonweight-test-%d-%d", (int)getpid(),
                 orderly);
        pid_t pid = control_test_fork();
        if (pid == 0) {
            struct control *c = NULL;
            if (control_create(control_test_page, CONTROL_TEST_HASH, &c) != ST_OK) _exit(1);
            control_owner_update_end(c);
            int64_t deadline = clock_deadline_ns(CONTROL_TEST_MS);
            while (!control_quiesce_requested(c) && clock_now_ns() < deadline) clock_sleep_ms(5);
            clock_sleep_ms(50);
            if (!orderly) kill(getpid(), SIGKILL);
            control_end(c);
            clock_sleep_ms(3000); // still there, but it has left the page
            _exit(0);
        }
        struct control *w = NULL;
        int64_t deadline = clock_deadline_ns(CONTROL_TEST_MS);
        while (control_open(control_test_page, CONTROL_TEST_HASH, &w) != ST_OK &&
               clock_now_ns() < deadline)
            clock_sleep_ms(5);
        assert_non_null(w);
        enum status st;
        while ((st = control_lease_take(w)) == ST_TORN && clock_now_ns() < deadline)
            clock_sleep_ms(5);
        assert_ok(st);
        int64_t start = clock_now_ns();
        assert_int_equal(control_quiesce(w, clock_deadline_ns(CONTROL_TEST_MS)), ST_PEER_GONE);
        assert_true(clock_ms_since(start) < 1500);
        assert_message("from the last checkpoint");
        assert_int_equal(control_owner_alive(w), ST_PEER_GONE);
        control_free(w);
        kill(pid, SIGKILL);
        control_test_status(pid);
        shm_unlink(control_test_page);
    }
}

TEST(test_snapshot)
{
    struct control *c = owner(), *w = opened();
    char folder[512];
    control_snapshot(c, folder, sizeof folder);
    assert_string_equal(folder, "");
    assert_int_equal(control_set_snapshot(w, "/tmp"), ST_INVALID);
    assert_ok(control_lease_take(w));
    assert_ok(control_set_snapshot(w, "/tmp/../tmp"));
    control_snapshot(c, folder, sizeof folder);
    assert_string_equal(folder, "/tmp");
    assert_int_equal(control_set_snapshot(w, "/no/such/folder"), ST_NOT_FOUND);
    control_snapshot(c, folder, sizeof folder);
    assert_string_equal(folder, "/tmp");
    control_free(w);
}

TEST(test_bell)
{
    struct control *c = owner();
    uint32_t seen = control_doorbell(c);
    pid_t pid = control_test_fork();
    if (pid == 0) {
        struct control *w = NULL;
        if (control_open(control_test_page, CONTROL_TEST_HASH, &w) != ST_OK) _exit(1);
        clock_sleep_ms(50);
        control_notify(w);
        control_free(w);
        _exit(0);
    }
    int64_t start = clock_now_ns();
    control_wait(c, seen, CONTROL_TEST_MS);
    assert_true(clock_ms_since(start) < CONTROL_TEST_MS / 2);
    assert_true(control_doorbell(c) != seen);
    control_wait(c, seen, CONTROL_TEST_MS); // notified already: returns at once
    assert_true(clock_ms_since(start) < CONTROL_TEST_MS / 2);
    seen = control_doorbell(c);
    start = clock_now_ns();
    control_wait(c, seen, 30);
    assert_true(clock_ms_since(start) >= 30);
    assert_int_equal(control_test_status(pid), 0);
}

TEST(test_processes)
{
    uint64_t start = process_start_time(getpid());
    assert_true(start > 0);
    assert_true(process_alive(getpid(), start));
    assert_false(process_alive(getpid(), start + 1));
    assert_false(process_alive(0, start));
    pid_t pid = control_test_fork();
    if (pid == 0) _exit(0);
    control_test_dead(pid);
    assert_false(process_alive(pid, process_start_time(pid))); // a zombie is dead
    control_test_status(pid);
    assert_int_equal(process_start_time(pid), 0);
    // of the wall's clock: this test's process began before its child, to a tick
    const int64_t now = clock_wall_ms(), started = process_started_ms(getpid());
    assert_in_range(now - started, 0, 600000);
    pid = control_test_fork();
    if (pid == 0) pause();
    assert_in_range(process_started_ms(pid), now - 20, clock_wall_ms());
    kill(pid, SIGKILL);
    control_test_status(pid);
    assert_in_range(process_started_ms(pid), now, clock_wall_ms()); // nobody knows
}

// ---- writers of other shards --------------------------------------------------------------------

static struct control *follower(int shard)
{
    struct control *c = opened();
    control_follow(c, shard);
    return c;
}

static enum status followers_end(const struct control *c, int ms)
{
    return control_await_followers(c, clock_deadline_ns(ms));
}

// A process that writes that shard until it is killed.
static pid_t fork_follower(struct control *c, int shard)
{
    const pid_t pid = control_test_fork();
    if (pid == 0) {
        if (control_lease_take(follower(shard)) != ST_OK) _exit(1);
        for (;;) pause();
    }
    for (int i = 0; i < 500 && followers_end(c, 0) == ST_OK; i++) clock_sleep_ms(10);
    return pid;
}

TEST(the_owner_waits_for_all_of_them)
{
    struct control *c = owner(), *second = follower(2);
    assert_ok(followers_end(c, 0));
    const pid_t first = fork_follower(c, 1);
    assert_ok(control_lease_take(second));
    assert_fails(followers_end(c, 50), ST_TIMEOUT, "shard 1 still has a writer");
    kill(first, SIGKILL);
    control_test_dead(first);
    assert_fails(followers_end(c, 50), ST_TIMEOUT, "shard 2 still has a writer");
    control_lease_release(second);
    assert_ok(followers_end(c, 0));
    control_free(second);
}

TEST(a_shard_has_one_writer)
{
    struct control *c = owner(), *second = follower(1);
    const pid_t first = fork_follower(c, 1);
    assert_fails(control_lease_take(second), ST_BUSY,
                 "another process writes shard 1 of these weights");
    kill(first, SIGKILL);
    control_test_dead(first);
    assert_ok(followers_end(c, CONTROL_TEST_MS));
    assert_ok(control_lease_take(second));
    assert_ok(control_lease_take(second)); // as often as one likes
    control_free(second);
    assert_ok(followers_end(c, 0));
}

// A server that starts takes no page away that another one is making at that moment, as servers of
// several GPUs do that start at once.
TEST(test_pages_in_the_making)
{
    char name[64], fresh[96];
    snprintf(name, sizeof name, "/commonweight-test-sweep-%d", (int)getpid());
    snprintf(fresh, sizeof fresh, "%s.%d", name, (int)getpid());
    const pid_t sweeper = control_test_fork();
    if (sweeper == 0)
        for (;;) control_sweep(fresh);
    enum status st = ST_OK;
    for (int i = 0; i < 2000; i++) {
        struct control *c;
        st = control_create(name, "layout", &c);
        if (st != ST_OK) break;
        control_test_end(c);
    }
    kill(sweeper, SIGKILL);
    control_test_status(sweeper);
    assert_ok(st);
}

// ---- the page -----------------------------------------------------------------------------------

// docs/internals/bridge.md tells other languages where each word lies.
#define FIELD(name)                                                                                \
    {                                                                                              \
#name, offsetof(struct page, name), sizeof((struct page *)0)->name                         \
    }
static const struct {
    const char *name;
    size_t offset, bytes;
} fields[] = {
    FIELD(magic),
    FIELD(format),
    FIELD(bytes),
    FIELD(layout_hash),
    FIELD(owner_start),
    FIELD(owner_pid),
    FIELD(owner_namespace),
    FIELD(version),
    FIELD(publishes),
    FIELD(owner_heartbeat_ns),
    FIELD(owner_updating),
    FIELD(ended),
    FIELD(phase),
    FIELD(doorbell),
    FIELD(lease),
    FIELD(identity),
    FIELD(writer_heartbeat_ns),
    FIELD(heartbeat_limit_ms),
    FIELD(wait_ns),
    FIELD(write_ns),
    FIELD(pause_ns),
    FIELD(snapshot_turn),
    FIELD(snapshot),
    FIELD(noted_publishes),
    FIELD(loaded),
    FIELD(policy_version),
    FIELD(roles_given),
    FIELD(roles),
};

TEST(the_page_says_where_each_word_lies)
{
    char *text = test_read(test_path(test_root(), "docs/internals/bridge.md"));
    int rows = 0;
    for (char *at = text; (at = strstr(at, "\n| ")); at += 3)
        if (at[3] >= '0' && at[3] <= '9') rows++;
    assert_int_equal(rows, sizeof fields / sizeof *fields);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        char row[96];
        snprintf(row, sizeof row, "| %zu | %zu | `%s` |", fields[i].offset, fields[i].bytes,
                 fields[i].name);
        assert_contains(text, row);
    }
}
