/* test_rendezvous.c: common/ranks/rendezvous.h with forked processes as ranks: who meets, what they
 * are given, and what every one of them is told where something is amiss. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/rank_group.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#define GIFT "bytes\0of rank 0"

static struct rank_group group;
static char url[PATH_MAX + 8];

static int end_group(void **state)
{
    (void)state;
    rank_group_end(&group);
    return 0;
}

static struct rendezvous_options options_of(int size, double timeout_s)
{
    return (struct rendezvous_options){.url = url,
                                       .who = {.size = size, .local_size = size, .run_id = "run-1"},
                                       .version = "1",
                                       .layout = "abc",
                                       .timeout_s = timeout_s};
}

static const char *use_file(void)
{
    const char *path = test_path(test_folder(), "ranks");
    snprintf(url, sizeof url, "file://%s", path);
    return path;
}

static int use_port(void)
{
    const int port = test_free_port();
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    return port;
}

// Meets, and compares what it was given; `context`: how many milliseconds it comes late.
static enum status meet(const struct rendezvous_options *o, void *context)
{
    SCOPED(bytes_release) struct bytes bytes = BYTES_INIT;
    struct peers *peers = NULL;
    if (context) clock_sleep_ms(*(const int *)context);
    bytes_append(&bytes, o->who.rank == 0 ? GIFT : "mine", o->who.rank == 0 ? sizeof GIFT : 4);
    enum status st = rendezvous(o, &bytes, &peers);
    if (st == ST_OK && (bytes.len != sizeof GIFT || memcmp(bytes.data, GIFT, sizeof GIFT) != 0))
        st = status_fail(ST_FORMAT, "%zu bytes are not those of rank 0", bytes.len);
    peers_free(peers);
    return st;
}

// One that fails before it has met; `context` as above.
static const char *failure = "there is no such model";
static enum status give_up(const struct rendezvous_options *o, void *context)
{
    if (context) clock_sleep_ms(*(const int *)context);
    const enum status st = status_fail(ST_NOT_FOUND, "%s", failure);
    rendezvous_give_up(o, st);
    return st;
}

static void all_meet(int n)
{
    char sentence[2048];
    for (int i = 0; i < n; i++) {
        enum status st = rank_group_outcome(&group, i, sentence);
        if (st != ST_OK) fail_msg("rank process %d: %s: %s", i, status_words(st), sentence);
    }
}

static void write_stale(const char *path, int port, const char *run_id)
{
    char text[256];
    const int n = snprintf(text, sizeof text,
                           "{\"addresses\": [\"127.0.0.1:%d\"], \"token\": \"00112233\", "
                           "\"run_id\": \"%s\"}",
                           port, run_id);
    test_write(path, text, (size_t)n);
}

// ---- they meet, or do not -----------------------------------------------------------------------

// One process of a scene: in what it differs from the others, and what becomes of it. `behind`: it
// is started once the one before it has ended.
struct part {
    struct rendezvous_options options;
    enum status status;
    json_t *says;
    int late_ms, behind;
    bool ended;
};

static void read_part(const json_t *parts, size_t i, int size, bool elsewhere, struct part *ret)
{
    const char *run_id = "run-1", *status = NULL;
    *ret = (struct part){.options = options_of(size, 20)};
    struct rendezvous_options *o = &ret->options;
    o->who.local_size = elsewhere ? 0 : size;
    assert_int_equal(json_unpack(json_array_get(parts, i),
                                 "{s:i, s?i, s?s, s?s, s?s, s?s, s?F, s?i, s?b, s?s, s?o !}",
                                 "rank", &o->who.rank, "size", &o->who.size, "version", &o->version,
                                 "layout", &o->layout, "run_id", &run_id, "token", &o->token,
                                 "timeout_s", &o->timeout_s, "late_ms", &ret->late_ms, "behind",
                                 &ret->behind, "status", &status, "says", &ret->says),
                     0);
    strcpy(o->who.run_id, run_id);
    if (status) ret->status = row_status(parts, i, "status");
}

// Its status and sentence are as they should be; once.
static void check_end(const char *scene, int i, struct part *p)
{
    char sentence[2048];
    const json_t *one;
    size_t k;
    if (p->ended) return;
    p->ended = true;
    const enum status st = rank_group_outcome(&group, i, sentence);
    if (st != p->status) fail_msg("%s: process %d: %s: %s", scene, i, status_words(st), sentence);
    json_array_foreach (p->says, k, one) assert_contains(sentence, json_string_value(one));
}

static void play(const json_t *scene)
{
    enum { MOST = 6 };
    const char *name, *stale = NULL, *where = "tcp";
    json_t *parts;
    int size, elsewhere = 0;
    struct part list[MOST];
    assert_int_equal(json_unpack((json_t *)scene, "{s:s, s:i, s?s, s?s, s?b, s:o !}", "name", &name,
                                 "size", &size, "url", &where, "stale", &stale, "elsewhere",
                                 &elsewhere, "parts", &parts),
                     0);
    const char *path = strcmp(where, "file") == 0 ? use_file() : NULL;
    const int n = (int)json_array_size(parts);
    assert_in_range(n, 1, MOST);
    if (!path) use_port();
    if (stale) write_stale(path, test_free_port(), stale);
    for (int i = 0; i < n; i++) {
        struct part *p = &list[i];
        read_part(parts, (size_t)i, size, elsewhere, p);
        if (p->behind) check_end(name, i - 1, p - 1);
        rank_group_add(&group, &p->options, p->options.who.rank, meet,
                       p->late_ms ? &p->late_ms : NULL);
    }
    for (int i = 0; i < n; i++) check_end(name, i, &list[i]);
    if (elsewhere) assert_false(file_exists(path)); // rank 0 has taken it away
    rank_group_end(&group);
}

TEST_WITH(test_scenes, NULL, end_group, NULL)
{
    const json_t *scenes = test_rows("rendezvous", "scenes"), *scene;
    size_t i;
    json_array_foreach (scenes, i, scene) play(scene);
}

// The earlier run's port belongs to another job, whose rank 0 waits for its own there.
TEST_WITH(test_stale_file_of_a_taken_port, NULL, end_group, NULL)
{
    static int late = 600;
    struct rendezvous_options other = options_of(2, 20), o = options_of(2, 20);
    char other_url[64];
    const int port = test_free_port();
    snprintf(other_url, sizeof other_url, "tcp://127.0.0.1:%d", port);
    other.url = other_url;
    write_stale(use_file(), port, "run-1");
    rank_group_add(&group, &o, 1, meet, NULL);
    rank_group_add(&group, &o, 0, meet, &late);
    const int stranger = rank_group_add(&group, &other, 0, meet, NULL);
    all_meet(2);
    rank_group_add(&group, &other, 1, meet, NULL); // which was not disturbed
    assert_ok(rank_group_outcome(&group, stranger, NULL));
}

// A rank that dies while others are waited for is missing again, and may come again.
TEST_WITH(test_gone_before_all_came, NULL, end_group, NULL)
{
    use_port();
    const struct rendezvous_options o = options_of(3, 20);
    static int late = 700;
    rank_group_add(&group, &o, 0, meet, NULL);
    rank_group_add(&group, &o, 1, meet, NULL);
    clock_sleep_ms(300);
    kill(group.list[1].pid, SIGKILL);
    rank_group_add(&group, &o, 1, meet, &late);
    rank_group_add(&group, &o, 2, meet, &late);
    assert_int_equal(rank_group_outcome(&group, 1, NULL), ST_CANCELLED);
    assert_ok(rank_group_outcome(&group, 0, NULL));
    assert_ok(rank_group_outcome(&group, 2, NULL));
    assert_ok(rank_group_outcome(&group, 3, NULL));
}

// Whichever it is, whenever: those that are there, and one that comes later, end with its sentence.
TEST_WITH(test_one_that_fails_ends_all, NULL, end_group, NULL)
{
    static int late[] = {0, 700}, last = 1500;
    for (int i = 0; i < 4; i++) {
        char sentence[2048], name[16];
        const int failing = i / 2;
        const struct rendezvous_options o = options_of(3, 60);
        const int64_t start_ns = clock_now_ns();
        use_file();
        snprintf(name, sizeof name, "rank %d (", failing);
        rank_group_add(&group, &o, failing, give_up, &late[i % 2]);
        rank_group_add(&group, &o, 1 - failing, meet, NULL);
        rank_group_add(&group, &o, 2, meet, &last);
        assert_int_equal(rank_group_outcome(&group, 0, sentence), ST_NOT_FOUND);
        assert_string_equal(sentence, "there is no such model");
        for (int k = 1; k < 3; k++) {
            assert_int_equal(rank_group_outcome(&group, k, sentence), ST_PEER_GONE);
            assert_contains(sentence, name);
            assert_contains(sentence, ") has failed: there is no such model");
        }
        assert_true(clock_ms_since(start_ns) < 10000);
        rank_group_end(&group);
        group = (struct rank_group){0};
    }
}

// Of another run of the same file, and where nobody knows the run, nothing is left.
TEST_WITH(test_another_runs_failure_ends_none, NULL, end_group, NULL)
{
    for (int i = 0; i < 2; i++) {
        struct rendezvous_options o = options_of(2, 20), other = options_of(2, 20);
        use_file();
        strcpy(other.who.run_id, i ? "" : "run-0");
        if (i) strcpy(o.who.run_id, "");
        rank_group_add(&group, &other, 1, give_up, NULL);
        rank_group_outcome(&group, 0, NULL);
        rank_group_add(&group, &o, 1, meet, NULL);
        rank_group_add(&group, &o, 0, meet, NULL);
        assert_ok(rank_group_outcome(&group, 1, NULL));
        assert_ok(rank_group_outcome(&group, 2, NULL));
        rank_group_end(&group);
        group = (struct rank_group){0};
    }
}

// A job that begins again, as requeued ones of Slurm and torchrun's do, has the id that it had:
// what failed before it was there ends none of its ranks.
TEST_WITH(test_an_earlier_trys_failure_ends_none, NULL, end_group, NULL)
{
    struct rendezvous_options o = options_of(2, 20);
    use_file();
    rank_group_add(&group, &o, 1, give_up, NULL);
    rank_group_outcome(&group, 0, NULL);
    o.who.since_ms = clock_wall_ms(); // its ranks begin when that is over
    rank_group_add(&group, &o, 1, meet, NULL);
    rank_group_add(&group, &o, 0, meet, NULL);
    for (int i = 1; i < 3; i++) assert_ok(rank_group_outcome(&group, i, NULL));
}

// Rank 0 may have looked before, and write its address over the sentence, whatever is in that.
TEST_WITH(test_a_failure_is_not_written_over, NULL, end_group, NULL)
{
    static const char address[] = "{\"addresses\": [], \"token\": \"a\", \"run_id\": \"run-1\"}";
    const struct rendezvous_options o = options_of(2, 20);
    const char *path = use_file();
    failure = "there is no such model: \xff";
    rank_group_add(&group, &o, 1, give_up, NULL);
    failure = "there is no such model";
    while (!file_exists(path)) clock_sleep_ms(1);
    assert_ok(file_write_atomic(path, 0600, address, sizeof address - 1));
    assert_int_equal(rank_group_outcome(&group, 0, NULL), ST_NOT_FOUND);
    assert_contains(test_read(path), "there is no such model: ?");
}

// ---- trust --------------------------------------------------------------------------------------

static int listen_on(int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    a.sin_port = htons((uint16_t)port);
    assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 8) == 0);
    return fd;
}

TEST_WITH(test_port_in_use, NULL, end_group, NULL)
{
    struct bytes bytes = BYTES_INIT;
    struct peers *peers = NULL;
    const int port = use_port(), fd = listen_on(port);
    char name[32];
    const struct rendezvous_options o = options_of(2, 5);
    snprintf(name, sizeof name, "127.0.0.1:%d", port);
    assert_fails(rendezvous(&o, &bytes, &peers), ST_BUSY, name);
    assert_message("another program listens there already");
    close(fd);
}

TEST_WITH(test_bad_places, NULL, end_group, NULL)
{
    const json_t *cases = test_rows("rendezvous", "test_bad_places");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct bytes bytes = BYTES_INIT;
        struct peers *peers = NULL;
        struct rendezvous_options o = options_of(2, 5);
        o.url = row_text(cases, i, "url");
        o.token = row_text(cases, i, "token");
        assert_int_not_equal(rendezvous(&o, &bytes, &peers), ST_OK);
        assert_message(row_text(cases, i, "part"));
        assert_null(peers);
    }
}

static void handshake(int port, const void *data, size_t len, int times)
{
    for (int i = 0; i < times; i++) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        a.sin_port = htons((uint16_t)port);
        assert_true(fd >= 0);
        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0) send(fd, data, len, MSG_NOSIGNAL);
        close(fd);
    }
}

// What scanners of ports send, lengths that would fill memory, and a made-up mac.
TEST_WITH(test_strangers_do_not_disturb, NULL, end_group, NULL)
{
    const int port = use_port();
    const struct rendezvous_options o = options_of(2, 20);
    unsigned char big[64], sealed[40] = {0, 0, 0, 2};
    memset(big, 0xff, sizeof big);
    memcpy(sealed + 36, "{}", 3);
    rank_group_add(&group, &o, 0, meet, NULL);
    clock_sleep_ms(200);
    handshake(port, "GET / HTTP/1.1\r\n\r\n", 18, 100);
    handshake(port, big, sizeof big, 20);
    handshake(port, sealed, 38, 20);
    handshake(port, "", 0, 100);
    rank_group_add(&group, &o, 1, meet, NULL);
    all_meet(2);
}

// Connections that say nothing, more than there are places for, keep nobody out.
TEST_WITH(test_silent_crowd, NULL, end_group, NULL)
{
    enum { MANY = 300 };
    static int fds[MANY];
    const int port = use_port();
    const struct rendezvous_options o = options_of(2, 20);
    rank_group_add(&group, &o, 0, meet, NULL);
    clock_sleep_ms(200);
    for (int i = 0; i < MANY; i++) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        a.sin_port = htons((uint16_t)port);
        assert_int_equal(connect(fds[i], (struct sockaddr *)&a, sizeof a), 0);
    }
    const int64_t since = clock_now_ns();
    rank_group_add(&group, &o, 1, meet, NULL);
    all_meet(2);
    assert_true(clock_ms_since(since) < 8000); // before the first of them has had its time
    for (int i = 0; i < MANY; i++) close(fds[i]);
}
