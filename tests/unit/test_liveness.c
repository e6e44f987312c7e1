/* test_liveness.c: common/ranks/liveness.h with forked processes as ranks: one is killed, stopped,
 * fails or is cut off from the network, and all others learn which. */
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/ranks/liveness.h"
#include "tests/support/rank_group.h"

#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#define RANKS 4

static struct rank_group group;
static char url[PATH_MAX + 8];

// What the ranks of a test do, and the folder in which they and the test leave one another signs.
static struct scene {
    const char *folder;
    double silence_s;
    int check_ms;     // how long a rank works, looking for losses
    int failing;      // the rank that fails of itself; 0: none
    bool looks_never; // works without looking
} scene;

static int open_scene(void **state)
{
    (void)state;
    const char *folder = test_folder();
    scene = (struct scene){.folder = folder, .silence_s = 1.5, .check_ms = 30000};
    snprintf(url, sizeof url, "file://%s", test_path(folder, "ranks"));
    return 0;
}

static int end_group(void **state)
{
    (void)state;
    rank_group_end(&group);
    return 0;
}

static void leave_sign(const char *what, int rank)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s-%d", scene.folder, what, rank);
    file_write_atomic(path, 0600, "", 0);
}

static bool sign_there(const char *what, int rank)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s-%d", scene.folder, what, rank);
    return file_exists(path);
}

static void await_sign(const char *what, int rank)
{
    const int64_t deadline = clock_deadline_ns(20000);
    while (!sign_there(what, rank)) {
        if (clock_ms_until(deadline) == 0) fail_msg("no sign %s of rank %d", what, rank);
        clock_sleep_ms(5);
    }
}

static void on_loss(void *context, const char *sentence)
{
    const struct rendezvous_options *o = context;
    if (*sentence) leave_sign("lost", o->who.rank);
}

static enum status work(const struct rendezvous_options *o, void *context)
{
    struct bytes bytes = BYTES_INIT;
    struct peers *peers = NULL;
    struct liveness *l = NULL;
    enum status st;
    (void)context;
    CHECK(rendezvous(o, &bytes, &peers));
    CHECK(liveness_start(peers, scene.silence_s, on_loss, (void *)o, &l));
    leave_sign("ready", o->who.rank);
    if (scene.failing && scene.failing == o->who.rank)
        FAIL(ST_TORN, "no room left on the disk of %s", "this host");
    if (scene.looks_never) clock_sleep_ms(scene.check_ms);
    st = liveness_check(l, scene.looks_never ? 0 : scene.check_ms);
out:
    liveness_end(l, st);
    bytes_release(&bytes);
    return st;
}

static void start_ranks(void)
{
    const struct rendezvous_options o = {
        .url = url, .who = {.size = RANKS, .local_size = RANKS}, .version = "1", .timeout_s = 20};
    for (int rank = 0; rank < RANKS; rank++) rank_group_add(&group, &o, rank, work, NULL);
    for (int rank = 0; rank < RANKS; rank++) await_sign("ready", rank);
}

// All but `gone` end with a sentence that says how it went, and by which host and pid.
static void others_know(int gone, pid_t pid, const char *how)
{
    char sentence[2048], host[65] = "", name[128];
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "rank %d (%s, pid %d) ", gone, host, (int)pid);
    for (int rank = 0; rank < RANKS; rank++) {
        if (rank == gone) continue;
        assert_int_equal(rank_group_outcome(&group, rank, sentence), ST_PEER_GONE);
        assert_contains(sentence, name);
        assert_contains(sentence, how);
        assert_true(sign_there("lost", rank));
    }
}

static void test_killed(void **state)
{
    static const int victims[] = {0, 2};
    for (size_t i = 0; i < 2; i++) {
        open_scene(state);
        start_ranks();
        const pid_t pid = group.list[victims[i]].pid;
        kill(pid, SIGKILL);
        others_know(victims[i], pid, "is gone: it was killed or ended without a word");
        end_group(NULL);
    }
}

// One that is stopped learns, once it goes on, that the others have gone.
static void test_stopped(void **state)
{
    static const int victims[] = {0, 3};
    for (size_t i = 0; i < 2; i++) {
        open_scene(state);
        start_ranks();
        const pid_t pid = group.list[victims[i]].pid;
        kill(pid, SIGSTOP);
        others_know(victims[i], pid, "is gone: nothing was heard of it for 2 s");
        kill(pid, SIGCONT);
        assert_int_equal(rank_group_outcome(&group, victims[i], NULL), ST_PEER_GONE);
        end_group(NULL);
    }
}

// With the silence that programs wait for, all know within ten seconds.
static void test_ten_seconds(void **state)
{
    (void)state;
    scene.silence_s = LIVENESS_SILENCE_S;
    start_ranks();
    const pid_t pid = group.list[1].pid;
    const int64_t since = clock_now_ns();
    kill(pid, SIGSTOP);
    others_know(1, pid, "is gone: nothing was heard of it for 6 s");
    assert_true(clock_ms_since(since) < 10000);
}

static void test_failed(void **state)
{
    (void)state;
    scene.failing = 2;
    start_ranks();
    const pid_t pid = group.list[2].pid;
    others_know(2, pid, "has failed: no room left on the disk of this host");
    assert_int_equal(rank_group_outcome(&group, 2, NULL), ST_TORN);
}

static void all_end_well(void)
{
    char sentence[2048];
    for (int rank = 0; rank < RANKS; rank++) {
        enum status st = rank_group_outcome(&group, rank, sentence);
        if (st != ST_OK) fail_msg("rank %d: %s", rank, sentence);
        assert_false(sign_there("lost", rank));
    }
}

// Each works longer than the silence, without a look; they end one by one, and that is no loss.
static void test_long_work(void **state)
{
    (void)state;
    scene.looks_never = true;
    scene.check_ms = 2500;
    scene.silence_s = 1;
    start_ranks();
    all_end_well();
}

// A batch system suspends a whole job, longer than any silence, and lets it go on.
static void test_all_stopped(void **state)
{
    (void)state;
    scene.silence_s = 3;
    scene.check_ms = 7000;
    start_ranks();
    for (int rank = 0; rank < RANKS; rank++) kill(group.list[rank].pid, SIGSTOP);
    clock_sleep_ms(4500);
    for (int rank = 0; rank < RANKS; rank++) kill(group.list[rank].pid, SIGCONT);
    all_end_well();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_killed, open_scene, end_group),
        cmocka_unit_test_setup_teardown(test_stopped, open_scene, end_group),
        cmocka_unit_test_setup_teardown(test_ten_seconds, open_scene, end_group),
        cmocka_unit_test_setup_teardown(test_failed, open_scene, end_group),
        cmocka_unit_test_setup_teardown(test_long_work, open_scene, end_group),
        cmocka_unit_test_setup_teardown(test_all_stopped, open_scene, end_group),
    };
    return cmocka_run_group_tests_name("liveness", tests, NULL, NULL);
}
