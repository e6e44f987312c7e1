/* test_liveness.c: common/ranks/liveness.h with forked processes as ranks: one is killed, stopped,
 * fails or is cut off from the network, and all others learn which. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/liveness.h"
#include "tests/support/rank_group.h"

#include <pthread.h>

#define RANKS 4

// Ranks, what they do, and the folder in which they and the test leave one another signs.
struct scene {
    struct rank_group group;
    const char *folder;
    double silence_s;
    int check_ms;      // how long a rank works, looking for losses
    int failing;       // the rank that fails of itself; 0: none
    bool looks_never;  // works without looking
    int64_t signal_ns; // when a rank was sent a signal
};

// Those that take seconds are played side by side, begun before the first test.
static struct scene first_stopped, last_stopped, ten_seconds, long_work, all_stopped;
static struct scene scene; // of a test that is quick

static void open_scene(struct scene *s)
{
    *s = (struct scene){.folder = test_folder(), .silence_s = 3, .check_ms = 30000};
}

// It holds when it was left.
static void leave_sign(const struct scene *s, const char *what, int rank)
{
    char path[PATH_MAX];
    const int64_t now = clock_now_ns();
    snprintf(path, sizeof path, "%s/%s-%d", s->folder, what, rank);
    file_write_atomic(path, 0600, &now, sizeof now);
}

static bool sign_there(const struct scene *s, const char *what, int rank)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s-%d", s->folder, what, rank);
    return file_exists(path);
}

static void await_sign(const struct scene *s, const char *what, int rank)
{
    const int64_t deadline = clock_deadline_ns(20000);
    while (!sign_there(s, what, rank)) {
        if (clock_ms_until(deadline) == 0) fail_msg("no sign %s of rank %d", what, rank);
        clock_sleep_ms(5);
    }
}

struct rank_of { // a rank's own process
    const struct scene *scene;
    int rank;
};

static void on_loss(void *context, const char *sentence)
{
    const struct rank_of *own = context;
    if (*sentence) leave_sign(own->scene, "lost", own->rank);
}

static enum status work(const struct rendezvous_options *o, void *context)
{
    const struct scene *s = context;
    struct rank_of own = {.scene = s, .rank = o->who.rank};
    SCOPED(bytes_release) struct bytes bytes = BYTES_INIT;
    struct peers *peers = NULL;
    struct liveness *l = NULL;
    enum status st;
    CHECK(rendezvous(o, &bytes, &peers));
    CHECK(liveness_start(peers, s->silence_s, on_loss, &own, &l));
    leave_sign(s, "ready", own.rank);
    if (s->failing && s->failing == own.rank)
        FAIL(ST_TORN, "no room left on the disk of %s", "this host");
    if (s->looks_never) clock_sleep_ms(s->check_ms);
    st = liveness_check(l, s->looks_never ? 0 : s->check_ms);
out:
    liveness_end(l, st);
    return st;
}

static void start_ranks(struct scene *s)
{
    char url[PATH_MAX + 8];
    snprintf(url, sizeof url, "file://%s", test_path(s->folder, "ranks"));
    const struct rendezvous_options o = {
        .url = url, .who = {.size = RANKS, .local_size = RANKS}, .version = "1", .timeout_s = 20};
    for (int rank = 0; rank < RANKS; rank++) rank_group_add(&s->group, &o, rank, work, s);
    for (int rank = 0; rank < RANKS; rank++) await_sign(s, "ready", rank);
}

static void signal_rank(struct scene *s, int rank, int number)
{
    s->signal_ns = clock_now_ns();
    assert_int_equal(kill(s->group.list[rank].pid, number), 0);
}

// All but `gone` end with a sentence that says how it went, and by which host and pid.
static void others_know(struct scene *s, int gone, const char *how)
{
    char sentence[2048], host[65] = "", name[128];
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "rank %d (%s, pid %d) ", gone, host, (int)s->group.list[gone].pid);
    for (int rank = 0; rank < RANKS; rank++) {
        if (rank == gone) continue;
        assert_int_equal(rank_group_outcome(&s->group, rank, sentence), ST_PEER_GONE);
        assert_contains(sentence, name);
        assert_contains(sentence, how);
        assert_true(sign_there(s, "lost", rank));
    }
}

static void all_end_well(struct scene *s)
{
    char sentence[2048];
    for (int rank = 0; rank < RANKS; rank++) {
        enum status st = rank_group_outcome(&s->group, rank, sentence);
        if (st != ST_OK) fail_msg("rank %d: %s", rank, sentence);
        assert_false(sign_there(s, "lost", rank));
    }
}

// ---- side by side -------------------------------------------------------------------------------

static pthread_t batch_system;

// It suspends a whole job, longer than any silence, and lets it go on.
static void *suspend(void *context)
{
    struct scene *s = context;
    for (int rank = 0; rank < RANKS; rank++) kill(s->group.list[rank].pid, SIGSTOP);
    clock_sleep_ms(4500);
    for (int rank = 0; rank < RANKS; rank++) kill(s->group.list[rank].pid, SIGCONT);
    return NULL;
}

static void begin_all(void)
{
    struct scene *const all[] = {&first_stopped, &last_stopped, &ten_seconds, &long_work,
                                 &all_stopped};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) open_scene(all[i]);
    ten_seconds.silence_s = LIVENESS_SILENCE_S;
    long_work.silence_s = 2;
    long_work.looks_never = true;
    long_work.check_ms = 5000;
    all_stopped.check_ms = 7000;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) start_ranks(all[i]);
    assert_int_equal(pthread_create(&batch_system, NULL, suspend, &all_stopped), 0);
    signal_rank(&ten_seconds, 1, SIGSTOP);
    signal_rank(&first_stopped, 0, SIGSTOP);
    signal_rank(&last_stopped, 3, SIGSTOP);
}

static void end_all(void)
{
    struct scene *const all[] = {&first_stopped, &last_stopped, &ten_seconds,
                                 &long_work,     &all_stopped,  &scene};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) rank_group_end(&all[i]->group);
}

// One that is stopped learns, once it goes on, that the others have gone.
TEST(test_stopped)
{
    static const struct {
        struct scene *scene;
        int victim;
    } cases[] = {{&first_stopped, 0}, {&last_stopped, 3}};
    for (size_t i = 0; i < 2; i++) {
        struct scene *s = cases[i].scene;
        const int victim = cases[i].victim;
        others_know(s, victim, "is gone: nothing was heard of it for 3 s");
        signal_rank(s, victim, SIGCONT);
        assert_int_equal(rank_group_outcome(&s->group, victim, NULL), ST_PEER_GONE);
    }
}

// Each works longer than the silence, without a look; they end one by one, and that is no loss.
TEST(test_long_work)
{
    all_end_well(&long_work);
}

// With the silence that programs wait for, all know within ten seconds.
TEST(test_ten_seconds)
{
    struct scene *s = &ten_seconds;
    others_know(s, 1, "is gone: nothing was heard of it for 6 s");
    for (int rank = 0; rank < RANKS; rank++) {
        SCOPED(bytes_release) struct bytes when = BYTES_INIT;
        if (rank == 1) continue;
        assert_ok(file_read(test_path(s->folder, test_text("lost-%d", rank)), 64, &when));
        assert_int_equal(when.len, sizeof(int64_t));
        assert_true(*(int64_t *)when.data - s->signal_ns < 10 * NS_PER_S);
    }
}

TEST(test_all_stopped)
{
    pthread_join(batch_system, NULL);
    all_end_well(&all_stopped);
}

// ---- quick --------------------------------------------------------------------------------------

TEST(test_killed)
{
    static const int victims[] = {0, 2};
    for (size_t i = 0; i < 2; i++) {
        open_scene(&scene);
        start_ranks(&scene);
        signal_rank(&scene, victims[i], SIGKILL);
        others_know(&scene, victims[i], "is gone: it was killed or ended without a word");
        rank_group_end(&scene.group);
    }
}

TEST(test_failed)
{
    open_scene(&scene);
    scene.failing = 2;
    start_ranks(&scene);
    others_know(&scene, 2, "has failed: no room left on the disk of this host");
    assert_int_equal(rank_group_outcome(&scene.group, 2, NULL), ST_TORN);
    rank_group_end(&scene.group);
}

TESTS_BETWEEN(begin_all, end_all)
