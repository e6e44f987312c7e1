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
    struct bytes bytes = BYTES_INIT;
    struct peers *peers = NULL;
    if (context) clock_sleep_ms(*(const int *)context);
    bytes_append(&bytes, o->who.rank == 0 ? GIFT : "mine", o->who.rank == 0 ? sizeof GIFT : 4);
    enum status st = rendezvous(o, &bytes, &peers);
    if (st == ST_OK && (bytes.len != sizeof GIFT || memcmp(bytes.data, GIFT, sizeof GIFT) != 0))
        st = status_fail(ST_FORMAT, "%zu bytes are not those of rank 0", bytes.len);
    peers_free(peers);
    bytes_release(&bytes);
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

static void all_are_told(int n, enum status code, const char *part)
{
    char sentence[2048];
    for (int i = 0; i < n; i++) {
        const enum status st = rank_group_outcome(&group, i, sentence);
        if (st != code) fail_msg("rank process %d: %s: %s", i, status_words(st), sentence);
        assert_contains(sentence, part);
    }
}

// ---- they meet ----------------------------------------------------------------------------------

TEST_WITH(test_meet_by_tcp, NULL, end_group, NULL)
{
    use_port();
    const struct rendezvous_options o = options_of(4, 20);
    for (int rank = 0; rank < 4; rank++) rank_group_add(&group, &o, rank, meet, NULL);
    all_meet(4);
}

TEST_WITH(test_meet_by_file, NULL, end_group, NULL)
{
    const char *path = use_file();
    struct rendezvous_options o = options_of(3, 20);
    static int late = 400;
    o.who.local_size = 0; // also on other hosts
    for (int rank = 0; rank < 3; rank++)
        rank_group_add(&group, &o, rank, meet, rank == 0 ? &late : NULL);
    all_meet(3);
    assert_false(file_exists(path)); // rank 0 has taken it away
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

static int listen_on(int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    a.sin_port = htons((uint16_t)port);
    assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 8) == 0);
    return fd;
}

// A file is there before rank 0 comes: of a run that ended, whose port is free, or is another's by
// now; of one with the same id, and of one with another.
TEST_WITH(test_stale_file, NULL, end_group, NULL)
{
    static int late = 600;
    static const char *const ids[] = {"run-1", "run-0", ""};
    for (size_t i = 0; i < 3; i++) {
        const int port = test_free_port();
        write_stale(use_file(), port, ids[i]);
        const struct rendezvous_options o = options_of(2, 20);
        rank_group_add(&group, &o, 1, meet, NULL);
        rank_group_add(&group, &o, 0, meet, &late);
        all_meet(2);
        end_group(NULL);
    }
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
    assert_int_equal(rank_group_outcome(&group, stranger, NULL), ST_OK);
}

TEST_WITH(test_stale_file_is_named, NULL, end_group, NULL)
{
    char sentence[2048];
    write_stale(use_file(), test_free_port(), "run-0");
    const struct rendezvous_options o = options_of(2, 0.3);
    rank_group_add(&group, &o, 1, meet, NULL);
    assert_int_equal(rank_group_outcome(&group, 0, sentence), ST_TIMEOUT);
    assert_contains(sentence, "is of another run (run-0)");
    assert_contains(sentence, "rank 0 was not to be reached");
}

// ---- they do not --------------------------------------------------------------------------------

TEST_WITH(test_missing_are_named, NULL, end_group, NULL)
{
    use_port();
    struct rendezvous_options o = options_of(5, 2);
    rank_group_add(&group, &o, 0, meet, NULL);
    o.timeout_s = 1; // this one gives up sooner, and has been told
    rank_group_add(&group, &o, 3, meet, NULL);
    char sentence[2048];
    assert_int_equal(rank_group_outcome(&group, 1, sentence), ST_TIMEOUT);
    assert_contains(sentence, "misses 1, 2, 4");
    assert_int_equal(rank_group_outcome(&group, 0, sentence), ST_TIMEOUT);
    assert_contains(sentence, "1 of 5 ranks came in time; missing: 1, 2, 3, 4");
    end_group(NULL);

    use_file();
    o.timeout_s = 1;
    rank_group_add(&group, &o, 0, meet, NULL);
    o.timeout_s = 20;
    rank_group_add(&group, &o, 3, meet, NULL);
    assert_int_equal(rank_group_outcome(&group, 0, sentence), ST_TIMEOUT);
    assert_int_equal(rank_group_outcome(&group, 1, sentence), ST_MISMATCH); // at once
    assert_contains(sentence, "2 of 5 ranks came in time; missing: 1, 2, 4");
}

TEST_WITH(test_every_mismatch_is_named, NULL, end_group, NULL)
{
    use_port();
    struct rendezvous_options o = options_of(4, 20), version = o, layout = o, size = o;
    version.version = "2";
    layout.layout = "xyz";
    size.who.size = 6;
    rank_group_add(&group, &o, 0, meet, NULL);
    rank_group_add(&group, &version, 1, meet, NULL);
    rank_group_add(&group, &layout, 2, meet, NULL);
    rank_group_add(&group, &size, 3, meet, NULL);
    char sentence[2048];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(rank_group_outcome(&group, i, sentence), ST_MISMATCH);
        assert_contains(sentence, "is of version 2, rank 0 of 1");
        assert_contains(sentence, "has weights of layout xyz, rank 0 of abc");
        assert_contains(sentence, "was started as one of 6 ranks, rank 0 as one of 4");
        assert_contains(sentence, "rank 1 (");
        assert_contains(sentence, "rank 2 (");
        assert_contains(sentence, "rank 3 (");
        assert_contains(sentence, "pid ");
    }
}

TEST_WITH(test_one_rank_twice, NULL, end_group, NULL)
{
    use_port();
    const struct rendezvous_options o = options_of(3, 20);
    rank_group_add(&group, &o, 0, meet, NULL);
    rank_group_add(&group, &o, 1, meet, NULL);
    rank_group_add(&group, &o, 1, meet, NULL);
    all_are_told(3, ST_MISMATCH, "two processes are started as one rank: rank 1 (");
}

TEST_WITH(test_rank_beyond_the_size, NULL, end_group, NULL)
{
    use_port();
    struct rendezvous_options o = options_of(3, 20), more = o;
    more.who.size = 9;
    rank_group_add(&group, &o, 0, meet, NULL);
    rank_group_add(&group, &more, 7, meet, NULL);
    all_are_told(2, ST_MISMATCH, "which was started as one of 3 ranks");
}

TEST_WITH(test_another_run_is_sent_away, NULL, end_group, NULL)
{
    use_port();
    struct rendezvous_options o = options_of(2, 20), other = o;
    char sentence[2048];
    strcpy(other.who.run_id, "run-2");
    rank_group_add(&group, &o, 0, meet, NULL);
    const int stranger = rank_group_add(&group, &other, 1, meet, NULL);
    assert_int_equal(rank_group_outcome(&group, stranger, sentence), ST_MISMATCH);
    assert_contains(sentence, "is of the run run-2, rank 0 of run-1");
    rank_group_add(&group, &o, 1, meet, NULL);
    assert_int_equal(rank_group_outcome(&group, 0, NULL), ST_OK);
    assert_int_equal(rank_group_outcome(&group, 2, NULL), ST_OK);
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
    assert_int_equal(rank_group_outcome(&group, 0, NULL), ST_OK);
    assert_int_equal(rank_group_outcome(&group, 2, NULL), ST_OK);
    assert_int_equal(rank_group_outcome(&group, 3, NULL), ST_OK);
}

// ---- trust --------------------------------------------------------------------------------------

TEST_WITH(test_port_in_use, NULL, end_group, NULL)
{
    struct bytes bytes = BYTES_INIT;
    struct peers *peers = NULL;
    const int port = use_port(), fd = listen_on(port);
    char name[32];
    const struct rendezvous_options o = options_of(2, 5);
    snprintf(name, sizeof name, "127.0.0.1:%d", port);
    assert_status(rendezvous(&o, &bytes, &peers), ST_BUSY);
    assert_message(name);
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

TEST_WITH(test_tokens, NULL, end_group, NULL)
{
    use_port();
    struct rendezvous_options o = options_of(2, 20), other = o, none = o;
    char sentence[2048];
    o.token = "the-right-word";
    other.token = "the-wrong-word";
    rank_group_add(&group, &o, 0, meet, NULL);
    const int wrong = rank_group_add(&group, &other, 1, meet, NULL),
              without = rank_group_add(&group, &none, 1, meet, NULL);
    for (int i = wrong; i <= without; i++) {
        assert_int_equal(rank_group_outcome(&group, i, sentence), ST_MISMATCH);
        assert_contains(sentence, "--rendezvous-token-file is not that of rank 0");
    }
    const int right = rank_group_add(&group, &o, 1, meet, NULL);
    assert_int_equal(rank_group_outcome(&group, right, NULL), ST_OK);
    assert_int_equal(rank_group_outcome(&group, 0, NULL), ST_OK);
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
